"""The place of a time in a receive queue: the first transaction that is not before it, whatever the sink repeats and wherever the read ends."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from receive_queues import transaction
from recorded_streams import Q, Recorded, chain, read_all, recorded, stream

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.routing.chain import START
from lrq_ha.spark.errors import OptionError
from lrq_ha.spark.moments import find_sequence, find_start
from lrq_ha.spark.offsets import resolve_start
from lrq_ha.spark.options import Moment
from lrq_ha.spark.ranges import extent, split
from lrq_ha.streams.message import Message

pytestmark = pytest.mark.quick


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 3), st.integers(1, 4), st.data())
def test_times_bound_what_is_read(seed: int, count: int, rewinds: int, pieces: int, data: st.DataObject) -> None:
    rng = random.Random(seed)
    made, us = chain(rng, count), 1_000_000
    for one in made:
        us += rng.choice((0, 1, 900, 5_000))
        one.timestamp_us = us
    source = stream(rng, made, rewinds, whole=True)
    first, last = 1_000, us // 1000 + 2
    begin = data.draw(st.integers(first, last))
    end = data.draw(st.integers(begin, last))
    starting, ending = find_start(source, Q, Moment(begin, or_latest=True)), find_sequence(source, Q, Moment(end))
    planned = extent(source, Q, starting, ending, strict=True)
    assert planned is not None
    stop_us = end * 1000 if ending is not None else us + 1
    wanted = [one.position.sequence for one in made if begin * 1000 <= one.timestamp_us < stop_us]
    assert read_all(source, split(source, [planned], pieces)) == wanted


def test_the_end_of_a_queue() -> None:
    source = recorded(5, 6, 7)
    after = Moment(source.messages[0].batch.transactions[0].timestamp_us // 1000 + 1)
    assert find_sequence(source, Q, after) is None
    with pytest.raises(OptionError, match=r"Queue LRQ_Recv_a_b has no transaction from 2013-01-01 10:00:00.001\+00:00 on.*error. or .latest"):
        find_start(source, Q, after)
    latest = after._replace(or_latest=True)
    assert find_start(source, Q, latest) == 8
    assert resolve_start(source, Q, latest, strict=True) == source.messages[-1].last


def test_an_empty_queue_begins_at_its_beginning() -> None:
    assert find_start(recorded(), Q, Moment(1)) is None
    assert resolve_start(recorded(), Q, Moment(1), strict=True) == START


def test_a_transaction_without_a_time_is_before_every_time() -> None:
    timeless, timed = transaction(3, timestamp_us=0), transaction(4)
    source = Recorded([Message(0, pb.ReceivedBatch(transactions=[timeless, timed]))])
    assert find_sequence(source, Q, Moment(1)) == 4
