"""A broker that was used before it had a sidecar: `lrq-ha adopt` brings what it holds into the log, and a backup has it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pika
import pytest
from load import all_applied, command, consume, depth, eventually, in_sync, primary_of, replace_primary, told

from broker_plugin.amqp.connection import Connection
from lrq_ha.cli.adopt import WINDOW_MESSAGES
from lrq_ha.cli.main import main
from lrq_ha.lab import Lab
from lrq_ha.lab.files import python_environment

pytestmark = [pytest.mark.broker, pytest.mark.proves("G4", "queue: adopted")]

MESSAGES = 1_234


def adopt(definitions: Path, *arguments: str) -> tuple[int, str]:
    return command("adopt", "--definitions", str(definitions), *arguments)


def fill(url: str) -> None:
    """As applications have left a broker: a quorum queue behind a topic exchange, a classic one with dead letters, things of its own."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.exchange_declare("orders", "topic", durable=True)
    channel.exchange_declare("audit", "fanout", durable=True, arguments={"alternate-exchange": "orders"})
    channel.exchange_bind("orders", "audit", "#")
    channel.exchange_declare("inner", "fanout", durable=True, internal=True)
    channel.exchange_bind("inner", "orders", "old.#")
    channel.exchange_declare("mail", "fanout", durable=True, auto_delete=True)  # the name of a queue
    channel.queue_declare("orders.new", durable=True, arguments={"x-queue-type": "quorum"})
    channel.queue_bind("orders.new", "orders", "new.#")
    channel.queue_declare("mail", durable=True, arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "mail.dead"})
    channel.queue_declare("mail.dead", durable=True)
    channel.queue_bind("mail.dead", "inner")
    channel.queue_bind("mail.dead", "mail")
    channel.queue_declare("temporary", auto_delete=True)
    channel.queue_declare("cache", durable=True, arguments={"x-lrq-replicate": "configuration"})
    channel.confirm_delivery()
    channel.basic_publish("", "cache", b"1", pika.BasicProperties(delivery_mode=2))
    for number in range(MESSAGES):
        properties = pika.BasicProperties(delivery_mode=2, headers={"number": number}, content_type="text/plain")
        channel.basic_publish("orders", "new.book", b"%d" % number, properties)
    channel.queue_declare("copied", durable=True)
    channel.queue_declare("copies", durable=True)
    for number in range(3):
        channel.basic_publish("", "copied", b"%d" % number, pika.BasicProperties(delivery_mode=2, headers={"CC": ["copies"]}))
    for number in range(50):
        channel.basic_publish("", "mail", b"%d" % number, pika.BasicProperties(delivery_mode=2, priority=3, message_id=f"m{number}"))
    for _ in range(5):
        method, _, _ = channel.basic_get("mail")
        assert method is not None
        channel.basic_reject(method.delivery_tag, requeue=False)
    connection.close()


def drained(url: str, queue: str) -> list[tuple[int, pika.BasicProperties]]:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    found = []
    while True:
        method, properties, body = channel.basic_get(queue)
        if method is None:
            break
        found.append((int(body), properties))
        channel.basic_ack(method.delivery_tag)
    connection.close()
    return found


@pytest.mark.one_version("4.3")
def test_a_backup_has_what_was_there_before(new_lab: Callable[..., Lab], broker_version: str, tmp_path: Path) -> None:
    lab = new_lab({"east": 2}, broker=broker_version)
    lab.up()
    primary, backup = in_sync(lab)
    fill(lab.nodes[primary].broker)
    definitions = tmp_path / "definitions.json"
    exported = json.loads(lab.ctl(primary, "export_definitions", "-"))
    definitions.write_text(json.dumps(exported))
    door = lab.nodes[primary].door
    code, said = adopt(definitions, "--to", door, "--vhost", "/", "--dry-run")
    assert code == 1
    assert re.search(r"vhost /: 3 exchanges, 6 queues, 3 bindings would be declared", said), said
    assert "exchange inner is not in the definitions, so orders is not bound to inner (key 'old.#')" in said
    assert "exchange inner is not in the definitions, so inner is not bound to mail.dead (key 'mail.dead')" in said
    inner = {"vhost": "/", "name": "inner", "type": "fanout", "durable": True, "auto_delete": False, "internal": True, "arguments": {}}
    exported["exchanges"].append(inner)
    definitions.write_text(json.dumps(exported))
    code, said = adopt(definitions, "--to", door, "--vhost", "/", "--dry-run")
    assert code == 0, said
    assert re.search(r"vhost /: 4 exchanges, 6 queues, 5 bindings would be declared", said), said
    assert f"orders.new: {MESSAGES} messages" in said
    assert depth(lab.nodes[primary].broker, "mail") == 45
    code, said = adopt(definitions, "--to", door, "--vhost", "/")
    assert code == 0, said
    assert f"orders.new: {MESSAGES} of {MESSAGES} messages adopted" in said, said
    assert "mail: 45 of 45 messages adopted" in said
    assert "cache: x-lrq-replicate is configuration; what it holds stays on this broker" in said
    code, said = adopt(definitions, "--to", door, "--vhost", "/")
    assert f"orders.new: 0 of {MESSAGES} messages adopted (none was without a position)" in said, "it may be repeated"
    for queue, count in (("orders.new", MESSAGES), ("mail", 45), ("mail.dead", 5), ("cache", 0), ("copied", 3), ("copies", 3)):
        eventually(f"{queue} on the backup", lambda queue=queue, count=count: depth(lab.nodes[backup].broker, queue) == count)
    replace_primary(lab, primary, backup)
    door = lab.nodes[backup].door
    orders = drained(door, "orders.new")
    assert [number for number, _ in orders] == list(range(MESSAGES))
    assert all(p.headers["number"] == number and p.content_type == "text/plain" and p.delivery_mode == 2 for number, p in orders)
    mail = drained(door, "mail")
    assert [(number, p.message_id, p.priority) for number, p in mail] == [(n, f"m{n}", 3) for n in range(5, 50)]
    assert [number for number, _ in drained(door, "mail.dead")] == list(range(5))
    connection = pika.BlockingConnection(pika.URLParameters(door))
    channel = connection.channel()
    channel.basic_publish("audit", "new.one", b"7")  # through both exchanges, as bound before
    eventually("the bindings to hold", lambda: [number for number, _ in drained(door, "orders.new")] == [7])
    for exchange, key in (("audit", "old.one"), ("mail", "")):  # through the internal one; the auto-delete one
        channel.basic_publish(exchange, key, b"8")
        eventually("the bindings to hold", lambda: [number for number, _ in drained(door, "mail.dead")] == [8])
    connection.close()


def only(queue: str, arguments: Mapping[str, object], tmp_path: Path) -> Path:
    """Definitions with this queue alone."""
    file = tmp_path / "definitions.json"
    made = {"vhost": "/", "name": queue, "durable": True, "auto_delete": False, "arguments": arguments}
    file.write_text(json.dumps({"vhosts": [{"name": "/"}], "queues": [made], "exchanges": [], "bindings": [], "policies": []}))
    return file


@pytest.mark.parametrize("arguments", [{"x-max-priority": 10}, {"x-queue-type": "quorum"}], ids=["classic", "quorum"])
def test_old_messages_that_new_copies_overtake(pair: Lab, tmp_path: Path, arguments: dict[str, object]) -> None:
    """Of high priority, copies come before what is old and of low priority: it stopped there, and said that nothing was left."""
    primary, backup = in_sync(pair)
    queue = f"overtaken-{uuid.uuid4().hex[:8]}"
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].broker)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments=arguments)
        channel.confirm_delivery()
        for number in range(1_000):
            channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2, priority=9 if number < 300 else 0))
    definitions, door = only(queue, arguments, tmp_path), pair.nodes[primary].door
    code, said = adopt(definitions, "--to", door)
    assert (code, f"{queue}: 1000 of 1000 messages adopted" in said) == (0, True), said
    code, said = adopt(definitions, "--to", door)
    assert (code, f"{queue}: 0 of 1000 messages adopted (none was without a position)" in said) == (0, True), said
    eventually("all of them on the backup", lambda: depth(pair.nodes[backup].broker, queue) == 1_000)
    found = [(properties.priority or 0, number) for number, properties in drained(door, queue)]
    for priority, numbers in ((9, range(300)), (0, range(300, 1_000))):
        assert [number for each, number in found if each == priority] == list(numbers), "each once, and in order"


@pytest.mark.parametrize("arguments", [{}, {"x-queue-type": "quorum", "x-delivery-limit": 5}], ids=["classic", "quorum"])
def test_old_messages_behind_those_that_are_adopted(pair: Lab, tmp_path: Path, broker_version: str, arguments: dict[str, object]) -> None:
    """Run again it looked no further than the first of these, and said that none was without a position."""
    primary, backup = in_sync(pair)
    queue = f"behind-{uuid.uuid4().hex[:8]}"
    definitions, door = only(queue, arguments, tmp_path), pair.nodes[primary].door
    for numbers in (range(300), range(300, 700)):
        with pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].broker)) as connection:
            channel = connection.channel()
            channel.queue_declare(queue, durable=True, arguments=arguments)
            channel.confirm_delivery()
            for number in numbers:
                channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2))
        code, said = adopt(definitions, "--to", door)
        assert code == 0, said
    if arguments and broker_version.startswith("3"):
        told = "messages adopted (up to the first that has a position: to look behind it would count as delivery attempts, and there is a limit)"
        assert f"{queue}: 0 of 700 {told}" in said, said
        return
    assert f"{queue}: 400 of 700 messages adopted" in said, said
    code, said = adopt(definitions, "--to", door)
    assert (code, f"{queue}: 0 of 700 messages adopted (none was without a position)" in said) == (0, True), said
    eventually("all of them on the backup", lambda: depth(pair.nodes[backup].broker, queue) == 700)
    assert [number for number, _ in drained(door, queue)] == list(range(700))


def test_more_queues_than_a_connection_has_channels(pair: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each queue's length was asked for on a channel of its own, for good: some two thousand were too many."""
    primary, _ = in_sync(pair)
    names = [f"many-{number}-{uuid.uuid4().hex[:8]}" for number in range(8)]
    definitions = json.loads(only("", {}, tmp_path).read_text())
    definitions["queues"] = [definitions["queues"][0] | {"name": name} for name in names]
    (tmp_path / "definitions.json").write_text(json.dumps(definitions))
    opened = Connection.open

    async def narrow(*arguments: Any, **keywords: Any) -> Connection:
        connection = await opened(*arguments, **keywords)
        connection._channel_max = 4
        return connection

    monkeypatch.setattr(Connection, "open", narrow)
    assert main(["adopt", "--definitions", str(tmp_path / "definitions.json"), "--to", pair.nodes[primary].door]) == 0


def test_a_pass_that_does_not_see_everything_fails(pair: Lab, tmp_path: Path) -> None:
    """Another consumer is the active one, so nothing comes: it said that there was nothing to adopt."""
    primary, _ = in_sync(pair)
    queue, arguments = f"taken-{uuid.uuid4().hex[:8]}", {"x-single-active-consumer": True}
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].broker)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments=arguments)
        channel.confirm_delivery()
        for number in range(5):
            channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2))
        channel.basic_qos(prefetch_count=1)
        channel.basic_consume(queue, lambda *_: None)
        code, said = adopt(only(queue, arguments, tmp_path), "--to", pair.nodes[primary].door)
    assert (code, f"{queue}: 0 of 4 messages adopted, and not all were seen" in said) == (1, True), said


@pytest.mark.one_version("4.3")
def test_killed_it_loses_nothing_and_doubles_one_window_at_most(pair: Lab, tmp_path: Path) -> None:
    primary, backup = in_sync(pair)
    queue, arguments, count, kills = f"cut-off-{uuid.uuid4().hex[:8]}", {"x-queue-type": "quorum"}, 10_000, 3
    definitions, door = only(queue, arguments, tmp_path), pair.nodes[primary].door
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].broker)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments=arguments)
        for number in range(count):
            channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2))
        eventually("them to be there", lambda: channel.queue_declare(queue, passive=True).method.message_count == count)
    for _ in range(kills):
        begin = told(pair, primary)["end"]
        command_line = [sys.executable, "-m", "lrq_ha.cli.main", "adopt", "--definitions", str(definitions), "--to", door]
        with subprocess.Popen(command_line, env=python_environment(), stdout=subprocess.DEVNULL) as process:
            while told(pair, primary)["end"] < begin + 2 * WINDOW_MESSAGES:
                assert process.poll() is None, "it was over too soon"
            process.kill()
    code, said = adopt(definitions, "--to", door)
    assert code == 0, said
    all_applied(pair, primary, backup)
    held = depth(pair.nodes[primary].broker, queue)
    assert count <= held <= count + kills * WINDOW_MESSAGES
    eventually("as many on the backup", lambda: depth(pair.nodes[backup].broker, queue) == held)
    found = consume(door, queue, held)
    assert list(dict.fromkeys(found)) == list(range(count)), "all of them, in order"


@pytest.mark.quick
def test_what_a_dry_run_would_make(pair: Lab, tmp_path: Path) -> None:
    """It ended at the first queue that this broker does not have."""
    definitions, door = only("nowhere-yet", {}, tmp_path), pair.nodes[primary_of(pair)].door
    code, said = adopt(definitions, "--to", door, "--dry-run")
    assert (code, "  nowhere-yet: would be made" in said) == (0, True), said


def test_bindings_with_numbers_are_left_to_their_application(pair: Lab, tmp_path: Path) -> None:
    """Numbers have several types in AMQP and one in JSON: they were declared with another one, beside those of the application."""
    primary, _ = in_sync(pair)
    queue, exchange = (f"{what}-{uuid.uuid4().hex[:8]}" for what in ("matched", "matches"))
    door = pair.nodes[primary].door
    arguments: list[dict[str, Any]] = [{"x-match": "all", "n": 5}, {"x-match": "all", "name": "five", "really": True}]
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].broker)) as connection:
        channel = connection.channel()
        channel.exchange_declare(exchange, "headers", durable=True)
        channel.queue_declare(queue, durable=True)
        for each in arguments:
            channel.queue_bind(queue, exchange, arguments=each)
    definitions = only(queue, {}, tmp_path)
    made = json.loads(definitions.read_text())
    exported = json.loads(pair.ctl(primary, "export_definitions", "-"))
    made["exchanges"] = [each for each in exported["exchanges"] if each["name"] == exchange]
    made["bindings"] = [each for each in exported["bindings"] if each["source"] == exchange]
    assert len(made["bindings"]) == 2
    definitions.write_text(json.dumps(made))
    code, said = adopt(definitions, "--to", door)
    assert code == 1, said
    assert "1 exchanges, 1 queues, 1 bindings declared" in said, said
    assert f'{exchange} is not bound to {queue}: of the numbers in {{"n": 5, "x-match": "all"}} the definitions do not say the types' in said, said
    with pika.BlockingConnection(pika.URLParameters(door)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for each in arguments:
            channel.queue_bind(queue, exchange, arguments=each)
            channel.queue_unbind(queue, exchange, arguments=each)
        for headers in ({"n": 5}, {"name": "five", "really": True}):
            channel.basic_publish(exchange, "", b"1", pika.BasicProperties(headers=headers))
        assert channel.queue_declare(queue, passive=True).method.message_count == 0


@pytest.mark.one_version("4.3")
def test_deliveries_are_counted_anew(pair: Lab, tmp_path: Path) -> None:
    """What RabbitMQ has written into the header of the old copy stood in the new one for good."""
    primary, _ = in_sync(pair)
    queue, arguments = f"counted-{uuid.uuid4().hex[:8]}", {"x-queue-type": "quorum"}
    with pika.BlockingConnection(pika.URLParameters(pair.nodes[primary].broker)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments=arguments)
        channel.confirm_delivery()
        channel.basic_publish("", queue, b"1", pika.BasicProperties(delivery_mode=2, headers={"own": 1}))
        for _ in range(3):
            eventually("it to be there", lambda: channel.queue_declare(queue, passive=True).method.message_count == 1)
            method, _, _ = channel.basic_get(queue)
            assert method is not None
            channel.basic_reject(method.delivery_tag, requeue=True)
    door = pair.nodes[primary].door
    code, said = adopt(only(queue, arguments, tmp_path), "--to", door)
    assert (code, f"{queue}: 1 of 1 messages adopted" in said) == (0, True), said
    [(_, properties)] = drained(door, queue)
    assert "x-delivery-count" not in properties.headers
    assert properties.headers.get("x-acquired-count", 0) <= 1, "the pass may have had it once"
    assert properties.headers["own"] == 1


@pytest.mark.parametrize(
    ("kind", "how", "copied"),
    [("classic", "argument", False), ("quorum", "argument", False), ("classic", "policy", False), ("classic", "argument", True)],
    ids=["classic", "quorum", "policy", "copied"],
)
def test_what_dead_letters_by_routing_key_is_left_alone(pair: Lab, tmp_path: Path, kind: str, how: str, copied: bool) -> None:
    """A copy has the queue's name as its key: its dead letter found no queue, and was gone on every node."""
    primary, backup = in_sync(pair)
    node, own = pair.nodes[primary], uuid.uuid4().hex[:8]
    orders, dlx, dead, queue = (f"{what}-{own}" for what in ("orders", "dlx", "dead", "by-key"))
    arguments = {"x-queue-type": kind} | ({"x-dead-letter-exchange": dlx} if how == "argument" else {})
    with pika.BlockingConnection(pika.URLParameters(node.broker)) as connection:
        channel = connection.channel()
        for exchange in (orders, dlx):
            channel.exchange_declare(exchange, "topic", durable=True)
        channel.queue_declare(queue, durable=True, arguments=arguments)
        channel.queue_bind(queue, orders, "order.#")
        channel.queue_declare(dead, durable=True)
        channel.queue_bind(dead, dlx, "order.created")
        channel.confirm_delivery()
        # The last ones have another key than the queue's name, of their own or by CC; none of that window may be moved before they are met.
        for number in range(10):
            headers = {"CC": ["order.created"]} if copied and number > 6 else None
            properties = pika.BasicProperties(delivery_mode=2, headers=headers)
            exchange, key = (orders, "order.created") if not copied and number > 6 else ("", queue)
            channel.basic_publish(exchange, key, b"%d" % number, properties)
    file = tmp_path / "definitions.json"

    def adopted() -> tuple[int, str]:
        exported = json.loads(pair.ctl(primary, "export_definitions", "-"))
        kinds = {"exchanges": "name", "queues": "name", "bindings": "source", "policies": "name"}
        found = {each: [row for row in exported[each] if row[key].endswith(own)] for each, key in kinds.items()}
        file.write_text(json.dumps({"vhosts": [{"name": "/"}], **found}))
        return adopt(file, "--to", node.door)

    def rule(**definition: str) -> None:
        pair.ctl(primary, "set_policy", "-p", "/", f"p-{own}", f"^{queue}$", json.dumps(definition), "--apply-to", "queues")

    if how == "policy":
        rule(**{"dead-letter-exchange": dlx})
    code, said = adopted()
    assert code == 1, said
    assert f"{queue}: 0 of 10 messages adopted, and not all were seen: it dead-letters by routing key" in said, said
    with pika.BlockingConnection(pika.URLParameters(node.broker)) as connection:
        channel = connection.channel()
        eventually("all to be given back", lambda: channel.queue_declare(queue, passive=True).method.message_count == 10)
        met = [channel.basic_get(queue) for _ in range(10)]
    assert [(method.routing_key == queue, int(body)) for method, _, body in met] == [(copied or number <= 6, number) for number in range(10)]
    assert all("x-lrq-pos" not in (properties.headers or {}) for _, properties, _ in met), "as they were"
    all_applied(pair, primary, backup)
    assert depth(pair.nodes[backup].broker, queue) == 0
    rule(**({"dead-letter-exchange": dlx} if how == "policy" else {}), **{"dead-letter-routing-key": "order.created"})
    eventually("the messages to be back", lambda: depth(node.broker, queue) == 10)
    code, said = adopted()
    assert (code, f"{queue}: 10 of 10 messages adopted" in said) == (0, True), said
    with pika.BlockingConnection(pika.URLParameters(node.door)) as connection:
        channel = connection.channel()
        for _ in range(10):
            method, _, _ = channel.basic_get(queue)
            assert method is not None
            channel.basic_reject(method.delivery_tag, requeue=False)
    eventually("the dead letters", lambda: depth(node.broker, dead) == 10)


def test_a_queue_with_a_delivery_limit_and_dead_letters_by_key_is_not_looked_into(pair: Lab, tmp_path: Path) -> None:
    """On RabbitMQ 3.x each look would use up a delivery of what is given back."""
    primary, _ = in_sync(pair)
    node, queue = pair.nodes[primary], f"limited-by-key-{uuid.uuid4().hex[:8]}"
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": 1, "x-dead-letter-exchange": "amq.topic"}
    with pika.BlockingConnection(pika.URLParameters(node.broker)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments=arguments)
        channel.queue_bind(queue, "amq.direct", "other")
        channel.confirm_delivery()
        for number in range(10):
            channel.basic_publish("amq.direct", "other", b"%d" % number, pika.BasicProperties(delivery_mode=2))
    for _ in range(3):
        code, said = adopt(only(queue, arguments, tmp_path), "--to", node.door)
        assert (code, "dead-letters by routing key" in said) == (1, True), said
    eventually("all to be there", lambda: depth(node.broker, queue) == 10)
    with pika.BlockingConnection(pika.URLParameters(node.broker)) as connection:
        channel = connection.channel()
        found = [channel.basic_get(queue) for _ in range(10)]
    assert [int(body) for _, _, body in found] == list(range(10))
    if pair.version.startswith("3"):
        assert {(properties.headers or {}).get("x-delivery-count", 0) for _, properties, _ in found} == {0}


@pytest.mark.one_version("4.3")
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_what_a_full_queue_takes_of_a_window_is_adopted_once(pair: Lab, tmp_path: Path, kind: str) -> None:
    """It holds more than its limit, as a consumer gave back what it held: beside a window it has room for five.

    A quorum queue tells its publishers only a while later that it is full, and may take it all.
    """
    count = WINDOW_MESSAGES + 5
    node, queue = pair.nodes[primary_of(pair)], f"overfull-{kind}-{uuid.uuid4().hex[:8]}"
    arguments = {"x-queue-type": kind, "x-max-length": 10, "x-overflow": "reject-publish"}
    with pika.BlockingConnection(pika.URLParameters(node.broker)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare(queue, durable=True, arguments=arguments)
        for number in range(count):
            while number % 10 == 0 and channel.basic_get(queue)[0] is not None:
                pass
            channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2))
    definitions = tmp_path / "definitions.json"
    one = {"vhost": "/", "name": queue, "durable": True, "auto_delete": False, "arguments": arguments, "type": kind}
    definitions.write_text(json.dumps({"vhosts": [{"name": "/"}], "queues": [one], "exchanges": [], "bindings": [], "policies": []}))
    eventually("all of it to be back", lambda: depth(node.broker, queue) == count)
    code, said = adopt(definitions, "--to", node.door, "--vhost", "/")
    assert (code, "refuses messages" in said) == (1, True) or (kind, code) == ("quorum", 0), said
    eventually("the rest to be back", lambda: depth(node.broker, queue) >= count)
    assert sorted(number for number, _ in drained(node.broker, queue)) == list(range(count))
    all_applied(pair, "e1", "e2")  # what is gone from the queue waits for no room on the backup


@pytest.mark.quick
@pytest.mark.one_version("4.3")
def test_what_is_refused(pair: Lab, tmp_path: Path) -> None:
    door = pair.nodes[primary_of(pair)].door
    bad = tmp_path / "bad.json"
    for text, said in (("{}", "these are not a broker's definitions"), ("nothing", "these are not a broker's definitions")):
        bad.write_text(text)
        code, answer = adopt(bad, "--to", door)
        assert code == 1
        assert said in answer
        assert "rabbitmqctl export_definitions" in answer
    bad.write_text(json.dumps({"vhosts": [{"name": "/"}], "queues": [], "exchanges": [], "bindings": [], "policies": []}))
    code, answer = adopt(bad, "--to", door, "--vhost", "nowhere")
    assert (code, "no vhost nowhere" in answer) == (1, True)
    code, answer = adopt(Path(os.devnull + ".not"), "--to", door)
    assert (code, "cannot be read" in answer) == (1, True)
