"""The applier's waits, in which its VhostWriters go on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from ..amqp.errors import BrokerRefuses
from ..log.shortfall import Shortfall

log = logging.getLogger("lrq_ha.applier")

TIMER_MIN_S = 0.01
REFUSED_AGAIN_S = 2.0  # between two tries of a command that needs a missing right


class Waits:
    """The waits of one applier.

    Args:
        tend: Lets the VhostWriters go on. Returns the seconds until the next call is due.
        shortfall: Told why nothing is written.
    """

    def __init__(self, tend: Callable[[], Awaitable[float]], shortfall: Shortfall) -> None:
        self._tend = tend
        self._shortfall = shortfall
        self._event = asyncio.Event()
        self._since = 0.0  # when a counted wait began; 0: none
        self._counted_s = 0.0

    def wake(self) -> None:
        """Ends a pause, as something has changed."""
        self._event.set()

    def clear(self) -> None:
        """Changes until now end no pause."""
        self._event.clear()

    async def pause(self, pause_s: float) -> None:
        """Returns after `pause_s`, or when something has changed since `clear`."""
        if not self._event.is_set():
            try:
                async with asyncio.timeout(max(pause_s, TIMER_MIN_S)):
                    await self._event.wait()
            except TimeoutError:
                pass

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when `condition` holds."""
        while not condition():
            self.clear()
            pause_s = await self._tend()
            if condition():
                return
            await self.pause(pause_s)

    async def poll(self, pause_s: float) -> None:
        """Lets the VhostWriters go on once, and pauses."""
        self.clear()
        await self._tend()
        await self.pause(pause_s)

    async def rest(self, pause_s: float, urgent: Callable[[], bool] = lambda: False) -> None:
        """Writes nothing for `pause_s`, or until `urgent`."""
        until = time.monotonic() + pause_s
        with self.counted():
            while (left_s := until - time.monotonic()) > 0 and not urgent():
                self.clear()
                await self.pause(min(left_s, await self._tend()))

    async def hold(self, place: str, text: str, pause_s: float, *, since: str = "", urgent: Callable[[], bool] = lambda: False) -> None:
        """Rests, and notes why in the shortfall. The note is still there on return."""
        since = since or time.strftime("%H:%M:%S")
        if self._shortfall.hold(place, f"cannot write its queues since {since}: {text}"):
            log.error("this node cannot write its queues: %s", text)
        await self.rest(pause_s, urgent)

    async def insist(self, do: Callable[[], Awaitable[None]]) -> None:
        """Calls `do` again and again while the broker refuses it for a missing right."""
        since = time.strftime("%H:%M:%S")
        try:
            while True:
                try:
                    return await do()
                except BrokerRefuses as error:
                    await self.hold("right", str(error), REFUSED_AGAIN_S, since=since)
        finally:
            self._shortfall.hold("right", "")

    def lasts_s(self) -> float:
        """For how long the counted wait of this moment has lasted."""
        return time.monotonic() - self._since if self._since else 0.0

    def counted_s(self) -> float:
        """Total seconds of counted waits."""
        return self._counted_s + self.lasts_s()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the time inside as a wait for anything but the broker's confirms: for a sweeper, or for a record to be written."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._counted_s, self._since = self.counted_s(), 0.0
