"""Stamps, the generation table with its boundary, and the applied tracker."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lrq_ha.replication.applied as applied_module
from lrq_ha.errors import IllegalEvent, MalformedInput
from lrq_ha.replication.applied import AppliedRecord, AppliedTracker, Generations, format_stamp, parse_stamp


@given(st.integers(0, 2**60), st.integers(0, 2**60), st.integers(0, 2**32 - 1))
def test_stamp(epoch: int, sequence: int, generation: int) -> None:
    value = format_stamp(epoch, sequence, generation)
    assert parse_stamp(value) == (epoch, sequence, generation)
    assert len(value) <= applied_module.STAMP_MAX_BYTES


@pytest.mark.parametrize("value", [b"", b"1.2", b"1/2", b"1.2/", b"1.2/3 ", b" 1.2/3", b"1.2/3\n", b"-1.2/3", b"1.2.3/4", b"1." + b"9" * 20 + b"/1"])
def test_malformed_stamp(value: bytes) -> None:
    with pytest.raises(MalformedInput):
        parse_stamp(value)


def test_the_boundary_is_before_the_sequence() -> None:
    """Entry R was applied by the older generation; entry R + 1 is published by the new one."""
    table = Generations([(0, 1), (10, 2)])
    assert table.counts(10, 1)
    assert not table.counts(10, 2)
    assert table.counts(11, 2)
    assert not table.counts(11, 1)
    assert table.counts(1, 1)
    assert table.of(0) == -1


def test_two_starts_without_progress_leave_one_entry() -> None:
    table = Generations([(0, 1), (10, 2), (10, 3)])
    assert table.table == ((0, 1), (10, 3))
    assert not table.counts(11, 2)
    assert table.newest == 3


def test_nothing_counts_before_the_first_generation() -> None:
    assert Generations().newest == 0
    assert Generations().table == ()


def test_the_table_never_goes_back() -> None:
    table = Generations([(5, 2)])
    for applied, generation in ((5, 2), (6, 1), (4, 3)):
        with pytest.raises(IllegalEvent):
            table.opened(applied, generation)
    assert table.table == ((5, 2),)


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applied_module, "GENERATIONS_MAX", 2)
    table = Generations([(0, 1), (1, 2)])
    with pytest.raises(IllegalEvent, match="set the broker up again"):
        table.opened(2, 3)
    table.opened(1, 3)
    assert table.table == ((0, 1), (1, 3))


def rows(table: Generations) -> tuple[tuple[int, int], ...]:
    """What it holds now: of an attribute, type checkers keep how many rows it had at the assertion before."""
    return table.table


def test_a_log_that_lost_its_end() -> None:
    table = Generations([(0, 1), (4, 2), (9, 5)])
    table.cut(9)
    assert rows(table) == ((0, 1), (4, 2), (9, 5))
    table.cut(6)
    assert rows(table) == ((0, 1), (4, 2), (6, 5))
    assert table.counts(7, 5)
    assert not table.counts(7, 2)
    assert table.counts(6, 2)
    table.cut(4)
    assert rows(table) == ((0, 1), (4, 5))
    assert table.newest == 5
    table.cut(0)
    assert rows(table) == ((0, 5),)
    table.opened(3, 6)
    assert rows(table) == ((0, 5), (3, 6))
    begun_late = Generations([(3, 6)])
    begun_late.cut(0)
    assert rows(begun_late) == ((0, 6),)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=8))
def test_counts_is_the_models_rule(steps: list[tuple[int, int]]) -> None:
    """model2/m2_filter.py: max(g for r, g in gens if r <= p), p counted from 0."""
    gens, applied, generation = [], 0, 0
    for more, step in steps:
        gens.append((applied, generation := generation + step))
        applied += more
    table = Generations(gens)
    for p in range(applied + 5):
        valid = max(g for r, g in gens if r <= p)
        assert table.of(p + 1) == valid
        assert all(table.counts(p + 1, g) == (g == valid) for _, g in gens)
    assert Generations(table.table).table == table.table


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6)), max_size=25))
def test_tracker(marks: list[tuple[int, int]]) -> None:
    tracker, reference = AppliedTracker(), {0}
    for first, length in marks:
        before = tracker.applied
        moved = tracker.mark(first, first + length)
        reference |= set(range(first, first + length + 1))
        assert tracker.applied == next(i for i in range(99) if i + 1 not in reference)
        assert moved == (tracker.applied > before)
        assert all(tracker.is_applied(i) == (i in reference) for i in range(1, 45))
        missing = {i for a, b in tracker.needs(3, 40) for i in range(a, b + 1)}
        assert missing == set(range(3, 41)) - reference


def test_the_record_is_plain_data() -> None:
    record = AppliedRecord(5, None, ((0, 1),), (), b"")
    assert record == AppliedRecord(5, None, ((0, 1),), (), b"")
    assert AppliedTracker(record.applied).applied == 5
