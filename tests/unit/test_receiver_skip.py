"""What an application may do about a list that its listener refuses, and about a position that it no longer wants; and a listener that hangs."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from receive_node import CLIENT, NODES, PATIENCE_S, ReceiveNode, at, connect_receivers, sequences, until

from lrq_ha.database import Cursor
from lrq_ha.errors import MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.receiver import Fenced, Listener, Phase, Progress, Receiver, ReceiverError, Redelivery, Snapshot, SqlListener, SqlPositions, Update
from lrq_ha.receiver.call_watch import CallWatch
from lrq_ha.receiver.listener import name_method
from lrq_ha.receiver.machine import Begin, Complete, Reach, Skip
from lrq_ha.receiver.refusal import Refusal

pytestmark = pytest.mark.proves("G6")

Q = "LRQ_Recv_orders_east"


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> ReceiveNode:
    return connect_receivers(monkeypatch)


@pytest.fixture
def positions(tmp_path: Path) -> SqlPositions:
    return SqlPositions(lambda: sqlite3.connect(tmp_path / "positions.db", timeout=30))


class Poisoned(Listener):
    """Refuses every list with one of the positions in `poison`."""

    def __init__(self, *poison: int) -> None:
        self.poison = set(poison)
        self.taken: list[int] = []
        self.snapshots = 0
        self.told: list[ReceiverError] = []
        self.on_redelivery: Callable[[str, Redelivery], None] = lambda _source, _error: None

    def on_snapshot_sync_start(self, snapshot: Snapshot) -> None:
        self.snapshots += 1

    def process_updates_in_snapshot_sync(self, updates: list[Update]) -> bool:
        return self.process_updates_in_log_entry_sync(updates)

    def process_updates_in_log_entry_sync(self, updates: list[Update]) -> bool:
        if self.poison & set(sequences(updates)):
            return False
        self.taken += sequences(updates)
        return True

    def on_error(self, source: str, error: ReceiverError) -> None:
        self.told.append(error)
        if isinstance(error, Redelivery):
            self.on_redelivery(source, error)


@pytest.fixture
def receiving(positions: SqlPositions) -> Iterator[Callable[[Listener], Receiver]]:
    made: list[Receiver] = []

    def start(listener: Listener) -> Receiver:
        made.append(Receiver(NODES, CLIENT, "app", listener, positions=positions))
        made[-1].start()
        return made[-1]

    yield start
    for each in made:
        assert each.stop(PATIENCE_S)


def test_a_refused_list_is_skipped_as_a_whole(
    node: ReceiveNode, receiving: Callable[[Listener], Receiver], positions: SqlPositions, caplog: pytest.LogCaptureFixture
) -> None:
    node.begin()
    node.delta(6, 7, 8)
    listener = Poisoned(7)
    receiver = receiving(listener)
    until(lambda: len(listener.told) >= 2)
    error = listener.told[-1]
    assert isinstance(error, Redelivery)
    assert error.position == at(8)
    assert not receiver.wait_for("east", at(8), timeout_s=0)
    receiver.skip("east", error.position)
    assert receiver.wait_for("east", at(8), timeout_s=PATIENCE_S)
    assert f"receiver app skips 3 updates of {Q} that the listener refused, positions 257.6 to 257.8" in caplog.text
    status = receiver.status()["east"]
    assert (status.skipped, status.consistent) == (3, False), "the tables lack them"
    node.delta(9)
    assert receiver.wait_for("east", at(9), timeout_s=PATIENCE_S)
    assert listener.taken == [3, 9]
    receiver.stop(PATIENCE_S)
    assert positions.load("app", Q) == Progress(Phase.NORMAL, at(9))


def test_what_is_left_of_a_list_is_given_and_the_skip_is_kept_before_that(
    node: ReceiveNode, receiving: Callable[[Listener], Receiver], positions: SqlPositions
) -> None:
    """The application skips from its own `on_error`, one position after the other."""
    node.begin()
    node.delta(6, 7, 8, 9)
    listener = Poisoned(7, 9)
    receiver = receiving(listener)
    listener.on_redelivery = lambda source, _error: receiver.skip(source, at(7))
    until(lambda: len(listener.told) >= 1)
    listener.on_redelivery = lambda _source, _error: None
    until(lambda: len(listener.told) >= 3)
    assert receiver.wait_for("east", at(7), timeout_s=PATIENCE_S), "kept, though the rest is refused"
    assert not receiver.wait_for("east", at(8), timeout_s=0)
    listener.poison.clear()
    assert receiver.wait_for("east", at(9), timeout_s=PATIENCE_S)
    assert listener.taken == [3, 8, 9]


def test_only_what_is_refused_can_be_skipped(node: ReceiveNode, receiving: Callable[[Listener], Receiver]) -> None:
    node.begin()
    listener = Poisoned(7)
    receiver = receiving(listener)
    with pytest.raises(MalformedInput, match="No queue of source 'north' has been found"):
        receiver.skip("north", at(3))
    assert receiver.wait_for("east", at(4), timeout_s=PATIENCE_S)
    with pytest.raises(MalformedInput, match="the listener refuses no list"):
        receiver.skip("east", at(4))
    node.delta(6, 7)
    until(lambda: listener.told)
    for wrong in (at(4), at(8), at(99)):
        with pytest.raises(MalformedInput, match=r"is not in the list that is refused, which has the positions 257\.6 to 257\.7"):
            receiver.skip("east", wrong)
    listener.poison.clear()
    assert receiver.wait_for("east", at(7), timeout_s=PATIENCE_S)
    assert listener.taken == [3, 6, 7]


def test_a_snapshots_start_cannot_be_skipped_but_its_rows_can(node: ReceiveNode, receiving: Callable[[Listener], Receiver]) -> None:
    class NoStart(Poisoned):
        fails = True

        def on_snapshot_sync_start(self, snapshot: Snapshot) -> None:
            if self.fails:
                raise ValueError("not now")

    listener = NoStart(3)
    receiver = receiving(listener)
    node.begin()
    until(lambda: listener.told)
    with pytest.raises(MalformedInput, match="refuses no list of updates but Begin, which cannot be skipped"):
        receiver.skip("east", at(2))
    listener.fails = False
    until(lambda: isinstance(listener.told[-1], Redelivery) and listener.told[-1].position == at(3))
    receiver.skip("east", at(3))
    assert receiver.wait_for("east", at(4), timeout_s=PATIENCE_S)
    assert receiver.status()["east"].skipped == 1
    node.write((6, pb.SNAPSHOT_SYNC, b""), (7, pb.LAST_FULL_SYNC_ENTRY, b""))
    until(lambda: receiver.status()["east"].consistent)
    assert receiver.status()["east"].skipped == 0, "another snapshot has brought everything"


def test_data_and_a_skipped_position_are_one_transaction(node: ReceiveNode, tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (n)")

    class Rows(SqlListener):
        def clear(self, cursor: Cursor, source: str) -> None:
            cursor.execute("DELETE FROM t")

        def apply_snapshot(self, cursor: Cursor, updates: list[Update]) -> None:
            self.apply_log_entries(cursor, updates)

        def apply_log_entries(self, cursor: Cursor, updates: list[Update]) -> None:
            cursor.executemany("INSERT INTO t VALUES (?)", [(number,) for number in sequences(updates)])
            if 7 in sequences(updates):
                raise ValueError("poison")

        def on_error(self, source: str, error: ReceiverError) -> None:
            receiver.skip(source, at(7))

    node.begin()
    node.delta(6, 7, 8)
    with Receiver(NODES, CLIENT, "app", Rows(lambda: sqlite3.connect(path, timeout=30))) as receiver:
        receiver.start()
        assert receiver.wait_for("east", at(8), timeout_s=PATIENCE_S)
    with sqlite3.connect(path) as connection:
        assert [n for (n,) in connection.execute("SELECT n FROM t")] == [3, 8]


def test_a_skip_and_a_stop_end_the_pause_before_an_attempt(
    node: ReceiveNode, receiving: Callable[[Listener], Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lrq_ha.receiver.refusal.AGAIN_MIN_S", 10 * PATIENCE_S)
    monkeypatch.setattr("lrq_ha.receiver.refusal.AGAIN_MAX_S", 10 * PATIENCE_S)
    node.begin()
    node.delta(6)
    listener = Poisoned(6, 7)
    receiver = receiving(listener)
    until(lambda: listener.told)
    receiver.skip("east", at(6))
    assert receiver.wait_for("east", at(6), timeout_s=PATIENCE_S)
    node.delta(7)
    until(lambda: len(listener.told) == 2)
    assert receiver.stop(PATIENCE_S)


# ---- forget ----------------------------------------------------------------------------------------------------------


def test_a_forgotten_source_begins_with_a_snapshot(node: ReceiveNode, receiving: Callable[[Listener], Receiver], positions: SqlPositions) -> None:
    node.begin()
    listener = Poisoned()
    receiver = receiving(listener)
    assert receiver.wait_for("east", at(4), timeout_s=PATIENCE_S)
    with pytest.raises(ReceiverError, match=r"reads LRQ_Recv_orders_east: .* Stop the receiver, see that stop returns True"):
        receiver.forget("east")
    with pytest.raises(ReceiverError, match="reads LRQ_Recv_orders_north"):
        receiver.forget("north")  # it may begin to in any moment
    receiver.stop(PATIENCE_S)
    assert receiver.forget("east")
    assert not receiver.forget("east"), "there is none left"
    again = Poisoned()
    assert receiving(again).wait_for("east", at(4), timeout_s=PATIENCE_S)
    assert (again.snapshots, again.taken) == (1, [3])


def test_a_source_that_is_left_out_or_not_read_yet_is_forgotten(node: ReceiveNode, positions: SqlPositions) -> None:
    positions.load("app", "LRQ_Recv_orders_west")
    positions.commit("app", "LRQ_Recv_orders_west", None, Progress(Phase.NORMAL, at(9)))
    with Receiver(NODES, CLIENT, "app", Poisoned(), positions=positions, sources=["east"]) as receiver:
        receiver.start()
        assert receiver.forget("west")
        with pytest.raises(MalformedInput, match="is no remote id"):
            receiver.forget("a_b")
    assert not Receiver(NODES, CLIENT, "app", Poisoned(), positions=positions).forget("west")


def test_a_position_in_the_groups_log_is_forgotten(node: ReceiveNode) -> None:
    node.begin()
    for snapshots in (1, 0):
        with Receiver(NODES, CLIENT, "app", listener := Poisoned()) as receiver:
            receiver.start()
            assert receiver.wait_for("east", at(4), timeout_s=PATIENCE_S)
        assert listener.snapshots == snapshots
    assert receiver.forget("east")
    assert not receiver.forget("east")
    with Receiver(NODES, CLIENT, "app", listener := Poisoned()) as receiver:
        receiver.start()
        assert receiver.wait_for("east", at(4), timeout_s=PATIENCE_S)
        node.delta(6)
        assert receiver.wait_for("east", at(6), timeout_s=PATIENCE_S)
        receiver.stop()
        assert (listener.snapshots, listener.taken) == (1, [3, 6])
    with Receiver(NODES, CLIENT, "app", Poisoned()) as older:
        older.start()
        assert older.wait_for("east", at(6), timeout_s=PATIENCE_S)
        assert Receiver(NODES, CLIENT, "app", Poisoned()).forget("east")
        node.delta(7)
        with pytest.raises(Fenced):
            older.run()


def test_forgetting_heals_a_damaged_position_and_fences_another_process(tmp_path: Path) -> None:
    path = tmp_path / "positions.db"
    store, other = SqlPositions(lambda: sqlite3.connect(path)), SqlPositions(lambda: sqlite3.connect(path))
    assert not other.forget("app", Q), "there is no table yet"
    other.load("app", Q)
    other.commit("app", Q, None, Progress(Phase.NORMAL, at(1)))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE lrq_positions SET position = 'damaged'")
    with pytest.raises(MalformedInput):
        store.load("app", Q)
    assert store.forget("app", Q)
    with pytest.raises(Fenced):
        other.commit("app", Q, Progress(Phase.NORMAL, at(1)), Progress(Phase.NORMAL, at(2)))
    assert store.load("app", Q) is None


# ---- a listener that hangs, or is of another kind ----------------------------------------------------------------------


def test_a_call_that_does_not_return_is_told_of_and_not_ended(caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    watch = CallWatch("app", Q, clock=lambda: now[0])
    caplog.set_level(logging.INFO, "lrq_ha.receiver")
    watch.warn_of_hang()
    with watch.watch_call("apply_log_entries"):
        now[0] += 59
        watch.warn_of_hang()
        assert not caplog.records
        for seconds, lines in ((1, 1), (30, 1), (30, 2), (119, 2), (1, 3)):
            now[0] += seconds
            watch.warn_of_hang()
            assert len(caplog.records) == lines
    assert f"receiver app: apply_log_entries of {Q} has not returned for 60 s" in caplog.messages[0]
    assert f"apply_log_entries of {Q} has ended after 240 s" in caplog.messages[-1]
    with watch.watch_call("on_state"):
        pass
    assert len(caplog.records) == 4


def test_a_listener_that_hangs_is_named(
    node: ReceiveNode, receiving: Callable[[Listener], Receiver], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()

    class Hanging(Poisoned):
        def process_updates_in_log_entry_sync(self, updates: list[Update]) -> bool:
            return go_on.wait(PATIENCE_S) and super().process_updates_in_log_entry_sync(updates)

    monkeypatch.setattr("lrq_ha.receiver.call_watch.HANG_S", 0.05)
    monkeypatch.setattr("lrq_ha.receiver.receiver.LOOK_S", 0.01)
    node.begin()
    node.delta(6)
    receiver = receiving(Hanging())
    until(lambda: f"process_updates_in_snapshot_sync of {Q} has not returned" in caplog.text)
    go_on.set()
    assert receiver.wait_for("east", at(6), timeout_s=PATIENCE_S)


@pytest.mark.filterwarnings("error")
def test_a_coroutine_for_a_receiver_in_threads_is_refused_and_says_what_to_do(
    node: ReceiveNode, receiving: Callable[[Listener], Receiver]
) -> None:
    class Coroutines(Poisoned):
        mended = False

        def on_snapshot_sync_start(self, snapshot: Snapshot) -> None:
            async def clear() -> None:
                raise AssertionError("is not run")

            return None if self.mended else clear()  # type: ignore[return-value]

        def process_updates_in_log_entry_sync(self, updates: list[Update]) -> bool:
            return self.mended or "yes"  # type: ignore[return-value]

    node.begin()
    listener = Coroutines()
    receiver = receiving(listener)
    until(lambda: listener.told)
    assert "on_snapshot_sync_start is a coroutine: derive the listener from AsyncListener" in str(listener.told[0])
    listener.mended = True
    assert receiver.wait_for("east", at(4), timeout_s=PATIENCE_S)
    listener.mended = False
    node.delta(6)
    until(lambda: "process_updates_in_log_entry_sync returned 'yes': it must return True or False" in str(listener.told[-1]))
    listener.mended = True
    assert receiver.wait_for("east", at(6), timeout_s=PATIENCE_S)


def test_every_step_has_a_name_for_operators() -> None:
    progress = Progress(Phase.NORMAL, at(1))
    snapshot = Snapshot(Q, "east", CLIENT, "r", at(1))
    steps = (Begin(progress, snapshot), Complete(progress, snapshot), Reach(progress, "east"), Skip(progress, at(1), 1))
    commit = "the commit of the position"
    assert [SqlListener(lambda: None).name_method(step) for step in steps] == ["clear", commit, commit, commit]
    assert [name_method(step) for step in steps] == ["on_snapshot_sync_start", "on_snapshot_sync_complete", commit, commit]


def test_the_pause_before_an_attempt_doubles_up_to_half_a_minute() -> None:
    step = Reach(Progress(Phase.NORMAL, at(1)), "east")
    pauses = [Refusal(Q, step, attempt).pause_s for attempt in (1, 2, 3, 9, 10, 10_000)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 25.6, 30.0, 30.0])
