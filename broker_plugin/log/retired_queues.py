"""Deleted queues, and queues that were operated on without a declaration, until all entries up to there are
applied on this node. No I/O.

Rules:
- Only then can no earlier copy come to the queue any more, and the filter may drop its state of the queue.
- A cut takes its entries out again.
- A queue that the log does not declare may be gone (a client acknowledges a message of a deleted queue), or was made
  around the door.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from lrq_ha.replication.queues import QueueKey


class Departure(NamedTuple):
    """Entry `sequence` deletes a queue, or is an operation on one that is not declared. `dead_letters`: whether it
    may have dead-lettered.
    """

    sequence: int
    queue: QueueKey
    deleted: bool
    dead_letters: bool


class RetiredQueues:
    """The queues whose state is kept for a while only."""

    def __init__(self) -> None:
        self._noted: deque[Departure] = deque()  # in log order

    def deleted(self, sequence: int, queue: QueueKey, *, dead_letters: bool) -> None:
        """Entry `sequence` deletes a queue."""
        self._noted.append(Departure(sequence, queue, True, dead_letters))

    def undeclared(self, sequence: int, queue: QueueKey) -> None:
        """Entry `sequence` is an operation on a queue that the log does not declare there."""
        self._noted.append(Departure(sequence, queue, False, True))

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        while self._noted and self._noted[-1].sequence >= first:
            self._noted.pop()

    def take(self, applied: int) -> Iterator[Departure]:
        """Yields the queues whose entries are applied up to `applied`, each once."""
        while self._noted and self._noted[0].sequence <= applied:
            yield self._noted.popleft()
