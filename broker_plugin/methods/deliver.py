"""The broker's deliveries: which copies the client gets (R9), and which it never sees. The second hot half of the door.

Rules:
- The log does not know a delivery without a position; such a delivery passes as it came.
- Whether a copy may be given out can depend on an entry that is not safe yet: then it is withheld, with all frames behind it on its channel.
- The door knows a consumer's tag before its first delivery, and finds the broker's answer by it: a consumer of direct replies is answered before a
  consumer of a queue that was asked for first. So the door makes up a tag for a client that names none. A consumer without an answer may reuse
  the tag of a cancelled one. Deliveries on their way are for the cancelled one, so the next one waits until the broker has ended it.
- A consumer without acks is one with acks at the broker; the door acks for it, so that its deliveries enter the log. A delivery that would reach a
  client behind the connection's close, from either side, is not taken: it goes back.
"""

from __future__ import annotations

from pamqp import commands

from lrq_ha.replication.dead_letters import Deaths
from lrq_ha.replication.queue_filter import Verdict

from ..amqp import death_headers, encode, frames
from ..amqp.content_header import cut, deaths
from ..amqp.frames import HEADER, Item, scan
from ..log.messages import Delivery
from ..log.stamps import find_stamp
from ..session.channel import ChannelState, ClientChannel, Consumer
from ..session.session import ClientSession
from . import acknowledge

# A content comes whole, or first its method and header; the treatment of these then holds for its body, too (see `content_relay`).


def deliver(session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
    """basic.deliver."""
    channel = session.channel(number)
    if not session.takes_deliveries or channel.state is ChannelState.DOOR:
        return b""  # no client takes the delivery; it goes back with the channel
    start = item[2]
    to_tag = start + 5 + data[start + 4]
    consumer = channel.consumers.get(data[start + 5 : to_tag])
    if consumer is None:
        return None
    tag = int.from_bytes(data[to_tag : to_tag + 8], "big")
    payload = data[item[4] : item[5]]
    if channel.takes_back and _comes_again(session, channel, consumer, payload):
        return b""
    sequence = consumer.alike.sequence(payload)
    if not sequence:
        if b"x-lrq-pos" not in payload or not consumer.tracked:
            _unknown(session, channel, consumer, tag)
            return _as_brought(session, payload, data, item, None)
        if b"x-stream-offset" in payload:
            replaced = _read(session, channel, consumer, tag, payload, data[start - 7 : item[6]])
            return _as_brought(session, payload, data, item, replaced)
    if session.door.draining:
        _keep_back(channel, consumer, tag)
        return b""
    if sequence:
        return _judge(session, channel, consumer, tag, (sequence, consumer.alike.generation), (), data, item, to_tag + 8)
    return _as_brought(session, payload, data, item, _examine(session, channel, consumer, tag, payload, data, item, to_tag + 8))


def _as_brought(session: ClientSession, payload: bytes, data: bytes, item: Item, replaced: bytes | None) -> bytes | None:
    """The frames for the client instead of `replaced`, if the content's header (its payload) says more of deaths than this broker has counted."""
    if replaced == b"" or death_headers.PREFIX not in payload:
        return replaced
    return refit(data[item[2] - 7 : item[6]] if replaced is None else replaced, session.frame_max_bytes)


def _comes_again(session: ClientSession, channel: ClientChannel, consumer: Consumer, payload: bytes) -> bool:
    """Whether the client must not see a delivery that the broker takes back, as it comes again. A stream takes nothing back."""
    if channel.recovers:
        session.gives_back((consumer.queue,))
    return consumer.automatic and b"x-stream-offset" not in payload


def _keep_back(channel: ClientChannel, consumer: Consumer, tag: int) -> None:
    """Keeps a delivery from the client until the door gives out messages again, or the channel ends."""
    if not channel.recovers:
        channel.undelivered.append(tag)
    channel.returning.add(consumer.queue)


def get_ok(session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
    channel = session.channel(number)
    if not channel.gets:
        return None
    if not session.takes_deliveries:
        return b""  # the basic.get counts as open, and its message as on its way, until the channel is closed
    consumer, frame = channel.gets.popleft()
    payload = data[item[4] : item[5]]
    tag, _ = frames.get_ok_arguments(data[item[2] : item[3]])
    if channel.takes_back and _comes_again(session, channel, consumer, payload):
        return encode.method_frame(number, commands.Basic.GetEmpty())
    if b"x-lrq-pos" not in payload or not consumer.tracked:
        _unknown(session, channel, consumer, tag)
        return _as_brought(session, payload, data, item, None)
    if session.door.draining:
        _keep_back(channel, consumer, tag)
        return encode.method_frame(number, commands.Basic.GetEmpty())
    replaced = _examine(session, channel, consumer, tag, payload, data, item, item[2] + 12)
    if replaced != b"":
        return _as_brought(session, payload, data, item, replaced)
    if number in session.from_broker.withheld:
        channel.gets.appendleft((consumer, frame))
    elif channel.asked_behind or channel.closing:  # the answer to a later request would come first, and be taken for this one
        return encode.method_frame(number, commands.Basic.GetEmpty())
    else:
        channel.gets.appendleft((consumer, frame))
        session.outbox.put(frame)  # the client gets the next one instead
    return replaced


def get_empty(session: ClientSession, number: int, _data: bytes, _item: Item) -> bytes | None:
    channel = session.channel(number)
    if channel.gets:
        channel.gets.popleft()
    return None


def returned(session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
    """basic.return: the message is in no queue. Its ack follows; see `publish.took`."""
    payload = data[item[4] : item[5]]
    stamped = find_stamp(payload) if session.producer_key else None
    if stamped is not None:
        session.channel(number).returned.add(stamped[0])
    return _as_brought(session, payload, data, item, None)


def refit(blob: bytes, frame_max_bytes: int) -> bytes:
    """Converts contents, or a content's method and header, for the client: restores escaped death headers, and cuts frames that may be too large for
    the client's frame_max. A method without a content stays as it is.

    A broker may send bodies in frames a little larger than its client is told of (frames.HEADROOM_BYTES), and header frames of any size. A header
    frame cannot be cut, but goes without its position where that is too much.
    """
    items, _ = scan(blob, 0, frames.FRAME_MAX_ANY_BYTES, 0)
    parts = []
    for kind, channel, start, end, header, header_end, stop in items:
        if kind == HEADER:
            parts.append(encode.frame(HEADER, channel, _refit_header(blob[start:end], frame_max_bytes)))
            continue
        parts.append(blob[start - 7 : end + 1])
        if stop:
            payload = _refit_header(blob[header:header_end], frame_max_bytes)
            parts += encode.content(channel, payload, frames.body_of(blob, header_end, stop), frame_max_bytes)
    return b"".join(parts)


def _refit_header(payload: bytes, frame_max_bytes: int) -> bytes:
    payload = death_headers.restore(payload)
    return cut(payload, b"x-lrq-pos") if len(payload) + frames.FRAME_OVERHEAD_BYTES > frame_max_bytes else payload


def _examine(
    session: ClientSession, channel: ClientChannel, consumer: Consumer, tag: int, payload: bytes, data: bytes, item: Item, bit: int
) -> bytes | None:
    """Like `_judge`, for a copy whose header (its payload) has to be parsed."""
    stamped = find_stamp(payload)
    if stamped is None:
        _unknown(session, channel, consumer, tag)
        return None
    died = deaths(payload) if b"x-death" in payload else ()
    if not died and death_headers.PREFIX not in payload:
        consumer.alike.learn(payload, stamped[1])
    return _judge(session, channel, consumer, tag, stamped, died, data, item, bit)


def _judge(
    session: ClientSession,
    channel: ClientChannel,
    consumer: Consumer,
    tag: int,
    stamped: tuple[int, int],
    died: Deaths,
    data: bytes,
    item: Item,
    bit: int,
) -> bytes | None:
    """R9: gives out, withholds or turns away a copy. `stamped`: sequence and generation; `bit`: index of the byte with the redelivered flag."""
    replica = session.replica
    sequence, generation = stamped
    queue = consumer.queue
    verdict = replica.index.filter.verdict(queue, sequence, generation, died)
    if verdict is Verdict.GIVE:
        if sequence > replica.progress.tracker.applied:
            replica.progress.seen(sequence)
        delivery = Delivery(queue, sequence, died)
        if consumer.automatic:
            acknowledge.ack_for(session, channel, tag, delivery)
        elif channel.recovers:
            replica.gave_back((delivery,))
        else:
            channel.deliveries[tag] = delivery
        flagged = data[bit] & 1
        again = replica.given_out.comes_again(sequence, bool(flagged))
        if again == flagged:
            return None
        return data[item[2] - 7 : bit] + bytes((data[bit] ^ 1,)) + data[bit + 1 : item[6]]
    _turn_away(session, channel, tag, Delivery(queue, sequence, died), generation, verdict, data[item[2] - 7 : item[6]])
    return b""


def _unknown(session: ClientSession, channel: ClientChannel, consumer: Consumer, tag: int) -> None:
    """A delivery that the log does not know."""
    if consumer.automatic:
        acknowledge.ack_internally(session, channel, encode.ack(channel.number, tag))
    elif not (consumer.no_ack or channel.recovers):
        channel.deliveries[tag] = None


def _read(session: ClientSession, channel: ClientChannel, consumer: Consumer, tag: int, payload: bytes, blob: bytes) -> bytes | None:
    """A message read from a stream stays there, so nothing is settled; but a message that was published twice, or refused, counts once (R8, R9)."""
    replica = session.replica
    stamped = find_stamp(payload)
    if stamped is not None:
        died = deaths(payload) if b"x-death" in payload else ()
        verdict = replica.index.filter.verdict(consumer.queue, *stamped, died)
        if verdict is Verdict.HOLD:
            _withhold(session, channel, blob)
            return b""
        if verdict is Verdict.ACK:
            session.door.counters["filtered"] += 1
            acknowledge.ack_internally(session, channel, encode.ack(channel.number, tag))
            return b""
        replica.progress.seen(stamped[0])
    _unknown(session, channel, consumer, tag)
    return None


def _withhold(session: ClientSession, channel: ClientChannel, blob: bytes) -> None:
    session.from_broker.withheld[channel.number] = [blob]
    session.replica.progress.waiting_safe.add(session)


def _turn_away(session: ClientSession, channel: ClientChannel, tag: int, delivery: Delivery, generation: int, verdict: Verdict, blob: bytes) -> None:
    if verdict is Verdict.HOLD:
        _withhold(session, channel, blob)
        return
    session.door.counters["filtered"] += 1
    if verdict is Verdict.REJECT:
        session.replica.index.passes.stirred(delivery.sequence)
        acknowledge.ack_internally(session, channel, encode.reject(channel.number, tag, requeue=False))
    else:
        acknowledge.ack_internally(session, channel, encode.ack(channel.number, tag))
    session.replica.index.filter.queue(delivery.queue).gone(delivery.sequence, generation, delivery.deaths)
