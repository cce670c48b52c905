"""R17: which queues a renewal is moving, how long they should be, and when it is over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands

from broker_plugin.amqp import encode
from broker_plugin.log.catalog import Catalog
from broker_plugin.log.index import Index
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.queues import QueueKey
from lrq_ha.replication.renewal_progress import Passes, Rounds

A, B = ("/", "a"), ("/", "b")


def begun() -> Passes:
    passes = Passes()
    passes.begin(10)
    return passes


def test_a_queue_is_unfinished_from_the_first_entry_on() -> None:
    passes = begun()
    passes.noted(11, A, done=False)
    passes.noted(15, A, done=True)
    passes.noted(16, B, done=False)
    assert passes.unfinished() == {B: 16}
    passes.noted(17, A, done=False)
    assert passes.unfinished() == {B: 16, A: 17}
    assert passes.begun(A)
    assert not passes.begun(("/", "c"))


def test_a_renewal_that_is_over_has_no_unfinished_queue() -> None:
    passes = begun()
    passes.noted(11, A, done=False)
    passes.end(12)
    assert (passes.unfinished(), passes.checkpoint) == ({}, 0)
    passes.begin(20)
    assert (passes.unfinished(), passes.begun(A)) == ({}, False)


def test_what_falls_out_of_the_log_was_not() -> None:
    passes = begun()
    passes.noted(11, A, done=False)
    passes.noted(15, A, done=True)
    passes.end(16)
    passes.cut(15)
    assert (passes.unfinished(), passes.checkpoint) == ({A: 11}, 10)
    passes.cut(10)
    assert (passes.unfinished(), passes.checkpoint) == ({}, 0)


def test_a_restart_in_the_middle_knows_what_is_half_done() -> None:
    passes = Passes()
    passes.restore(10, {A: 11})
    assert (passes.checkpoint, passes.unfinished(), passes.holds(A)) == (10, {A: 11}, -1)
    passes.noted(15, A, done=True)
    assert passes.unfinished() == {}
    passes.end(16)
    assert passes.checkpoint == 0


def test_a_queue_is_as_long_as_what_came_and_did_not_leave() -> None:
    passes = begun()
    assert (passes.holds(A), passes.counting) == (-1, False)
    passes.came(A)
    passes.noted(12, A, done=False)
    assert passes.counting
    for _ in range(5):  # entries 13 to 17
        passes.came(A)
        passes.came(B)
    passes.left(A, (8, 9, 11, 13))  # only the last of them came behind entry 12
    passes.left(A, (16, 17))
    passes.left(B, (16, 17))
    assert (passes.holds(A), passes.holds(B)) == (2, -1)


def test_what_cannot_be_counted_makes_the_count_void() -> None:
    passes = begun()
    for queue in (A, B):
        passes.noted(12, queue, done=False)
    passes.count_no_more(A)
    assert (passes.holds(A), passes.holds(B)) == (-1, 0)
    passes.count_no_more()
    assert (passes.holds(B), passes.counting) == (-1, False)


def test_two_rounds_that_find_nothing_end_it() -> None:
    rounds = Rounds(begun(), 3)
    for found in (True, False, True, False):
        rounds.ended(found=found)
    assert not rounds.done
    rounds.ended(found=False)
    assert rounds.done
    assert not rounds.too_many


def test_a_round_does_not_count_in_which_a_client_sends_on_something_old() -> None:
    passes = begun()
    rounds = Rounds(passes, 3)
    rounds.ended(found=False)
    passes.stirred(11)  # behind the CHECKPOINT
    passes.stirred(10)
    rounds.ended(found=False)
    rounds.ended(found=False)
    assert not rounds.done
    rounds.ended(found=False)
    assert rounds.done


def test_at_some_time_it_is_enough() -> None:
    rounds = Rounds(begun(), 2)
    rounds.ended(found=True)
    assert not rounds.too_many
    rounds.ended(found=True)
    assert rounds.too_many


@pytest.mark.parametrize(("kind", "holds"), [("classic", 2), ("quorum", -1)])
def test_a_queue_may_drop_what_is_given_back_over_its_delivery_limit(kind: str, holds: int) -> None:
    """The log does not tell: a dead letter that came meanwhile made such a queue as long as it should be, and was left behind."""
    index = Index(Catalog(Levels({})))
    method = encode.encode_method(commands.Queue.Declare(queue=A[1], durable=True, arguments={"x-queue-type": kind}))
    index.note(pb.Run(topology=pb.Topology(vhost=A[0], method=method)), 1, sweep=False)
    index.passes.begin(10)
    index.gave_back(A, 5)
    assert index.passes.old_moves == 1
    index.note(pb.Run(moving=pb.Moving(vhost=A[0], queue=A[1])), 11, sweep=False)
    for _ in range(2):
        index.passes.came(A)
    assert index.passes.holds(A) == 2
    index.gave_back(A, 12)
    assert index.passes.holds(A) == holds


@given(st.lists(st.one_of(st.tuples(st.sampled_from("abc"), st.booleans()), st.integers(1, 12)), max_size=25))
def test_what_is_unfinished_is_what_the_log_says(steps: list[tuple[str, bool] | int]) -> None:
    """It is kept beside the log's words, as there may be ten thousand queues: a look at each of them looked at all of these each time."""
    passes = Passes()
    passes.begin(1)
    said: list[tuple[int, QueueKey, bool]] = []
    sequence = 1
    for step in steps:
        if isinstance(step, int):
            first = max(2, sequence + 1 - step)
            passes.cut(first)
            said, sequence = [one for one in said if one[0] < first], first - 1
        else:
            sequence += 1
            key = ("/", step[0])
            passes.noted(sequence, key, done=step[1])
            said.append((sequence, key, step[1]))
        expected = {key: at for at, key, done in said if not done and not any(later > at and k == key for later, k, _ in said)}
        assert passes.unfinished() == expected
        for key in (("/", name) for name in "abc"):
            assert passes.is_unfinished(key) == expected.get(key, 0)
            assert passes.begun(key) is any(k == key for _, k, _ in said)
