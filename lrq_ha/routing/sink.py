"""The state of each receive queue at a sink, and the batches that it accepts from a source.

Rules:

  - The state comes only from the Reception entries of the sink group's log: `noted` for each one, in log order,
    whether this node appended it or read it. `accept` changes nothing.
  - A batch continues the queue's chain (`previous` is the last transaction here), or restarts it (`previous` = (0, 0) and a
    snapshot's marker at its head); the first batch may do either. An overlap is cut off; any other batch is a gap and is refused.
  - An accepted batch counts for a source only when its log entry is safe: `status` has only safe entries, acks wait for them, and
    entries that are cut off the log are undone.

Positions are the source group's; `op_seq` are sequences of the sink group's own log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lrq_ha.errors import IllegalEvent, MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START, may_restart, position_of
from lrq_ha.routing.names import RecvQueue, parse_recv_queue


@dataclass(frozen=True, slots=True)
class Accept:
    """Append the batch as it came."""

    last: Position


@dataclass(frozen=True, slots=True)
class AcceptTrimmed:
    """Append `body` instead: the batch without the transactions that are here already."""

    body: bytes
    last: Position


@dataclass(frozen=True, slots=True)
class Repeat:
    """The whole batch is here already: ack it when entry `op_seq` of the own log is safe (0: it is)."""

    last: Position
    op_seq: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Refuse the batch: transactions between `last` and the batch are missing."""

    last: Position


Verdict = Accept | AcceptTrimmed | Repeat | Gap


class Row(NamedTuple):
    """One queue's state in a checkpoint: plain values."""

    queue: str
    epoch: int
    sequence: int
    snapshot_request: str
    snapshot_complete: bool
    bare: bool
    begun: Position = START
    whole: Position = START


class _Held(NamedTuple):
    """A queue's state after the log entry `op_seq`."""

    op_seq: int
    last: Position
    snapshot_request: str
    snapshot_complete: bool
    bare: bool  # no snapshot has been whole since the chain began
    begun: Position = START  # where the snapshot begins that began last
    whole: Position = START  # where the snapshot begins that was complete last


_NOTHING = _Held(0, START, "", False, False)


@dataclass(slots=True)
class _Queue:
    safe: _Held = _NOTHING
    unsafe: deque[_Held] = field(default_factory=deque)  # one per entry, ascending in op_seq and in last

    @property
    def tail(self) -> _Held:
        return self.unsafe[-1] if self.unsafe else self.safe


class Sink:
    """All receive queues of one group, as one node knows them from the log."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._noted = 0  # op_seq of the newest entry that was noted or loaded
        self._safe = 0  # every entry up to here is safe; never above what `cut` may reach

    def accept(self, queue: str, batch: pb.ReceivedBatch) -> Verdict:
        """The verdict on a batch that a source pushes.

        Raises:
            MalformedInput: The batch is not for this queue, is empty, or its positions do not grow.
        """
        positions = _checked(queue, batch)
        held = self._queues.get(queue, _Queue())
        last, previous = held.tail.last, position_of(batch.previous)
        if positions[-1] <= last:
            return Repeat(positions[-1], self._holder(held, positions[-1]))
        if previous == last != START:
            return Accept(positions[-1])
        if previous == START and positions[0] > last and may_restart(batch.transactions[0]):
            return Accept(positions[-1])
        if last not in positions:
            return Gap(last)
        rest = pb.ReceivedBatch(source=batch.source, client_name=batch.client_name)
        rest.previous.CopyFrom(batch.transactions[positions.index(last)].position)
        rest.transactions.extend(batch.transactions[positions.index(last) + 1 :])
        return AcceptTrimmed(rest.SerializeToString(), positions[-1])

    def noted(self, op_seq: int, queue: str, batch: pb.ReceivedBatch) -> None:
        """The log's entry `op_seq` is a Reception of `batch`. An entry that was noted before is skipped.

        Raises:
            MalformedInput: As for `accept`.
        """
        if op_seq <= self._noted:
            return
        positions = _checked(queue, batch)
        held = self._queues.setdefault(queue, _Queue())
        _, _, request, complete, bare, begun, whole = held.tail
        bare = bare or position_of(batch.previous) == START
        for transaction in batch.transactions:
            if transaction.type in (pb.SNAPSHOT_SYNC, pb.LAST_FULL_SYNC_ENTRY):
                complete = transaction.type == pb.LAST_FULL_SYNC_ENTRY
                if may_restart(transaction) and not (complete and request == transaction.request_id):
                    begun = position_of(transaction.position)
                request = transaction.request_id
                bare = bare and not complete
                whole = begun if complete else whole
        after = _Held(op_seq, positions[-1], request, complete, bare, begun, whole)
        if op_seq <= self._safe:
            held.safe = after
        else:
            held.unsafe.append(after)
        self._noted = op_seq

    def safe(self, upto: int) -> None:
        """Entries of the own log up to `upto` are safe."""
        self._safe = max(self._safe, upto)
        for held in self._queues.values():
            while held.unsafe and held.unsafe[0].op_seq <= upto:
                held.safe = held.unsafe.popleft()

    def cut(self, first: int) -> None:
        """Entries from `first` on are cut off the log.

        Raises:
            IllegalEvent: One of them was safe, or lies before the loaded rows: then load again and note the log from there.
        """
        if first <= self._safe:
            raise IllegalEvent(f"A cut at {first} reaches below {self._safe}, which is safe", todo="Load a checkpoint from before it.")
        for held in self._queues.values():
            while held.unsafe and held.unsafe[-1].op_seq >= first:
                held.unsafe.pop()
        self._noted = min(self._noted, first - 1)

    def status(self, queue: str) -> pb.SinkStatus:
        """The safe state of `queue`: the answer to a source that asks."""
        held = self._queues.get(queue, _Queue()).safe
        return pb.SinkStatus(
            queue=queue,
            last=pb.Position(epoch=held.last.epoch, sequence=held.last.sequence),
            snapshot_request=held.snapshot_request,
            snapshot_complete=held.snapshot_complete,
            bare=held.bare,
        )

    def queues(self) -> list[str]:
        """Every receive queue that has had a batch, by name."""
        return sorted(queue for queue, held in self._queues.items() if held.tail != _NOTHING)

    def receive_states(self, client_name: str) -> list[pb.ReceiveState]:
        """The safe states of a client's queues, for a receiver that asks."""
        states = []
        for queue, held in sorted(self._queues.items()):
            parts = parse_recv_queue(queue)
            if parts is not None and parts.client_name == client_name and held.safe != _NOTHING:
                states.append(state_of(_row(queue, held.safe)))
        return states

    def rows(self) -> list[Row]:
        """The state after all noted entries, for a checkpoint entry that is appended next."""
        return [_row(queue, self._queues[queue].tail) for queue in self.queues()]

    def load(self, rows: Iterable[Row], op_seq: int) -> None:
        """Replaces everything by `rows`, which hold after entry `op_seq`; that entry must be safe."""
        held = {row.queue: _Queue(_Held(op_seq, Position(row.epoch, row.sequence), *row[3:])) for row in rows}
        self._queues, self._noted, self._safe = held, op_seq, op_seq

    def _holder(self, held: _Queue, position: Position) -> int:
        """The entry that must be safe before `position` is; 0 if `position` is safe."""
        return 0 if position <= held.safe.last else next(entry.op_seq for entry in held.unsafe if entry.last >= position)


def _row(queue: str, held: _Held) -> Row:
    return Row(queue, held.last.epoch, held.last.sequence, held.snapshot_request, held.snapshot_complete, held.bare, held.begun, held.whole)


def state_of(row: Row) -> pb.ReceiveState:
    """The message for a row."""
    at = (pb.Position(epoch=epoch, sequence=sequence) for epoch, sequence in ((row.epoch, row.sequence), row.begun, row.whole))
    last, begun, whole = at
    return pb.ReceiveState(
        queue=row.queue,
        last=last,
        snapshot_request=row.snapshot_request,
        snapshot_complete=row.snapshot_complete,
        bare=row.bare,
        begun=begun,
        whole=whole,
    )


def row_of(state: pb.ReceiveState) -> Row:
    """The row that `state_of` made a message of."""
    last, begun, whole = map(position_of, (state.last, state.begun, state.whole))
    return Row(state.queue, *last, state.snapshot_request, state.snapshot_complete, state.bare, begun, whole)


def _checked(queue: str, batch: pb.ReceivedBatch) -> list[Position]:
    """The positions of `batch`."""
    if parse_recv_queue(queue) != RecvQueue(batch.client_name, batch.source):
        raise MalformedInput(f"A batch of {batch.client_name!r} from {batch.source!r} came for {queue}")
    positions = [position_of(transaction.position) for transaction in batch.transactions]
    if not positions or any(a >= b for a, b in zip([position_of(batch.previous), *positions], positions)):
        raise MalformedInput(f"A batch for {queue} is empty or its positions do not grow")
    return positions
