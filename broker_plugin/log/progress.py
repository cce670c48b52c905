"""How far the log is: which entries are safe, which are applied on this node, and the waiters for either.

Rules:
- Nothing touches a queue before its entry is safe (R4). An entry that needs nothing else is applied at that moment
  (`done_when_safe`).
- R, up to which everything is applied here, never passes an entry that could still fall out of the log.
- A waiter is told once, and asks again.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import Protocol

from lrq_ha.replication.applied import AppliedTracker
from lrq_ha.replication.node import Node
from lrq_ha.replication.positions import RangeSet
from lrq_ha.replication.queues import QueueKey

from .index import Index

# Bytes of memory that a run of entries costs until it is safe, beside its own, rounded up. Measured with CPython 3.11
# (resident, 100,000 runs of one): a publish 580, an ack 1,140, a publish with local completion 1,700 (its waiter, its
# destination, its confirm).
RUN_BYTES = 1_700


class SafeWaiter(Protocol):
    """Waits until the log is safe further than now."""

    def safe_advanced(self) -> None: ...


class AppliedWaiter(Protocol):
    """Waits until more is applied."""

    def applied_advanced(self) -> None: ...


class EntryWaiter(Protocol):
    """Waits until one entry is applied."""

    def applied_advanced(self, sequence: int) -> None: ...


class DurableWaiter(Protocol):
    """Waits for the own stream alone."""

    def durable_advanced(self) -> None: ...


class Progress:
    """The positions of the log on this node, and the waiters for them.

    Attributes:
        safe: Everything up to this entry may touch the queues.
        tracker: The entries that are applied.
        parked, parked_bytes: Messages that full queues refuse, and that are tried again.
        waits_for_room: Asked which parked entries wait, or may wait, for room in a queue: ascending, each with
            whether it came by the queue's name.
        waiting_safe, waiting_applied, waiting_durable: The waiters.
        waiting_room: Called when fewer entries wait for the applier.
        on_wake: Called when a cause of delay for others may be gone.
        met: Entries of which a copy was met in a queue before they counted as applied.
        early: Publishes with local completion that are not applied: they are never refused because their fate is
            unknown.
        unsafe_bytes: Cost of the entries that are not safe: their own bytes, and RUN_BYTES for each run.
        lies_far_back: Whether the broker may soon drop from the log an entry that is not known to be applied.
        at_stake_entries, at_stake_bytes: Confirmed with local completion, and not safe.
    """

    def __init__(self, node: Node, index: Index) -> None:
        self._node = node
        self._index = index
        self.safe = 0
        self.tracker = AppliedTracker()
        self.parked = RangeSet()
        self.parked_bytes = 0
        self.waits_for_room: Callable[[QueueKey], list[tuple[int, bool]]] = lambda _queue: []
        self.waiting_safe: set[SafeWaiter] = set()
        self.waiting_applied: set[AppliedWaiter] = set()
        self.waiting_durable: set[DurableWaiter] = set()
        self.waiting_room: set[Callable[[], None]] = set()
        self.on_wake: Callable[[], None] = lambda: None
        self.lies_far_back: Callable[[], bool] = lambda: False
        self.met = RangeSet()
        self.early = RangeSet()
        self.unsafe_bytes = 0
        self.at_stake_entries = 0
        self.at_stake_bytes = 0
        self._written = 0
        self._unsafe: deque[tuple[int, int]] = deque()  # (last entry, bytes)
        self._at_stake: deque[tuple[int, int, int]] = deque()  # (last entry, entries, bytes)
        self._done_when_safe: deque[tuple[int, int, int]] = deque()  # (when this is safe, first, last); the first ones ascend
        self._safe_futures: deque[tuple[int, asyncio.Future[None]]] = deque()  # ascending
        self._applied_futures: list[tuple[int, asyncio.Future[None]]] = []
        self._awaited: dict[int, list[EntryWaiter]] = {}  # entries that are not applied, and the waiters for each
        self._awaited_entries: list[int] = []  # the keys of `_awaited`, ascending

    # ---- events ------------------------------------------------------------------------------------------------------

    def appended(self, last: int, size: int) -> None:
        """A run of entries up to `last`, of about `size` bytes, was appended on this node."""
        size += RUN_BYTES
        self.unsafe_bytes += size
        self._unsafe.append((last, size))

    def done_when_safe(self, first: int, last: int, when: int = 0) -> None:
        """These entries need nothing but that entry `when` is safe; 0: their last one."""
        self._done_when_safe.append((when or last, first, last))

    def confirmed_early(self, last: int, entries: int, size: int) -> None:
        """The client's publishes up to `last` were confirmed, and only the own stream is certain to have them."""
        if last > self.safe:
            self._at_stake.append((last, entries, size))
            self.at_stake_entries += entries
            self.at_stake_bytes += size

    def seen(self, sequence: int) -> None:
        """A copy of an entry was met in a queue: it is there, whatever the broker's confirm says."""
        if sequence > self.tracker.applied and not self.tracker.is_applied(sequence):
            self.met.add(sequence)

    def durable_advanced(self) -> None:
        """The own stream has more of the log."""
        if self.waiting_durable:
            waiting, self.waiting_durable = self.waiting_durable, set()
            for waiter in waiting:
                waiter.durable_advanced()

    def safe_advanced(self, safe: int) -> None:
        """R4: everything up to `safe` may touch the queues."""
        self.safe = safe
        self._index.safe(safe)
        while self._at_stake and self._at_stake[0][0] <= safe:
            _, entries, size = self._at_stake.popleft()
            self.at_stake_entries -= entries
            self.at_stake_bytes -= size
        while self._unsafe and self._unsafe[0][0] <= safe:
            self.unsafe_bytes -= self._unsafe.popleft()[1]
        while self._done_when_safe and self._done_when_safe[0][0] <= safe:
            _, first, last = self._done_when_safe.popleft()
            self.applied(first, last)
        while self._safe_futures and self._safe_futures[0][0] <= safe:
            future = self._safe_futures.popleft()[1]
            if not future.done():
                future.set_result(None)
        if self.waiting_safe:
            waiting, self.waiting_safe = self.waiting_safe, set()
            for waiter in waiting:
                waiter.safe_advanced()
        self.on_wake()

    def room_made(self) -> None:
        """Fewer entries wait for the applier: clients that were held up may send again."""
        waiting, self.waiting_room = self.waiting_room, set()
        for look in waiting:
            look()

    def applied(self, first: int, last: int) -> None:
        """These entries are in the queues and confirmed, or not needed there."""
        if not self.tracker.mark(first, last):  # while R stands still, only their being applied is kept
            self._index.dedup.completed_apart(first, last)
            self.met.remove(first, last)
            self.early.remove(first, last)
            self._wake_applied(first, last)
            return
        applied = self.tracker.applied
        self._index.dedup.completed(applied)
        if self.met:
            self.met.remove(0, applied)
        if self.early:
            self.early.remove(0, applied)
        self._node.applied = applied
        self._index.let_go(applied)
        self._wake_applied(first, last)
        if self._applied_futures:
            due = [future for upto, future in self._applied_futures if upto <= applied]
            self._applied_futures = [(upto, future) for upto, future in self._applied_futures if upto > applied]
            for future in due:
                if not future.done():
                    future.set_result(None)

    @property
    def written(self) -> int:
        """Everything up to this entry is in the queues, or not needed there, or is parked."""
        if not self.parked:
            return self.tracker.applied
        self._written = self.tracker.upto(self.parked, self._written)
        return self._written

    def _wake_applied(self, first: int, last: int) -> None:
        if self.waiting_applied:
            waiting, self.waiting_applied = self.waiting_applied, set()
            for waiter in waiting:
                waiter.applied_advanced()
        if self._awaited:
            entries = self._awaited_entries
            begin = bisect_left(entries, first)
            end = bisect_right(entries, last, begin)
            due, entries[begin:end] = entries[begin:end], ()
            for sequence in due:
                for each in self._awaited.pop(sequence):
                    each.applied_advanced(sequence)

    # ---- waiting -----------------------------------------------------------------------------------------------------

    async def wait_safe(self, sequence: int) -> None:
        """Returns when entry `sequence` is safe."""
        if sequence > self.safe:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            insort(self._safe_futures, (sequence, future), key=itemgetter(0))
            await future

    def when_applied(self, sequence: int, waiter: EntryWaiter) -> None:
        """Tells a waiter when entry `sequence`, which is not applied, is applied; once, however often the waiter asks."""
        waiters = self._awaited.get(sequence)
        if waiters is None:
            insort(self._awaited_entries, sequence)
            self._awaited[sequence] = [waiter]
        elif waiter not in waiters:
            waiters.append(waiter)

    def applied_no_matter(self, sequence: int, waiter: EntryWaiter) -> None:
        """Removes a waiter."""
        waiters = self._awaited.get(sequence, [])
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._awaited[sequence], self._awaited_entries[bisect_left(self._awaited_entries, sequence)]

    async def wait_applied(self, sequence: int) -> None:
        """Returns when everything up to `sequence` is in the queues and confirmed."""
        if sequence > self.tracker.applied:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._applied_futures.append((sequence, future))
            await future
