"""The status entries of a group's log: the last value per key counts, and only once its entry is safe.

Rules: a value that is not safe may be cut off again, so the one before it is kept until then. An end of a full sync counts for its own request
only: one that crossed a newer request on its way (the client had not heard of that yet) does not take the request's place. At most KEYS_MAX
clients are remembered, and as many full syncs, so that these push no client out: those that were told longest ago go first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.errors import MalformedInput
from lrq_ha.routing.names import check_client_name, check_remote_id, client_key, full_sync_key

KEYS_MAX = 10_000


class Told(NamedTuple):
    """A status and the entry of the log that it stands in."""

    sequence: int
    status: pb.Status


def check(status: pb.Status) -> None:
    """Whether a status from a client says what its key says.

    Raises:
        MalformedInput: It does not, a name is not valid, or it has no value.
    """
    if status.HasField("client"):
        key = client_key(status.client.client_name)
    elif status.HasField("full_sync"):
        key = full_sync_key(check_client_name(status.full_sync.client_name), check_remote_id(status.full_sync.destination))
    else:
        raise MalformedInput("A status without a value", todo="Say what the client is, or how a full sync goes.")
    if status.key != key:
        raise MalformedInput(f"A status with the key {status.key!r} speaks of {key!r}", todo="Its key must be that.")


class Statuses:
    """See above. Fed in log order."""

    def __init__(self) -> None:
        self._clients: dict[str, Told] = {}  # safe, the one told longest ago first
        self._full_syncs: dict[str, Told] = {}  # likewise
        self._unsafe: list[Told] = []  # ascending in sequence

    def noted(self, sequence: int, status: pb.Status) -> None:
        """Entry `sequence` says this."""
        self._unsafe.append(Told(sequence, status))

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        while self._unsafe and self._unsafe[-1].sequence >= first:
            self._unsafe.pop()

    def safe(self, upto: int) -> None:
        """Entries up to `upto` are safe."""
        while self._unsafe and self._unsafe[0].sequence <= upto:
            told = self._unsafe.pop(0)
            values = self._clients if told.status.HasField("client") else self._full_syncs
            _tell(values, told)
            if len(values) > KEYS_MAX:
                del values[next(iter(values))]

    def last(self, key: str) -> pb.Status | None:
        """The newest value of a key, safe or not."""
        safe = self._clients.get(key) or self._full_syncs.get(key)
        newest = next((told for told in reversed(self._unsafe) if told.status.key == key), safe)
        return newest.status if newest is not None else None

    def since(self, sequence: int) -> list[Told]:
        """What is safe and stands behind entry `sequence`, in log order."""
        found: list[Told] = []
        for values in (self._clients, self._full_syncs):
            for told in reversed(values.values()):
                if told.sequence <= sequence:
                    break
                found.append(told)
        return sorted(found, key=_by_sequence)

    def rows(self) -> list[Told]:
        """The state after everything that was noted, in log order, for a checkpoint that is appended next."""
        newest = self._clients | self._full_syncs
        for told in self._unsafe:
            _tell(newest, told)
        return sorted(newest.values(), key=_by_sequence)

    def load(self, rows: Iterable[Told]) -> None:
        """Replaces everything by `rows` of a checkpoint that is safe."""
        ordered = sorted(rows, key=_by_sequence)
        self._clients = {told.status.key: told for told in ordered if told.status.HasField("client")}
        self._full_syncs = {told.status.key: told for told in ordered if not told.status.HasField("client")}
        self._unsafe = []


def _tell(values: dict[str, Told], told: Told) -> None:
    key = told.status.key
    if key not in values or not _crossed(values[key].status.full_sync, told.status.full_sync):
        values.pop(key, None)
        values[key] = told


def _crossed(request: pb.FullSyncRequest, end: pb.FullSyncRequest) -> bool:
    """Whether `end` is about another full sync than the one that was asked for last."""
    requested = pb.FullSyncRequest.REQUESTED
    return request.state == requested and end.state != requested and request.request_id != end.request_id


def _by_sequence(told: Told) -> int:
    return told.sequence
