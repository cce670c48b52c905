"""`lrq-ha check`: one condition of a group in one line, with the exit codes of Nagios' plugins."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lrq_ha.errors import LrqError, MalformedInput
from lrq_ha.overview.asking import Report, ask_all
from lrq_ha.overview.nodes import primary_of
from lrq_ha.overview.text import one_line
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar.http.probes import DEFAULT_LIMIT, Limit, parse_limit

from .commands import add_group, find_group
from .list_nodes import add_command, find_targets

OK, WARNING, CRITICAL, UNKNOWN = range(4)
_WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
EXPIRES_SOON_DAYS, EXPIRES_NOW_DAYS = 30.0, 7.0
_DAY_S = 86_400.0
#: Of the three units of a lag, where a primary's status has it, and how it is shown.
_LAGS = {"entries": ("lag_entries", "{:.0f} entries"), "bytes": ("lag_bytes", "{:.0f} bytes"), "seconds": ("lag_seconds", "{:.1f} s")}


class Verdict(NamedTuple):
    """An exit code and its text."""

    code: int
    text: str


@dataclass(frozen=True)
class Group:
    """The nodes of a group, and its primary."""

    name: str
    reports: Sequence[Report]
    primary: Report | None

    @property
    def silent(self) -> list[str]:
        return [report.target.name for report in self.reports if report.failure]

    @property
    def members(self) -> list[str]:
        """The in-sync set, as the primary says."""
        return list(self.primary.status.get("members") or []) if self.primary else []

    @property
    def others(self) -> list[str]:
        """The nodes but the primary."""
        return [report.target.name for report in self.reports if report is not self.primary]


def judge_running(group: Group, _: argparse.Namespace) -> Verdict:
    """A node serves clients, and all others answer and take part."""
    if group.primary is None:
        return Verdict(CRITICAL, f"group {group.name} has no primary: lrq-ha list says why; lrq-ha promote NODE makes one")
    aside = [report.target.name for report in group.reports if report.status.get("role") == Role.STANDALONE.value]
    if wrong := [*(f"{name} does not answer" for name in group.silent), *(f"{name} takes no part" for name in aside)]:
        return Verdict(WARNING, f"{'; '.join(wrong)}: see lrq-ha list")
    return Verdict(OK, f"{group.primary.target.name} is primary, {len(group.reports)} nodes run")


def judge_alarms(group: Group, _: argparse.Namespace) -> Verdict:
    """No broker has an alarm, or takes nothing."""
    blocked = [(report.target.name, why) for report in group.reports if (why := (report.status.get("broker") or {}).get("blocked"))]
    if blocked:
        return Verdict(CRITICAL, "; ".join(f"{name}: {why}" for name, why in blocked))
    return Verdict(WARNING, f"{', '.join(group.silent)} not asked: see lrq-ha list") if group.silent else Verdict(OK, "no broker has an alarm")


def judge_in_sync(group: Group, _: argparse.Namespace) -> Verdict:
    """All nodes are in the in-sync set."""
    if group.primary is None:
        return Verdict(CRITICAL, f"group {group.name} has no primary: see lrq-ha list")
    out = [name for name in group.others if name not in group.members]
    if out:
        return Verdict(WARNING if len(group.members) > 1 else CRITICAL, f"not in sync: {', '.join(out)}: see lrq-ha list")
    return Verdict(OK, f"in sync: {', '.join(group.members)}")


def judge_redundant(group: Group, _: argparse.Namespace) -> Verdict:
    """A confirmed message is on two nodes at least."""
    if group.primary is None:
        return Verdict(CRITICAL, f"group {group.name} has no primary: see lrq-ha list")
    if len(group.members) < 2:
        return Verdict(CRITICAL, f"what is confirmed is on {group.primary.target.name} alone: start a backup, see lrq-ha list")
    return Verdict(OK, f"what is confirmed is on {len(group.members)} nodes")


def judge_lag(group: Group, args: argparse.Namespace) -> Verdict:
    """Each backup lacks no more of the primary's log than --max."""
    if group.primary is None:
        return Verdict(CRITICAL, f"group {group.name} has no primary: see lrq-ha list")
    limit: Limit = args.max
    key, form = _LAGS[limit.unit]
    lags = {name: (group.primary.status.get("peers") or {}).get(name, {}).get(key) for name in group.others}
    unknown = [name for name, lag in lags.items() if lag is None]
    behind = [f"{name} lacks {form.format(lag)}" for name, lag in lags.items() if lag is not None and lag > limit.most]
    if behind or unknown:
        return Verdict(CRITICAL, f"{'; '.join([*behind, *(f'the lag of {name} is not known' for name in unknown)])}: see lrq-ha list")
    most = max((lag for lag in lags.values() if lag is not None), default=0)
    return Verdict(OK, f"no backup lacks more than {form.format(most)}")


def judge_certificates(group: Group, _: argparse.Namespace) -> Verdict:
    """The certificates of doors and HTTP are valid for 30 days (critical: 7)."""
    left = {
        f"{report.target.name} {listener}": (at - time.time()) / _DAY_S
        for report in group.reports
        for listener, at in (report.status.get("certificates") or {}).items()
    }
    soon = {name: days for name, days in left.items() if days < EXPIRES_SOON_DAYS}
    if soon:
        told = ", ".join(f"{name} {f'in {days:.0f} days' if days > 0 else 'has expired'}" for name, days in soon.items())
        return Verdict(CRITICAL if min(soon.values()) < EXPIRES_NOW_DAYS else WARNING, f"certificates expire: {told}: replace the files")
    if group.silent:
        return Verdict(WARNING, f"{', '.join(group.silent)} not asked: see lrq-ha list")
    return Verdict(OK, f"{len(left)} certificates are valid for {EXPIRES_SOON_DAYS:.0f} days")


CONDITIONS: Mapping[str, Callable[[Group, argparse.Namespace], Verdict]] = {
    "running": judge_running, "alarms": judge_alarms, "in-sync": judge_in_sync, "lag": judge_lag, "redundant": judge_redundant,
    "certificates": judge_certificates,
}  # fmt: skip


def _limit(text: str) -> Limit:
    try:
        return parse_limit(text)
    except MalformedInput as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `check`."""
    check = add_command(
        subparsers,
        "check",
        "one condition of a group in one line, for Nagios and scripts",
        "Conditions:\n" + "\n".join(f"  {name:<12}  {judge.__doc__}" for name, judge in CONDITIONS.items()),
        "Exit code 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.\n\nexamples:\n  lrq-ha check redundant\n  lrq-ha check lag --max 10MB",
    )
    add_group(check)
    check.add_argument("condition", choices=tuple(CONDITIONS), metavar="CONDITION", help="the condition: " + ", ".join(CONDITIONS))
    text = f"with lag: entries (1000), bytes (10MB) or seconds (5s); default: {DEFAULT_LIMIT.most:g}"
    check.add_argument("--max", type=_limit, default=DEFAULT_LIMIT, metavar="LAG", help=text)
    check.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        targets = find_group(find_targets(args), args.group)
        reports = ask_all(targets)
        group = Group(targets[0].group, reports, primary_of(targets[0].group, reports))
        verdict = CONDITIONS[args.condition](group, args)
    except LrqError as error:
        verdict = Verdict(UNKNOWN, str(error))
    print(one_line(f"{_WORDS[verdict.code]} - {' '.join(verdict.text.split())}"))
    return verdict.code
