"""How a channel begins, and how it or a connection ends, from either side or by the door's own word (`channels.Closing` has the states).

Rules:
- A channel or connection is closed at the broker only when the broker has answered all its publishes: what was published before a close is in
  the queues.
- A channel that the door refuses is closed at the broker first; the client is told when that is done, and then answers to the door alone.
- A second channel (`transacting`) ends when its commits are answered, and before the first one, unless the broker closes that. Either way the client
  is told last.
- What waits for a channel that the broker has closed is dropped: its number may be another's by the time it would go out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from pamqp import commands

from . import building, permitting, settling
from .channels import Channel, Closing, Settled
from .frames import METHOD, FrameError, Item

if TYPE_CHECKING:
    from .relay import Relay


class NotOpen(FrameError):
    """A frame on a channel that the client has not opened; in RabbitMQ's words. It may not reach the broker: the door has channels of its own."""

    code = 504

    def __init__(self, cause: int) -> None:
        super().__init__("CHANNEL_ERROR - expected 'channel.open'")
        self.cause = cause


class TooManyChannels(FrameError):
    """A client opens more channels than were agreed on; in RabbitMQ's words."""

    code = 530

    def __init__(self, limit: int) -> None:
        super().__init__(f"NOT_ALLOWED - number of channels opened ({limit}) has reached the negotiated channel_max ({limit})")


# ---- what the client says --------------------------------------------------------------------------------------------------


def channel_open(relay: Relay, channel: Channel, _kind: int, payload: bytes) -> None:
    """channel.open. The broker has agreed to one channel more than the client (see `permitting`)."""
    if not channel.opened and not relay.has_room_for_channel:
        raise TooManyChannels(relay.channels_max)
    if channel.number in relay.apart:
        raise FrameError(f"channel {channel.number} is one that the door uses itself: use a lower number")
    channel.opened = True
    relay.outbox.put(building.frame(METHOD, channel.number, payload))


def channel_close(relay: Relay, channel: Channel, _kind: int, payload: bytes) -> None:
    """channel.close of the client."""
    frame = building.frame(METHOD, channel.number, payload)
    if channel.state is Closing.NO:
        _end(relay, channel, Closing.CLIENT, frame)
    elif channel.state is Closing.DOOR:
        channel.refusal += building.method_frame(channel.number, commands.Channel.CloseOk())  # as of a broker, behind its reason
    else:
        # Both sides closed at once. Of a broker that has closed it, too, the door needs no answer: one that is owed could come when the client
        # has opened the number anew.
        relay.to_client(building.method_frame(channel.number, commands.Channel.CloseOk()))


def channel_close_ok(relay: Relay, channel: Channel, _kind: int, payload: bytes) -> None:
    """channel.close-ok of the client."""
    if channel.state in (Closing.BROKER, Closing.TOLD):
        if channel.state is Closing.BROKER:
            relay.outbox.put(building.frame(METHOD, channel.number, payload))
        _forget(relay, channel)
    elif channel.state is Closing.NO:  # a broker would end the channel without a word, and owe its confirms for ever
        raise FrameError(f"channel.close-ok on channel {channel.number}, which nobody has closed")


def connection_close(relay: Relay, _channel: Channel, _kind: int, payload: bytes) -> None:
    """connection.close of the client: the broker hears nothing that comes behind it, so neither does anybody else."""
    relay.on_settled = building.frame(METHOD, 0, payload)
    relay.from_client.hear_nothing_more()
    if relay.unanswered:
        _in_time(relay, relay, lambda: _settle_all(relay))
    else:
        _settle_all(relay)


def connection_close_ok(relay: Relay, _channel: Channel, kind: int, _payload: bytes) -> None:
    """connection.close-ok of the client: to the door, if that has told it, else to the broker."""
    if relay.replying_to_door:
        relay.goodbye()
    else:
        relay.outbox.put(building.raw_method_frame(0, kind))


# ---- what the door says ----------------------------------------------------------------------------------------------------


def refuse(relay: Relay, channel: Channel, code: int, text: str, cause: int) -> None:
    """Closes a channel on both sides, with an error of the door's own."""
    refuse_as(relay, channel, building.channel_close(channel.number, code, text, cause))


def refuse_as(relay: Relay, channel: Channel, refusal: bytes) -> None:
    """The same; the client is told with this frame."""
    channel.refusal = refusal
    frame = building.method_frame(channel.number, commands.Channel.Close(200, "the door closed it", 0, 0))
    _end(relay, channel, Closing.DOOR, frame)


def _end(relay: Relay, channel: Channel, state: Closing, frame: bytes) -> None:
    channel.state, channel.on_settled = state, frame
    held = channel.let_go()
    channel.returning.update(delivery.queue for delivery in held)
    relay.give_back(held)
    if relay.watch is not None:
        relay.watch.channel_ended(channel.number)
    if channel.unanswered:
        _in_time(relay, channel, lambda: _settle(relay, channel))
    else:
        _settle(relay, channel)


def _in_time(relay: Relay, of: Relay | Channel, done: Callable[[], None]) -> None:
    """A broker that does not answer publishes must not keep a channel or connection for ever; nor must its timer, when it has answered."""
    stop_timer(of)
    of.timer = asyncio.get_running_loop().call_later(relay.door.config.drain_timeout_s, done)


def stop_timer(of: Relay | Channel) -> None:
    """The broker has answered, or need not any more."""
    if of.timer is not None:
        of.timer.cancel()
        of.timer = None


def settled(relay: Relay, channel: Channel) -> None:
    """The broker has answered all publishes and commits of this channel."""
    if channel.closing:
        _settle(relay, channel)
    elif channel.after_commit:
        relay.outbox.put(b"".join(channel.after_commit))
        channel.after_commit.clear()
    _settle_connection(relay)


def _settle(relay: Relay, channel: Channel) -> None:
    stop_timer(channel)
    if relay.closed:
        return
    if channel.second:
        _end_second(relay, channel)
    elif channel.on_settled:
        frame, channel.on_settled = channel.on_settled, b""
        relay.outbox.put(frame)


def _end_second(relay: Relay, channel: Channel) -> None:
    if not channel.second_ends:
        channel.second_ends = True
        relay.outbox.put(building.method_frame(channel.second, commands.Channel.Close(200, "the first has ended", 0, 0)))


def _settle_connection(relay: Relay) -> None:
    if relay.on_settled and not relay.unanswered:
        _settle_all(relay)


def _settle_all(relay: Relay) -> None:
    stop_timer(relay)
    if relay.on_settled and not relay.closed:
        frame, relay.on_settled = relay.on_settled, b""
        relay.outbox.put(frame)


def _tell(channel: Channel) -> bytes:
    """The broker's side of a channel that the door refused is closed: what the client gets in its turn, behind what the broker has said before."""
    channel.state = Closing.TOLD
    return channel.refusal


def abandon(relay: Relay, channel: Channel, *, refused: bool = False, commits: bool = True) -> None:
    """Publishes without an answer on a channel that is gone: refused, unless a copy has been seen. `refused`: by the broker's own word.
    `commits`: those of its transactions are gone, too.

    Those that have been confirmed, as their completion is local, are logged anew instead.
    """
    channel.rehearsal_is_over()
    if commits:
        stop_timer(channel)
    replica = relay.replica
    left = [(run, channel.early_run(run.sequence)) for run in channel.confirms.abandon() if run.sequence]
    replica.refuse([run for run, early in left if early is None], unless_seen=True)
    for run, early in left:
        if early is not None:
            replica.log_again(run, *early)
    channel.early.clear()
    if relay.watch is not None:
        relay.watch.unanswered(channel.number)
    while commits and channel.commits:
        runs = channel.commits.popleft().runs
        if refused:
            replica.refuse([Settled(0, len(run.enqueues.lengths), first, "", 0) for first, run in runs], unless_seen=True)
        else:
            replica.doubt(runs)


def no_reply(relay: Relay, number: int | None = None) -> None:
    """No answer to a declaration will come any more, on this channel or on any."""
    for channel, reply in relay.replies.items():
        if number in (None, channel) and not reply.done():
            reply.set_result(False)


def _forget(relay: Relay, channel: Channel) -> None:
    relay.give_back(channel.let_go())  # what came while it was closing
    relay.channels.pop(channel.number, None)
    relay.take_before_select(channel)
    relay.from_client.parts.drop(channel.number)


# ---- what the broker says --------------------------------------------------------------------------------------------------
# None: the client gets it as it came; else what it gets instead.


def broker_closed_channel(relay: Relay, number: int, data: bytes, item: Item) -> bytes | None:
    """channel.close of the broker."""
    channel = relay.channel(number)
    settling.flush(relay)  # what was to be acked on it until now is dropped with it
    permitting.refused(relay, data[item[2] : item[3]])
    no_reply(relay, number)
    relay.give_back(channel.let_go())
    channel.forget()
    relay.take_before_select(channel)
    if relay.watch is not None:
        relay.watch.channel_ended(number)
    abandon(relay, channel, refused=True, commits=not channel.second)
    relay.from_broker.forget(number)
    close_ok = building.method_frame(number, commands.Channel.CloseOk())
    if relay.client is None:  # nobody else answers
        channel.state = Closing.TOLD
        relay.outbox.drop(number)
        relay.outbox.write(close_ok)
        return b""
    if channel.second:
        # Its commits come first, as at a broker with one channel; and the client may use the number again when both have ended.
        channel.on_settled = b""
        relay.outbox.drop(number)
        relay.outbox.write(close_ok)
        if channel.state is not Closing.DOOR:
            answer = close_ok if channel.state is Closing.CLIENT else b""
            channel.state, channel.refusal = Closing.DOOR, data[item[2] - 7 : item[3] + 1] + answer
        if not channel.commits:
            _end_second(relay, channel)
        return b""
    if channel.state in (Closing.CLIENT, Closing.DOOR):
        # Both sides close at once. The client has asked already, and hears why the broker closes it; or it will be told the door's reason.
        unsent = relay.outbox.drop(number)
        asked = not channel.on_settled and not unsent
        channel.on_settled = b""
        if channel.state is Closing.CLIENT:
            if asked:  # the broker answers that too
                channel.state = Closing.BROKER
                return None
            channel.refusal = data[item[2] - 7 : item[3] + 1] + close_ok
        relay.outbox.write(close_ok)
        return b"" if asked else _tell(channel)
    relay.outbox.drop(number)
    channel.state = Closing.BROKER
    _settle_connection(relay)
    return None


def broker_close_ok(relay: Relay, number: int, _data: bytes, _item: Item) -> bytes | None:
    """channel.close-ok of the broker."""
    channel = relay.channels.get(number)
    relay.from_broker.forget(number)
    if channel is None or channel.state not in (Closing.CLIENT, Closing.DOOR):
        return None  # both sides closed at once; the client may have opened the number anew
    abandon(relay, channel)
    if channel.state is Closing.DOOR:
        return _tell(channel)
    _forget(relay, channel)
    return None


def second_refused(relay: Relay, channel: Channel, refusal: bytes) -> bytes:
    """channel.close of the broker, for a second channel; `refusal` is the same for the first. Returns what the client gets."""
    told = b""
    permitting.refused(relay, refusal[7:-1])
    no_reply(relay, channel.number)
    unsent = relay.outbox.drop(channel.second)
    relay.outbox.write(building.method_frame(channel.second, commands.Channel.CloseOk()))
    abandon(relay, channel, refused=True)
    if channel.state is Closing.CLIENT:
        channel.state, channel.refusal = Closing.DOOR, refusal + building.method_frame(channel.number, commands.Channel.CloseOk())
    if not channel.second_ends or unsent:  # else both sides close at once, and the broker answers that, too
        _forget_second(relay, channel)
        if channel.state is Closing.NO:
            refuse_as(relay, channel, refusal)
        else:
            told = _after_second(relay, channel)
    _settle_connection(relay)
    return told


def second_closed(relay: Relay, channel: Channel) -> bytes:
    """channel.close-ok of the broker, for a second channel. Returns what the client gets."""
    _forget_second(relay, channel)
    abandon(relay, channel)
    told = _after_second(relay, channel)
    _settle_connection(relay)
    return told


def _forget_second(relay: Relay, channel: Channel) -> None:
    relay.from_broker.forget(channel.second)
    del relay.seconds[channel.second], relay.apart[channel.second]
    channel.second, channel.second_ends = 0, False


def _after_second(relay: Relay, channel: Channel) -> bytes:
    if channel.on_settled:
        _settle(relay, channel)
    elif channel.state is Closing.DOOR:
        return _tell(channel)
    return b""


def broker_closed_connection(relay: Relay, _number: int, _data: bytes, _item: Item) -> bytes | None:
    """connection.close of the broker, which has ended all channels: it is answered at once, whatever the client does."""
    no_reply(relay)
    relay.outbox.write(building.method_frame(0, commands.Connection.CloseOk()))
    relay.over = True
    return None
