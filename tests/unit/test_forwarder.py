"""Deltas that go on to other sites: numbers, ways, and refusals. Through real groups: tests/integration/test_receiver_topologies.py."""

from __future__ import annotations

from typing import Any, cast

import pytest

from lrq_ha.publisher import InvalidArgument, NackedError, Publisher
from lrq_ha.publisher.messages import LogEntries
from lrq_ha.receiver import Forwarder, Update, UpdateType
from lrq_ha.replication.positions import Position

LOG = "0123456789abcdef" * 2


class Sent:
    """A publisher to a group that takes each number once, and refuses one."""

    producer = "middle"

    def __init__(self, refuses: int = 0) -> None:
        self.refuses = refuses
        self.log: list[tuple[str, int, LogEntries]] = []
        self.waits: list[float | None] = []

    def open_producer(self, name: str, sent: int, *, ascending: bool) -> Sent:
        assert ascending
        assert sent > 10**18, "the log may know any number"
        self.name = name
        return self

    def transmit(self, number: int, entries: LogEntries) -> Sent:
        last = max((known for name, known, _ in self.log if name == self.name), default=0)
        if number > last and number != self.refuses:
            self.log.append((self.name, number, entries))
        return self

    def result(self, timeout_s: float | None) -> str:
        self.waits.append(timeout_s)
        if self.refuses:
            raise NackedError("middle/1", 312, "no such site")
        return ""

    @property
    def publisher(self) -> Publisher:
        return cast(Publisher, cast(Any, self))


def delta(sequence: int, payload: bytes = b"x", index: int = 0, *, epoch: int = 1, path: tuple[str, ...] = ("north",), log: str = LOG) -> Update:
    shared = ("LRQ_Recv_stock_north", "north", "stock", UpdateType.LOG_ENTRY_SYNC, Position(epoch, sequence), f"app/{sequence}.{index}", 0)
    return Update(*shared, index, payload, "", True, path, log)


def test_a_transaction_goes_on_under_its_sequence_and_once() -> None:
    sent = Sent()
    forwarder = Forwarder(sent.publisher)
    updates = [delta(7, b"a"), delta(7, b"b", 1), delta(9, b"c", epoch=2)]
    for _ in range(2):  # the list comes again
        forwarder.forward(updates, ["east", "south"], 5)
    assert [(number, entries.entries, entries.path) for _, number, entries in sent.log] == [
        (7, ((b"a", ("east", "south")), (b"b", ("east", "south"))), ("north",)),
        (9, ((b"c", ("east", "south")),), ("north",)),
    ]
    assert {name for name, _, _ in sent.log} == {f"middle.{LOG[:16]}"}
    assert sent.waits == [5] * 4, "each transaction was waited for"


def test_logs_have_numbers_of_their_own() -> None:
    sent = Sent()
    forwarder = Forwarder(sent.publisher)
    for log in (LOG, "f" * 32, ""):
        forwarder.forward([delta(7, log=log)], ["east"])
    assert [name for name, _, _ in sent.log] == [f"middle.{LOG[:16]}", "middle.ffffffffffffffff", "middle.unknown"]


def test_nothing_goes_back_the_way_it_came() -> None:
    sent = Sent()
    updates = [delta(1, path=("east", "north")), delta(2, path=("east", "south", "north")), delta(3)]
    Forwarder(sent.publisher).forward(updates, ["east", "south"])
    assert [(number, entries.entries) for _, number, entries in sent.log] == [(1, ((b"x", ("south",)),)), (3, ((b"x", ("east", "south")),))]


def test_each_update_may_have_destinations_of_its_own() -> None:
    sent = Sent()
    Forwarder(sent.publisher).forward([delta(1, b"a"), delta(1, b"b", 1), delta(2, b"c")], lambda update: ["east"] * (update.opaque_payload == b"b"))
    assert [(number, entries.entries) for _, number, entries in sent.log] == [(1, ((b"b", ("east",)),))]


def test_rows_of_a_snapshot_are_refused() -> None:
    row = Update("LRQ_Recv_stock_north", "north", "stock", UpdateType.SNAPSHOT_SYNC, Position(1, 7), "app/7.0", 0, 0, b"x", "r", True)
    sent = Sent()
    with pytest.raises(InvalidArgument, match=r"Rows of a snapshot are not forwarded.*full sync provider"):
        Forwarder(sent.publisher).forward([row], ["east"])
    assert sent.log == []


def test_a_refusal_passes_to_the_listener() -> None:
    with pytest.raises(NackedError, match="no such site"):
        Forwarder(Sent(refuses=7).publisher).forward([delta(7)], ["nowhere"])
