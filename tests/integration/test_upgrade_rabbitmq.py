"""RabbitMQ is upgraded from 3.10, and from 4.0, to 4.3 without a stop, as docs/operations/upgrade-rabbitmq.md says: each broker is replaced by an
empty, newer one.

Rules: the ordinary clients are the programs of docs/clients.md, which know the two doors and nothing else. No node is killed but the one that is
replaced while it is a backup, so nothing is in doubt: every message is done once, in the order of its queue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pika
import pytest
from frameworks import Framework, alive, start, write_programs
from history import exactly
from load import LOST, all_applied, command, consume, declare, depth, eventually, in_sync, is_too_slow, renew, set_up, told
from managed import a_login, change, listed, login_url
from patience import PATIENT_DOOR
from renewals import publish
from traffic import Traffic

from broker_plugin.definitions.objects import REPLICATED, canonical
from lrq_ha.lab import Lab, installations

pytestmark = [pytest.mark.broker, pytest.mark.timeout(1_800), pytest.mark.proves("upgrade-rabbitmq", "G1", "G2", "G3", "G4")]

OLD, NEW = ("3.10", "4.0"), "4.3"
CLIENTS = ("pika", "aio-pika", "kombu")
#: Of each kind of queue, messages that wait there over everything; some of them are held by consumers.
TYPES = ("classic", "quorum")
WAITING, HELD, HELD_S = 400, 20, 3.0
RATE_PER_S = 20.0
GOES_ON = 60
LOG_BYTES_MAX = 8 << 20
CHURN, CHURN_BYTES = 50, 500_000
SHOP = "shop"


@pytest.fixture(params=OLD, ids=lambda old: f"from {old}")
def old(request: pytest.FixtureRequest) -> str:
    version: str = request.param
    if missing := {version, NEW} - set(installations()):
        pytest.skip(f"RabbitMQ {', '.join(missing)} is not on this machine: scripts/setup --broker VERSION")
    return version


@pytest.fixture
def lab(old: str, tmp_path: Path) -> Iterator[Lab]:
    """A pair of the old version, whose log has room for a part of what was ever written; definitions are replicated."""
    found = Lab({"east": 2}, tmp_path / "lab", old, door=PATIENT_DOOR, plugins=["rabbitmq_management"], definitions=REPLICATED)
    set_up(found, f"log_bytes_max = {LOG_BYTES_MAX}\nbackup_timeout_s = 60.0\n")
    with found:
        yield found


class Held:
    """A consumer that holds the first messages of a queue, and acks them when it is told to."""

    def __init__(self, url: str, queue: str) -> None:
        self._queue, self._url = queue, url
        self.bodies: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._hold, daemon=True)
        self._thread.start()
        eventually(f"{HELD} messages to be held", lambda: len(self.bodies) == HELD)

    def _hold(self) -> None:
        with suppress(*LOST), pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=HELD)
            tag = channel.basic_consume(self._queue, lambda _channel, _method, _properties, body: self.bodies.append(int(body)))
            while not self._over.is_set():
                connection.process_data_events(0.1)
            channel.basic_cancel(tag)  # what came after the ack would go back, on 3.10 to another place
            channel.basic_ack(0, multiple=True)

    def ack(self) -> list[int]:
        """Returns the messages that were held."""
        self._over.set()
        self._thread.join()
        return self.bodies


class Upgrade:
    """The steps of the page, with clients at work on a pair. `goes_on`: waits until each of them has got on."""

    def __init__(self, lab: Lab, goes_on: Callable[[], None]) -> None:
        self._lab, self._goes_on = lab, goes_on
        self._taken = 0

    def hold(self, node: str) -> list[Held]:
        return [Held(self._lab.nodes[node].door, f"held-{kind}") for kind in TYPES]

    def let_go(self, held: list[Held]) -> None:
        for bodies in [each.ack() for each in held]:
            exactly(bodies, range(self._taken, self._taken + HELD))
        self._taken += HELD

    def replace(self, node: str, primary: str) -> None:
        """The backup gets an empty broker of the new version, and joins by a renewal. Consumers hold messages when it begins."""
        held = self.hold(primary)
        self._lab.replace(node, NEW)
        assert version(self._lab, node).startswith(NEW)
        eventually("the newcomer to ask for it", lambda: f"to let {node} join, run lrq-ha renew" in self._lab.status(node)["reason"],
                   seen=lambda: told(self._lab, node))
        self._goes_on()
        self.let_go(held)
        print(renew(self._lab))
        assert in_sync(self._lab, applied=True) == (primary, node)
        self._goes_on()

    def switch_over(self, node: str) -> None:
        """To the node. It waits for consumers that hold messages, which are not given out again."""
        primary, backup = in_sync(self._lab, applied=True)
        assert backup == node
        held = self.hold(primary)
        released = threading.Timer(HELD_S, lambda: [each.ack() for each in held])
        released.start()
        began = time.monotonic()
        heard: list[str] = []

        def done() -> bool:
            code, said = command("switchover", node, lab=self._lab)
            heard.append(said)
            assert code == 0 or is_too_slow(said), said
            return self._lab.primary("east") == node

        eventually(f"{node} to take over", done, seen=lambda: heard)
        assert time.monotonic() > began + HELD_S, "it has waited"
        self.let_go(held)
        assert in_sync(self._lab, applied=True) == (node, primary)
        self._goes_on()

    def finish(self, node: str) -> None:
        """Nothing that was held has come back, and nothing that waited is missing."""
        for kind in TYPES:
            exactly(consume(self._lab.nodes[node].door, f"held-{kind}", WAITING - self._taken), range(self._taken, WAITING))


def version(lab: Lab, node: str) -> str:
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[node].broker)) as connection:
        return str(connection._impl.server_properties["version"])


def churn(lab: Lab, primary: str) -> None:
    """Has the log lose its beginning."""
    declare(lab.nodes[primary].door, "churn")
    for _ in range(CHURN // 5):
        publish(lab, "churn", range(5), size=CHURN_BYTES)
        exactly(consume(lab.nodes[primary].door, "churn", 5), range(5))
        all_applied(lab, *lab.nodes)
    eventually("the log to lose its beginning", lambda: lab.status(primary)["head"] > 1)


def open_shop(lab: Lab, node: str) -> None:
    """A vhost with a user and a policy, which operators make at the primary's broker."""
    policy = {"pattern": "^short", "definition": {"max-length": 2}, "priority": 0, "apply-to": "queues"}
    change(lab, node, {**a_login(SHOP, SHOP), ("policies", SHOP, "short"): canonical(policy)})


def visit_shop(lab: Lab, node: str, count: int) -> None:
    """The user publishes by a door; the policy counts there, for a queue that it declared before."""
    url = login_url(lab.nodes[node].door, SHOP, SHOP)
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for queue in ("short", "long"):
            channel.queue_declare(queue, durable=True)
            for _ in range(5):
                channel.basic_publish("", queue, b"", pika.BasicProperties(delivery_mode=2))
    assert (depth(url, "short"), depth(url, "long")) == (2, 5 * count)


def test_a_pair_is_upgraded_under_load(lab: Lab, tmp_path: Path) -> None:
    """Old + old, old + new, back to the older one and forth, new + new. It takes minutes: two renewals and four switchovers."""
    write_programs(tmp_path)
    assert in_sync(lab) == ("e1", "e2")
    doors = [node.door for node in lab.nodes.values()]
    for kind in TYPES:
        for name in ("traffic", "kept", "held"):
            declare(doors[0], f"{name}-{kind}", queue_type=kind)
        publish(lab, f"held-{kind}", range(WAITING))
    open_shop(lab, "e1")
    churn(lab, "e1")
    kept = [f"kept-{kind}" for kind in TYPES]
    traffic = Traffic(doors, [f"traffic-{kind}" for kind in TYPES], ["orders", "bills"], kept=kept, ordinary=1, rate_per_s=RATE_PER_S)
    enough = threading.Event()
    clients: dict[str, Framework] = {}
    feeders: list[threading.Thread] = []
    try:
        traffic.start()
        for name in CLIENTS:
            clients[name] = start(name, tmp_path, ";".join(doors))
            feeders.append(threading.Thread(target=clients[name].feed, args=[enough]))
            feeders[-1].start()
        all_alive = alive(clients, tmp_path)

        def goes_on() -> None:
            goals = {name: len(client.done()) + GOES_ON for name, client in clients.items()}
            confirmed = traffic.confirmed + GOES_ON
            for name, client in clients.items():
                eventually(f"{name} to go on", lambda c=client, n=name: all_alive() and len(c.done()) >= goals[n])
            eventually("confirms to go on", lambda: traffic.confirmed > confirmed)

        upgrade = Upgrade(lab, goes_on)
        goes_on()
        visit_shop(lab, "e1", 1)
        upgrade.replace("e2", "e1")
        visit_shop(lab, "e1", 2)
        upgrade.switch_over("e2")
        visit_shop(lab, "e2", 3)
        upgrade.switch_over("e1")  # the way back
        visit_shop(lab, "e1", 4)
        upgrade.switch_over("e2")
        churn(lab, "e2")
        upgrade.replace("e1", "e2")
        upgrade.switch_over("e1")
        visit_shop(lab, "e1", 5)

        enough.set()
        for name, client in clients.items():
            assert client.sender.wait(240) == 0, (tmp_path / f"{name}.sender.log").read_text()
            eventually(f"{name}: all done", lambda c=client: len(c.done()) >= c.fed)
        traffic.finish()
        traffic.check([])
        upgrade.finish("e1")
        for name, client in clients.items():
            exactly(sorted(order for order, when in client.done().items() for _ in when), range(client.fed))
            assert depth(lab.nodes["e1"].broker, client.queue) == 0, name
        assert listed(lab, "e1") == listed(lab, "e2")
        assert not any(told(lab, node)["lacks"] for node in lab.nodes)
    finally:
        enough.set()
        traffic.stop()
        for client in clients.values():
            for process in (client.sender, client.worker):
                process.kill()
                process.wait()
        for feeder in feeders:
            feeder.join()


@pytest.mark.parametrize("old", OLD[:1], indirect=True)
def test_what_the_newer_one_refuses_is_named(new_lab: Callable[..., Lab], old: str) -> None:
    """Queues and a policy that only the older broker takes. The newer one has everything else, and is not switched over to until they are gone."""
    lab = new_lab({"east": 2}, broker=old, plugins=["rabbitmq_management"], definitions=REPLICATED)
    with lab:
        assert in_sync(lab) == ("e1", "e2")
        door = lab.nodes["e1"].door
        refused: dict[str, dict[str, object]] = {"located": {"queue_master_locator": "client-local"}, "versioned": {"queue_version": 1}}
        for queue, arguments in (refused | {"lazy": {"queue_mode": "lazy"}}).items():
            declare(door, queue, **arguments)
            publish(lab, queue, range(10))
        mirrored = {"pattern": "^m", "definition": {"ha-mode": "all"}, "priority": 0, "apply-to": "queues"}
        change(lab, "e1", {("policies", "/", "mirrored"): canonical(mirrored)})
        eventually("the policy in the log", lambda: ("policies", "/", "mirrored") in listed(lab, "e2"))
        code, said = command("lab", "replace", "e2", "--broker", NEW, lab=lab)
        assert code == 0, said
        assert in_sync(lab) == ("e1", "e2")
        eventually("the queues to be named", lambda: all(f"'{queue}'" in lab.status("e1")["reason"] for queue in refused),
                   seen=lambda: told(lab, "e2"))
        eventually("the policy to be named", lambda: "mirrored" in str(lab.status("e2")["definitions"]), seen=lambda: told(lab, "e2"))
        code, said = command("switchover", "e2", lab=lab)
        assert (code, "the queues of e2 are not whole" in said) == (1, True), said
        eventually("everything else", lambda: depth(lab.nodes["e2"].admin, "lazy") == 10)
        with pika.BlockingConnection(pika.URLParameters(door)) as connection:
            for queue in refused:
                connection.channel().queue_delete(queue)
        change(lab, "e1", deletes=[("policies", "/", "mirrored")])
        eventually("nothing to be missing", lambda: not lab.status("e2")["lacks"], seen=lambda: told(lab, "e2"))
        eventually("the newer one to take over", lambda: command("switchover", "e2", lab=lab)[0] == 0 or lab.primary("east") == "e2")
        assert in_sync(lab, applied=True) == ("e2", "e1")
        exactly(consume(lab.nodes["e2"].door, "lazy", 10), range(10))
