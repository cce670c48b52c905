"""A provider that reads tables in SQLite: every row once, in the order of the key, in payloads of 1 MiB."""

from __future__ import annotations

import datetime
import json
import sqlite3
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from lrq_ha.publisher import FullSyncRequest, InvalidArgument, SourceTable, SqlProvider
from lrq_ha.publisher.sql_provider import PAGE_ROWS, PAYLOAD_BYTES_MAX, encode_value, pack_rows, read_rows

REQUEST = FullSyncRequest("orders", "west", "r1", "new")
STOCK = SourceTable("stock", ("place", "item", "count"), ("place", "item"))


class Context:
    """Keeps what is transmitted."""

    def __init__(self) -> None:
        self.payloads: list[Any] = []
        self.completed = False
        self.progress = ""

    def transmit(self, payload: bytes, progress: object = None) -> None:
        assert not self.completed
        self.payloads.append(json.loads(payload))
        self.progress = str(progress)

    def complete(self) -> None:
        self.completed = True


def serve(provider: SqlProvider) -> Context:
    context: Any = Context()
    provider(REQUEST, context)
    found: Context = context
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "t.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE stock (place TEXT, item INTEGER, count INTEGER, note TEXT, PRIMARY KEY (place, item))")
        connection.execute("CREATE TABLE empty (id INTEGER PRIMARY KEY)")
    return path


def fill(path: Path, count: int) -> None:
    with sqlite3.connect(path) as connection:
        connection.executemany("INSERT INTO stock VALUES (?, ?, ?, NULL)", [(f"p{n % 3}", n, -n) for n in range(count)])


@pytest.mark.parametrize("count", [0, 1, PAGE_ROWS, PAGE_ROWS + 1, 3 * PAGE_ROWS + 5])
def test_every_row_once_in_the_order_of_the_key(path: Path, count: int) -> None:
    fill(path, count)
    context = serve(SqlProvider(lambda: sqlite3.connect(path), [STOCK, SourceTable("empty", ("id",), ("id",))]))
    rows = [row for payload in context.payloads for row in payload["rows"]]
    assert rows == [{"place": f"p{n % 3}", "item": n, "count": -n} for n in sorted(range(count), key=lambda n: (n % 3, n))]
    assert {(payload["table"], payload["op"]) for payload in context.payloads} == ({("stock", "put")} if count else set())
    assert context.completed
    assert context.progress == (f"{count} rows, in table stock" if count else "")


def test_rows_that_change_between_two_pages_do_no_harm(path: Path) -> None:
    fill(path, 2 * PAGE_ROWS)
    connection = sqlite3.connect(path)
    found = []
    for number, row in enumerate(read_rows(connection, STOCK)):
        if number == 0:
            with sqlite3.connect(path) as other:
                other.execute("DELETE FROM stock WHERE place = 'p0'")
                other.execute("INSERT INTO stock VALUES ('p9', 1, 1, NULL)")
        found.append(row)
    assert found == sorted(found), "in order, and none twice"
    assert found[-1] == ("p9", 1, 1)


def test_payloads_are_full_and_not_too_large() -> None:
    table = SourceTable("t", ("id", "text"), ("id",))
    rows = [(n, "x" * 300_000) for n in range(7)] + [(7, "y" * 2_000_000), (8, "z")]
    payloads = list(pack_rows(table, iter(rows), encode_value))
    assert [count for _, count in payloads] == [3, 3, 1, 1, 1]
    assert all(len(payload) <= PAYLOAD_BYTES_MAX for payload, count in payloads if count > 1)
    assert [row["id"] for payload, _ in payloads for row in json.loads(payload)["rows"]] == list(range(9))


def test_values_without_a_form_in_json() -> None:
    day = datetime.datetime(2026, 1, 2, 3, 4, 5)
    values = (day, day.date(), day.time(), Decimal("1.50"), UUID(int=1))
    assert [encode_value(value) for value in values] == [
        "2026-01-02T03:04:05",
        "2026-01-02",
        "03:04:05",
        "1.50",
        "00000000-0000-0000-0000-000000000001",
    ]
    with pytest.raises(TypeError, match="type bytes has no form in JSON: give SqlProvider"):
        encode_value(b"x")


def test_another_form_for_such_values(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE files (id INTEGER PRIMARY KEY, content BLOB)")
        connection.execute("INSERT INTO files VALUES (1, x'00ff')")
    context = serve(SqlProvider(lambda: sqlite3.connect(path), [SourceTable("f", ("id", "content"), ("id",), table="main.files")], encode=bytes.hex))
    assert context.payloads == [{"table": "f", "op": "put", "rows": [{"id": 1, "content": "00ff"}]}]


def test_an_error_completes_nothing(path: Path) -> None:
    context: Any = Context()
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        SqlProvider(lambda: sqlite3.connect(path), [SourceTable("absent", ("id",), ("id",))])(REQUEST, context)
    assert not context.completed


@pytest.mark.parametrize(
    "arguments",
    [("a b", ("id",), ("id",)), ("t", ("id;",), ("id;",)), ("t", ("id",), ()), ("t", ("id",), ("other",)), ("t", ("id",), ("id",), "x-y")],
)
def test_bad_tables(arguments: Any) -> None:
    with pytest.raises(InvalidArgument):
        SourceTable(*arguments)
