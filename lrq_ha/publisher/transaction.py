"""Log entries that arrive together or not at all. Shared by the sync and the async publisher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from lrq_ha.errors import IllegalEvent
from lrq_ha.publisher.messages import LogEntries, checked_bytes, checked_destinations

C = TypeVar("C")


class Transaction(Generic[C]):
    """Collects entries; the publisher sends them as one Transaction when its `with` block ends without an exception."""

    def __init__(self) -> None:
        self._entries: list[tuple[bytes, tuple[str, ...]]] = []
        self._confirm: C | None = None
        self._over = False

    def transmit_log_entry_message(self, payload: bytes, destinations: Sequence[str]) -> None:
        """Adds one entry. Raises InvalidArgument as the publisher's method of this name does, IllegalEvent after the block."""
        if self._over:
            raise IllegalEvent("The transaction is over", todo="Begin another one with publisher.transaction()")
        self._entries.append((checked_bytes("payload", payload), checked_destinations(destinations)))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def confirm(self) -> C:
        """The result of the transaction. Raises IllegalEvent inside the block, after an exception, and for an empty transaction."""
        if self._confirm is None:
            raise IllegalEvent("The transaction was not sent: it is still open, was discarded, or is empty")
        return self._confirm

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Wraps the block. An exception in it discards the collected entries."""
        try:
            yield
        except BaseException:
            self._entries.clear()
            raise
        finally:
            self._over = True

    @property
    def entries(self) -> LogEntries | None:
        """The entries to send after the block; None if there are none."""
        return LogEntries(tuple(self._entries)) if self._entries else None

    def sent(self, confirm: C) -> None:
        self._confirm = confirm
