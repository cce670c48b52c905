"""Emptying the door before a planned change of primary: nobody loses a message, nobody gets one twice.

Rules:
- First, nothing more is given out, and consumers finish what they hold. Publishers go on meanwhile. What the broker hands out then goes back to its
  queue with the connection, or at once if draining is given up.
- Nobody drains a door that is being drained: who ends first would give out messages that the other keeps back.
- Then, nothing more is taken from anybody; what was taken is confirmed, and each client is told. What it had sent beyond that has no confirm: its
  publisher sends it again.
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
    """Messages that consumers have and have not settled, or not committed; but for what their brokers no longer wait for."""
    return sum(len(channel.held) - len(channel.overdue) for session in door.sessions for channel in session.channels.values())


async def drain(door: DoorState[ClientSession], why: str, timeout_s: float) -> int:
    """Gives out nothing more; returns when consumers have settled what they hold, or the time is over: how many messages are left.

    Args:
        why: What others are told meanwhile, until `give_up`, or until the caller says that it is over.
        timeout_s: How long consumers may take.
    """
    door.draining = why
    deadline = time.monotonic() + timeout_s
    while held(door) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    return held(door)


def give_up(door: DoorState[ClientSession]) -> None:
    """Gives out messages again."""
    door.draining = ""
    for session in door.sessions:
        for channel in session.channels.values():
            for tag in channel.undelivered:
                acknowledge.ack_internally(session, channel, encode.nack(channel.number, tag, requeue=True))
            channel.undelivered.clear()
        acknowledge.flush(session)  # of channels with transactions
        for channel in session.channels.values():
            session.gives_back(channel.returning)
            if not (channel.closing or channel.internal_acks):
                channel.returning = set()


async def close(door: DoorState[ClientSession], reason: str, timeout_s: float) -> None:
    """Takes nothing more, brings what was taken to its end, and tells every client; after the time it is cut short."""
    deadline = time.monotonic() + timeout_s
    for session in list(door.sessions):
        session.stop(reason)
    while door.sessions and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
