"""What a client gives back while the door keeps deliveries back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from pamqp import base, commands
from test_channels import Counted
from test_publishing import POSITION, Connection, message

from broker_plugin.amqp import content_header, encode, frames
from broker_plugin.door import drain
from broker_plugin.door.client_connection import ClientConnection
from broker_plugin.door.server import Door
from broker_plugin.log.messages import Delivery
from broker_plugin.methods import acknowledge
from broker_plugin.session.channel import ClientChannel
from broker_plugin.session.transaction import Transaction
from lrq_ha.sidecar.tables import DoorTable


def a_relay(outbox: SimpleNamespace, channel: ClientChannel) -> SimpleNamespace:
    """As much of a connection as these functions touch."""
    relay = SimpleNamespace(outbox=outbox, ask=lambda _: None, give_back=lambda _: None, gives_back=lambda _: None, channels={1: channel})
    relay.internal_acks, relay.ack_frames, relay.replica = set(), [], SimpleNamespace(last_operation=0)
    return relay


@pytest.mark.parametrize("kind", [frames.BASIC_RECOVER, frames.BASIC_RECOVER_ASYNC])
def test_what_the_door_kept_back_goes_back_with_a_recover(kind: int) -> None:
    """When the door gave up draining it gave it back once more, under numbers that the broker did not know: 406."""
    told: list[bytes] = []
    outbox = SimpleNamespace(put=lambda data, _sequence=0: told.append(data), total=0)
    channel = ClientChannel(1)
    channel.undelivered, channel.internal_acks = [5, 6], [encode.ack(1, 4)]
    relay = a_relay(outbox, channel)
    acknowledge.recover(cast(ClientConnection, relay), channel, kind, encode.raw_method_frame(1, kind, b"\1")[7:-1])
    drain.give_up(cast(Door, SimpleNamespace(draining="", sessions=[relay])))
    assert told == [encode.raw_method_frame(1, frames.BASIC_RECOVER, b"\1")]
    assert not channel.internal_acks


def test_what_was_kept_back_on_a_channel_with_transactions_goes_back_at_once() -> None:
    """When the door gives up draining: not with whatever the client does next."""
    told: list[bytes] = []
    outbox = SimpleNamespace(put=lambda data, _sequence=0: told.append(data))
    channel = ClientChannel(1, tx=Transaction(), undelivered=[5])
    drain.give_up(cast(Door, SimpleNamespace(draining="", sessions=[a_relay(outbox, channel)])))
    assert told == [encode.nack(1, 5, requeue=True) + encode.method_frame(1, commands.Tx.Commit())]


def delivery(tag: int, sequence: int) -> bytes:
    """Frames of a delivery to consumer c on channel 1, with a position."""
    header = content_header.header_payload(1, content_header.properties(content_header.field(POSITION, b"257.%d/1" % sequence)))
    method = encode.method_frame(1, commands.Basic.Deliver("c", tag, False, "", "orders"))
    return method + b"".join(encode.content(1, header, b"x"))


class Draining:
    """A connection whose channel has a consumer, and transactions if not told otherwise, and gets nothing for now."""

    def __init__(self, *, tx: bool = True) -> None:
        self.connection = Connection()
        self.relay, self.door = self.connection.relay, self.connection.relay.door
        self.door.sessions.add(self.relay)
        self.say(commands.Channel.Close(200, "", 0, 0))  # it was in confirm mode
        self.hear(commands.Channel.CloseOk())
        self.say(commands.Channel.Open())
        self.channel = self.relay.channels[1]
        if tx:
            self.say(commands.Tx.Select())
        self.say(commands.Basic.Consume(queue="orders", consumer_tag="c"))
        self.hear(commands.Basic.ConsumeOk("c"))
        self.door.draining = "a test"
        self.relay.broker_data(delivery(1, 1))
        assert self.channel.undelivered == [1]

    def say(self, method: base.Frame) -> None:
        self.relay.client_data(encode.method_frame(1, method))

    def hear(self, method: base.Frame) -> None:
        self.relay.broker_data(encode.method_frame(1, method))

    @property
    def told(self) -> bool:
        """Whether the broker has heard of what goes back."""
        return encode.nack(1, 1, requeue=True) in self.connection.broker.data

    @property
    def returning(self) -> set[tuple[str, str]]:
        """Queues whose messages have not arrived there, as the census sees it."""
        return self.channel.returning | set(self.relay.still_returning())


def test_what_goes_back_and_waits_for_the_log_is_told_as_returning() -> None:
    """Until the broker has heard of it: else the census took the queue for settled while these were in no length of it."""

    async def scenario() -> None:
        drained = Draining()
        drained.connection.log_is_safe = False
        drained.connection.replica.dequeue(("/", "others"), [1], ())  # somebody else's ack
        drained.connection.replica.flush()
        drain.give_up(drained.door)
        assert not drained.told
        assert drained.returning == {("/", "orders")}
        drained.connection.replica.progress.safe_advanced(drained.connection.log.end)
        assert drained.told
        assert not drained.returning

    asyncio.run(scenario())


def test_the_census_does_not_count_what_goes_back_until_the_broker_has_heard_of_it() -> None:
    """It is in no length of its queue and no client holds it: a tally was too low, and the backups removed it."""

    async def scenario() -> None:
        drained = Draining(tx=False)
        drained.connection.log_is_safe = False
        drained.channel.deliveries[9] = Delivery(("/", "others"), 9, ())
        drained.say(commands.Basic.Ack(9))  # it reaches the broker when the log has it, and all behind it then
        drained.connection.replica.flush()
        drain.give_up(drained.door)
        assert not drained.told
        assert drained.connection.unsure == {("/", "orders")}
        drained.connection.replica.progress.safe_advanced(drained.connection.log.end)
        assert drained.told
        assert not drained.connection.unsure

    asyncio.run(scenario())


def test_what_goes_back_and_waits_for_a_commit_is_told_as_returning() -> None:
    async def scenario() -> None:
        drained = Draining()
        drained.relay.client_data(message("orders", b"", True, b"committed")[0])
        drained.say(commands.Tx.Commit())
        drained.hear(commands.Tx.RollbackOk())
        while not drained.channel.commits:
            await asyncio.sleep(0)
        drained.connection.replica.flush()
        drain.give_up(drained.door)
        assert not drained.told
        assert drained.returning == {("/", "orders")}
        drained.hear(commands.Tx.CommitOk())
        assert drained.told
        assert not drained.returning

    asyncio.run(scenario())


def test_an_ack_of_several_does_not_cover_what_goes_back() -> None:
    """Two commits stood one behind the other at the broker when the door gave up draining: by the second it let go what no client had seen."""

    async def scenario() -> None:
        drained = Draining()
        drained.connection.replica.index.generations.opened(0, 1)
        drained.channel.deliveries[2] = Delivery(("/", "orders"), 2, ())
        for method in commands.Basic.Ack(2), commands.Tx.Commit():
            drained.say(method)
        drained.hear(commands.Tx.RollbackOk())
        while not drained.channel.commits:
            await asyncio.sleep(0)
        drain.give_up(drained.door)
        drained.channel.deliveries[3] = Delivery(("/", "orders"), 3, ())
        for method in commands.Basic.Ack(3, True), commands.Tx.Commit():
            drained.say(method)
        drained.connection.replica.flush()
        drained.hear(commands.Tx.CommitOk())
        drained.hear(commands.Tx.RollbackOk())
        drained.connection.broker.data = b""
        while not drained.channel.commits:
            await asyncio.sleep(0)
        drained.connection.replica.flush()
        commit = encode.method_frame(1, commands.Tx.Commit())
        assert drained.connection.broker.data == encode.nack(1, 1, requeue=True) + encode.ack(1, 3, True) + commit
        assert not drained.channel.internal_acks
        drained.hear(commands.Tx.CommitOk())
        assert not drained.returning

    asyncio.run(scenario())


def test_a_large_transaction_is_not_sent_again_with_each_delivery_of_a_consumer_without_acks() -> None:
    """Each was acked on its own, between what the client had done so far and the same once more: nothing bounded what waited for the broker."""

    async def scenario() -> None:
        connection = Connection()
        relay, replica, broker = connection.relay, connection.replica, connection.broker
        replica.index.generations.opened(0, 1)
        for method in commands.Channel.Open(), commands.Tx.Select(), commands.Basic.Consume(queue="orders", consumer_tag="c", no_ack=True):
            relay.client_data(encode.method_frame(2, method))
        relay.broker_data(encode.method_frame(2, commands.Basic.ConsumeOk("c")))
        large = b"".join(encode.rechannel(message("orders", b"", True, b"x" * 5_000)[0], 2) for _ in range(20))
        relay.client_data(large)
        told = broker.data.count(large)
        for tag in range(1, 101):
            relay.broker_data(encode.rechannel(delivery(tag, tag), 2))
            replica.flush()
        assert broker.data.count(large) - told == 1
        relay.broker_data(encode.method_frame(2, commands.Tx.RollbackOk()) + encode.method_frame(2, commands.Tx.CommitOk()))
        replica.flush()
        assert broker.data.count(large) - told == 2
        again = encode.method_frame(2, commands.Tx.Commit()) + large
        assert broker.data.endswith(b"".join(encode.ack(2, tag) for tag in range(2, 101)) + again)
        assert encode.ack(2, 1) + again in broker.data

    asyncio.run(scenario())


def _kept_back(relay: ClientConnection) -> None:
    relay.door.draining = "a test"
    relay.broker_data(delivery(1, 1))
    assert relay.channels[1].undelivered == [1]


def _withheld(relay: ClientConnection) -> None:
    relay.from_broker.withheld[1] = [delivery(1, 1)]


def _not_read(_: ClientConnection) -> None: ...


def _settled(relay: ClientConnection) -> None:
    relay.channels[1].deliveries[1] = Delivery(("/", "orders"), 1, ())
    relay.client_data(encode.ack(1, 1))


@pytest.mark.parametrize("tx", [False, True])
@pytest.mark.parametrize("state", [_kept_back, _withheld, _not_read, _settled])
@pytest.mark.parametrize("settles", [encode.ack(1, 1), encode.reject(1, 1, requeue=False), encode.nack(1, 1, requeue=False)])
def test_what_the_client_does_not_hold_it_does_not_settle(settles: bytes, state: Callable[[ClientConnection], None], tx: bool) -> None:
    """The broker has given it out: it would let it go, and the log would keep it for ever."""

    async def scenario() -> None:
        connection = Connection()
        relay = connection.relay
        if tx:
            relay.client_data(encode.method_frame(1, commands.Channel.Close(200, "", 0, 0)))
            relay.broker_data(encode.method_frame(1, commands.Channel.CloseOk()))
            relay.client_data(encode.method_frame(1, commands.Channel.Open()) + encode.method_frame(1, commands.Tx.Select()))
        relay.client_data(encode.method_frame(1, commands.Basic.Consume(queue="orders", consumer_tag="c")))
        relay.broker_data(encode.method_frame(1, commands.Basic.ConsumeOk("c")))
        state(relay)
        connection.replica.flush()
        connection.broker.data = b""
        relay.client_data(settles)
        assert settles not in connection.broker.data
        assert b"PRECONDITION_FAILED - unknown delivery tag 1" in relay.channels[1].refusal

    asyncio.run(scenario())


def test_what_was_settled_before_a_tag_that_is_not_held_counts() -> None:
    async def scenario() -> None:
        connection = Connection()
        relay = connection.relay
        relay.channels[1].deliveries[1] = Delivery(("/", "orders"), 1, ())
        relay.client_data(encode.ack(1, 1) + encode.ack(1, 7))
        connection.replica.flush()
        assert [run.WhichOneof("kind") for run in connection.runs] == ["dequeue"]
        assert connection.broker.data.startswith(encode.ack(1, 1))
        assert connection.broker.data.index(encode.ack(1, 1)) < connection.broker.data.index(b"the door closed it")

    asyncio.run(scenario())


def with_transactions() -> Connection:
    """A connection whose channel 2 has them."""
    connection = Connection()
    connection.relay.client_data(encode.method_frame(2, commands.Channel.Open()) + encode.method_frame(2, commands.Tx.Select()))
    connection.broker.data = b""
    return connection


@pytest.mark.parametrize("ends", [commands.Tx.Rollback(), commands.Tx.Commit()])
def test_the_end_of_a_transaction_costs_what_it_covers(ends: base.Frame) -> None:
    """All that the channel held was sorted each time."""

    async def scenario() -> None:
        connection, held, times = with_transactions(), 2_000, 50
        relay = connection.relay
        channel = relay.channels[2]
        channel.deliveries.update((Counted(tag), Delivery(("/", "orders"), tag, ())) for tag in range(1, held + 1))
        Counted.looks = 0
        for tag in range(1, times + 1):
            relay.client_data(encode.ack(2, tag) + encode.method_frame(2, ends))
            relay.broker_data(encode.method_frame(2, commands.Tx.RollbackOk()))
            while relay.from_client.stalled:
                await asyncio.sleep(0)
        assert Counted.looks < 50 * times
        connection.replica.flush()
        assert len(channel.deliveries) == held - len(connection.runs)
        assert len(connection.runs) == (times if ends.name == "Tx.Commit" else 0)

    asyncio.run(scenario())


METHODS = {"publish": message("orders", b"", True, b"")[0], "ack": encode.ack(1, 1), "reject": encode.reject(1, 1, requeue=True)}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_transaction_has_no_more_methods_than_a_commit_may_take(method: bytes) -> None:
    """A commit is done in one turn of the event loop, for which all other clients wait: with 64 MiB of small publishes it took ten seconds."""

    async def scenario() -> None:
        connection, limit = with_transactions(), 100
        relay = connection.relay
        relay.door.config = DoorTable(listen="127.0.0.1:5672", transaction_methods_max=limit)
        channel = relay.channels[2]
        channel.deliveries.update((tag, Delivery(("/", "orders"), tag, ())) for tag in range(1, limit + 2))
        methods = [encode.rechannel(method, 2)] * (limit + 1)
        if method[7:11] != frames.BASIC_PUBLISH.to_bytes(4, "big"):
            methods = [frame[:11] + tag.to_bytes(8, "big") + frame[19:] for tag, frame in enumerate(methods, 1)]
        relay.client_data(b"".join(methods[:limit]))
        assert not channel.closing
        relay.client_data(methods[limit])
        assert b"a transaction of more than 100 methods: door.transaction_methods_max" in channel.refusal

    asyncio.run(scenario())
