"""Takes an epoch when the leader's lease in etcd is gone, without an operator and without promises (E1, E6, E7, E9).

Theory of operation:

- A member of the record's set takes the epoch by one change of the register, which compares that the record is as it was read, and that the key
  `leader` is absent. It has all that was confirmed (E2, E3), whatever clocks, leases and networks do.
- A leader that is heard, and whose own stream makes progress, is left alone even if its lease is gone: etcd may have revoked a lease that lives.
- Candidates wait by rank, so that they seldom meet; the change decides.
- Where no member of the record can lead, or there is no record yet, all configured nodes must promise, and the longest log leads, as with static
  coordination. The record seals that epoch, too.
- A group whose logs are all empty does not begin over a record: that may be of another group with this name.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import HEARD_HEARTBEATS, NodeBase
from .candidate import Candidate
from .events import Hello
from .log import Members
from .register import OF_ANOTHER_GROUP, Record, RegisterView, Why, went_back
from .registrar import Registrar
from .roles import Role

#: A candidate waits so many seconds for each node that has a better right to the epoch.
RANK_WAIT_S = 0.3


def cannot_lead(hello: Hello) -> bool:
    """Whether the node of this Hello may lack what was confirmed, as far as it knows, or cannot bring its queues up."""
    log = hello.log
    return log.lost_host or log.joining or not log.in_set or hello.role is Role.DIVERGED or bool(hello.lacks)


def rank(me: int, hellos: Mapping[int, Hello]) -> int:
    """E7: number of candidates with a better right to the epoch than `me`. `hellos`: of the members that answer, and of this node."""

    def right(node: int) -> tuple[int, tuple[int, int], int]:
        return hellos[node].priority, hellos[node].log.rank, -node

    return sum(hello.priority > 0 and not cannot_lead(hello) and right(node) > right(me) for node, hello in hellos.items() if node != me)


class LeaseCandidate:
    """Takes epochs for this node where etcd coordinates."""

    def __init__(self, node: NodeBase, registrar: Registrar, candidate: Candidate) -> None:
        self._node = node
        self._registrar = registrar
        self._candidate = candidate
        self._since: float | None = None  # nothing has been in the way

    def consider(self, now: float) -> None:
        """Takes the epoch if this node has the right to it, and has waited for those with a better one."""
        node, view = self._node, self._node.register
        if node.leading or self._candidate.epoch or self._registrar.busy:
            return
        if view is None or node.register_away:
            self._since = None
            self._say("etcd has not answered: no epoch can be taken")
            return
        record = view.record
        obstacle = self._obstacle(view, now)
        if obstacle is None and (record is None or all(map(self._cannot_lead, record.members))):
            self._candidate.consider(now)
            if all(peer.answers for peer in node.peers.values()):
                return
        if obstacle is None and record is not None:
            obstacle = self._own_obstacle(record)
        if obstacle is not None or record is None:
            self._since = None
            self._say(obstacle or "")
            return
        self._since = now if self._since is None else self._since
        if now >= self._since + RANK_WAIT_S * rank(node.me, self._hellos(record)):
            self._take(record)

    def _take(self, record: Record) -> None:
        epoch, members = self._candidate.next_epoch(), self._first_set(record)
        why = Why.SWITCHOVER if self._candidate.handed else Why.RESTART if record.leader == self._node.me else Why.LEASE
        self._registrar.change(epoch, members, lambda done, now: self._candidate.given(epoch, members, now) if done else None, take=True, why=why)

    def _first_set(self, record: Record) -> Members:
        """This node and the members that answer, without the leader before; in mode strict all members."""
        if self._node.settings.strict:
            return record.members
        able = {node for node, hello in self._hellos(record).items() if not cannot_lead(hello)}
        return frozenset(able - {record.leader} | {self._node.me})

    def _obstacle(self, view: RegisterView, now: float) -> str | None:
        """Why no epoch is taken by any rule: text for the operator, or "" if another node leads or takes it. None: nothing is in the way."""
        node = self._node
        if text := went_back(view, node.log, node.record_known):
            return text
        if view.record and node.knows_nothing_of(view.record):
            return OF_ANOTHER_GROUP
        if view.holder not in (0, node.me):
            return f"{node.name(view.holder)} has the lease in etcd"
        if node.group_paused:
            return "paused: no node takes an epoch by itself until lrq-ha resume, or lrq-ha promote NODE"
        if not node.settings.priority:
            return f"{node.name(node.me)} takes no epoch by itself: its priority is 0"
        if view.record and self._hears_leader(view.record, now):
            return ""
        return "" if self._candidate.defers(now) else None

    def _hears_leader(self, record: Record, now: float) -> bool:
        """E6: the leader of the record is heard, and its own stream makes progress."""
        peer = self._node.peers.get(record.leader)
        if peer is None or peer.epoch != record.epoch:
            return False
        return now - peer.leads_at <= HEARD_HEARTBEATS * self._node.settings.heartbeat_s

    def _own_obstacle(self, record: Record) -> str | None:
        """Why this node does not take the epoch, as text for the operator; None: nothing is in the way."""
        node, me = self._node, self._node.name(self._node.me)
        if node.me not in record.members:
            return f"{me} is not in the set in etcd ({node.names(sorted(record.members))}), so it may lack what was confirmed without it"
        if node.lost_host:
            return f"the broker of {me} went down and it has not caught up since: it takes no epoch by itself"
        if node.lacks:
            return f"{me} takes no epoch by itself: {node.lacks}"
        if node.log.joining or not node.log.in_set or node.role is Role.DIVERGED:
            return f"{me} is not in the set as far as its own log says: it takes no epoch by itself"
        return None

    def _hellos(self, record: Record) -> dict[int, Hello]:
        """The Hellos of the members that answer, and this node's own."""
        node = self._node
        heard = {number: peer.hello for number, peer in node.peers.items() if number in record.members and peer.answers and peer.hello}
        return heard | {node.me: node.hello(wants_answer=False)}

    def _cannot_lead(self, member: int) -> bool:
        """Whether a member cannot lead. One that does not answer may have lost its host; then all must answer, and this is asked again."""
        node = self._node
        hello = node.hello(wants_answer=False) if member == node.me else node.peers[member].hello if member in node.peers else None
        return hello is None or cannot_lead(hello)

    def _say(self, reason: str) -> None:
        """Sets the reason of a node that follows no leader."""
        node = self._node
        if reason and not node.leader_epoch and node.role in (Role.CATCH_UP, Role.READY, Role.JOINING):
            node.set_role(node.role, reason)


__all__ = ["LeaseCandidate"]
