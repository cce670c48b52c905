"""The distance of a receiver from the log's end in bytes, and whether the broker may drop entries that it needs. Pure.

Rules:

- The broker drops the oldest segments of a stream beyond a size, whether or not a receiver needs them.
- A receiver's distance is measured from marks: the log's size at some of its entries. Marks stand in each CHECKPOINT, so the next leader
  knows them too.
- The estimate errs upwards: a mark is never behind its entry, and a record counts for more than it takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

DANGER_SHARE = 0.5
"""Part of the log's size: a receiver that lacks more than this is in danger of falling off the log."""
MARKS_MAX = 1_024
MARKS_TOLD_MAX = 64
RECORD_BYTES = 320
"""Size of a record in a stream beside its body: headers, and the broker's own share (see `tests/integration/test_catching_up.py`)."""

Mark = tuple[int, int]
"""Sequence of an entry, and the bytes of the log up to it."""


class Retention:
    """The log's size at some of its entries.

    Args:
        log_bytes_max: Size of the log beyond which the broker drops its oldest segments.
        segment_bytes: Bytes that the broker drops at a time.
    """

    def __init__(self, log_bytes_max: int, segment_bytes: int = 0) -> None:
        self._danger = int(log_bytes_max * DANGER_SHARE)
        self._kept = log_bytes_max - segment_bytes
        self._every = max(1, log_bytes_max // MARKS_MAX)
        self._sequences: list[int] = [0]  # ascending; `_bytes` has the bytes up to each
        self._bytes: list[int] = [0]
        self._end: Mark = (0, 0)

    def appended(self, last: int, size: int) -> None:
        """A batch of `size` bytes that ends with entry `last` was appended, or read at a start. Dropped entries still count."""
        total = self._end[1] + size + RECORD_BYTES
        self._end = (last, total)
        while self._sequences[-1] >= last:  # a batch there was cut off
            self._sequences.pop()
            self._bytes.pop()
        if total - self._bytes[-1] >= self._every:
            self._sequences.append(last)
            self._bytes.append(total)
            if len(self._sequences) > 2 * MARKS_MAX:
                del self._sequences[1:MARKS_MAX], self._bytes[1:MARKS_MAX]

    def export(self) -> list[Mark]:
        """Marks for a CHECKPOINT that is appended next: the end of the log, and some before it."""
        marks = list(zip(self._sequences, self._bytes))
        told = marks[:: -(-len(marks) // MARKS_TOLD_MAX)]
        return [*told, *([self._end] if self._end[0] > told[-1][0] else [])]

    def restore(self, marks: Sequence[Mark]) -> None:
        """Begins with the marks of a CHECKPOINT; a CHECKPOINT of an older version has none, and changes nothing."""
        if marks:
            self._sequences, self._bytes = [sequence for sequence, _ in marks], [size for _, size in marks]
            self._end = marks[-1]

    def behind(self, acknowledged: int) -> int:
        """Bytes that a receiver lacks which has everything up to entry `acknowledged`."""
        if acknowledged >= self._end[0]:
            return 0
        return self._end[1] - self._bytes[bisect_right(self._sequences, acknowledged) - 1]

    @property
    def entry_bytes(self) -> float:
        """Mean size of an entry; 0 without entries."""
        last, size = self._end
        return size / last if last else 0.0

    def left(self, acknowledged: int) -> int:
        """Bytes that may still be appended before the broker drops the entries that such a receiver needs next."""
        return max(0, self._kept - self.behind(acknowledged))

    def in_danger(self, acknowledged: int) -> bool:
        """Whether the receiver may fall off the log."""
        return self.behind(acknowledged) > self._danger
