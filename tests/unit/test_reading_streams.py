"""Reading the log, where the broker does not do as it is asked."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from broker_plugin.log.log_reader import BatchPlaces, LogReader


class Silent:
    """A connection, and its channel, whose broker leaves one of its questions unanswered."""

    error = None

    def __init__(self, question: str) -> None:
        self.question = question
        self.asked: list[str] = []
        self.closed = False

    async def channel(self, *_: object) -> Silent:
        return self

    async def qos(self, _prefetch: int) -> None:
        await self._ask("qos")

    async def consume(self, *_: object, **__: object) -> None:
        await self._ask("consume")

    async def _ask(self, what: str) -> None:
        self.asked.append(what)
        if what == self.question:
            await asyncio.sleep(3600)

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("question", ["qos", "consume"])
def test_a_reader_that_is_given_up_while_it_begins_leaves_no_channel(question: str) -> None:
    """Its channel and consumer stayed, and were sent what nobody read."""

    async def go() -> None:
        connection: Any = Silent(question)
        reader = LogReader("LRQ_HA_east", connection.channel, BatchPlaces())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), aclosing(reader.batches()) as records:
                await anext(records)
        assert (connection.asked[-1], connection.closed) == (question, True)

    asyncio.run(go())
