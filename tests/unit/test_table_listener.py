"""Tables that a receiver keeps, and their shadows: readers never see a part of a snapshot."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.receiver import Table, TableListener
from lrq_ha.receiver.machine import Machine, Step
from lrq_ha.receiver.progress import Phase, Progress
from lrq_ha.receiver.table_listener import _shadow_name
from lrq_ha.streams.message import parse_message

QUEUE = "LRQ_Recv_shop_{source}"
DELTA, ROWS, END = pb.LOG_ENTRY_SYNC, pb.SNAPSHOT_SYNC, pb.LAST_FULL_SYNC_ENTRY
TABLE = Table("stock", ("item", "count"), ("item",))


class Site:
    """One receiver of a database with a table, fed message by message; each step is taken at once."""

    def __init__(self, path: Path, source: str = "east", *, shadow: bool = True) -> None:
        self.path, self.source = path, source
        with self.connection() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS stock (source TEXT, item INTEGER, count INTEGER, PRIMARY KEY (source, item))")
        self.listener = TableListener(self.connect, [TABLE], shadow=shadow)
        self.start()

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path)

    @contextlib.contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self.path)) as connection, connection:
            yield connection

    def start(self) -> None:
        """As a process that begins, or begins again after a kill."""
        self.queue = QUEUE.format(source=self.source)
        self.progress = self.listener.load("db", self.queue)
        self.machine = Machine(self.queue, self.progress)

    def take(self, previous: int, sequence: int, kind: pb.ReplicationType, *rows: tuple[int, int], request: str = "") -> list[Step]:
        """A message with one transaction: at `sequence`, rows (item, count); without rows a marker."""
        batch = pb.ReceivedBatch(source=self.source, client_name="shop", previous=pb.Position(epoch=257 if previous else 0, sequence=previous))
        payloads = [json.dumps({"table": "stock", "rows": [{"item": item, "count": count}]}).encode() for item, count in rows]
        at = pb.Position(epoch=257, sequence=sequence)
        batch.transactions.add(position=at, type=kind, request_id=request, payloads=payloads, replication_id=f"app/{sequence}")
        return self.give(batch)

    def give(self, batch: pb.ReceivedBatch) -> list[Step]:
        steps = self.machine.take([parse_message(self.queue, batch.transactions[-1].position.sequence, batch.SerializeToString())])
        for step in steps:
            assert self.listener.take("db", self.queue, step, self.progress)
            self.progress = step.progress  # type: ignore[union-attr]
        return steps

    def stock(self) -> dict[int, int]:
        with self.connection() as connection:
            return dict(connection.execute("SELECT item, count FROM stock WHERE source = ?", (self.source,)).fetchall())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """It has followed a source to {1: 10, 2: 20}."""
    site = Site(tmp_path / "site.db")
    site.take(0, 3, ROWS, request="r")
    site.take(3, 4, ROWS, (1, 10), (2, 20), request="r")
    site.take(4, 5, END, request="r")
    assert (site.stock(), site.progress and site.progress.phase) == ({1: 10, 2: 20}, Phase.NORMAL)
    return site


@pytest.mark.parametrize("killed", [False, True])
def test_readers_see_the_table_before_a_snapshot_or_after_it(site: Site, killed: bool) -> None:
    """Also where deltas that came meanwhile are given again behind it, and the process is killed at each step."""
    messages = [
        (0, 9, ROWS, (), "s"),  # the chain restarts: the queue had a hole
        (9, 10, ROWS, ((1, 11),), "s"),
        (10, 11, DELTA, ((3, 33),), ""),
        (11, 12, ROWS, ((3, 30),), "s"),
        (12, 13, END, (), "s"),
    ]
    for previous, sequence, kind, rows, request in messages:
        site.take(previous, sequence, kind, *rows, request=request)
        assert site.stock() == {1: 10, 2: 20}
        if killed and sequence < 11:  # behind the delta, a process that begins again gives no more of the snapshot without the delta
            site.start()
    assert site.machine.rewind
    again = [message for message in messages if message[1] > 9]
    for number in range(len(again)):
        if killed:  # reading begins again behind what was committed
            site.start()
        for previous, sequence, kind, rows, request in again[: number + 1] if killed else again[number : number + 1]:
            site.take(previous, sequence, kind, *rows, request=request)
        whole = {1: 11, 3: 33}
        assert site.stock() == (whole if number == len(again) - 1 else {1: 10, 2: 20})
    assert site.progress == Progress(Phase.NORMAL, site.machine.seen)
    site.take(13, 14, DELTA, (4, 40))
    assert site.stock() == {1: 11, 3: 33, 4: 40}


def test_each_source_has_rows_of_its_own(site: Site) -> None:
    other = Site(site.path, "west")
    other.take(0, 3, ROWS, request="q")
    other.take(3, 4, ROWS, (1, 1), request="q")
    site.take(0, 9, ROWS, request="s")
    site.take(9, 10, ROWS, (7, 70), request="s")
    other.take(4, 5, END, request="q")
    assert (site.stock(), other.stock()) == ({1: 10, 2: 20}, {1: 1})
    site.take(10, 11, END, request="s")
    assert (site.stock(), other.stock()) == ({7: 70}, {1: 1})


def shadows(site: Site) -> list[str]:
    with site.connection() as connection:
        return [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'lrq_shadow%'")]


def test_shadows_have_the_columns_and_the_key_of_their_table(site: Site) -> None:
    """They were made once, and the first snapshot after a change of the table never got in."""
    site.take(0, 9, ROWS, request="s")
    assert len(shadows(site)) == 1
    with site.connection() as connection:  # the snapshot is left as it is: the next one begins with other tables
        connection.execute("DROP TABLE stock")
        connection.execute("CREATE TABLE stock (source TEXT, item INTEGER, count INTEGER, shelf INTEGER, PRIMARY KEY (source, item, shelf))")
    site.listener = TableListener(site.connect, [Table("stock", ("item", "shelf"), ("item", "shelf"))], shadow=True)
    site.start()
    site.take(0, 20, ROWS, request="t")
    payload = json.dumps({"table": "stock", "rows": [{"item": 1, "shelf": 5}, {"item": 1, "shelf": 6}]}).encode()
    batch = pb.ReceivedBatch(source="east", client_name="shop", previous=pb.Position(epoch=257, sequence=20))
    batch.transactions.add(position=pb.Position(epoch=257, sequence=21), type=ROWS, request_id="t", payloads=[payload], replication_id="app/21")
    site.give(batch)
    site.take(21, 22, END, request="t")
    with site.connection() as connection:
        assert connection.execute("SELECT item, count, shelf FROM stock ORDER BY shelf").fetchall() == [(1, None, 5), (1, None, 6)]
    assert shadows(site) == [], "they go with the snapshot's end"


def test_long_names_make_no_equal_shadows() -> None:
    """PostgreSQL takes 63 characters of a name."""
    names = {_shadow_name(table, source) for table in ("t" * 60, "t" * 61, "t") for source in ("s" * 60, "s" * 61)}
    assert len(names) == 6
    assert all(len(name) <= 40 for name in names)


def test_without_shadows_a_snapshot_is_seen_as_it_comes(tmp_path: Path) -> None:
    site = Site(tmp_path / "site.db", shadow=False)
    site.take(0, 3, ROWS, request="r")
    site.take(3, 4, ROWS, (1, 10), request="r")
    assert site.stock() == {1: 10}
    with site.connection() as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master WHERE name LIKE '%shadow%'").fetchone() == (0,)
