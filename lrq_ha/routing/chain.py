"""What stands in a receive queue: one destination's share of a transaction, and the markers of snapshots.

Rule: only payloads for the destination travel, in the order of the transaction's entries; a transaction is never split. The
chain's own rules are in the package's docstring.
"""

from __future__ import annotations

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.errors import MalformedInput
from lrq_ha.replication.positions import Position
from lrq_ha.routing.names import check_client_name, check_remote_id

START = Position(0, 0)  # before the first transaction of a queue
#: The end of the year 9999: readers' calendars know no later time.
TIMESTAMP_US_MAX = 253_402_300_799_999_999
TRANSMISSION_BYTES_MAX = (16 << 20) - (64 << 10)  # of a transaction: with what a view and the log add, RabbitMQ 4 still takes it in one message

_OF_SNAPSHOTS = (pb.SNAPSHOT_SYNC, pb.LAST_FULL_SYNC_ENTRY)


def position_of(message: pb.Position) -> Position:
    return Position(message.epoch, message.sequence)


def check(transaction: pb.Transaction) -> None:
    """Whether a transaction from a client can be sent on at all.

    Raises:
        MalformedInput: A name is not valid, an entry refers to no payload, the time is none that readers know, or the type and the request do not go
            together.
    """
    check_client_name(transaction.client_name)
    for destination in {name for entry in transaction.entries for name in entry.destinations}:
        check_remote_id(destination)
    highest = max((entry.payload for entry in transaction.entries), default=-1)
    if highest >= len(transaction.payloads):
        raise MalformedInput(f"Transaction {transaction.replication_id} refers to payload {highest} of {len(transaction.payloads)}")
    if transaction.timestamp_us > TIMESTAMP_US_MAX:
        raise MalformedInput(
            f"Transaction {transaction.replication_id} has timestamp_us {transaction.timestamp_us}, after the year 9999",
            todo="It is microseconds since 1970, or 0.",
        )
    if transaction.type not in (pb.LOG_ENTRY_SYNC, *_OF_SNAPSHOTS) or (transaction.type in _OF_SNAPSHOTS) != bool(transaction.request_id):
        kind = pb.ReplicationType.Name(transaction.type) if transaction.type in pb.ReplicationType.values() else transaction.type
        raise MalformedInput(
            f"Transaction {transaction.replication_id} has type {kind} and request {transaction.request_id!r}",
            todo="Deltas have no request id; snapshot data has that of the full sync request.",
        )


def share(transaction: pb.Transaction, remote_id: str) -> list[bytes]:
    """The payloads of `transaction`, which was checked, that `remote_id` is to have."""
    return [transaction.payloads[entry.payload] for entry in transaction.entries if remote_id in entry.destinations]


def received(transaction: pb.Transaction, position: Position, remote_id: str) -> pb.ReceivedTransaction | None:
    """`transaction`, which stands at `position` in the source's log, as `remote_id` gets it; None if nothing is for it.

    An end marker belongs to whoever asked for its request, payloads or not. Its publisher names the destination with an empty payload, which
    is no data and goes no further.
    """
    payloads = share(transaction, remote_id)
    if transaction.type == pb.LAST_FULL_SYNC_ENTRY:
        payloads = [payload for payload in payloads if payload]
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


def may_restart(transaction: pb.ReceivedTransaction) -> bool:
    """Whether a chain may start anew with this transaction: a snapshot begins with it, or it is a whole one."""
    return not transaction.payloads and transaction.type in _OF_SNAPSHOTS
