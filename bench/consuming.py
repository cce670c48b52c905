"""P2C: publishes with confirms and a consumer that keeps up, through the door of a pair beside the same directly to one broker, in turns.

Rules: as in `throughput`. At most WINDOW_MESSAGES are on their way from the publisher to the consumer: so it keeps up whatever the speed, and what it
takes is within the backup's `apply_delay_s` and `apply_delay_entries_max`: it is never to be written to the backup's queue. The CPU time of
the backup's broker shows whether that is so. The consumer acks every message by itself. The clock runs until all have come and are confirmed.
"""

from __future__ import annotations

import os
from statistics import median
from typing import Any

from lrq_ha.lab import Lab

from .measure import Row, applied, cpu_of, declare, delete, go, note, ready
from .throughput import KINDS, SIZE_BYTES, Plan

GOAL = 0.65
WINDOW_MESSAGES = 1_000
PREFETCH = 250
BATCH_MESSAGES = 50
SHORT = Plan(2, 20_000, 4_000)


def p2c(brokers: list[str], plan: Plan) -> Row:
    """The worst broker and kind of queue counts."""
    runs: list[dict[str, Any]] = []
    details: list[str] = []
    worst = 10.0
    for broker in brokers:
        with Lab({"east": 2}, broker=broker, sites={}) as lab:
            for kind in KINDS:
                rounds = [_round(lab, kind, number, plan) for number in range(plan.rounds)]
                runs += [run for pair in rounds for run in pair.values()]
                ratios = [pair["door"]["rate"] / pair["direct"]["rate"] for pair in rounds]
                worst = min(worst, median(ratios))
                details.append(_detail(f"{broker}/{kind}", ratios, rounds))
                note(f"P2C {details[-1]}")
    return Row("P2C", f"ratio={worst:.2f}", f"{GOAL:.2f}", worst >= GOAL, "; ".join(details), runs)


def _detail(variant: str, ratios: list[float], rounds: list[dict[str, dict[str, Any]]]) -> str:
    door, direct = (median(pair[side]["rate"] for pair in rounds) for side in ("door", "direct"))
    cpu = {side: {key: median(pair[side]["cpu_us"][key] for pair in rounds) for key in rounds[0][side]["cpu_us"]} for side in ("door", "direct")}
    text = f"{variant} {median(ratios):.2f} (rounds {min(ratios):.2f} to {max(ratios):.2f}; {door:,.0f} of {direct:,.0f} msg/s"
    text += f"; broker {cpu['door']['e1.broker']:.1f} of {cpu['direct']['e1.broker']:.1f} µs/msg"
    return text + f", backup's {cpu['door']['e2.broker']:.1f}, sidecars {cpu['door']['e1.sidecar']:.1f} and {cpu['door']['e2.sidecar']:.1f})"


def _round(lab: Lab, kind: str, number: int, plan: Plan) -> dict[str, dict[str, Any]]:
    sides = ("door", "direct") if number % 2 else ("direct", "door")
    return {side: _run(lab, side, kind, f"bench-{kind}-{number}-{side}", plan) for side in sides}


def _run(lab: Lab, side: str, kind: str, queue: str, plan: Plan) -> dict[str, Any]:
    url = lab.nodes["e1"].door if side == "door" else lab.nodes["e1"].broker
    declare(url, queue, kind)
    applied(lab)
    load, before = os.getloadavg(), cpu_of(lab)
    with ready("through", url=url, queue=queue, messages=plan.messages, size_bytes=SIZE_BYTES, window=WINDOW_MESSAGES, batch=BATCH_MESSAGES,
               prefetch=PREFETCH, warm_up=plan.warm_up) as process:
        result = go(process)
        applied(lab)
        used = cpu_of(lab)
    delete(url, queue)
    applied(lab)
    cpu_us = {key: 1e6 * (used[key] - before[key]) / (plan.messages + plan.warm_up) for key in used}
    return result | {"side": side, "kind": kind, "broker": lab.version, "load": load, "cpu_us": cpu_us}
