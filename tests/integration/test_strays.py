"""Queues and exchanges that were made at the primary's broker, around the door: what is published to them through the door is on no backup.

It was confirmed, and nobody said anything before the failover, after which the queue was not there.
"""

from __future__ import annotations

import uuid

import pika
import pytest
from load import command, eventually, primary_of, told

from lrq_ha.lab import Lab


@pytest.mark.quick
@pytest.mark.parametrize("what", ["queue", "exchange"])
def test_it_is_told_and_settled_by_declaring_it_through_the_door(pair: Lab, what: str) -> None:
    primary = primary_of(pair)
    node, name = pair.nodes[primary], f"by-hand-{uuid.uuid4().hex[:8]}"
    with pika.BlockingConnection(pika.URLParameters(node.broker)) as around, pika.BlockingConnection(pika.URLParameters(node.door)) as connection:
        by_hand, channel = around.channel(), connection.channel()
        channel.confirm_delivery()
        if what == "queue":
            by_hand.queue_declare(name, durable=True)
            exchange, key = "", name
        else:
            by_hand.exchange_declare(name, "direct", durable=True)
            exchange, key = name, "key"
        channel.basic_publish(exchange, key, b"x", pika.BasicProperties(delivery_mode=2))
        eventually("it to be told", lambda: f"{what} '{name}' in vhost '/' is on this broker only" in pair.status(primary)["lacks"])
        assert name in told(pair, primary)["reason"], "`list` says it"
        code, said = command("switchover", "--group", "east", "--dry-run", lab=pair)
        assert (code, name in said) == (0, True), said
        (channel.queue_declare if what == "queue" else channel.exchange_declare)(name, durable=True)
        eventually("it to be settled", lambda: name not in pair.status(primary)["lacks"])
        (channel.queue_delete if what == "queue" else channel.exchange_delete)(name)


@pytest.mark.quick
def test_a_queue_that_is_nowhere_is_no_matter(pair: Lab) -> None:
    primary, name = primary_of(pair), f"nowhere-{uuid.uuid4().hex[:8]}"
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].door)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for _ in range(3):
            channel.basic_publish("", name, b"x")
            connection.sleep(1.2)
    assert name not in told(pair, primary)["lacks"]
