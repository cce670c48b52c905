"""Both publishers behind the methods of the sync one, so that every test of what a publisher does runs over both.

Rules: nothing is added and nothing left out: each method runs its namesake on an event loop in a thread. The loop is the test's witness: what it
complains of (a task that was destroyed, an exception that nobody took) fails the test, and so does a task that is left when all are closed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

from lrq_ha.publisher import AsyncConfirm, AsyncFullSyncContext, AsyncPublisher, FullSyncRequest, NoPrimary, Publisher, Transaction
from lrq_ha.publisher.core import BasePublisher

T = TypeVar("T")

ENDS_S = 60.0  # the tasks of a connection that was cut may need a moment
PATIENCE_S = 60.0  # for what must come: a machine may stand still for half a minute


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self.complaints.append(str(context)))
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _idle(self) -> None:
        deadline = self._loop.time() + ENDS_S
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            assert self._loop.time() < deadline, f"tasks are left: {tasks}"
            await asyncio.sleep(0.01)

    def end(self) -> None:
        try:
            self.run(self._idle())
        finally:
            self.run(self._loop.shutdown_default_executor())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        assert self.complaints == []


class BlockingConfirm:
    """A Confirm over an AsyncConfirm."""

    def __init__(self, confirm: AsyncConfirm, loop: LoopThread) -> None:
        self._confirm, self._loop = confirm, loop

    def __repr__(self) -> str:
        return repr(self._confirm)

    @property
    def replication_id(self) -> str:
        return self._confirm.replication_id

    @property
    def done(self) -> bool:
        return self._confirm.done

    @property
    def error(self) -> BaseException | None:
        return self._confirm.error

    def add_done_callback(self, callback: Callable[[BlockingConfirm], object]) -> None:
        self._confirm.add_done_callback(lambda _: callback(self))

    def result(self, timeout_s: float | None = None) -> str:
        return self._loop.run(self._confirm.result(timeout_s))


class BlockingContext:
    """A FullSyncContext over an AsyncFullSyncContext."""

    def __init__(self, context: AsyncFullSyncContext, loop: LoopThread) -> None:
        self._context, self._loop = context, loop

    @property
    def cancelled(self) -> bool:
        return self._context.cancelled

    @property
    def progress(self) -> object:
        return self._context.progress

    def transmit(self, payload: bytes, progress: object = None) -> BlockingConfirm:
        return BlockingConfirm(self._loop.run(self._context.transmit(payload, progress)), self._loop)

    def complete(self) -> BlockingConfirm:
        return BlockingConfirm(self._loop.run(self._context.complete()), self._loop)

    def cancel(self) -> None:
        async def cancel() -> None:
            self._context.cancel()

        self._loop.run(cancel())


class BlockingTransaction:
    """A Transaction whose confirm blocks."""

    def __init__(self, transaction: Transaction[AsyncConfirm], loop: LoopThread) -> None:
        self._transaction, self._loop = transaction, loop
        self.transmit_log_entry_message = transaction.transmit_log_entry_message

    @property
    def confirm(self) -> BlockingConfirm:
        return BlockingConfirm(self._transaction.confirm, self._loop)


class BlockingPublisher:
    """A Publisher over an AsyncPublisher."""

    def __init__(self, loop: LoopThread, *arguments: Any, **options: Any) -> None:
        self.inner = AsyncPublisher(*arguments, **options)
        self.loop = loop
        loop.run(self.inner.__aenter__())

    def publish(self, *arguments: Any, **options: Any) -> BlockingConfirm:
        return self._confirm(self.inner.publish(*arguments, **options))

    def transmit_log_entry_message(self, *arguments: Any) -> BlockingConfirm:
        return self._confirm(self.inner.transmit_log_entry_message(*arguments))

    def transmit_log_entry_messages(self, *arguments: Any) -> BlockingConfirm:
        return self._confirm(self.inner.transmit_log_entry_messages(*arguments))

    def _confirm(self, work: Coroutine[Any, Any, AsyncConfirm]) -> BlockingConfirm:
        return BlockingConfirm(self.loop.run(work), self.loop)

    @contextmanager
    def transaction(self) -> Iterator[BlockingTransaction]:
        manager = self.inner.transaction()
        transaction = self.loop.run(manager.__aenter__())
        try:
            yield BlockingTransaction(transaction, self.loop)
        except BaseException as error:
            if not self.loop.run(manager.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            self.loop.run(manager.__aexit__(None, None, None))

    def on_full_sync(self, provider: Callable[[FullSyncRequest, Any], object]) -> None:
        async def provide(request: FullSyncRequest, context: AsyncFullSyncContext) -> None:
            await asyncio.to_thread(provider, request, BlockingContext(context, self.loop))

        async def register() -> None:
            self.inner.on_full_sync(provide)

        self.loop.run(register())

    def flush(self, timeout_s: float | None = None) -> None:
        self.loop.run(self.inner.flush(timeout_s))

    def close(self, timeout_s: float = 10.0) -> None:
        self.loop.run(self.inner.close(timeout_s))

    def __enter__(self) -> BlockingPublisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.loop.run(self.inner.__aexit__(kind, error, trace))


def no_primary(connect: Callable[[float], object]) -> NoPrimary:
    """What a publisher says that finds no primary. `connect` is given longer and longer, until it has heard of every address."""
    for timeout_s in (1.0, 5.0, PATIENCE_S):
        try:
            connect(timeout_s)
        except NoPrimary as error:
            if timeout_s == PATIENCE_S or not {"", "not tried yet", "no answer yet"} & set(error.answers.values()):
                return error
    raise AssertionError("it found one")


def inside(publisher: Publisher | BlockingPublisher) -> BasePublisher[Any]:
    """The publisher itself, for what a test must see of its inside."""
    return publisher.inner if isinstance(publisher, BlockingPublisher) else publisher
