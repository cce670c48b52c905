"""The leaders of a group that etcd coordinates, as a table. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lrq_ha.replication.register import Why

from .text import Table, format_cell

_HEADINGS = ("SINCE", "EPOCH", "LEADER", "BEFORE", "WHY", "LOG END", "MS")
WHY_TEXTS = {
    Why.LEASE.value: "the lease of the leader before was gone",
    Why.SWITCHOVER.value: "the leader before handed over",
    Why.RESTART.value: "it started again",
    Why.ALL.value: "all nodes answered",
    Why.OPERATOR.value: "an operator promoted it",
}


def history_table(told: Sequence[Mapping[str, Any]]) -> Table:
    """The leaders, the newest last. `told`: as `Register.read_history` gives it."""
    return Table("", _HEADINGS, [_row(each) for each in told])


def _row(told: Mapping[str, Any]) -> list[str]:
    why, steps = told.get("why"), told.get("steps") or {}
    cells = (str(told.get("at"))[:19].replace("T", " "), told.get("epoch"), told.get("leader"), told.get("from"), WHY_TEXTS.get(str(why), why))
    return [format_cell(cell) for cell in (*cells, told.get("end"), steps.get("all"))]
