"""Consumers: basic.qos, consume, get and cancel."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from typing import Any

from pamqp import commands

from lrq_ha.errors import LrqError
from lrq_ha.routing import names

from ..amqp import encode, frames, reply_codes
from ..amqp.content_header import header_payload
from ..amqp.frames import BASIC_CANCEL, BASIC_CANCEL_OK, BASIC_CONSUME, FrameError, Item, decode_method
from ..amqp.reply_codes import NOT_ALLOWED
from ..session.channel import ChannelState, ClientChannel, Consumer
from ..session.session import ClientSession
from . import closing, routing_queues

ENDED_POLL_S = 0.01


NO_ARGUMENTS = b"\0\0\0\0"
NO_LIMIT = encode.encode_method(commands.Basic.Qos())


class TagInUse(FrameError):
    """A second consumer on a channel has the tag of the first; with RabbitMQ's text. The broker may not know the first (`queue_pause`)."""

    code, cause = NOT_ALLOWED, BASIC_CONSUME

    def __init__(self, tag: str) -> None:
        super().__init__(f"NOT_ALLOWED - attempt to reuse consumer tag '{tag}'")


# ---- requests of the client ------------------------------------------------------------------------------------------------


def qos(session: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """basic.qos."""
    if not payload[-1] & 1:
        channel.limit = payload
    channel.unasked.append(False)
    session.outbox.put(encode.frame(frames.METHOD, channel.number, payload))


def consume(session: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """basic.consume."""
    try:
        at = frames.behind_names(payload, 2) + 1
    except IndexError:
        raise FrameError(f"a basic.consume of {len(payload)} bytes ends too early") from None
    method: Any = decode_method(payload[:at] + NO_ARGUMENTS)
    method.arguments = payload[at:]  # unchanged to the octet: only the broker interprets them
    if not _may_read(session, channel, method):
        return
    method.consumer_tag = method.consumer_tag or f"amq.ctag-{secrets.token_urlsafe(16)}"
    tag = method.consumer_tag.encode()
    if tag in channel.paused:
        raise TagInUse(method.consumer_tag)
    if method.nowait and _is_ending(channel, tag):
        session.from_client.stall()
        session.spawn(_consume_when_free(session, channel, tag, payload))
        return
    session.ask(channel)
    consumer = _consumer(session, channel, method)
    if method.nowait:
        channel.consumers[tag] = consumer
        session.replica.declared.consumes(consumer.queue)
    else:
        channel.consuming.append(consumer)
        channel.asked[tag] = consumer
    session.outbox.put(encode.method_frame(channel.number, method))


def _latest(channel: ClientChannel, tag: bytes) -> Consumer | None:
    """The consumer to which the client gave this tag last, whether or not the broker has answered."""
    return channel.asked.get(tag) or channel.consumers.get(tag)


def _is_ending(channel: ClientChannel, tag: bytes) -> bool:
    """Whether the client has cancelled the consumer of this tag, and the broker has not confirmed that."""
    latest = _latest(channel, tag)
    return latest is not None and latest.cancelled


async def _consume_when_free(session: ClientSession, channel: ClientChannel, tag: bytes, payload: bytes) -> None:
    session.flow.asks(True)
    try:
        while not channel.closing and _is_ending(channel, tag):
            await asyncio.sleep(ENDED_POLL_S)
    finally:
        session.flow.asks(False)
    session.from_client.unstall(lambda: session.from_client.take_again(encode.frame(frames.METHOD, channel.number, payload)))


def cancel(session: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """basic.cancel of the client."""
    method: Any = decode_method(payload)
    tag = method.consumer_tag.encode()
    consumer = _latest(channel, tag)
    channel.paused.pop(tag, None)
    if consumer is not None:
        consumer.cancelled = True
        if method.nowait:  # the door still needs the broker's answer, to know when no more deliveries come
            cancel_here(session, channel, tag)
            return
    session.outbox.put(encode.frame(frames.METHOD, channel.number, payload))


def get(session: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """basic.get."""
    method: Any = decode_method(payload)
    try:
        answer = routing_queues.receivers_answer(session, method.queue)
    except LrqError as error:
        closing.refuse(session, channel, reply_codes.ACCESS_REFUSED, f"ACCESS_REFUSED - {error}", method.index)
        return
    if answer is not None:
        _answer_get(session, channel.number, method.queue, answer)
        return
    if not _may_read(session, channel, method):
        return
    consumer = _consumer(session, channel, method)
    frame = encode.method_frame(channel.number, method)
    session.ask(channel)
    if not channel.gets:
        channel.asked_behind = False
    channel.gets.append((consumer, frame))
    session.outbox.put(frame)


def _answer_get(session: ClientSession, number: int, queue: str, body: bytes) -> None:
    """Answers a basic.get with a message of the door's own, which is not to be acked: its delivery tag is 0."""
    tag, redelivered, count = bytes(8), bytes(1), bytes(4)
    method = encode.raw_method_frame(number, frames.BASIC_GET_OK, tag, redelivered, encode.short_string(""), encode.short_string(queue), count)
    content = encode.content(number, header_payload(len(body)), body, session.frame_max_bytes)
    session.to_client(b"".join((method, *content)))


def _may_read(session: ClientSession, channel: ClientChannel, method: Any) -> bool:
    queue = method.queue or channel.last_queue
    if routing_queues.may_read(session, queue):
        return True
    text = f"ACCESS_REFUSED - clients do not read '{queue}' in vhost '{session.vhost}'"
    closing.refuse(session, channel, reply_codes.ACCESS_REFUSED, text, method.index)
    return False


def _consumer(session: ClientSession, channel: ClientChannel, method: Any) -> Consumer:
    """The consumer as the client asked for it; changes `method` to the broker's version."""
    method.queue = method.queue or channel.last_queue
    key = (session.vhost, method.queue)
    tracked = session.replica.declared.replicates(key) and not names.is_routing(session.vhost)
    automatic = tracked and bool(method.no_ack) and not session.replica.declared.is_stream(key)  # on a stream, the broker refuses no_ack
    consumer = Consumer(key, automatic, tracked, bool(method.no_ack))
    if consumer.automatic:
        method.no_ack = False
    consumer.method, consumer.limit = method, channel.limit or NO_LIMIT
    return consumer


# ---- answers of the broker -------------------------------------------------------------------------------------------------
# None: the client gets the frame as it came; else the replacement (empty if the client must not see it).


def qos_ok(session: ClientSession, number: int, _data: bytes, _item: Item) -> bytes | None:
    """basic.qos-ok, for the client or for the door."""
    unasked = session.channel(number).unasked
    return b"" if unasked and unasked.popleft() else None


def consume_ok(session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
    channel = session.channel(number)
    start = item[2] + 4
    tag = bytes(data[start + 1 : start + 1 + data[start]])
    if channel.resuming[tag]:
        _one_less(channel.resuming, tag)
        return b""
    consumer = next((one for one in channel.consuming if one.method.consumer_tag.encode() == tag), None)
    if consumer is not None:
        channel.consuming.remove(consumer)
        if channel.asked[tag] is consumer:
            del channel.asked[tag]
        channel.consumers[tag] = consumer
        session.replica.declared.consumes(consumer.queue)
    return None


def _one_less(owed: Counter[bytes], tag: bytes) -> None:
    owed[tag] -= 1
    if not owed[tag]:
        del owed[tag]


def cancelled(session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
    """basic.cancel of the broker, or its cancel-ok: no more deliveries come for this consumer."""
    start = item[2] + 4
    tag, channel = bytes(data[start + 1 : start + 1 + data[start]]), session.channel(number)
    if item[0] == BASIC_CANCEL_OK and channel.stopping[tag]:
        _one_less(channel.stopping, tag)
        consumer = channel.consumers.get(tag)
        if consumer is not None and consumer.cancelled and not channel.stopping[tag]:  # by a client that wants no answer
            del channel.consumers[tag]
        return b""
    consumer = channel.consumers.pop(tag, None)
    channel.paused.pop(tag, None)
    if consumer is not None and item[0] == BASIC_CANCEL:
        channel.ended_by_broker(consumer)
        session.replica.index.passes.count_no_more(consumer.queue)  # the broker has taken back its deliveries
    return None


def cancel_here(session: ClientSession, channel: ClientChannel, tag: bytes) -> None:
    """Ends a consumer at the broker without telling the client."""
    channel.stopping[tag] += 1
    send_after_commits(session, channel, encode.raw_method_frame(channel.number, frames.BASIC_CANCEL, bytes((len(tag),)), tag, b"\0"))


def consume_again(session: ClientSession, channel: ClientChannel, tag: bytes, consumer: Consumer) -> None:
    gone = session.closed or session.client is None or channel.state is not ChannelState.NO
    if gone or channel.consumers.get(tag) is not consumer or consumer.cancelled:
        return
    number, method = channel.number, consumer.method
    method.consumer_tag, method.nowait = tag.decode("utf-8", "surrogateescape"), False
    now = channel.limit or NO_LIMIT
    differs = consumer.limit != now
    data = encode.method_frame(number, method)
    if differs:
        data = encode.frame(frames.METHOD, number, consumer.limit) + data + encode.frame(frames.METHOD, number, now)
        channel.unasked.extend((True, True))
    channel.resuming[tag] += 1
    send_after_commits(session, channel, data)


def send_after_commits(session: ClientSession, channel: ClientChannel, data: bytes) -> None:
    """Sends frames of the door behind the commits that are under way."""
    if channel.commits_here:
        channel.after_commit.append(data)
    else:
        session.outbox.put(data)
