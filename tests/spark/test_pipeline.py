"""The pipeline on real Spark, without a broker: random histories of many queues at once, each against the model; faults between its steps."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pipeline_model import DELTA, END, PART, SCHEMA, Model, Rows, Transaction, cut, random_history
from pyspark.sql import DataFrame, SparkSession

from lrq_ha.spark import tables_at
from lrq_ha.spark.pipeline import apply, store
from lrq_ha.spark.pipeline.apply import Settings, TableWriter
from lrq_ha.spark.pipeline.errors import BadRecord, NoVersion, PathTaken, SchemaChanged, SnapshotGone
from lrq_ha.spark.pipeline.spec import Table

TABLES = tuple(Table(name, {"k": "string", "v": "int"}, ("k",), 2) for name in "tu")
Batch = dict[str, list[Transaction]]


def frame(spark: SparkSession, batch: Batch) -> DataFrame:
    return spark.createDataFrame([entry for queue, found in batch.items() for one in found for entry in one.entries(queue)], SCHEMA)


def rows_at(spark: SparkSession, path: Path, version: int | None = None) -> dict[str, Rows]:
    """Queue -> its tables, without the quarantine."""
    found: dict[str, Rows] = {}
    for name, table in tables_at(spark, path, version).items():
        if name == apply.QUARANTINE:
            continue
        for row in table.collect():
            rows = found.setdefault(row.queue, {}).setdefault(name, {})
            assert row.k not in rows
            rows[row.k] = row.v
    return found


def delta(sequence: int, *payloads: tuple[str, str, Sequence[tuple[str, int]]]) -> Transaction:
    return Transaction(DELTA, 257, sequence, tuple((table, op, tuple(rows)) for table, op, rows in payloads))


WITH_SNAPSHOT = Settings()


def follow(
    spark: SparkSession, path: Path, seed: int, *, queues: int, batches: int, check: Callable[[int], bool], settings: Settings = WITH_SNAPSHOT
) -> None:
    random = Random(seed)
    names = [f"LRQ_Recv_c{number}_east" for number in range(queues)]
    pieces = {name: cut(random, random_history(random, 5 * batches), batches) for name in names}
    models = {name: Model() for name in names}
    writer = TableWriter(path, TABLES, settings)
    for number in range(batches):
        batch = {name: pieces[name][number] for name in names if pieces[name][number]}
        entries = [entry for queue, found in batch.items() for one in found for entry in one.entries(queue)]
        random.shuffle(entries)
        applied = writer.apply_batch(spark.createDataFrame(entries, SCHEMA))
        fresh = [(models[name], one) for name, found in batch.items() for one in found if one.position > models[name].position]
        for model, one in fresh:
            model.apply(one)
        assert (applied is not None) == bool(fresh)
        if random.random() < 0.3:
            assert writer.apply_batch(spark.createDataFrame(entries, SCHEMA)) is None
        if random.random() < 0.3:
            writer = TableWriter(path, TABLES, settings)
        if check(number):
            assert rows_at(spark, path) == {name: model.tables for name, model in models.items() if model.tables}


def test_tables_equal_those_of_single_transactions(spark: SparkSession, tmp_path: Path) -> None:
    follow(spark, tmp_path, 1, queues=60, batches=2, check=lambda number: number == 1)


@pytest.mark.parametrize("seed", range(2, 8))
def test_tables_equal_those_of_single_transactions_after_every_version(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    follow(spark, tmp_path, seed, queues=40, batches=10, check=lambda number: True)


def puts(sequence: int, **values: int) -> Transaction:
    """Rows put into t, and equal ones into u."""
    return delta(sequence, *((table, "put", list(values.items())) for table in "tu"))


def both(**values: int) -> dict[str, Rows]:
    return {"q": {"t": dict(values), "u": dict(values)}}


NO_SNAPSHOT = Settings(need_snapshot=False)
STEPS = ("flush_files", "create_version", "write_current", "link_view", "swap_current")


def test_a_fault_at_each_step_of_a_commit(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fault(Exception): ...

    def broken(step: Callable[..., None], after: bool, *arguments: object) -> None:
        if after:
            step(*arguments)
        raise Fault

    TableWriter(tmp_path, TABLES, NO_SNAPSHOT).apply_batch(frame(spark, {"q": [puts(1, a=1, b=1)]}))
    expected = {"a": 1, "b": 1}
    for number, (step, after) in enumerate(((step, after) for step in STEPS for after in (False, True)), 2):
        batch = frame(spark, {"q": [puts(number, **{f"k{number}": number}, a=number)]})
        writer = TableWriter(tmp_path, TABLES, NO_SNAPSHOT)
        with monkeypatch.context() as patch:
            patch.setattr(store, step, partial(broken, getattr(store, step), after))
            with pytest.raises(Fault):
                writer.apply_batch(batch)
        is_made = (STEPS.index(step), after) >= (STEPS.index("create_version"), True)
        new = expected | {"a": number, f"k{number}": number}
        assert rows_at(spark, tmp_path) == both(**(new if is_made else expected)), step
        again = TableWriter(tmp_path, TABLES, NO_SNAPSHOT)
        assert (tmp_path / "current").resolve().name == str(again.manifest.version)
        assert (again.apply_batch(batch) is None) == is_made
        assert rows_at(spark, tmp_path) == both(**new)
        assert store.read_version(tmp_path).version == number
        assert {path.parent.name for path in tmp_path.glob("current/*/*.parquet")} == {"t", "u"}
        expected = new


def test_a_table_is_rebuilt(spark: SparkSession, tmp_path: Path) -> None:
    """From what the queues hold, whatever is on disk: one table changes, in one version, and the queues go on where they were."""
    random, models = Random(3), {}
    histories = {f"LRQ_Recv_c{number}_east": random_history(random, 25) for number in range(20)}
    kept = Settings(on_bad_record="quarantine")
    bad = ("q", PART, 257, 2, 0, b"{", "r", False)
    begins, ends = ([Transaction(kind, 257, at, (), "r")] for kind, at in ((PART, 1), (END, 3)))
    held = frame(spark, {**histories, "q": [*begins, *ends]}).union(spark.createDataFrame([bad], SCHEMA))
    for name, history in histories.items():
        models[name] = Model()
        for one in history:
            models[name].apply(one)
    expected = {name: model.tables for name, model in models.items() if model.tables}
    writer = TableWriter(tmp_path, TABLES, kept)
    writer.apply_batch(held)
    before = writer.manifest
    damaged = replace(before, version=2, tables={**before.tables, "t": replace(before.tables["t"], files=())})
    store.commit_version(tmp_path, damaged, [])
    writer = TableWriter(tmp_path, TABLES, kept)
    assert writer.rebuild_table("t", held, dry_run=True).puts
    assert store.list_versions(tmp_path) == [1, 2]
    rebuilt = writer.rebuild_table("t", held)
    assert (rebuilt.tables, rebuilt.lag_s) == (("t",), None)
    assert rows_at(spark, tmp_path) == expected
    now = store.read_version(tmp_path)
    assert (now.version, now.queues, now.quarantine) == (3, before.queues, before.quarantine)
    assert now.tables["u"] == before.tables["u"]
    assert writer.apply_batch(held) is None
    without = held.where("sequence > 1 OR queue != 'q'")
    with pytest.raises(SnapshotGone, match="Queue q no longer holds the whole full snapshot"):
        writer.rebuild_table("t", without)
    assert store.read_version(tmp_path) == now


def test_of_two_writers_the_second_stops(spark: SparkSession, tmp_path: Path) -> None:
    first, second = (TableWriter(tmp_path, TABLES, NO_SNAPSHOT) for _ in range(2))
    first.apply_batch(frame(spark, {"q": [puts(1, a=1)]}))
    with pytest.raises(PathTaken, match=r"has a version 1 that another job wrote: host .*, pid \d+"):
        second.apply_batch(frame(spark, {"q": [puts(1, a=2)]}))
    assert rows_at(spark, tmp_path) == both(a=1)
    with pytest.raises(SchemaChanged, match="begun with need_snapshot = false"):
        TableWriter(tmp_path, TABLES)
    with pytest.raises(SchemaChanged, match="holds the table u, which is not defined"):
        TableWriter(tmp_path, TABLES[:1], NO_SNAPSHOT)


def test_a_reader_sees_whole_transactions_only(spark: SparkSession, tmp_path: Path) -> None:
    stopped, seen, failed = threading.Event(), set(), []

    def read() -> None:
        while not stopped.is_set():
            try:
                found = rows_at(spark, tmp_path)["q"]
                assert found["t"] == found["u"]
                seen.add(len(found["t"]))
            except NoVersion:
                continue
            except BaseException as error:
                failed.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    writer = TableWriter(tmp_path, TABLES, NO_SNAPSHOT)
    for number in range(1, 13):
        writer.apply_batch(frame(spark, {"q": [puts(number, **{f"k{number}": number}, a=number)]}))
        store.remove_versions(tmp_path, 2, after_s=60)
    stopped.set()
    reader.join()
    assert not failed
    assert len(seen) > 1


def test_only_touched_buckets_are_rewritten(spark: SparkSession, tmp_path: Path) -> None:
    table = Table("t", {"k": "string", "v": "int"}, ("k",), 16)
    writer = TableWriter(tmp_path, [table], NO_SNAPSHOT)
    writer.apply_batch(frame(spark, {"q": [delta(1, ("t", "put", [(f"k{number}", number) for number in range(200)]))]}))
    before = writer.manifest.tables["t"].files
    writer.apply_batch(frame(spark, {"q": [delta(2, ("t", "put", [("k7", 0)])), delta(3, ("t", "delete", [("k7", 0)]))]}))
    after = writer.manifest.tables["t"].files
    assert len(before) == len(after) == 16
    assert len(set(before) - set(after)) == 1
    assert sum(file.rows for file in after) == 199
    parts = [Transaction(PART, 257, 3, (), "r"), Transaction(PART, 257, 4, (("t", "put", (("k8", 1),)),), "r")]
    writer.apply_batch(frame(spark, {"q": parts}))  # a snapshot that has not ended touches nothing
    assert writer.manifest.tables["t"].files == after


def test_rows_are_equal_whether_or_not_changed_keys_are_broadcast(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "BROADCAST_MAX", 0)
    follow(spark, tmp_path, 9, queues=20, batches=3, check=lambda number: number == 2)


def test_bad_records(spark: SparkSession, tmp_path: Path) -> None:
    bad = [b"{", b'{"table": "w", "rows": []}', b'{"table": "t", "rows": [{"k": "x", "v": "one"}, {"k": "good", "v": 1}, {"v": 2}, null]}', b""]
    payloads = [*bad, b'{"table": "t", "rows": [{"k": "a", "v": 1}]}']
    entries = [("q", DELTA, 257, 5, index, payload, None, False) for index, payload in enumerate(payloads)]
    batch = spark.createDataFrame(entries, SCHEMA)
    with pytest.raises(BadRecord, match=r"not JSON of the form .* \(queue q, epoch 257, sequence 5, index 0, row 0\); 6 in this batch"):
        TableWriter(tmp_path, TABLES, NO_SNAPSHOT).apply_batch(batch)
    assert not store.list_versions(tmp_path)
    kept = Settings(need_snapshot=False, on_bad_record="quarantine")
    applied = TableWriter(tmp_path, TABLES, kept).apply_batch(batch)
    assert applied is not None
    assert (applied.bad, applied.puts) == (6, 2)
    assert rows_at_table(spark, tmp_path, "t") == {"good": 1, "a": 1}
    found = {(row["index"], row.number): (row.error, bytes(row.payload)) for row in tables_at(spark, tmp_path)["_quarantine"].collect()}
    assert set(found) == {(0, None), (1, None), (2, 0), (2, 2), (2, 3), (3, None)}
    assert found[1, None] == ("it names the unknown table w", bad[1])
    assert found[2, 2] == ("a row of table t lacks its key column k", bad[2])
    assert found[2, 3] == ("a row is null", bad[2])
    skipped = Settings(need_snapshot=False, skip_unknown=True)
    only_unknown = spark.createDataFrame([("q", DELTA, 257, 6, 0, bad[1], None, False)], SCHEMA)
    assert TableWriter(tmp_path, TABLES, skipped).apply_batch(only_unknown) is not None


def rows_at_table(spark: SparkSession, path: Path, name: str) -> dict[str, Any]:
    return {row.k: row.v for row in tables_at(spark, path)[name].collect()}


def rows(sequence: int, *found: dict[str, Any]) -> tuple[Any, ...]:
    return ("q", DELTA, 257, sequence, 0, json.dumps({"table": "t", "rows": found}).encode(), None, False)


def test_definitions_that_grow(spark: SparkSession, tmp_path: Path) -> None:
    def apply(columns: dict[str, str], entry: tuple[Any, ...], **more: Any) -> None:
        table = Table("t", columns, ("k",), 2, **more)
        TableWriter(tmp_path, [table], NO_SNAPSHOT).apply_batch(spark.createDataFrame([entry], SCHEMA))

    apply({"k": "int", "v": "int", "f": "float"}, rows(1, {"k": 1, "v": 1, "f": 0.5}, {"k": 2, "v": 2}))
    apply({"k": "bigint", "v": "bigint", "f": "double", "n": "string"}, rows(2, {"k": 2, "v": 2**40, "n": "new"}, {"k": 3}))
    added = {"k": 4, "unknown": None, "count": 1, "share": 0.5, "is_new": True, "more": {"a": [1]}, "no'\"ne": "x"}
    apply({"k": "bigint", "v": "bigint", "f": "double"}, rows(3, added, {"k": 1, "share": 2}), on_new_column="add")
    stored = tables_at(spark, tmp_path)["t"].collect()
    found = {row.k: row.asDict() for row in stored}
    assert len(found) == len(stored)  # a key that became wider is in the bucket that it was in
    nothing = {"queue": "q", "v": None, "f": None, "n": None, "count": None, "share": None, "is_new": None, "more": None, "no'\"ne": None}
    assert found == {
        1: nothing | {"k": 1, "share": 2.0},
        2: nothing | {"k": 2, "v": 2**40, "n": "new"},
        3: nothing | {"k": 3},
        4: nothing | {name: value for name, value in added.items() if name != "unknown"} | {"more": '{"a":[1]}'},
    }
    with pytest.raises(BadRecord, match="has no columns for the fields of a row: other"):
        apply(dict(store.read_version(tmp_path).tables["t"].columns), rows(4, {"k": 1, "other": 1}), on_new_column="fail")
