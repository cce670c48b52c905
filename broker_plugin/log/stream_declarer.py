"""Declares streams, and looks up queues and exchanges. Each command has a channel of its own, as a refusal ends the channel."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.routing.names import ROUTING_VHOST

from ..amqp.connection import Channel
from ..amqp.errors import ChannelClosed, grant
from ..amqp.reply_codes import ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED

log = logging.getLogger("lrq_ha.streams")

APPLIED_PREFIX = "LRQ_APPLIED_"
MAX_BYTES = "x-max-length-bytes"
_INEQUIVALENT = re.compile(r"inequivalent arg '([\w-]+)'.*current is.* '(\d+)'")


class StreamDeclarer:
    """Declares the streams of vhost lrq in the own broker. `user`: this sidecar's.

    Attributes:
        made_with: Streams that were made with another size than configured, and that size in bytes: only a policy changes it.
    """

    def __init__(self, open_channel: Callable[[], Awaitable[Channel]], user: str) -> None:
        self._open_channel = open_channel
        self._user = user
        self.declared: set[str] = set()
        self.made_with: dict[str, int] = {}

    async def declare(self, queue: str, bytes_max: int, segment_bytes: int) -> bool:
        """Makes a stream unless it exists; returns whether it is new."""
        new = not await self._has_queue(queue)
        arguments: dict[str, Any] = {"x-queue-type": "stream", MAX_BYTES: bytes_max, "x-stream-max-segment-size-bytes": segment_bytes}
        said = ""
        while refusal := await self._declare_with(queue, arguments):
            said = said or refusal
            other = _INEQUIVALENT.search(refusal)
            if other is None or arguments[other[1]] == int(other[2]):
                break
            arguments[other[1]] = int(other[2])  # the size that the stream was made with
        if arguments[MAX_BYTES] != bytes_max:
            self.made_with[queue] = arguments[MAX_BYTES]
        if said:
            policy = "lrq-applied '^LRQ_APPLIED_'" if queue.startswith(APPLIED_PREFIX) else "lrq-size '^LRQ_(HA|Send|Recv)_'"
            command = f"""rabbitmqctl set_policy -p {ROUTING_VHOST} {policy} '{{"max-length-bytes": {bytes_max}}}' --apply-to queues"""
            log.warning("the stream '%s' has other limits, which only a policy changes; unless that was done, run: %s (%s)", queue, command, said)
        self.declared.add(queue)
        return new

    async def _declare_with(self, queue: str, arguments: Mapping[str, Any]) -> str:
        """Declares a stream. Returns the broker's words if it exists with other arguments; empty if not. Raises LrqError: There is none now."""
        channel = await self._open_channel()
        try:
            await channel.queue_declare(queue, durable=True, arguments=arguments)
        except ChannelClosed as error:
            if error.code == PRECONDITION_FAILED and "inequivalent" in error.text:
                return error.text
            if error.code == ACCESS_REFUSED:
                todo = f"run: {grant(ROUTING_VHOST, self._user)}"
                raise LrqError(f"user '{self._user}' may not configure '{queue}' in vhost '{ROUTING_VHOST}'", todo=todo) from error
            if error.code == NOT_FOUND:
                raise LrqError(
                    f"the broker knows the stream '{queue}', and does not have it in use: {error}",
                    todo="wait if the broker has just started; if it stays so, RabbitMQ has lost the stream, as it was killed while it was being "
                    "made, or its disk was full: promote another node, delete this broker's data, and start it again",
                    retriable=True,
                ) from error
            raise LrqError(
                f"the broker cannot make the stream '{queue}': {error}",
                todo="stream queues need RabbitMQ 3.9 or newer with the feature flag stream_queue: run rabbitmqctl enable_feature_flag all",
            ) from error
        await channel.close()
        return ""

    async def _has_queue(self, queue: str) -> bool:
        channel = await self._open_channel()
        try:
            await channel.queue_declare(queue, passive=True)
        except ChannelClosed as error:
            return error.code != NOT_FOUND or "home node" in str(error)
        await channel.close()
        return True

    async def has_exchange(self, exchange: str) -> bool:
        """Whether the exchange exists."""
        channel = await self._open_channel()
        try:
            await channel.exchange_declare(exchange, passive=True)
        except ChannelClosed as error:
            if error.code == NOT_FOUND:
                return False
            raise
        await channel.close()
        return True

    async def count_messages(self, queue: str) -> tuple[int, int]:
        """(ready messages, consumers) of a queue; (0, 0) if the queue does not exist."""
        channel = await self._open_channel()
        try:
            _, messages, consumers = await channel.queue_declare(queue, passive=True)
        except ChannelClosed as error:
            if error.code == NOT_FOUND:
                return 0, 0
            raise
        await channel.close()
        return messages, consumers
