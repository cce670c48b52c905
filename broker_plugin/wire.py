"""How the core's values look on the wire: batches, FENCE and OPEN records in a stream, control messages between nodes.

Rules: the body of a batch is the same bytes on every node; what differs from sender to sender stands in the AMQP headers. A record in the
log stream is a batch, a FENCE or an OPEN, told apart by its headers, so a reader of headers alone can rebuild the index.
"""

from __future__ import annotations

from typing import Any

from pamqp import decode

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.errors import MalformedInput
from lrq_ha.replication.events import Following, Heartbeat, Hello, Lead, Message, Prepare, Promise, Superseded
from lrq_ha.replication.log import BatchHeader, LogState, Members
from lrq_ha.replication.roles import Role

LEADER, FIRST, LAST, PREVIOUS, SAFE, EPOCH, SETS = (
    "x-lrq-leader",
    "x-lrq-first",
    "x-lrq-last",
    "x-lrq-prev",
    "x-lrq-safe",
    "x-lrq-epoch",
    "x-lrq-sets",
)
FENCE, FENCE_OUT, OPEN = "x-lrq-fence", "x-lrq-fence-out", "x-lrq-open"
CONTROL = "x-lrq-control"


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
    return headers


def parse_batch(headers: dict[str, Any]) -> tuple[BatchHeader, int]:
    """The batch and the safe position that its headers name. Raises MalformedInput."""
    try:
        values = [int(headers[key]) for key in (EPOCH, FIRST, LAST, PREVIOUS, LEADER, SAFE)]
        sets = _parse_sets(headers.get(SETS, ""))
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedInput(f"a batch whose headers are incomplete or wrong: {error}") from error
    epoch, first, last, previous, leader, safe = values
    if not 0 < first <= last or not 0 < epoch <= leader or previous > epoch or safe < 0:
        raise MalformedInput(f"a batch whose headers contradict each other: entries {first} to {last} of epoch {epoch}, leader {leader}")
    return BatchHeader(epoch, first, last, previous, leader, sets), safe


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


def _log_to_pb(log: LogState) -> pb.LogState:
    return pb.LogState(
        top=log.top,
        end=log.end,
        epochs=[pb.EpochStart(epoch=e, first=f) for e, f in log.epochs],
        sets=[pb.SetEntry(sequence=s, nodes=sorted(m)) for s, m in log.sets],
        in_set=log.in_set,
        lost_host=log.lost_host,
    )


def _log_from_pb(log: pb.LogState) -> LogState:
    return LogState(
        log.top,
        log.end,
        tuple((e.epoch, e.first) for e in log.epochs),
        tuple((s.sequence, frozenset(s.nodes)) for s in log.sets),
        log.in_set,
        log.lost_host,
    )


def encode_control(sender: int, group: str, message: Message) -> bytes:
    """Body of a control message."""
    control = pb.Control(sender=sender, group=group)
    match message:
        case Hello(role, log, leading, following, wants_answer):
            control.hello.CopyFrom(
                pb.Hello(role=role.value, log=_log_to_pb(log), leading=leading, following=following, wants_answer=wants_answer)
            )
        case Prepare(epoch):
            control.prepare.epoch = epoch
        case Promise(epoch, log):
            control.promise.CopyFrom(pb.Promise(epoch=epoch, log=_log_to_pb(log)))
        case Lead(epoch, in_set, log):
            control.lead.CopyFrom(pb.Lead(epoch=epoch, in_set=in_set, log=_log_to_pb(log)))
        case Following(epoch, start, diverged, log):
            control.following.CopyFrom(pb.Following(epoch=epoch, start=start, diverged=diverged, log=_log_to_pb(log)))
        case Heartbeat(epoch, safe, end, applied):
            control.heartbeat.CopyFrom(pb.Heartbeat(epoch=epoch, safe=safe, end=end, applied=applied))
        case Superseded(top):
            control.superseded.top = top
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
            h = control.hello
            message = Hello(role, _log_from_pb(h.log), h.leading, h.following, h.wants_answer)
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
            message = Heartbeat(b.epoch, b.safe, b.end, b.applied)
        case "superseded":
            message = Superseded(control.superseded.top)
        case _:
            raise MalformedInput("a control message of an unknown kind")
    return control.sender, message
