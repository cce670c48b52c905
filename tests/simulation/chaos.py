"""Random lives of a group, from a seed: a phase of faults, then everything is healed and the group must come to rest in one log.

    python tests/simulation/chaos.py SEED [SEED …]      replays seeds, with every step printed
    LRQ_SEEDS=5000 pytest tests/simulation              more seeds
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

from cluster import Cluster, Entry, Host, Violation, owner_of, read_index

from lrq_ha.errors import IllegalEvent
from lrq_ha.replication.log import common_end
from lrq_ha.replication.node import Node
from lrq_ha.replication.roles import Role
from lrq_ha.replication.subscription import BATCH_BYTES

STEPS = 1_500
UNSAFE_MAX = 30
STEP_S = 0.004
TICK_S = 0.05
CHECKED_EVERY = 10  # steps; what clients are told, given or lose is checked when that happens
CONVERGE_S = 60.0
OPERATOR_PATIENCE_S = 4.0


def expected_backups(seed: int, size: int) -> int:
    """In one life of ten; no other is another one for it."""
    return 1 + seed // 10 % (size - 1) if seed % 10 == 8 else 0


def restarts_alone(seed: int) -> bool:
    """In one life of twenty; no other is another one for it."""
    return seed % 20 == 15


def cut_for_good(seed: int) -> bool:
    """In one life of twenty, of two connections between two nodes one is lost until the faults end; no other is another one for it."""
    return seed % 20 == 14


def nodes(seed: int, r: random.Random) -> int:
    """How many a life has: four in one of twenty; no other is another one for it."""
    size = r.choice((2, 2, 3))
    return 4 if seed % 20 == 13 else size


def repeats(seed: int) -> random.Random | None:
    """Decides which pushes arrive twice: some, in one life of twenty; no other is another one for it."""
    return random.Random(-1 - seed) if seed % 20 == 16 else None


class Chaos:
    """One life. All choices come from the seed.

    Args:
        seed: Decides everything.
        cluster_options: Passed on to Cluster, for rules switched off; `cluster_class`: another one.
    """

    def __init__(self, seed: int, **cluster_options: object) -> None:
        self.random = r = random.Random(seed)
        size = nodes(seed, r)
        self.strict = r.random() < 0.2
        self.host_losses = r.random() < 0.15
        self.trims = seed % 7 in (1, 5, 6)  # the logs are small: brokers drop their beginning
        self.trimming = random.Random(-seed)  # lives without that are what they were before there was such a thing
        self.erring = random.Random(-1 - seed) if cut_for_good(seed) else None
        memory = r.choice((2 * BATCH_BYTES, 10 * BATCH_BYTES, 1 << 20))
        self.restart_alone = restarts_alone(seed)
        options = {"expected_backups": expected_backups(seed, size), "restart_alone": self.restart_alone, **cluster_options}
        make: type[Cluster] = options.pop("cluster_class", Cluster)  # type: ignore[assignment]
        self.cluster = make(size, strict=self.strict, memory_bytes_max=memory, **options)  # type: ignore[arg-type]
        self.cluster.repeating = repeats(seed)
        self.fault_rate = r.choice((0.004, 0.01, 0.02, 0.04))
        self.slow = {i: r.choice((1, 1, 1, 0.15)) for i in self.cluster.hosts}  # how readily a node's stream confirms
        self.ticks = dict.fromkeys(self.cluster.hosts, 0.0)
        self.load = 0.12
        self.faults = True

    def run(self) -> None:
        """Raises Violation, IllegalEvent or what else breaks."""
        c = self.cluster
        for i in c.hosts:
            c.start(i)
        if self.random.random() < 0.8:
            c.settle(1.5)
        for step in range(STEPS):
            self.step()
            if step % CHECKED_EVERY == 0:
                self.check()
        self.check()
        self.converge()

    def check(self) -> None:
        for host in self.cluster.hosts.values():
            self.cluster.check_memory(host)
            self.cluster.check_word(host)

    # ---- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        c, r = self.cluster, self.random
        c.now += STEP_S
        for host in c.running():
            if c.now >= self.ticks[host.id]:
                self.ticks[host.id] = c.now + TICK_S * r.uniform(0.8, 1.2)
                c.tick(host.id)
        c.cannot_send()
        if self.trims:
            self.shorten()
        for i, host in c.hosts.items():
            if host.ended and r.random() < 0.3:
                c.end_incarnation(i, r.randint(0, len(host.pending)))
        if self.faults and r.random() < self.fault_rate:
            self.fault()
        if self.faults and self.erring:
            self.err(self.erring)
        for _ in range(r.choice((1, 2, 4))):
            choices = self.choices()
            if choices:
                r.choice(choices)()
        for primary in c.running():
            node = primary.node
            if node and node.serving and not primary.ended and node.log.end - node.safe < UNSAFE_MAX and r.random() < self.load:
                c.append(primary.id, r.choice((1, 1, 3)))

    def shorten(self) -> None:
        """Brokers drop segments; the primary renews its log when somebody cannot follow, and sometimes without need."""
        c, r = self.cluster, self.trimming
        if r.random() < 0.01:
            running: list[Host | None] = [*sorted(c.running(), key=lambda h: h.id)] or [None]
            host = r.choice(running)
            if host and not host.ended:
                c.trim(host.id, r.randint(0, host.applied))
        primary = c.primary()
        if primary is None or primary.node is None:
            return
        if primary.node.log.unfinished:
            if r.random() < 0.05:
                c.renew(primary.id, begin=False, given_up=r.random() < 0.2)
        elif r.random() < (0.02 if any(peer.fallen for peer in primary.node.peers.values()) else 0.001):
            c.renew(primary.id, begin=True)

    def choices(self) -> list[Callable[[], object]]:
        c, r = self.cluster, self.random
        found: list[Callable[[], object]] = []
        for i, host in c.hosts.items():
            found += [
                lambda i=i, j=j: c.deliver(i, j)
                for (src, j), conn in c.conns.items()
                if src == i and not host.up and conn.queue and not conn.broken and c.hosts[j].up and not c.hosts[j].ended
            ]
            if host.late and r.random() < 0.3:
                found.append(lambda i=i: c.late_write(i))
            if host.node is None or host.ended:
                continue
            if host.pending and r.random() < self.slow[i]:
                found += [lambda i=i: c.confirm(i, r.randint(1, 3))] * 2
            if host.recovering:
                found.append(lambda i=i: c.recovered(i))
            if host.node.safe > host.applied:
                found.append(lambda i=i, h=host: c.apply(i, r.randint(h.applied, h.node.safe), record=r.random() < 0.5))
            for j in c.hosts:
                if i == j:
                    continue
                conn = c.conns.get((i, j))
                if conn is None:
                    if c.can_connect(i, j) and r.random() < 0.3:
                        found.append(lambda i=i, j=j: c.connect(i, j))
                elif conn.broken:
                    if r.random() < 0.3:
                        found.append(lambda i=i, j=j: c.notice(i, j))
                elif not conn.stalled:
                    if conn.queue and not c.hosts[j].ended:
                        found += [lambda i=i, j=j: c.deliver(i, j)] * 3
                    if conn.acks:
                        found.append(lambda i=i, j=j: c.deliver_ack(i, j))
        return found

    # ---- faults ------------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        c, r = self.cluster, self.random
        i, j = r.sample(sorted(c.hosts), 2)
        host = c.hosts[i]
        what = r.random()
        if what < 0.3:
            if host.up:
                lose = self.host_losses and r.random() < 0.4 and all(h.up and not h.lost_host for h in c.hosts.values())
                c.crash(i, r.randint(0, len(host.pending)), lost_records=r.randint(1, 4) if lose else 0, sent_arrives=r.random() < 0.5)
            else:
                c.start(i)
        elif what < 0.45:
            down = next((h for h in c.hosts.values() if not h.up), None)
            if down:
                c.start(down.id)
        elif what < 0.6:
            c.cut(i, j, both=r.random() < 0.5)
        elif what < 0.7:
            conn = c.conns.get((i, j))
            if conn:
                conn.stalled = True
                c.say(f"n{i} -> n{j} stalls")
        elif what < 0.85:
            c.heal()
        else:
            self.operate()

    def err(self, r: random.Random) -> None:
        """One connection is lost until the faults end; and an operator takes a node for down that another hears, or reaches."""
        c = self.cluster
        if not c.cut_for_good:
            if r.random() < 0.005:
                i, j = r.sample(sorted(c.hosts), 2)
                c.cut_for_good.add((i, j))
                c.cut(i, j, both=False)
        elif r.random() < 0.05:
            i, j = r.sample(sorted(*c.cut_for_good), 2)
            if c.hosts[i].up and not c.hosts[i].ended and c.hosts[j].up and c.in_touch(i, j):
                c.promote(i, {j}, force=r.random() < 0.5)

    def operate(self) -> None:
        """An operator who gives only true words."""
        c, r = self.cluster, self.random
        running: list[Host | None] = [*sorted(c.running(), key=lambda h: h.id)] or [None]
        host = r.choice(running)
        if host is None or host.ended:
            return
        if r.random() < 0.15 and c.strict and c.primary():
            c.remove(c.primary().id, r.choice(sorted(c.hosts)))  # type: ignore[union-attr]
            return
        primary = c.primary()
        if r.random() < 0.4 and primary and not primary.ended:
            c.switchover(primary.id, r.choice((0, *sorted(c.hosts))))
            return
        # With restart_alone his word means "and stays down until it has reached the new primary", for which these nodes do not wait: he gives none.
        down = [] if self.restart_alone else [h.id for h in c.hosts.values() if not h.up]
        answer = c.promote(host.id, down)
        if answer and not answer.ok and r.random() < 0.3 and not self.strict:
            c.promote(host.id, down, force=True)

    # ---- heal and converge -------------------------------------------------------------------------------------------

    def converge(self) -> None:
        c = self.cluster
        self.faults = False
        self.load = 0.03
        self.slow = dict.fromkeys(c.hosts, 1.0)
        c.say("---- faults end")
        c.cut_for_good.clear()
        c.heal()
        for i, host in c.hosts.items():
            if not host.up:
                c.start(i)
        end = c.now + CONVERGE_S
        led_at = c.now
        while c.now < end:
            self.step()
            if c.primary():
                led_at = c.now
                if self.at_rest():
                    return
            elif c.now - led_at > OPERATOR_PATIENCE_S and not any(h.node and h.node.leading for h in c.running()):
                led_at = c.now
                self.operator_chooses()
            self.reinit()
        raise Violation(f"no rest after the faults: {self.describe_all()}")

    def at_rest(self) -> bool:
        """One log everywhere, all in the set, all confirmed, and it goes on working."""
        c = self.cluster
        primary = c.primary()
        if primary is None or any(h.ended for h in c.hosts.values()):
            return False
        for host in c.hosts.values():
            if host.node is None or host.node.role is not (Role.ACTIVE if host is primary else Role.READY):
                return False
        if primary.node is None or primary.node.log.members != c.hosts.keys():
            return False
        message = c.append(primary.id)
        c.settle(0.5)
        self.check()
        logs = [h.entries for h in c.hosts.values()]
        if message not in c.confirmed or any(log != logs[0] for log in logs):
            raise Violation(f"m{message} is not confirmed, or logs differ, although all are in the set: {self.describe_all()}")
        return True

    def operator_chooses(self) -> None:
        """Nobody takes an epoch by itself: the operator promotes the longest log, with force if that is refused."""
        c = self.cluster
        best = max((h for h in c.running() if h.node and not h.ended), key=lambda h: h.node.state().rank if h.node else (0, 0), default=None)
        if best is None:
            return
        answer = c.promote(best.id)
        if answer and not answer.ok:
            c.promote(best.id, force=True)

    def reinit(self) -> None:
        """A diverged node is a legal end if R14 says so, as is one that has fallen off the log; the operator discards it, and it must join again."""
        c = self.cluster
        leaders = [h for h in c.running() if h.node and h.node.leading and not h.ended]
        primary = max(leaders, key=lambda h: h.node.leading if h.node else 0, default=None)
        if primary is None or primary.node is None:
            return
        for host in c.running():
            if host.node and f"lrq-ha remove n{host.id}" in host.node.reason and not host.node.log.end:
                if host.id in primary.node.log.members:
                    c.remove(primary.id, host.id)
            elif host.node and "--discard" in host.node.reason and primary.node.head > host.node.log.end + 1:
                c.crash(host.id)
                c.discard(host.id)
                c.start(host.id)
            elif host.node and host.node.role is Role.DIVERGED and host.node.leader_epoch == primary.node.leading:
                if not self.may_diverge(host, primary):
                    raise Violation(f"n{host.id} is diverged from n{primary.id} without reason: {self.describe(host)}; {self.describe(primary)}")
                c.crash(host.id)
                c.discard(host.id)
                c.start(host.id)

    @staticmethod
    def may_diverge(host: Host, primary: Host) -> bool:
        """R14, on the logs themselves."""
        if host.node is None or primary.node is None:
            return False
        common = common_end(host.node.state(), primary.node.state())
        if host.node.safe > common or host.applied > common:
            return True
        log = [Entry(0, 0), *primary.entries]
        markers = [e for before, e in zip(log[common:], log[common + 1 :]) if e.epoch != before.epoch]
        taker = owner_of(markers[0].epoch) if markers else primary.id
        sets = read_index(host.id, [*host.stream, *host.pending]).sets
        return any(taker not in m for s, m in sets if s > common) or any(taker not in m for _, m in [x for x in sets if x[0] <= common][-1:])

    def describe_all(self) -> str:
        return "; ".join(self.describe(host) for host in self.cluster.hosts.values())

    @staticmethod
    def describe(host: Host) -> str:
        node = host.node
        if node is None:
            return f"n{host.id} down"
        positions = f"end {node.log.end} safe {node.safe} durable {node.durable}"
        return f"n{host.id} {node.role.value} ({node.reason}) top {node.log.top} members {sorted(node.log.members)} {positions}"


def run(seed: int, **options: object) -> None:
    """One life; an exception tells its seed and its last steps."""
    chaos = Chaos(seed, **options)
    try:
        chaos.run()
    except (Violation, IllegalEvent, RuntimeError, LookupError, ValueError) as error:
        tail = "\n".join(list(chaos.cluster.log)[-40:])
        raise Violation(f"seed {seed}: {type(error).__name__}: {error}\n{tail}\nreplay: python tests/simulation/chaos.py {seed}") from error


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        run(int(argument), trace=True)

__all__ = ["Chaos", "Node", "run"]
