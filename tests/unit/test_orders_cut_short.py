"""An operator's order to a node whose incarnation ends before it is carried out: he is told so, at once, and nothing is claimed."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from broker_plugin.door.server import Door
from lrq_ha.replication.events import Answer, PauseRequest, PromoteRequest
from lrq_ha.replication.node import Node
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.incarnation import Incarnation, Kept
from lrq_ha.sidecar.node.client_drain import ClientDrain
from lrq_ha.sidecar.operations.commands import OperatorCommands

PROMOTE = PromoteRequest(frozenset(), False, False)


def run(check: Callable[[Incarnation], Awaitable[tuple[bool, str]]]) -> str:
    """What the order leads to where the broker is lost a moment later."""

    async def go() -> tuple[bool, str]:
        config = configuration.Config.model_validate(tomllib.loads(configuration.sample()))
        incarnation = Incarnation(config, Door(config.door_settings))
        asyncio.get_running_loop().call_later(0.05, incarnation._life.end, "the connection to the broker is lost")
        async with asyncio.timeout(120):
            return await check(incarnation)

    ok, text = asyncio.run(go())
    assert not ok
    return text


def test_the_core_does_not_answer_any_more(caplog: pytest.LogCaptureFixture) -> None:
    told = "e1 has stopped or started again meanwhile (the connection to the broker is lost): see `lrq-ha list` before trying again"
    assert run(lambda incarnation: incarnation.orders.ask(PROMOTE)) == told
    assert f"not promoted, as an operator wants: {told}" in caplog.messages


def test_a_promotion_that_does_not_come_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for ever, in a process that went on."""

    async def promoted(_orders: OperatorCommands, _request: object) -> Answer:
        return Answer(True, "e1 is primary")

    monkeypatch.setattr(OperatorCommands, "_ask_core", promoted)

    def check(incarnation: Incarnation) -> Awaitable[tuple[bool, str]]:
        incarnation.orders._node = SimpleNamespace(role=Role.RECOVERING, serving=False, reason="")  # type: ignore[assignment]
        return incarnation.orders.ask(PROMOTE)

    assert "started again" in run(check)


@pytest.fixture
def stepping_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that may step down for nobody, and may be paused."""

    async def paused(orders: OperatorCommands, request: object) -> Answer:
        assert isinstance(request, PauseRequest)
        orders._node.paused = request.paused
        return Answer(True, "")

    async def nothing(*_: object) -> str:
        return ""

    monkeypatch.setattr(OperatorCommands, "_ask_core", paused)
    monkeypatch.setattr("lrq_ha.sidecar.operations.commands.left_behind", nothing)
    monkeypatch.setattr(Node, "serving", True)
    monkeypatch.setattr(ClientDrain, "_all_safe", lambda *_: True)


@pytest.mark.usefixtures("stepping_down")
def test_a_node_that_was_to_step_down_has_not_paused_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody took over, though the order had led to nothing."""

    async def drain(_door: Door, _why: str, _timeout_s: float) -> int:
        await asyncio.sleep(60)
        return 0

    monkeypatch.setattr("broker_plugin.door.drain.drain", drain)
    paused: list[bool] = []

    async def check(incarnation: Incarnation) -> tuple[bool, str]:
        found = await incarnation.orders.demote(10.0, force=True, dry_run=False)
        paused.append(incarnation._node.paused)
        return found

    assert "started again" in run(check)
    assert paused == [False]


@pytest.mark.usefixtures("stepping_down")
@pytest.mark.parametrize(("before", "meanwhile", "left", "after"), [(False, True, 3, True), (True, False, 3, False), (False, False, 0, True)])
def test_what_operators_pause_and_resume_while_a_node_is_to_step_down(
    monkeypatch: pytest.MonkeyPatch, before: bool, meanwhile: bool, left: int, after: bool
) -> None:
    """Given up, it ended another operator's pause; and one that was resumed meanwhile stepped down with nobody paused, and said that all were.

    `left`: what consumers still hold, for which it is given up.
    """

    async def go() -> tuple[bool, str]:
        config = configuration.Config.model_validate(tomllib.loads(configuration.sample()))
        incarnation = Incarnation(config, Door(config.door_settings), Kept(paused=before))
        paused_then: list[bool] = []

        async def drain(_door: Door, _why: str, _timeout_s: float) -> int:
            assert await incarnation.orders.ask(PauseRequest(meanwhile)) == (True, "")
            return left

        monkeypatch.setattr("broker_plugin.door.drain.drain", drain)
        monkeypatch.setattr(incarnation._core, "ready", True)
        monkeypatch.setattr(incarnation._core, "feed", lambda _step_down: paused_then.append(incarnation._node.paused))
        async with asyncio.timeout(120):
            found = await incarnation.orders.demote(10.0, force=False, dry_run=False)
        assert (incarnation._node.paused, paused_then) == (after, [] if left else [True])
        return found

    ok, text = asyncio.run(go())
    assert (ok, "the group is paused" in text) == (not left, not left)


def test_a_handover_while_consumers_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said to be done, as the new incarnation's door held nothing."""

    async def may_hand_over(_orders: OperatorCommands, _request: object) -> Answer:
        return Answer(True, "", 2)

    monkeypatch.setattr(OperatorCommands, "_ask_core", may_hand_over)

    async def drain(_door: Door, _why: str, _timeout_s: float) -> int:
        await asyncio.sleep(0.1)
        return 0

    monkeypatch.setattr("broker_plugin.door.drain.drain", drain)
    monkeypatch.setattr(ClientDrain, "_all_safe", lambda *_: True)
    assert "started again" in run(lambda incarnation: incarnation.orders.switchover(2, 10.0, force=True, dry_run=False))


def test_a_sidecar_that_is_stopped_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waited got an answer that was cut off, and no reason."""

    async def nothing() -> None: ...

    async def go() -> tuple[bool, str]:
        config = configuration.Config.model_validate(tomllib.loads(configuration.sample()))
        incarnation = Incarnation(config, Door(config.door_settings))
        incarnation._log.streams.begins_anew = False
        monkeypatch.setattr(incarnation._log, "rebuild", nothing)
        for part in (incarnation._log, incarnation._log.watch, incarnation._applier, incarnation._sweeper, incarnation._configured):
            monkeypatch.setattr(part, "run", nothing)
        monkeypatch.setattr(incarnation.orders, "_core", SimpleNamespace(feed=lambda _request: None))
        life = asyncio.create_task(incarnation.run())
        async with asyncio.timeout(120):
            while not incarnation.ready:
                await asyncio.sleep(0)
            order = asyncio.create_task(incarnation.orders.ask(PROMOTE))
            await asyncio.sleep(0)
            life.cancel()
            with pytest.raises(asyncio.CancelledError):
                await life
            return await order

    ok, text = asyncio.run(go())
    assert (ok, text) == (False, "e1 has stopped or started again meanwhile (this sidecar stops): see `lrq-ha list` before trying again")
