"""On a backup, keeps queues alive that expire when they are not used (`x-expires`): the primary decides whether
they expire.

Rules:
- Each such queue is used several times within its expiry time, until the log says that the queue is deleted.
- A passive declaration counts as use of a classic queue. A quorum queue counts only a consumer or a basic.get
  (measured on 3.10 and 4.3). So a consumer takes messages from a quorum queue and requeues them as `requeue` does.
  Where each requeue counts as a delivery attempt and the queue has a delivery limit, nothing is taken.
- A queue has one consumer at a time: a queue that is being swept is left alone, as the sweep is use too.
- A vhost that the broker does not have, or that the sidecar may not access, does not end the loop: its queues are
  left alone for a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from lrq_ha.replication.queues import QueueKey

from ..amqp import declarations
from ..amqp.address import Address
from ..amqp.errors import AccessRefused, ChannelClosed, VhostNotFound
from ..amqp.requeue import RequeueDepths, all_arrived, give_back, is_empty, requeue_is_free
from ..amqp.vhosts import VhostConnections
from ..log.definitions import Definitions
from ..log.replica import Replica

log = logging.getLogger("lrq_ha.sweeper")

USES = 4  # within the time after which a queue expires
INTERVAL_MAX_S = 1.0
INTERVAL_MIN_S = 0.05


class QueueKeepAlive:
    """Uses the queues that would expire here.

    Args:
        replica: Knows the queues.
        broker: The own broker; its vhost is replaced.
        given_back: How many messages were requeued to each quorum queue here.
    """

    def __init__(self, replica: Replica, broker: Address, given_back: RequeueDepths) -> None:
        self._replica = replica
        self._given_back = given_back
        self._vhosts = VhostConnections(broker)
        self._expiring: dict[QueueKey, Mapping[str, Any]] = {}  # queues that would expire, and their arguments
        self._looked_up: tuple[Definitions, int] | None = None  # the definitions that `_expiring` was made from, and their version
        self._used_at: dict[QueueKey, float] = {}
        self._missed: set[QueueKey] = set()
        self._swept: QueueKey | None = None
        self._lock = asyncio.Lock()  # held while a consumer is at a queue
        self._stopping = asyncio.Event()

    @asynccontextmanager
    async def away_from(self, key: QueueKey) -> AsyncIterator[None]:
        """The queue is not touched inside."""
        async with self._lock:
            self._swept = key
        try:
            yield
        finally:
            self._swept = None

    async def run(self) -> None:
        """Uses queues until `stop`.

        Raises:
            LrqError: The broker's connection is lost.
        """
        try:
            while not self._stopping.is_set():
                pause_s = INTERVAL_MAX_S
                self._look_up()
                for key, arguments in self._expiring.items():
                    if self._replica.declared.replicates(key) and not self._stopping.is_set() and not self._vhosts.is_closed_to_us(key[0]):
                        every_s = arguments["x-expires"] / 1_000 / USES
                        pause_s = min(pause_s, every_s)
                        if time.monotonic() - self._used_at.get(key, 0.0) >= every_s:
                            try:
                                await self._use(key, arguments)
                            except (VhostNotFound, AccessRefused) as error:
                                self._vhosts.keep_out(key[0], error, "queues that expire cannot be kept")
                try:
                    async with asyncio.timeout(max(pause_s, INTERVAL_MIN_S)):
                        await self._stopping.wait()
                except TimeoutError:
                    pass
        finally:
            await self._vhosts.close()

    def _look_up(self) -> None:
        """Finds the queues that expire, if anything was declared or deleted. Of a hundred thousand queues most are
        not even decoded.
        """
        declared = self._replica.declared
        current = (declared.definitions, declared.definitions.version)
        if self._looked_up == current:
            return
        self._looked_up = current
        found = {key: declared.declarations.get(key, b"") for key in declared.existing()}
        expiring = {key: declarations.queue_arguments(method) for key, method in found.items() if declarations.has_argument(method, "x-expires")}
        self._expiring = {key: arguments for key, arguments in expiring.items() if arguments["x-expires"]}
        self._used_at = {key: at for key, at in self._used_at.items() if key in self._expiring}
        self._missed &= self._expiring.keys()

    async def stop(self) -> None:
        """Ends `run`; returns when no consumer is at a queue any more."""
        self._stopping.set()
        async with self._lock:
            pass

    async def _use(self, key: QueueKey, arguments: Mapping[str, Any]) -> None:
        async with self._lock:
            if key == self._swept or self._stopping.is_set():
                return
            self._used_at[key] = time.monotonic()
            vhost, queue = key
            connection = await self._vhosts.connection(vhost)
            channel = await connection.channel()
            taken: list[int] = []
            tag = ""
            try:
                _, ready, _ = await channel.queue_declare(queue, passive=True)
                is_quorum = arguments.get("x-queue-type") == "quorum"
                if is_quorum and "x-delivery-limit" in arguments and not requeue_is_free(connection):
                    await is_empty(channel, queue)  # the answer does not matter
                elif is_quorum:
                    least = max(self._given_back.least_window(key), 1)
                    window = min(ready or least, least)  # ready is 0 also for a quorum queue that does not answer
                    await channel.qos(window)
                    tag = await channel.consume(queue, lambda tag, *_: taken.append(tag))
                    await all_arrived(channel, queue, lambda: len(taken), lambda: len(taken) >= window)
                    _, left, consumers = await channel.queue_declare(queue, passive=True)
                    if len(taken) >= window or (not left and consumers == 1):  # else more messages may be on their way
                        self._given_back.note(key, len(taken))
            except ChannelClosed as error:
                self._missing(key, error)
            await give_back(connection, channel, tag, len(taken), queue)

    def _missing(self, key: QueueKey, error: ChannelClosed) -> None:
        vhost, queue = key
        node = self._replica.node
        declared = self._replica.progress.tracker.applied == node.log.end  # else the queue may be declared by an entry to come
        if not self._replica.declared.has(key):
            return  # the queue was deleted while the broker was asked
        if error.no_such_queue and declared and key not in self._missed:
            self._missed.add(key)
            log.warning(
                "queue '%s' in vhost '%s' has expired while this sidecar was away, with what it held: rebuild this node (lrq-ha reinit %s)",
                queue,
                vhost,
                node.name(node.me),
            )
        else:
            log.debug("queue '%s' in vhost '%s' cannot be used: %s", queue, vhost, error.text)
