"""A way to a broker by which what streams give comes late, as from one whose disk is busy: a reader is told by the stream's writer that there is
something. All else the broker says comes at once, also what it says later. Rule: nothing comes for a channel that is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from broker_plugin.amqp import frames
from broker_plugin.amqp.address import Address

HEAD_BYTES = 7


@contextlib.asynccontextmanager
async def late(broker: Address, delay_s: float) -> AsyncIterator[Address]:
    """Gives an address at which the same broker is reached."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        from_broker, to_broker = await asyncio.open_connection(broker.host, broker.port)
        ways = [asyncio.create_task(_pass_on(client, to_broker)), asyncio.create_task(_delay(from_broker, to_client, delay_s))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for writer in (to_client, to_broker):
                writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield replace(broker, host="127.0.0.1", port=server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)


async def _delay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Deliveries and what belongs to them wait in line for their time."""
    loop = asyncio.get_running_loop()
    line: asyncio.Queue[tuple[float, int, bytes]] = asyncio.Queue()
    closed: dict[int, float] = {}  # when

    async def give() -> None:
        while True:
            came, channel, frame = await line.get()
            await asyncio.sleep(came + delay_s - loop.time())
            if came >= closed.get(channel, 0.0):
                writer.write(frame)

    giving = asyncio.create_task(give())
    try:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(HEAD_BYTES)
                frame = head + await reader.readexactly(int.from_bytes(head[3:], "big") + 1)
                kind = frames.method_id(frame[HEAD_BYTES:]) if head[0] == frames.METHOD else 0
                channel = int.from_bytes(head[1:3], "big")
                if kind == frames.BASIC_DELIVER or head[0] in (frames.HEADER, frames.BODY):
                    line.put_nowait((loop.time(), channel, frame))
                    continue
                if kind == frames.CHANNEL_CLOSE_OK:
                    closed[channel] = loop.time()
                writer.write(frame)
    finally:
        giving.cancel()
