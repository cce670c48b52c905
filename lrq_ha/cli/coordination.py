"""`lrq-ha coordination`: what an operator, or a unit, does to a group's keys in etcd.

    release  a sidecar that has ended without a word gives its right to lead back, so that a backup takes over at once
    repair   etcd's record of a group is older than the group's log, or gone: the node with the longest log writes it again

Rules: `release` takes nothing from another node: the leader's key in etcd goes only if it is this node's, and has not changed meanwhile. `repair`
needs the answers of all nodes, as any of them may know a newer set than etcd does.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from lrq_ha.errors import LrqError
from lrq_ha.overview.asking import Report, ask_all
from lrq_ha.overview.nodes import primary_of
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.coordination import open_register

from .commands import add_group, find_group
from .list_nodes import add_command, find_targets, tell


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    coordination = subparsers.add_parser("coordination", help="this node's right to lead in etcd")
    commands = coordination.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = (
        "Gives the right to lead back that this node's sidecar has in etcd, if it has ended without doing so itself: for ExecStopPost of its unit. "
        "A sidecar that runs takes it again."
    )
    release = commands.add_parser("release", help="give it back after the sidecar was killed", description=text)
    release.add_argument("--config", type=Path, required=True, metavar="FILE", help="the node's configuration")
    release.set_defaults(run=_release)
    repair = add_command(
        commands,
        "repair",
        "write etcd's record of a group again",
        "For a group without a primary whose record in etcd is older than its log, or gone: etcd was restored from a backup, or emptied. The node "
        "with the longest log takes the next epoch, and so writes the record. All nodes of the group must answer. A primary that serves writes the "
        "record by itself.",
        "examples:\n  lrq-ha coordination repair --dry-run\n  lrq-ha coordination repair",
    )
    add_group(repair)
    repair.add_argument("--dry-run", action="store_true", help="only say what would happen")
    repair.set_defaults(run=_repair)


def _release(args: argparse.Namespace) -> int:
    config = configuration.load(args.config)
    if config.coordination is None:
        raise LrqError(f"{args.config} has no [coordination]", todo='It is of use with replication.coordination = "etcd" only')
    released = asyncio.run(_ask(config))
    print(f"{config.node.name} {'has given the right to lead back' if released else 'has no right to lead'}")
    return 0


async def _ask(config: configuration.Config) -> bool:
    etcd, register = open_register(config)
    try:
        return await register.release(config.node.id)
    finally:
        await etcd.close()


def _repair(args: argparse.Namespace) -> int:
    group = find_group(find_targets(args), args.group)
    reports = ask_all(group)
    if silent := [f"{report.target.name} ({report.failure})" for report in reports if not report.status]:
        raise LrqError(f"not all nodes of group {group[0].group} answer: {', '.join(silent)}", todo="Start them: one may know a newer set than etcd")
    if not any(report.status.get("coordination") for report in reports):
        raise LrqError(f"group {group[0].group} is not coordinated by etcd", todo="Promote a node: lrq-ha promote NODE")
    if primary := primary_of(group[0].group, reports):
        print(f"{primary.target.name} is primary, and keeps etcd's record by itself: nothing is to be done")
        return 0
    longest = max(reports, key=_log_end)
    print(tell(longest.target, "promote", {"down": [], "force": False, "dry_run": args.dry_run}))
    return 0


def _log_end(report: Report) -> tuple[int, int]:
    return report.epoch(), int(report.status.get("end") or 0)
