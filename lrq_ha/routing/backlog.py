"""How much of a receive queue its receivers have not applied, in bytes. Pure.

Rule: the size of the queue is remembered at some positions only, so what a receiver lacks is told too large by up to the bytes between two of them;
of what came before this node knew the queue, only the beginnings of snapshots are known.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START
from lrq_ha.routing.receive_state import ReceiveState

MARKS = 64  # in what a stream surely keeps


class Mark(NamedTuple):
    """So many bytes had come to the queue when `last` was its last position."""

    last: Position
    size: int


class Backlog:
    """The marks of one queue.

    Args:
        kept_bytes: What its stream surely keeps.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._every = max(1, kept_bytes // MARKS)
        self._marks: deque[Mark] = deque(maxlen=2 * MARKS)

    def note(self, state: ReceiveState) -> None:
        """The queue's state has become `state`."""
        if not self._marks:
            known = (Mark(state.whole, state.whole_size), Mark(state.begun, state.begun_size))
            self._marks += sorted({mark for mark in known if mark.last != START})
        if not self._marks or state.size >= self._marks[-1].size + self._every:
            self._marks.append(Mark(state.last, state.size))

    def bytes_behind(self, position: Position, state: ReceiveState) -> int:
        """Bytes of the queue behind `position`, at most. `state`: the queue's."""
        if position >= state.last:
            return 0
        return state.size - max((mark.size for mark in self._marks if mark.last <= position), default=0)
