"""The sync publisher, on pika: any thread publishes, one I/O thread of its own talks to the brokers.

Rules:

 - `publish` gives the replication ID, puts the message in the window and wakes the I/O thread: it waits only for room.
 - Publishes that wait for room in a window form a queue (`_turns`): small messages never overtake a large one. The thread that makes room sends
   the queued messages, so that a later publish need not wait for those threads to wake up. A caller that cannot wait (the I/O thread, in a callback)
   or need not (statuses) bypasses the queue.
 - One lock guards both windows. Confirms are settled under it, so that a thread that finds a window settled finds its Confirms done; callbacks
   run after that, on the I/O thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import pika
from pika.adapters.select_connection import IOLoop

from lrq_ha.errors import LrqError
from lrq_ha.publisher.confirm import Confirm
from lrq_ha.publisher.core import LOGOUT_S, BasePublisher, Draft, Lane
from lrq_ha.publisher.errors import FencedError, InvalidArgument, PublisherClosed, anew
from lrq_ha.publisher.library_logging import quiet
from lrq_ha.publisher.messages import VHOST, Addressed, LogEntries, checked_producer
from lrq_ha.publisher.numbered import Message, NumberedProducer
from lrq_ha.publisher.provider import LOOK_S, FullSyncs, Provider
from lrq_ha.publisher.sync_link import Handlers, Link, State, parameters
from lrq_ha.publisher.transaction import Transaction
from lrq_ha.publisher.window import NumberedWindow, Settled, Window
from lrq_ha.publisher.wire import Outgoing
from lrq_ha.routing import names

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Turn:
    """A publish that waits for room. `outcome` is the draft's result when its turn has come: a Confirm, or the error."""

    draft: Draft[Confirm]
    come: threading.Condition
    outcome: Confirm | Exception | None = None


class Publisher(BasePublisher[Confirm]):
    """Publishes to the node of a group that is primary, each message once, in order, across failovers. Any thread may use it.

    It is connected when the constructor returns, which raises NoPrimary if no node takes it within `connect_timeout_s`.
    """

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0  # threads in self._changed.wait: settling notifies only if there are any
        self._turns: dict[Lane[Confirm], deque[_Turn]] = {lane: deque() for lane in self._lanes}
        self._full_syncs: FullSyncs | None = None
        self._numbered: dict[str, NumberedProducer] = {}
        self._loop: Any = IOLoop()
        self._links = {
            self._log: self._new_link(self._log, [self._log.window, self._own.window], self._fenced),
            self._own: self._new_link(self._own, [self._own.window], self._fenced),
        }
        self._thread = threading.Thread(target=self._run, name=f"lrq-publisher-{self.producer}", daemon=True)
        self._thread.start()
        self._connect()

    def _new_link(self, lane: Lane[Confirm], learn: Sequence[Window[Outgoing[Confirm]]], fenced: Callable[[FencedError], None]) -> Link:
        vhost = lane.addresses.vhost
        nodes = [parameters(url, vhost, lane.properties, self._heartbeat_s, self._login_timeout_s, self._tls) for url in self._nodes]
        settle = partial(self._settle_in_order, lane) if lane.ascending else self._settle
        handlers = Handlers(self._ready, settle, fenced)
        return Link(self._loop, self._lock, lane, nodes, learn, self._login_timeout_s, self._confirm_timeout_s, handlers)

    def _new_confirm(self, replication_id: str, explain: Callable[[], LrqError | None]) -> Confirm:
        return Confirm(replication_id, explain)

    # ---- publishing

    def publish(
        self, exchange: str, routing_key: str, body: bytes, properties: pika.BasicProperties | None = None, *, mandatory: bool = True
    ) -> Confirm:
        """Publishes to an exchange of the client's vhost. Waits only while the window is full.

        Args:
            exchange: Name; "" is the default exchange.
            routing_key: At most 255 bytes.
            body: At most `message_bytes_max` bytes.
            properties: Passed on with the header x-lrq-id added, persistent unless they say otherwise. They are not changed.
            mandatory: A message without a route fails. With False it is confirmed and dropped; only then may it have local completion.

        Raises:
            InvalidArgument, MessageTooLarge: Nothing was sent.
            WindowFull, NoPrimary: No room within `publish_timeout_s`. Nothing was sent.
            FencedError, PublisherClosed: This publisher cannot send any more.
        """
        return self._put(self._draft_publish(exchange, routing_key, body, properties, mandatory))

    def transmit_log_entry_message(self, payload: bytes, destinations: Sequence[str], path: Sequence[str] = ()) -> Confirm:
        """Sends one log entry to each destination site (remote_ids). Waits and raises as `publish` does.

        Args:
            path: The groups that the entry has passed before this one (`Update.path` of a receiver): none of them takes it again.
        """
        return self.transmit_log_entry_messages([(payload, destinations)], path)

    def transmit_log_entry_messages(self, entries: Sequence[Addressed], path: Sequence[str] = ()) -> Confirm:
        """Sends (payload, destinations) pairs as one transaction: a destination gets its part of it whole, or not at all. Equal
        payloads are stored once. Waits and raises as `publish` does; `path` as in `transmit_log_entry_message`."""
        return self._transmit(names.SEND_LOG_ENTRIES, LogEntries.checked(entries, path))

    @contextmanager
    def transaction(self) -> Iterator[Transaction[Confirm]]:
        """`with publisher.transaction() as tx: tx.transmit_log_entry_message(…)`: sent at the end of the block, its result is
        `tx.confirm`; an exception in the block discards it."""
        transaction: Transaction[Confirm] = Transaction()
        with transaction.collecting():
            yield transaction
        entries = transaction.entries
        if entries is not None:
            transaction.sent(self._transmit(names.SEND_LOG_ENTRIES, entries))

    def _transmit(self, queue: str, entries: LogEntries) -> Confirm:
        draft = self._draft_entries(queue, entries)
        self._announce(False)
        return self._put(draft)

    def _put(self, draft: Draft[Confirm]) -> Confirm:
        with self._lock:
            has_room = self._has_room(draft)
            if has_room and not self._turns[draft.lane]:
                return self._send(draft)
            if threading.current_thread() is not self._thread:
                return self._send_in_turn(draft)
            if not has_room:
                raise self._no_room(draft)
            return self._send(draft)

    def _send_in_turn(self, draft: Draft[Confirm]) -> Confirm:
        turn, turns = _Turn(draft, threading.Condition(self._lock)), self._turns[draft.lane]
        try:
            turns.append(turn)  # within the try: the next statement may raise KeyboardInterrupt
            outcome = turn.come.wait_for(lambda: turn.outcome, self._publish_timeout_s)
            if outcome is None:
                raise self._no_room(draft)
        finally:
            if turn.outcome is None:
                turns.remove(turn)
                self._next(turns)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _next(self, turns: deque[_Turn]) -> None:
        """Sends queued messages as far as there is room, on the calling thread. Under the lock."""
        while turns and self._has_room(turns[0].draft):
            turn = turns.popleft()
            try:
                turn.outcome = self._send(turn.draft)
            except Exception as error:
                turn.outcome = error
            turn.come.notify()

    def _send(self, draft: Draft[Confirm]) -> Confirm:
        """Under the lock."""
        confirm = self._take(draft)
        link = self._links[draft.lane]
        if link.state is State.IDLE:
            self._loop.add_callback_threadsafe(link.start)
        else:
            link.wake()
        return confirm

    def open_producer(self, name: str, sent: int, *, log_entries: bool = True, ascending: bool = False) -> NumberedProducer:
        """Opens a further producer, whose messages have their numbers from the caller. A second call for a name gives that producer.

        The connection of this producer is separate from that of the publisher's other log entries: no order holds between the two.

        Args:
            name: The producer, as in the constructor.
            sent: The highest number that any process may have sent under this name, as the caller has kept it; 0: none.
            log_entries: Whether it transmits log entries, and publishes no messages. Otherwise the reverse, to the vhost of `publish`.
            ascending: Whether numbers that are skipped are never used: they cost nothing, and their use would be taken for a repeat. The first
                message that is refused ends such a producer, with the messages behind it unsent or unconfirmed.

        Raises:
            InvalidArgument: The name, or log entries without a `client_name` of this publisher.
            PublisherClosed, FencedError: This publisher cannot send any more.
        """
        checked_producer(name)
        if log_entries:
            self._require_client_name("Log entries")
        self._check_process()
        window = NumberedWindow[Outgoing[Confirm]](name, *self._window_limits, sent)
        with self._lock:
            if self._failure is not None:
                raise anew(self._failure)
            found = self._numbered.get(name)
            if found is None or found.fenced:
                lane = self._new_lane(VHOST if log_entries else self._own.addresses.vhost, window, ascending=ascending)
                found = self._numbered[name] = NumberedProducer(lane, window, self._put_numbered, self._put_message, lambda: self._failure)
                self._turns[lane] = deque()
                self._links[lane] = self._new_link(lane, [window], lambda error: self._lane_fenced(lane, error))
                self._lanes = (*self._lanes, lane)
                self._loop.add_callback_threadsafe(self._links[lane].start)
            found.window.expect(sent)
        return found

    def _put_numbered(self, lane: Lane[Confirm], number: int, entries: LogEntries) -> Confirm:
        draft = self._draft_entries(names.SEND_LOG_ENTRIES, entries)
        self._announce(False)
        return self._put(replace(draft, lane=lane, number=number))

    def _put_message(self, lane: Lane[Confirm], number: int, message: Message) -> Confirm:
        draft = self._draft_publish(message.exchange, message.routing_key, message.body, message.properties, True)
        return self._put(replace(draft, lane=lane, number=number))

    # ---- full syncs

    def on_full_sync(self, provider: Provider) -> None:
        """Calls `provider(request, context)`, in a thread of its own, for every full sync that a destination requests from this client
        from now on; earlier requests are made again. It must end with `context.complete()` (or `cancel()`).
        """
        self._require_client_name("Full syncs")
        self._check_process()
        if self._full_syncs is not None:
            raise InvalidArgument("There is a full sync provider already", todo="One provider per publisher")
        syncs = self._full_syncs = FullSyncs(
            self.client_name, provider, lambda entries: self._transmit(names.SEND_SNAP_SYNC, entries), self._send_status
        )
        self._announce(True)

        def begin() -> None:
            self._links[self._log].consume(names.STATUS, syncs.replay, syncs.status)
            tick()

        def tick() -> None:
            syncs.tick()
            self._loop.call_later(LOOK_S / 4, tick)

        self._loop.add_callback_threadsafe(begin)

    def request_full_sync(self, destination: str, reason: str = "") -> Confirm:
        """Asks this client's provider, in whatever process it is, for a full sync to a destination site. Deltas go on meanwhile.

        A full sync that is under way for this destination gives way to this one. A site that is away gets it when it is back.

        Args:
            destination: The site's remote_id.
            reason: Words for the provider and for operators, at most 250 characters.

        Returns:
            The request's Confirm. The request is in the log then; it is not served yet.

        Raises:
            InvalidArgument: An argument is not valid, or the publisher has no `client_name`.
            PublisherClosed, FencedError: This publisher cannot send any more.
        """
        draft = self._draft_request(destination, reason)
        with self._lock:
            return self._send(draft)

    def _announce(self, provides: bool) -> None:
        with self._lock:  # from the decision on: the last announcement counts
            draft = self._announcement(provides)
            if draft is not None:
                self._send(draft)

    def _send_status(self, body: bytes) -> Confirm:
        """Statuses are few and small, so they pass a full window: a provider can always report its end."""
        draft = self._draft_status(body)
        with self._lock:
            return self._send(draft)

    # ---- waiting

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until everything published before this call is settled.

        Args:
            timeout_s: Seconds to wait; None: as long as it takes.

        Raises:
            NoPrimary, WaitTimeout: Not settled in time; it is still being sent.
            LrqError: The first failure, since the last flush, of a publish whose Confirm was not asked for the result.
        """
        self._check_process()
        with self._lock:
            marks = self._marks()
            if self._behind(marks):
                self._wait(lambda: not self._behind(marks), timeout_s)
            late = self._behind(marks)
            if late:
                raise self._not_flushed(late, timeout_s)
            unseen = self._unseen_failure()
        if unseen is not None:
            raise anew(unseen)

    def _wait(self, done: Callable[[], bool], timeout_s: float | None) -> None:
        """Waits for the I/O thread under the lock; not at all on the I/O thread itself."""
        if threading.current_thread() is self._thread:
            return
        self._waiting += 1
        try:
            self._changed.wait_for(done, timeout_s)
        finally:
            self._waiting -= 1

    def _connect(self) -> None:
        try:
            with self._lock:
                self._wait(lambda: self._log.ready or self._failure is not None, self._connect_timeout_s)
                failure = self._failure or self._log.no_primary()
        except BaseException:  # KeyboardInterrupt: the caller never gets this publisher to close it
            self._shut_down(PublisherClosed("The publisher was not connected"))
            raise
        if failure is not None:
            self._shut_down(failure)
            raise failure

    # ---- on the I/O thread

    def _run(self) -> None:
        failure: LrqError = PublisherClosed("The publisher is closed")
        try:
            self._loop.add_callback_threadsafe(self._links[self._log].start)
            with quiet():
                self._loop.start()
        except BaseException as error:
            _LOG.exception("The publisher's I/O thread failed")
            failure = PublisherClosed(f"The publisher's I/O thread failed: {error!r}")
            failure.__cause__ = error
        finally:
            with self._lock:
                failure = self._failure = self._failure or failure
            self._loop.close()
            self._settle(lambda: self._fail_all(None if isinstance(failure, PublisherClosed) else failure))

    def _ready(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _settle(self, event: Callable[[], list[Settled[Outgoing[Confirm]]]]) -> bool:
        with self._lock:
            settled = event()
            to_call = self._settled(settled)
            if self._waiting:
                self._changed.notify_all()
            for turns in self._turns.values():
                self._next(turns)
        for confirm in to_call:
            confirm.call_back()
        return bool(settled)

    def _settle_in_order(self, lane: Lane[Confirm], event: Callable[[], list[Settled[Outgoing[Confirm]]]]) -> bool:
        """As `_settle`; the first refusal ends the lane before a later message is sent, which would make the refused number known."""

        def ending() -> list[Settled[Outgoing[Confirm]]]:
            settled = event()
            refused = next((each.error for each in settled if each.error is not None), None)
            if refused is not None:
                lane.failure = refused
                settled += lane.window.fail_all(refused)
            return settled

        return self._settle(ending)

    def _fenced(self, error: FencedError) -> None:
        _LOG.error("%s", error)
        with self._lock:
            self._failure = error
        for link in list(self._links.values()):
            link.close(lambda: None)
        self._settle(lambda: self._fail_all(error))

    def _lane_fenced(self, lane: Lane[Confirm], error: FencedError) -> None:
        """Only this lane's producer is in use elsewhere: the others go on."""
        _LOG.error("%s", error)
        with self._lock:
            lane.failure = error
        self._links[lane].close(lambda: None)
        self._settle(lambda: lane.window.fail_all(error))

    # ---- the end

    def close(self, timeout_s: float = 10.0) -> None:
        """Waits for unconfirmed messages, then ends the connections. A second call does nothing.

        Args:
            timeout_s: Seconds to wait for confirms; 0: do not.

        Raises:
            NoPrimary, WaitTimeout: Not all was confirmed in time. The publisher is still closed, and the Confirms of those
                messages fail with Unconfirmed.
            LrqError: As from `flush`.
        """
        if not self._thread.is_alive():
            return
        try:
            if self._full_syncs is not None:
                self._full_syncs.close()
            self.flush(timeout_s)
        finally:
            self._shut_down(PublisherClosed("The publisher is closed"))

    def _shut_down(self, why: LrqError) -> None:
        with self._lock:
            self._failure = self._failure or why
            for turns in self._turns.values():
                self._next(turns)  # queued publishes get their error now
        links = list(self._links.values())

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except LrqError:
            if error is None:
                raise
            _LOG.exception("While closing the publisher after another exception")  # it must not be hidden
