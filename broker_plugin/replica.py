"""A node's log and what belongs to it, for the door and the applier: append, index, wait until safe. No sockets of its own.

Rules:
- Entries get their sequence at once and go out in batches: what came in one turn of the event loop is one batch, and while enough batches are
  on their way the next one grows (group commit).
- Every entry is indexed once, in log order, wherever it comes from (own append, push, own stream at start): IDs into the dedup, operations
  into the filter, receptions into the sink. What is cut off is taken out again.
- On a backup, and while an epoch is being taken, entries wait in `to_apply` until the applier has brought them to the broker. On an active
  node publishes are brought by the connections they came on, views by the applier, and everything else is done when it is safe.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import AppliedTracker, Generations, QueueRecord, parse_stamp
from lrq_ha.replication.errors import LrqError
from lrq_ha.replication.filter import DeliveryFilter, Kind
from lrq_ha.replication.ids import Dedup
from lrq_ha.replication.levels import Level, Levels
from lrq_ha.replication.node import Node
from lrq_ha.replication.passes import Passes
from lrq_ha.replication.positions import RangeSet, owner_of
from lrq_ha.replication.roles import Role
from lrq_ha.replication.visits import Deaths, origin_of, visit_of
from lrq_ha.routing.sink import Row, Sink
from lrq_ha.routing.statuses import Statuses, Told

from . import frames, wire
from .channels import Delivery, QueueKey, Settled
from .definitions import Definitions
from .headers import position
from .tallying import Tallies

if TYPE_CHECKING:
    from . import topology
    from .waiting import Moving

BATCH_BYTES_MAX = 256 << 10
BATCHES_IN_FLIGHT_MAX = 4
PARKED_POLL_S = 0.2
GIVEN_BACK_RANGES_MAX = 10_000
CHECKPOINT_BYTES_MAX = 8 << 20  # well below the 16 MiB that RabbitMQ takes in one message
VIEWS = ("transmission", "reception", "status")
LEVELS_KEPT_MAX = 100_000
EXPIRATION = 0x0100  # the flag of that property in a content header
LOCAL_QUEUES_MAX = 100_000
PASSED_OVER_KEPT_MAX = 10_000
LEVELS = {Level.ALL: pb.LEVEL_ALL, Level.CONFIGURATION: pb.LEVEL_CONFIGURATION, Level.NONE: pb.LEVEL_NONE}
OPERATIONS = ("dequeue", "reject", "moved", "refused", "purge")


async def _no_record() -> None: ...


class NotPrimary(LrqError):
    """Only a primary appends entries of clients."""


class Waiter(Protocol):
    """Something that waits for the log: a connection of the door."""

    def safe_advanced(self) -> None: ...

    def applied_advanced(self) -> None: ...


class EarlyWaiter(Protocol):
    """Something that waits for the own stream alone."""

    def durable_advanced(self) -> None: ...


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


class LocalQueues:
    """This node's own queues, exclusive or auto-delete: the last LOCAL_QUEUES_MAX that were declared, as nobody tells when one goes.

    One that is forgotten while it is there is taken for any other of its name: what is published to it enters the log, and finds no queue elsewhere.
    """

    def __init__(self) -> None:
        self._keys: dict[QueueKey, None] = {}

    def __contains__(self, key: QueueKey) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: QueueKey) -> None:
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > LOCAL_QUEUES_MAX:
            del self._keys[next(iter(self._keys))]

    def discard(self, key: QueueKey) -> None:
        self._keys.pop(key, None)


class Replica:
    """See above.

    Args:
        node: The pure core.
        levels: What of queues and exchanges is replicated, by their names.
        emit: Carries out what an append leads to (Node.handle and its effects); gets first sequence, number of entries, runs.
    """

    def __init__(self, node: Node, levels: Levels, emit: Callable[[int, int, list[pb.Run | wire.Publishes]], None]) -> None:
        self.node = node
        self._emit = emit
        self._levels = levels
        self._known_levels: dict[QueueKey, Level] = {}
        self.local_queues = LocalQueues()
        self.partial: set[QueueKey] = set()  # queues that the log declares with another level than `all`, or has declared so
        self.consumed: set[QueueKey] = set()  # queues that go with their last consumer, and have had one on this node
        self.dedup = Dedup()
        self.generations = Generations()
        self.filter = DeliveryFilter(self.generations)
        self.tracker = AppliedTracker()
        self.sink = Sink()
        self.statuses = Statuses()
        self.known_topology: dict[tuple[str, bytes], int] = {}
        self.declared: dict[QueueKey, int] = {}  # queues that the log declares, and the entry that deletes them again; 0: none
        self.declarations: dict[QueueKey, bytes] = {}  # how: the method of the last declaration
        self.record_parts: dict[QueueKey, tuple[QueueRecord, bytes]] = {}  # of the last applied record
        self._before: deque[tuple[int, dict[Any, Any], Any, Any]] = deque()  # what entries that are not safe have changed in those: how it was
        self.declared_here: set[QueueKey] = set()  # by clients of this node in this epoch
        self.tallies = Tallies()
        self.given_back: dict[QueueKey, RangeSet] = {}  # by clients of this node, and not settled since
        self.epoch_from = 0  # everything up to it is of earlier epochs, while this node leads
        self.last_publish = 0  # the last entry that is one
        self.recorded = 0  # R of the last applied record that is confirmed
        self.write_record: Callable[[], Awaitable[None]] = _no_record
        self.parked: Callable[[], RangeSet] = RangeSet  # what full queues refuse, and is tried again
        self._settling: asyncio.Event | None = None
        self._published = 0  # last entry that this node has published
        self._passed_over: list[tuple[int, list[tuple[str, int, int]]]] = []  # while this node leads: (entry, its IDs)
        self.definitions = Definitions()
        self.begins_at = 0  # the CHECKPOINT at which this node's log began (R17); 0: at entry 1
        self.passes = Passes()
        self.moving: dict[QueueKey, Moving] = {}  # what waits at the door of this node until they have been moved (R17)
        self.auto_delete_exchanges: dict[tuple[str, str], bytes] = {}  # and their declarations
        self.to_apply: deque[Entry] = deque()
        self.to_apply_bytes = 0
        self.safe = 0
        self.redelivered_upto = 0  # entries of earlier epochs, which a client may have been given
        self.unheld_upto = 0  # entries of earlier epochs, which no client holds: they were handed over in order
        self._given = RangeSet()  # those of the latter that clients have been given since
        self.moved_again = RangeSet()  # messages that a renewal has moved, and that clients may have been given before
        self.last_operation = 0
        self.unsafe_bytes = 0
        self.bytes_since_checkpoint = 0
        self.waiting_safe: set[Waiter] = set()
        self.waiting_applied: set[Waiter] = set()
        self.waiting_durable: set[EarlyWaiter] = set()
        self.early = RangeSet()  # publishes with local completion that are not applied: they are never refused because nobody knows their fate
        self.at_stake_entries = 0  # confirmed with local completion, and not safe
        self.at_stake_bytes = 0
        self._at_stake: deque[tuple[int, int, int]] = deque()  # (last entry, entries, bytes)
        self.on_wake: Callable[[], None] = lambda: None
        self.log_marks: Callable[[], Sequence[tuple[int, int]]] = lambda: ()  # how large the log was at some entries, see Retention
        self._unsafe: deque[tuple[int, int]] = deque()
        self._done_when_safe: deque[tuple[int, int, int]] = deque()  # (when this is safe, first, last); the first ones ascend
        self._open: list[pb.Run | wire.Publishes] = []
        self._open_first = 0
        self._open_count = 0
        self._open_bytes = 0
        self._flush_scheduled = False
        self.batches_in_flight = 0
        self._seen = RangeSet()
        self._safe_futures: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._applied_futures: list[tuple[int, asyncio.Future[None]]] = []
        self._topology_lock = asyncio.Lock()
        self._barrier_free = asyncio.Event()
        self._barrier_free.set()
        self.stamp_affixes = (b"", b"")

    # ---- what clients' connections ask -------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self.node.serving

    @property
    def holds_confirms(self) -> bool:
        """Whether this primary still waits for its expected backups: what it takes, it does not confirm yet."""
        return self.node.role is Role.RECOVERING

    @property
    def next_sequence(self) -> int:
        return self.node.log.end + self._open_count + 1

    @property
    def end(self) -> int:
        """Last sequence given out."""
        return self.node.log.end + self._open_count

    @property
    def generation(self) -> int:
        return self.generations.newest

    def level(self, key: QueueKey) -> Level:
        """How much of a queue the other nodes get: what the log says of it; of one that it does not know, what its name says."""
        if key in self.local_queues:
            return Level.NONE
        known = self._known_levels.get(key)
        if known is None:
            from . import topology  # it reads declarations

            if len(self._known_levels) > LEVELS_KEPT_MAX:
                self._known_levels.clear()
            method = self.definitions.queue(key)
            known = self._levels.of(key[1]) if method is None else topology.level_of(method)
            self._known_levels[key] = known
        return known

    def replicates(self, key: QueueKey) -> bool:
        """Whether a queue's messages, and what becomes of them, go into the log."""
        return self.level(key) is Level.ALL

    def knows(self, key: QueueKey) -> bool:
        """Whether a queue's declarations go into the log, or have."""
        return self.level(key) is not Level.NONE or self.definitions.queue(key) is not None

    def consumes(self, key: QueueKey) -> None:
        """A client consumes from a queue: if it is one that goes with its last consumer, it may go from now on."""
        from . import topology

        if topology.goes_unused(self.definitions.queue(key) or b""):
            self.consumed.add(key)

    def replicates_exchange(self, name: str) -> bool:
        """Whether an exchange, and what is published to it, goes into the log."""
        return self._levels.of(name) is not Level.NONE

    @property
    def follows(self) -> bool:
        """Whether another node was the last whose entries are safe: this broker's queues are not what clients use."""
        epoch = self.node.log.epoch_at(min(self.safe, self.node.log.end))
        return epoch > 0 and owner_of(epoch) != self.node.me

    def stamp_of(self, header: bytes) -> tuple[int, int] | None:
        """(sequence, generation) of the stamp in a content header's payload; None if it has none that a door wrote."""
        value = position(header)
        if value is None:
            return None
        try:
            _, sequence, generation = parse_stamp(value)
        except LrqError:
            return None
        return sequence, generation

    def begin_epoch(self, epoch: int) -> None:
        """The node leads `epoch`: what is stamped on messages from now on."""
        self.epoch_from = self.node.log.end
        self.tallies = Tallies()  # of the primary before
        self.declared_here.clear()
        self.stamp_affixes = (b"%d." % epoch, b"/%d" % self.generations.newest)

    # ---- appending ---------------------------------------------------------------------------------------------------

    def append(self, run: pb.Run, count: int = 1, size: int = 64, *, apply: bool = False, contents: Sequence[bytes | memoryview] = ()) -> int:
        """Appends a run of entries; returns the first's sequence.

        Args:
            run: What they are.
            count: How many.
            size: Bytes, about.
            apply: Publishes are brought by the applier.
            contents: The frames of publishes, if they are not in `run`.

        Raises:
            NotPrimary: It is not.
        """
        if not self.active:
            raise NotPrimary(f"node {self.node.name(self.node.me)} is not primary any more", retriable=True)
        first = self.next_sequence
        if not self._open_count:
            self._open_first = first
        self._open.append(wire.Publishes(run, contents) if contents else run)
        self._open_count += count
        self._open_bytes += size
        self.unsafe_bytes += size
        self._unsafe.append((first + count - 1, size))
        kind = self.index(run, first, sweep=False)
        if kind in VIEWS or apply:
            self.to_apply.append(Entry(first, count, run, size, 0.0))
            self.to_apply_bytes += size
        elif kind == "enqueues":
            self._published = first + count - 1
        else:
            self.done_when_safe(first, first + count - 1)
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
            self.bytes_since_checkpoint += self._open_bytes
            self._open, self._open_count, self._open_bytes = [], 0, 0
            self._emit(first, count, runs)

    def own_confirmed(self) -> None:
        """A batch of the own stream was confirmed."""
        if self.waiting_durable:
            waiting, self.waiting_durable = self.waiting_durable, set()
            for waiter in waiting:
                waiter.durable_advanced()
        if self._open_count and self.batches_in_flight < BATCHES_IN_FLIGHT_MAX:
            self.flush()

    def dequeue(self, queue: QueueKey, sequences: list[int], deaths: Deaths) -> int:
        """A client acked these; returns the entry's sequence."""
        return self._operate("dequeue", queue, sequences, deaths)

    def reject(self, queue: QueueKey, sequences: list[int], deaths: Deaths) -> int:
        """A client rejected these for good; returns the entry's sequence."""
        return self._operate("reject", queue, sequences, deaths)

    def gave_back(self, deliveries: Iterable[Delivery]) -> None:
        """These go back to their queues."""
        for delivery in deliveries:
            self.passes.stirred(delivery.sequence)
            known = self.given_back.setdefault(delivery.queue, RangeSet())
            known.add(delivery.sequence)
            if known.ranges > GIVEN_BACK_RANGES_MAX:  # coarser, but no less
                known.add(known.first, known.last)

    def _operate(self, kind: str, queue: QueueKey, sequences: list[int], deaths: Deaths) -> int:
        if kind == "reject":
            self.passes.stirred(min(sequences))
        if queue in self.given_back:
            given_back = self.given_back[queue]
            for sequence in sequences:
                given_back.remove(sequence)
            if not given_back:
                del self.given_back[queue]
        origin = origin_of(deaths)
        if deaths:
            for sequence in sequences:  # R10: what the log lacks of its way comes first, in the same batch
                for name, visit in self.filter.queue(queue).implied_moves(sequence, deaths):
                    if not self.replicates((queue[0], name)):
                        continue  # what happens to copies there is each broker's own
                    moved = pb.Moved(vhost=queue[0], queue=name, sequence=sequence, visit=visit, origin=origin)
                    self.append(pb.Run(moved=moved))
        run = pb.Run()
        op = run.dequeue if kind == "dequeue" else run.reject
        op.vhost, op.queue = queue
        op.sequences.extend(RangeSet.of(sequences).flat())
        op.visit = visit_of(queue[1], deaths)
        op.origin = origin
        return self.append(run)

    def topology(self, vhost: str, action: topology.Replicate) -> int:
        """A declaration succeeded on the own broker; returns its entry's sequence."""
        if action.purge:
            ranges = pb.Purge(vhost=vhost, queue=action.queue, before=self.next_sequence)
            return self.append(pb.Run(purge=ranges))
        if action.entry[:4] == frames.QUEUE_DECLARE.to_bytes(4, "big"):
            self.declared_here.add((vhost, action.queue))
        return [self.append(pb.Run(topology=pb.Topology(vhost=vhost, method=m, level=LEVELS[level]))) for m, level in action.entries][-1]

    def refuse(self, settled: Iterable[Settled], *, unless_seen: bool = False) -> None:
        """The broker refused these publishes, or nobody can know: they count as dequeued everywhere, and their IDs are free again."""
        ranges = RangeSet()
        for run in settled:
            ranges.add(run.sequence, run.sequence + run.publishes - 1)
        if unless_seen:
            for first, last in list(self._seen):
                if ranges.intersects(first, last):
                    ranges.remove(first, last)
                    self.applied(first, last)
        if not ranges or not self.active:
            return
        refused = pb.Refused(sequences=ranges.flat())
        for first, last in ranges:
            for producer, id_first, id_last in self.dedup.ids_of(first, last):
                refused.producers.add(producer=producer, ids=[id_first, id_last])
        # Not before REFUSED is safe: R must never pass an entry that could still fall out of the log, or a publish whose refusal could.
        when = self.append(pb.Run(refused=refused))
        for first, last in ranges:
            self._done_when_safe.append((when, first, last))

    def passes_over(self, sequence: int) -> None:
        """The applier brings no copy of an entry, as the own broker takes none, or has no queue for it. Call before it counts as applied."""
        if not self.follows and len(self._passed_over) < PASSED_OVER_KEPT_MAX:
            self._passed_over.append((sequence, self.dedup.ids_of(sequence, sequence)))
            if self.active:
                self.refuse_passed_over()

    def refuse_passed_over(self) -> None:
        """The door opens: what the broker took none of in this epoch is refused as by any broker, so that its IDs are free again."""
        passed, self._passed_over = self._passed_over, []
        if not passed:
            return
        refused = pb.Refused(sequences=RangeSet.of(sequence for sequence, _ in passed).flat())
        for _, ids in passed:
            for producer, first, last in ids:
                refused.producers.add(producer=producer, ids=[first, last])
        self.append(pb.Run(refused=refused))

    def doubt(self, runs: Sequence[tuple[int, pb.Run]]) -> None:
        """Nobody can know whether the broker has done the transaction that these publishes belong to, but it is in the log, so it is to be done.

        Unless a copy has been seen they are logged anew, and what may be there of the first ones counts for nothing.
        """
        spans = [(first, first + len(run.enqueues.lengths) - 1) for first, run in runs]
        if any(self._seen.intersects(*span) for span in spans):
            for span in spans:
                self.applied(*span)
        elif self.active:
            self.refuse(Settled(0, last - first + 1, first, "", 0) for first, last in spans)
            for _, run in runs:
                self.append(run, len(run.enqueues.lengths), len(run.enqueues.frames), apply=True)

    def log_again(self, settled: Settled, first: int, run: pb.Run) -> None:
        """The same of publishes that were confirmed with local completion, some or all of `run`, the entries from `first` on.

        Each by itself: those of which a copy has been seen are there, the others are logged anew.
        """
        if not self.active:
            return
        missing = RangeSet()
        missing.add(settled.sequence, settled.sequence + settled.publishes - 1)
        for seen in self._seen:
            missing.remove(*seen)
        self.refuse([settled], unless_seen=True)
        for begin, end in missing:
            again = _part(run, begin - first, end - begin + 1)
            self.append(again, end - begin + 1, len(again.enqueues.frames), apply=True)

    def confirmed_early(self, last: int, entries: int, size: int) -> None:
        """The client was told that the entries up to `last` are taken, and only the own stream has them for certain."""
        if last > self.safe:
            self._at_stake.append((last, entries, size))
            self.at_stake_entries += entries
            self.at_stake_bytes += size

    def seen(self, sequence: int) -> None:
        """A copy of an entry was met in a queue: it is there, whatever the broker's confirm says."""
        if sequence > self.tracker.applied and not self.tracker.is_applied(sequence):
            self._seen.add(sequence)

    def comes_again(self, sequence: int, flagged: bool) -> bool:
        """Whether a client is told that a message has been delivered before.

        Args:
            sequence: Its entry.
            flagged: What the broker says. It knows nothing of other brokers, and counts what the sweeper of a backup looked at.
        """
        if sequence <= self.redelivered_upto or (self.moved_again and sequence in self.moved_again):
            return True
        if sequence > self.unheld_upto or sequence in self._given:
            return flagged
        self._given.add(sequence)
        return False

    def may_have_been_given(self, sequence: int, flagged: bool) -> bool:
        """The same, of one that nobody is given now."""
        return sequence <= self.redelivered_upto or (flagged and (sequence > self.unheld_upto or sequence in self._given))

    def took_over(self, *, clean: bool) -> None:
        """An epoch begins here. `clean`: no client holds a message of those before."""
        end = self.node.log.end
        self.redelivered_upto, self.unheld_upto = (0, end) if clean else (end, 0)
        self._given = RangeSet()

    def seen_gone(self, queue: QueueKey, sequence: int, generation: int, deaths: Deaths) -> None:
        """A copy was turned away."""
        self.filter.queue(queue).gone(sequence, generation, deaths)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def checkpoint(self, *, renewal: bool = False) -> bool:
        """Appends a CHECKPOINT, in a batch of its own; whether it did: one that is too large for a message is left out.

        `renewal`: it begins one (R17).
        """
        self.flush()
        self.bytes_since_checkpoint = 0
        for key in [key for key, gone in self.declared.items() if 0 < gone <= self.safe]:
            del self.declared[key]
            self.declarations.pop(key, None)
        log = self.node.log.state()
        epochs, sets = wire.history_to_pb(log)
        entry = pb.Checkpoint(
            epochs=epochs,
            sets=sets,
            producers=[pb.ProducerRanges(producer=producer, ids=ids) for producer, ids in self.dedup.snapshot()],
            received=[
                pb.ReceiveState(
                    queue=r.queue,
                    last=pb.Position(epoch=r.epoch, sequence=r.sequence),
                    snapshot_request=r.snapshot_request,
                    snapshot_complete=r.snapshot_complete,
                )
                for r in self.sink.rows()
            ],
            auto_delete_exchanges=[pb.Topology(vhost=vhost, method=method) for (vhost, _), method in self.auto_delete_exchanges.items()],
            queues=[
                pb.QueueName(vhost=key[0], queue=key[1], method=self.declarations.get(key, b"")) for key, gone in self.declared.items() if not gone
            ],
            statuses=[pb.KeptStatus(sequence=told.sequence, body=told.status.SerializeToString()) for told in self.statuses.rows()],
            definitions=[pb.Topology(vhost=vhost, method=method) for vhost, method in self.definitions.rows()],
            renewal=renewal,
            renewals=[pb.Renewal(sequence=at, renewal=which) for at, which in log.renewals],
            moving=[pb.MovingQueue(vhost=key[0], queue=key[1], before=before) for key, before in self.passes.unfinished().items()],
            marks=[pb.LogMark(sequence=at, bytes=size) for at, size in self.log_marks()],
        )
        size = entry.ByteSize()
        if size > CHECKPOINT_BYTES_MAX or not self.active:
            return False
        self.append(pb.Run(checkpoint=entry), size=size)
        self.flush()
        return True

    def renewed(self, checkpoint: int, *, given_up: bool = False) -> int:
        """Ends the renewal that began with the CHECKPOINT `checkpoint`; returns the entry's sequence."""
        self.flush()
        sequence = self.append(pb.Run(renewed=pb.Renewed(checkpoint=checkpoint, given_up=given_up)))
        self.flush()
        return sequence

    def note_moving(self, queue: QueueKey, *, done: bool) -> int:
        """What stands in a queue is moved behind this entry, or has been (R17); returns its sequence."""
        return self.append(pb.Run(moving=pb.Moving(vhost=queue[0], queue=queue[1], done=done)))

    def move(self, queue: QueueKey, content: tuple[bytes, bytes], sequence: int | None, deaths: Deaths) -> int:
        """Publishes a live message to its queue again, in one batch with the DEQUEUE of its old copy; returns the last entry's sequence.

        Args:
            content: Content header, without a position, and body.
            sequence, deaths: Of the old copy; None if it had no position.
        """
        frames_of = [frames.publish_method(1, "", queue[1]), *frames.content(1, *content, frames.FRAME_MAX_BYTES)]
        blob = b"".join(frames_of)
        run = pb.Run(enqueues=pb.Enqueues(vhost=queue[0], channel=1, frames=blob, lengths=[len(blob)]))
        last = self.append(run, size=len(blob), apply=True)
        return last if sequence is None else self.dequeue(queue, [sequence], deaths)

    def _partial(self) -> set[QueueKey]:
        return {key for key in self.definitions.queues() if not self.replicates(key)}

    def begin(self, sequence: int, entry: pb.Checkpoint) -> None:
        """R17: this node's log begins with the CHECKPOINT at `sequence`, and nothing was in it before."""
        self.tracker = AppliedTracker(sequence - 1)
        self.begins_at = sequence
        self.restore(sequence, entry)
        self.node.applied = self.recorded = sequence - 1
        self.dedup.completed(sequence - 1)
        self.safe_advanced(sequence - 1)

    def restore(self, sequence: int, entry: pb.Checkpoint) -> None:
        """Starts from the CHECKPOINT at `sequence`, which is safe, instead of from the first entry. The core's log is restored by the caller."""
        if entry.renewal:
            self.passes.begin(sequence)
        elif entry.renewals and entry.renewals[-1].renewal == entry.renewals[-1].sequence:
            self.passes.restore(entry.renewals[-1].sequence, {(m.vhost, m.queue): m.before for m in entry.moving})
        self.dedup = Dedup.restored((part.producer, part.ids) for part in entry.producers)
        self.sink.load([Row(r.queue, r.last.epoch, r.last.sequence, r.snapshot_request, r.snapshot_complete) for r in entry.received], sequence - 1)
        self._known_levels.clear()
        self.declared = {(q.vhost, q.queue): 0 for q in entry.queues}
        self.definitions = Definitions((row.vhost, row.method) for row in entry.definitions)
        self.declarations = {(q.vhost, q.queue): q.method for q in entry.queues if q.method}
        self.partial = self._partial()
        for each in entry.auto_delete_exchanges:
            self._index_topology(each, sequence)
        self.statuses.load(Told(kept.sequence, pb.Status.FromString(kept.body)) for kept in entry.statuses)

    # ---- indexing ----------------------------------------------------------------------------------------------------

    def index(self, run: pb.Run, first: int, *, sweep: bool) -> str:
        """Takes note of a run of entries in log order; returns its kind. `sweep`: this node's own copies are to be removed by the sweeper."""
        kind = run.WhichOneof("kind") or ""
        match kind:
            case "enqueues":
                self.last_publish = first + len(run.enqueues.lengths) - 1
                if run.enqueues.producer:
                    self.dedup.add(run.enqueues.producer, run.enqueues.id_first, len(run.enqueues.lengths), first)
                if self.passes.counting:
                    self._count(run.enqueues)
            case "checkpoint":
                if run.checkpoint.renewal:
                    self.passes.begin(first)
            case "moving":
                self.passes.noted(first, (run.moving.vhost, run.moving.queue), done=run.moving.done)
            case "renewed":
                self.passes.end(first)
            case "dequeue" | "reject":
                op = run.dequeue if kind == "dequeue" else run.reject
                if self.passes.counting:
                    self.passes.left((op.vhost, op.queue), op.sequences)
                which = Kind.DEQUEUE if kind == "dequeue" else Kind.REJECT
                self.filter.note(first, which, (op.vhost, op.queue), op.sequences, op.visit, op.origin, sweep=sweep)
            case "moved":
                m = run.moved
                self.filter.note(first, Kind.MOVED, (m.vhost, m.queue), (m.sequence, m.sequence), m.visit, m.origin, sweep=sweep)
            case "refused":
                self.passes.count_no_more()
                self.filter.note(first, Kind.REFUSED, None, run.refused.sequences, 0, "", sweep=False)
                for part in run.refused.producers:
                    for id_first, id_last in zip(part.ids[::2], part.ids[1::2]):
                        for number in range(id_first, id_last + 1):
                            self.dedup.forget(part.producer, number, first)
            case "purge":
                self.passes.count_no_more((run.purge.vhost, run.purge.queue))
                if run.purge.before > 1:
                    key = (run.purge.vhost, run.purge.queue)
                    self.filter.note(first, Kind.PURGE, key, (0, run.purge.before - 1), 0, "", sweep=False)
            case "transmission":
                self.dedup.add(run.transmission.producer, run.transmission.id, 1, first)
            case "reception":
                self.sink.noted(first, run.reception.queue, pb.ReceivedBatch.FromString(run.reception.body))
            case "status":
                if run.status.producer:
                    self.dedup.add(run.status.producer, run.status.id, 1, first)
                self.statuses.noted(first, pb.Status.FromString(run.status.body))
            case "topology":
                self._index_topology(run.topology, first)
            case "tally" if sweep:  # of its own queues a node knows
                self.tallies.noted(first, run.tally)
        return kind

    def _count(self, run: pb.Enqueues) -> None:
        blob = run.frames
        for _, _, start, end, header, _, _ in frames.scan(blob, 0, frames.FRAME_MAX_ANY_BYTES)[0]:
            route = frames.publish_route(blob[start:end])
            if not route.exchange:
                key = (run.vhost, route.routing_key)
                if int.from_bytes(blob[header + 12 : header + 14], "big") & EXPIRATION:
                    self.passes.count_no_more(key)
                self.passes.came(key)

    def _index_topology(self, entry: pb.Topology, sequence: int) -> None:
        from . import topology  # the table of methods lives there

        kind = frames.method_id(entry.method)
        if kind in (frames.QUEUE_DECLARE, frames.QUEUE_DELETE):
            key = (entry.vhost, topology.first_name(entry.method))
            self._change(sequence, self.declared, key, sequence if kind == frames.QUEUE_DELETE else 0)
            self._known_levels.pop(key, None)
            if kind == frames.QUEUE_DECLARE:
                self._change(sequence, self.declarations, key, entry.method)
                if topology.level_of(entry.method) is not Level.ALL:
                    self.partial.add(key)
            else:
                self.tallies.done(key)
                self.partial.discard(key)
                self.consumed.discard(key)
        self.definitions.noted(sequence, entry.vhost, entry.method)
        if kind in topology.DELETES:
            self.known_topology.clear()
        else:
            self.known_topology[entry.vhost, entry.method] = sequence
        if kind in (frames.EXCHANGE_DECLARE, frames.EXCHANGE_DELETE):
            exchange, auto_delete = topology.exchange_of(entry.method)
            self._change(sequence, self.auto_delete_exchanges, (entry.vhost, exchange), entry.method if auto_delete else None)

    def _change(self, sequence: int, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Entry `sequence` sets what a table says (None: nothing any more); a cut sets it back."""
        if sequence > self.safe:
            self._before.append((sequence, table, key, table.get(key)))
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value

    def index_batch(self, first: int, runs: Iterable[pb.Run], *, keep: bool) -> None:
        """Indexes a batch that came from elsewhere; `keep`: what is behind R waits for the applier."""
        for entry in self.entries_of(first, runs):
            self.index(entry.run, entry.first, sweep=True)
            if keep and entry.last > self.tracker.applied:
                self.to_apply.append(entry)
                self.to_apply_bytes += entry.size

    @staticmethod
    def entries_of(first: int, runs: Iterable[pb.Run]) -> Iterator[Entry]:
        """The runs of a batch that begins with entry `first`, as the applier takes them."""
        now = time.monotonic()
        for run in runs:
            count = len(run.enqueues.lengths) or 1
            yield Entry(first, count, run, run.ByteSize(), now)
            first += count

    def wait_first(self, entries: Sequence[Entry]) -> None:
        """These wait for the applier, before all that waits already."""
        self.to_apply.extendleft(reversed(entries))
        self.to_apply_bytes += sum(entry.size for entry in entries)

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        self.dedup.cut(first)
        self.filter.cut(first)
        self.definitions.cut(first)
        self.sink.cut(first)
        self.statuses.cut(first)
        self.tallies.cut(first)
        self.passes.cut(first)
        self._known_levels.clear()
        self.partial |= self._partial()
        self.known_topology = {key: s for key, s in self.known_topology.items() if s < first}
        while self._before and self._before[-1][0] >= first:
            _, table, key, before = self._before.pop()
            if before is None:
                table.pop(key, None)
            else:
                table[key] = before
        while self.to_apply and self.to_apply[-1].first >= first:
            self.to_apply_bytes -= self.to_apply.pop().size
        self.redelivered_upto = min(self.redelivered_upto, first - 1)
        self.unheld_upto = min(self.unheld_upto, first - 1)

    # ---- safe and applied --------------------------------------------------------------------------------------------

    def safe_advanced(self, safe: int) -> None:
        """R4: everything up to `safe` may touch the queues."""
        self.safe = safe
        self.dedup.safe(safe)
        self.filter.safe(safe)
        self.definitions.safe(safe)
        self.sink.safe(safe)
        self.statuses.safe(safe)
        while self._before and self._before[0][0] <= safe:
            self._before.popleft()
        while self._at_stake and self._at_stake[0][0] <= safe:
            _, entries, size = self._at_stake.popleft()
            self.at_stake_entries -= entries
            self.at_stake_bytes -= size
        while self._unsafe and self._unsafe[0][0] <= safe:
            self.unsafe_bytes -= self._unsafe.popleft()[1]
        while self._done_when_safe and self._done_when_safe[0][0] <= safe:
            _, first, last = self._done_when_safe.popleft()
            self.applied(first, last)
        while self._safe_futures and self._safe_futures[0][0] <= safe:
            future = self._safe_futures.popleft()[1]
            if not future.done():
                future.set_result(None)
        if self.waiting_safe:
            waiting, self.waiting_safe = self.waiting_safe, set()
            for waiter in waiting:
                waiter.safe_advanced()
        self.on_wake()

    def applied(self, first: int, last: int) -> None:
        """These are in the queues and confirmed, or not needed there."""
        moved = self.tracker.mark(first, last)
        if self._settling:
            self._settling.set()
        if not moved:
            if self.waiting_applied:
                self._wake_applied()
            return
        applied = self.tracker.applied
        self.dedup.completed(applied)
        if self._seen:
            self._seen.remove(0, applied)
        if self.early:
            self.early.remove(0, applied)
        self.node.applied = applied
        if self.waiting_applied:
            self._wake_applied()
        if self._applied_futures:
            due = [future for upto, future in self._applied_futures if upto <= applied]
            self._applied_futures = [(upto, future) for upto, future in self._applied_futures if upto > applied]
            for future in due:
                if not future.done():
                    future.set_result(None)

    def _wake_applied(self) -> None:
        waiting, self.waiting_applied = self.waiting_applied, set()
        for waiter in waiting:
            waiter.applied_advanced()

    def done_when_safe(self, first: int, last: int) -> None:
        """These entries need nothing but to be safe."""
        self._done_when_safe.append((last, first, last))

    async def wait_safe(self, sequence: int) -> None:
        """Returns when entry `sequence` is safe."""
        if sequence > self.safe:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._safe_futures.append((sequence, future))
            await future

    async def wait_applied(self, sequence: int) -> None:
        """Returns when everything up to `sequence` is in the queues and confirmed."""
        if sequence > self.tracker.applied:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._applied_futures.append((sequence, future))
            await future

    async def _wait_settled(self, upto: int) -> None:
        """Returns when everything up to `upto` is in the queues and confirmed, or waits before a full one."""
        self._settling = asyncio.Event()
        while self.tracker.applied < upto and not self._only_parked(upto):
            self._settling.clear()
            try:
                async with asyncio.timeout(PARKED_POLL_S):
                    await self._settling.wait()
            except TimeoutError:
                pass
        self._settling = None

    def _only_parked(self, upto: int) -> bool:
        missing = self.tracker.needs(1, upto)
        for first, last in self.parked():
            missing.remove(first, last)
        return not missing

    @asynccontextmanager
    async def barrier(self) -> AsyncIterator[None]:
        """Everything appended before is in the queues; no publish is taken from any connection inside."""
        async with self._topology_lock:
            self._barrier_free.clear()
            try:
                self.flush()
                await self._wait_settled(self.end)
                await self.settle_record(self.end)
                yield
            finally:
                self._barrier_free.set()
                self.on_wake()

    def published(self, upto: int) -> None:
        """The applier has published entries up to this one."""
        self._published = max(self._published, upto)

    async def settle_record(self, upto: int) -> None:
        """Returns when a restart would publish nothing of the entries up to `upto` again.

        What is published again goes by the bindings of that moment, and older copies no longer count (R8). So before bindings change, everything
        published is on record.
        """
        if self.recorded < min(upto, self._published):
            await self.write_record()

    @property
    def in_barrier(self) -> bool:
        return not self._barrier_free.is_set()

    async def barrier_over(self) -> None:
        await self._barrier_free.wait()


def _part(run: pb.Run, skip: int, count: int) -> pb.Run:
    """`count` publishes of a run, without the first `skip`."""
    whole = run.enqueues
    begin = sum(whole.lengths[:skip])
    lengths = whole.lengths[skip : skip + count]
    part = pb.Run(enqueues=pb.Enqueues(vhost=whole.vhost, channel=whole.channel, frames=whole.frames[begin : begin + sum(lengths)], lengths=lengths))
    if whole.producer:
        part.enqueues.producer, part.enqueues.id_first = whole.producer, whole.id_first + skip
    return part
