"""Tables from received transactions: full snapshots, and deltas in order. Spark operations only; nothing is collected.

The rule for readers of a receive queue (see lrq_ha.routing), per queue:

    1. Rows of the newest *completed* snapshot, then every delta after that snapshot's base, in order; the last write of a key wins.
       The base is the snapshot's beginning: deltas that came while it was under way are applied after it, older ones are covered by it.
    2. A snapshot that ended after a newer one had begun does not count; a snapshot that never ended does not count either.
    3. At a restart of the chain there is a hole before it: deltas from there on wait for the next end marker.
    4. A snapshot without its beginning (a start marker, or a restart of the chain) does not count: it was trimmed, or is not
       part of the entries read, and rows may be missing with it.

Before the first completed snapshot there are no tables: reading one then is an error, unless `need_snapshot` is false.

The frame of entries is used several times: persist it, or fix its endingOffsets, so that all tables show one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

SNAPSHOT_TYPES = ("SNAPSHOT_SYNC", "LAST_FULL_SYNC_ENTRY")
COLUMNS_NEEDED = ("queue", "type", "epoch", "sequence", "index", "payload", "request_id", "restart")

PUT = "put"
DELETE = "delete"

Decode = Callable[[Column], Column]
"""Payload (binary column) -> struct<table: string, op: string, rows: array<string>>, a row being a JSON object in text; `op` null: put."""


@dataclass(frozen=True)
class TableSpec:
    """A table to build.

    Attributes:
        name: As payloads call it.
        schema: Columns as DDL ("id BIGINT, carrier STRING, …"); other fields of a row are left out.
        key: Columns that name a row; none of them may be null. A row put under a key replaces the whole row.
    """

    name: str
    schema: str
    key: tuple[str, ...]


def decode_json(payload: Column) -> Column:
    """Payloads of the form {"table": "flights", "op": "put", "rows": [{…}, …]}; `op` may be left out, "delete" needs keys only."""
    return F.from_json(payload.cast("string"), "table STRING, op STRING, rows ARRAY<STRING>", {"mode": "FAILFAST"})


def live_entries(entries: DataFrame, *, need_snapshot: bool = True) -> DataFrame:
    """The entries that make up the tables: rows of the snapshot that counts, and the deltas after it.

    Args:
        entries: Read from format lrq with option includeChain = true.
        need_snapshot: Whether a queue without a completed snapshot is an error (when the result is computed); if not,
            it has its deltas, except those that wait for a snapshot that restarts the chain.

    Returns:
        The columns of `entries`, and `write`: a struct that sorts them in the order in which they are applied within a queue.
    """
    missing = [name for name in COLUMNS_NEEDED if name not in entries.columns]
    if missing:
        raise ValueError(f"entries lack the columns {missing}: read them with option includeChain = true")
    moments = _moments(entries, need_snapshot)
    position = F.struct("epoch", "sequence")
    is_part = F.col("type").isin(*SNAPSHOT_TYPES)
    of_snapshot = is_part & (F.col("request_id") == F.col("_request")) & (position <= F.col("_end"))
    delta = (
        ~is_part
        & (F.col("_base").isNull() | (position > F.col("_base")))
        & (F.col("_hole").isNull() | (position < F.col("_hole")))
    )
    return (
        entries.join(F.broadcast(moments), "queue")
        .where(F.col("payload").isNotNull() & (of_snapshot | delta))
        .withColumn("write", F.struct((~is_part).alias("delta"), "epoch", "sequence", "index"))
        .drop("_request", "_base", "_end", "_hole")
    )


def build_tables(
    entries: DataFrame, specs: Sequence[TableSpec], *, decode: Decode = decode_json, need_snapshot: bool = True
) -> Mapping[str, DataFrame]:
    """Table name -> its rows as they stand after the last entry: column `queue`, then the columns of its schema.

    Each queue has its own tables, whatever their names: rows from two sites do not replace each other.
    A payload that cannot be decoded or names no known table or operation, or a row without its key, is an error when a table is computed.
    The decoded rows are persisted, until `spark.catalog.clearCache()` or the session's end.

    Args:
        entries: Read from format lrq with option includeChain = true; persisted, or with fixed endingOffsets.
        specs: Every table that payloads may name.
        decode: Decodes payloads.
        need_snapshot: As in `live_entries`.
    """
    names = [spec.name for spec in specs]
    op = F.coalesce(F.col("_content.op"), F.lit(PUT))
    named = _require(F.col("_content.table").isin(names), F.col("_content.table"), "a payload names an unknown table")
    known = _require(op.isin(PUT, DELETE), op, f"a payload's op is neither {PUT} nor {DELETE}")
    rows = _require(F.col("_content.rows").isNotNull(), F.col("_content.rows"), "a payload has no rows")
    # Kept, and exploded with empty lists (`_outer`): else the optimizer would repeat the decoding in every filter that it moves down.
    writes = (
        live_entries(entries, need_snapshot=need_snapshot)
        .select("queue", "write", decode(F.col("payload")).alias("_content"))
        .select("queue", "write", named.alias("_table"), known.alias("_op"), F.posexplode_outer(rows).alias("_number", "_row"))
        .persist(StorageLevel.MEMORY_AND_DISK)
    )
    return {spec.name: _last_writes(writes, spec) for spec in specs}


def _moments(entries: DataFrame, need_snapshot: bool) -> DataFrame:
    """One row per queue: `_request`, `_base` and `_end` of the snapshot that counts (null if none), and `_hole`, at which deltas stop."""
    is_part = F.col("type").isin(*SNAPSHOT_TYPES)
    position = F.struct("epoch", "sequence")
    begin, end, follower, newest = F.col("_begin"), F.col("_end"), F.col("_next"), F.col("_newest")
    is_snapshot = F.col("_request").isNotNull()
    is_whole = F.col("_marked") | F.col("_restart")  # an empty snapshot has no start marker: it restarts the chain
    counts = is_snapshot & is_whole & end.isNotNull() & (follower.isNull() | (end < follower))
    hole = is_snapshot & F.col("_restart") & (newest.isNull() | (begin > newest["_begin"]))
    runs = (  # all deltas of a queue, or one of its snapshots; a marker that restarts the chain is the first of its run
        entries.groupBy("queue", F.when(is_part, F.coalesce("request_id", F.lit(""))).alias("_request"))
        .agg(
            F.min(position).alias("_begin"),
            F.min(F.when(F.col("type") == "LAST_FULL_SYNC_ENTRY", position)).alias("_end"),
            F.min_by("restart", F.struct("epoch", "sequence", "index")).alias("_restart"),
            F.max((F.col("type") == "SNAPSHOT_SYNC") & F.col("payload").isNull()).alias("_marked"),
        )
        .withColumn("_next", F.lead("_begin").over(Window.partitionBy("queue", is_snapshot).orderBy("_begin")))
        .withColumn("_newest", F.max(F.when(counts, F.struct("_begin", "_end", "_request"))).over(Window.partitionBy("queue")))
    )
    found = runs.groupBy("queue").agg(F.first("_newest").alias("_newest"), F.min(F.when(hole, begin)).alias("_hole"))
    base = newest["_begin"]
    if need_snapshot:
        text = F.concat(F.lit("Queue "), F.col("queue"), F.lit(" holds no completed full snapshot: there are no tables yet"))
        base = F.when(newest.isNull(), F.raise_error(text).cast("struct<epoch: bigint, sequence: bigint>")).otherwise(base)
    return found.select("queue", newest["_request"].alias("_request"), base.alias("_base"), newest["_end"].alias("_end"), "_hole")


def _last_writes(writes: DataFrame, spec: TableSpec) -> DataFrame:
    rows = (
        writes.where((F.col("_table") == spec.name) & F.col("_row").isNotNull())
        .withColumn("_values", F.from_json("_row", spec.schema, {"mode": "FAILFAST"}))
        .select("queue", "write", "_number", "_op", "_values.*")
    )
    columns = [name for name in rows.columns if name not in ("queue", "write", "_number", "_op")]
    for name in spec.key:
        rows = rows.withColumn(
            name, _require(F.col(name).isNotNull(), F.col(name), f"a row of table {spec.name} lacks its key column {name}")
        )
    latest_first = Window.partitionBy("queue", *spec.key).orderBy(F.col("write").desc(), F.col("_number").desc())
    return (
        rows.withColumn("_rank", F.row_number().over(latest_first))
        .where((F.col("_rank") == 1) & (F.col("_op") == PUT))
        .select("queue", *columns)
    )


def _require(condition: Column, value: Column, complaint: str) -> Column:
    """`value` where `condition` holds; else an error that says where."""
    where = F.concat_ws(" ", F.lit(f"{complaint}, at"), F.col("queue"), F.col("write.epoch"), F.col("write.sequence"))
    return F.when(F.coalesce(condition, F.lit(False)), value).otherwise(F.raise_error(where))
