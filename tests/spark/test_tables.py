"""Tables from snapshots and deltas: every rule at the top of lrq_ha/spark/tables.py, each in a queue of its own, all in one computation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from receive_queues import ReceiveQueue, transaction

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.spark.tables import TableSpec, build_tables, live_entries

SCHEMA = "queue STRING, type STRING, epoch BIGINT, sequence BIGINT, index INT, payload BINARY, request_id STRING, restart BOOLEAN"
SPECS = (TableSpec("t", "k STRING, v INT", ("k",)), TableSpec("u", "a INT, b INT, c STRING", ("a", "b")))

Entry = tuple[str, int, int, int, bytes | None, str | None, bool]


def content(table: str = "t", op: str | None = None, **values: int | None) -> bytes:
    """Rows of table t, by key."""
    made: dict[str, Any] = {"table": table, "rows": [{"k": key, "v": value} for key, value in values.items()]}
    return json.dumps(made | ({"op": op} if op else {})).encode()


def delta(sequence: int, *payloads: bytes, epoch: int = 257) -> list[Entry]:
    return [("LOG_ENTRY_SYNC", epoch, sequence, index, payload, None, False) for index, payload in enumerate(payloads)]


def start(sequence: int, request: str, *, restart: bool = False) -> list[Entry]:
    return [("SNAPSHOT_SYNC", 257, sequence, 0, None, request, restart)]


def part(sequence: int, request: str, *payloads: bytes) -> list[Entry]:
    return [("SNAPSHOT_SYNC", 257, sequence, index, payload, request, False) for index, payload in enumerate(payloads)]


def end(sequence: int, request: str, *payloads: bytes, restart: bool = False) -> list[Entry]:
    last: list[Entry] = [
        ("LAST_FULL_SYNC_ENTRY", 257, sequence, index, payload, request, restart)
        for index, payload in enumerate(payloads or (None,))
    ]
    return last


def first(sequence: int, request: str, **values: Any) -> list[Entry]:
    """A whole snapshot with which the chain begins."""
    return start(sequence, request, restart=True) + part(sequence + 1, request, content(**values)) + end(sequence + 2, request)


CASES: dict[str, tuple[list[Entry], dict[str, int | None]]] = {
    "a snapshot and deltas: the last write of a key wins": (
        first(1, "r", a=1, b=2, c=3) + delta(5, content(a=10)) + delta(6, content(a=11, d=4), content(d=5)) + delta(7, content(b=None)),
        {"a": 11, "b": None, "c": 3, "d": 5},
    ),
    "a deleted key is gone, and may come back": (
        first(1, "r", a=1, b=2) + delta(5, content(op="delete", a=0, b=0)) + delta(6, content(b=9)),
        {"b": 9},
    ),
    "order is by position, not by place in the frame": (
        delta(9, content(a=9)) + delta(7, content(a=7)) + first(1, "r", a=1) + delta(8, content(a=8)),
        {"a": 9},
    ),
    "an epoch goes before a sequence": (
        first(1, "r", a=1) + delta(9, content(a=9)) + delta(5, content(a=5), epoch=513),
        {"a": 5},
    ),
    "a newer snapshot replaces all before it, keys that it lacks included": (
        first(1, "r", a=1, b=2) + delta(5, content(c=3)) + start(6, "s") + part(7, "s", content(a=7)) + end(8, "s", content(d=8)),
        {"a": 7, "d": 8},
    ),
    "deltas that came during a snapshot are applied after it": (
        first(1, "r") + delta(4, content(a=4)) + start(5, "s") + delta(6, content(a=6, b=6)) + part(7, "s", content(a=7, c=7)) + end(9, "s"),
        {"a": 6, "b": 6, "c": 7},
    ),
    "a snapshot that has not ended changes nothing": (
        first(1, "r", a=1) + start(5, "s") + part(6, "s", content(a=6, b=6)) + delta(7, content(c=7)),
        {"a": 1, "c": 7},
    ),
    "a snapshot that ended after a newer one had begun does not count": (
        first(1, "r", a=1) + start(5, "s") + part(6, "s", content(a=6)) + start(7, "t") + end(8, "s") + part(9, "t", content(b=9)),
        {"a": 1},
    ),
    "late rows of an older snapshot are left out": (
        first(1, "r", a=1) + start(5, "s") + start(6, "t") + part(7, "s", content(x=1)) + part(8, "t", content(b=8)) + end(9, "t"),
        {"b": 8},
    ),
    "after a restart deltas wait for the snapshot": (
        first(1, "r", a=1) + delta(4, content(a=4)) + start(9, "s", restart=True) + delta(10, content(a=10)) + part(11, "s", content(b=1)),
        {"a": 4},
    ),
    "and are applied when it has ended": (
        first(1, "r", a=1) + start(9, "s", restart=True) + delta(10, content(a=10)) + part(11, "s", content(b=1)) + end(12, "s"),
        {"a": 10, "b": 1},
    ),
    "a restart that was given up is healed by a later snapshot": (
        first(1, "r", a=1) + start(9, "s", restart=True) + delta(10, content(a=10)) + start(11, "t") + end(12, "t", content(b=2))
        + delta(13, content(c=3)),
        {"b": 2, "c": 3},
    ),
    "an empty snapshot": (end(1, "r", restart=True) + delta(2, content(a=2)), {"a": 2}),
    "an empty snapshot later on": (first(1, "r", a=1) + end(7, "s", restart=True) + delta(8, content(b=8)), {"b": 8}),
    "a payload without rows": (first(1, "r", a=1) + delta(5, content()), {"a": 1}),
    "a trimmed snapshot does not count, a whole one after it does": (
        part(3, "r", content(x=1)) + end(4, "r") + delta(5, content(x=5)) + start(6, "s") + end(7, "s", content(a=7)),
        {"a": 7},
    ),
}  # fmt: skip


def frame(spark: SparkSession, entries: dict[str, list[Entry]]) -> DataFrame:
    return spark.createDataFrame([(queue, *entry) for queue, given in entries.items() for entry in given], SCHEMA)


@pytest.mark.quick
def test_every_rule(spark: SparkSession) -> None:
    tables = build_tables(frame(spark, {name: entries for name, (entries, _) in CASES.items()}), SPECS)
    assert tables["t"].columns == ["queue", "k", "v"]
    found: dict[str, dict[str, int | None]] = {name: {} for name in CASES}
    for row in tables["t"].collect():
        assert row.k not in found[row.queue]
        found[row.queue][row.k] = row.v
    assert found == {name: expected for name, (_, expected) in CASES.items()}
    assert tables["u"].collect() == []


def test_tables_with_a_key_of_two_columns(spark: SparkSession) -> None:
    rows = [{"a": 1, "b": 1, "c": "x"}, {"a": 1, "b": 2, "c": "y", "more": 0}, {"a": 1, "b": 1}]
    entries = first(1, "r", a=1) + delta(5, json.dumps({"table": "u", "rows": rows}).encode())
    tables = build_tables(frame(spark, {"q": entries}), SPECS)
    assert {tuple(row) for row in tables["u"].collect()} == {("q", 1, 1, None), ("q", 1, 2, "y")}
    assert [tuple(row) for row in tables["t"].collect()] == [("q", "a", 1)]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (delta(5, content(a=1)), "Queue q holds no completed full snapshot"),
        (part(3, "r", content(x=1)) + end(4, "r") + delta(5, content(a=5)), "Queue q holds no completed full snapshot"),
        (delta(2, content(a=2)) + part(3, "r", content(x=1)) + end(4, "r"), "Queue q holds no completed full snapshot"),
        (delta(2, content(a=2)) + end(4, "r"), "Queue q holds no completed full snapshot"),
        (end(4, "r") + delta(5, content(a=5)), "Queue q holds no completed full snapshot"),
        (first(1, "r", a=1) + delta(5, content("weather", a=1)), "a payload names an unknown table, at q 257 5"),
        (first(1, "r", a=1) + delta(5, content(op="upsert", a=1)), "op is neither put nor delete, at q 257 5"),
        (first(1, "r", a=1) + delta(5, b'{"table": "t"}'), "a payload has no rows, at q 257 5"),
        (first(1, "r", a=1) + delta(5, b'{"table": "t", "rows": [{"v": 1}]}'), "row of table t lacks its key column k, at q 257 5"),
        (first(1, "r", a=1) + delta(5, b'{"table": "t", "rows": [{"k": "a", "v": "one"}]}'), "MALFORMED|alformed"),
        (first(1, "r", a=1) + delta(5, b"\xffno json"), "MALFORMED|alformed"),
    ],
)
def test_what_is_refused(spark: SparkSession, entries: list[Entry], said: str) -> None:
    with pytest.raises(Exception, match=said):
        build_tables(frame(spark, {"q": entries}), SPECS)["t"].collect()


@pytest.mark.broker
def test_what_is_read_from_the_middle_of_a_snapshot_on(spark: SparkSession, nodes: str, receive_queue: Callable[..., ReceiveQueue]) -> None:
    queue = receive_queue()
    rows: dict[str, Any] = {"kind": pb.SNAPSHOT_SYNC, "request": "r"}
    written = (
        transaction(1, [], **rows),
        transaction(2, [content(a=1)], **rows),
        transaction(3, [content(c=3)]),
        transaction(4, [content(b=2)], **rows),
        transaction(5, [], kind=pb.LAST_FULL_SYNC_ENTRY, request="r"),
    )
    queue.write(*map(queue.batch, written))
    reader = spark.read.format("lrq").options(nodes=nodes, subscribe=queue.name, includeChain=True)
    tables = build_tables(reader.load(), SPECS)
    assert {row.k: row.v for row in tables["t"].collect()} == {"a": 1, "b": 2, "c": 3}
    for sequence in (2, 3):
        entries = reader.option("startingOffsets", json.dumps({queue.name: sequence})).load()
        with pytest.raises(Exception, match="holds no completed full snapshot"):
            build_tables(entries, SPECS)["t"].collect()


def test_a_queue_without_snapshot_if_that_is_wanted(spark: SparkSession) -> None:
    entries = delta(5, content(a=5)) + delta(6, content(a=6, b=6))
    found = build_tables(frame(spark, {"q": entries}), SPECS, need_snapshot=False)["t"].collect()
    assert {tuple(row) for row in found} == {("q", "a", 6), ("q", "b", 6)}


def test_another_form_of_payload(spark: SparkSession) -> None:
    def decode(payload: Any) -> Any:
        row = F.to_json(
            F.struct(
                F.split(payload.cast("string"), "=")[0].alias("k"), F.split(payload.cast("string"), "=")[1].cast("int").alias("v")
            )
        )
        return F.struct(F.lit("t").alias("table"), F.lit(None).cast("string").alias("op"), F.array(row).alias("rows"))

    entries = start(1, "r", restart=True) + part(2, "r", b"a=1", b"b=2") + end(3, "r") + delta(4, b"a=3")
    found = build_tables(frame(spark, {"q": entries}), SPECS, decode=decode)["t"].collect()
    assert {tuple(row) for row in found} == {("q", "a", 3), ("q", "b", 2)}


def test_entries_without_the_columns_of_the_chain(spark: SparkSession) -> None:
    with pytest.raises(ValueError, match=r"request_id.*includeChain = true"):
        live_entries(frame(spark, {}).drop("request_id"))
