"""The batches sent to one receiver of a log: from memory while it keeps up, from the stream when it is behind. Pure.

Rules:

- A batch is kept once, as the bytes that went to the own stream; every receiver is sent these bytes.
- Memory holds the newest batches up to a limit in bytes. A receiver that needs older ones is fed from the stream until it has reached memory.
- At most `in_flight_bytes_max` are on their way to a receiver.
- The receiver's guard (guard.py) knows what was sent and what was acknowledged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from .guard import QueueGuard
from .log import BatchHeader

#: Bytes of memory that a batch costs beside its body, rounded up: 229 with CPython 3.11 (resident, 200,000 of 49 bytes).
BATCH_BYTES = 256


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch as it stands in the stream."""

    header: BatchHeader
    body: bytes


class RoutingQueue:
    """The newest batches of a routing queue, kept in memory for the receivers that keep up.

    Args:
        memory_bytes_max: Cost limit of the batches kept. The newest one is always kept.
    """

    def __init__(self, memory_bytes_max: int = 64 << 20) -> None:
        self._limit = memory_bytes_max
        self._batches: deque[StoredBatch] = deque()
        self._bytes = 0

    def append(self, batch: StoredBatch) -> None:
        self._batches.append(batch)
        self._bytes += BATCH_BYTES + len(batch.body)
        while self._bytes > self._limit and len(self._batches) > 1:
            self._bytes -= BATCH_BYTES + len(self._batches.popleft().body)

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        while self._batches and self._batches[-1].header.last >= first:
            self._bytes -= BATCH_BYTES + len(self._batches.pop().body)

    @property
    def first(self) -> int:
        """First sequence in memory; 0 if nothing is there."""
        return self._batches[0].header.first if self._batches else 0

    @property
    def bytes(self) -> int:
        """Cost of the batches in memory."""
        return self._bytes

    def starting_at(self, sequence: int) -> int | None:
        """Index of the batch that begins with `sequence`; None if memory does not have it."""
        if not self._batches or sequence < self._batches[0].header.first:
            return None
        i = bisect_left(self._batches, sequence, key=lambda b: b.header.first)
        if i < len(self._batches) and self._batches[i].header.first == sequence:
            return i
        return None

    def __getitem__(self, index: int) -> StoredBatch:
        return self._batches[index]

    def __len__(self) -> int:
        return len(self._batches)


class ReplicatingSubscription:
    """The sending of a log to one backup, within a limit of bytes on their way (Qpid HA: ReplicatingSubscription).

    Args:
        guard: Of the backup. The subscription tells it what is sent; the leader tells it what is acknowledged.
        in_flight_bytes_max: Bytes sent and not acknowledged at most.
    """

    def __init__(self, guard: QueueGuard, in_flight_bytes_max: int = 16 << 20) -> None:
        self.in_flight_bytes = 0
        self._guard = guard
        self._limit = in_flight_bytes_max
        self._sizes: deque[tuple[int, int]] = deque()

    @property
    def sent(self) -> int:
        """The last entry that the backup was sent, or brought."""
        return self._guard.sent

    def has_room(self) -> bool:
        return self.in_flight_bytes < self._limit

    def send(self, batch: StoredBatch) -> None:
        """Records that `batch` is sent now. Raises IllegalEvent unless it is the next one."""
        self._guard.deliver(batch.header.first, batch.header.last)
        self.in_flight_bytes += len(batch.body)
        self._sizes.append((batch.header.last, len(batch.body)))

    def settle(self, upto: int) -> None:
        """The backup has acknowledged every entry up to `upto`: its bytes are no longer on their way."""
        while self._sizes and self._sizes[0][0] <= upto:
            self.in_flight_bytes -= self._sizes.popleft()[1]
