"""The page of a pipeline's report: one HTML file that needs no other. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path

from lrq_ha.spark.pipeline.history import Failure, VersionFigures
from lrq_ha.spark.pipeline.manifest import Manifest, QueueState

VERSIONS_SHOWN = 50
FAILURES_SHOWN = 20
UNITS = ("KiB", "MiB", "GiB", "TiB")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .2rem .8rem; border-bottom: 1px solid #e4e7eb; text-align: left; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; } svg { max-width: 100%; height: auto; }
"""

Cell = str | int | float | None
"""Of a table. None: not recorded."""


def format_page(path: Path, manifest: Manifest, versions: Sequence[VersionFigures], failures: Sequence[Failure], chart: str) -> str:
    """The text of the file.

    Args:
        path: Of the tables.
        manifest: The newest version.
        versions: Figures of versions, ascending, the newest one included.
        failures: In order of time.
        chart: An element <svg>.
    """
    newest = versions[-1]
    writer = f" by process {manifest.writer.pid} on {escape(manifest.writer.host)}" if manifest.writer else ""
    parts = [
        f"<h1>Tables under {escape(str(path))}</h1>",
        f"<p>Version {manifest.version}, made at {_time(newest.time)}{writer}. {sum(newest.rows.values()):,} rows in {len(newest.rows)} tables, "
        f"{_size(sum(newest.bytes.values()))}. {_lag(newest)}</p>",
        f"<h2>Versions {versions[0].version} to {newest.version} over time (UTC)</h2>",
        chart,
        "<h2>Tables</h2>",
        _tables(manifest),
        "<h2>Queues</h2>",
        _queues(manifest),
        "<h2>Failures of jobs</h2>",
        _failures(failures),
        "<h2>Newest versions</h2>",
        _versions(versions),
    ]
    title = f"Tables under {escape(str(path))}"
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _lag(newest: VersionFigures) -> str:
    return "Its lag is not recorded." if newest.lag_s is None else f"It was {newest.lag_s:,.1f} s behind its source."


def _tables(manifest: Manifest) -> str:
    rows = []
    for name, table in sorted(manifest.tables.items()):
        size = sum(file.bytes for file in table.files)
        rows.append((name, ", ".join(table.key), sum(file.rows for file in table.files), len(table.files), _size(size)))
    return _table(("table", "key", "rows", "files", "size"), rows)


def _queues(manifest: Manifest) -> str:
    bad: dict[str, int] = defaultdict(int)
    for file in manifest.quarantine:
        bad[file.queue] += file.rows
    rows = [(name, str(state.position), _state(manifest, state), bad[name]) for name, state in sorted(manifest.queues.items())]
    return _table(("queue", "applied up to", "state", "in quarantine"), rows)


def _state(manifest: Manifest, state: QueueState) -> str:
    found = []
    if state.base is None and manifest.need_snapshot:
        found.append("waits for its first full snapshot")
    if state.hole is not None:
        found.append(f"deltas from {state.hole} on wait for a full snapshot")
    if state.open is not None:
        found.append(f"a full snapshot is under way since {state.open.begin}")
    return "; ".join(found) or "deltas are applied"


def _failures(failures: Sequence[Failure]) -> str:
    if not failures:
        return "<p>None is recorded.</p>"
    shown = [(_time(one.time), one.failed) for one in failures[: -FAILURES_SHOWN - 1 : -1]]
    return f"<p>{len(failures)} recorded; the newest come first.</p>" + _table(("time", "error"), shown)


def _versions(versions: Sequence[VersionFigures]) -> str:
    heads = ("version", "made at", "put", "deleted", "bad", "rows", "in quarantine", "seconds", "lag in seconds")
    shown = [
        (one.version, _time(one.time), one.put, one.deleted, one.bad, sum(one.rows.values()), one.quarantined, one.seconds, one.lag_s)
        for one in versions[: -VERSIONS_SHOWN - 1 : -1]
    ]
    return _table(heads, shown)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    numeric = [any(isinstance(row[at], int | float) for row in rows) for at in range(len(heads))]
    lines = [_line("th", heads, numeric), *(_line("td", row, numeric) for row in rows)]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _line(tag: str, cells: Iterable[Cell], numeric: Sequence[bool]) -> str:
    made = (f'<{tag}{" class=number" if is_number else ""}>{_text(cell)}</{tag}>' for cell, is_number in zip(cells, numeric, strict=True))
    return f"<tr>{''.join(made)}</tr>"


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    return escape(cell) if isinstance(cell, str) else f"{cell:,.1f}" if isinstance(cell, float) else f"{cell:,}"


def _time(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S}"


def _size(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(UNITS))
    return f"{count / 1024**power:,.1f} {UNITS[power - 1]}"
