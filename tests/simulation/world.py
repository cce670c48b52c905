"""A whole group: the nodes of `Cluster`, each with a broker, a sidecar's drivers and clients. The promises that clients were given are checked.

The truth is kept by entry, (epoch, sequence), and by line: the queue to which a publish was routed first. Whatever becomes of a message by
dead-lettering, on whichever node, it stays the same line, and an ack of it anywhere ends that line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from applying import EVERYTHING
from broker import Copy, Pipe, Queue
from clients import Client
from cluster import Body, Cluster, Fence, Host, Violation, body
from coding import VHOST, decode_publish, decode_topology
from door import Relay
from sidecar import SimReplica, Site, Streams, run

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.checkpoints import Checkpoints
from lrq_ha.replication.dead_letters import Deaths
from lrq_ha.replication.events import (
    Answer,
    Append,
    EntryKind,
    Event,
    Given,
    OpenDoor,
    Opened,
    OwnConfirmed,
    PeerAcked,
    Recover,
    Recovered,
    RoleChanged,
    SafeAdvanced,
    WriteBatch,
)
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.log import LogIndex
from lrq_ha.replication.node import Node
from lrq_ha.replication.positions import epoch_name
from lrq_ha.replication.queue_filter import Verdict
from lrq_ha.replication.retention import Retention
from lrq_ha.replication.roles import Role
from lrq_ha.replication.subscription import RoutingQueue, StoredBatch
from lrq_ha.sidecar.node.recovery import rebuild

At = tuple[int, int]  # (epoch, sequence): an entry, wherever it is


def runs_of(batch: StoredBatch) -> list[pb.Run]:
    found = getattr(batch.body, "runs", None)
    if found is None:
        found = batch.body.runs = list(pb.Batch.FromString(batch.body).runs)  # type: ignore[attr-defined]
    return cast(list[pb.Run], found)


class World(Cluster):
    """See above. Clients belong to whoever drives it."""

    host_class = Site
    in_flight_bytes_max = 600
    replica_class = SimReplica

    def __init__(self, size: int, **options: Any) -> None:
        self.takes_publishes = True
        self.numbers = 0
        self.lines: dict[At, tuple[str, ...]] = {}
        self.number_of: dict[At, int] = {}
        self.entries_of_number: dict[int, list[At]] = {}
        self.numbered: set[int] = set()
        self.finished: dict[tuple[int, int, str], list[At]] = {}
        self.discarded: dict[tuple[int, int, str], list[At]] = {}  # lines that consumers rejected from a queue without dead letters
        self.refused: dict[At, list[At]] = {}
        self.purges: dict[str, list[tuple[int, int, int]]] = {}
        self.held_at_purge: dict[At, set[int]] = {}  # what clients held of the queue then, whatever the entry says
        self.deletes: dict[str, list[At]] = {}
        self.transactions: list[tuple[int, int, int]] = []
        self.out: dict[int, dict[tuple[int, int, str], tuple[Pipe, int]]] = {}
        self.acking: list[tuple[tuple[str, str], Copy]] = []
        self.given_in: dict[tuple[tuple[int, int, str], Deaths], int] = {}  # the epoch in which a line was delivered first, after these deaths
        self.client_confirms = 0
        self.local_queues: set[str] = set()  # with local completion
        self.early: set[int] = set()  # messages that were confirmed so
        self.refused_late: set[At] = set()  # and by a full queue refused after that
        self.deliveries = 0
        self.sessions: dict[At, int] = {}  # by entry: which publisher sent it, over which connection
        self.newest_given: dict[tuple[Pipe, str, int], int] = {}  # to a consumer, of a queue and session: the last entry that came for the first time
        self.sessions_opened = 0
        self.too_early: list[tuple[int, At, str]] = []  # given out although an entry, not safe yet, dequeues it
        self.host_lost = False
        self.in_doubt = False  # a declaration was carried out by a broker whose sidecar ended before the log had it for certain
        super().__init__(size, **options)
        for site in self.sites.values():
            site.broker.on_purged = lambda queue, copy, s=site: self._purged(s, queue, copy)
        if self.trace:
            for site in self.sites.values():
                site.broker.say = lambda text, i=site.id: self.say(f"n{i}'s broker: {text}")

    @property
    def sites(self) -> dict[int, Site]:
        return cast(dict[int, Site], self.hosts)

    def next_number(self) -> int:
        self.numbers += 1
        return self.numbers

    def clock(self, host: Host) -> float:
        site = cast(Site, host)
        return site.offset + self.now * site.skew

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def start(self, i: int) -> None:
        site = self.sites[i]
        node = self.node_class(self.settings(i))
        for key in [k for k in self.conns if k[0] == i]:
            self._break(self.conns.pop(key))
        site.opens += 1
        site.memory, site.checkpoints = RoutingQueue(self.memory_bytes_max), Checkpoints()
        site.replica = replica = self.replica_class(
            node, Levels({"^[a-z]": "all"}), lambda first, count, runs: self._feed(site, Append(count, (first, runs)))
        )
        retention = Retention(1 << 30)
        replica.log_marks = retention.export
        run(rebuild(replica, cast(Any, Streams(site)), site.memory, site.checkpoints, retention))
        site.entries, site.batches = [], []
        index = LogIndex(i)
        for record in site.stream:
            if isinstance(record, Fence):
                index.fence(record.epoch, record.out_end)
            elif index.accept(record.header).value == "append":
                while site.batches and site.batches[-1].header.last >= record.header.first:
                    site.batches.pop()
                del site.entries[record.header.first - 1 :]
                site.entries += cast(Body, record.body).entries
                site.batches.append(record)
        site.node = node
        site.recorded = replica.progress.tracker.applied
        site.record_pending = b""
        site.begin()
        self.out[i] = {}
        self.say(f"n{i} starts: generation {replica.index.generations.newest}, log to {node.log.end}, applied {replica.progress.tracker.applied}")
        self._feed(site, Opened(replica.progress.tracker.applied, site.lost_host and node.log.end > 0))
        self.check_memory(site)

    def crash(self, i: int, landed: int = 0, *, lost_records: int = 0, broker: bool = False, sent_arrives: bool = False) -> None:
        site = self.sites[i]
        if site.replica is not None:
            site.applied = min(site.replica.progress.tracker.applied, len(site.entries))
        super().crash(i, landed, lost_records=lost_records, broker=broker, sent_arrives=sent_arrives)
        self.host_lost |= lost_records > 0
        self.in_doubt |= (site.barrier is not None and site.barrier.asked) or any(relay.declares for relay in site.relays)
        site.barrier = None
        site.end()
        self.out[i] = {}

    def discard(self, i: int) -> None:
        super().discard(i)
        site = self.sites[i]
        site.records = []
        site.broker.pipes.clear()
        for name in list(site.broker.queues):
            site.broker.execute(("delete", name))
        site.broker.exchanges.clear()
        site.broker.gone.clear()

    def _feed(self, host: Host, event: Event) -> None:
        site = cast(Site, host)
        if site.node is None or site.ended:
            return
        if not isinstance(event, Append) and (not isinstance(event, OwnConfirmed | PeerAcked) or site.node.set_may_change):
            site.replica.flush()
        site.applied = min(site.replica.progress.tracker.applied, len(site.entries))
        super()._feed(host, event)

    def confirm(self, i: int, count: int = 1) -> None:
        site = self.sites[i]
        batches = min(count, len(site.pending))
        site.replica.batches_in_flight = max(0, site.replica.batches_in_flight - batches)
        super().confirm(i, count)
        if site.node is not None and not site.ended:
            site.replica.own_confirmed()

    # ---- effects -----------------------------------------------------------------------------------------------------

    def _write(self, host: Host, node: Node, effect: WriteBatch) -> None:
        site = cast(Site, host)
        if isinstance(effect.body, bytes):
            site.replica.index_batch(effect.batch.first, runs_of(StoredBatch(effect.batch, effect.body)))
        super()._write_batch(host, node, effect)

    def _encode(self, host: Host, effect: WriteBatch) -> Body:
        site, header = cast(Site, host), effect.batch
        if effect.kind is EntryKind.ENTRIES:
            first, runs = cast(tuple[int, list[pb.Run]], effect.body)
            if first != header.first:
                raise Violation(f"entries given out from {first} on would be written from {header.first} on")
            messages = list(range(self.messages + 1, self.messages + header.last - first + 2))
            self.messages += len(messages)
            self._note(site, header.epoch, first, runs)
        else:
            members = sorted(header.sets[0][1])
            runs = [pb.Run(marker=pb.Marker(nodes=members)) if effect.kind is EntryKind.MARKER else pb.Run(members=pb.Members(nodes=members))]
            site.replica.progress.done_when_safe(header.first, header.last)
            messages = [0]
        batch = pb.Batch(
            epoch=header.epoch, first=header.first, count=header.last - header.first + 1, previous_epoch=header.previous_epoch, runs=runs
        )
        site.replica.batches_in_flight += 1
        checkpoint = len(runs) == 1 and runs[0].WhichOneof("kind") == "checkpoint"
        return body(batch.SerializeToString(), header.epoch, messages, checkpoint=checkpoint)

    def _note(self, site: Site, epoch: int, first: int, runs: list[pb.Run]) -> None:
        """What these entries mean."""
        log = site.replica.node.log
        for sequence, one in enumerate(runs, first):
            at = (epoch, sequence)
            match one.WhichOneof("kind"):
                case "enqueues":
                    exchange, key, number = decode_publish(one.enqueues.frames)
                    self.lines[at] = tuple(site.broker.route(exchange, key))
                    self.number_of[at] = number
                    self.entries_of_number.setdefault(number, []).append(at)
                    if one.enqueues.producer:
                        self.numbered.add(number)
                case "refused":
                    ranges = list(one.refused.sequences)
                    for low, high in zip(ranges[::2], ranges[1::2]):
                        for refused in range(low, high + 1):
                            self.refused.setdefault((log.epoch_at(refused), refused), []).append(at)
                case "purge":
                    self.purges.setdefault(one.purge.queue, []).append((*at, one.purge.before))
                case "topology":
                    what = decode_topology(one.topology.method)
                    if what[0] == "delete":
                        self.deletes.setdefault(what[1], []).append(at)
                case _:
                    pass

    def _safe_advanced(self, host: Host, node: Node, effect: SafeAdvanced) -> None:
        super()._safe(host, node, effect)
        cast(Site, host).replica.progress.safe_advanced(effect.safe)
        self._check_transactions(host, node, effect.safe)
        for i, at, what in self.too_early:
            if i == host.id and self.holds(cast(Site, host), at):
                raise Violation(f"G3: n{i} has delivered {what}; its line is dequeued by entry {at[1]}, which was in the log then")

    def _cut(self, host: Host, first: int) -> None:
        super()._cut(host, first)
        cast(Site, host).replica.cut(first)

    def _begin_recovery(self, host: Host, node: Node, effect: Recover) -> None:
        super()._recover(host, node, effect)
        replica = cast(Site, host).replica
        replica.given_out.took_over(replica.node.log.end, effect.given)
        replica.begin_epoch(effect.epoch)

    def switchover(self, i: int, node: int = 0) -> Answer:
        """The door is emptied first, and all that is under way gets safe, if it can."""
        site = self.sites[i]
        for relay in list(site.relays):
            relay.client_lost()
        site.replica.flush()
        self.settle()
        return super().switchover(i, node)

    def given(self, host: Host) -> Given:
        site = cast(Site, host)
        return None if any(relay.copies for relay in site.relays) else site.replica.given_out.given()

    def _new_role(self, host: Host, node: Node, effect: RoleChanged) -> None:
        super()._role_changed(host, node, effect)
        if effect.role is Role.ACTIVE:
            for relay in list(cast(Site, host).relays):
                relay.give_confirms()

    def _let_in(self, host: Host, node: Node, effect: OpenDoor) -> None:
        super()._open_door(host, node, effect)
        self.check_queues(cast(Site, host))

    _EFFECTS = {
        **Cluster._EFFECTS,
        WriteBatch: _write,
        SafeAdvanced: _safe_advanced,
        Recover: _begin_recovery,
        RoleChanged: _new_role,
        OpenDoor: _let_in,
    }

    def recovered(self, i: int) -> None:
        """R12, steps 6 and 7, as far as they are; the door opens when they are done."""
        site = self.sites[i]
        if not site.recovering or not self.is_drained(site) or not self.has_moved(site):
            return
        site.sweeper.stopping = True
        if not site.sweeper.at_rest:
            return
        epoch, site.recovering = site.recovering, 0
        self._feed(site, Recovered(epoch))

    def is_drained(self, site: Site) -> bool:
        return site.applier.drained

    def has_moved(self, site: Site) -> bool:
        """What was rejected has gone where dead letters go, but for what waits for room."""
        moving = site.replica.index.filter.moving(None, EVERYTHING, site.applier.parked_sequences())
        for target, _ in moving:
            site.sweeper.kick(target.key)
        return not moving

    def _purged(self, site: Site, queue: Queue, copy: Copy) -> None:
        """A purge or deletion takes a copy out of a broker's queue."""
        if not queue.arguments.dead_letters or site.replica is None or not site.replica.active:
            return
        target = site.replica.index.filter.find((VHOST, queue.name))
        if target is not None and copy.sequence in target.to_move() and self.verdict(site, queue.name, copy) is Verdict.REJECT:
            raise Violation(f"lost: {copy} goes with {queue.name} of the primary n{site.id}; it was rejected before, and is a dead letter elsewhere")

    # ---- clients -----------------------------------------------------------------------------------------------------

    def open_relay(self, site: Site, client: Client) -> Relay:
        for relay in list(site.relays):
            if client.producer and relay.producer == client.producer and relay.client is not None:
                relay.client_lost()
        return Relay(self, site, client)

    def confirmed_to_client(self, site: Site, number: int) -> None:
        """The door tells a publisher that its message is safe."""
        self.client_confirms += 1
        if site.replica.holds_confirms:
            raise Violation(f"n{site.id} confirms m{number}, and waits for its expected backups")
        there = [at for at in self.entries_of_number.get(number, ()) if self.holds(site, at) and not self.is_refused(site, at)]
        if not there:
            raise Violation(f"G1: n{site.id} confirms m{number}, which is not safe in its log")
        if not any(site.replica.progress.tracker.is_applied(sequence) for _, sequence in there):
            raise Violation(f"G1: n{site.id} confirms m{number}, entries {there}, which is not in its queues")

    def confirmed_early(self, site: Site, number: int) -> None:
        """Local completion: the door tells a publisher that its message is in the own stream."""
        self.early.add(number)
        node = site.replica.node
        if not any(sequence <= node.durable and node.log.epoch_at(sequence) == epoch for epoch, sequence in self.entries_of_number.get(number, ())):
            raise Violation(f"G1: n{site.id} confirms m{number} with local completion, and its own stream does not have it")

    def check_early(self, site: Site) -> None:
        """What was confirmed with local completion is lost with its entry (that is, with its primary), or to a full queue that refuses it."""
        for number in self.early:
            there = [at for at in self.entries_of_number[number] if self.holds(site, at)]
            if there and not self.refused_late.intersection(there) and all(self.is_refused(site, at) for at in there):
                raise Violation(f"G1: m{number} was confirmed with local completion, and n{site.id} counts it as refused: {there}")

    def delivered(self, site: Site, queue: str, copy: Copy, pipe: Pipe, tag: int, *, redelivered: bool) -> None:
        """The door gives a message to a consumer; the broker holds it for `tag` of `pipe`."""
        self.deliveries += 1
        node, out = site.replica.node, self.out[site.id]
        self.say(f"n{site.id} delivers {copy} from {queue}")
        known, known_tag = out.get(copy.key, (pipe, 0))
        # What was under way when the broker closed the channel has gone back already.
        if tag in pipe.held and known_tag in known.held:
            raise Violation(f"G2: n{site.id} delivers {copy} from {queue}, and another copy of it is out")
        for at in self.finished.get(copy.key, ()):
            if self.holds(site, at):
                raise Violation(f"G3: n{site.id} delivers {copy} from {queue}; its line was dequeued by entry {at[1]}, which is safe")
            if at[0] == node.leading:
                self.too_early.append((site.id, at, f"{copy} from {queue}"))
        if self.is_refused(site, (copy.epoch, copy.sequence)):
            raise Violation(f"G3: n{site.id} delivers {copy} from {queue}, which was refused")
        if not copy.deaths and self.is_purged(site, (copy.epoch, copy.sequence), queue):
            raise Violation(f"G3: n{site.id} delivers {copy} from {queue}, which was purged")
        if not self.holds(site, (copy.epoch, copy.sequence)):
            raise Violation(f"R5: n{site.id} delivers {copy} from {queue}, which is not safe in its log")
        if self.given_in.setdefault((copy.key, copy.deaths), node.leading) != node.leading and not redelivered:
            raise Violation(f"R12: n{site.id} delivers {copy}, which was delivered in an earlier epoch, without saying so")
        if not redelivered and not copy.redelivered and not copy.deaths:
            self._check_given(site, queue, copy, pipe)
        if tag in pipe.held:
            out[copy.key] = pipe, tag

    def _check_given(self, site: Site, queue: str, copy: Copy, pipe: Pipe) -> None:
        """G4: what one publisher sent to a queue comes to a consumer in its order. What comes again, or has died, need not."""
        session = self.sessions.get((copy.epoch, copy.sequence))
        if session is None:
            return
        newest = self.newest_given.get((pipe, queue, session), 0)
        if copy.sequence < newest:
            raise Violation(f"G4: n{site.id} delivers {copy} from {queue} after entry {newest} of the same publisher")
        self.newest_given[pipe, queue, session] = copy.sequence

    def released(self, site: Site, copy: Copy) -> None:
        """A consumer no longer holds it."""
        self.out[site.id].pop(copy.key, None)

    def finish(self, copy: Copy, epoch: int, sequence: int) -> None:
        """A consumer acked it: entry (epoch, sequence)."""
        self.finished.setdefault(copy.key, []).append((epoch, sequence))

    def rejected(self, site: Site, queue: str, copy: Copy, epoch: int, sequence: int) -> None:
        """A consumer rejected it: entry (epoch, sequence)."""
        declared = site.broker.queues.get(queue)
        if declared is not None and not declared.arguments.dead_letters:
            self.discarded.setdefault(copy.key, []).append((epoch, sequence))

    # ---- checks ------------------------------------------------------------------------------------------------------

    @staticmethod
    def holds(site: Site, at: At) -> bool:
        """Whether an entry is in a node's log and safe there."""
        epoch, sequence = at
        log = site.replica.node.log
        return sequence <= site.replica.node.safe and sequence <= log.end and log.epoch_at(sequence) == epoch

    def is_refused(self, site: Site, at: At) -> bool:
        return any(self.holds(site, by) for by in self.refused.get(at, ()))

    def is_purged(self, site: Site, at: At, line: str) -> bool:
        return any(
            at[1] < before and self.holds(site, (epoch, sequence)) and at[1] not in self.held_at_purge[epoch, sequence]
            for epoch, sequence, before in self.purges.get(line, ())
        )

    def goes_with_its_queue(self, site: Site, key: tuple[int, int, str]) -> bool:
        """A later entry deletes the queue of this line, and a host has lost the end of its log.

        That host may have carried out the deletion, and no longer knows of it. What it publishes again from before it goes nowhere, where other
        nodes lost it a little later, with the queue. If it had died there before that, they have it among the dead letters: the log does not say what
        dies by itself, so whoever applies an entry late has it go with its queue (docs/limitations.md).
        """
        return self.host_lost and any(key[1] < at[1] and self.holds(site, at) for at in self.deletes.get(key[2], ()))

    def outlived_purge(self, site: Site, copy: Copy) -> bool:
        """It had left its line's queue by dead-lettering before that was purged."""
        return bool(copy.deaths) and self.is_purged(site, (copy.epoch, copy.sequence), copy.line) and not self.is_finished(site, copy.key)

    def is_finished(self, site: Site, key: tuple[int, int, str], *how: dict[tuple[int, int, str], list[At]]) -> bool:
        """Whether a consumer has acked it, or rejected it for good."""
        return any(self.holds(site, by) for done in how or (self.finished, self.discarded) for by in done.get(key, ()))

    def live(self, site: Site) -> Iterator[tuple[int, int, str]]:
        """The lines that a node's log says are not finished, as far as it is safe."""
        for at, lines in self.lines.items():
            if not self.holds(site, at) or self.is_refused(site, at):
                continue
            for line in lines:
                key = (*at, line)
                if not self.is_finished(site, key) and not self.is_purged(site, at, line):
                    yield key

    @staticmethod
    def verdict(site: Site, queue: str, copy: Copy) -> Verdict:
        return site.replica.index.filter.verdict((VHOST, queue), copy.sequence, copy.generation, copy.deaths)

    def counting(self, site: Site) -> dict[tuple[int, int, str], tuple[str, Copy]]:
        """The copies in a node's queues that its door would give out, or move to where something becomes of them."""
        found: dict[tuple[int, int, str], tuple[str, Copy]] = {}
        for name, copy in site.broker.copies():
            verdict = self.verdict(site, name, copy)
            if verdict is not Verdict.ACK and not (verdict is Verdict.REJECT and self.is_finished(site, copy.key, self.discarded)):
                if copy.key in found:
                    raise Violation(f"G2: n{site.id} has two copies of {copy}: in {found[copy.key][0]} and in {name}")
                found[copy.key] = (name, copy)
        return found

    def check_queues(self, site: Site) -> None:
        """Everything safe is applied here: each line that is not finished has one copy, and no message with an ID is there twice."""
        found = self.counting(site)
        generations = site.replica.index.generations
        waiting = set(site.applier.parked_lines())
        for key in self.live(site):
            if self.host_lost and (key in self.finished or key in self.discarded):
                continue  # the entry that says so went with the only host that had it
            if self.goes_with_its_queue(site, key):
                continue
            epoch, sequence, line = key
            if key not in found and key not in waiting and (epoch, sequence, generations.of(sequence), line) not in site.broker.gone:
                entry = f"m{self.number_of[epoch, sequence]}, entry {epoch_name(epoch)}.{sequence}, line {line}"
                raise Violation(f"lost: {entry}, is not finished, and n{site.id} has no copy of it")
        for number in self.numbered:
            there = [at for at in self.entries_of_number[number] if self.holds(site, at) and not self.is_refused(site, at)]
            if len(there) > 1:
                raise Violation(f"G2: m{number} is in the log of n{site.id} {len(there)} times: {there}")
        self._check_order(site)

    def _check_order(self, site: Site) -> None:
        """G4: in a queue that does nothing by itself, what one publisher sent stands in its order."""
        for queue in site.broker.queues.values():
            last: dict[int, int] = {}
            if queue.arguments.rejects:
                continue
            for copy in queue.ready:
                if copy.deaths or self.verdict(site, queue.name, copy) is Verdict.ACK:
                    continue
                session = self.sessions.get((copy.epoch, copy.sequence))
                if session is None:
                    continue
                if copy.sequence < last.get(session, 0):
                    raise Violation(f"G4: {copy} stands in {queue.name} of n{site.id} behind entry {last[session]} of the same publisher")
                last[session] = copy.sequence

    def check_transactions(self, site: Site) -> None:
        """Of each transaction, a log has all entries or none."""
        for epoch, first, last in self.transactions:
            if len({self.holds(site, (epoch, sequence)) for sequence in range(first, last + 1)}) > 1:
                raise Violation(f"a transaction, entries {epoch_name(epoch)}.{first} to {last}, is in the log of n{site.id} in part")

    def _check_transactions(self, host: Host, node: Node, safe: int) -> None:
        log = node.log
        for epoch, first, last in self.transactions:
            if first <= safe and log.epoch_at(first) == epoch and (last > log.end or log.epoch_at(last) != epoch):
                raise Violation(f"a transaction, entries {first} to {last}, is safe up to {safe} at n{host.id}, which lacks its end")

    def describe_queues(self, site: Site) -> str:
        return "; ".join(f"{q.name}: {', '.join(map(str, q.ready))}" for q in site.broker.queues.values())
