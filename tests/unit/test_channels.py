"""Confirms of one channel: whatever the broker answers, each publish of the client is answered once and under its own number."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_plugin.log.messages import Delivery, Settled
from broker_plugin.session.channel import ChannelState, ClientChannel
from broker_plugin.session.confirms import Confirms, Tags
from broker_plugin.session.transaction import Transaction
from broker_plugin.session.unacked import Unacked
from lrq_ha.errors import IllegalEvent


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
    channel = ClientChannel(1, deliveries=Unacked((tag, delivery(tag * 10)) for tag in (2, 3, 5, 8)))
    assert [d.sequence for d in channel.settle(3, False)] == [30]
    assert channel.settle(3, False) == []
    assert [d.sequence for d in channel.settle(5, True)] == [20, 50]
    assert [d.sequence for d in channel.settle(0, True)] == [80]


def test_what_the_log_knows_nothing_of_is_covered_too() -> None:
    channel = ClientChannel(1, deliveries=Unacked({1: None, 2: delivery(20), 4: None, 6: None}))
    assert [d.sequence for d in channel.held] == [20]
    assert channel.outstanding() == 6
    assert channel.outstanding(5) == 4
    assert channel.settle(4, False) == []
    assert channel.outstanding(5) == 2
    assert [d.sequence for d in channel.settle(5, True)] == [20]
    assert list(channel.deliveries) == [6]
    assert channel.settle(0, True) == []
    assert channel.outstanding() == 0


def test_an_ack_is_taken_for_what_the_client_holds() -> None:
    channel = ClientChannel(1, deliveries=Unacked({3: delivery(30), 5: None}))
    assert [tag for tag in range(7) if channel.holds(tag, False)] == [3, 5]
    assert [tag for tag in range(7) if channel.holds(tag, True)] == [0, 3, 5]


def test_visits_are_counted_by_queue() -> None:
    assert delivery(1).visit == 0
    assert Delivery(("/", "q"), 1, (("q", 3), ("other", 1))).visit == 3
    assert Delivery(("/", "q"), 1, (("other", 1),)).visit == 0


@pytest.mark.parametrize(
    ("state", "closing", "speaks"),
    [
        (ChannelState.NO, False, True),
        (ChannelState.CLIENT, True, True),
        (ChannelState.DOOR, True, True),
        (ChannelState.TOLD, True, False),
        (ChannelState.BROKER, True, False),
    ],
)
def test_who_still_speaks_while_a_channel_closes(state: ChannelState, closing: bool, speaks: bool) -> None:
    channel = ClientChannel(1, state=state)
    assert (channel.closing, channel.speaks) == (closing, speaks)


steps = st.one_of(
    st.tuples(st.just("give"), st.booleans()),
    st.tuples(st.sampled_from(["one", "several"]), st.integers(0, 50)),
    st.tuples(st.sampled_from(["all", "rollback", "commit", "recover"]), st.none()),
)


@given(st.lists(steps, max_size=80))
def test_what_a_transaction_settles_is_held_until_its_commit(steps: list[tuple[str, int]]) -> None:
    """Against what a channel would be that took out what a transaction settles, and put it back with a rollback."""
    channel = ClientChannel(1, tx=Transaction())
    given, open_tags, settled = 0, list[int](), set[int]()
    positions = set[int]()
    for step, value in steps:
        tx = channel.tx
        assert tx is not None
        if step == "give":
            given += 1
            open_tags.append(given)
            positions |= {given} if value else set()
            channel.deliveries[given] = delivery(given) if value else None
        elif step in ("one", "several", "all"):
            if step == "all":
                value = channel.outstanding()
                assert value == max(open_tags, default=0)
            assert channel.holds(value, False) == (value in open_tags)
            if value not in open_tags:
                continue
            tx.settle(value, step != "one")
            covered = {tag for tag in open_tags if (tag == value if step == "one" else tag <= value)}
            settled |= covered
            open_tags = [tag for tag in open_tags if tag not in covered]
        elif step == "recover":
            assert [d.sequence for d in channel.recover()] == [tag for tag in open_tags if tag in positions]
            open_tags.clear()
        else:
            if step == "commit":
                for tag in settled:
                    assert [d.sequence for d in channel.settle(tag, False)] == [tag] * (tag in positions)
            else:
                open_tags = sorted({*open_tags, *settled})
            settled.clear()
            channel.tx = tx.over()
        assert sorted(channel.unsettled()) == open_tags
        assert [d.sequence for d in channel.held] == sorted(positions & {*open_tags, *settled})


class Counted(int):
    """A tag that counts how often one is looked at."""

    looks = 0

    def __le__(self, other: int) -> bool:
        Counted.looks += 1
        return int(self) <= other

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return int(self) == other

    def __hash__(self) -> int:
        Counted.looks += 1
        return int(self)


@pytest.mark.parametrize("what", [delivery(1), None])
def test_an_ack_of_several_costs_what_it_covers(what: Delivery | None) -> None:
    """With everything that a consumer without a prefetch limit holds, each looked at all of it."""
    channel = ClientChannel(1, deliveries=Unacked((Counted(tag), what) for tag in range(1, 1_001)))
    Counted.looks = 0
    for tag in range(10, 1_001, 10):
        assert len(channel.settle(tag, True)) == (10 if what else 0)
    assert not channel.deliveries
    assert Counted.looks < 6_000


def test_in_a_transaction_too_an_ack_costs_what_it_covers() -> None:
    """So does what takes it back, however often: acks of everything, recover and rollback looked at all that was held."""
    channel = ClientChannel(1, deliveries=Unacked((Counted(tag), None) for tag in range(1, 1_001)), tx=Transaction())
    assert channel.tx is not None
    Counted.looks = 0
    for _ in range(100):
        channel.tx.settle(1_000, True)
        channel.tx = channel.tx.over()
    for often in channel.recover, lambda: channel.tx and channel.tx.settle(channel.outstanding(), True):
        for tag in range(3, 1_001):
            channel.tx.settle(tag, False)
        for _ in range(100):
            often()
        channel.tx = channel.tx.over()
    assert Counted.looks < 10_000
    assert len(channel.deliveries) == 998


def test_the_oldest_that_is_held_is_at_hand_whatever_was_before_it() -> None:
    """An ack of several, and a run of acks of one, looks for it: over all that were acked one by one before. Python does not show those looks, so
    this takes the time: it was thousands of times as long.
    """

    def shortest_s(look: Callable[[], object]) -> float:
        times = []
        for _ in range(50):
            began = time.perf_counter()
            look()
            times.append(time.perf_counter() - began)
        return min(times)

    held = ClientChannel(1).deliveries
    held.update(dict.fromkeys(range(1, 100_001)))
    with_all = shortest_s(lambda: next(iter(held)))
    for tag in range(1, 100_000):
        del held[tag]
    assert (next(iter(held)), held.last) == (100_000, 100_000)
    assert shortest_s(lambda: next(iter(held))) < 50 * with_all + 5e-6


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
