"""The state of each receive queue at a sink, and the batches that it accepts from a source.

Rules:

  - The state comes only from the Reception and Demand entries of the sink group's log: `noted` for each one, in log order,
    whether this node appended it or read it. `accept` changes nothing.
  - A batch continues the queue's chain (`previous` is the last transaction here), or restarts it (`previous` = (0, 0) and a
    snapshot's marker at its head); the first batch may do either. An overlap is cut off; any other batch is a gap and is refused. Another restart
    that begins at or below the last transaction is refused, too: it comes from a source that was told of safe entries only, and asks again.
  - An accepted batch counts for a source only when its log entry is safe: `status` has only safe entries, acks wait for them, and
    entries that are cut off the log are undone.

Positions are the source group's; `op_seq` are sequences of the sink group's own log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lrq_ha.errors import IllegalEvent, MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START, may_restart, position_of
from lrq_ha.routing.log_identity import is_other_log, other_log
from lrq_ha.routing.names import RecvQueue, parse_recv_queue
from lrq_ha.routing.receive_state import ReceiveState, message_of, state_of


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


class _Held(NamedTuple):
    """A queue's state after the log entry `op_seq`."""

    op_seq: int
    state: ReceiveState


_NOTHING = _Held(0, ReceiveState())


@dataclass(slots=True)
class _Queue:
    safe: _Held = _NOTHING
    unsafe: deque[_Held] = field(default_factory=deque)  # one per entry, ascending in op_seq

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
            MalformedInput: The batch is not for this queue, is empty, or its positions do not grow; or it comes from another log.
        """
        positions = _checked(queue, batch)
        held = self._queues.get(queue, _Queue())
        if is_other_log(held.tail.state.log_id, batch.log_id):
            raise other_log(batch.source, held.tail.state.log_id, batch.log_id)
        last, previous = held.tail.state.last, position_of(batch.previous)
        restarts = previous == START and may_restart(batch.transactions[0])
        if restarts and positions[0] <= last and positions[0] != held.tail.state.begun:
            return Gap(last)  # the source does not know of a batch that is not safe yet
        if positions[-1] <= last:
            return Repeat(positions[-1], self._holder(held, positions[-1]))
        if previous == last != START:
            return Accept(positions[-1])
        if restarts and positions[0] > last:
            return Accept(positions[-1])
        if last not in positions:
            return Gap(last)
        rest = pb.ReceivedBatch(source=batch.source, client_name=batch.client_name, log_id=batch.log_id)
        rest.previous.CopyFrom(batch.transactions[positions.index(last)].position)
        rest.transactions.extend(batch.transactions[positions.index(last) + 1 :])
        return AcceptTrimmed(rest.SerializeToString(), positions[-1])

    def noted(self, op_seq: int, queue: str, batch: pb.ReceivedBatch) -> None:
        """The log's entry `op_seq` is a Reception of `batch`. An entry that was noted before is skipped.

        Raises:
            MalformedInput: As for `accept`.
        """

        def receive(state: ReceiveState) -> ReceiveState:
            _checked(queue, batch)
            return state.after(batch)

        self._note(op_seq, queue, receive)

    def demanded(self, op_seq: int, queue: str, reason: str) -> None:
        """The log's entry `op_seq` demands a full sync of `queue`. An entry that was noted before is skipped, as one of an unknown queue."""
        if self.newest(queue).last != START:
            self._note(op_seq, queue, lambda state: state.demanded(op_seq, reason))

    def _note(self, op_seq: int, queue: str, change: Callable[[ReceiveState], ReceiveState]) -> None:
        if op_seq <= self._noted:
            return
        after = _Held(op_seq, change(self.newest(queue)))
        held = self._queues.setdefault(queue, _Queue())
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

    def status(self, queue: str) -> ReceiveState:
        """The safe state of `queue`: the answer to a source that asks."""
        return self._queues.get(queue, _Queue()).safe.state

    def newest_demand(self, source: str) -> int:
        """The entry of the newest safe demand to a source that is open; 0: none is."""
        return max((held.safe.state.demand for queue, held in self._queues.items() if queue.endswith(f"_{source}")), default=0)

    def queues(self) -> list[str]:
        """Every receive queue that has had a batch, by name."""
        return sorted(queue for queue, held in self._queues.items() if held.tail != _NOTHING)

    def newest(self, queue: str) -> ReceiveState:
        """The state of `queue` after all noted entries, safe or not."""
        return self._queues.get(queue, _Queue()).tail.state

    def states(self) -> dict[str, ReceiveState]:
        """The safe states of all queues that have had a batch."""
        return {queue: held.safe.state for queue, held in sorted(self._queues.items()) if held.safe != _NOTHING}

    def receive_states(self, client_name: str) -> list[pb.ReceiveState]:
        """The safe states of a client's queues, for a receiver that asks."""
        found = ((queue, parse_recv_queue(queue), state) for queue, state in self.states().items())
        return [message_of(queue, state) for queue, parts, state in found if parts is not None and parts.client_name == client_name]

    def rows(self) -> list[pb.ReceiveState]:
        """The state after all noted entries, for a checkpoint entry that is appended next."""
        return [message_of(queue, self._queues[queue].tail.state) for queue in self.queues()]

    def load(self, rows: Iterable[pb.ReceiveState], op_seq: int) -> None:
        """Replaces everything by `rows`, which hold after entry `op_seq`; that entry must be safe."""
        self._queues = {row.queue: _Queue(_Held(op_seq, state_of(row))) for row in rows}
        self._noted = self._safe = op_seq

    def _holder(self, held: _Queue, position: Position) -> int:
        """The entry that must be safe before `position` is; 0 if `position` is safe."""
        if position <= held.safe.state.last:
            return 0
        return next(entry.op_seq for entry in held.unsafe if entry.state.last >= position)


def _checked(queue: str, batch: pb.ReceivedBatch) -> list[Position]:
    """The positions of `batch`."""
    if parse_recv_queue(queue) != RecvQueue(batch.client_name, batch.source):
        raise MalformedInput(f"A batch of {batch.client_name!r} from {batch.source!r} came for {queue}")
    positions = [position_of(transaction.position) for transaction in batch.transactions]
    if not positions or any(a >= b for a, b in zip([position_of(batch.previous), *positions], positions)):
        raise MalformedInput(f"A batch for {queue} is empty or its positions do not grow")
    return positions
