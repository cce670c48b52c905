"""P7F: the primary of the group that a streaming query reads is killed (SIGKILL), and the backup is promoted: time to the first new row.

Rules:

- 1,000 entries/s, ten a transaction, come from a group of one node to a pair. The query has the addresses of both doors of the pair, and nothing
  informs it.
- A row is new if its entry was due at the source after the kill. The clock stops when the driver has it in `foreachBatch`.
- The operator promotes at once. The goal is for the time from the kill on; beside it stands the time from the promotion on.
- Afterwards each entry must have come to the query once.
"""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from lrq_ha.lab import Lab
from lrq_ha.spark.session import session

from .measure import WAIT_S, Figure, Row, finish, note, read, started, tell, until
from .stream_query import SETTLE_S, Arrivals, running, wait, wait_snapshot

GOAL_S = 3.0
RATE = 1_000
BETWEEN_S = 5.0  # the query catches up before the next kill
ROUNDS, SHORT_ROUNDS = 5, 2


def p7f(brokers: list[str], rounds: int) -> Row:
    """So many kills under one query on each RabbitMQ."""
    runs: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []
    with session() as spark:
        for broker in brokers:
            with Lab({"east": 1, "west": 2}, broker=broker, sites={"east": ["west"], "west": []}) as lab:
                ends.append(_follow(spark, lab, rounds, runs))
    return summary(runs, ends)


def summary(runs: list[dict[str, Any]], ends: list[dict[str, Any]]) -> Row:
    """The row of these kills, and of the ends of their queries."""
    figures: list[Figure] = []
    details: list[str] = []
    for broker in sorted({run["broker"] for run in runs}):
        those = [run for run in runs if run["broker"] == broker]
        times = [run["kill_s"] for run in those]
        figures.append(Figure("kill_s", median(times), GOAL_S, variant=broker))
        figures.append(Figure("promote_s", median(run["promote_s"] for run in those), variant=broker))
        figures.append(Figure("active_s", median(run["active_s"] for run in those), variant=broker))
        details.append(f"{broker}: {median(times):.2f} s (median of {len(times)}, {min(times):.2f} to {max(times):.2f})")
    figures += [Figure(key, sum(end[key] for end in ends), 0, digits=0) for key in ("missing", "twice")]
    return Row("P7F", figures, "; ".join(details), [*runs, *ends])


def _follow(spark: SparkSession, lab: Lab, rounds: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds the runs; returns what became of the entries."""
    with started("entries", url=lab.nodes["e1"].door, site="west", rate=RATE) as process:
        read(process)
        wait_snapshot(lab, lab.primary("west") or "w1")
        with running(spark, [lab.nodes[name].door for name in ("w1", "w2")]) as (query, arrivals):
            tell(process)
            wait("a first row", query, lambda: arrivals.entries)
            for number in range(rounds):
                runs.append(_fail_over(lab, query, arrivals) | {"broker": lab.version})
                note(f"P7F {number + 1}/{rounds} {runs[-1]}")
            tell(process)
            sent = finish(process, WAIT_S)["sent"]
            wait("the last row", query, lambda: not arrivals.missing(sent))
    return {"broker": lab.version, "sent": sent, "missing": arrivals.missing(sent), "twice": arrivals.twice()}


def _fail_over(lab: Lab, query: StreamingQuery, arrivals: Arrivals) -> dict[str, Any]:
    until("both nodes in the set", lambda: _in_sync(lab), SETTLE_S)
    settled = time.monotonic()
    wait("the query to catch up", query, lambda: arrivals.first_due_after(settled))
    time.sleep(BETWEEN_S)
    primary = lab.primary("west") or ""
    backup = "w2" if primary == "w1" else "w1"
    load, killed_at = os.getloadavg(), time.monotonic()
    lab.kill(primary)
    promoted_at = time.monotonic()
    lab.promote(backup, down=[primary])
    active_at = time.monotonic()
    wait("a new row", query, lambda: arrivals.first_due_after(killed_at))
    came = arrivals.first_due_after(killed_at) or 0.0
    lab.start(primary)
    return {
        "kill_s": came - killed_at, "promote_s": came - promoted_at, "active_s": active_at - promoted_at, "primary": primary, "load": load,
    }  # fmt: skip


def _in_sync(lab: Lab) -> bool:
    """Whether both nodes of the pair are in the in-sync set, and the other one may be promoted."""
    primary = lab.primary("west")
    if primary is None:
        return False
    backup = "w2" if primary == "w1" else "w1"
    return set(lab.status(primary)["members"]) == {"w1", "w2"} and bool(lab.status(backup)["role"] == "ready")
