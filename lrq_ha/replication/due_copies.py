"""The copies of one queue that this node's sweeper has still to find, and the turns of those that move on to other queues. No I/O.

Rules:

- A rejected copy goes to the dead-letter target that the primary had then. So a sweeper moves it only when its node has reached that entry, and
  has carried out the declarations and purges before it; and the next declaration or purge waits for the sweeper. So rejected copies are kept in
  turns: no turn reaches over a declaration or purge, and new rejections do not delay older ones. A turn names copies, (origin, visit) and
  sequence: a message may come back and be rejected again, or die in two queues and come to a third twice, with a purge in between.
- A copy that another queue missed is looked for once more, and then given up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from pyroaring import BitMap64

from .dead_letters import EVERY_SEQUENCE

Stay = tuple[str, int]
"""(queue of the copy's first death, or this queue if it never died; its visit here)"""
_NOTHING = BitMap64()


def pairs(flat: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of each range of a flattened list."""
    values = iter(flat)
    return zip(values, values)


class NodePosition(Protocol):
    """The place of this node in the log (`delivery_filter.DeliveryFilter`)."""

    def reached(self) -> int: ...


class DueCopies:
    """The due copies of one queue. `sequences`: those with an operation whose copy is still to be found, wherever R is.

    `parked`, in all calls: inclusive ranges of entries that do not count, as they may wait for room in this queue.
    """

    __slots__ = ("_again", "_early", "_lost", "_moving", "_node", "sequences")

    def __init__(self, node: NodePosition) -> None:
        self._node = node
        self.sequences = BitMap64()
        self._again = BitMap64()  # of these, copies that another queue missed
        self._early: list[_Turn] = []  # moves by operations that this node may not have reached; in log order
        self._lost: dict[Stay, BitMap64] = {}  # of these, moves that the record has from entries that the log has lost: they may be read again
        self._moving: dict[Stay, BitMap64] = {}  # and by operations that it has reached: copies that were not seen to leave

    def __bool__(self) -> bool:
        return bool(self.sequences)

    def count(self, upto: int, parked: Iterable[tuple[int, int]] = ()) -> int:
        """How many copies are to be found now, up to this entry: R, or the entry that the node has reached."""
        turns = self._turns()
        if not turns and not parked:
            return int(self.sequences.rank(upto))
        early = BitMap64.union(_NOTHING, *(_union(turn.moves) for turn in turns))
        return int(_without(self.sequences - (early - _union(self._moving)), parked).rank(upto))

    def count_moves(self, upto: int, parked: Iterable[tuple[int, int]] = ()) -> int:
        """How many of the due copies, up to an entry, were rejected or moved on: they are to leave this queue for others now."""
        self._turns()
        return int(_without(self.sequences & _union(self._moving), parked).rank(upto))

    def expected(self, upto: int, parked: Iterable[tuple[int, int]] = ()) -> BitMap64:
        """The sequences that a pass over the whole queue, begun now, is to find. Everything up to `upto` has been written, except `parked`."""
        expected = self.sequences.copy()
        expected.remove_range(upto + 1, EVERY_SEQUENCE)
        return _without(expected, parked)

    def miss(self, expected: BitMap64, undecided: Collection[tuple[int, str]]) -> tuple[BitMap64, BitMap64]:
        """A pass has ended: see `QueueFilter.end_pass`. Returns the copies that it did not find; of them, those that no other queue missed."""
        met = BitMap64(sequence for sequence, _ in undecided)
        for (line, _), members in self._moving.items():  # of a message that died in two queues, one copy may be here and the other gone
            for sequence in expected & met & members:
                if (sequence, line) not in undecided:
                    members.discard(sequence)
        missed = (expected - met) & self.sequences
        self.sequences -= missed
        moved_on = missed - self._again
        self._again -= missed
        return missed, moved_on

    def look_again(self, sequences: BitMap64, *, missed: bool) -> None:
        """Copies of these sequences may come here from a queue in which a sweeper has met or `missed` them."""
        self.sequences |= sequences
        if missed:
            self._again |= sequences
        else:
            self._again -= sequences

    def drop(self, first: int, last: int) -> None:
        """No copies of these entries are to be found."""
        self.sequences.remove_range(first, last + 1)
        self._again.remove_range(first, last + 1)

    def is_early(self, seq: int, stay: Stay) -> bool:
        """Whether this node has not reached the operation that moves this copy on."""
        return any(seq in turn.moves.get(stay, _NOTHING) for turn in self._turns())

    def has_moved(self, seq: int, line: str, visit: int) -> None:
        """The copy has left this queue's `visit`, and all before it: no operation waits for it."""
        for stay in [each for each, members in self._moving.items() if each[0] == line and each[1] <= visit and seq in members]:
            self._moving[stay].discard(seq)
            if not self._moving[stay]:
                del self._moving[stay]

    def take_turn(self, stay: Stay, ranges: Sequence[int], sequence: int, behind: int) -> None:
        """Adds the moves of the operation `sequence` to a turn. `behind`: the last declaration or purge before it."""
        turn = self._early[-1] if self._early else None
        if turn is None or not turn.grows or turn.behind != behind:
            turn = _Turn(behind)
            self._early.append(turn)
        turn.last = max(turn.last, sequence)
        members = turn.moves.setdefault(stay, BitMap64())
        for known in (self._moving.get(stay), self._lost.get(stay)):
            if known and known is not members:  # read again: the record does not tell by which entry it was moved
                for first, last in pairs(ranges):
                    known.remove_range(first, last + 1)
        for first, last in pairs(ranges):
            members.add_range(first, last + 1)

    def purge(self, ranges: Sequence[int], moving: BitMap64) -> None:
        """A purge took all copies of these ranges, except those that were `moving` on."""
        for first, last in pairs(ranges):
            self.sequences.remove_range(first, last + 1)
        self.sequences |= moving
        self._again &= self.sequences

    def forget_moves(self, before: int) -> None:
        """Copies of entries before this one are gone, or have moved on."""
        for members in self._moving.values():
            members.remove_range(0, before)

    def lose(self, end: int, behind: int, *, known: bool) -> None:
        """As `QueueFilter.lose`. `behind`: the last declaration or purge."""
        for members in (self.sequences, self._again, *self._moving.values()):
            members.remove_range(end + 1, EVERY_SEQUENCE)
        if known and any(self._moving.values()):
            turn = _Turn(behind)
            turn.last, turn.moves, self._moving = end, self._moving, {}
            self._lost = turn.moves
            self._early.append(turn)

    def load(self, sequences: BitMap64, moved: Mapping[Stay, BitMap64]) -> bool:
        """From an applied record. Returns whether copies are to be moved on by operations that this node has come to."""
        self.sequences = sequences
        self._moving = {stay: moving for stay, members in moved.items() if (moving := sequences & members)}
        return bool(self._moving)

    def _turns(self) -> list[_Turn]:
        if self._early:
            reached = self._node.reached()
            come_to = [turn for turn in self._early if turn.last <= reached]
            if come_to:
                self._early = [turn for turn in self._early if turn.last > reached]
                for turn in come_to:
                    for stay, members in turn.moves.items():
                        self._moving.setdefault(stay, BitMap64()).update(members)
            if self._early:
                self._early[0].grows = False
        return self._early


class _Turn:
    """Copies that operations move on: all these operations are to be carried out when the node has reached entry `last`.

    `behind`: the last declaration or purge before them. `grows`: more may be added. `moves`: their sequences.
    """

    __slots__ = ("behind", "grows", "last", "moves")

    def __init__(self, behind: int) -> None:
        self.behind = behind
        self.grows = True
        self.last = 0
        self.moves: dict[Stay, BitMap64] = {}


def _union(moves: Mapping[Stay, BitMap64]) -> BitMap64:
    return BitMap64.union(_NOTHING, *moves.values())


def _without(sequences: BitMap64, parked: Iterable[tuple[int, int]]) -> BitMap64:
    for first, last in parked if sequences else ():
        sequences.remove_range(first, last + 1)
    return sequences
