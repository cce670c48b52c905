"""Applier and sweeper of a simulated sidecar, as broker_plugin/apply/applier.py, vhost_writer.py and sweep/sweeper.py do it.

Rules: a step that is not possible returns False and changes nothing. What the broker was told, it carries out later; what it answers is read later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from broker import Copy, Pipe
from coding import VHOST, decode_publish, decode_topology

from broker_plugin.log.replica import Entry
from lrq_ha.replication.dead_letters import Deaths, origin_of
from lrq_ha.replication.queue_filter import QueueFilter, Verdict

if TYPE_CHECKING:
    from sidecar import Site

NARROW, WIDE = 3, 1_000  # windows of a pass
EVERYTHING = 1 << 62  # above every sequence


class Message(NamedTuple):
    sequence: int
    epoch: int
    exchange: str
    key: str
    number: int

    @property
    def queues(self) -> tuple[tuple[str, str], ...]:
        return () if self.exchange else ((VHOST, self.key),)


class Applier:
    """Applier and Lane. `open`: published and not answered, in order of tags."""

    # The broker carries out a channel's publishes in order: those before the one that it failed at are in the queues.
    resends_answered = False

    def __init__(self, site: Site) -> None:
        self._site = site
        self._replica = site.replica
        self._pipe = site.broker.connect()
        self.open: deque[Message] = deque()
        self.parked: dict[tuple[str, str], deque[Message]] = {}

    @property
    def idle(self) -> bool:
        return not self.open and not self.parked

    @property
    def drained(self) -> bool:
        """Nothing safe waits. What a full queue refuses does not count: only the consumers of an open door can make room for it."""
        waiting = self._replica.to_apply
        return not self.open and not (waiting and waiting[0].last <= self._replica.progress.safe)

    def has_brought(self, upto: int) -> bool:
        """Everything up to `upto` is in the queues, but for what a full one refuses: a declaration must not wait for consumers, which wait for it."""
        left = self._replica.progress.tracker.needs(1, upto)
        for parked in self.parked.values():
            for message in parked:
                left.remove(message.sequence)
        return not left

    def parked_lines(self) -> Iterator[tuple[int, int, str]]:
        """(epoch, sequence, queue) of what waits for room."""
        for parked in self.parked.values():
            for message in parked:
                yield message.epoch, message.sequence, message.key

    def parked_sequences(self) -> list[tuple[int, int]]:
        """The same, as ranges of entries."""
        return [(sequence, sequence) for _, sequence, _ in self.parked_lines()]

    def take(self) -> bool:
        """The next safe entry."""
        waiting = self._replica.to_apply
        if not waiting or not self.may_apply(waiting[0]):
            return False
        entry = waiting[0]
        kind = entry.run.WhichOneof("kind")
        done = entry.last <= self._replica.progress.tracker.applied
        if not done and kind in ("purge", "topology") and not self._change(entry, kind):
            return False
        waiting.popleft()
        self._replica.to_apply_bytes -= entry.size
        if done:
            return True
        if kind == "enqueues":
            self._enqueue(entry)
        else:
            self._replica.progress.applied(entry.first, entry.last)
        return True

    def may_apply(self, entry: Entry) -> bool:
        """R5: nothing is applied that is not safe."""
        return entry.last <= self._replica.progress.safe

    def _change(self, entry: Entry, kind: str) -> bool:
        if kind == "purge":
            what: tuple[Any, ...] = ("purge", entry.run.purge.queue)
            if entry.run.purge.spared:
                what = ("spared", entry.run.purge.queue)
        else:
            what = decode_topology(entry.run.topology.method)
        if self.open or not self.has_brought(entry.first - 1) or not self._site.is_recorded(entry.first) or not self._moved_on(entry.first):
            return False
        if what[0] == "delete":
            for message in self.parked.pop(("", what[1]), ()):
                self._dies(message)
        if what[0] == "spared":
            self._site.sweeper.suspect([(VHOST, what[1])], entry.first)
        else:
            self._site.broker.execute(what)
        return True

    def _dies(self, message: Message) -> None:
        """It waits for room in a queue, and goes with it."""
        self._site.broker.gone.add((message.epoch, message.sequence, self._replica.index.generations.newest, message.key))
        self._replica.progress.applied(message.sequence, message.sequence)

    def _moved_on(self, sequence: int) -> bool:
        """What was rejected before entry `sequence` has left its queue."""
        moving = self._replica.index.filter.moving(VHOST, sequence, self.parked_sequences())
        for target, _ in moving:
            self._site.sweeper.kick(target.key)
        return not moving

    def _enqueue(self, entry: Entry) -> None:
        self._replica.barrier.published(entry.last)
        exchange, key, number = decode_publish(entry.run.enqueues.frames)
        epoch = self._replica.node.log.epoch_at(entry.first)
        message = Message(entry.first, epoch, exchange, key, number)
        if self.skips(message):
            for queue in message.queues:
                self._replica.index.filter.queue(queue).skipped(message.sequence, message.sequence)
            self._replica.progress.applied(message.sequence, message.sequence)
        elif (exchange, key) in self.parked:
            self.parked[exchange, key].append(message)
        else:
            self._send(message)

    def skips(self, message: Message) -> bool:
        return self._replica.index.filter.may_skip(message.queues, message.sequence)

    def _send(self, message: Message) -> None:
        self.open.append(message)
        stamp = (message.epoch, message.sequence, self._replica.index.generations.newest)
        self._pipe.inbox.append(("publish", message.exchange, message.key, stamp, message.number))

    def reply(self) -> bool:
        """The broker's oldest answer."""
        if not self._pipe.outbox:
            return False
        reply = self._pipe.outbox.popleft()
        if reply[0] == "confirm":
            message = self.open.popleft()
            if reply[2]:
                self._replica.progress.applied(message.sequence, message.sequence)
            else:
                self.refused(message)
        elif reply[0] == "failed":
            unanswered, self.open = self.open, deque()
            failed = self.resends_answered
            for message in unanswered:
                if message.exchange and message.exchange not in self._site.broker.exchanges:
                    failed = True
                elif failed and not self.skips(message):
                    self._send(message)
                    continue
                self._replica.progress.applied(message.sequence, message.sequence)
        return True

    def refused(self, message: Message) -> None:
        """A full queue: it is tried again until it is in, or until nobody needs it."""
        parked = self.parked.setdefault((message.exchange, message.key), deque())
        parked.append(message)
        if len(parked) > 1 and message.sequence < parked[-2].sequence:
            self.parked[message.exchange, message.key] = deque(sorted(parked))
        self._site.sweeper.kick(message.queues[0] if message.queues else None)

    def retry(self) -> bool:
        """What is parked is tried again, a route at a time."""
        for route, parked in self.parked.items():
            if any((m.exchange, m.key) == route for m in self.open):
                continue
            del self.parked[route]
            for message in parked:
                if self.skips(message):
                    self._replica.progress.applied(message.sequence, message.sequence)
                elif any(self._replica.barrier.has_died(queue, message.sequence) for queue in message.queues):
                    self._dies(message)
                else:
                    self._send(message)
            return True
        return False


class Removed(NamedTuple):
    sequence: int
    generation: int
    deaths: Deaths


class Sweeper:
    """One pass at a time, over one queue."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._replica = site.replica
        self._kicked: set[tuple[str, str]] = set()
        self.suspects: dict[tuple[str, str], int] = {}  # to be gone through as a whole, and the entry up to which all must be applied before
        self.stopping = False
        self._target: QueueFilter | None = None
        self._pipe: Pipe

    def kick(self, queue: tuple[str, str] | None) -> None:
        if queue is None:
            self._kicked.update(f.key for f in self._replica.index.filter.queues() if f.due.count(EVERYTHING))
        else:
            self._kicked.add(queue)

    def suspect(self, queues: Iterable[tuple[str, str]], upto: int) -> None:
        for queue in queues:
            self.suspects[queue] = max(upto, self.suspects.get(queue, 0))

    @property
    def at_rest(self) -> bool:
        return self._target is None

    def has_work(self) -> bool:
        """Something could be found now."""
        applied = self._replica.progress.tracker.applied
        return any(applied >= upto for upto in self.suspects.values()) or any(t.due.count(applied) for t in self._replica.index.filter.queues())

    def step(self, pick: int) -> bool:
        """Begins a pass over some queue, or goes on with the one under way."""
        if self._target is not None:
            return self._go_on(self._target)
        known = self._replica.index.filter
        queues = [*known.queues(), *(known.queue(key) for key in sorted(self.suspects) if known.find(key) is None)]
        if self.stopping or self._replica.active or not queues:
            return False
        return self._begin(queues[pick % len(queues)], NARROW)

    def _begin(self, target: QueueFilter, window: int) -> bool:
        applied = self._replica.progress.tracker.applied
        kicked = target.key in self._kicked
        self._kicked.discard(target.key)
        self._upto = EVERYTHING if kicked else applied
        # A queue may be full of older copies of what is published again, and take nothing more until they are gone.
        self._whole_from = self.suspects.get(target.key)
        self._whole = self._whole_from is not None and (kicked or applied >= self._whole_from)
        if not target.due.count(self._upto) and not self._whole:
            return False
        self._target, self._window = target, window
        self._expected = target.due.expected(applied)
        self._undecided: set[tuple[int, str]] = set()
        self._removed: list[Removed] = []
        self._flowing: list[Removed] = []
        self._acks: list[int] = []
        self._kept = 0
        self._met_since_count = False
        self._asked = self._closing = False
        self._missed: bool | None = None
        self._pipe = self._site.broker.connect()
        self._pipe.inbox.append(("consume", target.name, window))
        return True

    def _go_on(self, target: QueueFilter) -> bool:
        pipe = self._pipe
        if self._closing:
            if not pipe.closed:
                return False
            self._target = None
            if self._missed:
                target.end_pass(self._expected, self._undecided)
                if self._whole and self.suspects[target.key] == self._whole_from:
                    del self.suspects[target.key]
            elif self._missed is None and self._window == NARROW and self._kept >= NARROW and not self.stopping:
                self._begin(target, WIDE)
            return True
        if pipe.outbox:
            self._take(target, pipe.outbox.popleft())
            return True
        if self._removed and not self._flowing:
            for tag in self._acks:
                pipe.inbox.append(("ack", tag))
            self._acks = []
            self._flowing, self._removed = self._removed, []
            pipe.inbox.append(("flow",))
        elif self._flowing:
            return False
        elif self.stopping or not (self._whole or target.due.count(self._upto)):
            self._close(False)
        elif self._kept >= self._window:
            self._close(None)
        elif not self._asked and not pipe.inbox:
            self._asked, self._met_since_count = True, False
            pipe.inbox.append(("count", target.name))
        else:
            return False
        return True

    def _take(self, target: QueueFilter, reply: tuple[Any, ...]) -> None:
        match reply:
            case ("deliver", tag, _, copy):
                self._met_since_count = True
                verdict = self.judge(target, copy)
                if verdict is Verdict.ACK:
                    self._acks.append(tag)
                elif verdict is Verdict.REJECT:
                    self._pipe.inbox.append(("reject", tag))
                else:
                    self._kept += 1
                    if verdict is Verdict.HOLD:
                        self._undecided.add((copy.sequence, origin_of(copy.deaths) or target.name))
                        target.met(copy.sequence, copy.generation, copy.deaths)
                    return
                self._removed.append(Removed(copy.sequence, copy.generation, copy.deaths))
            case ("flowed",):
                for one in self._flowing:
                    target.gone(*one)
                self._flowing = []
            case ("counted", ready, others):
                self._asked = False
                if not self._met_since_count and not ready and not others:
                    self._close(True)
                elif others:
                    self._close(False)
            case _:  # the queue is not there, or no longer
                self._close(True)

    def judge(self, target: QueueFilter, copy: Copy) -> Verdict:
        return target.sweeping_verdict(copy.sequence, copy.generation, copy.deaths)

    def _close(self, seen: bool | None) -> None:
        self._missed, self._closing = seen, True
        self._pipe.inbox.append(("close",))
