"""Who may come in: connections are counted from their accept on, until both their sockets have closed, by what their logins come to. Pure.

Rules:
- All together are `connections_max` at most. Clients leave some of that free, for other nodes and sites, which nobody can tell from them before they
  have logged in, and for logins themselves. So clients, however many, keep no node out.
- Where everything is taken, a login that is not finished makes room for whoever comes next: the oldest one of the address that has most of them. So
  who connects and never logs in keeps nobody out.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

KEPT_SHARE = 20  # this part of all connections is kept free of clients,
KEPT_EACH = 4  # and for each other node and site so many: each has two or three, and those that it had before may not be known to be gone


class Kind(Enum):
    """What a connection is."""

    LOGIN = "its login is not finished"
    CLIENT = "a client"
    OTHER = "another node or site"
    GONE = "it has ended"


class Admission:
    """One connection. `end` ends it while its login is not finished, within a moment."""

    __slots__ = ("end", "host", "kind")

    def __init__(self, host: str, end: Callable[[], None]) -> None:
        self.host, self.end = host, end
        self.kind = Kind.LOGIN


class AdmissionControl:
    """See above.

    Args:
        connections_max: All together.
        others: How many other nodes and sites there are.

    Attributes:
        open: How many connections there are.
    """

    def __init__(self, connections_max: int, others: int) -> None:
        self.open = 0
        self._connections_max = connections_max
        self._clients_max = connections_max - min(max(connections_max // KEPT_SHARE, KEPT_EACH * others), connections_max // 2)
        self._clients = 0
        self._logins: dict[str, dict[Admission, None]] = {}  # that are not finished, by address, the oldest first

    @property
    def has_room_for_client(self) -> bool:
        """Whether one more client may come in."""
        return self._clients < self._clients_max

    def come(self, host: str, end: Callable[[], None]) -> Admission | None:
        """One more connection from this address; None if there is no room."""
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

    def logged_in(self, arrival: Admission, kind: Kind) -> None:
        """Its login is finished, and it is a client or another node or site."""
        if arrival.kind is Kind.LOGIN:
            self._leave_logins(arrival)
            arrival.kind = kind
            self._clients += kind is Kind.CLIENT

    def gone(self, arrival: Admission) -> None:
        """It has ended, or is made to."""
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
