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

from ..amqp import declarations, frames
from ..amqp.frames import BASIC_CONSUME, BASIC_GET, BASIC_PUBLISH, QUEUE_DECLARE, QUEUE_DELETE, QUEUE_PURGE, Item, scan
from ..log.holds import QueueHold
from ..session.channel import ClientChannel
from ..session.session import ClientSession
from ..session.transaction import Transaction

_CONSUMES = frozenset({BASIC_CONSUME, BASIC_GET, QUEUE_PURGE})


def first_that_waits(session: ClientSession, data: bytes, items: list[Item], at: int) -> tuple[int, QueueHold | None]:
    """The first publish, of those of a channel that follow each other from items[at] on, that has to wait, and for what; else where they end."""
    number, total = items[at][1], len(items)
    moving = () if session.channel(number).tx is not None else session.replica.moving.values()
    while at < total:
        kind, same, start, end, header, header_end, stop = items[at]
        if kind != BASIC_PUBLISH or not stop or same != number:
            break
        for one in moving:
            if one.reached_by(session.vhost, session.replica.declared.definitions, bytes(data[start:end]), bytes(data[header:header_end])):
                return at, one
        at += 1
    return at, None


def waits_for(session: ClientSession, channel: ClientChannel, kind: int, payload: bytes) -> QueueHold | None:
    """What a method that is no publish has to wait for, if anything."""
    if kind == QUEUE_DECLARE:
        return queue_waits_for(session, kind, declarations.first_name(declarations.as_named(kind, payload)))
    if kind == QUEUE_DELETE:
        return queue_waits_for(session, kind, declarations.first_name(declarations.as_named(kind, payload)) or channel.last_queue)
    if kind in _CONSUMES:
        return queue_waits_for(session, kind, declarations.first_name(payload) or channel.last_queue)
    return None


def queue_waits_for(session: ClientSession, kind: int, queue: str) -> QueueHold | None:
    """The same, of a method about this queue."""
    moving = session.replica.moving.get((session.vhost, queue))
    if moving is None or kind == QUEUE_DELETE or (kind == QUEUE_DECLARE and moving.publishes) or (kind in _CONSUMES and moving.consumes):
        return moving
    return None


def commit_waits_for(session: ClientSession, tx: Transaction) -> QueueHold | None:
    """What a transaction has to wait for, if anything, before it is done in earnest."""
    moving = session.replica.moving.values()
    for data in tx.frames if moving else ():
        for kind, _, start, end, header, header_end, stop in scan(data, 0, frames.FRAME_MAX_ANY_BYTES, len(data) + 1)[0]:
            if kind == BASIC_PUBLISH and stop:
                for one in moving:
                    if one.reached_by(session.vhost, session.replica.declared.definitions, data[start:end], data[header:header_end]):
                        return one
    return None
