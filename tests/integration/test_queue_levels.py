"""Levels of replication through the door: what the backup's broker has of a queue, and what of it is in the log.

What is there after a failover: the cases of queue_kinds_levels.py, and test_queues_over_failover.py. Levels by name: test_joining.py.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pika
import pytest
from door_rig import Rig
from load import eventually
from pika.exceptions import ChannelClosedByBroker

from broker_plugin.amqp.address import Address
from broker_plugin.reconcile.unreplicated import left_behind
from lrq_ha.lab import Lab, probe
from lrq_ha.lab.files import SIDECAR_USER
from lrq_ha.replication.levels import Level

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3"), pytest.mark.proves("queue: levels")]

PERSISTENT = pika.BasicProperties(delivery_mode=2)


def fan(rig: Rig, channel: Any, *queues: str) -> str:
    """A fanout exchange to these."""
    exchange = rig.name("x")
    channel.exchange_declare(exchange, "fanout", durable=True)
    for queue in queues:
        channel.queue_bind(queue, exchange)
    return exchange


def adds_no_entry(rig: Rig, what: Any) -> None:
    """Waits for a time when `what` leaves no entry in the log among those that the primary adds by itself."""

    def done() -> bool:
        end = rig.lab.status(rig.primary)["end"]
        what()
        return bool(rig.lab.status(rig.primary)["end"] == end)

    eventually("no entry of it in the log", done)


def gone(rig: Rig, *queues: str) -> None:
    """Waits until neither broker has any of these."""
    eventually("the queues to go", lambda: not any(rig.exists(name, queue) for name in (rig.primary, rig.backup) for queue in queues))


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_what_a_backup_has_of_each_level(rig: Rig, kind: str) -> None:
    channel = rig.channel(confirms=True)
    queues = {level: rig.declare(channel, kind=kind, lrq_replicate=level) for level in ("all", "configuration", "none")}
    exchange = fan(rig, channel, *queues.values())
    for queue in queues.values():
        for number in range(3):
            channel.basic_publish("", queue, b"%d" % number, PERSISTENT)
    for number in range(3, 6):
        channel.basic_publish(exchange, "", b"%d" % number, PERSISTENT)
    rig.both_hold(queues["all"], [b"%d" % number for number in range(6)])
    rig.converge()
    assert rig.depth(rig.backup, queues["configuration"]) == 0
    assert not rig.exists(rig.backup, queues["none"])
    for level in ("configuration", "none"):
        queue = queues[level]
        assert rig.bodies(rig.primary, queue) == [b"%d" % number for number in range(6)]

        def use(queue: str = queue) -> None:
            channel.basic_publish("", queue, b"more", PERSISTENT)
            method, _, _ = channel.basic_get(queue)
            channel.basic_ack(method.delivery_tag)
            channel.queue_declare(queue, durable=True, passive=True)

        adds_no_entry(rig, use)
        channel.queue_purge(queue)
    rig.both_hold(queues["all"], [b"%d" % number for number in range(6)])
    told: Any = probe.get_json(f"{rig.lab.nodes[rig.backup].http}/levels")
    assert {(row["queue"], row["level"]) for row in told} >= {(queue, level) for level, queue in queues.items()}
    for queue in queues.values():
        channel.queue_delete(queue)
    gone(rig, *queues.values())


@pytest.mark.quick
@pytest.mark.parametrize("value", ["some", 1])
def test_a_bad_level_is_refused_with_those_that_there_are(rig: Rig, value: object) -> None:
    queue = rig.name()
    with pytest.raises(ChannelClosedByBroker) as caught:
        rig.channel().queue_declare(queue, durable=True, arguments={"x-lrq-replicate": value})
    assert caught.value.reply_code == 406
    assert caught.value.reply_text.startswith("PRECONDITION_FAILED - invalid arg 'x-lrq-replicate' for queue")
    assert "none, configuration, all" in caught.value.reply_text
    assert not rig.exists(rig.primary, queue)


@pytest.mark.parametrize("options", [{"queue": "", "durable": True}, {"exclusive": True}])
def test_what_no_other_node_can_have_is_refused(rig: Rig, options: dict[str, Any]) -> None:
    with pytest.raises(ChannelClosedByBroker, match="allowed: none"):
        rig.channel().queue_declare(**{"queue": rig.name(), **options}, arguments={"x-lrq-replicate": "all"})
    rig.channel().queue_declare(**{"queue": rig.name(), **options}, arguments={"x-lrq-replicate": "none"})


@pytest.mark.parametrize("level", ["configuration", "none"])
def test_a_level_stays_until_the_queue_is_deleted(rig: Rig, level: str) -> None:
    """Whoever declares the queue without the argument gets it as it is; another level is refused, in the broker's words for another argument."""
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel, lrq_replicate=level)
    other = rig.channel(confirms=True)
    other.queue_declare(queue, durable=True)
    other.queue_declare(queue, durable=True, arguments={"x-lrq-replicate": level})
    adds_no_entry(rig, lambda: other.basic_publish("", queue, b"x", PERSISTENT))
    with pytest.raises(ChannelClosedByBroker) as caught:
        rig.channel().queue_declare(queue, durable=True, arguments={"x-lrq-replicate": "all"})
    assert caught.value.reply_code == 406
    assert f"inequivalent arg 'x-lrq-replicate' for queue '{queue}'" in caught.value.reply_text
    channel.queue_delete(queue)
    channel.queue_declare(queue, durable=True, arguments={"x-lrq-replicate": "all"})
    other.basic_publish("", queue, b"now", PERSISTENT)  # a connection that knew it as it was
    rig.both_hold(queue, [b"now"])


@pytest.mark.parametrize("level", ["configuration", "none"])
def test_further_routing_keys_bring_a_publish_into_the_log(rig: Rig, level: str) -> None:
    """A publish to a queue that is not replicated may name one that is."""
    channel = rig.channel(confirms=True)
    queue, replicated = rig.declare(channel, lrq_replicate=level), rig.declare(channel)
    for key in ("CC", "BCC"):
        channel.basic_publish("", queue, key.encode(), pika.BasicProperties(headers={key: [replicated]}))
    rig.both_hold(replicated, [b"CC", b"BCC"])
    assert rig.depth(rig.primary, queue) == 2
    if level == "configuration":
        eventually("the backup to empty its own", lambda: rig.depth(rig.backup, queue) == 0)
    for expected in (b"CC", b"BCC"):
        method, _, body = channel.basic_get(queue)
        assert body == expected
        channel.basic_ack(method.delivery_tag)
    rig.both_hold(replicated, [b"CC", b"BCC"])


def test_a_full_queue_that_is_not_replicated_does_not_hold_up_a_backup(rig: Rig) -> None:
    channel = rig.channel(confirms=True)
    limited = rig.declare(channel, lrq_replicate="configuration", max_length=2, overflow="reject-publish")
    queue = rig.declare(channel)
    exchange = fan(rig, channel, limited, queue)
    for number in range(6):
        channel.basic_publish(exchange, "", b"%d" % number, PERSISTENT)
        method, _, _ = channel.basic_get(limited)
        channel.basic_ack(method.delivery_tag)
    rig.both_hold(queue, [b"%d" % number for number in range(6)])


def test_a_transaction_of_both_kinds(rig: Rig) -> None:
    channel = rig.channel()
    queue, replicated = rig.declare(channel, lrq_replicate="configuration"), rig.declare(channel)
    channel.tx_select()
    for end, bodies in ((channel.tx_rollback, (b"a", b"b")), (channel.tx_commit, (b"c", b"d"))):
        for body in bodies:
            channel.basic_publish("", queue, body, PERSISTENT)
            channel.basic_publish("", replicated, body, PERSISTENT)
        end()
    rig.both_hold(replicated, [b"c", b"d"])
    assert rig.bodies(rig.primary, queue) == [b"c", b"d"]
    assert rig.depth(rig.backup, queue) == 0


def test_replication_ids_are_not_looked_at(rig: Rig) -> None:
    """A publish that passes the log by is in the queue as often as it was sent."""
    producer = rig.name("producer")
    channel = rig.channel(confirms=True, client_properties={"lrq_producer": producer})
    queue, replicated = rig.declare(channel, lrq_replicate="none"), rig.declare(channel)
    for number, to in enumerate((queue, queue, replicated, replicated), 1):
        rid = f"{producer}/{(number + 1) // 2}"
        channel.basic_publish("", to, b"%d" % number, pika.BasicProperties(delivery_mode=2, headers={"x-lrq-id": rid}))
    rig.both_hold(replicated, [b"3"])
    assert rig.bodies(rig.primary, queue) == [b"1", b"2"]


@pytest.mark.proves("queue: auto-delete")
def test_an_auto_delete_queue_that_is_to_be_replicated(rig: Rig) -> None:
    """It is on the backup, and goes on both when its last consumer has gone: not before, and not if it never had one."""
    channel = rig.channel(confirms=True)
    queue, unused = rig.name("auto-delete"), rig.name("auto-delete")
    for name in (queue, unused):
        channel.queue_declare(name, durable=True, auto_delete=True, arguments={"x-lrq-replicate": "all"})
        channel.basic_publish("", name, b"x", PERSISTENT)
        rig.both_hold(name, [b"x"])
    with pytest.raises(ChannelClosedByBroker, match="inequivalent arg 'auto_delete'"):
        rig.channel().queue_declare(queue, durable=True, arguments={"x-lrq-replicate": "all"})
    first, second = rig.channel(), rig.channel()
    tags = [consumer.basic_consume(queue, lambda *_: None) for consumer in (first, second)]
    first.basic_cancel(tags[0])
    first.connection.close()
    channel.basic_publish("", queue, b"y", PERSISTENT)
    second.queue_declare(queue, auto_delete=True, durable=True)  # it need not say again that it is to be replicated
    assert rig.exists(rig.backup, queue)
    second.basic_cancel(tags[1])
    gone(rig, queue)
    rig.both_hold(unused, [b"x"])
    channel.queue_delete(unused)


def test_what_stays_behind_is_told_of_the_vhosts_that_answer(brokers: Lab) -> None:
    """One vhost that was deleted hid what all others had."""
    node, there, gone = "e1", f"a-{time.time_ns()}", f"b-{time.time_ns()}"
    keys = [(there, "cache"), (gone, "cache"), (gone, "more"), ("/", f"behind-{time.time_ns()}")]
    for vhost in (there, gone):
        brokers.ctl(node, "add_vhost", vhost)
        brokers.ctl(node, "set_permissions", "-p", vhost, SIDECAR_USER, ".*", ".*", ".*")
    parameters = pika.URLParameters(brokers.nodes[node].admin)
    for vhost, queue in keys:
        parameters.virtual_host = vhost
        with pika.BlockingConnection(parameters) as connection:
            connection.channel().queue_declare(queue, durable=True)
            connection.channel().basic_publish("", queue, b"1", PERSISTENT)
    brokers.ctl(node, "delete_vhost", gone)
    declared = SimpleNamespace(
        partial=set(keys), definitions=SimpleNamespace(queue=lambda _key: b"declared"), replicates=lambda _key: False, level=lambda _key: Level.NONE
    )
    replica: Any = SimpleNamespace(declared=declared)

    def told() -> str:
        return asyncio.run(left_behind(replica, Address.parse(brokers.nodes[node].admin, "lrq")))

    counts = [f"1 messages in '{queue}' (none)" for vhost, queue in keys if vhost != gone]
    eventually("what is there to be counted", lambda: all(each in told() for each in counts), 30, seen=told)
    assert f"what is in 2 queues of vhost '{gone}', of which the broker told nothing (" in told()
    with pika.BlockingConnection(pika.URLParameters(brokers.nodes[node].admin)) as connection:
        connection.channel().queue_delete(keys[-1][1])
    brokers.ctl(node, "delete_vhost", there)
