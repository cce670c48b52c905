"""Groups of three on real brokers: kills and promotions with two backups, one of them expected; mode `strict`; local completion.

Rules: the tests share one lab, and each leaves it whole. In mode `available` nobody is taken out of the set for being slow: none of the tests is
about that, and a machine may stand still for longer than backup_timeout_s. In mode `strict` nobody is, however short that is.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from history import span
from load import all_applied, command, consume, declare, depth, eventually, line_of, same_logs, switch_over, told
from test_faults import SETTLE_S
from test_stalls import RATE, Witness, bodies
from traffic import Load

from lrq_ha.lab import Lab
from lrq_ha.publisher import Confirm, Publisher

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3"), pytest.mark.proves("G1", "G5")]

PATIENT_S = 600.0
BACKUP_TIMEOUT_S = 2.0
DRAIN_TIMEOUT_S = 1.0
TRIES = 5
CONFIRM_S = 120.0
SETTINGS = f"""\
backup_timeout_s = {PATIENT_S}
completion = {{ '^local-' = "local" }}
expected_backups = 1
expected_backups_timeout_s = 1e6
"""


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    found = Lab({"east": 3}, tmp_path_factory.mktemp("three") / "lab", broker_version)
    found.prepare()
    for node in found.nodes.values():
        text = node.config.read_text()
        assert text.count("[door]\n") == 1
        node.config.write_text(text.replace("[door]\n", f"[door]\ndrain_timeout_s = {DRAIN_TIMEOUT_S}\n") + SETTINGS)
    with found:
        yield found


@pytest.fixture(scope="module")
def strict(lab: Lab) -> Iterator[Lab]:
    """The lab in mode strict."""
    available, strict = ('mode = "available"', f"backup_timeout_s = {PATIENT_S}"), ('mode = "strict"', f"backup_timeout_s = {BACKUP_TIMEOUT_S}")
    _configure(lab, available, strict)
    yield lab
    _configure(lab, strict, available)


def _configure(lab: Lab, old: Sequence[str], new: Sequence[str]) -> None:
    all_in_sync(lab)
    for name, node in lab.nodes.items():
        text = node.config.read_text()
        for line, other in zip(old, new):
            assert text.count(line) == 1
            text = text.replace(line, other)
        node.config.write_text(text)
        lab.kill(f"{name}.sidecar")
    for name in lab.nodes:
        lab.start(f"{name}.sidecar")
    all_in_sync(lab)


def all_in_sync(lab: Lab, *, applied: bool = False) -> tuple[str, ...]:
    """Waits until all are in the set, and all but one ready to take over. Returns primary and backups. `applied`: See load.in_sync."""
    found: list[str] = []

    def holds() -> bool:
        states = {name: lab.status(name) for name in lab.nodes}
        found[:] = sorted(states, key=lambda name: states[name]["role"] != "active")
        roles = [states[name]["role"] for name in found]
        return roles == ["active", *["ready"] * (len(lab.nodes) - 1)] and states[found[0]]["members"] == sorted(lab.nodes)

    eventually("all in the set", holds, seen=lambda: {name: lab.status(name).get("reason") for name in lab.nodes})
    if applied:
        all_applied(lab, *found)
    return tuple(found)


def promoted(lab: Lab, candidates: Sequence[str], down: Sequence[str]) -> str:
    """Promotes one of the candidates: the one that has the longer log, when those that are down are missed. Returns it."""
    done: list[str] = []

    def promote() -> bool:
        for name in candidates:
            code, said = command("promote", name, "--down", *down, lab=lab)
            if code == 0:
                done.append(name)
                return True
            assert re.search("answer|longer log|is not running|is over|promise|is taking epoch|started again meanwhile", said), said
        return False

    eventually("a promotion", promote)
    return done[0]


def equal(lab: Lab, queue: str) -> None:
    """All logs are the same, and the queue is empty on all nodes."""
    all_in_sync(lab, applied=True)
    same_logs(lab)
    eventually("all queues empty", lambda: all(depth(node.broker, queue) == 0 for node in lab.nodes.values()))


@pytest.mark.proves("expected-backups")
def test_one_is_killed_then_two_at_once(lab: Lab) -> None:
    """Under load: the others go on as a pair; the last one takes clients, and confirms when another is back; who was killed comes back each time."""
    primary, *others = all_in_sync(lab)
    queue = f"three-{time.time_ns()}"
    declare(lab.nodes[primary].door, queue)
    time.sleep(SETTLE_S)
    load = Load([node.door for node in lab.nodes.values()], queue, f"{queue}-app", rate_per_s=RATE)
    load.start()
    outages: list[tuple[float, float]] = []

    def goes_on(since: float | None = None) -> None:
        confirmed = load.confirmed
        eventually("confirms to go on", lambda: load.confirmed > confirmed + 100)
        if since is not None:
            outages.append((since, time.time()))

    try:
        goes_on()
        killed_at = time.time()
        lab.kill(primary)
        second = promoted(lab, others, [primary])
        third = next(name for name in others if name != second)
        eventually("the pair", lambda: lab.status(second)["members"] == sorted([second, third]) and lab.status(third)["primary"] == second)
        goes_on(since=killed_at)
        lab.start(primary)
        assert all_in_sync(lab)[0] == second
        goes_on()
        killed_at = time.time()
        for name in (second, third):
            lab.kill(name)
        assert promoted(lab, [primary], [second, third]) == primary
        confirmed, sent = load.confirmed, list(load.history.sent)
        status = told(lab, primary)
        assert (status["members"], status["role"], status["serving"]) == ([primary], "recovering", True)
        eventually("what was published meanwhile to be given out", lambda: all((queue, message) in load.history.settled for message in sent))
        assert load.confirmed == confirmed < len(sent), "nothing is confirmed before the expected backup has it"
        said = command("list", lab=lab)[1]
        assert re.search(" recovering .*its door is open, confirms wait: 0 of 1 expected backups are in sync", line_of(primary, said)), said
        lab.start(second)
        goes_on(since=killed_at)
        assert told(lab, primary)["role"] == "active"
        lab.start(third)
        assert all_in_sync(lab)[0] == primary
        load.finish()
    finally:
        load.stop()
    load.check([span(*outage) for outage in outages])
    equal(lab, queue)


@pytest.mark.quick
def test_of_two_that_are_promoted_at_once_one_wins(lab: Lab) -> None:
    """Two operators, each with another node in mind. Under load: nothing is lost, and all have one log."""
    primary, *others = all_in_sync(lab)
    queue = f"at-once-{time.time_ns()}"
    declare(lab.nodes[primary].door, queue)
    time.sleep(SETTLE_S)
    load = Load([node.door for node in lab.nodes.values()], queue, f"{queue}-app", rate_per_s=RATE)
    load.start()
    try:
        eventually("the stream to flow", lambda: load.confirmed > 100)
        killed_at = time.time()
        lab.kill(primary)
        said: list[tuple[int, str]] = []

        def serving() -> list[str]:
            return [name for name in others if lab.status(name)["serving"]]

        def one_wins() -> bool:
            with ThreadPoolExecutor(2) as both:
                said.extend(both.map(lambda name: command("promote", name, "--down", primary, lab=lab), others))
            return bool(serving())

        eventually("one to be promoted", one_wins, seen=lambda: said)
        eventually("the other to follow it", lambda: [lab.status(name)["primary"] for name in others] == serving() * 2 != [])
        refusals = [text for code, text in said if code != 0]
        assert refusals, said
        confirmed = load.confirmed
        eventually("confirms to go on", lambda: load.confirmed > confirmed + 100)
        outage = span(killed_at, time.time())
        [winner] = serving()
        lab.start(primary)
        assert all_in_sync(lab)[0] == winner
        load.finish()
    finally:
        load.stop()
    load.check([outage])
    equal(lab, queue)


def test_two_begin_anew_at_once(lab: Lab) -> None:
    """Both empty, under load: both join what the primary holds, one after the other, and one of them leads then."""
    primary, *others = all_in_sync(lab)
    kept, queue = (f"{what}-{time.time_ns()}" for what in ("kept", "anew"))
    for name in (kept, queue):
        declare(lab.nodes[primary].door, name)
    with Publisher([lab.nodes[primary].door], f"{kept}-app") as publisher:
        for number in range(300):
            publisher.publish("", kept, b"%d" % number)
        publisher.flush(60)
    assert consume(lab.nodes[primary].door, kept, 100) == list(range(100))
    load = Load([node.door for node in lab.nodes.values()], queue, f"{queue}-app", rate_per_s=RATE)
    load.start()
    try:
        eventually("the stream to flow", lambda: load.confirmed > 100)
        before = {name: told(lab, name)["since"] for name in others}
        for name in others:
            code, said = command("reinit", name, "--discard", lab=lab)
            assert code == 0, said
        eventually("both to have begun anew", lambda: all(lab.status(name)["since"] > before[name] for name in others))
        assert all_in_sync(lab)[0] == primary
        load.finish()
    finally:
        load.stop()
    load.check([])
    equal(lab, queue)
    for node in lab.nodes.values():
        eventually(f"what was kept at {node.name}", lambda node=node: depth(node.broker, kept) == 200)
    switch_over(lab, others[1])
    assert all_in_sync(lab)[0] == others[1]
    assert consume(lab.nodes[others[1]].door, kept, 200) == list(range(100, 300))


@pytest.mark.proves("promotion")
@pytest.mark.parametrize("alone", [False, True])
def test_all_are_killed_and_started_one_after_the_other(lab: Lab, alone: bool) -> None:
    """Nobody leads before the last one is there, which may know more. `alone`: it does, as it was the last in the set."""
    primary, *others = all_in_sync(lab)
    queue = f"all-{time.time_ns()}"
    declare(lab.nodes[primary].door, queue)

    def publish(numbers: range) -> None:
        with Publisher([lab.nodes[primary].door], f"{queue}-{numbers.start}") as publisher:
            for number in numbers:
                publisher.publish("", queue, b"%d" % number)
            publisher.flush(CONFIRM_S)

    publish(range(100))
    for name in others:
        lab.kill(name)
        if alone:
            eventually("it to be removed", lambda name=name: command("remove", name, lab=lab)[0] == 0)
    if alone:
        publish(range(100, 200))
    lab.kill(primary)
    *early, last = [*others, primary] if alone else [primary, *others]
    for name in early:
        lab.start(name)
    eventually("what they have to be read", lambda: all("waiting for the other nodes" in lab.status(name)["reason"] for name in early))

    def refused(name: str) -> bool:
        code, said = command("promote", name, "--down", last, lab=lab)
        assert code == 1, said
        return re.search("longer log|was not in sync|went down and it has not caught up since", said) is not None

    for name in early:
        eventually(f"a promotion of {name} to be refused", lambda name=name: refused(name))
    assert {told(lab, name)["role"] for name in early} == {"catch-up"}
    lab.start(last)
    now = all_in_sync(lab, applied=True)[0]
    assert now == primary or not alone
    assert consume(lab.nodes[now].door, queue, 200 if alone else 100) == list(range(200 if alone else 100))
    equal(lab, queue)


def held(confirms: list[Confirm]) -> bool:
    """Whether nothing is confirmed for longer than mode `available` would wait with the same settings."""
    time.sleep(2 * BACKUP_TIMEOUT_S)
    return not any(confirm.done for confirm in confirms)


@pytest.mark.proves("strict")
def test_strict_waits_for_who_is_down_until_he_is_back_or_removed(strict: Lab) -> None:
    lab = strict
    primary, other, third = all_in_sync(lab)
    queue = f"strict-{time.time_ns()}"
    declare(lab.nodes[primary].door, queue)
    with Publisher([node.door for node in lab.nodes.values()], f"{queue}-app", confirm_timeout_s=PATIENT_S) as publisher:
        numbers = itertools.count()

        def publish() -> list[Confirm]:
            return [publisher.publish("", queue, b"%d" % next(numbers)) for _ in range(10)]

        def confirmed(confirms: list[Confirm]) -> None:
            for confirm in confirms:
                confirm.result(CONFIRM_S)

        confirmed(publish())
        for killed in (f"{third}.sidecar", third):  # with its broker it may have lost the end of its log, and is out until it has that again
            before = len(lab.nodes[primary].log.read_text())
            lab.kill(killed)
            waiting = publish()
            assert held(waiting)
            assert told(lab, primary)["members"] == sorted(lab.nodes)
            assert f"; nothing is confirmed until {third} has caught up, or until lrq-ha remove {third}" in told(lab, primary)["reason"]
            lab.start(killed)
            confirmed(waiting)
            all_in_sync(lab)
            sets = re.findall(r"in the set: (.*)", lab.nodes[primary].log.read_text()[before:])
            assert set(sets) == ({", ".join(sorted(lab.nodes))} if killed == third else set()), "never the two of them"

        # Removed, it is told so, and cannot write what it was told before the others are gone. On a machine that stands still for long, its
        # sidecar gives up the broker that does not answer, and forgets it: then it is done again.
        refusals: list[str] = []

        def refused() -> bool:
            code, said = command("promote", third, "--down", primary, other, lab=lab)
            refusals.append(said)
            assert code == 1, said
            return re.search("was not in sync: what was confirmed without it would be lost|has heard no primary since it started", said) is not None

        def removed() -> bool:
            code, said = command("remove", third, lab=lab)
            keeps_up = f"lrq-ha: {third} answers and keeps up, so it would be back in the set at once: stop it first"
            assert said == (keeps_up if code else f"{third} is removed from the set; do not promote it before it has rejoined"), said
            return code == 0

        for _ in range(TRIES):
            lab.stop(f"{third}.broker")
            waiting = publish()
            eventually("it to be removed, once it has made no progress for long enough", removed)
            confirmed(waiting)
            assert told(lab, primary)["members"] == sorted([primary, other])
            eventually("it to know", lambda third=third: not lab.status(third)["in_set"])
            for name in (other, primary):
                lab.kill(f"{name}.sidecar")
            lab.cont(f"{third}.broker")
            eventually("the refusal", refused)
            if f"{third} was not in sync" in refusals[-1]:
                break
            for name in (other, primary):
                lab.start(f"{name}.sidecar")
            primary, other, third = all_in_sync(lab)
        assert f"{third} was not in sync" in refusals[-1]
        code, said = command("list", lab=lab)
        assert " no " in line_of(third, said), said
        assert "--force" in refusals[-1]
        code, said = command("promote", third, "--down", primary, other, "--force", "--dry-run", lab=lab)
        assert code == 0, said
        assert "was NOT in sync then" in said
        assert "publishes with local completion that it lacks are lost" in said
        for name in (other, primary):
            lab.start(f"{name}.sidecar")
        all_in_sync(lab)
        confirmed(publish())
    assert bodies(lab.nodes[all_in_sync(lab)[0]].door, queue) == list(range(next(numbers)))
    equal(lab, queue)


def test_strict_waits_for_who_is_configured_no_more_until_he_is_removed(strict: Lab) -> None:
    """It did for ever: no order knew that node any more, and nothing was confirmed."""
    lab = strict
    primary, other, third = all_in_sync(lab)
    configured = {name: lab.nodes[name].config.read_text() for name in (primary, other)}
    number = re.search(r"(?m)^id = ([0-9]+)$", lab.nodes[third].config.read_text())
    assert number is not None
    unnamed = f"node {number[1]}"
    lab.kill(f"{third}.sidecar")
    try:
        for name, text in configured.items():
            lab.kill(f"{name}.sidecar")
            without, count = re.subn(rf'\[\[peers\]\]\nname = "{third}"\n(.+\n)+', "", text)
            assert count == 1
            lab.nodes[name].config.write_text(without)
            lab.start(f"{name}.sidecar")
        eventually("one to wait for him", lambda: any(unnamed in lab.status(name)["reason"] for name in configured))
        code, said = command("remove", third, lab=lab)
        assert (code, "no such node in group east" in said) == (1, True), said
        code, said = command("remove", unnamed, "--group", "east", "--dry-run", lab=lab)
        out = f"would take {unnamed} out of the set; nothing is lost or redelivered"
        assert (code, said) == (0, f"{out}; it must not be promoted before it has rejoined")
        code, said = command("remove", number[1], "--group", "east", lab=lab)
        assert (code, said) == (0, f"{unnamed} is removed from the set; do not promote it before it has rejoined")
        eventually("the others to go on", lambda: any(lab.status(name)["role"] == "active" for name in configured))
    finally:
        for name, text in configured.items():
            lab.nodes[name].config.write_text(text)
            lab.kill(f"{name}.sidecar")
            lab.start(f"{name}.sidecar")
        lab.start(f"{third}.sidecar")
        all_in_sync(lab)


@pytest.mark.proves("local-completion")
def test_local_completion_waits_for_no_backup(strict: Lab) -> None:
    """An operator sees what is at stake. Nothing of it is lost but with its primary: not with its publisher's connection."""
    lab = strict
    primary, other, _ = all_in_sync(lab)
    door = lab.nodes[primary].door
    local, ordinary = (f"{kind}-{time.time_ns()}" for kind in ("local", "ordinary"))
    for queue in (local, ordinary):
        declare(door, queue)
    leaves = Witness(door, local, f"{local}-leaves")
    # Whose connection is lost has its next confirm from the broker again: this one sits out whatever the machine does.
    with Publisher([door], f"{local}-stays", confirm_timeout_s=PATIENT_S, heartbeat_s=0) as publisher:
        # Of the first of a connection the broker is asked whether the user may do that.
        publisher.publish("", local, b"1", mandatory=False).result(CONFIRM_S)
        leaves.send(range(2, 3))
        leaves.all_confirmed()
        eventually("nothing of these to be at stake", lambda: lab.status(primary)["at_stake_entries"] == 0)
        lab.stop(f"{other}.sidecar")
        try:
            waits = publisher.publish("", ordinary, b"")
            for confirm in [publisher.publish("", local, b"%d" % number, mandatory=False) for number in range(3, 13)]:
                confirm.result(CONFIRM_S)
            leaves.send(range(13, 18))
            leaves.all_confirmed()
            assert not waits.done
            status = told(lab, primary)
            assert status["at_stake_entries"] == 15
            assert status["at_stake_bytes"] > 0
            said = command("list", lab=lab)[1]
            shown = r"15 publishes \(\d+ bytes\) are confirmed \(local completion\) and not on all in-sync backups"
            assert re.search(f" active .*{shown}", line_of(primary, said)), said
            leaves.client.socket.close()
            eventually("its connection to the broker to be given up", lambda: lab.status(primary)["connections"] < status["connections"])
            assert not waits.done
        finally:
            lab.cont(f"{other}.sidecar")
        waits.result(CONFIRM_S)
    all_in_sync(lab, applied=True)
    assert told(lab, primary)["at_stake_entries"] == 0
    for node in lab.nodes.values():
        eventually("all of it everywhere", lambda url=node.broker: depth(url, local) == 17 and depth(url, ordinary) == 1)
    # Its publisher sends again what it may not have heard of: the log knows the IDs of what it logged anew.
    again = Witness(door, local, f"{local}-leaves")
    again.send(range(13, 18))
    again.all_confirmed()
    # In whatever order the broker has read two connections, each publisher's are in theirs.
    found = bodies(door, local)
    assert sorted(found) == list(range(1, 18))
    left = {2, *range(13, 18)}
    assert [number for number in found if number in left] == sorted(left)
    assert [number for number in found if number not in left] == [1, *range(3, 13)]
    equal(lab, local)
