"""What a connection has for its broker: one FIFO; an item leaves it when the entry that it waits for is safe (R5).

So a publish, an ack and a declaration of one client keep their order, also across channels. While the own broker takes nothing for the log, acks and
rejections do not wait for entries of their own: else an alarm could never end (docs/operations.md, "Alarms"). Behind a publish of the same connection
that waits for its entry, they wait all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import frames

if TYPE_CHECKING:
    from .relay import Relay


class Outbox:
    """See above.

    Attributes:
        bytes: What waits.
        total: Items that ever had to wait.
        full: The broker does not read as fast as the log gets safe: nothing leaves.
        sent_at: When something was written last (the door's clock).
    """

    __slots__ = ("_items", "_relay", "_replica", "bytes", "full", "sent_at", "total")

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._replica = relay.replica
        self._items: deque[tuple[int, bytes]] = deque()
        self.bytes = 0
        self.total = 0
        self.full = False
        self.sent_at = relay.door.now()

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def gone(self) -> int:
        """How many of `total` wait no more."""
        return self.total - len(self._items)

    def put(self, data: bytes, sequence: int = 0) -> None:
        """These bytes go when entry `sequence` is safe (0: at once), after everything that was put in before."""
        if sequence and self._relay.door.log_blocked and frames.settles(data):
            sequence = 0
        safe = self._replica.progress.safe
        if not self._items and sequence <= safe and not self.full:
            self.write(data)
            return
        self._items.append((sequence, data))
        self.total += 1
        self.bytes += len(data)
        if sequence > safe:
            self._replica.progress.waiting_safe.add(self._relay)

    def write(self, data: bytes) -> None:
        """These bytes go now, whatever waits."""
        self._write((data,))

    def _write(self, pieces: Sequence[bytes]) -> None:
        self.sent_at = self._relay.door.now()
        if not self._relay.broker.is_closing():
            self._relay.broker.writelines(pieces)

    def pump(self) -> None:
        """Sends what may go now."""
        items, safe = self._items, self._replica.progress.safe
        ready = []
        while items and items[0][0] <= safe and not self.full:
            data = items.popleft()[1]
            self.bytes -= len(data)
            ready.append(data)
        if ready:
            self._write(ready)
        if items:
            self._replica.progress.waiting_safe.add(self._relay)

    def release_acks(self) -> None:
        """The log takes nothing from now on: what settles deliveries no longer waits for it."""
        self._items = deque((0 if frames.settles(data) else sequence, data) for sequence, data in self._items)

    def drop(self, channel: int) -> bool:
        """The broker has closed this channel: what waits for it must not reach one that is opened anew under its number. Returns whether any did."""
        before = self.bytes
        kept: deque[tuple[int, bytes]] = deque()
        for sequence, data in self._items:
            items, _ = frames.scan(data, 0, frames.FRAME_MAX_ANY_BYTES, 1 << 62)
            if any(item[1] == channel for item in items):
                self.bytes -= len(data)
                data = b"".join(data[item[2] - 7 : frames.end_of(item)] for item in items if item[1] != channel)
                if not data:
                    continue
                self.bytes += len(data)
            kept.append((sequence, data))
        self._items = kept
        return self.bytes < before
