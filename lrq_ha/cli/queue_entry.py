"""The entries of a routing queue, as `lrq-ha peek` shows them. Pure.

One message of `LRQ_Recv_*` has one entry for each of its transactions, with positions of the source's log. A message of `LRQ_Send_*` or `LRQ_Status`
is one entry; its position in this group's log is in a header.

Rules:

- An entry is a repeat if its position is not greater than the greatest one that was read, or that is known to stand before.
- A message that has another form than its queue's is an entry, too: it is shown as unreadable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from broker_plugin.log.codec import OPEN
from lrq_ha.errors import MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import parse_stamp
from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START, may_restart, position_of
from lrq_ha.routing.names import SEND_LOG_ENTRIES, SEND_SNAP_SYNC, STATUS, parse_recv_queue
from lrq_ha.streams.message import Record, parse_message

T = TypeVar("T", pb.Transaction, pb.Status)

STAMP = "x-lrq-pos"
QUEUES = f"LRQ_Recv_<client_name>_<remote_id>, {SEND_LOG_ENTRIES}, {SEND_SNAP_SYNC}, {STATUS}"


class Kind(Enum):
    """What an entry is, in words."""

    DELTA = "delta"
    SNAPSHOT_START = "snapshot start"
    SNAPSHOT_ROWS = "snapshot rows"
    SNAPSHOT_END = "snapshot end"
    EMPTY_SNAPSHOT = "empty snapshot"
    CLIENT = "client"
    FULL_SYNC_REQUESTED = "full sync requested"
    FULL_SYNC_COMPLETED = "full sync completed"
    FULL_SYNC_CANCELLED = "full sync cancelled"
    OPEN = "open"
    UNREADABLE = "unreadable"


_FULL_SYNCS = {
    pb.FullSyncRequest.REQUESTED: Kind.FULL_SYNC_REQUESTED,
    pb.FullSyncRequest.COMPLETED: Kind.FULL_SYNC_COMPLETED,
    pb.FullSyncRequest.CANCELLED: Kind.FULL_SYNC_CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload, and who gets it; in a receive queue its group does, and none is named."""

    body: bytes
    destinations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry.

    Attributes:
        offset: Of its message in the stream on this node.
        kind: What it is.
        position: In the source's log (`LRQ_Recv_*`), or in this group's; None: it has none.
        repeat: It was read before: a node writes its last entries again when its sidecar starts.
        restarts: The chain restarts here: nothing before it leads to it.
        hole_after: The position that it follows, if that was not read: what is between the two is not in the queue. None: no such hole is known.
        client_name, request_id, replication_id: Empty: none.
        timestamp_us: The publisher's clock, microseconds since 1970; 0: none.
        destinations: Of all its payloads.
        payloads: As the transaction holds them.
        text: What else there is to say.
    """

    offset: int
    kind: Kind
    position: Position | None = None
    repeat: bool = False
    restarts: bool = False
    hole_after: Position | None = None
    client_name: str = ""
    request_id: str = ""
    replication_id: str = ""
    timestamp_us: int = 0
    destinations: tuple[str, ...] = ()
    payloads: tuple[Payload, ...] = ()
    text: str = ""


def check_queue(text: str) -> str:
    """`text` itself. Raises MalformedInput if it is the name of no queue that can be shown."""
    if text in (SEND_LOG_ENTRIES, SEND_SNAP_SYNC, STATUS) or parse_recv_queue(text) is not None:
        return text
    raise MalformedInput(f"{text!r} is none of the queues that can be shown", todo=f"Name one of {QUEUES}")


class EntryReader:
    """Turns the messages of one queue into entries, in stream order.

    Args:
        queue: Its name.
        from_head: Whether reading begins at the first message that the stream still has.
        written: The greatest position that stands before; (0, 0): not known.

    Attributes:
        seen: The greatest position that was read; (0, 0): none.
    """

    def __init__(self, queue: str, *, from_head: bool = False, written: Position = START) -> None:
        self._queue = queue
        self._is_received = parse_recv_queue(queue) is not None
        self._at_head = from_head
        self._written = written
        self._begun: str | None = None  # request of the last start marker; None: none was read
        self.seen = START

    def take(self, record: Record) -> list[Entry]:
        """The entries of the next message."""
        try:
            found = list(self._received(record) if self._is_received else self._stamped(record))
        except MalformedInput as error:
            found = [Entry(record.offset, Kind.UNREADABLE, text=error.what)]
        self._at_head = False
        return found

    def _received(self, record: Record) -> Iterator[Entry]:
        """Of a receive queue."""
        message = parse_message(self._queue, record.offset, record.body)
        restarts = message.previous == START
        is_known = self.seen != START or self._at_head
        hole = message.previous if is_known and message.previous > self.seen else None
        for number, transaction in enumerate(message.batch.transactions):
            found = Entry(
                record.offset,
                self._kind_of(transaction, restarts=restarts and number == 0),
                restarts=restarts and number == 0,
                hole_after=None if number else hole,
                client_name=message.batch.client_name,
                request_id=transaction.request_id,
                replication_id=transaction.replication_id,
                timestamp_us=transaction.timestamp_us,
                payloads=tuple(map(Payload, transaction.payloads)),
                text="" if transaction.type in _KINDS else f"type {transaction.type} is not known",
            )
            yield self._placed(found, position_of(transaction.position))

    def _kind_of(self, transaction: pb.ReceivedTransaction, *, restarts: bool) -> Kind:
        is_bare = may_restart(transaction)  # without payloads
        if transaction.type == pb.SNAPSHOT_SYNC and is_bare:
            self._begun = transaction.request_id
            return Kind.SNAPSHOT_START
        if transaction.type == pb.LAST_FULL_SYNC_ENTRY and is_bare and (restarts or self._begun not in (None, transaction.request_id)):
            return Kind.EMPTY_SNAPSHOT
        return _KINDS.get(transaction.type, Kind.UNREADABLE)

    def _stamped(self, record: Record) -> Iterator[Entry]:
        """Of a view of the own log."""
        if OPEN in record.headers:
            yield Entry(record.offset, Kind.OPEN, text=f"this node's sidecar has started: number {record.headers[OPEN]}")
            return
        found = self._status(record) if self._queue == STATUS else self._transmitted(record)
        try:
            epoch, sequence, _ = _stamp_of(record)
        except MalformedInput:
            yield replace(found, text=f"without a position in the log{found.text and f'; {found.text}'}")
            return
        yield self._placed(found, Position(epoch, sequence))

    def _transmitted(self, record: Record) -> Entry:
        transaction = _parse(pb.Transaction, record, self._queue)
        addressees: list[dict[str, None]] = [{} for _ in transaction.payloads]
        for entry in transaction.entries:
            for found in addressees[entry.payload : entry.payload + entry.more + 1]:
                found.update(dict.fromkeys(entry.destinations))
        return Entry(
            record.offset,
            _KINDS.get(transaction.type, Kind.UNREADABLE),
            client_name=transaction.client_name,
            request_id=transaction.request_id,
            replication_id=transaction.replication_id,
            timestamp_us=transaction.timestamp_us,
            destinations=_sorted(name for entry in transaction.entries for name in entry.destinations),
            payloads=tuple(Payload(body, _sorted(names)) for body, names in zip(transaction.payloads, addressees)),
            text="" if transaction.type in _KINDS else f"type {transaction.type} is not known",
        )

    def _status(self, record: Record) -> Entry:
        status = _parse(pb.Status, record, self._queue)
        if status.HasField("client"):
            provides = "supplies full syncs" if status.client.full_sync_provider else "supplies no full syncs"
            return Entry(record.offset, Kind.CLIENT, client_name=status.client.client_name, text=provides)
        if not status.HasField("full_sync"):
            raise MalformedInput(f"Message {record.offset} of queue {self._queue} is a Status without a value")
        of = status.full_sync
        return Entry(
            record.offset,
            _FULL_SYNCS.get(of.state, Kind.UNREADABLE),
            client_name=of.client_name,
            request_id=of.request_id,
            destinations=(of.destination,),
            text=of.reason if of.state in _FULL_SYNCS else f"state {of.state} is not known",
        )

    def _placed(self, found: Entry, position: Position) -> Entry:
        is_repeat = START < position <= max(self.seen, self._written)
        self.seen = max(self.seen, position)
        return replace(found, position=position, repeat=is_repeat)


_KINDS = {
    pb.LOG_ENTRY_SYNC: Kind.DELTA,
    pb.SNAPSHOT_SYNC: Kind.SNAPSHOT_ROWS,
    pb.LAST_FULL_SYNC_ENTRY: Kind.SNAPSHOT_END,
}


def life_of(record: Record) -> int | None:
    """The generation in which a message was written: it grows with each start of the node's sidecar. None: it has no stamp."""
    try:
        return _stamp_of(record)[2]
    except MalformedInput:
        return None


def _stamp_of(record: Record) -> tuple[int, int, int]:
    return parse_stamp(str(record.headers.get(STAMP, "")).encode())


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))


def _parse(kind: type[T], record: Record, queue: str) -> T:
    try:
        return kind.FromString(record.body)
    except Exception as error:
        raise MalformedInput(f"Message {record.offset} of queue {queue} is no {kind.DESCRIPTOR.name}: {error}") from error
