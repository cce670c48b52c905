"""One channel of a client as the door sees it: whose confirm belongs to which publish, and what was delivered where. No I/O.

Rules:
- The client's publish numbers and the broker's differ where a publish does not go to the broker (a repeat, a routing queue). Both grow by one
  per publish, so a run of publishes is four numbers, however long.
- A `multiple` ack is passed on as such only if it does not cover a publish that is still waiting here.
- A delivery without a position is none of the log's business: its tag is not kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.errors import IllegalEvent

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


class Confirms:
    """Publishes of one channel that wait for an answer. broker tags in `_runs` ascend and are consecutive within a run."""

    __slots__ = ("_broker_tag", "_client_tag", "_runs", "local", "selected")

    def __init__(self) -> None:
        self.selected = False
        self.local: set[int] = set()
        self._client_tag = 0
        self._broker_tag = 0
        self._runs: deque[tuple[int, Settled]] = deque()

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

    def ended_here(self) -> int:
        """A publish that does not go to the broker. Returns the client's tag, 0 if the client asked for no confirms."""
        if not self.selected:
            return 0
        self._client_tag += 1
        self.local.add(self._client_tag)
        return self._client_tag

    def answered(self, tag: int, multiple: bool) -> list[Settled]:
        """The broker's ack or nack. Raises IllegalEvent for a tag that is not open."""
        runs = self._runs
        settled = []
        if multiple or (runs and runs[0][0] == tag):
            last = tag if tag else self._broker_tag
            while runs and runs[0][0] <= last:
                first, run = runs.popleft()
                taken = min(run.publishes, last - first + 1)
                settled.append(_part(run, 0, taken))
                if taken < run.publishes:
                    runs.appendleft((first + taken, _part(run, taken, run.publishes - taken)))
            return settled
        for i, (first, run) in enumerate(runs):
            if first <= tag < first + run.publishes:
                at = tag - first
                del runs[i]
                if at + 1 < run.publishes:
                    runs.insert(i, (tag + 1, _part(run, at + 1, run.publishes - at - 1)))
                if at:
                    runs.insert(i, (first, _part(run, 0, at)))
                return [_part(run, at, 1)]
        raise IllegalEvent(f"the broker confirmed publish {tag}, which is not open")

    def abandon(self) -> list[Settled]:
        """The channel is gone: all that had no answer."""
        left = [run for _, run in self._runs]
        self._runs.clear()
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
        after: The client is answered only when this entry is applied too: the greatest that a repeat in the transaction stands for.
        own: The client knows nothing of it: acks of the door's own.
    """

    __slots__ = ("after", "own", "runs")

    def __init__(self, *, own: bool = False) -> None:
        self.runs: list[tuple[int, pb.Run]] = []
        self.after = 0
        self.own = own


class Transaction:
    """What a client has done since tx.select or the last commit or rollback.

    Attributes:
        frames: Its publishes, acks and rejections, whole, in order.
        bytes: Their length.
        settled, others: Deliveries that they cover; a rollback brings them back.
    """

    __slots__ = ("bytes", "frames", "others", "settled")

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.bytes = 0
        self.settled: dict[int, Delivery] = {}
        self.others: set[int] = set()

    def keep(self, data: bytes) -> None:
        """These frames are part of it."""
        self.frames.append(data)
        self.bytes += len(data)


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
    """A consumer as the client asked for it. `no_ack`: without acks; `automatic`: the door acks for it."""

    queue: QueueKey
    automatic: bool
    tracked: bool
    no_ack: bool = False


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
        local: The queue, if it is this node's own when the broker accepts it.
        silent: The client wants no answer.
        declares: The queue, if it is one that the log knows.
    """

    local: QueueKey | None
    silent: bool
    declares: QueueKey | None = None


@dataclass(slots=True)
class Channel:
    """Everything the door keeps about one channel."""

    number: int
    confirms: Confirms = field(default_factory=Confirms)
    broker_confirms: bool = False
    state: Closing = Closing.NO
    on_settled: bytes = b""  # the close that goes to the broker when it has answered all publishes
    refusal: bytes = b""  # DOOR: what the client is told then
    last_queue: str = ""  # what an empty queue name means
    deliveries: dict[int, Delivery] = field(default_factory=dict)
    others: set[int] = field(default_factory=set)  # tags of deliveries that the log knows nothing of
    returning: set[QueueKey] = field(default_factory=set)  # where deliveries go back to when the broker has closed it, or the door no longer drains
    undelivered: list[int] = field(default_factory=list)  # tags that came while the door drains
    consumers: dict[bytes, Consumer] = field(default_factory=dict)
    consuming: deque[Consumer] = field(default_factory=deque)  # consumes that the broker has not answered, in order
    passed: deque[Passed] = field(default_factory=deque)  # declarations that the broker has not answered, in order
    gets: deque[tuple[Consumer, bytes]] = field(default_factory=deque)  # (as a consumer, the method frame) of basic.get under way
    tx: Transaction | None = None  # after tx.select, but while what is in it is done in earnest:
    committing: Commit | None = None
    commits: deque[Commit] = field(default_factory=deque)  # that the broker has not answered, in order
    unseen: list[bytes] = field(default_factory=list)  # the door's own acks, that wait for their turn between the client's transactions
    rollbacks: deque[bool] = field(default_factory=deque)  # that the broker has not answered, in order: whether the client asked for it

    @property
    def unanswered(self) -> bool:
        """Whether the broker owes an answer to publishes or to a commit."""
        return self.confirms.open or bool(self.commits)

    @property
    def held(self) -> list[Delivery]:
        """What goes back to its queue when the channel ends: deliveries without an ack, or with one that is not committed."""
        return [*self.deliveries.values(), *(self.tx.settled.values() if self.tx is not None else ())]

    @property
    def closing(self) -> bool:
        """Nothing of the client's counts any more but its answer to a close."""
        return self.state is not Closing.NO

    @property
    def speaks(self) -> bool:
        """Whether the client still takes frames on this channel."""
        return self.state in (Closing.NO, Closing.CLIENT, Closing.DOOR)

    def let_go(self) -> list[Delivery]:
        """It ends: what was held goes back."""
        held = self.held
        self.deliveries.clear()
        self.others.clear()
        if self.tx is not None:
            self.tx = Transaction()
        return held

    def forget(self) -> None:
        """The broker has closed it: nothing that it owed will come."""
        self.passed.clear()
        self.gets.clear()
        self.consuming.clear()

    def outstanding(self, upto: int = 0) -> int:
        """The highest tag (<= `upto`, if that is not 0) of what the client was given and has not settled; 0: there is none."""
        return max((tag for tags in (self.deliveries, self.others) for tag in tags if not upto or tag <= upto), default=0)

    def take_out(self, tag: int, multiple: bool) -> dict[int, Delivery]:
        """Takes out what an ack of `tag` covers (0 with multiple: everything), by tag."""
        deliveries = self.deliveries
        if not multiple:
            one = deliveries.pop(tag, None)
            return {} if one is None else {tag: one}
        covered = sorted(t for t in deliveries if t <= tag) if tag else sorted(deliveries)
        return {t: deliveries.pop(t) for t in covered}

    def take_others(self, tag: int, multiple: bool) -> set[int]:
        """The same of what the log knows nothing of: the tags."""
        covered = {t for t in self.others if t <= tag} if multiple and tag else set(self.others) if multiple else self.others & {tag}
        self.others -= covered
        return covered

    def give_back(self, tx: Transaction) -> None:
        """What a transaction had settled is not settled."""
        self.deliveries |= tx.settled
        self.others |= tx.others
