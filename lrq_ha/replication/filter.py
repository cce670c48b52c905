"""What to do with a copy of a message that a broker hands out: give it, ack it away, move it, or wait (R9, R10).

Used by the door (primary) and by the sweeper (backup). Rules:
- A copy that does not count (R8) is acked away. Whatever follows speaks of copies that count.
- An operation is noted when its entry is appended, and decides when that entry is safe. In between, copies that it may concern
  are held. `cut` takes back what was cut off the log.
- The key of an operation is (queue, sequence, origin, visit): see visits.py. A copy met at a visit that is behind it is rejected, so that
  this broker moves it too; a DEQUEUE voids also every copy whose `x-death` says that it has been there.
- A PURGE voids copies that never died, but for those that clients held then. Dead-lettered ones may have come after it; the driver purges the
  broker's queue instead, if clients held nothing. What was rejected or moved goes its way all the same: it had left the queue, and had not yet here.
- What was rejected goes to where dead letters went at the primary then. So a sweeper moves it only when its node has come to that entry, and has
  carried out the declarations and purges before it; and the next declaration or purge waits for that. So what was rejected is remembered in turns:
  none reaches over a declaration or purge, and what comes all the time does not put off what came before. A turn names copies, (origin, visit) and
  sequence: a message may come back and be rejected again, or die in two queues and come to a third twice, with a purge in between.
- A sweeper that has moved a copy, or no longer finds it, looks again where more is known of its line: round a retry loop it may come to a
  queue that was gone through, without finding it, a moment before.
- Operations are never forgotten one by one: a broker that crashed may bring back what it had taken an ack for. They are bitmaps
  of sequences.
- They go with their queue. When everything up to its deletion is applied, no copy from before can be in it, nor come to it. Only where it may have
  dead-lettered some of them may live on elsewhere: such queues are kept, the last DEPARTED_MAX. So are queues that the log does not declare (they
  may be gone, too), from their last operation on. One in which something is due stays until it is found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import NamedTuple
from weakref import WeakValueDictionary

from pyroaring import BitMap64

from lrq_ha.replication.applied import Generations, QueueRecord, VisitRecord
from lrq_ha.replication.errors import IllegalEvent
from lrq_ha.replication.visits import EVERY_SEQUENCE, Deaths, Visits, origin_of, visit_of

QueueKey = tuple[str, str]
"""(vhost, queue)"""
Stay = tuple[str, int]
"""Of a copy in a queue: that of its first death, or this one if it never died, and its visit here."""
DEPARTED_MAX = 1_000
"""Queues that are gone, or that the log does not declare, of which something is known. Of the one beyond it what is known is forgotten: a copy of
it that a crashed broker brings back, or that died into another queue before a sweeper found it, is given to a client once more."""


class Verdict(Enum):
    """What to do with a copy."""

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


_NOTHING = BitMap64()


def _pairs(flat: Sequence[int]) -> Iterator[tuple[int, int]]:
    values = iter(flat)
    return zip(values, values)


class QueueFilter:
    """The filter of one queue; `DeliveryFilter.queue` makes it.

    `due`: sequences with an operation whose copy the sweeper of this node has still to find.
    """

    __slots__ = (
        "__weakref__",
        "_again",
        "_departed",
        "_done",
        "_due",
        "_early",
        "_filter",
        "_generations",
        "_held",
        "_lost",
        "_moved",
        "_moving",
        "_overlap",
        "_purged",
        "_record",
        "_spared",
        "_top",
        "_visits",
        "key",
        "name",
    )

    def __init__(self, key: QueueKey, parent: DeliveryFilter) -> None:
        self.key = key
        self.name = key[1]
        self._filter = parent
        self._generations = parent.generations
        self._top = 0  # nothing is known of sequences above it: nearly all that a client is given for the first time
        self._done = BitMap64()  # DEQUEUE of copies that never died
        self._moved = BitMap64()  # REJECT or MOVED of such copies
        self._purged = 0  # PURGE: of such copies, all below,
        self._spared = BitMap64()  # but for these
        self._visits: dict[str, Visits] = {}  # of copies that died, by origin
        # What unsafe operations name, whatever the visit: too many in it only means to wait a little.
        self._held = BitMap64()
        self._overlap = False  # two unsafe operations name the same sequence
        self._due = BitMap64()
        self._again = BitMap64()  # of these, what another queue missed: it is looked for here once more, and then given up
        self._early: list[_Turn] = []  # what is to move by operations that this node may not have come to; in log order
        self._lost: dict[Stay, BitMap64] = {}  # of these, what the record knows of entries that the log has lost: they may be read again
        self._moving: dict[Stay, BitMap64] = {}  # and by those that it has come to: copies that were not seen to leave
        self._departed = 0  # what is known of entries before this one is on its way out; 0: nothing is
        self._record: QueueRecord | None = None  # what stands in the applied record, as long as nothing changes; it is written several times a second

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
        """(queue, visit) of the MOVED entries that must precede, in the same batch, an operation on this copy (R10).

        One per queue is enough: MOVED at a visit stands for all visits before it too, so a message that went round a
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
    def has_due(self) -> bool:
        """Whether any copy is still to be found, wherever R is."""
        return bool(self._due)

    @property
    def has_dead_letters(self) -> bool:
        """Whether operations on copies that died in other queues are known."""
        return bool(self._visits)

    @property
    def spares(self) -> bool:
        """Whether a purge has spared something: other copies that it took may be left."""
        return bool(self._spared)

    def due(self, applied: int) -> int:
        """How many sequences up to `applied` (R) have an operation whose copy is to be found now."""
        early = self._too_early()
        return int((self._due - early).rank(applied) if early else self._due.rank(applied))

    def moves_due(self, upto: int, parked: Iterable[tuple[int, int]] = ()) -> int:
        """How many of those up to an entry were rejected or moved on: a copy is to leave this queue for others now.

        Args:
            upto: The entry.
            parked: Inclusive ranges of entries that wait for room: no copy of them can be met.
        """
        self._turns()
        moving = self._due & BitMap64.union(_NOTHING, *self._moving.values())
        for first, last in parked if moving else ():
            moving.remove_range(first, last + 1)
        return int(moving.rank(upto))

    def to_move(self) -> BitMap64:
        """The sequences of which a copy was rejected or moved on, and is still to be found."""
        moving = self._due & self._moved
        for here in self._visits.values():
            for members in here.moved.values():
                moving |= self._due & members
        return moving

    def sweeping_verdict(self, seq: int, generation: int, deaths: Deaths = ()) -> Verdict:
        """`verdict` for a sweeper: HOLD also where this node has not come to the operation that moves the copy on."""
        verdict = self.verdict(seq, generation, deaths)
        return Verdict.HOLD if verdict is Verdict.REJECT and self.is_early(seq, deaths) else verdict

    def is_early(self, seq: int, deaths: Deaths = ()) -> bool:
        """Whether this node has not come to the operation that moves this copy on.

        One at an earlier visit than any operation that is known of has moved on by itself at the primary: nobody knows when, and it need not wait.
        """
        turns = self._turns()
        if not turns:
            return False
        stay = (origin_of(deaths) or self.name, visit_of(self.name, deaths))
        return any(seq in turn.moves.get(stay, _NOTHING) for turn in turns)

    def _too_early(self) -> BitMap64:
        turns = self._turns()
        if not turns:
            return _NOTHING
        early = (members for turn in turns for members in turn.moves.values())
        return BitMap64.union(_NOTHING, *early) - BitMap64.union(_NOTHING, *self._moving.values())

    def _turns(self) -> list[_Turn]:
        if self._early:
            reached = self._filter.reached()
            come_to = [turn for turn in self._early if turn.last <= reached]
            if come_to:
                self._early = [turn for turn in self._early if turn.last > reached]
                for turn in come_to:
                    for stay, members in turn.moves.items():
                        self._moving.setdefault(stay, BitMap64()).update(members)
            if self._early:
                self._early[0].grows = False
        return self._early

    def skipped(self, first: int, last: int) -> None:
        """first .. last were never applied here, so nothing is to be found."""
        self._record = None
        self._due.remove_range(first, last + 1)
        self._again.remove_range(first, last + 1)

    def gone(self, seq: int, generation: int, deaths: Deaths = ()) -> None:
        """A copy was removed or moved as its verdict said, for certain: a later reply on the channel has shown it.

        Copies that do not count settle nothing and are ignored.
        """
        if not self._generations.counts(seq, generation):
            return
        line, visit = origin_of(deaths) or self.name, visit_of(self.name, deaths)
        self._left(seq, line, visit)
        for peer, count in self._path(deaths):
            peer._left(seq, line, count - 1)
        if self._moved_from(seq, line, visit) and not self._dequeued_upto(seq, line, visit):
            for peer in self._followers(line):
                if peer._visits[line].known_after(seq, visit_of(peer.name, deaths) - 1):
                    peer._look_again(BitMap64([seq]))
                    peer._again.discard(seq)

    def met(self, seq: int, generation: int, deaths: Deaths = ()) -> None:
        """A copy was met that stays for now, at a later visit than one that it was moved on from: that it left then, a restart has forgotten."""
        if self._generations.counts(seq, generation):
            self._has_moved(seq, origin_of(deaths) or self.name, visit_of(self.name, deaths) - 1)

    def start_pass(self, applied: int) -> BitMap64:
        """The sequences that a pass over the whole queue, begun now, is to find. Give it to `end_pass`."""
        expected = self._due.copy()
        expected.remove_range(applied + 1, EVERY_SEQUENCE)
        return expected

    def end_pass(self, expected: BitMap64, undecided: Collection[tuple[int, str]] = ()) -> BitMap64:
        """The pass has met every copy in the queue. Returns what it did not find; that is not due here any more.

        The operations stay: the door still acts on them, also where the copies have expired into dead-letter queues.

        Args:
            expected: Of `start_pass`.
            undecided: Copies that it met and that stay for now, as their verdict was HOLD: (sequence, queue of the first death or this one).
        """
        met = BitMap64(sequence for sequence, _ in undecided)
        for (line, _), members in self._moving.items():  # of a message that died in two queues, one copy may be here and the other gone
            for sequence in expected & met & members:
                if (sequence, line) not in undecided:
                    members.discard(sequence)
        missed = (expected - met) & self._due
        self._record = None
        self._due -= missed
        moved_on = missed - self._again
        self._again -= missed
        if moved_on:
            for line in (self.name, *self._visits):
                for peer in self._followers(line):
                    found = (peer._visits[line].members() & moved_on) - peer._due
                    peer._look_again(found)
                    peer._again |= found
        return missed

    # Within this module.

    def _look_again(self, sequences: BitMap64) -> None:
        """They may come here, from where a sweeper has met them, or has not."""
        self._record = None
        self._due |= sequences
        self._filter.to_move.add(self)

    def _path(self, deaths: Deaths) -> list[tuple[QueueFilter, int]]:
        vhost, find = self.key[0], self._filter.find
        return [(peer, count) for name, count in deaths if (peer := find((vhost, name))) is not None]

    def _followers(self, line: str) -> list[QueueFilter]:
        """The other queues of which operations on dead-lettered copies of this line are known."""
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

    def _has_moved(self, seq: int, line: str, visit: int) -> None:
        """It has left this queue's `visit`, and all before it: nothing waits for that."""
        for stay in [each for each, members in self._moving.items() if each[0] == line and each[1] <= visit and seq in members]:
            self._moving[stay].discard(seq)
            if not self._moving[stay]:
                del self._moving[stay]

    def _left(self, seq: int, line: str, visit: int) -> None:
        """The copy of this line has left this queue's `visit`: nothing is due for it, unless something else is known of it."""
        self._has_moved(seq, line, visit)
        if seq not in self._due:
            return
        direct = line != self.name and (seq in self._done or seq in self._moved)
        if not direct and not any(here.known_after(seq, visit if o == line else -1) for o, here in self._visits.items()):
            self._record = None
            self._due.discard(seq)
            self._again.discard(seq)

    def _hold(self, ranges: Sequence[int]) -> None:
        for first, last in _pairs(ranges):
            if self._held.range_cardinality(first, last + 1):
                self._overlap = True
            self._held.add_range(first, last + 1)

    def _release(self, ranges: Sequence[int]) -> None:
        for first, last in _pairs(ranges):
            self._held.remove_range(first, last + 1)

    def _apply(self, op: _Op) -> None:
        """An operation is safe."""
        self._record = None
        if op.kind is Kind.PURGE:
            self._purge(op.ranges)
            return
        dequeued = op.kind is not Kind.REJECT and op.kind is not Kind.MOVED
        for first, last in _pairs(op.ranges):
            if op.origin:
                fresh = self._visits_of(op.origin).add(first, last, op.visit, dequeued=dequeued)
                if op.sweep:
                    self._due |= fresh
                if op.origin != self.name or dequeued:
                    continue
            self._apply_direct(first, last, self._done if dequeued else self._moved, op.sweep)
        if op.moves and op.seq > self._filter.recorded:
            self._take_turn(op, self._filter.changed)

    def _take_turn(self, op: _Op, behind: int) -> None:
        """What an operation moves on has its turn when the node has come to it. `behind`: the last declaration or purge before it."""
        self._filter.to_move.add(self)
        turn = self._early[-1] if self._early else None
        if turn is None or not turn.grows or turn.behind != behind:
            turn = _Turn(behind)
            self._early.append(turn)
        turn.last = max(turn.last, op.seq)
        stay = (op.origin or self.name, op.visit)
        members = turn.moves.setdefault(stay, BitMap64())
        for known in (self._moving.get(stay), self._lost.get(stay)):
            if known and known is not members:  # read again: the record does not tell by which entry it was moved
                for first, last in _pairs(op.ranges):
                    known.remove_range(first, last + 1)
        for first, last in _pairs(op.ranges):
            members.add_range(first, last + 1)

    def _purge(self, ranges: Sequence[int]) -> None:
        end = ranges[-1] + 1
        if end > self._purged:
            self._spared.add_range(self._purged, end)
            self._purged = end
        moving = self.to_move()
        for first, last in _pairs(ranges):
            self._spared.remove_range(first, last + 1)
            self._due.remove_range(first, last + 1)
        self._due |= moving
        self._again &= self._due

    def _apply_direct(self, first: int, last: int, members: BitMap64, sweep: bool) -> None:
        if sweep and members.range_cardinality(first, last + 1):  # read again: what is known may have been found already
            fresh = BitMap64()
            fresh.add_range(first, last + 1)
            self._due |= fresh - members
        elif sweep:
            self._due.add_range(first, last + 1)
        members.add_range(first, last + 1)

    @property
    def _may_have_sent_on(self) -> bool:
        """Whether operations say that copies have come here from other queues, or went from here to others."""
        return bool(self._visits) or any(self.name in peer._visits for peer in self._filter.followers.get(self.key, ()))

    @property
    def _is_looked_for(self) -> bool:
        """Whether anything of this queue, or of its line in another, is still to be found."""
        lines = ((peer._visits[self.name].members(), peer._due) for peer in self._followers(self.name))
        return bool(self._due) or any(members.intersect(due) for members, due in lines)

    def _forget(self, before: int) -> None:
        """Nothing of what was published before this entry can be here any more, nor anywhere else."""
        self._record = None
        self._departed = 0
        for members in (self._done, self._moved):
            members.remove_range(0, before)
        self._spared.remove_range(0, before)
        for members in self._moving.values():
            members.remove_range(0, before)
        if self._purged <= before:
            self._purged = 0
        for line in list(self._visits):
            self._forget_line(line, before)

    def _forget_line(self, line: str, before: int) -> None:
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

    def _lose(self, end: int, *, known: bool) -> None:
        """The log ends at `end`. `known`: what lost entries have rejected is known; what is left of the log has been noted again."""
        self._record = None
        if self._departed > end:
            self._departed = 0
        for members in (self._done, self._moved, self._due, self._again, self._spared, *self._moving.values()):
            members.remove_range(end + 1, EVERY_SEQUENCE)
        self._purged = min(self._purged, end + 1)
        for here in self._visits.values():
            here.lose(end)
        self._visits = {origin: here for origin, here in self._visits.items() if here.done or here.moved}
        if known and any(self._moving.values()):
            turn = _Turn(self._filter.changed)
            turn.last, turn.moves, self._moving = end, self._moving, {}
            self._lost = turn.moves
            self._early.append(turn)

    def _is_empty(self) -> bool:
        return not (self._done or self._moved or self._held or self._due or self._visits or self._purged or self._departed)

    def _export(self) -> QueueRecord:
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
        bitmaps = (self._done.serialize(), self._moved.serialize(), self._due.serialize())
        return QueueRecord(*self.key, *bitmaps, self._purged, visits, self._departed, self._spared.serialize())

    def _import(self, record: QueueRecord) -> None:
        self._record = None
        self._done = BitMap64.deserialize(record.done)
        self._moved = BitMap64.deserialize(record.moved)
        self._due = BitMap64.deserialize(record.due)
        self._purged = record.purged
        self._spared = BitMap64.deserialize(record.spared) if record.spared else BitMap64()
        self._departed = record.departed
        self._top = max((self._purged, *(int(members.max()) for members in (self._done, self._moved) if members)))
        for part in record.visits:
            here = self._visits_of(part.origin)
            (here.done if part.dequeued else here.moved)[part.visit] = BitMap64.deserialize(part.positions)
        moved = [((self.name, 0), self._moved)]
        moved += [((line, visit), members) for line, here in self._visits.items() for visit, members in here.moved.items()]
        self._moving = {stay: moving for stay, members in moved if (moving := self._due & members)}


class _Turn:
    """Copies that operations move on: all of them are to be carried out when the node has come to entry `last`.

    `behind`: the last declaration or purge before them. `grows`: more may come into it. `moves`: their sequences.
    """

    __slots__ = ("behind", "grows", "last", "moves")

    def __init__(self, behind: int) -> None:
        self.behind = behind
        self.grows = True
        self.last = 0
        self.moves: dict[Stay, BitMap64] = {}


class _Op(NamedTuple):
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


class DeliveryFilter:
    """The operations of the log, by queue, and what they mean for the copies on this node's broker."""

    def __init__(self, generations: Generations) -> None:
        self.generations = generations
        self._queues: dict[QueueKey, QueueFilter] = {}  # of which something is known
        self._at_hand: WeakValueDictionary[QueueKey, QueueFilter] = WeakValueDictionary()  # and all that somebody has
        self._departed: dict[QueueKey, None] = {}  # of the former, those that are gone or not declared, by when they went or were used last
        self.followers: dict[QueueKey, list[QueueFilter]] = {}  # by queue of the first death: where operations on its dead letters are known
        self._noted: deque[_Op] = deque()  # in log order, all above _safe
        self._safe = 0
        self.reached: Callable[[], int] = lambda: EVERY_SEQUENCE
        """The entry that this node has come to: it has carried out all before it, but for what full queues refuse."""
        self.known = 0
        """No entry behind it has decided anything yet; what a record says may come from entries that are safe, and are not known to be so again."""
        self._changes: deque[int] = deque()  # declarations and purges, in log order, all above _safe
        self.changed = 0  # the last of them before what is decided now
        self.recorded = 0  # operations up to it were known before they are noted again
        self.to_move: set[QueueFilter] = set()  # where something may have been rejected that is still to be found
        self.refused = QueueFilter(("", ""), self)
        """Stands for every queue: what was REFUSED is dequeued everywhere."""

    def queue(self, key: QueueKey) -> QueueFilter:
        """The filter of a queue. Where nothing is known of it, it is kept as long as the caller keeps it."""
        found = self._queues.get(key) or self._at_hand.get(key)
        if found is None:
            found = self._at_hand[key] = QueueFilter(key, self)
        return found

    def _known(self, key: QueueKey) -> QueueFilter:
        """The filter of a queue of which something is to be known."""
        found = self._queues.get(key)
        if found is None:
            found = self._queues[key] = self.queue(key)
        return found

    def find(self, key: QueueKey) -> QueueFilter | None:
        """The filter of a queue, if anything is known of it."""
        return self._queues.get(key)

    def queues(self) -> tuple[QueueFilter, ...]:
        """All of which something is known: what a sweeper goes through."""
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
            kind: PURGE takes ranges from 0 to the last sequence that goes; between them is what it spares.
            queue: None for REFUSED only.
            ranges: Sequences, flattened inclusive ranges: first, last, first, last, …
            visit: Of the copies at `queue` (`visit_of`); 0 for REFUSED and PURGE.
            origin: `origin_of` the copies' deaths; "" for REFUSED and PURGE.
            sweep: Whether this node's own copy must be found and removed: true for what other nodes' clients did, false where
                a client of this node did it to the very copy it was given.

        Raises:
            IllegalEvent: `op_seq` goes back. Nothing was changed.
        """
        if self._noted and op_seq < self._noted[-1].seq:
            raise IllegalEvent(f"operation {op_seq} is noted after operation {self._noted[-1].seq}")
        target = self.refused if queue is None else self._known(queue)
        if visit == 0 and origin == target.name:
            origin = ""  # its first stay in the queue of its first death: it had not died then
        op = _Op(op_seq, kind, target, ranges, visit, origin, sweep and queue is not None)
        target._top = max((target._top, *ranges[1::2]))
        if op.moves and op_seq <= self.recorded:
            target._take_turn(op, self._changes[-1] if self._changes else self.changed)
        if op_seq <= self._safe:
            target._apply(op)
        else:
            self._noted.append(op)
            target._hold(ranges)

    def note_change(self, sequence: int) -> None:
        """Entry `sequence`, a declaration, deletion or purge, was appended, or read again: dead letters may go elsewhere from then on."""
        if sequence <= self._safe:
            self.changed = max(self.changed, sequence)
        else:
            self._changes.append(sequence)

    def _come_to(self, sequence: int) -> None:
        while self._changes and self._changes[0] <= sequence:
            self.changed = self._changes.popleft()

    def moving(self, vhost: str | None, upto: int, parked: Iterable[tuple[int, int]] = ()) -> list[tuple[QueueFilter, int]]:
        """Queues from which what was rejected or moved on before entry `upto` has still to go, and how much. Ask when the node has come to it.

        Args:
            vhost: Theirs; None: every one.
            upto: The entry.
            parked: As for `QueueFilter.moves_due`.
        """
        found = []
        for target in [each for each in self.to_move if vhost is None or each.key[0] == vhost]:
            if due := target.moves_due(upto, parked):
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
            op.target._apply(op)
            op.target._release(op.ranges)
            if op.target._overlap:
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
            target._held.clear()
            target._overlap = False
        for op in self._noted:
            if op.target in targets:
                op.target._hold(op.ranges)

    def verdict(self, queue: QueueKey, seq: int, generation: int, deaths: Deaths = ()) -> Verdict:
        """`QueueFilter.verdict` by name."""
        target = self._queues.get(queue)
        if target is None:  # of a copy that never died only what concerns every queue is known
            target = self.queue(queue) if deaths else self.refused
        return target.verdict(seq, generation, deaths)

    def may_skip(self, queues: Sequence[QueueKey], seq: int) -> bool:
        """Whether a late entry need not be applied (R11): refused, or dequeued from the one queue that it is routed to.

        Args:
            queues: The queues of its route; empty if the route is not known.
            seq: Its sequence.
        """
        if seq in self.refused._done:
            return True
        if len(queues) != 1:
            return False
        target = self._queues.get(queues[0])
        return target is not None and target.is_done(seq)

    def lose(self, end: int) -> None:
        """The log ends at `end`: a host that went down has lost what came after it (R16), and kept a record that knows of it.

        Other entries will take these sequences: what is known of the lost ones must not be taken for theirs.
        """
        for target in (self.refused, *self._queues.values()):
            target._lose(end, known=self.known > end)
        self.known = self.recorded = min(self.known, end)
        self._departed = {key: None for key in self._departed if self._queues[key]._departed}

    def lose_refusals(self, first: int, kept: Iterable[tuple[int, int]]) -> int:
        """Forgets what was refused by entries that are lost: the record knew of them, and the log does not.

        What an operation did to a copy stays done. But what was refused is in no queue, and its ID is free only as long as the log says so: a repeat
        would be confirmed that nobody ever gets. So it counts as published, and is to be published again.

        Args:
            first: The first entry that the log still has. What was refused before it cannot be published again.
            kept: What the log still refuses: inclusive ranges.

        Returns:
            The least sequence that is no longer refused; 0 if there is none.
        """
        lost = self.refused._done.copy()
        lost.remove_range(0, first)
        for begin, end in kept:
            lost.remove_range(begin, end + 1)
        self.refused._done -= lost
        return int(lost.min()) if lost else 0

    def forget_queue(self, queue: QueueKey, at_seq: int, *, dead_letters: bool = True) -> None:
        """The queue was deleted by entry `at_seq`, and everything up to there is applied; a new one of the same name may have come after it.

        Args:
            queue: Its key.
            at_seq: What was published before this entry is gone from it.
            dead_letters: Whether it may have dead-lettered: copies whose `x-death` names it may live on, and what is known of them is kept.
        """
        target = self._queues.get(queue)
        if target is None:
            return
        target.end_pass(target.start_pass(at_seq - 1))
        if dead_letters or target._may_have_sent_on:
            self._depart(target, at_seq)
        else:
            self._forget(target, at_seq)

    def undeclared(self, queue: QueueKey, at_seq: int) -> None:
        """Entry `at_seq`, up to which everything is applied, is an operation on a queue that the log did not declare then: it may be gone.

        Args:
            queue: Its key.
            at_seq: The operation's entry.
        """
        target = self._queues.get(queue)
        if target is not None:
            self._depart(target, at_seq)

    def _depart(self, target: QueueFilter, at_seq: int) -> None:
        target._record = None
        target._departed = at_seq
        self._departed.pop(target.key, None)
        self._departed[target.key] = None
        for key in list(islice(self._departed, max(0, len(self._departed) - DEPARTED_MAX))):
            del self._departed[key]
            oldest = self._queues[key]
            if oldest._is_looked_for:
                self._departed[key] = None  # later
                continue
            for peer in oldest._followers(oldest.name):
                peer._forget_line(oldest.name, oldest._departed)
                self._drop_if_empty(peer)
            self._forget(oldest, oldest._departed)

    def _forget(self, target: QueueFilter, before: int) -> None:
        target._forget(before)
        self._departed.pop(target.key, None)
        self._drop_if_empty(target)

    def _drop_if_empty(self, target: QueueFilter) -> None:
        if target._is_empty():
            del self._queues[target.key]

    def export(self) -> tuple[tuple[QueueRecord, ...], bytes]:
        """(queues, refused) for the applied record: all operations that are safe. What has not changed since is the same object again."""
        records = tuple(target._export() for target in self._queues.values() if not target._is_empty())
        return records, self.refused._done.serialize()

    @classmethod
    def restored(cls, generations: Generations, queues: Iterable[QueueRecord], refused: bytes, known: int = 0) -> DeliveryFilter:
        """From an applied record. Note the operations of all entries behind R again."""
        new = cls(generations)
        new.known = new.recorded = known
        parts = [(new._known((record.vhost, record.queue)), record) for record in queues]
        for target, record in parts:
            target._import(record)
            if target._moving:
                new.to_move.add(target)
        new._departed = {target.key: None for target, record in sorted(parts, key=lambda each: each[1].departed) if record.departed}
        if refused:
            new.refused._done = BitMap64.deserialize(refused)
            new.refused._top = int(new.refused._done.max()) if new.refused._done else 0
        return new
