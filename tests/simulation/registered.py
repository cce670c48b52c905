"""A simulated group that etcd coordinates, and random lives of it without an operator.

    python tests/simulation/registered.py SEED [SEED …]      replays seeds, with every step printed

Rules: a change lands at any moment after it was asked for, once for each copy that was sent, or never; its answer may be lost, then another copy
is sent. A lease ends before its time now and then. A node that etcd does not answer is told so. Copies outlive their senders.

Checked beside the promises of a cluster: a primary whose broker stands still is replaced (E4), two doors are open at once only for a while (E5), no
door is closed and no epoch taken without need (E6), who has a better right comes first (E7), a primary's record is in etcd (E8), and an operator who
would go on without etcd is refused while it answers (E10).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from chaos import Chaos
from cluster import HEARD_S, Cluster, Host, Violation, read_index

from lrq_ha.errors import IllegalEvent
from lrq_ha.replication.events import (
    Answer,
    ChangeRegister,
    Event,
    Heartbeat,
    LeaseRenewed,
    PeerDisconnected,
    PeerGone,
    PeerMessage,
    Progressed,
    RegisterAnswered,
    RegisterRead,
)
from lrq_ha.replication.lease_candidate import RANK_WAIT_S, cannot_lead
from lrq_ha.replication.node import Node
from lrq_ha.replication.register import Record, RegisterView, Why
from lrq_ha.replication.roles import Role
from lrq_ha.replication.settings import NodeSettings

TTL_S = 1.0
PATIENCE = 4  # times chaos.OPERATOR_PATIENCE_S
DOORS_S = 2 * TTL_S  # two doors are open at once for no longer: a lease, and a heartbeat that came as late
REPLACED_S = 5.0  # by then another node serves
STATIC_S = 3.0  # from then on etcd coordinates a group that began without
WRITTEN_S = 3.0  # by then a primary has written its record again
MENDED_S = DOORS_S + 0.5  # what has been replaced is mended so much later


def replaces(seed: int) -> bool:
    """In one life of ten a primary has to be replaced now and then, while all else is well."""
    return seed % 10 == 4


def restores(seed: int) -> bool:
    """In one life of ten etcd is emptied, or restored from an older snapshot."""
    return seed % 10 == 5


def tries_without_etcd(seed: int) -> bool:
    """In one life of ten an operator would promote a node without etcd, which answers."""
    return seed % 10 == 6


def prefers(seed: int) -> bool:
    """In one life of ten one node has a higher priority."""
    return seed % 10 == 7


def begins_static(seed: int) -> bool:
    """In one life of ten the group has static coordination for a while. Then all sidecars are started again, with etcd, which has no record."""
    return seed % 10 == 9


class Beat(NamedTuple):
    """The last heartbeat of one node at another, over connections that have stood since."""

    at: float
    epoch: int
    progress: bool


class RegisteredCluster(Cluster):
    """A cluster with a register.

    Attributes:
        prompt: A change lands, and is answered, at the next tick of the node that asked; else when the caller says so.
        away: Nodes that etcd does not answer.
        whys: The right to each epoch that etcd has had.
        compares: A change compares the register with what was seen; off: the rule E1.
        proves: A driver renews the lease, and tells of progress, only if its broker has confirmed what was written; off: the rule E4.
        coordinated: etcd coordinates the group; else its coordination is static.
        standing: Nodes whose broker stands still: it confirms nothing.
        beats: By sender and receiver.
        past: What the register has held.
    """

    prompt = True
    compares = True
    proves = True

    def __init__(self, size: int, **options: object) -> None:
        super().__init__(size, **options)  # type: ignore[arg-type]
        self.record: Record | None = None
        self.revision = self.record_revision = self.holder = self.holder_revision = 0
        self.lease_until = 0.0
        self.away: set[int] = set()
        self.asked: dict[int, ChangeRegister] = {}
        self.flying: list[tuple[int, ChangeRegister]] = []
        self.priorities: dict[int, int] = {}
        self.whys: list[Why | None] = []
        self.coordinated = True
        self.standing: set[int] = set()
        self.beats: dict[tuple[int, int], Beat] = {}
        self.past: list[Record | None] = [None]
        self.both_since: float | None = None  # two doors are open
        self.behind_since: float | None = None  # the record is not the primary's
        self.free_since = 0.0  # no node has the lease

    def settings(self, node: int) -> NodeSettings:
        return replace(super().settings(node), lease_ttl_s=TTL_S if self.coordinated else 0.0, priority=self.priorities.get(node, 100))

    def view(self) -> RegisterView:
        return RegisterView(self.record, self.record_revision, self.holder, self.holder_revision)

    # ---- the node's driver -------------------------------------------------------------------------------------------

    def tick(self, i: int) -> None:
        super().tick(i)
        host = self.hosts[i]
        if not self.coordinated:
            return
        self._check_needless(host)
        if self.holder and self.now >= self.lease_until:
            self.end_lease()
        if host.node is None or host.ended:
            return
        if host.node.leading and self._proved(host):
            self._feed(host, Progressed())
        if i in self.away:
            self._feed(host, RegisterRead(None))
        elif i not in self.asked:
            if host.node.leading and self.holder == i and (self._proved(host) or not self.proves):
                self._renew(host)
            self._feed(host, RegisterRead(self.view()))
        elif self.prompt:
            self.flying.append((i, self.asked[i]))
            self.land(len(self.flying) - 1, answered=True)

    def confirm(self, i: int, count: int = 1) -> None:
        if i not in self.standing:
            super().confirm(i, count)

    def _proved(self, host: Host) -> bool:
        """E4: its broker has confirmed what was written."""
        return not host.pending and host.id not in self.standing

    def _feed(self, host: Host, event: Event) -> None:
        if isinstance(event, PeerMessage) and isinstance(event.message, Heartbeat):
            self.beats[event.peer, host.id] = Beat(self.now, event.message.epoch, event.message.progress)
        elif isinstance(event, PeerGone | PeerDisconnected):
            self.beats.pop((event.peer, host.id), None)
        super()._feed(host, event)

    def hears(self, host: Host, other: int) -> Beat | None:
        """What a node has heard of another a moment ago, if it can send to it, too."""
        beat, there = self.beats.get((other, host.id)), self.conns.get((host.id, other))
        return beat if beat and there and not there.broken and self.now - beat.at < HEARD_S else None

    def _renew(self, host: Host) -> None:
        self.lease_until = self.now + TTL_S
        self._feed(host, LeaseRenewed(self.clock(host) + TTL_S))

    def _change_register(self, host: Host, node: Node, effect: ChangeRegister) -> None:
        self.say(f"n{host.id} asks for {effect.record}{' and the lease' if effect.take else ''}")
        if effect.why is Why.LEASE:
            self._check_right(host, effect)
        self.asked[host.id] = effect

    def crash(self, i: int, landed: int = 0, **more: bool) -> None:  # type: ignore[override]
        if i in self.asked and not self.prompt:
            self.flying.append((i, self.asked[i]))
        self.asked.pop(i, None)
        super().crash(i, landed, **more)
        for key in [key for key in self.beats if key[1] == i]:
            del self.beats[key]

    # ---- etcd --------------------------------------------------------------------------------------------------------

    def end_lease(self) -> None:
        self.say(f"the lease of n{self.holder} ends")
        self.holder = self.holder_revision = 0
        self.free_since = self.now

    def restorable(self) -> list[Record | None]:
        """What the register may go back to: each member of it is to know of a newer one by its own stream, else E8 promises nothing."""
        logs = {i: read_index(i, host.stream) for i, host in self.hosts.items()}

        def older(record: Record | None, i: int) -> bool:
            return logs[i].record > record.version or logs[i].last_epoch > record.epoch if record else logs[i].record > 0

        return [record for record in self.past if all(older(record, i) for i in (record.members if record else self.hosts))]

    def restore(self, record: Record | None) -> None:
        """etcd is restored from a snapshot, or emptied: leases are gone."""
        self.say(f"etcd goes back to {record}")
        self.revision += 1
        self.record, self.record_revision = record, self.revision if record else 0
        self.end_lease()

    def land(self, which: int, *, answered: bool) -> None:
        """A copy of a change reaches etcd."""
        i, change = self.flying.pop(which)
        unchanged = not self.compares or self.record_revision == change.seen.revision
        if change.take:
            unchanged = unchanged and self.holder_revision == change.seen.holder_revision
        if unchanged:
            self.revision += 1
            if self.record is None or self.record.epoch != change.record.epoch:
                self.whys.append(change.why)
            self.record, self.record_revision = change.record, self.revision
            self.past.append(self.record)
            if change.take:
                self.holder, self.holder_revision, self.lease_until = i, self.revision, self.now + TTL_S
            self.say(f"etcd has {change.record}")
        host = self.hosts[i]
        if answered and self.asked.get(i) is change and i not in self.away:
            del self.asked[i]
            done = self.record == change.record
            if done and change.take:
                self._feed(host, LeaseRenewed(self.clock(host) + TTL_S))
            self._feed(host, RegisterAnswered(done, self.view()))

    # ---- promises ----------------------------------------------------------------------------------------------------

    def promote(self, i: int, down: Iterable[int] = (), *, without_register: bool = False, **more: bool) -> Answer | None:
        answers = i not in self.away and self.node(i).register is not None and not self.node(i).register_away
        answer = super().promote(i, down, without_register=without_register, **more)
        if without_register and answers and (answer is None or answer.ok):
            raise Violation(f"E10: n{i} is promoted without etcd, which answers it")
        return answer

    def check_record(self) -> None:
        """E8: a primary's record is in etcd, if etcd answers it."""
        primary = self.primary()
        node = primary.node if primary and primary.id not in self.away | self.standing else None
        behind = node is not None and node.own_record is not None and self.record != node.own_record and self._is_followed(node)
        self.behind_since = (self.now if self.behind_since is None else self.behind_since) if behind else None
        if self.behind_since is not None and node and self.now - self.behind_since > WRITTEN_S:
            raise Violation(f"E8: for {WRITTEN_S:g} s etcd has had {self.record}, and the primary n{node.me} has written {node.own_record}")

    def _is_followed(self, node: Node) -> bool:
        """Whether all members of the record that a primary wrote are up and hear it."""
        members = node.own_record.members - {node.me} if node.own_record else frozenset()
        hosts = [self.hosts[member] for member in members]
        return all(host.up and host.node and not host.ended and host.node.primary() == node.me for host in hosts)

    def check_doors(self) -> None:
        """E5: a primary that may have been replaced serves no clients."""
        doors = [h for h in self.running() if h.node and h.node.serving and not h.node.cut_off and not h.ended and self.coordinated]
        self.both_since = (self.now if self.both_since is None else self.both_since) if len(doors) > 1 else None
        if self.both_since is not None and self.now - self.both_since > DOORS_S:
            raise Violation(f"E5: the doors of {', '.join(f'n{h.id}' for h in doors)} have been open at once for {DOORS_S:g} s")

    def _check_needless(self, host: Host) -> None:
        """E6: a primary that every member follows, and is heard by it, serves its clients."""
        node = host.node
        if node is None or not node.cut_off or host.ended or not node.own_record:
            return
        beats = [self.hears(host, member) for member in node.own_record.members - {host.id}]
        if all(beat and beat.epoch == node.leading for beat in beats):
            raise Violation(f"E6: n{host.id} turns its clients away, and hears each member of its set: {node.cut_off}")

    def _check_right(self, host: Host, effect: ChangeRegister) -> None:
        """E6: a leader that is heard, and makes progress, is not replaced. E7: who has a better right comes first."""
        before, node = effect.seen.record, host.node
        if before and node and self.now - self.free_since < 0.9 * RANK_WAIT_S:
            self._check_rank(node, before)
        beat = self.hears(host, before.leader) if before else None
        if before and beat and beat.progress and beat.epoch == before.epoch:
            raise Violation(f"E6: n{host.id} takes an epoch, and hears that n{before.leader} leads and makes progress")

    def _check_rank(self, node: Node, before: Record) -> None:
        """E7, when the lease is free for less time than a candidate waits for another."""
        mine = node.settings.priority, node.state().rank
        for member in before.members - {node.me, before.leader}:
            hello = node.peers[member].hello if node.peers[member].answers else None
            if hello and not cannot_lead(hello) and hello.priority and (hello.priority, hello.log.rank) > mine:
                raise Violation(f"E7: n{node.me} takes an epoch at once, though n{member} has a better right to it")

    _EFFECTS = {**Cluster._EFFECTS, ChangeRegister: _change_register}


class RegisteredChaos(Chaos):
    """A life without an operator."""

    def __init__(self, seed: int, **options: object) -> None:
        super().__init__(seed, **{"cluster_class": RegisteredCluster, **options, "restart_alone": False})
        self.restart_alone, self.erring = False, None
        self.register.prompt = False
        self.etcd = random.Random(-2 - seed)
        self.waits = 0
        self.replaces = replaces(seed) and not self.strict  # a strict set confirms nothing without each member
        self.lame = 0  # a primary that has to be replaced, and since when
        self.lame_since = 0.0
        self.replaced_at: float | None = None
        self.restores = restores(seed) and not self.host_losses  # a lost host may have lost what it knew of the record
        self.restored = False
        self.register.coordinated = not begins_static(seed)
        self.tries_without_etcd = tries_without_etcd(seed)
        if prefers(seed):
            self.register.priorities = {self.etcd.choice(sorted(self.register.hosts)): 200}

    @property
    def register(self) -> RegisteredCluster:
        assert isinstance(self.cluster, RegisteredCluster)
        return self.cluster

    def run(self) -> None:
        self.register.prompt = True  # until the group has begun
        super().run()

    def step(self) -> None:
        super().step()
        c, r = self.register, self.etcd
        c.prompt = False
        c.check_doors()
        c.check_record()
        if not c.coordinated and c.now > STATIC_S:
            self.begin_coordination()
        if not self.faults:
            self.mend()
        elif self.lame:
            self.await_another()
        elif self.replaces and r.random() < 0.01:
            self.strike()
        elif self.restores and r.random() < 0.003:
            self.restore()
        elif self.tries_without_etcd and r.random() < 0.01:
            self.try_without_etcd()
        elif r.random() < 0.01:
            c.away ^= {r.choice(sorted(c.hosts))}
        elif c.holder and r.random() < 0.01:
            c.end_lease()

    def choices(self) -> list[Callable[[], object]]:
        c, r = self.register, self.etcd
        found = super().choices()
        for i in sorted(c.asked):
            if i not in c.away and r.random() < 0.5:
                found.append(lambda i=i: c.flying.append((i, c.asked[i])))
        if c.flying:
            which = r.randrange(len(c.flying))
            found += [lambda: c.land(which, answered=r.random() < 0.7)] * 2
        return found

    def fault(self) -> None:
        if not self.lame:
            super().fault()

    def begin_coordination(self) -> None:
        """E9: all sidecars are started again, some later than others."""
        c = self.register
        for i, host in c.hosts.items():
            if host.up:
                c.crash(i, len(host.pending))
        c.coordinated = True
        for i in c.hosts:
            if self.etcd.random() < 0.5:
                c.start(i)

    def strike(self) -> None:
        """The broker of the primary stands still, or it is cut off from all. All else is mended. Only where another node is ready to lead."""
        c, primary = self.register, self.register.primary()
        if primary is None or primary.node is None or c.record is None or c.record != primary.node.own_record or c.asked or c.flying:
            return
        others = [c.hosts[member] for member in c.record.members - {primary.id}]
        if not others or not all(h.node and h.node.role is Role.READY and not h.node.lost_host and not h.ended for h in others):
            return
        self.mend()
        self.lame, self.lame_since, self.replaced_at = primary.id, c.now, None
        if self.etcd.random() < 0.5:
            c.say(f"the broker of n{primary.id} stands still")
            c.standing = {primary.id}
        else:
            c.away = {primary.id}
            for other in c.hosts.keys() - {primary.id}:
                c.cut(primary.id, other)

    def await_another(self) -> None:
        """E4: another node serves soon. Then the first one is mended, a while later."""
        c, primary = self.register, self.register.primary()
        if self.replaced_at is not None:
            if c.now - self.replaced_at > MENDED_S:
                self.mend()
        elif primary and primary.id != self.lame:
            self.replaced_at = c.now
        elif c.record and c.record.members == {self.lame}:
            self.mend()  # the others have left its set meanwhile: none of them may lead
        elif c.now - self.lame_since > REPLACED_S:
            raise Violation(f"E4: n{self.lame} has not been replaced for {REPLACED_S:g} s: {self.describe_all()}")

    def restore(self) -> None:
        """etcd goes back to a time in which some nodes were members that are not now; sometimes the primary goes down then."""
        c, r = self.register, self.etcd
        if c.record is None:
            return
        found = [record for record in c.restorable() if record is None or record.members - c.record.members]
        if not found:
            return
        self.mend()
        if r.random() < 0.5:
            for i, host in c.hosts.items():
                if i != c.record.leader and not host.up:
                    c.start(i)
            if c.hosts[c.record.leader].up:
                c.crash(c.record.leader)
        c.restore(r.choice(found))
        self.restored = True

    def try_without_etcd(self) -> None:
        """E10: an operator would promote a node over those that are down."""
        c = self.register
        asked = [h for h in c.running() if not h.ended and h.id not in c.away and h.node and not h.node.register_away]
        if asked:
            c.promote(self.etcd.choice(asked).id, [i for i, h in c.hosts.items() if not h.up], without_register=True)

    def mend(self) -> None:
        c = self.register
        self.lame = 0
        c.away.clear()
        if c.standing or c.cuts:
            c.standing = set()
            c.heal()

    def at_rest(self) -> bool:
        return self.register.behind_since is None and super().at_rest()

    def operate(self) -> None:
        """Nobody is there but for a switchover."""
        primary = self.cluster.primary()
        if primary and not primary.ended and self.random.random() < 0.4:
            self.cluster.switchover(primary.id, self.random.choice((0, *sorted(self.cluster.hosts))))

    def operator_chooses(self) -> None:
        self.waits += 1  # a handover that was lost is taken back after handover_timeout_s
        chooses = self.host_losses or self.restored  # no node leads by itself then
        if not chooses and self.waits > PATIENCE:
            raise Violation(f"nobody leads, and no operator is there: {self.describe_all()}")
        if chooses:
            super().operator_chooses()


def run(seed: int, **options: object) -> None:
    """One life; an exception tells its seed and its last steps."""
    chaos = RegisteredChaos(seed, **options)
    try:
        chaos.run()
    except (Violation, IllegalEvent, RuntimeError, LookupError, ValueError) as error:
        tail = "\n".join(list(chaos.cluster.log)[-40:])
        raise Violation(f"seed {seed}: {type(error).__name__}: {error}\n{tail}\nreplay: python tests/simulation/registered.py {seed}") from error


if __name__ == "__main__":
    for given in sys.argv[1:]:
        run(int(given), trace=True)
