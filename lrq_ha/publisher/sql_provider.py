"""A provider of full syncs that reads tables of a SQL database: the other end of `lrq_ha.receiver.TableListener`.

It reads each table in the order of its key, page by page. A page is a transaction of its own, so no lock and no old version of a row is held for
long. Changes between two pages do no harm: their log entries come behind the base of the full sync, and receivers apply these again.

Payloads are `{"table": …, "op": "put", "rows": [{…}, …]}` in JSON, as in docs/spark/tables.md.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from lrq_ha.database import Connection
from lrq_ha.publisher.errors import InvalidArgument
from lrq_ha.publisher.fullsync import FullSyncRequest
from lrq_ha.publisher.provider import FullSyncContext
from lrq_ha.publisher.sql_dialect import TABLE_NAME, dialect_of, values_of

PAYLOAD_BYTES_MAX: Final = 1 << 20
PAGE_ROWS: Final = 1000

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class SourceTable:
    """A table that full syncs hold.

    Attributes:
        name: As payloads call it.
        columns: Columns that payloads hold.
        key: Columns that name a row: unique together, never NULL, and best the primary key, in whose order the table is read.
        table: As the database calls it, perhaps with its schema; empty: as payloads call it.

    Raises:
        InvalidArgument: A name, or a key that is not among the columns.
    """

    name: str
    columns: Sequence[str]
    key: Sequence[str]
    table: str = ""

    def __post_init__(self) -> None:
        for column in (*self.columns, *self.key):
            if not _NAME.fullmatch(column):
                raise InvalidArgument(f"{column!r} is no name of a column", todo="Use letters, digits and underscores")
        if not TABLE_NAME.fullmatch(self.table or self.name):
            raise InvalidArgument(f"{self.table or self.name!r} is no name of a table", todo="Use letters, digits and underscores")
        if not self.key or set(self.key) - set(self.columns):
            raise InvalidArgument(f"Table {self.name}: the key {tuple(self.key)} is empty, or not among the columns")


class SqlProvider:
    """Supplies full syncs from tables: `publisher.on_full_sync(SqlProvider(connect, tables))`.

    Args:
        connect: Opens a DB-API connection of SQLite (sqlite3) or PostgreSQL (psycopg, psycopg2, pg8000). Each full sync has one of its own.
        tables: What a full sync holds, in this order.
        encode: Makes JSON of a value that JSON has no form for; None: dates, times, decimals and UUIDs become text, other values are refused.
    """

    def __init__(
        self, connect: Callable[[], Connection], tables: Iterable[SourceTable], encode: Callable[[Any], object] | None = None
    ) -> None:
        self._connect = connect
        self._tables = tuple(tables)
        self._encode = encode or encode_value

    def __call__(self, request: FullSyncRequest, context: FullSyncContext) -> None:
        """Serves a full sync. An error cancels it, and the site asks again.

        Raises:
            FullSyncCancelled, NackedError: As from the context.
            TypeError: A value that JSON has no form for.
            MessageTooLarge: A row above the limit of a message.
        """
        rows = 0
        with closing(self._connect()) as connection:
            for table in self._tables:
                for payload, count in pack_rows(table, read_rows(connection, table), self._encode):
                    rows += count
                    context.transmit(payload, progress=f"{rows} rows, in table {table.name}")
        context.complete()


def read_rows(connection: Connection, table: SourceTable) -> Iterator[tuple[Any, ...]]:
    """The rows of a table in the order of its key, each with the values of its columns."""
    dialect, after = dialect_of(connection), None
    key = ", ".join(table.key)
    head, tail = f"SELECT {', '.join(table.columns)} FROM {table.table or table.name}", f" ORDER BY {key} LIMIT {PAGE_ROWS}"
    places = [list(table.columns).index(column) for column in table.key]
    while True:
        cursor = connection.cursor()
        if after is None:
            cursor.execute(head + tail)
        else:
            cursor.execute(f"{head} WHERE ({key}) > ({dialect.marks(len(places))}){tail}", after)
        page = [values_of(row) for row in cursor.fetchall()]
        connection.rollback()
        yield from page
        if len(page) < PAGE_ROWS:
            return
        after = tuple(page[-1][place] for place in places)


def pack_rows(table: SourceTable, rows: Iterable[tuple[Any, ...]], encode: Callable[[Any], object]) -> Iterator[tuple[bytes, int]]:
    """Payloads of at most PAYLOAD_BYTES_MAX bytes, one larger row alone, and the number of rows in each. A table without rows gives none."""
    head, tail = f'{{"table": {json.dumps(table.name)}, "op": "put", "rows": ['.encode(), b"]}"
    packed: list[bytes] = []
    size = 0
    for row in rows:
        text = json.dumps(dict(zip(table.columns, row)), default=encode).encode()
        if packed and size + len(text) + 2 > PAYLOAD_BYTES_MAX - len(head) - len(tail):
            yield head + b", ".join(packed) + tail, len(packed)
            packed, size = [], 0
        packed.append(text)
        size += len(text) + 2
    if packed:
        yield head + b", ".join(packed) + tail, len(packed)


def encode_value(value: Any) -> str:
    """Text for a value that JSON has no form for. Raises TypeError for a kind that is not known."""
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal | UUID):
        return str(value)
    raise TypeError(f"a value of the type {type(value).__name__} has no form in JSON: give SqlProvider(…, encode=…), or leave out its column")
