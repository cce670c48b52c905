"""Reads one view of the own broker (LRQ_Send_LogEntries, LRQ_Send_SnapSync) for the sessions with other sites that follow this reader.

Rules:

- Output is in log order, each position once: a view repeats entries after a restart of its node.
- Deliveries are acknowledged when the sessions have taken them; a reader that is paused leaves them unacknowledged. So at most
  PREFETCH_MESSAGES wait here. If these are more than WAITING_BYTES_MAX, the reader leaves the view, and comes back for fewer of
  them at a time, after the pause if it is paused.
- `ReadEnd` is reported only if the newest entry known to be in the view has come, and none came for a while after it. An entry
  that still comes after a `ReadEnd` beyond it is too late for the sessions: it is logged, and a full sync is demanded.
- OPEN records, which sidecars wrote to look for the newest entry, have no position, and are skipped.
- A reader that gets no channel says so, and tries again.
- The broker silently leads a reader that is slower than segments are dropped over the hole, also once it is attached. So wherever offsets do
  not follow each other (they also skip the broker's own records at the beginning of a segment), the view's head is looked up.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from broker_plugin.amqp.connection import Channel, ChannelClosed, Connection, NoChannelLeft
from broker_plugin.log import codec, stamps
from broker_plugin.log.log_reader import LOCATE_BACK_RECORDS, LOCATE_GROWTH, OFFSET, read_first
from broker_plugin.log.streams import Streams
from lrq_ha.errors import LrqError, MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import parse_stamp
from lrq_ha.replication.positions import Position
from lrq_ha.routing.messages import Demand, Read, ReadEnd, Trimmed
from lrq_ha.routing.shares import ViewEntry
from lrq_ha.routing.tables import Reason

log = logging.getLogger("lrq_ha.sites")

PREFETCH_MESSAGES = 200
WAITING_BYTES_MAX = 16 << 20  # a single message, and the broker's chunk around it, may be more
READ_MESSAGES_MAX = 200  # parsed and packed before anything else is done
READ_BYTES_MAX = 1 << 20
QUIET_S = 0.05  # without a delivery before the end is believed
IDLE_S = 0.1  # between looks whether the end has moved on
HINT_EVERY_MESSAGES = 256
HINTS_MAX = 4_096
CHANNEL_AGAIN_S = 1.0


class View:
    """The state of one view, shared by its readers.

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
        """An offset such that `sequence` and all later entries stand behind it; 0 if none is known."""
        index = bisect_right(self._sequences, sequence)
        return self._offsets[index - 1] if index else 0

    async def probe(self, streams: Streams) -> None:
        """Looks up the tail that older incarnations left: no older entry stands behind the OPEN of this one (R3).

        From the end back, as starts without a write have left nothing but their OPEN there.
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
    """A reader of one view. One is made per StartReader; its task is cancelled to stop it.

    Args:
        connection: To the own broker, vhost `lrq`.
        view: The view to read.
        from_sequence: The first sequence to give.
        number: The reader's number.
        end: The position up to which every view of the own broker is written now.
        give: Takes what was read. It may call `pause`, or cancel the task, before it returns.
        begins: Sequence at which the own log began (R17): earlier entries of the view are on other nodes only.

    Attributes:
        problem: Why it cannot read now; empty if it can.
    """

    def __init__(
        self,
        connection: Connection,
        view: View,
        from_sequence: int,
        number: int,
        end: Callable[[], Position],
        give: Callable[[Read | ReadEnd | Trimmed | Demand], None],
        *,
        begins: int = 0,
    ) -> None:
        self._connection = connection
        self._view = view
        self._from = from_sequence
        self._begins = begins
        self._number = number
        self.problem = ""
        self._end = end
        self._give = give
        self._arrived: deque[tuple[int, bytes, bytes]] = deque()
        self._waiting_bytes = 0  # of the bodies in `_arrived`
        self._prefetch = PREFETCH_MESSAGES
        self._wake = asyncio.Event()
        self._going = True
        self._attached = False
        self._broken: LrqError | None = None
        self._offset = -1  # of the last delivery that was taken
        self._return_to = 0  # offset at which to go on with a view that was left; 0: at the beginning
        self._dropped = False  # the broker has dropped the records between the last delivery and the next entry
        self._seen = 0  # greatest sequence that has come, given or not
        self._ended = 0  # sequence of the last ReadEnd
        self._count = 0

    def pause(self) -> None:
        self._going = False

    def resume(self) -> None:
        self._going = True
        self._wake.set()

    async def run(self) -> None:
        """Reads until it is cancelled, or until its next entries were trimmed.

        Raises:
            LrqError: The view cannot be read any more.
        """
        if self._from < self._begins:
            self._give(Trimmed(self._number, self._begins))
            return
        while True:
            try:
                while not await self._attach():
                    while not self._going:
                        await self._woken()
                return
            except NoChannelLeft as error:
                if not self.problem:
                    log.warning("%s cannot be read: %s", self._view.queue, error)
                self.problem = str(error)
                await asyncio.sleep(CHANNEL_AGAIN_S)

    async def _attach(self) -> bool:
        """Reads from the beginning, or from the entry after the last one given. Returns as `_read` does."""
        channel = await self._connection.channel(on_close=self._closed)
        try:
            await channel.qos(self._prefetch)
            start = self._return_to or self._view.offset_before(self._from)
            self._dropped = self._dropped and self._return_to > 0
            self._offset, self._return_to = start - 1, 0
            self._forget()
            self._attached = True
            await channel.consume(self._view.queue, self._take, arguments={OFFSET: start or "first"}, on_cancel=self._cancelled)
            self.problem = ""
            return await self._read(channel)
        finally:
            self._attached = False
            self._forget()
            if channel.error is None:
                await channel.close()

    async def _read(self, channel: Channel) -> bool:
        """Gives entries. Returns whether there are no more; if not, the reader has left the view."""
        while True:
            if self._waiting_bytes > WAITING_BYTES_MAX and self._lower_prefetch():
                self._return_to = self._offset + 1
                return False
            if not self._going:
                await self._woken()
                continue
            if not self._arrived:
                await self._rest()
                continue
            taken: list[tuple[int, bytes, bytes]] = []
            size = 0
            while self._arrived and len(taken) < READ_MESSAGES_MAX and size < READ_BYTES_MAX:
                taken.append(self._arrived.popleft())
                size += len(taken[-1][2])
            self._waiting_bytes -= size
            if (first := await self._behind_hole([header for _, header, _ in taken])) > 0:
                self._give(Trimmed(self._number, first))
                return True
            entries = [
                ViewEntry(position, pb.Transaction.FromString(body), len(body))
                for _, header, body in taken
                if (position := self._next(header)) is not None
            ]
            if entries:
                self._give(Read(self._number, tuple(entries), entries[-1].position))
            if channel.error is None:
                channel.ack(taken[-1][0], True)
            await asyncio.sleep(0)

    def _lower_prefetch(self) -> bool:
        """Adapts the prefetch to the size of the messages that wait. Returns whether the reader has to leave the view for that."""
        fitting = max(1, min(self._prefetch, len(self._arrived) * WAITING_BYTES_MAX // self._waiting_bytes))
        lower, self._prefetch = fitting < self._prefetch, fitting
        return lower or not self._going

    async def _behind_hole(self, headers_taken: list[bytes]) -> int:
        """The first entry behind records that the broker has dropped before these deliveries, or among them, if it may be wanted; else 0."""
        if not self._dropped and _offset(headers_taken[-1]) == self._offset + len(headers_taken):
            self._offset += len(headers_taken)
            return 0
        seen = max(self._from, self._seen)
        for header in headers_taken:
            before, self._offset = self._offset, _offset(header)
            if not self._dropped and self._offset > before + 1:
                self._dropped = await self._head() > before + 1
            sequence = _position(header).sequence
            if self._dropped and sequence:
                if sequence > seen:
                    return sequence
                self._dropped = False
            seen = max(seen, sequence)
        return 0

    async def _head(self) -> int:
        """Offset of the first record that the view still has."""
        header, _ = await read_first(lambda on_close: self._connection.channel(on_close=on_close), self._view.queue, self._gone())
        return _offset(header)

    def _next(self, header: bytes) -> Position | None:
        """The position of a delivery to give; None if it is a repeat or lies before the beginning."""
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
            self._give(Demand(Reason.READ_TOO_LATE))
        return position

    async def _rest(self) -> None:
        """Waits for a delivery; if none comes, every entry that was in the view at the start of the wait has come."""
        if self._broken is not None:
            raise self._broken
        end, tail = self._end(), self._view.tail
        moved = end.sequence > self._ended and self._seen >= tail
        self._wake.clear()
        try:
            async with asyncio.timeout(QUIET_S if moved else IDLE_S):
                await self._wake.wait()
        except TimeoutError:
            if moved and self._going:
                self._ended = end.sequence
                self._give(ReadEnd(self._number, end))

    async def _woken(self) -> None:
        """Waits for a delivery, the end of a pause, or of the channel."""
        self._wake.clear()
        await self._wake.wait()

    def _forget(self) -> None:
        self._arrived.clear()
        self._waiting_bytes = 0

    def _take(self, tag: int, _redelivered: bool, _exchange: str, _key: str, header: bytes, body: bytes) -> None:
        if self._attached:
            self._arrived.append((tag, header, body))
            self._waiting_bytes += len(body)
            self._wake.set()

    def _closed(self, error: LrqError | None) -> None:
        if error is not None:
            self._broken = error
            self._going = True
            self._wake.set()

    def _cancelled(self, _tag: str) -> None:
        self._closed(self._gone())

    def _gone(self) -> ChannelClosed:
        return ChannelClosed(404, f"the stream '{self._view.queue}' was deleted")


def _position(header: bytes) -> Position:
    """The entry's position in the log; (0, 0), which is no position, for a record that is no entry."""
    return _stamped(stamps.position(header) or b"")


def _stamped(value: bytes) -> Position:
    try:
        epoch, sequence, _ = parse_stamp(value)
    except MalformedInput:
        return Position(0, 0)
    return Position(epoch, sequence)


def _offset(header: bytes) -> int:
    return int(codec.header_table(header).get(OFFSET, 0))
