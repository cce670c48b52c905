"""Gives publishers their confirms, in order, once the log entries are safe."""

from __future__ import annotations

from pamqp import commands

from ..amqp import encode, frames
from ..amqp.frames import Item
from ..session.channel import ClientChannel
from ..session.session import ClientSession


def need_broker_confirms(session: ClientSession, channel: ClientChannel) -> None:
    """Turns on confirms at the broker: the door needs its answers, whether or not the client asked for them."""
    if not channel.broker_confirms:
        channel.broker_confirms = True
        session.outbox.put(encode.method_frame(channel.number, commands.Confirm.Select(nowait=True)))


def pass_on(session: ClientSession, channel: ClientChannel, blob: bytes) -> None:
    """Passes a publish that is not replicated to the broker as it came."""
    if channel.committing is None and (session.producer_key or channel.confirms.selected or channel.broker_confirms):
        need_broker_confirms(session, channel)
        channel.confirms.forwarded(1, 0)
    session.outbox.put(blob)


def ended_here(session: ClientSession, channel: ClientChannel, sequence: int) -> None:
    """A publish ended here as log entry `sequence`: the door acks it when that entry is safe (0: now)."""
    tag = channel.confirms.ended_here()
    if not tag:
        return
    confirm_when_safe(session, channel, tag, sequence)


def until_durable(session: ClientSession, channel: ClientChannel, tag: int, count: int, sequence: int, size: int) -> None:
    """Confirms `count` publishes, the client's from `tag` on, when the own stream has all entries up to `sequence`."""
    session.pending_durable.append((channel, tag, tag + count - 1, sequence, size))
    session.replica.progress.waiting_durable.add(session)


def confirm_when_safe(session: ClientSession, channel: ClientChannel, tag: int, sequence: int, ok: bool = True) -> None:
    if sequence <= session.replica.progress.safe:
        confirm(session, channel, tag, ok)
    else:
        session.pending_safe.append((channel, tag, sequence, ok))
        session.replica.progress.waiting_safe.add(session)


def confirm(session: ClientSession, channel: ClientChannel, tag: int, ok: bool = True) -> None:
    """Answers a publish in `local`."""
    channel.confirms.local.discard(tag)
    session.confirm(channel, encode.ack(channel.number, tag) if ok else encode.nack(channel.number, tag), held=ok)


def select_confirms(session: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """confirm.select."""
    channel.confirms.selected = channel.broker_confirms = True
    if payload[4:5] == b"\0":  # the client wants an answer
        channel.selecting += 1
    session.outbox.put(encode.frame(frames.METHOD, channel.number, payload))  # a broker with confirms on already just answers


# ---- results ---------------------------------------------------------------------------------------------------------------


def safe_advanced(session: ClientSession) -> None:
    """More of the log is safe: answers publishes that ended here, and those whose IDs are free again."""
    safe = session.replica.progress.safe
    waiting = session.pending_safe
    while waiting and waiting[0][2] <= safe:
        channel, tag, _, ok = waiting.popleft()
        confirm(session, channel, tag, ok)
    if waiting:
        session.replica.progress.waiting_safe.add(session)


def durable_advanced(session: ClientSession) -> None:
    """The own stream has more of the log: confirms publishes that wait for the stream alone."""
    durable, waiting = session.replica.node.durable, session.pending_durable
    while waiting and waiting[0][3] <= durable:
        channel, first, last, sequence, size = waiting.popleft()
        confirms = channel.confirms
        is_repeat = first in confirms.local
        if is_repeat:
            confirms.local.discard(first)
        else:
            confirms.early.popleft()
        if not channel.speaks or session.channels.get(channel.number) is not channel:
            continue
        if not is_repeat:
            session.replica.progress.confirmed_early(sequence, last - first + 1, size)
        if first < last and not (confirms.waiting or session.held_confirms or confirms.covers_others(last)):
            answer = encode.ack(channel.number, last, True)
        else:
            answer = b"".join(encode.ack(channel.number, tag) for tag in range(first, last + 1))
        session.confirm(channel, answer, held=False)
    if waiting:
        session.replica.progress.waiting_durable.add(session)


def selected(session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
    """confirm.select-ok; the door's earlier confirms follow it."""
    channel = session.channel(number)
    channel.selecting -= channel.selecting > 0
    if channel.selecting or not channel.before_select:
        return None
    return data[item[2] - 7 : item[3] + 1] + session.take_before_select(channel)
