"""A message on its way to the queues, and the parked messages of one place. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from lrq_ha.replication.queues import QueueKey

from ..log.definitions import ALONE

RETRY_S = 0.2
RETRY_MESSAGES_MIN = 16
HELD_S = 2.0  # since a message got in: for so long others wait that are not known to be refused
NAME_BYTES_MAX = 255


class Route(NamedTuple):
    """Where a message goes. `queues`: its one queue, if the message goes to no other (by the queue's name, say), else empty."""

    exchange: str
    routing_key: str
    queues: tuple[QueueKey, ...]

    def __str__(self) -> str:
        return f"exchange '{self.exchange}'" if self.exchange else f"queue '{self.routing_key}'"


Place = frozenset[str] | Route
"""What parked messages wait for: the queues that may refuse them, or, if none is known, whatever is on their route."""


OnFull = Callable[[QueueKey | None], None]
"""Called when a full queue is to be swept at once (None: an unknown one)."""


class Message:
    """A message on its way. `header_end`, `stop`: in `blob`, whose frames carry channel `number`; `payload`: of its content header."""

    __slots__ = ("blob", "header_end", "mandatory", "number", "origin", "parked", "payload", "place", "prefix", "refusers", "retried",
                 "route", "sequence", "size", "stop")  # fmt: skip

    def __init__(
        self, sequence: int, route: Route, prefix: bytes, payload: bytes, blob: bytes, number: int, header_end: int, stop: int
    ) -> None:
        self.sequence = sequence
        self.origin = route  # by which the message came
        self.route = route  # by which the message goes
        self.prefix = prefix
        self.payload = payload
        self.blob = blob
        self.number = number
        self.header_end = header_end
        self.stop = stop
        self.size = len(payload) + stop - header_end
        self.parked = False  # refused, or behind a refused one, until it is in its queue
        self.retried = False
        self.refusers: frozenset[str] | None = None  # set once the message has been on its route: one of these refused it
        self.place: Place = route  # where it is parked
        self.mandatory = False  # whether this node is told if the message reaches no queue

    def part(self) -> None:
        """Copies the message's own bytes out of the batch: the batch is large, and the message may stay for long."""
        self.blob = self.blob[self.header_end : self.stop]
        self.header_end, self.stop = 0, len(self.blob)


@dataclass(slots=True)
class ParkingLot:
    """Messages of one place that the broker refused, or that wait behind refused ones: a heap, by sequence."""

    moved: float  # when one of them got in, or the first came
    batch: int  # how many are tried at once
    waiting: list[tuple[int, Message]] = field(default_factory=list)
    at: float = 0.0
    pause_s: float = RETRY_S
    flying: int = 0  # tried again and not answered yet
    refused: bool = False  # one of this round was refused
    alone: str = ""  # the queue to which some go alone, through an exchange of this node's own
    holds_others: bool = False  # some have not been on their route, and have other queues to go to

    def is_stuck(self, now: float) -> bool:
        """Whether no message has got in for a while."""
        return now - self.moved > HELD_S

    def goes_before(self, sequence: int, now: float) -> bool:
        """Whether entry `sequence` is to wait for these messages."""
        return not self.is_stuck(now) and (self.flying > 0 or (bool(self.waiting) and self.waiting[0][0] < sequence))

    def take(self, count: int) -> list[Message]:
        """The first `count` messages."""
        return [heappop(self.waiting)[1] for _ in range(min(count, len(self.waiting)))]

    def put_back(self, messages: list[Message]) -> None:
        """Puts back messages that were taken and not sent."""
        for message in messages:
            heappush(self.waiting, (message.sequence, message))

    def take_others(self, count: int) -> list[Message]:
        """The first `count` messages that have not been on their route."""
        found = self.take_where(lambda message: not message.route.queues, count)
        self.holds_others = len(found) == count
        return found

    def take_where(self, which: Callable[[Message], bool], count: int | None = None) -> list[Message]:
        """The first `count` matching messages, in order."""
        found = sorted(each for each in self.waiting if which(each[1]))[:count]
        taken = {sequence for sequence, _ in found}
        self.waiting = [each for each in self.waiting if each[0] not in taken]
        heapify(self.waiting)
        return [message for _, message in found]


def alone(queue: str) -> str:
    """The name of this node's own exchange that leads to a queue alone."""
    raw = queue.encode("utf-8", "surrogateescape")
    return ALONE + (queue if len(ALONE) + len(raw) <= NAME_BYTES_MAX else sha256(raw).hexdigest())


def refuser(message: Message, place: Place) -> str | None:
    """The one queue of several that can refuse a message; None: the message has no other queues, or that queue is unknown."""
    return None if message.route.queues or isinstance(place, Route) or len(place) > 1 else next(iter(place))


def leaves_copies(place: Place) -> bool:
    """Whether each try may leave a second copy somewhere: it is unknown which of several queues refuses."""
    return isinstance(place, Route) or len(place) > 1


def batch_min(place: Place) -> int:
    """How many messages are tried first."""
    return 1 if leaves_copies(place) else RETRY_MESSAGES_MIN


def told(place: Place) -> str:
    """The place as operators are told it."""
    if isinstance(place, Route):
        return str(place)
    return " or ".join(f"queue '{queue}'" for queue in sorted(place))
