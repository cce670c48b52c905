"""The order of answers on one channel: none comes after one to a later question, or on a channel that is closed."""

from __future__ import annotations

from typing import Any

import pika
import pytest
from door_rig import Rig
from load import told
from pamqp import commands
from raw_client import RawClient, publish

from broker_plugin.amqp import content_header, encode, frames

GETS = (frames.BASIC_GET_OK, frames.BASIC_GET_EMPTY)
# Run by the broker: when the queue is there, its channel is given the ack of a delivery that there never was, and closes with 406 after its answer.
MISUSE = """
    P = rabbit_misc:string_to_pid("{pid}"),
    spawn(fun Wait() ->
        case rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{queue}">>)) of
            {{ok, _}} -> gen_server:cast(P, {{method, {{'basic.ack', 999, false}}, none, noflow}});
            _ -> timer:sleep(5), Wait()
        end
    end).
"""


def channel_of(rig: Rig, name: str) -> str:
    """The broker's process for the only channel of the connection of this name."""
    rows = rig.lab.ctl(rig.primary, "-q", "list_connections", "pid", "client_properties").splitlines()
    connection = next(row.split("\t")[0] for row in rows if name in row)
    rows = rig.lab.ctl(rig.primary, "-q", "list_channels", "pid", "connection").splitlines()
    return next(row.split("\t")[0] for row in rows if row.split("\t")[1] == connection)


def test_a_channel_that_the_broker_closes_behind_its_answer_is_closed_behind_it(rig: Rig) -> None:
    """The broker has answered, the entry is not safe, and the channel is closed: the client hears of both in this order, and has its number again."""
    queue, name = rig.name(), rig.name("connection")
    with RawClient(rig.url, properties={"connection_name": name}) as client:
        client.open_channel(1)
        rig.lab.ctl(rig.primary, "eval", MISUSE.format(pid=channel_of(rig, name), queue=queue))
        client.got.clear()
        rig.lab.stop(f"{rig.backup}.sidecar")
        try:
            client.send(encode.method_frame(1, commands.Queue.Declare(queue=queue, durable=True)))
            while (client.read() or (0,))[0] != frames.CHANNEL_CLOSE:
                pass
            client.send(encode.method_frame(1, commands.Channel.CloseOk()) + encode.method_frame(1, commands.Channel.Open()))
        finally:
            rig.lab.cont(f"{rig.backup}.sidecar")
        client.expect(frames.CHANNEL_OPEN_OK)
        assert [kind for kind, *_ in client.got] == [frames.QUEUE_DECLARE_OK, frames.CHANNEL_CLOSE, frames.CHANNEL_OPEN_OK]
        assert client.call(1, commands.Queue.Declare(queue=queue, durable=True), frames.QUEUE_DECLARE_OK)
    rig.both_hold(queue, [])


def test_a_confirm_does_not_overtake_the_select_ok(rig: Rig) -> None:
    """The door confirms a repeat by itself, at once; the broker has yet to say that it confirms."""
    queue, producer = rig.name(), rig.name("producer")
    once = publish(1, queue, b"x", fields=content_header.field(b"x-lrq-id", f"{producer}/1".encode()))
    with RawClient(rig.url, properties={"lrq_producer": producer}) as client:
        client.open_channel(1)
        client.call(1, commands.Queue.Declare(queue=queue, durable=True), frames.QUEUE_DECLARE_OK)
        client.open_channel(2, confirms=True)
        client.send(encode.rechannel(once, 2))
        client.confirmed(1)
        client.got.clear()
        client.send(encode.method_frame(1, commands.Confirm.Select()) + once * 2)
        client.confirmed(2)
        assert client.got[0][0] == frames.CONFIRM_SELECT_OK
        assert [kind for kind, *_ in client.got].count(frames.BASIC_ACK) <= 2
    rig.both_hold(queue, [b"x"])


@pytest.mark.quick
def test_what_the_door_refuses_is_told_after_what_was_asked_before(rig: Rig) -> None:
    """The answers come in one piece with that to the door's own close."""
    asked = 100
    with RawClient(rig.url) as client:
        client.open_channel(1)
        client.got.clear()
        refused = commands.Exchange.Declare(exchange=rig.name("x"), exchange_type="x-random")
        client.send(encode.method_frame(1, commands.Basic.Qos(prefetch_count=1)) * asked + encode.method_frame(1, refused))
        while (client.read() or (0,))[0] != frames.CHANNEL_CLOSE:
            pass
        assert [kind for kind, *_ in client.got] == [frames.BASIC_QOS_OK] * asked + [frames.CHANNEL_CLOSE]


def test_consumers_that_are_not_answered_in_order(rig: Rig) -> None:
    """Who waits for direct replies is answered before a consumer of a queue that was asked for before: each is taken for what it is."""
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    channel.basic_publish("", queue, b"x")
    with RawClient(rig.url) as client:
        client.open_channel(1)
        asked = [commands.Basic.Consume(queue=name, no_ack=True) for name in (queue, "amq.rabbitmq.reply-to")]
        client.send(b"".join(encode.method_frame(1, one) for one in asked))
        assert client.expect(frames.BODY) == b"x"
        client.call(1, commands.Channel.Close(200, "", 0, 0), frames.CHANNEL_CLOSE_OK)
    rig.both_hold(queue, [])


@pytest.mark.parametrize("size", [0, 200_000])  # the latter in more frames for a client than the broker sends
def test_what_is_asked_behind_a_get_is_not_answered_before_it(rig: Rig, size: int) -> None:
    """Nor is it taken for its answer: the get's first copy is one that must not be seen, and the client asked for more without waiting."""
    channel = rig.channel(confirms=True)
    queue, other = rig.declare(channel), rig.declare(channel)
    consumed = b"consumed".ljust(size)
    channel.basic_publish("", queue, consumed)
    channel.basic_publish("", other, b"of the other")
    method, properties, _ = channel.basic_get(queue)
    channel.basic_ack(method.delivery_tag)
    rig.converge()
    for stale in range(2):
        with rig.at(rig.primary) as broker:
            broker.confirm_delivery()
            broker.basic_publish("", queue, consumed, pika.BasicProperties(headers=properties.headers, delivery_mode=2))
        channel.basic_publish("", queue, b"new %d" % stale)
    with RawClient(rig.url) as client:
        client.open_channel(1)
        client.got.clear()
        asked = (commands.Basic.Get(queue=queue), commands.Basic.Get(queue=other), commands.Queue.Declare(queue=other, passive=True))
        client.send(b"".join(encode.method_frame(1, one) for one in asked))
        client.expect(frames.QUEUE_DECLARE_OK)
        answers = [(kind, payload) for kind, _, payload in client.got if kind in GETS]
        assert [kind for kind, _ in answers] == [frames.BASIC_GET_EMPTY, frames.BASIC_GET_OK]
        assert other.encode() in answers[1][1]
        assert [kind for kind, *_ in client.got] == [frames.BASIC_GET_EMPTY, frames.BASIC_GET_OK, frames.HEADER, frames.BODY, frames.QUEUE_DECLARE_OK]
        # asked alone, the same is the next message
        for expected in (b"new 0", b"new 1"):
            client.call(1, commands.Basic.Get(queue=queue), frames.BASIC_GET_OK)
            assert client.expect(frames.BODY) == expected
    channel.queue_purge(queue)


@pytest.mark.quick
def test_a_consumer_does_not_see_a_copy_of_what_was_consumed(rig: Rig) -> None:
    """Such are left by a broker that lost an ack. They leave the queue, and what the client gets is what it would get without them."""
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    channel.basic_publish("", queue, b"consumed")
    method, properties, _ = channel.basic_get(queue)
    channel.basic_ack(method.delivery_tag)
    rig.converge()
    for number in range(3):
        with rig.at(rig.primary) as broker:
            broker.confirm_delivery()
            broker.basic_publish("", queue, b"consumed", pika.BasicProperties(headers=properties.headers, delivery_mode=2))
        channel.basic_publish("", queue, b"new %d" % number)
    with RawClient(rig.url) as client:
        client.open_channel(1)
        client.call(1, commands.Basic.Consume(queue=queue, consumer_tag="c"), frames.BASIC_CONSUME_OK)
        for number in range(3):
            client.expect(frames.BASIC_DELIVER)
            assert client.expect(frames.BODY) == b"new %d" % number
        client.send(encode.ack(1, 0, multiple=True))
        rig.both_hold(queue, [])
        assert len([kind for kind, *_ in client.got if kind == frames.BASIC_DELIVER]) == 3


@pytest.mark.proves("in-doubt")
def test_publishes_that_the_brokers_close_leaves_without_an_answer(rig: Rig) -> None:
    """They are in the log, and their broker has not got them: nobody ever gets them, and their IDs are free for whoever sends them again."""
    queue, name, producer = rig.declare(rig.channel()), rig.name("connection"), rig.name("producer")
    once = [publish(1, queue, b"%d" % number, fields=content_header.field(b"x-lrq-id", f"{producer}/{number}".encode())) for number in (1, 2)]
    properties = {"lrq_producer": producer, "connection_name": name}
    with RawClient(rig.url, properties=properties) as client:
        client.open_channel(1, confirms=True)
        client.send(once[0])
        assert client.confirmed(1) == set()
        rig.converge()
        rows = rig.lab.ctl(rig.primary, "-q", "list_connections", "pid", "client_properties").splitlines()
        pid = next(row.split("\t")[0] for row in rows if name in row)
        rig.lab.stop(f"{rig.backup}.sidecar")  # nothing is safe from here on, so the broker gets nothing
        try:
            client.send(once[1])
            for _ in range(2):  # the sidecar has read it when it has answered
                told(rig.lab, rig.primary)
            rig.lab.ctl(rig.primary, "close_connection", pid, "test")
            closed: Any = frames.decode_method(client.expect(frames.CONNECTION_CLOSE))
            assert (closed.reply_code, closed.reply_text) == (320, "CONNECTION_FORCED - test")
            if told(rig.lab, rig.primary)["members"] == [rig.primary]:
                pytest.skip("this machine is too slow: the backup was left out meanwhile, so that the broker got it")
        finally:
            rig.lab.cont(f"{rig.backup}.sidecar")
    rig.both_hold(queue, [b"1"])
    with RawClient(rig.url, properties=properties) as client:
        client.open_channel(1, confirms=True)
        client.send(b"".join(once))
        assert client.confirmed(2) == set()
    rig.both_hold(queue, [b"1", b"2"])
