"""Renewing a group's log: everything live is published again behind a CHECKPOINT, so that a node with an empty log can begin there (R17).

Rules:
- The door is closed, everything before is safe and in the queues: nobody else touches them. What stands before the CHECKPOINT is moved, queue by
  queue, from the front of its queue to the end. So a queue's order is kept, also if another node has to go on with it in the middle.
- A message and the DEQUEUE of its old copy stand in one batch; the old copy is acked when that is safe. The applier publishes the new one.
- A moved message begins anew in its queue: its position is new, its time to live begins again, what RabbitMQ counts of it (x-death, deliveries) too.
- It ends when two passes over each queue, one after the other, have found nothing to move: a dead letter may be on its way from a queue that is
  looked at later to one that was looked at before. Where such a pass would have to hold more than KEPT_MAX, the queue has to hold as many messages as
  were moved. After ROUNDS_MAX rounds that found something it is given up.
- What RabbitMQ says of a queue is believed while it counts the pass's own consumer: of a quorum queue that does not answer it says that it is empty.
- Given up is what cannot be moved unchanged: to another routing key for its dead letters, or at the cost of its deliveries (RabbitMQ 3.x).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from lrq_ha.replication.errors import LrqError
from lrq_ha.replication.filter import Deaths, Verdict

from . import topology
from .channels import QueueKey
from .client import Channel, Connection
from .client_errors import Address, ChannelClosed
from .endpoints import ROUTING_VHOST
from .headers import cut, deaths, position
from .keeping import has_a_free_way_back
from .replica import BATCH_BYTES_MAX, Replica
from .sweeper import ack_all, give_back

log = logging.getLogger("lrq_ha.renewing")

WINDOW_MESSAGES = 500
KEPT_MAX = 1_500  # quorum queues give no more than 2,000 to one consumer
ROUNDS_MAX = 5
QUIET_S = 0.1
STUCK_S = 20.0
TO_APPLY_BYTES_MAX = 32 << 20
POLL_S = 0.01
#: What RabbitMQ and the door have written into the headers, and further routing keys, which have been followed.
NOT_MOVED = (b"x-lrq-pos", b"x-death", b"x-first-death-queue", b"x-first-death-exchange", b"x-first-death-reason", b"x-last-death-queue",
             b"x-last-death-exchange", b"x-last-death-reason", b"x-delivery-count", b"CC")  # fmt: skip


class GivenUp(LrqError):
    """Something live may be left before the CHECKPOINT."""


class _Copy(NamedTuple):
    """A delivery. `key`: its routing key; `sequence`: None if it has no position."""

    tag: int
    key: str
    sequence: int | None
    generation: int
    deaths: Deaths
    header: bytes
    body: bytes


class Renewal:
    """Moves what is live.

    Args:
        replica: Of this node, which is primary; its door is closed.
        broker: The own broker; the vhost in it is replaced.
        checkpoint: Sequence of the CHECKPOINT.
    """

    def __init__(self, replica: Replica, broker: Address, checkpoint: int) -> None:
        self.moved = 0
        self._replica = replica
        self._broker = broker
        self._checkpoint = checkpoint
        self._connections: dict[str, Connection] = {}

    async def run(self) -> None:
        """Returns when nothing live is left before the CHECKPOINT and everything moved is in its queue.

        Raises:
            GivenUp: There may be something left; the text names the queue.
            LrqError: The connection to the broker is lost, or this node is not primary any more.
        """
        known = self._replica.definitions.queues()
        unknown = [key for key, gone in self._replica.declared.items() if not gone and key not in known and key[0] != ROUTING_VHOST]
        if unknown:
            raise GivenUp(f"how queue '{unknown[0][1]}' in vhost '{unknown[0][0]}' was declared is not known", todo="declare it again, as it is")
        queues = {key: arguments for key, method in known.items() if (arguments := topology.queue_arguments(method)).get("x-queue-type") != "stream"}
        rounds = clean = 0
        try:
            while clean < 2:
                found = [key for key, arguments in queues.items() if await self._renew(key, arguments)]
                clean = 0 if found else clean + 1
                rounds += bool(found)
                if rounds == ROUNDS_MAX:
                    raise GivenUp(f"dead letters keep arriving: not all was moved in {rounds} rounds", todo="try again later", retriable=True)
                await self._applied()
        finally:
            for connection in self._connections.values():
                await connection.close()

    async def _applied(self) -> None:
        try:
            async with asyncio.timeout(STUCK_S):
                await self._replica.wait_applied(self._replica.end)
        except TimeoutError:
            raise GivenUp("a queue refuses messages (a length limit?)", todo="make room in it, or raise its limit", retriable=True) from None

    async def _renew(self, key: QueueKey, arguments: Mapping[str, Any]) -> bool:
        """A pass over a queue; whether anything was to be moved."""
        try:
            sweep = _Pass(self._replica, await self._connection(key[0]), key, arguments, self._checkpoint)
            whole = await sweep.run()
            self.moved += sweep.moved
            if not sweep.found and not whole and not await sweep.holds(self._replica.moved.get(key, 0)):
                raise GivenUp(
                    f"queue '{key[1]}' in vhost '{key[0]}' holds too many messages to look behind them (priorities, or some have expired)",
                    retriable=True,
                )
        except ChannelClosed as error:
            if error.no_such_queue:
                return False  # it has gone by itself
            raise GivenUp(f"queue '{key[1]}' in vhost '{key[0]}' cannot be read: {error.text}") from error
        return bool(sweep.found)

    async def _connection(self, vhost: str) -> Connection:
        known = self._connections.get(vhost)
        if known is None:
            known = self._connections[vhost] = await Connection.open(replace(self._broker, vhost=vhost))
        return known


class _Pass:
    """One pass over a queue.

    Attributes:
        found: Copies from before the CHECKPOINT that were met.
        moved: Those of them that were live.
    """

    def __init__(self, replica: Replica, connection: Connection, key: QueueKey, arguments: Mapping[str, Any], checkpoint: int) -> None:
        self.found = self.moved = 0
        self._replica = replica
        self._connection = connection
        self._key = key
        self._limited = "x-delivery-limit" in arguments and not has_a_free_way_back(connection)
        self._dies_by_key = bool(arguments.get("x-dead-letter-exchange")) and "x-dead-letter-routing-key" not in arguments
        self._quorum = arguments.get("x-queue-type") == "quorum"
        self._checkpoint = checkpoint
        self._kept = 0
        self._arrived: asyncio.Queue[_Copy] = asyncio.Queue()
        self._channel: Channel

    async def _depth(self, consumers: int) -> int:
        """Messages that are ready in the queue, when it has so many consumers. Raises GivenUp if it has not after a while."""
        channel = await self._connection.channel()
        found = -1
        try:
            async with asyncio.timeout(STUCK_S):
                while True:
                    _, ready, found = await channel.queue_declare(self._key[1], passive=True)
                    if found == consumers:
                        return ready
                    await asyncio.sleep(QUIET_S)
        except TimeoutError:
            what = "does not answer" if found < consumers else "is consumed from by somebody who does not use the door"
            raise GivenUp(f"queue '{self._key[1]}' in vhost '{self._key[0]}' {what}", retriable=True) from None
        finally:
            await channel.close()

    async def holds(self, messages: int) -> bool:
        """Whether the queue has so many messages (more than 0). It learns a little late of what was given back."""
        try:
            async with asyncio.timeout(STUCK_S):
                while await self._depth(0) != messages:
                    await asyncio.sleep(QUIET_S)
        except TimeoutError:
            return False
        return True

    async def run(self) -> bool:
        """Whether everything that was in the queue at the beginning was met. Raises ChannelClosed; GivenUp if the queue gives nothing."""
        left = await self._depth(0)
        if left and self._limited:
            raise GivenUp(
                f"queue '{self._key[1]}' in vhost '{self._key[0]}' has a delivery limit, and this RabbitMQ counts what the sidecar gives back",
                todo="let it be emptied first, or use RabbitMQ 4",
                retriable=True,
            )
        if not left and not self._quorum:
            return True
        upto = self._replica.end
        self._channel = await self._connection.channel()
        await self._channel.qos(KEPT_MAX + WINDOW_MESSAGES)
        tag = await self._channel.consume(self._key[1], self._take)
        left = max(left, await self._depth(1) + self._arrived.qsize(), 1)  # it may not have answered before, and some may be under way
        whole = True
        while left > 0:
            window = await self._window(left)
            if not window:
                break  # the rest has expired
            left -= sum(copy.sequence is None or copy.sequence <= upto for copy in window)
            await self._move(window)
            if self._kept >= KEPT_MAX and left > 0:
                whole = False
                break
        while not self._arrived.empty():  # given back with what was kept
            self._arrived.get_nowait()
            self._kept += 1
        await give_back(self._connection, self._channel, tag, self._kept, self._key[1])
        return whole

    def _take(self, tag: int, _redelivered: bool, _exchange: str, key: str, header: bytes, body: bytes) -> None:
        stamped = position(header)
        parsed = self._replica.parse_stamp(stamped) if stamped is not None else None
        sequence, generation = parsed if parsed is not None else (None, 0)
        self._arrived.put_nowait(_Copy(tag, key, sequence, generation, deaths(header), header, body))

    async def _window(self, most: int) -> list[_Copy]:
        """What has come; empty if there is nothing more."""
        window: list[_Copy] = []
        silent_s = 0.0
        while not window:
            try:
                async with asyncio.timeout(QUIET_S):
                    window.append(await self._arrived.get())
            except TimeoutError:
                silent_s += QUIET_S
                if not await self._depth(1):
                    if self._arrived.empty():
                        return []
                elif silent_s >= STUCK_S:
                    raise GivenUp(f"queue '{self._key[1]}' in vhost '{self._key[0]}' gives nothing to the sidecar", retriable=True) from None
        size = len(window[0].body)
        while not self._arrived.empty() and len(window) < min(WINDOW_MESSAGES, most) and size < BATCH_BYTES_MAX:
            window.append(self._arrived.get_nowait())
            size += len(window[-1].body)
        return window

    async def _move(self, window: list[_Copy]) -> None:
        replica, target = self._replica, self._replica.filter.queue(self._key)
        done: list[_Copy] = []
        last = 0
        for copy in window:
            old = copy.sequence is None or copy.sequence <= self._checkpoint
            verdict = Verdict.GIVE if copy.sequence is None else target.verdict(copy.sequence, copy.generation, copy.deaths)
            if not old and verdict is not Verdict.ACK:  # what a killed sidecar has published counts no more, and goes
                self._kept += 1
                continue
            self.found += old
            if verdict is Verdict.HOLD:
                raise GivenUp(f"an operation on entry {copy.sequence} is not safe, although nobody works on queue '{self._key[1]}'")
            if verdict is Verdict.REJECT:
                self._channel.reject(copy.tag)
                continue
            done.append(copy)
            if verdict is Verdict.GIVE:
                if self._dies_by_key and (copy.key != self._key[1] or cut(copy.header, b"CC") != copy.header):
                    raise GivenUp(
                        f"queue '{self._key[1]}' in vhost '{self._key[0]}' dead-letters by routing key, which a moved message does not keep",
                        todo="let it be emptied first, or give it x-dead-letter-routing-key",
                    )
                self.moved += 1
                header = copy.header
                for key in NOT_MOVED:
                    header = cut(header, key)
                last = replica.move(self._key, (header, copy.body), copy.sequence, copy.deaths)
        if last:
            replica.flush()
            await replica.wait_safe(last)
        await ack_all(self._channel, [copy.tag for copy in done], alone=not self._kept and len(done) == len(window))
        while replica.to_apply_bytes > TO_APPLY_BYTES_MAX:
            await asyncio.sleep(POLL_S)
