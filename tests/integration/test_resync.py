"""A receive queue always holds a whole snapshot, or a full sync is asked for before it does not; and anyone may ask for one (G6)."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from load import User, add_users, all_applied, command, eventually, in_sync, on_record, primary_of, renew, set_up, take_over, told
from patience import PATIENT_DOOR
from renewals import SMALL_LOG, discard, fall_off
from stock_source import TABLE, Source
from test_receiver import Counting, arrived, database, listener, normal, receiving, stock

from lrq_ha.lab import Lab
from lrq_ha.publisher import FullSyncContext, FullSyncRequest, Publisher
from lrq_ha.receiver import Receiver, Trimmed
from lrq_ha.receiver.errors import ReceiverError
from lrq_ha.routing.names import recv_queue
from lrq_ha.streams.errors import MessageRefused

pytestmark = [pytest.mark.broker, pytest.mark.proves("G6", "renewal")]

RECEIVE_BYTES = 4 << 20
DELTA_BYTES = 100_000


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    """One node as the source, and a pair as the sink, with small receive queues."""
    groups = {"east": 1, "west": 2}
    found = Lab(groups, tmp_path_factory.mktemp("resync") / "lab", sites={"east": ["west"], "west": []}, broker=broker_version, door=PATIENT_DOOR)
    set_up(found, f"backup_timeout_s = 60.0\n\n[receive]\nbytes_max = {RECEIVE_BYTES}")
    with found:
        yield found


@pytest.fixture
def source(lab: Lab) -> Iterator[Source]:
    found = Source(lab, f"resync{time.time_ns() % 10**9}")
    yield found
    found.publisher.close(60)


def receiving_status(lab: Lab, client_name: str) -> dict[str, Any]:
    """What the sink's primary says of the client's queue."""
    return dict(told(lab, primary_of(lab, "west"))["receiving"].get(recv_queue(client_name, "east"), {}))


def snapshot_of(lab: Lab, client_name: str) -> dict[str, Any]:
    return dict(receiving_status(lab, client_name).get("snapshot", {}))


def in_step(lab: Lab, source: Source) -> bool:
    """Whether the site has acked everything that was sent, and demands nothing."""
    found = told(lab, "e1")["sessions"]["west"]["clients"].get(source.client_name, {})
    acked = bool(found) and found["state"] == "in_log_entry_sync" and found["in_flight_bytes"] == 0
    return acked and receiving_status(lab, source.client_name)["demand"] is None


def whole_again(lab: Lab, client_name: str, before: dict[str, Any]) -> None:
    """Another snapshot is whole, and no demand is open."""

    def done() -> bool:
        snapshot = snapshot_of(lab, client_name)
        return snapshot["complete"] and snapshot["whole"] != before["whole"] and receiving_status(lab, client_name)["demand"] is None

    eventually("another whole snapshot", done, 30, seen=lambda: receiving_status(lab, client_name))


@pytest.mark.quick
def test_a_full_sync_is_demanded_at_the_source_at_the_sink_and_by_a_receiver(lab: Lab, source: Source, tmp_path: Path) -> None:
    path, client = database(tmp_path), source.client_name
    with receiving(lab, source, listener(path)) as receiver:
        source.change(1, 5)
        arrived(receiver, source)
        normal(receiver)
        at_source, at_sink = ("--group", "east", "--to", "west"), ("--group", "west", "--from", "east")
        for arguments in (at_source, at_sink):
            before = snapshot_of(lab, client)
            code, said = command("resync", client, *arguments, "--dry-run", lab=lab)
            assert (code, "would" in said, snapshot_of(lab, client)) == (0, True, before), said
            code, said = command("resync", client, *arguments, "--reason", "rows were lost", lab=lab)
            assert code == 0, said
            whole_again(lab, client, before)
        before = snapshot_of(lab, client)
        receiver.resync("east", "an application wants it")
        whole_again(lab, client, before)
        source.change(2, 6)
        arrived(receiver, source)
        assert stock(path) == source.stock


@pytest.mark.quick
def test_a_demand_that_cannot_be_met_says_why(lab: Lab, source: Source, tmp_path: Path) -> None:
    client = source.client_name
    for arguments, why in (
        (("nobody", "--group", "east", "--to", "west"), client),
        ((client, "--group", "east", "--to", "south"), "Name one of its sites: west"),
        ((client, "--group", "west", "--to", "east"), "sends nothing to east"),
        (("nobody", "--group", "west", "--from", "east"), "nothing of nobody has come from east"),
        ((client, "--group", "west", "--from", "a_b"), "is no remote id"),
    ):
        code, said = command("resync", *arguments, lab=lab)
        assert (code, why in said) == (1, True), said
    reader = User("reader", "secret", [("lrq", "", "", ".*")])
    add_users(lab, primary_of(lab, "west"), reader)
    node = lab.nodes[primary_of(lab, "west")]
    url = f"amqp://reader:secret@{node.door.rpartition('@')[2]}"
    with Receiver([url], client, "without-right", listener(database(tmp_path))) as receiver:
        receiver.start()
        eventually("the queue", lambda: bool(receiver.status()), 30)
        with pytest.raises(MessageRefused, match="right to write to"):
            receiver.resync()


class Failing(Source):
    """Its provider stops in the middle of a full sync when it is told to, and says that it gives up when it is let go."""

    def __init__(self, *arguments: Any) -> None:
        self.stops, self.stopped, self.go_on = threading.Event(), threading.Event(), threading.Event()
        self.asked: list[str] = []
        super().__init__(*arguments)

    def _provide(self, request: FullSyncRequest, context: FullSyncContext) -> None:
        self.asked.append(request.reason)
        if self.stops.is_set():
            context.transmit(json.dumps({"table": "stock", "rows": [{"item": 1, "count": 1}]}).encode())
            self.stopped.set()
            self.go_on.wait(60)
            raise RuntimeError("the database is gone")
        super()._provide(request, context)


def test_a_snapshot_that_a_client_without_a_provider_leaves_is_made_by_the_next_provider(lab: Lab, tmp_path: Path) -> None:
    source = Failing(lab, client := f"leaving{time.time_ns() % 10**9}")
    path, at_source = database(tmp_path), ("--group", "east", "--to", "west", "--reason", "rows were lost")
    doors = [lab.nodes["e1"].door]
    with Publisher(doors, f"{client}-other", client, confirm_timeout_s=60) as other, receiving(lab, source, listener(path)) as receiver:
        source.change(1, 5)
        arrived(receiver, source)
        source.stops.set()
        code, said = command("resync", client, *at_source, lab=lab)
        assert code == 0, said
        assert source.stopped.wait(30)
        assert source.asked[-1] == "an operator demands a full sync: rows were lost"
        eventually("the beginning", lambda: not snapshot_of(lab, client)["complete"], 30)
        other.transmit_log_entry_message(json.dumps({"table": "stock", "rows": []}).encode(), ["west"]).result(60)  # it says that it has no provider
        source.go_on.set()

        def is_dropped() -> bool:
            found = told(lab, "e1")["sessions"]["west"]["clients"][client]
            return found["state"] == "in_log_entry_sync" and "no full sync provider" in found["reason"]

        eventually("the source to give it up", is_dropped, 30, seen=lambda: told(lab, "e1")["sessions"]["west"]["clients"][client])
        code, said = command("resync", client, *at_source, lab=lab)
        assert (code, "has no full sync provider" in said) == (1, True), said
        before = snapshot_of(lab, client)
        assert not before["complete"]
        source.publisher.close(60)
        following = Source(lab, client)
        whole_again(lab, client, before)
        following.change(2, 6)
        arrived(receiver, following)
        normal(receiver)
        assert stock(path) == following.stock
        following.publisher.close(60)


def change_largely(source: Source, number: int) -> None:
    """Changes one of nine items, with DELTA_BYTES of padding."""
    source.stock[number % 9] = number
    body = json.dumps({"table": "stock", "op": "put", "rows": [{"item": number % 9, "count": number}]})
    source.last = source.publisher.transmit_log_entry_message((body + " " * DELTA_BYTES).encode(), ["west"]).replication_id


def feed_three_times_its_size(lab: Lab, source: Source) -> None:
    """Writes three times the size of its queue, with a table of nine items, no faster than full syncs come."""
    snapshots: set[str] = set()
    for number in range(3 * RECEIVE_BYTES // DELTA_BYTES):
        change_largely(source, number)
        if number % 10 == 0:
            source.publisher.flush(60)
            time.sleep(0.3)  # the sink looks a few times a second
            eventually("what was sent to arrive, and the sink to lack nothing", lambda: in_step(lab, source), 30)
            snapshots.add(str(snapshot_of(lab, source.client_name).get("whole")))
    assert len(snapshots - {"None"}) >= 3, f"the sink demands full syncs by itself: {snapshots}"


@pytest.mark.quick
def test_a_queue_fed_three_times_its_size_gives_a_new_receiver_the_whole_table(lab: Lab, source: Source, tmp_path: Path) -> None:
    feed_three_times_its_size(lab, source)
    path = database(tmp_path)
    with receiving(lab, source, listener(path)) as receiver:
        arrived(receiver, source)
        normal(receiver)
        assert stock(path) == source.stock


class Telling(Counting):
    """Keeps a table in a database file; what it is told of goes to `errors`."""

    def __init__(self, path: Path, errors: list[ReceiverError]) -> None:
        super().__init__(lambda: sqlite3.connect(path, timeout=30), [TABLE])
        self._told = errors

    def on_error(self, source: str, error: ReceiverError) -> None:
        self._told.append(error)


def test_a_receiver_whose_place_was_trimmed_is_told_and_healed(lab: Lab, source: Source, tmp_path: Path) -> None:
    """It is away while its queue is fed three times its size: what comes next for it is gone."""
    path, errors = database(tmp_path), list[ReceiverError]()

    with receiving(lab, source, Telling(path, errors)) as receiver:
        source.change_many(0, 20)
        arrived(receiver, source)
        normal(receiver)
        left_at = receiver.status()["east"].position
    feed_three_times_its_size(lab, source)
    with receiving(lab, source, Telling(path, errors)) as receiver:
        arrived(receiver, source)
        normal(receiver)
        assert stock(path) == source.stock
    [error] = errors
    assert isinstance(error, Trimmed)
    assert (error.after, error.before > error.after) == (left_at, True)


def test_a_queue_waits_for_its_receiver(broker_version: str, tmp_path: Path) -> None:
    """With `on_backlog = "hold"`: three times its size is sent while the receiver is away, and the receiver lacks nothing when it is back."""
    lab = Lab({"east": 1, "west": 1}, tmp_path / "lab", sites={"east": ["west"], "west": []}, broker=broker_version, door=PATIENT_DOOR)
    set_up(lab, f'\n[receive]\nbytes_max = {RECEIVE_BYTES}\non_backlog = "hold"')
    path, errors = database(tmp_path), list[ReceiverError]()

    with lab:
        source = Source(lab, "held")
        with receiving(lab, source, Telling(path, errors)) as receiver:
            source.change_many(0, 20)
            arrived(receiver, source)
            normal(receiver)
            eventually("the sink to know its position", lambda: bool(receiving_status(lab, "held")["receivers"]))
        for number in range(3 * RECEIVE_BYTES // DELTA_BYTES):
            change_largely(source, number)
        source.publisher.flush(60)
        held = "it takes nothing more: receiver '"
        eventually("the queue to be held", lambda: held in str(receiving_status(lab, "held")["held"]))
        eventually("the source to say so", lambda: held in told(lab, "e1")["sessions"]["west"]["clients"]["held"]["problem"])
        assert re.search(r"receiver '\S+' lacks \d+ bytes of LRQ_Recv_held_east, which surely keeps", command("list", lab=lab)[1])
        assert receiving_status(lab, "held")["snapshot"]["bytes_behind"] < RECEIVE_BYTES
        with receiving(lab, source, Telling(path, errors)) as receiver:
            arrived(receiver, source)
            normal(receiver)
            assert stock(path) == source.stock
            eventually("the queue to take everything again", lambda: receiving_status(lab, "held")["held"] is None)
        assert errors == []
        source.publisher.close(60)


def test_a_new_primary_without_a_whole_snapshot_demands_one(lab: Lab, source: Source, tmp_path: Path) -> None:
    """An operator has deleted the backup's copy of the queue."""
    source.change_many(0, 20)
    source.publisher.flush(60)
    eventually("a whole snapshot", lambda: snapshot_of(lab, source.client_name).get("complete") is True, 30)
    primary = primary_of(lab, "west")
    [backup] = {"w1", "w2"} - {primary}
    queue = recv_queue(source.client_name, "east")
    all_applied(lab, primary, backup)
    on_record(lab, backup)
    lab.ctl(backup, "delete_queue", "-p", "lrq", queue)
    source.change_many(20, 5)
    source.publisher.flush(60)
    eventually("the site to have it", lambda: in_step(lab, source), 30)
    all_applied(lab, primary, backup)  # its sidecar has begun another stream
    eventually("the backup to follow", lambda: told(lab, backup)["role"] == "ready", 60)
    before, identity = snapshot_of(lab, source.client_name), told(lab, primary)["log"]
    lab.kill(primary)
    take_over(lab, backup, primary)
    assert told(lab, backup)["log"] == identity
    eventually("another whole snapshot", lambda: snapshot_of(lab, source.client_name).get("whole") != before["whole"], 20)
    path = database(tmp_path)
    with receiving(lab, source, listener(path)) as receiver:
        source.change(1, 5)
        arrived(receiver, source)
        normal(receiver)
        assert stock(path) == source.stock
    lab.start(primary)


@pytest.fixture
def renewed(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    """East is a pair, the sink of west."""
    groups = {"east": 2, "west": 1}
    found = Lab(groups, tmp_path_factory.mktemp("renewed") / "lab", broker_version, sites={"west": ["east"], "east": []}, door=PATIENT_DOOR)
    set_up(found, f"{SMALL_LOG}backup_timeout_s = 10.0")
    with found:
        yield found


def test_a_renewed_node_that_is_promoted_gets_a_whole_snapshot(renewed: Lab, tmp_path: Path) -> None:
    """A minute or more: the log of the group has to lose its beginning."""
    lab = renewed
    primary, backup = in_sync(lab, applied=True)
    source = Source(lab, f"renewed{time.time_ns() % 10**9}", "w1", "east")
    queue = recv_queue(source.client_name, "west")
    source.change_many(0, 20)
    source.publisher.flush(60)
    eventually("a whole snapshot", lambda: told(lab, primary)["receiving"][queue]["snapshot"]["complete"], 60)
    fall_off(lab, primary, backup)
    discard(lab, backup)
    renew(lab)
    assert in_sync(lab, applied=True) == (primary, backup)
    source.change_many(20, 5)
    source.publisher.flush(60)
    before = told(lab, primary)["receiving"][queue]["snapshot"]["whole"]
    lab.kill(primary)
    take_over(lab, backup, primary)
    eventually("another whole snapshot", lambda: told(lab, backup)["receiving"][queue]["snapshot"]["whole"] not in (None, before), 60)
    path = database(tmp_path)
    with Receiver([lab.nodes[backup].door], source.client_name, "renewed", listener(path)) as receiver:
        receiver.start()
        source.change(1, 5)
        source.publisher.flush(60)
        assert receiver.wait_for("west", replication_id=source.last, timeout_s=60), receiver.status()
        with sqlite3.connect(path) as connection:
            assert dict(connection.execute("SELECT item, count FROM stock WHERE source = 'west'").fetchall()) == source.stock
    source.publisher.close(60)
    lab.start(primary)
