"""The pipeline on real Spark, without a broker: random histories of many queues at once, each against the model; faults between its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from pipeline_model import DELTA, SCHEMA, Model, Rows, Transaction, cut, random_history
from pyspark.sql import DataFrame, SparkSession

from lrq_ha.spark import tables_at
from lrq_ha.spark.pipeline.apply import TableWriter
from lrq_ha.spark.pipeline.spec import Table

TABLES = tuple(Table(name, {"k": "string", "v": "int"}, ("k",), 2) for name in "tu")
Batch = dict[str, list[Transaction]]


def frame(spark: SparkSession, batch: Batch) -> DataFrame:
    return spark.createDataFrame([entry for queue, found in batch.items() for one in found for entry in one.entries(queue)], SCHEMA)


def rows_at(spark: SparkSession, path: Path, version: int | None = None) -> dict[str, Rows]:
    """Queue -> its tables."""
    found: dict[str, Rows] = {}
    for name, table in tables_at(spark, path, version).items():
        for row in table.collect():
            rows = found.setdefault(row.queue, {}).setdefault(name, {})
            assert row.k not in rows
            rows[row.k] = row.v
    return found


def delta(sequence: int, *payloads: tuple[str, str, Sequence[tuple[str, int]]]) -> Transaction:
    return Transaction(DELTA, 257, sequence, tuple((table, op, tuple(rows)) for table, op, rows in payloads))


def follow(spark: SparkSession, path: Path, seed: int, *, queues: int, batches: int, check: Callable[[int], bool]) -> None:
    random = Random(seed)
    names = [f"LRQ_Recv_c{number}_east" for number in range(queues)]
    pieces = {name: cut(random, random_history(random, 5 * batches), batches) for name in names}
    models = {name: Model() for name in names}
    writer = TableWriter(spark, path, TABLES)
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
            writer = TableWriter(spark, path, TABLES)
        if check(number):
            assert rows_at(spark, path) == {name: model.tables for name, model in models.items() if model.tables}


@pytest.mark.quick
def test_tables_equal_those_of_single_transactions(spark: SparkSession, tmp_path: Path) -> None:
    follow(spark, tmp_path, 1, queues=40, batches=3, check=lambda number: number > 0)


@pytest.mark.parametrize("seed", range(2, 8))
def test_tables_equal_those_of_single_transactions_after_every_version(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    follow(spark, tmp_path, seed, queues=40, batches=10, check=lambda number: True)
