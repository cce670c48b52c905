"""Transactions of a channel: tx.select, tx.commit, tx.rollback.

Rules:
- Dry run (`rehearse`): a transaction's frames go to the broker as they come, in a transaction there. The broker so refuses them at once and in its
  own words, before any of them is in the log. The door keeps a copy.
- An answer to a direct reply-to has no addressee in the dry run: RabbitMQ 3 delivers such answers at once, even if the transaction is rolled back.
- Commit: the broker rolls the dry run back. Its rollback-ok says that it has refused nothing. Only then the copy takes the way of publishes and acks
  without a transaction, in one turn of the event loop. All entries of a transaction are so in one batch of the log, and a batch is never split: it is
  safe as a whole, and a promoted node has all of it or nothing. When the batch is safe, the broker gets the copy, with positions, as a
  transaction. Its commit-ok is the client's, and says that the entries are applied.
- A channel that has published is in confirm mode at the broker, by the door's doing, and takes no tx there. RabbitMQ itself allows publishes before
  tx.select; the door refuses a tx.select behind them, once the broker has answered them.
- In doubt: a broker connection that dies before commit-ok leaves it open whether the transaction was done. A copy that has been seen proves that it
  was. Else its publishes are refused, so that copies in the queues count for nothing, and logged again in that batch, for the applier.
"""

from __future__ import annotations

import asyncio

from pamqp import commands

from lrq_ha.routing import names

from ..amqp import encode, frames, reply_codes
from ..amqp.frames import METHOD, Item, scan
from ..amqp.reply_codes import NOT_IMPLEMENTED
from ..log.messages import Settled
from ..session.channel import ClientChannel
from ..session.session import ClientSession
from ..session.transaction import Commit, Transaction
from . import acknowledge, closing, duplicates, holds, publish

# ---- requests of the client ------------------------------------------------------------------------------------------------


def select(session: ClientSession, channel: ClientChannel, kind: int, payload: bytes) -> None:
    """tx.select."""
    if names.is_routing(session.vhost):
        closing.refuse(session, channel, NOT_IMPLEMENTED, f"vhost '{session.vhost}' has no tx: several payloads go in one log entry instead", kind)
        return
    if channel.broker_confirms and not channel.confirms.selected:
        text = "this channel has published without tx: select tx before the first publish on the channel"
        closing.refuse(session, channel, NOT_IMPLEMENTED, text, kind)
        return
    if channel.tx is None and not channel.broker_confirms:  # where the client has selected confirms, the broker refuses
        channel.tx = Transaction(session.from_client.share)
    session.outbox.put(encode.frame(METHOD, channel.number, payload))


def commit(session: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """tx.commit."""
    tx = channel.tx
    if tx is not None and tx.frames:
        channel.rollbacks.append(False)
        channel.rehearsed = asyncio.get_running_loop().create_future()
        session.outbox.put(encode.method_frame(channel.number, commands.Tx.Rollback()))
        session.from_client.stall()
        session.spawn(_commit_when_rehearsed(session, channel, tx, channel.rehearsed, payload))
        return
    if tx is not None:
        session.ask(channel)
        channel.tx = tx.over()
        channel.commits.append(Commit())
    session.outbox.put(encode.frame(METHOD, channel.number, payload))


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
        session.outbox.put(encode.frame(METHOD, channel.number, payload))

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
    session.outbox.put(encode.frame(METHOD, channel.number, payload))


# ---- answers of the broker -------------------------------------------------------------------------------------------------


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
