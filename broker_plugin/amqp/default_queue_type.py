"""Finds the default queue type of a vhost for the declaration of a new queue without a type. The log names the type, as
other brokers may have another default.

Rules:
- Operators set the default at the broker, for each vhost, and AMQP does not tell it. So the sidecar declares a queue
  without a type, and then with one type after the other: the type that is not refused is the default. The queue is
  deleted at once, even if the client of the declaration is gone.
- Operators may change the default: a result counts for a while.
- Where the default cannot be found (a vhost may be at its limit of connections or queues), a new queue gets the type
  found last, or `classic`. The broker is asked again soon.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from lrq_ha.errors import LrqError

from .address import Address
from .connection import Channel, Connection
from .declarations import CLASSIC
from .errors import ChannelClosed
from .reply_codes import PRECONDITION_FAILED
from .vhosts import open_vhost

log = logging.getLogger("lrq_ha.door")

OTHERS = (b"quorum", b"stream")
UNKNOWN = (CLASSIC, 0.0)
KNOWN_S = 60.0
AGAIN_S = 5.0  # before a broker that did not tell is asked again


class DefaultTypes:
    """The default types of a broker's vhosts. `broker`: the own one; its vhost is replaced."""

    def __init__(self, broker: Address) -> None:
        self._broker = broker
        self._known: dict[str, tuple[bytes, float]] = {}  # by vhost: the type, and until when it counts
        self._asking: dict[str, asyncio.Task[None]] = {}

    def of(self, vhost: str) -> bytes | None:
        """The type of a new queue that is declared in a vhost without one; None: it has to be found out."""
        found, until = self._known.get(vhost, UNKNOWN)
        return found if time.monotonic() < until else None

    async def find_out(self, vhost: str) -> None:
        """Returns when the broker was asked: `of` has an answer then."""
        if vhost not in self._asking:
            task = self._asking[vhost] = asyncio.create_task(self._find_out(vhost))
            task.add_done_callback(lambda _: self._asking.pop(vhost))
        await asyncio.shield(self._asking[vhost])  # the waiter may be gone before the queue is deleted

    async def _find_out(self, vhost: str) -> None:
        try:
            found, counts_s = await self._asked(vhost), KNOWN_S
        except LrqError as error:
            found, counts_s = self._known.get(vhost, UNKNOWN)[0], AGAIN_S
            log.warning("the default queue type of vhost '%s' cannot be found out, new queues are %s: %s", vhost, found.decode(), error)
        self._known[vhost] = found, time.monotonic() + counts_s

    async def _asked(self, vhost: str) -> bytes:
        connection = await open_vhost(self._broker, vhost)
        queue = f"LRQ_Type_{secrets.token_hex(8)}"
        try:
            channel = await connection.channel()
            await channel.queue_declare(queue)
            try:
                return await self._type(connection, queue)
            finally:
                await self._delete(channel, vhost, queue)
        finally:
            await connection.close()

    async def _type(self, connection: Connection, queue: str) -> bytes:
        for other in OTHERS:
            try:
                await (await connection.channel()).queue_declare(queue, arguments={"x-queue-type": other.decode()})
            except ChannelClosed as error:
                if error.code != PRECONDITION_FAILED:
                    raise
            else:
                return other
        return CLASSIC

    async def _delete(self, channel: Channel, vhost: str, queue: str) -> None:
        try:
            await channel.queue_delete(queue)
        except LrqError as error:
            log.warning("queue '%s' in vhost '%s' is left behind by finding out the default queue type, delete it: %s", queue, vhost, error)
