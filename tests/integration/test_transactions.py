"""Transactions that move messages from one queue to another, while what they go through is killed: at the end each is in one of the two, once.
And those that the broker refuses: at a publish, or at the commit."""

from __future__ import annotations

import threading
import time
from typing import Any

import pika
import pytest
from door_rig import Rig
from history import exactly
from load import LOST, declare, depth, eventually, in_sync, primary_of, replace_primary
from pamqp import commands, frame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader
from pika.exceptions import ChannelClosedByBroker
from raw_client import RawClient, publish

from broker_plugin.amqp import content_header, encode, frames
from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.own_pair("stalls"), pytest.mark.proves("client: transactions")]

COUNT = 600
IN_ONE = 3
SETTLE_S = 5.0  # see test_faults


class Mover:
    """Takes messages from `source`, publishes each to `target`, acks it, and commits after every third; goes on at the other node when it must."""

    def __init__(self, doors: list[str], source: str, target: str) -> None:
        self._doors, self._source, self._target = doors, source, target
        self.commits = 0
        self.interrupted = 0
        self.idle = False  # it holds nothing, and nothing comes
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        turn = 0
        while not self._stop.is_set():
            try:
                self._move(self._doors[turn % len(self._doors)])
            except LOST:
                self.interrupted += 1
                turn += 1
                time.sleep(0.05)
            except BaseException as error:
                self.errors.append(error)
                raise

    def _move(self, door: str) -> None:
        parameters = pika.URLParameters(door)
        parameters.socket_timeout = parameters.stack_timeout = 3
        parameters.heartbeat = 4
        parameters.client_properties = {"connection_name": "mover"}
        connection = pika.BlockingConnection(parameters)
        channel = connection.channel()
        self.idle = False
        channel.basic_qos(prefetch_count=20)
        inside = 0
        channel.tx_select()
        for method, _, body in channel.consume(self._source, inactivity_timeout=0.05):
            self.idle = method is None and not inside
            if method is not None:
                channel.basic_publish("", self._target, body, pika.BasicProperties(delivery_mode=2))
                channel.basic_ack(method.delivery_tag)
                inside += 1
            if inside and (inside >= IN_ONE or method is None):
                channel.tx_commit()
                self.commits += 1
                inside = 0
            if self._stop.is_set():
                connection.close()
                return

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(120)
        assert not self.errors


def bodies(url: str, queue: str) -> list[bytes]:
    """All that is ready, given back afterwards. Not for polling: RabbitMQ 4 throws away what a quorum queue gave out and got back 20 times."""
    found: list[bytes] = []
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        left = channel.queue_declare(queue, passive=True).method.message_count
        while len(found) < left:
            method, _, body = channel.basic_get(queue)
            if method is None:
                break
            found.append(body)
    return found


ONCE = [(fault, kind) for fault in ("connection", "primary.sidecar") for kind in ("classic", "quorum")]
BROKER = [("primary.broker", "classic")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_moved_exactly_once_over_a_failover(pair: Lab, kind: str) -> None:
    move_all(pair, "primary", kind)


@pytest.mark.quick(only="connection-classic")
@pytest.mark.one_version("4.3")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("fault", "kind"), ONCE + BROKER)
def test_moved_exactly_once(pair: Lab, fault: str, kind: str) -> None:
    move_all(pair, fault, kind)


def move_all(pair: Lab, fault: str, kind: str) -> None:
    """Moves messages from one queue to another in transactions, over a fault, and looks for each of them."""
    mark = f"{time.time_ns()}"
    source, target = f"tx-from-{mark}", f"tx-to-{mark}"
    primary, backup = in_sync(pair)
    doors = [pair.nodes[name].door for name in (primary, backup)]
    for queue in (source, target):
        declare(doors[0], queue, queue_type=kind)
    if fault == "primary":
        time.sleep(SETTLE_S)
    with pika.BlockingConnection(pika.URLParameters(doors[0])) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for i in range(COUNT):
            channel.basic_publish("", source, b"%d" % i, pika.BasicProperties(delivery_mode=2))
    mover = Mover(doors, source, target)
    try:
        for round_ in range(3 if fault == "connection" else 1):
            eventually("transactions", lambda round_=round_: mover.commits > 15 * (round_ + 1))
            if fault == "connection":
                pair.ctl(primary, "close_all_user_connections", "app", "test")  # at the broker behind the door; only the mover has one
            else:
                in_sync(pair)
                if fault == "primary":
                    replace_primary(pair, primary, backup)
                else:
                    pair.kill(fault.replace("primary", primary))
                pair.start(fault.replace("primary", primary))
        now = primary_of(pair)
        eventually("all moved", lambda: mover.idle and depth(pair.nodes[now].door, source) == 0)
    finally:
        mover.stop()
    assert mover.interrupted
    in_sync(pair, applied=True)
    moved = bodies(pair.nodes[now].door, target)
    exactly(sorted(map(int, moved)), range(COUNT))
    for name in ("e1", "e2"):
        # Read only while all of it is ready, and once more if the sweeper of a backup had it meanwhile.
        broker = pair.nodes[name].broker
        eventually(f"the same at {name}", lambda url=broker: depth(url, target) == COUNT and sorted(bodies(url, target)) == sorted(moved))
        # A primary's door finds what is dead when somebody asks for it: RabbitMQ may drop acks of a quorum queue when their channel ends.
        door = pair.nodes[name].door if name == now else ""
        broker = pair.nodes[name].broker
        eventually(f"nothing left at {name}", lambda door=door, url=broker: not (door and bodies(door, source)) and depth(url, source) == 0)


@pytest.mark.quick
def test_tx_after_a_publish_is_refused(rig: Rig) -> None:
    """RabbitMQ allows it. The publish before it counts, and the connection goes on."""
    channel = rig.channel()
    queue = rig.declare(channel)
    channel.basic_publish("", queue, b"before", pika.BasicProperties(delivery_mode=2))
    with pytest.raises(ChannelClosedByBroker, match="select tx before the first publish on the channel") as refused:
        channel.tx_select()
    assert refused.value.reply_code == 540
    channel = channel.connection.channel(channel.channel_number)
    channel.tx_select()
    channel.basic_publish("", queue, b"in it", pika.BasicProperties(delivery_mode=2))
    channel.tx_commit()
    rig.both_hold(queue, [b"before", b"in it"])


VANISH = 40


def test_a_client_that_vanishes_behind_its_commit(rig: Rig) -> None:
    """Its commit is carried out, or not, but as a whole: each message is in one of the two queues, once, on both nodes."""
    channel = rig.channel(confirms=True)
    source, target = rig.declare(channel), rig.declare(channel)
    all_of_them = [b"%d" % number for number in range(3 * VANISH)]
    for body in all_of_them:
        channel.basic_publish("", source, body, pika.BasicProperties(delivery_mode=2))
    for _ in range(VANISH):
        with RawClient(rig.url) as client:
            client.open_channel()
            client.call(1, commands.Tx.Select(), frames.TX_SELECT_OK)
            moved = b""
            for _ in range(3):
                got: Any = frames.decode_method(client.call(1, commands.Basic.Get(queue=source), frames.BASIC_GET_OK))
                client.expect(frames.HEADER)
                body = client.expect(frames.BODY)
                moved += publish(1, target, body) + encode.method_frame(1, commands.Basic.Ack(got.delivery_tag))
            client.send(moved + encode.method_frame(1, commands.Tx.Commit()))
        # gone: it reads no answer
        eventually("what it had to be there again", lambda: sum(rig.depth(rig.primary, queue) for queue in (source, target)) == len(all_of_them))
    left = rig.bodies(rig.primary, source)
    rig.both_hold(source, left)
    done = [body for body in all_of_them if body not in left]
    assert done, "none was carried out"
    rig.both_hold(target, done, ordered=False)


@pytest.mark.quick(only="bad0")
@pytest.mark.parametrize("bad", [{"expiration": "soon"}, {"user_id": "somebody-else"}])
def test_refused_at_a_publish_nothing_of_it_is_done(rig: Rig, bad: dict[str, str]) -> None:
    """The 406 comes in the rehearsal: nothing of the transaction is in the log, whatever came before and after in it."""
    channel = rig.channel(confirms=True)
    source, target = rig.declare(channel), rig.declare(channel)
    channel.basic_publish("", source, b"taken", pika.BasicProperties(delivery_mode=2))
    rig.converge()
    channel = rig.channel()
    channel.tx_select()
    method, _, _ = channel.basic_get(source)

    def move() -> None:
        channel.basic_publish("", target, b"before")
        channel.basic_publish("", target, b"bad", pika.BasicProperties(**bad))
        channel.basic_ack(method.delivery_tag)
        channel.basic_publish("", target, b"after")
        channel.tx_commit()

    with pytest.raises(ChannelClosedByBroker) as caught:
        move()
    assert caught.value.reply_code == 406
    rig.both_hold(target, [])
    rig.both_hold(source, [b"taken"])


def test_refused_at_a_publish_that_comes_with_its_commit(rig: Rig) -> None:
    """All of the transaction comes in one piece: its commit is there long before the broker can refuse anything of it."""
    channel = rig.channel(confirms=True)
    source, target = rig.declare(channel), rig.declare(channel)
    channel.basic_publish("", source, b"taken", pika.BasicProperties(delivery_mode=2))
    rig.converge()

    def content(body: bytes, **properties: Any) -> bytes:
        parts = commands.Basic.Publish(routing_key=target), ContentHeader(0, len(body), commands.Basic.Properties(**properties)), ContentBody(body)
        return b"".join(frame.marshal(part, 1) for part in parts)

    with RawClient(rig.lab.nodes[rig.primary].door) as client:
        client.open_channel()
        client.call(1, commands.Tx.Select(), frames.TX_SELECT_OK)
        client.call(1, commands.Basic.Get(queue=source), frames.BASIC_GET_OK)
        moved = content(b"before"), content(b"bad", expiration="soon"), encode.ack(1, 1), content(b"after"), frame.marshal(commands.Tx.Commit(), 1)
        client.send(b"".join(moved))
        while (found := client.read()) is not None and found[0] != frames.CHANNEL_CLOSE:
            assert found[0] != frames.TX_COMMIT_OK
        assert found is not None
        client.send(frame.marshal(commands.Channel.CloseOk(), 1))
        rig.both_hold(target, [])
        rig.both_hold(source, [b"taken"])
        client.open_channel(2)
        client.call(2, commands.Basic.Get(queue=source), frames.BASIC_GET_OK)


@pytest.mark.one_version("4.3")
def test_a_commit_with_a_repeat_of_what_is_refused(rig: Rig) -> None:
    """The first one, not in a transaction, is on its way to a full queue when the commit comes: that was told to be done."""
    channel = rig.channel(confirms=True)
    full, free = rig.declare(channel, max_length=1, overflow="reject-publish"), rig.declare(channel)
    channel.basic_publish("", full, b"first", pika.BasicProperties(delivery_mode=2))
    for _ in range(20):
        producer = rig.name("producer")
        with RawClient(rig.url, properties={"lrq_producer": producer}) as client:
            client.open_channel(1, confirms=True)
            client.open_channel(2)
            client.send(publish(1, "nowhere", b"may I?"))
            assert client.confirmed(1) == set()
            client.call(2, commands.Tx.Select(), frames.TX_SELECT_OK)
            fields = content_header.field(b"x-lrq-id", f"{producer}/1".encode())
            repeat = publish(1, full, b"x", fields=fields) + publish(2, free, b"x") + publish(2, full, b"x", fields=fields)
            client.send(repeat + encode.method_frame(2, commands.Tx.Commit()))
            answers: dict[int, bytes] = {}
            while len(answers) < 2:
                found = client.read()
                assert found is not None
                if found[0] in (frames.BASIC_NACK, frames.BASIC_ACK, frames.TX_COMMIT_OK, frames.CHANNEL_CLOSE):
                    answers[found[0]] = found[2]
            assert answers.keys() == {frames.BASIC_NACK, frames.CHANNEL_CLOSE}
            assert b"partial tx completion" in answers[frames.CHANNEL_CLOSE]


def test_refused_at_its_commit_its_publishes_are_taken_back(rig: Rig) -> None:
    """One of its queues is full, which the broker finds when the transaction is in the log already, and says after it has filled the others.

    Nobody gets what is there, on either node, and its IDs are free again; what it acked stays acked.
    """
    producer = rig.name("producer")
    channel = rig.channel(confirms=True)
    full, free, source = rig.declare(channel, max_length=1, overflow="reject-publish"), rig.declare(channel), rig.declare(channel)
    for queue in (full, source):
        channel.basic_publish("", queue, b"first", pika.BasicProperties(delivery_mode=2))
    rig.converge()

    def move() -> int:
        """Code of the error, 0 if there is none."""
        channel = rig.channel(client_properties={"lrq_producer": producer})
        channel.tx_select()
        method, _, _ = channel.basic_get(source)
        for number, queue in enumerate((free, full, free), 1):
            properties = pika.BasicProperties(delivery_mode=2, headers={"x-lrq-id": f"{producer}/{number}"})
            channel.basic_publish("", queue, b"%d" % number, properties)
        if method is not None:
            channel.basic_ack(method.delivery_tag)
        try:
            channel.tx_commit()
        except ChannelClosedByBroker as error:
            return int(error.reply_code)
        finally:
            channel.connection.close()
        return 0

    assert move() == 406
    rig.converge()
    reader = rig.channel()
    assert reader.basic_get(free) == (None, None, None), "not given to anybody, though the broker may have it"
    rig.both_hold(free, [])
    rig.both_hold(source, [])
    rig.both_hold(full, [b"first"])
    # with room, the same IDs are no repeats
    method, _, _ = reader.basic_get(full)
    reader.basic_ack(method.delivery_tag)
    rig.both_hold(full, [])
    assert move() == 0
    rig.both_hold(free, [b"1", b"3"])
    rig.both_hold(full, [b"2"])
