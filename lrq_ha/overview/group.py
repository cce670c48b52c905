"""A whole group in one value, for GET /cluster. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .asking import Report
from .nodes import describe_coordination, node_table, primaries_of, primary_of, values_of
from .sites import site_tables
from .text import NUMBERS, Table


def group_values(group: str, reports: Sequence[Report]) -> dict[str, Any]:
    """A group for JSON.

    Returns:
        group: Its name.
        primary: Name of its primary; None: no node that answers serves clients.
        in_sync: Names of the nodes of the in-sync set, as the primary tells them.
        coordination: What etcd has of the group; empty with static coordination.
        trouble: What is wrong with the group as a whole; empty: nothing.
        nodes: As `values_of` gives them.
        tables: The tables of `lrq-ha list`, each as `table_values` gives it.
    """
    primary = primary_of(group, reports)
    tables = [node_table(reports), *(site_tables(group, primary.status) if primary else [])]
    return {
        "group": group,
        "primary": primary.target.name if primary else None,
        "in_sync": list(primary.status.get("members") or []) if primary else [],
        "coordination": describe_coordination(group, reports),
        "trouble": _describe_trouble(group, reports),
        "nodes": values_of(reports),
        "tables": [table_values(table) for table in tables],
    }


def table_values(table: Table) -> dict[str, Any]:
    """A table for JSON: {title, headings, rows, remarks}, and `numbers`: whether each column has numbers."""
    return table._asdict() | {"numbers": [heading in NUMBERS for heading in table.headings]}


def _describe_trouble(group: str, reports: Sequence[Report]) -> str:
    primaries = primaries_of(group, reports)
    if not primaries:
        silent = ", ".join(report.target.name for report in reports if report.failure)
        return f"no node that answers is primary; no answer: {silent}" if silent else "no node is primary: clients are not served"
    if len(primaries) > 1:
        return f"several nodes say that they are primary: {', '.join(report.target.name for report in primaries)}; the highest epoch counts"
    configured, members = len(reports), primaries[0].status.get("members") or []
    if configured > 1 and len(members) == 1:
        return f"{primaries[0].target.name} is alone in the in-sync set: its loss would stop the group, and may lose messages"
    return ""
