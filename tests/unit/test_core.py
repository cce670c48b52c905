"""What ends an incarnation, so that the next one rebuilds from the broker: a core left half changed, a task that fails, one who is told to stop."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import MagicMock

import pytest

from broker_plugin.door.client_connection import ClientConnection
from broker_plugin.door.server import Door
from broker_plugin.log.producers import producer_key
from lrq_ha.errors import IllegalEvent, LrqError
from lrq_ha.replication.events import Effect, Event, Opened, Subscribe, Tick
from lrq_ha.replication.guard import QueueGuard
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.node import Node
from lrq_ha.replication.settings import NodeSettings
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.incarnation import Incarnation
from lrq_ha.sidecar.node.core import Core
from lrq_ha.sidecar.node.task_scope import TaskScope


@pytest.mark.parametrize(
    ("error", "reason", "traced"),
    [
        (LrqError("the connection is lost"), "the connection is lost", False),
        (IllegalEvent("another write comes first"), "another write comes first", True),
        (KeyError("runs"), "'runs'", True),
        (TimeoutError(), "TimeoutError()", True),
    ],
)
def test_what_cannot_be_carried_out_is_the_end(error: Exception, reason: str, traced: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It went on, and acknowledged what the stream does not have."""

    async def go() -> tuple[str, list[Effect]]:
        carried_out: list[Effect] = []

        def carry_out(effect: Effect) -> None:
            carried_out.append(effect)
            raise error

        life = TaskScope()
        core = Core(Node(NodeSettings(1, {1: "e1"})), Levels({"^.*$": "all"}), life, carry_out)
        core.ready = True
        events: tuple[Event, ...] = (Opened(0, False), Tick())
        for event in events:
            core.feed(event)
        return life.reason, carried_out

    said, carried_out = asyncio.run(go())
    assert (said, len(carried_out)) == (reason, 1)
    assert ("carry_out" in caplog.text) == traced


def test_what_the_replica_cannot_send_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> str:
        life = TaskScope()
        core = Core(Node(NodeSettings(1, {1: "e1"})), Levels({"^.*$": "all"}), life, lambda _effect: None)
        core.ready = True
        monkeypatch.setattr(core.replica, "flush", MagicMock(side_effect=ValueError("too large")))
        core.feed(Tick())
        return life.reason

    assert asyncio.run(go()) == "too large"


@pytest.mark.parametrize(("error", "reason"), [(LrqError("the broker is gone"), "the broker is gone"), (TimeoutError(), "TimeoutError()")])
def test_a_task_that_fails_is_the_end(error: Exception, reason: str) -> None:
    """An error without a text ended it for no reason that anybody was told."""

    async def fail() -> None:
        raise error

    async def go() -> str:
        life = TaskScope()
        life.spawn(fail())
        async with asyncio.timeout(60):
            return await life.ended()

    assert asyncio.run(go()) == reason


def test_who_waits_for_the_end_and_is_cancelled_does_not_bring_it_about() -> None:
    async def go() -> None:
        life = TaskScope()
        waits = asyncio.create_task(life.ended())
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait({waits})
        assert (waits.cancelled(), life.over, life.reason) == (True, False, "")
        life.end("it stops")
        assert (life.over, life.reason) == (True, "it stops")

    asyncio.run(go())


def test_a_log_that_cannot_be_read_for_a_backup_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was sent to it any more, and nobody told."""

    async def broken(_start: int | str, *, prefetch: int) -> AsyncIterator[object]:
        raise ValueError(f"a record among {prefetch} is none")
        yield

    async def go() -> str:
        config = configuration.Config.model_validate(tomllib.loads(configuration.sample()))
        incarnation = Incarnation(config, Door(config.door_settings))
        monkeypatch.setattr(incarnation._log.streams.reader, "batches", broken)
        incarnation._node.log.end = 5
        incarnation._sending.subscribe(Subscribe(2, QueueGuard()))
        async with asyncio.timeout(60):
            return await incarnation._life.ended()

    assert "a record among" in asyncio.run(go())


def test_who_asks_how_far_a_producer_has_come_ends_its_connections_without_a_look_at_all() -> None:
    """Each of thousands of pipelined questions cost the time to look at every connection of the door."""

    class Client(MagicMock):
        looks = 0

        @property
        def instance(self) -> str:
            Client.looks += 1
            return ""

    def client(name: str, user: str = "app", vhost: str = "/") -> Any:
        return Client(spec=ClientConnection, user=user, producer=name, producer_key=producer_key(vhost, user, name) if name else "")

    door = Door(configuration.Config.model_validate(tomllib.loads(configuration.sample())).door_settings)
    others = [client("", "app"), *(client(f"p{number}") for number in range(50)), client("p", "other")]
    mine = [client("p"), client("p", vhost="lrq")]
    for each in (*others, *mine):
        door.session_opened(each)
    assert door.sessions == {*others, *mine}
    asker = client("q")
    door.session_opened(asker)
    Client.looks = 0
    door.end_unread("p", asker)
    assert Client.looks <= 2
    assert [each.fence.call_count for each in (*others, *mine)] == [0] * len(others) + [1, 1]
    door.session_closed(mine[0])
    mine[1].fence.side_effect = lambda _: door.session_closed(mine[1])
    newer = client("p", vhost="lrq")
    door.session_opened(newer)
    assert [each.fence.call_count for each in mine] == [1, 2]
    door.end_unread("p", asker)
    assert newer.fence.call_count == 1
    for each in (*others, *mine, asker, newer):
        door.session_closed(each)
    assert not door.sessions
    assert not door._producers


def test_all_clients_are_let_go_although_one_cannot_be() -> None:
    """Those after it stayed connected to a door behind which nobody was."""

    async def go() -> None:
        door = Door(configuration.Config.model_validate(tomllib.loads(configuration.sample())).door_settings)
        relays = [MagicMock(spec=ClientConnection, broker=MagicMock(), user="app", producer="") for _ in range(5)]
        relays[2].close.side_effect = KeyError("tag")
        door.sessions.update(relays)
        door.close_clients("node e1 starts again")
        for relay in relays:
            relay.close.assert_called_once()
        relays[2].cut_off.assert_called_once()
        relays[2].broker.abort.assert_called_once()
        assert relays[2] not in door.sessions

    asyncio.run(go())
