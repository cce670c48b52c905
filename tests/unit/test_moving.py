"""What a pass of a renewal remembers of the messages that it has moved: there may be millions. No broker: it is told what is in the queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_replica import led

from broker_plugin.renewal import queue_move
from broker_plugin.renewal.queue_move import QueueMove, _Copy
from lrq_ha.replication.applied import AppliedTracker
from lrq_ha.replication.positions import RangeSet

COUNT = 500
APPLIED = 300
POLLS = 10


class Asked(AppliedTracker):
    """Counts how often it is."""

    times = 0

    def needs(self, first: int, last: int) -> RangeSet:
        self.times += 1
        return super().needs(first, last)


def moved() -> tuple[QueueMove, Asked]:
    """A pass over a queue whose messages are the entries 1 .. COUNT, which clients may have been given, when it has moved them."""
    replica = led(COUNT)
    replica.given_out.took_over(COUNT, None)
    replica.progress.tracker = asked = Asked(COUNT - 1)  # so R stays before all of them
    unused: Any = None
    one = QueueMove(replica, unused, ("/", "q"), {}, COUNT, COUNT + 1, unused)
    for sequence in range(1, COUNT + 1):
        one._move(_Copy(sequence, False, "q", sequence, 1, (), bytes(14), b""))
    return one, asked


def test_what_is_in_the_queue_again_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        one, asked = moved()
        published = [first for first, _ in one.published]
        assert len(published) == COUNT
        waiting = asyncio.create_task(one.applied())
        for sequence in published[:APPLIED]:
            asked.mark(sequence, sequence)
        for _ in range(POLLS):
            await asyncio.sleep(0)
        assert APPLIED < asked.times <= APPLIED + POLLS
        assert not waiting.done()
        for sequence in published[APPLIED:]:
            asked.mark(sequence, sequence)
        await waiting

    monkeypatch.setattr(queue_move, "POLL_S", 0)
    asyncio.run(go())


def test_what_was_moved_together_is_known_together() -> None:
    async def go() -> None:
        one, _ = moved()
        given_out = one._replica.given_out
        assert given_out.again.ranges == 1
        assert all(given_out.comes_again(first, flagged=False) for first, _ in one.published)

    asyncio.run(go())
