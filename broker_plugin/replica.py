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
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import AppliedTracker, Generations, parse_stamp
from lrq_ha.replication.errors import LrqError
from lrq_ha.replication.filter import Deaths, DeliveryFilter, Kind, origin_of, visit_of
from lrq_ha.replication.ids import Dedup
from lrq_ha.replication.node import Node
from lrq_ha.replication.positions import RangeSet
from lrq_ha.replication.roles import Role
from lrq_ha.routing.sink import Sink

from .channels import QueueKey, Settled

if TYPE_CHECKING:
    from . import topology

BATCH_BYTES_MAX = 256 << 10
BATCHES_IN_FLIGHT_MAX = 4
VIEWS = ("transmission", "reception", "status")
OPERATIONS = ("dequeue", "reject", "moved", "refused", "purge")


class NotPrimary(LrqError):
    """Only a primary appends entries of clients."""


class Waiter(Protocol):
    """Something that waits for the log: a connection of the door."""

    def safe_advanced(self) -> None: ...

    def applied_advanced(self) -> None: ...


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
    """See above.

    Args:
        node: The pure core.
        patterns: Regular expressions of the names of queues and exchanges that are replicated.
        emit: Carries out what an append leads to (Node.handle and its effects); gets first sequence, number of entries, runs.
    """

    def __init__(self, node: Node, patterns: Sequence[str], emit: Callable[[int, int, list[pb.Run]], None]) -> None:
        self.node = node
        self._emit = emit
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._replicates: dict[str, bool] = {}
        self.local_queues: set[QueueKey] = set()  # exclusive, auto-delete: this node's own
        self.dedup = Dedup()
        self.generations = Generations()
        self.filter = DeliveryFilter(self.generations)
        self.tracker = AppliedTracker()
        self.sink = Sink()
        self.statuses: dict[str, tuple[int, pb.Status]] = {}  # last value per key, and its entry
        self.known_topology: dict[tuple[str, bytes], int] = {}
        self.to_apply: deque[Entry] = deque()
        self.to_apply_bytes = 0
        self.safe = 0
        self.redelivered_upto = 0
        self.last_operation = 0
        self.unsafe_bytes = 0
        self.waiting_safe: set[Waiter] = set()
        self.waiting_applied: set[Waiter] = set()
        self.on_wake: Callable[[], None] = lambda: None
        self._unsafe: deque[tuple[int, int]] = deque()
        self._done_when_safe: deque[tuple[int, int]] = deque()
        self._open: list[pb.Run] = []
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
        return self.node.role is Role.ACTIVE

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

    def replicates(self, key: QueueKey) -> bool:
        """Whether a queue's (or exchange's) operations go into the log."""
        if key in self.local_queues:
            return False
        name = key[1]
        known = self._replicates.get(name)
        if known is None:
            if len(self._replicates) > 100_000:
                self._replicates.clear()
            known = not name.startswith("amq.") and any(p.search(name) for p in self._patterns)
            self._replicates[name] = known
        return known

    def parse_stamp(self, value: bytes) -> tuple[int, int] | None:
        """(sequence, generation) of a stamp; None for what the door did not write."""
        try:
            _, sequence, generation = parse_stamp(value)
        except LrqError:
            return None
        return sequence, generation

    def begin_epoch(self, epoch: int) -> None:
        """The node leads `epoch`: what is stamped on messages from now on."""
        self.stamp_affixes = (b"%d." % epoch, b"/%d" % self.generations.newest)

    # ---- appending ---------------------------------------------------------------------------------------------------

    def append(self, run: pb.Run, count: int = 1, size: int = 64, *, sweep: bool = False) -> int:
        """Appends a run of entries; returns the first's sequence. Raises NotPrimary."""
        if not self.active:
            raise NotPrimary(f"node {self.node.name(self.node.me)} is not primary any more", retriable=True)
        first = self.next_sequence
        if not self._open_count:
            self._open_first = first
        self._open.append(run)
        self._open_count += count
        self._open_bytes += size
        self.unsafe_bytes += size
        self._unsafe.append((first + count - 1, size))
        kind = self.index(run, first, sweep=sweep)
        if kind in VIEWS:
            self.to_apply.append(Entry(first, count, run, size, 0.0))
            self.to_apply_bytes += size
        elif kind != "enqueues":
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
            self._open, self._open_count, self._open_bytes = [], 0, 0
            self._emit(first, count, runs)

    def own_confirmed(self) -> None:
        """A batch of the own stream was confirmed."""
        if self._open_count and self.batches_in_flight < BATCHES_IN_FLIGHT_MAX:
            self.flush()

    def dequeue(self, queue: QueueKey, sequences: list[int], deaths: Deaths) -> int:
        """A client acked these; returns the entry's sequence."""
        return self._operate("dequeue", queue, sequences, deaths)

    def reject(self, queue: QueueKey, sequences: list[int], deaths: Deaths) -> int:
        """A client rejected these for good; returns the entry's sequence."""
        return self._operate("reject", queue, sequences, deaths)

    def _operate(self, kind: str, queue: QueueKey, sequences: list[int], deaths: Deaths) -> int:
        origin = origin_of(deaths)
        if deaths:
            for sequence in sequences:  # R10: what the log lacks of its way comes first, in the same batch
                for name, visit in self.filter.queue(queue).implied_moves(sequence, deaths):
                    moved = pb.Moved(vhost=queue[0], queue=name, sequence=sequence, visit=visit, origin=origin)
                    self.append(pb.Run(moved=moved))
        run = pb.Run()
        op = run.dequeue if kind == "dequeue" else run.reject
        op.vhost, op.queue = queue
        op.sequences.extend(RangeSet.of(sequences).flat())
        op.visit = visit_of(queue[1], deaths)
        op.origin = origin
        return self.append(run)

    def topology(self, vhost: str, action: topology.Replicate, method: Any) -> int:
        """A declaration succeeded on the own broker; returns the entry's sequence."""
        if action.purge:
            ranges = pb.Purge(vhost=vhost, queue=action.queue, before=self.next_sequence)
            return self.append(pb.Run(purge=ranges))
        return self.append(pb.Run(topology=pb.Topology(vhost=vhost, method=action.payload(method))))

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
        self.append(pb.Run(refused=refused))
        for first, last in ranges:
            self.applied(first, last)

    def seen(self, sequence: int) -> None:
        """A copy of an entry was met in a queue: it is there, whatever the broker's confirm says."""
        if sequence > self.tracker.applied and not self.tracker.is_applied(sequence):
            self._seen.add(sequence)

    def seen_gone(self, queue: QueueKey, sequence: int, generation: int, deaths: Deaths) -> None:
        """A copy was turned away."""
        self.filter.queue(queue).gone(sequence, generation, deaths)

    # ---- indexing ----------------------------------------------------------------------------------------------------

    def index(self, run: pb.Run, first: int, *, sweep: bool) -> str:
        """Takes note of a run of entries in log order; returns its kind. `sweep`: this node's own copies are to be removed by the sweeper."""
        kind = run.WhichOneof("kind") or ""
        match kind:
            case "enqueues":
                if run.enqueues.producer:
                    self.dedup.add(run.enqueues.producer, run.enqueues.id_first, len(run.enqueues.lengths), first)
            case "dequeue" | "reject":
                op = run.dequeue if kind == "dequeue" else run.reject
                which = Kind.DEQUEUE if kind == "dequeue" else Kind.REJECT
                self.filter.note(first, which, (op.vhost, op.queue), op.sequences, op.visit, op.origin, sweep=sweep)
            case "moved":
                m = run.moved
                self.filter.note(first, Kind.MOVED, (m.vhost, m.queue), (m.sequence, m.sequence), m.visit, m.origin, sweep=sweep)
            case "refused":
                self.filter.note(first, Kind.REFUSED, None, run.refused.sequences, 0, "", sweep=False)
                for part in run.refused.producers:
                    for id_first, id_last in zip(part.ids[::2], part.ids[1::2]):
                        for number in range(id_first, id_last + 1):
                            self.dedup.forget(part.producer, number, first)
            case "purge":
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
                status = pb.Status.FromString(run.status.body)
                self.statuses[status.key] = (first, status)
            case "topology":
                self._index_topology(run.topology, first)
        return kind

    def _index_topology(self, entry: pb.Topology, sequence: int) -> None:
        from .topology import DELETES  # the table of methods lives there

        if int.from_bytes(entry.method[:4], "big") in DELETES:
            self.known_topology.clear()
        else:
            self.known_topology[entry.vhost, entry.method] = sequence

    def index_batch(self, first: int, runs: Iterable[pb.Run], *, keep: bool) -> None:
        """Indexes a batch that came from elsewhere; `keep`: what is behind R waits for the applier."""
        sequence = first
        for run in runs:
            kind = self.index(run, sequence, sweep=True)
            count = len(run.enqueues.lengths) if kind == "enqueues" else 1
            if keep and sequence + count - 1 > self.tracker.applied:
                size = len(run.enqueues.frames) if kind == "enqueues" else run.ByteSize()
                self.to_apply.append(Entry(sequence, count, run, size, time.monotonic()))
                self.to_apply_bytes += size
            sequence += count

    def cut(self, first: int) -> None:
        """Entries from `first` on fell out of the log."""
        self.dedup.cut(first)
        self.filter.cut(first)
        self.sink.cut(first)
        self.known_topology = {key: s for key, s in self.known_topology.items() if s < first}
        while self.to_apply and self.to_apply[-1].first >= first:
            self.to_apply_bytes -= self.to_apply.pop().size
        self.redelivered_upto = min(self.redelivered_upto, first - 1)

    # ---- safe and applied --------------------------------------------------------------------------------------------

    def safe_advanced(self, safe: int) -> None:
        """R4: everything up to `safe` may touch the queues."""
        self.safe = safe
        self.dedup.safe(safe)
        self.filter.safe(safe)
        self.sink.safe(safe)
        while self._unsafe and self._unsafe[0][0] <= safe:
            self.unsafe_bytes -= self._unsafe.popleft()[1]
        while self._done_when_safe and self._done_when_safe[0][1] <= safe:
            self.applied(*self._done_when_safe.popleft())
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
        if not self.tracker.mark(first, last):
            if self.waiting_applied:
                self._wake_applied()
            return
        applied = self.tracker.applied
        self.dedup.completed(applied)
        if self._seen:
            self._seen.remove(0, applied)
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
        self._done_when_safe.append((first, last))

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

    @asynccontextmanager
    async def barrier(self) -> AsyncIterator[None]:
        """Everything appended before is in the queues; no publish is taken from any connection inside."""
        async with self._topology_lock:
            self._barrier_free.clear()
            try:
                self.flush()
                await self.wait_applied(self.end)
                yield
            finally:
                self._barrier_free.set()
                self.on_wake()

    @property
    def in_barrier(self) -> bool:
        return not self._barrier_free.is_set()

    async def barrier_over(self) -> None:
        await self._barrier_free.wait()
