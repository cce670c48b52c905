"""P9: what a message costs with many connections, or many channels on one connection, beside one of each; and what an idle connection holds.

Rules: in all shapes, together, as many messages are unconfirmed and as many go out in one write, so that the number of connections or channels
is all that differs. Shapes take turns within a round, door and direct within a shape; a shape is compared with the single one of its round.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from lrq_ha.lab import Lab
from lrq_ha.replication.errors import LrqError

from .measure import Row, applied, cpu_of, declare, delete, go, memory_bytes, note, ready

GOAL = 1.2
GOAL_IDLE_KB = 60
SIZE_BYTES = 1024
WINDOW_MESSAGES = 10_000  # over all connections and channels
BATCH_MESSAGES = 5
SHAPES = ((1, 1), (10, 1), (100, 1), (1_000, 1), (1, 10), (1, 100), (1, 1_000))  # connections, channels on each
IDLE_CONNECTIONS = 1_000
IDLE_WARM = 20  # connections before the first reading: what the first one loads is no cost of the others
SETTLE_S = 2.0


@dataclass(frozen=True)
class Plan:
    """How much is measured: rounds, and messages of each."""

    rounds: int = 3
    messages: int = 80_000


SHORT = Plan(1, 20_000)


def p9(brokers: list[str], plan: Plan) -> Row:
    """The worst shape of the worst broker counts, and the goal of idle connections is to be met as well."""
    runs: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    idle: dict[str, float] = {}
    for broker in brokers:
        with Lab({"east": 1}, broker=broker, sites={}) as lab:
            idle[broker] = _idle_kb(lab)  # before anything else has made room in the sidecar's memory
            note(f"P9 {broker} {idle[broker]:.1f} KB per idle connection")
            rounds = [{shape: _round(lab, shape, number, plan) for shape in SHAPES} for number in range(plan.rounds)]
            runs += [run for each in rounds for pair in each.values() for run in pair.values()]
            cells += [_figures(broker, shape, rounds) for shape in SHAPES]
    note("P9, all shapes\n" + table(cells))
    return summary(cells, idle, runs)


def summary(cells: list[dict[str, Any]], idle: dict[str, float], runs: list[dict[str, Any]]) -> Row:
    """The row of these shapes and idle connections."""
    worst = max(cells, key=lambda cell: float(max(cell["cpu_growth"], cell["ratio_growth"])))
    figure, idle_kb = max(worst["cpu_growth"], worst["ratio_growth"]), max(idle.values())
    details = [f"idle_kb={idle_kb:.0f} goal={GOAL_IDLE_KB}", f"worst {worst['broker']}, {worst['connections']} conn × {worst['channels']} ch"]
    for broker in idle:
        parts = [f"{cell['connections']}×{cell['channels']} {cell['sidecar_us']:.1f} µs ({cell['cpu_growth']:.2f}), "
                 f"ratio {cell['ratio']:.2f} ({cell['ratio_growth']:.2f})" for cell in cells if cell["broker"] == broker]
        details.append(f"{broker}: {idle[broker]:.1f} KB; " + ", ".join(parts))
    ok = figure <= GOAL and idle_kb <= GOAL_IDLE_KB
    return Row("P9", f"cost={figure:.2f}", f"{GOAL:g}", ok, "; ".join(details), runs, [*cells, {"idle_kb": idle}])


def table(cells: list[dict[str, Any]]) -> str:
    """The shapes as text, a line each. `×` is a figure ÷ that of the single connection and channel, upside down for the ratio."""
    lines = [f"{'broker':7}{'conn':>6}{'chan':>6}{'sidecar µs':>12}{'×':>7}{'door ÷ direct':>15}{'×':>7}{'direct/s':>10}{'door/s':>10}"]
    for cell in cells:
        lines.append(f"{cell['broker']:7}{cell['connections']:6}{cell['channels']:6}{cell['sidecar_us']:12.1f}{cell['cpu_growth']:7.2f}{cell['ratio']:15.2f}"
                     f"{cell['ratio_growth']:7.2f}{cell['direct_rate']:10,.0f}{cell['door_rate']:10,.0f}")
    return "\n".join(lines)


_Rounds = list[dict[tuple[int, int], dict[str, dict[str, Any]]]]


def _figures(broker: str, shape: tuple[int, int], rounds: _Rounds) -> dict[str, Any]:
    def cpu(each: tuple[int, int], number: int) -> float:
        return float(rounds[number][each]["door"]["cpu_us"]["e1.sidecar"])

    def ratio(each: tuple[int, int], number: int) -> float:
        return float(rounds[number][each]["door"]["rate"] / rounds[number][each]["direct"]["rate"])

    numbers = range(len(rounds))
    return {
        "broker": broker, "connections": shape[0], "channels": shape[1],
        "sidecar_us": median(cpu(shape, number) for number in numbers), "ratio": median(ratio(shape, number) for number in numbers),
        "cpu_growth": median(cpu(shape, number) / cpu(SHAPES[0], number) for number in numbers),
        "ratio_growth": median(ratio(SHAPES[0], number) / ratio(shape, number) for number in numbers),
        "direct_rate": median(each[shape]["direct"]["rate"] for each in rounds), "door_rate": median(each[shape]["door"]["rate"] for each in rounds),
    }


def _round(lab: Lab, shape: tuple[int, int], number: int, plan: Plan) -> dict[str, dict[str, Any]]:
    sides = ("door", "direct") if number % 2 else ("direct", "door")
    return {side: _run(lab, shape, side, plan) for side in sides}


def _run(lab: Lab, shape: tuple[int, int], side: str, plan: Plan) -> dict[str, Any]:
    url, queue = lab.nodes["e1"].door if side == "door" else lab.nodes["e1"].broker, f"bench-scale-{side}"
    connections, channels = shape
    declare(url, queue, "classic")
    with ready("publish", url=url, queue=queue, messages=plan.messages, size_bytes=SIZE_BYTES, connections=connections, channels=channels,
               window=WINDOW_MESSAGES // (connections * channels), batch=BATCH_MESSAGES, warm_up=plan.messages // 10) as process:
        load, before = os.getloadavg(), cpu_of(lab)
        result = go(process)
        used = cpu_of(lab)
    cpu_us = {key: 1e6 * (used[key] - before[key]) / plan.messages for key in used}
    delete(url, queue)
    applied(lab)
    note(f"P9 {lab.version} {connections} × {channels} {side}: {result['rate']:,.0f} msg/s, sidecar {cpu_us['e1.sidecar']:.1f} µs/msg")
    return result | {"connections": connections, "channels": channels, "side": side, "broker": lab.version, "load": load, "cpu_us": cpu_us}


def _idle_kb(lab: Lab) -> float:
    """Memory of the sidecar per connection that has logged in, opened a channel and does nothing."""
    node = lab.nodes["e1"]
    with ready("idle", url=node.door, connections=IDLE_WARM) as process:
        go(process)
        pid = node.sidecar_pid
        if pid is None:
            raise LrqError("The sidecar does not run", todo=f"See {node.log}")
        time.sleep(SETTLE_S)
        before = memory_bytes(pid)
        with ready("idle", url=node.door, connections=IDLE_CONNECTIONS) as others:
            go(others)
            time.sleep(SETTLE_S)
            return (memory_bytes(pid) - before) / IDLE_CONNECTIONS / 1000
