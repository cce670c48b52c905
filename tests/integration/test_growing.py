"""A group that grows, as "Add a node" in docs/operations/members.md says: a full broker gets a sidecar, becomes a pair, then a group of three.

Rule: the sidecars are processes of the test's own, which are stopped in order, as by a service manager; a lab's are all there from the beginning.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pika
import pytest
from history import exactly, span
from load import all_applied, command, consume, declare, eventually, renew, switch_over, take_over, told
from renewals import LOG_BYTES_MAX, SMALL_LOG
from sidecar_process import ENDS_TIMEOUT_S, Sidecar
from traffic import Load

from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3"), pytest.mark.proves("growing")]

MESSAGES, ACKED = 1_000, 300
RATE = 100.0
GOES_ON = 20
#: Nobody is taken out of the set for being slow: a machine may stand still for longer than backup_timeout_s.
PATIENT_S = 600.0
#: Of what a broker has defined, that which no log tells of.
OWN = ("users", "vhosts", "permissions", "topic_permissions", "policies")
VHOST = "shop"


@pytest.fixture
def lab(request: pytest.FixtureRequest, broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Brokers, as many as the parameter says. The first has a user and a vhost that the others lack."""
    found = Lab({"east": request.param}, tmp_path_factory.mktemp("growing") / "lab", broker_version, brokers_only=True)
    found.prepare()
    file = found.directory / "e1" / "definitions.json"
    definitions = json.loads(file.read_text())
    definitions["vhosts"].append({"name": VHOST})
    definitions["users"].append({"name": VHOST, "password": "secret", "tags": []})
    for user in (VHOST, "app", "lrq"):
        definitions["permissions"].append({"user": user, "vhost": VHOST, "configure": ".*", "write": ".*", "read": ".*"})
    file.write_text(json.dumps(definitions))
    with found:
        yield found


class Sidecars:
    """Those of a group that grows. Args: `settings`: more lines of [replication]; `queue_limits`: of [door]."""

    def __init__(self, lab: Lab, folder: Path, settings: str = "", limits: str = "") -> None:
        self._lab, self._folder, self._settings, self._limits = lab, folder, settings, limits
        self._running: dict[str, Sidecar] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sidecar in self._running.values():
            sidecar.__exit__()

    def start(self, node: str, *peers: str) -> None:
        """Starts one whose configuration has these peers; one that runs is stopped first."""
        if running := self._running.pop(node, None):
            running.process.terminate()
            assert running.process.wait(ENDS_TIMEOUT_S) == 0
            running.__exit__()
        tables = self._lab.nodes[node].config.read_text().split("\n\n")
        kept = [table for table in tables if not table.startswith("[[peers]]") or any(f'name = "{peer}"' in table for peer in peers)]
        text = "\n\n".join(kept).replace("[door]\n", f"[door]\n{self._limits}").rstrip() + f"\nbackup_timeout_s = {PATIENT_S}\n{self._settings}"
        self._running[node] = Sidecar(self._lab, self._folder, "east", name=node, edit=lambda _: text).__enter__()
        told(self._lab, node)

    def kill(self, node: str) -> None:
        """Kills it and its broker."""
        self._running[node].process.kill()
        self._lab.kill(f"{node}.broker")


def says(lab: Lab, node: str, *words: str) -> None:
    """Waits until `lrq-ha list` says so of a node."""
    eventually(f"{node} to say {words}", lambda: all(each in lab.status(node)["reason"] for each in words), seen=lambda: told(lab, node))
    code, said = command("list", lab=lab)
    assert code == 0
    assert all(each in said for each in words), said


def in_sync(lab: Lab, primary: str, *backups: str) -> None:
    """Waits until these are the set, and all of them have all that is in the log."""

    def holds() -> bool:
        first, *others = (lab.status(name) for name in (primary, *backups))
        return first["role"] == "active" and first["members"] == sorted([primary, *backups]) and all(other["role"] == "ready" for other in others)

    eventually(f"{backups} in sync with {primary}", holds, seen=lambda: [told(lab, name) for name in (primary, *backups)])
    all_applied(lab, primary, *backups)


def publish(url: str, queue: str, numbers: range, size: int = 0) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for number in numbers:
            channel.basic_publish("", queue, b"%d" % number + b" " * size, pika.BasicProperties(delivery_mode=2), mandatory=True)


def take(url: str, queue: str, count: int) -> list[int]:
    """Takes and acks so many messages, one by one: what a consumer gives back when it ends could come to another place."""
    found = []
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        for _ in range(count):
            method, _, body = channel.basic_get(queue)
            assert method is not None
            channel.basic_ack(method.delivery_tag)
            found.append(int(body))
    return found


def of_shop(url: str) -> str:
    """The same node, as the user that at first only one broker had."""
    return f"amqp://{VHOST}:secret@{url.partition('@')[2]}/{VHOST}"


@pytest.mark.parametrize("lab", [3], indirect=True)
def test_a_full_broker_becomes_a_pair_then_three(lab: Lab, tmp_path: Path) -> None:
    """Clients publish and consume all the time; in the end the newcomer of last has all of it."""
    doors = {name: node.door for name, node in lab.nodes.items()}
    broker = lab.nodes["e1"].broker
    declare(broker, "backlog", queue_type="quorum")
    publish(broker, "backlog", range(MESSAGES))
    declare(of_shop(broker), "orders")
    publish(of_shop(broker), "orders", range(3))
    exported = tmp_path / "definitions.json"
    lab.ctl("e1", "export_definitions", str(exported))
    own = tmp_path / "own.json"
    own.write_text(json.dumps({key: value for key, value in json.loads(exported.read_text()).items() if key in OWN}))
    for name in ("e2", "e3"):
        lab.ctl(name, "import_definitions", str(own))

    with Sidecars(lab, tmp_path) as sidecars:
        # A node: what its broker held goes into the log.
        sidecars.start("e1")
        eventually("the first to be primary", lambda: lab.primary("east") == "e1")
        code, said = command("adopt", "--definitions", str(exported), "--to", doors["e1"])
        assert (code, f"backlog: {MESSAGES} of {MESSAGES} messages adopted" in said) == (0, True), said
        exactly(take(doors["e1"], "backlog", ACKED), range(ACKED))
        declare(doors["e1"], "stream")
        load = Load([*doors.values()], "stream", "stream-app", rate_per_s=RATE)
        load.start()

        def goes_on() -> None:
            confirmed = load.confirmed
            eventually("confirms to go on", lambda: load.confirmed > confirmed + GOES_ON)

        # A pair: the newcomer waits. The primary starts again.
        goes_on()
        sidecars.start("e2", "e1")
        says(lab, "e2", "waiting for the other nodes of the group (e1: ", "node 2 is not among the [[peers]] of e1", "Its text says")
        goes_on()
        sidecars.start("e1", "e2")
        in_sync(lab, "e1", "e2")
        goes_on()

        # Three: the newcomer waits. The backup starts again, takes over, and the newcomer is in; the former primary starts again.
        sidecars.start("e3", "e1", "e2")
        says(lab, "e3", "node 3 is not among the [[peers]] of e1", "node 3 is not among the [[peers]] of e2")
        sidecars.start("e2", "e1", "e3")
        in_sync(lab, "e1", "e2")
        goes_on()
        switch_over(lab, "e2")
        in_sync(lab, "e2", "e1", "e3")
        goes_on()
        sidecars.start("e1", "e2", "e3")
        in_sync(lab, "e2", "e1", "e3")
        goes_on()

        killed_at = time.time()
        for name in ("e1", "e2"):
            sidecars.kill(name)
        take_over(lab, "e3", "e1", "e2")
        goes_on()
        load.finish()
        load.check([span(killed_at, time.time())])
        exactly(consume(doors["e3"], "backlog", MESSAGES - ACKED), range(ACKED, MESSAGES))
        exactly(consume(of_shop(doors["e3"]), "orders", 3), range(3))


@pytest.mark.parametrize("lab", [2], indirect=True)
def test_a_log_that_has_lost_its_beginning(lab: Lab, tmp_path: Path) -> None:
    """The newcomer joins by a renewal. And where the primary starts first, it is closed until the newcomer answers or an operator gives his word."""
    largest = LOG_BYTES_MAX // 8
    with Sidecars(lab, tmp_path, SMALL_LOG, f"message_bytes_max = {largest}\ntransaction_bytes_max = {largest}\n") as sidecars:
        sidecars.start("e1")
        eventually("it to be primary", lambda: lab.primary("east") == "e1")
        door = lab.nodes["e1"].door
        declare(door, "backlog", queue_type="quorum")
        publish(door, "backlog", range(MESSAGES))
        exactly(take(door, "backlog", ACKED), range(ACKED))
        declare(door, "churn")

        def dropped() -> bool:
            publish(door, "churn", range(4), 60_000)
            assert consume(door, "churn", 4) == list(range(4))
            return bool(lab.status("e1")["head"] > MESSAGES)

        eventually("the log to lose its beginning", dropped)

        sidecars.start("e1", "e2")
        says(lab, "e1", "waiting for the other nodes of the group (e2: ")
        code, said = command("promote", "e1", lab=lab)
        assert (code, "e2 does not answer: if it is down, say so with --down e2" in said) == (1, True), said
        take_over(lab, "e1", "e2")
        lab.ctl("e2", "import_definitions", str(lab.directory / "e1" / "definitions.json"))
        sidecars.start("e2", "e1")
        says(lab, "e2", "to let e2 join, run lrq-ha renew")
        assert f"has published {MESSAGES - ACKED} messages again" in renew(lab)
        in_sync(lab, "e1", "e2")
        sidecars.kill("e1")
        take_over(lab, "e2", "e1")
        exactly(consume(lab.nodes["e2"].door, "backlog", MESSAGES - ACKED), range(ACKED, MESSAGES))
