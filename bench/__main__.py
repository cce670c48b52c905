"""`python -m bench [ROW…]`: the benchmarks of docs/benchmarks.md. One line per row on stdout, progress on stderr, raw figures in results/."""

from __future__ import annotations

import argparse
import sys

from lrq_ha.lab import brokers
from lrq_ha.replication.errors import LrqError

from .failover import p5
from .measure import note
from .throughput import SHORT, Plan, p1, p2

ROWS = ("P1", "P2", "P5")
SERIES = ("3.10", "4.3")  # the two ends of what is supported


def main() -> int:
    """Runs the rows; 0 if all could be measured, whether or not they met their goals."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all if none is named")
    parser.add_argument("--broker", action="append", metavar="SERIES", help=f"RabbitMQ series; those of {', '.join(SERIES)} that are on this machine")
    parser.add_argument("--short", action="store_true", help="fewer and shorter rounds")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    series = options.broker or [s for s in SERIES if s in brokers.installations()]
    plan = SHORT if options.short else Plan()
    for name in options.rows or ROWS:
        try:
            if not series:
                brokers.find()  # raises, with what to do
            row = p5(series, 2 if options.short else 8) if name == "P5" else (p1 if name == "P1" else p2)(series, plan)
        except LrqError as error:
            note(f"{name} failed: {error}")
            return 1
        row.save()
        print(row.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
