"""Positions in a replicated log, and sets of them.

Rules:

- A sequence grows by one with each entry of the log and starts at 1; 0 is "before the first".
- An epoch number contains the node that owns it, so two nodes can never take one epoch (R1).
- Sets of sequences are ranges, never an object per message.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

NODE_ID_MAX = 255


class Position(NamedTuple):
    """An entry of a log: the epoch it was written in, and its sequence."""

    epoch: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.sequence}"


def epoch_number(term: int, owner: int) -> int:
    """The epoch of `owner` (1 to 255) in `term` (>= 1)."""
    return (term << 8) | owner


def term_of(epoch: int) -> int:
    return epoch >> 8


def owner_of(epoch: int) -> int:
    """The node that owns an epoch; 0 for epoch 0, which has no owner."""
    return epoch & NODE_ID_MAX


def epoch_name(epoch: int) -> str:
    """The form of an epoch for people: term.owner."""
    return f"{term_of(epoch)}.{owner_of(epoch)}"


class RangeSet:
    """A set of integers, kept as sorted, disjoint, non-adjacent inclusive ranges. Cheap where the integers are dense."""

    __slots__ = ("_first", "_last")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._first: list[int] = []
        self._last: list[int] = []
        for first, last in ranges:
            self.add(first, last)

    def add(self, first: int, last: int | None = None) -> None:
        """Adds first .. last (inclusive; `first` alone by default)."""
        last = first if last is None else last
        firsts, lasts = self._first, self._last
        if lasts and lasts[-1] == first - 1:  # the usual case: growing at the end
            lasts[-1] = last
            return
        if not lasts or first > lasts[-1]:
            firsts.append(first)
            lasts.append(last)
            return
        low = bisect_left(lasts, first - 1)
        high = bisect_right(firsts, last + 1)
        if low < high:
            first, last = min(first, firsts[low]), max(last, lasts[high - 1])
        firsts[low:high] = [first]
        lasts[low:high] = [last]

    def remove(self, first: int, last: int | None = None) -> None:
        """Removes first .. last (inclusive)."""
        last = first if last is None else last
        firsts, lasts = self._first, self._last
        low = bisect_left(lasts, first)
        high = bisect_right(firsts, last)
        if low >= high:
            return
        left = [(firsts[low], first - 1)] if firsts[low] < first else []
        right = [(last + 1, lasts[high - 1])] if lasts[high - 1] > last else []
        kept = left + right
        firsts[low:high] = [f for f, _ in kept]
        lasts[low:high] = [x for _, x in kept]

    def __contains__(self, value: int) -> bool:
        i = bisect_left(self._last, value)
        return i < len(self._last) and self._first[i] <= value

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self)

    def __bool__(self) -> bool:
        return bool(self._first)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._first, self._last))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeSet) and self._first == other._first and self._last == other._last

    def __repr__(self) -> str:
        return "RangeSet([" + ", ".join(f"{f}..{x}" if f != x else str(f) for f, x in self) + "])"

    @property
    def first(self) -> int:
        """The least member. Raises IndexError when empty."""
        return self._first[0]

    @property
    def last(self) -> int:
        """The greatest member. Raises IndexError when empty."""
        return self._last[-1]

    def contiguous_from(self, start: int) -> int:
        """The greatest n such that all of start .. n are members; start - 1 if `start` is not."""
        i = bisect_left(self._last, start)
        if i < len(self._last) and self._first[i] <= start:
            return self._last[i]
        return start - 1

    @property
    def ranges(self) -> int:
        """How many separate ranges there are."""
        return len(self._first)

    def intersects(self, first: int, last: int) -> bool:
        """Whether any of first .. last is a member."""
        i = bisect_left(self._last, first)
        return i < len(self._last) and self._first[i] <= last

    def missing(self, first: int, last: int) -> RangeSet:
        """Those of first .. last that are not members."""
        rest, begin = RangeSet(), first
        for i in range(bisect_left(self._last, first), bisect_right(self._first, last)):
            if begin < self._first[i]:
                rest.add(begin, self._first[i] - 1)
            begin = self._last[i] + 1
        if begin <= last:
            rest.add(begin, last)
        return rest

    def has_all(self, first: int, last: int) -> bool:
        """Whether all of first .. last (inclusive, and there are some) are members."""
        i = bisect_left(self._last, first)
        return i < len(self._last) and self._first[i] <= first and last <= self._last[i]

    def cover(self, ranges: int) -> RangeSet:
        """The smallest set of at most so many ranges (>= 1) that has all of these members."""
        pairs = list(self)
        gaps = sorted(range(1, len(pairs)), key=lambda i: pairs[i][0] - pairs[i - 1][1], reverse=True)
        kept = set(gaps[: ranges - 1])
        covering = RangeSet(pairs[:1])
        for i, (first, last) in enumerate(pairs[1:], 1):
            covering.add(first if i in kept else covering.last, last)
        return covering

    def flat(self) -> list[int]:
        """first, last, first, last, …: the form on the wire."""
        return [value for pair in self for value in pair]

    @classmethod
    def from_flat(cls, values: Iterable[int]) -> RangeSet:
        it = iter(values)
        return cls(zip(it, it))

    @classmethod
    def of(cls, values: Iterable[int]) -> RangeSet:
        """From single values, sorted or not."""
        new = cls()
        for value in values:
            new.add(value)
        return new
