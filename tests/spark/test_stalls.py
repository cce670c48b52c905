"""Nodes that stand still while they are read from: another one is gone to, or the same once it goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pika
import pytest
from receive_queues import ReceiveQueue, transaction

from lrq_ha.lab import Lab
from lrq_ha.spark import amqp
from lrq_ha.spark.amqp import ConnectionLost, NodeConnection
from lrq_ha.spark.options import ReadOptions, parse_options
from lrq_ha.spark.ranges import Range
from lrq_ha.spark.source import plan, read_range

pytestmark = pytest.mark.broker

COUNT = 3_000
HANGS_S = 150.0


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab({"west": 2}, directory=tmp_path_factory.mktemp("lab") / "lab", brokers_only=True) as running:
        yield running


@pytest.fixture
def options(two: Lab) -> Iterator[ReadOptions]:
    """One receive queue, of which each node has its copy."""
    name = f"t{time.monotonic_ns()}"
    copies = []
    for node in two.nodes.values():
        parameters = pika.URLParameters(node.admin)
        parameters.virtual_host = "lrq"
        queue = ReceiveQueue(pika.BlockingConnection(parameters), "east", name, {})
        queue.write_burst(queue.batch(transaction(n, [b"x" * 2_000])) for n in range(1, COUNT + 1))
        copies.append(queue)
    yield parse_options({"nodes": ",".join(node.broker for node in two.nodes.values()), "subscribe": copies[0].name})
    for queue in copies:
        queue.delete()


def within(seconds: float, work: Callable[[], None]) -> bool:
    """Whether `work` comes to its end in that time."""
    ended: list[None] = []
    thread = threading.Thread(target=lambda: ended.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(ended)


def test_a_node_that_stands_still_in_mid_range(two: Lab, options: ReadOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amqp, "IDLE_TIMEOUT_S", 5.0)
    given: list[int] = []
    (part,) = plan(options)

    def read() -> None:
        for _, taken in read_range(part, options):
            given.extend(one.transaction.position.sequence for one in taken)
            if len(given) == 1_000:
                two.stop("w1.broker")

    try:
        assert within(HANGS_S, read), f"it hangs after {len(given)}"
    finally:
        two.cont("w1.broker")
    assert given == list(range(1, COUNT + 1))


def test_a_node_that_stands_still_while_a_read_is_planned(two: Lab, options: ReadOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[list[Range]] = []
    tail = NodeConnection.tail

    def stop(node: NodeConnection, queue: str) -> object:
        if not node.address.endswith(two.nodes["w2"].broker.rpartition(":")[2]):
            two.stop("w1.broker")
        return tail(node, queue)

    monkeypatch.setattr(NodeConnection, "tail", stop)
    try:
        assert within(HANGS_S, lambda: planned.append(plan(options)))
    finally:
        two.cont("w1.broker")
    ((part,),) = planned
    assert part.through.sequence == COUNT


def test_nothing_waits_for_a_node_that_stands_still(two: Lab, options: ReadOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a question, nor the farewell."""
    monkeypatch.setattr(amqp, "ANSWER_TIMEOUT_S", 2.0, raising=False)
    nodes = [NodeConnection.open(options.nodes, timeout_s=60) for _ in range(2)]

    def ask() -> None:
        with pytest.raises(ConnectionLost, match="no answer within 2 s"):
            nodes[0].count(options.subscribe[0])
        for node in nodes:
            node.close()

    two.stop("w1.broker")
    try:
        assert within(HANGS_S, ask)
    finally:
        two.cont("w1.broker")
