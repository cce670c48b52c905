"""Kills in the middle of a confirmed stream with a consumer that acks: nothing lost, nothing twice, both nodes equal at the end (G1–G5)."""

from __future__ import annotations

import os
import random
import time

import pytest
from load import Load, declare, depth, eventually, in_sync, same_logs

from lrq_ha.lab import Lab

pytestmark = pytest.mark.broker

ROUNDS = int(os.environ.get("LRQ_FAULT_ROUNDS", "10"))
SEED = int(os.environ.get("LRQ_FAULT_SEED", "1"))
# RabbitMQ's Raft writes the names of new quorum queues, and of the coordinator of streams, to disk seconds later: a broker that is killed before
# has lost them, whoever uses it. That is not what is tested here.
SETTLE_S = 5.0
FAULTS = ("primary", "primary.broker", "primary.sidecar", "backup.sidecar", "backup.broker")


@pytest.mark.timeout(900)
def test_kills_in_the_middle_of_a_stream(pair: Lab) -> None:
    """Each round: another part killed at another moment, with a promotion where the primary is gone for good."""
    rng = random.Random(SEED)
    primary, _ = in_sync(pair)
    queues = {kind: f"faults-{kind}-{time.time_ns()}" for kind in ("classic", "quorum")}
    for kind, queue in queues.items():
        declare(pair.nodes[primary].door, queue, queue_type=kind)
    time.sleep(SETTLE_S)
    for number in range(ROUNDS):
        fault = FAULTS[number % len(FAULTS)]
        queue = queues["quorum" if number % 2 else "classic"]
        primary, backup = in_sync(pair)
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
            eventually("confirms to go on", lambda load=load, confirmed=confirmed: load.confirmed > confirmed + 200)
            faults_at.append(time.time())
            if fault == "primary":
                pair.start(primary)
            load.finish()
        finally:
            load.stop()
        load.check(faults_at)
        in_sync(pair, applied=True)
        eventually("both queues empty", lambda queue=queue: all(depth(pair.nodes[n].broker, queue) == 0 for n in ("e1", "e2")))
    same_logs(pair)  # with all that was ever in them
