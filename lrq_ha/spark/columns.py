"""The columns of format `lrq`, and their rows on the way into Arrow batches.

Rules:

- A row is a payload. A transaction without payloads is one row with a null payload.
- No value becomes a Python object: `ptars` parses the bodies of messages into Arrow arrays, and Arrow's functions make the columns of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil

import pyarrow as pa
import pyarrow.compute as pc
from ptars import HandlerPool
from pyspark.sql.types import BinaryType, BooleanType, DataType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.routing.chain import TIMESTAMP_US_MAX
from lrq_ha.spark.options import ReadOptions
from lrq_ha.spark.ranges import Taken, count_rows

ROWS_MAX = 10_000  # per Arrow batch
BYTES_MAX = 4 << 20  # of the messages that are parsed at once, if they are several

_BATCHES = HandlerPool([pb.DESCRIPTOR]).get_for_message(pb.ReceivedBatch.DESCRIPTOR)
_TYPE_NAMES = {value.number: value.name for value in pb.ReplicationType.DESCRIPTOR.values}
#: Of each column, its type in Spark and in Arrow.
_KINDS: dict[str, tuple[DataType, pa.DataType]] = {
    "queue": (StringType(), pa.string()),
    "source": (StringType(), pa.string()),
    "client_name": (StringType(), pa.string()),
    "type": (StringType(), pa.string()),
    "epoch": (LongType(), pa.int64()),
    "sequence": (LongType(), pa.int64()),
    "transaction": (StringType(), pa.string()),
    "index": (IntegerType(), pa.int32()),
    "replication_id": (StringType(), pa.string()),
    "timestamp": (TimestampType(), pa.timestamp("us", tz="UTC")),
    "payload": (BinaryType(), pa.binary()),
    "request_id": (StringType(), pa.string()),
    "restart": (BooleanType(), pa.bool_()),
}


def spark_schema(options: ReadOptions) -> StructType:
    """The columns wanted, for Spark."""
    return StructType([StructField(name, _KINDS[name][0]) for name in options.wanted_columns])


def arrow_schema(options: ReadOptions) -> pa.Schema:
    """The columns wanted, for Arrow."""
    return pa.schema([(name, _KINDS[name][1]) for name in options.wanted_columns])


class Rows:
    """Transactions of one queue on their way into Arrow batches.

    Args:
        queue: Name of the queue.
        columns: The schema of the batches.
    """

    def __init__(self, queue: str, columns: pa.Schema) -> None:
        self._queue = queue
        self._schema = columns
        self._clear()

    def _clear(self) -> None:
        self._bodies: list[bytes] = []
        self._restarts: list[int] = []  # the bodies with whose first transaction the chain restarts
        self._rows = self._bytes = 0

    def add(self, batch: pb.ReceivedBatch, taken: Taken) -> Iterator[pa.RecordBatch]:
        """Adds the transactions that were taken of `batch`. Returns the batches that were full without it."""
        rows = count_rows(taken.transactions)
        if len(taken.transactions) < len(batch.transactions):
            batch = pb.ReceivedBatch(source=batch.source, client_name=batch.client_name, transactions=taken.transactions)
        body = batch.SerializeToString()
        if self._rows + rows > ROWS_MAX or self._bytes + len(body) > BYTES_MAX:
            yield from self.flush()
        if taken.restart:
            self._restarts.append(len(self._bodies))
        self._bodies.append(body)
        self._rows += rows
        self._bytes += len(body)

    def flush(self) -> Iterator[pa.RecordBatch]:
        """The rows that wait, in batches of bounded size: of one large message there are several."""
        if not self._bodies:
            return
        parsed = _Parsed(self._queue, self._bodies, self._restarts)
        batch = pa.RecordBatch.from_arrays([_BUILD[field.name](parsed).cast(field.type) for field in self._schema], schema=self._schema)
        length = ceil(parsed.rows / max(ceil(parsed.rows / ROWS_MAX), ceil(self._bytes / BYTES_MAX)))
        self._clear()
        yield from (batch.slice(start, length) for start in range(0, parsed.rows, length))


class _Parsed:
    """The bodies of messages as arrays, with one value for each transaction or for each row.

    Attributes:
        queue: Name of the queue.
        rows: Number of rows.
        payload: Of each row.
    """

    def __init__(self, queue: str, bodies: list[bytes], restarts: list[int]) -> None:
        self.queue = queue
        self._restarts = restarts
        self._messages = _BATCHES.list_to_record_batch(bodies)
        self._lists = self._messages["transactions"]
        self._transactions = self._lists.flatten()
        payloads = self._transactions.field("payloads").cast(pa.list_(pa.binary()))
        empty = pc.equal(payloads.value_lengths(), 0)
        if pc.any(empty).as_py():
            payloads = pc.if_else(empty, pa.scalar([None], payloads.type), payloads)
        self.payload = payloads.flatten()
        self.rows = len(self.payload)
        self._first_rows = payloads.offsets
        self._parents = payloads.value_parent_indices()  # the transaction of each row

    def _per_row(self, values: pa.Array) -> pa.Array:
        """A value per transaction -> a value per row."""
        return values if self.rows == len(values) else values.take(self._parents)

    def number(self, name: str) -> pa.Array:
        """The epoch or sequence of each row's transaction."""
        return self._per_row(self._transactions.field("position").field(name))

    def text(self, name: str) -> pa.Array:
        """A field of each row's transaction; an empty text is null."""
        return self._per_row(_null_where(pc.equal(self._transactions.field(name), ""), self._transactions.field(name)))

    def origin(self, name: str) -> pa.Array:
        """A field of each row's message."""
        values = self._messages[name]
        if len(values.unique()) == 1:
            return pa.repeat(values[0], self.rows)
        return self._per_row(values.take(self._lists.value_parent_indices()))

    def index(self) -> pa.Array:
        """The number of each row's payload in its transaction."""
        if self.rows == len(self._transactions):
            return pa.repeat(0, self.rows)
        return pc.subtract(_count_up(self.rows), self._first_rows.take(self._parents))

    def replication_id(self) -> pa.Array:
        """The transaction and the index."""
        return pc.binary_join_element_wise(self.text("replication_id"), self.index().cast(pa.string()), ".")

    def type(self) -> pa.Array:
        """The name of each row's type; its number, if a newer version wrote it."""
        kinds = self._transactions.field("type")
        known = kinds.unique()
        names = pa.array([_TYPE_NAMES.get(kind, str(kind)) for kind in known.to_pylist()], pa.string())
        return self._per_row(names.take(pc.index_in(kinds, known)))

    def timestamp(self) -> pa.Array:
        """In microseconds; null without one, or with one that no calendar has."""
        times = self._transactions.field("timestamp_us").view(pa.int64())  # those above 2 ** 63 become negative
        return self._per_row(_null_where(pc.or_(pc.less_equal(times, 0), pc.greater(times, TIMESTAMP_US_MAX)), times))

    def restart(self) -> pa.Array:
        """Whether the chain restarts with the row's transaction."""
        first = self._lists.offsets.take(pa.array(self._restarts, pa.int32()))
        return self._per_row(pc.is_in(_count_up(len(self._transactions)), first.cast(pa.int64())))


def _null_where(mask: pa.Array, values: pa.Array) -> pa.Array:
    return pc.if_else(mask, pa.scalar(None, values.type), values)


def _count_up(length: int) -> pa.Array:
    """0, 1, …"""
    return pc.subtract(pc.cumulative_sum(pa.repeat(1, length)), 1)


_BUILD: dict[str, Callable[[_Parsed], pa.Array]] = {
    "queue": lambda parsed: pa.repeat(parsed.queue, parsed.rows),
    "source": lambda parsed: parsed.origin("source"),
    "client_name": lambda parsed: parsed.origin("client_name"),
    "type": _Parsed.type,
    "epoch": lambda parsed: parsed.number("epoch"),
    "sequence": lambda parsed: parsed.number("sequence"),
    "transaction": lambda parsed: parsed.text("replication_id"),
    "index": _Parsed.index,
    "replication_id": _Parsed.replication_id,
    "timestamp": _Parsed.timestamp,
    "payload": lambda parsed: parsed.payload,
    "request_id": lambda parsed: parsed.text("request_id"),
    "restart": _Parsed.restart,
}
