"""A receiver in a process of its own, for tests that kill it, or others while it is in one state.

`python gated_receiver.py NODES CLIENT FOLDER STATE [DSN]` keeps `stock`, in FOLDER/stock.db or in PostgreSQL. In STATE, in the middle of the
transaction of a list, it makes FOLDER/reached and stands still until FOLDER/open is there.
"""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lrq_ha.receiver import Receiver, State, Table, TableListener, Update

TABLE = Table("stock", ("item", "count"), ("item",))
#: `noted` says in which build of the tables a list was applied: a build begins as the tables are cleared.
SCHEMA = (
    "CREATE TABLE stock (source TEXT, item INTEGER, count INTEGER, PRIMARY KEY (source, item))",
    "CREATE TABLE builds (build INTEGER)",
    "CREATE TABLE noted (build INTEGER, kind TEXT, id TEXT)",
)
NAME = "gated"


class Gated(TableListener):
    """Notes each update in the transaction that applies it."""

    def __init__(self, connect: Callable[[], Any], folder: Path, state: str) -> None:
        super().__init__(connect, [TABLE])
        self._folder, self._gate = folder, state
        self._state = State.DISCONNECTED

    def on_state(self, source: str, old: State, new: State, reason: str) -> None:
        self._state = new

    def clear(self, cursor: Any, source: str) -> None:
        super().clear(cursor, source)
        cursor.execute("INSERT INTO builds SELECT count(*) + 1 FROM builds")

    def apply_snapshot(self, cursor: Any, updates: list[Update]) -> None:
        super().apply_snapshot(cursor, updates)
        self._note(cursor, "row", updates)

    def apply_log_entries(self, cursor: Any, updates: list[Update]) -> None:
        super().apply_log_entries(cursor, updates)
        self._note(cursor, "delta", updates)

    def _note(self, cursor: Any, kind: str, updates: list[Update]) -> None:
        for update in updates:
            cursor.execute(f"INSERT INTO noted SELECT count(*), '{kind}', '{update.replication_id}' FROM builds")
        if self._state.value == self._gate:
            (self._folder / "reached").touch()
            while not (self._folder / "open").exists():
                time.sleep(0.02)


def connector(folder: Path, dsn: str) -> Callable[[], Any]:
    """Opens connections to PostgreSQL, or without `dsn` to SQLite."""
    if not dsn:
        return lambda: sqlite3.connect(folder / "stock.db", timeout=30)
    import psycopg

    return lambda: psycopg.connect(dsn)


if __name__ == "__main__":
    place = Path(sys.argv[3])
    Receiver(sys.argv[1].split(","), sys.argv[2], NAME, Gated(connector(place, "".join(sys.argv[5:])), place, sys.argv[4])).run()
