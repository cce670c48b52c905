"""The state of one receive queue at a sink: a value, and its changes by the entries of the sink group's log. Pure.

Rules:

- A queue's snapshots are known by their start markers. `begun` is that of the last one, `whole` that of the last one whose end marker came.
- Sizes count the batches' bytes since the queue's first one, with an allowance for each message: about what the stream takes.
- A demand for a full sync is open until a start marker comes behind it.
- A stream surely keeps `kept_bytes`. A full sync is due when another snapshot of the last one's size would no longer fit behind that one, but
  only after twice that size: a snapshot must not be asked for all the time.
- A source may drop a snapshot that it has begun, and says nothing: its rows stay away while deltas come. When these are as many as the stream
  surely keeps, that snapshot is lost in any case, and no longer waited for.
- No snapshot is asked for where one does not fit: it would be lost again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START, may_restart, position_message, position_of

MESSAGE_BYTES = 256  # that a stream takes for a message beyond its body


class ReceiveState(NamedTuple):
    """The state of a receive queue.

    Attributes:
        last: The last transaction, a position of the source's log.
        snapshot_request, snapshot_complete: The full sync that began last, and whether its end marker came.
        bare: No snapshot has been whole since the chain began.
        begun: Where the snapshot begins that began last.
        whole: Where the snapshot begins that was complete last; (0, 0): none was.
        size: Bytes that came.
        begun_size, whole_size: `size` before these snapshots.
        rows_size: `size` behind the last rows of the snapshot that began last.
        snapshot_bytes: Of the last whole snapshot, with the deltas that came meanwhile.
        demand: The entry of the open demand; 0: none.
        demand_reason: For operators.
        log_id: The identity of the source's log; empty: not known.
    """

    last: Position = START
    snapshot_request: str = ""
    snapshot_complete: bool = False
    bare: bool = False
    begun: Position = START
    whole: Position = START
    size: int = 0
    begun_size: int = 0
    whole_size: int = 0
    snapshot_bytes: int = 0
    demand: int = 0
    demand_reason: str = ""
    log_id: bytes = b""
    rows_size: int = 0

    def after(self, batch: pb.ReceivedBatch) -> ReceiveState:
        """The state when a batch has come."""
        state = self._replace(
            last=position_of(batch.transactions[-1].position),
            bare=self.bare or position_of(batch.previous) == START,
            size=self.size + batch.ByteSize() + MESSAGE_BYTES,
            log_id=self.log_id or batch.log_id,
        )
        for transaction in batch.transactions:
            if transaction.type in (pb.SNAPSHOT_SYNC, pb.LAST_FULL_SYNC_ENTRY):
                state = state._after_rows(transaction, self.size)
        return state

    def _after_rows(self, transaction: pb.ReceivedTransaction, size_before: int) -> ReceiveState:
        """The state behind a marker or rows of a snapshot. `size_before`: bytes that had come before its batch."""
        state, request = self, transaction.request_id
        ends = transaction.type == pb.LAST_FULL_SYNC_ENTRY
        if may_restart(transaction) and not (ends and self.snapshot_request == request):
            state = state._replace(begun=position_of(transaction.position), begun_size=size_before, demand=0, demand_reason="")
        state = state._replace(snapshot_request=request, snapshot_complete=ends, rows_size=state.size)
        if not ends:
            return state
        return state._replace(bare=False, whole=state.begun, whole_size=state.begun_size, snapshot_bytes=state.size - state.begun_size)

    def demanded(self, entry: int, reason: str) -> ReceiveState:
        """The state when entry `entry` has demanded a full sync. An older demand stays the open one."""
        return self if self.demand else self._replace(demand=entry, demand_reason=reason)

    def is_under_way(self, kept_bytes: int) -> bool:
        """Whether a snapshot has begun and not ended, and its source has not dropped it, as far as a stream that surely keeps `kept_bytes` shows."""
        silent_bytes = self.size - max(self.rows_size, self.begun_size)  # an older version's state has no `rows_size`
        return self.begun != START and not self.snapshot_complete and silent_bytes <= kept_bytes

    def is_full_sync_due(self, kept_bytes: int) -> bool:
        """Whether a stream that surely keeps `kept_bytes` needs a new snapshot, and can hold one."""
        if self.whole == START or self.is_under_way(kept_bytes) or self.demand or self.overflow(kept_bytes):
            return False
        return self.size - self.whole_size >= min(kept_bytes, max(kept_bytes - self.snapshot_bytes, 2 * self.snapshot_bytes))

    def lacks_snapshot(self, head: Position | None, kept_bytes: int) -> bool:
        """Whether a stream whose first transaction is `head` (None: it is missing) lacks the start of the last snapshot, and can hold another one."""
        needed = self.begun if self.is_under_way(kept_bytes) or self.whole == START else self.whole
        return needed != START and (head is None or head > needed) and not self.overflow(kept_bytes)

    def overflow(self, kept_bytes: int) -> int:
        """Bytes of a snapshot that is larger than a stream surely keeps; 0: none is."""
        largest = max(self.snapshot_bytes, self.rows_size - self.begun_size if self.is_under_way(kept_bytes) else 0)
        return largest if largest > kept_bytes else 0


def message_of(queue: str, state: ReceiveState) -> pb.ReceiveState:
    """The message for a queue's state, of a checkpoint or an answer."""
    values: dict[str, Any] = {name: position_message(value) if isinstance(value, Position) else value for name, value in state._asdict().items()}
    return pb.ReceiveState(queue=queue, **values)


def state_of(message: pb.ReceiveState) -> ReceiveState:
    """The state that `message_of` made a message of."""
    values: list[Any] = [getattr(message, name) for name in ReceiveState._fields]
    return ReceiveState._make(position_of(value) if isinstance(value, pb.Position) else value for value in values)
