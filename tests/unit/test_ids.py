"""Replication IDs and dedup: exact forms, then the real thing against a log kept as a plain list."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from lrq_ha.errors import IllegalEvent, MalformedInput
from lrq_ha.replication.deduplication import FEW_BYTES, GAP_BYTES, SHARE, Dedup, Numbers, ReplicationId, producer_name
from lrq_ha.replication.positions import RangeSet

pytestmark = pytest.mark.proves("G2")


@pytest.mark.parametrize(
    ("value", "producer", "sequence"),
    [
        (b"orders-app/1", "orders-app", 1),
        (b"a/9223372036854775807", "a", 2**63 - 1),
        ("für:@.#/10".encode(), "für:@.#", 10),
        (b"x" * 128 + b"/7", "x" * 128, 7),
    ],
)
def test_parse_and_format(value: bytes, producer: str, sequence: int) -> None:
    parsed = ReplicationId.parse(value)
    assert parsed == (producer, sequence)
    assert parsed.encode() == value


MALFORMED = [
    b"",
    b"a",
    b"/1",
    b"a/",
    b"a/0",
    b"a/01",
    b"a/-1",
    b"a/+1",
    b"a/1 ",
    b"a/1\n",
    b"a/1_0",
    b"a b/1",
    b"a\x00/1",
    b"a/b/1",
    b"a/9223372036854775808",
    b"a/" + b"9" * 20,
    b"x" * 129 + b"/1",
    "a/١".encode(),  # an Arabic digit one
]


@pytest.mark.parametrize("value", [*MALFORMED, b"\xff/1"])
def test_malformed(value: bytes) -> None:
    with pytest.raises(MalformedInput):
        ReplicationId.parse(value)


@pytest.mark.parametrize("value", [b"", b"a/b", b"a b", b"x" * 129, b"\xff", b"a\x7f"])
def test_malformed_producer_name(value: bytes) -> None:
    with pytest.raises(MalformedInput):
        producer_name(value)


def test_a_repeat_waits_for_the_first_until_that_is_completed() -> None:
    dedup = Dedup()
    dedup.add("p", 1, 100, 11)
    dedup.add("p", 101, 50, 111)  # one run with the first
    dedup.add("q", 1, 5, 161)
    assert dedup.seen("p", 150)
    assert not dedup.seen("p", 151)
    assert not dedup.seen("nobody", 1)
    assert dedup.position_of("p", 150) == 160
    assert dedup.position_of("q", 1) == 161
    dedup.completed(159)
    assert dedup.position_of("p", 149) is None
    assert dedup.position_of("p", 150) == 160
    dedup.completed(100)  # an older word changes nothing
    dedup.completed(160)
    assert dedup.position_of("p", 150) is None
    assert dedup.seen("p", 150)
    assert dedup.position_of("q", 5) == 165
    assert dedup.last("p") == 150
    assert dedup.last("nobody") == 0


def test_a_refused_id_may_be_used_again_and_a_cut_takes_back_both() -> None:
    dedup = Dedup()
    dedup.add("p", 1, 3, 10)  # entries 10, 11, 12
    dedup.forget("p", 2, 13)
    dedup.forget("p", 2, 13)  # known already
    dedup.forget("nobody", 2, 13)
    assert not dedup.seen("p", 2)
    assert dedup.position_of("p", 2) is None
    assert dedup.position_of("p", 3) == 12
    dedup.add("p", 2, 1, 14)
    assert dedup.position_of("p", 2) == 14
    dedup.cut(14)
    assert not dedup.seen("p", 2)
    dedup.cut(13)
    assert dedup.position_of("p", 2) == 11
    dedup.cut(12)
    assert [dedup.seen("p", i) for i in (1, 2, 3)] == [True, True, False]
    dedup.cut(1)
    assert dedup.snapshot() == ()


def use(dedup: Dedup, seq: int, position: int) -> None:
    dedup.add("p", seq, 1, position, dedup.skips("p", seq))


def test_an_ascending_producer_burns_what_it_skips_and_a_cut_takes_that_back() -> None:
    dedup = Dedup()
    use(dedup, 7, 1)
    assert all(dedup.seen("p", n) for n in range(1, 8))
    assert [dedup.position_of("p", n) for n in (6, 7)] == [None, 1], "a burned number has no entry: its repeat is confirmed at once"
    dedup.safe(1)
    use(dedup, 10, 2)
    assert dedup.skips("p", 11) == 0
    dedup.forget("p", 10, 3)
    assert [dedup.seen("p", n) for n in (8, 9, 10)] == [True, True, False]
    assert dedup.skips("p", 11) == 0, "10 was refused, not skipped: its repeat is taken, although 11 may be on its way already"
    dedup.cut(2)
    assert [dedup.seen("p", n) for n in (7, 8, 9, 10)] == [True, False, False, False]
    assert dedup.last("p") == 7
    assert dedup.skips("p", 11) == 3, "it has asked how far it has come, and begins there"


def test_gaps_of_an_ascending_producer_take_nothing() -> None:
    """Micro-batches of a few chunks, numbered batch << 20 | chunk, from any batch on."""
    for start in (0, 1_700_000_000_000):
        dedup = Dedup()
        for batch in range(start, start + 2_000):
            for chunk in range(1, 4):
                seq = batch << 20 | chunk
                assert dedup.may_add("p", seq - dedup.skips("p", seq), LIMIT)
                use(dedup, seq, batch - start + 1)
        assert taken_by(dedup) < 100
        again = Dedup.restored(dedup.snapshot())
        assert again.last("p") == start + 1_999 << 20 | 3
        assert again.seen("p", start + 1_998 << 20 | 9)
        assert again.skips("p", start + 2_000 << 20 | 1) == (1 << 20) - 3


def test_what_is_safe_is_not_cut() -> None:
    dedup = Dedup()
    dedup.add("p", 1, 10, 1)
    dedup.forget("p", 10, 11)
    dedup.forget("p", 9, 12)
    dedup.safe(11)
    dedup.safe(3)
    with pytest.raises(IllegalEvent):
        dedup.cut(11)
    dedup.cut(12)
    assert dedup.seen("p", 9)
    assert not dedup.seen("p", 10)
    dedup.forget("p", 9, 11)  # safe already: nothing to remember
    dedup.cut(12)
    assert not dedup.seen("p", 9)


def test_forgetting_a_completed_id_is_taken_back_too() -> None:
    dedup = Dedup()
    dedup.add("p", 1, 2, 1)
    dedup.completed(2)
    dedup.forget("p", 1, 3)
    assert not dedup.seen("p", 1)
    dedup.cut(3)
    assert dedup.seen("p", 1)
    assert dedup.position_of("p", 1) is None


def test_what_a_refused_entry_must_name() -> None:
    dedup = Dedup()
    dedup.add("p", 1, 10, 101)
    dedup.add("q", 7, 10, 111)
    dedup.add("p", 11, 10, 131)
    assert dedup.ids_of(105, 131) == [("p", 5, 10), ("q", 7, 16), ("p", 11, 11)]
    assert dedup.ids_of(121, 130) == []
    assert dedup.ids_of(1, 101) == [("p", 1, 1)]
    assert dedup.ids_of(150, 160) == []


def test_what_is_completed_apart_from_the_rest_is_not_kept() -> None:
    dedup = Dedup()
    dedup.add("p", 1, 10, 101)
    dedup.add("q", 1, 1, 111)
    dedup.add("p", 11, 10, 112)
    dedup.safe(121)
    dedup.completed_apart(105, 106)  # within a run
    dedup.completed_apart(110, 113)  # the end of one, all of another, the beginning of a third
    assert dedup.ids_of(1, 200) == [("p", 1, 4), ("p", 7, 9), ("p", 13, 20)]
    assert [dedup.position_of("p", n) for n in (4, 5, 7, 10, 12, 13)] == [104, None, 107, None, None, 114]
    dedup.completed(108)
    assert dedup.ids_of(1, 200) == [("p", 9, 9), ("p", 13, 20)]
    assert all(dedup.seen("p", n) for n in range(1, 21))


def strewn_open(count: int) -> Dedup:
    """So many IDs of two producers, in turns: each is a run of its own."""
    dedup = Dedup()
    for n in range(1, count + 1):
        dedup.add("pq"[n % 2], n, 1, n)
    return dedup


def steps(what: Callable[[], object]) -> int:
    """Lines of Python that run: what a loop over all costs shows in them, and a busy machine does not."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        what()
    finally:
        sys.settrace(before)
    return count


def test_many_are_completed_at_once_in_steps_that_grow_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the log has been read: what was done before then is known when all is read.

    None is unlinked by itself: each removal from a list of all moves what stands behind it, so the time would grow with the square.
    """
    unlinked = MagicMock()
    monkeypatch.setattr(Dedup, "_unlink", unlinked)
    few, many = (steps(partial(strewn_open(count).completed, count)) for count in (5_000, 50_000))
    assert many <= 10 * few
    unlinked.assert_not_called()


def test_one_is_forgotten_without_a_look_at_all() -> None:
    def forget(count: int) -> int:
        dedup = strewn_open(count)

        def last() -> None:
            for n in range(count - 300, count):
                dedup.forget("pq"[n % 2], n, 100_001)

        return steps(last)

    assert forget(100_000) < 2 * forget(5_000), "of 20 times as many"


def test_a_checkpoint_and_the_log_read_again_over_it() -> None:
    dedup = Dedup()
    dedup.add("p", 1, 10, 1)
    dedup.add("q", 5, 1, 11)
    dedup.forget("q", 5, 12)
    again = Dedup.restored(dedup.snapshot())
    assert again.snapshot() == dedup.snapshot()
    assert [producer for producer, _, _ in again.snapshot()] == ["p"]
    assert again.position_of("p", 3) is None
    again.completed(4)
    again.add("p", 1, 10, 1)  # entries 1 to 4 are behind R
    again.add("p", 1, 4, 1)
    assert again.position_of("p", 4) is None
    assert again.position_of("p", 5) == 5
    assert again.snapshot() == dedup.snapshot()


def test_the_number_of_producers_is_bounded() -> None:
    dedup = Dedup()
    assert dedup.has_room("p", 1)
    dedup.add("p", 1, 1, 1)
    assert dedup.has_room("p", 1)
    assert not dedup.has_room("q", 1)
    assert list(dedup.producers()) == ["p"]
    dedup.add("q", 1, 1, 2)  # the log is the law
    assert dedup.has_room("q", 1)


LIMIT = 1 << 20
CHUNK = 1 << 16


def number(dedup: Dedup, producer: str, ids: Iterable[int], limit: int = LIMIT) -> int:
    """How many of these IDs are taken, one after the other, before one is refused."""
    taken = 0
    for seq in ids:
        if not dedup.may_add(producer, seq, limit):
            return taken
        dedup.add(producer, seq, 1, 1)
        taken += 1
    return taken


def taken_by(dedup: Dedup) -> int:
    """Bytes in a checkpoint, apart from names."""
    return sum(9 * len(ranges) + len(others) for _, ranges, others in dedup.snapshot())


def strewn(seed: int, count: int = 100_000) -> list[int]:
    return random.Random(seed).choices(range(1, 2**63), k=count)


def test_numbers_of_which_every_second_goes_elsewhere_go_on() -> None:
    """A producer whose messages go to a replicated queue and to another one in turns leaves a gap each time."""
    dedup = Dedup()
    assert number(dedup, "p", range(1, 1_000_000, 2)) == 500_000
    assert taken_by(dedup) < 200_000
    again = Dedup.restored(dedup.snapshot())
    assert again.seen("p", 999_999)
    assert not again.seen("p", 999_998)
    assert number(again, "p", range(1_000_001, 1_100_000, 2)) == 50_000


@pytest.mark.parametrize("start", [1, CHUNK, 2**32 - 3 * CHUNK - 5, 1_700_000_000_000_000_000])
def test_consecutive_numbers_take_nothing(start: int) -> None:
    """However many they are, and whether or not they come in their order."""
    end = start + 12 * CHUNK
    in_order, swapped = Dedup(), Dedup()
    for first in range(start, end, 1000):
        in_order.add("p", first, 1000, 1)
    for first in range(start, end, 2000):
        swapped.add("p", first + 1000, 1000, 1)
        swapped.add("p", first, 1000, 1)
    assert number(in_order, "p", range(in_order.last("p") + 1, in_order.last("p") + 1001)) == 1000
    for dedup in (in_order, swapped):
        dedup.add("p", dedup.last("p") + 1, 10**12, 1)
        assert taken_by(dedup) < 100
        assert dedup.seen("p", start)
        assert dedup.seen("p", end + 10**12 - 1)
        assert not dedup.seen("p", start - 1)


def test_numbers_that_lie_far_apart_are_bounded() -> None:
    """Of one producer, and of all; who numbers consecutively is never refused, whatever others have done."""
    dedup = Dedup()
    assert number(dedup, "honest", range(1, 1_000)) == 999
    taken = number(dedup, "wide", strewn(1))
    assert LIMIT // SHARE // GAP_BYTES <= taken < 20_000
    last = dedup.last("wide")
    assert not dedup.may_add("wide", last + 2, LIMIT)
    assert number(dedup, "wide", range(last + 1, last + 1_000)) == 999
    assert dedup.may_add("wide", last - 1, LIMIT)  # goes on the other way
    for n in range(SHARE):
        number(dedup, f"many-{n}", strewn(n))
    for n in range(100):
        assert number(dedup, f"late-{n}", strewn(n)) < 20_000
    assert LIMIT // 2 < taken_by(dedup) < LIMIT + 100 * 2 * FEW_BYTES
    assert number(dedup, "newcomer", range(1, 200_000)) == 199_999
    assert number(dedup, "honest", range(1_000, 2_000)) == 1_000
    assert number(dedup, "wide", range(last + 1_000, last + 2_000)) == 1_000
    assert number(dedup, "honest", strewn(2)) < 1_000
    again = Dedup.restored(dedup.snapshot())
    assert not again.may_add("wide", last + 5_000, LIMIT)
    assert again.may_add("wide", last + 2_000, LIMIT)


def test_gaps_that_are_closed_leave_room_again() -> None:
    dedup = Dedup()
    wide = range(CHUNK, 2**62, 10 * CHUNK)
    taken = number(dedup, "p", wide)
    for seq in wide[1 : taken // 2]:
        dedup.add("p", seq - 10 * CHUNK + 1, 10 * CHUNK - 1, 1)
    dedup.snapshot()
    assert dedup.may_leave("p", taken // 8, LIMIT)


def test_gaps_that_refusals_leave_are_bounded_too() -> None:
    """Nobody is asked when the broker refuses what has been published consecutively. Such a producer has to use these IDs first."""
    dedup = Dedup()
    refused = range(CHUNK, 30_000 * CHUNK, CHUNK)
    dedup.add("p", 1, 40_000 * CHUNK, 1)
    dedup.completed(40_000 * CHUNK)
    for seq in refused:
        dedup.forget("p", seq, 40_000 * CHUNK + seq)
    last = dedup.last("p")
    assert not dedup.may_add("p", last + 1, LIMIT)
    assert number(dedup, "p", refused) == len(refused)
    dedup.snapshot()
    assert number(dedup, "p", [last + 1, last + 3]) == 2


def test_a_producer_that_has_been_refused_everything_goes_on() -> None:
    """It has no gaps: nothing of it is in a checkpoint."""
    dedup = Dedup()
    for seq in range(1, 90_000):
        assert dedup.may_add("p", seq, 8 * LIMIT)
        dedup.add("p", seq, 1, 2 * seq - 1)
        dedup.forget("p", seq, 2 * seq)
        dedup.safe(2 * seq)
        dedup.completed(2 * seq)
        if seq % 2_000 == 0:
            assert dedup.snapshot() == ()


MEMBERS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 3 * CHUNK + 9), st.sampled_from([1, 2, 9, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])),
    max_size=12,
)


@given(MEMBERS, st.sampled_from([1, CHUNK - 4, 2**32 - CHUNK - 3, 2**63 - 6 * CHUNK]))
@example([(True, 0, 1), (True, 0, 9)], 2**32 - CHUNK - 3)
@settings(max_examples=150, deadline=None)
def test_numbers_against_a_set(actions: list[tuple[bool, int, int]], base: int) -> None:
    numbers, reference = Numbers(), RangeSet()
    for adds, at, count in actions:
        first, last = base + at, base + at + count - 1
        if adds:
            assert numbers.touches(first, first) == reference.intersects(first - 1, first + 1)
            numbers.add(first, last)
            reference.add(first, last)
        else:
            numbers.remove(first, last)
            reference.remove(first, last)
    edges = {base + n * CHUNK for n in range(7)}.union(*reference)
    asked = [n for edge in edges for n in (edge - 1, edge, edge + 1)]
    assert [n in numbers for n in asked] == [n in reference for n in asked]
    assert bool(numbers) == bool(reference)
    assert numbers.last == (reference.last if reference else 0)
    form = numbers.measure()
    assert Numbers.restored(*form).measure() == form
    ranges, others = Numbers.restored(reference.flat(), b"").measure()
    assert ranges == form[0], "the form says what is in the set, not how it came there"
    assert bool(others) == bool(form[1])
    if others:  # of a container, a run that takes as much as the list stays a list
        assert BitMap64.deserialize(others) == BitMap64.deserialize(form[1])
        assert abs(len(others) - len(form[1])) < 64


def test_a_checkpoint_with_ranges_only_is_read() -> None:
    dedup = Dedup.restored([("p", (1, 10**10, 10**10 + 2, 10**10 + 2), b""), ("q", (7, 9), b"")])
    assert dedup.last("p") == 10**10 + 2
    assert [dedup.seen("p", 10**10 + i) for i in range(4)] == [True, False, True, False]
    assert [dedup.seen("q", i) for i in range(6, 11)] == [False, True, True, True, False]
    assert taken_by(dedup) < 200


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("pq"), st.integers(1, 5)),
        st.tuples(st.just("ascend"), st.sampled_from("pq"), st.integers(0, 4)),
        st.tuples(st.just("forget"), st.sampled_from("pq"), st.integers(1, 30)),
        st.tuples(st.just("safe"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("completed"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("apart"), st.integers(0, 12), st.integers(0, 6)),
        st.tuples(st.just("cut"), st.integers(0, 8), st.just(0)),
    ),
    max_size=60,
)


@given(ACTIONS)
@example([("add", "p", 1), ("safe", 1, 0), ("apart", 0, 0), ("forget", "p", 1), ("cut", 1, 0)])
@settings(max_examples=400, deadline=None)
def test_against_a_log(actions: list[tuple[str, str | int, int]]) -> None:
    """The log is a list of ('add', producer, id) and ('forget', producer, id); everything follows from it, but for the numbers that entries
    skipped."""
    log: list[tuple[str, str, int]] = []
    skipped: dict[int, tuple[str, set[int]]] = {}  # by entry
    dedup = Dedup()
    safe = completed = 0
    apart: set[int] = set()
    done_when_forgotten: set[int] = set()

    def where(producer: str) -> dict[int, int]:
        known: dict[int, int] = {}
        for position, (kind, name, number) in enumerate(log, 1):
            if name == producer and kind == "add":
                known[number] = position
            elif name == producer:
                known.pop(number, None)
        return known

    def burned(producer: str) -> set[int]:
        return {number for name, numbers in skipped.values() if name == producer for number in numbers}

    for kind, x, count in actions:
        if kind == "ascend":
            known = where(str(x))
            number = max((*known, *burned(str(x))), default=0) + 1 + count
            gap = dedup.skips(str(x), number)
            assert gap <= count
            dedup.add(str(x), number, 1, len(log) + 1, gap)
            log.append(("add", str(x), number))
            skipped[len(log)] = str(x), set(range(number - gap, number))
        elif kind == "add":
            known = {**where(str(x)), **dict.fromkeys(burned(str(x)), 0)}
            first = next(i for i in range(1, 200) if not any(i + j in known for j in range(count)))
            dedup.add(str(x), first, count, len(log) + 1)
            log += [("add", str(x), first + j) for j in range(count)]
        elif kind == "forget":
            if count in burned(str(x)):
                continue  # an entry that is refused has a number
            done_when_forgotten |= {where(str(x)).get(count, 0)} & apart
            log.append(("forget", str(x), count))
            dedup.forget(str(x), count, len(log))
        elif kind == "safe":
            safe = min(len(log), safe + int(x))
            dedup.safe(safe)
        elif kind == "completed":
            completed = min(safe, completed + int(x))
            dedup.completed(completed)
        elif kind == "apart":
            first, last = completed + 1 + int(x), min(safe, completed + 1 + int(x) + count)
            if first <= last:
                dedup.completed_apart(first, last)
                apart.update(range(first, last + 1))
        else:
            cut = max(safe + 1, len(log) + 1 - int(x))
            dedup.cut(cut)
            before = {*where("p").values(), *where("q").values()}
            del log[cut - 1 :]
            skipped = {at: each for at, each in skipped.items() if at < cut}
            back = {*where("p").values(), *where("q").values()} - before
            apart -= back - done_when_forgotten  # an ID that is back is looked at again, unless it was done before
        for producer in "pq":
            known = where(producer)
            numbers = known.keys() | burned(producer)
            assert {i for i in range(1, 400) if dedup.seen(producer, i)} == numbers
            assert dedup.last(producer) == max(numbers, default=0)
            for number in range(1, 80):
                position = known.get(number, 0)
                assert dedup.position_of(producer, number) == (position if position > completed and position not in apart else None)
        again = Dedup.restored(dedup.snapshot())
        assert again.snapshot() == dedup.snapshot()
        for producer in "pq":
            assert all(again.seen(producer, i) == dedup.seen(producer, i) for i in range(1, 80))
            assert again.last(producer) == dedup.last(producer)
        assert sum(last - first + 1 for _, first, last in dedup.ids_of(completed + 1, len(log))) == sum(
            position > completed and position not in apart for producer in "pq" for position in where(producer).values()
        )
