"""Kinds and arguments of queues across a failover: what a client sees on the new primary. The pair is shared; each test mends it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pika
import pytest
from load import all_applied, consume, declare, depth, eventually, in_sync, replace_primary
from pamqp import commands
from raw_client import RawClient
from raw_client import publish as publish_frames

from broker_plugin.amqp import content_header, encode, frames
from broker_plugin.log.definitions import ALONE
from lrq_ha.demo import check as checks
from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.own_pair("kills")]

LOOKED_AT_S = 20.0  # the census looks once a second, and tells what it has seen three times


@dataclass
class Pair:
    """The shared pair, its primary and its backup as they are now."""

    lab: Lab
    primary: str
    backup: str

    def settle(self) -> None:
        """Returns when the backup has applied everything."""
        all_applied(self.lab, self.primary, self.backup)

    def fail_over(self) -> str:
        """SIGKILL of the primary, and the promotion; returns the new primary's door."""
        replace_primary(self.lab, self.primary, self.backup)
        return self.lab.nodes[self.backup].door

    @property
    def door(self) -> str:
        return self.lab.nodes[self.primary].door


@pytest.fixture
def group(pair: Lab) -> Iterator[Pair]:
    yield Pair(pair, *in_sync(pair))
    for name in ("e1", "e2"):
        if pair.nodes[name].sidecar_pid is None or pair.nodes[name].broker_pid is None:
            pair.start(name)


def channel_to(url: str) -> pika.adapters.blocking_connection.BlockingChannel:
    channel = pika.BlockingConnection(pika.URLParameters(url)).channel()
    channel.confirm_delivery()
    return channel


def publish(channel: pika.adapters.blocking_connection.BlockingChannel, queue: str, numbers: range) -> None:
    for number in numbers:
        channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2))


@pytest.mark.proves("queue: reject-publish", "queue: held messages")
@pytest.mark.quick
def test_a_full_queue_does_not_keep_the_door_shut(group: Pair) -> None:
    """The primary's queues held more than their limit, as consumers had taken some of it; the backup's cannot, until somebody consumes.

    What waits for room goes with its queue: it is not given to whoever declares one of the same name.
    """
    queue, deleted = queues = [f"{name}-{time.time_ns()}" for name in ("limited", "deleted")]
    for each in queues:
        declare(group.door, each, max_length=5, overflow="reject-publish")
    time.sleep(2)
    channel = channel_to(group.door)
    for each in queues:
        publish(channel, each, range(5))
        assert all(channel.basic_get(each)[0] for _ in range(5))
        publish(channel, each, range(5, 10))
    for each in queues:
        eventually("the backup's queue to be full", lambda each=each: depth(group.lab.nodes[group.backup].broker, each) == 5)
        said = f"queue '{each}' in vhost '/' is full here, and 5 messages wait for room"
        eventually("the backup to say so", lambda said=said: said in group.lab.status(group.backup)["reason"])
    time.sleep(2)  # what does not fit is tried again
    door = group.fail_over()
    anew = channel_to(door)
    anew.queue_delete(deleted)
    anew.queue_declare(deleted, durable=True)
    declare(door, f"beside-{queue}")
    assert sorted(consume(door, queue, 10)) == list(range(10))
    time.sleep(2)  # longer than until it is tried again
    assert depth(group.lab.nodes[group.backup].broker, deleted) == 0


@pytest.mark.proves("queue: reject-publish behind an exchange")
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_what_a_full_queue_refuses_is_in_its_other_queues_once(group: Pair, kind: str) -> None:
    """The backup's is full, as the primary's consumer holds as much: each try through the exchange gave all others of its queues one copy more."""
    exchange, free, full = (f"{name}-{kind}-{time.time_ns()}" for name in ("fan", "free", "full"))
    declare(group.door, free, queue_type=kind)
    declare(group.door, full, queue_type=kind, max_length=5, overflow="reject-publish")
    channel = channel_to(group.door)
    channel.exchange_declare(exchange, "topic", durable=True)
    for queue in (free, full):
        channel.queue_bind(queue, exchange, "a.#")
    time.sleep(2)
    held: list[int] = []

    def fill(numbers: range) -> None:
        for number in numbers:
            channel.basic_publish(exchange, f"a.{number}", b"%d" % number, pika.BasicProperties(delivery_mode=2))
        while (got := channel.basic_get(full))[0] is not None:
            held.append(got[0].delivery_tag)

    def is_full() -> bool:
        return f"queue '{full}' in vhost '/' is full here" in group.lab.status(group.backup)["reason"]

    backup = group.lab.nodes[group.backup].broker
    fill(range(5))
    fill(range(5, 10))
    eventually("the backup to be full", is_full)
    time.sleep(5)
    fill(range(10, 15))
    eventually("the other queue to have what came later, too", lambda: depth(backup, free) >= 15)
    time.sleep(1)
    assert depth(backup, free) == 15
    channel.basic_ack(held[10], multiple=True)
    eventually("what was refused to be where there is room now", lambda: not is_full() and depth(backup, full) == 4)
    assert depth(backup, free) == 15
    fill(range(15, 20))
    fill(range(20, 25))
    eventually("the backup to be full again", is_full)
    channel = channel_to(group.fail_over())
    for queue, numbers in ((free, range(25)), (full, range(11, 25))):
        found: list[tuple[int, str]] = []

        def all_found(queue: str = queue, numbers: range = numbers, found: list[tuple[int, str]] = found) -> bool:
            while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
                found.append((int(got[2]), got[0].routing_key))
            return len(found) >= len(numbers)

        eventually("all of it to come", all_found)
        assert found == [(number, f"a.{number}") for number in numbers]
    exchanges = partial(group.lab.ctl, group.backup, "list_exchanges", "name")
    assert exchange in exchanges()
    eventually("the node's own exchange to be gone", lambda: ALONE not in exchanges())


def read(url: str, stream: str) -> list[int]:
    return [int(body) for _, body in checks.read_stream(url, stream, "%2F")]


@pytest.mark.proves("queue: stream")
def test_what_a_restart_publishes_again_is_read_from_a_stream_once(group: Pair) -> None:
    """A stream keeps both copies; the door gives out the one that counts."""
    stream = f"again-{time.time_ns()}"
    declare(group.door, stream, queue_type="stream")
    time.sleep(2)
    count, copies = 0, 0
    while copies <= count:  # usually the first time: the applied record is written five times a second
        assert count < 500
        publish(channel_to(group.door), stream, range(count, count + 50))
        count += 50
        group.lab.kill(f"{group.primary}.sidecar")
        group.lab.start(f"{group.primary}.sidecar")
        group.lab.wait_role(group.primary, "active")
        copies = len(read(group.lab.nodes[group.primary].broker, stream))
    assert list(dict.fromkeys(read(group.door, stream))) == read(group.door, stream) == list(range(count))


@pytest.mark.proves("queue: stream", "in-doubt")
def test_what_is_refused_as_in_doubt_is_read_from_a_stream_once(group: Pair) -> None:
    """The broker had written it when it closed the channel, and had not said so: the stream keeps it beside what the publisher sent again."""
    stream, producer = f"doubt-{time.time_ns()}", f"doubt-{time.time_ns()}"
    declare(group.door, stream, queue_type="stream")
    time.sleep(2)
    count, copies = 0, 0
    with RawClient(group.door, properties={"lrq_producer": producer}) as client:
        while copies <= count:  # usually the first time
            assert count < 500
            numbers = range(count, count + 50)
            ids = {n: content_header.field(b"x-lrq-id", b"%b/%d" % (producer.encode(), n + 1)) for n in numbers}
            once = b"".join(publish_frames(1, stream, b"%d" % n, fields=ids[n]) for n in numbers)
            client.open_channel(1, confirms=True)
            client.send(once + encode.method_frame(1, commands.Basic.Get(queue="a queue that is not there")))
            while (frame := client.read()) and frame[0] != frames.CHANNEL_CLOSE:
                pass
            client.send(encode.method_frame(1, commands.Channel.CloseOk()))
            client.open_channel(1, confirms=True)
            client.send(once)
            client.confirmed(50)
            client.call(1, commands.Channel.Close(200, "", 0, 0), frames.CHANNEL_CLOSE_OK)
            count += 50
            copies = len(read(group.lab.nodes[group.primary].broker, stream))
    assert sorted(before := read(group.door, stream)) == list(range(count))
    group.settle()
    assert read(group.fail_over(), stream) == before


def test_a_restart_of_the_sidecar_knows_the_levels_and_leaves_the_messages(group: Pair) -> None:
    """What is in the log for other queues may have been published once more."""
    run = time.time_ns()
    queues = {level: f"{level}-{run}" for level in ("configuration", "none")}
    channel = channel_to(group.door)
    channel.exchange_declare(f"fan-{run}", "fanout", durable=True)
    for level, queue in queues.items():
        declare(group.door, queue, lrq_replicate=level)
        channel.queue_bind(queue, f"fan-{run}")
        publish(channel, queue, range(5))
    for number in range(5, 10):
        channel.basic_publish(f"fan-{run}", "", b"%d" % number, pika.BasicProperties(delivery_mode=2))
    group.settle()
    group.lab.kill(f"{group.primary}.sidecar")
    group.lab.start(f"{group.primary}.sidecar")
    group.lab.wait_role(group.primary, "active")
    channel = channel_to(group.door)
    channel.basic_publish(f"fan-{run}", "", b"10", pika.BasicProperties(delivery_mode=2))
    for queue in queues.values():
        publish(channel, queue, range(11, 14))
    group.settle()
    assert depth(group.lab.nodes[group.backup].broker, queues["configuration"]) == 0
    for queue in queues.values():
        found = consume(group.door, queue, depth(group.lab.nodes[group.primary].broker, queue))
        assert list(dict.fromkeys(found)) == list(range(14))
        by_name = [number for number in found if number not in range(5, 11)]
        assert by_name == [0, 1, 2, 3, 4, 11, 12, 13], "once, as it is in no log"


def test_a_message_that_its_consumer_gives_back_all_the_time(group: Pair) -> None:
    """It is hardly ever ready, and seldom seen to be held: the queue must not count as empty for that."""
    queue = f"poison-{time.time_ns()}"
    declare(group.door, queue)
    publish(channel_to(group.door), queue, range(1))
    eventually("the backup to have it", lambda: depth(group.lab.nodes[group.backup].broker, queue) == 1)
    channel, returned = channel_to(group.door), 0
    until = time.monotonic() + LOOKED_AT_S
    for method, _, _ in channel.consume(queue):
        channel.basic_nack(method.delivery_tag)
        returned += 1
        if time.monotonic() > until:
            break
    assert returned > LOOKED_AT_S
    group.settle()
    assert depth(group.lab.nodes[group.backup].broker, queue) == 1
    assert consume(group.fail_over(), queue, 1) == [0]


def carry_out(door: str, methods: list[Any], last: Any, answer: int) -> None:
    """Sends declarations that nobody answers, and one that somebody does."""
    with RawClient(door) as client:
        client.open_channel()
        client.send(b"".join(encode.method_frame(1, method) for method in (*methods, last)))
        client.expect(answer, timeout_s=120.0)


@pytest.mark.one_version("3.10")
def test_a_long_chain_of_auto_delete_exchanges(group: Pair) -> None:
    """To a queue of the level configuration, made from its end: the door of the new primary never opened, and the old one never followed."""
    queue = f"chained-{time.time_ns()}"
    names = [f"{queue}-{number}" for number in range(1_000)]
    exchanges = [commands.Exchange.Declare(exchange=x, exchange_type="fanout", durable=True, auto_delete=True, nowait=True) for x in names]
    bindings = [commands.Exchange.Bind(destination=x, source=y, nowait=True) for x, y in zip(names[1:], names)]
    declared = commands.Queue.Declare(queue=queue, durable=True, arguments={"x-lrq-replicate": "configuration"})
    carry_out(group.door, exchanges, declared, frames.QUEUE_DECLARE_OK)
    carry_out(group.door, [], commands.Queue.Bind(queue=queue, exchange=names[-1]), frames.QUEUE_BIND_OK)
    carry_out(group.door, bindings[:0:-1], commands.Exchange.Bind(destination=names[1], source=names[0]), frames.EXCHANGE_BIND_OK)
    group.settle()
    old, door = group.primary, group.fail_over()
    channel_to(door).basic_publish(names[0], "", b"1")
    assert consume(door, queue, 1) == [1]
    group.lab.start(old)
    assert in_sync(group.lab, applied=True) == (group.backup, old)
    deletions = [commands.Exchange.Delete(exchange=name, nowait=True) for name in names]
    carry_out(door, deletions, commands.Queue.Delete(queue=queue), frames.QUEUE_DELETE_OK)
