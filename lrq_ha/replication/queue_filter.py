"""The filter of one queue: applies the log's operations to the copies in it (R9, R10). No I/O.

Rules:

- A copy that does not count (R8) is acked away. The other rules are about copies that count.
- The key of an operation is (queue, sequence, origin, visit): see dead_letters.py. A copy met at a visit that is over is rejected, so that
  this broker moves it too; a DEQUEUE voids also every copy whose `x-death` says that it has been there.
- A PURGE voids copies that never died, except copies that clients held then. Dead-lettered copies may have come after it; the driver purges the
  broker's queue instead, if clients held nothing. Rejected or moved copies still move on: they had left the primary's queue, and not yet
  this one.
- A sweeper that has moved a copy, or no longer finds it, looks again in other queues with operations on its line: round a retry loop the copy
  may come to a queue that was searched a moment before.
- Operations are never forgotten one by one: a crashed broker may bring back a copy whose ack it had taken. They are bitmaps
  of sequences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from pyroaring import BitMap64

from .applied import Generations, QueueRecord, VisitRecord
from .dead_letters import EVERY_SEQUENCE, Deaths, Visits, origin_of, visit_of
from .due_copies import DueCopies, NodePosition, pairs
from .queues import QueueKey


class Verdict(Enum):
    """The filter's decisions on a copy."""

    GIVE = "give"  # give it to the client; a sweeper gives it back
    ACK = "ack"  # ack it away
    REJECT = "reject"  # basic.reject(requeue=false): this broker moves it as the primary's did
    HOLD = "hold"  # an operation that may concern it is not safe yet: ask again after the next `safe` or `cut`


class Kind(Enum):
    """The operations of the log that the filter knows."""

    DEQUEUE = "dequeue"
    REJECT = "reject"
    MOVED = "moved"
    REFUSED = "refused"
    PURGE = "purge"


class Filters(NodePosition, Protocol):
    """What the filter of one queue needs of all of them (`delivery_filter.DeliveryFilter`)."""

    generations: Generations
    refused: QueueFilter
    followers: dict[QueueKey, list[QueueFilter]]
    to_move: set[QueueFilter]
    changed: int
    recorded: int

    def find(self, key: QueueKey) -> QueueFilter | None: ...


class QueueFilter:
    """The filter of one queue; `DeliveryFilter.queue` makes it. `due`: the copies that this node's sweeper has still to find."""

    __slots__ = (
        "__weakref__", "_done", "_filter", "_generations", "_held", "_moved", "_purged", "_record", "_spared", "_top", "_visits", "departed", "due",
        "key", "name", "overlap",
    )  # fmt: skip

    def __init__(self, key: QueueKey, parent: Filters) -> None:
        self.key = key
        self.name = key[1]
        self._filter = parent
        self._generations = parent.generations
        self._top = 0  # no operation above it is known, as for nearly all copies that a client is given for the first time
        self._done = BitMap64()  # DEQUEUE of copies that never died
        self._moved = BitMap64()  # REJECT or MOVED of such copies
        self._purged = 0  # PURGE: of such copies, all below it
        self._spared = BitMap64()  # except these
        self._visits: dict[str, Visits] = {}  # of copies that died, by origin
        # Sequences of unsafe operations, whatever the visit: one too many only costs a short wait.
        self._held = BitMap64()
        self.overlap = False  # two unsafe operations name one sequence
        self.due = DueCopies(parent)
        self.departed = 0  # operations on entries before this one will be forgotten; 0: none
        self._record: QueueRecord | None = None  # the state in the applied record, until something changes; it is written several times a second

    def verdict(self, seq: int, generation: int, deaths: Deaths = ()) -> Verdict:
        """What to do with a copy in this queue.

        Args:
            seq: Its sequence, of the stamp.
            generation: Its generation, of the stamp.
            deaths: Its `x-death`; empty for nearly all, and that is the fast path.
        """
        if not self._generations.counts(seq, generation):
            return Verdict.ACK
        everywhere = self._filter.refused
        if deaths:
            return self._verdict_dead_lettered(seq, deaths, everywhere)
        if seq > self._top and seq > everywhere._top:
            return Verdict.GIVE
        if seq in self._done or seq in everywhere._done:
            return Verdict.ACK
        if seq in self._held or seq in everywhere._held:
            return Verdict.HOLD
        if seq in self._moved:
            return Verdict.REJECT
        return Verdict.ACK if self._is_purged(seq) else Verdict.GIVE

    def _verdict_dead_lettered(self, seq: int, deaths: Deaths, everywhere: QueueFilter) -> Verdict:
        origin = deaths[0][0]
        visit = visit_of(self.name, deaths)
        here = self._visits.get(origin)
        if seq in everywhere._done or (here is not None and here.done_upto(seq, visit)):
            return Verdict.ACK
        path = self._path(deaths)
        for peer, count in path:
            if peer._dequeued_upto(seq, origin, count - 1):
                return Verdict.ACK
        if seq in everywhere._held or seq in self._held or any(seq in peer._held for peer, _ in path):
            return Verdict.HOLD
        return Verdict.REJECT if here is not None and here.moved_from(seq, visit) else Verdict.GIVE

    def implied_moves(self, seq: int, deaths: Deaths) -> list[tuple[str, int]]:
        """(queue, visit) of the MOVED entries that must precede, in one batch, an operation on this copy (R10).

        One per queue is enough: MOVED at a visit implies all visits before it, so a message that went round a
        thousand times costs no more. Note each with origin `origin_of(deaths)`.
        """
        moves = []
        for name, count in deaths:
            peer = self._filter.find((self.key[0], name))
            if peer is None or not peer._moved_from(seq, deaths[0][0], count - 1):
                moves.append((name, count - 1))
        return moves

    def is_done(self, seq: int) -> bool:
        """Whether a copy of this entry that never died was dequeued here for certain. See `DeliveryFilter.may_skip`."""
        return seq in self._done or seq in self._filter.refused._done or (self._is_purged(seq) and seq not in self._moved)

    def _is_purged(self, seq: int) -> bool:
        return seq < self._purged and seq not in self._spared

    # For the sweeper.

    @property
    def has_dead_letters(self) -> bool:
        """Whether operations on copies that died in other queues are known."""
        return bool(self._visits)

    @property
    def spares(self) -> bool:
        """Whether a purge has spared copies: others that it took may be left."""
        return bool(self._spared)

    def to_move(self) -> BitMap64:
        """The sequences with a rejected or moved copy that is still to be found."""
        moving = self.due.sequences & self._moved
        for here in self._visits.values():
            for members in here.moved.values():
                moving |= self.due.sequences & members
        return moving

    def sweeping_verdict(self, seq: int, generation: int, deaths: Deaths = ()) -> Verdict:
        """`verdict` for a sweeper: HOLD also if this node has not reached the operation that moves the copy on."""
        verdict = self.verdict(seq, generation, deaths)
        return Verdict.HOLD if verdict is Verdict.REJECT and self.is_early(seq, deaths) else verdict

    def is_early(self, seq: int, deaths: Deaths = ()) -> bool:
        """Whether this node has not reached the operation that moves this copy on.

        A copy at an earlier visit than every known operation moved on by itself at the primary: the time is unknown, and it need not wait.
        """
        return self.due.is_early(seq, (origin_of(deaths) or self.name, visit_of(self.name, deaths)))

    def skipped(self, first: int, last: int) -> None:
        """Entries first .. last were never applied here, so no copy is to be found."""
        self._record = None
        self.due.drop(first, last)

    def gone(self, seq: int, generation: int, deaths: Deaths = ()) -> None:
        """A copy was certainly removed or moved as its verdict said: a later reply on the channel has shown it.

        Copies that do not count settle nothing and are ignored.
        """
        if not self._generations.counts(seq, generation):
            return
        line, visit = origin_of(deaths) or self.name, visit_of(self.name, deaths)
        self._left(seq, line, visit)
        for peer, count in self._path(deaths):
            peer._left(seq, line, count - 1)
        if self._moved_from(seq, line, visit) and not self._dequeued_upto(seq, line, visit):
            for peer in self.followers(line):
                if peer._visits[line].known_after(seq, visit_of(peer.name, deaths) - 1):
                    peer._look_again(BitMap64([seq]), missed=False)

    def met(self, seq: int, generation: int, deaths: Deaths = ()) -> None:
        """A copy was met that stays for now, at a later visit than one that it was moved on from: a restart has forgotten that it left then."""
        if self._generations.counts(seq, generation):
            self.due.has_moved(seq, origin_of(deaths) or self.name, visit_of(self.name, deaths) - 1)

    def end_pass(self, expected: BitMap64, undecided: Collection[tuple[int, str]] = ()) -> BitMap64:
        """The pass has met every copy in the queue. Returns the expected copies that it did not find; they are not due here any more.

        The operations stay: the door still acts on them, also if the copies have expired into dead-letter queues.

        Args:
            expected: Of `DueCopies.expected`, when the pass began.
            undecided: Copies that it met and that stay for now, as their verdict was HOLD: (sequence, queue of the first death or this one).
        """
        self._record = None
        missed, moved_on = self.due.miss(expected, undecided)
        if moved_on:
            for line in (self.name, *self._visits):
                for peer in self.followers(line):
                    peer._look_again((peer._visits[line].members() & moved_on) - peer.due.sequences, missed=True)
        return missed

    # Within this module.

    def _look_again(self, sequences: BitMap64, *, missed: bool) -> None:
        self._record = None
        self.due.look_again(sequences, missed=missed)
        self._filter.to_move.add(self)

    def _path(self, deaths: Deaths) -> list[tuple[QueueFilter, int]]:
        vhost, find = self.key[0], self._filter.find
        return [(peer, count) for name, count in deaths if (peer := find((vhost, name))) is not None]

    def followers(self, line: str) -> list[QueueFilter]:
        """The other queues with known operations on dead-lettered copies of this line."""
        known = self._filter.followers.get((self.key[0], line), ())
        return [peer for peer in known if peer is not self and line in peer._visits]

    def _visits_of(self, origin: str) -> Visits:
        found = self._visits.get(origin)
        if found is None:
            found = self._visits[origin] = Visits()
            known = self._filter.followers.setdefault((self.key[0], origin), [])
            if self not in known:
                known.append(self)
        return found

    def _dequeued_upto(self, seq: int, origin: str, visit: int) -> bool:
        if origin == self.name and seq in self._done:
            return True
        here = self._visits.get(origin)
        return here is not None and here.done_upto(seq, visit)

    def _moved_from(self, seq: int, origin: str, visit: int) -> bool:
        if origin == self.name and visit == 0:
            return seq in self._moved
        here = self._visits.get(origin)
        return here is not None and here.moved_from(seq, visit)

    def _left(self, seq: int, line: str, visit: int) -> None:
        """The copy of this line has left this queue's `visit`: it is not due any more, unless another operation is known."""
        self.due.has_moved(seq, line, visit)
        if seq not in self.due.sequences:
            return
        direct = line != self.name and (seq in self._done or seq in self._moved)
        if not direct and not any(here.known_after(seq, visit if o == line else -1) for o, here in self._visits.items()):
            self._record = None
            self.due.drop(seq, seq)

    def concerns(self, ranges: Sequence[int]) -> None:
        """An operation on these ranges was noted."""
        self._top = max((self._top, *ranges[1::2]))

    def hold(self, ranges: Sequence[int]) -> None:
        """An operation on these ranges is not safe yet."""
        for first, last in pairs(ranges):
            if self._held.range_cardinality(first, last + 1):
                self.overlap = True
            self._held.add_range(first, last + 1)

    def hold_nothing(self) -> None:
        """Clears the unsafe operations; the caller adds them again."""
        self._held.clear()
        self.overlap = False

    def release(self, ranges: Sequence[int]) -> None:
        """The operation on these ranges is safe."""
        for first, last in pairs(ranges):
            self._held.remove_range(first, last + 1)

    def apply(self, op: Op) -> None:
        """A safe operation decides from now on."""
        self._record = None
        if op.kind is Kind.PURGE:
            self._purge(op.ranges)
            return
        dequeued = op.kind is not Kind.REJECT and op.kind is not Kind.MOVED
        for first, last in pairs(op.ranges):
            if op.origin:
                fresh = self._visits_of(op.origin).add(first, last, op.visit, dequeued=dequeued)
                if op.sweep:
                    self.due.sequences |= fresh
                if op.origin != self.name or dequeued:
                    continue
            self._apply_direct(first, last, self._done if dequeued else self._moved, op.sweep)
        if op.moves and op.seq > self._filter.recorded:
            self.take_turn(op, self._filter.changed)

    def take_turn(self, op: Op, behind: int) -> None:
        """Adds an operation's moves to a turn, due when the node has reached it. `behind`: the last declaration or purge before it."""
        self._filter.to_move.add(self)
        self.due.take_turn((op.origin or self.name, op.visit), op.ranges, op.seq, behind)

    def _purge(self, ranges: Sequence[int]) -> None:
        end = ranges[-1] + 1
        if end > self._purged:
            self._spared.add_range(self._purged, end)
            self._purged = end
        moving = self.to_move()
        for first, last in pairs(ranges):
            self._spared.remove_range(first, last + 1)
        self.due.purge(ranges, moving)

    def _apply_direct(self, first: int, last: int, members: BitMap64, sweep: bool) -> None:
        if sweep and members.range_cardinality(first, last + 1):  # read again: a known copy may have been found already
            fresh = BitMap64()
            fresh.add_range(first, last + 1)
            self.due.sequences |= fresh - members
        elif sweep:
            self.due.sequences.add_range(first, last + 1)
        members.add_range(first, last + 1)

    @property
    def may_have_sent_on(self) -> bool:
        """Whether operations say that copies have come here from other queues, or went from here to others."""
        return bool(self._visits) or any(self.name in peer._visits for peer in self._filter.followers.get(self.key, ()))

    @property
    def is_looked_for(self) -> bool:
        """Whether a copy of this queue, or of its line in another, is still to be found."""
        lines = ((peer._visits[self.name].members(), peer.due.sequences) for peer in self.followers(self.name))
        return bool(self.due) or any(members.intersect(due) for members, due in lines)

    def forget(self, before: int) -> None:
        """No copy published before this entry can be here any more, nor in any other queue."""
        self._record = None
        self.departed = 0
        for members in (self._done, self._moved, self._spared):
            members.remove_range(0, before)
        self.due.forget_moves(before)
        if self._purged <= before:
            self._purged = 0
        for line in list(self._visits):
            self.forget_line(line, before)

    def depart(self, at_seq: int) -> None:
        """Operations on entries before this one will be forgotten."""
        self._record = None
        self.departed = at_seq

    def take_back(self, first: int, kept: Iterable[tuple[int, int]]) -> int:
        """Keeps as dequeued only these inclusive ranges, and entries before `first`. Returns the least sequence that is dequeued no more; 0: none."""
        lost = self._done.copy()
        lost.remove_range(0, first)
        for begin, end in kept:
            lost.remove_range(begin, end + 1)
        self._record = None
        self._done -= lost
        return int(lost.min()) if lost else 0

    def forget_line(self, line: str, before: int) -> None:
        """Of the dead-lettered copies of this line, none before this entry can be left."""
        here = self._visits[line]
        self._record = None
        here.forget(before)
        if here.done or here.moved:
            return
        del self._visits[line]
        key = (self.key[0], line)
        known = self._filter.followers[key]
        known.remove(self)
        if not known:
            del self._filter.followers[key]

    def lose(self, end: int, *, known: bool) -> None:
        """The log ends at `end`. `known`: rejections by lost entries are known; the remaining log has been noted again."""
        self._record = None
        if self.departed > end:
            self.departed = 0
        for members in (self._done, self._moved, self._spared):
            members.remove_range(end + 1, EVERY_SEQUENCE)
        self._purged = min(self._purged, end + 1)
        for here in self._visits.values():
            here.lose(end)
        self._visits = {origin: here for origin, here in self._visits.items() if here.done or here.moved}
        self.due.lose(end, self._filter.changed, known=known)

    def is_empty(self) -> bool:
        """Whether no operation is known."""
        return not (self._done or self._moved or self._held or self.due or self._visits or self._purged or self.departed)

    def export(self) -> QueueRecord:
        """The filter's state for the applied record; the identical object as long as nothing changes."""
        if self._record is None:
            self._record = self._as_record()
        return self._record

    def _as_record(self) -> QueueRecord:
        visits = tuple(
            VisitRecord(origin, visit, dequeued, members.serialize())
            for origin, here in self._visits.items()
            for dequeued, table in ((True, here.done), (False, here.moved))
            for visit, members in table.items()
        )
        bitmaps = (self._done.serialize(), self._moved.serialize(), self.due.sequences.serialize())
        return QueueRecord(*self.key, *bitmaps, self._purged, visits, self.departed, self._spared.serialize())

    def load(self, record: QueueRecord) -> None:
        """From an applied record."""
        self._record = None
        self._done = BitMap64.deserialize(record.done)
        self._moved = BitMap64.deserialize(record.moved)
        self._purged = record.purged
        self._spared = BitMap64.deserialize(record.spared) if record.spared else BitMap64()
        self.departed = record.departed
        self._top = max((self._purged, *(int(members.max()) for members in (self._done, self._moved) if members)))
        for part in record.visits:
            here = self._visits_of(part.origin)
            (here.done if part.dequeued else here.moved)[part.visit] = BitMap64.deserialize(part.positions)
        moved = {(line, visit): members for line, here in self._visits.items() for visit, members in here.moved.items()}
        if self.due.load(BitMap64.deserialize(record.due), {(self.name, 0): self._moved, **moved}):
            self._filter.to_move.add(self)


class Op(NamedTuple):
    seq: int  # of the operation's own entry
    kind: Kind
    target: QueueFilter
    ranges: Sequence[int]
    visit: int
    origin: str
    sweep: bool

    @property
    def moves(self) -> bool:
        """Whether the sweeper is to move copies on to other queues."""
        return self.sweep and self.kind in (Kind.REJECT, Kind.MOVED)
