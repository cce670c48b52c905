"""The states of an entry on its way to one receiver, and the guard that withholds completion until the entry is safe there.

Rules:

- TRANSITIONS is complete; a transition outside it is illegal and changes nothing.
- `QueueGuard` keeps the states of all entries of a routing queue at once (Qpid HA: QueueGuard, ReplicatingSubscription): entries up to a
  boundary are safe, above it three sets tell the states apart.
- The sets are bitmaps: ten million entries cost no more than a few MB, in whatever pattern they become safe, and an event's cost does
  not depend on their number (P6 of the benchmarks).

`mermaid` makes the diagram in the docs from the table.
"""

from __future__ import annotations

from enum import Enum

from pyroaring import BitMap64

from lrq_ha.errors import IllegalEvent

#: A bitmap's exclusive end of a range.
_END_MAX = 2**64 - 1


class State(Enum):
    """The states of an entry on its way to one RemoteBackup."""

    NEW = "new"
    SENT = "sent"
    DELAYED = "delayed"  # its completion waits for this receiver
    DELAYED_SENT = "delayed-sent"
    SAFE = "safe"


class Event(Enum):
    """The events of an entry."""

    ENQUEUE = "enqueue"  # appended while the guard is set
    DELIVER = "deliver"  # sent to the receiver
    ACKNOWLEDGED = "acknowledged"  # by the receiver: on its stream
    DEQUEUED = "dequeued"  # not for this receiver, already on it, or trimmed


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.NEW, Event.ENQUEUE): State.DELAYED,
    (State.NEW, Event.DELIVER): State.SENT,
    (State.NEW, Event.DEQUEUED): State.SAFE,
    (State.SENT, Event.ACKNOWLEDGED): State.SAFE,
    (State.SENT, Event.DEQUEUED): State.SAFE,
    (State.DELAYED, Event.DELIVER): State.DELAYED_SENT,
    (State.DELAYED, Event.DEQUEUED): State.SAFE,
    (State.DELAYED_SENT, Event.ACKNOWLEDGED): State.SAFE,
    (State.DELAYED_SENT, Event.DEQUEUED): State.SAFE,
}


def mermaid() -> str:
    """TRANSITIONS as a Mermaid state diagram, for the docs."""

    def name(state: State) -> str:
        return state.name.lower()

    lines = ["stateDiagram-v2", f"    [*] --> {name(State.NEW)}"]
    lines += [f'    state "{state.value}" as {name(state)}' for state in State if name(state) != state.value]
    lines += [f"    {name(state)} --> {name(after)}: {event.value}" for (state, event), after in TRANSITIONS.items()]
    return "\n".join([*lines, f"    {name(State.SAFE)} --> [*]"]) + "\n"


class QueueGuard:
    """The states of all entries of one routing queue for one RemoteBackup.

    Args:
        first_guarded: From this entry on completion waits for the receiver (>= 1).
        held_upto: The receiver has the log up to here: pre-acknowledged, so safe and never sent.
    """

    __slots__ = ("_delivered", "_enqueued", "_safe", "_safe_upto", "first_guarded")

    def __init__(self, first_guarded: int, held_upto: int = 0) -> None:
        self.first_guarded = first_guarded
        self._safe_upto = held_upto  # all up to here are safe; the next one is not
        # All three hold members above _safe_upto only. _safe is disjoint from the other two.
        self._enqueued = BitMap64()
        self._delivered = BitMap64()
        self._safe = BitMap64()

    @property
    def safe_upto(self) -> int:
        """All entries up to this one are safe; the next one is not."""
        return self._safe_upto

    def is_ready(self) -> bool:
        """Whether the receiver has reached the entry before the first guarded one, and all before that is safe."""
        return self._safe_upto >= self.first_guarded - 1

    def state(self, seq: int) -> State:
        """The state of one entry."""
        if seq <= self._safe_upto or seq in self._safe:
            return State.SAFE
        if seq in self._enqueued:
            return State.DELAYED_SENT if seq in self._delivered else State.DELAYED
        return State.SENT if seq in self._delivered else State.NEW

    def enqueue(self, first: int, last: int) -> None:
        """first .. last were appended.

        Raises:
            IllegalEvent: One of them is not new. Nothing was changed.
        """
        if first <= self._safe_upto or any(_count(members, first, last) for members in (self._enqueued, self._delivered, self._safe)):
            raise self._illegal(Event.ENQUEUE, first, last)
        self._enqueued.add_range(first, last + 1)

    def deliver(self, first: int, last: int) -> None:
        """first .. last were sent.

        Raises:
            IllegalEvent: One of them was sent before or is safe. Nothing was changed.
        """
        if first <= self._safe_upto or _count(self._delivered, first, last) or _count(self._safe, first, last):
            raise self._illegal(Event.DELIVER, first, last)
        self._delivered.add_range(first, last + 1)

    def acknowledged(self, upto: int) -> None:
        """All up to `upto` that are not safe yet are on the receiver's stream. Cumulative; an older ack changes nothing.

        Raises:
            IllegalEvent: One of them was never sent. Nothing was changed.
        """
        first = self._safe_upto + 1
        if upto < first:
            return
        # No entry is in both sets, so a count is enough: its cost does not grow if every second entry is safe already.
        if _count(self._delivered, first, upto) + _count(self._safe, first, upto) <= upto - first:
            missing = _run_end(self._delivered | self._safe, first) + 1
            raise self._illegal(Event.ACKNOWLEDGED, missing, missing)
        self._settle(upto)

    def dequeued(self, first: int, last: int) -> None:
        """first .. last are not for this receiver, or were trimmed.

        Raises:
            IllegalEvent: One of them is safe already. Nothing was changed.
        """
        if first <= self._safe_upto or _count(self._safe, first, last):
            raise self._illegal(Event.DEQUEUED, first, last)
        if first == self._safe_upto + 1:
            self._settle(last)
            return
        self._safe.add_range(first, last + 1)
        self._enqueued.remove_range(first, last + 1)
        self._delivered.remove_range(first, last + 1)

    def _settle(self, upto: int) -> None:
        before, self._safe_upto = self._safe_upto, _run_end(self._safe, upto + 1)
        for members in (self._enqueued, self._delivered, self._safe):
            members.remove_range(before + 1, self._safe_upto + 1)

    def _illegal(self, event: Event, first: int, last: int) -> IllegalEvent:
        where = next((seq for seq in (first, last) if (self.state(seq), event) not in TRANSITIONS), first)
        return IllegalEvent(f"{event.value} of entries {first} to {last}: entry {where} is {self.state(where).value}")


def _count(members: BitMap64, first: int, last: int) -> int:
    """How many of first .. last are members."""
    return int(members.range_cardinality(first, min(last + 1, _END_MAX)))


def _run_end(members: BitMap64, start: int) -> int:
    """The greatest n such that all of start .. n are members; start - 1 if `start` is not. A bitmap has no such query: asked in growing steps."""
    step = 1
    while members.contains_range(start, start + step):
        start += step
        step *= 2
    while step > 1:
        step //= 2
        if members.contains_range(start, start + step):
            start += step
    return start - 1
