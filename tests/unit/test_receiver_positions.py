"""The table of positions: a step is committed with its data or not at all, and one process keeps a position."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from lrq_ha.errors import MalformedInput
from lrq_ha.receiver import Fenced, Phase, Progress, SqlListener, SqlPositions, Update, UpdateType
from lrq_ha.receiver.machine import Apply, Complete
from lrq_ha.receiver.updates import Snapshot
from lrq_ha.replication.positions import Position

Q = "LRQ_Recv_orders_east"


def normal(sequence: int) -> Progress:
    return Progress(Phase.NORMAL, Position(257, sequence))


def delta(sequence: int) -> Apply:
    update = Update(Q, "east", "orders", UpdateType.LOG_ENTRY_SYNC, Position(257, sequence), f"app/{sequence}.0", 0, 0, b"x", "", True)
    return Apply(normal(sequence), [update])


class Rows(SqlListener):
    """Keeps positions as rows."""

    fails = ""

    def apply_log_entries(self, cursor: sqlite3.Cursor, updates: list[Update]) -> None:
        cursor.executemany("INSERT INTO t VALUES (?)", [(update.position.sequence,) for update in updates])
        if self.fails:
            raise ValueError(self.fails)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "t.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (n)")
    return path


def rows(path: Path) -> list[int]:
    connection = sqlite3.connect(path)
    try:
        return [n for (n,) in connection.execute("SELECT n FROM t ORDER BY rowid")]
    finally:
        connection.close()


def test_data_and_position_are_one_transaction(path: Path) -> None:
    listener = Rows(lambda: sqlite3.connect(path))
    assert listener.load("db", Q) is None
    assert listener.take("db", Q, delta(1), None)
    listener.fails = "no"
    with pytest.raises(ValueError, match="no"):
        listener.take("db", Q, delta(2), normal(1))
    assert rows(path) == [1]
    assert Rows(lambda: sqlite3.connect(path)).load("db", Q) == normal(1)


def test_an_older_process_changes_nothing(path: Path) -> None:
    old, new = Rows(lambda: sqlite3.connect(path)), Rows(lambda: sqlite3.connect(path))
    old.load("db", Q)
    old.take("db", Q, delta(1), None)
    assert new.load("db", Q) == normal(1)
    with pytest.raises(Fenced, match="Another process has taken over receiver 'db'"):
        old.take("db", Q, delta(2), normal(1))
    assert rows(path) == [1]
    assert new.take("db", Q, delta(2), normal(1))
    with pytest.raises(Fenced):
        new.take("db", Q, delta(3), normal(1))  # its progress is not what it takes it for
    assert rows(path) == [1, 2]


class LosesAnswers(sqlite3.Connection):
    """A connection that is lost right after a commit has succeeded."""

    lost = False

    def commit(self) -> None:
        super().commit()
        if LosesAnswers.lost:
            LosesAnswers.lost = False
            raise sqlite3.OperationalError("the connection is lost")


def test_a_commit_whose_answer_is_lost_is_not_made_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Rows(lambda: sqlite3.connect(path, factory=LosesAnswers))
    listener.load("db", Q)
    monkeypatch.setattr(LosesAnswers, "lost", True)
    with pytest.raises(sqlite3.OperationalError):
        listener.take("db", Q, delta(1), None)
    assert listener.take("db", Q, delta(1), None)
    assert rows(path) == [1]


def test_a_store_apart_from_the_data(path: Path) -> None:
    store = SqlPositions(lambda: sqlite3.connect(path))
    assert store.load("db", Q) is None
    store.commit("db", Q, None, normal(1))
    SqlPositions(lambda: sqlite3.connect(path)).load("db", Q)
    with pytest.raises(Fenced):
        store.commit("db", Q, normal(1), normal(2))


def test_a_database_that_cannot_be_opened_is_tried_again(path: Path) -> None:
    opened: list[object] = []

    def connect() -> Any:
        opened.append(1)
        if len(opened) == 1:
            raise sqlite3.OperationalError("not yet")
        return sqlite3.connect(path)

    listener = Rows(connect)
    with pytest.raises(sqlite3.OperationalError):
        listener.load("db", Q)
    assert listener.load("db", Q) is None
    assert listener.take("db", Q, Complete(normal(1), Snapshot(Q, "east", "orders", "r", Position(257, 1))), None)


@pytest.mark.parametrize("table", ["", "a b", "a;drop", "1a"])
def test_a_bad_name_of_a_table_is_refused(table: str) -> None:
    with pytest.raises(MalformedInput, match="is no name of a table"):
        SqlPositions(lambda: None, table)
