"""The status entries of a group's log: the last value per key counts, and only once its entry is safe.

Rules: a value that is not safe may be cut off again, so the one before it is kept until then. An end of a full sync counts for its own request
only: one that crossed a newer request on its way (the client had not heard of that yet) does not take the request's place. At most KEYS_MAX
keys are remembered: the ones that were told longest ago go first, as an application that still lives tells its status again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lrq_ha.proto import lrq_pb2 as pb

KEYS_MAX = 10_000


class Told(NamedTuple):
    """A status and the entry of the log that it stands in."""

    sequence: int
    status: pb.Status


class Statuses:
    """See above. Fed in log order."""

    def __init__(self) -> None:
        self._told: dict[str, Told] = {}  # safe, the one told longest ago first
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
            _tell(self._told, self._unsafe.pop(0))
            if len(self._told) > KEYS_MAX:
                del self._told[next(iter(self._told))]

    def last(self, key: str) -> pb.Status | None:
        """The newest value of a key, safe or not."""
        newest = next((told for told in reversed(self._unsafe) if told.status.key == key), self._told.get(key))
        return newest.status if newest is not None else None

    def since(self, sequence: int) -> list[Told]:
        """What is safe and stands behind entry `sequence`, in log order."""
        return sorted((told for told in self._told.values() if told.sequence > sequence), key=_by_sequence)

    def rows(self) -> list[Told]:
        """The state after everything that was noted, in log order, for a checkpoint that is appended next."""
        newest = dict(self._told)
        for told in self._unsafe:
            _tell(newest, told)
        return sorted(newest.values(), key=_by_sequence)

    def load(self, rows: Iterable[Told]) -> None:
        """Replaces everything by `rows` of a checkpoint that is safe."""
        self._told = {told.status.key: told for told in sorted(rows, key=_by_sequence)}
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
