"""A listener whose methods run on the application's event loop, and the bridge to the threads that call listeners."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from .application_loop import ApplicationLoop, LoopGone
from .errors import ReceiverError
from .listener import Listener
from .states import State
from .updates import Snapshot, Update


class AsyncListener:
    """The base of listeners whose methods run on the event loop, one at a time for each source. Each method may be a coroutine or a plain method.

    A method that raises, is cancelled, or returns False, is called with its list again after a while: 0.1 s, doubling to 30 s. No update is left out.
    """

    def on_snapshot_sync_start(self, snapshot: Snapshot) -> Awaitable[None] | None:
        """A snapshot begins: clear the source's tables, or build new ones aside."""
        return None

    def process_updates_in_snapshot_sync(self, updates: list[Update]) -> Awaitable[bool] | bool:
        """Rows of the snapshot, whole transactions.

        Returns:
            True: they are applied. False: give the list again later.
        """
        raise NotImplementedError

    def on_snapshot_sync_complete(self, snapshot: Snapshot) -> Awaitable[None] | None:
        """The snapshot has ended: bring tables that were built aside into use."""
        return None

    def process_updates_in_log_entry_sync(self, updates: list[Update]) -> Awaitable[bool] | bool:
        """Deltas, whole transactions.

        Returns:
            True: they are applied. False: give the list again later.
        """
        raise NotImplementedError

    def on_state(self, source: str, old: State, new: State, reason: str) -> Awaitable[None] | None:
        """The receiver's state for a source has changed; `reason` is for operators."""
        return None

    def on_error(self, source: str, error: ReceiverError) -> Awaitable[None] | None:
        """A list was not taken (Redelivery), or the queue lacks what comes next (Trimmed)."""
        return None


class LoopListener(Listener):
    """Calls each method of an AsyncListener on the event loop, and waits for it in the calling thread.

    Args:
        listener: The application.
        loop: Its event loop.
    """

    def __init__(self, listener: AsyncListener, loop: ApplicationLoop) -> None:
        self._listener = listener
        self._loop = loop

    def on_snapshot_sync_start(self, snapshot: Snapshot) -> None:
        self._loop.call(self._listener.on_snapshot_sync_start, snapshot)

    def process_updates_in_snapshot_sync(self, updates: list[Update]) -> bool:
        return self._give(self._listener.process_updates_in_snapshot_sync, updates)

    def on_snapshot_sync_complete(self, snapshot: Snapshot) -> None:
        self._loop.call(self._listener.on_snapshot_sync_complete, snapshot)

    def process_updates_in_log_entry_sync(self, updates: list[Update]) -> bool:
        return self._give(self._listener.process_updates_in_log_entry_sync, updates)

    def on_state(self, source: str, old: State, new: State, reason: str) -> None:
        with suppress(LoopGone):
            self._loop.call(self._listener.on_state, source, old, new, reason)

    def on_error(self, source: str, error: ReceiverError) -> None:
        with suppress(LoopGone):
            self._loop.call(self._listener.on_error, source, error)

    def _give(self, method: Callable[[list[Update]], Awaitable[bool] | bool], updates: list[Update]) -> bool:
        taken = self._loop.call(method, updates)
        if not isinstance(taken, bool):
            raise TypeError(f"{method.__name__} returned {taken!r}: it must return True or False, or be a coroutine that does")
        return taken
