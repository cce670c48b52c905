"""Who waits for the log, and when it is told."""

from __future__ import annotations

import asyncio

from broker_plugin.replica import Replica
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.node import Node
from lrq_ha.replication.settings import NodeSettings


def test_who_waits_for_less_is_told_first_whoever_asked_first() -> None:
    async def go() -> None:
        progress = Replica(Node(NodeSettings(1, {1: "e1"})), Levels({}), lambda *_: None).progress
        later, sooner = (asyncio.create_task(progress.wait_safe(sequence)) for sequence in (9, 3))
        await asyncio.sleep(0)
        progress.safe_advanced(5)
        async with asyncio.timeout(60):
            await sooner
        assert not later.done()
        progress.safe_advanced(9)
        async with asyncio.timeout(60):
            await later

    asyncio.run(go())
