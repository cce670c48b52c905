"""What clients have been given: whether a message comes again, and what they have given back.

Rules:
- When an epoch begins after a loss, anything of those before may have been delivered; after a clean handover no client holds anything of it, and
  each counts as given when a client of this node is given it.
- What is told `redelivered` in doubt harms nothing.
"""

from __future__ import annotations

from pyroaring import BitMap64

from lrq_ha.replication.positions import RangeSet

from .channels import QueueKey

GIVEN_BACK_RANGES_MAX = 10_000


class GivenOut:
    """See above.

    Attributes:
        redelivered_upto: Entries of earlier epochs, which a client may have been given.
        unheld_upto: Entries of earlier epochs, which no client holds: they were handed over in order.
        moved_again: Messages that a renewal has moved, and that clients may have been given before.
        given_back: By clients of this node, and not settled since.
    """

    def __init__(self) -> None:
        self.redelivered_upto = 0
        self.unheld_upto = 0
        self.moved_again = RangeSet()
        self.given_back: dict[QueueKey, RangeSet] = {}
        self._given = BitMap64()  # up to `unheld_upto`, since; every second one, say, where two queues' messages alternate

    def took_over(self, end: int, *, clean: bool) -> None:
        """An epoch begins behind entry `end`. `clean`: no client holds a message of those before."""
        self.redelivered_upto, self.unheld_upto = (0, end) if clean else (end, 0)
        self._given = BitMap64()

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
        if sequence <= self.redelivered_upto or (self.moved_again and sequence in self.moved_again):
            return True
        if sequence > self.unheld_upto or sequence in self._given:
            return flagged
        self._given.add(sequence)
        return False

    def may_have_been_given(self, sequence: int, flagged: bool) -> bool:
        """The same, of one that nobody is given now."""
        return sequence <= self.redelivered_upto or (flagged and (sequence > self.unheld_upto or sequence in self._given))

    def gave_back(self, queue: QueueKey, sequence: int) -> None:
        """A message goes back to its queue."""
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
