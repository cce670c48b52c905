"""A broker small enough to be stepped: queues with contents, connections whose commands and replies are under way, and what RabbitMQ does by itself.

Rules:
- A connection is two FIFOs. What a killed sidecar had written (`abandoned`) may still be carried out, until the broker closes the connection.
- Only the head of a queue expires. What a consumer holds neither expires nor counts for the length; given back it takes its old place, and is flagged
  as redelivered, whoever had it.
- A dead letter keeps its line: the queue that its publish was routed to first. Expiry alone that leads back to a queue ends it, as in RabbitMQ.
- A crash brings held messages back, may lose publishes whose confirm nobody has read, and may bring back what had been acked just before.
- `gone` is what this broker removed by itself or by a purge or deletion: (epoch, sequence, generation, line). Not what somebody rejects from a queue
  without dead letters: who does so says that its line is done.
"""

from __future__ import annotations

import random
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lrq_ha.replication.dead_letters import Deaths

NEVER = float("inf")
PARTIAL = "partial tx completion"


class Arguments(NamedTuple):
    """Of a queue. `dead_letters`: where its dead letters go ("": nowhere). `limit`: most ready messages (0: none)."""

    ttl_s: float = 0.0
    dead_letters: str = ""
    limit: int = 0
    rejects: bool = False  # overflow: reject-publish, else drop-head

    @property
    def plain(self) -> bool:
        """It does nothing by itself."""
        return not (self.ttl_s or self.dead_letters or self.limit)


@dataclass(eq=False, slots=True)
class Copy:
    """A message in a queue. `died`: the queues it left by expiry or for want of room since it was last rejected."""

    epoch: int
    sequence: int
    generation: int
    number: int
    line: str
    deaths: Deaths = ()
    died: tuple[str, ...] = ()
    place: int = 0
    expires_at: float = NEVER
    redelivered: bool = False

    def __lt__(self, other: Copy) -> bool:
        return self.place < other.place

    @property
    def key(self) -> tuple[int, int, str]:
        """What it is a copy of, on every node: entry and line."""
        return self.epoch, self.sequence, self.line

    def __str__(self) -> str:
        return f"{self.epoch >> 8}.{self.sequence}/{self.generation} m{self.number} line {self.line}{f' {self.deaths}' if self.deaths else ''}"


class Queue:
    """Ready messages in order of their places."""

    __slots__ = ("arguments", "name", "ready")

    def __init__(self, name: str, arguments: Arguments) -> None:
        self.name = name
        self.arguments = arguments
        self.ready: list[Copy] = []


@dataclass(eq=False, slots=True)
class Pipe:
    """A connection with one channel. `publishes`: a disk alarm blocks it."""

    inbox: deque[tuple[Any, ...]] = field(default_factory=deque)
    outbox: deque[tuple[Any, ...]] = field(default_factory=deque)
    held: dict[int, tuple[str, Copy]] = field(default_factory=dict)
    consumes: dict[str, int] = field(default_factory=dict)  # queue -> prefetch
    publishes: bool = False
    abandoned: bool = False
    closed: bool = False
    published: int = 0
    delivered: int = 0


class Broker:
    """See above. `now` is set by whoever drives it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.alarm = False
        self.queues: dict[str, Queue] = {}
        self.exchanges: dict[str, list[str]] = {}
        self.pipes: list[Pipe] = []
        self.gone: set[tuple[int, int, int, str]] = set()
        self.say: Callable[[str], None] | None = None  # for a trace
        self.on_purged: Callable[[Queue, Copy], None] = lambda _queue, _copy: None  # a purge or deletion takes it
        self._places = 0
        self._acked: list[tuple[str, Copy]] = []

    # ---- what is in it -----------------------------------------------------------------------------------------------

    def copies(self) -> Iterator[tuple[str, Copy]]:
        """(queue, copy) of all messages, held ones too."""
        for queue in self.queues.values():
            for copy in queue.ready:
                yield queue.name, copy
        for pipe in self.pipes:
            yield from pipe.held.values()

    def route(self, exchange: str, key: str) -> list[str]:
        """The queues that a publish goes to."""
        return [q for q in (self.exchanges.get(exchange, []) if exchange else [key]) if q in self.queues]

    # ---- connections -------------------------------------------------------------------------------------------------

    def connect(self) -> Pipe:
        pipe = Pipe()
        self.pipes.append(pipe)
        return pipe

    def close(self, pipe: Pipe) -> None:
        """The connection ends here: what it holds goes back."""
        pipe.closed = True
        pipe.inbox.clear()
        pipe.consumes.clear()
        self._give_back(pipe)
        self.pipes.remove(pipe)

    def _give_back(self, pipe: Pipe) -> None:
        held, pipe.held = pipe.held, {}
        for name, copy in held.values():
            self._requeue(name, copy)

    def _requeue(self, name: str, copy: Copy) -> None:
        queue = self.queues.get(name)
        if queue is None:
            self._gone(copy)
            return
        copy.redelivered = True
        insort(queue.ready, copy)
        self._trim(queue)

    def is_blocked(self, pipe: Pipe) -> bool:
        return self.alarm and pipe.publishes

    def step(self, pipe: Pipe) -> None:
        """Carries out the oldest command of a connection."""
        command = pipe.inbox.popleft()
        getattr(self, "_on_" + command[0])(pipe, *command[1:])

    def deliver(self, pipe: Pipe, name: str) -> bool:
        """Gives out the head of a queue that the connection consumes; whether there was one and room for it."""
        queue = self.queues.get(name)
        if queue is None or not queue.ready:
            return False
        self._expire(queue)
        if not queue.ready or sum(n == name for n, _ in pipe.held.values()) >= pipe.consumes[name]:
            return False
        copy = queue.ready.pop(0)
        pipe.delivered += 1
        pipe.held[pipe.delivered] = (name, copy)
        pipe.outbox.append(("deliver", pipe.delivered, name, copy))
        return True

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _on_publish(self, pipe: Pipe, exchange: str, key: str, stamp: tuple[int, int, int], number: int) -> None:
        pipe.publishes = True
        pipe.published += 1
        if exchange and exchange not in self.exchanges:
            self._on_fail(pipe, f"no exchange {exchange}")
            return
        names = self.route(exchange, key)
        if not names:
            self.gone.add((*stamp, key))
        full = [n for n in names if self._is_full(self.queues[n])]
        copies = [Copy(*stamp, number, name) for name in names if name not in full]
        for copy in copies:
            self._put(self.queues[copy.line], copy)
        pipe.outbox.append(("confirm", pipe.published, not full, copies))

    def _on_commit(self, pipe: Pipe, publishes: list[tuple[str, str, tuple[int, int, int], int]], settled: list[tuple[str, int]]) -> None:
        answers: deque[tuple[Any, ...]] = deque()
        answered, pipe.outbox = pipe.outbox, answers
        published = pipe.published
        for publish in publishes:
            self._on_publish(pipe, *publish)
        pipe.outbox, pipe.published = answered, published
        if any(reply[0] == "failed" or not reply[2] for reply in answers):
            self._on_fail(pipe, PARTIAL)
        else:
            for what, tag in settled:
                getattr(self, "_on_" + what)(pipe, tag)
            pipe.outbox.append(("committed", [copy for reply in answers for copy in reply[3]]))

    def _on_ack(self, pipe: Pipe, tag: int) -> None:
        if tag in pipe.held:
            self._acked.append(pipe.held.pop(tag))
            if self.say:
                self.say("{}: {} is acked".format(*self._acked[-1]))

    def _on_reject(self, pipe: Pipe, tag: int) -> None:
        if tag in pipe.held:
            name, copy = pipe.held.pop(tag)
            queue = self.queues.get(name)
            if queue is None:
                self._gone(copy)
            elif queue.arguments.dead_letters:
                self._die(queue, copy, rejected=True)
            elif self.say:
                self.say(f"{name}: {copy} is rejected")

    def _on_requeue(self, pipe: Pipe, tag: int) -> None:
        if tag in pipe.held:
            self._requeue(*pipe.held.pop(tag))

    def _on_consume(self, pipe: Pipe, name: str, prefetch: int) -> None:
        if name in self.queues:
            pipe.consumes[name] = prefetch
        else:
            self._on_fail(pipe, f"no queue {name}")

    def _on_flow(self, pipe: Pipe) -> None:
        pipe.outbox.append(("flowed",))

    def _on_count(self, pipe: Pipe, name: str) -> None:
        queue = self.queues.get(name)
        others = sum(name in p.consumes for p in self.pipes if p is not pipe)
        pipe.outbox.append(("counted", len(queue.ready) if queue else 0, others))

    def _on_topology(self, pipe: Pipe, what: tuple[Any, ...]) -> None:
        self.execute(what)
        pipe.outbox.append(("done",))

    def _on_close(self, pipe: Pipe) -> None:
        self.close(pipe)

    def _on_fail(self, pipe: Pipe, why: str) -> None:
        """The broker closes the channel: what it has not answered stays without an answer. That the connection is closed is not for the channel."""
        pipe.inbox = deque(command for command in pipe.inbox if command[0] == "close")
        pipe.consumes.clear()
        pipe.outbox = deque(reply for reply in pipe.outbox if reply[0] not in ("confirm", "committed"))
        self._give_back(pipe)
        pipe.outbox.append(("failed", why))

    def execute(self, what: tuple[Any, ...]) -> None:
        """A declaration or purge: its name, then what it names, as in the cases below."""
        if self.say:
            self.say(f"{what}")
        match what:
            case ("declare", name, *arguments):
                self.queues.setdefault(name, Queue(name, Arguments(*arguments)))
            case ("delete", name):
                self._empty(self.queues.pop(name, None))
                self._acked = [(queue, copy) for queue, copy in self._acked if queue != name]  # one of the same name begins with nothing
                for bound in self.exchanges.values():
                    if name in bound:
                        bound.remove(name)
                for pipe in self.pipes:
                    if pipe.consumes.pop(name, None):
                        pipe.outbox.append(("cancelled", name))
                    for tag in [t for t, (n, _) in pipe.held.items() if n == name]:
                        self._gone(pipe.held.pop(tag)[1])
            case ("purge", name):
                self._empty(self.queues.get(name))
            case ("exchange", name):
                self.exchanges.setdefault(name, [])
            case ("drop", name):
                self.exchanges.pop(name, None)
            case ("bind", exchange, name):
                targets = self.exchanges.get(exchange)
                if targets is not None and name in self.queues and name not in targets:
                    targets.append(name)
            case ("unbind", exchange, name):
                bound = self.exchanges.get(exchange, [])
                if name in bound:
                    bound.remove(name)
            case _:
                raise ValueError(f"no such declaration: {what}")

    def _empty(self, queue: Queue | None) -> None:
        if queue is not None:
            for copy in queue.ready:
                self.on_purged(queue, copy)
                self._gone(copy)
            queue.ready.clear()

    # ---- what it does by itself --------------------------------------------------------------------------------------

    def _gone(self, copy: Copy) -> None:
        if self.say:
            self.say(f"{copy} is gone")
        self.gone.add((copy.epoch, copy.sequence, copy.generation, copy.line))

    @staticmethod
    def _is_full(queue: Queue) -> bool:
        return queue.arguments.rejects and len(queue.ready) >= queue.arguments.limit > 0

    def _put(self, queue: Queue, copy: Copy) -> None:
        self._places += 1
        copy.place = self._places
        copy.expires_at = self.now + queue.arguments.ttl_s if queue.arguments.ttl_s else NEVER
        queue.ready.append(copy)
        if self.say:
            self.say(f"{queue.name}: {copy} is put in")
        self._trim(queue)

    def _trim(self, queue: Queue) -> None:
        limit = queue.arguments.limit
        while limit and not queue.arguments.rejects and len(queue.ready) > limit:
            self._die(queue, queue.ready.pop(0))

    def _die(self, queue: Queue, copy: Copy, *, rejected: bool = False) -> None:
        target = self.queues.get(queue.arguments.dead_letters)
        died = () if rejected else (*copy.died, queue.name)
        if target is None or target.name in died or self._is_full(target):
            self._gone(copy)
            return
        counts = dict(copy.deaths)
        counts[queue.name] = counts.get(queue.name, 0) + 1
        self._put(target, Copy(*copy.key[:2], copy.generation, copy.number, copy.line, tuple(counts.items()), died))

    def _expire(self, queue: Queue) -> None:
        while queue.ready and queue.ready[0].expires_at <= self.now:
            self._die(queue, queue.ready.pop(0))

    def expire(self) -> None:
        """What is due expires."""
        for queue in self.queues.values():
            if queue.ready and queue.ready[0].expires_at <= self.now:
                self._expire(queue)

    # ---- faults ------------------------------------------------------------------------------------------------------

    def synced(self) -> None:
        """What was acked is on its disk."""
        self._acked.clear()

    def crash(self, r: random.Random) -> None:
        """Its process dies, and comes up again with what is on its disk."""
        lost: dict[int, Copy] = {}  # by their id, and kept: else what dies of them now might be a new copy with the same id
        for pipe in list(self.pipes):
            for reply in pipe.outbox:
                if reply[0] in ("confirm", "committed"):
                    lost |= {id(copy): copy for copy in reply[-1] if r.random() < 0.5}
            self.close(pipe)
            pipe.outbox.clear()
        for queue in self.queues.values():
            queue.ready = [copy for copy in queue.ready if id(copy) not in lost]
        for name, copy in self._acked:
            if r.random() < 0.3 and id(copy) not in lost and name in self.queues:
                self._requeue(name, copy)
        self._acked.clear()
