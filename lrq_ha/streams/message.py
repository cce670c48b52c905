"""The messages of a receive queue, and the search for one of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from lrq_ha.errors import MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import position_of


class Record(NamedTuple):
    """One message of any stream as it came: its offset on this node, its headers and its body."""

    offset: int
    headers: Mapping[str, Any]
    body: bytes


class Message(NamedTuple):
    """One message of a receive queue: its stream offset on this node, and its transactions."""

    offset: int
    batch: pb.ReceivedBatch

    @property
    def previous(self) -> Position:
        return position_of(self.batch.previous)

    @property
    def first(self) -> Position:
        return position_of(self.batch.transactions[0].position)

    @property
    def last(self) -> Position:
        return position_of(self.batch.transactions[-1].position)


class Hint(NamedTuple):
    """The message at `offset` of the planned stream ends with `last`."""

    offset: int
    last: Position


class Located(Protocol):
    """What bisection sees of a message: its stream offset on this node, and its last position."""

    @property
    def offset(self) -> int: ...
    @property
    def last(self) -> Position: ...


L_co = TypeVar("L_co", bound=Located, covariant=True)
L = TypeVar("L", bound=Located)


class Offsets(Protocol[L_co]):
    """A look at one offset of a queue, or at the first one behind it."""

    def at(self, queue: str, offset: int) -> L_co: ...


class Stream(Protocol):
    """A look at one queue on one node."""

    def first(self, queue: str) -> Message | None: ...
    def tail(self, queue: str) -> Message | None: ...
    def at(self, queue: str, offset: int) -> Message: ...


def find_ends(stream: Stream, queue: str) -> tuple[Message, Message] | None:
    """The first and the last message; None: the queue is empty. The last one is looked up first: so a queue that is trimmed meanwhile is seen as
    trimmed.
    """
    tail = stream.tail(queue)
    head = stream.first(queue) if tail is not None else None
    return None if head is None or tail is None else (head, tail)


def find(stream: Stream, queue: str, after: Position) -> Message | None:
    """A message at which to begin to read what follows `after`: it ends at or before `after`, or is the first one left. None: the queue is empty."""
    ends = find_ends(stream, queue)
    if ends is None:
        return None
    head, tail = ends
    if head.last > after:
        return head
    return tail if tail.last <= after else locate(stream, queue, head, tail, lambda message: message.last <= after)


def parse_message(queue: str, offset: int, body: bytes) -> Message:
    """Raises MalformedInput if `body` is no ReceivedBatch with at least one transaction."""
    try:
        batch = pb.ReceivedBatch.FromString(body)
    except Exception as error:
        raise MalformedInput(f"Message {offset} of queue {queue} is no ReceivedBatch: {error}") from error
    if not batch.transactions:
        raise MalformedInput(f"Message {offset} of queue {queue} is a ReceivedBatch without transactions")
    return Message(offset, batch)


def locate(stream: Offsets[L], queue: str, low: L, high: L, before: Callable[[L], bool]) -> L:
    """A message that satisfies `before`, as late as bisection finds one; `low` if there is none.

    If the sink repeated itself there may be a later one; any will do to begin a range (see the module's docstring).
    """
    while high.offset - low.offset > 1:
        middle = stream.at(queue, (low.offset + high.offset) // 2)
        if not low.offset < middle.offset < high.offset:  # trimmed meanwhile: the rest of the interval begins at `middle`
            break
        if before(middle):
            low = middle
        else:
            high = middle
    return low


def locate_first(stream: Offsets[L], queue: str, low: L, high: L, before: Callable[[L], bool]) -> L:
    """The message behind the one that `locate` finds: it does not satisfy `before`; `high` if there is none."""
    if not before(low):
        return low
    if before(high):
        return high
    return stream.at(queue, locate(stream, queue, low, high, before).offset + 1)
