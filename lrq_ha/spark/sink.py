"""The sink of format `lrq`: each partition is published by a producer of its own, whose numbers say which version and piece a message is.

Rules:

- A piece's number is version << 20 | chunk. The version of a stream's batch is the batch's number, that of a batch write is option `version`. A
  repeated task, batch or write sends its pieces under their numbers again, and those that the log has are confirmed only.
- The producers are ascending: the numbers between two versions cost nothing. A version lower than the last one in the log is refused.
- A piece that is refused ends the task, and no piece behind it is in the log, so that its repeat is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from lrq_ha.errors import LrqError
from lrq_ha.publisher.errors import FencedError, NackedError
from lrq_ha.publisher.numbered import Message, NumberedProducer
from lrq_ha.publisher.sync import Publisher
from lrq_ha.spark.errors import LowerVersion, RowError, WriteError
from lrq_ha.spark.sink_options import WriteOptions
from lrq_ha.spark.sink_rows import CHUNK_BITS, Piece, in_order, number_of, pieces

NO_PRIMARY_S = 120.0  # after which a task fails, and Spark tries it again
QUERY_CHARACTERS = 8
BASE_SUFFIX = ".base"  # of the publisher whose connection tells the group of the client


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """The result of a task.

    Attributes:
        rows, pieces: The numbers of rows, and of transactions or messages.
    """

    rows: int
    pieces: int


class LrqWriter(DataSourceArrowWriter):
    """Writes the partitions of a batch write."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publishes the rows of one partition; returns when the group has confirmed all.

        Raises:
            LowerVersion, RowError, WriteError: The partition is not written, or not to its end.
        """
        partition = _task().partitionId()
        return _write(iterator, self._options, f"{self._options.producer}.{partition}", self._options.version)


class LrqStreamWriter(DataSourceStreamArrowWriter):
    """Writes the partitions of the micro-batches of a query."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publishes the rows of one partition of one batch; returns when the group has confirmed all.

        Raises:
            LowerVersion, RowError, WriteError: The partition is not written, or not to its end.
        """
        task = _task()
        batch, query = task.getLocalProperty("streaming.sql.batchId"), task.getLocalProperty("sql.streaming.queryId")
        if batch is None or query is None:
            raise WriteError("Spark does not tell the task its batch and query", todo="Use PySpark 4.2 or newer")
        producer = f"{self._options.producer}.{query[:QUERY_CHARACTERS]}.{task.partitionId()}"
        return _write(iterator, self._options, producer, int(batch))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing is left to do: the rows are visible as soon as they are published."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing is taken back: the repeated batch sends the rows under their numbers again."""


def _task() -> TaskContext:
    task = TaskContext.get()
    if task is None:
        raise WriteError("There is no Spark task to write a partition for")
    return task


def _write(batches: Iterator[pa.RecordBatch], options: WriteOptions, name: str, version: int) -> Written:
    first = next(batches, None)
    if first is None:
        return Written(0, 0)
    rows = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for batch in chain((first,), batches):
            rows += batch.num_rows
            yield batch

    try:
        with Publisher(
            options.access.full_addresses(),
            name + BASE_SUFFIX,
            options.client_name,
            vhost=options.vhost,
            connect_timeout_s=NO_PRIMARY_S,
            publish_timeout_s=NO_PRIMARY_S,
            tls=options.access.tls_context(),
        ) as publisher:
            producer = publisher.open_producer(
                name, number_of(version + 1, 0) - 1, log_entries=bool(options.client_name), ascending=True
            )
            sent = _send_pieces(producer, pieces(in_order(counted(), options.order), options), version)
            publisher.flush(NO_PRIMARY_S)
    except FencedError as error:
        last = error.known >> CHUNK_BITS
        raise LowerVersion(
            f"Version {version} of producer '{name}' is lower than {last}, which the log has",
            todo="Give the write a version above that; a stream whose checkpoint was restored from an older copy needs another producer",
        ) from error
    except RowError:
        raise
    except NackedError as error:
        raise WriteError(f"Version {version} of producer '{name}': {error.what}", todo=error.todo or _remedy(options)) from error
    except LrqError as error:
        raise WriteError(f"Version {version} of producer '{name}': {error.what}", todo=error.todo, retriable=error.retriable) from error
    return Written(rows, sent)


def _send_pieces(producer: NumberedProducer, found: Iterator[Piece], version: int) -> int:
    chunk = 0
    for chunk, piece in enumerate(found, 1):
        number = number_of(version, chunk)
        if isinstance(piece, Message):
            producer.publish(number, piece)
        else:
            producer.transmit(number, piece)
    return chunk


def _remedy(options: WriteOptions) -> str:
    if options.client_name:
        return "Name sites that the group knows ([[sites]] of its nodes)"
    return "Declare the exchange, and a queue that is bound to it"
