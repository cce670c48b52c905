"""The progress of a session's newest full sync, for operators. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SnapshotProgress:
    """What this session has done for a full sync.

    Attributes:
        request: The request's id; empty: there is none.
        since: Time at which it was asked for or, if it was not asked for here, began here; seconds, as in Tick.
        attempts: Requests in a row without a whole snapshot, this one included.
        rows, sent_bytes: Payloads that were sent, and their bytes with what travels beside them.
    """

    request: str = ""
    since: float = 0.0
    attempts: int = 0
    rows: int = 0
    sent_bytes: int = 0

    def begin(self, request: str, now: float, asks: int) -> None:
        """Follows another request from now on. Nothing changes if it is followed already.

        Args:
            request: Its id.
            now: As in Tick.
            asks: Requests that were written in a row without a whole snapshot; 0: another session wrote this one.
        """
        if self.request != request:
            self.request, self.since, self.attempts = request, now, max(1, asks)
            self.rows = self.sent_bytes = 0

    def add_rows(self, count: int, size_bytes: int) -> None:
        """A transaction of the snapshot is sent."""
        self.rows += count
        self.sent_bytes += size_bytes
