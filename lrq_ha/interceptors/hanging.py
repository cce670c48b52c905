"""Ends a call on the door's thread that does not return: all clients wait for it, and other nodes that wait for this one.

Rules:

- A timer interrupts the process's main thread, where the door runs; in another thread nothing is watched. One timer serves all, which the calls need
  not set: a call costs nothing more.
- A call that neither returns nor lets Python's signals in (a C library that computes) cannot be ended so.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

HANGS_S = 1.0
_LOOKS_EVERY_S = HANGS_S / 4


class Hangs(BaseException):
    """Raised in the call. No `Exception`: a hanging call may catch those."""


class Alarm:
    """The timer. `look`: called in the main thread now and then, between any two instructions; an exception of it is raised there."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._before: object = None
        self._set = False

    def start(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGALRM, self._rings)
            signal.setitimer(signal.ITIMER_REAL, _LOOKS_EVERY_S, _LOOKS_EVERY_S)
            self._set = True

    def stop(self) -> None:
        if self._set:
            self._set = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)  # type: ignore[arg-type]

    def _rings(self, _number: int, _frame: FrameType | None) -> None:
        self._look()
