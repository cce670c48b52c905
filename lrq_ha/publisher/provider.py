"""Serving full syncs with the sync publisher: one thread per request, in which the client's provider runs.

Rules: which requests to serve is the RequestBook's decision; everything a provider sends goes the same ordered way as the
client's log entries. After a request is cancelled its context only raises FullSyncCancelled; what another request made obsolete is
not reported to the server, which asked for the newer one itself."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from google.protobuf.message import DecodeError

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher.confirm import Confirm
from lrq_ha.publisher.errors import FullSyncCancelled
from lrq_ha.publisher.fullsync import Begin, Effect, FullSyncRequest, RequestBook
from lrq_ha.publisher.messages import LogEntries, checked_bytes, full_sync_status
from lrq_ha.replication.errors import IllegalEvent

_LOG = logging.getLogger(__name__)

# A stream does not say where its end is. Old messages come thousands a second, new ones a few: so it has been read to its end when
# only few came in one look. If that is wrong after all, an old request is begun, and cancelled as soon as its end is read.
LOOK_S: Final = 0.5
LOOK_MESSAGES_MAX: Final = 100
EMPTY_S: Final = 5.0  # the first message, at least the own announcement, has this long to come
THREAD_END_S: Final = 2.0  # how long close() waits for providers to notice


class Sender(Protocol):
    """What a full sync needs of a publisher."""

    def send_full_sync(self, entries: LogEntries) -> Confirm:
        """Sends one Transaction to LRQ_Send_SnapSync; blocks while the window is full."""

    def send_status(self, body: bytes) -> Confirm:
        """Sends one Status; never blocks."""


class _State(enum.Enum):
    OPEN = enum.auto()
    COMPLETED = enum.auto()
    CANCELLED = enum.auto()


class FullSyncContext:
    """How a provider supplies the data of one full sync. Any thread may use it; one at a time if the order matters.

    Attributes:
        request: What is asked for.
        progress: What the provider said last of how far it is; shown in the log.
    """

    def __init__(self, request: FullSyncRequest, sender: Sender, finished: Callable[[FullSyncRequest], None]) -> None:
        self.request = request
        self.progress: object = None
        self._sender = sender
        self._finished = finished
        self._state = _State.OPEN
        self._why = ""
        self._lock = threading.Lock()  # around the state, and around sending: nothing follows the end marker

    @property
    def cancelled(self) -> bool:
        """Whether the data is not wanted any more; for providers that compute for long between two transmits."""
        return self._state is _State.CANCELLED

    def transmit(self, payload: bytes, progress: object = None) -> Confirm:
        """Sends one entry of the snapshot. Blocks while the publisher's window is full.

        Args:
            payload: The entry, opaque to everybody but the client's own receivers.
            progress: How far the provider is, in any form, for the log.

        Raises:
            FullSyncCancelled: The data is not wanted any more.
            WindowFull, NoPrimary, InvalidArgument, MessageTooLarge: As from `transmit_log_entry_message`.
        """
        if progress is not None:
            self.progress = progress
        return self._send(checked_bytes("payload", payload), pb.SNAPSHOT_SYNC)

    def complete(self) -> Confirm:
        """Ends the full sync: the end marker, after all that was transmitted, and word to the server. Returns the marker's confirm."""
        with self._lock:
            # The marker names the destination with an empty payload, since an addressee is always an addressee of a payload.
            confirm = self._send_locked(b"", pb.LAST_FULL_SYNC_ENTRY)
            self._state = _State.COMPLETED
        self._report(pb.FullSyncRequest.COMPLETED)
        return confirm

    def cancel(self) -> None:
        """Gives the full sync up and tells the server, which will ask again if it still needs the data."""
        if self.end(f"the provider cancelled it (progress: {self.progress})"):
            self._report(pb.FullSyncRequest.CANCELLED)

    def end(self, why: str) -> bool:
        """Cancels without a word to the server. Returns whether the full sync was still open. Takes no lock, so that it works while
        a transmit waits for room in the window."""
        if self._state is not _State.OPEN:
            return False
        self._why = why
        self._state = _State.CANCELLED
        return True

    @property
    def open(self) -> bool:
        return self._state is _State.OPEN

    def _report(self, state: pb.FullSyncRequest.State) -> None:
        request = self.request
        self._finished(request)
        self._sender.send_status(full_sync_status(request.client_name, request.destination, request.request_id, request.reason, state))

    def _send(self, payload: bytes, kind: pb.ReplicationType) -> Confirm:
        with self._lock:
            return self._send_locked(payload, kind)

    def _send_locked(self, payload: bytes, kind: pb.ReplicationType) -> Confirm:
        request = self.request
        if self._state is _State.CANCELLED:
            raise FullSyncCancelled(f"Full sync {request.request_id} for {request.destination!r} was cancelled: {self._why}")
        if self._state is _State.COMPLETED:
            raise IllegalEvent(f"Full sync {request.request_id} for {request.destination!r} is complete already")
        return self._sender.send_full_sync(LogEntries(((payload, (request.destination,)),), kind, request.request_id))


Provider = Callable[[FullSyncRequest, FullSyncContext], object]


@dataclass(slots=True)
class _Look:
    """How many messages came since when (monotonic seconds)."""

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


class FullSyncs:
    """Runs the provider for every request of a client. `replay`, `status` and `tick` are called on the I/O thread."""

    def __init__(self, client_name: str, provider: Provider, sender: Sender) -> None:
        self._book = RequestBook(client_name)
        self._lock = threading.Lock()  # around the book and the contexts; never held while something is sent
        self._provider = provider
        self._sender = sender
        self._contexts: dict[FullSyncRequest, FullSyncContext] = {}
        self._threads: set[threading.Thread] = set()
        self._look: _Look | None = None  # while catching up
        self._closed = False

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
            effects = self._book.status(status)
        self._run(effects)

    def tick(self) -> None:
        """Called at least every LOOK_S: notices that the stream has been read to its end."""
        if self._look is None or not self._look.caught_up(time.monotonic()):
            return
        self._look = None
        with self._lock:
            effects = self._book.caught_up()
        self._run(effects)

    def _run(self, effects: list[Effect]) -> None:
        for effect in effects:
            request = effect.request
            if isinstance(effect, Begin):
                with self._lock:
                    if self._closed:
                        return
                    context = self._contexts[request] = FullSyncContext(request, self._sender, self._finished)
                    name = f"lrq-full-sync-{request.destination}"
                    thread = threading.Thread(target=self._serve, args=(context,), name=name, daemon=True)
                    self._threads.add(thread)
                _LOG.info("Full sync %s for %r begins: %s", request.request_id, request.destination, request.reason)
                thread.start()
            else:
                with self._lock:
                    running = self._contexts.get(request)
                if running is not None and running.end(effect.why):
                    _LOG.info("Full sync %s for %r ends: %s", request.request_id, request.destination, effect.why)

    def _serve(self, context: FullSyncContext) -> None:
        """Body of a provider's thread: whatever the provider does, the request ends and the server hears of it."""
        request = context.request
        where = f"Full sync {request.request_id} for {request.destination!r}"
        try:
            self._provider(request, context)
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
                self._threads.discard(threading.current_thread())

    def _finished(self, request: FullSyncRequest) -> None:
        with self._lock:
            self._book.finished(request)

    def close(self) -> None:
        """Cancels all, without a word to the server: it asks the next process again. Waits a little for the providers."""
        with self._lock:
            self._closed = True
            contexts, threads = list(self._contexts.values()), list(self._threads)
        for context in contexts:
            context.end("the publisher is closed")
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(THREAD_END_S)
