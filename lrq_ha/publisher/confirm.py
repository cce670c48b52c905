"""The result of one publish. Rule: it is settled once, by the I/O thread; anyone may ask, wait or be called back, from any thread.

Not concurrent.futures.Future: a Condition per message costs more than the rest of a publish."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from lrq_ha.publisher.errors import ConfirmTimeout
from lrq_ha.replication.errors import LrqError

_LOG = logging.getLogger(__name__)

_WAITERS = threading.Lock()  # one for all: taken only where somebody waits for a confirm that is not there yet


class Confirm:
    """Tells when a message is safe.

    Attributes:
        replication_id: The ID that the message carries in its header x-lrq-id.
        done: Whether it was confirmed or failed.
    """

    __slots__ = ("_callbacks", "_error", "_explain", "done", "observed", "replication_id")

    def __init__(self, replication_id: str, explain: Callable[[], LrqError | None]) -> None:
        self.replication_id = replication_id
        self.done = False
        self.observed = False  # whether anybody has asked how it went; flush() raises what nobody asked for
        self._error: LrqError | None = None
        self._callbacks: list[Callable[[], object]] | None = None
        self._explain = explain

    def settle(self, error: LrqError | None) -> bool:
        """The I/O thread's word: confirmed (None) or failed. Returns whether anybody is to be called back, by `call_back`."""
        self._error = error
        self.done = True  # before looking at the callbacks: who adds one looks at `done` after adding it
        return self._callbacks is not None

    def call_back(self) -> None:
        """Calls back everybody who waits, each once."""
        with _WAITERS:
            callbacks, self._callbacks = self._callbacks or [], None
        for callback in callbacks:
            try:
                callback()
            except Exception:
                _LOG.exception("A callback of message %s failed", self.replication_id)

    def add_done_callback(self, callback: Callable[[Confirm], object]) -> None:
        """Has `callback(confirm)` called once it is done: at once if it is, else on the publisher's I/O thread, which it must not hold up."""
        self._when_done(lambda: callback(self))

    def _when_done(self, callback: Callable[[], object]) -> None:
        with _WAITERS:
            self._callbacks = [*(self._callbacks or ()), callback]
        if self.done:
            self.call_back()

    @property
    def error(self) -> LrqError | None:
        """Why the message failed; None if it was confirmed or is not done."""
        self.observed = self.observed or self.done
        return self._error

    def result(self, timeout_s: float | None = None) -> str:
        """Waits for the confirm.

        Args:
            timeout_s: Seconds to wait; None: as long as it takes.

        Returns:
            The replication ID.

        Raises:
            NackedError: The broker refused the message.
            FencedError: Another process took the producer name.
            Unconfirmed: The publisher was closed first.
            NoPrimary: Not done in time, and no node takes publishes now.
            ConfirmTimeout: Not done in time. (After either of these the message is still being sent.)
        """
        if not self.done:
            event = threading.Event()
            self._when_done(event.set)
            if not event.wait(timeout_s):
                raise self._explain() or ConfirmTimeout(f"No confirm of message {self.replication_id} within {timeout_s} s")
        self.observed = True
        if self._error is not None:
            raise self._error
        return self.replication_id
