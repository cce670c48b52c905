"""The message-state table, walked as a whole, and QueueGuard against one small machine per entry driven by the table."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrq_ha.errors import IllegalEvent
from lrq_ha.replication.guard import TRANSITIONS, Event, QueueGuard, State, mermaid

TABLE = {  # state: enqueue, deliver, acknowledged, dequeued
    "new": ("delayed", "sent", "-", "safe"),
    "sent": ("-", "-", "safe", "safe"),
    "delayed": ("-", "delayed-sent", "-", "safe"),
    "delayed-sent": ("-", "-", "safe", "safe"),
    "safe": ("-", "-", "-", "-"),
}


def guard_in(state: State) -> QueueGuard:
    guard = QueueGuard(1)
    guard.dequeued(3, 3)  # so that entry 2 is not at the boundary
    if state in (State.DELAYED, State.DELAYED_SENT):
        guard.enqueue(2, 2)
    if state in (State.SENT, State.DELAYED_SENT):
        guard.deliver(2, 2)
    if state is State.SAFE:
        guard.dequeued(2, 2)
    return guard


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_every_state_and_event(state: State, event: Event) -> None:
    column = list(Event).index(event)
    expected = TABLE[state.value][column]
    after = TRANSITIONS.get((state, event))
    assert (after.value if after else "-") == expected
    guard = guard_in(state)
    assert guard.state(2) is state
    act: Callable[[], object]
    if event is Event.ACKNOWLEDGED:
        guard.deliver(1, 1)
        guard.acknowledged(1)
        if state is State.SAFE:  # cumulative: an older ack says nothing new
            guard.acknowledged(2)
            assert guard.state(2) is State.SAFE
            return
        act = lambda: guard.acknowledged(2)  # noqa: E731
    else:
        act = lambda: getattr(guard, {Event.ENQUEUE: "enqueue", Event.DELIVER: "deliver", Event.DEQUEUED: "dequeued"}[event])(2, 2)  # noqa: E731
    if after is None:
        with pytest.raises(IllegalEvent, match=f"entry 2 is {state.value}"):
            act()
        assert guard.state(2) is state
    else:
        act()
        assert guard.state(2) is after


def test_ready_when_all_before_the_first_guarded_is_safe() -> None:
    guard = QueueGuard(11, held_upto=5)
    assert guard.state(5) is State.SAFE
    assert not guard.is_ready()
    guard.deliver(6, 10)
    guard.enqueue(11, 20)
    guard.acknowledged(9)
    assert not guard.is_ready()
    guard.acknowledged(10)
    assert guard.is_ready()
    assert guard.safe_upto == 10
    guard.deliver(11, 20)
    with pytest.raises(IllegalEvent, match="entry 21 is new"):
        guard.acknowledged(21)
    assert guard.safe_upto == 10
    guard.dequeued(15, 16)
    guard.acknowledged(14)
    assert guard.safe_upto == 16
    guard.acknowledged(20)
    assert guard.safe_upto == 20
    assert QueueGuard(1).is_ready()


def test_an_ack_far_beyond_what_was_sent_changes_nothing() -> None:
    guard = QueueGuard(1)
    guard.enqueue(1, 1_000_000)
    guard.deliver(1, 1_000_000)
    guard.dequeued(7, 70_000)
    for upto in (1_000_001, 2**63, 2**64 - 1):
        with pytest.raises(IllegalEvent, match="entry 1000001 is new"):
            guard.acknowledged(upto)
    assert guard.safe_upto == 0
    guard.acknowledged(6)
    assert guard.safe_upto == 70_000
    guard.acknowledged(1_000_000)
    assert guard.safe_upto == 1_000_000


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 9, 65_535, 65_536, 65_537, 1_000_003])
def test_an_ack_before_a_long_run_that_is_safe_reaches_its_end(length: int) -> None:
    guard = QueueGuard(1)
    guard.deliver(1, 1)
    guard.dequeued(2, 1 + length)
    guard.dequeued(3 + length, 3 + length)
    guard.acknowledged(1)
    assert guard.safe_upto == 1 + length
    assert guard.state(2 + length) is State.NEW
    assert guard.state(3 + length) is State.SAFE


def test_every_second_entry_safe_costs_next_to_nothing() -> None:
    """Ranges would be one per entry then: 100 bytes each, and each event would move them all."""
    count = 20_000
    guard = QueueGuard(1)
    guard.enqueue(1, count)
    tracemalloc.start()
    for seq in range(1, count, 2):
        guard.deliver(seq, seq)
        guard.dequeued(seq + 1, seq + 1)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < count, f"{grown} bytes for {count} entries"
    for upto in range(999, count, 1_000):
        guard.acknowledged(upto)
        assert guard.safe_upto == upto + 1, "the one behind it was safe already"


def test_the_diagram_is_the_table() -> None:
    lines = mermaid().splitlines()
    assert lines[:3] == ["stateDiagram-v2", "    [*] --> new", '    state "delayed-sent" as delayed_sent']
    assert "    delayed --> delayed_sent: deliver" in lines
    assert sum(": " in line for line in lines) == len(TRANSITIONS)


SPAN = st.tuples(st.integers(1, 14), st.integers(0, 5)).map(lambda s: (s[0], s[0] + s[1]))


@given(st.integers(1, 8), st.integers(0, 4), st.lists(st.tuples(st.sampled_from(Event), SPAN), max_size=40))
@settings(max_examples=500, deadline=None)
def test_against_a_machine_per_entry(first_guarded: int, held: int, events: list[tuple[Event, tuple[int, int]]]) -> None:
    guard = QueueGuard(first_guarded, held)
    machines = {seq: State.SAFE if seq <= held else State.NEW for seq in range(1, 25)}
    for event, (first, last) in events:
        span = range(first, last + 1)
        if event is Event.ACKNOWLEDGED:
            span = [seq for seq in range(1, last + 1) if machines[seq] is not State.SAFE]  # type: ignore[assignment]
        after = {seq: TRANSITIONS.get((machines[seq], event)) for seq in span}
        legal = all(after.values())
        try:
            if event is Event.ACKNOWLEDGED:
                guard.acknowledged(last)
            else:
                {Event.ENQUEUE: guard.enqueue, Event.DELIVER: guard.deliver, Event.DEQUEUED: guard.dequeued}[event](first, last)
        except IllegalEvent:
            assert not legal
        else:
            assert legal
            machines.update({seq: state for seq, state in after.items() if state})
        assert {seq: guard.state(seq) for seq in machines} == machines
        safe = next(seq for seq in range(25) if machines.get(seq + 1) is not State.SAFE)
        assert guard.safe_upto == safe
        assert guard.is_ready() == (safe >= first_guarded - 1)
