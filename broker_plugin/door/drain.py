"""Drains the door before a planned change of primary: no client loses a message or gets one twice.

Rules:
- First, no delivery is given out, and consumers finish those that they hold. Publishers go on meanwhile. Later deliveries of the broker go back to
  their queue with the connection, or at once if draining is given up.
- A door that is being drained is not drained a second time: the end of the first drain would give out deliveries that the second keeps back.
- Then, no frame is taken from any client; taken publishes are confirmed, and each client is told. Publishes beyond that have no confirm: their
  publisher repeats them.
"""

from __future__ import annotations

import asyncio
import time

from ..amqp import encode
from ..methods import acknowledge
from ..session.door_state import DoorState
from ..session.session import ClientSession

POLL_S = 0.02


def held(door: DoorState[ClientSession]) -> int:
    """Number of deliveries that consumers have not settled, or not committed; without those that their brokers no longer wait for."""
    return sum(len(channel.held) - len(channel.overdue) for session in door.sessions for channel in session.channels.values())


async def drain(door: DoorState[ClientSession], why: str, timeout_s: float) -> int:
    """Stops deliveries, and waits until consumers have settled theirs, or the time is over. Returns the number of deliveries that are left.

    Args:
        why: The reason that others get until `give_up`, or until the caller ends the drain.
        timeout_s: Seconds that consumers have.
    """
    door.draining = why
    deadline = time.monotonic() + timeout_s
    while held(door) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    return held(door)


def give_up(door: DoorState[ClientSession]) -> None:
    """Ends a drain: gives out deliveries again."""
    door.draining = ""
    for session in door.sessions:
        for channel in session.channels.values():
            for tag in channel.undelivered:
                acknowledge.ack_internally(session, channel, encode.nack(channel.number, tag, requeue=True))
            channel.undelivered.clear()
        acknowledge.flush(session)  # for channels with transactions
        for channel in session.channels.values():
            session.gives_back(channel.returning)
            if not (channel.closing or channel.internal_acks):
                channel.returning = set()


async def close(door: DoorState[ClientSession], reason: str, timeout_s: float) -> None:
    """Takes no more frames, completes taken publishes, and tells every client; stops waiting after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    for session in list(door.sessions):
        session.stop(reason)
    while door.sessions and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
