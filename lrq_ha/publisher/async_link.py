"""One AMQP connection of the async publisher, on aiormq, and its successors: login at the node that takes us, sending of the window, confirms.

`sync_link.py` is the counterpart for threads.

Rules:

 - A link is one task; its concurrent work is in tasks that end with the connection. Any failure ends the connection:
   the window queues its messages in flight again, and the next address is tried.
 - aiormq, the protocol layer of aio-pika, makes the connection, reads frames, and keeps the heartbeat. The channels are ours: those of
   aio-pika and aiormq give every message a message_id, make a future of every publish, and go through all of them at every cumulative
   confirm. Two things of aiormq are not public: how a channel gets its frames (`ClientChannel`), and how a login is refused (`Connection._rpc`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import quote

import aiormq.abc
import aiormq.connection
from aiormq import spec
from pamqp.base import Frame
from pamqp.header import ContentHeader
from yarl import URL

from lrq_ha.publisher.confirm import AsyncConfirm
from lrq_ha.publisher.core import LOGOUT_S, Lane
from lrq_ha.publisher.errors import FencedError, InvalidArgument
from lrq_ha.publisher.library_logging import quiet
from lrq_ha.publisher.window import Settled, Window
from lrq_ha.publisher.wire import (
    CONNECTION_FORCED,
    CONSUME_CHANNEL,
    CONSUME_PREFETCH,
    CONSUME_RETRY_S,
    FRAME_MAX_BYTES,
    HELD_S,
    NOT_FOUND,
    PUBLISH_CHANNEL,
    QUERY_CHANNEL,
    WRITE_BYTES_MAX,
    Outgoing,
    sequence_of,
    writes,
)
from lrq_ha.routing.names import last_sequence, producer_queue

_LOG = logging.getLogger(__name__)

FRAMES_MAX: Final = 256  # of one channel, read and not handled: past it the connection is not read
ABORT_S: Final = 1.0  # for aiormq to clean up behind a connection that was cut
_CODES: Final = {kind: code for code, kind in aiormq.connection.EXCEPTION_MAPPING.items()}  # aiormq keeps the code only as the kind of error

T = TypeVar("T")


class _Left(Exception):
    """We leave this node, for this reason."""


class _ClosedByBroker(Exception):
    """The broker closed a channel."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code} {text}")
        self.code = code
        self.text = text


class _Sockets(aiormq.connection.TransportFactory):
    """Opens a connection's socket as aiormq does, and keeps it: a peer that has stopped answering must not be waited for."""

    def __init__(self, tls: bool) -> None:
        self._factory = aiormq.connection.TLSTransportFactory() if tls else aiormq.connection.TCPTransportFactory()
        self._writer: asyncio.StreamWriter | None = None

    async def create(self, url: URL, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, self._writer = await self._factory.create(url, **options)
        return reader, self._writer

    def cut(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()


class _Receiver:
    """Reads frames during the login. aiormq takes the broker's refusal for a malformed answer, and drops its text."""

    def __init__(self, receiver: aiormq.connection.FrameReceiver) -> None:
        self._receiver = receiver

    async def get_frame(self) -> Any:
        found = await self._receiver.get_frame()
        if isinstance(found[2], spec.Connection.Close):
            raise aiormq.exceptions.ConnectionClosed(found[2].reply_code, found[2].reply_text)
        return found


class Connection(aiormq.Connection):
    """A connection that can be cut and that says why it was refused. Its channels are `ClientChannel`s."""

    def __init__(self, url: URL, client_properties: dict[str, Any], tls: ssl.SSLContext | None) -> None:
        self._sockets = _Sockets(url.scheme == "amqps")
        super().__init__(url, context=tls, transport_factory=self._sockets, client_properties=client_properties)

    @staticmethod
    async def _rpc(request: Frame, writer: Any, frame_receiver: Any, wait_response: bool = True) -> Any:
        return await aiormq.Connection._rpc(request, writer, _Receiver(frame_receiver), wait_response)  # type: ignore[arg-type]

    async def is_blocked(self) -> bool:
        """Whether the broker has said that it does not read from us for now (a resource alarm)."""
        try:
            async with asyncio.timeout(0):
                await self.ready()  # returns at once unless it is blocked
        except TimeoutError:
            return True
        return False

    async def abort(self) -> None:
        """Ends it without waiting for the other side."""
        self._sockets.cut()
        with suppress(Exception):
            async with asyncio.timeout(ABORT_S):
                await self.close()

    async def while_open(self, *works: Coroutine[Any, Any, T]) -> T:
        """Runs `works` until the first of them ends, and ends the others. Returns its result, or raises its error; ConnectionClosed (by the
        broker) or _Left if the connection ended first.
        """
        closing = asyncio.ensure_future(self.closing)
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            await asyncio.wait([closing, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if closing.done():
                reason = closing.exception()
                if closed_by_broker(reason):
                    raise reason
                raise _Left(describe(reason)) from reason
            return next(task for task in tasks if task.done()).result()
        finally:
            for each in (closing, *tasks):
                each.cancel()
            await asyncio.gather(closing, *tasks, return_exceptions=True)


class Channel:
    """One AMQP channel: frames as they come.

    Args:
        connection: It must be open.
        number: Not in use on it.
    """

    def __init__(self, connection: Connection, number: int) -> None:
        self.frames: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(FRAMES_MAX)  # aiormq's reader puts them here, by this name
        self._number = number
        self._connection = connection
        connection.channels[number] = self  # type: ignore[assignment]

    async def send(self, method: Frame) -> None:
        await self._connection.write_queue.put(aiormq.abc.ChannelFrame.marshall(self._number, [method]))

    async def write(self, frames: bytes) -> None:
        """Writes frames; returns when the socket has taken most of them."""
        drained = asyncio.get_running_loop().create_future()
        await self._connection.write_queue.put(aiormq.abc.ChannelFrame(frames, should_close=False, drain_future=drained))
        await drained

    async def receive(self) -> Any:
        """The next frame. Raises _ClosedByBroker; the channel's number is free again after `let_go`."""
        _, frame = await self.frames.get()
        if isinstance(frame, spec.Channel.Close):
            raise _ClosedByBroker(frame.reply_code or 0, frame.reply_text or "")
        return frame

    async def call(self, method: Frame) -> Any:
        """Sends a method and returns its answer. No other call may be under way on this channel."""
        await self.send(method)
        return await self.receive()

    async def content(self) -> tuple[ContentHeader, bytes]:
        """The header and the body of the message whose method came last."""
        header = await self.receive()
        pieces: list[bytes] = []
        missing = header.body_size
        while missing > 0:
            piece = (await self.receive()).value
            pieces.append(piece)
            missing -= len(piece)
        return header, b"".join(pieces)

    async def let_go(self) -> None:
        """Agrees that the broker closed the channel. Nothing may be written to it any more."""
        await self.send(spec.Channel.CloseOk())

    async def close(self) -> None:
        await self.send(spec.Channel.Close(reply_code=200, reply_text="", class_id=0, method_id=0))
        while not isinstance(await self.receive(), spec.Channel.CloseOk):
            pass


def describe(error: BaseException | None) -> str:
    """A node's answer, or the connection's error, without the layers that aiormq wraps around it."""
    closed = closed_by_broker(error)
    if closed is not None:
        return f"{closed[0]} {closed[1]}"
    if isinstance(error, asyncio.CancelledError):  # aiormq's heartbeat check has given up
        return "no heartbeat"
    if error is None or isinstance(error, StopAsyncIteration):
        return "the connection was closed"
    text = str(error.args[-1]) if error.args else ""
    if text.startswith("Connect call failed"):  # asyncio's text, which leaves out the reason
        return os.strerror(error.args[0])
    return text or type(error).__name__


def closed_by_broker(error: BaseException | None) -> tuple[int, str] | None:
    """Code and text with which the broker closed the connection."""
    if isinstance(error, aiormq.exceptions.ConnectionClosed):
        code, text = error.args if len(error.args) == 2 else (_CODES.get(type(error), 0), *error.args)
        return (code, str(text)) if code else None
    return None


@dataclass(frozen=True, slots=True)
class Handlers:
    """The callbacks of a link."""

    ready: Callable[[], None]
    settle: Callable[[list[Settled[Outgoing[AsyncConfirm]]]], None]
    fenced: Callable[[FencedError], None]


def connection_url(node: str, vhost: str, heartbeat_s: int) -> URL:
    """An address in the form of aiormq. InvalidArgument if aiormq does not take it."""
    try:
        url = URL(node)
        return url.with_path("/" + quote(vhost, safe=""), encoded=True).with_query({**url.query, "heartbeat": str(heartbeat_s)})
    except ValueError as error:
        raise InvalidArgument("An address in nodes is not a URL that aiormq takes", todo=str(error)) from None


class AsyncLink:
    """The connection to one vhost, over a list of addresses of which one at a time takes us.

    Args:
        lane: The messages to send, and the addresses.
        urls: The addresses with credentials.
        learn: Windows whose producers' last sequences to ask the server for at every login.
        login_timeout_s: Seconds from the first byte to the first publish.
        confirm_timeout_s: Longest time in seconds that the oldest message in flight may remain the oldest.
        tls: For amqps:// addresses; None for the system's trusted CAs.
    """

    def __init__(
        self,
        lane: Lane[AsyncConfirm],
        urls: Sequence[URL],
        learn: Sequence[Window[Outgoing[AsyncConfirm]]],
        login_timeout_s: float,
        confirm_timeout_s: float,
        handlers: Handlers,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._lane = lane
        self._tls = tls
        self._window = lane.window
        self._addresses = lane.addresses
        self._urls = urls
        self._learn = learn
        self._login_timeout_s = login_timeout_s
        self._confirm_timeout_s = confirm_timeout_s
        self._handlers = handlers
        self._work = asyncio.Event()  # something may be in line
        self._reads = asyncio.Event()  # there is a consumer
        self._consumer: tuple[str, Callable[[], None], Callable[[bytes], None]] | None = None

    def wake(self) -> None:
        """Sends the waiting messages."""
        self._work.set()

    def consume(self, stream: str, begin: Callable[[], None], message: Callable[[bytes], None]) -> None:
        """Reads `stream` from its first message, after every login: `begin()`, then `message(body)` for each."""
        self._consumer = (stream, begin, message)
        self._reads.set()

    async def run(self) -> None:
        """One connection after the other, until it is cancelled; then an open connection ends in order."""
        while True:
            self._addresses.trying()
            url = self._urls[self._addresses.index]
            connection = Connection(url, self._lane.properties, self._tls)
            began_s = time.monotonic()
            was_ready = False
            try:
                channel = await self._log_in(connection)
                was_ready = True
                await connection.while_open(self._serve_on(connection, channel), self._consume(connection))
            except asyncio.CancelledError:
                await self._log_out(connection)
                raise
            except (_Left, _ClosedByBroker, aiormq.exceptions.ConnectionClosed) as error:
                why = describe(error)
                closed = closed_by_broker(error)
                if closed is not None and closed[0] != CONNECTION_FORCED:
                    self._handlers.settle(self._window.connection_refused(*closed))
            finally:
                self._lane.ready = False
            if was_ready and time.monotonic() - began_s > HELD_S:
                self._addresses.holds()
            _LOG.log(logging.WARNING if was_ready else logging.INFO, "%s: %s", self._addresses.here, why)
            self._window.disconnected()
            wait_s = self._addresses.left(why, random.random())
            await connection.abort()
            await asyncio.sleep(wait_s)

    async def _log_out(self, connection: Connection) -> None:
        """Closes the connection in order if the peer still answers."""
        try:
            if connection.is_opened:
                with suppress(Exception):
                    async with asyncio.timeout(LOGOUT_S):
                        await connection.close()
        finally:
            await connection.abort()

    # ---- logging in

    async def _log_in(self, connection: Connection) -> Channel:
        try:
            async with asyncio.timeout(self._login_timeout_s):
                await self._connect(connection)
                for window in self._learn:
                    await connection.while_open(self._ask(connection, window))
                return await connection.while_open(self._open(connection))
        except TimeoutError:
            raise _Left(f"no login within {self._login_timeout_s} s") from None

    async def _connect(self, connection: Connection) -> None:
        """Any error that aiormq raises for an address is that address's answer."""
        try:
            with quiet():  # also in the tasks that aiormq makes for the connection
                await connection.connect()
        except Exception as error:
            raise _Left(describe(error)) from error

    async def _ask(self, connection: Connection, window: Window[Outgoing[AsyncConfirm]]) -> None:
        """Learns the last sequence of a window's producer. NOT_FOUND is the answer of a broker without a door: it knows no producers."""
        channel = Channel(connection, QUERY_CHANNEL)
        await channel.call(spec.Channel.Open())
        try:
            answer = await channel.call(spec.Queue.Declare(queue=producer_queue(window.producer), passive=True))
        except _ClosedByBroker as closed:
            if closed.code != NOT_FOUND:
                raise
            await channel.let_go()
            return
        await channel.close()
        try:
            window.learn(last_sequence(answer.message_count, answer.consumer_count))
        except FencedError as error:
            self._handlers.fenced(error)

    async def _open(self, connection: Connection) -> Channel:
        channel = Channel(connection, PUBLISH_CHANNEL)
        await channel.call(spec.Channel.Open())
        await channel.call(spec.Confirm.Select())
        return channel

    # ---- sending and confirms

    async def _serve_on(self, connection: Connection, channel: Channel) -> None:
        while True:
            channel = await self._serve(connection, channel)

    async def _serve(self, connection: Connection, channel: Channel) -> Channel:
        """Sends and reads until the connection ends. If the broker closes the channel because of a message, returns the next channel."""
        if not self._lane.ready:
            self._lane.ready = True
            self._addresses.took_us()
            _LOG.info("%s takes publishes of producer %s", self._addresses.here, self._window.producer)
            self._handlers.ready()
        try:
            await connection.while_open(self._send(connection, channel), self._read(channel), self._watch(connection))
        except _ClosedByBroker as closed:
            sent = self._window.in_flight
            if not sent:
                raise
            _LOG.warning("%s closed the channel: %s; sending %d messages again, one at a time", self._addresses.here, closed, sent)
            self._lane.ready = False
            self._handlers.settle(self._window.channel_refused(closed.code, closed.text))
        try:
            async with asyncio.timeout(self._login_timeout_s):
                return await connection.while_open(self._reopen(connection, channel))
        except TimeoutError:
            raise _Left(f"no new channel within {self._login_timeout_s} s") from None

    async def _reopen(self, connection: Connection, channel: Channel) -> Channel:
        await channel.let_go()
        return await self._open(connection)

    async def _send(self, connection: Connection, channel: Channel) -> None:
        frame_max = connection.connection_tune.frame_max or FRAME_MAX_BYTES
        while True:
            self._work.clear()
            while entries := self._window.take(WRITE_BYTES_MAX):
                for piece in writes((entry.item for entry in entries), frame_max):
                    await channel.write(piece)
            await self._work.wait()

    async def _read(self, channel: Channel) -> None:
        while True:
            frame = await channel.receive()
            if isinstance(frame, spec.Basic.Ack | spec.Basic.Nack):
                self._addresses.holds()
                nack = isinstance(frame, spec.Basic.Nack)
                self._handlers.settle(self._window.acked(frame.delivery_tag or 0, bool(frame.multiple), nack=nack))
                self._work.set()  # when messages go one at a time, the next one waits for this
            elif isinstance(frame, spec.Basic.Return):
                header, _ = await channel.content()
                self._window.returned(sequence_of(header.properties.headers), frame.reply_code or 0, frame.reply_text or "")

    async def _watch(self, connection: Connection) -> None:
        """Checks periodically whether a confirm is overdue. A broker that has blocked us is not late."""
        while True:
            await asyncio.sleep(min(1.0, self._confirm_timeout_s / 4))
            if await connection.is_blocked():
                self._window.not_late()
            overdue_s = self._window.overdue_s(time.monotonic())
            if overdue_s > self._confirm_timeout_s:
                raise _Left(f"no confirm for {overdue_s:.1f} s")

    # ---- reading a stream from its beginning

    async def _consume(self, connection: Connection) -> None:
        """Runs as long as the connection: its channel outlives those that the broker closes because of a message."""
        await self._reads.wait()
        assert self._consumer is not None
        stream, begin, message = self._consumer
        while True:
            channel = Channel(connection, CONSUME_CHANNEL)
            try:
                await channel.call(spec.Channel.Open())
                await channel.call(spec.Basic.Qos(prefetch_count=CONSUME_PREFETCH))
                begin()
                await channel.call(spec.Basic.Consume(queue=stream, arguments={"x-stream-offset": "first"}))
                while isinstance(frame := await channel.receive(), spec.Basic.Deliver):
                    _, body = await channel.content()
                    await channel.send(spec.Basic.Ack(delivery_tag=frame.delivery_tag or 0))
                    message(body)
                why = "the consumer was cancelled"
                await channel.close()
            except _ClosedByBroker as closed:
                why = str(closed)
                await channel.let_go()
            _LOG.warning("%s: cannot read %s: %s; trying again", self._addresses.here, stream, why)
            await asyncio.sleep(CONSUME_RETRY_S)
