"""`lrq-ha definitions`: the users, permissions, policies and so on in which a node's broker differs from the primary's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.overview.asking import Target
from lrq_ha.overview.text import name_some, one_line

from .list_nodes import add_command, fetch, find_targets, named, tell

TAKING_S = 600.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands."""
    both = subparsers.add_parser("definitions", help="compare a node's users, permissions and policies with the primary's, or take them")
    actions = both.add_subparsers(title="actions", metavar="ACTION", required=True)
    diff = add_command(
        actions,
        "diff",
        "show how a node's broker differs from the log",
        "Shows each vhost, user, permission, policy and parameter in which NODE's broker differs from what the log has of the primary's. Values are "
        "not shown, as they may be secret. Shovels and federation, which only a primary runs, are no difference.",
        "Exit code 0 if there is no difference, 1 if there is one.",
    )
    diff.add_argument("node", metavar="NODE", help="the node")
    diff.set_defaults(run=_diff)
    take = add_command(
        actions,
        "take",
        "make a backup's broker as the primary's is",
        "NODE's broker gets what it lacks of the primary's vhosts, users, permissions, policies and parameters, and loses what the primary's lacks: "
        "a vhost with all that is in it.",
        "examples:\n  lrq-ha definitions take e2 --dry-run",
    )
    take.add_argument("node", metavar="NODE", help="the backup")
    take.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    take.set_defaults(run=_take)


def _diff(args: argparse.Namespace) -> int:
    found = fetch(named(args.node, find_targets(args)), "definitions/diff")
    for row in found:
        print(one_line(f"{row['object']} {row['how']}"))
    if not found:
        print(f"{args.node} has what the log has")
    return 1 if found else 0


def _take(args: argparse.Namespace) -> int:
    print(tell(named(args.node, find_targets(args)), "definitions/take", {"dry_run": args.dry_run}, TAKING_S))
    return 0


def compare_logins(primary: Target, backups: Sequence[Target]) -> str:
    """Text: the users and vhosts in which the brokers of these nodes differ, or why that is not known."""
    texts = []
    try:
        here = fetch(primary, "definitions")
    except LrqError as error:
        return f"users and vhosts were not compared: {error}"
    for backup in backups:
        try:
            there = fetch(backup, "definitions")
        except LrqError as error:
            texts.append(f"users and vhosts of {backup.name} were not compared: {error}")
            continue
        texts.append(compare_names(primary.name, here, backup.name, there))
    return "; ".join(texts)


def compare_names(one: str, here: dict[str, Any], other: str, there: dict[str, Any]) -> str:
    """Text: the users and vhosts in which two brokers differ. `here`, `there`: the answers of their nodes, `one` and `other`, to GET /definitions."""
    found = [
        text
        for kind in ("vhosts", "users")
        for name, names in ((f"only {one} has", _lacking(here[kind], there[kind])), (f"only {other} has", _lacking(there[kind], here[kind])))
        if names and (text := f"{name} the {kind} {names}")
    ]
    tags = [name for name in here["users"] if name in there["users"] and sorted(here["users"][name]) != sorted(there["users"][name])]
    if tags:
        found.append(f"other tags have the users {name_some(sorted(tags))}")
    return f"{one} and {other} have equal users and vhosts" if not found else f"{one} and {other} differ: {', '.join(found)}"


def _lacking(those: Any, others: Any) -> str:
    return name_some(sorted(name for name in those if name not in others))
