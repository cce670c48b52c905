"""The own log: what the core decides to write goes into its stream, and what a restart needs goes into the applied record.

Rules:
- A batch is written once, as the bytes that are pushed, too; a pushed batch is written as its leader made it.
- The applied record is written a little later, and only when something has changed. It names a CHECKPOINT only once its place is known (R7).
- Memory, CHECKPOINTs and retention follow each batch that is written, and each cut.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from broker_plugin import wire
from broker_plugin.endpoints import ROUTING_VHOST
from broker_plugin.streams import Streams
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.checkpoints import Checkpoints
from lrq_ha.replication.errors import IllegalEvent
from lrq_ha.replication.events import CutTail, EntryKind, OwnConfirmed, WriteBatch, WriteFence
from lrq_ha.replication.node import Node
from lrq_ha.replication.subscription import RoutingQueue, StoredBatch

from .config import Config
from .core import Core
from .life import Life
from .rebuild import applied_record, rebuild
from .retention import Watch

log = logging.getLogger("lrq_ha.node")

RECORD_INTERVAL_S = 0.2
RECORD_INTERVAL_MAX_S = 2.0
RECORD_PAUSE_TIMES = 20
CHECKPOINTS_PER_LOG_MIN = 4  # a log without its beginning must have one


class OwnLog:
    """See above.

    Args:
        config: The node's configuration.
        core: Its log is this one.
        life: Ended when the streams can be written no more.
        shut_out, on_blocked: See Streams.

    Attributes:
        streams: Where it stands.
        memory: Its newest batches.
        checkpoints: Where they stand in it.
        watch: What the broker has dropped of it.
    """

    def __init__(self, config: Config, core: Core, life: Life, shut_out: int, on_blocked: Callable[[str], None]) -> None:
        r = config.replication
        broker = config.broker_address(ROUTING_VHOST)
        self.streams = Streams(config.node.group, broker, r.log_bytes_max, self._written, life.end, shut_out=shut_out, on_blocked=on_blocked)
        self.memory = RoutingQueue(r.memory_bytes_max)
        self.checkpoints = Checkpoints()
        self.watch = Watch(core.node, r.log_bytes_max, self.streams.head, core.feed)
        self._settings = r
        self._core = core
        self._node = core.node
        self._replica = core.replica
        self._recorded = (-1, -1)
        self._pause_s = RECORD_INTERVAL_S
        self._replica.log_marks = self.watch.retention.export

    async def rebuild(self) -> None:
        """Opens the streams and fills the core with what they hold. Raises LrqError."""
        await self.streams.open()
        await rebuild(self._replica, self.streams, self.memory, self.checkpoints, self.watch.retention)

    # ---- effects -----------------------------------------------------------------------------------------------------

    def write(self, effect: WriteBatch) -> None:
        """Writes a batch. Raises IllegalEvent if it does not stand where its sequences were given out."""
        header = effect.batch
        if effect.kind is EntryKind.ENTRIES and isinstance(effect.body, bytes):  # a push: the same bytes, the leader's index
            body = effect.body
            pushed = list(pb.Batch.FromString(body).runs)
            if header.first == self._node.log.base:  # never cut: the first batch of a log that begins here
                self._replica.begin(header.first, pushed[0].checkpoint)
            self._replica.index_batch(header.first, pushed, keep=True)
            runs: list[pb.Run | wire.Publishes] = [*pushed]
        else:
            runs = self._own_runs(effect)
            body = wire.batch_body(header, time.time_ns() // 1000, runs)
            self._replica.batches_in_flight += 1
        self.streams.write_batch(header, body, self._node.safe)
        self.memory.append(StoredBatch(header, body))
        self.watch.appended(header.last, len(body))
        if wire.checkpoint_of(runs) is not None:
            self.checkpoints.noted(self._node.log.start_point(header))

    def _own_runs(self, effect: WriteBatch) -> list[pb.Run | wire.Publishes]:
        """What a batch of this leader consists of."""
        header = effect.batch
        if effect.kind is EntryKind.ENTRIES:
            given: tuple[int, list[pb.Run | wire.Publishes]] = effect.body  # type: ignore[assignment]
            first, runs = given
            if first != header.first:
                raise IllegalEvent(f"entries given out from {first} on would be written from {header.first} on")
            return runs
        members = sorted(header.sets[0][1])
        log.info("%s", "; ".join(filter(None, (f"in the set: {', '.join(map(self._node.name, members))}", taken_out(self._node)))))
        self._replica.done_when_safe(header.first, header.last)
        marker = effect.kind is EntryKind.MARKER
        return [pb.Run(marker=pb.Marker(nodes=members)) if marker else pb.Run(members=pb.Members(nodes=members))]

    def write_fence(self, effect: WriteFence) -> None:
        """Writes a FENCE."""
        self.streams.write_fence(effect.epoch, effect.out_end)

    def _written(self, count: int) -> None:
        self._replica.batches_in_flight = max(0, self._replica.batches_in_flight - count)
        self._core.feed(OwnConfirmed(count))
        self._replica.own_confirmed()

    def cut(self, effect: CutTail) -> None:
        """Forgets the end of the log."""
        local = "; publishes with local completion among them had been confirmed" if self._node.settings.local_completion else ""
        log.warning("entries from %d on were never safe and fall out of the log%s", effect.first, local)
        self._replica.cut(effect.first)
        self.memory.cut(effect.first)
        self.checkpoints.cut(effect.first)

    # ---- records -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Writes the applied record when something has changed, and a CHECKPOINT when the log has grown enough."""
        while True:
            await asyncio.sleep(self._pause_s)
            self._consider_checkpoint()
            await self._locate_checkpoint()
            if (self._replica.tracker.applied, self._replica.safe) != self._recorded:
                await self.record()
            if self.streams.lost_host and not self._node.lost_host:
                await self.streams.mark_boot()

    async def record(self) -> None:
        """Writes the applied record; returns when it is confirmed."""
        applied, safe = self._replica.tracker.applied, self._replica.safe
        began = time.monotonic()
        body = applied_record(self._replica, self.checkpoints).SerializeToString()
        # With very many queues it takes its time, in which nothing else is done.
        self._pause_s = min(max(RECORD_INTERVAL_S, RECORD_PAUSE_TIMES * (time.monotonic() - began)), RECORD_INTERVAL_MAX_S)
        await self.streams.write_applied(body)
        self._recorded = (applied, safe)
        self._replica.recorded = max(self._replica.recorded, applied)

    def _consider_checkpoint(self) -> None:
        settings = self._settings
        entries = self._node.log.end - self.checkpoints.last
        size = min(settings.checkpoint_bytes, settings.log_bytes_max // CHECKPOINTS_PER_LOG_MIN)
        due = entries >= settings.checkpoint_entries or self._replica.bytes_since_checkpoint >= size
        if due and self._node.serving and entries > 1 and not self._replica.checkpoint():
            log.warning("the state of the log has become too large for a checkpoint: a restart will read more of it")

    async def _locate_checkpoint(self) -> None:
        point = self.checkpoints.to_locate(self._node.durable)
        if point is not None:
            offset = await self.streams.locate(point.sequence, point.leader)
            if offset is not None:
                self.checkpoints.located(point, offset)


def taken_out(node: Node) -> str:
    """Whom this primary took out of the set, and why; empty if nobody."""
    return "; ".join(f"{node.name(number)} was taken out of the set, as {peer.left}" for number, peer in node.peers.items() if peer.left)
