"""Serving full syncs with the async publisher: one task per request, in which the client's provider runs. The rules are those of `provider.py`."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher.confirm import AsyncConfirm
from lrq_ha.publisher.fullsync import FullSyncRequest
from lrq_ha.publisher.messages import LogEntries
from lrq_ha.publisher.provider import PROVIDER_END_S, BaseContext, BaseFullSyncs

Send = Callable[[LogEntries], Awaitable[AsyncConfirm]]


class AsyncFullSyncContext(BaseContext[AsyncConfirm]):
    """A provider's interface to supply the data of one full sync. Any task may use it; one at a time if the order matters.

    Attributes:
        request: The request.
        progress: The provider's last progress; shown in the log.
    """

    def __init__(
        self, request: FullSyncRequest, finished: Callable[[FullSyncRequest], None], send: Send, send_status: Callable[[bytes], object]
    ) -> None:
        super().__init__(request, finished, send_status)
        self._send = send
        self._lock = asyncio.Lock()  # around sending: nothing follows the end marker

    async def transmit(self, payload: bytes, progress: object = None) -> AsyncConfirm:
        """Sends one entry of the snapshot. Waits while the publisher's window is full. Arguments and errors as of `FullSyncContext.transmit`."""
        return await self.transmit_many([payload], progress)

    async def transmit_many(self, payloads: Iterable[bytes], progress: object = None) -> AsyncConfirm:
        """Sends several entries of the snapshot as one transaction. Arguments and errors as of `FullSyncContext.transmit_many`."""
        if progress is not None:
            self.progress = progress
        async with self._lock:
            self._check()
            self._reap()
            confirm = await self._send(self._entries(payloads))
            self._unconfirmed.append(confirm)
            return confirm

    async def complete(self) -> AsyncConfirm:
        """Ends the full sync: waits until every entry is confirmed, then sends the end marker, and informs the server.

        Result and errors as of `FullSyncContext.complete`.
        """
        async with self._lock:
            self._check()
            while self._unconfirmed:
                with suppress(LrqError):
                    await self._unconfirmed[0]
                self._reap()
            self._check()
            confirm = await self._send(self._marker())
            self._completed()
            self._report(pb.FullSyncRequest.COMPLETED)
            return confirm


AsyncProvider = Callable[[FullSyncRequest, AsyncFullSyncContext], Coroutine[Any, Any, object]]


class AsyncFullSyncs(BaseFullSyncs[AsyncFullSyncContext]):
    """Runs the provider in a task per request, in the context that `on_full_sync` was called in."""

    def __init__(self, client_name: str, provider: AsyncProvider, send: Send, send_status: Callable[[bytes], object]) -> None:
        super().__init__(client_name)
        self._provider = provider
        self._send = send
        self._send_status = send_status
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = contextvars.copy_context()

    def _begin(self, request: FullSyncRequest) -> AsyncFullSyncContext:
        context = AsyncFullSyncContext(request, self._finished, self._send, self._send_status)
        name = f"lrq-full-sync-{request.destination}"
        task = asyncio.get_running_loop().create_task(self._serve(context), name=name, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return context

    async def _serve(self, context: AsyncFullSyncContext) -> None:
        with self._serving(context):
            await self._provider(context.request, context)

    async def close(self) -> None:
        """Cancels all, waits a little for the providers, then cancels their tasks."""
        self._end_all()
        tasks = self._tasks - {asyncio.current_task()}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=PROVIDER_END_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
