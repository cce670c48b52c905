"""A batch of entries -> its changes, one per row of a payload, and their summary. Spark operations; the summary alone is collected.

A change is a row of the frame that `decode_changes` returns:

    queue, type, epoch, sequence, index     of the payload
    request       ID of the full sync that it is part of; null for deltas
    marker        whether it is a start marker of a full sync
    time_us       the publisher's clock, in microseconds since 1970; null if it is unknown
    restart       whether the chain starts over with its transaction
    number, row   which row of the payload it is, and the row as JSON in text; null for markers and truncations
    table, op     put, delete or truncate; null for markers, and for what is bad
    bucket        of the row's key; null if there is no row
    fields        fields of the row that are no columns, if the table asks for them
    values_N      the row as columns of table number N; for a delete, those of the key alone. Null for rows of other tables
    error         what is wrong with the payload or the row; null if nothing is
    payload       of what is bad; else null
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from lrq_ha.replication.positions import Position
from lrq_ha.spark.decode import CORRUPT, DELETE, PERMISSIVE, PUT, TRUNCATE, Decoder
from lrq_ha.spark.pipeline.manifest import Place
from lrq_ha.spark.pipeline.progress import Run, Summary, Truncation
from lrq_ha.spark.pipeline.spec import Table
from lrq_ha.spark.tables import COLUMNS_NEEDED, SNAPSHOT_TYPES

START, END = SNAPSHOT_TYPES


@dataclass(frozen=True)
class Touched:
    """What a batch changes in a table of a queue.

    Attributes:
        buckets: The buckets of the keys that deltas put or delete.
        puts: Rows put, those of snapshots included.
        deletes: Rows deleted.
    """

    buckets: frozenset[int]
    puts: int
    deletes: int


@dataclass(frozen=True)
class BadRecords:
    """How many rows or payloads of a batch are bad, and the first of them."""

    count: int
    first: str


@dataclass(frozen=True)
class Changes:
    """The summary of a batch.

    Attributes:
        queues: Queue -> what its state needs to know.
        touched: (queue, table) -> what changes.
        bad: None if all could be decoded.
        fields: Table -> fields that are no columns, where the table asks for them.
        newest_us: The latest time of a transaction, in microseconds since 1970; None if there is none.
    """

    queues: Mapping[str, Summary]
    touched: Mapping[tuple[str, str], Touched]
    bad: BadRecords | None
    fields: Mapping[str, frozenset[str]]
    newest_us: int | None

    @property
    def rows(self) -> int:
        """Rows put and deleted."""
        return sum(one.puts + one.deletes for one in self.touched.values())


def place_of(stage: Column | None = None) -> Column:
    """Where a change stands in its queue, as a struct that sorts like `Place` (without the row's number)."""
    is_delta = F.col("request").isNull().cast("int") if stage is None else stage
    return F.struct(is_delta.alias("stage"), F.col("epoch"), F.col("sequence"), F.col("index").alias("payload"))


def bucket_of(table: Table, keys: Column | None = None) -> Column:
    """The bucket of a key; wider types of its columns give the bucket that narrower ones gave."""
    columns = [(keys[name] if keys is not None else F.col(f"`{name}`")).cast("string") for name in table.key]
    return F.pmod(F.xxhash64(*columns), F.lit(table.buckets)).cast("int")


def decode_changes(entries: DataFrame, tables: Sequence[Table], decode: Decoder, *, skip_unknown: bool) -> DataFrame:
    """The changes of `entries`, as described at the top of this file.

    Args:
        entries: Read from format lrq with includeChain = true.
        tables: The tables that payloads may name.
        decode: The decoder of payloads.
        skip_unknown: Whether payloads for other tables are left out; else they are bad.

    Raises:
        ValueError: `entries` lacks columns.
    """
    missing = [name for name in COLUMNS_NEEDED if name not in entries.columns]
    if missing:
        raise ValueError(f"entries lack the columns {missing}: read them with option includeChain = true")
    is_part = F.col("type").isin(*SNAPSHOT_TYPES)
    places = ("queue", "type", "epoch", "sequence", "index", "request", "restart", "time_us")
    time_us = F.unix_micros("timestamp") if "timestamp" in entries.columns else F.lit(None).cast("bigint")
    content = decode(F.col("payload"))  # also of markers: within a condition, Spark would parse a payload once for each field that is used
    known = F.col("_content.table").isin([table.name for table in tables])
    unknown = F.concat(F.lit("it names the unknown table "), F.col("_content.table"))
    payload_error = F.when(F.col("payload").isNotNull(), F.coalesce("_content.error", F.when(~known & F.lit(not skip_unknown), unknown)))
    wanted = F.when(F.col("payload").isNotNull() & payload_error.isNull() & known, F.col("_content"))
    decoded = (
        entries.withColumn("request", F.when(is_part, F.coalesce("request_id", F.lit(""))))
        .withColumn("time_us", time_us)
        .select(*places, "payload", content.alias("_content"))
        .select(*places, "payload", payload_error.alias("_payload_error"), wanted.alias("_content"))
        # `_outer`, so that markers stay, and so that the optimizer does not repeat the decoding in filters that it moves down.
        .select(*places, "payload", "_payload_error", "_content.table", "_content.op", F.posexplode_outer("_content.rows").alias("number", "row"))
    )
    parsed = decoded.select("*", *(column for number, table in enumerate(tables) for column in _parsed(number, table)))
    checked = parsed.select("*", _checked(tables).alias("_checked"))
    error = F.coalesce(F.col("_payload_error"), F.when(F.col("number").isNotNull(), F.col("_checked.error")))
    good = F.col("error").isNull()
    return checked.select("*", error.alias("error"), "_checked.bucket", "_checked.fields").select(
        *places,
        ((F.col("type") == START) & F.col("payload").isNull()).alias("marker"),
        "number",
        *(F.when(good, F.col(name)).alias(name) for name in ("row", "table", "op", "bucket", "fields")),
        *(F.when(good, _values(number, table)).alias(f"values_{number}") for number, table in enumerate(tables)),
        "error",
        F.when(~good, F.col("payload")).alias("payload"),
    )


def _values(number: int, table: Table) -> Column:
    return values_of(table, F.col(f"_put_{number}"), F.col(f"_delete_{number}"))


def _parsed(number: int, table: Table) -> tuple[Column, Column]:
    """The row as its table has it: (put, delete). In columns of their own, so that each row is parsed once."""
    is_table = F.col("row").isNotNull() & (F.col("table") == table.name)
    is_delete = F.col("op") == DELETE
    whole = F.from_json("row", f"{table.schema}, {CORRUPT} STRING", PERMISSIVE)
    keys = F.from_json("row", f"{table.key_schema}, {CORRUPT} STRING", PERMISSIVE)
    return F.when(is_table & ~is_delete, whole).alias(f"_put_{number}"), F.when(is_table & is_delete, keys).alias(f"_delete_{number}")


def values_of(table: Table, put: Column, delete: Column) -> Column:
    """A row as a struct of its table's columns, from what was put or deleted; null if nothing was."""
    values = (F.coalesce(put[name], delete[name]) if name in table.key else put[name] for name in table.columns)
    is_row = put.isNotNull() | delete.isNotNull()
    return F.when(is_row, F.struct(*(value.alias(name) for value, name in zip(values, table.columns, strict=True))))


def _checked(tables: Sequence[Table]) -> Column:
    """struct<error, bucket, fields> of a row, by its table."""
    no_bucket = F.lit(None).cast("int").alias("bucket")
    checked = F.when(F.col("row").isNull(), F.struct(F.lit("a row is null").alias("error"), no_bucket, _no_fields()))
    for number, table in enumerate(tables):
        is_table = F.col("table") == table.name
        checked = checked.when(is_table & (F.col("op") == DELETE), _check_row(table, F.col(f"_delete_{number}"), _no_fields()))
        checked = checked.when(is_table, _check_row(table, F.col(f"_put_{number}"), _new_fields(table)))
    return checked


def _check_row(table: Table, values: Column, fields: Column) -> Column:
    error = F.when(values.isNull() | values[CORRUPT].isNotNull(), f"a row does not have the types of table {table.name}")
    for name in table.key:
        error = error.when(values[name].isNull(), f"a row of table {table.name} lacks its key column {name}")
    if table.on_new_column == "fail":
        lacking = F.concat(F.lit(f"table {table.name} has no columns for the fields of a row: "), F.concat_ws(", ", _unknown_fields(table)))
        error = error.when(F.size(_unknown_fields(table)) > 0, lacking)
    return F.struct(error.cast("string").alias("error"), bucket_of(table, values).alias("bucket"), fields)


def _unknown_fields(table: Table) -> Column:
    return F.array_except(F.json_object_keys("row"), F.array(*map(F.lit, table.columns)))


def _new_fields(table: Table) -> Column:
    if table.on_new_column != "add":
        return _no_fields()
    return F.when(F.size(_unknown_fields(table)) > 0, _unknown_fields(table)).alias("fields")


def _no_fields() -> Column:
    return F.lit(None).cast("array<string>").alias("fields")


def summarize_changes(changes: DataFrame) -> Changes:
    """The summary of a batch. Its size grows with queues, tables, buckets, full syncs and truncations, and not with rows.

    Args:
        changes: As `decode_changes` returns them; persisted, as they are used more than once.
    """
    position = F.struct("epoch", "sequence")
    # What holds for a payload is looked up in its first row: aggregates of structures are slow.
    runs = (
        changes.where(F.coalesce("number", F.lit(0)) == 0)
        .groupBy("queue", "request")
        .agg(
            F.min(F.struct("epoch", "sequence", "index", "restart")).alias("first"),
            F.max(position).alias("last"),
            F.min(F.when(F.col("marker"), position)).alias("marker"),
            F.min(F.when(F.col("type") == END, position)).alias("end"),
            F.max("time_us").alias("newest"),
            F.collect_list(F.when(F.col("op") == TRUNCATE, F.struct("table", place_of().alias("place")))).alias("truncations"),
        )
        .collect()
    )
    rows = (
        changes.where(F.col("op").isNotNull() | F.col("error").isNotNull())
        .groupBy("queue", F.col("request").isNull().alias("is_delta"), "table", "op", "bucket")
        .agg(F.count("row").alias("rows"), F.count("error").alias("bad"), F.count("fields").alias("fields"))
        .collect()
    )
    queues: dict[str, list[Row]] = defaultdict(list)
    for run in runs:
        queues[run.queue].append(run)
    newest = max((run.newest for run in runs if run.newest is not None), default=None)
    bad = _bad_records(changes, sum(group.bad for group in rows))
    fields = _new_columns(changes) if any(group.fields for group in rows) else {}
    return Changes({queue: _summary(found) for queue, found in queues.items()}, _touched(rows), bad, fields, newest)


def _summary(runs: Sequence[Row]) -> Summary:
    truncations = (Truncation(run.request or "", one.table, Place(*one.place)) for run in runs for one in run.truncations)
    last = _position(max(run["last"] for run in runs))
    return Summary(last, tuple(_run(run) for run in runs if run.request is not None), tuple(truncations))


def _run(found: Row) -> Run:
    first = found["first"]
    begin = Position(first.epoch, first.sequence)
    return Run(found.request, begin, bool(first.restart), found.marker and _position(found.marker), found.end and _position(found.end))


def _position(found: Row) -> Position:
    return Position(found.epoch, found.sequence)


def _touched(groups: Sequence[Row]) -> dict[tuple[str, str], Touched]:
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for group in groups:
        if group.table is not None:
            found[group.queue, group.table].append(group)
    return {
        place: Touched(
            frozenset(group.bucket for group in parts if group.is_delta and group.bucket is not None),
            sum(group.rows for group in parts if group.op == PUT),
            sum(group.rows for group in parts if group.op == DELETE),
        )
        for place, parts in found.items()
    }


def _bad_records(changes: DataFrame, count: int) -> BadRecords | None:
    if not count:
        return None
    place = ("epoch", "sequence", "index", F.coalesce("number", F.lit(0)).alias("number"), "queue", "error")
    (first,) = changes.where(F.col("error").isNotNull()).select(F.min(F.struct(*place)).alias("first")).collect()[0]
    where = f"queue {first.queue}, epoch {first.epoch}, sequence {first.sequence}, index {first['index']}, row {first.number}"
    return BadRecords(count, f"{first.error} ({where})")


def _new_columns(changes: DataFrame) -> dict[str, frozenset[str]]:
    """Table -> fields that are no columns."""
    found = changes.groupBy("table").agg(F.array_distinct(F.flatten(F.collect_set("fields"))).alias("fields")).collect()
    return {group.table: frozenset(group.fields) for group in found if group.fields}
