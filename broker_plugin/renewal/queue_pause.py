"""Pauses one queue at the door of a primary while its messages are moved (R17): no client holds a delivery of it, and no message is added to it.

Rules:
- First its consumers are cancelled at the broker, hidden from their clients, which finish their deliveries. Publishers go on meanwhile. A single
  active consumer is cancelled last, so that no other becomes active.
- When no client holds a delivery, and the broker has all returned and published messages, publishes to the queue wait (`holds`). The wait begins
  inside a barrier, so that no declaration is under way, and none concerns the queue before the end.
- At the end the consumers are restored in their order of creation: tags, arguments, prefetch. Only then the waiting methods go on: a new consumer
  could shut out an exclusive one, or take the place of a single active one, and a deletion would find no consumers.
- Where returned messages may be held back unseen (`declarations`), no client consumes for that time before the move; publishers still go on.
- A channel on which the broker commits gets no frame before the broker's answer.
- If consumers do not finish in time, the queue goes on, and its pause has failed; with force, their channels are closed instead. Channels of
  consumers that the broker itself has ended are closed at once: which of their deliveries the broker has taken back cannot be known before.
- A queue that expires when it is not used is not left without a consumer for long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.replication.queues import QueueKey

from ..amqp import declarations, frames
from ..amqp.reply_codes import PRECONDITION_FAILED
from ..log.holds import QueueHold
from ..log.messages import Delivery
from ..log.replica import Replica
from ..methods import closing, consume
from ..session.channel import ChannelState, ClientChannel
from ..session.door_state import DoorState
from ..session.session import ClientSession

POLL_S = 0.01
BLOCKED_POLL_S = 0.25
FORCED_S = 15.0
RESUMED_S = 20.0  # within it, a busy broker has all consumers again
EXPIRES_SHARE = 4


class Busy(LrqError):
    """Consumers hold on to messages of the queue."""


def unused_at_most_s(arguments: Mapping[str, Any], timeout_s: float) -> float:
    """The part of this time for which a queue may be without consumers, in seconds."""
    expires_s = arguments.get("x-expires", 0) / 1_000
    return min(timeout_s, expires_s / EXPIRES_SHARE) if expires_s else timeout_s


class QueuePause:
    """Pauses one queue.

    Args:
        door, replica: Those of this node, which is primary.
        key: The queue.
        arguments: The arguments of its declaration.
    """

    def __init__(self, door: DoorState[ClientSession], replica: Replica, key: QueueKey, arguments: Mapping[str, Any]) -> None:
        self._door = door
        self._replica = replica
        self._key = key
        self._single = bool(arguments.get("x-single-active-consumer"))
        self._arguments = arguments
        self._held_back_s = declarations.held_back_s(arguments)
        self._idle_since = 0.0  # since when no client has held a delivery; 0: one does
        self._began = 0.0
        self.seconds = 0.0

    async def begin(self, timeout_s: float, *, force: bool = False) -> None:
        """Waits until the queue stands still.

        Raises:
            Busy: Consumers have not finished in time, or the broker takes nothing for the log; the queue goes on.
        """
        while self._door.alarmed():
            await asyncio.sleep(BLOCKED_POLL_S)
        self._began = time.monotonic()
        deadline = self._began + unused_at_most_s(self._arguments, timeout_s)
        while not await self._stands_still():
            if self._door.alarmed() or (not self._idle_since and time.monotonic() > deadline):
                if not force:
                    await self.end()
                    raise Busy(f"consumers hold {self._held()} messages of queue '{self._key[1]}' in vhost '{self._key[0]}'", retriable=True)
                force, deadline = False, time.monotonic() + FORCED_S
                self._close(lambda channel: channel.held)
            await asyncio.sleep(POLL_S)
        await self._replica.progress.wait_safe(self._replica.last_operation)

    async def end(self) -> None:
        """Resumes the queue: first its consumers, one after the other where only one is active, then all waiting methods."""
        paused = [
            (consumer.number, session, channel, tag, consumer)
            for session, channel in self._channels()
            for tag, consumer in list(channel.paused.items())
            if consumer.queue == self._key
        ]
        until = time.monotonic() + RESUMED_S
        coming: list[tuple[ClientSession, ClientChannel, bytes, bool]] = []
        for _, session, channel, tag, consumer in sorted(paused, key=lambda one: one[0]):
            if channel.paused.pop(tag, None) is None:
                continue  # the client has cancelled it meanwhile
            consume.consume_again(session, channel, tag, consumer)
            coming.append((session, channel, tag, self._single or consumer.exclusive))
            if self._single:
                await _all_there(coming, until)
        await _all_there(coming, until)
        moving = self._replica.moving.pop(self._key, None)
        if moving is not None:
            moving.over.set()
        self.seconds = time.monotonic() - self._began

    # ---- stopping ----------------------------------------------------------------------------------------------------

    async def _stands_still(self) -> bool:
        # Not beside a pending deletion: its consumers would be gone from the queue, and get 404 instead of its end.
        async with self._replica.barrier.nobody_declares():
            self._stop_consumers()
        self._close(lambda channel: channel.overdue)
        if self._door.alarmed() or not self._is_idle():
            self._idle_since = 0.0
            return False
        if self._held_back_s:
            self._moving().consumes = True
            self._idle_since = self._idle_since or time.monotonic()
            if time.monotonic() - self._idle_since < self._held_back_s:
                return False
        async with self._replica.barrier.up(self._door.alarmed) as stands:
            if not stands or not self._is_idle():
                return False
            moving = self._moving()
            moving.consumes = moving.publishes = True
        return True

    def _moving(self) -> QueueHold:
        return self._replica.moving.setdefault(self._key, QueueHold(self._key, consumes=False, publishes=False))

    def _channels(self) -> Iterator[tuple[ClientSession, ClientChannel]]:
        for session in list(self._door.sessions):
            if session.vhost == self._key[0] and not session.closed:
                for channel in list(session.channels.values()):
                    yield session, channel

    def _stop_consumers(self) -> None:
        running = [
            (consumer.number, session, channel, tag, consumer)
            for session, channel in self._channels()
            if channel.state is ChannelState.NO
            for tag, consumer in channel.consumers.items()
            if consumer.queue == self._key and tag not in channel.paused and not consumer.cancelled
        ]
        running.sort(key=lambda one: one[0])
        if self._single and (len(running) > 1 or self._stopping()):
            running = running[1:]
        for _, session, channel, tag, consumer in running:
            self._moving().consumes |= consumer.exclusive  # no other consumer may take its place
            channel.paused[tag] = consumer
            consume.cancel_here(session, channel, tag)

    def _stopping(self) -> bool:
        return any(channel.stopping[tag] for _, channel in self._channels() for tag, c in channel.paused.items() if c.queue == self._key)

    def _is_idle(self) -> bool:
        key = self._key
        for session in list(self._door.sessions):
            if session.vhost == key[0] and (key in session.still_returning() or key in session.acked):
                return False
        for session, channel in self._channels():
            if channel.state in (ChannelState.BROKER, ChannelState.TOLD):
                continue
            if key in channel.returning or any(c.queue == key for c in channel.consuming) or any(c.queue == key for c, _ in channel.gets):
                return False
            mine = [tag for tag, consumer in channel.consumers.items() if consumer.queue == key]
            if mine and (not session.takes_deliveries or channel.closing or channel.number in session.from_broker.withheld):
                return False  # the broker may hold unseen deliveries for the channel until it has closed it
            if any(tag not in channel.paused or channel.stopping[tag] for tag in mine):
                return False
            if any(delivery.queue == key for delivery in channel.held):
                return False
        return True

    def _held(self) -> int:
        return sum(1 for _ in self._door.held(self._key))

    def _close(self, held: Callable[[ClientChannel], list[Delivery]]) -> None:
        """Closes the channels on which `held` has deliveries of the queue."""
        for session, channel in self._channels():
            if channel.state is ChannelState.NO and any(delivery.queue == self._key for delivery in held(channel)):
                text = f"PRECONDITION_FAILED - queue '{self._key[1]}' in vhost '{self._key[0]}' is moved: what you hold is delivered again"
                closing.refuse(session, channel, PRECONDITION_FAILED, text, frames.BASIC_CONSUME)


async def _all_there(coming: list[tuple[ClientSession, ClientChannel, bytes, bool]], until: float) -> None:
    """Waits until the broker has these consumers. It may not report one where the client does not read, if others may come before it."""
    for session, channel, tag, first in coming:
        while channel.resuming[tag] and channel.state is ChannelState.NO and not session.closed and (first or not session.flow.reads_late):
            if time.monotonic() >= until:
                break
            await asyncio.sleep(POLL_S)
