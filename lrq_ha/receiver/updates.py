"""The updates and snapshots that a listener is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import position_of


class UpdateType(Enum):
    """The two kinds of updates; a list holds one kind only."""

    LOG_ENTRY_SYNC = "delta"
    SNAPSHOT_SYNC = "row of a snapshot"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A full sync.

    Attributes:
        queue: The receive queue.
        source: The source's remote id.
        client_name: The source's log replication client.
        request_id: Of the full sync; empty for the empty snapshot of a client without a provider.
        base: Position of the source's log at which the snapshot begins: deltas behind the base come after the snapshot.
    """

    queue: str
    source: str
    client_name: str
    request_id: str
    base: Position


@dataclass(frozen=True, slots=True)
class Update:
    """One payload of a transaction.

    Attributes:
        queue: The receive queue.
        source: The source's remote id.
        client_name: The source's log replication client.
        type: Delta, or row of a snapshot.
        position: Of the transaction, in the source's log.
        replication_id: `<transaction>.<index>`.
        timestamp_us: The publisher's clock, microseconds since 1970.
        index: Of the payload in the transaction, from 0.
        opaque_payload: The bytes that the source's client transmitted.
        request_id: The full sync; empty for a delta.
        last_of_transaction: Whether it is the transaction's last payload.
        path: The groups that it has passed, the source last. A publisher that sends it on gives this as its `path`.
    """

    queue: str
    source: str
    client_name: str
    type: UpdateType
    position: Position
    replication_id: str
    timestamp_us: int
    index: int
    opaque_payload: bytes
    request_id: str
    last_of_transaction: bool
    path: tuple[str, ...] = ()


def updates_of(queue: str, batch: pb.ReceivedBatch, transaction: pb.ReceivedTransaction) -> Iterator[Update]:
    """The updates of one transaction, in order."""
    kind = UpdateType.LOG_ENTRY_SYNC if transaction.type == pb.LOG_ENTRY_SYNC else UpdateType.SNAPSHOT_SYNC
    position, last = position_of(transaction.position), len(transaction.payloads) - 1
    for index, payload in enumerate(transaction.payloads):
        name = f"{transaction.replication_id}.{index}"
        shared = (queue, batch.source, batch.client_name, kind, position, name, transaction.timestamp_us)
        yield Update(*shared, index, payload, transaction.request_id, index == last, (*transaction.path, batch.source))
