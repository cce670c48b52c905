"""A leader hands over in order, steps down for nobody, or is asked to when it cannot."""

from __future__ import annotations

import pytest
from cluster import Cluster
from test_m1_traces import down, group, until

from lrq_ha.errors import IllegalEvent
from lrq_ha.replication.events import Answer, Handover, PauseRequest, PeerMessage, StepDown, SwitchoverRequest
from lrq_ha.replication.roles import Role


def hand_over(c: Cluster, i: int, to: int = 0) -> None:
    """The primary hands over and starts again, once what it said has arrived."""
    assert c.switchover(i, to).ok
    for j in c.hosts:
        while (i, j) in c.conns and c.conns[i, j].queue:
            c.deliver(i, j)
    c.end_incarnation(i)


@pytest.mark.parametrize(("size", "to"), [(2, 0), (2, 2), (3, 3)])
def test_the_other_node_takes_over_by_itself(size: int, to: int) -> None:
    c = group(size)
    before = c.append(1)
    c.settle(0.5)
    hand_over(c, 1, to)
    c.settle(0.5)
    target = to or 2
    assert c.primary() is c.hosts[target]
    assert c.node(target)._leader._given == (), "nobody held a message: nothing is redelivered"
    after = c.append(target)
    c.settle(0.5)
    assert {before, after} <= c.confirmed.keys()
    assert c.node(1).role is Role.READY
    hand_over(c, target, 1)
    c.settle(0.5)
    assert c.primary() is c.hosts[1]


def test_a_handover_that_does_not_arrive_is_taken_back() -> None:
    c = group(2)
    c.settle(0.5)
    c.cut(1, 2, both=False)
    c.switchover(1, 2)
    c.end_incarnation(1)
    c.heal()
    c.settle(2.0)
    assert c.primary() is None, "it leaves the epoch to the other for a while"
    c.settle(10.0)
    assert c.primary() is c.hosts[1]


def test_a_handover_counts_for_that_end_of_the_log_only() -> None:
    c = group(3)
    c.settle(0.5)
    hand_over(c, 1, 2)
    c.crash(2)
    c.settle(1.0)
    c.promote(3, {2})
    c.settle(1.0)
    assert c.primary() is c.hosts[3]
    c.append(3)
    c.settle(0.5)
    c.start(2)
    c.settle(1.0)
    assert c.primary() is c.hosts[3]
    assert c.node(2).role is Role.READY


def test_what_is_refused() -> None:
    c = group(3)
    refusals = {i: c.switchover(1, i).text for i in (1, 9)}
    assert refusals == {1: "n1 is primary already", 9: "there is no node 9 in this group"}
    assert c.switchover(2, 1).text == "n2 is not primary: ask n1"
    c.cut(1, 3)
    c.settle(2.5)
    assert c.switchover(1, 3).text == "n3 is not an in-sync backup: wait until it has caught up"
    assert "n3 does not answer, and n2 cannot take an epoch without" in c.switchover(1, 2).text
    c.cut(1, 2)
    c.settle(2.5)
    assert c.switchover(1).text == "n1 has no in-sync backup to hand over to"
    c.append(1)
    with pytest.raises(IllegalEvent, match="steps down at"):
        c.node(1).handle(StepDown(2, ()), c.now)
    assert c.node(1).role is Role.ACTIVE


def test_paused_nobody_takes_an_epoch_until_somebody_resumes() -> None:
    c = group(2)
    c.settle(0.5)
    answer = c.node(1).handle(PauseRequest(True), c.now)[-1]
    assert isinstance(answer, Answer)
    assert answer.text == "n1: no node takes an epoch by itself until lrq-ha resume"
    c._feed(c.hosts[2], PauseRequest(True))
    c.crash(1)
    c.start(1)
    c.settle(5.0)
    assert c.primary() is None
    assert c.node(1).reason.startswith("paused: "), "it has heard so from the other"
    c._feed(c.hosts[2], PauseRequest(False))
    until(c, lambda: c.primary())
    c.settle(0.5)
    assert c.primary() is c.hosts[1]


def test_an_operator_promotes_although_it_is_paused() -> None:
    c = group(2)
    c.settle(0.5)
    c._feed(c.hosts[2], PauseRequest(True))
    down(c, 1)
    c.promote(2, {1})
    c.settle(0.5)
    assert c.primary() is c.hosts[2]


def test_a_promotion_ends_a_pause_on_all_nodes() -> None:
    """One that stayed behind with the pause kept the others from every later epoch, and nobody saw it."""
    c = group(2)
    c.settle(0.5)
    c._feed(c.hosts[1], StepDown(0, ()))
    c.end_incarnation(1)
    c._feed(c.hosts[1], PauseRequest(True))  # as the sidecar's next incarnation has it from the one before
    c.settle(5.0)
    assert c.primary() is None
    c.promote(2, set())
    c.settle(1.0)
    assert c.primary() is c.hosts[2]
    assert not c.node(1).paused
    assert not c.node(2).paused
    c.crash(2)
    c.start(2)
    c.settle(5.0)
    assert c.primary() is c.hosts[2], "by itself"


def test_nothing_is_handed_over_in_a_paused_group() -> None:
    c = group(2)
    c.settle(0.5)
    for node in (1, 2):
        c._feed(c.hosts[node], PauseRequest(True))
        c.settle(0.5)
        assert c.switchover(1, 2).text == "the group is paused, and n2 would take no epoch: run lrq-ha resume first"
        c._feed(c.hosts[node], PauseRequest(False))
        c.settle(0.5)
    assert c.switchover(1, 2).ok


def test_a_switchover_is_answered_with_the_node_that_it_goes_to() -> None:
    c = group(3)
    c._feed(c.hosts[1], SwitchoverRequest())
    answer = c.hosts[1].answer
    assert answer is not None
    assert (answer.ok, answer.text, answer.node) == (True, "would hand over to n2", 2)


def test_a_handover_of_another_leader_or_end_counts_for_nothing() -> None:
    c = group(2)
    c.settle(0.5)
    node = c.node(2)
    for message in (Handover(node.leader_epoch, node.log.end + 1, ()), Handover(node.leader_epoch + 256, node.log.end, ())):
        c._feed(c.hosts[2], PeerMessage(1, message))
    assert node._candidate.handed is None


def test_a_leader_that_steps_down_for_nobody_takes_its_epoch_again_unless_it_is_paused() -> None:
    c = group(2)
    c.settle(0.5)
    c._feed(c.hosts[1], StepDown(0, ()))
    assert c.hosts[1].ended == "stepped down"
    c.end_incarnation(1)
    c.settle(0.5)
    assert c.primary() is c.hosts[1]
