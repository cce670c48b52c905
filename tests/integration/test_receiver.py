"""A receiver at a sink keeps SQLite tables in step with a source, while everything between the two is killed (G6).

The tables are compared row by row with what the source's application transmitted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kill_gate import run_through
from load import User, add_users, eventually, primary_of, set_up, take_over
from patience import PATIENT_DOOR
from stock_source import TABLE, Source, doors

from lrq_ha.errors import MalformedInput
from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import FullSyncContext, FullSyncRequest, NackedError
from lrq_ha.receiver import (
    Fenced,
    Listener,
    Receiver,
    Redelivery,
    Snapshot,
    SqlPositions,
    State,
    Stop,
    TableListener,
    Update,
)
from lrq_ha.receiver.errors import ReceiverError
from lrq_ha.routing.names import COMMIT, recv_queue
from lrq_ha.streams.errors import MessageRefused, QueueRefused
from lrq_ha.streams.node_connection import NodeConnection, address_of

pytestmark = [pytest.mark.broker, pytest.mark.proves("G6")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    """One node as the source, and a pair as the sink."""
    groups = {"east": 1, "west": 2}
    found = Lab(groups, tmp_path_factory.mktemp("receiver") / "lab", sites={"east": ["west"], "west": []}, broker=broker_version, door=PATIENT_DOOR)
    set_up(found, "backup_timeout_s = 60.0")
    with found:
        yield found


def database(folder: Path) -> Path:
    path = folder / "stock.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE stock (source TEXT, item INTEGER, count INTEGER, PRIMARY KEY (source, item))")
        connection.execute("CREATE TABLE applied (position TEXT)")
        connection.commit()
    return path


def stock(path: Path) -> dict[int, int]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute("SELECT item, count FROM stock WHERE source = 'east'").fetchall())


class Counting(TableListener):
    """Notes each delta that it applies, in the transaction in which it applies the delta."""

    def apply_log_entries(self, cursor: sqlite3.Cursor, updates: list[Update]) -> None:
        super().apply_log_entries(cursor, updates)
        if updates[0].request_id == "":
            cursor.executemany("INSERT INTO applied VALUES (?)", [(update.replication_id,) for update in updates])


def listener(path: Path) -> Counting:
    return Counting(lambda: sqlite3.connect(path, timeout=30), [TABLE])


@pytest.fixture
def source(lab: Lab) -> Iterator[Source]:
    found = Source(lab, f"stock{time.time_ns() % 10**9}")
    yield found
    found.publisher.close(60)


@contextlib.contextmanager
def receiving(lab: Lab, source: Source, with_: Listener, name: str = "stock-db", **options: object) -> Iterator[Receiver]:
    with Receiver(doors(lab), source.client_name, name, with_, **options) as found:  # type: ignore[arg-type]
        found.start()
        yield found


def arrived(receiver: Receiver, source: Source, timeout_s: float = 120.0) -> None:
    source.publisher.flush(60)
    assert receiver.wait_for("east", replication_id=source.last, timeout_s=timeout_s), receiver.status()


def normal(receiver: Receiver) -> None:
    eventually("the receiver in step", lambda: "east" in receiver.status() and receiver.status()["east"].consistent, 30, seen=receiver.status)


@pytest.mark.quick
def test_a_table_follows_its_source_and_goes_on_where_it_stopped(lab: Lab, source: Source, tmp_path: Path) -> None:
    path = database(tmp_path)
    source.change_many(0, 20)
    with receiving(lab, source, listener(path)) as receiver:
        normal(receiver)
        source.change_many(20, 300)
        arrived(receiver, source)
        assert stock(path) == source.stock
        position = receiver.status()["east"].position
    source.change_many(320, 50)
    source.publisher.flush(60)
    with receiving(lab, source, listener(path)) as receiver:
        arrived(receiver, source)
        assert stock(path) == source.stock
        assert receiver.status()["east"].position > position

        def told() -> str:
            receivers = lab.status(primary_of(lab, "west"))["receiving"][recv_queue(source.client_name, "east")]["receivers"]
            return f"{receivers['stock-db']['phase']} {receivers['stock-db']['position']}"

        eventually("operators to see how far it is", lambda: told() == f"normal {receiver.status()['east'].position}", 30)
        assert receiver.stop()
        assert receiver.forget("east")
        with pytest.raises(KeyError):
            told()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        applied = [name for (name,) in connection.execute("SELECT position FROM applied ORDER BY rowid")]
    assert len(set(applied[-350:])) == 350, "no delta is applied twice, nor left out, over a restart"


@pytest.mark.quick
def test_the_sinks_primary_is_killed_under_a_receiver(lab: Lab, source: Source, tmp_path: Path) -> None:
    path = database(tmp_path)
    with receiving(lab, source, listener(path)) as receiver:
        normal(receiver)
        source.change_many(0, 200)
        primary = primary_of(lab, "west")
        backup = "w2" if primary == "w1" else "w1"
        eventually("the sink's backup in the set", lambda: len(lab.status(primary)["members"]) == 2)
        lab.kill(primary)
        source.change_many(200, 200)
        take_over(lab, backup, primary)
        arrived(receiver, source)
        assert stock(path) == source.stock
        normal(receiver)
    lab.start(primary)
    eventually("both in the set again", lambda: len(lab.status(backup)["members"]) == 2)


@pytest.mark.quick
def test_a_receiver_is_killed_in_the_middle_of_its_replay(lab: Lab, tmp_path: Path) -> None:
    """A cell of the kill matrix (test_receiver_kills.py)."""
    run_through(lab, tmp_path, "local-replay", "receiver")


class Paged(Source):
    """Transmits its full syncs page by page."""

    def _provide(self, request: FullSyncRequest, context: FullSyncContext) -> None:
        self.reason = request.reason
        with self._lock:
            rows = [json.dumps({"table": "stock", "rows": [{"item": item, "count": count}]}).encode() for item, count in self.stock.items()]
            for first in range(0, len(rows), 7):
                context.transmit_many(rows[first : first + 7], progress=first)
            context.complete()


@pytest.mark.quick
def test_a_full_sync_that_the_application_wants_comes_with_several_rows_a_transaction(lab: Lab, tmp_path: Path) -> None:
    path, source = database(tmp_path), Paged(lab, f"paged{time.time_ns() % 10**9}")
    with receiving(lab, source, listener(path)) as receiver:
        normal(receiver)
        assert stock(path) == source.stock
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("DELETE FROM stock")
            connection.commit()
        source.publisher.request_full_sync("west", "rows were lost").result(60)
        eventually("the rows", lambda: stock(path) == source.stock, 60, seen=receiver.status)
        assert source.reason == "rows were lost"
        with pytest.raises(NackedError, match="destination 'nowhere' is not known"):
            source.publisher.request_full_sync("nowhere").result(60)
    source.publisher.close(60)


PROCESS = """
    import sqlite3, sys
    from lrq_ha.receiver import Receiver, Table, TableListener
    nodes, client, path = sys.argv[1].split(","), sys.argv[2], sys.argv[3]
    table = Table("stock", ("item", "count"), ("item",))
    Receiver(nodes, client, "killed", TableListener(lambda: sqlite3.connect(path, timeout=30), [table])).run()
"""


def test_the_receiver_is_killed_again_and_again(lab: Lab, source: Source, tmp_path: Path) -> None:
    """kill -9 in the snapshot, in the replay, and while it follows: the table is right at the end."""
    path, turn = database(tmp_path), 0
    done = threading.Event()

    def change() -> None:
        nonlocal turn
        while not done.is_set():
            source.change_many(turn * 20, 20)
            turn += 1
            time.sleep(0.05)

    changing = threading.Thread(target=change)
    changing.start()
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), ",".join(doors(lab)), source.client_name, str(path)]
    try:
        for alive_s in (1.0, 1.3, 1.6, 2.0, 2.5):
            process = subprocess.Popen(command)
            time.sleep(alive_s)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    finally:
        done.set()
        changing.join()
    source.change(0, 1)
    with receiving(lab, source, TableListener(lambda: sqlite3.connect(path, timeout=30), [TABLE]), "killed") as receiver:
        arrived(receiver, source)
        normal(receiver)
        assert stock(path) == source.stock


class Reluctant(Listener):
    """Keeps what it is given, and does as it is told."""

    def __init__(self) -> None:
        self.answer: Callable[[list[Update]], object] = lambda _updates: True
        self.given: list[list[Update]] = []
        self.snapshots: list[Snapshot] = []
        self.states: list[tuple[State, State]] = []
        self.errors: list[ReceiverError] = []

    def on_snapshot_sync_start(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def process_updates_in_snapshot_sync(self, updates: list[Update]) -> bool:
        return True

    def process_updates_in_log_entry_sync(self, updates: list[Update]) -> bool:
        self.given.append(updates)
        return self.answer(updates)  # type: ignore[return-value]

    def on_state(self, source: str, old: State, new: State, reason: str) -> None:
        self.states.append((old, new))

    def on_error(self, source: str, error: ReceiverError) -> None:
        self.errors.append(error)


@pytest.mark.quick
def test_a_list_that_is_not_taken_is_given_again_until_it_is(lab: Lab, source: Source, tmp_path: Path) -> None:
    reluctant, answers = Reluctant(), iter([False, None, 1 / 3, ValueError("no"), True])

    def answer(_updates: list[Update]) -> object:
        found = next(answers, True)
        if isinstance(found, Exception):
            raise found
        return found

    positions = SqlPositions(lambda: sqlite3.connect(tmp_path / "positions.db", timeout=30))
    with receiving(lab, source, reluctant, positions=positions) as receiver:
        normal(receiver)
        reluctant.answer = answer
        source.change(1, 1)
        arrived(receiver, source)
        source.change(2, 2)
        arrived(receiver, source)
    first = reluctant.given[0]
    assert [lists == first for lists in reluctant.given] == [True] * 5 + [False]
    told = [error for error in reluctant.errors if isinstance(error, Redelivery)]
    assert [error.attempt for error in told] == [1, 2, 3, 4]
    assert "must return True or False" in str(told[1])
    assert "ValueError: no" in str(told[3])
    assert len(reluctant.snapshots) == 1
    assert reluctant.states[-1][1] is State.NORMAL


@pytest.mark.full
def test_a_list_that_is_not_taken_for_a_minute_waits_and_nothing_is_passed_over(lab: Lab, source: Source, tmp_path: Path) -> None:
    """A minute. The pauses grow, another client's lists go on, and the list comes once more, unchanged, when the listener takes lists again."""
    reluctant, other = Reluctant(), Source(lab, f"other{time.time_ns() % 10**9}")
    path, at = database(tmp_path), list[float]()

    def refuse(_updates: list[Update]) -> bool:
        at.append(time.monotonic())
        return False

    with receiving(lab, source, reluctant) as receiver, receiving(lab, other, listener(path), "other-db") as beside:
        normal(receiver)
        normal(beside)
        reluctant.answer = refuse
        for number in range(5):
            source.change(number, number)
        source.publisher.flush(60)
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            other.change_many(len(at), 3)
            arrived(beside, other)
            time.sleep(1)
        reluctant.answer = lambda _updates: True
        arrived(receiver, source)
        assert stock(path) == other.stock
    pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert 5 <= len(at) <= 12, "0.1 s, doubling to 30 s"
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(pauses)), pauses
    attempts = [error.attempt for error in reluctant.errors if isinstance(error, Redelivery)]
    assert attempts == list(range(1, len(at) + 1))
    refused = reluctant.given[0]
    assert reluctant.given[: len(at) + 1] == [refused] * (len(at) + 1), "the list comes unchanged"
    taken = [json.loads(update.opaque_payload)["rows"][0]["item"] for updates in reluctant.given[len(at) :] for update in updates]
    assert taken == list(range(5)), "each once, in order"
    other.publisher.close(60)


@pytest.mark.quick
def test_a_second_process_of_a_name_takes_over_and_the_first_ends(lab: Lab, source: Source, tmp_path: Path) -> None:
    path = database(tmp_path)
    with receiving(lab, source, listener(path)) as first:
        normal(first)
        with receiving(lab, source, listener(path)) as second:
            normal(second)
            source.change(1, 5)
            arrived(second, source)
            with pytest.raises(Fenced, match="Another process has taken over receiver 'stock-db'"):
                first.run()
            assert stock(path) == source.stock


@pytest.mark.quick
def test_a_position_belongs_to_its_user_and_takes_a_place_until_it_is_forgotten(lab: Lab, source: Source) -> None:
    queue = recv_queue(source.client_name, "east")
    node = lab.nodes[primary := primary_of(lab, "west")]

    def receivers() -> list[str]:
        return list(lab.status(primary)["receiving"][queue]["receivers"])

    with receiving(lab, source, Reluctant(), "of-app") as receiver:
        normal(receiver)
        eventually("its position", lambda: receivers() == ["of-app"], 30)
    other = User("other", "secret", [("lrq", ".*", ".*", ".*")])
    add_users(lab, primary, other)
    url = f"amqp://other:secret@{node.door.rpartition('@')[2]}"
    others = Receiver([url], source.client_name, "of-app", Reluctant())
    with pytest.raises(QueueRefused, match="the positions of receiver 'of-app' belong to another user"):
        others.forget("east")
    with NodeConnection.open([address_of(url)], "test", producer="of-other") as connection:
        commit = pb.Commit(receiver="of-other", queue="LRQ_Recv_unknown_east", token="t")
        with pytest.raises(MessageRefused, match="no batch has come for 'LRQ_Recv_unknown_east'"):
            connection.publish(COMMIT, commit.SerializeToString())
    assert receivers() == ["of-app"]
    assert receiver.forget("east")
    assert receivers() == []


@pytest.mark.quick
def test_a_listener_ends_the_receiver(lab: Lab, source: Source, tmp_path: Path) -> None:
    """The list that it had is given again at the next start."""
    reluctant = Reluctant()
    positions = SqlPositions(lambda: sqlite3.connect(tmp_path / "positions.db", timeout=30))

    def stop(_updates: list[Update]) -> object:
        raise Stop("enough")

    with receiving(lab, source, reluctant, positions=positions) as receiver:
        normal(receiver)
        reluctant.answer = stop
        source.change(1, 1)
        with pytest.raises(Stop, match="enough"):
            receiver.run()
    again = Reluctant()
    with receiving(lab, source, again, positions=positions) as receiver:
        source.change(2, 2)
        arrived(receiver, source)
    assert again.given[0][: len(reluctant.given[0])] == reluctant.given[0]
    assert not again.snapshots


@pytest.mark.quick
def test_a_payload_that_cannot_be_decoded_is_named_and_not_left_out(lab: Lab, source: Source, tmp_path: Path) -> None:
    path, errors = database(tmp_path), []

    class Telling(Counting):
        def on_error(self, source: str, error: ReceiverError) -> None:
            errors.append(str(error))

    with receiving(lab, source, Telling(lambda: sqlite3.connect(path, timeout=30), [TABLE])) as receiver:
        normal(receiver)
        source.publisher.transmit_log_entry_message(b"no json", ["west"])
        source.change(1, 5)
        eventually("the error", lambda: len(errors) >= 2)
        assert "cannot be decoded" in errors[0]
        assert receiver.status()["east"].state is State.NORMAL
        assert stock(path).get(1) != 5, "nothing behind it is applied"


@pytest.mark.quick
def test_a_receiver_that_starts_before_its_queue_exists_waits(lab: Lab, tmp_path: Path) -> None:
    path = database(tmp_path)
    client = f"late{time.time_ns() % 10**9}"
    with Receiver(doors(lab), client, "late", listener(path)) as receiver:
        receiver.start()
        eventually("a node to answer", lambda: receiver.problem == "")
        assert receiver.status() == {}
        source = Source(lab, client)
        source.change(1, 5)
        arrived(receiver, source)
        normal(receiver)
        assert stock(path) == source.stock
        source.publisher.close(60)


@pytest.mark.quick
def test_a_position_in_the_groups_log_survives_a_failover_and_fences_an_older_process(lab: Lab, source: Source) -> None:
    """The default: no database. A list is given at least once, in order."""
    first = Reluctant()
    with receiving(lab, source, first) as receiver:
        normal(receiver)
        source.change_many(0, 50)
        arrived(receiver, source)
        assert receiver.stop()
        position = receiver.status()["east"].position
    primary = primary_of(lab, "west")
    backup = "w2" if primary == "w1" else "w1"
    eventually("the sink's backup in the set", lambda: len(lab.status(primary)["members"]) == 2)
    lab.kill(primary)
    take_over(lab, backup, primary)
    again = Reluctant()
    with receiving(lab, source, again) as receiver:
        source.change(1, 5)
        arrived(receiver, source)
        assert not again.snapshots
        assert again.given[0][0].position > position, "what was committed does not come again"
        told = lab.status(backup)["receiving"][f"LRQ_Recv_{source.client_name}_east"]["receivers"]
        assert told["stock-db"]["phase"] == "normal"
        with receiving(lab, source, Reluctant()) as newer:
            normal(newer)
            source.change(2, 5)
            arrived(newer, source)
            source.change(3, 5)
            with pytest.raises(Fenced):
                receiver.run()
    lab.start(primary)
    eventually("both in the set again", lambda: len(lab.status(backup)["members"]) == 2)


def test_bad_arguments_are_refused_at_once(tmp_path: Path) -> None:
    good = ["amqp://u:p@127.0.0.1:1"]
    for arguments, said in (
        ((good, "a_b", "n", Listener()), "is no client name"),
        ((good, "a", "", Listener()), "is no producer name"),
        (("amqp://u:p@h", "a", "n", Listener()), "It must be a non-empty list"),
        ((["http://h"], "a", "n", Listener()), "is not an amqp:// URL"),
        ((["amqp://u:p@h/other"], "a", "n", Listener()), "has another virtual host"),
    ):
        with pytest.raises(MalformedInput, match=said):
            Receiver(*arguments)
