"""A renewal while clients go on (R17), from a seed: one log, one broker's queues, publishers, consumers that ack, reject and give back, and a primary
that is killed in the middle: its sidecar goes on, or a backup is promoted, whose queues are what the log says, but that some of what was rejected has
still to leave its queue: the door rejects it when it meets it.

The real `Passes` and `Rounds` decide. `QueuePause` and `Renewal` are done here in their steps, with clients between any two steps. What
is appended is safe at once: what may be lost before that is for the other simulations. Checked: every consumer sees the messages of each publisher in
order; nothing is lost and nothing settled comes again; and when the renewal is over, the log from its CHECKPOINT on holds all that is live.
"""

from __future__ import annotations

import random
import sys
from bisect import insort
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass

from lrq_ha.replication.renewal_progress import Passes, Rounds

VHOST = "/"
FAMILY = {"a": "a", "b": "bd", "d": "bd", "w": "wr", "r": "wr"}
DEAD_LETTERS = {"b": "d", "w": "r", "r": "w"}  # r by expiry
ROUTES = (("a",), ("b",), ("a", "b"), ("w",))  # those of two are an exchange's
WINDOW, KEPT_MAX = 2, 4
PUBLISHERS, CONSUMERS = 3, 4


class Wrong(AssertionError):
    """A promise is broken."""


@dataclass(eq=False)
class Copy:
    """A message in a queue or held. `moved`: not by a consumer since the last publish of it."""

    sequence: int
    number: int
    publisher: int
    visit: int = 0
    place: int = 0

    def __lt__(self, other: Copy) -> bool:
        return self.place < other.place


class Life:
    """One renewal from beginning to end.

    Args:
        seed: Decides everything.
        off: The part of the rules that is left out.
    """

    def __init__(self, seed: int, off: str = "", steps: int = 4_000) -> None:
        self.random = random.Random(seed)
        self.expires, self.rejects = self.random.choice((0.05, 0.3)), self.random.choice((0.5, 0.9))  # how often, and how far up
        self.off = off
        self.steps = steps
        self.log: list[tuple[object, ...]] = [()]  # entry n at n
        self.queues: dict[str, list[Copy]] = {name: [] for name in FAMILY}
        self.done: set[tuple[str, int, int]] = set()  # (queue, entry, visit) that was acked or rejected
        self.late: set[tuple[str, int, int]] = set()  # of these, what was rejected, and is in its queue all the same
        self.held: list[tuple[int, str, Copy]] = []
        self.under_way: list[tuple[str, Copy]] = []  # publishes that are in the log, on their way
        self.moving: set[str] = set()
        self.paused: set[str] = set()
        self.passes = Passes()
        self.mover: Iterator[None] | None = None
        self.by_mover: list[Copy] = []
        self.over = False
        self.checkpoint = 0
        self.places = self.numbers = self.crashes = self.promotions = 0
        self.seen: dict[tuple[str, int], int] = {}  # by queue and publisher: the last number that came for the first time
        self.given: set[tuple[str, int]] = set()
        self.live: Counter[tuple[str, int]] = Counter()  # (family, number) that is not acked
        self.publishes = True

    # ---- the log and the broker --------------------------------------------------------------------------------------

    def append(self, *entry: object) -> int:
        self.log.append(entry)
        return len(self.log) - 1

    def put(self, queue: str, copy: Copy) -> None:
        self.places += 1
        copy.place = self.places
        self.queues[queue].append(copy)

    def key(self, queue: str) -> tuple[str, str]:
        return VHOST, queue

    def take(self, queue: str) -> Copy | None:
        """The head of a queue; what is done with, and is there all the same, goes on the way."""
        ready = self.queues[queue]
        while ready:
            copy = ready.pop(0)
            if (queue, copy.sequence, copy.visit) not in self.done - self.late:
                return copy
        return None

    def moves_on(self, queue: str, copy: Copy) -> bool:
        """Whether this one was rejected: then it is now, by whoever has met it."""
        key = (queue, copy.sequence, copy.visit)
        if key not in self.late:
            return False
        self.late.discard(key)
        self.die(queue, copy)
        return True

    # ---- clients -----------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        queues = self.random.choice(ROUTES)
        if self.off != "publishes do not wait" and self.moving.intersection(queues):
            return
        self.numbers += 1
        publisher = self.numbers % PUBLISHERS
        sequence = self.append("publish", queues, self.numbers, publisher)
        for queue in queues:
            self.live[FAMILY[queue], self.numbers] += 1
            self.under_way.append((queue, Copy(sequence, self.numbers, publisher)))
            if len(queues) == 1:
                self.passes.came(self.key(queue))

    def land(self, most: int) -> None:
        for queue, copy in self.under_way[:most]:
            self.put(queue, copy)
        del self.under_way[:most]

    def consume(self) -> None:
        queue = self.random.choice("abdw")
        if queue in self.paused or sum(q == queue for _, q, _ in self.held) >= 3:
            return
        copy = self.take(queue)
        if copy is None:
            return
        if self.moves_on(queue, copy):
            self.passes.stirred(copy.sequence)
            return
        if not self.live[FAMILY[queue], copy.number]:
            raise Wrong(f"m{copy.number} comes from {queue} again")
        self.held.append((self.random.randrange(CONSUMERS), queue, copy))
        if copy.visit == 0 and queue != "d" and (queue, copy.number) not in self.given:
            self.given.add((queue, copy.number))
            if self.seen.get((queue, copy.publisher), 0) > copy.number:
                raise Wrong(f"m{copy.number} comes from {queue} after m{self.seen[queue, copy.publisher]}")
            self.seen[queue, copy.publisher] = copy.number

    def settle(self) -> None:
        if not self.held:
            return
        _, queue, copy = self.held.pop(self.random.randrange(len(self.held)))
        what = self.random.random()
        if what < 0.2:
            self.passes.stirred(copy.sequence)
            insort(self.queues[queue], copy)
        elif what < self.rejects and queue in DEAD_LETTERS:
            self.passes.stirred(copy.sequence)
            self.finish("reject", queue, copy)
            self.die(queue, copy)
        else:
            self.finish("ack", queue, copy)
            self.live[FAMILY[queue], copy.number] -= 1

    def finish(self, what: str, queue: str, copy: Copy) -> None:
        self.append(what, queue, copy.sequence, copy.visit)
        self.done.add((queue, copy.sequence, copy.visit))
        self.passes.left(self.key(queue), (copy.sequence, copy.sequence))

    def die(self, queue: str, copy: Copy) -> None:
        self.put(DEAD_LETTERS[queue], Copy(copy.sequence, copy.number, copy.publisher, copy.visit + (queue == "w")))

    def expire(self) -> None:
        copy = self.take("r")
        if copy is not None:
            self.die("r", copy)

    # ---- the renewal -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.checkpoint = self.append("checkpoint")
        self.passes.begin(self.checkpoint)
        self.mover = self.renew()

    def renew(self) -> Iterator[None]:
        while any(copy.sequence <= self.checkpoint for _, copy in self.under_way):
            yield
        rounds = Rounds(self.passes, 1_000)
        for queue in FAMILY:
            if self.key(queue) in self.passes.unfinished():
                yield from self.visit(queue)
        while not rounds.done:
            found = False
            order = ["b", "d", "w", "r", "a"] if self.random.random() < 0.7 else self.random.sample("abdwr", 5)
            for queue in order:
                found |= yield from self.visit(queue)
            rounds.ended(found=found)
            if self.off == "one look is enough":
                break
        self.passes.end(self.append("renewed"))
        self.over = True

    def visit(self, queue: str) -> Generator[None, None, bool]:
        if self.off != "consumers go on":
            self.paused.add(queue)
        while self.off not in ("what is held is not awaited", "consumers go on") and any(q == queue for _, q, _ in self.held):
            yield
        self.moving.add(queue)
        while any(q == queue for q, _ in self.under_way):  # the barrier
            self.land(1)
        mark = self.passes.unfinished().get(self.key(queue), 0)
        found = False
        if not mark and self.passes.begun(self.key(queue)):
            if len(self.queues[queue]) > KEPT_MAX and queue in "aw" and len(self.queues[queue]) == self.passes.holds(self.key(queue)):
                self.paused.discard(queue)
                self.moving.discard(queue)
                return False
            if len(self.queues[queue]) <= KEPT_MAX:
                found = yield from self.look(queue)
                if not found:
                    self.paused.discard(queue)
                    self.moving.discard(queue)
                    return False
        if not mark or self.off == "a later mark":
            mark = self.append("moving", queue, False)
            self.passes.noted(mark, self.key(queue), done=False)
        found |= yield from self.move(queue, self.checkpoint + 1 if self.off == "only what is old is moved" else mark)
        self.passes.noted(self.append("moving", queue, True), self.key(queue), done=True)
        self.paused.discard(queue)
        self.moving.discard(queue)
        return found

    def look(self, queue: str) -> Generator[None, None, bool]:
        self.by_mover = kept = []
        found = False
        while not found and (copy := self.take(queue)) is not None:
            kept.append(copy)
            found = copy.sequence <= self.checkpoint
            yield
        for copy in kept:
            insort(self.queues[queue], copy)
        self.by_mover = []
        return found

    def move(self, queue: str, mark: int) -> Generator[None, None, bool]:
        left, found = len(self.queues[queue]), False
        self.by_mover = kept = []
        while left > 0:
            window = [copy for copy in (self.take(queue) for _ in range(min(WINDOW, left))) if copy is not None]
            if not window:
                break
            kept += window
            for copy in window:
                left -= copy.sequence < mark
                found |= copy.sequence <= self.checkpoint
                if copy.sequence >= mark:
                    continue
                if self.moves_on(queue, copy):
                    kept.remove(copy)
                    continue
                sequence = self.append("publish", (queue,), copy.number, copy.publisher)
                self.under_way.append((queue, Copy(sequence, copy.number, copy.publisher)))
                self.passes.came(self.key(queue))
                if copy.visit:
                    self.given.add((queue, copy.number))
                self.finish("ack", queue, copy)
                kept.remove(copy)
                if self.random.random() < 0.1:  # its ack is lost if the sidecar is killed now: it is there, and done with
                    insort(self.queues[queue], copy)
            yield
        for copy in kept:
            insort(self.queues[queue], copy)
        self.by_mover = []
        while any(q == queue for q, _ in self.under_way):
            yield
        return found

    # ---- faults ------------------------------------------------------------------------------------------------------

    def crash(self, *, promotes: bool) -> None:
        """The primary is killed, and its sidecar goes on: what is in the log is published, what was held goes back. `promotes`: a backup does."""
        self.crashes += 1
        self.land(len(self.under_way))
        for queue in self.moving:
            for copy in self.by_mover:
                insort(self.queues[queue], copy)
        self.by_mover = []
        for _, queue, copy in self.held:
            self.passes.stirred(copy.sequence)
            insort(self.queues[queue], copy)
        self.held.clear()
        if promotes:
            self.promotions += 1
            self.passes.count_no_more()
            queues = self.replay(1)
            self.queues = {name: [] for name in FAMILY}
            self.late.clear()
            for name, dead in (("b", "d"), ("w", "r")):
                for copy in [copy for copy in queues[dead] if self.random.random() < 0.3]:
                    if (name, copy.sequence, copy.visit - (name == "w")) not in self.done:
                        continue  # published here by the renewal: it was not rejected there
                    queues[dead].remove(copy)
                    copy.visit -= name == "w"
                    self.late.add((name, copy.sequence, copy.visit))
                    queues[name].insert(0, copy)
            for name, copies in queues.items():
                for copy in copies:
                    self.put(name, copy)
        self.paused = {queue for _, queue in self.passes.unfinished()}
        self.moving = set(self.paused)
        if self.off == "a queue that is half done is open":
            self.paused, self.moving = set(), set()
        self.mover = self.renew()

    # ---- life --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        r = self.random
        for _ in range(r.randint(5, 60)):
            self.one_step(r)
        self.begin()
        for step in range(self.steps):
            if self.over:
                break
            self.publishes = step < self.steps // 2
            self.one_step(r)
            if r.random() < 0.6:
                try:
                    next(self.mover)  # type: ignore[arg-type]
                except StopIteration:
                    pass
            if r.random() < 0.004:
                self.crash(promotes=r.random() < 0.4)
        if not self.over:
            raise Wrong("the renewal does not come to its end")
        self.check()

    def one_step(self, r: random.Random) -> None:
        steps: list[tuple[float, Callable[[], object]]] = [
            (0.3 if self.publishes else 0.0, self.publish), (0.5, self.consume), (0.5, self.settle), (self.expires, self.expire),
            (0.6, lambda: self.land(r.randint(1, 3))),
        ]  # fmt: skip
        for chance, step in steps:
            if r.random() < chance:
                step()

    def check(self) -> None:
        self.land(len(self.under_way))
        for _, queue, copy in self.held:
            insort(self.queues[queue], copy)
        self.held.clear()
        there = self.contents(self.queues)
        if +self.live != there:
            raise Wrong(f"lost {+self.live - there}, too many {there - +self.live}")
        newcomer = self.replay(self.checkpoint + 1)
        found = self.contents(newcomer)
        if found != there:
            raise Wrong(f"the newcomer lacks {there - found}, and has {found - there} too many")
        for queue in "ab":  # a dead letter and a message that is moved at the same moment may change places
            mine, its = ([c.number for c in self.queues_of(of, queue)] for of in (self.queues, newcomer))
            if mine != its:
                raise Wrong(f"in {queue} there is {mine}, at the newcomer {its}")

    def queues_of(self, queues: dict[str, list[Copy]], name: str) -> list[Copy]:
        return [copy for copy in queues[name] if (name, copy.sequence, copy.visit) not in self.done]

    def contents(self, queues: dict[str, list[Copy]]) -> Counter[tuple[str, int]]:
        found = Counter((FAMILY[name], copy.number) for name in queues for copy in self.queues_of(queues, name))
        if queues is self.queues:
            found.update((FAMILY[name], c.number) for name in queues for c in queues[name] if (name, c.sequence, c.visit) in self.late)
        return found

    def replay(self, first: int) -> dict[str, list[Copy]]:
        """The queues of a node whose log begins with entry `first`: 1, or what follows the CHECKPOINT."""
        queues: dict[str, list[Copy]] = {name: [] for name in FAMILY}
        for sequence, entry in enumerate(self.log[first:], first):
            match entry:
                case ("publish", names, number, publisher):
                    for name in names:  # type: ignore[attr-defined]
                        queues[name].append(Copy(sequence, number, publisher))  # type: ignore[arg-type]
                case ("ack" | "reject" as what, str(name), at, int(visit)):
                    copy = None
                    for known in FAMILY[name]:
                        copy = next((c for c in queues[known] if c.sequence == at), copy)
                        queues[known] = [c for c in queues[known] if c.sequence != at]
                    if copy is not None and what == "reject":
                        queues[DEAD_LETTERS[name]].append(Copy(copy.sequence, copy.number, copy.publisher, visit + (name == "w")))
                case _:
                    pass
        return queues


def run(seed: int, off: str = "") -> Life:
    """One life; what is wrong tells its seed."""
    life = Life(seed, off)
    try:
        life.run()
    except Wrong as error:
        raise Wrong(f"seed {seed}: {error}; replay: python tests/simulation/renewing.py {seed}") from error
    return life


def run_all(seeds: Iterable[int], off: str = "") -> list[Life]:
    """Several of them."""
    return [run(seed, off) for seed in seeds]


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        run(int(argument))
