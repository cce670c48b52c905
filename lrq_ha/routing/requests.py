"""The full sync requests of one (client, destination), as they stand in the source group's log.

Rules:

- A request counts at its position, which is its snapshot's base. So marks are kept in log order, also marks that the
  chain has passed: a sink may fall back behind them.
- Only the newest `marks_max` are kept; a forgotten request is asked for again.
- Request ids are made from log positions, so those of two primaries differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing import messages as m
from lrq_ha.routing import names
from lrq_ha.routing.chain import START
from lrq_ha.routing.route import Limits, Route
from lrq_ha.routing.tables import Reason

REQUESTED, COMPLETED, CANCELLED = pb.FullSyncRequest.REQUESTED, pb.FullSyncRequest.COMPLETED, pb.FullSyncRequest.CANCELLED


class Mark(NamedTuple):
    """A status entry about a full sync: a request, a cancellation, or the end of its data in the log."""

    position: Position
    request_id: str
    state: pb.FullSyncRequest.State

    @property
    def size(self) -> int:
        """Approximate bytes of its marker."""
        return 64 + len(self.request_id)


class Requests:
    """Marks in log order."""

    def __init__(self, marks_max: int) -> None:
        self._marks: deque[Mark] = deque(maxlen=marks_max)  # ascending

    def add(self, mark: Mark) -> bool:
        """Adds a mark behind the newest one. Returns whether it was added."""
        if self._marks and mark.position <= self._marks[-1].position:
            return False
        self._marks.append(mark)
        return True

    def next_after(self, position: Position) -> Mark | None:
        """The next mark that matters to the chain: a request or a cancellation."""
        return next((mark for mark in self._marks if mark.position > position and mark.state != COMPLETED), None)

    def goes_on(self, request_id: str, after: Position) -> bool:
        """Whether data behind `after` still belongs to a request: it is known, and was not cancelled up to there."""
        states = {mark.state for mark in self._marks if mark.request_id == request_id and mark.position <= after}
        return REQUESTED in states and CANCELLED not in states

    def is_ahead(self, position: Position) -> bool:
        """Whether a request that was not cancelled stands behind `position`."""
        cancelled = {mark.request_id for mark in self._marks if mark.state == CANCELLED}
        return any(
            mark.state == REQUESTED and mark.position > position and mark.request_id not in cancelled for mark in self._marks
        )

    def is_unsent(self, taken: Position) -> bool:
        """Whether the newest request reaches a sink that is away: it has not ended, or stands behind what was sent.

        Args:
            taken: Marks up to here were sent or left out; (0, 0): not known.
        """
        return bool(self._marks) and (self._marks[-1].state == REQUESTED or (taken != START and self.is_ahead(taken)))

    def usable(self, after: Position, from_sequence: int, provider: bool) -> Mark | None:
        """The newest request, if a chain can start at it.

        Args:
            after: The sink has entries up to here: the request must lie behind.
            from_sequence: The first sequence that is left: the data behind the request must not begin before it.
            provider: Whether a provider may still answer it; if not, its data must be complete in the log.
        """
        newest = next((mark for mark in reversed(self._marks) if mark.state == REQUESTED), None)
        if newest is None or newest.position <= after or newest.position.sequence + 1 < from_sequence:
            return None
        states = {mark.state for mark in self._marks if mark.request_id == newest.request_id}
        if CANCELLED in states:
            return None
        return newest if provider or COMPLETED in states else None


class RequestWriter:
    """Writes a session's own requests and cancellations into the log.

    Args:
        route: The source, client and destination.
        limits: The times between two requests.
        emit: Called with the driver's effects.
    """

    def __init__(self, route: Route, limits: Limits, emit: Callable[[m.Effect], None]) -> None:
        self._route = route
        self._limits = limits
        self._emit = emit
        self._ids = 0  # made here
        self.asked = ""  # the last request that was written, if no other has come since
        self.asks = 0  # in a row without a whole snapshot
        self.ask_at: float | None = None  # time of the next request

    def new_id(self, known: Position) -> str:
        """A new request id. `known`: the greatest position heard of."""
        self._ids += 1
        return f"{self._route.destination}@{known}/{self._ids}"

    def ask(self, known: Position, reason: Reason, note: str = "") -> None:
        """Writes a new request. `note`: more words about the reason."""
        self.asked = self.new_id(known)
        self.write(self.asked, reason, REQUESTED, note)

    def ask_later(self, now: float) -> None:
        """The next request is due after a delay that doubles each time."""
        delay_s = self._limits.backoff_first_s * 2.0 ** min(max(self.asks - 1, 0), 30)
        self.ask_at = now + min(delay_s, self._limits.backoff_max_s)

    def provider_begins(self, now: float) -> None:
        """A new process: the silence of a former one is no reason to delay the request."""
        self.asks = 0
        if self.ask_at is not None:
            self.ask_at = now

    def write(self, request_id: str, reason: Reason, state: pb.FullSyncRequest.State, note: str = "") -> None:
        """Writes a request or a cancellation."""
        client, destination = self._route.client_name, self._route.destination
        text = f"{reason.value}: {note}" if note else reason.value
        request = pb.FullSyncRequest(client_name=client, destination=destination, request_id=request_id, reason=text, state=state)
        self._emit(m.AppendStatus(pb.Status(key=names.full_sync_key(client, destination), full_sync=request)))
