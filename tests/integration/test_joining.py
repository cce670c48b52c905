"""A log without its beginning (R17): who has fallen off it is told; a renewal lets an empty node join: all that is live, once, in order."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pika
import pytest
from history import dead, span
from load import (
    all_applied,
    command,
    consume,
    declare,
    depth,
    eventually,
    in_sync,
    on_record,
    primary_of,
    renew,
    replace_primary,
    set_up,
    take_over,
    told,
)
from pika.exceptions import ChannelClosedByBroker
from renewals import DEEP, PORTION, SMALL_LOG, discard, empty, equal, fall_off, has, levels, part_of_it, peek, publish
from traffic import Load, Traffic

from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.proves("renewal")]

LEVELS = """replicate = { '^cache-' = "configuration", '^scratch-' = "none", '' = "all" }\n"""
SETTINGS = f"{SMALL_LOG}backup_timeout_s = 10.0\n{LEVELS}"
NODES = {"e1", "e2"}
STILL = 600
LACKS = "which the log no longer has"


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab({"east": 2}, tmp_path_factory.mktemp("joining") / "lab", broker_version)
    set_up(lab, SETTINGS)
    with lab:
        yield lab


def ended(lab: Lab, name: str) -> int:
    """How many connections a door has ended, as its log says; but for clients that were held up themselves, and sent no heartbeats."""
    said = lab.nodes[name].log.read_text()
    return said.count("a client of") - len(re.findall("a client of .* sent nothing for", said))


def refused(lab: Lab, queue: str, reason: str, **declared: object) -> None:
    """A renewal is given up because of this queue, and leaves its message where it is."""
    door = lab.nodes[primary_of(lab)].door
    with pika.BlockingConnection(pika.URLParameters(door)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments={key.replace("_", "-"): value for key, value in declared.items()})
        channel.queue_bind(queue, "amq.direct", f"key of {queue}")
        channel.confirm_delivery()
        channel.basic_publish("amq.direct", f"key of {queue}", b"7", pika.BasicProperties(delivery_mode=2), mandatory=True)
    # A dry run knows what is declared; what a message is, it does not.
    for arguments in (("--dry-run",), ("--timeout", "5")) if "x_delivery_limit" in declared else (("--timeout", "5"),):
        code, said = command("renew", *arguments, lab=lab)
        assert code == 1, said
        assert f"queue '{queue}'" in said, said
        assert reason in said, said
    assert consume(door, queue, 1) == [7]


@pytest.mark.proves("away", "queue: level configuration", "queue: level none")
@pytest.mark.quick
def test_joining_a_log_without_its_beginning(lab: Lab, broker_version: str) -> None:
    primary, backup = in_sync(lab, applied=True)
    empty(lab, primary, backup)
    door = lab.nodes[primary].door
    connection = pika.BlockingConnection(pika.URLParameters(door))
    channel = connection.channel()
    channel.queue_declare("churn", durable=True)
    channel.queue_declare("quorum", durable=True, arguments={"x-queue-type": "quorum"})
    channel.exchange_declare("fan", "fanout", durable=True)
    channel.exchange_bind("amq.topic", "amq.fanout")
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
    said_before = lab.nodes[primary].log.read_text().count(LACKS)
    fall_off(lab, primary, backup)
    code, said = command("list", lab=lab)
    assert code == 0
    assert said.count(f"rebuild it with lrq-ha reinit {backup} --discard, then run lrq-ha renew") == 2, said
    assert told(lab, primary)["members"] == [primary]
    assert told(lab, primary)["peers"][backup]["log_bytes_left"] == 0
    assert lab.nodes[primary].log.read_text().count(LACKS) < said_before + 3
    code, said = command("reinit", backup, "--discard", "--dry-run", lab=lab)
    assert (code, said.endswith(f"to let {backup} join, run lrq-ha renew")) == (0, True), said
    bound = "amq.fanout\tamq.topic"
    assert bound in lab.ctl(backup, "-q", "list_bindings", "source_name", "destination_name")
    discard(lab, backup)
    assert bound not in lab.ctl(backup, "-q", "list_bindings", "source_name", "destination_name")
    eventually("what an empty one says", lambda: lab.status(backup)["reason"].endswith(f"to let {backup} join, run lrq-ha renew"))
    assert told(lab, backup)["end"] == 0

    # What cannot be moved unchanged is not moved: neither its place for dead letters, nor the number of its deliveries.
    refused(lab, "by-key", "dead-letters by routing key", x_dead_letter_exchange="fan")
    if broker_version.startswith("3"):
        refused(lab, "limited", "has a delivery limit", x_queue_type="quorum", x_delivery_limit=3)
    assert told(lab, backup)["end"] == 0

    # A renewal: everything live is there, in order and once, at both.
    assert f"{primary} has published 395 messages again" in renew(lab, "--timeout", "5")
    assert in_sync(lab, applied=True) == (primary, backup)
    equal(lab, {"quorum": 300, "left": 30, "right": 50, "full": 10, "dead": 5, "churn": 0})
    assert [depth(lab.nodes[name].broker, "cache-fan") for name in (primary, backup)] == [53, 0]
    assert not has(lab.nodes[backup].broker, "scratch-fan")
    assert not has(lab.nodes[backup].broker, "spare")
    publish(lab, "", range(50, 60), exchange="fan")
    publish(lab, "quorum", range(300, 310))

    # Both are as good as before: they start again, and the newcomer goes on without the other.
    on_record(lab, *in_sync(lab, applied=True))
    for name in NODES:
        lab.kill(f"{name}.sidecar")
    for name in NODES:
        lab.start(f"{name}.sidecar")
    primary, backup = in_sync(lab, applied=True)
    lab.kill(primary)
    eventually("the backup to miss it", lambda: not lab.status(backup)["peers"][primary]["connected"])
    stays = "messages in these queues are not replicated, and stay where they are: 'cache-fan' (configuration), 'spare' (none)"
    assert stays in lab.promote(backup, down=[primary], dry_run=True)
    take_over(lab, backup, primary)
    door = lab.nodes[backup].door
    assert depth(door, "cache-fan") == 0, "what is not replicated is not there"
    assert not has(door, "scratch-fan")
    assert not has(door, "spare")
    publish(lab, "", range(60, 62), exchange="fan")
    assert depth(door, "cache-fan") == 2, "its bindings are"
    found = consume(door, "quorum", 310)
    if broker_version.startswith("3"):  # a quorum queue may come into another order there, see docs/limitations.md
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


@pytest.mark.parametrize("exchange", ["amq.fanout", ""])
def test_a_renewal_that_is_given_up_doubles_nothing(lab: Lab, exchange: str) -> None:
    """It came to what it cannot move when it had published again what stood before that, and had no position."""
    primary, backup = in_sync(lab, applied=True)
    empty(lab, primary, backup)
    door = lab.nodes[primary].door
    declare(door, "by-name", dead_letter_exchange=exchange)
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].broker)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_bind("by-name", "amq.direct", "other")
        for number, (through, key) in enumerate([("", "by-name"), ("", "by-name"), ("amq.direct", "other")]):
            channel.basic_publish(through, key, b"%d" % number, pika.BasicProperties(delivery_mode=2))
    code, said = command("renew", "--timeout", "5", lab=lab)
    assert (code, "queue 'by-name' in vhost '/' dead-letters by routing key" in said) == (1, True), said
    all_applied(lab, primary, backup)
    assert depth(lab.nodes[primary].broker, "by-name") == 3
    assert consume(door, "by-name", 3) == [0, 1, 2]


def test_kills_in_the_middle_of_it(lab: Lab) -> None:
    primary, backup = in_sync(lab, applied=True)
    empty(lab, primary, backup)
    door = lab.nodes[primary].door
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
    part_of_it(lab, primary, "deep")
    began = time.time()
    lab.kill(f"{primary}.sidecar")
    lab.cont(f"{primary}.broker")
    renewing.join()
    assert told(lab, backup)["end"] == 0, "nobody joins at a renewal that is not over"
    given_up = lab.nodes[primary].log.read_text().count("the renewal was given up")
    lab.start(f"{primary}.sidecar")
    confirmed = load.confirmed
    eventually("confirms to go on", lambda: load.confirmed > confirmed + 50)
    doubt = span(began, time.time())

    # The newcomer is killed while it joins, and goes on.
    def joins() -> bool:
        if not lab.status(backup)["end"] and lab.nodes[primary].log.read_text().count("the renewal was given up") > given_up:
            renew(lab)  # as its operator is told, where the machine was too slow for it
        return bool(lab.status(backup)["end"])

    eventually("it to join", joins)
    lab.kill(f"{backup}.sidecar")
    lab.start(f"{backup}.sidecar")
    time.sleep(5.0)  # as in test_faults: a broker that is killed before has lost the names of new quorum queues
    for whole in (f"{backup}.broker", backup):
        lab.kill(whole)
        lab.start(whole)
    assert in_sync(lab, applied=True) == (primary, backup)
    load.finish()
    load.check([doubt])
    equal(lab, {"deep": DEEP, "churn": 0, "steady": 0})
    assert [int(body) for body in peek(lab.nodes[primary].broker, "deep", DEEP)] == list(range(DEEP))
    replace_primary(lab, primary, backup)
    assert sorted(consume(lab.nodes[backup].door, "deep", DEEP)) == list(range(DEEP)), "all of it, once"
    lab.start(primary)
    in_sync(lab, applied=True)
    equal(lab, {"deep": 0})


def test_clients_go_on_meanwhile(lab: Lab, tmp_path: Path) -> None:
    """Several publishers, by name and by an exchange, and consumers that ack, reject, give back and hold on to messages."""
    primary, backup = in_sync(lab, applied=True)
    empty(lab, primary, backup)
    door = lab.nodes[primary].door
    queues = [f"{kind}-meanwhile" for kind in ("classic", "quorum")]
    for queue, kind in zip(queues, ("classic", "quorum")):
        declare(door, dead(queue), queue_type=kind)
        declare(door, queue, queue_type=kind, dead_letter_exchange="", dead_letter_routing_key=dead(queue))
    declare(door, "still", queue_type="quorum")
    publish(lab, "still", range(STILL))
    fall_off(lab, primary, backup)
    discard(lab, backup)
    producers = [f"{name}-{time.time_ns()}" for name in ("one", "two")]
    traffic = Traffic([door], queues, producers, ordinary=1, consumers=2, moody=True, rate_per_s=20, history=tmp_path / "history.jsonl")
    traffic.start()
    try:
        eventually("the stream to flow", lambda: traffic.confirmed > 100)
        began, connections = time.time(), ended(lab, primary)
        assert "the longest time for which a queue stood still was" in renew(lab, "--timeout", "1", "--force")
        doubt = span(began, time.time())
        assert ended(lab, primary) == connections, "no connection ends"
        confirmed = traffic.confirmed
        eventually("confirms to go on", lambda: traffic.confirmed > confirmed + 50)
        assert in_sync(lab, applied=True) == (primary, backup)
        traffic.finish()
        traffic.check([doubt])
    finally:
        traffic.stop()
    equal(lab, {"still": STILL, **dict.fromkeys((*queues, *map(dead, queues)), 0)})
    replace_primary(lab, primary, backup)
    assert sorted(consume(lab.nodes[backup].door, "still", STILL)) == list(range(STILL)), "all of it, once"
    lab.start(primary)
    in_sync(lab, applied=True)


def test_consumers_are_as_before(lab: Lab) -> None:
    """A renewal cancels consumers at the broker: their clients do not see it."""
    primary, backup = in_sync(lab, applied=True)
    empty(lab, primary, backup)
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

        with ThreadPoolExecutor(1) as operator:
            renewing = operator.submit(renew, lab)
            while not renewing.done():
                for connection in (one, other):
                    connection.process_data_events(0.05)
            renewing.result()
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


def test_a_node_that_cannot_be_rebuilt(new_lab: Callable[..., Lab], broker_version: str) -> None:
    """It says what to do, and that helps (docs/operations/members.md, the section of that name). `reinit` cannot, and said nothing else."""
    lab = new_lab({"east": 2}, broker=broker_version)
    set_up(lab, SETTINGS)
    lab.up()
    primary, backup = in_sync(lab)
    door = lab.nodes[primary].door
    for queue in ("churn", "kept"):
        declare(door, queue)
    publish(lab, "kept", range(20))

    def lost() -> bool:
        publish(lab, "churn", range(PORTION), size=60_000)
        assert consume(door, "churn", PORTION) == list(range(PORTION))
        return all(told(lab, name)["head"] > 1 for name in NODES)

    eventually("both logs to lose their beginning", lost)
    in_sync(lab, applied=True)
    lab.kill(f"{backup}.sidecar")
    with pika.BlockingConnection(pika.URLParameters(f"{lab.nodes[backup].admin}/lrq")) as connection:
        connection.channel().queue_delete("LRQ_APPLIED_east")
    lab.start(f"{backup}.sidecar")
    eventually("it to say so", lambda: "no longer reaches back to entry 1, which this node has not applied" in lab.status(backup)["reason"])
    code, said = command("reinit", backup, "--discard", lab=lab)
    assert code == 1
    assert f"{backup} is not running: the log no longer reaches back to entry 1" in said
    assert re.search(r"operations(/members)?\.md, 'A node that cannot be rebuilt'\)", said)

    lab.kill(f"{backup}.sidecar")
    for step in ("stop_app", "reset", "start_app"):
        lab.ctl(backup, step)
    lab.ctl(backup, "import_definitions", str(lab.nodes[backup].config.with_name("definitions.json")))
    lab.start(f"{backup}.sidecar")
    eventually("what an empty one says", lambda: lab.status(backup)["reason"].endswith(f"to let {backup} join, run lrq-ha renew"))
    renew(lab)
    assert in_sync(lab, applied=True) == (primary, backup)
    equal(lab, {"kept": 20, "churn": 0})
    replace_primary(lab, primary, backup)
    assert consume(lab.nodes[backup].door, "kept", 20) == list(range(20))
