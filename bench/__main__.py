"""`python -m bench [ROW…]`: the benchmarks of docs/benchmarks.md. One line per row on stdout, progress on stderr, raw figures in results/."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from lrq_ha.errors import LrqError
from lrq_ha.lab import brokers

from . import (
    consuming,
    failover,
    joining,
    latency,
    matrix,
    outstanding,
    reading,
    receiving,
    rivals,
    scale,
    sessions,
    sink,
    sites,
    snapshot,
    stream_failover,
    stream_latency,
    tables,
    takeover,
    throughput,
)
from .measure import Row, note

#: Runs a row on these RabbitMQ series, shortly or in full.
ROWS: dict[str, Callable[[list[str], bool], Row]] = {
    "P1": lambda series, short: throughput.p1(series, throughput.SHORT if short else throughput.Plan()),
    "P1M": lambda series, short: matrix.p1m(series, matrix.SHORT if short else matrix.Plan()),
    "P1L": lambda series, short: latency.p1l(series, latency.SHORT if short else latency.Plan()),
    "P2": lambda series, short: throughput.p2(series, throughput.SHORT if short else throughput.Plan()),
    "P2B": lambda series, short: throughput.p2b(series, throughput.SHORT if short else throughput.Plan()),
    "P2C": lambda series, short: consuming.p2c(series, consuming.SHORT if short else throughput.Plan()),
    "P3": lambda series, short: rivals.p3(series, rivals.SHORT if short else throughput.Plan()),
    "P4": lambda series, short: sites.p4(series, sites.SHORT if short else sites.Plan()),
    "P4S": lambda _, short: sessions.p4s(sessions.SHORT_TRANSACTIONS if short else sessions.TRANSACTIONS),
    "P5": lambda series, short: failover.p5(series, (0, 10_000) if short else failover.BACKLOGS, 2 if short else 6),
    "P6": lambda _, short: outstanding.p6(outstanding.SHORT_MESSAGES if short else outstanding.MESSAGES),
    "P7": lambda series, short: reading.p7(series, reading.SHORT if short else reading.Plan()),
    "P7F": lambda series, short: stream_failover.p7f(series, stream_failover.SHORT_ROUNDS if short else stream_failover.ROUNDS),
    "P7K": lambda series, short: reading.p7k(series, reading.SHORT if short else reading.Plan()),
    "P7L": lambda series, short: stream_latency.p7l(series, stream_latency.SHORT if short else stream_latency.Plan()),
    "P7M": lambda series, short: reading.p7m(series, reading.SHORT if short else reading.Plan()),
    "P7S": lambda series, short: reading.p7s(series, reading.SHORT if short else reading.Plan()),
    "P8": lambda series, short: snapshot.p8(series, snapshot.SHORT if short else snapshot.Plan()),
    "P9": lambda series, short: scale.p9(series, scale.SHORT if short else scale.Plan()),
    "P10": lambda series, short: joining.p10(series, joining.SHORT if short else joining.Plan()),
    "P11": lambda series, short: receiving.p11(series, receiving.SHORT_ENTRIES if short else receiving.ENTRIES, 1 if short else 3),
    "P12": lambda series, short: tables.p12(series, tables.SHORT if short else tables.Plan()),
    "P13": lambda series, short: takeover.p13(series, takeover.SHORT if short else takeover.Plan()),
    "P14": lambda series, short: sink.p14(series, sink.SHORT_ROWS if short else sink.ROWS, 1 if short else 3),
}
#: Measured only when named: they take long.
LONG: dict[str, Callable[[list[str], bool], Row]] = {
    "P5M": lambda series, short: failover.p5(series, (failover.MILLION,), 2 if short else 4, "P5M"),
}
#: Needs no broker.
PURE = {"P4S", "P6"}
SERIES = ("3.10", "4.3")  # the two ends of what is supported


def main() -> int:
    """Runs the rows; 0 if all could be measured, whether or not they met their goals."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all if none is named; by name only: {', '.join(LONG)}")
    parser.add_argument("--broker", action="append", metavar="SERIES", help=f"RabbitMQ series; those of {', '.join(SERIES)} that are on this machine")
    parser.add_argument("--short", action="store_true", help="fewer and shorter rounds")
    options = parser.parse_args()
    known = ROWS | LONG
    if unknown := set(options.rows) - known.keys():
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    series = options.broker or [s for s in SERIES if s in brokers.installations()]
    for name in options.rows or ROWS:
        try:
            if not series and name not in PURE:
                brokers.find()  # raises, with what to do
            row = known[name](series, options.short)
        except LrqError as error:
            note(f"{name} failed: {error}")
            return 1
        row.save()
        print(row.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
