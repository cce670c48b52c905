"""Random lives of a whole group, from a seed: brokers, sidecars and clients under faults, then everything is healed and must become equal.

    python tests/simulation/life.py SEED [SEED …]      replays seeds, with every step printed
    LRQ_SEEDS=10000 pytest tests/simulation            more seeds
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

from chaos import CHECKED_EVERY, Chaos, cut_for_good, expected_backups, nodes, repeats, restarts_alone
from clients import Client
from cluster import Host, Violation
from coding import VHOST
from pyroaring import BitMap64
from sidecar import Site
from world import At, World

from lrq_ha.errors import IllegalEvent
from lrq_ha.replication.deduplication import Dedup
from lrq_ha.replication.queue_filter import Verdict
from lrq_ha.replication.roles import Role
from lrq_ha.replication.subscription import BATCH_BYTES

STEPS = 400
PRELUDE_STEPS_MAX = 200
STEP_S = 0.012
TICK_S = 0.05
TURNS = 8  # things that may happen in one step, per node
UNSAFE_MAX = 30
CONVERGE_S = 60.0
QUIET_S = 0.6

Target = tuple[str, str]
FEATURES: dict[str, tuple[list[tuple[Any, ...]], tuple[Target, ...], tuple[str, ...]]] = {
    # declarations; where publishers send; what consumers read
    "plain": ([("declare", "a")], (("", "a"),), ("a", "a")),
    "fan-out": (
        [("declare", "a"), ("declare", "b"), ("exchange", "fan"), ("bind", "fan", "a"), ("bind", "fan", "b")],
        (("fan", "any"), ("", "a")),
        ("a", "b"),
    ),
    "retry": ([("declare", "w", 0, "r"), ("declare", "r", 0.2, "w")], (("", "w"),), ("w", "w")),
    "expiry": ([("declare", "d"), ("declare", "t", 0.3, "d")], (("", "t"),), ("t", "d")),
    "meeting": (
        [("declare", "d"), ("declare", "u", 0, "d"), ("declare", "v", 0.4, "d"), ("exchange", "both"), ("bind", "both", "u"), ("bind", "both", "v")],
        (("both", "any"),),
        ("u", "v", "d"),
    ),
    "drop-head": ([("declare", "d"), ("declare", "h", 0, "d", 3)], (("", "h"),), ("h", "d")),
    "reject-publish": ([("declare", "l", 0, "", 4, True), ("declare", "a")], (("", "l"), ("", "a")), ("l",)),
}


def settles_in_transactions(seed: int) -> bool:
    """In four lives of twenty, a consumer publishes, too; no other is another one for it."""
    return seed % 20 in (13, 14, 16, 17)


class Life(Chaos):
    """One life. All choices come from the seed.

    Args:
        seed: Decides everything.
        options: Passed on to World, for rules switched off.
    """

    def __init__(self, seed: int, **options: Any) -> None:
        self.seed = seed
        self.random = r = random.Random(seed)
        self.erring = random.Random(-1 - seed) if cut_for_good(seed) else None
        self.strict = r.random() < 0.15
        self.host_losses = r.random() < 0.25
        size = nodes(seed, r)
        make = options.pop("world_class", World)
        self.restart_alone = restarts_alone(seed)
        options = {"expected_backups": expected_backups(seed, size), "restart_alone": self.restart_alone, **options}
        self.world: World = make(size, strict=self.strict, memory_bytes_max=r.choice((400 + 5 * BATCH_BYTES, 1 << 20)), **options)
        self.cluster = self.world
        self.world.repeating = repeats(seed)
        for site in self.world.sites.values():
            site.skew, site.offset = r.choice((1.0, 0.8, 1.25)), r.choice((0.0, 1_000.0))
        self.fault_rate = r.choice((0.004, 0.01, 0.02, 0.05))
        self.slow = {i: r.choice((1, 1, 1, 0.2)) for i in self.world.hosts}
        self.lateness = r.choice((0.05, 0.3, 1.0))  # how readily a follower applies
        self.ticks = dict.fromkeys(self.world.hosts, 0.0)
        self.load = r.choice((0.2, 0.4, 0.6))
        self.faults = True
        self.quiet_at: float | None = None
        self._populate(r.sample(sorted(FEATURES), r.choice((1, 1, 2, 3))))
        self.actions = self._actions()

    def _populate(self, features: list[str]) -> None:
        r, world = self.random, self.world
        self.declarations: list[tuple[Any, ...]] = []
        targets: list[Target] = []
        queues: list[str] = []
        for feature in features:
            declared, to, read = FEATURES[feature]
            self.declarations += [d for d in declared if d not in self.declarations]
            targets += to
            queues += read
        self.may_park = "reject-publish" in features
        if self.seed % 10 == 1:  # no other life is another one for it
            world.local_queues.update(key for exchange, key in targets if not exchange)
        self.queues = sorted({d[1] for d in self.declarations if d[0] == "declare"})
        self.clients = [Client(world, f"p{i}", targets=tuple(targets), numbered=True, ascending=i == 1) for i in range(r.choice((1, 2)))]
        self.clients.append(Client(world, "o", targets=tuple(targets)))
        self.clients += [Client(world, f"c{i}", queue=q, prefetch=r.choice((1, 3))) for i, q in enumerate(queues) if q == "l" or r.random() < 0.8]
        if settles_in_transactions(self.seed):
            self.clients.append(Client(world, "t", targets=tuple(targets), queue=queues[0], prefetch=3))
        self.admin = Client(world, "admin")
        self.to_declare: list[tuple[Any, ...]] = list(self.declarations)
        world.say(f"features {features}, {len(world.hosts)} nodes{', strict' if self.strict else ''}")

    # ---- one step ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Violation, IllegalEvent or what else breaks."""
        w = self.world
        for i in w.hosts:
            w.start(i)
        if self.random.random() < 0.9:
            self.prelude()
        for step in range(STEPS):
            self.step()
            if step % CHECKED_EVERY == CHECKED_EVERY - 1:
                self.check()
        self.check()
        self.converge()

    def prelude(self) -> None:
        """Without faults until everything is declared."""
        self.faults = False
        for _ in range(PRELUDE_STEPS_MAX):
            self.step()
            if not self.to_declare:
                break
        self.faults = True

    def check(self) -> None:
        super().check()
        for site in self.world.sites.values():
            if site.up and not site.ended:
                self.world.counting(site)

    def step(self) -> None:
        w, r = self.world, self.random
        w.now += STEP_S
        for site in w.sites.values():
            site.broker.now = w.now
            site.broker.expire()
            if site.node is None:
                continue
            if site.ended:
                if r.random() < 0.5:
                    w.end_incarnation(site.id, r.randint(0, len(site.pending)))
            elif w.now >= self.ticks[site.id]:
                self.ticks[site.id] = w.now + TICK_S * r.uniform(0.8, 1.2)
                w.tick(site.id)
        if self.faults and r.random() < self.fault_rate:
            self.fault()
        if self.faults and self.erring:
            self.err(self.erring)
        choose, actions = r.random, self.actions
        count = len(actions)
        for _ in range(TURNS * len(w.hosts)):
            actions[int(choose() * count)]()

    def _actions(self) -> list[Callable[[], object]]:
        found: list[Callable[[], object]] = []
        for site in self.world.sites.values():
            s = site
            found += [lambda s=s: self.on_stream(s)] * 3
            for j in self.world.hosts:
                if j != s.id:
                    found += [lambda i=s.id, j=j: self.on_link(i, j)] * (8 // (len(self.world.hosts) - 1))
            found += [lambda s=s: self.on_sidecar(s)] * 5
            found += [lambda s=s: self.on_broker(s)] * 5
            found += [lambda s=s: self.on_relay(s)] * 4
        found += [self.on_client] * (5 * len(self.world.hosts))
        return found

    def on_stream(self, site: Site) -> None:
        if site.node is None or site.ended:
            return
        if site.replica._open_count:
            site.replica.turn()
        if site.pending and not site.broker.alarm and self.random.random() < self.slow[site.id]:
            self.world.confirm(site.id, self.random.randint(1, 3))

    def on_link(self, i: int, j: int) -> None:
        w, r = self.world, self.random
        site, other = w.sites[i], w.sites[j]
        conn = w.conns.get((i, j))
        if conn is None:
            if w.can_connect(i, j) and not site.ended and r.random() < 0.5:
                w.connect(i, j)
        elif conn.broken:
            if site.up and not site.ended and r.random() < 0.5:
                w.notice(i, j)
        elif not conn.stalled:
            for _ in range(r.randint(1, 3)):
                if conn.queue and not conn.broken and other.up and not other.ended:
                    w.deliver(i, j)
            if conn.acks and site.up and not site.ended:
                w.deliver_ack(i, j)

    def on_sidecar(self, site: Site) -> None:
        if site.node is None or site.ended:
            return
        r = self.random
        if site.recovering:
            self.world.recovered(site.id)
            if site.node is None or site.ended:
                return
        what = r.random()
        if what < 0.5:
            applier = site.applier
            if site.replica.to_apply and (site.node.role in (Role.RECOVERING, Role.ACTIVE) or not self.faults or r.random() < self.lateness):
                applier.take()
            applier.reply()
        elif what < 0.8:
            for _ in range(2):
                site.sweeper.step(int(r.random() * 64))
        elif what < 0.93:
            site.write_record()
        elif what < 0.96:
            site.applier.retry()
            if site.replica.active and site.node.log.end - site.checkpoints.last > 40:
                site.replica.checkpoint()
        elif site.barrier is not None:
            site.barrier.relay.pass_barrier()
        if site.barrier is not None:
            site.barrier.relay.pass_barrier()

    def on_broker(self, site: Site) -> None:
        r, broker = self.random, site.broker
        pipes = broker.pipes
        if not pipes:
            return
        pipe = pipes[int(r.random() * len(pipes))]
        if pipe.inbox:
            if not broker.is_blocked(pipe):
                for _ in range(r.randint(1, 3)):
                    if pipe.inbox:
                        broker.step(pipe)
        elif pipe.abandoned and (r.random() < 0.3 or not self.faults):
            broker.close(pipe)
        if pipe.consumes and not pipe.closed and not pipe.abandoned:
            broker.deliver(pipe, r.choice(list(pipe.consumes)))
        if r.random() < 0.02:
            broker.synced()

    def on_relay(self, site: Site) -> None:
        if site.relays and not site.ended:
            relay = site.relays[int(self.random.random() * len(site.relays))]
            for _ in range(2):
                if not relay.closed:
                    relay.reply()
            if not relay.closed and relay.client is None:
                relay.leave()

    # ---- clients -----------------------------------------------------------------------------------------------------

    def on_client(self) -> None:
        w, r = self.world, self.random
        if self.to_declare or r.random() < 0.02:
            self.administer()
        if self.to_declare:
            return  # what is declared may be in doubt: applications wait for it
        client = self.clients[int(r.random() * len(self.clients))]
        relay = client.relay
        if relay is None:
            if w.takes_publishes or not client.idle or any(s.up and s.replica.active and s.applier.parked for s in w.sites.values()):
                self.connect(client)
            return
        site = relay.site
        if site.ended or site.barrier is not None:
            return
        if client.queue:
            if not w.takes_publishes and site.applier.idle:
                client.vanish()
            elif r.random() < 0.4:
                client.settle(r)
            elif r.random() < 0.02 and self.faults:
                client.vanish()
            return
        assert site.node is not None
        if site.node.log.end - site.node.safe > UNSAFE_MAX or (r.random() > self.load and w.takes_publishes):
            return
        if r.random() < 0.05:
            client.transact(r, r.randint(2, 3))
        else:
            client.publish(r)
        if self.faults and r.random() < 0.01:
            client.vanish()

    def connect(self, client: Client) -> None:
        w = self.world
        doors = [s for s in w.sites.values() if s.node is not None and s.node.serving and not s.ended and s.barrier is None]
        if doors:
            client.connect(self.random.choice(doors))

    def administer(self) -> None:
        """Declarations at the start; later some among the messages."""
        r = self.random
        if self.admin.relay is None:
            self.connect(self.admin)
            if self.admin.relay is not None:
                self.to_declare += [d for d in self.declarations if d not in self.to_declare]
        relay = self.admin.relay
        if relay is None or relay.site.barrier is not None or relay.site.ended:
            return
        if self.admin.asked:
            return
        if not self.to_declare:
            if not self.faults:
                return
            what = r.choice(
                [
                    ("purge", r.choice(self.queues)),
                    r.choice(self.declarations),
                    *(() if self.may_park else (("declare", "x"), ("delete", "x"), ("bind", "fan", "x"), ("unbind", "fan", "x"))),
                ]
            )
            self.to_declare = [what]
            if r.random() < 0.1 and not self.may_park:
                name = r.choice(self.queues)
                self.to_declare = [("delete", name), *(d for d in self.declarations if name in d[1:])]
        what = self.to_declare[0]
        broker = relay.site.broker
        if what[0] in ("bind", "unbind") and not (what[1] in broker.exchanges and what[2] in broker.queues):
            self.to_declare.pop(0)  # the broker would refuse it
            return
        self.admin.asked = True
        relay.topology(what, lambda: self.to_declare.pop(0))

    # ---- faults ------------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        w, r = self.world, self.random
        site = w.sites[r.choice(sorted(w.hosts))]
        what = r.random()
        if what < 0.1:
            site.broker.alarm = not site.broker.alarm
            w.say(f"n{site.id}: disk alarm {'on' if site.broker.alarm else 'off'}")
        elif what < 0.2 and site.up:
            self.kill(site, broker=True)
        elif what < 0.3 and site.up and not site.ended:
            # The process dies and is started again at once.
            self.kill(site, broker=False)
            w.start(site.id)
        elif what < 0.42 and site.relays:
            relay = r.choice(site.relays)
            if not relay.pipe.closed:
                site.broker._on_fail(relay.pipe, "an error of its own")
        else:
            super().fault()

    def kill(self, site: Site, *, broker: bool) -> None:
        w, r = self.world, self.random
        if site.record_pending and r.random() < 0.5:
            site.records.append(site.record_pending)
        site.record_pending = b""
        lost = 0
        if broker and self.host_losses and r.random() < 0.5 and all(h.up and not h.lost_host for h in w.hosts.values()):
            lost = r.randint(1, 4)
        w.crash(site.id, r.randint(0, len(site.pending)), lost_records=lost, broker=broker, sent_arrives=r.random() < 0.5)
        if broker:
            site.broker.crash(r)

    # ---- heal and converge -------------------------------------------------------------------------------------------

    def converge(self) -> None:
        self.quiet_at = self.world.now + QUIET_S
        for site in self.world.sites.values():
            site.broker.alarm = False
        super().converge()

    def step_of_converging(self) -> None:
        self.step()

    def at_rest(self) -> bool:
        """Everybody is in the set, nothing is under way, and all nodes are equal."""
        w = self.world
        if self.quiet_at is not None and w.now > self.quiet_at and not self.to_declare and not any(s.barrier for s in w.sites.values()):
            w.takes_publishes = False
        if w.takes_publishes or self.to_declare:
            return False
        primary = w.primary()
        if primary is None or any(h.ended for h in w.hosts.values()):
            return False
        for site in w.sites.values():
            if site.node is None or site.node.role is not (Role.ACTIVE if site is primary else Role.READY):
                return False
        node = primary.node
        if node is None or node.log.members != w.hosts.keys() or not all(c.idle for c in self.clients):
            return False
        if not all(self.is_still(site, node.log.end) for site in w.sites.values()):
            return False
        self.check()
        self.check_equal()
        return True

    def is_still(self, site: Site, end: int) -> bool:
        """Nothing more happens at a node by itself."""
        node, broker = site.replica.node, site.broker
        if not (node.safe == node.log.end == site.replica.end == end) or site.barrier or site.pending or not site.applier.drained:
            return False
        if site.replica.progress.tracker.applied < end and not site.applier.parked:
            return False
        if any(p.held or p.inbox or p.outbox or p.consumes for p in broker.pipes):
            return False
        if any(q.ready and q.arguments.ttl_s for q in broker.queues.values()):
            return False
        return site.replica.active or (site.sweeper.at_rest and not site.sweeper.has_work())

    def check_equal(self) -> None:
        """One log, one dedup, one filter; and the queues hold the same, but for what a broker removed by itself."""
        w = self.world
        sites = list(w.sites.values())
        first = sites[0]
        for site in sites:
            w.check_queues(site)
            w.check_early(site)
            w.check_transactions(site)
        held = {site.id: w.counting(site) for site in sites}
        live = {site.id: set(w.live(site)) for site in sites}
        for site in sites:
            if site.entries != first.entries:
                raise Violation(f"the logs of n{first.id} and n{site.id} differ")
            if _ids(site.replica.index.dedup) != _ids(first.replica.index.dedup):
                raise Violation(f"n{first.id} and n{site.id} remember different IDs")
            if not w.host_lost and (ours := operations(first, w.deletes)) != (theirs := operations(site, w.deletes)):
                raise Violation(f"n{first.id} and n{site.id} know different operations: {ours} and {theirs}")
            applied = site.replica.progress.tracker.applied  # what lies behind a parked message is not swept
            finished = [copy for key, (_, copy) in held[site.id].items() if key not in live[site.id] and key[1] <= applied]
            phantoms = [str(copy) for copy in finished if not w.outlived_purge(site, copy)]
            if phantoms:
                raise Violation(f"G3: n{site.id} holds {phantoms}, which are finished")
            if self.declared(site) != self.declared(first):
                raise Violation(f"n{first.id} and n{site.id} have different queues")
            removed = {(e, s, line) for e, s, _, line in site.broker.gone | first.broker.gone}
            unequal = held[site.id].keys() ^ held[first.id].keys()
            waiting = {*site.applier.parked_lines(), *first.applier.parked_lines()}
            unswept = {key for s in (site, first) for key in held[s.id] if key[1] > s.replica.progress.tracker.applied}
            unequal -= removed | waiting | unswept | (w.finished.keys() if w.host_lost else set())
            unequal = {key for key in unequal if not w.is_purged(site, key[:2], key[2]) and not w.goes_with_its_queue(site, key)}
            if unequal:
                raise Violation(f"the queues of n{first.id} and n{site.id} differ: {sorted(unequal)}")
            for key in held[site.id].keys() & held[first.id].keys():
                a, b = held[first.id][key], held[site.id][key]
                given = all(w.verdict(s, *held[s.id][key]) is Verdict.GIVE for s in (site, first))
                if a[0] == b[0] == "w" and a[1].deaths != b[1].deaths and given:
                    raise Violation(f"{a[1]} of n{first.id} has come round more or less often than {b[1]} of n{site.id}")
                if a[0] != b[0] and all(first.broker.queues[q].arguments.plain for q in {a[0], b[0]}):
                    raise Violation(f"{a[1]} is in {a[0]} of n{first.id} and in {b[0]} of n{site.id}")

    def declared(self, site: Site) -> dict[str, Any]:
        """A node's queues; where the log may lack declarations that its broker has carried out, without those."""
        known, all_known = site.replica.declared.queues, not (self.world.host_lost or self.world.in_doubt)
        return {name: queue.arguments for name, queue in site.broker.queues.items() if all_known or (VHOST, name) in known}

    @staticmethod
    def describe(host: Host) -> str:
        text = Chaos.describe(host)
        if isinstance(host, Site) and host.up:
            replica = host.replica
            applied = replica.progress.tracker.applied
            waits = f"applied {applied}, {len(replica.to_apply)} wait, {len(host.applier.open)} open, {len(host.relays)} relays"
            due = {t.name: t.due.count(1 << 62) for t in replica.index.filter.queues() if t.due.count(1 << 62)}
            pipes = [(len(p.inbox), len(p.outbox), len(p.held), list(p.consumes)) for p in host.broker.pipes]
            text += f" {waits} due {due} suspects {host.sweeper.suspects} pass {not host.sweeper.at_rest} pipes {pipes} barrier {host.barrier}"
            queues = {q.name: list(map(str, q.ready)) for q in host.broker.queues.values()}
            text += f" generations {replica.index.generations.table} queues {queues}"
        return text


def operations(site: Site, deletes: dict[str, list[At]]) -> Any:
    """What a node's filter knows, apart from what its own sweeper has still to find, and from what was published to a queue before its last deletion.

    Whether that is still known depends on whether later operations were safe when the node came to the deletion. No copy is left that it could
    concern, or it is found where it should not be.
    """
    queues, refused = site.replica.index.filter.export()
    known = {}
    for q in queues:
        deleted = max((at[1] for at in deletes.get(q.queue, ()) if World.holds(site, at)), default=0)

        def since(bitmap: bytes, deleted: int = deleted) -> list[int]:
            return [sequence for sequence in BitMap64.deserialize(bitmap) if sequence > deleted]

        visits = sorted((v.origin, v.visit, v.dequeued, positions) for v in q.visits if (positions := since(v.positions)))
        purged = q.purged if q.purged > deleted else 0
        known[q.queue] = (since(q.done), since(q.moved), purged, since(q.spared), visits)
    return {q: k for q, k in known.items() if k != ([], [], 0, [], [])}, list(BitMap64.deserialize(refused))


def _ids(dedup: Dedup) -> dict[str, set[int]]:
    """The IDs that are remembered: the same ones may be written in several ways."""
    found = {}
    for producer, ranges, others in dedup.snapshot():
        flat = [*ranges]
        numbers = {number for first, last in zip(flat[::2], flat[1::2]) for number in range(first, last + 1)}
        found[producer] = numbers.union(BitMap64.deserialize(others) if others else ())
    return found


def run(seed: int, **options: Any) -> World:
    """One life; an exception tells its seed and its last steps."""
    life = Life(seed, **options)
    try:
        life.run()
    except (Violation, IllegalEvent, RuntimeError, LookupError, ValueError, AttributeError) as error:
        tail = "\n".join(list(life.world.log)[-60:])
        raise Violation(f"seed {seed}: {type(error).__name__}: {error}\n{tail}\nreplay: python tests/simulation/life.py {seed}") from error
    return life.world


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        run(int(argument), trace=True)
