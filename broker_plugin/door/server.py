"""The sidecar's AMQP port: listens, and keeps what its connections have in common: limits, TLS, the clock, the end of all of them.

Rules:
- What a connection becomes is decided in `client_login`: a client's Relay, another node's PeerEnd, or nothing.
- A node that is not primary refuses clients with CONNECTION_FORCED and names the primary.
- A producer that connects anew ends its older connection: nothing of that can be appended any more.
- Limits are the configuration's. One connection's excess is that connection's end; the limits on all together cost the one that takes most.
- An orderly stop takes no new connection, waits for the confirms that are under way, and tells each client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from lrq_ha.errors import LrqError, place
from lrq_ha.interceptors.plugins import Interceptors
from lrq_ha.replication.queues import QueueKey
from lrq_ha.sidecar.config import Config

from ..amqp.content_assembly import Budget
from ..amqp.default_queue_type import DefaultTypes
from ..amqp.reply_codes import CONNECTION_FORCED
from ..amqp.sasl import Credentials
from ..amqp.tls import TlsError
from ..amqp.vhosts import VhostConnections
from ..log.messages import Delivery
from ..log.replica import Replica
from ..methods import permissions
from . import drain
from .admission import Admission, AdmissionControl
from .client_connection import ClientConnection
from .client_login import ClientLogin
from .intercept import InterceptPoints
from .listener import Listener
from .peer import PeerConnection

log = logging.getLogger("lrq_ha.door")

TICK_MAX_S = 2.0


def _unstopped(part: Callable[..., object], *arguments: object) -> None:
    """Does one of the things that are done each second: it must not keep the others from being done, nor end the clock."""
    try:
        part(*arguments)
    except Exception as error:
        log.error("what is done each second could not be done: %s", place(error))


class Host(Protocol):
    """What the door needs of the incarnation behind it."""

    replica: Replica

    def refusal(self) -> str:
        """Why clients are not served now; empty if they are."""

    def push(self, end: PeerConnection, header: bytes, body: bytes) -> None: ...

    def control(self, end: PeerConnection, body: bytes) -> None: ...

    def peer_gone(self, end: PeerConnection) -> None: ...


class Door:
    """Listens for one sidecar; stays open from one incarnation to the next.

    Args:
        config: The node's configuration.
        connections_max: As many connections as there may be; None: what the configuration says.

    Attributes:
        admissions: Who came in.
        completes_locally: Whether publishes to a queue, by its name, are confirmed when the own stream has them.
        tls: What connections are taken with; None for plain ones.
        interceptors: Those that the configuration names.
        own: The sidecar's credentials, which other nodes and sites show.
        broker: Where the broker listens.
        default_types: What queues are whose declarations name no type.
        vhosts: Where the broker is asked what there is.
        unfinished: Messages of which a part has arrived, and open transactions, of all connections.
        buffered_bytes_max: Memory for what is not safe yet; past it nothing more is read from publishers.
    """

    def __init__(self, config: Config, connections_max: int | None = None) -> None:
        self.config = config.door
        self.buffered_bytes_max = min(config.door.buffered_bytes_max, config.replication.log_quarter_bytes)
        self.group = config.node.group
        self.sites = frozenset(site.remote_id for site in config.sites)
        self.own = config.credentials
        self.broker = config.broker_address("/")
        self.default_types = DefaultTypes(self.broker)
        self.vhosts = VhostConnections(self.broker)
        self.tls = config.server_tls
        self.host: Host | None = None
        self.counters: Counter[str] = Counter()
        self.relays: set[ClientConnection] = set()
        self._producers: dict[tuple[str, str], set[ClientConnection]] = {}  # those of them that have announced one, by user and name
        self.peer_ends: set[PeerConnection] = set()
        self.unfinished = Budget(config.door.unfinished_bytes_max, "door.unfinished_bytes_max")
        self._users = {e.common_name: Credentials(e.user.encode(), e.password.encode()) for e in (config.door.tls.users if config.door.tls else ())}
        self._client_tls = config.client_tls
        self.admissions = AdmissionControl(connections_max or config.door.connections_max, len(config.peers) + len(config.sites))
        self._full: dict[ClientConnection, int] = {}  # clients that do not keep up, the longest first, and the bytes that wait for each
        self._refused_said_at = self._lost_said_at = 0.0
        self.completes_locally = config.completes_locally
        self._stopping = False
        self.interceptors = Interceptors(config.interceptors)
        self._listener = Listener(
            self.admit, self.admissions.gone, partial(ClientLogin, self), tls=self.tls, handshake_timeout_s=config.door.handshake_timeout_s
        )
        self.log_blocked = ""
        self.blocked: set[ClientConnection] = set()  # clients from whose connections the broker takes no publishes
        self.draining = ""  # why nothing more is given out (draining.py); empty if it is
        self._ticker: asyncio.Task[None] | None = None
        self._now = 0.0

    def now(self) -> float:
        """Seconds that this process has run, as of the last tick (one second coarse, but free)."""
        return self._now

    async def start(self) -> None:
        """Listens. Raises LrqError if the address is in use."""
        loop = asyncio.get_running_loop()

        def on_room() -> None:  # on an interceptor's thread
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._interceptors_have_room)

        self.interceptors.start(on_room)
        host, _, port = self.config.listen.rpartition(":")
        try:
            await self._listener.listen(host.strip("[]"), int(port))
        except OSError as error:
            raise LrqError(f"the door cannot listen on {self.config.listen}: {error.strerror}", todo="change door.listen") from error
        self._ticker = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(1.0)
            # A pause of this process itself must not look like a silence of all others.
            self._now += min(time.monotonic() - began, TICK_MAX_S)
            for tick in (*(relay.flow.tick for relay in self.relays), *(end.tick for end in self.peer_ends)):
                _unstopped(tick, self._now)
            _unstopped(self.interceptors.check)
            _unstopped(self.reload)

    def reload(self, force: bool = False) -> None:
        """Reads certificates and keys again if their files have changed; `force`: in any case, and interceptors open theirs again."""
        if force:
            self.interceptors.reload()
        for what, files in (("the door's", self.tls), ("its own connections'", self._client_tls)):
            try:
                if files is not None and files.refresh(force):
                    log.info("TLS: %s certificates were read again", what)
            except TlsError as error:
                log.error("TLS: %s certificates stay as they were: %s", what, error)

    # ---- who may come in ---------------------------------------------------------------------------------------------

    def admit(self, address: str, end: Callable[[], None]) -> Admission | None:
        """One more connection, which that ends; None if it is not taken."""
        arrival = None if self._stopping else self.admissions.come(address.rpartition(":")[0], end)
        if arrival is None:
            self.turned_away(address)
        return arrival

    def turned_away(self, address: str) -> None:
        """There was no room for a connection from there."""
        self.counters["turned_away"] += 1
        if not self._stopping and self._now - self._refused_said_at >= 1.0:
            self._refused_said_at = self._now
            log.warning("%s was turned away: there are %d connections, door.connections_max", address, self.admissions.open)

    @property
    def connections(self) -> int:
        """Connections that are open, of every kind."""
        return self.admissions.open

    def user_of(self, common_name: str) -> str:
        """The common name itself, if the configuration maps it to a user; else nothing."""
        return common_name if common_name in self._users else ""

    def mapped(self, common_name: str) -> Credentials | None:
        """Whom a certificate's name stands for."""
        return self._users.get(common_name)

    def closed_because(self) -> str:
        """Why clients are not served now; empty if they are."""
        if self._stopping:
            return "this sidecar stops"
        return self.host.refusal() if self.host is not None else f"this sidecar is starting{'; ' if self.log_blocked else ''}{self.waits()}"

    def waits(self) -> str:
        """Why what is started behind this door does not come to its end now; empty if nothing is known to be in its way."""
        if not self.log_blocked or self.host is not None:
            return ""
        return f"its broker takes nothing for the log ({self.log_blocked}), and until that alarm is over it cannot start, and serves nobody"

    def block(self, reason: str) -> None:
        """The broker takes nothing for the log any more, or does again (no reason)."""
        was, self.log_blocked = self.log_blocked, reason
        if waits := self.waits():
            log.warning("%s", waits)
        elif reason:
            log.warning("the broker takes nothing more for the log: %s. Nothing is confirmed until its alarm is over; consumers go on", reason)
        elif was:
            log.info("the broker takes the log again")
        for relay in list(self.relays):
            relay.alarm.changed()
            if reason:
                relay.release_acks()

    def alarmed(self) -> bool:
        """Whether the broker has an alarm, as far as it has told: that it is over, too, so it counts only where the broker is listened to."""
        return bool(self.log_blocked) or any(relay.flow.listens for relay in self.blocked)

    def refused_after_confirm(self, publishes: int) -> None:
        """The broker has refused publishes that were confirmed already."""
        self.counters["refused_after_confirm"] += publishes
        if self._now - self._lost_said_at >= 1.0:
            self._lost_said_at = self._now
            text = 'messages were refused by a full queue after their confirm, and are lost: %d so far. completion = "local" is not for such queues'
            log.warning(text, self.counters["refused_after_confirm"])

    def give_confirms(self) -> None:
        """This primary no longer waits for its expected backups."""
        for relay in list(self.relays):
            relay.give_confirms()

    def came(self, relay: ClientConnection) -> None:
        """A client has logged in. A producer has one connection: with two, each would take the other's numbers for repeats of its own."""
        self.relays.add(relay)
        if not relay.producer:
            return
        same = self._producers.setdefault((relay.user, relay.producer), set())
        others = list(same)
        same.add(relay)
        for older in others:
            if older.producer_key == relay.producer_key:
                older.fence(f"producer '{relay.producer}' has connected anew")

    def end_unread(self, producer: str, asker: ClientConnection) -> None:
        """Somebody else is told how far a producer has come: what it has sent, and the door has not read, must not go further than that.

        A process that takes over its name would give the same IDs to messages of its own, which would count as repeats.
        """
        for relay in list(self._producers.get((asker.user, producer), ())):
            if relay is not asker and not (relay.instance and relay.instance == asker.instance):
                relay.fence(f"another connection has asked how far producer '{producer}' has come")

    # ---- what connections have in common -----------------------------------------------------------------------------

    def watch(self, relay: ClientConnection) -> InterceptPoints | None:
        """What tells interceptors of a client's connection; None if there are none. Other sites' sidecars are no clients."""
        return InterceptPoints(relay, self.interceptors) if self.interceptors and relay.peer is None else None

    def _interceptors_have_room(self) -> None:
        if not self.interceptors.full:
            for relay in list(self.relays):
                relay.flow.hold_up(False)

    def forget_decisions(self) -> None:
        """What is replicated has changed."""
        for relay in self.relays:
            relay.forget_decisions()

    def exchange_changed(self, vhost: str, exchange: str) -> None:
        """An exchange was declared or deleted."""
        for relay in self.relays:
            permissions.exchange_changed(relay, vhost, exchange)

    def held(self, queue: QueueKey) -> Iterator[Delivery]:
        """What clients hold of a queue."""
        for relay in self.relays:
            for channel in relay.channels.values():
                for delivery in channel.held:
                    if delivery.queue == queue:
                        yield delivery

    def client_full(self, relay: ClientConnection, waiting_bytes: int) -> None:
        """A client does not keep up (or does again: 0 bytes). Past the limit on all of them, the one that is behind longest is closed.

        Not the only one: what it gets is bounded by itself (`flow_control`).
        """
        if not waiting_bytes:
            self._full.pop(relay, None)
            return
        self._full[relay] = waiting_bytes  # it keeps its place
        total = sum(self._full.values())
        while total > self.config.client_buffers_bytes_max and len(self._full) > 1:
            slowest = next(iter(self._full))
            total -= self._full.pop(slowest)
            log.warning("a client of %s that does not read is closed: door.client_buffers_bytes_max", slowest.user)
            self.counters["closed_slow"] += 1
            slowest.cut_off()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close_clients(self, reason: str) -> None:
        """Ends every connection: this node serves nobody any more."""
        for relay in list(self.relays):
            try:
                relay.close_client(CONNECTION_FORCED, reason)
                relay.close()
            except Exception as error:  # the others are not to stay for it
                log.error("a client's connection could not be closed in order: %s", place(error))
                relay.cut_off()
                relay.broker.abort()
                self.gone(relay)
        for end in list(self.peer_ends):
            end.close()

    def gone(self, end: ClientConnection | PeerConnection) -> None:
        """A connection has ended."""
        if isinstance(end, ClientConnection):
            self.relays.discard(end)
            same = self._producers.get((end.user, end.producer))
            if same is not None:
                same.discard(end)
                if not same:
                    del self._producers[end.user, end.producer]
            self.blocked.discard(end)
            self._full.pop(end, None)
        else:
            self.peer_ends.discard(end)
            if self.host is not None:
                self.host.peer_gone(end)

    async def stop(self) -> None:
        """Takes no new connection, lets confirms that are under way finish, tells each client; returns when all are gone, or their time is over."""
        self._stopping = True
        self._listener.close()
        if not self.relays:
            return
        log.info("%d clients are told that this sidecar stops; up to %g s for what is under way", len(self.relays), self.config.stop_timeout_s)
        began = time.monotonic()
        await drain.close(self, "this sidecar stops", self.config.stop_timeout_s)
        if self.relays:
            log.warning("%d clients have not gone in time", len(self.relays))
        else:
            log.info("all clients are gone after %.1f s", time.monotonic() - began)

    async def close(self) -> None:
        """Stops listening and ends everything."""
        self._stopping = True
        if self._ticker:
            self._ticker.cancel()
        self._listener.close()
        self.close_clients("this sidecar stops")
        self.vhosts.abort()
        self.interceptors.end_asking()
        await asyncio.to_thread(self.interceptors.close)
