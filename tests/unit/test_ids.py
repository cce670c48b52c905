"""Replication IDs and dedup: exact forms, then the real thing against a log kept as a plain list."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrq_ha.replication.errors import IllegalEvent, MalformedInput
from lrq_ha.replication.ids import FEW_GAPS, Dedup, ReplicationId, producer_name


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


def test_a_transaction_holds_several_ids_at_one_position() -> None:
    dedup = Dedup()
    dedup.add("p", 1, 1, 5)
    dedup.add("p", 2, 1, 5)
    dedup.add("q", 1, 1, 5)
    assert dedup.position_of("p", 1) == dedup.position_of("p", 2) == 5
    assert dedup.ids_of(5, 5) == [("p", 1, 1), ("p", 2, 2), ("q", 1, 1)]
    dedup.cut(5)
    assert not any(dedup.seen(*i) for i in (("p", 1), ("p", 2), ("q", 1)))


def test_what_a_refused_entry_must_name() -> None:
    dedup = Dedup()
    dedup.add("p", 1, 10, 101)
    dedup.add("q", 7, 10, 111)
    dedup.add("p", 11, 10, 131)
    assert dedup.ids_of(105, 131) == [("p", 5, 10), ("q", 7, 16), ("p", 11, 11)]
    assert dedup.ids_of(121, 130) == []
    assert dedup.ids_of(1, 101) == [("p", 1, 1)]
    assert dedup.ids_of(150, 160) == []


def test_a_checkpoint_and_the_log_read_again_over_it() -> None:
    dedup = Dedup()
    dedup.add("p", 1, 10, 1)
    dedup.add("q", 5, 1, 11)
    dedup.forget("q", 5, 12)
    again = Dedup.restored(dedup.snapshot())
    assert again.snapshot() == (("p", (1, 10)),)
    assert again.position_of("p", 3) is None
    again.completed(4)
    again.add("p", 1, 10, 1)  # entries 1 to 4 are behind R
    again.add("p", 1, 4, 1)
    assert again.position_of("p", 4) is None
    assert again.position_of("p", 5) == 5
    assert again.snapshot() == (("p", (1, 10)),)


def test_the_number_of_producers_is_bounded() -> None:
    dedup = Dedup()
    assert dedup.has_room("p", 1)
    dedup.add("p", 1, 1, 1)
    assert dedup.has_room("p", 1)
    assert not dedup.has_room("q", 1)
    assert list(dedup.producers()) == ["p"]
    dedup.add("q", 1, 1, 2)  # the log is the law
    assert dedup.has_room("q", 1)


def number(dedup: Dedup, producer: str, ids: range, limit: int) -> int:
    """How many of these IDs are taken, one after the other, before one is refused."""
    for taken, seq in enumerate(ids):
        if not dedup.may_add(producer, seq, limit):
            return taken
        dedup.add(producer, seq, 1, 1)
    return len(ids)


def test_gaps_are_bounded() -> None:
    """Of one producer, and of all; who numbers consecutively is never refused, whatever others have done."""
    limit = 100
    dedup = Dedup()
    assert number(dedup, "honest", range(1, 1_000), limit) == 999
    assert number(dedup, "odd", range(1, 1_000, 2), limit) == 11  # ten gaps
    assert number(dedup, "down", range(10_000, 1, -7), limit) == 11
    assert dedup.gaps_left("odd", limit) == dedup.gaps_left("down", limit) == 0
    assert dedup.may_add("odd", 22, limit)  # goes on with its last
    assert dedup.may_add("odd", 2, limit)  # closes a gap
    assert not dedup.may_add("odd", 23, limit)
    for n in range(50):
        number(dedup, f"many-{n}", range(1, 1_000, 2), limit)
    gaps = sum(len(ids) // 2 - 1 for _, ids in dedup.snapshot())
    assert limit <= gaps <= limit + 50 * FEW_GAPS
    assert number(dedup, "newcomer", range(1, 1_000), limit) == 999
    assert number(dedup, "honest", range(1_000, 2_000), limit) == 1_000
    assert number(dedup, "honest", range(3_000, 4_000, 2), limit) == FEW_GAPS
    again = Dedup.restored(dedup.snapshot())
    assert not again.may_add("honest", 5_000, limit)


def test_gaps_that_refusals_leave_are_bounded_too() -> None:
    """Nobody is asked when the broker refuses what has been published consecutively. Such a producer has to use these IDs first."""
    limit = 100
    dedup = Dedup()
    dedup.add("p", 1, 40, 1)
    for seq in range(2, 40, 2):
        dedup.forget("p", seq, 40 + seq)
    assert dedup.gaps_left("p", limit) == 10 - 19
    assert not dedup.may_add("p", 41, limit)
    for seq in range(2, 20, 2):
        assert dedup.may_add("p", seq, limit)
        dedup.add("p", seq, 1, 100 + seq)
    assert dedup.gaps_left("p", limit) == 0
    assert dedup.may_add("p", 41, limit)
    assert not dedup.may_add("p", 43, limit)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("pq"), st.integers(1, 5)),
        st.tuples(st.just("forget"), st.sampled_from("pq"), st.integers(1, 30)),
        st.tuples(st.just("safe"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("completed"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("cut"), st.integers(0, 8), st.just(0)),
    ),
    max_size=60,
)


@given(ACTIONS)
@settings(max_examples=400, deadline=None)
def test_against_a_log(actions: list[tuple[str, str | int, int]]) -> None:
    """The log is a list of ('add', producer, id) and ('forget', producer, id); everything follows from it."""
    log: list[tuple[str, str, int]] = []
    dedup = Dedup()
    safe = completed = 0

    def where(producer: str) -> dict[int, int]:
        known: dict[int, int] = {}
        for position, (kind, name, number) in enumerate(log, 1):
            if name == producer and kind == "add":
                known[number] = position
            elif name == producer:
                known.pop(number, None)
        return known

    for kind, x, count in actions:
        if kind == "add":
            known = where(str(x))
            first = next(i for i in range(1, 200) if not any(i + j in known for j in range(count)))
            dedup.add(str(x), first, count, len(log) + 1)
            log += [("add", str(x), first + j) for j in range(count)]
        elif kind == "forget":
            log.append(("forget", str(x), count))
            dedup.forget(str(x), count, len(log))
        elif kind == "safe":
            safe = min(len(log), safe + int(x))
            dedup.safe(safe)
        elif kind == "completed":
            completed = min(safe, completed + int(x))
            dedup.completed(completed)
        else:
            cut = max(safe + 1, len(log) + 1 - int(x))
            dedup.cut(cut)
            del log[cut - 1 :]
        for producer in "pq":
            known = where(producer)
            assert {i for i in range(1, 80) if dedup.seen(producer, i)} == set(known)
            assert dedup.last(producer) == max(known, default=0)
            for number in range(1, 80):
                position = known.get(number, 0)
                assert dedup.position_of(producer, number) == (position if position > completed else None)
        again = Dedup.restored(dedup.snapshot())
        assert again.snapshot() == dedup.snapshot()
        for producer in "pq":
            assert again.gaps_left(producer, 10) == dedup.gaps_left(producer, 10)
        assert sum(last - first + 1 for _, first, last in dedup.ids_of(completed + 1, len(log))) == sum(
            position > completed for producer in "pq" for position in where(producer).values()
        )
