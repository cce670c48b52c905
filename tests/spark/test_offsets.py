"""Offsets of a streaming query: each transaction once, whatever the sink repeats, whichever node plans and reads, and wherever batches end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from receive_queues import transaction
from recorded_streams import Q, Recorded, chain, read_all, recorded, stream

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START
from lrq_ha.spark.errors import DataLoss, OffsetError, OptionError
from lrq_ha.spark.offsets import extent_between, format_offset, parse_offset, resolve_start
from lrq_ha.spark.options import EARLIEST, LATEST, Bound
from lrq_ha.spark.ranges import split
from lrq_ha.streams.message import Hint, Message

pytestmark = [pytest.mark.proves("G6"), pytest.mark.quick]


def prefix(whole: Recorded, length: int) -> Recorded:
    return Recorded(whole.messages[:length])


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 3), st.integers(1, 4))
def test_each_transaction_once_over_batches_and_nodes(seed: int, count: int, rewinds: int, pieces: int) -> None:
    """Two nodes' copies of the queue grow; each batch is planned on one of them, from the place where the last one ended, or from nowhere."""
    rng = random.Random(seed)
    made = chain(rng, count)
    copies = [stream(rng, made, rewinds, whole=True) for _ in range(2)]
    lengths = [0, 0]
    after, rows, place = START, [], None
    while any(length < len(copy.messages) for length, copy in zip(lengths, copies)):
        lengths = [min(length + rng.randint(0, 5), len(copy.messages)) for length, copy in zip(lengths, copies)]
        node = rng.randrange(2)
        seen = prefix(copies[node], lengths[node])
        tail = seen.tail(Q)
        if tail is None or (through := max(after, tail.last)) == after:
            continue
        planned = extent_between(seen, Q, after, through, place if rng.random() < 0.5 else None, strict=True)
        reader = rng.choice(copies)
        rows += read_all(reader, split(seen, [planned], pieces))
        repeated = extent_between(seen, Q, after, through, Hint(tail.offset, tail.last), strict=True)
        assert repeated.whole.start.last <= after or repeated.whole.start.offset == 0, "a batch that is repeated begins where it began"
        after, place = through, Hint(tail.offset, tail.last)
    last = max((copy.messages[length - 1].last for copy, length in zip(copies, lengths) if length), default=START)
    assert rows == [one.position.sequence for one in made if one.position.sequence <= after.sequence]
    assert after == last


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 3), st.data())
def test_a_start_by_sequence_gives_it_and_what_follows(seed: int, count: int, rewinds: int, data: st.DataObject) -> None:
    rng = random.Random(seed)
    made = chain(rng, count)
    source = stream(rng, made, rewinds, whole=True)
    wanted = data.draw(st.integers(1, made[-1].position.sequence + 1))
    after, through = resolve_start(source, Q, wanted, strict=True), source.messages[-1].last
    given = read_all(source, split(source, [extent_between(source, Q, after, through, None, strict=True)], 1)) if after < through else []
    assert given == [one.position.sequence for one in made if one.position.sequence >= wanted]


@pytest.mark.parametrize(
    ("source", "bound", "start"),
    [
        (recorded(), EARLIEST, START),
        (recorded(), LATEST, START),
        (recorded(3, 4), EARLIEST, Position(257, 2)),
        (recorded(3, 4), LATEST, Position(257, 4)),
        (recorded(3, 4), Position(257, 3), Position(257, 3)),
        (Recorded([Message(0, pb.ReceivedBatch(transactions=[transaction(5)]))]), EARLIEST, START),
        (Recorded([Message(7, pb.ReceivedBatch(transactions=[transaction(5)]))]), EARLIEST, Position(257, 4)),
    ],
)
def test_where_a_query_begins(source: Recorded, bound: Bound, start: Position) -> None:
    assert resolve_start(source, Q, bound, strict=True) == start


def test_a_start_that_is_not_there_is_refused() -> None:
    with pytest.raises(DataLoss, match="startingOffsets 1 is trimmed"):
        resolve_start(recorded(3, 4), Q, 1, strict=True)
    with pytest.raises(OptionError, match="received up to sequence 4"):
        resolve_start(recorded(3, 4), Q, 6, strict=True)


@pytest.mark.parametrize("after", [START, Position(257, 1)])
def test_what_was_trimmed_behind_the_last_position_is_data_loss(after: Position) -> None:
    source = recorded(3, 4, offset=8)
    with pytest.raises(DataLoss, match=rf"does not hold what follows {after}.*begins at 257\.3.*failOnDataLoss = false"):
        extent_between(source, Q, after, Position(257, 4), None, strict=True)
    lenient = extent_between(source, Q, after, Position(257, 4), None, strict=False)
    assert lenient.whole.start.offset == 8


@pytest.mark.parametrize(("after", "lost"), [(Position(257, 4), False), (Position(257, 3), True), (START, True)])
def test_a_queue_that_begins_with_a_restart_of_the_chain(after: Position, lost: bool) -> None:
    """It holds what follows its own first position and no other."""
    source = Recorded([Message(7, pb.ReceivedBatch(transactions=[transaction(5), transaction(6)]))])
    if lost:
        with pytest.raises(DataLoss, match="begins at 257"):
            extent_between(source, Q, after, Position(257, 6), None, strict=True)
    else:
        whole = extent_between(source, Q, after, Position(257, 6), None, strict=True)
        assert read_all(source, split(source, [whole], 1)) == [5, 6]


def test_a_whole_queue_is_read_from_its_beginning() -> None:
    source = Recorded([Message(0, pb.ReceivedBatch(transactions=[transaction(5), transaction(6)]))])
    assert read_all(source, split(source, [extent_between(source, Q, START, Position(257, 6), None, strict=True)], 1)) == [5, 6]


def test_an_offset_that_goes_back_is_refused() -> None:
    with pytest.raises(OffsetError, match=r"the offset 257\.3 is before 257\.4.*checkpointLocation"):
        extent_between(recorded(3, 4), Q, Position(257, 4), Position(257, 3), None, strict=True)


def test_offsets_have_one_spelling() -> None:
    offset = {"LRQ_Recv_b_x": Position(1, 2), "LRQ_Recv_a_x": Position(3, 4)}
    assert list(format_offset(offset)) == sorted(offset)
    assert parse_offset(format_offset(offset)) == offset
    with pytest.raises(OffsetError, match="is no offset of format lrq"):
        parse_offset({"LRQ_Recv_a_x": {"partition": 3}})
