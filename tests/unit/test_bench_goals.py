"""Figures of `make bench`: CPU time per message, goals, and the line of a row."""

from __future__ import annotations

import importlib
import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    names = ("__main__", "consuming", "cost", "matrix", "measure", "outstanding", "rivals", "scale", "sessions", "sites", "snapshot",
             "throughput")  # fmt: skip
    return SimpleNamespace(**{name: importlib.import_module(f"bench.{name}") for name in names})


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("pyspark", reason="PySpark is not installed")
    monkeypatch.syspath_prepend(str(ROOT))
    names = ("entries", "stream_failover", "stream_latency", "stream_query")
    return SimpleNamespace(**{name: importlib.import_module(f"bench.{name}") for name in names})


def turn(direct_us: float, brokers: list[float], sidecars: list[float], door_rate: float = 40.0, direct_rate: float = 50.0) -> dict[str, Any]:
    """A round. The sidecars' own CPU time in a direct run counts for nothing."""
    behind = {f"e{number}.broker": us for number, us in enumerate(brokers, 1)} | {f"e{number}.sidecar": us for number, us in enumerate(sidecars, 1)}
    idle = dict.fromkeys(behind, 0.7)
    return {"door": {"rate": door_rate, "cpu_us": behind}, "direct": {"rate": direct_rate, "cpu_us": idle | {"e1.broker": direct_us}}}


def judged(figures: list[Any]) -> list[tuple[str, float, float | None, bool]]:
    return [(figure.name, round(figure.value, 2), figure.goal, figure.ok) for figure in figures]


@pytest.mark.parametrize(
    ("kind", "direct_us", "broker_us", "sidecar_us", "expected"),
    [
        ("classic", 50.0, 54.9, 3.0, [("sidecar_us", 3.0, 3.0, True), ("cpu_ratio", 0.86, 0.85, True)]),
        ("classic", 49.6, 54.9, 3.3, [("sidecar_us", 3.3, 3.0, False), ("cpu_ratio", 0.85, 0.85, True)]),
        ("classic", 25.5, 27.7, 2.9, [("sidecar_us", 2.9, 3.0, True), ("cpu_ratio", 0.83, 0.85, False)]),
        ("quorum", 24.0, 28.0, 4.0, [("sidecar_us", 4.0, 5.0, True), ("cpu_ratio", 0.75, 0.75, True)]),
        ("quorum", 23.9, 36.5, 5.5, [("sidecar_us", 5.5, 5.0, False), ("cpu_ratio", 0.57, 0.75, False)]),
    ],
)
def test_the_goals_of_a_group_of_one(bench: Any, kind: str, direct_us: float, broker_us: float, sidecar_us: float, expected: list[Any]) -> None:
    found = bench.cost.compare([turn(direct_us, [broker_us], [sidecar_us])])
    assert judged(bench.throughput.figures_of_one(found, "4.3", kind)) == expected


@pytest.mark.parametrize(
    ("kind", "direct_us", "brokers", "sidecars", "multiple", "ok"),
    [
        ("classic", 49.3, [54.9, 54.7], [4.5, 7.5], 1.23, True),
        ("classic", 24.2, [26.4, 26.3], [4.0, 7.1], 1.32, False),
        ("quorum", 24.2, [26.4, 26.3], [4.0, 7.1], 1.32, True),
        ("quorum", 23.2, [29.2, 29.1], [6.5, 9.3], 1.60, False),
        ("quorum", 20.0, [22.0, 22.0, 22.0], [6.0, 6.0, 6.0], 1.40, True),
    ],
)
def test_the_goal_of_a_group_with_backups(
    bench: Any, kind: str, direct_us: float, brokers: list[float], sidecars: list[float], multiple: float, ok: bool
) -> None:
    """All brokers and sidecars ÷ as many brokers on their own."""
    found = bench.cost.compare([turn(direct_us, brokers, sidecars)])
    goal = {"classic": 1.25, "quorum": 1.5}[kind]
    assert judged(bench.throughput.figures_with_backups(found, "4.3", kind)) == [("cpu_multiple", multiple, goal, ok)]


def test_the_goal_of_a_consumer_that_keeps_up(bench: Any) -> None:
    """Both sidecars count together."""
    for sidecars, ok in (([12.0, 8.0], True), ([12.0, 8.1], False)):
        found = bench.cost.compare([turn(40.0, [45.0, 7.0], sidecars)])
        assert judged(bench.consuming.figures_of_pair(found, "4.3", "classic")) == [("sidecars_us", sum(sidecars), 20.0, ok)]


def test_ratios_are_taken_within_rounds_and_medians_count(bench: Any) -> None:
    rounds = [turn(10, [10], [10], 10, 100), turn(30, [20], [10], 90, 100), turn(20, [60], [20], 40, 50)]
    found = bench.cost.compare(rounds)
    assert found.cpu_ratio == 0.5
    assert (found.direct_us, found.brokers_us, found.sidecars_us) == (20, (20,), (10,))
    assert (found.ratio, found.least, found.most) == (0.8, 0.1, 0.9)
    assert (found.door_rate, found.direct_rate) == (40, 100)
    assert "sidecar 10.0 µs/msg, broker 20.0, 20.0 directly, CPU ratio 0.50" in str(found)
    assert "rate ratio 0.80, 0.10 to 0.90, 40 of 100 msg/s" in str(found)


def test_a_run_too_short_for_the_clock_is_short_of_its_goal(bench: Any) -> None:
    """Ticks are 10 ms: a row that is only tried out may have used none."""
    found = bench.cost.compare([turn(0.0, [28.0], [4.0])])
    figures = [*bench.throughput.figures_of_one(found, "4.3", "classic"), *bench.throughput.figures_with_backups(found, "4.3", "classic")]
    assert [figure.ok for figure in figures] == [False, False, False]
    assert "cpu_ratio=0.00 cpu_multiple=inf goal=3/0.85/1.25" in bench.measure.Row("P", figures, "").line()


def test_a_meter_reads_every_process_that_runs(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = SimpleNamespace(processes=lambda: {"e1.broker": os.getpid(), "e1.sidecar": None, "epmd": os.getpid()})
    assert bench.cost.cpu_of(lab).keys() == {"e1.broker"}
    assert bench.cost.cpu_of(lab)["e1.broker"] > 0
    used = iter([{"e1.broker": 1.0}, {"e1.broker": 1.5}])
    monkeypatch.setattr(bench.cost, "cpu_of", lambda _: next(used))
    assert bench.cost.Meter(lab).read(100_000)["cpu_us"] == {"e1.broker": 5.0}


def test_rounds_begin_with_the_other_side_each_time(bench: Any) -> None:
    assert [bench.cost.sides(number) for number in range(3)] == [("direct", "door"), ("door", "direct"), ("direct", "door")]


def test_cells_are_judged_by_the_goals_of_p1(bench: Any) -> None:
    measured = {("classic", 3.0, 30.0): [], ("classic", 3.1, 30.0): ["sidecar_us"], ("quorum", 5.0, 50.0): ["cpu_ratio"],
                ("quorum", 6.0, 50.0): ["sidecar_us", "cpu_ratio"]}  # fmt: skip
    cells = []
    for (kind, sidecar_us, broker_us), missed in measured.items():
        cell = bench.matrix.Cell("4.3", kind, "confirms", 100, 1)
        cells.append(bench.matrix.cell_of(cell, [turn(30.0, [broker_us], [sidecar_us])]))
        assert cells[-1]["missed"] == missed
    row = bench.matrix.summary(cells, [])
    assert row.line() == "P1M cells_missed=3 goal=0 short 4.3 of 4 cells 2 miss sidecar_us, 2 miss cpu_ratio"
    assert bench.matrix.summary(cells[:1], []).ok
    assert bench.matrix.table(cells).count("short") == 3


@pytest.mark.parametrize(("many_us", "kb", "ok"), [(8.0, 60.0, True), (8.1, 60.0, False), (8.0, 61.0, False)])
def test_the_cost_of_many_connections_is_cpu_time(bench: Any, many_us: float, kb: float, ok: bool) -> None:
    """The rate may fall as it likes."""
    single, many = bench.scale.SHAPES[:2]
    rounds = [{single: turn(25.0, [28.0], [4.0]), many: turn(30.0, [33.0], [many_us], door_rate=1.0)}]
    cells = [bench.scale.cell_of("4.3", shape, rounds) for shape in (single, many)]
    row = bench.scale.summary(cells, {"4.3": kb}, [])
    assert row.ok == ok
    assert row.line().startswith(f"P9 cost={many_us / 4:.2f} idle_kb={kb:.0f} goal=2/60 ")
    assert "10×1 sidecar" in row.details
    assert len(bench.scale.table(cells).splitlines()) == 3


@pytest.mark.parametrize(("rival", "least"), [("shovel", 1.5), ("cluster", 1.0)])
def test_each_rival_has_its_goal(bench: Any, rival: str, least: float) -> None:
    for rate, ok in ((least, True), (least - 0.01, False)):
        figure = bench.rivals.figure_beside(rival, "4.3 quorum", [{"door": {"rate": rate}, rival: {"rate": 1.0}}])
        assert (figure.goal, figure.ok) == (least, ok)


@pytest.mark.parametrize(
    ("name", "nodes", "expected"), [("p1", 1, ["sidecar_us", "cpu_ratio"]), ("p2", 2, ["cpu_multiple"]), ("p2b", 3, ["cpu_multiple"])]
)
def test_a_row_has_each_broker_and_kind_of_queue(bench: Any, monkeypatch: pytest.MonkeyPatch, name: str, nodes: int, expected: list[str]) -> None:
    asked = []

    def run(_lab: object, side: str, kind: str, queue: str, _plan: object) -> dict[str, Any]:
        asked.append(queue)
        found: dict[str, Any] = turn(25.0, [28.0] * nodes, [4.0] * nodes)[side] | {"applied_after_s": 0.5, "applied_rate": 30.0}
        return found

    monkeypatch.setattr(bench.throughput, "Lab", lambda groups, **_: nullcontext(groups))
    monkeypatch.setattr(bench.throughput, "_run", run)
    row = getattr(bench.throughput, name)(["3.10", "4.3"], bench.throughput.Plan(2))
    variants = [f"{broker} {kind}" for broker in ("3.10", "4.3") for kind in ("classic", "quorum")]
    assert [(figure.variant, figure.name) for figure in row.figures] == [(variant, name) for variant in variants for name in expected]
    assert asked[:4] == ["bench-classic-0-direct", "bench-classic-0-door", "bench-classic-1-door", "bench-classic-1-direct"]
    assert len(row.runs) == len(asked) == 16
    assert row.details.count("rate ratio 0.60 when counted to there") == (4 if nodes > 1 else 0)


def test_the_cost_of_the_tenth_site(bench: Any) -> None:
    runs = [{"sites": n, "site_us": us / n, "all_us": us, "bytes": 1.0 + n / 100, "rate": 1000.0 * n} for n, us in ((1, 2.0), (3, 3.0), (10, 6.5))]
    figures = {figure.name: (figure.value, figure.ok) for figure in bench.sites.figures_of("4.3", runs)}
    assert figures["tenth"] == (0.25, False)
    assert figures["bytes"] == (1.1, True)
    assert figures["per_s_3"] == (3000.0, False)
    assert figures["site_us_10"] == (0.65, True)


def test_the_sessions_alone_send_every_entry_to_every_site(bench: Any) -> None:
    row = bench.sessions.p4s(10)
    assert [run["sites"] for run in row.runs] == [1, 3, 10]
    assert next(figure for figure in row.figures if figure.name == "bytes").ok


def test_the_goals_of_plans_grow_with_the_queues(streams: Any) -> None:
    latency = {"step": "latency", "p50_ms": 300.0, "p99_ms": 1000.0, "rows_per_s": 1000.0, "cores": 1.2}
    plans = [{"step": "plan", "queues": count, "one_ms": ms, "all_ms": 5 * ms} for count, ms in ((1, 20.0), (100, 50.1), (300, 900.0), (1000, 200.0))]
    figures = {figure.name: (figure.goal, figure.ok) for figure in streams.stream_latency.figures_of("4.3", [latency, *plans])}
    assert figures["p99_ms"] == (1_000, True)
    assert figures["plan_1_ms"] == (20, True)
    assert figures["plan_100_ms"] == (50, False)
    assert figures["plan_300_ms"] == (None, True)
    assert figures["plan_1000_ms"] == (200, True)


@pytest.mark.parametrize(("kill_s", "missing", "twice", "ok"), [(3.0, 0, 0, True), (3.1, 0, 0, False), (3.0, 1, 0, False), (3.0, 0, 1, False)])
def test_a_failover_under_a_query_loses_nothing(streams: Any, kill_s: float, missing: int, twice: int, ok: bool) -> None:
    runs = [{"broker": "4.3.6", "kill_s": seconds, "promote_s": seconds, "active_s": 0.1} for seconds in (1.0, kill_s, 9.0)]
    row = streams.stream_failover.summary(runs, [{"missing": missing, "twice": twice}])
    assert row.ok == ok
    assert row.details == f"4.3.6: {kill_s:.2f} s (median of 3, 1.00 to 9.00)"


def test_the_rows_that_reach_a_query_are_counted(streams: Any) -> None:
    arrivals = streams.stream_query.Arrivals()
    payloads = [streams.entries.FORM.pack(float(number), number) for number in (0, 1, 1, 3)]
    rows = [SimpleNamespace(payload=payload) for payload in (None, *payloads)]
    arrivals.take(SimpleNamespace(select=lambda _: SimpleNamespace(collect=lambda: rows)), 0)
    assert (arrivals.missing(4), arrivals.twice()) == (1, 1)
    assert arrivals.first_due_after(0.5) is not None
    assert arrivals.first_due_after(3.0) is None


def test_the_memory_of_a_snapshot_is_to_be_flat(bench: Any) -> None:
    parts = {"source": 20.0, "sink": 20.1, "receiver": 1.0}
    run = {"broker": "4.3", "row_bytes": 1_000, "mb_s": 150.0, "spread_mb": parts, "peak_mb": parts, "cpu_ms_mb": {"source": 5.0}}
    figures = {figure.name: figure.ok for figure in bench.snapshot.summary([run], 1_000).figures}
    assert figures["mb_s"]
    assert figures["source_spread_mb"]
    assert not figures["sink_spread_mb"]
    assert figures["sink_peak_mb"]


def test_a_line_has_the_worst_variant_of_each_figure(bench: Any) -> None:
    make = bench.measure.Figure
    row = bench.measure.Row("P", [
        make("us", 4.0, 3, variant="a", digits=1), make("us", 5.5, 5, variant="b", digits=1),
        make("share", 0.8, 0.85, least=True), make("share", 0.6, 0.75, least=True), make("lost", 0, 0, digits=0), make("lost", 2, 0, digits=0),
        make("mb_s", 9.0, least=True), make("mb_s", 8.0, least=True),
    ], "details")  # fmt: skip
    assert row.line() == "P us=4.0 share=0.60 lost=2 mb_s=8.00 goal=3/0.75/0 short details"
    assert bench.measure.Row("P", [make("mb_s", 9.0, least=True)], "details").line() == "P mb_s=9.00 goal=none ok details"


def test_a_file_of_results_has_every_figure(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.measure, "RESULTS", tmp_path / "results")
    bench.measure.Row("P", [bench.measure.Figure("us", 4.0, 3, variant="4.3 quorum")], "details", runs=[{"rate": 1.0}]).save()
    saved = json.loads((tmp_path / "results" / "P.json").read_text())
    assert saved["figures"] == [{"name": "us", "value": 4.0, "goal": 3, "least": False, "variant": "4.3 quorum", "digits": 2, "ok": False}]
    assert saved.keys() == {"line", "figures", "machine", "cells", "runs"}


def test_every_row_stands_in_the_documents(bench: Any) -> None:
    rows = set(bench.__main__.ROWS | bench.__main__.LONG)
    assert set(re.findall(r"^\| (P\d+[A-Z]?) \|", (ROOT / "docs" / "benchmarks.md").read_text("utf-8"), re.MULTILINE)) == rows
    assert set(re.findall(r"\bP\d+[A-Z]?\b", (ROOT / "Makefile").read_text("utf-8"))) == rows
