"""An application writes to an outbox, and everything behind it is killed: the log has each transaction once, whole, in commit order.

The far end is read by a receiver at another site: positions of the source's log, each with its payloads.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import postgresql
import pytest
from load import eventually, primary_of, set_up, take_over
from patience import PATIENT_DOOR

from lrq_ha.lab import Lab
from lrq_ha.publisher import Publisher, SourceTable, SqlProvider
from lrq_ha.publisher.outbox import NoTransaction, Outbox, OutboxRelay, OutboxRestored, RelayFenced, RelayState
from lrq_ha.receiver import Listener, Phase, Progress, Receiver, Snapshot, SqlPositions, Table, TableListener, Update, UpdateType
from lrq_ha.receiver.machine import Apply, Begin, Complete
from lrq_ha.replication.positions import Position

pytestmark = [pytest.mark.broker, pytest.mark.proves("outbox")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    """A pair as the source, and one node as the sink."""
    groups = {"east": 2, "west": 1}
    found = Lab(groups, tmp_path_factory.mktemp("outbox") / "lab", sites={"east": ["west"], "west": []}, broker=broker_version, door=PATIENT_DOOR)
    set_up(found, "backup_timeout_s = 60.0")
    with found:
        yield found


def doors(lab: Lab, group: str) -> list[str]:
    return [node.door for node in lab.nodes.values() if node.group == group]


class FarEnd(Listener):
    """What a site has of a client: positions of the source's log, with their payloads. A delta that is given again changes nothing."""

    def __init__(self) -> None:
        self.transactions: dict[Position, dict[int, bytes]] = {}

    def process_updates_in_log_entry_sync(self, updates: list[Update]) -> bool:
        for update in updates:
            self.transactions.setdefault(update.position, {})[update.index] = update.opaque_payload
        return True

    def process_updates_in_snapshot_sync(self, updates: list[Update]) -> bool:
        return True

    @property
    def payloads(self) -> list[tuple[str, ...]]:
        return [tuple(payload.decode() for _, payload in sorted(each.items())) for _, each in sorted(self.transactions.items())]


class Application:
    """An application with a table of orders, and an outbox, in one database; every third of its transactions is rolled back."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.connect = connect
        self.outbox = Outbox()
        self.client_name = f"orders{time.time_ns() % 10**9}"
        self.committed: list[tuple[str, ...]] = []
        with contextlib.closing(connect()) as connection:
            connection.cursor().execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
            self.outbox.create(connection.cursor())
            connection.commit()

    def order(self, count: int, first: int = 0) -> None:
        mark = "?" if isinstance(self.connect(), sqlite3.Connection) else "%s"
        with contextlib.closing(self.connect()) as connection:
            for number in range(first, first + count):
                cursor = connection.cursor()
                cursor.execute(f"INSERT INTO orders VALUES ({mark}, {mark})", (number, f"item {number}"))
                payloads = tuple(f"{number}.{part}" for part in range(1 + number % 2))
                self.outbox.write_transaction(cursor, [(payload.encode(), ["west"]) for payload in payloads])
                if number % 3 == 2:
                    connection.rollback()
                else:
                    connection.commit()
                    self.committed.append(payloads)

    def rows(self, table: str = "lrq_outbox") -> list[Any]:
        with contextlib.closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(f"SELECT * FROM {table}")
            found: list[Any] = cursor.fetchall()
            return found

    def open_publisher(self, lab: Lab) -> Publisher:
        return Publisher(doors(lab, "east"), f"{self.client_name}-relay", self.client_name, confirm_timeout_s=60)

    @contextlib.contextmanager
    def relaying(self, lab: Lab) -> Iterator[OutboxRelay]:
        with OutboxRelay(self.connect, lambda: self.open_publisher(lab), self.outbox, poll_s=0.05) as relay:
            relay.start()
            yield relay


@pytest.fixture
def application(tmp_path: Path) -> Application:
    return Application(lambda: sqlite3.connect(tmp_path / "orders.db", timeout=30))


@contextlib.contextmanager
def receiving(lab: Lab, application: Application, tmp_path: Path) -> Iterator[FarEnd]:
    far_end = FarEnd()
    positions = SqlPositions(lambda: sqlite3.connect(tmp_path / "positions.db", timeout=30))
    with Receiver(doors(lab, "west"), application.client_name, "far-end", far_end, positions=positions) as receiver:
        receiver.start()
        yield far_end


def arrived(application: Application, far_end: FarEnd) -> None:
    """Everything that was committed has come once, whole and in order, and nothing more comes."""
    last = application.committed[-1]
    eventually("the last order", lambda: last in far_end.payloads, 60, seen=lambda: (len(far_end.payloads), len(application.committed)))
    assert far_end.payloads == application.committed


@pytest.mark.quick
def test_what_is_committed_arrives_once_in_order(lab: Lab, application: Application, tmp_path: Path) -> None:
    """The relay is stopped and started meanwhile, and starts before and after the application."""
    application.order(20)
    with receiving(lab, application, tmp_path) as far_end:
        with application.relaying(lab) as relay:
            application.order(300, 20)
            assert relay.stop()
            assert relay.status().state is RelayState.STOPPED
            application.order(20, 320)
            relay.start()
            application.order(20, 340)
            arrived(application, far_end)
            eventually("an empty outbox", lambda: application.rows() == [])
            assert relay.status().transmitted == len(application.committed)
        assert len(application.rows("orders")) == len(application.committed)


PROCESS = """
    import os, signal, sqlite3, sys
    from lrq_ha.publisher import Publisher
    from lrq_ha.publisher.outbox import OutboxRelay
    nodes, client_name, path, commits = sys.argv[1].split(","), sys.argv[2], sys.argv[3], int(sys.argv[4])

    class Connection(sqlite3.Connection):
        def commit(self):
            global commits
            commits -= self.in_transaction
            if commits == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            super().commit()

    open_publisher = lambda: Publisher(nodes, client_name + "-relay", client_name, confirm_timeout_s=60)
    OutboxRelay(lambda: sqlite3.connect(path, timeout=30, factory=Connection), open_publisher, poll_s=0.01).run()
"""


def start_process(lab: Lab, application: Application, path: Path, commits: int = -1) -> subprocess.Popen[bytes]:
    """A relay in a process, which is killed just before so many commits are done."""
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), ",".join(doors(lab, "east")), application.client_name, str(path), str(commits)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


@contextlib.contextmanager
def ordering(application: Application) -> Iterator[None]:
    """The application goes on meanwhile, and once more behind it."""
    done = threading.Event()

    def order() -> None:
        turn = 0
        while not done.is_set():
            application.order(7, 7 * turn)
            turn += 1
            time.sleep(0.005)
        application.order(1, 7 * turn + (7 * turn % 3 == 2))

    thread = threading.Thread(target=order)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.quick
def test_the_relay_is_killed_again_and_again(lab: Lab, application: Application, tmp_path: Path) -> None:
    """kill -9, at any time, and between a confirm and its record: the log drops what comes again."""
    path, repeats = tmp_path / "orders.db", lab.status(primary_of(lab, "east"))["counters"].get("repeats", 0)
    with receiving(lab, application, tmp_path) as far_end:
        with ordering(application):
            for alive_s in (0.6, 0.9, 1.2):
                process = start_process(lab, application, path)
                time.sleep(alive_s)
                assert process.poll() is None, process.stderr and process.stderr.read()
                process.send_signal(signal.SIGKILL)
                process.communicate()
            for commits in (2, 3, 4):  # the first one takes over, the second one is before the first batch is sent
                process = start_process(lab, application, path, commits)
                process.communicate(timeout=60)
                assert process.returncode == -signal.SIGKILL
        with application.relaying(lab):
            arrived(application, far_end)
            assert len(application.committed) > 50
    assert lab.status(primary_of(lab, "east"))["counters"].get("repeats", 0) > repeats


@pytest.mark.quick
def test_the_primary_is_killed_under_the_relay(lab: Lab, application: Application, tmp_path: Path) -> None:
    primary = primary_of(lab, "east")
    backup = "e2" if primary == "e1" else "e1"
    eventually("the backup in the set", lambda: len(lab.status(primary)["members"]) == 2)
    with receiving(lab, application, tmp_path) as far_end, application.relaying(lab) as relay:
        with ordering(application):
            eventually("the first ones", lambda: relay.status().transmitted > 20)
            lab.kill(primary)
            eventually("the relay to notice", lambda: relay.status().state is RelayState.WAITING)
            eventually("the rest to wait", lambda: relay.status().waiting > 20)
            take_over(lab, backup, primary)
            before = relay.status().transmitted
            eventually("the relay to go on", lambda: relay.status().transmitted > before + 20)
        arrived(application, far_end)
    lab.start(primary)
    eventually("both in the set again", lambda: len(lab.status(backup)["members"]) == 2)


def test_the_relay_and_the_primary_are_killed_together(lab: Lab, application: Application, tmp_path: Path) -> None:
    """What the log has of the last batch is known to the new primary only."""
    primary = primary_of(lab, "east")
    backup = "e2" if primary == "e1" else "e1"
    eventually("the backup in the set", lambda: len(lab.status(primary)["members"]) == 2)
    with receiving(lab, application, tmp_path) as far_end:
        with ordering(application):
            process = start_process(lab, application, tmp_path / "orders.db")
            eventually("the first ones", lambda: len(far_end.transactions) > 20, seen=lambda: process.poll())
            process.send_signal(signal.SIGKILL)
            lab.kill(primary)
            process.communicate()
            take_over(lab, backup, primary)
        with application.relaying(lab):
            arrived(application, far_end)
    lab.start(primary)
    eventually("both in the set again", lambda: len(lab.status(backup)["members"]) == 2)


def test_a_second_relay_takes_over(lab: Lab, application: Application, tmp_path: Path) -> None:
    with receiving(lab, application, tmp_path) as far_end, application.relaying(lab) as first:
        with ordering(application):
            eventually("the first ones", lambda: first.status().transmitted > 20)
            with application.relaying(lab) as second:
                with pytest.raises(RelayFenced, match="Another relay has taken over outbox lrq_outbox"):
                    first.run()
                eventually("the second one to go on", lambda: second.status().transmitted > first.status().transmitted + 20)
        with application.relaying(lab):
            arrived(application, far_end)


@pytest.mark.quick
def test_a_site_that_the_group_does_not_know_holds_up_the_rest(lab: Lab, application: Application, tmp_path: Path) -> None:
    with receiving(lab, application, tmp_path) as far_end, application.relaying(lab) as relay:
        application.order(2)
        connection = application.connect()
        application.outbox.write(connection.cursor(), b"nowhere", ["west", "nowhere"])
        connection.commit()
        application.order(2, 3)
        eventually("the refusal", lambda: relay.status().state is RelayState.REFUSED)
        assert "transaction 3 was refused" in relay.status().problem
        assert "destination 'nowhere' is not known to group 'east'" in relay.status().problem
        eventually("what came before it", lambda: far_end.payloads == application.committed[:2], 30, seen=lambda: far_end.payloads)
        assert relay.status().transmitted == 2
        connection.execute("DELETE FROM lrq_outbox WHERE number = 3")  # an operator gives it up
        connection.commit()
        arrived(application, far_end)


@pytest.mark.quick
def test_a_database_that_is_restored_is_noticed(lab: Lab, application: Application, tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    application.order(2)
    backup = path.read_bytes()
    with receiving(lab, application, tmp_path) as far_end:
        with application.relaying(lab):
            arrived(application, far_end)
        path.write_bytes(backup)
        application.order(2, 3)
        for _ in range(2):
            with application.relaying(lab) as relay, pytest.raises(OutboxRestored, match=r"call Outbox\.renew"):
                relay.run()
        connection = application.connect()
        application.outbox.renew(connection.cursor())
        connection.commit()
        with application.relaying(lab):
            eventually("what came later", lambda: far_end.payloads == [*application.committed[:2], *application.committed])


@pytest.mark.quick
def test_tables_from_a_provider_and_the_outbox(lab: Lab, tmp_path: Path) -> None:
    """A full sync reads the tables while they change; at the end, the far tables are equal."""
    path, far, client_name = tmp_path / "shop.db", tmp_path / "far.db", f"shop{time.time_ns() % 10**9}"
    outbox = Outbox()

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=30)

    with contextlib.closing(connect()) as connection:
        connection.execute("CREATE TABLE stock (item INTEGER PRIMARY KEY, pieces INTEGER)")
        connection.executemany("INSERT INTO stock VALUES (?, 0)", [(item,) for item in range(3000)])
        outbox.create(connection.cursor())
        connection.commit()
    with contextlib.closing(sqlite3.connect(far)) as connection:
        connection.execute("CREATE TABLE stock (source TEXT, item INTEGER, pieces INTEGER, PRIMARY KEY (source, item))")
        connection.commit()

    def change(seed: int) -> str:
        with contextlib.closing(connect()) as connection:
            cursor, item = connection.cursor(), seed * 37 % 3100
            if seed % 5:
                cursor.execute("INSERT INTO stock VALUES (?, ?) ON CONFLICT (item) DO UPDATE SET pieces = excluded.pieces", (item, seed))
                payload = {"table": "stock", "op": "put", "rows": [{"item": item, "pieces": seed}]}
            else:
                cursor.execute("DELETE FROM stock WHERE item = ?", (item,))
                payload = {"table": "stock", "op": "delete", "rows": [{"item": item}]}
            replication_id = outbox.write(cursor, json.dumps(payload).encode(), ["west"])
            connection.commit()
            return replication_id

    def open_publisher() -> Publisher:
        publisher = Publisher(doors(lab, "east"), f"{client_name}-relay", client_name, confirm_timeout_s=60)
        publisher.on_full_sync(SqlProvider(connect, [SourceTable("stock", ("item", "pieces"), ("item",))]))
        return publisher

    listener = TableListener(lambda: sqlite3.connect(far, timeout=30), [Table("stock", ("item", "pieces"), ("item",))])
    with (
        OutboxRelay(connect, open_publisher, outbox) as relay,
        Receiver(doors(lab, "west"), client_name, "far-shop", listener) as receiver,
    ):
        relay.start()
        receiver.start()
        for seed in range(1, 400):
            last = change(seed)
        assert receiver.wait_for("east", replication_id=last, timeout_s=60), receiver.status()
        eventually("the tables in step", lambda: receiver.status()["east"].consistent, 60, seen=receiver.status)
        with contextlib.closing(connect()) as here, contextlib.closing(sqlite3.connect(far)) as there:
            rows = here.execute("SELECT item, pieces FROM stock ORDER BY item").fetchall()
            assert there.execute("SELECT item, pieces FROM stock WHERE source = 'east' ORDER BY item").fetchall() == rows
            assert len(rows) > 2900


# ---- PostgreSQL


@pytest.fixture(scope="module")
def server() -> Iterator[postgresql.Server]:
    if reason := postgresql.why_not():
        pytest.skip(reason)
    with postgresql.server() as found:
        yield found


@pytest.fixture
def connect(server: postgresql.Server) -> Iterator[Callable[..., Any]]:
    """Opens connections to an empty database of the test's own."""
    import psycopg

    dsn = server.create_database()
    opened: list[Any] = []

    def open_connection(**options: Any) -> Any:
        opened.append(psycopg.connect(dsn, **options))
        return opened[-1]

    yield open_connection
    for connection in opened:
        connection.close()


@pytest.mark.quick
def test_writers_at_once_are_relayed_in_commit_order(lab: Lab, connect: Callable[..., Any], tmp_path: Path) -> None:
    """Each transaction reads a counter that the one before it has raised: so the payloads tell the order of commits."""
    application = Application(connect)
    with contextlib.closing(connect()) as connection:
        connection.execute("CREATE TABLE stock (item INTEGER PRIMARY KEY, pieces INTEGER)")
        connection.execute("INSERT INTO stock VALUES (1, 0)")
        connection.commit()

    def sell(number: int) -> None:
        with contextlib.closing(connect()) as connection:
            for turn in range(60):
                cursor = connection.cursor()
                cursor.execute("INSERT INTO orders VALUES (%s, 'x')", (1000 * number + turn,))  # takes an ID of PostgreSQL early
                time.sleep(0.001 * ((number + turn) % 3))
                cursor.execute("UPDATE stock SET pieces = pieces + 1 WHERE item = 1 RETURNING pieces")
                (pieces,) = cursor.fetchone()
                application.outbox.write(cursor, f"{pieces}".encode(), ["west"])
                application.outbox.write(cursor, f"{pieces} again".encode(), ["west"])
                if turn % 10 == 9:
                    connection.rollback()
                else:
                    connection.commit()

    with receiving(lab, application, tmp_path) as far_end, application.relaying(lab):
        sellers = [threading.Thread(target=sell, args=(number,)) for number in range(4)]
        for seller in sellers:
            seller.start()
        for seller in sellers:
            seller.join()
        application.committed = [(f"{pieces}", f"{pieces} again") for pieces in range(1, 4 * 54 + 1)]
        arrived(application, far_end)
        eventually("an empty outbox", lambda: application.rows() == [])


def test_postgresql_is_killed_under_the_relay(lab: Lab, server: postgresql.Server, connect: Callable[..., Any], tmp_path: Path) -> None:
    application = Application(connect)
    with receiving(lab, application, tmp_path) as far_end, application.relaying(lab) as relay:
        application.order(50)
        server.kill()
        eventually("the relay to notice", lambda: relay.status().state is RelayState.WAITING, 30)
        server.start()
        application.order(50, 51)
        arrived(application, far_end)
        eventually("the relay to go on", lambda: relay.status().state is RelayState.TRANSMITTING, 30)


@pytest.mark.quick
def test_what_an_application_does_with_postgresql(connect: Callable[..., Any]) -> None:
    from psycopg.rows import dict_row

    outbox = Outbox("app.outbox")
    connection = connect()
    connection.execute("CREATE SCHEMA app")
    outbox.create(connection.cursor())
    outbox.create(connection.cursor())
    connection.commit()
    first, second = (outbox.write(connection.cursor(), b"x", ["west"]) for _ in range(2))
    assert first == second, "one database transaction is one transaction of the log"
    connection.commit()
    assert outbox.write(connection.cursor(), b"rolled back", ["west"]) != first
    connection.rollback()
    with connection.transaction():
        outbox.write(connection.cursor(), b"y", ["west"])
        with contextlib.suppress(ZeroDivisionError), connection.transaction():  # a savepoint
            outbox.write(connection.cursor(), b"rolled back", ["west"])
            raise ZeroDivisionError
        outbox.write(connection.cursor(row_factory=dict_row), b"z", ["south"])
    connection.commit()
    rows = connection.execute("SELECT number, entry, payload, destinations FROM app.outbox ORDER BY number, entry").fetchall()
    assert rows == [(1, 0, b"x", "west"), (1, 1, b"x", "west"), (2, 0, b"y", "west"), (2, 1, b"z", "south")]
    automatic = connect(autocommit=True)
    with pytest.raises(NoTransaction):
        outbox.write(automatic.cursor(), b"x", ["west"])
    with automatic.transaction():
        outbox.write(automatic.cursor(), b"x", ["west"])
    assert connection.execute("SELECT number FROM app.outbox_counter").fetchall() == [(3,)]


# ---- the documentation


def example(lab: Lab, client_name: str) -> str:
    """The first example of docs/outbox.md, with the lab's addresses and a client of the test's own."""
    page = (Path(__file__).parents[2] / "docs" / "outbox.md").read_text("utf-8")
    text = page.partition("```python\n")[2].partition("```")[0]
    for line in ('["amqp://app:secret@rabbit-1:5672", "amqp://app:secret@rabbit-2:5672"]', '"orders-relay"', 'client_name="orders"'):
        assert text.count(line) == 1, line
    return (
        text.replace('["amqp://app:secret@rabbit-1:5672", "amqp://app:secret@rabbit-2:5672"]', repr(doors(lab, "east")))
        .replace('"orders-relay"', f'"{client_name}-relay"')
        .replace('client_name="orders"', f'client_name="{client_name}"')
    )


@pytest.mark.quick
def test_the_example_of_the_documentation_runs(lab: Lab, application: Application, tmp_path: Path) -> None:
    folder = tmp_path / "example"
    folder.mkdir()
    with receiving(lab, application, tmp_path) as far_end:
        process = subprocess.Popen([sys.executable, "-c", example(lab, application.client_name)], cwd=folder, stderr=subprocess.PIPE)
        try:
            eventually("the order", lambda: far_end.payloads == [("a pump was ordered",)], 60, seen=lambda: process.poll())
            with contextlib.closing(sqlite3.connect(folder / "orders.db")) as connection:
                assert connection.execute("SELECT item FROM orders").fetchall() == [("pump",)]
                eventually("an empty outbox", lambda: connection.execute("SELECT * FROM lrq_outbox").fetchall() == [])
        finally:
            process.kill()
            process.communicate()


@pytest.mark.quick
def test_a_receiver_builds_long_tables_aside_in_postgresql(connect: Callable[..., Any]) -> None:
    """PostgreSQL cuts a name at 63 characters: the shadows of such tables were one. The second snapshot finds tables with another key."""
    names = [f"{'t' * 52}_{number}" for number in range(2)]
    connection, base, queue = connect(autocommit=True), Position(257, 3), "LRQ_Recv_shop_east"
    for name in names:
        connection.execute(f"CREATE TABLE {name} (source TEXT, item INTEGER, count INTEGER, PRIMARY KEY (source, item))")

    def rows() -> list[list[tuple[int, int]]]:
        return [connection.execute(f"SELECT item, count FROM {name} ORDER BY item, count").fetchall() for name in names]

    def give(number: int, key: tuple[str, ...], before: Progress | None, expected: list[list[tuple[int, int]]]) -> Progress:
        listener = TableListener(connect, [Table(name, ("item", "count"), key) for name in names], shadow=True)
        assert listener.load("db", queue) == before
        begun = Progress(Phase.BOOTSTRAP, base, f"r{number}", base)
        body = [json.dumps({"table": name, "rows": [{"item": 1, "count": n}, {"item": 1, "count": number}]}).encode() for n, name in enumerate(names)]
        updates = [
            Update(queue, "east", "shop", UpdateType.SNAPSHOT_SYNC, base, "app/1.0", 0, index, each, f"r{number}", index == len(names) - 1)
            for index, each in enumerate(body)
        ]
        snapshot, whole = Snapshot(queue, "east", "shop", f"r{number}", base), Progress(Phase.NORMAL, Position(257, 4 + number))
        for step in (Begin(begun, snapshot), Apply(replace(begun, position=Position(257, 4)), updates), Complete(whole, snapshot)):
            assert rows() == expected
            assert listener.take("db", queue, step, before)
            before = step.progress
        return whole

    progress = give(7, ("item",), None, [[], []])
    for name in names:
        connection.execute(f"ALTER TABLE {name} DROP CONSTRAINT {name}_pkey, ADD PRIMARY KEY (source, item, count)")
    give(8, ("item", "count"), progress, [[(1, 7)], [(1, 7)]])
    assert rows() == [[(1, 0), (1, 8)], [(1, 1), (1, 8)]]
    assert connection.execute("SELECT count(*) FROM pg_tables WHERE tablename LIKE 'lrq_shadow%'").fetchone() == (0,)
