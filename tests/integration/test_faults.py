"""Kills in the middle of a confirmed stream with a consumer that acks: nothing lost, nothing twice, both nodes equal at the end (G1–G5)."""

from __future__ import annotations

import os
import random
import time

import pytest
from load import Load, declare, depth, eventually

from lrq_ha.demo import check as checks
from lrq_ha.lab import Lab

pytestmark = pytest.mark.broker

ROUNDS = int(os.environ.get("LRQ_FAULT_ROUNDS", "10"))
SEED = int(os.environ.get("LRQ_FAULT_SEED", "1"))
# RabbitMQ's Raft writes the names of new quorum queues, and of the coordinator of streams, to disk seconds later: a broker that is killed before
# has lost them, whoever uses it. That is not what is tested here.
SETTLE_S = 5.0
FAULTS = ("primary", "primary.broker", "primary.sidecar", "backup.sidecar", "backup.broker")


def _names(lab: Lab) -> tuple[str, str]:
    primary = lab.primary("east")
    assert primary is not None
    return primary, "e2" if primary == "e1" else "e1"


def _in_sync(lab: Lab) -> None:
    def holds() -> bool:
        primary = lab.primary("east")
        return primary is not None and set(lab.status(primary)["members"]) == {"e1", "e2"}

    eventually("both nodes in the set", holds, 90)


@pytest.mark.timeout(900)
def test_kills_in_the_middle_of_a_stream(pair: Lab) -> None:
    """Each round: another part killed at another moment, with a promotion where the primary is gone for good."""
    rng = random.Random(SEED)
    _in_sync(pair)
    queues = {kind: f"faults-{kind}-{time.time_ns()}" for kind in ("classic", "quorum")}
    for kind, queue in queues.items():
        declare(pair.nodes[_names(pair)[0]].door, queue, queue_type=kind)
    time.sleep(SETTLE_S)
    for number in range(ROUNDS):
        fault = FAULTS[number % len(FAULTS)]
        queue = queues["quorum" if number % 2 else "classic"]
        _in_sync(pair)
        primary, backup = _names(pair)
        load = Load([pair.nodes[primary].door, pair.nodes[backup].door], queue, f"load-{time.time_ns()}")
        load.start()
        try:
            eventually("the stream to flow", lambda load=load: load.confirmed > 200)
            time.sleep(rng.uniform(0.05, 1.0))
            role, _, part = fault.partition(".")
            target = {"primary": primary, "backup": backup}[role] + (f".{part}" if part else "")
            faults_at = [time.time()]
            pair.kill(target)
            if fault == "primary":
                pair.promote(backup, down=[primary])
            confirmed = load.confirmed
            if fault != "primary":
                pair.start(target)
            eventually("confirms to go on", lambda load=load, confirmed=confirmed: load.confirmed > confirmed + 200, 90)
            faults_at.append(time.time())
            if fault == "primary":
                pair.start(primary)
            load.finish()
        finally:
            load.stop()
        load.check(faults_at)
        _in_sync(pair)
        _equal(pair, queue)


def _equal(lab: Lab, queue: str) -> None:
    primary, _ = _names(lab)

    def applied() -> bool:
        leader = lab.status(primary)
        return leader["safe"] == leader["end"] == leader["applied"] == lab.status("e1")["applied"] == lab.status("e2")["applied"]

    eventually("both nodes applied", applied)
    digests = [checks.log_digest(lab.nodes[name].admin, "east", node) for node, name in ((1, "e1"), (2, "e2"))]
    assert digests[0] == digests[1]
    eventually("both queues empty", lambda: all(depth(lab.nodes[n].broker, queue) == 0 for n in ("e1", "e2")))
