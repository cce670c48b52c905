"""The tables of an outbox, and what an application writes to them, in its own transaction.

A write locks the row of the counter, takes the next number from it, and inserts its entries under that number. The lock is held until the
application commits or rolls back. So numbers follow the order of commits, have no gaps, and are the sequence by which the log drops repeats.

Sources: the pattern Transactional Outbox (microservices.io); the publishing IDs of RabbitMQ's stream protocol.

Invariants:

- Entries are in the table when the application has committed, and are not when it has rolled back.
- A number belongs to one transaction, permanently, and is in the table before any relay sends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

from lrq_ha.database import Cursor
from lrq_ha.publisher.errors import InvalidArgument
from lrq_ha.publisher.messages import ID_SEPARATOR, Addressed, LogEntries
from lrq_ha.publisher.outbox.counter import Counter
from lrq_ha.publisher.outbox.errors import NoOutbox, NoTransaction
from lrq_ha.publisher.sql_dialect import SQLITE, TABLE_NAME, Dialect, dialect_of, values_of

DESTINATION_SEPARATOR = " "


class Outbox:
    """The application's side of an outbox.

    Args:
        table: Name of the table, perhaps with its schema. Two more tables have this name with `_counter` and `_relay` behind it.

    Raises:
        InvalidArgument: It is no name of a table.
    """

    def __init__(self, table: str = "lrq_outbox") -> None:
        if not TABLE_NAME.fullmatch(table):
            raise InvalidArgument(f"{table!r} is no name of a table", todo="Use letters, digits and underscores, with a schema and a dot if needed")
        self.table = table

    def create(self, cursor: Cursor) -> None:
        """Makes the tables where they do not exist, in the caller's transaction. Call it once, where the application makes its own tables.

        Args:
            cursor: A DB-API cursor of SQLite (sqlite3) or PostgreSQL (psycopg, psycopg2, pg8000).
        """
        dialect, table = dialect_of(cursor), self.table
        cursor.execute(
            f"CREATE TABLE IF NOT EXISTS {table} (number BIGINT NOT NULL, entry INTEGER NOT NULL, payload {dialect.bytes_type} NOT NULL,"
            " destinations TEXT NOT NULL, PRIMARY KEY (number, entry))"
        )
        cursor.execute(
            f"CREATE TABLE IF NOT EXISTS {table}_counter (id INTEGER PRIMARY KEY, producer VARCHAR(64) NOT NULL, number BIGINT NOT NULL,"
            " transaction_id TEXT, entries INTEGER NOT NULL, addressees INTEGER NOT NULL, size_bytes INTEGER NOT NULL)"
        )
        cursor.execute(
            f"CREATE TABLE IF NOT EXISTS {table}_relay (id INTEGER PRIMARY KEY, token VARCHAR(32) NOT NULL, transmitted BIGINT NOT NULL,"
            " sent BIGINT NOT NULL)"
        )
        cursor.execute(f"INSERT INTO {table}_counter VALUES (1, {dialect.mark}, 0, NULL, 0, 0, 0) ON CONFLICT DO NOTHING", (new_producer(),))
        cursor.execute(f"INSERT INTO {table}_relay VALUES (1, '', 0, 0) ON CONFLICT DO NOTHING")

    def write(self, cursor: Cursor, payload: bytes, destinations: Sequence[str]) -> str:
        """Writes one log entry. As `write_transaction` with one entry."""
        return self.write_transaction(cursor, [(payload, destinations)])

    def write_transaction(self, cursor: Cursor, entries: Iterable[Addressed]) -> str:
        """Writes log entries that arrive together, in the caller's transaction. Commit afterwards, with the application's data.

        On PostgreSQL, all writes of one database transaction arrive together. SQLite cannot name its transactions: there, one call is one
        transaction of the log. Other writers of this outbox wait from this call until the commit, so write last.

        Args:
            cursor: A DB-API cursor of SQLite (sqlite3) or PostgreSQL (psycopg, psycopg2, pg8000), with autocommit off.
            entries: Pairs of a payload and the remote_ids of its destination sites.

        Returns:
            The replication ID of the transaction, for `Receiver.wait_for`.

        Raises:
            InvalidArgument: A payload or a destination, or there are no entries. Nothing was written.
            MessageTooLarge: The transaction is above a limit. Nothing was written by this call.
            NoTransaction: The connection is in autocommit. Nothing was written.
            NoOutbox: `create` was not called.
        """
        checked = LogEntries.checked(entries)
        before = Counter(0).add(None, checked)
        dialect = dialect_of(cursor)
        producer, counter, transaction_id = self._lock_counter(cursor, dialect)
        after = counter.add(transaction_id, checked)
        self._save_counter(cursor, dialect, after)
        cursor.executemany(
            f"INSERT INTO {self.table} (number, entry, payload, destinations) VALUES ({dialect.marks(4)})",
            [
                (after.number, number, payload, DESTINATION_SEPARATOR.join(destinations))
                for number, (payload, destinations) in enumerate(checked.entries, after.entries - before.entries)
            ],
        )
        return f"{producer}{ID_SEPARATOR}{after.number}"

    def renew(self, cursor: Cursor) -> None:
        """Gives the outbox a new producer, in the caller's transaction, after its database was restored from a backup. A relay that runs ends.

        Transactions that are in the table and in the log already are transmitted once more.
        """
        mark, table = dialect_of(cursor).mark, self.table
        cursor.execute(f"UPDATE {table}_counter SET producer = {mark} WHERE id = 1", (new_producer(),))
        cursor.execute(f"UPDATE {table}_relay SET token = '', sent = transmitted WHERE id = 1")

    def _lock_counter(self, cursor: Cursor, dialect: Dialect) -> tuple[str, Counter, str | None]:
        """Locks the counter until the end of the transaction. Returns the producer, the counter, and the ID of the transaction."""
        counter = f"{self.table}_counter"
        if dialect is SQLITE:
            cursor.execute(f"UPDATE {counter} SET number = number WHERE id = 1")
            if not cursor.connection.in_transaction:
                raise NoTransaction(self.table)
        cursor.execute(
            f"SELECT producer, number, transaction_id, entries, addressees, size_bytes, {dialect.transaction_id} AS this FROM {counter} WHERE id = 1"
            + ("" if dialect is SQLITE else " FOR UPDATE")
        )
        row = cursor.fetchone()
        if row is None:
            raise NoOutbox(self.table)
        producer, number, last_id, entries, addressees, size_bytes, transaction_id = values_of(row)
        return producer, Counter(number, last_id, entries, addressees, size_bytes), transaction_id

    def _save_counter(self, cursor: Cursor, dialect: Dialect, counter: Counter) -> None:
        """Raises NoTransaction if the row is not locked by this transaction."""
        mark = dialect.mark
        values: list[Any] = [counter.number, counter.transaction_id, counter.entries, counter.addressees, counter.size_bytes]
        statement = (
            f"UPDATE {self.table}_counter SET number = {mark}, transaction_id = {mark}, entries = {mark}, addressees = {mark}, size_bytes = {mark}"
            " WHERE id = 1"
        )
        if dialect is not SQLITE:
            statement += f" AND {dialect.transaction_id} = {mark}"  # in autocommit, each statement is a transaction of its own
            values.append(counter.transaction_id)
        cursor.execute(statement, values)
        if cursor.rowcount == 0:
            raise NoTransaction(self.table)


def new_producer() -> str:
    """A name for an outbox: its transactions have their numbers under it, permanently."""
    return f"outbox-{uuid4().hex}"
