"""P13: a group that etcd coordinates loses its primary, and no operator is there: time from the fault to the first confirm.

Rules: a client asks the backup's door every RETRY_S until it confirms a publish. Meanwhile others publish and consume. Each lease has a group of its
own. Faults take turns; after each one the node comes back, and the next fault begins when both are in the set, in etcd, too, and the lease was
renewed at a moment drawn from a seed before. With so few rounds the 99th percentile is the longest. While etcd stands still, no node may take over,
and confirms go on.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import pika
from pika.exceptions import AMQPError

from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab

from .measure import WAIT_S, Figure, Row, declare, go, note, read, run_command, started, until

RETRY_S = 0.2
QUEUE, BUSY_QUEUE = "bench-takeover", "bench-busy"
BUSY_RATE, BUSY_BYTES = 200, 1_024  # of the others: messages/s
SETTLE_S = 6.0


@dataclass(frozen=True)
class Plan:
    """Rounds of all faults with the short lease, and of those that only the end of a lease tells of with the long one."""

    rounds: int = 10
    long_rounds: int = 5


SHORT = Plan(2, 1)
LEASE_S, LONG_LEASE_S = 5.0, 10.0


def _terminate(lab: Lab, primary: str) -> None:
    pid = lab.nodes[primary].sidecar_pid
    if pid is None:
        raise LrqError(f"The sidecar of {primary} is not running")
    os.kill(pid, signal.SIGTERM)


def _switch_over(lab: Lab, _primary: str) -> None:
    run_command(lab, "switchover")


def _start(lab: Lab, primary: str) -> None:
    until("the end", lambda: lab.nodes[primary].sidecar_pid is None, WAIT_S)
    lab.start(primary)


class Fault(NamedTuple):
    """A fault of the primary's node.

    Attributes:
        cause: Puts it in, given the lab and the primary's name.
        mend: Brings the node back.
        goals: Seconds, median and longest, by the seconds of the lease with which the fault is measured.
    """

    cause: Callable[[Lab, str], object]
    mend: Callable[[Lab, str], object]
    goals: dict[float, tuple[float, float]]


_BY_LEASE = {LEASE_S: (5.0, 7.0), LONG_LEASE_S: (9.5, 12.0)}
#: By name.
FAULTS: dict[str, Fault] = {
    "switchover": Fault(_switch_over, lambda lab, primary: None, {LEASE_S: (1.0, 1.0)}),
    "sidecar_ended": Fault(_terminate, _start, {LEASE_S: (1.0, 2.0)}),
    "broker_killed": Fault(lambda lab, primary: lab.kill(f"{primary}.broker"), lambda lab, primary: lab.start(primary), {LEASE_S: (2.5, 4.0)}),
    "sidecar_killed": Fault(lambda lab, primary: lab.kill(f"{primary}.sidecar"), _start, _BY_LEASE),
    "host_killed": Fault(lambda lab, primary: lab.kill(primary), _start, _BY_LEASE),
    "broker_stopped": Fault(lambda lab, primary: lab.stop(f"{primary}.broker"), lambda lab, primary: lab.cont(f"{primary}.broker"), _BY_LEASE),
    "sidecar_stopped": Fault(lambda lab, primary: lab.stop(f"{primary}.sidecar"), lambda lab, primary: lab.cont(f"{primary}.sidecar"), _BY_LEASE),
    "host_stopped": Fault(lambda lab, primary: lab.stop(primary), lambda lab, primary: lab.cont(primary), _BY_LEASE),
}
ETCD_STOPPED = "etcd_stopped"
ETCD_GOAL_S = 1.0  # the longest time to a confirm meanwhile


def p13(brokers: list[str], plan: Plan) -> Row:
    """Each fault on each RabbitMQ, with each lease."""
    rounds = {LEASE_S: plan.rounds, LONG_LEASE_S: plan.long_rounds}
    return summary([run for broker in brokers for lease_s, count in rounds.items() for run in _group(broker, lease_s, count)])


def summary(runs: list[dict[str, Any]]) -> Row:
    """The row of these runs."""
    figures, details, times = [], [], dict[tuple[str, float, str], list[float]]()
    for run in runs:
        times.setdefault((run["broker"], run["lease_s"], run["fault"]), []).append(run["seconds"])
    for (broker, lease_s, fault), seconds in sorted(times.items()):
        variant = f"{broker} {lease_s:g} s"
        if fault == ETCD_STOPPED:
            figures.append(Figure(f"{fault}_confirm_s", max(seconds), ETCD_GOAL_S, variant=variant, digits=1))
        else:
            goals = FAULTS[fault].goals[lease_s]
            figures += [Figure(f"{fault}_p50_s", median(seconds), goals[0], variant=variant, digits=1)]
            figures += [Figure(f"{fault}_p99_s", max(seconds), goals[1], variant=variant, digits=1)]
        details.append(f"{variant} {fault}: {median(seconds):.1f} s (median of {len(seconds)}, {min(seconds):.1f} to {max(seconds):.1f})")
    return Row("P13", figures, "; ".join(details), runs)


def _group(broker: str, lease_s: float, rounds: int) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    faults = [name for name, fault in FAULTS.items() if lease_s in fault.goals]
    with Lab({"east": 2}, broker=broker, sites={}, coordination={"lease_ttl_s": lease_s}) as lab:
        urls = [node.door for node in lab.nodes.values()]
        for queue in (QUEUE, BUSY_QUEUE):
            declare(urls[0], queue, "classic")
        time.sleep(SETTLE_S)
        with started("steady", urls=urls, queue=BUSY_QUEUE, size_bytes=BUSY_BYTES, rate=BUSY_RATE) as busy:
            read(busy)
            rng = random.Random(1)
            for number in range(rounds):
                for fault in (*faults, ETCD_STOPPED):
                    run = _etcd_round(lab, lease_s) if fault == ETCD_STOPPED else _round(lab, fault, lease_s, rng)
                    runs.append(run | {"broker": lab.version, "lease_s": lease_s, "fault": fault})
                    note(f"P13 {broker} {lease_s:g} s {number + 1}/{rounds} {fault} {run['seconds']:.2f} s")
            go(busy)  # it fails if the others have ended
    return runs


def _round(lab: Lab, fault: str, lease_s: float, rng: random.Random) -> dict[str, Any]:
    until("both nodes in the set", lambda: _in_sync(lab), WAIT_S)
    primary = lab.primary("east") or ""
    backup = next(name for name in lab.nodes if name != primary)
    time.sleep(rng.uniform(0, lease_s / 3))
    load, began = os.getloadavg(), time.monotonic()
    FAULTS[fault].cause(lab, primary)
    until("a confirm", lambda: _confirms(lab.nodes[backup].door), WAIT_S)
    seconds = time.monotonic() - began
    FAULTS[fault].mend(lab, primary)
    return {"seconds": round(seconds, 3), "load": load}


def _etcd_round(lab: Lab, lease_s: float) -> dict[str, Any]:
    """The longest time to a confirm while etcd stands still for two leases. Raises LrqError if another node leads after that."""
    until("both nodes in the set", lambda: _in_sync(lab), WAIT_S)
    primary, load, longest = lab.primary("east") or "", os.getloadavg(), 0.0
    lab.stop("etcd")
    ends = time.monotonic() + 2 * lease_s
    while time.monotonic() < ends:
        began = time.monotonic()
        until("a confirm", lambda: _confirms(lab.nodes[primary].door), WAIT_S)
        longest = max(longest, time.monotonic() - began)
    lab.cont("etcd")
    until("both nodes in the set", lambda: _in_sync(lab), WAIT_S)
    if lab.primary("east") != primary:
        raise LrqError(f"{primary} no longer leads, although only etcd was away")
    return {"seconds": round(longest, 3), "load": load}


def _confirms(url: str) -> bool:
    began = time.monotonic()
    try:
        connection = pika.BlockingConnection(pika.URLParameters(url))
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", QUEUE, b"x", pika.BasicProperties(delivery_mode=2), mandatory=True)
        connection.close()
        return True
    except (AMQPError, OSError, ValueError):
        time.sleep(max(0.0, began + RETRY_S - time.monotonic()))
        return False


def _in_sync(lab: Lab) -> bool:
    primary = lab.primary("east")
    if primary is None:
        return False
    status = lab.status(primary)
    backups = [lab.status(name)["role"] for name in lab.nodes if name != primary]
    in_sets = set(status.get("members", ())), set(status["coordination"]["set"])
    return in_sets == (set(lab.nodes), set(lab.nodes)) and backups == ["ready"]
