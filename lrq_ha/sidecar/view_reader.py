"""Reads one view of the own broker (LRQ_Send_LogEntries, LRQ_Send_SnapSync) for one session with another site.

Rules:
- What is given is in log order, each position once: a view repeats entries after a restart of its node.
- Deliveries are acknowledged when the session has taken them; a session that wants a pause leaves them unacknowledged. So
  PREFETCH_MESSAGES is all that waits here.
- `ReadEnd` is said only if the newest entry known to be in the view has come, and nothing came for a while after that. An entry
  that comes nevertheless after a `ReadEnd` beyond it is given too, said out loud, and a full sync is demanded: it may be too late.
- What sidecars wrote to look for the newest entry (OPEN) has no position, and is passed over.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from broker_plugin import headers, wire
from broker_plugin.client import Channel, ChannelClosed, Connection
from broker_plugin.streams import LOCATE_BACK_RECORDS, LOCATE_GROWTH, OFFSET, Streams
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import parse_stamp
from lrq_ha.replication.errors import LrqError, MalformedInput
from lrq_ha.replication.positions import Position
from lrq_ha.routing.messages import Demand, Event, Read, ReadEnd, Trimmed

log = logging.getLogger("lrq_ha.sites")

PREFETCH_MESSAGES = 200
READ_MESSAGES_MAX = 64
READ_BYTES_MAX = 1 << 20
QUIET_S = 0.05  # without a delivery before the end is believed
IDLE_S = 0.1  # between looks whether the end has moved on
HINT_EVERY_MESSAGES = 256
HINTS_MAX = 4_096


class View:
    """What is known of one view, for all its readers.

    Attributes:
        tail: Sequence of the newest entry that is known to be in it, or on its way there.
    """

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.tail = 0
        self._sequences: list[int] = []  # ascending, as the offsets are
        self._offsets: list[int] = []

    def note(self, sequence: int, offset: int) -> None:
        """The first copy of entry `sequence` stands at `offset`."""
        if self._sequences and sequence <= self._sequences[-1]:
            return
        self._sequences.append(sequence)
        self._offsets.append(offset)
        if len(self._sequences) > HINTS_MAX:
            del self._sequences[::2], self._offsets[::2]

    def offset_before(self, sequence: int) -> int:
        """An offset such that `sequence` and all that follow stand behind it; 0 if none is known."""
        index = bisect_right(self._sequences, sequence)
        return self._offsets[index - 1] if index else 0

    async def probe(self, streams: Streams) -> None:
        """Looks up the tail that older incarnations left: behind the OPEN of this one nothing older stands (R3).

        From the end back, as starts that got nothing to write have left nothing but their OPEN there.
        """

        def take(found: Mapping[str, Any], _body: bytes) -> None:
            self.tail = max(self.tail, _stamped(str(found.get("x-lrq-pos", "")).encode()).sequence)

        start: int | str = "last"
        back = LOCATE_BACK_RECORDS
        while True:
            opened = await streams.read(self.queue, take, start)
            if self.tail or start == 0:
                return
            start = max(0, opened - back)
            back *= LOCATE_GROWTH


class ViewReader:
    """See above. One is made per StartRead; its task is cancelled to stop it.

    Args:
        connection: To the own broker, vhost `lrq`.
        view: Which view.
        from_sequence: The first sequence to give.
        number: The reader's number for the session.
        end: The position up to which every view of the own broker is written now.
        give: Takes what is read. It may call `pause` before it returns.
        begins: Sequence at which the own log began (R17): what was in the view before is on other nodes only.
    """

    def __init__(
        self,
        connection: Connection,
        view: View,
        from_sequence: int,
        number: int,
        end: Callable[[], Position],
        give: Callable[[Event], None],
        *,
        begins: int = 0,
    ) -> None:
        self._connection = connection
        self._view = view
        self._from = from_sequence
        self._begins = begins
        self._number = number
        self._end = end
        self._give = give
        self._arrived: deque[tuple[int, bytes, bytes]] = deque()
        self._wake = asyncio.Event()
        self._going = asyncio.Event()
        self._going.set()
        self._broken: LrqError | None = None
        self._seen = 0  # greatest sequence that has come, given or not
        self._ended = 0  # sequence of the last ReadEnd
        self._count = 0

    def pause(self) -> None:
        self._going.clear()

    def resume(self) -> None:
        self._going.set()

    async def run(self) -> None:
        """Reads until it is cancelled, or until what it is to read was trimmed.

        Raises:
            LrqError: The view cannot be read any more.
        """
        if self._from < self._begins:
            self._give(Trimmed(self._number, self._begins))
            return
        channel = await self._connection.channel(on_close=self._closed)
        try:
            await channel.qos(PREFETCH_MESSAGES)
            offset = self._view.offset_before(self._from)
            await channel.consume(self._view.queue, self._take, arguments={OFFSET: offset or "first"}, on_cancel=self._cancelled)
            if await self._first_is_there(channel, offset):
                await self._read(channel)
        finally:
            if channel.error is None:
                await channel.close()

    async def _first_is_there(self, channel: Channel, offset: int) -> bool:
        """Waits for the first entry; whether nothing that is wanted was trimmed before it."""
        while not self._arrived:
            await self._rest()
        trimmed = _offset(self._arrived[0][1]) > offset
        while not self._arrived or not _position(self._arrived[0][1]).sequence:
            if self._arrived:
                channel.ack(self._arrived.popleft()[0])
            else:
                await self._rest()
        sequence = _position(self._arrived[0][1]).sequence
        if trimmed and sequence > self._from:
            self._give(Trimmed(self._number, sequence))
            return False
        return True

    async def _read(self, channel: Channel) -> None:
        while True:
            await self._going.wait()
            if not self._arrived:
                await self._rest()
                continue
            entries: list[tuple[Position, pb.Transaction]] = []
            size = tag = taken = 0
            while self._arrived and taken < READ_MESSAGES_MAX and size < READ_BYTES_MAX:
                tag, header, body = self._arrived.popleft()
                taken += 1
                position = self._next(header)
                if position is not None:
                    size += len(body)
                    entries.append((position, pb.Transaction.FromString(body)))
            if entries:
                self._give(Read(self._number, tuple(entries)))
            if channel.error is None:
                channel.ack(tag, True)
            await asyncio.sleep(0)

    def _next(self, header: bytes) -> Position | None:
        """The position of a delivery that is to be given; None if it is a repeat or lies before the beginning."""
        position = _position(header)
        if position.sequence <= self._seen:
            return None
        self._seen = position.sequence
        if self._count % HINT_EVERY_MESSAGES == 0:
            self._view.note(position.sequence, _offset(header))
        self._count += 1
        if position.sequence < self._from:
            return None
        if position.sequence <= self._ended:
            log.error("%s gave entry %s after its end was taken for %d: a full sync is asked for", self._view.queue, position, self._ended)
            self._give(Demand())
        return position

    async def _rest(self) -> None:
        """Waits for a delivery; if none comes, everything that was in the view when the wait began has come."""
        if self._broken is not None:
            raise self._broken
        end, tail = self._end(), self._view.tail
        moved = end.sequence > self._ended and self._seen >= tail
        self._wake.clear()
        try:
            async with asyncio.timeout(QUIET_S if moved else IDLE_S):
                await self._wake.wait()
        except TimeoutError:
            if moved and self._going.is_set():
                self._ended = end.sequence
                self._give(ReadEnd(self._number, end))

    def _take(self, tag: int, _redelivered: bool, _exchange: str, _key: str, header: bytes, body: bytes) -> None:
        self._arrived.append((tag, header, body))
        self._wake.set()

    def _closed(self, error: LrqError | None) -> None:
        if error is not None:
            self._broken = error
            self._wake.set()
            self._going.set()

    def _cancelled(self, _tag: str) -> None:
        self._closed(ChannelClosed(404, f"the stream '{self._view.queue}' was deleted"))


def _position(header: bytes) -> Position:
    """Where the entry stands in the log; (0, 0), which is nowhere, for what is no entry."""
    return _stamped(headers.position(header) or b"")


def _stamped(value: bytes) -> Position:
    try:
        epoch, sequence, _ = parse_stamp(value)
    except MalformedInput:
        return Position(0, 0)
    return Position(epoch, sequence)


def _offset(header: bytes) -> int:
    return int(wire.header_table(header).get(OFFSET, 0))
