"""Rows as numbered pieces: what is repeated comes to equal pieces, and the options and columns that a write takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegerType, LongType, MapType, StringType, StructField, StructType

from lrq_ha.publisher.messages import LogEntries
from lrq_ha.publisher.numbered import Message
from lrq_ha.spark import sink_rows
from lrq_ha.spark.errors import OptionError, RowError
from lrq_ha.spark.sink_options import ALLOWED, VERSION_MAX, WriteOptions, parse_write_options
from lrq_ha.spark.sink_rows import CHUNKS_MAX, in_order, number_of, pieces

pytestmark = pytest.mark.quick

NODES = {"nodes": "amqp://app:secret@h:5672", "producer": "job"}
TO_SITES = NODES | {"clientName": "orders", "destinations": "west"}
TO_QUEUES = NODES | {"routingKey": "q"}
TYPES: dict[str, DataType] = {
    "binary": BinaryType(),
    "string": StringType(),
    "bigint": LongType(),
    "array<string>": ArrayType(StringType()),
    "array<int>": ArrayType(IntegerType()),
    "map<string,int>": MapType(StringType(), IntegerType()),
}
KINDS = {"payload": pa.binary(), "destinations": pa.list_(pa.string()), "transaction": pa.int64(), "headers": pa.map_(pa.string(), pa.string())}


def parsed(options: dict[str, str], schema: str = "payload binary", *, streaming: bool = False) -> WriteOptions:
    columns = [column.split(" ") for column in schema.split(", ")]
    return parse_write_options(options, StructType([StructField(name, TYPES[kind]) for name, kind in columns]), streaming=streaming)


def cut(table: pa.Table, seed: int) -> list[pa.RecordBatch]:
    """The rows in another order and in other batches."""
    r = random.Random(seed)
    order = list(range(table.num_rows))
    r.shuffle(order)
    batches: list[pa.RecordBatch] = table.take(pa.array(order, pa.int64())).combine_chunks().to_batches(max_chunksize=r.randint(1, 7))
    return batches


rows = st.lists(
    st.tuples(st.binary(max_size=3), st.lists(st.sampled_from(["west", "south"]), min_size=1, max_size=2, unique=True), st.integers(0, 3)),
    max_size=40,
)


@given(rows, st.sampled_from([("payload", "destinations"), ("payload", "destinations", "transaction")]))
@settings(max_examples=60, deadline=None)
def test_a_repeat_in_another_order_comes_to_equal_pieces(found: list[Any], columns: Sequence[str]) -> None:
    columns = list(columns)
    table = pa.table([pa.array([row[at] for row in found], KINDS[name]) for at, name in enumerate(columns)], names=columns)
    options = parsed(TO_SITES | {"rowsPerTransaction": "3"}, "payload binary, destinations array<string>, transaction bigint")
    options = WriteOptions(**{**vars(options), "order": tuple(columns)})
    once, again = (list(pieces(in_order(cut(table, seed), options.order), options)) for seed in (1, 2))
    assert once == again
    entries = [entry for piece in once if isinstance(piece, LogEntries) for entry in piece.entries]
    assert sorted(entries) == sorted((row[0], tuple(row[1])) for row in found)
    if "transaction" in columns:
        marks = sorted({row[2] for row in found})
        assert [sorted(p for p, _ in piece.entries) for piece in once if isinstance(piece, LogEntries)] == [
            sorted(row[0] for row in found if row[2] == mark) for mark in marks
        ]
    else:
        assert all(len(piece.entries) == 3 for piece in once[:-1] if isinstance(piece, LogEntries))


def test_a_transaction_ends_at_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_rows, "TRANSACTION_BYTES_MAX", 10)
    batch = pa.record_batch({"payload": pa.array([b"a" * 6, b"b" * 4, b"c", b"d" * 30, b"e"])})
    found = list(pieces([batch], parsed(TO_SITES)))
    assert [[len(p) for p, _ in piece.entries] for piece in found if isinstance(piece, LogEntries)] == [[6, 4], [1], [30], [1]]


def test_messages() -> None:
    batch = pa.record_batch({"payload": pa.array(["ä", "b"]), "routingKey": pa.array(["one", "two"]), "contentType": pa.array(["text/plain", None])})
    first, second = pieces([batch], parsed(NODES | {"exchange": "x"}, "payload string, routingKey string, contentType string"))
    assert isinstance(first, Message)
    assert (first.exchange, first.routing_key, first.body) == ("x", "one", "ä".encode())
    assert first.properties is not None
    assert first.properties.content_type == "text/plain"
    assert second == Message("x", "two", b"b", second.properties if isinstance(second, Message) else None)


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("payload", [b"x", None], "null in column payload"),
        ("routingKey", ["k", None], "null in column routingKey"),
        ("payload", [b"x" * 2_000, b""], "2000 bytes in column payload, of 1000 at most"),
    ],
)
def test_rows_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch, column: str, values: list[Any], said: str) -> None:
    monkeypatch.setattr(sink_rows, "MESSAGE_BYTES_MAX", 1_000)
    batch = pa.record_batch({"payload": pa.array([b"a", b"b"]), "routingKey": pa.array(["k", "k"])} | {column: pa.array(values)})
    with pytest.raises(RowError, match=said):
        list(pieces([batch], parsed(TO_QUEUES)))


def test_a_partition_that_is_too_large_to_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_rows, "SORTED_BYTES_MAX", 1_000)
    batches = [pa.record_batch({"payload": pa.array([b"x" * 300])})] * 4
    with pytest.raises(RowError, match='order = "none"'):
        list(in_order(iter(batches), ("payload",)))
    assert len(list(in_order(iter(batches), ()))) == 4


def test_numbers_ascend_from_one_version_to_the_next() -> None:
    numbers = [number_of(version, chunk) for version in (0, 1, 2, VERSION_MAX) for chunk in (1, 2, CHUNKS_MAX)]
    assert numbers == sorted(set(numbers))
    assert 1 <= numbers[0] <= numbers[-1] < 1 << 63
    with pytest.raises(RowError, match="more partitions"):
        number_of(1, CHUNKS_MAX + 1)


def test_options() -> None:
    options = parsed(TO_SITES | {"checkpointLocation": "/c", "path": "/p"}, streaming=True)
    assert (options.version, options.rows_per_transaction, options.order, options.destinations) == (0, 1_000, ("payload",), ("west",))
    assert parsed(TO_QUEUES | {"Version": "7", "order": "none"}).version == 7
    assert parsed(TO_QUEUES | {"order": "none"}).order == ()
    assert parsed(TO_QUEUES).version > 1_700_000_000_000
    assert all(ALLOWED.values())


@pytest.mark.parametrize(
    ("options", "schema", "said"),
    [
        ({"producer": "job", "routingKey": "q"}, "payload binary", "Option nodes is missing"),
        (TO_QUEUES | {"nodes": "amqp://h/other"}, "payload binary", "has another virtual host"),
        ({"nodes": "amqp://h", "routingKey": "q"}, "payload binary", "Option producer: "),
        (TO_QUEUES | {"producer": "x" * 41}, "payload binary", "producer is too long"),
        (TO_QUEUES | {"clientName": "c"}, "payload binary", "Option routingKey is for writes to queues"),
        (TO_QUEUES | {"destinations": "west"}, "payload binary", "Option destinations is for writes to sites"),
        (TO_SITES | {"destinations": "a/b"}, "payload binary", "Option destinations: "),
        (TO_SITES | {"clientName": "a b"}, "payload binary", "Option clientName: "),
        (TO_SITES | {"version": "0"}, "payload binary", "version = '0'"),
        (TO_SITES | {"version": str(VERSION_MAX + 1)}, "payload binary", "version = 8796093022208 is not"),
        (TO_SITES | {"version": "1" * 14}, "payload binary", "version = '1"),
        (TO_SITES | {"rowsPerTransaction": "no"}, "payload binary", "rowsPerTransaction = 'no'"),
        (TO_SITES | {"order": "other"}, "payload binary", "order = 'other' names other columns"),
        (TO_SITES | {"topic": "t"}, "payload binary", "The option for it is routingKey"),
        (NODES, "payload binary", "Neither option nor column routingKey"),
        (NODES | {"clientName": "c"}, "payload binary", "Neither option nor column destinations"),
        (TO_SITES, "value binary", "Column value .binary. is not taken"),
        (TO_SITES, "payload bigint", "Column payload .bigint. is not taken"),
        (TO_SITES, "payload binary, destinations array<int>", "Column destinations .array<int>. is not taken"),
        (TO_QUEUES, "payload binary, headers map<string,int>", "Column headers"),
        (TO_QUEUES, "routingKey string", "needs a column payload"),
    ],
)
def test_what_is_refused(options: dict[str, str], schema: str, said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        parsed(options, schema)
    assert "secret" not in str(caught.value)


def test_a_stream_has_versions_of_its_own() -> None:
    with pytest.raises(OptionError, match="Option version is for batch writes"):
        parsed(TO_SITES | {"version": "1"}, streaming=True)
