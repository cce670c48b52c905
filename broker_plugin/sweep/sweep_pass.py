"""One pass of the sweeper over a queue: decides on each message as it arrives, and confirms the removals.

Rules:
- A removal counts only after a later reply on its channel has arrived.
- Rejects and acks go out in small steps, as a quorum queue's client keeps back the commands after its first 32.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from lrq_ha.replication.dead_letters import Deaths, origin_of
from lrq_ha.replication.queue_filter import QueueFilter, Verdict

from ..amqp import requeue
from ..amqp.connection import Channel
from ..amqp.content_header import deaths
from ..amqp.requeue import QUIET_S, STUCK_S, all_arrived, requeue_is_free
from ..log.replica import Replica
from ..log.stamps import find_stamp
from ..log.tally import Tally

log = logging.getLogger("lrq_ha.sweeper")
EVERYTHING = 1 << 62  # greater than every sequence
PASS_MAX_S = 60.0


class End(Enum):
    """Why a pass ended."""

    DONE = "nothing is due any more"
    SEEN = "every message was met"
    FULL = "the window is full of messages that stay"
    STUCK = "the queue gives nothing"
    GONE = "there is no such queue"


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Waits for the event, for so long at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class Removed(NamedTuple):
    tag: int
    sequence: int
    generation: int
    deaths: Deaths


class SweepPass:
    """One pass over a queue. `waiting`: copies counted by `tally` that wait for room in the queue."""

    def __init__(
        self,
        target: QueueFilter,
        channel: Channel,
        replica: Replica,
        event: asyncio.Event,
        stopping: Callable[[], bool],
        tally: Tally | None,
        waiting: list[int],
    ) -> None:
        self.target = target
        self.tally = tally
        self.excess_waits = False  # some of the excess copies are not in the queue yet
        self.channel = channel
        self.tag = ""
        self.met = 0
        self.kept = 0
        self.deep_window = 0  # how many messages the pass may hold of a queue that may have more
        self.is_cancelled = False  # the broker cancelled the consumer
        self.is_cut_short = False  # the pass was stopped: messages that it should have removed are requeued
        self.rejects = False
        self.newest = EVERYTHING  # entry of the last message that may have been in the queue when its length was asked
        self.overtaken = False  # a younger message came first, by its priority
        self._waiting = set(waiting)
        self._replica = replica
        self._event = event
        self._stopping = stopping
        self._removed: list[Removed] = []
        self._acks: list[int] = []
        self._rejects: list[int] = []
        self._stay: dict[tuple[int, Deaths], int] = {}  # delivery tags of copies that the tally counts; a second copy of an entry is no excess
        self._kept_first = 0  # delivery tag of the first kept message; 0: none
        self.undecided: set[tuple[int, str]] = set()  # kept copies: an operation on them is not safe yet, or too early

    async def run(self, upto: int, window: int, whole: bool, ready: int) -> End:
        """Consumes from the queue, which had `ready` messages, and holds `window` at most. Returns why that ended.

        `whole`: the pass goes on though nothing up to `upto` is due any more.
        """
        channel, queue = self.channel, self.target.name
        self._event.clear()
        # All messages of a shallow queue fit into the window. The pass must end with all of them here and none on their
        # way (see `give_back`), so the window is as large as the queue, and removals wait until it is full.
        shallow = 0 < ready < window
        window = ready if shallow else window
        self.deep_window = 0 if shallow else window
        await channel.qos(window)
        self.tag = await channel.consume(queue, self.take, on_cancel=self.cancelled)
        began = heard = time.monotonic()
        met = 0
        while True:
            await wait(self._event, QUIET_S)
            self._event.clear()
            got, met = self.met != met, self.met
            now = time.monotonic()
            if self.is_cancelled:
                return End.STUCK
            if shallow and met >= window:
                return End.DONE if self.overtaken else End.SEEN
            if not shallow:
                await self.settle()
            if self._stopping() or not (shallow or whole or self.tally or self.target.due.count(upto)):
                await all_arrived(channel, queue, lambda: self.met, lambda: self.held >= window or self.is_cancelled)  # an ack brings more
                return End.DONE
            if self.kept >= window:
                if await self.reject_excess():
                    continue
                return End.FULL
            if now - began > PASS_MAX_S:
                return End.STUCK
            if got:
                heard = now
                continue
            _, ready, consumers = await channel.queue_declare(queue, passive=True)
            if self.met != met:
                continue
            if not ready and consumers == 1:  # ready is 0 also for a quorum queue that does not answer
                await wait(self._event, QUIET_S)
                if self.met == met:
                    # The queue's answer may have overtaken deliveries in a busy broker's channel. Those come before the
                    # answer to this command.
                    await channel.flow()
                    if self.met != met:
                        continue
                    return End.SEEN
            elif now - heard > STUCK_S:
                return End.STUCK

    def take(self, tag: int, _redelivered: bool, exchange: str, _key: str, header: bytes, _body: bytes) -> None:
        self.met += 1
        self._event.set()
        stamp = find_stamp(header)
        if stamp is None:
            self._keep(tag)
            return
        sequence, generation = stamp
        self.overtaken = self.overtaken or sequence > self.newest
        path = deaths(header)
        verdict = self.target.sweeping_verdict(sequence, generation, path)
        if verdict is Verdict.ACK:
            self._acks.append(tag)
        elif verdict is Verdict.REJECT:
            self._rejects.append(tag)
        else:
            self._keep(tag)
            if verdict is Verdict.HOLD:
                self.undecided.add((sequence, origin_of(path) or self.target.name))
                self.target.met(sequence, generation, path)
            tally = self.tally
            if tally is not None and verdict is Verdict.GIVE and self._replica.index.tallies.counts(tally, sequence, path, by_name=not exchange):
                self._stay.setdefault((sequence, path), tag)
            return
        self._removed.append(Removed(tag, sequence, generation, path))

    def _keep(self, tag: int) -> None:
        self.kept += 1
        self._kept_first = self._kept_first or tag

    def cancelled(self, _tag: str) -> None:
        self.is_cancelled = True
        self._event.set()

    @property
    def held(self) -> int:
        """How many messages this consumer holds, whether they are removed or requeued later."""
        return self.kept + len(self._removed)

    async def leave(self) -> None:
        """Cancels the consumer where closing the channel must not take the consumer along, see `give_back`."""
        if self.tag and not self.is_cancelled and requeue_is_free(self.channel.connection):
            tag, self.tag = self.tag, ""
            await self.channel.cancel(tag)

    async def settle(self) -> None:
        """Confirms the removals so far; after a stop, those that were under way."""
        if self._removed:
            removed, self._removed = self._removed, []
            acks, self._acks = self._acks, []
            rejects, self._rejects = self._rejects, []
            self.rejects = self.rejects or bool(rejects)
            left = await requeue.in_steps(self.channel, rejects, self.channel.reject, self._stopping)
            # All messages before the first kept one are removed, and one command acks them: see `in_steps`.
            first = min((self._kept_first or EVERYTHING, *left))
            apart = [tag for tag in acks if tag > first]
            if len(apart) < len(acks):
                self.channel.ack(acks[-len(apart) - 1], multiple=True)
            left += await requeue.in_steps(self.channel, apart, self.channel.ack, self._stopping)
            await self.channel.flow()
            if self.is_cancelled:
                return  # the queue has all messages back, or their fate is unknown
            self.kept += len(left)
            if left:
                self.is_cut_short = True
                self._kept_first = min((self._kept_first or EVERYTHING, *left))
            here = set(left)
            for one in removed:
                if one.tag not in here:
                    self.target.gone(one.sequence, one.generation, one.deaths)

    async def reject_excess(self) -> int:
        """Rejects the held copies that the tally shows as excess; returns their number. Called when the window is
        full or the queue was seen to its end.
        """
        if self.tally is None or self.is_cancelled:
            return 0
        stay = list(self._stay)
        here = [sequence for sequence, _ in stay]
        self._waiting -= set(here)  # copies that were tried again have arrived
        found = sorted(self.tally.excess([*here, *sorted(self._waiting)]))
        excess = [stay[index] for index in found if index < len(stay)]
        self.excess_waits = len(excess) < len(found)
        left = await requeue.in_steps(self.channel, [self._stay[copy] for copy in excess], self.channel.reject, self._stopping)
        gone = excess[: len(excess) - len(left)]
        for copy in gone:
            del self._stay[copy]
        self.kept -= len(gone)
        if gone:
            log.info(
                "%d messages of queue '%s' in vhost '%s' are gone at the primary (expired, over a limit, or purged there): so here",
                len(gone),
                self.target.name,
                self.target.key[0],
            )
        return len(gone)
