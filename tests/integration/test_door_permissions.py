"""What a user may not publish is refused in the broker's words, and is never in the log, from where it would reach a backup's queues."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, reduce
from typing import Any
from urllib.parse import urlsplit

import pytest
from door_rig import Rig
from load import User, add_users, primary_of, told
from pamqp import commands
from raw_client import RawClient, publish
from talk import Talk

from broker_plugin.amqp import content_header, encode, frames
from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.proves("permissions")]

B, C, Q, Tx = commands.Basic, commands.Channel, commands.Queue, commands.Tx
MANY = 100  # publishes: more than the entries that a primary adds of its own meanwhile


RIGHTS = {  # (configure, write, read), and the keys with which topic exchanges take publishes
    "reader": ((".*", "^$", ".*"), ".*"),
    "judged": ((".*", ".*", ".*"), r"^may\."),
}
Login = Callable[[str], str]


@pytest.fixture(scope="module")
def logins(pair: Lab) -> dict[str, Login]:
    """Addresses with the logins of users who may not do everything."""
    primary, mark = primary_of(pair), uuid.uuid4().hex[:8]
    lrq = ("lrq", "^$", "^$", ".*")
    users = [User(f"{name}-{mark}", "secret", [("/", *rights), lrq], [("amq.topic", keys)]) for name, (rights, keys) in RIGHTS.items()]
    add_users(pair, primary, *users)

    def login(name: str, url: str) -> str:
        parts = urlsplit(url)
        return parts._replace(netloc=f"{name}-{mark}:secret@{parts.hostname}:{parts.port}").geturl()

    return {name: partial(login, name) for name in RIGHTS}


@pytest.fixture
def reader(logins: dict[str, Login]) -> Login:
    """Of a user who may do anything but write."""
    return logins["reader"]


@pytest.fixture
def judged(logins: dict[str, Login]) -> Login:
    """Of a user who may write, but to a topic exchange only with keys that begin with `may.`."""
    return logins["judged"]


def plain(t: Talk, queue: str) -> None:
    for confirms in (False, True):
        for exchange in ("", "amq.fanout", "amq.topic"):
            for mandatory in (False, True):
                t.open(confirms=confirms)
                for _ in range(MANY):
                    t.publish(queue, b"not allowed", exchange=exchange, mandatory=mandatory)
                assert t.hear() is None


def in_a_transaction(t: Talk, queue: str) -> None:
    for exchange in ("", "amq.fanout"):
        for mandatory in (False, True):
            t.open()
            t.do(Tx.Select())
            for _ in range(MANY):
                t.publish(queue, b"not allowed", exchange=exchange, mandatory=mandatory)
            t.do(Tx.Commit())


@pytest.mark.quick
@pytest.mark.parametrize("body", [plain, in_a_transaction])
def test_who_may_not_write_publishes_nothing(rig: Rig, reader: Login, body: Callable[[Talk, str], None]) -> None:
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
    assert told(rig.lab, rig.primary)["end"] < end + MANY, "they are in the log"
    rig.both_hold(queue, [b"allowed"])
    channel.basic_publish("", queue, b"next")
    rig.both_hold(queue, [b"allowed", b"next"])


FORGED: dict[str, dict[str, Any]] = {
    "user_id": {"user_id": "somebody-else"},
    "expiration": {"expiration": "1.5"},
    "negative expiration": {"expiration": "-1"},
    "long expiration": {"expiration": "315360000001"},
    "CC": {"headers": {"CC": "a string"}},
    "BCC": {"headers": {"BCC": {"a": "table"}}},
    "topic": {"exchange": "amq.topic", "key": "may not"},
    "another topic": {"exchange": "amq.topic", "key": "may.one", "headers": {"CC": ["may not"]}},
    "internal": {"exchange": "internal"},
    "no exchange": {"exchange": "no such exchange"},
}


@pytest.mark.quick
@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_what_the_broker_refuses_of_a_publish(rig: Rig, judged: Login, forged: dict[str, Any]) -> None:
    """What came before it on its channel is done, what comes behind is not; on a new channel the client goes on."""
    properties = dict(forged)
    exchange, key = properties.pop("exchange", ""), properties.pop("key", "")
    heard, ends = [], []
    for url in (rig.broker_url(rig.primary), rig.url):
        with Talk(judged(url), uuid.uuid4().hex[:10], "classic") as t:
            t.open(confirms=True)
            q = t.queue()
            if exchange == "internal":
                exchange = t.name("internal")
                t.do(commands.Exchange.Declare(exchange=exchange, exchange_type="fanout", durable=True, internal=True))
            if exchange in ("amq.topic", t.name("internal")):
                t.do(Q.Bind(queue=q, exchange=exchange, routing_key="#"))
            t.publish(q, b"before")
            t.publish("may.be", b"before", exchange="amq.topic")
            t.confirms()
            ends.append(told(rig.lab, rig.primary)["end"])
            for _ in range(MANY):
                t.publish(key or q, b"forged", exchange=exchange, **properties)
            t.confirms()
            ends.append(told(rig.lab, rig.primary)["end"])
            t.open(2, confirms=True)
            t.publish(q, b"after", 2)
            t.confirms(2)
            t.do(Q.Declare(queue=q, passive=True), 2)
            t.do(Q.Delete(queue=q), 2)
            if exchange == t.name("internal"):
                t.do(commands.Exchange.Delete(exchange=exchange), 2)
                exchange = "internal"
            heard.append(t.transcript())
    assert heard[0] == heard[1]
    assert (ends[3] < ends[2] + MANY) != taken(rig, forged), "they are in the log"


def taken(rig: Rig, forged: dict[str, Any]) -> bool:
    """RabbitMQ 3.10 judges the routing key alone."""
    return forged is FORGED["another topic"] and rig.lab.version.startswith("3.")


MALFORMED = b"\0\0\0\4\1a?\0"  # a table with a header of no known kind
DEEP = content_header.properties(b"\1a" + reduce(lambda inner, _: b"A" + len(inner).to_bytes(4, "big") + inner, range(70), b""))
NOT_TO_BE_JUDGED = {
    "expiration": b"\x21\0" + MALFORMED + b"\x011",
    "user-id": b"\x20\x10" + MALFORMED + b"\4user",
    "CC": b"\x20\0\0\0\0\5\2CC?\0",
    "too deep": b"\x21\0" + DEEP[2:-1] + b"\x011",
}


@pytest.mark.parametrize("properties", NOT_TO_BE_JUDGED.values(), ids=NOT_TO_BE_JUDGED)
def test_a_first_publish_that_is_malformed_ends_its_connection(rig: Rig, properties: bytes) -> None:
    """Others go on."""
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    with Talk(rig.url, uuid.uuid4().hex[:10], "classic") as t:
        t.open()
        t.publish(queue, raw=properties)
        assert t.hear() is None
        assert t.heard[0][0][1]["reply_code"] == 501
    channel.basic_publish("", queue, b"good")
    rig.both_hold(queue, [b"good"])


def test_what_one_may_publish_goes_in_however_it_is_mixed(rig: Rig, judged: Login) -> None:
    """Routes and properties of many kinds, each for the first time, all in one write, on two channels."""
    with RawClient(judged(rig.url)) as client:
        client.open_channel(1, confirms=True)
        client.open_channel(2)
        queue = rig.name()
        client.call(1, Q.Declare(queue=queue, durable=True), frames.QUEUE_DECLARE_OK)
        for exchange in ("amq.topic", "amq.direct"):
            client.call(1, Q.Bind(queue=queue, exchange=exchange, routing_key="may.#"), frames.QUEUE_BIND_OK)
        own = {"user_id": client.user.encode()}
        sent = []
        for number in range(600):
            body = b"%d" % number
            header = content_header.header_payload(len(body), content_header.properties(**(own if number % 7 == 0 else {"expiration": b"600000"})))  # type: ignore[arg-type]
            exchange, key = (("", queue), ("amq.topic", f"may.{number}"), ("amq.direct", "may.#"), ("", queue))[number % 4]
            sent.append(encode.publish_method(1, exchange, key) + b"".join(encode.content(1, header, body)))
            sent.append(publish(2, queue, b"other"))
        client.send(b"".join(sent))
        assert client.confirmed(600) == set()
    with rig.at(rig.backup) as channel:
        rig.converge()
        found = [channel.basic_get(queue, auto_ack=True)[2] for _ in range(1_200)]
    assert [body for body in found if body != b"other"] == [b"%d" % number for number in range(600)]


def test_a_publisher_that_hangs_up_at_once(rig: Rig) -> None:
    """The broker is asked after it has gone."""
    queue = rig.declare(rig.channel())
    for number in range(5):
        with RawClient(rig.url) as client:
            client.open_channel()
            client.send(publish(1, queue, b"%d" % number))
    rig.both_hold(queue, [b"%d" % number for number in range(5)], ordered=False)


def test_a_client_has_all_the_channels_that_were_agreed_on(rig: Rig) -> None:
    """The broker has one more, for the door."""
    heard = []
    for url in (rig.broker_url(rig.primary), rig.url):
        with Talk(url, uuid.uuid4().hex[:10], "classic", channel_max=2) as t:
            for number in (1, 2):
                t.open(number, confirms=True)
                t.publish(t.queue(f"q{number}", number), b"x", number)
                t.confirms(number)
            t.do(C.Close(200, "", 0, 0), 2)
            t.open(3, confirms=True)
            t.publish("", b"x", 3, exchange="amq.fanout")
            t.confirms(3)
            t.say(C.Open(), 4)
            t.quiet()
            heard.append(t.transcript())
    assert heard[0] == heard[1]
    assert "negotiated channel_max (2)" in repr(heard[1])


def test_a_right_that_is_withdrawn(rig: Rig, judged: Login) -> None:
    """The first refusal ends what the door has believed of the connection."""
    with ExitStack() as restored, Talk(judged(rig.url), uuid.uuid4().hex[:10], "classic") as t:
        t.open(confirms=True)
        q = t.queue()
        t.publish(q, b"allowed")
        t.confirms()
        rig.lab.ctl(rig.primary, "set_permissions", t.user, ".*", "^$", ".*")
        restored.callback(rig.lab.ctl, rig.primary, "set_permissions", t.user, ".*", ".*", ".*")
        t.open(2)
        t.publish(q, b"not any more", 2)
        assert t.hear(channel=2) is None
        end = told(rig.lab, rig.primary)["end"]
        t.open(3)
        for _ in range(MANY):
            t.publish(q, b"nor this", 3)
        assert t.hear(channel=3) is None
        assert t.heard[2][-1] == t.heard[3][-1]
        assert "ACCESS_REFUSED" in repr(t.heard[3][-1])
        assert told(rig.lab, rig.primary)["end"] < end + MANY, "they are in the log"
    rig.both_hold(q, [b"allowed"])


def test_nothing_is_heard_of_what_a_producers_login_asks(rig: Rig, reader: Login) -> None:
    """In vhost lrq: whether the user may publish to queues by their names. He may not, and his channels are his own all the same."""
    with RawClient(reader(rig.url), "lrq", properties={"lrq_producer": rig.name("producer")}) as client:
        client.got.clear()
        client.open_channel(1)
        client.open_channel(2)
        assert [kind for kind, *_ in client.got] == [frames.CHANNEL_OPEN_OK] * 2
