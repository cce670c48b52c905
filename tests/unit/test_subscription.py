"""Batches in memory within their limit, and a receiver's place in the log."""

from __future__ import annotations

import tracemalloc

import pytest

from lrq_ha.errors import IllegalEvent
from lrq_ha.replication.guard import QueueGuard
from lrq_ha.replication.log import BatchHeader
from lrq_ha.replication.subscription import BATCH_BYTES, ReplicatingSubscription, RoutingQueue, StoredBatch


def batch(first: int, last: int, size: int = 10) -> StoredBatch:
    return StoredBatch(BatchHeader(1, first, last, 1, 1), b"x" * size)


def queue(*batches: StoredBatch, limit: int = 3 * (BATCH_BYTES + 10)) -> RoutingQueue:
    made = RoutingQueue(limit)
    for b in batches:
        made.append(b)
    return made


def test_an_empty_queue() -> None:
    q = queue()
    assert (q.first, q.bytes, len(q)) == (0, 0, 0)
    assert q.starting_at(1) is None
    q.cut(1)


def test_the_oldest_batches_go_when_the_limit_is_passed() -> None:
    q = queue(batch(1, 2), batch(3, 3), batch(4, 9), batch(10, 10))
    assert (q.first, q.bytes, len(q)) == (3, 3 * (BATCH_BYTES + 10), 3)
    assert q.starting_at(1) is None
    assert q.starting_at(4) == 1
    assert q[1].header.last == 9


def test_the_newest_batch_is_kept_whatever_its_size() -> None:
    q = queue(batch(1, 1), batch(2, 2, size=1000))
    assert (q.first, q.bytes) == (2, BATCH_BYTES + 1000)


def test_small_batches_cost_no_more_memory_than_the_limit() -> None:
    """Acks alone make batches of fifty bytes; what is kept for one is many times that."""
    limit = 1 << 20
    q = queue(limit=limit)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for n in range(1, 30_000):
            header = BatchHeader(70_000, 10**7 + n, 10**7 + n, 70_000, 70_000)
            q.append(StoredBatch(header, bytes(bytearray(49))))
        assert limit // 2 < tracemalloc.get_traced_memory()[0] - before < limit
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sequence", [5, 11, 0])
def test_only_the_beginning_of_a_batch_is_found(sequence: int) -> None:
    assert queue(batch(4, 9), batch(10, 10)).starting_at(sequence) is None


def test_cut() -> None:
    q = queue(batch(1, 2), batch(3, 3), batch(4, 9))
    q.cut(3)
    assert (len(q), q.bytes, q.starting_at(3)) == (1, BATCH_BYTES + 10, None)
    q.append(batch(3, 5))
    assert q.starting_at(3) == 1


def test_what_the_receiver_brings_is_not_sent_again() -> None:
    guard = QueueGuard(4)
    s = ReplicatingSubscription(guard)
    assert s.sent == 4
    s.send(batch(5, 9))
    assert (s.sent, guard.sent, guard.safe_upto) == (9, 9, 4)


def test_batches_are_sent_in_order() -> None:
    s = ReplicatingSubscription(QueueGuard(4))
    with pytest.raises(IllegalEvent, match="entry 6 is sent after entry 4"):
        s.send(batch(6, 9))
    assert (s.sent, s.in_flight_bytes) == (4, 0)


def test_room_and_acknowledgements() -> None:
    s = ReplicatingSubscription(QueueGuard(), in_flight_bytes_max=20)
    s.send(batch(1, 2))
    assert s.has_room()
    s.send(batch(3, 5))
    assert not s.has_room()
    assert s.in_flight_bytes == 20
    s.settle(3)  # not the whole second batch
    assert s.in_flight_bytes == 10
    s.settle(5)
    assert (s.in_flight_bytes, s.has_room()) == (0, True)
