"""How a channel begins, and how a channel or connection ends: by either side, or by the door (`channel.ChannelState` has the states).

Rules:
- A channel or connection is closed at the broker only when the broker has answered all its publishes: messages published before a close are in
  the queues.
- A channel that the door refuses is closed at the broker first; then the client gets the close, and answers to the door alone.
- Frames that wait for a channel that the broker has closed are dropped: its number may be in use again by the time they would go out.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pamqp import commands

from ..amqp import encode, frames, reply_codes
from ..amqp.frames import (
    CONNECTION_BLOCKED,
    METHOD,
    FrameError,
    Item,
)
from ..session.channel import ChannelState, ClientChannel
from ..session.session import ClientSession
from . import acknowledge, closing, permissions


class TooManyChannels(FrameError):
    """A client opens more channels than were agreed on; with RabbitMQ's text."""

    code = reply_codes.NOT_ALLOWED

    def __init__(self, limit: int) -> None:
        super().__init__(f"NOT_ALLOWED - number of channels opened ({limit}) has reached the negotiated channel_max ({limit})")


# ---- requests of the client ------------------------------------------------------------------------------------------------


def channel_open(session: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """channel.open. The broker has agreed to one channel more than the client (see `permissions`)."""
    if not channel.opened and not session.has_room_for_channel:
        raise TooManyChannels(session.channels_max)
    channel.opened = True
    session.outbox.put(encode.frame(METHOD, channel.number, payload))


def channel_close(session: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """channel.close of the client."""
    frame = encode.frame(METHOD, channel.number, payload)
    if channel.state is ChannelState.NO:
        closing.end_channel(session, channel, ChannelState.CLIENT, frame)
    elif channel.state is ChannelState.DOOR:
        channel.refusal += encode.method_frame(channel.number, commands.Channel.CloseOk())  # as from a broker, behind its reason
    else:
        # Both sides closed at once. The door needs no answer of a broker that has closed the channel, too: an answer that is owed could come when
        # the client has opened the number again.
        session.to_client(encode.method_frame(channel.number, commands.Channel.CloseOk()))


def channel_close_ok(session: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """channel.close-ok of the client."""
    if channel.state in (ChannelState.BROKER, ChannelState.TOLD):
        if channel.state is ChannelState.BROKER:
            session.outbox.put(encode.frame(METHOD, channel.number, payload))
        closing.forget_channel(session, channel)
    elif channel.state is ChannelState.NO:  # a broker would end the channel without notice, and never give its confirms
        raise FrameError(f"channel.close-ok on channel {channel.number}, which is open on both sides")


def connection_close(session: ClientSession, _channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """connection.close of the client: the broker reads no frame behind it, and the door takes none either."""
    session.on_settled = encode.frame(METHOD, 0, payload)
    session.from_client.hear_nothing_more()
    if session.unanswered:
        closing.limit_wait(session, session, lambda: closing.send_connection_close(session))
    else:
        closing.send_connection_close(session)


def connection_close_ok(session: ClientSession, _channel: ClientChannel, kind: int, _payload: bytes) -> None:
    """connection.close-ok of the client: for the door, if the door sent the close, else for the broker."""
    if session.replying_to_door:
        session.goodbye()
    else:
        session.outbox.put(encode.raw_method_frame(0, kind))


# ---- answers of the broker -------------------------------------------------------------------------------------------------
# None: the client gets the frame as it came; else the replacement.


def broker_closed_channel(session: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
    """channel.close of the broker."""
    channel = session.channel(number)
    acknowledge.flush(session)  # acks that were collected for the channel are dropped with it
    permissions.refused(session, data[item[2] : item[3]])
    closing.no_reply(session, number)
    session.give_back(channel.let_go())
    channel.forget()
    session.take_before_select(channel)
    if session.watch is not None:
        session.watch.channel_ended(number)
    closing.resolve_unanswered(session, channel, refused=True)
    session.from_broker.forget(number)
    close_ok = encode.method_frame(number, commands.Channel.CloseOk())
    if session.client is None:  # the client is gone, so the door answers
        channel.state = ChannelState.TOLD
        session.outbox.drop(number)
        session.outbox.write(close_ok)
        return b""
    if channel.state in (ChannelState.CLIENT, ChannelState.DOOR):
        # Both sides close at once. A client that has asked already hears why the broker closes the channel; else it will get the door's reason.
        unsent = session.outbox.drop(number)
        asked = not channel.on_settled and not unsent
        channel.on_settled = b""
        if channel.state is ChannelState.CLIENT:
            if asked:  # the broker answers the client's close, too
                channel.state = ChannelState.BROKER
                return None
            channel.refusal = data[item[2] - 7 : item[3] + 1] + close_ok
        session.outbox.write(close_ok)
        return b"" if asked else closing.take_refusal(channel)
    session.outbox.drop(number)
    channel.state = ChannelState.BROKER
    closing.settle_connection(session)
    return None


def broker_close_ok(session: ClientSession, number: int, _data: bytes, _item: Item) -> bytes | None:
    """channel.close-ok of the broker."""
    channel = session.channels.get(number)
    session.from_broker.forget(number)
    if channel is None or channel.state not in (ChannelState.CLIENT, ChannelState.DOOR):
        return None  # both sides closed at once; the client may have opened the number again
    closing.resolve_unanswered(session, channel)
    if channel.state is ChannelState.DOOR:
        return closing.take_refusal(channel)
    closing.forget_channel(session, channel)
    return None


def broker_closed_connection(session: ClientSession, _number: int, _data: bytes, _item: Item) -> bytes | None:
    """connection.close of the broker, which has ended all channels: answered at once, without the client."""
    closing.no_reply(session)
    session.outbox.write(encode.method_frame(0, commands.Connection.CloseOk()))
    session.closed_by_broker = True
    return None


def alarm_told(session: ClientSession, _number: int, data: bytes, item: Item) -> bytes:
    """connection.blocked or connection.unblocked of the broker."""
    method: Any = frames.decode_method(data[item[2] : item[3]])
    if item[0] == CONNECTION_BLOCKED:
        session.alarm.broker = method.reason or "an alarm"
        session.door.blocked.add(session)
    else:
        session.alarm.broker = ""
        session.door.blocked.discard(session)
    session.alarm.changed()
    return b""


def update_secret(session: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """connection.update-secret: no frame is taken, and no right asked for, before the broker has the new secret."""
    session.secret_updated = asyncio.Event()
    session.outbox.put(encode.frame(METHOD, channel.number, payload))
    session.from_client.wait_for_answer(session.secret_updated)


def secret_updated(session: ClientSession, _number: int, _data: bytes, _item: Item) -> bytes | None:
    """connection.update-secret-ok."""
    session.forget_permissions()
    if session.secret_updated is not None:
        session.secret_updated.set()
    return None
