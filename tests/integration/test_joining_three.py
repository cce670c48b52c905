"""Renewals (R17) in groups of three: a promotion in the middle of one, and two nodes that need it at once.

Rules: the tests share one lab, and each leaves it whole. Nobody is taken out of the set for being slow.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from history import exactly, span
from load import command, consume, declare, eventually, renew, set_up, take_over, told
from renewals import DEEP, MIDDLE_S, SMALL_LOG, discard, empty, equal, fall_off, part_of_it, peek, publish
from test_three_nodes import all_in_sync, promoted
from traffic import Load

from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3"), pytest.mark.proves("renewal")]

SETTINGS = f"{SMALL_LOG}backup_timeout_s = 600.0\n"
RATE = 20  # so little that a checkpoint stays in so small a log


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab({"east": 3}, tmp_path_factory.mktemp("three") / "lab", broker_version)
    set_up(lab, SETTINGS)
    with lab:
        yield lab


def times_given_up(lab: Lab, name: str) -> int:
    return lab.nodes[name].log.read_text().count("the renewal was given up")


def part_of_joining(lab: Lab, name: str) -> None:
    """A node has a part of what it needs to join, and stays there: its broker stands still."""
    broker, first = f"{name}.broker", -1
    deadline = time.monotonic() + MIDDLE_S
    while True:
        status = told(lab, name)
        if status["end"] and first < 0:
            first = status["safe"]
        if status["role"] == "ready" or (status["end"] and status["safe"] > first):
            return
        assert time.monotonic() < deadline, "it does not begin"
        lab.cont(broker)
        lab.stop(broker)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_promotion_in_the_middle_of_it(lab: Lab, kind: str, broker_version: str) -> None:
    """Whoever is promoted goes on with it, and the newcomer joins there."""
    primary, heir, newcomer = all_in_sync(lab, applied=True)
    empty(lab, primary, heir, newcomer)
    deep, steady = f"deep-{kind}", f"steady-{time.time_ns()}"
    door = lab.nodes[primary].door
    declare(door, steady)
    declare(door, deep, queue_type=kind)
    publish(lab, deep, range(DEEP))
    fall_off(lab, primary, newcomer)
    discard(lab, newcomer)
    load = Load([node.door for node in lab.nodes.values()], steady, f"{steady}-app", rate_per_s=RATE)
    load.start()
    try:
        eventually("the stream to flow", lambda: load.confirmed > 50)
        renewing = threading.Thread(target=command, args=("renew",), kwargs={"lab": lab})
        renewing.start()
        part_of_it(lab, primary, deep)
        began, given_up = time.time(), times_given_up(lab, heir)
        lab.kill(primary)
        renewing.join()
        assert told(lab, newcomer)["end"] == 0, "nobody joins at a renewal that is not over"
        take_over(lab, heir, primary)
        confirmed = load.confirmed
        eventually("confirms to go on", lambda: load.confirmed > confirmed + 50)
        doubt = span(began, time.time())

        def joined() -> bool:
            if times_given_up(lab, heir) > given_up and "renew" not in told(lab, heir)["reason"]:
                renew(lab)  # as its operator is told, where the machine was too slow for it
            return {heir, newcomer} <= set(lab.status(heir)["members"])

        eventually("the newcomer to join", joined, 240.0)
        if times_given_up(lab, heir) == given_up:
            moved = re.search(r"has published (\d+) messages again", lab.nodes[heir].log.read_text().rpartition("recovered: ")[2])
            assert moved, "it went on with what the other had begun"
            # What was left, and the whole queue once more: how long it is was noted by another primary, and is not believed.
            assert int(moved[1]) < 2 * DEEP, "with what was left"
        lab.start(primary)
        assert all_in_sync(lab, applied=True)[0] == heir
        load.finish()
    finally:
        load.stop()
    load.check([doubt])
    equal(lab, {deep: DEEP, steady: 0, "churn": 0})
    in_order = kind == "classic" or not broker_version.startswith("3")  # a backup's quorum queue may come into another order there
    for name in lab.nodes if in_order else ():
        assert [int(body) for body in peek(lab.nodes[name].broker, deep, DEEP)] == list(range(DEEP)), name
    all_in_sync(lab, applied=True)
    lab.kill(heir)
    assert promoted(lab, [newcomer, primary], [heir]) in (newcomer, primary)
    lab.start(heir)
    found = consume(lab.nodes[all_in_sync(lab)[0]].door, deep, DEEP)
    exactly(found if in_order else sorted(found), range(DEEP))
    all_in_sync(lab, applied=True)
    equal(lab, {deep: 0})


def test_two_that_need_it_at_once(lab: Lab) -> None:
    """One renewal serves both, also if one is killed before it begins to join, and one in the middle of joining."""
    primary, one, other = all_in_sync(lab, applied=True)
    empty(lab, primary, one, other)
    deep, steady = "deep-for-two", f"steady-{time.time_ns()}"
    door = lab.nodes[primary].door
    declare(door, steady)
    declare(door, deep)
    publish(lab, deep, range(DEEP))
    fall_off(lab, primary, one, other)
    discard(lab, one, other)
    load = Load([door], steady, f"{steady}-app", rate_per_s=RATE)
    load.start()
    try:
        eventually("the stream to flow", lambda: load.confirmed > 50)
        with ThreadPoolExecutor(1) as operator:
            renewing = operator.submit(renew, lab)
            part_of_it(lab, primary, deep)
            lab.kill(f"{one}.sidecar")
            lab.stop(f"{other}.broker")
            lab.cont(f"{primary}.broker")
            renewing.result()
        part_of_joining(lab, other)
        lab.kill(f"{other}.sidecar")
        lab.cont(f"{other}.broker")
        for name in (one, other):
            lab.start(f"{name}.sidecar")
        assert all_in_sync(lab, applied=True)[0] == primary
        load.finish()
    finally:
        load.stop()
    load.check([])
    equal(lab, {deep: DEEP, steady: 0, "churn": 0})
    for name in (primary, one):  # who is killed while it joins may have its queues in another order
        assert [int(body) for body in peek(lab.nodes[name].broker, deep, DEEP)] == list(range(DEEP)), name
    all_in_sync(lab, applied=True)
    lab.kill(primary)
    leader = promoted(lab, [other, one], [primary])
    lab.start(primary)
    assert all_in_sync(lab)[0] == leader
    exactly(sorted(consume(lab.nodes[leader].door, deep, DEEP)), range(DEEP))
    all_in_sync(lab, applied=True)
    equal(lab, {deep: 0})
