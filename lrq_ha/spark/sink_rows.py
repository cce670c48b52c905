"""The rows of one partition, as the numbered pieces that the sink sends: transactions of log entries, or messages. Pure.

A partition that is repeated must come to equal pieces, in one order. Spark gives its rows in any order after a shuffle, so they are sorted first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import pika
import pyarrow as pa
import pyarrow.compute as pc

from lrq_ha.publisher.messages import MESSAGE_BYTES_MAX, LogEntries, checked_destinations
from lrq_ha.publisher.numbered import Message
from lrq_ha.routing.chain import TRANSMISSION_BYTES_MAX
from lrq_ha.spark.errors import RowError
from lrq_ha.spark.sink_options import WriteOptions

SORTED_BYTES_MAX = 256 << 20
TRANSACTION_BYTES_MAX = 1 << 20  # of payloads; a larger row is a transaction of its own
CHUNK_BITS = 20
CHUNKS_MAX = (1 << CHUNK_BITS) - 1

Piece = LogEntries | Message


def number_of(version: int, chunk: int) -> int:
    """The number of a piece: those of a later version are greater. `chunk` is from 1 to CHUNKS_MAX.

    Raises:
        RowError: There are too many pieces.
    """
    if chunk > CHUNKS_MAX:
        raise RowError(
            f"A partition comes to more than {CHUNKS_MAX} pieces", todo="Use more partitions (repartition), or a larger rowsPerTransaction"
        )
    return version << CHUNK_BITS | chunk


def in_order(batches: Iterable[pa.RecordBatch], order: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """The rows of a partition, sorted by these columns; with none, as they come.

    Raises:
        RowError: More than SORTED_BYTES_MAX would have to be kept.
    """
    if not order:
        yield from batches
        return
    kept: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        kept.append(batch)
        size += batch.nbytes
        if size > SORTED_BYTES_MAX:
            todo = 'Use more partitions (repartition), or set order = "none" if a repeated partition has its rows in one order in any case'
            raise RowError(f"A partition has more than {SORTED_BYTES_MAX >> 20} MiB, which are too many to sort", todo=todo)
    if kept:
        yield from _sorted(pa.Table.from_batches(kept), order).to_batches()


def _sorted(table: pa.Table, order: tuple[str, ...]) -> pa.Table:
    first = [name for name in ("transaction",) if name in table.column_names]  # rows of one transaction stand together
    keys = pa.table([_sortable(table[name]) for name in (*first, *order)], names=[str(n) for n in range(len(first) + len(order))])
    places = pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names])
    return table.take(places)


def _sortable(column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    if pa.types.is_nested(column.type):
        return pa.array([json.dumps(value, sort_keys=True, default=str) for value in column.to_pylist()], pa.string())
    return column


def pieces(batches: Iterable[pa.RecordBatch], options: WriteOptions) -> Iterator[Piece]:
    """What is sent, one after the other.

    Raises:
        RowError: A row cannot be sent.
    """
    yield from _transactions(batches, options) if options.client_name else _messages(batches, options)


def _transactions(batches: Iterable[pa.RecordBatch], options: WriteOptions) -> Iterator[LogEntries]:
    open_rows: list[tuple[bytes, tuple[str, ...]]] = []
    size, last = 0, None
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    for batch in batches:
        names = batch.schema.names
        lists = batch["destinations"].to_pylist() if "destinations" in names else None
        marks = batch["transaction"].to_pylist() if "transaction" in names else None
        for at, payload in enumerate(_payloads(batch, TRANSMISSION_BYTES_MAX)):
            if lists is None:
                destinations = options.destinations
            else:
                given = tuple(lists[at] or ())
                destinations = known.get(given) or known.setdefault(given, checked_destinations(given))
            if marks is not None:
                full, last = marks[at] != last, marks[at]
            else:
                full = len(open_rows) >= options.rows_per_transaction or size + len(payload) > TRANSACTION_BYTES_MAX
            if full and open_rows:
                yield LogEntries(tuple(open_rows))
                open_rows, size = [], 0
            open_rows.append((payload, destinations))
            size += len(payload)
    if open_rows:
        yield LogEntries(tuple(open_rows))


def _messages(batches: Iterable[pa.RecordBatch], options: WriteOptions) -> Iterator[Message]:
    for batch in batches:
        found = {name: batch[name].to_pylist() for name in batch.schema.names if name != "payload"}
        bare = not found.keys() & {"headers", "contentType"}
        for at, payload in enumerate(_payloads(batch, MESSAGE_BYTES_MAX)):
            properties = None
            if not bare:
                headers, kind = (found[name][at] if name in found else None for name in ("headers", "contentType"))
                properties = pika.BasicProperties(headers=dict(headers or ()), content_type=kind)
            exchange = _text(found["exchange"][at], "exchange") if "exchange" in found else options.exchange
            key = _text(found["routingKey"][at], "routingKey") if "routingKey" in found else options.routing_key
            yield Message(exchange, key, payload, properties)


def _text(value: str | None, column: str) -> str:
    if value is None:
        raise RowError(f"A row has null in column {column}", todo=f"Set it: coalesce({column}, lit(…))")
    return value


def _payloads(batch: pa.RecordBatch, bytes_max: int) -> Iterator[bytes]:
    column = batch["payload"]
    if not pa.types.is_binary(column.type) and not pa.types.is_large_binary(column.type):
        column = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
    for payload in column.to_pylist():
        if payload is None:
            raise RowError("A row has null in column payload", todo="Filter such rows out: where payload is not null")
        if len(payload) > bytes_max:
            raise RowError(f"A row has {len(payload)} bytes in column payload, of {bytes_max} at most", todo="Split it into several rows")
        yield payload
