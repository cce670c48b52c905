"""The memory of a sidecar does not grow with what passes: it is flat once the log's memory (`replication.memory_bytes_max`) is full."""

from __future__ import annotations

import threading
import time

import pika
import pytest
from load import all_applied, declare, eventually, in_sync, told

from lrq_ha.lab import Lab
from lrq_ha.publisher import Publisher

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3")]

FILL = 96  # messages of 1 MiB: more than the log keeps in memory
ROUNDS, COUNT = 6, 10_000
GROWTH_BYTES_MAX = 32 << 20  # each half of the rounds brings 30 MB and as much again in Python's objects


def consume(url: str, queue: str, over: threading.Event, got: list[int]) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=500)
        for method, _, _ in channel.consume(queue, inactivity_timeout=0.2):
            if over.is_set():
                return
            if method is not None:
                got[0] += 1
                channel.basic_ack(method.delivery_tag)


def test_flat_while_everything_passes(pair: Lab) -> None:
    primary, backup = in_sync(pair)
    queue = f"memory-{time.time_ns()}"
    declare(pair.nodes[primary].door, queue, queue_type="quorum")
    over, got = threading.Event(), [0]
    consumer = threading.Thread(target=consume, args=(pair.nodes[primary].door, queue, over, got), daemon=True)
    consumer.start()
    resident: list[dict[str, int]] = []
    try:
        with Publisher([pair.nodes[primary].door], producer=f"memory-{time.time_ns()}", client_name="test") as publisher:
            sent = 0
            for size, count in [(1 << 20, FILL)] + ROUNDS * [(1024, COUNT)]:
                for _ in range(count):
                    publisher.publish("", queue, b"x" * size)
                sent += count
                publisher.flush(240)
                eventually("everything to be consumed", lambda sent=sent: got[0] == sent)
                all_applied(pair, primary, backup)
                resident.append({name: told(pair, name)["rss_bytes"] for name in (primary, backup)})
    finally:
        over.set()
        consumer.join(30)
    for name in (primary, backup):
        # The allocator keeps more or less of a peak, by tens of MB: the lowest of several looks is what is held.
        looks = [each[name] for each in resident[1:]]
        grown = min(looks[ROUNDS // 2:]) - min(looks[:ROUNDS // 2])
        assert grown < GROWTH_BYTES_MAX, f"{name} has grown by {grown >> 20} MB: {[each >> 20 for each in looks]}"
