"""The visits of a message's copies to queues, by their `x-death` headers: dead letters and retry loops (R10).

Rules:

- `visit` is a copy's `x-death` count for the queue. `origin` is the queue of the copy's first death ("" for a copy that never died): one publish
  may be routed to two queues whose dead letters meet in a third, and these two copies must stay distinct.
- Visits of a copy at a queue only grow. REJECT or MOVED at visit v says that all visits up to v are over; DEQUEUE at visit v says that the copy
  is gone from there on.
"""

from __future__ import annotations

from pyroaring import BitMap64

Deaths = tuple[tuple[str, int], ...]
"""(queue, count) of a copy's `x-death`, counts summed over the reasons; the queue of the first death first. Empty: it never died."""


EVERY_SEQUENCE = 2**64 - 1


def visit_of(queue: str, deaths: Deaths) -> int:
    """The visit of a copy at `queue` (R10)."""
    for name, count in deaths:
        if name == queue:
            return count
    return 0


def origin_of(deaths: Deaths) -> str:
    """The queue of a copy's first death; "" if it never died."""
    return deaths[0][0] if deaths else ""


class Visits:
    """Operations on dead-lettered copies of one origin at one queue: bitmaps of sequences by visit, none of them empty."""

    __slots__ = ("done", "moved")

    def __init__(self) -> None:
        self.done: dict[int, BitMap64] = {}
        self.moved: dict[int, BitMap64] = {}  # a sequence stands at its greatest visit only, which implies the lower ones

    def add(self, first: int, last: int, visit: int, *, dequeued: bool) -> BitMap64:
        """Notes an operation; returns the sequences for which it is new information."""
        fresh = BitMap64()
        fresh.add_range(first, last + 1)
        table = self.done if dequeued else self.moved
        if not dequeued:
            for other in [v for v in table if v != visit]:
                if other > visit:
                    fresh -= table[other]
                else:
                    table[other] -= fresh
            self._drop_empty()
        known = table.setdefault(visit, BitMap64())
        fresh -= known
        known |= fresh
        self._drop_empty()
        return fresh

    def done_upto(self, seq: int, visit: int) -> bool:
        """Whether a DEQUEUE at this visit or an earlier one is known."""
        return any(v <= visit and seq in members for v, members in self.done.items())

    def moved_from(self, seq: int, visit: int) -> bool:
        """Whether a REJECT or MOVED at this visit or a later one is known."""
        return any(v >= visit and seq in members for v, members in self.moved.items())

    def known_after(self, seq: int, visit: int) -> bool:
        """Whether any operation at a later visit is known."""
        return any(v > visit and seq in members for table in (self.done, self.moved) for v, members in table.items())

    def members(self) -> BitMap64:
        """All sequences with a known operation."""
        return BitMap64.union(*self.done.values(), *self.moved.values())

    def forget(self, before: int) -> None:
        """Operations on sequences below `before` are not needed any more."""
        for table in (self.done, self.moved):
            for members in table.values():
                members.remove_range(0, before)
        self._drop_empty()

    def lose(self, end: int) -> None:
        for table in (self.done, self.moved):
            for members in table.values():
                members.remove_range(end + 1, EVERY_SEQUENCE)
        self._drop_empty()

    def _drop_empty(self) -> None:
        for table in (self.done, self.moved):
            for visit in [v for v, members in table.items() if not members]:
                del table[visit]
