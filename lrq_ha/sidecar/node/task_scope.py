"""The lifetime of an incarnation: its tasks, and the reason of its end.

Rules: it ends once, and the first reason counts. A task that fails ends it; one that returns does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from lrq_ha.errors import IllegalEvent, LrqError

log = logging.getLogger("lrq_ha.node")

T = TypeVar("T")


class TaskScope:
    """The tasks of one incarnation. Create it in a running event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        return self._ended.done()

    @property
    def reason(self) -> str:
        """The reason of the end; empty before it."""
        return self._ended.result() if self._ended.done() else ""

    def end(self, reason: str) -> None:
        """Ends it."""
        if not self._ended.done():
            self._ended.set_result(reason)

    def fail(self, error: BaseException) -> None:
        """Ends it for an error; an unexpected error is logged with its place."""
        if isinstance(error, IllegalEvent) or not isinstance(error, LrqError):
            log.error("this incarnation fails", exc_info=error)
        self.end(str(error) or repr(error))

    async def ended(self) -> str:
        """Returns the reason when it is over. Cancelling a waiter does not end it."""
        return await asyncio.shield(self._ended)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs a task that ends with this scope at the latest."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def wait(self, task: asyncio.Future[Any], timeout_s: float | None = None) -> None:
        """Returns when the task is done, or this scope is over, or after the timeout."""
        await asyncio.wait({task, self._ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    async def stop(self) -> None:
        """Cancels every task; returns when they are gone."""
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
