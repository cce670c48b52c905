"""P12, P12D: what the pipeline costs: a full snapshot, deltas on it, and the time from a kill to the next version; as Parquet, and as Delta.

Rules: rows are in the queue before a job starts, 100 in a payload, so a job applies them as one version. Both forms follow one queue, in one Spark,
and take turns. The time is the job's own, from the batch to the version, reading included; CPU time is that of Spark and its Python workers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from pyspark.sql import SparkSession

from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.spark.pipeline import store
from lrq_ha.spark.pipeline.config import Config
from lrq_ha.spark.pipeline.run import Job
from lrq_ha.spark.session import session

from .measure import Figure, Row, note, until
from .received import ReceiveQueue, spark_cpu_s, transaction

FORMATS = {"P12": "parquet", "P12D": "delta"}
PER_PAYLOAD, PER_MESSAGE = 100, 50
DELETED = 0.01
COLUMNS = "id BIGINT, carrier STRING, dep_delay BIGINT, origin STRING, at STRING"
START_S = 600.0


@dataclass(frozen=True)
class Plan:
    """A snapshot of `rows`, then `rounds` times so many changed rows of each size of `deltas`."""

    rows: int = 10_000_000
    deltas: tuple[int, ...] = (10_000, 500_000)
    rounds: int = 3
    memory: str = "4g"


SHORT = Plan(rows=200_000, deltas=(10_000, 50_000), rounds=1, memory="1g")


def p12(brokers: list[str], plan: Plan) -> Row:
    """Parquet and Delta side by side: figures of Delta have names that begin with delta_."""
    figures: list[Figure] = []
    runs: list[dict[str, Any]] = []
    for broker in brokers:
        with tempfile.TemporaryDirectory() as folder, Lab({"west": 1}, broker=broker, brokers_only=True) as lab:
            those = _measure(ReceiveQueue(lab, "tables"), Path(folder), plan)
        runs += [{"broker": broker, **run} for run in those]
        for name in FORMATS:
            figures += _figures(broker, name, [run for run in those if run["row"] == name])
    sizes = " and ".join(f"{rows:,}" for rows in plan.deltas)
    return Row("P12", figures, f"{plan.rows:,} rows, then deltas of {sizes}", runs)


def _measure(queue: ReceiveQueue, folder: Path, plan: Plan) -> list[dict[str, Any]]:
    """All runs on a queue."""
    runs: list[dict[str, Any]] = []
    numbers, random = count(1), Random(1)
    configs = {name: _config(queue, folder / name, form) for name, form in FORMATS.items()}

    def change(rows: int = plan.deltas[0]) -> None:
        queue.fill(_deltas(numbers, random, plan.rows, rows))

    def add(name: str, step: str, rows: int, found: dict[str, float]) -> None:
        runs.append({"row": name, "step": step, "rows": rows, "load": os.getloadavg(), **found})
        note(f"P12 {runs[-1]}")

    queue.fill(_snapshot(numbers, plan.rows))
    steps = [("snapshot", plan.rows), *(("delta", rows) for _ in range(plan.rounds) for rows in plan.deltas)]
    with session(memory=plan.memory) as spark:
        for turn, (step, rows) in enumerate(steps):
            if step == "delta":
                change(rows)
            for name in list(FORMATS)[:: -1 if turn % 2 else 1]:
                add(name, step, rows, _apply(spark, configs[name], rows))
    for name, config in configs.items():
        add(name, "again", 0, {"s": _again(config, folder, change)})
    return runs


def _figures(broker: str, name: str, runs: list[dict[str, Any]]) -> Iterator[Figure]:
    prefix, has_goal = ("", True) if name == "P12" else ("delta_", False)
    for step, rows in dict.fromkeys((run["step"], run["rows"]) for run in runs):
        those = [run for run in runs if (run["step"], run["rows"]) == (step, rows)]
        seconds = median(run["s"] for run in those)
        if step == "again":
            yield Figure(f"{prefix}again_s", seconds, 10 if has_goal else None, variant=broker, digits=1)
            continue
        goal = (200_000 if step == "snapshot" else 50_000) if has_goal else None
        yield Figure(f"{prefix}{step}_per_s", rows / seconds, goal, least=True, variant=f"{broker} {rows}", digits=0)
        yield Figure(f"{prefix}{step}_us", median(run["cpu_us"] for run in those), variant=f"{broker} {rows}", digits=1)


def _config(queue: ReceiveQueue, path: Path, form: str) -> dict[str, Any]:
    table = {"schema": COLUMNS, "key": ["id"], "buckets": 8}
    source = queue.options | {"maxEntriesPerTrigger": 1_000_000}
    return {"source": source, "tables": {"flights": table}, "sink": {"path": str(path), "format": form}}


def _apply(spark: SparkSession, config: dict[str, Any], rows: int) -> dict[str, float]:
    cpu_s = spark_cpu_s()
    Job(spark, Config.model_validate(config), note).run(interval_s=None)
    status = json.loads((Path(config["sink"]["path"]) / "status.json").read_text())
    assert status["put"] + status["deleted"] == rows
    return {"s": status["seconds"], "cpu_us": 1e6 * (spark_cpu_s() - cpu_s) / rows}


def _again(config: dict[str, Any], folder: Path, change: Callable[[], None]) -> float:
    """Seconds from the start of a job's process, after a kill, to its first version."""
    path, file = Path(config["sink"]["path"]), folder / "pipeline.toml"
    sections = {"source": config["source"], "tables.flights": config["tables"]["flights"], "sink": config["sink"]}
    lines = [[f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in part.items())] for name, part in sections.items()]
    file.write_text("\n".join(line for section in lines for line in section))
    before = max(store.list_versions(path))
    command = [sys.executable, "-m", "lrq_ha.spark.pipeline", str(file), "--interval", "0s"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        change()
        until("a version", lambda: max(store.list_versions(path)) > before, START_S)
        process.kill()
        process.wait()
        before = max(store.list_versions(path))
        change()
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        return until("the next version", lambda: max(store.list_versions(path)) > before, START_S)
    finally:
        process.kill()
        process.wait()


def _payload(op: str, rows: list[tuple[int, int]]) -> bytes:
    found = [{"id": number, "carrier": "UA", "dep_delay": delay, "origin": "EWR", "at": f"2026-01-01T00:00:{number}"} for number, delay in rows]
    return json.dumps({"table": "flights", "op": op, "rows": found}).encode()


def _snapshot(numbers: Iterator[int], rows: int) -> Iterator[list[pb.ReceivedTransaction]]:
    yield [transaction(next(numbers), [], pb.SNAPSHOT_SYNC, "r")]
    for begin in range(0, rows, PER_PAYLOAD * PER_MESSAGE):
        parts = [[(n, n % 500) for n in range(part, part + PER_PAYLOAD)] for part in range(begin, begin + PER_PAYLOAD * PER_MESSAGE, PER_PAYLOAD)]
        yield [transaction(next(numbers), [_payload("put", part) for part in parts], pb.SNAPSHOT_SYNC, "r")]
    yield [transaction(next(numbers), [], pb.LAST_FULL_SYNC_ENTRY, "r")]


def _deltas(numbers: Iterator[int], random: Random, keys: int, rows: int) -> Iterator[list[pb.ReceivedTransaction]]:
    deleted = int(rows * DELETED)
    for op, those in (("put", rows - deleted), ("delete", deleted)):
        for begin in range(0, those, PER_PAYLOAD):
            found = [(random.randrange(keys), begin) for _ in range(min(PER_PAYLOAD, those - begin))]
            yield [transaction(next(numbers), [_payload(op, found)])]
