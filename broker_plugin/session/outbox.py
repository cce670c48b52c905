"""The frames that a connection has for its broker: one FIFO, which an item leaves when its log entry is safe (R5).

Publishes, acks and declarations of one client so keep their order, also across channels. While the own broker takes nothing for the log, acks and
rejections do not wait for entries of their own: else an alarm could never end (docs/operations/alarms.md). They still wait behind a publish of their
connection that waits for its entry.

An item's frames are all of one channel. A broker may close thousands of a client's channels: the items of one are found without a scan of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..amqp import frames
from .session import ClientSession


class _Item:
    """A waiting item: its bytes until entry `sequence` is safe. A dropped item has no bytes. `number`: its place among all that ever had to wait."""

    __slots__ = ("data", "number", "sequence")

    def __init__(self, data: bytes, sequence: int, number: int) -> None:
        self.data = data
        self.sequence = sequence
        self.number = number


class Outbox:
    """The FIFO of one connection.

    Attributes:
        waiting_bytes: Size of the items that wait.
        total: Items that ever had to wait.
        full: The broker reads more slowly than the log gets safe: no item leaves.
        sent_at: When bytes were last written (seconds of the door's clock).
    """

    __slots__ = ("_dropped", "_items", "_of", "_replica", "_session", "full", "sent_at", "total", "waiting_bytes")

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._replica = session.replica
        self._items: deque[_Item] = deque()
        self._of: dict[bytes, deque[_Item]] = {}  # the items of each channel, by its number as it stands in a frame
        self._dropped = 0  # items without bytes, behind one that waits
        self.waiting_bytes = 0
        self.total = 0
        self.full = False
        self.sent_at = session.door.now()

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def gone(self) -> int:
        """The highest item number up to which no item waits any more."""
        return self._items[0].number - 1 if self._items else self.total

    def put(self, data: bytes, sequence: int = 0) -> None:
        """Sends frames of one channel when entry `sequence` is safe (0: at once), after all items that were put before."""
        if sequence and self._session.door.log_blocked and frames.settles(data):
            sequence = 0
        safe = self._replica.progress.safe
        if not self._items and sequence <= safe and not self.full:
            self.write(data)
            return
        self.total += 1
        item = _Item(data, sequence, self.total)
        self._items.append(item)
        of_channel = self._of.get(data[1:3])
        if of_channel is None:
            of_channel = self._of[data[1:3]] = deque()
        of_channel.append(item)
        self.waiting_bytes += len(data)
        if sequence > safe:
            self._replica.progress.waiting_safe.add(self._session)

    def write(self, data: bytes) -> None:
        """Sends bytes now, ahead of all items."""
        self._write((data,))

    def _write(self, pieces: Sequence[bytes]) -> None:
        self.sent_at = self._session.door.now()
        if not self._session.broker.is_closing():
            self._session.broker.writelines(pieces)

    def pump(self) -> None:
        """Sends the items that may go now."""
        items, safe = self._items, self._replica.progress.safe
        ready = []
        while items and items[0].sequence <= safe and not self.full:
            data = items.popleft().data
            if data:
                self.waiting_bytes -= len(data)
                ready.append(data)
                of_channel = self._of[data[1:3]]
                of_channel.popleft()
                if not of_channel:
                    del self._of[data[1:3]]
            else:
                self._dropped -= 1
        if ready:
            self._write(ready)
        if items:
            self._replica.progress.waiting_safe.add(self._session)

    def release_acks(self) -> None:
        """The log takes nothing from now on: acks and rejections no longer wait for it."""
        for item in self._items:
            if frames.settles(item.data):
                item.sequence = 0

    def drop(self, channel: int) -> bool:
        """The broker has closed a channel: its items must not reach a new channel of that number. Returns whether there were any."""
        dropped = self._of.pop(channel.to_bytes(2, "big"), ())
        for item in dropped:
            self.waiting_bytes -= len(item.data)
            item.data, item.sequence = b"", 0
        self._dropped += len(dropped)
        while self._items and not self._items[0].data:
            self._items.popleft()
            self._dropped -= 1
        if 2 * self._dropped > len(self._items):
            self._items, self._dropped = deque(item for item in self._items if item.data), 0
        return bool(dropped)
