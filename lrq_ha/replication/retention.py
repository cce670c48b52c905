"""How far behind a receiver is in bytes of the log, and whether the log may be dropped under its feet. Pure.

Rules: the broker drops the oldest segments of a stream beyond a size, whoever still needs them. What a receiver has not acknowledged is measured from
what was appended since this sidecar began to read or write its log: rather too little than too much.
"""

from __future__ import annotations

from bisect import bisect_right

DANGER_SHARE = 0.5
"""Of the log's size: a receiver that lacks more than this is in danger of falling off it."""
MARKS_MAX = 1_024


class Retention:
    """See above.

    Args:
        log_bytes_max: Size of the log beyond which the broker drops what is oldest.
    """

    def __init__(self, log_bytes_max: int) -> None:
        self._danger = int(log_bytes_max * DANGER_SHARE)
        self._every = max(1, log_bytes_max // MARKS_MAX)
        self._sequences: list[int] = [0]  # ascending, and the bytes up to each
        self._bytes: list[int] = [0]
        self._total = 0

    def appended(self, last: int, size: int) -> None:
        """A batch of `size` bytes that ends with entry `last` was appended, or read at a start. What falls out of the log later still counts."""
        self._total += size
        if self._total - self._bytes[-1] >= self._every and last > self._sequences[-1]:
            self._sequences.append(last)
            self._bytes.append(self._total)
            if len(self._sequences) > 2 * MARKS_MAX:
                del self._sequences[1:MARKS_MAX], self._bytes[1:MARKS_MAX]

    def behind(self, acknowledged: int) -> int:
        """Bytes that a receiver lacks which has everything up to entry `acknowledged`."""
        return self._total - self._bytes[bisect_right(self._sequences, acknowledged) - 1]

    def in_danger(self, acknowledged: int) -> bool:
        """Whether it may fall off the log."""
        return self.behind(acknowledged) > self._danger
