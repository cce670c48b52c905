"""The progress of a renewal with each queue (R17), from the log: which queues are being moved, and when no old message can be left. No I/O.

Rules:

- MOVING says that the messages in a queue before that entry are being moved behind it. A node that continues an interrupted pass uses its
  entry: with a later one, messages that were moved already would be moved once more, before the rest. A pass after a finished one is new.
- No old message can be left when two rounds over all queues, one after the other, have found none, and no client has sent an old message on in
  either: rejected it, which makes a dead letter, or requeued it. (A message may be in each queue just when the round is elsewhere.)
- A queue deeper than the scan window counts as clean if its length equals (published by name − removed) since its last pass. Publishes
  by exchanges are not counted: such a queue is longer. A refusal or a purge voids the count; a requeue to a queue that may have a
  delivery limit (it may drop the message) and a change of primary void it too: the log records neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .queues import QueueKey

CLEAN_ROUNDS = 2


class Passes:
    """The queues of the renewal that began last.

    Attributes:
        checkpoint: The CHECKPOINT that began it, while it is not over; else 0.
        old_moves: Number of times that clients have sent on a message from before it.
    """

    __slots__ = ("_begun", "_counts", "_noted", "_renewals", "_unfinished", "checkpoint", "old_moves")

    def __init__(self) -> None:
        self.checkpoint = 0
        self.old_moves = 0
        self._renewals: list[tuple[int, int]] = []  # (entry, the CHECKPOINT that counts from that entry on)
        self._noted: list[tuple[int, QueueKey, bool]] = []
        self._unfinished: dict[QueueKey, int] = {}  # the MOVING entries' result: there may be ten thousand queues, and each look-up is for one
        self._begun: set[QueueKey] = set()
        self._counts: dict[QueueKey, tuple[int, int]] = {}  # (MOVING, messages that came since and have not left)

    # ---- what the log says -------------------------------------------------------------------------------------------

    def begin(self, sequence: int) -> None:
        """The CHECKPOINT `sequence` begins a renewal."""
        self._renewals = [*self._renewals[-1:], (sequence, sequence)]
        self.checkpoint = sequence
        self._note_all([])
        self._counts.clear()

    def restore(self, checkpoint: int, unfinished: Mapping[QueueKey, int]) -> None:
        """From a CHECKPOINT in the middle of the renewal that `checkpoint` began. Queues that are done count as not begun."""
        self._renewals = [(checkpoint, checkpoint)]
        self.checkpoint = checkpoint
        self._note_all(sorted((before, queue, False) for queue, before in unfinished.items()))
        self._counts.clear()

    def end(self, sequence: int) -> None:
        """RENEWED: the renewal is over."""
        self._renewals.append((sequence, 0))
        self.checkpoint = 0
        self._counts.clear()

    def noted(self, sequence: int, queue: QueueKey, *, done: bool) -> None:
        """MOVING: a queue's pass begins, or is done."""
        self._noted.append((sequence, queue, done))
        self._begun.add(queue)
        if done:
            self._unfinished.pop(queue, None)
        else:
            self._unfinished[queue] = sequence
            self._counts[queue] = (sequence, 0)

    def _note_all(self, noted: list[tuple[int, QueueKey, bool]]) -> None:
        """Replaces the noted entries."""
        self._noted = []
        self._begun.clear()
        self._unfinished.clear()
        for sequence, queue, done in noted:
            self.noted(sequence, queue, done=done)

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        if self._noted and self._noted[-1][0] >= first:
            self._note_all([one for one in self._noted if one[0] < first])
        while self._renewals and self._renewals[-1][0] >= first:
            self._renewals.pop()
        self.checkpoint = self._renewals[-1][1] if self._renewals else 0
        self._counts.clear()

    # ---- what is under way -------------------------------------------------------------------------------------------

    def unfinished(self) -> dict[QueueKey, int]:
        """The queues that are being moved, each with the entry before which its messages are moved."""
        return self._unfinished.copy() if self.checkpoint else {}

    def is_unfinished(self, queue: QueueKey) -> int:
        """The entry before which a queue's messages are being moved; 0: none."""
        return self._unfinished.get(queue, 0) if self.checkpoint else 0

    def begun(self, queue: QueueKey) -> bool:
        """Whether a queue has been moved in this renewal, or is being moved."""
        return queue in self._begun

    def stirred(self, sequence: int) -> None:
        """A client has rejected or requeued an entry; or the door has rejected it, as a client had on another node."""
        if sequence <= self.checkpoint:
            self.old_moves += 1

    # ---- counting ----------------------------------------------------------------------------------------------------

    @property
    def counting(self) -> bool:
        return bool(self._counts)

    def came(self, queue: QueueKey) -> None:
        """A publish to a queue by its name."""
        known = self._counts.get(queue)
        if known is not None:
            self._counts[queue] = (known[0], known[1] + 1)

    def left(self, queue: QueueKey, ranges: Sequence[int]) -> None:
        """Entries of these flattened inclusive ranges left a queue by a client's command. Older entries were moved and are not counted."""
        known = self._counts.get(queue)
        if known is not None:
            since, count = known
            gone = sum(max(0, last - max(first, since + 1) + 1) for first, last in zip(ranges[::2], ranges[1::2]))
            self._counts[queue] = (since, count - gone)

    def count_no_more(self, queue: QueueKey | None = None) -> None:
        """The length of a queue (None: of every queue) is not known any more."""
        if queue is None:
            self._counts.clear()
        else:
            self._counts.pop(queue, None)

    def holds(self, queue: QueueKey) -> int:
        """The length of a queue if no message came or went unseen; -1: unknown."""
        return self._counts.get(queue, (0, -1))[1]


class Rounds:
    """Rounds over all queues, until no old message can be left.

    Args:
        passes: Of this node.
        limit: The renewal stops after this many rounds that found something.
    """

    __slots__ = ("_clean", "_dirty", "_limit", "_passes", "_stirred")

    def __init__(self, passes: Passes, limit: int) -> None:
        self._passes = passes
        self._limit = limit
        self._clean = self._dirty = 0
        self._stirred = passes.old_moves

    def ended(self, *, found: bool) -> None:
        """A round is over; `found`: it met an old message."""
        if found or self._passes.old_moves != self._stirred:
            self._clean = 0
            self._dirty += 1
        else:
            self._clean += 1
        self._stirred = self._passes.old_moves

    @property
    def done(self) -> bool:
        return self._clean >= CLEAN_ROUNDS

    @property
    def too_many(self) -> bool:
        return not self.done and self._dirty >= self._limit
