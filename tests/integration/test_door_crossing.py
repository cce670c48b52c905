"""What crosses on its way: the broker says something that it would not say any more, had it heard what the client has said already.

Rule: what the door has for the broker waits behind an entry that is not safe, as the backup stands still; what the broker has for the client comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from door_rig import Rig
from load import told
from pamqp import commands
from raw_client import RawClient, publish
from talk import Talk
from test_restart import batches

from broker_plugin.amqp import encode, frames
from broker_plugin.amqp.content_header import field
from lrq_ha.routing.names import producer_queue

B, C = commands.Basic, commands.Channel


@contextmanager
def nothing_gets_safe(rig: Rig) -> Iterator[None]:
    rig.lab.stop(f"{rig.backup}.sidecar")
    try:
        yield
    finally:
        rig.lab.cont(f"{rig.backup}.sidecar")


def has_read(rig: Rig) -> None:
    """The door has read what was sent, when its sidecar has answered."""
    for _ in range(2):
        told(rig.lab, rig.primary)


def at_the_broker(rig: Rig, queue: str) -> Talk:
    """Not through the door: it holds the next message of a queue until it is closed, and then that goes to others at once."""
    holder = Talk(rig.broker_url(rig.primary), "holder", "classic")
    holder.open()
    holder.do(B.Get(queue=queue))
    return holder


def may_publish(talk: Talk) -> None:
    """The door has no question to the broker before a publish of this client waits to be safe."""
    talk.open()
    talk.publish("nowhere")
    talk.do(C.Flow(True))


@pytest.mark.quick
@pytest.mark.parametrize("ask", [B.Recover, B.RecoverAsync])
def test_a_delivery_that_crosses_a_recover_goes_back_too(rig: Rig, ask: Any) -> None:
    """It was taken for held under a number that the broker does not know any more: an ack of several then covered it, and it never came again."""
    channel = rig.channel(confirms=True)
    queue, other = rig.declare(channel), rig.declare(channel)
    for body in (b"0", b"1"):
        channel.basic_publish("", queue, body)
    with Talk(rig.url, "crossing", "classic") as talk:
        may_publish(talk)
        talk.do(B.Get(queue=queue))
        with at_the_broker(rig, queue) as holder:
            talk.do(B.Consume(queue=queue, consumer_tag="c"))
            with nothing_gets_safe(rig):
                talk.publish(other, b"waits")
                talk.say(ask(True))
                has_read(rig)
                holder.close()
                assert [(d.delivery_tag, d.body) for d in talk.deliveries(1)] == [(2, b"1")]
        assert [(d.delivery_tag, d.body) for d in talk.deliveries(2)] == [(3, b"0"), (4, b"1")]
        talk.say(B.Ack(3, True))
        talk.do(C.Flow(True))
        assert [name for name, *_ in talk.heard[1]].count("basic.recover-ok") == (ask is B.Recover)
    rig.both_hold(queue, [b"1"])
    assert rig.channel().basic_get(queue, auto_ack=True)[2] == b"1"
    rig.both_hold(queue, [])


@pytest.mark.parametrize("how", ["consume", "get"])
def test_without_acks_what_crosses_a_recover_comes_once(rig: Rig, how: str) -> None:
    """The door acknowledged it under a number that the broker did not know any more, which closed the channel."""
    channel = rig.channel(confirms=True)
    queue, other = rig.declare(channel), rig.declare(channel)
    channel.basic_publish("", queue, b"0")
    with Talk(rig.url, "crossing", "classic") as talk:
        may_publish(talk)
        if how == "consume":
            with at_the_broker(rig, queue) as holder:
                talk.do(B.Consume(queue=queue, consumer_tag="c", no_ack=True))
                with nothing_gets_safe(rig):
                    talk.publish(other, b"waits")
                    talk.say(B.Recover(True))
                    has_read(rig)
                    holder.close()
                    talk.quiet()
        else:
            with nothing_gets_safe(rig):
                rig.lab.stop(f"{rig.primary}.broker")
                talk.say(B.Get(queue=queue, no_ack=True))
                talk.publish(other, b"waits")
                talk.say(B.Recover(True))
                has_read(rig)
                rig.lab.cont(f"{rig.primary}.broker")
                assert talk.hear(frames.BASIC_GET_OK, frames.BASIC_GET_EMPTY).index == frames.BASIC_GET_EMPTY
        talk.hear(frames.BASIC_RECOVER_OK)
        if how == "get":
            talk.do(B.Consume(queue=queue, consumer_tag="c", no_ack=True))
        assert [d.body for d in talk.deliveries(1)] == [b"0"]
        assert talk.do(C.Flow(True)) is not None
        rig.both_hold(queue, [])
        talk.quiet()
        assert [name for name, *_ in talk.heard[1]].count("basic.deliver") == 1
    assert rig.unacked(rig.primary, queue) == 0


@pytest.mark.parametrize("by", ["client", "door"])
def test_a_close_of_the_broker_that_crosses_one_of_the_other_side(rig: Rig, by: str) -> None:
    """What still waited for the channel was sent behind its end, which ended the whole connection."""
    channel = rig.channel(confirms=True)
    queue, missing = rig.declare(channel), rig.name("missing")
    channel.basic_publish("", queue, b"held")
    with RawClient(rig.url) as client:
        client.open_channel(1)
        client.open_channel(2)
        tag, _ = frames.get_ok_arguments(client.call(1, B.Get(queue=queue), frames.BASIC_GET_OK))
        client.send(publish(1, "nowhere", b""))  # so the door has no question to the broker later
        client.call(1, C.Flow(True), frames.CHANNEL_FLOW_OK)
        with nothing_gets_safe(rig):
            rig.lab.stop(f"{rig.primary}.broker")
            try:
                wrong = encode.method_frame(1, B.Get(queue=missing)) + frames.HEARTBEAT_FRAME
                if by == "client":
                    client.send(wrong + publish(1, queue, b"waits") + encode.method_frame(1, C.Close(200, "bye", 0, 0)))
                else:
                    refused = commands.Exchange.Declare(exchange=rig.name("random"), exchange_type="x-random")
                    client.send(wrong + encode.ack(1, tag) + encode.method_frame(1, refused))
                has_read(rig)
            finally:
                rig.lab.cont(f"{rig.primary}.broker")
            client.got.clear()
            with pytest.raises(AssertionError):
                client.expect(frames.CHANNEL_CLOSE_OK)
            assert (b"no queue '%b'" % missing.encode() in client.got[-1][2]) == (by == "client")
            client.send(encode.method_frame(1, C.CloseOk()))
        rig.converge()
        assert client.call(2, commands.Queue.Declare(queue=queue, passive=True), frames.QUEUE_DECLARE_OK)
        client.open_channel(1)
        client.call(1, commands.Queue.Declare(queue=queue, passive=True), frames.QUEUE_DECLARE_OK)
    if by == "door":  # its ack is in the log
        assert channel.basic_get(queue)[0] is None
    rig.both_hold(queue, [b"held"] if by == "client" else [])


def test_a_channel_that_ends_under_a_consumer_without_acks(rig: Rig) -> None:
    """The door acknowledged what came until the broker had closed the channel; what came later than that ended the whole connection."""
    count = 2_000
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    with RawClient(rig.url) as client:
        client.open_channel(2, confirms=True)
        client.send(b"".join(publish(2, queue, b"%d" % i) for i in range(count)))
        client.confirmed(count)
        for _ in range(5):
            client.open_channel(1)
            client.call(1, B.Qos(prefetch_count=20), frames.BASIC_QOS_OK)
            client.call(1, B.Consume(queue=queue, no_ack=True), frames.BASIC_CONSUME_OK)
            client.expect(frames.BODY)
            client.send(encode.method_frame(1, C.Close(200, "bye", 0, 0)))
            client.expect(frames.CHANNEL_CLOSE_OK)
        client.call(2, commands.Queue.Declare(queue=queue, passive=True), frames.QUEUE_DECLARE_OK)
    channel.queue_purge(queue)


@pytest.mark.parametrize("silent", [False, True], ids=["answered", "silent"])
def test_a_tag_becomes_another_consumers_when_the_broker_says_so(rig: Rig, silent: bool) -> None:
    """Cancelled and used again in one go: what was on its way counted for the new queue, or the answer to the first ended the second for the door."""
    channel = rig.channel(confirms=True)
    queues = [rig.declare(channel), rig.declare(channel)]
    bodies = {queue: [b"%s %d" % (queue.encode(), i) for i in range(2_000)] for queue in queues}
    for queue in queues:
        for body in bodies[queue]:
            channel.basic_publish("", queue, body)
    with Talk(rig.url, "tags", "classic") as talk:
        talk.open()
        first, second = queues
        talk.say(B.Consume(queue=first, consumer_tag="c", nowait=silent))
        given = talk.deliveries(1)
        methods = [B.Cancel("c", nowait=silent), B.Consume(queue=second, consumer_tag="c", nowait=True)]
        talk.send(b"".join(encode.method_frame(1, method) for method in methods))
        while sum(method.body.startswith(second.encode()) for method in given) < 2_000:
            given += talk.deliveries(1)
        talk.say(B.Ack(given[-1].delivery_tag, True))
        talk.do(C.Close(200, "", 0, 0))
        answers = [event[0] for event in talk.heard[1] if event[0] in ("basic.consume-ok", "basic.cancel-ok")]
        assert answers == ([] if silent else ["basic.consume-ok", "basic.cancel-ok"])
    taken = {method.body for method in given}
    rig.converge()
    acked = Counter[str]()  # in the log: without it, a backup would find out a little later, and take a dead letter for what was acked
    for batch in batches(rig.lab, rig.primary):
        for run in batch.runs:
            acked[run.dequeue.queue] += sum(len(range(*pair)) + 1 for pair in zip(run.dequeue.sequences[::2], run.dequeue.sequences[1::2]))
    for queue in queues:
        assert acked[queue] == len(taken.intersection(bodies[queue]))
        rig.both_hold(queue, [body for body in bodies[queue] if body not in taken])


@pytest.mark.parametrize("how", ["asks", "connects"])
def test_a_commit_that_waits_of_a_producer_whose_name_another_one_has_now(rig: Rig, how: str) -> None:
    """It came into the log under an ID that the newer one gives to a message of its own: that was confirmed as a repeat, and was nowhere."""
    producer = rig.name("producer")
    properties = {"lrq_producer": producer}
    fields = field(b"x-lrq-id", f"{producer}/1".encode())
    channel = rig.channel(confirms=True)
    queue, other = rig.declare(channel), rig.declare(channel)
    rig.converge()
    with RawClient(rig.url, properties=properties) as older:
        older.open_channel(1)
        older.open_channel(2)
        older.send(publish(2, "nowhere", b""))  # so the door has no question to the broker later
        older.call(2, C.Flow(True), frames.CHANNEL_FLOW_OK)
        older.call(1, commands.Tx.Select(), frames.TX_SELECT_OK)
        with nothing_gets_safe(rig):
            older.send(publish(2, other, b"waits") + publish(1, queue, b"older", fields=fields) + encode.method_frame(1, commands.Tx.Commit()))
            has_read(rig)
            older.socket.close()
            with RawClient(rig.url, "lrq" if how == "asks" else "/", properties=properties) as newer:
                newer.open_channel()
                if how == "asks":
                    asked = newer.call(1, commands.Queue.Declare(queue=producer_queue(producer), passive=True), frames.QUEUE_DECLARE_OK)
                    assert asked.endswith(bytes(8)), "it has published nothing"
    rig.both_hold(other, [b"waits"])
    rig.converge()
    with RawClient(rig.url, properties=properties) as newer:
        newer.open_channel(confirms=True)
        newer.send(publish(1, queue, b"newer", fields=fields))
        assert newer.confirmed(1) == set()
    rig.both_hold(queue, [b"newer"])
