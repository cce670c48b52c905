"""Operators see the position of a receiver that keeps it in a database; nothing else depends on what the group is told."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from receive_node import CLIENT, NODES, ReceiveNode, at, connect_receivers, until

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.receiver import Listener, Receiver, SqlPositions, Update
from lrq_ha.routing.chain import position_of

Q = "LRQ_Recv_orders_east"


class Idle(Listener):
    def process_updates_in_snapshot_sync(self, updates: list[Update]) -> bool:
        return True

    def process_updates_in_log_entry_sync(self, updates: list[Update]) -> bool:
        return True


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> ReceiveNode:
    monkeypatch.setattr("lrq_ha.receiver.position_teller.TELL_EVERY_S", 0.01)
    found = connect_receivers(monkeypatch)
    found.begin()
    return found


@pytest.fixture
def receiver(tmp_path: Path) -> Callable[[], Receiver]:
    def make() -> Receiver:
        return Receiver(NODES, CLIENT, "db", Idle(), positions=SqlPositions(lambda: sqlite3.connect(tmp_path / "positions.db", timeout=30)))

    return make


def told(node: ReceiveNode) -> pb.Commit:
    return pb.Commit.FromString(node.get(f"LRQ_Ask_position/db/{Q}"))


def shows(node: ReceiveNode, sequence: int) -> None:
    until(lambda: position_of(told(node).position) == at(sequence) and told(node).phase == "normal")


def test_the_group_is_told_and_forgets(node: ReceiveNode, receiver: Callable[[], Receiver]) -> None:
    with receiver() as first:
        first.start()
        shows(node, 4)
        node.delta(5, 6)
        shows(node, 6)
    node.delta(7)
    with receiver() as second:
        second.start()
        shows(node, 7)
        assert told(node).value == "", "no receiver begins there"
        assert second.stop()
        assert second.forget("east")
        assert not told(node).token


def test_a_position_that_the_group_keeps_is_left_alone(node: ReceiveNode, receiver: Callable[[], Receiver], caplog: pytest.LogCaptureFixture) -> None:
    with Receiver(NODES, CLIENT, "db", Idle()) as other:
        other.start()
        shows(node, 4)
        assert other.stop()
    kept = told(node)
    assert kept.value
    with caplog.at_level(logging.WARNING, "lrq_ha.receiver"), receiver() as found:
        found.start()
        until(lambda: "are not told" in caplog.text)
        node.delta(5)
        assert found.wait_for("east", position=at(5))
        assert found.stop()
        assert found.forget("east")
    assert told(node) == kept
    assert caplog.text.count("are not told") == 1


def test_without_the_right_the_receiver_goes_on(node: ReceiveNode, receiver: Callable[[], Receiver], caplog: pytest.LogCaptureFixture) -> None:
    node.commits.noted(1, pb.Commit(receiver="db", queue="LRQ_Recv_bills_east", token="t", user="other"))
    node.commits.safe(1)
    with caplog.at_level(logging.WARNING, "lrq_ha.receiver"), receiver() as found:
        found.start()
        until(lambda: "belongs to another user" in caplog.text)
        node.delta(5)
        assert found.wait_for("east", position=at(5))
    assert caplog.text.count("are not told") == 1
