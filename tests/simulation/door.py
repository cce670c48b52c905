"""A client's connection at a simulated primary: the door's relay, as broker_plugin does it, at the level of methods.

Rules: what the client sends goes to the broker in order, each command when the entry that it waits for is safe (R5). What the broker refuses, or
whose fate nobody can know, becomes REFUSED. A client that vanishes leaves the broker's side behind until what it published is confirmed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from broker import PARTIAL, Copy
from coding import METHODS, VHOST, encode_publish, encode_topology

from broker_plugin.amqp.declarations import DELETES
from broker_plugin.amqp.frames import QUEUE_DECLARE
from broker_plugin.log.messages import Delivery, Settled
from broker_plugin.methods.declare_rules import Replicate
from broker_plugin.session.channel import ClientChannel
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.queue_filter import Verdict

if TYPE_CHECKING:
    from clients import Client
    from sidecar import Site
    from world import World


@dataclass
class Barrier:
    """A declaration under way: nothing is taken from any client meanwhile."""

    relay: Relay
    what: tuple[Any, ...]
    upto: int
    then: Callable[[], object]
    asked: bool = False


class Relay:
    """A client's connection with one channel, on a node that is primary."""

    def __init__(self, world: World, site: Site, client: Client) -> None:
        self.world = world
        self.site = site
        self.replica = site.replica
        self.client: Client | None = client
        self.producer = client.producer
        self.ascending = client.ascending
        self.pipe = site.broker.connect()
        self.channel = ClientChannel(1)
        self.channel.confirms.selected = True
        self.closed = False
        self.copies: dict[int, Copy] = {}
        self._fifo: deque[tuple[int, tuple[Any, ...]]] = deque()
        self._repeats: deque[tuple[int, int, int]] = deque()
        self._held: deque[tuple[int, str, Copy]] = deque()
        self._until_durable: deque[tuple[int, int]] = deque()
        self._held_confirms: list[Callable[[Client], None]] = []
        self._declaring: deque[tuple[int, Callable[[], object]]] = deque()
        self._commits: deque[list[tuple[int, pb.Run]]] = deque()
        world.sessions_opened += 1
        self.session = world.sessions_opened
        site.relays.append(self)

    # ---- from the client ---------------------------------------------------------------------------------------------

    def publish(self, exchange: str, key: str, number: int, id: int) -> None:
        """`id`: the number of its replication ID; 0 if it has none."""
        replica, confirms = self.replica, self.channel.confirms
        early = not exchange and key in self.world.local_queues
        if id and replica.index.dedup.seen(self.producer, id):
            tag = confirms.ended_here()
            sequence = replica.index.dedup.position_of(self.producer, id)
            if self.repeat_is_done(sequence):
                self._confirm_local(tag)
            elif sequence and sequence in replica.progress.early:
                self._until_durable.append((tag, sequence))
                self.durable_advanced()
            else:
                self._repeats.append((tag, sequence or 0, id))
                replica.progress.waiting_applied.add(self)
            return
        blob = encode_publish(exchange, key, number)
        enqueues = pb.Enqueues(vhost=VHOST, channel=1, frames=blob, lengths=[len(blob)])
        if id:
            self._number(enqueues, id)
        run = pb.Run(enqueues=enqueues)
        first = replica.append(run, 1, len(blob))
        if early:
            self._until_durable.append((confirms.forwarded_early(1, first, self.producer if id else "", id), first))
            self.channel.early.append((first, run))
            replica.progress.early.add(first, first)
            replica.progress.waiting_durable.add(self)
        else:
            confirms.forwarded(1, first, self.producer if id else "", id)
        stamp = (replica.node.leading, first, replica.index.generations.newest)
        self.world.sessions[stamp[:2]] = self.session
        self.forward(first, ("publish", exchange, key, stamp, number))

    def _number(self, enqueues: pb.Enqueues, id: int) -> None:
        enqueues.producer, enqueues.id_first = self.producer, id
        if self.ascending:
            enqueues.id_skipped = self.replica.index.dedup.skips(self.producer, id)

    def commit(self, publishes: list[tuple[str, str, int, int]], tags: list[int], what: str) -> None:
        """A transaction: in one batch of the log, and one at the broker. Its answer is that of its commit. `tags`: of deliveries, settled so."""
        replica = self.replica
        replica.flush()
        runs: list[tuple[int, pb.Run]] = []
        commands = []
        for exchange, key, number, id in publishes:
            blob = encode_publish(exchange, key, number)
            enqueues = pb.Enqueues(vhost=VHOST, channel=1, frames=blob, lengths=[len(blob)])
            if id:
                self._number(enqueues, id)
            one = pb.Run(enqueues=enqueues)
            first = replica.append(one, 1, len(blob))
            runs.append((first, one))
            stamp = (replica.node.leading, first, replica.index.generations.newest)
            self.world.sessions[stamp[:2]] = self.session
            commands.append((exchange, key, stamp, number))
        last = max(self._log_settled(tags, what), runs[-1][0])
        self.world.transactions.append((replica.node.leading, runs[0][0], last))
        self._commits.append(runs)
        self.forward(last, ("commit", commands, [(what, tag) for tag in tags]))
        replica.flush()

    def repeat_is_done(self, sequence: int | None) -> bool:
        """R6: the confirm of a repeat waits for the first one's completion."""
        return sequence is None or self.replica.progress.tracker.is_applied(sequence)

    def settle(self, tags: list[int], what: str) -> None:
        """The client acks, rejects or gives back these deliveries."""
        last = self._log_settled(tags, what)
        for tag in tags:
            self.forward(last, (what, tag))

    def _log_settled(self, tags: list[int], what: str) -> int:
        """The last entry that says so; 0: none does."""
        last = 0
        plain: dict[tuple[str, str], list[int]] = {}
        for tag in tags:
            for delivery in self.channel.settle(tag, False):
                copy = self.copies.pop(tag)
                self.world.released(self.site, copy)
                if what == "requeue":
                    self.replica.gave_back([delivery])
                if what == "ack" and not delivery.deaths:
                    plain.setdefault(delivery.queue, []).append(delivery.sequence)
                    self.world.acking.append((delivery.queue, copy))
                elif what != "requeue":
                    operate = self.replica.dequeue if what == "ack" else self.replica.reject
                    last = operate(delivery.queue, [delivery.sequence], delivery.deaths)
                    told = self.world.finish if what == "ack" else partial(self.world.rejected, self.site, delivery.queue[1])
                    told(copy, self.replica.node.leading, last)
        for queue, sequences in plain.items():
            last = self.replica.dequeue(queue, sequences, ())
            for key, copy in self.world.acking:
                if key == queue:
                    self.world.finish(copy, self.replica.node.leading, last)
        self.world.acking.clear()
        return last

    def consume(self, queue: str, prefetch: int) -> None:
        self.forward(0, ("consume", queue, prefetch))

    def topology(self, what: tuple[Any, ...], then: Callable[[], object]) -> None:
        """A declaration: passed on if the log holds it, else behind a barrier. `then`: the client is answered."""
        if what[0] != "purge" and METHODS[what[0]] not in DELETES and (VHOST, encode_topology(what)) in self.replica.declared.known_topology:
            self.forward(0, ("topology", what))
            self._declaring.append((0, then))
            return
        self.replica.flush()
        self.site.barrier = Barrier(self, what, self.replica.end, then)

    def pass_barrier(self) -> bool:
        """The next step of this connection's declaration."""
        barrier = self.site.barrier
        if barrier is None or barrier.asked or not self.site.applier.has_brought(barrier.upto) or not self.site.is_recorded(barrier.upto):
            return False
        barrier.asked = True
        self.forward(0, ("topology", barrier.what))
        return True

    def _done(self) -> None:
        barrier = self.site.barrier
        if barrier is None or barrier.relay is not self:
            self._answer_declarations()
            return
        self.site.barrier = None
        queue = barrier.what[1]
        if barrier.what[0] == "purge":
            channels = [relay.channel for relay in self.site.relays]
            held = [each.sequence for channel in channels for each in channel.held if each.queue == (VHOST, queue)]
            sequence = self.replica.purge((VHOST, queue), self.purge_spares(held))
            self.world.held_at_purge[self.replica.node.leading, sequence] = set(held)
        else:
            entry = encode_topology(barrier.what)
            declares = queue if METHODS[barrier.what[0]] == QUEUE_DECLARE else None
            sequence = self.replica.topology(VHOST, Replicate(queue, entry=entry).entries, declares)
        self._declaring.append((sequence, barrier.then))
        self.replica.progress.waiting_safe.add(self)

    @property
    def declares(self) -> bool:
        """Whether a declaration was carried out and its entry may not be safe."""
        return bool(self._declaring)

    def purge_spares(self, held: list[int]) -> list[int]:
        """What clients hold is not in the queue."""
        return held

    def _answer_declarations(self) -> None:
        while self._declaring and self._declaring[0][0] <= self.replica.progress.safe:
            then = self._declaring.popleft()[1]
            if self.client is not None:
                self.client.declared()
                then()

    # ---- to the broker -----------------------------------------------------------------------------------------------

    def forward(self, sequence: int, command: tuple[Any, ...]) -> None:
        """R5: it leaves when entry `sequence` is safe."""
        if not self._fifo and self.may_leave(sequence):
            self.pipe.inbox.append(command)
            return
        self._fifo.append((sequence, command))
        self.replica.progress.waiting_safe.add(self)

    def may_leave(self, sequence: int) -> bool:
        return sequence <= self.replica.progress.safe

    def safe_advanced(self) -> None:
        if self.closed:
            return
        held, self._held = self._held, deque()
        while held:
            self._judge(*held.popleft())
            if self._held:
                self._held += held
                break
        while self._fifo and self._fifo[0][0] <= self.replica.progress.safe:
            self.pipe.inbox.append(self._fifo.popleft()[1])
        self._answer_declarations()
        if self._fifo or self._held or self._declaring:
            self.replica.progress.waiting_safe.add(self)

    def durable_advanced(self) -> None:
        """Local completion: the own stream has it."""
        waiting, confirms = self._until_durable, self.channel.confirms
        while not self.closed and waiting and waiting[0][1] <= self.replica.node.durable:
            tag, sequence = waiting.popleft()
            if tag in confirms.local:
                confirms.local.discard(tag)
            else:
                confirms.early.popleft()
                self.replica.progress.confirmed_early(sequence, 1, 1)
            if self.client is not None:
                self.client.answered(tag, True, early=True)
        if waiting:
            self.replica.progress.waiting_durable.add(self)

    def applied_advanced(self) -> None:
        if self.closed:
            return
        left: deque[tuple[int, int, int]] = deque()
        for tag, sequence, id in self._repeats:
            if self.replica.progress.tracker.is_applied(sequence):
                self._confirm_local(tag, self.replica.index.dedup.seen(self.producer, id))
            else:
                left.append((tag, sequence, id))
        self._repeats = left
        if left:
            self.replica.progress.waiting_applied.add(self)

    # ---- from the broker ---------------------------------------------------------------------------------------------

    def reply(self) -> bool:
        """The broker's oldest answer."""
        if not self.pipe.outbox:
            return False
        match self.pipe.outbox.popleft():
            case ("confirm", tag, ok, _):
                for run in self.channel.confirms.answered(tag, False):
                    if ok:
                        self.replica.progress.applied(run.sequence, run.sequence + run.publishes - 1)
                    else:
                        self.replica.refuse([run])
                        if self.channel.early_run(run.sequence):
                            self.world.refused_late.add((self.replica.node.leading, run.sequence))
                    if run.client_tag:
                        self._answer(run.client_tag, ok)
                self.channel.forget_early()
            case ("committed", _):
                for sequence, _ in self._commits.popleft():
                    self.replica.progress.applied(sequence, sequence)
                self._confirm(lambda client: client.committed())
            case ("deliver", tag, name, copy):
                if self.keeps_back():
                    self._held.append((tag, name, copy))
                elif self.client is not None:
                    self._judge(tag, name, copy)
            case ("done",):
                self._done()
            case ("failed", why):
                self.world.say(f"n{self.site.id}'s broker closes a channel: {why}")
                self._abandon(refused=why == PARTIAL)
                self._fifo.clear()
                self.close()
            case ("cancelled", _):
                self.client_lost()
        return True

    def keeps_back(self) -> bool:
        """What follows one that is withheld keeps its order."""
        return bool(self._held)

    def _judge(self, tag: int, name: str, copy: Copy) -> None:
        queue = (VHOST, name)
        verdict = self.verdict(queue, copy)
        if verdict is Verdict.GIVE:
            if self.client is None:
                return
            self.replica.progress.seen(copy.sequence)
            self.channel.deliveries[tag] = Delivery(queue, copy.sequence, copy.deaths)
            self.copies[tag] = copy
            self.world.delivered(self.site, name, copy, self.pipe, tag, redelivered=self.replica.given_out.comes_again(copy.sequence, False))
            self.client.delivered(tag)
        elif verdict is Verdict.HOLD:
            self._held.append((tag, name, copy))
            self.replica.progress.waiting_safe.add(self)
        else:
            self.forward(0, ("reject" if verdict is Verdict.REJECT else "ack", tag))
            self.replica.index.filter.queue(queue).gone(copy.sequence, copy.generation, copy.deaths)

    def verdict(self, queue: tuple[str, str], copy: Copy) -> Verdict:
        return self.replica.index.filter.verdict(queue, copy.sequence, copy.generation, copy.deaths)

    def _confirm_local(self, tag: int, ok: bool = True) -> None:
        self.channel.confirms.local.discard(tag)
        self._answer(tag, ok)

    def _answer(self, tag: int, ok: bool) -> None:
        self._confirm(lambda client: client.answered(tag, ok), ok)

    def _confirm(self, tell: Callable[[Client], None], ok: bool = True) -> None:
        """The client hears of it now, or when this primary has its expected backups."""
        if ok and self.replica.holds_confirms:
            self._held_confirms.append(tell)
        elif self.client is not None:
            tell(self.client)

    def give_confirms(self) -> None:
        held, self._held_confirms = self._held_confirms, []
        for tell in held:
            self._confirm(tell)

    def _abandon(self, *, refused: bool = False) -> None:
        """As closing.abandon. `refused`: by the broker's own word, so that some of a transaction may be there and the rest not."""
        left = [(run, self.channel.early_run(run.sequence)) for run in self.channel.confirms.abandon()]
        self.replica.refuse([run for run, early in left if early is None], unless_seen=True)
        for run, early in left:
            if early is not None:
                self.log_again(run, *early)
        self.channel.early.clear()
        for runs in self._commits:
            if refused:
                self.replica.refuse([Settled(0, 1, sequence, "", 0) for sequence, _ in runs], unless_seen=True)
            else:
                self.replica.doubt(runs)
        self._commits.clear()

    def log_again(self, settled: Settled, first: int, run: pb.Run) -> None:
        """What was confirmed with local completion is not refused because nobody knows what became of it."""
        self.replica.log_again(settled, first, run)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def client_lost(self) -> None:
        """The client is gone; what it published is brought to its end first."""
        self._drop_client()

    def _drop_client(self) -> None:
        client, self.client = self.client, None
        for copy in self.copies.values():
            self.world.released(self.site, copy)
        self.copies.clear()
        self.replica.gave_back(self.channel.let_go())
        if client is not None:
            client.lost()

    def leave(self) -> bool:
        """Once a client that is gone has nothing under way, the broker's side is closed."""
        if self.client is not None or self._fifo or self.channel.confirms.open or self._commits or self.pipe.inbox:
            return False
        if self.site.barrier is not None and self.site.barrier.relay is self:
            return False
        self.close()
        return True

    def close(self) -> None:
        if self.closed:
            return
        self._drop_client()
        self.closed = True
        self._abandon()
        if self.site.barrier is not None and self.site.barrier.relay is self:
            self.site.barrier = None
        self.replica.progress.waiting_safe.discard(self)
        self.replica.progress.waiting_applied.discard(self)
        self.replica.progress.waiting_durable.discard(self)
        if not self.pipe.closed:
            self.pipe.inbox.append(("close",))
        self.site.relays.remove(self)
