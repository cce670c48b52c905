"""P9: what a message costs with many connections, or many channels on one connection, beside one of each; and what an idle connection holds.

Cost is the sidecar's CPU time per message ÷ that of one connection with one channel. The brokers' CPU time and the rates stand beside it.

Rules: in all shapes, together, as many messages are unconfirmed and as many go out in one write, so that the number of connections or channels
is all that differs. Shapes take turns within a round, door and direct within a shape; a shape is compared with the single one of its round.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab

from .cost import Meter, Round, compare, sides
from .measure import Figure, Row, applied, declare, delete, go, memory_bytes, note, ready

GOAL = 2.0
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
            rounds = [
                {shape: {side: _run(lab, shape, side, plan) for side in sides(number)} for shape in SHAPES} for number in range(plan.rounds)
            ]  # fmt: skip
            runs += [run for each in rounds for pair in each.values() for run in pair.values()]
            cells += [cell_of(broker, shape, rounds) for shape in SHAPES]
    note("P9, all shapes\n" + table(cells))
    return summary(cells, idle, runs)


def summary(cells: list[dict[str, Any]], idle: dict[str, float], runs: list[dict[str, Any]]) -> Row:
    """The row of these shapes and idle connections."""
    figures = [
        Figure("cost", cell["cpu_growth"], GOAL, variant=f"{cell['broker']} {cell['connections']}×{cell['channels']}") for cell in cells
    ] + [Figure("idle_kb", kb, GOAL_IDLE_KB, variant=broker, digits=0) for broker, kb in idle.items()]  # fmt: skip
    details = []
    for broker in idle:
        parts = [f"{cell['connections']}×{cell['channels']} sidecar {cell['sidecar_us']:.1f} µs ({cell['cpu_growth']:.2f}), "
                 f"broker {cell['broker_us']:.1f}, {cell['direct_us']:.1f} directly, rate ratio {cell['ratio']:.2f}"
                 for cell in cells if cell["broker"] == broker]
        details.append(f"{broker}: {idle[broker]:.1f} KB; " + ", ".join(parts))
    return Row("P9", figures, "; ".join(details), runs, [*cells, {"idle_kb": idle}])


def table(cells: list[dict[str, Any]]) -> str:
    """The shapes as text, a line each. `×` is the sidecar's figure ÷ that of the single connection and channel."""
    head = f"{'broker':7}{'conn':>6}{'chan':>6}{'sidecar µs':>12}{'×':>7}{'broker µs':>11}{'directly':>10}"
    lines = [f"{head}{'rate ratio':>12}{'direct/s':>10}{'door/s':>10}"]
    for cell in cells:
        line = f"{cell['broker']:7}{cell['connections']:6}{cell['channels']:6}{cell['sidecar_us']:12.1f}{cell['cpu_growth']:7.2f}"
        line += f"{cell['broker_us']:11.1f}{cell['direct_us']:10.1f}{cell['ratio']:12.2f}{cell['direct_rate']:10,.0f}{cell['door_rate']:10,.0f}"
        lines.append(line)
    return "\n".join(lines)


def cell_of(broker: str, shape: tuple[int, int], rounds: list[dict[tuple[int, int], Round]]) -> dict[str, Any]:
    """A shape's comparison, and the growth of its sidecar's CPU time over that of the single connection and channel."""
    found = compare([each[shape] for each in rounds])
    cpu, single = ([each[which]["door"]["cpu_us"]["e1.sidecar"] for each in rounds] for which in (shape, SHAPES[0]))
    return vars(found) | {
        "broker": broker, "connections": shape[0], "channels": shape[1], "sidecar_us": found.sidecars_us[0], "broker_us": found.brokers_us[0],
        "cpu_growth": median(many / one for many, one in zip(cpu, single, strict=True)),
    }  # fmt: skip


def _run(lab: Lab, shape: tuple[int, int], side: str, plan: Plan) -> dict[str, Any]:
    url, queue = lab.nodes["e1"].door if side == "door" else lab.nodes["e1"].broker, f"bench-scale-{side}"
    connections, channels = shape
    declare(url, queue, "classic")
    with ready("publish", url=url, queue=queue, messages=plan.messages, size_bytes=SIZE_BYTES, connections=connections, channels=channels,
               window=WINDOW_MESSAGES // (connections * channels), batch=BATCH_MESSAGES, warm_up=plan.messages // 10) as process:
        meter = Meter(lab)
        result = go(process)
        cost = meter.read(plan.messages)
    delete(url, queue)
    applied(lab)
    note(f"P9 {lab.version} {connections} × {channels} {side}: {result['rate']:,.0f} msg/s, sidecar {cost['cpu_us']['e1.sidecar']:.1f} µs/msg")
    return result | {"connections": connections, "channels": channels, "side": side, "broker": lab.version} | cost


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
