"""Transactions of a channel: tx.select, tx.commit, tx.rollback.

Rules:
- Rehearsed: what belongs to a transaction goes to the broker as it comes, in a transaction there. So whatever the broker refuses, it refuses at
  once and in its own words, before anything of it is in the log. The door keeps a copy.
- In earnest: at commit the broker forgets the rehearsal, and the copy goes the way of everything that is published and acked without a
  transaction, in one turn of the event loop. So all of its entries are in one batch of the log, and a batch is never split: it is safe as a whole,
  and whoever is promoted has all of it or nothing. What the broker gets, with positions, when that is safe, is a transaction again; its commit-ok
  is the client's, and says that the entries are applied.
- In doubt: a broker's connection that dies before commit-ok leaves a transaction done or not done. If a copy of it has been seen, it was done.
  Else its publishes are refused, so that copies that are there all the same count for nothing, and in the same batch logged anew, for the applier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pamqp import commands

from . import closing, endpoints, frames
from .channels import Channel, Commit, Settled, Transaction
from .frames import METHOD, Item, scan

if TYPE_CHECKING:
    from .relay import Relay

NOT_IMPLEMENTED = 540


# ---- what the client says --------------------------------------------------------------------------------------------------


def select(relay: Relay, channel: Channel, kind: int, payload: bytes) -> None:
    """tx.select."""
    if endpoints.is_routing(relay.vhost):
        closing.refuse(relay, channel, NOT_IMPLEMENTED, f"vhost '{relay.vhost}' has no tx: several payloads go in one log entry instead", kind)
        return
    if channel.broker_confirms and not channel.confirms.selected:
        closing.refuse(relay, channel, NOT_IMPLEMENTED, "this channel has published without a transaction: select tx on a new channel", kind)
        return
    if channel.tx is None and not channel.broker_confirms:  # where the client has selected confirms, the broker refuses
        channel.tx = Transaction()
    relay.outbox.put(frames.frame(METHOD, channel.number, payload))


def commit(relay: Relay, channel: Channel, _kind: int, payload: bytes) -> None:
    """tx.commit."""
    number, tx = channel.number, channel.tx
    if tx is not None:
        commit = Commit()
        if tx.frames:
            channel.rollbacks.append(False)
            relay.outbox.put(frames.method_frame(number, commands.Tx.Rollback()))
            channel.give_back(tx)
            channel.tx, channel.committing = None, commit
            data = b"".join(tx.frames)
            relay.work(data, scan(data, 0, relay.frame_max_bytes, len(data) + 1)[0])
        channel.tx, channel.committing = Transaction(), None
        channel.commits.append(commit)
    relay.outbox.put(frames.frame(METHOD, number, payload))


def rollback(relay: Relay, channel: Channel, _kind: int, payload: bytes) -> None:
    """tx.rollback."""
    if channel.tx is not None:
        channel.give_back(channel.tx)
        channel.rollbacks.append(True)
        channel.tx = Transaction()
    relay.outbox.put(frames.frame(METHOD, channel.number, payload))


# ---- what the broker answers -----------------------------------------------------------------------------------------------


def commit_ok(relay: Relay, number: int, data: bytes, item: Item) -> bytes | None:
    """tx.commit-ok: its publishes are in the queues."""
    channel, replica = relay.channel(number), relay.replica
    if not channel.commits:
        return None
    commit = channel.commits.popleft()
    for first, run in commit.runs:
        replica.applied(first, first + len(run.enqueues.lengths) - 1)
        if relay.watch is not None:
            relay.watch.answered([Settled(0, len(run.enqueues.lengths), first, "", 0)], True)
    if not channel.unanswered:
        closing.settled(relay, channel)
    if commit.own:
        return b""
    if replica.tracker.is_applied(commit.after):
        return None
    relay.spawn(_answer_when_applied(relay, commit.after, data[item[2] - 7 : item[3] + 1]))
    return b""


async def _answer_when_applied(relay: Relay, sequence: int, frame: bytes) -> None:
    await relay.replica.wait_applied(sequence)
    relay.to_client(frame)


def rollback_ok(relay: Relay, number: int, _data: bytes, _item: Item) -> bytes | None:
    """tx.rollback-ok; the client did not ask for that of a rehearsal."""
    rollbacks = relay.channel(number).rollbacks
    return None if not rollbacks or rollbacks.popleft() else b""
