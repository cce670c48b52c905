"""The report at the other site: the tables that the pipeline keeps there -> mean departure delay by carrier and by month.

Usage::

    python -m lrq_ha.demo.delays TABLES --out DIR

TABLES is the path of the tables. Writes DIR/results.json and DIR/delays.png. Means are exact: delays are whole minutes, summed as integers and
divided once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lrq_ha.demo.report import CarrierDelay, MonthDelay, Report
from lrq_ha.errors import LrqError
from lrq_ha.spark import tables_at
from lrq_ha.spark.session import cause, session


def summarise(tables: Mapping[str, DataFrame]) -> Report:
    """Computes the delays from the tables of one version."""
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
    parser = argparse.ArgumentParser(prog="python -m lrq_ha.demo.delays", description="Delays of the flights in tables of lrq-ha-pipeline.")
    parser.add_argument("tables", type=Path, help="path of the tables")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and delays.png; made if it is not there")
    given = parser.parse_args(arguments)
    try:
        report = _run(given.tables, given.out)
    except (PySparkException, LrqError, OSError) as error:
        print(cause(str(error)), file=sys.stderr)
        return 1
    print(text(report))
    print(f"\nWritten: {given.out / 'results.json'}, {given.out / 'delays.png'}")
    return 0


def _run(tables: Path, out: Path) -> Report:
    """Checks the arguments before Spark starts."""
    try:
        from lrq_ha.demo.chart import draw_delays
    except ModuleNotFoundError as error:
        raise LrqError(f"The report needs matplotlib: {error}", todo="pip install 'CHECKOUT[demo]' (the path of lrq-ha's checkout)") from error
    out.mkdir(parents=True, exist_ok=True)
    with session() as spark:
        report = summarise(tables_at(spark, tables))
    (out / "results.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    draw_delays(report, out / "delays.png")
    return report


if __name__ == "__main__":
    sys.exit(main())
