"""Queues of the level `configuration` on this node's broker: declared on every node; empty and bound to nothing
where no client uses them.

Rules:
- Clients' publishes to such a queue by its name are in no log. Publishes through an exchange are in the log for the
  sake of other queues. So on a backup the queue is bound to nothing: the applier declares the queue and leaves its
  bindings out.
- A node that begins to follow unbinds the queues that were bound while it led, before any entry of the new leader is
  applied. The queues are then purged, also of messages that dead-lettering and further routing keys (CC, BCC) bring
  by the queue's name: no client of a backup acknowledges them. A stream cannot be purged; its deletion and
  redeclaration come last.
- A node that takes an epoch binds the queues before its door opens. If the node followed before, they are empty then.
  If it led before (its sidecar restarted), the clients' messages stay.
- A queue of the level `none` is unbound and bound in that way too, if this broker has it, so that it does not grow
  without a consumer; else it is left alone. The log knows only the queues that have this level by their argument.
- A command that fails for a moment before the door opens is tried again, as clients' messages would not reach an
  unbound queue. But a vhost that does not come back delays a promotion for a bounded time only.
- Only safe entries count: bindings of another node's entries that may still fall out of the log do not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lrq_ha.errors import LrqError
from lrq_ha.replication.levels import Level
from lrq_ha.replication.positions import owner_of
from lrq_ha.replication.queues import QueueKey

from ..amqp import declarations, frames
from ..amqp.address import Address
from ..amqp.connection import Channel
from ..amqp.errors import ChannelClosed
from ..amqp.vhosts import VhostConnections
from ..log.replica import Replica
from .declarer import PASSED_OVER, unconditional

log = logging.getLogger("lrq_ha.configured")

INTERVAL_S = 1.0
AGAIN_S = 0.2
PATIENCE_S = 60.0  # the longest delay of a promotion by a vhost that cannot be used
T = TypeVar("T")


class PartialQueues:
    """Keeps partial queues unbound and empty while another node leads.

    Args:
        replica: Knows the queues and the leader.
        broker: The own broker; its vhost is replaced.
        interval_s: Seconds between two purges.
    """

    def __init__(self, replica: Replica, broker: Address, *, interval_s: float = INTERVAL_S) -> None:
        self._replica = replica
        self._interval_s = interval_s
        self._vhosts = VhostConnections(broker)
        self._channels: dict[str, Channel] = {}
        self._troubled: set[str] = set()  # vhosts whose failure was logged
        self._patient_until = 0.0
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._started = False

    async def run(self) -> None:
        """Keeps the queues empty while another node leads, until `take_over`."""
        self._started = True
        try:
            while not self._stopping.is_set():
                if self._replica.follows:
                    for key in self._configured():
                        if not self._stopping.is_set():
                            await self._empty(key)
                try:
                    async with asyncio.timeout(self._interval_s):
                        await self._stopping.wait()
                except TimeoutError:
                    pass
        finally:
            self._ended.set()

    async def unbind(self) -> None:
        """Unbinds and empties the queues: this node begins to follow another."""
        bindings = self._bindings()
        for key, _, _, unbinds in bindings:
            await self._call(key, frames.QUEUE_UNBIND, unbinds, log_refusal=False)  # this broker may lack the binding
        await self._keep_exchanges(bindings)

    async def take_over(self) -> None:
        """Ends `run`; declares and binds the queues for clients. The whole log is applied, and it ends with this node's MARKER."""
        self._stopping.set()
        if self._started:
            await self._ended.wait()
        self._patient_until = time.monotonic() + PATIENCE_S
        self._troubled.clear()
        epochs = self._replica.node.log.state().epochs
        followed = len(epochs) > 1 and owner_of(epochs[-2][0]) != self._replica.node.me
        for key in self._configured():
            method = self._replica.declared.definitions.queue(key) or b""
            await self._execute(key, method)
            if followed:
                await self._empty_for_good(key, method)
        bindings = self._bindings()
        await self._keep_exchanges(bindings)
        for key, _, binds, _ in bindings:
            await self._execute(key, binds, log_refusal=self._replica.declared.level(key) is not Level.NONE)
        await self.close()

    async def close(self) -> None:
        """Ends the connections."""
        await self._vhosts.close()
        self._channels.clear()

    def abort(self) -> None:
        """Aborts the connections at once."""
        self._vhosts.abort()

    def _configured(self) -> list[QueueKey]:
        return [key for key in self._replica.declared.partial if self._replica.declared.level(key) is Level.CONFIGURATION]

    def _bindings(self) -> list[tuple[QueueKey, str, bytes, bytes]]:
        return list(self._replica.declared.definitions.bindings_to(self._replica.declared.partial))

    async def _keep_exchanges(self, bindings: list[tuple[QueueKey, str, bytes, bytes]]) -> None:
        """Declares auto-delete exchanges again, each once: one goes with its last binding here, and may have other
        bindings on other nodes.
        """
        exchanges: dict[str, dict[str, None]] = {}
        for (vhost, _), exchange, _, _ in bindings:
            exchanges.setdefault(vhost, {})[exchange] = None
        for vhost, named in exchanges.items():
            declares, binds = self._replica.declared.keeping(vhost, named)
            for method in (*declares, *binds):
                await self._execute((vhost, declarations.first_name(method)), method)

    async def _empty(self, key: QueueKey) -> None:
        """Purges a queue that is not empty."""
        if not self._replica.declared.is_stream(key) and await self._ready(key):
            await self._do(key, lambda channel: channel.queue_purge(key[1]), log_refusal=False)  # the queue may have been deleted meanwhile

    async def _empty_for_good(self, key: QueueKey, method: bytes) -> None:
        """Removes everything that is in the queue now, also from a stream. `method`: declares the queue."""
        if not self._replica.declared.is_stream(key):
            await self._do(key, lambda channel: channel.queue_purge(key[1]))
        elif await self._ready(key):
            await self._do(key, lambda channel: channel.queue_delete(key[1]))
            await self._execute(key, method)

    async def _ready(self, key: QueueKey) -> int:
        """How many messages are in a queue; 0 if the queue does not exist (yet)."""
        found = await self._do(key, lambda channel: channel.queue_declare(key[1], passive=True), log_refusal=False)
        return found[1] if found else 0

    async def _execute(self, key: QueueKey, method: bytes, *, log_refusal: bool = True) -> None:
        """Carries out a declaration of the log that concerns a queue, or the exchange of this name."""
        kind, _, arguments = unconditional(method)
        await self._call(key, kind, arguments, log_refusal=log_refusal)

    async def _call(self, key: QueueKey, method: int, arguments: bytes, *, log_refusal: bool = True) -> None:
        await self._do(key, lambda channel: channel._call(method, arguments), log_refusal=log_refusal)

    async def _do(self, key: QueueKey, what: Callable[[Channel], Awaitable[T]], *, log_refusal: bool = True) -> T | None:
        """Calls `what`; like the applier, passes over a refusal by the broker."""
        while True:
            try:
                found = await what(await self._channel(key[0]))
            except ChannelClosed as error:
                if error.code not in PASSED_OVER:
                    raise
                if log_refusal:
                    log.warning("'%s' in vhost '%s' is not here as it is declared: %s", key[1], key[0], error.text)
                return None
            except LrqError as error:
                if key[0] not in self._troubled:
                    self._troubled.add(key[0])
                    log.warning("queues of the level configuration in vhost '%s' cannot be looked after: %s", key[0], error)
                if not error.retriable or time.monotonic() >= self._patient_until:
                    return None
            else:
                self._troubled.discard(key[0])
                return found
            await asyncio.sleep(AGAIN_S)

    async def _channel(self, vhost: str) -> Channel:
        channel = self._channels.get(vhost)
        if channel is None or channel.error is not None:
            channel = self._channels[vhost] = await (await self._vhosts.connection(vhost, anew=True)).channel()
        return channel
