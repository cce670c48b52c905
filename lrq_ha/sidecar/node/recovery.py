"""Rebuilds a node from its broker's streams (R7): the applied record first, then the log from the CHECKPOINT that the record names.

Rules:

- The new generation is on record before anything is published.
- The record's offset must hold that very CHECKPOINT: a broker that lost its last writes may hold another record there, or none.
  If it is not there, the log is read from its first record.
- A log whose beginning the broker has dropped is read from the first CHECKPOINT that is left. All entries behind R must be there.
- An entry that only the record knows as refused, because the host lost the end of the log, is published again, with all entries behind it. If the
  record goes beyond the log's end, the whole rest of the log is read for its refusals: they may stand before the CHECKPOINT.
- A broker may have forgotten non-durable queues and exchanges when it went down. Those that the log declares up to R are declared again, before
  anything is published by them. Queues only if this node follows: for a primary's queue that has gone with its messages, the length reconciler
  informs the others.
- A node that has applied nothing may begin at any CHECKPOINT behind which everything live stands (R17).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from broker_plugin.log import codec
from broker_plugin.log.definitions import rows_of
from broker_plugin.log.log_reader import OFFSET
from broker_plugin.log.replica import Entry, Replica
from broker_plugin.log.streams import Streams
from lrq_ha.errors import SET_UP_ANEW, LrqError
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import AppliedRecord, AppliedTracker, Generations, QueueRecord, VisitRecord
from lrq_ha.replication.checkpoints import Checkpoints, StartPoint
from lrq_ha.replication.delivery_filter import DeliveryFilter
from lrq_ha.replication.log import Acceptance, BatchHeader, LogIndex, LogState
from lrq_ha.replication.positions import RangeSet
from lrq_ha.replication.retention import Retention
from lrq_ha.replication.subscription import RoutingQueue, StoredBatch

log = logging.getLogger("lrq_ha.node")


async def rebuild(replica: Replica, streams: Streams, memory: RoutingQueue, checkpoints: Checkpoints, retention: Retention) -> None:
    """Fills `replica`, its core, `memory`, `checkpoints` and `retention`, which are new.

    Raises:
        LrqError: The log no longer holds every entry that this node has to apply, or the broker cannot be read.
    """
    last, tallies = await read_applied(streams)
    for tally in tallies:
        replica.index.tallies.restored(tally)
    replica.index.generations = Generations(last.generations)
    replica.index.generations.opened(last.applied, streams.generation)
    replica.index.filter = DeliveryFilter.restored(replica.index.generations, last.queues, last.refused, last.known)
    replica.index.filter.reached = replica.reached
    replica.progress.tracker = AppliedTracker(last.applied)
    replica.begins_at = last.base
    reading = _LogReading(replica, memory, checkpoints, retention, last.start)
    try:
        await _read_from(streams, reading.take, last.start)
        reading.ended()
    except _NotThere:
        log.warning(
            "the checkpoint at entry %d is not where the applied record says: the whole log is read", last.start.sequence if last.start else 0
        )
        reading = _LogReading(replica, memory, checkpoints, retention, None)
        await streams.read(streams.log_queue, reading.take)
        reading.ended()
    # A host that went down may have lost the end of the log and kept the record (R16).
    applied = min(max(last.applied, replica.begins_at - 1), replica.node.log.end)
    if not replica.node.log.end:
        replica.begins_at = 0
    upto = applied
    replica.index.filter.lose(replica.node.log.end)
    refused = 0
    if last.known > replica.node.log.end:
        refusals = _Refusals(replica.node.log)
        await streams.read(streams.log_queue, refusals.take)
        refused = replica.index.filter.lose_refusals(refusals.first, refusals.kept)
    if 0 < refused <= applied:
        applied = refused - 1
        again = _ReadingAgain(replica, applied, upto)
        await streams.read(streams.log_queue, again.take)
        again.ended()
    replica.index.generations.cut(applied)
    replica.progress.tracker = AppliedTracker(applied)
    replica.progress.safe_advanced(applied)
    replica.index.let_go(applied)
    replica.barrier.recorded = applied
    replica.index.tallies.lose(replica.node.log.end)
    if streams.lost_host and applied:
        replica.forgotten, replica.forgotten_queues = replica.declared.definitions.forgotten()
    replica.index.dedup.completed(applied)
    await streams.write_applied(applied_record(replica, checkpoints).SerializeToString())
    log.info(
        "rebuilt: log to %d (%d batches read from entry %d on), applied to %d, generation %d",
        replica.node.log.end,
        reading.batches,
        reading.first,
        last.applied,
        streams.generation,
    )


async def read_applied(streams: Streams) -> tuple[AppliedRecord, Sequence[pb.Tally]]:
    """The last applied record, and the tallies in it. Raises LrqError if the broker cannot be read."""
    record = AppliedRecord(0, None, (), (), b"")
    tallies: Sequence[pb.Tally] = ()

    def take(headers: Mapping[str, Any], body: bytes) -> None:
        nonlocal record, tallies
        if codec.OPEN not in headers:
            parsed = pb.Applied.FromString(body)
            record, tallies = _from_pb(parsed), parsed.tallies

    await streams.read(streams.applied_queue, take, "last")
    if not record.generations:  # starts that got no further than their OPEN stand behind it
        await streams.read(streams.applied_queue, take)
    return record, tallies


async def _read_from(streams: Streams, take: Callable[[Mapping[str, Any], bytes], None], start: StartPoint | None) -> None:
    """Reads the own log from `start` on, or from its first record. Raises _NotThere if it ends before `start`."""
    if start is not None:
        # A reader from beyond the end is given nothing until the stream has grown so far, not even its OPEN.
        opened = await streams.read(streams.log_queue, lambda _headers, _body: None, "last")
        if opened <= start.offset:
            raise _NotThere
    await streams.read(streams.log_queue, take, start.offset if start else "first")


class _NotThere(Exception):
    """The applied record's offset does not hold its CHECKPOINT."""


class _LogReading:
    """One reading of the own log. `expected`: the CHECKPOINT that it begins at; None: it begins at the first record that is left."""

    def __init__(
        self, replica: Replica, memory: RoutingQueue, checkpoints: Checkpoints, retention: Retention, expected: StartPoint | None
    ) -> None:
        self._replica = replica
        self._retention = retention
        self._node = replica.node
        self._memory = memory
        self._checkpoints = checkpoints
        self._expected = expected
        self._skipped_upto = 0  # last sequence before the first CHECKPOINT of a log without its beginning
        self._skipped_top = 0
        self._software = "of another version"  # that wrote what is read now
        self.batches = 0
        self.first = 0

    def take(self, headers: Mapping[str, Any], body: bytes) -> None:
        """One record of the stream, in order."""
        if codec.OPEN in headers:
            self._software = str(headers.get(codec.SOFTWARE, self._software))
            return
        if codec.FENCE in headers:
            if self._expected is not None:
                raise _NotThere
            self._skipped_top = max(self._skipped_top, int(headers[codec.FENCE]))
            self._node.read_fence(int(headers[codec.FENCE]), int(headers[codec.FENCE_OUT]))
            return
        if codec.LAST not in headers:
            raise codec.unknown_record(self._node.log.end, self._software)
        batch, _ = codec.parse_batch(dict(headers))
        runs = pb.Batch.FromString(body).runs
        if not self.first and not self._begin(batch, codec.checkpoint_of(runs)):
            return
        self._accept(batch, body, runs, int(headers[OFFSET]))

    def _begin(self, batch: BatchHeader, entry: pb.Checkpoint | None) -> bool:
        """Whether the log can be read from this batch on. `entry`: the CHECKPOINT if the batch is one."""
        expected = self._expected
        if expected is not None:
            if entry is None or (batch.first, batch.epoch, batch.leader) != (expected.sequence, expected.epoch, expected.leader):
                raise _NotThere
            self._restore(batch, entry, expected.in_set, expected.out_since, expected.base)
        elif batch.first > 1:
            applied = self._replica.progress.tracker.applied
            begins = batch.begins_renewal and applied == 0
            if entry is None or (batch.first > applied + 1 and not begins) or batch.leader < self._skipped_top:
                self._skipped_upto, self._skipped_top = batch.last, max(self._skipped_top, batch.leader)
                return False
            # This node's membership in the set stood in the dropped part: a leader has to tell it again.
            is_base = begins or batch.first == self._replica.begins_at
            self._restore(batch, entry, in_set=False, out_since=(batch.leader, batch.first), base=batch.first if is_base else 0)
            if begins:
                self._replica.begin(batch.first, entry)
        self._expected = None
        self.first = batch.first
        return True

    def _restore(self, batch: BatchHeader, entry: pb.Checkpoint, in_set: bool, out_since: tuple[int, int], base: int) -> None:
        state = replace(state_before(entry), top=batch.leader, end=batch.first - 1, in_set=in_set)
        self._node.log.restore(state, out_since, base)
        self._replica.index.restore(batch.first, entry)
        if batch.first <= self._replica.progress.tracker.applied + 1:
            self._replica.entered.update(vhost for vhost, _ in rows_of(entry))
        self._retention.restore([(mark.sequence, mark.bytes) for mark in entry.marks])

    def _accept(self, batch: BatchHeader, body: bytes, runs: Sequence[pb.Run], offset: int) -> None:
        self.batches += 1
        end_before = self._node.log.end
        if self._node.read_batch(batch) is not Acceptance.APPEND:
            return
        if batch.first <= end_before:
            self._replica.cut(batch.first)
            self._memory.cut(batch.first)
            self._checkpoints.cut(batch.first)
        self._replica.index_batch(batch.first, runs)
        self._memory.append(StoredBatch(batch, body))
        self._retention.appended(batch.last, len(body))
        if codec.checkpoint_of(runs) is not None:
            self._checkpoints.noted(self._node.log.start_point(batch, offset))

    def ended(self) -> None:
        """The own OPEN has come. Raises LrqError if an entry that must be applied is not in the log any more."""
        if self._expected is not None:
            raise _NotThere
        if self._skipped_upto and not self.first:
            raise LrqError(
                f"the log no longer reaches back to entry {self._replica.progress.tracker.applied + 1}, which this node has not applied: "
                f"it holds no checkpoint up to there and ends at {self._skipped_upto}",
                todo=SET_UP_ANEW,
            )


class _Refusals:
    """A second read of the own log, for its refusals (`kept`). `first`: its first entry that is left; 0: none."""

    def __init__(self, log: LogIndex) -> None:
        self.first = 0
        self.kept = RangeSet()
        self._log = log

    def take(self, headers: Mapping[str, Any], body: bytes) -> None:
        """One record of the stream, in order."""
        if codec.OPEN in headers or codec.FENCE in headers:
            return
        batch, _ = codec.parse_batch(dict(headers))
        if not self._log.holds(batch):
            return
        self.first = min(self.first or batch.first, batch.first)
        for run in pb.Batch.FromString(body).runs:
            for first, last in RangeSet.from_flat(run.refused.sequences):
                self.kept.add(first, last)


class _ReadingAgain:
    """A second read of the own log, for entries to apply although the record has them as applied: entries after `applied`, up to `upto`."""

    def __init__(self, replica: Replica, applied: int, upto: int) -> None:
        self._replica = replica
        self._log = replica.node.log
        self._applied = applied
        self._upto = upto
        self._found: dict[int, Entry] = {}  # by first sequence: a batch may stand there twice

    def take(self, headers: Mapping[str, Any], body: bytes) -> None:
        """One record of the stream, in order."""
        if codec.OPEN in headers or codec.FENCE in headers:
            return
        batch, _ = codec.parse_batch(dict(headers))
        if batch.last <= self._applied or batch.first > self._upto or not self._log.holds(batch):
            return
        for entry in self._replica.entries_of(batch.first, pb.Batch.FromString(body).runs):
            if self._applied < entry.last <= self._upto:
                self._found[entry.first] = entry

    def ended(self) -> None:
        """The found entries wait for the applier, before those that wait already."""
        self._replica.wait_first(sorted(self._found.values(), key=lambda entry: entry.first))


def state_before(entry: pb.Checkpoint) -> LogState:
    """The state of the log before a CHECKPOINT, as the CHECKPOINT describes it."""
    epochs, sets = codec.history_from_pb(entry)
    return LogState(epochs=epochs, sets=sets, renewals=tuple((r.sequence, r.renewal) for r in entry.renewals), record=entry.record)


def applied_record(replica: Replica, checkpoints: Checkpoints) -> pb.Applied:
    """The applied record as of now (R7)."""
    queues, refused = replica.index.filter.export()
    tallies = replica.index.tallies.export(replica.progress.tracker.applied)
    record = pb.Applied(applied=replica.progress.tracker.applied, refused=refused, base=replica.begins_at, tallies=tallies)
    record.known = replica.index.filter.known
    start = checkpoints.start(replica.progress.tracker.applied)
    if start is not None:
        out_epoch, out_end = start.out_since
        record.start.CopyFrom(
            pb.StartPoint(
                sequence=start.sequence,
                epoch=start.epoch,
                leader=start.leader,
                offset=start.offset,
                in_set=start.in_set,
                out_epoch=out_epoch,
                out_end=out_end,
                base=start.base,
            )
        )
    record.generations.extend(pb.Generation(applied=a, generation=g) for a, g in replica.index.generations.table)
    before, parts = replica.record_parts, {}
    for q in queues:
        known = before.get((q.vhost, q.queue))
        parts[q.vhost, q.queue] = known if known is not None and known[0] is q else (q, _to_pb(q).SerializeToString())
    replica.record_parts = parts
    record.MergeFromString(b"".join(part for _, part in parts.values()))
    return record


def _to_pb(q: QueueRecord) -> pb.Applied:
    """A record of one queue only: several such records concatenated are one record."""
    part = pb.Applied()
    queue = part.queues.add(
        vhost=q.vhost, queue=q.queue, done=q.done, moved=q.moved, due=q.due, purged=q.purged, departed=q.departed, spared=q.spared
    )
    queue.visits.extend(pb.PendingVisit(origin=v.origin, visit=v.visit, dequeued=v.dequeued, positions=v.positions) for v in q.visits)
    return part


def _from_pb(record: pb.Applied) -> AppliedRecord:
    queues = tuple(
        QueueRecord(
            q.vhost,
            q.queue,
            q.done,
            q.moved,
            q.due,
            q.purged,
            tuple(VisitRecord(v.origin, v.visit, v.dequeued, v.positions) for v in q.visits),
            q.departed,
            q.spared,
        )
        for q in record.queues
    )
    s = record.start
    start = StartPoint(s.sequence, s.epoch, s.leader, s.offset, s.in_set, (s.out_epoch, s.out_end), s.base) if record.HasField("start") else None
    generations = tuple((g.applied, g.generation) for g in record.generations)
    return AppliedRecord(record.applied, start, generations, queues, record.refused, record.base, record.known)
