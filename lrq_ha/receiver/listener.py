"""The application's side of a receiver, and the importer that takes the application's data and the position apart from each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

from .errors import ReceiverError
from .machine import Apply, Begin, Complete, Hole, Step
from .progress import Progress
from .states import State
from .updates import Snapshot, Update, UpdateType


class Listener:
    """The base of listeners. Each source has a thread of its own, and calls the methods one at a time.

    A method that raises, or returns False, is called with its list again after a while: 0.1 s, doubling to 30 s. No update is left out.
    """

    def on_snapshot_sync_start(self, snapshot: Snapshot) -> None:
        """A snapshot begins: clear the source's tables, or build new ones aside."""

    def process_updates_in_snapshot_sync(self, updates: list[Update]) -> bool:
        """Rows of the snapshot, whole transactions.

        Returns:
            True: they are applied. False: give the list again later.
        """
        raise NotImplementedError

    def on_snapshot_sync_complete(self, snapshot: Snapshot) -> None:
        """The snapshot has ended: bring tables that were built aside into use."""

    def process_updates_in_log_entry_sync(self, updates: list[Update]) -> bool:
        """Deltas, whole transactions.

        Returns:
            True: they are applied. False: give the list again later.
        """
        raise NotImplementedError

    def on_state(self, source: str, old: State, new: State, reason: str) -> None:
        """The receiver's state for a source has changed; `reason` is for operators."""

    def on_error(self, source: str, error: ReceiverError) -> None:
        """A list was not taken (Redelivery), or the queue lacks what comes next (Trimmed)."""


@runtime_checkable
class Importer(Protocol):
    """Takes the steps of a queue, and keeps the progress."""

    def load(self, name: str, queue: str) -> Progress | None:
        """The committed progress of receiver `name`; from now on this process keeps it, and no other process."""

    def take(self, name: str, queue: str, step: Step, before: Progress | None) -> bool:
        """Carries out a step, and commits the progress after it, which was `before`.

        Returns:
            Whether the step was taken.

        Raises:
            Fenced: Another process keeps the progress.
        """

    def forget(self, name: str, queue: str) -> bool:
        """Removes the progress. Returns whether there was an entry. A process that still keeps it is fenced."""

    def name_method(self, step: Step) -> str:
        """The method of the application that takes a step, for operators."""


class PositionStore(Protocol):
    """Keeps the progress apart from the application's data: a list is applied at least once."""

    def load(self, name: str, queue: str) -> Progress | None:
        """As in Importer."""

    def commit(self, name: str, queue: str, before: Progress | None, after: Progress) -> None:
        """Replaces the progress `before`. Raises Fenced if it is another one, or another process keeps it."""

    def forget(self, name: str, queue: str) -> bool:
        """As in Importer."""


class ListenerImporter:
    """Gives steps to a listener, then commits the progress."""

    def __init__(self, listener: Listener, positions: PositionStore) -> None:
        self._listener = listener
        self._positions = positions

    def load(self, name: str, queue: str) -> Progress | None:
        return self._positions.load(name, queue)

    def take(self, name: str, queue: str, step: Step, before: Progress | None) -> bool:
        assert not isinstance(step, Hole)
        if not call_listener(self._listener, step):
            return False
        self._positions.commit(name, queue, before, step.progress)
        return True

    def forget(self, name: str, queue: str) -> bool:
        return self._positions.forget(name, queue)

    def name_method(self, step: Step) -> str:
        return name_method(step)


def name_method(step: Step) -> str:
    """The listener's method for a step; a step without a method only commits the progress."""
    match step:
        case Begin():
            return "on_snapshot_sync_start"
        case Complete():
            return "on_snapshot_sync_complete"
        case Apply(kind=UpdateType.SNAPSHOT_SYNC):
            return "process_updates_in_snapshot_sync"
        case Apply():
            return "process_updates_in_log_entry_sync"
        case _:
            return "the commit of the position"


def call_listener(listener: Listener, step: Step) -> bool:
    """Calls the method for a step.

    Raises:
        TypeError: The method is a coroutine, or the method for a list returned neither True nor False.
    """
    call: Callable[[], object]
    match step:
        case Begin():
            call = partial(listener.on_snapshot_sync_start, step.snapshot)
        case Complete():
            call = partial(listener.on_snapshot_sync_complete, step.snapshot)
        case Apply(kind=UpdateType.SNAPSHOT_SYNC):
            call = partial(listener.process_updates_in_snapshot_sync, step.updates)
        case Apply():
            call = partial(listener.process_updates_in_log_entry_sync, step.updates)
        case _:
            return True
    returned = call()
    if inspect.iscoroutine(returned):
        returned.close()  # else Python warns of it
        raise TypeError(f"{name_method(step)} is a coroutine: derive the listener from AsyncListener, and give it to an AsyncReceiver")
    if not isinstance(step, Apply):
        return True
    if not isinstance(returned, bool):
        raise TypeError(f"{name_method(step)} returned {returned!r}: it must return True or False")
    return returned
