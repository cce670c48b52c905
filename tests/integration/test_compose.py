"""compose/ as a user runs it: two nodes and a sink site come up, replicate, and survive the loss of a node.

Rules: the images are those that RABBITMQ_IMAGE and SIDECAR_IMAGE name (`scripts/images` says which it has built). Without these variables no image
is needed: the services are as they are, with this machine's programs mounted into them (container_lab). A project and ports of its own; everything
is removed at the end.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import janitor
import pika
import pytest
from container_lab import bare_image, programs, root_folders, why_not
from load import eventually

from lrq_ha.demo.check import received
from lrq_ha.lab import probe
from lrq_ha.lab.brokers import find
from lrq_ha.lab.files import python_environment
from lrq_ha.lab.ports import free_ports
from lrq_ha.publisher import Publisher

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
SITES = ("e1", "e2", "w1")
#: Inside the sidecar's container.
LRQ_HA = ("python3", "-m", "lrq_ha.cli.main")


class Deployment:
    """compose/ under a project name and ports of its own."""

    def __init__(self, command: list[str], ports: Iterator[int]) -> None:
        self.project = f"lrq-ha-test-{os.getpid()}"
        self._command = [*command, "--project-name", self.project]
        self._ports = {f"{name.upper()}_{what}": str(next(ports)) for name in SITES for what in ("DOOR", "HTTP")}
        self._environment = os.environ | self._ports

    def tell(self, *arguments: str) -> tuple[int, str]:
        """Exit code of a compose command, and all that it printed."""
        done = subprocess.run([*self._command, *arguments], cwd=ROOT / "compose", env=self._environment, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.returncode, done.stdout

    def compose(self, *arguments: str) -> str:
        code, said = self.tell(*arguments)
        assert code == 0, said
        return said

    def door(self, name: str) -> str:
        return f"amqp://app:change-me-app@127.0.0.1:{self._ports[f'{name.upper()}_DOOR']}"

    def role(self, name: str) -> str:
        found = probe.get_json(f"http://127.0.0.1:{self._ports[f'{name.upper()}_HTTP']}/status") or {}
        return str(found.get("role"))

    def reaches(self, name: str, host: str, port: int) -> bool:
        """Whether a sidecar's container can connect to an address."""
        program = f"import socket; socket.create_connection(({host!r}, {port}), 60)"
        code, said = self.tell("exec", "-T", name, "python3", "-c", program)
        assert code == 0 or "ConnectionRefusedError" in said, said
        return code == 0

    def roles(self) -> list[str]:
        return [self.role(name) for name in SITES]


def health_check() -> list[str]:
    """The command of the sidecar's image."""
    (line,) = re.findall("^HEALTHCHECK .* CMD (.*)$", (ROOT / "compose" / "Dockerfile").read_text(), re.MULTILINE)
    command: list[str] = json.loads(line)
    return command


def _compose_command() -> list[str]:
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and subprocess.run([*command, "version"], capture_output=True).returncode == 0:
            return command
    pytest.skip("neither `docker compose` nor docker-compose is on this machine")


def _instead_of_images(folder: Path) -> Path:
    """A compose file to lay over the other: an empty image, and what the two images would bring."""
    rabbitmq = find()
    broker = {"PATH": f"{rabbitmq.erlang_bin}:{os.environ['PATH']}", "HOME": "/var/lib/rabbitmq", "LC_ALL": "C.UTF-8", "RABBITMQ_LOGS": "-",
              "RABBITMQ_MNESIA_BASE": "/var/lib/rabbitmq/mnesia", "RABBITMQ_CONFIG_FILES": "/etc/rabbitmq/conf.d",
              "RABBITMQ_CONF_ENV_FILE": os.devnull, "RABBITMQ_ENABLED_PLUGINS_FILE": "/var/lib/rabbitmq/enabled_plugins"}
    services = {}
    for name in SITES:
        services[f"{name}-broker"] = {
            "environment": broker, "command": ["/bin/sh", "-c", f"epmd -daemon && exec {rabbitmq.sbin / 'rabbitmq-server'}"]}
        services[name] = {
            "environment": {"PYTHONPATH": python_environment()["PYTHONPATH"], "LRQ_HA_CONFIG": "/etc/lrq-ha/node.toml",
                            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            "command": [sys.executable, "-m", "lrq_ha.cli.main", "sidecar", "--config", "/etc/lrq-ha/node.toml"]}
    client = docker.from_env()
    mounts = [f"{place}:{place}:ro" for place in (*programs(rabbitmq.erlang_bin.parent), *root_folders())]
    for service in services.values():
        service |= {"image": bare_image(client), "volumes": mounts}
    client.close()
    place = folder / "bare.json"  # JSON is YAML
    place.write_text(json.dumps({"services": services}))
    return place


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    if reason := why_not(tmp_path):
        pytest.skip(reason)
    ports = free_ports()
    laid_over = [] if "RABBITMQ_IMAGE" in os.environ else ["--file", str(_instead_of_images(tmp_path))]
    found = Deployment([*_compose_command(), "--file", "docker-compose.yml", *laid_over], ports)
    janitor.watch(f"com.docker.compose.project={found.project}")
    try:
        found.compose("up", "--detach", "--no-build")
        yield found
    except BaseException:
        print(found.compose("logs", "--no-color", "--tail", "60"))
        raise
    finally:
        found.compose("down", "--volumes", "--timeout", "1")
        ports.close()


@pytest.mark.quick
def test_passwords_are_no_part_of_the_image(tmp_path: Path) -> None:
    """Whatever layer of it: they are not in what Docker is given to build it from."""
    if reason := why_not(tmp_path):
        pytest.skip(reason)
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /src\n")
    client = docker.from_env()
    image = f"lrq-ha-context-{os.getpid()}"
    subprocess.run(["docker", "build", "--quiet", "--tag", image, "--file", str(tmp_path / "Dockerfile"), str(ROOT)], check=True, capture_output=True)
    try:
        container = client.containers.create(image, "nothing")
        try:
            context = io.BytesIO(b"".join(container.export()))
        finally:
            container.remove()
    finally:
        client.images.remove(image)
        client.close()
    with tarfile.open(fileobj=context) as found:
        files = {member.name: found.extractfile(member) for member in found if member.isfile() and member.name.startswith("src/")}
        assert "src/lrq_ha/__init__.py" in files
        assert [name for name, content in files.items() if content is not None and b"change-me" in content.read()] == []


@pytest.mark.quick
def test_a_deployment_comes_up_and_survives_the_loss_of_a_node(deployment: Deployment) -> None:
    eventually("the nodes to be ready", lambda: sorted(deployment.roles()) == ["active", "active", "ready"])
    old, new = ("e1", "e2") if deployment.role("e1") == "active" else ("e2", "e1")
    eventually("both in the set", lambda: deployment.compose("exec", "-T", "e1", *LRQ_HA, "list").count("yes") == 2)
    for name in SITES:
        assert deployment.reaches("w1", f"{name}.outside", 5672)
        assert not deployment.reaches("w1", f"{name}.outside", 8080), "clients are in this network"
        assert deployment.tell("exec", "-T", name, *health_check())[0] == 0
    doors = [deployment.door(name) for name in (old, new)]
    with pika.BlockingConnection(pika.URLParameters(doors[0])) as connection:
        connection.channel().queue_declare("orders", durable=True)
    with Publisher(doors, producer="compose-app", client_name="compose", confirm_timeout_s=60) as publisher:
        for confirm in [publisher.publish("", "orders", b"%d" % number) for number in range(100)]:
            confirm.result(240)
        publisher.transmit_log_entry_message(b"a change", ["west"]).result(240)
        time.sleep(3)  # a broker that is killed sooner may lose the name of a new queue, whoever uses it
        deployment.compose("kill", old, f"{old}-broker")

        promotion = ("exec", "-T", new, *LRQ_HA, "promote", new, "--down", old)
        eventually("a promotion", lambda: "its door is open" in deployment.tell(*promotion)[1] or deployment.role(new) == "active")
        publisher.publish("", "orders", b"100").result(240)
    with pika.BlockingConnection(pika.URLParameters(doors[1])) as connection:
        channel = connection.channel()
        found = []
        while (got := channel.basic_get("orders", auto_ack=True))[0] is not None:
            found.append(int(got[2]))
    assert found == list(range(101))
    deployment.compose("start", f"{old}-broker", old)
    eventually("it follows", lambda: deployment.role(old) == "ready" and deployment.role(new) == "active")

    def arrived() -> bool:
        transactions, _ = received(deployment.door("w1"), "LRQ_Recv_compose_east")
        return [payload for transaction in transactions for payload in transaction.payloads].count(b"a change") == 1

    eventually("the entry at the other site", arrived)
