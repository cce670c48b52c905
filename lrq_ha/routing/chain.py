"""The transactions of a receive queue: one destination's share of each transaction, and the markers of snapshots.

Rules:

- Only payloads for the destination travel, in the order of the transaction's entries; a transaction is never split. The chain's own rules
  are in the package's docstring.
- A transaction does not go to a group that it has passed: such destinations are left out, the others get it.
- A payload stands in a transaction once, and in a destination's share as often as entries name it: so the size of each share is bounded, and
  the number of addressees. A sink gets a share in one message, and its broker must take it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from lrq_ha.errors import MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing.names import check_client_name, check_remote_id

START = Position(0, 0)  # before the first transaction of a queue
#: The end of the year 9999: readers' calendars know no later time.
TIMESTAMP_US_MAX = 253_402_300_799_999_999
BATCH_BYTES_MAX = 16 << 20  # of a batch that a sink takes, and of its view, in one message: the default limit of RabbitMQ 4
TRANSMISSION_BYTES_MAX = BATCH_BYTES_MAX - (64 << 10)  # of a transaction, and of each share: views, batches and the log add to it
ADDRESSEES_MAX = 20_000  # entries times destinations of a transaction: the event loop is blocked for less than 0.1 s
PATH_MAX = 16  # groups that a transaction has passed
PAYLOAD_FRAMING_BYTES = 6  # at most

_OF_SNAPSHOTS = (pb.SNAPSHOT_SYNC, pb.LAST_FULL_SYNC_ENTRY)


def position_of(message: pb.Position) -> Position:
    return Position(message.epoch, message.sequence)


def position_message(position: Position) -> pb.Position:
    """The message for a position."""
    return pb.Position(epoch=position.epoch, sequence=position.sequence)


def check(transaction: pb.Transaction) -> Collection[str]:
    """Checks that a transaction from a client can be sent on. Returns its destinations.

    Raises:
        MalformedInput: A name is not valid, an entry refers to no payload, the transaction is too large for a destination, readers have no such
            time, or the type and the request do not go together.
    """
    check_client_name(transaction.client_name)
    if max(len(transaction.entries), len(transaction.payloads)) > ADDRESSEES_MAX:
        raise _too_many(max(len(transaction.entries), len(transaction.payloads)))
    sizes = [len(payload) for payload in transaction.payloads]
    highest = max((entry.payload + entry.more for entry in transaction.entries), default=-1)
    if highest >= len(sizes):
        raise MalformedInput(f"Transaction {transaction.replication_id} refers to payload {highest} of {len(sizes)}")
    found = check_shares((sizes[entry.payload : entry.payload + entry.more + 1], entry.destinations) for entry in transaction.entries)
    for name in (*found, *transaction.path):
        check_remote_id(name)
    if len(transaction.path) > PATH_MAX:
        raise MalformedInput(f"Transaction {transaction.replication_id} has passed {len(transaction.path)} groups, of {PATH_MAX} at most")
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
    return found


def check_shares(entries: Iterable[tuple[Sequence[int], Collection[str]]]) -> Collection[str]:
    """Checks that each destination can be sent its share of a transaction. Returns the destinations.

    Args:
        entries: Of each run of entries the sizes of their payloads in bytes, and their destinations.

    Raises:
        MalformedInput: A share is too large.
    """
    shares: dict[str, int] = {}
    addressees = 0
    for sizes, destinations in entries:
        addressees += len(sizes) * max(1, len(destinations))
        if addressees > ADDRESSEES_MAX:
            raise _too_many(addressees)
        size_bytes = sum(sizes) + len(sizes) * PAYLOAD_FRAMING_BYTES
        for destination in destinations:
            shares[destination] = shares.get(destination, 0) + size_bytes
    largest = max(shares.values(), default=0)
    if largest > TRANSMISSION_BYTES_MAX:
        raise MalformedInput(
            f"A transaction whose share for one destination has {largest} bytes, of {TRANSMISSION_BYTES_MAX} at most",
            todo="Split it into several; a payload that several entries name counts as often.",
        )
    return shares


def _too_many(found: int) -> MalformedInput:
    return MalformedInput(
        f"A transaction of {found} or more entries, of {ADDRESSEES_MAX} at most (an entry for several destinations counts as often)",
        todo="Split it into several.",
    )


def payloads_of(entry: pb.RoutingTableEntryMsg) -> range:
    """The numbers of an entry's payloads in its transaction, which was checked."""
    return range(entry.payload, entry.payload + entry.more + 1)


def leave_out(transaction: pb.Transaction, remote_ids: Collection[str]) -> None:
    """Takes destinations out of `transaction`, which was checked: their entries, and the payloads that no other destination gets."""
    kept = [(entry, left) for entry in transaction.entries if (left := [name for name in entry.destinations if name not in remote_ids])]
    needed = {number for entry, _ in kept for number in payloads_of(entry)}
    entries = [pb.RoutingTableEntryMsg(destinations=left, payload=entry.payload, more=entry.more) for entry, left in kept]
    del transaction.entries[:]
    transaction.entries.extend(entries)
    for index in range(len(transaction.payloads)):
        if index not in needed:
            transaction.payloads[index] = b""  # the entries name payloads by their numbers


def received(transaction: pb.Transaction, position: Position, payloads: Sequence[bytes]) -> pb.ReceivedTransaction | None:
    """The form of `transaction`, which stands at `position` in the source's log, for a destination that gets `payloads`; None if nothing is for it.

    An end marker belongs to the destination that requested the snapshot, payloads or not. Its publisher names the destination with an empty
    payload, which is no data and is not sent.
    """
    if transaction.type == pb.LAST_FULL_SYNC_ENTRY:
        payloads = [payload for payload in payloads if payload]
    if not payloads and transaction.type != pb.LAST_FULL_SYNC_ENTRY:
        return None
    return pb.ReceivedTransaction(
        position=position_message(position),
        replication_id=transaction.replication_id,
        timestamp_us=transaction.timestamp_us,
        type=transaction.type,
        request_id=transaction.request_id,
        payloads=payloads,
        path=transaction.path,
    )


def marker(position: Position, kind: pb.ReplicationType, request_id: str) -> pb.ReceivedTransaction:
    """A start marker (SNAPSHOT_SYNC) or a whole empty snapshot (LAST_FULL_SYNC_ENTRY)."""
    return pb.ReceivedTransaction(position=position_message(position), type=kind, request_id=request_id)


def may_restart(transaction: pb.ReceivedTransaction) -> bool:
    """Whether a chain may restart with this transaction: a start marker, or a whole snapshot."""
    return not transaction.payloads and transaction.type in _OF_SNAPSHOTS
