"""Interceptors in a sidecar beside a real broker: what they are told, what they may refuse, and that none of them breaks a client's stream."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pika
import pytest
from load import eventually
from pamqp import commands
from pika.exceptions import ChannelClosedByBroker, NackError, UnroutableError
from raw_client import RawClient, publish
from sidecar_process import Sidecar

from broker_plugin.amqp import content_header, encode, frames
from lrq_ha.lab import Lab
from lrq_ha.publisher import NackedError, Publisher

sys.path.append(str(Path(__file__).parents[1] / "plugins"))
from installed import install

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3")]

GATES = """
[interceptors.gate-a]
priority = 20
options = { word = "forbidden" }
[interceptors.gate-z]
priority = 10
options = { word = "forbidden-by-z" }
"""


class Watched:
    """A sidecar with interceptors, and what they wrote."""

    def __init__(self, lab: Lab, sidecar: Sidecar, folder: Path) -> None:
        self.sidecar, self.folder = sidecar, folder
        app = urlsplit(lab.nodes["e1"].door)
        self.url = f"amqp://{app.username}:{app.password}@{sidecar.door}/%2F"
        self.user = str(app.username)
        self.lrq_url = self.url.removesuffix("%2F")

    @contextmanager
    def channel(self, *, confirms: bool = False) -> Iterator[Any]:
        connection = pika.BlockingConnection(pika.URLParameters(self.url))
        try:
            channel = connection.channel()
            if confirms:
                channel.confirm_delivery()
            yield channel
        finally:
            if connection.is_open:
                connection.close()

    def queue(self, **options: Any) -> str:
        name = f"watched-{uuid.uuid4().hex[:10]}"
        with self.channel() as channel:
            channel.queue_declare(name, durable=True, **options)
        return name

    def _lines(self, name: str, key: str) -> list[dict[str, Any]]:
        lines = (self.folder / name).read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines if key in line]

    def told(self, key: str) -> list[dict[str, Any]]:
        """What the recorder was told that names `key`, in order."""
        return self._lines("recorded.jsonl", key)

    def points(self, key: str) -> list[str]:
        return [event["point"] for event in self.told(key)]

    def expect(self, key: str, points: list[str]) -> list[dict[str, Any]]:
        """Waits until exactly these points were told, and returns the events. `rejected` and `dequeue` follow when the log is safe so far."""
        eventually(f"{points}", lambda: len(self.points(key)) >= len(points))
        assert self.points(key) == points
        return self.told(key)

    def audit(self, key: str, count: int) -> list[dict[str, Any]]:
        eventually(f"{count} lines of the audit trail", lambda: len(self._lines("audit.jsonl", key)) >= count)
        found = self._lines("audit.jsonl", key)
        assert len(found) == count
        return found

    def of(self, name: str) -> dict[str, Any]:
        """What /status tells of an interceptor."""
        found: dict[str, Any] = self.sidecar.answered()["interceptors"][name]
        return found


@contextmanager
def started(lab: Lab, folder: Path, interceptors: str) -> Iterator[Watched]:
    site = folder if (folder / "lrq_test_interceptors.py").exists() else install(folder)
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
            sidecar = stack.enter_context(Sidecar(lab, folder, f"watched-{uuid.uuid4().hex[:8]}", more=interceptors))
        sidecar.becomes("active")
        yield Watched(lab, sidecar, folder)


@pytest.fixture(scope="module")
def watched(brokers: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    more = f'{GATES}[interceptors.recorder.options]\npath = "{folder}/recorded.jsonl"\n[interceptors.audit.options]\npath = "{folder}/audit.jsonl"\n'
    with started(brokers, folder, more) as running:
        yield running


PUBLISHED = ["routing", "enqueue", "routed"]


# -- what is told


@pytest.mark.quick
def test_a_message_from_its_publish_to_its_ack(watched: Watched) -> None:
    queue = watched.queue()
    with watched.channel(confirms=True) as channel:
        channel.basic_publish("", queue, b"12345", pika.BasicProperties(priority=7))
        method, _, _ = channel.basic_get(queue)
        watched.expect(queue, ["topology", *PUBLISHED, "acquire"])
        channel.basic_ack(method.delivery_tag)
        topology, routing, enqueue, routed, acquire, accept, dequeue = watched.expect(
            queue, ["topology", *PUBLISHED, "acquire", "accept", "dequeue"]
        )
    assert topology["operation"] == "queue.declare"
    assert topology["replicated"] is True
    assert topology["arguments"]["queue"] == queue
    assert routing["client"]["user"] == watched.user
    assert routing["client"]["vhost"] == "/"
    assert routing["client"]["address"].startswith("127.0.0.1:")
    for event in (routing, enqueue, routed):
        message = event["message"]
        assert (message["exchange"], message["routing_key"], message["size_bytes"], message["priority"]) == ("", queue, 5, 7)
    assert routing["message"]["position"] is None
    assert enqueue["message"]["position"] == routed["message"]["position"] == acquire["delivery"]["message"]["position"]
    assert routed["outcome"] == "ACCEPTED"
    assert enqueue["queue"] == queue
    delivery = acquire["delivery"]
    assert (delivery["queue"], delivery["message"]["size_bytes"], delivery["redelivered"]) == (queue, 5, False)
    assert accept["automatic"] is False
    assert dequeue["delivery"] == accept["delivery"] == delivery
    assert routing["time"] <= enqueue["time"] <= routed["time"] <= acquire["time"] <= accept["time"] <= dequeue["time"]


def test_consumers(watched: Watched) -> None:
    queue = watched.queue()
    with watched.channel(confirms=True) as channel:
        got: list[int] = []
        tag = channel.basic_consume(queue, lambda _c, m, _p, _b: got.append(m.delivery_tag))
        for _ in range(4):
            channel.basic_publish("", queue, b"x")
        while len(got) < 4:
            channel.connection.process_data_events(0.1)
        channel.basic_ack(got[1], multiple=True)
        channel.basic_nack(got[2], requeue=False)
        channel.basic_cancel(tag)
        again = watched.queue()
        cancelled: list[str] = []
        channel.add_on_cancel_callback(lambda frame: cancelled.append(frame.method.consumer_tag))
        ended = channel.basic_consume(again, lambda *_: None)
        channel.queue_delete(again)
        eventually("the broker's cancel", lambda: (channel.connection.process_data_events(0.05), cancelled == [ended])[1])
    eventually("the release at the connection's end", lambda: "release" in watched.points(queue))
    events = [event for event in watched.told(queue) if event["point"] not in (*PUBLISHED, "topology", "acquire")]
    assert [event["point"] for event in events if event["point"] not in ("dequeue", "rejected")] == [
        "consume",
        "accept",
        "accept",
        "reject",
        "cancel",
        "release",
    ]
    assert (events[0]["queue"], events[0]["consumer_tag"], events[0]["no_ack"]) == (queue, tag, False)
    assert next(event for event in events if event["point"] == "cancel")["cause"] == "CLIENT"
    assert events[-1]["cause"] in ("CHANNEL", "CONNECTION")
    safe = [(event["point"], event["delivery"]["delivery_tag"]) for event in events if event["point"] in ("dequeue", "rejected")]
    assert safe == [("dequeue", got[0]), ("dequeue", got[1]), ("rejected", got[2]), ("dequeue", got[2])]
    eventually("the cancel and the deletion", lambda: len(watched.told(again)) >= 4)
    assert sorted(watched.points(again)) == ["cancel", "consume", "topology", "topology"]
    assert [event["cause"] for event in watched.told(again) if event["point"] == "cancel"] == ["BROKER"]


def test_a_consumer_without_acks_and_messages_given_back(watched: Watched) -> None:
    queue = watched.queue()
    with watched.channel(confirms=True) as channel:
        channel.basic_publish("", queue, b"x")
        method, _, _ = channel.basic_get(queue)
        channel.basic_reject(method.delivery_tag, requeue=True)
        method, _, _ = channel.basic_get(queue)
        channel.basic_recover(requeue=True)
        channel.basic_get(queue, auto_ack=True)
        events = watched.expect(
            queue, ["topology", *PUBLISHED, "acquire", "release", "acquire", "release", "acquire", "accept", "dequeue"]
        )
    assert [event["cause"] for event in events if event["point"] == "release"] == ["CLIENT", "RECOVER"]
    assert events[-2]["automatic"] is True
    assert events[-3]["delivery"]["redelivered"] is True


@pytest.mark.quick
def test_outcomes_of_publishes(watched: Watched) -> None:
    full = watched.queue(arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    nowhere = f"nowhere-{uuid.uuid4().hex[:8]}"
    with watched.channel(confirms=True) as channel:
        channel.basic_publish("", full, b"fits")
        fill = iter(range(10))
        with pytest.raises(NackError):
            all(channel.basic_publish("", full, b"does not") is None for _ in fill)
        with pytest.raises(UnroutableError):
            channel.basic_publish("", nowhere, b"x", mandatory=True)
        own = channel.queue_declare("", exclusive=True).method.queue
        channel.basic_publish("", own, b"not replicated")
        with pytest.raises(ChannelClosedByBroker):
            channel.basic_publish(f"no-exchange-{full}", full, b"x")
    eventually("the last word", lambda: [e["outcome"] for e in watched.told(f"no-exchange-{full}") if e["point"] == "routed"] == ["REFUSED"])
    assert [e["outcome"] for e in watched.told(full) if e["point"] == "routed"][-2:] == ["NACKED", "REFUSED"]
    assert "NOT_FOUND" in watched.told(f"no-exchange-{full}")[-1]["reason"]
    assert [e["outcome"] for e in watched.expect(nowhere, PUBLISHED) if e["point"] == "routed"] == ["UNROUTABLE"]
    assert [e["outcome"] for e in watched.told(own) if e["point"] == "routed"] == ["PASSED"]
    assert [e["replicated"] for e in watched.told(own) if e["point"] == "topology"] in ([], [False])


def test_a_repeat_and_a_log_entry_for_other_sites(watched: Watched) -> None:
    queue = watched.queue()
    producer = f"p-{uuid.uuid4().hex[:8]}"
    with RawClient(watched.url, properties={"lrq_producer": producer}) as client:
        client.open_channel(confirms=True)
        data = publish(1, queue, b"once", fields=content_header.field(b"x-lrq-id", f"{producer}/1".encode()))
        client.send(data + data)
        client.confirmed(2)
        events = watched.expect(f'"routing_key": "{queue}"', ["routing", "routing", "enqueue", "routed", "routed"])
    assert {event["message"]["replication_id"] for event in events} == {f"{producer}/1"}
    assert sorted(event["outcome"] for event in events if event["point"] == "routed") == ["ACCEPTED", "REPEAT"]
    with RawClient(watched.url, vhost="lrq", properties={"lrq_producer": producer}) as client:
        client.open_channel(confirms=True)
        client.send(publish(1, "LRQ_Nothing", b"x"))
        assert b"takes no messages" in client.expect(frames.CHANNEL_CLOSE)
    (_, refused) = watched.expect('"LRQ_Nothing"', ["routing", "routed"])
    assert (refused["outcome"], refused["client"]["vhost"], refused["client"]["producer"]) == ("REFUSED", "lrq", producer)
    assert "takes no messages" in refused["reason"]


def test_transactions(watched: Watched) -> None:
    queue = watched.queue()
    with watched.channel() as channel:
        channel.tx_select()
        channel.basic_publish("", queue, b"rolled back")
        channel.tx_rollback()
        channel.basic_publish("", queue, b"committed")
        channel.tx_commit()
        watched.expect(queue, ["topology", "routing", "routing", "enqueue", "routed"])
        method, _, _ = channel.basic_get(queue)
        channel.basic_ack(method.delivery_tag)
        channel.tx_rollback()
        channel.basic_ack(method.delivery_tag)
        channel.tx_commit()
        events = watched.expect(queue, ["topology", "routing", "routing", "enqueue", "routed", "acquire", "accept", "dequeue"])
        number = events[1]["client"]["number"]
    steps = [event["step"] for event in watched.told(f'"number": {number}}}') if event["point"] == "transaction"]
    assert steps == ["SELECT", "ROLLED_BACK", "COMMIT", "COMMITTED", "ROLLED_BACK", "COMMIT", "COMMITTED"]


def test_declarations(watched: Watched) -> None:
    queue = watched.queue()
    with watched.channel() as channel:
        exchange = f"x-{queue}"
        channel.queue_declare(queue, durable=True)  # the log knows it
        channel.queue_declare(queue, passive=True)  # a question
        channel.exchange_declare(exchange, "fanout")
        channel.queue_bind(queue, exchange)
        channel.basic_publish(exchange, "", b"x")
        channel.queue_purge(queue)
        channel.queue_unbind(queue, exchange)
        channel.exchange_delete(exchange)
        channel.queue_delete(queue)
        own = channel.queue_declare("", exclusive=True).method.queue
        channel.queue_bind(own, "amq.fanout")
    eventually("the last", lambda: bool(watched.told(own)))
    told = [(event["operation"], event["replicated"]) for event in watched.told(queue) if event["point"] == "topology"]
    assert told == [
        ("queue.declare", True),
        ("queue.declare", False),
        ("exchange.declare", True),
        ("queue.bind", True),
        ("queue.purge", True),
        ("queue.unbind", True),
        ("exchange.delete", True),
        ("queue.delete", True),
    ]
    assert [event["operation"] for event in watched.told(own)] == ["queue.bind"]


def test_large_messages_in_many_frames(watched: Watched) -> None:
    """A content that comes in pieces is told as one that comes whole, and can be refused."""
    queue = watched.queue()
    body = b"z" * 3_000_000
    with watched.channel(confirms=True) as channel:
        channel.basic_publish("", queue, body)
        assert channel.basic_get(queue, auto_ack=True)[2] == body
        events = watched.expect(queue, ["topology", *PUBLISHED, "acquire", "accept", "dequeue"])
        with pytest.raises(ChannelClosedByBroker, match="no forbidden here"):
            channel.basic_publish("", queue, body + b"forbidden")
    assert {event["message"]["size_bytes"] for event in events if "message" in event} == {len(body)}


# -- what is refused


def test_a_refusal_comes_after_what_was_published_before(watched: Watched) -> None:
    queue = watched.queue()
    bodies = [b"%d" % i for i in range(50)]
    with RawClient(watched.url) as client:
        client.open_channel(confirms=True)
        client.send(b"".join(publish(1, queue, body) for body in [*bodies, b"forbidden", b"after"]))
        assert b"ACCESS_REFUSED - interceptor 'gate-a': no forbidden here" in client.expect(frames.CHANNEL_CLOSE)
        client.send(encode.method_frame(1, commands.Channel.CloseOk()))
        client.open_channel(1, confirms=True)
        client.send(publish(1, queue, b"next"))
        client.confirmed(1)
    with watched.channel() as channel:
        got = [channel.basic_get(queue, auto_ack=True)[2] for _ in range(len(bodies) + 1)]
        assert channel.basic_get(queue)[0] is None
    assert got == [*bodies, b"next"]
    refused = [event for event in watched.told(queue) if event.get("outcome") == "REFUSED"]
    assert [event["reason"] for event in refused] == ["gate-a: no forbidden here"]


def test_a_publisher_is_told_of_the_one_and_brings_the_others(watched: Watched) -> None:
    queue = watched.queue()
    with Publisher([watched.lrq_url], producer=f"p-{uuid.uuid4().hex[:8]}", client_name="test") as publisher:
        confirms = [publisher.publish("", queue, body) for body in (b"1", b"2", b"forbidden", b"3", b"4")]
        with pytest.raises(NackedError, match="no forbidden here"):
            confirms[2].result(60)
        for confirm in confirms[:2] + confirms[3:]:
            confirm.result(60)
    with watched.channel() as channel:
        assert sorted(channel.basic_get(queue, auto_ack=True)[2] for _ in range(4)) == [b"1", b"2", b"3", b"4"]
        assert channel.basic_get(queue)[0] is None


def test_the_lowest_priority_is_asked_first(watched: Watched) -> None:
    for key, name in (("forbidden-by-z", "gate-z"), ("forbidden-by-a", "gate-a")):
        with watched.channel(confirms=True) as channel, pytest.raises(ChannelClosedByBroker, match=f"interceptor '{name}'"):
            channel.basic_publish("", key, b"x")
    assert list(watched.sidecar.answered()["interceptors"]) == ["gate-z", "gate-a", "audit", "recorder"]


def test_a_refusal_within_a_transaction(watched: Watched) -> None:
    """Refused when it comes; nothing of the transaction is done, and what comes after it on the channel is dropped."""
    queue = watched.queue()
    with RawClient(watched.url) as client:
        client.open_channel()
        client.call(1, commands.Tx.Select(), frames.TX_SELECT_OK)
        client.send(b"".join(publish(1, queue, body) for body in (b"in it", b"forbidden", b"after")))
        client.send(publish(1, queue, b"later"))
        assert b"gate-a" in client.expect(frames.CHANNEL_CLOSE)
        client.send(publish(1, queue, b"later still") + encode.method_frame(1, commands.Channel.CloseOk()))
        client.open_channel(1)
    with watched.channel() as channel:
        assert channel.basic_get(queue)[0] is None
    assert "enqueue" not in watched.points(queue)


# -- the audit trail


@pytest.mark.quick
def test_the_audit_trail(watched: Watched) -> None:
    queue = watched.queue()
    with watched.channel(confirms=True) as channel:
        channel.basic_publish("", queue, b"12345", pika.BasicProperties(headers={"secret": "of-headers"}))
        channel.basic_publish("", queue, b"678")
        method, _, _ = channel.basic_get(queue)
        channel.basic_ack(method.delivery_tag)
        method, _, _ = channel.basic_get(queue)
        channel.basic_reject(method.delivery_tag, requeue=False)
        with pytest.raises(ChannelClosedByBroker):
            channel.basic_publish("", queue, b"forbidden")
    lines = watched.audit(queue, 5)
    assert [(line["what"], line["outcome"], line["bytes"]) for line in lines] == [
        ("publish", "accepted", 5),
        ("publish", "accepted", 3),
        ("take", "accept", 5),
        ("take", "reject", 3),
        ("publish", "refused", 9),
    ]
    for line in lines:
        assert (line["user"], line["vhost"], line["exchange"], line["routing_key"], line["queues"]) == (watched.user, "/", "", queue, [queue])
        assert line["address"].startswith("127.0.0.1:")
        assert line["time"].endswith("+00:00")
    assert lines[0]["position"] == lines[2]["position"] != lines[1]["position"] == lines[3]["position"]
    assert "gate-a" in lines[4]["reason"]
    text = (watched.folder / "audit.jsonl").read_text()
    assert "of-headers" not in text
    assert "12345" not in text


def test_the_audit_trail_is_opened_again(watched: Watched) -> None:
    queue = watched.queue()
    file, old = watched.folder / "audit.jsonl", watched.folder / "audit.jsonl.1"
    with watched.channel(confirms=True) as channel:
        channel.basic_publish("", queue, b"before")
        watched.audit(queue, 1)
        file.rename(old)
        watched.sidecar.process.send_signal(signal.SIGHUP)
        eventually("the new file", file.exists)
        channel.basic_publish("", queue, b"after!!")
        assert [line["bytes"] for line in watched.audit(queue, 1)] == [7]
    assert len([line for line in old.read_text().splitlines() if queue in line]) == 1


# -- what goes wrong


def publish_all(watched: Watched, queue: str, count: int) -> None:
    with watched.channel(confirms=True) as channel:
        for i in range(count):
            channel.basic_publish("", queue, b"%d" % i)
        assert [channel.basic_get(queue, auto_ack=True)[2] for _ in range(count)] == [b"%d" % i for i in range(count)]


def test_one_that_fails_is_named_and_switched_off(brokers: Lab, tmp_path: Path) -> None:
    """Its errors' texts are in no log: the sidecar's output is searched for them at the end."""
    with started(brokers, tmp_path, "[interceptors.failing]\nerrors_max = 5\n") as watched:
        queue = watched.queue()
        with watched.channel(confirms=True) as channel:
            channel.basic_publish("", queue, b"1")
            eventually("its errors", lambda: watched.of("failing")["errors"] >= 2)
            assert watched.of("failing")["off"] == ""
            channel.basic_get(queue, auto_ack=True)
        publish_all(watched, queue, 10)
        status = watched.of("failing")
        assert "5 times in a row" in status["off"]
        assert status["errors"] <= 10
        said = watched.sidecar.said()
        assert "interceptor failing, routing: errors: ValueError at runner.py:" in said
        assert "interceptor failing, enqueue: errors: KeyError at " in said
        assert said.count("interceptor failing, routing: errors") == 1
        assert "interceptor failing is switched off" in said


def test_one_that_is_slow_loses_events_and_no_client_waits(brokers: Lab, tmp_path: Path) -> None:
    more = "[interceptors.slow]\nbuffer_bytes_max = 2048\noptions = { seconds = 0.15 }\n"
    with started(brokers, tmp_path, more) as watched:
        queue = watched.queue()
        with RawClient(watched.url) as client:
            client.open_channel(confirms=True)
            client.send(b"".join(publish(1, queue, b"%d" % i) for i in range(30)))  # at once: however slow the machine, it is slower
            assert client.confirmed(30) == set()
        status = watched.of("slow")
        assert status["dropped"] > 0
        assert status["events"] + status["waiting"] + status["dropped"] <= 31
        eventually("a slow call", lambda: watched.of("slow")["slow"] > 0)
        assert status["off"] == ""
        assert "interceptor slow, enqueue: dropped" in watched.sidecar.said()


def test_one_that_is_waited_for_is_told_everything(brokers: Lab, tmp_path: Path) -> None:
    told = tmp_path / "told"
    more = f'[interceptors.slow]\non_overflow = "wait"\nbuffer_bytes_max = 4096\noptions = {{ seconds = 0.005, path = "{told}" }}\n'
    count = 300
    with started(brokers, tmp_path, more) as watched:
        queue = watched.queue()
        with RawClient(watched.url) as client:
            client.open_channel(confirms=True)
            for i in range(count):
                client.send(publish(1, queue, b"%d" % i))
            assert client.confirmed(count) == set()
        watched.sidecar.process.terminate()
        watched.sidecar.process.wait(240)
        assert "clients wait for it" in watched.sidecar.said()
    assert told.read_text() == str(count)


def test_one_that_hangs_is_not_waited_for_for_ever(brokers: Lab, tmp_path: Path) -> None:
    more = '[interceptors.slow]\non_overflow = "wait"\nwait_max_s = 1.0\nbuffer_bytes_max = 4096\noptions = { hang_at = 3 }\n'
    with started(brokers, tmp_path, more) as watched:
        publish_all(watched, watched.queue(), 30)
        assert "it has finished nothing for 1 s while clients waited" in watched.of("slow")["off"]


def test_a_question_that_is_never_answered_is_ended(brokers: Lab, tmp_path: Path) -> None:
    """The door runs on, is named by nobody else, and what was asked about is published."""
    with started(brokers, tmp_path, "[interceptors.hanging]\nerrors_max = 2\n") as watched:
        queue = watched.queue()
        with watched.channel(confirms=True) as channel:
            for body in (b"sleeps 1", b"x 2", b"computes 3", b"waits 4", b"reads 5"):
                channel.basic_publish("", queue, body)
            assert channel.queue_declare(queue, passive=True).method.message_count == 5
        told = watched.of("hanging")
        assert told["slow"] == 3
        assert "had not returned after 1 s" in told["off"]
        watched.sidecar.process.terminate()
        assert watched.sidecar.process.wait(240) == 0
        assert "interceptor hanging is switched off" in watched.sidecar.said()
        assert "Traceback" not in watched.sidecar.said()


def test_one_that_does_not_start_ends_the_start(brokers: Lab, tmp_path: Path) -> None:
    more = f'[interceptors.audit.options]\npath = "{tmp_path}/no/such/folder"\n'
    with Sidecar(brokers, tmp_path, "watched-none", more=more) as sidecar:
        assert "interceptors.audit does not start: [Errno 2] No such file" in sidecar.ends()


def test_thousands_of_messages_keep_their_order(watched: Watched) -> None:
    """Through the points, a stream is what it is without them."""
    queue, count = watched.queue(), 3_000
    began = time.monotonic()
    with RawClient(watched.url) as client:
        client.open_channel(confirms=True)
        client.send(b"".join(publish(1, queue, b"%d" % i) for i in range(count)))
        assert client.confirmed(count) == set()
    got: list[bytes] = []
    with watched.channel() as channel:
        for _, _, body in channel.consume(queue, auto_ack=True, inactivity_timeout=1):
            if body is not None:
                got.append(body)
            if len(got) == count or time.monotonic() - began > 240:
                break
    assert got == [b"%d" % i for i in range(count)]

    def all_told() -> bool:
        points = watched.points(queue)
        return all(points.count(point) == count for point in (*PUBLISHED, "acquire", "accept", "dequeue"))

    eventually("every event", all_told)
    assert watched.of("recorder")["dropped"] == 0


