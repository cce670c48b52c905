"""Nodes that stand still while they are read from: another one is gone to, or the same once it goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pika
import pytest
from receive_queues import ReceiveQueue, transaction

from lrq_ha.lab import Lab, LabError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import Publisher
from lrq_ha.spark.options import ReadOptions, parse_options
from lrq_ha.spark.planning import plan
from lrq_ha.spark.ranges import Range
from lrq_ha.spark.reading import read_range
from lrq_ha.streams import node_connection
from lrq_ha.streams.errors import ConnectionLost, MissingQueue
from lrq_ha.streams.node_connection import NodeConnection

pytestmark = pytest.mark.broker

COUNT = 3_000
HANGS_S = 240.0


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
    monkeypatch.setattr(node_connection, "IDLE_TIMEOUT_S", 5.0)
    given: list[int] = []
    (part,) = plan(options)

    def read() -> None:
        for _, taken in read_range(part, options):
            given.extend(one.position.sequence for one in taken.transactions)
            if len(given) == 1_000:
                two.stop("w1.broker")

    try:
        assert within(HANGS_S, read), f"it hangs after {len(given)}"
    finally:
        two.cont("w1.broker")
    assert given == list(range(1, COUNT + 1))


@pytest.mark.parametrize("part", ["sidecar", "broker"])
def test_a_primary_that_stands_still_is_promoted_over(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the doors of a sink: a partition goes on at the new primary."""
    monkeypatch.setattr(node_connection, "IDLE_TIMEOUT_S", 5.0)
    monkeypatch.setattr(node_connection, "PREFETCH_MESSAGES", 1)
    monkeypatch.setattr(node_connection, "ACK_MESSAGES", 1)
    wanted: list[str] = []
    given: list[str] = []
    with Lab({"east": 1, "west": 2}, directory=tmp_path / "lab", sites={"east": ["west"], "west": []}) as lab:
        doors = ",".join(lab.nodes[name].door for name in ("w1", "w2"))
        options = parse_options({"nodes": doors, "subscribe": "LRQ_Recv_app_east"})
        with Publisher([lab.nodes["e1"].door], producer="app", client_name="app", confirm_timeout_s=120) as publisher:
            for number in range(6):  # one by one: a message of its own for each
                wanted.append(publisher.transmit_log_entry_message(b"%d" % number, ["west"]).replication_id)
                planned = until_all_is_there(options, len(wanted))
        assert lab.primary("west") == "w1"

        def read() -> None:
            for _, taken in read_range(planned, options):
                given.extend(one.replication_id for one in taken.transactions)
                if taken.transactions and lab.primary("west") == "w1":
                    lab.stop(f"w1.{part}")
                    take_over(lab)

        try:
            assert within(HANGS_S, read), f"it hangs after {len(given)}"
        finally:
            lab.cont(f"w1.{part}")
    assert [one for one in given if one in wanted] == wanted


def until_all_is_there(options: ReadOptions, count: int) -> Range:
    """The range of a queue once it holds so many log entries."""
    for _ in range(600):
        with suppress(MissingQueue):
            for planned in plan(options):
                there = sum(one.type == pb.LOG_ENTRY_SYNC for _, taken in read_range(planned, options) for one in taken.transactions)
                if there == count:
                    return planned
        time.sleep(0.2)
    raise AssertionError("not all has come")


def take_over(lab: Lab) -> None:
    """Promotes w2, which is refused until it has missed w1."""
    for _ in range(600):
        with suppress(LabError):
            lab.promote("w2", down=["w1"])
        if lab.primary("west") == "w2":
            return
        time.sleep(0.2)
    raise AssertionError("w2 has not taken over")


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


@pytest.mark.quick
def test_nothing_waits_for_a_node_that_stands_still(two: Lab, options: ReadOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a question, nor the farewell."""
    monkeypatch.setattr(node_connection, "ANSWER_TIMEOUT_S", 2.0, raising=False)
    nodes = [NodeConnection.open(options.access.reader_parameters(), "test", 60) for _ in range(2)]

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
