"""What a client does with its deliveries: acks, rejections, recover. They enter the log, and reach the broker when that is safe.

Rules:
- Acks that come in one chunk are collected; `flush` makes one entry per queue of them. Whatever else enters the log or the outbox is preceded by
  a flush, so that order is kept.
- What the broker gives out before it has heard of a basic.recover goes back, too: nothing of it is acked to the broker, until that has answered. So
  basic.recover-async, which has no answer, is asked as basic.recover.
- A client settles what it was given and has not settled; any other tag is refused, as it is by RabbitMQ.
- Clients ack message by message, many at a time. `acks` takes such a run at once; to a broker that is told of the oldest it is one ack of several.
"""

from __future__ import annotations

from pamqp import commands

from ..amqp import encode, frames
from ..amqp.frames import BASIC_ACK, BASIC_NACK, BASIC_PUBLISH, BASIC_RECOVER, BASIC_RECOVER_OK, METHOD, Item
from ..amqp.reply_codes import PRECONDITION_FAILED
from ..log.messages import Delivery
from ..session.channel import ClientChannel
from ..session.session import ClientSession
from ..session.transaction import Commit, Transaction
from . import closing


def acks(session: ClientSession, data: bytes, items: list[Item], at: int) -> int:
    """Takes a run of acks of the client, beginning with items[at]; returns the index of the first item it did not take."""
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
    if at == first:  # one that is not so simple
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
    """The door itself acks or rejects a delivery, which the client need not know of, when entry `sequence` is safe."""
    if channel.takes_back:
        return  # it comes again, and is looked at again
    if channel.acks_wait:
        channel.internal_acks.append(frame)
        session.internal_acks.add(channel.number)
    else:
        session.outbox.put(frame, sequence)


def _settle_apart(session: ClientSession) -> None:
    """On channels with transactions the door's own acks must count without a commit of the client: they are a transaction between its own.

    What the client's has so far is taken back before, and done again after. A commit of acks alone is done at once, so the broker can be told all
    that in one go; but while it commits publishes it must be told nothing. One at a time: what comes meanwhile is in the next one, or each delivery
    of a consumer without acks would have a large transaction sent once more.
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
    """The door's own acks of a channel with transactions go to the broker, with these frames."""
    unseen, channel.internal_acks = b"".join(channel.internal_acks), []
    session.outbox.put(before + unseen + behind, session.replica.last_operation)
    if not channel.undelivered:  # what was kept back, and had to wait for a commit until now, is among them
        session.gives_back(channel.returning)
        channel.returning = set()


def commit_internally(session: ClientSession, channel: ClientChannel) -> None:
    """A transaction of the client is about to be done in earnest: the door's own acks are part of it.

    They come first: by an ack of several, which is the client's, the broker would let go what the door gives back, or had to be told of an ack twice.
    """
    if channel.internal_acks:
        _put_internal_acks(session, channel)
        session.internal_acks.discard(channel.number)


def ack_for(session: ClientSession, channel: ClientChannel, tag: int, delivery: Delivery) -> None:
    """The ack of a consumer that gives none."""
    frame = encode.ack(channel.number, tag)
    if delivery.deaths or channel.acks_wait:
        ack_internally(session, channel, frame, session.replica.dequeue(delivery.queue, [delivery.sequence], delivery.deaths))
    else:
        session.acked.setdefault(delivery.queue, []).append(delivery.sequence)
        session.ack_frames.append(frame)


def flush(session: ClientSession) -> None:
    """Brings the acks that were collected into the log and the outbox."""
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
    """Whether the client holds what it settles. If not, its channel is closed in RabbitMQ's words: what the client has not been given, the broker may
    know as given out, and would let it go, with nothing in the log.
    """
    if channel.holds(tag, multiple):
        return True
    flush(session)
    closing.refuse(session, channel, PRECONDITION_FAILED, f"PRECONDITION_FAILED - unknown delivery tag {tag}", kind)
    return False


def _given(session: ClientSession, channel: ClientChannel, tag: int, payload: bytes) -> tuple[int, bytes]:
    """What the broker is told where a client settles several: what it was given until now, and by number. 0: there is nothing of that.

    The broker hears of it when the log is safe so far. To it, "everything" (tag 0) would then be more than the client has seen.
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
    """Within a transaction: to the broker's own as it came, into the log at commit (see `transactions`)."""
    tx.settle(tag, multiple)
    rehearse(session, channel, tx, encode.frame(METHOD, channel.number, payload), kind)


def rehearse(session: ClientSession, channel: ClientChannel, tx: Transaction, data: bytes, cause: int, methods: int = 1) -> None:
    """These frames of so many methods are part of a transaction, and of its rehearsal at the broker: acks only where it has no second channel.

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
    if cause == BASIC_PUBLISH:
        session.outbox.put(encode.rechannel(data, channel.second) if channel.second else data)
    elif not channel.second:
        session.outbox.put(data)


def recover(session: ClientSession, channel: ClientChannel, kind: int, payload: bytes) -> None:
    """basic.recover: everything goes back to its queue, but for what a transaction that is not committed has settled."""
    if channel.second and payload[4:5] > b"\0" and len(unsettled := list(channel.unsettled())) < len(channel.deliveries):
        # The broker does not know of those. So it is told of the others one by one, and the client is answered here.
        for tag in reversed(unsettled):
            session.outbox.put(encode.nack(channel.number, tag, requeue=True))
        if kind == BASIC_RECOVER:
            session.to_client(encode.raw_method_frame(channel.number, BASIC_RECOVER_OK))
    elif payload[4:5] > b"\0":
        session.ask(channel)
        channel.recovers.append(kind == BASIC_RECOVER)
        session.outbox.put(encode.raw_method_frame(channel.number, BASIC_RECOVER, payload[4:]))
        channel.undelivered.clear()
        channel.internal_acks.clear()
    else:  # which RabbitMQ does not do: it ends the connection
        session.outbox.put(encode.frame(METHOD, channel.number, payload))
    session.give_back(channel.recover())


def recovered(session: ClientSession, number: int, _data: bytes, _item: Item) -> bytes | None:
    """basic.recover-ok: what comes from now on is the client's."""
    recovers = session.channel(number).recovers
    return None if not recovers or recovers.popleft() else b""
