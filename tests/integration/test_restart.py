"""Restarts that read the log from a CHECKPOINT (R7): what stood before it counts as if all of the log had been read."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import pika
import pytest
from history import exactly
from load import applied_records, consume, declare, depth, eventually, in_sync, on_record, primary_of, replace_primary, same_logs, set_up, told
from pamqp import commands
from pika.exceptions import AMQPError
from raw_client import RawClient
from raw_client import publish as raw_publish

from broker_plugin.amqp import encode
from broker_plugin.log import codec
from lrq_ha.demo import check as checks
from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import Publisher
from lrq_ha.replication.retention import RECORD_BYTES

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3"), pytest.mark.proves("G2")]

EVERY = 200
MESSAGES = 1_000
BEYOND_THE_END = 1_000_000
LOG_BYTES = 64 << 20


def up(new_lab: Callable[..., Lab], broker_version: str, settings: str, *, sinks: int = 0) -> Lab:
    """A pair and sinks whose sidecars have these lines in [replication], which is the last table of their configuration."""
    lab = new_lab({"east": 2} | ({"west": sinks} if sinks else {}), broker=broker_version)
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
    on_record(lab, name)
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


def batches(lab: Lab, name: str) -> list[pb.Batch]:
    """What stands in a node's log, whole."""
    joiner: codec.Joiner[bool] = codec.Joiner()
    whole = (joiner.take(headers, codec.FIRST in headers, body) for headers, body in checks.read_stream(lab.nodes[name].admin, "LRQ_HA_east"))
    return [pb.Batch.FromString(found[1]) for found in whole if found is not None and found[0]]


def kind_of(batch: pb.Batch) -> str | None:
    return batch.runs[0].WhichOneof("kind") if batch.runs else None


@pytest.mark.proves("queue: classic and quorum")
def test_a_restart_reads_from_the_last_checkpoint(new_lab: Callable[..., Lab], broker_version: str) -> None:
    lab = up(new_lab, broker_version, f"checkpoint_entries = {EVERY}", sinks=1)
    queue = "restarts"
    declare(lab.nodes["e1"].door, queue, queue_type="quorum")
    publish(lab, queue, range(1, MESSAGES // 2))
    time.sleep(0.5)
    publish(lab, queue, range(MESSAGES // 2, MESSAGES + 1))
    with Publisher([lab.nodes["e1"].door, lab.nodes["e2"].door], producer="log-app", client_name="flights") as publisher:
        publisher.transmit_log_entry_message(b"payload", ["west"])
        publisher.flush(120)
    exactly(drain(lab, queue, 100), range(1, 101))
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
    exactly(drain(lab, queue, MESSAGES + 5), range(101, MESSAGES + 2))
    lab.start(killed)
    in_sync(lab, applied=True)
    same_logs(lab)
    eventually("both queues empty", lambda: all(depth(lab.nodes[n].broker, queue) == 0 for n in ("e1", "e2")))


def name_another_place(lab: Lab, name: str, further: int) -> None:
    """Leaves an applied record whose CHECKPOINT is so many records behind where it is."""
    record = applied_records(lab, name)[-1]
    assert record.HasField("start")
    record.start.offset += further
    connection = pika.BlockingConnection(pika.URLParameters(checks.with_vhost(lab.nodes[name].admin, "lrq")))
    channel = connection.channel()
    channel.confirm_delivery()
    channel.basic_publish("", "LRQ_APPLIED_east", record.SerializeToString())
    connection.close()


def test_a_record_that_names_another_place_is_not_believed(new_lab: Callable[..., Lab], broker_version: str) -> None:
    """As after a broker that lost its last writes and put others in their place, or none."""
    lab = up(new_lab, broker_version, f"checkpoint_entries = {EVERY}")
    queue = "elsewhere"
    declare(lab.nodes["e1"].door, queue)
    publish(lab, queue, range(1, MESSAGES + 1))
    _, backup = in_sync(lab, applied=True)
    for round_number, further in enumerate((1, BEYOND_THE_END), 1):
        on_record(lab, backup)
        lab.kill(f"{backup}.sidecar")
        name_another_place(lab, backup, further)
        lab.start(f"{backup}.sidecar")
        in_sync(lab, applied=True)
        said = lab.nodes[backup].log.read_text()
        assert said.count("is not where the applied record says: the whole log is read") == round_number
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
    exactly(drain(lab, "old", 9), [1, 2, 3])
    assert depth(lab.nodes["e1"].broker, "new") == 0


@pytest.mark.proves("queue: purged before a restart")
@pytest.mark.parametrize("what", ["purged", "deleted and declared again"])
def test_dead_letters_that_came_behind_a_purge_or_deletion(new_lab: Callable[..., Lab], broker_version: str, what: str) -> None:
    """They are there after a restart, which carries out again what its record lacks."""
    lab = new_lab({"east": 1}, broker=broker_version)
    lab.up()
    lab.wait_role("e1", "active")
    for number in range(4):
        dead, source = f"dead-{number}", f"source-{number}"
        with suppress(AMQPError), pika.BlockingConnection(pika.URLParameters(lab.nodes["e1"].door)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare(dead, durable=True)
            channel.queue_declare(source, durable=True, arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead})
            channel.basic_publish("", source, b"rejected", pika.BasicProperties(delivery_mode=2))
            tag = channel.basic_get(source)[0].delivery_tag
            time.sleep(0.5)  # in which all that is on record
            if what == "purged":
                channel.queue_purge(dead)
            else:
                channel.queue_delete(dead)
                channel.queue_declare(dead, durable=True)
            channel.basic_reject(tag, requeue=False)
            eventually("the dead letter", lambda dead=dead: depth(lab.nodes["e1"].broker, dead) == 1)
            lab.kill("e1.sidecar")
        lab.start("e1.sidecar")
        lab.wait_role("e1", "active")
        assert depth(lab.nodes["e1"].broker, dead) == 1


@pytest.mark.proves("queue: purged before a restart")
@pytest.mark.parametrize("level", ["none", "configuration"])
def test_messages_of_a_queue_that_is_not_replicated_outlive_a_restart(new_lab: Callable[..., Lab], broker_version: str, level: str) -> None:
    """Though the queue was deleted and declared again just before: they are in no log, and nobody publishes them again."""
    lab = new_lab({"east": 1}, broker=broker_version)
    lab.up()
    lab.wait_role("e1", "active")
    for number in range(4):
        queue = f"own-{number}"
        with suppress(AMQPError), pika.BlockingConnection(pika.URLParameters(lab.nodes["e1"].door)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare(queue, durable=True, arguments={"x-lrq-replicate": level})
            time.sleep(0.5)
            channel.queue_delete(queue)
            channel.queue_declare(queue, durable=True, arguments={"x-lrq-replicate": level})
            channel.basic_publish("", queue, b"confirmed", pika.BasicProperties(delivery_mode=2), mandatory=True)
            lab.kill("e1.sidecar")
        lab.start("e1.sidecar")
        lab.wait_role("e1", "active")
        eventually("what was confirmed", lambda queue=queue: depth(lab.nodes["e1"].broker, queue) == 1, 10.0)


def test_short_lived_queues_leave_nothing_behind(new_lab: Callable[..., Lab], broker_version: str) -> None:
    """Made, used and deleted one after the other, with a queue that stays beside them: nothing of them is in the record, and restarts go well."""
    lab = up(new_lab, broker_version, f"checkpoint_entries = {EVERY}")
    queues, staying, rounds = [f"reply-{number}" for number in range(60)], "staying", 2
    persistent = pika.BasicProperties(delivery_mode=2)

    def use() -> None:
        """Two messages to each, of which one is left when it is deleted; and to the one that stays."""
        with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary_of(lab)].door)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for number, queue in enumerate(queues):
                channel.queue_declare(queue, durable=True)
                for body in (b"%d" % number, b"left"):
                    channel.basic_publish("", queue, body, persistent)
                channel.basic_publish("", staying, b"%d" % number, persistent)
                method, _, body = channel.basic_get(queue)
                assert int(body) == number
                channel.basic_ack(method.delivery_tag)
                if number % 2:
                    taken, _, _ = channel.basic_get(staying)
                    channel.basic_ack(taken.delivery_tag)
                channel.queue_delete(queue)

    def remembers(name: str) -> set[str]:
        return {known.queue for known in applied_records(lab, name)[-1].queues}

    declare(lab.nodes["e1"].door, staying)
    for _ in range(rounds):
        use()
        nodes = in_sync(lab, applied=True)
        for name in nodes:
            eventually(f"{name} to remember one queue", lambda name=name: remembers(name) == {staying})
        for name in reversed(nodes):  # the backup first
            end, first = restart(lab, name)
            assert end - 3 * EVERY < first, f"{name} read {end - first} entries"
    # Queues of these names are new ones, on each node.
    door = lab.nodes[primary_of(lab)].door
    with pika.BlockingConnection(pika.URLParameters(door)) as connection:
        channel = connection.channel()
        for queue in queues[:20]:
            assert channel.queue_declare(queue, durable=True).method.message_count == 0
    for number, queue in enumerate(queues[:20]):
        publish(lab, queue, range(number + 1, number + 2))
    killed, taken_over = in_sync(lab, applied=True)
    replace_primary(lab, killed, taken_over)
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[taken_over].door)) as connection:
        channel = connection.channel()
        for number, queue in enumerate(queues[:20]):
            method, _, body = channel.basic_get(queue, auto_ack=True)
            assert method is not None
            assert int(body) == number + 1
            assert channel.basic_get(queue)[0] is None
    left = drain(lab, staying, rounds * len(queues))
    assert len(left) == rounds * len(queues) // 2
    lab.start(killed)
    in_sync(lab, applied=True)
    same_logs(lab)


def test_a_checkpoint_in_several_parts(new_lab: Callable[..., Lab], broker_version: str) -> None:
    """More than a broker may take in one message: bindings with long arguments stand for very many queues."""
    lab = up(new_lab, broker_version, f"checkpoint_entries = {EVERY}")
    count, size = 40, 60_000
    queue = "bound"
    declare(lab.nodes["e1"].door, queue)
    with pika.BlockingConnection(pika.URLParameters(lab.nodes["e1"].door)) as connection:
        channel = connection.channel()
        channel.exchange_declare("by-header", "headers", durable=True)
        for number in range(count):
            channel.queue_bind(queue, "by-header", arguments={"x-match": "all", "number": number, "text": f"{number:0{size}}"})
    primary, backup = in_sync(lab, applied=True)

    def checkpoints(name: str) -> list[int]:
        """Sizes of those in a node's log."""
        return [len(batch.runs[0].checkpoint.definitions) for batch in batches(lab, name) if kind_of(batch) == "checkpoint"]

    publish(lab, queue, range(1, 2 * EVERY))
    eventually("a checkpoint with all of that", lambda: max(checkpoints(primary), default=0) > count * size)
    in_sync(lab, applied=True)
    for name in (backup, primary):
        assert restart(lab, name)[1] > 1
    replace_primary(lab, *in_sync(lab, applied=True))
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[backup].door)) as connection:
        channel = connection.channel()
        channel.queue_purge(queue)
        channel.confirm_delivery()
        headers = {"number": 7, "text": f"{7:0{size}}"}
        channel.basic_publish("by-header", "", b"7", pika.BasicProperties(headers=headers, delivery_mode=2), mandatory=True)
        assert channel.basic_get(queue)[2] == b"7"


def test_a_small_log_always_has_a_checkpoint(new_lab: Callable[..., Lab], broker_version: str) -> None:
    """Entries that are small count as what they take in the stream: else the broker would drop the last checkpoint before the next one comes."""
    log_bytes_max = 1 << 20
    lab = up(new_lab, broker_version, f"log_bytes_max = {log_bytes_max}\nbackup_timeout_s = 30.0")
    queue = "small"
    declare(lab.nodes["e1"].door, queue)
    primary, backup = in_sync(lab, applied=True)
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for number in range(2_000):
            channel.basic_publish("", queue, b"%d" % number)
            method, _, _ = channel.basic_get(queue)
            channel.basic_ack(method.delivery_tag)
    in_sync(lab, applied=True)
    grown, between = 0, []
    for batch in batches(lab, primary):
        grown += batch.ByteSize() + RECORD_BYTES
        if kind_of(batch) == "checkpoint":
            between.append(grown)
            grown = 0
    assert len(between) > 1, "the log has lost its beginning"
    assert max(between) < log_bytes_max // 4 + (64 << 10), between
    for name in (backup, primary):
        assert restart(lab, name)[1] > 1


def stuck(lab: Lab, primary: str, publish: Callable[[], None], traffic: Callable[[], None]) -> int:
    """Publishes until an entry stays unapplied, as its client reads nothing, whatever else passes; the last entry that is applied.

    How much is under way to a client that does not read differs with the machine, so the first publishes may pass.
    """
    for _ in range(30):
        publish()
        time.sleep(1.0)
        before = told(lab, primary)
        for _ in range(10):
            traffic()
        time.sleep(1.0)
        after = told(lab, primary)
        if before["applied"] == after["applied"] < before["end"]:
            return int(after["applied"])
    raise AssertionError("the broker's confirms get through to a client that reads nothing")


def test_who_does_not_read_its_confirms_pins_the_log_so_long_only(new_lab: Callable[..., Lab], broker_version: str) -> None:
    """What is not known to be applied must not fall out of the log: the sidecar could not start again."""
    lab = up(new_lab, broker_version, f"log_bytes_max = {LOG_BYTES}\nbackup_timeout_s = 30.0")
    primary = primary_of(lab)
    declare(lab.nodes[primary].door, "deaf")
    declare(lab.nodes[primary].door, "busy")
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for _ in range(200):  # 40 MB: the door holds 16, the kernel's buffers some more
            channel.basic_publish("", "deaf", bytes(200_000))
        in_sync(lab, applied=True)
        with RawClient(lab.nodes[primary].door, login=False) as client:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.login("/", 0, 0, {})
            client.open_channel()
            client.send(encode.method_frame(1, commands.Basic.Consume(queue="deaf")))
            unheard = raw_publish(1, "busy", b"nobody hears whether this is there")
            held_up = stuck(lab, primary, lambda: client.send(unheard), lambda: channel.basic_publish("", "busy", b"heard"))
            until = time.monotonic() + 120
            for number in range(20_000):
                channel.basic_publish("", "busy", b"%d" % number + bytes(20_000))
                channel.basic_get("busy", auto_ack=True)
                if told(lab, primary)["applied"] > held_up + 1:
                    break
                assert time.monotonic() < until, "it holds the log up"
    assert "holds up the log, and is closed" in lab.nodes[primary].log.read_text()
    in_sync(lab, applied=True)
    assert restart(lab, primary)[1] > 1


def test_to_begin_anew_is_brought_to_its_end(new_lab: Callable[..., Lab], broker_version: str) -> None:
    """A node whose queues were gone, and its log not yet, came back in sync without them."""
    lab = up(new_lab, broker_version, "backup_timeout_s = 60.0")
    declare(lab.nodes["e1"].door, "anew")
    publish(lab, "anew", range(1, 101))
    primary, backup = in_sync(lab, applied=True)
    for gone in ([], ["LRQ_HA_east"]):
        lab.kill(f"{backup}.sidecar")
        parameters = pika.URLParameters(lab.nodes[backup].admin)
        with pika.BlockingConnection(parameters) as connection:
            connection.channel().queue_delete("anew")
        parameters.virtual_host = "lrq"
        with pika.BlockingConnection(parameters) as connection:
            channel = connection.channel()
            channel.exchange_declare("LRQ_X_east_anew", "direct", durable=True)
            for queue in gone:
                channel.queue_delete(queue)
        lab.start(f"{backup}.sidecar")
        eventually(f"{backup} to have it", lambda: depth(lab.nodes[backup].broker, "anew") == 100)
        in_sync(lab, applied=True)
    assert primary == primary_of(lab)
    same_logs(lab)
