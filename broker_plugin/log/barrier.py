"""The barrier in front of a declaration: everything appended before is in the queues and on record, and nothing
comes in meanwhile.

Rules:
- Messages that a restart publishes again go by the bindings of that moment, and older copies no longer count (R8). So
  before bindings change, everything published is on record. Messages before a full queue are not waited for.
- In an alarm of the broker nothing gets into the log or the queues, and acknowledgements must not wait for the
  alarm's end: draining queues may be the way out. So no barrier goes up then, and a barrier that is not up yet is
  given up. If the broker has been asked by then, and may answer only after the alarm, publishes alone wait for the
  answer: they would wait in any case.
- A restart carries out again the entries that are not on record. Messages that come into a queue later as dead
  letters, or by publishes that are in no log, cannot be brought again. So a purge is on record before anything
  follows it, and the deletion of a queue before a queue of that name is declared again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from lrq_ha.replication.queues import QueueKey

from .holds import PublishHold, QueueHold
from .progress import Progress

log = logging.getLogger("lrq_ha.door")

ALARM_POLL_S = 0.05
LONG_S = 60.0
PARKED_POLL_S = 0.2
DELETED_MAX = 1_000  # kept before those on record are dropped


async def _no_record() -> None: ...


class Barrier:
    """Holds up the clients' traffic around a declaration.

    Attributes:
        published_upto: The last entry that this node has published to its broker.
        recorded: R of the last applied record that is confirmed.
        write_record: Writes an applied record.
        changed: Called when the barrier goes up or down.
    """

    def __init__(self, progress: Progress, holds: dict[QueueKey, QueueHold], flush: Callable[[], object], end: Callable[[], int]) -> None:
        self._progress, self._holds, self._flush, self._end = progress, holds, flush, end
        self.published_upto = 0
        self.recorded = 0
        self.write_record: Callable[[], Awaitable[None]] = _no_record
        self.changed: set[Callable[[], None]] = set()
        self._deleted: dict[QueueKey, int] = {}  # by which entries
        self._lock = asyncio.Lock()
        self._free = asyncio.Event()
        self._free.set()
        self._eased = asyncio.Event()  # set also while the barrier is down
        self._eased.set()
        self._settling = asyncio.Event()

    @asynccontextmanager
    async def up(self, alarmed: Callable[[], bool], declares: QueueKey | None = None) -> AsyncIterator[bool]:
        """Raises the barrier: everything appended before is in the queues, and nothing is taken from any
        connection inside.

        Args:
            alarmed: Whether the broker has an alarm.
            declares: A queue that is to be declared inside.

        Yields:
            Whether the barrier is up; False in an alarm.
        """
        async with self._lock:
            if alarmed():
                yield False
                return
            self._free.clear()
            self._eased.clear()
            self._tell_changed()
            stands = False
            watch = asyncio.get_running_loop().call_later(LONG_S, lambda: self._warn(stands))
            try:
                stands = await self._settles(alarmed, declares)
                if not stands:
                    self._lower()
                yield stands
            finally:
                watch.cancel()
                self._lower()

    def _warn(self, stands: bool) -> None:
        if self.is_up:
            waits_for = "the broker's answer" if stands else f"entries up to {self._end()} to be in the queues and on record"
            log.warning(
                "%s have waited for %d s for a declaration or deletion, which waits for %s. If that goes on, hand over with `lrq-ha switchover`",
                "all clients" if self.holds_all else "publishers", LONG_S, waits_for,
            )  # fmt: skip

    def _lower(self) -> None:
        if self.is_up:
            self._free.set()
            self._eased.set()
            waits = self._holds.pop(PublishHold.KEY, None)
            if waits is not None:
                waits.over.set()
            self._progress.on_wake()
            self._tell_changed()

    def _tell_changed(self) -> None:
        for tell in tuple(self.changed):
            tell()

    def ease(self) -> None:
        """From now on only publishes and declarations wait until the barrier is down."""
        if self.holds_all:
            self._holds[PublishHold.KEY] = PublishHold()
            self._eased.set()

    @asynccontextmanager
    async def nobody_declares(self) -> AsyncIterator[None]:
        """No declaration is under way inside; everything else goes on."""
        async with self._lock:
            yield

    @property
    def is_up(self) -> bool:
        return not self._free.is_set()

    @property
    def holds_all(self) -> bool:
        """Whether nothing at all is to be taken from any connection."""
        return not self._eased.is_set()

    async def down(self) -> None:
        """Returns when the barrier is down."""
        await self._free.wait()

    async def eased(self) -> None:
        """Returns when the barrier is down or eased."""
        await self._eased.wait()

    def published(self, upto: int) -> None:
        """Notes that entries up to `upto` were published to this node's broker."""
        self.published_upto = max(self.published_upto, upto)

    async def wait_settled(self, upto: int) -> None:
        """Returns when everything up to `upto` is in the queues and confirmed, or waits before a full queue."""
        while self._progress.tracker.applied < upto and not self._only_parked(upto):
            self._settling.clear()
            self._progress.waiting_applied.add(self)
            try:
                async with asyncio.timeout(PARKED_POLL_S):
                    await self._settling.wait()
            except TimeoutError:
                pass

    async def settle_record(self, upto: int) -> None:
        """Returns when a restart would publish no entry up to `upto` again."""
        if self.recorded < min(upto, self.published_upto):
            await self.write_record()

    def deleted(self, queue: QueueKey, sequence: int) -> None:
        """Notes that entry `sequence` has deleted a queue of this node's broker."""
        self._deleted[queue] = sequence
        if len(self._deleted) > DELETED_MAX:
            self._deleted = {key: at for key, at in self._deleted.items() if at > self.recorded}

    def has_died(self, queue: QueueKey, sequence: int) -> bool:
        """Whether a queue of this node's broker was deleted behind entry `sequence`, which is not applied: R and
        any record are before it.
        """
        return self._deleted.get(queue, 0) > sequence

    async def settle_deletion(self, queue: QueueKey) -> None:
        """Returns when a restart would not delete again a queue that is to be declared now. Call when its deletion is applied."""
        if self._deleted.get(queue, 0) > self.recorded:
            await self.write_record()
        if self._deleted.get(queue, 0) <= self.recorded:
            self._deleted.pop(queue, None)

    async def _settles(self, alarmed: Callable[[], bool], declares: QueueKey | None) -> bool:
        """Returns True when everything is ready for a declaration, and False in an alarm."""
        settling = asyncio.ensure_future(self._settle(declares))
        try:
            while not settling.done():
                if alarmed():
                    return False
                await asyncio.wait((settling,), timeout=ALARM_POLL_S)
            settling.result()
            return True
        finally:
            settling.cancel()

    async def _settle(self, declares: QueueKey | None) -> None:
        self._flush()
        await self.wait_settled(self._end())
        await self.settle_record(self._end())
        if declares is not None:
            await self.settle_deletion(declares)

    def applied_advanced(self) -> None:
        """More of the log is in the queues and confirmed, or an entry further on is."""
        self._settling.set()

    def _only_parked(self, upto: int) -> bool:
        parked = self._progress.parked
        return all(parked.has_all(*span) for span in self._progress.tracker.needs(1, upto))
