"""What a primary tells of nodes that it cannot reach."""

from __future__ import annotations

import asyncio
import logging
import tomllib

import pytest

from broker_plugin.client import Address
from broker_plugin.client_errors import AuthenticationFailed
from broker_plugin.door import Door
from lrq_ha.replication.roles import Role
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.incarnation import Incarnation
from lrq_ha.sidecar.links import Link


def troubles(leading: int, role: Role, problem: str) -> str:
    """What is told of a node with a link that has a problem."""

    async def go() -> str:
        config = configuration.Config.model_validate(tomllib.loads(configuration.sample()))
        incarnation = Incarnation(config, Door(config))
        incarnation._node.leading, incarnation._node.role, incarnation._node.reason = leading, role, "reason"
        incarnation._sending.links[2].problem = problem
        return str(incarnation.status.tell()["reason"])

    return asyncio.run(go())


def test_a_primary_that_cannot_log_in_at_a_backup_says_so() -> None:
    """Nothing was said of it: the backup waited for a primary, and nobody told why that did not call it."""
    assert troubles(0x101, Role.ACTIVE, "user 'lrq' is refused") == "reason; e2: user 'lrq' is refused"
    assert troubles(0x101, Role.ACTIVE, "") == "reason"
    for role in (Role.CATCH_UP, Role.READY, Role.JOINING):
        assert troubles(0, role, "user 'lrq' is refused") == "reason (e2: user 'lrq' is refused)"


def test_the_log_names_the_node(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Not its number, which nothing else that an operator sees does."""

    async def open_(*_: object, **__: object) -> None:
        raise AuthenticationFailed(403, "user 'lrq' is refused")

    def nothing(*_: object) -> None: ...

    async def go() -> None:
        link = Link(1, "east", 2, "e2", Address("127.0.0.1"), nothing, nothing, nothing)
        running = asyncio.create_task(link.run())
        async with asyncio.timeout(60):
            while not caplog.messages:
                await asyncio.sleep(0.01)
        running.cancel()

    monkeypatch.setattr("lrq_ha.sidecar.links.Connection.open", open_)
    with caplog.at_level(logging.INFO, "lrq_ha.links"):
        asyncio.run(go())
    assert caplog.messages[0].startswith("no link to e2: ")
