"""Sends control messages to the other nodes, and the log to those that follow this primary.

Rules:

- One link to each peer, reopened without end. A subscription ends with its link; the core asks for the next.
- A batch is sent from memory, or else read from the own stream until memory has the next batch: never both at once.
- The unacknowledged bytes of a subscription are limited.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from broker_plugin.log import codec
from lrq_ha.errors import LrqError
from lrq_ha.replication.events import Disconnect, PeerAcked, PeerConnected, PeerDisconnected, Send, Subscribe, Unsubscribe
from lrq_ha.replication.subscription import ReplicatingSubscription, StoredBatch
from lrq_ha.routing.names import ROUTING_VHOST

from ..config import Config
from ..node.core import Core
from ..node.log_writer import LogWriter
from ..node.task_scope import TaskScope
from .link import Link

log = logging.getLogger("lrq_ha.node")

READER_PREFETCH = 50
ROOM_POLL_S = 0.01


class LogShipping:
    """The sender to the other nodes.

    Args:
        config: The node's configuration.
        core: Informed of links and acknowledgements.
        life: The links run as long as this.
        own_log: The log to send.

    Attributes:
        links: By the peer's id.
    """

    def __init__(self, config: Config, core: Core, life: TaskScope, own_log: LogWriter) -> None:
        self._config = config
        self._core = core
        self._node = core.node
        self._life = life
        self._log = own_log
        self.links = {
            peer.id: Link(
                config.node.id,
                config.node.group,
                peer.id,
                peer.name,
                config.door_address(peer.door, ROUTING_VHOST),
                self._link_up,
                self._link_down,
                self._link_ack,
            )
            for peer in config.peers
        }
        self._subscriptions: dict[int, ReplicatingSubscription] = {}
        self._catching_up: dict[int, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Connects to every peer."""
        for link in self.links.values():
            self._life.spawn(link.run())

    def on_its_way_bytes(self, peer: int) -> int | None:
        """Bytes of the log that a peer lacks, if all of them were sent to it; None if it lacks more."""
        subscription = self._subscriptions.get(peer)
        return subscription.in_flight_bytes if subscription and subscription.sent >= self._node.log.end else None

    async def part(self, peer: int) -> bool:
        """Ends the link to a peer in order, with this incarnation. See Link.part."""
        return await self.links[peer].part()

    # ---- effects -----------------------------------------------------------------------------------------------------

    def send(self, effect: Send) -> None:
        """Sends a control message."""
        link = self.links.get(effect.peer)
        if link is not None:
            link.send(codec.encode_control(self._config.node.id, self._config.node.group, effect.message))

    def subscribe(self, effect: Subscribe) -> None:
        """Sends the log to a peer from now on."""
        self._unsubscribe(effect.peer)
        self._subscriptions[effect.peer] = ReplicatingSubscription(effect.guard, self._config.replication.push_bytes_max)
        self._pump(effect.peer)

    def unsubscribe(self, effect: Unsubscribe) -> None:
        """Stops sending the log to a peer."""
        self._unsubscribe(effect.peer)

    def disconnect(self, effect: Disconnect) -> None:
        """Ends the link to a peer; it is opened again."""
        self._unsubscribe(effect.peer)
        asyncio.get_running_loop().call_soon(self.links[effect.peer].drop)

    def grown(self) -> None:
        """The log has grown by a batch."""
        if self._node.leading:
            for peer in list(self._subscriptions):
                self._pump(peer)

    # ---- the log to a peer -------------------------------------------------------------------------------------------

    def _unsubscribe(self, peer: int) -> None:
        self._subscriptions.pop(peer, None)
        task = self._catching_up.pop(peer, None)
        if task is not None:
            task.cancel()

    def _pump(self, peer: int) -> None:
        """Sends as much as there is room for: from memory, or else from the stream."""
        subscription = self._subscriptions.get(peer)
        if subscription is None:
            return
        if peer in self._catching_up:
            return
        memory = self._log.memory
        index = memory.starting_at(subscription.sent + 1)
        if index is None:
            if subscription.sent < self._node.log.end:
                self._catching_up[peer] = self._life.spawn(self._catch_up(peer, subscription))
            return
        link = self.links[peer]
        while index < len(memory) and subscription.has_room():
            batch = memory[index]
            subscription.send(batch)
            link.push(batch, self._node.leading, self._node.safe)
            index += 1

    async def _catch_up(self, peer: int, subscription: ReplicatingSubscription) -> None:
        """Reads the own stream until the batch that the peer needs next is in memory."""
        nearest = self._log.checkpoints.start(subscription.sent)
        node, memory, link = self._node, self._log.memory, self.links[peer]
        try:
            async with aclosing(self._log.streams.reader.batches(nearest.offset if nearest else "first", prefetch=READER_PREFETCH)) as records:
                async for _, header, body in records:
                    if header is not None and header.first > subscription.sent and node.log.holds(header):
                        if header.first > subscription.sent + 1:
                            raise LrqError(f"{node.name(peer)} needs entry {subscription.sent + 1}, which the log no longer has: it must join again")
                        while not subscription.has_room():
                            await asyncio.sleep(ROOM_POLL_S)
                        batch = StoredBatch(header, body)
                        subscription.send(batch)
                        link.push(batch, node.leading, node.safe)
                    if memory.starting_at(subscription.sent + 1) is not None or subscription.sent >= node.log.end:
                        break
        except LrqError as error:
            log.warning("catching up %s: %s", node.name(peer), error)
            if self._subscriptions.get(peer) is subscription:
                self._life.spawn(self._log.watch.cannot_send(peer))
                return
        finally:
            if self._catching_up.get(peer) is asyncio.current_task():
                del self._catching_up[peer]
        self._pump(peer)

    # ---- links -------------------------------------------------------------------------------------------------------

    def _link_up(self, peer: int) -> None:
        self._core.feed(PeerConnected(peer))

    def _link_down(self, peer: int) -> None:
        self._unsubscribe(peer)
        self._core.feed(PeerDisconnected(peer))

    def _link_ack(self, peer: int, upto: int) -> None:
        subscription = self._subscriptions.get(peer)
        if subscription is not None and upto <= subscription.sent:
            subscription.settle(upto)
            self._core.feed(PeerAcked(peer, upto))
            self._pump(peer)
