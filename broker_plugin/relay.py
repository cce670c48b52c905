"""One client's connection: two sockets (client and broker) and what passes between them. The door's hot path.

Rules:
- What the client sends goes to the broker in the order it came, through one FIFO; an item leaves it when the entry that it waits for is
  safe (R5). So a publish, an ack and a declaration of one client keep their order, also across channels.
- Frames that need nothing are passed on as the slice they came in. A content that needs a stamp has its header frame rebuilt, its body never.
- The broker's answers to publishes become the client's through channels.Confirms; whatever the broker refuses, or whose fate nobody can
  know, becomes REFUSED, unless a copy of it has been seen.
- A client that vanishes leaves its broker side behind until what it published is sent and confirmed. Likewise a channel or connection is closed
  at the broker only when the broker has answered all its publishes: what was published before a close is in the queues.
- Reading from a side stops while the other side, or the log, does not keep up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pamqp import commands

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.errors import LrqError
from lrq_ha.replication.filter import Verdict
from lrq_ha.replication.ids import ReplicationId
from lrq_ha.replication.positions import RangeSet

from . import endpoints, frames, topology
from .channels import Channel, Closing, Consumer, Delivery, Passed, QueueKey, Settled
from .frames import (
    BASIC_ACK,
    BASIC_CANCEL,
    BASIC_CONSUME,
    BASIC_CONSUME_OK,
    BASIC_DELIVER,
    BASIC_GET,
    BASIC_GET_EMPTY,
    BASIC_GET_OK,
    BASIC_NACK,
    BASIC_PUBLISH,
    BASIC_RECOVER,
    BASIC_RECOVER_ASYNC,
    BASIC_REJECT,
    BASIC_RETURN,
    BODY,
    CHANNEL_CLOSE,
    CHANNEL_CLOSE_OK,
    CONFIRM_SELECT,
    CONNECTION_CLOSE,
    HEADER,
    HEARTBEAT,
    HEARTBEAT_FRAME,
    METHOD,
    QUEUE_DECLARE_OK,
    TX_SELECT,
    FrameError,
    decode_method,
    publish_route,
    scan,
)
from .headers import check_header, cut, deaths, position, position_field, replication_id, stamp

if TYPE_CHECKING:
    from .door import Door
    from .replica import Replica

log = logging.getLogger("lrq_ha.door")

RESUME_SHARE = 0.5  # reading goes on when what held it up has fallen below this share of its limit


class Relay:
    """A connection that is open on both sides, on a node that is primary.

    Args:
        door: The door it came through.
        replica: This node's log and what belongs to it.
        client, broker: The two transports.
        user, vhost: Who logged in, and where.
        producer: The name that the client announced; empty if none.
        frame_max_bytes: What client and broker agreed on for the client's side.
    """

    def __init__(
        self,
        door: Door,
        replica: Replica,
        client: asyncio.Transport,
        broker: asyncio.Transport,
        *,
        user: str,
        vhost: str,
        producer: str,
        peer: endpoints.Peer | None,
        frame_max_bytes: int,
        heartbeat_s: int,
    ) -> None:
        self.door = door
        self.replica = replica
        self.client: asyncio.Transport | None = client
        self.broker = broker
        self.user, self.vhost = user, vhost
        self.producer = producer
        self.producer_key = f"{user}:{producer}" if producer else ""
        self._id_prefix = f"{producer}/".encode()
        self.peer = peer
        self.frame_max_bytes = frame_max_bytes
        self._heartbeat_s = heartbeat_s
        self.channels: dict[int, Channel] = {}
        self.closed = False
        self.closing_reason = ""
        self._fifo: deque[tuple[int, bytes]] = deque()
        self._fifo_bytes = 0
        self._from_client = b""
        self._from_broker = b""
        self._client_parts = frames.Assembly()
        self._broker_parts = frames.Assembly()
        self._stalled = False  # a declaration is under way: nothing more is taken from the client until it is done
        self._backlog: deque[bytes] = deque()
        self._replies: dict[int, asyncio.Future[tuple[int, bytes]]] = {}
        self._held: deque[tuple[Channel, int, Delivery, int, bytes]] = deque()
        self._ack_frames: list[bytes] = []
        self._acked: dict[QueueKey, list[int]] = {}
        self._decisions: dict[bytes, endpoints.Decision] = {}
        self._client_paused = False
        self._client_full = False
        self._broker_full = False
        self._repeats: deque[tuple[Channel, int, int, int]] = deque()  # (channel, client tag, sequence, number in the ID): waits for the first
        self._locals: deque[tuple[Channel, int, int]] = deque()  # (channel, client tag, sequence) that waits to be safe
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_settled = b""  # the client's connection.close
        self.sent_at = self.heard_at = self.door.now()

    # ---- from the client ---------------------------------------------------------------------------------------------

    def client_data(self, data: bytes) -> None:
        """Bytes came from the client."""
        self.heard_at = self.door.now()
        self._backlog.append(data)
        while self._backlog and not self._stalled and self.client is not None:
            if self.replica.in_barrier:
                self._stall()
                self._spawn(self._await_barrier())
                return
            self._take(self._backlog.popleft())

    def _take(self, data: bytes) -> None:
        if self._from_client:
            data = self._from_client + data
        try:
            items, used = scan(data, 0, self.frame_max_bytes)
            self._from_client = data[used:] if used < len(data) else b""
            self._work(data, items)
        except LrqError as error:
            code = 501 if isinstance(error, FrameError) else 541
            self.door.counters["client_errors"] += 1
            self.close_client(code, str(error))
            return
        except Exception:
            log.exception("a client's frames could not be handled")
            self.close_client(541, "the door could not handle this; its log says why")
            return
        self._consider_pausing()

    def _work(self, data: bytes, items: list[frames.Item], start: int = 0) -> None:
        at, count = start, len(items)
        while at < count:
            item = items[at]
            kind, number = item[0], item[1]
            if kind not in (HEADER, BODY, HEARTBEAT) and self._client_parts.is_open(number):
                raise FrameError(f"a method on channel {number} stands inside a content")
            if kind == BASIC_PUBLISH and item[6]:
                at = self._publishes(data, items, at)
                continue
            at += 1
            if kind == BASIC_ACK:
                if not self._channel(number).closing:
                    self._ack(self._channel(number), bytes(data[item[2] : item[3]]))
                continue
            self._flush_acks()
            if kind == HEARTBEAT:
                self._to_broker(HEARTBEAT_FRAME)
                continue
            payload = bytes(data[item[2] : item[3]])
            if kind in (HEADER, BODY, BASIC_PUBLISH):
                content = self._client_parts.take(kind, number, payload)
                if content is not None:
                    blob = b"".join(
                        [
                            frames.frame(METHOD, number, content.method),
                            *frames.content(number, content.header, content.body, self.frame_max_bytes),
                        ]
                    )
                    whole, _ = scan(blob, 0, self.frame_max_bytes, 1 << 62)
                    self._publishes(blob, whole, 0)
                continue
            handler = self._CLIENT_METHODS.get(kind)
            channel = self._channel(number)
            if channel.closing and kind not in (CHANNEL_CLOSE, CHANNEL_CLOSE_OK):
                continue  # sent before the client knew
            if handler is not None:
                handler(self, channel, kind, payload)
            elif kind in topology.METHODS:
                self._topology(channel, kind, payload)
            else:
                self._forward(0, frames.frame(METHOD, number, payload))
            if self._stalled:
                left = (data[items[at][2] - 7 : _end_of(items[-1])] if at < count else b"") + self._from_client
                self._from_client = b""
                if left:
                    self._backlog.appendleft(left)
                return
        self._flush_acks()

    def _channel(self, number: int) -> Channel:
        channel = self.channels.get(number)
        if channel is None:
            channel = self.channels[number] = Channel(number)
        return channel

    def _decide(self, method: bytes) -> endpoints.Decision:
        decision = self._decisions.get(method)
        if decision is None:
            if len(self._decisions) >= frames.ROUTES_MAX:
                self._decisions.clear()
            decision = self._decisions[method] = endpoints.decide(self, publish_route(method))
        return decision

    def forget_decisions(self) -> None:
        """What is replicated has changed (a queue was declared or deleted)."""
        self._decisions.clear()

    def _publishes(self, data: bytes, items: list[frames.Item], at: int) -> int:
        """Takes a run of publishes, beginning with items[at]; returns the index of the first item it did not take."""
        self._flush_acks()
        replica = self.replica
        number = items[at][1]
        channel = self._channel(number)
        producer_key = self.producer_key
        prefix, suffix = replica.stamp_affixes
        first = sequence = replica.next_sequence
        run_number = next_number = 0
        run_has_ids = False
        lengths: list[int] = []
        stored: list[bytes] = []
        slice_from = slice_to = -1
        out: list[bytes] = []
        out_bytes = 0
        total = len(items)
        while at < total:
            kind, same, start, end, header, header_end, stop = items[at]
            if kind != BASIC_PUBLISH or not stop or same != number:
                break
            method = data[start:end]
            decision = self._decisions.get(method) or self._decide(method)
            if channel.closing:
                at += 1
                continue
            if decision is not endpoints.LOGGED:
                if lengths:
                    break
                at += 1
                body = frames.body_of(data, header_end, stop)
                endpoints.take(self, channel, decision, method, data[header:header_end], body, data[start - 7 : stop])
                if self.closed or self.client is None:
                    return total
                first = sequence = replica.next_sequence
                continue
            payload = data[header:header_end]
            original = payload
            has_id = False
            rid = replication_id(payload) if b"x-lrq-id" in payload else None
            if rid is not None and producer_key:
                identity = self._identity(rid)
                if identity is not None:
                    has_id = True
                    if lengths and not (run_has_ids and identity.sequence == next_number):
                        break
                    known = replica.dedup.seen(producer_key, identity.sequence)
                    if known:
                        if lengths:
                            break
                        at += 1
                        self._repeat(channel, producer_key, identity.sequence)
                        continue
                    next_number = identity.sequence + 1
                    if not lengths:
                        run_number, run_has_ids = identity.sequence, True
            if not has_id:
                if lengths and run_has_ids:
                    break
                if b"x-lrq-id" in payload:
                    payload = cut(payload, b"x-lrq-id")  # an ID counts only with its announced producer
            if b"x-lrq-pos" in payload:
                payload = cut(payload, b"x-lrq-pos")
            check_header(payload)
            stamped = stamp(payload, position_field(b"%b%d%b" % (prefix, sequence, suffix)))
            sequence += 1
            at += 1
            if payload is original:
                lengths.append(stop - start + 7)
                if slice_to == start - 7:
                    slice_to = stop
                else:
                    if slice_to >= 0:
                        stored.append(data[slice_from:slice_to])
                    slice_from, slice_to = start - 7, stop
            else:
                if slice_to >= 0:
                    stored.append(data[slice_from:slice_to])
                    slice_to = -1
                changed = b"".join((data[start - 7 : header - 7], _header_frame_head(number, len(payload)), payload, data[header_end:stop]))
                lengths.append(len(changed))
                stored.append(changed)
            size = len(stamped)
            if size + frames.FRAME_OVERHEAD_BYTES > self.frame_max_bytes:
                raise FrameError(f"a message's headers of {len(payload)} bytes leave no room for a position in a frame of {self.frame_max_bytes}")
            out += (data[start - 7 : header - 7], _header_frame_head(number, size), stamped, data[header_end:stop])
            out_bytes += stop - start + size - len(original)
        if lengths:
            if slice_to >= 0:
                stored.append(data[slice_from:slice_to])
            run = pb.Run()
            entry = run.enqueues
            entry.vhost = self.vhost
            entry.channel = number
            blob = stored[0] if len(stored) == 1 else b"".join(stored)
            entry.frames = blob
            entry.lengths.extend(lengths)
            if run_has_ids:
                entry.producer = producer_key
                entry.id_first = run_number
            count = len(lengths)
            replica.append(run, count, len(blob))
            if not channel.broker_confirms:
                channel.broker_confirms = True
                self._forward(0, frames.method_frame(number, commands.Confirm.Select(nowait=True)))
            channel.confirms.forwarded(count, first, producer_key if run_has_ids else "", run_number)
            self._forward(first + count - 1, b"".join(out))
        return at

    def _identity(self, raw: bytes) -> ReplicationId | None:
        """An ID of the announced producer; None for any other, as of a consumer that publishes what it received."""
        if not raw.startswith(self._id_prefix):
            return None
        return ReplicationId.parse(raw)

    def _repeat(self, channel: Channel, producer: str, number: int) -> None:
        """R6: the ID is in the log; the confirm waits for the first entry's completion."""
        self.door.counters["repeats"] += 1
        tag = channel.confirms.ended_here()
        if not tag:
            return
        sequence = self.replica.dedup.position_of(producer, number)
        if sequence is None or self.replica.tracker.is_applied(sequence):
            self._confirm_local(channel, tag)
        else:
            self._repeats.append((channel, tag, sequence, number))
            self.replica.waiting_applied.add(self)

    def _confirm_local(self, channel: Channel, tag: int, ok: bool = True) -> None:
        channel.confirms.local.discard(tag)
        if channel.speaks:
            self.to_client(frames.ack(channel.number, tag) if ok else frames.nack(channel.number, tag))

    def ended_here(self, channel: Channel, sequence: int) -> None:
        """A publish that ended here as log entry `sequence`: it is acked when that is safe (0: now)."""
        tag = channel.confirms.ended_here()
        if not tag:
            return
        if sequence <= self.replica.safe:
            self._confirm_local(channel, tag)
        else:
            self._locals.append((channel, tag, sequence))
            self.replica.waiting_safe.add(self)

    def pass_publish(self, channel: Channel, blob: bytes) -> None:
        """A publish that is not replicated: to the broker as it came."""
        if self.producer_key or channel.confirms.selected or channel.broker_confirms:
            if not channel.broker_confirms:
                channel.broker_confirms = True
                self._forward(0, frames.method_frame(channel.number, commands.Confirm.Select(nowait=True)))
            channel.confirms.forwarded(1, 0)
        self._forward(0, blob)

    # ---- acks --------------------------------------------------------------------------------------------------------

    def _ack(self, channel: Channel, payload: bytes) -> None:
        """Collects acks of one chunk; `_flush_acks` makes one entry per queue of them."""
        tag, bits = frames.tag_and_bits(payload)
        frame = frames.ack(channel.number, tag, bool(bits & 1))
        for delivery in channel.acknowledged(tag, bool(bits & 1)):
            if delivery.deaths:
                self._flush_acks()
                self.replica.dequeue(delivery.queue, [delivery.sequence], delivery.deaths)
            else:
                self._acked.setdefault(delivery.queue, []).append(delivery.sequence)
        self._ack_frames.append(frame)

    def _flush_acks(self) -> None:
        if not self._ack_frames:
            return
        acked, self._acked = self._acked, {}
        ack_frames, self._ack_frames = self._ack_frames, []
        for queue, sequences in acked.items():
            self.replica.dequeue(queue, sequences, ())
        self._forward(self._last_operation(), b"".join(ack_frames))

    def _last_operation(self) -> int:
        return self.replica.last_operation if self.replica.last_operation > self.replica.safe else 0

    def _reject(self, channel: Channel, kind: int, payload: bytes) -> None:
        tag, bits = frames.tag_and_bits(payload)
        multiple, requeue = (bool(bits & 1), bool(bits & 2)) if kind == BASIC_NACK else (False, bool(bits & 1))
        last = 0
        for delivery in channel.acknowledged(tag, multiple):
            if not requeue:
                last = self.replica.reject(delivery.queue, [delivery.sequence], delivery.deaths)
        self._forward(last, frames.frame(METHOD, channel.number, payload))

    def _recover(self, channel: Channel, kind: int, payload: bytes) -> None:
        channel.deliveries.clear()
        self._forward(0, frames.frame(METHOD, channel.number, payload))

    # ---- other methods of the client ---------------------------------------------------------------------------------

    def _confirm_select(self, channel: Channel, kind: int, payload: bytes) -> None:
        channel.confirms.selected = channel.broker_confirms = True
        self._forward(0, frames.frame(METHOD, channel.number, payload))  # a broker that has it on already just answers

    def _tx_select(self, channel: Channel, kind: int, payload: bytes) -> None:
        self._close_channel(channel, 540, "transactions are not offered here yet: use publisher confirms", TX_SELECT)

    def _consume(self, channel: Channel, kind: int, payload: bytes) -> None:
        method: Any = decode_method(payload)
        queue = method.queue or channel.last_queue
        key = (self.vhost, queue)
        tracked = self.replica.replicates(key) and not endpoints.is_routing(self.vhost)
        automatic = bool(method.no_ack) and tracked
        consumer = Consumer(key, automatic, tracked)
        if automatic:
            method.no_ack = False
        if method.nowait:
            channel.consumers[method.consumer_tag.encode()] = consumer
        else:
            channel.consuming.append(consumer)
        self._forward(0, frames.method_frame(channel.number, method))

    def _get(self, channel: Channel, kind: int, payload: bytes) -> None:
        method: Any = decode_method(payload)
        queue = method.queue or channel.last_queue
        key = (self.vhost, queue)
        tracked = self.replica.replicates(key) and not endpoints.is_routing(self.vhost)
        consumer = Consumer(key, bool(method.no_ack) and tracked, tracked)
        if consumer.automatic:
            method.no_ack = False
        frame = frames.method_frame(channel.number, method)
        channel.gets.append((consumer, frame))
        self._forward(0, frame)

    def _cancel(self, channel: Channel, kind: int, payload: bytes) -> None:
        self._forward(0, frames.frame(METHOD, channel.number, payload))

    def _channel_close(self, channel: Channel, kind: int, payload: bytes) -> None:
        frame = frames.frame(METHOD, channel.number, payload)
        if channel.state is Closing.NO:
            self._end_channel(channel, Closing.CLIENT, frame)
        elif channel.state is Closing.BROKER:
            self._forward(0, frame)  # both sides closed at once
        elif channel.state in (Closing.DOOR, Closing.TOLD):
            self.to_client(frames.method_frame(channel.number, commands.Channel.CloseOk()))

    def _channel_close_ok(self, channel: Channel, kind: int, payload: bytes) -> None:
        if channel.state in (Closing.BROKER, Closing.TOLD):
            if channel.state is Closing.BROKER:
                self._forward(0, frames.frame(METHOD, channel.number, payload))
            self.channels.pop(channel.number, None)
            self._client_parts.drop(channel.number)
        elif channel.state is Closing.NO:
            self._forward(0, frames.frame(METHOD, channel.number, payload))

    def _connection_close(self, channel: Channel, kind: int, payload: bytes) -> None:
        self.closing_reason = "the client closed it"
        self._on_settled = frames.frame(METHOD, 0, payload)
        if any(c.confirms.open for c in self.channels.values()):
            self._in_time(self._settle_all)
        else:
            self._settle_all()

    def _close_channel(self, channel: Channel, code: int, text: str, cause: int) -> None:
        """Closes a channel on both sides, with an error of the door's own."""
        channel.refusal = frames.channel_close(channel.number, code, text, cause)
        self._end_channel(channel, Closing.DOOR, frames.method_frame(channel.number, commands.Channel.Close(200, "the door closed it", 0, 0)))

    def _end_channel(self, channel: Channel, state: Closing, frame: bytes) -> None:
        channel.state, channel.on_settled = state, frame
        channel.deliveries.clear()
        if channel.confirms.open:
            self._in_time(lambda: self._settle(channel))
        else:
            self._settle(channel)

    def _in_time(self, done: Callable[[], None]) -> None:
        """A broker that does not answer publishes must not keep a connection for ever."""
        asyncio.get_running_loop().call_later(self.door.config.drain_timeout_s, done)

    def _settle(self, channel: Channel) -> None:
        if channel.on_settled and not self.closed:
            frame, channel.on_settled = channel.on_settled, b""
            self._forward(0, frame)

    def _settle_all(self) -> None:
        if self._on_settled and not self.closed:
            frame, self._on_settled = self._on_settled, b""
            self._forward(0, frame)

    def _tell(self, channel: Channel) -> None:
        """The broker's side of a channel that the door refused is closed."""
        channel.state = Closing.TOLD
        self.to_client(channel.refusal)

    def refuse_publish(self, channel: Channel, code: int, text: str) -> None:
        """A publish that the door does not take: the channel is closed, as a broker would."""
        self.door.counters["refused_publishes"] += 1
        self._close_channel(channel, code, text, BASIC_PUBLISH)

    # ---- declarations ------------------------------------------------------------------------------------------------

    def _topology(self, channel: Channel, kind: int, payload: bytes) -> None:
        method: Any = decode_method(payload)
        action = topology.classify(self, channel, kind, payload, method)
        if isinstance(action, topology.Refuse):
            self._close_channel(channel, action.code, action.text, kind)
        elif isinstance(action, topology.Answer):
            name = frames.short_string(action.queue)
            high, low = divmod(action.number, 1 << 32)
            counts = low.to_bytes(4, "big") + high.to_bytes(4, "big")
            self.to_client(frames.raw_method_frame(channel.number, QUEUE_DECLARE_OK, name, counts))
        elif isinstance(action, topology.PassOn):
            if action.queue:
                channel.last_queue = action.queue
            silent = bool(getattr(method, "nowait", False))
            if action.local is not None:
                # Whether the queue is this node's own is known when the broker has accepted it: without an answer it would never be.
                payload = topology.answered(payload)
                channel.passed.append(Passed(action.local, silent))
            elif not silent:
                channel.passed.append(Passed(None, False))
            self._forward(0, frames.frame(METHOD, channel.number, payload))
        else:
            self._stall()
            self._spawn(self._replicate_topology(channel, kind, method, action))

    async def _replicate_topology(self, channel: Channel, kind: int, method: Any, action: topology.Replicate) -> None:
        """A declaration takes its place among the publishes of all connections: a barrier before, an entry after."""
        number = channel.number
        try:
            async with self.replica.barrier():
                reply: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
                self._replies[number] = reply
                nowait = bool(getattr(method, "nowait", False))
                self._forward(0, frames.frame(METHOD, number, action.asked))
                answer, payload = await reply
                if answer != CHANNEL_CLOSE:
                    sequence = self.replica.topology(self.vhost, action, method)
                    if kind == frames.QUEUE_DECLARE:
                        self.replica.local_queues.discard((self.vhost, action.queue))
                    if action.queue:
                        channel.last_queue = action.queue
            if answer == CHANNEL_CLOSE:
                return
            await self.replica.wait_safe(sequence)
            if not nowait:
                self.to_client(frames.frame(METHOD, number, payload))
        finally:
            self._replies.pop(number, None)
            self._unstall()

    async def _await_barrier(self) -> None:
        """Another connection's declaration is under way."""
        await self.replica.barrier_over()
        self._unstall()

    def _stall(self) -> None:
        """Takes nothing more from the client for now."""
        self._stalled = True
        self._pause_client()

    def _unstall(self) -> None:
        self._stalled = False
        if self.closed or self.client is None:
            return
        self._resume_client()
        self.client_data(b"")

    # ---- to the broker -----------------------------------------------------------------------------------------------

    def _forward(self, sequence: int, data: bytes) -> None:
        """Puts bytes for the broker into the FIFO; they leave it when entry `sequence` is safe (0: at once, in order)."""
        if not self._fifo and sequence <= self.replica.safe and not self._broker_full:
            self._to_broker(data)
            return
        self._fifo.append((sequence, data))
        self._fifo_bytes += len(data)
        if sequence > self.replica.safe:
            self.replica.waiting_safe.add(self)

    def _to_broker(self, data: bytes) -> None:
        self.sent_at = self.door.now()
        if not self.broker.is_closing():
            self.broker.write(data)

    def safe_advanced(self) -> None:
        """The log is safe further than before."""
        if self.closed:
            return
        safe = self.replica.safe
        while self._locals and self._locals[0][2] <= safe:
            channel, tag, _ = self._locals.popleft()
            self._confirm_local(channel, tag)
        if self._held:
            self._decide_held()
        self._pump()

    def _pump(self) -> None:
        fifo, safe = self._fifo, self.replica.safe
        ready = []
        while fifo and fifo[0][0] <= safe and not self._broker_full:
            data = fifo.popleft()[1]
            self._fifo_bytes -= len(data)
            ready.append(data)
        if ready:
            self._to_broker(b"".join(ready) if len(ready) > 1 else ready[0])
        if fifo or self._locals or self._held:
            self.replica.waiting_safe.add(self)
        self._consider_pausing()
        if self.client is None:
            self._consider_leaving()

    def applied_advanced(self) -> None:
        """More of the log is in the queues and confirmed."""
        if self.closed:
            return
        tracker, dedup = self.replica.tracker, self.replica.dedup
        left: deque[tuple[Channel, int, int, int]] = deque()
        for channel, tag, sequence, number in self._repeats:
            if tracker.is_applied(sequence):
                # The first one was refused: its ID is free again, and the repeat is refused too.
                self._confirm_local(channel, tag, dedup.seen(self.producer_key, number))
            else:
                left.append((channel, tag, sequence, number))
        self._repeats = left
        if left:
            self.replica.waiting_applied.add(self)

    # ---- from the broker ---------------------------------------------------------------------------------------------

    def broker_data(self, data: bytes) -> None:
        """Bytes came from the broker."""
        try:
            self._from_the_broker(data)
        except Exception:
            log.exception("a broker's frames could not be handled")
            self.close_client(541, "the door could not handle the broker's answer; its log says why")
            self.close()

    def _from_the_broker(self, data: bytes) -> None:
        if self._from_broker:
            data = self._from_broker + data
        items, used = scan(data, 0, max(frames.FRAME_MAX_BYTES, self.frame_max_bytes))
        self._from_broker = data[used:] if used < len(data) else b""
        out: list[bytes] = []
        keep_from = -1  # start of the slice that is passed on as it came
        keep_to = 0
        for item in items:
            kind, number, start, end, _, _, stop = item
            begin, after = start - 7, stop or end + 1
            if kind == BASIC_DELIVER and stop:
                replaced = self._deliver(number, data, item)
            elif kind in (BASIC_ACK, BASIC_NACK):
                if keep_from >= 0:
                    out.append(data[keep_from:keep_to])
                    keep_from = -1
                replaced = self._broker_answer(number, kind, data, start)
            elif kind in self._BROKER_METHODS:
                replaced = self._BROKER_METHODS[kind](self, number, data, item)
            elif kind in (HEADER, BODY, BASIC_DELIVER, BASIC_GET_OK, BASIC_RETURN) and not stop:
                replaced = self._broker_part(number, kind, data[start:end])
            else:
                replaced = None
            if replaced is None:
                if keep_from < 0:
                    keep_from = begin
                elif keep_to != begin:
                    out.append(data[keep_from:keep_to])
                    keep_from = begin
                keep_to = after
                continue
            if keep_from >= 0:
                out.append(data[keep_from:keep_to])
                keep_from = -1
            if replaced:
                out.append(replaced)
        if keep_from >= 0:
            out.append(data[keep_from:keep_to])
        self._flush_acks()
        if out:
            self.to_client(out[0] if len(out) == 1 else b"".join(out))

    def _broker_part(self, number: int, kind: int, payload: bytes) -> bytes | None:
        """A content that came in pieces: put together, it is treated as one that came whole."""
        content = self._broker_parts.take(kind, number, payload)
        if content is None:
            return b""
        blob = b"".join(
            [frames.frame(METHOD, number, content.method), *frames.content(number, content.header, content.body, self.frame_max_bytes)]
        )
        items, _ = scan(blob, 0, self.frame_max_bytes, 1 << 62)
        item = items[0]
        replaced = None
        if item[0] == BASIC_DELIVER:
            replaced = self._deliver(number, blob, item)
        elif item[0] == BASIC_GET_OK:
            replaced = self._get_ok(number, blob, item)
        return blob if replaced is None else replaced

    def _deliver(self, number: int, data: bytes, item: frames.Item) -> bytes | None:
        """None: pass it on as it is; else what the client gets instead (nothing, if it must not see it)."""
        payload = data[item[4] : item[5]]
        channel = self._channel(number)
        if self.client is None or channel.state is Closing.DOOR:
            return b""  # nobody takes it; it goes back when the channel is closed
        if b"x-lrq-pos" not in payload:
            return None
        consumer_tag, tag, _ = frames.deliver_arguments(data[item[2] : item[3]])
        consumer = channel.consumers.get(consumer_tag)
        if consumer is None or not consumer.tracked or b"x-stream-offset" in payload:
            return None
        return self._judge(channel, consumer, tag, payload, data, item, 5 + len(consumer_tag) + 8)

    def _judge(
        self, channel: Channel, consumer: Consumer, tag: int, payload: bytes, data: bytes, item: frames.Item, bits_at: int
    ) -> bytes | None:
        """R9: what becomes of a copy that the broker hands out."""
        stamped = position(payload)
        parsed = self.replica.parse_stamp(stamped) if stamped is not None else None
        if parsed is None:
            return None
        sequence, generation = parsed
        died = deaths(payload) if b"x-death" in payload else ()
        queue = consumer.queue
        verdict = self.replica.filter.verdict(queue, sequence, generation, died)
        if verdict is Verdict.GIVE:
            self.replica.seen(sequence)
            delivery = Delivery(queue, sequence, died)
            redelivered = sequence <= self.replica.redelivered_upto
            if consumer.automatic:
                self._automatic(channel, tag, delivery)
            else:
                channel.deliveries[tag] = delivery
            if not redelivered:
                return None
            start, after = item[2] - 7, item[6]
            bit = item[2] + bits_at
            return data[start:bit] + bytes((data[bit] | 1,)) + data[bit + 1 : after]
        self._turn_away(channel, tag, Delivery(queue, sequence, died), generation, verdict, data[item[2] - 7 : item[6]])
        return b""

    def _automatic(self, channel: Channel, tag: int, delivery: Delivery) -> None:
        """A consumer without acks: the door acks for it."""
        if delivery.deaths:
            sequence = self.replica.dequeue(delivery.queue, [delivery.sequence], delivery.deaths)
            self._forward(sequence, frames.ack(channel.number, tag))
        else:
            self._acked.setdefault(delivery.queue, []).append(delivery.sequence)
            self._ack_frames.append(frames.ack(channel.number, tag))

    def _turn_away(self, channel: Channel, tag: int, delivery: Delivery, generation: int, verdict: Verdict, blob: bytes) -> None:
        self.door.counters["filtered"] += 1
        if verdict is Verdict.HOLD:
            self._held.append((channel, tag, delivery, generation, blob))
            self.replica.waiting_safe.add(self)
            return
        if verdict is Verdict.REJECT:
            self._forward(0, frames.reject(channel.number, tag, requeue=False))
        else:
            self._forward(0, frames.ack(channel.number, tag))
        self.replica.seen_gone(delivery.queue, delivery.sequence, generation, delivery.deaths)

    def _decide_held(self) -> None:
        held, self._held = self._held, deque()
        for channel, tag, delivery, generation, blob in held:
            if channel.closing:
                continue
            verdict = self.replica.filter.verdict(delivery.queue, delivery.sequence, generation, delivery.deaths)
            if verdict is Verdict.GIVE:
                channel.deliveries[tag] = delivery
                self.to_client(blob)
            else:
                self._turn_away(channel, tag, delivery, generation, verdict, blob)

    def _get_ok(self, number: int, data: bytes, item: frames.Item) -> bytes | None:
        channel = self._channel(number)
        if not item[6]:
            return self._broker_part(number, BASIC_GET_OK, data[item[2] : item[3]])
        if not channel.gets:
            return None
        consumer, frame = channel.gets.popleft()
        payload = data[item[4] : item[5]]
        if b"x-lrq-pos" not in payload or not consumer.tracked:
            return None
        tag, _ = frames.get_ok_arguments(data[item[2] : item[3]])
        replaced = self._judge(channel, consumer, tag, payload, data, item, 12)
        if replaced == b"":
            channel.gets.appendleft((consumer, frame))  # the client gets the next one instead
            self._forward(0, frame)
        return replaced

    def _get_empty(self, number: int, data: bytes, item: frames.Item) -> bytes | None:
        channel = self._channel(number)
        if channel.gets:
            channel.gets.popleft()
        return None

    def _consume_ok(self, number: int, data: bytes, item: frames.Item) -> bytes | None:
        channel = self._channel(number)
        if channel.consuming:
            start = item[2] + 4
            channel.consumers[bytes(data[start + 1 : start + 1 + data[start]])] = channel.consuming.popleft()
        return None

    def _broker_answer(self, number: int, kind: int, data: bytes, start: int) -> bytes:
        """The broker's ack or nack of publishes. Returns the frames for the client."""
        channel = self._channel(number)
        answers = self._settled(channel, number, kind, data, start)
        if not channel.confirms.open:
            self._settle(channel)
            if self._on_settled and not any(c.confirms.open for c in self.channels.values()):
                self._settle_all()
        return answers if channel.speaks else b""

    def _settled(self, channel: Channel, number: int, kind: int, data: bytes, start: int) -> bytes:
        tag, bits = frames.tag_and_bits(data, start)
        multiple = bool(bits & 1)
        ok = kind == BASIC_ACK
        answers = []
        settled = channel.confirms.answered(tag, multiple)
        for run in settled:
            if run.sequence:
                if ok:
                    self.replica.applied(run.sequence, run.sequence + run.publishes - 1)
                else:
                    self.replica.refuse([run])
        first_wanted = next((run for run in settled if run.client_tag), None)
        if first_wanted is None:
            return b""
        local = channel.confirms.local
        last = settled[-1]
        client_last = last.client_tag + last.publishes - 1
        make = frames.ack if ok else frames.nack
        if multiple and not (local and min(local) <= client_last):
            answers.append(make(number, client_last, True))
        else:
            answers += [make(number, t) for run in settled if run.client_tag for t in range(run.client_tag, run.client_tag + run.publishes)]
        return b"".join(answers)

    def _queue_declare_ok(self, number: int, data: bytes, item: frames.Item) -> bytes | None:
        start = item[2] + 4
        self._channel(number).last_queue = data[start + 1 : start + 1 + data[start]].decode("utf-8", "surrogateescape")
        return self._reply(number, data, item)

    def _reply(self, number: int, data: bytes, item: frames.Item) -> bytes | None:
        """The answer to a declaration that waits for it; the client gets it later."""
        channel = self._channel(number)
        if channel.passed:
            passed = channel.passed.popleft()
            if passed.local is not None:
                self.replica.local_queues.add(passed.local)
                self.door.forget_decisions()
            return b"" if passed.silent else None
        future = self._replies.get(number)
        if future is None or future.done():
            return None
        future.set_result((item[0], bytes(data[item[2] : item[3]])))
        return b""

    def _broker_closed_channel(self, number: int, data: bytes, item: frames.Item) -> bytes | None:
        channel = self._channel(number)
        future = self._replies.get(number)
        if future is not None and not future.done():
            future.set_result((CHANNEL_CLOSE, b""))
        channel.deliveries.clear()
        channel.passed.clear()
        channel.gets.clear()
        channel.consuming.clear()
        self._abandon(channel)
        self._broker_parts.drop(number)
        if self.client is None:  # nobody else answers
            channel.state = Closing.TOLD
            self._drop_from_fifo(number)
            self._to_broker(frames.method_frame(number, commands.Channel.CloseOk()))
            return b""
        if channel.state in (Closing.CLIENT, Closing.DOOR):
            # Both sides close at once. The client has asked already, or will be told the door's reason.
            asked = not channel.on_settled
            channel.on_settled = b""
            self._to_broker(frames.method_frame(number, commands.Channel.CloseOk()))
            if asked:
                return b""  # the broker answers that too
            if channel.state is Closing.DOOR:
                self._tell(channel)
            else:
                self.channels.pop(number, None)
                self.to_client(frames.method_frame(number, commands.Channel.CloseOk()))
            return b""
        # What waits in the FIFO for this channel must not reach a channel opened anew under its number.
        self._drop_from_fifo(number)
        channel.state = Closing.BROKER
        if self._on_settled and not any(c.confirms.open for c in self.channels.values()):
            self._settle_all()
        return None

    def _drop_from_fifo(self, number: int) -> None:
        kept = []
        for sequence, data in self._fifo:
            items, _ = scan(data, 0, frames.FRAME_MAX_BYTES, 1 << 62)
            if any(item[1] == number for item in items):
                self._fifo_bytes -= len(data)
                parts = [data[item[2] - 7 : _end_of(item)] for item in items if item[1] != number]
                if not parts:
                    continue
                data = b"".join(parts)
                self._fifo_bytes += len(data)
            kept.append((sequence, data))
        self._fifo = deque(kept)

    def _broker_close_ok(self, number: int, data: bytes, item: frames.Item) -> bytes | None:
        channel = self.channels.get(number)
        self._broker_parts.drop(number)
        if channel is None or channel.state is Closing.BROKER:
            return None
        self._abandon(channel)
        if channel.state is Closing.DOOR:
            self._tell(channel)
            return b""
        del self.channels[number]
        self._client_parts.drop(number)
        return None

    def _abandon(self, channel: Channel) -> None:
        """Publishes without an answer on a channel that is gone: refused, unless a copy has been seen."""
        self.replica.refuse([run for run in channel.confirms.abandon() if run.sequence], unless_seen=True)

    def _broker_closed_connection(self, number: int, data: bytes, item: frames.Item) -> bytes | None:
        self.closing_reason = "the broker closed it"
        for future in self._replies.values():
            if not future.done():
                future.set_result((CHANNEL_CLOSE, b""))
        if self.client is None:
            self._to_broker(frames.method_frame(0, commands.Connection.CloseOk()))
        return None

    # ---- to the client -----------------------------------------------------------------------------------------------

    def to_client(self, data: bytes) -> None:
        if self.client is not None and not self.client.is_closing():
            self.client.write(data)

    def close_client(self, code: int, text: str) -> None:
        """Ends the connection with an error to the client; what it published before is brought to its end."""
        if self.client is not None:
            self.client.write(frames.connection_close(code, text))
            self.client.close()
            self.client_lost()

    # ---- flow --------------------------------------------------------------------------------------------------------

    def _consider_pausing(self) -> None:
        limit = self.door.config.connection_buffer_bytes_max
        if self.replica.unsafe_bytes > self.door.config.buffered_bytes_max or self._fifo_bytes > limit:
            self._pause_client()
            self.replica.waiting_safe.add(self)
        elif self._client_paused and self._fifo_bytes < limit * RESUME_SHARE:
            self._resume_client()

    def _pause_client(self) -> None:
        if self.client is not None and not self._client_paused:
            self._client_paused = True
            self.client.pause_reading()

    def _resume_client(self) -> None:
        if self.client is not None and self._client_paused and not self._stalled:
            self._client_paused = False
            self.heard_at = self.door.now()
            self.client.resume_reading()

    def client_full(self, full: bool) -> None:
        """The client does not read as fast as the broker sends: stop reading from the broker."""
        if self.closed or self.broker.is_closing():
            return
        if full:
            self.broker.pause_reading()
        else:
            self.broker.resume_reading()

    def broker_full(self, full: bool) -> None:
        """The broker does not read as fast as the log gets safe."""
        self._broker_full = full
        if not full:
            self._pump()

    def tick(self, now: float) -> None:
        """Once a second: a broker that waits for entries to be safe must not take the client for dead; a client that is dead is closed."""
        if not self._heartbeat_s or self.closed:
            return
        if self.client is not None and not self._client_paused and now - self.heard_at > 2 * self._heartbeat_s + 1:
            log.info("a client of %s sent nothing for %d s", self.user, 2 * self._heartbeat_s)
            self.client.abort()
            return
        if now - self.sent_at >= self._heartbeat_s / 2:
            self._to_broker(HEARTBEAT_FRAME)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def client_lost(self) -> None:
        """The client is gone. What it published is sent and confirmed before the broker's side is closed."""
        if self.client is None:
            return
        self.client = None
        self._backlog.clear()
        if not self.closed and not self.broker.is_closing():
            self.broker.resume_reading()  # its answers are still needed
        self._consider_leaving()
        if not self.closed:
            self._in_time(self.close)

    def _consider_leaving(self) -> None:
        if self._fifo or self._stalled or any(channel.confirms.open for channel in self.channels.values()):
            asyncio.get_running_loop().call_later(0.05, self._look_again)
        else:
            self.close()

    def _look_again(self) -> None:
        if not self.closed:
            self._consider_leaving()

    def broker_lost(self) -> None:
        """The broker's side is gone."""
        self.close()

    def close(self) -> None:
        """Closes both sides at once."""
        if self.closed:
            return
        self.closed = True
        for channel in self.channels.values():
            self._abandon(channel)
        for future in self._replies.values():
            if not future.done():
                future.set_result((CHANNEL_CLOSE, b""))
        for task in self._tasks:
            task.cancel()
        self.replica.waiting_safe.discard(self)
        self.replica.waiting_applied.discard(self)
        if self.client is not None:
            self.client.close()
            self.client = None
        if not self.broker.is_closing():
            self.broker.write(frames.connection_close(200, "the client is gone"))
            self.broker.close()
        self.door.gone(self)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    _CLIENT_METHODS = {
        BASIC_REJECT: _reject,
        BASIC_NACK: _reject,
        BASIC_RECOVER: _recover,
        BASIC_RECOVER_ASYNC: _recover,
        BASIC_CONSUME: _consume,
        BASIC_GET: _get,
        BASIC_CANCEL: _cancel,
        CONFIRM_SELECT: _confirm_select,
        TX_SELECT: _tx_select,
        CHANNEL_CLOSE: _channel_close,
        CHANNEL_CLOSE_OK: _channel_close_ok,
        CONNECTION_CLOSE: _connection_close,
    }
    _BROKER_METHODS = {
        BASIC_GET_OK: _get_ok,
        BASIC_GET_EMPTY: _get_empty,
        BASIC_CONSUME_OK: _consume_ok,
        QUEUE_DECLARE_OK: _queue_declare_ok,
        CHANNEL_CLOSE: _broker_closed_channel,
        CHANNEL_CLOSE_OK: _broker_close_ok,
        CONNECTION_CLOSE: _broker_closed_connection,
        **dict.fromkeys(topology.REPLIES, _reply),
    }


def _header_frame_head(channel: int, size: int) -> bytes:
    return b"\x02%c%c" % divmod(channel, 256) + size.to_bytes(4, "big")


def _end_of(item: frames.Item) -> int:
    return item[6] or item[3] + 1


def ranges_of(sequences: list[int]) -> list[int]:
    """Sorted and flattened inclusive ranges of single sequences."""
    return RangeSet.of(sequences).flat()


__all__ = ["QueueKey", "Relay", "Settled", "ranges_of"]
