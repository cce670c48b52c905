"""Leads an epoch: its MARKER, the door, the calls to other nodes and the log sent to them, the safe position (R4, R12, R13, R15–R17).

Theory of operation:

- An epoch begins with MARKER. Once that is safe the driver recovers, and then the door opens.
- A new primary's door opens in the role RECOVERING. The primary becomes ACTIVE, and confirms publishes, when the expected backups are in the set,
  or their time is over (Qpid HA: a recovering primary takes clients, and delays completion until its expected backups are ready).
- A node that connects is called (Lead), answers where its log parts from this one (Following), and is sent the log from there on.
- A leader that learns of a higher epoch ends this incarnation and starts again as a follower.

Invariants: serving only while leading; ACTIVE only while serving. A stage never goes back.
"""

from __future__ import annotations

from enum import Enum

from ..errors import IllegalEvent
from .base import NodeBase
from .events import (
    Append,
    CannotSend,
    EntryKind,
    Following,
    Given,
    Handover,
    Heartbeat,
    Lead,
    OpenDoor,
    PeerAcked,
    Recover,
    Recovered,
    Restart,
    StepDown,
    Subscribe,
    Unsubscribe,
)
from .guard import QueueGuard, State
from .in_sync import InSyncSet
from .log import LogState, Members, safe_position
from .positions import epoch_name
from .roles import Role

SLOW_MARKER_S = 5.0


class Stage(Enum):
    """The stages of this node in its epoch, in order."""

    NONE = "it leads no epoch"
    MARKING = "its MARKER is not safe yet"
    RECOVERING = "the driver does what must be done before the door opens"
    SERVING = "the door is open"


class Leader:
    """The leader's side of an epoch; without one it does nothing."""

    def __init__(self, node: NodeBase) -> None:
        self.set = InSyncSet(node)
        self._given: Given = None
        self._node = node
        self._stage = Stage.NONE
        self._marker = 0
        self._base_told = 0  # the beginning of the log (R17) that the other nodes were told
        self._slow_at = 0.0  # from then on the log names the nodes that the MARKER waits for
        self._backups_by = 0.0

    @property
    def serving(self) -> bool:
        return self._stage is Stage.SERVING

    def superseded_by(self, top: int, peer: int) -> bool:
        """Whether `peer` has seen an epoch newer than this leader's, which is over then (R13)."""
        node = self._node
        if node.leading and top > node.leading:
            node.emit(Restart(f"{node.name(peer)} has seen epoch {epoch_name(top)}; mine, {epoch_name(node.leading)}, is over"))
            return True
        return False

    # ---- from MARKER to confirms (R12) -------------------------------------------------------------------------------

    def begin(self, epoch: int, members: Members, given: Given) -> None:
        """Takes an epoch that all have promised. Call `call_all` next. Args: `members`: its first set; `given`: see `Recover`."""
        node = self._node
        node.leading = epoch
        self._given = given
        self._stage = Stage.MARKING
        self._marker = node.log.end + 1
        node.append(EntryKind.MARKER, 1, ((self._marker, members),))

    def call_all(self, now: float) -> None:
        """Calls all nodes that answer."""
        self._base_told = self._node.state().base
        self._slow_at = now + SLOW_MARKER_S
        for number, peer in self._node.peers.items():
            peer.guard = QueueGuard()
            peer.begin(now)
            self.call(number)
        self.set.place_guards()
        self.advance_safe(now)

    def advance_safe(self, now: float) -> None:
        """Advances safe after a change of anything that it depends on."""
        if self.set.holds_safe(now):
            return
        node = self._node
        held = {number: peer.guard.safe_upto for number, peer in node.peers.items()}
        safe = safe_position(node.log.sets, self._marker, node.me, node.durable, held)
        node.advance_safe(safe)
        if self._stage is Stage.MARKING and safe >= self._marker:
            self._stage = Stage.RECOVERING
            node.set_role(Role.RECOVERING, self._taking())
            node.emit(Recover(node.leading, self._given))
        self._consider_confirming(now)

    def _taking(self) -> str:
        return f"taking epoch {epoch_name(self._node.leading)}"

    def _tell_who_holds_the_marker(self) -> None:
        """Names for the operator the nodes that the MARKER waits for: no client is served meanwhile."""
        node = self._node
        last_set, members = node.log.sets[-1]
        lacking = [node.name(n) for n in sorted(members - {node.me}) if n not in node.peers or node.peers[n].guard.state(last_set) is not State.SAFE]
        if node.durable < last_set:
            lacking.insert(0, "the own stream")
        node.set_role(Role.RECOVERING, f"{self._taking()}; for more than {SLOW_MARKER_S:g} s its MARKER has waited for {', '.join(lacking)}")

    def recovered(self, event: Recovered, now: float) -> None:
        if event.epoch == self._node.leading and self._stage is Stage.RECOVERING:
            self._stage = Stage.SERVING
            self._backups_by = now + self._node.settings.expected_backups_timeout_s
            self._node.emit(OpenDoor(event.epoch))
            self._consider_confirming(now)

    def _consider_confirming(self, now: float) -> None:
        """Starts to confirm, with an open door, when the expected backups have everything that is safe: those in the set do (R15)."""
        node, settings = self._node, self._node.settings
        if not self.serving or node.role is Role.ACTIVE:
            return
        there, timeout_s, primary = len(node.log.members) - 1, settings.expected_backups_timeout_s, f"primary, epoch {epoch_name(node.leading)}"
        expected = f"{there} of {settings.expected_backups} expected backups"
        if there >= settings.expected_backups:
            node.set_role(Role.ACTIVE, primary)
        elif now >= self._backups_by:
            node.set_role(Role.ACTIVE, f"{primary}; after {timeout_s:g} s it went on with {expected}")
        else:
            node.set_role(Role.RECOVERING, f"{primary}; its door is open, confirms wait: {expected} are in sync (for {timeout_s:g} s at most)")

    def append(self, event: Append, now: float) -> None:
        if not self.serving:
            raise IllegalEvent(f"an entry for the log while {self._node.role.value}")
        self._node.append(EntryKind.ENTRIES, event.count, (), event.body, event.renewal)

    def step_down(self, event: StepDown, now: float) -> None:
        node = self._node
        if not node.leading or node.safe < node.log.end:
            raise IllegalEvent(f"a leader whose log ends at {node.log.end} steps down at {node.safe}")
        if event.node:
            node.send(event.node, Handover(node.leading, node.log.end, event.given))
            if node.settings.registered:  # the others, which could take the epoch, too, leave it to that node
                for other in node.peers.keys() - {event.node}:
                    node.send(other, Handover(node.leading, node.log.end, None, event.node))
        node.emit(Restart(f"handed over to {node.name(event.node)}" if event.node else "stepped down", event.node))

    # ---- the other nodes ---------------------------------------------------------------------------------------------

    def call(self, peer: int) -> None:
        """Calls a node that answers to follow; a node that has lost its log, or its end, is out first (R16)."""
        node, remote = self._node, self._node.peers[peer]
        if remote.connected and remote.hello:
            if remote.subscribed:
                # From its FENCE to its answer it would refuse a push and end the connection, and a second call would be needed.
                self.set.unsubscribe(peer)
                node.emit(Unsubscribe(peer))
            if peer in node.log.members and (lost := self._has_lost(remote.hello.log)):
                self.set.lost(peer, lost)
            remote.called = True
            node.send(peer, Lead(node.leading, peer in node.in_sync, node.state()))

    def _has_lost(self, log: LogState) -> str:
        """Why a member with this log may lack safe entries; empty if it does not."""
        if log.lost_host:
            return "its broker went down"
        if not log.end:
            return "it was rebuilt"
        # Only strict keeps such a node in the set: it has been told that it is out, and has not yet read that it is back.
        return "it had not caught up" if self._node.settings.strict and not log.in_set else ""

    def on_following(self, peer: int, message: Following, now: float) -> None:
        node, remote = self._node, self._node.peers[peer]
        remote.learn_log(message.log)
        # No node is called in epoch 0, so an answer to it is wrong: it would make entries safe here that no node has confirmed (R4).
        if self.superseded_by(message.log.top, peer) or not node.leading or message.epoch != node.leading:
            return
        remote.called = False
        remote.diverged = message.diverged
        if message.diverged:
            if peer in node.log.members and not node.settings.strict:
                self.set.leaves(peer, "it has diverged")
                self.advance_safe(now)
            return
        if not remote.connected:
            return  # it is called again on the next connection
        start, mine = message.start, node.state()
        remote.fallen = mine.lacks(start)
        if remote.fallen:
            if message.log.end or not mine.base:
                return
            start = mine.base - 1  # R17: an empty log begins at the renewal
            remote.fallen = False
        remote.subscribed = True
        self.set.is_back(peer)
        remote.guard = QueueGuard(start)
        self.set.place_guards()
        remote.progress(now)
        node.emit(Subscribe(peer, remote.guard))
        self.advance_safe(now)
        self._consider_admitting(peer, now)

    def peer_acked(self, event: PeerAcked, now: float) -> None:
        node, remote = self._node, self._node.peers[event.peer]
        if not node.leading or not remote.subscribed:
            return
        remote.heard_at = now
        if event.upto > remote.acknowledged:
            remote.guard.acknowledge(event.upto)
            remote.progress(now)
        self.advance_safe(now)
        self._consider_admitting(event.peer, now)

    def heartbeat(self, peer: int, message: Heartbeat, now: float) -> None:
        remote = self._node.peers[peer]
        if self._node.leading == message.epoch and remote.subscribed:
            remote.receive(message.end, message.arriving, now)

    def cannot_send(self, event: CannotSend, now: float) -> None:
        remote = self._node.peers[event.peer]
        if self._node.leading and remote.subscribed:
            remote.fallen = True
            self.set.disconnect(event.peer)  # it is called again, and told

    def tick(self, now: float) -> None:
        """Time has passed while leading."""
        self.set.remove_silent(now)
        self.advance_safe(now)
        if self._stage is Stage.MARKING and now >= self._slow_at:
            self._tell_who_holds_the_marker()
        for peer in self._node.peers:
            self._consider_admitting(peer, now)
        self._call_who_may_join()

    def _consider_admitting(self, peer: int, now: float) -> None:
        if self._marker and self.set.consider_admitting(peer, now):
            self.advance_safe(now)

    def _call_who_may_join(self) -> None:
        """R17: a renewal has ended: an empty log may begin there. All nodes are told, so that none asks its operator for another."""
        base, told = self._node.state().base, self._base_told
        self._base_told = base
        for number, peer in self._node.peers.items():
            if base != told and peer.connected:
                self._node.send(number, self._node.hello(wants_answer=False))
            if peer.fallen and not peer.called and peer.hello and ((base and not peer.hello.log.end) or base != told):
                self.call(number)
