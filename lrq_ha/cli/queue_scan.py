"""Reads the entries of one routing queue for `lrq-ha peek`, at one node.

The stream's last and first message are looked up first. The beginning is found by bisection, or counted back from the end. A consumer of peek's own
reads from there on; its acks only ask a stream for more, so nothing is changed.

Rules:

- Reading begins LOOK_BACK_MESSAGES before the first entry to show, so that a hole just before it is seen.
- A repeat is recognised by the last position that the life before has written, also where its first copy is not read (`queue_places`).
- Without `follow`, reading ends with the message that was the last one at its beginning.
- At most PREFETCH_MESSAGES, or one chunk of the stream, wait here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from lrq_ha.errors import LrqError
from lrq_ha.replication.positions import Position, epoch_name
from lrq_ha.routing.chain import START
from lrq_ha.streams.message import Record
from lrq_ha.streams.node_connection import NodeConnection

from .queue_entry import Entry, EntryReader
from .queue_places import IDLE_S, Places

LOOK_BACK_MESSAGES = 20
PREFETCH_MESSAGES = 32


@dataclass(frozen=True)
class Wanted:
    """What to read.

    Attributes:
        queue: The queue's name.
        sequence: Of the first entry; None: as `newest` says. 0: from the beginning.
        count: How many entries; None: no limit. Of the newest ones, those that are there already.
        follow: Whether to wait for further entries.
    """

    queue: str
    sequence: int | None
    count: int | None
    follow: bool

    @property
    def newest(self) -> bool:
        """Whether the newest entries are wanted."""
        return self.sequence is None


class Scan:
    """The reading of one queue.

    Args:
        node: Where it is read.
        wanted: What to read.

    Attributes:
        is_empty: The queue holds no message.
        gone: Entries before the first one shown are not in the queue any more.
        end: The last position that was read; (0, 0): none.
    """

    def __init__(self, node: NodeConnection, wanted: Wanted) -> None:
        self._node = node
        self._wanted = wanted
        tail = node.tail_record(wanted.queue)
        head = node.first_record(wanted.queue) if tail else None
        self.is_empty = head is None
        self._head = head.offset if head else 0
        self._tail = tail.offset if tail else -1
        self._places = Places(node, wanted.queue, self._head, self._tail)
        self.gone = False
        self.end = START

    def entries(self) -> Iterator[Entry]:
        """The entries, in stream order.

        Raises:
            PastEnd: There is no entry from `sequence` on, and `follow` is not set.
            MissingQueue, ConnectionLost, StreamSilent: As NodeConnection.follow.
        """
        if self.is_empty and not self._wanted.follow:
            return
        begin = self._begin()
        at_head = begin <= self._head
        reader = EntryReader(self._wanted.queue, from_head=at_head, written=START if at_head else self._places.find_written(begin))
        read = self._read_newest if self._wanted.newest else self._read_from
        with closing(self._node.follow_records(self._wanted.queue, begin, IDLE_S, PREFETCH_MESSAGES)) as arriving:
            records = (record for records in arriving for record in records)
            yield from read(reader, records, at_head)

    def _read_newest(self, reader: EntryReader, records: Iterator[Record], _at_head: bool) -> Iterator[Entry]:
        newest: deque[Entry] = deque(maxlen=self._wanted.count)
        for record in records if not self.is_empty else ():
            newest += reader.take(record)
            if record.offset >= self._tail:
                break
        self.end = reader.seen
        yield from newest
        if self._wanted.follow:
            for record in records:
                yield from reader.take(record)

    def _read_from(self, reader: EntryReader, records: Iterator[Record], at_head: bool) -> Iterator[Entry]:
        first, left = self._wanted.sequence or 0, self._wanted.count
        shows = first == 0
        for record in records:
            for entry in reader.take(record):
                if not shows and entry.position is not None and entry.position.sequence >= first:
                    shows = True
                    self.gone = at_head and self._head > 0 and entry.position.sequence > first
                if shows:
                    yield entry
                    left = left and left - 1
                    if left == 0:
                        return
            self.end = reader.seen
            if not self._wanted.follow and record.offset >= self._tail:
                break
        if not shows:
            raise PastEnd(self._wanted.queue, first, self.end)

    def _begin(self) -> int:
        """The offset to read from."""
        if self.is_empty or self._wanted.sequence == 0:
            return self._head
        if self._wanted.sequence is None:
            offset = self._tail - (self._wanted.count or 0)
        else:
            offset = self._places.find_sequence(self._wanted.sequence)
        return max(offset - LOOK_BACK_MESSAGES, self._head)


class PastEnd(LrqError):
    """There is no entry where reading is to begin."""

    def __init__(self, queue: str, sequence: int, end: Position) -> None:
        ends = f"ends with entry {end.sequence} of epoch {epoch_name(end.epoch)}" if end != START else "holds no entry"
        super().__init__(f"Queue {queue} {ends}: there is no entry {sequence}, and none behind it", todo="Wait for it with --follow")
