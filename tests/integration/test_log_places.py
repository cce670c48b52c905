"""Where a batch stands in the log's stream: a CHECKPOINT is looked for where it was written, without reading the log again."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from broker_plugin.amqp.address import Address
from broker_plugin.log import codec
from broker_plugin.log.streams import Streams
from lrq_ha.lab import Lab
from lrq_ha.replication.log import BatchHeader
from lrq_ha.routing.names import ROUTING_VHOST

pytestmark = pytest.mark.broker

EPOCH = 257
BATCHES = 30
PATIENCE_S = 60.0


@pytest.mark.quick
def test_a_batch_is_looked_for_where_it_was_written(brokers: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        confirmed = asyncio.Event()
        left = BATCHES

        def on_written(count: int) -> None:
            nonlocal left
            left -= count
            if not left:
                confirmed.set()

        address = replace(Address.parse(next(iter(brokers.nodes.values())).admin), vhost=ROUTING_VHOST)
        streams = Streams("places", address, 1 << 30, on_written, lambda _reason: None)
        looks: list[Any] = []
        look_for = streams.reader._look_for

        async def watched(sequence: int, leader: int, start: int | str, *options: Any, **named: Any) -> Any:
            looks.append(start)
            return await look_for(sequence, leader, start, *options, **named)

        streams.reader._look_for = watched  # type: ignore[method-assign]
        try:
            await streams.open()
            await streams.read(streams.log_queue, lambda _headers, _body: None)
            end = 0
            for number in range(BATCHES):
                count = 1 if number % 5 == 4 else 10
                body = bytes(5 * codec.PART_BYTES_MAX // 2 if number % 7 == 3 else 100)
                streams.write_batch(BatchHeader(EPOCH, end + 1, end + count, EPOCH if end else 0, EPOCH), body, 0)
                end += count
            async with asyncio.timeout(PATIENCE_S):
                await confirmed.wait()
            monkeypatch.setattr("broker_plugin.log.log_reader.QUIET_S", PATIENCE_S)  # a machine that stands still is no end of a stream
            where = {}
            async with aclosing(streams.reader.batches()) as records:
                async for offset, batch, _ in records:
                    if batch is not None:
                        where[batch.first, batch.last] = offset
                        if batch.last == end:
                            break
            alone = {first: offset for (first, last), offset in where.items() if first == last}
            assert len(where) == BATCHES
            assert len(alone) == BATCHES // 5
            assert [await streams.reader.locate(first, EPOCH) for first in alone] == [*alone.values()]
            assert looks == [*alone.values()]
            streams._places.numbers.clear()  # as of a batch that a sidecar before this one has written
            assert [await streams.reader.locate(first, EPOCH) for first in alone] == [*alone.values()]
        finally:
            await streams.delete([streams.log_queue, streams.applied_queue])
            await streams.close()

    asyncio.run(go())
