"""The state of one client's connection, and the primitives that the handlers of methods use. Decides nothing.

`door.client_connection` completes it: it reads both sockets and ends the connection.

Rules:
- The client's frames go to the broker in the order of their arrival, through the `outbox`.
- Frames for the client go through `to_client` and `pass_on`, so that none follows its connection.close.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lrq_ha.replication.queues import QueueKey

from ..amqp import frames
from ..amqp.frames import FrameError, Item
from ..log.messages import Delivery
from ..log.producers import producer_key
from ..log.replica import Replica
from ..log.stamps import POSITION_BYTES_MAX, StampCache
from .channel import ChannelState, ClientChannel
from .decisions import Decision, Peer
from .door_state import DoorState
from .interfaces import AlarmState, BrokerInput, BrokerOutput, ClientInput, Observer, ReadControl, Repeats
from .rights import Rights

CLOSING_SHARE = 2  # a channel closed by the broker is kept until both sides know, so there may be more channels than were agreed on
FEW_QUESTIONS = 16


@dataclass(frozen=True, slots=True)
class Agreed:
    """The agreement of client, door and broker in the login.

    Attributes:
        user, vhost: The user's name and the vhost.
        producer: The name that the client announced; empty if none.
        ascending: It numbers in ascending order, and never uses a number that it has skipped.
        instance: An ID common to all connections of one publisher; empty if the client announced none.
        peer: The other end, if it is a sidecar.
        may_write: The broker lets the user publish to queues by their names (asked in vhost lrq only, of producers).
        frame_max_bytes: The limit on the client's side.
        broker_frame_max_bytes: The limit on the broker's side: a little more, for the positions in content headers.
        channels_max: Channels that were agreed on; 0 for no limit. It also bounds the state that is kept of channels that were never open.
        broker_channels_max: The broker's limit: one more, for the door's own questions.
        heartbeat_s: Seconds between heartbeats; 0 for none.
        told_blocked: Whether the client understands connection.blocked.
    """

    user: str
    vhost: str
    producer: str
    ascending: bool
    instance: str
    peer: Peer | None
    may_write: bool
    frame_max_bytes: int
    broker_frame_max_bytes: int
    heartbeat_s: int
    channels_max: int
    broker_channels_max: int
    told_blocked: bool


class ClientSession(ABC):
    """A connection that is open on both sides, on a primary: all that the handlers of methods see of the connection.

    Args:
        door: The door it came through.
        replica: This node's log and its parts.
        client, broker: The two transports.
        agreed: The agreement of the login.

    Attributes:
        client: The client's transport; None when the client is gone.
        from_client, from_broker: The readers of either side.
        flow: Stops and resumes reading.
        decisions: The destination of publishes, by their method frame's payload.
        stamps: Cached stamps of the publishes' content headers.
        pending_safe: Publishes that end here, or whose IDs get free: (channel, client's tag, sequence that must be safe, whether it is an ack).
        pending_durable: Publishes with local completion: (channel, client's first and last tag, sequence that the own stream must have, bytes).
        feeds_views: Whether the client has brought transactions into the routing queues.
        rights: The rights that the broker has confirmed.
        permission_needed: Whether the broker has to be asked about the next publish before the door handles it.
        secret_updated: Set when the broker has the client's new secret; None if there was none.
        repeats: Publishes with IDs that are in the log already.
        held_confirms: Confirms that wait until this primary has its expected backups: (channel, frames).
        held_bytes: Bytes of these confirms, and of those that channels keep behind a confirm.select (`before_select`).
        acked, ack_frames: Acks that `acknowledge.flush` will bring into the log, and to the broker.
        internal_acks: Channels with transactions on which the door has acks of its own to give.
        internal_channels: Channels at the broker that the client does not see, by number: the handler of each one's frames.
        replies: Declarations that wait for the broker's answer, by channel: whether it has accepted them.
        returning: Queues whose given-back deliveries the broker may not have heard of, and the outbox item that must have been sent before.
        on_settled: The client's connection.close, until the broker has answered all publishes.
        timer: The timer that ends the connection in any case.
        takes_deliveries: Whether a delivery to the client counts as given. It does not once either side has sent its close.
        closed_by_broker: The broker has closed the connection.
        fenced: Another connection has taken over the producer's name.
        watch: The observer for interceptors; None if there are none.
        take, deliver, acks, on_client, on_broker: The functions and tables of the hot path; with interceptors, the intercepted ones.
    """

    outbox: BrokerOutput
    flow: ReadControl
    from_client: ClientInput
    from_broker: BrokerInput
    alarm: AlarmState
    repeats: Repeats
    watch: Observer | None
    take: Callable[[ClientSession, bytes, list[Item], int], int]
    deliver: Callable[[ClientSession, int, bytes, Item], bytes | None]
    acks: Callable[[ClientSession, bytes, list[Item], int], int]
    on_client: Mapping[int, Callable[[ClientSession, ClientChannel, int, bytes], None]]
    on_broker: Mapping[int, Callable[[ClientSession, int, bytes, Item], bytes | None]]

    def __init__(
        self,
        door: DoorState[ClientSession],
        replica: Replica,
        client: asyncio.Transport,
        broker: asyncio.Transport,
        agreed: Agreed,
    ) -> None:
        self.door = door
        self.replica = replica
        self.client: asyncio.Transport | None = client
        self.broker = broker
        self.user, self.vhost, self.producer, self.instance = agreed.user, agreed.vhost, agreed.producer, agreed.instance
        self.producer_key = producer_key(self.vhost, self.user, self.producer) if self.producer else ""
        self.id_prefix = f"{self.producer}/".encode()
        self.ascending = agreed.ascending
        self.peer, self.may_write = agreed.peer, agreed.may_write
        self.feeds_views = False
        self.frame_max_bytes, self.broker_frame_max_bytes = agreed.frame_max_bytes, agreed.broker_frame_max_bytes
        headers_bytes_max = door.config.header_bytes_max + POSITION_BYTES_MAX
        self.header_bytes_max = min(self.broker_frame_max_bytes - frames.FRAME_OVERHEAD_BYTES, headers_bytes_max)
        self.channels_max, self._broker_channels_max = agreed.channels_max, agreed.broker_channels_max
        self.channels: dict[int, ClientChannel] = {}
        self._channels_max = CLOSING_SHARE * ((self.channels_max or frames.CHANNELS_MAX) + 1)
        self.internal_channels: dict[int, Callable[[ClientSession, int, bytes, Item], bytes]] = {}
        self.closed = False
        self.decisions: dict[bytes, Decision] = {}
        self.stamps = StampCache()
        self.pending_safe: deque[tuple[ClientChannel, int, int, bool]] = deque()
        self.pending_durable: deque[tuple[ClientChannel, int, int, int, int]] = deque()
        self.rights = Rights()
        self.permission_needed = False
        self.secret_updated: asyncio.Event | None = None
        self.held_confirms: list[tuple[ClientChannel, bytes]] = []
        self.held_bytes = 0
        self.acked: dict[QueueKey, list[int]] = {}
        self.ack_frames: list[bytes] = []
        self.internal_acks: set[int] = set()
        self.replies: dict[int, asyncio.Future[bool]] = {}
        self.returning: dict[QueueKey, int] = {}
        self.on_settled = b""
        self.timer: asyncio.TimerHandle | None = None
        self.takes_deliveries = True
        self.closed_by_broker = False
        self.fenced = False
        self._unlooked = 0  # questions until the open questions are counted again
        self.close_sent = False  # connection.close has gone to the client
        self._tasks: set[asyncio.Task[None]] = set()

    def channel(self, number: int) -> ClientChannel:
        """Returns the channel of this number, and creates it at its first use."""
        channel = self.channels.get(number)
        if channel is None:
            if len(self.channels) >= self._channels_max:
                raise FrameError("there are more channels than were agreed on: the broker's channel_max, or door.channels_max")
            channel = self.channels[number] = ClientChannel(number)
        return channel

    def ask(self, channel: ClientChannel) -> None:
        """Counts one more question of the client to the broker. Raises FrameError if too many have no answer."""
        if channel.questions < FEW_QUESTIONS:  # so few on every channel need no count
            return
        self._unlooked -= 1
        if self._unlooked > 0:
            return
        limit = self.door.config.questions_max
        missing = limit - sum(each.questions for each in self.channels.values())
        if missing <= 0:
            raise FrameError(f"{limit} questions of this connection have no answer yet; the limit is door.questions_max")
        self._unlooked = max(missing, FEW_QUESTIONS)  # there may be thousands of channels, so not every question counts them all

    @property
    def has_room_for_channel(self) -> bool:
        """Whether one more channel may be open at the broker, beside the door's own for questions."""
        return self._has_room(self.channels_max)

    def _has_room(self, limit: int) -> bool:
        """Whether the broker counts fewer channels as open than `limit`; 0 for no limit."""
        if not limit or len(self.channels) < limit:
            return True
        return sum(channel.opened and channel.state is not ChannelState.TOLD for channel in self.channels.values()) < limit

    def number_apart(self) -> int:
        """A free number at the broker for a channel that the client does not see; 0 if the broker takes no more."""
        if not self._has_room(self._broker_channels_max):
            return 0
        return next((n for n in range(frames.CHANNELS_MAX, 0, -1) if n not in self.internal_channels and n not in self.channels), 0)

    @property
    def unanswered(self) -> bool:
        """Whether the broker owes an answer to publishes or commits of any channel."""
        return any(channel.unanswered for channel in self.channels.values())

    @property
    def oldest_unanswered(self) -> int:
        """The first entry of the log whose answer the broker owes; 0 if there is none."""
        return min(filter(None, (channel.oldest_unanswered for channel in self.channels.values())), default=0)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine that ends with the connection at the latest."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception) and not self.closed:
            self.from_client.cannot_take(error)

    def forget_decisions(self) -> None:
        """The set of replicated queues has changed (a queue was declared or deleted)."""
        self.decisions.clear()

    # ---- permissions -------------------------------------------------------------------------------------------------

    def forget_permissions(self) -> None:
        """Rights that the broker has confirmed before count no more."""
        self.rights.clear()
        self.decisions.clear()
        self.stamps = StampCache()

    def exchange_changed(self, vhost: str, exchange: str) -> None:
        """An exchange was declared or deleted."""
        if self.vhost != vhost:
            return
        self.decisions.clear()  # a transaction's exchange counts too, and one whose right is already forgotten
        if self.rights.names(exchange):
            self.forget_permissions()

    # ---- to the client -----------------------------------------------------------------------------------------------

    def to_client(self, data: bytes) -> None:
        """Sends frames of the door, all of one channel, to the client, if the client is still there."""
        if not self.from_broker.passing.waits(data):
            self.pass_on(data)

    def pass_on(self, data: bytes) -> None:
        """Sends frames to the client that came from the broker, or belong to such frames."""
        if self.client is not None and not self.close_sent and not self.client.is_closing():
            self.client.write(data)

    def confirm(self, channel: ClientChannel, data: bytes, *, held: bool = True) -> None:
        """Sends answers to publishes or to a commit: now, or when this primary has its expected backups (`held` False: now in any case)."""
        if held and self.replica.holds_confirms:
            self.held_confirms.append((channel, data))
            self.held_bytes += len(data)
        elif channel.speaks and self.channels.get(channel.number) is channel:
            if channel.selecting:
                channel.before_select.append(data)
                self.held_bytes += len(data)
            else:
                self.to_client(data)

    def give_confirms(self) -> None:
        """This primary no longer waits for its expected backups."""
        held, self.held_confirms = self.held_confirms, []
        for channel, data in held:
            self.held_bytes -= len(data)
            self.confirm(channel, data)
        self.flow.consider_pausing()

    def take_before_select(self, channel: ClientChannel) -> bytes:
        """Takes out the confirms behind a confirm.select that the broker has answered, or will not answer any more."""
        held, channel.before_select = b"".join(channel.before_select), []
        if held:
            self.held_bytes -= len(held)
            self.flow.consider_pausing()
        return held

    def cut_off(self) -> None:
        """Ends the connection without a close: the client would not read one."""
        if self.client is not None:
            self.client.abort()

    def release_acks(self) -> None:
        """The broker takes nothing for the log: acks do not wait for the log."""
        self.outbox.release_acks()
        self.outbox.pump()

    @property
    def replying_to_door(self) -> bool:
        """Whether a close-ok of the client answers the door, and not its broker."""
        return self.close_sent

    # ---- pending answers and returns ---------------------------------------------------------------------------------

    def give_back(self, deliveries: Collection[Delivery]) -> None:
        """Gives deliveries back to their queues; complete when the broker has got the items in the outbox."""
        self.gives_back({delivery.queue for delivery in deliveries})
        self.replica.gave_back(deliveries)

    def gives_back(self, queues: Iterable[QueueKey]) -> None:
        """Like `give_back`, for deliveries that no client has seen."""
        self.returning.update(dict.fromkeys(queues, self.outbox.total))

    def still_returning(self) -> Iterable[QueueKey]:
        """Queues to which deliveries go back, while the broker has not heard of it."""
        if not self.alarm.broker:
            self.returning = {queue: upto for queue, upto in self.returning.items() if upto > self.outbox.gone}
        return self.returning

    def gone(self, channel: ClientChannel | None) -> bool:
        """Whether the client's requests are dropped now. A commit is still carried out as a whole, as RabbitMQ would."""
        return self.closed or (self.client is None and (channel is None or channel.committing is None))

    @property
    def busy(self) -> bool:
        """Whether the client waits for an answer to a request that the door has taken."""
        return bool(self.outbox or self.pending_safe or self.pending_durable or self.repeats.waiting or self.replies or self.unanswered)

    # ---- implemented by the connection -------------------------------------------------------------------------------

    @abstractmethod
    def safe_advanced(self) -> None:
        """More of the log is safe than before."""

    @abstractmethod
    def durable_advanced(self) -> None:
        """The own stream has more of the log."""

    @abstractmethod
    def close_client(self, code: int, text: str, cause: int = 0) -> None:
        """Ends the connection with an error to the client; its earlier publishes are completed."""

    @abstractmethod
    def client_lost(self) -> None:
        """The client is gone. Its publishes are sent and confirmed before the broker's side is closed."""

    @abstractmethod
    def fence(self, reason: str) -> None:
        """Ends the connection of a producer whose name another one has: nothing more of it is appended, and no waiting commit is carried out."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Ends the connection in order: reads nothing more until pending publishes are confirmed, then sends the close to the client."""

    @abstractmethod
    def goodbye(self) -> None:
        """Handles the client's connection.close-ok, or the end of the time for it: all frames before it have been taken."""

    @abstractmethod
    def close(self) -> None:
        """Closes both sides at once."""
