"""What an operator is told before a node hands over or steps down: what becomes of what consumers hold."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from broker_plugin.amqp.address import Address
from lrq_ha.replication.events import Answer
from lrq_ha.sidecar.node.task_scope import TaskScope
from lrq_ha.sidecar.operations.commands import OperatorCommands

REFUSED = "consumers hold 3 messages: they must settle them within 30 s, or it is refused"
AGAIN = "consumers hold 3 messages: what they do not settle within 30 s is delivered again, marked redelivered"
NONE = "consumers hold 0 messages"


@pytest.mark.parametrize(("held", "force", "then"), [(3, False, REFUSED), (3, True, AGAIN), (0, False, NONE), (0, True, NONE)])
@pytest.mark.parametrize(
    ("order", "would"), [("switchover", "would hand over to e2"), ("demote", "would step down; the group would be paused")]
)
def test_what_consumers_hold(order: str, would: str, held: int, force: bool, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said how many messages they hold, and not what would become of these."""

    async def may_hand_over(_orders: OperatorCommands, _request: object) -> Answer:
        return Answer(True, "would hand over to e2", 2)

    monkeypatch.setattr(OperatorCommands, "_ask_core", may_hand_over)
    node = SimpleNamespace(serving=True, nothing_is_safe=str)
    core = SimpleNamespace(node=node, replica=SimpleNamespace(declared=SimpleNamespace(partial=())))
    turning_away: Any = SimpleNamespace(busy="", held=lambda: held)

    async def go() -> tuple[bool, str]:
        orders = OperatorCommands("e1", Address("127.0.0.1"), core, TaskScope(), SimpleNamespace(), turning_away, SimpleNamespace())  # type: ignore[arg-type]
        if order == "switchover":
            return await orders.switchover(2, 30.0, force=force, dry_run=True)
        return await orders.demote(30.0, force=force, dry_run=True)

    assert asyncio.run(go()) == (True, f"{would}; {then}")
