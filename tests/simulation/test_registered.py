"""Random lives of groups that etcd coordinates, without an operator; and each rule of coordination switched off fails one.

LRQ_SEEDS=N runs more lives; a failure names its seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import registered
from cluster import Violation
from registered import RegisteredCluster

from lrq_ha.replication import in_sync, lease_candidate, register_keeper
from lrq_ha.replication.register import Record, RegisterView

pytestmark = pytest.mark.proves("G1", "G5", "coordination")

SEEDS = int(os.environ.get("LRQ_SEEDS", "1000")) // 20
SEEDS_PER_TEST = 10
LIVES_OFF_MAX = 150


@pytest.mark.full(only=r"[1-9]0\]")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
def test_life_without_an_operator(first: int) -> None:
    for seed in range(first, min(first + SEEDS_PER_TEST, SEEDS)):
        registered.run(seed)


class WithoutCompare(RegisteredCluster):
    compares = False


def takes_without_membership(patch: pytest.MonkeyPatch) -> None:
    original = lease_candidate.LeaseCandidate._own_obstacle

    def obstacle(self: lease_candidate.LeaseCandidate, record: Record) -> str | None:
        found = original(self, record)
        return None if found and "not in the set in etcd" in found and self._node.log.in_set else found

    patch.setattr(lease_candidate.LeaseCandidate, "_own_obstacle", obstacle)


def removes_before_etcd(patch: pytest.MonkeyPatch) -> None:
    original = in_sync.InSyncSet.leaves

    def leaves(self: in_sync.InSyncSet, member: int, reason: str) -> None:
        original(self, member, reason)
        self.gone(member)

    patch.setattr(in_sync.InSyncSet, "leaves", leaves)


def adds_in_etcd_first(patch: pytest.MonkeyPatch) -> None:
    """And a candidate does not look at its own log, which would keep it from the epoch, too."""
    look = lease_candidate.LeaseCandidate._own_obstacle
    patch.setattr(lease_candidate.LeaseCandidate, "_own_obstacle", lambda self, record: look(self, record) if self._node.log.in_set else None)
    original = register_keeper.RegisterKeeper._keep

    def keep(self: register_keeper.RegisterKeeper, view: RegisterView, written: Record) -> None:
        coming = {number for number, peer in self._node.peers.items() if peer.subscribed} - written.members - self._leader.set.leaving
        if coming and view.record == written and view.holder == self._node.me:
            self._change(written.members | coming)
        else:
            original(self, view, written)

    patch.setattr(register_keeper.RegisterKeeper, "_keep", keep)


OFF: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], type[RegisteredCluster]]] = {
    "E1 compares": (lambda _patch: None, WithoutCompare),
    "E1 takes members only": (takes_without_membership, RegisteredCluster),
    "E2": (removes_before_etcd, RegisteredCluster),
    "E3": (adds_in_etcd_first, RegisteredCluster),
}


@pytest.mark.parametrize("off", OFF)
def test_each_rule_is_needed(off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, cluster_class = OFF[off]
    patch(monkeypatch)
    assert any(fails(seed, cluster_class) for seed in range(LIVES_OFF_MAX)), f"no life fails without the rule: {off}"


def fails(seed: int, cluster_class: type[RegisteredCluster]) -> bool:
    try:
        registered.run(seed, cluster_class=cluster_class)
    except Violation as violation:
        return "were confirmed and are not in the log" in str(violation) or "G5" in str(violation)
    return False
