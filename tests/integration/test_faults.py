"""Real faults, from a seed: lives of a pair under load in which nodes, brokers and sidecars are killed and stopped and networks cut, at any
moment; then everything is healed and every message accounted for, and both nodes are equal (G1–G5).

    LRQ_FAULT_SEED=7      another life (1); it draws the same faults and moods again, at the same distances: the machine does not repeat itself
    LRQ_FAULT_ROUNDS=20   faults in a life (each once)
    LRQ_FAULT_HOURS=2     one life after the other, with the next seeds, for so long; on each RabbitMQ version, on processes and in containers
    LRQ_FAULT_DIR=DIR     where the histories go, one file for each life; else below pytest's temporary folder

Rules: a failure names its seed and its history, which has every event with its time (history.py). A fault returns when what it broke is started
again, not when it is well; faults of the primary put in doubt what consumers told it meanwhile, others nothing at all.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from container_lab import ContainerLab
from history import Doubt, dead, span
from load import KILLS_MAX, NotInSync, declare, depth, eventually, in_sync, missed, promote, replication, same_logs
from traffic import Traffic

from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.own_pair("kills"), pytest.mark.proves("G1", "G2", "G3", "G4")]

ROUNDS = int(os.environ.get("LRQ_FAULT_ROUNDS", "0"))
SEED = int(os.environ.get("LRQ_FAULT_SEED", "1"))
HOURS = float(os.environ.get("LRQ_FAULT_HOURS", "0"))
FOLDER = os.environ.get("LRQ_FAULT_DIR")
# RabbitMQ's Raft writes the names of new quorum queues, and of the coordinator of streams, to disk seconds later: a broker that is killed before
# has lost them, whoever uses it. That is not what is tested here.
SETTLE_S = 5.0
RATE_PER_S = 100.0
#: Longer than a fault that the primary is meant to sit out, however long the machine stands still in it.
PATIENT_S = 600.0
STALL_MAX_S = 7.0


@dataclass
class Scene:
    """A pair in sync, and what the seed has drawn."""

    lab: Lab
    primary: str
    backup: str
    rng: random.Random

    def pause(self) -> None:
        time.sleep(self.rng.uniform(0.2, STALL_MAX_S))


Fault = Callable[[Scene], None]


def _restart(role: str, part: str = "") -> Fault:
    def fault(at: Scene) -> None:
        target = getattr(at, role) + part
        at.lab.kill(target)
        at.lab.start(target)
    return fault


def _promote_over(at: Scene, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """The backup is promoted between the beginning of the primary's fault and its end.

    A backup that the machine has held up for backup_timeout_s is out of the set and rightly refused: the primary comes back, and all begins anew.
    """
    for _ in range(KILLS_MAX):
        begin()
        try:
            promote(at.lab, at.backup, at.primary)
        except NotInSync:
            end()
            assert in_sync(at.lab) == (at.primary, at.backup)
        else:
            end()
            return
    raise AssertionError(f"{at.backup} was out of the set {KILLS_MAX} times")


def _replace_primary(at: Scene) -> None:
    _promote_over(at, lambda: at.lab.kill(at.primary), lambda: at.lab.start(at.primary))


def _stall(role: str, part: str = "") -> Fault:
    def fault(at: Scene) -> None:
        target = getattr(at, role) + part
        at.lab.stop(target)
        at.pause()
        at.lab.cont(target)
    return fault


def _promote_over_stalled(at: Scene) -> None:
    def stall() -> None:
        at.lab.stop(at.primary)
        missed(at.lab, at.backup, at.primary)

    _promote_over(at, stall, lambda: at.lab.cont(at.primary))


def _restart_both(at: Scene) -> None:
    names = [at.primary, at.backup]
    at.rng.shuffle(names)
    for name in names:
        at.lab.kill(name)
    at.rng.shuffle(names)
    for name in names:
        at.lab.start(name)


def _cut(at: Scene) -> None:
    assert isinstance(at.lab, ContainerLab)
    at.lab.cut(at.primary, at.backup)
    at.pause()
    at.lab.heal(at.primary, at.backup)


def _promote_over_cut_off(at: Scene) -> None:
    """The old primary is not down, as the operator says; but it does not go on alone before they meet again (PATIENT_S)."""
    assert isinstance(at.lab, ContainerLab)
    at.lab.cut(at.primary, at.backup)
    missed(at.lab, at.backup, at.primary)
    promote(at.lab, at.backup, at.primary)
    at.pause()
    at.lab.heal(at.primary, at.backup)


#: name -> what happens, and whether what consumers told the primary meanwhile is in doubt. Whoever is "killed" had a broker, but for sidecars.
FAULTS: dict[str, tuple[Fault, bool]] = {
    "primary killed, backup promoted": (_replace_primary, True),
    "primary's broker killed": (_restart("primary", ".broker"), True),
    "primary's sidecar killed": (_restart("primary", ".sidecar"), True),
    "primary stalls": (_stall("primary"), True),
    "primary stalls and is promoted over": (_promote_over_stalled, True),
    "backup killed": (_restart("backup"), False),
    "backup's broker killed": (_restart("backup", ".broker"), False),
    "backup's sidecar killed": (_restart("backup", ".sidecar"), False),
    "backup stalls": (_stall("backup"), False),
    "both killed": (_restart_both, True),
}
#: For containers: what processes on one machine cannot have, and the same by Docker's means.
NETWORK_FAULTS: dict[str, tuple[Fault, bool]] = {
    "cut off": (_cut, False),
    "cut off and promoted over": (_promote_over_cut_off, True),
    "primary paused and promoted over": (_promote_over_stalled, True),
    "primary killed, backup promoted": (_replace_primary, True),
    "backup paused": (_stall("backup"), False),
}


def live(lab: Lab, faults: dict[str, tuple[Fault, bool]], seed: str, history: Path) -> None:
    """One life of a pair; raises AssertionError with its seed and history."""
    rng = random.Random(seed)
    primary, backup = in_sync(lab)
    queues = [f"{kind}-{time.time_ns()}" for kind in ("classic", "quorum")]
    for queue, kind in zip(queues, ("classic", "quorum")):
        declare(lab.nodes[primary].door, dead(queue), queue_type=kind)
        declare(lab.nodes[primary].door, queue, queue_type=kind, dead_letter_exchange="", dead_letter_routing_key=dead(queue))
    kept = [f"kept-{queue}" for queue in queues]
    for queue, kind in zip(kept, ("classic", "quorum")):
        declare(lab.nodes[primary].door, queue, queue_type=kind)
    began = time.monotonic()
    producers = [f"{name}-{time.time_ns()}" for name in ("one", "two")]
    traffic = Traffic([lab.nodes[name].door for name in (primary, backup)], queues, producers, kept=kept, ordinary=1, consumers=2,
                      moody=True, rate_per_s=RATE_PER_S, seed=rng.randrange(1 << 32), history=history)
    traffic.history.note("life", seed=seed, rabbitmq=lab.version)
    traffic.start()
    doubts: list[Doubt] = []
    drawn: list[str] = []
    try:
        eventually("the stream to flow", lambda: traffic.confirmed > 200)
        time.sleep(max(0.0, began + SETTLE_S - time.monotonic()))
        for _ in range(ROUNDS or len(faults)):
            primary, backup = in_sync(lab)
            time.sleep(rng.uniform(0.05, 1.0))
            drawn = drawn or rng.sample(list(faults), len(faults))
            name = drawn.pop()
            fault, doubtful = faults[name]
            traffic.history.note("fault", name=name, primary=primary, backup=backup)
            at = time.time()
            fault(Scene(lab, primary, backup, rng))
            traffic.history.note("mended", name=name)
            confirmed = traffic.confirmed
            eventually("confirms to go on", lambda confirmed=confirmed: traffic.confirmed > confirmed + 100)
            if doubtful:
                doubts.append(span(at, time.time()))
            if "killed" in name and "sidecar" not in name:
                traffic.history.brokers_killed.append(span(at, time.time()))
        in_sync(lab)
        traffic.history.note("healed")
        traffic.finish()
        traffic.check(doubts)
        in_sync(lab, applied=True)
        every = [*queues, *kept, *(dead(queue) for queue in queues)]
        eventually("all queues empty on both", lambda: all(depth(lab.nodes[name].broker, queue) == 0 for name in ("e1", "e2") for queue in every))
        same_logs(lab)  # with all that was ever in them
    except AssertionError as error:
        raise type(error)(f"{error}\nlife {seed!r}, its history: {history}; the nodes' logs: {lab.directory}") from error
    finally:
        traffic.stop()


def lives(lab: Lab, faults: dict[str, tuple[Fault, bool]], where: str, folder: Path) -> None:
    folder = Path(FOLDER) if FOLDER else folder
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + HOURS * 3600
    for number in itertools.count(SEED):
        seed = f"{number} {where} {lab.version}"
        live(lab, faults, seed, folder / f"{re.sub('[^a-z0-9.]+', '-', seed)}.jsonl")
        if time.monotonic() >= end:
            return


@pytest.mark.quick(only="promoted")
@pytest.mark.one_version("4.3")
@pytest.mark.parametrize("fault", ["primary killed, backup promoted", "primary's broker killed"])
def test_one_fault_in_the_middle_of_a_stream(pair: Lab, tmp_path: Path, fault: str) -> None:
    """What `test_kills_in_the_middle_of_a_stream` does, with one fault."""
    lives(pair, {fault: FAULTS[fault]}, f"processes, {fault}", tmp_path)


@pytest.mark.timeout(900 + HOURS * 3600)
def test_kills_in_the_middle_of_a_stream(pair: Lab, tmp_path: Path) -> None:
    """Processes: kills and stops."""
    lives(pair, FAULTS, "processes", tmp_path)


@pytest.mark.docker
@pytest.mark.timeout(900 + HOURS * 3600)
def test_hosts_that_are_cut_off_paused_or_killed(containers: ContainerLab, tmp_path: Path) -> None:
    """Containers: nodes that are cut off from each other, paused, killed."""
    replication(containers, mode="available", backup_timeout_s=PATIENT_S)
    lives(containers, NETWORK_FAULTS, "containers", tmp_path)
