"""Positions, epochs and range sets; the latter against Python's own sets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrq_ha.replication.positions import Position, RangeSet, epoch_name, epoch_number, owner_of, term_of

RANGE = st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda r: (r[0], r[0] + r[1]))


def members(ranges: RangeSet) -> set[int]:
    return {i for first, last in ranges for i in range(first, last + 1)}


def test_epochs_contain_their_owner() -> None:
    epoch = epoch_number(7, 255)
    assert (term_of(epoch), owner_of(epoch), epoch_name(epoch)) == (7, 255, "7.255")
    assert str(Position(epoch, 3)) == f"{epoch}.3"
    assert owner_of(0) == 0
    assert epoch_number(7, 255) < epoch_number(8, 1)


@given(st.lists(st.tuples(st.booleans(), RANGE)))
def test_a_range_set_is_a_set(actions: list[tuple[bool, tuple[int, int]]]) -> None:
    ranges, reference = RangeSet(), set[int]()
    for add, (first, last) in actions:
        if add:
            ranges.add(first, last)
            reference |= set(range(first, last + 1))
        else:
            ranges.remove(first, last)
            reference -= set(range(first, last + 1))
        assert members(ranges) == reference
        assert len(ranges) == len(reference)
        assert bool(ranges) == bool(reference)
    listed = list(ranges)
    assert len(listed) == ranges.ranges
    assert all(first <= last for first, last in listed)
    assert all(a[1] + 1 < b[0] for a, b in pairwise(listed))  # sorted, disjoint, not adjacent
    assert RangeSet.from_flat(ranges.flat()) == ranges == RangeSet.of(reference)
    if reference:
        assert (ranges.first, ranges.last) == (min(reference), max(reference))
    for value in range(52):
        assert (value in ranges) == (value in reference)
        reached = ranges.contiguous_from(value)
        assert set(range(value, reached + 1)) <= reference
        assert reached + 1 not in reference


@given(st.lists(RANGE), RANGE)
def test_parts(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    ranges = RangeSet(added)
    wanted = set(range(asked[0], asked[1] + 1))
    assert ranges.intersects(*asked) == bool(wanted & members(ranges))
    assert members(ranges.missing(*asked)) == wanted - members(ranges)
    if wanted:
        assert ranges.has_all(*asked) is (wanted <= members(ranges))


def test_single_values_and_names() -> None:
    ranges = RangeSet()
    ranges.add(5)
    ranges.add(7)
    ranges.add(6)
    assert list(ranges) == [(5, 7)]
    ranges.remove(6)
    assert repr(RangeSet([(1, 3), (5, 5)])) == "RangeSet([1..3, 5])"
    assert ranges != {5, 7}
    assert list(RangeSet().missing(3, 2)) == []
    with pytest.raises(IndexError):
        _ = RangeSet().first
    with pytest.raises(IndexError):
        _ = RangeSet().last


@given(st.lists(st.integers(0, 60), max_size=30), st.integers(1, 8))
def test_cover_is_the_smallest_of_so_many_ranges(values: list[int], most: int) -> None:
    exact = RangeSet.of(values)
    covering = exact.cover(most)
    assert covering.ranges == min(most, exact.ranges)
    assert members(exact) <= members(covering)
    pairs = list(exact)
    gaps = sorted(after - before - 1 for (_, before), (after, _) in pairwise(pairs))
    assert len(covering) - len(exact) == sum(gaps[: max(0, exact.ranges - most)])
