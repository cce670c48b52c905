"""The receiver for the tasks of an event loop: a Receiver, whose threads call the listener on that loop.

Rules:

- The machine, the reading and the position's commits are the Receiver's, in its threads. Only the methods of an AsyncListener run on the loop.
- Nothing here blocks the loop. Calls that must wait for a broker or a database do it in a thread (`resync`, `forget`, the end of `stop`).
- When the loop is closed or has stopped, every thread ends; the list that the listener had is given again at the next start.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Self

from lrq_ha.replication.positions import Position

from .application_loop import ApplicationLoop, calling_thread
from .async_listener import AsyncListener, LoopListener
from .listener import Listener, PositionStore
from .receiver import Receiver, SourceStatus, parse_goal
from .source_reader import SourceReader

log = logging.getLogger("lrq_ha.receiver")

JOIN_S = 0.02


class AsyncReceiver:
    """Gives a listener everything that a client of other sites transmits to this site: a whole snapshot, then every delta, in order.

    Use it as an async context manager, then await `run`. It belongs to the event loop of its first call.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        client_name: str,
        name: str,
        listener: AsyncListener | Listener,
        *,
        sources: Sequence[str] | None = None,
        positions: PositionStore | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Makes a receiver; `start` or `run` connects.

        Args:
            nodes: Addresses of the sink group's doors: amqp:// or amqps:// URLs with credentials.
            client_name: The log replication client at the sources.
            name: Of the application, permanently: 1 to 128 letters, digits and ._:@-, a letter or digit first.
            listener: The application. The methods of an AsyncListener run on the event loop. Those of any other listener (SqlListener,
                TableListener) may block: they run in a thread for each source.
            sources: Remote ids to receive from; None: every source, also those that appear later.
            positions: Where the position is kept, for a listener that does not keep its own, and is used in threads; None: in the log of the sink
                group.
            tls: For amqps:// addresses; None: the system's trusted CAs.

        Raises:
            MalformedInput: A name, an address, or a second place for the position.
        """
        self._loop = ApplicationLoop(name)
        called = LoopListener(listener, self._loop) if isinstance(listener, AsyncListener) else listener
        self._threads = _Threads(self._loop, self._notify_change, nodes, client_name, name, called, sources=sources, positions=positions, tls=tls)
        self._changed = asyncio.Event()  # set and cleared at once: wakes all that wait for a change
        self._waiting = 0  # how many do

    async def __aenter__(self) -> Self:
        self._loop.bind()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def start(self) -> None:
        """Begins to look for queues, and to read them, in threads. A second call changes nothing.

        Raises:
            IllegalEvent: No event loop is running, or the receiver belongs to another one.
            ReceiverError: It was stopped, or made in another process.
        """
        self._loop.bind()
        self._threads.start()

    async def run(self) -> None:
        """Receives until `stop` is called by another task, or by the listener. A cancelled `run` goes on receiving until `stop`.

        Raises:
            Fenced: Another process uses the name.
            OtherLog: A queue has another log than the one of the committed position.
            Stop: The listener has raised it.
            IllegalEvent: The receiver belongs to another event loop.
        """
        self.start()
        await self._wait_until(lambda: self._threads.has_ended() or self._threads.failure() is not None, None)
        failure = self._threads.failure()
        if failure is not None:
            await self.stop()
            raise failure

    async def stop(self, timeout_s: float = 30.0) -> bool:
        """Ends after the lists under way. The listener, too, may call it; then the list that it has is finished afterwards.

        Args:
            timeout_s: How long to wait.

        Returns:
            Whether every thread has ended, and every position is written, within `timeout_s`.

        Raises:
            IllegalEvent: The receiver belongs to another event loop.
        """
        self._loop.bind()
        caller = calling_thread()  # it waits for this coroutine
        threads = [thread for thread in self._threads.end() if thread is not caller]
        self._wake()
        deadline = asyncio.get_running_loop().time() + timeout_s
        while any(thread.is_alive() for thread in threads):
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(JOIN_S)
        if caller is not None and caller.is_alive():
            return True
        return await asyncio.to_thread(self._threads.close, max(0.0, deadline - asyncio.get_running_loop().time()))

    def status(self) -> dict[str, SourceStatus]:
        """The status of each source, by remote id."""
        return self._threads.status()

    @property
    def problem(self) -> str:
        """Why no queue can be looked for; empty if none is in the way."""
        return self._threads.problem

    async def wait_for(
        self, source: str, position: Position | None = None, replication_id: str | None = None, timeout_s: float = 30.0
    ) -> bool:
        """Waits until the application has committed what a source transmitted: arguments, result and errors as of `Receiver.wait_for`.

        Raises:
            IllegalEvent: The receiver belongs to another event loop.
        """
        self._loop.bind()
        has_come = parse_goal(position, replication_id)

        def is_over() -> bool:
            return self._threads.has_reached(source, has_come) or self._threads.has_ended(source)

        await self._wait_until(is_over, timeout_s)
        return self._threads.has_reached(source, has_come)

    async def resync(self, source: str | None = None, reason: str = "") -> None:
        """Demands a full sync from a source, or from all that were found: arguments and errors as of `Receiver.resync`.

        Raises:
            IllegalEvent: The receiver belongs to another event loop.
        """
        self._loop.bind()
        await asyncio.to_thread(self._threads.resync, source, reason)

    def skip(self, source: str, position: Position) -> None:
        """Leaves out updates that the listener refuses: arguments and errors as of `Receiver.skip`. Does not wait; `on_error` may call it."""
        self._threads.skip(source, position)

    async def forget(self, source: str) -> bool:
        """Removes the committed position of a source: arguments, result and errors as of `Receiver.forget`."""
        self._loop.bind()
        return await asyncio.to_thread(self._threads.forget, source)

    # ---- changes -----------------------------------------------------------------------------------------------------

    async def _wait_until(self, done: Callable[[], bool], timeout_s: float | None) -> None:
        """Waits until `done()`, for `timeout_s` at most; None: without a limit."""
        self._waiting += 1  # before the first look: a change behind the look wakes
        try:
            async with asyncio.timeout(timeout_s):
                while not done():
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1

    def _notify_change(self) -> None:
        """In a thread of the receiver."""
        if self._waiting:
            self._loop.wake(self._wake)

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()


class _Threads(Receiver):
    """The receiver behind an AsyncReceiver.

    Args:
        loop: The application's.
        notify: Is called in the reader's thread after each commit and each change of a state.
        arguments, options: As of Receiver.
    """

    def __init__(
        self,
        loop: ApplicationLoop,
        notify: Callable[[], None],
        nodes: Sequence[str],
        client_name: str,
        name: str,
        listener: Listener,
        *,
        sources: Sequence[str] | None,
        positions: PositionStore | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(nodes, client_name, name, listener, sources=sources, positions=positions, tls=tls)
        self._loop = loop
        self._notify = notify

    def end(self) -> list[threading.Thread]:
        """Tells every thread to end after the list under way, and returns them. Does not wait."""
        return self._end_threads()

    def has_ended(self, source: str | None = None) -> bool:
        """Whether the receiver, or its reading of `source`, was told to end or has failed."""
        reader = self._reader_of(source) if source is not None else None
        return self._ending.is_set() or (reader is not None and reader.failure is not None)

    def close(self, timeout_s: float) -> bool:
        """Writes the last positions; returns whether that was done within `timeout_s`. Waits."""
        return self._close_positions(timeout_s)

    def failure(self) -> BaseException | None:
        """The error that ends the receiver, if there is one."""
        return self._failure()

    def has_reached(self, source: str, has_come: Callable[[SourceReader], bool]) -> bool:
        """Whether a source has been found and `has_come` is true of its reader."""
        reader = self._reader_of(source)
        return reader is not None and reader.wait_for(has_come, 0)

    def _look_at_readers(self) -> None:
        super()._look_at_readers()
        if self._loop.is_gone() and not self._ending.is_set():
            log.warning("receiver %s ends: its event loop was closed or has stopped", self.name)
            self.stop()
        if self._failure() is not None or self._ending.is_set():
            self._notify()

    def _notify_change(self) -> None:
        self._notify()
