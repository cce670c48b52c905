"""A small, fast AMQP 0-9-1 client for the sidecar's own connections: log writer, applier, sweeper, pushes to
peers.

Rules:
- Received methods and contents go to callbacks at once, in order, from the event loop; a callback must not block. A
  callback that raises ends the connection, as its work is lost.
- Sent frames are collected and written once per turn of the loop. Nothing here waits for room: a sender checks
  `Connection.paused` and awaits `drained()`, which bounds memory.
- Confirms are counted, not stored: no future per message.
- A connection and a channel end once, with one error that says why; all their waiters get that error.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

from pamqp import base, commands

from broker_plugin.amqp import content_assembly, encode, frames
from broker_plugin.amqp.address import Address
from broker_plugin.amqp.channel import Channel, OnConfirm, OnReturn, long_int, short_int, table_bytes
from broker_plugin.amqp.connect import connect
from broker_plugin.amqp.errors import (
    AccessRefused,
    AmqpError,
    AuthenticationFailed,
    ChannelClosed,
    ConnectionClosed,
    ConnectionLimit,
    ConnectionRefused,
    NoChannelLeft,
    ReplyTimeout,
    VhostNotFound,
)
from lrq_ha.errors import LrqError

__all__ = [
    "AccessRefused",
    "Address",
    "AuthenticationFailed",
    "Channel",
    "ChannelClosed",
    "Connection",
    "ConnectionClosed",
    "ConnectionRefused",
    "NoChannelLeft",
    "ReplyTimeout",
    "VhostNotFound",
]

HEARTBEAT_S = 10
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
WRITE_BUFFER_HIGH_BYTES = 4_194_304  # `paused` above this
WRITE_BUFFER_LOW_BYTES = 1_048_576  # and until below this
PENDING_PIECES_MAX = 512  # pieces collected in one turn of the loop before they are written in any case

PROPERTIES: Mapping[str, Any] = MappingProxyType(
    {
        "product": "lrq-ha",
        "capabilities": {
            "authentication_failure_close": True,
            "basic.nack": True,
            "connection.blocked": True,
            "consumer_cancel_notify": True,
            "exchange_exchange_bindings": True,
            "publisher_confirms": True,
        },
    }
)


class Connection(asyncio.Protocol):
    """One connection. Made by `open` only.

    Attributes:
        address: The broker's address, with the user.
        error: Why it ended; None while it is open.
        paused: Whether the write buffer is full; senders should await `drained()`.
        blocked: The broker's reason for not taking publishes (an alarm), None if there is none.
        frame_max_bytes: The negotiated frame_max.
        server_properties: The broker's server properties.
    """

    def __init__(self, address: Address, on_blocked: Callable[[str | None], None] | None) -> None:
        self.address = address
        self.error: ConnectionClosed | None = None
        self.paused = False
        self.blocked: str | None = None
        self.frame_max_bytes = frames.FRAME_MAX_BYTES
        self.server_properties: Mapping[str, Any] = {}
        self._on_close: Callable[[ConnectionClosed | None], None] | None = None
        self._on_blocked = on_blocked
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._left = b""
        self._assembly = content_assembly.Assembly(content_assembly.BODY_BYTES_ANY_MAX)
        self._channels: dict[int, Channel] = {}
        self._channel_max = 2_047
        self._replies: deque[asyncio.Future[base.Frame]] = deque()
        self._pending: list[bytes] = []
        self._flush_due = False
        self._room: list[asyncio.Future[None]] = []
        self._heard = self._wrote = False
        self._silent_ticks = 0
        self._heartbeat: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()

    # --- opening and closing ----------------------------------------------------------------------------------------------

    @classmethod
    async def open(
        cls,
        address: Address | str,
        *,
        client_properties: Mapping[str, Any] | None = None,
        heartbeat_s: int = HEARTBEAT_S,
        frame_max_bytes: int = frames.FRAME_MAX_BYTES,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        on_close: Callable[[ConnectionClosed | None], None] | None = None,
        on_blocked: Callable[[str | None], None] | None = None,
    ) -> Connection:
        """Connects and logs in.

        Args:
            address: The broker's address, with the user; a URL is parsed.
            client_properties: Added to PROPERTIES.
            heartbeat_s: Interval of heartbeats; a peer silent for two of them is given up. 0 for none.
            frame_max_bytes: The most to agree to; the broker may want less.
            connect_timeout_s: Limit on connecting and logging in.
            on_close: Called once when the connection has ended; with None if `close` ended it.
            on_blocked: Called with the broker's reason when it stops taking publishes, with None when it takes them
                again.

        Raises:
            ConnectionRefused: No answer, an answer not in AMQP, or not in time.
            AuthenticationFailed, VhostNotFound, AccessRefused: The login was refused.
            ConnectionClosed: The broker closed the connection for another reason.
        """
        where = Address.parse(address) if isinstance(address, str) else address
        connection = cls(where, on_blocked)
        try:
            async with asyncio.timeout(connect_timeout_s):
                await connect(where, connection)
                await connection._login(where, client_properties or {}, heartbeat_s, frame_max_bytes)
        except BaseException as error:
            connection.abort()
            if isinstance(error, TimeoutError):
                raise ConnectionRefused(f"{where} did not answer within {connect_timeout_s} s") from error
            if isinstance(error, OSError):
                raise ConnectionRefused(f"{where} cannot be reached: {error}") from error
            if isinstance(error, ConnectionClosed):
                raise _login_error(where, error) from error
            raise
        connection._on_close = on_close
        return connection

    async def _login(self, where: Address, properties: Mapping[str, Any], heartbeat_s: int, frame_max_bytes: int) -> None:
        self.write(frames.PROTOCOL_HEADER)
        start = await self._reply()
        assert_kind(start, commands.Connection.Start)
        self.server_properties = start.server_properties
        response = f"\0{where.user}\0{where.password}".encode()
        self._send(
            frames.CONNECTION_START_OK,
            table_bytes({**PROPERTIES, **properties}),
            encode.short_string("PLAIN"),
            long_int(len(response)) + response,
            encode.short_string("en_US"),
        )
        tune = await self._reply()
        assert_kind(tune, commands.Connection.Tune)
        self._channel_max = tune.channel_max or 65_535
        offered: int = tune.frame_max
        self.frame_max_bytes = max(min(frame_max_bytes, offered or frame_max_bytes), frames.FRAME_MIN_BYTES)
        self._send(frames.CONNECTION_TUNE_OK, short_int(self._channel_max), long_int(self.frame_max_bytes), short_int(heartbeat_s))
        self._send(frames.CONNECTION_OPEN, encode.short_string(where.vhost), b"\0\0")
        assert_kind(await self._reply(), commands.Connection.OpenOk)
        if heartbeat_s:
            self._tick(heartbeat_s / 2)

    async def close(self, code: int = 200, text: str = "") -> None:
        """Ends the connection in order, after everything that was sent; returns when it has ended. Never raises."""
        if self.error is None:
            self.write(encode.connection_close(code, text))
            reply = self._expect()
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await reply
                self._end(ConnectionClosed(code, text or "closed by this side"), ordered=True)
            except (TimeoutError, LrqError):
                self._end(ConnectionClosed(0, "closed by this side, without an answer"))
        await self._ended.wait()

    def abort(self) -> None:
        """Ends the connection at once; unwritten frames are lost."""
        self._end(ConnectionClosed(0, "aborted by this side"))

    def _end(self, error: ConnectionClosed, ordered: bool = False) -> None:
        if self.error is not None:
            return
        self.error = error
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._transport is not None:
            self._flush()
            if ordered:
                self._transport.close()
            else:
                self._transport.abort()
        self._pending.clear()
        waiters: list[asyncio.Future[Any]] = [*self._replies, *self._room]
        for waiting in waiters:
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # the future may have no waiter any more
        for channel in list(self._channels.values()):
            channel._end(error)
        self._ended.set()
        if self._on_close is not None:
            self.tell(self._on_close, None if ordered else error)

    def channel_ended(self, number: int) -> None:
        """A channel is over: its number is free again."""
        self._channels.pop(number, None)
        self._assembly.drop(number)

    def tell(self, callback: Callable[[Any], None], error: LrqError | None) -> None:
        """Calls an on_close callback; one that fails must not keep the others from being called."""
        try:
            callback(error)
        except Exception as failure:
            self._loop.call_exception_handler({"message": "an on_close callback failed", "exception": failure, "protocol": self})

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from asyncio's
        self._transport.set_write_buffer_limits(WRITE_BUFFER_HIGH_BYTES, WRITE_BUFFER_LOW_BYTES)
        if self.error is not None:  # given up before it was open
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(ConnectionClosed(0, f"the connection broke: {exc}" if exc else "the other side hung up"))

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        waiting, self._room = self._room, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self.error is not None:
            return
        buffer = self._left + data if self._left else data
        try:
            items, used = frames.scan(buffer, 0, frames.FRAME_MAX_ANY_BYTES)  # a header frame is as large as it was published
            self._left = buffer[used:]
            for item in items:
                self._take(buffer, item)
        except frames.FrameError as error:
            self.write(encode.connection_close(501, error.what))
            self._end(ConnectionClosed(501, error.what))
        except Exception as error:  # the callback's work is lost, so the connection must not go on
            ended = ConnectionClosed(541, f"a callback failed: {error!r}")
            ended.__cause__ = error
            self.write(encode.connection_close(541, "INTERNAL_ERROR"))
            self._end(ended)

    def _take(self, buffer: bytes, item: frames.Item) -> None:
        kind, number, start, end, header, header_end, stop = item
        channel = self._channels.get(number)
        if channel is None:
            if number == 0 and kind != frames.HEARTBEAT:
                self._take_own(kind, buffer[start:end])
            return  # a channel that was closed here: its last frames may still be under way
        if stop:
            body = frames.body_of(buffer, header_end, stop)
            channel._take_content(kind, buffer[start:end], buffer[header:header_end], body)
        elif kind in (frames.BASIC_ACK, frames.BASIC_NACK):
            tag, bits = frames.tag_and_bits(buffer, start)
            channel._take_confirm(tag, bool(bits & 1), kind == frames.BASIC_ACK)
        elif kind in frames.CONTENT_METHODS or kind in (frames.HEADER, frames.BODY):
            whole = self._assembly.take(kind, number, buffer[start:end])
            if whole is not None:
                channel._take_content(frames.method_id(whole.method), *whole)
        elif kind != frames.HEARTBEAT:
            channel._take_method(kind, buffer[start:end])

    def _take_own(self, kind: int, payload: bytes) -> None:
        if kind == frames.CONNECTION_CLOSE:
            self.write(encode.raw_method_frame(0, frames.CONNECTION_CLOSE_OK))
            self._end(ConnectionClosed(*frames.close_arguments(payload), self.address))
            return
        method: Any = frames.decode_method(payload)
        if kind in (frames.CONNECTION_BLOCKED, frames.CONNECTION_UNBLOCKED):
            self.blocked = method.reason if kind == frames.CONNECTION_BLOCKED else None
            if self._on_blocked is not None:
                self._on_blocked(self.blocked)
        elif self._replies:
            reply = self._replies.popleft()
            if not reply.done():
                reply.set_result(method)

    def _expect(self) -> asyncio.Future[base.Frame]:
        reply: asyncio.Future[base.Frame] = self._loop.create_future()
        self._replies.append(reply)
        return reply

    async def _reply(self) -> Any:
        if self.error is not None:
            raise self.error
        return await self._expect()

    # --- writing ----------------------------------------------------------------------------------------------------------

    def _send(self, method: int, *arguments: bytes) -> None:
        self.write(encode.raw_method_frame(0, method, *arguments))

    def write(self, data: bytes) -> None:
        if self.error is not None:
            return
        self._pending.append(data)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def write_all(self, pieces: Iterable[bytes]) -> None:
        pending = self._pending
        pending.extend(pieces)
        if len(pending) > PENDING_PIECES_MAX:
            self._flush()
        elif not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._pending and self._transport is not None:
            pending, self._pending = self._pending, []
            self._transport.writelines(pending)
            self._wrote = True

    async def drained(self) -> None:
        """Returns when the write buffer has room. Raises ConnectionClosed when the connection ends before."""
        self._flush()
        if self.error is not None:
            raise self.error
        if self.paused:
            room: asyncio.Future[None] = self._loop.create_future()
            self._room.append(room)
            await room

    def _tick(self, half_s: float) -> None:
        # Ticks are counted, not seconds: a pause of this process itself must not look like a silent peer.
        self._silent_ticks = 0 if self._heard else self._silent_ticks + 1
        if self._silent_ticks >= 4:
            self._end(ConnectionClosed(0, f"nothing was heard for {half_s * 4:g} s, two heartbeats"))
            return
        if not self._wrote:
            self.write(frames.HEARTBEAT_FRAME)
            self._flush()
        self._heard = self._wrote = False
        self._heartbeat = self._loop.call_later(half_s, self._tick, half_s)

    # --- channels ---------------------------------------------------------------------------------------------------------

    async def channel(
        self,
        *,
        on_confirm: OnConfirm | None = None,
        on_return: OnReturn | None = None,
        on_close: Callable[[LrqError | None], None] | None = None,
    ) -> Channel:
        """Opens a channel.

        Args:
            on_confirm: Called for each basic.ack and nack of a publish.
            on_return: Called for each publish that comes back.
            on_close: Called once when the channel has ended; with None if `Channel.close` ended it.

        Raises:
            NoChannelLeft: The connection has as many as were agreed on.
        """
        if self.error is not None:
            raise self.error
        number = next((n for n in range(1, self._channel_max + 1) if n not in self._channels), None)
        if number is None:
            raise NoChannelLeft(0, f"all {self._channel_max} of the connection are in use")
        channel = self._channels[number] = Channel(self, number, on_confirm, on_return, on_close)
        try:
            await channel._call(frames.CHANNEL_OPEN, b"\0")
        except asyncio.CancelledError:
            await channel.close()  # the caller has no channel to close
            raise
        return channel


def assert_kind(method: base.Frame, wanted: type[base.Frame]) -> None:
    """Raises ConnectionClosed when the broker answered with another method than the protocol has here."""
    if not isinstance(method, wanted):
        raise ConnectionClosed(503, f"{wanted.name} was expected and {method.name} came")


def _login_error(where: Address, error: ConnectionClosed) -> LrqError:
    """The error for a connection that ended during the login."""
    kind: type[AmqpError]
    if error.code == 403:
        kind = AuthenticationFailed
    elif error.code == 530 and f"vhost {where.vhost} not found" in error.text:
        kind = VhostNotFound
    elif error.code == 530 and "connection limit (" in error.text:
        kind = ConnectionLimit
    elif error.code == 530 and "refused" in error.text:
        kind = AccessRefused
    elif error.code == 0:
        return ConnectionRefused(f"{where} ended the connection during the login: {error.text}")
    else:
        return error
    return kind(error.code, error.text, where, at_login=True)
