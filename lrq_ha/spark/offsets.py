"""The offsets of a streaming query, and the part of a queue between two of them. Pure.

An offset is, per queue, the last position of the source's log that was given: {queue: {"epoch": E, "sequence": S}}. It is valid on each node of
the sink, and survives failovers of both groups. START, 0 and 0, is the position before the first transaction of a queue that is whole.

- Spark compares offsets as text, so an offset has one spelling: queues in order of name.
- Spark asks for the first offset each time that batch 0 is repeated, and keeps it nowhere. So the first offset is empty, and batch 0 fixes the
  positions at which queues begin, without rows. A queue that appears later enters an offset in this way, too.
- An offset never falls: while a sink repeats entries, the last message may be one that was read long ago.
"""

from __future__ import annotations

from collections.abc import Mapping

from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START, position_of
from lrq_ha.spark.errors import DataLoss, OffsetError
from lrq_ha.spark.moments import find_start
from lrq_ha.spark.options import EARLIEST, LATEST, Bound, Moment
from lrq_ha.spark.ranges import Extent, Range, extent
from lrq_ha.streams.errors import StreamSilent
from lrq_ha.streams.message import Hint, Message, Stream, find, find_ends, locate_first

Offset = Mapping[str, Position]


def parse_offset(given: Mapping[str, Mapping[str, int]]) -> dict[str, Position]:
    """An offset from Spark's form. Raises OffsetError."""
    try:
        return {queue: Position(int(position["epoch"]), int(position["sequence"])) for queue, position in given.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OffsetError(f"{given!r} is no offset of format lrq", todo="Begin with another checkpointLocation") from error


def format_offset(offset: Offset) -> dict[str, dict[str, int]]:
    """An offset in Spark's form, equal offsets in equal order."""
    return {queue: {"epoch": position.epoch, "sequence": position.sequence} for queue, position in sorted(offset.items())}


def position_before(message: Message) -> Position:
    """The position before the first message that is left."""
    if message.previous != START or message.offset == 0:
        return message.previous
    return Position(message.first.epoch, message.first.sequence - 1)


def resolve_start(stream: Stream, queue: str, bound: Bound, *, strict: bool) -> Position:
    """The position before the first transaction to read.

    Args:
        stream: The queue on the node that plans.
        queue: Its name.
        bound: Where to begin.
        strict: Whether a begin that the queue does not hold is an error.

    Raises:
        DataLoss, OptionError: The queue does not hold what follows `bound`.
    """
    if isinstance(bound, Position):
        return bound
    ends = find_ends(stream, queue)
    if ends is None:
        return START
    head, tail = ends
    if isinstance(bound, Moment):
        sequence = find_start(stream, queue, bound)
        bound = LATEST if sequence is None else sequence
    if bound == LATEST:
        return max(head.last, tail.last)
    if bound == EARLIEST:
        return position_before(head)
    extent(stream, queue, bound, None, strict=strict)  # refuses a bound that the queue does not hold
    message = locate_first(stream, queue, head, tail, lambda message: message.last.sequence < bound)
    following = (position_of(one.position) for one in message.batch.transactions)
    first = next((position for position in following if position.sequence >= bound), None)
    if first is None:
        return message.last
    return position_before(head) if first == head.first else Position(first.epoch, bound - 1)


def extent_between(stream: Stream, queue: str, after: Position, through: Position, place: Hint | None, *, strict: bool) -> Extent:
    """The part of a queue that follows `after`, up to `through`.

    Args:
        stream: The queue on the node that plans.
        queue: Its name.
        after: Position given last.
        through: Position to give last.
        place: A message that was met before, perhaps in another stream; used if what it ends with is not after `after`. None: unknown.
        strict: Whether a hole behind `after` is an error.

    Raises:
        OffsetError: `through` is before `after`.
        DataLoss: What follows `after` is gone from the queue.
        StreamSilent: This copy of the queue is empty.
    """
    if through < after:
        raise OffsetError(f"Queue {queue}: the offset {through} is before {after}, which was given", todo="Begin with another checkpointLocation")
    tail = stream.tail(queue)
    found = _find(stream, queue, after, place, tail)
    if tail is None or found is None:
        raise StreamSilent(queue, 0, f"{through}: it is empty")
    if strict and found.last > after and _lacks(found, after):
        raise DataLoss(
            f"Queue {queue} does not hold what follows {after}, the position that was given last: it begins at {found.first}. "
            "To go on there, with a hole: start the query once with failOnDataLoss = false",
        )
    end = tail if tail.last <= through else locate_first(stream, queue, found, tail, lambda message: message.last < through)
    return Extent(Range(queue, after, through, Hint(found.offset, found.last), None), Hint(end.offset, end.last))


def _find(stream: Stream, queue: str, after: Position, place: Hint | None, tail: Message | None) -> Message | None:
    if place is not None and tail is not None and place.last <= after and place.offset <= tail.offset:
        message = stream.at(queue, place.offset)
        if (message.offset, message.last) == place:
            return message
    return find(stream, queue, after)


def _lacks(first: Message, after: Position) -> bool:
    """Whether something between `after` and the first message that is left may be gone."""
    if first.previous != START:
        return first.previous > after
    whole = after == START and first.offset == 0
    return first.first > after and first.first != Position(after.epoch, after.sequence + 1) and not whole

