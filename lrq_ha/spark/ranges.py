"""The part of a receive queue that a partition reads, and the partition's own transactions in the messages that it meets. Pure.

A receive queue is a stream, and each node of the sink group has its own copy of it: equal transactions in equal order, at other
stream offsets, and after a restart or failover of a sidecar some of them a second time. So a range is fixed by positions in the
*source's* log, which are equal on all nodes; its stream offsets are hints for the first read, checked before they are used.

Why a range read alone gives each transaction exactly once: read from any message on, a stream steps forward transaction by transaction
(each batch names its `previous`) or jumps back, over repeated ones. Between a message that ends with position a and one that ends with b > a
it therefore passes all of (a, b], for the first time when the greatest position seen so far grows. A range
(after, through] begins at a message that ends with `after`, takes transactions above the greatest position seen and ends when that is `through`.

- A message that restarts the chain names no `previous`. If it stands directly behind the message before, nothing was trimmed. Brokers write records
  of their own between messages, so otherwise a stream that still begins before the message shows it.
- Cuts between ranges are messages whose last positions grow, so ranges do not overlap and leave nothing out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START, position_of
from lrq_ha.spark.errors import DataLoss, OptionError
from lrq_ha.streams.message import Hint, Message, Stream, find, find_ends, locate, locate_first

SEQUENCE_MAX = 2**63 - 1
SAMPLES = 8  # messages whose rows are counted for an estimate


class Taken(NamedTuple):
    """The range's own transactions in a message, in order. `restart`: the chain restarts with the first one (`previous` is none)."""

    transactions: Sequence[pb.ReceivedTransaction]
    restart: bool = False


@dataclass(frozen=True)
class Range:
    """An immutable part of one receive queue.

    Attributes:
        queue: Name of the queue.
        after: Position before the first transaction of the range.
        through: Last position of the range. after <= through.
        start: Message at which to begin: it ends with `after`, or is the first one of the queue.
        open_until: None if another range goes on after `through`. Else this is the queue's last range: in the stream of `start`,
            it ends not before this offset, and includes transactions above `through` there (only if the sink was repeating itself).
        least: Least source sequence to give.
        most: Greatest source sequence to give.
    """

    queue: str
    after: Position
    through: Position
    start: Hint
    open_until: int | None
    least: int = 0
    most: int = SEQUENCE_MAX


class Selection:
    """Takes the messages of one range, in stream order, and returns the range's own transactions.

    Args:
        part: The range.
        stream: The stream of the messages.
        strict: Whether a hole is an error.

    Attributes:
        greatest: Greatest position seen. It never falls.
    """

    def __init__(self, part: Range, stream: Stream, *, strict: bool) -> None:
        self._range = part
        self._stream = stream
        self._strict = strict
        self.greatest = part.after
        self.holes: list[str] = []
        self._offset: int | None = None  # of the message before

    def take(self, message: Message, *, same_stream: bool) -> Taken:
        """The transactions of `message` that belong to the range and were not seen before.

        Args:
            message: The next message of the stream.
            same_stream: Whether the stream is the one in which the range was planned.

        Raises:
            DataLoss: There is a hole before it and the selection is strict; else the hole is noted in `holes`.
        """
        part = self._range
        ceiling = None if same_stream and part.open_until is not None else part.through
        if message.previous > self.greatest:
            self._hole(f"Queue {part.queue} lacks what comes after {self.greatest}, up to {message.previous}")
        elif message.previous == START and message.first > max(self.greatest, part.start.last) and self._may_lack(message.offset):
            left = f"what is left begins at {message.first}, where the chain starts again"
            self._hole(f"Queue {part.queue} may lack what comes after {self.greatest}: {left}")
        self._offset = message.offset
        transactions, starts = message.batch.transactions, message.previous == START
        first, last = message.first, message.last
        is_wanted = part.least <= first.sequence and last.sequence <= part.most and first.epoch == last.epoch  # in an epoch, sequences grow
        if is_wanted and first > self.greatest and (ceiling is None or last <= ceiling):
            self.greatest = last
            return Taken(transactions, starts)
        taken, numbers = [], []
        for number, transaction in enumerate(transactions):
            position = position_of(transaction.position)
            if position <= self.greatest:
                continue
            self.greatest = position
            if (ceiling is None or position <= ceiling) and part.least <= position.sequence <= part.most:
                taken.append(transaction)
                numbers.append(number)
        return Taken(taken, starts and numbers[:1] == [0])

    def done(self, offset: int, *, same_stream: bool) -> bool:
        """Whether the range ends with the message at `offset`, which was taken."""
        part = self._range
        return self.greatest >= part.through and (part.open_until is None or not same_stream or offset >= part.open_until)

    def _may_lack(self, offset: int) -> bool:
        """Whether transactions between the message before and the one at `offset` may have been trimmed."""
        if self._offset is None or self._offset == offset - 1:
            return self._offset is None
        head = self._stream.first(self._range.queue)
        return head is None or head.offset > self._offset + 1

    def _hole(self, what: str) -> None:
        if self._strict:
            raise DataLoss(what)
        self.holes.append(what)


@dataclass(frozen=True)
class Extent:
    """The part of a queue to read, before it is cut: as Range, with the message in which it ends."""

    whole: Range
    end: Hint

    @property
    def messages(self) -> int:
        """Approximate number of messages."""
        return max(self.end.offset - self.whole.start.offset + 1, 1)


def begin(stream: Stream, part: Range) -> tuple[Message | None, bool]:
    """The message at which to begin to read `part` in `stream` (None if it is empty), and whether `part` was planned in this stream."""
    tail = stream.tail(part.queue)
    if tail is None:
        return None, False
    if max(part.start.offset, part.open_until or 0) <= tail.offset:  # a stream that ends before is another one
        found = stream.at(part.queue, part.start.offset)
        if (found.offset, found.last) == part.start:
            return found, True
    return find(stream, part.queue, part.after), False


def extent(stream: Stream, queue: str, starting: int | None, ending: int | None, *, strict: bool) -> Extent | None:
    """The part of `queue` to read; None if there is none.

    Args:
        stream: The queue on the node that plans.
        queue: Its name.
        starting: Least source sequence, or None for the earliest that is there.
        ending: Source sequence before which to stop, or None for every transaction that was there at the call.
        strict: Whether a range that the queue does not hold as a whole is an error.

    Raises:
        DataLoss: The range begins before the first transaction left, or at a sequence that the source's log has had twice.
        OptionError: The range ends, or begins, after the last received transaction.
    """
    ends = find_ends(stream, queue)
    if starting is not None and ending is not None and ending < starting:
        raise OptionError(f"Queue {queue}: endingOffsets {ending} is before startingOffsets {starting}")
    if ends is None:
        return None
    head, tail = ends
    received = max(head.last, tail.last).sequence
    start, after, through, open_until = head, head.previous, tail.last, tail.offset
    if starting is not None:
        # A stream's first offset is 0; at a restart of the chain, no other sign shows what was before.
        lost = head.previous if head.previous != START or head.offset == 0 else Position(head.first.epoch, head.first.sequence - 1)
        if lost != START and starting <= lost.sequence and strict:
            raise DataLoss(f"Queue {queue} begins after sequence {lost.sequence}: startingOffsets {starting} is trimmed")
        if strict and (fall := _fall(stream, queue, head, tail, starting)):
            old, new = fall
            raise DataLoss(
                f"Queue {queue}: the source's log ends at {old}, and went on at {new} without it: startingOffsets {starting} may be of either; "
                f"name {new.sequence} or less"
            )
        if starting > received + 1 and strict:
            raise OptionError(
                f"Queue {queue} has been received up to sequence {received}: startingOffsets {starting} is after that"
            )
        wanted = starting
        if tail.last.sequence < wanted:
            start = tail
        elif head.last.sequence < wanted:
            start = locate(stream, queue, head, tail, lambda message: message.last.sequence < wanted)
        after = start.last if start is not head or head.last.sequence < wanted else head.previous
    if ending is None:
        return Extent(
            Range(queue, after, max(after, through), Hint(start.offset, start.last), open_until, starting or 0), Hint(tail.offset, tail.last)
        )
    if ending > received + 1:
        raise OptionError(
            f"Queue {queue} has been received up to sequence {received}: endingOffsets {ending} is after that",
            todo="Wait until it has been received, or use latest",
        )
    end = locate_first(stream, queue, head, tail, lambda message: message.last.sequence < ending - 1)
    through = max(after, end.last)
    return Extent(
        Range(queue, after, through, Hint(start.offset, start.last), None, starting or 0, ending - 1), Hint(end.offset, end.last)
    )


def _fall(stream: Stream, queue: str, head: Message, tail: Message, starting: int) -> tuple[Position, Position] | None:
    """The positions around entries that the source's log lost, by a forced promotion, and whose sequences it used again, if `starting` lies
    between them, and thus does not tell which of the two were read. (Epochs only grow; in each, sequences do too.)
    """
    last = head
    while last.last.epoch < tail.last.epoch and last.offset < tail.offset:
        last = locate(stream, queue, last, tail, partial(_is_within, last.last.epoch))
        after = stream.at(queue, last.offset + 1)
        forks = after.previous == START and after.first.epoch > last.last.epoch  # else a sink repeats its beginning
        if forks and after.first.sequence < starting <= last.last.sequence + 1:
            return last.last, after.first
        last = after
    return None


def _is_within(epoch: int, message: Message) -> bool:
    return message.last.epoch <= epoch


def split(stream: Stream, extents: Sequence[Extent], partitions_min: int, entries_max: int | None = None) -> list[Range]:
    """Cuts the extents into ranges of similar length, at least one per extent.

    There are fewer if there are not enough messages, or if a cut would fall on repeated messages.

    Args:
        stream: The queues on the node that plans.
        extents: The parts of queues.
        partitions_min: The ranges wanted in all.
        entries_max: The rows of a range, about: those of a few messages are counted. None: no limit.
    """
    total = sum(one.messages for one in extents)
    ranges = []
    for one in extents:
        pieces = max(round(partitions_min * one.messages / total), 1)
        if entries_max is not None:
            pieces = max(pieces, math.ceil(_estimate_rows(stream, one) / entries_max))
        pieces = min(pieces, one.messages)
        ranges += _cut(one.whole, (stream.at(one.whole.queue, offset) for offset in _offsets(one, pieces)))
    return ranges


def count_rows(transactions: Iterable[pb.ReceivedTransaction]) -> int:
    """The rows of transactions: one for each payload, and one for a transaction without."""
    return sum(max(len(transaction.payloads), 1) for transaction in transactions)


def _estimate_rows(stream: Stream, one: Extent) -> float:
    seen = [count_rows(stream.at(one.whole.queue, offset).batch.transactions) for offset in _offsets(one, SAMPLES)]
    return one.messages * sum(seen) / len(seen) if seen else 0


def _offsets(one: Extent, pieces: int) -> list[int]:
    first = one.whole.start.offset
    return sorted({first + one.messages * number // pieces for number in range(1, pieces)} - {first})


def _cut(whole: Range, candidates: Iterable[Message]) -> list[Range]:
    cuts: list[Hint] = []
    for message in candidates:
        last = message.last
        if (cuts[-1].last if cuts else whole.after) < last < whole.through and message.offset > whole.start.offset:
            cuts.append(Hint(message.offset, last))
    starts = [whole.start, *cuts]
    afters = [whole.after, *(cut.last for cut in cuts)]
    throughs = [*(cut.last for cut in cuts), whole.through]
    return [
        Range(whole.queue, after, through, start, whole.open_until if number == len(cuts) else None, whole.least, whole.most)
        for number, (start, after, through) in enumerate(zip(starts, afters, throughs))
    ]
