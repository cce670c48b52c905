"""The receiver's machine in small worlds: whatever a source does and wherever the receiver is killed, its tables equal the source's."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrq_ha.errors import IllegalEvent, MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.receiver.errors import OtherLog
from lrq_ha.receiver.machine import Apply, Begin, Complete, Hole, Machine, Reach, Step
from lrq_ha.receiver.progress import Phase, Progress
from lrq_ha.receiver.states import TRANSITIONS, State, require_legal
from lrq_ha.receiver.updates import UpdateType
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START
from lrq_ha.streams.message import Message, find

pytestmark = pytest.mark.proves("G6")

Q = "LRQ_Recv_orders_east"
DELTA, ROWS, END = pb.LOG_ENTRY_SYNC, pb.SNAPSHOT_SYNC, pb.LAST_FULL_SYNC_ENTRY
KEYS = "abcd"
Tables = dict[str, int]


def transaction(sequence: int, kind: pb.ReplicationType, *payloads: bytes, request: str = "") -> pb.ReceivedTransaction:
    where = pb.Position(epoch=257, sequence=sequence)
    return pb.ReceivedTransaction(position=where, replication_id=f"app/{sequence}", type=kind, request_id=request, payloads=payloads)


def at(sequence: int) -> Position:
    return Position(257, sequence) if sequence else START


class Stream:
    """The queue, as it stands in one broker."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def write(self, previous: int, *transactions: pb.ReceivedTransaction) -> None:
        where = pb.Position(epoch=257 if previous else 0, sequence=previous)
        batch = pb.ReceivedBatch(source="east", client_name="orders", previous=where, transactions=transactions)
        self.messages.append(Message(len(self.messages), batch))

    def first(self, queue: str) -> Message | None:
        return self.messages[0] if self.messages else None

    def tail(self, queue: str) -> Message | None:
        return self.messages[-1] if self.messages else None

    def at(self, queue: str, offset: int) -> Message:
        return next(message for message in self.messages if message.offset >= offset)

    def trim(self, count: int) -> None:
        del self.messages[:count]


@dataclass
class Source:
    """A source's tables, its full syncs, and the chain that it sends."""

    rng: random.Random
    tables: Tables = field(default_factory=dict)
    stream: Stream = field(default_factory=Stream)
    history: dict[int, Tables] = field(default_factory=dict)  # the tables after each position
    sequence: int = 0
    sent: int = 0  # the last sequence of the chain; 0: the chain has to begin
    request: int = 0
    left: list[str] = field(default_factory=list)  # keys that the snapshot under way has not had
    whole: bool = False  # a snapshot is whole, and no hole has come since

    def delta(self, *, lost: bool = False) -> None:
        """A change. `lost`: it never reaches the queue, and the chain has to restart."""
        key, value = self.rng.choice(KEYS), self.rng.randint(0, 99)
        self.sequence += 1
        if value < 30:
            self.tables.pop(key, None)
        else:
            self.tables[key] = value
        body = json.dumps([key, self.tables.get(key)]).encode()
        self.history[self.sequence] = dict(self.tables)
        if lost:
            self.sent, self.whole = 0, False
        elif self.sent:
            self._send(transaction(self.sequence, DELTA, body))

    def begin(self) -> None:
        """A full sync is asked for; one under way is given up."""
        self.request += 1
        self._log()
        self._send(transaction(self.sequence, ROWS, request=f"r{self.request}"))
        self.left = list(KEYS)

    def row(self) -> None:
        if self.left:
            key = self.left.pop()
            self._log()
            self._send(transaction(self.sequence, ROWS, json.dumps([key, self.tables.get(key)]).encode(), request=f"r{self.request}"))
            if not self.left:
                self._log()
                self._send(transaction(self.sequence, END, request=f"r{self.request}"))
                self.whole = True

    def finish(self) -> None:
        """Everything that the queue needs to be whole."""
        if not self.sent or not self.request:
            self.begin()
        while self.left:
            self.row()

    def repeat(self) -> None:
        """The sink's sidecar starts again: it writes everything behind its record once more."""
        messages = self.stream.messages
        for again in messages[-self.rng.randint(1, 8) :]:
            messages.append(Message(messages[-1].offset + 1, again.batch))

    def _log(self) -> None:
        self.sequence += 1
        self.history[self.sequence] = dict(self.tables)

    def _send(self, made: pb.ReceivedTransaction) -> None:
        offset = self.stream.messages[-1].offset + 1 if self.stream.messages else 0
        where = pb.Position(epoch=257 if self.sent else 0, sequence=self.sent)
        batch = pb.ReceivedBatch(source="east", client_name="orders", previous=where, transactions=[made])
        self.stream.messages.append(Message(offset, batch))
        self.sent = self.sequence


class Application:
    """Tables and progress, committed together."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tables: Tables = {}
        self.progress: Progress | None = None
        self.holes = 0

    def take(self, step: Step) -> None:
        if isinstance(step, Hole):
            self.holes += 1
            return
        old, new = self.progress, step.progress
        if isinstance(step, Begin):
            self.tables = {}
        elif isinstance(step, Apply):
            assert len({update.type for update in step.updates}) == 1
            assert old is not None
            assert (step.updates[0].type is UpdateType.LOG_ENTRY_SYNC) == (step.kind is UpdateType.LOG_ENTRY_SYNC)
            assert all(old.position < update.position <= new.position for update in step.updates), "no list is applied twice"
            for update in step.updates:
                key, value = json.loads(update.opaque_payload)
                self.tables.pop(key, None)
                if value is not None:
                    self.tables[key] = value
        self.progress = Progress.from_text(new.to_text())
        if new.phase is Phase.NORMAL:
            assert self.tables == self.source.history[new.position.sequence], "the tables equal the source's"

    def read(self, rng: random.Random, crash: float) -> None:
        """Reads to the end; is killed, and begins again, before a step now and then."""
        while True:
            machine, killed = Machine(Q, self.progress, entries_max=rng.choice((1, 2, 1000))), False
            while not killed:
                message = find(self.source.stream, Q, machine.seen)
                if message is None:
                    return
                rest = [each for each in self.source.stream.messages if each.offset >= message.offset]
                while rest and not machine.rewind:
                    count = rng.randint(1, 4)
                    for step in machine.take(rest[:count]):
                        if rng.random() < crash:
                            killed = True
                            break
                        self.take(step)
                    rest = [] if killed else rest[count:]
                if not machine.rewind:
                    break
                machine.rewind = False
            if not killed:
                return


@given(st.integers(0, 2**32), st.sampled_from((0.0, 0.05, 0.3)))
@settings(max_examples=400, deadline=None)
def test_at_rest_the_tables_equal_the_sources(seed: int, crash: float) -> None:
    rng = random.Random(seed)
    source = Source(rng)
    application = Application(source)
    for _ in range(rng.randint(5, 60)):
        kind = rng.random()
        if kind < 0.45:
            source.delta()
        elif kind < 0.5:
            source.delta(lost=True)
            source.begin()
        elif kind < 0.57:
            source.begin()
        elif kind < 0.8:
            source.row()
        elif kind < 0.88:
            source.repeat()
        else:
            application.read(rng, crash)
    if not source.whole or rng.random() < 0.5:  # else the full sync under way is given up
        source.finish()
    application.read(rng, crash)
    assert application.progress is not None
    assert application.progress.phase is Phase.NORMAL
    assert application.tables == source.tables
    assert not application.holes, "a chain that restarts is no hole"


def test_what_was_trimmed_under_a_receiver_is_told_and_healed_by_the_next_full_sync() -> None:
    source = Source(random.Random(1))
    source.finish()
    application = Application(source)
    application.read(random.Random(1), 0)
    for _ in range(5):
        source.delta()
    source.stream.trim(len(source.stream.messages) - 2)
    before = dict(application.tables), application.progress
    application.read(random.Random(1), 0)
    assert application.holes == 1
    assert (application.tables, application.progress) == before, "nothing is applied behind a hole"
    source.begin()
    source.finish()
    application.read(random.Random(1), 0)
    assert application.tables == source.tables


def steps(*messages: tuple[int, tuple[pb.ReceivedTransaction, ...]], progress: Progress | None = None) -> list[Step]:
    stream = Stream()
    for previous, transactions in messages:
        stream.write(previous, *transactions)
    return Machine(Q, progress).take(stream.messages)


def test_an_empty_snapshot_is_begun_and_complete() -> None:
    found = steps((0, (transaction(3, END, request="r"), transaction(4, DELTA, b"x"))))
    assert [type(step) for step in found] == [Begin, Complete, Apply]
    assert isinstance(found[1], Complete)
    assert (found[1].snapshot.base, found[1].progress) == (at(3), Progress(Phase.NORMAL, at(3)))


def test_a_snapshot_whose_beginning_was_dropped_does_not_count() -> None:
    assert steps((2, (transaction(3, ROWS, b"x", request="r"), transaction(4, END, request="r"), transaction(5, DELTA, b"x")))) == []


def test_rows_of_a_snapshot_that_was_given_up_are_left_out() -> None:
    begun = transaction(2, ROWS, request="r"), transaction(3, ROWS, request="s")
    found = steps((0, (*begun, transaction(4, ROWS, b"x", request="r"), transaction(5, END, b"y", request="r"), transaction(6, END, request="s"))))
    assert [type(step) for step in found] == [Begin, Begin, Complete]


def test_a_list_holds_whole_transactions() -> None:
    stream = Stream()
    many = tuple(transaction(n, DELTA, *[b"12345"] * 3) for n in range(2, 6))
    stream.write(1, *many)
    machine = Machine(Q, Progress(Phase.NORMAL, at(1)), entries_max=7)
    lists = [step.updates for step in machine.take(stream.messages) if isinstance(step, Apply)]
    assert [len(each) for each in lists] == [6, 6]
    assert [update.last_of_transaction for update in lists[0]] == [False, False, True] * 2
    assert [update.replication_id for update in lists[1]][:2] == ["app/4.0", "app/4.1"]
    large = Machine(Q, Progress(Phase.NORMAL, at(1)), bytes_max=4).take(stream.messages)
    assert [len(step.updates) for step in large if isinstance(step, Apply)] == [3] * 4, "a larger transaction goes alone"


def test_a_snapshot_behind_no_hole_begins_when_it_is_whole() -> None:
    stream = Stream()
    stream.write(1, transaction(2, ROWS, request="r"), transaction(3, ROWS, b"x", request="r"), transaction(4, DELTA, b"y"))
    stream.write(4, transaction(5, END, request="r"), transaction(6, DELTA, b"z"))
    machine = Machine(Q, Progress(Phase.NORMAL, at(1)))
    assert [type(step) for step in machine.take(stream.messages)] == [Apply]
    assert (machine.rewind, machine.seen) == (True, at(1))
    assert [type(step) for step in machine.take(stream.messages)] == [Begin, Apply, Complete]
    assert (machine.rewind, machine.seen) == (True, at(2))
    assert [type(step) for step in machine.take(stream.messages)] == [Apply, Reach, Apply]


def test_a_snapshot_whose_beginning_is_dropped_before_it_is_whole_changes_nothing() -> None:
    stream = Stream()
    stream.write(1, transaction(2, ROWS, request="r"))
    stream.write(2, transaction(3, DELTA, b"x"), transaction(4, END, request="r"))
    stream.write(4, transaction(5, DELTA, b"y"))
    machine = Machine(Q, Progress(Phase.NORMAL, at(1)))
    assert [type(step) for step in machine.take(stream.messages)] == [Apply]
    stream.trim(1)
    assert [type(step) for step in machine.take(stream.messages)] == [Apply]
    assert (machine.phase, machine.seen) == (Phase.NORMAL, at(5))


def test_a_restart_during_the_replay_is_a_new_snapshot() -> None:
    replay = Progress(Phase.LOCAL_REPLAY, at(10), "r", at(10), at(20))
    found = steps((0, (transaction(50, ROWS, request="s"), transaction(51, END, request="s"))), progress=replay)
    assert [type(step) for step in found] == [Begin, Complete]


def test_deltas_wait_for_a_snapshot_behind_a_hole_and_follow_else() -> None:
    normal = Progress(Phase.NORMAL, at(1))
    begun, delta = transaction(2, ROWS, request="r"), transaction(3, DELTA, b"x")
    assert [type(step) for step in steps((1, (begun, delta)), progress=normal)] == [Apply], "the snapshot may be given up"
    assert [type(step) for step in steps((0, (begun, delta)), progress=normal)] == [Begin]


def test_deltas_during_a_snapshot_are_given_again_behind_it() -> None:
    stream = Stream()
    stream.write(0, transaction(2, ROWS, request="r"), transaction(3, DELTA, b"x"), transaction(4, END, request="r"), transaction(5, DELTA, b"y"))
    machine = Machine(Q, None)
    first = machine.take(stream.messages)
    assert [type(step) for step in first] == [Begin, Complete]
    assert machine.rewind
    assert machine.seen == at(2)
    again = machine.take(stream.messages)
    assert [type(step) for step in again] == [Apply, Reach, Apply]
    assert machine.phase is Phase.NORMAL


def interrupted(*deltas: pb.ReceivedTransaction) -> tuple[Stream, Machine]:
    """A snapshot of which one row is committed when the connection is lost; then the broker drops its beginning."""
    stream = Stream()
    stream.write(0, transaction(2, ROWS, request="r"), transaction(3, ROWS, b"x", request="r"))
    stream.write(3, *deltas, transaction(5, ROWS, b"y", request="r"))
    first = Machine(Q, None).take(stream.messages)
    assert isinstance(first[-1], Apply)
    progress = Progress.from_text(first[-1].progress.to_text())
    assert (progress.phase, progress.position) == (Phase.BOOTSTRAP, at(5))
    stream.write(5, transaction(6, END, request="r"))
    stream.trim(2)
    return stream, Machine(Q, progress)


def test_an_interrupted_snapshot_without_deltas_does_not_need_its_base() -> None:
    stream, machine = interrupted()
    assert [type(step) for step in machine.take(stream.messages)] == [Complete]
    assert (machine.rewind, machine.phase) == (False, Phase.NORMAL)


def test_an_interrupted_snapshot_with_deltas_before_the_interruption_goes_back_to_its_base() -> None:
    stream, machine = interrupted(transaction(4, DELTA, b"z"))
    assert [type(step) for step in machine.take(stream.messages)] == [Complete]
    assert (machine.rewind, machine.seen) == (True, at(2))
    assert [type(step) for step in machine.take(stream.messages)] == [Hole], "the base was dropped"


@pytest.mark.parametrize(
    "text",
    ['["bootstrap", 257, 9, "r", 257, 2, 0, 0]', '["local-replay", 257, 9, "r", 257, 2, 257, 12]', '["normal", 257, 9, "", 0, 0, 0, 0]'],
)
def test_a_position_of_an_older_release_is_read_and_written_as_it_was(text: str) -> None:
    """A store compares the text that it has with the text of the progress that was read."""
    progress = Progress.from_text(text)
    assert progress.missed, "an older release does not say whether deltas came"
    assert progress.to_text() == text


def test_a_position_counts_in_its_own_log_only() -> None:
    """Also a position of an older release, from the first message on; and whatever the positions of the other log are."""
    one, other = b"\x01" * 16, b"\x02" * 16
    stream = Stream()
    stream.write(0, transaction(2, ROWS, request="r"), transaction(3, END, request="r"), transaction(4, DELTA, b"x"))
    stream.messages[0].batch.log_id = one
    machine = Machine(Q, None)
    machine.check_log(other)  # nothing is committed
    last = machine.take(stream.messages)[-1]
    assert isinstance(last, Apply)
    assert Progress.from_text(last.progress.to_text()) == last.progress == Progress(Phase.NORMAL, at(4), log=one.hex())
    stream.write(4, transaction(5, DELTA, b"y"))
    stream.messages[1].batch.log_id = other
    for progress in (last.progress, replace(last.progress, position=at(9))):
        with pytest.raises(OtherLog, match=f"log {one.hex()}, and the queue has the log {other.hex()}"):
            Machine(Q, progress).take(stream.messages[1:])
        with pytest.raises(OtherLog):
            Machine(Q, progress).check_log(other)
    older = Machine(Q, Progress(Phase.NORMAL, at(4)))
    [step] = older.take(stream.messages[1:])
    assert isinstance(step, Apply)
    assert step.progress.log == other.hex()


@pytest.mark.parametrize(
    "text",
    ["", "x", "[]", '["other", 1, 2, "r", 0, 0, 0, 0]', '["normal", 1, 2, "r", 0, 0, 0, 0, 7]', '["normal", 1, 2, "", 0, 0, 0, 0, "log"]', "null"],
)
def test_a_damaged_position_is_refused(text: str) -> None:
    with pytest.raises(MalformedInput, match="is no position of a receiver"):
        Progress.from_text(text)


@pytest.mark.parametrize("old", State)
@pytest.mark.parametrize("new", State)
def test_every_step_between_states(old: State, new: State) -> None:
    if new in TRANSITIONS[old]:
        require_legal(old, new)
    else:
        with pytest.raises(IllegalEvent, match=f"from {old.value} to {new.value}"):
            require_legal(old, new)
