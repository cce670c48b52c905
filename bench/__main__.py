"""`python -m bench [ROW…]`: the benchmarks of docs/benchmarks.md. One line per row on stdout, progress on stderr, raw figures in results/."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from lrq_ha.lab import brokers
from lrq_ha.replication.errors import LrqError

from . import latency, matrix, scale, throughput
from .failover import p5
from .measure import Row, note

#: Runs a row on these RabbitMQ series, shortly or in full.
ROWS: dict[str, Callable[[list[str], bool], Row]] = {
    "P1": lambda series, short: throughput.p1(series, throughput.SHORT if short else throughput.Plan()),
    "P1M": lambda series, short: matrix.p1m(series, matrix.SHORT if short else matrix.Plan()),
    "P1L": lambda series, short: latency.p1l(series, latency.SHORT if short else latency.Plan()),
    "P2": lambda series, short: throughput.p2(series, throughput.SHORT if short else throughput.Plan()),
    "P5": lambda series, short: p5(series, 2 if short else 8),
    "P9": lambda series, short: scale.p9(series, scale.SHORT if short else scale.Plan()),
}
SERIES = ("3.10", "4.3")  # the two ends of what is supported


def main() -> int:
    """Runs the rows; 0 if all could be measured, whether or not they met their goals."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all if none is named")
    parser.add_argument("--broker", action="append", metavar="SERIES", help=f"RabbitMQ series; those of {', '.join(SERIES)} that are on this machine")
    parser.add_argument("--short", action="store_true", help="fewer and shorter rounds")
    options = parser.parse_args()
    if unknown := set(options.rows) - ROWS.keys():
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    series = options.broker or [s for s in SERIES if s in brokers.installations()]
    for name in options.rows or ROWS:
        try:
            if not series:
                brokers.find()  # raises, with what to do
            row = ROWS[name](series, options.short)
        except LrqError as error:
            note(f"{name} failed: {error}")
            return 1
        row.save()
        print(row.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
