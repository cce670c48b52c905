"""R17 in the core: logs that begin at a renewal, who may begin there, who has fallen off a log, and who has joined only in part."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from test_node import BOTH, E1_1, E2_1, E3_1, E3_2, LOG, MARKER, ONE, Driver, follower, kinds, leader, leaders_log, only, sent, state

from broker_plugin.amqp import encode, frames
from broker_plugin.log.definitions import Definitions
from lrq_ha.errors import IllegalEvent
from lrq_ha.replication.events import (
    Ack,
    Append,
    CannotSend,
    Disconnect,
    Following,
    HeadMoved,
    Hello,
    Lead,
    OwnConfirmed,
    PeerAcked,
    PeerConnected,
    PeerDisconnected,
    Promise,
    Push,
    Recovered,
    RefusePush,
    Restart,
    Subscribe,
    Tick,
    WriteBatch,
)
from lrq_ha.replication.log import Acceptance, BatchHeader, LogIndex, LogState
from lrq_ha.replication.retention import MARKS_MAX, MARKS_TOLD_MAX, RECORD_BYTES, Retention
from lrq_ha.replication.roles import Role

pytestmark = pytest.mark.proves("renewal")

EMPTY = LogState()
#: Renewals in the log of primary 1, epoch 2.1, whose MARKER is entry 6: begun by 7 and ended by 9.
BEGUN = BatchHeader(E2_1, 7, 7, E2_1, E2_1, (), 7)
MOVED = BatchHeader(E2_1, 8, 8, E2_1, E2_1)
ENDED = BatchHeader(E2_1, 9, 9, E2_1, E2_1, (), 7)
BEFORE = LogState(epochs=((E1_1, 1), (E2_1, 6)), sets=((1, BOTH), (6, BOTH)))


def index(*batches: BatchHeader) -> LogIndex:
    found = LogIndex(1)
    for batch in (*LOG, MARKER, *batches):
        assert found.accept(batch) is Acceptance.APPEND
    return found


# ---- the index -------------------------------------------------------------------------------------------------------


def test_a_renewal_counts_when_its_end_is_safe_and_its_beginning_in_the_stream() -> None:
    log = index(BEGUN, MOVED, ENDED)
    assert (log.renewed(1, 9), log.renewed(7, 9), log.renewed(8, 9), log.renewed(1, 8)) == (7, 7, 0, 0)
    assert log.state(head=7, safe=9).base == 7
    assert not log.unfinished
    assert not log.joining


def test_a_renewal_is_unfinished_until_it_is_ended_or_given_up() -> None:
    assert index().unfinished == 0
    assert index(BEGUN, MOVED).unfinished == 7
    given_up = index(BEGUN, MOVED, replace(ENDED, renewal=-7))
    assert (given_up.unfinished, given_up.renewed(1, 9)) == (0, 0)


def test_what_is_cut_off_counts_no_more() -> None:
    log = index(BEGUN, MOVED, ENDED)
    assert log.accept(BatchHeader(E3_2, 9, 9, E2_1, E3_2, ((9, ONE),))) is Acceptance.APPEND
    assert (log.unfinished, log.renewed(1, 9)) == (7, 0)


def test_only_an_empty_log_begins_at_a_renewal_and_is_joining_to_its_end() -> None:
    log = LogIndex(2)
    log.fence(E2_1, 6)
    log.begin(7, BEFORE)
    assert log.accept(BEGUN) is Acceptance.APPEND
    assert log.start_point(BEGUN).base == 7
    with pytest.raises(IllegalEvent, match="ends at 7 cannot begin at 7"):
        log.begin(7, BEFORE)
    assert log.accept(MOVED) is Acceptance.APPEND
    assert log.joining
    assert log.state().joining
    assert log.accept(ENDED) is Acceptance.APPEND
    assert not log.joining
    assert not log.in_set
    assert log.start_point(ENDED).base == 0
    assert log.epoch_at(3) == E1_1


def test_a_renewal_that_was_given_up_leaves_it_joining_and_a_later_one_does_not() -> None:
    log = LogIndex(2)
    log.begin(7, BEFORE)
    for batch in (BEGUN, MOVED, replace(ENDED, renewal=-7)):
        log.accept(batch)
    assert log.joining
    log.accept(BatchHeader(E2_1, 10, 10, E2_1, E2_1, (), 10))
    assert log.joining
    log.accept(BatchHeader(E2_1, 11, 11, E2_1, E2_1, (), 10))
    assert not log.joining


def test_a_restart_from_a_checkpoint_knows_what_was_before() -> None:
    old = index(BEGUN, MOVED, ENDED)
    log = LogIndex(1)
    log.restore(old.state())
    assert (log.renewed(1, 9), log.joining) == (7, False)
    log.restore(BEFORE, base=7)
    assert log.joining


# ---- leading ---------------------------------------------------------------------------------------------------------


def renewing() -> Driver:
    """Node 1, primary alone, log to 6, whose head is 4; node 2 is not connected."""
    d = leader()
    d.feed(PeerDisconnected(2))
    d.live(10)
    d.confirm()
    assert d.node.log.members == ONE
    d.feed(HeadMoved(4))
    d.feed(HeadMoved(2))
    assert d.node.head == 4
    return d


def renew(d: Driver, *, given_up: bool = False) -> int:
    """Appends a renewal; returns its CHECKPOINT."""
    begun = d.node.log.end + 1
    d.feed(Append(1, "checkpoint", begun))
    assert only(d.effects, WriteBatch).batch.begins_renewal
    d.feed(Append(2, "moved"))
    d.feed(Append(1, "renewed", -begun if given_up else begun))
    d.confirm()
    return begun


def follow(d: Driver, log: LogState) -> list[type]:
    """Node 2 connects with this log and follows; what the leader does then."""
    d.meet(2, log, wants_answer=True)
    assert sent(d.effects, Lead)
    return kinds(d.hear(2, Following(E2_1, log.end, False, log)))


def test_a_follower_that_lacks_more_than_the_log_has_is_sent_nothing() -> None:
    d = renewing()
    assert Subscribe not in follow(d, state(LOG[:1]))
    assert d.node.peers[2].fallen
    assert not d.node.peers[2].subscribed


def test_a_follower_that_lacks_no_more_is_sent_it() -> None:
    d = renewing()
    log = state((LOG[0], BatchHeader(E1_1, 2, 3, E1_1, E1_1)))
    assert Subscribe in follow(d, log)
    assert only(d.effects, Subscribe).guard.sent == 3
    assert not d.node.peers[2].fallen


def test_an_empty_follower_begins_at_the_renewal_when_there_is_one() -> None:
    d = renewing()
    assert Subscribe not in follow(d, EMPTY)
    d.feed(Tick())
    assert not sent(d.effects, Lead), "nothing to begin at"
    renew(d, given_up=True)
    assert not sent(d.feed(Tick()), Lead)
    begun = renew(d)
    lead = sent(d.feed(Tick()), Lead)
    assert [message.log.base for message in lead] == [begun]
    assert not sent(d.feed(Tick()), Lead), "it was called"
    d.hear(2, Following(E2_1, 0, False, EMPTY))
    assert only(d.effects, Subscribe).guard.sent == begun - 1
    d.feed(PeerAcked(2, d.node.log.end))
    assert only(d.effects, WriteBatch).batch.sets[0][1] == BOTH


def test_one_that_is_not_empty_does_not_begin_at_a_renewal() -> None:
    d = renewing()
    renew(d)
    assert Subscribe not in follow(d, state(LOG[:1]))


def test_a_subscription_that_cannot_be_served_ends() -> None:
    d = leader()
    assert kinds(d.feed(CannotSend(2))) == [Disconnect]
    assert not d.node.peers[2].subscribed
    assert d.feed(CannotSend(2)) == []
    assert follower().feed(CannotSend(1)) == []


# ---- following -------------------------------------------------------------------------------------------------------


def called(log: tuple[BatchHeader, ...] = (), *, head: int = 7, base: int = 7, **options: bool) -> Driver:
    """Node 2 with this log, called by primary 1, whose log begins at `head`."""
    d = Driver(2, log=log, **options)
    leading = replace(leaders_log(), end=9, head=head, base=base)
    d.meet(1, leading, leading=E2_1)
    d.hear(1, Lead(E2_1, False, leading))
    d.confirm()
    return d


@pytest.mark.parametrize(
    ("log", "base", "text"),
    [
        ((), 0, "the log of e1 begins at entry 7, its broker has dropped what was before: to let e2 join, run lrq-ha renew$"),
        (LOG[:1], 7, "and e2 has only what is up to 1: rebuild it with lrq-ha reinit e2 --discard$"),
        (LOG[:1], 0, "rebuild it with lrq-ha reinit e2 --discard, then run lrq-ha renew$"),
        ((*LOG, MARKER), 7, "^following e1"),
        ((), 7, "^following e1"),
    ],
)
def test_a_follower_says_what_is_to_be_done(log: tuple[BatchHeader, ...], base: int, text: str) -> None:
    d = called(log, base=base)
    assert re.search(text, d.node.reason), d.node.reason


@pytest.mark.parametrize(("log", "then"), [((), "to let e2 join, run"), (LOG[:1], "rebuild it with lrq-ha reinit e2 --discard, then run")])
def test_in_mode_strict_it_is_removed_before_the_renewal(log: tuple[BatchHeader, ...], then: str) -> None:
    """No renewal would end: it is in the set, and nothing is safe without it."""
    assert called(log, base=0, strict=True).node.reason.endswith(f"{then} lrq-ha remove e2, then lrq-ha renew")


def joined_in_part() -> Driver:
    d = called()
    d.feed(Push(1, BEGUN, 9, b"checkpoint", BEFORE))
    assert d.node.role is Role.JOINING
    assert (d.node.safe, d.node.applied, d.node.log.base) == (6, 6, 7)
    assert only(d.effects, WriteBatch).batch == BEGUN
    assert Ack in kinds(d.feed(OwnConfirmed(1)))
    d.feed(Push(1, MOVED, 9, b"moved"))
    d.confirm()
    return d


def test_it_joins_and_is_joining_until_it_has_the_end() -> None:
    d = joined_in_part()
    assert d.node.reason == "joining e1 from entry 7 on"
    d.feed(Push(1, ENDED, 9, b"renewed"))
    d.confirm()
    assert d.role() is Role.CATCH_UP
    d.feed(Push(1, BatchHeader(E2_1, 10, 10, E2_1, E2_1, ((10, BOTH),)), 9, b"members"))
    d.confirm()
    assert d.role() is Role.READY
    assert d.node.log.in_set


def test_only_a_log_without_entries_begins_at_what_is_pushed() -> None:
    d = called(LOG[:1], head=1)
    assert RefusePush in kinds(d.feed(Push(1, BEGUN, 9, b"checkpoint", BEFORE)))
    d = called()
    first = BatchHeader(E2_1, 1, 1, 0, E2_1, (), 1)
    assert WriteBatch in kinds(d.feed(Push(1, first, 0, b"checkpoint", EMPTY)))
    assert d.node.log.base == 0, "it begins at entry 1 like any other"


def test_who_has_joined_in_part_is_not_promoted_without_force() -> None:
    d = joined_in_part()
    d.lose(1)
    assert d.role() is Role.JOINING
    answer = d.ask(1)
    assert answer is not None
    assert not answer.ok
    assert re.search("has joined only in part.*--force", answer.text)
    assert d.role() is Role.JOINING
    assert d.ask(1, force=True) is None
    assert d.role() is Role.RECOVERING


def test_who_has_joined_in_part_takes_no_epoch_by_itself() -> None:
    d = joined_in_part()
    d.lose(1)
    d.meet(1, state(LOG))
    d.feed(Tick())
    assert d.node.role is Role.JOINING
    assert not d.node.leading


def test_who_meets_one_with_a_longer_log_that_has_joined_in_part_waits_for_an_operator() -> None:
    d = Driver(1)
    d.meet(2, replace(state((*LOG, MARKER)), joining=True))
    assert d.node.role is Role.CATCH_UP
    assert d.node.reason == "e2 has joined only in part, and has a longer log: an operator must choose"


def test_a_primary_that_was_joining_by_force_goes_on_as_one() -> None:
    d = joined_in_part()
    d.lose(1)
    d.ask(1, force=True)
    d.confirm()
    d.feed(Recovered(d.node.leading))
    assert d.node.role is Role.ACTIVE
    assert d.node.log.unfinished == 7
    d.feed(Append(1, "renewed", 7))
    assert not d.node.log.joining


def test_one_that_joins_still_gives_its_promise_and_learns_of_newer_epochs() -> None:
    d = joined_in_part()
    d.feed(PeerConnected(1))
    d.hear(1, Hello(Role.CATCH_UP, state(), 0, 0, True))
    assert Restart not in kinds(d.effects)
    d.hear(1, Promise(E3_1, state(top=E3_1)))
    assert d.node.role is Role.JOINING


# ---- how far behind a receiver is ------------------------------------------------------------------------------------


def gauged(*batches: tuple[int, int], log_bytes_max: int = 1_000, segment_bytes: int = 0) -> Retention:
    """Of batches (last entry, bytes in the stream)."""
    gauge = Retention(log_bytes_max, segment_bytes)
    for last, size in batches:
        gauge.appended(last, size - RECORD_BYTES)
    return gauge


def test_retention() -> None:
    assert (gauged().behind(0), gauged().in_danger(0), gauged().left(0)) == (0, False, 1_000)
    gauge = gauged(*((last, 400) for last in range(1, 7)), log_bytes_max=4_000, segment_bytes=1_000)
    assert [gauge.behind(acknowledged) for acknowledged in (0, 1, 5, 6, 9)] == [2_400, 2_000, 400, 0, 0]
    assert [gauge.left(acknowledged) for acknowledged in (0, 1, 6)] == [600, 1_000, 3_000]
    assert gauge.in_danger(0)
    assert not gauge.in_danger(1)
    gauge.appended(20, 3_000)
    assert gauge.left(1) == 0


def test_retention_where_a_tail_was_cut_and_written_again() -> None:
    gauge = gauged(*((last, 400) for last in range(1, 7)), (4, 500), (5, 500))
    assert [gauge.behind(acknowledged) for acknowledged in (3, 4, 5)] == [2_200, 500, 0]


def test_retention_keeps_a_bounded_number_of_marks() -> None:
    gauge = Retention(MARKS_MAX)
    for last in range(1, 3 * MARKS_MAX):
        gauge.appended(last, 1)
    each = 1 + RECORD_BYTES
    assert gauge.behind(3 * MARKS_MAX - 10) == 9 * each
    assert gauge.behind(0) == (3 * MARKS_MAX - 1) * each
    assert len(gauge._sequences) <= 2 * MARKS_MAX + 1


def test_retention_over_a_restart() -> None:
    """What the marks of a CHECKPOINT say is never less than what is true, and little more."""
    gauge = gauged(*((last, 1_000) for last in range(1, 1_001)), log_bytes_max=500_000)
    assert Retention(1).export() == [(0, 0)]
    marks = gauge.export()
    assert len(marks) <= MARKS_TOLD_MAX + 1
    assert marks[-1] == (1_000, 1_000_000)
    again = Retention(500_000)
    again.restore(marks)
    for acknowledged in range(0, 1_001, 7):
        assert gauge.behind(acknowledged) <= again.behind(acknowledged) <= gauge.behind(acknowledged) + 20_000
    for each in (gauge, again):
        each.appended(1_001, 1_000 - RECORD_BYTES)
    assert again.behind(1_000) == gauge.behind(1_000) == 1_000
    again.restore([])
    assert again.behind(1_000) == 1_000, "a CHECKPOINT without marks changes nothing"


def test_who_was_last_in_the_set() -> None:
    log = LogIndex(1)
    assert log.in_set_upto(2) == 0
    for sequence, members in ((1, {1, 2}), (10, {1}), (20, {1, 3}), (30, {1})):
        log.accept(BatchHeader(E1_1, log.end + 1, sequence, E1_1 if log.end else 0, E1_1, ((sequence, frozenset(members)),)))
    assert [log.in_set_upto(node) for node in (1, 2, 3, 4)] == [30, 9, 29, 0]


# ---- definitions -----------------------------------------------------------------------------------------------------


def method(kind: int, *names: str, flags: bytes = b"\0", table: bytes = b"\0\0\0\0") -> bytes:
    return kind.to_bytes(4, "big") + b"\0\0" + b"".join(encode.short_string(name) for name in names) + flags + table


QUEUE, EXCHANGE = method(frames.QUEUE_DECLARE, "q"), method(frames.EXCHANGE_DECLARE, "x", flags=b"\x06direct\x02")
BIND, TO_EXCHANGE = method(frames.QUEUE_BIND, "q", "x", "key"), method(frames.EXCHANGE_BIND, "y", "x", "key")
Y = method(frames.EXCHANGE_DECLARE, "y", flags=b"\x06fanout\x02")


def test_definitions_come_in_an_order_in_which_they_can_be_made() -> None:
    found = Definitions([("/", QUEUE), ("/", EXCHANGE), ("/", BIND)])
    found.noted(5, "/", Y)
    found.noted(6, "/", TO_EXCHANGE)
    assert list(found.rows()) == [("/", EXCHANGE), ("/", Y), ("/", QUEUE), ("/", BIND), ("/", TO_EXCHANGE)]
    assert found.queues() == {("/", "q"): QUEUE}
    found.safe(5, 5)
    found.cut(6)
    assert list(found.rows()) == [("/", EXCHANGE), ("/", Y), ("/", QUEUE), ("/", BIND)]
    assert list(Definitions(found.rows()).rows()) == list(found.rows())


@pytest.mark.parametrize(
    ("deleted", "left"),
    [
        (method(frames.QUEUE_DELETE, "q"), [EXCHANGE, Y, TO_EXCHANGE]),
        (method(frames.QUEUE_DELETE, "x"), [EXCHANGE, Y, QUEUE, BIND, TO_EXCHANGE]),
        (method(frames.EXCHANGE_DELETE, "x"), [Y, QUEUE]),
        (method(frames.EXCHANGE_DELETE, "y"), [EXCHANGE, QUEUE, BIND]),
        (method(frames.QUEUE_UNBIND, "q", "x", "key", flags=b""), [EXCHANGE, Y, QUEUE, TO_EXCHANGE]),
        (method(frames.QUEUE_UNBIND, "q", "x", "other", flags=b""), [EXCHANGE, Y, QUEUE, BIND, TO_EXCHANGE]),
        (method(frames.EXCHANGE_UNBIND, "y", "x", "key"), [EXCHANGE, Y, QUEUE, BIND]),
    ],
)
def test_what_a_deletion_takes_with_it(deleted: bytes, left: list[bytes]) -> None:
    found = Definitions(("/", row) for row in (EXCHANGE, Y, QUEUE, BIND, TO_EXCHANGE))
    other = Definitions(("other", row) for row in (EXCHANGE, Y, QUEUE, BIND, TO_EXCHANGE))
    other.noted(1, "/", deleted)
    assert len(list(other.rows())) == 5
    found.noted(1, "/", deleted)
    assert [row for _, row in found.rows()] == left
    found.cut(1)
    assert len(list(found.rows())) == 5


PASSING_X, PASSING_Q = method(frames.EXCHANGE_DECLARE, "x", "direct"), method(frames.QUEUE_DECLARE, "q")
LEAVING_X, LEAVING_Y = (method(frames.EXCHANGE_DECLARE, name, "direct", flags=b"\x04") for name in "xy")
LASTING_Q = method(frames.QUEUE_DECLARE, "q", flags=b"\x02")
LASTING_X, LASTING_Y = (method(frames.EXCHANGE_DECLARE, name, "fanout", flags=b"\x02") for name in "xy")


@pytest.mark.parametrize(
    ("rows", "exchanges", "queues"),
    [
        ([LASTING_X, LASTING_Y, LASTING_Q, BIND, TO_EXCHANGE], [], []),
        ([PASSING_X, LASTING_Y, LASTING_Q, BIND, TO_EXCHANGE], [PASSING_X, BIND, TO_EXCHANGE], []),
        ([LASTING_X, LASTING_Y, PASSING_Q, BIND, TO_EXCHANGE], [], [PASSING_Q, BIND]),
        ([PASSING_X, LASTING_Y, PASSING_Q, BIND, TO_EXCHANGE], [PASSING_X, TO_EXCHANGE], [PASSING_Q, BIND]),
        ([LEAVING_X, LASTING_Y, LASTING_Q, BIND, TO_EXCHANGE], [LEAVING_X, BIND, TO_EXCHANGE], []),
        ([LEAVING_X], [], []),
        ([LASTING_X, LEAVING_Y, TO_EXCHANGE], [], []),
    ],
    ids=["nothing", "an exchange", "a queue", "both", "auto-delete", "auto-delete, gone", "auto-delete, bound to, gone"],
)
def test_what_a_broker_forgets_when_it_goes_down(rows: list[bytes], exchanges: list[bytes], queues: list[bytes]) -> None:
    found = Definitions(("/", row) for row in rows)
    found.noted(1, "/", method(frames.EXCHANGE_DECLARE, "not applied", "fanout"))
    assert found.forgotten() == ([("/", row) for row in exchanges], [("/", row) for row in queues])


def test_when_the_log_was_renewed_nobody_asks_for_that_any_more() -> None:
    """One that had fallen off it before said for ever that it had to be, and so did the plan of making another anew."""
    d = renewing()
    follow(d, state(LOG[:1]))
    d.feed(Tick())
    assert not sent(d.effects, Lead)
    assert not sent(d.effects, Hello)
    renew(d)
    said: list[object] = []
    for _ in range(3):
        d.feed(Tick())
        said += [*sent(d.effects, Hello), *sent(d.effects, Lead)]
    assert [type(each) for each in said] == [Hello, Lead], "once"
    assert all(each.log.base == d.node.state().base > 0 for each in said)  # type: ignore[attr-defined]
