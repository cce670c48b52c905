"""P8: what a snapshot costs on its way from a provider to a listener: MB/s, CPU time per MB, and the memory of all that it passes.

Rules:

- A group of one node transmits to another one. Provider and receiver are processes of their own: the first has its rows ready, the second's listener
  counts bytes. Rows go in transactions of 1 MB, whose rows differ: equal ones would be stored once. MB are 10^6 bytes of payload.
- The clock runs from the provider's first transmit to the end of `on_snapshot_sync_complete`.
- Memory is resident memory, read each SAMPLE_S. Its spread is half of the distance between the least and the greatest reading after the first tenth
  of the time: a process whose memory grows with the size of a snapshot has a large one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from lrq_ha.lab import Lab
from lrq_ha.publisher import FullSyncContext, FullSyncRequest, Publisher
from lrq_ha.receiver import Listener, Receiver, Snapshot, Update

from .cost import cpu_of
from .measure import WAIT_S, Figure, Row, finish, memory_bytes, note, read, repeated, started, tell
from .receiving import Memory

GOAL_MB_S = 150
GOAL_SPREAD_MB = 20
CLIENT = "bench"
TRANSACTION_BYTES = 1_000_000
SAMPLE_S = 0.1
ROW_BYTES = (1_000, 64_000)
SLOWEST_MB_S = 2  # for time limits


@dataclass(frozen=True)
class Plan:
    """MB of a snapshot, and how often each size of rows is measured."""

    mb: int = 5_000
    rounds: int = 1


SHORT = Plan(mb=100)


class _Counter(Listener):
    """Counts the bytes of a snapshot; `done` is set at its end. A client without a provider has an empty one, without a request."""

    def __init__(self) -> None:
        self.bytes, self.lists, self.begun, self.done = 0, 0, 0, threading.Event()

    def on_snapshot_sync_start(self, snapshot: Snapshot) -> None:
        self.bytes, self.lists, self.begun = 0, 0, self.begun + bool(snapshot.request_id)

    def process_updates_in_snapshot_sync(self, updates: list[Update]) -> bool:
        self.lists += 1
        self.bytes += sum(len(update.opaque_payload) for update in updates)
        return True

    def process_updates_in_log_entry_sync(self, updates: list[Update]) -> bool:
        return True

    def on_snapshot_sync_complete(self, snapshot: Snapshot) -> None:
        if snapshot.request_id:
            self.done.set()


def receive(url: str, timeout_s: float) -> dict[str, Any]:
    """The generator that receives one snapshot. Says that it is ready, and ends with the snapshot."""
    listener = _Counter()
    with Receiver([url], CLIENT, "bench", listener, positions=Memory()) as receiver:
        receiver.start()
        used = time.process_time()
        print(json.dumps({"ready": True}), flush=True)
        complete, ended, used = listener.done.wait(timeout_s), time.monotonic(), time.process_time() - used
    return {"complete": complete, "ended": ended, "bytes": listener.bytes, "lists": listener.lists, "begun": listener.begun, "cpu_s": used}


def provide(url: str, row_bytes: int, mb: int) -> dict[str, Any]:
    """The generator that supplies one snapshot. Says when it begins, and ends on a line."""
    rows = [b"%08d" % number + b"x" * (row_bytes - 8) for number in range(TRANSACTION_BYTES // row_bytes)]
    told: dict[str, Any] = {}

    def supply(_: FullSyncRequest, context: FullSyncContext) -> None:
        used = time.process_time()
        print(json.dumps({"began": time.monotonic()}), flush=True)
        for _number in range(mb * 1_000_000 // (len(rows) * row_bytes)):
            context.transmit_many(rows)
        context.complete()
        told["cpu_s"] = time.process_time() - used

    with Publisher([url], "bench-provider", CLIENT, confirm_timeout_s=WAIT_S) as publisher:
        publisher.on_full_sync(supply)
        sys.stdin.readline()
    return told


def p8(brokers: list[str], plan: Plan) -> Row:
    """Each size of rows in labs of its own."""
    runs: list[dict[str, Any]] = []
    for broker in brokers:
        for row_bytes in ROW_BYTES:
            for _ in range(plan.rounds):
                with Lab({"east": 1, "west": 1}, broker=broker, sites={"east": ["west"], "west": []}) as lab:
                    runs.append({"broker": broker, "row_bytes": row_bytes, "load": os.getloadavg()} | _run(lab, row_bytes, plan.mb))
                note(f"P8 {runs[-1]}")
    return summary(runs, plan.mb)


def summary(runs: list[dict[str, Any]], mb: int) -> Row:
    """The row of these runs."""
    figures: list[Figure] = []
    for broker, row_bytes in sorted({(run["broker"], run["row_bytes"]) for run in runs}):
        those = [run for run in runs if (run["broker"], run["row_bytes"]) == (broker, row_bytes)]
        variant = f"{broker} {row_bytes}"
        figures.append(Figure("mb_s", median(run["mb_s"] for run in those), GOAL_MB_S, least=True, variant=variant, digits=0))
        for part in those[0]["spread_mb"]:
            figures.append(Figure(f"{part}_spread_mb", max(run["spread_mb"][part] for run in those), GOAL_SPREAD_MB, variant=variant, digits=0))
            figures.append(Figure(f"{part}_peak_mb", max(run["peak_mb"][part] for run in those), variant=variant, digits=0))
        for part in those[0]["cpu_ms_mb"]:
            figures.append(Figure(f"{part}_ms_mb", median(run["cpu_ms_mb"][part] for run in those), variant=variant))
    return Row("P8", figures, f"{mb:,} MB in rows of {' and '.join(f'{size:,}' for size in ROW_BYTES)} B", runs)


def _run(lab: Lab, row_bytes: int, mb: int) -> dict[str, Any]:
    timeout_s = WAIT_S + mb / SLOWEST_MB_S
    pids = lab.processes()
    with (
        started("receive", url=lab.nodes["w1"].door, timeout_s=timeout_s) as receiver,
        started("provide", url=lab.nodes["e1"].door, row_bytes=row_bytes, mb=mb) as provider,
    ):
        watched = {"source": pids["e1.sidecar"], "sink": pids["w1.sidecar"], "receiver": receiver.pid}
        read(receiver)
        began, before = read(provider)["began"], cpu_of(lab)
        with sampled({part: pid for part, pid in watched.items() if pid is not None}) as samples:
            received = finish(receiver, timeout_s)
            after = cpu_of(lab)
        tell(provider)
        provided = finish(provider)
    cpu = {part: after[f"{node}.{kind}"] - before[f"{node}.{kind}"] for part, node, kind in _PARTS}
    cpu |= {"receiver": received["cpu_s"], "provider": provided["cpu_s"]}
    ended = received["ended"]
    done_mb, seconds = received["bytes"] / 1e6, ended - began
    first = began + seconds / 10
    memory = {part: [size / 1e6 for at, size in readings if first <= at <= ended] for part, readings in samples.items()}
    return {
        **received, "mb": done_mb, "s": seconds, "mb_s": done_mb / seconds,
        "cpu_ms_mb": {part: 1_000 * used / done_mb for part, used in cpu.items()},
        "spread_mb": {part: (max(found) - min(found)) / 2 for part, found in memory.items()},
        "peak_mb": {part: max(found) for part, found in memory.items()},
        "tenths_mb": {part: [round(found[len(found) * n // 10]) for n in range(10)] for part, found in memory.items()},
    }  # fmt: skip


_PARTS = (("source", "e1", "sidecar"), ("sink", "w1", "sidecar"), ("source_broker", "e1", "broker"), ("sink_broker", "w1", "broker"))


@contextmanager
def sampled(pids: dict[str, int]) -> Iterator[dict[str, list[tuple[float, int]]]]:
    """The resident memory of these processes while the context is open: by name, each reading with its instant."""
    samples: dict[str, list[tuple[float, int]]] = {name: [] for name in pids}

    def sample() -> None:
        for name, pid in pids.items():
            try:
                samples[name].append((time.monotonic(), memory_bytes(pid)))
            except OSError:
                continue  # it has ended

    with repeated(sample, SAMPLE_S):
        yield samples
