"""Who waits for the log, and when it is told."""

from __future__ import annotations

import asyncio

from broker_plugin.log.replica import Replica
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


def test_what_is_applied_while_one_entry_is_not_is_not_kept_one_by_one() -> None:
    """A publish waits before a full queue, or its client does not read, for long; others go on, with an ack behind each of their publishes."""
    replica = Replica(Node(NodeSettings(1, {1: "e1"})), Levels({}), lambda *_: None)
    progress, dedup = replica.progress, replica.index.dedup
    dedup.add("slow", 1, 1, 1)
    for n in range(1, 5_000):
        dedup.add("p", n, 1, 2 * n)
        progress.safe_advanced(2 * n + 1)
        progress.seen(2 * n)  # by its consumer
        progress.early.add(2 * n)
        assert dedup.position_of("p", n) == 2 * n
        progress.applied(2 * n, 2 * n)
        progress.applied(2 * n + 1, 2 * n + 1)
        assert dedup.position_of("p", n) is None
        assert len(dedup._open) <= 2
        assert progress.met.ranges + progress.early.ranges <= 2
    progress.applied(1, 1)
    assert progress.tracker.applied == 9_999
    assert not dedup._open
    assert dedup.seen("p", 4_999)
