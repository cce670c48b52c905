"""The sync publisher, on pika: any thread publishes, one I/O thread of its own talks to the brokers.

Rules:
 - `publish` gives the replication ID, puts the message in the window and wakes the I/O thread: it waits only for room.
 - Two producers, since the door knows IDs per producer: `<producer>` on the connection to the client's vhost (opened by the first
   publish) and `<producer>.lrq` on the one to vhost lrq, which every publisher has, for it is also where the server is asked for
   the producers' last sequences.
 - One lock guards both windows. Confirms are settled outside of it, on the I/O thread.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

import pika
from pika.adapters.select_connection import IOLoop

from lrq_ha.publisher import messages
from lrq_ha.publisher.confirm import Confirm
from lrq_ha.publisher.errors import FencedError, InvalidArgument, NoPrimary, PublisherClosed, WaitTimeout, WindowFull
from lrq_ha.publisher.link import Handlers, Link, Outgoing, State, message_frames, parameters, quiet_pika
from lrq_ha.publisher.messages import MESSAGE_BYTES_MAX, LogEntries
from lrq_ha.publisher.provider import LOOK_S, FullSyncs, Provider
from lrq_ha.publisher.transaction import Transaction
from lrq_ha.publisher.window import Settled, Window
from lrq_ha.replication.errors import LrqError
from lrq_ha.routing import names

_LOG = logging.getLogger(__name__)

HEADER_BYTES_MAX: Final = 120 * 1024  # method and header frame; RabbitMQ closes the connection above its frame_max of 128 KiB
FAILURES_KEPT: Final = 1000  # failed confirms that nobody asked for, kept for flush()
PERSISTENT: Final = 2
LOGOUT_S: Final = 2.0


class Publisher:
    """Publishes to whichever node of a group is primary, each message once, in order, across failovers.

    Args:
        nodes: Addresses of the group's doors: amqp:// or amqps:// URLs with credentials; a vhost in them is ignored.
        producer: Name of this process as a producer, 1 to 64 characters of A-Z a-z 0-9 _ . - ; one process at a time may use it, and
            after a restart it continues the sequence of its replication IDs.
        client_name: Name of the log replication client (the same without _); needed for log entries only.
        vhost: Where `publish` goes.
        window: Most unconfirmed messages, per vhost.
        window_bytes: Most bytes of them, per vhost.
        confirm_timeout_s: Seconds without a confirm after which the node counts as lost.
        connect_timeout_s: Seconds that the constructor waits for a primary.
        login_timeout_s: Seconds that one address may take to log us in.
        publish_timeout_s: Seconds that a publish waits for room in the window.
        heartbeat_s: AMQP heartbeat interval in seconds.
        message_bytes_max: Largest body; not more than the brokers' `max_message_size`.

    Raises:
        InvalidArgument: A name, the list of nodes, or a limit.
        NoPrimary: No node took us within `connect_timeout_s`; it lists what each one answered.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        producer: str,
        client_name: str = "",
        *,
        vhost: str = "/",
        window: int = 10_000,
        window_bytes: int = 64 * 1024 * 1024,
        confirm_timeout_s: float = 30.0,
        connect_timeout_s: float = 30.0,
        login_timeout_s: float = 5.0,
        publish_timeout_s: float = 60.0,
        heartbeat_s: int = 10,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        self.producer = messages.checked_producer(producer)
        self.client_name = messages.checked_client_name(client_name) if client_name else ""
        if isinstance(nodes, str) or not nodes:
            raise InvalidArgument(f"nodes is {nodes!r}", todo="It must be a non-empty list of amqp:// URLs")
        limits = {"window": window, "window_bytes": window_bytes, "confirm_timeout_s": confirm_timeout_s}
        for name, value in {**limits, "login_timeout_s": login_timeout_s, "message_bytes_max": message_bytes_max}.items():
            if value <= 0:
                raise InvalidArgument(f"{name} is {value}", todo="It must be greater than 0")
        self._publish_timeout_s = publish_timeout_s
        self._message_bytes_max = message_bytes_max
        self._lock = threading.Condition(threading.Lock())
        self._waiting = 0  # threads in self._lock.wait: settling notifies only if there are any
        self._failure: LrqError | None = None  # why nothing can be published any more
        self._failed: deque[Confirm] = deque(maxlen=FAILURES_KEPT)
        self._announced: bool | None = None  # the last ClientStatus sent: whether there is a full sync provider
        self._full_syncs: FullSyncs | None = None

        self._loop: Any = IOLoop()
        own: Window[Outgoing] = Window(self.producer, window, window_bytes)
        log: Window[Outgoing] = Window(self.producer + messages.LOG_PRODUCER_SUFFIX, window, window_bytes)
        handlers = Handlers(self._ready, self._settle, self._fenced)

        def link(to: str, of: Window[Outgoing], learn: Sequence[Window[Outgoing]]) -> Link:
            addresses = [_parameters(url, to, of.producer, heartbeat_s, login_timeout_s) for url in nodes]
            return Link(self._loop, self._lock, of, addresses, learn, login_timeout_s, confirm_timeout_s, handlers)

        self._log_link = link(messages.VHOST, log, [log, own])
        self._own_link = link(vhost, own, [])
        self._thread = threading.Thread(target=self._run, name=f"lrq-publisher-{producer}", daemon=True)
        self._thread.start()
        self._connect(connect_timeout_s)

    # ---- publishing

    def publish(self, exchange: str, routing_key: str, body: bytes, properties: pika.BasicProperties | None = None) -> Confirm:
        """Publishes to an exchange of the client's vhost. Waits only while the window is full.

        Args:
            exchange: Name; "" is the default exchange.
            routing_key: At most 255 bytes.
            body: At most `message_bytes_max` bytes.
            properties: Passed on with the header x-lrq-id added, persistent unless they say otherwise. They are not changed.

        Raises:
            InvalidArgument, MessageTooLarge: Nothing was sent.
            WindowFull, NoPrimary: No room within `publish_timeout_s`. Nothing was sent.
            FencedError, PublisherClosed: This publisher cannot send any more.
        """
        messages.checked_short_string("exchange", exchange)
        messages.checked_short_string("routing_key", routing_key)
        content = messages.checked_bytes("body", body)
        return self._enqueue(self._own_link, exchange, routing_key, lambda _: content, len(content), properties)

    def transmit_log_entry_message(self, payload: bytes, destinations: Sequence[str]) -> Confirm:
        """Sends one log entry to each destination site (remote_ids). Waits and raises as `publish` does."""
        return self.transmit_log_entry_messages([(payload, destinations)])

    def transmit_log_entry_messages(self, entries: Sequence[messages.Addressed]) -> Confirm:
        """Sends (payload, destinations) pairs as one transaction: a destination gets its part of it whole, or not at all. Equal
        payloads are stored once. Waits and raises as `publish` does."""
        return self._transmit(names.SEND_LOG_ENTRIES, LogEntries.checked(entries))

    @contextmanager
    def transaction(self) -> Iterator[Transaction[Confirm]]:
        """`with publisher.transaction() as tx: tx.transmit_log_entry_message(…)`: sent at the end of the block, its result is
        `tx.confirm`; an exception in the block discards it."""
        transaction: Transaction[Confirm] = Transaction()
        try:
            yield transaction
        except BaseException:
            transaction.seal()
            raise
        entries = transaction.seal()
        if entries is not None:
            transaction.sent(self._transmit(names.SEND_LOG_ENTRIES, entries))

    def _transmit(self, queue: str, entries: LogEntries) -> Confirm:
        if not self.client_name:
            raise InvalidArgument("The publisher has no client_name", todo="Log entries need one: Publisher(…, client_name=…)")
        self._announce(False)
        timestamp_us = time.time_ns() // 1000
        # The distinct payloads' bytes are what counts; ID and table are small. The exact size is checked once it is known.
        size = sum(map(len, {id(payload): payload for payload, _ in entries.entries}.values()))
        return self._enqueue(self._log_link, "", queue, lambda i: entries.to_bytes(self.client_name, i, timestamp_us), size)

    def _enqueue(
        self,
        link: Link,
        exchange: str,
        routing_key: str,
        body: Callable[[str], bytes],
        size_bytes: int,
        properties: pika.BasicProperties | None = None,
        *,
        wait: bool = True,
    ) -> Confirm:
        """Gives the next replication ID of the link's producer, and puts the message in line."""
        messages.checked_size("The message", size_bytes, self._message_bytes_max)
        window = link.window
        with self._lock:
            if wait and not window.fits(size_bytes):
                self._wait(lambda: self._failure is not None or window.fits(size_bytes), self._publish_timeout_s)
            if self._failure is not None:
                raise self._failure
            if wait and not window.fits(size_bytes):
                raise self._no_primary(link) or WindowFull(
                    f"The window of producer {window.producer} stayed full for {self._publish_timeout_s} s"
                    f" ({len(window)} messages, {window.bytes} bytes unconfirmed)",
                    todo="Publish slower, or make the window larger",
                )
            replication_id = window.next_id()
            content = body(replication_id)
            messages.checked_size("The message", len(content), self._message_bytes_max)
            frames = message_frames(exchange, routing_key, len(content), _with_id(properties, replication_id))
            messages.checked_size("The message's header", len(frames), HEADER_BYTES_MAX)
            confirm = Confirm(replication_id, lambda: self._no_primary(link))
            window.add(len(frames) + len(content), Outgoing(frames, content, confirm))
            if link.state is State.IDLE:
                self._loop.add_callback_threadsafe(link.start)
            else:
                link.wake()
        return confirm

    # ---- full syncs

    def on_full_sync(self, provider: Provider) -> None:
        """Has `provider(request, context)` called, in a thread of its own, for every full sync that a destination asks of this client,
        those included that were asked for before. It must end with `context.complete()` (or `cancel()`)."""
        if not self.client_name:
            raise InvalidArgument("The publisher has no client_name", todo="Full syncs need one: Publisher(…, client_name=…)")
        if self._full_syncs is not None:
            raise InvalidArgument("There is a full sync provider already", todo="One provider per publisher")
        syncs = self._full_syncs = FullSyncs(self.client_name, provider, self)
        self._announce(True)

        def begin() -> None:
            self._log_link.consume(names.STATUS, syncs.replay, syncs.status)
            tick()

        def tick() -> None:
            syncs.tick()
            self._loop.call_later(LOOK_S / 4, tick)

        self._loop.add_callback_threadsafe(begin)

    def _announce(self, provides: bool) -> None:
        """Tells the servers whether this client supplies full syncs: once, and again when it begins to."""
        with self._lock:
            if self._announced or self._announced is provides:
                return
            self._announced = provides
        self.send_status(messages.client_status(self.client_name, provides))

    def send_full_sync(self, entries: LogEntries) -> Confirm:
        """For FullSyncContext."""
        return self._transmit(names.SEND_SNAP_SYNC, entries)

    def send_status(self, body: bytes) -> Confirm:
        """For FullSyncContext. Few and small, so they pass a full window: a provider can always say that it is through."""
        return self._enqueue(self._log_link, "", names.STATUS, lambda _: body, len(body), wait=False)

    # ---- waiting

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until everything published before this call is settled.

        Args:
            timeout_s: Seconds to wait; None: as long as it takes.

        Raises:
            NoPrimary, WaitTimeout: Not settled in time; it is still being sent.
            LrqError: The first failure, since the last flush, of a publish whose Confirm nobody has asked for the result.
        """
        links = (self._log_link, self._own_link)
        with self._lock:
            marks = [link.window.assigned for link in links]
            late = [link for link, mark in zip(links, marks) if link.window.oldest <= mark]
            if late:
                self._wait(lambda: all(link.window.oldest > mark for link, mark in zip(links, marks)), timeout_s)
            late = [link for link, mark in zip(links, marks) if link.window.oldest <= mark]
            left = sum(len(link.window) for link in late)
        for link in late:
            raise self._no_primary(link) or WaitTimeout(f"{left} messages were not confirmed within {timeout_s} s")
        self._raise_unseen()

    def _raise_unseen(self) -> None:
        with self._lock:
            unseen = [confirm for confirm in self._failed if not confirm.observed]
            self._failed.clear()
        if unseen:
            _LOG.error("%d publishes failed since the last flush; the first: %s", len(unseen), unseen[0].error)
            unseen[0].result()

    def _wait(self, done: Callable[[], bool], timeout_s: float | None) -> None:
        """Waits for the I/O thread under the lock; not at all on the I/O thread itself, which cannot wait for itself."""
        if threading.current_thread() is self._thread:
            return
        self._waiting += 1
        try:
            self._lock.wait_for(done, timeout_s)
        finally:
            self._waiting -= 1

    def _no_primary(self, link: Link) -> NoPrimary | None:
        return None if link.state is State.READY else NoPrimary(link.vhost, link.answers)

    def _connect(self, timeout_s: float) -> None:
        link = self._log_link
        with self._lock:
            self._wait(lambda: link.state is State.READY or self._failure is not None, timeout_s)
            failure = self._failure or self._no_primary(link)
        if failure is not None:
            self._shut_down(failure)
            raise failure

    # ---- on the I/O thread

    def _run(self) -> None:
        failure: LrqError = PublisherClosed("The publisher is closed")
        try:
            self._loop.add_callback_threadsafe(self._log_link.start)
            with quiet_pika():
                self._loop.start()
        except BaseException as error:
            _LOG.exception("The publisher's I/O thread failed")
            failure = PublisherClosed(f"The publisher's I/O thread failed: {error!r}")
            failure.__cause__ = error
        finally:
            with self._lock:
                self._failure = self._failure or failure
            self._fail_all(None if isinstance(self._failure, PublisherClosed) else self._failure)

    def _ready(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def _settle(self, event: Callable[[], list[Settled[Outgoing]]]) -> bool:
        """Whoever finds a window settled, under the lock, finds its Confirms done. Callbacks, which may publish, run after that."""
        with self._lock:
            settled = event()
            to_call = [each.entry.item.confirm for each in settled if each.entry.item.confirm.settle(each.error)]
            self._failed.extend(each.entry.item.confirm for each in settled if each.error is not None)
            if self._waiting:
                self._lock.notify_all()
        for confirm in to_call:
            confirm.call_back()
        return bool(settled)

    def _fenced(self, error: FencedError) -> None:
        _LOG.error("%s", error)
        with self._lock:
            self._failure = error
        for link in (self._log_link, self._own_link):
            link.close(lambda: None)
        self._fail_all(error)

    def _fail_all(self, error: LrqError | None) -> None:
        links = (self._log_link, self._own_link)
        self._settle(lambda: [each for link in links for each in link.window.fail_all(error)])

    # ---- the end

    def close(self, timeout_s: float = 10.0) -> None:
        """Waits for what is unconfirmed, then ends the connections. A second call does nothing.

        Args:
            timeout_s: Seconds to wait for confirms; 0: do not.

        Raises:
            NoPrimary, WaitTimeout: Not all was confirmed in time. The publisher is closed all the same, and the Confirms of those
                messages fail with Unconfirmed.
            LrqError: As from `flush`.
        """
        if not self._thread.is_alive():
            return
        if self._full_syncs is not None:
            self._full_syncs.close()
        try:
            self.flush(timeout_s)
        finally:
            self._shut_down(PublisherClosed("The publisher is closed"))

    def _shut_down(self, why: LrqError) -> None:
        with self._lock:
            self._failure = self._failure or why
        links = [self._log_link, self._own_link]

        def logged_out() -> None:
            links.pop()
            if not links:
                self._loop.stop()

        def log_out() -> None:
            self._loop.call_later(LOGOUT_S, self._loop.stop)
            for link in tuple(links):
                link.close(logged_out)

        self._loop.add_callback_threadsafe(log_out)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except LrqError:
            if error is None:
                raise
            _LOG.exception("While closing the publisher after another exception")  # which must not be hidden


def _parameters(url: str, vhost: str, producer: str, heartbeat_s: int, login_timeout_s: float) -> pika.URLParameters:
    try:
        return parameters(url, vhost, producer, heartbeat_s, login_timeout_s)
    except ValueError as error:
        raise InvalidArgument("An address in nodes is not an amqp:// URL", todo=str(error)) from None


def _with_id(properties: pika.BasicProperties | None, replication_id: str) -> pika.BasicProperties:
    if properties is None:
        return pika.BasicProperties(delivery_mode=PERSISTENT, headers={messages.ID_HEADER: replication_id})
    found = copy.copy(properties)
    found.headers = {**(properties.headers or {}), messages.ID_HEADER: replication_id}
    if found.delivery_mode is None:
        found.delivery_mode = PERSISTENT
    return found
