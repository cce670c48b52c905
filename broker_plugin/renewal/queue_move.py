"""One pass over a paused queue: moves its live messages, or only looks for old ones (R17; `renewal`).

Rules:
- A message and the DEQUEUE of its old copy stand in one batch; the old copy is acked when that is safe. The applier publishes the new one.
- A moved message starts again in its queue: with a new position, a full time to live, and none of RabbitMQ's counts (x-death, deliveries).
- The broker never has more messages on their way here than the pass is to meet. An ack brings the next message, and messages on their way to a
  cancelled consumer go back before those that the consumer holds (measured). So the window is no larger than the queue, acks that would bring more
  messages wait, and the consumer is cancelled before these acks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from lrq_ha.errors import LrqError
from lrq_ha.replication.dead_letters import Deaths
from lrq_ha.replication.positions import RangeSet
from lrq_ha.replication.queue_filter import Verdict
from lrq_ha.replication.queues import QueueKey

from ..amqp.connection import Channel, Connection
from ..amqp.content_header import COUNTS, cut, deaths, keeps_its_ways
from ..amqp.requeue import all_arrived, give_back, in_steps
from ..log.replica import BATCH_BYTES_MAX, Replica
from ..log.stamps import find_stamp

WINDOW_MESSAGES = 500
KEPT_MAX = 1_500
PREFETCH_MAX = KEPT_MAX + WINDOW_MESSAGES  # a quorum queue gives no more to one consumer
WINDOWS_UNDER_WAY = 2
QUIET_S = 0.1
STUCK_S = 20.0
TO_APPLY_BYTES_MAX = 32 << 20
POLL_S = 0.01
#: Headers that RabbitMQ and the door have written, and further routing keys, which the first publish has followed.
NOT_MOVED = (b"x-lrq-pos", b"x-death", b"x-first-death-queue", b"x-first-death-exchange", b"x-first-death-reason", b"x-last-death-queue",
             b"x-last-death-exchange", b"x-last-death-reason", *COUNTS, b"CC")  # fmt: skip


class GivenUp(LrqError):
    """A live message may be left before the CHECKPOINT."""


class _Copy(NamedTuple):
    """A delivery. `key`: its routing key; `sequence`: None if it has no position."""

    tag: int
    redelivered: bool
    key: str
    sequence: int | None
    generation: int
    deaths: Deaths
    header: bytes
    body: bytes


class _Done(NamedTuple):
    """Delivery tags to ack, or to reject for good, when entry `safe` is safe. `alone`: the pass holds no other delivery before them."""

    safe: int
    tags: list[int]
    rejected: bool
    alone: bool


class QueueMove:
    """One pass over a queue.

    Args:
        mark: Messages before this entry are moved; 0: none is, and the pass ends at the first old one.
        depth: Returns the number of ready messages, as `_Visit._depth`.

    Attributes:
        found: Whether a live message from before the CHECKPOINT was met.
        moved: Number of moved messages.
        published: Their entries, except those that were found to be in the queue.
    """

    def __init__(
        self,
        replica: Replica,
        connection: Connection,
        key: QueueKey,
        arguments: Mapping[str, Any],
        checkpoint: int,
        mark: int,
        depth: Callable[[int], Awaitable[int]],
    ) -> None:
        self.found = False
        self.moved = 0
        self.published = RangeSet()
        self._replica = replica
        self._connection = connection
        self._key = key
        self._dies_by_key = "x-dead-letter-exchange" in arguments and "x-dead-letter-routing-key" not in arguments
        self._checkpoint = checkpoint
        self._mark = mark
        self._depth = depth
        self._limit = PREFETCH_MAX  # the most that the broker sends to this consumer
        self._left = 0  # messages still to be met
        self._kept = 0
        self._held = 0  # messages that were looked at and are not settled
        self._arrived: asyncio.Queue[_Copy] = asyncio.Queue()
        self._done: deque[_Done] = deque()
        self._channel: Channel
        self._tag = ""

    async def run(self, ready: int) -> bool:
        """Whether all messages that were in the queue at the beginning were met. Raises ChannelClosed; GivenUp if the queue gives none."""
        upto = self._mark or self._replica.end
        self._channel = await self._connection.channel()
        self._limit = min(ready, PREFETCH_MAX) or PREFETCH_MAX
        await self._channel.qos(self._limit)
        self._tag = await self._channel.consume(self._key[1], self._take)
        try:
            self._left = ready or max(await self._depth(1) + self._arrived.qsize(), 1)  # the queue may not have answered before
            whole = await self._meet(upto)
        except GivenUp:
            await self._give_back()
            raise
        await self._give_back()
        return whole

    async def applied(self) -> None:
        """Waits until the moved messages are in the queue. Raises GivenUp."""
        until = time.monotonic() + STUCK_S
        while self._waits():
            if time.monotonic() > until:
                what = f"queue '{self._key[1]}' refuses messages (a length limit?)"
                raise GivenUp(what, todo="make room in it, or raise its limit", retriable=True)
            await asyncio.sleep(POLL_S)

    def _waits(self) -> bool:
        """Whether a moved message is not in the queue yet. Forgets those that are: there may be millions, and this is called all the time."""
        tracker = self._replica.progress.tracker
        for first, last in self.published:
            if tracker.needs(first, last):
                self.published.remove(0, first - 1)
                return True
        self.published = RangeSet()
        return False

    async def _meet(self, upto: int) -> bool:
        long = self._limit == PREFETCH_MAX  # else all messages come at once
        while self._left > 0:
            window = await self._window(self._left)
            if not window:
                break  # the rest has expired
            self._left -= sum(not long or copy.sequence is None or copy.sequence <= upto for copy in window)
            await self._judge(window)
            if self.found and not self._mark:
                return False
            if long and self._kept >= KEPT_MAX and self._left > 0:
                return False
        return True

    def _out(self) -> int:
        """The number of deliveries here; the rest up to the limit may be on its way."""
        return self._held + self._arrived.qsize()

    async def _give_back(self) -> None:
        """Gives held messages back in order, and ends the consumer: another client may be about to consume, as the only one."""
        if self._out() >= self._limit:
            await self._channel.cancel(self._tag)
            self._tag = ""
        await self._settle(0, ends=True)
        if self._tag and self._out():
            with suppress(GivenUp):
                await self.applied()
            await all_arrived(self._channel, self._key[1], self._arrived.qsize, lambda: self._out() >= self._limit)
        await give_back(self._connection, self._channel, self._tag, self._out(), self._key[1])

    def _take(self, tag: int, redelivered: bool, _exchange: str, key: str, header: bytes, body: bytes) -> None:
        sequence, generation = find_stamp(header) or (None, 0)
        self._arrived.put_nowait(_Copy(tag, redelivered, key, sequence, generation, deaths(header), header, body))

    async def _window(self, most: int) -> list[_Copy]:
        """The next messages; empty if there are no more."""
        window: list[_Copy] = []
        silent_s = 0.0
        while not window:
            try:
                async with asyncio.timeout(QUIET_S):
                    window.append(await self._arrived.get())
            except TimeoutError:
                silent_s += QUIET_S
                await self._settle(0)
                if not await self._depth(1):
                    await self._channel.flow()  # the queue's deliveries stand before its answer in the broker's channel
                    if self._arrived.empty():
                        return []
                elif silent_s >= STUCK_S:
                    raise GivenUp(f"queue '{self._key[1]}' in vhost '{self._key[0]}' gives nothing to the sidecar", retriable=True) from None
        size = len(window[0].body)
        while not self._arrived.empty() and len(window) < min(WINDOW_MESSAGES, most) and size < BATCH_BYTES_MAX:
            window.append(self._arrived.get_nowait())
            size += len(window[-1].body)
        return window

    async def _judge(self, window: list[_Copy]) -> None:
        replica = self._replica
        self._held += len(window)
        done: list[int] = []
        rejected: list[int] = []
        last = kept = 0
        await self._check(window)
        for copy in window:
            verdict = await self._verdict(copy)
            if verdict is not Verdict.ACK:
                self.found |= copy.sequence is not None and copy.sequence <= self._checkpoint
            if verdict is Verdict.GIVE and self._is_before(copy):
                last = self._move(copy)
            elif verdict is Verdict.REJECT and self._is_before(copy):
                rejected.append(copy.tag)
                continue
            elif verdict is not Verdict.ACK:
                kept += 1
                continue
            done.append(copy.tag)  # a copy that a killed sidecar has published does not count, and goes
        if last:
            replica.flush()
        if rejected:
            self._done.append(_Done(0, rejected, rejected=True, alone=False))
        self._done.append(_Done(last, done, rejected=False, alone=not self._kept and len(done) == len(window)))
        self._kept += kept
        self._waits()
        await self._settle(WINDOWS_UNDER_WAY)
        if replica.to_apply_bytes > TO_APPLY_BYTES_MAX:
            await self._settle(0, ends=True)  # the queue may be full until then
        while replica.to_apply_bytes > TO_APPLY_BYTES_MAX:
            await asyncio.sleep(POLL_S)

    def _is_before(self, copy: _Copy) -> bool:
        """Whether the message is to be moved, if it is live."""
        return bool(self._mark) and (copy.sequence is None or copy.sequence < self._mark)

    async def _check(self, window: list[_Copy]) -> None:
        """Raises GivenUp if a message cannot be moved unchanged; before any move, as an old copy without a position would stay beside its new one."""
        if not self._dies_by_key:
            return
        for copy in window:
            if not keeps_its_ways(self._key[1], copy.key, copy.header) and self._is_before(copy) and await self._verdict(copy) is Verdict.GIVE:
                raise GivenUp(
                    f"queue '{self._key[1]}' in vhost '{self._key[0]}' dead-letters by routing key, which a moved message does not keep",
                    todo="let it be emptied first, or give it x-dead-letter-routing-key",
                )

    async def _verdict(self, copy: _Copy) -> Verdict:
        replica = self._replica
        for _ in range(2):
            verdict = Verdict.GIVE
            if copy.sequence is not None:
                verdict = replica.index.filter.verdict(self._key, copy.sequence, copy.generation, copy.deaths)
            if verdict is not Verdict.HOLD:
                return verdict
            await replica.progress.wait_safe(replica.end)  # a refusal of another queue's copy, as it is
        raise GivenUp(f"an operation on entry {copy.sequence} is not safe, although no client works on queue '{self._key[1]}'")

    def _move(self, copy: _Copy) -> int:
        """Moves a message. Returns its last entry."""
        self.moved += 1
        header = copy.header
        for key in NOT_MOVED:
            header = cut(header, key)
        sequence = self._replica.next_sequence
        self.published.add(sequence, sequence)
        last = self._replica.move(self._key, (header, copy.body), copy.sequence, copy.deaths)
        if copy.sequence is None or self._replica.given_out.may_have_been_given(copy.sequence, copy.redelivered):
            self._replica.given_out.again.add(sequence, last)  # with its DEQUEUE, so that a window is one range
        return last

    async def _settle(self, most: int, *, ends: bool = False) -> None:
        """Acks moved messages until at most `most` windows wait for that, or an ack would bring more messages than are left.

        `ends`: acks regardless of the messages that they bring.
        """
        while len(self._done) > most:
            one = self._done[0]
            count = len(one.tags) if ends else min(len(one.tags), self._left - (self._limit - self._held))
            if one.tags and count <= 0:
                break
            await self._replica.progress.wait_safe(one.safe)
            tags = one.tags[:count]
            if one.rejected:
                await in_steps(self._channel, tags, self._channel.reject)
            elif tags:
                if one.alone:
                    self._channel.ack(tags[-1], multiple=True)
                else:
                    await in_steps(self._channel, tags, self._channel.ack)
                await self._channel.flow()
            self._held -= len(tags)
            if tags == one.tags:
                self._done.popleft()
            else:
                self._done[0] = one._replace(tags=one.tags[count:])
