"""The state of one client's connection, and the primitives that the handlers of methods use. Decides nothing.

`door.client_connection` makes it whole: it reads both sockets and ends the connection. Rules:
- What the client sends goes to the broker in the order it came, through the `outbox`.
- What goes to the client goes through `to_client` and `pass_on`, so that nothing follows its connection.close.
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

CLOSING_SHARE = 2  # channels that the broker has closed are kept until both sides know, so there may be more than were agreed on
FEW_QUESTIONS = 16


@dataclass(frozen=True, slots=True)
class Agreed:
    """What client, door and broker agreed on in the login.

    Attributes:
        user, vhost: Who logged in, and where.
        producer: The name that the client announced; empty if none.
        instance: What it has in common with the other connections of the same publisher; empty if it does not say.
        peer: Who the other end is, if it is a sidecar.
        may_write: The broker lets the user publish to queues by their names (asked in vhost lrq only, of producers).
        frame_max_bytes: What holds on the client's side.
        broker_frame_max_bytes: What holds on the broker's side: a little more, for the positions in content headers.
        channels_max: Channels that were agreed on; 0 for no limit. It also bounds what is kept of those that never were open.
        broker_channels_max: What the broker agreed to: one more, for the door's own questions.
        heartbeat_s: Seconds between heartbeats; 0 for none.
        told_blocked: Whether the client understands connection.blocked.
    """

    user: str
    vhost: str
    producer: str
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
    """A connection that is open on both sides, on a node that is primary: all that the handlers of methods see of it.

    Args:
        door: The door it came through.
        replica: This node's log and what belongs to it.
        client, broker: The two transports.
        agreed: What the login agreed on.

    Attributes:
        client: None when it is gone.
        from_client, from_broker: What comes from either side.
        flow: When either is read.
        decisions: Where publishes go, by their method frame's payload.
        stamps: How their content headers are stamped.
        pending_safe: Publishes that ended here, or whose IDs get free: (channel, client's tag, sequence that must be safe, whether it is an ack).
        pending_durable: Publishes with local completion: (channel, client's first and last tag, sequence that the own stream must have, bytes).
        rights: What the broker has allowed.
        permission_needed: Of the next publish the broker has to be asked before anything is done with it.
        secret_updated: Set when the broker has the client's new secret; None if there was none.
        repeats: Publishes with IDs that are in the log already.
        held_confirms: Confirms that wait until this primary has its expected backups: (channel, frames).
        held_bytes: What those have, and what channels keep behind a confirm.select (`before_select`).
        acked, ack_frames: Acks that `acknowledge.flush` will bring into the log, and to the broker.
        internal_acks: Channels with transactions on which the door has acks of its own to give.
        tx_channels: Channels that have a second one at the broker, by its number there (see `transactions`).
        internal_channels: Channels at the broker that the client does not see, by their numbers: who takes what comes from there.
        replies: Declarations that wait for the broker's answer, by channel: whether it has accepted them.
        returning: Queues to which something was given back of which the broker may not have heard, and what the outbox must have sent before.
        on_settled: The client's connection.close, until the broker has answered all publishes.
        timer: When it ends in any case.
        takes_deliveries: What is given to the client counts as given. It does not once either of them has said its last word.
        closed_by_broker: The broker has closed the connection.
        fenced: Another connection goes on under the producer's name.
        watch: What tells interceptors; None if there are none.
        take, deliver, acks, on_client, on_broker: The functions and tables of the hot path; with interceptors, theirs.
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
        self.agreed = agreed
        self.user, self.vhost, self.producer, self.instance = agreed.user, agreed.vhost, agreed.producer, agreed.instance
        self.producer_key = producer_key(self.vhost, self.user, self.producer) if self.producer else ""
        self.id_prefix = f"{self.producer}/".encode()
        self.peer, self.may_write = agreed.peer, agreed.may_write
        self.frame_max_bytes, self.broker_frame_max_bytes = agreed.frame_max_bytes, agreed.broker_frame_max_bytes
        headers_bytes_max = door.config.header_bytes_max + POSITION_BYTES_MAX
        self.header_bytes_max = min(self.broker_frame_max_bytes - frames.FRAME_OVERHEAD_BYTES, headers_bytes_max)
        self.channels_max, self._broker_channels_max = agreed.channels_max, agreed.broker_channels_max
        self.channels: dict[int, ClientChannel] = {}
        self._channels_max = CLOSING_SHARE * ((self.channels_max or frames.CHANNELS_MAX) + 1)
        self.tx_channels: dict[int, ClientChannel] = {}
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
        self._unlooked = 0  # so many questions more, and they are counted anew
        self.close_sent = False  # the client was told that the connection ends
        self._tasks: set[asyncio.Task[None]] = set()

    def channel(self, number: int) -> ClientChannel:
        """The channel of this number, made when first named."""
        channel = self.channels.get(number)
        if channel is None:
            if len(self.channels) >= self._channels_max:
                raise FrameError("there are more channels than were agreed on: the broker's channel_max, or door.channels_max")
            channel = self.channels[number] = ClientChannel(number)
        return channel

    def ask(self, channel: ClientChannel) -> None:
        """One more question of the client goes to the broker. Raises FrameError if too many have no answer."""
        if channel.questions < FEW_QUESTIONS:  # of every channel, that many are too few to count
            return
        self._unlooked -= 1
        if self._unlooked > 0:
            return
        limit = self.door.config.questions_max
        missing = limit - sum(each.questions for each in self.channels.values())
        if missing <= 0:
            raise FrameError(f"{limit} questions of this connection have no answer yet; the limit is door.questions_max")
        self._unlooked = max(missing, FEW_QUESTIONS)  # there may be thousands of channels: not with each question

    @property
    def has_room_for_channel(self) -> bool:
        """Whether one more channel may be open at the broker, beside the door's own for questions."""
        return self._has_room(self.channels_max)

    def _has_room(self, limit: int) -> bool:
        """Whether the broker counts fewer channels as open than this; 0 for no limit."""
        if not limit or len(self.channels) + len(self.tx_channels) < limit:
            return True
        return len(self.tx_channels) + sum(channel.opened and channel.state is not ChannelState.TOLD for channel in self.channels.values()) < limit

    def number_apart(self) -> int:
        """A number at the broker for a channel that the client does not see; 0 if the broker takes no more."""
        if not self._has_room(self._broker_channels_max):
            return 0
        return next((n for n in range(frames.CHANNELS_MAX, 0, -1) if n not in self.internal_channels and n not in self.channels), 0)

    @property
    def unanswered(self) -> bool:
        """Whether the broker owes an answer to publishes or commits of any channel."""
        return any(channel.unanswered for channel in self.channels.values())

    @property
    def oldest_unanswered(self) -> int:
        """The first entry of the log of those; 0 if there is none."""
        return min(filter(None, (channel.oldest_unanswered for channel in self.channels.values())), default=0)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs something that ends with the connection at the latest."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception) and not self.closed:
            self.from_client.cannot_take(error)

    def forget_decisions(self) -> None:
        """What is replicated has changed (a queue was declared or deleted)."""
        self.decisions.clear()

    # ---- permissions -------------------------------------------------------------------------------------------------

    def forget_permissions(self) -> None:
        """Nothing that the broker has allowed before counts any more."""
        self.rights.clear()
        self.decisions.clear()
        self.stamps = StampCache()

    def exchange_changed(self, vhost: str, exchange: str) -> None:
        """An exchange was declared or deleted."""
        if self.vhost != vhost:
            return
        self.decisions.clear()  # a transaction's, or one that has outlived its right, names the exchange, too
        if self.rights.names(exchange):
            self.forget_permissions()

    # ---- to the client -----------------------------------------------------------------------------------------------

    def to_client(self, data: bytes) -> None:
        """These frames of the door, all of one channel, go to the client, if it is still there."""
        if not self.from_broker.passing.waits(data):
            self.pass_on(data)

    def pass_on(self, data: bytes) -> None:
        """Likewise of what came from the broker, or goes with it."""
        if self.client is not None and not self.close_sent and not self.client.is_closing():
            self.client.write(data)

    def confirm(self, channel: ClientChannel, data: bytes, *, held: bool = True) -> None:
        """Answers to publishes or to a commit for the client: now, or when this primary has its expected backups (but for `unacked`)."""
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
        """What a channel keeps behind a confirm.select that the broker has answered, or will not answer any more."""
        held, channel.before_select = b"".join(channel.before_select), []
        if held:
            self.held_bytes -= len(held)
            self.flow.consider_pausing()
        return held

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
        return self.close_sent

    # ---- what is under way -------------------------------------------------------------------------------------------

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

    def gone(self, channel: ClientChannel | None) -> bool:
        """Whether what the client sent is not to be carried out any more. A commit is, as a whole, as the broker itself would."""
        return self.closed or (self.client is None and (channel is None or channel.committing is None))

    @property
    def busy(self) -> bool:
        """Whether the client waits for an answer to something that was taken from it."""
        return bool(self.outbox or self.pending_safe or self.pending_durable or self.repeats.waiting or self.replies or self.unanswered)

    # ---- what the connection adds ------------------------------------------------------------------------------------

    @abstractmethod
    def safe_advanced(self) -> None:
        """The log is safe further than before."""

    @abstractmethod
    def durable_advanced(self) -> None:
        """The own stream has more of the log."""

    @abstractmethod
    def close_client(self, code: int, text: str, cause: int = 0) -> None:
        """Ends the connection with an error to the client; what it published before is brought to its end."""

    @abstractmethod
    def client_lost(self) -> None:
        """The client is gone. What it published is sent and confirmed before the broker's side is closed."""

    @abstractmethod
    def fence(self, reason: str) -> None:
        """Ends the connection of a producer whose name another one has: nothing more of it is appended, and no commit that waits is carried out."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Ends the connection in order: nothing more is read until what is under way is confirmed, then the client is told."""

    @abstractmethod
    def goodbye(self) -> None:
        """The client's connection.close-ok, or the end of the time for it: everything that it sent before has been taken."""

    @abstractmethod
    def close(self) -> None:
        """Closes both sides at once."""
