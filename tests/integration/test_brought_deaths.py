"""Messages that are published again with the `x-death` that they were received with: as directly at a broker, and none is taken for another."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

import pika
import pytest
from door_rig import Rig
from load import eventually
from pamqp import commands
from pamqp.common import FieldTable
from pika.adapters.blocking_connection import BlockingChannel
from raw_client import RawClient, publish

from broker_plugin.amqp import content_header, encode, frames

pytestmark = pytest.mark.proves("queue: dead letter published again")

#: As a consumer of a dead letter has them. `it`: the queue in which the test has it die.
BROUGHT = {
    "x-death": [
        {"queue": "it", "reason": "rejected", "count": 2, "exchange": "old", "routing-keys": ["a"]},
        {"queue": "other", "reason": "expired", "count": 1, "exchange": "e", "routing-keys": ["b"]},
    ],
    "x-first-death-queue": "other",
    "x-first-death-reason": "expired",
    "x-first-death-exchange": "e",
    "x-last-death-queue": "it",
    "x-last-death-reason": "rejected",
    "x-last-death-exchange": "old",
    "mine": 1,
}


def with_name(value: Any, queue: str, name: str) -> Any:
    """The same with another name for a queue, and without what differs from one message to the next."""
    if isinstance(value, dict):
        return {k: with_name(v, queue, name) for k, v in value.items() if k not in ("time", "x-lrq-pos")}
    if isinstance(value, list):
        return [with_name(each, queue, name) for each in value]
    return name if value == queue else value


def get(channel: BlockingChannel, queue: str) -> tuple[int, Mapping[str, Any]]:
    found: list[tuple[int, Mapping[str, Any]]] = []

    def there() -> bool:
        method, properties, _ = channel.basic_get(queue)
        if method is not None:
            found.append((method.delivery_tag, properties.headers or {}))
        return method is not None

    eventually(f"a message in {queue}", there)
    return found[0]


def redriven(rig: Rig, url: str, kind: str) -> list[Any]:
    """What consumers see of a message that dies, is published again as it is, and dies again."""
    channel = rig.connect(url).channel()
    channel.confirm_delivery()
    queue, dead = (f"brought-{what}-{uuid.uuid4().hex[:8]}" for what in ("q", "dead"))
    arguments = {"x-queue-type": kind, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    channel.queue_declare(queue, durable=True, arguments=arguments)
    channel.queue_declare(dead, durable=True, arguments={"x-queue-type": kind})
    seen, table = [], with_name(BROUGHT, "it", queue)
    for _ in range(2):
        channel.basic_publish("", queue, b"x", pika.BasicProperties(headers=dict(table)), mandatory=True)
        tag, table = get(channel, queue)
        seen.append(with_name(with_name(table, queue, "it"), dead, "dead"))
        channel.basic_reject(tag, requeue=False)
        tag, table = get(channel, dead)
        seen.append(with_name(with_name(table, queue, "it"), dead, "dead"))
        channel.basic_ack(tag)
    channel.queue_delete(queue)
    channel.queue_delete(dead)
    return seen


@pytest.mark.quick("3.10", "4.3")
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_published_again_with_its_deaths(rig: Rig, kind: str) -> None:
    """3.x counts on, 4.x anew: consumers see what they would without the door."""
    direct = redriven(rig, rig.broker_url(rig.primary), kind)
    assert sum(death["count"] for death in direct[0]["x-death"]) == 3
    assert redriven(rig, rig.url, kind) == direct


def deaths_to_the_octet(url: str, kind: str) -> list[bytes]:
    """`x-death` of a message that comes with one, dies and is published again as it came, three times, without what differs from one to the next."""
    mark = uuid.uuid4().hex[:8]
    queue, dead = f"octets-q-{mark}", f"octets-dead-{mark}"
    odd = b"\x05countb\x07\x04thenT" + (1 << 41).to_bytes(8, "big")
    before = odd + content_header.field(b"reason", b"expired") + content_header.field(b"queue", b"before")
    fields = b"\x07x-deathA" + (len(before) + 5).to_bytes(4, "big") + b"F" + len(before).to_bytes(4, "big") + before
    seen = []
    with RawClient(url) as client:
        client.open_channel(1)
        client.open_channel(2)
        to_dead: FieldTable = {"x-queue-type": kind, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
        kept: FieldTable = {"x-queue-type": kind}
        for name, arguments in ((queue, to_dead), (dead, kept)):
            client.call(1, commands.Queue.Declare(queue=name, durable=True, arguments=arguments), frames.QUEUE_DECLARE_OK)
        client.call(1, commands.Basic.Consume(queue=queue), frames.BASIC_CONSUME_OK)
        client.call(2, commands.Basic.Consume(queue=dead, no_ack=True), frames.BASIC_CONSUME_OK)
        for _ in range(3):
            client.send(publish(1, queue, b"x", fields=fields))
            tag = frames.deliver_arguments(client.expect(frames.BASIC_DELIVER))[1]
            client.expect(frames.BODY)
            client.send(encode.reject(1, tag, False))
            payload = content_header.cut(client.expect(frames.HEADER), b"x-lrq-pos")
            client.expect(frames.BODY)
            start, end = content_header.table(payload)
            fields = payload[start:end]
            found = content_header.fields(payload, start, end)
            (deaths,) = (payload[at:after] for at, value, after in found if payload[at + 1 : value] == b"x-death")
            seen.append(re.sub(rb"\x04timeT.{8}", b"", deaths, flags=re.DOTALL).replace(mark.encode(), b"mark"))
        for name in (queue, dead):
            client.call(1, commands.Queue.Delete(queue=name), frames.QUEUE_DELETE_OK)
    return seen


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_deaths_are_the_same_to_the_octet(rig: Rig, kind: str) -> None:
    """Their counts became octets, which clients that expect a long cannot read."""
    direct = deaths_to_the_octet(rig.broker_url(rig.primary), kind)
    assert b"\x05countl" in direct[-1]
    assert deaths_to_the_octet(rig.url, kind) == direct


def test_two_lines_of_one_that_brings_its_deaths(rig: Rig) -> None:
    """Two queues get a copy each, and both die: what is done with one dead letter is not done with the other."""
    channel = rig.channel(confirms=True)
    fan, dead = rig.name("x"), rig.declare(channel)
    channel.exchange_declare(fan, "fanout", durable=True)
    queues = [rig.declare(channel, dead_letter_exchange="", dead_letter_routing_key=dead) for _ in range(2)]
    for queue in queues:
        channel.queue_bind(queue, fan)
    died = [{"queue": "before", "reason": "rejected", "count": 1, "exchange": "", "routing-keys": ["before"]}]
    headers = {"x-death": died, "x-first-death-queue": "before", "x-first-death-reason": "rejected", "x-first-death-exchange": ""}
    channel.basic_publish(fan, "", b"x", pika.BasicProperties(headers=headers, delivery_mode=2))
    for queue in queues:
        tag, _ = get(channel, queue)
        channel.basic_reject(tag, requeue=False)
    tag, _ = get(channel, dead)
    channel.basic_ack(tag)
    rig.both_hold(dead, [b"x"])
    tag, _ = get(channel, dead)
    channel.basic_ack(tag)
    rig.both_hold(dead, [])
    channel.exchange_delete(fan)


def returned_and_streamed(rig: Rig, url: str) -> list[Any]:
    """What is seen of two messages: one that no queue takes, and one in a stream."""
    channel = rig.connect(url).channel()
    channel.confirm_delivery()
    properties = pika.BasicProperties(headers={**BROUGHT, "x-n": 1}, delivery_mode=2)
    with pytest.raises(pika.exceptions.UnroutableError) as refused:
        channel.basic_publish("", "brought-nowhere", b"x", properties, mandatory=True)
    seen = [refused.value.messages[0].properties.headers]
    stream = rig.declare(channel, kind="stream")
    channel.basic_publish("", stream, b"x", properties, mandatory=True)
    channel.basic_qos(prefetch_count=1)
    for _, found, _ in channel.consume(stream, arguments={"x-stream-offset": "first"}, inactivity_timeout=30):
        assert found is not None
        seen.append(found.headers)
        break
    channel.cancel()
    channel.queue_delete(stream)
    return [with_name(each, stream, "stream") for each in seen]


def test_a_stream_and_a_return(rig: Rig) -> None:
    """RabbitMQ puts no `x-death` into a stream. What was put aside gets into those of 4.x."""
    direct = returned_and_streamed(rig, rig.broker_url(rig.primary))
    assert direct[0]["x-death"] == BROUGHT["x-death"]
    through = returned_and_streamed(rig, rig.url)
    assert through[1].pop("x-death", BROUGHT["x-death"]) == BROUGHT["x-death"]
    assert through == direct


def test_a_headers_exchange_sees_what_is_brought_under_other_names(rig: Rig) -> None:
    """docs/protocol.md says so."""
    channel = rig.channel(confirms=True)
    exchange = rig.name("x")
    channel.exchange_declare(exchange, "headers", durable=True)
    plain, other = rig.declare(channel), rig.declare(channel)
    for queue, name in ((plain, "x-first-death-reason"), (other, "x-lrq-was-x-first-death-reason")):
        channel.queue_bind(queue, exchange, arguments={"x-match": "all-with-x", name: "expired"})
    properties = pika.BasicProperties(headers=BROUGHT, delivery_mode=2)
    with rig.at(rig.primary) as direct:
        direct.basic_publish(exchange, "", b"direct", properties)
    channel.basic_publish(exchange, "", b"through", properties)
    eventually("both to be routed", lambda: rig.bodies(rig.primary, plain) == [b"direct"] and rig.bodies(rig.primary, other) == [b"through"])
    for queue in (plain, other):
        channel.queue_purge(queue)
    channel.exchange_delete(exchange)
