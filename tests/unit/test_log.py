"""The log's index: R1, R2 (accepting), R4 and R15 (safe), R13 (in the set or not), R14 (who refuses to be cut)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrq_ha.errors import IllegalEvent
from lrq_ha.replication.log import Acceptance, BatchHeader, LogIndex, LogState, common_end, refuses_cut, safe_position

# Epochs: term and owner, as in positions.epoch_number.
E1, E2, E3 = 0x101, 0x202, 0x303
ALL = frozenset({1, 2})


def batch(epoch: int, first: int, last: int, previous: int, *, leader: int = 0, members: frozenset[int] | None = None) -> BatchHeader:
    return BatchHeader(epoch, first, last, previous, leader or epoch, ((first, members),) if members else ())


def log(*batches: BatchHeader, node: int = 1) -> LogIndex:
    index = LogIndex(node)
    for b in batches:
        assert index.accept(b) is Acceptance.APPEND
    return index


def two_epochs() -> LogIndex:
    """1 .. 5 of E1, 6 .. 8 of E2."""
    return log(batch(E1, 1, 1, 0, members=ALL), batch(E1, 2, 5, E1), batch(E2, 6, 6, E1, members=frozenset({2})), batch(E2, 7, 8, E2))


# ---- R2 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "verdict"),
    [
        (batch(E2, 9, 9, E2), Acceptance.APPEND),
        (batch(E2, 7, 8, E2), Acceptance.REPEAT),
        (batch(E1, 2, 5, E1, leader=E2), Acceptance.REPEAT),
        (batch(E1, 1, 1, 0, leader=E2), Acceptance.REPEAT),
        (batch(E1, 6, 6, E1), Acceptance.STALE),
        (batch(E2, 10, 10, E2), Acceptance.GAP),  # beyond the end
        (batch(E3, 9, 9, E1), Acceptance.GAP),  # after another entry than ours
        (batch(E3, 7, 7, E1), Acceptance.GAP),
        (batch(E3, 6, 6, E1), Acceptance.APPEND),  # replaces
        (batch(E1, 6, 7, E1, leader=E3), Acceptance.APPEND),  # replaces, an older epoch's entries pushed by a newer leader
        (batch(E2, 7, 9, E2), Acceptance.APPEND),
    ],
)
def test_judge_says_what_accept_does(b: BatchHeader, verdict: Acceptance) -> None:
    index = two_epochs()
    before = index.state()
    assert index.judge(b) is verdict
    assert index.state() == before
    assert index.accept(b) is verdict
    if verdict is Acceptance.APPEND:
        assert (index.end, index.last_epoch) == (b.last, b.epoch)
    elif verdict in (Acceptance.GAP, Acceptance.STALE):
        assert index.state() == before


def test_a_repeat_by_a_newer_leader_raises_top() -> None:
    index = two_epochs()
    assert index.accept(batch(E2, 7, 8, E2, leader=E3)) is Acceptance.REPEAT
    assert index.top == E3
    assert index.accept(batch(E2, 9, 9, E2)) is Acceptance.STALE


def test_what_is_replaced_takes_its_epochs_and_sets_with_it() -> None:
    index = two_epochs()
    index.accept(batch(E3, 2, 2, E1, members=frozenset({1, 3})))
    assert index.state() == LogState(E3, 2, ((E1, 1), (E3, 2)), ((1, ALL), (2, frozenset({1, 3}))), True)


def test_fence_is_a_promise() -> None:
    index = two_epochs()
    index.fence(E3)
    assert index.accept(batch(E2, 9, 9, E2)) is Acceptance.STALE
    index.fence(E1)
    assert index.top == E3


def test_epoch_at() -> None:
    index = two_epochs()
    assert [index.epoch_at(s) for s in (0, 1, 5, 6, 8)] == [0, E1, E1, E2, E2]
    with pytest.raises(IllegalEvent, match="beyond the log's end 8"):
        index.epoch_at(9)


def test_an_empty_log() -> None:
    index = LogIndex(1)
    assert (index.last_epoch, index.members, index.sets, index.state().rank) == (0, frozenset(), [], (0, 0))
    assert index.accept(batch(E1, 2, 2, E1)) is Acceptance.GAP


def test_restore() -> None:
    index = LogIndex(1)
    index.restore(two_epochs().state())
    assert index.state() == two_epochs().state()
    assert index.accept(batch(E2, 9, 9, E2)) is Acceptance.APPEND


def test_start_at_a_checkpoint() -> None:
    index = two_epochs()
    checkpoint = batch(E2, 9, 9, E2)
    before = index.state()
    index.accept(checkpoint)
    point = index.start_point(checkpoint, 17)
    assert (point.sequence, point.epoch, point.leader, point.offset) == (9, E2, E2, 17)
    again = LogIndex(1)
    again.restore(replace(before, top=point.leader, in_set=point.in_set), point.out_since)
    again.accept(checkpoint)
    assert again.state() == index.state()


def test_state_tells_of_a_lost_host() -> None:
    assert two_epochs().state(lost_host=True).lost_host


# ---- R13: in the set or not -----------------------------------------------------------------------------------------


def test_a_node_is_in_the_set_that_it_last_read() -> None:
    index = log(batch(E1, 1, 1, 0, members=ALL))
    assert index.in_set
    index.accept(batch(E1, 2, 2, E1, members=frozenset({2})))
    assert not index.in_set


def test_out_until_a_set_beyond_the_end_where_it_was_told() -> None:
    index = log(batch(E1, 1, 1, 0, members=ALL))
    index.fence(E1, 3)
    assert not index.in_set
    for sequence, in_set in ((2, False), (3, False), (4, True)):
        index.accept(batch(E1, sequence, sequence, E1, members=ALL))
        assert index.in_set is in_set


def test_a_set_of_a_later_epoch_counts_wherever_it_stands() -> None:
    """The leader that told it so had a longer log than its successor."""
    index = log(batch(E1, 1, 1, 0, members=ALL))
    index.fence(E1, 20)
    index.accept(batch(E2, 2, 2, E1, members=ALL))
    assert index.in_set


def test_a_set_of_an_older_epoch_does_not() -> None:
    index = log(batch(E1, 1, 1, 0, members=ALL))
    index.fence(E2, 1)
    index.accept(batch(E1, 2, 2, E1, leader=E3, members=ALL))
    assert not index.in_set


# ---- what two logs share, and who refuses to be cut (R14) -----------------------------------------------------------


def state(*epochs: tuple[int, int], end: int, sets: tuple[tuple[int, frozenset[int]], ...] = ()) -> LogState:
    return LogState(0, end, epochs, sets)


@pytest.mark.parametrize(
    ("a", "b", "end"),
    [
        (state(end=0), state((E1, 1), end=5), 0),
        (state((E1, 1), end=5), state((E2, 1), end=5), 0),
        (state((E1, 1), end=5), state((E1, 1), end=9), 5),
        (state((E1, 1), (E2, 4), end=8), state((E1, 1), end=6), 3),
        (state((E1, 1), (E2, 4), end=8), state((E1, 1), (E3, 6), end=6), 3),
        (state((E1, 1), (E2, 4), end=8), state((E1, 1), (E2, 4), (E3, 6), end=9), 5),
    ],
)
def test_common_end(a: LogState, b: LogState, end: int) -> None:
    assert common_end(a, b) == common_end(b, a) == end


ONE, TWO = frozenset({1}), frozenset({2})


@pytest.mark.parametrize(
    ("tail", "leader", "refuses"),
    [
        # no tail at all
        (state((E1, 1), end=5, sets=((1, ONE),)), state((E1, 1), end=9), False),
        # node 2 was in the set: it acknowledged whatever was safe
        (state((E1, 1), end=5, sets=((1, ALL),)), state((E1, 1), (E2, 4), end=4), False),
        # it was taken out before the tail began
        (state((E1, 1), end=5, sets=((1, ALL), (2, ONE))), state((E1, 1), (E2, 4), end=4), True),
        # or within it
        (state((E1, 1), end=5, sets=((1, ALL), (5, ONE))), state((E1, 1), (E2, 4), end=4), True),
        # an earlier set that leaves it out does not matter
        (state((E1, 1), end=5, sets=((1, ONE), (2, ALL))), state((E1, 1), (E2, 4), end=4), False),
        # node 3 leads now, but node 2 wrote the first MARKER after what they share
        (state((E1, 1), end=5, sets=((1, ONE),)), state((E1, 1), (E2, 4), (E3, 5), end=5), True),
        (state((E1, 1), end=5, sets=((1, ALL),)), state((E1, 1), (E2, 4), (E3, 5), end=5), False),
        # nobody wrote one yet: the leader itself counts (node 3)
        (state((E1, 1), end=5, sets=((1, ALL),)), state((E1, 1), end=4), True),
        (state((E1, 1), end=5, sets=((1, frozenset({1, 3})),)), state((E1, 1), end=4), False),
        # no set in force at all
        (state((E1, 1), end=5), state((E1, 1), (E2, 4), end=4), False),
    ],
)
def test_refuses_cut(tail: LogState, leader: LogState, refuses: bool) -> None:
    assert refuses_cut(tail, leader, 3) is refuses


NODES = st.frozensets(st.integers(1, 3), min_size=1)


@given(st.lists(NODES, min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_old_sets_are_told_of_as_one(sets: list[frozenset[int]], keep: int, data: st.DataObject) -> None:
    """Entry n of the log is set n, and one more entry follows. No tail that was refused is dropped; none is refused that begins at what is safe."""
    whole = LogIndex(1)
    whole.accept(BatchHeader(E1, 1, len(sets) + 1, 0, E1, tuple(enumerate(sets, 1))))
    merged = LogIndex(1)
    merged.restore(whole.state())
    safe = 0
    for _ in range(3):
        safe = data.draw(st.integers(safe, len(sets) + 1))
        merged.merge_sets(safe, keep)
    assert merged.sets[-keep:] == whole.sets[-keep:]
    assert [s for s in merged.sets if s[0] > safe] == [s for s in whole.sets if s[0] > safe]
    assert len(merged.sets) <= max(keep + 1, len(sets) - safe + 2)
    for common in range(len(sets) + 1):
        for taker in (1, 2, 3):
            leader = LogState(E1, common, ((E1, 1),) if common else ())
            before, now = (refuses_cut(index.state(), leader, taker) for index in (whole, merged))
            assert now >= before
            assert now == before or 0 < common < safe


def test_a_node_that_left_the_set_lately_is_told_of() -> None:
    index = LogIndex(1)
    index.accept(BatchHeader(E1, 1, 10, 0, E1, tuple((n, ALL if n % 2 else ONE) for n in range(1, 10))))
    index.accept(batch(E1, 11, 11, E1, members=ONE))
    index.merge_sets(11, 2)
    assert index.sets == [(1, ONE), (9, ALL), (11, ONE)]
    assert index.in_set_upto(2) == 10


# ---- R4, R15 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "marker", "durable", "acknowledged", "safe"),
    [
        ([], 1, 5, {}, 0),
        ([(1, ONE)], 1, 5, {}, 5),
        ([(1, ALL)], 1, 5, {2: 3}, 3),
        ([(1, ALL)], 1, 5, {}, 0),
        ([(1, ALL)], 1, 2, {2: 3}, 2),
        # nothing of an epoch is safe before its MARKER
        ([(1, ONE), (6, ALL)], 6, 6, {2: 5}, 0),
        ([(1, ONE), (6, ALL)], 6, 6, {2: 6}, 6),
        # an addition counts from its append
        ([(1, ONE), (4, ALL)], 1, 6, {2: 3}, 3),
        ([(1, ONE), (4, ALL)], 1, 6, {2: 4}, 4),
        # a removal counts when MEMBERS is on all of the new set, the own stream included
        ([(1, ALL), (4, ONE)], 1, 3, {2: 2}, 2),
        ([(1, ALL), (4, ONE)], 1, 4, {2: 2}, 4),
        ([(1, frozenset({1, 2, 3})), (4, frozenset({1, 3}))], 1, 6, {2: 2, 3: 3}, 2),
        ([(1, frozenset({1, 2, 3})), (4, frozenset({1, 3}))], 1, 6, {2: 2, 3: 5}, 5),
        # two changes at once: all sets back to the last that is safe
        ([(1, ALL), (4, ONE), (5, ALL)], 1, 4, {2: 2}, 2),
        ([(1, ALL), (4, ONE), (5, ALL)], 1, 6, {2: 4}, 4),
    ],
)
def test_safe_position(sets: list[tuple[int, frozenset[int]]], marker: int, durable: int, acknowledged: dict[int, int], safe: int) -> None:
    assert safe_position(sets, marker, 1, durable, acknowledged) == safe


# ---- the index against the entries themselves -----------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3)), max_size=25))
def test_index_is_what_a_reader_of_entries_sees(steps: list[tuple[int, int, int]]) -> None:
    """Batches with any epoch at any place near the end: the index agrees with a plain list of epochs."""
    index = LogIndex(1)
    entries: list[int] = []
    for term, count, back in steps:
        first = max(1, len(entries) + 1 - back)
        previous = entries[first - 2] if first > 1 else 0
        epoch = max(term << 8 | term, previous)
        b = BatchHeader(epoch, first, first + count - 1, previous, max(index.top, epoch))
        if index.accept(b) is Acceptance.APPEND:
            entries[first - 1 :] = [epoch] * count
        assert index.end == len(entries)
        assert [index.epoch_at(s) for s in range(1, index.end + 1)] == entries
