"""Finds places in a routing queue's stream by bisection, with single reads.

A node writes its last entries again when its sidecar starts. The generation in a message's stamp grows with each start, so a stream is a row of
*lives*: within one, positions grow; a life may begin with entries that the life before has written.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import NamedTuple

from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START
from lrq_ha.streams.message import locate
from lrq_ha.streams.node_connection import NodeConnection

from .queue_entry import EntryReader, life_of

LIVES_MAX = 8
IDLE_S = 0.5


class Place(NamedTuple):
    """A message that has an entry with a position.

    Attributes:
        offset: Of the message in the stream.
        last: The life in which it was written, and the sequence of its last entry: bisection compares one of the two.
        position: Of its last entry.
    """

    offset: int
    last: Position
    position: Position


class Places:
    """The messages of one queue between two offsets.

    Args:
        node: Where it is read.
        queue: The queue's name.
        head, tail: Offsets of the first and the last message.
    """

    def __init__(self, node: NodeConnection, queue: str, head: int, tail: int) -> None:
        self._node = node
        self._queue = queue
        self._head = head
        self._end = Place(tail, Position(2**64, 2**64), START)  # counts as behind everything

    def find_sequence(self, sequence: int) -> int:
        """The offset of a message before the first copy of entry `sequence`, or of the first message."""
        head, high = self.at(self._queue, self._head), self._end
        for _ in range(LIVES_MAX):
            if head.last.sequence >= sequence or head.offset >= high.offset:
                return self._head
            found = locate(self, self._queue, head, high, lambda place: place.last.sequence < sequence)
            earlier = self._end_of_life_before(found)
            if earlier is None or earlier.last.sequence < sequence:
                return found.offset
            high = earlier
        return self._head

    def find_written(self, offset: int) -> Position:
        """The last position that the life before the one at `offset` has written: what comes again up to it is a repeat. (0, 0): none is known."""
        place = self.at(self._queue, offset)
        earlier = self._end_of_life_before(place) if place is not self._end else None
        return earlier.position if earlier else START

    def at(self, queue: str, offset: int) -> Place:
        """The first message from `offset` on that has an entry with a position; behind all of them, the end."""
        with closing(self._read(queue, offset)) as places:
            return next(places, self._end)

    def _end_of_life_before(self, place: Place) -> Place | None:
        """The last message of the life before that of `place`. None: there is none."""
        life = place.last.epoch
        head = self.at(self._queue, self._head)
        if head.last.epoch >= life:
            return None
        found = locate(self, self._queue, head, place, lambda place: place.last.epoch < life)
        with closing(self._read(self._queue, found.offset)) as places:
            for each in places:
                if each.last.epoch >= life or each.offset >= place.offset:
                    break
                found = each
        return found

    def _read(self, queue: str, offset: int) -> Generator[Place, None, None]:
        reader = EntryReader(queue)
        with closing(self._node.follow_records(queue, offset, IDLE_S, 1)) as arriving:
            for record in (record for records in arriving for record in records):
                if record.offset > self._end.offset:
                    return
                life = life_of(record)
                position = next((entry.position for entry in reversed(reader.take(record)) if entry.position), None)
                if life is not None and position is not None:
                    yield Place(record.offset, Position(life, position.sequence), position)
                if record.offset >= self._end.offset:
                    return
