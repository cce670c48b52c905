"""What clients have been given: whether a message comes again, and what they have given back.

Rules:
- When an epoch begins after a loss, anything of those before may have been delivered. Who hands over in order, when no client holds anything, tells
  what clients have given back, and what was in doubt for itself; all else counts as given when a client of this node is given it.
- What is told `redelivered` in doubt harms nothing.
"""

from __future__ import annotations

from itertools import chain

from pyroaring import BitMap64

from lrq_ha.replication.events import Given
from lrq_ha.replication.positions import RangeSet
from lrq_ha.replication.queues import QueueKey

GIVEN_BACK_RANGES_MAX = 10_000


class DeliveryHistory:
    """See above.

    Attributes:
        redelivered_upto: Entries of earlier epochs, which a client may have been given.
        unheld_upto: Entries of earlier epochs, which no client holds: they were handed over in order.
        again: Messages that clients may have been given before: that a renewal has moved, or that were so for who handed over.
        given_back: By clients of this node, and not settled since, or seen in its queue.
    """

    def __init__(self) -> None:
        self.redelivered_upto = 0
        self.unheld_upto = 0
        self.again = RangeSet()
        self.given_back: dict[QueueKey, RangeSet] = {}
        self._given = BitMap64()  # up to `unheld_upto`, since; every second one, say, where two queues' messages alternate
        self._returned = RangeSet()  # all that clients of this node have given back; what was settled since is in no queue

    def took_over(self, end: int, given: Given) -> None:
        """An epoch begins behind entry `end`. `given`: what clients may have been given of those before, and nobody holds; None: anything."""
        self.redelivered_upto, self.unheld_upto = (end, 0) if given is None else (0, end)
        for first, last in given or ():
            self.again.add(first, last)
        self._given = BitMap64()

    def given(self) -> Given:
        """What clients may have been given, and may still be in a queue, while nobody holds anything: for who takes the next epoch."""
        known = RangeSet([(1, self.redelivered_upto)] if self.redelivered_upto else ())
        for first, last in chain(self.again, self._returned):
            known.add(first, last)
        return tuple(known.cover(GIVEN_BACK_RANGES_MAX))

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        self.redelivered_upto = min(self.redelivered_upto, first - 1)
        self.unheld_upto = min(self.unheld_upto, first - 1)

    def comes_again(self, sequence: int, flagged: bool) -> bool:
        """Whether a client is told that a message has been delivered before.

        Args:
            sequence: Its entry.
            flagged: What the broker says. It knows nothing of other brokers, and counts what the sweeper of a backup looked at.
        """
        if sequence <= self.redelivered_upto or (self.again and sequence in self.again):
            return True
        if sequence > self.unheld_upto or sequence in self._given:
            return flagged
        self._given.add(sequence)
        return False

    def may_have_been_given(self, sequence: int, flagged: bool) -> bool:
        """The same, of one that nobody is given now."""
        if sequence <= self.redelivered_upto or sequence in self.again:
            return True
        return flagged and (sequence > self.unheld_upto or sequence in self._given)

    def gave_back(self, queue: QueueKey, sequence: int) -> None:
        """A message goes back to its queue."""
        self._returned.add(sequence)
        if self._returned.ranges > GIVEN_BACK_RANGES_MAX:
            self._returned = self._returned.cover(GIVEN_BACK_RANGES_MAX // 2)
        known = self.given_back.setdefault(queue, RangeSet())
        known.add(sequence)
        if known.ranges > GIVEN_BACK_RANGES_MAX:  # coarser, but no less
            known.add(known.first, known.last)

    def settled(self, queue: QueueKey, sequences: list[int]) -> None:
        """These are acknowledged, or rejected for good."""
        if queue in self.given_back:
            given_back = self.given_back[queue]
            for sequence in sequences:
                given_back.remove(sequence)
            if not given_back:
                del self.given_back[queue]
