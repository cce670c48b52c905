"""What an application writes to an outbox, in SQLite: its own transaction, numbers without gaps, bounds."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from outbox_rig import Rig

from lrq_ha.publisher import InvalidArgument, MessageTooLarge
from lrq_ha.publisher.messages import LogEntries
from lrq_ha.publisher.outbox import NoOutbox, NoTransaction, Outbox
from lrq_ha.publisher.outbox.counter import TRANSACTION_BYTES_MAX, Counter, measure_entries
from lrq_ha.publisher.sql_dialect import POSTGRESQL, SQLITE, dialect_of, values_of


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "app.db")


def test_a_write_is_one_transaction_with_a_number(rig: Rig) -> None:
    first, second = rig.write(2, 1, to=("west", "south"))
    assert rig.rows("SELECT number, entry, payload, destinations FROM lrq_outbox ORDER BY number, entry") == [
        (1, 0, b"0", "west south"),
        (1, 1, b"1", "west south"),
        (2, 0, b"2", "west south"),
    ]
    producer = rig.rows("SELECT producer FROM lrq_outbox_counter")[0][0]
    assert (first, second) == (f"{producer}/1", f"{producer}/2")
    assert producer.startswith("outbox-")


def test_a_transaction_that_is_rolled_back_leaves_nothing_and_no_gap(rig: Rig) -> None:
    rig.write(1)
    rig.write(3, commit=False)
    rig.write(1)
    assert [number for (number,) in rig.rows()] == [1, 2]


def test_a_savepoint_that_is_rolled_back_leaves_no_gap(rig: Rig) -> None:
    connection = rig.connect()
    cursor = connection.cursor()
    rig.outbox.write(cursor, b"kept", ["west"])
    cursor.execute("SAVEPOINT inner_part")
    rig.outbox.write(cursor, b"dropped", ["west"])
    cursor.execute("ROLLBACK TO inner_part")
    rig.outbox.write(cursor, b"kept too", ["west"])
    connection.commit()
    assert rig.rows("SELECT number, payload FROM lrq_outbox ORDER BY number") == [(1, b"kept"), (2, b"kept too")]


def test_a_second_writer_waits_for_the_first(rig: Rig) -> None:
    """So the order of numbers is the order of commits."""
    first, second = rig.connect(), sqlite3.connect(rig.path, timeout=0)
    rig.outbox.write(first.cursor(), b"1", ["west"])
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        rig.outbox.write(second.cursor(), b"2", ["west"])
    first.commit()
    assert rig.outbox.write(second.cursor(), b"2", ["west"]).endswith("/2")


def test_create_changes_nothing_the_second_time(rig: Rig) -> None:
    rig.write(1)
    before = rig.rows("SELECT * FROM lrq_outbox_counter")
    connection = rig.connect()
    rig.outbox.create(connection.cursor())
    connection.commit()
    assert rig.rows("SELECT * FROM lrq_outbox_counter") == before


def test_autocommit_is_refused_before_anything_is_written(rig: Rig) -> None:
    connection = rig.connect(isolation_level=None)
    with pytest.raises(NoTransaction, match="Begin a transaction"):
        rig.outbox.write(connection.cursor(), b"x", ["west"])
    assert rig.rows() == []
    connection.execute("BEGIN")
    assert rig.outbox.write(connection.cursor(), b"x", ["west"]).endswith("/1")
    connection.execute("COMMIT")
    assert rig.rows() == [(1,)]


def test_rows_of_any_form_are_read(rig: Rig) -> None:
    connection = rig.connect()
    connection.row_factory = lambda cursor, row: dict(zip((column[0] for column in cursor.description), row))
    assert rig.outbox.write(connection.cursor(), b"x", ["west"]).endswith("/1")
    connection.row_factory = sqlite3.Row
    assert rig.outbox.write(connection.cursor(), b"x", ["west"]).endswith("/2")
    assert values_of({"a": 1, "b": 2}) == (1, 2)


@pytest.mark.parametrize(
    ("payload", "destinations", "said"),
    [("text", ["west"], "encode text yourself"), (b"x", [], "non-empty list"), (b"x", "west", "non-empty list"), (b"x", ["a b"], "non-empty list")],
)
def test_bad_entries_are_refused(rig: Rig, payload: bytes, destinations: list[str], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        rig.outbox.write(rig.connect().cursor(), payload, destinations)
    assert rig.rows() == []


def test_an_empty_transaction_is_refused(rig: Rig) -> None:
    with pytest.raises(InvalidArgument, match="has no entries"):
        rig.outbox.write_transaction(rig.connect().cursor(), [])


def test_a_transaction_that_could_never_be_sent_is_refused_at_the_write(rig: Rig) -> None:
    with pytest.raises(MessageTooLarge, match="Write fewer or smaller entries"):
        rig.outbox.write(rig.connect().cursor(), bytes(TRANSACTION_BYTES_MAX), ["west"])
    with pytest.raises(MessageTooLarge, match="20004 addressees"):
        rig.outbox.write_transaction(rig.connect().cursor(), [(b"", ["a", "b", "c"])] * 6668)
    assert rig.rows() == []
    rig.outbox.write(rig.connect().cursor(), bytes(TRANSACTION_BYTES_MAX - 1000), ["west"])


def test_the_measure_is_never_below_what_is_sent() -> None:
    names = ["a", "b" * 64]
    for payload in (b"", b"x" * 130, b"x" * 70_000):
        entries = LogEntries.checked([(payload + bytes([n]), names) for n in range(200)])
        message = entries.to_bytes("c" * 64, "outbox-" + "0" * 32 + "/9223372036854775807", 10**15)
        assert len(message) <= measure_entries(entries) + 4096


def test_writes_of_one_database_transaction_share_a_number_if_the_database_names_it() -> None:
    entries = LogEntries.checked([(b"x", ["west", "south"])])
    first = Counter(7, "900", 3, 3, 9).add("901", entries)
    assert (first.number, first.entries, first.addressees) == (8, 1, 2)
    second = first.add("901", entries)
    assert (second.number, second.entries, second.addressees, second.size_bytes) == (8, 2, 4, 2 * first.size_bytes)
    assert second.add(None, entries).number == 9
    assert Counter(0).add(None, entries).add(None, entries).number == 2
    with pytest.raises(MessageTooLarge):
        Counter(8, "901", 1, 1, TRANSACTION_BYTES_MAX - 1).add("901", entries)


@pytest.mark.parametrize("name", ["", "a b", "x;", "1a", "a.b.c", "a."])
def test_bad_names_of_tables(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is no name of a table"):
        Outbox(name)


def test_an_outbox_that_was_not_created_is_named(rig: Rig) -> None:
    connection = rig.connect()
    connection.execute("DELETE FROM lrq_outbox_counter")
    with pytest.raises(NoOutbox, match=r"Call Outbox\.create once"):
        rig.outbox.write(connection.cursor(), b"x", ["west"])


def test_databases_are_told_by_their_modules() -> None:
    class Mine(sqlite3.Cursor):
        pass

    assert dialect_of(Mine(sqlite3.connect(":memory:"))) is SQLITE
    assert dialect_of(type("Cursor", (), {"__module__": "psycopg.cursor"})()) is POSTGRESQL
    with pytest.raises(InvalidArgument, match=r"with SQLAlchemy: connection\.connection\.cursor\(\)"):
        dialect_of(object())
