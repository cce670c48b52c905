"""Transactions of a channel: tx.select, tx.commit, tx.rollback.

Rules:
- Rehearsed: what belongs to a transaction goes to the broker as it comes, in a transaction there. So whatever the broker refuses, it refuses at
  once and in its own words, before anything of it is in the log. The door keeps a copy.
- An answer to a direct reply-to is rehearsed as one to nobody: RabbitMQ 3 delivers them at once, whatever becomes of the transaction.
- In earnest: at commit the broker forgets the rehearsal. When it has said so, it has refused nothing of it; only then the copy goes the way of
  everything that is published and acked without a transaction, in one turn of the event loop. So all of its entries are in one batch of the log,
  and a batch is never split: it is safe as a whole, and whoever is promoted has all of it or nothing. What the broker gets, with positions, when
  that is safe, is a transaction again; its commit-ok is the client's, and says that the entries are applied.
- Begun late: a channel that has published is in confirm mode at the broker, by the door's doing, and takes no tx there. RabbitMQ itself does not mind
  what was published before. So, when all publishes are answered, such a channel gets a second one at the broker, which the client does not see: its
  publishes and whatever is of tx go there, and what comes from there is given to the client under its own number. Consumers, deliveries and acks
  stay on the first one. There, an ack counts at once; so it is not rehearsed but judged here, by the tags that the client holds, and told to the
  broker at commit. That is no less atomic: what an ack and a publish have in common stands in the log. An end of either is the end of both, and
  the client is told of it when both have ended (`lifecycle`).
- In doubt: a broker's connection that dies before commit-ok leaves a transaction done or not done. If a copy of it has been seen, it was done.
  Else its publishes are refused, so that copies that are there all the same count for nothing, and in the same batch logged anew, for the applier.
"""

from __future__ import annotations

import asyncio

from pamqp import commands

from lrq_ha.routing import names

from ..amqp import encode, frames, reply_codes
from ..amqp.content_relay import PIECES
from ..amqp.frames import CHANNEL_CLOSE, CHANNEL_CLOSE_OK, CHANNEL_OPEN_OK, METHOD, Item, scan
from ..amqp.reply_codes import NOT_IMPLEMENTED
from ..log.messages import Settled
from ..session.channel import ClientChannel
from ..session.session import ClientSession
from ..session.transaction import Commit, Transaction
from . import acknowledge, closing, duplicates, holds, lifecycle, publish

ANSWERED_POLL_S = 0.01


# ---- what the client says --------------------------------------------------------------------------------------------------


def select(session: ClientSession, channel: ClientChannel, kind: int, payload: bytes) -> None:
    """tx.select."""
    if names.is_routing(session.vhost):
        closing.refuse(session, channel, NOT_IMPLEMENTED, f"vhost '{session.vhost}' has no tx: several payloads go in one log entry instead", kind)
        return
    if channel.broker_confirms and not channel.confirms.selected and not channel.second:
        session.from_client.stall()
        session.spawn(_begin_late(session, channel, payload))
        return
    if channel.tx is None and not channel.broker_confirms:  # where the client has selected confirms, the broker refuses
        channel.tx = Transaction(session.from_client.share)
    session.outbox.put(encode.frame(METHOD, channel.tx_number, payload))


async def _begin_late(session: ClientSession, channel: ClientChannel, payload: bytes) -> None:
    session.flow.asks(True)
    try:
        while not channel.closing and (channel.unanswered or channel.questions):
            await asyncio.sleep(ANSWERED_POLL_S)
        if channel.closing:
            return
        if not session.has_room_for_channel:
            text = f"all {session.channels_max} channels of this connection are in use, and tx on one that has published takes another: "
            text += "select it first"
            closing.refuse(session, channel, NOT_IMPLEMENTED, text, frames.TX_SELECT)
            return
        number = session.number_apart()
        channel.second, session.tx_channels[number], session.internal_channels[number] = number, channel, from_second
        channel.tx = Transaction(session.from_client.share)
        session.outbox.put(encode.method_frame(number, commands.Channel.Open()) + encode.frame(METHOD, number, payload))
    finally:
        session.flow.asks(False)
        session.from_client.unstall()


def commit(session: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """tx.commit."""
    tx = channel.tx
    if tx is not None and tx.frames:
        channel.rollbacks.append(False)
        channel.rehearsed = asyncio.get_running_loop().create_future()
        session.outbox.put(encode.method_frame(channel.tx_number, commands.Tx.Rollback()))
        session.from_client.stall()
        session.spawn(_commit_when_rehearsed(session, channel, tx, channel.rehearsed, payload))
        return
    if tx is not None:
        session.ask(channel)
        channel.tx = tx.over()
        channel.commits.append(Commit())
    session.outbox.put(encode.frame(METHOD, channel.tx_number, payload))


async def _commit_when_rehearsed(
    session: ClientSession, channel: ClientChannel, tx: Transaction, rehearsed: asyncio.Future[None], payload: bytes
) -> None:
    def in_earnest() -> None:
        if channel.closing or session.fenced:
            return  # what it settles has gone back, or will
        if tx.gaps and not session.replica.index.dedup.may_leave(session.producer_key, tx.gaps, session.door.config.id_bytes_max):
            closing.refuse(session, channel, reply_codes.PRECONDITION_FAILED, duplicates.GAPS, frames.TX_COMMIT)
            return
        commit = Commit()
        channel.tx, channel.committing = None, commit
        acknowledge.commit_internally(session, channel)
        data = b"".join(tx.frames)
        session.from_client.work(data, scan(data, 0, session.frame_max_bytes, len(data) + 1)[0])
        channel.tx, channel.committing = tx.over(), None
        channel.commits.append(commit)
        session.outbox.put(encode.frame(METHOD, channel.tx_number, payload))

    session.flow.asks(True)
    try:
        await rehearsed
    finally:
        session.flow.asks(False)  # what else it waits for is not for the broker to say
    while True:
        moving = holds.commit_waits_for(session, tx)
        if session.replica.barrier.is_up:
            await session.replica.barrier.down()
        elif moving is not None:
            await moving.over.wait()
        else:
            break
    channel.rehearsed = None
    session.from_client.unstall(in_earnest)


def rollback(session: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """tx.rollback."""
    if channel.tx is not None:
        channel.rollbacks.append(True)
        channel.tx = channel.tx.over()
    session.outbox.put(encode.frame(METHOD, channel.tx_number, payload))


# ---- what the broker answers -----------------------------------------------------------------------------------------------


def from_second(session: ClientSession, number: int, data: bytes, item: Item) -> bytes:
    """What comes from a second channel: the same, as if it came from the first. Returns what the client gets."""
    kind, channel = item[0], session.tx_channels[number]
    if kind == CHANNEL_OPEN_OK:
        return b""
    if kind == CHANNEL_CLOSE:
        return lifecycle.second_refused(session, channel, encode.rechannel(data[item[2] - 7 : item[3] + 1], channel.number))
    if kind == CHANNEL_CLOSE_OK:
        return lifecycle.second_closed(session, channel)
    if kind in PIECES and not item[6]:
        given = session.from_broker.passing.take(kind, number, data, item, channel.number) or b""
    else:
        blob = encode.rechannel(data[item[2] - 7 : frames.end_of(item)], channel.number)
        items, _ = scan(blob, 0, frames.FRAME_MAX_ANY_BYTES, len(blob) + 1)
        handler = session.on_broker.get(kind)
        replaced = handler(session, channel.number, blob, items[0]) if handler is not None else None
        given = blob if replaced is None else replaced
        if session.from_broker.passing.waits(given):  # of the first channel's
            return b""
    return given if channel.speaks else b""


def commit_ok(session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
    """tx.commit-ok: its publishes are in the queues."""
    channel, replica = session.channel(number), session.replica
    if not channel.commits:
        return None
    commit = channel.commits.popleft()
    for first, run in commit.runs:
        publish.took(session, channel, first, len(run.enqueues.lengths), run.enqueues.producer)
        if session.watch is not None:
            session.watch.answered(channel.number, [Settled(0, len(run.enqueues.lengths), first, "", 0)], True)
    if not channel.unanswered:
        closing.settled(session, channel)
    if commit.own:
        return b""
    if session.repeats.are_in(commit.repeats) and not (channel.commit_oks or replica.holds_confirms):
        return None
    session.repeats.answer_commit(channel, data[item[2] - 7 : item[3] + 1], commit.repeats)
    return b""


def rollback_ok(session: ClientSession, number: int, _data: bytes, _item: Item) -> bytes | None:
    """tx.rollback-ok; the client did not ask for that of a rehearsal."""
    channel = session.channel(number)
    if not channel.rollbacks:
        return None
    asked = channel.rollbacks.popleft()
    if not channel.rollbacks:  # nothing is added to them while a commit waits for its own
        channel.rehearsal_is_over()
    return None if asked else b""
