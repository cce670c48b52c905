"""A group that etcd coordinates, step by step on the real core: who takes an epoch, who leaves the set, what a record that went back does (E1-E9)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from registered import TTL_S, RegisteredCluster

from lrq_ha.replication.events import Answer, PauseRequest
from lrq_ha.replication.in_sync import InSyncSet
from lrq_ha.replication.lease_candidate import RANK_WAIT_S
from lrq_ha.replication.positions import epoch_number
from lrq_ha.replication.register import Record, Why
from lrq_ha.replication.roles import Role

pytestmark = pytest.mark.proves("G5", "coordination")


def group(size: int, **options: object) -> RegisteredCluster:
    """Node 1 leads, all are in the set, in etcd, too."""
    cluster = RegisteredCluster(size, **options)
    for i in cluster.hosts:
        cluster.start(i)
    cluster.settle(1.5)
    assert cluster.primary() is cluster.hosts[1]
    assert cluster.holder == 1
    assert members(cluster) == cluster.hosts.keys()
    return cluster


def members(c: RegisteredCluster) -> frozenset[int]:
    assert c.record is not None
    return c.record.members


def goes_on(c: RegisteredCluster, i: int) -> None:
    message = c.append(i)
    c.settle(0.5)
    assert message in c.confirmed


@pytest.mark.parametrize("size", [2, 3])
def test_a_backup_takes_over_when_the_lease_is_gone(size: int) -> None:
    c = group(size)
    before = c.append(1)
    c.settle(0.5)
    c.crash(1)
    c.settle(TTL_S / 2)
    assert c.primary() is None, "the lease has not ended yet"
    c.settle(TTL_S + 1)
    assert c.primary() is c.hosts[2]
    assert members(c) == {*range(2, size + 1)}
    assert c.hosts[2].entries[c.confirmed[before][0] - 1] == c.confirmed[before][1]
    goes_on(c, 2)
    c.start(1)
    c.settle(2)
    assert c.node(1).role is Role.READY
    assert members(c) == c.hosts.keys()
    assert c.record
    assert c.node(2).log.record >= c.record.version - 1, "MARKER and MEMBERS name the version of the record"


def test_a_restarted_primary_does_not_wait_for_its_own_lease() -> None:
    c = group(2)
    c.crash(2)
    c.settle(2)
    assert members(c) == {1}
    c.crash(1)
    c.start(1)
    c.settle(0.3)
    assert c.primary() is c.hosts[1]


@pytest.mark.parametrize("strict", [False, True])
def test_who_is_out_of_the_set_in_etcd_takes_nothing(strict: bool) -> None:
    c = group(2, strict=strict)
    c.crash(2)
    c.settle(2)
    if strict:
        assert members(c) == {1, 2}, "mode strict keeps it"
        return
    alone = c.append(1)
    c.settle(0.2)
    assert alone in c.confirmed
    c.crash(1)
    c.start(2)
    c.settle(10)
    assert c.primary() is None
    assert "is not in the set in etcd (n1)" in c.node(2).reason
    refused = c.promote(2, {1})
    assert refused
    assert not refused.ok
    assert "is not in the set in etcd" in refused.text


def test_a_member_leaves_the_set_in_etcd_first() -> None:
    c = group(2)
    c.away = {1}
    c.crash(2)
    c.settle(3)
    message = c.append(1)
    c.settle(3)
    assert c.node(1).log.members == {1, 2}
    assert message not in c.confirmed, "a silent member holds confirms while etcd is away"
    c.away.clear()
    c.settle(0.5)
    assert members(c) == c.node(1).log.members == {1}
    assert message in c.confirmed


def test_a_member_that_comes_back_while_etcd_is_away_stays() -> None:
    c = group(2)
    c.away = {1, 2}
    c.crash(2)
    c.settle(3)
    assert c.node(1).nothing_is_safe()
    c.start(2)
    c.settle(2)
    assert not c.node(1).nothing_is_safe()
    goes_on(c, 1)
    c.away.clear()
    c.settle(2)
    assert members(c) == c.node(1).log.members == {1, 2}, "its removal, which was under way, is taken back"
    goes_on(c, 1)


def test_etcd_away_stops_nothing_else() -> None:
    """E6: each member is heard, so the door stays open; and the leader is heard, so no other takes its epoch, when etcd forgets its lease."""
    c = group(3)
    c.away = {1, 2, 3}
    c.settle(3 * TTL_S)
    assert not c.node(1).cut_off
    goes_on(c, 1)
    c.away = {1}
    c.settle(3 * TTL_S)
    assert c.primary() is c.hosts[1]
    c.away.clear()
    c.settle(1)
    assert (c.primary(), c.holder) == (c.hosts[1], 1)


def test_a_leader_that_makes_no_progress_is_replaced() -> None:
    """E4, E6: its sidecar is heard, and its broker has confirmed nothing for as long as the lease."""
    c = group(2)
    tick = c.tick
    c.tick = lambda i: super(RegisteredCluster, c).tick(i) if i == 1 else tick(i)  # type: ignore[method-assign]
    c.settle(3 * TTL_S)
    assert c.primary() is c.hosts[2]


def test_a_leader_that_makes_no_progress_leaves_its_lost_lease_alone() -> None:
    """E4: it sees first that the key is gone. It writes the key again as soon as its broker confirms."""
    c = group(2)
    c.standing = {1}
    for _ in range(60):
        c.now += 0.05
        c.tick(1)
    assert (c.holder, c.asked) == (0, {})
    c.standing = set()
    c.settle(0.5)
    assert c.holder == 1
    goes_on(c, 1)


def test_a_primary_that_is_cut_off_from_all_serves_no_clients() -> None:
    """E5; and serves them again when a member is heard."""
    c = group(2)
    c.away = {1, 2}
    c.cut(1, 2)
    c.settle(TTL_S / 2)
    assert not c.node(1).cut_off
    c.settle(TTL_S)
    assert "another node may lead now" in c.node(1).cut_off
    c.heal()
    c.settle(1)
    assert not c.node(1).cut_off
    goes_on(c, 1)


@pytest.mark.parametrize(("priorities", "taker"), [({}, 2), ({3: 200}, 3), ({2: 0}, 3), ({2: 0, 3: 0}, 0)])
def test_who_has_a_better_right_takes_first(priorities: dict[int, int], taker: int) -> None:
    c = RegisteredCluster(3)
    c.priorities = priorities
    for i in c.hosts:
        c.start(i)
    c.settle(1.5)
    assert c.primary() is c.hosts[1]
    c.crash(1)
    c.settle(TTL_S + 1 + 2 * RANK_WAIT_S)
    assert c.primary() is (c.hosts[taker] if taker else None)
    if not taker:
        assert "its priority is 0" in c.node(2).reason


def hand_over(c: RegisteredCluster, to: int) -> None:
    """Node 1 hands over, starts again once its messages have arrived, and gives its lease back."""
    assert c.switchover(1, to).ok
    for j in c.hosts.keys() - {1}:
        while c.conns[1, j].queue:
            c.deliver(1, j)
    c.end_incarnation(1)
    c.end_lease()
    c.settle(2)


@pytest.mark.parametrize("to", [2, 3])
def test_a_handover_reaches_the_node_that_was_named(to: int) -> None:
    c = group(3)
    hand_over(c, to)
    assert c.primary() is c.hosts[to]
    goes_on(c, to)


def test_no_handover_that_etcd_would_not_allow() -> None:
    c = group(2)
    c.away = {1}
    c.settle(0.2)
    refused = c.switchover(1, 2)
    assert not refused.ok
    assert "etcd does not answer" in refused.text


@pytest.mark.parametrize("lost", ["record", "some changes"])
def test_a_record_that_went_back(lost: str) -> None:
    """E8: a serving primary writes it again; without one nobody leads before all nodes answer, and an operator says so."""
    c = group(2)
    old = c.record if lost == "some changes" else None
    c.crash(2)
    c.settle(2)
    goes_on(c, 1)
    c.record, c.record_revision, c.holder, c.holder_revision = old, c.record_revision if old else 0, 0, 0
    c.settle(0.5)
    assert members(c) == {1}
    assert c.record
    assert c.record.version > 3

    c.crash(1)
    c.record = old and replace(old, version=1)
    c.record_revision = c.record_revision if old else 0
    c.holder = c.holder_revision = 0
    c.start(1)
    c.settle(10)
    assert c.primary() is None
    assert "went" in c.node(1).reason or "etcd" in c.node(1).reason
    refused = c.promote(1, {2})
    assert refused
    assert not refused.ok
    c.start(2)
    c.settle(5)
    assert c.primary() is None
    c.promote(1)
    c.settle(2)
    assert c.primary() is c.hosts[1]
    assert members(c) == {1, 2}


def test_the_operator_does_not_promote_over_a_lease_or_without_etcd() -> None:
    c = group(2)
    c.cut(1, 2)
    c.settle(1)
    refused = c.promote(2, {1}, untrue=True)
    assert refused
    assert "n1 has the lease in etcd" in refused.text
    c.away = {2}
    c.settle(0.2)
    refused = c.promote(2, {1}, untrue=True)
    assert refused
    assert "repeat with --without-etcd --down n1" in refused.text


def paused(c: RegisteredCluster, i: int, wanted: bool) -> Answer | None:
    """What node `i` answers an operator who pauses or resumes the group, if it answers at once."""
    c.hosts[i].answer = None
    c._feed(c.hosts[i], PauseRequest(wanted))
    return c.hosts[i].answer


def is_paused(c: RegisteredCluster) -> bool:
    assert c.record is not None
    return c.record.paused


def test_a_pause_outlives_all_sidecars() -> None:
    """It is in the record, whichever node was told; a leader takes it over, and goes on changing the set."""
    c = group(3)
    held = c.holder_revision
    for i in (3, 2, 1):
        paused(c, i, True)
        c.settle(0.5)
        answer = c.hosts[i].answer
        assert answer
        assert answer.ok, answer.text
        assert is_paused(c)
        assert c.holder_revision == held, "to the leader the record is its own"
    c.crash(3)
    c.settle(2)
    assert members(c) == {1, 2}
    assert is_paused(c), "the leader keeps it"
    goes_on(c, 1)
    for i in (1, 2):
        c.crash(i)
    for i in c.hosts:
        c.start(i)
    c.settle(5)
    assert c.primary() is None
    assert "paused" in c.node(1).reason
    assert c.node(2).pause_recorded
    paused(c, 2, False)
    c.settle(3)
    assert c.primary() is not None
    assert not is_paused(c)


def test_a_promotion_ends_a_pause() -> None:
    c = group(2)
    for i in (1, 2):
        paused(c, i, True)
        c.settle(0.3)
    c.crash(1)
    c.settle(2)
    assert c.primary() is None
    c.promote(2, {1})
    c.settle(2)
    assert c.primary() is c.hosts[2]
    assert not is_paused(c)
    assert c.whys[-1] is Why.OPERATOR


def test_a_promotion_of_who_paused_ends_a_pause() -> None:
    """The former leader, which has written the pause into its own record since it started again."""
    c = group(2)
    c.priorities = {1: 0, 2: 0}
    for i in (2, 1):
        c.crash(i)
        c.start(i)
        c.settle(TTL_S + 1)
    assert c.primary() is None
    paused(c, 1, True)
    c.settle(0.5)
    assert is_paused(c)
    c.promote(1)
    c.settle(2)
    assert c.primary() is c.hosts[1]
    assert not is_paused(c)


def test_a_pause_that_etcd_does_not_have() -> None:
    c = group(2)
    c.away = {1, 2}
    c.settle(0.3)
    answer = paused(c, 2, True)
    assert answer
    assert answer.ok
    assert "forgotten when its sidecar is started again" in answer.text
    paused(c, 2, False)
    c.away.clear()
    c.settle(0.3)
    paused(c, 1, True)
    c.settle(0.3)
    c.away = {1, 2}
    c.settle(0.3)
    answer = paused(c, 1, False)
    assert answer
    assert not answer.ok
    assert "the group stays paused" in answer.text
    c.away.clear()
    c.settle(0.3)
    c.prompt = False
    assert paused(c, 1, False) is None
    busy = paused(c, 1, False)
    assert busy
    assert "asked for something else" in busy.text
    assert c.record
    c.record = replace(c.record, version=c.record.version + 1)
    c.revision = c.record_revision = c.record_revision + 1
    c.hosts[1].answer = None
    c.flying.append((1, c.asked[1]))
    c.land(0, answered=True)
    changed = c.hosts[1].answer
    assert changed
    assert "changed meanwhile" in changed.text


def test_an_operator_goes_on_without_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    """E10: as with static coordination; etcd has the epoch when it is back, once its set is safe. It is refused while etcd answers."""
    c = group(2)
    paused(c, 2, True)
    c.settle(0.5)
    before = c.record
    c.crash(1)
    refused = c.promote(2, {1}, without_register=True)
    assert refused
    assert "repeat without --without-etcd" in refused.text
    c.away = {2}
    c.settle(0.3)
    said = c.promote(2, {1}, dry_run=True, without_register=True)
    assert said
    assert said.ok
    assert "etcd was not asked" in said.text
    c.promote(2, {1}, without_register=True)
    c.settle(1)
    assert c.primary() is c.hosts[2]
    goes_on(c, 2)
    assert c.record == before
    c.settle(TTL_S + 1)
    goes_on(c, 2)
    assert not c.node(2).cut_off
    with monkeypatch.context() as patch:
        patch.setattr(InSyncSet, "is_settled", lambda _: False)  # as while a newcomer is added
        c.away.clear()
        c.settle(0.5)
        assert c.record == before
    c.settle(TTL_S + 1)
    assert c.primary() is c.hosts[2]
    assert c.record
    assert (c.record.leader, c.record.epoch, c.record.members, c.record.paused) == (2, c.node(2).leading, frozenset({2}), False)
    c.start(1)
    c.settle(2)
    assert members(c) == {1, 2}
    goes_on(c, 2)


def test_why_an_epoch_was_taken() -> None:
    c = group(2)
    assert c.whys == [Why.ALL]
    hand_over(c, 2)
    assert c.primary() is c.hosts[2]
    assert c.whys[1:] == [Why.SWITCHOVER]
    c.crash(2)
    c.start(2)
    c.settle(TTL_S + 1)
    assert c.primary() is c.hosts[2]
    assert c.whys[2:] == [Why.RESTART]
    c.crash(2)
    c.settle(TTL_S + 1)
    assert c.primary() is c.hosts[1]
    assert c.whys[3:] == [Why.LEASE]


def test_all_hosts_lose_power() -> None:
    """No member's log is whole for sure: all must answer and promise, and the longest log leads."""
    c = group(3)
    goes_on(c, 1)
    for i in c.hosts:
        c.crash(i, broker=True)
    c.start(1)
    c.start(2)
    c.settle(5)
    assert c.primary() is None
    c.start(3)
    c.settle(3)
    assert c.primary() is not None


@pytest.mark.parametrize("holder", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_a_group_without_a_log_does_not_begin_over_a_record(size: int, holder: int) -> None:
    """It may be that of another group with this name. An operator begins where no node has the lease."""
    c = RegisteredCluster(size)
    c.record = Record(7, epoch_number(3, 1), 1, frozenset({1, 2}))
    c.holder, c.holder_revision, c.revision, c.record_revision, c.lease_until = holder, bool(holder) * 2, 2, 1, c.now + 10
    for i in c.hosts:
        c.start(i)
    c.settle(5)
    assert c.primary() is None
    assert c.record.version == 7
    assert "another group under this name" in c.node(1).reason
    answer = c.promote(1)
    if holder:
        assert answer
        assert "has the lease in etcd" in answer.text
        return
    c.settle(2)
    assert c.primary() is c.hosts[1]
    assert members(c) == c.hosts.keys()


def test_a_group_that_was_stopped_as_it_began_goes_on() -> None:
    """etcd has its record, and no log has an entry yet: all nodes have promised that epoch."""
    c = RegisteredCluster(2)
    for i in c.hosts:
        c.start(i)
    c.prompt = False
    c.settle(1)
    [(taker, change)] = c.asked.items()
    for i in c.hosts:
        c.crash(i)
    assert c.flying == [(taker, change)]
    c.land(0, answered=False)
    assert c.record
    assert not any(host.entries for host in c.hosts.values())
    c.prompt = True
    for i in c.hosts:
        c.start(i)
    c.settle(5)
    assert c.primary() is not None


def test_a_change_that_is_answered_late_ends_a_leader_whose_epoch_is_over() -> None:
    """E2: the removal that the old leader has asked for fails, as the record is another's, and it confirms nothing more."""
    c = group(2)
    c.cut(1, 2)
    c.prompt = False
    c.settle(1.3)
    assert 1 in c.asked
    message = c.append(1)
    c.flying.append((1, c.asked[1]))
    c.end_lease()
    c.settle(0.5)
    while 2 not in c.asked:
        c.settle(0.1)
    c.flying.append((2, c.asked[2]))
    c.land(1, answered=True)
    c.land(0, answered=True)
    c.settle(0.5)
    assert c.hosts[1].node is None or not c.node(1).leading
    assert message not in c.confirmed
    assert c.primary() is c.hosts[2]
