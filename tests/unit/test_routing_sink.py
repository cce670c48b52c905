"""What a sink accepts, what counts there, and what a cut takes back."""

from __future__ import annotations

import pytest

from lrq_ha.errors import IllegalEvent, MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START, position_of
from lrq_ha.routing.receive_state import MESSAGE_BYTES, message_of, state_of
from lrq_ha.routing.sink import Accept, AcceptTrimmed, Gap, Repeat, Sink

QUEUE = "LRQ_Recv_orders_east"
DELTA, ROWS, END = pb.LOG_ENTRY_SYNC, pb.SNAPSHOT_SYNC, pb.LAST_FULL_SYNC_ENTRY


def at(sequence: int, epoch: int = 257) -> Position:
    return Position(epoch, sequence) if sequence else START


def batch(previous: int, *sequences: int, kind: pb.ReplicationType = DELTA, request: str = "", payloads: int = 1) -> pb.ReceivedBatch:
    """Transactions at `sequences`, all of one kind."""
    new = pb.ReceivedBatch(source="east", client_name="orders", previous=pb.Position(epoch=at(previous).epoch, sequence=previous))
    for sequence in sequences:
        where = pb.Position(epoch=257, sequence=sequence)
        new.transactions.add(position=where, type=kind, request_id=request, payloads=[b"x"] * payloads)
    return new


def sink_at(*batches: pb.ReceivedBatch) -> Sink:
    sink = Sink()
    for op_seq, each in enumerate(batches, 1):
        sink.noted(op_seq, QUEUE, each)
    return sink


def test_a_batch_that_continues_the_chain_is_taken_as_it_is() -> None:
    sink = sink_at(batch(0, 3, 5))
    assert sink.accept(QUEUE, batch(5, 8, 9)) == Accept(at(9))
    assert sink.accept("LRQ_Recv_orders_east", batch(5, 8)) == Accept(at(8))


def test_an_overlap_is_cut_off() -> None:
    verdict = sink_at(batch(0, 3, 5)).accept(QUEUE, batch(3, 5, 8, 9))
    assert isinstance(verdict, AcceptTrimmed)
    rest = pb.ReceivedBatch.FromString(verdict.body)
    assert verdict.last == at(9)
    assert position_of(rest.previous) == at(5)
    assert [t.position.sequence for t in rest.transactions] == [8, 9]
    assert (rest.source, rest.client_name) == ("east", "orders")


def test_a_gap_is_refused() -> None:
    sink = sink_at(batch(0, 3, 5))
    assert sink.accept(QUEUE, batch(6, 8)) == Gap(at(5))
    assert sink.accept(QUEUE, batch(3, 4, 8)) == Gap(at(5))  # overlaps, and yet is another chain
    assert Sink().accept(QUEUE, batch(6, 8)) == Gap(START)


def test_a_repeat_waits_for_the_entry_that_holds_it() -> None:
    sink = sink_at(batch(0, 3), batch(3, 5), batch(5, 7))
    assert sink.accept(QUEUE, batch(3, 4, 5)) == Repeat(at(5), 2)
    assert sink.accept(QUEUE, batch(5, 7)) == Repeat(at(7), 3)
    sink.safe(2)
    assert sink.accept(QUEUE, batch(0, 3)) == Repeat(at(3), 0)
    assert sink.accept(QUEUE, batch(5, 7)) == Repeat(at(7), 3)


def test_a_chain_starts_anew_only_at_a_snapshot() -> None:
    sink = sink_at(batch(0, 3, 5))
    assert sink.accept(QUEUE, batch(0, 9, kind=ROWS, request="r", payloads=0)) == Accept(at(9))
    assert sink.accept(QUEUE, batch(0, 9, kind=END, request="r", payloads=0)) == Accept(at(9))
    assert sink.accept(QUEUE, batch(0, 9)) == Gap(at(5))
    assert sink.accept(QUEUE, batch(0, 9, kind=ROWS, request="r")) == Gap(at(5))
    assert sink.accept(QUEUE, batch(0, 4, 9, kind=ROWS, request="r", payloads=0)) == Gap(at(5))


def test_another_restart_below_what_is_not_safe_yet_is_no_repeat() -> None:
    """A source that was told of nothing safe begins below a marker that it had sent before: its first deltas are not there."""
    marker = batch(0, 4, kind=ROWS, request="r", payloads=0)
    sink = sink_at(marker)
    assert sink.accept(QUEUE, marker) == Repeat(at(4), 1)
    assert sink.accept(QUEUE, batch(0, 2, kind=END, request="empty", payloads=0)) == Gap(at(4))
    delta = batch(4, 6)
    sink.noted(2, QUEUE, delta)
    overlapping = batch(0, 5, kind=ROWS, request="newer", payloads=0)
    overlapping.transactions.extend(batch(5, 6, 7).transactions)
    assert sink.accept(QUEUE, overlapping) == Gap(at(6)), "its marker must not be cut off as an overlap"
    overlapping.transactions[0].CopyFrom(marker.transactions[0])
    assert isinstance(sink.accept(QUEUE, overlapping), AcceptTrimmed)


def test_a_queue_begins_with_a_snapshot() -> None:
    assert Sink().accept(QUEUE, batch(0, 9)) == Gap(START)
    assert Sink().accept(QUEUE, batch(0, 9, kind=ROWS, request="r")) == Gap(START)
    assert Sink().accept(QUEUE, batch(0, 9, kind=ROWS, request="r", payloads=0)) == Accept(at(9))
    assert Sink().accept(QUEUE, batch(0, 9, kind=END, request="r", payloads=0)) == Accept(at(9))


def test_a_later_epoch_is_later_whatever_its_sequence() -> None:
    sink = sink_at(batch(0, 500))
    restart = batch(0, 9, kind=ROWS, request="r", payloads=0)
    restart.transactions[0].position.epoch = 513
    assert sink.accept(QUEUE, restart) == Accept(at(9, 513))


@pytest.mark.parametrize(
    ("queue", "bad"),
    [
        ("LRQ_Recv_orders_west", batch(0, 1)),
        ("LRQ_Recv_other_east", batch(0, 1)),
        ("orders", batch(0, 1)),
        (QUEUE, batch(0)),
        (QUEUE, batch(0, 2, 2)),
        (QUEUE, batch(4, 4)),
    ],
)
def test_malformed_batches_change_nothing(queue: str, bad: pb.ReceivedBatch) -> None:
    sink = Sink()
    with pytest.raises(MalformedInput):
        sink.accept(queue, bad)
    with pytest.raises(MalformedInput):
        sink.noted(1, queue, bad)
    assert sink.queues() == []


def test_status_says_what_is_safe() -> None:
    sink = sink_at(batch(0, 3, kind=ROWS, request="r", payloads=0), batch(3, 5, kind=END, request="r"), batch(5, 6))
    assert sink.status(QUEUE).last == START
    sink.safe(1)
    status = sink.status(QUEUE)
    assert (status.last, status.snapshot_request, status.snapshot_complete) == (at(3), "r", False)
    sink.safe(3)
    assert (sink.status(QUEUE).last.sequence, sink.status(QUEUE).snapshot_complete) == (6, True)
    assert sink.status("LRQ_Recv_new_east").last.sequence == 0


def test_a_chain_is_bare_until_a_snapshot_is_whole() -> None:
    """Then it stays so, whatever becomes of newer ones, until it begins anew."""
    start, end = batch(0, 3, kind=ROWS, request="r", payloads=0), batch(4, 5, kind=END, request="r")
    newer, anew = batch(5, 6, kind=ROWS, request="s", payloads=0), batch(0, 9, kind=ROWS, request="t", payloads=0)
    empty = batch(0, 12, kind=END, request="u", payloads=0)
    found = []
    sink = Sink()
    for op_seq, each in enumerate((start, batch(3, 4), end, newer, batch(6, 7), anew, batch(9, 10), empty), 1):
        sink.noted(op_seq, QUEUE, each)
        sink.safe(op_seq)
        found.append(sink.status(QUEUE).bare)
        again = Sink()
        again.load(sink.rows(), op_seq)
        assert again.status(QUEUE) == sink.status(QUEUE)
    assert found == [True, True, False, False, False, True, True, False]


def test_a_receiver_is_told_where_snapshots_begin_once_they_are_safe() -> None:
    start, rows = batch(0, 3, kind=ROWS, request="r", payloads=0), batch(3, 4, kind=ROWS, request="r")
    end = batch(4, 5, kind=END, request="r", payloads=0)
    newer, empty = batch(5, 6, kind=ROWS, request="s", payloads=0), batch(0, 9, kind=END, request="t", payloads=0)
    found: list[tuple[int, int, int]] = []
    sink = Sink()
    for op_seq, each in enumerate((start, rows, end, newer, batch(6, 7), empty), 1):
        sink.noted(op_seq, QUEUE, each)
        assert [state.last.sequence for state in sink.receive_states("orders")] == [last for last, _, _ in found[-1:]]
        sink.safe(op_seq)
        [state] = sink.receive_states("orders")
        found.append((state.last.sequence, state.begun.sequence, state.whole.sequence))
        assert [message_of(row.queue, state_of(row)) for row in sink.rows()] == sink.rows()
    assert found == [(3, 3, 0), (4, 3, 0), (5, 3, 3), (6, 6, 3), (7, 6, 3), (9, 9, 9)]
    assert sink.receive_states("other") == []


def test_an_entry_is_noted_once_and_may_be_safe_before() -> None:
    sink = Sink()
    sink.safe(5)
    sink.noted(4, QUEUE, batch(0, 3))
    sink.noted(4, QUEUE, batch(0, 9))
    assert sink.status(QUEUE).last.sequence == 3


def test_a_cut_takes_back_what_was_not_safe() -> None:
    sink = sink_at(batch(0, 3), batch(3, 5), batch(5, 7))
    sink.safe(1)
    sink.cut(2)
    assert sink.accept(QUEUE, batch(3, 5)) == Accept(at(5))
    sink.noted(2, QUEUE, batch(3, 6))
    assert sink.accept(QUEUE, batch(6, 8)) == Accept(at(8))
    with pytest.raises(IllegalEvent, match="safe"):
        sink.cut(1)


def test_a_cut_may_leave_a_queue_empty() -> None:
    sink = sink_at(batch(0, 3))
    sink.cut(1)
    assert sink.queues() == []
    assert sink.rows() == []


def test_rows_carry_the_state_over() -> None:
    sink = sink_at(batch(0, 3, kind=ROWS, request="r", payloads=0), batch(3, 5))
    [row] = sink.rows()
    state = state_of(row)
    assert (row.queue, state.last, state.snapshot_request, state.snapshot_complete, state.bare) == (QUEUE, at(5), "r", False, True)
    assert (state.begun, state.begun_size, state.size > 2 * MESSAGE_BYTES) == (at(3), 0, True)
    other = Sink()
    other.load(sink.rows(), 2)
    other.noted(2, QUEUE, batch(3, 5))  # read again
    assert other.accept(QUEUE, batch(5, 6)) == Accept(at(6))
    assert other.accept(QUEUE, batch(3, 5)) == Repeat(at(5), 0)
    assert other.status(QUEUE).snapshot_request == "r"
    with pytest.raises(IllegalEvent):
        other.cut(2)


def test_a_batch_of_another_log_is_refused() -> None:
    first = batch(0, 3, kind=ROWS, request="r", payloads=0)
    first.log_id = b"one"
    sink = sink_at(batch(0, 2, kind=ROWS, request="q", payloads=0), first)
    assert sink.newest(QUEUE).log_id == b"one", "a log from before logs had identities"
    for log_id, refused in ((b"one", False), (b"", False), (b"two", True)):
        next_one = batch(3, 5)
        next_one.log_id = log_id
        if refused:
            with pytest.raises(MalformedInput, match=f"{b'one'.hex()}.*{b'two'.hex()}.*another group of that name"):
                sink.accept(QUEUE, next_one)
        else:
            assert sink.accept(QUEUE, next_one) == Accept(at(5))


# ---- demands, and when a queue needs a new snapshot ----------------------------------------------------------------------------------------


def snapshot(previous: int, base: int, request: str, rows_bytes: int) -> list[pb.ReceivedBatch]:
    """A snapshot at `base`, with rows of so many bytes."""
    rows = batch(base, base + 1, kind=ROWS, request=request)
    rows.transactions[0].payloads[0] = b"x" * rows_bytes
    return [batch(previous, base, kind=ROWS, request=request, payloads=0), rows, batch(base + 1, base + 2, kind=END, request=request)]


def test_a_demand_is_open_until_a_snapshot_begins_behind_it() -> None:
    sink = sink_at(*snapshot(0, 3, "r", 10), batch(5, 6))
    sink.demanded(5, QUEUE, "an operator")
    sink.demanded(6, QUEUE, "another one")
    sink.demanded(7, "LRQ_Recv_unknown_east", "no batch has come")
    assert sink.newest_demand("east") == 0, "not safe yet"
    sink.safe(7)
    assert (sink.newest_demand("east"), sink.newest_demand("south")) == (5, 0)
    assert sink.status(QUEUE).demand_reason == "an operator"
    other = Sink()
    other.load(sink.rows(), 7)
    assert other.newest_demand("east") == 5
    for op_seq, each in enumerate((batch(6, 7), *snapshot(7, 8, "s", 10)), 8):
        other.noted(op_seq, QUEUE, each)
        other.safe(op_seq)
        assert (other.newest_demand("east") == 0) == (op_seq > 8)
    assert "LRQ_Recv_unknown_east" not in other.queues()


def test_a_demand_that_is_cut_off_is_none() -> None:
    sink = sink_at(batch(0, 3, kind=ROWS, request="r", payloads=0))
    sink.safe(1)
    sink.demanded(2, QUEUE, "an operator")
    sink.cut(2)
    sink.safe(5)
    assert sink.newest_demand("east") == 0


def due_after(rows_bytes: int, kept_bytes: int) -> int:
    """Bytes behind the start of a snapshot of so many bytes when the next one is due; 0: never."""
    sink = sink_at(*snapshot(0, 3, "r", rows_bytes))
    last, op_seq = 5, 3
    while (state := state_of(sink.rows()[0])).size - state.whole_size < 4 * kept_bytes:
        if state.is_full_sync_due(kept_bytes):
            return state.size - state.whole_size
        delta = batch(last, last + 1)
        delta.transactions[0].payloads[0] = b"x" * 1_000
        op_seq, last = op_seq + 1, last + 1
        sink.noted(op_seq, QUEUE, delta)
    return 0


@pytest.mark.parametrize(
    ("rows_bytes", "least", "most"),
    [
        (10_000, 900_000, 1_000_000),  # there is room for the next one
        (300_000, 690_000, 710_000),
        (450_000, 890_000, 910_000),  # two do not fit: as many deltas as rows come before the next one
        (800_000, 990_000, 1_010_000),
        (1_100_000, 0, 0),  # it would be due for ever
    ],
)
def test_a_full_sync_is_due_before_the_stream_drops_the_last_snapshot(rows_bytes: int, least: int, most: int) -> None:
    assert least <= due_after(rows_bytes, 1_000_000) <= most


def test_no_full_sync_is_due_while_one_is_wanted_or_under_way_or_without_any() -> None:
    large = batch(5, 6)
    large.transactions[0].payloads[0] = b"x" * 2_000_000
    sink = sink_at(*snapshot(0, 3, "r", 10), large)
    assert state_of(sink.rows()[0]).is_full_sync_due(1_000_000)
    sink.demanded(5, QUEUE, "retention")
    assert not state_of(sink.rows()[0]).is_full_sync_due(1_000_000)
    sink.noted(6, QUEUE, batch(6, 7, kind=ROWS, request="s", payloads=0))
    assert not state_of(sink.rows()[0]).is_full_sync_due(1_000_000)
    never = sink_at(batch(0, 3, kind=ROWS, request="r", payloads=0), batch(3, 4), large)
    assert not state_of(never.rows()[0]).is_full_sync_due(1_000)


def test_a_snapshot_that_its_source_dropped_is_not_waited_for() -> None:
    """It counted as under way, and later as too large: nothing was demanded any more."""
    kept = 100_000
    sink = sink_at(*snapshot(0, 3, "r", 10_000), *snapshot(5, 6, "s", 10_000)[:2])
    for sequence in range(8, 208):
        state = state_of(sink.rows()[0])
        assert state.overflow(kept) == 0
        if state.is_full_sync_due(kept):
            break
        delta = batch(sequence - 1, sequence)
        delta.transactions[0].payloads[0] = b"x" * 1_000
        sink.noted(sequence, QUEUE, delta)
    assert state.is_full_sync_due(kept)
    assert kept < state.size - state.rows_size < kept + 2_000, "its beginning is lost, too"
    assert state.lacks_snapshot(at(4), kept), "the last whole snapshot is what is missing"
    old = state_of(sink.rows()[0])._replace(rows_size=0)
    assert old.is_full_sync_due(kept), "of an older version"
    sink.noted(300, QUEUE, snapshot(sequence - 1, 250, "t", 10)[0])
    assert not state_of(sink.rows()[0]).is_full_sync_due(kept)
    assert not state_of(sink.rows()[0])._replace(rows_size=0).is_full_sync_due(kept), "nor of an older version's snapshot that has just begun"


def test_a_snapshot_larger_than_the_stream_is_told() -> None:
    sink = sink_at(*snapshot(0, 3, "r", 50_000))
    state = state_of(sink.rows()[0])
    assert state.overflow(40_000) == state.snapshot_bytes > 50_000
    assert state.overflow(60_000) == 0
    assert [state.lacks_snapshot(at(9), kept_bytes) for kept_bytes in (40_000, 60_000)] == [False, True], "another one would be lost, too"
    under_way = sink_at(*snapshot(0, 3, "r", 50_000)[:2])
    assert state_of(under_way.rows()[0]).overflow(40_000) > 50_000


def test_a_copy_that_begins_behind_the_last_snapshot_lacks_it() -> None:
    sink = sink_at(*snapshot(0, 3, "r", 10), batch(5, 6))
    state = state_of(sink.rows()[0])
    assert [state.lacks_snapshot(head, 10_000) for head in (at(3), at(4), None)] == [False, True, True]
    sink.noted(5, QUEUE, batch(6, 8, kind=ROWS, request="s", payloads=0))
    state = state_of(sink.rows()[0])
    assert [state.lacks_snapshot(head, 10_000) for head in (at(6), at(8), at(9), None)] == [False, False, True, True], "the one under way will do"
