"""A lab whose nodes are containers: each with a network of its own, and a private network for each two of them, which can be cut.

    with ContainerLab({"east": 2}, directory) as lab:
        lab.cut("e1", "e2")        both live, and clients reach both; neither reaches the other
        lab.heal("e1", "e2")
        lab.swallow("e1", "e2")    what e1 sends to e2 is lost, and nothing else; `let_through` ends it. Needs root
        lab.stop("e1")             docker pause; `kill` is docker kill, `start` docker start

Rules:
1. A node is a pod: a container that holds the network (and epmd), and in that network one container for the broker and one for the sidecar, which
   so find each other on 127.0.0.1 whatever is cut. Clients of the lab come in by published ports.
2. No image is fetched and none is built: a container sees this machine's programs, the brokers of `lrq_ha.lab` and this very code, read-only,
   and the lab's folder. Its image holds nothing but what makes a root folder of that.
3. All else is Lab's: its files, its waits, its names for faults.
4. Whoever makes a lab removes its containers and networks; where a test run is interrupted or killed, its janitor does.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, cast

# Its helper is an image that would have to be fetched; see rule 4.
os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"

import docker
import janitor
import requests
from docker.errors import APIError, ContainerError, DockerException, ImageNotFound, NotFound
from docker.models.containers import Container
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from lrq_ha.lab import Lab, LabError, files

OWNER = "lrq-ha.test-run"
_IMAGE = "lrq-ha-bare"
_OPEN_FILES_MAX = 65_536
PAUSE_TIMEOUT_S = 20.0
PAUSE_AGAIN_S = 0.1
#: What a root folder has beside /usr, as it is on this machine.
_ROOT_FOLDERS = ("bin", "sbin", "lib", "lib64", "lib32")
_ETC = ("passwd", "group", "nsswitch.conf", "ld.so.cache")


def why_not(directory: Path) -> str:
    """Why containers cannot be used for labs in a folder; empty if they can be."""
    try:
        client = docker.from_env(timeout=60)
    except (DockerException, requests.RequestException) as error:
        return f"no Docker daemon answers here ({str(error).splitlines()[0][:120]})"
    try:
        client.ping()
        witness = directory / "seen-by-docker"
        witness.write_text("yes")
        client.containers.run(bare_image(client), ["/usr/bin/test", "-s", str(witness)], network_mode="none", remove=True, labels=_labels(),
                              volumes=volumes([*programs(), *root_folders()], directory))
        return ""
    except ContainerError:
        return "the Docker daemon shows containers other files than this machine's"
    except (DockerException, requests.RequestException) as error:
        return f"the Docker daemon cannot run this machine's programs in a container ({str(error)[:200]})"
    finally:
        client.close()


def why_not_swallow() -> str:
    """Why `ContainerLab.swallow` cannot be used here; empty if it can be."""
    if os.geteuid():
        return "only root may drop a container's packets"
    missing = [program for program in ("nsenter", "iptables") if shutil.which(program) is None]
    return f"there is no {' and no '.join(missing)} here" if missing else ""


class ContainerLab(Lab):
    """See the top of this file. Takes what `Lab` takes but TLS."""

    def __init__(self, groups: dict[str, int], directory: Path, broker: str | None = None, **options: Any) -> None:
        super().__init__(groups, directory, broker, **options)
        self._docker = docker.from_env(timeout=120)
        self._links: dict[frozenset[str], Network] = {}
        self._own: dict[str, Network] = {}
        self._pods: dict[str, DockerContainer] = {}
        self._made: dict[str, DockerContainer] = {}
        self._swallowed: set[tuple[str, str]] = set()

    # -- faults of the network

    def cut(self, one: str, other: str) -> None:
        """Neither of two nodes reaches the other any more, and packets that are under way are lost. Clients reach both."""
        self._docker.networks.get(self._links[frozenset((one, other))].name).disconnect(self._pods[one].get_container_id())

    def heal(self, one: str, other: str) -> None:
        """The end of a `cut`."""
        self._links[frozenset((one, other))].connect(self._pods[one].get_container_id(), [one])

    def swallow(self, sender: str, receiver: str) -> None:
        """Packets from one node to another are lost on their way, those of the other direction arrive. Clients reach both."""
        self._drop("--append", sender, receiver)
        self._swallowed.add((sender, receiver))

    def let_through(self, sender: str, receiver: str) -> None:
        """The end of `swallow`."""
        self._drop("--delete", sender, receiver)
        self._swallowed.discard((sender, receiver))

    def _drop(self, what: str, sender: str, receiver: str) -> None:
        link = self._docker.networks.get(self._links[frozenset((sender, receiver))].name)
        address = link.attrs["Containers"][self._pods[sender].get_container_id()]["IPv4Address"].partition("/")[0]
        inside = str(self._docker.containers.get(self._pods[receiver].get_container_id()).attrs["State"]["Pid"])
        rule = ["iptables", "--wait", what, "INPUT", "--source", address, "--jump", "DROP"]
        subprocess.run(["nsenter", "--target", inside, "--net", *rule], check=True, capture_output=True)

    def recover(self) -> None:
        """Ends what a test that failed has left: pauses, cuts, and parts that do not run."""
        for name in self.nodes:
            for part in ("broker", "sidecar"):
                if self._runs(f"{name}.{part}"):
                    _go_on(self._made[f"{name}.{part}"].get_wrapped_container())
        for sender, receiver in tuple(self._swallowed):
            self.let_through(sender, receiver)
        for pair, link in self._links.items():
            network = self._docker.networks.get(link.name)
            for name in pair:
                if self._pods[name].get_container_id() not in network.attrs["Containers"]:
                    network.connect(self._pods[name].get_container_id(), aliases=[name])
        for name in self.nodes:
            if not all(self._runs(f"{name}.{part}") for part in ("broker", "sidecar")):
                self.start(name)

    # -- where Lab asks its keeper

    def _plan(self, *arguments: Any) -> files.NodePlan:
        plan = super()._plan(*arguments)
        return replace(plan, listens_on="0.0.0.0", host=plan.name)

    def _check_ports(self, key: str) -> None:
        """They are published, so Docker holds them."""

    def _begin(self, deadline: float) -> None:
        [(label, owner)] = _labels().items()
        janitor.watch(f"{label}={owner}")
        for name in self.nodes:
            self._own[name] = self._network()
        for pair in combinations(self.nodes, 2):
            # Without a way out: what is cut here must not find another way, through the host.
            self._links[frozenset(pair)] = self._network(internal=True)
        for name, plan in self._plans.items():
            # A name that is cut off is unknown at once: no name server outside is asked for it.
            pod = self._container(files.epmd_command(self._installation, plan.epmd_port), dns=["127.0.0.1"]).with_network(self._own[name])
            published: dict[str, Any] = {f"{port}/tcp": ("127.0.0.1", port) for port in (plan.broker_port, plan.door_port, plan.http_port)}
            pod.ports = published
            self._pods[name] = pod
            pod.start()
            for ends, link in self._links.items():
                if name in ends:
                    link.connect(pod.get_container_id(), [name])

    def _ask(self, **request: Any) -> dict[str, Any]:
        handlers: dict[str, Callable[..., dict[str, Any]]] = {"list": self._list, "spawn": self._spawn, "signal": self._send_signal, "end": self._end}
        return handlers[request.pop("do")](**request)

    def _list(self) -> dict[str, Any]:
        found = {}
        for key, made in self._made.items():
            container = made.get_wrapped_container()
            container.reload()
            state = container.attrs["State"]
            found[key] = {"pid": state["Pid"], "exit": None if state["Running"] else state["ExitCode"]}
        return found

    def _spawn(self, key: str, argv: Iterable[str] = (), env: dict[str, str] | None = None, cwd: str = "", log: str = "") -> dict[str, Any]:
        if key in self._made:
            self._made[key].get_wrapped_container().start()
            return {}
        pod = self._pods[key.partition(".")[0]].get_container_id()
        # As the keeper does: more open files would only cost. Docker's own way of it takes rights that not every daemon has.
        shell = ["/bin/sh", "-c", f'ulimit -n {_OPEN_FILES_MAX} 2>/dev/null; exec "$@" >>"$0" 2>&1', log, *argv]
        self._made[key] = self._container(shell, network_mode=f"container:{pod}", working_dir=cwd)
        self._made[key].with_envs(**env or {}).start()
        return {}

    def _send_signal(self, key: str, number: int) -> dict[str, Any]:
        container: Container = self._made[key].get_wrapped_container()
        if number == signal.SIGKILL:
            container.kill()
            container.wait()
        elif number == signal.SIGSTOP:
            _pause(container)
        elif number == signal.SIGCONT:
            _go_on(container)
        return {}

    def _end(self) -> dict[str, Any]:
        for container in (*self._made.values(), *self._pods.values()):
            with suppress(NotFound):
                container.stop()
        for network in (*self._own.values(), *self._links.values()):
            with suppress(NotFound):
                network.remove()
        for kept in (self._made, self._pods, self._own, self._links):
            kept.clear()
        return {}

    def ctl(self, name: str, *arguments: str) -> str:
        """As Lab's, in the broker's container."""
        code, said = self._made[f"{name}.broker"].get_wrapped_container().exec_run(
            [str(self._installation.sbin / "rabbitmqctl"), "--quiet", *arguments])
        if code != 0:
            raise LabError(f"rabbitmqctl {' '.join(arguments)} failed on {name}: {said.decode(errors='replace')}")
        return str(said.decode())

    # -- making

    def _network(self, **options: Any) -> Network:
        return Network(docker_network_kw={"labels": _labels(), **options}).create()

    def _container(self, command: list[str], **options: Any) -> DockerContainer:
        container = DockerContainer(bare_image(self._docker), command=cast("Any", command))  # Docker takes lists, too
        container.volumes = volumes([*programs(self._installation.erlang_bin.parent), *root_folders()], self.directory)
        return container.with_kwargs(labels=_labels(), user=f"{os.getuid()}:{os.getgid()}", **options)


def bare_image(client: docker.DockerClient) -> str:
    """An image of this machine's links in / and its users, some kilobytes; everything else is mounted."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("tmp", "etc", "usr"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(folder)
        for name in _ROOT_FOLDERS:
            if (place := Path("/", name)).is_symlink():
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, os.readlink(place)
                tar.addfile(link)
        for name in _ETC:
            if (place := Path("/etc", name)).exists():
                entry = tarfile.TarInfo(f"etc/{name}")
                entry.size, entry.mode = len(content := place.read_bytes()), 0o644
                tar.addfile(entry, io.BytesIO(content))
    tag = f"{_IMAGE}:{hashlib.sha256(buffer.getvalue()).hexdigest()[:12]}"
    try:
        client.images.get(tag)
    except ImageNotFound:
        client.api.import_image_from_data(buffer.getvalue(), repository=_IMAGE, tag=tag.partition(":")[2])
    return tag


def root_folders() -> Iterator[Path]:
    """Folders in / that are no links, on a machine where they are not."""
    return (place for name in _ROOT_FOLDERS if (place := Path("/", name)).is_dir() and not place.is_symlink())


def programs(*more: Path) -> list[Path]:
    """What has to be seen by containers: the system's programs, this Python with its packages, this code, and `more`."""
    code = [Path(files.__file__).resolve().parents[2], *(Path(place) for place in os.environ.get("PYTHONPATH", "").split(":") if place)]
    wanted = {place for place in (Path("/usr"), Path(sys.prefix), Path(sys.base_prefix), *code, *more) if place.is_dir()}
    return sorted(place for place in wanted if not any(other in place.parents for other in wanted))


def _pause(container: Container) -> None:
    """As docker pause; where the kernel's freezer cannot, as SIGSTOP of all that matters: its first process, which is the broker or the sidecar.

    The freezer gives up, and lets all go on, while a process is held up in the kernel, as by a slow disk. Then it is tried again for a while.
    """
    deadline = time.monotonic() + PAUSE_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            container.pause()
            return
        except APIError as error:
            if "unable to freeze" not in str(error):
                raise
        time.sleep(PAUSE_AGAIN_S)
    container.kill(signal="SIGSTOP")


def _go_on(container: Container) -> None:
    """The end of `_pause`; nothing happens to one that was not paused."""
    container.reload()
    if container.status == "paused":
        container.unpause()
    else:
        container.kill(signal="SIGCONT")


def volumes(read_only: Iterable[Path], directory: Path) -> dict[str, Any]:
    """What a container sees: places that it only reads, and a folder to write to."""
    return {str(place): {"bind": str(place), "mode": "ro"} for place in read_only} | {str(directory): {"bind": str(directory), "mode": "rw"}}


def left() -> list[str]:
    """Containers that labs of this process have not removed."""
    with closing(docker.from_env(timeout=120)) as client:
        [(label, owner)] = _labels().items()
        return [container.name for container in client.containers.list(all=True, filters={"label": f"{label}={owner}"})]


def _labels() -> dict[str, str]:
    return {OWNER: f"{socket.gethostname()} {os.getpid()} {_started(os.getpid())}"}


def _started(pid: int) -> str:
    """When a process was started, in the kernel's ticks; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
