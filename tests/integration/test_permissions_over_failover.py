"""Whoever takes over applies the log with rights of its own. So what a client may not publish must not be in it, whenever its own broker dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pika
import pytest
from load import KILLS_MAX, NotInSync, User, add_users, eventually, in_sync, take_over, told, write_down
from pamqp import commands
from raw_client import RawClient, publish

from broker_plugin.amqp import content_header, encode
from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.own_pair("kills"), pytest.mark.proves("permissions")]

MANY = 100  # publishes: more than the entries that a primary adds of its own meanwhile


@dataclass
class Stage:
    """The shared pair, users of its own, and a queue to which every exchange of the test leads."""

    lab: Lab
    primary: str
    backup: str
    mark: str = field(default_factory=lambda: str(time.time_ns()))

    @property
    def queue(self) -> str:
        return f"guarded-{self.mark}"

    @property
    def internal(self) -> str:
        return f"internal-{self.mark}"

    def user(self, what: str) -> str:
        return f"{what}-{self.mark}"

    def set_up(self) -> None:
        for name in (self.primary, self.backup):
            users = [User(self.user(what), "secret", [("/", ".*", writes, ".*")], [("amq.topic", "^may$")] if what == "topics" else [])
                     for what, writes in (("reader", "^$"), ("writer", ".*"), ("topics", "^amq.topic$"))]  # fmt: skip
            add_users(self.lab, name, *users)
            write_down(self.lab, name)
        with pika.BlockingConnection(pika.URLParameters(self.lab.nodes[self.primary].door)) as connection:
            channel = connection.channel()
            channel.queue_declare(self.queue, durable=True)
            channel.exchange_declare(self.internal, "fanout", durable=True, internal=True)
            for exchange in ("amq.fanout", "amq.topic", self.internal):
                channel.queue_bind(self.queue, exchange, "#" if exchange == "amq.topic" else "")
        write_down(self.lab, self.primary, self.backup)

    def client(self, what: str = "") -> RawClient:
        parts = urlsplit(self.lab.nodes[self.primary].door)
        login = f"{self.user(what)}:secret" if what else parts.netloc.rpartition("@")[0]
        return RawClient(parts._replace(netloc=f"{login}@{parts.hostname}:{parts.port}").geturl())

    def tear_down(self) -> None:
        for name in (self.primary, self.backup):
            if self.lab.nodes[name].sidecar_pid is None or self.lab.nodes[name].broker_pid is None:
                self.lab.start(name)


@pytest.fixture
def stage(pair: Lab) -> Iterator[Stage]:
    found = Stage(pair, *in_sync(pair, applied=True))
    found.set_up()
    yield found
    found.tear_down()


def forged(stage: Stage) -> list[tuple[str, bytes]]:
    """What must not come through: who sends it, and the frames of one."""
    queue, other = stage.queue, content_header.properties(user_id=stage.user("reader").encode())
    select, commit = (encode.method_frame(1, method) for method in (commands.Tx.Select(), commands.Tx.Commit()))
    return [
        ("reader", publish(1, queue, b"no right to write")),
        ("reader", publish(1, queue, b"nor to another exchange", exchange="amq.fanout")),
        ("reader", select + publish(1, queue, b"nor as a transaction") + commit),
        ("topics", publish(1, "may not", b"nor with this key", exchange="amq.topic")),
        ("writer", encode.publish_method(1, "", queue) + content(b"nor as somebody else", other)),
        ("writer", encode.publish_method(1, "", queue) + content(b"nor what no broker takes", content_header.properties(expiration=b"1.5"))),
        ("writer", publish(1, queue, b"nor to an internal exchange", exchange=stage.internal)),
    ]


def content(body: bytes, properties: bytes) -> bytes:
    return b"".join(encode.content(1, content_header.header_payload(len(body), properties), body))


def test_what_the_primarys_broker_could_not_refuse_any_more(stage: Stage) -> None:
    """It stands still from before the first of them until it is killed. What a user may publish goes its way meanwhile."""
    for _ in range(KILLS_MAX):
        entries = attempt(stage)
        try:
            take_over(stage.lab, stage.backup, stage.primary)
            break
        except NotInSync:  # the machine has held the backup up: then again
            stage.lab.start(stage.primary)
            assert in_sync(stage.lab, applied=True) == (stage.primary, stage.backup)
    found: list[bytes] = []
    with pika.BlockingConnection(pika.URLParameters(stage.lab.nodes[stage.backup].door)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", stage.queue, b"end")
        while b"end" not in found:
            method, _, body = channel.basic_get(stage.queue, auto_ack=True)
            if method is not None:
                found.append(body)
    assert set(found) <= {b"allowed", b"allowed, too", b"end"}
    assert b"allowed" in found
    assert entries < MANY, "they are in the log"


def attempt(stage: Stage) -> int:
    """The primary's broker stands still, they are sent, and the primary is killed. Returns how many entries the backup has got meanwhile."""
    lab, primary, backup = stage.lab, stage.primary, stage.backup
    with ExitStack() as stack:
        allowed = stack.enter_context(stage.client())
        allowed.open_channel(confirms=True)
        allowed.send(publish(1, stage.queue, b"allowed"))
        assert allowed.confirmed(1) == set()
        clients = [(stack.enter_context(stage.client(who)), blob) for who, blob in forged(stage)]
        for client, _ in clients:
            client.open_channel()
        end = told(lab, backup)["end"]
        lab.stop(f"{primary}.broker")
        try:
            for client, blob in clients:
                client.send(blob * MANY)
            told(lab, primary)  # it has read them when it answers
            allowed.send(publish(1, stage.queue, b"allowed, too"))
            eventually("the backup to have what is allowed", lambda: lab.status(backup)["end"] > end)
            time.sleep(1)  # and whatever else there is
            return int(told(lab, backup)["end"]) - int(end)
        finally:
            lab.kill(primary)
