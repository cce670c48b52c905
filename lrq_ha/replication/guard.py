"""The states of an entry on its way to one receiver, and the guard that withholds completion until it is safe there.

Rules: TRANSITIONS is the whole of it; what is not in it is illegal and changes nothing. `QueueGuard` says the same of all
entries of a routing queue at once, as ranges (Qpid HA: QueueGuard, ReplicatingSubscription): entries up to a boundary are safe,
above it three sets tell the states apart. The diagram in the docs is made from the table by `mermaid`.
"""

from __future__ import annotations

from enum import Enum

from lrq_ha.replication.errors import IllegalEvent
from lrq_ha.replication.positions import RangeSet


class State(Enum):
    """Where an entry is on its way to one RemoteBackup."""

    NEW = "new"
    SENT = "sent"
    DELAYED = "delayed"  # its completion waits for this receiver
    DELAYED_SENT = "delayed-sent"
    SAFE = "safe"


class Event(Enum):
    """What happens to an entry."""

    ENQUEUE = "enqueue"  # appended while the guard is set
    DELIVER = "deliver"  # sent to the receiver
    ACKNOWLEDGED = "acknowledged"  # by the receiver: on its stream
    DEQUEUED = "dequeued"  # not for this receiver, held by it already, or trimmed


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
        held_upto: What the receiver has already: pre-acknowledged, so safe and never sent.
    """

    __slots__ = ("_delivered", "_enqueued", "_safe", "_safe_upto", "first_guarded")

    def __init__(self, first_guarded: int, held_upto: int = 0) -> None:
        self.first_guarded = first_guarded
        self._safe_upto = held_upto  # all up to here are safe; the next one is not
        # All three hold members above _safe_upto only. _safe is disjoint from the other two.
        self._enqueued = RangeSet()
        self._delivered = RangeSet()
        self._safe = RangeSet()

    @property
    def safe_upto(self) -> int:
        """All entries up to this one are safe; the next one is not."""
        return self._safe_upto

    def is_ready(self) -> bool:
        """It has reached the entry before the first guarded one, and all before that is safe."""
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
        if first <= self._safe_upto or any(s.intersects(first, last) for s in (self._enqueued, self._delivered, self._safe)):
            raise self._illegal(Event.ENQUEUE, first, last)
        self._enqueued.add(first, last)

    def deliver(self, first: int, last: int) -> None:
        """first .. last were sent.

        Raises:
            IllegalEvent: One of them was sent before or is safe. Nothing was changed.
        """
        if first <= self._safe_upto or self._delivered.intersects(first, last) or self._safe.intersects(first, last):
            raise self._illegal(Event.DELIVER, first, last)
        self._delivered.add(first, last)

    def acknowledged(self, upto: int) -> None:
        """All up to `upto` that are not safe yet are on the receiver's stream. Cumulative; an older ack changes nothing.

        Raises:
            IllegalEvent: One of them was never sent. Nothing was changed.
        """
        at = self._safe_upto
        while at < upto:
            reached = self._delivered.contiguous_from(at + 1)
            if reached == at:
                reached = self._safe.contiguous_from(at + 1)
                if reached == at:
                    raise self._illegal(Event.ACKNOWLEDGED, at + 1, at + 1)
            at = reached
        if upto > self._safe_upto:
            self._settle(upto)

    def dequeued(self, first: int, last: int) -> None:
        """first .. last are not for this receiver, or were trimmed.

        Raises:
            IllegalEvent: One of them is safe already. Nothing was changed.
        """
        if first <= self._safe_upto or self._safe.intersects(first, last):
            raise self._illegal(Event.DEQUEUED, first, last)
        if first == self._safe_upto + 1:
            self._settle(last)
            return
        self._safe.add(first, last)
        self._enqueued.remove(first, last)
        self._delivered.remove(first, last)

    def _settle(self, upto: int) -> None:
        self._safe_upto = max(upto, self._safe.contiguous_from(upto + 1))
        for members in (self._enqueued, self._delivered, self._safe):
            members.remove(0, self._safe_upto)

    def _illegal(self, event: Event, first: int, last: int) -> IllegalEvent:
        where = next((seq for seq in (first, last) if (self.state(seq), event) not in TRANSITIONS), first)
        return IllegalEvent(f"{event.value} of entries {first} to {last}: entry {where} is {self.state(where).value}")
