"""The publisher against real brokers: what it stores, what it refuses, and what happens when one stalls or throws us out.

There is no door here, so nothing removes repeats: a message may stand twice in a stream after a lost connection. What must hold is that
every confirmed message is there, and that the first occurrences of IDs are in order.
"""

from __future__ import annotations

import decimal
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pika
import pytest
from pika.adapters.utils.io_services_utils import StreamingConnectionMixin
from publisher_api import PATIENCE_S, inside, no_primary

from lrq_ha.errors import IllegalEvent
from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import (
    Confirm,
    ConfirmTimeout,
    InvalidArgument,
    MessageTooLarge,
    NackedError,
    Publisher,
    PublisherClosed,
    Unconfirmed,
    WindowFull,
)

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3")]

Make = Callable[..., Any]

STREAM = {"x-queue-type": "stream"}
BODY = b"x" * 1024


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    directory: Path = tmp_path_factory.mktemp("publisher") / "lab"
    with Lab(groups={"east": 2}, directory=directory, broker=broker_version, brokers_only=True) as found:
        yield found


@contextmanager
def channel(lab: Lab, node: str = "e1", vhost: str = "/") -> Iterator[pika.adapters.blocking_connection.BlockingChannel]:
    parameters = pika.URLParameters(lab.nodes[node].admin)
    parameters.virtual_host = vhost
    with pika.BlockingConnection(parameters) as connection:
        yield connection.channel()


@pytest.fixture(autouse=True)
def streams(lab: Lab) -> None:
    make_streams(lab)


def make_streams(lab: Lab) -> None:
    """A fresh stream `s` for publish() and fresh routing queues, on both brokers."""
    for node in lab.nodes:
        for vhost, names in (("/", ("s",)), ("lrq", ("LRQ_Send_LogEntries", "LRQ_Status"))):
            with channel(lab, node, vhost) as ch:
                for name in names:
                    ch.queue_delete(name)
                    ch.queue_declare(name, durable=True, arguments=STREAM)


@pytest.fixture
def publisher(api: Make) -> Make:
    """Makes publishers: (lab, nodes…, options)."""

    def make(lab: Lab, *nodes: str, **options: object) -> Any:
        found = {"connect_timeout_s": PATIENCE_S, "login_timeout_s": 5.0, **options}
        # As the sidecar's user: an ordinary client may write LRQ_* only through a door, which does the check that a broker would do on amq.default.
        return api([lab.nodes[node].admin for node in nodes or ("e1",)], "app-1", "orders", **found)

    return make


def read(lab: Lab, node: str = "e1", queue: str = "s", vhost: str = "/") -> list[tuple[pika.BasicProperties, bytes]]:
    """Everything in a stream, up to a marker that is published after it."""
    found: list[tuple[pika.BasicProperties, bytes]] = []
    with channel(lab, node, vhost) as ch:
        ch.confirm_delivery()
        ch.basic_publish("", queue, b"", pika.BasicProperties(type="marker"))
        ch.basic_qos(prefetch_count=500)
        for method, properties, body in ch.consume(queue, arguments={"x-stream-offset": "first"}, inactivity_timeout=PATIENCE_S):
            if method is None or properties.type == "marker":
                break
            ch.basic_ack(method.delivery_tag)
            found.append((properties, body))
    return [each for each in found if each[0].type != "marker"]


def sequences(lab: Lab, node: str = "e1", queue: str = "s", vhost: str = "/") -> list[int]:
    """Sequences of the IDs in a stream, each once, in the order in which they came first."""
    found = (str(properties.headers["x-lrq-id"]) for properties, _ in read(lab, node, queue, vhost))
    return list(dict.fromkeys(int(replication_id.rpartition("/")[2]) for replication_id in found))


def until(what: object, timeout_s: float = 2 * PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def refusing_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


# ---- what is stored


@pytest.mark.quick("3.10", "4.3")
def test_publish(lab: Lab, publisher: Make) -> None:
    given = pika.BasicProperties(headers={"color": "blue", "x-lrq-id": "forged/1"}, content_type="text/plain", delivery_mode=1)
    with publisher(lab) as p:
        first, second = p.publish("", "s", b"one"), p.publish("amq.direct", "k", b"lost", None)
        with pytest.raises(NackedError, match="312 NO_ROUTE"):
            second.result(PATIENCE_S)
        third = p.publish("", "s", b"", given)
        assert (first.result(PATIENCE_S), third.result(PATIENCE_S)) == ("app-1/1", "app-1/2"), "the refused one's number is free"
        assert first.done
    (one, body), (two, empty) = read(lab)
    assert (one.headers["x-lrq-id"], one.delivery_mode, body) == ("app-1/1", 2, b"one")
    assert (two.headers["x-lrq-id"], two.headers["color"], two.content_type, two.delivery_mode) == ("app-1/2", "blue", "text/plain", 1)
    assert empty == b""
    assert given.headers["x-lrq-id"] == "forged/1", "the caller's properties are the caller's"


@pytest.mark.quick
def test_without_a_route(lab: Lab, publisher: Make) -> None:
    with publisher(lab) as p:
        dropped, returned = p.publish("amq.direct", "k", b"", mandatory=False), p.publish("amq.direct", "k", b"")
        assert dropped.result(PATIENCE_S) == "app-1/1"
        with pytest.raises(NackedError, match="312 NO_ROUTE"):
            returned.result(PATIENCE_S)


@pytest.mark.quick
def test_log_entries(lab: Lab, publisher: Make) -> None:
    payload = b"p" * 5000
    with publisher(lab) as p:
        p.transmit_log_entry_message(b"alone", ["west"]).result(PATIENCE_S)
        p.transmit_log_entry_messages([(payload, ["west", "south"]), (b"other", ["south"]), (payload, ["north"])]).result(PATIENCE_S)
        with p.transaction() as tx:
            tx.transmit_log_entry_message(b"a", ["west"])
            tx.transmit_log_entry_message(b"b", ["west"])
        assert tx.confirm.result(PATIENCE_S) == "app-1.lrq/4"
        with suppress(KeyError), p.transaction() as discarded:
            discarded.transmit_log_entry_message(b"never", ["west"])
            raise KeyError
        with pytest.raises(IllegalEvent):
            _ = discarded.confirm
        with p.transaction():
            pass
        p.flush(PATIENCE_S)
    found = [(properties, pb.Transaction.FromString(body)) for properties, body in read(lab, "e1", "LRQ_Send_LogEntries", "lrq")]
    assert [each.replication_id for _, each in found] == ["app-1.lrq/2", "app-1.lrq/3", "app-1.lrq/4"], "1 is the client's announcement"
    assert all(properties.headers["x-lrq-id"] == each.replication_id for properties, each in found)
    assert [list(each.payloads) for _, each in found] == [[b"alone"], [payload, b"other"], [b"a", b"b"]]
    assert [[list(entry.destinations) for entry in each.entries] for _, each in found][1] == [["west", "south"], ["south"], ["north"]]
    ((_, status),) = read(lab, "e1", "LRQ_Status", "lrq")
    assert not pb.Status.FromString(status).client.full_sync_provider


def test_arguments(lab: Lab, publisher: Make, api: Make) -> None:
    with publisher(lab, message_bytes_max=1000) as p:
        with pytest.raises(MessageTooLarge):
            p.publish("", "s", b"x" * 1001)
        with pytest.raises(MessageTooLarge):
            p.transmit_log_entry_message(b"x" * 999, ["west"])
        with pytest.raises(MessageTooLarge, match="header"):
            p.publish("", "s", b"", pika.BasicProperties(headers={"h": "x" * 130_000}))
        with pytest.raises(InvalidArgument):
            p.publish("", "s", "text")
        with pytest.raises(InvalidArgument):
            p.publish("", "x" * 256, b"")
        with pytest.raises(InvalidArgument, match="expiration"):
            p.publish("", "s", b"", pika.BasicProperties(expiration=60000))
        assert p.publish("", "s", b"").result(PATIENCE_S) == "app-1/1", "what was refused used no ID"
    with pytest.raises(PublisherClosed):
        p.publish("", "s", b"")
    with pytest.raises(InvalidArgument):
        api([], "app")
    with pytest.raises(InvalidArgument):
        api(["http://127.0.0.1"], "app")
    with pytest.raises(InvalidArgument, match="user:password"):
        api(["amqp://app:secret@127.0.0.1:port"], "app")
    with pytest.raises(InvalidArgument, match="client_name"), api([lab.nodes["e1"].broker], "app") as nameless:
        nameless.transmit_log_entry_message(b"", ["west"])


@pytest.mark.quick
def test_large_messages(lab: Lab, publisher: Make) -> None:
    with publisher(lab, window_bytes=1024 * 1024) as p:
        large = bytes(range(256)) * (16 * 1024 * 1024 // 256)
        confirms = [p.publish("", "s", body) for body in (b"before", large, b"after")]
        assert [confirm.result(PATIENCE_S) for confirm in confirms] == ["app-1/1", "app-1/2", "app-1/3"]
    assert [body for _, body in read(lab)] == [b"before", large, b"after"]


def test_threads(lab: Lab, publisher: Make) -> None:
    def work(p: Any, confirms: list[Any]) -> None:
        confirms += [p.publish("", "s", BODY) for _ in range(1500)]

    lists: list[list[Any]] = [[] for _ in range(4)]
    with publisher(lab, window=500) as p:
        threads = [threading.Thread(target=work, args=(p, confirms)) for confirms in lists]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        p.flush(PATIENCE_S)
    assert all(confirm.done for confirms in lists for confirm in confirms)
    assert sequences(lab) == list(range(1, 6001))


def test_callbacks_may_publish(lab: Lab) -> None:
    """The sync publisher; test_publisher_async.py has the other."""
    with Publisher([lab.nodes["e1"].admin], "app-1", "orders") as p:
        follow_ups: list[Confirm] = []
        p.publish("", "s", b"1").add_done_callback(lambda _: follow_ups.append(p.publish("", "s", b"2")))
        until(lambda: follow_ups)
        follow_ups[0].result(PATIENCE_S)
    assert [body for _, body in read(lab)] == [b"1", b"2"]


# ---- what the broker refuses


def test_a_message_that_closes_the_channel_fails_alone(lab: Lab, publisher: Make) -> None:
    with publisher(lab) as p:
        confirms = [p.publish("no-such-exchange" if number % 40 == 7 else "", "s", BODY) for number in range(100)]
        bad_ttl = p.publish("", "s", b"", pika.BasicProperties(expiration="soon"))
        p.publish("", "s", b"last").result(PATIENCE_S)
        for confirm in (confirms[7], confirms[47], confirms[87]):
            with pytest.raises(NackedError, match="404 NOT_FOUND") as caught:
                confirm.result(PATIENCE_S)
            assert caught.value.code == 404
        with pytest.raises(NackedError, match="406 PRECONDITION_FAILED"):
            bad_ttl.result(PATIENCE_S)
    assert sequences(lab) == [number for number in range(1, 103) if number not in (8, 48, 88, 101)]


def test_a_message_that_closes_the_connection_fails_alone(lab: Lab, publisher: Make) -> None:
    """A decimal header kills a connection that publishes to a stream on some versions."""
    with publisher(lab) as p:
        before = [p.publish("", "s", BODY) for _ in range(50)]
        poison = p.publish("", "s", b"", pika.BasicProperties(headers={"price": decimal.Decimal("1.5")}))
        after = [p.publish("", "s", BODY) for _ in range(50)]
        for confirm in before + after:
            confirm.result(PATIENCE_S)
        if poison.error is not None:
            assert isinstance(poison.error, NackedError)
            assert poison.error.code == 541
    assert [number for number in sequences(lab) if number != 51] == [number for number in range(1, 102) if number != 51]


@pytest.mark.quick
def test_a_full_queue_nacks(lab: Lab, publisher: Make) -> None:
    with channel(lab) as ch:
        ch.queue_delete("full")
        ch.queue_declare("full", durable=True, arguments={"x-max-length": 5, "x-overflow": "reject-publish"})
    with publisher(lab) as p:
        confirms = []
        for _ in range(8):  # one at a time: the queue notices its limit a little late
            confirms.append(p.publish("", "full", b""))
            until(lambda: confirms[-1].done)
        assert sum(confirm.error is None for confirm in confirms) in (5, 6)
        with pytest.raises(NackedError, match="nack"):
            confirms[-1].result(PATIENCE_S)


def test_flush_and_close_raise_what_nobody_looked_at(lab: Lab, publisher: Make) -> None:
    p = publisher(lab)
    p.publish("", "nowhere", b"")
    with pytest.raises(NackedError, match="app-1/1"):
        p.flush(PATIENCE_S)
    p.flush(PATIENCE_S)
    p.publish("", "nowhere", b"")
    with pytest.raises(NackedError, match="app-1/1"):
        p.close(PATIENCE_S)
    p.close()


# ---- losing brokers


def test_no_primary_at_the_start_lists_what_each_address_answered(lab: Lab, api: Make) -> None:
    refusing = refusing_port()
    wrong = lab.nodes["e2"].broker.replace("app:", "app:not-", 1)
    error = no_primary(lambda timeout_s: api([f"amqp://app:app@127.0.0.1:{refusing}", wrong], "app-1", connect_timeout_s=timeout_s))
    assert "refused" in error.answers[f"127.0.0.1:{refusing}"].lower()
    assert "ACCESS_REFUSED" in str(error)
    assert "not-" not in str(error), "no passwords in errors"


@contextmanager
def listener(greet: Callable[[socket.socket], object]) -> Iterator[int]:
    """A port that is not a broker's: `greet` has each connection for itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    greet(server.accept()[0])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield int(server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(5)


def test_strange_addresses_are_left(lab: Lab, api: Make) -> None:
    """Something that hangs up, something that says nothing, something that is no broker: then a broker."""
    kept: list[socket.socket] = []

    def no_broker(client: socket.socket) -> None:
        client.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        client.close()

    with listener(socket.socket.close) as closes, listener(kept.append) as silent, listener(no_broker) as other:
        strange = [f"amqp://app:app@127.0.0.1:{port}" for port in (closes, silent, other)]
        answers = no_primary(lambda timeout_s: api(strange, "app-1", connect_timeout_s=max(4.0, timeout_s), login_timeout_s=1.0)).answers
        assert answers[f"127.0.0.1:{silent}"] == "no login within 1.0 s"
        assert all(answers[f"127.0.0.1:{port}"] not in ("", "not tried yet", "no answer yet") for port in (closes, other))
        with api([*strange, lab.nodes["e1"].admin], "app-1", connect_timeout_s=PATIENCE_S, login_timeout_s=1.0) as p:
            p.publish("", "s", b"").result(PATIENCE_S)
    for client in kept:
        client.close()


def test_the_first_address_refuses(lab: Lab, api: Make) -> None:
    nodes = [f"amqp://app:app@127.0.0.1:{refusing_port()}", lab.nodes["e1"].admin]
    with api(nodes, "app-1", connect_timeout_s=PATIENCE_S) as p:
        p.publish("", "s", b"").result(PATIENCE_S)


def test_a_node_that_dies_just_after_it_has_taken_a_connection(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between pika's look at the connection and its first use of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        take_it = StreamingConnectionMixin.create_streaming_connection

        def dies_first(*args: Any, sock: socket.socket, **options: Any) -> Any:
            if sock.getpeername()[1] == listener.getsockname()[1]:
                taken, _ = listener.accept()
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                taken.close()  # with a reset
            return take_it(*args, sock=sock, **options)

        monkeypatch.setattr(StreamingConnectionMixin, "create_streaming_connection", dies_first)
        nodes = [f"amqp://app:app@127.0.0.1:{listener.getsockname()[1]}", lab.nodes["e1"].admin]
        with Publisher(nodes, "app-1", connect_timeout_s=PATIENCE_S) as p:
            p.publish("", "s", b"").result(PATIENCE_S)


def test_forced_close_by_the_broker(lab: Lab, publisher: Make) -> None:
    with publisher(lab) as p:
        confirms = [p.publish("", "s", BODY) for _ in range(2000)]
        lab.ctl("e1", "close_all_connections", "maintenance")
        confirms += [p.publish("", "s", BODY) for _ in range(2000)]
        confirms.append(p.transmit_log_entry_message(b"", ["west"]))
        for confirm in confirms:
            confirm.result(PATIENCE_S)
    assert sequences(lab) == list(range(1, 4001))


def test_a_stalled_broker_is_left(lab: Lab, publisher: Make) -> None:
    with publisher(lab, "e1", "e2", confirm_timeout_s=1.0) as p:
        p.publish("", "s", BODY).result(PATIENCE_S)
        lab.stop("e1.broker")
        try:
            confirms = [p.publish("", "s", BODY) for _ in range(100)]
            confirms.append(p.transmit_log_entry_message(b"", ["west"]))
            for confirm in confirms:
                confirm.result(PATIENCE_S)
        finally:
            lab.cont("e1.broker")
    # The first is there too if a pause made it look as if e1 stalled even then.
    assert [number for number in sequences(lab, "e2") if number != 1] == list(range(2, 102))


def test_an_idle_stalled_broker_is_left_by_heartbeats(lab: Lab, publisher: Make) -> None:
    with publisher(lab, "e1", "e2", heartbeat_s=1) as p:
        p.publish("", "s", b"").result(PATIENCE_S)
        lab.stop("e1.broker")
        try:
            first = next(iter(inside(p)._own.addresses.answers))
            until(lambda: "heartbeat" in inside(p)._own.addresses.answers[first])  # pika looks every interval + 5 s, and twice
            p.publish("", "s", b"").result(PATIENCE_S)
        finally:
            lab.cont("e1.broker")


def test_a_full_window_blocks_and_says_so(lab: Lab, publisher: Make) -> None:
    with publisher(lab, window=10, publish_timeout_s=0.3, confirm_timeout_s=2 * PATIENCE_S) as p:
        p.publish("", "s", b"").result(PATIENCE_S)
        lab.stop("e1.broker")
        try:
            confirms = [p.publish("", "s", b"") for _ in range(10)]
            with pytest.raises(WindowFull, match="10 messages"):
                p.publish("", "s", b"")
            blocked: list[Any] = []
            inside(p)._publish_timeout_s = 2 * PATIENCE_S
            thread = threading.Thread(target=lambda: blocked.append(p.publish("", "s", b"")))
            thread.start()
            thread.join(0.2)
            assert thread.is_alive()
        finally:
            lab.cont("e1.broker")
        thread.join(PATIENCE_S)
        assert [confirm.result(PATIENCE_S) for confirm in confirms + blocked] == [f"app-1/{number}" for number in range(2, 13)]
    assert sequences(lab) == list(range(1, 13))


def test_a_large_message_is_not_overtaken_for_ever(lab: Lab, publisher: Make) -> None:
    """It needs most of the window, which small ones keep filled."""
    with publisher(lab, window_bytes=100_000, publish_timeout_s=2 * PATIENCE_S, confirm_timeout_s=2 * PATIENCE_S) as p:
        stop = threading.Event()

        def small() -> None:
            while not stop.is_set():
                p.publish("", "s", b"x" * 10_000)

        threads = [threading.Thread(target=small) for _ in range(20)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(0.2)
            for _ in range(5):
                p.publish("", "s", b"x" * 95_000)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        p.flush(2 * PATIENCE_S)


def test_memory_is_bounded_by_the_window(lab: Lab, publisher: Make) -> None:
    """50 MB through a window of 1 MiB."""
    with publisher(lab, window_bytes=1024 * 1024) as p:
        p.publish("", "s", b"").result(PATIENCE_S)
        tracemalloc.start()
        for number in range(1000):
            p.publish("", "s", number.to_bytes(4, "big") * 12_500)
        p.flush(60)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < 8 * 1024 * 1024
    assert sequences(lab) == list(range(1, 1002))


def test_a_broker_without_a_limit_on_frames(lab: Lab, publisher: Make) -> None:
    """The async publisher sent headers without bodies."""
    lab.ctl("e1", "eval", "application:set_env(rabbit, frame_max, 0).")
    try:
        with publisher(lab) as p:
            p.publish("", "s", BODY * 300).result(PATIENCE_S)
    finally:
        lab.ctl("e1", "eval", "application:set_env(rabbit, frame_max, 131072).")
    assert [body for _, body in read(lab)] == [BODY * 300]


def test_a_publisher_whose_thread_fails(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    with Publisher([lab.nodes["e1"].admin], "app-1", connect_timeout_s=PATIENCE_S) as p:
        p._loop.add_callback_threadsafe(lambda: 1 / 0)
        with pytest.raises(PublisherClosed, match="ZeroDivisionError"):
            until(lambda: p.publish("", "s", b"") is None)
        p._thread.join(PATIENCE_S)
    assert p._loop._poller._w_interrupt is None, "closed"
    assert "The publisher's I/O thread failed" in caplog.text


def test_a_resource_alarm_is_waited_for(lab: Lab, publisher: Make) -> None:
    """Three times as long as a confirm may take; and when it is over, the time does not count.

    Once more, with more time, if a confirm was late for another reason: only then the publisher leaves e1.
    """
    waited, elsewhere = False, [0]
    for confirm_timeout_s in (1.0, 5.0, 20.0):
        make_streams(lab)
        with publisher(lab, "e1", "e2", confirm_timeout_s=confirm_timeout_s) as p:
            p.publish("", "s", b"").result(PATIENCE_S)
            lab.ctl("e1", "set_vm_memory_high_watermark", "absolute", "1")
            try:
                confirms = [p.publish("", "s", BODY) for _ in range(100)]
                confirms[-1].result(3 * confirm_timeout_s)
                waited = False
            except TimeoutError as error:
                waited = isinstance(error, ConfirmTimeout)
            finally:
                lab.ctl("e1", "set_vm_memory_high_watermark", "0.4")
            for confirm in confirms:
                confirm.result(PATIENCE_S)
        elsewhere = sequences(lab, "e2")
        if waited and not elsewhere:
            break
    assert waited
    assert elsewhere == []
    assert sequences(lab) == list(range(1, 102))


def test_close_with_unconfirmed(lab: Lab, publisher: Make) -> None:
    p = publisher(lab)
    p.publish("", "s", b"").result(PATIENCE_S)
    lab.stop("e1.broker")
    try:
        confirm = p.publish("", "s", b"")
        called: list[Any] = []
        confirm.add_done_callback(called.append)
        with pytest.raises(TimeoutError, match="1 messages"):
            p.close(timeout_s=0.2)
        with pytest.raises(Unconfirmed, match="app-1/2"):
            confirm.result(0)
        assert called == [confirm]
        with pytest.raises(PublisherClosed):
            p.publish("", "s", b"")
    finally:
        lab.cont("e1.broker")


def test_close_wakes_who_is_blocked(lab: Lab, publisher: Make) -> None:
    p = publisher(lab, window=1)
    p.publish("", "s", b"").result(PATIENCE_S)
    lab.stop("e1.broker")
    try:
        p.publish("", "s", b"")
        raised: list[BaseException] = []

        def blocked() -> None:
            try:
                p.publish("", "s", b"")
            except PublisherClosed as error:
                raised.append(error)

        thread = threading.Thread(target=blocked)
        thread.start()
        with pytest.raises(TimeoutError):
            p.close(timeout_s=0.2)
        thread.join(PATIENCE_S)
        assert len(raised) == 1
    finally:
        lab.cont("e1.broker")


def test_an_exception_in_the_block_is_not_hidden_by_close(lab: Lab, publisher: Make) -> None:
    def work() -> None:
        with publisher(lab) as p:
            p.publish("", "nowhere", b"")
            raise KeyError

    with pytest.raises(KeyError):
        work()
