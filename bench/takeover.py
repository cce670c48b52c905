"""P13: a group that etcd coordinates loses its primary, and no operator is there: time from the fault to the first confirm.

Rules: a client asks the backup's door every RETRY_S until it confirms a publish. The lease has LEASE_TTL_S. Faults take turns; after each one the
node comes back, and the next fault begins when both are in the set, in etcd, too, and the lease was renewed at a moment drawn from a seed before.
With so few rounds the 99th percentile is the longest.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pika
from pika.exceptions import AMQPError

from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab

from .measure import WAIT_S, Figure, Row, declare, note, until

LEASE_TTL_S = 5.0
RETRY_S = 0.2
QUEUE = "bench-takeover"
SETTLE_S = 6.0


def _terminate(lab: Lab, primary: str) -> None:
    pid = lab.nodes[primary].sidecar_pid
    if pid is None:
        raise LrqError(f"The sidecar of {primary} is not running")
    os.kill(pid, signal.SIGTERM)


#: name -> the fault, and the goals in seconds: median, longest.
FAULTS: dict[str, tuple[Callable[[Lab, str], None], float, float]] = {
    "sidecar_ended": (_terminate, 1.0, 2.0),
    "broker_killed": (lambda lab, primary: lab.kill(f"{primary}.broker"), 2.5, 4.0),
    "sidecar_killed": (lambda lab, primary: lab.kill(f"{primary}.sidecar"), 5.0, 7.0),
    "host_killed": (lambda lab, primary: lab.kill(primary), 5.0, 7.0),
    "host_stopped": (lambda lab, primary: lab.stop(primary), 5.0, 7.0),
}


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
    return summary(runs)


def summary(runs: list[dict[str, Any]]) -> Row:
    """The row of these runs."""
    figures, details = [], []
    for broker, fault in sorted({(run["broker"], run["fault"]) for run in runs}):
        times = [run["seconds"] for run in runs if (run["broker"], run["fault"]) == (broker, fault)]
        _, middle, longest = FAULTS[fault]
        figures += [
            Figure(f"{fault}_p50_s", median(times), middle, variant=broker, digits=1),
            Figure(f"{fault}_p99_s", max(times), longest, variant=broker, digits=1),
        ]
        details.append(f"{broker} {fault}: {median(times):.1f} s (median of {len(times)}, {min(times):.1f} to {max(times):.1f})")
    return Row("P13", figures, "; ".join(details), runs)


def _round(lab: Lab, fault: str, rng: random.Random) -> dict[str, Any]:
    until("both nodes in the set", lambda: _in_sync(lab), WAIT_S)
    primary = lab.primary("east") or ""
    backup = next(name for name in lab.nodes if name != primary)
    time.sleep(rng.uniform(0, LEASE_TTL_S / 3))
    load, began = os.getloadavg(), time.monotonic()
    FAULTS[fault][0](lab, primary)
    until("a confirm", lambda: _confirms(lab.nodes[backup].door), WAIT_S)
    seconds = time.monotonic() - began
    if fault == "host_stopped":
        lab.cont(primary)
    else:
        until("the end", lambda: lab.nodes[primary].sidecar_pid is None or fault == "broker_killed", WAIT_S)
        lab.start(primary)
    return {"fault": fault, "seconds": round(seconds, 3), "load": load}


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
    return set(status["members"]) == set(status["coordination"]["set"]) == set(lab.nodes) and backups == ["ready"]
