"""The in-sync set of the epoch that this node leads: additions, removals, and the newcomer that safe waits for (R13, R15, R16).

Rules:

- Completion waits for the guards of the members, and of the newcomer: `place_guards` puts the rule into force after every change.
- One change at a time: the set is changed by appending MEMBERS, and the next newcomer waits until the last change is safe.
- An addition is appended only when the newcomer's guard says that it is ready: then it has everything that is safe.
- A removed node is disconnected: the leader calls it again, and tells it that it is out.
- Mode available: a node that leaves and returns repeatedly is out until it has stayed for a while, as all confirms wait for it each time.
- A node that has lost its log, or its end, is out until it has everything that is safe (R16). In mode strict it is told that it is out and stays in
  the set: nothing is safe without it, whichever node leads; the set that is appended when it is back has equal members.
- Where etcd coordinates, a node that is to leave stays in the set, and is told that it is out, until etcd has a record without it (E2); a newcomer
  is in etcd's record last (E3). register_keeper.py writes both.
"""

from __future__ import annotations

from .base import NodeBase
from .events import Disconnect, EntryKind
from .guard import QueueGuard
from .log import Members

# After a newcomer was waited for in vain, the next attempt comes after this many times admit_timeout_s.
ADMIT_PAUSE_TIMES = 10
# A flapping node is observed, and must stay before it comes in again, for this many times backup_timeout_s.
STEADY_TIMES = 6
STEADY_MAX_S = 60.0


class InSyncSet:
    """The set's changes, made by a leader; at most one newcomer is waited for at a time."""

    def __init__(self, node: NodeBase) -> None:
        self._node = node
        self.leaving: set[int] = set()
        """Members that leave the set when etcd has a record without them."""
        self._admitting: tuple[int, float] | None = None  # newcomer, and the time until which safe waits for it

    # ---- coming in ---------------------------------------------------------------------------------------------------

    def consider_admitting(self, newcomer: int, now: float) -> bool:
        """Whether safe is held from now on until `newcomer` has reached it.

        Under load a newcomer's acknowledgement is always a little behind. So safe stays in its place for a moment (no publish is
        confirmed meanwhile) until the newcomer has reached it.
        """
        node, peer = self._node, self._node.peers[newcomer]
        if newcomer in node.in_sync or not peer.subscribed or not self.is_settled() or self._admitting or now < peer.admit_after:
            return False
        if peer.unsteady:
            if now - peer.losses[-1] < self._steady_s:
                return False
            peer.unsteady = False
            peer.losses.clear()
        if newcomer in node.log.members:
            if peer.acknowledged < node.safe:
                return False  # its membership in the set holds safe
        elif node.log.end - peer.acknowledged > node.settings.admit_lag_entries_max:
            return False
        self._admitting = (newcomer, now + node.settings.admit_timeout_s)
        self.place_guards()
        return True

    def holds_safe(self, now: float) -> bool:
        """Whether safe must stay in its place; first admits the newcomer that has reached it, or gives the newcomer up."""
        if self._admitting:
            self._admit(*self._admitting, now)
        return self._admitting is not None

    def is_settled(self) -> bool:
        """Whether the last change of the set is safe."""
        return bool(self._node.log.sets) and self._node.log.sets[-1][0] <= self._node.safe

    def _admit(self, newcomer: int, deadline: float, now: float) -> None:
        node, peer = self._node, self._node.peers[newcomer]
        if peer.guard.is_ready():
            self._admitting = None
            peer.left = ""
            self.leaving.discard(newcomer)
            peer.begin(now)
            self._change(node.log.members | {newcomer})
        elif now >= deadline:
            # A stalled node must not delay all confirms over and over: it may try again when it has had time to catch up.
            self._admitting = None
            peer.admit_after = now + ADMIT_PAUSE_TIMES * node.settings.admit_timeout_s
            self.place_guards()

    def place_guards(self) -> None:
        """Guards the members, and the newcomer, from the first entry on that is not safe; releases the other nodes."""
        node, newcomer = self._node, self._admitting and self._admitting[0]
        for number, peer in node.peers.items():
            if number in node.log.members or number == newcomer:
                peer.guard.place(node.safe + 1)
            else:
                peer.guard.release()

    # ---- going out ---------------------------------------------------------------------------------------------------

    def leaves(self, member: int, reason: str) -> None:
        """Takes a member out of the set; `reason`: text for the operator."""
        if member in self._node.peers:
            self._node.peers[member].left = reason
        self.leaving.add(member)
        if not self._node.settings.registered:
            self.gone(member)

    def gone(self, member: int) -> None:
        """A member that leaves is out of the set now."""
        self.leaving.discard(member)
        self._change(self._node.log.members - {member})

    def lost(self, member: int, reason: str) -> None:
        """R16: a member has lost its log, or its end."""
        settings = self._node.settings
        if settings.strict or settings.registered:  # it stays for now, without what it had acknowledged
            peer = self._node.peers[member]
            peer.left, peer.guard = reason, QueueGuard()
            self.place_guards()
        if not settings.strict:
            self.leaves(member, reason)

    def remove(self, member: int, reason: str) -> None:
        """Takes a member out of the set, and informs it."""
        self.leaves(member, reason)
        if member in self._node.peers:
            # The connection is opened again and the node told that it is out: its FENCE records it (R13).
            self.disconnect(member)

    def remove_silent(self, now: float) -> None:
        """Mode available: takes a member without progress out of the set, and says so (R15)."""
        node, settings = self._node, self._node.settings
        if settings.strict:
            return
        for member in sorted(node.log.members - self.leaving - {node.me}):
            peer = node.peers.get(member)
            if peer is None:
                self.remove(member, "it is no longer configured")
                continue
            if peer.subscribed and peer.acknowledged >= node.log.end:
                peer.progress_at = max(peer.progress_at, peer.heard_at)
            if now - peer.progress_at > settings.backup_timeout_s:
                self.remove(member, f"it made no progress for {settings.backup_timeout_s:g} s")

    def lost_link(self, member: int, now: float) -> None:
        """The link to a node is lost: remembered until the node is back."""
        node, peer = self._node, self._node.peers[member]
        if node.leading and peer.subscribed and not node.settings.strict:
            peer.losses.append(now)
            peer.unsteady = peer.unsteady or peer.flaps(now - self._steady_s)

    def is_back(self, member: int) -> None:
        """A node follows again. Mode available: a flapping node is taken out of the set now, when it has said that no other node leads."""
        node, peer = self._node, self._node.peers[member]
        if peer.unsteady and member in node.log.members:
            self.leaves(member, f"it was lost {len(peer.losses)} times in {self._steady_s:g} s, and has to stay for as long")

    @property
    def _steady_s(self) -> float:
        return min(STEADY_TIMES * self._node.settings.backup_timeout_s, STEADY_MAX_S)

    def keeps_up(self, member: int, now: float) -> bool:
        """Whether a member would be admitted again right after a removal: it lives, and has everything or acks more and more."""
        peer, timeout_s = self._node.peers.get(member), self._node.settings.backup_timeout_s
        if peer is None or peer.left or not peer.subscribed or now - peer.heard_at > timeout_s:
            return False
        return peer.acknowledged >= self._node.log.end or now - peer.acked_at <= timeout_s

    def unsubscribe(self, peer: int) -> None:
        """The node's acknowledgements count for nothing until it is subscribed again; safe does not wait for it any longer."""
        self._node.peers[peer].subscribed = False
        if self._admitting and self._admitting[0] == peer:
            self._admitting = None
            self.place_guards()

    def disconnect(self, peer: int) -> None:
        """Closes the connection to a node: the leader calls it again when the connection is open again."""
        self.unsubscribe(peer)
        self._node.emit(Disconnect(peer))

    def _change(self, members: Members) -> None:
        self._node.append(EntryKind.MEMBERS, 1, ((self._node.log.end + 1, members),))
        self.place_guards()
