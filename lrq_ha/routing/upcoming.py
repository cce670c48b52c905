"""What comes next in a chain: transactions that were read, and marks of full sync requests, in log order."""

from __future__ import annotations

from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START
from lrq_ha.routing.merge import Item, Merge
from lrq_ha.routing.messages import Stream
from lrq_ha.routing.requests import COMPLETED, Mark, Requests


class Upcoming:
    """The items of a merge and the marks of the requests, behind what was taken.

    Args:
        merge: Of the views that are read.
        requests: The marks.

    Attributes:
        taken: Items and marks up to here are sent or left out.
        empty: The id of an empty snapshot that is to start the chain; empty: none is.
    """

    def __init__(self, merge: Merge, requests: Requests) -> None:
        self.taken = START
        self.empty = ""
        self._merge = merge
        self._requests = requests

    def next(self) -> Item | Mark | None:
        """The next item or mark; None if it is not known yet."""
        if not self._merge.is_open(Stream.LOG_ENTRIES):
            return None
        head = self._merge.head()
        if self.empty:
            return self._empty_mark(head)
        mark = self._requests.next_after(self.taken)
        candidate = mark if mark is not None and (head is None or mark.position < head.position) else head
        return candidate if candidate is not None and self._merge.ready(candidate.position) else None

    def _empty_mark(self, head: Item | None) -> Mark | None:
        """An empty snapshot goes before the first delta that is left, or behind everything read if there is none."""
        through = self._merge.through(Stream.LOG_ENTRIES)
        if head is None and through <= self.taken:
            return None
        # The entry before a transaction has its epoch: an epoch's first entry is its MARKER (R1).
        position = through if head is None else Position(head.position.epoch, head.position.sequence - 1)
        return Mark(position, self.empty, COMPLETED)

    def passed_to(self) -> Position:
        """Everything up to here is taken, or not for the sink. The view of the log entries is read."""
        mark, through = self._requests.next_after(self.taken), min(self._merge.through(stream) for stream in Stream if self._merge.is_open(stream))
        all_taken = self._merge.head() is None and (mark is None or mark.position > through)
        return max(self.taken, through) if all_taken else self.taken
