"""Full syncs: the common part of both publishers, and the sync one's threads: one per request, in which the client's provider runs.

`async_provider.py` has the tasks.

Rules:

 - The RequestBook decides which requests to serve; a provider's entries go the ordered way of the client's log entries.
 - After a request is cancelled its context only raises FullSyncCancelled; a request that a newer one made obsolete is
   not reported to the server, which made the newer one itself.
 - The end marker goes out when every entry is confirmed: a snapshot with a hole is never called complete.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import DecodeError

from lrq_ha.errors import IllegalEvent, LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher.confirm import BaseConfirm, Confirm
from lrq_ha.publisher.errors import FullSyncCancelled, InvalidArgument, NackedError, anew
from lrq_ha.publisher.fullsync import Begin, Effect, FullSyncRequest, RequestBook
from lrq_ha.publisher.messages import LogEntries, checked_bytes, full_sync_status

_LOG = logging.getLogger(__name__)

# A stream does not tell its end. Old messages come thousands a second, new ones a few: so it has been read to its end when
# only few came in one look. If that is wrong, a request from before this process is begun, and cancelled as soon as its end is read;
# requests that this process has read before are recognised (`fullsync`).
LOOK_S: Final = 0.5
LOOK_MESSAGES_MAX: Final = 100
EMPTY_S: Final = 5.0  # time for the first message, at least the own announcement, to come
PROVIDER_END_S: Final = 2.0  # time that close() waits for providers to notice

C = TypeVar("C", bound=BaseConfirm)


class Stage(enum.Enum):
    """The stages of a full sync."""

    OPEN = enum.auto()
    COMPLETED = enum.auto()
    CANCELLED = enum.auto()


class BaseContext(Generic[C]):
    """The common part of both contexts: the state of one full sync, and its entries."""

    def __init__(self, request: FullSyncRequest, finished: Callable[[FullSyncRequest], None], send_status: Callable[[bytes], object]) -> None:
        self.request = request
        self.progress: object = None
        self._finished = finished
        self._send_status = send_status
        self._stage = Stage.OPEN
        self._turn = threading.Lock()  # around changes of the stage; never held while something is sent
        self._why = ""
        self._unconfirmed: deque[C] = deque()  # entries sent, from the first unconfirmed one on

    def __repr__(self) -> str:
        request, stage = self.request, self._stage.name.lower()
        return f"<{type(self).__name__} {request.request_id} for {request.destination}: {stage}, progress {self.progress}>"

    @property
    def cancelled(self) -> bool:
        """Whether the data is not needed any more; for providers that compute for long between two transmits."""
        return self._stage is Stage.CANCELLED

    @property
    def open(self) -> bool:
        return self._stage is Stage.OPEN

    def cancel(self) -> None:
        """Gives the full sync up and tells the server, which will ask again if it still needs the data."""
        if self.end(f"the provider cancelled it (progress: {self.progress})"):
            self._report(pb.FullSyncRequest.CANCELLED)

    def end(self, why: str) -> bool:
        """Cancels without informing the server. Returns whether the full sync was still open. Waits for no sender, so that it works
        while a transmit waits for room in the window.
        """
        with self._turn:
            if self._stage is not Stage.OPEN:
                return False
            self._why = why
            self._stage = Stage.CANCELLED
            return True

    def _check(self) -> None:
        request = self.request
        if self._stage is Stage.CANCELLED:
            raise FullSyncCancelled(f"Full sync {request.request_id} for {request.destination!r} was cancelled: {self._why}")
        if self._stage is Stage.COMPLETED:
            raise IllegalEvent(f"Full sync {request.request_id} for {request.destination!r} is complete already")

    def _completed(self) -> None:
        """The end marker is sent. Raises FullSyncCancelled if the data was not needed any more by then: the server is not informed."""
        with self._turn:
            self._check()
            self._stage = Stage.COMPLETED

    def _entries(self, payloads: Iterable[bytes]) -> LogEntries:
        """One transaction of the snapshot. Without a payload it would be a start marker."""
        to = (self.request.destination,)
        entries = tuple([(checked_bytes("payload", payload), to) for payload in payloads])
        if not entries:
            raise InvalidArgument("There is no payload to transmit", todo="Leave out the call for an empty page")
        return LogEntries(entries, pb.SNAPSHOT_SYNC, self.request.request_id)

    def _marker(self) -> LogEntries:
        """The end marker names the destination with an empty payload, since an addressee is always an addressee of a payload."""
        request = self.request
        return LogEntries(((b"", (request.destination,)),), pb.LAST_FULL_SYNC_ENTRY, request.request_id)

    def _reap(self) -> None:
        """Forgets confirmed entries, so that never many more are kept than the window holds. A refused entry ends the full sync."""
        while self._unconfirmed and self._unconfirmed[0].done:
            error = self._unconfirmed.popleft().error
            if isinstance(error, NackedError):
                self.cancel()
            if error is not None:
                for each in self._unconfirmed:
                    each.observed = True  # this failure stands for theirs
                raise anew(error)

    def _report(self, state: pb.FullSyncRequest.State) -> None:
        request = self.request
        self._finished(request)
        self._send_status(full_sync_status(request.client_name, request.destination, request.request_id, request.reason, state))


class FullSyncContext(BaseContext[Confirm]):
    """A provider's interface to supply the data of one full sync. Any thread may use it; one at a time if the order matters.

    Attributes:
        request: The request.
        progress: The provider's last progress; shown in the log.
    """

    def __init__(
        self,
        request: FullSyncRequest,
        finished: Callable[[FullSyncRequest], None],
        send: Callable[[LogEntries], Confirm],
        send_status: Callable[[bytes], object],
    ) -> None:
        super().__init__(request, finished, send_status)
        self._send = send
        self._lock = threading.Lock()  # around sending: nothing follows the end marker

    def transmit(self, payload: bytes, progress: object = None) -> Confirm:
        """Sends one entry of the snapshot. Blocks while the publisher's window is full.

        Args:
            payload: The entry, opaque to all but the client's own receivers.
            progress: The provider's progress, in any form, for the log.

        Raises:
            FullSyncCancelled: The data is not needed any more.
            NackedError: An earlier entry was refused. The full sync is cancelled.
            WindowFull, NoPrimary, InvalidArgument, MessageTooLarge: As from `transmit_log_entry_message`.
        """
        return self.transmit_many([payload], progress)

    def transmit_many(self, payloads: Iterable[bytes], progress: object = None) -> Confirm:
        """Sends several entries of the snapshot as one transaction: for small entries a fraction of the cost. Blocks while the window is full.

        Args:
            payloads: The entries, in their order; at least one, of at most about 16 MB in all, as other transactions.
            progress: As in `transmit`.

        Raises:
            FullSyncCancelled, NackedError, WindowFull, NoPrimary, MessageTooLarge: As from `transmit`.
            InvalidArgument: A payload is not bytes, or there is none.
        """
        if progress is not None:
            self.progress = progress
        with self._lock:
            self._check()
            self._reap()
            confirm = self._send(self._entries(payloads))
            self._unconfirmed.append(confirm)
            return confirm

    def complete(self) -> Confirm:
        """Ends the full sync: waits until every entry is confirmed, then sends the end marker, and informs the server.

        Returns:
            The end marker's confirm.

        Raises:
            FullSyncCancelled: The data is not needed any more.
            NackedError: An entry was refused. The full sync is cancelled.
        """
        with self._lock:
            self._check()
            while self._unconfirmed:
                with suppress(LrqError):
                    self._unconfirmed[0].result()
                self._reap()
            self._check()
            confirm = self._send(self._marker())
            self._completed()
        self._report(pb.FullSyncRequest.COMPLETED)
        return confirm


@dataclass(slots=True)
class _Look:
    """Number of messages since a time (monotonic seconds)."""

    since_s: float
    messages: int = 0
    seen: bool = False  # whether any came before

    def caught_up(self, now_s: float) -> bool:
        lasted_s = now_s - self.since_s
        if not self.seen and not self.messages:
            return lasted_s > EMPTY_S
        if lasted_s < LOOK_S:
            return False
        found = self.messages <= LOOK_MESSAGES_MAX
        self.since_s, self.messages, self.seen = now_s, 0, True
        return found


X = TypeVar("X", bound=BaseContext[Any])


class BaseFullSyncs(ABC, Generic[X]):
    """Begins and ends the providers of a client by its requests. `replay`, `status` and `tick` are called from the connection's reader."""

    def __init__(self, client_name: str) -> None:
        self._book = RequestBook(client_name)
        self._lock = threading.Lock()  # around the book and the contexts; never held while something is sent
        self._contexts: dict[FullSyncRequest, X] = {}
        self._look: _Look | None = None  # while catching up
        self._closed = False

    @abstractmethod
    def _begin(self, request: FullSyncRequest) -> X:
        """Starts the provider in a thread or task of its own, which ends with `_over`. Called under the lock."""

    def replay(self) -> None:
        """LRQ_Status is read from its beginning."""
        with self._lock:
            self._book.replay()
        self._look = _Look(time.monotonic())

    def status(self, body: bytes) -> None:
        """One message of LRQ_Status."""
        if self._look is not None:
            self._look.messages += 1
        try:
            status = pb.Status.FromString(body)
        except DecodeError:
            _LOG.error("A message in LRQ_Status is not a Status (%d bytes): ignored", len(body))
            return
        with self._lock:
            self._run(self._book.status(status))

    def tick(self) -> None:
        """Called at least every LOOK_S: notices the end of the stream."""
        if self._look is None or not self._look.caught_up(time.monotonic()):
            return
        self._look = None
        with self._lock:
            self._run(self._book.caught_up())

    def _run(self, effects: list[Effect]) -> None:
        for effect in effects:
            request = effect.request
            if isinstance(effect, Begin):
                if not self._closed:
                    _LOG.info("Full sync %s for %r begins: %s", request.request_id, request.destination, request.reason)
                    self._contexts[request] = self._begin(request)
            else:
                running = self._contexts.get(request)
                if running is not None and running.end(effect.why):
                    _LOG.info("Full sync %s for %r ends: %s", request.request_id, request.destination, effect.why)

    def _finished(self, request: FullSyncRequest) -> None:
        with self._lock:
            self._book.finished(request)

    @contextmanager
    def _serving(self, context: X) -> Iterator[None]:
        """Wraps the provider: the request always ends, and the server is informed."""
        request = context.request
        where = f"Full sync {request.request_id} for {request.destination!r}"
        try:
            yield
            if context.open:
                _LOG.error("%s: the provider returned without complete() or cancel(): cancelled", where)
        except FullSyncCancelled:
            _LOG.info("%s: the provider has stopped", where)
        except Exception:
            _LOG.exception("%s: the provider failed (progress: %s): cancelled", where, context.progress)
        finally:
            try:
                context.cancel()
            except Exception:
                _LOG.exception("%s: the server could not be told", where)
            with self._lock:
                self._contexts.pop(request, None)

    def _end_all(self) -> None:
        """Cancels all, without informing the server: it asks the next process again."""
        with self._lock:
            self._closed = True
            contexts = list(self._contexts.values())
        for context in contexts:
            context.end("the publisher is closed")


Provider = Callable[[FullSyncRequest, FullSyncContext], object]


class FullSyncs(BaseFullSyncs[FullSyncContext]):
    """Runs the provider in a thread per request."""

    def __init__(self, client_name: str, provider: Provider, send: Callable[[LogEntries], Confirm], send_status: Callable[[bytes], object]) -> None:
        super().__init__(client_name)
        self._provider = provider
        self._send = send
        self._send_status = send_status
        self._threads: set[threading.Thread] = set()

    def _begin(self, request: FullSyncRequest) -> FullSyncContext:
        context = FullSyncContext(request, self._finished, self._send, self._send_status)
        thread = threading.Thread(target=self._serve, args=(context,), name=f"lrq-full-sync-{request.destination}", daemon=True)
        self._threads.add(thread)
        thread.start()
        return context

    def _serve(self, context: FullSyncContext) -> None:
        with self._serving(context):
            self._provider(context.request, context)
        with self._lock:
            self._threads.discard(threading.current_thread())

    def close(self) -> None:
        """Cancels all, and waits a little for the providers."""
        self._end_all()
        with self._lock:
            threads = self._threads - {threading.current_thread()}
        deadline_s = time.monotonic() + PROVIDER_END_S
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
