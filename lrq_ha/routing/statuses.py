"""The status entries of a group's log: what they say of each key, and only once they are safe.

Rules:
- A value that is not safe may be cut off again, so the one before it is kept until then.
- Of a client the last value counts; of a full sync the last request, and how it ended. A session that begins needs both: where the request stands,
  its snapshot begins.
- An end counts for its own request only: one that crossed a newer request on its way (the client had not heard of that yet) does not take its
  place. Nor does one that crossed a cancellation: what came between the two was left out, so the snapshot is not whole.
- A client that announces a provider is a new process, which begins anew with what is asked of it: a request before that which has not ended is
  cancelled there, here as in the client's process (`lrq_ha.publisher.fullsync`).
- A client is known from its first status on, for good. There are CLIENTS_MAX at most: of another one the door takes nothing (`has_room`), as it would
  go nowhere. Where a log has more, those that were told longest ago are not known, on any node.
- At most FULL_SYNCS_MAX full syncs are remembered: those that were told longest ago go first.
- A status has STATUS_BYTES_MAX at most, as it is one message of LRQ_Status. What is remembered of it, and stands in checkpoints, is what sessions
  go by (`_kept`), some hundred bytes.
- A status costs the same however many are known, or not safe yet; an announcement, what it cancels.
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
    """A status and the entry of the log that it stands in."""

    sequence: int
    status: pb.Status


def check(status: pb.Status) -> None:
    """Whether a status from a client says what its key says.

    Raises:
        MalformedInput: It does not, a name is not valid, it has no value, or that of a full sync says nothing.
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
    """What is remembered: neither the reason of a full sync, nor what this version does not know."""
    kept = pb.Status()
    kept.CopyFrom(status)
    kept.DiscardUnknownFields()
    if kept.HasField("full_sync"):
        kept.full_sync.ClearField("reason")
    return kept


def _says_nothing(status: pb.Status) -> bool:
    """Of a full sync that has no name, or of a state that there is not."""
    full_sync = status.full_sync
    return status.HasField("full_sync") and not (full_sync.request_id and full_sync.state in pb.FullSyncRequest.State.values())


class Statuses:
    """See above. Fed in log order; what says nothing, as the log of an older version may, is left out."""

    def __init__(self) -> None:
        self._safe = _Values()
        self._unsafe: deque[Told] = deque()  # ascending in sequence
        self._newest = _Values()  # the state after everything that was noted

    def noted(self, sequence: int, status: pb.Status) -> None:
        """Entry `sequence` says this."""
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
        """If a status would say nothing if it came next: the entry, safe or not, that it comes too late for. Else 0."""
        known = self._newest.full_syncs.get(status.key, ())
        return known[-1].sequence if known and _after(known, Told(0, status)) is known else 0

    def ends(self, status: pb.Status) -> bool:
        """Whether it ends a request that is known, safely or not, and that nothing has ended."""
        known = self._newest.full_syncs.get(status.key, ())
        if not known or status.full_sync.state == REQUESTED:
            return False
        last = known[-1].status.full_sync
        return last.state == REQUESTED and last.request_id == status.full_sync.request_id

    def has_room(self, client_name: str) -> bool:
        """Whether a client is known, safely or not, or one more may be."""
        clients = self._newest.clients
        return f"client/{client_name}" in clients or len(clients) < CLIENTS_MAX

    @property
    def clients(self) -> int:
        """How many are known."""
        return len(self._safe.clients)

    def since(self, sequence: int) -> list[Told]:
        """What is safe and stands behind entry `sequence`, in log order."""
        return self._safe.since(sequence)

    def of(self, client_name: str, destination: str) -> list[Told]:
        """What is safe of a client and its full sync for a destination, in log order."""
        client = self._safe.clients.get(client_key(client_name), ())
        return _ordered((self._safe.full_syncs.get(full_sync_key(client_name, destination), ()), client))

    def rows(self) -> list[Told]:
        """The state after everything that was noted, in log order, for a checkpoint that is appended next."""
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
"""What is known of a key, in log order: of a full sync its request, and how that ended."""


class _Values:
    """What counts, by key; the one told longest ago first."""

    def __init__(self) -> None:
        self.clients: dict[str, Known] = {}
        self.full_syncs: dict[str, Known] = {}
        self._open: dict[str, dict[str, None]] = {}  # of each client the keys of those that were requested, and have not ended

    def copy(self) -> _Values:
        copied = _Values()
        copied.clients, copied.full_syncs = dict(self.clients), dict(self.full_syncs)
        copied._open = {client_name: dict(keys) for client_name, keys in self._open.items()}
        return copied

    def tell(self, told: Told) -> None:
        """The next status."""
        if not told.status.HasField("client"):
            self._note(told.status.key, told)
            return
        self._announced(told)
        if told.status.client.full_sync_provider:
            for key in list(self._open.get(told.status.client.client_name, ())):
                self._note(key, told)

    def restore(self, told: Told) -> None:
        """The next row of a checkpoint: it counted there, whatever stands before it."""
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
    """What is known of a full sync after `told`, of it or of its client. `known` itself if that says nothing of it."""
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
    """In log order; where an announcement cancels requests, those before it."""
    return sorted((told for each in found for told in each), key=lambda told: (told.sequence, told.status.HasField("client")))
