"""A version of all tables: what stands in `_versions/N.json`. Pure.

Invariants:

- A queue's position never falls from one version to the next.
- A data file belongs to one table, one queue and one bucket; rows with equal keys are in one bucket.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from lrq_ha.replication.positions import Position
from lrq_ha.spark.pipeline.errors import BadVersion

FORMAT = 1


class Place(NamedTuple):
    """Where a write stands among those of its queue: rows of a snapshot (`stage` 0) come before all deltas (1)."""

    stage: int
    epoch: int
    sequence: int
    payload: int


@dataclass(frozen=True)
class DataFile:
    """A Parquet file; `path` is relative to the tables' path.

    Attributes:
        queue: The queue whose rows it holds.
        bucket: Which part of the keys it holds; 0 for staged and quarantined rows.
        rows: Number of rows.
        bytes: Size.
    """

    path: str
    queue: str
    bucket: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class OpenSnapshot:
    """A full snapshot that has begun and has not ended.

    Attributes:
        request: ID of its full sync.
        begin: Position of its first row.
        whole: Whether its beginning was seen: a start marker, or a restart of the chain.
        files: Its rows, and the deltas since `begin`.
        cuts: Table -> place of the last truncation in `files`.
    """

    request: str
    begin: Position
    whole: bool
    files: tuple[DataFile, ...] = ()
    cuts: Mapping[str, Place] = field(default_factory=dict)


@dataclass(frozen=True)
class QueueState:
    """How far a queue is applied.

    Attributes:
        position: The last transaction applied or staged.
        base: Beginning of the newest completed snapshot; None before the first one.
        hole: Beginning of a restart of the chain whose snapshot has not ended: deltas from there on are only staged. None if there is none.
        open: The snapshot that is under way.
        requests: IDs of the latest full syncs that were seen, the open one included; late rows of the others are left out.
    """

    position: Position
    base: Position | None = None
    hole: Position | None = None
    open: OpenSnapshot | None = None
    requests: tuple[str, ...] = ()


@dataclass(frozen=True)
class TableState:
    """A table: its columns with their types in DDL (without the column `queue`), its key, the number of buckets, its files."""

    columns: Mapping[str, str]
    key: tuple[str, ...]
    buckets: int
    files: tuple[DataFile, ...] = ()


@dataclass(frozen=True)
class Writer:
    """Who wrote a version: `time` is in ISO 8601; `query` and `batch` are Spark's, None outside a stream."""

    host: str
    pid: int
    time: str
    query: str | None = None
    batch: int | None = None


@dataclass(frozen=True)
class Manifest:
    """A version of everything.

    Attributes:
        version: 1 and up; 0 is the state before the first version.
        pipeline: ID of the tables' path, made with version 1.
        need_snapshot: Whether deltas wait for a first snapshot. It cannot change: deltas that were left out are not read again.
        queues: State by queue.
        tables: Tables by name.
        quarantine: Files with what could not be decoded.
        writer: Who wrote it; None in version 0.
    """

    version: int
    pipeline: str
    need_snapshot: bool = True
    queues: Mapping[str, QueueState] = field(default_factory=dict)
    tables: Mapping[str, TableState] = field(default_factory=dict)
    quarantine: tuple[DataFile, ...] = ()
    writer: Writer | None = None

    @property
    def files(self) -> set[str]:
        """Paths of all files that the version needs."""
        groups = [self.quarantine, *(table.files for table in self.tables.values())]
        groups += [queue.open.files for queue in self.queues.values() if queue.open]
        return {file.path for group in groups for file in group}

    def to_json(self) -> str:
        """The text of the version's file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, path: str) -> Manifest:
        """Reads a version's file.

        Args:
            text: What stands in it.
            path: Its path, for the error.

        Raises:
            BadVersion: It is no such text, or one of a newer format.
        """
        try:
            found = json.loads(text)
            if found["format"] != FORMAT:
                raise BadVersion(path, f"its format is {found['format']}, and this release of lrq-ha reads {FORMAT}")
            return cls(
                version=found["version"],
                pipeline=found["pipeline"],
                need_snapshot=found["need_snapshot"],
                queues={name: _queue(queue) for name, queue in found["queues"].items()},
                tables={name: _table(table) for name, table in found["tables"].items()},
                quarantine=_files(found["quarantine"]),
                writer=Writer(**found["writer"]) if found["writer"] else None,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise BadVersion(path, f"it is no version of tables ({type(error).__name__}: {error})") from error


def _files(found: list[dict[str, Any]]) -> tuple[DataFile, ...]:
    return tuple(DataFile(**file) for file in found)


def _position(found: list[int] | None) -> Position | None:
    return None if found is None else Position(*found)


def _queue(found: dict[str, Any]) -> QueueState:
    snapshot = found["open"]
    return QueueState(
        position=Position(*found["position"]),
        base=_position(found["base"]),
        hole=_position(found["hole"]),
        open=snapshot
        and OpenSnapshot(
            snapshot["request"],
            Position(*snapshot["begin"]),
            snapshot["whole"],
            _files(snapshot["files"]),
            {table: Place(*place) for table, place in snapshot["cuts"].items()},
        ),
        requests=tuple(found["requests"]),
    )


def _table(found: dict[str, Any]) -> TableState:
    return TableState(found["columns"], tuple(found["key"]), found["buckets"], _files(found["files"]))
