"""The delivery filter: each rule by example, all of them against a list of operations, and what ten million messages cost."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from resource import getpagesize
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from lrq_ha.errors import IllegalEvent
from lrq_ha.replication import delivery_filter
from lrq_ha.replication.applied import Generations, QueueRecord
from lrq_ha.replication.dead_letters import Deaths, origin_of, visit_of
from lrq_ha.replication.deduplication import Dedup
from lrq_ha.replication.delivery_filter import DeliveryFilter
from lrq_ha.replication.positions import RangeSet
from lrq_ha.replication.queue_filter import Kind, Verdict
from lrq_ha.replication.queues import QueueKey

Q, D, R = ("/", "q"), ("/", "d"), ("/", "r")
FROM_Q: Deaths = (("q", 1),)
LOOPED: Deaths = (("q", 2), ("d", 1))
GIVE, ACK, REJECT, HOLD = Verdict.GIVE, Verdict.ACK, Verdict.REJECT, Verdict.HOLD


class Filter(DeliveryFilter):
    """Shorthand: one generation, numbered operations."""

    def __init__(self) -> None:
        super().__init__(Generations([(0, 1)]))
        self.at = 1000

    def op(self, kind: Kind, queue: QueueKey | None, *ranges: int, visit: int = 0, origin: str = "", sweep: bool = False) -> int:
        self.at += 1
        self.note(self.at, kind, queue, ranges if len(ranges) > 1 else ranges * 2, visit, origin, sweep=sweep)
        return self.at

    def done(self, kind: Kind, queue: QueueKey | None, *ranges: int, visit: int = 0, origin: str = "", sweep: bool = False) -> None:
        self.safe(self.op(kind, queue, *ranges, visit=visit, origin=origin, sweep=sweep))

    def ask(self, queue: QueueKey, seq: int, deaths: Deaths = ()) -> Verdict:
        return self.verdict(queue, seq, 1, deaths)


@pytest.fixture
def flt() -> Filter:
    return Filter()


def test_visit_and_origin() -> None:
    assert visit_of("q", LOOPED) == 2
    assert visit_of("r", LOOPED) == visit_of("q", ()) == 0
    assert origin_of(LOOPED) == "q"
    assert origin_of(()) == ""


def test_a_copy_that_nothing_is_known_of_is_given(flt: Filter) -> None:
    assert flt.ask(Q, 5) is GIVE
    assert flt.ask(D, 5, FROM_Q) is GIVE


def test_what_is_rejected_moves_when_the_node_has_come_to_it(flt: Filter) -> None:
    """However many follow each other without a pause; what was dequeued need not wait."""
    reached = 1000
    flt.reached = lambda: reached
    target = flt.queue(Q)
    for sequence in range(1, 11):
        flt.done(Kind.REJECT, Q, sequence, sweep=True)
        flt.done(Kind.DEQUEUE, Q, 100 + sequence, sweep=True)
    assert (target.due.count(1000), target.due.count_moves(1000)) == (10, 0)
    assert target.is_early(1)
    assert not target.is_early(101)
    seen = []
    for sequence in range(11, 31):  # each operation is entry 1000 + 2 n or so; the node is five of them behind
        flt.done(Kind.REJECT, Q, sequence, sweep=True)
        flt.done(Kind.DEQUEUE, Q, 100 + sequence, sweep=True)
        reached = flt.at - 10
        early = [one for one in range(1, sequence + 1) if target.is_early(one)]
        assert early[-5:] == list(range(sequence - 4, sequence + 1))
        seen.append(len(early))
    assert max(seen) <= 20, "some have their turn, though others follow"
    reached = flt.at
    assert (target.due.count(1000), target.due.count_moves(1000)) == (60, 30)


@pytest.mark.proves("queue: dead letters that meet")
def test_two_copies_of_one_dead_letter_that_meet_are_taken_for_one(flt: Filter) -> None:
    """A limitation (docs/limitations.md): by the queues that they died in since, they are not told apart."""
    one, other = (("q", 1), ("r", 1)), (("q", 1), ("s", 1))
    assert flt.ask(D, 5, one) is flt.ask(D, 5, other) is GIVE
    flt.done(Kind.DEQUEUE, D, 5, origin="q")
    assert flt.ask(D, 5, other) is Verdict.ACK


def test_what_waits_for_room_is_not_waited_for(flt: Filter) -> None:
    """No pass over the queue can meet it."""
    for sequence in range(1, 11):
        flt.done(Kind.REJECT, Q, sequence, sweep=True)
    filter_: DeliveryFilter = flt
    assert flt.queue(Q).due.count_moves(1000, [(4, 6), (8, 8)]) == 6
    assert [due for _, due in filter_.moving("/", 1000, [(1, 9)])] == [1]
    assert filter_.moving("/", 1000, [(1, 10)]) == []
    assert [due for _, due in filter_.moving(None, 1000)] == [10], "it has room now"
    assert 10 in flt.queue(Q).to_move()
    flt.queue(Q).gone(10, flt.generations.newest)
    assert 10 not in flt.queue(Q).to_move()


@pytest.mark.parametrize("restarted", [False, True])
def test_what_was_rejected_before_a_declaration_is_not_taken_for_what_came_after_it(flt: Filter, restarted: bool) -> None:
    """The node has come to the declaration (or purge), which waits for what was rejected before it, and for that only."""
    filter_: DeliveryFilter = flt
    noted = []

    def reject(sequence: int, queue: QueueKey = Q) -> None:
        noted.append((Kind.REJECT, queue, sequence, flt.at + 1))
        flt.done(Kind.REJECT, queue, sequence, sweep=True)

    for sequence in range(1, 11):
        reject(sequence)
    reject(5, D)
    flt.at += 1
    change = flt.at
    flt.note_change(change)
    for sequence in range(11, 21):
        reject(sequence)
    flt.reached = lambda: change - 1
    if restarted:
        records, refused = flt.export()
        filter_ = DeliveryFilter.restored(flt.generations, records, refused, flt.at)
        filter_.reached = lambda: noted[4][-1]
        for kind, queue, sequence, at in noted:
            if at > change:
                filter_.note_change(change)
            filter_.note(at, kind, queue, (sequence, sequence), 0, "", sweep=True)
        filter_.lose(flt.at)
        filter_.safe(noted[4][-1])
        assert filter_.moving("/", change) == [], "of most it is not known again that they are safe"
        filter_.safe(flt.at)
        filter_.reached = flt.reached
    assert {target.key: due for target, due in filter_.moving("/", change)} == {Q: 10, D: 1}
    assert filter_.moving("other", change) == []
    target = filter_.queue(Q)
    assert [one for one in range(1, 21) if target.is_early(one)] == list(range(11, 21))
    generation = flt.generations.newest
    for sequence in range(1, 11):
        assert target.sweeping_verdict(sequence, generation) is Verdict.REJECT
        target.gone(sequence, generation)
    assert target.sweeping_verdict(11, generation) is Verdict.HOLD
    filter_.queue(D).gone(5, generation)
    assert filter_.moving("/", change) == []
    filter_.reached = lambda: flt.at
    assert [due for _, due in filter_.moving("/", flt.at + 1)] == [10]
    assert target.sweeping_verdict(11, generation) is Verdict.REJECT


def moving(flt: DeliveryFilter, entry: int) -> dict[str, int]:
    """What the node, come to this declaration or purge, waits for before it."""
    flt.reached = lambda: entry - 1
    return {target.name: due for target, due in flt.moving("/", entry)}


@pytest.mark.parametrize("looked", ["before it came", "never"])
def test_what_was_rejected_twice_is_waited_for_on_all_of_its_way(flt: Filter, looked: str) -> None:
    """From q to d, and from there to r. The sweeper had looked for it in d while it was in q, and nobody waited for it in d any more."""
    flt.done(Kind.REJECT, Q, 1, sweep=True)
    flt.done(Kind.REJECT, D, 1, origin="q", sweep=True)
    change = flt.at + 1
    assert moving(flt, change) == {"q": 1, "d": 1}
    if looked == "before it came":
        passes(flt, D)
        assert moving(flt, change) == {"q": 1}
    passes(flt, Q, ())
    assert moving(flt, change) == {"d": 1}
    passes(flt, D, FROM_Q)
    assert moving(flt, change) == {}


def test_what_a_pass_does_not_find_is_waited_for_where_it_may_have_come(flt: Filter) -> None:
    flt.done(Kind.REJECT, Q, 1, sweep=True)
    flt.done(Kind.REJECT, D, 1, origin="q", sweep=True)
    change = flt.at + 1
    passes(flt, D)
    assert moving(flt, change) == {"q": 1}
    passes(flt, Q)
    assert moving(flt, change) == {"d": 1}
    passes(flt, D)
    assert moving(flt, change) == {}


@pytest.mark.parametrize("restarted", ["no", "before the first reject was applied", "behind it"])
def test_a_message_that_comes_back_and_is_rejected_again_behind_a_purge(flt: Filter, restarted: str) -> None:
    """The purge waits for its first copy, though the same message is rejected once more behind it; that reject waits for the purge."""
    back, again = (("q", 1), ("r", 1)), (("q", 2), ("r", 1))
    flt.done(Kind.REJECT, Q, 1, sweep=True)
    first = flt.at
    flt.at += 1
    purge = flt.at
    flt.note_change(purge)
    flt.done(Kind.MOVED, R, 1, origin="q", sweep=True)
    flt.done(Kind.REJECT, Q, 1, visit=1, origin="q", sweep=True)
    filter_: DeliveryFilter = flt
    if restarted != "no":
        filter_ = DeliveryFilter.restored(flt.generations, *flt.export(), known=flt.at)
        if restarted != "behind it":
            filter_.note(first, Kind.REJECT, Q, (1, 1), 0, "", sweep=True)
        filter_.note_change(purge)
        filter_.note(flt.at - 1, Kind.MOVED, R, (1, 1), 0, "q", sweep=True)
        filter_.note(flt.at, Kind.REJECT, Q, (1, 1), 1, "q", sweep=True)
        filter_.lose(flt.at)
        filter_.safe(flt.at)
    assert moving(filter_, purge) == {"q": 1}
    q, r, generation = filter_.queue(Q), filter_.queue(R), flt.generations.newest
    assert q.sweeping_verdict(1, generation) is REJECT
    assert q.sweeping_verdict(1, generation, back) is HOLD
    assert q.due.count(9) == 1
    q.gone(1, generation)
    assert moving(filter_, purge) == {}
    assert q.due.count(9) == r.due.count(9) == 0
    assert r.sweeping_verdict(1, generation, FROM_Q) is HOLD
    assert moving(filter_, flt.at + 1) == {"q": 1, "r": 1}
    assert r.sweeping_verdict(1, generation, FROM_Q) is REJECT
    r.gone(1, generation, FROM_Q)
    assert q.sweeping_verdict(1, generation, back) is REJECT
    q.gone(1, generation, back)
    assert moving(filter_, flt.at + 1) == {}
    assert filter_.verdict(Q, 1, generation, again) is GIVE


def test_a_purge_does_not_wait_for_a_copy_that_has_come_back_already(flt: Filter) -> None:
    """A sidecar was restarted after the broker had moved it. The purge waited for it to leave, and that for a reject that stands behind the purge."""
    back = (("q", 1), ("r", 1))
    flt.done(Kind.REJECT, Q, 1, sweep=True)
    flt.at += 1
    purge = flt.at
    flt.note_change(purge)
    flt.done(Kind.MOVED, R, 1, origin="q", sweep=True)
    flt.done(Kind.REJECT, Q, 1, visit=1, origin="q", sweep=True)
    q = flt.queue(Q)
    assert moving(flt, purge) == {"q": 1}
    q.met(1, 0, back)
    assert moving(flt, purge) == {"q": 1}, "a copy of an incarnation whose copies do not count"
    assert q.sweeping_verdict(1, 1, back) is HOLD
    q.met(1, 1, back)
    assert moving(flt, purge) == {}
    flt.reached = lambda: flt.at
    assert q.sweeping_verdict(1, 1, back) is REJECT
    q.met(1, 1, (("q", 1), ("r", 1)))
    assert moving(flt, flt.at + 1) == {"q": 1, "r": 1}, "it has still to leave"
    q.gone(1, 1, back)
    assert moving(flt, flt.at + 1) == {}


def test_two_dead_letters_of_one_message_are_rejected_before_and_behind_a_purge(flt: Filter) -> None:
    flt.done(Kind.REJECT, D, 1, origin="q", sweep=True)
    flt.at += 1
    purge = flt.at
    flt.note_change(purge)
    flt.done(Kind.REJECT, D, 1, origin="r", sweep=True)
    assert moving(flt, purge) == {"d": 1}
    d, from_r = flt.queue(D), (("r", 1),)
    assert [d.sweeping_verdict(1, 1, deaths) for deaths in (FROM_Q, from_r)] == [REJECT, HOLD]
    d.gone(1, 1, FROM_Q)
    assert moving(flt, purge) == {}
    assert moving(flt, flt.at + 1) == {"d": 1}
    assert d.sweeping_verdict(1, 1, from_r) is REJECT


def test_what_lost_entries_have_rejected_waits_for_the_end_of_the_log(flt: Filter) -> None:
    """The node's host went down, and its record knows of more than its log. What its log knows, too, does not wait for that."""
    for sequence in (1, 2):
        flt.done(Kind.REJECT, Q, sequence, sweep=True)
    records, refused = flt.export()
    again = DeliveryFilter.restored(flt.generations, records, refused, flt.at)
    end = flt.at - 1
    again.reached = lambda: end - 1
    again.note(end, Kind.REJECT, Q, (1, 1), 0, "", sweep=True)
    again.lose(end)
    again.safe(end)
    assert [again.queue(Q).is_early(sequence) for sequence in (1, 2)] == [True, True]
    again.reached = lambda: end
    assert again.queue(Q).due.count_moves(1000) == 2


def test_what_a_lost_entry_has_rejected_and_is_read_again_has_its_turn_then(flt: Filter) -> None:
    """A deletion before it waited for it, and that for the deletion."""
    for sequence in (1, 2):
        flt.done(Kind.REJECT, Q, sequence, sweep=True)
    again = DeliveryFilter.restored(flt.generations, *flt.export(), known=flt.at)
    end = flt.at - 1
    again.reached = lambda: end - 1
    again.note(end, Kind.REJECT, Q, (1, 1), 0, "", sweep=True)
    again.lose(end)
    again.note_change(deletion := end + 1)
    again.note(end + 2, Kind.REJECT, Q, (2, 2), 0, "", sweep=True)
    again.safe(end + 2)
    assert moving(again, deletion) == {"q": 1}
    assert [again.queue(Q).is_early(sequence) for sequence in (1, 2)] == [False, True]
    assert moving(again, end + 3) == {"q": 2}


@pytest.mark.parametrize("deaths", [(), FROM_Q])
def test_a_stale_copy_is_acked_away(flt: Filter, deaths: Deaths) -> None:
    flt.generations.opened(10, 2)
    assert flt.verdict(D, 10, 2, deaths) is ACK
    assert flt.verdict(D, 10, 1, deaths) is GIVE
    assert flt.verdict(D, 11, 1, deaths) is ACK
    assert flt.verdict(D, 11, 2, deaths) is GIVE


def test_dequeue_holds_until_it_is_safe(flt: Filter) -> None:
    at = flt.op(Kind.DEQUEUE, Q, 3, 5, 9, 9)
    assert [flt.ask(Q, seq) for seq in (2, 3, 5, 6, 9)] == [GIVE, HOLD, HOLD, GIVE, HOLD]
    flt.safe(at - 1)
    assert flt.ask(Q, 3) is HOLD
    flt.safe(at)
    flt.safe(at - 1)  # an older word changes nothing
    assert [flt.ask(Q, seq) for seq in (2, 3, 5, 6, 9)] == [GIVE, ACK, ACK, GIVE, ACK]
    assert flt.ask(R, 3) is GIVE


def test_reject_and_moved_let_this_broker_move_it(flt: Filter) -> None:
    flt.op(Kind.REJECT, Q, 3)
    assert flt.ask(Q, 3) is HOLD
    flt.safe(flt.at)
    flt.done(Kind.MOVED, Q, 4)
    assert flt.ask(Q, 3) is flt.ask(Q, 4) is REJECT
    assert flt.ask(D, 3, FROM_Q) is GIVE


def test_a_dequeue_voids_descendants(flt: Filter) -> None:
    flt.op(Kind.DEQUEUE, Q, 3)
    assert flt.ask(D, 3, FROM_Q) is HOLD
    flt.safe(flt.at)
    assert flt.ask(D, 3, FROM_Q) is ACK
    assert flt.ask(Q, 3, LOOPED) is ACK
    assert flt.ask(D, 3, (("r", 1),)) is GIVE  # published to r as well: another line


def test_dead_letters_that_meet_are_told_apart_by_their_origin(flt: Filter) -> None:
    flt.done(Kind.DEQUEUE, D, 3, origin="q")
    assert flt.ask(D, 3, FROM_Q) is ACK
    assert flt.ask(D, 3, (("r", 1),)) is GIVE
    assert flt.ask(D, 3) is GIVE


def test_a_dead_letter_exchange_that_fans_out_makes_two_messages(flt: Filter) -> None:
    flt.done(Kind.DEQUEUE, D, 3, origin="q")
    assert flt.ask(("/", "d2"), 3, FROM_Q) is GIVE
    assert flt.ask(("other", "d"), 3, FROM_Q) is GIVE


def test_visits(flt: Filter) -> None:
    flt.done(Kind.REJECT, Q, 3, visit=1, origin="q")
    assert flt.ask(Q, 3) is REJECT  # what is said of a visit holds for those before it
    assert flt.ask(Q, 3, (("q", 1), ("d", 1))) is REJECT
    assert flt.ask(Q, 3, (("q", 2), ("d", 2))) is GIVE
    flt.done(Kind.DEQUEUE, Q, 3, visit=2, origin="q")
    assert flt.ask(Q, 3, (("q", 1), ("d", 1))) is REJECT  # not there yet
    assert flt.ask(Q, 3, (("q", 2), ("d", 2))) is ACK
    assert flt.ask(D, 3, (("q", 3), ("d", 2))) is ACK


def test_the_first_stay_may_be_named_by_origin_too(flt: Filter) -> None:
    flt.done(Kind.MOVED, Q, 3, visit=0, origin="q")
    assert flt.ask(Q, 3) is REJECT


def test_refused_is_dequeued_everywhere(flt: Filter) -> None:
    flt.op(Kind.REFUSED, None, 3)
    assert flt.ask(Q, 3) is flt.ask(D, 3, FROM_Q) is HOLD
    flt.safe(flt.at)
    assert flt.ask(Q, 3) is flt.ask(D, 3, FROM_Q) is ACK
    assert flt.may_skip([], 3)


def test_purge_takes_what_never_died(flt: Filter) -> None:
    flt.done(Kind.DEQUEUE, D, 1, 9, sweep=True)
    flt.op(Kind.PURGE, D, 0, 6)
    assert flt.ask(D, 6) is ACK  # dequeued before
    flt.op(Kind.PURGE, R, 0, 6)
    assert flt.ask(R, 6) is HOLD
    flt.safe(flt.at)
    assert [flt.ask(R, 6), flt.ask(R, 7), flt.ask(R, 6, FROM_Q)] == [ACK, GIVE, GIVE]
    assert flt.queue(D).due.count(9) == 3  # the broker's queue is purged itself
    flt.done(Kind.PURGE, R, 0, 3)
    assert flt.ask(R, 6) is ACK


def test_a_purge_spares_what_clients_held(flt: Filter) -> None:
    flt.note(1000, Kind.PURGE, R, (0, 2, 4, 6), 0, "", sweep=False)
    assert [flt.verdict(R, seq, 1) for seq in (2, 3, 6)] == [HOLD, GIVE, HOLD]
    flt.safe(1000)
    target = flt.queue(R)
    assert [flt.verdict(R, seq, 1) for seq in range(1, 8)] == [ACK, ACK, GIVE, ACK, ACK, ACK, GIVE]
    assert [target.is_done(seq) for seq in (2, 3, 4, 7)] == [True, False, True, False]
    again = DeliveryFilter.restored(flt.generations, *flt.export())
    assert again.export() == flt.export()
    assert again.queue(R).spares
    for one in (flt, again):
        one.note(1001, Kind.PURGE, R, (0, 2, 4, 6), 0, "", sweep=False)  # read again
        one.note(1002, Kind.PURGE, R, (0, 7, 9, 9), 0, "", sweep=False)
        one.note(1003, Kind.PURGE, R, (0, 1, 3, 4), 0, "", sweep=False)  # what an earlier one took is gone, whatever a later one spares
        one.safe(1003)
        assert [one.verdict(R, seq, 1) for seq in range(1, 11)] == [*[ACK] * 7, GIVE, ACK, GIVE]
        one.lose(7)
        assert [one.verdict(R, seq, 1) for seq in (3, 7, 8, 9)] == [ACK, ACK, GIVE, GIVE]
        assert not one.queue(R).spares


def test_what_was_rejected_goes_its_way_after_a_purge(flt: Filter) -> None:
    """The client's reject came before it, but the sweeper of a backup may come after it."""
    flt.done(Kind.REJECT, R, 3, sweep=True)
    flt.done(Kind.DEQUEUE, R, 4, sweep=True)
    flt.done(Kind.REJECT, R, 5, visit=1, origin="q", sweep=True)
    flt.done(Kind.PURGE, R, 0, 6)
    assert [flt.ask(R, seq) for seq in (2, 3, 4)] == [ACK, REJECT, ACK]
    assert not flt.queue(R).is_done(3)
    assert list(flt.queue(R).due.expected(9)) == [3, 5]


def test_cut(flt: Filter) -> None:
    first = flt.op(Kind.DEQUEUE, Q, 1, 5)
    second = flt.op(Kind.DEQUEUE, Q, 5, 9)
    third = flt.op(Kind.DEQUEUE, R, 5)
    flt.cut(third)
    assert flt.ask(R, 5) is GIVE
    flt.cut(second)
    assert [flt.ask(Q, seq) for seq in (5, 6)] == [HOLD, GIVE]
    flt.cut(second)
    flt.safe(first)
    with pytest.raises(IllegalEvent):
        flt.cut(first)
    assert flt.ask(Q, 5) is ACK


def test_two_unsafe_operations_on_one_sequence(flt: Filter) -> None:
    first = flt.op(Kind.REJECT, Q, 5)
    second = flt.op(Kind.MOVED, Q, 5, visit=1, origin="q")
    looped: Deaths = (("q", 1), ("d", 1))
    flt.safe(first)
    assert flt.ask(Q, 5, looped) is HOLD
    flt.safe(second)
    assert flt.ask(Q, 5, looped) is REJECT


def test_operations_come_in_log_order(flt: Filter) -> None:
    flt.note(50, Kind.DEQUEUE, Q, (1, 1), 0, "", sweep=False)
    flt.note(50, Kind.DEQUEUE, Q, (2, 2), 0, "", sweep=False)  # a transaction
    with pytest.raises(IllegalEvent):
        flt.note(49, Kind.DEQUEUE, Q, (3, 3), 0, "", sweep=False)
    flt.safe(60)
    flt.note(55, Kind.DEQUEUE, Q, (3, 3), 0, "", sweep=False)  # read again, known to be safe
    assert flt.ask(Q, 3) is ACK


def test_moves_that_the_log_lacks(flt: Filter) -> None:
    assert flt.queue(Q).implied_moves(3, ()) == []
    assert flt.queue(D).implied_moves(3, FROM_Q) == [("q", 0)]
    flt.done(Kind.MOVED, Q, 3)
    assert flt.queue(D).implied_moves(3, FROM_Q) == []
    assert flt.queue(Q).implied_moves(3, (("q", 1), ("d", 1))) == [("d", 0)]
    flt.done(Kind.MOVED, D, 3, origin="q")
    assert flt.queue(Q).implied_moves(3, (("q", 1), ("d", 1))) == []
    assert flt.queue(D).implied_moves(3, LOOPED) == [("q", 1)]
    million: Deaths = (("q", 1_000_000), ("d", 999_999))
    assert flt.queue(Q).implied_moves(3, million) == [("q", 999_999), ("d", 999_998)]  # stands for all before
    for queue, visit in flt.queue(Q).implied_moves(3, million):
        flt.done(Kind.MOVED, ("/", queue), 3, visit=visit, origin="q")
    assert flt.queue(Q).implied_moves(3, million) == []
    flt.done(Kind.MOVED, Q, 3, visit=7, origin="q")  # an old one read again
    assert flt.ask(Q, 3, (("q", 999_999), ("d", 999_999))) is REJECT


def test_skip(flt: Filter) -> None:
    flt.done(Kind.DEQUEUE, Q, 3, sweep=True)
    assert flt.may_skip([Q], 3)
    assert not flt.may_skip([Q, R], 3)
    assert not flt.may_skip([], 3)
    assert not flt.may_skip([R], 3)
    assert not flt.may_skip([Q], 4)
    flt.queue(Q).skipped(3, 3)
    assert flt.queue(Q).due.count(10) == 0


def test_what_the_sweeper_has_to_find(flt: Filter) -> None:
    flt.done(Kind.DEQUEUE, Q, 1, 10, sweep=True)
    flt.done(Kind.DEQUEUE, Q, 11, 12)  # a client of this node did it to the very copy
    q = flt.queue(Q)
    assert q.due.count(4) == 4
    assert q.due.count(100) == 10
    q.gone(2, 9)  # a copy that does not count settles nothing
    assert q.due.count(4) == 4
    q.gone(2, 1)
    q.gone(12, 1)
    assert q.due.count(4) == 3
    expected = q.due.expected(4)
    assert list(expected) == [1, 3, 4]
    q.gone(1, 1)
    missed = q.end_pass(expected)
    assert list(missed) == [3, 4]
    assert q.due.count(100) == 6
    assert flt.ask(Q, 3) is ACK  # forgotten by the sweeper, not by the filter
    assert set(flt.queues()) == {q}


def test_an_operation_read_again_is_not_due_again(flt: Filter) -> None:
    flt.done(Kind.DEQUEUE, Q, 1, 4, sweep=True)
    flt.queue(Q).gone(2, 1)
    flt.done(Kind.DEQUEUE, Q, 2, 5, sweep=True)
    assert list(flt.queue(Q).due.expected(9)) == [1, 3, 4, 5]
    flt.done(Kind.REJECT, D, 1, 4, origin="q", sweep=True)
    flt.queue(D).gone(2, 1, FROM_Q)
    flt.done(Kind.REJECT, D, 1, 4, origin="q", sweep=True)
    assert list(flt.queue(D).due.expected(9)) == [1, 3, 4]


def test_due_until_nothing_more_is_known_of_the_line(flt: Filter) -> None:
    flt.done(Kind.MOVED, Q, 1, sweep=True)
    flt.done(Kind.DEQUEUE, Q, 1, visit=1, origin="q", sweep=True)
    q = flt.queue(Q)
    q.gone(1, 1)
    assert q.due.count(9) == 1  # it comes back, and has to go then
    q.gone(1, 1, (("q", 1), ("d", 1)))
    assert q.due.count(9) == 0


def test_a_copy_found_further_on_settles_what_was_due_on_its_path(flt: Filter) -> None:
    flt.done(Kind.MOVED, Q, 1, sweep=True)
    flt.done(Kind.DEQUEUE, D, 1, origin="q", sweep=True)
    assert flt.queue(Q).due.count(9) == flt.queue(D).due.count(9) == 1
    flt.queue(D).gone(1, 1, FROM_Q)
    assert flt.queue(Q).due.count(9) == flt.queue(D).due.count(9) == 0


def test_another_line_keeps_it_due(flt: Filter) -> None:
    flt.done(Kind.DEQUEUE, D, 1, sweep=True)
    flt.done(Kind.DEQUEUE, D, 1, origin="q", sweep=True)
    flt.queue(D).gone(1, 1, FROM_Q)
    assert flt.queue(D).due.count(9) == 1


def test_a_message_that_died_in_two_queues_and_of_which_one_copy_is_gone(flt: Filter) -> None:
    """The other waits for an entry behind a purge, which waited for the one that is gone."""
    reached = 0
    flt.reached = lambda: reached
    flt.done(Kind.REJECT, D, 1, origin="q", sweep=True)
    flt.at += 1
    flt.note_change(flt.at)
    flt.done(Kind.REJECT, D, 1, origin="r", sweep=True)
    reached = flt.at - 1
    d = flt.queue(D)
    expected = d.due.expected(9)
    assert d.due.count_moves(9) == 1
    assert d.sweeping_verdict(1, 1, (("r", 1),)) is HOLD
    d.end_pass(expected, {(1, "r")})
    assert d.due.count_moves(9) == 0
    assert d.due.count(9) == 0
    reached = flt.at
    assert d.due.count_moves(9) == d.due.count(9) == 1
    assert d.sweeping_verdict(1, 1, (("r", 1),)) is REJECT


@pytest.fixture
def loop(flt: Filter) -> Filter:
    """A retry loop: message 1 was rejected from q, came back from r when its time was over, was rejected and came back again, and was acked."""
    flt.done(Kind.REJECT, Q, 1, sweep=True)
    for visit in (0, 1):
        flt.done(Kind.MOVED, R, 1, visit=visit, origin="q", sweep=True)
        flt.done(Kind.REJECT if not visit else Kind.DEQUEUE, Q, 1, visit=visit + 1, origin="q", sweep=True)
    return flt


def passes(flt: Filter, queue: QueueKey, *found: Deaths) -> None:
    """A pass that meets these copies of message 1, and no other."""
    target = flt.queue(queue)
    expected = target.due.expected(9)
    for deaths in found:
        assert flt.ask(queue, 1, deaths) in (ACK, REJECT)
        target.gone(1, 1, deaths)
    target.end_pass(expected)


def due(flt: Filter) -> list[str]:
    return [target.name for target in flt.queues() if target.due.count(9)]


def test_a_copy_that_a_pass_has_moved_is_looked_for_where_it_comes_to(loop: Filter) -> None:
    passes(loop, R)  # it is still in q
    passes(loop, R)
    passes(loop, Q, ())
    assert due(loop) == ["r"]  # where that pass over q could not meet it again
    passes(loop, R, FROM_Q)
    assert due(loop) == ["q"]
    passes(loop, Q, (("q", 1), ("r", 1)))
    passes(loop, R, (("q", 2), ("r", 1)))
    passes(loop, Q, (("q", 2), ("r", 2)))
    assert due(loop) == []


def test_a_copy_that_comes_back_by_itself_is_looked_for_once_more(loop: Filter) -> None:
    passes(loop, R)
    passes(loop, Q, ())
    passes(loop, R)  # its time there was over before this pass
    assert due(loop) == ["q"]
    passes(loop, Q, (("q", 1), ("r", 1)))
    assert due(loop) == ["r"]


def test_a_copy_may_have_left_a_queue_before_it_was_deleted(loop: Filter) -> None:
    passes(loop, Q, ())
    passes(loop, Q)
    loop.forget_queue(R, 9)
    assert due(loop) == ["q"]


def test_a_copy_that_is_nowhere_is_given_up(loop: Filter) -> None:
    for _ in range(3):
        passes(loop, Q)
        passes(loop, R)
    assert due(loop) == []
    assert loop.ask(Q, 1, (("q", 1), ("r", 1))) is REJECT  # not by the door


def test_an_acked_copy_is_looked_for_nowhere(loop: Filter) -> None:
    passes(loop, R)
    passes(loop, Q, (("q", 2), ("r", 2)))
    assert due(loop) == []


def test_export_and_import(flt: Filter) -> None:
    flt.done(Kind.DEQUEUE, Q, 1, 100, sweep=True)
    flt.done(Kind.REJECT, Q, 101, 102)
    flt.done(Kind.MOVED, D, 101, visit=2, origin="q")
    flt.done(Kind.DEQUEUE, D, 102, visit=1, origin="q")
    flt.done(Kind.PURGE, R, 0, 7)
    flt.done(Kind.REFUSED, None, 200)
    flt.queue(("/", "unused"))
    flt.op(Kind.DEQUEUE, Q, 300)  # not safe: read again from the log
    queues, refused = flt.export()
    again = DeliveryFilter.restored(flt.generations, queues, refused)
    assert again.export() == (queues, refused)
    assert [(record.vhost, record.queue) for record in queues] == [Q, D, R]
    assert again.queue(Q).due.count(1000) == 100
    assert (bool(again.queue(Q).due), bool(again.queue(R).due)) == (True, False)
    asked: list[tuple[QueueKey, int, Deaths]] = [
        (Q, 100, ()),
        (Q, 101, ()),
        (D, 101, (("q", 3), ("d", 2))),
        (D, 102, (("q", 2), ("d", 1))),
        (R, 7, ()),
        (R, 200, ()),
        (Q, 300, ()),
    ]
    assert [again.verdict(queue, seq, 1, deaths) for queue, seq, deaths in asked] == [ACK, REJECT, REJECT, ACK, ACK, ACK, GIVE]


def test_a_log_that_lost_its_end(flt: Filter) -> None:
    """What takes the sequences of lost entries is not dequeued."""
    died = ((Q[1], 1),)
    flt.note(10, Kind.DEQUEUE, Q, (3, 9), 0, "", sweep=True)
    flt.note(11, Kind.REJECT, Q, (2, 2, 8, 8), 0, "", sweep=True)
    flt.note(12, Kind.DEQUEUE, Q, (4, 7), 1, Q[1], sweep=True)
    flt.note(13, Kind.DEQUEUE, D, (7, 7), 0, Q[1], sweep=True)
    flt.note(14, Kind.PURGE, D, (0, 8), 0, "", sweep=False)
    flt.note(15, Kind.REFUSED, None, (6, 6), 0, "", sweep=False)
    flt.safe(15)
    flt.lose(4)
    assert flt.verdict(Q, 4, 1) is Verdict.ACK
    assert flt.verdict(Q, 2, 1) is Verdict.REJECT
    assert flt.verdict(Q, 4, 1, died) is Verdict.ACK
    assert flt.verdict(D, 4, 1) is Verdict.ACK
    for seq in (5, 6, 7, 8, 9):
        assert flt.verdict(Q, seq, 1) is Verdict.GIVE
        assert flt.verdict(Q, seq, 1, died) is Verdict.GIVE
        assert flt.verdict(D, seq, 1) is Verdict.GIVE
        assert flt.verdict(D, seq, 1, died) is Verdict.GIVE
    assert flt.queue(Q).due.count(100) == 3


def test_a_line_that_fell_out_of_the_log_and_stands_in_it_again(loop: Filter) -> None:
    """What is known of it then is known as the first time, and once."""
    loop.lose(0)
    loop.done(Kind.REJECT, R, 1, visit=1, origin="q", sweep=True)
    loop.done(Kind.REJECT, Q, 1, sweep=True)
    passes(loop, R)
    passes(loop, Q, ())
    assert due(loop) == ["r"]
    assert all(len(followers) == len(set(map(id, followers))) for followers in loop.followers.values())


def test_refusals_that_are_lost(flt: Filter) -> None:
    """What the log still refuses stays refused, and what stood before its first entry."""
    flt.done(Kind.REFUSED, None, 2, 5)
    flt.done(Kind.REFUSED, None, 9)
    again = DeliveryFilter.restored(flt.generations, *flt.export(), known=flt.known)
    again.note(10, Kind.REFUSED, None, (5, 6), 0, "", sweep=False)
    again.note(11, Kind.DEQUEUE, Q, (4, 4), 0, "", sweep=False)
    assert again.lose_refusals(3, [(5, 6)]) == 3
    again.safe(11)
    assert [seq for seq in range(1, 12) if again.verdict(Q, seq, 1) is Verdict.ACK] == [2, 4, 5, 6]
    assert again.lose_refusals(7, []) == 0


def test_a_deleted_queue(flt: Filter) -> None:
    flt.done(Kind.DEQUEUE, Q, 1, 10, sweep=True)
    flt.done(Kind.DEQUEUE, Q, 2000, sweep=True)  # of the next queue of that name
    flt.forget_queue(Q, 1500)
    flt.forget_queue(("/", "nobody"), 1500)
    assert list(flt.queue(Q).due.expected(9000)) == [2000]
    assert flt.ask(D, 3, FROM_Q) is ACK
    assert flt.ask(Q, 2000) is ACK


def known(flt: DeliveryFilter) -> list[str]:
    return [record.queue for record in flt.export()[0]]


def test_what_is_known_of_a_queue_goes_with_it(flt: Filter) -> None:
    flt.done(Kind.DEQUEUE, Q, 1, 10, sweep=True)
    flt.done(Kind.REJECT, Q, 11)
    flt.done(Kind.PURGE, Q, 0, 5)
    flt.done(Kind.DEQUEUE, R, 3)
    flt.forget_queue(Q, 1500, dead_letters=False)
    assert known(flt) == ["r"]
    assert flt.find(Q) is None
    assert [target.name for target in flt.queues()] == ["r"]
    assert flt.ask(R, 3) is ACK


def test_of_the_next_queue_of_that_name_nothing_goes(flt: Filter) -> None:
    flt.done(Kind.DEQUEUE, Q, 1, 10)
    flt.done(Kind.DEQUEUE, Q, 2000, sweep=True)
    flt.done(Kind.PURGE, Q, 0, 1600)
    held = flt.op(Kind.DEQUEUE, Q, 2001)
    target = flt.queue(Q)
    flt.forget_queue(Q, 1500, dead_letters=False)
    assert flt.queue(Q) is target
    assert [flt.ask(Q, seq) for seq in (1600, 2000, 2001, 2002)] == [ACK, ACK, HOLD, GIVE]
    flt.safe(held)
    assert list(target.due.expected(9000)) == [2000]
    again = DeliveryFilter.restored(flt.generations, *flt.export())
    assert [again.verdict(Q, seq, 1) for seq in (1700, 2000, 2001)] == [GIVE, ACK, ACK]


def test_a_queue_that_somebody_has_at_hand_stays_the_same(flt: Filter) -> None:
    target = flt.queue(Q)
    assert flt.queues() == ()
    flt.done(Kind.DEQUEUE, Q, 1)
    assert flt.queues() == (target,)
    flt.forget_queue(Q, 1500, dead_letters=False)
    flt.done(Kind.DEQUEUE, Q, 1600)
    assert flt.queues() == (target,)
    assert target.verdict(1600, 1) is ACK


def test_a_queue_that_may_have_dead_lettered_is_kept_for_a_while(flt: Filter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_filter, "DEPARTED_MAX", 2)
    for number in range(1, 6):
        key = ("/", f"q{number}")
        flt.done(Kind.MOVED, key, number)
        flt.done(Kind.DEQUEUE, D, number, visit=0, origin=key[1])
        flt.forget_queue(key, 1500 + number, dead_letters=False)  # that its line is known elsewhere says that it did
    assert known(flt) == ["d", "q4", "q5"]
    assert [flt.ask(D, number, ((f"q{number}", 1),)) for number in range(1, 6)] == [GIVE, GIVE, GIVE, ACK, ACK]
    assert list(flt.followers) == [("/", "q4"), ("/", "q5")]
    again = DeliveryFilter.restored(flt.generations, *flt.export())
    again.note(5000, Kind.DEQUEUE, Q, (7, 7), 0, "", sweep=False)
    again.safe(5000)
    again.forget_queue(Q, 5001)
    assert known(again) == ["d", "q5", "q"]
    again.forget_queue(D, 5002)
    assert known(again) == ["d", "q"]
    again.forget_queue(R, 5003)
    assert known(again) == ["d", "q"]


def test_dead_letters_that_are_looked_for_are_not_forgotten(flt: Filter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_filter, "DEPARTED_MAX", 0)
    flt.done(Kind.MOVED, Q, 3)
    flt.done(Kind.DEQUEUE, D, 3, origin="q", sweep=True)
    flt.forget_queue(Q, 1500)
    assert known(flt) == ["q", "d"]
    flt.queue(D).gone(3, 1, FROM_Q)
    flt.undeclared(R, 1501)  # nothing is known of it
    flt.done(Kind.DEQUEUE, R, 9)
    flt.undeclared(R, 1502)
    assert known(flt) == []


def test_what_a_queue_that_is_not_declared_is_swept_of_is_not_forgotten(flt: Filter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_filter, "DEPARTED_MAX", 1)
    for key in (Q, R, D):
        flt.done(Kind.DEQUEUE, key, 3, sweep=key == Q)
        flt.undeclared(key, flt.at)
    assert known(flt) == ["q", "d"], "r went instead"
    flt.queue(Q).gone(3, 1)
    flt.done(Kind.DEQUEUE, R, 4)
    flt.undeclared(R, flt.at)
    assert known(flt) == ["r"]


def test_a_deletion_that_is_lost_lets_nothing_go(flt: Filter) -> None:
    flt.done(Kind.DEQUEUE, Q, 3)
    flt.forget_queue(Q, 1500)
    assert flt.export()[0][0].departed == 1500
    flt.lose(1499)
    assert flt.export()[0][0].departed == 0
    assert flt.ask(Q, 3) is ACK


# ---- all rules against a list of operations --------------------------------------------------------------------------


class Op(NamedTuple):
    at: int
    kind: Kind
    queue: str
    first: int
    last: int
    visit: int
    origin: str
    spared: int


class Reference:
    """The rules of the module's first lines, word by word, over a list."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.safe = 0

    def known(self, queue: str, seq: int, *, safe: bool) -> list[Op]:
        here = [op for op in self.ops if op.queue == queue and op.first <= seq <= op.last and op.spared != seq]
        return [op for op in here if (op.at <= self.safe) == safe]

    def verdict(self, queue: str, seq: int, deaths: Deaths) -> Verdict:
        origin = origin_of(deaths)
        visit = visit_of(queue, deaths)
        line = origin or queue
        stays = [(queue, visit), *((name, count - 1) for name, count in deaths)]

        def same(op: Op) -> bool:
            return op.origin == line or (op.origin == "" and line == op.queue)

        voided = any(
            op.kind is Kind.DEQUEUE and same(op) and op.visit <= reached for name, reached in stays for op in self.known(name, seq, safe=True)
        )
        purged = not deaths and any(op.kind is Kind.PURGE for op in self.known(queue, seq, safe=True))
        if voided or self.known("", seq, safe=True):
            return ACK
        if any(self.known(name, seq, safe=False) for name, _ in [*stays, ("", 0)]):
            return HOLD
        moves = [op for op in self.known(queue, seq, safe=True) if op.kind in (Kind.REJECT, Kind.MOVED) and same(op)]
        if any(op.visit >= visit for op in moves):
            return REJECT
        return ACK if purged else GIVE


SEQ = st.integers(1, 6)
NOTE = st.tuples(
    st.sampled_from([Kind.DEQUEUE, Kind.DEQUEUE, Kind.REJECT, Kind.MOVED, Kind.REFUSED, Kind.PURGE]),
    st.sampled_from("qd"),
    SEQ,
    st.integers(0, 2),
    st.sampled_from([("", 0), ("q", 0), ("q", 1), ("q", 2), ("d", 0), ("d", 1)]),
)
COPIES: list[tuple[str, Deaths]] = [
    ("q", ()),
    ("d", ()),
    ("d", (("q", 1),)),
    ("q", (("q", 1), ("d", 1))),
    ("d", (("q", 2), ("d", 1))),
    ("q", (("q", 2), ("d", 2))),
    ("q", (("d", 1),)),
    ("d", (("d", 1), ("q", 1))),
]


@given(st.lists(st.one_of(NOTE, st.tuples(st.sampled_from(["safe", "cut"]), st.integers(0, 4))), max_size=25))
@settings(max_examples=400, deadline=None)
def test_against_a_list_of_operations(actions: list[tuple]) -> None:  # type: ignore[type-arg]
    flt, reference, at = DeliveryFilter(Generations([(0, 1)])), Reference(), 100
    for action in actions:
        if action[0] == "safe":
            reference.safe = min(at, max(reference.safe, 100) + action[1])
            flt.safe(reference.safe)
        elif action[0] == "cut":
            at = max(reference.safe, at - action[1])
            flt.cut(at + 1)
            reference.ops = [op for op in reference.ops if op.at <= at]
        else:
            kind, queue, first, more, (origin, visit) = action
            at += 1
            last = first + more
            if kind in (Kind.REFUSED, Kind.PURGE):
                origin, visit = "", 0
                queue = "" if kind is Kind.REFUSED else queue
            spared = first if kind is Kind.PURGE else 0
            first = 0 if kind is Kind.PURGE else first
            ranges = RangeSet.of([spared] if spared else []).missing(first, last).flat()
            flt.note(at, kind, ("/", queue) if queue else None, ranges, visit, origin, sweep=True)
            stored = "" if visit == 0 and origin == queue else origin
            reference.ops.append(Op(at, kind, queue, first, last, visit, stored, spared))
        for seq in range(1, 9):
            for queue, deaths in COPIES:
                assert flt.verdict(("/", queue), seq, 1, deaths) is reference.verdict(queue, seq, deaths), (queue, seq, deaths)
    again = DeliveryFilter.restored(flt.generations, *flt.export())
    reference.ops = [op for op in reference.ops if op.at <= reference.safe]
    for seq in range(1, 9):
        for queue, deaths in COPIES:
            assert again.verdict(("/", queue), seq, 1, deaths) is reference.verdict(queue, seq, deaths)


# ---- cost ------------------------------------------------------------------------------------------------------------

MESSAGES = 10_000_000
MEMORY_MAX_BYTES = 50_000_000


class Cost(NamedTuple):
    memory_bytes: int
    ranges: int
    note_us: float
    verdict_ns: float
    record_bytes: int


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()


def batches(shape: str) -> Iterator[tuple[int, ...]]:
    """The ranges of each DEQUEUE."""
    drawn = random.Random(1)
    for first in range(1, MESSAGES, 3000):
        if shape == "all of one queue":
            yield (first, first + 2999)
        elif shape == "every third stays":
            yield tuple(x for seq in range(first, first + 3000, 3) for x in (seq, seq + 1))
        else:
            yield tuple(x for seq in range(first, first + 3000, 3) for x in (seq + drawn.randrange(3),) * 2)


def cost(shape: str) -> Cost:
    """Ten million messages with replication IDs, dequeued as `shape` says. Run in a process of its own: what is free is not seen."""
    before = resident_bytes()
    generations = Generations([(0, 1)])
    flt, dedup, spent, count, size = DeliveryFilter(generations), Dedup(), 0.0, 0, 0
    for first in range(1, MESSAGES, 1000):
        dedup.add("app/orders", first, 1000, first)
    if shape == "a hundred queues by turns":
        empty = BitMap64().serialize()
        records = (QueueRecord("/", f"q{i}", BitMap64(range(i, MESSAGES, 100)).serialize(), empty, empty, 0, ()) for i in range(100))
        flt = DeliveryFilter.restored(generations, records, empty)
    else:
        for at, ranges in enumerate(batches(shape), MESSAGES + 1):
            started = time.perf_counter()
            flt.note(at, Kind.DEQUEUE, ("/", "q0"), ranges, 0, "", sweep=shape == "all of one queue")
            flt.safe(at)
            spent += time.perf_counter() - started
            count, size = count + 1, len(ranges) // 2
    used = resident_bytes() - before
    queue = flt.queue(("/", "q0"))
    started = time.perf_counter()
    for seq in range(1, 200_001):
        queue.verdict(seq, 1)
    verdict_ns = (time.perf_counter() - started) / 200_000 * 1e9
    record = sum(len(part.done) + len(part.due) for part in flt.export()[0])
    assert dedup.seen("app/orders", MESSAGES)
    return Cost(used, size, spent / max(count, 1) * 1e6, verdict_ns, record)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process's resident memory from /proc")
@pytest.mark.parametrize("shape", ["all of one queue", "every third stays", "one of three, at random", "a hundred queues by turns"])
def test_ten_million_messages(shape: str) -> None:
    """Bytes are asserted; times are shown (`pytest -s`)."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        result = pool.submit(cost, shape).result()
    print(
        f"\n{shape}: {result.memory_bytes / 1e6:.1f} MB; note + safe of {result.ranges} ranges {result.note_us:.1f} us; "
        f"verdict {result.verdict_ns:.0f} ns; in the record {result.record_bytes / 1e6:.2f} MB"
    )
    assert result.memory_bytes < MEMORY_MAX_BYTES


def test_a_node_without_a_record_begins_with_an_empty_filter() -> None:
    flt = DeliveryFilter.restored(Generations(), (), b"")
    assert flt.export() == DeliveryFilter(Generations()).export()


def test_what_has_not_changed_is_not_made_anew_for_the_record(flt: Filter) -> None:
    flt.done(Kind.DEQUEUE, Q, 1)
    flt.done(Kind.DEQUEUE, D, 2)
    (q, d), _ = flt.export()
    flt.done(Kind.DEQUEUE, Q, 3)
    (q_after, d_after), _ = flt.export()
    assert d_after is d
    assert q_after != q
