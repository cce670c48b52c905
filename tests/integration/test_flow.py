"""Alarms of a broker, and what stands still: publishers wait, consumers go on, and when it is over everything goes on by itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pika
import pytest
from load import command, depth, eventually, in_sync, primary_of, told
from pamqp import commands
from pika.exceptions import AMQPConnectionError
from raw_client import RawClient, beating, publish

from broker_plugin.amqp import encode, frames
from lrq_ha.lab import Lab
from lrq_ha.publisher import Publisher

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3")]

COUNT = 300
CONFIRM_S = 240.0
SILENT = "sent nothing for 6 s"


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab({"east": 2}, tmp_path_factory.mktemp("flow"), broker_version) as found:
        yield found


@contextmanager
def alarm(lab: Lab, name: str, kind: str) -> Iterator[None]:
    """A memory or disk alarm of one broker."""
    on, off = {
        "memory": (("set_vm_memory_high_watermark", "0.0000001"), ("set_vm_memory_high_watermark", "0.6")),
        "disk": (("set_disk_free_limit", "999999999999999"), ("set_disk_free_limit", "10MB")),
    }[kind]
    lab.ctl(name, *on)
    eventually("the alarm", lambda: "alarm" in lab.ctl(name, "status").lower().replace("alarms\n\n(none)", ""))
    try:
        yield
    finally:
        lab.ctl(name, *off)


class Consumer:
    """Acks everything that comes, but rejects each tenth, on a connection that publishes nothing."""

    def __init__(self, url: str, queue: str, prefetch: int = 10) -> None:
        self.got: list[int] = []
        self._url, self._queue, self._prefetch = url, queue, prefetch
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=self._prefetch)
            for method, _, body in channel.consume(self._queue, inactivity_timeout=0.1):
                if self._stop.is_set():
                    return
                if method is not None:
                    self.got.append(int(body))
                    if len(self.got) % 10:
                        channel.basic_ack(method.delivery_tag)
                    else:
                        channel.basic_reject(method.delivery_tag, requeue=False)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)


def filled(lab: Lab, primary: str) -> str:
    """A queue with COUNT messages."""
    queue = f"flow-{time.time_ns()}"
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True)
        channel.confirm_delivery()
        for i in range(COUNT):
            channel.basic_publish("", queue, b"%d" % i)
    return queue


def empty_everywhere(lab: Lab, queue: str) -> Callable[[], bool]:
    def check() -> bool:
        for node in lab.nodes.values():
            with pika.BlockingConnection(pika.URLParameters(node.broker)) as connection:
                if connection.channel().queue_declare(queue, passive=True).method.message_count:
                    return False
        return True

    return check


def test_a_sidecar_that_starts_in_an_alarm_says_that_it_waits(lab: Lab, names: tuple[str, str]) -> None:
    """It said "starting", or the reason of the incarnation before, for as long as the alarm lasted."""
    _, backup = names
    words = "and until that alarm is over it cannot start, and serves no client"
    lab.kill(f"{backup}.sidecar")
    with alarm(lab, backup, "disk"):
        lab.start(f"{backup}.sidecar")
        eventually("its reason", lambda: words in lab.status(backup)["reason"])
        assert "its broker takes nothing for the log (low on disk)" in lab.status(backup)["reason"]
        assert words in command("list", lab=lab)[1]
        code, said = command("reinit", backup, "--discard", lab=lab)
        assert (code, words in said) == (1, True), said
        with pytest.raises(AMQPConnectionError, match=words):
            pika.BlockingConnection(pika.URLParameters(lab.nodes[backup].door))
        assert words in lab.nodes[backup].log.read_text()
    assert in_sync(lab) == names


@pytest.mark.quick(only="memory")
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_consumers_go_on_while_the_primarys_broker_has_an_alarm(
    lab: Lab, names: tuple[str, str], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Far more than their prefetch: their acks reach the broker. A publisher is told that it is blocked, and loses nothing.

    The broker blocks the log, or, if the door has to ask for a permission first, the question.
    """
    primary, _ = names
    queue = filled(lab, primary)
    pid = lab.nodes[primary].sidecar_pid
    publisher = Publisher([lab.nodes[n].door for n in lab.nodes], f"flow-{time.time_ns()}", confirm_timeout_s=CONFIRM_S)
    clients = ExitStack()
    try:
        with alarm(lab, primary, kind):
            confirms = [publisher.publish("", queue, b"%d" % (COUNT + i)) for i in range(50)]
            eventually("the publisher to be told", lambda: f"blocks publishing low on {kind}" in caplog.text)
            blocked = clients.enter_context(RawClient(lab.nodes[primary].door, properties={}))
            blocked.open_channel(confirms=True)
            blocked.send(publish(1, queue, b"%d" % (COUNT + 50)))
            consumer = Consumer(lab.nodes[primary].door, queue)
            clients.callback(consumer.stop)
            eventually(f"all of {COUNT}", lambda: len(consumer.got) >= COUNT)
            assert consumer.got[:COUNT] == list(range(COUNT))
            assert not any(confirm.done for confirm in confirms[-10:])
        eventually("the publisher's", lambda: all(confirm.done for confirm in confirms))
        assert [confirm.error for confirm in confirms if confirm.error] == []
        assert blocked.confirmed(1) == set()
        eventually("the rest", lambda: set(consumer.got) >= set(range(COUNT + 51)))
        consumer.stop()
        assert len(set(consumer.got)) == len(consumer.got), "nothing came twice"
    finally:
        clients.close()
        publisher.close()
    eventually("both brokers' queues empty", empty_everywhere(lab, queue))
    assert lab.nodes[primary].sidecar_pid == pid
    assert primary_of(lab) == primary


def nothing_is_logged(lab: Lab, primary: str, seconds: float = 5.0) -> None:
    """Returns when the log has not grown for so long: all that the primary tells by itself has been told."""
    ends = [told(lab, primary)["end"]]
    since = time.monotonic()

    def quiet() -> bool:
        nonlocal since
        ends.append(told(lab, primary)["end"])
        if ends[-1] != ends[-2]:
            since = time.monotonic()
        return time.monotonic() - since > seconds

    eventually("the log to be quiet", quiet)


@pytest.mark.parametrize("at_once", [True, False])
def test_who_declares_in_an_alarm_holds_up_no_consumer(lab: Lab, names: tuple[str, str], at_once: bool) -> None:
    """Behind a publish that is in no log, so that only this connection is blocked: the broker reads the declaration when the alarm is over. At once:
    in one write with that publish, before the broker has said anything. Everybody else declared, acknowledged and published nothing until then."""
    primary, backup = names
    queue, new, run = filled(lab, primary), f"flow-new-{time.time_ns()}", time.time_ns()
    declare = encode.method_frame(1, commands.Queue.Declare(queue=new, durable=True))
    with RawClient(lab.nodes[primary].door, properties={}) as client, RawClient(lab.nodes[primary].door) as other, ExitStack() as clients:
        for each in (client, other):
            each.open_channel(confirms=True)
        none = commands.Queue.Declare(queue=f"flow-none-{run}", durable=True, arguments={"x-lrq-replicate": "none"})
        client.call(1, none, frames.QUEUE_DECLARE_OK)
        nothing_is_logged(lab, primary)
        with alarm(lab, primary, "memory"):
            if at_once:
                client.send(publish(1, none.queue, b"x") + declare)
            else:
                client.send(publish(1, none.queue, b"x"))
                client.expect(frames.CONNECTION_BLOCKED)
                client.send(declare)
            time.sleep(1)
            consumer = Consumer(lab.nodes[primary].door, queue)
            clients.callback(consumer.stop)
            eventually(f"all of {COUNT}", lambda: len(consumer.got) >= COUNT, seen=lambda: len(consumer.got))
            other.send(publish(1, queue, b"%d" % COUNT))
        client.expect(frames.QUEUE_DECLARE_OK)
        assert other.confirmed(1) == set()
        eventually("the rest", lambda: set(consumer.got) == set(range(COUNT + 1)))
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[primary].door)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", new, b"x")
    eventually("it on the backup", lambda: depth(lab.nodes[backup].broker, new) == 1)


@pytest.mark.quick
def test_a_client_that_publishes_is_told_that_it_is_blocked(lab: Lab, names: tuple[str, str]) -> None:
    primary, _ = names
    queue = filled(lab, primary)
    with RawClient(lab.nodes[primary].door, login=False) as client:
        client.send(frames.PROTOCOL_HEADER)
        client.expect(frames.CONNECTION_START)
        client.send(client.start_ok({"capabilities": {"connection.blocked": True, "basic.nack": True}}))
        client.expect(frames.CONNECTION_TUNE)
        client.send(encode.method_frame(0, commands.Connection.TuneOk(2047, 131_072, 0)) + encode.method_frame(0, commands.Connection.Open("/")))
        client.expect(frames.CONNECTION_OPEN_OK)
        client.open_channel(confirms=True)
        with alarm(lab, primary, "memory"):
            client.send(publish(1, queue, b"1") * 3)
            client.expect(frames.CONNECTION_BLOCKED)
        assert client.confirmed(3) == set()
        eventually("the end of it", lambda: frames.CONNECTION_UNBLOCKED in [kind for kind, *_ in client.got] or not client.read(1))
        heard = [kind for kind, *_ in client.got if kind in (frames.CONNECTION_BLOCKED, frames.CONNECTION_UNBLOCKED)]
        assert heard == [frames.CONNECTION_BLOCKED, frames.CONNECTION_UNBLOCKED]


def test_an_alarm_on_the_backup_costs_its_place_in_the_set_and_nothing_else(lab: Lab, names: tuple[str, str]) -> None:
    primary, backup = names
    queue = filled(lab, primary)
    publisher = Publisher([lab.nodes[n].door for n in lab.nodes], f"flow-{time.time_ns()}", confirm_timeout_s=CONFIRM_S)
    try:
        with alarm(lab, backup, "memory"):
            consumer = Consumer(lab.nodes[primary].door, queue)
            confirms = [publisher.publish("", queue, b"%d" % (COUNT + i)) for i in range(200)]
            eventually("confirms without it", lambda: all(confirm.done for confirm in confirms))
            eventually("all", lambda: len(consumer.got) >= COUNT + 200)
        assert [confirm.error for confirm in confirms if confirm.error] == []
        in_sync(lab)
        consumer.stop()
        assert consumer.got == list(range(COUNT + 200))
    finally:
        publisher.close()
    eventually("both brokers' queues empty", empty_everywhere(lab, queue))


def test_a_client_that_stands_still_is_noticed_by_its_heartbeats(lab: Lab, names: tuple[str, str]) -> None:
    primary, _ = names
    with RawClient(lab.nodes[primary].door, heartbeat_s=3) as client:
        client.open_channel()
        began, said_before = time.monotonic(), lab.nodes[primary].log.read_text().count(SILENT)
        eventually("the door to give it up", lambda: lab.nodes[primary].log.read_text().count(SILENT) > said_before)
        assert time.monotonic() - began > 1.5
        assert client.closed()


def test_a_broker_that_stands_still_is_noticed_by_its_heartbeats(lab: Lab, names: tuple[str, str]) -> None:
    """Long before the sidecar's own connections notice it."""
    primary, _ = names
    pid = lab.nodes[primary].broker_pid
    assert pid is not None
    with RawClient(lab.nodes[primary].door, heartbeat_s=8) as client:
        client.open_channel()
        with beating(client):
            try:
                os.kill(pid, signal.SIGSTOP)
                assert client.closed()
            finally:
                os.kill(pid, signal.SIGCONT)
        closes = [payload for kind, _, payload in client.got if kind == frames.CONNECTION_CLOSE]
        assert closes
        assert b"silent" in closes[0]

    def usable() -> bool:
        node: Any = lab.primary("east")
        with pika.BlockingConnection(pika.URLParameters(lab.nodes[node].door)) as connection:
            return bool(connection.channel().queue_declare("", exclusive=True).method.queue)

    eventually("the door to serve again", usable)
