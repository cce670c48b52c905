"""A user whom the broker lets read and not write: what it publishes through the door is refused in the broker's words, and reaches nobody.

In a transaction nothing of it is in the log. Otherwise the broker is asked when it is in the log already; then its refusal is there, too.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from door_rig import Rig
from load import told
from pamqp import commands
from talk import Talk

pytestmark = pytest.mark.broker

Q, Tx = commands.Queue, commands.Tx
MANY = 100  # publishes: more than the entries that a primary adds of its own meanwhile


@pytest.fixture
def reader(rig: Rig) -> Iterator[Callable[[str], str]]:
    """An address with the login of a user who may do anything but write."""
    name = rig.name("reader")
    rig.lab.ctl(rig.primary, "add_user", name, "secret")
    rig.lab.ctl(rig.primary, "set_permissions", name, ".*", "^$", ".*")

    def login(url: str) -> str:
        parts = urlsplit(url)
        return parts._replace(netloc=f"{name}:secret@{parts.hostname}:{parts.port}").geturl()

    yield login
    rig.lab.ctl(rig.primary, "delete_user", name)


def plain(t: Talk, queue: str) -> None:
    for confirms in (False, True):
        for exchange in ("", "amq.fanout", "amq.topic"):
            for mandatory in (False, True):
                t.open(confirms=confirms)
                t.publish(queue, b"not allowed", exchange=exchange, mandatory=mandatory)
                t.publish(queue, b"nor this", exchange=exchange, mandatory=mandatory)
                assert t.hear() is None


def in_a_transaction(t: Talk, queue: str) -> None:
    for exchange in ("", "amq.fanout"):
        for mandatory in (False, True):
            t.open()
            t.do(Tx.Select())
            for _ in range(MANY):
                t.publish(queue, b"not allowed", exchange=exchange, mandatory=mandatory)
            t.do(Tx.Commit())


@pytest.mark.parametrize("body", [plain, in_a_transaction])
def test_who_may_not_write_publishes_nothing(rig: Rig, reader: Callable[[str], str], body: Callable[[Talk, str], None]) -> None:
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    for exchange in ("amq.fanout", "amq.topic"):
        channel.queue_bind(queue, exchange, queue)
    channel.basic_publish("", queue, b"allowed")
    rig.both_hold(queue, [b"allowed"])
    end = told(rig.lab, rig.primary)["end"]
    heard = []
    for url in (rig.broker_url(rig.primary), rig.url):
        with Talk(reader(url), uuid.uuid4().hex[:10], "classic") as t:
            body(t, queue)
            t.open()
            t.do(Q.Declare(queue=queue, passive=True))
            heard.append(t.transcript())
    assert heard[0] == heard[1]
    assert "ACCESS_REFUSED" in repr(heard[1])
    if body is in_a_transaction:
        assert told(rig.lab, rig.primary)["end"] < end + MANY, "they are in the log"
    rig.both_hold(queue, [b"allowed"])
    channel.basic_publish("", queue, b"next")
    rig.both_hold(queue, [b"allowed", b"next"])
