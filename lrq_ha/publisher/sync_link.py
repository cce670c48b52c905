"""One AMQP connection of the sync publisher, on pika, and its successors: login at the node that takes us, sending of the window, confirms.

`async_link.py` is the counterpart for asyncio.

Rules:

 - Everything here runs on the publisher's I/O thread, except `wake` and the read-only properties. The window is shared with the
   threads that publish, so it is touched only under the publisher's lock.
 - Any failure ends in `_drop`: the window queues its messages in flight again, and the next address is tried.
 - Callbacks of a connection that was dropped are ignored (each is bound to its connection).
 - Two private methods of pika are used, both in the marked place at the end: one writes many frames with one system call (a
   third of the CPU of basic_publish, and the interpreter lock is released once per batch and not once per frame), the other
   aborts a connection whose peer has stopped answering (as pika's own heartbeat check does).
"""

from __future__ import annotations

import enum
import logging
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pika
import pika.exceptions
import pika.spec
from pika.adapters.select_connection import SelectorIOServicesAdapter

from lrq_ha.publisher.confirm import Confirm
from lrq_ha.publisher.core import Lane
from lrq_ha.publisher.errors import FencedError, InvalidArgument
from lrq_ha.publisher.window import Settled, Window
from lrq_ha.publisher.wire import (
    CONNECTION_FORCED,
    CONSUME_CHANNEL,
    CONSUME_PREFETCH,
    CONSUME_RETRY_S,
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

_REFUSED_AT_LOGIN = re.compile(r"ConnectionClosedByBroker: \((\d+)\) ['\"](.*)['\"]", re.DOTALL)  # pika keeps only the text


class State(enum.Enum):
    """The states of a link."""

    IDLE = "idle"  # nothing to send yet
    WAITING = "waiting"  # for the time of the next attempt
    LOGGING_IN = "logging in"
    READY = "ready"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Handlers:
    """The callbacks of a link, called on the I/O thread and without the lock."""

    ready: Callable[[], None]
    settle: Callable[[Callable[[], list[Settled[Outgoing[Confirm]]]]], bool]  # runs it under the lock, settles the messages that it returns, if any
    fenced: Callable[[FencedError], None]


def parameters(
    url: str, vhost: str, properties: dict[str, str], heartbeat_s: int, login_timeout_s: float, tls: ssl.SSLContext | None
) -> pika.URLParameters:
    """Connection parameters for one address; one attempt, since the link makes the next ones. InvalidArgument if pika does not take them."""
    try:
        found = pika.URLParameters(url)
    except ValueError as error:
        raise InvalidArgument("An address in nodes is not a URL that pika takes", todo=str(error)) from None
    if tls is not None and found.ssl_options is not None:
        found.ssl_options = pika.SSLOptions(tls, found.host)
    found.virtual_host = vhost
    found.heartbeat = heartbeat_s
    found.socket_timeout = found.stack_timeout = login_timeout_s
    found.connection_attempts = 1
    found.client_properties = properties
    return found


def describe(error: BaseException) -> str:
    """A node's answer, without the layers that pika wraps around it."""
    while True:
        layers = [*getattr(error, "exceptions", ()), getattr(error, "exception", None), *error.args[:1]]
        inner = next((each for each in reversed(layers) if isinstance(each, BaseException)), None)
        if inner is None:
            break
        error = inner
    if isinstance(error, pika.exceptions.ConnectionClosed | pika.exceptions.ChannelClosed):
        return f"{error.reply_code} {error.reply_text}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error) or type(error).__name__
    refused = _REFUSED_AT_LOGIN.search(text)
    return f"{refused[1]} {refused[2]}" if refused else text


class _Services(SelectorIOServicesAdapter):  # type: ignore[misc]
    """pika's sockets. If a node dies just after it has taken a connection, pika (1.4) ends the loop with a ValueError, without any callback."""

    def create_streaming_connection(self, *args: Any, on_done: Callable[[Any], None], **options: Any) -> Any:
        try:
            return super().create_streaming_connection(*args, on_done=on_done, **options)
        except ValueError as error:
            failed = error.__context__ or error
            return self.call_later(0, lambda: on_done(failed))


class Link:
    """The connection to one vhost, over a list of addresses of which one at a time takes us.

    Args:
        loop: pika's IOLoop, which the I/O thread runs.
        lock: The publisher's lock around every window.
        lane: The messages to send, and the addresses.
        nodes: Connection parameters of each address.
        learn: Windows whose producers' last sequences to ask the server for at every login.
        login_timeout_s: Seconds from the first byte to the first publish.
        confirm_timeout_s: Longest time in seconds that the oldest message in flight may remain the oldest.
    """

    def __init__(
        self,
        loop: Any,
        lock: threading.Lock,
        lane: Lane[Confirm],
        nodes: Sequence[pika.URLParameters],
        learn: Sequence[Window[Outgoing[Confirm]]],
        login_timeout_s: float,
        confirm_timeout_s: float,
        handlers: Handlers,
    ) -> None:
        self.state = State.IDLE
        self._lane = lane
        self._window = lane.window
        self._addresses = lane.addresses
        self._loop = loop
        self._lock = lock
        self._nodes = nodes
        self._learn = learn
        self._login_timeout_s = login_timeout_s
        self._confirm_timeout_s = confirm_timeout_s
        self._handlers = handlers
        self._connection: Any = None
        self._timer: Any = None  # of the attempt or of the login, never both
        self._blocked = False
        self._ready_since_s = 0.0
        self._wake_pending = False
        self._consumer: tuple[str, Callable[[], None], Callable[[bytes], None]] | None = None
        self._consumer_channel: Any = None

    # ---- logging in

    def start(self) -> None:
        """Begins to connect, once."""
        if self.state is State.IDLE:
            self._watch()
            self._attempt()

    def _attempt(self) -> None:
        self._enter(State.LOGGING_IN)
        self._timer = self._loop.call_later(self._login_timeout_s, self._login_overdue)
        self._addresses.trying()
        self._connection = pika.SelectConnection(
            self._nodes[self._addresses.index],
            on_open_callback=self._opened,
            on_open_error_callback=self._ended,
            on_close_callback=self._ended,
            custom_ioloop=_Services(self._loop),
        )

    def _login_overdue(self) -> None:
        self._drop(f"no login within {self._login_timeout_s} s")

    def _opened(self, connection: Any) -> None:
        if connection is not self._connection:
            return
        connection.add_on_connection_blocked_callback(lambda c, frame: self._set_blocked(c, True, frame.method.reason))
        connection.add_on_connection_unblocked_callback(lambda c, _: self._set_blocked(c, False, ""))
        self._ask(connection, list(self._learn))

    def _set_blocked(self, connection: Any, blocked: bool, reason: str) -> None:
        if connection is self._connection:
            self._blocked = blocked
            _LOG.warning("%s %s publishing %s", self._addresses.here, "blocks" if blocked else "goes on", reason)

    def _ask(self, connection: Any, windows: list[Window[Outgoing[Confirm]]]) -> None:
        """Asks for the last sequence of each window's producer, then opens the channel to publish on.

        NOT_FOUND (which closes the channel) is the answer of a broker without a door: it knows no producers.
        """
        if connection is not self._connection or not connection.is_open:
            return
        if not windows:
            connection.channel(PUBLISH_CHANNEL, on_open_callback=self._channel_opened)
            return
        window, rest = windows[0], windows[1:]

        def answered(frame: Any) -> None:
            channel.add_on_close_callback(lambda *_: self._later(lambda: self._ask(connection, rest)))
            self._learned(window, last_sequence(frame.method.message_count, frame.method.consumer_count))
            if channel.is_open:
                channel.close()

        def closed(_: Any, reason: BaseException) -> None:
            if isinstance(reason, pika.exceptions.ChannelClosedByBroker) and connection is self._connection:
                if reason.reply_code == NOT_FOUND:
                    self._later(lambda: self._ask(connection, rest))
                else:
                    self._drop(describe(reason))

        def opened(_: Any) -> None:
            channel.add_on_close_callback(closed)
            channel.queue_declare(producer_queue(window.producer), passive=True, callback=answered)

        channel = connection.channel(QUERY_CHANNEL, on_open_callback=opened)

    def _later(self, callback: Callable[[], None]) -> None:
        """Calls back from the loop, not from within pika's handling of a channel's end (the number is in use until that returns)."""
        self._loop.call_later(0, callback)

    def _learned(self, window: Window[Outgoing[Confirm]], last: int) -> None:
        try:
            with self._lock:
                window.learn(last)
        except FencedError as error:
            self._handlers.fenced(error)

    def _channel_opened(self, channel: Any) -> None:
        if channel.connection is not self._connection:
            return
        channel.add_on_close_callback(self._channel_closed)
        channel.add_on_return_callback(self._returned)
        channel.confirm_delivery(self._confirmed, lambda _: self._ready(channel))

    def _ready(self, channel: Any) -> None:
        if channel.connection is not self._connection:
            return
        self._cancel_timer()
        self._enter(State.READY)
        self._ready_since_s = time.monotonic()
        self._addresses.took_us()
        _LOG.info("%s takes publishes of producer %s", self._addresses.here, self._window.producer)
        self._handlers.ready()
        self._pump()
        if self._consumer is not None and self._consumer_channel is None:
            self._consume()

    # ---- sending and confirms

    def wake(self) -> None:
        """Has the I/O thread send the waiting messages. From any thread, under the lock."""
        if not self._wake_pending:
            self._wake_pending = True
            self._loop.add_callback_threadsafe(self._woken)

    def _woken(self) -> None:
        with self._lock:
            self._wake_pending = False
        self._pump()

    def _pump(self) -> None:
        while self.state is State.READY:
            with self._lock:
                entries = self._window.take(WRITE_BYTES_MAX)
            if not entries:
                return
            for piece in writes((entry.item for entry in entries), self._connection.params.frame_max):
                _write_frames(self._connection, piece)

    def _confirmed(self, frame: Any) -> None:
        method = frame.method
        nack = isinstance(method, pika.spec.Basic.Nack)
        self._addresses.holds()
        if self._handlers.settle(lambda: self._window.acked(method.delivery_tag, method.multiple, nack=nack)):
            self._pump()  # when messages go one at a time, the next one waits for this

    def _returned(self, _: Any, method: Any, properties: Any, __: bytes) -> None:
        with self._lock:
            self._window.returned(sequence_of(properties.headers), method.reply_code, method.reply_text)

    def _channel_closed(self, channel: Any, reason: BaseException) -> None:
        """The broker closed the channel: because of a message in flight. Otherwise the connection is ending, which has its own callback."""
        connection = channel.connection
        if connection is not self._connection or not isinstance(reason, pika.exceptions.ChannelClosedByBroker):
            return
        sent = self._window.in_flight  # changed by this thread only
        if not sent:
            self._drop(describe(reason))
            return
        _LOG.warning("%s closed the channel: %s; sending %d messages again, one at a time", self._addresses.here, describe(reason), sent)
        self._enter(State.LOGGING_IN)
        self._timer = self._loop.call_later(self._login_timeout_s, self._login_overdue)
        self._handlers.settle(lambda: self._window.channel_refused(reason.reply_code, reason.reply_text))
        self._later(lambda: self._ask(connection, []))

    # ---- losing the connection

    def _watch(self) -> None:
        """Checks periodically whether a confirm is overdue. A broker that has blocked us is not late."""
        if self.state is State.CLOSED:
            return
        self._loop.call_later(min(1.0, self._confirm_timeout_s / 4), self._watch)
        if self.state is not State.READY:
            return
        with self._lock:
            if self._blocked:
                self._window.not_late()
            overdue_s = self._window.overdue_s(time.monotonic())
        if overdue_s > self._confirm_timeout_s:
            self._drop(f"no confirm for {overdue_s:.1f} s")

    def _ended(self, connection: Any, reason: BaseException) -> None:
        if connection is not self._connection:
            return
        if isinstance(reason, pika.exceptions.ConnectionClosedByBroker) and reason.reply_code != CONNECTION_FORCED:
            code, text = reason.reply_code, reason.reply_text
            self._handlers.settle(lambda: self._window.connection_refused(code, text))
        self._drop(describe(reason))

    def _drop(self, why: str) -> None:
        """Leaves the connection, if it is still there, and tries the next address."""
        if self.state is State.CLOSED:
            return
        connection, self._connection = self._connection, None
        was_ready = self.state is State.READY
        if was_ready and time.monotonic() - self._ready_since_s > HELD_S:
            self._addresses.holds()
        self._cancel_timer()
        self._consumer_channel = None
        self._blocked = False
        _LOG.log(logging.WARNING if was_ready else logging.INFO, "%s: %s", self._addresses.here, why)
        self._enter(State.WAITING)
        with self._lock:
            self._window.disconnected()
        if connection is not None:
            _abort(connection, why)
        self._timer = self._loop.call_later(self._addresses.left(why, random.random()), self._attempt)

    def _enter(self, state: State) -> None:
        self.state = state
        self._lane.ready = state is State.READY

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._loop.remove_timeout(self._timer)
            self._timer = None

    def close(self, done: Callable[[], None]) -> None:
        """Ends the connection in order; `done` is called when it is gone. The caller handles messages that are still in the window."""
        ready = self.state is State.READY
        self._cancel_timer()
        self._enter(State.CLOSED)
        connection, self._connection = self._connection, None
        if connection is None:
            done()
        elif ready and connection.is_open:
            connection.add_on_close_callback(lambda *_: done())
            connection.close()
        else:
            _abort(connection, "closed")
            done()

    # ---- reading a stream from its beginning

    def consume(self, stream: str, begin: Callable[[], None], message: Callable[[bytes], None]) -> None:
        """Reads `stream` from its first message, after every login: `begin()`, then `message(body)` for each."""
        self._consumer = (stream, begin, message)
        if self.state is State.READY:
            self._consume()

    def _consume(self) -> None:
        connection = self._connection
        if self._consumer is None or self.state is not State.READY or self._consumer_channel is not None:
            return
        stream, begin, message = self._consumer

        def deliver(channel: Any, method: Any, _: Any, body: bytes) -> None:
            if channel is self._consumer_channel:
                channel.basic_ack(method.delivery_tag)
                message(body)

        def opened(channel: Any) -> None:
            if channel is self._consumer_channel:
                channel.basic_qos(prefetch_count=CONSUME_PREFETCH, callback=lambda _: start(channel))

        def start(channel: Any) -> None:
            if channel is self._consumer_channel:
                begin()
                channel.basic_consume(stream, deliver, arguments={"x-stream-offset": "first"})

        def cancelled(_: Any) -> None:
            if channel.is_open:
                channel.close()

        def closed(ended: Any, reason: BaseException) -> None:
            if ended is self._consumer_channel:
                self._consumer_channel = None
                if connection.is_open:
                    _LOG.warning("%s: cannot read %s: %s; trying again", self._addresses.here, stream, describe(reason))
                    self._loop.call_later(CONSUME_RETRY_S, self._consume)

        channel = self._consumer_channel = connection.channel(CONSUME_CHANNEL, on_open_callback=opened)
        channel.add_on_close_callback(closed)
        channel.add_on_cancel_callback(cancelled)


# ---- the two private methods of pika (tests/integration/test_publisher.py fails if they go away)


def _write_frames(connection: Any, frames: bytes) -> None:
    connection._output_marshaled_frames([frames])


def _abort(connection: Any, why: str) -> None:
    if not connection.is_closed:
        connection._terminate_stream(pika.exceptions.AMQPConnectionError(why))
