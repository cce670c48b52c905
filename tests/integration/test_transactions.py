"""Transactions that move messages from one queue to another, while what they go through is killed: at the end each is in one of the two, once."""

from __future__ import annotations

import threading
import time

import pika
import pytest
from load import declare, depth, eventually, in_sync
from pika.exceptions import AMQPError

from lrq_ha.lab import Lab

pytestmark = pytest.mark.broker

COUNT = 600
IN_ONE = 3
SETTLE_S = 5.0  # see test_faults


class Mover:
    """Takes messages from `source`, publishes each to `target`, acks it, and commits after every third; goes on at the other node when it must."""

    def __init__(self, doors: list[str], source: str, target: str) -> None:
        self._doors, self._source, self._target = doors, source, target
        self.commits = 0
        self.interrupted = 0
        self.idle = False  # it holds nothing, and nothing comes
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        turn = 0
        while not self._stop.is_set():
            try:
                self._move(self._doors[turn % len(self._doors)])
            except (AMQPError, OSError):
                self.interrupted += 1
                turn += 1
                time.sleep(0.05)
            except BaseException as error:
                self.errors.append(error)
                raise

    def _move(self, door: str) -> None:
        parameters = pika.URLParameters(door)
        parameters.socket_timeout = parameters.stack_timeout = 3
        parameters.heartbeat = 4
        parameters.client_properties = {"connection_name": "mover"}
        connection = pika.BlockingConnection(parameters)
        channel = connection.channel()
        channel.tx_select()
        self.idle = False
        channel.basic_qos(prefetch_count=20)
        inside = 0
        for method, _, body in channel.consume(self._source, inactivity_timeout=0.05):
            self.idle = method is None and not inside
            if method is not None:
                channel.basic_publish("", self._target, body, pika.BasicProperties(delivery_mode=2))
                channel.basic_ack(method.delivery_tag)
                inside += 1
            if inside and (inside >= IN_ONE or method is None):
                channel.tx_commit()
                self.commits += 1
                inside = 0
            if self._stop.is_set():
                connection.close()
                return

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self.errors


def bodies(url: str, queue: str) -> list[bytes]:
    """All that is ready, given back afterwards. Not for polling: RabbitMQ 4 throws away what a quorum queue gave out and got back 20 times."""
    found: list[bytes] = []
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        left = channel.queue_declare(queue, passive=True).method.message_count
        while len(found) < left:
            method, _, body = channel.basic_get(queue)
            if method is None:
                break
            found.append(body)
    return found


def end_connections(lab: Lab, node: str) -> None:
    """The mover's connection, at the broker behind the door."""
    for row in lab.ctl(node, "-q", "list_connections", "pid", "client_properties").splitlines():
        if "mover" in row:
            lab.ctl(node, "close_connection", row.split("\t")[0], "test")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["classic", "quorum"])
@pytest.mark.parametrize("fault", ["connection", "primary.sidecar", "primary"])
def test_moved_exactly_once(pair: Lab, fault: str, kind: str) -> None:
    mark = f"{time.time_ns()}"
    source, target = f"tx-from-{mark}", f"tx-to-{mark}"
    primary = pair.primary("east")
    assert primary is not None
    backup = "e2" if primary == "e1" else "e1"
    doors = [pair.nodes[name].door for name in (primary, backup)]
    for queue in (source, target):
        declare(doors[0], queue, queue_type=kind)
    if fault == "primary":
        time.sleep(SETTLE_S)
    with pika.BlockingConnection(pika.URLParameters(doors[0])) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for i in range(COUNT):
            channel.basic_publish("", source, b"%d" % i, pika.BasicProperties(delivery_mode=2))
    mover = Mover(doors, source, target)
    try:
        for round_ in range(3 if fault == "connection" else 1):
            eventually("transactions", lambda round_=round_: mover.commits > 15 * (round_ + 1))
            if fault == "connection":
                end_connections(pair, primary)
            else:
                target_name = primary + (".sidecar" if fault.endswith("sidecar") else "")
                pair.kill(target_name)
                if fault == "primary":
                    pair.promote(backup, down=[primary])
                pair.start(target_name)
        eventually("a node that serves", lambda: pair.primary("east") is not None)
        now = pair.primary("east")
        assert now is not None
        eventually("all moved", lambda: mover.idle and depth(pair.nodes[now].door, source) == 0)
    finally:
        mover.stop()
    assert mover.interrupted
    in_sync(pair, applied=True)
    moved = bodies(pair.nodes[now].door, target)
    assert sorted(moved, key=int) == [b"%d" % i for i in range(COUNT)]
    for name in ("e1", "e2"):
        # Read only while all of it is ready, and once more if the sweeper of a backup had it meanwhile.
        broker = pair.nodes[name].broker
        eventually(f"the same at {name}", lambda url=broker: depth(url, target) == COUNT and sorted(bodies(url, target)) == sorted(moved))
        eventually(f"nothing left at {name}", lambda name=name: depth(pair.nodes[name].broker, source) == 0)
