"""The objects that the log has, as of any entry that is not applied yet. No I/O.

Rules:
- An entry counts when it is noted, in log order. A cut takes its changes back: former values are kept for entries that
  are not safe, or that the node has not come to.
- An entry names the kinds that the log has from there on. The log forgets objects of other kinds, and no broker
  deletes them for that.
"""

from __future__ import annotations

from collections import deque

from lrq_ha.proto import lrq_pb2 as pb

from .changes import Changes, changes_in, entries_of
from .objects import KINDS, Key, Objects

_Before = tuple[frozenset[str], dict[Key, str | None]]  # former kinds and values; None: there was no such object


class LoggedObjects:
    """The log's objects.

    Attributes:
        kinds: The kinds that the log has, as in the configuration.
        rows: The objects as of the last entry.
    """

    def __init__(self) -> None:
        self.kinds: frozenset[str] = frozenset()
        self.rows: Objects = {}
        self._before: deque[tuple[int, _Before]] = deque()

    def noted(self, sequence: int, entry: pb.DefinitionsChange) -> None:
        """Notes entry `sequence`."""
        changes, before = changes_in(entry), self.kinds
        kinds = frozenset(entry.kinds)
        gone = [key for key in self.rows if KINDS[key[0]].replicate not in kinds] if before - kinds else []
        touched = {key: self.rows.get(key) for key in (*changes.deleted, *changes.set, *gone)}
        self._before.append((sequence, (before, touched)))
        self.kinds = kinds
        for key in (*changes.deleted, *gone):
            self.rows.pop(key, None)
        self.rows.update(changes.set)

    def safe(self, upto: int, reached: int) -> None:
        """All entries up to `upto` are safe, and the node has come to entry `reached`."""
        while self._before and self._before[0][0] <= min(upto, reached):
            self._before.popleft()

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        while self._before and self._before[-1][0] >= first:
            self.kinds = _take_back(self.rows, self._before.pop()[1])

    def at(self, sequence: int) -> tuple[frozenset[str], Objects]:
        """Kinds and objects after an entry that the node has not come past."""
        kinds, rows = self.kinds, dict(self.rows)
        for when, before in reversed(self._before):
            if when <= sequence:
                break
            kinds = _take_back(rows, before)
        return kinds, rows

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def export(self) -> pb.DefinitionsChange:
        """Everything, for a CHECKPOINT."""
        whole = pb.DefinitionsChange(kinds=sorted(self.kinds))
        for part in entries_of(Changes(self.rows, frozenset()), self.kinds):
            whole.set.extend(part.set)
        return whole

    def restore(self, entry: pb.DefinitionsChange) -> None:
        """Starts from a CHECKPOINT, which is safe."""
        self.kinds, self.rows = frozenset(entry.kinds), changes_in(entry).set
        self._before.clear()


def _take_back(rows: Objects, before: _Before) -> frozenset[str]:
    """Undoes one entry; returns the former kinds."""
    kinds, values = before
    for key, value in values.items():
        if value is None:
            rows.pop(key, None)
        else:
            rows[key] = value
    return kinds
