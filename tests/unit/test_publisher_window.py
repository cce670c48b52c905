"""The publisher's window: IDs, order, resends, and who is blamed. Pure, so every case is a few lines."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lrq_ha.errors import IllegalEvent, LrqError
from lrq_ha.publisher.errors import FencedError, NackedError, Unconfirmed
from lrq_ha.publisher.window import CONNECTION_STRIKES_MAX, Entry, Settled, Window

ALL = 1 << 30


def filled(count: int, **limits: int) -> Window[int]:
    window: Window[int] = Window("p", **{"messages_max": 100, "bytes_max": 1000, **limits})
    for number in range(1, count + 1):
        window.add(1, number)
    return window


def take(window: Window[int], bytes_max: int = ALL) -> list[int]:
    return [entry.sequence for entry in window.take(bytes_max)]


def outcome(settled: list[Settled[int]]) -> list[tuple[int, bool]]:
    return [(each.entry.sequence, each.error is None) for each in settled]


def test_ids_are_given_in_order_before_sending() -> None:
    window = filled(0)
    assert window.next_id() == "p/1"
    assert [window.add(1, 0).sequence for _ in range(3)] == [1, 2, 3]
    assert window.next_id() == "p/4"
    assert take(window) == [1, 2, 3]
    assert take(window) == []


def test_take_stops_at_the_bytes_but_gives_one_at_least() -> None:
    window = filled(5)
    assert take(window, 2) == [1, 2]
    assert take(window, 1) == [3]


def test_a_multiple_ack_takes_all_before_it_that_are_left() -> None:
    window = filled(5)
    take(window)
    assert outcome(window.acked(2, False)) == [(2, True)]
    assert window.oldest == 1
    assert outcome(window.acked(4, True)) == [(1, True), (3, True), (4, True)]
    assert (window.oldest, len(window), window.bytes) == (5, 1, 1)
    assert outcome(window.acked(4, True)) == []
    assert outcome(window.acked(0, True)) == [(5, True)]
    assert window.oldest == 6


def test_an_ack_of_a_tag_never_sent_is_illegal_and_changes_nothing() -> None:
    window = filled(2)
    take(window)
    with pytest.raises(IllegalEvent):
        window.acked(3, True)
    assert len(window) == 2


def test_nack_and_return_fail_the_message_alone() -> None:
    window = filled(3)
    take(window)
    window.returned(2, 312, "NO_ROUTE")
    window.returned(99, 312, "of an earlier life")
    assert outcome(window.acked(2, True)) == [(1, True), (2, False)]
    (settled,) = window.acked(3, False, nack=True)
    assert isinstance(settled.error, NackedError)
    assert (settled.error.code, settled.error.replication_id) == (0, "p/3")


def test_a_return_costs_the_same_however_many_are_in_flight() -> None:
    """A burst that no queue takes, all of it returned before the first ack, held up `publish` for seconds."""

    def lines(count: int) -> int:
        window, found = filled(count), 0
        take(window)

        def trace(frame: Any, event: str, _what: object) -> Any:
            nonlocal found
            found += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            window.returned(count, 312, "NO_ROUTE")
        finally:
            sys.settrace(before)
        assert [done for _, done in outcome(window.acked(count, True))] == [True] * (count - 1) + [False]
        return found

    assert lines(1) == lines(100)


def test_the_number_of_a_refused_message_is_given_to_the_next() -> None:
    """It was a gap in what the servers remember of the producer, for ever."""
    window = filled(4)
    take(window)
    window.acked(2, False, nack=True)
    window.returned(3, 312, "NO_ROUTE")
    assert outcome(window.acked(3, True)) == [(1, True), (3, False)]
    assert window.next_id() == "p/2"
    entries = [window.add(1, n) for n in range(3)]
    assert [(entry.sequence, window.id_of(entry)) for entry in entries] == [(5, "p/2"), (6, "p/3"), (7, "p/5")]
    assert (window.oldest, window.added) == (4, 7)
    window.disconnected()
    assert take(window) == [4, 5, 6, 7], "the order is that in which they came"
    window.returned(3, 312, "NO_ROUTE")
    assert outcome(window.acked(4, True)) == [(4, True), (5, True), (6, False), (7, True)]


def test_what_a_channel_was_closed_for_keeps_its_number() -> None:
    """Nobody knows whether every node has heard that it is free."""
    window = filled(1)
    take(window)
    assert outcome(window.channel_refused(404, "no exchange")) == [(1, False)]
    assert window.next_id() == "p/2"


def test_a_lost_connection_sends_what_is_left_again_in_order_with_new_tags() -> None:
    window = filled(4)
    take(window, 3)
    window.acked(2, False)
    window.returned(1, 312, "NO_ROUTE")  # then the connection goes: the return does not count for the next attempt
    window.disconnected()
    window.add(1, 5)
    assert take(window) == [1, 3, 4, 5]
    assert outcome(window.acked(4, True)) == [(1, True), (3, True), (4, True), (5, True)]


def test_a_channel_close_finds_the_culprit_by_sending_one_at_a_time() -> None:
    window = filled(4)
    take(window, 3)
    assert window.channel_refused(404, "no exchange") == []  # 1, 2 or 3
    assert take(window) == [1]
    assert take(window) == []
    assert outcome(window.acked(1, False)) == [(1, True)]
    assert take(window) == [2]
    (settled,) = window.channel_refused(404, "no exchange")
    assert (settled.entry.sequence, isinstance(settled.error, NackedError)) == (2, True)
    assert take(window) == [3]  # still in doubt
    window.acked(1, False)
    assert take(window) == [4]


def test_after_the_last_message_in_doubt_the_rest_goes_together() -> None:
    window = filled(4)
    take(window, 2)
    window.channel_refused(404, "")
    for expected in (1, 2):
        assert take(window) == [expected]
        window.acked(expected, False)
    assert take(window) == [3, 4]


def test_a_connection_close_blames_a_lone_message_only_after_several() -> None:
    window = filled(2)
    take(window)
    assert window.connection_refused(541, "INTERNAL_ERROR") == []
    for _ in range(CONNECTION_STRIKES_MAX - 1):
        assert take(window) == [1]
        assert window.connection_refused(541, "INTERNAL_ERROR") == []
    assert take(window) == [1]
    assert outcome(window.connection_refused(541, "INTERNAL_ERROR")) == [(1, False)]
    assert take(window) == [2]


def test_a_close_with_nothing_in_flight_blames_nobody() -> None:
    window = filled(2)
    assert window.connection_refused(541, "") == []
    assert take(window) == [1, 2]


def test_limits() -> None:
    window = filled(0, messages_max=2, bytes_max=10)
    assert window.fits(11), "a message larger than the window passes when it is alone"
    window.add(11, 0)
    assert not window.fits(1)
    take(window)
    window.acked(1, False)
    window.add(5, 0)
    assert window.fits(5)
    assert not window.fits(6)
    window.add(5, 0)
    assert not window.fits(0)


def test_learning_only_moves_up_and_only_before_the_first_message() -> None:
    window = filled(0)
    window.learn(41)
    window.learn(0)
    window.learn(7)
    assert window.next_id() == "p/42"
    window.add(1, 0)
    take(window)
    window.learn(42)
    with pytest.raises(FencedError) as caught:
        window.learn(43)
    assert "43" in str(caught.value)
    assert window.next_id() == "p/43"


def test_a_number_that_was_given_and_not_sent_is_known_by_nobody() -> None:
    """It was taken for one of this process's own, and the message for a repeat."""
    window = filled(2)
    take(window, 1)
    window.learn(1)
    window.disconnected()
    window.learn(1)
    with pytest.raises(FencedError, match="knows sequence 2, this process has sent none above 1"):
        window.learn(2)


def test_overdue_is_measured_from_when_a_message_became_the_oldest() -> None:
    window = filled(3)
    assert window.overdue_s(5.0) == 0.0, "nothing is in flight"
    take(window)
    assert window.overdue_s(100.0) == 0.0
    assert window.overdue_s(107.0) == 7.0
    window.acked(2, False)
    assert window.overdue_s(108.0) == 8.0, "a later message's confirm does not help the oldest"
    window.acked(1, False)
    assert window.overdue_s(109.0) == 0.0
    window.disconnected()
    assert window.overdue_s(150.0) == 0.0
    take(window)
    assert window.overdue_s(200.0) == 0.0


def test_a_broker_that_makes_us_wait_is_not_overdue() -> None:
    window = filled(1)
    take(window)
    assert window.overdue_s(100.0) == 0.0
    window.not_late()
    assert window.overdue_s(160.0) == 0.0
    assert window.overdue_s(170.0) == 10.0


def test_fail_all() -> None:
    window = filled(3)
    take(window, 1)
    settled = window.fail_all()
    assert [each.entry.sequence for each in settled] == [1, 2, 3]
    assert all(isinstance(each.error, Unconfirmed) for each in settled)
    assert (len(window), window.bytes, window.oldest) == (0, 0, 4)
    error = LrqError("over")
    window.add(1, 0)
    assert [each.error for each in window.fail_all(error)] == [error]


class AgainstABroker(RuleBasedStateMachine):
    """A window against a broker that remembers IDs as the door does, with connections that break anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.window: Window[int] = Window("p", 50, 10_000)
        self.wire: list[Entry[int]] = []  # by tag on this channel
        self.stored: dict[int, int] = {}  # by number: the sequence of the message with it
        self.open_tags: set[int] = set()
        self.confirmed: set[int] = set()
        self.refused: set[int] = set()

    @rule(count=st.integers(1, 5))
    def publish(self, count: int) -> None:
        for _ in range(count):
            if self.window.fits(1):
                self.window.add(1, 0)

    @rule(size=st.integers(1, 6))
    def send(self, size: int) -> None:
        for entry in self.window.take(size):
            self.wire.append(entry)
            self.open_tags.add(len(self.wire))
            assert self.stored.setdefault(entry.number, entry.sequence) == entry.sequence, "taken for a repeat of another message"

    @precondition(lambda self: self.open_tags)
    @rule(data=st.data(), multiple=st.booleans())
    def confirm(self, data: st.DataObject, multiple: bool) -> None:
        tag = data.draw(st.sampled_from(sorted(self.open_tags)))
        tags = {each for each in self.open_tags if each <= tag} if multiple else {tag}
        self.open_tags -= tags
        settled = self.window.acked(tag, multiple)
        assert {each.entry.sequence for each in settled} == {self.wire[each - 1].sequence for each in tags}
        self.confirmed |= {each.entry.sequence for each in settled}

    @precondition(lambda self: self.open_tags)
    @rule(data=st.data(), nack=st.booleans())
    def refuse(self, data: st.DataObject, nack: bool) -> None:
        tag = data.draw(st.sampled_from(sorted(self.open_tags)))
        entry = self.wire[tag - 1]
        self.open_tags.remove(tag)
        del self.stored[entry.number]
        if not nack:
            self.window.returned(entry.number, 312, "NO_ROUTE")
        [settled] = self.window.acked(tag, False, nack=nack)
        assert settled.entry is entry
        assert isinstance(settled.error, NackedError)
        self.refused.add(entry.sequence)

    @rule()
    def lose(self) -> None:
        self.window.disconnected()
        self.wire, self.open_tags = [], set()

    @rule()
    def close_channel(self) -> None:
        if len(self.open_tags) > 1:
            assert self.window.channel_refused(404, "") == []
            self.wire, self.open_tags = [], set()

    @invariant()
    def nothing_lost_nothing_reordered(self) -> None:
        settled = self.confirmed | self.refused
        assert list(self.stored.values()) == sorted(self.stored.values())
        assert self.confirmed <= set(self.stored.values())
        assert len(self.window) == self.window.added - len(settled) == self.window.bytes
        assert self.window.oldest == min(set(range(1, self.window.added + 2)) - settled)

    @invariant()
    def no_gap_stays(self) -> None:
        """With as many messages more as wait for an answer, all numbers are in use."""
        assert self.window.assigned - len(self.stored) <= 50


TestAgainstABroker = AgainstABroker.TestCase
TestAgainstABroker.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
