"""A channel of the AMQP client: calls, consumers, publishing with counted confirms. The rules are in `connection`."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from pamqp import encode

from broker_plugin.amqp import content_header, frames
from broker_plugin.amqp import encode as amqp_encode
from broker_plugin.amqp.address import Address
from broker_plugin.amqp.errors import ChannelClosed, ReplyTimeout
from lrq_ha.errors import LrqError
from lrq_ha.replication.positions import RangeSet

REPLY_TIMEOUT_S = 60.0
INT_MAX = 2**63 - 1

OnDelivery = Callable[[int, bool, str, str, bytes, bytes], None]
"""(delivery tag, redelivered, exchange, routing key, content header's payload, body)."""
OnConfirm = Callable[[int, bool, bool], None]
"""(publish tag, multiple, ok); not ok is a basic.nack."""
OnReturn = Callable[[int, str, str, str, bytes, bytes], None]
"""(reply code, reply text, exchange, routing key, content header's payload, body)."""


def short_int(number: int) -> bytes:
    return number.to_bytes(2, "big")


def long_int(number: int) -> bytes:
    return number.to_bytes(4, "big")


def bit_octet(*bits: bool) -> bytes:
    return bytes((sum(bit << i for i, bit in enumerate(bits)),))


def table_bytes(table: Mapping[str, Any] | None) -> bytes:
    return encode.field_table(dict(table or {}))


def _no_credit() -> bytes:
    """The arguments of a consumer without credit, as the AMQP 1.0 plugin of RabbitMQ 3.x sets them (measured on 3.10)."""
    credit = content_header.number_field("credit", 0) + b"\x05draint\0"
    argument = b"\x08x-creditF%b%b" % (long_int(len(credit)), credit)
    return long_int(len(argument)) + argument


def header_fields(table: Mapping[str, Any] | None) -> bytes:
    """The fields of a headers table, for `content_header.properties`. Strings and bytes become long strings, numbers 64-bit ones."""
    parts = []
    for key, value in (table or {}).items():
        if type(value) is int and -INT_MAX <= value <= INT_MAX:  # each log record has six of them, and pamqp takes 10 us for that
            parts.append(content_header.number_field(key, value))
        elif isinstance(value, str | bytes):
            parts.append(content_header.field(key.encode(), value if isinstance(value, bytes) else value.encode()))
        else:
            return encode.field_table(dict(table or {}))[4:]
    return b"".join(parts)


def fail(waiting: asyncio.Future[Any], error: LrqError) -> None:
    """Ends a wait with an error."""
    if not waiting.done():
        waiting.set_exception(error)
        waiting.exception()  # the future may have no waiter any more


def _closed() -> ChannelClosed:
    return ChannelClosed(200, "closed by this side")


class Carrier(Protocol):
    """The parts of `connection.Connection` that a channel needs."""

    address: Address
    blocked: str | None
    frame_max_bytes: int
    server_properties: Mapping[str, Any]

    @property
    def error(self) -> LrqError | None: ...
    async def channel(self) -> Channel: ...
    def abort(self) -> None: ...
    def write(self, data: bytes) -> None: ...
    def write_all(self, pieces: Iterable[bytes]) -> None: ...
    def tell(self, callback: Callable[[Any], None], error: LrqError | None) -> None: ...
    def channel_ended(self, number: int) -> None: ...


class Channel:
    """One channel. Made by `Connection.channel` only.

    Attributes:
        error: Why it ended; None while it is open.
        published: Number of published messages: in confirm mode, the publish tag of the last.
        answered_to: The greatest publish tag such that it and all before it were acked or nacked.
        refused: How many publishes were nacked.
    """

    def __init__(
        self,
        connection: Carrier,
        number: int,
        on_confirm: OnConfirm | None,
        on_return: OnReturn | None,
        on_close: Callable[[LrqError | None], None] | None,
    ) -> None:
        self.connection = connection
        self.number = number
        self.error: LrqError | None = None
        self.published = 0
        self.answered_to = 0
        self.refused = 0
        self._answered = RangeSet()  # beyond answered_to
        self._on_confirm = on_confirm
        self._on_return = on_return
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._replies: deque[asyncio.Future[Any]] = deque()
        self._settled: list[tuple[int, asyncio.Future[None]]] = []
        self._consumers: dict[bytes, tuple[OnDelivery, Callable[[str], None] | None]] = {}
        self._tags = itertools.count(1)
        self._closing = False

    # --- received frames --------------------------------------------------------------------------------------------------

    def _take_content(self, kind: int, method: bytes, header: bytes, body: bytes) -> None:
        if kind == frames.BASIC_DELIVER:
            consumer, tag, origin = frames.deliver_arguments(method)
            found = self._consumers.get(consumer)
            if found is not None:
                found[0](tag, origin.redelivered, origin.exchange, origin.routing_key, header, body)
        elif kind == frames.BASIC_RETURN and self._on_return is not None:
            self._on_return(*frames.return_arguments(method), header, body)

    def _take_confirm(self, tag: int, multiple: bool, ok: bool) -> None:
        before = self.answered_to
        if not ok:
            known = sum(min(last, tag) - first + 1 for first, last in self._answered if first <= tag)
            self.refused += tag - before - known if multiple else 1
        if multiple or tag == before + 1:
            self.answered_to = max(before, tag)
        else:
            self._answered.add(tag)
        if self._answered:
            self.answered_to = max(self.answered_to, self._answered.contiguous_from(self.answered_to + 1))
            self._answered.remove(1, self.answered_to)
        if self._on_confirm is not None:
            self._on_confirm(tag, multiple, ok)
        if self._settled:
            for wanted, waiting in self._settled:
                if wanted <= self.answered_to and not waiting.done():
                    waiting.set_result(None)
            self._settled = [pair for pair in self._settled if not pair[1].done()]

    def _take_method(self, kind: int, payload: bytes) -> None:
        if kind == frames.CHANNEL_CLOSE:
            self.connection.write(amqp_encode.raw_method_frame(self.number, frames.CHANNEL_CLOSE_OK))
            self._end(ChannelClosed(*frames.close_arguments(payload), self.connection.address))
        elif kind == frames.BASIC_CANCEL:
            cancelled: Any = frames.decode_method(payload)
            found = self._consumers.pop(cancelled.consumer_tag.encode(), None)
            if found is not None and found[1] is not None:
                found[1](cancelled.consumer_tag)
        elif self._replies:
            if (kind == frames.CHANNEL_CLOSE_OK) != self._closing:
                return  # a late reply, or one to the close of an earlier channel of this number
            reply = self._replies.popleft()
            if not reply.done():
                reply.set_result(frames.decode_method(payload))
            if self._closing:
                self._end(_closed(), ordered=True)  # also if the caller of close waits no more

    def _end(self, error: LrqError, ordered: bool = False) -> None:
        if self.error is not None:
            return
        self.error = error
        self._consumers.clear()
        self.connection.channel_ended(self.number)
        self._fail_calls(error)
        for _, waiting in self._settled:
            fail(waiting, error)
        if self._on_close is not None:
            self.connection.tell(self._on_close, None if ordered else error)

    def _fail_calls(self, error: LrqError) -> None:
        for reply in self._replies:
            fail(reply, error)
        self._replies.clear()

    # --- calls ------------------------------------------------------------------------------------------------------------

    async def _call(self, method: int, *arguments: bytes) -> Any:
        if self.error is not None:
            raise self.error
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._replies.append(reply)
        self.connection.write(amqp_encode.raw_method_frame(self.number, method, *arguments))
        while True:
            done, _ = await asyncio.wait((reply,), timeout=REPLY_TIMEOUT_S)
            if done:
                return reply.result()
            if self.connection.blocked is None:  # else the broker has an alarm and does not read from this connection
                raise ReplyTimeout(f"no reply to method {method:#010x} on channel {self.number} within {REPLY_TIMEOUT_S} s")

    async def exchange_declare(
        self,
        exchange: str,
        kind: str = "direct",
        *,
        passive: bool = False,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        bits = bit_octet(passive, durable, auto_delete, internal, False)
        names = amqp_encode.short_string(exchange) + amqp_encode.short_string(kind)
        await self._call(frames.EXCHANGE_DECLARE, b"\0\0", names, bits, table_bytes(arguments))

    async def exchange_delete(self, exchange: str, *, if_unused: bool = False) -> None:
        await self._call(frames.EXCHANGE_DELETE, b"\0\0", amqp_encode.short_string(exchange), bit_octet(if_unused, False))

    async def exchange_bind(self, to: str, source: str, routing_key: str = "", arguments: Mapping[str, Any] | None = None) -> None:
        names = b"".join(map(amqp_encode.short_string, (to, source, routing_key)))
        await self._call(frames.EXCHANGE_BIND, b"\0\0", names, b"\0", table_bytes(arguments))

    async def queue_declare(
        self,
        queue: str,
        *,
        passive: bool = False,
        durable: bool = True,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> tuple[str, int, int]:
        """Declares a queue. Returns (name, ready messages, consumers)."""
        bits = bit_octet(passive, durable, exclusive, auto_delete, False)
        made = await self._call(frames.QUEUE_DECLARE, b"\0\0", amqp_encode.short_string(queue), bits, table_bytes(arguments))
        return made.queue, made.message_count, made.consumer_count

    async def queue_delete(self, queue: str, *, if_unused: bool = False, if_empty: bool = False) -> int:
        """Deletes a queue. Returns how many messages it had."""
        deleted = await self._call(frames.QUEUE_DELETE, b"\0\0", amqp_encode.short_string(queue), bit_octet(if_unused, if_empty, False))
        return int(deleted.message_count)

    async def queue_bind(self, queue: str, exchange: str, routing_key: str = "", arguments: Mapping[str, Any] | None = None) -> None:
        names = b"".join(map(amqp_encode.short_string, (queue, exchange, routing_key)))
        await self._call(frames.QUEUE_BIND, b"\0\0", names, b"\0", table_bytes(arguments))

    async def queue_unbind(self, queue: str, exchange: str, routing_key: str = "", arguments: Mapping[str, Any] | None = None) -> None:
        names = b"".join(map(amqp_encode.short_string, (queue, exchange, routing_key)))
        await self._call(frames.QUEUE_UNBIND, b"\0\0", names, table_bytes(arguments))

    async def queue_purge(self, queue: str) -> int:
        """Empties a queue. Returns how many messages it had."""
        purged = await self._call(frames.QUEUE_PURGE, b"\0\0", amqp_encode.short_string(queue), b"\0")
        return int(purged.message_count)

    async def qos(self, prefetch: int, *, per_channel: bool = False) -> None:
        """Limits the unacknowledged deliveries of each later consumer, or of the whole channel."""
        await self._call(frames.BASIC_QOS, long_int(0), short_int(prefetch), bit_octet(per_channel))

    async def confirm_select(self) -> None:
        """Turns publisher confirms on; publish tags count from 1 from here on."""
        await self._call(frames.CONFIRM_SELECT, b"\0")
        self.published = 0

    async def consume(
        self,
        queue: str,
        callback: OnDelivery,
        *,
        no_ack: bool = False,
        exclusive: bool = False,
        arguments: Mapping[str, Any] | None = None,
        tag: str = "",
        on_cancel: Callable[[str], None] | None = None,
        idle: bool = False,
    ) -> str:
        """Starts a consumer. Returns its tag.

        Args:
            queue: The queue's name.
            callback: Called for each delivery, possibly before this returns.
            no_ack: Whether the broker counts a delivery as acknowledged at once.
            exclusive: Whether no other consumer is allowed.
            arguments: E.g. `x-stream-offset`.
            tag: The consumer tag; empty for a new one.
            on_cancel: Called with the tag when the broker ends the consumer (its queue is gone).
            idle: Whether the consumer gets no deliveries; without `arguments`, on RabbitMQ 3.x.
        """
        tag = tag or f"lrq-{self.number}-{next(self._tags)}"
        self._consumers[tag.encode()] = (callback, on_cancel)
        names = amqp_encode.short_string(queue) + amqp_encode.short_string(tag)
        bits = bit_octet(False, no_ack, exclusive, False)
        await self._call(frames.BASIC_CONSUME, b"\0\0", names, bits, _no_credit() if idle else table_bytes(arguments))
        return tag

    async def cancel(self, tag: str) -> None:
        """Ends a consumer; deliveries under way are still handed to its callback before this returns."""
        await self._call(frames.BASIC_CANCEL, amqp_encode.short_string(tag), b"\0")
        self._consumers.pop(tag.encode(), None)

    async def recover(self) -> None:
        """Requeues all unacknowledged deliveries of the channel."""
        await self._call(frames.BASIC_RECOVER, b"\1")

    async def flow(self) -> None:
        """A barrier: returns when the broker has handled everything that this channel sent before (not: confirmed it)."""
        await self._call(frames.CHANNEL_FLOW, b"\1")

    async def close(self) -> None:
        """Ends the channel in order; calls that are under way fail. Never raises."""
        if self.error is None and not self._closing:
            self._fail_calls(_closed())
            self._closing = True
            try:
                await self._call(frames.CHANNEL_CLOSE, short_int(200), amqp_encode.short_string(""), long_int(0))
            except LrqError:
                pass
            self._end(_closed(), ordered=True)

    # --- acknowledging ----------------------------------------------------------------------------------------------------

    def ack(self, tag: int, multiple: bool = False) -> None:
        self._answer(amqp_encode.ack(self.number, tag, multiple))

    def nack(self, tag: int, multiple: bool = False, requeue: bool = True) -> None:
        self._answer(amqp_encode.nack(self.number, tag, multiple, requeue))

    def reject(self, tag: int, requeue: bool = False) -> None:
        self._answer(amqp_encode.reject(self.number, tag, requeue))

    def _answer(self, frame: bytes) -> None:
        # On an ended channel the deliveries are back in their queues, and its number may be another channel's by now.
        if self.error is None and not self._closing:
            self.connection.write(frame)

    # --- publishing -------------------------------------------------------------------------------------------------------

    def publish(
        self,
        exchange: str,
        routing_key: str,
        body: bytes,
        headers_table: Mapping[str, Any] | None = None,
        *,
        mandatory: bool = False,
        persistent: bool = True,
    ) -> int:
        """Publishes a message. Returns its publish tag."""
        properties = content_header.properties(header_fields(headers_table), persistent)
        return self.publish_content(exchange, routing_key, content_header.header_payload(len(body), properties), body, mandatory)

    def publish_content(self, exchange: str, routing_key: str, header: bytes, body: bytes, mandatory: bool = False) -> int:
        """Publishes a message with a ready content header's payload (see `content_header`). Returns its publish tag."""
        pieces = amqp_encode.content(self.number, header, body, self.connection.frame_max_bytes)
        pieces.insert(0, amqp_encode.publish_method(self.number, exchange, routing_key, mandatory))
        return self.publish_raw(pieces)

    def publish_raw(self, pieces: Iterable[bytes], count: int = 1) -> int:
        """Publishes `count` messages that are whole frames of this channel. Returns the publish tag of the last."""
        if self.error is not None:
            raise self.error
        if self._closing:
            raise ChannelClosed(200, "being closed by this side")
        self.connection.write_all(pieces)
        self.published += count
        return self.published

    async def confirmed(self, tag: int | None = None) -> None:
        """In confirm mode: returns when all publishes up to `tag` (by default the last so far) were acked or nacked; see `refused`."""
        wanted = self.published if tag is None else tag
        if self.error is not None:
            raise self.error
        if self.answered_to < wanted:
            waiting: asyncio.Future[None] = self._loop.create_future()
            self._settled.append((wanted, waiting))
            await waiting
