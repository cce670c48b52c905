"""What full queues refuse, by what the broker answers. Against real brokers: tests/integration/test_applier.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast
from unittest.mock import AsyncMock, patch

import pytest
from pamqp import commands

from broker_plugin.amqp import content_header, encode
from broker_plugin.amqp.address import Address
from broker_plugin.amqp.errors import BrokerRefuses, ChannelClosed, ConnectionClosed
from broker_plugin.apply import parking_lot
from broker_plugin.apply.applier import Applier
from broker_plugin.apply.declarer import Declarer
from broker_plugin.apply.parked_messages import RETRY_MESSAGES_MAX, RETRY_ROUTED_MAX_S
from broker_plugin.apply.parking_lot import Message, Route
from broker_plugin.apply.vhost_writer import VhostWriter, Window
from broker_plugin.apply.waits import Waits
from broker_plugin.log.replica import Entry, Replica
from broker_plugin.log.shortfall import Shortfall
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.node import Node
from lrq_ha.replication.queue_filter import Kind
from lrq_ha.replication.queues import QueueKey
from lrq_ha.replication.settings import NodeSettings

pytestmark = pytest.mark.proves("queue: reject-publish", "queue: reject-publish behind an exchange")

ADDRESS = Address.parse("amqp://a:b@127.0.0.1:1")
KEY = ("/", "orders")
ROUTE = Route("", KEY[1], (KEY,))
BODY = b"\x03\x00\x01\x00\x00\x00\x01x\xce"


class Broker:
    """A lane's channel and connection: takes what it is sent; `answer` says what becomes of it."""

    number = 1
    error = None
    frame_max_bytes = 131_072
    paused = False

    def __init__(self) -> None:
        self.replica = Replica(Node(NodeSettings(2, {1: "e1", 2: "e2"})), Levels({"^.*$": "all"}), lambda _first, _count, _runs: None)
        self.replica.index.generations.opened(0, 1)
        self.kicked: list[QueueKey | None] = []
        both: Any = self
        self.lane = VhostWriter(ADDRESS, both, both, self.replica, Window(4_000, 1 << 25), Waits(both.tend, Shortfall()), self.kicked.append)
        lane: Any = self.lane
        lane._channel = self
        self.sent = 0
        self.answered = 0
        self.went: list[tuple[str, str, int]] = []  # exchange, routing key, sequence
        self.lengths: dict[str, int] = {}
        self.own: dict[str, str] = {}  # the node's own exchanges, and the queue that each leads to
        self.others: set[str] = set()  # exchanges of their names that are somebody else's
        send = lane._send

        def _send(messages: list[Message]) -> None:
            self.went += [(m.route.exchange, m.route.routing_key, m.sequence) for m in messages]
            send(messages)

        lane._send = _send

    async def tend(self) -> float:
        return await self.lane.tend()

    async def ready(self, queue: str) -> int:
        return self.lengths[queue]

    async def lead_to(self, queue: str, exchange: str) -> bool:
        if exchange not in self.others:
            self.own[exchange] = queue
        return exchange not in self.others

    async def remove_exchange(self, exchange: str) -> None:
        del self.own[exchange]

    def declare(self, *methods: Any, sequence: int = 0) -> None:
        """The log says so. This node has come to what is safe."""
        for method in methods:
            self.replica.declared.noted(sequence, pb.Topology(vhost="/", method=encode.encode_method(method)))

    def fan_out(self, *limited: str) -> None:
        """An exchange to a queue without a limit, and to these."""
        self.declare(commands.Exchange.Declare(exchange="fan", exchange_type="fanout"), commands.Queue.Declare(queue="free"))
        self.declare(*(commands.Queue.Declare(queue=q, arguments={"x-overflow": "reject-publish", "x-max-length": 5}) for q in limited))
        self.declare(*(commands.Queue.Bind(queue=q, exchange="fan") for q in ("free", *limited)))

    def acked(self, queue: str, *ranges: int) -> None:
        """By clients of the primary."""
        self.replica.index.filter.note(100, Kind.DEQUEUE, ("/", queue), ranges, 0, "", sweep=True)
        self.replica.index.filter.safe(100)

    def publish_raw(self, _pieces: list[bytes], count: int) -> None:
        self.sent += count

    def answer(self, ok: bool) -> None:
        """Of all that it has been sent."""
        assert self.answered < self.sent
        self.answered = self.sent
        self.lane._confirmed(self.sent, True, ok)

    async def tried_again(self) -> int:
        """How much the lane sends when it may."""
        before = self.sent
        for parked in self.lane.parked.places.values():
            parked.at = 0.0
        await self.lane.tend()
        return self.sent - before

    def publish(self, *sequences: int, route: Route = ROUTE, fields: bytes = b"") -> None:
        header = content_header.header_payload(1, content_header.properties(fields))
        self.lane.publish([Message(sequence, route, b"1.", header, b"H" + BODY, 1, 1, 1 + len(BODY)) for sequence in sequences])


async def _granted(_vhost: str) -> bool:
    return True


def applier_of(broker: Broker, may_write: Callable[[str], Awaitable[bool]] = _granted, set_objects: Any = None) -> Applier:
    """Without a delay, views and a sweeper."""
    none: Any = None
    return Applier(
        broker.replica, ADDRESS, none, none, delay_s=0.0, delay_entries_max=0, delay_bytes_max=0, window_messages_max=4_000,
        window_bytes_max=1 << 25, on_follow=AsyncMock(), may_write=may_write, set_objects=set_objects,
    )  # fmt: skip


def live(check: Callable[[Broker], Awaitable[None]]) -> None:
    async def go() -> None:
        async with asyncio.timeout(20):
            await check(Broker())

    asyncio.run(go())


def test_what_operators_set_is_carried_out_where_the_log_has_it_and_where_the_log_begins() -> None:
    async def check(broker: Broker) -> None:
        set_objects = AsyncMock()
        applier = applier_of(broker, set_objects=set_objects)
        change = pb.DefinitionsChange(kinds=["users"])
        broker.replica.begins_at = 6
        for sequence, run in enumerate((pb.Run(definitions=change), *[pb.Run(checkpoint=pb.Checkpoint(broker_objects=change))] * 2), 5):
            await applier._apply(Entry(sequence, 1, run, 1, 0.0))
        assert [call.args for call in set_objects.await_args_list] == [(change, 5), (change, 6)]
        log = broker.replica.node.log
        for applier._read_upto, epoch, times in ((0, 0x100 + broker.replica.node.me, 1), (5, 0x1FF, 1), (5, 0x100 + broker.replica.node.me, 0)):
            set_objects.reset_mock()
            with patch.object(type(log), "epoch_at", return_value=epoch):
                await applier._apply(Entry(5, 1, pb.Run(definitions=change), 1, 0.0))
            assert set_objects.await_count == times, "what came from the own broker is not carried out again at a restart"

    live(check)


def test_what_is_parked_goes_with_its_queue() -> None:
    """On a primary, whose clients delete it: also what is on its way to the queue just then, and refused a moment later."""

    async def check(broker: Broker) -> None:
        parked = broker.replica.progress.parked
        broker.publish(*range(1, 31))
        broker.answer(ok=False)
        assert await broker.tried_again() == parking_lot.RETRY_MESSAGES_MIN
        broker.replica.barrier.deleted(KEY, 31)
        broker.answer(ok=False)
        broker.publish(32)
        sent = [await broker.tried_again() for _ in range(4)]
        assert (sum(sent), list(parked)) == (1, [(32, 32)]), "what came after the deletion is for the queue that was declared anew"
        broker.answer(ok=True)
        assert not parked
        assert broker.replica.progress.parked_bytes == 0

    live(check)


def test_a_deletion_waits_for_what_is_tried_again_just_then() -> None:
    """On a backup: it might get there when the queue was declared anew."""

    async def check(broker: Broker) -> None:
        broker.publish(*range(1, 31))
        broker.answer(ok=False)
        flying = await broker.tried_again()
        assert broker.lane.forget_queue(KEY[1], {30}.__contains__) == flying + 1
        broker.answer(ok=True)
        assert broker.lane.forget_queue(KEY[1], {30}.__contains__) == 1
        assert list(broker.replica.progress.parked) == [(30, 30)]

    live(check)


FAN = Route("fan", "k", ())
COPIES = b"\x02CCA\x00\x00\x00\x09S\x00\x00\x00\x04full"


@pytest.mark.parametrize(("route", "fields"), [(FAN, b""), (Route("", "free", ()), COPIES)], ids=["exchange", "CC"])
def test_what_one_of_several_queues_refuses_goes_on_to_that_one_alone(route: Route, fields: bytes) -> None:
    """The others had one more copy of it with each try, as long as that one was full."""

    async def check(broker: Broker) -> None:
        broker.fan_out("full")
        broker.publish(1, 2, 3, route=route, fields=fields)
        broker.answer(ok=False)
        for _ in range(5):
            assert await broker.tried_again() == 3
            broker.answer(ok=False)
        [(own, queue)] = broker.own.items()
        key = route.routing_key
        assert broker.went == [(route.exchange, key, s) for s in (1, 2, 3)] + [(own, key, s) for s in (1, 2, 3)] * 5
        assert queue == "full"
        broker.acked("free", 1, 3)
        broker.acked("full", 1, 2)
        assert await broker.tried_again() == 1
        assert not broker.replica.index.filter.queue(("/", "full")).due, "they were never in it"
        broker.answer(ok=True)
        assert await broker.tried_again() == 0
        assert (broker.lane.parked.places, broker.own, list(broker.replica.progress.parked)) == ({}, {}, [])
        assert broker.replica.progress.parked_bytes == 0

    live(check)


def test_what_has_not_been_on_its_route_does_not_wait_for_ever() -> None:
    """It keeps its place in a full queue while that moves; but it has other queues to go to."""

    async def check(broker: Broker) -> None:
        broker.declare(commands.Exchange.Declare(exchange="topic", exchange_type="topic"), commands.Queue.Declare(queue="free"))
        broker.declare(commands.Queue.Declare(queue="full", arguments={"x-overflow": "reject-publish"}))
        broker.declare(*(commands.Queue.Bind(queue=q, exchange="topic", routing_key="a.#") for q in ("free", "full")))
        full = Route("", "full", (("/", "full"),))
        broker.publish(1, route=Route("topic", "a.1", ()))
        broker.answer(ok=False)
        broker.publish(2, route=Route("topic", "a.2", ()))
        broker.publish(3, route=full)
        broker.publish(4, route=Route("topic", "b", ()))
        assert [s for _, _, s in broker.went] == [1, 4]
        broker.answer(ok=True)
        assert await broker.tried_again() == 3
        assert [s for _, _, s in broker.went] == [1, 4, 1, 2, 3], "in order"
        broker.answer(ok=False)
        broker.publish(5, route=Route("topic", "a.1", ()))
        [parked] = broker.lane.parked.places.values()
        parked.moved -= 2 * parking_lot.HELD_S
        broker.publish(6, route=full)
        broker.publish(7, route=Route("topic", "a.1", ()))
        assert broker.went[-1] == ("topic", "a.1", 7)
        broker.answer(ok=False)
        parked.batch = 1
        assert await broker.tried_again() == 2
        assert broker.went[-2:] == [(parking_lot.alone("full"), "a.1", 1), ("topic", "a.1", 5)]
        assert [sequence for sequence, _ in sorted(parked.waiting)] == [2, 3, 6, 7]
        broker.answer(ok=False)
        assert (await broker.tried_again(), parked.pause_s) == (6, parking_lot.RETRY_S)

    live(check)


def test_where_several_may_have_refused_it_all_have_room_before_it_is_tried_again() -> None:
    """The ones that took it get it once more: so not for nothing, and not when everybody is done with it."""

    async def check(broker: Broker) -> None:
        broker.fan_out("full", "other")
        broker.publish(*range(1, 21), route=FAN)
        broker.answer(ok=False)
        broker.lengths = {"full": 5, "other": 0}
        assert [await broker.tried_again() for _ in range(5)] == [0] * 5
        assert broker.kicked[-2:] in ([("/", "full"), ("/", "other")], [("/", "other"), ("/", "full")])
        broker.publish(21, route=Route("", "other", (("/", "other"),)))
        broker.publish(22, route=FAN)
        broker.lengths["full"] = 3
        assert await broker.tried_again() == 1, "one first; what came by name later waits for it"
        broker.answer(ok=True)
        assert await broker.tried_again() == 2
        broker.answer(ok=False)
        broker.acked("free", 1, 21)
        broker.acked("full", 1, 20)
        broker.acked("other", 1, 20)
        broker.lengths["full"] = 0
        for _ in range(5):
            if await broker.tried_again():
                broker.answer(ok=True)
        assert [s for _, _, s in broker.went if s > 20] == [21, 22]
        assert len(broker.went) == 20 + 1 + 2 + 2
        assert not broker.replica.progress.parked

    live(check)


def test_what_is_refused_by_nobody_knows_whom_is_tried_less_and_less_often() -> None:
    """By a queue that a policy limits."""

    async def check(broker: Broker) -> None:
        broker.fan_out()
        broker.publish(1, 2, route=FAN)
        broker.answer(ok=False)
        pauses = []
        for _ in range(12):
            assert await broker.tried_again() == 1
            broker.answer(ok=False)
            [parked] = broker.lane.parked.places.values()
            pauses.append(parked.pause_s)
        assert pauses[-1] == RETRY_ROUTED_MAX_S > pauses[3] > pauses[0]
        broker.declare(commands.Queue.Declare(queue="late", arguments={"x-overflow": "reject-publish"}), sequence=5)
        broker.declare(commands.Queue.Bind(queue="late", exchange="fan"), sequence=6)
        await broker.tried_again()
        broker.answer(ok=False)
        assert set(broker.lane.parked.places) == {FAN}
        broker.replica.progress.safe_advanced(6)
        broker.publish(7, route=FAN)
        await broker.tried_again()
        broker.answer(ok=False)
        [parked] = broker.lane.parked.places.values()
        assert [s for s, _ in sorted(parked.waiting)] == [1, 2, 7], "it would overtake them in what refuses them"
        broker.acked("free", 1, 2)
        assert await broker.tried_again() == 1, "they never were for the one that was bound later"
        assert list(broker.replica.progress.parked) == [(7, 7)]

    live(check)


def test_what_may_refuse_it_is_what_this_node_has_declared() -> None:
    """The log is ahead of that by the delay, or by what waits for a sweeper."""

    async def check(broker: Broker) -> None:
        broker.fan_out("full")
        broker.publish(1, route=FAN)
        broker.declare(commands.Queue.Declare(queue="late", arguments={"x-overflow": "reject-publish"}), sequence=5)
        broker.declare(commands.Queue.Bind(queue="late", exchange="fan"), sequence=6)
        broker.declare(commands.Queue.Unbind(queue="full", exchange="fan"), sequence=7)
        broker.answer(ok=False)
        assert set(broker.lane.parked.places) == {frozenset({"full"})}
        assert await broker.tried_again() == 1
        assert broker.went[-1] == (parking_lot.alone("full"), "k", 1)
        broker.answer(ok=False)
        broker.acked("free", 1, 1)
        broker.acked("late", 1, 1)
        assert await broker.tried_again() == 1, "nobody has acknowledged it where it is missing"
        broker.answer(ok=False)
        broker.replica.progress.safe_advanced(7)
        assert await broker.tried_again() == 1
        assert broker.went[-1] == (parking_lot.alone("full"), "k", 1)

    live(check)


def test_a_queue_that_is_unbound_before_it_takes_a_message_still_misses_it() -> None:
    async def check(broker: Broker) -> None:
        broker.fan_out()
        broker.declare(commands.Queue.Declare(queue="by-policy"), commands.Queue.Bind(queue="by-policy", exchange="fan"))
        broker.publish(1, route=FAN)
        broker.answer(ok=False)
        broker.declare(commands.Queue.Unbind(queue="by-policy", exchange="fan"), sequence=5)
        broker.replica.progress.safe_advanced(5)
        broker.acked("free", 1, 1)
        assert await broker.tried_again() == 1
        broker.answer(ok=False)
        broker.acked("by-policy", 1, 1)
        assert await broker.tried_again() == 0
        assert not broker.replica.progress.parked

    live(check)


def test_new_refusals_do_not_put_off_the_next_try() -> None:
    """A publisher had what is parked wait for as long as it went on; nobody saw either that it was not needed any more."""

    async def check(broker: Broker) -> None:
        broker.fan_out("full")
        broker.publish(1, 2, route=FAN)
        broker.answer(ok=False)
        [parked] = broker.lane.parked.places.values()
        parked.moved -= 2 * parking_lot.HELD_S
        at, kicked, parked.batch = parked.at, len(broker.kicked), 100
        for sequence in range(3, 20):
            broker.publish(sequence, route=FAN)
            broker.answer(ok=False)
        assert (parked.at, parked.batch, len(broker.kicked)) == (at, 100, kicked)
        broker.acked("full", 1, 2)
        await broker.lane.tend()
        assert (broker.sent, list(broker.replica.progress.parked)) == (19, [(3, 19)])
        parked.at = 0.0
        await broker.lane.tend()
        broker.answer(ok=False)
        assert parked.at > at
        assert len(broker.kicked) > kicked
        broker.acked("full", 3, 19)
        await broker.lane.tend()
        assert (broker.lane.parked.places, broker.own) == ({}, {}), "also before the next try is due"

    live(check)


def test_what_has_not_been_on_its_route_goes_in_parts() -> None:
    async def check(broker: Broker) -> None:
        broker.fan_out("full")
        broker.publish(1, route=FAN)
        broker.answer(ok=False)
        broker.publish(*range(2, 2_002), route=FAN)
        [parked] = broker.lane.parked.places.values()
        parked.moved -= 2 * parking_lot.HELD_S
        parked.batch = 1
        waits: list[int] = []
        broker.paused = True

        async def drained() -> None:
            waits.append(broker.sent)

        cast(Any, broker).drained = drained
        sent = []
        for _ in range(4):
            parked.at = 0.0
            await broker.lane.tend()
            sent.append(broker.sent - broker.answered)
            broker.answer(ok=False)
        assert sent == [1 + RETRY_MESSAGES_MAX, 16 + 2_000 - RETRY_MESSAGES_MAX, 16, 16]
        assert len(waits) == 4
        assert [s for exchange, _, s in broker.went if exchange == "fan"] == list(range(1, 2_002)), "once, and in order"

    live(check)


def test_where_its_own_exchange_is_somebody_elses_it_goes_as_it_came() -> None:
    """The incarnation ended over it, and the next."""

    async def check(broker: Broker) -> None:
        broker.fan_out("full")
        broker.others.add(parking_lot.alone("full"))
        broker.publish(1, 2, route=FAN)
        broker.answer(ok=False)
        assert await broker.tried_again() == 0
        assert set(broker.lane.parked.places) == {frozenset({"full"}), FAN}
        assert await broker.tried_again() == 1
        assert broker.went[-1] == ("fan", "k", 1)
        broker.publish(3, route=FAN)
        broker.answer(ok=False)
        assert set(broker.lane.parked.places) == {FAN}
        broker.acked("full", 1, 2)
        assert await broker.tried_again() == 1
        assert broker.went[-1] == ("fan", "k", 3)
        broker.answer(ok=True)
        await broker.lane.tend()
        assert (broker.lane.parked.places, list(broker.replica.progress.parked)) == ({}, [])

    live(check)


def test_its_own_exchange_is_made_once_and_again_when_anything_is_declared() -> None:
    """Its queue may have gone and come again. Each try took two answers of the broker, in which nothing else was done."""
    asked: list[str] = []

    class Channel:
        error: Any = None

        async def channel(self) -> Channel:
            return self

        async def exchange_declare(self, exchange: str, _kind: str, *, durable: bool) -> None:
            asked.append(f"exchange {exchange}")
            if exchange == "other":
                raise ChannelClosed(406, "PRECONDITION_FAILED - inequivalent arg 'type'")

        async def queue_bind(self, queue: str, _exchange: str) -> None:
            asked.append(f"bind {queue}")
            if queue == "gone":
                raise ChannelClosed(404, "NOT_FOUND - no queue 'gone' in vhost '/'")

        async def exchange_delete(self, exchange: str) -> None: ...

        async def _call(self, _method: int, _arguments: bytes) -> None: ...

    async def go() -> None:
        declarer = Declarer(ADDRESS, cast(Any, Channel()), "e2", Shortfall())
        both = ["exchange own", "bind full"]
        assert await declarer.lead_to("full", "own")
        assert await declarer.lead_to("full", "own")
        assert asked == both
        await declarer.execute(encode.encode_method(commands.Queue.Declare(queue="full", durable=True)))
        assert await declarer.lead_to("full", "own")
        assert asked == both * 2
        await declarer.remove_exchange("own")
        assert await declarer.lead_to("full", "own")
        assert asked == both * 3
        assert await declarer.lead_to("gone", "of-gone")
        assert await declarer.lead_to("gone", "of-gone")
        assert asked[6:] == ["exchange of-gone", "bind gone"] * 2
        assert not await declarer.lead_to("full", "other")

    asyncio.run(go())


@pytest.mark.parametrize("buffer_full", [False, True])
@pytest.mark.parametrize("code", [541, 320])
def test_a_message_over_which_the_broker_ends_the_connection_is_in_doubt_for_the_next(code: int, buffer_full: bool) -> None:
    """Also where who waits for room in the connection's buffer hears of the end first: the next incarnation ended over the same, and so on."""

    async def scenario() -> Applier:
        broker: Any = Broker()
        applier = applier_of(broker)
        applier._lanes["/"], broker.lane.abort, broker.lane._waits = broker.lane, lambda: None, applier._waits
        broker.replica.node.log.epoch_at = lambda _sequence: 258
        broker.replica.progress.safe = 3
        header = content_header.header_payload(1, content_header.properties(b""))
        frame = encode.publish_method(1, "", "orders") + b"".join(encode.content(1, header, b"x", 4_096))
        run = pb.Run(enqueues=pb.Enqueues(vhost="/", channel=1, frames=frame * 3, lengths=[len(frame)] * 3))
        broker.replica.to_apply.append(Entry(1, 3, run, 100, 0.0))
        end = ConnectionClosed(code, "over one of them, or not")

        def publish_raw(_pieces: list[bytes], _count: int) -> None:
            if buffer_full:
                broker.paused = True
            else:
                broker.error = end
                applier.wake()

        async def drained() -> None:
            broker.error = end
            raise end

        broker.publish_raw, broker.drained = publish_raw, drained
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(applier.run(), 60)
        return applier

    assert (asyncio.run(scenario()).doubt is not None) is (code == 541)


def test_a_declaration_that_is_refused_is_tried_again_while_the_log_declares_it() -> None:
    """It was passed over: its queue was missing after a failover, and only a log line said so."""
    refuses = True
    shortfall = Shortfall()

    class Channel:
        error = None

        async def channel(self) -> Channel:
            return self

        async def _call(self, _method: int, _arguments: bytes) -> None:
            if refuses:
                raise ChannelClosed(406, "PRECONDITION_FAILED - inequivalent arg 'x-max-length' for queue 'orders' in vhost '/'")

    async def go() -> None:
        nonlocal refuses
        declarer = Declarer(ADDRESS, cast(Any, Channel()), "e2", shortfall)
        method = encode.encode_method(commands.Queue.Declare(queue="orders", durable=True))
        await declarer.execute(method)
        assert shortfall.refusals.knows("/", method)
        assert shortfall.tell() == "", "a later entry may delete it"
        await declarer.try_again(lambda _vhost, each: each == method)
        assert shortfall.tell().startswith("queue 'orders' in vhost '/' is refused here (PRECONDITION_FAILED")
        assert shortfall.tell().endswith("then lrq-ha reinit e2 --discard")
        refuses = False
        await declarer.try_again(lambda _vhost, each: each == method)
        assert "was missing here, and so may be what was published to it: lrq-ha reinit e2 --discard" in shortfall.tell()
        refuses = True
        other = encode.encode_method(commands.Queue.Declare(queue="gone", durable=True))
        await declarer.execute(other)
        await declarer.try_again(lambda _vhost, each: each == method)
        assert "'gone'" not in shortfall.tell(), "the log declares it no more"
        assert "was missing here" in Shortfall(shortfall).tell(), "also in the next incarnation"
        await declarer.try_again(lambda _vhost, _each: False)
        assert (len(shortfall.refusals), shortfall.tell()) == (0, "")

    asyncio.run(go())


def test_a_right_that_is_missing_is_no_refusal_to_pass_over() -> None:
    class Channel:
        error = None

        async def channel(self) -> Channel:
            return self

        async def _call(self, _method: int, _arguments: bytes) -> None:
            raise ChannelClosed(403, "ACCESS_REFUSED - configure access to queue 'orders' in vhost '/' refused for user 'a'")

    async def go() -> None:
        declarer = Declarer(ADDRESS, cast(Any, Channel()), "e2", Shortfall())
        with pytest.raises(BrokerRefuses, match=r"rabbitmqctl set_permissions -p / a '\.\*' '\.\*' '\.\*'"):
            await declarer.execute(encode.encode_method(commands.Queue.Declare(queue="orders", durable=True)))

    asyncio.run(go())


@pytest.mark.parametrize("hurry", [False, True])
def test_a_vhost_without_rights_is_tried_now_and_then(hurry: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is taken for applied meanwhile, whatever waits behind it."""
    monkeypatch.setattr("broker_plugin.apply.applier.REFUSED_AGAIN_S", 0.05)
    tried: list[str] = []

    async def may_write(vhost: str) -> bool:
        tried.append(vhost)
        return False

    async def scenario() -> None:
        broker: Any = Broker()
        applier = applier_of(broker, may_write)
        applier.hurry = hurry
        broker.replica.progress.safe = 1
        broker.replica.to_apply.append(Entry(1, 1, pb.Run(enqueues=pb.Enqueues(vhost="shop", lengths=[1])), 100, 0.0))
        running = asyncio.create_task(applier.run())
        await asyncio.sleep(0.5)
        assert not running.done()
        running.cancel()
        assert broker.replica.progress.tracker.applied == 0

    asyncio.run(scenario())
    assert 2 <= len(tried) <= 11
