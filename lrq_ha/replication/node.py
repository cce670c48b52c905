"""One node of a group: who leads, what it has promised, what is safe. Pure: `handle(event, now) -> effects` (R1, R2, R4, R12–R17).

Theory of operation:
- Every node keeps the index of its log (log.py). What it wrote and its stream has not confirmed stands in `_pending`, in order.
- A leader appends, and pushes to every peer that subscribed. A follower accepts by R2 and acknowledges what its stream confirmed.
- A node that takes an epoch promises it first (FENCE), as does every node that answers; then it appends MARKER, and opens its
  door when that is safe. Without the answers of all other nodes it needs the operator's word that the silent ones are down.
- A leader that learns of a higher epoch ends this incarnation and starts again as a follower.

Invariants: applied <= safe <= durable <= log.end on a leader; a batch below `log.top` is never accepted; at most one campaign at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import IllegalEvent
from .events import (
    Ack,
    Answer,
    Append,
    CannotSend,
    CutTail,
    Disconnect,
    Effect,
    EntryKind,
    Event,
    Following,
    Handover,
    HeadMoved,
    Heartbeat,
    Hello,
    Lead,
    Message,
    Opened,
    OwnConfirmed,
    PauseRequest,
    PeerAcked,
    PeerConnected,
    PeerDisconnected,
    PeerMessage,
    Prepare,
    Promise,
    PromoteRequest,
    Push,
    Recover,
    Recovered,
    RefusePush,
    RemoveRequest,
    Restart,
    RoleChanged,
    SafeAdvanced,
    Send,
    StepDown,
    Subscribe,
    Superseded,
    SwitchoverRequest,
    Tick,
    WriteBatch,
    WriteFence,
)
from .log import Acceptance, BatchHeader, LogIndex, LogState, Members, common_end, refuses_cut, safe_position
from .positions import epoch_name, epoch_number, owner_of, term_of
from .roles import Role, require_legal

# After a newcomer was waited for in vain, the next attempt comes so many times admit_timeout_s later.
ADMIT_PAUSE_TIMES = 10

# What a node that lost the end of its log, or all of it, may have promised or led before. Its next epoch must not be one of those: two
# histories with the same epoch numbers would pass for one.
FORGOTTEN_TERMS_MAX = 1 << 16


@dataclass(frozen=True)
class NodeSettings:
    """Static coordination of one group.

    Args:
        node: This node's id, 1 to 255.
        names: Name of every configured node of the group by id, this one included.
        strict: mode "strict": a silent backup stays in the set until the operator removes it.
        restart_alone: A restarted leader takes a new epoch although others are silent. It redefines the operator's word "down" as
            "down, and stays down until it has reached the new primary".
        backup_timeout_s: A member that makes no progress for so long is taken out of the set (mode "available"). It is counted in ticks:
            they come at least every heartbeat_s, or else this node stood still, which does not count.
        heartbeat_s: Interval of heartbeats when there is nothing else to send.
        campaign_timeout_s: How long a candidate waits for promises.
        admit_timeout_s: How long safe may be held back so that a newcomer catches the last entries.
        admit_lag_entries_max: A newcomer that lacks no more than this may be waited for.
        handover_timeout_s: How long a leader that has handed over leaves the next epoch to the other node.
    """

    node: int
    names: dict[int, str]
    strict: bool = False
    restart_alone: bool = False
    backup_timeout_s: float = 5.0
    heartbeat_s: float = 0.25
    campaign_timeout_s: float = 5.0
    admit_timeout_s: float = 0.5
    admit_lag_entries_max: int = 20_000
    handover_timeout_s: float = 10.0


@dataclass
class RemoteBackup:
    """The primary's view of one node of its group (Qpid HA: RemoteBackup). 0 <= acknowledged <= log.end."""

    connected: bool = False
    hello: Hello | None = None
    called: bool = False  # Lead was sent on this connection and not answered yet
    subscribed: bool = False
    diverged: bool = False
    fallen: bool = False  # the log no longer has what it needs next
    left: str = ""  # why this primary took it out of the set; empty again when it is back
    acknowledged: int = 0
    applied: int = 0
    heard_at: float = 0.0
    progress_at: float = 0.0
    admit_after: float = 0.0


@dataclass
class _Campaign:
    epoch: int
    down: frozenset[int]
    waiting: set[int]
    deadline: float
    operator: bool
    force: bool
    fenced: bool = False
    logs: dict[int, LogState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Written:
    """A write to the own stream that is not confirmed yet; `then` runs when it is."""

    last: int
    then: Callable[[float], None] | None = None


class Node:
    """The pure core of one node. Feed it the own stream first (`read_batch`, `read_fence`), then events.

    Args:
        settings: Of the group.
        paused: An operator has said that nobody takes an epoch by itself (until `resume`).
        defers_to: The node to which the incarnation before this one has handed over; 0: none.
    """

    def __init__(self, settings: NodeSettings, *, paused: bool = False, defers_to: int = 0) -> None:
        self.settings = settings
        self.me = settings.node
        self.log = LogIndex(settings.node)
        self.role = Role.STANDALONE
        self.reason = "not started"
        self.peers = {node: RemoteBackup() for node in settings.names if node != settings.node}
        self.leading = 0
        self.leader_epoch = 0
        self.safe = 0
        self.applied = 0
        self.lost_host = False
        self.head = 0  # first entry that the own stream still has, as far as is known
        self.paused = paused
        self.last_heard_leader: float | None = None
        self._defers_to = defers_to
        self._defers_until = 0.0
        self._handed: Handover | None = None
        self.tail_from = 0  # first entry that this node refuses to drop, while it is diverged
        self._marker = 0
        self._pending: deque[_Written] = deque()
        self._durable = 0
        self._campaign: _Campaign | None = None
        self._following = False
        self._leader_safe = 0
        self._agreed = 0
        self._acked = 0
        self._recovering = False
        self._clean = False
        self._admitting: tuple[int, float] | None = None
        self._heartbeat_at = 0.0
        self._ticked_at = 0.0
        self._effects: list[Effect] = []

    # ---- rebuilding from the own stream ------------------------------------------------------------------------------

    def read_batch(self, batch: BatchHeader) -> Acceptance:
        """A batch read from the own stream before Opened."""
        return self.log.accept(batch)

    def read_fence(self, epoch: int, out_end: int) -> None:
        """A FENCE record read from the own stream before Opened."""
        self.log.fence(epoch, out_end)

    # ---- the one entry -----------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Takes one event.

        Args:
            event: One of events.Event.
            now: Monotonic time in seconds.

        Returns:
            Effects, to be carried out in order before the next event.

        Raises:
            IllegalEvent: The driver broke its duties; nothing was changed.
        """
        if self.role is Role.STANDALONE and not isinstance(event, Opened):
            raise IllegalEvent(f"{type(event).__name__} before Opened")
        self._effects = []
        self._HANDLERS[type(event)](self, event, now)
        return self._effects

    # ---- queries -----------------------------------------------------------------------------------------------------

    @property
    def durable(self) -> int:
        """End of what the own stream has confirmed."""
        return self._durable

    @property
    def set_may_change(self) -> bool:
        """Whether an acknowledgement may make this leader append MEMBERS: some configured node is not in the set, or one in it is not configured."""
        return bool(self.leading) and self.log.members != self.settings.names.keys()

    def name(self, node: int) -> str:
        return self.settings.names.get(node, f"node {node}")

    def state(self) -> LogState:
        return self.log.state(lost_host=self.lost_host, head=self.head, safe=self.safe)

    def primary(self) -> int:
        """The node that leads as far as this one knows; 0 if it knows none."""
        if self.leading:
            return self.me
        if self.leader_epoch and self.leader_epoch >= self.log.top:
            return owner_of(self.leader_epoch)
        return 0

    # ---- start -------------------------------------------------------------------------------------------------------

    def _opened(self, event: Opened, now: float) -> None:
        if self.role is not Role.STANDALONE:
            raise IllegalEvent("Opened twice")
        # A host that went down may have lost the end of the log and kept the record: what is not in the log is not safe.
        self.applied = self.safe = min(event.applied, self.log.end)
        self.lost_host = event.lost_host
        self._ticked_at = now
        self._durable = self.log.end
        self._defers_until = now + self.settings.handover_timeout_s
        self._wait("waiting for the other nodes of the group")
        self._consider_taking(now)

    # ---- own writes --------------------------------------------------------------------------------------------------

    def _append(self, event: Append, now: float) -> None:
        if self.role is not Role.ACTIVE:
            raise IllegalEvent(f"an entry for the log while {self.role.value}")
        self._write(EntryKind.ENTRIES, event.count, (), event.body, event.renewal)

    def _write(self, kind: EntryKind, count: int, sets: tuple[tuple[int, Members], ...], body: object = None, renewal: int = 0) -> None:
        first = self.log.end + 1
        batch = BatchHeader(self.leading, first, first + count - 1, self.log.last_epoch, self.leading, sets, renewal)
        if self.log.accept(batch) is not Acceptance.APPEND:
            raise IllegalEvent(f"the own log refuses entry {first} of epoch {epoch_name(self.leading)}")
        self._pending.append(_Written(batch.last))
        self._effects.append(WriteBatch(batch, kind, body))

    def _write_fence(self, epoch: int, out_end: int, then: Callable[[float], None]) -> None:
        # The promise holds from this moment, before FENCE is sent: nothing lower is accepted while it is under way (R2).
        self.log.fence(epoch, out_end)
        self._pending.append(_Written(0, then))
        self._effects.append(WriteFence(epoch, out_end))

    def _own_confirmed(self, event: OwnConfirmed, now: float) -> None:
        if event.count > len(self._pending):
            raise IllegalEvent(f"{event.count} writes confirmed, {len(self._pending)} are open")
        for _ in range(event.count):
            written = self._pending.popleft()
            if written.last:
                self._durable = min(written.last, self.log.end)
            if written.then:
                written.then(now)
        if self.leading:
            self._advance_safe(now)
        elif self._following:
            self._acknowledge()

    # ---- leading -----------------------------------------------------------------------------------------------------

    def _advance_safe(self, now: float) -> None:
        if self._admitting:
            self._admit(now)
        if self._admitting:
            return
        acknowledged = {node: peer.acknowledged for node, peer in self.peers.items()}
        safe = safe_position(self.log.sets, self._marker, self.me, self._durable, acknowledged)
        if safe > self.safe:
            self.safe = safe
            self._effects.append(SafeAdvanced(safe))
        if self.role is Role.RECOVERING and not self._recovering and safe >= self._marker > 0:
            self._recovering = True
            self._effects.append(Recover(self.leading, self._clean))

    def _recovered(self, event: Recovered, now: float) -> None:
        if event.epoch == self.leading and self.role is Role.RECOVERING:
            self._set_role(Role.ACTIVE, f"primary, epoch {epoch_name(self.leading)}")

    def _peer_acked(self, event: PeerAcked, now: float) -> None:
        peer = self.peers[event.peer]
        if not self.leading or not peer.subscribed:
            return
        peer.heard_at = now
        if event.upto > peer.acknowledged:
            if event.upto > self.log.end:
                raise IllegalEvent(f"{self.name(event.peer)} acknowledged {event.upto}, the log ends at {self.log.end}")
            peer.acknowledged = event.upto
            peer.progress_at = now
        self._advance_safe(now)
        self._consider_admitting(event.peer, now)

    def _set_is_settled(self) -> bool:
        return bool(self._marker) and bool(self.log.sets) and self.log.sets[-1][0] <= self.safe

    def _consider_admitting(self, node: int, now: float) -> None:
        """R15: an addition is appended only when the newcomer has all that is safe and the last change is safe.

        Under load a newcomer's acknowledgement is always a little behind. So safe is held where it is for a moment (nothing is
        confirmed meanwhile) until the newcomer has reached it.
        """
        peer = self.peers[node]
        if node in self.log.members or not peer.subscribed or not self._set_is_settled() or self._admitting or now < peer.admit_after:
            return
        if self.log.end - peer.acknowledged <= self.settings.admit_lag_entries_max:
            self._admitting = (node, now + self.settings.admit_timeout_s)
            self._advance_safe(now)

    def _admit(self, now: float) -> None:
        node, deadline = self._admitting or (0, 0.0)
        peer = self.peers[node]
        if peer.acknowledged >= self.safe:
            self._admitting = None
            peer.left = ""
            self._change_set(self.log.members | {node})
        elif now >= deadline:
            # What stalls must not hold back everybody's confirms over and over: it may try again when it has had time to catch up.
            self._admitting = None
            peer.admit_after = now + ADMIT_PAUSE_TIMES * self.settings.admit_timeout_s

    def _change_set(self, members: Members) -> None:
        self._write(EntryKind.MEMBERS, 1, ((self.log.end + 1, members),))

    def _leaves(self, node: int, reason: str) -> None:
        if node in self.peers:
            self.peers[node].left = reason
        self._change_set(self.log.members - {node})

    def _remove_from_set(self, node: int, reason: str) -> None:
        self._leaves(node, reason)
        if node in self.peers:
            # The connection is opened again and the node told that it is out: its FENCE records it (R13).
            self._unsubscribe(node)
            self._effects.append(Disconnect(node))

    def _unsubscribe(self, node: int) -> None:
        self.peers[node].subscribed = False
        if self._admitting and self._admitting[0] == node:
            self._admitting = None

    def _lead(self, node: int) -> None:
        peer = self.peers[node]
        if self.leading and self._marker and peer.connected and peer.hello:
            lost = peer.hello.log.lost_host or not peer.hello.log.end
            if lost and node in self.log.members:
                self._leaves(node, "its broker went down" if peer.hello.log.lost_host else "it was made anew")  # R16
            self._unsubscribe(node)
            peer.called = True
            self._effects.append(Send(node, Lead(self.leading, node in self.log.members, self.state())))

    # ---- a log without its beginning (R17) ---------------------------------------------------------------------------

    def _head_moved(self, event: HeadMoved, now: float) -> None:
        self.head = max(self.head, event.first)

    def _cannot_send(self, event: CannotSend, now: float) -> None:
        if self.leading and self.peers[event.peer].subscribed:
            self.peers[event.peer].fallen = True
            self._unsubscribe(event.peer)
            self._effects.append(Disconnect(event.peer))  # it is called again, and told

    def _call_who_may_join(self) -> None:
        """A renewal has ended: an empty log may begin there."""
        for node, peer in self.peers.items():
            if peer.fallen and not peer.called and peer.hello and not peer.hello.log.end and self.state().base:
                self._lead(node)

    # ---- connections -------------------------------------------------------------------------------------------------

    def _peer_connected(self, event: PeerConnected, now: float) -> None:
        peer = self.peers[event.peer]
        peer.connected = True
        peer.heard_at = peer.progress_at = now
        self._effects.append(Send(event.peer, self._hello(wants_answer=True)))
        self._consider_taking(now)

    def _hello(self, *, wants_answer: bool) -> Hello:
        return Hello(self.role, self.state(), self.leading, self.leader_epoch if self._following else 0, wants_answer, self.paused)

    def _peer_disconnected(self, event: PeerDisconnected, now: float) -> None:
        peer = self.peers[event.peer]
        peer.connected = peer.called = False
        peer.hello = None
        peer.progress_at = now
        self._unsubscribe(event.peer)
        if self._campaign and event.peer in self._campaign.waiting:
            self._abort(f"{self.name(event.peer)} stopped answering", now)
        if self.leader_epoch and owner_of(self.leader_epoch) == event.peer:
            self._lose_leader(f"the connection to the primary {self.name(event.peer)} is lost")

    def _lose_leader(self, reason: str) -> None:
        self._following = False
        self.leader_epoch = 0
        if self.role in (Role.READY, Role.CATCH_UP, Role.JOINING):
            self._set_role(self.role, reason)  # an in-sync backup stays ready to be promoted when it no longer hears its primary

    def _peer_message(self, event: PeerMessage, now: float) -> None:
        self.peers[event.peer].heard_at = now
        self._MESSAGES[type(event.message)](self, event.peer, event.message, now)

    def _on_hello(self, node: int, message: Hello, now: float) -> None:
        peer = self.peers[node]
        peer.hello = message
        peer.diverged = message.role is Role.DIVERGED
        if message.wants_answer:
            # A new connection: what was on its way on the old one is lost, an answer to Lead and pushes among it.
            peer.called = False
            if self.leader_epoch and owner_of(self.leader_epoch) == node:
                self._following = False
        if message.wants_answer and peer.connected:
            self._effects.append(Send(node, self._hello(wants_answer=False)))
        if self._superseded_by(message.log.top, node):
            return
        if not self.leading:
            self._consider_taking(now)
        elif not peer.called and (not peer.subscribed or message.following != self.leading):
            self._lead(node)

    def _learn_log(self, node: int, log: LogState) -> None:
        """A node's log has changed since its Hello: whoever compares logs must not compare with what it was."""
        peer = self.peers[node]
        if peer.hello:
            peer.hello = replace(peer.hello, log=log)

    def _superseded_by(self, top: int, node: int) -> bool:
        """A leader that learns of a newer epoch steps down (R13)."""
        if self.leading and top > self.leading:
            self._effects.append(Restart(f"{self.name(node)} has seen epoch {epoch_name(top)}; mine, {epoch_name(self.leading)}, is over"))
            return True
        return False

    def _on_superseded(self, node: int, message: Superseded, now: float) -> None:
        hello = self.peers[node].hello
        if hello and message.top > hello.log.top:
            self._learn_log(node, replace(hello.log, top=message.top))
        if self._campaign and message.top > self._campaign.epoch:
            self._abort(f"{self.name(node)} has promised epoch {epoch_name(message.top)}", now)
        self._superseded_by(message.top, node)

    def _on_heartbeat(self, node: int, message: Heartbeat, now: float) -> None:
        peer = self.peers[node]
        peer.applied = message.applied
        if self._following and message.epoch == self.leader_epoch and node == owner_of(message.epoch):
            self.last_heard_leader = now
            self._learn_safe(message.safe)

    def _on_handover(self, node: int, message: Handover, now: float) -> None:
        if self._following and message.epoch == self.leader_epoch and node == owner_of(message.epoch) and message.end == self.log.end:
            self._handed = message

    # ---- promising and taking an epoch -------------------------------------------------------------------------------

    def _on_prepare(self, node: int, message: Prepare, now: float) -> None:
        if message.epoch <= self.log.top:
            self._effects.append(Send(node, Superseded(self.log.top)))
            return
        if self.leading:
            # A leader promises nothing before it has ended this incarnation; the candidate asks again.
            self._superseded_by(message.epoch, node)
            return
        if self._campaign:
            self._abort(f"{self.name(node)} takes epoch {epoch_name(message.epoch)}", now)
        self._stop_following()
        if self.role is not Role.DIVERGED:
            self._wait(f"promised epoch {epoch_name(message.epoch)} to {self.name(node)}")
        self._write_fence(message.epoch, 0, lambda _now: self._effects.append(Send(node, Promise(message.epoch, self.state()))))

    def _stop_following(self) -> None:
        self._following = False
        self.leader_epoch = 0

    def _consider_taking(self, now: float) -> None:
        """R12 step 1 without an operator: every other configured node answers, none leads, and nobody has a longer log."""
        if self.leading or self._campaign or self.leader_epoch or self.role not in (Role.CATCH_UP, Role.READY):
            return
        silent = [node for node, peer in self.peers.items() if not (peer.connected and peer.hello)]
        mine = self.state()
        if self._defers_to and now < self._defers_until:
            return
        if silent and not (self.settings.restart_alone and self._led_last):
            return
        hellos = {node: peer.hello for node, peer in self.peers.items() if peer.hello}
        if any(hello.leading for hello in hellos.values()):
            return
        paused = self.paused or any(hello.paused for hello in hellos.values())
        if paused:
            self._set_role(self.role, "paused: nobody takes an epoch by itself until lrq-ha resume, or lrq-ha promote NODE")
            return
        handed = self._handed is not None and self._handed.epoch == self.log.last_epoch and self._handed.end == self.log.end
        order = (mine.rank, handed or owner_of(self.log.last_epoch) == self.me, handed, -self.me)
        for node, hello in hellos.items():
            if refuses_cut(hello.log, mine, self.me):
                self._set_role(self.role, f"{self.name(node)} would refuse to drop its tail: an operator must choose")
                return
            if (hello.log.rank, owner_of(self.log.last_epoch) == node, False, -node) > order:
                if hello.log.joining:
                    self._set_role(self.role, f"{self.name(node)} has joined only in part, and has a longer log: an operator must choose")
                return
        self._start_campaign(frozenset(silent), operator=False, force=False, now=now)

    def _start_campaign(self, down: frozenset[int], *, operator: bool, force: bool, now: float) -> None:
        seen = max([self.log.top, *(peer.hello.log.top for peer in self.peers.values() if peer.hello)])
        forgotten = FORGOTTEN_TERMS_MAX if down and (self.lost_host or not self.log.end) else 0
        epoch = epoch_number(term_of(seen) + 1 + forgotten, self.me)
        reachable = {node for node, peer in self.peers.items() if peer.connected and peer.hello and node not in down}
        self._campaign = campaign = _Campaign(epoch, down, reachable, now + self.settings.campaign_timeout_s, operator, force)
        self._stop_following()
        self._set_role(Role.RECOVERING, f"taking epoch {epoch_name(epoch)}")
        self._write_fence(epoch, 0, lambda now: self._own_fence(campaign, now))
        self._effects += [Send(node, Prepare(epoch)) for node in sorted(reachable)]

    def _own_fence(self, campaign: _Campaign, now: float) -> None:
        campaign.fenced = True
        self._conclude(campaign, now)

    def _on_promise(self, node: int, message: Promise, now: float) -> None:
        self._learn_log(node, message.log)
        campaign = self._campaign
        if campaign and campaign.epoch == message.epoch and node in campaign.waiting:
            campaign.waiting.discard(node)
            campaign.logs[node] = message.log
            self._conclude(campaign, now)

    def _conclude(self, campaign: _Campaign, now: float) -> None:
        if campaign is not self._campaign or campaign.waiting or not campaign.fenced:
            return
        mine = self.state()
        for node, log in campaign.logs.items():
            refuses = refuses_cut(log, mine, self.me)
            if refuses and not campaign.operator:
                self._abort(f"{self.name(node)} would refuse to drop its tail: an operator must choose", now)
                return
            if log.rank > mine.rank and not refuses and not campaign.force:
                self._abort(f"{self.name(node)} answered and has a longer log: promote {self.name(node)} instead", now)
                return
        self._campaign = None
        self.lost_host = False
        self.leading = campaign.epoch
        self._clean = self._handed is not None and self._handed.clean and self._handed.end == self.log.end
        self._handed = None
        kept = self.log.members if self.settings.strict else self.log.members - campaign.down
        self._marker = self.log.end + 1
        self._write(EntryKind.MARKER, 1, ((self._marker, kept | {self.me}),))
        if campaign.operator:
            self._effects.append(Answer(True, f"{self.name(self.me)} has taken epoch {epoch_name(campaign.epoch)}"))
        for node in self.peers:
            self.peers[node].acknowledged = 0
            self.peers[node].progress_at = now
            self._lead(node)
        self._advance_safe(now)

    def _abort(self, reason: str, now: float) -> None:
        campaign, self._campaign = self._campaign, None
        self._wait(reason)
        if campaign and campaign.operator:
            self._effects.append(Answer(False, reason))

    def _promote(self, event: PromoteRequest, now: float) -> None:
        refusal = self._refusal(event)
        if refusal and not (event.force and refusal[1]):
            self._effects.append(Answer(False, refusal[0]))
            return
        if event.dry_run:
            self._effects.append(Answer(True, f"would promote {self.name(self.me)}; {self._stakes(now)}"))
            return
        self._start_campaign(event.down, operator=True, force=event.force, now=now)

    def _refusal(self, event: PromoteRequest) -> tuple[str, bool] | None:
        """Why this node may not be promoted, and whether --force may override it."""
        me = self.name(self.me)
        if self.leading and self.role in (Role.ACTIVE, Role.RECOVERING):
            return f"{me} is primary already (epoch {epoch_name(self.leading)})", False
        if self._campaign:
            return f"{me} is taking epoch {epoch_name(self._campaign.epoch)} already", False
        for node in event.down:
            if node not in self.peers:
                return f"there is no node {node} in this group", False
            if self._answers(node):
                return f"{self.name(node)} is said to be down, but it answers: stop it first, or use switchover", False
        silent = [node for node in self.peers if node not in event.down and not self._answers(node)]
        if silent:
            names = ", ".join(self.name(node) for node in silent)
            return f"{names} does not answer: if it is down, say so with --down {names}", False
        for node, peer in self.peers.items():
            if peer.hello and (peer.hello.leading or self.primary() == node) and self._answers(node):
                return f"{self.name(node)} is primary and answers: use switchover", False
            if self._answers(node) and peer.hello and peer.hello.log.rank > self.log.state().rank and peer.hello.role is not Role.DIVERGED:
                return f"{self.name(node)} answers and has a longer log: promote {self.name(node)} instead", True
        if self.log.joining:
            return f"{me} has joined only in part: what it lacks would be lost. Wait until it has joined, or repeat with --force", True
        if not self.log.end and event.down:
            names = ", ".join(self.name(n) for n in sorted(event.down))
            return f"the log of {me} is empty: what {names} holds would be lost. Bring {names} back, or repeat with --force", True
        if event.down and not self.log.in_set:
            return (
                f"{me} was not in sync: what was confirmed without it would be lost (its log ends at {self.log.end}, epoch "
                f"{epoch_name(self.log.last_epoch)}). Bring {', '.join(self.name(n) for n in sorted(event.down))} back, or repeat with --force",
                True,
            )
        if self.lost_host and event.down:
            return f"the broker of {me} went down and it has not caught up since: what it lost is unknown. Repeat with --force to accept that", True
        if event.down and not self.settings.strict and self.last_heard_leader is None and not self._led_last:
            names = ", ".join(self.name(n) for n in sorted(event.down))
            return (
                f"{me} has heard no primary since it started: if {names} went on without it, what was confirmed since would be lost (its log "
                f"ends at {self.log.end}, epoch {epoch_name(self.log.last_epoch)}). Bring {names} back, or repeat with --force",
                True,
            )
        return None

    @property
    def _led_last(self) -> bool:
        """Whether the last epoch that this node knows of is its own."""
        return owner_of(self.log.last_epoch) == self.me and owner_of(self.log.top) == self.me

    def _answers(self, node: int) -> bool:
        return self.peers[node].connected and self.peers[node].hello is not None

    def _stakes(self, now: float) -> str:
        last = self.last_heard_leader
        if last is None:
            heard = "has heard no primary since it started"
            in_set = "was in sync as far as its own log knows" if self.log.in_set else "was NOT in sync"
        else:
            heard = f"heard its primary {now - last:.1f} s ago"
            in_set = "was in sync then" if self.log.in_set else "was NOT in sync then"
        if self.lost_host:
            in_set += "; its broker went down since, and it has not caught up"
        return f"it {heard} and {in_set}; its log ends at {self.log.end}"

    def _remove(self, event: RemoveRequest, now: float) -> None:
        if not self.leading:
            primary = self.name(self.primary()) if self.primary() else "the primary"
            self._effects.append(Answer(False, f"{self.name(self.me)} is not primary: ask {primary}"))
        elif event.node == self.me or event.node not in self.log.members:
            self._effects.append(Answer(False, f"{self.name(event.node)} is not in the set"))
        else:
            self._remove_from_set(event.node, "the operator removed it")
            self._advance_safe(now)
            self._effects.append(Answer(True, f"{self.name(event.node)} is removed from the set; do not promote it before it has rejoined"))

    def _switchover(self, event: SwitchoverRequest, now: float) -> None:
        node = event.node or min(self.log.members & {n for n, peer in self.peers.items() if peer.subscribed}, default=0)
        refusal = self._switchover_refusal(node)
        self._effects.append(Answer(not refusal, refusal or f"would hand over to {self.name(node)}", node))

    def _switchover_refusal(self, node: int) -> str:
        me = self.name(self.me)
        if self.role is not Role.ACTIVE:
            return f"{me} is not primary: ask {self.name(self.primary()) if self.primary() else 'the primary'}"
        if node == self.me:
            return f"{me} is primary already"
        if not node:
            return f"{me} has no in-sync backup to hand over to"
        if node not in self.peers:
            return f"there is no node {node} in this group"
        if node not in self.log.members or not self.peers[node].subscribed:
            return f"{self.name(node)} is not an in-sync backup: wait until it has caught up"
        silent = ", ".join(self.name(other) for other in self.peers if not self._answers(other))
        if silent:
            return f"{silent} does not answer, and {self.name(node)} cannot take an epoch without: bring it back, or take it out of the configuration"
        return ""

    def _step_down(self, event: StepDown, now: float) -> None:
        if not self.leading or self.safe < self.log.end:
            raise IllegalEvent(f"a leader whose log ends at {self.log.end} steps down at {self.safe}")
        if event.node:
            self._effects.append(Send(event.node, Handover(self.leading, self.log.end, event.clean)))
        self._effects.append(Restart(f"handed over to {self.name(event.node)}" if event.node else "stepped down", event.node))

    def _pause(self, event: PauseRequest, now: float) -> None:
        self.paused = event.paused
        self._effects += [Send(node, self._hello(wants_answer=False)) for node, peer in self.peers.items() if peer.connected]
        said = "nobody takes an epoch by itself until lrq-ha resume" if event.paused else "epochs are taken by themselves again"
        self._effects.append(Answer(True, f"{self.name(self.me)}: {said}"))

    # ---- following ---------------------------------------------------------------------------------------------------

    def _on_lead(self, node: int, message: Lead, now: float) -> None:
        if message.epoch < self.log.top or owner_of(message.epoch) != node:
            self._effects.append(Send(node, Superseded(self.log.top)))
            return
        if self._superseded_by(message.epoch, node):
            return
        if self._campaign:
            self._abort(f"{self.name(node)} leads epoch {epoch_name(message.epoch)}", now)
        self._following = False
        self._defers_to = 0
        self._handed = None
        self.leader_epoch = message.epoch
        self.last_heard_leader = now
        if self.role is not Role.DIVERGED:
            self._wait(f"following {self.name(node)}, epoch {epoch_name(message.epoch)}")
        out_end = 0 if message.in_set else max(1, message.log.end)
        self._write_fence(message.epoch, out_end, lambda now: self._fence_for_leader(node, message, now))

    def _fence_for_leader(self, node: int, lead: Lead, now: float) -> None:
        if self.leader_epoch != lead.epoch or self.log.top != lead.epoch:
            return
        mine = self.state()
        start = common_end(mine, lead.log)
        # Never cut below the applied record, or what it knows to be safe and may be applying: a leader that lacks it lost something.
        diverged = refuses_cut(mine, lead.log, node) or start < min(self.safe, mine.end)
        if diverged:
            self.tail_from = start + 1
            reason = f"entries {start + 1} to {mine.end} may have been confirmed by this node alone; {self.name(node)} lacks them"
            self._set_role(Role.DIVERGED, reason)
        else:
            if self.role is Role.DIVERGED:
                self._wait(f"following {self.name(node)}, epoch {epoch_name(lead.epoch)}")
            if lead.log.lacks(start) and (mine.end or not lead.log.base):
                self._set_role(self.role, self.how_to_join(self.me, node, mine, lead.log))
            self._following = True
            self._leader_safe = 0
            self._agreed = self._acked = start
        self._effects.append(Send(node, Following(lead.epoch, start, diverged, mine)))

    def how_to_join(self, follower: int, leader: int, follower_log: LogState, leader_log: LogState) -> str:
        """What an operator does where the leader's log lacks what a follower needs."""
        name = self.name(follower)
        lacks = f"the log of {self.name(leader)} begins at entry {leader_log.head}, its broker has dropped what was before"
        if not follower_log.end:
            return f"{lacks}: to let {name} join, run lrq-ha renew"
        then = "" if leader_log.base else ", then run lrq-ha renew"
        return f"{lacks}, and {name} has only what is up to {follower_log.end}: let it begin anew with lrq-ha reinit {name} --discard{then}"

    def _on_following(self, node: int, message: Following, now: float) -> None:
        self._learn_log(node, message.log)
        if self._superseded_by(message.log.top, node) or message.epoch != self.leading:
            return
        peer = self.peers[node]
        peer.called = False
        peer.diverged = message.diverged
        if message.diverged:
            if node in self.log.members and not self.settings.strict:
                self._leaves(node, "it has diverged")
                self._advance_safe(now)
            return
        if not peer.connected:
            return  # it is called again on the next connection
        start, mine = message.start, self.state()
        peer.fallen = mine.lacks(start)
        if peer.fallen:
            if message.log.end or not mine.base:
                return
            start = mine.base - 1
            peer.fallen = False
        peer.subscribed = True
        peer.acknowledged = start
        peer.progress_at = now
        self._effects.append(Subscribe(node, start))
        self._advance_safe(now)
        self._consider_admitting(node, now)

    def _push(self, event: Push, now: float) -> None:
        if event.batch.leader < self.log.top:
            self._effects += [Send(event.peer, Superseded(self.log.top)), RefusePush(event.peer, f"epoch {epoch_name(event.batch.leader)} is over")]
            return
        if not self._following or event.batch.leader != self.leader_epoch or owner_of(event.batch.leader) != event.peer:
            self._effects.append(RefusePush(event.peer, "this node does not follow you"))
            return
        self.last_heard_leader = now
        end_before = self.log.end
        if event.before is not None and not end_before and event.batch.first > 1:
            self.log.begin(event.batch.first, event.before)
            self._durable = self.safe = self.applied = end_before = self._agreed = self._acked = event.batch.first - 1
            self._wait(f"joining {self.name(event.peer)} from entry {event.batch.first} on")
        verdict = self.log.accept(event.batch)
        if verdict is Acceptance.GAP:
            self._following = False
            self._effects.append(RefusePush(event.peer, f"entry {event.batch.first} does not continue a log that ends at {self.log.end}"))
            return
        if verdict is Acceptance.APPEND:
            if event.batch.first <= end_before:
                if event.batch.first <= self.safe:
                    raise IllegalEvent(f"entry {event.batch.first} is safe and would be cut")
                self._durable = min(self._durable, event.batch.first - 1)
                self._effects.append(CutTail(event.batch.first))
            self._pending.append(_Written(event.batch.last))
            self._effects.append(WriteBatch(event.batch, EntryKind.ENTRIES, event.body))
        self._agreed = max(self._agreed, event.batch.last)
        self._learn_safe(event.safe)
        if verdict is Acceptance.REPEAT:
            # It is pushed again because the ack did not count: it was for a subscription that had ended.
            self._acked = min(self._acked, event.batch.last - 1)
            self._acknowledge()

    def _acknowledge(self) -> None:
        held = min(self._durable, self._agreed)
        if held > self._acked:
            self._acked = held
            self._effects.append(Ack(owner_of(self.leader_epoch), held))
        self._learn_safe(0)
        if self.role is Role.JOINING and not self.log.joining:
            self._wait(f"following {self.name(owner_of(self.leader_epoch))}, epoch {epoch_name(self.leader_epoch)}")
        if self.log.in_set:
            self.lost_host = False
            # Ready only once everything that was safe when it was admitted is here, which the admission itself guarantees.
            if self.role is Role.CATCH_UP:
                self._set_role(Role.READY, f"in-sync backup of {self.name(owner_of(self.leader_epoch))}")
        elif self.role is Role.READY:
            self._set_role(Role.CATCH_UP, "taken out of the set")

    def _learn_safe(self, leader_safe: int) -> None:
        self._leader_safe = max(self._leader_safe, leader_safe)
        # A tail that the leader has not overwritten yet is neither acknowledged nor safe, however long it is.
        safe = min(self._leader_safe, self._durable, self._agreed)
        if safe > self.safe:
            self.safe = safe
            self._effects.append(SafeAdvanced(safe))

    # ---- time --------------------------------------------------------------------------------------------------------

    def _tick(self, event: Tick, now: float) -> None:
        self._discount_own_silence(now)
        if self._campaign and now >= self._campaign.deadline:
            names = ", ".join(self.name(n) for n in sorted(self._campaign.waiting)) or "the own stream"
            self._abort(f"no promise from {names} within {self.settings.campaign_timeout_s:g} s", now)
        if self.leading and self._marker:
            self._drop_silent(now)
            self._advance_safe(now)
            for node in self.peers:
                self._consider_admitting(node, now)
            self._call_who_may_join()
        else:
            self._consider_taking(now)
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self.settings.heartbeat_s
            beat = Heartbeat(self.leading or self.leader_epoch, self.safe, self.log.end, self.applied)
            self._effects += [Send(node, beat) for node, peer in self.peers.items() if peer.connected]

    def _discount_own_silence(self, now: float) -> None:
        """Time in which this node itself stood still (a stopped process, a frozen machine) is nobody else's silence.

        It may have been promoted over meanwhile, and has not read yet what the others said. Counted as theirs, that time would take them
        out of the set at the first tick, and all that waits for them would be confirmed by a leader whose epoch is over.
        """
        stood_still = now - self._ticked_at - self.settings.heartbeat_s
        self._ticked_at = now
        if stood_still > 0:
            for peer in self.peers.values():
                peer.progress_at = min(now, peer.progress_at + stood_still)

    def _drop_silent(self, now: float) -> None:
        """Mode available: a member that makes no progress is taken out of the set, and says so (R15)."""
        if self.settings.strict:
            return
        for node in sorted(self.log.members - {self.me}):
            peer = self.peers.get(node)
            if peer is None:
                self._remove_from_set(node, "it is no longer configured")
                continue
            if peer.subscribed and peer.acknowledged >= self.log.end:
                peer.progress_at = max(peer.progress_at, peer.heard_at)
            if now - peer.progress_at > self.settings.backup_timeout_s:
                self._remove_from_set(node, f"it made no progress for {self.settings.backup_timeout_s:g} s")

    # ---- roles -------------------------------------------------------------------------------------------------------

    def _set_role(self, role: Role, reason: str) -> None:
        if role is not self.role:
            require_legal(self.role, role)
        elif reason == self.reason:
            return
        self.role, self.reason = role, reason
        self._effects.append(RoleChanged(role, reason))

    def _wait(self, reason: str) -> None:
        """Not leading and not in sync."""
        self._set_role(Role.JOINING if self.log.joining else Role.CATCH_UP, reason)

    _HANDLERS: dict[type, Callable[[Node, Any, float], None]] = {
        Opened: _opened,
        OwnConfirmed: _own_confirmed,
        PeerConnected: _peer_connected,
        PeerDisconnected: _peer_disconnected,
        PeerMessage: _peer_message,
        Push: _push,
        PeerAcked: _peer_acked,
        Append: _append,
        HeadMoved: _head_moved,
        CannotSend: _cannot_send,
        Recovered: _recovered,
        PromoteRequest: _promote,
        RemoveRequest: _remove,
        SwitchoverRequest: _switchover,
        StepDown: _step_down,
        PauseRequest: _pause,
        Tick: _tick,
    }
    _MESSAGES: dict[type, Callable[[Node, int, Any, float], None]] = {
        Hello: _on_hello,
        Prepare: _on_prepare,
        Promise: _on_promise,
        Lead: _on_lead,
        Following: _on_following,
        Heartbeat: _on_heartbeat,
        Superseded: _on_superseded,
        Handover: _on_handover,
    }


__all__ = ["Message", "Node", "NodeSettings", "RemoteBackup"]
