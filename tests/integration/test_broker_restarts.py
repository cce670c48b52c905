"""A broker that goes down and comes back: what it forgets of its definitions, and what it may have forgotten of its log (R16)."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pika
import pytest
from load import LOST, consume, declare, depth, eventually, in_sync, on_record, primary_of, promote, replace_primary, same_logs, switch_over, told

from lrq_ha.lab import Lab
from lrq_ha.lab.errors import LabError
from lrq_ha.publisher import Publisher

pytestmark = pytest.mark.broker

MESSAGES = 1_000
HEADER_BYTES = 8  # of a segment, and of its index
CHUNK_HEADER_BYTES = 48


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab({"east": 2}, tmp_path_factory.mktemp("restarts") / "lab", broker_version) as lab:
        yield lab


@pytest.fixture
def nodes(lab: Lab) -> tuple[str, str]:
    """The primary and the backup."""
    return in_sync(lab, applied=True)


def restart(lab: Lab, name: str) -> None:
    """Kills a broker and starts it again; its sidecar notices by itself."""
    lab.kill(f"{name}.broker")
    lab.start(f"{name}.broker")


@contextmanager
def published(lab: Lab, exchange: str) -> Iterator[None]:
    """With confirms; the connection is still open inside."""
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary_of(lab)].door)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for number in range(MESSAGES):
            channel.basic_publish(exchange, "", b"%d" % number, pika.BasicProperties(delivery_mode=2))
        yield


def is_refused(lab: Lab, node: str, down: str, words: str) -> None:
    """A promotion, and this is why. What the other had sent before it was killed may arrive a little later: then it seems to answer."""

    def said_so() -> bool:
        with pytest.raises(LabError, match=f"{words}|but it answers|does not answer") as refused:
            lab.promote(node, [down])
        return words in str(refused.value)

    eventually(f"a promotion of {node} to be refused", said_so)


@pytest.mark.proves("exchange: not durable")
@pytest.mark.quick(only="backup")
@pytest.mark.parametrize("which", ["primary", "backup"])
def test_exchanges_that_are_not_durable(lab: Lab, nodes: tuple[str, str], which: str) -> None:
    """So are those of clients that do not ask otherwise. RabbitMQ 3 forgets them, and what is bound to them, when it restarts; the log does not."""
    primary, backup = nodes
    exchange, other, queue, far = (f"{which}-{what}-{time.time_ns()}" for what in ("x", "y", "q", "far"))
    connection = pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door))
    channel = connection.channel()
    channel.exchange_declare(exchange, "fanout")
    channel.exchange_declare(other, "fanout", durable=True)
    channel.exchange_bind(other, exchange)
    for name, source in ((queue, exchange), (far, other)):
        channel.queue_declare(name, durable=True)
        channel.queue_bind(name, source)
    connection.close()
    on_record(lab, *in_sync(lab, applied=True))
    if which == "primary":
        with suppress(*LOST), published(lab, exchange):
            restart(lab, primary)  # before all of that is on record: the rest is published again
    else:
        restart(lab, backup)
        in_sync(lab, applied=True)
        with published(lab, exchange):
            pass
    primary, backup = in_sync(lab, applied=True)
    replace_primary(lab, primary, backup)
    try:
        assert [depth(lab.nodes[backup].door, name) for name in (queue, far)] == [MESSAGES, MESSAGES]
    finally:
        lab.start(primary)


@pytest.mark.proves("queue: not durable")
def test_a_queue_that_is_not_durable_of_a_former_primary(lab: Lab, nodes: tuple[str, str]) -> None:
    """It follows now, so the queue is there again, with what came since: it is no primary's that has gone with its messages."""
    primary, backup = nodes
    queue, exchange = (f"{what}-{time.time_ns()}" for what in ("passing", "passing-x"))
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue)
        channel.exchange_declare(exchange, "fanout")
        channel.queue_bind(queue, exchange)
    on_record(lab, *in_sync(lab, applied=True))
    replace_primary(lab, primary, backup)
    lab.start(primary)
    primary, backup = in_sync(lab, applied=True)
    with published(lab, exchange):
        pass
    in_sync(lab, applied=True)
    eventually("them at the former primary", lambda: depth(lab.nodes[backup].broker, queue) == MESSAGES)
    replace_primary(lab, primary, backup)
    try:
        assert depth(lab.nodes[backup].door, queue) == MESSAGES
    finally:
        lab.start(primary)


@pytest.mark.proves("exchange: auto-delete")
@pytest.mark.parametrize("which", ["primary", "backup"])
def test_an_auto_delete_exchange_that_has_gone(lab: Lab, nodes: tuple[str, str], which: str) -> None:
    """It went with its last binding, and does not come again with its broker: a client makes another one of that name."""
    primary, backup = nodes
    exchange, queue, other = (f"{which}-gone-{what}-{time.time_ns()}" for what in ("x", "q", "other"))
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door)) as connection:
        channel = connection.channel()
        channel.exchange_declare(exchange, "fanout", auto_delete=True)
        for name in (queue, other):
            channel.queue_declare(name, durable=True)
        channel.queue_bind(queue, exchange)
        channel.queue_unbind(queue, exchange)
    on_record(lab, *in_sync(lab, applied=True))
    restart(lab, primary if which == "primary" else backup)
    primary, backup = in_sync(lab, applied=True)
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door)) as connection:
        channel = connection.channel()
        channel.exchange_declare(exchange, "direct")
        channel.queue_bind(queue, exchange, "")
        channel.queue_bind(other, exchange, "other")
    with published(lab, exchange):
        pass
    in_sync(lab, applied=True)
    for node in (primary, backup):
        eventually(f"them at {node}", lambda node=node: [depth(lab.nodes[node].broker, name) for name in (queue, other)] == [MESSAGES, 0])


def test_a_backup_whose_broker_went_down_is_not_promoted(lab: Lab, nodes: tuple[str, str]) -> None:
    """It may have lost the end of its log, which was confirmed; only what it hears of another tells."""
    primary, backup = nodes
    declare(lab.nodes[primary].door, "q")
    lab.kill(primary)
    restart(lab, backup)
    eventually("its reason", lambda: "waiting" in lab.status(backup)["reason"])
    try:
        is_refused(lab, backup, primary, "went down and it has not caught up since")
    finally:
        lab.start(primary)
    in_sync(lab, applied=True)
    lab.kill(primary)
    lab.kill(f"{backup}.sidecar")
    lab.start(f"{backup}.sidecar")
    eventually("its reason", lambda: "waiting" in lab.status(backup)["reason"])
    try:
        is_refused(lab, backup, primary, "has heard no primary")  # it has caught up, and its broker has not gone down since
    finally:
        lab.start(primary)


def segment_of(lab: Lab, name: str) -> Path:
    """The file in which a broker keeps the log; its index is beside it."""
    [segment] = (lab.directory / name).glob("data/**/*LRQ_HA_east_*/*.segment")
    return segment


def end_of_chunks(segment: Path) -> int:
    """Its format: chunks, whose headers name the sizes of what follows them. A broker may have written only a part of the last one."""
    data, end = segment.read_bytes(), HEADER_BYTES
    while end + CHUNK_HEADER_BYTES <= len(data):
        size, trailer, bloom = struct.unpack_from(">IIB", data, end + 36)
        end += CHUNK_HEADER_BYTES + bloom + size + trailer
    return end


def publish(lab: Lab, node: str, queue: str, numbers: range) -> None:
    with Publisher([lab.nodes[node].door], f"{queue}-{numbers.start}") as publisher:
        for number in numbers:
            publisher.publish("", queue, b"%d" % number)
        publisher.flush(60)


@pytest.mark.proves("power-loss")
@pytest.mark.one_version("4.3")
@pytest.mark.parametrize(("which", "lost"), [("primary", "end"), ("backup", "all")])
def test_a_host_that_loses_power(lab: Lab, nodes: tuple[str, str], which: str, lost: str) -> None:
    """What its stream had confirmed is not on its disk; its queues, and what it has on record of them, are. What is missing has acks in it, too."""
    primary, backup = nodes
    name, other = (primary, backup) if which == "primary" else (backup, primary)
    queue = f"power-{which}-{lost}-{time.time_ns()}"
    declare(lab.nodes[primary].door, queue)
    publish(lab, primary, queue, range(100))
    on_record(lab, *in_sync(lab, applied=True))
    segment = segment_of(lab, name)
    kept, end = end_of_chunks(segment), told(lab, name)["end"]
    publish(lab, primary, queue, range(100, 200))
    assert consume(lab.nodes[primary].door, queue, 150) == list(range(150))
    on_record(lab, *in_sync(lab, applied=True))
    lab.kill(name)
    if which == "primary":
        promote(lab, other, name)
    publish(lab, other, queue, range(200, 250))
    if lost == "all":
        for file in (segment, segment.with_suffix(".index")):
            os.truncate(file, HEADER_BYTES)
    else:
        os.truncate(segment, kept + 60)  # in the middle of a chunk
    lab.kill(f"{other}.sidecar")
    lab.start(name)
    eventually("its reason", lambda: "waiting" in lab.status(name)["reason"])
    try:
        assert told(lab, name)["end"] <= (end if lost == "end" else 0)
        is_refused(lab, name, other, "went down and it has not caught up since" if lost == "end" else "is empty")
    finally:
        lab.start(f"{other}.sidecar")
    assert in_sync(lab, applied=True) == (other, name)
    same_logs(lab)
    for node in nodes:
        eventually(f"what is left at {node}", lambda node=node: depth(lab.nodes[node].broker, queue) == 100)
    switch_over(lab, name)
    lab.wait_role(name, "active")
    assert consume(lab.nodes[name].door, queue, 100) == list(range(150, 250))
    assert depth(lab.nodes[name].broker, queue) == 0
