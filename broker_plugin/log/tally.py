"""What a backup does with the TALLYs of its primary (see `reconciler`): which of its copies are too many. Pure.

Rules:
- What RabbitMQ removes by itself it takes from a queue's head, in the order in which it would be consumed, and never what a consumer holds. So, of
  the copies that a tally speaks of, the first ones that no consumer holds are the ones that are gone.
- What consumers have given back stands at the head again, and may be there or gone (a delivery limit takes it alone). It is left in peace, and
  what is too many may be among it; so may what consumers of earlier epochs have given back, of which nobody knows.
- They are rejected, not acked: a queue with dead letters moves them, as expiry and length limits do. (What an operator purged from such a queue is so
  dead-lettered here.)
- A tally speaks of copies of entries up to `upto`. Of a queue that is not empty, it speaks only of those that came by the queue's name: bindings may
  have been changed around the door, and then what is too many here need not be what came first. Nor does it of dead letters: they come in another
  order here.
- Of an empty queue it speaks of all. But a copy that died may have come into the queue after the tally was taken. It counts only if every queue that
  it died in was found empty before: then the primary's copy was in this queue, or gone, when the tally was taken. A queue whose dead letters may wait
  in it unseen (`declarations`) is found empty by nobody.
- That a queue was found empty is true of one primary: on the next, what its predecessor had lost silently may be back in it. Its MARKER ends that.
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
        """Those of a queue's copies that are gone at the primary, as indexes; `copies`: their sequences, all that count or the first of them."""
        found = list(copies)
        free = [index for index, sequence in enumerate(found) if sequence not in self.held and sequence not in self.spared]
        spared = sum(sequence in self.spared and sequence not in self.held for sequence in found)
        return set(free[: max(0, len(found) - self.messages - spared)])


class QueueTallies:
    """The last tally of each queue on which this node has not acted, and which queues were found empty."""

    def __init__(self) -> None:
        self._pending: dict[QueueKey, Tally] = {}
        self._empty: dict[QueueKey, deque[tuple[int, int]]] = {}  # (sequence of the tally, upto)

    def noted(self, sequence: int, entry: pb.Tally, *, keeps_dead_letters: bool = False) -> None:
        """A TALLY was appended. `keeps_dead_letters`: some may wait unseen in that queue, to arrive in another later."""
        key = self._to_act_on(sequence, entry)
        if not entry.messages and not keeps_dead_letters:
            self._empty.setdefault(key, deque(maxlen=EMPTY_KEPT)).append((sequence, entry.upto))

    def restored(self, entry: pb.Tally) -> None:
        """One on which an earlier incarnation has not acted. Which queues were empty before others nobody knows any more."""
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
        """It was acted on, or the queue is gone (None)."""
        if tally is None or self._pending.get(key) == tally:
            self._pending.pop(key, None)
        if tally is None:
            self._empty.pop(key, None)

    def counts(self, tally: Tally, sequence: int, deaths: Deaths, *, by_name: bool) -> bool:
        """Whether the tally speaks of this copy. `by_name`: it came through the default exchange."""
        if sequence > tally.upto:
            return False
        if tally.messages:
            return by_name and not deaths
        vhost, queue = tally.key
        return all(name != queue and self._was_empty((vhost, name), sequence, tally.upto) for name, _ in deaths)

    def led_anew(self) -> None:
        """A MARKER: what was found empty on the primary before need not be on this one."""
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
        """The log ends at `end`: a host that went down has lost what came after it (R16), and other entries will take these sequences."""
        self._pending = {key: tally for key, tally in self._pending.items() if tally.upto <= end}

    def export(self, applied: int) -> list[pb.Tally]:
        """What a restart has still to act on of the entries up to `applied`; it reads the others again."""
        return [
            pb.Tally(vhost=t.key[0], queue=t.key[1], upto=t.upto, messages=t.messages, held=t.held.flat(), spared=t.spared.flat())
            for t in self._pending.values()
            if t.sequence <= applied
        ]
