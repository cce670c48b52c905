"""Reading streams: whose broker goes away in the middle (who reads is told, and does not wait for ever), records late, in parts or cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from late import late

from broker_plugin.amqp.address import Address
from broker_plugin.amqp.connection import Connection
from broker_plugin.amqp.errors import ChannelClosed
from broker_plugin.door.server import Door
from broker_plugin.log import codec
from broker_plugin.log import streams as log_streams
from broker_plugin.log.streams import APPLIED_RECORD_BYTES_MAX, PROBE_MAX, READ_PREFETCH, Streams
from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.events import Subscribe
from lrq_ha.replication.guard import QueueGuard
from lrq_ha.replication.log import BatchHeader
from lrq_ha.replication.positions import epoch_number
from lrq_ha.routing.names import ROUTING_VHOST
from lrq_ha.sidecar.config import Config, load
from lrq_ha.sidecar.incarnation import Incarnation
from lrq_ha.sidecar.node.recovery import read_applied
from lrq_ha.sidecar.sites.view_reader import View

pytestmark = pytest.mark.broker

LATE_S = 1.0
COUNTED_S = 120.0
CONFIG = """\
[node]
name = "e1"
id = 1
group = "{group}"
[broker]
url = "{admin}"
[door]
listen = "127.0.0.1:1"
[http]
listen = "127.0.0.1:1"
[[peers]]
name = "e2"
id = 2
door = "amqp://lrq:secret@127.0.0.1:1"
http = "http://127.0.0.1:1"
[replication]
memory_bytes_max = {memory}
"""
MEMORY_BYTES = 1 << 20
RECORDS = 2 * READ_PREFETCH  # so the end of the stream is not on its way yet when the first one comes


def _config(lab: Lab, folder: Path, group: str) -> Config:
    """Of a sidecar beside e1, which the test has in its own process."""
    file = folder / "node.toml"
    file.write_text(CONFIG.format(admin=lab.nodes["e1"].admin, group=group, memory=MEMORY_BYTES))
    return load(file)


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


@pytest.mark.quick
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


def test_a_start_whose_record_comes_back(brokers: Lab, tmp_path: Path) -> None:
    """What it waits for is never given to it: the start is over all the same."""
    config = _config(brokers, tmp_path, "unbound")

    async def go() -> str:
        incarnation = Incarnation(config, Door(config.door_settings))
        streams = incarnation._log.streams
        opened = streams.open

        async def opened_and_unbound() -> None:
            await opened()
            connection = await Connection.open(config.broker_address(ROUTING_VHOST))
            await (await connection.channel()).queue_unbind(streams.log_queue, streams.exchange, streams.log_queue)
            await connection.close()

        streams.open = opened_and_unbound  # type: ignore[method-assign]
        async with asyncio.timeout(60):
            return await incarnation.run()

    assert "came back" in asyncio.run(go())


def test_a_stream_keeps_the_size_that_it_was_made_with_and_that_is_said(brokers: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """A larger log_bytes_max did nothing, and nothing said so."""

    async def opened(size: int) -> dict[str, int]:
        caplog.clear()
        streams = Streams("sized", Address.parse(brokers.nodes["e1"].admin, "lrq"), size, lambda _count: None, lambda _reason: None)
        await streams.open()
        await streams.close()
        return {queue: made for queue, made in streams.declarer.made_with.items() if queue == streams.log_queue}

    made, wanted = 1 << 26, 1 << 27
    assert asyncio.run(opened(made)) == {}
    assert asyncio.run(opened(wanted)) == {"LRQ_HA_sized": made}
    command = f"""rabbitmqctl set_policy -p lrq lrq-size '^LRQ_(HA|Send|Recv)_' '{{"max-length-bytes": {wanted}}}' --apply-to queues"""
    [said] = [message for message in caplog.messages if "'LRQ_HA_sized'" in message]
    assert command in said
    assert "inequivalent arg" in said
    assert asyncio.run(opened(made)) == {}
    assert not [message for message in caplog.messages if "'LRQ_HA_sized'" in message]


def test_what_is_read_for_a_backup_that_is_behind(brokers: Lab) -> None:
    async def read(streams: Streams) -> None:
        async with aclosing(streams.reader.batches()) as records:
            async for offset, _, _ in records:
                if not offset:
                    _end_connections(brokers)

    with pytest.raises(LrqError, match="maintenance"):
        asyncio.run(_with_a_log(brokers, "behind", read))


def test_a_backup_is_sent_a_log_whose_stream_has_a_longer_tail_that_was_cut(brokers: Lab, tmp_path: Path) -> None:
    """It failed there, and began again for ever."""
    config = _config(brokers, tmp_path, "cut")
    first, second = epoch_number(1, 1), epoch_number(2, 2)
    kept = [BatchHeader(first, n, n, first if n > 1 else 0, first) for n in (1, 2)]
    cut = [BatchHeader(first, n, n, first, first) for n in range(3, 10)]
    newer = [BatchHeader(second, 3, 3, first, second), BatchHeader(second, 4, 4, second, second)]
    fills_memory = pb.Batch(runs=[pb.Run(enqueues=pb.Enqueues(frames=bytes(MEMORY_BYTES), lengths=[MEMORY_BYTES]))]).SerializeToString()

    async def go() -> list[BatchHeader]:
        async with _opened("cut", Address.parse(brokers.nodes["e1"].admin, "lrq")) as streams:
            for header in (*kept, *cut, *newer):
                streams.write_batch(header, fills_memory if header is newer[-1] else b"", 0)
            while streams.waiting:
                await asyncio.sleep(0.01)
        incarnation = Incarnation(config, Door(config.door_settings))
        pushed: list[BatchHeader] = []
        incarnation._sending.links[2].push = lambda batch, leader, safe: pushed.append(batch.header)  # type: ignore[method-assign]
        try:
            await incarnation._log.rebuild()
            incarnation._sending.subscribe(Subscribe(2, QueueGuard()))
            async with asyncio.timeout(60):
                await asyncio.gather(*incarnation._sending._catching_up.values())
        finally:
            await incarnation._life.stop()
            await incarnation._log.streams.close()
        return pushed

    assert asyncio.run(go()) == [*kept, *newer]


def test_a_stream_that_is_deleted_while_it_is_read(brokers: Lab) -> None:
    async def read(streams: Streams) -> None:
        async with aclosing(streams.reader.batches()) as records:
            async for offset, _, _ in records:
                if not offset:
                    await streams.delete([streams.log_queue])

    with pytest.raises(LrqError, match="LRQ_HA_deleted"):
        asyncio.run(_with_a_log(brokers, "deleted", read))


@asynccontextmanager
async def _opened(group: str, address: Address) -> AsyncIterator[Streams]:
    """An incarnation."""
    streams = Streams(group, address, 1 << 26, lambda _count: None, lambda _reason: None)
    await streams.open()
    try:
        yield streams
    finally:
        await streams.close()


def test_a_start_beside_a_slow_broker_finds_the_generations_before_it(brokers: Lab) -> None:
    """More of them than are looked for without a hint: it took the first number, and that was given before."""

    async def go() -> None:
        address = Address.parse(brokers.nodes["e1"].admin, "lrq")
        for generation in range(1, PROBE_MAX + 2):
            async with _opened("hinted", address) as streams:
                assert streams.generation == generation
                await streams.read(streams.applied_queue, lambda _headers, _body: None, "last")
        async with late(address, LATE_S) as slow, _opened("hinted", slow) as streams:
            assert streams.generation == PROBE_MAX + 2

    asyncio.run(go())


def test_many_starts_that_are_cut_off(brokers: Lab) -> None:
    """No number is given twice that stands in a stream; and whoever is cut off writes nothing any more."""
    address, group = Address.parse(brokers.nodes["e1"].admin, "lrq"), f"cut-off-{time.time_ns()}"

    async def start(*, whole: bool) -> int:
        async with _opened(group, address) as streams:
            if whole:
                await streams.read(streams.applied_queue, lambda _headers, _body: None, "last")
            return streams.generation

    async def exists(exchange: str) -> bool:
        connection = await Connection.open(address)
        try:
            await (await connection.channel()).exchange_declare(exchange, passive=True)
        except ChannelClosed:
            return False
        finally:
            await connection.close()
        return True

    async def go() -> None:
        assert [await start(whole=True) for _ in range(3)] == [1, 2, 3]
        assert [await start(whole=False) for _ in range(PROBE_MAX - 1)] == list(range(4, 3 + PROBE_MAX))
        with pytest.raises(LrqError, match=f"the {PROBE_MAX - 1} starts before this one were cut off") as caught:
            await start(whole=True)
        assert caught.value.retriable
        assert not await exists(f"LRQ_X_{group}_{2 + PROBE_MAX}")
        assert [await start(whole=True) for _ in range(2)] == [4, 5]

    asyncio.run(go())


def test_a_start_whose_broker_gives_nothing_is_tried_again(brokers: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the first number, which was given before: fifteen starts failed for it. With nothing in the stream, none was given."""

    async def go() -> None:
        address, group = Address.parse(brokers.nodes["e1"].admin, "lrq"), f"silent-{time.time_ns()}"
        async with _opened(group, address) as streams:
            assert streams.generation == 1
        monkeypatch.setattr(log_streams, "FIRST_S", LATE_S / 10)
        async with _opened(group, address) as streams:
            assert streams.generation == 2
            await streams.read(streams.applied_queue, lambda _headers, _body: None, "last")
            async with asyncio.timeout(COUNTED_S):
                while not (await streams.declarer.count_messages(streams.applied_queue))[0]:
                    await asyncio.sleep(0.2)
        async with late(address, LATE_S) as slow:
            with pytest.raises(LrqError, match=f"the broker has given nothing of the stream 'LRQ_APPLIED_{group}' for") as caught:
                async with _opened(group, slow):
                    pass
        assert caught.value.retriable

    asyncio.run(go())


def test_the_newest_entry_of_a_view_that_a_slow_broker_gives_late(brokers: Lab) -> None:
    """It was not waited for: what came after was read as if nothing older were there. Starts that wrote nothing do not hide it."""

    async def tail(address: Address, queue: str) -> int:
        async with _opened("viewed", address) as streams:
            await streams.write_view(queue, b"", {}, lambda: None)  # it is bound; and this is no entry
            view = View(queue)
            await view.probe(streams)
            return view.tail

    async def go() -> None:
        address = Address.parse(brokers.nodes["e1"].admin, "lrq")
        written = asyncio.Event()
        async with _opened("viewed", address) as streams:
            await streams.write_view("viewed", b"", {"x-lrq-pos": "258.7/1"}, written.set)
            await written.wait()
        async with late(address, LATE_S) as slow:
            assert await tail(slow, "viewed") == 7
        for _ in range(3):
            assert await tail(address, "viewed") == 7
            assert await tail(address, "viewed-empty") == 0

    asyncio.run(go())


def test_an_applied_record_that_is_larger_than_a_message(brokers: Lab) -> None:
    """With very many queues. The next start finds it, and the generation that wrote it."""

    async def write() -> int:
        streams = Streams("large", Address.parse(brokers.nodes["e1"].admin, "lrq"), 1 << 26, lambda _count: None, lambda _reason: None)
        await streams.open()
        try:
            generations = [pb.Generation(applied=n, generation=n) for n in range(1, streams.generation + 1)]
            for size in (10, 5 * codec.PART_BYTES_MAX // 2):
                await streams.write_applied(pb.Applied(applied=size, refused=bytes(size), generations=generations).SerializeToString())
        finally:
            await streams.close()
        return streams.generation

    async def read() -> tuple[int, int, int]:
        streams = Streams("large", Address.parse(brokers.nodes["e1"].admin, "lrq"), 1 << 26, lambda _count: None, lambda _reason: None)
        await streams.open()
        try:
            record, _ = await read_applied(streams)
        finally:
            await streams.close()
        return streams.generation, record.applied, len(record.refused)

    for _ in range(PROBE_MAX + 2):  # so that its number is not found by chance
        generation = asyncio.run(write())
    assert generation > PROBE_MAX
    size = 5 * codec.PART_BYTES_MAX // 2
    assert asyncio.run(read()) == (generation + 1, size, size)


def test_a_sidecar_that_ends_while_it_writes_an_applied_record_of_the_largest_size(brokers: Lab) -> None:
    """The one before it is still whole."""
    body = pb.Applied(applied=1, refused=bytes(APPLIED_RECORD_BYTES_MAX - 100), generations=[pb.Generation(generation=1)]).SerializeToString()

    async def go() -> int:
        address = Address.parse(brokers.nodes["e1"].admin, "lrq")
        async with _opened("largest", address) as streams:
            await streams.write_applied(body)
            for headers, part in codec.parts_of({}, body)[:-1]:
                streams._need(streams._records).publish(streams.exchange, streams.applied_queue, part, headers, mandatory=True)
            await streams._need(streams._records).confirmed()
        async with _opened("largest", address) as streams:
            try:
                return (await read_applied(streams))[0].applied
            finally:
                await streams.delete([streams.log_queue, streams.applied_queue])

    assert asyncio.run(go()) == 1
