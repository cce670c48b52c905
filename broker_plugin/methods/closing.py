"""Closes a channel or a connection towards its client once everything before is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pamqp import commands

from ..amqp import encode, reply_codes
from ..amqp.frames import BASIC_PUBLISH, FrameError
from ..log.messages import Settled
from ..session.channel import ChannelState, ClientChannel
from ..session.session import ClientSession


class NotOpen(FrameError):
    """A frame on a channel that the client has not opened, with RabbitMQ's text. It may not reach the broker: the door has channels of its own."""

    code = reply_codes.CHANNEL_ERROR

    def __init__(self, cause: int) -> None:
        super().__init__("CHANNEL_ERROR - expected 'channel.open'")
        self.cause = cause


# ---- answers of the door ---------------------------------------------------------------------------------------------------


def refuse(session: ClientSession, channel: ClientChannel, code: int, text: str, cause: int) -> None:
    """Closes a channel on both sides, with an error of the door's own."""
    refuse_as(session, channel, encode.channel_close(channel.number, code, text, cause))


def refuse_as(session: ClientSession, channel: ClientChannel, refusal: bytes) -> None:
    """Closes a channel on both sides; the client gets this frame."""
    channel.refusal = refusal
    frame = encode.method_frame(channel.number, commands.Channel.Close(200, "the door closed it", 0, 0))
    end_channel(session, channel, ChannelState.DOOR, frame)


def end_channel(session: ClientSession, channel: ClientChannel, state: ChannelState, frame: bytes) -> None:
    """Ends a channel at the broker with this frame, once the broker has answered its publishes. The client gives its deliveries back."""
    channel.state, channel.on_settled = state, frame
    held = channel.let_go()
    channel.returning.update(delivery.queue for delivery in held)
    session.give_back(held)
    if session.watch is not None:
        session.watch.channel_ended(channel.number)
    if channel.unanswered:
        limit_wait(session, channel, lambda: settle_channel(session, channel))
    else:
        settle_channel(session, channel)


def limit_wait(session: ClientSession, of: ClientSession | ClientChannel, done: Callable[[], None]) -> None:
    """Limits the wait for a broker that does not answer publishes. The timer is stopped when the broker has answered."""
    stop_timer(of)
    of.timer = asyncio.get_running_loop().call_later(session.door.config.drain_timeout_s, done)


def stop_timer(of: ClientSession | ClientChannel) -> None:
    """Stops the timer: the broker has answered, or need not any more."""
    if of.timer is not None:
        of.timer.cancel()
        of.timer = None


def settled(session: ClientSession, channel: ClientChannel) -> None:
    """Handles that the broker has answered all publishes and commits of this channel."""
    if channel.closing:
        settle_channel(session, channel)
    elif channel.after_commit:
        session.outbox.put(b"".join(channel.after_commit))
        channel.after_commit.clear()
    settle_connection(session)


def settle_channel(session: ClientSession, channel: ClientChannel) -> None:
    """Sends the frame that ends a channel."""
    stop_timer(channel)
    if session.closed:
        return
    if channel.on_settled:
        frame, channel.on_settled = channel.on_settled, b""
        session.outbox.put(frame)


def settle_connection(session: ClientSession) -> None:
    """Sends the client's connection.close if the broker owes no answer any more."""
    if session.on_settled and not session.unanswered:
        send_connection_close(session)


def send_connection_close(session: ClientSession) -> None:
    """Sends the client's connection.close to the broker."""
    stop_timer(session)
    if session.on_settled and not session.closed:
        frame, session.on_settled = session.on_settled, b""
        session.outbox.put(frame)


def take_refusal(channel: ClientChannel) -> bytes:
    """The broker has closed a channel that the door refused: returns the client's close, which follows the broker's earlier frames."""
    channel.state = ChannelState.TOLD
    return channel.refusal


def resolve_unanswered(session: ClientSession, channel: ClientChannel, *, refused: bool = False) -> None:
    """Publishes without an answer on a channel that is gone are refused, unless a copy has been seen. `refused`: the broker itself has refused them.

    Publishes with local completion that have been confirmed are logged again instead.
    """
    channel.rehearsal_is_over()
    stop_timer(channel)
    replica = session.replica
    left = [(run, channel.early_run(run.sequence)) for run in channel.confirms.abandon() if run.sequence]
    replica.refuse([run for run, early in left if early is None], unless_seen=True)
    for run, early in left:
        if early is not None:
            replica.log_again(run, *early)
    channel.early.clear()
    if session.watch is not None:
        session.watch.unanswered(channel.number)
    while channel.commits:
        runs = channel.commits.popleft().runs
        if refused:
            replica.refuse([Settled(0, len(run.enqueues.lengths), first, "", 0) for first, run in runs], unless_seen=True)
        else:
            replica.doubt(runs)


def no_reply(session: ClientSession, number: int | None = None) -> None:
    """No answer to a declaration will come any more, on this channel or on any."""
    for channel, reply in session.replies.items():
        if number in (None, channel) and not reply.done():
            reply.set_result(False)


def forget_channel(session: ClientSession, channel: ClientChannel) -> None:
    """Removes a channel that is closed on both sides."""
    session.give_back(channel.let_go())  # deliveries that came while the channel was closing
    session.channels.pop(channel.number, None)
    session.take_before_select(channel)
    session.from_client.parts.drop(channel.number)


def no_room(session: ClientSession, size: int) -> FrameError:
    return FrameError(
        f"a message's headers of {size} bytes and its position are more than {session.header_bytes_max}; "
        "the limits are the frame size and door.header_bytes_max"
    )


def refuse_publish(session: ClientSession, channel: ClientChannel, code: int, text: str) -> None:
    """Refuses a publish: closes the channel, as a broker would."""
    session.door.counters["refused_publishes"] += 1
    refuse(session, channel, code, text, BASIC_PUBLISH)


def too_large(session: ClientSession, channel: ClientChannel, size: int, limit: int) -> None:
    """Refuses a publish whose body is over the door's limit, in the broker's words for its own limit."""
    text = f"PRECONDITION_FAILED - message size {size} is larger than configured max size {limit}"
    refuse_publish(session, channel, reply_codes.PRECONDITION_FAILED, text)
