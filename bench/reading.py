"""P7, P7K, P7S, P7M: what Spark's batch source costs beside a source of Arrow batches that are ready, and beside a bare consumer.

Rules: the queue is full before. Both sides take turns in one Spark of two cores, after each has run once; rows go nowhere (format noop). A ratio is
taken within a round, and the median of the rounds counts. CPU time is that of Spark and its Python workers, without the broker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from lrq_ha.lab import Lab
from lrq_ha.spark.columns import ROWS_MAX, arrow_schema, spark_schema
from lrq_ha.spark.options import parse_options
from lrq_ha.spark.session import session
from lrq_ha.spark.source import register

from .measure import Figure, Row, note
from .received import ReceiveQueue, spark_cpu_s, transaction, worker_peak

PARTITIONS = 2
LARGE_BYTES = (16 << 20) - 4_096  # RabbitMQ 4 takes messages of 16 MiB, and the payload is not all of one
_OPTIONS = parse_options({"nodes": "amqp://reader:x@127.0.0.1:1", "subscribe": "LRQ_Recv_bench_east"})


@dataclass(frozen=True)
class Plan:
    """How much is read: `rows` of each form, `rounds` times."""

    rows: int = 5_000_000
    large_rows: int = 1_000_000
    single_rows: int = 200_000
    rounds: int = 3


SHORT = Plan(rows=300_000, large_rows=60_000, single_rows=20_000, rounds=1)


class BareSource(DataSource):
    """Arrow batches with the columns of format lrq, made once. Options: rows, bytes."""

    @classmethod
    def name(cls) -> str:
        return "bare"

    def schema(self) -> StructType:
        return spark_schema(_OPTIONS)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _BareReader(int(self.options["rows"]), int(self.options["bytes"]))


class _BareReader(DataSourceReader):
    def __init__(self, rows: int, size: int) -> None:
        self._rows, self._size = rows, size

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(self._rows // PARTITIONS)] * PARTITIONS

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        schema = arrow_schema(_OPTIONS)
        values: dict[Any, Any] = {pa.string(): "LRQ_Recv_bench", pa.int64(): 257, pa.int32(): 0, pa.bool_(): False, pa.binary(): b"x" * self._size}
        batch = pa.RecordBatch.from_arrays([pa.repeat(pa.scalar(values.get(one.type, 0), one.type), ROWS_MAX) for one in schema], schema=schema)
        left = partition.value
        while left > 0:
            yield batch.slice(0, min(left, ROWS_MAX))
            left -= ROWS_MAX


def open_spark() -> SparkSession:
    """Spark whose workers find this module."""
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    spark = session()
    register(spark)
    spark.dataSource.register(BareSource)
    return spark


def p7(brokers: list[str], plan: Plan) -> Row:
    """100 B, 64 and 5,000 rows per message."""
    return _beside_bare("P7", brokers, plan, ((100, 64, plan.rows), (100, 5_000, plan.rows)), 1_000_000, 0.45)


def p7k(brokers: list[str], plan: Plan) -> Row:
    """1 KB, 64 and 1,000 rows per message."""
    return _beside_bare("P7K", brokers, plan, ((1_000, 64, plan.large_rows), (1_000, 1_000, plan.large_rows)), None, 0.5)


def p7s(brokers: list[str], plan: Plan) -> Row:
    """One row per message, beside pika's consumer."""
    figures: list[Figure] = []
    runs: list[dict[str, Any]] = []
    for broker in brokers:
        with Lab({"west": 1}, broker=broker, brokers_only=True) as lab, open_spark() as spark:
            queue = _filled(lab, "single", 100, 1, plan.single_rows)
            _read(spark, queue.options, plan.single_rows)
            for number in range(plan.rounds):
                began = time.monotonic()
                queue.consume(plan.single_rows)
                bare_s = time.monotonic() - began
                run = {"broker": broker, "bare_s": bare_s, "load": os.getloadavg(), **_read(spark, queue.options, plan.single_rows)}
                runs.append(run)
                note(f"P7S {number} {run}")
            ratio = median(run["bare_s"] / run["s"] for run in runs if run["broker"] == broker)
            figures.append(Figure("of_bare", ratio, 2, least=True, variant=broker))
    return Row("P7S", figures, f"{plan.single_rows:,} rows of 100 B, one a message", runs)


def p7m(brokers: list[str], plan: Plan) -> Row:
    """The peak memory of a Python worker."""
    figures: list[Figure] = []
    runs: list[dict[str, Any]] = []
    for broker in brokers:
        with Lab({"west": 1}, broker=broker, brokers_only=True) as lab, open_spark() as spark:
            few, many = plan.rows // 5, 2 * plan.rows
            forms = {"few": (100, 64, few), "many": (100, 64, many), "large": (LARGE_BYTES, 1, 20)}
            peaks = {}
            for name, (size, per_message, rows) in forms.items():
                queue = _filled(lab, name, size, per_message, rows)
                with worker_peak() as peak:
                    _read(spark, queue.options, rows)
                peaks[name] = peak[0]
            runs.append({"broker": broker, "load": os.getloadavg(), "peak_bytes": peaks})
            note(f"P7M {runs[-1]}")
            figures.append(Figure("growth", peaks["many"] / peaks["few"], 1.1, variant=broker))
            figures.append(Figure("large_mb", peaks["large"] / 1e6, 400, variant=broker, digits=0))
            figures.append(Figure("many_mb", peaks["many"] / 1e6, variant=broker, digits=0))
    return Row("P7M", figures, f"{few:,} and {many:,} rows of 100 B; 20 of 16 MiB", runs)


def _filled(lab: Lab, name: str, size: int, per_message: int, rows: int) -> ReceiveQueue:
    queue, payload = ReceiveQueue(lab, f"{name}{size}x{per_message}"), b"x" * size
    queue.fill([transaction(n, [payload]) for n in range(begin, min(begin + per_message, rows + 1))] for begin in range(1, rows + 1, per_message))
    return queue


def _read(spark: SparkSession, options: dict[str, str], rows: int, form: str = "lrq") -> dict[str, float]:
    entries = spark.read.format(form).options(**options).load()
    began, cpu_s = time.monotonic(), spark_cpu_s()
    entries.write.format("noop").mode("overwrite").save()
    return {"s": time.monotonic() - began, "cpu_us": 1e6 * (spark_cpu_s() - cpu_s) / rows}


def _beside_bare(
    name: str, brokers: list[str], plan: Plan, forms: tuple[tuple[int, int, int], ...], per_s: float | None, share: float
) -> Row:
    figures: list[Figure] = []
    runs: list[dict[str, Any]] = []
    for broker in brokers:
        with Lab({"west": 1}, broker=broker, brokers_only=True) as lab, open_spark() as spark:
            for size, per_message, rows in forms:
                queue = _filled(lab, "rows", size, per_message, rows)
                variant = f"{broker} {per_message}"
                those: list[dict[str, Any]] = []
                sides = {"lrq": queue.options | {"minPartitions": str(PARTITIONS)}, "bare": {"rows": str(rows), "bytes": str(size)}}
                for number in range(plan.rounds + 1):  # the first one warms up
                    order = ("lrq", "bare") if number % 2 else ("bare", "lrq")
                    found = {form: _read(spark, sides[form], rows, form) for form in order}
                    those.append({"broker": broker, "per_message": per_message, "load": os.getloadavg(), **found})
                    note(f"{name} {those[-1]}")
                those = those[1:]
                runs += those
                figures.append(Figure("rows_per_s", median(rows / run["lrq"]["s"] for run in those), per_s, least=True, variant=variant, digits=0))
                figures.append(Figure("of_bare", median(run["bare"]["s"] / run["lrq"]["s"] for run in those), share, least=True, variant=variant))
                figures.append(Figure("cpu_us", median(run["lrq"]["cpu_us"] for run in those), variant=variant))
                figures.append(Figure("bare_cpu_us", median(run["bare"]["cpu_us"] for run in those), variant=variant))
    return Row(name, figures, f"{forms[0][2]:,} rows of {forms[0][0]} B", runs)
