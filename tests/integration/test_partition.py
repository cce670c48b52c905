"""G5 with a network that is cut between two nodes while both live, and clients reach both: in containers with private networks.

Rules: what a node confirmed is read from a connection that was open all the time; the operator's word that the other node is down is untrue in
all of these tests. Each leaves the pair whole, with other keys of [replication] than it found.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from container_lab import ContainerLab
from history import span
from load import command, declare, eventually, in_sync, missed, promote, replication, same_logs, told
from test_stalls import RATE, Witness, begun, bodies, equal
from traffic import Load

pytestmark = [pytest.mark.broker, pytest.mark.docker, pytest.mark.one_version("4.3"), pytest.mark.proves("G5")]

COUNT = 100
SHORT_S = 2.0
#: Longer than a test keeps the nodes apart, however long the machine stands still meanwhile.
LONG_S = 600.0


def over(witness: Witness, timeout_s: float = 60.0) -> str:
    """Reads to the end of a connection, and says how it ended. Raises TimeoutError: nothing came for so long."""
    while witness.read(timeout_s):
        pass
    return witness.reason


@pytest.mark.quick
def test_an_old_primary_that_is_cut_off_confirms_nothing_that_the_new_one_lacks(containers: ContainerLab) -> None:
    """It goes on as primary and takes what clients send, but while it waits for its backup nothing is safe; then it finds its epoch over."""
    lab = containers
    replication(lab, mode="available", backup_timeout_s=LONG_S)
    old, new = in_sync(lab)
    queue, loaded, witness = begun(lab, old, "cut", COUNT)
    load = Load([lab.nodes[old].door, lab.nodes[new].door], loaded, f"{loaded}-app", rate_per_s=RATE)
    load.start()
    try:
        eventually("the stream to flow", lambda: load.confirmed > 100)
        began = time.time()
        lab.cut(old, new)
        try:
            witness.send(range(COUNT + 1, 2 * COUNT + 1))
            missed(lab, new, old)
            promote(lab, new, old)
            second = Witness(lab.nodes[new].door, queue, queue)
            second.send(range(COUNT + 1, 3 * COUNT + 1))  # once more what is not confirmed, and new ones
            second.all_confirmed()
            assert told(lab, old)["role"] == "active", "it knows nothing of that, and clients reach it"
            late = Witness(lab.nodes[old].door, queue, f"{queue}-late")
            late.send(range(9 * COUNT, 10 * COUNT))
            assert told(lab, old)["safe"] < told(lab, old)["end"]
        finally:
            lab.heal(old, new)
        for each in (witness, late):
            assert re.search("starts again|is a backup", over(each)), each.reason
        ended = time.time()
        assert witness.confirmed == set(range(1, COUNT + 1)), "confirmed by a primary that was over"
        assert not late.confirmed, "confirmed by a primary that was over"
        eventually("it follows", lambda: lab.status(old)["primary"] == new)
        assert in_sync(lab) == (new, old)
        load.finish()
    finally:
        load.stop()
    # What a consumer acked to the old primary meanwhile was never taken.
    load.check([span(began, ended)])
    assert Counter(bodies(lab.nodes[new].door, queue)) == Counter(range(1, 3 * COUNT + 1)), "lost, twice, or from nowhere"
    equal(lab, queue, loaded)
    same_logs(lab)


def test_two_primaries_that_both_confirmed_are_told_and_lose_nothing(containers: ContainerLab, tmp_path: Path) -> None:
    """Past backup_timeout_s the old primary takes the silent one out of the set, as the word was not true. It keeps what it then confirmed."""
    lab = containers
    replication(lab, mode="available", backup_timeout_s=SHORT_S)
    old, new = in_sync(lab)
    queue = f"both-{time.time_ns()}"
    declare(lab.nodes[old].door, queue)
    first = Witness(lab.nodes[old].door, queue, f"{queue}-old")
    first.send(range(1, COUNT + 1))
    first.all_confirmed()
    lab.cut(old, new)
    try:
        first.send(range(COUNT + 1, 2 * COUNT + 1))
        missed(lab, new, old)
        promote(lab, new, old)
        second = Witness(lab.nodes[new].door, queue, f"{queue}-new")
        second.send(range(2 * COUNT + 1, 3 * COUNT + 1))
        second.all_confirmed()
        first.all_confirmed()
        assert told(lab, old)["members"] == [old]
        assert told(lab, new)["members"] == [new]
    finally:
        lab.heal(old, new)
    reason = lab.wait_role(old, "diverged", 120)["reason"]
    assert re.search(rf"entries \d+ to \d+ may have been confirmed by this node alone; {new} lacks them", reason), reason
    assert re.search("starts again", over(first)), first.reason
    with pytest.raises((AssertionError, OSError)):
        Witness(lab.nodes[old].door, queue, f"{queue}-refused")
    second.send(range(3 * COUNT + 1, 4 * COUNT + 1))
    second.all_confirmed()
    assert told(lab, new)["members"] == [new]
    tail = tmp_path / "tail.jsonl"
    code, said = command("reinit", old, "--export", str(tail), lab=lab)
    assert code == 0, said
    code, said = command("republish", str(tail), "--to", lab.nodes[new].door)
    assert (code, said.splitlines()[0]) == (0, f"{COUNT} messages published and confirmed")
    assert in_sync(lab) == (new, old)
    assert first.confirmed | second.confirmed == set(range(1, 4 * COUNT + 1))
    assert Counter(bodies(lab.nodes[new].door, queue)) == Counter(range(1, 4 * COUNT + 1)), "lost, twice, or from nowhere"
    equal(lab, queue)
    same_logs(lab)


@pytest.mark.proves("promotion")
def test_a_promotion_says_since_when_the_other_may_have_confirmed_alone(containers: ContainerLab) -> None:
    """The word is true, and what the old primary confirmed on its own is lost all the same: whoever gives it is told what to compare."""
    lab = containers
    replication(lab, mode="available", backup_timeout_s=SHORT_S)
    old, new = in_sync(lab)
    queue = f"alone-{time.time_ns()}"
    declare(lab.nodes[old].door, queue)
    witness = Witness(lab.nodes[old].door, queue, queue)
    lab.cut(old, new)
    try:
        cut_at = time.monotonic()
        witness.send(range(1, COUNT + 1))
        witness.all_confirmed()
        assert told(lab, old)["members"] == [old]
        missed(lab, new, old)
        lab.kill(old)
        for dry_run in (("--dry-run",), ()):
            code, said = command("promote", new, "--down", old, *dry_run, lab=lab)
            found = re.search(rf"; it heard its primary ([\d.]+) s ago and was in sync then; .*; if {old} went on without it since, .* is lost", said)
            assert code == 0
            assert found, said
            assert SHORT_S < float(found[1]) < time.monotonic() - cut_at + 1
    finally:
        lab.heal(old, new)
    lab.start(old)
    lab.wait_role(old, "diverged", 120)
    code, said = command("reinit", old, "--discard", lab=lab)
    assert code == 0, said
    assert in_sync(lab) == (new, old)
    assert bodies(lab.nodes[new].door, queue) == []


@pytest.mark.proves("strict")
def test_in_mode_strict_neither_side_confirms(containers: ContainerLab) -> None:
    """Not even the operator's word, which is untrue, lets one of them go on alone; when they meet again, the one that was promoted leads."""
    lab = containers
    replication(lab, mode="strict", backup_timeout_s=SHORT_S)
    old, new = in_sync(lab)
    queue = f"strict-{time.time_ns()}"
    declare(lab.nodes[old].door, queue)
    witness = Witness(lab.nodes[old].door, queue, queue)
    witness.send(range(1, COUNT + 1))
    witness.all_confirmed()
    with ThreadPoolExecutor(1) as operator:
        lab.cut(old, new)
        try:
            witness.send(range(COUNT + 1, 2 * COUNT + 1))
            missed(lab, new, old)
            promotion = operator.submit(promote, lab, new, old)
            eventually("its epoch", lambda: lab.status(new)["role"] == "recovering")
            with pytest.raises(TimeoutError):
                over(witness, 2 * SHORT_S)
            assert told(lab, new)["role"] == "recovering", "its door is closed"
            assert all(told(lab, name)["members"] == sorted([old, new]) for name in (old, new)), "nobody is taken out of the set"
        finally:
            lab.heal(old, new)
        promotion.result(120)
    assert re.search("starts again|is a backup", over(witness)), witness.reason
    assert witness.confirmed == set(range(1, COUNT + 1)), "confirmed by a primary that was over"
    assert in_sync(lab) == (new, old)
    second = Witness(lab.nodes[new].door, queue, queue)
    second.send(range(COUNT + 1, 2 * COUNT + 1))
    second.all_confirmed()
    assert Counter(bodies(lab.nodes[new].door, queue)) == Counter(range(1, 2 * COUNT + 1)), "lost, twice, or from nowhere"
    equal(lab, queue)
    same_logs(lab)
