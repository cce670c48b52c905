"""Very many queues on a pair: declared through the door, a message left in each, a failover, all is there.

    LRQ_QUEUES=10000 python -m pytest -s tests/integration/test_many_queues.py      prints what they cost

Rule: nothing here depends on how long it takes; the figures in docs/benchmarks.md were printed by it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pika
import pytest
from load import eventually, in_sync, replace_primary, write_down

from lrq_ha.lab import Lab
from lrq_ha.publisher import Publisher

pytestmark = [pytest.mark.broker, pytest.mark.own_pair("kills"), pytest.mark.one_version("4.3")]

COUNT = int(os.environ.get("LRQ_QUEUES", "100"))
PERSISTENT = pika.BasicProperties(delivery_mode=2)
IDLE_S = 10.0 if COUNT > 1_000 else 0.0


def resident_mb(pid: int | None) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def cpu_s(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tell(lab: Lab, what: str, began: float, each: int = COUNT) -> None:
    took = time.monotonic() - began
    memory = ", ".join(f"{name} {resident_mb(lab.nodes[name].sidecar_pid):.0f} MB" for name in ("e1", "e2") if lab.nodes[name].sidecar_pid)
    cpu = ", ".join(f"{name} {cpu_s(lab.nodes[name].sidecar_pid):.1f} s" for name in ("e1", "e2") if lab.nodes[name].sidecar_pid)
    print(f"{COUNT} queues, load {os.getloadavg()[0]:.1f}: {what}: {took:.2f} s, {1000 * took / each:.2f} ms each; {memory}; CPU {cpu}", flush=True)


def tell_idle(lab: Lab, *names: str) -> None:
    """What the sidecars use while no client does anything, if that is measured."""
    if not IDLE_S:
        return
    began, before = time.monotonic(), [cpu_s(lab.nodes[name].sidecar_pid) for name in names]
    time.sleep(IDLE_S)
    took = time.monotonic() - began
    used = [(cpu_s(lab.nodes[name].sidecar_pid) - first) / took for name, first in zip(names, before)]
    told = ", ".join(f"{name} {share:.1%}" for name, share in zip(names, used))
    print(f"idle for {took:.0f} s, load {os.getloadavg()[0]:.1f}: sidecars use of a core: {told}", flush=True)


def declare(url: str, names: list[str]) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        for name in names:
            channel.queue_declare(name, durable=True)


@pytest.mark.quick
@pytest.mark.timeout(3_600)
def test_many_queues(pair: Lab) -> None:
    primary, backup = in_sync(pair)
    queues = [f"many-{time.time_ns()}-{number}" for number in range(COUNT)]
    tell(pair, "before", time.monotonic())

    began = time.monotonic()
    declare(pair.nodes[primary].door, queues)
    tell(pair, "declared through the door", began)
    if IDLE_S:
        began = time.monotonic()
        declare(pair.nodes[primary].broker, [f"direct-{number}" for number in range(500)])
        tell(pair, "500 declared at the broker", began, 500)

    began = time.monotonic()
    with Publisher([pair.nodes[primary].door], f"many-{time.time_ns()}") as publisher:
        for number in range(2 * COUNT):
            publisher.publish("", queues[number % COUNT], b"%d" % number, PERSISTENT)
        publisher.flush(600)
    tell(pair, "two messages published to each", began, 2 * COUNT)
    began = time.monotonic()
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].door)) as connection:
        channel = connection.channel()
        for number, queue in enumerate(queues):
            method, _, body = channel.basic_get(queue)
            assert int(body) == number
            channel.basic_ack(method.delivery_tag)
    tell(pair, "one of them taken from each", began)
    began = time.monotonic()
    in_sync(pair, applied=True)
    tell(pair, "all of it applied", began)
    tell_idle(pair, primary, backup)
    if IDLE_S:
        began = time.monotonic()
        with pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].door)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for number in range(50):
                channel.queue_declare(f"later-{number}", durable=True)
                channel.basic_publish("", f"later-{number}", b"", PERSISTENT)
        tell(pair, "50 more declared, with a publish after each", began, 50)

    write_down(pair, primary, backup)  # 3.10
    in_sync(pair)
    began = time.monotonic()
    replace_primary(pair, primary, backup)
    tell(pair, "promoted", began)
    recovered = [line for line in pair.nodes[backup].log.read_text().splitlines() if "recovered: epoch taken" in line]
    print(recovered[-1].partition("recovered: ")[2], flush=True)
    began = time.monotonic()
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[backup].door)) as connection:
        channel = connection.channel()
        for number, queue in enumerate(queues):
            method, _, body = channel.basic_get(queue, auto_ack=True)
            assert int(body) == COUNT + number, "what was taken is gone, what was not is there"
            assert channel.basic_get(queue)[0] is None
    tell(pair, "emptied", began, 2 * COUNT)
    began = time.monotonic()
    pair.start(primary)
    tell(pair, "the former primary started", began)
    in_sync(pair, applied=True)
    tell(pair, "and in sync", began)
    tell_idle(pair, backup, primary)
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].broker)) as connection:
        channel = connection.channel()
        for queue in queues:
            eventually(f"{queue} to be empty there", lambda queue=queue: channel.queue_declare(queue, passive=True).method.message_count == 0)
    began = time.monotonic()
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[backup].door)) as connection:
        channel = connection.channel()
        for queue in queues:
            channel.queue_delete(queue)
    tell(pair, "deleted", began)
    in_sync(pair, applied=True)
