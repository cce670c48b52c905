"""The options and columns of a write, as one checked value.

Rules: a write goes either to sites (option clientName) or to exchanges of a vhost; a column or option of the other kind is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StringType, StructType

from lrq_ha.errors import LrqError
from lrq_ha.publisher.messages import checked_client_name, checked_destinations, checked_producer, checked_short_string
from lrq_ha.spark.access import ALLOWED as ACCESS_ALLOWED
from lrq_ha.spark.access import Access, parse_access, words
from lrq_ha.spark.errors import OptionError
from lrq_ha.spark.options import known_options, parse_number

VERSION_MAX = (1 << 43) - 1  # a number in an ID has 63 bits, 20 of which count the pieces
ALLOWED = {
    **ACCESS_ALLOWED,
    "producer": "the name of this job as a producer, 1 to 40 characters of A-Z a-z 0-9 _ . - beginning with a letter or digit",
    "clientName": "to sites: the name of the log replication client",
    "destinations": "to sites: remote_ids, comma separated, of rows without a column destinations",
    "exchange": "to queues: the exchange of rows without a column exchange; without both, the default exchange",
    "routingKey": "to queues: the routing key of rows without a column routingKey; through the default exchange the name of a queue",
    "vhost": "to queues: the virtual host, / by default",
    "version": f"a whole number from 1 to {VERSION_MAX} of a batch write, larger than that of each earlier one; by default the time in ms since 1970",
    "rowsPerTransaction": "to sites: a whole number >= 1, 1000 by default",
    "order": 'columns by which each partition is sorted, comma separated; by default all; "none": as the rows come',
}
COUNTERPARTS = {"kafka.bootstrap.servers": "nodes", "topic": "routingKey"}
PRODUCER_CHARACTERS_MAX = 40  # the names of queries and partitions are added
ROWS_PER_TRANSACTION = 1_000

_TEXT = (StringType, BinaryType)
TO_SITES: Mapping[str, tuple[str, tuple[type[DataType], ...]]] = {
    "payload": ("binary or string", _TEXT),
    "destinations": ("array<string>", (ArrayType,)),
    "transaction": ("any type", (DataType,)),
}
TO_QUEUES: Mapping[str, tuple[str, tuple[type[DataType], ...]]] = {
    "payload": ("binary or string", _TEXT),
    "exchange": ("string", (StringType,)),
    "routingKey": ("string", (StringType,)),
    "headers": ("map<string,string>", (MapType,)),
    "contentType": ("string", (StringType,)),
}
_OF_SITES = ("clientName", "destinations", "rowsPerTransaction")
_OF_QUEUES = ("exchange", "routingKey", "vhost")
_OF_BATCHES = ("version",)


@dataclass(frozen=True)
class WriteOptions:
    """Where rows go, and how.

    Attributes:
        access: The way to the group's doors.
        producer: The job's name, the first part of the names of its producers.
        client_name: Of the log replication client; empty: the rows go to exchanges.
        destinations: The sites of rows without a column `destinations`.
        exchange, routing_key: Of rows without columns of these names.
        vhost: Where the exchanges are.
        version: The number of a batch write; 0 for a stream, whose batches have numbers of their own.
        rows_per_transaction: Rows of a transaction at most.
        order: Columns to sort a partition by; empty: not sorted.
    """

    access: Access
    producer: str
    client_name: str
    destinations: tuple[str, ...]
    exchange: str
    routing_key: str
    vhost: str
    version: int
    rows_per_transaction: int
    order: tuple[str, ...]


def parse_write_options(given: Mapping[str, str], schema: StructType, *, streaming: bool) -> WriteOptions:
    """Checks the options and the columns of a write.

    Args:
        given: The user's options. Spark's own ones, path and checkpointLocation, are passed over.
        schema: Of the rows.

    Raises:
        OptionError: An option or a column is unknown, missing, or not of an allowed kind.
    """
    own = {name: value for name, value in given.items() if name.lower() not in ("path", "checkpointlocation")}
    values = known_options(own, ALLOWED, COUNTERPARTS)
    text = values.get
    to_sites = "clientName" in values
    for name in (*(_OF_QUEUES if to_sites else _OF_SITES), *(_OF_BATCHES if streaming else ())):
        if name in values:
            kind = "to queues, and clientName is for writes to sites" if to_sites else "to sites, which need clientName"
            why = "batch writes: a stream numbers its own batches" if name in _OF_BATCHES else f"writes {kind}"
            raise OptionError(f"Option {name} is for {why}", todo=f"Leave it out, or: {ALLOWED[name]}")
    vhost = text("vhost", "/")
    columns = TO_SITES if to_sites else TO_QUEUES
    _check_columns(schema, columns, "to sites" if to_sites else "to queues")
    producer = text("producer", "")
    _check("producer", partial(checked_producer, producer), len(producer) <= PRODUCER_CHARACTERS_MAX)
    destinations = words(text("destinations"))
    needed = "destinations" if to_sites else "routingKey"
    if needed not in values and needed not in schema.names:
        raise OptionError(f"Neither option nor column {needed} says where the rows go", todo=f"{needed}: {ALLOWED[needed]}")
    if destinations:
        _check("destinations", partial(checked_destinations, destinations))
    if to_sites:
        _check("clientName", partial(checked_client_name, values["clientName"]))
    for name in ("exchange", "routingKey"):
        _check(name, partial(checked_short_string, name, text(name, "")))
    version = parse_number(ALLOWED, "version", text("version"), len(str(VERSION_MAX)))
    if version is not None and version > VERSION_MAX:
        raise OptionError(f"version = {version} is not allowed", todo=f"Allowed: {ALLOWED['version']}")
    return WriteOptions(
        access=parse_access(values, vhost),
        producer=producer,
        client_name=text("clientName", ""),
        destinations=destinations,
        exchange=text("exchange", ""),
        routing_key=text("routingKey", ""),
        vhost=vhost,
        version=0 if streaming else version or time.time_ns() // 1_000_000,
        rows_per_transaction=parse_number(ALLOWED, "rowsPerTransaction", text("rowsPerTransaction")) or ROWS_PER_TRANSACTION,
        order=_order(text("order"), schema),
    )


def _check_columns(schema: StructType, columns: Mapping[str, tuple[str, tuple[type[DataType], ...]]], where: str) -> None:
    listed = "Allowed: " + ", ".join(f"{name} ({kind})" for name, (kind, _) in columns.items())
    for field in schema.fields:
        if field.name not in columns or not isinstance(field.dataType, columns[field.name][1]) or _holds_no_text(field.dataType):
            what = f"Column {field.name} ({field.dataType.simpleString()}) is not taken by a write {where}"
            raise OptionError(what, todo=f"{listed}. Drop the others with select(…); a payload of several columns: to_json(struct(…))")
    if "payload" not in schema.names:
        raise OptionError(f"A write {where} needs a column payload", todo=listed)


def _holds_no_text(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        return not isinstance(kind.elementType, StringType)
    return isinstance(kind, MapType) and not (isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType))


def _order(value: str | None, schema: StructType) -> tuple[str, ...]:
    if value is None:
        return tuple(schema.names)
    if value.strip().lower() == "none":
        return ()
    order = words(value)
    if not order or not set(order) <= set(schema.names):
        raise OptionError(f"order = {value!r} names other columns than {', '.join(schema.names)}", todo=f"Allowed: {ALLOWED['order']}")
    return order


def _check(name: str, check: Callable[[], object], valid: bool = True) -> None:
    try:
        if valid:
            check()
            return
        fault = f"{name} is too long"
    except LrqError as error:
        fault = error.what
    raise OptionError(f"Option {name}: {fault}", todo=f"Allowed: {ALLOWED[name]}")
