"""The batches of a session that are sent and not acked. Bounded by `in_flight_bytes_max`; one transaction may exceed it, alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lrq_ha.replication.positions import Position
from lrq_ha.routing import messages as m
from lrq_ha.routing.route import Limits, Route
from lrq_ha.routing.shares import Packing, Share, pack_envelope


class Batches:
    """The batches in flight.

    Args:
        route: The source, client and destination.
        limits: The bounds, and the time for an ack.
        packing: Makes the batches.
    """

    def __init__(self, route: Route, limits: Limits, packing: Packing) -> None:
        self._route = route
        self._packing = packing
        self._limits = limits
        self._in_flight: deque[tuple[Position, int]] = deque()  # last position and bytes of each batch, ascending
        self.in_flight_bytes = 0  # sent and not acked
        self._ack_since = 0.0  # time of the last ack, or of the first batch
        self.envelope_bytes = len(pack_envelope(route, Position(2**63, 2**63)))
        """The size of a batch without transactions, at most."""

    def __bool__(self) -> bool:
        return bool(self._in_flight)

    def has_room(self, size: int, *, first: bool) -> bool:
        """Whether a batch may grow to this size. `first`: by its first transaction."""
        room_bytes = self._limits.in_flight_bytes_max - self.in_flight_bytes
        return (first and (size <= room_bytes or not self._in_flight)) or size <= min(room_bytes, self._limits.batch_bytes_max)

    def send(self, previous: Position, shares: Sequence[Share], now: float) -> m.Send:
        """Sends a batch. `previous`: the last position before it, (0, 0) for the first one of a chain."""
        last, body = shares[-1].position, self._packing.pack(self._route, previous, shares)
        if not self._in_flight:
            self._ack_since = now
        self._in_flight.append((last, len(body)))
        self.in_flight_bytes += len(body)
        return m.Send(self._route.queue, body, last)

    def ack(self, upto: Position, now: float) -> None:
        """The sink has everything up to this position."""
        self._ack_since = now
        while self._in_flight and self._in_flight[0][0] <= upto:
            self.in_flight_bytes -= self._in_flight.popleft()[1]

    def is_overdue(self, now: float) -> bool:
        """Whether the next ack has not come in time."""
        return bool(self._in_flight) and now - self._ack_since >= self._limits.ack_timeout_s

    def drop(self) -> None:
        """No batch is in flight any more."""
        self._in_flight.clear()
        self.in_flight_bytes = 0
