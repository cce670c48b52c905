"""Delta tables beside the versions: what readers of Delta see, and what is there after a fault at each step of a commit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pipeline_model import SCHEMA, Rows
from pyspark.sql import SparkSession
from test_pipeline import NO_SNAPSHOT, TABLES, delta, follow, frame, puts, rows_at

pytest.importorskip("deltalake", reason="deltalake is not installed")

from deltalake import DeltaTable

from lrq_ha.spark import tables_at
from lrq_ha.spark.pipeline import delta as delta_tables
from lrq_ha.spark.pipeline import store
from lrq_ha.spark.pipeline.apply import Settings, TableWriter
from lrq_ha.spark.pipeline.errors import DeltaFailed, PathTaken, SchemaChanged
from lrq_ha.spark.pipeline.spec import Table

DELTA = replace(NO_SNAPSHOT, format="delta")


def log(path: Path, table: str, version: int | None = None) -> DeltaTable:
    return DeltaTable(path / "data" / table, version=version)


def delta_rows(path: Path, versions: dict[str, int] | None = None) -> dict[str, Rows]:
    """As `rows_at`, by a reader that knows Delta alone."""
    found: dict[str, Rows] = {}
    for name in (table.name for table in TABLES):
        for row in log(path, name, versions[name] if versions else None).to_pyarrow_table().to_pylist():
            rows = found.setdefault(row["queue"], {}).setdefault(name, {})
            assert row["k"] not in rows
            rows[row["k"]] = row["v"]
    return found


def together(path: Path, version: int) -> dict[str, int]:
    found: dict[str, int] = json.loads((path / "_versions" / f"{version}.delta.json").read_text())
    return found


def test_a_delta_table_holds_what_its_version_holds(spark: SparkSession, tmp_path: Path) -> None:
    writer = TableWriter(tmp_path, TABLES, DELTA)
    writer.apply_batch(frame(spark, {"q": [puts(1, a=1, b=1)], "p": [puts(1, a=2)]}))
    writer.apply_batch(frame(spark, {"q": [delta(2, ("t", "delete", [("a", 0)]), ("t", "put", [("c", 2)]))]}))
    expected = {"q": {"t": {"b": 1, "c": 2}, "u": {"a": 1, "b": 1}}, "p": {"t": {"a": 2}, "u": {"a": 2}}}
    assert delta_rows(tmp_path) == rows_at(spark, tmp_path) == expected
    pipeline = writer.manifest.pipeline
    assert [log(tmp_path, name).transaction_version(pipeline) for name in "tu"] == [2, 1]
    assert together(tmp_path, 1) == {"t": 1, "u": 1}
    assert together(tmp_path, 2) == {"t": 2, "u": 1}
    assert delta_rows(tmp_path, together(tmp_path, 1)) == rows_at(spark, tmp_path, 1)
    assert writer.apply_batch(frame(spark, {"q": [puts(1, a=1, b=1)]})) is None
    TableWriter(tmp_path, TABLES, DELTA)
    assert [log(tmp_path, name).version() for name in "tu"] == [2, 1]


@pytest.mark.full
@pytest.mark.parametrize("seed", [20])
def test_delta_tables_of_random_histories(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    def same(number: int) -> bool:
        assert delta_rows(tmp_path) == rows_at(spark, tmp_path)
        newest = store.read_version(tmp_path).version
        assert delta_rows(tmp_path, together(tmp_path, newest)) == rows_at(spark, tmp_path)
        return True

    follow(spark, tmp_path, seed, queues=12, batches=5, check=same, settings=Settings(format="delta"))


STEPS: tuple[tuple[object, str], ...] = (
    (store, "create_version"),
    (store, "show_version"),
    (delta_tables, "publish_version"),
    (DeltaTable, "create"),
    (delta_tables, "publish_table"),
    (DeltaTable, "create_write_transaction"),
    (store, "write_delta_versions"),
)
CALLS = dict.fromkeys(("create", "publish_table", "create_write_transaction"), (1, 2))


@pytest.mark.full
def test_a_fault_at_each_step_of_a_commit(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between the commits of the two tables: the step fails in its first or second call, before or after it did its work."""

    class Fault(Exception): ...

    def broken(step: Callable[..., Any], calls: list[int], after: bool, *arguments: Any, **more: Any) -> Any:
        calls[0] -= 1
        if calls[0]:
            return step(*arguments, **more)
        if after:
            step(*arguments, **more)
        raise Fault

    TableWriter(tmp_path, TABLES, DELTA).apply_batch(frame(spark, {"q": [puts(1, a=1, b=1)]}))
    expected = {"a": 1, "b": 1}
    faults = [(*step, call, after) for step in STEPS for call in CALLS.get(step[1], (1,)) for after in (False, True)]
    for made, (place, step, call, after) in enumerate(faults, 2):
        batch = frame(spark, {"q": [puts(made, **{f"k{made}": made}, a=made)]})
        writer = TableWriter(tmp_path, TABLES, DELTA)
        with monkeypatch.context() as patch:
            found = getattr(place, step)
            fault = partial(broken, found, [call], after)
            patch.setattr(place, step, _method(fault))
            with pytest.raises(Fault):
                writer.apply_batch(batch)
        is_made = (step, after) != ("create_version", False)
        again = TableWriter(tmp_path, TABLES, DELTA)
        new = expected | {"a": made, f"k{made}": made}
        assert delta_rows(tmp_path) == both(**(new if is_made else expected)), (step, call, after)
        assert (again.apply_batch(batch) is None) == is_made
        assert delta_rows(tmp_path) == both(**new)
        expected = new
        assert [log(tmp_path, name).version() for name in "tu"] == [made, made], (step, call, after)
        assert [log(tmp_path, name).transaction_version(again.manifest.pipeline) for name in "tu"] == [made, made]
        assert together(tmp_path, made) == {"t": made, "u": made}
    assert rows_at(spark, tmp_path) == both(**expected)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **more: function(*arguments, **more)


@pytest.mark.full
def test_a_delta_table_that_another_process_changes(spark: SparkSession, tmp_path: Path) -> None:
    """A compaction is undone by the next version; a job that has stood still for some versions changes nothing."""
    writer = TableWriter(tmp_path, TABLES, DELTA)
    old = writer.apply_batch(frame(spark, {"q": [puts(1, **{f"k{number}": number for number in range(20)})]}))
    assert old is not None
    late = TableWriter(tmp_path, TABLES, DELTA)
    log(tmp_path, "t").optimize.compact()
    writer.apply_batch(frame(spark, {"q": [puts(2, a=2)]}))
    assert delta_rows(tmp_path) == rows_at(spark, tmp_path)
    versions = together(tmp_path, 2)
    assert versions["t"] > versions["u"]
    delta_tables.publish_version(tmp_path, old.manifest)
    assert together(tmp_path, 1) == {"t": 1, "u": 1}
    assert delta_rows(tmp_path) == rows_at(spark, tmp_path)
    with pytest.raises(PathTaken):
        late.apply_batch(frame(spark, {"q": [puts(2, a=3)]}))
    assert delta_rows(tmp_path) == rows_at(spark, tmp_path)
    assert together(tmp_path, 2) == versions


@pytest.mark.full
def test_definitions_of_delta_tables(spark: SparkSession, tmp_path: Path) -> None:
    def apply(number: int, columns: dict[str, str], row: dict[str, Any], **more: Any) -> None:
        table = Table("tx", {"k": "int"} | columns, ("k",), 2, **more)
        payload = json.dumps({"table": "tx", "rows": [{"k": number} | row]}).encode()
        entries = spark.createDataFrame([("q", "LOG_ENTRY_SYNC", 257, number, 0, payload, None, False)], SCHEMA)
        TableWriter(tmp_path, [table], DELTA).apply_batch(entries)

    types = {"v": "int", "d": "date", "at": "timestamp", "local": "timestamp_ntz", "price": "decimal(10,2)", "many": "array<struct<n:int>>"}
    types |= dict.fromkeys(("op", "table", "row", "number", "index", "bucket"), "string")  # names that changes have, too
    values = {"v": 1, "d": "1600-02-03", "at": "9000-01-02T03:04:05Z", "local": "2026-01-02T03:04:05", "price": 1.25, "many": [{"n": 1}, {"n": None}]}
    values |= {"op": "x", "index": "y"}
    apply(1, types, values)
    apply(2, types | {"new": "string"}, {"new": "x"})
    apply(3, types, {"added": True}, on_new_column="add")
    found = log(tmp_path, "tx").to_pyarrow_table().sort_by("k")
    expected = tables_at(spark, tmp_path)["tx"].toArrow().sort_by("k")
    assert found.column_names == expected.column_names
    assert found.to_pylist() == expected.to_pylist()
    assert [row["many"] for row in found.to_pylist()] == [values["many"], None, None]
    for columns, row, said in (
        (types | {"v": "bigint"}, {}, "types of Delta tables do not become wider"),
        (types | {"a b": "int"}, {}, "has the column 'a b'"),
        (types | {"when": "interval day to second"}, {}, "has a type that Delta does not have"),
        (types, {"a b": 1}, "has the column 'a b'"),
    ):
        with pytest.raises(SchemaChanged, match=said):
            apply(4, columns, row, on_new_column="add")
    with pytest.raises(SchemaChanged, match="delta-rs reads no paths with %"):
        TableWriter(tmp_path / "another", [Table("t x", {"k": "int"}, ("k",))], DELTA)
    with pytest.raises(SchemaChanged, match="holds Delta tables, which would not be kept in step"):
        TableWriter(tmp_path, [Table("tx", {"k": "int"}, ("k",), 2, "add")], NO_SNAPSHOT)


@pytest.mark.full
def test_old_versions_of_delta_tables_are_removed(spark: SparkSession, tmp_path: Path) -> None:
    """The log stays whatever its age, a path that had Parquet alone becomes Delta, and a log that cannot be read is an error with what to do."""
    TableWriter(tmp_path, TABLES, NO_SNAPSHOT).apply_batch(frame(spark, {"q": [puts(1, a=1)]}))
    writer = TableWriter(tmp_path, TABLES, DELTA)
    assert delta_rows(tmp_path) == both(a=1)
    for number in range(2, 5):
        writer.apply_batch(frame(spark, {"q": [puts(number, a=number)]}))
    store.remove_versions(tmp_path, 1, after_s=0)
    assert sorted(path.name for path in (tmp_path / "_versions").iterdir()) == ["4.delta.json", "4.json"]
    assert delta_rows(tmp_path) == both(a=4)
    for entry in (tmp_path / "data" / "t" / "_delta_log").iterdir():
        entry.write_text("{")
    with pytest.raises(DeltaFailed, match=r"cannot follow version 5.*start the job again"):
        writer.apply_batch(frame(spark, {"q": [puts(5, a=5)]}))


def both(**values: int) -> dict[str, Rows]:
    return {"q": {"t": dict(values), "u": dict(values)}}
