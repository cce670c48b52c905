"""When a log, or a view of it, had which end: the age of what a receiver lacks. By this node's clock only.

Rule: known to one tick, and no further back than GREW_MAX ticks in which it grew.
"""

from __future__ import annotations

from bisect import bisect_right

GREW_MAX = 4_096


class LogGrowth:
    """The ends of one log in time."""

    def __init__(self) -> None:
        self._ends: list[int] = []  # ascending
        self._times: list[float] = []

    def note_end(self, end: int, now: float) -> None:
        """Remembers the end if the log has grown; once per tick. `now`: seconds of a clock that does not go back."""
        if self._ends and end <= self._ends[-1]:
            return
        self._ends.append(end)
        self._times.append(now)
        if len(self._ends) > 2 * GREW_MAX:
            del self._ends[:GREW_MAX], self._times[:GREW_MAX]

    def behind_s(self, has: int, now: float) -> float:
        """Seconds since the log was no longer than entry `has`; 0 if no tick has seen it longer."""
        index = bisect_right(self._ends, has)
        return round(now - self._times[index], 2) if index < len(self._ends) else 0.0
