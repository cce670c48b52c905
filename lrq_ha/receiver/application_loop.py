"""The event loop of an application, as the threads of a receiver see it: they call methods on it, and wait for the results.

Rules:

- The loop is that of the first call of `bind`, and stays it. The loop never waits for a thread.
- A loop that is closed, or has not run for STOPPED_S, is gone. A call that is under way then ends with LoopGone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import threading
import time
from collections.abc import Callable, Coroutine

from lrq_ha.errors import IllegalEvent

from .errors import Stop

LOOK_S = 0.25
STOPPED_S = 1.0  # between two calls of loop.run_until_complete a loop stands still for a moment

_CALLER: contextvars.ContextVar[threading.Thread | None] = contextvars.ContextVar("lrq_ha_receiver_caller", default=None)


class LoopGone(Stop):
    """The application's event loop was closed, or has stopped."""


class ApplicationLoop:
    """The event loop of one receiver.

    Args:
        name: Of the receiver.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.copy_context()
        self._ran = 0.0  # when the loop was seen to run

    def bind(self) -> None:
        """Takes the loop that is running. From now on the receiver belongs to it.

        Raises:
            IllegalEvent: No loop is running in this thread, or the receiver belongs to another one.
        """
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            raise IllegalEvent(f"No event loop is running for receiver {self._name}", todo="Call it in a coroutine") from None
        if self._loop is None:
            self._loop, self._ran, self._context = running, time.monotonic(), contextvars.copy_context()
        elif self._loop is not running:
            raise IllegalEvent(
                f"Receiver {self._name} belongs to another event loop",
                todo="Make a receiver for each loop, each with a name of its own, or use asyncio.run_coroutine_threadsafe",
            )

    def is_gone(self) -> bool:
        """Whether the loop was closed, or has stopped. Any thread may ask."""
        loop = self._loop
        if loop is None:
            return False
        if loop.is_running():
            self._ran = time.monotonic()
            return False
        return loop.is_closed() or time.monotonic() - self._ran > STOPPED_S

    def call(self, method: Callable[..., object], *arguments: object) -> object:
        """Calls a method on the loop, and awaits what it returns if that can be awaited. For the threads of the receiver.

        Raises:
            LoopGone: The loop is gone, or a SystemExit or KeyboardInterrupt of the method ends it.
            CancelledError: Of concurrent.futures: the method's coroutine was cancelled.
        """
        loop, context = self._loop, self._context.copy()
        if loop is None or self.is_gone():
            raise LoopGone(f"the event loop of receiver {self._name} was closed or has stopped")
        context.run(_CALLER.set, threading.current_thread())
        coroutine = _call_method(method, arguments)
        try:
            future = context.run(asyncio.run_coroutine_threadsafe, coroutine, loop)
        except RuntimeError as error:  # closed in this moment
            coroutine.close()
            raise LoopGone(f"the event loop of receiver {self._name} is closed") from error
        while not concurrent.futures.wait([future], LOOK_S).done:
            if self.is_gone():
                self._give_up(coroutine, future)
                raise LoopGone(f"the event loop of receiver {self._name} was closed or has stopped")
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise concurrent.futures.CancelledError(f"{getattr(method, '__name__', method)} was cancelled") from None
        except (KeyboardInterrupt, SystemExit) as error:
            raise LoopGone(f"the event loop of receiver {self._name} ends: {error!r}") from error

    def _give_up(self, coroutine: Coroutine[object, object, object], future: concurrent.futures.Future[object]) -> None:
        """The coroutine must not go on if the loop runs again: its list is given again by another receiver."""
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
            coroutine.close()
        elif self._loop is not None and not self._loop.is_closed():
            future.cancel()

    def wake(self, callback: Callable[[], object]) -> None:
        """Calls `callback` on the loop, soon. From any thread; nothing happens if the loop is closed."""
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(callback)
            except RuntimeError:
                pass  # it is closed: nothing waits there


def calling_thread() -> threading.Thread | None:
    """The thread of the receiver that waits for the running coroutine; None: none does."""
    return _CALLER.get()


async def _call_method(method: Callable[..., object], arguments: tuple[object, ...]) -> object:
    found = method(*arguments)
    return await found if inspect.isawaitable(found) else found
