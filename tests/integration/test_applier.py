"""The applier and the sweeper against a real broker, with a replica whose log is fed by hand."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, ClassVar
from unittest.mock import AsyncMock

import pika
import pytest
from pamqp import commands

from broker_plugin.amqp import content_header, encode, frames, requeue
from broker_plugin.amqp.connection import Address, Channel, Connection
from broker_plugin.amqp.errors import ChannelClosed
from broker_plugin.amqp.requeue import WIDE_WINDOW_MESSAGES, is_empty
from broker_plugin.apply import parking_lot, rejected_messages, waits
from broker_plugin.apply.applier import Applier
from broker_plugin.apply.vhost_writer import STRIKES_MAX, SuspectEntries
from broker_plugin.log import stamps
from broker_plugin.log.replica import Replica
from broker_plugin.sweep import sweep_pass, sweeper
from broker_plugin.sweep.sweeper import Sweeper
from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.log import LogState
from lrq_ha.replication.node import Node
from lrq_ha.replication.settings import NodeSettings

pytestmark = pytest.mark.broker
EPOCH, GENERATION, FOREIGN_CHANNEL = 258, 3, 77
PATIENCE_S = 120.0
SOON_S = 8.0
Message = tuple[bytes | None, bytes]  # stamp, body


@pytest.fixture(scope="module")
def lab(broker_version: str) -> Iterator[Lab]:
    denied = {} if broker_version.startswith("3.") else {"deprecated_features.permit.transient_nonexcl_queues": "false"}
    with Lab(groups={"applier": 1}, brokers_only=True, broker=broker_version, vhosts=["down"], settings=denied) as lab:
        yield lab


@pytest.fixture(autouse=True)
def _emptied(lab: Lab) -> Iterator[None]:
    """No queue outlives its test: a second try begins as the first did."""
    yield
    with pika.BlockingConnection(pika.URLParameters(lab.nodes["a1"].admin)) as connection:
        channel = connection.channel()
        while Rig.declared:
            channel.queue_delete(Rig.declared.pop())


class Rig:
    """A backup's replica, applier and sweeper; `add` is what the primary sends.

    Attributes:
        declared: Queues in vhost / that the log of any of them has declared.
    """

    declared: ClassVar[set[str]] = set()

    def __init__(
        self, url: str, *, delay_s: float = 0.0, window: int = 1_000, generation: int = GENERATION, doubt: SuspectEntries | None = None
    ) -> None:
        self.node = Node(NodeSettings(2, {1: "e1", 2: "e2"}))
        self.replica = Replica(self.node, Levels({"^.*$": "all"}), lambda _first, _count, _runs: None)
        self.replica.index.generations.opened(0, generation)
        self.views: list[tuple[str, bytes, int, int]] = []
        self.sweeper = Sweeper(self.replica, Address.parse(url), interval_s=0.1)
        self.applier = Applier(
            self.replica,
            Address.parse(url),
            self,
            self.sweeper,
            delay_s=delay_s,
            delay_entries_max=100_000,
            delay_bytes_max=1 << 30,
            window_messages_max=window,
            window_bytes_max=8 << 20,
            on_follow=AsyncMock(),
            may_write=AsyncMock(return_value=True),
            doubt=doubt,
        )
        self.replica.progress.on_wake = self.applier.wake
        self.end = 0

    async def append(self, queue: str, body: bytes, sequence: int, epoch: int) -> None:
        self.views.append((queue, body, sequence, epoch))
        self.replica.progress.applied(sequence, sequence)

    def add(self, *runs: pb.Run, safe: bool = True) -> int:
        """Appends a batch; returns the first sequence."""
        for run in runs:
            method: Any = frames.decode_method(run.topology.method) if run.topology.vhost == "/" else None
            if isinstance(method, commands.Queue.Declare):
                Rig.declared.add(method.queue)
        first = self.end + 1
        self.end += sum(len(run.enqueues.lengths) or 1 for run in runs)
        self.node.log.restore(LogState(EPOCH, self.end, ((EPOCH, 1),), (), True))
        self.replica.index_batch(first, runs)
        if safe:
            self.replica.progress.safe_advanced(self.end)
        return first

    async def applied(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.replica.progress.wait_applied(self.end)


@asynccontextmanager
async def rig_at(lab: Lab, **options: Any) -> AsyncIterator[tuple[Rig, Channel]]:
    rig = Rig(lab.nodes["a1"].admin, **options)
    tasks = [asyncio.create_task(rig.applier.run())]
    connection = await Connection.open(lab.nodes["a1"].admin)
    try:
        yield rig, await connection.channel()
        assert not tasks[0].done(), tasks[0].exception()
    finally:
        tasks[0].cancel()
        with suppress(asyncio.CancelledError, Exception):
            await tasks[0]
        await rig.sweeper.stop()
        await connection.close()


def publishes(bodies: list[bytes], key: str, exchange: str = "", *, fields: bytes = b"", mandatory: bool = False, **properties: Any) -> pb.Run:
    run = pb.Run()
    run.enqueues.vhost, run.enqueues.channel = "/", FOREIGN_CHANNEL
    blob = b""
    for body in bodies:
        wanted = commands.Basic.Properties(**properties).marshal() if properties else content_header.properties(fields)
        header = content_header.header_payload(len(body), wanted)
        one = encode.publish_method(FOREIGN_CHANNEL, exchange, key, mandatory) + b"".join(encode.content(FOREIGN_CHANNEL, header, body))
        run.enqueues.lengths.append(len(one))
        blob += one
    run.enqueues.frames = blob
    return run


def topology(method: Any) -> pb.Run:
    return pb.Run(topology=pb.Topology(vhost="/", method=encode.encode_method(method)))


def declare(queue: str, kind: str = "classic", /, **arguments: Any) -> pb.Run:
    return topology(commands.Queue.Declare(queue=queue, durable=True, arguments={"x-queue-type": kind, **arguments}))


def dequeue(queue: str, *ranges: int) -> pb.Run:
    return pb.Run(dequeue=pb.Dequeue(vhost="/", queue=queue, sequences=ranges))


async def content(channel: Channel, queue: str) -> list[Message]:
    """Everything in a queue, which is empty afterwards."""
    got: list[Message] = []

    def take(tag: int, _r: bool, _e: str, _k: str, header: bytes, body: bytes) -> None:
        got.append((stamps.position(header), body))
        channel.ack(tag)

    await channel.qos(1_000)
    tag = await channel.consume(queue, take)
    while True:
        before = len(got)
        await asyncio.sleep(0.2)
        left = await ready(channel, queue)
        await channel.flow()  # what the queue has given is here, however slow the machine
        if not left and len(got) == before:
            break
    await channel.cancel(tag)
    return got


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % n for n in range(start, start + count)]


def stamp(sequence: int) -> bytes:
    return b"%d.%d/%d" % (EPOCH, sequence, GENERATION)


async def ready(channel: Channel, queue: str) -> int:
    return (await channel.queue_declare(queue, passive=True))[1]


async def holds(channel: Channel, queue: str, count: int) -> None:
    """Waits until so many are ready: of a sweeper that has ended, a busy quorum queue has back late what it held."""
    async with asyncio.timeout(PATIENCE_S):
        while await ready(channel, queue) != count:
            await asyncio.sleep(0.05)


async def swept(rig: Rig, queue: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while rig.replica.index.filter.queue(("/", queue)).due.count(rig.end):
            await asyncio.sleep(0.005)


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_applies_in_order_with_stamps(lab: Lab, kind: str) -> None:
    async def go() -> None:
        queue = f"order-{kind}"
        async with rig_at(lab, window=200) as (rig, channel):
            rig.add(declare(queue, kind))
            rig.add(publishes(numbered(3_000), queue, mandatory=True), pb.Run(members=pb.Members(nodes=[1, 2])))
            big = os.urandom(300_000)
            last = rig.add(publishes([big, b""], queue))
            await rig.applied()
            await rig.applier.drained()
            assert rig.replica.to_apply_bytes == 0
            got = await content(channel, queue)
            assert got[:3_000] == [(stamp(2 + n), b"%d" % n) for n in range(3_000)]
            assert got[3_000:] == [(stamp(last), big), (stamp(last + 1), b"")]

    asyncio.run(go())


@pytest.mark.quick
def test_unsafe_entries_wait(lab: Lab) -> None:
    async def go() -> None:
        async with rig_at(lab) as (rig, channel):
            rig.add(declare("unsafe"))
            await rig.applied()
            rig.add(publishes([b"x"], "unsafe"), safe=False)
            await asyncio.sleep(0.3)
            assert await ready(channel, "unsafe") == 0
            rig.replica.progress.safe_advanced(rig.end)
            await rig.applied()
            assert await ready(channel, "unsafe") == 1

    asyncio.run(go())


@pytest.mark.quick
def test_delay_and_skip(lab: Lab) -> None:
    """What is consumed within the delay, or refused, never reaches the queue; a message with CC does."""

    async def go() -> None:
        async with rig_at(lab, delay_s=0.6) as (rig, channel):
            began = time.monotonic()
            rig.add(declare("late"), declare("other"))
            first = rig.add(publishes(numbered(10), "late"))
            cc = b"\x02CCA" + b"\x00\x00\x00\x0aS\x00\x00\x00\x05other"
            with_cc = rig.add(publishes([b"cc"], "late", fields=cc))
            rig.add(dequeue("late", first, first + 7, with_cc, with_cc), pb.Run(refused=pb.Refused(sequences=[first + 9, first + 9])))
            await rig.applied()
            assert time.monotonic() - began > 0.5
            assert await content(channel, "late") == [(stamp(first + 8), b"8"), (stamp(with_cc), b"cc")]
            assert await content(channel, "other") == [(stamp(with_cc), b"cc")]
            assert rig.replica.index.filter.queue(("/", "late")).due.count(rig.end) == 1  # the copy of the CC message
            rig.applier._delay_s = 1e9
            rig.add(publishes([b"hurried"], "late"))
            rig.applier.hurry = True
            await rig.applier.drained()
            assert await ready(channel, "late") == 1

    asyncio.run(go())


@pytest.mark.quick
def test_topology_purge_views(lab: Lab) -> None:
    async def go() -> None:
        async with rig_at(lab) as (rig, channel):
            rig.add(
                topology(commands.Exchange.Declare(exchange="t-ex", exchange_type="topic", durable=True)),
                declare("t-q"),
                topology(commands.Queue.Bind(queue="t-q", exchange="t-ex", routing_key="a.#")),
                publishes([b"1"], "a.b", "t-ex"),
                topology(commands.Queue.Unbind(queue="t-q", exchange="t-ex", routing_key="a.#")),
                publishes([b"2"], "a.b", "t-ex"),
                declare("t-q", "quorum"),  # 406 here: passed over
                topology(commands.Queue.Bind(queue="t-none", exchange="t-ex", routing_key="x")),  # 404
                publishes([b"3"], "t-q"),
                pb.Run(transmission=pb.Transmission(queue="LRQ_Send_LogEntries", body=b"t")),
                pb.Run(status=pb.StatusEntry(body=pb.Status(key="k").SerializeToString())),
            )
            await rig.applied()
            assert [(view[0], *view[2:]) for view in rig.views] == [("LRQ_Send_LogEntries", 10, EPOCH), ("LRQ_Status", 11, EPOCH)]
            assert await content(channel, "t-q") == [(stamp(4), b"1"), (stamp(9), b"3")]
            first = rig.add(publishes(numbered(50), "t-q"))
            await rig.applied()
            rig.add(pb.Run(purge=pb.Purge(vhost="/", queue="t-q", before=first + 50)), publishes([b"after"], "t-q"))
            await rig.applied()
            assert [body for _, body in await content(channel, "t-q")] == [b"after"]
            rig.add(publishes([b"left"], "t-q"), topology(commands.Queue.Delete(queue="t-q", if_empty=True)))
            await rig.applied()
            with pytest.raises(Exception, match="404"):
                await ready(channel, "t-q")

    asyncio.run(go())


@pytest.mark.one_version("4.3")
def test_a_queue_that_this_broker_does_not_permit(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """One that is not durable, as RabbitMQ 3 and the primary's broker permit it: the connection is closed over it, which ended every applier."""

    async def go() -> None:
        async with rig_at(lab) as (rig, channel):
            for queue in ("denied-1", "denied-2"):
                rig.add(topology(commands.Queue.Declare(queue=queue, arguments={"x-queue-type": "classic"})), publishes([b"lost"], queue))
            rig.add(declare("permitted"), publishes([b"kept"], "permitted"))
            await rig.applied()
            assert [body for _, body in await content(channel, "permitted")] == [b"kept"]
            async with asyncio.timeout(PATIENCE_S):
                while "'denied-2'" not in rig.replica.shortfall.tell():
                    await asyncio.sleep(0.05)

    asyncio.run(go())
    for queue in ("denied-1", "denied-2"):
        assert f"queue '{queue}' in vhost '/' is refused here (" in caplog.text
    assert "deprecated_features.permit.*" in caplog.text


@pytest.mark.quick
def test_exchange_gone(lab: Lab) -> None:
    """Publishes to an exchange that is missing here are passed over; their neighbours are not lost."""

    async def go() -> None:
        async with rig_at(lab) as (rig, channel):
            rig.add(declare("gone-q"))
            rig.add(publishes(numbered(200), "gone-q"), publishes([b"x", b"y"], "k", "gone-ex"), publishes(numbered(200, 200), "gone-q"))
            rig.add(publishes([b"z"], "k", "gone-ex"), publishes([b"last"], "gone-q"))
            await rig.applied()
            bodies = [body for _, body in await content(channel, "gone-q")]
            assert bodies == [*numbered(400), b"last"]

    asyncio.run(go())


def test_exchange_gone_behind_a_full_queue(lab: Lab) -> None:
    """What the queue was about to refuse had no answer when the broker closed the channel: it was taken for written, and was lost."""

    async def go() -> None:
        async with rig_at(lab) as (rig, channel):
            rig.add(declare("full-gone", **{"x-max-length": 5, "x-overflow": "reject-publish"}))
            await rig.applied()
            rig.add(publishes(numbered(500), "full-gone"), publishes([b"x"], "k", "gone-ex"))
            found: list[int] = []
            async with asyncio.timeout(PATIENCE_S):
                while len(found) < 500:
                    found += [int(body) for _, body in await content(channel, "full-gone")]
            assert sorted(found) == list(range(500)), "in any order: room was made while they were on their way"
            await rig.applied()

    asyncio.run(go())


def test_exchange_that_goes_by_itself(lab: Lab) -> None:
    """Nobody could know: what has no answer is written again, under a new generation."""
    generation = GENERATION + 1

    async def ends(old: Rig, number: int) -> list[pb.Run]:
        """What came last, if the applier ended over it; empty if a quick broker had answered the rest of it before."""
        fleeting, full = f"fleeting-{number}", f"full-fleeting-{number}"
        running = asyncio.create_task(old.applier.run())
        limited = declare(full, **{"x-max-length": 5, "x-overflow": "reject-publish"})
        old.add(topology(commands.Exchange.Declare(exchange=fleeting, durable=True)), limited, publishes([b"x"], "k", fleeting))
        await old.applied()
        connection = await Connection.open(lab.nodes["a1"].admin)
        await (await connection.channel()).exchange_delete(fleeting)
        await connection.close()
        after = [publishes(numbered(500), full), publishes([b"x"], "k", fleeting)]
        old.add(*after)
        await asyncio.wait({running}, timeout=SOON_S)
        if not running.done():
            running.cancel()
            return []
        with pytest.raises(LrqError, match=f"no exchange '{fleeting}'"):
            await running
        return after

    async def go() -> None:
        for number in range(10):
            old = Rig(lab.nodes["a1"].admin)
            if after := await ends(old, number):
                break
        else:
            pytest.fail("the broker was quicker each time")
        async with rig_at(lab, generation=generation, doubt=old.applier.doubt) as (rig, channel):
            rig.add(*after)
            found: list[int] = []
            async with asyncio.timeout(PATIENCE_S):
                while len(found) < 500:
                    content_ = await content(channel, f"full-fleeting-{number}")
                    found += [int(body) for mark, body in content_ if mark and mark.endswith(b"/%d" % generation)]
            assert sorted(found) == list(range(500)), "in any order: room was made while they were on their way"
            await rig.applied()

    asyncio.run(go())


@pytest.mark.proves("queue: reject-publish")
@pytest.mark.quick("3.10", "4.3")
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_full_queue(lab: Lab, kind: str) -> None:
    """A reject-publish queue at its limit: the sweeper makes room, nothing is lost, other queues go on, order stays."""

    async def go() -> None:
        full = f"full-{kind}"
        async with rig_at(lab) as (rig, channel):
            rig.add(declare(full, kind, **{"x-max-length": 50, "x-overflow": "reject-publish"}), declare("beside"))
            first = rig.add(publishes(numbered(50), full))
            await rig.applied()
            second = rig.add(publishes(numbered(40, 50), full), publishes([b"free"], "beside"))
            async with asyncio.timeout(PATIENCE_S):
                while not rig.replica.progress.tracker.is_applied(second + 40):
                    await asyncio.sleep(0.05)
            assert await content(channel, "beside") == [(stamp(second + 40), b"free")]
            sweeping = asyncio.create_task(rig.sweeper.run())
            await asyncio.sleep(0.3)  # in which it finds nothing to do
            rig.add(dequeue(full, first, first + 44))
            await rig.applied()  # a quorum queue counts its length late and may have taken all of them by now
            await swept(rig, full)
            await rig.sweeper.stop()
            await sweeping
            await holds(channel, full, 45)
            assert sorted(int(body) for _, body in await content(channel, full)) == list(range(45, 90))

    asyncio.run(go())


@pytest.mark.proves("queue: reject-publish")
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_full_queue_holds_up_no_other(lab: Lab, kind: str) -> None:
    """However much waits for room in it: it filled the window, and nothing else was written, nor could this node take over."""

    async def go() -> None:
        full, beside, window = f"overfull-{kind}", f"beside-overfull-{kind}", 100
        async with rig_at(lab, window=window) as (rig, channel):
            rig.add(declare(full, kind, **{"x-max-length": 50, "x-overflow": "reject-publish"}), declare(beside))
            rig.add(publishes(numbered(50), full))
            await rig.applied()
            rig.add(*(publishes(numbered(window, 50 + window * part), full) for part in range(5)))
            free = rig.add(publishes([b"free"], beside))
            async with asyncio.timeout(PATIENCE_S):
                while not rig.replica.progress.tracker.is_applied(free):
                    await asyncio.sleep(0.05)
                rig.applier.hurry = True
                await rig.applier.drained()
            parked = len(rig.replica.progress.parked)
            assert parked > 3 * window  # a quorum queue counts its length late
            assert rig.applier.full() == f"queue '{full}' in vhost '/' is full here, and {parked} messages wait for room"
            assert rig.replica.progress.parked_bytes > 0
            assert await content(channel, beside) == [(stamp(free), b"free")]
            found: list[int] = []
            async with asyncio.timeout(PATIENCE_S):
                while len(found) < 50 + 5 * window:
                    found += [int(body) for _, body in await content(channel, full)]
            await rig.applied()
            assert found == list(range(50 + 5 * window)), "in order"
            assert (rig.applier.full(), len(rig.replica.progress.parked), rig.replica.progress.parked_bytes) == ("", 0, 0)

    asyncio.run(go())


@pytest.mark.proves("queue: reject-publish behind an exchange")
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_full_queue_behind_an_exchange(lab: Lab, kind: str) -> None:
    """The other queues of what it refuses get that once, and at once; it goes on to the full one when there is room, with its routing key."""

    async def go() -> None:
        full, free, fan = f"full-of-fan-{kind}", f"free-of-fan-{kind}", f"fan-{kind}"
        async with rig_at(lab) as (rig, channel):
            limited = declare(full, kind, **{"x-max-length": 5, "x-overflow": "reject-publish"})
            binds = [topology(commands.Queue.Bind(queue=q, exchange=fan, routing_key="a.#")) for q in (full, free)]
            rig.add(topology(commands.Exchange.Declare(exchange=fan, exchange_type="topic", durable=True)), limited, declare(free, kind), *binds)
            first = rig.end + 1
            for part in range(8):  # a quorum queue counts its length late
                rig.add(publishes(numbered(5, 5 * part), "a.1", fan))
                await asyncio.sleep(0.1)
            sweeping = asyncio.create_task(rig.sweeper.run())
            async with asyncio.timeout(PATIENCE_S):
                while not rig.replica.progress.parked or await ready(channel, free) < 40:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(parking_lot.HELD_S + 0.5)
            rig.add(publishes(numbered(10, 40), "a.2", fan))
            await holds(channel, free, 50)
            await asyncio.sleep(1)  # it is tried again
            assert await ready(channel, free) == 50
            rig.add(dequeue(full, first, first + 29), dequeue(free, first, first + 4))
            await holds(channel, free, 45)
            found: list[tuple[str, int]] = []

            def take(tag: int, _r: bool, _e: str, key: str, _header: bytes, body: bytes) -> None:
                found.append((key, int(body)))
                channel.ack(tag)

            await channel.consume(full, take)
            await rig.applied()
            await channel.flow()
            assert sorted(found) == [("a.1", n) for n in range(30, 40)] + [("a.2", n) for n in range(40, 50)]
            assert [body for _, body in await content(channel, free)] == numbered(45, 5)
            await rig.sweeper.stop()
            await sweeping
            await asyncio.sleep(0.5)
            with pytest.raises(ChannelClosed, match="no exchange"):
                await channel.exchange_declare(parking_lot.alone(full), passive=True)

    asyncio.run(go())


def test_full_queue_deleted(lab: Lab) -> None:
    async def go() -> None:
        async with rig_at(lab) as (rig, _channel):
            rig.add(declare("doomed", **{"x-max-length": 5, "x-overflow": "reject-publish"}))
            rig.add(publishes(numbered(20), "doomed"))
            await asyncio.sleep(0.5)
            assert not rig.replica.progress.tracker.is_applied(rig.end)
            rig.add(topology(commands.Queue.Delete(queue="doomed")))
            await rig.applied()

    asyncio.run(go())


@pytest.mark.proves("queue: rejected before a purge")
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_rejected_messages_that_wait_for_room(lab: Lab, kind: str) -> None:
    """Nobody waits for them before a declaration; they are dead letters all the same when their queue is deleted."""

    async def go() -> None:
        full, dead, limit, more = f"rejecting-{kind}", f"rejected-{kind}", 5, 12
        arguments = {"x-max-length": limit, "x-overflow": "reject-publish", "x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
        async with rig_at(lab) as (rig, channel):
            rig.add(declare(dead, kind), declare(full, kind, **arguments))
            async with asyncio.timeout(PATIENCE_S):
                while not rig.replica.progress.parked:  # a quorum queue counts its length late
                    rig.add(publishes(numbered(limit), full))
                    await asyncio.sleep(0.1)
            first = rig.add(publishes(numbered(more, 100), full))
            sweeping = asyncio.create_task(rig.sweeper.run())
            rig.add(pb.Run(reject=pb.Dequeue(vhost="/", queue=full, sequences=[first, first + more - 1])))
            declared = rig.add(declare(f"beside-{full}"))
            began = time.monotonic()
            async with asyncio.timeout(PATIENCE_S):
                while not rig.replica.progress.tracker.is_applied(declared):
                    await asyncio.sleep(0.05)
            assert time.monotonic() - began < rejected_messages.STILL_S / 4
            assert await ready(channel, dead) == 0
            rig.add(topology(commands.Queue.Delete(queue=full)))
            await rig.applied()
            await holds(channel, dead, more)
            assert sorted(int(body) for _, body in await content(channel, dead)) == list(range(100, 100 + more))
            assert not rig.replica.progress.parked
            await rig.sweeper.stop()
            await sweeping

    asyncio.run(go())


@contextmanager
def faltering(lab: Lab) -> Iterator[None]:
    """A broker that stands still for a moment again and again, as on a busy machine: what was asked for comes in pieces."""
    over = threading.Event()

    def falter() -> None:
        while not over.wait(0.01):
            lab.stop("a1.broker")
            over.wait(0.08)
            lab.cont("a1.broker")

    thread = threading.Thread(target=falter)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.proves("order: sweep")
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_order_of_what_stays(lab: Lab, kind: str) -> None:
    """A queue that is swept again and again, while more comes and the broker falters, is in order at the end."""

    async def go() -> None:
        queue, rounds = f"flowing-{kind}", 15
        async with rig_at(lab) as (rig, channel):
            rig.add(declare(queue, kind))
            first = rig.add(publishes([b"%04d" % number * 500 for number in range(1_000)], queue))
            await rig.applied()
            sweeping = asyncio.create_task(rig.sweeper.run())
            with faltering(lab):
                for number in range(rounds):
                    rig.add(publishes([b"%04d" % (1_000 + number) * 500], queue))
                    rig.add(dequeue(queue, first + number, first + number))
                    await rig.applied()
                    await swept(rig, queue)
            await rig.sweeper.stop()
            await sweeping
            await holds(channel, queue, 1_000)
            assert [int(body[:4]) for _, body in await content(channel, queue)] == list(range(rounds, 1_000 + rounds))

    asyncio.run(go())


@pytest.mark.proves("order: sweep")
@pytest.mark.parametrize("kind", ["classic", "quorum"])
@pytest.mark.parametrize(("count", "expires"), [(1_500, False), (1_500, True), (WIDE_WINDOW_MESSAGES + 600, False)])
def test_order_of_a_deep_queue(lab: Lab, kind: str, count: int, expires: bool) -> None:
    """What is due lies now near its head, now deep in it; sweepers come and go, and it is kept from expiring.

    Of what a quorum queue has been given back, whoever takes a part and gives it back puts that behind the rest (measured, on 3.10 and on 4.3).
    """

    async def go() -> None:
        queue = f"deep-{kind}-{count}-{expires}"
        due = [0, 1_200, 1, 1_300, 2, 10, 1_400, 3, 4]
        async with rig_at(lab) as (rig, channel):
            rig.add(declare(queue, kind, **({"x-expires": 2_000} if expires else {})))
            first = rig.add(publishes(numbered(count), queue))
            await rig.applied()
            for life in range(3):
                rig.sweeper = Sweeper(rig.replica, Address.parse(lab.nodes["a1"].admin), interval_s=0.1)
                sweeping = asyncio.create_task(rig.sweeper.run())
                for number in due[3 * life : 3 * life + 3]:
                    rig.add(dequeue(queue, first + number, first + number))
                    await rig.applied()
                    await swept(rig, queue)
                    if expires:
                        await asyncio.sleep(1.2)
                await rig.sweeper.stop()
                await sweeping
            await holds(channel, queue, count - len(due))
            left = [(5, 9), (11, 1_199), (1_201, 1_299), (1_301, 1_399), (1_401, count - 1)]
            assert runs(int(body) for _, body in await content(channel, queue)) == left

    asyncio.run(go())


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers that follow each other, by the first and the last."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


@pytest.mark.proves("queue: dead letters")
@pytest.mark.quick("3.10", "4.3")
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_sweeps(lab: Lab, kind: str) -> None:
    """Acks and rejects what is due, gives the rest back in order, forgets what cannot be found."""

    async def go() -> None:
        queue, dead = f"swept-{kind}", f"dead-{kind}"
        async with rig_at(lab) as (rig, channel):
            rig.add(declare(dead), declare(queue, kind, **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}))
            first = rig.add(publishes(numbered(300), queue))
            await rig.applied()
            sweeping = asyncio.create_task(rig.sweeper.run())
            reject = pb.Run(reject=pb.Dequeue(vhost="/", queue=queue, sequences=[first + 250, first + 259]))
            rig.add(dequeue(queue, first, first + 99, first + 200, first + 209), reject)
            rig.add(dequeue("swept-nowhere", first, first))
            await rig.applied()
            await swept(rig, queue)
            await swept(rig, "swept-nowhere")
            await rig.sweeper.stop()
            await sweeping
            await holds(channel, queue, 180)
            kept = [n for n in range(300) if not (n < 100 or 200 <= n < 210 or 250 <= n < 260)]
            assert [int(body) for _, body in await content(channel, queue)] == kept
            assert sorted(int(body) for _, body in await content(channel, dead)) == list(range(250, 260))

    asyncio.run(go())


@pytest.mark.proves("queue: delivery limit")
@pytest.mark.quick
@pytest.mark.one_version("4.3")
def test_sweep_gives_back_uncounted(lab: Lab) -> None:
    """A quorum queue with a delivery limit keeps its messages however often it is swept (4.x only: 3.10 counts every way)."""

    async def go() -> None:
        async with rig_at(lab) as (rig, channel):
            if str(channel.connection.server_properties["version"]).startswith("3."):
                pytest.skip("RabbitMQ 3.x counts every way of giving back")
            rig.add(declare("limited", "quorum", **{"x-delivery-limit": 2}))
            first = rig.add(publishes(numbered(20), "limited"))
            await rig.applied()
            sweeping = asyncio.create_task(rig.sweeper.run())
            for n in range(6):
                rig.add(dequeue("limited", first + n, first + n))
                await rig.applied()
                rig.sweeper.kick(("/", "limited"))
                await swept(rig, "limited")
            await rig.sweeper.stop()
            await sweeping
            await holds(channel, "limited", 14)
            assert [int(body) for _, body in await content(channel, "limited")] == list(range(6, 20))

    asyncio.run(go())


@pytest.mark.proves("queue: expires")
def test_a_queue_that_is_kept_keeps_its_deliveries(lab: Lab) -> None:
    """On 3.x a consumer that takes nothing is use of it, too."""

    async def go() -> None:
        async with rig_at(lab) as (rig, channel):
            rig.add(declare("kept", "quorum", **{"x-delivery-limit": 1, "x-expires": 2_000}))
            rig.add(publishes(numbered(3), "kept"))
            await rig.applied()
            sweeping = asyncio.create_task(rig.sweeper.run())
            await asyncio.sleep(8)
            await rig.sweeper.stop()
            await sweeping
            await holds(channel, "kept", 3)
            if str(channel.connection.server_properties["version"]).startswith("3."):
                assert await is_empty(channel, "kept") is False
            assert [int(body) for _, body in await content(channel, "kept")] == [0, 1, 2]
            if str(channel.connection.server_properties["version"]).startswith("3."):
                assert await is_empty(channel, "kept") is True

    asyncio.run(go())


def test_copies_of_older_generations_go(lab: Lab) -> None:
    async def go() -> None:
        async with rig_at(lab) as (rig, channel):
            rig.add(declare("old"))
            await rig.applied()
            first = rig.end + 1
            channel.publish("", "old", b"old", {"x-lrq-pos": b"%d.%d/%d" % (EPOCH, first, GENERATION - 1)})
            channel.publish("", "old", b"foreign")
            await channel.flow()
            rig.add(publishes(numbered(3), "old"))
            await rig.applied()  # or the message would never be written
            rig.add(dequeue("old", first, first))
            await rig.applied()
            sweeping = asyncio.create_task(rig.sweeper.run())
            await swept(rig, "old")
            await holds(channel, "old", 3)
            await rig.sweeper.stop()
            await sweeping
            await holds(channel, "old", 3)
            assert [body for _, body in await content(channel, "old")] == [b"foreign", b"1", b"2"]

    asyncio.run(go())


def test_a_sweeper_that_is_stopped_leaves_the_rest(lab: Lab) -> None:
    """A promotion does not wait for a thousand acks: what has not been acked yet goes back, and is still known to be due."""

    async def go() -> None:
        async with rig_at(lab) as (rig, channel):
            rig.add(declare("half", "quorum"))
            await rig.applied()
            first = rig.add(publishes(numbered(2_000), "half"))
            await rig.applied()
            rig.add(dequeue("half", *[sequence for n in range(first, first + 2_000, 2) for sequence in (n, n)]))
            await rig.applied()
            sweeping = asyncio.create_task(rig.sweeper.run())
            async with asyncio.timeout(PATIENCE_S):
                while (await channel.queue_declare("half", passive=True))[1] == 2_000:  # it has been given nothing yet
                    pass
            await rig.sweeper.stop()
            await sweeping
            await holds(channel, "half", 1_000 + rig.replica.index.filter.queue(("/", "half")).due.count(rig.end))
            left = [int(body) for _, body in await content(channel, "half")]
            assert [n for n in left if n % 2] == list(range(1, 2_000, 2))

    asyncio.run(go())


POISON = {
    "expiration": (publishes([b"poison"], "poisoned", expiration="1.5"), 2),  # lives: one that finds out that there is one, one that finds it
    "copies": (publishes([b"poison"], "poisoned", fields=b"\x02CCI\0\0\0\x01"), 2),
    "stream": (publishes([b"poison"], "poisoned-stream", fields=b"\x07decimalD\x01\0\0\0\x0f"), 2 + STRIKES_MAX),
}


@pytest.mark.parametrize("kind", POISON)
def test_a_message_that_no_broker_takes_is_passed_over(lab: Lab, kind: str) -> None:
    """It was safe, and its primary died before it could say that it was refused. The others are there, each once."""
    poison, lives = POISON[kind]

    async def live(doubt: SuspectEntries | None, generation: int) -> tuple[Rig, bool, list[Message]]:
        rig = Rig(lab.nodes["a1"].admin, generation=generation, doubt=doubt)
        rig.applier.hurry = True
        running = asyncio.create_task(rig.applier.run())
        rig.add(declare("poisoned"), declare("poisoned-stream", "stream"))
        rig.add(publishes(numbered(5), "poisoned"), poison, publishes(numbered(5, 5), "poisoned"))
        applied = asyncio.create_task(rig.applied())
        await asyncio.wait({running, applied}, return_when=asyncio.FIRST_COMPLETED)
        over = running.done()
        connection = await Connection.open(lab.nodes["a1"].admin)
        got = await content(await connection.channel(), "poisoned")
        await connection.close()
        for task in (running, applied):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
        return rig, over, got

    async def go() -> None:
        doubt, generation = None, GENERATION
        for _ in range(lives):
            rig, over, got = await live(doubt, generation)
            doubt, generation = rig.applier.doubt, generation + 1
            if not over:
                break
        assert not over, f"the applier still ends after {lives} lives: {doubt}"
        assert [body for _, body in got] == numbered(10)

    asyncio.run(go())


@pytest.mark.quick("3.10", "4.3")
def test_a_message_that_only_this_broker_refuses_is_not_passed_over(lab: Lab) -> None:
    """`guest` may not publish as somebody else, unless the operator lets it: until then nothing is lost, and he is told what to do."""

    async def go() -> None:
        rig = Rig(lab.nodes["a1"].broker)
        rig.applier.hurry = True
        running = asyncio.create_task(rig.applier.run())
        rig.add(publishes([b"mine"], "poisoned", user_id="orders"))
        with pytest.raises(LrqError, match="impersonator"):
            await asyncio.wait_for(running, PATIENCE_S)
        assert rig.replica.progress.tracker.applied == 0

    asyncio.run(go())


def test_rate(lab: Lab) -> None:
    async def go() -> None:
        async with rig_at(lab, window=4_000) as (rig, channel):
            rig.add(declare("rate"))
            await rig.applied()
            bodies = [os.urandom(100)] * 250
            run = publishes(bodies, "rate")
            began = time.process_time()
            clock = time.monotonic()
            for _ in range(160):
                rig.add(run)
            await rig.applied()
            cpu, wall = time.process_time() - began, time.monotonic() - clock
            print(f"{rig.end / wall:,.0f} msg/s, {1e6 * cpu / rig.end:.1f} us of CPU per message")
            assert await ready(channel, "rate") == 40_000
            assert rig.end / cpu > 5_000

    asyncio.run(go())


def in_vhost(vhost: str, run: pb.Run) -> pb.Run:
    (run.enqueues if run.WhichOneof("kind") == "enqueues" else run.topology).vhost = vhost
    return run


@pytest.mark.quick("3.10", "4.3")
def test_a_vhost_that_is_not_there(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """What the log has for it counts as done, and what is there gets all of its own; also from the sweeper, which has nothing to look for there."""

    async def go() -> None:
        async with rig_at(lab) as (rig, channel):
            rig.replica.entered.add("nowhere")  # it was there once
            lost = [in_vhost("nowhere", declare("lost")), in_vhost("nowhere", publishes([b"1", b"2"], "lost"))]
            rig.add(declare("besides"), *lost, publishes([b"3"], "besides"))
            await rig.applied()
            rig.add(pb.Run(dequeue=pb.Dequeue(vhost="nowhere", queue="lost", sequences=[3, 3])), publishes([b"4"], "besides"))
            sweeping = asyncio.create_task(rig.sweeper.run())
            await rig.applied()
            async with asyncio.timeout(PATIENCE_S):
                while rig.replica.index.filter.queue(("nowhere", "lost")).due:
                    await asyncio.sleep(0.05)
            assert not sweeping.done()
            assert [message for _, message in await content(channel, "besides")] == [b"3", b"4"]
            assert "vhost 'nowhere' was passed over" in rig.applier.full()

    asyncio.run(go())
    assert caplog.text.count("this broker has no vhost 'nowhere'") == 1


@pytest.mark.parametrize("why", ["it is down", "the broker knows no vhost at all"])
def test_a_vhost_that_may_be_there_is_not_passed_over(lab: Lab, why: str) -> None:
    """It is gone only if a broker says so that knows its other vhosts: else what was confirmed would be lost over a moment of trouble."""

    async def go(vhost: str) -> None:
        rig = Rig(lab.nodes["a1"].admin)
        rig.add(in_vhost(vhost, declare("kept")))
        with pytest.raises(LrqError, match="is down" if why == "it is down" else "no 'lrq' either"):
            await asyncio.wait_for(rig.applier.run(), PATIENCE_S)
        assert rig.replica.progress.tracker.applied == 0

    if why == "it is down":
        lab.ctl("a1", "eval", 'rabbit_vhost_sup_sup:stop_and_delete_vhost(<<"down">>).')
        asyncio.run(go("down"))
    else:
        lab.ctl("a1", "delete_vhost", "lrq")
        asyncio.run(go("nowhere"))
        lab.ctl("a1", "add_vhost", "lrq")
        lab.ctl("a1", "set_permissions", "-p", "lrq", "lrq", ".*", ".*", ".*")


@pytest.mark.quick
def test_lost_connection_ends_the_run(lab: Lab) -> None:
    async def go() -> None:
        rig = Rig(lab.nodes["a1"].admin)
        running = asyncio.create_task(rig.applier.run())
        rig.add(declare("lost"))
        await rig.applied()
        rig.applier._lanes["/"].abort()
        with pytest.raises(Exception, match="connection ended"):
            await asyncio.wait_for(running, PATIENCE_S)

    asyncio.run(go())


def test_what_was_rejected_and_met_while_a_purge_was_not_safe(lab: Lab) -> None:
    """It was given back, undecided, and then taken for gone: so the purge took it, and it was missing among the dead letters."""

    async def go() -> None:
        dead, queue, count = "dead-undecided", "undecided", 100
        async with rig_at(lab) as (rig, channel):
            rig.add(declare(dead), declare(queue, **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}))
            first = rig.add(publishes(numbered(count), queue))
            await rig.applied()
            last = rig.add(pb.Run(reject=pb.Dequeue(vhost="/", queue=queue, sequences=[first, first + count - 1])))
            rig.add(pb.Run(purge=pb.Purge(vhost="/", queue=queue, before=rig.end + 1)), safe=False)
            target, passes = rig.replica.index.filter.queue(("/", queue)), []
            sweeping = asyncio.create_task(rig.sweeper.run())
            end_pass = type(target).end_pass
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(target), "end_pass", lambda it, *met: passes.append(it) or end_pass(it, *met))
                async with asyncio.timeout(PATIENCE_S):
                    while target not in passes:
                        await asyncio.sleep(0.05)
            assert target.due.count_moves(last) == count
            rig.replica.progress.safe_advanced(rig.end)
            await rig.applied()
            async with asyncio.timeout(PATIENCE_S):
                while await ready(channel, dead) < count:
                    await asyncio.sleep(0.05)
            await holds(channel, queue, 0)
            await rig.sweeper.stop()
            await sweeping

    asyncio.run(go())


@pytest.mark.parametrize("sweeps", [True, False])
def test_a_deletion_waits_for_what_was_rejected(lab: Lab, sweeps: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It and a purge; but not for ever, where nobody rejects it."""
    monkeypatch.setattr(rejected_messages, "STILL_S", rejected_messages.STILL_S if sweeps else 0.5)

    async def go() -> None:
        dead, deleted, purged = (f"{name}-{sweeps}" for name in ("dead", "deleted", "purged"))
        async with rig_at(lab) as (rig, channel):
            to_dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
            rig.add(declare(dead), declare(deleted, **to_dead), declare(purged, **to_dead))
            first = rig.add(publishes(numbered(100), deleted), publishes(numbered(100), purged))
            await rig.applied()
            sweeping = asyncio.create_task(rig.sweeper.run()) if sweeps else None
            rejects = [pb.Dequeue(vhost="/", queue=q, sequences=[at, at + 49]) for q, at in ((deleted, first), (purged, first + 100))]
            rig.add(
                *(pb.Run(reject=reject) for reject in rejects),
                pb.Run(purge=pb.Purge(vhost="/", queue=purged, before=rig.end + 3)),
                topology(commands.Queue.Delete(queue=deleted)),
            )
            await rig.applied()
            await rig.sweeper.stop()
            if sweeping is not None:
                await sweeping
            await holds(channel, purged, 0)
            await holds(channel, dead, 100 if sweeps else 0)
            assert sorted(int(body) for _, body in await content(channel, dead)) == (sorted([*range(50)] * 2) if sweeps else [])

    asyncio.run(go())
    assert caplog.text.count("50 messages that the primary's clients rejected from queue") == (0 if sweeps else 2)


def test_what_another_has_overtaken_is_still_there(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of higher priority came in just before the sweeper's consumer: the one that it was to find was taken for gone."""
    qos = Channel.qos

    async def go() -> None:
        dead, queue = f"dead-overtaken-{time.time_ns()}", f"overtaken-{time.time_ns()}"
        async with rig_at(lab) as (rig, channel):
            to_dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
            rig.add(declare(dead), declare(queue, **to_dead, **{"x-max-priority": 5}))
            first = rig.add(publishes([b"rejected"], queue, priority=1))
            await rig.applied()
            came: list[int] = []

            async def late(it: Channel, prefetch: int, **options: Any) -> None:
                await qos(it, prefetch, **options)
                if not came:
                    came.append(rig.add(publishes([b"overtakes"], queue, priority=5)))
                    await rig.applied()
                    while await ready(channel, queue) < 2:
                        await asyncio.sleep(0.05)

            monkeypatch.setattr(Channel, "qos", late)
            rig.add(pb.Run(reject=pb.Dequeue(vhost="/", queue=queue, sequences=[first, first])))
            sweeping = asyncio.create_task(rig.sweeper.run())
            async with asyncio.timeout(SOON_S):
                while not await ready(channel, dead):
                    await asyncio.sleep(0.05)
            await rig.sweeper.stop()
            await sweeping
            assert came
            assert await ready(channel, queue) == 1

    asyncio.run(go())


def rejects_and_deletes(queue: str, first: int, last: int) -> list[pb.Run]:
    reject = pb.Run(reject=pb.Dequeue(vhost="/", queue=queue, sequences=[first, last]))
    return [reject, topology(commands.Queue.Delete(queue=queue))]


@pytest.mark.proves("queue: rejected before a purge")
def test_a_deletion_waits_for_a_sweeper_that_comes_late(lab: Lab, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be busy for a minute with another queue. That it had found nothing was said, though it had not looked."""
    monkeypatch.setattr(rejected_messages, "STILL_S", rejected_messages.STILL_S / 5)

    async def go() -> None:
        dead, queue, count = "dead-late", "swept-late", 10
        async with rig_at(lab) as (rig, channel):
            rig.add(declare(dead), declare(queue, **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}))
            first = rig.add(publishes(numbered(count), queue))
            await rig.applied()
            rig.add(*rejects_and_deletes(queue, first, first + count - 1))
            await asyncio.sleep(4.0)
            sweeping = asyncio.create_task(rig.sweeper.run())
            await rig.applied()
            async with asyncio.timeout(PATIENCE_S):
                while await ready(channel, dead) < count:
                    await asyncio.sleep(0.05)
            await rig.sweeper.stop()
            await sweeping

    asyncio.run(go())
    assert "not waited for" not in caplog.text


@pytest.mark.proves("queue: rejected before a failover")
@pytest.mark.parametrize("kind", ["classic", "quorum"])
@pytest.mark.parametrize("stays", [0, 3])
def test_whoever_takes_over_moves_what_was_rejected(lab: Lab, kind: str, stays: int) -> None:
    """At once, before clients are let in, and also what goes through two queues. What stays is in order, and nobody waits for what is not there."""

    async def go() -> None:
        (last, dead, queue), count = (f"{name}-{kind}-{stays}" for name in ("take-last", "take-dead", "take")), 60
        async with rig_at(lab) as (rig, channel):
            rig.add(declare(last, kind), declare(dead, kind, **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": last}))
            rig.add(declare(queue, kind, **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}))
            first = rig.add(publishes(numbered(count), queue))
            await rig.applied()
            end = first + count - 1 - stays
            reject = pb.Dequeue(vhost="/", queue=queue, sequences=[first, end])
            again = pb.Dequeue(vhost="/", queue=dead, sequences=[first, first + 9], origin=queue)
            rig.add(pb.Run(reject=reject), pb.Run(reject=again))
            await rig.applied()
            sweeping = asyncio.create_task(rig.sweeper.run())
            await asyncio.sleep(0)
            began = time.monotonic()
            await rig.sweeper.take_over()
            await sweeping
            assert time.monotonic() - began < sweeper.MOVES_MAX_S
            await holds(channel, last, 10)
            await holds(channel, dead, count - stays - 10)
            assert [body for _, body in await content(channel, queue)] == numbered(stays, count - stays)
            assert rig.replica.index.filter.moving("/", rig.end) == []

    asyncio.run(go())


@pytest.mark.one_version("4.3")
def test_a_pass_whose_consumer_is_ended_by_the_broker(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It held messages for too long, and the queue has them back: they were taken for gone, and stayed in it."""
    slow = requeue.in_steps

    async def go() -> None:
        queue, dead, count = "timed", "timed-dead", WIDE_WINDOW_MESSAGES + 100
        cancelled: list[str] = []

        async def too_slow(*arguments: Any) -> list[int]:
            monkeypatch.setattr(requeue, "in_steps", slow)
            async with asyncio.timeout(PATIENCE_S):
                while not cancelled:
                    await asyncio.sleep(0.05)
            return await slow(*arguments)

        is_over = sweep_pass.SweepPass.cancelled
        monkeypatch.setattr(requeue, "in_steps", too_slow)
        monkeypatch.setattr(sweep_pass.SweepPass, "cancelled", lambda one, tag: cancelled.append(tag) or is_over(one, tag))
        async with rig_at(lab) as (rig, channel):
            arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead, "x-consumer-timeout": 1_000}
            rig.add(declare(dead), declare(queue, "quorum", **arguments))
            first = rig.add(publishes(numbered(count), queue))
            await rig.applied()
            rig.add(pb.Run(reject=pb.Dequeue(vhost="/", queue=queue, sequences=[first, first + count - 1])))
            await rig.applied()
            sweeping = asyncio.create_task(rig.sweeper.run())
            await swept(rig, queue)
            await rig.sweeper.stop()
            await sweeping
            assert cancelled
            await holds(channel, dead, count)
            assert await ready(channel, queue) == 0

    asyncio.run(go())


def test_what_was_rejected_from_a_queue_that_is_declared_anew_with_another_level(lab: Lab) -> None:
    """The log says so already while its deletion waits for it: nobody went through that queue, and the deletion waited for two minutes."""

    async def go() -> None:
        dead, queue, count = "dead-relevelled", "relevelled", 10
        async with rig_at(lab) as (rig, channel):
            rig.add(declare(dead), declare(queue, **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}))
            first = rig.add(publishes(numbered(count), queue))
            await rig.applied()
            sweeping = asyncio.create_task(rig.sweeper.run())
            anew = declare(queue, **{"x-lrq-replicate": "configuration"})
            anew.topology.level = pb.LEVEL_CONFIGURATION
            rig.add(*rejects_and_deletes(queue, first, first + count - 1), anew)
            await rig.applied()
            await holds(channel, dead, count)
            await rig.sweeper.stop()
            await sweeping

    asyncio.run(go())


@pytest.mark.proves("queue: rejected before a purge")
@pytest.mark.parametrize("stays", [0, 1])
def test_what_a_quorum_queue_is_about_to_reject(lab: Lab, stays: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its channel has handled the rejects, and the queue a little later: they went nowhere if dead letters were unbound in between."""
    monkeypatch.setattr(requeue, "ACKS_PAUSE_S", 0.0)
    monkeypatch.setattr(rejected_messages, "POLL_S", 0.0)
    monkeypatch.setattr(waits, "TIMER_MIN_S", 0.0)

    async def go() -> None:
        dead, queue, count, rounds = f"dead-about-{time.time_ns()}", f"about-{time.time_ns()}", requeue.ACKS_AT_ONCE, 20
        exchange = f"{dead}-x"
        async with rig_at(lab) as (rig, channel):
            bind = topology(commands.Queue.Bind(queue=dead, exchange=exchange, routing_key="k"))
            unbind = topology(commands.Queue.Unbind(queue=dead, exchange=exchange, routing_key="k"))
            rig.add(topology(commands.Exchange.Declare(exchange=exchange, durable=True)), declare(dead))
            rig.add(declare(queue, "quorum", **{"x-dead-letter-exchange": exchange, "x-dead-letter-routing-key": "k"}))
            sweeping = asyncio.create_task(rig.sweeper.run())
            for number in range(1, rounds + 1):
                rig.add(bind)
                first = rig.add(publishes(numbered(count + (stays and number == 1)), queue))
                await rig.applied()
                last = rig.end - (stays and number == 1)
                rig.add(pb.Run(reject=pb.Dequeue(vhost="/", queue=queue, sequences=[first, last])), unbind)
                await rig.applied()
                async with asyncio.timeout(PATIENCE_S):
                    while await ready(channel, queue) < stays:
                        await asyncio.sleep(0.05)
                    seen = 0
                    while (left := await ready(channel, dead)) > seen:
                        seen = left
                        await asyncio.sleep(0.2)
                assert left == number * count
            await rig.sweeper.stop()
            await sweeping

    asyncio.run(go())


def test_a_deletion_does_not_wait_for_what_lies_too_deep(lab: Lab, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweeper that has gone as far as it can and stands before messages that stay will not get further by waiting."""
    monkeypatch.setattr(rejected_messages, "STILL_S", 10 * PATIENCE_S)

    async def go() -> None:
        queue, count = "too-deep", WIDE_WINDOW_MESSAGES + 100
        async with rig_at(lab, window=4_000) as (rig, _):
            rig.add(declare(queue))
            first = rig.add(publishes(numbered(count), queue))
            await rig.applied()
            sweeping = asyncio.create_task(rig.sweeper.run())
            rig.add(*rejects_and_deletes(queue, first + count - 10, first + count - 1))
            await rig.applied()
            await rig.sweeper.stop()
            await sweeping

    asyncio.run(go())
    assert caplog.text.count("10 messages that the primary's clients rejected from queue 'too-deep'") == 1


@pytest.mark.proves("queue: purged before a restart")
def test_a_purge_or_deletion_is_on_record_before_a_restart_could_harm(lab: Lab) -> None:
    """A restart carries out again what is not: it would take the dead letters that have come in since."""

    async def go() -> None:
        queue, recorded = "on-record", []
        async with rig_at(lab) as (rig, channel):

            async def record() -> None:
                recorded.append(rig.replica.progress.tracker.applied)
                rig.replica.barrier.recorded = recorded[-1]

            rig.replica.barrier.write_record = record
            rig.add(declare(queue), publishes([b"1"], queue))
            await rig.applied()
            purge = rig.add(pb.Run(purge=pb.Purge(vhost="/", queue=queue, before=rig.end + 1)), publishes([b"2"], queue))
            await rig.applied()
            assert recorded == [purge]
            deleted = rig.add(topology(commands.Queue.Delete(queue=queue)))
            await rig.applied()
            before = len(recorded)
            rig.add(declare(f"{queue}-other"))
            await rig.applied()
            assert len(recorded) == before, "of one that is not declared again nothing is taken"
            rig.add(declare(queue))
            await rig.applied()
            assert recorded[-1] > deleted
            await channel.queue_delete(queue)
            await channel.queue_delete(f"{queue}-other")

    asyncio.run(go())


@pytest.mark.parametrize("level", ["configuration", "all"])
def test_what_is_in_no_log_does_not_go_with_an_earlier_queue(lab: Lab, level: str) -> None:
    """This node led when its clients deleted the queue and declared it again. Nothing of that is on its record, as before a full queue."""

    async def go() -> None:
        queue = f"declared-again-{level}"
        rig = Rig(lab.nodes["a1"].admin)
        declared = declare(queue, **{"x-lrq-replicate": level})
        rig.add(declared, topology(commands.Queue.Delete(queue=queue)), declared)
        connection = await Connection.open(lab.nodes["a1"].admin)
        channel = await connection.channel()
        await channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "classic", "x-lrq-replicate": level})
        await channel.confirm_select()
        channel.publish("", queue, b"in no log")
        async with asyncio.timeout(PATIENCE_S):
            while not await ready(channel, queue):
                await asyncio.sleep(0.05)
        running = asyncio.create_task(rig.applier.run())
        await rig.applied()
        assert await ready(channel, queue) == (level == "configuration")
        await channel.queue_delete(queue)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await connection.close()

    asyncio.run(go())


@pytest.mark.parametrize("kind", ["classic", "quorum"])
@pytest.mark.parametrize("what", ["deleted", "consumed"])
def test_suspects_come_last(lab: Lab, kind: str, what: str) -> None:
    """Somebody waits for others: a deletion, for what was rejected; and what is consumed does not wait for ten thousand of them."""

    async def go() -> None:
        queue, dead, slow = (f"first-{name}-{kind}-{what}" for name in ("q", "dead", "slow"))
        async with rig_at(lab) as (rig, channel):
            others = [f"{slow}-{number}" for number in range(30)]
            rig.add(declare(dead), declare(queue, kind, **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}), *map(declare, others))
            first = rig.add(publishes(numbered(10), queue), *(publishes(numbered(1), each) for each in others))
            await rig.applied()
            rig.sweeper.suspect([("/", each) for each in others], rig.end)
            order: list[tuple[str, str]] = []
            consider = rig.sweeper._consider

            async def noted(target: Any, kicked: bool) -> None:
                order.append(target.key)
                await asyncio.sleep(0.0 if target.key[1] == queue else 2.0)  # as one that is stuck
                await consider(target, kicked)

            rig.sweeper._consider = noted  # type: ignore[method-assign]
            sweeping = asyncio.create_task(rig.sweeper.run())
            while not order:
                assert not sweeping.done(), sweeping.exception()
                await asyncio.sleep(0.01)
            gone = pb.Dequeue(vhost="/", queue=queue, sequences=[first, first + 9])
            if what == "deleted":
                rig.add(pb.Run(reject=gone), topology(commands.Queue.Delete(queue=queue)))
                await rig.applied()
            else:
                rig.add(pb.Run(dequeue=gone))
                async with asyncio.timeout(PATIENCE_S):
                    while await ready(channel, queue) or not order.count(("/", queue)):
                        await asyncio.sleep(0.05)
            assert ("/", queue) in order
            assert len(set(order)) < len(others)
            if what == "deleted":
                await holds(channel, dead, 10)
            await rig.sweeper.stop()
            await sweeping

    asyncio.run(go())
