"""P10: what it takes to let a node join: a newcomer with an empty log that follows from the log's beginning, and a renewal (R17), under traffic.

Rules:
- The newcomer is a node of the pair whose broker has lost everything. While it is away the log grows by so many bytes, which stay in queues, half of
  them classic and half quorum. Its broker is up when the clock begins, with the start of its sidecar; the clock ends when the primary counts the
  newcomer as in sync, and once more when it has applied all of it. Each round has a lab of its own, so that there is nothing else in the log.
- A renewal is `lrq-ha renew`, on the same backlog; the clock runs from the command to its end. It says for how long a queue stood still at most.
- A publisher and a consumer of a queue of their own keep going at a steady rate throughout: the longest pause of each is set beside that of as
  long a time before, when nothing happens. Their own loop is busy every few milliseconds, which is the least that can be seen.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab

from .cost import cpu_of
from .measure import WAIT_S, Figure, Row, applied, declare, go, note, read, ready, run_command, started, until

SIZE_BYTES = 1024
RATE = 500.0  # messages/s of the clients that watch
WINDOW_MESSAGES = 5_000
BATCH_MESSAGES = 50
KINDS = ("classic", "quorum")
WATCHED = "bench-join-watched"
NEWCOMER = "e2"
_PREFIX = {"join": "join", "renewal": "renew"}  # beginnings of figures' names
_QUEUE_PAUSE = re.compile(r"stood still was ([0-9.]+) s")
FLOW_S = 0.2  # long enough for several of their messages


@dataclass(frozen=True)
class Plan:
    """How much is measured: rounds, messages of 1 KB in the log and in queues, seconds of the quiet time before, and a limit for each step."""

    rounds: int = 2
    messages: int = 300_000
    quiet_s: float = 10.0
    limit_s: float = 900.0


SHORT = Plan(1, 20_000, 3.0)


def p10(brokers: list[str], plan: Plan) -> Row:
    """Joins and renewals, in turns; medians of the worst broker. There is no goal: what a join may cost depends on who watches."""
    runs: list[dict[str, Any]] = []
    for broker in brokers:
        for _ in range(plan.rounds):
            with Lab({"east": 2}, broker=broker, sites={}) as lab:
                for step in (_join, _renew):
                    runs.append(step(lab, plan))
                    note(f"P10 {_told(runs[-1])}")
    return summary(runs)


def summary(runs: list[dict[str, Any]]) -> Row:
    """The row of these runs."""
    details = []
    figures: list[Figure] = []
    for what, broker in sorted({(run["what"], run["broker"]) for run in runs}):
        those = [run for run in runs if (run["what"], run["broker"]) == (what, broker)]
        mb_s, pause_ms = median(run["mb_s"] for run in those), max(run["meanwhile"]["delivery_pause_ms"] for run in those)
        figures.append(Figure(f"{_PREFIX[what]}_mb_s", mb_s, least=True, variant=broker, digits=1))
        figures.append(Figure(f"{_PREFIX[what]}_pause_ms", pause_ms, variant=broker, digits=0))
        details.append(f"{broker} {what} {mb_s:.1f} MB/s, longest pause of the consumer {pause_ms:.0f} ms " + _pauses(those))
    figures += [Figure("renew_queue_pause_ms", run["queue_pause_ms"], variant=run["broker"], digits=0) for run in runs if run["what"] == "renewal"]
    return Row("P10", figures, "; ".join(details), runs)


def _pauses(those: list[dict[str, Any]]) -> str:
    quiet = max(run["before"]["delivery_pause_ms"] for run in those)
    confirm, before = (max(run[when]["longest_confirm_ms"] for run in those) for when in ("meanwhile", "before"))
    gap = max(run["meanwhile"]["confirm_pause_ms"] for run in those)
    return f"({quiet:.0f} before), longest confirm {confirm:.0f} ms ({before:.0f} before), longest time between two confirms {gap:.0f} ms"


def _told(run: dict[str, Any]) -> str:
    return f"{run['broker']} {run['what']}: {run['mb']:.0f} MB in {run['seconds']:.1f} s, {run['mb_s']:.1f} MB/s " + _pauses([run])


def _join(lab: Lab, plan: Plan) -> dict[str, Any]:
    primary, door = "e1", lab.nodes["e1"].door
    lab.kill(NEWCOMER)
    until("it to be out of the set", lambda: lab.status(primary)["members"] == [primary])
    shutil.rmtree(lab.directory / NEWCOMER / "data")
    for kind in KINDS:
        _fill(door, f"bench-join-{kind}", kind, plan.messages // len(KINDS))
    lab.start(f"{NEWCOMER}.broker")
    with _clients(lab) as watching:
        before, load, used = _quiet(watching, plan), os.getloadavg(), cpu_of(lab)
        began = time.monotonic()
        lab.start(f"{NEWCOMER}.sidecar")
        started_s = time.monotonic() - began
        until("it to be in sync", lambda: NEWCOMER in lab.status(primary)["members"], plan.limit_s)
        seconds = time.monotonic() - began
        meanwhile = _since(watching)
        applied(lab, plan.limit_s)
        applied_s = time.monotonic() - began
        applying, after = _since(watching), cpu_of(lab)
    return _figures(lab, plan, seconds, before, meanwhile) | {
        "what": "join", "load": load, "started_s": started_s, "applied_s": applied_s, "applying": applying,
        "cpu_s": {key: after[key] - used.get(key, 0.0) for key in after},
    }  # fmt: skip


def _renew(lab: Lab, plan: Plan) -> dict[str, Any]:
    with _clients(lab) as watching:
        before, load, used = _quiet(watching, plan), os.getloadavg(), cpu_of(lab)
        began = time.monotonic()
        said = run_command(lab, "renew", timeout_s=plan.limit_s)
        seconds = time.monotonic() - began
        meanwhile, after = _since(watching), cpu_of(lab)
        pause = _QUEUE_PAUSE.search(said)
        if pause is None:
            raise LrqError(f"The renewal does not say how long a queue stood still: {said}")
    return _figures(lab, plan, seconds, before, meanwhile) | {
        "what": "renewal", "load": load, "said": said, "queue_pause_ms": 1000 * float(pause[1]),
        "cpu_s": {key: after[key] - used[key] for key in after},
    }  # fmt: skip


def _figures(lab: Lab, plan: Plan, seconds: float, before: dict[str, Any], meanwhile: dict[str, Any]) -> dict[str, Any]:
    mb = plan.messages * SIZE_BYTES / 1e6
    return {
        "broker": lab.version, "messages": plan.messages, "mb": mb, "seconds": seconds, "mb_s": mb / seconds,
        "before": before, "meanwhile": meanwhile,
    }  # fmt: skip


def _fill(url: str, queue: str, kind: str, messages: int) -> None:
    declare(url, queue, kind)
    with ready("publish", url=url, queue=queue, messages=messages, size_bytes=SIZE_BYTES, connections=1, channels=1, window=WINDOW_MESSAGES,
               batch=BATCH_MESSAGES, warm_up=0) as process:
        go(process)


@contextmanager
def _clients(lab: Lab) -> Iterator[subprocess.Popen[str]]:
    """The publisher and the consumer that watch; they flow."""
    declare(lab.nodes["e1"].door, WATCHED, "classic")
    urls = [node.door for node in lab.nodes.values()]
    with started("steady", urls=urls, queue=WATCHED, size_bytes=SIZE_BYTES, rate=RATE) as process:
        read(process)
        yield process
        if process.stdin is not None:
            process.stdin.close()
        process.wait(WAIT_S)


def _quiet(watching: subprocess.Popen[str], plan: Plan) -> dict[str, Any]:
    """What the clients see while nothing happens."""
    go(watching)
    time.sleep(plan.quiet_s)
    return go(watching)


def _since(watching: subprocess.Popen[str]) -> dict[str, Any]:
    """What the clients have seen since they were asked last, up to when both flow again."""
    found = go(watching)
    while True:
        time.sleep(FLOW_S)
        more = go(watching)
        for key in ("longest_confirm_ms", "confirm_pause_ms", "delivery_pause_ms", "losses"):
            found[key] = max(found[key], more[key])
        if more["confirms"] and more["deliveries"]:
            return found
