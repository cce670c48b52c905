"""One session: every state with every event, each step of the table, and what is sent in which case."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrq_ha.errors import IllegalEvent
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing import messages as m
from lrq_ha.routing import names
from lrq_ha.routing.chain import START, may_restart
from lrq_ha.routing.messages import Stream
from lrq_ha.routing.route import Limits, Route
from lrq_ha.routing.session import Session
from lrq_ha.routing.shares import ViewEntry
from lrq_ha.routing.statuses import Statuses
from lrq_ha.routing.tables import NEGOTIATION, SENDING, TRANSITIONS, Holds, Reason, State, Step

LOG, SNAP = Stream.LOG_ENTRIES, Stream.SNAP_SYNC
ROUTE = Route("east", "orders", "west")
DELTA, ROWS, END = pb.LOG_ENTRY_SYNC, pb.SNAPSHOT_SYNC, pb.LAST_FULL_SYNC_ENTRY
REQUESTED, COMPLETED, CANCELLED = pb.FullSyncRequest.REQUESTED, pb.FullSyncRequest.COMPLETED, pb.FullSyncRequest.CANCELLED


def at(sequence: int) -> Position:
    return Position(257, sequence) if sequence else START


def transaction(kind: pb.ReplicationType = DELTA, request: str = "", size: int = 1, **more: object) -> pb.Transaction:
    entries = [pb.RoutingTableEntryMsg(destinations=["west"], payload=0)]
    values: dict[str, object] = {"client_name": "orders", "type": kind, "request_id": request, "payloads": [b"x" * size]}
    return pb.Transaction(**(values | {"entries": entries} | more))  # type: ignore[arg-type]


def client(provider: bool, name: str = "orders") -> pb.Status:
    return pb.Status(key=names.client_key(name), client=pb.ClientStatus(client_name=name, full_sync_provider=provider))


def full_sync(request_id: str, state: pb.FullSyncRequest.State = REQUESTED, destination: str = "west") -> pb.Status:
    value = pb.FullSyncRequest(client_name="orders", destination=destination, request_id=request_id, state=state)
    return pb.Status(key=names.full_sync_key("orders", destination), full_sync=value)


def read_by(reader: int, *entries: tuple[int, pb.Transaction]) -> m.Read:
    return m.Read(reader, tuple(ViewEntry(at(sequence), each, each.ByteSize()) for sequence, each in entries), at(entries[-1][0] if entries else 0))


class Bench:
    """A session and the last effects; `readers` as a driver would keep them. It is told what the log's statuses come to."""

    def __init__(self, provider: bool | None = True, **limits: float) -> None:
        self.session = Session(ROUTE, at(1), 0.0, Limits(**limits))  # type: ignore[arg-type]
        self.effects: list[m.Effect] = []
        self.statuses = Statuses()
        self.readers: dict[Stream, m.StartRead] = {}
        self.now = 0.0
        if provider is not None:
            self.client(provider)

    def tell(self, event: m.Event) -> list[m.Effect]:
        self.effects = self.session.handle(event)
        for effect in self.effects:
            if isinstance(effect, m.StartRead):
                self.readers[effect.stream] = effect
            elif isinstance(effect, m.StopRead):
                del self.readers[effect.stream]
            elif isinstance(effect, m.Send):
                batch = pb.ReceivedBatch.FromString(effect.body)
                assert batch.previous.sequence or may_restart(batch.transactions[0]), "a chain without a beginning"
                assert all(each.type == DELTA or each.request_id for each in batch.transactions)
        return self.effects

    def client(self, provider: bool, name: str = "orders", sequence: int = 1) -> None:
        self.status(sequence, client(provider, name))

    def request(self, sequence: int, name: str, state: pb.FullSyncRequest.State = REQUESTED, destination: str = "west") -> None:
        self.status(sequence, full_sync(name, state, destination))

    def status(self, sequence: int, status: pb.Status) -> None:
        self.statuses.noted(sequence, status)
        self.statuses.safe(sequence)
        told = self.statuses.since(sequence - 1)
        self.effects = [effect for entry, what in told for effect in self.tell(m.StatusEntry(at(entry), what))]

    def report(self, last: int = 0, request: str = "", complete: bool = False, known: bool = True, bare: bool = False) -> None:
        self.tell(m.SinkReport(at(last), request, complete, known, bare))

    def meet(self, *args: object, **more: object) -> Bench:
        """Connects, and the sink reports."""
        self.tell(m.Connected())
        self.report(*args, **more)  # type: ignore[arg-type]
        return self

    def read(self, stream: Stream, *entries: tuple[int, pb.Transaction]) -> None:
        self.tell(read_by(self.readers[stream].reader, *entries))

    def end(self, stream: Stream, through: int) -> None:
        self.tell(m.ReadEnd(self.readers[stream].reader, at(through)))

    def trim(self, stream: Stream, first: int) -> None:
        self.tell(m.Trimmed(self.readers.pop(stream).reader, first))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.tell(m.Tick(self.now))

    @property
    def sent(self) -> list[tuple[int, list[tuple[int, str, str]]]]:
        """Per batch: sequence of `previous`, then each transaction's sequence, type (D, R, E or M: start marker) and request."""
        batches = []
        for effect in self.effects:
            if isinstance(effect, m.Send):
                batch = pb.ReceivedBatch.FromString(effect.body)
                assert (batch.source, batch.client_name, effect.queue) == ("east", "orders", "LRQ_Recv_orders_east")
                kinds = {DELTA: "D", ROWS: "R", END: "E"}
                rows = [
                    (t.position.sequence, "M" if t.type == ROWS and not t.payloads else kinds[t.type], t.request_id)
                    for t in batch.transactions
                ]
                assert effect.last.sequence == rows[-1][0]
                batches.append((batch.previous.sequence, rows))
        return batches

    @property
    def appended(self) -> list[tuple[str, pb.FullSyncRequest.State]]:
        requests = [effect.status.full_sync for effect in self.effects if isinstance(effect, m.AppendStatus)]
        assert all((each.client_name, each.destination) == ("orders", "west") for each in requests)
        return [(each.request_id, each.state) for each in requests]

    @property
    def reasons(self) -> list[Reason]:
        return [effect.reason for effect in self.effects if isinstance(effect, m.Report)]

    def of(self, kind: type[m.Effect]) -> list[m.Effect]:
        return [effect for effect in self.effects if isinstance(effect, kind)]


def in_log_sync(**limits: float) -> Bench:
    return Bench(**limits).meet(10, "r", True)  # type: ignore[arg-type]


def in_snapshot(**limits: float) -> Bench:
    """Request r at 5 is the chain's last."""
    bench = Bench(**limits)  # type: ignore[arg-type]
    bench.request(5, "r")
    return bench.meet()


def in_state(state: State) -> Bench:
    bench = Bench()
    match state:
        case State.NEGOTIATING:
            bench.tell(m.Connected())
        case State.IN_SNAPSHOT_SYNC:
            return in_snapshot()
        case State.WAIT_SNAPSHOT_APPLY:
            bench = in_snapshot()
            bench.read(SNAP, (6, transaction(END, "r")))
            bench.end(LOG, 6)
        case State.IN_LOG_ENTRY_SYNC:
            return in_log_sync()
        case State.ERROR:
            bench.meet(8, "q", True, known=False)
        case _:
            pass
    return bench


# ---- the tables -----------------------------------------------------------------------------------------------------

EVENTS: list[m.Event] = [
    m.Connected(),
    m.Disconnected(),
    m.SinkReport(at(10), "r", True),
    read_by(1, (11, transaction())),
    m.ReadEnd(1, at(11)),
    m.Trimmed(1, 11),
    m.StatusEntry(at(20), pb.Status(client=pb.ClientStatus(client_name="orders", full_sync_provider=True))),
    m.Acked(at(2)),
    m.Refused(),
    m.Demand(Reason.SITE_DEMANDS),
    m.Tick(1.0),
]


def grid_id(value: object) -> str:
    return value.name if isinstance(value, State) else type(value).__name__


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, EVENTS)), ids=grid_id)
def test_every_state_with_every_event(state: State, event: m.Event) -> None:
    """What is illegal raises and changes nothing; whatever else happens is a step of the table."""
    session = in_state(state).session
    assert session.state is state
    if isinstance(event, m.Connected) and state is not State.WAITING_FOR_CONNECTION:
        before = repr(vars(session))
        with pytest.raises(IllegalEvent, match="Connected"):
            session.handle(event)
        assert repr(vars(session)) == before
        return
    session.handle(event)
    assert session.state is state or session.state in TRANSITIONS[state].values()


def test_the_tables_are_whole() -> None:
    assert set(TRANSITIONS) == set(State)
    assert set(NEGOTIATION) == set(Holds)
    assert {step for steps in TRANSITIONS.values() for step in steps} == set(Step)
    for step, _ in NEGOTIATION.values():
        assert step in TRANSITIONS[State.NEGOTIATING]
    for state in SENDING:
        assert TRANSITIONS[state][Step.LINK_LOST] is State.WAITING_FOR_CONNECTION


def test_a_step_that_is_not_in_the_table_is_a_bug() -> None:
    with pytest.raises(IllegalEvent, match="SNAPSHOT_ACKED in WAITING"):
        Bench().session._go(Step.SNAPSHOT_ACKED, Reason.SNAPSHOT_DONE)


# ---- negotiation ----------------------------------------------------------------------------------------------------


def test_a_link_that_is_up_leads_to_a_question() -> None:
    bench = Bench(answer_timeout_s=10)
    assert bench.tell(m.Connected()) == [m.Report(State.NEGOTIATING, Reason.CONNECTED), m.AskSink("LRQ_Recv_orders_east")]
    bench.tick(9)
    assert bench.effects == []
    bench.tick(1)
    assert bench.effects == [m.AskSink("LRQ_Recv_orders_east")]


def test_a_sink_that_never_had_a_snapshot_leads_to_a_request() -> None:
    bench = Bench().meet()
    ((request, state),) = bench.appended
    assert state == REQUESTED
    assert bench.session.reason is Reason.NEVER_SYNCED
    bench.request(7, request)
    assert bench.sent == [(0, [(7, "M", request)])]
    assert bench.readers[LOG].from_sequence == bench.readers[SNAP].from_sequence == 8


def test_a_pending_request_in_the_log_is_used() -> None:
    bench = in_snapshot()
    assert bench.appended == []
    assert bench.sent == [(0, [(5, "M", "r")])]


def test_a_whole_snapshot_is_gone_on_from() -> None:
    bench = in_log_sync()
    assert bench.session.state is State.IN_LOG_ENTRY_SYNC
    assert bench.session.acked == at(10)
    assert bench.of(m.StartRead) == [m.StartRead(LOG, 11, 1)]
    bench.read(LOG, (11, transaction()), (13, transaction()))
    assert bench.sent == [(10, [(11, "D", ""), (13, "D", "")])]


def test_part_of_a_snapshot_is_gone_on_with() -> None:
    bench = Bench()
    bench.request(5, "r")
    bench.meet(8, "r")
    assert bench.session.reason is Reason.SNAPSHOT_UNFINISHED
    assert {effect.from_sequence for effect in bench.readers.values()} == {9}
    bench.read(SNAP, (9, transaction(ROWS, "r")))
    bench.end(LOG, 20)
    assert bench.sent == [(8, [(9, "R", "r")])]


@pytest.mark.parametrize(("ahead", "asks"), [(False, 1), (True, 0)])
def test_part_of_a_snapshot_that_was_cancelled_is_asked_for_again(ahead: bool, asks: int) -> None:
    bench = Bench()
    bench.request(5, "r")
    bench.request(7, "r", CANCELLED)
    if ahead:
        bench.request(9, "s")
    bench.meet(8, "r")
    assert len(bench.appended) == asks
    assert SNAP not in bench.readers
    bench.end(LOG, 9)
    assert bench.sent == ([(8, [(9, "M", "s")])] if ahead else [])


def test_entries_that_the_log_lost_lead_to_a_snapshot() -> None:
    bench = Bench()
    bench.request(20, "r")
    bench.meet(8, "q", True, known=False)
    assert Reason.OTHER_HISTORY in bench.reasons
    assert bench.sent == [(0, [(20, "M", "r")])]
    assert bench.session.acked == START


def test_a_log_that_is_behind_its_sink_is_an_error() -> None:
    bench = Bench().meet(8, "q", True, known=False)
    assert bench.effects == [m.Report(State.ERROR, Reason.BEHIND_SINK)]
    bench.tell(m.Disconnected())
    assert bench.session.state is State.WAITING_FOR_CONNECTION


@pytest.mark.parametrize(
    ("known", "ours", "state"),
    [
        (b"one", b"two", State.ERROR),
        (b"one", b"one", State.IN_LOG_ENTRY_SYNC),
        (b"", b"two", State.IN_LOG_ENTRY_SYNC),
        (b"one", b"", State.IN_LOG_ENTRY_SYNC),
    ],
)
def test_another_log_of_that_name_is_an_error(known: bytes, ours: bytes, state: State) -> None:
    """Though its epoch and position are those of the former one."""
    session = Session(Route("east", "orders", "west", ours), at(9), 0.0)
    session.handle(m.Connected())
    session.handle(m.SinkReport(at(8), "q", True, log_id=known))
    assert session.state is state
    assert (session.reason is Reason.OTHER_LOG) == (state is State.ERROR)


def test_a_log_that_was_begun_anew_goes_on_in_an_epoch_above_the_sinks() -> None:
    """What operators are told to see to; the former log's primary had epoch 1."""
    bench = Bench()
    bench.session = Session(ROUTE, Position(513, 3), 0.0)
    bench.client(True)
    bench.meet(8, "q", True, known=False)
    assert bench.session.reason is Reason.OTHER_HISTORY
    assert [state for _, state in bench.appended] == [REQUESTED]


# ---- snapshots ------------------------------------------------------------------------------------------------------


def test_a_snapshot_and_deltas_go_in_log_order() -> None:
    bench = in_snapshot()
    bench.read(SNAP, (7, transaction(ROWS, "r")), (9, transaction(END, "r")))
    assert bench.sent == []
    bench.read(LOG, (6, transaction()), (8, transaction()), (10, transaction()))
    assert bench.sent == [(5, [(6, "D", ""), (7, "R", "r"), (8, "D", ""), (9, "E", "r"), (10, "D", "")])]
    assert m.StopRead(SNAP) in bench.effects
    assert bench.session.state is State.WAIT_SNAPSHOT_APPLY
    bench.tell(m.Acked(at(8)))
    assert bench.session.state is State.WAIT_SNAPSHOT_APPLY
    bench.tell(m.Acked(at(9)))
    assert bench.effects == [m.Report(State.IN_LOG_ENTRY_SYNC, Reason.SNAPSHOT_DONE)]


def test_other_requests_data_is_left_out() -> None:
    bench = in_snapshot()
    bench.read(SNAP, (6, transaction(ROWS, "q")), (7, transaction(END, "q")), (8, transaction(ROWS, "r")))
    bench.end(LOG, 9)
    assert bench.sent == [(5, [(8, "R", "r")])]


def test_a_new_request_takes_the_place_of_the_one_under_way() -> None:
    bench = in_snapshot()
    bench.request(7, "s")
    bench.end(LOG, 9)
    bench.read(SNAP, (6, transaction(ROWS, "r")), (8, transaction(ROWS, "r")))
    assert bench.sent == [(5, [(6, "R", "r"), (7, "M", "s")])]
    bench.read(SNAP, (9, transaction(ROWS, "s")))
    assert bench.sent == [(7, [(9, "R", "s")])]


def test_a_request_while_deltas_flow_begins_a_snapshot_where_it_stands() -> None:
    bench = in_log_sync()
    bench.request(12, "s")
    assert bench.sent == []
    bench.read(LOG, (11, transaction()), (13, transaction()))
    assert bench.sent == [(10, [(11, "D", ""), (12, "M", "s")])]
    bench.end(SNAP, 13)
    assert bench.sent == [(12, [(13, "D", "")])]
    assert bench.session.state is State.IN_SNAPSHOT_SYNC


def test_a_repeated_request_means_nothing() -> None:
    bench = in_snapshot()
    bench.request(7, "r")
    bench.end(LOG, 7)
    bench.end(SNAP, 7)
    bench.request(7, "r")
    assert bench.sent == []
    assert bench.appended == []


def test_a_request_that_comes_too_late_is_asked_for_anew() -> None:
    bench = in_log_sync()
    bench.read(LOG, (15, transaction()))
    bench.request(12, "s")
    assert [state for _, state in bench.appended] == [REQUESTED]


def test_a_cancelled_snapshot_is_asked_for_again_later_each_time() -> None:
    bench = in_snapshot(backoff_first_s=1, backoff_max_s=3)
    sequence, name = 5, "r"
    for waits_s in (1, 1, 2, 3, 3):
        sequence += 1
        bench.request(sequence, name, CANCELLED)
        bench.end(LOG, sequence)
        bench.end(SNAP, sequence)
        assert bench.reasons == [Reason.SNAPSHOT_CANCELLED]
        assert bench.session.state is State.IN_SNAPSHOT_SYNC
        bench.tick(waits_s - 0.5)
        assert bench.appended == []
        bench.tick(0.5)
        ((name, _),) = bench.appended
        sequence += 1
        bench.request(sequence, name)
        bench.end(LOG, sequence)


def test_a_cancelled_snapshot_whose_successor_is_in_the_log_needs_no_request() -> None:
    bench = in_snapshot()
    bench.request(6, "r", CANCELLED)
    bench.request(7, "s")
    bench.end(LOG, 7)
    bench.end(SNAP, 7)
    assert bench.sent == [(5, [(7, "M", "s")])]
    assert bench.appended == []


def test_a_client_that_announces_itself_anew_ends_what_its_former_process_had_sent() -> None:
    """The new one would send its rows behind those."""
    bench = in_snapshot(backoff_first_s=1)
    bench.client(True, sequence=8)
    bench.end(LOG, 10)
    bench.read(SNAP, (6, transaction(ROWS, "r")), (9, transaction(ROWS, "r")), (10, transaction(END, "r")))
    assert bench.sent == [(5, [(6, "R", "r")])]
    assert bench.reasons == [Reason.SNAPSHOT_CANCELLED]
    bench.tick(1)
    ((request, state),) = bench.appended
    assert (state, request != "r") == (REQUESTED, True)


def test_a_client_that_announces_itself_while_the_link_is_down_is_asked_anew() -> None:
    bench = Bench()
    bench.request(5, "r")
    bench.client(True, sequence=8)
    bench.meet()
    assert [state for _, state in bench.appended] == [REQUESTED]


def test_a_client_that_announces_itself_behind_its_whole_snapshot_ends_nothing() -> None:
    bench = Bench()
    bench.request(5, "r")
    bench.request(7, "r", COMPLETED)
    bench.client(True, sequence=8)
    bench.meet()
    assert bench.sent == [(0, [(5, "M", "r")])]


def test_an_end_of_an_older_request_hides_no_request_from_an_announcement() -> None:
    bench = Bench()
    bench.request(5, "r")
    bench.request(6, "q", CANCELLED)
    bench.client(True, sequence=8)
    bench.meet()
    assert [state for _, state in bench.appended] == [REQUESTED]


@pytest.mark.parametrize("waits", [False, True])
def test_a_provider_that_comes_back_is_asked_soon(waits: bool) -> None:
    """It waited for as long as the former one's absence had made the pauses grow."""
    bench = in_snapshot(backoff_first_s=1, ack_timeout_s=10_000, snapshot_timeout_s=10_000)
    sequence, name = 5, "r"
    for _ in range(9):  # nobody answers
        sequence += 1
        bench.request(sequence, name, CANCELLED)
        bench.end(LOG, sequence)
        bench.end(SNAP, sequence)
        while not bench.appended:
            bench.tick(1)
            assert bench.now < 10_000
        ((name, _),) = bench.appended
        sequence += 1
        bench.request(sequence, name)
        bench.end(LOG, sequence)
    if waits:
        sequence += 1
        bench.request(sequence, name, CANCELLED)
        bench.end(LOG, sequence)
        bench.end(SNAP, sequence)
    sequence += 1
    bench.client(True, sequence=sequence)
    if not waits:
        bench.end(LOG, sequence)
        bench.end(SNAP, sequence)
    announced_s = bench.now
    while not bench.appended:
        bench.tick(1)
        assert bench.now - announced_s <= 1


def test_the_cancellation_of_another_request_means_nothing() -> None:
    bench = in_snapshot()
    bench.tell(m.StatusEntry(at(6), full_sync("q", CANCELLED)))
    bench.end(LOG, 7)
    bench.end(SNAP, 7)
    assert SNAP in bench.readers
    assert bench.effects == []


def test_no_data_for_too_long_cancels() -> None:
    bench = in_snapshot(snapshot_timeout_s=10)
    bench.tell(m.Acked(at(5)))
    bench.tick(9)
    bench.read(SNAP, (6, transaction(ROWS, "r")))
    bench.end(LOG, 6)
    bench.tell(m.Acked(at(6)))
    bench.tick(9)
    assert bench.effects == []
    bench.tick(1)
    assert bench.appended == [("r", CANCELLED)]
    assert bench.reasons == [Reason.SNAPSHOT_SILENT]
    bench.tick(20)
    assert bench.effects == []


def test_a_provider_is_silent_also_where_deltas_flow() -> None:
    """The end of its view is told a moment later than deltas come: one always waited, and was taken for a sink that is slow."""
    bench = in_snapshot(snapshot_timeout_s=60)
    for sequence in range(6, 300):
        bench.read(LOG, (sequence, transaction()))
        bench.end(SNAP, sequence - 1)
        bench.tell(m.Acked(bench.session.sent))
        bench.tick(0.25)
        if bench.now < 60:
            assert bench.appended == []
        elif bench.appended:
            break
    assert (bench.appended, bench.now) == ([("r", CANCELLED)], 60)


def test_a_view_that_is_read_slowly_cancels_no_snapshot() -> None:
    """What was known when the wait began has to be read: rows may be in it."""
    bench = in_snapshot(snapshot_timeout_s=10, ack_timeout_s=1000)
    bench.read(SNAP, (6, transaction(ROWS, "r")))
    bench.end(LOG, 20)
    for _ in range(3):
        bench.tick(10)
        assert bench.appended == []
    bench.end(SNAP, 20)
    bench.tick(10)
    assert bench.appended == [("r", CANCELLED)]


def test_a_view_that_is_read_anew_is_waited_for() -> None:
    bench = in_snapshot(snapshot_timeout_s=10, ack_timeout_s=1000)
    bench.read(SNAP, (6, transaction(ROWS, "r")))
    bench.end(LOG, 20)
    bench.tell(m.Disconnected())
    bench.meet(6, "r")
    bench.tick(10)
    assert bench.appended == []
    bench.end(SNAP, 20)
    bench.tick(10)
    assert bench.appended == [("r", CANCELLED)]


def test_a_slow_sink_cancels_no_snapshot() -> None:
    bench = in_snapshot(snapshot_timeout_s=10, in_flight_bytes_max=1, ack_timeout_s=1000)
    bench.read(SNAP, (6, transaction(ROWS, "r")))
    bench.end(LOG, 6)
    bench.tick(100)
    assert bench.appended == []
    bench.tell(m.Acked(at(5)))
    assert bench.sent == [(5, [(6, "R", "r")])]
    bench.tick(9)
    assert bench.effects == []


def test_deltas_flow_while_nobody_provides() -> None:
    bench = in_snapshot()
    bench.end(SNAP, 8)
    bench.read(LOG, (6, transaction()), (8, transaction()))
    assert bench.sent == [(5, [(6, "D", ""), (8, "D", "")])]


def test_when_the_provider_is_gone_a_first_snapshot_gives_way_to_an_empty_one() -> None:
    """It waited for a provider for ever, and a reader without a whole snapshot makes nothing of the deltas."""
    bench = in_snapshot(snapshot_timeout_s=10, ack_timeout_s=100, backoff_first_s=1)
    bench.client(False, sequence=6)
    bench.read(SNAP, (7, transaction(ROWS, "r")))
    bench.end(LOG, 8)
    bench.end(SNAP, 8)
    bench.tick(9)
    assert bench.appended == [], "another process of the client may have one"
    bench.tick(1)
    assert bench.appended == [("r", CANCELLED)]
    bench.request(10, "r", CANCELLED)
    bench.end(SNAP, 11)
    bench.read(LOG, (11, transaction()))
    assert bench.reasons == [Reason.SNAPSHOT_CANCELLED], "to end it would make a whole snapshot of its one row"
    bench.tick(1)
    ((request, state),) = bench.appended
    assert state == REQUESTED
    bench.request(12, request)
    bench.end(LOG, 12)
    assert bench.sent == [(11, [(12, "M", request)])]
    bench.tick(10)
    assert bench.appended == [(request, CANCELLED)]
    bench.request(14, request, CANCELLED)
    bench.end(SNAP, 15)
    bench.read(LOG, (13, transaction()), (15, transaction()))
    assert bench.sent == [(12, [(13, "D", ""), (14, "E", request), (15, "D", "")])]
    assert bench.reasons == [Reason.SNAPSHOT_UNSUPPLIED, Reason.SNAPSHOT_SENT]
    bench.tell(m.Acked(at(15)))
    assert bench.session.state is State.IN_LOG_ENTRY_SYNC


def test_a_first_snapshot_of_which_no_row_came_is_empty_at_once() -> None:
    bench = in_snapshot(snapshot_timeout_s=10)
    bench.client(False, sequence=6)
    bench.request(8, "r", CANCELLED)
    bench.read(LOG, (7, transaction()))
    bench.end(LOG, 8)
    bench.end(SNAP, 8)
    assert bench.sent == [(5, [(7, "D", ""), (8, "E", "r")])]


@pytest.mark.parametrize("back", [False, True])
def test_a_sink_with_part_of_a_first_snapshot_gets_an_empty_one_if_nobody_answers(back: bool) -> None:
    """It is gone on with after a failover, say, and had been cancelled."""
    bench = Bench(provider=False, snapshot_timeout_s=10).meet(8, "r", bare=True)
    ((request, state),) = bench.appended
    assert state == REQUESTED
    bench.request(20, request)
    bench.end(LOG, 20)
    assert [rows for _, rows in bench.sent] == [[(20, "M", request)]]
    bench.tell(m.Acked(at(20)))
    if back:
        bench.client(True, sequence=21)
        bench.end(LOG, 21)
        bench.end(SNAP, 21)
        bench.tick(1)
        assert [state for _, state in bench.appended] == [REQUESTED]
        return
    bench.tick(10)
    assert bench.appended == [(request, CANCELLED)]
    bench.request(21, request, CANCELLED)
    bench.end(SNAP, 21)
    bench.end(LOG, 21)
    assert bench.sent == [(20, [(21, "E", request)])]


def test_a_sink_that_has_an_older_snapshot_keeps_it_when_the_provider_is_gone() -> None:
    """Part of a newer one is there: an empty one would empty the tables."""
    bench = Bench(provider=False).meet(8, "r")
    assert bench.effects[-2:] == [m.StartRead(LOG, 9, 1), m.Report(State.IN_LOG_ENTRY_SYNC, Reason.NO_PROVIDER)]
    bench.read(LOG, (9, transaction()))
    assert bench.sent == [(8, [(9, "D", "")])]


def test_a_provider_that_goes_while_it_is_to_be_asked_again_is_not_waited_for() -> None:
    bench = in_log_sync(backoff_first_s=1)
    bench.request(11, "s")
    bench.end(LOG, 11)
    bench.request(12, "s", CANCELLED)
    bench.end(LOG, 12)
    bench.end(SNAP, 12)
    bench.tell(m.Acked(at(11)))
    bench.client(False, sequence=13)
    bench.tick(1)
    assert bench.effects == [m.Report(State.IN_LOG_ENTRY_SYNC, Reason.NO_PROVIDER)]
    bench.tick(1000)
    assert bench.effects == []


def test_a_sink_that_can_do_without_goes_on_with_deltas_when_the_provider_is_gone() -> None:
    bench = in_log_sync()
    bench.request(11, "s")
    bench.end(LOG, 11)
    bench.client(False, sequence=12)
    bench.request(13, "s", CANCELLED)
    bench.end(LOG, 13)
    bench.end(SNAP, 13)
    assert bench.effects[-1] == m.Report(State.IN_LOG_ENTRY_SYNC, Reason.NO_PROVIDER)
    bench.tick(1000)
    assert bench.appended == []


def dropped(request: str = "s") -> Bench:
    """A snapshot was given up, as its client has no provider any more."""
    bench = in_log_sync()
    bench.request(11, request)
    bench.end(LOG, 11)
    bench.client(False, sequence=12)
    bench.request(13, request, CANCELLED)
    bench.end(LOG, 13)
    bench.end(SNAP, 13)
    assert bench.session.reason is Reason.NO_PROVIDER
    return bench


def test_the_next_provider_is_asked_for_the_snapshot_that_was_dropped() -> None:
    """The sink had its beginning, waited for its end, and demanded nothing."""
    bench = dropped()
    bench.client(True, sequence=14)
    ((request, state),) = bench.appended
    assert state == REQUESTED
    bench.request(15, request)
    bench.client(True, sequence=16)
    bench.end(LOG, 16)
    assert [state for _, state in bench.appended if state == REQUESTED] == [], "it was asked for once"


def test_a_dropped_snapshot_that_another_one_makes_up_for_is_not_asked_for() -> None:
    bench = dropped()
    bench.request(14, "own")
    bench.request(15, "own", COMPLETED)
    bench.client(True, sequence=16)
    assert bench.appended == []
    bench.end(LOG, 17)
    bench.client(True, sequence=18)
    assert bench.appended == [], "at no later provider either"


def test_the_next_provider_is_asked_for_the_rest_of_a_snapshot_that_the_sink_has_a_part_of() -> None:
    """A new primary finds a snapshot there that was dropped by another one."""
    bench = Bench(provider=False).meet(8, "r")
    assert bench.session.reason is Reason.NO_PROVIDER
    bench.client(True, sequence=9)
    assert [state for _, state in bench.appended] == [REQUESTED]


# ---- another primary -------------------------------------------------------------------------------------------------


def new_primary(*entries: tuple[int, pb.Status]) -> Bench:
    """Its session is told what is left of these."""
    statuses = Statuses()
    for sequence, status in ((1, client(True)), *entries):
        statuses.noted(sequence, status)
    bench = Bench(provider=None)
    for sequence, status in statuses.rows():
        bench.tell(m.StatusEntry(at(sequence), status))
    return bench


def test_a_snapshot_that_was_cancelled_is_not_completed_by_another_primary() -> None:
    """Its provider, which did not hear of that in time, did: the sink got the end marker, and not the rows (6) in between."""
    bench = new_primary((2, full_sync("r")), (5, full_sync("r", CANCELLED)), (9, full_sync("r", COMPLETED))).meet(7, "r")
    assert [state for _, state in bench.appended] == [REQUESTED]
    assert SNAP not in bench.readers
    bench.end(LOG, 9)
    assert bench.sent == []


def test_a_snapshot_that_was_cancelled_and_forgotten_is_not_completed_by_another_primary() -> None:
    bench = new_primary((2, full_sync("r")), (5, full_sync("r", CANCELLED)), (15, full_sync("s"))).meet(7, "r")
    assert SNAP not in bench.readers
    assert bench.appended == []
    bench.end(LOG, 15)
    assert bench.sent == [(7, [(15, "M", "s")])]


def test_a_snapshot_of_a_former_process_is_not_completed_by_another_primary() -> None:
    """That process had not heard of its successor, or of two of them."""
    bench = new_primary((2, full_sync("r")), (4, client(True)), (8, full_sync("r", COMPLETED)), (9, client(True))).meet(6, "r")
    assert [state for _, state in bench.appended] == [REQUESTED]
    assert SNAP not in bench.readers


def test_a_whole_snapshot_that_the_sink_has_not_begun_is_sent_by_another_primary() -> None:
    """Somebody asked for it: it was left out where it was answered before the failover."""
    bench = new_primary((12, full_sync("s")), (20, full_sync("s", COMPLETED))).meet(10, "r", True)
    assert bench.appended == []
    bench.read(LOG, (11, transaction()), (13, transaction()))
    assert bench.sent == [(10, [(11, "D", ""), (12, "M", "s")])]
    assert bench.readers[SNAP].from_sequence == 13
    bench.read(SNAP, (14, transaction(ROWS, "s")), (19, transaction(END, "s")))
    bench.end(LOG, 20)
    assert [row for _, rows in bench.sent for row in rows] == [(14, "R", "s"), (19, "E", "s")]


# ---- without a provider ---------------------------------------------------------------------------------------------


def test_without_a_provider_an_empty_snapshot_goes_before_the_first_delta() -> None:
    bench = Bench(provider=False).meet()
    assert bench.readers[LOG].from_sequence == 1
    assert bench.reasons == [Reason.NEVER_SYNCED, Reason.EMPTY_SNAPSHOT]
    bench.tell(read_by(bench.readers[LOG].reader))
    assert bench.sent == []
    bench.read(LOG, (4, transaction()), (6, transaction()))
    ((previous, rows),) = bench.sent
    assert previous == 0
    assert [(sequence, kind) for sequence, kind, _ in rows] == [(3, "E"), (4, "D"), (6, "D")]
    bench.tell(m.Acked(at(3)))
    assert bench.session.state is State.IN_LOG_ENTRY_SYNC


def test_without_any_delta_the_empty_snapshot_goes_behind_what_was_read() -> None:
    bench = Bench(provider=False).meet()
    bench.read(LOG, (4, transaction(client_name="other")), (5, transaction(entries=[])))
    assert [[row[:2] for row in rows] for _, rows in bench.sent] == [[(5, "E")]]


def test_what_was_trimmed_is_passed_over_by_an_empty_snapshot() -> None:
    bench = Bench(provider=False).meet()
    bench.trim(LOG, 30)
    assert bench.readers[LOG].from_sequence == 30
    bench.read(LOG, (33, transaction()))
    assert [[row[:2] for row in rows] for _, rows in bench.sent] == [[(32, "E"), (33, "D")]]


def test_another_history_without_a_provider_is_read_from_its_beginning() -> None:
    bench = Bench(provider=False)
    bench.client(False, sequence=100)
    bench.meet(50, "q", True, known=False)
    assert bench.readers[LOG].from_sequence == 1
    bench.read(LOG, (40, transaction()), (60, transaction()))
    assert [[row[:2] for row in rows] for _, rows in bench.sent] == [[(59, "E"), (60, "D")]]


def test_complete_data_in_the_log_is_better_than_an_empty_snapshot() -> None:
    bench = Bench(provider=False)
    bench.request(5, "r")
    bench.request(8, "r", COMPLETED)
    bench.meet()
    assert bench.sent == [], "it is not known yet whether its rows are left"
    bench.read(SNAP, (6, transaction(ROWS, "r")), (7, transaction(END, "r")))
    assert bench.sent == [(0, [(5, "M", "r")])]
    bench.end(LOG, 8)
    assert bench.sent == [(5, [(6, "R", "r"), (7, "E", "r")])]


@pytest.mark.parametrize("known", [True, False])
def test_an_empty_snapshot_is_better_than_complete_data_whose_rows_were_trimmed(known: bool) -> None:
    """It began at the request, and the deltas before were lost without a word."""
    bench = Bench(provider=False)
    bench.request(5, "r")
    bench.request(8, "r", COMPLETED)
    bench.meet(0 if known else 2, "" if known else "q", not known, known=known)
    bench.trim(SNAP, 30)
    assert bench.reasons == [Reason.EMPTY_SNAPSHOT]
    assert bench.readers[LOG].from_sequence == 1
    bench.read(LOG, (4, transaction()), (9, transaction()))
    assert [[row[:2] for row in rows] for _, rows in bench.sent] == [[(3, "E"), (4, "D"), (5, "M")]]
    bench.trim(SNAP, 30)
    assert bench.appended == [("r", CANCELLED)]
    bench.request(31, "r", CANCELLED)
    bench.end(LOG, 31)
    assert [[row[:2] for row in rows] for _, rows in bench.sent] == []
    assert bench.reasons == [Reason.NO_PROVIDER]
    assert bench.session.state is State.IN_LOG_ENTRY_SYNC


def test_deltas_that_are_trimmed_before_a_complete_snapshot_has_begun() -> None:
    bench = Bench(provider=False)
    bench.request(5, "r")
    bench.request(8, "r", COMPLETED)
    bench.meet()
    bench.trim(LOG, 20)
    assert bench.reasons == [Reason.EMPTY_SNAPSHOT]
    assert list(bench.readers) == [LOG]
    bench.read(LOG, (33, transaction()))
    assert [[row[:2] for row in rows] for _, rows in bench.sent] == [[(32, "E"), (33, "D")]]


def test_a_provider_that_comes_while_a_complete_snapshot_is_looked_for_is_asked_if_it_is_gone() -> None:
    bench = Bench(provider=False)
    bench.request(5, "r")
    bench.request(8, "r", COMPLETED)
    bench.meet()
    bench.client(True, sequence=9)
    assert bench.sent == []
    bench.trim(SNAP, 30)
    ((request, state),) = bench.appended
    assert state == REQUESTED
    bench.request(31, request)
    assert bench.sent == [(0, [(31, "M", request)])]


def test_a_client_that_says_nothing_is_waited_for_and_then_taken_for_one_without_provider() -> None:
    bench = Bench(provider=None, snapshot_timeout_s=10).meet()
    assert bench.reasons == [Reason.NEVER_SYNCED, Reason.CLIENT_UNKNOWN]
    bench.client(True, name="other")
    bench.tick(9)
    assert bench.effects == []
    bench.tick(1)
    assert bench.reasons == [Reason.EMPTY_SNAPSHOT]


@pytest.mark.parametrize("provider", [True, False])
def test_a_client_that_speaks_up_is_asked_if_it_can_answer(provider: bool) -> None:
    bench = Bench(provider=None).meet()
    bench.client(provider)
    assert len(bench.appended) == provider
    assert bench.reasons == ([] if provider else [Reason.EMPTY_SNAPSHOT])


def test_a_client_that_loses_its_provider_before_the_request_is_logged_gets_an_empty_snapshot() -> None:
    bench = Bench().meet()
    ((request, _),) = bench.appended
    bench.client(False)
    assert bench.reasons == [Reason.EMPTY_SNAPSHOT]
    bench.request(7, request)
    bench.read(LOG, (5, transaction()))
    assert [[row[:2] for row in rows] for _, rows in bench.sent] == [[(4, "E"), (5, "D")]]


# ---- trims ----------------------------------------------------------------------------------------------------------


def test_trimmed_deltas_lead_to_a_snapshot_and_a_new_chain() -> None:
    bench = in_log_sync()
    bench.trim(LOG, 30)
    assert m.Report(State.IN_SNAPSHOT_SYNC, Reason.TRIMMED) in bench.effects
    assert not bench.of(m.StopRead)
    ((request, _),) = bench.appended
    bench.request(40, request)
    assert bench.sent == [(0, [(40, "M", request)])]


def test_a_request_behind_the_trim_starts_the_new_chain() -> None:
    bench = in_log_sync()
    bench.request(29, "q")
    bench.trim(LOG, 30)
    assert bench.appended == []
    assert bench.sent == [(0, [(29, "M", "q")])]


def test_trimmed_snapshot_data_cancels_only_the_snapshot() -> None:
    bench = in_snapshot()
    bench.trim(SNAP, 30)
    assert bench.appended == [("r", CANCELLED)]
    bench.read(LOG, (6, transaction()))
    assert bench.sent == [(5, [(6, "D", "")])]
    bench.request(31, "r", CANCELLED)
    bench.end(LOG, 31)
    assert bench.reasons == [Reason.SNAPSHOT_CANCELLED]


def test_snapshots_that_are_trimmed_again_and_again_are_told_of_until_one_is_whole() -> None:
    """They were asked for again for ever, without a word."""
    bench = in_snapshot(backoff_first_s=1)
    bench.trim(SNAP, 30)
    assert (bench.reasons, bench.session.trouble) == ([Reason.TRIMMED], "")
    bench.request(31, "r", CANCELLED)
    bench.end(LOG, 31)
    bench.tick(1)
    ((request, _),) = bench.appended
    bench.request(32, request)
    bench.end(LOG, 32)
    bench.trim(SNAP, 60)
    assert bench.reasons == [Reason.SNAPSHOT_TRIMMED_AGAIN]
    assert "log_bytes_max" in bench.session.trouble
    bench.request(61, request, CANCELLED)
    bench.end(LOG, 61)
    assert bench.session.trouble
    bench.request(62, "s")
    bench.end(LOG, 62)
    bench.read(SNAP, (63, transaction(END, "s")))
    bench.end(LOG, 63)
    bench.tell(m.Acked(at(63)))
    assert bench.session.state is State.IN_LOG_ENTRY_SYNC
    assert bench.session.trouble == ""


def test_a_snapshot_that_is_being_cancelled_is_not_cancelled_twice() -> None:
    bench = in_snapshot(snapshot_timeout_s=1, ack_timeout_s=100)
    bench.tick(1)
    assert bench.appended == [("r", CANCELLED)]
    bench.trim(SNAP, 30)
    assert bench.appended == []


def test_what_former_readers_say_is_ignored() -> None:
    bench = in_log_sync()
    old = bench.readers[LOG].reader
    bench.tell(m.Disconnected())
    bench.meet(10, "r", True)
    for late in (read_by(old, (50, transaction())), m.ReadEnd(old, at(50)), m.Trimmed(old, 60)):
        assert bench.tell(late) == []
    bench.read(LOG, (11, transaction()))
    assert bench.sent == [(10, [(11, "D", "")])]


# ---- demands --------------------------------------------------------------------------------------------------------


def test_a_demand_is_a_request_unless_one_is_there() -> None:
    bench = in_log_sync()
    bench.tell(m.Demand(Reason.SITE_DEMANDS))
    ((request, _),) = bench.appended
    assert bench.tell(m.Demand(Reason.SITE_DEMANDS)) == []
    bench.request(11, request)
    assert bench.tell(m.Demand(Reason.SITE_DEMANDS)) == []
    assert bench.of(m.AppendStatus) == []


def test_a_demand_while_a_snapshot_is_under_way_is_a_request_for_another() -> None:
    """It may lack what was read too late."""
    bench = in_snapshot()
    bench.end(LOG, 20)
    bench.tell(m.Demand(Reason.SITE_DEMANDS))
    assert [state for _, state in bench.appended] == [REQUESTED]


def test_a_demand_is_not_answered_by_a_request_before_what_was_read() -> None:
    bench = in_snapshot(in_flight_bytes_max=1)
    bench.request(7, "s")
    bench.end(LOG, 20)
    assert bench.session.sent == at(5)
    bench.tell(m.Demand(Reason.SITE_DEMANDS))
    assert [state for _, state in bench.appended] == [REQUESTED]


def test_a_demand_to_a_client_without_provider_is_answered_at_once() -> None:
    bench = Bench(provider=False).meet(10, "r", True)
    assert bench.tell(m.Demand(Reason.SITE_DEMANDS)) == [m.Report(State.IN_LOG_ENTRY_SYNC, Reason.NO_PROVIDER)]
    bench.tick(1000)
    assert bench.effects == []


def test_a_request_that_another_one_hides_is_not_waited_for() -> None:
    """They became safe together, and the newer one is all that is told of: nothing was ever asked for again."""
    bench = in_log_sync()
    bench.tell(m.Demand(Reason.SITE_DEMANDS))
    ((request, _),) = bench.appended
    bench.statuses.noted(11, full_sync(request))
    bench.status(12, full_sync("own"))
    assert [mark.request_id for mark in bench.session._requests._marks] == ["own"]
    bench.end(LOG, 12)
    bench.request(13, "own", CANCELLED)
    bench.end(LOG, 13)
    bench.end(SNAP, 13)
    assert bench.reasons == [Reason.SNAPSHOT_CANCELLED]
    bench.tick(10)
    assert [state for _, state in bench.appended] == [REQUESTED]


def test_request_ids_differ_between_primaries_and_from_each_other() -> None:
    seen = set()
    for end in (1, 2):
        bench = Bench()
        bench.session = Session(ROUTE, at(end), 0.0)
        for _ in range(2):
            seen.add(bench.session._writer.new_id(bench.session._known))
    assert len(seen) == 4


def test_requests_of_others_are_ignored() -> None:
    bench = in_log_sync()
    bench.request(11, "s", destination="south")
    bench.end(LOG, 12)
    assert bench.sent == []
    bench.tell(m.StatusEntry(at(13), pb.Status(key="other")))
    assert bench.effects == []


@st.composite
def what_clients_say(draw: st.DrawFn) -> pb.Status:
    """Anything that is about this client; the door would not take all of it."""
    if draw(st.integers(0, 3)) == 0:
        return client(draw(st.booleans()))
    return full_sync(draw(st.sampled_from(["", "r", "s"])), draw(st.sampled_from([REQUESTED, COMPLETED, CANCELLED, 7])))  # type: ignore[arg-type]


@settings(max_examples=1000, deadline=None)
@given(st.sampled_from(State), st.lists(st.one_of(what_clients_say(), st.integers(0, 4)), max_size=12))
def test_no_status_of_a_client_ends_a_session_or_makes_a_chain_without_a_beginning(state: State, said: list[pb.Status | int]) -> None:
    """Where nothing had been asked for, the cancellation of a request without a name did: at each start, as it stood in the log."""
    bench = in_state(state)
    for sequence, what in enumerate(said, 20):
        if isinstance(what, pb.Status):
            bench.status(sequence, what)
        elif what < 2 and bench.readers:
            stream = SNAP if what and SNAP in bench.readers else LOG
            if stream in bench.readers:
                kind, request = (ROWS, "r") if stream is SNAP else (DELTA, "")
                bench.read(stream, (sequence, transaction(kind, request)))
        elif what == 2:
            for stream in Stream:
                if stream in bench.readers:
                    bench.end(stream, sequence)
        elif what == 3:
            bench.tick(100)
        elif bench.session.state is State.WAITING_FOR_CONNECTION:
            bench.meet()


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_batches_are_packed_up_to_their_limit() -> None:
    bench = in_log_sync(batch_bytes_max=300)
    bench.read(LOG, *[(sequence, transaction(size=100)) for sequence in range(11, 16)])
    assert all(len(effect.body) <= 300 for effect in bench.effects if isinstance(effect, m.Send))
    assert [[row[0] for row in rows] for _, rows in bench.sent] == [[11, 12], [13, 14], [15]]
    assert [previous for previous, _ in bench.sent] == [10, 12, 14]


def test_a_transaction_larger_than_every_limit_goes_alone() -> None:
    bench = in_log_sync(batch_bytes_max=50, in_flight_bytes_max=80)
    bench.read(LOG, (11, transaction(size=500)), (12, transaction()))
    assert [[row[0] for row in rows] for _, rows in bench.sent] == [[11]]
    bench.tell(m.Acked(at(11)))
    assert [[row[0] for row in rows] for _, rows in bench.sent] == [[12]]


def test_what_is_not_acked_is_bounded() -> None:
    bench = in_log_sync(in_flight_bytes_max=400, batch_bytes_max=1)
    bench.read(LOG, *[(sequence, transaction(size=100)) for sequence in range(11, 20)])
    assert [rows[0][0] for _, rows in bench.sent] == [11, 12]
    assert 200 < bench.session.batches.in_flight_bytes <= 400
    bench.tell(m.Acked(at(11)))
    assert [rows[0][0] for _, rows in bench.sent] == [13]
    assert bench.tell(m.Acked(at(11))) == []


def test_reading_pauses_when_enough_waits() -> None:
    bench = in_log_sync(in_flight_bytes_max=1, read_ahead_bytes_max=300)
    bench.read(LOG, *[(sequence, transaction(size=100)) for sequence in range(11, 16)])
    assert bench.of(m.PauseRead) == [m.PauseRead(LOG)]
    bench.tell(m.Acked(at(11)))
    bench.tell(m.Acked(at(12)))
    assert bench.of(m.ResumeRead) == []
    bench.tell(m.Acked(at(13)))
    assert bench.of(m.ResumeRead) == [m.ResumeRead(LOG)]


# ---- a link that loses things ---------------------------------------------------------------------------------------


def test_a_refused_batch_leads_to_a_question_at_the_next_tick() -> None:
    bench = in_log_sync()
    assert bench.tell(m.Refused()) == []  # it is not about anything under way
    bench.read(LOG, (11, transaction()))
    assert bench.tell(m.Refused()) == [m.StopRead(LOG), m.Report(State.NEGOTIATING, Reason.BATCH_REFUSED)]
    assert bench.session.batches.in_flight_bytes == 0
    bench.tick(0.1)
    assert bench.of(m.AskSink)
    bench.report(10, "r", True)
    bench.read(LOG, (11, transaction()))
    assert bench.sent == [(10, [(11, "D", "")])]


def test_a_sink_that_refuses_for_good_is_asked_less_and_less_often() -> None:
    bench = in_log_sync(backoff_first_s=1, answer_timeout_s=3)
    for waits_s in (0, 1, 2, 3, 3):
        bench.read(LOG, (11, transaction()))
        bench.tell(m.Refused())
        if waits_s:
            bench.tick(waits_s - 0.5)
            assert not bench.of(m.AskSink)
        bench.tick(0.5)
        assert bench.of(m.AskSink)
        bench.report(10, "r", True)
    bench.read(LOG, (11, transaction()))
    bench.tell(m.Acked(at(11)))
    bench.read(LOG, (12, transaction()))
    bench.tell(m.Refused())
    bench.tick(0.1)
    assert bench.of(m.AskSink), "it had taken something"


def test_a_door_that_acks_nothing_is_left() -> None:
    bench = in_log_sync(ack_timeout_s=10)
    for leaves in (False, True, False):
        bench.read(LOG, (11, transaction()))
        bench.tick(10)
        assert bool(bench.of(m.LeaveDoor)) == leaves
        bench.tick(0.1)
        bench.report(10, "r", True)


def test_an_overdue_ack_leads_to_a_question() -> None:
    bench = in_log_sync(ack_timeout_s=10)
    bench.tick(100)
    bench.read(LOG, (11, transaction()))
    bench.tick(9)
    assert bench.effects == []
    bench.tick(1)
    assert bench.session.reason is Reason.ACK_OVERDUE
    bench.tick(0.1)
    assert bench.of(m.AskSink)


def test_a_request_that_comes_while_the_link_is_down_is_used_when_it_is_up() -> None:
    bench = Bench().meet()
    ((request, _),) = bench.appended
    bench.tell(m.Disconnected())
    bench.request(7, request)
    assert bench.effects == []
    bench.meet()
    assert bench.sent == [(0, [(7, "M", request)])]


def test_a_new_link_does_not_ask_twice() -> None:
    bench = Bench().meet()
    bench.tell(m.Disconnected())
    bench.meet()
    assert bench.appended == []


def test_a_new_link_keeps_to_the_back_off() -> None:
    bench = in_snapshot(backoff_first_s=5)
    bench.request(6, "r", CANCELLED)
    bench.end(LOG, 6)
    bench.end(SNAP, 6)
    bench.tell(m.Disconnected())
    bench.meet()
    assert bench.appended == []
    bench.tick(5)
    assert len(bench.appended) == 1


def test_a_client_that_was_quiet_is_gone_on_with_where_it_was_read_to() -> None:
    """What others had sent since its last delta was read again; where that was trimmed, it got a full sync, or an empty snapshot, for nothing."""
    bench = in_log_sync()
    bench.end(LOG, 60)
    bench.tell(m.Disconnected())
    bench.meet(10, "r", True)
    assert bench.of(m.StartRead) == [m.StartRead(LOG, 61, 2)]
    bench.tell(m.Disconnected())
    bench.meet(10, "r", True)
    bench.read(LOG, (70, transaction()))
    assert bench.sent == [(10, [(70, "D", "")])]
    assert bench.session.acked == at(10)


def test_what_was_read_and_not_sent_is_read_again() -> None:
    bench = in_log_sync(in_flight_bytes_max=1)
    bench.read(LOG, (20, transaction()), (30, transaction()))
    bench.end(LOG, 60)
    assert bench.session.sent == at(20)
    bench.tell(m.Disconnected())
    bench.meet(20, "r", True)
    assert bench.of(m.StartRead) == [m.StartRead(LOG, 21, 2)]


def test_a_sink_that_lacks_what_was_sent_is_sent_it_again() -> None:
    bench = in_log_sync()
    bench.read(LOG, (20, transaction()))
    bench.end(LOG, 60)
    bench.tell(m.Disconnected())
    bench.meet(10, "r", True)
    assert bench.of(m.StartRead) == [m.StartRead(LOG, 11, 2)]


def test_a_request_that_came_while_the_link_was_down_is_not_passed_over() -> None:
    bench = in_log_sync()
    bench.end(LOG, 60)
    bench.tell(m.Disconnected())
    bench.request(61, "s")
    bench.meet(10, "r", True)
    bench.end(LOG, 62)
    assert bench.sent == [(10, [(61, "M", "s")])]


def test_a_demand_waits_for_a_provider() -> None:
    bench = Bench(provider=False).meet(10, "r", True)
    bench.tell(m.Demand(Reason.SITE_DEMANDS))
    assert bench.appended == []
    bench.status(11, pb.Status(key="client/orders", client=pb.ClientStatus(client_name="orders", full_sync_provider=True)))
    assert [state for _, state in bench.appended] == [REQUESTED]
    bench.status(12, pb.Status(key="client/orders", client=pb.ClientStatus(client_name="orders", full_sync_provider=True)))
    assert [state for _, state in bench.appended] == [], "it was asked for once"


def test_an_operator_may_demand_a_full_sync_while_the_site_is_away() -> None:
    bench = in_log_sync()
    bench.tell(m.Disconnected())
    bench.tell(m.Demand(Reason.OPERATOR_DEMANDS, "rows were lost"))
    ((request, state),) = bench.appended
    assert state == REQUESTED
    assert [effect.status.full_sync.reason for effect in bench.effects if isinstance(effect, m.AppendStatus)] == [
        "an operator demands a full sync: rows were lost"
    ]
    bench.request(11, request)
    for end in (None, COMPLETED):
        if end is not None:
            bench.request(12, request, end)
        assert bench.tell(m.Demand(Reason.OPERATOR_DEMANDS)) == [], "the site gets that one when it is back"
    bench.request(13, request, CANCELLED)
    bench.tell(m.Demand(Reason.OPERATOR_DEMANDS))
    assert [state for _, state in bench.appended] == [REQUESTED]


@pytest.mark.parametrize("end", [None, COMPLETED, CANCELLED])
def test_a_new_primary_asks_only_if_no_request_is_open_for_a_site_that_is_away(end: pb.FullSyncRequest.State | None) -> None:
    """It does not know whether the site has got one that has ended."""
    bench = new_primary((11, full_sync("r")), *([(12, full_sync("r", end))] if end is not None else []))
    bench.tell(m.Demand(Reason.OPERATOR_DEMANDS))
    assert [state for _, state in bench.appended] == ([REQUESTED] if end is not None else [])


def test_a_demand_while_the_chain_waits_for_its_start_asks_for_nothing() -> None:
    bench = Bench(provider=None).meet()
    assert bench.session.reason is Reason.CLIENT_UNKNOWN
    assert bench.tell(m.Demand(Reason.SITE_DEMANDS)) == []
