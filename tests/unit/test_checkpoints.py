"""Where a restart begins to read (R7), and the statuses that a checkpoint carries."""

from __future__ import annotations

from dataclasses import replace

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.checkpoints import KEPT_MAX, UNKNOWN, Checkpoints, StartPoint
from lrq_ha.routing import statuses
from lrq_ha.routing.statuses import Statuses, Told


def point(sequence: int, offset: int = UNKNOWN) -> StartPoint:
    return StartPoint(sequence, 257, 257, offset, True)


def test_a_restart_begins_at_the_newest_that_is_located_and_applied() -> None:
    checkpoints = Checkpoints()
    assert checkpoints.last == 0
    assert checkpoints.start(1 << 40) is None
    for each in (point(10, 3), point(20), point(30, 7)):
        checkpoints.noted(each)
    assert checkpoints.last == 30
    assert [checkpoints.start(applied) for applied in (9, 10, 29, 30)] == [None, point(10, 3), point(10, 3), point(30, 7)]
    checkpoints.located(point(20), 5)
    assert checkpoints.start(29) == point(20, 5)


def test_the_newest_durable_one_is_looked_up_once() -> None:
    checkpoints = Checkpoints()
    assert checkpoints.to_locate(5) is None
    checkpoints.noted(point(10))
    checkpoints.noted(point(20))
    assert checkpoints.to_locate(9) is None
    assert checkpoints.to_locate(19) == point(10)
    assert checkpoints.to_locate(20) == point(20)
    checkpoints.located(point(20), 4)
    assert checkpoints.to_locate(20) is None


def test_what_is_cut_off_is_no_start_and_a_late_answer_changes_nothing() -> None:
    checkpoints = Checkpoints()
    checkpoints.noted(point(10, 3))
    checkpoints.noted(point(20))
    checkpoints.cut(20)
    checkpoints.located(point(20), 4)
    assert checkpoints.last == 10
    assert checkpoints.start(99) == point(10, 3)
    checkpoints.noted(replace(point(20), epoch=513, leader=513))
    checkpoints.located(point(20), 4)
    assert checkpoints.start(99) == point(10, 3)


def test_they_do_not_grow_without_end() -> None:
    checkpoints = Checkpoints()
    for sequence in range(1, 5 * KEPT_MAX):
        checkpoints.noted(point(sequence, sequence))
    assert checkpoints.start(99 * KEPT_MAX) == point(5 * KEPT_MAX - 1, 5 * KEPT_MAX - 1)
    oldest = next(s for s in range(1, 5 * KEPT_MAX) if checkpoints.start(s) is not None)
    assert oldest < KEPT_MAX, "a backup that is far behind has a place to be read from"


def status(key: str, name: str = "") -> pb.Status:
    return pb.Status(key=key, client=pb.ClientStatus(client_name=name))


def test_a_status_counts_when_it_is_safe_and_what_is_cut_off_leaves_the_one_before() -> None:
    told = Statuses()
    told.noted(1, status("a", "old"))
    told.noted(2, status("b"))
    assert told.since(0) == []
    told.safe(1)
    assert told.since(0) == [Told(1, status("a", "old"))]
    told.noted(3, status("a", "new"))
    assert told.rows() == [Told(2, status("b")), Told(3, status("a", "new"))]
    told.cut(3)
    told.safe(9)
    assert told.since(0) == [Told(1, status("a", "old")), Told(2, status("b"))]
    assert told.since(1) == [Told(2, status("b"))]
    again = Statuses()
    again.noted(7, status("c"))
    again.load(told.rows())
    assert again.since(0) == told.since(0)
    assert again.rows() == told.rows()


def test_keys_are_bounded() -> None:
    told = Statuses()
    for sequence in range(1, statuses.CLIENTS_MAX + 3):
        told.noted(sequence, status(f"k{sequence}"))
        if sequence == 10:
            told.noted(sequence, status("k1"))
    told.safe(1 << 40)
    rows = told.rows()
    assert len(rows) == statuses.CLIENTS_MAX
    assert {"k1", f"k{statuses.CLIENTS_MAX + 2}"} <= {row.status.key for row in rows}
