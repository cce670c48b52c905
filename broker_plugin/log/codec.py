"""How the core's values look on the wire: batches, FENCE and OPEN records in a stream, control messages between
nodes.

Rules:
- The body of a batch has identical bytes on every node; the fields that differ by sender are AMQP headers.
- A record in the log stream is a batch, a FENCE or an OPEN. Its headers tell which, so a reader of headers alone can
  rebuild the index.
- A batch or applied record whose body a broker might refuse for its size is split into several consecutive records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from pamqp import decode

from lrq_ha import __version__
from lrq_ha.errors import MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.events import Following, Handover, Heartbeat, Hello, Lead, Message, Prepare, Promise, Superseded
from lrq_ha.replication.log import BatchHeader, LogState, Members
from lrq_ha.replication.roles import Role

T = TypeVar("T")

# The version that this node writes in the log and speaks to other nodes, and the oldest that it understands. A new kind
# of entry, record or message needs a new number, as does a field that must be understood. Other fields may be passed
# over.
PROTOCOL, PROTOCOL_MIN = 2, 1
WRITER = pb.Writer(software=__version__, protocol=PROTOCOL)
RUN_THE_NEWER = "Upgrade this node (docs/operations/maintenance.md)"

LEADER, FIRST, LAST, PREVIOUS, SAFE, EPOCH, SETS, RENEWAL, RECORD = (
    "x-lrq-leader",
    "x-lrq-first",
    "x-lrq-last",
    "x-lrq-prev",
    "x-lrq-safe",
    "x-lrq-epoch",
    "x-lrq-sets",
    "x-lrq-renewal",
    "x-lrq-record",
)
FENCE, FENCE_OUT, OPEN = "x-lrq-fence", "x-lrq-fence-out", "x-lrq-open"
SOFTWARE = "x-lrq-software"  # of an OPEN: the version that writes what follows
PARTS, PART = "x-lrq-parts", "x-lrq-part"
GENERATION = "x-lrq-generation"  # of the writer, on each record of an applied record
CONTROL = "x-lrq-control"
PART_BYTES_MAX = 1 << 20  # far below the smallest max_message_size that a broker is likely to have


def _flat_sets(sets: tuple[tuple[int, Members], ...]) -> str:
    return ";".join(f"{sequence}:" + ",".join(str(n) for n in sorted(members)) for sequence, members in sets)


def _parse_sets(text: str) -> tuple[tuple[int, Members], ...]:
    pairs = (part.split(":") for part in text.split(";") if part)
    return tuple((int(sequence), frozenset(int(n) for n in nodes.split(",") if n)) for sequence, nodes in pairs)


def batch_headers(batch: BatchHeader, safe: int) -> dict[str, Any]:
    """AMQP headers of a batch. `safe`: the leader's safe position now."""
    headers: dict[str, Any] = {
        LEADER: batch.leader,
        EPOCH: batch.epoch,
        FIRST: batch.first,
        LAST: batch.last,
        PREVIOUS: batch.previous_epoch,
        SAFE: safe,
    }
    if batch.sets:
        headers[SETS] = _flat_sets(batch.sets)
    if batch.renewal:
        headers[RENEWAL] = batch.renewal
    if batch.record:
        headers[RECORD] = batch.record
    return headers


class Publishes(NamedTuple):
    """A run of publishes whose frames stay where the socket put them until the batch is made."""

    run: pb.Run
    frames: Sequence[bytes | memoryview]


def batch_body(batch: BatchHeader, timestamp_us: int, runs: Iterable[pb.Run | Publishes]) -> bytes:
    """The serialized `pb.Batch`, put together by hand: protobuf would copy each body four times, this does once."""
    count = batch.last - batch.first + 1
    head = pb.Batch(epoch=batch.epoch, first=batch.first, count=count, previous_epoch=batch.previous_epoch, timestamp_us=timestamp_us)
    parts: list[bytes | memoryview] = [head.SerializeToString()]
    for run in runs:
        if isinstance(run, Publishes):
            fields = run.run.enqueues.SerializeToString()
            fields += _FRAMES_TAG + _varint(sum(map(len, run.frames)))
            size = len(fields) + sum(map(len, run.frames))
            kind = _ENQUEUES_TAG + _varint(size)
            parts += (_RUN_TAG, _varint(len(kind) + size), kind, fields, *run.frames)
        else:
            raw = run.SerializeToString()
            parts += (_RUN_TAG, _varint(len(raw)), raw)
    return b"".join(parts)


def _tag(field_number: int) -> bytes:
    """The bytes before a length-delimited field."""
    return bytes((field_number << 3 | 2,))


_RUN_TAG, _ENQUEUES_TAG, _FRAMES_TAG = map(_tag, (pb.Batch.RUNS_FIELD_NUMBER, pb.Run.ENQUEUES_FIELD_NUMBER, pb.Enqueues.FRAMES_FIELD_NUMBER))


def _varint(number: int) -> bytes:
    octets = bytearray()
    while number > 0x7F:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    octets.append(number)
    return bytes(octets)


class UnsuitableVersion(MalformedInput):
    """A version of another node, or of the log, that this node does not understand."""


def check_writer(writer: pb.Writer, sequence: int) -> None:
    """Raises UnsuitableVersion if this version does not understand the log from entry `sequence` on."""
    if writer.protocol > PROTOCOL:
        wrote = f"entry {sequence} of the log and what follows was written by lrq-ha {writer.software} (protocol {writer.protocol})"
        raise UnsuitableVersion(f"{wrote}; this is lrq-ha {__version__}, which reads up to protocol {PROTOCOL}", todo=RUN_THE_NEWER)


def unknown_record(after: int, software: str) -> UnsuitableVersion:
    """The refusal of a record that is no batch, FENCE or OPEN. `after`: the last entry before it; `software`: the version that wrote it."""
    wrote = f"a record of this node's log behind entry {after}, written by lrq-ha {software}"
    return UnsuitableVersion(f"{wrote}, is of a kind that lrq-ha {__version__} does not know", todo=RUN_THE_NEWER)


def parse_batch(headers: dict[str, Any]) -> tuple[BatchHeader, int]:
    """The batch and the safe position that its headers name. Raises MalformedInput."""
    try:
        values = [int(headers[key]) for key in (EPOCH, FIRST, LAST, PREVIOUS, LEADER, SAFE)]
        sets = _parse_sets(headers.get(SETS, ""))
        renewal = int(headers.get(RENEWAL, 0))
        record = int(headers.get(RECORD, 0))
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedInput(f"a batch whose headers are incomplete or wrong: {error}") from error
    epoch, first, last, previous, leader, safe = values
    if not 0 < first <= last or not 0 < epoch <= leader or previous > epoch or safe < 0:
        raise MalformedInput(f"a batch whose headers contradict each other: entries {first} to {last} of epoch {epoch}, leader {leader}")
    if renewal and (first != last or abs(renewal) > first):
        raise MalformedInput(f"a batch of entries {first} to {last} that is said to belong to the renewal at {abs(renewal)}")
    return BatchHeader(epoch, first, last, previous, leader, sets, renewal, record), safe


def parts_of(headers: dict[str, Any], body: bytes) -> list[tuple[dict[str, Any], bytes]]:
    """The records that hold a batch or an applied record: as many as its body needs. The first one's headers tell the number."""
    count = -(-len(body) // PART_BYTES_MAX)
    if count <= 1:
        return [(headers, body)]
    view: Any = memoryview(body)  # pieces are written only
    pieces = [view[at : at + PART_BYTES_MAX] for at in range(0, len(body), PART_BYTES_MAX)]
    return [({**headers, PARTS: count}, pieces[0]), *(({PART: n}, piece) for n, piece in enumerate(pieces[1:], 1))]


class Joiner(Generic[T]):
    """Joins batches that stand in several records. A batch that a killed writer left unfinished is dropped."""

    def __init__(self) -> None:
        self._first: T | None = None
        self._missing = 0
        self._bodies: list[bytes] = []

    def take(self, headers: Mapping[str, Any], first: T, body: bytes) -> tuple[T, bytes] | None:
        """Takes the next record; `first` is the value to return with a batch whose first record this is. None: the
        batch is not complete.
        """
        part = headers.get(PART)
        if part is None:
            self._first, self._missing, self._bodies = first, int(headers.get(PARTS, 1)) - 1, [body]
        elif self._missing and part == len(self._bodies):
            self._missing -= 1
            self._bodies.append(body)
        else:  # reading began in the middle of the batch
            self._first, self._missing = None, 0
        if self._first is None or self._missing:
            return None
        joined = self._first, b"".join(self._bodies)
        self._first, self._bodies = None, []
        return joined


def checkpoint_of(runs: Sequence[pb.Run | Publishes]) -> pb.Checkpoint | None:
    """The CHECKPOINT of these runs, which has a batch of its own; None if the batch holds no CHECKPOINT."""
    [run] = runs if len(runs) == 1 else [None]
    return run.checkpoint if isinstance(run, pb.Run) and run.WhichOneof("kind") == "checkpoint" else None


def header_table(payload: bytes) -> dict[str, Any]:
    """The headers of a content-header payload as a dict; only for the sidecar's own messages."""
    flags = int.from_bytes(payload[12:14], "big")
    offset = 14
    for bit in (0x8000, 0x4000):
        if flags & bit:
            offset += 1 + payload[offset]
    if not flags & 0x2000:
        return {}
    return dict(decode.field_table(payload[offset:])[1])


# ---- control messages ------------------------------------------------------------------------------------------------


def history_to_pb(log: LogState) -> tuple[list[pb.EpochStart], list[pb.SetEntry]]:
    """The epochs and in-sync sets of a log, for a message that tells them."""
    return (
        [pb.EpochStart(epoch=epoch, first=first) for epoch, first in log.epochs],
        [pb.SetEntry(sequence=sequence, nodes=sorted(members)) for sequence, members in log.sets],
    )


def history_from_pb(message: pb.LogState | pb.Checkpoint) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, Members], ...]]:
    """The reverse of `history_to_pb`: as `LogState.epochs` and `LogState.sets`."""
    return (
        tuple((start.epoch, start.first) for start in message.epochs),
        tuple((entry.sequence, frozenset(entry.nodes)) for entry in message.sets),
    )


def _log_to_pb(log: LogState) -> pb.LogState:
    epochs, sets = history_to_pb(log)
    return pb.LogState(
        top=log.top,
        end=log.end,
        epochs=epochs,
        sets=sets,
        in_set=log.in_set,
        lost_host=log.lost_host,
        head=log.head,
        base=log.base,
        joining=log.joining,
        record=log.record,
    )


def _log_from_pb(log: pb.LogState) -> LogState:
    return LogState(log.top, log.end, *history_from_pb(log), log.in_set, log.lost_host, log.head, log.base, log.joining, record=log.record)


def _hello_to_pb(hello: Hello) -> pb.Hello:
    return pb.Hello(
        role=hello.role.value,
        log=_log_to_pb(hello.log),
        leading=hello.leading,
        following=hello.following,
        wants_answer=hello.wants_answer,
        paused=hello.paused,
        lacks=hello.lacks,
        software=hello.software,
        protocol=PROTOCOL,
        protocol_min=PROTOCOL_MIN,
        shared=dict(hello.shared),
        priority=hello.priority,
    )


def _span(first: int, last: int) -> str:
    return str(last) if first == last else f"{first} to {last}"


def _hello_from_pb(role: Role, h: pb.Hello) -> Hello:
    if h.protocol < PROTOCOL_MIN or h.protocol_min > PROTOCOL:
        spoken = f"lrq-ha {h.software or 'of an early version'}, which speaks protocol {_span(h.protocol_min, h.protocol)}"
        todo = "upgrade the older one, through a version between them if there is one (docs/operations/maintenance.md)"
        raise UnsuitableVersion(f"it runs {spoken}; this node runs lrq-ha {__version__}, which speaks {_span(PROTOCOL_MIN, PROTOCOL)}: {todo}")
    shared = tuple(sorted(h.shared.items()))
    return Hello(role, _log_from_pb(h.log), h.leading, h.following, h.wants_answer, h.paused, h.lacks, h.software, shared, h.priority)


def encode_control(sender: int, group: str, message: Message) -> bytes:
    """Body of a control message."""
    control = pb.Control(sender=sender, group=group)
    match message:
        case Hello():
            control.hello.CopyFrom(_hello_to_pb(message))
        case Prepare(epoch):
            control.prepare.epoch = epoch
        case Promise(epoch, log):
            control.promise.CopyFrom(pb.Promise(epoch=epoch, log=_log_to_pb(log)))
        case Lead(epoch, in_set, log):
            control.lead.CopyFrom(pb.Lead(epoch=epoch, in_set=in_set, log=_log_to_pb(log)))
        case Following(epoch, start, diverged, log):
            control.following.CopyFrom(pb.Following(epoch=epoch, start=start, diverged=diverged, log=_log_to_pb(log)))
        case Heartbeat(epoch, safe, end, applied, arriving, progress):
            control.heartbeat.CopyFrom(pb.Heartbeat(epoch=epoch, safe=safe, end=end, applied=applied, arriving=arriving, progress=progress))
        case Superseded(top):
            control.superseded.top = top
        case Handover(epoch, end, given, to):
            flat = [sequence for span in given or () for sequence in span]
            control.handover.CopyFrom(pb.Handover(epoch=epoch, end=end, clean=given == (), given=flat, to=to))
    return control.SerializeToString()


def decode_control(body: bytes, group: str) -> tuple[int, Message]:
    """Sender and message. Raises MalformedInput, also for a message of another group."""
    control = pb.Control()
    try:
        control.ParseFromString(body)
        role = Role(control.hello.role) if control.WhichOneof("kind") == "hello" else None
    except Exception as error:
        raise MalformedInput(f"a control message that cannot be read: {error}") from error
    if control.group != group:
        raise MalformedInput(f"a message of group {control.group!r} at a node of group {group!r}")
    message: Message
    match control.WhichOneof("kind"):
        case "hello" if role is not None:
            message = _hello_from_pb(role, control.hello)
        case "prepare":
            message = Prepare(control.prepare.epoch)
        case "promise":
            message = Promise(control.promise.epoch, _log_from_pb(control.promise.log))
        case "lead":
            message = Lead(control.lead.epoch, control.lead.in_set, _log_from_pb(control.lead.log))
        case "following":
            f = control.following
            message = Following(f.epoch, f.start, f.diverged, _log_from_pb(f.log))
        case "heartbeat":
            b = control.heartbeat
            message = Heartbeat(b.epoch, b.safe, b.end, b.applied, b.arriving, b.progress)
        case "superseded":
            message = Superseded(control.superseded.top)
        case "handover":
            told = control.handover
            given = tuple(zip(told.given[::2], told.given[1::2])) or (() if told.clean else None)
            message = Handover(told.epoch, told.end, given, told.to)
        case _:
            raise MalformedInput("a control message of an unknown kind")
    return control.sender, message
