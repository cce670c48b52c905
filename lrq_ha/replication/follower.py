"""Follows a primary: answers its call, takes its pushes by R2, acknowledges what the own stream has (R2, R5, R13, R14, R17).

Rules:

- FENCE first: the answer to Lead goes out when the own stream has the promise, and says where this log parts from the leader's.
- A node does not drop a tail that it may have confirmed alone: it is diverged, and an operator chooses (R14).
- A node acknowledges only entries known to be in both the own stream and the leader's log, and only these can be safe.
"""

from __future__ import annotations

from ..errors import IllegalEvent
from .base import NodeBase
from .events import Ack, EntryKind, Following, Heartbeat, Lead, Push, RefusePush, Superseded
from .log import Acceptance, common_end, refuses_cut
from .positions import epoch_name, owner_of
from .roles import Role


class Follower:
    """The follower's side of an epoch. 0 <= acked <= agreed <= log.end while following, except for entries that are pushed again."""

    def __init__(self, node: NodeBase) -> None:
        self.tail_from = 0
        """First entry that this node refuses to drop, while it is diverged."""
        self.leader_end = 0
        """Last entry of the primary's log, as this node last heard of it."""
        self._node = node
        self._leader_safe = 0
        self._agreed = 0  # up to here this log equals the leader's
        self._acked = 0

    def follows(self, peer: int, epoch: int) -> bool:
        """Whether `peer` is the primary that this node follows, in that epoch."""
        return self._node.following and epoch == self._node.leader_epoch and peer == owner_of(epoch)

    # ---- beginning and ending ----------------------------------------------------------------------------------------

    def follow(self, peer: int, lead: Lead, now: float) -> None:
        """Promises the epoch of a primary that calls, then answers."""
        node = self._node
        node.following = False
        node.leader_epoch = lead.epoch
        if node.role is not Role.DIVERGED:
            node.wait(self._following(peer, lead.epoch))
        out_end = 0 if lead.in_set else max(1, lead.log.end)
        node.write_fence(lead.epoch, out_end, lambda now: self._fenced(peer, lead, now))

    def _fenced(self, peer: int, lead: Lead, now: float) -> None:
        node = self._node
        if node.leader_epoch != lead.epoch or node.log.top != lead.epoch:
            return
        node.hear_leader(lead.epoch, now)  # not before the own stream says whether this node is in the set
        mine = node.state()
        start = common_end(mine, lead.log)
        # Never cut below the applied record, or below a known safe entry, which may be in application: a leader that lacks it lost it.
        diverged = refuses_cut(mine, lead.log, peer) or start < min(node.safe, mine.end)
        if diverged:
            self.tail_from = start + 1
            reason = f"entries {start + 1} to {mine.end} may have been confirmed by this node alone; {node.name(peer)} lacks them"
            node.set_role(Role.DIVERGED, reason)
        else:
            if node.role is Role.DIVERGED:
                node.wait(self._following(peer, lead.epoch))
            if lead.log.lacks(start) and (mine.end or not lead.log.base):
                node.set_role(node.role, node.how_to_join(node.me, peer, mine, lead.log))
            node.following = True
            self._leader_safe = 0
            self.leader_end = lead.log.end
            self._agreed = self._acked = start
        node.send(peer, Following(lead.epoch, start, diverged, mine))

    def stop(self) -> None:
        """Follows no node, and knows of no primary. The others hear the state of this log: only the primary knew how it grew."""
        node = self._node
        had_leader, node.leader_epoch, node.following = node.leader_epoch > 0, 0, False
        if had_leader:
            node.send_all(node.hello(wants_answer=False))

    def connected_anew(self, peer: int) -> None:
        """Pushes that were on their way from `peer` on the connection before are lost."""
        if self._is_of(peer):
            self._node.following = False

    def disconnected(self, peer: int) -> None:
        """The connection to `peer` is lost."""
        node = self._node
        if self._is_of(peer):
            self.stop()
            if node.role in (Role.READY, Role.CATCH_UP, Role.JOINING):
                # An in-sync backup stays ready to be promoted when it no longer hears its primary.
                node.set_role(node.role, f"the connection to the primary {node.name(peer)} is lost")

    def _is_of(self, peer: int) -> bool:
        return self._node.leader_epoch > 0 and owner_of(self._node.leader_epoch) == peer

    def _following(self, peer: int, epoch: int) -> str:
        return f"following {self._node.name(peer)}, epoch {epoch_name(epoch)}"

    # ---- what the primary sends --------------------------------------------------------------------------------------

    def heartbeat(self, peer: int, message: Heartbeat, now: float) -> None:
        if self.follows(peer, message.epoch):
            self._node.hear_leader(message.epoch, now)
            self.leader_end = message.end
            self._learn_safe(message.safe)

    def push(self, event: Push, now: float) -> None:
        node, batch = self._node, event.batch
        if batch.leader < node.log.top:
            node.send(event.peer, Superseded(node.log.top))
            node.emit(RefusePush(event.peer, f"epoch {epoch_name(batch.leader)} is over"))
            return
        if not self.follows(event.peer, batch.leader):
            node.emit(RefusePush(event.peer, "this node does not follow you"))
            return
        node.hear_leader(batch.leader, now)
        if event.before is not None and not node.log.end and batch.first > 1:
            node.begin_log(batch.first, event.before)
            self._agreed = self._acked = batch.first - 1
            node.wait(f"joining {node.name(event.peer)} from entry {batch.first} on")
        end_before = node.log.end
        verdict = node.log.accept(batch)
        if verdict is Acceptance.GAP:
            node.following = False
            node.emit(RefusePush(event.peer, f"entry {batch.first} does not continue a log that ends at {node.log.end}"))
            return
        if verdict is Acceptance.APPEND:
            if batch.first <= end_before:
                if batch.first <= node.safe:
                    raise IllegalEvent(f"entry {batch.first} is safe and would be cut")
                node.cut_tail(batch.first)
            node.write_batch(batch, EntryKind.ENTRIES, event.body)
        self._agreed = max(self._agreed, batch.last)
        self.leader_end = max(self.leader_end, batch.last)
        self._learn_safe(event.safe)
        if verdict is Acceptance.REPEAT:
            # It is pushed again because the ack did not count: it was for a subscription that had ended.
            self._acked = min(self._acked, batch.last - 1)
            self.acknowledge()

    # ---- what this node has ------------------------------------------------------------------------------------------

    def acknowledge(self) -> None:
        """Tells the primary how far the own stream has come, as far as the logs agree; says whether this node is in sync."""
        node, leader = self._node, owner_of(self._node.leader_epoch)
        held = min(node.durable, self._agreed)
        if held > self._acked:
            self._acked = held
            node.emit(Ack(leader, held))
        self._learn_safe(0)
        if node.role is Role.JOINING and not node.log.joining:
            node.wait(self._following(leader, node.leader_epoch))
        if node.log.in_set:
            node.lost_host = False
            # Ready only once every entry that was safe at the admission is here; the admission itself guarantees it.
            if node.role is Role.CATCH_UP:
                node.set_role(Role.READY, f"in-sync backup of {node.name(leader)}")
        elif node.role is Role.READY:
            node.set_role(Role.CATCH_UP, "taken out of the set")

    def _learn_safe(self, leader_safe: int) -> None:
        self._leader_safe = max(self._leader_safe, leader_safe)
        # A tail that the leader has not overwritten yet is neither acknowledged nor safe, however long it is.
        self._node.advance_safe(min(self._leader_safe, self._node.durable, self._agreed))
