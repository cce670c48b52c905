"""Keeps SQL tables in step with a source whose payloads are `{"table": …, "op": "put" | "delete", "rows": [{…}, …]}` (docs/spark/tables.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from lrq_ha.database import Connection, Cursor
from lrq_ha.errors import MalformedInput

from .machine import Apply, Begin, Complete, Hole, Reach, Step
from .progress import Phase
from .sql import SqlListener
from .updates import Update

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Table:
    """A table of the database, which exists.

    Attributes:
        name: As payloads and the database call it.
        columns: Columns that payloads fill; other fields of a row are left out, missing ones are NULL.
        key: Columns that name a row; together with `source_column` they are unique in the table. A row put under a key replaces the whole row.
        source_column: Column for the source's remote id, so that rows of several sources stand side by side.
    """

    name: str
    columns: Sequence[str]
    key: Sequence[str]
    source_column: str = "source"

    def __post_init__(self) -> None:
        for name in (self.name, *self.columns, *self.key, self.source_column):
            if not _NAME.fullmatch(name):
                raise MalformedInput(f"{name!r} is no name of a table or column", todo="Use letters, digits and underscores")
        if missing := set(self.key) - set(self.columns):
            raise MalformedInput(f"Table {self.name}: key {sorted(missing)} is not among the columns")
        if not self.key:
            raise MalformedInput(f"Table {self.name} has no key")


class TableListener(SqlListener):
    """Puts and deletes rows by key; needs a database with INSERT … ON CONFLICT (SQLite, PostgreSQL).

    A payload that cannot be decoded, or names another table, is not skipped: the list is given again, and `on_error` names the payload's position.

    Args:
        connect: As for SqlListener.
        tables: Every table that payloads may name.
        positions: Name of the table of positions.
        shadow: A snapshot, and the deltas that are given again behind it, go into tables `lrq_shadow_…` of its source, which are made as it begins,
            and dropped at its end. The rows replace those of the tables in one transaction when they equal the source's: readers never see a part
            of a snapshot. Change the option, and the tables, only in the state NORMAL.
    """

    def __init__(
        self, connect: Callable[[], Connection], tables: Iterable[Table], positions: str = "lrq_positions", *, shadow: bool = False
    ) -> None:
        super().__init__(connect, positions)
        self._tables = {table.name: table for table in tables}
        self._shadow = shadow

    def clear(self, cursor: Cursor, source: str) -> None:
        self._clear(cursor, source, self._tables)

    def apply_snapshot(self, cursor: Cursor, updates: list[Update]) -> None:
        self._put(cursor, updates, self._tables)

    def apply_log_entries(self, cursor: Cursor, updates: list[Update]) -> None:
        self._put(cursor, updates, self._tables)

    def _apply(self, cursor: Cursor, step: Step) -> None:
        if not self._shadow or isinstance(step, Hole):
            super()._apply(cursor, step)
            return
        is_equal = step.progress.phase is Phase.NORMAL  # the rows equal the source's
        match step:
            case Begin():
                self._make_shadows(cursor, step.snapshot.source)
            case Apply() if not is_equal:
                self._put(cursor, step.updates, self._shadows(step.updates[0].source))
            case Complete() | Reach() if is_equal:
                self._swap(cursor, step.source)
            case _:
                super()._apply(cursor, step)

    # ---- shadows -----------------------------------------------------------------------------------------------------

    def _shadows(self, source: str) -> dict[str, Table]:
        return {name: replace(table, name=_shadow_name(name, source)) for name, table in self._tables.items()}

    def _make_shadows(self, cursor: Cursor, source: str) -> None:
        """Makes empty ones. Those of a snapshot before may have other columns."""
        for name, shadow in self._shadows(source).items():
            columns, key = ", ".join((shadow.source_column, *shadow.columns)), ", ".join((shadow.source_column, *shadow.key))
            cursor.execute(f"DROP TABLE IF EXISTS {shadow.name}")
            cursor.execute(f"CREATE TABLE {shadow.name} AS SELECT {columns} FROM {name} WHERE 1 = 0")
            cursor.execute(f"CREATE UNIQUE INDEX {shadow.name}_key ON {shadow.name} ({key})")

    def _swap(self, cursor: Cursor, source: str) -> None:
        """The rows of the shadows replace those of the tables."""
        self._clear(cursor, source, self._tables)
        for name, shadow in self._shadows(source).items():
            columns = ", ".join((shadow.source_column, *shadow.columns))
            cursor.execute(f"INSERT INTO {name} ({columns}) SELECT {columns} FROM {shadow.name}")
            cursor.execute(f"DROP TABLE {shadow.name}")

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _clear(self, cursor: Cursor, source: str, tables: Mapping[str, Table]) -> None:
        mark = self._database.placeholder()
        for table in tables.values():
            cursor.execute(f"DELETE FROM {table.name} WHERE {table.source_column} = {mark}", (source,))

    def _put(self, cursor: Cursor, updates: list[Update], tables: Mapping[str, Table]) -> None:
        mark = self._database.placeholder()
        for update in updates:
            table, op, rows = self._decode(update, tables)
            fields = table.columns if op == "put" else table.key
            statement = _put(table, mark) if op == "put" else _delete(table, mark)
            cursor.executemany(statement, [(update.source, *(row.get(field) for field in fields)) for row in rows])

    def _decode(self, update: Update, tables: Mapping[str, Table]) -> tuple[Table, str, list[dict[str, Any]]]:
        """Table, operation and rows of a payload. Raises MalformedInput."""
        where = f"The payload {update.replication_id} at {update.position} of {update.queue}"
        try:
            payload = json.loads(update.opaque_payload)
            name, op, rows = payload["table"], payload.get("op") or "put", payload["rows"]
            table = tables[name]
            complete = all(row[column] is not None for row in rows for column in table.key)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MalformedInput(f"{where} cannot be decoded: {type(error).__name__}: {error}", todo="Name every table in `tables`") from error
        if op not in ("put", "delete") or not complete:
            raise MalformedInput(f"{where} has op {op!r}, or a row without its key", todo="op is put or delete")
        return table, op, rows


def _shadow_name(name: str, source: str) -> str:
    """40 characters at most: databases shorten long names, and an index has a longer one."""
    return f"lrq_shadow_{name[:12]}_{sha256(f'{name}/{source}'.encode()).hexdigest()[:16]}"


def _put(table: Table, mark: str) -> str:
    columns = (table.source_column, *table.columns)
    rest = [column for column in table.columns if column not in table.key]
    update = ", ".join(f"{column} = excluded.{column}" for column in rest)
    return (
        f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({', '.join([mark] * len(columns))})"
        f" ON CONFLICT ({', '.join((table.source_column, *table.key))}) DO {f'UPDATE SET {update}' if rest else 'NOTHING'}"
    )


def _delete(table: Table, mark: str) -> str:
    return f"DELETE FROM {table.name} WHERE " + " AND ".join(f"{column} = {mark}" for column in (table.source_column, *table.key))
