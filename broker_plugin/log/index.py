"""The state that the entries of a node's log add up to: every entry is noted once, in log order, wherever it comes
from.

Rules:
- IDs go into the dedup, operations into the filter, receptions into the sink, declarations into `catalog`. A cut
  takes its entries out again.
- A CHECKPOINT holds the state of all entries before it; a node that starts from a CHECKPOINT needs none of them.
- An entry of a kind that a newer version writes is refused, in another node's batch and in the own log (after a
  downgrade of this node).
"""

from __future__ import annotations

from collections.abc import Iterable

from lrq_ha import __version__
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import Generations
from lrq_ha.replication.deduplication import Dedup
from lrq_ha.replication.delivery_filter import DeliveryFilter
from lrq_ha.replication.log import LogState
from lrq_ha.replication.positions import RangeSet
from lrq_ha.replication.queue_filter import Kind
from lrq_ha.replication.queues import QueueKey
from lrq_ha.replication.renewal_progress import Passes
from lrq_ha.routing.commits import Commits
from lrq_ha.routing.sink import Sink
from lrq_ha.routing.statuses import Statuses, Told

from ..amqp import declarations, frames
from ..definitions.logged import LoggedObjects
from . import codec
from .catalog import Catalog
from .producers import ProducerKeys
from .retired_queues import RetiredQueues
from .tally import QueueTallies

EXPIRATION = 0x0100  # the flag of that property in a content header


class Index:
    """The state of the log's entries on this node.

    Attributes:
        declared: The queues and exchanges known.
        dedup: The replication IDs in the log.
        producers: Whose those are.
        generations, filter: Which copies count, and what becomes of each.
        sink, statuses: Receptions from other sites, and their statuses.
        commits: The positions of the receivers of this group's applications.
        tallies: The lengths of the primary's queues, for a backup; a primary knows its own.
        passes: Messages that a renewal has to move (R17).
        departures: Queues known for a while only.
        broker_objects: What operators have set at the primary's broker: users, policies and so on.
        last_publish: The last entry that is a publish.
        log_id: The identity of the group's log, by its last MARKER or CHECKPOINT; empty: it has none yet.
        writer: The version that has written the log, by its last MARKER or CHECKPOINT.
    """

    def __init__(self, declared: Catalog) -> None:
        self.declared = declared
        self.dedup = Dedup()
        self.producers = ProducerKeys()
        self.generations = Generations()
        self.filter = DeliveryFilter(self.generations)
        self.sink = Sink()
        self.statuses = Statuses()
        self.commits = Commits()
        self.tallies = QueueTallies()
        self.passes = Passes()
        self.departures = RetiredQueues()
        self.broker_objects = LoggedObjects()
        self.last_publish = 0
        self.log_id = b""
        self.writer = __version__

    def note(self, run: pb.Run, first: int, *, sweep: bool) -> str:
        """Notes a run of entries in log order; returns its kind.

        Args:
            sweep: This node's own copies are to be removed by the sweeper.

        Raises:
            UnsuitableVersion: A newer version has written it.
        """
        kind = run.WhichOneof("kind") or ""
        match kind:
            case "enqueues":
                self.last_publish = first + len(run.enqueues.lengths) - 1
                if run.enqueues.producer:
                    e = run.enqueues
                    self.dedup.add(e.producer, e.id_first, len(e.lengths), first, e.id_skipped)
                if self.passes.counting:
                    self._count(run.enqueues)
            case "checkpoint":
                self._written_by(run.checkpoint.writer, first)
                if run.checkpoint.renewal:
                    self.passes.begin(first)
            case "marker":
                self._written_by(run.marker.writer, first)
                self.log_id = run.marker.log_id or self.log_id
                self.tallies.led_anew()
            case "moving":
                self.passes.noted(first, (run.moving.vhost, run.moving.queue), done=run.moving.done)
            case "renewed":
                self.passes.end(first)
            case "dequeue" | "reject":
                op = run.dequeue if kind == "dequeue" else run.reject
                if self.passes.counting:
                    self.passes.left((op.vhost, op.queue), op.sequences)
                which = Kind.DEQUEUE if kind == "dequeue" else Kind.REJECT
                key = self._operated_on(first, op.vhost, op.queue)
                self.filter.note(first, which, key, op.sequences, op.visit, op.origin, sweep=sweep)
            case "moved":
                m = run.moved
                key = self._operated_on(first, m.vhost, m.queue)
                self.filter.note(first, Kind.MOVED, key, (m.sequence, m.sequence), m.visit, m.origin, sweep=sweep)
            case "refused":
                self.passes.count_no_more()
                self.filter.note(first, Kind.REFUSED, None, run.refused.sequences, 0, "", sweep=False)
                self._forget_ids(run.refused.producers, first)
            case "purge":
                self.filter.note_change(first)
                self.passes.count_no_more((run.purge.vhost, run.purge.queue))
                purged = RangeSet.from_flat(run.purge.spared).missing(0, run.purge.before - 1).flat()
                if run.purge.before > 1:
                    key = self._operated_on(first, run.purge.vhost, run.purge.queue)
                    self.filter.note(first, Kind.PURGE, key, purged, 0, "", sweep=False)
            case "transmission" | "reception" | "demand" | "commit" | "status":
                self._note_of_sites(run, kind, first)
            case "topology":
                self._note_topology(run.topology, first)
            case "definitions":
                self.broker_objects.noted(first, run.definitions)
            case "tally" if sweep:  # a node knows its own queues
                declaration = self.declared.declarations.get((run.tally.vhost, run.tally.queue), b"")
                keeps = declarations.keeps_dead_letters(declarations.queue_arguments(declaration))
                self.tallies.noted(first, run.tally, keeps_dead_letters=keeps)
            case "":  # if passed over, the entry would be missing here after a promotion, without a notice
                wrote = f"entry {first} of the log, written by lrq-ha {self.writer}, is of a kind that lrq-ha {__version__} does not know"
                raise codec.UnsuitableVersion(wrote, todo=codec.RUN_THE_NEWER)
        return kind

    def _note_of_sites(self, run: pb.Run, kind: str, first: int) -> None:
        """Notes an entry of the log replication between sites."""
        match kind:
            case "transmission":
                self.dedup.add(run.transmission.producer, run.transmission.id, 1, first, run.transmission.id_skipped)
            case "reception":
                self.sink.noted(first, run.reception.queue, pb.ReceivedBatch.FromString(run.reception.body))
            case "demand":
                self.sink.demanded(first, run.demand.queue, run.demand.reason)
            case "commit":
                self.commits.noted(first, run.commit)
            case "status":
                if run.status.producer:
                    self.dedup.add(run.status.producer, run.status.id, 1, first, run.status.id_skipped)
                self.statuses.noted(first, pb.Status.FromString(run.status.body))

    def _forget_ids(self, refused: Iterable[pb.ProducerRanges], sequence: int) -> None:
        for part in refused:
            for id_first, id_last in zip(part.ids[::2], part.ids[1::2]):
                for number in range(id_first, id_last + 1):
                    self.dedup.forget(part.producer, number, sequence)

    def _note_topology(self, topology: pb.Topology, sequence: int) -> None:
        self.filter.note_change(sequence)
        deleted = self.declared.noted(sequence, topology)
        if deleted is not None:
            dead_letters = declarations.may_dead_letter(self.declared.declarations.get(deleted, b""))
            self.departures.deleted(sequence, deleted, dead_letters=dead_letters)
            self.tallies.done(deleted)
            self.passes.count_no_more(deleted)

    def _written_by(self, writer: pb.Writer, sequence: int) -> None:
        codec.check_writer(writer, sequence)
        self.writer = writer.software or "of an early version"

    def _operated_on(self, sequence: int, vhost: str, queue: str) -> QueueKey:
        """The key of a queue that entry `sequence` is an operation on."""
        key = (vhost, queue)
        if self.declared.queues.get(key, -1):  # also where a deletion comes before it
            self.departures.undeclared(sequence, key)
        return key

    def gave_back(self, queue: QueueKey, sequence: int) -> None:
        """A message is requeued. A quorum queue may drop it, by its delivery limit, without any client command."""
        self.passes.stirred(sequence)
        if self.passes.counting and declarations.queue_arguments(self.declared.declarations.get(queue, b"")).get("x-queue-type") == "quorum":
            self.passes.count_no_more(queue)

    def let_go(self, applied: int) -> None:
        """Everything up to entry `applied` is applied on this node: the state of queues that were deleted up to there is dropped."""
        for sequence, key, deleted, dead_letters in self.departures.take(applied):
            if deleted:
                self.filter.forget_queue(key, sequence, dead_letters=dead_letters)
                self.declared.forget(key, sequence)
            else:
                self.filter.undeclared(key, sequence)

    def _count(self, run: pb.Enqueues) -> None:
        blob = run.frames
        for _, _, start, end, header, _, _ in frames.scan(blob, 0, frames.FRAME_MAX_ANY_BYTES)[0]:
            route = frames.publish_route(blob[start:end])
            if not route.exchange:
                key = (run.vhost, route.routing_key)
                if int.from_bytes(blob[header + 12 : header + 14], "big") & EXPIRATION:
                    self.passes.count_no_more(key)
                self.passes.came(key)

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        self.declared.cut(first)
        self.dedup.cut(first)
        self.filter.cut(first)
        self.departures.cut(first)
        self.sink.cut(first)
        self.statuses.cut(first)
        self.commits.cut(first)
        self.tallies.cut(first)
        self.passes.cut(first)
        self.broker_objects.cut(first)

    def safe(self, upto: int) -> None:
        """Nothing up to this entry will be cut off."""
        reached = self.filter.reached()
        self.declared.safe(upto, reached)
        self.broker_objects.safe(upto, reached)
        self.dedup.safe(upto)
        self.filter.safe(upto)
        self.sink.safe(upto)
        self.statuses.safe(upto)
        self.commits.safe(upto)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoint(self, log: LogState, *, renewal: bool) -> pb.Checkpoint:
        """The state of all entries so far. `renewal`: this CHECKPOINT begins a renewal (R17)."""
        epochs, sets = codec.history_to_pb(log)
        return pb.Checkpoint(
            epochs=epochs,
            sets=sets,
            producers=[pb.ProducerRanges(producer=producer, ids=ids, others=others) for producer, ids, others in self.dedup.snapshot()],
            received=self.sink.rows(),
            auto_delete_exchanges=[pb.Topology(vhost=vhost, method=method) for (vhost, _), method in self.declared.auto_delete_exchanges.items()],
            statuses=[pb.KeptStatus(sequence=told.sequence, body=told.status.SerializeToString()) for told in self.statuses.rows()],
            definitions=self.declared.definitions.export(),
            renewal=renewal,
            renewals=[pb.Renewal(sequence=at, renewal=which) for at, which in log.renewals],
            writer=codec.WRITER,
            log_id=self.log_id,
            commits=self.commits.rows(),
            broker_objects=self.broker_objects.export(),
            record=log.record,
            moving=[pb.MovingQueue(vhost=key[0], queue=key[1], before=before) for key, before in self.passes.unfinished().items()],
        )

    def restore(self, sequence: int, entry: pb.Checkpoint) -> None:
        """Starts from the CHECKPOINT at `sequence`, which is safe, instead of from the first entry. The core's log
        is restored by the caller.

        Raises:
            UnsuitableVersion: A newer version has written it.
        """
        self._written_by(entry.writer, sequence)
        self.log_id = entry.log_id
        if entry.renewal:
            self.passes.begin(sequence)
        elif entry.renewals and entry.renewals[-1].renewal == entry.renewals[-1].sequence:
            self.passes.restore(entry.renewals[-1].sequence, {(m.vhost, m.queue): m.before for m in entry.moving})
        self.dedup = Dedup.restored((part.producer, part.ids, part.others) for part in entry.producers)
        self.sink.load(entry.received, sequence - 1)
        self.declared.restore(sequence, entry)
        self.commits.load(entry.commits)
        self.broker_objects.restore(entry.broker_objects)
        self.statuses.load(Told(kept.sequence, pb.Status.FromString(kept.body)) for kept in entry.statuses)
