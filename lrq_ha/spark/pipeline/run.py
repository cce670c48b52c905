"""The job: a stream of entries -> versions of tables, with one line for each version.

The positions in the newest version say where the stream begins, in every run. Spark's checkpoint serves one run only: nothing but `_versions`
says what was applied.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from lrq_ha.errors import LrqError
from lrq_ha.replication.positions import Position
from lrq_ha.spark.decode import DECODERS, Decoder
from lrq_ha.spark.offsets import parse_offset
from lrq_ha.spark.options import EARLIEST
from lrq_ha.spark.pipeline import report, store
from lrq_ha.spark.pipeline.apply import Applied, Settings, TableWriter
from lrq_ha.spark.pipeline.bounds import leave_later
from lrq_ha.spark.pipeline.config import Config, ConfigError, DecodeSection, parse_interval, read_config, sample
from lrq_ha.spark.pipeline.errors import SchemaChanged
from lrq_ha.spark.pipeline.history import VersionFigures, append_failure, append_version, figures_of
from lrq_ha.spark.pipeline.manifest import Manifest
from lrq_ha.spark.pipeline.rebuild import check_rebuilt
from lrq_ha.spark.pipeline.spec import Table
from lrq_ha.spark.planning import discover_queues
from lrq_ha.spark.session import cause, session
from lrq_ha.spark.source import register
from lrq_ha.spark.tables import COLUMNS_NEEDED

CLEANING_INTERVAL_S = 60.0
REPORT = "report"
COLUMNS = ",".join((*COLUMNS_NEEDED, "timestamp"))
NOWHERE: Mapping[str, Position] = {}


def open_session(config: Config) -> SparkSession:
    """Spark, with the settings of [spark]: of spark-submit or of [spark] spark.master, else in this process."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ and "spark.master" not in config.spark:
        return session(settings=config.spark)
    builder = SparkSession.builder.appName("lrq-ha-pipeline").config("spark.sql.session.timeZone", "UTC")
    for name, value in config.spark.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def open_stream(spark: SparkSession, config: Config, manifest: Manifest) -> DataFrame:
    """The entries above the positions of `manifest`; queues that it does not know are read from their beginning.

    Raises:
        NoNode: No sidecar lists the queues of subscribePattern.
    """
    options = config.read_options
    starting: dict[str, object] = dict.fromkeys(options.subscribe or discover_queues(options), EARLIEST)
    starting |= {queue: state.position._asdict() for queue, state in manifest.queues.items() if queue in starting}
    return (
        spark.readStream.format("lrq")
        .options(**config.options)
        .option("columns", COLUMNS)
        .option("startingOffsets", json.dumps(starting))
        .load()
    )


def open_decoder(config: DecodeSection) -> Decoder:
    """The decoder of the configuration.

    Raises:
        LrqError: A schema or descriptor set cannot be used, or a package is missing.
        OSError: A file of [decode] cannot be read.
    """
    if config.format in DECODERS:
        return DECODERS[config.format]
    from lrq_ha.spark import records  # what it needs is needed for these formats alone

    layout = records.layout_of(config.record, config.table)
    if config.format == "protobuf":
        return records.protobuf_decoder(Path(config.protobuf_descriptors).read_bytes(), config.protobuf_message, layout)
    if config.avro_schema:
        inline = config.avro_schema.lstrip()[:1] in ("{", "[", '"')
        return records.avro_decoder(config.avro_schema if inline else Path(config.avro_schema).read_text("utf-8"), layout)
    schemas = {int(file.stem): file.read_text("utf-8") for file in Path(config.avro_schemas).glob("*.avsc") if file.stem.isdigit()}
    if not schemas:
        raise ConfigError(f"decode.avro_schemas: {config.avro_schemas} holds no schema", todo="Put each one there as ID.avsc, for example 7.avsc")
    return records.avro_decoder(schemas, layout)


def open_tables(config: Config) -> list[Table]:
    """The tables of the configuration; needs a session, which reads their schemas. Raises SchemaChanged."""
    found = []
    for name, table in config.tables.items():
        try:
            schema = StructType.fromDDL(table.columns)
        except PySparkException as error:
            raise SchemaChanged(f"tables.{name}.schema cannot be read: {str(error).strip().splitlines()[0]}") from error
        if not isinstance(schema, StructType):
            raise SchemaChanged(f"tables.{name}.schema is no list of columns", todo='Write it as "id BIGINT, name STRING"')
        columns = {field.name: field.dataType.simpleString() for field in schema.fields}
        found.append(Table(name, columns, tuple(table.key), table.buckets, table.on_new_column))
    return found


class Job:
    """One run of a pipeline.

    Args:
        spark: The session.
        config: The configuration.
        say: Gets each line for the operator.
        stopped: When it is set, the run ends; the batch that is under way then is not applied.

    Raises:
        SchemaChanged, BadVersion: The tables on disk do not go with the configuration.
    """

    def __init__(self, spark: SparkSession, config: Config, say: Callable[[str], None], stopped: threading.Event | None = None) -> None:
        self._spark, self._config, self._say, self._stopped = spark, config, say, stopped or threading.Event()
        self._path = Path(config.sink.path).absolute()
        settings = Settings(
            open_decoder(config.decode),
            config.decode.unknown_table == "ignore",
            config.run.on_bad_record,
            config.run.need_snapshot,
            config.sink.format,
        )
        self._writer = TableWriter(self._path, open_tables(config), settings)
        self._failed: LrqError | None = None
        self._clean_at = 0.0
        self._until: Mapping[str, Position] = NOWHERE

    def run(self, *, interval_s: int | None, dry_run: bool = False, until: Mapping[str, Position] = NOWHERE) -> None:
        """Applies what the queues hold.

        Args:
            interval_s: Seconds between two batches, until the job is stopped; None: ends when what is there now is applied.
            dry_run: Says what would be applied, and writes nothing.
            until: Queue -> last position that is applied. The run ends when all of these are reached.

        Raises:
            LrqError: A batch cannot be applied.
            PySparkException: The source, or Spark, failed.
        """
        self._until = until
        if self._has_reached():
            return
        entries = open_stream(self._spark, self._config, self._writer.manifest)
        batches = entries.writeStream.foreachBatch(self._preview if dry_run else self._apply)
        trigger = {"availableNow": True} if interval_s is None else {"processingTime": f"{interval_s} seconds"}
        batches = batches.trigger(**trigger)
        with tempfile.TemporaryDirectory(prefix="lrq-ha-pipeline-", ignore_cleanup_errors=True) as checkpoint:
            query = batches.option("checkpointLocation", f"file://{checkpoint}").start()
            try:
                while not query.awaitTermination(1) and not self._stopped.is_set() and not self._has_reached():
                    pass
            except PySparkException as error:
                raise self._failed or error from error
            finally:
                query.stop()

    def rebuild(self, table: str, *, dry_run: bool = False) -> None:
        """Computes a table from the newest full snapshots that the queues hold, up to the positions that are applied.

        Args:
            table: Its name.
            dry_run: Says what would be done, and writes nothing.

        Raises:
            LrqError: It cannot be rebuilt.
            PySparkException: The source, or Spark, failed.
        """
        check_rebuilt(table, self._writer.manifest)
        began = time.monotonic()
        entries = self._spark.read.format("lrq").options(**self._config.options).option("columns", COLUMNS).load()
        rebuilt = self._writer.rebuild_table(table, entries, dry_run=dry_run)
        if dry_run:
            self._say(f"would rebuild {table} with {rebuilt.puts:,} put, {rebuilt.deletes:,} deleted since its full snapshot began")
        else:
            self._tell(rebuilt, time.monotonic() - began)

    def _has_reached(self) -> bool:
        queues = self._writer.manifest.queues
        return bool(self._until) and all(queue in queues and queues[queue].position >= last for queue, last in self._until.items())

    def _apply(self, entries: DataFrame, batch: int) -> None:
        began = time.monotonic()
        try:
            applied = self._writer.apply_batch(leave_later(entries, self._until), batch=batch)
            if applied:
                seconds = time.monotonic() - began
                self._tell(applied, seconds)
            if time.monotonic() >= self._clean_at:
                store.remove_versions(self._path, self._config.sink.keep_versions)
                self._clean_at = time.monotonic() + CLEANING_INTERVAL_S
        except LrqError as error:
            self._failed = error
            raise

    def _tell(self, applied: Applied, seconds: float) -> None:
        figures = figures_of_batch(applied, seconds)
        store.write_status(self._path, format_status(applied, figures))
        append_version(self._path, figures)
        self._say(format_line(applied, seconds))

    def _preview(self, entries: DataFrame, batch: int) -> None:
        found = self._writer.summarize_batch(leave_later(entries, self._until))
        if not found.queues:
            return
        tables = ", ".join(f"{table} of {queue}: {one.puts} put, {one.deletes} deleted" for (queue, table), one in sorted(found.touched.items()))
        bad = f"; {found.bad.count} bad, the first: {found.bad.first}" if found.bad else ""
        self._say(f"would apply {found.rows:,} rows ({tables}){bad}")


def format_line(applied: Applied, seconds: float) -> str:
    """What an operator reads of a version."""
    manifest = applied.manifest
    lag = f", {applied.lag_s:.1f} s behind" if applied.lag_s is not None else ""
    bad = f", {applied.bad:,} bad" if applied.bad else ""
    waiting = [queue for queue, state in manifest.queues.items() if manifest.need_snapshot and state.base is None]
    waits = f"; waiting for the first full snapshot of {', '.join(waiting)}" if waiting else ""
    tables = ", ".join(applied.tables) or "no table"
    return f"version {manifest.version}: {applied.puts:,} put, {applied.deletes:,} deleted{bad}; {tables} in {seconds:.1f} s{lag}{waits}"


def figures_of_batch(applied: Applied, seconds: float) -> VersionFigures:
    """The figures of a version that a batch made in `seconds`."""
    of_batch = {"put": applied.puts, "deleted": applied.deletes, "bad": applied.bad, "seconds": round(seconds, 3), "lag_s": applied.lag_s}
    return figures_of(applied.manifest).model_copy(update=of_batch)


def format_status(applied: Applied, figures: VersionFigures) -> str:
    """The text of status.json."""
    manifest = applied.manifest
    found = {
        **figures.model_dump(mode="json"),
        "writer": asdict(manifest.writer) if manifest.writer else None,
        "queues": {
            name: {
                **state.position._asdict(),
                "has_snapshot": state.base is not None,
                "open_snapshot": state.open and state.open.request,
                "deltas_wait": state.hole is not None,
            }
            for name, state in manifest.queues.items()
        },
    }
    return json.dumps(found, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == [REPORT]:
        return report.main(arguments[1:])
    given, interval_s, until = parse_arguments(arguments)
    if given.sample:
        print(sample(), end="")
        return 0
    config, stopped = None, threading.Event()
    try:
        config = read_config(given.config)
        interval_s = None if given.once or given.dry_run or until else interval_s or parse_interval(config.run.interval)
        with open_session(config) as spark:
            for number in (signal.SIGTERM, signal.SIGINT):  # an exception in the middle of a call to Spark would leave a trace
                signal.signal(number, signal.SIG_DFL if given.rebuild is not None else lambda *_: stopped.set())
            job = Job(spark, config, lambda line: print(line, file=sys.stderr, flush=True), stopped)
            if given.rebuild is not None:
                job.rebuild(given.rebuild, dry_run=given.dry_run)
            else:
                job.run(interval_s=interval_s, dry_run=given.dry_run, until=until)
    except (PySparkException, LrqError, OSError) as error:
        said = cause(str(error))
        print(said, file=sys.stderr)
        if config is not None and not given.dry_run:
            append_failure(Path(config.sink.path), said)
        return 1
    return 0


def parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, int | None, Mapping[str, Position]]:
    """The arguments of a run, the seconds in --interval, the positions in --until. Exits if they are wrong."""
    epilog = f"{REPORT} PATH as the arguments writes a report about the tables under PATH: {REPORT} --help"
    parser = argparse.ArgumentParser(prog="lrq-ha-pipeline", description="Tables on disk that follow receive queues.", epilog=epilog)
    parser.add_argument("config", type=Path, nargs="?", help="the configuration, a TOML file")
    parser.add_argument("--sample", action="store_true", help="print a configuration with every key")
    parser.add_argument("--once", action="store_true", help="end when what the queues hold now is applied")
    parser.add_argument("--interval", metavar="TIME", help='time between two batches, as "30s" (default: interval in [run])')
    parser.add_argument("--dry-run", action="store_true", help="say what would be applied, and end, and write nothing")
    text = 'apply no more than this, and end: {"QUEUE": {"epoch": E, "sequence": S}}; all that is there now of queues without a position'
    parser.add_argument("--until", metavar="POSITIONS", default="{}", help=text)
    parser.add_argument("--rebuild", metavar="TABLE", help="compute one table from the newest full snapshot that its queue still holds, and end")
    given = parser.parse_args(arguments)
    if given.rebuild is not None and (given.once or given.interval or given.until != "{}"):
        parser.error("--rebuild goes with no other option than --dry-run: it applies nothing new")
    if given.config is None and not given.sample:
        parser.error("the path of a configuration is missing")
    try:
        interval_s = parse_interval(given.interval) if given.interval else None
    except ValueError as error:
        parser.error(f"--interval {error}")
    try:
        until = parse_offset(json.loads(given.until))
    except (ValueError, LrqError):
        parser.error('--until must be JSON of the form {"QUEUE": {"epoch": 257, "sequence": 12}}')
    return given, interval_s, until
