"""The door's limits, each by who exceeds it: that one's connection ends, another on the same door goes on. And what an idle connection costs."""

from __future__ import annotations

import os
import re
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pika
import pytest
from load import command, eventually, in_sync, told
from pamqp import commands
from patience import PATIENT_DOOR
from pika.exceptions import ChannelClosedByBroker
from raw_client import RawClient, publish
from sidecar_process import Sidecar
from test_many_queues import cpu_s

from broker_plugin.amqp import content_assembly, content_header, encode, frames
from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3")]

CONNECTIONS_MAX, CLIENTS_MAX = 40, 38
HANDSHAKE_S = 2.0
LIMITS = PATIENT_DOOR | {
    "connections_max": CONNECTIONS_MAX,
    "login_bytes_max": 8_192,
    "hold_up_timeout_s": 2.0,
    "channels_max": 50,
    "questions_max": 500,
    "producers_max": 3,
    "transaction_bytes_max": 1 << 20,
    "frame_max_bytes": 8_192,
    "header_bytes_max": 2_048,
    "header_depth_max": 5,
    "message_bytes_max": 2 << 20,
    "unfinished_bytes_max": 3 << 20,
    "client_buffer_bytes_max": 512 << 10,
    "client_buffers_bytes_max": 1 << 20,
}
TOO_LARGE = "PRECONDITION_FAILED - message size 200000000 is larger than configured max size 2097152"
STILL_S, PIECE_BYTES = 5.0, 1 << 16
IDLE = int(os.environ.get("LRQ_IDLE_CONNECTIONS", "5000"))
IDLE_BYTES_MAX = 60 << 10


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab({"east": 1}, tmp_path_factory.mktemp("limits"), broker_version, door=LIMITS) as found:
        yield found


@pytest.fixture
def url(lab: Lab) -> str:
    eventually("the connections of other tests to be gone", lambda: lab.status("e1")["sockets"] == 0)
    return lab.nodes["e1"].door


@pytest.fixture
def hurried(lab: Lab, tmp_path: Path) -> Iterator[Sidecar]:
    """A door beside the same broker that gives a login HANDSHAKE_S."""
    with Sidecar(lab, tmp_path, f"hurried-{time.time_ns() % 10**9}", handshake_timeout_s=HANDSHAKE_S) as sidecar:
        sidecar.becomes("active")
        yield sidecar


def ends_a_slow_login(lab: Lab, hurried: Sidecar) -> None:
    """The door itself did it, before the broker would have; and others come in."""
    eventually("the log", lambda: f"did not finish its login within {HANDSHAKE_S:g} s" in hurried.said())
    eventually("others to come in", lambda: works(f"{lab.nodes['e1'].door.rpartition('@')[0]}@{hurried.door}") is None)


def works(url: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        queue = channel.queue_declare("", exclusive=True).method.queue
        for body in (b"x", b"y" * 100_000):
            channel.basic_publish("", queue, body)
            assert channel.basic_get(queue, auto_ack=True)[2] == body


def is_held_up(client: RawClient, data: bytes, times: int, url: str) -> None:
    """Sends this until the door takes no more of it, which is not just slow: it has time for others."""
    rest = memoryview(data * times)
    while True:
        if select.select([], [client.socket], [], STILL_S)[1]:
            rest = rest[client.socket.send(rest[:PIECE_BYTES]) :]
            assert rest, "all of it was taken"
        else:
            works(url)
            if not select.select([], [client.socket], [], 0)[1]:
                return


def refused(client: RawClient) -> str:
    """The text of the connection.close that ends it."""
    assert client.closed()
    kind, _, payload = client.got[-1]
    assert kind == frames.CONNECTION_CLOSE
    return payload[7 : 7 + payload[6]].decode()


@pytest.mark.quick
def test_one_connection_too_many_is_closed_at_once(lab: Lab, url: str) -> None:
    clients = [client_of(url) for _ in range(CLIENTS_MAX)]
    try:
        with pytest.raises((AssertionError, ConnectionError)):
            client_of(url)
        eventually("the log", lambda: "door.connections_max" in lab.nodes["e1"].log.read_text())
        clients.pop().socket.close()
        eventually("room", lambda: lab.status("e1")["sockets"] < CLIENTS_MAX)
        works(url)
    finally:
        for client in clients:
            client.socket.close()


def test_neither_clients_nor_unfinished_logins_keep_a_node_out(new_lab: Callable[..., Lab], broker_version: str) -> None:
    """A backup comes back while the primary's door has as many clients as it takes, and more sockets that never log in than there is room for."""
    with new_lab({"east": 2}, broker=broker_version, door={"handshake_timeout_s": 300.0, "connections_max": CONNECTIONS_MAX}) as lab:
        primary, backup = in_sync(lab)
        url = lab.nodes[primary].door
        lab.kill(f"{backup}.sidecar")
        eventually("its connections to be gone", lambda: told(lab, primary)["sockets"] == 0)
        open_ones: list[RawClient] = []
        try:
            with suppress(AssertionError):  # it is full
                while True:
                    open_ones.append(RawClient(url, login=False))
                    open_ones[-1].login("/", 0, 8_192, {})
            assert len(open_ones) > CONNECTIONS_MAX // 2
            for _ in range(2 * CONNECTIONS_MAX):
                open_ones.append(RawClient(url, login=False))
            eventually("all room to be taken", lambda: told(lab, primary)["sockets"] == CONNECTIONS_MAX)
            lab.start(f"{backup}.sidecar")
            in_sync(lab)
            open_ones[0].open_channel()  # who has logged in was not touched
        finally:
            for client in open_ones:
                client.socket.close()


@pytest.mark.parametrize("sent", [b"", b"AM", frames.PROTOCOL_HEADER, frames.PROTOCOL_HEADER + b"\x01\x00\x00"])
def test_a_login_takes_so_long_at_most(lab: Lab, hurried: Sidecar, sent: bytes) -> None:
    began = time.monotonic()
    with RawClient(f"amqp://{hurried.door}", login=False) as client:
        client.send(sent)
        assert client.closed()
        assert time.monotonic() - began >= HANDSHAKE_S - 0.1
    ends_a_slow_login(lab, hurried)


def test_a_login_an_octet_at_a_time_is_over_in_time_too(lab: Lab, hurried: Sidecar) -> None:
    """All octets would take a minute."""
    with RawClient(f"amqp://{hurried.door}", login=False) as client:
        try:
            for octet in frames.PROTOCOL_HEADER + client.start_ok():
                client.send(bytes((octet,)))
                time.sleep(0.25)
            pytest.fail("it went on")
        except ConnectionError:
            pass
    ends_a_slow_login(lab, hurried)


def test_a_login_has_so_many_bytes_at_most(lab: Lab, url: str) -> None:
    """It is over at once, and not when its time is over. What follows a login at once may be more."""
    with RawClient(url, login=False) as client:
        client.send(frames.PROTOCOL_HEADER)
        client.expect(frames.CONNECTION_START)
        client.send(encode.frame(frames.METHOD, 0, client.start_ok()[7:-1].ljust(10_000, b"x"))[:9_000])
        assert client.closed()
    eventually("the log", lambda: "before its login was finished: door.login_bytes_max" in lab.nodes["e1"].log.read_text())
    with RawClient(url, login=False) as client:
        client.send(frames.PROTOCOL_HEADER)
        client.expect(frames.CONNECTION_START)
        client.send(client.start_ok())
        client.expect(frames.CONNECTION_TUNE)
        methods = [(0, commands.Connection.TuneOk(50, 8_192, 0)), (0, commands.Connection.Open("/"))]
        methods += [(1, commands.Channel.Open()), (1, commands.Confirm.Select())]
        client.send(b"".join(encode.method_frame(channel, method) for channel, method in methods) + publish_in(client, 1 << 20))
        client.expect(frames.CONFIRM_SELECT_OK)
        assert client.confirmed(1) == set()
    works(url)


@pytest.mark.quick
def test_channels_of_a_connection_are_limited(url: str) -> None:
    """Those that it never opened cost nothing: the first of them ends the connection."""
    with RawClient(url, login=False) as client:
        client.send(frames.PROTOCOL_HEADER)
        client.expect(frames.CONNECTION_START)
        client.send(client.start_ok())
        tune: Any = frames.decode_method(client.expect(frames.CONNECTION_TUNE))
        assert tune.channel_max == LIMITS["channels_max"]
        client.send(encode.method_frame(0, commands.Connection.TuneOk(51, 8_192, 0)))
        assert "channel_max = 51 is higher than the maximum allowed value (50)" in refused(client)
    with client_of(url) as client:
        client.send(b"".join(encode.method_frame(n, commands.Basic.Qos()) for n in range(1, 300)))
        assert "expected 'channel.open'" in refused(client)
    with client_of(url) as client:
        client.send(b"".join(encode.method_frame(n, commands.Channel.Open()) for n in range(1, 52)))
        assert "channel_max (50)" in refused(client), "in the broker's words"
    works(url)


def test_questions_without_an_answer_are_limited(url: str) -> None:
    with client_of(url) as client:
        client.open_channel()
        client.send(encode.method_frame(1, commands.Basic.Get(queue="none")) * 3_000)
        assert "door.questions_max" in refused(client)
    works(url)


def test_repeats_that_wait_are_limited(lab: Lab, url: str) -> None:
    """A repeat costs the log nothing. Its first one waits behind deliveries that nobody takes, and so does its confirm."""
    named: Any = {"lrq_producer": "repeats"}
    message = publish(1, "repeats", b"x", fields=content_header.field(b"x-lrq-id", b"repeats/1"))
    with client_of(url) as other, RawClient(url, login=False) as client:
        other.open_channel(confirms=True)
        other.call(1, commands.Queue.Declare(queue="repeats", durable=True), frames.QUEUE_DECLARE_OK)
        other.send(publish_in(other, 10_000, key="repeats") * 2_000)
        assert other.confirmed(2_000) == set()
        deaf(client, named)
        client.call(1, commands.Confirm.Select(), frames.CONFIRM_SELECT_OK)
        client.send(publish(1, "repeats", b"may I?"))
        assert client.confirmed(1) == set()
        client.send(encode.method_frame(1, commands.Basic.Consume(queue="repeats")))
        time.sleep(1.0)  # in which as much is under way as there is room for
        before = told(lab, "e1")
        is_held_up(client, message * 1_000, 1_000, url)
        after = told(lab, "e1")
        assert after["counters"]["repeats"] - before["counters"].get("repeats", 0) < 10_000
        assert after["rss_bytes"] - before["rss_bytes"] < 50 << 20
        client.socket.close()
        other.call(1, commands.Queue.Delete(queue="repeats"), frames.QUEUE_DELETE_OK)
    works(url)


def test_producers_are_limited(url: str) -> None:
    """Of those that the log remembers each may come again."""

    def comes(name: str) -> None:
        with RawClient(url, properties={"lrq_producer": name}) as client:
            client.open_channel(confirms=True)
            client.send(publish(1, "nowhere", b"x", fields=content_header.field(b"x-lrq-id", f"{name}/1".encode())))
            assert client.confirmed(1) == set()

    comes("first")
    comes("second")  # another test has one, too
    with suppress(AssertionError):
        comes("third")
    with pytest.raises(AssertionError, match=r"door\.producers_max"):
        comes("fourth")
    comes("first")
    works(url)


@pytest.fixture
def narrow(lab: Lab, tmp_path: Path) -> Iterator[tuple[Sidecar, str]]:
    """A door beside the same broker that remembers replication IDs in a MiB, of one producer in a quarter."""
    limit, often = "id_bytes_max = 1048576\n[http]", "[replication]\ncheckpoint_entries = 3000\n"
    with Sidecar(lab, tmp_path, f"ids-{time.time_ns() % 10**9}", edit=lambda text: text.replace("[http]", limit), more=often) as sidecar:
        sidecar.becomes("active")
        yield sidecar, f"{lab.nodes['e1'].door.rpartition('@')[0]}@{sidecar.door}"


def numbered(producer: str, number: int, *, status: bool = False, key: str = "numbered") -> bytes:
    named = content_header.field(b"x-lrq-id", f"{producer}/{number}".encode())
    if not status:
        return publish(1, key, b"x", fields=named)
    return publish(1, "LRQ_Status", pb.Status(key="client/wide", client=pb.ClientStatus(client_name="wide")).SerializeToString(), fields=named)


@pytest.mark.parametrize("way", ["plain", "in a transaction", "in vhost lrq"])
def test_ids_that_lie_far_apart_are_limited(narrow: tuple[Sidecar, str], way: str) -> None:
    """Each is remembered for ever. Other producers go on, and the refused one when it numbers consecutively."""
    _, url = narrow
    vhost, tx, status = ("lrq" if way == "in vhost lrq" else "/"), way == "in a transaction", way == "in vhost lrq"
    wide, at_once = range(2**20, 2**62, 2**33 + 1)[:17_000], 500

    def publish_all(producer: str, numbers: Sequence[int]) -> None:
        with RawClient(url, vhost, properties={"lrq_producer": producer}) as client:
            client.open_channel(confirms=not tx)
            if tx:
                client.call(1, commands.Tx.Select(), frames.TX_SELECT_OK)
            client.send(b"".join(numbered(producer, number, status=status) for number in numbers))
            if tx:
                client.call(1, commands.Tx.Commit(), frames.TX_COMMIT_OK)
            else:
                assert client.confirmed(len(numbers)) == set()

    with RawClient(url) as client:
        client.open_channel()
        client.call(1, commands.Queue.Declare(queue="numbered", durable=True), frames.QUEUE_DECLARE_OK)
    for first in range(0, 8_000, at_once):
        publish_all("wide", wide[first : first + at_once])

    def go_on() -> None:
        for first in range(8_000, len(wide), at_once):
            publish_all("wide", wide[first : first + at_once])

    with pytest.raises(AssertionError, match=r"door\.id_bytes_max"):
        go_on()
    publish_all("odd", range(1, 1_000, 2))
    publish_all("wide", [*range(wide[7_999] + 1, wide[7_999] + 9), wide[7_000] - 1])
    works(url)


def test_ids_are_known_after_a_restart_from_a_checkpoint(narrow: tuple[Sidecar, str]) -> None:
    """Strewn wide up to the limit, dense with gaps, and consecutive."""
    sidecar, url = narrow
    queue = f"restarted-{time.time_ns()}"
    sent: dict[str, list[int]] = {"wide": [*range(2**20, 2**62, 2**33 + 1)[:8_000]], "odd": [*range(1, 16_000, 2)], "next": [*range(1, 4_000)]}

    def publish_all(producer: str, numbers: list[int]) -> None:
        with RawClient(url, properties={"lrq_producer": producer}) as client:
            client.open_channel(confirms=True)
            client.send(b"".join(numbered(producer, number, key=queue) for number in numbers))
            assert client.confirmed(len(numbers)) == set()

    def holds(count: int) -> bool:
        with RawClient(url) as client:
            client.open_channel()
            payload = client.call(1, commands.Queue.Declare(queue=queue, passive=True), frames.QUEUE_DECLARE_OK)
            return int.from_bytes(payload[-8:-4], "big") == count

    with RawClient(url) as client:
        client.open_channel()
        client.call(1, commands.Queue.Declare(queue=queue, durable=True), frames.QUEUE_DECLARE_OK)
    for producer, numbers in sent.items():
        publish_all(producer, numbers)
    total = sum(map(len, sent.values()))
    eventually("all of it to be there", lambda: holds(total))
    eventually("the log to be applied", lambda: (s := sidecar.status())["applied"] == s["end"])
    time.sleep(2.0)  # in which that is recorded
    sidecar.process.kill()
    sidecar.process.wait()
    with sidecar:
        sidecar.becomes("active")
        read_from = re.findall(r"rebuilt: log to \d+ \(\d+ batches read from entry (\d+) on\)", sidecar.said())[-1]
        assert int(read_from) > total // 2
        for producer, numbers in sent.items():
            publish_all(producer, numbers)
            publish_all(producer, [numbers[-1] + 1])
        publish_all("odd", [2, 16_003])
        eventually("what is new to be there, too", lambda: holds(total + 5))


@pytest.mark.quick
def test_a_transaction_is_limited(url: str) -> None:
    with client_of(url) as client:
        client.open_channel()
        client.call(1, commands.Tx.Select(), frames.TX_SELECT_OK)
        for _ in range(9):
            client.send(publish_in(client, 120_000))
        with pytest.raises(AssertionError, match=r"door\.transaction_bytes_max"):
            client.expect(frames.TX_COMMIT_OK)
    works(url)


def test_open_transactions_are_limited_together(url: str) -> None:
    """Each is below the limit on one; on many channels they would hold as much as there is memory. What is over leaves its room."""

    def begins(client: RawClient, channel: int, size: int) -> None:
        client.open_channel(channel)
        client.call(channel, commands.Tx.Select(), frames.TX_SELECT_OK)
        client.send(encode.rechannel(publish_in(client, size), channel))

    with client_of(url) as client, client_of(url) as other:
        for _ in range(10):  # one after the other they are no more than one
            for end, ok in ((commands.Tx.Commit(), frames.TX_COMMIT_OK), (commands.Tx.Rollback(), frames.TX_ROLLBACK_OK)):
                begins(other, 1, 900_000)
                other.call(1, end, ok)
                other.call(1, commands.Channel.Close(200, "", 0, 0), frames.CHANNEL_CLOSE_OK)
            begins(other, 1, 900_000)
            other.call(1, commands.Channel.Close(200, "", 0, 0), frames.CHANNEL_CLOSE_OK)
        with suppress(AssertionError, OSError):
            for channel in range(1, 6):
                begins(client, channel, 900_000)
        assert "door.unfinished_bytes_max" in refused(client)
        begins(other, 1, 900_000)
        other.call(1, commands.Tx.Commit(), frames.TX_COMMIT_OK)
    works(url)


def test_who_does_not_read_the_doors_own_answers_is_not_read_either(url: str) -> None:
    """A channel that the door has closed answers every close; nobody takes these answers."""
    with client_of(url) as client:  # no small SO_RCVBUF: when it is full, the kernel itself may hold up what is sent
        client.open_channel()
        with pytest.raises(AssertionError, match="route"):
            client.call(1, commands.Exchange.Declare(exchange="r", exchange_type="x-random"), frames.EXCHANGE_DECLARE_OK)
        # 46 MB, with 24 MB of answers: more than sockets hold
        is_held_up(client, encode.method_frame(1, commands.Channel.Close(200, "", 0, 0)) * 1_000, 2_000, url)
    works(url)


def test_clients_are_offered_the_doors_frames_and_held_to_them(url: str) -> None:
    with RawClient(url) as client:
        assert client.frame_max == LIMITS["frame_max_bytes"]
    with pytest.raises(AssertionError, match="frame_max = 131072 is higher"):
        RawClient(url, frame_max=131_072)
    with RawClient(url, frame_max=LIMITS["frame_max_bytes"]) as client:  # type: ignore[arg-type]
        client.open_channel()
        client.send(encode.frame(frames.METHOD, 1, b"\0\x3c\0\x28" + b"x" * 8_200))
        assert "exceeds" in refused(client)
    works(url)


def client_of(url: str, **options: object) -> RawClient:
    return RawClient(url, frame_max=8_192, **options)  # type: ignore[arg-type]


def test_headers_of_a_message_are_limited(url: str) -> None:
    with client_of(url) as client:
        client.open_channel(confirms=True)
        client.call(1, commands.Queue.Declare(queue="limited", durable=True), frames.QUEUE_DECLARE_OK)
        client.send(publish(1, "limited", b"x", fields=content_header.field(b"h", b"v" * 1_900)))
        assert client.confirmed(1) == set()
        client.send(publish(1, "limited", b"x", fields=content_header.field(b"h", b"v" * 2_200)))
        assert "door.header_bytes_max" in refused(client)
    for depth, fine in ((5, True), (6, False)):
        nested = b""
        for _ in range(depth):
            nested = b"\x01nF" + len(nested).to_bytes(4, "big") + nested
        with client_of(url) as client:
            client.open_channel(confirms=True)
            client.send(publish(1, "limited", b"x", fields=nested))
            if fine:
                assert client.confirmed(1) == set()
            else:
                assert "door.header_depth_max" in refused(client)
    works(url)


def test_headers_of_a_transaction_are_limited_when_they_come(url: str) -> None:
    """Not at the commit, when nobody could say any more which message it was."""
    nested = b"\x01hF\0\0\0\0"
    for _ in range(5):
        nested = b"\x01nF" + len(nested).to_bytes(4, "big") + nested
    for fields, limit in ((content_header.field(b"h", b"v" * 2_200), "door.header_bytes_max"), (nested, "door.header_depth_max")):
        with client_of(url) as client:
            client.open_channel()
            client.call(1, commands.Tx.Select(), frames.TX_SELECT_OK)
            client.send(publish(1, "limited", b"x", fields=fields))
            assert limit in refused(client)
    works(url)


def closed_ones(*clients: RawClient) -> list[RawClient]:
    """Those that the door has closed, once there are any."""
    found: list[RawClient] = []

    def some() -> bool:
        found[:] = [client for client in clients if client.closed(0.1)]
        return bool(found)

    eventually("some to be closed", some)
    return found


def chunk(channel: int, size: int) -> bytes:
    return encode.frame(frames.BODY, channel, b"b" * size)


def test_a_message_and_all_unfinished_ones_are_limited(lab: Lab, url: str) -> None:
    with client_of(url) as client:
        client.open_channel()
        before = told(lab, "e1")["rss_bytes"]
        client.send(encode.publish_method(1, "", "limited") + encode.frame(frames.HEADER, 1, content_header.header_payload(200_000_000)))
        for _ in range(250):
            client.send(chunk(1, 8_000) * 100)
        assert client.read() == (frames.CHANNEL_CLOSE, 1, encode.channel_close(1, 406, TOO_LARGE, frames.BASIC_PUBLISH)[7:-1])
        assert told(lab, "e1")["rss_bytes"] < before + (60 << 20)
        client.send(encode.method_frame(1, commands.Channel.CloseOk()))
        client.open_channel(confirms=True)
        client.send(publish_in(client, 2 << 20))
        assert client.confirmed(1) == set()
    with client_of(url) as client:
        client.open_channel()
        client.send(encode.publish_method(1, "", "limited") + encode.frame(frames.HEADER, 1, content_header.header_payload((512 << 20) + 1)))
        client.send(b"".join(chunk(1, 8_000) for _ in range(40)))  # more than is waited for as a whole
        assert refused(client) == "FRAME_ERROR - content body size 536870913 exceeds maximum allowed size 536870912"
    with client_of(url) as one, client_of(url) as other:
        for client in (one, other):
            client.open_channel()
            client.send(encode.publish_method(1, "", "limited") + encode.frame(frames.HEADER, 1, content_header.header_payload(2 << 20)))
            client.send(b"".join(chunk(1, 8_000) for _ in range(200)))  # 1.6 MB of 2 MB
        assert "door.unfinished_bytes_max" in refused(closed_ones(one, other)[0])
    works(url)
    with client_of(url) as client:  # the room is free again
        client.open_channel(confirms=True)
        client.send(publish_in(client, 2 << 20))
        assert client.confirmed(1) == set()


def test_who_holds_most_makes_room(url: str) -> None:
    """And not whoever comes next: so one client ended the connections of all others that had a message under way."""
    with client_of(url) as holder, client_of(url) as other:
        for client, size in ((holder, 2 << 20), (other, 1_500_000)):
            client.open_channel(confirms=True)
            client.send(encode.publish_method(1, "", "limited") + encode.frame(frames.HEADER, 1, content_header.header_payload(size)))
        holder.send(chunk(1, 8_000) * 250)  # 2,000,000 bytes, and no more
        holder.send(encode.method_frame(2, commands.Channel.Open()))
        holder.expect(frames.CHANNEL_OPEN_OK)
        other.send(chunk(1, 8_000) * 187 + chunk(1, 4_000))  # more than is left of 3 MB
        assert other.confirmed(1) == set()
        assert "door.unfinished_bytes_max" in refused(holder)
    works(url)


@pytest.fixture
def strict(lab: Lab, tmp_path: Path) -> Iterator[str]:
    """A door beside the same broker that takes 1000 bytes."""
    limit = "message_bytes_max = 1000\n[http]"
    with Sidecar(lab, tmp_path, f"strict-{time.time_ns() % 10**9}", edit=lambda text: text.replace("[http]", limit)) as sidecar:
        sidecar.becomes("active")
        yield f"{lab.nodes['e1'].door.rpartition('@')[0]}@{sidecar.door}"


@pytest.mark.quick
def test_a_limit_is_changed_without_a_restart(lab: Lab, url: str) -> None:
    """Down, for a client that is connected too, and up again. The clients stay."""
    node = lab.nodes["e1"]
    before = node.config.read_text()
    usual, small = (f"message_bytes_max = {size}" for size in (LIMITS["message_bytes_max"], 1_000))
    assert usual in before
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        queue = channel.queue_declare("", exclusive=True).method.queue
        try:
            node.config.write_text(before.replace(usual, small))
            assert "door.message_bytes_max counts from now on" in command("reload", "e1", lab=lab)[1]
            channel.basic_publish("", queue, b"a" * 1_001)
            with pytest.raises(ChannelClosedByBroker, match="message size 1001 is larger than configured max size 1000"):
                channel.queue_declare(queue, passive=True)
        finally:
            node.config.write_text(before)
            code, _ = command("reload", "e1", lab=lab)
        assert (code, lab.status("e1")["pending_restart"]) == (0, [])
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", queue, b"a" * 1_001)
        assert channel.basic_get(queue, auto_ack=True)[2] == b"a" * 1_001


@pytest.mark.quick
@pytest.mark.parametrize("way", ["whole", "in pieces", "alike", "not replicated", "in a transaction"])
def test_a_small_message_is_limited_too(strict: str, way: str) -> None:
    """However it arrives, and wherever it goes: what comes before it is done, the connection goes on."""
    with RawClient(strict) as client:
        client.open_channel(confirms=way != "in a transaction")
        queue = f"small-{time.time_ns()}"
        client.call(1, commands.Queue.Declare(queue=queue, durable=True, exclusive=way == "not replicated"), frames.QUEUE_DECLARE_OK)
        if way == "in a transaction":
            client.call(1, commands.Tx.Select(), frames.TX_SELECT_OK)
            client.send(publish(1, queue, b"a" * 1_000))
            client.call(1, commands.Tx.Commit(), frames.TX_COMMIT_OK)
        else:
            client.send(publish(1, queue, b"a" * 1_000) * (3 if way == "alike" else 1))
            assert client.confirmed(3 if way == "alike" else 1) == set()
        data = publish(1, queue, b"b" * 1_001) * 3
        if way == "in pieces":
            for at in range(0, len(data), 100):
                client.send(data[at : at + 100])
        else:
            client.send(data)
        expected = "PRECONDITION_FAILED - message size 1001 is larger than configured max size 1000"
        found = client.read()
        while found is not None and found[0] != frames.CHANNEL_CLOSE:
            found = client.read()
        assert found == (frames.CHANNEL_CLOSE, 1, encode.channel_close(1, 406, expected, frames.BASIC_PUBLISH)[7:-1])
        client.send(encode.method_frame(1, commands.Channel.CloseOk()))
        client.open_channel(confirms=True)
        answer: Any = frames.decode_method(client.call(1, commands.Queue.Declare(queue=queue, passive=True), frames.QUEUE_DECLARE_OK))
        assert answer.message_count == (3 if way == "alike" else 1)
        client.send(publish(1, queue, b"c" * 1_000))
        assert client.confirmed(1) == set()


def test_beginnings_of_small_messages_are_limited_too(lab: Lab, url: str) -> None:
    """Each is waited for as a whole; slow writers of them would together hold as much as large messages."""
    clients = []
    try:
        for _ in range(20):
            clients.append(client := client_of(url))
            client.open_channel()
            client.send(encode.publish_method(1, "", "limited") + encode.frame(frames.HEADER, 1, content_header.header_payload(200_000)))
            client.send(b"".join(chunk(1, 8_000) for _ in range(23)))  # 184 of 200 kB
        eventually("the log", lambda: lab.status("e1")["counters"].get("client_errors", 0) > 0)
        said = {client.got[-1][2] for client in closed_ones(*clients)}
        assert all(b"door.unfinished_bytes_max" in text for text in said)
    finally:
        for client in clients:
            client.socket.close()
    works(url)
    with client_of(url) as client:  # the room is free again
        client.open_channel(confirms=True)
        client.send(publish_in(client, 2 << 20))
        assert client.confirmed(1) == set()


def test_contents_that_are_only_begun_are_limited_too(url: str) -> None:
    """A publish without its header, on many channels of a few connections."""
    clients = [client_of(url) for _ in range(10)]
    try:
        begun = b"".join(encode.frame(frames.METHOD, n, b"\0\x3c\0\x28".ljust(8_000, b"x")) for n in range(1, 50))
        for client in clients:
            client.send(b"".join(encode.method_frame(n, commands.Channel.Open()) for n in range(1, 50)))
            client.send(begun + frames.HEARTBEAT_FRAME)
        said = {client.got[-1][2] for client in closed_ones(*clients)}
        assert all(b"door.unfinished_bytes_max" in text for text in said)
    finally:
        for client in clients:
            client.socket.close()
    works(url)


def publish_in(client: RawClient, size: int, key: str = "limited") -> bytes:
    header = content_header.header_payload(size, content_header.properties())
    return encode.publish_method(1, "", key) + b"".join(encode.content(1, header, b"z" * size, 8_192))


def test_tiny_frames_cost_no_more_than_their_bytes(lab: Lab, url: str) -> None:
    """A body of a hundred thousand frames of an octet, written bit by bit: looked through again each time it would take minutes."""
    with client_of(url) as client:
        client.open_channel(confirms=True)
        client.call(1, commands.Queue.Declare(queue="tiny", durable=True), frames.QUEUE_DECLARE_OK)
        size = 100_000
        client.send(encode.publish_method(1, "", "tiny") + encode.frame(frames.HEADER, 1, content_header.header_payload(size)))
        pid = lab.nodes["e1"].sidecar_pid
        before = cpu_s(pid)
        for _ in range(size // 100):
            client.send(chunk(1, 1) * 100)
        assert client.confirmed(1, timeout_s=240) == set()
        assert cpu_s(pid) - before < 60
    works(url)


def deaf(client: RawClient, properties: dict[str, Any] | None = None) -> None:
    """Logs in, with a channel, and takes next to nothing of what it does not read."""
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.login("/", 0, 8_192, properties or {})
    client.open_channel()


def test_of_consumers_that_never_read_the_slowest_are_closed(lab: Lab, url: str) -> None:
    """Each holds little, all together no more than the limit; who reads goes on."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("unread", durable=True)
        for _ in range(260):
            channel.basic_publish("", "unread", b"u" * 200_000)
        before = told(lab, "e1")["rss_bytes"]
        clients = []
        for _ in range(6):
            client = RawClient(url, login=False)
            deaf(client)
            client.call(1, commands.Basic.Qos(0, 40, False), frames.BASIC_QOS_OK)
            client.send(encode.method_frame(1, commands.Basic.Consume(queue="unread")))
            clients.append(client)
        eventually("some to be closed", lambda: lab.status("e1")["counters"].get("closed_slow", 0) > 0)
        assert told(lab, "e1")["rss_bytes"] - before < 200 << 20
        works(url)
        for client in clients:
            client.socket.close()
        channel.queue_delete("unread")


def test_who_does_not_read_its_confirms_holds_up_no_declaration(lab: Lab, url: str) -> None:
    """A declaration waits until the broker has confirmed what was published before. The confirm stands behind deliveries that nobody takes."""
    with client_of(url) as other, RawClient(url, login=False) as client:
        other.open_channel(confirms=True)
        other.call(1, commands.Queue.Declare(queue="confirms", durable=True), frames.QUEUE_DECLARE_OK)
        other.send(publish_in(other, 1 << 20, key="confirms") * 20)
        assert other.confirmed(20) == set()
        before = told(lab, "e1")["counters"].get("closed_slow", 0)
        deaf(client)
        client.send(encode.method_frame(1, commands.Basic.Consume(queue="confirms")))
        # Each declaration is answered in time (`call`), whether one had to wait for a confirm or, as on some machines, none had.
        for i in range(100):
            with suppress(OSError):
                client.send(publish(1, "confirms", b"x"))
            other.call(1, commands.Queue.Declare(queue=f"confirms-{i}", durable=True), frames.QUEUE_DECLARE_OK)
            other.call(1, commands.Queue.Delete(queue=f"confirms-{i}"), frames.QUEUE_DELETE_OK)
            if told(lab, "e1")["counters"].get("closed_slow", 0) > before:
                break
        other.call(1, commands.Queue.Delete(queue="confirms"), frames.QUEUE_DELETE_OK)
    works(url)


def test_who_declares_and_reads_nothing_holds_up_others_for_a_moment(lab: Lab, url: str, tmp_path: Path) -> None:
    """While the broker carries out a declaration, everybody waits. Its answer is read, though it stands behind deliveries that nobody takes."""
    size, count, limits = 100_000, 70, "client_buffer_bytes_max = 524288\nhold_up_timeout_s = 40.0\n[http]"
    with Sidecar(lab, tmp_path, f"asks-{time.time_ns() % 10**9}", edit=lambda text: text.replace("[http]", limits)) as sidecar:
        sidecar.becomes("active")
        url = f"{url.rpartition('@')[0]}@{sidecar.door}"
        with client_of(url) as other, RawClient(url, login=False) as client:
            other.open_channel(confirms=True)
            asks, new = (f"{name}-{time.time_ns()}" for name in ("asks", "asked"))
            other.call(1, commands.Queue.Declare(queue=asks, durable=True), frames.QUEUE_DECLARE_OK)
            other.send(publish_in(other, size, key=asks) * count)
            assert other.confirmed(count) == set()
            deaf(client)
            client.send(encode.method_frame(1, commands.Basic.Consume(queue=asks)))
            time.sleep(2)  # in which the door has read as much as it reads
            client.send(encode.method_frame(1, commands.Queue.Declare(queue=new, durable=True)))
            time.sleep(0.5)
            began = time.monotonic()
            works(url)
            assert time.monotonic() - began < 20, "long before hold_up_timeout_s is over"
            other.call(1, commands.Queue.Declare(queue=new, passive=True), frames.QUEUE_DECLARE_OK)
            client.socket.close()
            for queue in (asks, new):
                other.call(1, commands.Queue.Delete(queue=queue), frames.QUEUE_DELETE_OK)


def test_who_writes_before_it_reads_is_not_held_up_by_its_own_declaration(lab: Lab, url: str, tmp_path: Path) -> None:
    """The answer to the declaration of a queue of its own stands behind deliveries that it does not take before it has written the rest."""
    size, count, limit = 100_000, 130, "client_buffer_bytes_max = 8388608\n[http]"
    with Sidecar(lab, tmp_path, f"writes-{time.time_ns() % 10**9}", edit=lambda text: text.replace("[http]", limit)) as sidecar:
        sidecar.becomes("active")
        url = f"{url.rpartition('@')[0]}@{sidecar.door}"
        with client_of(url) as other, RawClient(url, login=False) as client:
            other.open_channel(confirms=True)
            writes, written_to = (f"{name}-{time.time_ns()}" for name in ("writes", "written"))
            for queue in (writes, written_to):
                other.call(1, commands.Queue.Declare(queue=queue, durable=True), frames.QUEUE_DECLARE_OK)
            other.send(publish_in(other, size, key=writes) * count)
            assert other.confirmed(count) == set()
            deaf(client)
            client.call(1, commands.Basic.Qos(0, count, False), frames.BASIC_QOS_OK)
            client.send(encode.method_frame(1, commands.Basic.Consume(queue=writes)))
            status = "-q", "list_queues", "name", "messages_unacknowledged"
            eventually("all to be on their way", lambda: f"{writes}\t{count}" in lab.ctl("e1", *status).splitlines())
            time.sleep(1)  # in which the door has read as much as it reads
            client.send(encode.method_frame(1, commands.Queue.Declare(exclusive=True)) + publish(1, written_to, b"the rest"))

            def written() -> bool:
                counts = other.call(1, commands.Queue.Declare(queue=written_to, passive=True), frames.QUEUE_DECLARE_OK)[-8:-4]
                return counts == b"\0\0\0\1"

            eventually("what it has written to arrive", written)
            client.socket.close()
            for queue in (writes, written_to):
                other.call(1, commands.Queue.Delete(queue=queue), frames.QUEUE_DELETE_OK)


@pytest.mark.timeout(900)
def test_what_thousands_of_idle_connections_cost(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """LRQ_IDLE_CONNECTIONS=10000 for more. The goal is 60 KB each."""
    with Lab({"east": 1}, tmp_path_factory.mktemp("idle"), broker_version, door=PATIENT_DOOR | {"connections_max": IDLE + IDLE // 10}) as lab:
        url = lab.nodes["e1"].door
        with RawClient(url) as first:
            first.open_channel()
            before = told(lab, "e1")["rss_bytes"]
            clients = [RawClient(url) for _ in range(IDLE)]
            try:
                each = (told(lab, "e1")["rss_bytes"] - before) / IDLE
                print(f"{IDLE} idle connections: {each / 1024:.1f} KiB each")
                assert told(lab, "e1")["connections"] == IDLE + 1
                assert each <= IDLE_BYTES_MAX
                works(url)
                first.call(1, commands.Queue.Declare(queue="", exclusive=True), frames.QUEUE_DECLARE_OK)
            finally:
                for client in clients:
                    client.socket.close()
            eventually("them to be gone", lambda: lab.status("e1")["sockets"] <= 1)
            works(url)


def test_limits_above_the_defaults(new_lab: Callable[..., Lab], broker_version: str) -> None:
    """Frames and messages larger than RabbitMQ takes by itself come back whole."""
    frame_bytes, message_bytes = 1 << 20, 160 << 20
    settings = {"frame_max": str(frame_bytes), "max_message_size": str(message_bytes)}
    door = PATIENT_DOOR | {"frame_max_bytes": frame_bytes, "message_bytes_max": message_bytes}
    bodies = b"\x01" * (frame_bytes - 2 * frames.HEADROOM_BYTES), b"\x02" * (content_assembly.BODY_BYTES_MAX + 1)
    with new_lab({"east": 2}, broker=broker_version, door=door, settings=settings) as lab:
        primary, _ = in_sync(lab)
        with RawClient(lab.nodes[primary].door) as client:
            client.open_channel(confirms=True)
            client.call(1, commands.Queue.Declare(queue="large", durable=True), frames.QUEUE_DECLARE_OK)
            for body in bodies:
                content = encode.content(1, content_header.header_payload(len(body)), body, client.frame_max)
                client.send(encode.publish_method(1, "", "large") + b"".join(content))
            assert client.confirmed(2) == set()
            for body in bodies:
                client.call(1, commands.Basic.Get(queue="large"), frames.BASIC_GET_OK)
                heard: list[bytes] = []
                while sum(map(len, heard)) < len(body):
                    heard.append(client.expect(frames.BODY))
                assert b"".join(heard) == body
                if body == bodies[0]:
                    assert len(heard) == 1
