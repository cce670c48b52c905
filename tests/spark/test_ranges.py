"""Ranges: whatever the sink repeats, however the queue is cut, and whichever node's stream is read, each transaction comes once."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from receive_queues import transaction
from recorded_streams import Q, Recorded, chain, chains, read, read_all, recorded, stream

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.spark.errors import DataLoss, OptionError
from lrq_ha.spark.ranges import Range, Selection, begin, extent, split
from lrq_ha.streams.message import Message

pytestmark = pytest.mark.proves("G6")

def plan(source: Recorded, pieces: int, starting: int | None = None, ending: int | None = None) -> list[Range]:
    one = extent(source, Q, starting, ending, strict=True)
    return split(source, [one], pieces) if one else []


@pytest.mark.quick
@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 4), st.integers(1, 9))
def test_every_transaction_once_however_it_is_cut(seed: int, count: int, rewinds: int, pieces: int) -> None:
    rng = random.Random(seed)
    made = chain(rng, count)
    source = stream(rng, made, rewinds, whole=True)
    parts = plan(source, pieces)
    assert read_all(source, parts) == [one.position.sequence for one in made]
    assert all(left.through == right.after for left, right in pairwise(parts))


def forced(reached: int, begins: int, ends: int) -> Recorded:
    """A source's log that went on at `begins`, in a new epoch, after it had reached `reached`, one transaction per message."""
    old, new = ([transaction(n, epoch=epoch) for n in span] for epoch, span in ((257, range(1, reached + 1)), (514, range(begins, ends + 1))))
    befores = [pb.Position(), *(one.position for one in old[:-1]), pb.Position(), *(one.position for one in new[:-1])]
    batches = [pb.ReceivedBatch(previous=before, transactions=[one]) for before, one in zip(befores, old + new, strict=True)]
    return Recorded([Message(offset, batch) for offset, batch in enumerate(batches)])


@pytest.mark.parametrize("starting", [52, 90, 101])
@pytest.mark.parametrize("ends", [60, 100, 140])
def test_a_start_that_the_source_has_had_twice(starting: int, ends: int) -> None:
    """Who has read 1 .. 100 of the first log would miss what the second one says of 51 .. 100, the snapshot with which it begins among it."""
    source = forced(100, 51, ends)
    with pytest.raises(DataLoss, match="name 51 or less"):
        plan(source, 1, starting)
    assert extent(source, Q, starting, None, strict=False) is not None


@pytest.mark.parametrize(("starting", "first"), [(51, 51), (20, 20), (102, 102)])
def test_a_start_that_can_be_of_one_log_only(starting: int, first: int) -> None:
    given = read_all(source := forced(100, 51, 140), plan(source, 1, starting))
    assert given[0] == first
    assert given[-1] == 140
    assert starting >= 51 or given.count(60) == 2


def test_a_sink_that_repeats_its_beginning_up_to_a_later_epoch_is_no_second_log() -> None:
    """The source was promoted in order after 5. Its sink then repeats all that it had, and goes on, in one message."""
    made = [*(transaction(n) for n in range(1, 6)), transaction(6, epoch=514)]
    befores = [pb.Position(), *(one.position for one in made[:4])]
    batches = [pb.ReceivedBatch(previous=before, transactions=[one]) for before, one in zip(befores, made)]
    source = Recorded([Message(offset, batch) for offset, batch in enumerate([*batches, pb.ReceivedBatch(transactions=made)])])
    assert read_all(source, plan(source, 1, 2)) == [2, 3, 4, 5, 6]


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 3))
def test_a_sink_in_the_middle_of_repeating_hides_nothing_from_a_whole_read(seed: int, count: int, rewinds: int) -> None:
    rng = random.Random(seed)
    made = chain(rng, count)
    source = stream(rng, made, rewinds, whole=False)
    (part,) = plan(source, 1)
    reached = max(message.last for message in source.messages)
    assert read(source, part) == [one.position.sequence for one in made if one.position.sequence <= reached.sequence]


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 3), st.integers(2, 9))
def test_a_sink_in_the_middle_of_repeating_leaves_no_hole_between_cuts(seed: int, count: int, rewinds: int, pieces: int) -> None:
    rng = random.Random(seed)
    made = chain(rng, count)
    source = stream(rng, made, rewinds, whole=False)
    given = read_all(source, plan(source, pieces))
    assert given == [one.position.sequence for one in made][: len(given)]
    assert given[-1] >= source.messages[-1].last.sequence


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 3), st.integers(1, 5))
def test_another_node_gives_the_same(seed: int, count: int, rewinds: int, pieces: int) -> None:
    rng = random.Random(seed)
    made = chain(rng, count)
    parts = plan(stream(rng, made, rewinds, whole=True), pieces)
    other = stream(rng, made, rewinds, whole=True)
    assert read_all(other, parts) == [one.position.sequence for one in made]


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 3), st.integers(1, 5), st.data())
def test_sequences_bound_what_is_read(seed: int, count: int, rewinds: int, pieces: int, data: st.DataObject) -> None:
    rng = random.Random(seed)
    made = chain(rng, count)
    source = stream(rng, made, rewinds, whole=True)
    last = made[-1].position.sequence
    low = data.draw(st.integers(0, last + 1))
    high = data.draw(st.integers(low, last + 1))
    given = read_all(source, plan(source, pieces, low, high))
    assert given == [one.position.sequence for one in made if low <= one.position.sequence < high]
    given = read_all(source, plan(source, pieces, low))
    assert given == [one.position.sequence for one in made if low <= one.position.sequence]


@pytest.mark.quick
def test_a_trimmed_start_is_data_loss_unless_told_otherwise() -> None:
    trimmed = recorded(5, 6, 7, offset=4)
    with pytest.raises(DataLoss, match="begins after sequence 4: startingOffsets 3 is trimmed"):
        extent(trimmed, Q, 3, None, strict=True)
    lenient = extent(trimmed, Q, 3, None, strict=False)
    assert lenient is not None
    assert read(trimmed, lenient.whole) == [5, 6, 7]


def test_what_is_trimmed_between_planning_and_reading_is_data_loss() -> None:
    parts = plan(recorded(1, 2, 3, 4, 5, 6), 2)
    trimmed = recorded(3, 4, 5, 6, offset=2)
    with pytest.raises(DataLoss, match=r"lacks what comes after .*\.0, up to 257\.2"):
        read(trimmed, parts[0])
    assert read(trimmed, parts[1]) == [5, 6] or read(trimmed, parts[1]) == [4, 5, 6]


def test_a_hole_in_the_middle_is_data_loss_unless_told_otherwise() -> None:
    holed = recorded(1, 2, 5, 6)
    (part,) = plan(holed, 1)
    with pytest.raises(DataLoss, match=r"after 257\.2, up to 257\.4"):
        read(holed, part)
    selection = Selection(part, holed, strict=False)
    given = [one.position.sequence for message in holed.messages for one in selection.take(message, same_stream=True).transactions]
    assert given == [1, 2, 5, 6]
    assert len(selection.holes) == 1


@pytest.mark.parametrize("pieces", [1, 2])
def test_what_is_trimmed_up_to_a_restart_is_data_loss(pieces: int) -> None:
    """What is left says nothing of what was before it."""
    full = chains(10, 30)
    part = plan(full, pieces)[0]
    assert read(full, part)[0] == 10
    with pytest.raises(DataLoss, match=r"may lack what comes after .*: what is left begins at 257\.30"):
        read(Recorded(full.messages[3:]), part)


def test_what_is_trimmed_up_to_a_restart_while_it_is_read_is_data_loss() -> None:
    full = chains(10, 30)
    (part,) = plan(full, 1)
    with pytest.raises(DataLoss, match=r"may lack what comes after 257\.11: what is left begins at 257\.30"):
        read(Recorded(full.messages[:2] + full.messages[3:], trimmed=2), part)


def test_a_restart_behind_a_record_of_the_brokers_is_no_data_loss() -> None:
    """Brokers write such records where a segment begins."""
    full = chains(10, 30)
    behind = Recorded([message._replace(offset=message.offset + (message.offset > 2)) for message in full.messages])
    (part,) = plan(behind, 1)
    assert read(behind, part) == [10, 11, 12, 30, 31, 32]


def test_startingoffsets_before_a_restart_that_is_left() -> None:
    trimmed = Recorded(chains(10, 30).messages[3:])
    with pytest.raises(DataLoss, match="begins after sequence 29: startingOffsets 12 is trimmed"):
        extent(trimmed, Q, 12, None, strict=True)
    for starting in (None, 30, 31):
        assert read_all(trimmed, plan(trimmed, 1, starting)) == [30, 31, 32][(starting or 30) - 30 :]
    whole = chains(10)
    assert read_all(whole, plan(whole, 1, 5)) == [10, 11, 12]


def test_bounds_past_the_end_are_refused() -> None:
    source = recorded(1, 2, 3)
    with pytest.raises(OptionError, match="received up to sequence 3: endingOffsets 5"):
        extent(source, Q, None, 5, strict=True)
    with pytest.raises(OptionError, match="received up to sequence 3: startingOffsets 5"):
        extent(source, Q, 5, None, strict=True)
    with pytest.raises(OptionError, match="endingOffsets 1 is before startingOffsets 2"):
        extent(source, Q, 2, 1, strict=True)
    assert read_all(source, plan(source, 1, 4)) == []


def test_more_pieces_than_messages_are_not_asked_for() -> None:
    """A number that a user may give, and that would take all memory."""
    source = recorded(1, 2, 3, 4, 5, 6)
    assert read_all(source, plan(source, 999_999_999)) == [1, 2, 3, 4, 5, 6]


def test_a_restart_is_marked_and_is_no_hole() -> None:
    marker = transaction(9, [], kind=pb.SNAPSHOT_SYNC, request="r")
    source = recorded(1, 2)
    source.messages.append(Message(2, pb.ReceivedBatch(transactions=[marker, transaction(10)])))
    (part,) = plan(source, 1)
    selection = Selection(part, source, strict=True)
    given = [
        (one.position.sequence, taken.restart and number == 0)
        for message in source.messages
        for taken in [selection.take(message, same_stream=True)]
        for number, one in enumerate(taken.transactions)
    ]
    assert given == [(1, False), (2, False), (9, True), (10, False)]


@pytest.mark.quick
def test_an_empty_queue_has_no_ranges() -> None:
    assert plan(Recorded([]), 3) == []
    assert begin(Recorded([]), Range(Q, Position(0, 0), Position(1, 1), (0, Position(1, 1)), None)) == (None, False)  # type: ignore[arg-type]
