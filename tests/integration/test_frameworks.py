"""Ordinary users' frameworks over a failover: the programs of docs/clients.md as they stand there, on a pair whose primary is killed in the middle.

Rules: each sender is fed numbered orders at a steady pace until all is over, each worker writes what it did and when to a ledger of its own;
nothing is told to any of them but the two doors. All orders must be in the ledger; one that is there twice was first done when its ack or its
confirm could still be lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from frameworks import FRAMEWORKS, Framework, alive, start, write_programs
from history import LAG_MAX_S
from load import command, depth, eventually, in_sync, set_up
from patience import PATIENT_DOOR

from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900), pytest.mark.one_version("4.3"), pytest.mark.proves("G1", "G3")]

ORDERS_BEFORE = 200  # done by each framework before the primary is killed
ORDERS_AFTER = 200  # done after it
OPERATOR_S = 3.0  # how long the operator takes: meanwhile the clients are turned away by the backup's door


@dataclass
class Failover:
    """What happened. `killed_at` by the clock that the ledgers use."""

    frameworks: dict[str, Framework]
    killed_at: float
    promoted_after_s: float
    done_again_after_s: dict[str, float]
    depths: dict[str, int]


@pytest.fixture(scope="module")
def failover(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failover]:
    """All frameworks at work on one pair; the primary is killed, its backup promoted as an operator does it, and all orders are done."""
    folder = tmp_path_factory.mktemp("frameworks")
    write_programs(folder)
    enough = threading.Event()
    frameworks: dict[str, Framework] = {}
    feeders: list[threading.Thread] = []
    lab = Lab({"east": 2}, folder / "lab", broker_version, door=PATIENT_DOOR)
    set_up(lab, "backup_timeout_s = 60.0")  # who is to take over is in the set, also after a pause
    with lab:
        try:
            primary, backup = in_sync(lab)
            doors = ";".join(lab.nodes[name].door for name in (primary, backup))
            for name in FRAMEWORKS:
                frameworks[name] = start(name, folder, doors)
                feeders.append(threading.Thread(target=frameworks[name].feed, args=[enough]))
                feeders[-1].start()
            all_alive = alive(frameworks, folder)
            for name, framework in frameworks.items():
                eventually(f"{name}: {ORDERS_BEFORE} orders done", lambda f=framework: all_alive() and len(f.done()) >= ORDERS_BEFORE)
            in_sync(lab, applied=True)  # what was acked some seconds before is on the backup, whatever pauses there were
            killed_at = time.time()
            lab.kill(primary)
            time.sleep(OPERATOR_S)
            eventually("a promotion", lambda: command("promote", backup, "--down", primary, lab=lab)[0] == 0)
            promoted_after_s = time.time() - killed_at
            for name, framework in frameworks.items():
                goal = framework.fed + ORDERS_AFTER
                eventually(f"{name}: {ORDERS_AFTER} more orders done", lambda f=framework, n=goal: all_alive() and len(f.done()) >= n)
            first_after = {name: min(when[0] for when in f.done().values() if when[0] > killed_at + promoted_after_s)
                           for name, f in frameworks.items()}
            enough.set()
            for name, framework in frameworks.items():
                assert framework.sender.wait(240) == 0, (folder / f"{name}.sender.log").read_text()
                eventually(f"{name}: all orders done", lambda f=framework: len(f.done()) >= f.fed)
                # A second copy may still be on its way.
                eventually(f"{name}: an empty queue", lambda f=framework: depth(lab.nodes[backup].broker, f.queue) == 0)
                framework.worker.terminate()
                framework.worker.wait(240)
            depths = {name: depth(lab.nodes[backup].broker, framework.queue) for name, framework in frameworks.items()}
            yield Failover(frameworks, killed_at, promoted_after_s, {name: at - killed_at for name, at in first_after.items()}, depths)
        finally:
            enough.set()
            for framework in frameworks.values():
                for process in (framework.sender, framework.worker):
                    process.kill()
                    process.wait()
            for feeder in feeders:
                feeder.join()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_order_is_done(failover: Failover, name: str) -> None:
    framework = failover.frameworks[name]
    done = framework.done()
    twice = {order: when for order, when in done.items() if len(when) > 1}
    print(f"{name}: {framework.fed} orders, {len(twice)} of them twice; promoted after {failover.promoted_after_s:.1f} s, at work again after "
          f"{failover.done_again_after_s[name]:.1f} s")
    assert set(done) == set(range(framework.fed)), "none is lost, none invented"
    assert failover.depths[name] == 0, "every message that was given out again was acked"
    early = {order: failover.killed_at - when[0] for order, when in twice.items() if when[0] < failover.killed_at - LAG_MAX_S}
    assert not early, "an order was done twice although its ack was older than the replication lag"
