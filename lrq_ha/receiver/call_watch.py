"""Tells operators of a listener's method that does not return.

Rule: a call is told of, never ended. The application may have a reason to take long, and its data may be half written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger("lrq_ha.receiver")

HANG_S = 60.0
LOOK_S = 0.5


@dataclass
class _Call:
    method: str
    since: float
    tell_after_s: float


class CallWatch:
    """The call of a listener's method that is under way in one source's thread. Another thread looks.

    Args:
        receiver: Its name.
        queue: The receive queue.
        clock: Seconds, as of time.monotonic.
    """

    def __init__(self, receiver: str, queue: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._receiver, self._queue = receiver, queue
        self._clock = clock
        self._call: _Call | None = None

    @contextmanager
    def watch_call(self, method: str) -> Iterator[None]:
        """Surrounds a call of `method`."""
        call = self._call = _Call(method, self._clock(), HANG_S)
        try:
            yield
        finally:
            self._call = None
            if call.tell_after_s > HANG_S:
                log.info("receiver %s: %s of %s has ended after %.0f s", self._receiver, method, self._queue, self._clock() - call.since)

    def warn_of_hang(self) -> None:
        """Logs a warning of a call that has not ended for 60 s, and again each time its duration has doubled."""
        call = self._call
        if call is None or (lasted_s := self._clock() - call.since) < call.tell_after_s:
            return
        call.tell_after_s = 2 * max(call.tell_after_s, lasted_s)
        log.warning(
            "receiver %s: %s of %s has not returned for %.0f s. Nothing else of that queue is given meanwhile. Look where the listener waits",
            self._receiver, call.method, self._queue, lasted_s,
        )  # fmt: skip
