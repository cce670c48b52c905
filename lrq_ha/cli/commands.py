"""An operator's commands to a group: `promote`, `switchover`, `demote`, `remove`, `renew`, `pause` and `resume`.

Rules: a refusal comes from the node that was asked, with its reason, and changes nothing; --dry-run only describes the action. Commands for the
primary go to the node that claims to be primary.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.overview.asking import Report, Target, ask_all
from lrq_ha.overview.nodes import primary_of
from lrq_ha.replication.roles import Role
from lrq_ha.replication.settings import id_of_unnamed

from .definitions import compare_logins
from .list_nodes import Asking, add_command, find_targets, named, say_if_several, tell

#: A renewal takes as long as the queues are deep.
RENEWING_S = 3_600.0
#: The longest that a node accepts.
TIMEOUT_MAX_S = 3_600.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands."""
    _add_promote(subparsers)
    _add_remove(subparsers)
    _add_hand_over(subparsers)
    _add_renew(subparsers)
    _add_reload(subparsers)
    for name, paused, summary in (
        ("pause", True, "no node takes the primary's role by itself"),
        ("resume", False, "nodes take the primary's role by themselves again"),
    ):
        command = add_command(subparsers, name, summary, f"Every node of the group is told: {summary}. Operations under way continue.", "")
        add_group(command)
        command.set_defaults(run=_pause, paused=paused)


def _add_reload(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    reload = add_command(
        subparsers,
        "reload",
        "have certificates and configurations read again",
        "Each node, or NODE, reads its certificates and its configuration again, as on SIGHUP. Limits and time-outs of [door] count at once; the "
        "other keys that differ are named, and wait for a restart. Exit code 1 if a file cannot be used, or a node does not answer.",
        "examples:\n  lrq-ha reload e1",
    )
    reload.add_argument("node", metavar="NODE", nargs="?", help="only this node")
    reload.set_defaults(run=_reload)


def _add_promote(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    promote = add_command(
        subparsers,
        "promote",
        "make a backup the primary",
        "Makes NODE the primary of its group. It is refused where NODE can tell that confirmed messages would be lost or two primaries arise. What "
        "it cannot tell is whether OTHER went on without it before it went down: in mode available a primary that has lost its backup does, after "
        "backup_timeout_s. So the answer says when NODE last heard its primary; what was confirmed after that is lost. See it before with --dry-run.",
        "examples:\n  lrq-ha promote e2 --down e1 --dry-run\n  lrq-ha promote e2 --down e1\n  lrq-ha failover e2      with etcd: it needs no --down",
        aliases=("failover",),
    )
    promote.add_argument("node", metavar="NODE", help="node to promote")
    promote.add_argument(
        "--down", nargs="+", action="extend", default=[], metavar="OTHER",
        help="nodes that you know to be down, that have confirmed nothing without NODE, and that stay down until they rejoin",
    )
    promote.add_argument("--force", action="store_true", help="accept the loss that the refusal speaks of")
    promote.add_argument(
        "--without-etcd", action="store_true",
        help="with coordination by etcd, while etcd is away for long: as with static coordination. It is refused where etcd answers NODE",
    )
    promote.add_argument("--dry-run", action="store_true", help="only say what would happen")
    promote.set_defaults(run=_promote)


def _add_remove(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    remove = add_command(
        subparsers,
        "remove",
        "take a silent backup out of the in-sync set",
        "Takes NODE out of the in-sync set of its group, so that the primary no longer waits for it. The group's primary is told. It is refused "
        "while NODE keeps up, as it would be back at once: stop it first. This comes before a node is taken out of the configuration for good.",
        "examples:\n  lrq-ha remove e3\n  lrq-ha remove 3      the node with the id 3, which is not configured any more (`lrq-ha list`: node 3)",
    )
    add_group(remove)
    remove.add_argument("node", metavar="NODE", help="node to remove; of one that is not configured any more, its id")
    remove.add_argument("--dry-run", action="store_true", help="only say what would happen")
    remove.set_defaults(run=_remove)


def _add_hand_over(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    switchover = add_command(
        subparsers,
        "switchover",
        "hand the primary's role over to a backup, in order",
        "The primary stops giving out messages, waits until its consumers have acknowledged what they hold, confirms what was published, closes its "
        "clients' connections, and hands over. Nothing is lost, and nothing is delivered twice.",
        "examples:\n  lrq-ha switchover --dry-run\n  lrq-ha switchover e2 --timeout 10",
    )
    add_group(switchover)
    switchover.add_argument("node", metavar="NODE", nargs="?", help="the backup that is to become primary (default: one that is in sync)")
    _add_drain(switchover)
    switchover.set_defaults(run=_switchover)

    demote = add_command(
        subparsers,
        "demote",
        "the primary steps down, and no node takes over until told to",
        "As switchover, but the group then has no primary: all of its nodes are paused, until `lrq-ha resume` or `lrq-ha promote NODE`. Exit code 1 "
        "also if one of them was not told.",
        "",
    )
    add_group(demote)
    _add_drain(demote)
    demote.set_defaults(run=_demote)


def _add_renew(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    renew = add_command(
        subparsers,
        "renew",
        "let a node join whose primary's log has lost its beginning",
        "The primary publishes everything that is live in its queues again at the end of its log, one queue after the other. A node with an empty "
        "log can join then. Each queue stands still meanwhile: its consumers get nothing new, and publishes to it wait; how long depends on how much "
        "is in it. Everything else goes on.",
        "examples:\n  lrq-ha renew --dry-run\n  lrq-ha renew --timeout 10",
    )
    add_group(renew)
    _add_drain(renew)
    renew.add_argument(
        "--dead-letters-arrived",
        action="store_true",
        help="no dead letters wait in queues with x-dead-letter-strategy at-least-once, and none will: you have seen to it",
    )
    renew.set_defaults(run=_renew)


def add_group(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--group", metavar="GROUP", help="which group, where several are known")


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= TIMEOUT_MAX_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {TIMEOUT_MAX_S:g}")
    return number


def _add_drain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--timeout", type=_seconds, default=30.0, metavar="S", help="how long consumers may take (default: %(default)g s)")
    parser.add_argument("--force", action="store_true", help="go on when that time is over: what consumers hold then is delivered again")
    parser.add_argument("--dry-run", action="store_true", help="only say what would happen")


def _promote(args: argparse.Namespace) -> int:
    targets = find_targets(args)
    target = named(args.node, targets)
    group = [other for other in targets if other.group == target.group]
    # Refusals list names with commas, and can be pasted.
    down = [named(name, group) for given in args.down for name in given.split(",") if name]
    asking = Asking([other for other in down if other != target])
    names = [other.name for other in down]
    answer = tell(target, "promote", {"down": names, "force": args.force, "without_etcd": args.without_etcd, "dry_run": args.dry_run})
    print("; ".join([answer, *map(_known_of, asking.reports())]))
    return 0


def _known_of(report: Report) -> str:
    """The knowledge of a down node's sidecar: whether, and until when, the node may have confirmed something."""
    role, since, reason = report.status.get("role"), report.since(), report.status.get("reason")
    said = f"the sidecar of {report.target.name} answers: it is {' '.join(filter(None, (str(role), since)))}{f' ({reason})' if reason else ''}"
    if report.is_primary or role == Role.RECOVERING.value:
        return f"{said}, and so NOT down"
    return f"{said}, and has confirmed nothing since then" if since else said


def _remove(args: argparse.Namespace) -> int:
    targets = find_targets(args)
    unnamed = id_of_unnamed(args.node) and all(target.name != args.node for target in targets)
    group = find_group(targets, args.group if unnamed else named(args.node, targets).group)
    print(tell(_leader(group), "remove", {"node": args.node, "dry_run": args.dry_run}))
    return 0


def _switchover(args: argparse.Namespace) -> int:
    targets = find_targets(args)
    group = find_group(targets, named(args.node, targets).group if args.node else args.group)
    body = {"node": args.node, "timeout_s": args.timeout, "force": args.force, "dry_run": args.dry_run}
    primary = _primary(group)
    answer = tell(primary, "switchover", body, args.timeout)
    if args.dry_run:
        others = [target for target in group if target != primary and args.node in (None, target.name)]
        answer = f"{answer}; {compare_logins(primary, others)}"
    print(answer)
    return 0


def _demote(args: argparse.Namespace) -> int:
    group = find_group(find_targets(args), args.group)
    primary = _primary(group)
    body = {"timeout_s": args.timeout, "force": args.force, "dry_run": args.dry_run}
    print(tell(primary, "demote", body, args.timeout))
    if args.dry_run:
        return 0
    # The primary is paused itself, which its sidecar forgets at a restart.
    return 1 if _not_told([target for target in group if target != primary], "pause", {"paused": True}) else 0


def _renew(args: argparse.Namespace) -> int:
    group = find_group(find_targets(args), args.group)
    body = {
        "timeout_s": args.timeout,
        "force": args.force,
        "dead_letters_arrived": args.dead_letters_arrived,
        "dry_run": args.dry_run,
    }
    print(tell(_primary(group), "renew", body, args.timeout + RENEWING_S))
    return 0


def _reload(args: argparse.Namespace) -> int:
    targets = find_targets(args)
    return 1 if _not_told([named(args.node, targets)] if args.node else targets, "reload", {}) else 0


def _pause(args: argparse.Namespace) -> int:
    group = find_group(find_targets(args), args.group)
    failed = _not_told(group, "pause", {"paused": args.paused})
    if failed == len(group):
        raise LrqError("no node was told", todo="Are the sidecars running?")
    return 1 if failed else 0


def _not_told(targets: Sequence[Target], command: str, body: dict[str, Any]) -> int:
    """Gives each node a command. Returns the number that refused or could not be reached, which it names."""
    failed = 0
    for target in targets:
        try:
            print(tell(target, command, body))
        except LrqError as error:
            failed += 1
            print(f"{target.name}: {error}", file=sys.stderr)
    return failed


def find_group(targets: Sequence[Target], group: str | None) -> list[Target]:
    """The nodes of a group; without a name, of the only one that has more than one node, or of the only one."""
    groups = {target.group for target in targets}
    if group is None and len(groups) > 1:
        groups = {name for name in groups if sum(target.group == name for target in targets) > 1} or groups
    if group is None and len(groups) > 1:
        raise LrqError(f"several groups are known: {', '.join(sorted(groups))}", todo="Say which one with --group")
    found = [target for target in targets if target.group == (group or next(iter(groups)))]
    if not found:
        raise LrqError(f"there is no group {group}", todo=f"Known groups: {', '.join(sorted(groups))}")
    return found


def _leader(group: Sequence[Target]) -> Target:
    """The primary, or else a node that takes an epoch: it may wait for the very node that is to be removed."""
    reports = ask_all(group)
    if primary_of(group[0].group, reports) is None:
        for report in reports:
            if report.status.get("role") == Role.RECOVERING.value and report.status.get("primary") == report.target.name:
                return report.target
    return _primary(group)


def find_primary(args: argparse.Namespace) -> Target:
    """The primary of the group that the arguments name. Raises LrqError if none answers."""
    return _primary(find_group(find_targets(args), args.group))


def _primary(group: Sequence[Target]) -> Target:
    reports = ask_all(group)
    say_if_several(reports)
    primary = primary_of(group[0].group, reports)
    if primary is None:
        said = "; ".join(f"{r.target.name}: {r.failure or r.status.get('role')}" for r in reports)
        raise LrqError(f"group {group[0].group} has no primary that answers, and only a primary can do this ({said})", todo="Promote one first")
    return primary.target
