"""The pipeline as a job: receive queues -> tables -> mean departure delay by carrier and by month.

Usage::

    python -m lrq_ha.spark.job --nodes amqp://…,amqp://… --queue LRQ_Recv_flights_east --out DIR

Writes DIR/results.json and DIR/delays.png. Means are exact: delays are whole minutes, summed as integers and divided once.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lrq_ha.errors import LrqError
from lrq_ha.spark.report import CarrierDelay, MonthDelay, Report
from lrq_ha.spark.source import register
from lrq_ha.spark.tables import TableSpec, build_tables

TABLES = (
    TableSpec(
        "flights",
        "id BIGINT, year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay BIGINT, arr_time INT, sched_arr_time INT, "
        "arr_delay INT, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, air_time INT, distance INT, hour INT, "
        "minute INT, time_hour STRING",
        ("id",),
    ),
    TableSpec("airlines", "carrier STRING, name STRING", ("carrier",)),
    TableSpec("airports", "faa STRING, name STRING, lat DOUBLE, lon DOUBLE, alt INT, tz INT, dst STRING, tzone STRING", ("faa",)),
    TableSpec(
        "planes",
        "tailnum STRING, year INT, type STRING, manufacturer STRING, model STRING, engines INT, seats INT, speed INT, engine STRING",
        ("tailnum",),
    ),
)

LOG_SETTINGS = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
"""


def session(cores: int = 2, memory: str = "1g", settings: Mapping[str, str] = {}) -> SparkSession:
    """A quiet Spark on this machine alone, reachable from nowhere else; `settings` go before its own. Raises LrqError if there is no Java."""
    if not (os.environ.get("JAVA_HOME") or shutil.which("java")):
        raise LrqError("Spark needs Java 17, which is not on this machine", todo="Install it, or say with JAVA_HOME where it is")
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    log_settings = Path(tempfile.mkdtemp(prefix="lrq-spark-")) / "log4j2.properties"
    log_settings.write_text(LOG_SETTINGS)
    atexit.register(shutil.rmtree, log_settings.parent, ignore_errors=True)
    builder = SparkSession.builder.master(f"local[{cores}]").appName("lrq-ha")
    own = {
        "spark.driver.memory": memory,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{log_settings}",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(2 * cores),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    for name, value in {**own, **settings}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def read_entries(spark: SparkSession, nodes: str, queues: Sequence[str], partitions_min: int) -> DataFrame:
    """All entries in the queues now, persisted, so that all tables show one moment."""
    reader = spark.read.format("lrq").option("nodes", nodes).option("subscribe", ",".join(queues))
    entries = reader.option("minPartitions", partitions_min).option("includeChain", "true").load()
    return entries.persist(StorageLevel.MEMORY_AND_DISK)


def summarise(entries: DataFrame, queues: Sequence[str]) -> Report:
    """Builds the tables and computes the delays."""
    tables = build_tables(entries, TABLES)
    delays = (
        tables["flights"]
        .groupBy("queue", "carrier", "month")
        .agg(
            F.coalesce(F.sum("dep_delay"), F.lit(0)).alias("sum"),
            F.count("dep_delay").alias("count"),
            F.count("*").alias("flights"),
        )
        .persist()
    )
    totals = (F.sum("sum").alias("sum"), F.sum("count").alias("count"))
    mean = F.when(F.col("count") > 0, F.col("sum").cast("double") / F.col("count")).alias("mean")
    by_carrier = (
        delays.join(tables["airlines"], ["queue", "carrier"], "left").groupBy("carrier", "name").agg(*totals).select("*", mean)
    )
    by_month = delays.groupBy("month").agg(*totals).select("*", mean)
    rows = {"flights": delays.agg(F.coalesce(F.sum("flights"), F.lit(0))).collect()[0][0]}
    rows |= {name: table.count() for name, table in tables.items() if name not in rows}
    return Report(
        queues=tuple(queues),
        rows=rows,
        by_carrier=[CarrierDelay(**row.asDict()) for row in by_carrier.orderBy("carrier", "name").collect()],
        by_month=[MonthDelay(**row.asDict()) for row in by_month.orderBy("month").collect()],
    )


def text(report: Report) -> str:
    """The report for people."""
    lines = ["  ".join(f"{name}: {count:,}" for name, count in report.rows.items()), "", "Mean departure delay by carrier"]
    for carrier in sorted(report.by_carrier, key=lambda one: (one.mean is None, -(one.mean or 0))):
        lines.append(f"  {_minutes(carrier.mean)}  {carrier.name or carrier.carrier}  ({carrier.count:,} flights)")
    lines += ["", "Mean departure delay by month"]
    lines += [f"  {_minutes(month.mean)}  {month.month}  ({month.count:,} flights)" for month in report.by_month]
    return "\n".join(lines)


def _minutes(mean: float | None) -> str:
    return "     no data" if mean is None else f"{mean:8.2f} min"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lrq_ha.spark.job", description="Delays of flights that were received in LRQ_Recv_* queues."
    )
    parser.add_argument(
        "--nodes", default=os.environ.get("LRQ_NODES"), help="AMQP addresses, comma separated (default: LRQ_NODES)"
    )
    parser.add_argument("--queue", action="append", required=True, help="a receive queue; may be given several times")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and delays.png; made if it is not there")
    parser.add_argument("--partitions", type=int, default=2, help="partitions to read in (default: 2)")
    given = parser.parse_args(arguments)
    if not given.nodes:
        parser.error("--nodes is missing")
    try:
        report = _run(given)
    except (PySparkException, LrqError, OSError) as error:
        print(cause(str(error)), file=sys.stderr)
        return 1
    print(text(report))
    print(f"\nWritten: {given.out / 'results.json'}, {given.out / 'delays.png'}")
    return 0


def _run(given: argparse.Namespace) -> Report:
    """Checks the arguments before Spark starts."""
    try:
        from lrq_ha.spark.chart import draw_delays
    except ModuleNotFoundError as error:
        raise LrqError(f"The job draws with matplotlib: {error}", todo="pip install 'CHECKOUT[demo]' (the path of lrq-ha's checkout)") from error
    given.out.mkdir(parents=True, exist_ok=True)
    with session() as spark:
        report = summarise(read_entries(spark, given.nodes, given.queue, given.partitions), given.queue)
    (given.out / "results.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    draw_delays(report, given.out / "delays.png")
    return report


def cause(trace: str) -> str:
    """The informative line of an error out of Spark: the last one of a Python trace that names an error of ours."""
    ours = [line.strip() for line in trace.splitlines() if line.strip().startswith("lrq_ha.")]
    return ours[-1] if ours else trace


if __name__ == "__main__":
    sys.exit(main())
