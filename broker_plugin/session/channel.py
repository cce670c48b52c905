"""One channel of a client as the door sees it: its publishes without a confirm, and its deliveries by queue. No I/O.

Rules:
- The client's publish numbers and the broker's differ where a publish does not go to the broker (a repeat, a routing queue). Both grow by one
  per publish, so a run of publishes is four numbers, however long.
- A `multiple` ack is passed on as such only if it does not cover a publish that still waits here.
- A publish with local completion is confirmed when the own stream has it. The broker's answer to it is for the door alone.
- The log does not know a delivery without a position. Its tag alone is kept, as a `multiple` ack covers it too.
- A transaction's acks and rejections are held until its commit, and marked meanwhile: a rollback need not put anything back.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter
from typing import Any, NamedTuple

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.queues import QueueKey

from ..log.messages import Delivery
from ..log.stamps import HeaderCache
from .confirms import Confirms
from .transaction import Commit, Transaction
from .unacked import Unacked


@dataclass(slots=True)
class Consumer:
    """A consumer as the client asked for it.

    Attributes:
        no_ack: The client asked for a consumer without acks.
        automatic: The door acks in place of the client.
        method: The basic.consume that the broker got.
        limit: The basic.qos per consumer (a method's payload) that held then.
        number: Position in the order of creation.
        cancelled: The client has cancelled the consumer.
        alike: The common part of the content headers of its deliveries.
    """

    queue: QueueKey
    automatic: bool
    tracked: bool
    no_ack: bool = False
    method: Any = None
    limit: bytes = b""
    number: int = field(default_factory=itertools.count(1).__next__)
    cancelled: bool = False
    alike: HeaderCache = field(default_factory=HeaderCache)

    @property
    def exclusive(self) -> bool:
        return bool(getattr(self.method, "exclusive", False))


class ChannelState(Enum):
    """How far the closing of a channel is, and which side began it."""

    NO = "it is open"
    CLIENT = "the client has asked for it; the broker is asked when it has answered all publishes"
    DOOR = "the door refused something: the client is told when the broker has closed the channel"
    TOLD = "closed at the broker; the client was told why and has not answered"
    BROKER = "the broker has closed it and waits for the client's answer"


class PendingDeclaration(NamedTuple):
    """A declaration that was passed on.

    Attributes:
        queue: The queue that it declares, if it names one.
        local: The queue, if it is this node's own when the broker accepts it.
        silent: The client wants no answer.
        declares: The queue, if it is one that the log knows.
        over: Set when the broker has answered, or will not answer any more.
    """

    queue: str
    local: QueueKey | None
    silent: bool
    declares: QueueKey | None
    over: asyncio.Event


@dataclass(slots=True)
class ClientChannel:
    """All state that the door keeps about one channel."""

    number: int
    opened: bool = False  # the client has sent channel.open
    confirms: Confirms = field(default_factory=Confirms)
    broker_confirms: bool = False
    early: list[tuple[int, pb.Run]] = field(default_factory=list)  # local completion, not all answered: (sequence of the first, the run)
    state: ChannelState = ChannelState.NO
    on_settled: bytes = b""  # the close that goes to the broker when it has answered all publishes
    timer: asyncio.TimerHandle | None = None  # when the close goes in any case
    refusal: bytes = b""  # DOOR: the close that the client gets then
    last_queue: str = ""  # the queue that an empty queue name means
    deliveries: Unacked[Delivery | None] = field(default_factory=Unacked)  # without a committed ack; None: a delivery that the log does not know
    returning: set[QueueKey] = field(default_factory=set)  # get deliveries back when the broker has closed the channel, or the door drains no more
    undelivered: list[int] = field(default_factory=list)  # tags that came while the door drains
    consumers: dict[bytes, Consumer] = field(default_factory=dict)
    ended: list[QueueKey] = field(default_factory=list)  # of consumers that the broker ended by itself and that hold deliveries: see `overdue`
    limit: bytes = b""  # the last basic.qos per consumer: its payload
    unasked: deque[bool] = field(default_factory=deque)  # qos-ok that the broker owes, in order: whether for the door alone
    paused: dict[bytes, Consumer] = field(default_factory=dict)  # cancelled at the broker while their queue stands still (`queue_pause`)
    stopping: Counter[bytes] = field(default_factory=Counter)  # cancel-ok that the broker owes to the door alone, by tag
    resuming: Counter[bytes] = field(default_factory=Counter)  # consume-ok that the broker owes to the door alone, by tag
    consuming: deque[Consumer] = field(default_factory=deque)  # consumes that the broker has not answered, in order
    asked: dict[bytes, Consumer] = field(default_factory=dict)  # the last of these consumes by each tag
    passed: deque[PendingDeclaration] = field(default_factory=deque)  # declarations that the broker has not answered, in order
    gets: deque[tuple[Consumer, bytes]] = field(default_factory=deque)  # (as a consumer, the method frame) of basic.get under way
    asked_behind: bool = False  # the client has asked for more behind these basic.get
    returned: set[int] = field(default_factory=set)  # entries with IDs that came back, and that the broker has not acked yet
    selecting: int = 0  # answers to confirm.select that the broker owes
    before_select: list[bytes] = field(default_factory=list)  # the door's own confirms, which wait for the answers to confirm.select
    tx: Transaction | None = None  # set after tx.select, except while the content of `committing` is committed:
    committing: Commit | None = None
    commits: deque[Commit] = field(default_factory=deque)  # commits that the broker has not answered, in order
    commit_oks: deque[tuple[bytes, list[int]]] = field(default_factory=deque)  # waiting for the client, with their repeats (`duplicates`)
    after_commit: list[bytes] = field(default_factory=list)  # the door's own frames, which may not go while the broker commits (`queue_pause`)
    internal_acks: list[bytes] = field(default_factory=list)  # the door's own acks, which wait for a gap between the client's transactions
    recovers: deque[bool] = field(default_factory=deque)  # basic.recover that the broker has not answered, in order: whether the client expects it
    rollbacks: deque[bool] = field(default_factory=deque)  # rollbacks that the broker has not answered, in order: whether the client asked
    rehearsed: asyncio.Future[None] | None = None  # of a commit that waits until the broker has answered its whole dry run

    @property
    def unanswered(self) -> bool:
        """Whether the broker owes an answer to publishes or to a commit."""
        return self.confirms.open or bool(self.commits)

    @property
    def oldest_unanswered(self) -> int:
        """The first entry of the log that waits for such an answer; 0 if none does."""
        return min(filter(None, (self.confirms.oldest, *(first for commit in self.commits for first, _ in commit.runs))), default=0)

    @property
    def commits_here(self) -> bool:
        """Whether the broker commits publishes on this channel: RabbitMQ ends a connection that sends anything before the commit-ok."""
        return any(not commit.own for commit in self.commits)

    @property
    def questions(self) -> int:
        """How many of the client's questions the broker has not answered."""
        return len(self.gets) + len(self.consuming) + len(self.passed) + len(self.commits) + len(self.recovers)

    def early_run(self, sequence: int) -> tuple[int, pb.Run] | None:
        """The run with local completion that contains an entry: (sequence of the run's first entry, the run)."""
        at = bisect_right(self.early, sequence, key=itemgetter(0)) - 1
        if at < 0:
            return None
        first, run = self.early[at]
        return (first, run) if sequence < first + len(run.enqueues.lengths) else None

    def forget_early(self) -> None:
        """Drops runs to which the broker owes no answer any more."""
        oldest = self.confirms.oldest
        done = 0
        while done < len(self.early) and (not oldest or self.early[done][0] + len(self.early[done][1].enqueues.lengths) <= oldest):
            done += 1
        del self.early[:done]

    @property
    def held(self) -> list[Delivery]:
        """Deliveries that go back to their queue when the channel ends: without an ack, or with an ack that is not committed."""
        return [delivery for delivery in self.deliveries.values() if delivery is not None]

    def ended_by_broker(self, consumer: Consumer) -> None:
        """Takes note that the broker has ended a consumer by itself."""
        held = {id(delivery.queue) for delivery in self.held}
        self.ended = [key for key in (*self.ended, consumer.queue) if id(key) in held]

    @property
    def overdue(self) -> list[Delivery]:
        """Deliveries that are held by consumers that the broker has ended.

        RabbitMQ 4's quorum queues end a consumer over a delivery that has had no ack for too long. The queue takes that delivery back, and without
        notice each other one when its time is over; an ack in time counts. So no part of the door may wait for acks of these deliveries, nor treat
        them as given back before the channel ends.
        """
        if not self.ended:
            return []
        keys = set(map(id, self.ended))  # a delivery's key is the object of its consumer, not only an equal one
        return [delivery for delivery in self.held if id(delivery.queue) in keys]

    @property
    def closing(self) -> bool:
        """Whether no frame of the client counts any more except its answer to a close."""
        return self.state is not ChannelState.NO

    @property
    def speaks(self) -> bool:
        """Whether the client still takes frames on this channel."""
        return self.state in (ChannelState.NO, ChannelState.CLIENT, ChannelState.DOOR)

    @property
    def takes_back(self) -> bool:
        """Whether the broker takes back every delivery that it sends now: a later ack of such a delivery would be unknown to it."""
        return bool(self.recovers) or self.closing

    def let_go(self) -> list[Delivery]:
        """Ends the channel's hold on its deliveries. Returns those that go back."""
        held = self.held
        self.deliveries.clear()
        if self.tx is not None:
            self.tx = self.tx.over()
        return held

    def rehearsal_is_over(self) -> None:
        """The broker has answered the whole dry run, or the channel is at its end."""
        if self.rehearsed is not None and not self.rehearsed.done():
            self.rehearsed.set_result(None)

    def forget(self) -> None:
        """The broker has closed the channel: none of the answers that it owed will come."""
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

    def holds(self, tag: int, multiple: bool) -> bool:
        """Whether the broker would accept an ack of this tag: one of an unsettled delivery; or 0 with `multiple`, which is always accepted."""
        if multiple and not tag:
            return True
        return tag in self.deliveries and (self.tx is None or not self.tx.settles(tag))

    def unsettled(self) -> Iterator[int]:
        """Tags of deliveries that the client has not settled, not even in a transaction, from the highest on."""
        tx = self.tx
        for tag in reversed(self.deliveries):
            if tx is not None and tag <= tx.upto:
                return
            if tx is None or tag not in tx.ones:
                yield tag

    def outstanding(self, upto: int = 0) -> int:
        """The highest unsettled tag (<= `upto`, if that is not 0); 0 if there is none."""
        found = next((tag for tag in self.unsettled() if not upto or tag <= upto), 0)
        if not found and self.tx is not None:
            self.tx.settle(upto or self.deliveries.last, multiple=True)  # equals its single acks: no later call looks at these tags again
        return found

    def settle(self, tag: int, multiple: bool) -> list[Delivery]:
        """Settles the deliveries that an ack or rejection of `tag` covers. Returns those that the log knows."""
        return [delivery for delivery in self.deliveries.settle(tag, multiple) if delivery is not None]

    def recover(self) -> list[Delivery]:
        """Gives unsettled deliveries back. Returns those that the log knows."""
        tags = list(self.unsettled())
        given_back = [self.deliveries.pop(tag) for tag in reversed(tags)]
        if self.tx is not None:
            self.tx.settle(self.deliveries.last, multiple=True)  # the transaction settles all that are left, one by one
        return [delivery for delivery in given_back if delivery is not None]
