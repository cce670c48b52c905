"""The limit of a backup's lag, so that a promotion, which writes the lag first, takes no longer than it may. No I/O.

Rules:

- The lag counts entries that should be written already: neither delayed nor unsafe ones.
- The pace is learned only while there are such entries: entries that come more slowly than they can be written do not show it. Time in which the
  applier waits for something else than its broker does not count either.
- Until the pace is known, and for the first entries, there is no limit.
- Past the limit the log is taken a little more slowly than it is written, so that the backup catches up, however far behind it is. But
  publishers never stand still, even if the backup's broker does: a backup that has paused for long takes at least one push before the next pause.
"""

from __future__ import annotations

ENTRIES_MIN = 500  # this many may always be behind, and come each second
SHARE = 0.75  # of the pace, while there is more behind than may be
LEARNS_FOR_S = 0.25  # before the pace counts as known
MEMORY_S = 1.0  # after this time a measurement counts for a third
GAP_S = 1.0  # a lagging backup looks more often; after such a gap there may have been nothing to write


class Pace:
    """The pace of one backup.

    Args:
        lag_s: Seconds that writing the lag may take.
        holds_for_s: Longest pause in seconds: the primary must see progress.
    """

    def __init__(self, lag_s: float, holds_for_s: float) -> None:
        self._lag_s = lag_s
        self._holds_for_s = holds_for_s
        self._per_s = 0.0
        self._learned_s = 0.0
        self._last: tuple[float, int] | None = None  # its working time and position at the last look, if it lagged
        self._since: tuple[float, int] | None = None  # time and end of the log when the lag became too large, since the last pause
        self._held_at = 0.0  # time of the last pause

    @property
    def limit(self) -> int:
        """Entries that may be behind; 0: the pace is not known yet."""
        return max(ENTRIES_MIN, int(self._per_s * self._lag_s)) if self._learned_s >= LEARNS_FOR_S else 0

    def look(self, now: float, reached: int, end: int, overdue: int, waited_s: float = 0.0) -> bool:
        """Whether no more of the log is to be taken for now.

        Args:
            now: Monotonic seconds.
            reached: The applier's position.
            end: End of the log here.
            overdue: Number of entries that should be written already.
            waited_s: Seconds in all that the applier has waited for something else than its broker.
        """
        self._learn(now - waited_s, reached, overdue > 0)
        limit = self.limit
        if not limit or overdue <= limit:
            self._since, self._held_at = None, 0.0
            return False
        if self._since is None or end < self._since[1]:
            self._since = now, end
        at, first = self._since
        if end - first <= max(ENTRIES_MIN, SHARE * self._per_s) * (now - at):
            self._held_at = 0.0
            return False
        self._held_at = self._held_at or now
        if now - self._held_at >= self._holds_for_s:
            self._since, self._held_at = (now, end), 0.0
            return False
        return True

    def _learn(self, worked: float, reached: int, behind: bool) -> None:
        last = self._last
        if last is not None and behind and worked <= last[0]:
            return  # another look at this moment: entries written since the last one count with the next
        if last is not None and last[0] < worked <= last[0] + GAP_S and reached >= last[1]:
            since_s = worked - last[0]
            per_s = (reached - last[1]) / since_s
            weight = max(since_s / (self._learned_s + since_s), min(1.0, since_s / MEMORY_S))
            self._per_s += (per_s - self._per_s) * weight
            self._learned_s += since_s
        self._last = (worked, reached) if behind else None
