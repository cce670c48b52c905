"""The table of positions in a SQL database: one row for each receiver and queue.

Rule: an update names the old value and this process's token. So a process that was replaced changes nothing, and is told (`Fenced`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from uuid import uuid4

from lrq_ha.database import Connection, Cursor, Database
from lrq_ha.errors import MalformedInput

from .errors import Fenced
from .progress import Progress

_TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


class PositionTable:
    """The table of positions, inside the caller's transaction.

    Args:
        database: Where the table is; the table is made at the first use.
        table: Its name.
    """

    def __init__(self, database: Database, table: str) -> None:
        if not _TABLE.fullmatch(table):
            raise MalformedInput(f"{table!r} is no name of a table", todo="Use letters, digits, underscores and dots")
        self._database = database
        self._table = table
        self._token = uuid4().hex

    def take_over(self, cursor: Cursor, name: str, queue: str) -> Progress | None:
        """The progress of a receiver in a queue, which this process keeps from now on."""
        mark, table = self._database.placeholder(), self._table
        self._make_table(cursor)
        cursor.execute(f"UPDATE {table} SET token = {mark} WHERE name = {mark} AND queue = {mark}", (self._token, name, queue))
        if cursor.rowcount == 0:
            cursor.execute(f"INSERT INTO {table} VALUES ({mark}, {mark}, '', {mark})", (name, queue, self._token))
            return None
        cursor.execute(f"SELECT position FROM {table} WHERE name = {mark} AND queue = {mark}", (name, queue))
        (text,) = cursor.fetchone()
        return Progress.from_text(text) if text else None

    def load(self, name: str, queue: str) -> Progress | None:
        """As `take_over`, in a transaction of its own."""
        with self._database.transaction() as cursor:
            return self.take_over(cursor, name, queue)

    def forget(self, name: str, queue: str) -> bool:
        """Deletes the row of a receiver and queue, in a transaction of its own, and closes the connection. Returns whether there was one."""
        try:
            with self._database.transaction() as cursor:
                mark = self._database.placeholder()
                self._make_table(cursor)
                cursor.execute(f"DELETE FROM {self._table} WHERE name = {mark} AND queue = {mark}", (name, queue))
                return bool(cursor.rowcount > 0)
        finally:
            self._database.drop()

    def _make_table(self, cursor: Cursor) -> None:
        cursor.execute(
            f"CREATE TABLE IF NOT EXISTS {self._table} (name VARCHAR(128) NOT NULL, queue VARCHAR(255) NOT NULL, position TEXT NOT NULL,"
            " token VARCHAR(32) NOT NULL, PRIMARY KEY (name, queue))"
        )

    def replace(self, cursor: Cursor, name: str, queue: str, before: Progress | None, after: Progress) -> bool:
        """Replaces the progress. False: `after` is there already, as a commit has succeeded whose answer was lost.

        Raises:
            Fenced: The progress is not `before`, or another process keeps it. Roll back.
        """
        mark = self._database.placeholder()
        cursor.execute(
            f"UPDATE {self._table} SET position = {mark} WHERE name = {mark} AND queue = {mark} AND token = {mark} AND position = {mark}",
            (after.to_text(), name, queue, self._token, before.to_text() if before else ""),
        )
        if cursor.rowcount == 1:
            return True
        cursor.execute(f"SELECT position, token FROM {self._table} WHERE name = {mark} AND queue = {mark}", (name, queue))
        if cursor.fetchone() == (after.to_text(), self._token):
            return False
        raise Fenced(name, queue)


class SqlPositions:
    """A PositionStore in a SQL database, for applications that keep their data elsewhere: a list is applied at least once.

    Args:
        connect: Opens a DB-API connection, such as `lambda: sqlite3.connect("positions.db")`.
        table: Name of the table; it is made if it does not exist.
    """

    def __init__(self, connect: Callable[[], Connection], table: str = "lrq_positions") -> None:
        self._database = Database(connect)
        self._positions = PositionTable(self._database, table)

    def load(self, name: str, queue: str) -> Progress | None:
        return self._positions.load(name, queue)

    def commit(self, name: str, queue: str, before: Progress | None, after: Progress) -> None:
        with self._database.transaction() as cursor:
            self._positions.replace(cursor, name, queue, before, after)

    def forget(self, name: str, queue: str) -> bool:
        return self._positions.forget(name, queue)
