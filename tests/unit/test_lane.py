"""What full queues refuse, by what the broker answers. Against real brokers: tests/integration/test_applier.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from broker_plugin import apply_lane, headers
from broker_plugin.apply_lane import Lane, Message, Route, Window
from broker_plugin.channels import QueueKey
from broker_plugin.replica import Replica
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.node import Node, NodeSettings

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
        self.lane = Lane("/", self.replica, Window(4_000, 1 << 25), lambda: None, self.kicked.append)
        lane: Any = self.lane
        lane._channel, lane._connection = self, self
        self.sent = 0
        self.answered = 0

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
        for parked in self.lane.parked.values():
            parked.at = 0.0
        await self.lane.tend()
        return self.sent - before

    def publish(self, *sequences: int, route: Route = ROUTE) -> None:
        header = headers.header_payload(1, headers.properties(b""))
        self.lane.publish([Message(sequence, route, b"1.", header, b"H" + BODY, 1, 1, 1 + len(BODY)) for sequence in sequences])


def live(check: Callable[[Broker], Awaitable[None]]) -> None:
    async def go() -> None:
        async with asyncio.timeout(20):
            await check(Broker())

    asyncio.run(go())


def test_what_is_parked_goes_with_its_queue() -> None:
    """On a primary, whose clients delete it: also what is on its way to the queue just then, and refused a moment later."""

    async def check(broker: Broker) -> None:
        parked = broker.replica.progress.parked
        broker.publish(*range(1, 31))
        broker.answer(ok=False)
        assert await broker.tried_again() == apply_lane.RETRY_MESSAGES_MIN
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
