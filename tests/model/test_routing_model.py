"""G6, against a source, a link and a sink that all misbehave: each log entry reaches the receive queue once, in source order; a gap
becomes a snapshot; and what a reader makes of the queue is, in the end, what the source has.

The world is made of small steps that hypothesis interleaves: the source logs deltas, requests and snapshot data; its readers lag;
views are trimmed; batches and acks are dropped or doubled; the sink's log entries become safe late or are cut off; either side's
primary is replaced. After each step the receive queue is checked. In the end the faults stop and everything must come to rest.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing import messages as m
from lrq_ha.routing.chain import START, position_of
from lrq_ha.routing.messages import Stream
from lrq_ha.routing.route import Limits, Route
from lrq_ha.routing.session import Session
from lrq_ha.routing.shares import ViewEntry
from lrq_ha.routing.sink import Accept, AcceptTrimmed, Gap, Repeat, Sink
from lrq_ha.routing.statuses import Statuses, Told
from lrq_ha.routing.tables import SENDING, Reason, State

pytestmark = pytest.mark.proves("G6")

ROUTE = Route("east", "orders", "west")
LIMITS = Limits(
    batch_bytes_max=120,
    in_flight_bytes_max=300,
    read_ahead_bytes_max=150,
    answer_timeout_s=2,
    ack_timeout_s=5,
    snapshot_timeout_s=8,
    backoff_first_s=1,
    backoff_max_s=4,
)
KEYS = "abc"


def pair_of(payload: bytes) -> tuple[str, str]:
    """A row: key and value."""
    key, value = payload.decode().split("=")
    return key, value


@dataclass
class Reading:
    """A reader of one view: everything of it from `next` on is still to be given."""

    number: int
    next: int
    paused: bool = False


@dataclass
class Reader:
    """The rule for readers of a receive queue, as the package's docstring has it."""

    greatest: Position = START
    table: dict[str, str] | None = None
    base: Position = START
    rows: dict[str, str] = field(default_factory=dict)
    under_way: tuple[str, Position] | None = None
    completed: list[tuple[str, Position, Position, dict[str, str]]] = field(default_factory=list)  # request, from and to, rows
    deltas: list[tuple[Position, str, str]] = field(default_factory=list)  # behind the oldest base that may still count
    waits: bool = False

    def read(self, batch: pb.ReceivedBatch) -> None:
        for transaction in batch.transactions:
            position = position_of(transaction.position)
            if position <= self.greatest:
                continue
            self.greatest = position
            pairs = [pair_of(payload) for payload in transaction.payloads]
            if transaction.type == pb.LOG_ENTRY_SYNC:
                for key, value in pairs:
                    self.deltas.append((position, key, value))
                    if self.table is not None and not self.waits:
                        self.table[key] = value
            elif transaction.type == pb.SNAPSHOT_SYNC and not transaction.payloads:  # a start marker
                self.under_way, self.rows = (transaction.request_id, position), {}
                self.waits = self.waits or position_of(batch.previous) == START
            else:
                assert not self.rows.keys() & dict(pairs).keys(), "a row came twice in a snapshot"
                self.rows.update(pairs)
            if transaction.type == pb.LAST_FULL_SYNC_ENTRY:
                begun = self.under_way is not None and self.under_way[0] == transaction.request_id
                self.base = self.under_way[1] if begun and self.under_way is not None else position
                if begun:
                    self.completed.append((transaction.request_id, self.base, position, self.rows))
                self.table = (self.rows if begun else {}) | {k: v for at, k, v in self.deltas if at > self.base}
                self.under_way, self.rows, self.waits = None, {}, False


class World(RuleBasedStateMachine):
    # ---- the source's log -------------------------------------------------------------------------------------------

    @initialize(provider=st.sampled_from([True, True, False]))
    def begin(self, provider: bool) -> None:
        self.provider = provider
        self.provider_left = False
        self.now = 0.0
        self.term = 0
        self.log: list[tuple[Position, object]] = []  # transactions, statuses, or None for anything else
        self.statuses = Statuses()
        self.truth: dict[str, str] = {}
        self.trimmed = dict.fromkeys(Stream, 1)  # sequences below are gone from the view
        self.answering: tuple[str, list[str]] | None = None
        self.reports: list[Reason] = []
        self.was_trimmed = False
        self.bare_reports = 0  # times that the sink said it has nothing, each a cause for one start of the chain
        self.link: deque[m.Send] = deque()
        self.acks: deque[tuple[int, Position]] = deque()  # with the sink log's entry that must be safe
        self.connected = False
        self.sink = Sink()
        self.sink_log: list[pb.ReceivedBatch] = []
        self.sink_safe = 0
        self.stream: list[pb.ReceivedBatch] = []  # LRQ_Recv_orders_east, what readers see
        self.reader = Reader()
        self.checked = 0
        self.chain: list[Position] = []
        self.asked = False
        self.pending: list[pb.Status] = []  # the session appended them and they are not yet safe
        self.new_session()
        client = pb.ClientStatus(client_name="orders", full_sync_provider=provider)
        self.append(pb.Status(key="client/orders", client=client))

    def new_session(self) -> None:
        """A new primary: new epoch, its MARKER first. It has the statuses from a checkpoint and the log."""
        self.term += 1
        self.append(None)
        self.readings: dict[Stream, Reading] = {}
        self.stopped: list[tuple[Stream, Reading]] = []
        self.link.clear()
        self.connected = self.asked = False
        self.session = Session(ROUTE, self.log[-1][0], self.now, LIMITS)
        rows, self.statuses = self.statuses.rows(), Statuses()
        self.statuses.load(rows)
        self.tell_statuses(self.statuses.of("orders", "west"))

    def append(self, what: object) -> Position:
        position = Position(self.term << 8 | 1, len(self.log) + 1)
        self.log.append((position, what))
        if isinstance(what, pb.Status):
            self.statuses.noted(position.sequence, what)
            self.statuses.safe(position.sequence)
            self.tell_statuses(self.statuses.since(position.sequence - 1))
        return position

    def tell_statuses(self, found: list[Told]) -> None:
        for sequence, status in found:
            self.tell(m.StatusEntry(self.log[sequence - 1][0], status))

    def transmit(self, kind: pb.ReplicationType, payloads: list[str], request_id: str = "", destination: str = "west") -> None:
        entries = [pb.RoutingTableEntryMsg(destinations=[destination], payload=i) for i in range(len(payloads))]
        encoded = [payload.encode() for payload in payloads]
        self.append(pb.Transaction(client_name="orders", type=kind, request_id=request_id, payloads=encoded, entries=entries))

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 3))
    def delta(self, key: str, count: int) -> None:
        for _ in range(count):
            value = str(len(self.log))
            self.truth[key] = value
            self.transmit(pb.LOG_ENTRY_SYNC, [f"{key}={value}"])

    @rule(other_client=st.booleans())
    def other(self, other_client: bool) -> None:
        if other_client:
            self.append(pb.Transaction(client_name="other", type=pb.LOG_ENTRY_SYNC))
        else:
            self.transmit(pb.LOG_ENTRY_SYNC, ["x=1"], destination="south")

    # ---- the client's provider --------------------------------------------------------------------------------------

    def newest_request(self) -> pb.FullSyncRequest | None:
        """The last value of its key, as a provider sees it: what was asked for before its announcement is not its own."""
        statuses = [what for _, what in self.log if isinstance(what, pb.Status)]
        announced = max(number for number, status in enumerate(statuses) if status.HasField("client"))
        values = [status.full_sync for status in statuses[announced:] if status.HasField("full_sync")]
        return values[-1] if values and values[-1].state == pb.FullSyncRequest.REQUESTED else None

    @precondition(lambda self: self.provider)
    @rule(steps=st.integers(1, 5))
    def provide(self, steps: int) -> None:
        for _ in range(steps):
            request = self.newest_request()
            if request is None:
                return
            if self.answering is None or self.answering[0] != request.request_id:
                self.answering = (request.request_id, [f"{key}={value}" for key, value in sorted(self.truth.items())])
                continue
            request_id, left = self.answering
            if left:
                self.transmit(pb.SNAPSHOT_SYNC, [left.pop(0)], request_id)
            else:
                self.transmit(pb.LAST_FULL_SYNC_ENTRY, [], request_id)
                self.status_of(request_id, pb.FullSyncRequest.COMPLETED)

    @precondition(lambda self: self.provider)
    @rule(cancel=st.booleans())
    def client_interferes(self, cancel: bool) -> None:
        """A provider cancels, or the client wants a full sync by itself."""
        request = self.newest_request()
        if cancel and request is not None:
            self.status_of(request.request_id, pb.FullSyncRequest.CANCELLED)
        elif not cancel and request is None:
            self.status_of(f"own/{len(self.log)}", pb.FullSyncRequest.REQUESTED)

    @precondition(lambda self: self.provider)
    @rule(steps=st.integers(0, 4))
    def provider_restarts(self, steps: int) -> None:
        """However far the former one had come, the new one serves what is asked for from then on."""
        self.provide(steps)
        self.answering = None
        self.append(pb.Status(key="client/orders", client=pb.ClientStatus(client_name="orders", full_sync_provider=True)))

    @precondition(lambda self: self.provider)
    @rule(seldom=st.integers(0, 3))
    def provider_leaves(self, seldom: int) -> None:
        """For good: a process without one takes its place."""
        if not seldom:
            self.provider, self.provider_left = False, True
            self.append(pb.Status(key="client/orders", client=pb.ClientStatus(client_name="orders")))

    @precondition(lambda self: self.provider)
    @rule(which=st.integers(1, 4), ends=st.booleans())
    def stale_provider(self, which: int, ends: bool) -> None:
        """One that has not heard yet that its request is no longer the newest, was cancelled, or was another process's."""
        requests = [what.full_sync for _, what in self.log if isinstance(what, pb.Status) and what.HasField("full_sync")]
        asked = list(dict.fromkeys(request.request_id for request in requests))
        newest = self.newest_request()
        if which > len(asked) or (newest is not None and newest.request_id == asked[-which]):
            return
        if ends:
            self.transmit(pb.LAST_FULL_SYNC_ENTRY, [], asked[-which])
            self.status_of(asked[-which], pb.FullSyncRequest.COMPLETED)
        else:
            self.transmit(pb.SNAPSHOT_SYNC, [f"stale{len(self.log)}=1"], asked[-which])

    @precondition(lambda self: self.provider)
    @rule(successor=st.booleans(), asked_anew=st.booleans())
    def provider_is_cut_off(self, successor: bool, asked_anew: bool) -> None:
        """It ends its request without having heard that this was cancelled (or that it has a successor), while the sink gets what was left of it."""
        request = self.newest_request()
        if request is None:
            return
        if successor:
            self.provider_restarts(0)
        else:
            self.status_of(request.request_id, pb.FullSyncRequest.CANCELLED)
        self.stale_provider(1, ends=False)
        self.delta("a", 1)
        for stream in Stream:
            self.read(stream, 100)
        self.carry("deliver", 10)
        self.safe_at_sink(10, False)
        self.stale_provider(1, ends=True)
        if asked_anew:
            self.client_interferes(cancel=False)

    def status_of(self, request_id: str, state: pb.FullSyncRequest.State) -> None:
        """As the door takes it."""
        value = pb.FullSyncRequest(client_name="orders", destination="west", request_id=request_id, state=state)
        status = pb.Status(key="fullsync/orders/west", full_sync=value)
        if not self.statuses.overtaken(status):
            self.append(status)

    # ---- the session's driver ---------------------------------------------------------------------------------------

    def tell(self, event: m.Event) -> None:
        if not hasattr(self, "session"):
            return
        for effect in self.session.handle(event):
            match effect:
                case m.AskSink(queue):
                    assert queue == ROUTE.queue
                    self.asked = True
                case m.StartRead(stream, first, number):
                    if stream in self.readings:
                        self.stopped.append((stream, self.readings[stream]))
                    self.readings[stream] = Reading(number, first)
                case m.StopRead(stream):
                    self.stopped.append((stream, self.readings.pop(stream)))
                case m.PauseRead(stream) | m.ResumeRead(stream):
                    self.readings[stream].paused = isinstance(effect, m.PauseRead)
                case m.Send():
                    self.link.append(effect)
                case m.AppendStatus(status):
                    self.pending.append(status)
                case m.Report(_, reason):
                    self.reports.append(reason)

    @rule()
    def status_safe(self) -> None:
        if self.pending:
            self.append(self.pending.pop(0))

    @rule(stream=st.sampled_from(Stream), count=st.integers(1, 6))
    def read(self, stream: Stream, count: int) -> None:
        reading = self.readings.get(stream)
        if reading is not None and not reading.paused:
            self.read_on(stream, reading, count)

    @rule(stream=st.sampled_from(Stream))
    def read_too_late(self, stream: Stream) -> None:
        """What a reader had under way when it was stopped."""
        for number, (of, reading) in enumerate(self.stopped):
            if of is stream:
                del self.stopped[number]
                self.read_on(stream, reading, 20)
                return

    def read_on(self, stream: Stream, reading: Reading, count: int) -> None:
        if reading.next < self.trimmed[stream]:
            if self.readings.get(stream) is reading:
                del self.readings[stream]
            self.tell(m.Trimmed(reading.number, self.trimmed[stream]))
            return
        kinds = (pb.LOG_ENTRY_SYNC,) if stream is Stream.LOG_ENTRIES else (pb.SNAPSHOT_SYNC, pb.LAST_FULL_SYNC_ENTRY)
        part = self.log[reading.next - 1 : reading.next - 1 + count]
        reading.next += len(part)
        those = ((position, what) for position, what in part if isinstance(what, pb.Transaction) and what.type in kinds)
        found = tuple(ViewEntry(position, what, what.ByteSize()) for position, what in those)
        if found:
            self.tell(m.Read(reading.number, found, found[-1].position))
        if reading.next > 1:
            self.tell(m.ReadEnd(reading.number, self.log[reading.next - 2][0]))

    @rule(stream=st.sampled_from(Stream), back=st.integers(0, 20))
    def trim(self, stream: Stream, back: int) -> None:
        self.trimmed[stream] = max(self.trimmed[stream], len(self.log) + 1 - back)
        self.was_trimmed = True

    @rule(seconds=st.sampled_from([0.5, 1, 3]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.tell(m.Tick(self.now))

    @rule()
    def demand(self) -> None:
        self.tell(m.Demand(Reason.READ_TOO_LATE))

    # ---- the link ---------------------------------------------------------------------------------------------------

    @rule()
    def connect(self) -> None:
        if not self.connected and self.session.state is State.WAITING_FOR_CONNECTION:
            self.connected = True
            self.tell(m.Connected())

    @rule(keep=st.integers(0, 3))
    def disconnect(self, keep: int) -> None:
        """What was under way may still arrive at the sink."""
        if self.connected:
            self.connected = self.asked = False
            self.acks.clear()
            while len(self.link) > keep:
                self.link.pop()
            self.tell(m.Disconnected())

    @rule()
    def answer(self) -> None:
        if self.asked and self.connected:
            self.asked = False
            status = self.sink.status(ROUTE.queue)
            last = status.last
            self.bare_reports += last == START
            known = last == START or last in {position for position, _ in self.log}
            self.tell(m.SinkReport(last, status.snapshot_request, status.snapshot_complete, known, status.bare))

    @rule(fate=st.sampled_from(["deliver"] * 6 + ["drop", "double"]), count=st.integers(1, 4))
    def carry(self, fate: str, count: int) -> None:
        for _ in range(min(count, len(self.link))):
            sent = self.link.popleft()
            for _ in range({"deliver": 1, "drop": 0, "double": 2}[fate]):
                self.arrives(sent)

    @rule(fate=st.sampled_from(["deliver"] * 4 + ["drop", "double"]))
    def ack(self, fate: str) -> None:
        if self.connected and self.acks and self.acks[0][0] <= self.sink_safe:
            _, upto = self.acks.popleft()
            for _ in range({"deliver": 1, "drop": 0, "double": 2}[fate]):
                self.tell(m.Acked(upto))

    # ---- the sink ---------------------------------------------------------------------------------------------------

    def arrives(self, sent: m.Send) -> None:
        batch = pb.ReceivedBatch.FromString(sent.body)
        assert sent.last == position_of(batch.transactions[-1].position)
        match self.sink.accept(sent.queue, batch):
            case Accept(last):
                self.log_at_sink(batch)
                self.acks.append((len(self.sink_log), last))
            case AcceptTrimmed(body, last):
                self.log_at_sink(pb.ReceivedBatch.FromString(body))
                self.acks.append((len(self.sink_log), last))
            case Repeat(last, op_seq):
                self.acks.append((op_seq, last))
            case Gap():
                if self.connected:
                    self.tell(m.Refused())

    def log_at_sink(self, batch: pb.ReceivedBatch) -> None:
        self.sink_log.append(batch)
        self.sink.noted(len(self.sink_log), ROUTE.queue, batch)

    @rule(count=st.integers(1, 4), twice=st.booleans())
    def safe_at_sink(self, count: int, twice: bool) -> None:
        upto = min(self.sink_safe + count, len(self.sink_log))
        fresh = self.sink_log[self.sink_safe : upto]
        self.stream += fresh + fresh if twice else fresh
        self.sink_safe = upto
        self.sink.safe(upto)

    @rule(keep=st.integers(0, 2), restart=st.booleans())
    def sink_failover(self, keep: int, restart: bool) -> None:
        """Another primary at the sink: the unsafe tail may be cut; its state comes from a checkpoint and the log."""
        self.disconnect(keep=0)
        first = self.sink_safe + 1 + keep
        del self.sink_log[first - 1 :]
        if restart:
            fresh = Sink()
            if self.sink_safe:
                older = Sink()
                for op_seq, batch in enumerate(self.sink_log[: self.sink_safe], 1):
                    older.noted(op_seq, ROUTE.queue, batch)
                fresh.load(older.rows(), self.sink_safe)
            for op_seq, batch in enumerate(self.sink_log, 1):
                fresh.noted(op_seq, ROUTE.queue, batch)
            fresh.safe(self.sink_safe)
            self.sink = fresh
        else:
            self.sink.cut(first)

    @rule(lost=st.booleans())
    def source_failover(self, lost: bool) -> None:
        """What the former session appended and what is under way may be lost or arrive."""
        self.acks.clear()
        pending, self.pending = ([] if lost else self.pending), []
        for status in pending:
            self.append(status)
        self.new_session()

    @rule(rounds=st.integers(1, 8), carries=st.booleans(), acks=st.booleans(), safe=st.booleans())
    def all_is_well(self, rounds: int, carries: bool, acks: bool, safe: bool) -> None:
        """For a while nothing goes wrong, or only something hangs, so that faults strike in every state."""
        for _ in range(rounds):
            self.round(carries, acks, safe)

    def round(self, carries: bool = True, acks: bool = True, safe: bool = True) -> None:
        """Everybody does some of what he has to do. Where nobody provides, deltas flow, and are read at once: a quiet view's end is told later."""
        self.status_safe()
        self.tick(1)
        self.connect()
        self.answer()
        self.read(Stream.SNAP_SYNC, 10)
        if not self.provider:
            self.delta("a", 1)
        self.read(Stream.LOG_ENTRIES, 10)
        if self.provider:
            self.provide(2)
        if carries:
            self.carry("deliver", 10)
        if safe:
            self.safe_at_sink(10, False)
        while acks and self.connected and self.acks and self.acks[0][0] <= self.sink_safe:
            self.ack("deliver")

    # ---- what must hold ---------------------------------------------------------------------------------------------

    def own(self, first: int, last: int) -> list[Position]:
        """Deltas for the sink with sequences first .. last."""
        return [
            position
            for position, what in self.log[first - 1 : last]
            if isinstance(what, pb.Transaction) and what.type == pb.LOG_ENTRY_SYNC and any("west" in e.destinations for e in what.entries)
        ]

    @invariant()
    def the_receive_queue_has_no_silent_hole(self) -> None:
        if not hasattr(self, "stream"):
            return
        for batch in self.stream[self.checked :]:
            self.reader.read(batch)
            previous = position_of(batch.previous)
            for transaction in batch.transactions:
                position = position_of(transaction.position)
                if self.chain and position <= self.chain[-1]:
                    continue  # a second copy
                if self.chain and previous != START:
                    assert previous == self.chain[-1], "the chain is broken"
                if previous == START:  # the chain starts here: a snapshot, for a reason
                    assert not transaction.payloads
                    assert self.bare_reports or self.was_trimmed, "a restart without a cause"
                    self.bare_reports -= 1
                else:
                    assert self.own(previous.sequence + 1, position.sequence - 1) == [], "an entry was left out"
                self.chain.append(position)
                previous = position
        self.checked = len(self.stream)
        for request_id, base, end, rows in self.reader.completed:
            logged = self.log[base.sequence : end.sequence - 1]
            sent = [what for _, what in logged if isinstance(what, pb.Transaction) and what.request_id == request_id]
            ended_by = self.log[end.sequence - 1][1]
            if isinstance(ended_by, pb.Status) and ended_by.full_sync.state == pb.FullSyncRequest.CANCELLED:  # nobody supplies it any more
                assert self.provider_left, "an empty snapshot where there is a provider"
                assert rows == {}, "rows of a snapshot that nobody ended"
            else:
                assert rows == dict(pair_of(payload) for each in sent for payload in each.payloads), "a row is missing"
        self.reader.completed.clear()

    @invariant()
    def it_is_bounded(self) -> None:
        if hasattr(self, "session"):
            assert self.session.batches.in_flight_bytes <= LIMITS.in_flight_bytes_max
            assert self.session.state in SENDING or not self.readings
            assert self.session.state is not State.ERROR
            assert self.session.acked <= self.sink.status(ROUTE.queue).last  # else it is told that the sink has what it lacks

    def teardown(self) -> None:
        """Faults stop: everything comes to rest, and the reader has what the source has."""
        if not hasattr(self, "session"):
            return
        self.come_to_rest()
        if self.provider_left:  # an empty snapshot may be taken for a repeat of what a former primary had under way: the next delta shows the gap
            self.delta("a", 1)
            self.come_to_rest()
        if self.provider:
            assert self.reader.table == self.truth
        else:
            first = self.reader.base.sequence + 1
            assert [position for position, _, _ in self.reader.deltas if position > self.reader.base] == self.own(first, len(self.log))
            assert self.provider_left or self.was_trimmed or self.own(1, first - 1) == []
            if self.own(1, len(self.log)):
                assert self.reader.table is not None, "a site that never begins"

    def come_to_rest(self) -> None:
        for _ in range(300):
            self.round()
            self.the_receive_queue_has_no_silent_hole()
            self.it_is_bounded()
            if self.at_rest():
                break
        assert self.at_rest(), (self.session.state, self.session.reason, self.reports[-5:])

    def at_rest(self) -> bool:
        own = self.own(max(1, self.trimmed[Stream.LOG_ENTRIES]), len(self.log))
        return (
            self.session.state is State.IN_LOG_ENTRY_SYNC
            and not self.pending
            and not self.link
            and self.sink_safe == len(self.sink_log)
            and (not own or own[-1] <= self.reader.greatest)
            and (self.provider is False or (self.newest_request() is None and self.last_asked() <= self.reader.base))
        )

    def last_asked(self) -> Position:
        """Where the last request stands: what was asked for comes, whoever is primary then."""
        requests = [(position, what.full_sync) for position, what in self.log if isinstance(what, pb.Status) and what.HasField("full_sync")]
        return max((position for position, request in requests if request.state == pb.FullSyncRequest.REQUESTED), default=START)


World.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestWorld = World.TestCase


def test_an_empty_snapshot_below_a_marker_that_is_not_safe_at_the_sink() -> None:
    world = World()
    world.begin(provider=True)
    world.connect()
    world.delta(count=1, key="a")
    world.answer()
    world.status_safe()
    world.provider_leaves(seldom=0)
    world.carry(count=1, fate="deliver")
    world.disconnect(keep=0)
    world.teardown()


def test_rows_that_are_trimmed_before_their_provider_leaves() -> None:
    world = World()
    world.begin(provider=True)
    world.delta(key="a", count=1)
    world.client_interferes(cancel=False)
    world.provide(steps=3)
    world.provider_leaves(seldom=0)
    world.trim(stream=Stream.SNAP_SYNC, back=0)
    world.teardown()
    assert Reason.EMPTY_SNAPSHOT in world.reports
    assert [position for position, _, _ in world.reader.deltas if position > world.reader.base] == world.own(1, len(world.log))
