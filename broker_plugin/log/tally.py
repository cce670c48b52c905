"""How a backup uses the TALLYs of its primary (see `reconciler`): which of its copies are in excess. Pure.

Rules:
- RabbitMQ's own removals take messages from a queue's head, in the order of consumption, and never a message that a
  consumer holds. So, of the copies that a tally counts, the first ones that no consumer holds are the ones that are
  gone.
- A message that a consumer has requeued stands at the head again, and may be there or gone (a delivery limit takes it
  alone). Such messages are spared, and may be part of the excess. That also holds for messages requeued by consumers
  of earlier epochs, which are unknown.
- Excess copies are rejected, not acked: a queue with dead letters moves them, as expiry and length limits do. (A
  message that an operator purged from such a queue is so dead-lettered here.)
- A tally counts copies of entries up to `upto`. For a queue that is not empty, it counts only copies that came by the
  queue's name: bindings may have been changed around the door, and then the excess here need not be the first copies.
  Nor does it count dead letters: they come in another order here.
- A tally of an empty queue counts all copies. But a copy that died may have come into the queue after the tally was
  taken. Such a copy counts only if every queue that it died in was found empty before: then the primary's copy was in
  this queue, or gone, when the tally was taken. A queue whose dead letters may wait in it unseen (`declarations`) is
  never found empty.
- An empty queue was found on one primary: on the next, messages that its predecessor had lost silently may be back in
  the queue. The next primary's MARKER ends that finding.
- Copies that cannot be counted make the excess smaller, so that too few are removed rather than too many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.dead_letters import Deaths
from lrq_ha.replication.positions import RangeSet
from lrq_ha.replication.queues import QueueKey

EMPTY_KEPT = 8  # tallies of a queue without messages that are remembered


class Tally(NamedTuple):
    """A TALLY of the log: entry `sequence`."""

    sequence: int
    key: QueueKey
    upto: int
    messages: int
    held: RangeSet
    spared: RangeSet

    def excess(self, copies: Iterable[int]) -> set[int]:
        """The indexes of a queue's copies that are gone at the primary. `copies`: their sequences, all that count
        or the first of them.
        """
        found = list(copies)
        free = [index for index, sequence in enumerate(found) if sequence not in self.held and sequence not in self.spared]
        spared = sum(sequence in self.spared and sequence not in self.held for sequence in found)
        return set(free[: max(0, len(found) - self.messages - spared)])


class QueueTallies:
    """The last tally of each queue on which this node has not acted, and the queues found empty."""

    def __init__(self) -> None:
        self._pending: dict[QueueKey, Tally] = {}
        self._empty: dict[QueueKey, deque[tuple[int, int]]] = {}  # (sequence of the tally, upto)

    def noted(self, sequence: int, entry: pb.Tally, *, keeps_dead_letters: bool = False) -> None:
        """A TALLY was appended. `keeps_dead_letters`: dead letters may wait unseen in that queue, to arrive in another later."""
        key = self._to_act_on(sequence, entry)
        if not entry.messages and not keeps_dead_letters:
            self._empty.setdefault(key, deque(maxlen=EMPTY_KEPT)).append((sequence, entry.upto))

    def restored(self, entry: pb.Tally) -> None:
        """Restores a tally on which an earlier incarnation has not acted. The queues found empty before other
        tallies are unknown by now.
        """
        self._to_act_on(0, entry)

    def _to_act_on(self, sequence: int, entry: pb.Tally) -> QueueKey:
        key = (entry.vhost, entry.queue)
        self._pending[key] = Tally(sequence, key, entry.upto, entry.messages, RangeSet.from_flat(entry.held), RangeSet.from_flat(entry.spared))
        return key

    def keys(self) -> tuple[QueueKey, ...]:
        """The queues with a tally."""
        return tuple(self._pending)

    def pending(self, key: QueueKey, applied: int) -> Tally | None:
        """The tally of a queue, if everything up to it is applied (<= `applied`, so safe)."""
        tally = self._pending.get(key)
        return tally if tally is not None and tally.sequence <= applied else None

    def done(self, key: QueueKey, tally: Tally | None = None) -> None:
        """The tally was acted on, or the queue is gone (None)."""
        if tally is None or self._pending.get(key) == tally:
            self._pending.pop(key, None)
        if tally is None:
            self._empty.pop(key, None)

    def counts(self, tally: Tally, sequence: int, deaths: Deaths, *, by_name: bool) -> bool:
        """Whether the tally counts this copy. `by_name`: it came through the default exchange."""
        if sequence > tally.upto:
            return False
        if tally.messages:
            return by_name and not deaths
        vhost, queue = tally.key
        return all(name != queue and self._was_empty((vhost, name), sequence, tally.upto) for name, _ in deaths)

    def led_anew(self) -> None:
        """A MARKER: a queue found empty on the previous primary need not be empty on this one."""
        self._empty.clear()

    def _was_empty(self, key: QueueKey, sequence: int, before: int) -> bool:
        return any(tallied <= before and sequence <= upto for tallied, upto in self._empty.get(key, ()))

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        self._pending = {key: tally for key, tally in self._pending.items() if tally.sequence < first}
        for known in self._empty.values():
            while known and known[-1][0] >= first:
                known.pop()

    def lose(self, end: int) -> None:
        """The log ends at `end`: a host that went down has lost later entries (R16), and other entries will take these sequences."""
        self._pending = {key: tally for key, tally in self._pending.items() if tally.upto <= end}

    def export(self, applied: int) -> list[pb.Tally]:
        """Tallies of entries up to `applied` on which a restart has still to act; it reads the others again."""
        return [
            pb.Tally(vhost=t.key[0], queue=t.key[1], upto=t.upto, messages=t.messages, held=t.held.flat(), spared=t.spared.flat())
            for t in self._pending.values()
            if t.sequence <= applied
        ]
