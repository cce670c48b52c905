"""The differences between the databases that the outbox and the SQL provider use: pure, found by the module of a connection or cursor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lrq_ha.database import Connection, Cursor
from lrq_ha.publisher.errors import InvalidArgument

#: The name of a table, perhaps with its schema.
TABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")


@dataclass(frozen=True, slots=True)
class Dialect:
    """One database.

    Attributes:
        name: For people.
        mark: Of a parameter in a statement.
        bytes_type: Of a column of bytes.
        transaction_id: Expression for the ID of the current transaction, as text; NULL where the database has none.
    """

    name: str
    mark: str
    bytes_type: str
    transaction_id: str

    def marks(self, count: int) -> str:
        """`count` parameters, with commas between them."""
        return ", ".join([self.mark] * count)


SQLITE: Final = Dialect("SQLite", "?", "BLOB", "NULL")
POSTGRESQL: Final = Dialect("PostgreSQL", "%s", "BYTEA", "pg_current_xact_id()::text")

_MODULES: Final = {
    "sqlite3": SQLITE,
    "pysqlite3": SQLITE,
    "psycopg": POSTGRESQL,
    "psycopg2": POSTGRESQL,
    "pg8000": POSTGRESQL,
}


def dialect_of(of: Connection | Cursor) -> Dialect:
    """The dialect of a DB-API connection or cursor, or of a class derived from one.

    Raises:
        InvalidArgument: It belongs to none of the supported modules.
    """
    for each in type(of).__mro__:
        found = _MODULES.get(each.__module__.partition(".")[0])
        if found is not None:
            return found
    raise InvalidArgument(
        f"{type(of).__module__}.{type(of).__name__} belongs to no database that is supported",
        todo=f"Give the DB-API connection or cursor itself, of one of {', '.join(_MODULES)}"
        " (with SQLAlchemy: connection.connection.cursor(); with Django: connection.cursor().cursor)",
    )


def values_of(row: Any) -> tuple[Any, ...]:
    """The values of a row in the order of its columns, whatever the row factory of the connection makes of it."""
    return tuple(row.values()) if isinstance(row, Mapping) else tuple(row)
