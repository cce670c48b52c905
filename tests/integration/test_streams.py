"""Reading streams whose broker goes away in the middle: who reads is told, and does not wait for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from broker_plugin.client_errors import Address
from broker_plugin.streams import READ_PREFETCH, Streams
from lrq_ha.lab import Lab
from lrq_ha.replication.errors import LrqError

pytestmark = pytest.mark.broker

RECORDS = 2 * READ_PREFETCH  # so the end of the stream is not on its way yet when the first one comes


async def _with_a_log(lab: Lab, group: str, read: Callable[[Streams], Awaitable[None]]) -> None:
    written = asyncio.Event()
    left = RECORDS

    def confirmed(count: int) -> None:
        nonlocal left
        left -= count
        if not left:
            written.set()

    streams = Streams(group, Address.parse(lab.nodes["e1"].admin, "lrq"), 1 << 26, confirmed, lambda _reason: None)
    await streams.open()
    try:
        for epoch in range(1, RECORDS + 1):
            streams.write_fence(epoch, 0)
        async with asyncio.timeout(240):
            await written.wait()
            await read(streams)
    finally:
        await streams.close()


def _end_connections(lab: Lab) -> None:
    lab.ctl("e1", "close_all_connections", "--vhost", "lrq", "maintenance")


def test_a_start_whose_broker_goes_away(brokers: Lab) -> None:
    async def read(streams: Streams) -> None:
        seen = 0

        def take(_headers: object, _body: bytes) -> None:
            nonlocal seen
            seen += 1
            if seen == 1:
                _end_connections(brokers)

        with pytest.raises(LrqError, match="maintenance"):
            await streams.read(streams.log_queue, take)

    asyncio.run(_with_a_log(brokers, "read", read))


def test_what_is_read_for_a_backup_that_is_behind(brokers: Lab) -> None:
    async def read(streams: Streams) -> None:
        async with aclosing(streams.batches()) as records:
            async for offset, _, _ in records:
                if not offset:
                    _end_connections(brokers)

    with pytest.raises(LrqError, match="maintenance"):
        asyncio.run(_with_a_log(brokers, "behind", read))


def test_a_stream_that_is_deleted_while_it_is_read(brokers: Lab) -> None:
    async def read(streams: Streams) -> None:
        async with aclosing(streams.batches()) as records:
            async for offset, _, _ in records:
                if not offset:
                    await streams.delete([streams.log_queue])

    with pytest.raises(LrqError, match="LRQ_HA_deleted"):
        asyncio.run(_with_a_log(brokers, "deleted", read))
