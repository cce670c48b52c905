"""P1M: the door of a group of one node beside its broker, for every kind of traffic, size, number of connections and kind of queue.

Rules: rounds are those of `cost`, goals those of P1. Messages consumed through the door were published through it, as their acks are then logged as
well. Messages consumed directly were published directly.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from lrq_ha.lab import Lab

from .cost import Meter, Round, compare, sides
from .measure import Figure, Row, applied, declare, delete, go, note, ready
from .throughput import figures_of_one

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
    """Every cell is to meet P1's goals."""
    runs: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    for broker in brokers:
        with Lab({"east": 1}, broker=broker, sites={}) as lab:
            for number, (kind, flow, size_bytes, connections) in enumerate(itertools.product(KINDS, FLOWS, MESSAGES, CONNECTIONS)):
                cell = Cell(broker, kind, flow, size_bytes, connections)
                # With a single round, every other cell begins with the door.
                rounds = [{side: _run(lab, cell, side, plan) for side in sides(number + each)} for each in range(plan.rounds)]
                runs += [run for pair in rounds for run in pair.values()]
                cells.append(cell_of(cell, rounds))
                note(f"P1M {cell}: {compare(rounds)}")
    note("P1M, all cells\n" + table(cells))
    return summary(cells, runs)


def summary(cells: list[dict[str, Any]], runs: list[dict[str, Any]]) -> Row:
    """The row of these cells."""
    figures, details = [], []
    for broker in sorted({cell["broker"] for cell in cells}):
        those = [cell for cell in cells if cell["broker"] == broker]
        figures.append(Figure("cells_missed", sum(bool(cell["missed"]) for cell in those), 0, variant=broker, digits=0))
        missed = {name: sum(name in cell["missed"] for cell in those) for name in ("sidecar_us", "cpu_ratio")}
        details.append(f"{broker} of {len(those)} cells " + ", ".join(f"{count} miss {name}" for name, count in missed.items()))
    return Row("P1M", figures, "; ".join(details), runs, cells)


def table(cells: list[dict[str, Any]]) -> str:
    """The cells as text, a line each."""
    head = f"{'broker':7}{'queue':9}{'flow':13}{'bytes':>7}{'conn':>6}{'sidecar µs':>12}{'broker µs':>11}{'directly':>10}{'CPU ratio':>11}"
    lines = [f"{head}{'rate ratio':>12}  {'rounds':14}{'direct/s':>10}{'door/s':>10}"]
    for cell in cells:
        spread = f"{cell['least']:.2f} to {cell['most']:.2f}"
        line = f"{cell['broker']:7}{cell['kind']:9}{cell['flow']:13}{cell['size_bytes']:7}{cell['connections']:6}{cell['sidecar_us']:12.1f}"
        line += f"{cell['broker_us']:11.1f}{cell['direct_us']:10.1f}{cell['cpu_ratio']:11.2f}{cell['ratio']:12.2f}  {spread:14}"
        line += f"{cell['direct_rate']:10,.0f}{cell['door_rate']:10,.0f}"
        lines.append(line + ("  short" if cell["missed"] else ""))
    return "\n".join(lines)


def cell_of(cell: Cell, rounds: list[Round]) -> dict[str, Any]:
    """A cell's comparison, and which of P1's goals it misses."""
    found = compare(rounds)
    missed = [figure.name for figure in figures_of_one(found, cell.broker, cell.kind) if not figure.ok]
    return vars(cell) | vars(found) | {"cell": str(cell), "sidecar_us": found.sidecars_us[0], "broker_us": found.brokers_us[0], "missed": missed}


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
        meter = Meter(lab)
        result = go(process)
        cost = meter.read(messages)
    delete(url, queue)
    applied(lab)
    return result | vars(cell) | {"version": lab.version, "side": side} | cost


def _publishing(size_bytes: int, connections: int) -> dict[str, Any]:
    """How a size is published over so many connections: together they keep the same number unconfirmed."""
    window = max(2, min(WINDOW_MESSAGES, WINDOW_BYTES // size_bytes) // connections)
    return {"size_bytes": size_bytes, "connections": connections, "channels": 1, "window": window, "batch": min(BATCH_MESSAGES, window // 2)}
