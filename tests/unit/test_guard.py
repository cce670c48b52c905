"""The table of an entry's states, walked as a whole, and QueueGuard against one small machine per entry driven by the table."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrq_ha.errors import IllegalEvent
from lrq_ha.replication.guard import TRANSITIONS, Event, QueueGuard, State, mermaid

TABLE = {  # state: guard, release, deliver, acknowledged, dequeued
    "new": ("delayed", "-", "sent", "-", "safe"),
    "sent": ("delayed-sent", "-", "-", "safe", "-"),
    "delayed": ("-", "new", "delayed-sent", "-", "-"),
    "delayed-sent": ("-", "sent", "-", "safe", "-"),
    "safe": ("-", "-", "-", "-", "-"),
}
END = 12


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_every_state_and_event(state: State, event: Event) -> None:
    after = TRANSITIONS.get((state, event))
    assert (after.value if after else "-") == TABLE[state.value][list(Event).index(event)]


def test_ready_when_all_before_the_first_guarded_is_safe() -> None:
    guard = QueueGuard(5)
    assert guard.state(5) is State.SAFE
    assert not guard.is_ready(), "the guard is not placed"
    guard.deliver(6, 12)
    guard.place(11)
    guard.acknowledge(9)
    assert not guard.is_ready()
    guard.acknowledge(10)
    assert guard.is_ready()
    guard.place(99)
    assert guard.first_guarded == 11, "a guard that is placed stays where it is"
    guard.release()
    assert not guard.is_ready()
    newcomer = QueueGuard()
    newcomer.place(1)
    assert newcomer.is_ready()


@pytest.mark.parametrize("upto", [13, 2**63, 2**64 - 1])
def test_an_ack_beyond_what_was_sent_changes_nothing(upto: int) -> None:
    guard = QueueGuard(2)
    guard.deliver(3, 12)
    guard.acknowledge(7)
    with pytest.raises(IllegalEvent, match=f"entry {upto} is acknowledged, entry 12 was the last that was sent"):
        guard.acknowledge(upto)
    guard.acknowledge(3)
    assert guard.safe_upto == 7, "an older ack says nothing new"


def test_the_diagram_is_the_table() -> None:
    lines = mermaid().splitlines()
    assert lines[:3] == ["stateDiagram-v2", "    [*] --> new", '    state "delayed-sent" as delayed_sent']
    assert "    delayed --> delayed_sent: deliver" in lines
    assert sum(": " in line for line in lines) == len(TRANSITIONS)


STEPS = st.one_of(
    st.tuples(st.just(Event.GUARD), st.integers(1, END), st.just(END)),
    st.tuples(st.just(Event.RELEASE), st.just(1), st.just(END)),
    st.tuples(st.just(Event.DELIVER), st.integers(1, END), st.integers(0, 5)).map(lambda s: (s[0], s[1], min(END, s[1] + s[2]))),
    st.tuples(st.just(Event.ACKNOWLEDGED), st.just(1), st.integers(1, END)),
)


def _take(guard: QueueGuard, event: Event, first: int, last: int) -> None:
    if event is Event.GUARD:
        guard.place(first)
    elif event is Event.RELEASE:
        guard.release()
    elif event is Event.DELIVER:
        guard.deliver(first, last)
    else:
        guard.acknowledge(last)


@given(st.integers(0, 4), st.lists(STEPS, max_size=40))
@settings(max_examples=500, deadline=None)
def test_against_a_machine_per_entry(held: int, steps: list[tuple[Event, int, int]]) -> None:
    guard = QueueGuard(held)
    machines = {n: TRANSITIONS[State.NEW, Event.DEQUEUED] if n <= held else State.NEW for n in range(1, END + 1)}
    for event, first, last in steps:
        placed = guard.first_guarded is not None
        entries = [] if event is Event.GUARD and placed else [n for n in range(first, last + 1) if machines[n] is not State.SAFE]
        if event is Event.RELEASE:
            entries = [n for n in entries if machines[n] in (State.DELAYED, State.DELAYED_SENT)]
        after = {n: TRANSITIONS.get((machines[n], event)) for n in entries}
        next_to_send = all(machines[n] not in (State.NEW, State.DELAYED) for n in range(1, first))
        legal = all(after.values()) and (event is not Event.DELIVER or (next_to_send and len(after) == last - first + 1))
        try:
            _take(guard, event, first, last)
        except IllegalEvent:
            assert not legal
        else:
            assert legal
            machines.update({n: state for n, state in after.items() if state})
        assert {n: guard.state(n) for n in machines} == machines
        told = guard.tell(END)
        assert {s: told[s.value.replace("-", "_")] for s in State if s is not State.SAFE} == {
            s: list(machines.values()).count(s) for s in State if s is not State.SAFE
        }
        assert guard.is_ready() == (guard.first_guarded is not None and all(machines[n] is State.SAFE for n in range(1, guard.first_guarded)))
