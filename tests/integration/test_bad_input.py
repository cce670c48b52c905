"""A sidecar that is given something wrong: it says what, and what to do about it, and goes on by itself once that is put right.

Real sidecar processes beside real brokers. What only the operator can mend in the sidecar's own configuration ends it at once; what can be
mended elsewhere (the broker, its users, vhosts and rights) is tried again for ever. No credential is in anything that is said.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pika
import pytest
from load import declare, eventually
from sidecar_process import WRONG_PASSWORD, Sidecar

from lrq_ha.lab import Lab
from lrq_ha.lab.files import python_environment
from lrq_ha.lab.ports import free_ports
from lrq_ha.publisher import Publisher

pytestmark = pytest.mark.broker

PATIENT_S = 600.0


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab({"east": 2}, tmp_path_factory.mktemp("bad-input") / "lab", brokers_only=True) as found:
        yield found


@pytest.fixture
def group(request: pytest.FixtureRequest) -> str:
    """A group of the test's own: the brokers are shared."""
    return re.sub("[^A-Za-z0-9]+", "-", request.node.name.removeprefix("test_"))[:40] + f"-{time.time_ns() % 10**6}"


# ---- what is wrong in the configuration: it ends at once


@pytest.mark.quick
@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (("[door]", "[door]\nlisten_address = 1"), r"door.listen_address: unknown key; allowed here: .*listen"),
        (("[http]", "[htttp]"), r"htttp: unknown key.*allowed here: .*http"),
        (("id = 1", 'id = "one"'), r"node.id: .*integer \(value 'one'\)"),
        (("id = 1", "id = 256"), r"node.id: .*255 \(value 256\)"),
        (("id = 1\n", ""), r"node.id: missing"),
        (("[node]", "[node"), r"is not TOML"),
        (("amqp://", "http://"), r'broker.url: must be "amqp://USER:PASSWORD@HOST:PORT"'),
        (('listen = "127.0.0.1', 'listen = "nowhere'), r'must be "HOST:PORT"|cannot listen on nowhere'),
    ],
)
def test_a_wrong_configuration_ends_it_at_once(lab: Lab, tmp_path: Path, edit: tuple[str, str], says: str) -> None:
    with Sidecar(lab, tmp_path, "g", edit=lambda text: text.replace(*edit)) as sidecar:
        said = sidecar.ends()
    assert re.search(says, said), said
    assert len([line for line in said.splitlines() if " WARNING " not in line]) == 1, "one line"


def test_a_missing_file_and_a_folder(lab: Lab, tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        command = [sys.executable, "-m", "lrq_ha.cli.main", "sidecar", "--config", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, env=python_environment())
        assert done.returncode == 1
        assert str(path) in done.stderr
        assert "cannot be read" in done.stderr


@pytest.mark.parametrize("which", ["door", "http"])
def test_an_occupied_port_ends_it_at_once(lab: Lab, tmp_path: Path, which: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        given: dict[str, Any] = {which: address}
        with Sidecar(lab, tmp_path, "g", **given) as sidecar:
            said = sidecar.ends()
    assert re.search(rf"{address}.* in use.*[Cc]hange .*{which}.listen", said.replace("\n", " ")), said
    assert "READY" not in said


# ---- what is wrong at the broker: it says so, and goes on when that is put right


@pytest.mark.quick
def test_a_broker_that_is_down(lab: Lab, tmp_path: Path, group: str) -> None:
    lab.kill("e2.broker")
    with Sidecar(lab, tmp_path, group, beside="e2") as sidecar:
        sidecar.complains(r"127\.0\.0\.1:\d+.* cannot be reached.*Check that it runs")
        with pytest.raises(pika.exceptions.AMQPConnectionError):
            pika.BlockingConnection(pika.URLParameters(lab.nodes["e2"].door.rpartition("@")[0] + "@" + sidecar.door))
        lab.start("e2.broker")
        sidecar.becomes("active")


def test_a_wrong_password(lab: Lab, tmp_path: Path, group: str) -> None:
    right = lab.nodes["e1"].admin
    password = str(urlsplit(right).password)
    with Sidecar(lab, tmp_path, group, broker=right.replace(password, WRONG_PASSWORD)) as sidecar:
        sidecar.complains(r"user or password was refused.*lrq@127\.0\.0\.1:\d+")
        try:
            lab.ctl("e1", "change_password", "lrq", WRONG_PASSWORD)
            sidecar.becomes("active")
        finally:
            lab.ctl("e1", "change_password", "lrq", password)
        lab.ctl("e1", "close_all_user_connections", "lrq", "its password has changed")
        sidecar.complains(r"user or password was refused.* It had been let in before: RabbitMQ 4 loses sight of its users when its disk is full")


def test_no_vhost_lrq(lab: Lab, tmp_path: Path, group: str) -> None:
    lab.ctl("e2", "delete_vhost", "lrq")
    with Sidecar(lab, tmp_path, group, beside="e2") as sidecar:
        try:
            sidecar.complains(r"no vhost 'lrq'.*rabbitmqctl add_vhost lrq && rabbitmqctl set_permissions -p lrq lrq '\.\*' '\.\*' '\.\*'")
        finally:
            lab.ctl("e2", "add_vhost", "lrq")
        sidecar.complains(r"user 'lrq' may not enter vhost 'lrq'.*: rabbitmqctl set_permissions -p lrq lrq '\.\*' '\.\*' '\.\*'")
        assert "add_vhost" not in sidecar.answered()["reason"], "it exists: that command would fail"
        lab.ctl("e2", "set_permissions", "-p", "lrq", "lrq", ".*", ".*", ".*")
        sidecar.becomes("active")


@pytest.mark.parametrize("rights", [("", "", ""), (".*", "", ""), (".*", ".*", ""), (".*", "", ".*")])
def test_missing_rights(lab: Lab, tmp_path: Path, group: str, rights: tuple[str, str, str]) -> None:
    lab.ctl("e1", "set_permissions", "-p", "lrq", "lrq", *rights)
    with Sidecar(lab, tmp_path, group) as sidecar:
        try:
            sidecar.complains(r"user 'lrq' .*vhost 'lrq'.*: rabbitmqctl set_permissions -p lrq lrq '\.\*' '\.\*' '\.\*'")
        finally:
            lab.ctl("e1", "set_permissions", "-p", "lrq", "lrq", ".*", ".*", ".*")
        sidecar.becomes("active")


def test_a_right_is_missing_for_more_starts_than_are_looked_for(lab: Lab, tmp_path: Path, group: str) -> None:
    """Each left the next one a number. Beyond so many of them no start was tried any more, also when the right was there."""
    with Sidecar(lab, tmp_path, group) as sidecar:
        sidecar.becomes("active")  # a start that finds no record waits for one
    lab.ctl("e1", "set_permissions", "-p", "lrq", "lrq", ".*", "", ".*")
    with Sidecar(lab, tmp_path, group) as sidecar:
        try:
            eventually("so many starts", lambda: bool(re.search("starts before this one|starts in a row", sidecar.said())), PATIENT_S)
        finally:
            lab.ctl("e1", "set_permissions", "-p", "lrq", "lrq", ".*", ".*", ".*")
        sidecar.becomes("active")


# ---- two that are in each other's way


def consumed(door: str, queue: str, count: int) -> list[int]:
    """All that a consumer gets: so many, and what comes within a second after them; fewer if no more come for long.

    Through a door: a broker's queue may hold second copies, which doors remove.
    """
    found: list[int] = []
    with pika.BlockingConnection(pika.URLParameters(door)) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=200)
        last = time.monotonic()
        for method, _, body in channel.consume(queue, inactivity_timeout=1.0):
            if method is None:
                if len(found) >= count or time.monotonic() - last > 60:
                    break
                continue
            last = time.monotonic()
            channel.basic_ack(method.delivery_tag)
            found.append(int(body))
    return found


@pytest.mark.proves("G2")
def test_two_sidecars_beside_the_same_broker(lab: Lab, tmp_path: Path, group: str) -> None:
    """The newer takes over, the older says so and stands by; what is published meanwhile is there once."""
    login = lab.nodes["e1"].door.rpartition("@")[0]
    stop = threading.Event()
    confirms: list[Any] = []
    with Sidecar(lab, tmp_path, group, name="older") as older:
        older.becomes("active")
        declare(f"{login}@{older.door}", group)
        newer = Sidecar(lab, tmp_path, group, name="newer")
        publisher = Publisher([f"{login}@{older.door}", f"{login}@{newer.door}"], group, confirm_timeout_s=5)

        def publish() -> None:
            while not stop.is_set():
                confirms.append(publisher.publish("", group, str(len(confirms)).encode()))
                time.sleep(0.002)

        def goes_on() -> None:
            before = len(confirms)
            eventually("confirms", lambda: len(confirms) > before and confirms[before].done)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            goes_on()
            with newer:
                newer.becomes("active")
                older.complains("a newer sidecar beside this broker has taken over.*stop one of the two")
                goes_on()
                generation = newer.answered()["generation"]
                time.sleep(3)  # they must not take it from each other again and again
                assert newer.answered()["generation"] == generation
                assert newer.answered()["role"] == "active"
            older.becomes("active")  # the newer is gone
            goes_on()
        finally:
            stop.set()
            thread.join()
        publisher.close(240)
        assert [confirm.error for confirm in confirms if confirm.error] == []
        assert consumed(f"{login}@{older.door}", group, len(confirms)) == list(range(len(confirms)))


def test_a_peer_that_is_the_node_itself(lab: Lab, tmp_path: Path, group: str) -> None:
    """Its own door as that of the other node: a slip in a copied configuration."""
    ports = free_ports()
    door, http = (f"127.0.0.1:{next(ports)}" for _ in range(2))
    login = lab.nodes["e1"].admin.rpartition("@")[0]
    more = f'[[peers]]\nname = "n2"\nid = 2\ndoor = "{login}@{door}"\nhttp = "http://{http}"\n'
    with Sidecar(lab, tmp_path, group, more=more, door=door, http=http) as sidecar:
        sidecar.complains(r"n2: .*this door is node 1's own: correct the address in its \[\[peers\]\]")


def test_an_idle_sidecar_notices_that_a_newer_one_has_taken_over(lab: Lab, tmp_path: Path, group: str) -> None:
    with Sidecar(lab, tmp_path, group, name="older") as older:
        older.becomes("active")
        with Sidecar(lab, tmp_path, group, name="newer") as newer:
            newer.becomes("active")
            older.complains("a newer sidecar beside this broker has taken over")


def test_two_nodes_with_the_same_id_and_a_peer_of_another_group(lab: Lab, tmp_path: Path, group: str) -> None:
    """Neither takes the other for a node of its group; both say why; nobody leads."""
    ports = free_ports()
    doors, https = ([f"127.0.0.1:{next(ports)}" for _ in range(2)] for _ in range(2))

    def sidecar(index: int, node: int, peer: int, of: str) -> Sidecar:
        other = lab.nodes[f"e{2 - index}"].admin.rpartition("@")[0]
        more = f'[[peers]]\nname = "n{2 - index}"\nid = {peer}\ndoor = "{other}@{doors[1 - index]}"\nhttp = "http://{https[1 - index]}"\n'
        return Sidecar(lab, tmp_path, of, node=node, name=f"n{index + 1}", beside=f"e{index + 1}", more=more, door=doors[index], http=https[index])

    with sidecar(0, 1, 2, group) as first:
        with sidecar(1, 1, 2, group) as second:
            for each in (first, second):
                each.complains(r"two nodes of group \S+ have the id 1.*\[node\] id")
        with sidecar(1, 2, 1, group + "-b") as second:
            for each in (first, second):
                each.complains(rf"this is group {group}\S*, not {group}")
        with sidecar(1, 3, 1, group) as second:
            for each in (first, second):
                each.complains(r"node 3 is not among the \[\[peers\]\] of n1 \(id 1\)")
        with sidecar(1, 2, 1, group) as second:
            eventually("a primary", lambda: "active" in (first.status()["role"], second.status()["role"]))
