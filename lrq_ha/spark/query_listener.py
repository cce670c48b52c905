"""How far streaming queries are behind the receive queues that they read: as lines of JSON, and for Prometheus.

Rules:

- The figures are those of Spark's progress: positions of the source's log at the end of a batch, and at the last look at the queue. Sources of other
  formats are left out.
- A lag counts entries of the source's log, of any client. Between two primaries of the source it is not known.

Source: Spark's `StreamingQueryListener` and `StreamingQueryProgress`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from lrq_ha.errors import LrqError
from lrq_ha.replication.positions import Position
from lrq_ha.spark.offsets import parse_offset


@dataclass(frozen=True)
class QueueLag:
    """The place of a query in one receive queue.

    Attributes:
        position: The last entry that the query has read, as EPOCH.SEQUENCE.
        entries_behind: Entries of the source's log after it, as of the last look at the queue; None: not known.
    """

    position: str
    entries_behind: int | None


def lags_of(progress: StreamingQueryProgress) -> dict[str, QueueLag]:
    """The receive queues that a query reads, and its place in each."""
    found: dict[str, QueueLag] = {}
    for source in progress.sources:
        ends, newest = _positions(source.endOffset), _positions(source.latestOffset)
        for queue, end in ends.items():
            last = newest.get(queue, end)
            behind = max(0, last.sequence - end.sequence) if last.epoch == end.epoch else None
            found[queue] = QueueLag(str(end), behind)
    return found


def _positions(text: str | None) -> dict[str, Position]:
    """The positions of an offset; none of a source of another format."""
    try:
        return parse_offset(json.loads(text or "{}"))
    except (LrqError, ValueError, TypeError, AttributeError, KeyError):
        return {}


class LrqListener(StreamingQueryListener):
    """Tells, after each batch of each query, how far the query is behind its receive queues.

    `spark.streams.addListener(LrqListener("lag.jsonl"))` is all that a program needs.

    Args:
        path: A file that gets a line of JSON for each batch; None: none.
        metrics_port: A TCP port that answers `GET /metrics`; None: none. 0: any free one (`port`).
        address: The address of that port.

    Attributes:
        lags: By id of each query that runs, the receive queues that it reads, and its place in each.
        port: The port that answers; None: none.

    Raises:
        OSError: The file cannot be written, or the port is in use.
    """

    def __init__(self, path: str | Path | None = None, *, metrics_port: int | None = None, address: str = "127.0.0.1") -> None:
        self.lags: dict[str, dict[str, QueueLag]] = {}
        self.port: int | None = None
        self._file = open(path, "a", encoding="utf-8", buffering=1) if path is not None else None  # noqa: SIM115
        registry = CollectorRegistry()
        behind = "Entries of the source's log that the query has not read."
        self._behind = Gauge("lrq_query_behind_entries", behind, ["query", "queue"], registry=registry)
        self._rows = Counter("lrq_query_rows", "Rows that the query has read.", ["query"], registry=registry)
        self._batch = Gauge("lrq_query_batch", "Number of the query's last batch.", ["query"], registry=registry)
        self._server = start_http_server(metrics_port, address, registry)[0] if metrics_port is not None else None
        if self._server is not None:
            self.port = self._server.server_port

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Nothing is known of the query yet."""

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """The query has read all: its figures stay."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Takes the figures of a batch."""
        progress = event.progress
        lags = lags_of(progress)
        if not lags:
            return
        query, name = str(progress.id), progress.name or str(progress.id)
        self.lags[query] = lags
        self._batch.labels(name).set(progress.batchId)
        self._rows.labels(name).inc(progress.numInputRows)
        for queue, lag in lags.items():
            self._behind.labels(name, queue).set(float("nan") if lag.entries_behind is None else lag.entries_behind)
        if self._file is not None:
            line: dict[str, Any] = {
                "time": progress.timestamp, "query": name, "batch": progress.batchId, "rows": progress.numInputRows,
                "rows_per_second": progress.processedRowsPerSecond, "queues": {queue: asdict(lag) for queue, lag in lags.items()},
            }  # fmt: skip
            self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Forgets the query's place. Its figures for Prometheus stay."""
        self.lags.pop(str(event.id), None)

    def close(self) -> None:
        """Closes the file and the port. Remove the listener first: `spark.streams.removeListener`."""
        if self._file is not None:
            self._file.close()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
