"""The traces that the design models found for the log, step by step on the real core: with every rule on, nothing is broken; without the rule,
the violation.

Node i of the models is node i + 1 here. Names of the rules: tests/simulation/rules_off.py. Where the core is stricter than the model was, a
trace takes another way to the same hole; the step says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from cluster import Cluster, Fence, Violation, body
from rules_off import rule_off

from lrq_ha.replication.events import Prepare
from lrq_ha.replication.log import BatchHeader
from lrq_ha.replication.positions import epoch_number
from lrq_ha.replication.roles import Role
from lrq_ha.replication.subscription import StoredBatch

pytestmark = pytest.mark.proves("G5", "rules")


def group(size: int, **options: object) -> Cluster:
    """Node 1 leads, all are in the set."""
    cluster = Cluster(size, **options)  # type: ignore[arg-type]
    for i in cluster.hosts:
        cluster.start(i)
    cluster.settle(0.5)
    assert cluster.primary() is cluster.hosts[1]
    assert cluster.node(1).log.members == cluster.hosts.keys()
    return cluster


def until(cluster: Cluster, condition: Callable[[], object], *, only: Iterable[int] | None = None) -> None:
    """Lets what is under way arrive, one thing at a time, until the condition holds."""
    nodes = set(cluster.hosts) if only is None else set(only)
    while not condition():
        assert cluster._one_step(nodes), "the trace does not get there"


def confirmed(cluster: Cluster, message: int) -> bool:
    return message in cluster.confirmed


def follows(cluster: Cluster, i: int) -> Callable[[], bool]:
    return lambda: cluster.node(i).following and cluster.hosts[cluster.node(i).primary()].subscriptions.get(i) is not None


def down(cluster: Cluster, i: int) -> None:
    """A node goes down, what it was writing is lost, and the others notice."""
    cluster.crash(i)
    for src, dst in list(cluster.conns):
        if dst == i:
            cluster.notice(src, dst)


def drop_silent(cluster: Cluster, primary: int, silent: int) -> None:
    """The primary takes a silent node out of the set; MEMBERS is not confirmed yet."""
    cluster.settle(only={primary})
    while silent in cluster.node(primary).log.members:
        cluster.now += 0.05
        cluster.tick(primary)


# ---- traces ----------------------------------------------------------------------------------------------------------


def late_write(**options: object) -> None:
    c = group(2, **options)
    c.append(1)
    c.deliver(1, 2)
    down(c, 2)
    c.start(2)
    until(c, lambda: any(isinstance(r, Fence) for r in c.hosts[2].pending))
    if c.hosts[2].late:
        c.late_write(2)
    c.settle(0.5)


def acked_at_accept(**options: object) -> None:
    c = group(2, **options)
    m0 = c.append(1)
    c.confirm(1)
    c.deliver(1, 2)
    if c.conns[1, 2].acks:
        c.deliver_ack(1, 2)
    down(c, 2)
    c.start(2)
    until(c, follows(c, 2))
    down(c, 1)
    answer = c.promote(2, {1})
    c.settle(only={2})
    assert not confirmed(c, m0)
    assert answer is None or answer.ok


def promise_late(**options: object) -> None:
    c = group(3, **options)
    c.append(1)
    c.crash(1, sent_arrives=True)
    c.notice(2, 1)
    c.node(2).peers[3].epoch = 0  # as on a connection that has not brought a heartbeat yet: n3 has not noticed
    c.promote(2, {1})
    while c.conns[2, 3].queue[0][0] != Prepare(epoch_number(2, 2)):
        c.deliver(2, 3)
    c.deliver(2, 3)
    c.deliver(1, 3)
    c.check_memory(c.hosts[3])
    c.settle(0.5)


def heartbeat_of_a_newer_epoch(**options: object) -> None:
    """The primary is heard by nobody, and hears n2, which has said Hello before it followed another: only its heartbeats tell of that one."""
    c = group(3, **options)
    c.cut(1, 2, both=False)
    c.cut(1, 3)
    down(c, 2)
    c.start(2)
    c.settle(0.3)
    c.promote(3, {1}, untrue=True)
    until(c, lambda: c.node(2).following)
    m0 = c.append(1)
    c.settle(3.0)
    assert not confirmed(c, m0)


def restart_alone(**options: object) -> None:
    c = group(2, **options)
    down(c, 1)
    c.promote(2, {1})
    c.cut(1, 2)
    c.settle(only={2})
    m0 = c.append(2)
    c.settle(only={2})
    assert confirmed(c, m0)
    c.start(1)
    down(c, 2)
    c.settle(0.5, only={1})
    assert c.node(1).role is Role.CATCH_UP


def lost_host_restarts_alone(**options: object) -> None:
    c = group(2, restart_alone=True, **options)
    m0 = c.append(1)
    c.settle(0.2)
    assert confirmed(c, m0)
    down(c, 2)
    c.crash(1, lost_records=1)
    c.start(1)
    c.settle(0.5, only={1})
    assert c.node(1).role is Role.CATCH_UP
    c.start(2)
    c.settle(1.0)
    assert c.primary() is c.hosts[2]


def strict_without_a_lost_host(**options: object) -> None:
    c = group(2, strict=True, **options)
    m0 = c.append(1)
    c.settle(0.2)
    assert confirmed(c, m0)
    c.crash(2, lost_records=1)
    c.notice(1, 2)
    m1 = c.append(1)
    c.start(2)
    until(c, lambda: c.node(1).peers[2].called)
    c.settle(0.5, only={1})
    assert not confirmed(c, m1)
    c.settle(1.0)
    assert confirmed(c, m1)
    assert c.node(2).role is Role.READY
    assert c.node(1).log.members == c.node(1).in_sync == {1, 2}


def restart_with_its_set(**options: object) -> None:
    c = group(2, **options)
    c.append(1)
    c.confirm(1)
    c.cut(1, 2)
    drop_silent(c, 1, 2)
    c.settle(only={1})
    down(c, 1)
    c.promote(2, {1})
    c.start(1)
    c.settle(0.5, only={2})
    c.settle(0.5, only={1})
    if c.node(1).role is Role.ACTIVE:
        c.append(1)
        c.settle(only={1})
    assert c.node(1).role is Role.CATCH_UP


def tail_cut(**options: object) -> None:
    c = group(2, **options)
    c.cut(1, 2)
    down(c, 2)
    m0 = c.append(1)
    drop_silent(c, 1, 2)
    c.settle(only={1})
    assert confirmed(c, m0)
    down(c, 1)
    c.start(2)
    answer = c.promote(2, {1})
    assert answer
    assert "n2 has heard no primary since it started" in answer.text
    c.promote(2, {1}, force=True)
    c.settle(only={2})
    c.heal()
    c.start(1)
    c.settle(0.5)
    assert c.node(1).role is Role.DIVERGED
    assert c.lost == {m0}


def tail_cut_without_sets_in_it(**options: object) -> None:
    c = group(2, **options)
    down(c, 2)
    drop_silent(c, 1, 2)
    m0 = c.append(1)
    c.settle(only={1})
    assert confirmed(c, m0)
    c.start(2)
    until(c, lambda: c.node(2).log.end == c.node(1).log.end - 1)
    down(c, 1)
    c.settle(only={2})
    answer = c.promote(2, {1})
    assert answer
    assert "n2 was not in sync" in answer.text
    c.promote(2, {1}, force=True)
    c.settle(only={2})
    c.start(1)
    c.settle(0.5)
    assert c.node(1).role is Role.DIVERGED


def not_told_that_it_is_out(**options: object) -> None:
    c = group(2, **options)
    m0 = c.append(1)
    down(c, 2)
    drop_silent(c, 1, 2)
    c.settle(only={1})
    assert confirmed(c, m0)
    c.start(2)
    until(c, follows(c, 2))
    down(c, 1)
    answer = c.promote(2, {1})
    c.settle(only={2})
    assert answer
    assert "n2 was not in sync" in answer.text


def older_set_undoes_out(**options: object) -> None:
    c = group(2, **options)
    down(c, 1)
    c.start(1)
    until(c, lambda: c.node(1).leading)
    c.cut(1, 2)
    drop_silent(c, 1, 2)
    c.settle(only={1})
    m0 = c.append(1)
    c.settle(only={1})
    assert confirmed(c, m0)
    c.heal()
    marker = c.node(1).log.state().epochs[-1][1]
    until(c, lambda: c.node(2).log.end == marker)
    down(c, 1)
    c.settle(only={2})
    c.check_word(c.hosts[2])
    answer = c.promote(2, {1})
    assert answer
    assert "n2 was not in sync" in answer.text


def second_history(**options: object) -> None:
    c = group(2, **options)
    down(c, 1)
    c.promote(2, {1})
    until(c, lambda: c.node(2).leading, only={2})
    c.confirm(2)
    down(c, 2)
    c.start(1)
    c.promote(1, {2})
    c.settle(only={1})
    m0 = c.append(1)
    c.settle(only={1})
    assert confirmed(c, m0)
    down(c, 1)
    c.start(1)
    c.start(2)
    c.settle(1.0)
    assert c.primary() is None
    assert "an operator must choose" in c.node(1).reason + c.node(2).reason


def removal_at_append(**options: object) -> None:
    c = group(2, **options)
    m0 = c.append(1)
    c.settle(only={1})
    down(c, 2)
    drop_silent(c, 1, 2)
    assert not c.lost
    down(c, 1)
    c.start(2)
    c.promote(2, {1}, force=True)
    c.settle(only={2})
    c.start(1)
    c.settle(0.5)
    assert not confirmed(c, m0)
    assert c.node(1).role is Role.READY


def addition_when_safe(**options: object) -> None:
    c = group(2, **options)
    down(c, 2)
    drop_silent(c, 1, 2)
    c.settle(only={1})
    c.start(2)
    until(c, lambda: 2 in c.node(1).log.members)
    added = c.node(1).log.end
    m0 = c.append(1)
    c.confirm(1, 2)
    while c.node(2).log.end < added:
        c.deliver(1, 2)
    c.confirm(2, 5)
    down(c, 2)
    c.start(2)
    until(c, follows(c, 2))
    down(c, 1)
    c.check_word(c.hosts[2])
    c.promote(2, {1})
    c.settle(only={2})
    assert not confirmed(c, m0)
    assert c.primary() is c.hosts[2]


def longer_log_ignored(**options: object) -> None:
    c = group(2, **options)
    m0 = c.append(1)
    c.settle(0.2)
    assert confirmed(c, m0)
    c.crash(1, lost_records=1)
    c.start(1)
    c.settle(1.0)
    assert c.primary() is c.hosts[2]


def went_on_without_it(**options: object) -> Cluster:
    """n1 has taken n2 out, confirmed with n3, and gone down. n2 does not know of it; its connections with n3 have stood since before."""
    c = group(3, **options)
    c.cut(1, 2)
    c.settle(2.0)
    assert c.node(1).log.members == {1, 3}
    m0 = c.append(1)
    c.settle(0.2)
    assert confirmed(c, m0)
    c.crash(1)
    return c


def longer_log_promised(**options: object) -> None:
    c = went_on_without_it(**options)
    c.node(2).peers[3].epoch = 0  # as on a connection that has not brought a heartbeat yet: n3 has not noticed
    c.promote(2, {1})
    c.settle(only={2, 3})
    answer = c.hosts[2].answer
    assert answer
    assert "n3 answered and has a longer log" in answer.text


def applied_queue(**options: object) -> None:
    c = group(2, **options)
    c.append(1)
    c.deliver(1, 2)
    down(c, 1)
    c.start(1)
    c.cut(1, 2)
    c.confirm(2)
    down(c, 2)
    c.promote(1, {2}, force=True)
    c.settle(only={1})
    c.append(1)
    c.settle(only={1})
    c.apply(1, c.node(1).safe, record=False)
    down(c, 1)
    c.start(2)
    c.promote(2, {1}, force=True)
    c.settle(only={2})
    c.heal()
    c.start(1)
    c.settle(0.5)
    assert c.node(1).role is Role.DIVERGED


def safe_before_marker(**options: object) -> None:
    """Not among the models' traces: m0 is on the first node only, and becomes safe by a MARKER that no stream has."""
    c = group(2, **options)
    c.append(1)
    c.confirm(1)
    down(c, 1)
    down(c, 2)
    c.start(1)
    c.promote(1, {2}, force=True)
    c.confirm(1)
    c.tick(1)
    c.apply(1, c.node(1).safe, record=False)
    down(c, 1)
    c.start(2)
    c.promote(2, {1}, force=True)
    c.settle(only={2})
    c.start(1)
    c.settle(0.5)
    assert c.node(1).role is Role.READY


def in_the_stream(record: Callable[[Cluster], StoredBatch], **options: object) -> None:
    """Not among the models' traces: what a node finds in its own stream when it starts."""
    c = group(2, **options)
    c.append(1, 2)
    c.settle(0.2)
    c.append(1)
    c.settle(0.2)
    down(c, 2)
    c.hosts[2].stream.append(record(c))
    c.start(2)
    c.settle(0.5)


def lower_leader_in_the_stream(**options: object) -> None:
    def record(c: Cluster) -> StoredBatch:
        c.hosts[2].stream.append(Fence(epoch_number(9, 2), 0))
        end = c.hosts[1].batches[-1].header
        header = BatchHeader(end.epoch, end.last + 1, end.last + 1, end.epoch, end.leader)
        return StoredBatch(header, body(b"7", end.epoch, [7], checkpoint=False))

    in_the_stream(record, **options)


def other_predecessor_in_the_stream(**options: object) -> None:
    def record(c: Cluster) -> StoredBatch:
        end, epoch = c.hosts[1].batches[-1].header, epoch_number(9, 1)
        header = BatchHeader(epoch, end.last + 1, end.last + 1, epoch_number(8, 1), epoch)
        return StoredBatch(header, body(b"7", epoch, [7], checkpoint=False))

    in_the_stream(record, **options)


def repeat_in_the_stream(**options: object) -> None:
    in_the_stream(lambda c: next(b for b in c.hosts[1].batches if b.header.last == b.header.first + 1), **options)


TRACES: list[tuple[Callable[..., None], str, str]] = [
    (late_write, "older exchanges are not deleted at a start", "A: the memory of n2"),
    (acked_at_accept, "a push is acknowledged when it is accepted", "untrue: n2"),
    (promise_late, "a promise raises top only when FENCE is confirmed", "A: the memory of n3"),
    (heartbeat_of_a_newer_epoch, "a leader does not learn of a newer epoch from a heartbeat", "G5"),
    (restart_alone, "a leader restarts alone", "G1"),
    (lost_host_restarts_alone, "a lost host restarts alone", "G1"),
    (strict_without_a_lost_host, "mode strict continues without a lost host", "strict: n1 calls"),
    (restart_with_its_set, "a leader restarts when its own set answers", "G5"),
    (tail_cut, "a tail is always cut", "silent loss: n1"),
    (tail_cut_without_sets_in_it, "a tail is judged by the sets inside it", "silent loss: n1"),
    (not_told_that_it_is_out, "FENCE does not tell a node that it is out", "untrue: n2"),
    (older_set_undoes_out, "an older set entry undoes out", "untrue: n2"),
    (second_history, "a leader restarts although a second history answers", "G1"),
    (removal_at_append, "a removal counts at its append", "silent loss: n1"),
    (addition_when_safe, "an addition counts when it is safe under the old set", "n1 calls 2 safe, which is delayed-sent at n2"),
    (longer_log_ignored, "a shorter log is promoted", "G1"),
    (longer_log_promised, "an operator needs no force to promote over a longer log", "n2 is promoted without force"),
    (applied_queue, "a tail is judged by the writer of the next entry", "silent loss: n1"),
    (lower_leader_in_the_stream, "a lower leader is not ignored", "A: the memory of n2"),
    (other_predecessor_in_the_stream, "the predecessor's epoch is not compared", "A: the memory of n2"),
    (repeat_in_the_stream, "a repeat is appended again", "A: the memory of n2"),
    (safe_before_marker, "entries are safe before the MARKER is safe", "silent loss"),
]


@pytest.mark.parametrize("trace", [t for t, _, _ in TRACES], ids=lambda t: t.__name__)
def test_rules_on(trace: Callable[..., None]) -> None:
    trace()


@pytest.mark.proves("promotion", cases=("longer_log_promised", "longer_log_ignored"))
@pytest.mark.parametrize(("trace", "rule", "violation"), TRACES, ids=[t.__name__ for t, _, _ in TRACES])
def test_rule_off(trace: Callable[..., None], rule: str, violation: str) -> None:
    with rule_off(rule) as options, pytest.raises(Violation, match=violation):
        trace(**options)


def test_strict_removed_node_must_rejoin() -> None:
    """The documented limit of strict: the operator removed a node, and then promotes it before it has rejoined."""
    c = group(2, strict=True)
    m0 = c.append(1)
    c.cut(1, 2)
    c.settle(2.0, only={1})
    assert not confirmed(c, m0), "nothing is confirmed without a silent backup"
    answer = c.remove(1, 2)
    assert answer
    assert "do not promote it before it has rejoined" in answer.text
    c.settle(only={1})
    assert confirmed(c, m0)
    down(c, 1)
    c.settle(0.2, only={2})
    c.promote(2, {1})
    c.settle(only={2})
    assert c.lost == {m0}


def test_what_a_backup_had_of_a_primary_that_is_lost_is_known() -> None:
    """The others knew its log as it was when they were connected: a dry run saw nothing wrong."""
    c = went_on_without_it()
    c.settle(0.5)
    for dry_run in (True, False):
        answer = c.promote(2, {1}, dry_run=dry_run)
        assert answer
        assert answer.text == "n3 answers and has a longer log: promote n3 instead"
