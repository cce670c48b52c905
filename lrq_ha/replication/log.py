"""A node's index of a replicated log: epochs, end, sets, and the rule by which a batch is read and accepted (R1, R2).

Rules:

- The entries themselves live in the stream; this index is a few numbers per epoch, whatever the log's length.
- Streams cannot be truncated, so the reader truncates: an entry whose predecessor matches replaces everything from its sequence
  on. The door accepts a push by that function too, so a node's memory always equals its stream.
- `top` is the highest leader epoch or FENCE seen. A batch with a lower leader is ignored.
- A log begins at entry 1, or at a CHECKPOINT that began a renewal: everything live was published again behind it (R17). Until its log holds the
  end of such a renewal the node is joining: it lacks something that is live.
- Two logs that hold one (epoch, sequence) are equal up to it, because no entry is accepted without its predecessor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..errors import IllegalEvent
from .checkpoints import UNKNOWN, StartPoint

Members = frozenset[int]


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """The entries first .. last, all of one epoch, written by that epoch's owner.

    Args:
        epoch: Epoch of the entries.
        first: Sequence of the first entry.
        last: Sequence of the last entry (>= first).
        previous_epoch: Epoch of entry first - 1; 0 if there is none.
        leader: Epoch of the primary that writes or pushes it now (>= epoch).
        sets: (sequence, members) of each MARKER and MEMBERS among the entries.
        renewal: 0, but for a batch of one entry that belongs to a renewal (R17): its own sequence for the CHECKPOINT that begins one; that
            CHECKPOINT's for RENEWED, which ends it; the negative of that where it was given up.
        record: With `sets`: version of the record in etcd then (E8); 0 without etcd.
    """

    epoch: int
    first: int
    last: int
    previous_epoch: int
    leader: int
    sets: tuple[tuple[int, Members], ...] = ()
    renewal: int = 0
    record: int = 0

    @property
    def begins_renewal(self) -> bool:
        """Whether a log may begin here."""
        return self.renewal == self.first


@dataclass(frozen=True, slots=True)
class LogState:
    """A log as one node describes it to another.

    Args:
        top: Highest leader epoch or FENCE seen.
        end: Sequence of the last entry; 0 if there is none.
        epochs: (epoch, sequence of its first entry), ascending.
        sets: (sequence, members) of the set entries, ascending.
        in_set: Whether this node's own stream says that it is in the in-sync set.
        lost_host: Its broker or host went down and it has not caught up since (R16).
        head: First entry that the own stream still has; 0 or 1: nothing was dropped.
        base: Newest CHECKPOINT in the stream behind which everything live stands (R17); 0: none.
        joining: The log began at such a CHECKPOINT and lacks the end of that renewal.
        renewals: (sequence, BatchHeader.renewal) of each begin and end of a renewal; told to no other node.
        record: As of LogIndex.
    """

    top: int = 0
    end: int = 0
    epochs: tuple[tuple[int, int], ...] = ()
    sets: tuple[tuple[int, Members], ...] = ()
    in_set: bool = False
    lost_host: bool = False
    head: int = 0
    base: int = 0
    joining: bool = False
    renewals: tuple[tuple[int, int], ...] = ()
    record: int = 0

    def lacks(self, start: int) -> bool:
        """Whether entries were dropped that a follower needs which has everything up to `start`."""
        return start + 1 < self.head

    @property
    def rank(self) -> tuple[int, int]:
        """The order of logs by length: last epoch, then end."""
        return (self.epochs[-1][0] if self.epochs else 0, self.end)


class Acceptance(Enum):
    """The accept rule's answer for a batch."""

    APPEND = "append"
    REPEAT = "repeat"
    GAP = "gap"
    STALE = "stale"


def common_end(a: LogState, b: LogState) -> int:
    """Sequence up to which two logs are equal; 0 if they share nothing."""
    ends_a, ends_b = _epoch_ends(a), _epoch_ends(b)
    shared = ends_a.keys() & ends_b.keys()
    if not shared:
        return 0
    newest = max(shared)
    return min(ends_a[newest], ends_b[newest])


def _epoch_ends(log: LogState) -> dict[int, int]:
    starts = [*log.epochs[1:], (0, log.end + 1)]
    return {epoch: following - 1 for (epoch, _), (_, following) in zip(log.epochs, starts)}


def refuses_cut(tail: LogState, leader: LogState, leader_node: int) -> bool:
    """R14: whether the node with log `tail` must refuse to drop what `leader` lacks.

    Let x be the writer of the first MARKER in the leader's history after the common position, else the leader itself. The tail may
    be cut only if x is in every set in force over it, the one in force where it starts included: only then was everything in the
    tail that was ever safe acknowledged by x too.

    Args:
        tail: The follower's log.
        leader: The leader's log.
        leader_node: Number of the leader's node.

    Returns:
        True if some set over the tail lacks x. A tail that is empty is never refused.
    """
    common = common_end(tail, leader)
    if tail.end <= common:
        return False
    taker = next((epoch & 0xFF for epoch, first in leader.epochs if first > common), leader_node)
    in_force = [members for sequence, members in tail.sets if sequence <= common][-1:]
    in_force += [members for sequence, members in tail.sets if sequence > common]
    return any(taker not in members for members in in_force)


class LogIndex:
    """The index of one replicated log at one node.

    Invariants: sequences of `_epochs` and `_sets` ascend and are <= end; `top` >= the last epoch; nothing at or below `pinned` is cut.
    """

    def __init__(self, node: int) -> None:
        """Args: node: this node's id, to know whether it is in the set."""
        self._node = node
        self._epochs: list[tuple[int, int]] = []
        self._sets: list[tuple[int, Members]] = []
        self._renewals: list[tuple[int, int]] = []  # (sequence, BatchHeader.renewal) of each begin and end of a renewal
        self.base = 0  # the CHECKPOINT at which this log began; 0: at entry 1, or so long ago that it does not matter
        self.out_since = (0, 0)  # epoch and end of the log of the leader that said that this node is not in the set
        self.end = 0
        self.top = 0
        self.in_set = False
        self.record = 0  # the newest version of the record in etcd that an entry names, a replaced one included

    def restore(self, state: LogState, out_since: tuple[int, int] = (0, 0), base: int = 0) -> None:
        """Starts from a CHECKPOINT instead of from the first entry. `out_since`: as at the CHECKPOINT. `base`: it has been joining since then."""
        self.base = base
        self._epochs, self._sets, self._renewals = list(state.epochs), list(state.sets), list(state.renewals)
        self.end, self.top, self.in_set = state.end, state.top, state.in_set
        self.out_since = out_since
        self.record = state.record

    def begin(self, first: int, before: LogState) -> None:
        """R17: an empty log is to begin with the CHECKPOINT `first`, which began a renewal. `before`: epochs, sets and renewals before it.

        Raises:
            IllegalEvent: The log is not empty. Nothing was changed.
        """
        if self.end:
            raise IllegalEvent(f"a log that ends at {self.end} cannot begin at {first}")
        self._epochs, self._sets, self._renewals = list(before.epochs), list(before.sets), list(before.renewals)
        self.end, self.base, self.record = first - 1, first, before.record

    def state(self, *, lost_host: bool = False, head: int = 0, safe: int = 0) -> LogState:
        """`head`: as in LogState. `safe`: only renewals that ended up to there count."""
        return LogState(
            self.top,
            self.end,
            tuple(self._epochs),
            tuple(self._sets),
            self.in_set,
            lost_host,
            head,
            self.renewed(head, safe),
            self.joining,
            tuple(self._renewals),
            self.record,
        )

    @property
    def joining(self) -> bool:
        """Whether this log began at a renewal whose end it lacks."""
        return self.base > 0 and not any(renewal >= self.base for _, renewal in self._ended())

    @property
    def unfinished(self) -> int:
        """The CHECKPOINT of a renewal that was neither ended nor given up; 0 if there is none."""
        sequence, renewal = self._renewals[-1] if self._renewals else (0, -1)
        return sequence if renewal == sequence else 0

    def renewed(self, head: int, safe: int) -> int:
        """The newest CHECKPOINT, not before `head`, of a renewal that ended up to `safe`; 0 if there is none."""
        return max((renewal for sequence, renewal in self._ended() if sequence <= safe and renewal >= head), default=0)

    def _ended(self) -> list[tuple[int, int]]:
        return [(sequence, renewal) for sequence, renewal in self._renewals if 0 < renewal < sequence]

    def epoch_at(self, sequence: int) -> int:
        """Epoch of an entry; 0 for sequence 0. Raises IllegalEvent beyond the end."""
        if sequence > self.end:
            raise IllegalEvent(f"sequence {sequence} is beyond the log's end {self.end}")
        i = bisect_right(self._epochs, sequence, key=lambda e: e[1])
        return self._epochs[i - 1][0] if i else 0

    def holds(self, batch: BatchHeader) -> bool:
        """Whether a batch read from a stream of this log is part of it: a replaced or cut batch still stands in the stream."""
        return batch.last <= self.end and self.epoch_at(batch.last) == batch.epoch

    @property
    def last_epoch(self) -> int:
        return self._epochs[-1][0] if self._epochs else 0

    @property
    def sets(self) -> Sequence[tuple[int, Members]]:
        return self._sets

    @property
    def members(self) -> Members:
        """The last set in the log; empty if it has none."""
        return self._sets[-1][1] if self._sets else frozenset()

    def merge_sets(self, upto: int, keep: int) -> None:
        """Merges one of the oldest sets into another, of the sets that were over by `upto`, which is safe.

        All sets stand in each CHECKPOINT and Hello, and one more comes whenever a node leaves the set or is back. The merged set holds the nodes
        that were in both: by R14 it refuses every cut that either refused. The additional refusals begin before the safe position, and are
        refused anyway.

        Args:
            upto: Safe position.
            keep: This many of the newest sets stay as they are (>= 1).
        """
        count = len(self._sets) - keep
        while count > 1 and self._sets[count][0] > upto:
            count -= 1
        if count > 1:
            in_all = frozenset.intersection(*(members for _, members in self._sets[:count]))
            self._sets[:count] = [(self._sets[0][0], in_all)]

    def in_set_upto(self, node: int) -> int:
        """The last entry at which a set with `node` was in force, as far as this log tells; 0 if there is none. The node has no entry behind it."""
        upto = self.end
        for sequence, members in reversed(self._sets):
            if node in members:
                return upto
            upto = sequence - 1
        return 0

    def judge(self, batch: BatchHeader) -> Acceptance:
        """R2, without a change."""
        if batch.leader < self.top:
            return Acceptance.STALE
        if batch.first - 1 > self.end or self.epoch_at(batch.first - 1) != batch.previous_epoch:
            return Acceptance.GAP
        if self.holds(batch):
            return Acceptance.REPEAT
        return Acceptance.APPEND

    def accept(self, batch: BatchHeader) -> Acceptance:
        """R2: judges a batch and takes it if it is to be appended (the entries that it replaces fall out)."""
        verdict = self.judge(batch)
        if verdict in (Acceptance.STALE, Acceptance.GAP):
            return verdict
        self.top = max(self.top, batch.leader)
        if verdict is Acceptance.APPEND:
            self._truncate(batch.first)
            if self.last_epoch != batch.epoch:
                self._epochs.append((batch.epoch, batch.first))
            self.end = batch.last
            self.record = max(self.record, batch.record)
            if batch.renewal:
                self._renewals.append((batch.first, batch.renewal))
            for sequence, members in batch.sets:
                self._sets.append((sequence, members))
                # A set entry from before the point where a leader told this node that it is out does not bring it back in (R13);
                # one of a later epoch does, wherever it stands: the log of that epoch may be a shorter one.
                if self._node not in members or (batch.epoch, sequence) > self.out_since:
                    self.in_set = self._node in members
        return verdict

    def fence(self, epoch: int, out_end: int = 0) -> None:
        """A FENCE record: a promise to `epoch`; out_end > 0: the leader, whose log ended there, said that this node is not in the set."""
        self.top = max(self.top, epoch)
        if out_end:
            self.in_set = False
            self.out_since = (epoch, out_end)

    def start_point(self, checkpoint: BatchHeader, offset: int = UNKNOWN) -> StartPoint:
        """The data for a restart at this CHECKPOINT, which was accepted last, and stands at `offset` of the stream."""
        base = self.base if self.joining else 0
        return StartPoint(checkpoint.first, checkpoint.epoch, checkpoint.leader, offset, self.in_set, self.out_since, base)

    def _truncate(self, first: int) -> None:
        while self._epochs and self._epochs[-1][1] >= first:
            self._epochs.pop()
        while self._sets and self._sets[-1][0] >= first:
            self._sets.pop()
        while self._renewals and self._renewals[-1][0] >= first:
            self._renewals.pop()
        self.end = min(self.end, first - 1)


def safe_position(sets: Sequence[tuple[int, Members]], marker: int, leader: int, durable: int, acknowledged: dict[int, int]) -> int:
    """R4 and R15: the position up to which the log is safe.

    An addition counts from its append (old and new set together), a removal only when MEMBERS is on every member of the new set. So
    the sets from the newest back to the last one that is itself safe are in force together.

    Args:
        sets: (sequence, members) of the log's set entries, ascending.
        marker: Sequence of this epoch's MARKER; before it is safe, nothing of the epoch is.
        leader: This node.
        durable: End of what the own stream has confirmed.
        acknowledged: Per node, the end of what it acknowledged.

    Returns:
        The safe position, or 0 while the MARKER is not safe.
    """
    in_force: frozenset[int] = frozenset()
    for sequence, members in reversed(sets):
        if sequence < marker:
            break
        in_force |= members
        held_by_all = min([durable, *(acknowledged.get(node, 0) for node in in_force if node != leader)])
        if held_by_all >= sequence:
            return held_by_all
    return 0
