"""Applies batches to the tables on disk: one batch, one version.

    1. Rows that were applied before are skipped; the others are decoded, and kept for the steps below.
    2. Their summary says for each queue which snapshot counts, and which deltas apply (progress.py).
    3. For each table: the rows of the touched buckets (of none, if a snapshot replaces them), the staged rows of that snapshot and the batch's
       changes are put together; the last write of each key stays. The result is new files for these buckets; all other files stay as they are.
    4. Rows of a snapshot that has not ended, and the deltas after its beginning, are staged.
    5. Bad records are written to the quarantine, or end the job.
    6. The version is committed.

Nothing but summaries is collected on the driver.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import reduce
from operator import and_
from pathlib import Path
from types import ModuleType
from typing import Literal

import pyarrow.parquet as pq
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from lrq_ha.errors import LrqError
from lrq_ha.spark.decode import DELETE, PUT, Decoder, decode_lrq_json
from lrq_ha.spark.pipeline import store
from lrq_ha.spark.pipeline.bounds import POSITION, literal_frame, since_snapshot, skip_applied
from lrq_ha.spark.pipeline.changes import Changes, bucket_of, decode_changes, place_of, summarize_changes, values_of
from lrq_ha.spark.pipeline.errors import BadRecord, SchemaChanged
from lrq_ha.spark.pipeline.fields import added_columns
from lrq_ha.spark.pipeline.manifest import DataFile, Manifest, QueueState, TableState, Writer
from lrq_ha.spark.pipeline.progress import Step, advance_queue
from lrq_ha.spark.pipeline.rebuild import rebuild_steps
from lrq_ha.spark.pipeline.spec import QUEUE, Format, Table, quote_name, reconcile_table, schema_of

STAGED = {
    QUEUE: "string", "request": "string", "epoch": "bigint", "sequence": "bigint", "index": "int", "number": "int",
    "table": "string", "op": "string", "row": "string",
}  # fmt: skip
QUARANTINED = {
    QUEUE: "string", "epoch": "bigint", "sequence": "bigint", "index": "int", "number": "int", "error": "string", "payload": "binary",
}  # fmt: skip
#: What names a bad record; `number` is null for a payload as a whole.
RECORD = (QUEUE, "epoch", "sequence", "index", "number")
STAGED_FOLDER, QUARANTINE = "_staged", "_quarantine"
#: Of Spark, while a batch is applied.
SETTINGS = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # as all readers know them, for all years
    "spark.sql.maxConcurrentOutputFileWriters": "16",  # rows of few files need no sort
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "1000",  # files that a version names are looked up without a Spark job
}
FAILFAST = {"mode": "FAILFAST"}
#: What says where a row stands in its queue.
PLACED = (QUEUE, "request", "epoch", "sequence", "index", "number")
#: Changed rows of a table whose keys are sent to all executors, so that the table's other rows need not be sorted.
BROADCAST_MAX = 1_000_000
PLACE = "STRUCT<stage: INT, epoch: BIGINT, sequence: BIGINT, payload: INT>"

OnBadRecord = Literal["fail", "quarantine"]


@dataclass(frozen=True)
class Settings:
    """How payloads are read.

    Attributes:
        decode: Decoder of payloads.
        skip_unknown: Whether payloads for tables that are not defined are left out; else they are bad records.
        on_bad_record: fail ends the job; quarantine keeps what is bad apart, and applies the rest.
        need_snapshot: Whether a queue's deltas wait for its first full snapshot.
        format: Whether tables are Delta tables, too.
    """

    decode: Decoder = decode_lrq_json
    skip_unknown: bool = False
    on_bad_record: OnBadRecord = "fail"
    need_snapshot: bool = True
    format: Format = "parquet"


@dataclass(frozen=True)
class Applied:
    """A version that was made, and what its batch held.

    Attributes:
        manifest: The version.
        puts: Rows put, in deltas and in snapshots.
        deletes: Rows deleted.
        bad: Bad rows and payloads.
        tables: Names of the tables that changed.
        lag_s: Age of the newest transaction when the version was made, by the publisher's clock; None if publishers sent no time.
    """

    manifest: Manifest
    puts: int
    deletes: int
    bad: int
    tables: tuple[str, ...]
    lag_s: float | None


class TableWriter:
    """Applies batches to the tables under a path; one writer at a time.

    Args:
        path: Of the tables; made if it is not there.
        tables: All tables.
        settings: How payloads are read.

    Raises:
        SchemaChanged: The tables on disk have other definitions.
        BadVersion: The newest version cannot be read.
        DeltaFailed: A Delta table cannot follow the newest version.
    """

    def __init__(self, path: Path, tables: Sequence[Table], settings: Settings = Settings()) -> None:
        self._path = path.absolute()
        self._settings = settings
        self.manifest = _newest(self._path, settings)
        self._tables = {table.name: reconcile_table(table, self.manifest.tables.get(table.name)) for table in tables}
        gone = self.manifest.tables.keys() - self._tables.keys()
        if gone:
            raise SchemaChanged(f"{path} holds the table {min(gone)}, which is not defined", todo="Define it again, or write to another path")
        self._check_format()
        if self.manifest.version:
            store.show_version(self._path, self.manifest)
            self._publish()

    def _check_format(self) -> None:
        if self._settings.format == "delta":
            _delta().check_tables(self._path, self._tables.values())
        elif store.has_delta_logs(self._path):
            todo = 'Set format = "delta" in [sink] again, or remove the folders PATH/data/*/_delta_log'
            raise SchemaChanged(f"{self._path} holds Delta tables, which would not be kept in step", todo=todo)

    def _publish(self) -> None:
        if self._settings.format == "delta":
            _delta().publish_version(self._path, self.manifest)

    def apply_batch(self, entries: DataFrame, *, query: str | None = None, batch: int | None = None) -> Applied | None:
        """Applies entries, and commits a version.

        Args:
            entries: Rows of format lrq with includeChain = true, in any order: whole transactions, and for each queue all of those between
                the first and the last. Those at or below the queue's position are skipped.
            query: Spark's ID of the streaming query.
            batch: Spark's number of the batch.

        Returns:
            What was done; None if the entries hold nothing new.

        Raises:
            BadRecord: A payload or row cannot be decoded, and on_bad_record is fail.
            PathTaken: Another job has committed meanwhile. This writer is of no more use.
            DeltaFailed: The version is made, and a Delta table cannot follow it.
        """
        with _using(entries.sparkSession, SETTINGS):
            applied = self._apply(entries, query, batch)
        if applied:
            self.manifest = applied.manifest
            self._publish()
        return applied

    def _apply(self, entries: DataFrame, query: str | None, batch: int | None) -> Applied | None:
        with self._decoded(skip_applied(entries, self.manifest)) as (changes, summary):
            if not summary.queues:
                return None
            states, need = self.manifest.queues, self._settings.need_snapshot
            steps = {queue: advance_queue(states.get(queue), found, need_snapshot=need) for queue, found in summary.queues.items()}
            version = _Version(entries.sparkSession, self._path, self.manifest, self._tables, steps, changes, summary)
            return version.write(query, batch)

    def rebuild_table(self, name: str, entries: DataFrame, *, dry_run: bool = False) -> Applied:
        """Computes one table from the newest completed full snapshots and what follows them, and commits a version with it.

        All else stays as it is: the other tables, the positions, snapshots that are under way. Readers have the version before until then.

        Args:
            name: The table.
            entries: Rows of format lrq with includeChain = true, in any order: all that the queues hold.
            dry_run: Whether nothing is written; the manifest that is returned is then that of the version before.

        Returns:
            What was done: the rows put and deleted since the snapshots began.

        Raises:
            SnapshotGone: A queue no longer holds its newest completed snapshot, or has had none.
            BadRecord, PathTaken, DeltaFailed: As `apply_batch`.
        """
        held = since_snapshot(entries, self.manifest)
        with _using(entries.sparkSession, SETTINGS), self._decoded(held, name) as (changes, summary):
            steps = rebuild_steps(name, self.manifest, summary.queues)
            table = {name: self._tables[name]}
            version = _Version(entries.sparkSession, self._path, self.manifest, table, steps, changes, summary)
            if dry_run:
                return version.describe(self.manifest, lag_s=None)
            applied = version.write(None, None, is_repeat=True)
        self.manifest = applied.manifest
        self._publish()
        return applied

    @contextmanager
    def _decoded(self, entries: DataFrame, only: str | None = None) -> Iterator[tuple[DataFrame, Changes]]:
        """The changes of entries and their summary; of table `only`, if it is given. Tables get the columns that the rows add."""
        changes = self._decode(entries, only).persist(StorageLevel.MEMORY_AND_DISK)
        try:
            summary = summarize_changes(changes)
            if summary.fields:
                self._add_columns(changes, summary)
                changes.unpersist()
                changes = self._decode(entries, only).persist(StorageLevel.MEMORY_AND_DISK)
                summary = summarize_changes(changes)
            if summary.bad and self._settings.on_bad_record == "fail":
                raise BadRecord(
                    f"A payload cannot be applied: {summary.bad.first}; {summary.bad.count} in this batch",
                    todo='Correct the table or the sender, or set on_bad_record = "quarantine" in [run]',
                )
            yield changes, summary
        finally:
            changes.unpersist()

    def summarize_batch(self, entries: DataFrame) -> Changes:
        """What entries would change; nothing is written."""
        changes = self._decode(skip_applied(entries, self.manifest)).persist(StorageLevel.MEMORY_AND_DISK)
        try:
            return summarize_changes(changes)
        finally:
            changes.unpersist()

    def _decode(self, entries: DataFrame, only: str | None = None) -> DataFrame:
        tables = [table for name, table in self._tables.items() if only in (None, name)]
        skip_unknown = self._settings.skip_unknown or only is not None
        return decode_changes(entries, tables, self._settings.decode, skip_unknown=skip_unknown)

    def _add_columns(self, changes: DataFrame, summary: Changes) -> None:
        for name, fields in summary.fields.items():
            self._tables[name] = self._tables[name].with_columns(added_columns(changes, name, fields))
            if self._settings.format == "delta":
                _delta().check_columns(self._tables[name])


def _delta() -> ModuleType:
    """The module for Delta tables, which needs a package of its own."""
    try:
        return importlib.import_module("lrq_ha.spark.pipeline.delta")
    except ModuleNotFoundError as error:
        if error.name != "deltalake":
            raise
        raise LrqError("Delta tables need the package deltalake, which is not installed", todo="pip install 'lrq-ha[delta]'") from error


def _newest(path: Path, settings: Settings) -> Manifest:
    if not store.list_versions(path):
        return Manifest(version=0, pipeline=uuid.uuid4().hex, need_snapshot=settings.need_snapshot)
    found = store.read_version(path)
    if found.need_snapshot != settings.need_snapshot:
        raise SchemaChanged(
            f"{path} was begun with need_snapshot = {str(found.need_snapshot).lower()}", todo="Set it to this value again, or write to another path"
        )
    return found


@contextmanager
def _using(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, had in before.items():
            spark.conf.set(name, str(had))


class _Version:
    """One version in the making."""

    def __init__(
        self,
        spark: SparkSession,
        path: Path,
        before: Manifest,
        tables: Mapping[str, Table],
        steps: Mapping[str, Step],
        changes: DataFrame,
        summary: Changes,
    ) -> None:
        self._spark, self._path, self._before, self._tables, self._summary = spark, path, before, tables, summary
        self._attempt = f"{before.version + 1:08}-{uuid.uuid4().hex[:8]}"
        self._steps = steps
        self._queues = sorted(self._steps)
        self._changes = changes
        self._new: list[str] = []

    def write(self, query: str | None, batch: int | None, *, is_repeat: bool = False) -> Applied:
        """Makes the version. A repeat moves no queue on, stages nothing, and adds to the quarantine only what it lacks."""
        before = self._before
        manifest = replace(
            before,
            version=before.version + 1,
            tables={**before.tables, **{name: self._write_table(table) for name, table in self._tables.items()}},
            queues=before.queues if is_repeat else {**before.queues, **self._stage_rows()},
            quarantine=before.quarantine + self._quarantine_rows(is_repeat=is_repeat),
            writer=Writer(socket.gethostname(), os.getpid(), datetime.now(UTC).isoformat(timespec="seconds"), query, batch),
        )
        store.commit_version(self._path, manifest, self._new)
        newest = None if is_repeat else self._summary.newest_us
        return self.describe(manifest, None if newest is None else round(time.time() - newest / 1e6, 3))

    def describe(self, manifest: Manifest, lag_s: float | None) -> Applied:
        """What the batch held, and which tables of `manifest` it changed."""
        touched = self._summary.touched.values()
        had = {name: table.files for name, table in self._before.tables.items()}
        changed = tuple(name for name, table in manifest.tables.items() if table.files != had.get(name, ()))
        bad = self._summary.bad.count if self._summary.bad else 0
        return Applied(manifest, sum(one.puts for one in touched), sum(one.deletes for one in touched), bad, changed, lag_s)

    def _write_table(self, table: Table) -> TableState:
        """Rewrites the buckets of a table that the batch touches."""
        before = self._before.tables.get(table.name, TableState(table.columns, table.key, table.buckets))
        touched = {queue: self._summary.touched.get((queue, table.name)) for queue in self._queues}
        replaced = {queue for queue, step in self._steps.items() if step.swap or table.name in step.cuts}
        buckets = {(queue, bucket) for queue, one in touched.items() if one and self._steps[queue].applies for bucket in one.buckets}
        kept: list[DataFile] = []
        read: list[DataFile] = []
        for file in before.files:
            if file.queue in replaced:
                continue
            (read if (file.queue, file.bucket) in buckets else kept).append(file)
        staged = [file for step in self._steps.values() if step.swap for file in step.swap.staged]
        written: tuple[DataFile, ...] = ()
        if read or staged or buckets or any(one for queue, one in touched.items() if self._steps[queue].swap):
            rows = self._last_writes(table, read, staged)
            written = self._write_files(rows, store.table_folder(self._path, table.name))
        return TableState(table.columns, table.key, table.buckets, (*kept, *written))

    def _last_writes(self, table: Table, read: Sequence[DataFile], staged: Sequence[DataFile]) -> DataFrame:
        """The rows that stay, with columns _queue and _bucket.

        Rows of the data files are not sorted: those whose key is in the batch are left out, and the last writes of the batch are added.
        """
        number = list(self._tables).index(table.name)
        steps = self._steps_frame(table)
        changes = self._applying().where(F.col("table") == table.name).select(*PLACED, "op", F.col(f"values_{number}").alias("_values"))
        if staged:
            changes = changes.unionByName(_parse_rows(self._read(staged, STAGED).where(F.col("table") == table.name), table))
        place = place_of()
        rows = (
            changes.where(F.col("_values").isNotNull())
            .join(F.broadcast(steps), QUEUE)
            .where(F.col("_cut").isNull() | (place > F.col("_cut")))
            .select(QUEUE, "_queue", F.struct(place.alias("place"), "number").alias("_order"), F.col("op").alias("_op"), "_values.*")
            .withColumn("_bucket", bucket_of(table))
        )
        latest_first = Window.partitionBy("_queue", "_bucket", *map(_name, table.key)).orderBy(F.col("_order").desc())
        columns: tuple[Column | str, ...] = ("_queue", "_bucket", QUEUE, *map(_name, table.columns))
        newest = (
            rows.repartition("_queue", "_bucket")  # all work on a bucket, and its one file, is a single task's
            .withColumn("_rank", F.row_number().over(latest_first))
            .where((F.col("_rank") == 1) & (F.col("_op") == PUT))
            .select(*columns)
        )
        if not read:
            return newest
        keys = rows.select("_queue", *map(_name, table.key))
        if sum(one.puts + one.deletes for (_, name), one in self._summary.touched.items() if name == table.name) <= BROADCAST_MAX:
            keys = F.broadcast(keys)
        old = self._read(read, table.stored).join(F.broadcast(steps), QUEUE)
        kept = old.join(keys, ["_queue", *table.key], "left_anti").withColumn("_bucket", bucket_of(table))
        return kept.select(*columns).unionByName(newest).repartition("_queue", "_bucket")

    def _applying(self) -> DataFrame:
        """The batch's changes that the tables take: rows of snapshots that ended, and deltas."""
        position = F.struct("epoch", "sequence")
        of_swap = (F.col("request") == F.col("_request")) & (position <= F.col("_end"))
        before = F.col("_before").isNull() | (position < F.col("_before"))
        delta = F.col("request").isNull() & F.col("_applies") & (position > F.col("_after")) & before
        return self._changes.join(F.broadcast(self._steps_frame()), QUEUE).where(of_swap | delta)

    def _steps_frame(self, table: Table | None = None) -> DataFrame:
        """What happens to each queue, as a small frame."""
        rows = []
        for number, queue in enumerate(self._queues):
            step = self._steps[queue]
            cut = step.cuts.get(table.name) if table else None
            row = {QUEUE: queue, "_queue": number, "_cut": cut and cut._asdict()}
            if table is None:
                row |= {
                    "_applies": step.applies,
                    "_after": step.after._asdict(),
                    "_before": step.before and step.before._asdict(),
                    "_request": step.swap and step.swap.request,
                    "_end": step.swap and step.swap.end._asdict(),
                    "_open": step.state.open and step.state.open.request,
                    "_begin": step.state.open and step.state.open.begin._asdict(),
                }
            rows.append(row)
        schema = f"{QUEUE}: STRING, _queue: INT"
        more = f"_applies: BOOLEAN, _after: {POSITION}, _before: {POSITION}, _request: STRING, _end: {POSITION}, _open: STRING, _begin: {POSITION}"
        return literal_frame(self._spark, rows, f"{schema}, {more}" if table is None else f"{schema}, _cut: {PLACE}")

    def _stage_rows(self) -> dict[str, QueueState]:
        """The states of the batch's queues, after the rows that wait for the end of a snapshot were staged."""
        states = {queue: step.state for queue, step in self._steps.items()}
        if not any(state.open for state in states.values()):
            return states
        waits = (F.col("request") == F.col("_open")) | (F.col("request").isNull() & (F.struct("epoch", "sequence") > F.col("_begin")))
        rows = self._changes.where(F.col("op").isNotNull()).join(F.broadcast(self._steps_frame()), QUEUE).where(waits)
        for file in self._write_files(rows.select("_queue", F.lit(0).alias("_bucket"), *STAGED), self._path / store.DATA / STAGED_FOLDER):
            state = states[file.queue]
            assert state.open is not None
            states[file.queue] = replace(state, open=replace(state.open, files=(*state.open.files, file)))
        return states

    def _quarantine_rows(self, *, is_repeat: bool) -> tuple[DataFile, ...]:
        if not self._summary.bad:
            return ()
        rows = self._changes.where(F.col("error").isNotNull()).join(F.broadcast(self._steps_frame()), QUEUE)
        if is_repeat:
            known = self._read(self._before.quarantine, QUARANTINED).select(*(F.col(name).alias(f"_known_{name}") for name in RECORD))
            rows = rows.join(known, reduce(and_, (F.col(name).eqNullSafe(F.col(f"_known_{name}")) for name in RECORD)), "left_anti")
        return self._write_files(rows.select("_queue", F.lit(0).alias("_bucket"), *QUARANTINED), self._path / store.DATA / QUARANTINE)

    def _read(self, files: Sequence[DataFile], columns: Mapping[str, str]) -> DataFrame:
        return read_files(self._spark, self._path, files, columns)

    def _write_files(self, rows: DataFrame, folder: Path) -> tuple[DataFile, ...]:
        """Writes rows to new files by _queue and _bucket, which are not columns in them."""
        target = folder / self._attempt
        rows.write.partitionBy("_queue", "_bucket").parquet(f"file://{target}")
        files = []
        for place in sorted(target.glob("_queue=*/_bucket=*/*.parquet")):
            number, bucket = (int(part.partition("=")[2]) for part in place.parts[-3:-1])
            files.append(
                DataFile(
                    str(place.relative_to(self._path)), self._queues[number], bucket, pq.read_metadata(place).num_rows, place.stat().st_size
                )
            )
        self._new += [file.path for file in files]
        return tuple(files)


def read_files(spark: SparkSession, path: Path, files: Sequence[DataFile], columns: Mapping[str, str]) -> DataFrame:
    """Rows of data files; a column that a file lacks is null."""
    if not files:
        return spark.range(0).select(*(F.lit(None).cast(kind).alias(name) for name, kind in columns.items()))
    return spark.read.schema(schema_of(columns)).parquet(*(f"file://{path / file.path}" for file in files))


def _parse_rows(staged: DataFrame, table: Table) -> DataFrame:
    """Staged rows with their values, as `decode_changes` has them."""
    is_put = F.col("op") == PUT
    put, delete = F.from_json("row", table.schema, FAILFAST), F.from_json("row", table.key_schema, FAILFAST)
    parsed = staged.select(*PLACED, "op", F.when(is_put, put).alias("_put"), F.when(F.col("op") == DELETE, delete).alias("_delete"))
    return parsed.select(*PLACED, "op", values_of(table, F.col("_put"), F.col("_delete")).alias("_values"))


def _name(name: str) -> Column:
    return F.col(quote_name(name))
