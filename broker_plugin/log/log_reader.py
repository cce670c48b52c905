"""Reads the batches of the own log's stream, and finds the place of one. It writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.replication.log import BatchHeader

from ..amqp.channel import fail
from ..amqp.connection import Channel
from . import codec

QUIET_S = 0.2
FIRST_S = 10.0  # a freshly started broker on a slow disk may need so long for the first record
LOCATE_BACK_RECORDS = 64
LOCATE_GROWTH = 8
LOCATE_PREFETCH = 100
PLACES_MAX = 4_096
OFFSET = "x-stream-offset"


OpenChannel = Callable[[Callable[[LrqError | None], None]], Awaitable[Channel]]
"""Opens a channel. Its argument is called at the channel's end."""


def reading_ended(queue: str) -> LrqError:
    """The error of a reader whose consumer or channel the broker has ended."""
    return LrqError(f"the broker has ended the reading of '{queue}'", todo="Look at its log: is the stream there, and in use?", retriable=True)


async def read_first(open_channel: OpenChannel, queue: str, ended: LrqError) -> tuple[bytes, bytes]:
    """Header and body of the first record that a stream still has. Waits until there is one.

    Raises:
        LrqError: `ended`, if the stream is deleted; or the channel's error.
    """
    found: asyncio.Future[tuple[bytes, bytes]] = asyncio.get_running_loop().create_future()

    def take(_tag: int, _redelivered: bool, _exchange: str, _key: str, header: bytes, body: bytes) -> None:
        if not found.done():
            found.set_result((header, body))

    channel = await open_channel(lambda error: fail(found, error or ended))
    try:
        await channel.qos(1)
        await channel.consume(queue, take, arguments={OFFSET: "first"}, on_cancel=lambda _tag: fail(found, ended))
        return await found
    finally:
        if channel.error is None:
            await channel.close()


class BatchPlaces:
    """Where the youngest batches of one entry are in the log's stream."""

    def __init__(self) -> None:
        self.written = 0  # records of this incarnation
        self.open_at = -1  # offset of the first of them, OPEN; -1: not known yet
        self.numbers: dict[tuple[int, int], int] = {}  # of the records, by (sequence, leader)

    def note(self, batch: BatchHeader) -> None:
        """Notes the batch that is written next, if it has one entry: a CHECKPOINT has."""
        if batch.first == batch.last:
            self.numbers[batch.first, batch.leader] = self.written
            if len(self.numbers) > PLACES_MAX:
                del self.numbers[next(iter(self.numbers))]

    def offset(self, sequence: int, leader: int) -> int | None:
        """The offset of a batch if the broker has added no records of its own; None: unknown."""
        number = self.numbers.get((sequence, leader))
        return None if number is None or self.open_at < 0 else self.open_at + number


class LogReader:
    """Reads the log's stream, `queue`. `open_channel` gets a callback for the channel's end."""

    def __init__(self, queue: str, open_channel: OpenChannel, places: BatchPlaces) -> None:
        self._queue = queue
        self._open_channel = open_channel
        self._places = places

    async def locate(self, sequence: int, leader: int) -> int | None:
        """The offset of the batch that begins with entry `sequence`, pushed by the leader of epoch `leader`. None:
        not found.

        Records follow each other without a gap but where the broker adds some of its own (segments begin with them).
        So the search begins at the offset without such records, and goes on behind it: a CHECKPOINT comes every 64
        MB, and reading all that to find it again would cost about half as much as writing it. Otherwise the search
        goes from the end back, as the batch is a young one.
        """
        place = self._places.offset(sequence, leader)
        if place is not None:
            _, found = await self._look_for(sequence, leader, place, prefetch=1)
            if found is not None:
                return found
        start: int | str = "last"
        back = LOCATE_BACK_RECORDS
        while True:
            first, found = await self._look_for(sequence, leader, start)
            if found is not None or first <= 0 or start == 0:  # a log that has lost its beginning never gives offset 0
                return found
            start = max(0, first - back)
            back *= LOCATE_GROWTH

    async def _look_for(self, sequence: int, leader: int, start: int | str, prefetch: int = LOCATE_PREFETCH) -> tuple[int, int | None]:
        """(first offset met, offset of the batch). Reads until the batch is found, or passed, or the stream ends."""
        first = -1
        async with aclosing(self.batches(start, prefetch=prefetch, silence_s=QUIET_S)) as batches:
            async for offset, batch, _ in batches:
                first = offset if first < 0 else first
                if batch is None:
                    continue
                if (batch.first, batch.leader) == (sequence, leader):
                    return first, offset
                if batch.first > sequence and batch.leader >= leader:
                    break
        return first, None

    async def batches(
        self, start: int | str = "first", *, prefetch: int = 100, silence_s: float | None = None
    ) -> AsyncGenerator[tuple[int, BatchHeader | None, bytes], None]:
        """(offset, batch, body) of each record of the log, also of those that were cut off later. A FENCE or OPEN
        is no batch: None.

        Close it (`aclosing`) when no more is wanted.

        Args:
            start: An offset; "first": the first record that the stream still has; "last": that of the last chunk.
            prefetch: Records that may be on their way.
            silence_s: The iteration ends when the stream gives nothing for so long; None: it waits for later records.

        Raises:
            LrqError: The broker ends the connection, or the stream.
        """
        arrived: asyncio.Queue[tuple[int, bytes, bytes] | LrqError] = asyncio.Queue()
        joiner: codec.Joiner[dict[str, Any]] = codec.Joiner()
        queue = self._queue
        channel = await self._open_channel(lambda error: arrived.put_nowait(error or reading_ended(queue)))
        try:
            await channel.qos(prefetch)
            await channel.consume(
                queue,
                lambda tag, _redelivered, _exchange, _key, header, body: arrived.put_nowait((tag, header, body)),
                arguments={OFFSET: start},
                on_cancel=lambda _tag: arrived.put_nowait(reading_ended(queue)),
            )
            while True:
                try:
                    async with asyncio.timeout(silence_s):
                        record = await arrived.get()
                except TimeoutError:
                    return
                if isinstance(record, LrqError):
                    raise record
                tag, header, part = record
                channel.ack(tag)
                headers = codec.header_table(header)
                if (whole := joiner.take(headers, headers, part)) is not None:
                    headers, body = whole
                    batch = codec.parse_batch(headers)[0] if codec.LAST in headers else None
                    yield int(headers[OFFSET]), batch, body
        finally:
            if channel.error is None:
                await channel.close()

    async def head(self) -> int:
        """The first entry of a batch that the log's stream still has; 0 if it has none, or gives none."""
        async with aclosing(self.batches(prefetch=1, silence_s=FIRST_S)) as records:
            async for _, batch, _ in records:
                if batch is not None:
                    return batch.first
        return 0
