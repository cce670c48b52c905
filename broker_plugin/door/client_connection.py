"""One client's connection: a session with its two sockets (client and broker), and how it ends.

`client_reader` and `broker_reader` take the bytes of either side; `flow_control` stops reading. The tables of `method_table` name the handler of each
method; the handlers are in `publish`, `deliver`, `acknowledge`, `transactions`, `declare` and `lifecycle`.

Rules:
- When a client vanishes, its broker side stays until all its publishes are sent and confirmed.
- A connection that ends in order is not told before pending publishes are confirmed.
"""

from __future__ import annotations

import asyncio
import logging

from ..amqp import encode
from ..amqp.reply_codes import CONNECTION_FORCED
from ..log.replica import Replica
from ..methods import acknowledge, closing, deliver, publish, publisher_confirms
from ..methods.duplicates import DuplicatePublishes
from ..session.alarms import Alarm
from ..session.channel import ChannelState
from ..session.door_state import DoorState
from ..session.flow_control import FlowControl
from ..session.outbox import Outbox
from ..session.session import Agreed, ClientSession
from . import closing_handshake
from .broker_reader import BrokerReader
from .client_reader import ClientReader
from .endpoint import Endpoint
from .intercept import InterceptPoints
from .method_table import FROM_BROKER, FROM_CLIENT

log = logging.getLogger("lrq_ha.door")

LEAVE_POLL_S = 0.05
SEEN_S = 0.25  # between the last confirm and connection.close: pika and others, reading both at once, raise and lose the confirm


class ClientConnection(ClientSession, Endpoint):
    """A client's session with its two sockets. Arguments as of `ClientSession`."""

    def __init__(
        self,
        door: DoorState[ClientSession],
        replica: Replica,
        client: asyncio.Transport,
        broker: asyncio.Transport,
        agreed: Agreed,
    ) -> None:
        super().__init__(door, replica, client, broker, agreed)
        self.outbox = Outbox(self)
        self.flow = FlowControl(self, agreed.heartbeat_s)
        self.from_client = ClientReader(self)
        self.from_broker = BrokerReader(self)
        self.repeats = DuplicatePublishes(self)
        self.alarm = Alarm(self, agreed.told_blocked)
        # Interceptors see no sidecars of other sites.
        watch = InterceptPoints(self, door.interceptors) if door.interceptors and self.peer is None else None
        self.watch = watch
        self.take = publish.take if watch is None else watch.take
        self.deliver = deliver.deliver if watch is None else watch.deliver
        self.acks = acknowledge.acks if watch is None else watch.acks
        self.on_client = FROM_CLIENT if watch is None else watch.from_client
        self.on_broker = FROM_BROKER if watch is None else watch.from_broker

    # ---- events of the sockets ---------------------------------------------------------------------------------------

    def client_data(self, data: bytes) -> None:
        """Takes bytes from the client."""
        self.from_client.data(data)

    def broker_data(self, data: bytes) -> None:
        """Takes bytes from the broker."""
        self.from_broker.data(data)

    def client_full(self, full: bool) -> None:
        """The client reads more slowly than the broker sends, or has caught up."""
        self.flow.client_full(full)

    def broker_full(self, full: bool) -> None:
        """The broker reads more slowly than the log gets safe, or has caught up."""
        self.outbox.full = full
        if not full:
            self._pump()

    def broker_lost(self) -> None:
        """The broker's side is gone."""
        if self.client is not None and (unread := self.flow.unread_bytes):
            log.warning("the broker has ended a connection of %s, whose client does not read: %d bytes wait for it", self.user, unread)
        self.close()

    # ---- to the client -----------------------------------------------------------------------------------------------

    def close_client(self, code: int, text: str, cause: int = 0) -> None:
        """Ends the connection with an error to the client; its earlier publishes are completed."""
        if self.client is not None:
            if self.close_sent:
                closing_handshake.hand_over(self.client)
            else:
                closing_handshake.say(self.client, code, text, self.from_client.left, cause)
            self.client_lost()

    def fence(self, reason: str) -> None:
        """Ends the connection of a producer whose name another one has: nothing more of it is appended, and no waiting commit is carried out."""
        self.fenced = True
        self.close_client(CONNECTION_FORCED, reason)

    # ---- events of the log -------------------------------------------------------------------------------------------

    def safe_advanced(self) -> None:
        """More of the log is safe than before."""
        if self.closed:
            return
        publisher_confirms.safe_advanced(self)
        if self.from_broker.withheld:
            self.from_broker.release()
        self._pump()

    def durable_advanced(self) -> None:
        """The own stream has more of the log."""
        if not self.closed:
            publisher_confirms.durable_advanced(self)
            self.flow.consider_pausing()

    def _pump(self) -> None:
        self.outbox.pump()
        self.flow.consider_pausing()
        if self.client is None:
            self._leave_if_done()

    # ---- ends --------------------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Ends the connection in order: reads nothing more until pending publishes are confirmed, then sends the close to the client."""
        self.flow.stop()
        self.spawn(self._stop(reason))

    async def _stop(self, reason: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.door.config.stop_timeout_s / 2
        while (self.busy or self.from_client.stalled) and loop.time() < deadline:
            await asyncio.sleep(LEAVE_POLL_S)
        if any(channel.confirms.selected for channel in self.channels.values()):
            await asyncio.sleep(SEEN_S)
        self.takes_deliveries = False
        while self.from_broker.passing.under_way and self.client is not None and loop.time() < deadline:
            await asyncio.sleep(LEAVE_POLL_S)  # a begun delivery to a consumer without acks counts as taken
        if self.client is None:
            return
        self.to_client(encode.connection_close(CONNECTION_FORCED, reason))
        self.close_sent = True
        for channel in self.channels.values():
            if channel.confirms.selected and channel.state is ChannelState.NO:
                channel.state = ChannelState.TOLD  # later publishes on it would never be confirmed: their publisher repeats them
        self.flow.go_on()
        await asyncio.sleep(closing_handshake.ANSWER_S)
        self.goodbye()  # the client does not answer

    def goodbye(self) -> None:
        """Handles the client's connection.close-ok, or the end of the time for it: all frames before it have been taken."""
        if self.close_sent and self.client is not None:
            closing_handshake.end(self.client)
            self.client_lost()

    def client_lost(self) -> None:
        """The client is gone. Its publishes are sent and confirmed before the broker's side is closed."""
        if self.client is None:
            return
        self.client = None
        self.takes_deliveries = False
        if self.watch is not None:
            self.watch.client_gone()
        self.from_client.forget()
        self.flow.client_gone()
        self._leave_when_done()
        if not self.closed:
            closing.stop_timer(self)
            self.timer = asyncio.get_running_loop().call_later(self.door.config.drain_timeout_s, self.close)

    def _leave_when_done(self) -> None:
        self._leave_if_done()
        if not self.closed:
            asyncio.get_running_loop().call_later(LEAVE_POLL_S, self._leave_when_done)

    def _leave_if_done(self) -> None:
        if not (self.outbox or self.from_client.stalled or self.unanswered):
            self.close()

    def close(self) -> None:
        """Closes both sides at once."""
        if self.closed:
            return
        self.closed = True
        self.repeats.forget()
        for channel in self.channels.values():
            self.give_back(channel.held)
            closing.resolve_unanswered(self, channel)
        closing.stop_timer(self)
        if self.watch is not None:
            self.watch.client_gone()
        closing.no_reply(self)
        for task in self._tasks:
            task.cancel()
        self.replica.progress.waiting_safe.discard(self)
        self.replica.progress.waiting_durable.discard(self)
        self.replica.progress.waiting_room.discard(self.flow.consider_pausing)
        self.replica.barrier.changed.discard(self.flow.consider_broker)
        self.from_client.forget()
        if self.client is not None:
            closing_handshake.end(self.client)
            self.client = None
        if not self.broker.is_closing():
            self.broker.write(encode.connection_close(200, "the client is gone"))
            closing_handshake.end(self.broker)
        self.door.session_closed(self)
