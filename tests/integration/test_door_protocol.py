"""Everything a client may do, done twice: directly at a broker and through the door. Both must say the same, word for word.

Each scenario is a function that talks and hears; `talk` says what is compared. Scenarios of queues run for every type of queue.
What was published through the door is on both nodes' brokers afterwards.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from door_rig import Rig
from load import eventually, in_sync, told
from pamqp import commands
from pamqp.common import FieldTable
from talk import Talk

from broker_plugin.amqp import content_assembly, content_header, encode, frames
from lrq_ha.lab import Lab

pytestmark = pytest.mark.broker

KINDS = ("classic", "quorum")
Scenario = Callable[[Talk], None]
_scenarios: list[Any] = []
B, C, E, Q = commands.Basic, commands.Channel, commands.Exchange, commands.Queue


def scenario(*kinds: str) -> Callable[[Scenario], Scenario]:
    """Registers a scenario for these types of queue."""

    def register(body: Scenario) -> Scenario:
        for kind in kinds or ("classic",):
            _scenarios.append(pytest.param(body, kind, id=f"{body.__name__}-{kind}"))
        return body

    return register


# -- channels


@scenario()
def channel_reuse(t: Talk) -> None:
    """A channel that is opened anew under the same number knows nothing of the one before."""
    t.open(confirms=True)
    q = t.queue()
    t.publish(q, b"1")
    t.confirms()
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.deliveries(1)
    t.do(C.Close(200, "", 0, 0))
    t.open(confirms=True)
    t.publish(q, b"2")
    t.confirms()
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.say(B.Ack(t.deliveries(2)[-1].delivery_tag, True))
    t.do(Q.Declare(passive=True))  # nor the queue that was declared last


@scenario()
def channel_opened_twice(t: Talk) -> None:
    t.open()
    t.open()


@scenario()
def channel_that_is_not_open(t: Talk) -> None:
    t.do(Q.Declare(queue="x", passive=True), 7)


@scenario()
def publish_on_a_channel_that_is_not_open(t: Talk) -> None:
    for confirms in (False, True):
        other = t.another()
        other.open(confirms=confirms)
        other.publish("q", exchange=t.name("none"))
        other.hear()
        other.publish("q", exchange="amq.fanout")
        other.publish("q")
        other.hear()


@scenario()
def channel_flow(t: Talk) -> None:
    t.open()
    t.do(C.Flow(True))
    t.do(C.Flow(False))


@scenario()
def flow_ok_that_nobody_has_asked_for(t: Talk) -> None:
    t.open()
    t.say(C.FlowOk(True))
    t.do(Q.Declare(queue=t.name("none"), passive=True))


# -- qos


@scenario(*KINDS)
def qos_per_consumer(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.fill(q, 9)
    t.do(B.Qos(prefetch_count=2))
    t.do(B.Consume(queue=q, consumer_tag="a"))
    a = t.deliveries(2)
    t.quiet()
    t.do(B.Qos(prefetch_count=3))
    t.do(B.Consume(queue=q, consumer_tag="b"))
    t.deliveries(3)
    t.quiet()
    t.say(B.Ack(a[-1].delivery_tag, True))
    t.deliveries(2)
    t.quiet()


@scenario("classic")
def qos_of_a_channel(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.fill(q, 9)
    t.do(B.Qos(prefetch_count=3, global_=True))
    t.do(B.Consume(queue=q, consumer_tag="a"))
    t.deliveries(3)
    t.do(B.Consume(queue=q, consumer_tag="b"))
    t.quiet()
    t.do(B.Cancel("a"))
    t.say(B.Ack(2, True))
    t.deliveries(2)
    t.quiet()


@scenario("quorum")
def qos_of_a_channel_of_a_quorum_queue(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.do(B.Qos(prefetch_count=3, global_=True))
    t.do(B.Consume(queue=q, consumer_tag="a"))


@scenario()
def qos_by_size(t: Talk) -> None:
    t.open()
    t.do(B.Qos(prefetch_size=1))


# -- consumers


@scenario(*KINDS)
def consumer_with_a_tag_of_the_servers(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.fill(q, 2)
    ok = t.do(B.Consume(queue=q))
    t.say(B.Ack(t.deliveries(2)[-1].delivery_tag, True))
    t.do(B.Cancel(ok.consumer_tag))
    t.do(Q.Declare(queue=q, passive=True))


@scenario(*KINDS)
def consumers_with_priorities(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.do(B.Qos(prefetch_count=2))
    t.do(B.Consume(queue=q, consumer_tag="low", arguments={"x-priority": 1}))
    t.do(B.Consume(queue=q, consumer_tag="high", arguments={"x-priority": 9}))
    for _ in range(3):  # the third goes to the other, as the first has two
        t.fill(q, 1)
        t.deliveries(1)
    t.quiet()


@scenario(*KINDS)
def consumer_that_is_exclusive(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.do(B.Consume(queue=q, consumer_tag="only", exclusive=True))
    other = t.another()
    other.open()
    other.do(B.Consume(queue=q, consumer_tag="late"))
    t.do(B.Cancel("only"))
    other.open()
    other.do(B.Consume(queue=q, consumer_tag="late"))


@scenario(*KINDS)
def consumer_without_acks(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.fill(q, 5)
    t.do(B.Consume(queue=q, consumer_tag="c", no_ack=True))
    t.deliveries(5)
    t.do(B.Cancel("c"))
    eventually("the acks", lambda: t.do(Q.Declare(queue=q, passive=True)).message_count == 0)
    t.heard.clear()
    t.say(B.Ack(1))
    t.hear()


@scenario()
def consumers_with_the_same_tag(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.do(B.Consume(queue=q, consumer_tag="c"))


@scenario()
def consumer_of_no_queue(t: Talk) -> None:
    t.open()
    t.do(B.Consume(queue=t.name("none"), consumer_tag="c"))
    t.open()
    t.do(B.Get(queue=t.name("none")))


@scenario(*KINDS)
def consumer_without_a_wait(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.fill(q, 2)
    t.say(B.Consume(queue=q, consumer_tag="c", nowait=True))
    t.say(B.Ack(t.deliveries(2)[-1].delivery_tag, True))
    t.say(B.Cancel("c", nowait=True))
    t.do(B.Cancel("unknown"))
    t.fill(q, 1)
    t.quiet()


@scenario(*KINDS)
def consumers_without_a_wait_or_a_tag(t: Talk) -> None:
    """What the door did not know by its name it gave out unlooked at, and logged no ack of."""
    t.open()
    acks, none = t.queue("acks"), t.queue("none")
    for queue, no_ack in ((acks, False), (none, True)):
        t.fill(queue, 3)
        t.say(B.Consume(queue=queue, no_ack=no_ack, nowait=True))
        given = t.deliveries(3)
        if not no_ack:
            t.say(B.Ack(given[1].delivery_tag, True))
    t.do(C.Flow(True))


@scenario(*KINDS)
def consumer_whose_queue_is_deleted(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.do(B.Consume(queue=q, consumer_tag="c"))
    other = t.another()
    other.open()
    other.do(Q.Delete(queue=q))
    t.hear(frames.BASIC_CANCEL)
    t.do(B.Consume(queue=q, consumer_tag="c"))


@scenario(*KINDS)
def consumer_that_deletes_its_queue(t: Talk) -> None:
    """First it hears that the queue is deleted, then that it is cancelled."""
    t.open()
    q = t.queue()
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.do(Q.Delete(queue=q))
    t.hear(frames.BASIC_CANCEL)


@scenario(*KINDS)
def single_active_consumer(t: Talk) -> None:
    t.open()
    q = t.queue(single_active_consumer=True)
    t.do(B.Consume(queue=q, consumer_tag="first"))
    t.do(B.Consume(queue=q, consumer_tag="second"))
    t.fill(q, 1)
    t.say(B.Ack(t.deliveries(1)[0].delivery_tag))
    t.do(B.Cancel("first"))
    t.fill(q, 1)
    t.deliveries(1)


@scenario(*KINDS)
def getting_one_by_one(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.do(B.Get(queue=q))
    t.fill(q, 4)
    t.do(B.Get(queue=q, no_ack=True))
    t.say(B.Ack(t.do(B.Get(queue=q)).delivery_tag))
    t.say(B.Reject(t.do(B.Get(queue=q)).delivery_tag, False))
    t.do(B.Get(queue=q))
    t.do(B.Get(queue=q))


# -- settling


@scenario(*KINDS)
def acks_of_several(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.fill(q, 10)
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.deliveries(10)
    t.say(B.Ack(2))
    t.say(B.Ack(5, True))
    t.say(B.Nack(7, multiple=True, requeue=False))
    t.say(B.Ack(0, True))
    t.do(B.Cancel("c"))
    t.do(C.Close(200, "", 0, 0))
    t.open()
    t.do(B.Get(queue=q))


@scenario()
def ack_of_an_unknown_tag(t: Talk) -> None:
    for method in (B.Ack(5), B.Ack(5, True), B.Nack(5), B.Reject(5)):
        t.open()
        t.say(method)
        t.hear()


@scenario()
def acks_of_several_up_to_an_unknown_tag(t: Talk) -> None:
    """They are refused as a whole: everything that the channel held comes again."""
    t.open()
    q = t.queue()
    t.fill(q, 4)
    for method in (B.Ack(9, True), B.Nack(9, multiple=True, requeue=False), B.Ack(2, True)):
        t.do(B.Consume(queue=q, consumer_tag="c"))
        t.deliveries(4)
        if method.delivery_tag == 2:
            t.say(B.Ack(2))
        t.say(method)
        t.hear()
        t.open()
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.deliveries(3)


@scenario(*KINDS)
def ack_given_twice(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.fill(q, 2)
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.deliveries(2)
    t.say(B.Ack(1))
    t.say(B.Ack(1))
    t.hear()
    t.open()
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.say(B.Ack(t.deliveries(1)[0].delivery_tag))
    t.do(C.Flow(True))


@scenario("classic")
def nack_and_reject_give_back(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.fill(q, 5)
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.deliveries(5)
    t.say(B.Nack(3, multiple=True, requeue=True))
    t.deliveries(3)
    t.say(B.Reject(8, True))
    t.deliveries(1)
    t.say(B.Nack(0, multiple=True, requeue=False))
    t.quiet()


@scenario(*KINDS)
def rejected_to_a_dead_letter_queue(t: Talk) -> None:
    t.open()
    dead = t.queue("dead")
    q = t.queue("q", dead_letter_exchange="", dead_letter_routing_key=dead)
    t.fill(q, 3)
    t.do(B.Consume(queue=dead, consumer_tag="dead"))
    other = t.another()
    other.open()
    other.do(B.Consume(queue=q, consumer_tag="c"))
    other.deliveries(3)
    other.say(B.Reject(1, False))
    other.say(B.Nack(3, multiple=True, requeue=False))
    t.say(B.Ack(t.deliveries(3)[-1].delivery_tag, True))
    t.do(C.Flow(True))


@scenario("classic")
def recover(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.fill(q, 3)
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.deliveries(3)
    t.say(B.Ack(1))
    t.do(B.Recover(True))
    t.say(B.Ack(t.deliveries(2)[-1].delivery_tag))
    t.do(B.Recover(False))


@scenario("classic")
def recover_without_an_answer(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.fill(q, 2)
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.deliveries(2)
    t.say(B.RecoverAsync(True))
    t.say(B.Ack(t.deliveries(2)[-1].delivery_tag, True))
    t.do(C.Flow(True))


# -- publishing


@scenario(*KINDS)
def mandatory_publishes_come_back(t: Talk) -> None:
    t.open(confirms=True)
    q = t.queue()
    t.publish(t.name("none"), b"1", mandatory=True)
    t.confirms()
    t.publish(q, b"2", mandatory=True)
    t.confirms()
    t.publish(t.name("none"), b"3" * 300_000, mandatory=True)
    t.confirms()
    t.do(Q.Delete(queue=q))
    t.publish(q, b"4", mandatory=True)
    t.confirms()
    t.publish(q, b"5")
    t.confirms()


@scenario()
def access_requested(t: Talk) -> None:
    """Of AMQP 0-8; RabbitMQ answers it all the same. (pamqp does not know it.)"""
    t.open()
    t.send(encode.raw_method_frame(1, frames.ACCESS_REQUEST, b"\5/data", b"\x1f"))
    t.heard[1].append(t.read())


def stream(t: Talk, count: int) -> str:
    """A stream with so many messages. What it holds is not compared as with queues: it is read by consumers only."""
    t.open(confirms=True)
    q = t.queue()
    t.queues.remove(q)
    for i in range(count):
        t.publish(q, b"%d" % i)
    t.confirms()
    return q


@scenario("stream")
def stream_from_each_offset(t: Talk) -> None:
    q = stream(t, 9)
    for offset in ("first", 0, 3, 8, datetime(2020, 1, 1, tzinfo=UTC)):
        other = t.another()
        other.open()
        other.do(B.Qos(prefetch_count=4))
        other.do(B.Consume(queue=q, consumer_tag="c", arguments={"x-stream-offset": offset}))
        behind = offset if isinstance(offset, int) else 0
        for _ in range(behind, 9):
            other.say(B.Ack(other.deliveries(1)[0].delivery_tag))
        other.do(B.Cancel("c"))
    t.do(Q.Delete(queue=q))


@scenario("stream")
def stream_without_acks(t: Talk) -> None:
    """No RabbitMQ has that, nor what follows."""
    q = stream(t, 2)
    for method in (
        B.Consume(queue=q, no_ack=True), B.Consume(queue=q), B.Get(queue=q), B.Get(queue=q, no_ack=True), Q.Purge(queue=q),
        B.Consume(queue=q, exclusive=True, no_ack=True),
    ):  # fmt: skip
        other = t.another()
        other.open()
        if getattr(method, "no_ack", False):
            other.do(B.Qos(prefetch_count=4))
        other.do(method)
        other.quiet()
    t.do(Q.Delete(queue=q))


@scenario("stream")
def stream_whose_messages_are_given_back(t: Talk) -> None:
    q = stream(t, 3)
    for method in (B.Nack(1, False, True), B.Nack(1, False, False), B.Reject(1, True), B.Reject(1, False)):
        other = t.another()
        other.open()
        other.do(B.Qos(prefetch_count=4))
        other.do(B.Consume(queue=q, consumer_tag="c", arguments={"x-stream-offset": "first"}))
        other.deliveries(3)
        other.say(method)
        other.quiet()
    t.do(Q.Delete(queue=q))


@scenario()
def immediate_publishes_are_refused(t: Talk) -> None:
    t.open()
    body = encode.content(1, frames.BASIC_CLASS.to_bytes(4, "big") + bytes(10), b"")
    t.send(encode.raw_method_frame(1, frames.BASIC_PUBLISH, b"\0\0\0\1x", b"\2") + b"".join(body))
    t.hear()


@scenario("classic")
def a_full_queue_refuses(t: Talk) -> None:
    t.open(confirms=True)
    q = t.queue(max_length=2, overflow="reject-publish")
    for i in range(4):
        t.publish(q, b"%d" % i)
        t.confirms()
    t.do(B.Get(queue=q, no_ack=True))


@scenario("quorum")
def a_full_quorum_queue_refuses(t: Talk) -> None:
    """It takes some more than its limit, not always as many: only that it refuses is compared."""
    t.open(confirms=True)
    q = t.queue(max_length=2, overflow="reject-publish")
    for _ in range(200):
        t.publish(q, b"x")
        t.confirms()
        if t.heard[1][-1][0] == "basic.nack":
            break
    t.heard[1] = t.heard[1][-1:][:1]
    t.heard[1][0][1].clear()


@scenario()
def publish_to_no_exchange(t: Talk) -> None:
    t.open(confirms=True)
    t.publish("k", exchange=t.name("none"))
    t.confirms()
    t.open()
    t.publish("k", exchange=t.name("none"))
    t.hear()


@scenario()
def closed_by_both_sides(t: Talk) -> None:
    """The client hears why the broker closed the channel, although it has asked for a close itself."""
    for confirms in (False, True):
        t.open(confirms=confirms)
        t.publish("k", exchange=t.name("none"))
        t.do(C.Close(200, "", 0, 0))
        t.hear(frames.CHANNEL_CLOSE_OK)
    t.open()
    t.say(Q.Declare(queue=t.name("none"), passive=True))
    t.do(C.Close(200, "", 0, 0))
    t.hear(frames.CHANNEL_CLOSE_OK)
    t.open()
    t.say(B.Ack(5))
    t.do(C.Close(200, "", 0, 0))
    t.hear(frames.CHANNEL_CLOSE_OK)
    t.open()
    t.do(commands.Tx.Select())
    t.publish("k", exchange=t.name("none"))
    t.do(C.Close(200, "", 0, 0))
    t.hear(frames.CHANNEL_CLOSE_OK)
    t.open()
    t.do(C.Flow(True))


@scenario()
def publish_to_an_internal_exchange(t: Talk) -> None:
    t.open(confirms=True)
    t.do(E.Declare(exchange=t.name("x"), exchange_type="fanout", internal=True, durable=True))
    t.publish("k", exchange=t.name("x"))
    t.confirms()


@scenario()
def confirms_selected_without_a_wait(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.publish(q, b"before")
    t.say(commands.Confirm.Select(nowait=True))
    t._published.clear()
    t.publish(q, b"after")
    t.confirms()
    t.do(commands.Confirm.Select())


@scenario(*KINDS)
def every_property(t: Talk) -> None:
    t.open(confirms=True)
    q = t.queue()
    table = {"s": "text", "i": 5, "n": -5, "big": 2**40, "t": {"a": {"b": [1, "x", True, None]}}, "b": True, "none": None, "f": 1.5}
    t.publish(
        q, b"body", content_type="text/plain", content_encoding="utf-8", headers=table, priority=3, correlation_id="corr", reply_to="there",
        expiration="60000", message_id="id", message_type="kind", app_id="app", user_id=t.user,
    )
    t.publish(q, b"", raw=b"\0\0")
    t.publish(q, b"empty table", raw=b"\x20\0\0\0\0\0")
    t.confirms()
    for _ in range(3):
        t.do(B.Get(queue=q, no_ack=True))


@scenario()
def user_id_of_another(t: Talk) -> None:
    t.open(confirms=True)
    q = t.queue()
    t.publish(q, user_id="somebody-else")
    t.confirms()


@scenario(*KINDS)
def bodies_of_every_size(t: Talk) -> None:
    for frame_max in (8_192, 100_000, t.frame_max):
        other = t.another(frame_max=frame_max)
        other.open(confirms=True)
        q = other.queue(f"q{len(t.others)}")
        most = frame_max - frames.FRAME_OVERHEAD_BYTES
        for size in (0, 1, most - 1, most, most + 1, 2 * most, 3 * most + 7, 400_000):
            other.publish(q, bytes(size))
        other.confirms()
        other.do(B.Consume(queue=q, consumer_tag="c"))
        assert max(len(payload) for *_, payload in other.got) <= most
        other.say(B.Ack(other.deliveries(8)[-1].delivery_tag, True))
        other.do(C.Flow(True))
    t.others[-1].heard.clear()  # directly these are larger


# -- transactions


@scenario(*KINDS)
def tx_publishes(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.select()
    for round_ in range(3):
        for i in range(4):
            t.publish(q, b"%d/%d" % (round_, i))
        t.do(Q.Declare(queue=q, passive=True))
        t.do(commands.Tx.Commit())
        t.do(Q.Declare(queue=q, passive=True))
    t.do(commands.Tx.Commit())  # of nothing
    t.select()
    t.publish(q, b"large" * 200_000)
    t.do(commands.Tx.Commit())
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.say(B.Ack(t.deliveries(13)[-1].delivery_tag, True))
    t.do(commands.Tx.Commit())
    t.do(Q.Declare(queue=q, passive=True))


@scenario(*KINDS)
def tx_rolled_back(t: Talk) -> None:
    """Its publishes are gone, its acks may be given again."""
    t.open()
    q = t.queue()
    t.fill(q, 3)
    t.select()
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.deliveries(3)
    t.publish(q, b"no")
    t.say(B.Ack(2, True))
    t.do(commands.Tx.Rollback())
    t.say(B.Ack(1))
    t.publish(q, b"yes")
    t.do(commands.Tx.Commit())
    t.say(B.Ack(t.deliveries(1)[0].delivery_tag, True))
    t.in_any_order()
    t.do(commands.Tx.Commit())
    t.do(commands.Tx.Rollback())
    t.do(Q.Declare(queue=q, passive=True))


@scenario(*KINDS)
def tx_acks(t: Talk) -> None:
    t.open()
    dead = t.queue("dead")
    q = t.queue("q", dead_letter_exchange="", dead_letter_routing_key=dead)
    t.fill(q, 6)
    t.select()
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.deliveries(6)
    t.say(B.Ack(1))
    t.say(B.Reject(2, False))
    t.say(B.Nack(4, multiple=True, requeue=False))
    t.publish(q, b"new")
    t.do(commands.Tx.Commit())
    t.deliveries(1)
    t.in_any_order()
    other = t.another()
    other.open()
    eventually("the dead", lambda: other.do(Q.Declare(queue=dead, passive=True)).message_count == 3)
    t.say(B.Ack(5))
    t.say(B.Ack(6))
    t.do(C.Close(200, "", 0, 0))  # which rolls back
    eventually("what goes back", lambda: other.do(Q.Declare(queue=q, passive=True)).message_count == 3)
    other.heard.clear()


@scenario(*KINDS)
def tx_ack_of_everything_so_far(t: Talk) -> None:
    """What comes after an ack of everything is not acked by it, though it comes before the commit."""
    t.open()
    q = t.queue()
    t.select()
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.say(B.Ack(0, multiple=True))
    other = t.another()
    other.open()
    other.publish(q, b"first")
    t.deliveries(1)
    t.say(B.Ack(0, multiple=True))
    t.do(B.Qos(prefetch_count=0))  # the broker has heard the ack
    other.publish(q, b"second")
    t.deliveries(1)
    t.do(commands.Tx.Commit())
    t.do(C.Close(200, "", 0, 0))
    eventually("the second to be back", lambda: other.do(Q.Declare(queue=q, passive=True)).message_count == 1)
    other.heard.clear()


@scenario()
def tx_acks_given_twice(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.fill(q, 2)
    t.select()
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.deliveries(2)
    t.say(B.Ack(1))
    t.say(B.Ack(1))
    t.hear()
    t.open()
    t.do(Q.Declare(queue=q, passive=True))


@scenario(*KINDS)
def tx_returns(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.select()
    t.publish(t.name("none"), b"back", mandatory=True)
    t.publish(q, b"there", mandatory=True)
    t.quiet()
    t.do(commands.Tx.Commit())
    t.publish(t.name("none"), b"back", mandatory=True)
    t.do(commands.Tx.Rollback())
    t.quiet()


@scenario()
def tx_with_an_error(t: Talk) -> None:
    """What the broker refuses it refuses at once, and nothing of the transaction was done."""
    t.open()
    q = t.queue()
    t.select()
    t.publish(q, b"no")
    t.publish("k", exchange=t.name("none"))
    t.hear()
    t.open()
    t.do(Q.Declare(queue=q, passive=True))
    t.select()
    t.publish(q, b"no")
    t.publish(q, b"no", user_id="somebody-else")
    t.hear()
    t.open()
    t.do(Q.Declare(queue=q, passive=True))


@scenario()
def tx_refused_at_its_commit(t: Talk) -> None:
    """What only the queue can know, the broker says at the commit (406, partial completion); the acks stay."""
    t.open()
    q = t.queue(max_length=1, overflow="reject-publish")
    source = t.queue("source")
    for name in (q, source):
        t.fill(name, 1)
    t.select()
    t.do(B.Get(queue=source))
    t.publish(q, b"too much")
    t.say(B.Ack(1))
    t.do(commands.Tx.Commit())
    t.open()
    for name in (q, source):
        t.do(Q.Declare(queue=name, passive=True))
    t.select()
    t.do(B.Get(queue=q, no_ack=True))
    t.publish(q, b"enough")
    t.do(commands.Tx.Commit())
    t.do(B.Get(queue=q, no_ack=True))


@scenario()
def tx_and_confirms(t: Talk) -> None:
    for first, then in (
        (commands.Tx.Select(), commands.Confirm.Select()),
        (commands.Confirm.Select(), commands.Tx.Select()),
        (C.Flow(True), commands.Tx.Commit()),
        (C.Flow(True), commands.Tx.Rollback()),
    ):
        t.open()
        t.do(first)
        t.do(then)


@scenario()
def tx_beside_a_consumer_without_acks(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.fill(q, 5)
    t.select()
    t.do(B.Consume(queue=q, consumer_tag="c", no_ack=True))
    t.deliveries(5)
    t.do(commands.Tx.Rollback())
    t.publish(q, b"x")
    t.do(commands.Tx.Commit())
    t.deliveries(1)
    t.in_any_order()
    t.do(commands.Tx.Commit())
    t.do(C.Close(200, "", 0, 0))
    t.open()
    t.do(B.Get(queue=q))


@scenario()
def tx_of_what_is_not_replicated(t: Talk) -> None:
    t.open()
    made = t.do(Q.Declare(queue="", exclusive=True))
    t.select()
    t.publish(made.queue, b"1")
    t.do(commands.Tx.Commit())
    t.publish(made.queue, b"2")
    t.do(commands.Tx.Rollback())
    for _ in range(2):
        t.do(B.Get(queue=made.queue, no_ack=True))


@scenario()
def tx_refused_behind_gets_without_acks(t: Talk) -> None:
    """In one write: what the door was to ack for the client must not follow the end of the channel."""
    t.open()
    q = t.queue()
    t.fill(q, 3)
    t.select()
    asked = [*[B.Get(queue=q, no_ack=True)] * 3, Q.Declare(queue=t.name("none"), passive=True)]
    t.send(b"".join(encode.method_frame(1, method) for method in asked))
    t.hear(frames.CHANNEL_CLOSE)
    t.open()
    t.do(B.Get(queue=q))


def _ready(t: Talk, queue: str) -> int:
    """Messages in a queue, as another connection sees them; what that one hears is not compared."""
    with Talk(t.url, t.mark, t.kind) as other:
        other.open()
        return int(other.do(Q.Declare(queue=queue, passive=True)).message_count)


@scenario("classic")
def tx_and_recover(t: Talk) -> None:
    """What is acked in a transaction does not go back by basic.recover, but by a rollback and another."""
    t.open()
    q = t.queue()
    t.fill(q, 4)
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.deliveries(4)
    t.select()
    t.say(B.Ack(1))
    t.say(B.Reject(3, True))
    t.do(B.Recover(True))
    t.deliveries(2)
    t.in_any_order()
    t.do(commands.Tx.Rollback())
    t.do(B.Recover(True))
    t.deliveries(4)
    t.in_any_order()
    t.say(B.Ack(0, True))
    t.do(commands.Tx.Commit())
    t.do(B.Recover(True))
    t.say(B.RecoverAsync(True))
    t.do(B.Cancel("c"))
    t.do(Q.Delete(queue=q, if_empty=True))


@scenario(*KINDS)
def tx_that_gives_back(t: Talk) -> None:
    """Rejections that requeue count at the commit, too."""
    t.open()
    q = t.queue()
    t.fill(q, 2)
    t.do(B.Get(queue=q))
    t.do(B.Get(queue=q))
    t.select()
    t.say(B.Nack(2, multiple=True, requeue=True))
    t.do(B.Get(queue=q))
    t.do(commands.Tx.Commit())
    eventually("both to be back", lambda: _ready(t, q) == 2)
    t.do(B.Get(queue=q))


@scenario()
def tx_with_other_methods(t: Talk) -> None:
    """channel.flow, limits, consumers that come and go; on another channel of the connection, confirms and an error of it."""
    t.open()
    t.open(2, confirms=True)
    q, x = t.queue(), t.name("x")
    t.select()
    t.do(C.Flow(True))
    t.publish(q, b"1")
    t.do(E.Declare(exchange=x, exchange_type="fanout", durable=True))
    t.do(Q.Bind(queue=q, exchange=x, routing_key=""))
    t.publish("", b"2", exchange=x)
    t.publish(q, b"confirmed", 2)
    t.confirms(2)
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.deliveries(1)
    t.publish("k", b"", 2, exchange=t.name("none"))
    t.hear(channel=2)
    t.do(B.Qos(prefetch_count=5))
    t.do(B.Cancel("c"))
    t.say(B.Ack(1))
    t.do(commands.Tx.Commit())
    for _ in range(3):
        t.do(B.Get(queue=q, no_ack=True))
    t.do(E.Delete(exchange=x))
    t.do(C.Flow(False))


@scenario()
def tx_and_the_last_declared_queue(t: Talk) -> None:
    """What no name stands for, also if the queue is the connection's own."""
    t.open()
    t.queue()
    own = t.do(Q.Declare(queue="", exclusive=True)).queue
    t.publish(own, b"1")
    t.select()
    t.publish(own, b"2")
    t.do(commands.Tx.Commit())
    t.say(B.Ack(t.do(B.Get(queue="")).delivery_tag))
    t.do(commands.Tx.Commit())
    t.do(Q.Bind(queue="", exchange="amq.direct", routing_key=""))
    t.publish(own, b"3", exchange="amq.direct", mandatory=True)
    t.do(commands.Tx.Commit())
    t.do(Q.Unbind(queue="", exchange="amq.direct", routing_key=""))
    t.publish(own, b"4", exchange="amq.direct", mandatory=True)
    t.do(commands.Tx.Commit())
    t.do(B.Consume(queue="", consumer_tag="c"))
    t.deliveries(2)
    t.do(B.Cancel("c"))
    t.do(Q.Purge(queue=""))
    t.do(Q.Declare(queue="", passive=True))
    t.open()
    t.do(Q.Delete(queue=""))  # nothing was declared on this one


@scenario(*KINDS)
def headers_as_large_as_a_frame(t: Talk) -> None:
    """The largest header frame that the client may send, as the other side has told it."""
    t.open(confirms=True)
    q = t.queue()
    _with_header_frame(t, q, t.frame_max, b"x")
    t.confirms()
    method = t.do(B.Get(queue=q))
    assert len(method.properties.headers["k"]) > t.frame_max - 50
    t.heard[1].pop()  # directly it is longer


def _with_header_frame(t: Talk, key: str, size: int, body: bytes, channel: int = 1, *, mandatory: bool = False) -> None:
    """Publishes a message whose header frame has so many bytes."""
    table = size - frames.FRAME_OVERHEAD_BYTES - frames.HEADER_FIXED_BYTES - 4
    raw = b"\x20\0" + table.to_bytes(4, "big") + b"\x01kS" + (table - 7).to_bytes(4, "big") + b"v" * (table - 7)
    t.publish(key, body, channel, mandatory=mandatory, raw=raw)


@scenario(*KINDS)
def headers_larger_than_a_consumers_frames(t: Talk) -> None:
    """Who publishes may have agreed to larger frames than who consumes, and a header frame is not cut."""
    t.open(confirms=True)
    q = t.queue()
    for body in (b"", b"1", b"2" * 300_000, b"3", b"4" * 300_000):
        _with_header_frame(t, q, 20_000, body)
    t.confirms()
    other = t.another(frame_max=8_192)
    other.open()
    for _ in range(2):
        other.say(B.Ack(other.do(B.Get(queue=q)).delivery_tag))
    other.do(B.Consume(queue=q, consumer_tag="c"))
    other.say(B.Ack(other.deliveries(3)[-1].delivery_tag, True))
    other.do(C.Flow(True))


@scenario()
def headers_as_large_as_a_frame_come_back(t: Talk) -> None:
    """Whole and in pieces, without what the door adds."""
    other = t.another(frame_max=8_192)
    other.open()
    other.select()
    for body in (b"1", b"2" * 600_000):
        _with_header_frame(other, other.name("none"), 8_192, body, mandatory=True)
    other.do(commands.Tx.Commit())
    other.open(2, confirms=True)
    for body in (b"3", b"4" * 600_000):
        _with_header_frame(other, other.name("none"), 8_192, body, 2, mandatory=True)
    other.confirms(2)
    assert max(len(payload) for *_, payload in other.got) <= 8_192 - frames.FRAME_OVERHEAD_BYTES


# -- exchanges and queues


@scenario(*KINDS)
def exchange_bound_to_an_exchange(t: Talk) -> None:
    t.open(confirms=True)
    q, one, two = t.queue(), t.name("one"), t.name("two")
    t.do(E.Declare(exchange=one, exchange_type="topic", durable=True))
    t.do(E.Declare(exchange=two, exchange_type="fanout", durable=True, internal=True))
    t.do(E.Bind(destination=two, source=one, routing_key="a.*"))
    t.do(Q.Bind(queue=q, exchange=two, routing_key=""))
    t.publish("a.b", b"1", exchange=one, mandatory=True)
    t.confirms()  # a quorum queue may answer after the return of the next
    t.publish("b.b", b"2", exchange=one, mandatory=True)
    t.confirms()
    t.do(E.Unbind(destination=two, source=one, routing_key="a.*"))
    t.publish("a.b", b"3", exchange=one, mandatory=True)
    t.confirms()
    t.do(E.Bind(destination=two, source=t.name("none"), routing_key="a.*"))
    t.open()
    t.do(E.Delete(exchange=one))
    t.do(E.Delete(exchange=two, if_unused=True))


@scenario()
def bound_by_no_name(t: Talk) -> None:
    """The last declared queue stands for the queue, and for the key if that is empty, too."""
    t.open(confirms=True)
    x = t.name("x")
    t.do(E.Declare(exchange=x, exchange_type="direct", durable=True))
    q = t.queue()
    t.do(Q.Bind(exchange=x))
    t.do(Q.Bind(exchange=x, routing_key="other"))
    for key in (q, "other", ""):
        t.publish(key, key.encode(), exchange=x, mandatory=True)
        t.confirms()
    t.do(Q.Unbind(exchange=x))
    t.publish(q, exchange=x, mandatory=True)
    t.confirms()
    t.do(Q.Declare(queue=q, passive=True))
    t.do(E.Delete(exchange=x))


@scenario(*KINDS)
def alternate_exchange(t: Talk) -> None:
    t.open(confirms=True)
    q, rest = t.queue(), t.queue("rest")
    t.do(E.Declare(exchange=t.name("other"), exchange_type="fanout", durable=True))
    t.do(E.Declare(exchange=t.name("x"), exchange_type="direct", durable=True, arguments={"alternate-exchange": t.name("other")}))
    t.do(Q.Bind(queue=rest, exchange=t.name("other"), routing_key=""))
    t.do(Q.Bind(queue=q, exchange=t.name("x"), routing_key="k"))
    t.publish("k", b"1", exchange=t.name("x"), mandatory=True)
    t.publish("other", b"2", exchange=t.name("x"), mandatory=True)
    t.confirms()
    for queue in (q, rest):
        t.do(B.Get(queue=queue))


@scenario(*KINDS)
def carbon_copies(t: Talk) -> None:
    t.open(confirms=True)
    one, two, three = t.queue("one"), t.queue("two"), t.queue("three")
    t.publish(one, b"x", headers={"CC": [two], "BCC": [three]})
    t.confirms()  # the next one ends the channel: what has no answer by then is in doubt, and forgotten by the door
    t.publish(one, b"bad", headers={"CC": "text"})
    t.confirms()
    t.open()
    for queue in (one, two, three):
        t.say(B.Ack(t.do(B.Get(queue=queue)).delivery_tag))
    t.do(C.Flow(True))


@scenario()
def declarations_refused(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.do(E.Declare(exchange=t.name("x"), exchange_type="direct", durable=True))
    t.do(Q.Bind(queue=q, exchange=t.name("x"), routing_key="k"))
    for method in (
        E.Declare(exchange="amq.mine", exchange_type="direct"),
        E.Declare(exchange=t.name("y"), exchange_type="no-such-type"),
        E.Declare(exchange=t.name("y"), passive=True),
        E.Declare(exchange=t.name("x"), exchange_type="fanout", durable=True),
        E.Delete(exchange="amq.direct"),
        E.Delete(exchange=t.name("x"), if_unused=True),
        Q.Bind(queue=t.name("none"), exchange="amq.direct", routing_key="k"),
        Q.Bind(queue=t.name("none"), exchange="", routing_key="k"),
    ):
        other = t.another()
        other.open()
        other.do(method)


@scenario(*KINDS)
def queues_deleted_and_purged(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.fill(q, 3)
    t.do(Q.Purge(queue=q))
    t.fill(q, 2)
    t.do(Q.Delete(queue=q))
    t.do(Q.Purge(queue=q))
    t.open()
    t.do(Q.Delete(queue=q))


@scenario(*KINDS)
def queues_that_are_in_use_are_not_deleted(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.fill(q, 3)
    for method in (Q.Delete(queue=q, if_empty=True), Q.Delete(queue=q, if_unused=True)):
        t.do(B.Consume(queue=q, consumer_tag="c"))
        other = t.another()
        other.open()
        other.do(method)


@scenario()
def queue_redeclared(t: Talk) -> None:
    t.open()
    q = t.queue()
    t.do(Q.Declare(queue=q, durable=True, arguments={"x-queue-type": t.kind}))
    t.do(Q.Declare(queue="", passive=True))
    for change in ({"durable": False}, {"durable": True, "auto_delete": True}, {"durable": True, "arguments": {"x-max-length": 3}}):
        t.open(2)
        t.do(Q.Declare(queue=q, **change), 2)


@scenario()
def queue_of_one_connection(t: Talk) -> None:
    """An exclusive queue, named by the client or the server: nobody else may touch it, and it goes with its connection."""
    t.open(confirms=True)
    for name in (t.name("own"), ""):
        made = t.do(Q.Declare(queue=name, exclusive=True))
        t.publish("" if made is None else made.queue, b"x")
        t.confirms()
        other = t.another()
        for method in (Q.Declare(queue=made.queue, passive=True), B.Get(queue=made.queue), Q.Delete(queue=made.queue)):
            other.open()
            other.do(method)
        t.do(B.Get(queue=made.queue, no_ack=True))
    t.close()
    other = t.another()
    other.open()
    other.do(Q.Declare(queue=t.name("own"), passive=True))


@scenario()
def queue_deleted_with_its_last_consumer(t: Talk) -> None:
    t.open(confirms=True)
    q = t.name("auto")
    t.do(Q.Declare(queue=q, auto_delete=True))
    t.publish(q, b"x")
    t.confirms()
    t.do(B.Consume(queue=q, consumer_tag="c"))
    t.say(B.Ack(t.deliveries(1)[0].delivery_tag))
    t.do(B.Cancel("c"))
    t.do(Q.Declare(queue=q, passive=True))


@scenario()
def exchange_deleted_with_its_last_binding(t: Talk) -> None:
    t.open(confirms=True)
    q, x = t.queue(), t.name("x")
    t.do(E.Declare(exchange=x, exchange_type="fanout", auto_delete=True))
    t.do(Q.Bind(queue=q, exchange=x, routing_key=""))
    t.publish("", b"through it", exchange=x)
    t.confirms()
    t.do(Q.Unbind(queue=q, exchange=x, routing_key=""))
    t.do(E.Declare(exchange=x, passive=True))


@scenario(*KINDS)
def declarations_without_a_wait(t: Talk) -> None:
    t.open(confirms=True)
    q, x, y = t.name("q"), t.name("x"), t.name("y")
    t.queues.append(q)
    for method in (
        Q.Declare(queue=q, durable=True, arguments={"x-queue-type": t.kind}, nowait=True),
        E.Declare(exchange=x, exchange_type="direct", durable=True, nowait=True),
        E.Declare(exchange=y, exchange_type="direct", durable=True, nowait=True),
        Q.Bind(queue=q, exchange=x, routing_key="k", nowait=True),
        E.Bind(destination=x, source=y, routing_key="k", nowait=True),
    ):
        t.say(method)
    t.publish("k", b"1", exchange=y, mandatory=True)
    t.confirms()
    t.say(E.Unbind(destination=x, source=y, routing_key="k", nowait=True))
    t.publish("k", b"2", exchange=y, mandatory=True)
    t.confirms()
    t.say(E.Delete(exchange=y, nowait=True))
    t.say(E.Delete(exchange=x, nowait=True))
    t.say(Q.Purge(queue=q, nowait=True))
    t.do(Q.Declare(queue=q, passive=True))
    t.say(Q.Delete(queue=q, nowait=True))
    t.do(Q.Declare(queue=q, passive=True))


# -- frames, the connection, request and reply


@scenario()
def frames_out_of_place(t: Talk) -> None:
    """As of a client whose threads share a channel. (A body frame that is too long is not compared: 3.10 waits for ever.)"""
    publish, header = encode.publish_method(1, "", t.name("none")), encode.frame(frames.HEADER, 1, content_header.header_payload(10))
    body = encode.frame(frames.BODY, 1, bytes(10))
    for sent in (
        publish + publish + header + body,
        publish + header + publish + header + body,
        publish + body,
        publish + header + header,
        header,
        body,
        publish + header + body + body,
        publish + encode.method_frame(1, commands.Channel.Flow(True)),
        publish + header + encode.ack(1, 1),
        publish + encode.frame(frames.HEADER, 1, b"\0\x32" + bytes(12)) + body,
    ):
        other = t.another()
        other.open()
        other.send(sent + 3 * frames.HEARTBEAT_FRAME)  # the door looks at a content when there is some more of it
        assert other.hear() is None
        assert 0 in other.heard


@scenario()
def direct_reply_to(t: Talk) -> None:
    """A request and its answer; on the same channel messages are published that are replicated."""
    t.open(confirms=True)
    q = t.queue()
    t.do(B.Consume(queue="amq.rabbitmq.reply-to", consumer_tag="replies", no_ack=True))
    server = t.another()
    server.open(confirms=True)
    server.do(B.Consume(queue=q, consumer_tag="server"))
    for i in range(3):
        t.publish(q, b"request %d" % i, reply_to="amq.rabbitmq.reply-to", correlation_id=str(i))
        request = server.deliveries(1)[0]
        server.publish(request.properties.reply_to, b"answer %d" % i, correlation_id=str(i))
        server.confirms()
        server.say(B.Ack(request.delivery_tag))
        server.do(C.Flow(True))
    t.deliveries(3)
    t.confirms()
    t.in_any_order()
    t.heard[1] = [event for event in t.heard[1] if event[0] != "basic.ack"]


@scenario()
def direct_reply_to_misused(t: Talk) -> None:
    t.open()
    t.do(B.Consume(queue="amq.rabbitmq.reply-to", consumer_tag="c"))
    t.open()
    t.publish("q", b"x", reply_to="amq.rabbitmq.reply-to")
    t.hear()


@scenario()
def secret_updated(t: Talk) -> None:
    t.do(commands.Connection.UpdateSecret(t.password, "renewed"), 0)
    t.open()
    t.do(Q.Declare(queue=t.name("none"), passive=True))


@scenario()
def method_that_is_none(t: Talk) -> None:
    t.open()
    t.send(encode.raw_method_frame(1, 0x003C00FF))
    t.hear()


# -- running them


def _run(body: Scenario, url: str, kind: str) -> Talk:
    with Talk(url, uuid.uuid4().hex[:10], kind) as talk:
        body(talk)
    return talk


def _directly(rig: Rig, body: Scenario, kind: str) -> Talk:
    """RabbitMQ itself, 3.10 and 4.3, now and then ends a connection where an exclusive consumer has just gone."""
    for _ in range(9):
        try:
            return _run(body, rig.broker_url(rig.primary), kind)
        except ConnectionError:
            time.sleep(1)
    return _run(body, rig.broker_url(rig.primary), kind)


@pytest.mark.quick(only=r"-classic\]")
@pytest.mark.parametrize(("body", "kind"), _scenarios)
def test_the_door_says_what_the_broker_says(rig: Rig, body: Scenario, kind: str) -> None:
    direct = _directly(rig, body, kind)
    with rig.at(rig.primary) as channel:
        for queue in direct.queues:
            channel.queue_delete(queue)
    through = _run(body, rig.url, kind)
    assert through.transcript() == direct.transcript()
    rig.converge()
    for queue in through.queues:
        there = rig.exists(rig.primary, queue)
        assert rig.exists(rig.backup, queue) == there
        if there:
            eventually(queue, lambda queue=queue: _same_in_both(rig, queue))


def _same_in_both(rig: Rig, queue: str) -> bool:
    """Read only when as much is ready: while the backup's sweeper has it, it is not."""
    if rig.depth(rig.primary, queue) != rig.depth(rig.backup, queue):
        return False
    # sorted: what is given back comes in another order to a quorum queue of RabbitMQ 3.10
    return sorted(rig.bodies(rig.primary, queue)) == sorted(rig.bodies(rig.backup, queue))


@pytest.mark.quick
def test_blocked_and_unblocked(new_lab: Callable[..., Lab], broker_version: str) -> None:
    """An alarm of the broker: clients that publish are told, as directly; consumers go on; what was published meanwhile comes when it is over."""
    lab = new_lab({"east": 1}, broker=broker_version, sites={})
    lab.up()
    node = lab.nodes["e1"]
    for url in (node.broker, node.door):
        with Talk(url, uuid.uuid4().hex[:10], "classic") as t:
            t.open(confirms=True)
            q = t.queue()
            for _ in range(3):
                t.publish(q)
            t.confirms()
            consumer = t.another()
            consumer.open()
            lab.ctl("e1", "set_vm_memory_high_watermark", "absolute", "1MiB")
            try:
                t.publish(q, b"meanwhile")
                assert "memory" in t.hear(frames.CONNECTION_BLOCKED, channel=0).reason
                consumer.do(B.Consume(queue=q, consumer_tag="c"))
                assert len(consumer.deliveries(3)) == 3
            finally:
                lab.ctl("e1", "set_vm_memory_high_watermark", "0.4")
            t.hear(frames.CONNECTION_UNBLOCKED, channel=0)
            t.confirms()
            assert consumer.deliveries(1)[0].body == b"meanwhile"
            consumer.say(B.Ack(4, True))
            assert {event[0] for event in consumer.heard.get(0, [])} == set()


def test_two_thousand_channels(rig: Rig) -> None:
    count = 2_000
    with Talk(rig.url, uuid.uuid4().hex[:10], "classic") as t:
        t.open(confirms=True)
        q = t.queue()
        for number in range(2, count + 1):
            t.say(C.Open(), number)
            t.say(commands.Confirm.Select(), number)
        for number in range(1, count + 1):
            t.publish(q, b"%d" % number, number)
        for number in range(1, count + 1):
            t.confirms(number)
            assert t.heard[number][-1] == ["basic.ack", [1]]
        for number in range(2, count + 1):
            t.say(C.Close(200, "", 0, 0), number)
        for number in range(2, count + 1):
            if t.heard[number][-1][0] != "channel.close-ok":
                t.hear(frames.CHANNEL_CLOSE_OK, channel=number)
    rig.both_hold(q, [b"%d" % number for number in range(1, count + 1)], ordered=False)


def test_several_are_acked_while_another_is_withheld(rig: Rig) -> None:
    """A message that somebody rejected, whose rejection is not safe yet, comes to another consumer's connection: it is neither given nor acked."""
    dead, queue = rig.name("dead"), rig.name()
    with Talk(rig.url, "a", "classic", properties={"connection_name": queue}) as first, Talk(rig.url, "b", "classic") as second:
        first.open()
        second.open()
        first.do(Q.Declare(queue=dead, durable=True))
        arguments: FieldTable = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
        first.do(Q.Declare(queue=queue, durable=True, arguments=arguments))
        second.fill(queue, 4)
        first.do(B.Qos(prefetch_count=2))
        first.do(B.Consume(queue=queue, consumer_tag="first"))
        first.deliveries(2)
        second.do(B.Consume(queue=queue, consumer_tag="second"))
        assert [d.body for d in second.deliveries(2)] == [b"2", b"3"]
        rig.lab.stop(f"{rig.backup}.sidecar")  # nothing is safe from here on
        try:
            first.say(B.Reject(1, False))
            rows = rig.lab.ctl(rig.primary, "-q", "list_connections", "pid", "client_properties").splitlines()
            pid = next(row.split("\t")[0] for row in rows if queue in row)
            rig.lab.ctl(rig.primary, "close_connection", pid, "test")
            second.quiet()
            second.say(B.Ack(0, True))
        finally:
            rig.lab.cont(f"{rig.backup}.sidecar")
        given = second.deliveries(1)[0]
        assert (given.body, given.redelivered) == (b"1", True)
        second.say(B.Ack(given.delivery_tag, True))
        rig.both_hold(dead, [b"0"])
        rig.both_hold(queue, [])


def test_messages_up_to_the_brokers_limit(rig: Rig) -> None:
    """Where that is large enough to be worth it: RabbitMQ 4 takes 16 MiB by default. One byte more is refused, and is nowhere."""
    major = int(rig.lab.version.split(".")[0])
    largest = 16 << 20 if major >= 4 else 40 << 20
    heard = []
    for url in (rig.broker_url(rig.primary), rig.url):
        with Talk(url, uuid.uuid4().hex[:10], "quorum") as t:
            t.open(confirms=True)
            q = t.queue()
            t.publish(q, b"\x01" * largest)
            t.confirms()
            t.publish(q, b"small")
            t.confirms()
            if major >= 4:
                t.publish(q, b"\x02" * (largest + 1))
                t.confirms()
                t.open()
            t.do(B.Get(queue=q, no_ack=True))
            t.do(B.Get(queue=q, no_ack=True))
            t.do(B.Get(queue=q, no_ack=True))
            heard.append(t.transcript())
            t.do(Q.Delete(queue=q))
    assert heard[0] == heard[1]
    rig.converge()


def test_a_message_over_the_doors_limit(rig: Rig) -> None:
    """Its channel ends when its last frame has come, as at the broker; what follows on the channel is dropped, the connection goes on."""
    heard = []
    for url in (rig.broker_url(rig.primary), rig.url):
        with Talk(url, uuid.uuid4().hex[:10], "classic") as t:
            t.open(confirms=True)
            t.open(2, confirms=True)
            q = t.queue()
            t.publish(q, b"before")
            t.confirms()
            t.send_large(q, content_assembly.BODY_BYTES_MAX + 1)
            for _ in range(3):
                t.publish(q, b"too late" * 100_000)
            t.publish(q, b"meanwhile", 2)
            assert t.hear() is None
            t.confirms(2)
            t.open(confirms=True)
            t.publish(q, b"after")
            t.confirms()
            for _ in range(4):
                t.do(B.Get(queue=q, no_ack=True))
            heard.append(re.sub(r"(configured max size) \d+", r"\1 *", repr(t.transcript())))
            t.do(Q.Delete(queue=q))
    assert heard[0] == heard[1]
    assert "PRECONDITION_FAILED - message size 134217729 is larger than" in heard[1]
    assert told(rig.lab, rig.primary)["rss_bytes"] < 400 << 20
    rig.converge()


def test_a_log_with_a_large_message_is_read_again(rig: Rig) -> None:
    """A batch that stands in several records: the node that restarts has it, and what came after it."""
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    bodies = [b"a" * 5_000_000, b"b", b"c" * 3_000_000]
    for body in bodies:
        channel.basic_publish("", queue, body)
    rig.both_hold(queue, bodies)
    rig.lab.kill(f"{rig.backup}.sidecar")
    channel.basic_publish("", queue, b"d" * 4_000_000)
    rig.lab.start(f"{rig.backup}.sidecar")
    in_sync(rig.lab)
    rig.both_hold(queue, [*bodies, b"d" * 4_000_000])
    rig._pids = rig.pids()
