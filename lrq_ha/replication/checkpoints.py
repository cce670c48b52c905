"""The CHECKPOINTs of a node's own log: where a restart begins to read, and from where a backup catches up (R7).

Rules:

- A CHECKPOINT is noted when it is appended to the own stream or read from it, with the state of the log that only this stream knows there.
- A CHECKPOINT may be a restart's start once its offset in the stream is known and everything up to it is applied here: then it is safe,
  and no entry before it is needed.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

KEPT_MAX = 1_000
UNKNOWN = -1
"""Offset of a CHECKPOINT that has not been looked up in the stream yet."""


@dataclass(frozen=True, slots=True)
class StartPoint:
    """A CHECKPOINT in the own stream.

    Args:
        sequence, epoch: Sequence and epoch of the entry.
        leader: Epoch of the primary that wrote or pushed it; no higher epoch stands before it in this stream (R2).
        offset: Of its record in the stream; UNKNOWN if it was not looked up.
        in_set: Whether this node's stream says that the node is in the set.
        out_since: (epoch, end) of the leader that told this node that it is out of the set (R13); (0, 0) if none did.
        base: The CHECKPOINT at which the log began, if the node was joining there (R17); else 0.
    """

    sequence: int
    epoch: int
    leader: int
    offset: int
    in_set: bool
    out_since: tuple[int, int] = (0, 0)
    base: int = 0


def _by_sequence(point: StartPoint) -> int:
    return point.sequence


class Checkpoints:
    """The CHECKPOINTs of the own log. `_points` ascend in sequence."""

    def __init__(self) -> None:
        self._points: list[StartPoint] = []

    @property
    def last(self) -> int:
        """Sequence of the newest CHECKPOINT; 0 if there is none."""
        return self._points[-1].sequence if self._points else 0

    def noted(self, point: StartPoint) -> None:
        """The log has grown by this CHECKPOINT."""
        self._points.append(point)
        if len(self._points) > KEPT_MAX:
            del self._points[1 : KEPT_MAX // 2 : 2]  # the oldest stays: a backup may be that far behind

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        while self._points and self._points[-1].sequence >= first:
            self._points.pop()

    def to_locate(self, durable: int) -> StartPoint | None:
        """The newest CHECKPOINT, if its offset is unknown and the stream has confirmed it."""
        index = bisect_right(self._points, durable, key=_by_sequence) - 1
        return self._points[index] if index >= 0 and self._points[index].offset == UNKNOWN else None

    def located(self, point: StartPoint, offset: int) -> None:
        """The CHECKPOINT `point` stands at `offset`."""
        if point in self._points:
            self._points[self._points.index(point)] = replace(point, offset=offset)

    def start(self, applied: int) -> StartPoint | None:
        """The start for a restart that has applied everything up to `applied`; None: the first record."""
        upto = bisect_right(self._points, applied, key=_by_sequence)
        return next((point for point in reversed(self._points[:upto]) if point.offset != UNKNOWN), None)
