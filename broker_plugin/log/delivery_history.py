"""The messages that clients have been given: whether a message is redelivered, and which ones clients have
requeued.

Rules:
- When an epoch begins after a loss, every earlier message may have been delivered. A node that hands over in order,
  when no client holds a message, tells the messages that clients have requeued, and those that it was in doubt about
  itself. Any other message counts as given once a client of this node gets it.
- A message in doubt may be told as `redelivered` without harm.
"""

from __future__ import annotations

from itertools import chain

from pyroaring import BitMap64

from lrq_ha.replication.events import Given
from lrq_ha.replication.positions import RangeSet
from lrq_ha.replication.queues import QueueKey

GIVEN_BACK_RANGES_MAX = 10_000


class DeliveryHistory:
    """Deliveries and requeues of the log's messages, as this node knows them.

    Attributes:
        redelivered_upto: Entries of earlier epochs, which a client may have been given.
        unheld_upto: Entries of earlier epochs, which no client holds: they were handed over in order.
        again: Messages that clients may have been given before: moved by a renewal, or in doubt at the node that
            handed over.
        given_back: Requeued by clients of this node, and not settled since, or seen in the queue.
    """

    def __init__(self) -> None:
        self.redelivered_upto = 0
        self.unheld_upto = 0
        self.again = RangeSet()
        self.given_back: dict[QueueKey, RangeSet] = {}
        self._given = BitMap64()  # up to `unheld_upto`, since; every second one, say, where two queues' messages alternate
        self._returned = RangeSet()  # all that clients of this node have requeued; a message settled since is in no queue

    def took_over(self, end: int, given: Given) -> None:
        """An epoch begins behind entry `end`. `given`: earlier messages that clients may have been given, and that
        no client holds; None: any.
        """
        self.redelivered_upto, self.unheld_upto = (end, 0) if given is None else (0, end)
        for first, last in given or ():
            self.again.add(first, last)
        self._given = BitMap64()

    def given(self) -> Given:
        """Messages that clients may have been given, and that may still be in a queue, for the next leader. Called
        when no client holds any.
        """
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
            flagged: The broker's flag. The broker knows nothing of other brokers, and counts deliveries to the
                sweeper of a backup.
        """
        if sequence <= self.redelivered_upto or (self.again and sequence in self.again):
            return True
        if sequence > self.unheld_upto or sequence in self._given:
            return flagged
        self._given.add(sequence)
        return False

    def may_have_been_given(self, sequence: int, flagged: bool) -> bool:
        """As `comes_again`, for a message that no client is given now."""
        if sequence <= self.redelivered_upto or sequence in self.again:
            return True
        return flagged and (sequence > self.unheld_upto or sequence in self._given)

    def gave_back(self, queue: QueueKey, sequence: int) -> None:
        """A message is requeued."""
        self._returned.add(sequence)
        if self._returned.ranges > GIVEN_BACK_RANGES_MAX:
            self._returned = self._returned.cover(GIVEN_BACK_RANGES_MAX // 2)
        known = self.given_back.setdefault(queue, RangeSet())
        known.add(sequence)
        if known.ranges > GIVEN_BACK_RANGES_MAX:  # coarser, but no less
            known.add(known.first, known.last)

    def settled(self, queue: QueueKey, sequences: list[int]) -> None:
        """These messages are acknowledged, or rejected for good."""
        if queue in self.given_back:
            given_back = self.given_back[queue]
            for sequence in sequences:
                given_back.remove(sequence)
            if not given_back:
                del self.given_back[queue]
