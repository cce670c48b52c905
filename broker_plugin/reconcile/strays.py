"""Finds queues and exchanges that were declared at the primary's broker around the door: the log does not know them, so no backup has them.

A client's publish to such a queue is confirmed, as the log has the message. It is lost with the primary, as no backup's broker has the queue.

Rules:
- Every name that a client publishes to, and that the log does not declare, is a suspect (`UndeclaredTargets`). Most suspects do not exist at all.
- The own broker is asked, some suspects at a time, with passive declarations. A suspect that exists is reported (`Shortfall`), until the log declares
  it or it is gone.
- A stray queue behind an exchange of the log is not detected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import islice

from lrq_ha.errors import LrqError

from ..amqp.address import Address
from ..amqp.errors import ChannelClosed
from ..amqp.vhosts import VhostConnections
from ..log.replica import Replica
from ..log.undeclared_targets import Target

log = logging.getLogger("lrq_ha.census")

INTERVAL_S = 1.0
LOOKS_PER_ROUND = 64
FOUND_AGAIN_S = 5.0
FOUND_MAX = 100
TODO = "bring it into the log with lrq-ha adopt (docs/operations/adopt.md), or delete it"


class Strays:
    """Checks the suspects of one node. `broker`: the own broker; its vhost is replaced."""

    def __init__(self, replica: Replica, broker: Address) -> None:
        self._replica = replica
        self._vhosts = VhostConnections(broker)
        self._found: dict[Target, float] = {}  # strays, and when to look again

    async def run(self) -> None:
        """Checks suspects while this node is the primary, until cancelled."""
        try:
            while True:
                await asyncio.sleep(INTERVAL_S)
                if self._replica.active:
                    await self._round()
        finally:
            self._vhosts.abort()

    async def _round(self) -> None:
        now, undeclared = time.monotonic(), self._replica.undeclared
        again = [suspect for suspect, at in self._found.items() if at <= now]
        for suspect in (*again, *islice(undeclared.targets, LOOKS_PER_ROUND)):
            undeclared.targets.pop(suspect, None)
            try:
                self._note(suspect, not undeclared.is_declared(suspect) and await self._is_there(suspect))
            except LrqError as error:
                log.debug("whether there is %s is not known now: %s", _told(suspect), error)

    async def _is_there(self, suspect: Target) -> bool:
        channel = await (await self._vhosts.connection(suspect.vhost, anew=True)).channel()
        try:
            if suspect.is_exchange:
                await channel.exchange_declare(suspect.name, passive=True)
            else:
                await channel.queue_declare(suspect.name, passive=True)
        except ChannelClosed as error:
            if error.code in (404, 405):  # the name does not exist, or is a connection's own queue
                return False
            raise
        finally:
            await channel.close()
        return True

    def _note(self, suspect: Target, is_stray: bool) -> None:
        if not is_stray:
            self._found.pop(suspect, None)
        elif suspect in self._found or len(self._found) < FOUND_MAX:
            self._found[suspect] = time.monotonic() + FOUND_AGAIN_S
        else:
            return
        text = f"{_told(suspect)} is on this broker only, as it was not declared through the door: no backup has what is published to it; {TODO}"
        if self._replica.shortfall.note_stray(suspect, text if is_stray else "") and is_stray:
            log.warning("%s", text)


def _told(suspect: Target) -> str:
    return f"{'exchange' if suspect.is_exchange else 'queue'} '{suspect.name}' in vhost '{suspect.vhost}'"
