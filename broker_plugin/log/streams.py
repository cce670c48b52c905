"""The streams that a sidecar keeps in its broker: the log, the applied record and the views. One writer (R3).

Rules:
- Everything is published through the exchange of this incarnation. A start declares its own exchange first, then
  deletes the older ones, then publishes OPEN and reads up to it: publishes that a killed predecessor had under way
  can no longer land.
- Numbers of incarnations grow: the exchange of the newest stands until a newer one is declared, so it is always
  found. If too many starts in a row ended before OPEN to find that exchange by counting on from the last OPEN, it is
  deleted, and the next start counts from that OPEN.
- Each incarnation consumes, alone, from a queue named as its exchange. A newer one deletes that queue, and so tells
  the older at once, however idle it is. A process whose incarnation was shut out in that way does not take over again
  while the newer one lives (its queue has a consumer).
- One connection only publishes: a broker with an alarm (memory, disk) stops reading from it, and any other command on
  it would wait. Declarations, acks and the heartbeat go over another connection.
- A negative confirm, a returned message or a lost connection ends the incarnation.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from lrq_ha.errors import LrqError
from lrq_ha.replication.log import BatchHeader
from lrq_ha.routing import names
from lrq_ha.routing.names import LOG_PREFIX, ROUTING_VHOST

from ..amqp.channel import fail
from ..amqp.connection import Address, Channel, Connection
from ..amqp.errors import AccessRefused, AmqpError, ChannelClosed, ConnectionLimit, VhostNotFound, grant
from . import codec

log = logging.getLogger("lrq_ha.streams")

PROBE_MAX = 16
READ_PREFETCH = 500
READ_ACK_EVERY = 100
QUIET_S = 0.2
FIRST_S = 10.0  # a freshly started broker on a slow disk may need so long for the first record
LOCATE_BACK_RECORDS = 64
LOCATE_GROWTH = 8
LOCATE_PREFETCH = 100
PLACES_MAX = 4_096
OFFSET = "x-stream-offset"
# RabbitMQ loses a stream, with everything confirmed in it, if the broker is killed within about half a second of the
# stream's creation (measured on 3.10 and 4.3): no data goes to a younger stream.
YOUNG_STREAM_S = 2.0
SEGMENT_BYTES_MAX = 64 << 20
SEGMENTS_MIN = 8  # of the log: the broker drops whole ones
APPLIED_RECORD_BYTES_MAX = 64 << 20
APPLIED_RECORDS_KEPT = 4  # of the largest: one is whole while the next is written, and the broker drops whole segments
APPLIED_BYTES_MAX = APPLIED_RECORDS_KEPT * APPLIED_RECORD_BYTES_MAX
STATUS_BYTES_MAX = 64 << 20
SMALL_SEGMENT_BYTES = 16 << 20

MAX_BYTES = "x-max-length-bytes"
# The operator's remedy for a log that is too small.
LARGER_LOG = "raise log_bytes_max, and by a policy on each broker the size of the streams (docs/operations/capacity.md)"
_INEQUIVALENT = re.compile(r"inequivalent arg '([\w-]+)'.*current is.* '(\d+)'")

T = TypeVar("T")
Record = tuple[Mapping[str, Any], bytes]


def _not_read(queue: str) -> LrqError:
    return LrqError(f"the broker has ended the reading of '{queue}'", todo="Look at its log: is the stream there, and in use?", retriable=True)


def segment_bytes(log_bytes_max: int) -> int:
    """Size of a segment of a log of this size: the broker drops one segment at a time."""
    return min(SEGMENT_BYTES_MAX, log_bytes_max // SEGMENTS_MIN)


class Streams:
    """Opens, writes and reads the streams of this incarnation.

    Args:
        group: Name of the group.
        broker: The own broker, with this sidecar's user; vhost lrq.
        log_bytes_max: Size of the log; older segments are dropped by the broker beyond it.
        shut_out: Number of an incarnation of this process that a newer sidecar has shut out; 0 if none was.
        on_written: Called with the number of log records (batches, fences) that were confirmed, in order.
        on_end: Called once when this incarnation can write no more.
        on_blocked: Called with the broker's reason when an alarm keeps it from taking records, with "" when it takes
            them again.

    Attributes:
        made_with: Streams that were made with another size than configured, and that size in bytes: only a policy
            changes it.
    """

    def __init__(
        self,
        group: str,
        broker: Address,
        log_bytes_max: int,
        on_written: Callable[[int], None],
        on_end: Callable[[str], None],
        *,
        shut_out: int = 0,
        on_blocked: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self.log_queue = LOG_PREFIX + group
        self.applied_queue = "LRQ_APPLIED_" + group
        self._exchange_prefix = f"LRQ_X_{group}_"
        self._broker = broker
        self._user = broker.user
        self._log_bytes_max = log_bytes_max
        self._segment_bytes = segment_bytes(log_bytes_max)
        self._on_written = on_written
        self._on_end = on_end
        self._on_blocked = on_blocked
        self._writing: Connection | None = None
        self._connection: Connection | None = None  # for everything but publishes
        self._channel: Channel | None = None
        self._views: Channel | None = None
        self._records: Channel | None = None
        self._log_records: deque[int] = deque()  # of each batch and FENCE that is not confirmed
        self._log_confirmed = 0  # of these records
        self._log_answered = 0  # publish tag
        self._log_written = 0  # records of this incarnation
        self._log_open_at = -1  # offset of the first of them, OPEN; -1: not known yet
        self._places: dict[tuple[int, int], int] = {}  # of the youngest batches of one entry: (sequence, leader), number of the record
        self._view_waits: deque[tuple[int, Callable[[], None]]] = deque()
        self._declared: set[str] = set()
        self.made_with: dict[str, int] = {}
        self.exchange = ""
        self.generation = 0
        self.shut_out = shut_out
        self.begins_anew = False
        self.lost_host = False

    # ---- opening -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connects, makes the streams, and shuts out every older incarnation.

        Raises:
            LrqError: The vhost, a right or stream queues are missing; the text names the command that sets them up.
                Or a newer sidecar beside this broker has taken over from this process, and lives.
        """
        try:
            self._connection = await Connection.open(self._broker, on_close=self._closed)
            self._writing = await Connection.open(self._broker, on_close=self._closed, on_blocked=lambda reason: self._on_blocked(reason or ""))
            await self._set_up()
        except VhostNotFound as error:
            raise LrqError(
                f"the broker has no vhost '{ROUTING_VHOST}'", todo=f"run: rabbitmqctl add_vhost {ROUTING_VHOST} && {self._grant}"
            ) from error
        except ConnectionLimit:
            raise
        except AccessRefused as error:
            raise LrqError(f"user '{self._user}' may not enter vhost '{ROUTING_VHOST}' of the broker", todo=f"run: {self._grant}") from error
        except ChannelClosed as error:
            if error.code != 403:
                raise
            raise LrqError(f"user '{self._user}' lacks a right in vhost '{ROUTING_VHOST}': {error.text}", todo=f"run: {self._grant}") from error

    @property
    def _grant(self) -> str:
        return grant(ROUTING_VHOST, self._user)

    async def _set_up(self) -> None:
        connection = self._need(self._connection)
        young: set[str] = set()
        for queue, size, segment in (
            (self.log_queue, self._log_bytes_max, self._segment_bytes),
            (self.applied_queue, APPLIED_BYTES_MAX, SMALL_SEGMENT_BYTES),
            (names.SEND_LOG_ENTRIES, self._log_bytes_max, self._segment_bytes),
            (names.SEND_SNAP_SYNC, self._log_bytes_max, self._segment_bytes),
            (names.STATUS, STATUS_BYTES_MAX, SMALL_SEGMENT_BYTES),
        ):
            if await self._declare(queue, size, segment):
                young.add(queue)
        if young:
            await asyncio.sleep(YOUNG_STREAM_S)
        hint = await self._generation_hint(young=self.applied_queue in young)
        existing = [n for n in range(max(hint, 1), hint + PROBE_MAX) if await self._exists(f"{self._exchange_prefix}{n}")]
        if self.shut_out and any([await self._lives(n) for n in existing if n > self.shut_out]):
            raise LrqError(
                "a newer sidecar beside this broker has taken over, and this one stands by",
                todo="a broker has one sidecar: stop one of the two",
                retriable=True,
            )
        self.generation = max([hint, *existing]) + 1
        channel = await connection.channel()
        if self.generation >= hint + PROBE_MAX:
            await self._shut_out(channel, {*existing, hint} - {0})
            raise LrqError(
                f"the {PROBE_MAX - 1} starts before this one were cut off before their OPEN was in the stream '{self.applied_queue}'; the next one "
                "begins behind the last that was not",
                todo="look in the log for what ended them",
                retriable=True,
            )
        self.exchange = f"{self._exchange_prefix}{self.generation}"
        await self._announce()
        await channel.exchange_declare(self.exchange, "direct", durable=True)
        await self._shut_out(channel, {*existing, hint} - {0})
        for queue in self._declared:
            await channel.queue_bind(queue, self.exchange, queue)
        await channel.close()
        self._channel = await self._writer(self._log_confirms)
        self._records = await self._writer(self._record_confirms)
        self._views = await self._writer(self._view_confirms)
        marks, _ = await self._look(self._boot_mark)
        self.lost_host = not marks
        self.begins_anew = await self._exists(self._anew_mark)
        self.shut_out = 0

    async def _shut_out(self, channel: Channel, generations: Iterable[int]) -> None:
        """Shuts out these incarnations: their publishes land nowhere any more, and they are told."""
        for n in generations:
            await channel.exchange_delete(f"{self._exchange_prefix}{n}")
            await channel.queue_delete(f"{self._exchange_prefix}{n}")

    async def _declare(self, queue: str, bytes_max: int, segment: int) -> bool:
        """Makes a stream unless it exists; returns whether it is new."""
        new = not await self._has_queue(queue)
        arguments: dict[str, Any] = {"x-queue-type": "stream", MAX_BYTES: bytes_max, "x-stream-max-segment-size-bytes": segment}
        said = ""
        while refusal := await self._declare_with(queue, arguments):
            said = said or refusal
            other = _INEQUIVALENT.search(refusal)
            if other is None or arguments[other[1]] == int(other[2]):
                break
            arguments[other[1]] = int(other[2])  # the size that the stream was made with
        if arguments[MAX_BYTES] != bytes_max:
            self.made_with[queue] = arguments[MAX_BYTES]
        if said:
            policy = "lrq-applied '^LRQ_APPLIED_'" if queue == self.applied_queue else "lrq-size '^LRQ_(HA|Send|Recv)_'"
            command = f"""rabbitmqctl set_policy -p {ROUTING_VHOST} {policy} '{{"max-length-bytes": {bytes_max}}}' --apply-to queues"""
            log.warning("the stream '%s' has other limits, which only a policy changes; unless that was done, run: %s (%s)", queue, command, said)
        self._declared.add(queue)
        return new

    async def _declare_with(self, queue: str, arguments: Mapping[str, Any]) -> str:
        """Declares a stream. Returns the broker's words if it exists with other arguments; empty if not. Raises
        LrqError: There is none now.
        """
        channel = await self._need(self._connection).channel()
        try:
            await channel.queue_declare(queue, durable=True, arguments=arguments)
        except ChannelClosed as error:
            if error.code == 406 and "inequivalent" in error.text:
                return error.text
            if error.code == 403:
                raise LrqError(f"user '{self._user}' may not configure '{queue}' in vhost '{ROUTING_VHOST}'", todo=f"run: {self._grant}") from error
            if error.code == 404:
                raise LrqError(
                    f"the broker knows the stream '{queue}', and does not have it in use: {error}",
                    todo="wait if the broker has just started; if it stays so, RabbitMQ has lost the stream, as it was killed while it was being "
                    "made, or its disk was full: promote another node, delete this broker's data, and start it again",
                    retriable=True,
                ) from error
            raise LrqError(
                f"the broker cannot make the stream '{queue}': {error}",
                todo="stream queues need RabbitMQ 3.9 or newer with the feature flag stream_queue: run rabbitmqctl enable_feature_flag all",
            ) from error
        await channel.close()
        return ""

    async def _has_queue(self, queue: str) -> bool:
        channel = await self._need(self._connection).channel()
        try:
            await channel.queue_declare(queue, passive=True)
        except ChannelClosed as error:
            return error.code != 404 or "home node" in str(error)
        await channel.close()
        return True

    async def _exists(self, exchange: str) -> bool:
        channel = await self._need(self._connection).channel()
        try:
            await channel.exchange_declare(exchange, passive=True)
        except ChannelClosed as error:
            if error.code == 404:
                return False
            raise
        await channel.close()
        return True

    async def _announce(self) -> None:
        """Consumes from the queue that shows that this incarnation lives; a newer one ends it by deleting the queue."""
        channel = await self._need(self._connection).channel()
        try:
            await channel.queue_declare(self.exchange, durable=True, arguments={"x-queue-type": "classic"})
            await channel.consume(self.exchange, lambda *_: None, no_ack=True, exclusive=True, on_cancel=self._taken_over)
        except ChannelClosed as error:
            if error.code == 403 and "exclusive" in error.text:
                raise LrqError("another sidecar beside this broker starts at this very moment", todo="stop one of the two", retriable=True) from error
            raise

    async def _lives(self, generation: int) -> bool:
        """Whether the sidecar of that incarnation is there."""
        _, consumers = await self._look(f"{self._exchange_prefix}{generation}")
        return consumers > 0

    async def _look(self, queue: str) -> tuple[int, int]:
        """(ready messages, consumers) of a queue; (0, 0) if the queue does not exist."""
        channel = await self._need(self._connection).channel()
        try:
            _, messages, consumers = await channel.queue_declare(queue, passive=True)
        except ChannelClosed as error:
            if error.code == 404:
                return 0, 0
            raise
        await channel.close()
        return messages, consumers

    def _taken_over(self, _tag: str) -> None:
        self.shut_out = self.generation
        self._fail("a newer sidecar beside this broker has taken over")

    async def _generation_hint(self, *, young: bool) -> int:
        """The newest generation that an applied record names, read without a barrier: only a hint where the search
        begins.

        An early answer of "nothing" would begin the search at 1 and miss an exchange with a higher number than
        PROBE_MAX: its writer would not be shut out, and this start and many after it would fail for a number that was
        assigned before.

        Raises:
            LrqError: The stream is not `young`, gives nothing, and has something: the broker counts that, five
                seconds late (3.10 and 4.3).
        """
        records = await self._read_quiet(self.applied_queue, QUIET_S if young else FIRST_S)
        if not (records or young) and (await self._look(self.applied_queue))[0]:
            raise LrqError(
                f"the broker has given nothing of the stream '{self.applied_queue}' for {FIRST_S:g} s, and there is something in it",
                todo="If this stays so, look at the broker's log, and whether its disk is slow",
                retriable=True,
            )
        return max((int(headers.get(codec.OPEN, headers.get(codec.GENERATION, 0))) for headers, _ in records), default=0)

    async def _read_quiet(self, queue: str, first_s: float) -> list[Record]:
        """The last chunk: reads until nothing has come for QUIET_S, or nothing at all for `first_s`."""
        channel = await self._need(self._connection).channel()
        await channel.qos(READ_PREFETCH)
        found: list[Record] = []
        arrived = asyncio.Event()

        def take(tag: int, _redelivered: bool, _exchange: str, _key: str, header: bytes, body: bytes) -> None:
            found.append((codec.header_table(header), body))
            arrived.set()

        await channel.consume(queue, take, arguments={OFFSET: "last"})
        while True:
            arrived.clear()
            try:
                await asyncio.wait_for(arrived.wait(), QUIET_S if found else first_s)
            except TimeoutError:
                break
        await channel.close()
        return found

    async def _writer(self, on_confirm: Callable[[int, bool, bool], None]) -> Channel:
        channel = await self._need(self._writing).channel(on_confirm=on_confirm, on_return=self._returned, on_close=self._closed)
        await channel.confirm_select()
        return channel

    async def read(self, queue: str, take: Callable[[Mapping[str, Any], bytes], None], start: int | str = "first") -> int:
        """Publishes OPEN to a stream and hands over every record up to it. Returns the offset of OPEN.

        Args:
            queue: log_queue, applied_queue or a view.
            take: Called with headers (OFFSET among them) and body of each record before the own OPEN; an exception
                that it raises ends the reading.
            start: An offset; "first": the first record that the stream still has; "last": that of the last chunk.

        Raises:
            LrqError: The broker ends the connection, or the stream, before that.
        """
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        channel = await self._need(self._connection).channel(on_close=lambda error: fail(done, error or _not_read(queue)))
        await channel.qos(READ_PREFETCH)
        count = 0
        joiner: codec.Joiner[Mapping[str, Any]] = codec.Joiner()

        def on_delivery(tag: int, _redelivered: bool, _exchange: str, _key: str, header: bytes, body: bytes) -> None:
            nonlocal count
            count += 1
            if done.done():
                return
            try:
                headers = codec.header_table(header)
                if headers.get(codec.OPEN) == self.generation:
                    if queue == self.log_queue and self._log_open_at < 0:
                        self._log_open_at = int(headers[OFFSET])
                    done.set_result(int(headers[OFFSET]))
                    return
                if (whole := joiner.take(headers, headers, body)) is not None:
                    take(*whole)
            except Exception as error:
                done.set_exception(error)
                return
            if count % READ_ACK_EVERY == 0:
                channel.ack(tag, True)

        await channel.consume(queue, on_delivery, arguments={OFFSET: start}, on_cancel=lambda _tag: fail(done, _not_read(queue)))
        writer = self._need(self._records)
        self._log_written += queue == self.log_queue
        writer.publish(self.exchange, queue, b"", {codec.OPEN: self.generation}, mandatory=True)
        await writer.confirmed()
        try:
            return await done
        finally:
            if channel.error is None:
                await channel.close()

    async def locate(self, sequence: int, leader: int) -> int | None:
        """The offset of the batch that begins with entry `sequence`, pushed by the leader of epoch `leader`. None:
        not found.

        Records follow each other without a gap but where the broker adds some of its own (segments begin with them).
        So the search begins at the offset without such records, and goes on behind it: a CHECKPOINT comes every 64
        MB, and reading all that to find it again would cost about half as much as writing it. Otherwise the search
        goes from the end back, as the batch is a young one.
        """
        place = self._places.get((sequence, leader))
        if place is not None and self._log_open_at >= 0:
            _, found = await self._look_for(sequence, leader, self._log_open_at + place - 1, prefetch=1)
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
            start: As of `read`.
            prefetch: Records that may be on their way.
            silence_s: The iteration ends when the stream gives nothing for so long; None: it waits for later records.

        Raises:
            LrqError: The broker ends the connection, or the stream.
        """
        arrived: asyncio.Queue[tuple[int, bytes, bytes] | LrqError] = asyncio.Queue()
        joiner: codec.Joiner[dict[str, Any]] = codec.Joiner()
        queue = self.log_queue
        channel = await self._need(self._connection).channel(on_close=lambda error: arrived.put_nowait(error or _not_read(queue)))
        try:
            await channel.qos(prefetch)
            await channel.consume(
                queue,
                lambda tag, _redelivered, _exchange, _key, header, body: arrived.put_nowait((tag, header, body)),
                arguments={OFFSET: start},
                on_cancel=lambda _tag: arrived.put_nowait(_not_read(queue)),
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

    # ---- writing -----------------------------------------------------------------------------------------------------

    def write_batch(self, batch: BatchHeader, body: bytes, safe: int) -> None:
        """Appends a batch to the log."""
        if batch.first == batch.last:  # the batch may be a CHECKPOINT
            self._places[batch.first, batch.leader] = self._log_written + 1
            if len(self._places) > PLACES_MAX:
                del self._places[next(iter(self._places))]
        records = codec.parts_of(codec.batch_headers(batch, safe), body)
        for headers, part in records:
            self._write(headers, part)
        self._log_written += len(records)
        self._log_records.append(len(records))

    def _write(self, headers: Mapping[str, Any], body: bytes) -> None:
        self._need(self._channel).publish(self.exchange, self.log_queue, body, headers, mandatory=True)

    def write_fence(self, epoch: int, out_end: int) -> None:
        """Appends a FENCE to the log."""
        self._write({codec.FENCE: epoch, codec.FENCE_OUT: out_end}, b"")
        self._log_written += 1
        self._log_records.append(1)

    async def write_applied(self, body: bytes) -> None:
        """Appends an applied record; returns when it is confirmed."""
        channel = self._need(self._records)
        for headers, part in codec.parts_of({}, body):
            channel.publish(self.exchange, self.applied_queue, part, {codec.GENERATION: self.generation, **headers}, mandatory=True)
        await channel.confirmed()

    async def write_view(self, queue: str, body: bytes, headers: Mapping[str, Any], done: Callable[[], None]) -> None:
        """Appends a message to a view (made if it does not exist); `done` is called when it is confirmed."""
        if queue not in self._declared:
            if await self._declare(queue, self._log_bytes_max, self._segment_bytes):
                await asyncio.sleep(YOUNG_STREAM_S)
            binder = await self._need(self._connection).channel()
            await binder.queue_bind(queue, self.exchange, queue)
            await binder.close()
        connection = self._need(self._writing)
        if connection.paused:
            await connection.drained()
        tag = self._need(self._views).publish(self.exchange, queue, body, headers, mandatory=True)
        self._view_waits.append((tag, done))

    @property
    def waiting(self) -> bool:
        """Whether a record of the log is not confirmed yet."""
        return bool(self._log_records)

    @property
    def _boot_mark(self) -> str:
        return self._exchange_prefix + "boot"

    @property
    def _anew_mark(self) -> str:
        return self._exchange_prefix + "anew"

    async def mark_anew(self) -> None:
        """Leaves a mark that is deleted last when everything of this node is deleted: until then, each start
        continues the deletion.
        """
        channel = await self._need(self._connection).channel()
        await channel.exchange_declare(self._anew_mark, "direct", durable=True)
        await channel.close()
        self.begins_anew = True

    async def mark_boot(self) -> None:
        """Leaves a mark that does not outlive the broker's process, so that a restart of the broker is noticed
        (R16).

        The mark is a transient message, as RabbitMQ 4 recovers even exchanges that are not durable. An alarm of the
        broker delays it, as it delays the log.
        """
        channel = await self._need(self._writing).channel()
        await channel.queue_declare(self._boot_mark, durable=True, arguments={"x-queue-type": "classic", "x-max-length": 1})
        await channel.queue_bind(self._boot_mark, self.exchange, self._boot_mark)  # the user may lack a right to the default exchange
        await channel.confirm_select()
        channel.publish(self.exchange, self._boot_mark, b"", persistent=False)
        await channel.confirmed()
        await channel.close()
        self.lost_host = False

    async def delete(self, queues: Iterable[str]) -> None:
        """Deletes these queues, then the log, which names the others, then the queue that shows that this
        incarnation lives.

        The next incarnation begins with nothing.
        """
        channel = await self._need(self._connection).channel()
        for queue in (*queues, self.log_queue, self.applied_queue, self._boot_mark, self.exchange):
            await channel.queue_delete(queue)
        for exchange in (self.exchange, self._anew_mark):
            await channel.exchange_delete(exchange)
        await channel.close()

    def _log_confirms(self, tag: int, multiple: bool, ok: bool) -> None:
        if not ok:
            self._fail("the broker refused a record of the log")
            return
        self._log_confirmed += self._need(self._channel).answered_to - self._log_answered
        self._log_answered = self._need(self._channel).answered_to
        count = 0
        while self._log_records and self._log_records[0] <= self._log_confirmed:
            self._log_confirmed -= self._log_records.popleft()
            count += 1
        if count:
            self._on_written(count)

    def _record_confirms(self, tag: int, multiple: bool, ok: bool) -> None:
        if not ok:
            self._fail("the broker refused an applied record")

    def _view_confirms(self, tag: int, multiple: bool, ok: bool) -> None:
        if not ok:
            self._fail("the broker refused an entry of a view")
            return
        answered = self._need(self._views).answered_to
        while self._view_waits and self._view_waits[0][0] <= answered:
            self._view_waits.popleft()[1]()

    def _returned(self, code: int, text: str, exchange: str, key: str, header: bytes, body: bytes) -> None:
        self._fail(f"a record for '{key}' came back ({code} {text}): the stream was deleted")

    def _closed(self, error: LrqError | None) -> None:
        if isinstance(error, ChannelClosed) and error.code == 404 and self.exchange in error.text:
            self._taken_over("")
        elif error is not None:
            self._fail(f"the connection to the broker is lost: {error}")

    def _fail(self, reason: str) -> None:
        on_end, self._on_end = self._on_end, lambda _reason: None
        on_end(reason)

    def _need(self, value: T | None) -> T:
        if value is None:
            raise AmqpError(0, "the streams are not open")
        return value

    async def close(self) -> None:
        self._on_end = lambda _reason: None
        for connection in (self._writing, self._connection):
            if connection is not None:
                await connection.close()
