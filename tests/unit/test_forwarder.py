"""Deltas that go on to other sites: whole transactions, ways, and refusals. Through real groups: tests/integration/test_receiver_topologies.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from lrq_ha.errors import LrqError
from lrq_ha.publisher import InvalidArgument, NackedError, Publisher, PublisherClosed
from lrq_ha.receiver import Forwarder, Update, UpdateType
from lrq_ha.replication.positions import Position


class Confirmed:
    """A confirm that says what it was asked."""

    def __init__(self, asked: list[float | None], failure: LrqError | None) -> None:
        self._asked, self._failure = asked, failure

    def result(self, timeout_s: float | None) -> str:
        self._asked.append(timeout_s)
        if self._failure is not None:
            raise self._failure
        return ""


class Sent:
    """A publisher; `failures`: of the first confirms. It is closed once it has sent `most`."""

    def __init__(self, *failures: LrqError, most: int = 100) -> None:
        self.log: list[tuple[list[tuple[bytes, list[str]]], tuple[str, ...]]] = []
        self.asked: list[float | None] = []
        self._failures, self._most = list(failures), most

    def transmit_log_entry_messages(self, entries: Sequence[tuple[bytes, list[str]]], path: tuple[str, ...]) -> Confirmed:
        if len(self.log) == self._most:
            raise PublisherClosed("The publisher is closed")
        self.log.append((list(entries), path))
        return Confirmed(self.asked, self._failures.pop(0) if self._failures else None)

    def forward(self, updates: list[Update], *arguments: Any) -> None:
        Forwarder(cast(Publisher, cast(Any, self))).forward(updates, *arguments)


def delta(sequence: int, payload: bytes = b"x", index: int = 0, path: tuple[str, ...] = ("north",)) -> Update:
    shared = ("LRQ_Recv_stock_north", "north", "stock", UpdateType.LOG_ENTRY_SYNC, Position(1, sequence), f"app/{sequence}.{index}", 0)
    return Update(*shared, index, payload, "", True, path)


def test_transactions_go_on_whole_and_are_waited_for() -> None:
    sent = Sent()
    sent.forward([delta(7, b"a"), delta(7, b"b", 1), delta(9, b"c")], ["east", "south"], 5)
    assert sent.log == [([(b"a", ["east", "south"]), (b"b", ["east", "south"])], ("north",)), ([(b"c", ["east", "south"])], ("north",))]
    assert sent.asked == [5, 5]


def test_nothing_goes_back_the_way_it_came() -> None:
    sent = Sent()
    sent.forward([delta(1, path=("east", "north")), delta(2, path=("east", "south", "north")), delta(3)], ["east", "south"])
    assert sent.log == [([(b"x", ["south"])], ("east", "north")), ([(b"x", ["east", "south"])], ("north",))]


def test_each_update_may_have_destinations_of_its_own() -> None:
    sent = Sent()
    sent.forward([delta(1, b"a"), delta(1, b"b", 1), delta(2, b"c")], lambda update: ["east"] * (update.opaque_payload == b"b"))
    assert sent.log == [([(b"b", ["east"])], ("north",))]


def test_rows_of_a_snapshot_are_refused() -> None:
    row = Update("LRQ_Recv_stock_north", "north", "stock", UpdateType.SNAPSHOT_SYNC, Position(1, 7), "app/7.0", 0, 0, b"x", "r", True)
    sent = Sent()
    with pytest.raises(InvalidArgument, match=r"Rows of a snapshot are not forwarded.*full sync provider"):
        sent.forward([delta(6), row], ["east"])
    assert sent.log == []


def test_the_first_failure_passes_to_the_listener_and_each_confirm_is_asked() -> None:
    """A confirm that no caller asks makes a later flush of the publisher fail."""
    sent = Sent(NackedError("middle/1", 312, "no such site"), NackedError("middle/2", 312, "none"))
    with pytest.raises(NackedError, match="no such site"):
        sent.forward([delta(1), delta(2), delta(3)], ["nowhere"])
    assert sent.asked == [60, 0, 0]
    ended = Sent(most=2)
    with pytest.raises(PublisherClosed):
        ended.forward([delta(1), delta(2), delta(3)], ["east"])
    assert ended.asked == [0, 0]
