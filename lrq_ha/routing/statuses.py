"""The status entries of a group's log: the values of each key, used only once they are safe.

Rules:

- An unsafe value may be cut off again, so the one before it is kept until then.
- Of a client the last value counts; of a full sync the last request, and its end. A session that begins needs both: the request's position
  is its snapshot's beginning.
- An end counts for its own request only: an end that crossed a newer request on its way (the client had not received that yet) does not
  replace it. An end that crossed a cancellation does not count either: data between the two was left out, so the snapshot is not whole.
- A client that announces a provider is a new process without open requests: an earlier request that has not ended is
  cancelled there, here as in the client's process (`lrq_ha.publisher.fullsync`).
- A client is known from its first status on, permanently. There are CLIENTS_MAX at most: the door refuses statuses of one more (`has_room`), as
  they would have no effect. If a log has more, the clients with the oldest statuses are not known, on any node.
- At most FULL_SYNCS_MAX full syncs are remembered: the oldest go first.
- A status has STATUS_BYTES_MAX at most, as it is one message of LRQ_Status. Memory and checkpoints hold only the fields that sessions
  use (`_kept`), some hundred bytes.
- The cost of a status does not depend on how many are known, or not safe yet; an announcement costs as many steps as it cancels requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from lrq_ha.errors import MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.routing.names import check_client_name, check_remote_id, client_key, full_sync_key

CLIENTS_MAX = 1_000  # each has a session with each site
FULL_SYNCS_MAX = 10_000
STATUS_BYTES_MAX = 64 << 10
REQUESTED, CANCELLED = pb.FullSyncRequest.REQUESTED, pb.FullSyncRequest.CANCELLED


class Told(NamedTuple):
    """A status and the log entry that holds it."""

    sequence: int
    status: pb.Status


def check(status: pb.Status) -> None:
    """Checks that a status from a client agrees with its key.

    Raises:
        MalformedInput: It does not, a name is not valid, it has no value, or the value is a full sync without effect.
    """
    if status.HasField("client"):
        key = client_key(status.client.client_name)
    elif status.HasField("full_sync"):
        key = full_sync_key(check_client_name(status.full_sync.client_name), check_remote_id(status.full_sync.destination))
        if _says_nothing(status):
            raise MalformedInput(
                f"A status of a full sync with the request id {status.full_sync.request_id!r} and the state {status.full_sync.state}",
                todo="Name the request, and say that it is REQUESTED, COMPLETED or CANCELLED.",
            )
    else:
        raise MalformedInput("A status without a value", todo="Say what the client is, or how a full sync goes.")
    if status.key != key:
        raise MalformedInput(f"A status with the key {status.key!r} speaks of {key!r}", todo="Its key must be that.")


def _kept(status: pb.Status) -> pb.Status:
    """The part of a status that is remembered: neither the reason of a full sync, nor fields that this version does not know."""
    kept = pb.Status()
    kept.CopyFrom(status)
    kept.DiscardUnknownFields()
    if kept.HasField("full_sync"):
        kept.full_sync.ClearField("reason")
    return kept


def _says_nothing(status: pb.Status) -> bool:
    """Whether a full sync status has no effect: without a name, or with an unknown state."""
    full_sync = status.full_sync
    return status.HasField("full_sync") and not (full_sync.request_id and full_sync.state in pb.FullSyncRequest.State.values())


class Statuses:
    """The known statuses, fed in log order; statuses without effect, as an older version's log may have, are left out."""

    def __init__(self) -> None:
        self._safe = _Values()
        self._unsafe: deque[Told] = deque()  # ascending in sequence
        self._newest = _Values()  # the state after all noted entries

    def noted(self, sequence: int, status: pb.Status) -> None:
        """Entry `sequence` is this status."""
        if not _says_nothing(status):
            told = Told(sequence, _kept(status))
            self._unsafe.append(told)
            self._newest.tell(told)

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        if not self._unsafe or self._unsafe[-1].sequence < first:
            return
        while self._unsafe and self._unsafe[-1].sequence >= first:
            self._unsafe.pop()
        self._newest = self._safe.copy()
        for told in self._unsafe:
            self._newest.tell(told)

    def safe(self, upto: int) -> None:
        """Entries up to `upto` are safe."""
        while self._unsafe and self._unsafe[0].sequence <= upto:
            self._safe.tell(self._unsafe.popleft())

    def overtaken(self, status: pb.Status) -> int:
        """If a status would have no effect as the next one: the entry, safe or not, that overtook it. Else 0."""
        known = self._newest.full_syncs.get(status.key, ())
        return known[-1].sequence if known and _after(known, Told(0, status)) is known else 0

    def ends(self, status: pb.Status) -> bool:
        """Whether the status ends a request that is known, safely or not, and that has not ended."""
        known = self._newest.full_syncs.get(status.key, ())
        if not known or status.full_sync.state == REQUESTED:
            return False
        last = known[-1].status.full_sync
        return last.state == REQUESTED and last.request_id == status.full_sync.request_id

    def has_room(self, client_name: str) -> bool:
        """Whether a client is known, safely or not, or there is room for one more."""
        clients = self._newest.clients
        return f"client/{client_name}" in clients or len(clients) < CLIENTS_MAX

    @property
    def clients(self) -> int:
        """Number of known clients."""
        return len(self._safe.clients)

    def since(self, sequence: int) -> list[Told]:
        """The safe statuses behind entry `sequence`, in log order."""
        return self._safe.since(sequence)

    def of(self, client_name: str, destination: str) -> list[Told]:
        """The safe statuses of a client and of its full sync for a destination, in log order."""
        client = self._safe.clients.get(client_key(client_name), ())
        return _ordered((self._safe.full_syncs.get(full_sync_key(client_name, destination), ()), client))

    def rows(self) -> list[Told]:
        """The state after all noted entries, in log order, for a checkpoint that is appended next."""
        return self._newest.since(0)

    def load(self, rows: Iterable[Told]) -> None:
        """Replaces everything by `rows` of a checkpoint that is safe."""
        self._safe = _Values()
        for sequence, status in _ordered((rows,)):
            if not _says_nothing(status):
                self._safe.restore(Told(sequence, _kept(status)))
        self._unsafe.clear()
        self._newest = self._safe.copy()


Known = tuple[Told, ...]
"""The statuses of a key in log order: of a full sync its request, and the end of it."""


class _Values:
    """The values that count, by key; the oldest first."""

    def __init__(self) -> None:
        self.clients: dict[str, Known] = {}
        self.full_syncs: dict[str, Known] = {}
        self._open: dict[str, dict[str, None]] = {}  # of each client the keys of requests that have not ended

    def copy(self) -> _Values:
        copied = _Values()
        copied.clients, copied.full_syncs = dict(self.clients), dict(self.full_syncs)
        copied._open = {client_name: dict(keys) for client_name, keys in self._open.items()}
        return copied

    def tell(self, told: Told) -> None:
        """Adds the next status."""
        if not told.status.HasField("client"):
            self._note(told.status.key, told)
            return
        self._announced(told)
        if told.status.client.full_sync_provider:
            for key in list(self._open.get(told.status.client.client_name, ())):
                self._note(key, told)

    def restore(self, told: Told) -> None:
        """Adds the next row of a checkpoint: it counted there, whatever rows stand before it."""
        if told.status.HasField("client"):
            self._announced(told)
        else:
            self._know(told.status.key, (*self.full_syncs.get(told.status.key, ()), told))

    def _announced(self, told: Told) -> None:
        self.clients.pop(told.status.key, None)
        self.clients[told.status.key] = (told,)
        if len(self.clients) > CLIENTS_MAX:
            del self.clients[next(iter(self.clients))]

    def _note(self, key: str, told: Told) -> None:
        known = self.full_syncs.get(key, ())
        after = _after(known, told)
        if after is not known:
            self._know(key, after)

    def _know(self, key: str, known: Known) -> None:
        self._forget(key)
        self.full_syncs[key] = known
        last = known[-1].status.full_sync
        if last.state == REQUESTED:
            self._open.setdefault(last.client_name, {})[key] = None
        if len(self.full_syncs) > FULL_SYNCS_MAX:
            self._forget(next(iter(self.full_syncs)))

    def _forget(self, key: str) -> None:
        known = self.full_syncs.pop(key, ())
        if known and known[-1].status.full_sync.state == REQUESTED:
            client_name = known[-1].status.full_sync.client_name
            del self._open[client_name][key]
            if not self._open[client_name]:
                del self._open[client_name]

    def since(self, sequence: int) -> list[Told]:
        found: list[Known] = []
        for values in (self.clients, self.full_syncs):
            for known in reversed(values.values()):
                if known[-1].sequence <= sequence:
                    break
                found.append(tuple(told for told in known if told.sequence > sequence))
        return _ordered(reversed(found))


def _after(known: Known, told: Told) -> Known:
    """The statuses of a full sync after `told`, of it or of its client. `known` itself if `told` does not concern it."""
    status, last = told.status, known[-1].status.full_sync if known else None
    if status.HasField("client"):
        if last is None or last.state != REQUESTED or not status.client.full_sync_provider:
            return known
        status = pb.Status(key=known[-1].status.key, full_sync=last)
        status.full_sync.state = CANCELLED
    elif last is None or status.full_sync.state == REQUESTED:
        return (told,)
    elif last.request_id != status.full_sync.request_id or last.state == CANCELLED:
        return known
    return (known[0], Told(told.sequence, status))


def _ordered(found: Iterable[Iterable[Told]]) -> list[Told]:
    """In log order; an announcement that cancels requests comes after them."""
    return sorted((told for each in found for told in each), key=lambda told: (told.sequence, told.status.HasField("client")))
