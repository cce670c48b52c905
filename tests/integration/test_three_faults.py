"""Groups of three on real brokers, under load: handovers, a backup that stands still, a node that has lost everything.

Rules: the tests share one lab, and each leaves it whole. They run on one RabbitMQ version: what differs between versions is tried with pairs.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from history import exactly, span
from load import command, consume, declare, depth, eventually, line_of, set_up, switch_over
from test_faults import SETTLE_S
from test_three_nodes import all_in_sync, equal, promoted
from traffic import Load

from lrq_ha.lab import Lab
from lrq_ha.publisher import Publisher

pytestmark = [pytest.mark.broker, pytest.mark.proves("G1", "G3")]

BACKUP_TIMEOUT_S = 2.0
#: Messages a second: what is published while faults go on has to be consumed, too, on a machine with two cores and three nodes.
RATE = 100.0
KEPT, TAKEN = 300, 100


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    found = Lab({"east": 3}, tmp_path_factory.mktemp("three-faults") / "lab")
    set_up(found, f"backup_timeout_s = {BACKUP_TIMEOUT_S}")
    with found:
        yield found


def goes_on(load: Load) -> None:
    confirmed = load.confirmed
    eventually("confirms to go on", lambda: load.confirmed > confirmed + 100)


@contextmanager
def loaded(lab: Lab) -> Iterator[Load]:
    """Load on a queue of its own, which flows before and afterwards; then all of it is answered and consumed, and all nodes are equal."""
    queue = f"loaded-{time.time_ns()}"
    declare(lab.nodes[all_in_sync(lab)[0]].door, queue)
    time.sleep(SETTLE_S)
    load = Load([node.door for node in lab.nodes.values()], queue, f"{queue}-app", rate_per_s=RATE)
    load.start()
    try:
        goes_on(load)
        yield load
        goes_on(load)
        load.finish()
    finally:
        load.stop()
    equal(lab, queue)


def out(lab: Lab, primary: str, node: str) -> None:
    """The others go on without a node, and `list` says who is out, and why."""
    others = sorted({*lab.nodes} - {node})
    eventually(f"{node} to be out of the set", lambda: lab.status(primary)["members"] == others)
    taken_out = f"{node} was taken out of the set, as it made no progress for {BACKUP_TIMEOUT_S:g} s"

    def listed() -> bool:
        said = command("list", lab=lab)[1]
        places = all(re.search(rf" {'no' if name == node else 'yes'} ", line_of(name, said)) for name in lab.nodes)
        return places and taken_out in line_of(primary, said)

    eventually("list to show it", listed)


def test_handed_over_to_each_in_turn(lab: Lab) -> None:
    """Whoever was not asked follows the new primary by itself. Nothing is in doubt: no message comes twice."""
    primary, *others = all_in_sync(lab)
    with loaded(lab) as load:
        for node in (*others, primary):
            switch_over(lab, node)
            goes_on(load)
            assert all_in_sync(lab)[0] == node
    load.check([])


@pytest.mark.parametrize("part", [".sidecar", ".broker"])
def test_a_backup_that_stands_still(lab: Lab, part: str) -> None:
    """It is left out, the other two go on as a pair, of which one may be lost; it comes back to whoever leads."""
    primary, still, other = all_in_sync(lab)
    outages = []
    with loaded(lab) as load:
        lab.stop(still + part)
        try:
            out(lab, primary, still)
            goes_on(load)
            began = time.time()
            lab.kill(primary)
            if part == ".broker":
                # Its sidecar lives, so it answers, and cannot promise anything: what hangs has to be stopped.
                lab.kill(f"{still}.sidecar")
            assert promoted(lab, [other], [primary, still]) == other
            goes_on(load)
            outages.append(span(began, time.time()))
        finally:
            lab.cont(still + part)
        for name in (still, primary):
            if None in (lab.nodes[name].sidecar_pid, lab.nodes[name].broker_pid):
                lab.start(name)
        assert all_in_sync(lab)[0] == other
    load.check(outages)


@pytest.mark.parametrize("which", ["backup", "primary"])
def test_a_node_that_has_lost_everything(lab: Lab, which: str) -> None:
    """Its broker's data is gone: it gets all that is live from the others, and may lead then."""
    primary, backup, third = all_in_sync(lab)
    empty, leads = (primary, "") if which == "primary" else (backup, primary)
    kept = f"kept-{time.time_ns()}"
    declare(lab.nodes[primary].door, kept)
    with Publisher([lab.nodes[primary].door], f"{kept}-app") as publisher:
        for number in range(KEPT):
            publisher.publish("", kept, b"%d" % number)
        publisher.flush(60)
    exactly(consume(lab.nodes[primary].door, kept, TAKEN), range(TAKEN))
    outages = []
    with loaded(lab) as load:
        began = time.time()
        lab.kill(empty)
        shutil.rmtree(lab.directory / empty / "data")
        leads = leads or promoted(lab, [backup, third], [primary])
        goes_on(load)
        if which == "primary":
            outages.append(span(began, time.time()))
        lab.start(empty)
        assert all_in_sync(lab)[0] == leads
    load.check(outages)
    for node in lab.nodes.values():
        eventually(f"what was kept at {node.name}", lambda node=node: depth(node.broker, kept) == KEPT - TAKEN)
    switch_over(lab, empty)
    assert all_in_sync(lab)[0] == empty
    exactly(consume(lab.nodes[empty].door, kept, KEPT - TAKEN), range(TAKEN, KEPT))
