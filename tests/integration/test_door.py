"""Publishing and consuming through the door: what a client sees is what the broker would have said, and both nodes hold the same."""

from __future__ import annotations

import random
import socket
import struct
import time

import pika
import pytest
from door_rig import Rig
from load import eventually
from pamqp import commands
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, UnroutableError
from raw_client import DOOR_FRAME_MAX_BYTES, RawClient, publish

from broker_plugin.amqp import content_header, encode, frames

pytestmark = [pytest.mark.broker, pytest.mark.quick]
KINDS = ("classic", "quorum")

HEARTBEAT_S = 12  # twice that a machine may stand still
SMALL_FRAME_MAX_BYTES = 8_192  # RabbitMQ 4 takes no less


def fill(channel: BlockingChannel, queue: str, count: int) -> list[bytes]:
    bodies = [b"%d" % i for i in range(count)]
    for body in bodies:
        channel.basic_publish("", queue, body)
    return bodies


def take(channel: BlockingChannel, queue: str, count: int, timeout_s: float = 60.0, **options: bool) -> list[tuple[int, bytes, bool]]:
    """(delivery tag, body, redelivered) of the next messages; the consumer is cancelled, nothing is acked."""
    got: list[tuple[int, bytes, bool]] = []
    tag = channel.basic_consume(queue, lambda _c, m, _p, b: got.append((m.delivery_tag, b, m.redelivered)), **options)
    deadline = time.monotonic() + timeout_s
    while len(got) < count and time.monotonic() < deadline:
        channel.connection.process_data_events(0.05)
    if not options.get("auto_ack"):
        channel.connection.process_data_events(0)
    channel.basic_cancel(tag)
    return got


# -- publishing


@pytest.mark.parametrize("kind", KINDS)
def test_a_confirmed_publish_is_on_both_nodes(rig: Rig, kind: str) -> None:
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel, kind=kind)
    rig.both_hold(queue, fill(channel, queue, 20))


def test_pipelined_confirms_answer_each_publish_once(rig: Rig) -> None:
    count = 3_000
    queue = rig.declare(rig.channel())
    with RawClient(rig.url) as client:
        client.open_channel(confirms=True)
        client.send(b"".join(publish(1, queue, b"%d" % i) for i in range(count)))
        assert client.confirmed(count) == set()
    rig.both_hold(queue, [b"%d" % i for i in range(count)])


def test_bytes_that_come_one_by_one(rig: Rig) -> None:
    """However a stream is cut, the frames are the same."""
    queue = rig.declare(rig.channel())
    data = b"".join(publish(1, queue, b"slow %d" % i) for i in range(5))
    with RawClient(rig.url) as client:
        client.open_channel(confirms=True)
        for i in range(len(data)):
            client.send(data[i : i + 1])
        assert client.confirmed(5) == set()
    rig.both_hold(queue, [b"slow %d" % i for i in range(5)])


@pytest.mark.parametrize("orderly", ["connection", "channel"])
def test_publishes_without_confirms_then_an_orderly_close(rig: Rig, orderly: str) -> None:
    """The broker has queued whatever came before the close; so has the door."""
    count = 2_000
    queue = rig.declare(rig.channel())
    with RawClient(rig.url) as client:
        client.open_channel()
        data = b"".join(publish(1, queue, b"%d" % i) for i in range(count))
        if orderly == "connection":
            client.send(data + encode.method_frame(0, commands.Connection.Close(200, "bye", 0, 0)))
            client.expect(frames.CONNECTION_CLOSE_OK)
        else:
            client.send(data + encode.method_frame(1, commands.Channel.Close(200, "bye", 0, 0)))
            client.expect(frames.CHANNEL_CLOSE_OK)
            client.open_channel(1, confirms=True)
            client.send(publish(1, queue, b"after"))
            assert client.confirmed(1) == set()
    rig.both_hold(queue, [b"%d" % i for i in range(count)] + [b"after"] * (orderly == "channel"))


@pytest.mark.parametrize("size", [0, 1, DOOR_FRAME_MAX_BYTES - 8, DOOR_FRAME_MAX_BYTES - 7, frames.FRAME_MAX_BYTES, 1 << 20, 5 << 20])
def test_bodies_of_every_size(rig: Rig, size: int) -> None:
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    body = bytes(i * 7 & 255 for i in range(256)) * (size // 256 + 1)
    body = body[:size]
    channel.basic_publish("", queue, body)
    channel.basic_publish("", queue, b"next")
    rig.both_hold(queue, [body, b"next"])
    got = take(channel, queue, 2)
    assert [b for _, b, _ in got] == [body, b"next"]
    channel.basic_ack(got[-1][0], multiple=True)
    rig.both_hold(queue, [])


def test_a_client_with_small_frames_gets_small_frames(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    channel.basic_publish("", queue, b"y" * 600_000)
    with RawClient(rig.url, frame_max=SMALL_FRAME_MAX_BYTES) as client:
        client.open_channel(confirms=True)
        client.call(1, commands.Basic.Get(queue=queue), frames.BASIC_GET_OK)
        size = 0
        while size < 600_000:
            part = client.expect(frames.HEADER, frames.BODY)
            assert len(part) <= SMALL_FRAME_MAX_BYTES - frames.FRAME_OVERHEAD_BYTES
            size += len(part) if client.got[-1][0] == frames.BODY else 0
        client.send(encode.ack(1, 1))
        body = b"z" * 20_000
        header = content_header.header_payload(len(body), content_header.properties())
        client.send(encode.publish_method(1, "", queue) + b"".join(encode.content(1, header, body, SMALL_FRAME_MAX_BYTES)))
        assert client.confirmed(1) == set()
    rig.both_hold(queue, [body])


def test_many_channels_on_one_connection(rig: Rig) -> None:
    queue = rig.declare(rig.channel())
    count = 60
    with RawClient(rig.url) as client:
        for number in range(1, count + 1):
            client.open_channel(number, confirms=number % 2 == 0)
        for turn in range(5):
            client.send(b"".join(publish(number, queue, b"%d/%d" % (number, turn)) for number in range(1, count + 1)))
        open_ = dict.fromkeys(range(2, count + 1, 2), 5)
        last = dict.fromkeys(open_, 0)
        while any(last[n] < 5 for n in open_):
            kind, number, payload = client.read() or (0, 0, b"")
            assert (kind, number in open_) == (frames.BASIC_ACK, True), (hex(kind), number)
            last[number] = max(last[number], frames.tag_and_bits(payload)[0])
        client.call(0, commands.Connection.Close(200, "", 0, 0), frames.CONNECTION_CLOSE_OK)
    # between channels a broker keeps no order
    rig.both_hold(queue, [b"%d/%d" % (n, t) for n in range(1, count + 1) for t in range(5)], ordered=False)


def test_confirm_select_after_publishes_counts_from_one(rig: Rig) -> None:
    queue = rig.declare(rig.channel())
    with RawClient(rig.url) as client:
        client.open_channel()
        client.send(b"".join(publish(1, queue, b"early") for _ in range(10)))
        client.call(1, commands.Confirm.Select(), frames.CONFIRM_SELECT_OK)
        client.send(b"".join(publish(1, queue, b"late") for _ in range(10)))
        assert client.confirmed(10) == set()
    rig.both_hold(queue, [b"early"] * 10 + [b"late"] * 10)


@pytest.mark.parametrize("size", [4, 400_000])
def test_a_mandatory_publish_comes_back_before_its_ack(rig: Rig, size: int) -> None:
    with RawClient(rig.url) as client:
        client.open_channel(confirms=True)
        client.send(publish(1, rig.name("nowhere"), b"x" * size, mandatory=True))
        returned = client.expect(frames.BASIC_RETURN)
        assert returned[4:15] == (312).to_bytes(2, "big") + b"\x08NO_ROUTE"
        assert client.confirmed(1) == set()
        kinds = [kind for kind, _, _ in client.got]
        assert kinds.index(frames.BASIC_RETURN) < kinds.index(frames.BODY) < kinds.index(frames.BASIC_ACK)


def test_pika_sees_what_is_unroutable(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    with pytest.raises(UnroutableError):
        channel.basic_publish("", rig.name("nowhere"), b"x", mandatory=True)
    channel.basic_publish("", rig.name("nowhere"), b"x")  # acked though it is nowhere, as a broker does


@pytest.mark.parametrize("tx", [False, True])
def test_what_came_back_may_be_sent_again_under_its_id(rig: Rig, tx: bool) -> None:
    """It was acked as a repeat, and in no queue."""
    queue, producer = rig.name(), rig.name("producer")
    channel = rig.connect(client_properties={"lrq_producer": producer}).channel()
    back: list[bytes] = []
    if tx:
        channel.tx_select()
        channel.add_on_return_callback(lambda _channel, _method, _properties, body: back.append(body))
    else:
        channel.confirm_delivery()

    def publish_all() -> None:
        for number in (1, 2, 3):
            properties = pika.BasicProperties(delivery_mode=2, headers={"x-lrq-id": f"{producer}/{number}"})
            try:
                channel.basic_publish("", kept if number == 2 else queue, b"%d" % number, properties, mandatory=True)
            except UnroutableError as error:
                back.extend(message.body for message in error.messages)
        if tx:
            channel.tx_commit()
            channel.connection.process_data_events()

    kept = rig.declare(rig.channel())
    publish_all()
    assert back == [b"1", b"3"]
    rig.channel().queue_declare(queue, durable=True)
    publish_all()
    assert back == [b"1", b"3"]
    rig.both_hold(queue, [b"1", b"3"])
    rig.both_hold(kept, [b"2"])


def test_a_missing_exchange_closes_the_channel_with_the_brokers_words(rig: Rig) -> None:
    texts = []
    for url in (rig.url, rig.broker_url(rig.primary)):
        channel = rig.channel(url=url, confirms=True)
        with pytest.raises(ChannelClosedByBroker) as caught:
            channel.basic_publish("door-no-such-exchange", "k", b"x")
        texts.append((caught.value.reply_code, caught.value.reply_text))
    assert texts[0] == texts[1]
    assert texts[0][0] == 404


def test_after_a_404_in_a_pipeline_the_number_is_as_new(rig: Rig) -> None:
    """Earlier publishes are resolved, later ones on the dead channel leave no trace, and the next channel works."""
    queue = rig.declare(rig.channel())
    with RawClient(rig.url) as client:
        for round_ in range(3):
            client.open_channel(1, confirms=True)
            first = b"".join(publish(1, queue, b"before %d" % round_) for _ in range(5))
            client.send(first)
            assert client.confirmed(5) == set()
            bad = publish(1, "k", b"x", exchange="door-no-such-exchange")
            client.send(bad + publish(1, queue, b"late") * 5)
            client.expect(frames.CHANNEL_CLOSE)
            client.send(publish(1, queue, b"later") * 3)
            client.send(encode.method_frame(1, commands.Channel.CloseOk()))
        client.open_channel(1, confirms=True)
        client.send(publish(1, queue, b"end"))
        assert client.confirmed(1) == set()
    rig.both_hold(queue, [b"before %d" % r for r in range(3) for _ in range(5)] + [b"end"])


def test_after_a_404_in_a_transaction_the_door_goes_on(rig: Rig) -> None:
    """What a client still publishes on a transactional channel that the broker has closed leaves no trace, and holds up nobody."""
    queue = rig.declare(rig.channel())
    with RawClient(rig.url) as client:
        client.open_channel(1)
        client.call(1, commands.Tx.Select(), frames.TX_SELECT_OK)
        client.send(publish(1, "k", b"x", exchange="door-no-such-exchange"))
        while (client.read() or (0,))[0] != frames.CHANNEL_CLOSE:
            pass
        client.send(publish(1, queue, b"later") * 3)
        client.send(encode.method_frame(1, commands.Channel.CloseOk()))
        client.open_channel(1, confirms=True)
        client.send(publish(1, queue, b"end"))
        assert client.confirmed(1) == set()
    rig.both_hold(queue, [b"end"])


def test_a_killed_client_loses_nothing_that_was_confirmed(rig: Rig) -> None:
    queue = rig.declare(rig.channel())
    with RawClient(rig.url) as client:
        client.open_channel(confirms=True)
        for i in range(400):
            client.send(publish(1, queue, b"%d" % i))
        confirmed = 0
        while confirmed < 50:
            kind, _, payload = client.read() or (0, 0, b"")
            assert kind == frames.BASIC_ACK
            confirmed = max(confirmed, frames.tag_and_bits(payload)[0])
        client.send(publish(1, queue, b"cut")[:-3])
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    rig.converge()
    held = rig.bodies(rig.primary, queue)
    assert held == [b"%d" % i for i in range(len(held))]
    assert len(held) >= confirmed
    rig.both_hold(queue, held)


# -- consuming


@pytest.mark.parametrize("kind", KINDS)
def test_acks_single_multiple_and_everything(rig: Rig, kind: str) -> None:
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel, kind=kind)
    bodies = fill(channel, queue, 30)
    got = take(channel, queue, 30)
    assert [b for _, b, _ in got] == bodies
    channel.basic_ack(got[4][0])
    channel.basic_ack(got[9][0], multiple=True)
    channel.connection.close()
    rig.both_hold(queue, bodies[10:])
    channel = rig.channel()
    take(channel, queue, 20)
    channel.basic_ack(0, multiple=True)
    rig.both_hold(queue, [])


@pytest.mark.parametrize("order", ["as given", "mixed", "backwards"])
@pytest.mark.parametrize("kind", KINDS)
def test_acks_one_by_one_in_runs_take_only_what_they_name(rig: Rig, kind: str, order: str) -> None:
    """To the broker the door makes one ack of several of them where it may: of two queues on one channel, and with gaps."""
    drawn = random.Random(f"{kind} {order}")
    channel = rig.channel(confirms=True)
    queues = [rig.declare(channel, kind=kind) for _ in range(2)]
    bodies = [fill(channel, queue, 200) for queue in queues]
    held: dict[int, tuple[int, bytes]] = {}
    with RawClient(rig.url) as client:
        client.open_channel()
        for at, queue in enumerate(queues):
            client.send(encode.method_frame(1, commands.Basic.Consume(queue=queue, consumer_tag=str(at), nowait=True)))
        while len(held) < 400:
            arguments = client.expect(frames.BASIC_DELIVER)
            consumer, tag, _ = frames.deliver_arguments(arguments)
            held[tag] = int(consumer), client.expect(frames.BODY)
        open_tags, kept = sorted(held), set()
        while len(open_tags) > 100:
            size = drawn.randrange(1, 40)
            run, open_tags = open_tags[:size], open_tags[size:]
            if order != "as given":
                kept |= {tag for tag in run if drawn.random() < 0.2}
                late = {tag for tag in kept if drawn.random() < 0.1}
                kept -= late
                run = [tag for tag in run if tag not in kept] + sorted(late - set(run))
                (drawn.shuffle if order == "mixed" else list.reverse)(run)
            client.send(b"".join(encode.ack(1, tag) for tag in run))
        left = {held[tag] for tag in (*open_tags, *kept)}
        client.call(1, commands.Channel.Close(0, "", 0, 0), frames.CHANNEL_CLOSE_OK)
    for at, queue in enumerate(queues):
        expected = [body for body in bodies[at] if (at, body) in left]
        found: list[bytes] = []  # through the door: RabbitMQ itself forgets acks of quorum queues that it has not passed on when a channel ends

        def are_back(queue: str = queue, found: list[bytes] = found, count: int = len(expected)) -> bool:
            while (body := channel.basic_get(queue)[2]) is not None:
                found.append(body)
            return len(found) >= count  # a busy quorum queue has back late what a closed channel held

        eventually("what was not acked is back", are_back)
        assert sorted(found) == sorted(expected)

        def is_the_same(queue: str = queue, expected: list[bytes] = expected) -> bool:
            """Read only while all of it is ready: who looks into the queue keeps the backup's sweeper out of it."""
            return rig.depth(rig.backup, queue) == len(expected) and sorted(rig.bodies(rig.backup, queue)) == sorted(expected)

        eventually("the backup has the same", is_the_same)


def test_an_unknown_delivery_tag_is_a_406(rig: Rig) -> None:
    channel = rig.channel()
    queue = rig.declare(channel)
    channel.basic_ack(77)
    with pytest.raises(ChannelClosedByBroker, match="unknown delivery tag 77"):
        channel.queue_declare(queue, passive=True)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_given_back_comes_again(rig: Rig, kind: str) -> None:
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel, kind=kind)
    bodies = fill(channel, queue, 10)
    got = take(channel, queue, 10)
    channel.basic_nack(got[-1][0], multiple=True, requeue=True)
    again = take(channel, queue, 10)
    assert sorted(b for _, b, _ in again) == bodies
    assert all(r for *_, r in again)
    channel.basic_reject(again[0][0], requeue=True)
    channel.basic_recover(requeue=True)
    third = take(channel, queue, 10)
    assert sorted(b for _, b, _ in third) == bodies
    channel.basic_ack(third[-1][0], multiple=True)
    rig.both_hold(queue, [])


@pytest.mark.proves("queue: dead letters")
@pytest.mark.parametrize("kind", KINDS)
def test_rejected_for_good_then_taken_from_the_dead_letter_queue(rig: Rig, kind: str) -> None:
    channel = rig.channel(confirms=True)
    dead = rig.declare(channel, kind=kind)
    queue = rig.declare(channel, kind=kind, dead_letter_exchange="", dead_letter_routing_key=dead)
    bodies = fill(channel, queue, 6)
    got = take(channel, queue, 6)
    channel.basic_reject(got[0][0], requeue=False)
    channel.basic_nack(got[2][0], multiple=True, requeue=False)
    channel.basic_ack(got[5][0], multiple=True)
    rig.both_hold(dead, bodies[:3])
    rig.both_hold(queue, [])
    died = take(channel, dead, 3)
    assert [b for _, b, _ in died] == bodies[:3]
    channel.basic_ack(died[-1][0], multiple=True)
    rig.both_hold(dead, [])


def test_a_consumer_without_acks_leaves_nothing_unacked(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    bodies = fill(channel, queue, 50)
    consumer = rig.channel()
    assert [b for _, b, _ in take(consumer, queue, 50, auto_ack=True)] == bodies
    rig.both_hold(queue, [])
    eventually("acks", lambda: rig.unacked(rig.primary, queue) == 0)
    consumer.connection.close()
    rig.both_hold(queue, [])


def test_get_with_and_without_acks(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    assert channel.basic_get(queue) == (None, None, None)
    fill(channel, queue, 4)
    method, _, body = channel.basic_get(queue, auto_ack=True)
    assert (body, method.message_count) == (b"0", 3)
    method, _, body = channel.basic_get(queue)
    assert body == b"1"
    channel.basic_ack(method.delivery_tag)
    method, _, body = channel.basic_get(queue)
    channel.basic_nack(method.delivery_tag)
    rig.both_hold(queue, [b"2", b"3"])
    method, _, _ = channel.basic_get(queue)
    channel.basic_reject(method.delivery_tag, requeue=False)
    channel.basic_get(queue, auto_ack=True)
    assert channel.basic_get(queue) == (None, None, None)
    rig.both_hold(queue, [])


def test_deleting_a_queue_cancels_its_consumer(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    consumer = rig.channel()
    cancelled: list[str] = []
    consumer.add_on_cancel_callback(lambda frame: cancelled.append(frame.method.consumer_tag))
    tag = consumer.basic_consume(queue, lambda *_: None)
    channel.queue_delete(queue)
    eventually("the cancel", lambda: (consumer.connection.process_data_events(0.05), cancelled == [tag])[1])
    eventually("the queue gone on the backup", lambda: not rig.exists(rig.backup, queue))
    channel.queue_declare(queue, durable=True)
    rig.both_hold(queue, [])


def test_purge_and_delete_tell_their_counts(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    fill(channel, queue, 7)
    assert channel.queue_purge(queue).method.message_count == 7
    bodies = fill(channel, queue, 3)
    rig.both_hold(queue, bodies)
    with pytest.raises(ChannelClosedByBroker, match="PRECONDITION_FAILED"):
        channel.queue_delete(queue, if_empty=True)
    rig.both_hold(queue, bodies)
    assert rig.channel().queue_delete(queue).method.message_count == 3
    eventually("the queue gone on the backup", lambda: not rig.exists(rig.backup, queue))


def test_a_channel_refused_by_the_door_resolves_what_came_before(rig: Rig) -> None:
    queue = rig.declare(rig.channel())
    refused = commands.Exchange.Declare(exchange=rig.name("x"), exchange_type="x-random", durable=True)
    with RawClient(rig.url) as client:
        for _ in range(3):
            client.open_channel(1)
            client.send(publish(1, queue, b"x") * 200 + encode.method_frame(1, refused))
            client.expect(frames.CHANNEL_CLOSE)
            client.send(publish(1, queue, b"late") + encode.method_frame(1, commands.Channel.CloseOk()))
    rig.both_hold(queue, [b"x"] * 600)


@pytest.mark.full
def test_idle_connections_with_heartbeats_stay_open(rig: Rig) -> None:
    channel = rig.channel(heartbeat=HEARTBEAT_S)
    channel.connection.process_data_events(2.5 * HEARTBEAT_S)
    queue = rig.declare(channel)
    rig.both_hold(queue, [])


def test_silence_with_heartbeats_is_death(rig: Rig) -> None:
    """A client that sends nothing, not even heartbeats, is closed, as by a broker: what it holds goes to others."""
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    fill(channel, queue, 1)
    with RawClient(rig.url, heartbeat_s=1) as client:
        client.open_channel()
        client.call(1, commands.Basic.Get(queue=queue), frames.BASIC_GET_OK)
        assert client.closed()
    eventually("the message back", lambda: rig.unacked(rig.primary, queue) == 0)
