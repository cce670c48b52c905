"""The pipeline as a program that names each step of a micro-batch before it takes it, and goes on when it is answered.

Arguments: path of a configuration, port on loopback to which steps are told. `STEPS` has the names. A step is told from the process that takes it:
the driver, the process in which Spark runs the source's planning, or a worker of an executor.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from lrq_ha.spark.pipeline import apply, run, store
from lrq_ha.spark.pipeline.config import read_config
from lrq_ha.spark.source import LrqDataSource
from lrq_ha.spark.stream_reader import LrqStreamReader

Offset = dict[str, dict[str, int]]

#: Where a function of the pipeline is a step: its module, and its name there.
_FUNCTIONS = (
    (apply, "decode_changes"),
    (apply, "summarize_changes"),
    (store, "commit_version"),
    (store, "create_version"),
    (store, "write_current"),
    (store, "link_view"),
    (store, "swap_current"),
    (store, "write_status"),
)
#: The steps of a micro-batch, in their order.
STEPS = ("latestOffset", "partitions", "read", "read on", *(name for _, name in _FUNCTIONS), "commit")


def tell(port: int, step: str) -> None:
    """Names a step, and waits for the answer; without anyone to answer, it goes on."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(step.encode())
        connection.recv(1)


def make_source(port: int) -> type[LrqDataSource]:
    """Format lrq, with steps."""

    class SteppedReader(LrqStreamReader):
        def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
            tell(port, "latestOffset")
            return super().latestOffset(start, limit)

        def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
            tell(port, "partitions")
            return super().partitions(start, end)

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            if partition.value is None:
                return
            tell(port, "read")
            for batch in super().read(partition):
                yield batch
                tell(port, "read on")

        def commit(self, end: Offset) -> None:
            tell(port, "commit")

    class SteppedSource(LrqDataSource):
        def streamReader(self, schema: StructType) -> DataSourceStreamReader:
            made = super().streamReader(schema)
            return SteppedReader(made._options, made._refused)  # type: ignore[attr-defined]

    return SteppedSource


def make_step(port: int, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def step(*arguments: Any, **named: Any) -> Any:
        tell(port, name)
        return function(*arguments, **named)

    return step


def main(config_path: str, port: int) -> None:
    for module, name in _FUNCTIONS:
        setattr(module, name, make_step(port, name, getattr(module, name)))
    config = read_config(Path(config_path))
    with run.open_session(config) as spark:
        spark.dataSource.register(make_source(port))
        run.Job(spark, config, lambda line: print(line, flush=True)).run(interval_s=0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
