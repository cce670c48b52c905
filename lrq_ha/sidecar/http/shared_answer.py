"""An answer that many may want at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """One answer for all who want it at that time.

    Args:
        ask: Gets the answer.
        interval_s: It is asked no more often, however many want the answer.
    """

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]], interval_s: float) -> None:
        self._ask = ask
        self._interval_s = interval_s
        self._asking: asyncio.Task[T] | None = None
        self._again_at = 0.0

    async def read(self) -> T:
        """The answer, at most `interval_s` old if it has come. Raises as `ask` does."""
        if self._asking is None or (self._asking.done() and time.monotonic() >= self._again_at):
            self._asking = asyncio.create_task(self._ask())
            self._again_at = time.monotonic() + self._interval_s
        return await asyncio.shield(self._asking)  # one that has gone ends it for no other
