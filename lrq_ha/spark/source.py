"""Spark's data source `lrq`: options -> ranges (on the driver) -> Arrow record batches (in the workers).

Rules:

- Planning reads a handful of messages, never a queue; a partition is one immutable Range.
- Rows come in the order of the source, with exactly the announced schema.
- A lost connection, or a node that stands still, is not an error: planning begins again on the next node that takes it; in mid-range, the
  reader continues there behind the last position that it gave.
"""

from __future__ import annotations

import http.client
import json
import logging
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, BooleanType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from lrq_ha.direct_http import NOT_HTTP, http_open
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.routing.chain import TIMESTAMP_US_MAX
from lrq_ha.spark.errors import OptionError
from lrq_ha.spark.options import EARLIEST, LATEST, ReadOptions, Sequences, matching, parse_options
from lrq_ha.spark.ranges import Range, Selection, Taken, begin, extent, split
from lrq_ha.streams.errors import ConnectionLost, MissingQueue, NoNode, StreamSilent
from lrq_ha.streams.message import Hint, Message
from lrq_ha.streams.node_connection import CONNECT_TIMEOUT_S, NodeConnection

ROWS_MAX = 10_000  # per Arrow batch
PAYLOAD_BYTES_MAX = 16 << 20  # per Arrow batch, give or take one payload
RECONNECT_TIMEOUT_S = 60.0  # a failover must be over by then
RECONNECT_PAUSE_S = 0.5
CONNECTION_NAME = "lrq-ha spark reader"
HTTP_TIMEOUT_S = 5.0

_US = pa.timestamp("us", tz="UTC")
_COLUMNS: list[tuple[str, Any, pa.DataType]] = [
    ("queue", StringType(), pa.string()),
    ("source", StringType(), pa.string()),
    ("client_name", StringType(), pa.string()),
    ("type", StringType(), pa.string()),
    ("epoch", LongType(), pa.int64()),
    ("sequence", LongType(), pa.int64()),
    ("transaction", StringType(), pa.string()),
    ("index", IntegerType(), pa.int32()),
    ("replication_id", StringType(), pa.string()),
    ("timestamp", TimestampType(), _US),
    ("payload", BinaryType(), pa.binary()),
]
_CHAIN_COLUMNS: list[tuple[str, Any, pa.DataType]] = [
    ("request_id", StringType(), pa.string()),
    ("restart", BooleanType(), pa.bool_()),
]
_TYPE_NAMES = {value.number: value.name for value in pb.ReplicationType.DESCRIPTOR.values}

_log = logging.getLogger(__name__)


def register(spark: SparkSession) -> None:
    """Makes format `lrq` known to `spark`."""
    spark.dataSource.register(LrqDataSource)


class LrqDataSource(DataSource):
    """Receive queues as a table of entries, a row per payload. See docs/spark.md for options and columns."""

    @classmethod
    def name(cls) -> str:
        return "lrq"

    def schema(self) -> StructType:
        """The columns; raises OptionError for bad options."""
        return _schema(parse_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch reader. Raises OptionError for bad options or another schema than the source's own."""
        options = parse_options(self.options)
        if schema != _schema(options):
            raise OptionError("Format lrq has a schema of its own", todo="Leave out .schema(…)")
        return LrqReader(options)


class LrqReader(DataSourceReader):
    """Plans ranges once, on the driver, and reads one range in each partition."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """One InputPartition per Range; none if there is nothing to read (Spark then makes one with value None).

        Raises:
            NoNode, MissingQueue, DataLoss, OptionError: The range asked for cannot be read.
        """
        return [InputPartition(part) for part in plan(self._options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one range.

        Raises:
            DataLoss: A part of it is gone from the queue and `failOnDataLoss` is true.
            NoNode, StreamSilent: It could not be read to its end.
        """
        if partition.value is not None:
            yield from _batches(partition.value, self._options)


def plan(options: ReadOptions) -> list[Range]:
    """The ranges for `options`, as the queues stand now."""
    queues = options.subscribe or _discover(options)
    patience, timeout_s = _Patience(), CONNECT_TIMEOUT_S
    while True:
        try:
            with NodeConnection.open(options.addresses(), CONNECTION_NAME, timeout_s) as node:
                return _plan(node, queues, options)
        except (ConnectionLost, StreamSilent) as error:
            patience.bear(error, "planning again")
            timeout_s = RECONNECT_TIMEOUT_S
        except MissingQueue as error:
            if options.subscribe:
                raise
            # The queue is in the log already, as this node has listed it; its stream is made when that entry is safe and applied.
            patience.bear(error, "waiting for it, as a sidecar has listed it")


def _plan(node: NodeConnection, queues: Sequence[str], options: ReadOptions) -> list[Range]:
    for queue in queues:
        node.count(queue)  # a missing queue is reported before anything is read
    extents = [
        extent(
            node,
            queue,
            _bound(options.starting, queue, "startingOffsets", EARLIEST),
            _bound(options.ending, queue, "endingOffsets", LATEST),
            strict=options.fail_on_data_loss,
        )
        for queue in queues
    ]
    return split(node, [one for one in extents if one is not None], options.min_partitions)


def read_range(part: Range, options: ReadOptions) -> Iterator[tuple[Message, list[Taken]]]:
    """The messages of a range with its own transactions, from each node that takes us in turn."""
    patience = _Patience()
    while True:
        try:
            with (
                NodeConnection.open(options.addresses(), CONNECTION_NAME, RECONNECT_TIMEOUT_S) as node,
                closing(_read_from(node, part, options)) as steps,
            ):
                for message, taken, rest in steps:
                    if rest is not None and rest.after > part.after:  # else it is also the position at which the last node stopped
                        patience = _Patience()
                    yield message, taken
                    if rest is None:
                        return
                    part = rest
        except (ConnectionLost, StreamSilent) as error:
            patience.bear(error, f"going on behind {part.after} of {part.queue}")


class _Patience:
    """Limits the retries on lost nodes without progress."""

    def __init__(self) -> None:
        self._deadline: float | None = None

    def bear(self, error: ConnectionLost | StreamSilent | MissingQueue, then: str) -> None:
        """Returns after a pause. Raises `error` if no progress was made for too long."""
        now = time.monotonic()
        self._deadline = self._deadline or now + RECONNECT_TIMEOUT_S
        if now >= self._deadline:
            raise error
        _log.warning("%s; %s", error, then)
        time.sleep(RECONNECT_PAUSE_S)


def _read_from(
    node: NodeConnection, part: Range, options: ReadOptions
) -> Generator[tuple[Message, list[Taken], Range | None], None, None]:
    """As read_range, from one node; with each message the rest of the range, None at its end."""
    start, same_stream = begin(node, part)
    if start is None:
        raise StreamSilent(part.queue, 0, f"{part.through}: it is empty on {node.address}")
    selection = Selection(part, node, strict=options.fail_on_data_loss)
    with closing(node.read(part.queue, start.offset)) as messages:
        for message in messages:
            taken = selection.take(message, same_stream=same_stream)
            for hole in selection.holes:
                _log.warning("%s; failOnDataLoss is false", hole)
            selection.holes.clear()
            if selection.done(message.offset, same_stream=same_stream):
                yield message, taken, None
                return
            yield message, taken, replace(part, after=selection.greatest, start=Hint(message.offset, message.last))


def _batches(part: Range, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    schema = _arrow_schema(options)
    rows = _Rows(part.queue)
    for message, taken in read_range(part, options):
        for one in taken:
            for index, payload in enumerate(one.transaction.payloads or (None,)):
                rows.add(message.batch, one, index, payload)
                if rows.is_full:
                    yield rows.flush(schema)
    if rows.count:
        yield rows.flush(schema)


class _Rows:
    """Rows on their way into one Arrow batch, column by column."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._columns: list[list[Any]] = []
        self._payload_bytes = 0
        self.count = 0
        self._clear()

    def _clear(self) -> None:
        self._columns = [[] for _ in range(len(_COLUMNS) + len(_CHAIN_COLUMNS) - 1)]
        self._payload_bytes = self.count = 0

    @property
    def is_full(self) -> bool:
        return self.count >= ROWS_MAX or self._payload_bytes >= PAYLOAD_BYTES_MAX

    def add(self, batch: pb.ReceivedBatch, one: Taken, index: int, payload: bytes | None) -> None:
        """A marker of a full sync has no payload, and may have no replication ID."""
        transaction = one.transaction
        position = transaction.position
        name = transaction.replication_id
        row = (
            batch.source,
            batch.client_name,
            _TYPE_NAMES.get(transaction.type, str(transaction.type)),
            position.epoch,
            position.sequence,
            name or None,
            index,
            f"{name}.{index}" if name else None,
            transaction.timestamp_us if 0 < transaction.timestamp_us <= TIMESTAMP_US_MAX else None,
            payload,
            transaction.request_id or None,
            one.restart,
        )
        for column, value in zip(self._columns, row):
            column.append(value)
        self._payload_bytes += len(payload or b"")
        self.count += 1

    def flush(self, schema: pa.Schema) -> pa.RecordBatch:
        columns = [[self._queue] * self.count, *self._columns][: len(schema)]
        batch = pa.RecordBatch.from_arrays(
            [pa.array(values, field.type) for values, field in zip(columns, schema)], schema=schema
        )
        self._clear()
        return batch


def _columns(options: ReadOptions) -> list[tuple[str, Any, pa.DataType]]:
    return _COLUMNS + _CHAIN_COLUMNS if options.include_chain else _COLUMNS


def _schema(options: ReadOptions) -> StructType:
    return StructType([StructField(name, kind) for name, kind, _ in _columns(options)])


def _arrow_schema(options: ReadOptions) -> pa.Schema:
    return pa.schema([(name, kind) for name, _, kind in _columns(options)])


def _bound(sequences: Sequences, queue: str, option: str, unbounded: int) -> int | None:
    if sequences is None:
        return None
    if queue not in sequences:
        raise OptionError(f"{option} does not name queue {queue}", todo="Name every queue that is read")
    return None if sequences[queue] == unbounded else sequences[queue]


def _discover(options: ReadOptions) -> tuple[str, ...]:
    """The queues that match `subscribePattern`, from the first sidecar that answers. Raises NoNode."""
    answers: dict[str, str] = {}
    for address in options.http:
        try:
            with http_open(f"{address.rstrip('/')}/queues", timeout=HTTP_TIMEOUT_S) as response:
                names = json.load(response)
        except (OSError, ValueError) as error:
            answers[address] = str(error)
            continue
        except http.client.HTTPException:
            answers[address] = NOT_HTTP
            continue
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return matching(options.pattern or "", names)
        answers[address] = "the answer is no JSON list of names"
    raise NoNode(answers, retriable=True)
