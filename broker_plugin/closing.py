"""How a channel or a connection ends, from either side or by the door's own word (`channels.Closing` has the states).

Rules:
- A channel or connection is closed at the broker only when the broker has answered all its publishes: what was published before a close is in
  the queues.
- A channel that the door refuses is closed at the broker first; the client is told when that is done, and then answers to the door alone.
- What waits for a channel that the broker has closed is dropped: its number may be another's by the time it would go out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from pamqp import commands

from . import frames
from .channels import Channel, Closing, Settled
from .frames import CHANNEL_CLOSE, METHOD, Item

if TYPE_CHECKING:
    from .relay import Relay


# ---- what the client says --------------------------------------------------------------------------------------------------


def channel_close(relay: Relay, channel: Channel, _kind: int, payload: bytes) -> None:
    """channel.close of the client."""
    frame = frames.frame(METHOD, channel.number, payload)
    if channel.state is Closing.NO:
        _end(relay, channel, Closing.CLIENT, frame)
    elif channel.state is Closing.BROKER:
        relay.outbox.put(frame)  # both sides closed at once
    elif channel.state in (Closing.DOOR, Closing.TOLD):
        relay.to_client(frames.method_frame(channel.number, commands.Channel.CloseOk()))


def channel_close_ok(relay: Relay, channel: Channel, _kind: int, payload: bytes) -> None:
    """channel.close-ok of the client."""
    if channel.state in (Closing.BROKER, Closing.TOLD):
        if channel.state is Closing.BROKER:
            relay.outbox.put(frames.frame(METHOD, channel.number, payload))
        _forget(relay, channel)
    elif channel.state is Closing.NO:
        relay.outbox.put(frames.frame(METHOD, channel.number, payload))


def connection_close(relay: Relay, _channel: Channel, _kind: int, payload: bytes) -> None:
    """connection.close of the client."""
    relay.on_settled = frames.frame(METHOD, 0, payload)
    if relay.unanswered:
        _in_time(relay, lambda: _settle_all(relay))
    else:
        _settle_all(relay)


def connection_close_ok(relay: Relay, _channel: Channel, kind: int, _payload: bytes) -> None:
    """connection.close-ok of the client: to the door, if that has told it, else to the broker."""
    if relay.replying_to_door:
        relay.goodbye()
    else:
        relay.outbox.put(frames.raw_method_frame(0, kind))


# ---- what the door says ----------------------------------------------------------------------------------------------------


def refuse(relay: Relay, channel: Channel, code: int, text: str, cause: int) -> None:
    """Closes a channel on both sides, with an error of the door's own."""
    channel.refusal = frames.channel_close(channel.number, code, text, cause)
    frame = frames.method_frame(channel.number, commands.Channel.Close(200, "the door closed it", 0, 0))
    _end(relay, channel, Closing.DOOR, frame)


def _end(relay: Relay, channel: Channel, state: Closing, frame: bytes) -> None:
    channel.state, channel.on_settled = state, frame
    held = channel.let_go()
    channel.returning.update(delivery.queue for delivery in held)
    relay.give_back(held)
    if relay.watch is not None:
        relay.watch.channel_ended(channel.number)
    if channel.unanswered:
        _in_time(relay, lambda: _settle(relay, channel))
    else:
        _settle(relay, channel)


def _in_time(relay: Relay, done: Callable[[], None]) -> None:
    """A broker that does not answer publishes must not keep a channel or connection for ever."""
    asyncio.get_running_loop().call_later(relay.door.config.drain_timeout_s, done)


def settled(relay: Relay, channel: Channel) -> None:
    """The broker has answered all publishes of this channel."""
    if channel.on_settled:
        _settle(relay, channel)
    if relay.on_settled and not relay.unanswered:
        _settle_all(relay)


def _settle(relay: Relay, channel: Channel) -> None:
    if channel.on_settled and not relay.closed:
        frame, channel.on_settled = channel.on_settled, b""
        relay.outbox.put(frame)


def _settle_all(relay: Relay) -> None:
    if relay.on_settled and not relay.closed:
        frame, relay.on_settled = relay.on_settled, b""
        relay.outbox.put(frame)


def _tell(relay: Relay, channel: Channel) -> None:
    """The broker's side of a channel that the door refused is closed."""
    channel.state = Closing.TOLD
    relay.to_client(channel.refusal)


def abandon(relay: Relay, channel: Channel, *, refused: bool = False) -> None:
    """Publishes without an answer on a channel that is gone: refused, unless a copy has been seen. `refused`: by the broker's own word."""
    replica = relay.replica
    replica.refuse([run for run in channel.confirms.abandon() if run.sequence], unless_seen=True)
    if relay.watch is not None:
        relay.watch.unanswered(channel.number)
    while channel.commits:
        runs = channel.commits.popleft().runs
        if refused:
            replica.refuse([Settled(0, len(run.enqueues.lengths), first, "", 0) for first, run in runs], unless_seen=True)
        else:
            replica.doubt(runs)


def no_reply(relay: Relay, number: int | None = None) -> None:
    """No answer to a declaration will come any more, on this channel or on any."""
    for channel, reply in relay.replies.items():
        if number in (None, channel) and not reply.done():
            reply.set_result((CHANNEL_CLOSE, b""))


def _forget(relay: Relay, channel: Channel) -> None:
    relay.give_back(channel.let_go())  # what came while it was closing
    relay.channels.pop(channel.number, None)
    relay.client_parts.drop(channel.number)


# ---- what the broker says --------------------------------------------------------------------------------------------------
# None: the client gets it as it came; else what it gets instead.


def broker_closed_channel(relay: Relay, number: int, _data: bytes, _item: Item) -> bytes | None:
    """channel.close of the broker."""
    channel = relay.channel(number)
    no_reply(relay, number)
    relay.give_back(channel.let_go())
    channel.forget()
    if relay.watch is not None:
        relay.watch.channel_ended(number)
    abandon(relay, channel, refused=True)
    relay.broker_parts.drop(number)
    close_ok = frames.method_frame(number, commands.Channel.CloseOk())
    if relay.client is None:  # nobody else answers
        channel.state = Closing.TOLD
        relay.outbox.drop(number)
        relay.outbox.write(close_ok)
        return b""
    if channel.state in (Closing.CLIENT, Closing.DOOR):
        # Both sides close at once. The client has asked already, or will be told the door's reason.
        asked = not channel.on_settled
        channel.on_settled = b""
        relay.outbox.write(close_ok)
        if asked:
            return b""  # the broker answers that too
        if channel.state is Closing.DOOR:
            _tell(relay, channel)
        else:
            _forget(relay, channel)
            relay.to_client(close_ok)
        return b""
    relay.outbox.drop(number)
    channel.state = Closing.BROKER
    if relay.on_settled and not relay.unanswered:
        _settle_all(relay)
    return None


def broker_close_ok(relay: Relay, number: int, _data: bytes, _item: Item) -> bytes | None:
    """channel.close-ok of the broker."""
    channel = relay.channels.get(number)
    relay.broker_parts.drop(number)
    if channel is None or channel.state is Closing.BROKER:
        return None
    abandon(relay, channel)
    if channel.state is Closing.DOOR:
        _tell(relay, channel)
        return b""
    _forget(relay, channel)
    return None


def broker_closed_connection(relay: Relay, _number: int, _data: bytes, _item: Item) -> bytes | None:
    """connection.close of the broker."""
    no_reply(relay)
    if relay.client is None:
        relay.outbox.write(frames.method_frame(0, commands.Connection.CloseOk()))
    return None
