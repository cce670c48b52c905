"""P1, P2 and P2B: publishes with confirms through the door beside the same publishes directly to the broker, in turns.

Rules: rounds alternate and begin with the other side each time; a ratio is taken within a round and the median of the rounds counts, so that
a machine's mood meets both sides alike. Every round has a queue of its own, and begins when nothing of the round before is under way.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from statistics import median
from typing import Any

from lrq_ha.lab import Lab

from .measure import Row, applied, cpu_of, declare, delete, finish, note, start

SIZE_BYTES = 1024
WINDOW_MESSAGES = 5_000
KINDS = ("classic", "quorum")


@dataclass(frozen=True)
class Plan:
    """How much is measured: rounds of each variant, messages of each round."""

    rounds: int = 5
    messages: int = 100_000
    warm_up: int = 10_000


SHORT = Plan(3, 30_000, 5_000)


def p1(brokers: list[str], plan: Plan) -> Row:
    """Through the door of a group of one node ÷ directly."""
    return _row("P1", 1, brokers, plan, {"classic": 0.97, "quorum": 0.97})


def p2(brokers: list[str], plan: Plan) -> Row:
    """Through the door of a pair, its backup applying ÷ directly to one broker."""
    return _row("P2", 2, brokers, plan, {"classic": 0.45, "quorum": 0.60})


def p2b(brokers: list[str], plan: Plan) -> Row:
    """The same with two backups."""
    return _row("P2B", 3, brokers, plan, {"classic": 0.45, "quorum": 0.60})


def _row(name: str, nodes: int, brokers: list[str], plan: Plan, goals: dict[str, float]) -> Row:
    runs: list[dict[str, Any]] = []
    details: list[str] = []
    worst = (10.0, 0.0, 0.0)  # ratio ÷ goal, ratio, goal
    for broker in brokers:
        with Lab({"east": nodes}, broker=broker, sites={}) as lab:
            for kind in KINDS:
                rounds = [_round(lab, kind, number, plan) for number in range(plan.rounds)]
                runs += [run for pair in rounds for run in pair.values()]
                ratio = median(pair["door"]["rate"] / pair["direct"]["rate"] for pair in rounds)
                worst = min(worst, (ratio / goals[kind], ratio, goals[kind]))
                details.append(_detail(f"{broker}/{kind}", ratio, rounds, nodes))
                note(f"{name} {details[-1]}")
    return Row(name, f"ratio={worst[1]:.2f}", f"{worst[2]:.2f}", worst[0] >= 1, "; ".join(details), runs)


def _detail(variant: str, ratio: float, rounds: list[dict[str, dict[str, Any]]], nodes: int) -> str:
    door, direct = (median(pair[side]["rate"] for pair in rounds) for side in ("door", "direct"))
    cpu = {name: median(pair["door"]["cpu_us"][name] for pair in rounds) for name in rounds[0]["door"]["cpu_us"]}
    ratios = [pair["door"]["rate"] / pair["direct"]["rate"] for pair in rounds]
    text = f"{variant} {ratio:.2f} (rounds {min(ratios):.2f} to {max(ratios):.2f}; {door:,.0f} of {direct:,.0f} msg/s"
    text += f"; sidecar {cpu['e1.sidecar']:.1f} µs/msg"
    if nodes > 1:
        after_s = median(pair["door"]["applied_after_s"] for pair in rounds)
        backups = " and ".join(f"{cpu[f'e{number}.sidecar']:.1f}" for number in range(2, nodes + 1))
        text += f", backup's {backups}, applied {after_s:.2f} s after the last confirm"
        text += f", {median(p['door']['applied_rate'] / p['direct']['rate'] for p in rounds):.2f} when counted to there"
    return text + ")"


def _round(lab: Lab, kind: str, number: int, plan: Plan) -> dict[str, dict[str, Any]]:
    sides = ("door", "direct") if number % 2 else ("direct", "door")
    return {side: _run(lab, side, kind, f"bench-{kind}-{number}-{side}", plan) for side in sides}


def _run(lab: Lab, side: str, kind: str, queue: str, plan: Plan) -> dict[str, Any]:
    node = lab.nodes["e1"]
    url = node.door if side == "door" else node.broker
    declare(url, queue, kind)
    applied(lab)
    load, before = os.getloadavg(), cpu_of(lab)
    process = start("flood", url=url, queue=queue, messages=plan.messages, size_bytes=SIZE_BYTES, window=WINDOW_MESSAGES, warm_up=plan.warm_up)
    result = finish(process)
    applied_after_s = applied(lab)
    used = cpu_of(lab)
    count = plan.messages + plan.warm_up
    result |= {
        "side": side, "kind": kind, "broker": lab.version, "load": load, "applied_after_s": applied_after_s,
        "applied_rate": result["messages"] / (result["seconds"] + applied_after_s),
        "cpu_us": {key: 1e6 * (used[key] - before[key]) / count for key in used},
    }
    delete(url, queue)
    applied(lab)
    return result
