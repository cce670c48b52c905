"""Two orders to step down at once: one is carried out, the other is told of it; and the door is let go when the incarnation ends."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from broker_plugin.door.server import Door
from lrq_ha.replication.events import Answer
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.incarnation import Incarnation
from lrq_ha.sidecar.operations.commands import OperatorCommands

UNDER_WAY = "node e1 hands over to e2; consumers have 600 s to finish what they hold"


@pytest.fixture(autouse=True)
def _unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node may hand over, and its consumers do not finish."""

    async def may_hand_over(_orders: OperatorCommands, _request: object) -> Answer:
        return Answer(True, "would hand over to e2", 2)

    monkeypatch.setattr(OperatorCommands, "_ask_core", may_hand_over)
    monkeypatch.setattr("broker_plugin.door.drain.held", lambda _door: 1)


def run(check: Callable[[Incarnation, asyncio.Task[tuple[bool, str]]], Awaitable[None]]) -> None:
    """Calls `check` when the first order is under way."""

    async def go() -> None:
        config = configuration.Config.model_validate(tomllib.loads(configuration.sample()))
        door = Door(config.door_settings)
        incarnation = Incarnation(config, door)
        first = asyncio.create_task(incarnation.orders.switchover(2, 600.0, force=False, dry_run=False))
        async with asyncio.timeout(120):
            while not door.draining:
                await asyncio.sleep(0)
            await check(incarnation, first)
            await incarnation._life.stop()

    asyncio.run(go())


@pytest.mark.parametrize(("force", "dry_run"), [(False, False), (True, False), (False, True)])
def test_the_second_is_refused_and_changes_nothing(force: bool, dry_run: bool) -> None:
    """Its end gave out messages again, which the first kept back; and by force both stepped down."""

    async def check(incarnation: Incarnation, first: asyncio.Task[tuple[bool, str]]) -> None:
        second = await incarnation.orders.switchover(2, 0.0, force=force, dry_run=dry_run)
        assert second == (False, f"not now: {UNDER_WAY}")
        assert incarnation._door.draining
        assert not first.done()

    run(check)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_renewal_is_refused_meanwhile(dry_run: bool) -> None:
    """A dry run said that it would be done."""

    async def check(incarnation: Incarnation, _first: asyncio.Task[tuple[bool, str]]) -> None:
        incarnation.renewals._node = SimpleNamespace(serving=True)  # type: ignore[assignment]
        found = await incarnation.renewals.renew(1.0, force=False, dead_letters_arrived=False, dry_run=dry_run)
        assert found == (False, f"not now: {UNDER_WAY}")

    run(check)


def test_the_next_incarnation_finds_the_door_as_it_was() -> None:
    async def check(incarnation: Incarnation, first: asyncio.Task[tuple[bool, str]]) -> None:
        incarnation._life.end("the connection to the broker is lost")
        ok, text = await first
        assert (ok, "started again meanwhile" in text) == (False, True)
        await incarnation._life.stop()
        assert not incarnation._door.draining, "it would give out nothing"

    run(check)
