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
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from lrq_ha.errors import LrqError
from lrq_ha.replication.log import BatchHeader
from lrq_ha.routing import names
from lrq_ha.routing.names import LOG_PREFIX, ROUTING_VHOST

from ..amqp.channel import fail
from ..amqp.connection import Address, Channel, Connection
from ..amqp.errors import AccessRefused, AmqpError, ChannelClosed, ConnectionLimit, VhostNotFound, grant
from ..amqp.reply_codes import ACCESS_REFUSED, NOT_FOUND
from . import codec
from .log_reader import FIRST_S, OFFSET, QUIET_S, BatchPlaces, LogReader, read_first, reading_ended
from .stream_declarer import APPLIED_PREFIX, StreamDeclarer

PROBE_MAX = 16
READ_PREFETCH = 500
READ_ACK_EVERY = 100
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

# The operator's remedy for a log that is too small.
LARGER_LOG = "raise log_bytes_max, and by a policy on each broker the size of the streams (docs/operations/capacity.md)"

T = TypeVar("T")


def segment_bytes(log_bytes_max: int) -> int:
    """Size of a segment of a log of this size: the broker drops one segment at a time."""
    return min(SEGMENT_BYTES_MAX, log_bytes_max // SEGMENTS_MIN)


class Streams:
    """Opens and writes the streams of this incarnation, and reads each up to its OPEN.

    Args:
        group: Name of the group.
        broker: The own broker, with this sidecar's user; vhost lrq.
        log_bytes_max: Size of the log; older segments are dropped by the broker beyond it.
        receive_bytes_max: Size of a receive queue; 0: as the log.
        shut_out: Number of an incarnation of this process that a newer sidecar has shut out; 0 if none was.
        on_written: Called with the number of log records (batches, fences) that were confirmed, in order.
        on_end: Called once when this incarnation can write no more.
        on_blocked: Called with the broker's reason when an alarm keeps it from taking records, with "" when it takes them again.
    """

    def __init__(
        self,
        group: str,
        broker: Address,
        log_bytes_max: int,
        on_written: Callable[[int], None],
        on_end: Callable[[str], None],
        *,
        receive_bytes_max: int = 0,
        shut_out: int = 0,
        on_blocked: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self.log_queue = LOG_PREFIX + group
        self.applied_queue = APPLIED_PREFIX + group
        self._exchange_prefix = f"LRQ_X_{group}_"
        self._boot_mark = self._exchange_prefix + "boot"
        self._anew_mark = self._exchange_prefix + "anew"
        self._broker = broker
        self._grant = grant(ROUTING_VHOST, broker.user)
        self._log_bytes_max = log_bytes_max
        self._receive_bytes_max = receive_bytes_max or log_bytes_max
        self._segment_bytes = segment_bytes(log_bytes_max)
        self._on_written = on_written
        self._on_end = on_end
        self._on_blocked = on_blocked
        self._writing: Connection | None = None
        self._connection: Connection | None = None  # for everything but publishes
        self._channel: Channel | None = None
        self._views: Channel | None = None
        self._records: Channel | None = None
        self._log_waits: deque[int] = deque()  # publish tags, of the last record of each batch and FENCE
        self._places = BatchPlaces()
        self._view_waits: deque[tuple[int, Callable[[], None]]] = deque()
        self.reader = LogReader(self.log_queue, self._open_channel, self._places)
        self.declarer = StreamDeclarer(self._open_channel, broker.user)
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
        user = self._broker.user
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
            raise LrqError(f"user '{user}' may not enter vhost '{ROUTING_VHOST}' of the broker", todo=f"run: {self._grant}") from error
        except ChannelClosed as error:
            if error.code != ACCESS_REFUSED:
                raise
            raise LrqError(f"user '{user}' lacks a right in vhost '{ROUTING_VHOST}': {error.text}", todo=f"run: {self._grant}") from error

    async def _open_channel(self, on_close: Callable[[LrqError | None], None] | None = None) -> Channel:
        return await self._need(self._connection).channel(on_close=on_close)

    async def _set_up(self) -> None:
        young: set[str] = set()
        for queue, size, segment in (
            (self.log_queue, self._log_bytes_max, self._segment_bytes),
            (self.applied_queue, APPLIED_BYTES_MAX, SMALL_SEGMENT_BYTES),
            (names.SEND_LOG_ENTRIES, self._log_bytes_max, self._segment_bytes),
            (names.SEND_SNAP_SYNC, self._log_bytes_max, self._segment_bytes),
            (names.STATUS, STATUS_BYTES_MAX, SMALL_SEGMENT_BYTES),
        ):
            if await self.declarer.declare(queue, size, segment):
                young.add(queue)
        if young:
            await asyncio.sleep(YOUNG_STREAM_S)
        hint = await self._generation_hint(young=self.applied_queue in young)
        existing = [n for n in range(max(hint, 1), hint + PROBE_MAX) if await self.declarer.has_exchange(f"{self._exchange_prefix}{n}")]
        if self.shut_out and any([(await self.declarer.count_messages(f"{self._exchange_prefix}{n}"))[1] for n in existing if n > self.shut_out]):
            raise LrqError(
                "a newer sidecar beside this broker has taken over, and this one stands by",
                todo="a broker has one sidecar: stop one of the two",
                retriable=True,
            )
        self.generation = max([hint, *existing]) + 1
        channel = await self._open_channel()
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
        for queue in self.declarer.declared:
            await channel.queue_bind(queue, self.exchange, queue)
        await channel.close()
        self._channel = await self._writer("a record of the log", self._log_confirms)
        self._records = await self._writer("an applied record", lambda: None)
        self._views = await self._writer("an entry of a view", self._view_confirms)
        marks, _ = await self.declarer.count_messages(self._boot_mark)
        self.lost_host = not marks
        self.begins_anew = await self.declarer.has_exchange(self._anew_mark)
        self.shut_out = 0

    async def _shut_out(self, channel: Channel, generations: Iterable[int]) -> None:
        """Shuts out these incarnations: their publishes land nowhere any more, and they are told."""
        for n in generations:
            await channel.exchange_delete(f"{self._exchange_prefix}{n}")
            await channel.queue_delete(f"{self._exchange_prefix}{n}")

    async def _announce(self) -> None:
        """Consumes from the queue that shows that this incarnation lives; a newer one ends it by deleting the queue."""
        channel = await self._open_channel()
        try:
            await channel.queue_declare(self.exchange, durable=True, arguments={"x-queue-type": "classic"})
            await channel.consume(self.exchange, lambda *_: None, no_ack=True, exclusive=True, on_cancel=self._taken_over)
        except ChannelClosed as error:
            if error.code == ACCESS_REFUSED and "exclusive" in error.text:
                raise LrqError("another sidecar beside this broker starts at this very moment", todo="stop one of the two", retriable=True) from error
            raise

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
        if not (records or young) and (await self.declarer.count_messages(self.applied_queue))[0]:
            raise LrqError(
                f"the broker has given nothing of the stream '{self.applied_queue}' for {FIRST_S:g} s, and there is something in it",
                todo="If this stays so, look at the broker's log, and whether its disk is slow",
                retriable=True,
            )
        return max((int(headers.get(codec.OPEN, headers.get(codec.GENERATION, 0))) for headers in records), default=0)

    async def _read_quiet(self, queue: str, first_s: float) -> list[dict[str, Any]]:
        """The headers of the last chunk: reads until nothing has come for QUIET_S, or nothing at all for `first_s`."""
        channel = await self._open_channel()
        await channel.qos(READ_PREFETCH)
        found: list[dict[str, Any]] = []
        arrived = asyncio.Event()

        def take(tag: int, _redelivered: bool, _exchange: str, _key: str, header: bytes, _body: bytes) -> None:
            found.append(codec.header_table(header))
            arrived.set()

        await channel.consume(queue, take, arguments={OFFSET: "last"})
        while True:
            arrived.clear()
            try:
                async with asyncio.timeout(QUIET_S if found else first_s):
                    await arrived.wait()
            except TimeoutError:
                break
        await channel.close()
        return found

    async def _writer(self, writes: str, confirmed: Callable[[], None]) -> Channel:
        def answered(_tag: int, _multiple: bool, ok: bool) -> None:
            if ok:
                confirmed()
            else:
                self._fail(f"the broker refused {writes}")

        channel = await self._need(self._writing).channel(on_confirm=answered, on_return=self._returned, on_close=self._closed)
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
        channel = await self._open_channel(lambda error: fail(done, error or reading_ended(queue)))
        await channel.qos(READ_PREFETCH)
        joiner: codec.Joiner[Mapping[str, Any]] = codec.Joiner()

        def on_delivery(tag: int, _redelivered: bool, _exchange: str, _key: str, header: bytes, body: bytes) -> None:
            if done.done():
                return
            try:
                headers = codec.header_table(header)
                if headers.get(codec.OPEN) == self.generation:
                    if queue == self.log_queue and self._places.open_at < 0:
                        self._places.open_at = int(headers[OFFSET])
                    done.set_result(int(headers[OFFSET]))
                    return
                if (whole := joiner.take(headers, headers, body)) is not None:
                    take(*whole)
            except Exception as error:
                done.set_exception(error)
                return
            if tag % READ_ACK_EVERY == 0:
                channel.ack(tag, True)

        await channel.consume(queue, on_delivery, arguments={OFFSET: start}, on_cancel=lambda _tag: fail(done, reading_ended(queue)))
        writer = self._need(self._records)
        self._places.written += queue == self.log_queue
        writer.publish(self.exchange, queue, b"", {codec.OPEN: self.generation, codec.SOFTWARE: codec.WRITER.software}, mandatory=True)
        await writer.confirmed()
        try:
            return await done
        finally:
            if channel.error is None:
                await channel.close()

    # ---- writing -----------------------------------------------------------------------------------------------------

    def write_batch(self, batch: BatchHeader, body: bytes, safe: int) -> None:
        """Appends a batch to the log."""
        self._places.note(batch)
        self._append(codec.parts_of(codec.batch_headers(batch, safe), body))

    def write_fence(self, epoch: int, out_end: int) -> None:
        """Appends a FENCE to the log."""
        self._append([({codec.FENCE: epoch, codec.FENCE_OUT: out_end}, b"")])

    def _append(self, records: list[tuple[dict[str, Any], bytes]]) -> None:
        channel = self._need(self._channel)
        tags = [channel.publish(self.exchange, self.log_queue, part, headers, mandatory=True) for headers, part in records]
        self._places.written += len(tags)
        self._log_waits.append(tags[-1])

    async def write_applied(self, body: bytes) -> None:
        """Appends an applied record; returns when it is confirmed."""
        channel = self._need(self._records)
        for headers, part in codec.parts_of({}, body):
            channel.publish(self.exchange, self.applied_queue, part, {codec.GENERATION: self.generation, **headers}, mandatory=True)
        await channel.confirmed()

    async def write_view(self, queue: str, body: bytes, headers: Mapping[str, Any], done: Callable[[], None]) -> None:
        """Appends a message to a view (made if it does not exist); `done` is called when it is confirmed."""
        if queue not in self.declarer.declared:
            size = self._receive_bytes_max  # the other views are declared at the start
            if await self.declarer.declare(queue, size, segment_bytes(size)):
                await asyncio.sleep(YOUNG_STREAM_S)
            binder = await self._open_channel()
            await binder.queue_bind(queue, self.exchange, queue)
            await binder.close()
        connection = self._need(self._writing)
        if connection.paused:
            await connection.drained()
        tag = self._need(self._views).publish(self.exchange, queue, body, headers, mandatory=True)
        self._view_waits.append((tag, done))

    def receive_bytes_max(self, queue: str) -> int:
        """Size of a receive queue in bytes: at most as configured."""
        return min(self._receive_bytes_max, self.declarer.made_with.get(queue, self._receive_bytes_max))

    async def read_first(self, queue: str) -> bytes | None:
        """The body of the first message that a view still has; None: there is no such view.

        Raises:
            LrqError: The broker gives no message, or is lost.
        """
        try:
            async with asyncio.timeout(FIRST_S):
                return (await read_first(self._open_channel, queue, reading_ended(queue)))[1]
        except TimeoutError as error:
            raise LrqError(f"the broker has given nothing of '{queue}' for {FIRST_S:g} s", retriable=True) from error
        except ChannelClosed as error:
            if error.code != NOT_FOUND:
                raise
            return None

    @property
    def broker_version(self) -> str:
        """The broker's version, as it says; empty: not connected yet."""
        return str(self._connection.server_properties.get("version", "")) if self._connection else ""

    @property
    def waiting(self) -> bool:
        """Whether a record of the log is not confirmed yet."""
        return bool(self._log_waits)

    async def mark_anew(self) -> None:
        """Leaves a mark that is deleted last when everything of this node is deleted: until then, each start
        continues the deletion.
        """
        channel = await self._open_channel()
        await channel.exchange_declare(self._anew_mark, "direct", durable=True)
        await channel.close()
        self.begins_anew = True

    async def mark_boot(self) -> None:
        """Leaves a mark that does not outlive the broker's process, so that a restart of the broker is noticed (R16).

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
        channel = await self._open_channel()
        for queue in (*queues, self.log_queue, self.applied_queue, self._boot_mark, self.exchange):
            await channel.queue_delete(queue)
        for exchange in (self.exchange, self._anew_mark):
            await channel.exchange_delete(exchange)
        await channel.close()

    def _log_confirms(self) -> None:
        answered = self._need(self._channel).answered_to
        count = 0
        while self._log_waits and self._log_waits[0] <= answered:
            self._log_waits.popleft()
            count += 1
        if count:
            self._on_written(count)

    def _view_confirms(self) -> None:
        answered = self._need(self._views).answered_to
        while self._view_waits and self._view_waits[0][0] <= answered:
            self._view_waits.popleft()[1]()

    def _returned(self, code: int, text: str, exchange: str, key: str, header: bytes, body: bytes) -> None:
        self._fail(f"a record for '{key}' came back ({code} {text}): the stream was deleted")

    def _closed(self, error: LrqError | None) -> None:
        if isinstance(error, ChannelClosed) and error.code == NOT_FOUND and self.exchange in error.text:
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
