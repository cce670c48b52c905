"""Confirms of one channel: whatever the broker answers, each publish of the client is answered once and under its own number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_plugin.channels import Channel, Closing, Confirms, Delivery, Settled, Tags, Transaction
from lrq_ha.replication.errors import IllegalEvent


def selected() -> Confirms:
    confirms = Confirms()
    confirms.selected = True
    return confirms


def flat(settled: list[Settled]) -> list[tuple[int, int]]:
    """(client tag, log sequence) of each publish."""
    return [(run.client_tag + i if run.client_tag else 0, run.sequence + i if run.sequence else 0) for run in settled for i in range(run.publishes)]


def test_a_multiple_ack_settles_runs_in_order() -> None:
    confirms = selected()
    confirms.forwarded(3, 10)
    confirms.forwarded(1, 0)
    confirms.forwarded(2, 20)
    assert flat(confirms.answered(5, True)) == [(1, 10), (2, 11), (3, 12), (4, 0), (5, 20)]
    assert confirms.open
    assert flat(confirms.answered(0, True)) == [(6, 21)]
    assert not confirms.open


def test_single_acks_out_of_order() -> None:
    confirms = selected()
    confirms.forwarded(5, 10, "p", 100)
    assert confirms.answered(3, False) == [Settled(3, 1, 12, "p", 102)]
    assert confirms.answered(1, False) == [Settled(1, 1, 10, "p", 100)]
    assert confirms.answered(5, True) == [Settled(2, 1, 11, "p", 101), Settled(4, 2, 13, "p", 103)]


def test_an_answer_to_nothing_is_an_error() -> None:
    confirms = selected()
    confirms.forwarded(2, 1)
    confirms.answered(1, False)
    for tag in (1, 3):
        with pytest.raises(IllegalEvent, match=f"publish {tag}"):
            confirms.answered(tag, False)


def test_publishes_that_end_here_have_numbers_of_the_client_only() -> None:
    confirms = selected()
    confirms.forwarded(1, 1)
    assert confirms.ended_here() == 2
    confirms.forwarded(1, 3)
    assert 2 in confirms.local
    assert len(confirms.local) == 1
    assert flat(confirms.answered(2, True)) == [(1, 1), (3, 3)]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30)), max_size=60))
def test_tags_ascend_and_go_in_any_order(steps: list[tuple[bool, int]]) -> None:
    tags, known, last = Tags(), set(), 0
    for adds, tag in steps:
        if adds:
            last += tag
            tags.add(last)
            known.add(last)
        else:
            tags.discard(tag)
            known.discard(tag)
        assert len(tags) == len(known)
        assert (tag in tags) == (tag in known)
        assert not known or tags.first == min(known)


def test_publishes_before_confirm_select_have_no_number() -> None:
    confirms = Confirms()
    confirms.forwarded(2, 1)
    assert confirms.ended_here() == 0
    confirms.selected = True
    confirms.forwarded(2, 3)
    assert flat(confirms.answered(4, True)) == [(0, 1), (0, 2), (1, 3), (2, 4)]


def test_what_is_abandoned_is_open_no_more() -> None:
    confirms = selected()
    confirms.forwarded(4, 1)
    confirms.answered(2, False)
    assert flat(confirms.abandon()) == [(1, 1), (3, 3), (4, 4)]
    assert not confirms.open
    assert not confirms


@given(st.data())
def test_each_publish_is_settled_exactly_once(data: st.DataObject) -> None:
    confirms = Confirms()
    expected: dict[int, tuple[int, int]] = {}  # by broker tag
    client = sequence = broker = 0
    for kind in data.draw(st.lists(st.sampled_from(["select", "forward", "pass", "local"]), max_size=30)):
        if kind == "select":
            confirms.selected = True
        elif kind == "local":
            tag = confirms.ended_here()
            client += confirms.selected
            assert tag == (client if confirms.selected else 0)
        else:
            count = data.draw(st.integers(1, 5)) if kind == "forward" else 1
            confirms.forwarded(count, sequence + 1 if kind == "forward" else 0)
            for _ in range(count):
                broker += 1
                client += confirms.selected
                sequence += kind == "forward"
                expected[broker] = (client if confirms.selected else 0, sequence if kind == "forward" else 0)
    while expected:
        tag = data.draw(st.sampled_from(sorted(expected)))
        multiple = data.draw(st.booleans())
        due = [t for t in sorted(expected) if t <= tag] if multiple else [tag]
        assert flat(confirms.answered(tag, multiple)) == [expected.pop(t) for t in due]
    assert not confirms.open


def delivery(sequence: int) -> Delivery:
    return Delivery(("/", "q"), sequence, ())


def test_acks_take_out_what_they_cover() -> None:
    channel = Channel(1)
    channel.deliveries = {tag: delivery(tag * 10) for tag in (2, 3, 5, 8)}
    assert [d.sequence for d in channel.take_out(3, False).values()] == [30]
    assert channel.take_out(3, False) == {}
    assert [d.sequence for d in channel.take_out(5, True).values()] == [20, 50]
    assert list(channel.take_out(0, True)) == [8]


def test_what_the_log_knows_nothing_of_is_covered_too() -> None:
    channel = Channel(1)
    channel.others |= {1, 4, 6}
    assert channel.outstanding() == 6
    assert channel.outstanding(5) == 4
    assert channel.take_others(4, False) == {4}
    assert channel.take_others(4, False) == set()
    assert channel.take_others(5, True) == {1}
    assert channel.take_others(0, True) == {6}
    assert channel.outstanding() == 0


def test_an_ack_is_taken_for_what_the_client_holds() -> None:
    channel = Channel(1, deliveries={3: delivery(30)}, others={5})
    assert [tag for tag in range(7) if channel.holds(tag, False)] == [3, 5]
    assert [tag for tag in range(7) if channel.holds(tag, True)] == [0, 3, 5]


def test_acks_wait_for_a_commit_at_the_broker_only_on_the_channel_that_has_it() -> None:
    assert not Channel(1).acks_wait
    assert Channel(1, tx=Transaction()).acks_wait
    assert not Channel(1, tx=Transaction(), second=65_535).acks_wait


def test_visits_are_counted_by_queue() -> None:
    assert delivery(1).visit == 0
    assert Delivery(("/", "q"), 1, (("q", 3), ("other", 1))).visit == 3
    assert Delivery(("/", "q"), 1, (("other", 1),)).visit == 0


@pytest.mark.parametrize(
    ("state", "closing", "speaks"),
    [
        (Closing.NO, False, True),
        (Closing.CLIENT, True, True),
        (Closing.DOOR, True, True),
        (Closing.TOLD, True, False),
        (Closing.BROKER, True, False),
    ],
)
def test_who_still_speaks_while_a_channel_closes(state: Closing, closing: bool, speaks: bool) -> None:
    channel = Channel(1, state=state)
    assert (channel.closing, channel.speaks) == (closing, speaks)


def test_an_ack_of_several_after_a_rollback_covers_what_the_transaction_had_settled() -> None:
    channel = Channel(1)
    channel.deliveries = {tag: Delivery(("/", "q"), 100 + tag, ()) for tag in range(1, 7)}
    tx = Transaction()
    tx.settled = channel.take_out(5, False) | channel.take_out(2, True)
    assert list(channel.deliveries) == [3, 4, 6]
    channel.give_back(tx)
    assert list(channel.take_out(5, True)) == [1, 2, 3, 4, 5]
    assert list(channel.take_out(0, True)) == [6]


def test_an_ack_of_several_costs_what_it_covers() -> None:
    """With everything that a consumer without a prefetch limit holds, each looked at all of it."""

    class Counted(int):
        looks = 0

        def __le__(self, other: int) -> bool:
            Counted.looks += 1
            return int(self) <= other

    channel = Channel(1)
    channel.deliveries = {Counted(tag): Delivery(("/", "q"), tag, ()) for tag in range(1, 1_001)}
    for tag in range(10, 1_001, 10):
        assert len(channel.take_out(tag, True)) == 10
    assert Counted.looks < 1_200


def test_an_ack_of_one_does_not_look_at_all_that_are_older() -> None:
    """Publishes of one channel alternately to what confirms at once and to what confirms later: of the latter, each is a run of its own."""

    class Counted(int):
        looks = 0

        def __add__(self, other: int) -> Counted:
            return Counted(int(self) + other)

        def __eq__(self, other: object) -> bool:
            Counted.looks += 1
            return int(self) == other

        def __ge__(self, other: int) -> bool:
            Counted.looks += 1
            return int(self) >= other

        def __le__(self, other: int) -> bool:
            Counted.looks += 1
            return int(self) <= other

        __hash__ = int.__hash__

    confirms, many = selected(), 1_000
    confirms.forwarded(2 * many, 1)
    for tag in range(2, 2 * many + 1, 2):
        assert flat(confirms.answered(Counted(tag), False)) == [(tag, tag)]
    assert Counted.looks < 40 * many
    assert flat(confirms.answered(2 * many, True)) == [(tag, tag) for tag in range(1, 2 * many, 2)]
    assert not confirms.open


def test_runs_that_are_answered_are_not_kept() -> None:
    confirms = selected()
    for sequence in range(1, 1_001):
        confirms.forwarded(1, sequence)
    for tag in range(1, 1_001):
        assert confirms.oldest == tag
        assert flat(confirms.answered(tag, tag % 3 == 0)) == [(tag, tag)]
        assert len(confirms._runs) <= max(1, 2 * (1_000 - tag))
    assert not confirms.open
    assert not confirms.oldest
