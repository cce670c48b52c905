"""Holds a client's methods for a queue that is being moved (R17): they wait at the door, with all frames behind them on their connection.

Rules:
- A publish waits if it may reach such a queue; a transaction waits when it commits. Consumers, basic.get, a purge and a deletion of the queue itself
  wait, too, and a declaration, whose answer would count only messages on their way.
- A deletion waits from the cancelling of the first consumer on: the broker would take the queue for unused.
- A method that has waited for its barrier is checked again afterwards.
- While the LengthReconciler checks whether a queue is empty, consumers and deletions wait, too.
- All publishes wait while the broker owes an answer to a declaration that an alarm may keep it from giving (`barrier`).
- Other methods go on. Acks of consumers are not behind a hold: the queue is moved only when no client holds a delivery of it.
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
    """The first of a channel's consecutive publishes from items[at] on that has to wait, and its hold; else the index behind them."""
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
    """The hold that a method other than a publish has to wait for, if any."""
    if kind == QUEUE_DECLARE:
        return queue_waits_for(session, kind, declarations.first_name(declarations.as_named(kind, payload)))
    if kind == QUEUE_DELETE:
        return queue_waits_for(session, kind, declarations.first_name(declarations.as_named(kind, payload)) or channel.last_queue)
    if kind in _CONSUMES:
        return queue_waits_for(session, kind, declarations.first_name(payload) or channel.last_queue)
    return None


def queue_waits_for(session: ClientSession, kind: int, queue: str) -> QueueHold | None:
    """The hold that a method about this queue has to wait for, if any."""
    moving = session.replica.moving.get((session.vhost, queue))
    if moving is None or kind == QUEUE_DELETE or (kind == QUEUE_DECLARE and moving.publishes) or (kind in _CONSUMES and moving.consumes):
        return moving
    return None


def commit_waits_for(session: ClientSession, tx: Transaction) -> QueueHold | None:
    """The hold that a transaction has to wait for before it is committed, if any."""
    moving = session.replica.moving.values()
    for data in tx.frames if moving else ():
        for kind, _, start, end, header, header_end, stop in scan(data, 0, frames.FRAME_MAX_ANY_BYTES, len(data) + 1)[0]:
            if kind == BASIC_PUBLISH and stop:
                for one in moving:
                    if one.reached_by(session.vhost, session.replica.declared.definitions, data[start:end], data[header:header_end]):
                        return one
    return None
