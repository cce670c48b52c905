"""A log without its beginning (R17): who has fallen off it is told; a renewal lets an empty node join: all that is live, once, in order."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from history import dead, span
from load import command, consume, declare, depth, eventually, in_sync, set_up
from pika.exceptions import ChannelClosedByBroker
from traffic import Load, Traffic

from broker_plugin import wire
from lrq_ha.demo import check as checks
from lrq_ha.lab import Lab, probe
from lrq_ha.publisher import Publisher

pytestmark = pytest.mark.broker

LOG_BYTES_MAX = 1 << 20
LEVELS = """replicate = { '^cache-' = "configuration", '^scratch-' = "none", '' = "all" }\n"""
SETTINGS = f"log_bytes_max = {LOG_BYTES_MAX}\nmemory_bytes_max = {1 << 20}\nbackup_timeout_s = 1.0\napply_delay_s = 0.1\n"
SETTINGS += f"checkpoint_entries = 200\n{LEVELS}"
NODES = {"e1", "e2"}
STILL = 600
DEEP = 1_900  # a quorum queue gives no more than 2,000 to one consumer


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab({"east": 2}, tmp_path_factory.mktemp("joining") / "lab", broker_version)
    set_up(lab, SETTINGS)
    with lab:
        yield lab


def publish(lab: Lab, queue: str, numbers: range, *, size: int = 0, exchange: str = "") -> None:
    properties = pika.BasicProperties(delivery_mode=2)
    with Publisher([lab.nodes[str(lab.primary("east"))].door], producer=f"joining-{time.time_ns()}", client_name="test") as publisher:
        for number in numbers:
            publisher.publish(exchange, queue, b"%d" % number + b" " * size, properties)
        publisher.flush(60)


def discard(lab: Lab, backup: str) -> None:
    """The backup begins anew, with nothing."""
    code, said = command("reinit", backup, "--discard", lab=lab)
    assert code == 0, said
    eventually("it to be empty", lambda: lab.status(backup)["end"] == 0)


def peek(url: str, queue: str, count: int) -> list[bytes]:
    """What a broker's queue begins with, in order; it stays there."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=count)
    found = []
    for method, _, body in channel.consume(queue, inactivity_timeout=10):
        if method is not None:
            found.append(body)
        if method is None or len(found) == count:
            break
    connection.close()
    return found


def fall_off(lab: Lab, primary: str, backup: str) -> None:
    """The backup is away while the beginning of the primary's log is dropped."""
    end = lab.status(backup)["end"]
    lab.kill(f"{backup}.sidecar")
    messages = 2 * LOG_BYTES_MAX // 60_000
    publish(lab, "churn", range(messages), size=60_000)
    assert consume(lab.nodes[primary].door, "churn", messages) == list(range(messages))
    eventually("the head to have moved on", lambda: lab.status(primary)["head"] > end + 1)
    eventually("the primary to say it", lambda: f"{backup} has fallen off the log" in lab.status(primary)["reason"])
    lab.start(f"{backup}.sidecar")
    eventually("the backup to say it", lambda: f"lrq-ha reinit {backup} --discard" in lab.status(backup)["reason"])


def part_of_it(lab: Lab, primary: str) -> None:
    """A renewal is in the middle, and stays there: the broker stands still. It runs for a moment at a time before, as all of it may take less than a second."""
    broker = f"{primary}.broker"
    end = lab.status(primary)["end"]

    def begun() -> bool:
        status = lab.status(primary)
        return "renews its log" in status["reason"] and status["end"] > end + DEEP // 4

    deadline = time.monotonic() + 120
    while not begun():
        assert time.monotonic() < deadline, "the renewal does not begin, or was over too soon"
        lab.cont(broker)
        time.sleep(0.01)
        lab.stop(broker)


def levels(lab: Lab, name: str) -> dict[str, str]:
    """What a node's sidecar says of the queues in vhost /."""
    rows: Any = probe.get_json(f"{lab.nodes[name].http}/levels")
    return {row["queue"]: row["level"] for row in rows if row["vhost"] == "/"}


def has(url: str, queue: str) -> bool:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        try:
            connection.channel().queue_declare(queue, passive=True)
        except ChannelClosedByBroker as error:
            if error.reply_code != 404:
                raise
            return False
        return True


def equal(lab: Lab, queues: dict[str, int]) -> None:
    """Both brokers hold so many messages, and what both logs hold is the same."""
    for queue, count in queues.items():
        for name in NODES:
            url = lab.nodes[name].broker
            eventually(f"{count} messages in {queue} at {name}", lambda url=url, queue=queue, count=count: depth(url, queue) == count)
    logs = [batches(lab, name) for name in sorted(NODES)]
    shared = logs[0].keys() & logs[1].keys()
    assert len(shared) > 5
    assert [logs[0][key] for key in shared] == [logs[1][key] for key in shared]


def batches(lab: Lab, name: str) -> dict[tuple[int, int, int], int]:
    """(epoch, first, last) of each batch in a node's stream, and a checksum of what it says."""
    found = {}
    joiner: wire.Joiner[dict[str, Any]] = wire.Joiner()
    for headers, body in checks.read_stream(lab.nodes[name].admin, "LRQ_HA_east"):
        whole = joiner.take(headers, headers, body)
        if whole is not None and wire.LAST in headers:
            found[headers[wire.EPOCH], headers[wire.FIRST], headers[wire.LAST]] = zlib.crc32(whole[1])
    return found


def refused(lab: Lab, queue: str, reason: str, **arguments: object) -> None:
    """A renewal is given up because of this queue, and leaves its message where it is."""
    door = lab.nodes[str(lab.primary("east"))].door
    with pika.BlockingConnection(pika.URLParameters(door)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments={key.replace("_", "-"): value for key, value in arguments.items()})
        channel.queue_bind(queue, "amq.direct", f"key of {queue}")
        channel.confirm_delivery()
        channel.basic_publish("amq.direct", f"key of {queue}", b"7", pika.BasicProperties(delivery_mode=2), mandatory=True)
    code, said = command("renew", "--timeout", "5", lab=lab)
    assert code == 1, said
    assert f"queue '{queue}'" in said, said
    assert reason in said, said
    assert consume(door, queue, 1) == [7]


def test_joining_a_log_without_its_beginning(lab: Lab, broker_version: str) -> None:
    primary, backup = in_sync(lab, applied=True)
    door = lab.nodes[primary].door
    connection = pika.BlockingConnection(pika.URLParameters(door))
    channel = connection.channel()
    channel.queue_declare("churn", durable=True)
    channel.queue_declare("quorum", durable=True, arguments={"x-queue-type": "quorum"})
    channel.exchange_declare("fan", "fanout", durable=True)
    for queue in ("left", "right", "cache-fan", "scratch-fan"):
        channel.queue_declare(queue, durable=True)
        channel.queue_bind(queue, "fan")
    channel.queue_declare("spare", durable=True, arguments={"x-lrq-replicate": "none"})
    channel.queue_bind("spare", "fan")
    channel.queue_declare("full", durable=True, arguments={"x-max-length": 10, "x-overflow": "reject-publish"})
    channel.queue_declare("later", durable=True, arguments={"x-message-ttl": 1, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
    channel.queue_declare("dead", durable=True)
    connection.close()
    publish(lab, "quorum", range(300))
    publish(lab, "", range(50), exchange="fan")
    publish(lab, "cache-fan", range(3))
    publish(lab, "full", range(10))
    publish(lab, "later", range(5))
    assert consume(door, "left", 20) == list(range(20))
    replicated = ("churn", "quorum", "left", "right", "full", "later", "dead")
    assert levels(lab, primary) == {"cache-fan": "configuration", "spare": "none", **dict.fromkeys(replicated, "all")}

    # A backup that was away so long that the log no longer has what it needs: both say so, and what is to be done.
    fall_off(lab, primary, backup)
    code, said = command("list", lab=lab)
    assert code == 0
    assert said.count(f"let it begin anew with lrq-ha reinit {backup} --discard, then run lrq-ha renew") == 2, said
    assert lab.status(primary)["members"] == [primary]
    assert lab.status(primary)["peers"][backup]["log_bytes_left"] == 0
    assert lab.nodes[primary].log.read_text().count("which the log no longer has") < 3
    discard(lab, backup)
    eventually("what an empty one says", lambda: lab.status(backup)["reason"].endswith(f"to let {backup} join, run lrq-ha renew"))
    assert lab.status(backup)["end"] == 0

    # What cannot be moved unchanged is not moved: neither its place for dead letters, nor the number of its deliveries.
    refused(lab, "by-key", "dead-letters by routing key", x_dead_letter_exchange="fan")
    if broker_version.startswith("3"):
        refused(lab, "limited", "has a delivery limit", x_queue_type="quorum", x_delivery_limit=3)
    assert lab.status(backup)["end"] == 0

    # A renewal: everything live is there, in order and once, at both.
    code, said = command("renew", "--timeout", "5", lab=lab)
    assert code == 0, said
    assert f"{primary} has published 395 messages again" in said
    assert in_sync(lab, applied=True) == (primary, backup)
    equal(lab, {"quorum": 300, "left": 30, "right": 50, "full": 10, "dead": 5, "churn": 0})
    assert [depth(lab.nodes[name].broker, "cache-fan") for name in (primary, backup)] == [53, 0]
    assert not has(lab.nodes[backup].broker, "scratch-fan")
    assert not has(lab.nodes[backup].broker, "spare")
    publish(lab, "", range(50, 60), exchange="fan")
    publish(lab, "quorum", range(300, 310))

    # Both are as good as before: they start again, and the newcomer goes on without the other.
    in_sync(lab, applied=True)
    time.sleep(0.5)
    for name in NODES:
        lab.kill(f"{name}.sidecar")
    for name in NODES:
        lab.start(f"{name}.sidecar")
    primary, backup = in_sync(lab, applied=True)
    lab.kill(primary)
    eventually("the backup to miss it", lambda: not lab.status(backup)["peers"][primary]["connected"])
    stays = "messages in these queues are not replicated, and stay where they are: 'cache-fan' (configuration), 'spare' (none)"
    assert stays in lab.promote(backup, down=[primary], dry_run=True)
    lab.promote(backup, down=[primary])
    door = lab.nodes[backup].door
    assert depth(door, "cache-fan") == 0, "what is not replicated is not there"
    assert not has(door, "scratch-fan")
    assert not has(door, "spare")
    publish(lab, "", range(60, 62), exchange="fan")
    assert depth(door, "cache-fan") == 2, "its bindings are"
    found = consume(door, "quorum", 310)
    if broker_version.startswith("3"):  # a quorum queue may come into another order there, see docs/guarantees.md
        found.sort()
    assert found == list(range(310))
    assert consume(door, "left", 42) == list(range(20, 62))
    assert consume(door, "full", 10) == list(range(10))
    assert consume(door, "dead", 5) == list(range(5))
    lab.start(primary)
    in_sync(lab, applied=True)
    equal(lab, {"quorum": 0, "left": 0, "right": 62, "full": 0, "dead": 0, "churn": 0})
    eventually("what the former primary had of it to be gone", lambda: depth(lab.nodes[primary].broker, "cache-fan") == 0)
    assert depth(lab.nodes[primary].broker, "spare") == 60, "it keeps what it had, and gets no more"
    assert depth(lab.nodes[primary].broker, "scratch-fan") == 62, "of this one the log knows nothing: its exchange goes on to fill it"


def test_kills_in_the_middle_of_it(lab: Lab) -> None:
    primary, backup = in_sync(lab, applied=True)
    door = lab.nodes[primary].door
    declare(door, "churn")
    declare(door, "deep", queue_type="quorum")
    publish(lab, "deep", range(DEEP))
    fall_off(lab, primary, backup)
    discard(lab, backup)

    # The primary is killed while it renews, and goes on: nobody may use the queue that is half done before. Others are used all the time.
    declare(door, "steady")
    load = Load([door], "steady", f"steady-{time.time_ns()}", rate_per_s=20)
    load.start()  # so little of it that a checkpoint stays in so small a log
    eventually("the stream to flow", lambda: load.confirmed > 50)
    renewing = threading.Thread(target=command, args=("renew",), kwargs={"lab": lab})
    renewing.start()
    part_of_it(lab, primary)
    began = time.time()
    lab.kill(f"{primary}.sidecar")
    lab.cont(f"{primary}.broker")
    renewing.join()
    assert lab.status(backup)["end"] == 0, "nobody joins at a renewal that is not over"
    lab.start(f"{primary}.sidecar")
    confirmed = load.confirmed
    eventually("confirms to go on", lambda: load.confirmed > confirmed + 50)
    doubt = span(began, time.time())

    # The newcomer is killed while it joins, and goes on.
    eventually("it to join", lambda: lab.status(backup)["end"] > 0)
    lab.kill(f"{backup}.sidecar")
    lab.start(f"{backup}.sidecar")
    assert in_sync(lab, applied=True) == (primary, backup)
    load.finish()
    load.check([doubt])
    equal(lab, {"deep": DEEP, "churn": 0, "steady": 0})
    assert [int(body) for body in peek(lab.nodes[primary].broker, "deep", DEEP)] == list(range(DEEP))
    lab.kill(primary)
    lab.promote(backup, down=[primary])
    assert sorted(consume(lab.nodes[backup].door, "deep", DEEP)) == list(range(DEEP)), "all of it, once"
    lab.start(primary)
    in_sync(lab, applied=True)
    equal(lab, {"deep": 0})


def test_clients_go_on_meanwhile(lab: Lab, tmp_path: Path) -> None:
    """Several publishers, by name and by an exchange, and consumers that ack, reject, give back and hold on to messages."""
    primary, backup = in_sync(lab, applied=True)
    door = lab.nodes[primary].door
    queues = [f"{kind}-meanwhile" for kind in ("classic", "quorum")]
    for queue, kind in zip(queues, ("classic", "quorum")):
        declare(door, dead(queue), queue_type=kind)
        declare(door, queue, queue_type=kind, dead_letter_exchange="", dead_letter_routing_key=dead(queue))
    declare(door, "churn")
    declare(door, "still", queue_type="quorum")
    publish(lab, "still", range(STILL))
    fall_off(lab, primary, backup)
    discard(lab, backup)
    producers = [f"{name}-{time.time_ns()}" for name in ("one", "two")]
    traffic = Traffic([door], queues, producers, ordinary=1, consumers=2, moody=True, rate_per_s=20, history=tmp_path / "history.jsonl")
    traffic.start()
    try:
        eventually("the stream to flow", lambda: traffic.confirmed > 100)
        began, connections = time.time(), lab.nodes[primary].log.read_text().count("a client of")
        code, said = command("renew", "--timeout", "1", "--force", lab=lab)
        assert code == 0, said
        assert "the longest time for which a queue stood still was" in said
        doubt = span(began, time.time())
        assert lab.nodes[primary].log.read_text().count("a client of") == connections, "no connection ends"
        confirmed = traffic.confirmed
        eventually("confirms to go on", lambda: traffic.confirmed > confirmed + 50)
        assert in_sync(lab, applied=True) == (primary, backup)
        traffic.finish()
        traffic.check([doubt])
    finally:
        traffic.stop()
    equal(lab, {"still": STILL, **dict.fromkeys((*queues, *map(dead, queues)), 0)})
    lab.kill(primary)
    lab.promote(backup, down=[primary])
    assert sorted(consume(lab.nodes[backup].door, "still", STILL)) == list(range(STILL)), "all of it, once"
    lab.start(primary)
    in_sync(lab, applied=True)


def test_consumers_are_as_before(lab: Lab) -> None:
    """A renewal cancels consumers at the broker: their clients do not see it."""
    primary, _ = in_sync(lab, applied=True)
    door = lab.nodes[primary].door
    declare(door, "single", single_active_consumer=True)
    declare(door, "windowed", queue_type="quorum")
    declare(door, "alone")
    with pika.BlockingConnection(pika.URLParameters(door)) as one, pika.BlockingConnection(pika.URLParameters(door)) as other:
        first, second = one.channel(), other.channel()
        got: list[tuple[str, int]] = []

        def take(name: str, ack: bool = True) -> Any:
            def on_message(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
                got.append((name, int(body)))
                if ack:
                    channel.basic_ack(method.delivery_tag)

            return on_message

        def come(count: int) -> list[tuple[str, int]]:
            def there() -> bool:
                for connection in (one, other):
                    connection.process_data_events(0.05)
                return len(got) >= count

            eventually(f"{count} deliveries", there)
            for connection in (one, other):
                connection.process_data_events(0.3)
            found = got[:]
            got.clear()
            return found

        first.basic_consume("single", take("first"))
        second.basic_consume("single", take("second"))
        first.basic_qos(prefetch_count=1)
        kept = first.basic_consume("windowed", take("windowed", ack=False), consumer_tag="windowed")
        first.basic_qos(prefetch_count=10)
        second.basic_consume("alone", take("alone"), exclusive=True)
        gone = second.basic_consume("windowed", take("gone"))
        publish(lab, "single", range(1, 3))
        publish(lab, "alone", range(1))
        assert sorted(come(3)) == [("alone", 0), ("first", 1), ("first", 2)]

        renewing = threading.Thread(target=command, args=("renew",), kwargs={"lab": lab})
        renewing.start()
        while renewing.is_alive():
            for connection in (one, other):
                connection.process_data_events(0.05)
        assert not got
        second.basic_cancel(gone)
        publish(lab, "single", range(3, 5))
        publish(lab, "alone", range(1, 2))
        publish(lab, "windowed", range(3))
        assert sorted(come(4)) == [("alone", 1), ("first", 3), ("first", 4), ("windowed", 0)]
        refusing = one.channel()
        with pytest.raises(ChannelClosedByBroker, match="ACCESS_REFUSED"):
            refusing.basic_consume("alone", take("nobody"))
        first.basic_cancel(kept)
