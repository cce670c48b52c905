"""A session's readers of the views, and the transactions that they have read ahead.

Rules:

  - One reader per view counts, the newest; output of an older one is ignored.
  - Only the client's own transactions count, and only the destination's share of them.
  - Bounded: a reader pauses when more than `read_ahead_bytes_max` waits, and resumes when half of that is left.
"""

from __future__ import annotations

from collections.abc import Callable

from lrq_ha.replication.positions import Position
from lrq_ha.routing import messages as m
from lrq_ha.routing.merge import Item, Merge
from lrq_ha.routing.messages import Effect, Stream
from lrq_ha.routing.route import Route


class Reading:
    """The readers of one session.

    Args:
        route: The source, client and destination.
        merge: Gets the transactions.
        read_ahead_bytes_max: Per view, plus the bytes that the reader has under way.
        emit: Called with the driver's effects.
    """

    def __init__(self, route: Route, merge: Merge, read_ahead_bytes_max: int, emit: Callable[[Effect], None]) -> None:
        self._route = route
        self._merge = merge
        self._read_ahead_bytes_max = read_ahead_bytes_max
        self._emit = emit
        self._readers: dict[int, Stream] = {}  # the readers that count
        self._newest = 0  # number of the newest one
        self._paused: set[Stream] = set()

    def start(self, stream: Stream, after: Position, from_sequence: int) -> None:
        """Starts a reader at `from_sequence`; its transactions up to `after` are left out."""
        self._forget(stream)
        self._merge.open(stream, after)
        self._newest += 1
        self._readers[self._newest] = stream
        self._emit(m.StartRead(stream, from_sequence, self._newest))

    def stop(self, stream: Stream) -> None:
        """Stops the reader of a view, if there is one; its transactions are dropped."""
        if self._merge.is_open(stream):
            self._merge.close(stream)
            self._forget(stream)
            self._emit(m.StopRead(stream))

    def _forget(self, stream: Stream) -> None:
        self._readers = {number: of for number, of in self._readers.items() if of is not stream}
        self._paused.discard(stream)

    def trimmed(self, event: m.Trimmed) -> Stream | None:
        """A reader has ended. Returns the view that has no reader any more; None if the reader did not count."""
        stream = self._readers.pop(event.reader, None)
        if stream is not None:
            self._merge.close(stream)
        return stream

    def read(self, event: m.Read) -> Position | None:
        """Takes transactions of a reader. Returns the position up to which it has read; None if it does not count."""
        stream = self._readers.get(event.reader)
        if stream is None:
            return None
        items = []
        for entry in event.entries:
            if entry.client_name == self._route.client_name and (share := entry.share(self._route.destination)) is not None:
                items.append(Item(entry.position, stream, share))
        self._merge.add(stream, items, event.through)
        return event.through

    def read_end(self, event: m.ReadEnd) -> Position | None:
        """A reader has come to the end of its view. Returns as `read` does."""
        stream = self._readers.get(event.reader)
        if stream is None:
            return None
        self._merge.add(stream, [], event.through)
        return event.through

    def regulate(self) -> None:
        """Pauses or resumes readers."""
        for stream in Stream:
            if self._merge.is_open(stream):
                self._regulate(stream)

    def _regulate(self, stream: Stream) -> None:
        waiting_bytes, max_bytes = self._merge.waiting_bytes(stream), self._read_ahead_bytes_max
        if stream in self._paused and waiting_bytes <= max_bytes // 2:
            self._paused.remove(stream)
            self._emit(m.ResumeRead(stream))
        elif stream not in self._paused and waiting_bytes > max_bytes:
            self._paused.add(stream)
            self._emit(m.PauseRead(stream))
