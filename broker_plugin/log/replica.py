"""A node's log and its state, for the door and the applier: the entries appended, and those that wait for the
applier. No sockets of its own.

`index` has the state of the entries, `progress` the safe and applied positions, `delivery_history` the messages that
clients hold. Declarations pass the `barrier`.

Rules:
- Entries get their sequence at once and go out in batches: the entries of one turn of the event loop are one batch,
  and while enough batches are on their way the next one grows (group commit).
- Every entry is indexed once, in log order, wherever it comes from (own append, push, own stream at start).
- On a backup, and while an epoch is being taken, entries wait in `to_apply` until the applier has brought them to the
  broker. On an active node the client's connection brings its publishes, the applier brings views, and every other
  entry is done when it is safe.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lrq_ha.errors import NotPrimary
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import AppliedTracker, QueueRecord
from lrq_ha.replication.dead_letters import Deaths, origin_of, visit_of
from lrq_ha.replication.levels import Level, Levels
from lrq_ha.replication.node import Node
from lrq_ha.replication.positions import RangeSet, owner_of
from lrq_ha.replication.queues import QueueKey
from lrq_ha.replication.roles import Role

from ..amqp import encode, frames
from ..amqp.declarations import first_name
from . import codec
from .barrier import Barrier
from .catalog import Catalog
from .definitions import Row
from .delivery_history import DeliveryHistory
from .holds import QueueHold
from .index import Index
from .messages import Delivery, Settled
from .progress import Progress
from .shortfall import Shortfall
from .tally import QueueTallies
from .undeclared_targets import UndeclaredTargets

BATCH_BYTES_MAX = 256 << 10
BATCHES_IN_FLIGHT_MAX = 4
SPARED_RANGES_MAX = 1_000  # of a purge; beyond this, some of the messages that it took are spared too
CHECKPOINT_BYTES_MAX = 64 << 20  # sent in parts, as the largest transaction is
VIEWS = ("transmission", "reception", "status")
PASSED_OVER_KEPT_MAX = 10_000
LEVELS = {Level.ALL: pb.LEVEL_ALL, Level.CONFIGURATION: pb.LEVEL_CONFIGURATION, Level.NONE: pb.LEVEL_NONE}
OPERATIONS = ("dequeue", "reject", "moved", "refused", "purge")


@dataclass(slots=True)
class Entry:
    """A run of entries that waits for the applier: `count` sequences from `first` on. `since`: when it came (monotonic seconds)."""

    first: int
    count: int
    run: pb.Run
    size: int
    since: float

    @property
    def last(self) -> int:
        return self.first + self.count - 1


class Replica:
    """The log of this node, with its index, its progress and its waiting entries.

    Args:
        node: The pure core.
        levels: How much of queues and exchanges is replicated, by their names.
        emit: Carries out the effects of an append (Node.handle); gets first sequence, number of entries, runs.
        shortfall: Of the previous incarnation.

    Attributes:
        declared: The queues and exchanges known.
        index: The state of the entries.
        progress: The safe and applied positions, and the waiters for them.
        given_out: Messages that clients hold, or have held.
        barrier: In front of declarations.
        undeclared: Targets of clients' publishes that the log does not declare.
        shortfall: The log's needs that this node's broker lacks.
        holds: Says why a receive queue takes no batch now; empty: it takes them.
        moving: Holds at this node's door until these queues have been moved (R17).
        to_apply, to_apply_bytes: Entries that wait for the applier.
        entered: Vhosts that this broker has, or had once.
        applying: The first of the entries that the applier is applying; 0: none.
        takes: Whether appends get into the core. False when the incarnation is over: unfinished work of its
            connections is the next one's.
        forgotten: Declarations that the applier carries out first, (vhost, method), as the broker may have lost them.
        forgotten_queues: As `forgotten`, of queues, if this node follows. Of a leader's queues that went with their
            messages, the length reconciler tells the others.
        begins_at: The CHECKPOINT at which this node's log began (R17); 0: at entry 1.
        epoch_from: Everything up to it is of earlier epochs, while this node leads.
        last_operation: The last operation's entry of this node.
        stamp_affixes: The parts before and behind the sequence in the stamps of this epoch.
        checkpoint_bytes: Size of the last CHECKPOINT made here, also if it was too large.
        checkpoint_bytes_max: Largest size of a CHECKPOINT.
        log_marks: Size of the log at some entries, see Retention.
        record_parts: Of the last applied record.
    """

    def __init__(
        self,
        node: Node,
        levels: Levels,
        emit: Callable[[int, int, list[pb.Run | codec.Publishes]], None],
        shortfall: Shortfall | None = None,
    ) -> None:
        self.node = node
        self._emit = emit
        self.declared = Catalog(levels)
        self.index = Index(self.declared)
        self.progress = Progress(node, self.index)
        self.given_out = DeliveryHistory()
        self.shortfall = Shortfall(shortfall)
        self.undeclared = UndeclaredTargets(self.declared)
        self.holds: Callable[[str], str] = lambda _queue: ""
        self.moving: dict[QueueKey, QueueHold] = {}
        self.barrier = Barrier(self.progress, self.moving, self.flush, lambda: self.end)
        self.to_apply: deque[Entry] = deque()
        self.to_apply_bytes = 0
        self.applying = 0
        self.entered: set[str] = set()
        self.index.filter.reached = self.reached
        self.takes: Callable[[], bool] = lambda: True
        self.forgotten: list[Row] = []
        self.forgotten_queues: list[Row] = []
        self.begins_at = 0
        self.epoch_from = 0
        self.last_operation = 0
        self.checkpoint_bytes = 0
        self.checkpoint_bytes_max = CHECKPOINT_BYTES_MAX
        self.batches_in_flight = 0
        self.stamp_affixes = (b"", b"")
        self.log_marks: Callable[[], Sequence[tuple[int, int]]] = lambda: ()
        self.record_parts: dict[QueueKey, tuple[QueueRecord, bytes]] = {}
        self._passed_over: list[tuple[int, list[tuple[str, int, int]]]] = []  # while this node leads: (entry, its IDs)
        self._open: list[pb.Run | codec.Publishes] = []
        self._open_first = 0
        self._open_count = 0
        self._open_bytes = 0
        self._flush_scheduled = False

    # ---- state for clients' connections ------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self.node.serving and self.takes()

    @property
    def holds_confirms(self) -> bool:
        """Whether this primary still waits for its expected backups, and so confirms nothing yet."""
        return self.node.role is Role.RECOVERING

    @property
    def next_sequence(self) -> int:
        return self.node.log.end + self._open_count + 1

    @property
    def end(self) -> int:
        """Last sequence assigned."""
        return self.node.log.end + self._open_count

    @property
    def follows(self) -> bool:
        """Whether the last safe entries are another node's: then clients do not use this broker's queues."""
        epoch = self.node.log.epoch_at(min(self.progress.safe, self.node.log.end))
        return epoch > 0 and owner_of(epoch) != self.node.me

    def reached(self) -> int:
        """The entry that the applier has come to."""
        if self.applying:
            return self.applying - 1
        return self.to_apply[0].first - 1 if self.to_apply else self.progress.safe

    def begin_epoch(self, epoch: int) -> None:
        """The node leads `epoch`: sets the stamp of messages from now on."""
        self.epoch_from = self.node.log.end
        self.forgotten_queues = []
        self.index.tallies = QueueTallies()  # those were of the previous primary
        self.index.passes.count_no_more()  # an unseen message may have been requeued
        self.declared.here.clear()
        self.stamp_affixes = (b"%d." % epoch, b"/%d" % self.index.generations.newest)

    # ---- appending ---------------------------------------------------------------------------------------------------

    def append(self, run: pb.Run, count: int = 1, size: int = 64, *, apply: bool = False, contents: Sequence[bytes | memoryview] = ()) -> int:
        """Appends a run of entries; returns the first's sequence.

        Args:
            run: The entries.
            count: How many.
            size: Bytes, about.
            apply: The applier brings the publishes to the broker.
            contents: The frames of publishes, if they are not in `run`.

        Raises:
            NotPrimary: This node does not lead.
        """
        if not self.active:
            raise NotPrimary(f"node {self.node.name(self.node.me)} is not primary any more", retriable=True)
        first = self.next_sequence
        if not self._open_count:
            self._open_first = first
        self._open.append(codec.Publishes(run, contents) if contents else run)
        self._open_count += count
        self._open_bytes += size
        self.progress.appended(first + count - 1, size)
        kind = self.index.note(run, first, sweep=False)
        if kind in VIEWS or apply:
            self.to_apply.append(Entry(first, count, run, size, 0.0))
            self.to_apply_bytes += size
        elif kind == "enqueues":
            self.barrier.published(first + count - 1)
        else:
            self.progress.done_when_safe(first, first + count - 1)
            if kind == "topology" and frames.method_id(run.topology.method) == frames.QUEUE_DELETE:
                self.barrier.deleted((run.topology.vhost, first_name(run.topology.method)), first)
        if kind in OPERATIONS:
            self.last_operation = first
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_soon)
        return first

    def _flush_soon(self) -> None:
        self._flush_scheduled = False
        if self.batches_in_flight < BATCHES_IN_FLIGHT_MAX or self._open_bytes >= BATCH_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Sends the open batch out."""
        if self._open_count and self.active:
            first, count, runs = self._open_first, self._open_count, self._open
            self._open, self._open_count, self._open_bytes = [], 0, 0
            self._emit(first, count, runs)

    def own_confirmed(self) -> None:
        """A batch of the own stream was confirmed."""
        self.progress.durable_advanced()
        if self._open_count and self.batches_in_flight < BATCHES_IN_FLIGHT_MAX:
            self.flush()

    # ---- operations of clients and brokers ---------------------------------------------------------------------------

    def dequeue(self, queue: QueueKey, sequences: list[int], deaths: Deaths) -> int:
        """A client acked these; returns the entry's sequence."""
        return self._operate("dequeue", queue, sequences, deaths)

    def reject(self, queue: QueueKey, sequences: list[int], deaths: Deaths) -> int:
        """A client rejected these for good; returns the entry's sequence."""
        return self._operate("reject", queue, sequences, deaths)

    def _operate(self, kind: str, queue: QueueKey, sequences: list[int], deaths: Deaths) -> int:
        if kind == "reject":
            self.index.passes.stirred(min(sequences))
        self.given_out.settled(queue, sequences)
        origin = origin_of(deaths)
        if deaths:
            for sequence in sequences:  # R10: dead-letterings that the log lacks come first, in this batch
                for name, visit in self.index.filter.queue(queue).implied_moves(sequence, deaths):
                    if not self.declared.replicates((queue[0], name)):
                        continue  # each broker handles its own copies there
                    moved = pb.Moved(vhost=queue[0], queue=name, sequence=sequence, visit=visit, origin=origin)
                    self.append(pb.Run(moved=moved))
        run = pb.Run()
        op = run.dequeue if kind == "dequeue" else run.reject
        op.vhost, op.queue = queue
        op.sequences.extend(RangeSet.of(sequences).flat())
        op.visit = visit_of(queue[1], deaths)
        op.origin = origin
        return self.append(run)

    def gave_back(self, deliveries: Iterable[Delivery]) -> None:
        """Notes requeued messages."""
        for delivery in deliveries:
            self.index.gave_back(delivery.queue, delivery.sequence)
            self.given_out.gave_back(delivery.queue, delivery.sequence)

    def purge(self, queue: QueueKey, held: Iterable[int]) -> int:
        """The own broker has purged a queue, without the messages that clients held (sequences); returns the entry's sequence."""
        spared = RangeSet.of(sorted(held)).cover(SPARED_RANGES_MAX)
        return self.append(pb.Run(purge=pb.Purge(vhost=queue[0], queue=queue[1], before=self.next_sequence, spared=spared.flat())))

    def demand(self, queue: str, reason: str) -> int:
        """A full sync is wanted for a receive queue; returns the entry's sequence."""
        demand = pb.Demand(queue=queue, reason=reason)
        return self.append(pb.Run(demand=demand), 1, demand.ByteSize())

    def topology(self, vhost: str, entries: Iterable[tuple[bytes, Level]], declares: str | None = None) -> int:
        """A declaration succeeded on the own broker: its entries, each with a level; returns the last one's
        sequence. `declares`: a queue.
        """
        if declares is not None:
            self.declared.here.add((vhost, declares))
        return [self.append(pb.Run(topology=pb.Topology(vhost=vhost, method=m, level=LEVELS[level]))) for m, level in entries][-1]

    def refuse(self, settled: Iterable[Settled], *, unless_seen: bool = False) -> int:
        """The broker refused these publishes, or their fate is unknown: they count as dequeued everywhere, and
        their IDs are free again.

        Returns the sequence of the REFUSED entry; 0 if there is none.
        """
        ranges = RangeSet()
        for run in settled:
            ranges.add(run.sequence, run.sequence + run.publishes - 1)
        if unless_seen:
            unseen = RangeSet(span for each in ranges for span in self.progress.met.missing(*each))
            for span in [span for each in ranges for span in unseen.missing(*each)]:
                self.progress.applied(*span)
            ranges = unseen
        if not ranges or not self.active:
            return 0
        refused = pb.Refused(sequences=ranges.flat())
        for first, last in ranges:
            for producer, id_first, id_last in self.index.dedup.ids_of(first, last):
                refused.producers.add(producer=producer, ids=[id_first, id_last])
        # Not before REFUSED is safe: R must never pass an entry that could still fall out of the log, or a publish
        # whose refusal could.
        when = self.append(pb.Run(refused=refused))
        for first, last in ranges:
            self.progress.done_when_safe(first, last, when)
        return when

    def passes_over(self, sequence: int) -> None:
        """The applier publishes no copy of an entry, as the own broker refuses it or has no queue for it. Call
        before the entry counts as applied.
        """
        if not self.follows and len(self._passed_over) < PASSED_OVER_KEPT_MAX:
            self._passed_over.append((sequence, self.index.dedup.ids_of(sequence, sequence)))
            if self.active:
                self.refuse_passed_over()

    def refuse_passed_over(self) -> None:
        """The door opens: messages of this epoch that the broker did not take are refused, so that their IDs are free again."""
        passed, self._passed_over = self._passed_over, []
        if not passed:
            return
        refused = pb.Refused(sequences=RangeSet.of(sequence for sequence, _ in passed).flat())
        for _, ids in passed:
            for producer, first, last in ids:
                refused.producers.add(producer=producer, ids=[first, last])
        self.append(pb.Run(refused=refused))

    def doubt(self, runs: Sequence[tuple[int, pb.Run]]) -> None:
        """Logs a transaction again: it is in the log, so it has to be done, and whether the broker has done it is
        unknown.

        If a copy of any of its publishes has been seen, they count as applied. Else they are logged again, and copies
        of the first ones do not count.
        """
        spans = [(first, first + len(run.enqueues.lengths) - 1) for first, run in runs]
        if any(self.progress.met.intersects(*span) for span in spans):
            for span in spans:
                self.progress.applied(*span)
        elif self.active:
            self.refuse(Settled(0, last - first + 1, first, "", 0) for first, last in spans)
            for _, run in runs:
                self.append(run, len(run.enqueues.lengths), len(run.enqueues.frames), apply=True)

    def log_again(self, settled: Settled, first: int, run: pb.Run) -> None:
        """Logs publishes again that were confirmed with local completion: some or all of `run`, the entries from
        `first` on.

        Publishes of which a copy has been seen count as applied; each other one is logged again.
        """
        if not self.active:
            return
        missing = RangeSet()
        missing.add(settled.sequence, settled.sequence + settled.publishes - 1)
        for seen in self.progress.met:
            missing.remove(*seen)
        self.refuse([settled], unless_seen=True)
        for begin, end in missing:
            again = _part(run, begin - first, end - begin + 1)
            self.append(again, end - begin + 1, len(again.enqueues.frames), apply=True)

    # ---- checkpoints and renewals ------------------------------------------------------------------------------------

    def checkpoint(self, *, renewal: bool = False) -> bool:
        """Appends a CHECKPOINT, in a batch of its own. False: it exceeds `checkpoint_bytes_max`, and was left out.

        `renewal`: the CHECKPOINT begins a renewal (R17).
        """
        self.flush()
        entry = self.index.checkpoint(self.node.log.state(), renewal=renewal)
        entry.marks.extend(pb.LogMark(sequence=at, bytes=size) for at, size in self.log_marks())
        self.checkpoint_bytes = entry.ByteSize()
        if self.checkpoint_bytes > self.checkpoint_bytes_max or not self.active:
            return False
        self.append(pb.Run(checkpoint=entry), size=self.checkpoint_bytes)
        self.flush()
        return True

    def renewed(self, checkpoint: int, *, given_up: bool = False) -> int:
        """Ends the renewal that began with the CHECKPOINT `checkpoint`; returns the entry's sequence."""
        self.flush()
        sequence = self.append(pb.Run(renewed=pb.Renewed(checkpoint=checkpoint, given_up=given_up)))
        self.flush()
        return sequence

    def note_moving(self, queue: QueueKey, *, done: bool) -> int:
        """Notes that a queue's messages are moved behind this entry, or have been (R17); returns its sequence."""
        return self.append(pb.Run(moving=pb.Moving(vhost=queue[0], queue=queue[1], done=done)))

    def move(self, queue: QueueKey, content: tuple[bytes, bytes], sequence: int | None, deaths: Deaths) -> int:
        """Publishes a live message to its queue again, in one batch with the DEQUEUE of its old copy; returns the
        last entry's sequence.

        Args:
            content: Content header, without a position, and body.
            sequence, deaths: Of the old copy; None if it had no position.
        """
        frames_of = [encode.publish_method(1, "", queue[1]), *encode.content(1, *content, frames.FRAME_MAX_BYTES)]
        blob = b"".join(frames_of)
        run = pb.Run(enqueues=pb.Enqueues(vhost=queue[0], channel=1, frames=blob, lengths=[len(blob)]))
        last = self.append(run, size=len(blob), apply=True)
        return last if sequence is None else self.dequeue(queue, [sequence], deaths)

    # ---- entries from elsewhere --------------------------------------------------------------------------------------

    def begin(self, sequence: int, entry: pb.Checkpoint) -> None:
        """R17: this node's log begins with the CHECKPOINT at `sequence`, and was empty before."""
        self.progress.tracker = AppliedTracker(sequence - 1)
        self.begins_at = sequence
        self.index.restore(sequence, entry)
        self.node.applied = self.barrier.recorded = sequence - 1
        self.index.dedup.completed(sequence - 1)
        self.progress.safe_advanced(sequence - 1)

    def index_batch(self, first: int, runs: Iterable[pb.Run]) -> None:
        """Indexes a batch of another node or of the own stream. Entries behind R wait for the applier."""
        for entry in self.entries_of(first, runs):
            self.index.note(entry.run, entry.first, sweep=True)
            if entry.last > self.progress.tracker.applied:
                self.to_apply.append(entry)
                self.to_apply_bytes += entry.size
            elif entry.run.HasField("topology"):
                self.entered.add(entry.run.topology.vhost)

    @staticmethod
    def entries_of(first: int, runs: Iterable[pb.Run]) -> Iterator[Entry]:
        """The runs of a batch that begins with entry `first`, as the applier takes them."""
        now = time.monotonic()
        for run in runs:
            count = len(run.enqueues.lengths) or 1
            yield Entry(first, count, run, run.ByteSize(), now)
            first += count

    def wait_first(self, entries: Sequence[Entry]) -> None:
        """Puts entries in front of all that wait for the applier."""
        self.to_apply.extendleft(reversed(entries))
        self.to_apply_bytes += sum(entry.size for entry in entries)

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        self.index.cut(first)
        self.given_out.cut(first)
        while self.to_apply and self.to_apply[-1].first >= first:
            self.to_apply_bytes -= self.to_apply.pop().size


def _part(run: pb.Run, skip: int, count: int) -> pb.Run:
    """`count` publishes of a run, without the first `skip`."""
    whole = run.enqueues
    begin = sum(whole.lengths[:skip])
    lengths = whole.lengths[skip : skip + count]
    part = pb.Run(enqueues=pb.Enqueues(vhost=whole.vhost, channel=whole.channel, frames=whole.frames[begin : begin + sum(lengths)], lengths=lengths))
    if whole.producer:
        part.enqueues.producer, part.enqueues.id_first = whole.producer, whole.id_first + skip
    return part
