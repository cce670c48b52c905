"""The tables below that of the nodes: the sites to which a primary sends, the receive queues of its group, and their receivers. No I/O.

Rules: they are made of the primary's status; a table without rows is left out. Of more than ROWS_MAX rows the sessions and receivers that lack
most, and the queues with an open demand, are shown.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .text import Table, align_table, format_cell, format_size, one_line, wrap_remark

ROWS_MAX = 100

_SITE_HEADINGS = ("SITE", "CLIENT", "STATE", "LAG", "LAG S", "LEFT")
_QUEUE_HEADINGS = ("SOURCE", "CLIENT", "LAST", "AGE S", "SNAPSHOT", "DEMAND")
_RECEIVER_HEADINGS = ("RECEIVER", "SOURCE", "CLIENT", "PHASE", "LAG")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table.

    Attributes:
        cells: Its texts.
        remark: A text about it, below the table; empty: there is none.
        weight: Of more rows than are shown, those with the greatest are.
    """

    cells: tuple[str, ...]
    remark: str = ""
    weight: float = 0.0


def site_lines(group: str, status: Mapping[str, Any], width: int | None) -> list[str]:
    """The tables of a group as lines, each with an empty line and a title before it. `width`: see `wrap_remark`."""
    lines: list[str] = []
    for table in site_tables(group, status):
        remarks = (line for about, text in table.remarks for line in wrap_remark(one_line(about), text, width))
        lines += ["", one_line(table.title), *align_table(table.headings, table.rows), *([""] if table.remarks else []), *remarks]
    return lines


def site_tables(group: str, status: Mapping[str, Any]) -> list[Table]:
    """The tables of a group that have rows.

    Args:
        group: The group's name.
        status: Of its primary.
    """
    sites: Mapping[str, Any] = status.get("sessions") or {}
    queues: Mapping[str, Any] = status.get("receiving") or {}
    links = [(name, str(site.get("problem") or "no link")) for name, site in sites.items() if not site.get("connected")]
    tables = [
        _table(f"sites to which {group} sends:", _SITE_HEADINGS, list(_site_rows(sites)), links),
        _table(f"receive queues of {group}:", _QUEUE_HEADINGS, [_queue_row(queue) for queue in queues.values()], []),
        _table(f"receivers at {group}:", _RECEIVER_HEADINGS, list(_receiver_rows(queues)), []),
    ]
    return [table for table in tables if table.rows]


def _table(title: str, headings: Sequence[str], rows: Sequence[Row], remarks: Sequence[tuple[str, str]]) -> Table:
    numbers = sorted(heapq.nlargest(ROWS_MAX, range(len(rows)), key=lambda number: rows[number].weight))
    shown = [rows[number] for number in numbers]
    about = [*remarks, *(("  ".join(row.cells[:2]), row.remark) for row in shown if row.remark)]
    if len(shown) < len(rows):
        about.append(("...", f"and {len(rows) - len(shown)} more: lrq-ha list --format json"))
    return Table(title, headings, [row.cells for row in shown], about)


def _site_rows(sites: Mapping[str, Any]) -> Iterator[Row]:
    for name, site in sites.items():
        clients: Mapping[str, Any] = site.get("clients") or {}
        if not clients:
            yield Row((name, "-", "connected" if site.get("connected") else "not connected", "-", "-", "-"))
        for client, session in clients.items():
            lag = session.get("lag_entries")
            cells = (*map(format_cell, (session.get("state"), lag, session.get("lag_seconds"))), format_size(session.get("bytes_left")))
            remark = "; ".join(filter(None, (_describe_snapshot(session.get("snapshot")), str(session.get("problem") or ""))))
            yield Row((name, client, *cells), remark, math.inf if lag is None else float(lag))


def _describe_snapshot(snapshot: Mapping[str, Any] | None) -> str:
    if not snapshot:
        return ""
    return f"full sync: {snapshot.get('rows')} rows, {format_size(snapshot.get('bytes'))}, attempt {snapshot.get('attempts')}"


def _queue_row(queue: Mapping[str, Any]) -> Row:
    snapshot: Mapping[str, Any] = queue.get("snapshot") or {}
    under_way = snapshot.get("begun") and not snapshot.get("complete")
    state = ", ".join(filter(None, ("whole" if snapshot.get("whole") else "", "under way" if under_way else ""))) or "none"
    demand = str(queue.get("demand") or "")
    last = str(queue.get("last") or "-").rpartition(".")[2]  # the sequence, as LOG END of the source
    cells = (*map(format_cell, (queue.get("source"), queue.get("client"), last, queue.get("age_s"))), state, "open" if demand else "-")
    return Row(cells, f"a full sync is demanded: {demand}" if demand else "", float(bool(demand)))


def _receiver_rows(queues: Mapping[str, Any]) -> Iterator[Row]:
    for queue in queues.values():
        for name, receiver in (queue.get("receivers") or {}).items():
            lag = receiver.get("lag_entries")
            cells = (name, *map(format_cell, (queue.get("source"), queue.get("client"), receiver.get("phase"), lag)))
            yield Row(cells, str(receiver.get("problem") or ""), weight=math.inf if lag is None else float(lag))
