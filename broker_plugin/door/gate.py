"""The state of a door that logins need: admissions, TLS, credentials, and why clients are not served.

Rules:
- A node that is not primary refuses clients with CONNECTION_FORCED and names the primary.
- `client_login` decides on a connection's kind: a client's session, another node's `PeerConnection`, a `Relay`, or none.
- With `door.when_backup = "forward"` clients are relayed to the primary that this node follows. Not before a login here has shown the broker's
  connection.start: the primary itself has always logged in before this node knows that it is primary.
- Relays outlive an incarnation: without one, this node does not know that its primary is another one.
"""

from __future__ import annotations

import asyncio
import logging

from ..amqp.sasl import Credentials
from ..session.door_state import DoorState
from ..session.session import ClientSession
from ..session.settings import DoorSettings
from .admission import AdmissionControl
from .peer import Host, PeerConnection
from .relay import UNHEARD_S, Primary, Relay

log = logging.getLogger("lrq_ha.door")


class Gate(DoorState[ClientSession]):
    """The state of a door that logins need.

    Attributes:
        admissions: The admitted connections.
        tls: The door's TLS; None for plain connections.
        own: The sidecar's credentials, which other nodes and sites present.
        broker: The broker's address.
        host: The incarnation behind the door; None while there is none.
        peer_ends: Connections of other nodes.
        relays: Clients that are relayed to the primary.
        broker_start: The payload of the broker's connection.start, as the last login has shown it.
    """

    def __init__(self, settings: DoorSettings, connections_max: int | None = None) -> None:
        super().__init__(settings)
        self.own = settings.own
        self.broker = settings.broker
        self.tls = settings.server_tls
        self.host: Host | None = None
        self.peer_ends: set[PeerConnection] = set()
        self.relays: set[Relay] = set()
        self.broker_start = b""
        self._unheard_at: float | None = None  # since when this node knows no primary, while clients are relayed
        self.admissions = AdmissionControl(connections_max or self.config.connections_max, settings.neighbours)
        self._users = settings.users
        self._refused_said_at = 0.0
        self._stopping = False

    @property
    def connections(self) -> int:
        """Number of open connections, of every kind."""
        return self.admissions.open

    def user_of(self, common_name: str) -> str:
        """The common name itself, if the configuration maps it to a user; else nothing."""
        return common_name if common_name in self._users else ""

    def mapped(self, common_name: str) -> Credentials | None:
        """The credentials that a certificate's common name stands for."""
        return self._users.get(common_name)

    def rejected(self, address: str) -> None:
        """Counts a connection for which there was no room."""
        self.counters["turned_away"] += 1
        if not self._stopping and self._now - self._refused_said_at >= 1.0:
            self._refused_said_at = self._now
            log.warning("%s was turned away: there are %d connections, door.connections_max", address, self.admissions.open)

    def closed_because(self) -> str:
        """Why clients are not served now; empty if they are."""
        if self._stopping:
            return "this sidecar stops"
        return self.host.refusal() if self.host is not None else f"this sidecar is starting{'; ' if self.log_blocked else ''}{self.waits()}"

    def waits(self) -> str:
        """Why operations behind this door do not complete now; empty if no obstacle is known."""
        if not self.log_blocked or self.host is not None:
            return ""
        return f"its broker takes nothing for the log ({self.log_blocked}), and until that alarm is over it cannot start, and serves no client"

    def peer_closed(self, end: PeerConnection) -> None:
        """Another node's connection has ended."""
        self.peer_ends.discard(end)
        if self.host is not None:
            self.host.peer_gone(end)

    # ---- relays ------------------------------------------------------------------------------------------------------

    def relay_target(self) -> Primary | None:
        """The primary that clients are relayed to; None if they are not relayed."""
        if self.config.when_backup != "forward" or self._stopping or self.host is None or not self.broker_start:
            return None
        primary = self.host.primary()
        return primary if primary is not None and primary.door is not None else None

    def check_relays(self) -> None:
        """Ends the relays that do not lead to the primary of now. Call it periodically."""
        if not self.relays or self.host is None:
            self._unheard_at = None
            return
        now, primary = asyncio.get_running_loop().time(), self.host.primary()
        if primary is not None:
            self._unheard_at = None
        elif self._unheard_at is None:
            self._unheard_at = now
        unheard = self._unheard_at is not None and now - self._unheard_at > UNHEARD_S
        for relay in list(self.relays):
            if primary is not None and primary.node != relay.primary.node:
                relay.end(f"{relay.primary.name} is no longer primary, {primary.name} is: connect again")
            elif unheard:
                relay.end(f"this node has not heard its primary {relay.primary.name} for {UNHEARD_S:g} s: connect again")

    def weigh_relay(self, relay: Relay, waiting_bytes: int) -> None:
        """A side of a relay does not keep up (0 bytes: both do again)."""
        self.client_full(relay, waiting_bytes)

    def relay_closed(self, relay: Relay) -> None:
        """A relayed client is gone."""
        self.relays.discard(relay)
        self.client_full(relay, 0)
