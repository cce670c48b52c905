"""The states of an entry on its way to one backup, and the guard that withholds the entry's completion until the backup has the entry.

Rules:

- TRANSITIONS is complete; a transition outside it is illegal and changes nothing.
- `QueueGuard` keeps the states of all entries of a log for one backup (Qpid HA: QueueGuard). A log is sent and acknowledged in order, so three
  positions tell the state of every entry: ten million outstanding entries cost as much as one (P6 of the benchmarks).
- Completion waits for a backup from the *first guarded position* on. The in-sync set places that position (in_sync.py).
- A backup is *ready* when every entry before the first guarded position is safe at the backup.

`mermaid` makes the diagram in the docs from the table.
"""

from __future__ import annotations

from enum import Enum

from lrq_ha.errors import IllegalEvent


class State(Enum):
    """The states of an entry on its way to one backup."""

    NEW = "new"
    SENT = "sent"
    DELAYED = "delayed"  # its completion waits for this backup
    DELAYED_SENT = "delayed-sent"
    SAFE = "safe"


class Event(Enum):
    """The events of an entry."""

    GUARD = "guard"  # appended while the guard is placed, or the guard is placed before the entry
    RELEASE = "release"  # the guard is taken away: the backup leaves the set
    DELIVER = "deliver"  # sent to the backup
    ACKNOWLEDGED = "acknowledged"  # by the backup: the entry is on its stream
    DEQUEUED = "dequeued"  # the backup had the entry when it subscribed (pre-acknowledged)


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.NEW, Event.GUARD): State.DELAYED,
    (State.NEW, Event.DELIVER): State.SENT,
    (State.NEW, Event.DEQUEUED): State.SAFE,
    (State.SENT, Event.GUARD): State.DELAYED_SENT,
    (State.SENT, Event.ACKNOWLEDGED): State.SAFE,
    (State.DELAYED, Event.RELEASE): State.NEW,
    (State.DELAYED, Event.DELIVER): State.DELAYED_SENT,
    (State.DELAYED_SENT, Event.RELEASE): State.SENT,
    (State.DELAYED_SENT, Event.ACKNOWLEDGED): State.SAFE,
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
    """The states of all entries of a log for one backup. safe_upto <= sent.

    Args:
        held_upto: The backup has the log up to here: pre-acknowledged, so safe and never sent.

    Attributes:
        safe_upto: Every entry up to this one is safe; the next entry is not.
        sent: Every entry up to this one was sent, or was pre-acknowledged.
        first_guarded: From this entry on completion waits for the backup; None: the guard is not placed.
    """

    __slots__ = ("first_guarded", "safe_upto", "sent")

    def __init__(self, held_upto: int = 0) -> None:
        self.safe_upto = self.sent = held_upto
        self.first_guarded: int | None = None

    def place(self, first: int) -> None:
        """Completion waits for the backup from entry `first` on. A guard that is placed already stays where it is."""
        if self.first_guarded is None:
            self.first_guarded = first

    def release(self) -> None:
        """Completion no longer waits for the backup."""
        self.first_guarded = None

    def is_ready(self) -> bool:
        """Whether the guard is placed, and every entry before the first guarded one is safe."""
        return self.first_guarded is not None and self.safe_upto >= self.first_guarded - 1

    def state(self, sequence: int) -> State:
        """The state of one entry."""
        if sequence <= self.safe_upto:
            return State.SAFE
        if self.first_guarded is None or sequence < self.first_guarded:
            return State.SENT if sequence <= self.sent else State.NEW
        return State.DELAYED_SENT if sequence <= self.sent else State.DELAYED

    def tell(self, end: int) -> dict[str, int | bool | None]:
        """For the status: the first guarded position, whether the backup is ready, and the count of entries up to `end` in each state but SAFE."""
        free = end if self.first_guarded is None else max(self.safe_upto, self.first_guarded - 1)  # the guard does not hold what is up to here
        counts = {
            State.NEW: free - self.sent,
            State.SENT: min(self.sent, free) - self.safe_upto,
            State.DELAYED: end - max(self.sent, free),
            State.DELAYED_SENT: self.sent - free,
        }
        return {"first_guarded": self.first_guarded, "ready": self.is_ready()} | {s.value.replace("-", "_"): max(0, n) for s, n in counts.items()}

    def deliver(self, first: int, last: int) -> None:
        """first .. last are sent.

        Raises:
            IllegalEvent: `first` is not the next entry to be sent. Nothing was changed.
        """
        if first != self.sent + 1:
            raise IllegalEvent(f"entry {first} is sent after entry {self.sent}")
        self.sent = last

    def acknowledge(self, upto: int) -> None:
        """Every entry up to `upto` is on the backup's stream. Cumulative; an older acknowledgement changes nothing.

        Raises:
            IllegalEvent: One of the entries was never sent. Nothing was changed.
        """
        if upto > self.sent:
            raise IllegalEvent(f"entry {upto} is acknowledged, entry {self.sent} was the last that was sent")
        self.safe_upto = max(self.safe_upto, upto)
