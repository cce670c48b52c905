"""A streaming query on a receive queue that `entries` fills: when each entry reached `foreachBatch`.

Rules: no trigger interval. A batch's rows have arrived once the driver's Python has all of them. CPU time is that of the JVM, of the Python workers
and of this process.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab

from .cost import cpu_tree_s
from .entries import CLIENT, unpack
from .measure import until

QUEUE = f"LRQ_Recv_{CLIENT}_east"
SETTLE_S = 300.0  # a busy machine starts Spark


class Arrivals:
    """The entries that came: the instants at which each was due and came, and its number."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, float, int]] = []
        self.batches: list[tuple[float, int]] = []

    def take(self, batch: DataFrame, _number: int) -> None:
        """For `foreachBatch`."""
        rows = batch.select("payload").collect()
        came = time.monotonic()
        found = [unpack(row.payload) for row in rows if row.payload]  # the markers of a snapshot have none
        self.entries += [(due, came, number) for due, number in found]
        self.batches.append((came, len(found)))

    def first_due_after(self, instant: float) -> float | None:
        """When the first entry came that was due after `instant`."""
        return next((came for due, came, _ in self.entries if due > instant), None)

    def missing(self, sent: int) -> int:
        """How many of the entries that were sent did not come."""
        return sent - len({number for _, _, number in self.entries})

    def twice(self) -> int:
        """How many entries came more than once."""
        return len(self.entries) - len({number for _, _, number in self.entries})


@contextmanager
def running(spark: SparkSession, nodes: Sequence[str]) -> Iterator[tuple[StreamingQuery, Arrivals]]:
    """A query that reads the queue from its beginning by these doors."""
    arrivals = Arrivals()
    frame = spark.readStream.format("lrq").options(nodes=",".join(nodes), subscribe=QUEUE).load()
    with tempfile.TemporaryDirectory() as checkpoint:
        query = frame.writeStream.foreachBatch(arrivals.take).option("checkpointLocation", checkpoint).start()
        try:
            yield query, arrivals
        finally:
            query.stop()


def wait(what: str, query: StreamingQuery, done: Any) -> None:
    """Waits for `done()`. Raises LrqError if the query ends."""

    def look() -> bool:
        time.sleep(0.01)
        return bool(done()) or not query.isActive

    until(what, look, SETTLE_S)
    if not query.isActive:
        raise LrqError(f"The query has ended: {query.exception()}")


def wait_snapshot(lab: Lab, primary: str) -> None:
    """Waits until the site has a whole snapshot of the client, and so the receive queue."""
    until("a whole snapshot", lambda: lab.status(primary)["receiving"].get(QUEUE, {}).get("snapshot", {}).get("complete") is True)


def spark_and_driver_s(spark: SparkSession) -> float:
    """CPU time used by Spark and by this process, in seconds."""
    return cpu_tree_s(spark.sparkContext._gateway.proc.pid) + sum(os.times()[:2])  # type: ignore[union-attr]


def durations(query: StreamingQuery) -> dict[str, float]:
    """Medians over the last batches with rows, in ms, of each step of a batch as Spark names it."""
    found = [progress["durationMs"] for progress in map(_plain, query.recentProgress) if progress["numInputRows"]]
    return {step: median(one[step] for one in found if step in one) for step in (found[-1] if found else ())}


def _plain(progress: Any) -> dict[str, Any]:
    return {"durationMs": dict(progress["durationMs"]), "numInputRows": progress["numInputRows"]}
