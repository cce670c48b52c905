"""P5 and P5M: the primary's broker and sidecar are killed (SIGKILL) while a publisher keeps its window full, and the backup is promoted.

Rules: publisher and consumer are told nothing; they have both addresses and try them in turn. Times run from the command to the first confirm and
to the first delivery that come from the new primary. The backlog is what the publisher itself has left in the queue: with one, the consumer begins
at the kill and acks nothing; without one, it consumes and acks from the beginning. Afterwards the queue is read to its end: everything published is
confirmed by then, so whatever neither that nor the consumer's acks account for is lost, and whatever comes more than once is duplicated. What comes
again although the consumer had acked it is counted by itself, by the age of the ack at the kill: one that was in flight, younger than the replication
lag, may not have been taken (G3); any other must have been.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from statistics import median
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab
from lrq_ha.replication.positions import RangeSet

from .measure import WAIT_S, Figure, Row, asking, declare, finish, note, read, start, started, tell, until

GOAL_CONFIRM_MS, GOAL_DELIVERY_MS = 250, 500
SIZE_BYTES = 1024
WINDOW_MESSAGES = 1_000
FLOW_MESSAGES = 20_000  # in the log before the kill, whatever the backlog
LAG_MAX_S = 2.0  # an ack may take so long to reach the backup
SLOW_PER_S = 1_000  # the least that is to be expected, for time limits
# RabbitMQ writes the names of new quorum queues to disk seconds later: a broker that is killed before has lost them, whoever uses it.
SETTLE_S = 6.0
KINDS = ("classic", "quorum")
BACKLOGS = (0, 100_000)
MILLION = 1_000_000
MISSING_SHOWN = 20


def p5(brokers: list[str], backlogs: tuple[int, ...], rounds: int, name: str = "P5") -> Row:
    """kill -9 of the primary under load, so many times for each backlog."""
    runs: list[dict[str, Any]] = []
    for broker in brokers:
        with Lab({"east": 2}, broker=broker, sites={}) as lab:
            queues = {kind: f"bench-failover-{kind}" for kind in KINDS}
            for kind, queue in queues.items():
                declare(lab.nodes["e1"].door, queue, kind)
            time.sleep(SETTLE_S)
            for backlog in backlogs:
                for number in range(rounds):
                    kind = KINDS[number % len(KINDS)]
                    runs.append(_round(lab, kind, queues[kind], f"bench-{backlog}-{number}", backlog))
                    note(f"{name} {broker}/{kind} " + " ".join(f"{key}={runs[-1][key]}" for key in _FIGURES))
    return summary(name, runs)


def summary(name: str, runs: list[dict[str, Any]]) -> Row:
    """The row of these kills: the worst median of a broker and backlog counts, and any message lost, duplicated or acked in vain is short."""
    details: list[str] = []
    figures: list[Figure] = []
    for broker, backlog in sorted({(run["broker"], run["backlog"]) for run in runs}):
        those = [run for run in runs if (run["broker"], run["backlog"]) == (broker, backlog)]
        middle = {key: median(run[key] for run in those) for key in ("promote_ms", "delivery_ms", "kill_ms")}
        figures += [
            Figure(key, middle[key], goal, variant=f"{broker} {backlog}", digits=0)
            for key, goal in (("promote_ms", GOAL_CONFIRM_MS), ("delivery_ms", GOAL_DELIVERY_MS))
        ]
        spread = {key: f"{min(run[key] for run in those):.0f} to {max(run[key] for run in those):.0f}" for key in middle}
        details.append(
            f"{broker} with {backlog:,} waiting: first confirm {middle['promote_ms']:.0f} ms (median of {len(those)}, {spread['promote_ms']}), "
            f"{middle['kill_ms']:.0f} ms from the kill, first delivery {middle['delivery_ms']:.0f} ms ({spread['delivery_ms']})"
        )
    figures += [Figure(key, sum(run[key] for run in runs), 0, digits=0) for key in ("lost", "duplicated", "acks_lost")]
    details.append(f"acks_in_flight={sum(run['acks_in_flight'] for run in runs)}")
    return Row(name, figures, "; ".join(details), runs)


_FIGURES = ("backlog", "waiting", "promote_ms", "delivery_ms", "active_ms", "kill_ms", "published", "resent", "lost", "duplicated", "acks_lost",
            "acks_in_flight", "order_breaks")  # fmt: skip


def _round(lab: Lab, kind: str, queue: str, producer: str, backlog: int) -> dict[str, Any]:
    limit_s = WAIT_S + backlog / SLOW_PER_S
    until("both nodes in the set", lambda: _in_sync(lab), limit_s)
    primary = _primary(lab)
    backup = next(name for name in lab.nodes if name != primary)
    load = os.getloadavg()
    began = lab.status(primary)["end"]
    urls = [lab.nodes[primary].door, lab.nodes[backup].door]
    with (
        started("witness", urls=urls, queue=queue, acks=not backlog) as consumer,
        started("failover", urls=urls, queue=queue, producer=producer, size_bytes=SIZE_BYTES, window=WINDOW_MESSAGES) as process,
    ):
        read(consumer)
        if not backlog:
            tell(consumer)
        _read(process, "confirmed_at", 0.0)
        until("load", lambda: lab.status(primary)["end"] > began + FLOW_MESSAGES + backlog, limit_s)
        with asking(urls[0], queue) as ask:
            waiting = ask()
        behind = lab.status(primary)["end"] - lab.status(backup)["applied"]
        killed_at = time.monotonic()
        lab.kill(primary)
        if backlog:
            tell(consumer)
        promoted_at = time.monotonic()
        lab.promote(backup, down=[primary])
        active_at = time.monotonic()
        confirmed_at = _read(process, "confirmed_at", killed_at)
        delivered_at = _read(consumer, "delivered_at", killed_at)
        tell(process)
        result = finish(process)
        tell(consumer)
        consumed = finish(consumer)
    drain = finish(start("drain", url=lab.nodes[backup].door, queue=queue), limit_s)
    lab.start(primary)
    return result | accounts(result["published"], consumed, drain, killed_at, delivered_at) | {
        "kind": kind, "broker": lab.version, "load": load, "backlog": backlog, "waiting": waiting, "behind": behind,
        "promote_ms": round(1000 * (confirmed_at - promoted_at), 1), "kill_ms": round(1000 * (confirmed_at - killed_at), 1),
        "delivery_ms": round(1000 * (delivered_at - promoted_at), 1), "active_ms": round(1000 * (active_at - promoted_at), 1),
    }


def accounts(published: int, consumed: dict[str, Any], drain: dict[str, Any], killed_at: float, delivered_at: float) -> dict[str, Any]:
    """What became of the messages 1 to `published`. Acks before the first delivery after the kill, at `delivered_at`, went to the old primary."""
    acked, seen = RangeSet((first, last) for _, first, last in consumed["acks"]), RangeSet.from_flat(drain["seen"])
    again, left = list(consumed["again"]), RangeSet(seen)
    for at, first, last in reversed(consumed["acks"]):
        again += [at] * (last - first + 1 - len(left.missing(first, last)))
        left.remove(first, last)
    in_flight = sum(killed_at - LAG_MAX_S <= at < delivered_at for at in again)
    found = RangeSet([*acked, *seen])
    return {
        "lost": published - len(found), "missing": [first for first, _ in found.missing(1, published)][:MISSING_SHOWN],
        "duplicated": drain["came"] - len(seen), "acks_lost": len(again) - in_flight, "acks_in_flight": in_flight,
        "order_breaks": drain["order_breaks"],
    }


def _read(process: subprocess.Popen[str], key: str, after: float) -> float:
    """The first instant `key` that the generator tells after `after`."""
    for line in process.stdout or ():
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
