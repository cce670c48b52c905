"""Stops and resumes reading from either side of a client's connection, and detects a side that has been silent for too long.

Rules:
- Reading from a side stops while the other side, or the log, does not keep up. Reading resumes when no reason against it is left.
- While the broker owes an answer before which the door takes nothing more from the client, the door reads from the broker even if the client reads
  nothing: the broker may be writing. That also holds while others wait for the broker's answers to this client's publishes: declaring clients, and
  the log. The data in front of such an answer is bounded: a client that still reads nothing at that bound is closed.
- A side that the door does not read from is not silent: its frames are unread.
"""

from __future__ import annotations

import logging

from ..amqp.frames import HEARTBEAT_FRAME
from ..amqp.reply_codes import CONNECTION_FORCED
from .session import ClientSession

log = logging.getLogger("lrq_ha.door")

RESUME_SHARE = 0.5  # reading resumes when the amount that stopped it has fallen below this share of its limit
DEAF_SHARE = 2  # of the limit on bytes on their way to a client; from 1 on, the door reads nothing from the broker for that client
ANSWER_SHARE = 16  # of that limit, while the broker owes an answer: far more than all sockets between hold; beyond it, the door stops reading
ACKS_SHARE = 5  # of the limit on bytes that are not safe yet: a client that publishes nothing may acknowledge up to this


class FlowControl:
    """Decides for one connection when each side is read. `heartbeat_s`: the agreed interval; 0 for none.

    Attributes:
        client_heard_at, broker_heard_at: When data last came from that side, or reading from it resumed (seconds of the door's clock).
    """

    __slots__ = (
        "_asking",
        "_client_full",
        "_client_paused",
        "_fetched",
        "_full_since",
        "_heartbeat_s",
        "_held_up",
        "_read_at",
        "_session",
        "_stopping",
        "_unread",
        "broker_heard_at",
        "client_heard_at",
    )

    def __init__(self, session: ClientSession, heartbeat_s: int) -> None:
        self._session = session
        self._heartbeat_s = heartbeat_s
        self.client_heard_at = self.broker_heard_at = session.door.now()
        self._client_paused = False
        self._client_full = False  # the door then reads nothing from the broker, except for an answer
        self._full_since = 0.0
        self._unread = 0  # bytes on their way to a full client at the last look
        self._read_at = 0.0  # when a full client was last seen to have read, or to have asked for more
        self._fetched = 0  # roughly the bytes that were read from the broker for a full client
        self._held_up = False  # interceptors have to catch up before either side is read
        self._stopping = False  # pending publishes must be confirmed before the client is read again
        self._asking = False  # the broker owes the client an answer before which the door takes nothing more from the client

    def consider_pausing(self) -> None:
        """Stops or resumes reading from the client, by the bytes that wait for the log, the broker, the backups or the client itself."""
        session = self._session
        limit = session.door.config.connection_buffer_bytes_max
        too_much = session.replica.progress.unsafe_bytes / session.door.buffered_bytes_max
        unsafe = too_much > 1.0 and (session.unanswered or session.pending_safe or too_much > ACKS_SHARE)
        if unsafe or session.outbox.waiting_bytes > limit:
            self.pause_client()
            session.replica.progress.waiting_safe.add(session)
        elif self._outruns_views:
            self.pause_client()
            session.replica.progress.waiting_room.add(self.consider_pausing)
        elif session.held_bytes > session.door.config.client_buffer_bytes_max or self._deaf or self._repeats_too_much:
            self.pause_client()
        elif self._client_paused and session.outbox.waiting_bytes < limit * RESUME_SHARE:
            self.resume_client()

    @property
    def _outruns_views(self) -> bool:
        """Whether the client's transactions are safe, and come faster than the broker takes them into the routing queues."""
        session = self._session
        replica = session.replica
        return session.feeds_views and replica.to_apply_bytes > session.door.buffered_bytes_max and replica.active

    @property
    def _deaf(self) -> bool:
        """Whether the client leaves too much unread, of the door's answers or behind a content: then no request that needs an answer is taken."""
        waiting = max(self.unread_bytes - self._fetched, self._session.from_broker.passing.behind_bytes)
        return waiting > DEAF_SHARE * self._session.door.config.client_buffer_bytes_max

    @property
    def _is_awaited(self) -> bool:
        """Whether the client, or others, wait for an answer of the broker on this connection."""
        return self._asking or (self._session.unanswered and (self._session.replica.barrier.is_up or self._holds_log))

    @property
    def _holds_log(self) -> bool:
        """Whether the log may soon lose entries behind the oldest publish that the broker has not answered here."""
        progress = self._session.replica.progress
        return self._session.oldest_unanswered == progress.tracker.applied + 1 and progress.lies_far_back()

    @property
    def _buried(self) -> bool:
        """Whether an awaited answer stands behind more bytes than are kept for a client that does not read."""
        return self.unread_bytes > ANSWER_SHARE * self._session.door.config.client_buffer_bytes_max and self._is_awaited

    @property
    def unread_bytes(self) -> int:
        """Bytes on their way to a full client; 0 if the client is not full."""
        client = self._session.client
        if not self._client_full or client is None or client.is_closing():
            return 0
        return client.get_write_buffer_size() + self._session.from_broker.passing.behind_bytes

    @property
    def _repeats_too_much(self) -> bool:
        """Whether too many repeats wait here for their confirm: repeats cost the log nothing, so no other limit bounds them."""
        session = self._session
        return len(session.pending_safe) + len(session.pending_durable) + session.repeats.waiting > session.door.config.questions_max

    def pause_client(self) -> None:
        """Stops reading from the client."""
        if self._session.client is not None and not self._client_paused:
            self._client_paused = True
            self._session.client.pause_reading()

    def resume_client(self) -> None:
        """Resumes reading from the client, if no other reason is against it."""
        session = self._session
        if session.client is not None and self._client_paused and not session.from_client.stalled and not self._stopping and not self._held_up:
            self._client_paused = False
            self.client_heard_at = session.door.now()
            session.client.resume_reading()

    def consider_broker(self) -> None:
        """Stops or resumes reading from the broker, by the bytes that wait for the client, the log or interceptors."""
        session = self._session
        if session.broker.is_closing():
            return
        if self.listens:
            self.broker_heard_at = session.door.now()
            session.broker.resume_reading()
        else:
            session.broker.pause_reading()

    @property
    def listens(self) -> bool:
        """Whether the broker is read from."""
        if self._held_up or self._session.from_broker.withholds_too_much:
            return False
        return not self._client_full or (self._is_awaited and not self._buried)

    def broker_heard(self) -> None:
        """Takes note of data from the broker, after the client's part of the data was passed on."""
        self.broker_heard_at = self._session.door.now()
        if self._client_full:
            self._fetched += max(0, self.unread_bytes - self._unread)
            self._look_at_client()

    def _look_at_client(self) -> None:
        """Measures the bytes on their way to a full client, and notes whether the client has read some."""
        session = self._session
        unread = self.unread_bytes
        if unread < self._unread:
            self._read_at = session.door.now()
        self._unread = unread
        session.door.client_full(session, unread)
        self.consider_broker()

    def stop(self) -> None:
        """Stops reading from the client until `go_on`."""
        self._stopping = True
        self.pause_client()

    def go_on(self) -> None:
        """Pending publishes are confirmed: the client's answer to the close is read."""
        self._stopping = False
        self.resume_client()

    def client_gone(self) -> None:
        """The client is gone. The broker is still read, as its answers are needed."""
        session = self._session
        self._client_full = False
        session.replica.barrier.changed.discard(self.consider_broker)
        session.door.client_full(session, 0)
        if not session.closed and not session.broker.is_closing():
            session.broker.resume_reading()

    def client_full(self, full: bool) -> None:
        """The client reads more slowly than the broker sends, or has caught up: stops or resumes reading from the broker."""
        session = self._session
        if session.closed or session.client is None:
            return
        self._client_full = full
        (session.replica.barrier.changed.add if full else session.replica.barrier.changed.discard)(self.consider_broker)
        self._fetched = 0
        self._full_since = self._read_at = session.door.now()
        self._unread = self.unread_bytes
        session.door.client_full(session, self._unread)
        self.consider_broker()
        self.consider_pausing()

    def asks(self, asking: bool) -> None:
        """Takes note that the door takes nothing from the client before the broker has answered, or takes frames again."""
        self._asking = asking
        if self._client_full:
            self._read_at = self._session.door.now()
            self.consider_broker()

    def hold_up(self, held: bool) -> None:
        """Stops reading from both sides while an interceptor that must see every event is behind; resumes after that."""
        if held == self._held_up or self._session.closed:
            return
        self._held_up = held
        self.consider_broker()
        if held:
            self.pause_client()
        else:
            self.consider_pausing()

    @property
    def reads_late(self) -> bool:
        """Whether deliveries may be on their way that the door has not looked at, or does not look at."""
        return self._client_full or self._held_up or bool(self._session.from_broker.withheld) or not self._session.takes_deliveries

    def _what_waits(self, now: float) -> str:
        """Names the waiting party for which this client has buried an answer of the broker too long; empty if there is none.

        The party is a declaration, of this client or another, for which all clients wait; or the log, which must keep entries that are not known to
        be applied; or the client itself, unless it goes on reading. A client that waits for its own declaration gets no such time: all clients wait.
        """
        if not (self._client_full and self._buried):
            return ""
        session = self._session
        limit_s = session.door.config.hold_up_timeout_s
        if session.replies:
            return "a declaration of its own"
        if now - self._full_since >= limit_s and session.unanswered:
            if session.replica.barrier.is_up:
                return "a declaration"
            if self._holds_log:
                return "the log"
        return "the answer that it waits for itself" if self._asking and now - self._read_at >= limit_s else ""

    def tick(self, now: float) -> None:
        """Once a second: sends heartbeats to the broker while entries wait to be safe, and closes a side that has been silent for too long.

        A client that reads nothing is closed when others, or the client itself, have waited too long for answers of the broker behind its data.
        """
        session = self._session
        if session.closed:
            return
        if self._client_full:
            self._look_at_client()
        waits = self._what_waits(now)
        if waits:
            log.warning("a client of %s that does not read holds up %s, and is closed: door.hold_up_timeout_s", session.user, waits)
            session.door.counters["closed_slow"] += 1
            session.cut_off()
            return
        if not self._heartbeat_s:
            return
        if session.client is not None and not self._client_paused and now - self.client_heard_at > 2 * self._heartbeat_s + 1:
            log.info("a client of %s sent nothing for %d s", session.user, 2 * self._heartbeat_s)
            session.client.abort()
            return
        listens = not (self._client_full or self._held_up or session.from_broker.withheld)
        if listens and now - self.broker_heard_at > 2 * self._heartbeat_s + 1:
            log.warning("the broker sent nothing for %d s on a connection of %s", 2 * self._heartbeat_s, session.user)
            session.close_client(CONNECTION_FORCED, "the broker beside this sidecar is silent")
            session.broker.abort()
            session.close()
            return
        if self._held_up or session.from_broker.withholds_too_much:
            session.to_client(HEARTBEAT_FRAME)  # the broker's are not read meanwhile
        if now - session.outbox.sent_at >= self._heartbeat_s / 2:
            session.outbox.write(HEARTBEAT_FRAME)
