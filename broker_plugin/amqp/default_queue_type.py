"""Finds the queue type of a vhost's broker for a declaration without a type. The log names the type, as other
brokers may have another default.

Rules:
- AMQP does not tell the type. So the sidecar declares a queue without a type, and then with one type after the other:
  the type that is not refused is the default. The queue is deleted at once, even if the client of the declaration is
  gone.
- Operators may change the default: a result counts for a while.
- Where the default cannot be found (a vhost may be at its limit of connections or queues), a queue gets the type that
  the log has for it; else the type found last, or `classic`. The broker is asked again soon.
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
        self._untold: dict[str, float] = {}  # vhosts without a result, and until when that counts
        self._asking: dict[str, asyncio.Task[None]] = {}

    def of(self, vhost: str, logged: bytes = b"") -> bytes | None:
        """The type of a queue that is declared in a vhost without one; None: it has to be found out.

        Args:
            logged: The type that the log has for the queue; empty if it has none.
        """
        now = time.monotonic()
        known, until = self._known.get(vhost, UNKNOWN)
        if now < until:
            return known
        return logged or known if now < self._untold.get(vhost, 0.0) else None

    async def find_out(self, vhost: str) -> None:
        """Returns when the broker was asked: `of` has an answer then."""
        if vhost not in self._asking:
            task = self._asking[vhost] = asyncio.create_task(self._find_out(vhost))
            task.add_done_callback(lambda _: self._asking.pop(vhost))
        await asyncio.shield(self._asking[vhost])  # the waiter may be gone before the queue is deleted

    async def _find_out(self, vhost: str) -> None:
        try:
            found = await self._asked(vhost)
        except LrqError as error:
            text = "the default queue type of vhost '%s' cannot be found out; it is taken for %s where the log does not know the queue: %s"
            log.warning(text, vhost, self._known.get(vhost, UNKNOWN)[0].decode(), error)
            self._untold[vhost] = time.monotonic() + AGAIN_S
        else:
            self._known[vhost] = found, time.monotonic() + KNOWN_S

    async def _asked(self, vhost: str) -> bytes:
        connection = await open_vhost(self._broker, vhost)
        queue = f"LRQ_Type_{secrets.token_hex(8)}"
        try:
            channel = await connection.channel()
            try:
                await channel.queue_declare(queue)
                return await self._type(connection, queue)
            finally:
                if not isinstance(channel.error, ChannelClosed):  # else the queue was not made
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
