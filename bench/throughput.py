"""P1, P2 and P2B: CPU time of publishes with confirms through the door beside the same publishes directly to the broker, in turns.

Rules: rounds are those of `cost`. Every round has a queue of its own, and begins when nothing of the round before is under way. CPU time is read
once all nodes have applied everything, so that all work of the backups is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from lrq_ha.lab import Lab

from .cost import Comparison, Meter, Round, compare, sides
from .measure import Figure, Row, applied, declare, delete, finish, note, start

SIZE_BYTES = 1024
WINDOW_MESSAGES = 5_000
KINDS = ("classic", "quorum")
SIDECAR_US = {"classic": 3.0, "quorum": 5.0}
CPU_RATIO = {"classic": 0.85, "quorum": 0.75}
CPU_MULTIPLE = {"classic": 1.25, "quorum": 1.5}


@dataclass(frozen=True)
class Plan:
    """How much is measured: rounds of each variant, messages of each round."""

    rounds: int = 5
    messages: int = 100_000
    warm_up: int = 10_000


SHORT = Plan(3, 30_000, 5_000)


def figures_of_one(found: Comparison, broker: str, kind: str) -> list[Figure]:
    """The goals of a group of one node."""
    variant = f"{broker} {kind}"
    return [
        Figure("sidecar_us", found.sidecars_us[0], SIDECAR_US[kind], variant=variant, digits=1),
        Figure("cpu_ratio", found.cpu_ratio, CPU_RATIO[kind], least=True, variant=variant),
    ]


def figures_with_backups(found: Comparison, broker: str, kind: str) -> list[Figure]:
    """The goal of a group whose backups apply everything."""
    return [Figure("cpu_multiple", found.cpu_multiple, CPU_MULTIPLE[kind], variant=f"{broker} {kind}")]


def p1(brokers: list[str], plan: Plan) -> Row:
    """A group of one node."""
    return compare_door("P1", 1, brokers, plan, _run, figures_of_one)


def p2(brokers: list[str], plan: Plan) -> Row:
    """A pair, its backup applying everything."""
    return compare_door("P2", 2, brokers, plan, _run, figures_with_backups)


def p2b(brokers: list[str], plan: Plan) -> Row:
    """Two backups."""
    return compare_door("P2B", 3, brokers, plan, _run, figures_with_backups)


def compare_door(
    name: str, nodes: int, brokers: list[str], plan: Plan, run: Callable[[Lab, str, str, str, Plan], dict[str, Any]],
    figures_of: Callable[[Comparison, str, str], list[Figure]],
) -> Row:  # fmt: skip
    """The row of a group's door beside its broker, on each broker and with each kind of queue.

    Args:
        name: The row's.
        nodes: Of the group.
        brokers: RabbitMQ series.
        plan: How much is measured.
        run: Measures one side; of the lab, the side, the kind of queue, the name of a queue that is not there yet, and the plan.
        figures_of: The figures of a comparison, of a series, with a kind of queue.
    """
    runs: list[dict[str, Any]] = []
    details: list[str] = []
    figures: list[Figure] = []
    for broker in brokers:
        with Lab({"east": nodes}, broker=broker, sites={}) as lab:
            for kind in KINDS:
                rounds = [
                    {side: run(lab, side, kind, f"bench-{kind}-{number}-{side}", plan) for side in sides(number)} for number in range(plan.rounds)
                ]  # fmt: skip
                runs += [run for pair in rounds for run in pair.values()]
                found = compare(rounds)
                figures += figures_of(found, broker, kind)
                details.append(f"{broker} {kind} ({found}{_delay(rounds) if nodes > 1 else ''})")
                note(f"{name} {details[-1]}")
    return Row(name, figures, "; ".join(details), runs)


def _delay(rounds: list[Round]) -> str:
    """How late the backups had applied everything, where that was measured."""
    if "applied_after_s" not in rounds[0]["door"]:
        return ""
    after_s = median(pair["door"]["applied_after_s"] for pair in rounds)
    ratio = median(pair["door"]["applied_rate"] / pair["direct"]["rate"] for pair in rounds)
    return f"; applied {after_s:.2f} s after the last confirm, rate ratio {ratio:.2f} when counted to there"


def _run(lab: Lab, side: str, kind: str, queue: str, plan: Plan) -> dict[str, Any]:
    node = lab.nodes["e1"]
    url = node.door if side == "door" else node.broker
    declare(url, queue, kind)
    applied(lab)
    meter = Meter(lab)
    process = start("flood", url=url, queue=queue, messages=plan.messages, size_bytes=SIZE_BYTES, window=WINDOW_MESSAGES, warm_up=plan.warm_up)
    result = finish(process)
    applied_after_s = applied(lab)
    result |= meter.read(plan.messages + plan.warm_up) | {
        "side": side, "kind": kind, "broker": lab.version, "applied_after_s": applied_after_s,
        "applied_rate": result["messages"] / (result["seconds"] + applied_after_s),
    }  # fmt: skip
    delete(url, queue)
    applied(lab)
    return result
