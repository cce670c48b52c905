"""Full syncs and what comes across them: a cancellation in the middle of the end, a publisher that is closed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import AsyncConfirm, AsyncFullSyncContext, Confirm, FullSyncCancelled, FullSyncContext, FullSyncRequest
from lrq_ha.publisher import provider as module
from lrq_ha.publisher.errors import InvalidArgument
from lrq_ha.publisher.messages import LogEntries, full_sync_status
from lrq_ha.publisher.provider import FullSyncs

REQUEST = FullSyncRequest("orders", "west", "r1", "test")


class Wire:
    """What a context sends. `meanwhile` happens while the end marker waits for room in the window."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.sent: list[pb.ReplicationType] = []
        self.reported: list[pb.FullSyncRequest.State] = []
        self._meanwhile = meanwhile

    def _put(self, entries: LogEntries) -> None:
        if entries.type == pb.LAST_FULL_SYNC_ENTRY:
            self._meanwhile()
        self.sent.append(entries.type)

    def send(self, entries: LogEntries) -> Confirm:
        self._put(entries)
        confirm = Confirm("p/1", lambda: None)
        confirm.settle(None)
        return confirm

    async def send_async(self, entries: LogEntries) -> AsyncConfirm:
        self._put(entries)
        confirm = AsyncConfirm("p/1", lambda: None)
        confirm.settle(None)
        return confirm

    def status(self, body: bytes) -> None:
        self.reported.append(pb.Status.FromString(body).full_sync.state)


def provide(kind: str, meanwhile: Callable[[Any], object]) -> Wire:
    """One row and the end, by a context of either kind."""
    wire = Wire(lambda: meanwhile(contexts[0]))
    contexts: list[Any] = []

    async def provide_async() -> None:
        context = AsyncFullSyncContext(REQUEST, lambda _: None, wire.send_async, wire.status)
        contexts.append(context)
        await context.transmit(b"row")
        await context.complete()

    if kind == "async":
        asyncio.run(provide_async())
    else:
        context = FullSyncContext(REQUEST, lambda _: None, wire.send, wire.status)
        contexts.append(context)
        context.transmit(b"row")
        context.complete()
    return wire


KINDS = pytest.mark.parametrize("kind", ["sync", "async"])


@KINDS
def test_a_full_sync_is_completed(kind: str) -> None:
    wire = provide(kind, lambda context: None)
    assert wire.sent == [pb.SNAPSHOT_SYNC, pb.LAST_FULL_SYNC_ENTRY]
    assert wire.reported == [pb.FullSyncRequest.COMPLETED]


@KINDS
def test_entries_of_a_snapshot_go_as_one_transaction(kind: str) -> None:
    sent: list[LogEntries] = []

    def send(entries: LogEntries) -> Confirm:
        sent.append(entries)
        return Confirm("p/1", lambda: None)

    async def send_async(entries: LogEntries) -> AsyncConfirm:
        sent.append(entries)
        return AsyncConfirm("p/1", lambda: None)

    async def provide_async() -> None:
        context = AsyncFullSyncContext(REQUEST, lambda _: None, send_async, lambda _: None)
        await context.transmit_many([b"a", b"b", b"a"], progress=3)
        with pytest.raises(InvalidArgument, match="no payload to transmit"):
            await context.transmit_many([])
        assert context.progress == 3

    if kind == "async":
        asyncio.run(provide_async())
    else:
        context = FullSyncContext(REQUEST, lambda _: None, send, lambda _: None)
        context.transmit_many(iter([b"a", b"b", b"a"]), progress=3)
        with pytest.raises(InvalidArgument, match="no payload to transmit"):
            context.transmit_many([])
        with pytest.raises(InvalidArgument, match="payload is a str"):
            context.transmit_many([b"a", "b"])  # type: ignore[list-item]
        assert context.progress == 3
    to = ("west",)
    assert sent == [LogEntries(((b"a", to), (b"b", to), (b"a", to)), pb.SNAPSHOT_SYNC, "r1")]


@KINDS
def test_a_full_sync_that_is_cancelled_at_its_end_is_not_said_to_be_complete(kind: str) -> None:
    """The server had left out rows by then, or asked for another."""
    contexts: list[Any] = []

    def cancelled(context: Any) -> None:
        contexts.append(context)
        assert context.end("the request was ended elsewhere")

    with pytest.raises(FullSyncCancelled, match="ended elsewhere"):
        provide(kind, cancelled)
    [context] = contexts
    assert context.cancelled
    assert context._send_status.__self__.reported == []


def test_closing_waits_once_for_all_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do not end: it waited for one after the other."""
    providers, go, begun = 100, threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(module, "PROVIDER_END_S", 0.5)

    def provider(request: FullSyncRequest, context: FullSyncContext) -> None:
        begun.release()
        go.wait(600)

    def nothing(_: object) -> Any:
        return None

    syncs = FullSyncs("orders", provider, nothing, nothing)
    try:
        syncs._book.caught_up()
        for number in range(providers):
            syncs.status(full_sync_status("orders", f"site{number}", "r", "", pb.FullSyncRequest.REQUESTED))
        for _ in range(providers):
            assert begun.acquire(timeout=120)
        began_s = time.monotonic()
        syncs.close()
        assert time.monotonic() - began_s < 0.5 * providers / 2
    finally:
        go.set()
