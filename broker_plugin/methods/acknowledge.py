"""A client's acks, rejections and recovers. They enter the log, and reach the broker when their entry is safe.

Rules:
- Acks that come in one chunk are collected; `flush` makes one entry per queue of them. A flush precedes every other write to the log or the outbox,
  so that order is kept.
- Deliveries that the broker sends before it has read a basic.recover go back, too: none of them is acked to the broker before its recover-ok. So
  basic.recover-async, which has no answer, is sent as basic.recover.
- A client settles deliveries that it was given and has not settled; any other tag is refused, as RabbitMQ does.
- Clients ack message by message, many at a time. `acks` takes such a run at once; if the run includes the oldest, the broker gets one multiple ack.
"""

from __future__ import annotations

from pamqp import commands

from ..amqp import encode, frames
from ..amqp.frames import BASIC_ACK, BASIC_NACK, BASIC_RECOVER, METHOD, Item
from ..amqp.reply_codes import PRECONDITION_FAILED
from ..log.messages import Delivery
from ..session.channel import ClientChannel
from ..session.session import ClientSession
from ..session.transaction import Commit, Transaction
from . import closing


def acks(session: ClientSession, data: bytes, items: list[Item], at: int) -> int:
    """Takes a run of acks of the client, beginning with items[at]. Returns the index of the first item that it did not take."""
    number = items[at][1]
    channel = session.channel(number)
    if channel.closing:
        return at + 1  # sent before the client knew
    deliveries, acked = channel.deliveries, session.acked
    simple = channel.tx is None
    known = None
    highest = 0
    begin, first, total = items[at][2] - 7, at, len(items)
    while simple and at < total:
        kind, same, start, end, _, _, _ = items[at]
        if kind != BASIC_ACK or same != number or end != start + frames.ACK_BYTES:
            break
        tag, bits = frames.tag_and_bits(data, start)
        if bits & 1:
            break
        delivery = deliveries.get(tag)
        if delivery is None or delivery.deaths:
            break
        del deliveries[tag]
        if delivery.queue is not known:
            known = delivery.queue
            sequences = acked.setdefault(known, [])
        sequences.append(delivery.sequence)
        if tag > highest:
            highest = tag
        at += 1
    if at == first:  # not a simple ack
        ack(session, channel, data[items[at][2] : items[at][3]])
        return at + 1
    if at > first + 1 and not channel.undelivered and next(iter(deliveries), highest + 1) > highest:
        session.ack_frames.append(encode.ack(number, highest, True))
    else:
        session.ack_frames.append(data[begin : items[at - 1][3] + 1])
    return at


def ack(session: ClientSession, channel: ClientChannel, payload: bytes) -> None:
    """One basic.ack of the client."""
    tag, bits = frames.tag_and_bits(payload)
    multiple = bool(bits & 1)
    if multiple and (not tag or session.from_broker.withheld or channel.undelivered):
        tag, payload = _given(session, channel, tag, payload)
        if not tag:
            return
    if not _is_held(session, channel, tag, multiple, BASIC_ACK):
        return
    if channel.tx is not None:
        _rehearse(session, channel, channel.tx, tag, multiple, payload, BASIC_ACK)
        return
    for delivery in channel.settle(tag, multiple):
        if delivery.deaths:
            flush(session)
            session.replica.dequeue(delivery.queue, [delivery.sequence], delivery.deaths)
        else:
            session.acked.setdefault(delivery.queue, []).append(delivery.sequence)
    session.ack_frames.append(encode.ack(channel.number, tag, multiple))


def ack_internally(session: ClientSession, channel: ClientChannel, frame: bytes, sequence: int = 0) -> None:
    """Acks or rejects a delivery on the door's own behalf, hidden from the client, when entry `sequence` is safe."""
    if channel.takes_back:
        return  # the delivery comes again, and is checked again
    if channel.tx is not None:
        channel.internal_acks.append(frame)
        session.internal_acks.add(channel.number)
    else:
        session.outbox.put(frame, sequence)


def _settle_apart(session: ClientSession) -> None:
    """Sends the door's own acks on channels with transactions: they must count without a client's commit, so they get a transaction of their own.

    The client's transaction so far is rolled back before, and repeated after. The broker does a commit of acks alone at once, so all that goes in
    one write; but while the broker commits publishes it must be sent nothing. One such transaction runs at a time: later acks wait for the next one.
    Else each delivery of a consumer without acks would have a large transaction sent once more.
    """
    numbers, session.internal_acks = session.internal_acks, set()
    for number in numbers:
        channel = session.channels.get(number)
        if channel is None or channel.closing or not channel.internal_acks:
            continue
        if channel.rehearsed is not None or channel.committing is not None or channel.commits:
            session.internal_acks.add(number)
            continue
        if channel.tx is None:
            continue
        before = b""
        if channel.tx.frames:
            channel.rollbacks.append(False)
            before = encode.method_frame(number, commands.Tx.Rollback())
        channel.commits.append(Commit(own=True))
        behind = b"".join((encode.method_frame(number, commands.Tx.Commit()), *channel.tx.rehearsal))
        _put_internal_acks(session, channel, before, behind)


def _put_internal_acks(session: ClientSession, channel: ClientChannel, before: bytes = b"", behind: bytes = b"") -> None:
    """Sends the door's own acks on a channel with transactions, between these frames."""
    unseen, channel.internal_acks = b"".join(channel.internal_acks), []
    session.outbox.put(before + unseen + behind, session.replica.last_operation)
    if not channel.undelivered:  # the acks include the withheld deliveries, which had to wait for a commit until now
        session.gives_back(channel.returning)
        channel.returning = set()


def commit_internally(session: ClientSession, channel: ClientChannel) -> None:
    """Puts the door's own acks into a transaction of the client that is about to be committed.

    They come first: behind a `multiple` ack of the client the broker would drop deliveries that the door gives back, or see an ack twice.
    """
    if channel.internal_acks:
        _put_internal_acks(session, channel)
        session.internal_acks.discard(channel.number)


def ack_for(session: ClientSession, channel: ClientChannel, tag: int, delivery: Delivery) -> None:
    """The ack for a consumer without acks."""
    frame = encode.ack(channel.number, tag)
    if delivery.deaths or channel.tx is not None:
        ack_internally(session, channel, frame, session.replica.dequeue(delivery.queue, [delivery.sequence], delivery.deaths))
    else:
        session.acked.setdefault(delivery.queue, []).append(delivery.sequence)
        session.ack_frames.append(frame)


def flush(session: ClientSession) -> None:
    """Brings the collected acks into the log and the outbox."""
    if session.internal_acks:
        _settle_apart(session)
    if not session.ack_frames:
        return
    acked, session.acked = session.acked, {}
    ack_frames, session.ack_frames = session.ack_frames, []
    replica = session.replica
    for queue, sequences in acked.items():
        replica.dequeue(queue, sequences, ())
    of_channels: dict[bytes, list[bytes]] = {}
    for frame in ack_frames:
        of_channels.setdefault(frame[1:3], []).append(frame)
    for of_channel in of_channels.values():
        session.outbox.put(b"".join(of_channel), replica.last_operation)
    if session.watch is not None:
        session.watch.logged()


def reject(session: ClientSession, channel: ClientChannel, kind: int, payload: bytes) -> None:
    """basic.reject or basic.nack of the client."""
    tag, bits = frames.tag_and_bits(payload)
    multiple, requeue = (bool(bits & 1), bool(bits & 2)) if kind == BASIC_NACK else (False, bool(bits & 1))
    if multiple and (not tag or session.from_broker.withheld or channel.undelivered):
        tag, payload = _given(session, channel, tag, payload)
        if not tag:
            return
    if not _is_held(session, channel, tag, multiple, kind):
        return
    if channel.tx is not None:
        _rehearse(session, channel, channel.tx, tag, multiple, payload, kind)
        return
    last = 0
    settled = channel.settle(tag, multiple)
    if not requeue:
        for delivery in settled:
            last = session.replica.reject(delivery.queue, [delivery.sequence], delivery.deaths)
    session.outbox.put(encode.frame(METHOD, channel.number, payload), last)
    if requeue:
        session.give_back(settled)


def _is_held(session: ClientSession, channel: ClientChannel, tag: int, multiple: bool, kind: int) -> bool:
    """Whether the client holds the delivery that it settles. If not, its channel is closed with RabbitMQ's text: the broker may have sent a delivery
    that the client has not been given, and would drop it, with nothing in the log.
    """
    if channel.holds(tag, multiple):
        return True
    flush(session)
    closing.refuse(session, channel, PRECONDITION_FAILED, f"PRECONDITION_FAILED - unknown delivery tag {tag}", kind)
    return False


def _given(session: ClientSession, channel: ClientChannel, tag: int, payload: bytes) -> tuple[int, bytes]:
    """The tag and payload for the broker where a client settles several: limited to the deliveries that it has, by number. Tag 0: there are none.

    The broker gets the frame when the log is safe so far. By then "everything" (tag 0) would be more than the client has seen.
    """
    kept = channel.undelivered[:1]
    if channel.number in session.from_broker.withheld:
        kept.append(frames.delivery_tag(session.from_broker.withheld[channel.number][0]))
    limit = min(kept) - 1 if kept else 0
    if tag and (not kept or tag <= limit):
        return tag, payload
    last = channel.outstanding(limit) if limit or not kept else 0
    return last, payload[:4] + last.to_bytes(8, "big") + payload[12:]


def _rehearse(session: ClientSession, channel: ClientChannel, tx: Transaction, tag: int, multiple: bool, payload: bytes, kind: int) -> None:
    """Within a transaction: passed to the broker's transaction unchanged, and into the log at commit (see `transactions`)."""
    tx.settle(tag, multiple)
    rehearse(session, channel, tx, encode.frame(METHOD, channel.number, payload), kind)


def rehearse(session: ClientSession, channel: ClientChannel, tx: Transaction, data: bytes, cause: int, methods: int = 1) -> None:
    """Adds frames of so many methods to a transaction, and to its dry run at the broker.

    A transaction that gets too large closes its channel.
    """
    tx.keep(data, methods)
    config = session.door.config
    limits = (tx.bytes, config.transaction_bytes_max, "bytes"), (tx.methods, config.transaction_methods_max, "methods")
    for size, limit, unit in limits:
        if size > limit:
            text = f"a transaction of more than {limit} {unit}: door.transaction_{unit}_max"
            closing.refuse(session, channel, PRECONDITION_FAILED, text, cause)
            return
    session.outbox.put(data)


def recover(session: ClientSession, channel: ClientChannel, kind: int, payload: bytes) -> None:
    """basic.recover: every delivery goes back to its queue, except those that an uncommitted transaction has settled."""
    if payload[4:5] > b"\0":
        session.ask(channel)
        channel.recovers.append(kind == BASIC_RECOVER)
        session.outbox.put(encode.raw_method_frame(channel.number, BASIC_RECOVER, payload[4:]))
        channel.undelivered.clear()
        channel.internal_acks.clear()
    else:  # RabbitMQ does not support this: it ends the connection
        session.outbox.put(encode.frame(METHOD, channel.number, payload))
    session.give_back(channel.recover())


def recovered(session: ClientSession, number: int, _data: bytes, _item: Item) -> bytes | None:
    """basic.recover-ok: deliveries from now on are the client's."""
    recovers = session.channel(number).recovers
    return None if not recovers or recovers.popleft() else b""
