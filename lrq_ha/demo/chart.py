"""The picture of the report: mean departure delay by carrier and by month."""

from __future__ import annotations

import calendar
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lrq_ha.demo.report import Report

INK = "#1f2933"
FAINT = "#7b8794"
BAR = "#3f72af"
BAR_TOP = "#c8553d"


def draw_delays(report: Report, path: Path) -> None:
    """Writes a PNG to `path`."""
    margins = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12, wspace=0.04)
    carriers = sorted((one for one in report.by_carrier if one.mean is not None), key=lambda one: one.mean or 0)
    months = [one for one in report.by_month if one.mean is not None and one.month is not None]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6), width_ratios=(1.15, 1), layout=margins, facecolor="white")
    known = sum(one.count for one in report.by_month)
    minutes = sum(one.sum for one in report.by_month)
    overall = f", {minutes / known:.1f} minutes late on average" if known else ""
    figure.suptitle(f"Departure delays: {known:,} departures{overall}", fontsize=15, color=INK, fontweight="bold")

    values = [one.mean or 0.0 for one in carriers]
    bars = left.barh([one.name or one.carrier or "unknown" for one in carriers], values, color=_colours(values), height=0.72)
    left.bar_label(bars, [f"{value:.1f}" for value in values], padding=4, color=INK, fontsize=9)
    _style(left, "by carrier, minutes", "x")

    values = [one.mean or 0.0 for one in months]
    bars = right.bar([_month(one.month) for one in months], values, color=_colours(values), width=0.72)
    right.bar_label(bars, [f"{value:.1f}" for value in values], padding=3, color=INK, fontsize=9)
    _style(right, "by month, minutes", "y")

    figure.savefig(path, dpi=130)
    plt.close(figure)


def _month(number: int | None) -> str:
    return calendar.month_abbr[number] if number and 1 <= number <= 12 else str(number)


def _colours(values: list[float]) -> list[str]:
    return [BAR_TOP if value == max(values) else BAR for value in values]


def _style(axes: Any, title: str, value_axis: str) -> None:
    """Every bar carries its value, so the value axis shows its zero only."""
    axes.set_title(title, loc="left", color=INK, fontsize=12, pad=10)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=INK, labelsize=10)
    if value_axis == "x":
        axes.set_xticks([])
        axes.axvline(0, color=FAINT, linewidth=1)
        axes.margins(x=0.1, y=0.02)
    else:
        axes.set_yticks([])
        axes.axhline(0, color=FAINT, linewidth=1)
        axes.margins(x=0.02, y=0.08)
