"""Readers of a view beside a broker that drops segments of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from broker_plugin.amqp.address import Address
from broker_plugin.amqp.connection import Connection
from broker_plugin.log import codec
from broker_plugin.log.log_reader import OFFSET
from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing.messages import Event, Read, Trimmed
from lrq_ha.sidecar.sites.view_reader import WAITING_BYTES_MAX, View, ViewReader

pytestmark = pytest.mark.broker

QUEUE = "views"
SEGMENT_BYTES = 64 << 10
STREAM_BYTES = 8 * SEGMENT_BYTES
ENTRY = pb.Transaction(client_name="c", payloads=[bytes(2_000)]).SerializeToString()
FILLS_IT = STREAM_BYTES // len(ENTRY)  # so many entries
LONG_S = 120


@asynccontextmanager
async def _view(lab: Lab, stream_bytes: int = STREAM_BYTES, segment_bytes: int = SEGMENT_BYTES) -> AsyncIterator[Connection]:
    """A connection to a broker that has a view of nothing."""
    connection = await Connection.open(Address.parse(lab.nodes["e1"].admin, "lrq"))
    try:
        channel = await connection.channel()
        arguments = {"x-queue-type": "stream", "x-max-length-bytes": stream_bytes, "x-stream-max-segment-size-bytes": segment_bytes}
        await channel.queue_declare(QUEUE, arguments=arguments)
        await channel.confirm_select()
        try:
            async with asyncio.timeout(LONG_S):
                yield connection
        finally:
            await channel.queue_delete(QUEUE)
    finally:
        await connection.close()


async def _write(connection: Connection, first: int, last: int, entry: bytes = ENTRY) -> None:
    channel = await connection.channel()
    await channel.confirm_select()
    for sequence in range(first, last + 1):
        channel.publish("", QUEUE, entry, {"x-lrq-pos": f"1.{sequence}/1"})
        if sequence % 20 == 0:
            await channel.confirmed()  # chunks smaller than segments
    await channel.confirmed()
    await channel.close()


async def _head(connection: Connection) -> int:
    """The first offset that is left."""
    found: list[int] = []
    channel = await connection.channel()
    await channel.qos(1)

    def take(_tag: int, _redelivered: bool, _exchange: str, _key: str, header: bytes, _body: bytes) -> None:
        found.append(codec.header_table(header)[OFFSET])

    await channel.consume(QUEUE, take, arguments={OFFSET: "first"})
    await _until(lambda: bool(found))
    await channel.close()
    return found[0]


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def _sequences(events: list[Event]) -> list[int]:
    return [entry.position.sequence for event in events if isinstance(event, Read) for entry in event.entries]


def _reader(connection: Connection, give: Callable[[Event], None]) -> ViewReader:
    return ViewReader(connection, View(QUEUE), 1, 1, lambda: Position(0, 0), give)


def test_segments_that_are_dropped_under_an_attached_reader(brokers: Lab) -> None:
    """It was led over the hole without a word."""

    async def go() -> list[Event]:
        given: list[Event] = []

        def give(event: Event) -> None:
            given.append(event)
            if len(given) == 1:
                reader.pause()

        async with _view(brokers) as connection:
            await _write(connection, 1, FILLS_IT // 2)
            reader = _reader(connection, give)
            task = asyncio.create_task(reader.run())
            await _until(lambda: bool(given))
            await _write(connection, FILLS_IT // 2 + 1, 3 * FILLS_IT)
            while await _head(connection) < FILLS_IT:
                await asyncio.sleep(0.1)
            reader.resume()
            await _until(lambda: task.done() or _sequences(given)[-1:] == [3 * FILLS_IT])
            task.cancel()
        return given

    given = asyncio.run(go())
    sequences = _sequences(given)
    assert sequences == list(range(1, len(sequences) + 1))
    assert isinstance(given[-1], Trimmed)
    assert len(sequences) < given[-1].first_available <= 3 * FILLS_IT


@pytest.mark.quick
def test_segments_that_begin_under_an_attached_reader(brokers: Lab) -> None:
    """Offsets jump there, too."""

    async def go() -> list[int]:
        given: list[Event] = []
        async with _view(brokers) as connection:
            task = asyncio.create_task(_reader(connection, given.append).run())
            await _write(connection, 1, FILLS_IT // 2)
            await _until(lambda: len(_sequences(given)) >= FILLS_IT // 2)
            task.cancel()
        return _sequences(given)

    assert asyncio.run(go()) == list(range(1, FILLS_IT // 2 + 1))


def test_a_reader_that_is_stopped_by_what_it_gives_leaves_no_channel(brokers: Lab) -> None:
    """The session starts another one in its place."""

    async def go() -> None:
        def give(event: Event) -> None:
            given.append(event)
            task.cancel()

        given: list[Event] = []
        async with _view(brokers) as connection:
            await _write(connection, 1, 3 * FILLS_IT)
            while await _head(connection) < FILLS_IT:
                await asyncio.sleep(0.1)
            before = len(connection._channels)
            task = asyncio.create_task(_reader(connection, give).run())
            await _until(task.done)
            assert isinstance(given[0], Trimmed)
            await _until(lambda: len(connection._channels) == before)

    asyncio.run(go())


def test_large_messages_do_not_wait_in_memory(brokers: Lab) -> None:
    """What the broker had given out while a sink was slow was bounded by its number only."""
    row = pb.Transaction(client_name="c", payloads=[bytes(1 << 20)]).SerializeToString()
    count = 150

    async def go() -> list[int]:
        given: list[Event] = []
        waiting_bytes = 0

        def give(event: Event) -> None:
            given.append(event)
            reader.pause()

        async with _view(brokers, stream_bytes=1 << 30, segment_bytes=500 << 20) as connection:
            await _write(connection, 1, count, row)
            reader = _reader(connection, give)
            task = asyncio.create_task(reader.run())
            while len(_sequences(given)) < count and not task.done():
                for _ in range(20):
                    await asyncio.sleep(0.01)
                    waiting_bytes = max(waiting_bytes, sum(len(body) for _, _, body in reader._arrived))
                reader.resume()
            task.cancel()
        assert waiting_bytes < WAITING_BYTES_MAX + 4 * len(row)
        return _sequences(given)

    assert asyncio.run(go()) == list(range(1, count + 1))
