"""A lab: groups of nodes, each a private RabbitMQ broker and its sidecar, on free loopback ports.

Rules:

- Every process belongs to the lab's keeper (see `keeper`), so the lab ends with the process that made it.
- `lab.json` in the lab's folder is written once all is ready and holds all data that another process needs for `Lab.attach`.
- Brokers start in parallel.
- Methods may be called from any thread.
"""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lrq_ha.lab import brokers, etcd, files, folder, keeper, probe
from lrq_ha.lab.certificates import Authority
from lrq_ha.lab.errors import LabError, NoLab
from lrq_ha.lab.node import LabNode
from lrq_ha.lab.ports import free_ports, is_free
from lrq_ha.routing.names import NAME_RULE, is_name

READY_TIMEOUT_S = 240.0
_POLL_S = 0.05
_PARTS = ("broker", "sidecar")
_READY_ROLES = ("active", "ready")


class Lab:
    """Private brokers and sidecars. Use it as a context manager, or call `up` and `down`.

    Args:
        groups: Number of nodes of each group.
        directory: Folder for everything the lab writes; a temporary one, removed by `down`, if it is None.
        broker: RabbitMQ series, as "3.10" or "4.3"; the distribution's own if it is None.
        sites: Destination groups of each group; all others if it is None.
        brokers_only: Leave out the sidecars; their ports are still allotted and their configurations written.
        vhosts: More vhosts, on which both users have all rights.
        plugins: Broker plugins to enable; rabbitmq_management listens on a port of its own.
        definitions: What operators set at a broker that the sidecars replicate, as "users"; needs rabbitmq_management.
        tls: Doors take TLS only, and all connections of the sidecars use TLS; see `authority`.
        proxy_protocol: The brokers expect the PROXY protocol from every client.
        door: More keys of every sidecar's [door].
        coordination: Keys of every sidecar's [coordination]: etcd coordinates. Without `endpoints` the lab has one. None: static coordination.
        settings: More settings of every broker's rabbitmq.conf, or other values; an empty one leaves a setting out.

    Attributes:
        authority: The CA that signs certificates in a lab with TLS; None in any other, and in one that another process runs.
        ca: The authority's certificate (PEM), in any lab with TLS.
        etcd: Addresses of etcd; empty with static coordination.
    """

    def __init__(self, groups: Mapping[str, int], directory: Path | None = None, broker: str | None = None,
                 sites: Mapping[str, Sequence[str]] | None = None, *, brokers_only: bool = False,
                 vhosts: Sequence[str] = (), plugins: Sequence[str] = (), definitions: Sequence[str] = (),
                 tls: bool = False, proxy_protocol: bool = False,
                 door: Mapping[str, Any] | None = None, settings: Mapping[str, str] | None = None,
                 coordination: Mapping[str, Any] | None = None) -> None:
        _check_groups(groups, sites or {})
        self._groups = dict(groups)
        self._sites = {group: list(sites.get(group, ())) if sites is not None else [other for other in groups if other != group]
                       for group in groups}
        self._installation = brokers.find(broker)
        self._temporary = self._claimed = directory is None
        self.directory = (directory or Path(tempfile.mkdtemp(prefix="lrq-lab-"))).absolute()
        self._brokers_only, self._vhosts, self._plugins = brokers_only, vhosts, plugins
        self._definitions = definitions
        self._tls, self._proxied, self._door = tls, proxy_protocol, dict(door or {})
        self._settings = dict(settings or {})
        self._coordination = None if coordination is None else dict(coordination)
        self.etcd: list[str] = list((coordination or {}).get("endpoints", ()))
        self._etcd_command: list[str] = []
        self.authority: Authority | None = None
        self.ca: Path | None = None
        self._plans: dict[str, files.NodePlan] = {}
        self._ports: Generator[int] | None = None  # holds the ports that it has given out
        self._keeper: subprocess.Popen[bytes] | None = None
        self._write_lock = threading.Lock()
        self._primaries: dict[str, str | None] = dict.fromkeys(groups)
        self.nodes: dict[str, LabNode] = {}

    @classmethod
    def attach(cls, directory: Path) -> Self:
        """A lab that another process runs in `directory`. It does not end with this object.

        Raises:
            LabError: No lab runs there.
        """
        keeper.ask(directory, do="list")
        try:
            written: dict[str, Any] = json.loads((directory / keeper.LAB_FILE).read_text())
        except FileNotFoundError as error:
            raise LabError(f"The lab in {directory} is still starting", todo="Try again in a moment", retriable=True) from error
        groups, ca = written["groups"], written.get("ca")
        lab = cls.__new__(cls)
        lab._groups = {group: len(entry["nodes"]) for group, entry in groups.items()}
        lab.directory, lab._temporary, lab._keeper, lab._plans, lab._ports = directory.absolute(), False, None, {}, None
        lab._claimed = True
        lab.etcd, lab._coordination = written.get("etcd", []), None
        lab.authority, lab.ca, lab._proxied = None, Path(ca) if ca else None, False
        lab._write_lock = threading.Lock()
        lab._primaries = {group: entry["primary"] for group, entry in groups.items()}
        lab.nodes = {
            name: LabNode.from_entry(name, group, node, lab.directory)
            for group, entry in groups.items() for name, node in entry["nodes"].items()}
        return lab

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.down()

    # -- up and down

    @property
    def version(self) -> str:
        """Full version of the brokers, as "3.10.8"."""
        return self._installation.version

    def up(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Starts everything and returns when every broker answers and every sidecar is active or ready.

        Raises:
            LabError: Something did not start; the text has an excerpt of its log, and nothing is left running.
        """
        self.prepare()
        deadline = time.monotonic() + timeout_s
        try:
            self._begin(deadline)
            self._spawn_all("broker")
            for name in self.nodes:
                self._wait_part(f"{name}.broker", deadline)
            if not self._brokers_only:
                self._spawn_all("sidecar")
                for name in self.nodes:
                    self._wait(f"{name}.sidecar", partial(self._is_ready, name), deadline)
                self._primaries = {group: self.primary(group) for group in self._groups}
            self._write()
        except BaseException:
            self.down()
            raise

    def prepare(self) -> None:
        """Draws ports and writes every node's files, as `up` does first; nothing is started.

        Raises:
            LabError: The folder has other things in it, or a lab runs in it.
        """
        if self._plans:
            return
        folder.claim(self.directory)
        self._claimed = True
        self._ports = ports = free_ports()
        epmd_port = next(ports)
        if self._coordination is not None and not self.etcd:
            self.etcd = [f"http://127.0.0.1:{next(ports)}"]
            self._etcd_command = etcd.command(self.directory / "etcd", _port(self.etcd[0]), next(ports))
        letters = [group[0] for group in self._groups]
        for group, count in self._groups.items():
            prefix = group[0] if letters.count(group[0]) == 1 else group
            for number in range(1, count + 1):
                name = f"{prefix}{number}"
                self._plans[name] = self._plan(name, number, group, ports, epmd_port)
        passwords = {user: secrets.token_hex(8) for user in (files.APP_USER, files.SIDECAR_USER)}
        cookie = secrets.token_hex(16)
        for plan in self._plans.values():
            files.write_broker(plan, self._installation, passwords, self._vhosts, self._plugins, cookie, self._settings)
            files.write_sidecar(plan, [peer for peer in self._of(plan.group) if peer is not plan],
                                {site: self._of(site) for site in self._sites[plan.group]}, passwords, self._door, self._definitions,
                                None if self._coordination is None else {"endpoints": self.etcd, **self._coordination})
            self.nodes[plan.name] = LabNode(
                plan.name, plan.group, plan.url(plan.door_port, files.APP_USER, passwords),
                plan.url(plan.broker_port, files.APP_USER, passwords), f"http://127.0.0.1:{plan.http_port}",
                plan.config, plan.sidecar_log, plan.broker_log, self.directory)

    def _plan(self, name: str, number: int, group: str, ports: Iterator[int], epmd_port: int) -> files.NodePlan:
        plan = files.NodePlan(name, number, group, self.directory / name, next(ports), next(ports), next(ports), next(ports), epmd_port,
                              management_port=next(ports) if "rabbitmq_management" in self._plugins else 0, proxied=self._proxied)
        if not self._tls:
            return plan
        self.authority = self.authority or Authority(self.directory / "certificates")
        self.ca = self.authority.ca
        certificate, key = self.authority.issue(name)
        return replace(plan, tls_port=next(ports), ca=self.ca, certificate=certificate, key=key)

    def down(self) -> None:
        """Kills every process of the lab and deletes the brokers' data; logs and configurations stay. Nothing happens if it is down.

        If another lab runs in the folder, and this one was refused: that lab stays.
        """
        if self._keeper is not None:
            if self._keeper.stdin is not None:
                self._keeper.stdin.close()
            self._keeper.wait()
            if self._keeper.stdout is not None:
                self._keeper.stdout.close()
            self._keeper = None
        elif self._claimed:
            try:
                self._ask(do="end")
            except NoLab:
                pass
        if self._ports is not None:
            self._ports.close()
        for data in (*(self.directory / node / "data" for node in self.nodes), self.directory / "etcd"):
            shutil.rmtree(data, ignore_errors=True)
        if self._temporary:
            self.remove()

    def wait(self) -> None:
        """Returns when the lab has ended, by `down` from another process."""
        if self._keeper is not None:
            self._keeper.wait()

    def remove(self) -> None:
        """Deletes the lab's folder, logs and all, if it is the lab's; call it after `down`."""
        if self._claimed:
            shutil.rmtree(self.directory, ignore_errors=True)

    # -- faults

    def kill(self, target: str) -> None:
        """SIGKILLs a node ("e1"), a part of it ("e1.broker", "e1.sidecar") or the lab's "etcd", and returns when it is gone."""
        self._signal(target, signal.SIGKILL)

    def stop(self, target: str) -> None:
        """SIGSTOPs a node or a part of it, and returns when it stands still: it stalls, its connections stay open."""
        self._signal(target, signal.SIGSTOP)

    def cont(self, target: str) -> None:
        """SIGCONTs a stopped node or part."""
        self._signal(target, signal.SIGCONT)

    def start(self, target: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Starts again, on its old data, each part of `target` that does not run; returns when the broker answers and the sidecar's HTTP does.

        Raises:
            LabError: All of it is running, or it did not start.
        """
        keys = self._keys(target)
        dead = [key for key in keys if not self._runs(key)]
        if not dead:
            raise LabError(f"{target} is running", todo=f"Kill it first: lrq-ha lab kill {target}")
        deadline = time.monotonic() + timeout_s
        for key in dead:
            name, _, part = key.rpartition(".")
            self._check_ports(key)
            self._ask(do="spawn", key=key)
            self._wait_part(key, deadline)
            if part == "sidecar":
                group = self.nodes[name].group
                self._primaries[group] = self.primary(group)
        self._write()

    def replace(self, name: str, broker: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Replaces the broker of node `name` by an empty one of another RabbitMQ series, and starts both parts; running ones are killed first.

        The new broker has the plugins, users and vhosts that the former one began with.

        Raises:
            LabError: There is no such node, that series is not on this machine, or a part did not start.
        """
        installation = brokers.find(broker)
        self._node(name)
        spec = self._ask(do="spec", key=f"{name}.broker")
        if any(self._runs(key) for key in self._keys(name)):
            self.kill(name)
        environment = files.replace_installation(Path(spec["cwd"]), spec["env"], installation)
        self._check_ports(f"{name}.broker")
        self._ask(do="spawn", key=f"{name}.broker", **spec | {"argv": files.broker_command(installation), "env": environment})
        self._wait_part(f"{name}.broker", time.monotonic() + timeout_s)
        if f"{name}.sidecar" in self.processes():
            self.start(f"{name}.sidecar", timeout_s)
        self._write()

    # -- asking

    def status(self, name: str) -> dict[str, Any]:
        """The status of the sidecar of node `name`.

        Raises:
            LabError: It does not answer.
        """
        answer = probe.get_json(f"{self._node(name).http}/status")
        if answer is None:
            raise LabError(f"The sidecar of {name} does not answer", todo=f"See {self._node(name).log}", retriable=True)
        return answer

    def wait_role(self, name: str, role: str, timeout_s: float = 120.0) -> dict[str, Any]:
        """Waits until node `name` has the role, and returns its status.

        Raises:
            LabError: It has not after `timeout_s` seconds.
        """
        said: dict[str, Any] = {}

        def has_it() -> bool:
            said.clear()
            said.update(probe.get_json(f"{self._node(name).http}/status") or {})
            return said.get("role") == role

        self._wait(f"{name}.sidecar", has_it, time.monotonic() + timeout_s, f"has not become {role}")
        return said

    def primary(self, group: str) -> str | None:
        """Name of the node of `group` that is active, if one is."""
        return next((name for name, node in self.nodes.items() if node.group == group and self._role(name) == "active"), None)

    def promote(self, name: str, down: Sequence[str] = (), *, force: bool = False, dry_run: bool = False) -> str:
        """Promotes node `name`; `down` names the nodes that the operator knows to be down. Returns the sidecar's answer.

        Raises:
            LabError: The sidecar refuses, and says why, or does not answer.
        """
        try:
            status, answer = probe.post_json(f"{self._node(name).http}/promote", {"down": list(down), "force": force, "dry_run": dry_run})
        except OSError as error:
            raise LabError(f"The sidecar of {name} does not answer", todo=f"See {self._node(name).log}", retriable=True) from error
        if status != 200:
            raise LabError(str(answer.get("text", f"The sidecar of {name} answered {status}")))
        if not dry_run:
            self._primaries[self._node(name).group] = self.primary(self._node(name).group)
            self._write()
        return str(answer.get("text", ""))

    def ctl(self, name: str, *arguments: str) -> str:
        """Output of `rabbitmqctl` on the broker of node `name`; takes a second.

        Raises:
            LabError: It failed, with what it printed.
        """
        program, environment = self._rabbitmqctl(name)
        done = subprocess.run([program, "--quiet", *arguments], stdin=subprocess.DEVNULL, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise LabError(f"rabbitmqctl {' '.join(arguments)} failed on {name}: {done.stderr or done.stdout}")
        return done.stdout

    def run_ctl(self, name: str, arguments: Sequence[str]) -> int:
        """Runs `rabbitmqctl` on the broker of node `name`, with the input and the outputs of this process. Returns its exit status.

        Raises:
            LabError: There is no such node, or its broker is not running.
        """
        program, environment = self._rabbitmqctl(name)
        if not self._runs(f"{name}.broker"):
            raise LabError(f"The broker of {name} is not running", todo=f"Start it: lrq-ha lab start {name}.broker")
        return subprocess.run([program, *arguments], env=environment).returncode

    def _rabbitmqctl(self, name: str) -> tuple[str, dict[str, str]]:
        """The broker's own `rabbitmqctl`, and the environment in which it finds that broker."""
        self._node(name)
        broker = self._ask(do="spec", key=f"{name}.broker")
        return str(Path(broker["argv"][0]).with_name("rabbitmqctl")), broker["env"]

    def processes(self) -> dict[str, int | None]:
        """Process id of each part ("e1.broker"), None for one that does not run."""
        return {key: process["pid"] if process["exit"] is None else None
                for key, process in self._ask(do="list").items()}

    # -- inside

    def _begin(self, deadline: float) -> None:
        """The steps before the first broker: its parent process, and the epmd for its name."""
        self._keeper = keeper.start(self.directory, files.python_environment())
        epmd_port = next(iter(self._plans.values())).epmd_port
        self._ask(do="spawn", key="epmd", argv=files.epmd_command(self._installation, epmd_port),
                  env=files.python_environment(), cwd=str(self.directory), log=str(self.directory / "epmd.log"))
        self._wait("epmd", lambda: probe.listens(epmd_port), deadline)
        if self._etcd_command:
            self._ask(do="spawn", key=etcd.KEY, argv=self._etcd_command, env=files.python_environment(), cwd=str(self.directory),
                      log=str(self.directory / "etcd.log"))
            self._wait_part(etcd.KEY, deadline)

    def _ask(self, **request: Any) -> dict[str, Any]:
        """Has the keeper do something with the lab's processes: every start, signal or look goes through here."""
        return keeper.ask(self.directory, **request)

    def _of(self, group: str) -> list[files.NodePlan]:
        return [plan for plan in self._plans.values() if plan.group == group]

    def _node(self, name: str) -> LabNode:
        if name not in self.nodes:
            raise LabError(f"The lab has no node {name!r}", todo=f"It has {', '.join(self.nodes)}")
        return self.nodes[name]

    def _keys(self, target: str) -> list[str]:
        """The processes that `target` names, of those that the lab has."""
        if target == etcd.KEY and etcd.KEY in self.processes():
            return [etcd.KEY]
        name, _, part = target.rpartition(".")  # a group's name, and so a node's, may hold dots
        if part not in _PARTS:
            name, part = target, ""
        self._node(name)
        keys = [key for each in _PARTS if (key := f"{name}.{each}") in self.processes() and part in ("", each)]
        if not keys:
            raise LabError(f"The lab has no {target!r}", todo=f"It has {', '.join(key for key in self.processes() if key != 'epmd')}")
        return keys

    def _runs(self, key: str) -> bool:
        return self.processes().get(key) is not None

    def _signal(self, target: str, number: signal.Signals) -> None:
        running = [key for key in self._keys(target) if self._runs(key)]
        if not running:
            raise LabError(f"{target} is not running", todo=f"Start it: lrq-ha lab start {target}")
        # The sidecar first: a killed node must not see its broker die.
        for key in reversed(running):
            self._ask(do="signal", key=key, number=int(number))
        if number == signal.SIGKILL:
            # The primary is not asked: a fault must not take as long as a stalled node takes to answer.
            killed = {key.rpartition(".")[0] for key in running}
            self._primaries = {group: None if primary in killed else primary for group, primary in self._primaries.items()}
        self._write()

    def _spawn_all(self, part: str) -> None:
        for name, plan in self._plans.items():
            self._check_ports(f"{name}.{part}")
            command, log = ((files.broker_command(self._installation), plan.broker_log) if part == "broker"
                            else (files.sidecar_command(plan), plan.sidecar_log))
            environment = files.broker_environment(plan, self._installation) if part == "broker" else files.python_environment()
            self._ask(do="spawn", key=f"{name}.{part}", argv=command, env=environment, cwd=str(plan.directory), log=str(log))

    def _check_ports(self, key: str) -> None:
        name, _, part = key.rpartition(".")
        for port in [_port(self.etcd[0])] if key == etcd.KEY else self.nodes[name].ports(part):
            if not is_free(port):
                raise LabError(f"Port {port} of {key} is taken by another process",
                               todo=f"End what listens on 127.0.0.1:{port}, or start a new lab, which draws other ports", retriable=True)

    def _wait_part(self, key: str, deadline: float) -> None:
        name, _, part = key.rpartition(".")
        if key == etcd.KEY:
            self._wait(key, lambda: probe.listens(_port(self.etcd[0])), deadline)
        elif part == "broker":
            self._wait(key, lambda: probe.speaks_amqp(self.nodes[name].ports("broker")[0], self._proxied), deadline)
        else:
            self._wait(key, lambda: self._role(name) is not None, deadline)

    def _wait(self, key: str, ready: Callable[[], bool], deadline: float, failure: str = "has not become ready") -> None:
        name, _, part = key.rpartition(".")
        log = self.directory / f"{key}.log" if not name else self.nodes[name].log if part == "sidecar" else self.nodes[name].broker_log
        while not ready():
            process = self._ask(do="list")[key]
            if process["exit"] is not None:
                raise LabError(f"{key} ended with status {process['exit']}. From its log:\n{probe.excerpt(log)}\n", todo=f"See {log}")
            if time.monotonic() > deadline:
                raise LabError(f"{key} {failure} in time. From its log:\n{probe.excerpt(log)}\n",
                               todo=f"See {log}; a machine under load may just need longer", retriable=True)
            time.sleep(_POLL_S)

    def _is_ready(self, name: str) -> bool:
        return self._role(name) in _READY_ROLES

    def _role(self, name: str) -> str | None:
        answer = probe.get_json(f"{self._node(name).http}/status")
        return None if answer is None else str(answer.get("role"))

    def _write(self) -> None:
        """Replaces lab.json as a whole; it holds passwords, so only the user can read it."""
        with self._write_lock:
            pids = self.processes()
            groups = {
                group: {"primary": self._primaries[group],
                        "nodes": {name: node.entry(pids) for name, node in self.nodes.items() if node.group == group}}
                for group in self._groups}
            new = self.directory / f"{keeper.LAB_FILE}.new"
            new.touch(mode=0o600)
            more = ({"ca": str(self.ca)} if self.ca else {}) | ({"etcd": self.etcd} if self.etcd else {})
            new.write_text(json.dumps({"groups": groups} | more, indent=1) + "\n")
            new.replace(self.directory / keeper.LAB_FILE)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _check_groups(groups: Mapping[str, int], sites: Mapping[str, Sequence[str]]) -> None:
    for group, count in groups.items():
        if not is_name(group) or not 1 <= count <= 9:
            raise LabError(f"A group's name has {NAME_RULE}, and a group has 1 to 9 nodes, not {group!r} = {count}")
    if not groups:
        raise LabError("A lab needs a group", todo="For example east=2")
    for group, others in sites.items():
        for unknown in {group, *others} - set(groups):
            raise LabError(f"sites names the group {unknown!r}, which the lab does not have", todo=f"It has {', '.join(groups)}")
