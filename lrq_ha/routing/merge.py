"""Merges transactions that are read from several views of one log back into log order.

Rules:

- An item may go only when no open stream can still bring an earlier one: each has a later item waiting, or was read
  through to that position.
- The user bounds it: `waiting_bytes` is the size of the waiting items per stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lrq_ha.replication.positions import Position
from lrq_ha.routing.messages import Stream
from lrq_ha.routing.shares import Share


class Item(NamedTuple):
    """One transaction of the chain."""

    position: Position
    stream: Stream
    share: Share

    @property
    def size(self) -> int:
        """Its bytes in a batch."""
        return len(self.share.body)


@dataclass(slots=True)
class _Input:
    through: Position  # everything up to here was given
    waiting: deque[Item] = field(default_factory=deque)  # ascending; all positions <= through
    waiting_bytes: int = 0


class Merge:
    """Streams, each opened at a position, and their items in log order."""

    def __init__(self) -> None:
        self._inputs: dict[Stream, _Input] = {}

    def open(self, stream: Stream, after: Position) -> None:
        """From now on `stream` counts, from behind `after`; its waiting items are dropped."""
        self._inputs[stream] = _Input(after)

    def close(self, stream: Stream) -> None:
        self._inputs.pop(stream, None)

    def is_open(self, stream: Stream) -> bool:
        return stream in self._inputs

    def through(self, stream: Stream) -> Position:
        return self._inputs[stream].through

    def waiting_bytes(self, stream: Stream) -> int:
        return self._inputs[stream].waiting_bytes

    def add(self, stream: Stream, items: Iterable[Item], through: Position) -> None:
        """`items` of `stream` in log order, which was read up to `through`. Items that were given before are skipped."""
        source = self._inputs[stream]
        for item in items:
            if item.position > source.through:
                source.waiting.append(item)
                source.waiting_bytes += item.size
        source.through = max(source.through, through)

    def head(self) -> Item | None:
        """The earliest waiting item; it may go if `ready` says so."""
        first: Item | None = None
        for source in self._inputs.values():
            if source.waiting and (first is None or source.waiting[0].position < first.position):
                first = source.waiting[0]
        return first

    def ready(self, position: Position) -> bool:
        """Whether everything before `position` is known; `position` is at or before the head's."""
        return all(source.waiting or source.through >= position for source in self._inputs.values())

    def pop(self) -> Item:
        """Takes the head. Raises IndexError if there is none."""
        head = self.head()
        if head is None:
            raise IndexError("nothing waits")
        source = self._inputs[head.stream]
        source.waiting_bytes -= head.size
        return source.waiting.popleft()
