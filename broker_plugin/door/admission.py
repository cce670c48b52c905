"""Admission of connections: each counts from its accept until both its sockets have closed, by the outcome of its login. Pure.

Rules:
- There are at most `connections_max` connections. Clients leave a part of them free, for logins, and for other nodes and sites, which look like
  clients before they have logged in. So clients, however many, keep no node out.
- When all connections are taken, a new connection replaces an unfinished login: the oldest of the address that has most of them. So a host that
  connects and never logs in keeps no other out.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

KEPT_SHARE = 20  # one in so many connections is kept free of clients,
KEPT_EACH = 4  # and so many for each other node and site: each has two or three, and earlier ones may not be known to be gone


class Kind(Enum):
    """The kind of a connection."""

    LOGIN = "its login is not finished"
    CLIENT = "a client"
    OTHER = "another node or site"
    GONE = "it has ended"


class Admission:
    """One connection. `end` ends it within a moment, while its login is not finished."""

    __slots__ = ("end", "host", "kind")

    def __init__(self, host: str, end: Callable[[], None]) -> None:
        self.host, self.end = host, end
        self.kind = Kind.LOGIN


class AdmissionControl:
    """Counts the connections of one door.

    Args:
        connections_max: Limit on all connections.
        others: Number of other nodes and sites.

    Attributes:
        open: Number of connections.
    """

    def __init__(self, connections_max: int, others: int) -> None:
        self.open = 0
        self._connections_max = connections_max
        self._clients_max = connections_max - min(max(connections_max // KEPT_SHARE, KEPT_EACH * others), connections_max // 2)
        self._clients = 0
        self._logins: dict[str, dict[Admission, None]] = {}  # unfinished logins by address, the oldest first

    @property
    def has_room_for_client(self) -> bool:
        """Whether one more client is admitted."""
        return self._clients < self._clients_max

    def come(self, host: str, end: Callable[[], None]) -> Admission | None:
        """Admits one more connection from this address; None if there is no room."""
        if self.open >= self._connections_max:
            if not self._logins:
                return None
            most = max(self._logins.values(), key=len)
            oldest = next(iter(most))
            self.gone(oldest)
            oldest.end()
        arrival = Admission(host, end)
        self.open += 1
        self._logins.setdefault(host, {})[arrival] = None
        return arrival

    def moved(self, arrival: Admission, host: str) -> None:
        """A connection comes from this address, as a load balancer or another node says: its login counts there."""
        if arrival.kind is Kind.LOGIN:
            self._leave_logins(arrival)
            self._logins.setdefault(host, {})[arrival] = None
        arrival.host = host

    def logged_in(self, arrival: Admission, kind: Kind) -> None:
        """The login of a connection is finished; `kind` is its outcome."""
        if arrival.kind is Kind.LOGIN:
            self._leave_logins(arrival)
            arrival.kind = kind
            self._clients += kind is Kind.CLIENT

    def gone(self, arrival: Admission) -> None:
        """A connection has ended, or is being ended."""
        if arrival.kind is Kind.GONE:
            return
        if arrival.kind is Kind.LOGIN:
            self._leave_logins(arrival)
        self._clients -= arrival.kind is Kind.CLIENT
        arrival.kind = Kind.GONE
        self.open -= 1

    def _leave_logins(self, arrival: Admission) -> None:
        logins = self._logins[arrival.host]
        del logins[arrival]
        if not logins:
            del self._logins[arrival.host]
