"""Events (into a node), effects (out of a node) and messages (between nodes). Closed sets of types.

The driver's duties:

- Carry out the effects of one `handle` call in the order given, before the next event goes in.
- Report every own write that the stream confirmed (`OwnConfirmed`), in order.
- Deliver messages of one connection in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .guard import QueueGuard
from .log import BatchHeader, LogState
from .register import Record, RegisterView, Why
from .roles import Role

Given = tuple[tuple[int, int], ...] | None
"""Inclusive ranges of entries that clients may have been given; None: any of them."""

# ---- messages between nodes ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on a new connection, and the answer to it.

    Args:
        leading: The epoch that the sender leads, 0 if none.
        following: The epoch that the sender follows, 0 if none.
        wants_answer: The receiver answers with a Hello of its own.
        paused: An operator has paused automatic epochs.
        lacks: Text: features that the log needs and the sender's broker lacks, and the remedy; empty if none.
        software: The sender's version.
        shared: Configuration keys that must be equal on all nodes, and their values.
        priority: Of the sender, where etcd coordinates; 0: it takes no epoch by itself.
    """

    role: Role
    log: LogState
    leading: int
    following: int = 0
    wants_answer: bool = False
    paused: bool = False
    lacks: str = ""
    software: str = ""
    shared: tuple[tuple[str, str], ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Prepare:
    """A candidate asks for the promise to accept nothing below `epoch`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Promise:
    """The FENCE for `epoch` is on the sender's stream; its log is `log` and cannot grow below that epoch."""

    epoch: int
    log: LogState


@dataclass(frozen=True, slots=True)
class Lead:
    """A leader calls a node to follow. `in_set`: whether the leader counts that node in."""

    epoch: int
    in_set: bool
    log: LogState


@dataclass(frozen=True, slots=True)
class Following:
    """Answer to Lead: send from the entry after `start`. `diverged`: the sender refuses to be cut there (R14)."""

    epoch: int
    start: int
    diverged: bool
    log: LogState


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent a few times a second. From a leader: safe and end of its log; from a follower: its applied position.

    Args:
        epoch: The epoch that the sender leads, or follows, or hears from its leader; 0 if none.
        arriving: Bytes that a follower has of the batch behind `end`: a batch takes long over a slow link.
        progress: A leader's own stream has confirmed something within the time of its lease (E6); only where etcd coordinates.
    """

    epoch: int
    safe: int
    end: int
    applied: int
    arriving: int = 0
    progress: bool = False


@dataclass(frozen=True, slots=True)
class Superseded:
    """The receiver's epoch is over: the sender has seen `top`."""

    top: int


@dataclass(frozen=True, slots=True)
class Handover:
    """The sender's epoch ends with entry `end`; node `to` is to take the next one (0: the receiver). `given`: as of `StepDown`."""

    epoch: int
    end: int
    given: Given
    to: int = 0


Message = Hello | Prepare | Promise | Lead | Following | Heartbeat | Superseded | Handover

# ---- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """The own OPEN has been read; the log is rebuilt. `applied`: R of the applied record. `lost_host`: the broker or host went down (R16)."""

    applied: int
    lost_host: bool


@dataclass(frozen=True, slots=True)
class OwnConfirmed:
    """The own stream confirmed the `count` oldest writes that were not confirmed yet."""

    count: int


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """This node can send to `peer` now."""

    peer: int


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """This node can send to `peer` no more."""

    peer: int


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The connection on which `peer` spoke is lost, and not because this node refused one of its pushes."""

    peer: int


@dataclass(frozen=True, slots=True)
class PeerMessage:
    peer: int
    message: Message


@dataclass(frozen=True, slots=True)
class Push:
    """A batch arrived at the door from `peer`. `safe`: the safe position its leader knew. `body` is opaque.

    `before`: of a CHECKPOINT that began a renewal (`batch.begins_renewal`), the epochs and sets that it names.
    """

    peer: int
    batch: BatchHeader
    safe: int
    body: object = None
    before: LogState | None = None


@dataclass(frozen=True, slots=True)
class PeerAcked:
    """`peer` has everything up to `upto` on its stream."""

    peer: int
    upto: int


@dataclass(frozen=True, slots=True)
class Append:
    """The door appends entries (only on an active node). `count` >= 1 entries; `body` is opaque. `renewal`: as in BatchHeader."""

    count: int
    body: object = None
    renewal: int = 0


@dataclass(frozen=True, slots=True)
class HeadMoved:
    """The broker has dropped the oldest segments of the own stream: `first` is the first entry that is left."""

    first: int


@dataclass(frozen=True, slots=True)
class CannotSend:
    """The own stream no longer has the entries that `peer` needs next."""

    peer: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """The driver has finished the steps that a new epoch needs before the door may open (R12, steps 6 and 7)."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PromoteRequest:
    """The operator's word: promote this node; `down` are nodes that are down (and stay down until they have reached it)."""

    down: frozenset[int] = frozenset()
    force: bool = False
    dry_run: bool = False
    without_register: bool = False  # though etcd does not answer


@dataclass(frozen=True, slots=True)
class RemoveRequest:
    """The operator removes a node from the set (static coordination, mode strict)."""

    node: int
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class SwitchoverRequest:
    """May this leader hand over to `node` (0: to the in-sync backup with the smallest id)? This request changes nothing."""

    node: int = 0


@dataclass(frozen=True, slots=True)
class StepDown:
    """The driver has closed the door and everything is safe: this leader's epoch ends, for `node` to take the next (0: no node).

    `given`: of the entries still in a queue, those that clients may have been given before; inclusive ranges. None: any of them.
    """

    node: int
    given: Given


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """Stops or resumes automatic epochs."""

    paused: bool


@dataclass(frozen=True, slots=True)
class RegisterRead:
    """What the register in etcd holds now; None: etcd does not answer."""

    view: RegisterView | None


@dataclass(frozen=True, slots=True)
class RegisterAnswered:
    """The answer to `ChangeRegister`.

    Args:
        done: The register has, or had, the record that was to be written. No copy of the request is left that may still change it.
        view: What the register holds now.
    """

    done: bool
    view: RegisterView


@dataclass(frozen=True, slots=True)
class Progressed:
    """The own stream has confirmed something that was written since the last such event (E4)."""


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """etcd has renewed this node's lease; it ends at `until` by the node's own monotonic clock (E5)."""

    until: float


@dataclass(frozen=True, slots=True)
class BrokerLacks:
    """Features that the own broker lacks and the log needs: see `Hello`. Empty: none any more."""

    text: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; comes a few times a second.

    Args:
        arriving: Bytes received of the batch behind the end of the log, from the primary that this node follows.
    """

    arriving: int = 0


Event = (
    Opened
    | OwnConfirmed
    | PeerConnected
    | PeerDisconnected
    | PeerGone
    | PeerMessage
    | Push
    | PeerAcked
    | Append
    | HeadMoved
    | CannotSend
    | Recovered
    | PromoteRequest
    | RemoveRequest
    | SwitchoverRequest
    | StepDown
    | PauseRequest
    | RegisterRead
    | RegisterAnswered
    | Progressed
    | LeaseRenewed
    | BrokerLacks
    | Tick
)

# ---- effects ---------------------------------------------------------------------------------------------------------


class EntryKind(Enum):
    ENTRIES = "entries"
    MARKER = "marker"
    MEMBERS = "members"


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """Append to the own stream. `kind` ENTRIES: `body` is the event's body; else the driver encodes `batch.sets`."""

    batch: BatchHeader
    kind: EntryKind
    body: object = None


@dataclass(frozen=True, slots=True)
class WriteFence:
    """Append a FENCE record to the own stream. `out_end`: see LogIndex.fence."""

    epoch: int
    out_end: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    peer: int
    message: Message


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Start sending the log to `peer`, beginning with the entry after `guard.sent`; an earlier subscription of it ends."""

    peer: int
    guard: QueueGuard


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Stop sending the log to `peer`; a Following to a new Lead subscribes it again."""

    peer: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection to `peer` (it will be opened again) and stop sending to it."""

    peer: int


@dataclass(frozen=True, slots=True)
class Ack:
    """Tell the leader that everything up to `upto` is on the own stream."""

    peer: int
    upto: int


@dataclass(frozen=True, slots=True)
class RefusePush:
    """The push cannot be accepted: close its connection."""

    peer: int
    reason: str


@dataclass(frozen=True, slots=True)
class SafeAdvanced:
    """Everything up to `safe` may touch the queues now."""

    safe: int


@dataclass(frozen=True, slots=True)
class CutTail:
    """Entries from `first` on fell out of the log."""

    first: int


@dataclass(frozen=True, slots=True)
class RoleChanged:
    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class Recover:
    """The MARKER of `epoch` is safe: do the steps that must precede the opening of the door, then report Recovered.

    `given`: messages of earlier epochs that clients may have been given: as of `StepDown`, if the leader before handed over in order.
    """

    epoch: int
    given: Given = None


@dataclass(frozen=True, slots=True)
class OpenDoor:
    """Clients may come in. While the role is still RECOVERING, their confirms are held back (see roles)."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ChangeRegister:
    """Write `record` to the register in etcd, in one transaction, if the register is as it was `seen`; answer with RegisterAnswered.

    An answer that is lost is no answer: repeat the transaction until one comes.

    Args:
        take: Write the key `leader` with this node's lease, too, if that key is as it was seen.
        why: The right by which the record's epoch is taken; None: it is not a new one.
    """

    record: Record
    seen: RegisterView
    take: bool
    why: Why | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    """This incarnation is over: close everything and start again from the broker's streams. `defers_to`: see Node."""

    reason: str
    defers_to: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to the operator's request. `node`: the target of a switchover; `at_stake`: what a promotion may have lost."""

    ok: bool
    text: str
    node: int = 0
    at_stake: str = ""


Effect = (
    WriteBatch
    | WriteFence
    | Send
    | Subscribe
    | Unsubscribe
    | Disconnect
    | Ack
    | RefusePush
    | SafeAdvanced
    | CutTail
    | RoleChanged
    | Recover
    | OpenDoor
    | ChangeRegister
    | Restart
    | Answer
)
