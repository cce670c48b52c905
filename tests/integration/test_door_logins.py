"""Who gets through the door and how: logins, replication IDs, the vhost of the routing queues, hostile bytes."""

from __future__ import annotations

import random
import re
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pika
import pytest
from door_rig import Rig
from load import eventually, told
from pamqp import commands
from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker, UnroutableError
from raw_client import RawClient, beating, publish

from broker_plugin.amqp import content_header, encode, frames
from lrq_ha.lab.files import APP_USER, SIDECAR_USER
from lrq_ha.proto import lrq_pb2 as pb

pytestmark = [pytest.mark.broker, pytest.mark.quick, pytest.mark.one_version("4.3")]


HEARTBEAT_S = 6


def field(key: str, value: str) -> bytes:
    return content_header.field(key.encode(), value.encode())


def works(rig: Rig) -> None:
    """The door still serves a client."""
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    channel.basic_publish("", queue, b"fine")
    rig.both_hold(queue, [b"fine"])
    channel.queue_delete(queue)


# -- logins


def test_a_backups_door_names_the_primary(rig: Rig) -> None:
    with RawClient(rig.lab.nodes[rig.backup].door, login=False) as client:
        with pytest.raises(AssertionError, match=f"primary is {rig.primary}") as caught:
            client.login("/", 0, frames.FRAME_MAX_BYTES, {})
        assert b"\x01\x40" in client.got[-1][2][:6], caught
        assert client.closed()


HELLOS = {  # what other protocols begin with, and what the door's log calls them
    "an old AMQP": (b"AMQP\x01\x01\x08\x00", "an old AMQP"),
    "an AMQP without its first octet": (b"AMQP\x00\x00\x09\x00", "AMQP 1.0 or an old AMQP"),
    "AMQP 1.0": (b"AMQP\x00\x01\x00\x00", "AMQP 1.0 or an old AMQP"),
    "AMQP 1.0 with SASL": (b"AMQP\x03\x01\x00\x00", "AMQP 1.0 with SASL"),
    "MQTT": (b"\x10\x10\x00\x04MQTT\x04\x02\x00\x3c\x00\x04client", "MQTT"),
    "STOMP": (b"CONNECT\naccept-version:1.2\nhost:/\n\n\0", "STOMP"),
    "the stream protocol": (b"\x00\x00\x00\x0c\x00\x11\x00\x01\x00\x00\x00\x01\x00\x00\x00\x00", "perhaps RabbitMQ's stream protocol"),
    "HTTP": (b"GET / HTTP/1.1\r\n\r\n", "HTTP"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01", "TLS, and this door has none"),
}


@pytest.mark.parametrize("what", HELLOS)
def test_another_protocol_is_answered_with_the_one_that_is_spoken(rig: Rig, what: str) -> None:
    hello, name = HELLOS[what]
    log = rig.lab.nodes[rig.primary].log
    before = len(log.read_text())
    with RawClient(rig.url, login=False) as client:
        client.send(hello)
        assert client.socket.recv(100) == frames.PROTOCOL_HEADER
        with suppress(ConnectionResetError):  # not all that it said was read
            assert client.socket.recv(100) == b""
        address = client.socket.getsockname()[1]
    said = re.compile(rf"{address}\b.* speaks {name};")
    eventually("the log to say so", lambda: said.search(log.read_text()[before:]) is not None, seen=lambda: log.read_text()[before:])


@pytest.mark.parametrize("wrong", ["password", "user", "vhost"])
def test_a_wrong_login_is_the_brokers_refusal(rig: Rig, wrong: str) -> None:
    said = []
    for url in (rig.broker_url(rig.primary), rig.url):
        with RawClient(url, login=False) as client:
            if wrong == "password":
                client.password = "no"
            elif wrong == "user":
                client.user = "nobody"
            with pytest.raises(AssertionError):
                client.login("nowhere" if wrong == "vhost" else "/", 0, frames.FRAME_MAX_BYTES, {})
            said.append(client.got[-1])
            assert said[-1][0] == frames.CONNECTION_CLOSE
            client.send(encode.method_frame(0, commands.Connection.CloseOk()))
            assert client.closed()
    assert said[0] == said[1]


def test_nobody_becomes_a_node_without_the_sidecars_login(rig: Rig) -> None:
    """Neither by a pipeline that overtakes the check of the password nor by a second name after it."""
    properties = {"lrq_node": 2, "lrq_group": "east"}
    rest = encode.method_frame(0, commands.Connection.TuneOk(2047, 131_072, 0)) + encode.method_frame(0, commands.Connection.Open("lrq"))
    with RawClient(rig.url, login=False) as client:
        client.user, client.password = "lrq", "wrong"
        client.send(frames.PROTOCOL_HEADER)
        client.expect(frames.CONNECTION_START)
        client.send(client.start_ok(properties) + rest)
        assert client.closed()
        assert frames.CONNECTION_OPEN_OK not in [kind for kind, *_ in client.got]
    with RawClient(rig.url, login=False) as client:
        client.send(frames.PROTOCOL_HEADER)
        client.expect(frames.CONNECTION_START)
        client.send(client.start_ok())
        client.expect(frames.CONNECTION_TUNE)
        client.user = "lrq"
        client.send(client.start_ok(properties) + rest)
        assert client.closed()
        assert frames.CONNECTION_OPEN_OK not in [kind for kind, *_ in client.got]
    with RawClient(rig.url, login=False) as client, pytest.raises(AssertionError, match="own user"):
        client.login("lrq", 0, frames.FRAME_MAX_BYTES, properties)
    rig.converge()


def test_what_was_not_asked_has_no_place_in_a_login(rig: Rig) -> None:
    for method in (commands.Connection.SecureOk("answer"), commands.Connection.TuneOk(), commands.Channel.Open()):
        with RawClient(rig.url, login=False) as client:
            client.send(frames.PROTOCOL_HEADER)
            client.expect(frames.CONNECTION_START)
            client.send(client.start_ok() + encode.method_frame(0, method))
            assert client.closed()
            assert frames.CONNECTION_OPEN_OK not in [kind for kind, *_ in client.got]


def test_publishes_that_follow_the_login_at_once_are_logged(rig: Rig) -> None:
    queue = rig.declare(rig.channel())
    with RawClient(rig.url, login=False) as client:
        client.send(frames.PROTOCOL_HEADER)
        client.expect(frames.CONNECTION_START)
        client.send(client.start_ok())
        client.expect(frames.CONNECTION_TUNE)
        methods = [commands.Connection.TuneOk(2047, 131_072, 0), commands.Connection.Open("/")]
        client.send(b"".join(encode.method_frame(0, m) for m in methods))
        pieces = [encode.method_frame(1, method) for method in (commands.Channel.Open(), commands.Confirm.Select())]
        for piece in (*pieces, publish(1, queue, b"early")):
            client.send(piece)
            time.sleep(0.002)
        client.expect(frames.CONFIRM_SELECT_OK)
        assert client.confirmed(1) == set()
    rig.both_hold(queue, [b"early"])


# -- replication IDs and positions


def test_a_repeat_is_confirmed_and_queued_once(rig: Rig) -> None:
    queue = rig.declare(rig.channel())
    producer = rig.name("producer")
    for _ in range(2):  # on a second connection too
        with RawClient(rig.url, properties={"lrq_producer": producer}) as client:
            client.open_channel(confirms=True)
            ids = [1, 2, 3, 3, 2, 1, 4, 4]
            client.send(b"".join(publish(1, queue, b"%d" % i, fields=field("x-lrq-id", f"{producer}/{i}")) for i in ids))
            assert client.confirmed(len(ids)) == set()
    rig.both_hold(queue, [b"1", b"2", b"3", b"4"])


def test_a_name_in_two_vhosts_is_two_producers(rig: Rig) -> None:
    """What the second one published was taken for repeats of the first one's: confirmed, and nowhere."""
    producer, vhost = rig.name("producer"), f"second-{uuid.uuid4().hex[:6]}"
    for node in rig.lab.nodes:
        rig.lab.ctl(node, "add_vhost", vhost)
        for user in (APP_USER, SIDECAR_USER):
            rig.lab.ctl(node, "set_permissions", "-p", vhost, user, ".*", ".*", ".*")
    queue = rig.declare(rig.channel())
    named: Any = {"lrq_producer": producer}
    with RawClient(rig.url, properties=named) as one, RawClient(rig.url, vhost, properties=named) as other:
        other.open_channel()
        other.call(1, commands.Queue.Declare(queue=queue, durable=True), frames.QUEUE_DECLARE_OK)
        for channel, (client, ids) in enumerate(((one, [1, 2, 1]), (other, [1, 2, 3, 4, 3])), 2):
            client.open_channel(channel, confirms=True)
            client.send(b"".join(publish(channel, queue, b"%d" % i, fields=field("x-lrq-id", f"{producer}/{i}")) for i in ids))
            assert client.confirmed(len(ids)) == set()
        depth: Any = frames.decode_method(other.call(1, commands.Queue.Declare(queue=queue, passive=True), frames.QUEUE_DECLARE_OK))
        assert depth.message_count == 4
        rig.both_hold(queue, [b"1", b"2"])
        answer = rig.channel(vhost="lrq").queue_declare(f"LRQ_Producer_{producer}", passive=True).method
        assert answer.message_count == 4, "whoever goes on from there repeats a number in no vhost"
        assert one.closed(), "and what these two have sent goes no further"
        assert other.closed()


def test_a_repeat_of_what_was_refused_is_refused_or_stored(rig: Rig) -> None:
    """A confirm of a repeat must never stand for a message that is nowhere."""
    channel = rig.channel()
    queue = rig.declare(channel, max_length=5, overflow="reject-publish")
    producer = rig.name("producer")
    with RawClient(rig.url, properties={"lrq_producer": producer}) as client:
        client.open_channel(confirms=True)
        ids = list(range(1, 41)) * 2
        client.send(b"".join(publish(1, queue, b"%d" % i, fields=field("x-lrq-id", f"{producer}/{i}")) for i in ids))
        nacked = client.confirmed(len(ids))
    acked = {ids[tag - 1] for tag in range(1, len(ids) + 1) if tag not in nacked}
    rig.converge()
    assert {int(body) for body in rig.bodies(rig.primary, queue)} == acked


def test_a_producer_asks_for_itself_where_it_publishes(rig: Rig) -> None:
    producer = rig.name("producer")
    queue = rig.declare(rig.channel())
    with RawClient(rig.url, properties={"lrq_producer": producer}) as client:
        client.open_channel(confirms=True)
        client.send(b"".join(publish(1, queue, b"x", fields=field("x-lrq-id", f"{producer}/{i}")) for i in (1, 2, 3)))
        assert client.confirmed(3) == set()
        for numbers, known in (("1-3", 3), ("3-1002", 1), ("4-4", 0)):
            asked = commands.Queue.Declare(queue=f"LRQ_Producer_{producer}/{numbers}", passive=True)
            told: Any = frames.decode_method(client.call(1, asked, frames.QUEUE_DECLARE_OK))
            assert told.message_count == known
        asked = commands.Queue.Declare(queue=f"LRQ_Producer_{producer}", passive=True)
        answer: Any = frames.decode_method(client.call(1, asked, frames.QUEUE_DECLARE_OK))
        assert (answer.queue, answer.message_count, answer.consumer_count) == (asked.queue, 3, 0)
        with pytest.raises(ChannelClosedByBroker) as caught:
            rig.channel().queue_declare(asked.queue, passive=True)
        assert caught.value.reply_code == 404, "to all others it is a name like any"
        with pytest.raises(ChannelClosedByBroker) as caught:
            rig.channel(vhost="lrq").queue_declare(f"{asked.queue}/1-3", passive=True)
        assert caught.value.reply_code in (403, 404), "of numbers only a producer itself hears"
        client.open_channel(2, confirms=True)
        client.send(publish(2, queue, b"x", fields=field("x-lrq-id", f"{producer}/4")))
        assert client.confirmed(1) == set(), "and nobody has ended this one"


@pytest.mark.parametrize("announced", [None, "somebody-else"])
@pytest.mark.parametrize("value", ["{producer}/1", "not an ID", "{producer}/x"])
def test_an_id_of_another_producer_is_cut(rig: Rig, announced: str | None, value: str) -> None:
    channel = rig.channel()
    queue = rig.declare(channel)
    raw = value.format(producer=rig.name("producer"))
    with RawClient(rig.url, properties={"lrq_producer": announced} if announced else {}) as client:
        client.open_channel(confirms=True)
        client.send(publish(1, queue, b"x", fields=field("x-lrq-id", raw) + field("mine", "kept")) * 3)
        assert client.confirmed(3) == set()
    rig.both_hold(queue, [b"x"] * 3)
    _, properties, _ = channel.basic_get(queue, auto_ack=True)
    assert properties.headers["mine"] == "kept"
    assert "x-lrq-id" not in properties.headers


def test_a_position_that_a_client_brings_is_replaced(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    for value in ("9999.1/1", 12345, None):
        channel.basic_publish("", queue, b"x", pika.BasicProperties(headers={"x-lrq-pos": value, "other": 1}))
    rig.both_hold(queue, [b"x"] * 3)
    epoch = told(rig.lab, rig.primary)["epoch"]
    seen = set()
    for _ in range(3):
        _, properties, _ = channel.basic_get(queue, auto_ack=True)
        position = properties.headers["x-lrq-pos"]
        assert position.startswith(f"{epoch}.")
        seen.add(position)
    assert len(seen) == 3
    rig.both_hold(queue, [])


# -- the vhost of the routing queues


@pytest.mark.parametrize("name", ["LRQ_HA_east_1", "LRQ_APPLIED_east_1", "LRQ_Recv_app_west", "anything"])
def test_clients_do_not_write_where_the_log_is(rig: Rig, name: str) -> None:
    with pytest.raises(ChannelClosedByBroker) as caught:
        rig.channel(vhost="lrq", confirms=True).basic_publish("", name, b"x")
    assert caught.value.reply_code == 403
    for what in ("declare", "delete", "purge"):
        with pytest.raises(ChannelClosedByBroker) as caught:
            getattr(rig.channel(vhost="lrq"), f"queue_{what}")(name)
        assert caught.value.reply_code == 403
    with pytest.raises(ChannelClosedByBroker) as caught:
        rig.channel(vhost="lrq").exchange_declare(name)
    assert caught.value.reply_code == 403
    with pytest.raises(ChannelClosedByBroker) as caught:
        rig.channel(vhost="lrq", confirms=True).basic_publish("amq.fanout", name, b"x")
    assert caught.value.reply_code == 403


def log_entry(destination: str) -> bytes:
    transaction = pb.Transaction(client_name="door-test", type=pb.LOG_ENTRY_SYNC, payloads=[b"data"])
    transaction.entries.add(destinations=[destination], payload=0)
    return transaction.SerializeToString()


def test_an_unknown_destination_comes_back_with_the_known_ones(rig: Rig) -> None:
    producer = rig.name("producer")
    channel = rig.channel(vhost="lrq", confirms=True, client_properties={"lrq_producer": producer})
    properties = pika.BasicProperties(headers={"x-lrq-id": f"{producer}/1"}, delivery_mode=2)
    with pytest.raises(UnroutableError) as caught:
        channel.basic_publish("", "LRQ_Send_LogEntries", log_entry("mars"), properties, mandatory=True)
    returned = caught.value.messages[0].method
    assert returned.reply_code == 312
    assert "'mars'" in returned.reply_text
    assert "known: west" in returned.reply_text
    channel.basic_publish("", "LRQ_Send_LogEntries", log_entry("west"), properties, mandatory=True)
    channel.basic_publish("", "LRQ_Send_LogEntries", log_entry("west"), properties, mandatory=True)  # a repeat
    answer = channel.queue_declare(f"LRQ_Producer_{producer}", passive=True).method
    assert answer.message_count + (answer.consumer_count << 32) == 1


@pytest.mark.parametrize("headers_", [None, {"x-lrq-id": "somebody/1"}])
def test_a_log_entry_without_its_producer_is_refused(rig: Rig, headers_: dict[str, str] | None) -> None:
    channel = rig.channel(vhost="lrq", confirms=True)
    with pytest.raises(ChannelClosedByBroker, match="replication ID") as caught:
        channel.basic_publish("", "LRQ_Send_LogEntries", log_entry("west"), pika.BasicProperties(headers=headers_))
    assert caught.value.reply_code == 406


# -- hostile bytes

GARBAGE = random.Random(7).randbytes(5_000)


def truncated_table(queue: str) -> bytes:
    whole = publish(1, queue, b"x", fields=field("key", "value" * 10))
    return whole.replace(b"\x03keyS", b"\x03keyF")


def long_table(queue: str) -> bytes:
    header = content_header.header_payload(1, b"\x20\x00" + (1 << 20).to_bytes(4, "big") + b"\x01aI\0\0\0\1")
    return encode.publish_method(1, "", queue) + b"".join(encode.content(1, header, b"x"))


CONTENT = b"".join(encode.content(1, content_header.header_payload(1), b"x"))
HOSTILE: dict[str, Callable[[str], bytes]] = {
    "garbage": lambda _q: GARBAGE,
    "a frame over the limit": lambda _q: b"\x01\x00\x01\x7f\xff\xff\xff" + b"x" * 100_000,
    "a frame without its end": lambda _q: b"\x01\x00\x01\x00\x00\x00\x04\x00\x14\x00\x28\x00" + b"\0" * 20,
    "a broken table": truncated_table,
    "a table past its frame": long_table,
    "a body without a publish": lambda _q: encode.frame(frames.BODY, 1, b"x"),
    "a header without a publish": lambda _q: encode.frame(frames.HEADER, 1, content_header.header_payload(0)),
    "two publishes in one": lambda q: encode.publish_method(1, "", q) + publish(1, q, b"x"),
    "an unknown method": lambda _q: encode.raw_method_frame(1, 0x00FF00FF),
    "what only brokers send": lambda _q: encode.raw_method_frame(1, frames.BASIC_DELIVER, b"\x01a" + b"\0" * 12) + CONTENT,
    "a declaration cut short": lambda _q: encode.raw_method_frame(1, 0x0032000A, b"\0\0\x20abc"),
    "a publish cut short": lambda _q: encode.raw_method_frame(1, frames.BASIC_PUBLISH, b"\0\0\x20a") + CONTENT,
    "an ack cut short": lambda _q: encode.raw_method_frame(1, frames.BASIC_ACK, b"\0\0"),
    "a channel opened twice": lambda q: publish(1, q, b"x") * 20 + encode.method_frame(1, commands.Channel.Open()),
    "a channel that is not open": lambda q: publish(9, q, b"x") * 20,
    "a method on channel 0": lambda _q: encode.method_frame(0, commands.Basic.Qos()),
}


@pytest.mark.full(only=r"\[4\.3-(?!garbage|a broken table|two publishes|a publish cut short|a channel opened twice)")
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_bytes_end_their_own_connection_only(rig: Rig, what: str) -> None:
    bystander = rig.channel(confirms=True)
    queue = rig.declare(bystander)
    with RawClient(rig.url) as client:
        client.open_channel(confirms=True)
        client.send(publish(1, queue, b"good"))
        assert client.confirmed(1) == set()
        try:
            client.send(HOSTILE[what](queue))
            while (found := client.read()) is not None:
                if found[0] == frames.CONNECTION_CLOSE:
                    client.send(encode.method_frame(0, commands.Connection.CloseOk()))
        except (BrokenPipeError, ConnectionResetError):
            pass
    rig.converge()
    bystander.basic_publish("", queue, b"next")
    eventually("both", lambda: rig.bodies(rig.backup, queue)[-1:] == [b"next"] and rig.bodies(rig.primary, queue)[0] == b"good")
    works(rig)


def test_hostile_bytes_before_the_login(rig: Rig) -> None:
    start = encode.method_frame(0, commands.Connection.StartOk({}, "PLAIN", "x", "en_US"))
    for data in (
        frames.PROTOCOL_HEADER + GARBAGE,
        frames.PROTOCOL_HEADER + b"\x01\x00\x00\xff\xff\xff\xff" + b"x" * 1_000,
        frames.PROTOCOL_HEADER + encode.method_frame(0, commands.Connection.Open("/")),
        frames.PROTOCOL_HEADER + start[:-30] + b"\xce" * 30,
        frames.PROTOCOL_HEADER + encode.method_frame(0, commands.Connection.StartOk({}, "AMQPLAIN", "\x05LOGI", "en_US")),
        frames.PROTOCOL_HEADER + publish(1, "q", b"x"),
    ):
        with RawClient(rig.url, login=False) as client:
            client.send(data)
            try:
                assert client.closed(), data[:60]
            except ConnectionResetError:
                pass
    works(rig)


@pytest.mark.full
def test_a_client_that_stops_reading_holds_up_nobody(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    queue, other = rig.declare(channel), rig.declare(channel)
    body, count = b"x" * 200_000, 300
    for _ in range(count):
        channel.basic_publish("", queue, body)
    before = told(rig.lab, rig.primary)["rss_bytes"]
    with RawClient(rig.url, heartbeat_s=HEARTBEAT_S) as client:
        client.open_channel()
        client.call(1, commands.Basic.Consume(queue=queue), frames.BASIC_CONSUME_OK)
        with beating(client):
            for i in range(2 * HEARTBEAT_S + 3):
                channel.basic_publish("", other, b"%d" % i)
                time.sleep(1)
            rig.both_hold(other, [b"%d" % i for i in range(2 * HEARTBEAT_S + 3)])
            assert told(rig.lab, rig.primary)["rss_bytes"] - before < count * len(body) / 2, "it is not read from the broker either"
            for _ in range(count):
                client.expect(frames.BASIC_DELIVER)  # it has not been closed
                client.got.clear()
    eventually("the messages back", lambda: rig.unacked(rig.primary, queue) == 0)
    channel.queue_purge(queue)


def test_a_wrong_password_in_pikas_words(rig: Rig) -> None:
    parameters = pika.URLParameters(rig.url)
    parameters.credentials = pika.PlainCredentials("app", "wrong")
    with pytest.raises(AMQPConnectionError):
        pika.BlockingConnection(parameters)
