"""One node of the simulation: what outlives its sidecar (broker, streams, records), and the sidecar's parts around the real `Replica`.

The real `Replica`, `recovery` and `applied_record` run here, without I/O. What is made of awaits is modelled: applying.py and door.py.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from applying import Applier, Sweeper
from broker import Broker
from cluster import Fence, Host
from door import Barrier, Relay

from broker_plugin.log import codec
from broker_plugin.log.log_reader import OFFSET
from broker_plugin.log.replica import Replica
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.sidecar.node.recovery import applied_record


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs what never really waits."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("it waits")


class SimReplica(Replica):
    """The real one; whoever drives it calls `turn` where an event loop would."""

    def append(self, run: pb.Run, count: int = 1, size: int = 64, *, apply: bool = False, contents: Sequence[bytes | memoryview] = ()) -> int:
        self._flush_scheduled = True
        return super().append(run, count, size, apply=apply, contents=contents)

    def turn(self) -> None:
        self._flush_soon()


class Streams:
    """The streams of a broker, as `recovery` reads them."""

    log_queue, applied_queue = "log", "applied"
    lost_host = False  # its exchanges are durable, so that nothing is to be declared again

    def __init__(self, site: Site) -> None:
        self._site = site
        self.generation = site.opens

    async def read(self, queue: str, take: Any, start: int | str = "first") -> int:
        if queue == self.applied_queue:
            for body in self._site.records[-1:] if start == "last" else self._site.records:
                take({}, body)
            return len(self._site.records)
        end = len(self._site.stream)  # where its OPEN would stand
        first = start if isinstance(start, int) else max(0, end - 1) if start == "last" else 0
        if first > end:
            raise RuntimeError("it waits: a broker gives nothing from beyond the end")
        for offset, record in enumerate(self._site.stream[first:], first):
            if isinstance(record, Fence):
                take({codec.FENCE: record.epoch, codec.FENCE_OUT: record.out_end, OFFSET: offset}, b"")
            else:
                take({**codec.batch_headers(record.header, 0), OFFSET: offset}, record.body)
        return end

    async def write_applied(self, body: bytes) -> None:
        self._site.records.append(body)


@dataclass
class Site(Host):
    """A node with its broker. `broker`, `records` and `opens` outlive the sidecar."""

    broker: Broker = field(default_factory=Broker)
    records: list[bytes] = field(default_factory=list)
    opens: int = 0
    record_pending: bytes = b""
    recorded_state: tuple[int, int] = (-1, -1)
    skew: float = 1.0
    offset: float = 0.0
    replica: SimReplica = field(default=None)  # type: ignore[assignment]
    applier: Applier = field(default=None)  # type: ignore[assignment]
    sweeper: Sweeper = field(default=None)  # type: ignore[assignment]
    relays: list[Relay] = field(default_factory=list)
    barrier: Barrier | None = None

    def begin(self) -> None:
        """The applier and the sweeper of a new incarnation."""
        self.applier = Applier(self)
        self.sweeper = Sweeper(self)
        if self.replica.to_apply:
            known = {t.key for t in self.replica.index.filter.queues()}
            self.sweeper.suspect(known.union(self.replica.declared.existing()), self.replica.node.log.end)
        self.sweeper.suspect((t.key for t in self.replica.index.filter.queues() if t.spares), 0)
        self.relays = []
        self.barrier = None
        self.recorded_state = (-1, -1)

    def end(self) -> None:
        """The sidecar is gone: nobody reads its connections any more."""
        for relay in self.relays:
            relay.closed = True
            if relay.client is not None:
                relay.client.lost()
        self.relays = []
        for pipe in self.broker.pipes:
            pipe.abandoned = True

    def is_recorded(self, upto: int) -> bool:
        """Whether a restart would not publish again what was routed by the bindings of before."""
        return self.replica.barrier.recorded >= min(upto, self.replica.barrier.published_upto) or bool(self.applier.parked)

    def write_record(self) -> bool:
        """The applied record is sent, or confirmed."""
        if self.record_pending:
            self.records.append(self.record_pending)
            self.record_pending = b""
            self.recorded = pb.Applied.FromString(self.records[-1]).applied
            self.replica.barrier.recorded = max(self.replica.barrier.recorded, self.recorded)
            if self.node is not None:
                self.lost_host = self.lost_host and self.node.lost_host
            return True
        state = (self.replica.progress.tracker.applied, self.replica.progress.safe)
        if state == self.recorded_state:
            return False
        self.recorded_state = state
        self.record_pending = applied_record(self.replica, self.checkpoints).SerializeToString()
        return True
