"""P13: a group that etcd coordinates loses its primary, and no operator is there: time from the fault to the first confirm.

Rules: a client asks the backup's door every RETRY_S until it confirms a publish. The lease has LEASE_TTL_S. Faults take turns; after each one the
node comes back, and the next fault begins when both are in the set, in etcd, too, and the lease was renewed at a moment drawn from a seed before.
With so few rounds the 99th percentile is the longest. While etcd stands still, no node may take over, and confirms go on.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import pika
from pika.exceptions import AMQPError

from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab

from .measure import WAIT_S, Figure, Row, declare, note, run_command, until

LEASE_TTL_S = 5.0
RETRY_S = 0.2
QUEUE = "bench-takeover"
SETTLE_S = 6.0


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
        median_s, longest_s: The goals.
    """

    cause: Callable[[Lab, str], object]
    mend: Callable[[Lab, str], object]
    median_s: float
    longest_s: float


#: By name, with goals for a lease of LEASE_TTL_S.
FAULTS: dict[str, Fault] = {
    "switchover": Fault(_switch_over, lambda lab, primary: None, 1.0, 1.0),
    "sidecar_ended": Fault(_terminate, _start, 1.0, 2.0),
    "broker_killed": Fault(lambda lab, primary: lab.kill(f"{primary}.broker"), lambda lab, primary: lab.start(primary), 2.5, 4.0),
    "sidecar_killed": Fault(lambda lab, primary: lab.kill(f"{primary}.sidecar"), _start, 5.0, 7.0),
    "host_killed": Fault(lambda lab, primary: lab.kill(primary), _start, 5.0, 7.0),
    "broker_stopped": Fault(lambda lab, primary: lab.stop(f"{primary}.broker"), lambda lab, primary: lab.cont(f"{primary}.broker"), 5.0, 7.0),
    "sidecar_stopped": Fault(lambda lab, primary: lab.stop(f"{primary}.sidecar"), lambda lab, primary: lab.cont(f"{primary}.sidecar"), 5.0, 7.0),
    "host_stopped": Fault(lambda lab, primary: lab.stop(primary), lambda lab, primary: lab.cont(primary), 5.0, 7.0),
}
ETCD_STOPPED = "etcd_stopped"
ETCD_GOAL_S = 1.0  # the longest time to a confirm meanwhile


def p13(brokers: list[str], rounds: int) -> Row:
    """Each fault so many times on each RabbitMQ."""
    runs: list[dict[str, Any]] = []
    for broker in brokers:
        with Lab({"east": 2}, broker=broker, sites={}, coordination={"lease_ttl_s": LEASE_TTL_S}) as lab:
            declare(lab.nodes["e1"].door, QUEUE, "classic")
            time.sleep(SETTLE_S)
            rng = random.Random(1)
            for number in range(rounds):
                for fault in FAULTS:
                    runs.append(_round(lab, fault, rng) | {"broker": lab.version})
                    note(f"P13 {broker} {number + 1}/{rounds} {fault} {runs[-1]['seconds']:.2f} s")
                runs.append(_etcd_round(lab) | {"broker": lab.version})
                note(f"P13 {broker} {number + 1}/{rounds} {ETCD_STOPPED} {runs[-1]['seconds']:.2f} s at most")
    return summary(runs)


def summary(runs: list[dict[str, Any]]) -> Row:
    """The row of these runs."""
    figures, details = [], []
    for broker, fault in sorted({(run["broker"], run["fault"]) for run in runs}):
        times = [run["seconds"] for run in runs if (run["broker"], run["fault"]) == (broker, fault)]
        if fault == ETCD_STOPPED:
            figures.append(Figure(f"{fault}_confirm_s", max(times), ETCD_GOAL_S, variant=broker, digits=1))
        else:
            figures += [
                Figure(f"{fault}_p50_s", median(times), FAULTS[fault].median_s, variant=broker, digits=1),
                Figure(f"{fault}_p99_s", max(times), FAULTS[fault].longest_s, variant=broker, digits=1),
            ]
        details.append(f"{broker} {fault}: {median(times):.1f} s (median of {len(times)}, {min(times):.1f} to {max(times):.1f})")
    return Row("P13", figures, "; ".join(details), runs)


def _round(lab: Lab, fault: str, rng: random.Random) -> dict[str, Any]:
    until("both nodes in the set", lambda: _in_sync(lab), WAIT_S)
    primary = lab.primary("east") or ""
    backup = next(name for name in lab.nodes if name != primary)
    time.sleep(rng.uniform(0, LEASE_TTL_S / 3))
    load, began = os.getloadavg(), time.monotonic()
    FAULTS[fault].cause(lab, primary)
    until("a confirm", lambda: _confirms(lab.nodes[backup].door), WAIT_S)
    seconds = time.monotonic() - began
    FAULTS[fault].mend(lab, primary)
    return {"fault": fault, "seconds": round(seconds, 3), "load": load}


def _etcd_round(lab: Lab) -> dict[str, Any]:
    """The longest time to a confirm while etcd stands still for two leases. Raises LrqError if another node leads after that."""
    until("both nodes in the set", lambda: _in_sync(lab), WAIT_S)
    primary, load, longest = lab.primary("east") or "", os.getloadavg(), 0.0
    lab.stop("etcd")
    ends = time.monotonic() + 2 * LEASE_TTL_S
    while time.monotonic() < ends:
        began = time.monotonic()
        until("a confirm", lambda: _confirms(lab.nodes[primary].door), WAIT_S)
        longest = max(longest, time.monotonic() - began)
    lab.cont("etcd")
    until("both nodes in the set", lambda: _in_sync(lab), WAIT_S)
    if lab.primary("east") != primary:
        raise LrqError(f"{primary} no longer leads, although only etcd was away")
    return {"fault": ETCD_STOPPED, "seconds": round(longest, 3), "load": load}


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
