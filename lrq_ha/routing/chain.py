"""What stands in a receive queue: one destination's share of a transaction, and the markers of snapshots.

Rule: only payloads for the destination travel, in the order of the transaction's entries; a transaction is never split. The
chain's own rules are in the package's docstring.
"""

from __future__ import annotations

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.errors import MalformedInput
from lrq_ha.replication.positions import Position

START = Position(0, 0)  # before the first transaction of a queue


def position_of(message: pb.Position) -> Position:
    return Position(message.epoch, message.sequence)


def share(transaction: pb.Transaction, remote_id: str) -> list[bytes]:
    """The payloads of `transaction` that `remote_id` is to have.

    Raises:
        MalformedInput: An entry refers to a payload that is not in the table.
    """
    wanted = [entry.payload for entry in transaction.entries if remote_id in entry.destinations]
    if wanted and max(wanted) >= len(transaction.payloads):
        raise MalformedInput(f"Transaction {transaction.replication_id} refers to payload {max(wanted)} of {len(transaction.payloads)}")
    return [transaction.payloads[index] for index in wanted]


def received(transaction: pb.Transaction, position: Position, remote_id: str) -> pb.ReceivedTransaction | None:
    """`transaction`, which stands at `position` in the source's log, as `remote_id` gets it; None if nothing is for it.

    An end marker belongs to whoever asked for its request, payloads or not.
    """
    payloads = share(transaction, remote_id)
    if not payloads and transaction.type != pb.LAST_FULL_SYNC_ENTRY:
        return None
    return pb.ReceivedTransaction(
        position=pb.Position(epoch=position.epoch, sequence=position.sequence),
        replication_id=transaction.replication_id,
        timestamp_us=transaction.timestamp_us,
        type=transaction.type,
        request_id=transaction.request_id,
        payloads=payloads,
    )


def marker(position: Position, kind: pb.ReplicationType, request_id: str) -> pb.ReceivedTransaction:
    """A start marker (SNAPSHOT_SYNC) or a whole empty snapshot (LAST_FULL_SYNC_ENTRY)."""
    at = pb.Position(epoch=position.epoch, sequence=position.sequence)
    return pb.ReceivedTransaction(position=at, type=kind, request_id=request_id)


def is_start_marker(transaction: pb.ReceivedTransaction) -> bool:
    return transaction.type == pb.SNAPSHOT_SYNC and not transaction.payloads


def may_restart(transaction: pb.ReceivedTransaction) -> bool:
    """Whether a chain may start anew with this transaction: a snapshot begins with it, or it is a whole one."""
    return not transaction.payloads and transaction.type in (pb.SNAPSHOT_SYNC, pb.LAST_FULL_SYNC_ENTRY)
