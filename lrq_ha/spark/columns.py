"""The columns of format `lrq`, and their rows on the way into Arrow batches.

Rules:

- A row is a payload. A transaction without payloads is one row with a null payload.
- Values go into a batch column by column, without a Python object per row where Arrow has the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, BooleanType, DataType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.routing.chain import TIMESTAMP_US_MAX
from lrq_ha.spark.options import ReadOptions
from lrq_ha.spark.ranges import Taken

ROWS_MAX = 10_000  # per Arrow batch
PAYLOAD_BYTES_MAX = 16 << 20  # per Arrow batch, give or take one payload

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
    """Transactions of one queue on their way into one Arrow batch.

    Args:
        queue: Name of the queue.
        columns: The schema of the batches.

    Attributes:
        count: Rows that wait.
    """

    def __init__(self, queue: str, columns: pa.Schema) -> None:
        self._queue = queue
        self._schema = columns
        self._clear()

    def _clear(self) -> None:
        self._origins: list[tuple[str, str, int]] = []  # source, client_name, rows
        self._transactions: list[pb.ReceivedTransaction] = []
        self._restarts: set[int] = set()  # their places among the transactions
        self._counts: list[int] = []  # rows per transaction
        self._bytes = self.count = 0

    def add(self, batch: pb.ReceivedBatch, taken: Taken) -> Iterator[pa.RecordBatch]:
        """Adds the transactions that were taken of `batch`. Returns the batches that were full without it."""
        transactions = list(taken.transactions)
        counts = [len(transaction.payloads) or 1 for transaction in transactions]
        rows, size = sum(counts), batch.ByteSize()
        if self.count + rows > ROWS_MAX or self._bytes + size > PAYLOAD_BYTES_MAX:
            yield from self.flush()
        if taken.restart:
            self._restarts.add(len(self._transactions))
        self._transactions += transactions
        self._counts += counts
        self._origins.append((batch.source, batch.client_name, rows))
        self._bytes += size
        self.count += rows

    def flush(self) -> Iterator[pa.RecordBatch]:
        """What waits, in batches of bounded size."""
        if not self.count:
            return
        whole = pa.RecordBatch.from_arrays([_BUILD[field.name](self).cast(field.type) for field in self._schema], schema=self._schema)
        bounds = self._bounds()
        self._clear()
        yield from (whole.slice(start, end - start) for start, end in pairwise(bounds))

    def _bounds(self) -> list[int]:
        """The rows at which batches begin, and the number of rows. Only one message that is larger than a batch is cut."""
        if self.count <= ROWS_MAX and self._bytes <= PAYLOAD_BYTES_MAX:
            return [0, self.count]
        bounds, rows, size = [0], 0, 0
        for number, payload in enumerate(payload for one in self._transactions for payload in one.payloads or (b"",)):
            if rows >= ROWS_MAX or size >= PAYLOAD_BYTES_MAX:
                bounds.append(number)
                rows = size = 0
            rows += 1
            size += len(payload)
        return [*bounds, self.count]

    def _payload(self) -> pa.Array:
        if len(self._transactions) == self.count:
            return pa.array([payloads[0] if (payloads := one.payloads) else None for one in self._transactions], pa.binary())
        return pa.array([payload for one in self._transactions for payload in one.payloads or (None,)], pa.binary())

    def _repeated(self, values: pa.Array) -> pa.Array:
        """A value per transaction -> a value per row."""
        if len(self._transactions) == self.count:
            return values
        places = [place for place, count in enumerate(self._counts) for _ in range(count)]
        return values.take(pa.array(places, pa.int32()))

    def _named(self) -> pa.Array:
        return pa.array([transaction.replication_id or None for transaction in self._transactions], pa.string())

    def _index(self) -> pa.Array:
        if len(self._transactions) == self.count:
            return pa.repeat(pa.scalar(0, pa.int32()), self.count)
        return pa.array([number for count in self._counts for number in range(count)], pa.int32())

    def _replication_id(self) -> pa.Array:
        return pc.binary_join_element_wise(self._repeated(self._named()), self._index().cast(pa.string()), ".")

    def _origin(self, part: int) -> pa.Array:
        values = {origin[part] for origin in self._origins}
        if len(values) == 1:
            return pa.repeat(pa.scalar(values.pop(), pa.string()), self.count)
        return pa.array([origin[part] for origin in self._origins for _ in range(origin[2])], pa.string())

    def _type(self) -> pa.Array:
        kinds = [transaction.type for transaction in self._transactions]
        if len(set(kinds)) == 1:
            return pa.repeat(pa.scalar(_TYPE_NAMES.get(kinds[0], str(kinds[0])), pa.string()), self.count)
        return self._repeated(pa.array([_TYPE_NAMES.get(kind, str(kind)) for kind in kinds], pa.string()))

    def _timestamp(self) -> pa.Array:
        times = [transaction.timestamp_us for transaction in self._transactions]
        return self._repeated(pa.array([time if 0 < time <= TIMESTAMP_US_MAX else None for time in times], pa.int64()))

    def _restart(self) -> pa.Array:
        return self._repeated(pa.array([number in self._restarts for number in range(len(self._transactions))], pa.bool_()))


_BUILD: dict[str, Callable[[Rows], pa.Array]] = {
    "queue": lambda rows: pa.repeat(pa.scalar(rows._queue, pa.string()), rows.count),
    "source": lambda rows: rows._origin(0),
    "client_name": lambda rows: rows._origin(1),
    "type": Rows._type,
    "epoch": lambda rows: rows._repeated(pa.array([one.position.epoch for one in rows._transactions], pa.int64())),
    "sequence": lambda rows: rows._repeated(pa.array([one.position.sequence for one in rows._transactions], pa.int64())),
    "transaction": lambda rows: rows._repeated(rows._named()),
    "index": Rows._index,
    "replication_id": Rows._replication_id,
    "timestamp": Rows._timestamp,
    "payload": Rows._payload,
    "request_id": lambda rows: rows._repeated(pa.array([one.request_id or None for one in rows._transactions], pa.string())),
    "restart": Rows._restart,
}

