"""P1M: the door of a group of one node beside its broker, for every kind of traffic, size, number of connections and kind of queue.

Rules: as in `throughput`, door and direct take turns in a run and a ratio is taken within a round. What is consumed through the door was published
through it, as its acks are then logged as well; what is consumed directly was published directly.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from statistics import median
from typing import Any

from lrq_ha.lab import Lab

from .measure import Row, applied, cpu_of, declare, delete, go, note, ready

GOAL = 0.97
FLOWS = ("confirms", "no confirms", "consume")
CONNECTIONS = (1, 100)
KINDS = ("classic", "quorum")
# Messages of a round by body size: about 2 s on two quiet cores.
MESSAGES = {100: 100_000, 1024: 80_000, 65_536: 4_000}
WINDOW_MESSAGES = 5_000  # unconfirmed, over all connections
WINDOW_BYTES = 16 << 20  # likewise
BATCH_MESSAGES = 50
PREFETCH = {1: 250, 100: 10}  # of each consumer, by connections


@dataclass(frozen=True)
class Plan:
    """How much is measured: rounds of each cell, and what a round's number of messages is divided by."""

    rounds: int = 3
    divisor: int = 1


SHORT = Plan(1, 20)


@dataclass(frozen=True)
class Cell:
    """A variant."""

    broker: str
    kind: str
    flow: str
    size_bytes: int
    connections: int

    def __str__(self) -> str:
        return f"{self.broker} {self.kind}, {self.flow}, {self.size_bytes} B, {self.connections} conn"


def p1m(brokers: list[str], plan: Plan) -> Row:
    """Every cell; the worst one counts."""
    runs: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    for broker in brokers:
        with Lab({"east": 1}, broker=broker, sites={}) as lab:
            for number, (kind, flow, size_bytes, connections) in enumerate(itertools.product(KINDS, FLOWS, MESSAGES, CONNECTIONS)):
                cell = Cell(broker, kind, flow, size_bytes, connections)
                # With a single round, every other cell begins with the door.
                rounds = [_round(lab, cell, number + each, plan) for each in range(plan.rounds)]
                runs += [run for pair in rounds for run in pair.values()]
                cells.append(_figures(cell, rounds))
                note(f"P1M {cell}: {cells[-1]['ratio']:.2f}")
    note("P1M, all cells\n" + table(cells))
    return summary(cells, runs)


def summary(cells: list[dict[str, Any]], runs: list[dict[str, Any]]) -> Row:
    """The row of these cells."""
    worst = min(cells, key=lambda cell: float(cell["ratio"]))
    below = sum(cell["ratio"] < GOAL for cell in cells)
    details = f"{worst['cell']} (rounds {worst['least']:.2f} to {worst['most']:.2f}); {below} of {len(cells)} cells below the goal"
    for broker in sorted({cell["broker"] for cell in cells}):
        details += f"; {broker} median of cells {median(cell['ratio'] for cell in cells if cell['broker'] == broker):.2f}"
    return Row("P1M", f"ratio={worst['ratio']:.2f}", f"{GOAL:.2f}", not below, details, runs, cells)


def table(cells: list[dict[str, Any]]) -> str:
    """The cells as text, a line each."""
    lines = [f"{'broker':7}{'queue':9}{'flow':13}{'bytes':>7}{'conn':>6}{'ratio':>7}  {'rounds':14}{'direct/s':>10}{'door/s':>10}{'sidecar µs':>12}"]
    for cell in cells:
        spread = f"{cell['least']:.2f} to {cell['most']:.2f}"
        line = f"{cell['broker']:7}{cell['kind']:9}{cell['flow']:13}{cell['size_bytes']:7}{cell['connections']:6}{cell['ratio']:7.2f}  {spread:14}"
        line += f"{cell['direct_rate']:10,.0f}{cell['door_rate']:10,.0f}{cell['sidecar_us']:12.1f}"
        lines.append(line + ("" if cell["ratio"] >= GOAL else "  short"))
    return "\n".join(lines)


def _figures(cell: Cell, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    ratios = [pair["door"]["rate"] / pair["direct"]["rate"] for pair in rounds]
    return vars(cell) | {
        "cell": str(cell), "ratio": median(ratios), "least": min(ratios), "most": max(ratios),
        "direct_rate": median(pair["direct"]["rate"] for pair in rounds), "door_rate": median(pair["door"]["rate"] for pair in rounds),
        "sidecar_us": median(pair["door"]["cpu_us"]["e1.sidecar"] for pair in rounds),
    }


def _round(lab: Lab, cell: Cell, number: int, plan: Plan) -> dict[str, dict[str, Any]]:
    sides = ("door", "direct") if number % 2 else ("direct", "door")
    return {side: _run(lab, cell, side, plan) for side in sides}


def _run(lab: Lab, cell: Cell, side: str, plan: Plan) -> dict[str, Any]:
    url = lab.nodes["e1"].door if side == "door" else lab.nodes["e1"].broker
    queue, messages = f"bench-matrix-{side}", MESSAGES[cell.size_bytes] // plan.divisor
    declare(url, queue, cell.kind)
    if cell.flow == "consume":
        prefetch = PREFETCH[cell.connections]
        filled = messages + cell.connections * prefetch
        with ready("publish", url=url, queue=queue, messages=filled, **_publishing(cell.size_bytes, 1), warm_up=0) as process:
            go(process)
        settings = {"messages": messages, "connections": cell.connections, "prefetch": prefetch}
        generator = ready("consume", url=url, queue=queue, **settings)
    else:
        settings = _publishing(cell.size_bytes, cell.connections) | {"messages": messages, "warm_up": messages // 10}
        if cell.flow == "no confirms":
            settings["window"] = 0
        generator = ready("publish", url=url, queue=queue, **settings)
    applied(lab)
    with generator as process:
        load, before = os.getloadavg(), cpu_of(lab)
        result = go(process)
        used = cpu_of(lab)
    cpu_us = {key: 1e6 * (used[key] - before[key]) / messages for key in used}
    delete(url, queue)
    applied(lab)
    return result | vars(cell) | {"version": lab.version, "side": side, "load": load, "cpu_us": cpu_us}


def _publishing(size_bytes: int, connections: int) -> dict[str, Any]:
    """How a size is published over so many connections: together they keep the same number unconfirmed."""
    window = max(2, min(WINDOW_MESSAGES, WINDOW_BYTES // size_bytes) // connections)
    return {"size_bytes": size_bytes, "connections": connections, "channels": 1, "window": window, "batch": min(BATCH_MESSAGES, window // 2)}
