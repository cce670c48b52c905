"""Declarations through the door: what the broker says, and what the backup's broker has afterwards."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pika
import pytest
from door_rig import Rig
from load import eventually, told
from pamqp import commands
from pika.exceptions import ChannelClosedByBroker
from raw_client import RawClient, publish
from sidecar_process import Sidecar

from broker_plugin.amqp import encode, frames
from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.quick, pytest.mark.one_version("4.3")]


def bindings(rig: Rig, node: str) -> set[tuple[str, ...]]:
    """(exchange, destination, kind, routing key) of what is bound at a node's broker."""
    rows = rig.lab.ctl(node, "-q", "list_bindings", "source_name", "destination_name", "destination_kind", "routing_key").splitlines()
    return {tuple(row.split("\t")) for row in rows}


def test_exchanges_and_bindings_are_on_both_nodes(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    # kind -> binding key, a routing key that fits and one that does not
    kinds = {"direct": ("a", "a", "b"), "topic": ("a.#", "a.b.c", "b.a"), "fanout": ("", "whatever", None)}
    places = {kind: (rig.declare(channel), rig.name("x")) for kind in kinds}
    for kind, (key, hits, misses) in kinds.items():
        queue, exchange = places[kind]
        channel.exchange_declare(exchange, kind, durable=True)
        channel.queue_bind(queue, exchange, key)
        channel.basic_publish(exchange, hits, b"hit")
        if misses is not None:
            channel.basic_publish(exchange, misses, b"miss")
    for queue, _ in places.values():
        rig.both_hold(queue, [b"hit"])
    bound = {(exchange, queue, "queue", kinds[kind][0]) for kind, (queue, exchange) in places.items()}
    for node in (rig.primary, rig.backup):
        assert bound == {row for row in bindings(rig, node) if row[0] in {exchange for _, exchange in places.values()}}
        for kind, (_, exchange) in places.items():
            with rig.at(node) as there:
                there.exchange_declare(exchange, kind, durable=True)  # 406 if it is of another
    for kind, (queue, exchange) in places.items():
        channel.queue_unbind(queue, exchange, kinds[kind][0])
        channel.basic_publish(exchange, kinds[kind][1], b"late")
        channel.exchange_delete(exchange)
        eventually("the exchange gone on the backup", lambda exchange=exchange: not rig.has_exchange(rig.backup, exchange))
        rig.both_hold(queue, [b"hit"])


def test_an_exchange_bound_to_an_exchange(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    queue, one, two = rig.declare(channel), rig.name("x1"), rig.name("x2")
    channel.exchange_declare(one, "topic", durable=True)
    channel.exchange_declare(two, "fanout", durable=True, internal=True)
    channel.exchange_bind(two, one, "a.*")
    channel.queue_bind(queue, two)
    channel.basic_publish(one, "a.b", b"1")
    channel.exchange_unbind(two, one, "a.*")
    channel.basic_publish(one, "a.b", b"2")
    rig.both_hold(queue, [b"1"])


@pytest.mark.proves("exchange: amq")
def test_exchanges_bound_to_those_that_every_broker_has(rig: Rig) -> None:
    """And the other way round. `amq.rabbitmq.*` is not among them: what a broker tells of itself is its own."""
    channel = rig.channel(confirms=True)
    queue, other, watching, exchange, traced = *(rig.declare(channel) for _ in range(3)), rig.name("x"), rig.name("x")
    word = rig.name("word")
    channel.exchange_declare(exchange, "fanout", durable=True)
    channel.exchange_declare(traced, "fanout", durable=True)
    channel.queue_bind(queue, exchange)
    channel.queue_bind(other, "amq.direct", word)
    channel.exchange_bind(exchange, "amq.topic", f"{word}.#")
    channel.exchange_bind("amq.direct", "amq.topic", word)
    channel.exchange_bind(traced, "amq.rabbitmq.trace", "#")
    channel.queue_bind(watching, "amq.rabbitmq.trace", "#")
    channel.basic_publish("amq.topic", f"{word}.a", b"both words")
    channel.basic_publish("amq.topic", word, b"one word")
    rig.both_hold(queue, [b"both words", b"one word"])
    rig.both_hold(other, [b"one word"])
    for own in (traced, watching):
        assert [node for node in (rig.primary, rig.backup) for row in bindings(rig, node) if row[:2] == ("amq.rabbitmq.trace", own)] == [rig.primary]
    channel.exchange_unbind(exchange, "amq.topic", f"{word}.#")
    channel.basic_publish("amq.topic", word, b"no more")
    rig.both_hold(queue, [b"both words", b"one word"])
    for one in (exchange, traced):
        channel.exchange_delete(one)


def test_headers_exchange_routes_the_same(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    queue, exchange = rig.declare(channel), rig.name("x")
    channel.exchange_declare(exchange, "headers", durable=True)
    channel.queue_bind(queue, exchange, "", {"x-match": "all", "colour": "red"})
    channel.basic_publish(exchange, "", b"red", pika.BasicProperties(headers={"colour": "red"}))
    channel.basic_publish(exchange, "", b"blue", pika.BasicProperties(headers={"colour": "blue"}))
    rig.both_hold(queue, [b"red"])


def test_declaring_the_same_again_is_harmless(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    channel.basic_publish("", queue, b"x")

    def leave_no_trace() -> bool:
        end = told(rig.lab, rig.primary)["end"]
        for _ in range(5):
            assert channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "classic"}).method.message_count == 1
            assert channel.queue_declare(queue, durable=True).method.message_count == 1
        return bool(told(rig.lab, rig.primary)["end"] == end)

    eventually("no entry of it, among those that the primary adds by itself", leave_no_trace)
    rig.both_hold(queue, [b"x"])


@pytest.mark.parametrize("change", [{"durable": False}, {"arguments": {"x-max-length": 3}}, {"auto_delete": True}, {"exclusive": True}])
def test_declaring_it_otherwise_is_the_brokers_refusal(rig: Rig, change: dict[str, object]) -> None:
    """And changes nothing: the queue is replicated as before."""
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    texts = []
    for url in (rig.broker_url(rig.primary), rig.url):
        with pytest.raises(ChannelClosedByBroker) as caught:
            rig.channel(url=url).queue_declare(queue, **{"durable": True, **change})
        texts.append((caught.value.reply_code, caught.value.reply_text))
    assert texts[0] == texts[1]
    assert texts[0][0] in (405, 406)
    channel.basic_publish("", queue, b"still")
    rig.both_hold(queue, [b"still"])


def test_passive_declarations(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    assert channel.queue_declare(queue, passive=True).method.queue == queue
    name = rig.name("none")
    texts = []
    for url in (rig.broker_url(rig.primary), rig.url):
        for what in ("queue_declare", "exchange_declare"):
            with pytest.raises(ChannelClosedByBroker) as caught:
                getattr(rig.channel(url=url), what)(name, passive=True)
            texts.append((caught.value.reply_code, caught.value.reply_text))
    assert texts[:2] == texts[2:]
    assert texts[0][0] == 404


@pytest.mark.proves("queue: exclusive")
@pytest.mark.parametrize("options", [{"exclusive": True}, {"auto_delete": True}, {"exclusive": True, "auto_delete": True}])
def test_queues_of_one_connection_stay_on_the_primary(rig: Rig, options: dict[str, bool]) -> None:
    channel = rig.channel(confirms=True)
    for name in (rig.name("own"), ""):
        queue = channel.queue_declare(name, **options).method.queue
        channel.basic_publish("", queue, b"mine")
        method, _, body = channel.basic_get(queue)
        assert body == b"mine"
        channel.basic_ack(method.delivery_tag)
        assert [b for *_, b in [next(channel.consume(queue, inactivity_timeout=0.1))]] == [None]
        channel.cancel()
        rig.converge()
        assert not rig.exists(rig.backup, queue)


@pytest.mark.proves("queue: exclusive")
def test_a_server_named_queue_is_not_replicated(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    queue = channel.queue_declare("", durable=True).method.queue
    channel.basic_publish("", queue, b"x")
    rig.converge()
    assert not rig.exists(rig.backup, queue)
    channel.queue_delete(queue)


def test_a_name_that_was_auto_delete_is_replicated_when_it_is_durable(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    queue = rig.name()
    channel.queue_declare(queue, auto_delete=True)
    channel.queue_delete(queue)
    channel.queue_declare(queue, durable=True)
    channel.basic_publish("", queue, b"x")
    rig.both_hold(queue, [b"x"])


def test_publishes_through_an_auto_delete_exchange(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    queue, exchange = rig.declare(channel), rig.name("x")
    channel.exchange_declare(exchange, "fanout", auto_delete=True)
    channel.queue_bind(queue, exchange)
    channel.basic_publish(exchange, "", b"x")
    rig.both_hold(queue, [b"x"])
    own = channel.queue_declare("", exclusive=True).method.queue
    channel.queue_bind(own, exchange)
    channel.queue_unbind(queue, exchange)  # the last binding on the backup, not here: there the exchange goes
    channel.queue_bind(queue, exchange)
    channel.basic_publish(exchange, "", b"y")
    rig.both_hold(queue, [b"x", b"y"])


@pytest.mark.full
@pytest.mark.parametrize("again", ["from it", "to it"])
def test_publishes_through_exchanges_that_an_auto_delete_exchange_is_bound_to(rig: Rig, again: str) -> None:
    """Where it had gone on the backup, and not here, it came back there with none of the bindings to it."""
    channel = rig.channel(confirms=True)
    queue, own = rig.declare(channel), channel.queue_declare("", exclusive=True).method.queue
    first, second, exchange, other = (rig.name(name) for name in ("x1", "x2", "x3", "x4"))
    channel.exchange_declare(first, "fanout", durable=True)
    for name in (second, exchange):
        channel.exchange_declare(name, "fanout", auto_delete=True)
    channel.exchange_bind(second, first)
    channel.exchange_bind(exchange, second)
    for bound in (queue, own):
        channel.queue_bind(bound, exchange)
    channel.queue_unbind(queue, exchange)
    eventually("it to go there", lambda: not rig.has_exchange(rig.backup, exchange))
    assert not rig.has_exchange(rig.backup, second)
    assert rig.has_exchange(rig.primary, exchange)
    if again == "to it":
        channel.exchange_declare(other, "fanout", durable=True)
        channel.exchange_bind(exchange, other)
        channel.basic_publish(other, "", b"to nobody there")
    channel.queue_bind(queue, exchange)
    channel.basic_publish(first, "", b"x")
    rig.both_hold(queue, [b"x"])
    if again == "to it":
        channel.basic_publish(other, "", b"y")
        rig.both_hold(queue, [b"x", b"y"])
        channel.exchange_delete(other)
    of_these = [{row for row in bindings(rig, name) if exchange in row or second in row} for name in (rig.primary, rig.backup)]
    assert of_these[0] - {(exchange, own, "queue", own)} - {(exchange, own, "queue", "")} == of_these[1]


def test_an_auto_delete_exchange_that_is_declared_again_has_lost_what_it_was_bound_to(rig: Rig) -> None:
    """It went with its last binding, of a queue that the backup does not have: there it stayed, with the bindings to it."""
    channel = rig.channel(confirms=True)
    queue, source, exchange = rig.declare(channel), rig.name("x1"), rig.name("x2")
    channel.exchange_declare(source, "fanout", durable=True)
    channel.exchange_declare(exchange, "fanout", auto_delete=True)
    channel.exchange_bind(exchange, source)
    own = channel.queue_declare("", exclusive=True).method.queue
    channel.queue_bind(own, exchange)
    channel.queue_delete(own)
    assert not rig.has_exchange(rig.primary, exchange)
    channel.exchange_declare(exchange, "fanout", auto_delete=True)
    channel.queue_bind(queue, exchange)
    channel.basic_publish(source, "", b"lost")
    channel.basic_publish(exchange, "", b"x")
    rig.both_hold(queue, [b"x"])
    channel.exchange_declare(exchange, "fanout", auto_delete=True)  # it is still there
    channel.exchange_bind(exchange, source)
    channel.exchange_declare(exchange, "fanout", auto_delete=True)
    channel.basic_publish(source, "", b"y")
    rig.both_hold(queue, [b"x", b"y"])


def test_no_wait_declarations_are_replicated(rig: Rig) -> None:
    queue, exchange = rig.name(), rig.name("x")
    with RawClient(rig.url) as client:
        client.open_channel(confirms=True)
        for method in (
            commands.Queue.Declare(queue=queue, durable=True, nowait=True),
            commands.Exchange.Declare(exchange=exchange, exchange_type="direct", durable=True, nowait=True),
            commands.Queue.Bind(queue=queue, exchange=exchange, routing_key="k", nowait=True),
        ):
            client.send(encode.method_frame(1, method))
        client.send(publish(1, "k", b"1", exchange=exchange))
        client.send(encode.method_frame(1, commands.Exchange.Delete(exchange=exchange, nowait=True)))
        client.send(publish(1, queue, b"2"))
        assert client.confirmed(2) == set()
        own = rig.name("own")
        client.send(encode.method_frame(1, commands.Queue.Declare(queue=own, exclusive=True, nowait=True)))
        client.send(publish(1, own, b"3"))
        client.call(1, commands.Basic.Qos(prefetch_count=1), frames.BASIC_QOS_OK)
        answers = {frames.QUEUE_DECLARE_OK, frames.EXCHANGE_DECLARE_OK, frames.QUEUE_BIND_OK, frames.EXCHANGE_DELETE_OK}
        assert not answers & {kind for kind, *_ in client.got}
    rig.both_hold(queue, [b"1", b"2"])
    assert not rig.has_exchange(rig.backup, exchange)
    assert not rig.exists(rig.backup, own)


def test_pipelined_declarations_are_answered_in_order(rig: Rig) -> None:
    """Known ones (passed on) and new ones (through the log) mixed: each answer belongs to its question."""
    known, new = rig.name("known"), rig.name("new")
    with RawClient(rig.url) as client:
        client.open_channel(1)
        client.call(1, commands.Queue.Declare(queue=known, durable=True), frames.QUEUE_DECLARE_OK)
        asked = [known, new, known, new, known]
        client.send(b"".join(encode.method_frame(1, commands.Queue.Declare(queue=q, durable=True)) for q in asked))
        named = [client.expect(frames.QUEUE_DECLARE_OK)[5:].split(b"\0")[0].decode() for _ in asked]
        assert named == asked
        # the last of these is refused: what the answers before belong to must not be mistaken for its success
        missing = rig.name("missing")
        client.send(
            encode.method_frame(1, commands.Queue.Declare(queue=known, passive=True))
            + encode.method_frame(1, commands.Queue.Bind(queue=missing, exchange="amq.direct", routing_key="k"))
        )
        client.expect(frames.QUEUE_DECLARE_OK)
        found = client.read()
        assert found is not None
        assert found[0] == frames.CHANNEL_CLOSE
    rig.both_hold(new, [])


def test_an_empty_queue_name_is_the_last_declared(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    channel.basic_publish("", queue, b"x")
    assert channel.queue_purge("").method.message_count == 1
    channel.queue_bind("", "amq.direct", queue)
    channel.basic_publish("amq.direct", queue, b"y")
    rig.both_hold(queue, [b"y"])


def named(of: Any, **values: Any) -> bytes:
    """A method with names that pamqp would refuse."""
    method = of()
    for name, value in values.items():
        setattr(method, name, value)
    return encode.method_frame(1, method)


def test_names_with_line_ends_are_what_the_broker_makes_of_them(rig: Rig) -> None:
    """It strips them where something is declared, deleted or bound, and nowhere else; the log had names that no broker has."""
    queue, apart, exchange = rig.name(), rig.name("none"), rig.name("x")
    with RawClient(rig.url) as client:
        client.open_channel(confirms=True)
        for data, answer in (
            (named(commands.Queue.Declare, queue=f"\r\n{queue}\n", durable=True), frames.QUEUE_DECLARE_OK),
            (named(commands.Queue.Declare, queue=f"{apart}\n", durable=True, arguments={"x-lrq-replicate": "none"}), frames.QUEUE_DECLARE_OK),
            (named(commands.Exchange.Declare, exchange=f"{exchange}\r", exchange_type="direct", durable=True), frames.EXCHANGE_DECLARE_OK),
            (named(commands.Queue.Bind, queue=f"{queue}\n", exchange=f"\n{exchange}", routing_key="k\n"), frames.QUEUE_BIND_OK),
            (named(commands.Queue.Delete, queue="\r\n"), frames.QUEUE_DELETE_OK),
        ):
            client.send(data)
            client.expect(answer)
        client.send(publish(1, "k\n", b"x", exchange=exchange) + publish(1, apart, b"y"))
        assert client.confirmed(2) == set()
        rig.both_hold(queue, [b"x"])
        assert rig.depth(rig.primary, apart) == 1
        assert not rig.exists(rig.backup, apart)
        client.send(named(commands.Exchange.Delete, exchange=f"{exchange}\n"))
        client.expect(frames.EXCHANGE_DELETE_OK)
        client.send(named(commands.Queue.Delete, queue=f"{queue}\n"))
        client.expect(frames.QUEUE_DELETE_OK)
    eventually("both to be without it", lambda: not any(rig.exists(node, queue) for node in (rig.primary, rig.backup)))


def test_an_empty_queue_name_is_not_one_declared_before_that_is_answered_late(brokers: Lab, tmp_path: Path) -> None:
    """Declarations that are passed on are not waited for, and it takes a broker a while to make a quorum queue."""
    mark = time.time_ns() % 10**9
    first, second = f"replicated-{mark}", f"none-{mark}"
    none = '[replication]\nreplicate = { "^none-" = "none", "" = "all" }\n'
    with Sidecar(brokers, tmp_path, f"late-{mark}", more=none) as sidecar:
        sidecar.becomes("active")
        with RawClient(f"{brokers.nodes['e1'].door.rpartition('@')[0]}@{sidecar.door}") as client:
            client.open_channel(confirms=True)
            declared = [
                commands.Queue.Declare(queue=first, durable=True),
                commands.Queue.Declare(queue=second, durable=True, arguments={"x-queue-type": "quorum"}),
            ]
            client.call(1, declared[0], frames.QUEUE_DECLARE_OK)
            client.send(publish(1, first, b"x"))
            assert client.confirmed(1) == set()
            client.send(b"".join(encode.method_frame(1, method) for method in declared))
            client.expect(frames.QUEUE_DECLARE_OK)
            client.send(encode.method_frame(1, commands.Basic.Get()) + encode.method_frame(1, commands.Queue.Purge()))
            assert second.encode() in client.expect(frames.QUEUE_DECLARE_OK, frames.BASIC_GET_OK)
            assert client.expect(frames.BASIC_GET_EMPTY, frames.BASIC_GET_OK)[:4] == frames.BASIC_GET_EMPTY.to_bytes(4, "big")
            assert client.expect(frames.QUEUE_PURGE_OK)[4:] == bytes(4)
            assert client.call(1, commands.Queue.Delete(queue=first), frames.QUEUE_DELETE_OK)[4:] == b"\0\0\0\1"
            client.call(1, commands.Queue.Delete(queue=second), frames.QUEUE_DELETE_OK)


@pytest.mark.full
@pytest.mark.parametrize("nowait", [False, True])
def test_an_empty_name_behind_a_queue_that_the_broker_names(rig: Rig, nowait: bool) -> None:
    """In one write: it is that queue, not the one that was declared before; and each client's is its own, as its acks are."""
    setup = rig.channel(confirms=True)
    before, exchange = rig.declare(setup), rig.name("x")
    setup.exchange_declare(exchange, "fanout", durable=True)
    at_once = [
        commands.Basic.Qos(prefetch_count=1),
        commands.Queue.Declare(exclusive=True, nowait=nowait),
        commands.Queue.Bind(exchange=exchange, routing_key="", nowait=nowait),
        commands.Basic.Consume(consumer_tag="c"),
    ]
    with RawClient(rig.url) as one, RawClient(rig.url) as two:
        for client in (one, two):
            client.open_channel()
            client.call(1, commands.Queue.Declare(queue=before, durable=True), frames.QUEUE_DECLARE_OK)
            client.got.clear()
            client.send(b"".join(encode.method_frame(1, method) for method in at_once))
            client.expect(frames.BASIC_CONSUME_OK)
            answers = [frames.BASIC_QOS_OK, *([] if nowait else [frames.QUEUE_DECLARE_OK, frames.QUEUE_BIND_OK]), frames.BASIC_CONSUME_OK]
            assert [kind for kind, *_ in client.got] == answers
        assert before not in {row[1] for row in bindings(rig, rig.primary) if row[0] == exchange}
        for body in (b"1", b"2"):
            setup.basic_publish(exchange, "", body)
        for client in (one, two):  # one is done before two gets its second
            for tag, body in enumerate((b"1", b"2"), 1):
                assert client.expect(frames.BODY) == body
                client.send(encode.ack(1, tag))
            client.call(1, commands.Basic.Qos(prefetch_count=1), frames.BASIC_QOS_OK)
    rig.both_hold(before, [])
    setup.exchange_delete(exchange)


@pytest.mark.full
def test_what_follows_at_once_on_a_queue_of_one_connection_is_not_replicated(rig: Rig) -> None:
    own = rig.name("own")
    with RawClient(rig.url) as client:
        client.open_channel(confirms=True)
        declared = encode.method_frame(1, commands.Queue.Declare(queue=own, exclusive=True, nowait=True))
        client.send(declared + encode.method_frame(1, commands.Queue.Bind(queue=own, exchange="amq.fanout", routing_key="", nowait=True)))
        client.send(publish(1, own, b"x"))
        assert client.confirmed(1) == set()
        assert (own, "queue") in {row[1:3] for row in bindings(rig, rig.primary) if row[0] == "amq.fanout"}
    rig.converge()
    assert own not in rig.lab.nodes[rig.backup].log.read_text(), "its broker is asked for nothing of it"


@pytest.mark.proves("exchange: refused")
@pytest.mark.parametrize(("kind", "why"), [("x-random", "routes differently"), ("x-delayed-message", "keeps messages in no queue")])
def test_an_exchange_that_cannot_be_replicated_is_refused(rig: Rig, kind: str, why: str) -> None:
    """Also where no broker has the plugin: what is delayed would be missing after a renewal, and acknowledged copies would come again."""
    with pytest.raises(ChannelClosedByBroker, match=why) as caught:
        rig.channel().exchange_declare(rig.name("x"), kind, durable=True, arguments={"x-delayed-type": "direct"})
    assert caught.value.reply_code == 406


@pytest.mark.full
def test_declarations_while_others_publish_at_full_speed(rig: Rig) -> None:
    """None lost, and each publish is routed on both nodes by the bindings that held at its place in the log."""
    setup = rig.channel()
    exchange = rig.name("x")
    setup.exchange_declare(exchange, "fanout", durable=True)
    base = rig.declare(setup)
    setup.queue_bind(base, exchange)
    stop = threading.Event()
    sent = [0, 0]
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            with RawClient(rig.url) as client:
                client.open_channel(confirms=True)
                while not stop.is_set() and sent[i] < 3_000:
                    client.send(b"".join(publish(1, "", b"%d:%d" % (i, sent[i] + n), exchange=exchange) for n in range(50)))
                    client.got.clear()
                    sent[i] += 50
                    wait_for(client, sent[i])
        except BaseException as error:
            errors.append(error)

    def wait_for(client: RawClient, last: int) -> None:
        done = 0
        while done < 50:
            kind, _, payload = client.read() or (0, 0, b"")
            if kind != frames.BASIC_ACK:
                raise AssertionError(hex(kind))
            tag, bits = frames.tag_and_bits(payload)
            done = 50 - (last - tag) if bits & 1 else done + 1

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    queues = []
    for _ in range(15):
        queue = rig.declare(setup)
        setup.queue_bind(queue, exchange)
        queues.append(queue)
    for queue in queues[::2]:
        setup.queue_unbind(queue, exchange)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    expected = sorted(b"%d:%d" % (i, n) for i in range(2) for n in range(sent[i]))
    rig.both_hold(base, expected, ordered=False)
    rig.converge()
    for queue in queues:
        assert sorted(rig.bodies(rig.primary, queue)) == sorted(rig.bodies(rig.backup, queue)), queue
    setup.exchange_delete(exchange)
