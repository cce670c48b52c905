"""A network that fails between some of three nodes only, or in one direction, while clients reach all of them: in containers with private networks.

Rules: what is cut is cut under load, and healed. The tests share one lab, and each leaves it whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from container_lab import ContainerLab, why_not, why_not_swallow
from load import command, eventually, set_up, told
from test_three_faults import BACKUP_TIMEOUT_S, goes_on, loaded, out
from test_three_nodes import all_in_sync

pytestmark = [pytest.mark.broker, pytest.mark.docker, pytest.mark.proves("G5")]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerLab]:
    directory = tmp_path_factory.mktemp("three-containers")
    if reason := why_not(directory):
        pytest.skip(reason)
    lab = ContainerLab({"east": 3}, directory / "lab")
    set_up(lab, f"backup_timeout_s = {BACKUP_TIMEOUT_S}")
    with lab:
        yield lab


@pytest.fixture
def lab(shared: ContainerLab) -> Iterator[ContainerLab]:
    yield shared
    shared.recover()


def refused(lab: ContainerLab, node: str, down: str) -> str:
    code, said = command("promote", node, "--down", down, lab=lab)
    assert code == 1, said
    return said


def test_a_primary_that_reaches_only_one_of_its_backups(lab: ContainerLab) -> None:
    """It goes on with that one, and the other comes back. Who is cut off from it is not promoted over it on an untrue word."""
    primary, lost, other = all_in_sync(lab)
    epoch = told(lab, primary)["epoch"]
    with loaded(lab) as load:
        lab.cut(primary, lost)
        out(lab, primary, lost)
        goes_on(load)
        eventually("it to miss its primary", lambda: not lab.status(lost)["peers"][primary]["connected"])
        assert f"{primary} is said to be down, but it answers {other}:" in refused(lab, lost, primary)
        assert f"{primary} is said to be down, but it answers:" in refused(lab, other, primary)
        goes_on(load)
        lab.heal(primary, lost)
        assert all_in_sync(lab)[0] == primary
    load.check([])
    assert told(lab, primary)["epoch"] == epoch, "nobody has been promoted"


def test_backups_that_do_not_reach_each_other(lab: ContainerLab) -> None:
    """It does not matter, but for a handover: the one that is handed to cannot ask the other, and the former primary takes the role back."""
    primary, one, two = all_in_sync(lab)
    with loaded(lab) as load:
        lab.cut(one, two)
        for name, peer in ((one, two), (two, one)):
            eventually(f"{name} to miss {peer}", lambda name=name, peer=peer: not lab.status(name)["peers"][peer]["connected"])
        goes_on(load)
        assert told(lab, primary)["members"] == sorted(lab.nodes)
        eventually("a handover", lambda: command("switchover", one, lab=lab)[0] == 0)
        goes_on(load)
        assert all_in_sync(lab)[0] == primary
        lab.heal(one, two)
    load.check([])


@pytest.mark.parametrize("swallowed", ["to the backup", "from the backup"])
def test_packets_are_lost_in_one_direction(lab: ContainerLab, swallowed: str) -> None:
    """Between the primary and one of its backups: that one is left out, and comes back."""
    if reason := why_not_swallow():
        pytest.skip(reason)
    primary, lost, _ = all_in_sync(lab)
    sender, receiver = (primary, lost) if swallowed == "to the backup" else (lost, primary)
    with loaded(lab) as load:
        lab.swallow(sender, receiver)
        out(lab, primary, lost)
        goes_on(load)
        lab.let_through(sender, receiver)
        assert all_in_sync(lab)[0] == primary
    load.check([])
