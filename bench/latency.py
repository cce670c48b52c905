"""P1L: what the door of a group of one node adds to the time from a publish to its confirm, at half of what the broker sustains by itself.

Rules: the rate is measured first, directly, and is then the same for both sides, who take turns. Time runs from when a message is due, not from
when it could be sent (see `pace`), so a stall counts for all that it delays. What is added is the difference of the two percentiles in a round.
The same at a rate that leaves all processes time is measured, too, and told beside it: where cores are shared, half of what the broker sustains
alone is all that door, broker and generator can do together, and what waits for a core there says little of the door. It has no goal.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from statistics import median
from typing import Any

from lrq_ha.lab import Lab

from .cost import Round, sides
from .measure import Figure, Row, applied, declare, delete, go, note, ready

GOAL_MS = 1.0
SIZE_BYTES = 1024
KINDS = ("classic", "quorum")
LOAD = 0.5  # of the direct rate
LIGHT_RATE = 1_000.0  # messages/s
WINDOW_MESSAGES = 5_000
BATCH_MESSAGES = 50
SHOWN = ("p50_ms", "p99_ms", "p999_ms", "max_ms", "late_p99_ms")


@dataclass(frozen=True)
class Plan:
    """How much is measured: rounds of each variant, seconds of each, and messages of the three floods that find the rate."""

    rounds: int = 5
    seconds: float = 6.0
    warm_up_s: float = 1.0
    messages: int = 80_000


SHORT = Plan(2, 1.5, 0.5, 10_000)


def p1l(brokers: list[str], plan: Plan) -> Row:
    """The worst broker and kind of queue counts."""
    runs: list[dict[str, Any]] = []
    details: list[str] = []
    figures: list[Figure] = []
    for broker in brokers:
        with Lab({"east": 1}, broker=broker, sites={}) as lab:
            for kind in KINDS:
                sustained = median(_sustained(lab, kind, plan) for _ in range(3))
                half = LOAD * sustained
                for rate, has_goal, at in (
                    (half, True, f"at {half:,.0f} of {sustained:,.0f} msg/s"),
                    (LIGHT_RATE, False, f"at {LIGHT_RATE:,.0f} msg/s, which has no goal"),
                ):
                    rounds = [{side: _run(lab, side, kind, rate, plan) for side in sides(number)} for number in range(plan.rounds)]
                    runs += [run for pair in rounds for run in pair.values()]
                    if has_goal:
                        figures.append(Figure("added_p99_ms", median(_added(rounds, "p99_ms")), GOAL_MS, variant=f"{broker} {kind}"))
                    details.append(_detail(f"{broker} {kind}", rounds, at))
                    note(f"P1L {details[-1]}")
    return Row("P1L", figures, "; ".join(details), runs)


def _added(rounds: list[Round], name: str) -> list[float]:
    return [pair["door"][name] - pair["direct"][name] for pair in rounds]


def _detail(variant: str, rounds: list[Round], at: str) -> str:
    p99 = _added(rounds, "p99_ms")
    text = f"{variant} p50 {median(_added(rounds, 'p50_ms')):+.2f} ms, p99 {median(p99):+.2f} ms (rounds {min(p99):.2f} to {max(p99):.2f}"
    for side in ("direct", "door"):
        text += f"; {side} {median(pair[side]['p50_ms'] for pair in rounds):.2f}, {median(pair[side]['p99_ms'] for pair in rounds):.2f}"
    return f"{text}; {at})"


def _sustained(lab: Lab, kind: str, plan: Plan) -> float:
    """Messages/s that the broker confirms by itself with a window that is never the limit."""
    url, queue = lab.nodes["e1"].broker, "bench-latency-rate"
    declare(url, queue, kind)
    with ready("publish", url=url, queue=queue, messages=plan.messages, size_bytes=SIZE_BYTES, connections=1, channels=1, window=WINDOW_MESSAGES,
               batch=BATCH_MESSAGES, warm_up=plan.messages // 10) as process:
        rate = float(go(process)["rate"])
    delete(url, queue)
    return rate


def _run(lab: Lab, side: str, kind: str, rate: float, plan: Plan) -> dict[str, Any]:
    url, queue = lab.nodes["e1"].door if side == "door" else lab.nodes["e1"].broker, f"bench-latency-{side}"
    declare(url, queue, kind)
    applied(lab)
    load = os.getloadavg()
    with ready("pace", url=url, queue=queue, size_bytes=SIZE_BYTES, rate=rate, warm_up_s=plan.warm_up_s, seconds=plan.seconds) as process:
        result = go(process)
    delete(url, queue)
    applied(lab)
    note(f"P1L {lab.version}/{kind} {side} " + " ".join(f"{name}={result[name]:.2f}" for name in SHOWN))
    return result | {"side": side, "kind": kind, "broker": lab.version, "load": load}
