"""P14: the Spark sink beside the plain publisher: rows a second and CPU time, with transactions of equal size, in one run.

Rules: rows of 100 B go to two sites, 1,000 a transaction. A row counts when the group has confirmed it. The two ways take turns; the sites receive
meanwhile. The plain publisher is this process, with one thread that publishes. The sink has two partitions on local[2]; its CPU time is that of the
JVM and of all Python workers, and `noop_us` is what Spark takes to make those rows and to throw them away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from lrq_ha.lab import Lab
from lrq_ha.publisher import Publisher

from .cost import cpu_tree_s
from .measure import WAIT_S, Figure, Row, note, until

GOAL_PER_S, GOAL_RATIO = 150_000, 0.7
ROWS, SHORT_ROWS = 1_000_000, 100_000
ROW_BYTES = 100
PER_TRANSACTION = 1_000
SITES = ("west", "south")


def p14(brokers: list[str], rows: int, rounds: int) -> Row:
    """Writes so many rows in each way, so many times, to a group of one node with two sites."""
    from lrq_ha.spark.session import session

    runs: list[dict[str, Any]] = []
    spark = session()
    jvm = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    try:
        frame = spark.range(0, rows, 1, 2).selectExpr(f"CAST(lpad(id, {ROW_BYTES}, 'x') AS BINARY) AS payload")
        for broker in brokers:
            with Lab({"east": 1, "west": 1, "south": 1}, broker=broker, sites={"east": list(SITES)}) as lab:
                door = lab.nodes["e1"].door
                to = {"nodes": door, "producer": "bench-sink", "clientName": "bench", "destinations": ",".join(SITES)}

                def write(frame: Any = frame, to: dict[str, str] = to) -> None:
                    frame.write.format("lrq").mode("append").options(**to, rowsPerTransaction=PER_TRANSACTION).save()

                frame.limit(PER_TRANSACTION).write.format("lrq").mode("append").options(**to).save()  # Spark's and the sites' first steps
                for number in range(rounds):
                    ways: dict[str, tuple[int, Callable[[], object]]] = {
                        "noop": (jvm, lambda: frame.write.format("noop").mode("append").save()),
                        "sink": (jvm, write),
                        "plain": (os.getpid(), lambda door=door: _publish(door, rows)),
                    }
                    run: dict[str, Any] = {"broker": broker, "load": os.getloadavg()}
                    for way in sorted(ways, reverse=bool(number % 2)):
                        run[way] = _measure(*ways[way], tree=way != "plain")
                        until("the sites to have all", lambda lab=lab: _have_all(lab))
                    runs.append(run)
                    note(f"P14 {run}")
    finally:
        spark.stop()
    return _summary(runs, rows)


def _publish(door: str, rows: int) -> None:
    def transactions() -> Iterator[list[tuple[bytes, tuple[str, ...]]]]:
        for first in range(0, rows, PER_TRANSACTION):
            yield [(b"%0*d" % (ROW_BYTES, number), SITES) for number in range(first, first + PER_TRANSACTION)]

    with Publisher([door], "bench-plain", "bench") as publisher:
        for entries in transactions():
            publisher.transmit_log_entry_messages(entries)
        publisher.flush(WAIT_S)


def _measure(pid: int, work: Callable[[], object], *, tree: bool) -> dict[str, float]:
    """`s`, and `cpu_s` of a process: with `tree` of all its descendants, too."""
    cpu = cpu_tree_s(pid) if tree else time.process_time()
    began = time.monotonic()
    work()
    took = time.monotonic() - began
    return {"s": took, "cpu_s": (cpu_tree_s(pid) if tree else time.process_time()) - cpu}


def _have_all(lab: Lab) -> bool:
    sessions = lab.status("e1")["sessions"]
    states = [session["clients"].get("bench") for site in SITES if (session := sessions.get(site))]
    return len(states) == len(SITES) and all(s and s["in_flight_bytes"] == 0 and s["acked"] == s["sent"] for s in states)


def _summary(runs: list[dict[str, Any]], rows: int) -> Row:
    figures: list[Figure] = []
    for broker in sorted({run["broker"] for run in runs}):
        those = [run for run in runs if run["broker"] == broker]
        figures.append(Figure("sink_per_s", median(rows / run["sink"]["s"] for run in those), GOAL_PER_S, least=True, variant=broker, digits=0))
        figures.append(Figure("ratio", median(run["plain"]["s"] / run["sink"]["s"] for run in those), GOAL_RATIO, least=True, variant=broker))
        figures.append(Figure("plain_per_s", median(rows / run["plain"]["s"] for run in those), variant=broker, digits=0))
        for way in ("sink", "noop", "plain"):
            figures.append(Figure(f"{way}_us", median(1e6 * run[way]["cpu_s"] / rows for run in those), variant=broker))
    return Row("P14", figures, f"{rows:,} rows of {ROW_BYTES} B, {PER_TRANSACTION} a transaction, to {len(SITES)} sites", runs)
