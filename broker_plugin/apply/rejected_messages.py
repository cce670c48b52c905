"""Messages that clients rejected, before a declaration, deletion or purge is carried out.

Rules:
- Messages rejected before such an entry have left their queue before it is carried out here: such a message must not
  go with its queue, and its dead letter goes where dead letters went then. The sweeper removes them first, if it makes
  progress.
- A message that waits for room is in no queue yet; if its queue is deleted, the queue is emptied first to make room.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from lrq_ha.replication.queues import QueueKey

from ..log.replica import Replica
from .vhost_writer import VhostWriter
from .waits import Waits

log = logging.getLogger("lrq_ha.applier")

STILL_S = 120.0  # a deletion or purge waits so long for a sweeper that rejects nothing: longer than its longest passes over two queues
HURRY_S = 10.0  # while an epoch is taken: no client is served meanwhile
KICK_S = 2.0  # longer than a sweeper waits for a delivery
POLL_S = 0.05
PARKED_ROUND_S = 1.0  # longer than a VhostWriter waits before it tries again
AGAIN_S = 600.0  # a queue where the sweeper makes no progress is not waited for again for so long


class Sweeping(Protocol):
    """The sweeper of this node."""

    def kick(self, queue: QueueKey | None) -> None:
        """A queue is to be swept at once, as it is full (None: an unknown one), or to be deleted."""

    def suspect(self, queues: Iterable[QueueKey], upto: int) -> None:
        """These queues need a full pass once everything up to an entry is applied."""

    def is_rejecting(self, vhost: str) -> bool:
        """Whether messages rejected from a queue of a vhost may still be on their way to other queues."""

    def given_up_at(self, queue: QueueKey) -> float:
        """When the sweeper last began a pass that made no progress in a queue (monotonic seconds; 0: never)."""


class RejectedMessages:
    """Waits for rejected messages. `hurries`: asked whether an epoch is taken."""

    def __init__(self, replica: Replica, sweeper: Sweeping, waits: Waits, hurries: Callable[[], bool]) -> None:
        self._replica = replica
        self._sweeper = sweeper
        self._waits = waits
        self._hurries = hurries
        self._not_waited_for: dict[QueueKey, float] = {}  # queues without progress by the sweeper, and until when

    async def wait_moved(self, vhost: str, sequence: int) -> None:
        """Returns when messages rejected before entry `sequence`, and dead-lettered since, have left their queues."""
        began, kicked = time.monotonic(), 0.0
        left: dict[QueueKey, tuple[int, float]] = {}  # count, and since when the count has not changed
        while (due := self._to_move(vhost, sequence)) or (self._sweeper.is_rejecting(vhost) and time.monotonic() < began + STILL_S):
            now = time.monotonic()
            still_s = self._still_s()
            left = {key: left[key] if key in left and left[key][0] == count else (count, now) for key, count in due}
            for key, (count, since) in left.items():
                if self._sweeper.given_up_at(key) > since or now > since + still_s:
                    self._not_waited_for[key] = now + AGAIN_S
                    what = "%d messages that the primary's clients rejected from queue '%s' in vhost '%s' cannot be reached here"
                    log.warning(f"{what}, and are not waited for: they may be missing where they went to", count, key[1], vhost)
            if now >= kicked:
                for key, _ in due:
                    self._sweeper.kick(key)
                kicked = now + KICK_S
            await self._waits.poll(POLL_S)

    async def forget_parked(self, lane: VhostWriter, key: QueueKey, sequence: int) -> None:
        """Forgets the messages parked for a queue that is being deleted, but for those rejected on the primary,
        which are dead letters there.

        To make room for the rejected ones, so that they become dead letters here too, the queue is emptied a moment
        before its deletion.
        """
        target = self._replica.index.filter.queue(key)
        left, since = 0, time.monotonic()
        while count := lane.forget_queue(key[1], is_dead := target.to_move().__contains__):
            now = time.monotonic()
            if count != left:
                left, since = count, now
            elif now > since + self._still_s():
                what = "%d messages that were rejected from queue '%s' in vhost '%s' cannot be written here, and go with it"
                log.warning(f"{what}: they may be missing where they went to", count, key[1], key[0])
                lane.forget_queue(key[1], lambda _sequence: False)
                return
            await self._waits.insist(partial(lane.declarer.purge, key[1]))
            await self._waits.until(partial(_less_parked, lane, key[1], is_dead, count, now + PARKED_ROUND_S))
            await self.wait_moved(key[0], sequence)

    def _still_s(self) -> float:
        return HURRY_S if self._hurries() else STILL_S

    def _to_move(self, vhost: str, sequence: int) -> list[tuple[QueueKey, int]]:
        parked = self._replica.progress.parked
        moving = {target.key: due for target, due in self._replica.index.filter.moving(vhost, sequence, parked)}
        if self._not_waited_for:
            now = time.monotonic()
            self._not_waited_for = {key: end for key, end in self._not_waited_for.items() if end > now and (key in moving or key[0] != vhost)}
        return [(key, due) for key, due in moving.items() if key not in self._not_waited_for]


def _less_parked(lane: VhostWriter, queue: str, which: Callable[[int], bool], count: int, until: float) -> bool:
    """Whether fewer messages are parked for a queue than before, or the time is over."""
    return lane.parked.count(queue, which) < count or time.monotonic() > until
