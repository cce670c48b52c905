"""One node of a group: its role, its promises, its safe position. Pure: `handle(event, now) -> effects` (R1, R2, R4, R12–R17).

Theory of operation:

- Every node keeps the index of its log (log.py), and its writes to its own stream (base.py).
- A node follows a primary (follower.py), or takes an epoch and promises epochs to others (candidate.py), or leads (leader.py, with in_sync.py
  for the set). Requests of an operator are answered in operator_requests.py.
- Where etcd coordinates, lease_candidate.py takes epochs, register_keeper.py keeps etcd's record while this node leads, and registrar.py writes it.
- This module passes each event and message to the part that handles it, and holds the shared steps: the start, connections, time.
- The tables in `__init__` map events and messages to their handlers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..errors import IllegalEvent
from .base import NodeBase
from .candidate import Candidate
from .events import (
    Append,
    BrokerLacks,
    CannotSend,
    Effect,
    Event,
    Following,
    Handover,
    HeadMoved,
    Heartbeat,
    Hello,
    Lead,
    LeaseRenewed,
    Opened,
    OwnConfirmed,
    PauseRequest,
    PeerAcked,
    PeerConnected,
    PeerDisconnected,
    PeerGone,
    PeerMessage,
    Prepare,
    Progressed,
    Promise,
    PromoteRequest,
    Push,
    Recovered,
    RegisterAnswered,
    RegisterRead,
    RemoveRequest,
    StepDown,
    Superseded,
    SwitchoverRequest,
    Tick,
)
from .follower import Follower
from .leader import Leader
from .lease_candidate import LeaseCandidate
from .log import Acceptance, BatchHeader
from .operator_requests import Requests
from .positions import owner_of
from .register_keeper import RegisterKeeper
from .registrar import Registrar
from .roles import Role
from .settings import NodeSettings

PROMOTED_OVER_S = 2.0  # a node that stood still for less was not taken for down by the others, and no other was promoted


class Node(NodeBase):
    """The pure core of one node. Feed it the own stream first (`read_batch`, `read_fence`), then events.

    Args:
        settings: Of the group.
        paused: An operator has paused automatic epochs (until a resume, or a promotion).
        defers_to: The node to which the incarnation before this one has handed over; 0: none.
        heard_before: The epoch of the primary that the incarnation before this one last heard, and when; None: it heard none. It counts if the
            own stream knows of no later leader.
    """

    def __init__(self, settings: NodeSettings, *, paused: bool = False, defers_to: int = 0, heard_before: tuple[int, float] | None = None) -> None:
        super().__init__(settings, paused=paused)
        self._heard_before = heard_before
        self._heartbeat_at = 0.0
        self._ticked_at = 0.0
        self._leader = leader = Leader(self)
        self._follower = follower = Follower(self)
        registrar = Registrar(self)
        self._candidate = candidate = Candidate(self, leader, follower, registrar, defers_to)
        self._lease_candidate = LeaseCandidate(self, registrar, candidate)
        self._keeper = keeper = RegisterKeeper(self, registrar, leader)
        requests = Requests(self, leader, candidate, registrar)
        self._events: dict[type, Callable[[Any, float], None]] = {
            Opened: self._opened,
            OwnConfirmed: self._own_confirmed,
            PeerConnected: self._peer_connected,
            PeerDisconnected: self._peer_disconnected,
            PeerGone: self._peer_gone,
            PeerMessage: self._peer_message,
            Push: follower.push,
            PeerAcked: leader.peer_acked,
            Append: leader.append,
            HeadMoved: self._head_moved,
            CannotSend: leader.cannot_send,
            Recovered: leader.recovered,
            PromoteRequest: requests.promote,
            RemoveRequest: requests.remove,
            SwitchoverRequest: requests.switchover,
            StepDown: leader.step_down,
            PauseRequest: requests.pause,
            RegisterRead: registrar.read,
            RegisterAnswered: registrar.answered,
            Progressed: keeper.progressed,
            LeaseRenewed: keeper.renewed,
            BrokerLacks: self._broker_lacks,
            Tick: self._tick,
        }
        self._messages: dict[type, Callable[[int, Any, float], None]] = {
            Hello: self._on_hello,
            Prepare: candidate.promise,
            Promise: candidate.promised,
            Lead: self._on_lead,
            Following: leader.on_following,
            Heartbeat: self._on_heartbeat,
            Superseded: self._on_superseded,
            Handover: candidate.handed_over,
        }

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
        self._events[type(event)](event, now)
        return self._effects

    # ---- queries -----------------------------------------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """Whether this node leads and its door is open."""
        return self._leader.serving

    @property
    def set_may_change(self) -> bool:
        """Whether an acknowledgement may make this leader append MEMBERS: a configured node is not in sync, or one in the set is not configured."""
        return bool(self.leading) and self.in_sync != self.settings.names.keys()

    @property
    def heard(self) -> tuple[int, float] | None:
        """For the next incarnation: the epoch of the primary that was last heard, and when. Before Opened: what this one has been told of it."""
        if self.role is Role.STANDALONE:
            return self._heard_before
        return (self.last_heard_epoch, self.last_heard_leader) if self.last_heard_leader is not None else None

    @property
    def tail_from(self) -> int:
        """First entry that this node refuses to drop, while it is diverged."""
        return self._follower.tail_from

    @property
    def leader_end(self) -> int | None:
        """Last entry of the log of the primary that this node follows, as last heard; None: it follows none."""
        return self._follower.leader_end if self.following else None

    # ---- the own broker ----------------------------------------------------------------------------------------------

    def _opened(self, event: Opened, now: float) -> None:
        if self.role is not Role.STANDALONE:
            raise IllegalEvent("Opened twice")
        # A host that went down may have lost the end of the log and kept the record: entries that are not in the log are not safe.
        self.applied = self.safe = min(event.applied, self.log.end)
        self.lost_host = event.lost_host
        if self._heard_before is not None and self._heard_before[0] == self.log.top:
            self.hear_leader(*self._heard_before)
        self._ticked_at = now
        self.durable = self.log.end
        self._candidate.opened(now)
        self.wait("waiting for the other nodes of the group")
        self._consider(now)

    def _own_confirmed(self, event: OwnConfirmed, now: float) -> None:
        self.confirm_writes(event.count, now)
        if self.leading:
            self._leader.advance_safe(now)
        elif self.following:
            self._follower.acknowledge()

    def _head_moved(self, event: HeadMoved, now: float) -> None:
        if event.first > self.head:
            self.head = event.first
            if self.leading:  # an operator may ask a backup how it would join with an empty log
                self.send_all(self.hello(wants_answer=False))

    def _broker_lacks(self, event: BrokerLacks, now: float) -> None:
        if event.text != self.lacks:
            self.lacks = event.text
            self.send_all(self.hello(wants_answer=False))

    # ---- connections and messages ------------------------------------------------------------------------------------

    def _peer_connected(self, event: PeerConnected, now: float) -> None:
        self.peers[event.peer].connect()
        self.send(event.peer, self.hello(wants_answer=True))
        self._consider(now)

    def _peer_disconnected(self, event: PeerDisconnected, now: float) -> None:
        self._leader.set.lost_link(event.peer, now)
        self.peers[event.peer].disconnect()
        self._leader.set.unsubscribe(event.peer)
        self._candidate.disconnected(event.peer)
        self._follower.disconnected(event.peer)

    def _peer_gone(self, event: PeerGone, now: float) -> None:
        self.peers[event.peer].fall_silent()

    def _peer_message(self, event: PeerMessage, now: float) -> None:
        self.peers[event.peer].heard_at = now
        self._messages[type(event.message)](event.peer, event.message, now)

    def _on_hello(self, node: int, message: Hello, now: float) -> None:
        peer = self.peers[node]
        peer.hello, peer.lacked = message, message.lacks
        peer.diverged = message.role is Role.DIVERGED
        if message.wants_answer:
            # A new connection: messages under way on the old one are lost, an answer to Lead and pushes among them.
            peer.called = False
            self._follower.connected_anew(node)
            if peer.connected:
                self.send(node, self.hello(wants_answer=False))
        if self._leader.superseded_by(message.log.top, node):
            return
        if not self.leading:
            self._consider(now)
        elif not peer.called and (not peer.subscribed or message.following != self.leading):
            self._leader.call(node)

    def _on_lead(self, node: int, message: Lead, now: float) -> None:
        if message.epoch < self.log.top or owner_of(message.epoch) != node:
            self.send(node, Superseded(self.log.top))
        elif not self._leader.superseded_by(message.epoch, node) and self.peers[node].connected:
            # Else the node could not be answered. If it is gone, this node would name it as its primary without end, and
            # the others would refuse to be promoted. The leader calls again when this node can send to it.
            self._candidate.give_way(node, message.epoch)
            if message.epoch > self.log.last_epoch:
                self.end_pause()  # no node has taken the epoch by itself
            self._follower.follow(node, message, now)

    def _on_heartbeat(self, node: int, message: Heartbeat, now: float) -> None:
        self.peers[node].applied, self.peers[node].epoch = message.applied, message.epoch
        self.peers[node].leads_at = now if message.progress else -math.inf
        if not self._leader.superseded_by(message.epoch, node):
            self._leader.heartbeat(node, message, now)
            self._follower.heartbeat(node, message, now)

    def _on_superseded(self, node: int, message: Superseded, now: float) -> None:
        self.peers[node].learn_top(message.top)
        self._candidate.superseded(node, message.top)
        self._leader.superseded_by(message.top, node)

    # ---- time --------------------------------------------------------------------------------------------------------

    def _tick(self, event: Tick, now: float) -> None:
        self._discount_own_silence(now)
        self._candidate.tick(now)
        if self.leading:
            self._leader.tick(now)
            self._keeper.tick(now)
        else:
            self._consider(now)
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self.settings.heartbeat_s
            epoch = self.leading or self.leader_epoch or self.heard_epoch(now)
            self.send_all(Heartbeat(epoch, self.safe, self.log.end, self.applied, event.arriving, self._keeper.makes_progress(now)))

    def _consider(self, now: float) -> None:
        """Takes an epoch, if this node has a right to it."""
        (self._lease_candidate if self.settings.registered else self._candidate).consider(now)

    def _discount_own_silence(self, now: float) -> None:
        """Time in which this node itself stood still (a stopped process, a frozen machine) does not count as silence of the others.

        Another node may have been promoted meanwhile, and its messages are not read yet. If that time counted, the first tick would remove
        the others from the set, and a leader whose epoch is over would confirm everything that waits for them. So after such a time
        the others have all of backup_timeout_s again.
        """
        stood_still = now - self._ticked_at - self.settings.heartbeat_s
        self._ticked_at = now
        if stood_still > 0:
            for peer in self.peers.values():
                peer.progress_at = now if stood_still >= PROMOTED_OVER_S else min(now, peer.progress_at + stood_still)


__all__ = ["Node"]
