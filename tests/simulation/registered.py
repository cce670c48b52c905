"""A simulated group that etcd coordinates, and random lives of it without an operator.

    python tests/simulation/registered.py SEED [SEED …]      replays seeds, with every step printed

Rules: a change lands at any moment after it was asked for, once for each copy that was sent, or never; its answer may be lost, then another copy
is sent. A lease ends before its time now and then. A node that etcd does not answer is told so. Copies outlive their senders.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace

from chaos import Chaos
from cluster import Cluster, Host, Violation

from lrq_ha.replication.events import ChangeRegister, LeaseRenewed, Progressed, RegisterAnswered, RegisterRead
from lrq_ha.replication.node import Node
from lrq_ha.replication.register import Record, RegisterView, Why
from lrq_ha.replication.settings import NodeSettings

TTL_S = 1.0
PATIENCE = 4  # times chaos.OPERATOR_PATIENCE_S


class RegisteredCluster(Cluster):
    """A cluster with a register.

    Attributes:
        prompt: A change lands, and is answered, at the next tick of the node that asked; else when the caller says so.
        away: Nodes that etcd does not answer.
        whys: The right to each epoch that etcd has had.
        compares: A change compares the register with what was seen; off: the rule E1.
    """

    prompt = True
    compares = True

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

    def settings(self, node: int) -> NodeSettings:
        return replace(super().settings(node), lease_ttl_s=TTL_S, priority=self.priorities.get(node, 100))

    def view(self) -> RegisterView:
        return RegisterView(self.record, self.record_revision, self.holder, self.holder_revision)

    # ---- the node's driver -------------------------------------------------------------------------------------------

    def tick(self, i: int) -> None:
        super().tick(i)
        host = self.hosts[i]
        if self.holder and self.now >= self.lease_until:
            self.end_lease()
        if host.node is None or host.ended:
            return
        if host.node.leading and not host.pending:
            self._feed(host, Progressed())
        if i in self.away:
            self._feed(host, RegisterRead(None))
        elif i not in self.asked:
            if host.node.leading and self.holder == i and not host.pending:
                self._renew(host)
            self._feed(host, RegisterRead(self.view()))
        elif self.prompt:
            self.flying.append((i, self.asked[i]))
            self.land(len(self.flying) - 1, answered=True)

    def _renew(self, host: Host) -> None:
        self.lease_until = self.now + TTL_S
        self._feed(host, LeaseRenewed(self.clock(host) + TTL_S))

    def _change_register(self, host: Host, node: Node, effect: ChangeRegister) -> None:
        self.say(f"n{host.id} asks for {effect.record}{' and the lease' if effect.take else ''}")
        self.asked[host.id] = effect

    def crash(self, i: int, landed: int = 0, **more: bool) -> None:  # type: ignore[override]
        if i in self.asked and not self.prompt:
            self.flying.append((i, self.asked[i]))
        self.asked.pop(i, None)
        super().crash(i, landed, **more)

    # ---- etcd --------------------------------------------------------------------------------------------------------

    def end_lease(self) -> None:
        self.say(f"the lease of n{self.holder} ends")
        self.holder = self.holder_revision = 0

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

    _EFFECTS = {**Cluster._EFFECTS, ChangeRegister: _change_register}


class RegisteredChaos(Chaos):
    """A life without an operator."""

    def __init__(self, seed: int, **options: object) -> None:
        super().__init__(seed, **{"cluster_class": RegisteredCluster, **options, "restart_alone": False})
        self.restart_alone, self.erring = False, None
        self.register.prompt = False
        self.etcd = random.Random(-2 - seed)
        self.waits = 0

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
        if not self.faults:
            c.away.clear()
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

    def operate(self) -> None:
        """Nobody is there but for a switchover."""
        primary = self.cluster.primary()
        if primary and not primary.ended and self.random.random() < 0.4:
            self.cluster.switchover(primary.id, self.random.choice((0, *sorted(self.cluster.hosts))))

    def operator_chooses(self) -> None:
        self.waits += 1  # a handover that was lost is taken back after handover_timeout_s
        if not self.host_losses and self.waits > PATIENCE:
            raise Violation(f"nobody leads, and no operator is there: {self.describe_all()}")
        if self.host_losses:
            super().operator_chooses()


def run(seed: int, **options: object) -> RegisteredChaos:
    """Raises Violation, IllegalEvent or what else breaks."""
    chaos = RegisteredChaos(seed, **options)
    try:
        chaos.run()
    except Exception as error:
        tail = "\n".join(chaos.cluster.log)
        raise type(error)(f"{error}\nseed {seed}; the last steps:\n{tail}") from error
    return chaos


if __name__ == "__main__":
    for given in sys.argv[1:]:
        run(int(given), trace=True)
