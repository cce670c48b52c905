"""The shared state of a node's parts: its log and own writes, its role, its view of the other nodes, the effects of the current event.

Rules:

- The parts (leader.py, follower.py, candidate.py, in_sync.py, operator_requests.py) import this module and not node.py, which combines them.
- This class holds state that several parts read, and names its writer; state of one part stays in that part.
- `_pending` holds, in order, the writes that the own stream has not confirmed.
- A promise holds from the moment its FENCE is written, not from the moment it is confirmed.

Invariants: applied <= safe <= durable <= log.end on a leader; a batch below `log.top` is never accepted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import IllegalEvent
from .events import CutTail, Effect, EntryKind, Hello, Message, RoleChanged, SafeAdvanced, Send, WriteBatch, WriteFence
from .log import Acceptance, BatchHeader, LogIndex, LogState, Members
from .peer import RemoteBackup
from .positions import epoch_name, owner_of
from .register import Record, RegisterView
from .roles import Role, require_legal
from .settings import NodeSettings, unnamed

#: A node that has been silent for this many of its heartbeats is not heard any more. Shorter than a link takes to notice a dead peer.
HEARD_HEARTBEATS = 8


@dataclass(frozen=True, slots=True)
class Written:
    """A write to the own stream that is not confirmed yet; `then` runs when it is. `last`: the last entry of a batch, else 0."""

    last: int
    then: Callable[[float], None] | None = None


class NodeBase:
    """The state that all parts of a node share. Args: see Node."""

    def __init__(self, settings: NodeSettings, *, paused: bool = False) -> None:
        self.settings = settings
        self.me = settings.node
        self.log = LogIndex(settings.node)
        self.role = Role.STANDALONE
        self.reason = "not started"
        self.peers = {node: RemoteBackup() for node in settings.names if node != settings.node}
        self.leading = 0  # the epoch that this node leads: by Leader
        self.leader_epoch = 0  # the epoch of the primary that this node has heard: by Follower
        self.following = False  # that primary's pushes are taken: by Follower
        self.last_heard_leader: float | None = None  # by Follower
        self.last_heard_epoch = 0  # by Follower: the epoch of that leader
        self.durable = 0
        """End of the own stream's confirmed part."""
        self.safe = 0
        self.applied = 0  # by the driver
        self.lost_host = False
        self.head = 0  # first entry that the own stream still has, as far as is known
        self.paused = paused
        self.lacks = ""
        """Features that the own broker lacks and the log needs: by the driver. A node that lacks one leads only if an operator insists."""
        self.register: RegisterView | None = None  # as it was last read; None: not yet: by Registrar
        self.register_away = True  # etcd does not answer: by Registrar
        self.written: Record | None = None  # the last record that this node has written to the register: by Registrar
        self.cut_off = ""
        """Why a primary serves no clients although it leads (E5); empty if it does: by RegisterKeeper."""
        self._pending: deque[Written] = deque()
        self._effects: list[Effect] = []

    # ---- queries -----------------------------------------------------------------------------------------------------

    def name(self, node: int) -> str:
        return self.settings.names.get(node, unnamed(node))

    def names(self, nodes: Iterable[int]) -> str:
        return ", ".join(map(self.name, nodes))

    def state(self) -> LogState:
        return self.log.state(lost_host=self.lost_host, head=self.head, safe=self.safe)

    @property
    def in_sync(self) -> Members:
        """The members in the set that are not out of it (RemoteBackup.left): a leader may rely on their logs."""
        return self.log.members - {number for number, peer in self.peers.items() if peer.left}

    def nothing_is_safe(self) -> str:
        """Why nothing becomes safe for now: the members that are out (mode strict); empty if none is."""
        out = self.names(sorted(self.log.members - self.in_sync))
        todo = "wait until it has, or take it out of the set with lrq-ha remove"
        return f"{out} has not caught up, and nothing is safe without it: {todo}" if out else ""

    def primary(self) -> int:
        """The node that leads as far as this one knows; 0 if it knows none."""
        if self.leading:
            return self.me
        if self.leader_epoch and self.leader_epoch >= self.log.top:
            return owner_of(self.leader_epoch)
        return 0

    def hears(self, peer: int, now: float) -> bool:
        """Whether `peer` speaks to this node, even if this node cannot answer."""
        return now - self.peers[peer].heard_at <= HEARD_HEARTBEATS * self.settings.heartbeat_s

    def hear_leader(self, epoch: int, now: float) -> None:
        """The primary that this node follows has spoken."""
        self.last_heard_leader, self.last_heard_epoch = now, epoch

    def heard_epoch(self, now: float) -> int:
        """The newest epoch whose own leader this node hears; 0 if none."""
        return max((peer.epoch for number, peer in self.peers.items() if owner_of(peer.epoch) == number and self.hears(number, now)), default=0)

    @property
    def led_last(self) -> bool:
        """Whether the last epoch that this node knows of is its own."""
        return owner_of(self.log.last_epoch) == self.me and owner_of(self.log.top) == self.me

    def hello(self, *, wants_answer: bool) -> Hello:
        following, settings = self.leader_epoch if self.following else 0, self.settings
        told = (self.paused, self.lacks, settings.software, settings.shared, settings.priority)
        return Hello(self.role, self.state(), self.leading, following, wants_answer, *told)

    @property
    def record_known(self) -> int:
        """The newest version of the record in etcd that this log, and those of the nodes that answer, know of."""
        return max([self.log.record, *(peer.hello.log.record for peer in self.peers.values() if peer.answers and peer.hello)])

    def knows_nothing_of(self, record: Record) -> bool:
        """Whether all nodes answer, and none has a log, or has promised the record's epoch. A group that was stopped as it began has promised it."""
        heard = [self.state(), *(peer.hello.log for peer in self.peers.values() if peer.answers and peer.hello)]
        return len(heard) > len(self.peers) and not any(log.end or log.top == record.epoch for log in heard)

    def lacking(self) -> dict[int, str]:
        """The nodes, as far as they have been heard, whose brokers lack a feature of the log, and the feature."""
        known = {number: peer.hello.lacks for number, peer in self.peers.items() if peer.hello} | {self.me: self.lacks}
        return {number: lacks for number, lacks in known.items() if lacks}

    @property
    def group_paused(self) -> bool:
        """Whether this node, or another node that has been heard, is paused, or etcd's record says so."""
        return self.paused or self.pause_recorded or any(peer.hello.paused for peer in self.peers.values() if peer.hello)

    @property
    def own_record(self) -> Record | None:
        """The record of the epoch that this node leads, as it has written it; None: it has written none."""
        return self.written if self.written and self.written.epoch == self.leading else None

    @property
    def pause_recorded(self) -> bool:
        """Whether etcd's record says that the group is paused, as it was last read."""
        return bool(self.register and self.register.record and self.register.record.paused)

    def end_pause(self) -> None:
        """An operator has promoted a node: nodes take epochs by themselves again."""
        if self.paused:
            self.paused = False
            self.send_all(self.hello(wants_answer=False))

    def how_to_join(self, follower: int, leader: int, follower_log: LogState, leader_log: LogState) -> str:
        """The operator's steps if the leader's log lacks entries that a follower needs (R17)."""
        name = self.name(follower)
        lacks = f"the log of {self.name(leader)} begins at entry {leader_log.head}, its broker has dropped what was before"
        # Nothing would be safe before it has joined, and no renewal would end.
        removed = self.settings.strict and leader_log.sets and follower in leader_log.sets[-1][1]
        renew = f"lrq-ha remove {name}, then lrq-ha renew" if removed else "lrq-ha renew"
        if not follower_log.end:
            return f"{lacks}: to let {name} join, run {renew}"
        then = "" if leader_log.base else f", then run {renew}"
        return f"{lacks}, and {name} has only what is up to {follower_log.end}: rebuild it with lrq-ha reinit {name} --discard{then}"

    # ---- effects and role --------------------------------------------------------------------------------------------

    def emit(self, *effects: Effect) -> None:
        """Adds effects, to be carried out after those emitted before."""
        self._effects += effects

    def send(self, peer: int, message: Message) -> None:
        self._effects.append(Send(peer, message))

    def send_all(self, message: Message) -> None:
        """Sends a message to every reachable node."""
        self._effects += [Send(node, message) for node, peer in self.peers.items() if peer.connected]

    def set_role(self, role: Role, reason: str) -> None:
        """Emits the change if role or reason differs. Raises IllegalEvent as `require_legal` does."""
        if role is not self.role:
            require_legal(self.role, role)
        elif reason == self.reason:
            return
        self.role, self.reason = role, reason
        self._effects.append(RoleChanged(role, reason))

    def wait(self, reason: str) -> None:
        """Not leading and not in sync."""
        self.set_role(Role.JOINING if self.log.joining else Role.CATCH_UP, reason)

    def advance_safe(self, upto: int) -> None:
        """Everything up to `upto` is safe; safe never goes back."""
        if upto > self.safe:
            self.safe = upto
            self._effects.append(SafeAdvanced(upto))

    # ---- the own log and stream --------------------------------------------------------------------------------------

    def append(self, kind: EntryKind, count: int, sets: tuple[tuple[int, Members], ...] = (), body: object = None, renewal: int = 0) -> None:
        """Appends entries of the epoch that this node leads. Raises IllegalEvent if the log does not take them."""
        first = self.log.end + 1
        record = self.own_record.version if sets and self.own_record else 0
        batch = BatchHeader(self.leading, first, first + count - 1, self.log.last_epoch, self.leading, sets, renewal, record)
        if self.log.accept(batch) is not Acceptance.APPEND:
            raise IllegalEvent(f"the own log refuses entry {first} of epoch {epoch_name(self.leading)}")
        self.write_batch(batch, kind, body)

    def write_batch(self, batch: BatchHeader, kind: EntryKind, body: object) -> None:
        """Writes a batch that the log has accepted to the own stream."""
        if batch.sets:
            self.log.merge_sets(self.safe, self.settings.sets_kept)
        self._pending.append(Written(batch.last))
        self._effects.append(WriteBatch(batch, kind, body))

    def write_fence(self, epoch: int, out_end: int, then: Callable[[float], None]) -> None:
        """Promises `epoch` (`out_end`: as in LogIndex.fence); `then` is called with the time at which the own stream has the FENCE."""
        # The promise holds from this moment, before FENCE is sent: nothing lower is accepted while it is under way (R2).
        self.log.fence(epoch, out_end)
        self._pending.append(Written(0, then))
        self._effects.append(WriteFence(epoch, out_end))

    def confirm_writes(self, count: int, now: float) -> None:
        """The own stream has the `count` oldest writes. Raises IllegalEvent, and changes nothing, if there are fewer."""
        if count > len(self._pending):
            raise IllegalEvent(f"{count} writes confirmed, {len(self._pending)} are open")
        for _ in range(count):
            written = self._pending.popleft()
            if written.last:
                self.durable = min(written.last, self.log.end)
            if written.then:
                written.then(now)

    def cut_tail(self, first: int) -> None:
        """The log has replaced its entries from `first` on."""
        self.durable = min(self.durable, first - 1)
        self._effects.append(CutTail(first))

    def begin_log(self, first: int, before: LogState) -> None:
        """R17: an empty log begins at entry `first`. See LogIndex.begin."""
        self.log.begin(first, before)
        self.durable = self.safe = self.applied = first - 1
