"""When reading from either side of a client's connection stops, and when a side that is read from has been silent for too long.

Rules:
- Reading from a side stops while the other side, or the log, does not keep up, and goes on when nothing is against it any more.
- While the broker owes the client an answer before which nothing more is taken from it, the broker is read from though the client reads nothing: it
  may be writing. So it is while others wait for the broker's answers to what the client has published: those who declare, and the log. What stands
  before such an answer is bounded, too: whose client then goes on reading nothing is given up.
- A side that is not read from is not silent: what it said nobody has heard.
"""

from __future__ import annotations

import logging

from ..amqp.frames import HEARTBEAT_FRAME
from ..amqp.reply_codes import CONNECTION_FORCED
from .session import ClientSession

log = logging.getLogger("lrq_ha.door")

RESUME_SHARE = 0.5  # reading goes on when what held it up has fallen below this share of its limit
DEAF_SHARE = 2  # of the limit on what is on its way to a client; from 1 on, nothing is read from the broker for it
ANSWER_SHARE = 16  # of it, while the broker owes an answer: far more than all sockets between hold; from there on, nothing is read for that either
ACKS_SHARE = 5  # of the limit on what is not safe yet: so much, a client may acknowledge that publishes nothing


class FlowControl:
    """See above. `heartbeat_s`: what was agreed on; 0 for none.

    Attributes:
        client_heard_at, broker_heard_at: When something came from there last, or could come again (the door's clock).
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
        self._client_full = False  # nothing is read from the broker meanwhile, but for an answer
        self._full_since = 0.0
        self._unread = 0  # what was on its way to a client that is full at the last look, and when it was last seen to have read, or asked for more
        self._read_at = 0.0
        self._fetched = 0  # about how much was read from the broker for a client that is full
        self._held_up = False  # nothing is read from either side until interceptors have caught up
        self._stopping = False  # nothing more is read from the client until what is under way is confirmed
        self._asking = False  # the broker owes the client an answer before which nothing more is taken from it

    def consider_pausing(self) -> None:
        """Whether the client is read from on the grounds of what waits: for the log, for the broker, for backups, for the client itself."""
        session = self._session
        limit = session.door.config.connection_buffer_bytes_max
        too_much = session.replica.progress.unsafe_bytes / session.door.buffered_bytes_max
        if (too_much > 1.0 and (session.unanswered or session.pending_safe or too_much > ACKS_SHARE)) or session.outbox.waiting_bytes > limit:
            self.pause_client()
            session.replica.progress.waiting_safe.add(session)
        elif session.held_bytes > session.door.config.client_buffer_bytes_max or self._deaf or self._repeats_too_much:
            self.pause_client()
        elif self._client_paused and session.outbox.waiting_bytes < limit * RESUME_SHARE:
            self.resume_client()

    @property
    def _deaf(self) -> bool:
        """The client does not read what the door itself answers, or that waits for the end of a content: so nothing is taken that has an answer."""
        waiting = max(self.unread_bytes - self._fetched, self._session.from_broker.passing.behind_bytes)
        return waiting > DEAF_SHARE * self._session.door.config.client_buffer_bytes_max

    @property
    def _is_awaited(self) -> bool:
        """Whether the client, or others, wait for an answer of the broker on this connection."""
        return self._asking or (self._session.unanswered and (self._session.replica.barrier.is_up or self._holds_log))

    @property
    def _holds_log(self) -> bool:
        """The log may lose what follows on the oldest publish that the broker has not answered here."""
        progress = self._session.replica.progress
        return self._session.oldest_unanswered == progress.tracker.applied + 1 and progress.lies_far_back()

    @property
    def _buried(self) -> bool:
        """That answer stands behind more than is kept for a client that does not read."""
        return self.unread_bytes > ANSWER_SHARE * self._session.door.config.client_buffer_bytes_max and self._is_awaited

    @property
    def unread_bytes(self) -> int:
        """What is on its way to a client that is full."""
        client = self._session.client
        if not self._client_full or client is None or client.is_closing():
            return 0
        return client.get_write_buffer_size() + self._session.from_broker.passing.behind_bytes

    @property
    def _repeats_too_much(self) -> bool:
        """Of what waits here for its confirm, repeats cost the log nothing, so nothing else bounds them."""
        session = self._session
        return len(session.pending_safe) + len(session.pending_durable) + session.repeats.waiting > session.door.config.questions_max

    def pause_client(self) -> None:
        """Reads nothing more from the client."""
        if self._session.client is not None and not self._client_paused:
            self._client_paused = True
            self._session.client.pause_reading()

    def resume_client(self) -> None:
        """Reads from the client again, if nothing else is against it."""
        session = self._session
        if session.client is not None and self._client_paused and not session.from_client.stalled and not self._stopping and not self._held_up:
            self._client_paused = False
            self.client_heard_at = session.door.now()
            session.client.resume_reading()

    def consider_broker(self) -> None:
        """Whether the broker is read from, on the grounds of what waits: for the client, for the log, for interceptors."""
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
        """Something came from the broker, and the client was given what is for it."""
        self.broker_heard_at = self._session.door.now()
        if self._client_full:
            self._fetched += max(0, self.unread_bytes - self._unread)
            self._look_at_client()

    def _look_at_client(self) -> None:
        """How much is on its way to a client that is full now; and whether it has read of that."""
        session = self._session
        unread = self.unread_bytes
        if unread < self._unread:
            self._read_at = session.door.now()
        self._unread = unread
        session.door.client_full(session, unread)
        self.consider_broker()

    def stop(self) -> None:
        """Reads nothing more from the client before `go_on`."""
        self._stopping = True
        self.pause_client()

    def go_on(self) -> None:
        """What was under way is confirmed: the client's answer to the end is read."""
        self._stopping = False
        self.resume_client()

    def client_gone(self) -> None:
        """Nobody reads what the broker sends, but its answers are still needed."""
        session = self._session
        self._client_full = False
        session.replica.barrier.changed.discard(self.consider_broker)
        session.door.client_full(session, 0)
        if not session.closed and not session.broker.is_closing():
            session.broker.resume_reading()

    def client_full(self, full: bool) -> None:
        """The client does not read as fast as the broker sends: stop reading from the broker."""
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
        """Nothing is taken from the client before the broker has answered, or no longer."""
        self._asking = asking
        if self._client_full:
            self._read_at = self._session.door.now()
            self.consider_broker()

    def hold_up(self, held: bool) -> None:
        """An interceptor that must be told everything is behind (or no longer): nothing more is read from either side."""
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
        """Whether the broker may have sent deliveries that have not been looked at, or are not."""
        return self._client_full or self._held_up or bool(self._session.from_broker.withheld) or not self._session.takes_deliveries

    def _what_waits(self, now: float) -> str:
        """What has waited for too long for an answer of the broker that this client has buried; empty if nothing has.

        A declaration, another's or its own, for which everybody waits; or the log, which must not lose what is not known to be applied. Or the client
        itself, unless it goes on reading; where it waits for the answer to a declaration, it has no time to: everybody waits.
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
        """Once a second: a broker that waits for entries to be safe must not take the client for dead; who is silent for too long is given up.

        So is a client whose broker's confirms and answers are not read any more as it reads nothing itself, when others wait for them, or it does.
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
