"""A listener whose data and position are one transaction of a SQL database: each list is applied exactly once.

Rules:

- A step and the progress after it are committed together, or neither is.
- An error rolls back, and closes the connection: the step is given again, on another connection.
"""

from __future__ import annotations

from collections.abc import Callable

from lrq_ha.database import Connection, Cursor, Database

from .listener import Listener
from .machine import Apply, Begin, Hole, Step
from .positions import PositionTable
from .progress import Progress
from .updates import Update, UpdateType


class SqlListener(Listener):
    """The base of listeners that keep their data in a SQL database.

    Args:
        connect: Opens a DB-API connection, such as `lambda: sqlite3.connect("orders.db")`. Each source has a connection of its own. Autocommit
            must be off.
        table: Name of the table of positions; it is made if it does not exist.
    """

    def __init__(self, connect: Callable[[], Connection], table: str = "lrq_positions") -> None:
        self._database = Database(connect)
        self._positions = PositionTable(self._database, table)

    def clear(self, cursor: Cursor, source: str) -> None:
        """Deletes the rows of a source, as a snapshot begins."""
        raise NotImplementedError

    def apply_snapshot(self, cursor: Cursor, updates: list[Update]) -> None:
        """Applies rows of a snapshot. Do not commit: the receiver does, with the position."""
        raise NotImplementedError

    def apply_log_entries(self, cursor: Cursor, updates: list[Update]) -> None:
        """Applies deltas. Do not commit: the receiver does, with the position."""
        raise NotImplementedError

    def load(self, name: str, queue: str) -> Progress | None:
        """Implements Importer."""
        return self._positions.load(name, queue)

    def forget(self, name: str, queue: str) -> bool:
        """Implements Importer."""
        return self._positions.forget(name, queue)

    def name_method(self, step: Step) -> str:
        """Implements Importer."""
        match step:
            case Begin():
                return "clear"
            case Apply(kind=UpdateType.SNAPSHOT_SYNC):
                return "apply_snapshot"
            case Apply():
                return "apply_log_entries"
            case _:
                return "the commit of the position"

    def _apply(self, cursor: Cursor, step: Step) -> None:
        match step:
            case Begin():
                self.clear(cursor, step.snapshot.source)
            case Apply(kind=UpdateType.SNAPSHOT_SYNC):
                self.apply_snapshot(cursor, step.updates)
            case Apply():
                self.apply_log_entries(cursor, step.updates)

    def take(self, name: str, queue: str, step: Step, before: Progress | None) -> bool:
        """Implements Importer."""
        assert not isinstance(step, Hole)
        with self._database.transaction() as cursor:
            # First the position: a process that was replaced must not do work, nor wait for locks of the data.
            if self._positions.replace(cursor, name, queue, before, step.progress):
                self._apply(cursor, step)
                # This fails where an error was swallowed: PostgreSQL would roll back without a word.
                self._database.connection().cursor().execute("SELECT 1")
        return True
