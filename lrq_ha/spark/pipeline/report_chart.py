"""The picture of a pipeline's report: figures of its versions over time, as SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from lrq_ha.spark.pipeline.history import VersionFigures

INK = "#1f2933"
FAINT = "#cbd2d9"
COLOURS = ("#3f72af", "#c8553d", "#588157", "#8d6a9f", "#e0a030", "#2a9d8f", "#7b8794", "#b5838d")
#: Tables with a line of their own: those with the most rows.
TABLES_MAX = len(COLOURS)
SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lrq-ha",
    "date.converter": "concise",
    "text.parse_math": False,  # a $ in a table's name is a $
}

Series = dict[str, list[float | None]]
"""Name of a line -> its values, one for each version."""


def draw_versions(versions: Sequence[VersionFigures]) -> str:
    """An element <svg> with a panel for each figure that is recorded: rows, lag, changes, seconds."""
    panels = {title: series for title, series in _panels(versions).items() if any(value is not None for line in series.values() for value in line)}
    times = [one.time for one in versions]
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(11, 2.3 * max(1, len(panels))), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0] if panels else ()
        for one, (title, series) in zip(axes, panels.items(), strict=True):
            _draw(one, title, times, series)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _panels(versions: Sequence[VersionFigures]) -> dict[str, Series]:
    newest = versions[-1].rows if versions else {}
    largest = sorted(newest, key=lambda name: (-newest[name], name))[:TABLES_MAX]
    return {
        "rows of the tables": {name: [one.rows.get(name) for one in versions] for name in largest},
        "lag in seconds": {"lag": [one.lag_s for one in versions]},
        "rows changed by a version": {"put": [one.put for one in versions], "deleted": [one.deleted for one in versions]},
        "seconds for a version": {"seconds": [one.seconds for one in versions]},
    }


def _draw(axes: Any, title: str, times: Sequence[datetime], series: Series) -> None:
    for colour, (name, values) in zip(COLOURS, series.items()):
        marker = "o" if len(times) <= 50 else None
        known = [(time, value) for time, value in zip(times, values, strict=True) if value is not None]
        axes.plot([time for time, _ in known], [value for _, value in known], color=colour, label=name, marker=marker, markersize=3, linewidth=1.4)
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    if all(value is None or value >= 0 for line in series.values() for value in line):  # a lag by two clocks may be negative
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.tick_params(colors=INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    if len(series) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
