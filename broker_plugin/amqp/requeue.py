"""Requeues the messages of a consumer so that the queue is as before: all messages, in order, without a delivery
attempt counted.

Rules:
- From RabbitMQ 4.0 on: cancel and nack; before it, closing the channel. All messages at once, when no more are on
  their way.
- A quorum queue delivers requeued messages first. A consumer that requeues only a part of them puts that part behind
  the rest (measured, on 3.10 and on 4.3). So each consumer takes at least as many messages as were requeued before.
  That number is unknown for the time before this sidecar began: WIDE_WINDOW_MESSAGES is assumed, the most that
  sidecars requeue. Clients of a former primary may have held more.
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
RETURNED_MAX_S = 15.0  # on a busy machine a quorum queue takes seconds to requeue
ACKS_AT_ONCE = 24
ACKS_PAUSE_S = 0.01


class RequeueDepths:
    """How many messages the last consumer of this sidecar requeued to each quorum queue."""

    def __init__(self) -> None:
        self._messages: dict[QueueKey, int] = {}

    def least_window(self, key: QueueKey) -> int:
        """How many messages a consumer of this quorum queue must take, if there are as many."""
        return self._messages.get(key, WIDE_WINDOW_MESSAGES)

    def note(self, key: QueueKey, messages: int) -> None:
        """A consumer that had taken all messages requeued before requeues at most `messages`."""
        self._messages[key] = messages

    def forget(self, key: QueueKey) -> None:
        """The queue does not exist any more."""
        self._messages.pop(key, None)


async def all_arrived(channel: Channel, queue: str, met: Callable[[], int], full: Callable[[], bool]) -> None:
    """Waits until no more messages are on their way to a consumer.

    Messages that the queue had delivered when it answered a command are in the broker's channel before the next
    command.

    Args:
        channel: The consumer's channel.
        queue: The queue's name.
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
    """Whether a queue without consumers is empty. On 3.x, where RabbitMQ also says so of a quorum queue that does
    not answer (measured).

    An answer that counts a consumer of our own comes from the queue itself. That consumer gets no messages, so none
    has to be requeued.
    """
    await channel.qos(1)
    tag = await channel.consume(queue, lambda *_: None, idle=True)
    _, ready, consumers = await channel.queue_declare(queue, passive=True)
    await channel.cancel(tag)
    return not ready and consumers == 1


async def carried_out(connection: Carrier, queue: str) -> None:
    """Returns when a queue has carried out earlier commands of other channels: a consumer comes and goes in the order of these."""
    channel = await connection.channel()
    taken: list[int] = []
    try:
        await channel.qos(1)
        await channel.cancel(await channel.consume(queue, lambda tag, *_: taken.append(tag)))
    except ChannelClosed as error:
        log.debug("queue '%s' does not tell whether all that was rejected has left it: %s", queue, error.text)
    await give_back(connection, channel, "", len(taken), queue)


async def give_back(connection: Carrier, channel: Channel, tag: str, kept: int, queue: str) -> None:
    """Closes a channel that consumes from a queue; returns when the queue has the held messages back.

    A quorum queue takes back all messages of a closed channel, in order. After a cancel it takes back at once the
    messages still on their way, and so before the held ones: a consumer that nacks should have all that the window
    allows.

    Args:
        tag: Of the consumer; empty if it was cancelled.
        kept: How many messages are held.
    """
    if channel.error is not None:
        return
    others = 0  # ready, beside the held ones
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
    """Waits until the queue has the requeued messages: the queue learns of a closed channel a little after its
    owner.

    A consumer before that would get later messages first. Some messages may have expired since: so a queue that has
    enough, and has stood still for a while, is believed.
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
    """Whether this broker can requeue without counting a delivery attempt (nack; there, closing the channel counts)."""
    major = str(connection.server_properties.get("version", "")).split(".")[0]
    return not major.isdigit() or int(major) >= 4


async def in_steps(channel: Channel, tags: list[int], settle: Callable[[int], None], stopping: Callable[[], bool] = lambda: False) -> list[int]:
    """Acks or rejects in steps; returns the remaining tags when it is to stop.

    A quorum queue's client holds back commands after its first 32, and a channel that closes drops those.
    """
    for start in range(0, len(tags), ACKS_AT_ONCE):
        if stopping():
            return tags[start:]
        for tag in tags[start : start + ACKS_AT_ONCE]:
            settle(tag)
        await channel.flow()
        await asyncio.sleep(ACKS_PAUSE_S)
    return []
