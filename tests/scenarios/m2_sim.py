"""Brokers and sidecars small enough to be driven step by step, around the real filter, generations, tracker and record.

`OneNode` has one queue and is killed; bytes of killed sidecars land at any time, broker acks may be lost (design model m2_filter).
`Pair` has a primary A and a backup B that applies late, sweeps and is promoted; queues dead-letter: q -> d -> q, r -> d
(design model m2_moves; the step r -> d is ours). Attributes in capitals switch one rule off each. `Violation` is a broken promise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from lrq_ha.replication.applied import AppliedRecord, AppliedTracker, Generations
from lrq_ha.replication.dead_letters import Deaths, origin_of, visit_of
from lrq_ha.replication.delivery_filter import DeliveryFilter
from lrq_ha.replication.queue_filter import Kind, Verdict

VHOST = "/"
Q = (VHOST, "q")


class Violation(Exception):
    """A promise is broken: G2, G3 or a loss."""


class NotNow(Exception):
    """The step is not possible in this state."""


@dataclass(eq=False)
class Copy:
    """A copy of message `number` in the queue, stamped by `generation`; out: delivered and not acked."""

    number: int
    generation: int
    out: bool = False


class OneNode:
    """One node with one queue. Every entry is safe at once. Messages are numbered from 0; the log holds ("E", n) and ("D", n)."""

    COUNTS = True  # R8: a copy counts only with the right generation
    FORGETS = False  # pending operations go when the copy is seen to go (R9 allows it; the real filter never does)
    RECORD_HAS_OPERATIONS = True
    RECORD_HAS_GENERATIONS = True
    NUMBERED_BY_OPENS = True

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.queue: list[Copy] = []
        self.late: list[list[tuple[int, int]]] = []  # per killed sidecar: (number, generation) on their way, in order
        self.opens = 0
        self.up = False
        self.record = AppliedRecord(0, None, (), (), b"")
        self.generations = Generations()
        self.filter = DeliveryFilter(self.generations)
        self._export()
        self.restart()
        self.record = replace(self.record, generations=self.generations.table)

    # The sidecar.

    def restart(self) -> list[int]:
        """Reads the record and the log behind R, publishes again what is live there. Returns those messages."""
        self._need(not self.up)
        self.opens += 1
        table = self.record.generations if self.RECORD_HAS_GENERATIONS else ((0, 1),) if self.opens > 1 else ()
        self.generation = self.opens if self.NUMBERED_BY_OPENS else max([g for _, g in self.record.generations], default=0) + 1
        self.generations = Generations(table)
        self.generations.opened(self.record.applied, self.generation)
        if self.NUMBERED_BY_OPENS:  # the record is written with the new generation before anything is published
            self.record = replace(self.record, generations=self.generations.table)
        self.filter = DeliveryFilter.restored(self.generations, self.record.queues, self.record.refused)
        self.tracker = AppliedTracker(self.record.applied)
        self.sock: list[int] = []
        self.acks: list[Copy] = []
        self.up = True
        behind = list(enumerate(self.log, 1))[self.record.applied :]
        for seq, (kind, number) in behind:
            if kind == "D":
                self._note(seq, number)
        for seq, (kind, number) in behind:
            if kind == "E" and self.filter.may_skip([Q], seq):
                self.tracker.mark(seq, seq)
            elif kind == "E":
                self.sock.append(number)
        return list(self.sock)

    def publish(self) -> None:
        """The next message is in the log, safe, and forwarded to the broker."""
        self._need(self.up)
        number = sum(kind == "E" for kind, _ in self.log)
        self.log.append(("E", number))
        self.sock.append(number)

    def write_record(self) -> None:
        self._need(self.up)
        self._export()

    def kill(self, acks_land: bool = False) -> None:
        self._need(self.up)
        self.up = False
        if acks_land:
            self.queue = [copy for copy in self.queue if copy not in self.acks]
        for copy in self.queue:
            copy.out = False
        if self.sock:
            self.late.append([(number, self.generation) for number in self.sock])

    # The broker.

    def land(self) -> None:
        """The oldest publish under way lands and is confirmed."""
        self._need(self.up and bool(self.sock))
        number = self.sock.pop(0)
        self.queue.append(Copy(number, self.generation))
        seq = self.seq(number)
        self.tracker.mark(seq, seq)

    def late_lands(self, which: int = 0) -> None:
        self._need(which < len(self.late))
        self.queue.append(Copy(*self.late[which].pop(0)))
        if not self.late[which]:
            del self.late[which]

    def close_old(self, which: int = 0) -> None:
        """The broker closes a killed sidecar's connection: what had not landed never will."""
        self._need(which < len(self.late))
        del self.late[which]

    def take_ack(self) -> None:
        self._need(self.up and bool(self.acks))
        copy = self.acks.pop(0)
        self.queue.remove(copy)
        self._gone(copy)

    def deliver(self, copy: Copy) -> Verdict:
        """The broker hands a copy to the door."""
        self._need(self.up and copy in self.queue and not copy.out)
        verdict = self.verdict(copy)
        if verdict is Verdict.ACK:
            self.queue.remove(copy)
            self._gone(copy)
            return verdict
        if verdict is not Verdict.GIVE:
            raise AssertionError(f"nothing is ever unsafe or rejected here: {verdict}")
        if ("D", copy.number) in self.log:
            raise Violation(f"G3: message {copy.number} is delivered again, its DEQUEUE was safe")
        if any(other.out and other.number == copy.number for other in self.queue):
            raise Violation(f"G2: message {copy.number} is out twice")
        copy.out = True
        return verdict

    def consumer_acks(self, copy: Copy) -> None:
        """DEQUEUE appended and safe, then the broker's ack is sent."""
        self._need(self.up and copy.out and ("D", copy.number) not in self.log)
        self.log.append(("D", copy.number))
        self._note(len(self.log), copy.number)
        self.acks.append(copy)

    # What is seen.

    def find(self, number: int, generation: int) -> Copy:
        """The first such copy that is not out."""
        for copy in self.queue:
            if (copy.number, copy.generation, copy.out) == (number, generation, False):
                return copy
        raise NotNow

    def seq(self, number: int) -> int:
        return self.log.index(("E", number)) + 1

    def verdict(self, copy: Copy) -> Verdict:
        seq = self.seq(copy.number)
        return self.filter.verdict(Q, seq, self._stamp(copy))

    def check(self) -> None:
        """Each live message has a copy that counts, once everything has landed."""
        if not self.up or self.sock:
            return
        for kind, number in self.log:
            if kind == "E" and ("D", number) not in self.log:
                copies = [copy for copy in self.queue if copy.number == number and (copy.out or self.verdict(copy) is Verdict.GIVE)]
                if not copies:
                    raise Violation(f"lost: message {number} is live and no copy counts")

    # Within.

    def _stamp(self, copy: Copy) -> int:
        return copy.generation if self.COUNTS else self.generations.of(self.seq(copy.number))

    def _note(self, at: int, number: int) -> None:
        seq = self.seq(number)
        self.filter.note(at, Kind.DEQUEUE, Q, (seq, seq), 0, "", sweep=False)
        self.filter.safe(len(self.log))
        self.tracker.mark(at, at)  # the record carries the operation, so R may pass it

    def _gone(self, copy: Copy) -> None:
        seq = self.seq(copy.number)
        self.filter.queue(Q).gone(seq, self._stamp(copy))
        if self.FORGETS and self.generations.counts(seq, self._stamp(copy)):
            self.filter.queue(Q)._done.discard(seq)
            self.filter.queue(Q)._record = None

    def _export(self) -> None:
        queues, refused = self.filter.export() if self.RECORD_HAS_OPERATIONS else DeliveryFilter(self.generations).export()
        applied = self.tracker.applied if self.up else 0
        self.record = AppliedRecord(applied, None, self.generations.table, queues, refused)

    def _need(self, possible: bool) -> None:
        if not possible:
            raise NotNow


class OneNodeWithWindows(OneNode):
    """Remembers, instead of generations, the windows of positions that were published again."""

    COUNTS = False
    FORGETS = True
    FORGET_AT_OPEN = False
    REBUILD = True

    def __init__(self) -> None:
        self.windows: list[frozenset[int]] = []
        self.recorded: list[frozenset[int]] = []
        super().__init__()

    def restart(self) -> list[int]:
        again = super().restart()
        own = frozenset(number for kind, number in self.log[self.record.applied :] if kind == "E")
        self.windows = [*(self.recorded if self.REBUILD else []), own]
        self.recorded = list(self.windows)
        if self.FORGET_AT_OPEN:
            self.forget_windows()
        return again

    def forget_windows(self) -> None:
        self.windows = []

    def verdict(self, copy: Copy) -> Verdict:
        if ("D", copy.number) in self.log and any(copy.number in window for window in self.windows):
            return Verdict.ACK
        return super().verdict(copy)


@dataclass(frozen=True)
class Dying:
    """A copy in `queue`. deaths: its x-death, the first death first; rejected: at least once; stamp: its generation."""

    queue: str
    line: str  # the queue it was published to
    deaths: Deaths = ()
    rejected: bool = False
    stamp: int = 0

    @property
    def visit(self) -> int:
        return visit_of(self.queue, self.deaths)

    def __str__(self) -> str:
        return f"{self.queue}, visit {self.visit}"


class Pair:
    """A primary A and its backup B; one message (entry 1) routed to `route`. Every entry is safe at once."""

    MOVED_IS_LOGGED = True
    PATH_VOIDS = True
    REJECTS_AT_THE_DOOR = True
    KEEPS_AFTER_A_PASS = True
    SKIPS_ONE_ROUTE_ONLY = True
    RECORD_HAS_OPERATIONS = True
    CYCLES_BY_EXPIRY_LIVE = True
    DEAD_LETTERS: ClassVar[dict[str, str]] = {"q": "d", "d": "q", "r": "d"}

    def __init__(self, route: str = "q") -> None:
        self.route = route
        self.log: list[tuple[Kind, str, int, str] | None] = [None]  # the message, then operations (kind, queue, visit, origin)
        self.a = [Dying(queue, queue) for queue in route]
        self.b: list[Dying] = []
        self.finished: set[str] = set()  # lines with a DEQUEUE
        self.filter_a = DeliveryFilter(Generations([(0, 1)]))
        self.promoted = self.door_open = False
        self.opens = 0
        self.record = AppliedRecord(0, None, (), *DeliveryFilter(Generations()).export())
        self.restart()

    # The primary.

    def a_expires(self, copy: Dying) -> None:
        self._need(not self.promoted and copy in self.a and copy.queue in self.DEAD_LETTERS)
        self._replace(self.a, copy, self._die(copy, rejected=False))

    def a_acks(self, copy: Dying) -> None:
        self._operate(Kind.DEQUEUE, copy)
        self.finished.add(copy.line)
        self.a.remove(copy)

    def a_rejects(self, copy: Dying) -> None:
        self._operate(Kind.REJECT, copy)
        self._replace(self.a, copy, self._die(copy, rejected=True))

    def a_is_lost(self) -> None:
        self._need(not self.promoted)
        self.promoted = True

    # The backup.

    def b_applies(self) -> str:
        """The next entry: publishes the message or passes an operation, which was noted when it was appended."""
        seq = self.tracker.applied + 1
        self._need(seq <= len(self.log))
        what = "note"
        if seq == 1:
            queues = [(VHOST, queue) for queue in self.route]
            skip = self.filter.may_skip(queues, 1)
            if not self.SKIPS_ONE_ROUTE_ONLY:
                skip = any(self.filter.may_skip([queue], 1) for queue in queues)
            what = "skip" if skip else "publish"
            for queue in queues:
                if skip:
                    self.filter.queue(queue).skipped(1, 1)
                else:
                    self.b.append(Dying(queue[1], queue[1], stamp=self.generations.newest))
        self.tracker.mark(seq, seq)
        return what

    def b_expires(self, copy: Dying) -> None:
        self._need(copy in self.b and copy.queue in self.DEAD_LETTERS)
        self._replace(self.b, copy, self._die(copy, rejected=False))

    def b_sees(self, copy: Dying) -> Verdict:
        """The sweeper, or the door after the promotion, is handed a copy."""
        self._need(copy in self.b)
        verdict = self.verdict(copy)
        if verdict is Verdict.REJECT and self.door_open and not self.REJECTS_AT_THE_DOOR:
            verdict = Verdict.ACK
        if verdict is Verdict.ACK:
            self.b.remove(copy)
        elif verdict is Verdict.REJECT:
            self._replace(self.b, copy, self._die(copy, rejected=True))
        elif verdict is Verdict.HOLD:
            raise AssertionError("nothing is ever unsafe here")
        elif self.door_open and copy.line in self.finished:
            raise Violation(f"G3: the copy in {copy} is delivered, the DEQUEUE of its line was safe")
        if verdict is not Verdict.GIVE:
            self.filter.queue((VHOST, copy.queue)).gone(1, copy.stamp, copy.deaths)
        return verdict

    def b_sweeps(self, queue: str) -> None:
        """A full pass over a queue."""
        self._need(not self.door_open)
        target = self.filter.queue((VHOST, queue))
        expected = target.due.expected(self.tracker.applied)
        for copy in [copy for copy in self.b if copy.queue == queue]:
            self.b_sees(copy)
        missed = target.end_pass(expected)
        if target.due.count(self.tracker.applied):
            raise AssertionError("something is due after a full pass")
        if not self.KEEPS_AFTER_A_PASS:
            target._done -= missed
            target._moved -= missed
            target._visits.clear()
            target._record = None

    def b_records(self) -> None:
        queues, refused = self.filter.export() if self.RECORD_HAS_OPERATIONS else DeliveryFilter(self.generations).export()
        self.record = AppliedRecord(self.tracker.applied, None, self.generations.table, queues, refused)

    def restart(self) -> None:
        self._need(not self.door_open)
        self.opens += 1
        self.generations = Generations(self.record.generations)
        self.generations.opened(self.record.applied, self.opens)
        self.record = replace(self.record, generations=self.generations.table)
        self.filter = DeliveryFilter.restored(self.generations, self.record.queues, self.record.refused)
        self.tracker = AppliedTracker(self.record.applied)
        for seq in range(max(2, self.record.applied + 1), len(self.log) + 1):
            self._note(self.filter, seq, sweep=True)

    def b_opens(self) -> None:
        """The door opens once everything in the log is applied."""
        self._need(self.promoted and not self.door_open and self.tracker.applied == len(self.log))
        self.door_open = True

    # What is seen.

    def verdict(self, copy: Dying) -> Verdict:
        deaths = copy.deaths
        verdict = self.filter.verdict((VHOST, copy.queue), 1, copy.stamp, deaths)
        if not self.PATH_VOIDS and verdict is Verdict.ACK and deaths and self.generations.counts(1, copy.stamp):
            here = self.filter.queue((VHOST, copy.queue))
            return Verdict.ACK if here._dequeued_upto(1, origin_of(deaths), copy.visit) else Verdict.GIVE
        return verdict

    def check(self) -> None:
        """After the promotion each line that was live on the primary has a copy that counts."""
        if not self.door_open:
            return
        for line in {copy.line for copy in self.a}:
            if line in self.finished or any(copy.line == line and self.generations.counts(1, copy.stamp) for copy in self.b):
                continue
            raise Violation(f"lost: line {line} was live on the primary; the promoted backup has no copy")

    # Within.

    def _operate(self, kind: Kind, copy: Dying) -> None:
        self._need(not self.promoted and copy in self.a)
        origin = origin_of(copy.deaths)
        if self.MOVED_IS_LOGGED:
            for queue, visit in self.filter_a.queue((VHOST, copy.queue)).implied_moves(1, copy.deaths):
                self._append((Kind.MOVED, queue, visit, origin))
        self._append((kind, copy.queue, copy.visit, origin))

    def _append(self, op: tuple[Kind, str, int, str]) -> None:
        self.log.append(op)
        self._note(self.filter_a, len(self.log), sweep=False)
        self._note(self.filter, len(self.log), sweep=True)

    def _note(self, target: DeliveryFilter, seq: int, *, sweep: bool) -> None:
        op = self.log[seq - 1]
        assert op is not None
        kind, queue, visit, origin = op
        target.note(seq, kind, (VHOST, queue), (1, 1), visit, origin, sweep=sweep)
        target.safe(seq)

    def _die(self, copy: Dying, *, rejected: bool) -> Dying | None:
        into = self.DEAD_LETTERS.get(copy.queue)
        rejected = rejected or copy.rejected
        if into is None or (copy.queue == "d" and not rejected and not self.CYCLES_BY_EXPIRY_LIVE):
            return None
        counts = dict(copy.deaths)
        counts[copy.queue] = counts.get(copy.queue, 0) + 1
        return replace(copy, queue=into, deaths=tuple(counts.items()), rejected=rejected)

    @staticmethod
    def _replace(copies: list[Dying], copy: Dying, after: Dying | None) -> None:
        i = copies.index(copy)
        copies[i : i + 1] = [after] if after else []

    @staticmethod
    def _need(possible: bool) -> None:
        if not possible:
            raise NotNow
