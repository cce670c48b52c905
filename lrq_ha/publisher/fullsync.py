"""The full syncs that a client has to supply: pure. Fed with the LRQ_Status stream, in its order.

Rules:

 - The stream is read from its beginning at every login, and an old request must not be begun because its end has not been read
   yet. So nothing is begun or cancelled until the reader has caught up.
 - Per destination the newest request counts. It ends by a COMPLETED or CANCELLED of its own request id; an end of an older request
   that crossed it on the way ends nothing.
 - The reader can never be certain that it has caught up. So a request that was read before, and is not the newest of those, is ignored when
   it is read again: newer ones will follow.
 - A request is begun once by this process. A newer one for its destination cancels the one that is being served.
 - The announcement of a provider cancels earlier requests too: it comes from a new process, for which they are made again. Rows of a former process
   may have been taken for such a request, and those of this one would come behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lrq_ha.proto import lrq_pb2 as pb

KNOWN_MAX: Final = 10_000  # requests that are known again


@dataclass(frozen=True, slots=True)
class FullSyncRequest:
    """A request for all data of a client, for one destination site."""

    client_name: str
    destination: str
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Effect: call the provider for this request."""

    request: FullSyncRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """Effect: the data of this request is not needed any more."""

    request: FullSyncRequest
    why: str


Effect = Begin | Cancel


class RequestBook:
    """The full sync requests for one client."""

    def __init__(self, client_name: str) -> None:
        self.client_name = client_name
        self._caught_up = False
        self._pending: dict[str, FullSyncRequest | None] = {}  # by destination: the newest request; None: it has ended
        self._ended: dict[str, str] = {}  # by destination: the request id that was ended last
        self._outdated: dict[str, str] = {}  # by destination: the request id that an announcement ended last
        self._begun: dict[str, str] = {}  # by destination: the request id that was begun last here
        self._running: dict[str, FullSyncRequest] = {}
        self._known: dict[tuple[str, str], None] = {}  # (destination, request id) of every request ever read, in stream order
        self._newest: dict[str, str] = {}  # by destination: the last request id of `_known`

    def replay(self) -> None:
        """The stream is read from its beginning (again)."""
        self._caught_up = False
        self._pending.clear()
        self._ended.clear()
        self._outdated.clear()

    def caught_up(self) -> list[Effect]:
        """The whole stream has been read."""
        self._caught_up = True
        return [effect for destination in self._pending for effect in self._decide(destination)]

    def status(self, status: pb.Status) -> list[Effect]:
        """One message of the stream."""
        if status.HasField("client"):
            return self._announced(status.client)
        found = status.full_sync
        if status.WhichOneof("value") != "full_sync" or found.client_name != self.client_name or not (found.destination and found.request_id):
            return []
        destination = found.destination
        pending = self._pending.get(destination)
        if found.state == pb.FullSyncRequest.REQUESTED:
            self._meet(destination, found.request_id)
            if found.request_id == self._ended.get(destination):
                return []  # a repeat of a request that has ended
            self._pending[destination] = FullSyncRequest(found.client_name, destination, found.request_id, found.reason)
        elif pending is not None and pending.request_id == found.request_id:
            self._pending[destination] = None
            self._ended[destination] = found.request_id
        return self._decide(destination) if self._caught_up else []

    def _meet(self, destination: str, request_id: str) -> None:
        if (destination, request_id) in self._known:
            return
        self._known[destination, request_id] = None
        self._newest[destination] = request_id
        if len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]

    def _announced(self, client: pb.ClientStatus) -> list[Effect]:
        if client.client_name != self.client_name or not client.full_sync_provider:
            return []
        for destination, pending in self._pending.items():
            if pending is not None:
                self._pending[destination] = None
                self._outdated[destination] = pending.request_id
        return [effect for destination in self._pending for effect in self._decide(destination)] if self._caught_up else []

    def _decide(self, destination: str) -> list[Effect]:
        wanted, running = self._pending[destination], self._running.get(destination)
        effects: list[Effect] = []
        if wanted is None:
            if running is not None and running.request_id in (self._ended.get(destination), self._outdated.get(destination)):
                del self._running[destination]
                effects.append(Cancel(running, "the request was ended elsewhere"))
            return effects
        if wanted.request_id != self._newest[destination] or wanted.request_id == self._begun.get(destination):
            return []
        if running is not None:
            effects.append(Cancel(running, f"request {wanted.request_id} came after it"))
        self._begun[destination] = wanted.request_id
        self._running[destination] = wanted
        return [*effects, Begin(wanted)]

    def finished(self, request: FullSyncRequest) -> None:
        """This process has ended the request (completed, cancelled, failed)."""
        if self._running.get(request.destination) == request:
            del self._running[request.destination]
