"""The async publisher, on aiormq (the protocol layer of aio-pika): for the tasks of one event loop.

Rules:

 - Everything happens on that loop, so no other task touches a window between two awaits. `publish` awaits only before it gives the replication
   ID: when it is cancelled, nothing was sent; when it returns, the message will be sent whatever is cancelled then.
 - Publishes that wait for room in a window form a queue (`_turns`): small messages never overtake a large one.
 - A loop over `publish` never has to wait while there is room. So it yields to the other tasks, the connection's among them, from time
   to time.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final, Self

import pika

from lrq_ha.errors import IllegalEvent, LrqError
from lrq_ha.publisher.async_link import AsyncLink, Handlers, connection_url
from lrq_ha.publisher.async_provider import AsyncFullSyncs, AsyncProvider
from lrq_ha.publisher.confirm import AsyncConfirm
from lrq_ha.publisher.core import BasePublisher, Draft, Lane
from lrq_ha.publisher.errors import FencedError, InvalidArgument, PublisherClosed, anew
from lrq_ha.publisher.messages import Addressed, LogEntries
from lrq_ha.publisher.provider import LOOK_S
from lrq_ha.publisher.transaction import Transaction
from lrq_ha.publisher.window import Settled, Window
from lrq_ha.publisher.wire import Outgoing
from lrq_ha.routing import names

_LOG = logging.getLogger(__name__)

GIVE_WAY_EVERY: Final = 64  # publishes: about a millisecond of them


class AsyncPublisher(BasePublisher[AsyncConfirm]):
    """Publishes to the node of a group that is primary, each message once, in order, across failovers. For the tasks of one event loop.

    `async with AsyncPublisher(…) as publisher:` connects and closes it, as `connect` and `close` do.
    """

    def _begin(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # from `connect` on
        self._urls = {lane: [connection_url(node, lane.addresses.vhost, self._heartbeat_s) for node in self._nodes] for lane in self._lanes}
        self._links: dict[Lane[AsyncConfirm], AsyncLink] = {}
        self._tasks: dict[Lane[AsyncConfirm], asyncio.Task[None]] = {}
        self._full_syncs: AsyncFullSyncs | None = None
        self._ticks: asyncio.Task[None] | None = None
        self._published = 0

    def _new_confirm(self, replication_id: str, explain: Callable[[], LrqError | None]) -> AsyncConfirm:
        return AsyncConfirm(replication_id, explain)

    # ---- the beginning

    async def connect(self) -> Self:
        """Waits until a node has taken us. From here on the publisher belongs to this event loop.

        Raises:
            NoPrimary: No node did within `connect_timeout_s`; it lists each node's answer. The publisher is closed.
            PublisherClosed: It was closed before.
        """
        if self._failure is not None:
            raise anew(self._failure)
        if self._loop is not None:
            raise IllegalEvent(f"Publisher {self.producer} is connected already")
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()  # for callbacks
        self._changed = asyncio.Event()  # set and cleared at once: wakes all that wait for a change
        self._turns = {lane: asyncio.Lock() for lane in self._lanes}
        handlers = Handlers(self._change, self._settle, self._fenced)

        def link(lane: Lane[AsyncConfirm], learn: Sequence[Window[Outgoing[AsyncConfirm]]]) -> AsyncLink:
            return AsyncLink(lane, self._urls[lane], learn, self._login_timeout_s, self._confirm_timeout_s, handlers, self._tls)

        self._links = {self._log: link(self._log, [self._log.window, self._own.window]), self._own: link(self._own, [self._own.window])}
        try:
            self._start(self._log)
            await self._until(lambda: self._log.ready or self._failure is not None, self._connect_timeout_s)
            failure = self._failure or self._log.no_primary()
        except BaseException:
            await self._shut_down(PublisherClosed("The publisher was not connected"))
            raise
        if failure is not None:
            await self._shut_down(failure)
            raise failure
        return self

    def _start(self, lane: Lane[AsyncConfirm]) -> None:
        task = asyncio.create_task(self._links[lane].run(), name=f"lrq-publisher-{lane.window.producer}")
        task.add_done_callback(self._task_ended)
        self._tasks[lane] = task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A task of the publisher ends with it. Otherwise it has a bug, or all tasks of the loop were cancelled: no task may wait for it."""
        if task.cancelled() and self._failure is not None:
            return
        error = None if task.cancelled() else task.exception()
        if error is None:
            failure = PublisherClosed("The publisher's tasks were cancelled", todo="Cancel tasks of your own only, and make a new publisher")
        else:
            failure = PublisherClosed(f"The publisher's connection failed: {error!r}")
            failure.__cause__ = error
        _LOG.error("%s", failure, exc_info=error)
        self._failure = self._failure or failure
        for each in self._tasks.values():
            each.cancel()
        self._settle(self._fail_all(None))

    # ---- publishing

    async def publish(
        self, exchange: str, routing_key: str, body: bytes, properties: pika.BasicProperties | None = None, *, mandatory: bool = True
    ) -> AsyncConfirm:
        """Publishes to an exchange of the client's vhost. Waits only while the window is full.

        Arguments and errors as of `Publisher.publish`. If it is cancelled, nothing was sent.
        """
        return await self._put(self._draft_publish(exchange, routing_key, body, properties, mandatory))

    async def transmit_log_entry_message(self, payload: bytes, destinations: Sequence[str], path: Sequence[str] = ()) -> AsyncConfirm:
        """Sends one log entry to each destination site (remote_ids). Waits and raises as `publish` does.

        Args:
            path: The groups that the entry has passed before this one (`Update.path` of a receiver): none of them takes it again.
        """
        return await self.transmit_log_entry_messages([(payload, destinations)], path)

    async def transmit_log_entry_messages(self, entries: Sequence[Addressed], path: Sequence[str] = ()) -> AsyncConfirm:
        """Sends (payload, destinations) pairs as one transaction: a destination gets its part of it whole, or not at all. Equal
        payloads are stored once. Waits and raises as `publish` does; `path` as in `transmit_log_entry_message`."""
        return await self._transmit(names.SEND_LOG_ENTRIES, LogEntries.checked(entries, path))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction[AsyncConfirm]]:
        """`async with publisher.transaction() as tx: tx.transmit_log_entry_message(…)`: sent at the end of the block, its result is
        `tx.confirm`; an exception or a cancellation in the block discards it.
        """
        transaction: Transaction[AsyncConfirm] = Transaction()
        with transaction.collecting():
            yield transaction
        entries = transaction.entries
        if entries is not None:
            transaction.sent(await self._transmit(names.SEND_LOG_ENTRIES, entries))

    async def _transmit(self, queue: str, entries: LogEntries) -> AsyncConfirm:
        draft = self._draft_entries(queue, entries)
        self._check_loop()
        self._announce(False)
        return await self._put(draft)

    async def _put(self, draft: Draft[AsyncConfirm]) -> AsyncConfirm:
        self._check_loop()
        self._published += 1
        if self._published % GIVE_WAY_EVERY == 0:
            await asyncio.sleep(0)
        turn = self._turns[draft.lane]
        if turn.locked() or not self._has_room(draft):
            await self._wait_for_room(draft, turn)
        return self._send(draft)

    async def _wait_for_room(self, draft: Draft[AsyncConfirm], turn: asyncio.Lock) -> None:
        try:
            async with asyncio.timeout(self._publish_timeout_s), turn:
                while not self._has_room(draft):
                    await self._changed.wait()
        except TimeoutError:
            raise self._no_room(draft) from None

    def _send(self, draft: Draft[AsyncConfirm]) -> AsyncConfirm:
        confirm = self._take(draft)
        if draft.lane not in self._tasks:
            self._start(draft.lane)
        self._links[draft.lane].wake()
        return confirm

    def _check_loop(self) -> None:
        if self._loop is None:
            if self._failure is not None:
                raise anew(self._failure)
            raise IllegalEvent(f"Publisher {self.producer} is not connected", todo="Use `async with AsyncPublisher(…)`, or await connect()")
        if asyncio.get_running_loop() is not self._loop:
            raise IllegalEvent(
                f"Publisher {self.producer} belongs to another event loop",
                todo="Make one per loop, each with a producer name of its own, or use asyncio.run_coroutine_threadsafe",
            )

    # ---- full syncs

    def on_full_sync(self, provider: AsyncProvider) -> None:
        """Runs `await provider(request, context)`, in a task of its own, for every full sync that a destination requests from this client
        from now on; earlier requests are made again. It must end with `await context.complete()` (or `context.cancel()`).
        """
        self._require_client_name("Full syncs")
        self._check_process()
        self._check_loop()
        if self._full_syncs is not None:
            raise InvalidArgument("There is a full sync provider already", todo="One provider per publisher")
        syncs = self._full_syncs = AsyncFullSyncs(
            self.client_name, provider, functools.partial(self._transmit, names.SEND_SNAP_SYNC), self._send_status
        )
        self._announce(True)
        self._links[self._log].consume(names.STATUS, syncs.replay, syncs.status)
        self._ticks = asyncio.create_task(self._tick(syncs))
        self._ticks.add_done_callback(self._task_ended)

    def request_full_sync(self, destination: str, reason: str = "") -> AsyncConfirm:
        """Asks this client's provider for a full sync to a site. A plain call; arguments and errors as of `Publisher.request_full_sync`."""
        self._check_loop()
        return self._send(self._draft_request(destination, reason))

    async def _tick(self, syncs: AsyncFullSyncs) -> None:
        while True:
            syncs.tick()
            await asyncio.sleep(LOOK_S / 4)

    def _announce(self, provides: bool) -> None:
        draft = self._announcement(provides)
        if draft is not None:
            self._send(draft)

    def _send_status(self, body: bytes) -> AsyncConfirm:
        """Statuses are few and small, so they pass a full window: a provider can always report its end."""
        return self._send(self._draft_status(body))

    # ---- waiting

    async def flush(self, timeout_s: float | None = None) -> None:
        """Waits until everything published before this call is settled. Arguments and errors as of `Publisher.flush`."""
        self._check_process()
        self._check_loop()
        marks = self._marks()
        await self._until(lambda: not self._behind(marks), timeout_s)
        late = self._behind(marks)
        if late:
            raise self._not_flushed(late, timeout_s)
        unseen = self._unseen_failure()
        if unseen is not None:
            raise anew(unseen)

    async def _until(self, done: Callable[[], bool], timeout_s: float | None) -> None:
        """Waits for `done()`, at most `timeout_s` seconds. The caller checks the outcome."""
        try:
            async with asyncio.timeout(timeout_s):
                while not done():
                    await self._changed.wait()
        except TimeoutError:
            pass

    # ---- what links call

    def _change(self) -> None:
        self._changed.set()
        self._changed.clear()

    def _settle(self, settled: Sequence[Settled[Outgoing[AsyncConfirm]]]) -> None:
        for confirm in self._settled(settled):
            self._context.copy().run(confirm.call_back)
        self._change()

    def _fenced(self, error: FencedError) -> None:
        _LOG.error("%s", error)
        self._failure = error
        for task in self._tasks.values():
            task.cancel()
        self._settle(self._fail_all(error))

    # ---- the end

    async def close(self, timeout_s: float = 10.0) -> None:
        """Waits for unconfirmed messages, then ends the connections, also if it is cancelled meanwhile. A second call does nothing.

        Args:
            timeout_s: Seconds to wait for confirms; 0: do not.

        Raises:
            NoPrimary, WaitTimeout: Not all was confirmed in time. The publisher is still closed, and the Confirms of those
                messages fail with Unconfirmed.
            IllegalEvent: It belongs to another event loop. It is not closed.
            LrqError: As from `flush`.
        """
        closed = PublisherClosed("The publisher is closed")
        if self._loop is None:
            self._failure = self._failure or closed
        if not self._links or os.getpid() != self._process:
            return
        self._check_loop()
        try:
            if self._full_syncs is not None:
                await self._full_syncs.close()
            await self.flush(timeout_s)
        finally:
            await self._shut_down(closed)

    async def _shut_down(self, why: LrqError) -> None:
        failure = self._failure = self._failure or why
        self._settle(self._fail_all(None if isinstance(failure, PublisherClosed) else failure))
        tasks = [*self._tasks.values(), *([self._ticks] if self._ticks else [])]
        self._links = {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await self.close()
        except LrqError:
            if error is None:
                raise
            _LOG.exception("While closing the publisher after another exception")  # it must not be hidden
