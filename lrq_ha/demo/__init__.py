"""`lrq-ha demo`: the main job, end to end, on private brokers and real data. `story` has the steps and the claims."""

from __future__ import annotations

import argparse
from pathlib import Path

from lrq_ha.errors import LrqError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "demo",
        help="the main job from start to finish, on this machine",
        description="Starts three private brokers with their sidecars, sends 336,776 flights through them, kills the primary in the middle, "
        "promotes its backup, kills the Spark query that keeps tables at the other site, and proves that nothing was lost or duplicated. "
        "Nothing is left running afterwards.",
    )
    parser.add_argument("--report", type=Path, default=Path("demo-report"), help="folder for the report and the chart (default: %(default)s)")
    parser.add_argument("--flights", type=_count, default=0, metavar="N", help="only the first N flights (default: all)")
    parser.add_argument("--broker", default=None, help="RabbitMQ series, as 3.10 or 4.3 (default: the distribution's)")
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of flights")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; returns the exit status."""
    from .story import tell

    try:
        arguments.report.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LrqError(f"{arguments.report} cannot be the report's folder: {error.strerror}", todo="Name another one with --report") from error
    return tell(arguments.report, arguments.flights, arguments.broker)
