"""How a channel begins, and how it or a connection ends, from either side or by the door's own word (`channel.ChannelState` has the states).

Rules:
- A channel or connection is closed at the broker only when the broker has answered all its publishes: what was published before a close is in
  the queues.
- A channel that the door refuses is closed at the broker first; the client is told when that is done, and then answers to the door alone.
- A second channel (`transactions`) ends when its commits are answered, and before the first one, unless the broker closes that. Either way the client
  is told last.
- What waits for a channel that the broker has closed is dropped: its number may be another's by the time it would go out.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pamqp import commands

from ..amqp import encode, frames
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
    """A client opens more channels than were agreed on; in RabbitMQ's words."""

    code = 530

    def __init__(self, limit: int) -> None:
        super().__init__(f"NOT_ALLOWED - number of channels opened ({limit}) has reached the negotiated channel_max ({limit})")


# ---- what the client says --------------------------------------------------------------------------------------------------


def channel_open(relay: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """channel.open. The broker has agreed to one channel more than the client (see `permissions`)."""
    if not channel.opened and not relay.has_room_for_channel:
        raise TooManyChannels(relay.channels_max)
    if channel.number in relay.apart:
        raise FrameError(f"channel {channel.number} is one that the door uses itself: use a lower number")
    channel.opened = True
    relay.outbox.put(encode.frame(METHOD, channel.number, payload))


def channel_close(relay: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """channel.close of the client."""
    frame = encode.frame(METHOD, channel.number, payload)
    if channel.state is ChannelState.NO:
        closing.end_channel(relay, channel, ChannelState.CLIENT, frame)
    elif channel.state is ChannelState.DOOR:
        channel.refusal += encode.method_frame(channel.number, commands.Channel.CloseOk())  # as of a broker, behind its reason
    else:
        # Both sides closed at once. Of a broker that has closed it, too, the door needs no answer: one that is owed could come when the client
        # has opened the number anew.
        relay.to_client(encode.method_frame(channel.number, commands.Channel.CloseOk()))


def channel_close_ok(relay: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """channel.close-ok of the client."""
    if channel.state in (ChannelState.BROKER, ChannelState.TOLD):
        if channel.state is ChannelState.BROKER:
            relay.outbox.put(encode.frame(METHOD, channel.number, payload))
        closing.forget_channel(relay, channel)
    elif channel.state is ChannelState.NO:  # a broker would end the channel without a word, and owe its confirms for ever
        raise FrameError(f"channel.close-ok on channel {channel.number}, which nobody has closed")


def connection_close(relay: ClientSession, _channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """connection.close of the client: the broker hears nothing that comes behind it, so neither does anybody else."""
    relay.on_settled = encode.frame(METHOD, 0, payload)
    relay.from_client.hear_nothing_more()
    if relay.unanswered:
        closing.limit_wait(relay, relay, lambda: closing.send_connection_close(relay))
    else:
        closing.send_connection_close(relay)


def connection_close_ok(relay: ClientSession, _channel: ClientChannel, kind: int, _payload: bytes) -> None:
    """connection.close-ok of the client: to the door, if that has told it, else to the broker."""
    if relay.replying_to_door:
        relay.goodbye()
    else:
        relay.outbox.put(encode.raw_method_frame(0, kind))


# ---- what the broker says --------------------------------------------------------------------------------------------------
# None: the client gets it as it came; else what it gets instead.


def broker_closed_channel(relay: ClientSession, number: int, data: bytes, item: Item) -> bytes | None:
    """channel.close of the broker."""
    channel = relay.channel(number)
    acknowledge.flush(relay)  # what was to be acked on it until now is dropped with it
    permissions.refused(relay, data[item[2] : item[3]])
    closing.no_reply(relay, number)
    relay.give_back(channel.let_go())
    channel.forget()
    relay.take_before_select(channel)
    if relay.watch is not None:
        relay.watch.channel_ended(number)
    closing.resolve_unanswered(relay, channel, refused=True, commits=not channel.second)
    relay.from_broker.forget(number)
    close_ok = encode.method_frame(number, commands.Channel.CloseOk())
    if relay.client is None:  # nobody else answers
        channel.state = ChannelState.TOLD
        relay.outbox.drop(number)
        relay.outbox.write(close_ok)
        return b""
    if channel.second:
        # Its commits come first, as at a broker with one channel; and the client may use the number again when both have ended.
        channel.on_settled = b""
        relay.outbox.drop(number)
        relay.outbox.write(close_ok)
        if channel.state is not ChannelState.DOOR:
            answer = close_ok if channel.state is ChannelState.CLIENT else b""
            channel.state, channel.refusal = ChannelState.DOOR, data[item[2] - 7 : item[3] + 1] + answer
        if not channel.commits:
            closing.end_second(relay, channel)
        return b""
    if channel.state in (ChannelState.CLIENT, ChannelState.DOOR):
        # Both sides close at once. The client has asked already, and hears why the broker closes it; or it will be told the door's reason.
        unsent = relay.outbox.drop(number)
        asked = not channel.on_settled and not unsent
        channel.on_settled = b""
        if channel.state is ChannelState.CLIENT:
            if asked:  # the broker answers that too
                channel.state = ChannelState.BROKER
                return None
            channel.refusal = data[item[2] - 7 : item[3] + 1] + close_ok
        relay.outbox.write(close_ok)
        return b"" if asked else closing.take_refusal(channel)
    relay.outbox.drop(number)
    channel.state = ChannelState.BROKER
    closing.settle_connection(relay)
    return None


def broker_close_ok(relay: ClientSession, number: int, _data: bytes, _item: Item) -> bytes | None:
    """channel.close-ok of the broker."""
    channel = relay.channels.get(number)
    relay.from_broker.forget(number)
    if channel is None or channel.state not in (ChannelState.CLIENT, ChannelState.DOOR):
        return None  # both sides closed at once; the client may have opened the number anew
    closing.resolve_unanswered(relay, channel)
    if channel.state is ChannelState.DOOR:
        return closing.take_refusal(channel)
    closing.forget_channel(relay, channel)
    return None


def second_refused(relay: ClientSession, channel: ClientChannel, refusal: bytes) -> bytes:
    """channel.close of the broker, for a second channel; `refusal` is the same for the first. Returns what the client gets."""
    told = b""
    permissions.refused(relay, refusal[7:-1])
    closing.no_reply(relay, channel.number)
    unsent = relay.outbox.drop(channel.second)
    relay.outbox.write(encode.method_frame(channel.second, commands.Channel.CloseOk()))
    closing.resolve_unanswered(relay, channel, refused=True)
    if channel.state is ChannelState.CLIENT:
        channel.state, channel.refusal = ChannelState.DOOR, refusal + encode.method_frame(channel.number, commands.Channel.CloseOk())
    if not channel.second_ends or unsent:  # else both sides close at once, and the broker answers that, too
        _forget_second(relay, channel)
        if channel.state is ChannelState.NO:
            closing.refuse_as(relay, channel, refusal)
        else:
            told = _after_second(relay, channel)
    closing.settle_connection(relay)
    return told


def second_closed(relay: ClientSession, channel: ClientChannel) -> bytes:
    """channel.close-ok of the broker, for a second channel. Returns what the client gets."""
    _forget_second(relay, channel)
    closing.resolve_unanswered(relay, channel)
    told = _after_second(relay, channel)
    closing.settle_connection(relay)
    return told


def _forget_second(relay: ClientSession, channel: ClientChannel) -> None:
    relay.from_broker.forget(channel.second)
    del relay.seconds[channel.second], relay.apart[channel.second]
    channel.second, channel.second_ends = 0, False


def _after_second(relay: ClientSession, channel: ClientChannel) -> bytes:
    if channel.on_settled:
        closing.settle_channel(relay, channel)
    elif channel.state is ChannelState.DOOR:
        return closing.take_refusal(channel)
    return b""


def broker_closed_connection(relay: ClientSession, _number: int, _data: bytes, _item: Item) -> bytes | None:
    """connection.close of the broker, which has ended all channels: it is answered at once, whatever the client does."""
    closing.no_reply(relay)
    relay.outbox.write(encode.method_frame(0, commands.Connection.CloseOk()))
    relay.over = True
    return None


def alarm_told(relay: ClientSession, _number: int, data: bytes, item: Item) -> bytes:
    """connection.blocked or unblocked of the broker."""
    method: Any = frames.decode_method(data[item[2] : item[3]])
    if item[0] == CONNECTION_BLOCKED:
        relay.alarm.broker = method.reason or "an alarm"
        relay.door.blocked.add(relay)
    else:
        relay.alarm.broker = ""
        relay.door.blocked.discard(relay)
    relay.alarm.changed()
    return b""


def update_secret(relay: ClientSession, channel: ClientChannel, _kind: int, payload: bytes) -> None:
    """connection.update-secret: nothing is asked, or taken, before the broker has the new one."""
    relay.renewed = asyncio.Event()
    relay.outbox.put(encode.frame(METHOD, channel.number, payload))
    relay.from_client.wait_for_answer(relay.renewed)


def secret_updated(relay: ClientSession, _number: int, _data: bytes, _item: Item) -> bytes | None:
    """connection.update-secret-ok."""
    relay.forget_permissions()
    if relay.renewed is not None:
        relay.renewed.set()
    return None
