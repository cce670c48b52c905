"""A barrier, and an alarm of the broker in which nothing gets where it has to be: nobody may have to wait for its end to acknowledge anything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pamqp import commands
from test_publishing import FIRST, Connection, message

from broker_plugin.amqp import encode, frames
from broker_plugin.door.server import Door
from broker_plugin.log import barrier
from broker_plugin.log.replica import Replica
from broker_plugin.methods import lifecycle
from lrq_ha.errors import LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import AppliedTracker
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.node import Node as Core
from lrq_ha.replication.positions import RangeSet
from lrq_ha.replication.queues import QueueKey
from lrq_ha.replication.settings import NodeSettings

ORDER = message("orders", b"", True, b"x")[0]


class Node:
    """A client's connection to a node whose broker may have an alarm."""

    def __init__(self) -> None:
        self.connection = Connection()
        self.connection.replica.progress.tracker = AppliedTracker(FIRST - 1)
        self.barrier = self.connection.replica.barrier
        self.door: Any = self.connection.relay.door
        self.door.blocked = set()
        self.has_alarm = False

    def alarmed(self) -> bool:
        return self.has_alarm

    async def tries(self, declares: QueueKey | None = None) -> bool:
        """To put one up; returns whether it stood."""
        async with self.barrier.up(self.alarmed, declares) as stands:
            assert stands is self.barrier.is_up is self.barrier.holds_all
            return stands

    async def lasts(self) -> None:
        """Puts one up, and is not done inside."""
        async with self.barrier.up(self.alarmed):
            await asyncio.Event().wait()

    async def quick(self) -> bool:
        """Puts one up when everything is safe."""
        self.connection.replica.progress.tracker = AppliedTracker(FIRST)
        return await self.tries()

    def unsafe(self) -> None:
        """Something is published that does not get safe."""
        self.connection.log_is_safe = False
        self.connection.relay.client_data(ORDER)


def live(check: Callable[[Node], Awaitable[None]]) -> None:
    async def go() -> None:
        async with asyncio.timeout(20):
            await check(Node())

    asyncio.run(go())


def test_one_that_waits_for_the_log_is_given_up_in_an_alarm() -> None:
    async def check(node: Node) -> None:
        node.unsafe()
        trying = asyncio.create_task(node.tries())
        behind = asyncio.create_task(node.tries())
        await asyncio.sleep(0.01)
        assert node.barrier.holds_all
        node.has_alarm = True
        assert await trying is False
        assert await behind is False
        assert not node.barrier.is_up

    live(check)


@pytest.mark.parametrize("stands", [False, True])
def test_one_that_lasts_is_in_the_log(stands: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A door that took nothing from its clients for half an hour said nothing."""
    monkeypatch.setattr(barrier, "LONG_S", 0.02)

    async def check(node: Node) -> None:
        if not stands:
            node.unsafe()
        lasting = asyncio.create_task(node.lasts())
        await asyncio.sleep(0.2)
        lasting.cancel()
        await asyncio.gather(lasting, return_exceptions=True)
        assert await node.quick() is True

    live(check)
    [said] = [record.getMessage() for record in caplog.records if "have waited" in record.getMessage()]
    assert said.startswith("all clients have waited for 0 s for a declaration or deletion, which waits for ")
    assert ("the broker's answer" if stands else f"entries up to {FIRST} to be in the queues and on record") in said


def test_one_that_waits_for_a_record_is_given_up_and_the_deletion_is_not_forgotten() -> None:
    async def check(node: Node) -> None:
        written: list[bool] = []

        async def never() -> None:
            written.append(True)
            await asyncio.Event().wait()

        node.barrier.write_record = never
        queue = ("/", "orders")
        node.barrier.deleted(queue, 1)
        for times in (1, 2):
            node.has_alarm = False
            trying = asyncio.create_task(node.tries(queue))
            while len(written) < times:
                await asyncio.sleep(0)
            node.has_alarm = True
            assert await trying is False

    live(check)


def test_what_fails_before_it_stands_is_raised() -> None:
    async def check(node: Node) -> None:
        async def fails() -> None:
            raise LrqError("no")

        node.barrier.write_record = fails
        node.barrier.published(FIRST)
        with pytest.raises(LrqError):
            await node.tries()
        assert not node.barrier.is_up

    live(check)


def test_a_purge_is_on_record_before_it_is_answered() -> None:
    """Also where what another site says comes right before it, and takes a moment more to be applied. A restart would purge what comes later, too."""

    async def check(node: Node) -> None:
        connection, barrier = node.connection, node.barrier
        relay, replica = connection.relay, connection.replica
        node.door.alarmed, node.door.held = node.alarmed, lambda _: ()

        async def write_record() -> None:
            barrier.recorded = replica.progress.tracker.applied

        barrier.write_record = write_record
        relay.client_data(encode.method_frame(1, commands.Queue.Purge(queue="orders")))
        while not connection.broker.data:
            await asyncio.sleep(0)
        status = replica.append(pb.Run(status=pb.StatusEntry(body=b"")))
        connection.client.data = b""
        relay.broker_data(encode.method_frame(1, commands.Queue.PurgeOk(0)))
        for _ in range(20):
            await asyncio.sleep(0)
            replica.flush()
        purge = replica.end
        assert (purge, replica.progress.safe) == (status + 1, purge)
        assert not connection.client.data
        replica.progress.applied(status, status)
        while not connection.client.data:
            assert barrier.recorded in (0, purge)
            await asyncio.sleep(0)
        assert barrier.recorded == purge
        assert [item[0] for item in frames.scan(connection.client.data)[0]] == [frames.QUEUE_PURGE_OK]

    live(check)


def test_where_the_broker_owes_an_answer_in_an_alarm_only_publishes_wait() -> None:
    async def check(node: Node) -> None:
        relay, broker = node.connection.relay, node.connection.broker
        async with node.barrier.up(node.alarmed):
            relay.client_data(encode.method_frame(1, commands.Basic.Qos(prefetch_count=1)))
            assert relay.from_client.stalled
            node.barrier.ease()
            for _ in range(5):
                await asyncio.sleep(0)
            assert [item[0] for item in frames.scan(broker.data)[0]] == [frames.BASIC_QOS]
            relay.client_data(ORDER)
            assert relay.from_client.stalled
            assert node.barrier.is_up
        assert not node.connection.replica.moving
        while relay.from_client.stalled:
            await asyncio.sleep(0)
        node.connection.replica.flush()
        assert len(node.connection.runs) == 1

    live(check)


def test_a_client_that_is_blocked_eases_it_for_its_own_declaration_only() -> None:
    async def check(node: Node) -> None:
        relay = node.connection.relay
        blocked = encode.method_frame(0, commands.Connection.Blocked("low on memory"))
        [item], _ = frames.scan(blocked)
        for declares in (False, True):
            async with node.barrier.up(node.alarmed):
                if declares:
                    relay.replies[1] = asyncio.get_running_loop().create_future()
                assert lifecycle.alarm_told(relay, 0, blocked, item) == b""
                assert node.barrier.holds_all is not declares
        assert node.door.blocked == {relay}

    live(check)


def test_an_alarm_of_which_one_has_heard_counts_while_it_is_listened_to() -> None:
    """That it is over is not heard behind deliveries that a client does not take."""
    relays = [SimpleNamespace(flow=SimpleNamespace(listens=False)) for _ in range(2)]
    door: Any = SimpleNamespace(log_blocked="", blocked=relays)
    assert not Door.alarmed(door)
    relays[1].flow.listens = True
    assert Door.alarmed(door)
    assert Door.alarmed(SimpleNamespace(log_blocked="low on disk", blocked=[]))  # type: ignore[arg-type]


def test_what_full_queues_refuse_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100,000 that wait for room, each beside one that is applied, every look took seconds, and there are several a second."""
    count = 40_000
    replica = Replica(Core(NodeSettings(2, {1: "e1", 2: "e2"})), Levels({"^.*$": "all"}), lambda *_: None)
    for number in range(count):
        replica.progress.parked.add(2 * number + 1)
        replica.progress.tracker.mark(2 * number + 2, 2 * number + 2)
    moved = 0
    remove = RangeSet.remove

    def counted(self: RangeSet, first: int, last: int | None = None) -> None:
        nonlocal moved
        moved += self.ranges
        remove(self, first, last)

    monkeypatch.setattr(RangeSet, "remove", counted)
    assert replica.barrier._only_parked(2 * count)
    assert moved <= count
    replica.progress.parked.remove(count + 1)
    assert not replica.barrier._only_parked(2 * count)
    assert replica.barrier._only_parked(count)
