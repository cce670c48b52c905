"""Decides on each copy of a message that a broker delivers: give it, ack it away, move it, or wait (R9, R10). No I/O.

The door (primary) and the sweeper (backup) use it. The rules for one queue are in `queue_filter`.

Rules:

- An operation is noted when its entry is appended, and decides when that entry is safe. In between, copies that it may concern
  are held. `cut` removes operations that were cut off the log.
- Operations go with their queue. When everything up to the queue's deletion is applied, no older copy can be in it, nor come to it. Only copies
  that the queue dead-lettered may live on elsewhere: such queues are kept, the last DEPARTED_MAX. Queues that the log does not declare
  (they may be gone, too) are also kept, from their last operation on. A queue with a due copy stays until that is found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from weakref import WeakValueDictionary

from pyroaring import BitMap64

from ..errors import IllegalEvent
from .applied import Generations, QueueRecord
from .dead_letters import EVERY_SEQUENCE, Deaths
from .queue_filter import Kind, Op, QueueFilter, Verdict
from .queues import QueueKey

DEPARTED_MAX = 1_000
"""Number of queues kept that are gone, or that the log does not declare. The operations on older ones are forgotten: a copy of such a queue that a
crashed broker brings back, or that died into another queue before a sweeper found it, is given to a client once more."""
EMPTY = BitMap64().serialize()


class DeliveryFilter:
    """The operations of the log, by queue, and their verdicts on the copies on this node's broker."""

    def __init__(self, generations: Generations) -> None:
        self.generations = generations
        self._queues: dict[QueueKey, QueueFilter] = {}  # queues with known operations
        self._at_hand: WeakValueDictionary[QueueKey, QueueFilter] = WeakValueDictionary()  # and every filter that a caller holds
        self._departed: dict[QueueKey, None] = {}  # of the former, those that are gone or not declared, by departure or last use
        self.followers: dict[QueueKey, list[QueueFilter]] = {}  # by queue of the first death: where operations on its dead letters are known
        self._noted: deque[Op] = deque()  # in log order, all above _safe
        self._safe = 0
        self.reached: Callable[[], int] = lambda: EVERY_SEQUENCE
        """The entry that this node has reached: it has carried out all before it, except entries that full queues refuse."""
        self.known = 0
        """No entry behind it has decided anything yet; a record may include safe entries that are not yet known again to be safe."""
        self._changes: deque[int] = deque()  # declarations and purges, in log order, all above _safe
        self.changed = 0  # the last declaration or purge before the operation that is decided now
        self.recorded = 0  # operations up to it were known before they are noted again
        self.to_move: set[QueueFilter] = set()  # queues in which a rejected copy may still have to be found
        self.refused = QueueFilter(("", ""), self)
        """Stands for every queue: a REFUSED entry is dequeued everywhere."""

    def queue(self, key: QueueKey) -> QueueFilter:
        """The filter of a queue. A filter without operations lives as long as the caller keeps it."""
        found = self._queues.get(key) or self._at_hand.get(key)
        if found is None:
            found = self._at_hand[key] = QueueFilter(key, self)
        return found

    def _known(self, key: QueueKey) -> QueueFilter:
        """The filter of a queue, created to note an operation."""
        found = self._queues.get(key)
        if found is None:
            found = self._queues[key] = self.queue(key)
        return found

    def find(self, key: QueueKey) -> QueueFilter | None:
        """The filter of a queue, if an operation on it is known."""
        return self._queues.get(key)

    def queues(self) -> tuple[QueueFilter, ...]:
        """All queues with known operations: a sweeper goes through them."""
        return tuple(self._queues.values())

    def note(
        self,
        op_seq: int,
        kind: Kind,
        queue: QueueKey | None,
        ranges: Sequence[int],
        visit: int,
        origin: str,
        *,
        sweep: bool,
    ) -> None:
        """The entry `op_seq`, an operation, was appended (or read again at a start: noting twice is harmless).

        Args:
            op_seq: Its sequence; grows from call to call, several calls may share one (TX).
            kind: PURGE takes ranges from 0 to the last sequence that goes; it spares the gaps between them.
            queue: None for REFUSED only.
            ranges: Sequences, flattened inclusive ranges: first, last, first, last, …
            visit: Of the copies at `queue` (`visit_of`); 0 for REFUSED and PURGE.
            origin: `origin_of` the copies' deaths; "" for REFUSED and PURGE.
            sweep: Whether this node's own copy must be found and removed: true for operations of other nodes' clients, false where
                a client of this node settled the very copy it was given.

        Raises:
            IllegalEvent: `op_seq` goes back. Nothing was changed.
        """
        if self._noted and op_seq < self._noted[-1].seq:
            raise IllegalEvent(f"operation {op_seq} is noted after operation {self._noted[-1].seq}")
        target = self.refused if queue is None else self._known(queue)
        if visit == 0 and origin == target.name:
            origin = ""  # its first stay in the queue of its first death: it had not died then
        op = Op(op_seq, kind, target, ranges, visit, origin, sweep and queue is not None)
        target.concerns(ranges)
        if op.moves and op_seq <= self.recorded:
            target.take_turn(op, self._changes[-1] if self._changes else self.changed)
        if op_seq <= self._safe:
            target.apply(op)
        else:
            self._noted.append(op)
            target.hold(ranges)

    def note_change(self, sequence: int) -> None:
        """Entry `sequence`, a declaration, deletion or purge, was appended, or read again: it may change where dead letters go."""
        if sequence <= self._safe:
            self.changed = max(self.changed, sequence)
        else:
            self._changes.append(sequence)

    def _come_to(self, sequence: int) -> None:
        while self._changes and self._changes[0] <= sequence:
            self.changed = self._changes.popleft()

    def moving(self, vhost: str | None, upto: int, parked: Iterable[tuple[int, int]] = ()) -> list[tuple[QueueFilter, int]]:
        """Queues that rejected or moved copies must still leave, by operations before entry `upto`, and how many. Ask when the node has reached it.

        Args:
            vhost: Vhost of the queues; None: all.
            upto: The entry.
            parked: As for `DueCopies.count_moves`.
        """
        found = []
        for target in [each for each in self.to_move if vhost is None or each.key[0] == vhost]:
            if due := target.due.count_moves(upto, parked):
                found.append((target, due))
            elif not target.to_move():
                self.to_move.discard(target)
        return found

    def safe(self, upto: int) -> None:
        """All entries up to `upto` are safe: their operations decide from now on."""
        if upto <= self._safe:
            return
        self._safe = upto
        self.known = max(self.known, upto)
        noted = self._noted
        again = set()
        while noted and noted[0].seq <= upto:
            op = noted.popleft()
            self._come_to(op.seq)
            op.target.apply(op)
            op.target.release(op.ranges)
            if op.target.overlap:
                again.add(op.target)
        self._come_to(upto)
        self._hold_again(again)

    def cut(self, from_seq: int) -> None:
        """The entries from `from_seq` on were cut off the log; their operations never happened.

        Raises:
            IllegalEvent: A safe entry would be cut off. Nothing was changed.
        """
        if from_seq <= self._safe:
            raise IllegalEvent(f"the log is cut from {from_seq} on, but all up to {self._safe} is safe")
        while self._changes and self._changes[-1] >= from_seq:
            self._changes.pop()
        again = set()
        while self._noted and self._noted[-1].seq >= from_seq:
            again.add(self._noted.pop().target)
        self._hold_again(again)

    def _hold_again(self, targets: set[QueueFilter]) -> None:
        if not targets:
            return
        for target in targets:
            target.hold_nothing()
        for op in self._noted:
            if op.target in targets:
                op.target.hold(op.ranges)

    def verdict(self, queue: QueueKey, seq: int, generation: int, deaths: Deaths = ()) -> Verdict:
        """`QueueFilter.verdict` by name."""
        target = self._queues.get(queue)
        if target is None:  # for a copy that never died, only operations on every queue are known
            target = self.queue(queue) if deaths else self.refused
        return target.verdict(seq, generation, deaths)

    def may_skip(self, queues: Sequence[QueueKey], seq: int) -> bool:
        """Whether a late entry need not be applied (R11): refused, or dequeued from the one queue that it is routed to.

        Args:
            queues: The queues of its route; empty if the route is not known.
            seq: Its sequence.
        """
        if self.refused.is_done(seq):
            return True
        if len(queues) != 1:
            return False
        target = self._queues.get(queues[0])
        return target is not None and target.is_done(seq)

    def lose(self, end: int) -> None:
        """The log ends at `end`: a host that went down lost the entries after it (R16), and kept a record that includes them.

        Other entries will take these sequences: operations on the lost ones must not be applied to them.
        """
        for target in (self.refused, *self._queues.values()):
            target.lose(end, known=self.known > end)
        self.known = self.recorded = min(self.known, end)
        self._departed = {key: None for key in self._departed if self._queues[key].departed}

    def lose_refusals(self, first: int, kept: Iterable[tuple[int, int]]) -> int:
        """Forgets refusals by entries that are lost: the record has them, and the log does not.

        The effect of an operation on a copy remains. But a refused message is in no queue, and its ID is free only as long as the log says so: a
        duplicate would be confirmed and never delivered. So the message counts as published, and is published again.

        Args:
            first: The first entry that the log still has. Messages refused before it cannot be published again.
            kept: Refusals that are still in the log: inclusive ranges.

        Returns:
            The least sequence that is no longer refused; 0 if there is none.
        """
        return self.refused.take_back(first, kept)

    def forget_queue(self, queue: QueueKey, at_seq: int, *, dead_letters: bool = True) -> None:
        """The queue was deleted by entry `at_seq`, and everything up to there is applied; a new queue of that name may have followed.

        Args:
            queue: Its key.
            at_seq: Messages published before this entry are gone from the queue.
            dead_letters: Whether it may have dead-lettered: copies whose `x-death` names it may live on, and their operations are kept.
        """
        target = self._queues.get(queue)
        if target is None:
            return
        target.end_pass(target.due.expected(at_seq - 1))
        if dead_letters or target.may_have_sent_on:
            self._depart(target, at_seq)
        else:
            self._forget(target, at_seq)

    def undeclared(self, queue: QueueKey, at_seq: int) -> None:
        """Entry `at_seq`, up to which everything is applied, is an operation on a queue that the log did not declare: the queue may be gone.

        Args:
            queue: Its key.
            at_seq: The operation's entry.
        """
        target = self._queues.get(queue)
        if target is not None:
            self._depart(target, at_seq)

    def _depart(self, target: QueueFilter, at_seq: int) -> None:
        target.depart(at_seq)
        self._departed.pop(target.key, None)
        self._departed[target.key] = None
        for key in list(islice(self._departed, max(0, len(self._departed) - DEPARTED_MAX))):
            del self._departed[key]
            oldest = self._queues[key]
            if oldest.is_looked_for:
                self._departed[key] = None  # later
                continue
            for peer in oldest.followers(oldest.name):
                peer.forget_line(oldest.name, oldest.departed)
                self._drop_if_empty(peer)
            self._forget(oldest, oldest.departed)

    def _forget(self, target: QueueFilter, before: int) -> None:
        target.forget(before)
        self._departed.pop(target.key, None)
        self._drop_if_empty(target)

    def _drop_if_empty(self, target: QueueFilter) -> None:
        if target.is_empty():
            del self._queues[target.key]

    def export(self) -> tuple[tuple[QueueRecord, ...], bytes]:
        """(queues, refused) for the applied record: all safe operations. An unchanged record is the identical object."""
        records = tuple(target.export() for target in self._queues.values() if not target.is_empty())
        return records, self.refused.export().done

    @classmethod
    def restored(cls, generations: Generations, queues: Iterable[QueueRecord], refused: bytes, known: int = 0) -> DeliveryFilter:
        """From an applied record. Note the operations of all entries behind R again."""
        new = cls(generations)
        new.known = new.recorded = known
        parts = [(new._known((record.vhost, record.queue)), record) for record in queues]
        for target, record in parts:
            target.load(record)
        new._departed = {target.key: None for target, record in sorted(parts, key=lambda each: each[1].departed) if record.departed}
        if refused:
            new.refused.load(QueueRecord(*new.refused.key, refused, EMPTY, EMPTY, 0, ()))
        return new
