"""Transactions of a channel: tx.select, tx.commit, tx.rollback.

Rules:
- Dry run (`rehearse`): a transaction's frames go to the broker as they come, in a transaction there. The broker so refuses them at once and in its
  own words, before any of them is in the log. The door keeps a copy.
- An answer to a direct reply-to has no addressee in the dry run: RabbitMQ 3 delivers such answers at once, even if the transaction is rolled back.
- Commit: the broker rolls the dry run back. Its rollback-ok says that it has refused nothing. Only then the copy takes the way of publishes and acks
  without a transaction, in one turn of the event loop. All entries of a transaction are so in one batch of the log, and a batch is never split: it is
  safe as a whole, and a promoted node has all of it or nothing. When the batch is safe, the broker gets the copy, with positions, as a
  transaction. Its commit-ok is the client's, and says that the entries are applied.
- Late tx.select: a channel that has published is in confirm mode at the broker, by the door's doing, and takes no tx there. RabbitMQ itself allows
  publishes before tx.select. Such a channel therefore gets a second one at the broker when all its publishes are answered. The client does not see
  the second channel: the publishes and tx methods go there, and its frames reach the client under the client's number. Consumers, deliveries
  and acks stay on the first channel. An ack counts at once there, so it has no dry run: the door checks it by the tags that the client holds, and
  sends it at commit. That is no less atomic: the log ties an ack to a publish. The end of either channel is the end of both, and the
  client is told when both have ended (`lifecycle`).
- In doubt: a broker connection that dies before commit-ok leaves it open whether the transaction was done. A copy that has been seen proves that it
  was. Else its publishes are refused, so that copies in the queues count for nothing, and logged again in that batch, for the applier.
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


# ---- requests of the client ------------------------------------------------------------------------------------------------


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
            return  # the deliveries that it settles have gone back, or will
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
        session.flow.asks(False)  # the rest of the wait does not depend on the broker
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


# ---- answers of the broker -------------------------------------------------------------------------------------------------


def from_second(session: ClientSession, number: int, data: bytes, item: Item) -> bytes:
    """Handles a frame of a second channel as if it came from the first. Returns the frames for the client."""
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
        if session.from_broker.passing.waits(given):  # behind a content of the first channel
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
    """tx.rollback-ok; the client did not ask for that of a dry run."""
    channel = session.channel(number)
    if not channel.rollbacks:
        return None
    asked = channel.rollbacks.popleft()
    if not channel.rollbacks:  # a commit that waits for its own keeps others from being added
        channel.rehearsal_is_over()
    return None if asked else b""
