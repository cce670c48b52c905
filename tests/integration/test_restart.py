"""Restarts that read the log from a CHECKPOINT (R7): what stood before it counts as if all of the log had been read."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pika
import pytest
from load import consume, declare, depth, eventually, in_sync, primary_of, replace_primary, same_logs, set_up

from lrq_ha.demo import check as checks
from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import Publisher

pytestmark = pytest.mark.broker

EVERY = 200
MESSAGES = 1_000


def up(new_lab: Callable[..., Lab], broker_version: str, settings: str) -> Lab:
    """A pair and a sink whose sidecars have these lines in [replication], which is the last table of their configuration."""
    lab = new_lab({"east": 2, "west": 1}, broker=broker_version)
    set_up(lab, settings)
    lab.up()
    in_sync(lab, applied=True)
    return lab


def rebuilt(lab: Lab, name: str) -> tuple[int, int]:
    """(log end, first entry read) of the last rebuild that a sidecar's log tells of."""
    found = re.findall(r"rebuilt: log to (\d+) \(\d+ batches read from entry (\d+) on\)", lab.nodes[name].log.read_text())
    return int(found[-1][0]), int(found[-1][1])


def restart(lab: Lab, name: str) -> tuple[int, int]:
    """SIGKILL of a sidecar, and its next start."""
    before = lab.nodes[name].log.read_text().count("rebuilt: ")
    time.sleep(1.0)  # the applied record is written several times a second
    lab.kill(f"{name}.sidecar")
    lab.start(f"{name}.sidecar")
    eventually(f"{name} to be rebuilt", lambda: lab.nodes[name].log.read_text().count("rebuilt: ") > before)
    in_sync(lab, applied=True)
    return rebuilt(lab, name)


def publish(lab: Lab, queue: str, numbers: range) -> None:
    """With replication IDs that are the messages' numbers: a number that is sent again is a repeat."""
    parameters = pika.URLParameters(lab.nodes[primary_of(lab)].door)
    parameters.client_properties = {"lrq_producer": "restart"}
    connection = pika.BlockingConnection(parameters)
    channel = connection.channel()
    channel.confirm_delivery()
    for number in numbers:
        properties = pika.BasicProperties(delivery_mode=2, headers={"x-lrq-id": f"restart/{number}"})
        channel.basic_publish("", queue, b"%d" % number, properties)
    connection.close()


def drain(lab: Lab, queue: str, count: int) -> list[int]:
    return consume(lab.nodes[primary_of(lab)].door, queue, count)


def records(lab: Lab, name: str) -> list[bytes]:
    """The applied records in a node's stream."""
    return [body for headers, body in checks.read_stream(lab.nodes[name].admin, "LRQ_APPLIED_east") if "x-lrq-open" not in headers]


def test_a_restart_reads_from_the_last_checkpoint(new_lab: Callable[..., Lab], broker_version: str) -> None:
    lab = up(new_lab, broker_version, f"checkpoint_entries = {EVERY}")
    queue = "restarts"
    declare(lab.nodes["e1"].door, queue, queue_type="quorum")
    publish(lab, queue, range(1, MESSAGES // 2))
    time.sleep(0.5)
    publish(lab, queue, range(MESSAGES // 2, MESSAGES + 1))
    with Publisher([lab.nodes["e1"].door, lab.nodes["e2"].door], producer="log-app", client_name="flights") as publisher:
        publisher.transmit_log_entry_message(b"payload", ["west"])
        publisher.flush(120)
    assert drain(lab, queue, 100) == list(range(1, 101))
    primary, backup = in_sync(lab, applied=True)
    for name in (backup, primary):  # a primary that starts again takes the next epoch
        end, first = restart(lab, name)
        assert end - 3 * EVERY < first, f"{name} read {end - first} entries"
        assert first > 1
    # Every ID from before the checkpoint is still known, on the one that wrote it and on the one that was pushed it.
    publish(lab, queue, range(1, MESSAGES + 1))
    killed, taken_over = in_sync(lab, applied=True)
    replace_primary(lab, killed, taken_over)
    publish(lab, queue, range(1, MESSAGES + 2))
    with Publisher([lab.nodes[taken_over].door], producer="log-app", client_name="flights") as publisher:
        publisher.transmit_log_entry_message(b"payload 2", ["west"])
        publisher.flush(120)
    assert drain(lab, queue, MESSAGES + 5) == list(range(101, MESSAGES + 2))
    lab.start(killed)
    in_sync(lab, applied=True)
    same_logs(lab)
    eventually("both queues empty", lambda: all(depth(lab.nodes[n].broker, queue) == 0 for n in ("e1", "e2")))


def test_a_record_that_names_another_place_is_not_believed(new_lab: Callable[..., Lab], broker_version: str) -> None:
    """As after a broker that lost its last writes and put others in their place."""
    lab = up(new_lab, broker_version, f"checkpoint_entries = {EVERY}")
    queue = "elsewhere"
    declare(lab.nodes["e1"].door, queue)
    publish(lab, queue, range(1, MESSAGES + 1))
    _, backup = in_sync(lab, applied=True)
    time.sleep(1.0)
    lab.kill(f"{backup}.sidecar")
    record = pb.Applied.FromString(records(lab, backup)[-1])
    assert record.HasField("start")
    record.start.offset += 1
    connection = pika.BlockingConnection(pika.URLParameters(checks.with_vhost(lab.nodes[backup].admin, "lrq")))
    channel = connection.channel()
    channel.confirm_delivery()
    channel.basic_publish("", "LRQ_APPLIED_east", record.SerializeToString())
    connection.close()
    lab.start(f"{backup}.sidecar")
    in_sync(lab, applied=True)
    assert "is not where the applied record says: the whole log is read" in lab.nodes[backup].log.read_text()
    assert rebuilt(lab, backup)[1] == 1
    assert restart(lab, backup)[1] > 1, "and the next start has a place to begin at again"


def test_what_was_routed_before_bindings_changed_stays_where_it_was(new_lab: Callable[..., Lab], broker_version: str) -> None:
    """A restart publishes again what its record lacks; by the bindings of then, not of now."""
    lab = new_lab({"east": 1}, broker=broker_version)
    lab.up()
    lab.wait_role("e1", "active")
    door = lab.nodes["e1"].door
    for name in ("old", "new"):
        declare(door, name)
    for number in range(1, 4):
        connection = pika.BlockingConnection(pika.URLParameters(door))
        channel = connection.channel()
        channel.confirm_delivery()
        channel.exchange_declare("turn", "fanout", durable=True)
        channel.queue_bind("old", "turn")
        channel.basic_publish("turn", "", b"%d" % number, pika.BasicProperties(delivery_mode=2))
        channel.queue_unbind("old", "turn")
        channel.queue_bind("new", "turn")
        lab.kill("e1.sidecar")
        lab.start("e1.sidecar")
        lab.wait_role("e1", "active")
        connection = pika.BlockingConnection(pika.URLParameters(door))
        connection.channel().queue_unbind("new", "turn")
        connection.close()
    assert drain(lab, "old", 9) == [1, 2, 3]
    assert depth(lab.nodes["e1"].broker, "new") == 0
