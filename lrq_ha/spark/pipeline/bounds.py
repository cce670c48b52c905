"""The part of some entries between positions of their queues. Spark operations only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from lrq_ha.replication.positions import Position
from lrq_ha.spark.pipeline.manifest import Manifest
from lrq_ha.spark.pipeline.spec import QUEUE

POSITION = "STRUCT<epoch: BIGINT, sequence: BIGINT>"


def skip_applied(entries: DataFrame, manifest: Manifest) -> DataFrame:
    """The entries above the position of their queue."""
    applied = {name: state.position for name, state in manifest.queues.items()}
    return _where_position(entries, applied, lambda position, through: position > through)


def leave_later(entries: DataFrame, until: Mapping[str, Position]) -> DataFrame:
    """The entries at or below the position that is given for their queue; all of a queue that has none."""
    return _where_position(entries, until, lambda position, through: position <= through)


def _where_position(entries: DataFrame, positions: Mapping[str, Position], holds: Callable[[Column, Column], Column]) -> DataFrame:
    if not positions:
        return entries
    rows = [{QUEUE: name, "_through": position._asdict()} for name, position in positions.items()]
    through = literal_frame(entries.sparkSession, rows, f"{QUEUE}: STRING, _through: {POSITION}")
    kept = F.col("_through").isNull() | holds(F.struct("epoch", "sequence"), F.col("_through"))
    return entries.join(F.broadcast(through), QUEUE, "left").where(kept).drop("_through")


def since_snapshot(entries: DataFrame, manifest: Manifest) -> DataFrame:
    """The entries from the beginning of each queue's newest completed snapshot up to its position; none of a queue without a snapshot."""
    bases = {name: state.base for name, state in manifest.queues.items() if state.base is not None}
    reached = leave_later(entries.where(F.col(QUEUE).isin(list(bases))), {name: manifest.queues[name].position for name in bases})
    return _where_position(reached, bases, lambda position, begin: position >= begin)


def literal_frame(spark: SparkSession, rows: Sequence[Mapping[str, object]], schema: str) -> DataFrame:
    """A small frame without a Python worker, also over Spark Connect."""
    return spark.range(1).select(F.inline(F.from_json(F.lit(json.dumps(rows)), f"ARRAY<STRUCT<{schema}>>")))
