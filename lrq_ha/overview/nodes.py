"""The table of a group's nodes, as `lrq-ha list` and the page of a sidecar show it. No I/O.

Rule: a backup's lag and its place in the in-sync set come from its primary, if that answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from lrq_ha.replication.positions import epoch_name

from .asking import Report
from .text import Table, format_cell, format_size, one_line

HEADINGS = ("NODE", "GROUP", "ROLE", "EPOCH", "IN SYNC", "LOG END", "LAG", "LAG S", "LOG LEFT")
NO_ANSWER = "no answer"


def primary_of(group: str, reports: Sequence[Report]) -> Report | None:
    """The primary of a group: if several claim the role, the one with the highest epoch."""
    return max(primaries_of(group, reports), key=Report.epoch, default=None)


def primaries_of(group: str, reports: Sequence[Report]) -> list[Report]:
    """All nodes of a group that claim to be its primary."""
    return [report for report in reports if report.target.group == group and report.is_primary]


def node_table(reports: Sequence[Report]) -> Table:
    """The nodes; about each of them, the start of its role and the reason."""
    primaries = {report.target.group: primary_of(report.target.group, reports) for report in reports}
    rows = [_row(report, primaries[report.target.group]) for report in reports]
    return Table("", HEADINGS, rows, [(report.target.name, why) for report in reports if (why := describe_role(report))])


def describe_role(report: Report) -> str:
    """The time since which a node has its role, and the reason; or the failed attempt."""
    reason = str(report.status.get("reason") or "")
    if report.status.get("paused") and "paused" not in reason:
        reason += "; paused: takes no epoch by itself until lrq-ha resume"
    etcd = report.status.get("coordination") or {}
    if etcd.get("etcd", "answers") != "answers":
        reason += f"; since {datetime.fromtimestamp(etcd['since']).isoformat(' ', 'seconds')}: {etcd['etcd']}"
    return ": ".join(filter(None, (report.since(), reason))) or report.failure


def describe_coordination(group: str, reports: Sequence[Report]) -> str:
    """What etcd has of a group, by a node that etcd answers; empty with static coordination."""
    told = [found for report in reports if report.target.group == group and (found := report.status.get("coordination"))]
    answered = [found for found in told if found["etcd"] == "answers"]
    if not told:
        return ""
    if not answered:
        return f"{group}: etcd answers no node: no node takes an epoch, and no silent node is taken out of the set"
    newest = max(answered, key=lambda found: int(found["version"]))
    leader = f"{newest['leader']} has the lease" if newest["leader"] else "no node has the lease"
    return one_line(f"{group}: etcd: {leader}; in the set: {', '.join(newest['set']) or 'no node'}")


def values_of(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """The nodes for JSON: each as {name, group, http, answers, failure, status}."""
    return [
        {
            "name": report.target.name,
            "group": report.target.group,
            "http": report.target.http,
            "answers": not report.failure,
            "failure": report.failure or None,
            "status": report.status or None,
        }
        for report in reports
    ]


def _row(report: Report, primary: Report | None) -> tuple[str, ...]:
    target, status = report.target, report.status
    lag: dict[str, Any] = {}
    in_sync = status.get("in_set")
    if primary and primary is not report:
        lag = (primary.status.get("peers") or {}).get(target.name) or {}
        in_sync = target.name in (primary.status.get("members") or [])
    return (
        target.name,
        target.group,
        str(status.get("role", "?")) if status else NO_ANSWER,
        _epoch(status.get("epoch")),
        "-" if in_sync is None else "yes" if in_sync else "no",
        *map(format_cell, (status.get("end"), lag.get("lag_entries"), lag.get("lag_seconds"))),
        format_size(lag.get("log_bytes_left")),
    )


def _epoch(value: object) -> str:
    return epoch_name(value) if isinstance(value, int) else format_cell(value)
