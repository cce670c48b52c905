from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicationType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NONE: _ClassVar[ReplicationType]
    LOG_ENTRY_SYNC: _ClassVar[ReplicationType]
    SNAPSHOT_SYNC: _ClassVar[ReplicationType]
    LAST_FULL_SYNC_ENTRY: _ClassVar[ReplicationType]

class QueueLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEVEL_ALL: _ClassVar[QueueLevel]
    LEVEL_CONFIGURATION: _ClassVar[QueueLevel]
    LEVEL_NONE: _ClassVar[QueueLevel]
NONE: ReplicationType
LOG_ENTRY_SYNC: ReplicationType
SNAPSHOT_SYNC: ReplicationType
LAST_FULL_SYNC_ENTRY: ReplicationType
LEVEL_ALL: QueueLevel
LEVEL_CONFIGURATION: QueueLevel
LEVEL_NONE: QueueLevel

class Position(_message.Message):
    __slots__ = ("epoch", "sequence")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class RoutingTableEntryMsg(_message.Message):
    __slots__ = ("destinations", "payload", "more")
    DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    destinations: _containers.RepeatedScalarFieldContainer[str]
    payload: int
    more: int
    def __init__(self, destinations: _Optional[_Iterable[str]] = ..., payload: _Optional[int] = ..., more: _Optional[int] = ...) -> None: ...

class Transaction(_message.Message):
    __slots__ = ("source", "client_name", "replication_id", "timestamp_us", "type", "request_id", "payloads", "entries", "path")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_ID_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_US_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    source: str
    client_name: str
    replication_id: str
    timestamp_us: int
    type: ReplicationType
    request_id: str
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    entries: _containers.RepeatedCompositeFieldContainer[RoutingTableEntryMsg]
    path: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, source: _Optional[str] = ..., client_name: _Optional[str] = ..., replication_id: _Optional[str] = ..., timestamp_us: _Optional[int] = ..., type: _Optional[_Union[ReplicationType, str]] = ..., request_id: _Optional[str] = ..., payloads: _Optional[_Iterable[bytes]] = ..., entries: _Optional[_Iterable[_Union[RoutingTableEntryMsg, _Mapping]]] = ..., path: _Optional[_Iterable[str]] = ...) -> None: ...

class ReceivedTransaction(_message.Message):
    __slots__ = ("position", "replication_id", "timestamp_us", "type", "request_id", "payloads", "path")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_ID_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_US_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    position: Position
    replication_id: str
    timestamp_us: int
    type: ReplicationType
    request_id: str
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    path: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, position: _Optional[_Union[Position, _Mapping]] = ..., replication_id: _Optional[str] = ..., timestamp_us: _Optional[int] = ..., type: _Optional[_Union[ReplicationType, str]] = ..., request_id: _Optional[str] = ..., payloads: _Optional[_Iterable[bytes]] = ..., path: _Optional[_Iterable[str]] = ...) -> None: ...

class ReceivedBatch(_message.Message):
    __slots__ = ("source", "client_name", "previous", "transactions", "log_id")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONS_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    source: str
    client_name: str
    previous: Position
    transactions: _containers.RepeatedCompositeFieldContainer[ReceivedTransaction]
    log_id: bytes
    def __init__(self, source: _Optional[str] = ..., client_name: _Optional[str] = ..., previous: _Optional[_Union[Position, _Mapping]] = ..., transactions: _Optional[_Iterable[_Union[ReceivedTransaction, _Mapping]]] = ..., log_id: _Optional[bytes] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("key", "client", "full_sync")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    FULL_SYNC_FIELD_NUMBER: _ClassVar[int]
    key: str
    client: ClientStatus
    full_sync: FullSyncRequest
    def __init__(self, key: _Optional[str] = ..., client: _Optional[_Union[ClientStatus, _Mapping]] = ..., full_sync: _Optional[_Union[FullSyncRequest, _Mapping]] = ...) -> None: ...

class ClientStatus(_message.Message):
    __slots__ = ("client_name", "full_sync_provider")
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    FULL_SYNC_PROVIDER_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    full_sync_provider: bool
    def __init__(self, client_name: _Optional[str] = ..., full_sync_provider: _Optional[bool] = ...) -> None: ...

class FullSyncRequest(_message.Message):
    __slots__ = ("client_name", "destination", "request_id", "reason", "state")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REQUESTED: _ClassVar[FullSyncRequest.State]
        COMPLETED: _ClassVar[FullSyncRequest.State]
        CANCELLED: _ClassVar[FullSyncRequest.State]
    REQUESTED: FullSyncRequest.State
    COMPLETED: FullSyncRequest.State
    CANCELLED: FullSyncRequest.State
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    destination: str
    request_id: str
    reason: str
    state: FullSyncRequest.State
    def __init__(self, client_name: _Optional[str] = ..., destination: _Optional[str] = ..., request_id: _Optional[str] = ..., reason: _Optional[str] = ..., state: _Optional[_Union[FullSyncRequest.State, str]] = ...) -> None: ...

class ReceiveQueues(_message.Message):
    __slots__ = ("queues",)
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    queues: _containers.RepeatedCompositeFieldContainer[ReceiveState]
    def __init__(self, queues: _Optional[_Iterable[_Union[ReceiveState, _Mapping]]] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("epoch", "first", "count", "previous_epoch", "timestamp_us", "runs")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_US_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    first: int
    count: int
    previous_epoch: int
    timestamp_us: int
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    def __init__(self, epoch: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., previous_epoch: _Optional[int] = ..., timestamp_us: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("enqueues", "dequeue", "reject", "moved", "refused", "purge", "topology", "transmission", "reception", "members", "marker", "checkpoint", "status", "tally", "renewed", "moving", "demand", "commit", "definitions")
    ENQUEUES_FIELD_NUMBER: _ClassVar[int]
    DEQUEUE_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PURGE_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    TRANSMISSION_FIELD_NUMBER: _ClassVar[int]
    RECEPTION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MARKER_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TALLY_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    DEFINITIONS_FIELD_NUMBER: _ClassVar[int]
    enqueues: Enqueues
    dequeue: Dequeue
    reject: Dequeue
    moved: Moved
    refused: Refused
    purge: Purge
    topology: Topology
    transmission: Transmission
    reception: Reception
    members: Members
    marker: Marker
    checkpoint: Checkpoint
    status: StatusEntry
    tally: Tally
    renewed: Renewed
    moving: Moving
    demand: Demand
    commit: Commit
    definitions: DefinitionsChange
    def __init__(self, enqueues: _Optional[_Union[Enqueues, _Mapping]] = ..., dequeue: _Optional[_Union[Dequeue, _Mapping]] = ..., reject: _Optional[_Union[Dequeue, _Mapping]] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., purge: _Optional[_Union[Purge, _Mapping]] = ..., topology: _Optional[_Union[Topology, _Mapping]] = ..., transmission: _Optional[_Union[Transmission, _Mapping]] = ..., reception: _Optional[_Union[Reception, _Mapping]] = ..., members: _Optional[_Union[Members, _Mapping]] = ..., marker: _Optional[_Union[Marker, _Mapping]] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., status: _Optional[_Union[StatusEntry, _Mapping]] = ..., tally: _Optional[_Union[Tally, _Mapping]] = ..., renewed: _Optional[_Union[Renewed, _Mapping]] = ..., moving: _Optional[_Union[Moving, _Mapping]] = ..., demand: _Optional[_Union[Demand, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., definitions: _Optional[_Union[DefinitionsChange, _Mapping]] = ...) -> None: ...

class Enqueues(_message.Message):
    __slots__ = ("vhost", "channel", "frames", "lengths", "producer", "id_first", "id_skipped")
    VHOST_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    ID_FIRST_FIELD_NUMBER: _ClassVar[int]
    ID_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    vhost: str
    channel: int
    frames: bytes
    lengths: _containers.RepeatedScalarFieldContainer[int]
    producer: str
    id_first: int
    id_skipped: int
    def __init__(self, vhost: _Optional[str] = ..., channel: _Optional[int] = ..., frames: _Optional[bytes] = ..., lengths: _Optional[_Iterable[int]] = ..., producer: _Optional[str] = ..., id_first: _Optional[int] = ..., id_skipped: _Optional[int] = ...) -> None: ...

class Dequeue(_message.Message):
    __slots__ = ("vhost", "queue", "sequences", "visit", "origin")
    VHOST_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    VISIT_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    vhost: str
    queue: str
    sequences: _containers.RepeatedScalarFieldContainer[int]
    visit: int
    origin: str
    def __init__(self, vhost: _Optional[str] = ..., queue: _Optional[str] = ..., sequences: _Optional[_Iterable[int]] = ..., visit: _Optional[int] = ..., origin: _Optional[str] = ...) -> None: ...

class Moved(_message.Message):
    __slots__ = ("vhost", "queue", "sequence", "visit", "origin")
    VHOST_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    VISIT_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    vhost: str
    queue: str
    sequence: int
    visit: int
    origin: str
    def __init__(self, vhost: _Optional[str] = ..., queue: _Optional[str] = ..., sequence: _Optional[int] = ..., visit: _Optional[int] = ..., origin: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("sequences", "producers")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    producers: _containers.RepeatedCompositeFieldContainer[ProducerRanges]
    def __init__(self, sequences: _Optional[_Iterable[int]] = ..., producers: _Optional[_Iterable[_Union[ProducerRanges, _Mapping]]] = ...) -> None: ...

class Purge(_message.Message):
    __slots__ = ("vhost", "queue", "before", "spared")
    VHOST_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    SPARED_FIELD_NUMBER: _ClassVar[int]
    vhost: str
    queue: str
    before: int
    spared: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, vhost: _Optional[str] = ..., queue: _Optional[str] = ..., before: _Optional[int] = ..., spared: _Optional[_Iterable[int]] = ...) -> None: ...

class Tally(_message.Message):
    __slots__ = ("vhost", "queue", "upto", "messages", "held", "spared")
    VHOST_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    SPARED_FIELD_NUMBER: _ClassVar[int]
    vhost: str
    queue: str
    upto: int
    messages: int
    held: _containers.RepeatedScalarFieldContainer[int]
    spared: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, vhost: _Optional[str] = ..., queue: _Optional[str] = ..., upto: _Optional[int] = ..., messages: _Optional[int] = ..., held: _Optional[_Iterable[int]] = ..., spared: _Optional[_Iterable[int]] = ...) -> None: ...

class Topology(_message.Message):
    __slots__ = ("vhost", "method", "level")
    VHOST_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    vhost: str
    method: bytes
    level: QueueLevel
    def __init__(self, vhost: _Optional[str] = ..., method: _Optional[bytes] = ..., level: _Optional[_Union[QueueLevel, str]] = ...) -> None: ...

class Transmission(_message.Message):
    __slots__ = ("queue", "body", "producer", "id", "id_skipped")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ID_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    queue: str
    body: bytes
    producer: str
    id: int
    id_skipped: int
    def __init__(self, queue: _Optional[str] = ..., body: _Optional[bytes] = ..., producer: _Optional[str] = ..., id: _Optional[int] = ..., id_skipped: _Optional[int] = ...) -> None: ...

class Reception(_message.Message):
    __slots__ = ("queue", "body")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    queue: str
    body: bytes
    def __init__(self, queue: _Optional[str] = ..., body: _Optional[bytes] = ...) -> None: ...

class Demand(_message.Message):
    __slots__ = ("queue", "reason")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    queue: str
    reason: str
    def __init__(self, queue: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("receiver", "queue", "value", "position", "token", "expected", "user", "phase")
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    receiver: str
    queue: str
    value: str
    position: Position
    token: str
    expected: str
    user: str
    phase: str
    def __init__(self, receiver: _Optional[str] = ..., queue: _Optional[str] = ..., value: _Optional[str] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., token: _Optional[str] = ..., expected: _Optional[str] = ..., user: _Optional[str] = ..., phase: _Optional[str] = ...) -> None: ...

class StatusEntry(_message.Message):
    __slots__ = ("body", "producer", "id", "id_skipped")
    BODY_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ID_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    producer: str
    id: int
    id_skipped: int
    def __init__(self, body: _Optional[bytes] = ..., producer: _Optional[str] = ..., id: _Optional[int] = ..., id_skipped: _Optional[int] = ...) -> None: ...

class DefinitionsChange(_message.Message):
    __slots__ = ("kinds", "set", "deleted")
    KINDS_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedScalarFieldContainer[str]
    set: _containers.RepeatedCompositeFieldContainer[BrokerObject]
    deleted: _containers.RepeatedCompositeFieldContainer[BrokerObject]
    def __init__(self, kinds: _Optional[_Iterable[str]] = ..., set: _Optional[_Iterable[_Union[BrokerObject, _Mapping]]] = ..., deleted: _Optional[_Iterable[_Union[BrokerObject, _Mapping]]] = ...) -> None: ...

class BrokerObject(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: _containers.RepeatedScalarFieldContainer[str]
    value: str
    def __init__(self, key: _Optional[_Iterable[str]] = ..., value: _Optional[str] = ...) -> None: ...

class Members(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, nodes: _Optional[_Iterable[int]] = ...) -> None: ...

class Writer(_message.Message):
    __slots__ = ("software", "protocol")
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    software: str
    protocol: int
    def __init__(self, software: _Optional[str] = ..., protocol: _Optional[int] = ...) -> None: ...

class Marker(_message.Message):
    __slots__ = ("nodes", "writer", "log_id")
    NODES_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[int]
    writer: Writer
    log_id: bytes
    def __init__(self, nodes: _Optional[_Iterable[int]] = ..., writer: _Optional[_Union[Writer, _Mapping]] = ..., log_id: _Optional[bytes] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("epochs", "sets", "producers", "received", "statuses", "auto_delete_exchanges", "renewal", "renewals", "marks", "moving", "definitions", "writer", "log_id", "commits", "broker_objects", "record")
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    AUTO_DELETE_EXCHANGES_FIELD_NUMBER: _ClassVar[int]
    RENEWAL_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    DEFINITIONS_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    BROKER_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    epochs: _containers.RepeatedCompositeFieldContainer[EpochStart]
    sets: _containers.RepeatedCompositeFieldContainer[SetEntry]
    producers: _containers.RepeatedCompositeFieldContainer[ProducerRanges]
    received: _containers.RepeatedCompositeFieldContainer[ReceiveState]
    statuses: _containers.RepeatedCompositeFieldContainer[KeptStatus]
    auto_delete_exchanges: _containers.RepeatedCompositeFieldContainer[Topology]
    renewal: bool
    renewals: _containers.RepeatedCompositeFieldContainer[Renewal]
    marks: _containers.RepeatedCompositeFieldContainer[LogMark]
    moving: _containers.RepeatedCompositeFieldContainer[MovingQueue]
    definitions: bytes
    writer: Writer
    log_id: bytes
    commits: _containers.RepeatedCompositeFieldContainer[Commit]
    broker_objects: DefinitionsChange
    record: int
    def __init__(self, epochs: _Optional[_Iterable[_Union[EpochStart, _Mapping]]] = ..., sets: _Optional[_Iterable[_Union[SetEntry, _Mapping]]] = ..., producers: _Optional[_Iterable[_Union[ProducerRanges, _Mapping]]] = ..., received: _Optional[_Iterable[_Union[ReceiveState, _Mapping]]] = ..., statuses: _Optional[_Iterable[_Union[KeptStatus, _Mapping]]] = ..., auto_delete_exchanges: _Optional[_Iterable[_Union[Topology, _Mapping]]] = ..., renewal: _Optional[bool] = ..., renewals: _Optional[_Iterable[_Union[Renewal, _Mapping]]] = ..., marks: _Optional[_Iterable[_Union[LogMark, _Mapping]]] = ..., moving: _Optional[_Iterable[_Union[MovingQueue, _Mapping]]] = ..., definitions: _Optional[bytes] = ..., writer: _Optional[_Union[Writer, _Mapping]] = ..., log_id: _Optional[bytes] = ..., commits: _Optional[_Iterable[_Union[Commit, _Mapping]]] = ..., broker_objects: _Optional[_Union[DefinitionsChange, _Mapping]] = ..., record: _Optional[int] = ...) -> None: ...

class Definitions(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[Topology]
    def __init__(self, rows: _Optional[_Iterable[_Union[Topology, _Mapping]]] = ...) -> None: ...

class LogMark(_message.Message):
    __slots__ = ("sequence", "bytes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    bytes: int
    def __init__(self, sequence: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class MovingQueue(_message.Message):
    __slots__ = ("vhost", "queue", "before")
    VHOST_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    vhost: str
    queue: str
    before: int
    def __init__(self, vhost: _Optional[str] = ..., queue: _Optional[str] = ..., before: _Optional[int] = ...) -> None: ...

class Renewal(_message.Message):
    __slots__ = ("sequence", "renewal")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RENEWAL_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    renewal: int
    def __init__(self, sequence: _Optional[int] = ..., renewal: _Optional[int] = ...) -> None: ...

class Renewed(_message.Message):
    __slots__ = ("checkpoint", "given_up")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    checkpoint: int
    given_up: bool
    def __init__(self, checkpoint: _Optional[int] = ..., given_up: _Optional[bool] = ...) -> None: ...

class Moving(_message.Message):
    __slots__ = ("vhost", "queue", "done")
    VHOST_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    vhost: str
    queue: str
    done: bool
    def __init__(self, vhost: _Optional[str] = ..., queue: _Optional[str] = ..., done: _Optional[bool] = ...) -> None: ...

class KeptStatus(_message.Message):
    __slots__ = ("sequence", "body")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    body: bytes
    def __init__(self, sequence: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...

class ReceiveState(_message.Message):
    __slots__ = ("queue", "last", "snapshot_request", "snapshot_complete", "bare", "begun", "whole", "size", "begun_size", "whole_size", "snapshot_bytes", "demand", "demand_reason", "log_id", "rows_size")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    BARE_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    BEGUN_SIZE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_SIZE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    DEMAND_REASON_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_SIZE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    last: Position
    snapshot_request: str
    snapshot_complete: bool
    bare: bool
    begun: Position
    whole: Position
    size: int
    begun_size: int
    whole_size: int
    snapshot_bytes: int
    demand: int
    demand_reason: str
    log_id: bytes
    rows_size: int
    def __init__(self, queue: _Optional[str] = ..., last: _Optional[_Union[Position, _Mapping]] = ..., snapshot_request: _Optional[str] = ..., snapshot_complete: _Optional[bool] = ..., bare: _Optional[bool] = ..., begun: _Optional[_Union[Position, _Mapping]] = ..., whole: _Optional[_Union[Position, _Mapping]] = ..., size: _Optional[int] = ..., begun_size: _Optional[int] = ..., whole_size: _Optional[int] = ..., snapshot_bytes: _Optional[int] = ..., demand: _Optional[int] = ..., demand_reason: _Optional[str] = ..., log_id: _Optional[bytes] = ..., rows_size: _Optional[int] = ...) -> None: ...

class EpochStart(_message.Message):
    __slots__ = ("epoch", "first")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    first: int
    def __init__(self, epoch: _Optional[int] = ..., first: _Optional[int] = ...) -> None: ...

class SetEntry(_message.Message):
    __slots__ = ("sequence", "nodes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    nodes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., nodes: _Optional[_Iterable[int]] = ...) -> None: ...

class ProducerRanges(_message.Message):
    __slots__ = ("producer", "ids", "others")
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    producer: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    others: bytes
    def __init__(self, producer: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., others: _Optional[bytes] = ...) -> None: ...

class Applied(_message.Message):
    __slots__ = ("applied", "start", "generations", "queues", "refused", "tallies", "base", "known")
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TALLIES_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    applied: int
    start: StartPoint
    generations: _containers.RepeatedCompositeFieldContainer[Generation]
    queues: _containers.RepeatedCompositeFieldContainer[PendingQueue]
    refused: bytes
    tallies: _containers.RepeatedCompositeFieldContainer[Tally]
    base: int
    known: int
    def __init__(self, applied: _Optional[int] = ..., start: _Optional[_Union[StartPoint, _Mapping]] = ..., generations: _Optional[_Iterable[_Union[Generation, _Mapping]]] = ..., queues: _Optional[_Iterable[_Union[PendingQueue, _Mapping]]] = ..., refused: _Optional[bytes] = ..., tallies: _Optional[_Iterable[_Union[Tally, _Mapping]]] = ..., base: _Optional[int] = ..., known: _Optional[int] = ...) -> None: ...

class StartPoint(_message.Message):
    __slots__ = ("sequence", "epoch", "leader", "offset", "in_set", "out_epoch", "out_end", "base")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    IN_SET_FIELD_NUMBER: _ClassVar[int]
    OUT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    OUT_END_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    epoch: int
    leader: int
    offset: int
    in_set: bool
    out_epoch: int
    out_end: int
    base: int
    def __init__(self, sequence: _Optional[int] = ..., epoch: _Optional[int] = ..., leader: _Optional[int] = ..., offset: _Optional[int] = ..., in_set: _Optional[bool] = ..., out_epoch: _Optional[int] = ..., out_end: _Optional[int] = ..., base: _Optional[int] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("applied", "generation")
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    applied: int
    generation: int
    def __init__(self, applied: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class PendingQueue(_message.Message):
    __slots__ = ("vhost", "queue", "done", "moved", "due", "purged", "visits", "departed", "spared")
    VHOST_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    DUE_FIELD_NUMBER: _ClassVar[int]
    PURGED_FIELD_NUMBER: _ClassVar[int]
    VISITS_FIELD_NUMBER: _ClassVar[int]
    DEPARTED_FIELD_NUMBER: _ClassVar[int]
    SPARED_FIELD_NUMBER: _ClassVar[int]
    vhost: str
    queue: str
    done: bytes
    moved: bytes
    due: bytes
    purged: int
    visits: _containers.RepeatedCompositeFieldContainer[PendingVisit]
    departed: int
    spared: bytes
    def __init__(self, vhost: _Optional[str] = ..., queue: _Optional[str] = ..., done: _Optional[bytes] = ..., moved: _Optional[bytes] = ..., due: _Optional[bytes] = ..., purged: _Optional[int] = ..., visits: _Optional[_Iterable[_Union[PendingVisit, _Mapping]]] = ..., departed: _Optional[int] = ..., spared: _Optional[bytes] = ...) -> None: ...

class PendingVisit(_message.Message):
    __slots__ = ("origin", "visit", "dequeued", "positions")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    VISIT_FIELD_NUMBER: _ClassVar[int]
    DEQUEUED_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    origin: str
    visit: int
    dequeued: bool
    positions: bytes
    def __init__(self, origin: _Optional[str] = ..., visit: _Optional[int] = ..., dequeued: _Optional[bool] = ..., positions: _Optional[bytes] = ...) -> None: ...

class Control(_message.Message):
    __slots__ = ("sender", "group", "hello", "prepare", "promise", "lead", "following", "heartbeat", "superseded", "handover")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    PROMISE_FIELD_NUMBER: _ClassVar[int]
    LEAD_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    sender: int
    group: str
    hello: Hello
    prepare: Prepare
    promise: Promise
    lead: Lead
    following: Following
    heartbeat: Heartbeat
    superseded: Superseded
    handover: Handover
    def __init__(self, sender: _Optional[int] = ..., group: _Optional[str] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., promise: _Optional[_Union[Promise, _Mapping]] = ..., lead: _Optional[_Union[Lead, _Mapping]] = ..., following: _Optional[_Union[Following, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., superseded: _Optional[_Union[Superseded, _Mapping]] = ..., handover: _Optional[_Union[Handover, _Mapping]] = ...) -> None: ...

class LogState(_message.Message):
    __slots__ = ("top", "end", "epochs", "sets", "in_set", "lost_host", "head", "base", "joining", "record")
    TOP_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    IN_SET_FIELD_NUMBER: _ClassVar[int]
    LOST_HOST_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    top: int
    end: int
    epochs: _containers.RepeatedCompositeFieldContainer[EpochStart]
    sets: _containers.RepeatedCompositeFieldContainer[SetEntry]
    in_set: bool
    lost_host: bool
    head: int
    base: int
    joining: bool
    record: int
    def __init__(self, top: _Optional[int] = ..., end: _Optional[int] = ..., epochs: _Optional[_Iterable[_Union[EpochStart, _Mapping]]] = ..., sets: _Optional[_Iterable[_Union[SetEntry, _Mapping]]] = ..., in_set: _Optional[bool] = ..., lost_host: _Optional[bool] = ..., head: _Optional[int] = ..., base: _Optional[int] = ..., joining: _Optional[bool] = ..., record: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("following", "wants_answer", "name", "role", "log", "leading", "paused", "lacks", "software", "protocol", "protocol_min", "shared", "priority")
    class SharedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    WANTS_ANSWER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    LEADING_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    LACKS_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    following: int
    wants_answer: bool
    name: str
    role: str
    log: LogState
    leading: int
    paused: bool
    lacks: str
    software: str
    protocol: int
    protocol_min: int
    shared: _containers.ScalarMap[str, str]
    priority: int
    def __init__(self, following: _Optional[int] = ..., wants_answer: _Optional[bool] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., log: _Optional[_Union[LogState, _Mapping]] = ..., leading: _Optional[int] = ..., paused: _Optional[bool] = ..., lacks: _Optional[str] = ..., software: _Optional[str] = ..., protocol: _Optional[int] = ..., protocol_min: _Optional[int] = ..., shared: _Optional[_Mapping[str, str]] = ..., priority: _Optional[int] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class Promise(_message.Message):
    __slots__ = ("epoch", "log")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    log: LogState
    def __init__(self, epoch: _Optional[int] = ..., log: _Optional[_Union[LogState, _Mapping]] = ...) -> None: ...

class Lead(_message.Message):
    __slots__ = ("epoch", "in_set", "log")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IN_SET_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    in_set: bool
    log: LogState
    def __init__(self, epoch: _Optional[int] = ..., in_set: _Optional[bool] = ..., log: _Optional[_Union[LogState, _Mapping]] = ...) -> None: ...

class Following(_message.Message):
    __slots__ = ("epoch", "start", "diverged", "log")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DIVERGED_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    start: int
    diverged: bool
    log: LogState
    def __init__(self, epoch: _Optional[int] = ..., start: _Optional[int] = ..., diverged: _Optional[bool] = ..., log: _Optional[_Union[LogState, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("epoch", "safe", "end", "applied", "arriving", "progress")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAFE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    safe: int
    end: int
    applied: int
    arriving: int
    progress: bool
    def __init__(self, epoch: _Optional[int] = ..., safe: _Optional[int] = ..., end: _Optional[int] = ..., applied: _Optional[int] = ..., arriving: _Optional[int] = ..., progress: _Optional[bool] = ...) -> None: ...

class Superseded(_message.Message):
    __slots__ = ("top",)
    TOP_FIELD_NUMBER: _ClassVar[int]
    top: int
    def __init__(self, top: _Optional[int] = ...) -> None: ...

class Handover(_message.Message):
    __slots__ = ("epoch", "end", "clean", "given", "to")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CLEAN_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    end: int
    clean: bool
    given: _containers.RepeatedScalarFieldContainer[int]
    to: int
    def __init__(self, epoch: _Optional[int] = ..., end: _Optional[int] = ..., clean: _Optional[bool] = ..., given: _Optional[_Iterable[int]] = ..., to: _Optional[int] = ...) -> None: ...
