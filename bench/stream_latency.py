"""P7L: how late an entry reaches a streaming query, and how long Spark's driver plans a micro-batch of many receive queues.

Rules:

- The latency runs from the instant at which the source's publisher was to transmit an entry to the instant at which the driver has the batch with
  it in `foreachBatch`: 1,000 entries/s, ten a transaction, from a group of one node to another one. The query reads at the sink's door.
- A plan is `latestOffset` and `partitions` on one connection to a broker, without Spark. New messages stand in one queue, or in all of them.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from lrq_ha.lab import Lab
from lrq_ha.spark.options import parse_options
from lrq_ha.spark.session import session
from lrq_ha.spark.stream_reader import LrqStreamReader

from .measure import WAIT_S, Figure, Row, finish, note, percentile, read, started, tell
from .received import ReceiveQueue, transaction
from .stream_query import durations, running, spark_and_driver_s, wait, wait_snapshot

GOAL_P99_MS = 1_000
GOALS_PLAN_MS = {1: 20, 100: 50, 1_000: 200}
RATE = 1_000
FEW_QUEUES = 100  # more of them are planned fewer times


@dataclass(frozen=True)
class Plan:
    """Seconds that a query runs before it counts, and that it counts; numbers of queues, and how many plans of each."""

    warm_up_s: float = 20.0
    seconds: float = 60.0
    queues: tuple[int, ...] = (1, 100, 1_000)
    plans: int = 11


SHORT = Plan(warm_up_s=5.0, seconds=10.0, queues=(1, 100), plans=3)


def p7l(brokers: list[str], plan: Plan) -> Row:
    """The latency, then the plans."""
    figures: list[Figure] = []
    runs: list[dict[str, Any]] = []
    for broker in brokers:
        those = [_follow(broker, plan), *_plan_batches(broker, plan)]
        runs += those
        figures += figures_of(broker, those)
    return Row("P7L", figures, f"{RATE:,} rows/s for {plan.seconds:g} s; plans of {plan.queues} queues", runs)


def figures_of(broker: str, runs: list[dict[str, Any]]) -> list[Figure]:
    """The figures of a broker's runs."""
    found: list[Figure] = []
    for run in runs:
        if run["step"] == "latency":
            found.append(Figure("p50_ms", run["p50_ms"], variant=broker, digits=0))
            found.append(Figure("p99_ms", run["p99_ms"], GOAL_P99_MS, variant=broker, digits=0))
            found.append(Figure("rows_per_s", run["rows_per_s"], least=True, variant=broker, digits=0))
            found.append(Figure("cores", run["cores"], variant=broker))
        else:
            count = run["queues"]
            found.append(Figure(f"plan_{count}_ms", run["one_ms"], GOALS_PLAN_MS.get(count), variant=broker, digits=1))
            found.append(Figure(f"plan_all_{count}_ms", run["all_ms"], variant=broker, digits=1))
    return found


def _follow(broker: str, plan: Plan) -> dict[str, Any]:
    with (
        session() as spark,
        Lab({"east": 1, "west": 1}, broker=broker, sites={"east": ["west"], "west": []}) as lab,
        started("entries", url=lab.nodes["e1"].door, site="west", rate=RATE) as process,
    ):
        read(process)
        wait_snapshot(lab, "w1")
        with running(spark, [lab.nodes["w1"].door]) as (query, arrivals):
            tell(process)
            wait("a first row", query, lambda: arrivals.entries)
            time.sleep(plan.warm_up_s)
            load, began, cpu_s = os.getloadavg(), time.monotonic(), spark_and_driver_s(spark)
            time.sleep(plan.seconds)
            ended, cpu_s = time.monotonic(), spark_and_driver_s(spark) - cpu_s
            tell(process)
            told = finish(process, WAIT_S)
            wait("the last row", query, lambda: not arrivals.missing(told["sent"]))
            steps = durations(query)
    waited = sorted(1_000 * (came - due) for due, came, _ in arrivals.entries if began <= due < ended)
    batches = [rows for came, rows in arrivals.batches if began <= came < ended and rows]
    run = {
        "step": "latency", "broker": broker, "load": load, "p50_ms": median(waited), "p99_ms": percentile(waited, 0.99), "max_ms": waited[-1],
        "rows": len(waited), "rows_per_s": len(waited) / (ended - began), "batches": len(batches), "batch_rows": median(batches),
        "cores": cpu_s / (ended - began), "steps_ms": steps, **told,
    }  # fmt: skip
    note(f"P7L {run}")
    return run


def _plan_batches(broker: str, plan: Plan) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    with Lab({"west": 1}, broker=broker, brokers_only=True) as lab:
        queues: list[ReceiveQueue] = []
        for count in plan.queues:
            began = time.monotonic()
            queues += [ReceiveQueue(lab, f"bench{number}") for number in range(len(queues), count)]
            planner, plans = _Planner(queues), min(plan.plans, 3) if count > FEW_QUEUES else plan.plans
            run: dict[str, Any] = {"step": "plan", "broker": broker, "queues": count, "made_s": time.monotonic() - began, "load": os.getloadavg()}
            try:
                planner.write(len(queues))
                run["begin_ms"] = planner.plan()  # fixes where queues begin
                run["one_ms"] = median(planner.plan_after(1) for _ in range(plans))
                run["idle_ms"] = median(planner.plan() for _ in range(plans))
                run["all_ms"] = median(planner.plan_after(count) for _ in range(1 if count > FEW_QUEUES else min(plans, 3)))
            finally:
                planner.reader.stop()
            runs.append(run)
            note(f"P7L {run}")
    return runs


class _Planner:
    """The driver's side of a query on these queues."""

    def __init__(self, queues: list[ReceiveQueue]) -> None:
        self._queues = queues
        names = ",".join(queue.name for queue in queues)
        self.reader = LrqStreamReader(parse_options(queues[0].options | {"subscribe": names, "startingOffsets": "latest"}))
        self._offset: dict[str, dict[str, int]] = self.reader.initialOffset()

    def write(self, count: int) -> None:
        """A message for each of the first so many queues."""
        for queue in self._queues[:count]:
            queue.fill([[transaction(queue.sequence + 1, [b"x" * 100])]])

    def plan(self) -> float:
        """Plans a batch of all that is new; returns the ms."""
        began = time.monotonic()
        end = self.reader.latestOffset(self._offset, self.reader.getDefaultReadLimit())
        self.reader.partitions(self._offset, end)
        self._offset = end
        return 1_000 * (time.monotonic() - began)

    def plan_after(self, count: int) -> float:
        """As `plan`, with a new message in each of so many queues."""
        self.write(count)
        return self.plan()
