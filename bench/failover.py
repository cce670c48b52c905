"""P5: the primary's broker and sidecar are killed (SIGKILL) while a publisher keeps its window full, and the backup is promoted.

Rules: the publisher is told nothing; it has both addresses and tries them in turn. Times run from the command to the first confirm that the
publisher gets from the new primary. Afterwards the queue is read to its end: everything published is confirmed by then, so whatever is missing
is lost and whatever comes more than once is duplicated.
"""

from __future__ import annotations

import json
import os
import time
from statistics import median
from typing import Any

from lrq_ha.lab import Lab
from lrq_ha.replication.errors import LrqError

from .measure import Row, declare, finish, note, start, until

GOAL_MS = 250
SIZE_BYTES = 1024
WINDOW_MESSAGES = 1_000
FLOW_MESSAGES = 20_000  # in the log before the kill
# RabbitMQ writes the names of new quorum queues to disk seconds later: a broker that is killed before has lost them, whoever uses it.
SETTLE_S = 6.0
KINDS = ("classic", "quorum")


def p5(brokers: list[str], rounds: int) -> Row:
    """kill -9 of the primary under load."""
    runs: list[dict[str, Any]] = []
    for broker in brokers:
        with Lab({"east": 2}, broker=broker, sites={}) as lab:
            queues = {kind: f"bench-failover-{kind}" for kind in KINDS}
            for kind, queue in queues.items():
                declare(lab.nodes["e1"].door, queue, kind)
            time.sleep(SETTLE_S)
            for number in range(rounds):
                kind = KINDS[number % len(KINDS)]
                runs.append(_round(lab, kind, queues[kind], f"bench-{number}"))
                note(f"P5 {broker}/{kind} " + " ".join(f"{key}={runs[-1][key]}" for key in _FIGURES))
    return summary(runs)


def summary(runs: list[dict[str, Any]]) -> Row:
    """The row of these kills: the worst broker's median counts, and any message lost or duplicated is short."""
    details, worst = [], 0.0
    for broker in sorted({run["broker"] for run in runs}):
        promote, kill = ([run[key] for run in runs if run["broker"] == broker] for key in ("promote_ms", "kill_ms"))
        worst = max(worst, median(promote))
        spread = f"{min(promote):.0f} to {max(promote):.0f}"
        details.append(f"{broker} {median(promote):.0f} ms (median of {len(promote)}, {spread}), {median(kill):.0f} ms from the kill")
    lost, twice = (sum(run[key] for run in runs) for key in ("lost", "duplicated"))
    details.append(f"lost={lost} duplicated={twice}")
    return Row("P5", f"promote_ms={worst:.0f}", str(GOAL_MS), worst <= GOAL_MS and not lost and not twice, "; ".join(details), runs)


_FIGURES = ("promote_ms", "active_ms", "kill_ms", "published", "resent", "lost", "duplicated", "order_breaks")


def _round(lab: Lab, kind: str, queue: str, producer: str) -> dict[str, Any]:
    until("both nodes in the set", lambda: _in_sync(lab))
    primary = _primary(lab)
    backup = next(name for name in lab.nodes if name != primary)
    load = os.getloadavg()
    began = lab.status(primary)["end"]
    process = start("failover", urls=[lab.nodes[primary].door, lab.nodes[backup].door], queue=queue, producer=producer, size_bytes=SIZE_BYTES,
                    window=WINDOW_MESSAGES)
    if process.stdout is None or process.stdin is None:
        raise LrqError("The load generator has no pipes")
    try:
        _read(process.stdout, "confirmed_at", 0.0)
        until("load", lambda: lab.status(primary)["end"] > began + FLOW_MESSAGES)
        behind = lab.status(primary)["end"] - lab.status(backup)["applied"]
        killed_at = time.monotonic()
        lab.kill(primary)
        promoted_at = time.monotonic()
        lab.promote(backup, down=[primary])
        active_at = time.monotonic()
        confirmed_at = _read(process.stdout, "confirmed_at", killed_at)
        process.stdin.write("\n")
        result = finish(process)
    finally:
        process.kill()
    drain = finish(start("drain", url=lab.nodes[backup].door, queue=queue))
    lab.start(primary)
    return result | {
        "kind": kind, "broker": lab.version, "load": load, "behind": behind,
        "promote_ms": round(1000 * (confirmed_at - promoted_at), 1), "kill_ms": round(1000 * (confirmed_at - killed_at), 1),
        "active_ms": round(1000 * (active_at - promoted_at), 1),
        "lost": result["published"] - drain["different"], "missing": drain["missing"],
        "duplicated": drain["came"] - drain["different"], "order_breaks": drain["order_breaks"],
    }


def _read(lines: Any, key: str, after: float) -> float:
    """The first instant `key` that the generator tells after `after`."""
    for line in lines:
        at = float(json.loads(line).get(key, 0.0))
        if at > after:
            return at
    raise LrqError("The load generator ended early", todo="See its error above")


def _primary(lab: Lab) -> str:
    primary = lab.primary("east")
    if primary is None:
        raise LrqError("The group has no primary", retriable=True)
    return primary


def _in_sync(lab: Lab) -> bool:
    return set(lab.status(_primary(lab))["members"]) == set(lab.nodes)
