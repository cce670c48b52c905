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
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter
from typing import Any, NamedTuple

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.queues import QueueKey

from ..amqp import encode
from ..log.messages import Delivery
from ..log.stamps import HeaderCache
from .confirms import Confirms
from .transaction import Commit, Transaction
from .unacked import Unacked


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
    alike: HeaderCache = field(default_factory=HeaderCache)

    @property
    def exclusive(self) -> bool:
        return bool(getattr(self.method, "exclusive", False))


class ChannelState(Enum):
    """How far a channel is with being closed, and by whom."""

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
        over: Set when the broker has answered, or will not any more.
    """

    queue: str
    local: QueueKey | None
    silent: bool
    declares: QueueKey | None
    over: asyncio.Event


@dataclass(slots=True)
class ClientChannel:
    """Everything the door keeps about one channel."""

    number: int
    opened: bool = False  # the client has asked for it
    confirms: Confirms = field(default_factory=Confirms)
    broker_confirms: bool = False
    early: list[tuple[int, pb.Run]] = field(default_factory=list)  # with local completion, and not all answered: (sequence of the first, the run)
    state: ChannelState = ChannelState.NO
    on_settled: bytes = b""  # the close that goes to the broker when it has answered all publishes
    timer: asyncio.TimerHandle | None = None  # when it goes in any case
    refusal: bytes = b""  # DOOR: what the client is told then
    last_queue: str = ""  # what an empty queue name means
    deliveries: Unacked[Delivery | None] = field(default_factory=Unacked)  # without an ack that is committed; None: the log knows nothing of it
    returning: set[QueueKey] = field(default_factory=set)  # where deliveries go back to when the broker has closed it, or the door no longer drains
    undelivered: list[int] = field(default_factory=list)  # tags that came while the door drains
    consumers: dict[bytes, Consumer] = field(default_factory=dict)
    ended: list[QueueKey] = field(default_factory=list)  # of consumers that the broker has ended by itself, and that hold something: see `overdue`
    limit: bytes = b""  # the last basic.qos per consumer: its payload
    unasked: deque[bool] = field(default_factory=deque)  # qos-ok that the broker owes, in order: whether to the door alone
    paused: dict[bytes, Consumer] = field(default_factory=dict)  # cancelled at the broker while their queue stands still (`queue_pause`)
    stopping: Counter[bytes] = field(default_factory=Counter)  # cancel-ok that the broker owes to the door alone, by tag
    resuming: Counter[bytes] = field(default_factory=Counter)  # and consume-ok
    consuming: deque[Consumer] = field(default_factory=deque)  # consumes that the broker has not answered, as they were asked
    asked: dict[bytes, Consumer] = field(default_factory=dict)  # of those the last one by each tag
    passed: deque[PendingDeclaration] = field(default_factory=deque)  # declarations that the broker has not answered, in order
    gets: deque[tuple[Consumer, bytes]] = field(default_factory=deque)  # (as a consumer, the method frame) of basic.get under way
    asked_behind: bool = False  # the client has asked for more behind those
    returned: set[int] = field(default_factory=set)  # entries with IDs that came back, and that the broker has not acked yet
    selecting: int = 0  # answers to confirm.select that the broker owes
    second: int = 0  # the broker's number of a channel that has the transactions of this one (see `transactions`)
    second_ends: bool = False  # the broker has been asked to close it
    before_select: list[bytes] = field(default_factory=list)  # confirms by the door's own word that wait for those
    tx: Transaction | None = None  # after tx.select, but while what is in it is done in earnest:
    committing: Commit | None = None
    commits: deque[Commit] = field(default_factory=deque)  # that the broker has not answered, in order
    commit_oks: deque[tuple[bytes, list[int]]] = field(default_factory=deque)  # for the client, and the repeats in those that wait (`duplicates`)
    after_commit: list[bytes] = field(default_factory=list)  # what the door itself has to say, and must not while the broker commits (`queue_pause`)
    internal_acks: list[bytes] = field(default_factory=list)  # the door's own acks, that wait for their turn between the client's transactions
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
        return self.state is not ChannelState.NO

    @property
    def speaks(self) -> bool:
        """Whether the client still takes frames on this channel."""
        return self.state in (ChannelState.NO, ChannelState.CLIENT, ChannelState.DOOR)

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
    def tx_number(self) -> int:
        """The broker's number of the channel that has this one's transactions."""
        return self.second or self.number

    def for_tx_channel(self, data: bytes) -> bytes:
        """Frames of the client's channel, as they go to the channel that has its transactions."""
        return encode.rechannel(data, self.second) if self.second else data

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
