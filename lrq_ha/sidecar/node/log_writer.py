"""The own log's writer: the core's batches go into its stream, and the state for a restart into the applied record.

Rules:

- A batch is written once, as the bytes that are pushed, too; a pushed batch is written as its leader made it.
- The applied record is written a little later, and only after a change. It names a CHECKPOINT only once its offset is known (R7).
- Memory, CHECKPOINTs and retention follow each batch that is written, and each cut.
- A CHECKPOINT comes as soon as the log has grown enough, by bytes as the broker counts them: a small log would have dropped the last one
  within the pause between two looks. But CHECKPOINTs take no more than a part of the log, however large they are: with very many queues they come
  less often. A CHECKPOINT or an applied record that will be too large is reported before it is.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

from broker_plugin.log import codec
from broker_plugin.log.streams import APPLIED_RECORD_BYTES_MAX, LARGER_LOG, Streams
from lrq_ha.errors import IllegalEvent
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.checkpoints import Checkpoints
from lrq_ha.replication.events import CutTail, EntryKind, OwnConfirmed, WriteBatch, WriteFence
from lrq_ha.replication.node import Node
from lrq_ha.replication.retention import RECORD_BYTES
from lrq_ha.replication.subscription import RoutingQueue, StoredBatch
from lrq_ha.routing.names import ROUTING_VHOST

from ..config import Config
from ..counts import BatchTimes, Counts
from .core import Core
from .recovery import applied_record, rebuild
from .retention import Watch
from .task_scope import TaskScope

log = logging.getLogger("lrq_ha.node")

LOG_ID_BYTES = 16
RECORD_INTERVAL_S = 0.2
RECORD_INTERVAL_MAX_S = 2.0
RECORD_PAUSE_TIMES = 20
CHECKPOINT_SHARE_MAX = 0.5  # of the bytes between two
CHECKPOINT_GROWTH = 4  # the log grows by this many times the CHECKPOINT's size, if that is large, before the next one
OUTGROWN_TIMES = 1.25  # the log's bytes are counted as up to a tenth more than they are
DANGER_SHARE = 0.5  # of the largest CHECKPOINT, or applied record: operators are warned


class LogWriter:
    """Writes the own log and the applied record.

    Args:
        config: The node's configuration.
        core: The core with this log.
        life: Ended when the streams can be written no more.
        shut_out, on_blocked: See Streams.
        counts: Of the process.

    Attributes:
        streams: The streams of the log.
        memory: Its newest batches.
        checkpoints: Their offsets in it.
        watch: The log's head and its receivers.
        new_log_id: The log's identity, if it has none yet.
    """

    def __init__(self, config: Config, core: Core, life: TaskScope, shut_out: int, on_blocked: Callable[[str], None], counts: Counts) -> None:
        r = config.replication
        broker = config.broker_address(ROUTING_VHOST)
        self.streams = Streams(
            config.node.group,
            broker,
            r.log_bytes_max,
            self._written,
            life.end,
            receive_bytes_max=config.receive.bytes_max,
            shut_out=shut_out,
            on_blocked=on_blocked,
        )
        self.memory = RoutingQueue(r.memory_bytes_max)
        self._counts = counts
        self._times = BatchTimes(counts)
        self.checkpoints = Checkpoints()
        self.new_log_id = secrets.token_bytes(LOG_ID_BYTES)
        self.watch = Watch(core.node, r.log_bytes_max, self.streams.reader.head, core.feed)
        self._settings = r
        self._core = core
        self._node = core.node
        self._replica = core.replica
        self._recorded = (-1, -1)
        self._answered_at = time.monotonic()  # while a write waits for the broker's confirm
        self._pause_s = RECORD_INTERVAL_S
        self._grown = 0  # bytes of the log since the last CHECKPOINT, or since one was tried
        self._tried_at = 0  # the end of the log then
        self._record_bytes = 0
        self._said = self._record_said = ""
        self._replica.checkpoint_bytes_max = min(self._replica.checkpoint_bytes_max, int(CHECKPOINT_SHARE_MAX * r.log_quarter_bytes))
        self._replica.log_marks = self.watch.retention.export
        self._replica.progress.lies_far_back = lambda: self.watch.retention.behind(core.node.applied) > r.log_quarter_bytes

    async def rebuild(self) -> None:
        """Opens the streams and fills the core from them. Raises LrqError."""
        await self.streams.open()
        await rebuild(self._replica, self.streams, self.memory, self.checkpoints, self.watch.retention)
        self._grown = self.watch.retention.behind(self.checkpoints.last)

    def silent_s(self) -> float:
        """Seconds that the broker has confirmed no write to the log; 0 if none waits for a confirm."""
        return time.monotonic() - self._answered_at if self.streams.waiting else 0.0

    # ---- effects -----------------------------------------------------------------------------------------------------

    def write(self, effect: WriteBatch) -> None:
        """Writes a batch. Raises IllegalEvent if it does not start at the sequence assigned to it."""
        header = effect.batch
        if effect.kind is EntryKind.ENTRIES and isinstance(effect.body, bytes):  # a push: the identical bytes, the leader's index
            body = effect.body
            pushed = list(pb.Batch.FromString(body).runs)
            if header.first == self._node.log.base:  # never cut: the first batch of a log that begins here
                self._replica.begin(header.first, pushed[0].checkpoint)
            self._replica.index_batch(header.first, pushed)
            runs: list[pb.Run | codec.Publishes] = [*pushed]
        else:
            runs = self._own_runs(effect)
            body = codec.batch_body(header, time.time_ns() // 1000, runs)
            self._replica.batches_in_flight += 1
        self._begin_waiting()
        self.streams.write_batch(header, body, self._node.safe)
        self._times.written(header.last if self._node.leading == header.leader else 0)
        self._counts.batch_written(header.last - header.first + 1, len(body), runs)
        self.memory.append(StoredBatch(header, body))
        self.watch.appended(header.last, len(body))
        was_due = self._checkpoint_due()
        if codec.checkpoint_of(runs) is not None:
            self.checkpoints.noted(self._node.log.start_point(header))
            self._grown, self._tried_at = 0, header.last
        else:
            self._grown += len(body) + RECORD_BYTES
        if not was_due and self._checkpoint_due():
            asyncio.get_running_loop().call_soon(self._consider_checkpoint)

    def _own_runs(self, effect: WriteBatch) -> list[pb.Run | codec.Publishes]:
        """The runs of a batch of this leader."""
        header = effect.batch
        if effect.kind is EntryKind.ENTRIES:
            given: tuple[int, list[pb.Run | codec.Publishes]] = effect.body  # type: ignore[assignment]
            first, runs = given
            if first != header.first:
                raise IllegalEvent(f"entries given out from {first} on would be written from {header.first} on")
            return runs
        members = sorted(header.sets[0][1])
        log.info("%s", "; ".join(filter(None, (f"in the set: {self._node.names(members)}", taken_out(self._node)))))
        self._replica.progress.done_when_safe(header.first, header.last)
        if effect.kind is not EntryKind.MARKER:
            former = self._node.log.sets[-2][1] if len(self._node.log.sets) > 1 else frozenset()
            self._counts.removals.update(map(self._node.name, former.difference(members)))
            return [pb.Run(members=pb.Members(nodes=members))]
        index = self._replica.index
        index.log_id = index.log_id or self.new_log_id
        return [pb.Run(marker=pb.Marker(nodes=members, writer=codec.WRITER, log_id=index.log_id))]

    def write_fence(self, effect: WriteFence) -> None:
        """Writes a FENCE."""
        self._begin_waiting()
        self._times.written()
        self.streams.write_fence(effect.epoch, effect.out_end)

    def _begin_waiting(self) -> None:
        if not self.streams.waiting:
            self._answered_at = time.monotonic()

    def _written(self, count: int) -> None:
        self._answered_at = time.monotonic()
        self._times.confirmed(count)
        self._replica.batches_in_flight = max(0, self._replica.batches_in_flight - count)
        self._core.feed(OwnConfirmed(count))
        self._replica.own_confirmed()

    def safe_advanced(self, safe: int) -> None:
        """Everything up to `safe` is on each in-sync node."""
        self._times.safe_advanced(safe)

    def cut(self, effect: CutTail) -> None:
        """Forgets the end of the log."""
        local = "; publishes with local completion among them had been confirmed" if self._node.settings.local_completion else ""
        log.warning("entries from %d on were never safe and fall out of the log%s", effect.first, local)
        self._replica.cut(effect.first)
        self.memory.cut(effect.first)
        self._times.cut(effect.first)
        self.checkpoints.cut(effect.first)

    # ---- records -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Writes the applied record after a change, and a CHECKPOINT when the log has grown enough."""
        while True:
            await asyncio.sleep(self._pause_s)
            self._consider_checkpoint()
            await self._locate_checkpoint()
            if (self._replica.progress.tracker.applied, self._replica.progress.safe) != self._recorded:
                await self.record()
            declared_again = not (self._replica.forgotten or self._replica.forgotten_queues)
            if self.streams.lost_host and not self._node.lost_host and declared_again:
                await self.streams.mark_boot()

    async def record(self) -> None:
        """Writes the applied record; returns when it is confirmed."""
        applied, safe = self._replica.progress.tracker.applied, self._replica.progress.safe
        began = time.monotonic()
        body = applied_record(self._replica, self.checkpoints).SerializeToString()
        # With very many queues the record takes long, and blocks the event loop.
        self._pause_s = min(max(RECORD_INTERVAL_S, RECORD_PAUSE_TIMES * (time.monotonic() - began)), RECORD_INTERVAL_MAX_S)
        self._record_bytes = len(body)
        self._record_said = self._say(self.record_trouble(), self._record_said)
        await self.streams.write_applied(body)
        self._recorded = (applied, safe)
        self._replica.barrier.recorded = max(self._replica.barrier.recorded, applied)

    def _checkpoint_due(self) -> bool:
        settings = self._settings
        least, most = CHECKPOINT_GROWTH * self._replica.checkpoint_bytes, settings.log_quarter_bytes
        entries = self._node.log.end - max(self.checkpoints.last, self._tried_at)
        many = entries >= settings.checkpoint_entries and self._grown >= min(least, most)
        return entries > 1 and (many or self._grown >= min(max(settings.checkpoint_bytes, least), most))

    def _consider_checkpoint(self) -> None:
        if self._node.serving and self._checkpoint_due():
            self._replica.flush()
            self._grown, self._tried_at = 0, self._node.log.end
            self._replica.checkpoint()
            self._said = self._say(self.trouble(), self._said)

    @property
    def record_bytes(self) -> int:
        """Size of the last applied record; 0: none was written yet."""
        return self._record_bytes

    def trouble(self) -> str:
        """Text: a CHECKPOINT is too large, or soon will be; empty if it is not."""
        size, limit = self._replica.checkpoint_bytes, self._replica.checkpoint_bytes_max
        if size <= DANGER_SHARE * limit:
            return ""
        what = f"what the log declares and remembers takes {size} bytes, and a checkpoint at most {limit}"
        how = f"have fewer queues, bindings or producers, or {LARGER_LOG}"
        if size <= limit:
            return f"checkpoints become too large: {what}: {how}"
        return f"the log gets no checkpoints any more: {what}; a restart reads all since the last one, and fails once the broker drops that: {how}"

    def size_trouble(self) -> str:
        """Text: the broker may keep less of the log than it should, or keeps more; empty if it does not, as far as is known.

        AMQP does not show policies: a policy that has changed the size shows only when the log has become larger than it was made for.
        """
        made, wanted = self.streams.declarer.made_with.get(self.streams.log_queue), self._settings.log_bytes_max
        if made is None:
            return ""
        held = self.watch.retention.behind(max(0, self._node.head - 1))
        outgrown = held > OUTGROWN_TIMES * min(made, wanted)
        if outgrown == (made < wanted):
            return ""
        policy = "unless a policy on its broker has changed that (see docs/operations/capacity.md), LOG LEFT is not true"
        return f"its log was made for {made} bytes, and log_bytes_max is {wanted}: {policy}"

    def record_trouble(self) -> str:
        """Text: the applied record is too large, or soon will be; empty if it is not."""
        size, limit = self._record_bytes, APPLIED_RECORD_BYTES_MAX
        if size <= DANGER_SHARE * limit:
            return ""
        parts = self._replica.record_parts
        vhost, queue = max(parts, key=lambda key: len(parts[key][1]), default=("", ""))
        what = f"what this node knows of messages that have left their queues takes {size} bytes, and should take {limit} at most"
        how = f"delete queues when they are empty, and declare them again (most is of '{queue}' in vhost '{vhost}'), or rebuild the node"
        if size <= limit:
            return f"applied records become too large: {what}: {how}"
        return f"applied records are too large: {what}; a restart may find none that is whole, and fail: {how}"

    @staticmethod
    def _say(trouble: str, before: str) -> str:
        """Warns of a new trouble; returns the trouble."""
        if trouble and before[:40] != trouble[:40]:
            log.warning("%s", trouble)
        return trouble

    async def _locate_checkpoint(self) -> None:
        point = self.checkpoints.to_locate(self._node.durable)
        if point is not None:
            offset = await self.streams.reader.locate(point.sequence, point.leader)
            if offset is not None:
                self.checkpoints.located(point, offset)


def taken_out(node: Node) -> str:
    """The nodes that this primary took out of the set, and why; empty if there are none."""
    out = {number: peer for number, peer in node.peers.items() if peer.left and number not in node.log.members}
    return "; ".join(f"{node.name(number)} was taken out of the set, as {peer.left}" for number, peer in out.items())
