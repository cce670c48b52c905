"""How far the sites are behind the views of the own log, and whether the broker may drop entries that they need. For operators.

Rules:

- A session is behind if a view that it reads has an entry beyond the position that the session has reached. Entries for other sites count as lag
  until the session has read past them, thus also while its site is away.
- A view has the size of the log, and the broker drops its oldest segments beyond that. The bytes of a view are counted as they are written; for
  those that were there before, the bytes of the log stand in. The estimate errs upwards, as that of the log (`replication/retention.py`).
- Nothing is known of a site that this primary has not heard yet, or that has had no snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from broker_plugin.log.streams import segment_bytes
from lrq_ha.replication.retention import Mark, Retention
from lrq_ha.routing.messages import Stream
from lrq_ha.routing.session import Session

from ..node.log_growth import LogGrowth
from .view_reader import View

_NO_ENTRY = 2**63  # behind every entry


class ViewSize:
    """The bytes of a view behind each position, and its growth in time.

    Args:
        view: The view.
        log_bytes_max: Size of the log, and of the view.
    """

    def __init__(self, view: View, log_bytes_max: int) -> None:
        self.view = view
        self._size = Retention(log_bytes_max, segment_bytes(log_bytes_max))
        self._growth = LogGrowth()

    def begin(self, marks: Sequence[Mark]) -> None:
        """Begins with the marks of the log: this incarnation has written nothing yet."""
        self._size.restore(marks)

    def add_entry(self, sequence: int, size_bytes: int) -> None:
        """Entry `sequence` is written to the view."""
        self._size.appended(sequence, size_bytes)

    def tick(self, now: float) -> None:
        self._growth.note_end(self.view.tail, now)

    def lag_s(self, has: int, now: float) -> float:
        """Seconds since the view had no entry beyond `has`."""
        return self._growth.behind_s(has, now)

    def behind(self, has: int) -> int:
        """Bytes of the view beyond entry `has`."""
        return self._size.behind(self._last_needed(has))

    def left(self, has: int) -> int:
        """Bytes that may still be written before the broker drops entries beyond `has`."""
        return self._size.left(self._last_needed(has))

    def in_danger(self, has: int) -> bool:
        """Whether the broker may soon drop entries beyond `has`."""
        return self._size.in_danger(self._last_needed(has))

    def _last_needed(self, has: int) -> int:
        return has if has < self.view.tail else _NO_ENTRY


class SiteLag:
    """The lag of sessions behind the views.

    Args:
        views: The views.
        log_bytes_max: Size of the log, and of each view.
    """

    def __init__(self, views: Mapping[Stream, View], log_bytes_max: int) -> None:
        self._log_bytes_max = log_bytes_max
        self._sizes = {stream: ViewSize(view, log_bytes_max) for stream, view in views.items()}

    def begin(self, marks: Sequence[Mark]) -> None:
        """The own log is read. `marks`: of its size."""
        for size in self._sizes.values():
            size.begin(marks)

    def add_entry(self, stream: Stream, sequence: int, size_bytes: int) -> None:
        """Entry `sequence` is written to a view."""
        self._sizes[stream].add_entry(sequence, size_bytes)

    def tick(self, now: float) -> None:
        """Remembers how long the views are; once per tick."""
        for size in self._sizes.values():
            size.tick(now)

    def tell(self, session: Session, now: float) -> dict[str, Any]:
        """For the status: how far a session is behind. `now`: as in `tick`."""
        has = session.reached.sequence
        if not has:
            return dict.fromkeys(("lag_entries", "lag_bytes", "lag_seconds", "bytes_left"))
        needed = [self._sizes[stream] for stream in session.views]
        sizes = [size for size in needed or [self._sizes[Stream.LOG_ENTRIES]] if size.view.tail > has]
        return {
            "lag_entries": max((size.view.tail - has for size in sizes), default=0),
            "lag_bytes": sum(size.behind(has) for size in sizes),
            "lag_seconds": max((size.lag_s(has, now) for size in sizes), default=0.0),
            "bytes_left": min((size.left(has) for size in needed), default=None),
        }

    def trouble(self, session: Session) -> str:
        """Text: entries that a session needs may be dropped soon, or have been; empty if not. Its part before the first colon says which."""
        has, route = session.reached.sequence, session.route
        if not has:
            return ""
        for size in (self._sizes[stream] for stream in session.views):
            if not size.in_danger(has):
                continue
            queue, left = size.view.queue, size.left(has)
            if not left:
                return f"{queue} may no longer hold what {route.destination} lacks of {route.client_name}: if so, a full sync has to bring it"
            return (
                f"{route.client_name} to {route.destination} is in danger of falling off {queue}: the site lacks {size.behind(has)} bytes, and after "
                f"{left} more the broker drops what it needs next (log_bytes_max {self._log_bytes_max}): unless it catches up, it needs a full sync"
            )
        return ""
