"""The publisher while brokers are killed under it.

Classic queues here, under the routing queues' names too: after a kill -9 RabbitMQ 3.10 opens its port 0.3 s before its streams take
messages (they come back as unroutable), and a stream that was declared in the seconds before the kill never comes back. A door waits
for its broker's streams; a bare broker does not.

Nothing removes repeats here: what must hold is that every confirmed message is there, and that IDs come first in order.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pika
import pytest
from history import exactly
from load import eventually, write_down
from publisher_api import PATIENCE_S, BlockingPublisher

from lrq_ha.lab import Lab
from lrq_ha.publisher import AsyncPublisher, NoPrimary, Publisher

pytestmark = pytest.mark.broker

Make = Callable[..., Any]

BODY = b"x" * 1024
QUEUES = (("/", "q"), ("lrq", "LRQ_Send_LogEntries"), ("lrq", "LRQ_Status"))
COUNT = 8000


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    with Lab({"east": 2}, tmp_path_factory.mktemp("kill") / "lab", broker_version, brokers_only=True) as found:
        for node in found.nodes:
            for vhost, queue in QUEUES:
                with channel(found, node, vhost) as ch:
                    ch.queue_declare(queue, durable=True)
        write_down(found, *found.nodes)
        yield found


@contextmanager
def channel(lab: Lab, node: str, vhost: str) -> Iterator[pika.adapters.blocking_connection.BlockingChannel]:
    parameters = pika.URLParameters(lab.nodes[node].admin)
    parameters.virtual_host = vhost
    with pika.BlockingConnection(parameters) as connection:
        yield connection.channel()


@pytest.fixture(autouse=True)
def empty(lab: Lab) -> None:
    for node in lab.nodes:
        for vhost, queue in QUEUES:
            with channel(lab, node, vhost) as ch:
                ch.queue_purge(queue)


def drain(lab: Lab, node: str, vhost: str, queue: str) -> list[int]:
    """Sequences of the IDs in a queue, each once, in the order in which they came first."""
    found: list[int] = []
    with channel(lab, node, vhost) as ch:
        ch.basic_qos(prefetch_count=500)
        left = ch.queue_declare(queue, passive=True).method.message_count
        if left:
            for method, properties, _ in ch.consume(queue):
                found.append(int(properties.headers["x-lrq-id"].rpartition("/")[2]))
                ch.basic_ack(method.delivery_tag)
                if len(found) == left:
                    break
    return list(dict.fromkeys(found))


@pytest.fixture
def publisher(api: Make) -> Make:
    def make(lab: Lab, *nodes: str, **options: float) -> Any:
        found = {"login_timeout_s": 5.0, "connect_timeout_s": PATIENCE_S, "window": 3000, **options}
        return api([lab.nodes[node].admin for node in nodes], "app-1", "orders", **found)

    return make


def publish_while(p: Publisher | BlockingPublisher, fault: Callable[[], object]) -> list[Any]:
    """Publishes COUNT messages and a log entry after every twentieth; the fault comes in the middle, with a window full of messages."""
    if isinstance(p, BlockingPublisher):
        return p.loop.run(publish_while_async(p.inner, fault))
    confirms: list[Any] = []
    for number in range(COUNT):
        confirms.append(p.publish("", "q", BODY))
        if number % 20 == 0:
            confirms.append(p.transmit_log_entry_message(BODY, ["west"]))
        if number == COUNT // 2:
            fault()
    p.flush(2 * PATIENCE_S)
    return confirms


async def publish_while_async(p: AsyncPublisher, fault: Callable[[], object]) -> list[Any]:
    """The same on the loop itself: one message at a time through the adapter would never fill the window."""
    confirms: list[Any] = []
    for number in range(COUNT):
        confirms.append(await p.publish("", "q", BODY))
        if number % 20 == 0:
            confirms.append(await p.transmit_log_entry_message(BODY, ["west"]))
        if number == COUNT // 2:
            await asyncio.to_thread(fault)
    await p.flush(2 * PATIENCE_S)
    return confirms


def test_the_broker_is_killed_and_comes_back(lab: Lab, publisher: Make) -> None:
    def kill_and_start() -> None:
        lab.kill("e1.broker")
        threading.Thread(target=lab.start, args=("e1.broker",)).start()

    with publisher(lab, "e1") as p:
        confirms = publish_while(p, kill_and_start)
    assert all(confirm.done and confirm.error is None for confirm in confirms)
    exactly(drain(lab, "e1", "/", "q"), range(1, COUNT + 1))
    exactly(drain(lab, "e1", "lrq", "LRQ_Send_LogEntries"), range(2, COUNT // 20 + 2))  # 1 is the announcement


@pytest.mark.quick
def test_failover_to_the_second_address(lab: Lab, publisher: Make) -> None:
    """Two brokers that know nothing of each other: together they must hold everything, in order on each."""
    with publisher(lab, "e1", "e2") as p:
        confirms = publish_while(p, lambda: lab.kill("e1.broker"))
    assert all(confirm.done and confirm.error is None for confirm in confirms)
    lab.start("e1.broker")
    first, second = drain(lab, "e1", "/", "q"), drain(lab, "e2", "/", "q")
    assert first == sorted(first)
    assert second == list(range(second[0], COUNT + 1)), "everything from the first unconfirmed message on, with the same IDs"
    assert set(range(1, second[0])) <= set(first), "what was not sent again had been confirmed"


def test_timeouts_name_the_missing_primary(lab: Lab, publisher: Make) -> None:
    with publisher(lab, "e1", publish_timeout_s=0.2) as p:
        p.publish("", "q", b"").result(PATIENCE_S)
        lab.kill("e1.broker")
        deadline = time.monotonic() + 2 * PATIENCE_S
        confirm = p.publish("", "q", b"")
        while True:  # until the loss is noticed, a time-out is only that
            with pytest.raises(TimeoutError) as caught:
                confirm.result(0.1)
            if isinstance(caught.value, NoPrimary):
                break
            assert time.monotonic() < deadline
        with pytest.raises(NoPrimary):
            p.flush(0.1)
        confirms = [p.publish("", "q", b"") for _ in range(2999)]

        def refused() -> bool:
            with pytest.raises(NoPrimary) as full:
                p.publish("", "q", b"")
            return "refused" in str(full.value)

        eventually("what the node answers to be told", refused)
        lab.start("e1.broker")
        p.flush(2 * PATIENCE_S)
    assert [each.result(0) for each in confirms] == [f"app-1/{number}" for number in range(3, 3002)]
    exactly(drain(lab, "e1", "/", "q"), range(1, 3002))
