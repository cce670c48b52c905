"""Tallies: which copies of a backup are too many. By example, and against a queue whose head is removed at random."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands

from broker_plugin.amqp import encode
from broker_plugin.log.catalog import Catalog
from broker_plugin.log.index import Index
from broker_plugin.log.tally import EMPTY_KEPT, QueueTallies, Tally
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.positions import RangeSet

pytestmark = pytest.mark.proves("queue: silent removals")

Q, D, E = ("/", "q"), ("/", "d"), ("/", "e")
FROM_Q = (("q", 1),)


def tally(messages: int, *, upto: int = 100, held: tuple[int, ...] = (), spared: tuple[int, ...] = ()) -> Tally:
    return Tally(200, Q, upto, messages, RangeSet.of(held), RangeSet.of(spared))


def entry(queue: tuple[str, str], upto: int, messages: int, *held: int) -> pb.Tally:
    return pb.Tally(vhost=queue[0], queue=queue[1], upto=upto, messages=messages, held=RangeSet.of(held).flat())


def removed(copies: list[int], one: Tally) -> list[int]:
    return [copies[index] for index in sorted(one.excess(copies))]


def test_the_first_ones_go() -> None:
    assert removed([1, 2, 3, 4], tally(3)) == [1]
    assert removed([1, 2, 3, 4], tally(4)) == removed([1, 2], tally(3)) == []
    assert removed([1, 2, 3, 4], tally(0)) == [1, 2, 3, 4]


def test_what_is_held_stays() -> None:
    assert removed([1, 2, 3, 4], tally(2, held=(1, 2))) == [3, 4]


def test_what_was_given_back_may_be_what_is_gone() -> None:
    assert removed([1, 2, 3, 4], tally(3, spared=(1,))) == []
    assert removed([1, 2, 3, 4], tally(1, spared=(1,))) == [2, 3]
    assert removed([1, 2, 3, 4], tally(2, held=(1,), spared=(1,))) == [2, 3], "it is held again"
    assert removed([1, 2, 3, 4], tally(0, spared=(1, 2))) == [3, 4], "a queue may hold it back"


def test_of_which_copies_it_speaks() -> None:
    tallies = QueueTallies()
    assert tallies.counts(tally(1), 100, (), by_name=True)
    assert not tallies.counts(tally(1), 101, (), by_name=True), "came after it"
    assert not tallies.counts(tally(1), 5, (), by_name=False), "bindings may differ"
    assert not tallies.counts(tally(1), 5, FROM_Q, by_name=True), "dead letters come in another order"
    assert tallies.counts(tally(0), 5, (), by_name=False)


def test_a_dead_letter_counts_if_all_it_died_in_was_empty_before() -> None:
    tallies = QueueTallies()
    of_d = Tally(200, D, 100, 0, RangeSet(), RangeSet())
    assert not tallies.counts(of_d, 5, FROM_Q, by_name=False)
    tallies.noted(120, entry(Q, 50, 0))
    assert not tallies.counts(of_d, 5, FROM_Q, by_name=False), "it was empty, but only later"
    tallies.noted(90, entry(Q, 4, 0))
    assert not tallies.counts(of_d, 5, FROM_Q, by_name=False), "of what came later nothing is known"
    tallies.noted(95, entry(Q, 50, 0))
    assert tallies.counts(of_d, 5, FROM_Q, by_name=False)
    assert not tallies.counts(of_d, 5, (*FROM_Q, ("e", 1)), by_name=False), "one of two queues"
    assert not tallies.counts(of_d, 5, (*FROM_Q, ("d", 1)), by_name=False), "it may come round again"
    for sequence in range(EMPTY_KEPT):
        tallies.noted(300 + sequence, entry(Q, 250, 0))
    assert not tallies.counts(of_d, 5, FROM_Q, by_name=False), "so long ago is not remembered"


def test_a_queue_in_which_dead_letters_may_wait_is_not_known_to_be_empty() -> None:
    tallies = QueueTallies()
    of_d = Tally(200, D, 100, 0, RangeSet(), RangeSet())
    tallies.noted(95, entry(Q, 50, 0), keeps_dead_letters=True)
    assert not tallies.counts(of_d, 5, FROM_Q, by_name=False), "the primary's copy may wait in q, and arrive later"
    assert tallies.pending(Q, 95), "of its own messages it says as much as any"


def test_the_log_knows_in_which_queues_dead_letters_may_wait() -> None:
    for strategy, known in (("at-least-once", False), ("at-most-once", True)):
        index = Index(Catalog(Levels({})))
        declare = encode.encode_method(commands.Queue.Declare(queue=Q[1], durable=True, arguments={"x-dead-letter-strategy": strategy}))
        index.note(pb.Run(topology=pb.Topology(vhost=Q[0], method=declare)), 1, sweep=True)
        index.note(pb.Run(tally=entry(Q, 50, 0)), 95, sweep=True)
        assert index.tallies.counts(Tally(200, D, 100, 0, RangeSet(), RangeSet()), 5, FROM_Q, by_name=False) is known


def test_what_one_primary_found_empty_need_not_be_on_the_next() -> None:
    """Messages that had expired on the first may have been in the queue of the second, and die there into a queue that it then finds empty."""
    index = Index(Catalog(Levels({})))
    of_d = Tally(200, D, 100, 0, RangeSet(), RangeSet())
    index.note(pb.Run(tally=entry(Q, 50, 0)), 95, sweep=True)
    assert index.tallies.counts(of_d, 5, FROM_Q, by_name=False)
    index.note(pb.Run(marker=pb.Marker(nodes=[1, 2])), 96, sweep=True)
    assert not index.tallies.counts(of_d, 5, FROM_Q, by_name=False)
    index.note(pb.Run(tally=entry(Q, 50, 0)), 97, sweep=True)
    assert index.tallies.counts(of_d, 5, FROM_Q, by_name=False)


def test_pending_until_done_cut_or_deleted() -> None:
    tallies = QueueTallies()
    tallies.noted(10, entry(Q, 8, 2, 3, 4, 7))
    assert tallies.pending(Q, 9) is None, "not applied yet"
    first = tallies.pending(Q, 10)
    assert first is not None
    assert (first.upto, first.messages, first.held) == (8, 2, RangeSet.of((3, 4, 7)))
    tallies.noted(12, entry(Q, 11, 1))
    tallies.done(Q, first)
    assert tallies.keys() == (Q,), "a later one is not done with it"
    tallies.noted(13, entry(D, 11, 0))
    tallies.noted(14, entry(E, 11, 0))
    assert [(each.queue, each.upto) for each in tallies.export(13)] == [("q", 11), ("d", 11)], "a restart reads the others again"
    tallies.cut(13)
    assert tallies.keys() == (Q,)
    assert not tallies.counts(Tally(99, E, 50, 0, RangeSet(), RangeSet()), 5, (("d", 1),), by_name=False), "what was cut was never said"
    tallies.done(Q)
    assert tallies.keys() == ()


def test_what_speaks_of_entries_that_were_lost() -> None:
    """Others will take their sequences."""
    tallies = QueueTallies()
    tallies.restored(entry(Q, 115, 0))
    tallies.restored(entry(D, 100, 0))
    tallies.lose(100)
    assert tallies.keys() == (D,)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["publish", "publish", "deliver", "ack", "give back", "head goes", "limit"]), st.integers(0, 5)), max_size=60
)


@given(ACTIONS, st.booleans())
def test_never_what_the_primary_has(actions: list[tuple[str, int]], returns: bool) -> None:
    """The primary's queue under any traffic: a backup, which has all that was not acked, removes nothing that is there; and without messages that
    came back to the queue it removes all that is gone."""
    ready: list[int] = []
    held: list[int] = []
    given_back: set[int] = set()
    acked: set[int] = set()
    published = 0
    for action, number in actions:
        if action == "publish":
            published += 1
            ready.append(published)
        elif action == "deliver" and ready:
            held.append(ready.pop(0))
        elif action == "ack" and held:
            one = held.pop(number % len(held))
            acked.add(one)
            given_back.discard(one)
        elif action == "give back" and held and returns:
            one = held.pop(number % len(held))
            given_back.add(one)
            ready = sorted({*ready, one})
        elif action == "head goes":
            del ready[:number]
        elif action == "limit" and given_back & set(ready):
            ready.remove(min(given_back & set(ready)))
    copies = [one for one in range(1, published + 1) if one not in acked]
    gone = set(copies) - set(ready) - set(held)
    found = set(removed(copies, tally(len(ready) + len(held), held=tuple(held), spared=tuple(given_back))))
    assert found <= gone
    if not given_back:
        assert found == gone


def test_after_a_restart_nobody_knows_what_was_empty_before() -> None:
    """An empty queue's tally that came after another's said, when both were restored, that it came before."""
    tallies = QueueTallies()
    tallies.noted(110, entry(D, 100, 0))
    tallies.noted(120, entry(Q, 115, 0))
    later = tallies.pending(D, 120)
    assert later is not None
    assert not tallies.counts(later, 50, FROM_Q, by_name=False), "it died after the tally"
    again = QueueTallies()
    for exported in tallies.export(120):
        again.restored(exported)
    later = again.pending(D, 120)
    assert later is not None
    assert not again.counts(later, 50, FROM_Q, by_name=False)
    assert again.counts(later, 50, (), by_name=False)
