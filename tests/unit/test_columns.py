"""Arrow batches of format lrq have the values that each transaction has, read one by one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed")

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.routing.chain import TIMESTAMP_US_MAX
from lrq_ha.spark import columns
from lrq_ha.spark.columns import BYTES_MAX, ROWS_MAX, Rows, arrow_schema
from lrq_ha.spark.options import parse_options
from lrq_ha.spark.ranges import Taken

QUEUE = "LRQ_Recv_orders_east"
OPTIONS = parse_options({"nodes": "amqp://reader:x@192.0.2.1", "subscribe": QUEUE, "includeChain": "true"})
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

times = st.one_of(st.integers(0, 2), st.integers(TIMESTAMP_US_MAX - 1, TIMESTAMP_US_MAX + 1), st.integers(2**63 - 1, 2**64 - 1))
transactions = st.builds(
    pb.ReceivedTransaction,
    position=st.builds(pb.Position, epoch=st.integers(1, 2**63 - 1), sequence=st.integers(1, 2**63 - 1)),
    replication_id=st.sampled_from(("", "orders/1", "büro/2")),
    timestamp_us=times,
    type=st.sampled_from((0, 1, 2, 3, 9)),
    request_id=st.sampled_from(("", "r1")),
    payloads=st.lists(st.binary(max_size=3), max_size=3),
    path=st.lists(st.just("west"), max_size=1),
)
batches = st.builds(
    pb.ReceivedBatch,
    source=st.sampled_from(("east", "north")),
    client_name=st.just("orders"),
    log_id=st.binary(max_size=2),
    transactions=st.lists(transactions, min_size=1, max_size=4),
)
messages = st.lists(st.tuples(batches, st.booleans(), st.integers(0, 15)), min_size=1, max_size=6)


def one_by_one(batch: pb.ReceivedBatch, taken: Taken) -> list[dict[str, Any]]:
    """The rows of the transactions that were taken."""
    return [
        {
            "queue": QUEUE,
            "source": batch.source,
            "client_name": batch.client_name,
            "type": pb.ReplicationType.Name(one.type) if one.type in pb.ReplicationType.values() else str(one.type),
            "epoch": one.position.epoch,
            "sequence": one.position.sequence,
            "transaction": one.replication_id or None,
            "index": index,
            "replication_id": f"{one.replication_id}.{index}" if one.replication_id else None,
            "timestamp": EPOCH + timedelta(microseconds=one.timestamp_us) if 0 < one.timestamp_us <= TIMESTAMP_US_MAX else None,
            "payload": payload,
            "request_id": one.request_id or None,
            "restart": taken.restart and number == 0,
        }
        for number, one in enumerate(taken.transactions)
        for index, payload in enumerate(one.payloads or (None,))
    ]


def pack(given: Sequence[tuple[pb.ReceivedBatch, Taken]]) -> list[pa.RecordBatch]:
    """The Arrow batches of messages."""
    rows = Rows(QUEUE, arrow_schema(OPTIONS))
    return [batch for message, taken in given for batch in rows.add(message, taken)] + list(rows.flush())


@given(messages)
def test_each_value_is_that_of_its_transaction(given: list[tuple[pb.ReceivedBatch, bool, int]]) -> None:
    taken = []
    for batch, restarts, mask in given:
        some = [one for number, one in enumerate(batch.transactions) if mask >> number & 1]
        taken.append((batch, Taken(some or batch.transactions, restarts)))
    made = pack(taken)
    assert {batch.schema for batch in made} == {arrow_schema(OPTIONS)}
    assert [row for batch in made for row in batch.to_pylist()] == [row for batch, part in taken for row in one_by_one(batch, part)]


def made_of(*payloads: Sequence[bytes], ids: str = "orders/") -> tuple[pb.ReceivedBatch, Taken]:
    batch = pb.ReceivedBatch(source="east", client_name="orders")
    for number, some in enumerate(payloads, 1):
        batch.transactions.add(position=pb.Position(epoch=1, sequence=number), replication_id=f"{ids}{number}", payloads=some)
    return batch, Taken(batch.transactions)


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ([made_of([b"x"])] * (ROWS_MAX + 1), [ROWS_MAX, 1]),
        ([made_of([b""] * (ROWS_MAX + 2))], [ROWS_MAX // 2 + 1] * 2),
        ([made_of([b"x" * (BYTES_MAX // 2)])] * 3, [1, 1, 1]),
        ([made_of([b"x" * (BYTES_MAX // 8)])] * 9, [7, 2]),
        ([made_of(*[[b"x" * BYTES_MAX]] * 3)], [1, 1, 1]),
        ([made_of([b"x" * (3 * BYTES_MAX)])], [1]),
    ],
)
def test_batches_are_full_and_bounded(given: list[tuple[pb.ReceivedBatch, Taken]], rows: list[int]) -> None:
    made = pack(given)
    assert [batch.num_rows for batch in made] == rows
    assert [row for batch in made for row in batch.to_pylist()] == [row for one in given for row in one_by_one(*one)]


def test_a_column_that_is_not_wanted_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_BUILD", {"payload": columns._BUILD["payload"]})
    some = parse_options({"nodes": "amqp://reader:x@192.0.2.1", "subscribe": QUEUE, "columns": "payload"})
    rows = Rows(QUEUE, arrow_schema(some))
    assert not list(rows.add(*made_of([b"a", b"b"], [])))
    assert [batch.to_pylist() for batch in rows.flush()] == [[{"payload": b"a"}, {"payload": b"b"}, {"payload": None}]]
