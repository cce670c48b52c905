"""What a client sends for a queue that is being moved (R17) waits at the door, with all that follows it on its connection.

Rules:
- A publish waits if it may reach such a queue; a transaction when it commits. So do consumers, basic.get, a purge and a deletion of the queue itself,
  and a declaration, whose answer would tell of what is on its way only.
- A deletion waits from the moment on in which the first consumer is cancelled: the broker would take the queue for unused.
- What has waited for its barrier meanwhile is looked at once more.
- Where the census looks whether a queue is empty, consumers and deletions wait for that moment, too.
- All publishes wait while the broker owes an answer to a declaration that an alarm may keep it from giving (`barrier`).
- Everything else goes on. Acks of what consumers hold are not behind it: the queue is moved only when nobody holds anything of it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from . import frames, reaching, topology
from .channels import Channel, QueueKey, Transaction
from .frames import BASIC_CONSUME, BASIC_GET, BASIC_PUBLISH, QUEUE_DECLARE, QUEUE_DELETE, QUEUE_PURGE, Item, publish_route, scan
from .headers import routes_on

if TYPE_CHECKING:
    from .relay import Relay

_CONSUMES = frozenset({BASIC_CONSUME, BASIC_GET, QUEUE_PURGE})


@dataclass(eq=False)
class Moving:
    """A queue that is being moved, until `over` is set. `consumes`: who consumes waits, and not only a deletion; `publishes`: everybody does."""

    key: QueueKey
    consumes: bool = True
    publishes: bool = True
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def reached_by(self, relay: Relay, method: bytes, header: bytes) -> bool:
        """Whether a publish may reach it."""
        if not self.publishes or relay.vhost != self.key[0]:
            return False
        route = publish_route(method)
        more = routes_on(header)
        if not route.exchange:
            return more or route.routing_key == self.key[1]
        ways = reaching.routing(relay.replica.declared.definitions, self.key[0])
        return self.key[1] in ways.queues(route.exchange, None if more else route.routing_key)


class AllPublishes(Moving):
    """No queue, but all of them: every publish waits, and nothing else."""

    KEY: ClassVar[QueueKey] = ("", "")  # which no queue has

    def __init__(self) -> None:
        super().__init__(self.KEY, consumes=False)

    def reached_by(self, relay: Relay, method: bytes, header: bytes) -> bool:
        return True


def first_that_waits(relay: Relay, data: bytes, items: list[Item], at: int) -> tuple[int, Moving | None]:
    """The first publish, of those of a channel that follow each other from items[at] on, that has to wait, and for what; else where they end."""
    number, total = items[at][1], len(items)
    moving = () if relay.channel(number).tx is not None else relay.replica.moving.values()
    while at < total:
        kind, same, start, end, header, header_end, stop = items[at]
        if kind != BASIC_PUBLISH or not stop or same != number:
            break
        for one in moving:
            if one.reached_by(relay, bytes(data[start:end]), bytes(data[header:header_end])):
                return at, one
        at += 1
    return at, None


def waits_for(relay: Relay, channel: Channel, kind: int, payload: bytes) -> Moving | None:
    """What a method that is no publish has to wait for, if anything."""
    if kind == QUEUE_DECLARE:
        return queue_waits_for(relay, kind, topology.first_name(topology.as_named(kind, payload)))
    if kind == QUEUE_DELETE:
        return queue_waits_for(relay, kind, topology.first_name(topology.as_named(kind, payload)) or channel.last_queue)
    if kind in _CONSUMES:
        return queue_waits_for(relay, kind, topology.first_name(payload) or channel.last_queue)
    return None


def queue_waits_for(relay: Relay, kind: int, queue: str) -> Moving | None:
    """The same, of a method about this queue."""
    moving = relay.replica.moving.get((relay.vhost, queue))
    if moving is None or kind == QUEUE_DELETE or (kind == QUEUE_DECLARE and moving.publishes) or (kind in _CONSUMES and moving.consumes):
        return moving
    return None


def commit_waits_for(relay: Relay, tx: Transaction) -> Moving | None:
    """What a transaction has to wait for, if anything, before it is done in earnest."""
    moving = relay.replica.moving.values()
    for data in tx.frames if moving else ():
        for kind, _, start, end, header, header_end, stop in scan(data, 0, frames.FRAME_MAX_ANY_BYTES, len(data) + 1)[0]:
            if kind == BASIC_PUBLISH and stop:
                for one in moving:
                    if one.reached_by(relay, data[start:end], data[header:header_end]):
                        return one
    return None
