"""The state that a door's connections share: limits, counters, the clock, alarms, and the list of clients.

Rules:
- A producer that connects again ends its older connection: nothing more is appended from the older one.
- The configuration sets the limits. A connection that exceeds a limit of its own is closed. A total limit closes the connection that has been
  behind longest.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from lrq_ha.interceptors.plugins import Interceptors
from lrq_ha.replication.queues import QueueKey

from ..amqp.content_assembly import Budget
from ..amqp.default_queue_type import DefaultTypes
from ..amqp.vhosts import VhostConnections
from ..log.messages import Delivery
from .channel import ClientChannel
from .interfaces import AlarmState, ReadControl
from .settings import DoorLimits, DoorSettings

log = logging.getLogger("lrq_ha.door")


class Client(Protocol):
    """A client's session, as the door's state knows it (`session.ClientSession`)."""

    user: str
    producer: str
    producer_key: str
    instance: str
    channels: dict[int, ClientChannel]
    alarm: AlarmState
    flow: ReadControl

    def forget_decisions(self) -> None: ...
    def exchange_changed(self, vhost: str, exchange: str) -> None: ...
    def give_confirms(self) -> None: ...
    def release_acks(self) -> None: ...
    def fence(self, reason: str) -> None: ...
    def cut_off(self) -> None: ...


class Reader(Protocol):
    """A client that may not keep up: a session, or one that is relayed."""

    user: str

    def cut_off(self) -> None: ...


S = TypeVar("S", bound=Client)


class DoorState(ABC, Generic[S]):
    """The state of one door; `door.server.Door` adds the listening.

    Attributes:
        config: The table `[door]` of the configuration.
        counters: Events since the process began, for `/status`.
        sessions: Clients that are logged in.
        unfinished: Messages of which a part has arrived, and open transactions, of all connections.
        buffered_bytes_max: Memory for publishes that are not safe yet; beyond it, the door stops reading from publishers.
        completes_locally: Whether publishes to a queue, by its name, are confirmed when the own stream has them.
        default_types: The type of queues whose declarations name none.
        vhosts: Connections to the own broker, by vhost.
        blocked: Clients from whose connections the broker takes no publishes.
        log_blocked: Why the broker takes nothing for the log; empty if it takes entries.
        draining: Why the door gives out no deliveries (`door.drain`); empty if it does.
        interceptors: The interceptors that the configuration names.
    """

    def __init__(self, settings: DoorSettings) -> None:
        self.config = settings.limits
        self._log_quarter_bytes = settings.log_quarter_bytes
        self.group = settings.group
        self.sites = settings.sites
        self.buffered_bytes_max = min(self.config.buffered_bytes_max, self._log_quarter_bytes)
        self.completes_locally = settings.completes_locally
        self.default_types = DefaultTypes(settings.broker)
        self.vhosts = VhostConnections(settings.broker)
        self.counters: Counter[str] = Counter()
        self.sessions: set[S] = set()
        self._producers: dict[tuple[str, str], set[S]] = {}  # sessions that have announced a producer, by user and name
        self.unfinished = Budget(self.config.unfinished_bytes_max, "door.unfinished_bytes_max")
        self._full: dict[Reader, int] = {}  # bytes that wait for each client that does not keep up; the one that is behind longest comes first
        self._lost_said_at = 0.0
        self.blocked: set[S] = set()
        self.log_blocked = ""
        self.draining = ""
        self.interceptors = Interceptors(settings.interceptors)
        self._now = 0.0

    def take_limits(self, limits: DoorLimits) -> None:
        """Goes on with a changed table `[door]`. Buffers, frames and headers of connections that are open keep their limits."""
        self.config = limits
        self.buffered_bytes_max = min(limits.buffered_bytes_max, self._log_quarter_bytes)
        self.unfinished.limit = limits.unfinished_bytes_max

    def now(self) -> float:
        """Seconds that this process has run, as of the last tick (one second coarse, but free)."""
        return self._now

    # ---- clients -----------------------------------------------------------------------------------------------------

    def session_opened(self, session: S) -> None:
        """A client has logged in. A producer has one connection: with two, each would take the other's numbers for repeats of its own."""
        self.sessions.add(session)
        if not session.producer:
            return
        same = self._producers.setdefault((session.user, session.producer), set())
        others = list(same)
        same.add(session)
        for older in others:
            if older.producer_key == session.producer_key:
                older.fence(f"producer '{session.producer}' has connected again")

    def session_closed(self, session: S) -> None:
        """A client's connection has ended."""
        self.sessions.discard(session)
        same = self._producers.get((session.user, session.producer))
        if same is not None:
            same.discard(session)
            if not same:
                del self._producers[session.user, session.producer]
        self.blocked.discard(session)
        self._full.pop(session, None)

    def end_unread(self, producer: str, asker: S) -> None:
        """Fences the producer's other connections, as `asker` is told how far the producer has come: unread publishes must not go beyond that.

        A process that takes over the name would give identical IDs to messages of its own, and they would count as repeats.
        """
        for session in list(self._producers.get((asker.user, producer), ())):
            if session is not asker and not (session.instance and session.instance == asker.instance):
                session.fence(f"another connection has asked how far producer '{producer}' has come")

    def held(self, queue: QueueKey) -> Iterator[Delivery]:
        """Deliveries of a queue that clients hold."""
        for session in self.sessions:
            for channel in session.channels.values():
                for delivery in channel.held:
                    if delivery.queue == queue:
                        yield delivery

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for clients that do not keep up."""
        return sum(self._full.values())

    def client_full(self, session: Reader, waiting_bytes: int) -> None:
        """A client does not keep up (0 bytes: it does again). Beyond the total limit, the client that has been behind longest is closed.

        A single client is never closed here: the data for it is bounded on its own (`flow_control`).
        """
        if not waiting_bytes:
            self._full.pop(session, None)
            return
        self._full[session] = waiting_bytes  # an update keeps the client's place
        total = self.waiting_bytes
        while total > self.config.client_buffers_bytes_max and len(self._full) > 1:
            slowest = next(iter(self._full))
            total -= self._full.pop(slowest)
            log.warning("a client of %s that does not read is closed: door.client_buffers_bytes_max", slowest.user)
            self.counters["closed_slow"] += 1
            slowest.cut_off()

    # ---- replication and confirms ------------------------------------------------------------------------------------

    def forget_decisions(self) -> None:
        """The set of replicated queues has changed."""
        for session in self.sessions:
            session.forget_decisions()

    def exchange_changed(self, vhost: str, exchange: str) -> None:
        """An exchange was declared or deleted."""
        for session in self.sessions:
            session.exchange_changed(vhost, exchange)

    def give_confirms(self) -> None:
        """This primary no longer waits for its expected backups."""
        for session in list(self.sessions):
            session.give_confirms()

    def refused_after_confirm(self, publishes: int) -> None:
        """The broker has refused publishes that were confirmed already."""
        self.counters["refused_after_confirm"] += publishes
        if self._now - self._lost_said_at >= 1.0:
            self._lost_said_at = self._now
            text = 'messages were refused by a full queue after their confirm, and are lost: %d so far. completion = "local" is not for such queues'
            log.warning(text, self.counters["refused_after_confirm"])

    # ---- alarms ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def closed_because(self) -> str:
        """Why clients are not served now; empty if they are."""

    @abstractmethod
    def waits(self) -> str:
        """Why operations behind this door do not complete now; empty if no obstacle is known."""

    def block(self, reason: str) -> None:
        """The broker takes nothing for the log any more; with an empty reason, it does again."""
        was, self.log_blocked = self.log_blocked, reason
        if waits := self.waits():
            log.warning("%s", waits)
        elif reason:
            log.warning("the broker takes nothing more for the log: %s. Nothing is confirmed until its alarm is over; consumers go on", reason)
        elif was:
            log.info("the broker takes the log again")
        for session in list(self.sessions):
            session.alarm.changed()
            if reason:
                session.release_acks()

    def alarmed(self) -> bool:
        """Whether the broker is known to have an alarm. Only connections that the door reads count: on others, the end of the alarm goes unread."""
        return bool(self.log_blocked) or any(session.flow.listens for session in self.blocked)
