"""P2C: publishes with confirms and a consumer that keeps up, through the door of a pair beside the same directly to one broker, in turns.

Rules: as in `throughput`. At most WINDOW_MESSAGES are on their way from the publisher to the consumer, so the consumer keeps up whatever the speed.
It takes each message within the backup's `apply_delay_s` and `apply_delay_entries_max`, so the backup never writes the message to its queue. The CPU
time of the backup's broker shows whether it did. The consumer acks every message by itself. The clock runs until all have come and are confirmed.
"""

from __future__ import annotations

from typing import Any

from lrq_ha.lab import Lab

from .cost import Comparison, Meter
from .measure import Figure, Row, applied, declare, delete, go, ready
from .throughput import SIZE_BYTES, Plan, compare_door

GOAL_US = 20.0
WINDOW_MESSAGES = 1_000
PREFETCH = 250
BATCH_MESSAGES = 50
SHORT = Plan(2, 20_000, 4_000)


def figures_of_pair(found: Comparison, broker: str, kind: str) -> list[Figure]:
    """The goal of both sidecars together."""
    return [Figure("sidecars_us", sum(found.sidecars_us), GOAL_US, variant=f"{broker} {kind}", digits=1)]


def p2c(brokers: list[str], plan: Plan) -> Row:
    """A pair with a consumer that keeps up."""
    return compare_door("P2C", 2, brokers, plan, _run, figures_of_pair)


def _run(lab: Lab, side: str, kind: str, queue: str, plan: Plan) -> dict[str, Any]:
    url = lab.nodes["e1"].door if side == "door" else lab.nodes["e1"].broker
    declare(url, queue, kind)
    applied(lab)
    meter = Meter(lab)
    with ready("through", url=url, queue=queue, messages=plan.messages, size_bytes=SIZE_BYTES, window=WINDOW_MESSAGES, batch=BATCH_MESSAGES,
               prefetch=PREFETCH, warm_up=plan.warm_up) as process:
        result = go(process)
        applied(lab)
        cost = meter.read(plan.messages + plan.warm_up)
    delete(url, queue)
    applied(lab)
    return result | {"side": side, "kind": kind, "broker": lab.version} | cost
