"""Giving messages back to a queue that was consumed from, so that it is as before: all that was taken, in order, without a delivery attempt counted.

Rules:
- From RabbitMQ 4.0 on: cancel and nack; before it, closing the channel. As a whole, when nothing more is on its way.
- A quorum queue gives out first what it has been given back. Whoever takes a part of that and gives it back puts it behind the rest of it (measured,
  on 3.10 and on 4.3). So whoever consumes takes at least as much as was given back before him. How much that was before this sidecar began is not
  known: WIDE_WINDOW_MESSAGES is taken for it, which is what sidecars give back at most. Clients of a former primary may have held more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from lrq_ha.replication.queues import QueueKey

from .channel import Carrier, Channel
from .errors import ChannelClosed

log = logging.getLogger("lrq_ha.sweeper")

WIDE_WINDOW_MESSAGES = 2_000
QUIET_S = 0.05  # without a delivery: ask the queue whether there is more
STUCK_S = 1.0  # without a delivery although there is more: another consumer is in the way
RETURNED_STILL_S = 1.0
RETURNED_MAX_S = 15.0  # on a busy machine a quorum queue takes seconds to take them back


class RequeueDepths:
    """How many messages each quorum queue was given back last, by whoever consumed from it here."""

    def __init__(self) -> None:
        self._messages: dict[QueueKey, int] = {}

    def least_window(self, key: QueueKey) -> int:
        """So many whoever consumes from this quorum queue must take, if there are as many."""
        return self._messages.get(key, WIDE_WINDOW_MESSAGES)

    def note(self, key: QueueKey, messages: int) -> None:
        """It is given back so many, or fewer, by one that had taken all that it was given back before."""
        self._messages[key] = messages

    def forget(self, key: QueueKey) -> None:
        """There is no such queue any more."""
        self._messages.pop(key, None)


async def all_arrived(channel: Channel, queue: str, met: Callable[[], int], full: Callable[[], bool]) -> None:
    """Waits until nothing more is on its way to a consumer.

    What the queue had given out when it answered a question stands in the broker's channel before the next question.

    Args:
        channel: Where it consumes.
        queue: From where.
        met: How many messages have come.
        full: Whether no more can come.
    """
    deadline = time.monotonic() + STUCK_S
    while not full() and time.monotonic() < deadline:
        before = met()
        await asyncio.sleep(QUIET_S)
        await channel.queue_declare(queue, passive=True)
        await channel.flow()
        if met() == before:
            break


async def is_empty(channel: Channel, queue: str) -> bool:
    """Whether a queue is empty that nobody consumes from: of a quorum queue that does not answer, RabbitMQ says so, too (measured). On 3.x.

    An answer that counts a consumer of our own comes from the queue itself. This one gets nothing, so that nothing has to be given back.
    """
    await channel.qos(1)
    tag = await channel.consume(queue, lambda *_: None, idle=True)
    _, ready, consumers = await channel.queue_declare(queue, passive=True)
    await channel.cancel(tag)
    return not ready and consumers == 1


async def carried_out(connection: Carrier, queue: str) -> None:
    """Returns when a queue has carried out what other channels had sent to it: a consumer comes and goes by the same way."""
    channel = await connection.channel()
    taken: list[int] = []
    try:
        await channel.qos(1)
        await channel.cancel(await channel.consume(queue, lambda tag, *_: taken.append(tag)))
    except ChannelClosed as error:
        log.debug("queue '%s' does not tell whether all that was rejected has left it: %s", queue, error.text)
    await give_back(connection, channel, "", len(taken), queue)


async def give_back(connection: Carrier, channel: Channel, tag: str, kept: int, queue: str) -> None:
    """Closes a channel that consumes from a queue; returns when the queue has back what was held.

    A quorum queue takes back all that a closed channel had, in order. From one that cancels first it takes back at once what is still on its
    way, and so before what was held: whoever nacks should have all that the window allows.

    Args:
        tag: Of the consumer; empty if it was cancelled.
        kept: How many messages are held.
    """
    if channel.error is not None:
        return
    others = 0  # ready beside what is held
    try:
        if tag and requeue_is_free(connection):
            await channel.cancel(tag)
        if kept:
            _, others, _ = await channel.queue_declare(queue, passive=True)
        if kept and requeue_is_free(connection):
            channel.nack(0, multiple=True, requeue=True)
            await channel.flow()
    except ChannelClosed as error:
        log.debug("queue '%s' took back what was held by itself: %s", queue, error.text)
    await channel.close()
    if kept:
        await _returned(connection, queue, kept, others)


async def _returned(connection: Carrier, queue: str, kept: int, others: int) -> None:
    """Waits until the queue has what was given back: it learns of a closed channel a little after its owner does.

    Who consumes before it does would get what stands behind that first. Some of it may have expired since: so a queue that has enough, and has stood
    still for a while, is believed.
    """
    now = time.monotonic()
    until, still, last = now + RETURNED_MAX_S, now, -1
    channel = await connection.channel()
    try:
        while (now := time.monotonic()) < until:
            _, ready, _ = await channel.queue_declare(queue, passive=True)
            if ready >= kept + others or (ready >= kept and ready == last and now - still > RETURNED_STILL_S):
                break
            if ready != last:
                still, last = now, ready
            await asyncio.sleep(0.01)
    except ChannelClosed:
        pass
    await channel.close()


def requeue_is_free(connection: Carrier) -> bool:
    """Whether this broker has a way of giving back that does not count as a delivery attempt (nack; closing the channel counts there)."""
    major = str(connection.server_properties.get("version", "")).split(".")[0]
    return not major.isdigit() or int(major) >= 4

ACKS_AT_ONCE = 24
ACKS_PAUSE_S = 0.01


async def in_steps(channel: Channel, tags: list[int], settle: Callable[[int], None], stopping: Callable[[], bool] = lambda: False) -> list[int]:
    """Acks or rejects so many at a time; returns the rest, once it is to stop.

    A quorum queue's client holds back what comes after its first 32 commands, and a channel that closes drops that.
    """
    for start in range(0, len(tags), ACKS_AT_ONCE):
        if stopping():
            return tags[start:]
        for tag in tags[start : start + ACKS_AT_ONCE]:
            settle(tag)
        await channel.flow()
        await asyncio.sleep(ACKS_PAUSE_S)
    return []
