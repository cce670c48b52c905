"""Clients that want more than they may: the routing queues, the sidecars' own words, another user's replication IDs. And nothing secret in a log."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pika
import pytest
from door_rig import Rig
from load import User, add_users, eventually, told
from pamqp import commands
from pika.exceptions import ChannelClosedByBroker, ProbableAccessDeniedError
from raw_client import RawClient, publish
from sidecar_process import Sidecar
from talk import Talk

from broker_plugin.amqp import content_header, encode, frames
from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import Publisher
from lrq_ha.publisher.errors import NackedError

pytestmark = [pytest.mark.broker, pytest.mark.quick, pytest.mark.one_version("4.3")]

USERS = {"reader": ("^$", "^$", ".*"), "writer": (".*", ".*", ".*"), "stranger": None}


@pytest.fixture(scope="module")
def users(pair: Lab) -> dict[str, str]:
    """Users beside `app`, with their rights in vhost lrq, and the login of each: who may read, who may do anything, who may not come in."""
    found = [User(user, f"pass-{user}", [("/", ".*", ".*", ".*"), *([("lrq", *rights)] if rights else [])]) for user, rights in USERS.items()]
    for name in ("e1", "e2"):
        add_users(pair, name, *found)
    return {user.name: f"{user.name}:{user.password}" for user in found}


def url_as(rig: Rig, login: str) -> str:
    parts = urlsplit(rig.url)
    return f"amqp://{login}@{parts.hostname}:{parts.port}"


def entry(client_name: str = "hostile", kind: pb.ReplicationType = pb.LOG_ENTRY_SYNC, request_id: str = "") -> bytes:
    transaction = pb.Transaction(client_name=client_name, type=kind, request_id=request_id, payloads=[b"data"])
    transaction.entries.add(destinations=["west"], payload=0)
    return transaction.SerializeToString()


def refused(channel: Any, call: Any) -> int:
    with pytest.raises(ChannelClosedByBroker) as caught:
        call(channel)
    return int(caught.value.reply_code)


def test_a_user_without_the_vhost_does_not_come_in(rig: Rig, users: dict[str, str]) -> None:
    with pytest.raises(ProbableAccessDeniedError):
        rig.connect(url_as(rig, users["stranger"]), "lrq")


@pytest.mark.parametrize("queue", ["LRQ_HA_east", "LRQ_APPLIED_east", "LRQ_Send_LogEntries", "LRQ_Send_SnapSync", "LRQ_X_east_1", "anything"])
def test_nobody_reads_what_belongs_to_others(rig: Rig, users: dict[str, str], queue: str) -> None:
    """Whatever the broker's rights say: the log holds every client's messages."""
    for user in ("writer", "reader"):
        connection = rig.connect(url_as(rig, users[user]), "lrq")
        assert refused(connection.channel(), lambda c: c.basic_get(queue)) == 403

        def consume(channel: Any) -> None:
            channel.basic_qos(prefetch_count=10)
            channel.basic_consume(queue, lambda *_: None, arguments={"x-stream-offset": "first"})

        assert refused(connection.channel(), consume) == 403


def test_statuses_are_read_as_far_as_the_broker_lets_one(rig: Rig, users: dict[str, str]) -> None:
    channel = rig.connect(url_as(rig, users["reader"]), "lrq").channel()
    channel.basic_qos(prefetch_count=10)
    channel.basic_consume("LRQ_Status", lambda *_: None, arguments={"x-stream-offset": "first"})
    channel.close()


@pytest.mark.parametrize("queue", ["LRQ_Send_LogEntries", "LRQ_Send_SnapSync", "LRQ_Status"])
def test_only_who_may_write_writes(rig: Rig, users: dict[str, str], queue: str) -> None:
    """What ends at the door takes no less right than what reaches the broker."""

    full = queue == "LRQ_Send_SnapSync"
    data = entry(kind=pb.SNAPSHOT_SYNC if full else pb.LOG_ENTRY_SYNC, request_id="r" if full else "")

    def leave_no_trace() -> bool:
        before = rig.lab.status(rig.primary)["end"]
        for properties in ({"lrq_producer": "hostile"}, {}):
            connection = rig.connect(url_as(rig, users["reader"]), "lrq", client_properties=properties)
            channel = connection.channel()
            channel.confirm_delivery()
            message = pika.BasicProperties(headers={"x-lrq-id": "hostile/1"})
            assert refused(channel, lambda c, m=message: c.basic_publish("", queue, data, m)) in (403, 406)
            connection.close()  # before the producer connects anew
        return bool(rig.lab.status(rig.primary)["end"] == before)

    eventually("nothing of it in the log, to which the primary adds entries of its own", leave_no_trace)
    end = told(rig.lab, rig.primary)["end"]
    status = pb.Status(key="client/hostile", client=pb.ClientStatus(client_name="hostile")) if queue == "LRQ_Status" else None
    connection = rig.connect(url_as(rig, users["writer"]), "lrq", client_properties={"lrq_producer": f"writer-{time.time_ns()}"})
    producer = connection._impl.params.client_properties["lrq_producer"]
    channel = connection.channel()
    channel.confirm_delivery()
    message = pika.BasicProperties(headers={"x-lrq-id": f"{producer}/1"})
    channel.basic_publish("", queue, status.SerializeToString() if status else data, message)
    assert told(rig.lab, rig.primary)["end"] > end


def test_log_entries_and_full_syncs_have_a_queue_each(rig: Rig, users: dict[str, str]) -> None:
    """What was in the other's was confirmed, and went nowhere; an end marker among the log entries ended the full sync of every destination."""
    producer = f"misled-{time.time_ns()}"
    connection = rig.connect(url_as(rig, users["writer"]), "lrq", client_properties={"lrq_producer": producer})
    misled = [("LRQ_Send_SnapSync", entry())]
    misled += [("LRQ_Send_LogEntries", entry(kind=kind, request_id="r")) for kind in (pb.SNAPSHOT_SYNC, pb.LAST_FULL_SYNC_ENTRY)]
    for number, (queue, body) in enumerate(misled, 1):
        channel = connection.channel()
        channel.confirm_delivery()
        message = pika.BasicProperties(headers={"x-lrq-id": f"{producer}/{number}"})
        assert refused(channel, lambda c, q=queue, b=body, m=message: c.basic_publish("", q, b, m)) == 406


@pytest.mark.parametrize("key", ["LRQ_HA_east", "LRQ_APPLIED_east", "LRQ_X_east_1", "LRQ_Recv_app_west"])
def test_nobody_speaks_as_a_sidecar(rig: Rig, users: dict[str, str], key: str) -> None:
    """Epoch headers, a push, a reception: neither as a client with all rights nor as a node or site without the sidecar's password."""
    top = told(rig.lab, rig.primary)["epoch"]
    forged = pika.BasicProperties(headers={"x-lrq-leader": top + (1 << 20), "x-lrq-epoch": top + (1 << 20), "x-lrq-first": 1, "x-lrq-last": 1,
                                           "x-lrq-prev": 0, "x-lrq-safe": 1, "x-lrq-fence": top + (1 << 20), "x-lrq-control": 1})  # fmt: skip
    connection = rig.connect(url_as(rig, users["writer"]), "lrq", client_properties={"lrq_producer": "forger"})
    for exchange, routing_key in (("", key), (key, key), ("amq.direct", key)):
        channel = connection.channel()
        channel.confirm_delivery()
        assert refused(channel, lambda c, e=exchange, k=routing_key: c.basic_publish(e, k, b"forged", forged)) == 403
    own = urlsplit(rig.lab.nodes[rig.primary].admin)
    for properties in ({"lrq_node": 2, "lrq_group": "east"}, {"lrq_site": "west"}):
        for login in (users["writer"], f"{own.username}:wrong"):
            with RawClient(url_as(rig, login), login=False) as client, pytest.raises(AssertionError):
                client.login("lrq", 0, frames.FRAME_MAX_BYTES, properties)
    assert told(rig.lab, rig.primary)["epoch"] == top
    eventually("the backup to be ready", lambda: rig.lab.status(rig.backup)["role"] == "ready")


def test_a_user_named_twice_is_who_the_broker_takes_it_for(rig: Rig, users: dict[str, str]) -> None:
    """AMQPLAIN is a table: the broker takes the first LOGIN of two; a door that took the last would let in a client as the sidecar."""
    sidecar = urlsplit(rig.lab.nodes[rig.primary].admin)
    user, password = users["writer"].split(":")
    response = b"".join(
        content_header.field(key, value.encode())
        for key, value in ((b"LOGIN", user), (b"PASSWORD", password), (b"LOGIN", sidecar.username or ""), (b"PASSWORD", sidecar.password or ""))
    )
    start_ok = encode.raw_method_frame(
        0,
        frames.CONNECTION_START_OK,
        (39).to_bytes(4, "big"),
        b"\x08lrq_nodeI\0\0\0\x02" + content_header.field(b"lrq_group", b"east"),
        encode.short_string("AMQPLAIN"),
        len(response).to_bytes(4, "big"),
        response,
        b"\x05en_US",
    ).replace((39).to_bytes(4, "big"), (14 + len(content_header.field(b"lrq_group", b"east"))).to_bytes(4, "big"), 1)
    with RawClient(rig.url, login=False) as client:
        client.send(frames.PROTOCOL_HEADER)
        client.expect(frames.CONNECTION_START)
        client.send(start_ok)
        client.expect(frames.CONNECTION_TUNE)
        client.send(
            encode.method_frame(0, commands.Connection.TuneOk(2047, 131_072, 0)) + encode.method_frame(0, commands.Connection.Open("lrq"))
        )
        with pytest.raises(AssertionError, match="own user"):
            client.expect(frames.CONNECTION_OPEN_OK)


def test_ids_of_another_user_suppress_nothing(rig: Rig, users: dict[str, str]) -> None:
    """The same producer name and the same numbers, guessed before their owner uses them; and names that differ only in where the user ends."""
    queue = rig.declare(rig.channel())
    producer = f"orders-{time.time_ns()}"
    for login in (users["writer"], None):
        with RawClient(url_as(rig, login) if login else rig.url, properties={"lrq_producer": producer}) as client:
            client.open_channel(confirms=True)
            for i in range(1, 6):
                client.send(publish(1, queue, b"%d" % i, fields=content_header.field(b"x-lrq-id", f"{producer}/{i}".encode())))
            assert client.confirmed(5) == set()
    rig.both_hold(queue, [b"1", b"2", b"3", b"4", b"5"] * 2)


def test_a_producer_name_that_is_none_is_refused(rig: Rig) -> None:
    for name in ("a/b", "", "x" * 129, 7):
        with RawClient(rig.url, login=False) as client, pytest.raises(AssertionError, match="no producer name"):
            client.login("/", 0, frames.FRAME_MAX_BYTES, {"lrq_producer": name})


# -- others go on


def goes_on(rig: Rig) -> None:
    """Another client declares, publishes and consumes: nobody has to wait for those who do not answer."""
    with RawClient(rig.url) as other:
        other.open_channel(confirms=True)
        queue = rig.name()
        other.call(1, commands.Queue.Declare(queue=queue, durable=True), frames.QUEUE_DECLARE_OK)
        other.send(publish(1, queue, b"x"))
        assert other.confirmed(1) == set()
        other.call(1, commands.Basic.Get(queue=queue, no_ack=True), frames.BASIC_GET_OK)
        other.call(1, commands.Queue.Delete(queue=queue), frames.QUEUE_DELETE_OK)


def closed_channel(client: RawClient) -> bytes:
    """What the broker's channel.close says."""
    while (found := client.read()) is not None:
        if found[0] == frames.CHANNEL_CLOSE:
            return found[2]
    pytest.fail("the connection is closed")


def test_a_client_that_does_not_answer_the_brokers_close_holds_up_nobody(rig: Rig) -> None:
    """The broker keeps such a connection for half a minute, and answers nothing on it: neither publishes nor declarations."""
    with RawClient(rig.url) as client:
        client.open_channel(confirms=True)
        client.send(encode.method_frame(9, commands.Basic.Qos()) + publish(1, "q", b"x"))
        with pytest.raises(AssertionError):
            client.expect(frames.CONNECTION_CLOSE_OK)
        with suppress(OSError):
            client.send(publish(1, "q", b"x") + encode.method_frame(1, commands.Queue.Declare(queue=rig.name(), durable=True)))
        goes_on(rig)
        assert client.closed()


@pytest.mark.parametrize("channel", [0, 1])
def test_what_a_client_publishes_behind_its_own_close_holds_up_nobody(rig: Rig, channel: int) -> None:
    """A broker takes it without a word: nobody would ever confirm it. On channel 1 it is a close-ok that nobody has asked for."""
    close = commands.Connection.Close(200, "bye", 0, 0) if channel == 0 else commands.Channel.CloseOk()
    with RawClient(rig.url) as client:
        client.open_channel(confirms=True)
        client.send(publish(1, "q", b"x") + encode.method_frame(channel, close) + publish(1, "q", b"x"))
        ended = {frames.CONNECTION_CLOSE, frames.CONNECTION_CLOSE_OK}
        while (found := client.read()) is not None and found[0] not in ended:
            pass
        goes_on(rig)


def test_a_refusal_may_name_what_is_not_utf8(rig: Rig) -> None:
    with RawClient(rig.url, "lrq") as client:
        client.open_channel()
        client.send(publish(1, "\udcff", b"x"))
        assert b"takes no messages from clients" in closed_channel(client)


def test_a_declaration_on_a_channel_that_the_broker_closes_meanwhile_holds_up_nobody(rig: Rig) -> None:
    with RawClient(rig.url) as client:
        client.open_channel()
        consume = encode.method_frame(1, commands.Basic.Consume(queue=rig.name()))
        declare = encode.method_frame(1, commands.Queue.Declare(queue=rig.name(), durable=True))
        client.send(publish(1, "nowhere", b"x" * 10_000) * 100 + consume + declare)
        assert b"NOT_FOUND" in closed_channel(client)
        goes_on(rig)
        client.send(encode.method_frame(1, commands.Channel.CloseOk()))
        client.open_channel()


@pytest.mark.full
def test_a_transaction_on_a_channel_that_the_broker_closes_meanwhile(rig: Rig) -> None:
    with RawClient(rig.url) as client:
        client.open_channel()
        consume = encode.method_frame(1, commands.Basic.Consume(queue=rig.name()))
        client.send(publish(1, "nowhere", b"x") + consume + encode.method_frame(1, commands.Tx.Select()))
        assert b"select tx before the first publish" in closed_channel(client)
        client.send(encode.method_frame(1, commands.Channel.CloseOk()))
        client.open_channel()
        client.call(1, commands.Tx.Select(), frames.TX_SELECT_OK)


WRONG = {
    "a channel that is not open": publish(9, "nowhere", b"x"),
    "no frame": encode.ack(1, 9)[:-1] + b"\0",
    "an ack cut short": encode.raw_method_frame(1, frames.BASIC_ACK, b"\0"),
    "a method amid a content": encode.publish_method(1, "", "nowhere") + encode.method_frame(1, commands.Channel.Open()) * 3,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_stands_before_what_ends_a_connection_counts(rig: Rig, wrong: bytes) -> None:
    """In one write with it. Acks were lost, and what they were of came again; before what is no frame, publishes were lost, too."""
    channel = rig.channel(confirms=True)
    for url in (rig.broker_url(rig.primary), rig.url):
        queue = rig.declare(channel)
        for body in (b"1", b"2", b"3"):
            channel.basic_publish("", queue, body)
        with RawClient(url) as client:
            client.open_channel()
            client.send(encode.method_frame(1, commands.Basic.Consume(queue=queue)))
            for _ in range(3):
                client.expect(frames.BODY)
            client.send(b"".join((*(encode.ack(1, tag) for tag in range(1, 4)), wrong)))
            client.expect(frames.CONNECTION_CLOSE)
        with RawClient(url) as client:
            client.open_channel()
            client.send(publish(1, queue, b"last") + wrong)
            client.expect(frames.CONNECTION_CLOSE)
        eventually("what stands before", lambda queue=queue: rig.bodies(rig.primary, queue) == [b"last"] and not rig.unacked(rig.primary, queue))
    rig.both_hold(queue, [b"last"])


def test_a_method_that_is_cut_short_ends_its_connection_in_so_many_words(rig: Rig) -> None:
    """One that the door reads octet by octet."""
    queue = rig.declare(rig.channel())
    with RawClient(rig.url) as client:
        client.open_channel()
        client.send(publish(1, queue, b"x"))
        client.call(1, commands.Basic.Consume(queue=queue, consumer_tag="c"), frames.BASIC_CONSUME_OK)
        client.send(encode.raw_method_frame(1, frames.BASIC_CANCEL, b"\1c"))
        with pytest.raises(AssertionError, match=r"cannot (be )?decode"):
            client.expect(frames.CONNECTION_CLOSE_OK)
    goes_on(rig)


# -- logs


SECRETS = {"password": "hunter2-password", "body": "hunter2-body", "header": "hunter2-header", "id": "hunter2-id", "wrong": "hunter2-wrong"}


def test_nothing_secret_is_logged(brokers: Lab, tmp_path: Any) -> None:
    """A session with marked secrets, right and wrong ones, at the finest level of the log; and the two pages that tell a status."""
    add_users(brokers, "e1", User("marked", SECRETS["password"], [(vhost, ".*", ".*", ".*") for vhost in ("/", "lrq")]))
    with Sidecar(brokers, tmp_path, f"secrets-{time.time_ns() % 10**6}", level="debug") as sidecar:
        sidecar.becomes("active")
        url = f"amqp://marked:{SECRETS['password']}@{sidecar.door}"
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare("secrets", durable=True)
            message = pika.BasicProperties(headers={"h": SECRETS["header"], "x-lrq-id": SECRETS["id"], "x-death": [SECRETS["header"]]})
            channel.basic_publish("", "secrets", SECRETS["body"].encode(), message)
            channel.basic_get("secrets", auto_ack=True)
            channel.queue_delete("secrets")
        publisher = Publisher([url], f"p-{time.time_ns()}", "marked")
        with pytest.raises(NackedError):
            publisher.publish("", "nowhere", SECRETS["body"].encode()).result(60)
        publisher.close()
        hidden = SECRETS["wrong"].encode()
        broken = publish(1, "secrets", hidden, fields=content_header.field(b"h", hidden)).replace(b"\x01hS", b"\x01hF")
        bad_id = publish(1, "secrets", hidden, fields=content_header.field(b"x-lrq-id", b"p/" + hidden))
        for data in (broken, bad_id, encode.raw_method_frame(1, frames.QUEUE_DECLARE, b"\0\0\x20" + hidden), b"\xff" + hidden):
            with RawClient(url, properties={"lrq_producer": "p", "secret": SECRETS["wrong"]}) as client:
                client.open_channel(confirms=True)
                client.send(data)
                client.closed(1)
        for login in (b"GET /" + hidden, frames.PROTOCOL_HEADER + b"\xff" + hidden):
            with RawClient(url, login=False) as client, suppress(LrqError):  # AMQP's own header comes, which is no frame
                client.send(login)
                client.closed(2)
        with RawClient(f"amqp://marked:{SECRETS['wrong']}@{sidecar.door}", login=False) as client, pytest.raises(AssertionError):
            client.login("/", 0, frames.FRAME_MAX_BYTES, {"lrq_secret": SECRETS["wrong"]})
        eventually("the log of the last but one", lambda: "speaks HTTP" in sidecar.said())
        said = sidecar.said() + str(sidecar.status())
    for what, secret in SECRETS.items():
        assert secret not in said, f"the {what} was logged"
        assert secret.encode().hex() not in said, f"the {what} was logged in another form"


def test_channel_0_is_the_connections_alone(rig: Rig) -> None:
    """Nobody opens it, and what is published on it is in no log."""
    queue = rig.declare(rig.channel())
    with RawClient(rig.url) as client:
        client.open_channel()
        client.send(publish(1, queue, b"0") + publish(0, queue, b"1"))
        with pytest.raises(AssertionError, match=r"channel\.open"):
            client.expect(frames.BASIC_ACK)
    rig.both_hold(queue, [b"0"])


def test_a_channel_is_not_forgotten_by_an_answer_to_the_one_before(rig: Rig) -> None:
    """Both sides had closed it, and the client opened it anew: what it published then was in no log, with whatever position it said."""
    queue = rig.declare(rig.channel())
    methods = commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk(), commands.Channel.Open()
    fields = content_header.field(b"x-lrq-pos", b"258.1000000000/1")
    with RawClient(rig.url) as client:
        client.send(encode.method_frame(1, commands.Channel.Open()))
        client.expect(frames.CHANNEL_OPEN_OK)
        client.send(encode.method_frame(1, commands.Basic.Ack(99)))
        client.expect(frames.CHANNEL_CLOSE)
        client.send(b"".join(encode.method_frame(1, method) for method in methods))
        client.expect(frames.CHANNEL_OPEN_OK)
        assert [kind for kind, *_ in client.got].count(frames.CHANNEL_CLOSE_OK) == 1
        for _ in range(3):
            client.send(publish(1, queue, b"logged", fields=fields) + encode.method_frame(1, commands.Channel.Flow(True)))
            client.expect(frames.CHANNEL_FLOW_OK)
    rig.both_hold(queue, 3 * [b"logged"])


FORGED_DEATHS = {
    "less than nothing": [{"queue": "it", "count": -1}],
    "none": [{"queue": "it", "count": 0}],
    "too many": [{"queue": "it", "count": 1 << 40}],
    "true": [{"queue": "it", "count": True}],
}


@pytest.mark.parametrize("how", ["manual", "automatic"])
@pytest.mark.parametrize("deaths", FORGED_DEATHS.values(), ids=FORGED_DEATHS)
def test_forged_deaths_are_no_poison(rig: Rig, deaths: list[dict[str, Any]], how: str) -> None:
    """Whoever got such a message was thrown out, the next one too, and a backup's sidecar with them."""
    channel = rig.channel(confirms=True)
    queue = rig.declare(channel)
    with Talk(rig.url, "deaths", "classic") as talk:
        talk.open(confirms=True)
        named = [{**death, "queue": queue} for death in deaths]
        talk.publish(queue, b"poison", headers={"x-death": named, "x-first-death-queue": queue})
        talk.publish(queue, b"next")
        talk.confirms()
        talk.do(commands.Basic.Consume(queue=queue, consumer_tag="c", no_ack=how == "automatic"))
        assert [d.body for d in talk.deliveries(2)] == [b"poison", b"next"]
        if how == "manual":
            talk.say(commands.Basic.Ack(1))
            talk.say(commands.Basic.Ack(2))
        assert talk.do(commands.Channel.Flow(True)) is not None
    rig.both_hold(queue, [])
