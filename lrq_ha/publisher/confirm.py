"""The result of one publish.

Rules: it is settled once, by the publisher's I/O thread or event loop; any thread or task may ask, wait or be called back. After a fork an open
result is never settled.

Not concurrent.futures.Future or asyncio.Future: a Condition per message, or a turn of the loop, costs more than the rest of a publish.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Generator
from typing import Any, Self

from lrq_ha.errors import LrqError
from lrq_ha.publisher.errors import ConfirmTimeout, anew, forked

_LOG = logging.getLogger(__name__)

_WAITERS = threading.Lock()  # one for all: taken only if a thread waits for a confirm that has not come
_PROCESS = os.getpid()  # asked once, not for each message


def _after_fork() -> None:
    """The thread that held the lock in the process before the fork is not in this one."""
    global _WAITERS, _PROCESS
    _WAITERS, _PROCESS = threading.Lock(), os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class BaseConfirm:
    """Tells when a message is safe.

    Attributes:
        replication_id: The ID that the message carries in its header x-lrq-id.
        done: Whether it was confirmed or failed.
    """

    __slots__ = ("_callbacks", "_error", "_explain", "_process", "done", "observed", "replication_id")

    def __init__(self, replication_id: str, explain: Callable[[], LrqError | None]) -> None:
        self.replication_id = replication_id
        self.done = False
        self.observed = False  # whether the result was requested; flush() raises only errors that were not
        self._error: LrqError | None = None
        self._callbacks: list[Callable[[], object]] | None = None
        self._explain = explain
        self._process = _PROCESS

    def __repr__(self) -> str:
        state = "waiting" if not self.done else "confirmed" if self._error is None else f"failed, {self._error!r}"
        return f"<{type(self).__name__} {self.replication_id}: {state}>"

    def settle(self, error: LrqError | None) -> bool:
        """Called by the publisher: confirmed (None) or failed. Returns whether `call_back` has callbacks to call."""
        self._error = error
        self.done = True  # before looking at the callbacks: a caller that adds one looks at `done` after adding it
        return self._callbacks is not None

    def call_back(self) -> None:
        """Calls every callback, each once."""
        with _WAITERS:
            callbacks, self._callbacks = self._callbacks or [], None
        for callback in callbacks:
            try:
                callback()
            except Exception:
                _LOG.exception("A callback of message %s failed", self.replication_id)

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Has `callback(confirm)` called once it is done: at once if it is, else on the publisher's I/O thread or event loop, which it must
        not block.
        """
        self._when_done(lambda: callback(self))

    def _when_done(self, callback: Callable[[], object]) -> None:
        with _WAITERS:
            self._callbacks = [*(self._callbacks or ()), callback]
        if self.done:
            self.call_back()

    def _forget(self, callback: Callable[[], object]) -> None:
        """A callback whose waiter has stopped is not called, and not kept: a caller may ask every second for an hour."""
        with _WAITERS:
            self._callbacks = [each for each in self._callbacks or () if each is not callback] or None

    @property
    def error(self) -> LrqError | None:
        """Why the message failed; None if it was confirmed or is not done."""
        self.observed = self.observed or self.done
        return self._error

    def _to_wait(self) -> bool:
        """Whether it is not done yet. Raises PublisherClosed if it never will be."""
        if not self.done and self._process != _PROCESS:
            raise forked(f"Message {self.replication_id}")
        return not self.done

    def _outcome(self) -> str:
        self.observed = True
        if self._error is not None:
            raise anew(self._error)  # many messages may share it
        return self.replication_id

    def _timed_out(self, timeout_s: float | None) -> LrqError:
        return self._explain() or ConfirmTimeout(f"No confirm of message {self.replication_id} within {timeout_s} s")


class Confirm(BaseConfirm):
    """Tells when a message is safe. Any thread may use it."""

    __slots__ = ()

    def result(self, timeout_s: float | None = None) -> str:
        """Waits for the confirm.

        Args:
            timeout_s: Seconds to wait; None: as long as it takes.

        Returns:
            The replication ID.

        Raises:
            NackedError: The broker refused the message.
            FencedError: Another process took the producer name.
            Unconfirmed: The publisher was closed first.
            NoPrimary: Not done in time, and no node takes publishes now.
            ConfirmTimeout: Not done in time. (After either of these the message is still being sent.)
            PublisherClosed: This is a forked process, and the message was not done before the fork.
        """
        if self._to_wait():
            event = threading.Event()
            wake = event.set
            self._when_done(wake)
            if not event.wait(timeout_s):
                self._forget(wake)
                if not self.done:
                    raise self._timed_out(timeout_s)
        return self._outcome()


class AsyncConfirm(BaseConfirm):
    """Tells when a message is safe: `await confirm`, in the publisher's event loop or any other."""

    __slots__ = ()

    async def result(self, timeout_s: float | None = None) -> str:
        """Waits for the confirm; arguments, result and errors as of `Confirm.result`. Cancelling it changes nothing for the message."""
        if self._to_wait():
            loop, thread = asyncio.get_running_loop(), threading.get_ident()
            waiter = loop.create_future()

            def set_waiter() -> None:
                if not waiter.done():
                    waiter.set_result(None)

            def wake() -> None:
                if threading.get_ident() == thread:
                    set_waiter()
                else:
                    loop.call_soon_threadsafe(set_waiter)

            self._when_done(wake)
            try:
                async with asyncio.timeout(timeout_s):
                    await waiter
            except TimeoutError:
                if not self.done:
                    raise self._timed_out(timeout_s) from None
            finally:
                self._forget(wake)
        return self._outcome()

    def __await__(self) -> Generator[Any, None, str]:
        return self.result().__await__()
