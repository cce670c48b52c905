"""A relay's side of the tables: how far it has come, what comes next, and whether it is still the relay of this outbox.

Rules:

- `sent` is committed before a transaction up to it is sent, and `transmitted` after its confirm. So the log knows no number above `sent`.
- Each step names the token and the progress before it. A relay that was replaced changes nothing, and is told (`RelayFenced`).
- An error rolls back, and closes the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from lrq_ha.database import Connection, Cursor, Database
from lrq_ha.publisher.outbox.batch import BATCH_TRANSACTIONS_MAX, Stored, find_end, group_entries
from lrq_ha.publisher.outbox.errors import NoOutbox, OutboxRestored, RelayFenced
from lrq_ha.publisher.outbox.table import DESTINATION_SEPARATOR
from lrq_ha.publisher.sql_dialect import dialect_of, values_of


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an outbox is transmitted. 0 <= transmitted <= sent.

    Attributes:
        transmitted: Everything up to this number is confirmed.
        sent: Nothing above this number was ever sent.
    """

    transmitted: int
    sent: int


@dataclass(frozen=True, slots=True)
class Step:
    """What a relay does next.

    Attributes:
        progress: As committed.
        batch: Transactions to transmit, up to `progress.sent`; empty: there are none.
        last: Number of the newest transaction in the outbox.
    """

    progress: Progress
    batch: list[Stored]
    last: int


class Ledger:
    """The relay's side of an outbox. One thread uses it.

    Args:
        connect: Opens a DB-API connection.
        table: Name of the outbox.
        keep: How many transmitted transactions stay in the table.
    """

    def __init__(self, connect: Callable[[], Connection], table: str, keep: int) -> None:
        self._database = Database(connect)
        self._table = table
        self._keep = keep
        self._token = uuid4().hex
        self._producer = ""
        self._committed = Progress(0, 0)

    def take_over(self) -> tuple[str, Progress]:
        """Makes this the relay of the outbox. Returns the producer and the progress. Raises NoOutbox."""
        with self._database.transaction() as cursor:
            cursor.execute(f"UPDATE {self._table}_relay SET token = {dialect_of(cursor).mark} WHERE id = 1", (self._token,))
            if cursor.rowcount == 0:
                raise NoOutbox(self._table)
            cursor.execute(f"SELECT producer FROM {self._table}_counter WHERE id = 1")
            row = cursor.fetchone()
            if row is None:
                raise NoOutbox(self._table)
            self._producer = str(values_of(row)[0])
            return self._producer, self._load(cursor)

    def load(self) -> tuple[Progress, int]:
        """The progress, and the number of the newest transaction in the outbox. Raises RelayFenced, OutboxRestored."""
        with self._database.transaction() as cursor:
            return self._load(cursor), self._read_last(cursor)

    def advance(self, progress: Progress, transmitted: int) -> Step:
        """Commits that everything up to `transmitted` is confirmed, and that the next batch may be sent.

        Args:
            progress: As committed last. After an error, `load` tells it: a commit may have succeeded whose answer was lost.
            transmitted: From `progress.transmitted` to `progress.sent`.

        Raises:
            RelayFenced: Another relay has the outbox.
            OutboxRestored: The database has gone back to an earlier progress.
        """
        with self._database.transaction() as cursor:
            found = self._load(cursor)
            last, end, batch = self._read_next(cursor, transmitted)
        after = Progress(transmitted, max(progress.sent, end))
        if found != progress:
            raise RelayFenced(self._table)
        if found != after:
            # It begins with a write: a transaction of SQLite that begins with a read may fail at its first write.
            with self._database.transaction() as cursor:
                self._replace(cursor, progress, after)
        self._committed = after
        return Step(after, batch, max(last, end, transmitted))

    def close(self) -> None:
        """Rolls back, and closes the connection: the next call opens another one."""
        self._database.drop()

    def _load(self, cursor: Cursor) -> Progress:
        cursor.execute(f"SELECT token, transmitted, sent FROM {self._table}_relay WHERE id = 1")
        token, transmitted, sent = values_of(cursor.fetchone())
        if token != self._token:
            raise RelayFenced(self._table)
        if transmitted < self._committed.transmitted or sent < self._committed.sent:
            raise OutboxRestored(self._table, self._producer, self._committed.sent, sent)
        return Progress(transmitted, sent)

    def _read_last(self, cursor: Cursor) -> int:
        cursor.execute(f"SELECT number FROM {self._table}_counter WHERE id = 1")
        return int(values_of(cursor.fetchone())[0])

    def _replace(self, cursor: Cursor, before: Progress, after: Progress) -> None:
        mark = dialect_of(cursor).mark
        cursor.execute(
            f"UPDATE {self._table}_relay SET transmitted = {mark}, sent = {mark}"
            f" WHERE id = 1 AND token = {mark} AND transmitted = {mark} AND sent = {mark}",
            (after.transmitted, after.sent, self._token, before.transmitted, before.sent),
        )
        if cursor.rowcount == 0:
            raise RelayFenced(self._table)
        if after.transmitted > before.transmitted:
            cursor.execute(f"DELETE FROM {self._table} WHERE number <= {mark}", (after.transmitted - self._keep,))

    def _read_next(self, cursor: Cursor, transmitted: int) -> tuple[int, int, list[Stored]]:
        """The newest number in the outbox, the last one of the next batch, and that batch."""
        mark, last = dialect_of(cursor).mark, self._read_last(cursor)
        cursor.execute(
            f"SELECT number, SUM(LENGTH(payload)) AS size_bytes FROM {self._table} WHERE number > {mark} GROUP BY number ORDER BY number"
            f" LIMIT {BATCH_TRANSACTIONS_MAX}",
            (transmitted,),
        )
        end = find_end((number, int(size_bytes)) for number, size_bytes in map(values_of, cursor.fetchall()))
        if not end:
            return last, 0, []
        cursor.execute(
            f"SELECT number, payload, destinations FROM {self._table} WHERE number > {mark} AND number <= {mark} ORDER BY number, entry",
            (transmitted, end),
        )
        rows = map(values_of, cursor.fetchall())
        found = group_entries((number, bytes(payload), str(destinations).split(DESTINATION_SEPARATOR)) for number, payload, destinations in rows)
        return last, end, found
