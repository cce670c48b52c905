"""How far a backup's queues may be behind the log, so that a promotion, which writes that first, takes no longer than it may. No I/O.

Rules:
- What counts is what should be written already: neither what waits for its delay, nor what is not safe.
- The pace is learned only while there is such: what comes more slowly than it can be written says nothing of it. Nor does time in which the applier
  waits for something else than its broker.
- Until it is known, and for the first entries, there is no limit.
- Past the limit the log is taken a little more slowly than it is written, so that the backup catches up, however far behind it is; and never so
  slowly that publishers stand still, though its broker may: what is held back for long goes on for a moment, which is one push at least.
"""

from __future__ import annotations

ENTRIES_MIN = 500  # so many may always be behind, and come each second
SHARE = 0.75  # of the pace, while there is more behind than may be
LEARNS_FOR_S = 0.25  # before the pace counts as known
MEMORY_S = 1.0  # what was learned so long ago counts for a third
GAP_S = 1.0  # who is behind looks more often; after such a gap there may have been nothing to write


class Pace:
    """See above.

    Args:
        lag_s: Seconds that writing what is behind may take.
        holds_for_s: At a time: its primary must see that it gets on.
    """

    def __init__(self, lag_s: float, holds_for_s: float) -> None:
        self._lag_s = lag_s
        self._holds_for_s = holds_for_s
        self._per_s = 0.0
        self._learned_s = 0.0
        self._last: tuple[float, int] | None = None  # how long it had worked at the last look, if something was behind, and how far it had come
        self._since: tuple[float, int] | None = None  # when it became too much, and where the log ended; since the last moment in which it went on
        self._held_at = 0.0  # when it was held back

    @property
    def limit(self) -> int:
        """Entries that may be behind; 0: the pace is not known yet."""
        return max(ENTRIES_MIN, int(self._per_s * self._lag_s)) if self._learned_s >= LEARNS_FOR_S else 0

    def look(self, now: float, reached: int, end: int, overdue: int, waited_s: float = 0.0) -> bool:
        """Whether no more of the log is to be taken for now.

        Args:
            now: Monotonic seconds.
            reached: The entry that the applier has come to.
            end: Where the log ends here.
            overdue: How many entries should be written already.
            waited_s: How long the applier has waited, in all, for something else than its broker.
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
            return  # another look at the same moment: what was written since the last one counts with the next
        if last is not None and last[0] < worked <= last[0] + GAP_S and reached >= last[1]:
            since_s = worked - last[0]
            per_s = (reached - last[1]) / since_s
            weight = max(since_s / (self._learned_s + since_s), min(1.0, since_s / MEMORY_S))
            self._per_s += (per_s - self._per_s) * weight
            self._learned_s += since_s
        self._last = (worked, reached) if behind else None
