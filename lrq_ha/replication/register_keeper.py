"""Keeps the register in etcd true while this node leads: members that leave and come, the leader's key, a record that went back (E2, E3, E5, E6, E8).

Rules:

- A member is out of the set in etcd before the MEMBERS without it is appended: no node that may take the next epoch lacks what is confirmed then.
- A newcomer is in the set in etcd after the MEMBERS with it is safe.
- One change of the set at a time: the change, its answer and the MEMBERS together.
- Whether the group is paused is for any node to write into the record, as operators ask any; a leader takes it over.
- A leader that has lost its lease takes it again only while its own stream makes progress (E4).
- A record that went back is written again only if no member can have taken a later epoch: each is heard in this one since (E8).
- A leader whose epoch was taken without etcd writes the record as soon as etcd answers.
- While etcd does not answer, this node goes on leading, and no member can be taken out: a silent one holds confirms.
- When its lease is over, and a member has been silent for as long, another node may have been promoted: then no client is served until either ends.
"""

from __future__ import annotations

from dataclasses import replace

from .base import NodeBase
from .events import LeaseRenewed, Progressed, Restart
from .leader import Leader
from .log import Members
from .positions import epoch_name
from .register import Record, RegisterView, Why
from .registrar import Registrar


class RegisterKeeper:
    """The register's part of leading."""

    def __init__(self, node: NodeBase, registrar: Registrar, leader: Leader) -> None:
        self._node = node
        self._registrar = registrar
        self._leader = leader
        self._progressed_at = 0.0
        self._lease_until = 0.0
        self._differs_since: float | None = None  # when etcd was first seen without the record that this node wrote

    def progressed(self, event: Progressed, now: float) -> None:
        """The own stream has confirmed something new."""
        self._progressed_at = now

    def renewed(self, event: LeaseRenewed, now: float) -> None:
        """etcd has renewed the lease."""
        self._lease_until = event.until

    def makes_progress(self, now: float) -> bool:
        """Whether this leader's own stream has confirmed something within the lease's time."""
        node = self._node
        return bool(node.leading) and now - self._progressed_at <= node.settings.lease_ttl_s

    def tick(self, now: float) -> None:
        """Time has passed while leading."""
        node, view = self._node, self._node.register
        if not node.leading or view is None:
            return
        self._consider_serving(now)
        record = view.record
        if record and record.epoch > node.leading:
            node.emit(Restart(f"etcd has {node.name(record.leader)} as leader of epoch {epoch_name(record.epoch)}; mine is over"))
        elif not self._registrar.busy and not view.foreign:
            self._adopt_pause(record)
            if node.own_record:
                self._keep(view, node.own_record, now)
            elif self._leader.set.is_settled():
                self._change(node.in_sync, take=True, why=Why.OPERATOR)

    def _adopt_pause(self, record: Record | None) -> None:
        """Counts a record that only an operator's pause tells from the last one as written by this node."""
        written = self._node.own_record
        if record and written and record.version > written.version and replace(written, version=record.version, paused=record.paused) == record:
            self._node.written = record

    def _keep(self, view: RegisterView, written: Record, now: float) -> None:
        """Makes the one change that is due."""
        node, members = self._node, self._node.log.members
        if view.record == written:
            self._differs_since = None
        elif self._differs_since is None:
            self._differs_since = now
        if view.record != written or view.holder != node.me:
            if self.makes_progress(now) and self._is_followed(written):  # E4: else another node is to lead
                self._change(written.members, take=True)  # E5, E8: the record went back, or the key is gone: both are written again
            return
        for member in sorted(self._leader.set.leaving & members):
            if member in written.members:
                self._change(written.members - {member}, gone=member)
                return
            self._leader.set.gone(member)
        coming = node.in_sync - self._leader.set.leaving - written.members
        if coming and self._leader.set.is_settled():
            self._change(written.members | coming)

    def _is_followed(self, written: Record) -> bool:
        """Whether etcd has the record, or each member of it is heard in this epoch since etcd has not."""
        node, since = self._node, self._differs_since
        peers = [node.peers[member] for member in written.members - {node.me} if member in node.peers]
        return since is None or all(peer.heard_at > since and peer.epoch == node.leading for peer in peers)

    def _change(self, members: Members, *, gone: int = 0, take: bool = False, why: Why | None = None) -> None:
        epoch = self._node.leading

        def then(done: bool, now: float) -> None:
            if done and gone in self._leader.set.leaving and self._node.leading == epoch:
                self._leader.set.gone(gone)
                self._leader.advance_safe(now)

        self._registrar.change(epoch, members, then, take=take, why=why)

    def _consider_serving(self, now: float) -> None:
        """E5 and E6."""
        node, ttl_s = self._node, self._node.settings.lease_ttl_s
        members = (node.own_record.members if node.own_record else frozenset[int]()) - {node.me}
        silent = [m for m in sorted(members) if m not in node.peers or now - node.peers[m].heard_at > ttl_s or node.peers[m].epoch != node.leading]
        node.cut_off = ""
        if silent and now > self._lease_until:
            node.cut_off = f"etcd has not renewed the lease of {node.name(node.me)}, and {node.names(silent)} is silent: another node may lead now"


__all__ = ["RegisterKeeper"]
