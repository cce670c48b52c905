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
- A status has STATUS_BYTES_MAX at most: each stands in checkpoints, and in one message of LRQ_Status.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.errors import MalformedInput
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


def _says_nothing(status: pb.Status) -> bool:
    """Of a full sync that has no name, or of a state that there is not."""
    full_sync = status.full_sync
    return status.HasField("full_sync") and not (full_sync.request_id and full_sync.state in pb.FullSyncRequest.State.values())


class Statuses:
    """See above. Fed in log order; what says nothing, as the log of an older version may, is left out."""

    def __init__(self) -> None:
        self._safe = _Values({}, {})
        self._unsafe: list[Told] = []  # ascending in sequence

    def noted(self, sequence: int, status: pb.Status) -> None:
        """Entry `sequence` says this."""
        if not _says_nothing(status):
            self._unsafe.append(Told(sequence, status))

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        while self._unsafe and self._unsafe[-1].sequence >= first:
            self._unsafe.pop()

    def safe(self, upto: int) -> None:
        """Entries up to `upto` are safe."""
        while self._unsafe and self._unsafe[0].sequence <= upto:
            self._safe.tell(self._unsafe.pop(0))
            self._safe.bound()

    def overtaken(self, status: pb.Status) -> int:
        """If a status would say nothing if it came next: the entry, safe or not, that it comes too late for. Else 0."""
        if not status.HasField("full_sync"):
            return 0
        known = self._safe.full_syncs.get(status.key, ())
        for told in self._unsafe:
            if told.status.key == status.key or told.status.client.client_name == status.full_sync.client_name:
                known = _after(known, told)
        return known[-1].sequence if known and _after(known, Told(0, status)) is known else 0

    def has_room(self, client_name: str) -> bool:
        """Whether a client is known, safely or not, or one more may be."""
        clients, key = self._safe.clients, f"client/{client_name}"
        if key in clients or len(clients) + len(self._unsafe) < CLIENTS_MAX:
            return True
        coming = {told.status.key for told in self._unsafe if told.status.HasField("client")}
        return key in coming or len(coming | clients.keys()) < CLIENTS_MAX

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
        newest = _Values(dict(self._safe.clients), dict(self._safe.full_syncs))
        for told in self._unsafe:
            newest.tell(told)
        return newest.since(0)

    def load(self, rows: Iterable[Told]) -> None:
        """Replaces everything by `rows` of a checkpoint that is safe."""
        self._safe = _Values({}, {})
        for told in _ordered((rows,)):
            if _says_nothing(told.status):
                continue
            values = self._safe.of(told.status)
            values[told.status.key] = (*values.pop(told.status.key, ()), told)
        self._safe.bound()
        self._unsafe = []


Known = tuple[Told, ...]
"""What is known of a key, in log order: of a full sync its request, and how that ended."""


class _Values(NamedTuple):
    """By key; the one told longest ago first."""

    clients: dict[str, Known]
    full_syncs: dict[str, Known]

    def of(self, status: pb.Status) -> dict[str, Known]:
        return self.clients if status.HasField("client") else self.full_syncs

    def tell(self, told: Told) -> None:
        if not told.status.HasField("client"):
            self._note(told.status.key, told)
            return
        self.clients.pop(told.status.key, None)
        self.clients[told.status.key] = (told,)
        full_syncs = full_sync_key(told.status.client.client_name, "")
        for key in [key for key in self.full_syncs if key.startswith(full_syncs)]:
            self._note(key, told)

    def _note(self, key: str, told: Told) -> None:
        known = self.full_syncs.get(key, ())
        after = _after(known, told)
        if after is not known:
            self.full_syncs.pop(key, None)
            self.full_syncs[key] = after

    def bound(self) -> None:
        for values, limit in zip(self, (CLIENTS_MAX, FULL_SYNCS_MAX)):
            while len(values) > limit:
                del values[next(iter(values))]

    def since(self, sequence: int) -> list[Told]:
        found: list[Known] = []
        for values in self:
            for known in reversed(values.values()):
                if known[-1].sequence <= sequence:
                    break
                found.append(tuple(told for told in known if told.sequence > sequence))
        return _ordered(found)


def _after(known: Known, told: Told) -> Known:
    """What is known of a full sync after `told`, of it or of its client. `known` itself if that says nothing of it."""
    status, last = told.status, known[-1].status.full_sync if known else None
    if status.HasField("client"):
        if last is None or last.state != REQUESTED or not status.client.full_sync_provider:
            return known
        status = pb.Status(key=known[-1].status.key, full_sync=last)
        status.full_sync.state, status.full_sync.reason = CANCELLED, "the client has announced a provider anew"
    elif last is None or status.full_sync.state == REQUESTED:
        return (told,)
    elif last.request_id != status.full_sync.request_id or last.state == CANCELLED:
        return known
    return (known[0], Told(told.sequence, status))


def _ordered(found: Iterable[Iterable[Told]]) -> list[Told]:
    """In log order; where an announcement cancels requests, those before it."""
    return sorted((told for each in found for told in each), key=lambda told: (told.sequence, told.status.HasField("client")))
