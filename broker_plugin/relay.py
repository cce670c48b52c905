"""One client's connection: two sockets (client and broker), what passes between them, and when reading from either stops.

What becomes of a method stands in the tables of `protocol`; the handlers are in `publishing`, `delivering`, `settling`, `transacting`,
`declaring` and `closing`. Rules:
- What the client sends goes to the broker in the order it came, through the `Outbox`.
- Frames that need nothing are passed on as the slice they came in.
- A client that vanishes leaves its broker side behind until what it published is sent and confirmed.
- Reading from a side stops while the other side, or the log, does not keep up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from lrq_ha.replication.errors import LrqError, place

from . import closing, delivering, endpoints, farewell, frames, publishing, settling, transacting
from .alarms import Alarm
from .channels import Channel, Closing, Delivery, QueueKey
from .ends import End
from .farewell import CONNECTION_FORCED
from .frames import (
    BASIC_ACK,
    BASIC_DELIVER,
    BASIC_GET_OK,
    BASIC_NACK,
    BASIC_PUBLISH,
    BASIC_RETURN,
    BODY,
    CHANNEL_CLOSE,
    CHANNEL_CLOSE_OK,
    HEADER,
    HEARTBEAT,
    HEARTBEAT_FRAME,
    METHOD,
    FrameError,
    Item,
    end_of,
    scan,
)
from .headers import Stamps
from .logins import producer_key
from .outbox import Outbox
from .protocol import FROM_BROKER, FROM_CLIENT
from .replica import NotPrimary
from .waiting import Moving, first_that_waits, waits_for

if TYPE_CHECKING:
    from .door import Door
    from .replica import Replica

log = logging.getLogger("lrq_ha.door")

RESUME_SHARE = 0.5  # reading goes on when what held it up has fallen below this share of its limit
LEAVE_POLL_S = 0.05
SEEN_S = 0.25  # between the last confirm and connection.close: pika and others, reading both at once, raise and never tell of the confirm
STAMP_BYTES_MAX = 80  # what a position adds to a message's headers
DEAF_SHARE = 2  # of the limit on what is on its way to a client; from 1 on, nothing is read from the broker for it
CLOSING_SHARE = 2  # channels that the broker has closed are kept until both sides know, so there may be more than were agreed on
FEW_QUESTIONS = 16
ACKS_SHARE = 1.25  # of the limit on what is not safe yet: so much, a client may acknowledge that publishes nothing


class Relay(End):
    """A connection that is open on both sides, on a node that is primary.

    Args:
        door: The door it came through.
        replica: This node's log and what belongs to it.
        client, broker: The two transports.
        user, vhost: Who logged in, and where.
        producer: The name that the client announced; empty if none.
        peer: Who the other end is, if it is a sidecar.
        may_write: The broker lets the user publish to queues by their names (asked in vhost lrq only, of producers).
        frame_max_bytes: What holds on the client's side.
        broker_frame_max_bytes: What holds on the broker's side: a little more, for the positions in content headers.
        heartbeat_s: Likewise; 0 for none.
        channels_max: Channels that were agreed on; 0 for no limit. The broker counts those that are open; here it also bounds what is kept of
            those that never were.
        told_blocked: Whether the client understands connection.blocked.

    Attributes:
        client: None when it is gone.
        decisions: Where publishes go, by their method frame's payload.
        stamps: How their content headers are stamped.
        until_safe: Publishes that ended here: (channel, client's tag, sequence that must be safe).
        until_durable: Publishes with local completion: (channel, client's first and last tag, sequence that the own stream must have, bytes).
        may_publish: The broker has taken a publish of this connection to a queue by its name: so the user may do that.
        asks: The entry whose confirm will tell that; 0: none is under way.
        until_applied: Repeats: (channel, client's tag, sequence of the first, number in the ID).
        held_confirms: Confirms that wait until this primary has its expected backups: (channel, frames).
        acked, ack_frames: Acks that `settling.flush` will bring into the log, and to the broker.
        unseen: Channels with transactions on which the door has acks of its own to give.
        withheld: Frames of the broker, by channel, beginning with a delivery whose fate is not safe yet: neither it nor what follows it on its
            channel is given out before, so that order is kept and a `multiple` ack of the client covers what it has got.
        seconds: Channels that have a second one at the broker, by its number there (see `transacting`).
        replies: Declarations that wait for the broker's answer, by channel.
        returning: Queues to which something was given back of which the broker may not have heard, and what the outbox must have sent before.
        on_settled: The client's connection.close, until the broker has answered all publishes.
        over: The broker has closed the connection.
        watch: What tells interceptors; None if there are none. The functions and tables of the hot path that follow it are its own, then.
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
        may_write: bool,
        frame_max_bytes: int,
        broker_frame_max_bytes: int,
        heartbeat_s: int,
        channels_max: int,
        told_blocked: bool,
    ) -> None:
        self.door = door
        self.replica = replica
        self.client: asyncio.Transport | None = client
        self.broker = broker
        self.user, self.vhost = user, vhost
        self.producer = producer
        self.producer_key = producer_key(user, producer) if producer else ""
        self.id_prefix = f"{producer}/".encode()
        self.peer = peer
        self.may_write = may_write
        self.frame_max_bytes = frame_max_bytes
        self.header_bytes_max = min(broker_frame_max_bytes - frames.FRAME_OVERHEAD_BYTES, door.config.header_bytes_max + STAMP_BYTES_MAX)
        self.channels_max = channels_max
        self.channels: dict[int, Channel] = {}
        self._channels_max = CLOSING_SHARE * ((channels_max or frames.CHANNELS_MAX) + 1)
        self.seconds: dict[int, Channel] = {}
        self.closed = False
        self.outbox = Outbox(self)
        self.client_parts = frames.Assembly(door.config.message_bytes_max, door.unfinished)
        self.broker_parts = frames.Assembly()
        self.decisions: dict[bytes, endpoints.Decision] = {}
        self.stamps = Stamps()
        self.until_safe: deque[tuple[Channel, int, int]] = deque()
        self.until_durable: deque[tuple[Channel, int, int, int, int]] = deque()
        self.may_publish = False
        self.asks = 0
        self.until_applied: deque[tuple[Channel, int, int, int]] = deque()
        self.held_confirms: list[tuple[Channel, bytes]] = []
        self._held_bytes = 0
        self.acked: dict[QueueKey, list[int]] = {}
        self.ack_frames: list[bytes] = []
        self.unseen: set[int] = set()
        self.withheld: dict[int, list[bytes]] = {}
        self._withheld_bytes = 0
        self.replies: dict[int, asyncio.Future[tuple[int, bytes]]] = {}
        self.returning: dict[QueueKey, int] = {}
        self.on_settled = b""
        self.over = False
        self.alarm = Alarm(self, told_blocked)
        self.watch = watch = door.watch(self)
        self.take = publishing.take if watch is None else watch.take
        self.deliver = delivering.deliver if watch is None else watch.deliver
        self._ack = settling.ack if watch is None else watch.ack
        self._on_client = FROM_CLIENT if watch is None else watch.from_client
        self.on_broker = FROM_BROKER if watch is None else watch.from_broker
        self._heartbeat_s = heartbeat_s
        self._heard_at = self._broker_heard_at = door.now()
        self._from_client = b""
        self._from_broker = b""
        self._stalled = False  # a declaration is under way: nothing more is taken from the client until it is done
        self._backlog: deque[bytes] = deque()  # what came meanwhile
        self._deafened = False  # whatever comes from the client counts no more
        self._client_paused = False
        self._client_full = False  # nothing is read from the broker meanwhile
        self._full_since = 0.0
        self._held_up = False  # nothing is read from either side until interceptors have caught up
        self._stopping = False  # nothing more is read until what is under way is confirmed
        self._told = False  # the client was told that the connection ends
        self._tasks: set[asyncio.Task[None]] = set()

    def channel(self, number: int) -> Channel:
        """The channel of this number, made when first named."""
        channel = self.channels.get(number)
        if channel is None:
            if len(self.channels) >= self._channels_max:
                raise FrameError("there are more channels than were agreed on: the broker's channel_max, or door.channels_max")
            channel = self.channels[number] = Channel(number)
        return channel

    def ask(self, channel: Channel) -> None:
        """One more question of the client goes to the broker. Raises FrameError if too many have no answer."""
        if channel.questions < FEW_QUESTIONS:  # of every channel, that many are too few to count
            return
        limit = self.door.config.questions_max
        if sum(each.questions for each in self.channels.values()) >= limit:
            raise FrameError(f"{limit} questions of this connection have no answer yet; the limit is door.questions_max")

    @property
    def has_room_for_channel(self) -> bool:
        """Whether the broker takes one more channel than the client has opened."""
        return not self.channels_max or len(self.channels.keys() - {0}) + len(self.seconds) < self.channels_max

    @property
    def unanswered(self) -> bool:
        """Whether the broker owes an answer to publishes or commits of any channel."""
        return any(channel.unanswered for channel in self.channels.values())

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs something that ends with the connection at the latest."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- from the client ---------------------------------------------------------------------------------------------

    def client_data(self, data: bytes) -> None:
        """Bytes came from the client."""
        self._heard_at = self.door.now()
        if self._deafened:
            return
        self._backlog.append(data)
        while self._backlog and not self._stalled and self.client is not None:
            if self.replica.in_barrier:
                self.stall()
                self.spawn(self._await_barrier())
                return
            self._take(self._backlog.popleft())

    def _take(self, data: bytes) -> None:
        if self._from_client:
            data = self._from_client + data
        try:
            items, used = scan(data, 0, self.frame_max_bytes)
            self._keep(data[used:] if used < len(data) else b"")
            self.work(data, items)
        except Exception as error:
            self._cannot_take(error)
            return
        self._consider_pausing()

    def _keep(self, left: bytes) -> None:
        """The beginning of a frame or content that waits for its end, which counts as a message of which a part has arrived. Raises FrameError."""
        more = len(left) - len(self._from_client)
        if more > 0:
            self.door.unfinished.take(more)
        else:
            self.door.unfinished.give(-more)
        self._from_client = left

    def _cannot_take(self, error: Exception) -> None:
        if isinstance(error, NotPrimary):  # it has stepped down in this very moment
            self.close_client(CONNECTION_FORCED, str(error))
        elif isinstance(error, LrqError):
            code, cause = (error.code, error.cause) if isinstance(error, FrameError) else (541, 0)
            self.door.counters["client_errors"] += 1
            self.close_client(code, str(error), cause)
        else:
            log.error("a client's frames could not be handled: %s", place(error))
            self.close_client(541, "the door could not handle this; its log says why")

    def work(self, data: bytes, items: list[Item]) -> None:
        """Does what these frames of the client say, one after the other."""
        at, count = 0, len(items)
        while at < count:
            item = items[at]
            kind, number = item[0], item[1]
            if kind not in (HEADER, BODY, HEARTBEAT) and self.client_parts.is_open(number):
                raise self.client_parts.unexpected(number)
            if kind == BASIC_PUBLISH and item[6]:
                if not self.replica.moving:
                    at = self.take(self, data, items, at)
                    continue
                upto, moving = first_that_waits(self, data, items, at)
                if upto > at:
                    at = self.take(self, data, items[:upto], at)
                if moving is not None and at == upto and self.client is not None and not self.closed:
                    self._wait_for(moving, _rest(data, items, at))
                    return
                if self.client is None or self.closed:
                    return
                continue
            at += 1
            if kind == BASIC_ACK:
                channel = self.channel(number)
                if not channel.closing:
                    self._ack(self, channel, bytes(data[item[2] : item[3]]))
                continue
            settling.flush(self)
            if kind == HEARTBEAT:
                if not self.outbox.full:  # else more than enough is on its way
                    self.outbox.write(HEARTBEAT_FRAME)
                continue
            payload = bytes(data[item[2] : item[3]])
            if kind in (HEADER, BODY, BASIC_PUBLISH):
                self.channel(number)
                held_back = self._take_part(kind, number, payload)
                if held_back is not None:
                    self._wait_for(held_back[0], held_back[1] + _rest(data, items, at))
                    return
                continue
            channel = self.channel(number)
            if channel.closing and kind not in (CHANNEL_CLOSE, CHANNEL_CLOSE_OK):
                continue  # sent before the client knew
            if self.replica.moving and (moving := waits_for(self, channel, kind, payload)) is not None:
                self._wait_for(moving, _rest(data, items, at - 1))
                return
            if channel.gets:
                channel.asked_behind = True
            handler = self._on_client.get(kind)
            if handler is not None:
                handler(self, channel, kind, payload)
            else:
                self.outbox.put(frames.frame(METHOD, number, payload))
            if self._deafened:
                return
            if self._stalled:
                left = _rest(data, items, at) + self._from_client
                self._keep(b"")
                if left:
                    self._backlog.appendleft(left)
                return
        settling.flush(self)

    def _take_part(self, kind: int, number: int, payload: bytes) -> tuple[Moving, bytes] | None:
        """A frame of a content that comes in pieces. Returns what has to wait, and for what."""
        try:
            content = self.client_parts.take(kind, number, payload)
        except frames.BodyTooLarge as error:
            channel = self.channel(number)
            if not channel.closing:
                text = f"PRECONDITION_FAILED - message size {error.size} is larger than configured max size {error.limit}"
                publishing.refuse(self, channel, settling.PRECONDITION_FAILED, text)
            return None
        if content is not None:
            whole = frames.whole(number, content, self.frame_max_bytes)
            if self.replica.moving and (moving := first_that_waits(self, *whole, 0)[1]) is not None:
                return moving, whole[0]
            self.take(self, *whole, 0)
        return None

    def hear_nothing_more(self) -> None:
        """The client has said its last word."""
        self._deafened = True
        self._backlog.clear()
        self._keep(b"")

    def forget_decisions(self) -> None:
        """What is replicated has changed (a queue was declared or deleted)."""
        self.decisions.clear()

    # ---- from the broker ---------------------------------------------------------------------------------------------

    def broker_data(self, data: bytes) -> None:
        """Bytes came from the broker."""
        self._broker_heard_at = self.door.now()
        try:
            self._from_the_broker(data)
        except Exception as error:
            self._cannot_handle(error)

    def _cannot_handle(self, error: Exception) -> None:
        if isinstance(error, NotPrimary):
            self.close_client(CONNECTION_FORCED, str(error))
            self.close()
            return
        log.error("a broker's frames could not be handled: %s", place(error))
        self.close_client(541, "the door could not handle the broker's answer; its log says why")
        self.close()

    def _from_the_broker(self, data: bytes) -> None:
        if self._from_broker:
            data = self._from_broker + data
        items, used = scan(data, 0, max(frames.FRAME_MAX_BYTES, self.header_bytes_max + frames.FRAME_OVERHEAD_BYTES))
        self._from_broker = data[used:] if used < len(data) else b""
        self._sort(data, items)

    def _sort(self, data: bytes, items: list[Item]) -> None:
        """What the client gets of these frames of the broker."""
        withheld = self.withheld
        limit = self.frame_max_bytes
        on_broker, seconds = self.on_broker, self.seconds
        out: list[bytes] = []
        keep_from = -1  # start of the slice that is passed on as it came
        keep_to = 0
        for item in items:
            kind, number, start, end, _, _, stop = item
            begin, after = start - 7, stop or end + 1
            replaced: bytes | None = b""
            if seconds and number in seconds:
                if keep_from >= 0:
                    out.append(data[keep_from:keep_to])
                    keep_from = -1
                replaced = transacting.from_second(self, number, data, item)
            elif withheld and number in withheld:
                self._withhold(number, data[begin:after])
            elif kind == BASIC_DELIVER and stop:
                replaced = self.deliver(self, number, data, item)
            elif kind in (BASIC_ACK, BASIC_NACK):
                if keep_from >= 0:
                    out.append(data[keep_from:keep_to])
                    keep_from = -1
                replaced = publishing.answered(self, number, kind, data, start)
            elif kind in on_broker:
                replaced = on_broker[kind](self, number, data, item)
            elif kind in (HEADER, BODY, BASIC_DELIVER, BASIC_GET_OK, BASIC_RETURN) and not stop:
                replaced = delivering.part(self, number, kind, data[start:end])
            else:
                replaced = None
            if stop and after - begin > limit:
                replaced = delivering.refit(data[begin:after] if replaced is None else replaced, limit)
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
        settling.flush(self)
        if out:
            self.to_client(out[0] if len(out) == 1 else b"".join(out))
        if self.over:
            self._end()

    def _end(self) -> None:
        """The broker has closed the connection and the client is told. Until it answers, nothing that it says may be waited for by anybody."""
        if self.client is not None:
            farewell.hand_over(self.client, self._from_client)
            self.client_lost()
        self.close()

    # ---- to the client -----------------------------------------------------------------------------------------------

    def to_client(self, data: bytes) -> None:
        """These bytes go to the client, if it is still there."""
        if self.client is not None and not self._told and not self.client.is_closing():
            self.client.write(data)

    def confirm(self, channel: Channel, data: bytes, *, held: bool = True) -> None:
        """Answers to publishes or to a commit for the client: now, or when this primary has its expected backups (but for `held`)."""
        if held and self.replica.holds_confirms:
            self.held_confirms.append((channel, data))
            self._held_bytes += len(data)
        elif channel.speaks and self.channels.get(channel.number) is channel:
            if channel.selecting:
                channel.before_select.append(data)
            else:
                self.to_client(data)

    def give_confirms(self) -> None:
        """This primary no longer waits for its expected backups."""
        held, self.held_confirms, self._held_bytes = self.held_confirms, [], 0
        for channel, data in held:
            self.confirm(channel, data)
        self._consider_pausing()

    def close_client(self, code: int, text: str, cause: int = 0) -> None:
        """Ends the connection with an error to the client; what it published before is brought to its end."""
        if self.client is not None:
            if self._told:
                farewell.hand_over(self.client)
            else:
                farewell.say(self.client, code, text, self._from_client, cause)
            self.client_lost()

    def cut_off(self) -> None:
        """Ends the connection without a word: the client would not read it."""
        if self.client is not None:
            self.client.abort()

    def release_acks(self) -> None:
        """The broker takes nothing for the log: acks do not wait for it."""
        self.outbox.release_acks()
        self.outbox.pump()

    @property
    def replying_to_door(self) -> bool:
        """Whether a close-ok of the client answers the door, and not its broker."""
        return self._told

    @property
    def _publishing(self) -> bool:
        """Whether something that the client published is under way."""
        return self.unanswered or bool(self.until_safe)

    # ---- what the log says -------------------------------------------------------------------------------------------

    def safe_advanced(self) -> None:
        """The log is safe further than before."""
        if self.closed:
            return
        publishing.safe_advanced(self)
        if self.withheld:
            self._release()
        self._pump()

    def durable_advanced(self) -> None:
        """The own stream has more of the log."""
        if not self.closed:
            publishing.durable_advanced(self)

    def applied_advanced(self) -> None:
        """More of the log is in the queues and confirmed."""
        if not self.closed:
            publishing.applied_advanced(self)

    def _withhold(self, channel: int, data: bytes) -> None:
        self.withheld[channel].append(data)
        self._withheld_bytes += len(data)
        if self._withheld_bytes > self.door.config.connection_buffer_bytes_max and not self.broker.is_closing():
            self.broker.pause_reading()

    def _release(self) -> None:
        """Looks again at what was withheld; what is not decided yet is withheld again."""
        withheld, self.withheld = self.withheld, {}
        self._withheld_bytes = 0
        if not self._client_full and not self._held_up and not self.broker.is_closing():
            self._broker_heard_at = self.door.now()
            self.broker.resume_reading()
        try:
            for parts in withheld.values():
                data = b"".join(parts)
                self._sort(data, scan(data, 0, frames.FRAME_MAX_ANY_BYTES, 0)[0])
        except Exception as error:
            self._cannot_handle(error)

    def _pump(self) -> None:
        self.outbox.pump()
        self._consider_pausing()
        if self.client is None:
            self._consider_leaving()

    @property
    def reads_late(self) -> bool:
        """Whether the broker may have sent deliveries that have not been looked at."""
        return self._client_full or self._held_up or bool(self.withheld) or self.client is None

    def give_back(self, deliveries: Collection[Delivery]) -> None:
        """These go back to their queues, when the broker hears of what stands in the outbox."""
        self.gives_back({delivery.queue for delivery in deliveries})
        self.replica.gave_back(deliveries)

    def gives_back(self, queues: Iterable[QueueKey]) -> None:
        """Likewise, of what no client has seen."""
        self.returning.update(dict.fromkeys(queues, self.outbox.total))

    def still_returning(self) -> Iterable[QueueKey]:
        """Queues to which something goes back, and the broker has not heard of it."""
        if not self.alarm.broker:
            self.returning = {queue: upto for queue, upto in self.returning.items() if upto > self.outbox.gone}
        return self.returning

    @property
    def busy(self) -> bool:
        """Whether the client waits for an answer to something that was taken from it."""
        return bool(self.outbox or self.until_safe or self.until_durable or self.until_applied or self.replies or self.unanswered)

    # ---- flow --------------------------------------------------------------------------------------------------------

    def stall(self) -> None:
        """Takes nothing more from the client for now."""
        self._stalled = True
        self._pause_client()

    def unstall(self, first: Callable[[], None] | None = None) -> None:
        """Goes on with what came meanwhile; `first` comes before that, in the same turn of the event loop."""
        self._stalled = False
        if first is not None and not self.closed:
            try:
                first()
            except Exception as error:
                self._cannot_take(error)
        if self.closed or self.client is None:
            return
        self._resume_client()
        self.client_data(b"")

    def _wait_for(self, moving: Moving, data: bytes) -> None:
        """Takes nothing more from the client, from these bytes on, until a queue has been moved."""
        settling.flush(self)
        self._backlog.appendleft(data + self._from_client)
        self._keep(b"")
        self.stall()
        self.spawn(self._await_moved(moving))

    async def _await_moved(self, moving: Moving) -> None:
        await moving.over.wait()
        self.unstall()

    async def _await_barrier(self) -> None:
        """Another connection's declaration is under way."""
        await self.replica.barrier_over()
        self.unstall()

    def _consider_pausing(self) -> None:
        limit = self.door.config.connection_buffer_bytes_max
        too_much = self.replica.unsafe_bytes / self.door.config.buffered_bytes_max
        if (too_much > 1.0 and (self._publishing or too_much > ACKS_SHARE)) or self.outbox.bytes > limit:
            self._pause_client()
            self.replica.waiting_safe.add(self)
        elif self._held_bytes > self.door.config.client_buffer_bytes_max or self._deaf:
            self._pause_client()
        elif self._client_paused and self.outbox.bytes < limit * RESUME_SHARE:
            self._resume_client()

    @property
    def _deaf(self) -> bool:
        """The client does not read what the door itself answers: so nothing more is taken from it that could be answered."""
        if not self._client_full or self.client is None:
            return False
        return self.client.get_write_buffer_size() > DEAF_SHARE * self.door.config.client_buffer_bytes_max

    def _pause_client(self) -> None:
        if self.client is not None and not self._client_paused:
            self._client_paused = True
            self.client.pause_reading()

    def _resume_client(self) -> None:
        if self.client is not None and self._client_paused and not self._stalled and not self._stopping and not self._held_up:
            self._client_paused = False
            self._heard_at = self.door.now()
            self.client.resume_reading()

    def client_full(self, full: bool) -> None:
        """The client does not read as fast as the broker sends: stop reading from the broker."""
        self._client_full = full
        self._full_since = self.door.now()
        if self.closed or self.client is None or self.broker.is_closing():
            return
        self.door.client_full(self, self.client.get_write_buffer_size() if full else 0)
        if full:
            self.broker.pause_reading()
        elif not self._held_up:
            self._broker_heard_at = self.door.now()
            self.broker.resume_reading()
        self._consider_pausing()

    def hold_up(self, held: bool) -> None:
        """An interceptor that must be told everything is behind (or no longer): nothing more is read from either side."""
        if held == self._held_up or self.closed:
            return
        self._held_up = held
        if held:
            self._pause_client()
            if not self.broker.is_closing():
                self.broker.pause_reading()
            return
        self._broker_heard_at = self.door.now()
        if not self._client_full and not self.broker.is_closing():
            self.broker.resume_reading()
        self._consider_pausing()

    @property
    def stalled(self) -> bool:
        """Whether a declaration is under way."""
        return self._stalled

    def broker_full(self, full: bool) -> None:
        """The broker does not read as fast as the log gets safe."""
        self.outbox.full = full
        if not full:
            self._pump()

    def tick(self, now: float) -> None:
        """Once a second: a broker that waits for entries to be safe must not take the client for dead; who is silent for too long is given up.

        So is a client whose broker's confirms are not read any more as it reads nothing itself, when another's declaration waits for them.
        """
        if self.closed:
            return
        if self._client_full and now - self._full_since >= self.door.config.hold_up_timeout_s and self.replica.in_barrier and self.unanswered:
            log.warning("a client of %s that does not read holds up a declaration, and is closed: door.hold_up_timeout_s", self.user)
            self.door.counters["closed_slow"] += 1
            self.cut_off()
            return
        if not self._heartbeat_s:
            return
        if self.client is not None and not self._client_paused and now - self._heard_at > 2 * self._heartbeat_s + 1:
            log.info("a client of %s sent nothing for %d s", self.user, 2 * self._heartbeat_s)
            self.client.abort()
            return
        listens = not (self._client_full or self._held_up or self.withheld)
        if listens and now - self._broker_heard_at > 2 * self._heartbeat_s + 1:
            log.warning("the broker sent nothing for %d s on a connection of %s", 2 * self._heartbeat_s, self.user)
            self.close_client(CONNECTION_FORCED, "the broker beside this sidecar is silent")
            self.broker.abort()
            self.close()
            return
        if self._held_up:
            self.to_client(HEARTBEAT_FRAME)  # the broker's are not read meanwhile
        if now - self.outbox.sent_at >= self._heartbeat_s / 2:
            self.outbox.write(HEARTBEAT_FRAME)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Ends the connection in order: nothing more is read until what is under way is confirmed, then the client is told."""
        self._stopping = True
        self._pause_client()
        self.spawn(self._stop(reason))

    async def _stop(self, reason: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.door.config.stop_timeout_s / 2
        while (self.busy or self._stalled) and loop.time() < deadline:
            await asyncio.sleep(LEAVE_POLL_S)
        if any(channel.confirms.selected for channel in self.channels.values()):
            await asyncio.sleep(SEEN_S)
        if self.client is None:
            return
        self.to_client(frames.connection_close(CONNECTION_FORCED, reason))
        self._told = True
        for channel in self.channels.values():
            if channel.confirms.selected and channel.state is Closing.NO:
                channel.state = Closing.TOLD  # what comes on it now would never be confirmed: its publisher sends it again
        self._stopping = False
        self._resume_client()
        await asyncio.sleep(farewell.ANSWER_S)
        self.goodbye()  # it does not answer

    def goodbye(self) -> None:
        """The client's connection.close-ok, or the end of the time for it: everything that it sent before has been taken."""
        if self._told and self.client is not None:
            farewell.end(self.client)
            self.client_lost()

    def client_lost(self) -> None:
        """The client is gone. What it published is sent and confirmed before the broker's side is closed."""
        if self.client is None:
            return
        self.client = None
        if self.watch is not None:
            self.watch.client_gone()
        self._backlog.clear()
        self._keep(b"")
        self.client_parts.clear()
        self.door.client_full(self, 0)
        if not self.closed and not self.broker.is_closing():
            self.broker.resume_reading()  # its answers are still needed
        self._consider_leaving()
        if not self.closed:
            asyncio.get_running_loop().call_later(self.door.config.drain_timeout_s, self.close)

    def _consider_leaving(self) -> None:
        if self.outbox or self._stalled or self.unanswered:
            asyncio.get_running_loop().call_later(LEAVE_POLL_S, self._look_again)
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
            self.give_back(channel.held)
            closing.abandon(self, channel)
        if self.watch is not None:
            self.watch.client_gone()
        closing.no_reply(self)
        for task in self._tasks:
            task.cancel()
        self.replica.waiting_safe.discard(self)
        self.replica.waiting_applied.discard(self)
        self.replica.waiting_durable.discard(self)
        self._keep(b"")
        self.client_parts.clear()
        if self.client is not None:
            farewell.end(self.client)
            self.client = None
        if not self.broker.is_closing():
            self.broker.write(frames.connection_close(200, "the client is gone"))
            farewell.end(self.broker)
        self.door.gone(self)


def _rest(data: bytes, items: list[Item], at: int) -> bytes:
    """The frames from items[at] on, as they came; nothing behind the last one."""
    return data[items[at][2] - 7 : end_of(items[-1])] if at < len(items) else b""
