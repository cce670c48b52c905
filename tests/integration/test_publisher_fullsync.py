"""Full syncs through a real broker: LRQ_Status is a stream that the test writes the requests to, as a server would."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pika
import pytest
from publisher_api import PATIENCE_S

from lrq_ha.errors import IllegalEvent
from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import FullSyncCancelled, FullSyncRequest, NackedError
from lrq_ha.publisher.messages import full_sync_status

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3")]

Make = Callable[..., Any]

STREAMS = ("LRQ_Send_LogEntries", "LRQ_Send_SnapSync", "LRQ_Status")
REQUESTED, COMPLETED, CANCELLED = pb.FullSyncRequest.REQUESTED, pb.FullSyncRequest.COMPLETED, pb.FullSyncRequest.CANCELLED
End = tuple[str, str, "pb.FullSyncRequest.State"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    with Lab({"east": 1}, tmp_path_factory.mktemp("fullsync") / "lab", broker_version, brokers_only=True) as found:
        yield found


@contextmanager
def channel(lab: Lab) -> Iterator[pika.adapters.blocking_connection.BlockingChannel]:
    parameters = pika.URLParameters(lab.nodes["e1"].admin)
    parameters.virtual_host = "lrq"
    with pika.BlockingConnection(parameters) as connection:
        ch = connection.channel()
        ch.confirm_delivery()
        yield ch


@pytest.fixture(autouse=True)
def streams(lab: Lab) -> None:
    with channel(lab) as ch:
        for name in STREAMS:
            ch.queue_delete(name)
            ch.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of the machine is not taken for an empty stream, nor for a provider that does not end."""
    for name in ("provider.EMPTY_S", "provider.PROVIDER_END_S", "async_provider.PROVIDER_END_S"):
        monkeypatch.setattr(f"lrq_ha.publisher.{name}", PATIENCE_S)


@pytest.fixture
def publisher(api: Make) -> Make:
    return lambda lab: api([lab.nodes["e1"].admin], "app-1", "orders", connect_timeout_s=PATIENCE_S)


def write(lab: Lab, *statuses: End) -> None:
    """(destination, request id, state) each."""
    with channel(lab) as ch:
        for destination, request_id, state in statuses:
            ch.basic_publish("", "LRQ_Status", full_sync_status("orders", destination, request_id, "test", state))


def read(lab: Lab, queue: str) -> list[bytes]:
    found: list[bytes] = []
    with channel(lab) as ch:
        mark = uuid.uuid4().hex
        ch.basic_publish("", queue, b"", pika.BasicProperties(type="marker", message_id=mark))
        ch.basic_qos(prefetch_count=1)  # nothing may be left over at the end: pika would nack it, which a stream does not take
        for method, properties, body in ch.consume(queue, arguments={"x-stream-offset": "first"}, inactivity_timeout=PATIENCE_S):
            assert method is not None, "the marker did not come back"
            if properties.message_id == mark:
                break
            ch.basic_ack(method.delivery_tag)
            if properties.type != "marker":
                found.append(body)
    return found


def announced(lab: Lab) -> list[bool]:
    """What was said of the client: whether it has a provider."""
    statuses = [pb.Status.FromString(body) for body in read(lab, "LRQ_Status")]
    return [each.client.full_sync_provider for each in statuses if each.key == "client/orders"]


def serve(lab: Lab, publisher: Any, provide: Callable[..., object], *statuses: End) -> None:
    """A provider begins, and is asked then."""
    publisher.on_full_sync(provide)
    until(lambda: announced(lab))
    write(lab, *statuses)


def snapshot(lab: Lab) -> list[pb.Transaction]:
    return [pb.Transaction.FromString(body) for body in read(lab, "LRQ_Send_SnapSync")]


def ends(lab: Lab) -> list[End]:
    statuses = [pb.Status.FromString(body) for body in read(lab, "LRQ_Status")]
    return [
        (s.full_sync.destination, s.full_sync.request_id, s.full_sync.state)
        for s in statuses
        if s.WhichOneof("value") == "full_sync" and s.full_sync.state != REQUESTED
    ]


def until(what: Callable[[], object], timeout_s: float = 2 * PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def transmit_for_ever(context: Any, payload: bytes) -> None:
    while True:
        context.transmit(payload)
        time.sleep(0.005)


@pytest.mark.quick
def test_requests_are_served_and_older_ones_than_the_provider_are_not(lab: Lab, publisher: Make) -> None:
    """A former process may have sent rows for those; the server asks anew."""
    write(lab, ("west", "r1", REQUESTED), ("west", "r1", COMPLETED), ("x", "r4", REQUESTED), ("x", "r4", CANCELLED), ("south", "r5", REQUESTED))
    served: list[FullSyncRequest] = []

    def provide(request: FullSyncRequest, context: Any) -> None:
        served.append(request)
        for number in range(100):
            context.transmit(b"%s %d" % (request.destination.encode(), number), progress=number)
        context.complete().result(PATIENCE_S)
        assert context.progress == 99
        with pytest.raises(IllegalEvent):
            context.transmit(b"more")

    with publisher(lab) as p:
        serve(lab, p, provide, ("west", "r2", REQUESTED), ("south", "r3", REQUESTED))
        until(lambda: len(ends(lab)) == 4)
        p.flush(PATIENCE_S)
        time.sleep(0.2)
    assert sorted((request.destination, request.request_id, request.reason) for request in served) == [
        ("south", "r3", "test"), ("west", "r2", "test"),
    ]
    assert sorted(ends(lab)[2:]) == [("south", "r3", COMPLETED), ("west", "r2", COMPLETED)]
    for destination, request_id in (("west", "r2"), ("south", "r3")):
        own = [each for each in snapshot(lab) if each.request_id == request_id]
        assert [each.type for each in own] == [pb.SNAPSHOT_SYNC] * 100 + [pb.LAST_FULL_SYNC_ENTRY]
        assert [each.payloads[0] for each in own] == [b"%s %d" % (destination.encode(), n) for n in range(100)] + [b""]
        assert all([list(entry.destinations) for entry in each.entries] == [[destination]] for each in own)
        assert {each.client_name for each in own} == {"orders"}
    assert announced(lab) == [True]

    with publisher(lab) as again:
        again.on_full_sync(provide)
        time.sleep(1.0)
    assert len(served) == 2, "a restart serves nothing that has ended"


def test_many_requests_at_once_lose_none(lab: Lab, publisher: Make) -> None:
    def provide(request: FullSyncRequest, context: Any) -> None:
        context.transmit(request.destination.encode())
        context.complete()

    with publisher(lab) as p:
        p.on_full_sync(provide)
        time.sleep(0.7)  # caught up: from here on requests come live
        write(lab, *((f"site{number}", f"r{number}", REQUESTED) for number in range(40)))
        until(lambda: len(ends(lab)) == 40)
    assert sorted(ends(lab)) == sorted((f"site{number}", f"r{number}", COMPLETED) for number in range(40))


def test_a_newer_request_cancels_the_running_one(lab: Lab, publisher: Make) -> None:
    entered, cancelled = threading.Event(), threading.Event()

    def provide(request: FullSyncRequest, context: Any) -> None:
        if request.request_id == "r1":
            entered.set()
            with pytest.raises(FullSyncCancelled, match="r2"):
                transmit_for_ever(context, b"old")
            cancelled.set()
            return
        context.transmit(b"new")
        context.complete()

    with publisher(lab) as p:
        serve(lab, p, provide, ("west", "r1", REQUESTED))
        assert entered.wait(PATIENCE_S)
        write(lab, ("west", "r2", REQUESTED))
        assert cancelled.wait(PATIENCE_S)
        until(lambda: ends(lab))
    assert ends(lab) == [("west", "r2", COMPLETED)], "what a newer request made obsolete is not reported"


def test_a_provider_that_fails_gives_up_or_forgets(lab: Lab, caplog: pytest.LogCaptureFixture, publisher: Make) -> None:
    def provide(request: FullSyncRequest, context: Any) -> None:
        context.transmit(b"x", progress="half")
        if request.destination == "fails":
            raise RuntimeError("no data")
        if request.destination == "gives-up":
            context.cancel()
            given_up.append(context.cancelled)
            try:
                context.transmit(b"y")
            except FullSyncCancelled:
                given_up.append("and transmits nothing")

    given_up: list[object] = []
    with publisher(lab) as p:
        serve(lab, p, provide, *((to, f"r-{to}", REQUESTED) for to in ("fails", "gives-up", "forgets")))
        until(lambda: len(ends(lab)) == 3)
        write(lab, ("fails", "r-again", REQUESTED))
        until(lambda: len(ends(lab)) == 4)
    assert sorted(ends(lab)) == sorted(
        [*((to, f"r-{to}", CANCELLED) for to in ("fails", "gives-up", "forgets")), ("fails", "r-again", CANCELLED)]
    )
    assert given_up == [True, "and transmits nothing"]
    assert "no data" in caplog.text
    assert "progress: half" in caplog.text
    assert "without complete()" in caplog.text


def test_the_server_cancels_and_a_lost_connection_does_not(lab: Lab, publisher: Make) -> None:
    go_on, over = threading.Event(), threading.Event()

    def provide(request: FullSyncRequest, context: Any) -> None:
        if request.destination == "south":
            until(lambda: context.cancelled)
            over.set()
            return
        context.transmit(b"before")
        go_on.wait(4 * PATIENCE_S)
        context.transmit(b"after")
        context.complete()

    with publisher(lab) as p:
        serve(lab, p, provide, ("west", "r1", REQUESTED), ("south", "r2", REQUESTED))
        until(lambda: snapshot(lab))
        lab.ctl("e1", "close_all_connections", "test")
        write(lab, ("south", "r2", CANCELLED))
        assert over.wait(PATIENCE_S)
        go_on.set()
        until(lambda: len(ends(lab)) == 2)
        p.flush(PATIENCE_S)
    assert ends(lab) == [("south", "r2", CANCELLED), ("west", "r1", COMPLETED)]
    seen = [each for each in snapshot(lab) if each.request_id == "r1"]
    assert list(dict.fromkeys(each.payloads[0] for each in seen)) == [b"before", b"after", b""]


def test_close_ends_providers_without_a_word(lab: Lab, publisher: Make) -> None:
    entered, raised = threading.Event(), threading.Event()

    def provide(request: FullSyncRequest, context: Any) -> None:
        entered.set()
        try:
            transmit_for_ever(context, b"")
        except FullSyncCancelled:
            raised.set()
            raise

    with publisher(lab) as p:
        serve(lab, p, provide, ("west", "r1", REQUESTED))
        assert entered.wait(PATIENCE_S)
    assert raised.is_set()
    assert ends(lab) == []


def test_an_end_that_crossed_a_newer_request_ends_nothing(lab: Lab, publisher: Make) -> None:
    """What a client says of r1 may land behind r2, which it had not heard of."""
    served: list[tuple[str, str]] = []

    def provide(request: FullSyncRequest, context: Any) -> None:
        if request.request_id == "r4":
            write(lab, ("south", "r3", COMPLETED), ("south", "r3", CANCELLED), ("north", "r5", REQUESTED))
            until(lambda: ("north", "r5") in served)  # so the two have been read
            assert not context.cancelled
        context.transmit(b"x")
        served.append((request.destination, request.request_id))
        context.complete()

    with publisher(lab) as p:
        requests = [("west", "r1", REQUESTED), ("west", "r2", REQUESTED), ("west", "r1", COMPLETED)]
        serve(lab, p, provide, *requests, ("south", "r3", REQUESTED), ("south", "r4", REQUESTED))
        until(lambda: ("south", "r4", COMPLETED) in ends(lab))
    assert {("north", "r5"), ("south", "r4"), ("west", "r2")} <= set(served), "r1 and r3 are served, too, where they are read before what follows"


def test_a_full_sync_with_a_refused_entry_is_not_complete(lab: Lab, publisher: Make) -> None:
    """An entry is missing: the end marker must not be sent."""
    with channel(lab) as ch:
        ch.queue_delete("LRQ_Send_SnapSync")
        ch.queue_declare("LRQ_Send_SnapSync", durable=True, arguments={"x-max-length": 3, "x-overflow": "reject-publish"})
    raised: list[str] = []

    def transmit_until_refused(context: Any) -> None:
        while True:
            context.transmit(b"x").result(PATIENCE_S)

    def provide(request: FullSyncRequest, context: Any) -> None:
        if request.destination == "west":
            with pytest.raises(NackedError):
                transmit_until_refused(context)
            with pytest.raises(NackedError):
                context.transmit(b"after")
            raised.append("transmit")
        else:
            context.transmit(b"x")  # the queue is full
            with pytest.raises(NackedError):
                context.complete()
            raised.append("complete")
        assert context.cancelled

    with publisher(lab) as p:
        serve(lab, p, provide, ("west", "r1", REQUESTED))
        until(lambda: ends(lab))
        write(lab, ("south", "r2", REQUESTED))
        until(lambda: len(ends(lab)) == 2)
    assert ends(lab) == [("west", "r1", CANCELLED), ("south", "r2", CANCELLED)]
    assert raised == ["transmit", "complete"]
    with channel(lab) as ch:
        entries = [pb.Transaction.FromString(body) for _, _, body in iter(lambda: ch.basic_get("LRQ_Send_SnapSync", auto_ack=True), (None,) * 3)]
    assert entries
    assert {each.type for each in entries} == {pb.SNAPSHOT_SYNC}
