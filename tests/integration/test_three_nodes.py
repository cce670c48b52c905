"""Groups of three on real brokers: kills and promotions with two backups, and mode `strict`.

Rules: the tests share one lab, and each leaves it whole; timeouts are short so that the tests are.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence

import pytest
from load import Load, all_applied, command, declare, depth, eventually, same_logs
from test_faults import SETTLE_S
from test_stalls import RATE, bodies

from lrq_ha.lab import Lab
from lrq_ha.publisher import Confirm, Publisher

pytestmark = pytest.mark.broker

BACKUP_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    found = Lab({"east": 3}, tmp_path_factory.mktemp("three") / "lab", broker_version)
    found.prepare()
    for node in found.nodes.values():
        node.config.write_text(node.config.read_text() + f"backup_timeout_s = {BACKUP_TIMEOUT_S}\n")
    with found:
        yield found


@pytest.fixture
def strict(lab: Lab) -> Iterator[Lab]:
    """The lab in mode strict."""
    _set_mode(lab, "available", "strict")
    yield lab
    _set_mode(lab, "strict", "available")


def _set_mode(lab: Lab, old: str, new: str) -> None:
    all_in_sync(lab)
    for name, node in lab.nodes.items():
        text = node.config.read_text()
        assert text.count(f'mode = "{old}"') == 1
        node.config.write_text(text.replace(f'mode = "{old}"', f'mode = "{new}"'))
        lab.kill(f"{name}.sidecar")
    for name in lab.nodes:
        lab.start(f"{name}.sidecar")
    all_in_sync(lab)


def all_in_sync(lab: Lab, *, applied: bool = False) -> tuple[str, str, str]:
    """Waits until all three are in the set and two are ready to take over. Returns primary and backups. `applied`: See load.in_sync."""
    found: list[str] = []

    def holds() -> bool:
        states = {name: lab.status(name) for name in lab.nodes}
        found[:] = sorted(states, key=lambda name: states[name]["role"] != "active")
        roles = [states[name]["role"] for name in found]
        return roles == ["active", "ready", "ready"] and states[found[0]]["members"] == sorted(lab.nodes)

    eventually("all three in the set", holds)
    if applied:
        all_applied(lab, *found)
    return found[0], found[1], found[2]


def promoted(lab: Lab, candidates: Sequence[str], down: Sequence[str]) -> str:
    """Promotes one of the candidates: the one that has the longer log, when those that are down are missed. Returns it."""
    done: list[str] = []

    def promote() -> bool:
        for name in candidates:
            code, said = command("promote", name, "--down", *down, lab=lab)
            if code == 0:
                done.append(name)
                return True
            assert re.search("it answers|longer log|does not answer|is not running|is over|promise", said), said
        return False

    eventually("a promotion", promote)
    return done[0]


def equal(lab: Lab, queue: str) -> None:
    """All logs are the same, and the queue is empty on all nodes."""
    all_in_sync(lab, applied=True)
    same_logs(lab)
    eventually("all queues empty", lambda: all(depth(node.broker, queue) == 0 for node in lab.nodes.values()))


@pytest.mark.timeout(300)
def test_one_is_killed_then_two_at_once(lab: Lab) -> None:
    """Under load: the others go on as a pair, and the last one alone; who was killed comes back each time."""
    primary, *others = all_in_sync(lab)
    queue = f"three-{time.time_ns()}"
    declare(lab.nodes[primary].door, queue)
    time.sleep(SETTLE_S)
    load = Load([node.door for node in lab.nodes.values()], queue, f"{queue}-app", rate_per_s=RATE)
    load.start()
    faults_at: list[float] = []

    def goes_on() -> None:
        confirmed = load.confirmed
        eventually("confirms to go on", lambda: load.confirmed > confirmed + 100)
        faults_at.append(time.time())

    try:
        goes_on()
        lab.kill(primary)
        faults_at.append(time.time())
        second = promoted(lab, others, [primary])
        third = next(name for name in others if name != second)
        eventually("the pair", lambda: lab.status(second)["members"] == sorted([second, third]) and lab.status(third)["primary"] == second)
        goes_on()
        lab.start(primary)
        assert all_in_sync(lab)[0] == second
        goes_on()
        for name in (second, third):
            lab.kill(name)
        faults_at.append(time.time())
        assert promoted(lab, [primary], [second, third]) == primary
        assert lab.status(primary)["members"] == [primary]
        goes_on()
        for name in (second, third):
            lab.start(name)
        assert all_in_sync(lab)[0] == primary
        load.finish()
    finally:
        load.stop()
    load.check(faults_at)
    equal(lab, queue)


def held(confirms: list[Confirm]) -> bool:
    """Whether nothing is confirmed for longer than mode `available` would wait."""
    time.sleep(2 * BACKUP_TIMEOUT_S)
    return not any(confirm.done for confirm in confirms)


@pytest.mark.timeout(300)
def test_strict_waits_for_who_is_down_until_he_is_back_or_removed(strict: Lab) -> None:
    lab = strict
    primary, other, third = all_in_sync(lab)
    queue = f"strict-{time.time_ns()}"
    declare(lab.nodes[primary].door, queue)
    with Publisher([node.door for node in lab.nodes.values()], f"{queue}-app", confirm_timeout_s=90) as publisher:
        numbers = iter(range(1000))

        def publish() -> list[Confirm]:
            return [publisher.publish("", queue, b"%d" % next(numbers)) for _ in range(10)]

        def confirmed(confirms: list[Confirm]) -> None:
            for confirm in confirms:
                confirm.result(60)

        confirmed(publish())
        lab.kill(f"{third}.sidecar")
        waiting = publish()
        assert held(waiting)
        assert lab.status(primary)["members"] == sorted(lab.nodes)
        lab.start(f"{third}.sidecar")
        confirmed(waiting)
        all_in_sync(lab)

        # Removed, it is told so, and cannot write what it was told before the others are gone.
        lab.stop(f"{third}.broker")
        waiting = publish()
        assert held(waiting)
        code, said = command("remove", third, lab=lab)
        assert (code, said) == (0, f"{third} is removed from the set; do not promote it before it has rejoined")
        confirmed(waiting)
        assert lab.status(primary)["members"] == sorted([primary, other])
        eventually("it to know", lambda: not lab.status(third)["in_set"])
        code, said = command("list", lab=lab)
        assert re.search(rf"(?m)^{third} .* no ", said), said
        for name in (other, primary):
            lab.kill(f"{name}.sidecar")
        lab.cont(f"{third}.broker")
        refusals: list[str] = []

        def refused() -> bool:
            code, said = command("promote", third, "--down", primary, other, lab=lab)
            refusals.append(said)
            assert code == 1, said
            return f"{third} was not in sync: what was confirmed without it would be lost" in said

        eventually("the refusal", refused)
        assert "--force" in refusals[-1]
        code, said = command("promote", third, "--down", primary, other, "--force", "--dry-run", lab=lab)
        assert code == 0, said
        assert "was NOT in sync then" in said
        for name in (other, primary):
            lab.start(f"{name}.sidecar")
        all_in_sync(lab)
        confirmed(publish())
    assert bodies(lab.nodes[all_in_sync(lab)[0]].door, queue) == list(range(40))
    equal(lab, queue)
