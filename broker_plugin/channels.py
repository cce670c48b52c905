"""One channel of a client as the door sees it: whose confirm belongs to which publish, and what was delivered where. No I/O.

Rules:
- The client's publish numbers and the broker's differ where a publish does not go to the broker (a repeat, a routing queue). Both grow by one
  per publish, so a run of publishes is four numbers, however long.
- A `multiple` ack is passed on as such only if it does not cover a publish that is still waiting here.
- A publish with local completion is answered when the own stream has it. The broker's answer to it is the door's business alone.
- A delivery without a position is none of the log's business; its tag alone is kept, as an ack of several covers it, too.
- What a transaction settles is held until its commit, and marked meanwhile: a rollback need not put anything back.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter
from typing import Any, NamedTuple

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.errors import IllegalEvent

from .assembling import Share
from .headers import Alike
from .held import Held

QueueKey = tuple[str, str]  # vhost, queue


class Settled(NamedTuple):
    """`publishes` consecutive publishes of one run that the broker has answered.

    Args:
        client_tag: The client's number of the first; 0 if the client asked for no confirms.
        publishes: How many.
        sequence: Log sequence of the first; 0 if they are not in the log.
        producer: Dedup key; empty if they bring no replication IDs.
        number: Sequence number in the first's replication ID.
    """

    client_tag: int
    publishes: int
    sequence: int
    producer: str
    number: int


class Tags:
    """Tags that mostly ascend as they are added, and go in any order. However many there are, the first is at hand."""

    __slots__ = ("_tags",)

    def __init__(self) -> None:
        self._tags: list[int] = []

    def __len__(self) -> int:
        return len(self._tags)

    def __contains__(self, tag: int) -> bool:
        at = bisect_left(self._tags, tag)
        return at < len(self._tags) and self._tags[at] == tag

    @property
    def first(self) -> int:
        return self._tags[0]

    def add(self, tag: int) -> None:
        insort(self._tags, tag)

    def discard(self, tag: int) -> None:
        if tag in self:
            del self._tags[bisect_left(self._tags, tag)]


class Confirms:
    """Publishes of one channel that wait for an answer. broker tags in `_runs` ascend and are consecutive within a run.

    Attributes:
        local: Client's tags of publishes that wait for something else than the broker's answer.
        early: Client's first tags of runs with local completion that are not confirmed yet, ascending.
        waiting: How many publishes have their confirm from the broker.
    """

    __slots__ = ("_answered", "_broker_tag", "_client_tag", "_runs", "early", "local", "selected", "waiting")

    def __init__(self) -> None:
        self.selected = False
        self.local = Tags()
        self.early: deque[int] = deque()
        self.waiting = 0
        self._client_tag = 0
        self._broker_tag = 0
        self._runs: list[tuple[int, Settled]] = []  # (broker's tag of the first, the run); not all are answered, if there is one
        self._answered = 0  # how many at its beginning are

    def __bool__(self) -> bool:
        return bool(self._runs) or bool(self.local)

    @property
    def open(self) -> bool:
        """Whether there are publishes that the broker has not answered."""
        return bool(self._runs)

    def forwarded(self, count: int, sequence: int, producer: str = "", number: int = 0) -> None:
        """`count` publishes go to the broker, in order, as the entries from `sequence` on (0: not in the log)."""
        client = self._client_tag + 1 if self.selected else 0
        self._runs.append((self._broker_tag + 1, Settled(client, count, sequence, producer, number)))
        self._broker_tag += count
        if self.selected:
            self._client_tag += count
            self.waiting += count

    def forwarded_early(self, count: int, sequence: int, producer: str = "", number: int = 0) -> int:
        """Likewise, with local completion: the broker's answer is not the client's. Returns the client's first tag."""
        self._runs.append((self._broker_tag + 1, Settled(0, count, sequence, producer, number)))
        self._broker_tag += count
        first = self._client_tag + 1
        self._client_tag += count
        self.early.append(first)
        return first

    def covers_others(self, tag: int) -> bool:
        """Whether a `multiple` ack up to `tag` would cover what is still waiting here."""
        return (bool(self.local) and self.local.first <= tag) or bool(self.early and self.early[0] <= tag)

    @property
    def oldest(self) -> int:
        """The first entry of the log to which the broker owes an answer; 0 if there is none."""
        return next((run.sequence for at in range(self._answered, len(self._runs)) if (run := self._runs[at][1]).sequence), 0)

    def ended_here(self) -> int:
        """A publish that does not go to the broker. Returns the client's tag, 0 if the client asked for no confirms."""
        if not self.selected:
            return 0
        self._client_tag += 1
        self.local.add(self._client_tag)
        return self._client_tag

    def answered(self, tag: int, multiple: bool) -> list[Settled]:
        """The broker's ack or nack. Raises IllegalEvent for a tag that is not open."""
        settled = self._take(tag, multiple)
        for run in settled:
            if run.client_tag:
                self.waiting -= run.publishes
        return settled

    def _take(self, tag: int, multiple: bool) -> list[Settled]:
        if not multiple:
            return [self._take_one(tag)]
        runs, at = self._runs, self._answered
        settled = []
        last, total = tag if tag else self._broker_tag, len(runs)
        while at < total and runs[at][0] <= last:
            first, run = runs[at]
            taken = last - first + 1
            if taken >= run.publishes:
                settled.append(run)
                at += 1
            else:
                settled.append(_part(run, 0, taken))
                runs[at] = first + taken, _part(run, taken, run.publishes - taken)
        self._drop(at)
        return settled

    def _take_one(self, tag: int) -> Settled:
        runs, at = self._runs, self._answered
        if not runs or runs[at][0] != tag:
            at = bisect_left(runs, (tag + 1,), at) - 1
            if at < self._answered or tag >= runs[at][0] + runs[at][1].publishes:
                raise IllegalEvent(f"the broker confirmed publish {tag}, which is not open")
        first, run = runs[at]
        if run.publishes == 1:
            if at == self._answered:
                self._drop(at + 1)
            else:
                del runs[at]
            return run
        before, behind = tag - first, first + run.publishes - tag - 1
        if not before:
            runs[at] = tag + 1, _part(run, 1, behind)
        else:
            runs[at] = first, _part(run, 0, before)
            if behind:
                runs.insert(at + 1, (tag + 1, _part(run, before + 1, behind)))
        return _part(run, before, 1)

    def _drop(self, answered: int) -> None:
        """So many runs at the beginning are answered. They leave the list when they are half of it: what is behind is not moved each time."""
        if 2 * answered >= len(self._runs):
            del self._runs[:answered]
            answered = 0
        self._answered = answered

    def abandon(self) -> list[Settled]:
        """The channel is gone: all that had no answer."""
        left = [run for _, run in self._runs[self._answered :]]
        self._runs.clear()
        self._answered = self.waiting = 0
        return left


def _part(run: Settled, skip: int, count: int) -> Settled:
    return Settled(
        run.client_tag + skip if run.client_tag else 0,
        count,
        run.sequence + skip if run.sequence else 0,
        run.producer,
        run.number + skip if run.producer else 0,
    )


class Commit:
    """A transaction that is in the log and whose commit-ok the broker owes. No publish of it counts as answered before.

    Attributes:
        runs: Its publishes: (sequence of the first, the run).
        repeats: Numbers in the IDs of its publishes that are not logged, as others with these IDs are: the client is answered when those are applied.
        own: The client knows nothing of it: acks of the door's own.
    """

    __slots__ = ("own", "repeats", "runs")

    def __init__(self, *, own: bool = False) -> None:
        self.runs: list[tuple[int, pb.Run]] = []
        self.repeats: list[int] = []
        self.own = own


class Transaction:
    """What a client has done since tx.select or the last commit or rollback.

    Args:
        share: What its frames count as; None for nothing.

    Attributes:
        frames: Its publishes, acks and rejections, whole, in order.
        bytes: Their length.
        methods: How many publishes, acks and rejections.
        upto, ones: The deliveries that they settle, by tag: all up to this one, and these.
        gaps: How many gaps its replication IDs may leave between themselves and those in the log.
    """

    __slots__ = ("_next_number", "_share", "_shown", "bytes", "frames", "gaps", "methods", "ones", "upto")

    def __init__(self, share: Share | None = None) -> None:
        self._share = share
        self.frames: list[bytes] = []
        self.bytes = 0
        self.methods = 0
        self.upto = 0
        self.ones: set[int] = set()
        self.gaps = 0
        self._next_number = 0
        self._shown: dict[int, bytes] = {}  # what the broker gets for some of the frames, by their place, before the commit

    def keep(self, data: bytes, methods: int = 1) -> None:
        """These frames of so many methods are part of it. Raises FrameError if the connection is to end over it."""
        self._hold(len(data))
        self.methods += methods
        self.frames.append(data)

    def settle(self, tag: int, multiple: bool) -> None:
        """An ack or rejection is part of it, of a tag or, with `multiple`, of all up to that."""
        if multiple:
            self.upto = max(self.upto, tag)
        else:
            self.ones.add(tag)

    def settles(self, tag: int) -> bool:
        """Whether there is one of this delivery."""
        return tag <= self.upto or tag in self.ones

    def number(self, number: int, *, follows: bool) -> None:
        """A publish in it has this number in its ID. `follows`: that leaves no gap to those in the log."""
        if number != self._next_number and not follows:
            self.gaps += 1
        self._next_number = number + 1

    def keep_instead(self, data: bytes) -> None:
        """What was kept last is what the broker is shown of it; what the client sent is this."""
        self._hold(len(data))
        self._shown[len(self.frames) - 1] = self.frames[-1]
        self.frames[-1] = data

    def _hold(self, size: int) -> None:
        if self._share is not None:
            self._share.take(size)
        self.bytes += size

    def over(self) -> Transaction:
        """It is done, or dropped. Returns the channel's next one."""
        if self._share is not None:
            self._share.give(self.bytes)
        return Transaction(self._share)

    @property
    def rehearsal(self) -> list[bytes]:
        """What the broker gets before the commit."""
        return [self._shown.get(place, data) for place, data in enumerate(self.frames)] if self._shown else self.frames


class Delivery(NamedTuple):
    """A message of the log that a client holds."""

    queue: QueueKey
    sequence: int
    deaths: tuple[tuple[str, int], ...]

    @property
    def visit(self) -> int:
        """How often it has left this queue by dead-lettering (R10)."""
        return dict(self.deaths).get(self.queue[1], 0) if self.deaths else 0


@dataclass(slots=True)
class Consumer:
    """A consumer as the client asked for it.

    Attributes:
        no_ack: Without acks.
        automatic: The door acks for it.
        method: What the broker was asked.
        limit: The basic.qos per consumer (a method's payload) that held then.
        number: In the order in which they came.
        cancelled: The client has cancelled it.
        alike: What the content headers that it is given have in common.
    """

    queue: QueueKey
    automatic: bool
    tracked: bool
    no_ack: bool = False
    method: Any = None
    limit: bytes = b""
    number: int = field(default_factory=itertools.count(1).__next__)
    cancelled: bool = False
    alike: Alike = field(default_factory=Alike)

    @property
    def exclusive(self) -> bool:
        return bool(getattr(self.method, "exclusive", False))


class Closing(Enum):
    """How far a channel is with being closed, and by whom."""

    NO = "it is open"
    CLIENT = "the client has asked for it; the broker is asked when it has answered all publishes"
    DOOR = "the door refused something; the same, and the client is told when the broker has closed it"
    TOLD = "closed at the broker; the client was told why and has not answered"
    BROKER = "the broker has closed it and waits for the client's answer"


class Passed(NamedTuple):
    """A declaration that was passed on.

    Attributes:
        queue: The queue that it declares, if it names one.
        local: The queue, if it is this node's own when the broker accepts it.
        silent: The client wants no answer.
        declares: The queue, if it is one that the log knows.
        over: Set when the broker has answered, or will not any more.
    """

    queue: str
    local: QueueKey | None
    silent: bool
    declares: QueueKey | None
    over: asyncio.Event


@dataclass(slots=True)
class Channel:
    """Everything the door keeps about one channel."""

    number: int
    opened: bool = False  # the client has asked for it
    confirms: Confirms = field(default_factory=Confirms)
    broker_confirms: bool = False
    early: list[tuple[int, pb.Run]] = field(default_factory=list)  # with local completion, and not all answered: (sequence of the first, the run)
    state: Closing = Closing.NO
    on_settled: bytes = b""  # the close that goes to the broker when it has answered all publishes
    timer: asyncio.TimerHandle | None = None  # when it goes in any case
    refusal: bytes = b""  # DOOR: what the client is told then
    last_queue: str = ""  # what an empty queue name means
    deliveries: Held[Delivery | None] = field(default_factory=Held)  # without an ack that is committed; None: the log knows nothing of it
    returning: set[QueueKey] = field(default_factory=set)  # where deliveries go back to when the broker has closed it, or the door no longer drains
    undelivered: list[int] = field(default_factory=list)  # tags that came while the door drains
    consumers: dict[bytes, Consumer] = field(default_factory=dict)
    ended: list[QueueKey] = field(default_factory=list)  # of consumers that the broker has ended by itself, and that hold something: see `overdue`
    limit: bytes = b""  # the last basic.qos per consumer: its payload
    unasked: deque[bool] = field(default_factory=deque)  # qos-ok that the broker owes, in order: whether to the door alone
    paused: dict[bytes, Consumer] = field(default_factory=dict)  # cancelled at the broker while their queue stands still (`pausing`)
    stopping: Counter[bytes] = field(default_factory=Counter)  # cancel-ok that the broker owes to the door alone, by tag
    resuming: Counter[bytes] = field(default_factory=Counter)  # and consume-ok
    consuming: deque[Consumer] = field(default_factory=deque)  # consumes that the broker has not answered, as they were asked
    asked: dict[bytes, Consumer] = field(default_factory=dict)  # of those the last one by each tag
    passed: deque[Passed] = field(default_factory=deque)  # declarations that the broker has not answered, in order
    gets: deque[tuple[Consumer, bytes]] = field(default_factory=deque)  # (as a consumer, the method frame) of basic.get under way
    asked_behind: bool = False  # the client has asked for more behind those
    returned: set[int] = field(default_factory=set)  # entries with IDs that came back, and that the broker has not acked yet
    selecting: int = 0  # answers to confirm.select that the broker owes
    second: int = 0  # the broker's number of a channel that has the transactions of this one (see `transacting`)
    second_ends: bool = False  # the broker has been asked to close it
    before_select: list[bytes] = field(default_factory=list)  # confirms by the door's own word that wait for those
    tx: Transaction | None = None  # after tx.select, but while what is in it is done in earnest:
    committing: Commit | None = None
    commits: deque[Commit] = field(default_factory=deque)  # that the broker has not answered, in order
    commit_oks: deque[tuple[bytes, list[int]]] = field(default_factory=deque)  # for the client, and the repeats in those that wait (`repeats`)
    after_commit: list[bytes] = field(default_factory=list)  # what the door itself has to say, and must not while the broker commits (`pausing`)
    unseen: list[bytes] = field(default_factory=list)  # the door's own acks, that wait for their turn between the client's transactions
    recovers: deque[bool] = field(default_factory=deque)  # basic.recover that the broker has not answered, in order: whether the client wants to know
    rollbacks: deque[bool] = field(default_factory=deque)  # that the broker has not answered, in order: whether the client asked for it
    rehearsed: asyncio.Future[None] | None = None  # of a commit that waits until the broker has answered all of its rehearsal

    @property
    def unanswered(self) -> bool:
        """Whether the broker owes an answer to publishes or to a commit."""
        return self.confirms.open or bool(self.commits)

    @property
    def oldest_unanswered(self) -> int:
        """The first entry of the log that waits for such an answer; 0 if there is none."""
        return min(filter(None, (self.confirms.oldest, *(first for commit in self.commits for first, _ in commit.runs))), default=0)

    @property
    def commits_here(self) -> bool:
        """Whether the broker is asked on this very channel to commit publishes: it ends the connection if it is told anything before it has."""
        return not self.second and any(not commit.own for commit in self.commits)

    @property
    def questions(self) -> int:
        """How many of the client's questions the broker has not answered."""
        return len(self.gets) + len(self.consuming) + len(self.passed) + len(self.commits) + len(self.recovers)

    def early_run(self, sequence: int) -> tuple[int, pb.Run] | None:
        """The run with local completion that an entry is of: (sequence of its first, the run)."""
        at = bisect_right(self.early, sequence, key=itemgetter(0)) - 1
        if at < 0:
            return None
        first, run = self.early[at]
        return (first, run) if sequence < first + len(run.enqueues.lengths) else None

    def forget_early(self) -> None:
        """Lets go of runs to which the broker owes no answer any more."""
        oldest = self.confirms.oldest
        done = 0
        while done < len(self.early) and (not oldest or self.early[done][0] + len(self.early[done][1].enqueues.lengths) <= oldest):
            done += 1
        del self.early[:done]

    @property
    def held(self) -> list[Delivery]:
        """What goes back to its queue when the channel ends: deliveries without an ack, or with one that is not committed."""
        return [delivery for delivery in self.deliveries.values() if delivery is not None]

    def ended_by_broker(self, consumer: Consumer) -> None:
        """The broker has ended a consumer by itself."""
        held = {id(delivery.queue) for delivery in self.held}
        self.ended = [key for key in (*self.ended, consumer.queue) if id(key) in held]

    @property
    def overdue(self) -> list[Delivery]:
        """What of that is held by consumers that the broker has ended.

        RabbitMQ 4's quorum queues do that over a delivery without an ack for too long. They have that one back, and each other as its time is over,
        without a word; an ack in time counts. So nobody may wait for acks of these, nor take them for given back before the channel ends.
        """
        if not self.ended:
            return []
        keys = set(map(id, self.ended))  # the key in a delivery is its consumer's own, not only an equal one
        return [delivery for delivery in self.held if id(delivery.queue) in keys]

    @property
    def closing(self) -> bool:
        """Nothing of the client's counts any more but its answer to a close."""
        return self.state is not Closing.NO

    @property
    def speaks(self) -> bool:
        """Whether the client still takes frames on this channel."""
        return self.state in (Closing.NO, Closing.CLIENT, Closing.DOOR)

    @property
    def takes_back(self) -> bool:
        """Whether the broker takes back whatever it hands out here: it will not know an ack of that any more when it hears of one."""
        return bool(self.recovers) or self.closing

    def let_go(self) -> list[Delivery]:
        """It ends: what was held goes back."""
        held = self.held
        self.deliveries.clear()
        if self.tx is not None:
            self.tx = self.tx.over()
        return held

    def rehearsal_is_over(self) -> None:
        """The broker has taken all of it, or the channel is at its end."""
        if self.rehearsed is not None and not self.rehearsed.done():
            self.rehearsed.set_result(None)

    def forget(self) -> None:
        """The broker has closed it: nothing that it owed will come."""
        for passed in self.passed:
            passed.over.set()
        self.passed.clear()
        self.gets.clear()
        self.consuming.clear()
        self.asked.clear()
        self.unasked.clear()
        self.stopping.clear()
        self.resuming.clear()
        self.recovers.clear()
        self.after_commit.clear()

    @property
    def acks_wait(self) -> bool:
        """Whether an ack counts at the broker only when a transaction there is committed."""
        return self.tx is not None and not self.second

    def holds(self, tag: int, multiple: bool) -> bool:
        """Whether the broker would take an ack of this tag: of what was given out and is not settled; of everything (0 with multiple) in any case."""
        if multiple and not tag:
            return True
        return tag in self.deliveries and (self.tx is None or not self.tx.settles(tag))

    def unsettled(self) -> Iterator[int]:
        """Tags of what the client was given and has not settled, not even in a transaction, from the highest on."""
        tx = self.tx
        for tag in reversed(self.deliveries):
            if tx is not None and tag <= tx.upto:
                return
            if tx is None or tag not in tx.ones:
                yield tag

    def outstanding(self, upto: int = 0) -> int:
        """The highest of those (<= `upto`, if that is not 0); 0: there is none."""
        found = next((tag for tag in self.unsettled() if not upto or tag <= upto), 0)
        if not found and self.tx is not None:
            self.tx.settle(upto or self.deliveries.last, multiple=True)  # as it does, one by one: nobody need look at these again
        return found

    def settle(self, tag: int, multiple: bool) -> list[Delivery]:
        """What an ack or rejection of `tag` covers is settled; returns what the log knows of that."""
        return [delivery for delivery in self.deliveries.settle(tag, multiple) if delivery is not None]

    def recover(self) -> list[Delivery]:
        """What is not settled goes back; returns what the log knows of that."""
        tags = list(self.unsettled())
        given_back = [self.deliveries.pop(tag) for tag in reversed(tags)]
        if self.tx is not None:
            self.tx.settle(self.deliveries.last, multiple=True)  # as it does all that is left, one by one
        return [delivery for delivery in given_back if delivery is not None]
