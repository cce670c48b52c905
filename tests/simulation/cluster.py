"""A group of nodes in one process: the real `Node` of each, beside a simulated broker, links and operator. The caller says what happens next.

Rules:
- A node's stream holds batches and fences. What was written and not confirmed is `pending`; of a killed node's, some land before the successor's
  OPEN and none after (R3).
- A connection goes one way, as a sidecar's link does: control messages and pushes there, acks of pushes back. What is on it is lost when it breaks.
- The driver's duties are carried out as by lrq_ha/sidecar/incarnation.py and its parts, with the real RoutingQueue and ReplicatingSubscription.
- Every step is checked against what the cluster as a whole has promised: `Violation` says what was broken.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lrq_ha.replication.checkpoints import Checkpoints
from lrq_ha.replication.events import (
    Ack,
    Answer,
    Append,
    CannotSend,
    CutTail,
    Disconnect,
    Effect,
    EntryKind,
    Event,
    Given,
    HeadMoved,
    Heartbeat,
    Lead,
    Message,
    OpenDoor,
    Opened,
    OwnConfirmed,
    PeerAcked,
    PeerConnected,
    PeerDisconnected,
    PeerGone,
    PeerMessage,
    PromoteRequest,
    Push,
    Recover,
    Recovered,
    RefusePush,
    RemoveRequest,
    Restart,
    RoleChanged,
    SafeAdvanced,
    Send,
    StepDown,
    Subscribe,
    SwitchoverRequest,
    Tick,
    Unsubscribe,
    WriteBatch,
    WriteFence,
)
from lrq_ha.replication.guard import State
from lrq_ha.replication.log import BatchHeader, LogIndex, LogState
from lrq_ha.replication.node import Node
from lrq_ha.replication.positions import epoch_name, owner_of
from lrq_ha.replication.roles import Role
from lrq_ha.replication.settings import NodeSettings
from lrq_ha.replication.subscription import ReplicatingSubscription, RoutingQueue, StoredBatch

#: About as long as it takes to notice that a backup is silent, and to take it out of the set.
EXPECTED_BACKUPS_TIMEOUT_S = 1.0
HEARTBEAT_S = 0.1
HEARD_S = 3 * HEARTBEAT_S  # what came so short ago must be known, also by a clock that is slow or fast
SETS_KEPT = 2  # few, so that there are older ones in each life


class Violation(Exception):
    """A promise was broken."""


class Fence(NamedTuple):
    epoch: int
    out_end: int


Record = StoredBatch | Fence


class Entry(NamedTuple):
    """One entry of a log; `message` is 0 for MARKER and MEMBERS."""

    epoch: int
    message: int


class Heard(NamedTuple):
    """What had been confirmed when a message was sent: the first `confirms`, as far as primaries of the sender's own history gave them."""

    confirms: int = 0
    line: frozenset[int] = frozenset()


@dataclass
class Conn:
    """The connection that `src` opened to the door of `dst`."""

    src: int
    dst: int
    queue: deque[tuple[object, Heard]] = field(default_factory=deque)  # (message or Push, what had been confirmed when it was sent)
    acks: deque[int] = field(default_factory=deque)
    open: deque[int] = field(default_factory=deque)  # last sequence of pushes that dst has not acked
    broken: bool = False
    stalled: bool = False
    pushed: deque[Push] = field(default_factory=lambda: deque(maxlen=3))  # the last that arrived
    heard_at: float = -1.0  # dst last heard something on it


@dataclass
class Host:
    """One node with its broker. What is above `node` outlives the sidecar."""

    id: int
    stream: list[Record] = field(default_factory=list)
    recorded: int = 0  # R of the applied record
    head: int = 0  # the broker has dropped what is before this entry: nobody is sent it (the node itself has read it, and needs it no more)
    lost_host: bool = False
    heard: Heard = field(default_factory=Heard)  # by the last message of the leader it follows
    heard_durably: Heard = field(default_factory=Heard)  # the same, without what a FENCE under way answers: a restart forgets that
    node: Node | None = None
    pending: deque[Record] = field(default_factory=deque)
    late: deque[Record] = field(default_factory=deque)  # only with `late_writes`
    entries: list[Entry] = field(default_factory=list)
    batches: list[StoredBatch] = field(default_factory=list)
    memory: RoutingQueue = field(default_factory=RoutingQueue)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    subscriptions: dict[int, ReplicatingSubscription] = field(default_factory=dict)
    ends: dict[int, Conn] = field(default_factory=dict)
    applied: int = 0
    recovering: int = 0
    opened_at: float = 0.0  # its door, by its own clock
    ended: str = ""
    defers_to: int = 0  # as the process of a sidecar remembers it from one incarnation to the next
    heard_before: tuple[int, float] | None = None  # likewise
    operator: bool = False
    forced: bool = False
    answer: Answer | None = None

    @property
    def up(self) -> bool:
        return self.node is not None


def _rank(log: list[Entry]) -> tuple[int, int]:
    """LogState.rank, of the entries themselves."""
    return (log[-1].epoch if log else 0, len(log))


def read_stream(stream: Iterable[Record]) -> tuple[list[Entry], int]:
    """R2 once more, written independently of LogIndex: what a reader makes of a stream. Returns (log, top)."""
    log: list[Entry] = []
    top = 0
    for record in stream:
        if isinstance(record, Fence):
            top = max(top, record.epoch)
            continue
        batch = record.header
        if not log and batch.first > 1 and batch.begins_renewal:
            log = list(record.body.prefix)  # type: ignore[attr-defined]
        before = log[batch.first - 2].epoch if 1 < batch.first <= len(log) + 1 else 0
        if batch.leader < top or batch.first > len(log) + 1 or before != batch.previous_epoch:
            continue
        top = batch.leader
        if batch.last > len(log) or log[batch.last - 1].epoch != batch.epoch:
            log[batch.first - 1 :] = entries_of(record)
    return log, top


class Body(bytes):
    """The bytes of a batch, which are the same object wherever it goes, and what they say."""

    entries: list[Entry]
    checkpoint: bool
    prefix: list[Entry]  # of a CHECKPOINT that begins a renewal: what stands for everything before it
    before: LogState  # and what it says of that


def body(data: bytes, epoch: int, messages: Iterable[int], *, checkpoint: bool) -> Body:
    made = Body(data)
    made.entries = [Entry(epoch, message) for message in messages]
    made.checkpoint = checkpoint
    return made


def entries_of(batch: StoredBatch) -> list[Entry]:
    return batch.body.entries  # type: ignore[attr-defined, no-any-return]


def is_checkpoint(batch: StoredBatch) -> bool:
    return batch.body.checkpoint  # type: ignore[attr-defined, no-any-return]


def read_index(node: int, records: Iterable[Record]) -> LogIndex:
    """The index that a node rebuilds from its stream."""
    index = LogIndex(node)
    for record in records:
        if isinstance(record, Fence):
            index.fence(record.epoch, record.out_end)
        else:
            if begins_log(record, index):
                index.begin(record.header.first, record.body.before)  # type: ignore[attr-defined]
            index.accept(record.header)
    return index


def with_old_sets_merged(log: LogState, safe: int) -> LogState:
    """A log as it is told of when all sets that were over by `safe` are told of as one: which of them a node has merged depends on its life."""
    index = LogIndex(0)
    index.restore(log)
    index.merge_sets(safe, 1)
    return replace(log, sets=tuple(index.sets), record=0)  # an entry that was replaced may have named a newer record


def begins_log(record: StoredBatch, index: LogIndex) -> bool:
    return record.header.begins_renewal and record.header.first > 1 and not index.end


def has_joined_in_part(host: Host) -> bool:
    """R17, on the batches themselves: its log begins at a renewal of which it lacks the end."""
    headers = [batch.header for batch in host.batches]
    if not headers or headers[0].first == 1:
        return False
    return not any(headers[0].first <= header.renewal < header.first for header in headers)


class Cluster:
    """See above.

    Args:
        size: Number of nodes; their ids are 1 .. size.
        strict: Mode of the group.
        node_class: The core to run; a test may bring one with a rule switched off.
        memory_bytes_max: Limit of each RoutingQueue; what it lost is read from the stream.
        late_writes: R3 off: what a killed sidecar had under way lands whenever the caller says so.
        restart_alone, expected_backups: See NodeSettings.
        trace: Print every step.
    """

    host_class = Host
    in_flight_bytes_max = 12

    def __init__(
        self,
        size: int,
        *,
        strict: bool = False,
        node_class: type[Node] = Node,
        memory_bytes_max: int = 1 << 20,
        late_writes: bool = False,
        restart_alone: bool = False,
        expected_backups: int = 0,
        trace: bool = False,
    ) -> None:
        self.hosts = {i: self.host_class(i) for i in range(1, size + 1)}
        self.conns: dict[tuple[int, int], Conn] = {}
        self.cuts: set[tuple[int, int]] = set()
        self.cut_for_good: set[tuple[int, int]] = set()  # by a cause that stays: a wrong address, a certificate that is over
        self.now = 0.0
        self.strict = strict
        self.node_class = node_class
        self.memory_bytes_max = memory_bytes_max
        self.late_writes = late_writes
        self.restart_alone = restart_alone
        self.expected_backups = expected_backups
        self.trace = trace
        self.messages = 0
        self.confirmed: dict[int, tuple[int, Entry]] = {}  # message -> (sequence, entry), in the order of the confirms
        self.confirmed_by: list[int] = []  # the epoch that gave each of them
        self.blind = False  # a node that had lost its host was promoted by force: what it lost counts for nothing any more
        self.lost: set[int] = set()  # what an operator's promotion said is in danger
        self.history: dict[tuple[int, int], tuple[int, int]] = {}  # (epoch, sequence) -> (epoch before, message)
        self.safe_at_leader: set[tuple[int, Entry]] = set()
        self.given_up: set[tuple[int, Entry]] = set()  # what an operator discarded
        self.removed_by_hand: set[int] = set()
        self.needed = set(self.hosts) if strict else set()  # nothing may be safe before each of them has had it: all but those an operator removed
        self.had: dict[int, set[tuple[int, Entry]]] = {i: set() for i in self.needed}  # what has ever been on a node's stream
        self.repeating: random.Random | None = None  # decides which pushes arrive twice
        self.unsent: list[tuple[int, int]] = []  # (node, peer) of which the stream no longer has what the peer needs
        self.log: deque[str] = deque(maxlen=400)

    def settings(self, node: int) -> NodeSettings:
        return NodeSettings(
            node,
            {i: f"n{i}" for i in self.hosts},
            strict=self.strict,
            restart_alone=self.restart_alone,
            backup_timeout_s=1.0,
            heartbeat_s=HEARTBEAT_S,
            campaign_timeout_s=0.8,
            admit_timeout_s=0.1,
            admit_lag_entries_max=50,
            expected_backups=self.expected_backups,
            expected_backups_timeout_s=EXPECTED_BACKUPS_TIMEOUT_S,
            sets_kept=SETS_KEPT,
        )

    def say(self, text: str) -> None:
        text = f"{self.now:8.3f} {text}"
        self.log.append(text)
        if self.trace:
            print(text)

    def clock(self, host: Host) -> float:
        """What the clock of a node says."""
        return self.now

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def running(self) -> list[Host]:
        return [h for h in self.hosts.values() if h.node is not None]

    def node(self, i: int) -> Node:
        node = self.hosts[i].node
        if node is None:
            raise ValueError(f"node {i} is down")
        return node

    def crash(self, i: int, landed: int = 0, *, lost_records: int = 0, broker: bool = False, sent_arrives: bool = False) -> None:
        """Kills a node.

        Args:
            landed: So many of its oldest pending writes reach its stream all the same.
            lost_records: Its host dies too, and takes so many of the last records with it.
            broker: Its broker goes down too.
            sent_arrives: What it had sent stays under way.
        """
        host = self.hosts[i]
        writes = list(host.pending)
        host.pending.clear()
        host.stream += writes[:landed]
        self._note_had(host, writes[:landed])
        if self.late_writes:
            host.late.extend(writes[landed:])
        host.lost_host |= broker or bool(lost_records)
        if lost_records:
            del host.stream[max(0, len(host.stream) - lost_records) :]
            left = [read_stream(h.stream)[0] for h in self.hosts.values()]
            for message, (sequence, entry) in self.confirmed.items():
                if not any(log[sequence - 1 : sequence] == [entry] for log in left):
                    self.lost.add(message)  # the last copy went with the host: no in-sync node is left
        lost = f", {lost_records} records are lost" if lost_records else ""
        self.say(f"n{i} goes down" + (f", {landed} of {len(writes)} writes land" if writes else "") + lost)
        host.node = None
        host.subscriptions.clear()
        host.ends.clear()
        host.recovering, host.ended, host.operator, host.defers_to = 0, "", False, 0
        host.heard = host.heard_durably
        for (src, dst), conn in list(self.conns.items()):
            if src == i and sent_arrives and not conn.broken:
                conn.acks.clear()
            elif src == i:
                del self.conns[src, dst]
            elif dst == i:
                conn.broken = True
            if not sent_arrives:
                self.hosts[dst].ends.pop(i, None)
        for other in self.hosts.values():
            if other is not host:
                self._feed(other, PeerGone(i))
        self.check_word(host)

    def start(self, i: int) -> None:
        """Starts a node: it reads its stream; its predecessor's writes can no longer land."""
        host = self.hosts[i]
        node = self.node_class(self.settings(i), defers_to=host.defers_to, heard_before=host.heard_before)
        host.defers_to, host.heard_before = 0, None
        for key in [k for k in self.conns if k[0] == i]:
            self._break(self.conns.pop(key))
        host.entries, host.batches, host.memory, host.checkpoints = [], [], RoutingQueue(self.memory_bytes_max), Checkpoints()
        for offset, record in enumerate(host.stream):
            if isinstance(record, Fence):
                node.read_fence(record.epoch, record.out_end)
            else:
                if begins_log(record, node.log):
                    node.log.begin(record.header.first, record.body.before)  # type: ignore[attr-defined]
                    host.entries = list(record.body.prefix)  # type: ignore[attr-defined]
                before = node.log.end
                if node.read_batch(record.header).value == "append":
                    self._take(host, record, cut=record.header.first <= before)
                    if is_checkpoint(record):
                        host.checkpoints.noted(node.log.start_point(record.header, offset))
        host.node = node
        host.applied = min(max(host.recorded, node.log.base - 1), node.log.end)
        self.say(f"n{i} starts: log to {node.log.end}, applied {host.applied}")
        self._feed(host, Opened(host.applied, host.lost_host))
        self._feed(host, HeadMoved(host.head))
        self.check_memory(host)

    def late_write(self, i: int) -> None:
        """R3 off: a write of a killed sidecar lands now."""
        host = self.hosts[i]
        host.stream.append(host.late.popleft())
        self.say(f"a late write lands at n{i}")
        self.check_memory(host)

    def _take(self, host: Host, batch: StoredBatch, *, cut: bool) -> None:
        if cut:
            self._cut(host, batch.header.first)
        host.entries += entries_of(batch)
        host.batches.append(batch)
        host.memory.append(batch)

    def _cut(self, host: Host, first: int) -> None:
        del host.entries[first - 1 :]
        while host.batches and host.batches[-1].header.last >= first:
            host.batches.pop()
        host.memory.cut(first)
        host.checkpoints.cut(first)

    # ---- what may happen to a running node ---------------------------------------------------------------------------

    def tick(self, i: int) -> None:
        self._feed(self.hosts[i], Tick())

    def confirm(self, i: int, count: int = 1) -> None:
        """The stream confirms the `count` oldest writes."""
        host = self.hosts[i]
        count = min(count, len(host.pending))
        for _ in range(count):
            record = host.pending.popleft()
            host.stream.append(record)
            self._note_had(host, [record])
            self._locate(host, record)
            self.say(f"n{i}'s stream confirms {describe(record)}")
        if count:
            self._feed(host, OwnConfirmed(count))
            self._note_heard(host)

    def _note_had(self, host: Host, records: list[Record]) -> None:
        if self.strict:
            for record in records:
                if isinstance(record, StoredBatch):
                    if record.header.begins_renewal:
                        self.had[host.id].update(enumerate(record.body.prefix, 1))  # type: ignore[attr-defined]
                    self.had[host.id].update(enumerate(entries_of(record), record.header.first))

    @staticmethod
    def _locate(host: Host, record: Record) -> None:
        if isinstance(record, StoredBatch) and is_checkpoint(record):
            point = host.checkpoints.to_locate(record.header.first)
            if point is not None and (point.sequence, point.leader) == (record.header.first, record.header.leader):
                host.checkpoints.located(point, len(host.stream) - 1)

    def append(self, i: int, count: int = 1) -> int:
        """A client sends `count` messages to the primary; returns the last one."""
        messages = range(self.messages + 1, self.messages + count + 1)
        self.messages += count
        self.say(f"client sends {messages} to n{i}" if count > 1 else f"client sends m{self.messages} to n{i}")
        self._feed(self.hosts[i], Append(count, list(messages)))
        return self.messages

    def renew(self, i: int, *, begin: bool, given_up: bool = False) -> None:
        """The primary begins a renewal, or ends the one under way."""
        node = self.node(i)
        self.messages += 1
        renewal = node.log.end + 1 if begin else -node.log.unfinished if given_up else node.log.unfinished
        self.say(f"n{i} {'begins' if begin else 'gives up' if given_up else 'ends'} the renewal at {abs(renewal)}")
        self._feed(self.hosts[i], Append(1, [self.messages], renewal))

    def trim(self, i: int, head: int) -> None:
        """The broker drops the segments before entry `head`."""
        host = self.hosts[i]
        firsts = [batch.header.first for batch in host.batches if host.head < batch.header.first <= head]
        if firsts:
            host.head = firsts[-1]
            self.say(f"n{i}'s log begins at {host.head} now")
            self._feed(host, HeadMoved(host.head))

    def recovered(self, i: int) -> None:
        """The driver has done what a new epoch needs."""
        host = self.hosts[i]
        epoch, host.recovering = host.recovering, 0
        self.apply(i, self.node(i).safe, record=False)
        self._feed(host, Recovered(epoch))

    def apply(self, i: int, upto: int, *, record: bool = True) -> None:
        """The node's queues get what is safe, up to `upto`."""
        host = self.hosts[i]
        node = self.node(i)
        host.applied = node.applied = max(host.applied, min(upto, node.safe))
        if record:
            host.recorded = host.applied
            host.lost_host = host.lost_host and node.lost_host

    def end_incarnation(self, i: int, landed: int = 0) -> None:
        """Carries out a Restart, or an error that ends the incarnation."""
        host = self.hosts[i]
        defers_to, node = host.defers_to, host.node
        heard = (node.last_heard_epoch, node.last_heard_leader) if node is not None and node.last_heard_leader is not None else None
        self.crash(i, landed)
        host.defers_to, host.heard_before = defers_to, heard
        self.start(i)

    # ---- operator ----------------------------------------------------------------------------------------------------

    def promote(self, i: int, down: Iterable[int] = (), *, force: bool = False, dry_run: bool = False, untrue: bool = False,
                without_register: bool = False) -> Answer | None:
        """The operator's word: `down` are nodes that are down now. Returns the answer if there is one at once.

        Where it is not true, and node `i` can know that, it must be refused. `untrue`: it is not true, and nobody asked knows that.
        """
        down = frozenset(down)
        there = sorted(d for d in down if d in self.hosts and self.hosts[d].up)
        if there and not untrue and not any(self.in_touch(i, d) for d in there):
            raise ValueError(f"the operator's word must be true: {sorted(down)}")
        host = self.hosts[i]
        before = host.operator, host.forced
        host.answer, host.operator, host.forced = None, True, force
        self.say(f"operator promotes n{i}, down {sorted(down)}" + (", --force" if force else ""))
        self._feed(host, PromoteRequest(down, force, dry_run, without_register))
        if there and not untrue and not host.ended and (host.answer is None or host.answer.ok):
            raise Violation(f"n{i} is promoted over {', '.join(f'n{d}' for d in there)}, and one of the two connections to it stands")
        if dry_run or (host.answer is not None and not host.answer.ok):
            host.operator, host.forced = before
        return host.answer

    def in_touch(self, i: int, other: int) -> bool:
        """Whether one of the two connections between two nodes stands, as far as node `i` must know."""
        to, of = self.conns.get((i, other)), self.conns.get((other, i))
        reaches = to is not None and not to.broken
        return reaches or (of is not None and self.hosts[i].ends.get(other) is of and self.now - of.heard_at < HEARD_S)

    def remove(self, i: int, node: int) -> Answer | None:
        """The operator removes `node` from the set, at the primary `i`."""
        host = self.hosts[i]
        host.answer = None
        self.say(f"operator removes n{node} at n{i}")
        self._feed(host, RemoveRequest(node))
        if host.answer is not None and host.answer.ok:
            self.removed_by_hand.add(node)
            self.needed.discard(node)
        return host.answer

    def switchover(self, i: int, node: int = 0) -> Answer:
        """The operator asks the primary `i` to hand over; the door is closed and everything safe, so its driver does at once."""
        host = self.hosts[i]
        self.say(f"operator switches over from n{i} to n{node}")
        self._feed(host, SwitchoverRequest(node))
        answer, host.answer = host.answer, None
        assert answer is not None
        core = self.node(i)
        if answer.ok and core.safe == core.log.end:
            self._feed(host, StepDown(answer.node, self.given(host)))
        return answer

    def given(self, host: Host) -> Given:
        """What clients may have been given of what is still there: its driver knows."""
        return ()

    def discard(self, i: int) -> None:
        """`reinit --discard`: a node that is down begins again with an empty stream."""
        host = self.hosts[i]
        self.say(f"n{i} is made new")
        self.given_up |= set(enumerate(host.entries, 1))
        host.stream, host.recorded, host.head, host.lost_host = [], 0, 0, False
        host.heard = host.heard_durably = Heard()

    # ---- links -------------------------------------------------------------------------------------------------------

    def cut(self, a: int, b: int, *, both: bool = True) -> None:
        for src, dst in ((a, b), (b, a)) if both else ((a, b),):
            self.cuts.add((src, dst))
            if (src, dst) in self.conns:
                self._break(self.conns[src, dst])
                self._feed(self.hosts[dst], PeerGone(src))
        self.say(f"link n{a} {'-' if both else '->'} n{b} cut")

    def heal(self) -> None:
        self.cuts = set(self.cut_for_good)
        for conn in self.conns.values():
            conn.stalled = False
        self.say("links healed")

    def _break(self, conn: Conn) -> None:
        conn.broken = True
        conn.queue.clear()
        conn.acks.clear()
        if self.hosts[conn.dst].ends.get(conn.src) is conn:
            del self.hosts[conn.dst].ends[conn.src]

    def can_connect(self, src: int, dst: int) -> bool:
        return (src, dst) not in self.conns and (src, dst) not in self.cuts and self.hosts[src].up and self.hosts[dst].up

    def connect(self, src: int, dst: int) -> None:
        self.conns[src, dst] = Conn(src, dst)
        self.say(f"n{src} connects to n{dst}")
        self._feed(self.hosts[src], PeerConnected(dst))

    def notice(self, src: int, dst: int) -> None:
        """The node that opened a connection notices that it is broken."""
        host = self.hosts[src]
        del self.conns[src, dst]
        host.subscriptions.pop(dst, None)
        self.say(f"n{src} lost n{dst}")
        self._feed(host, PeerDisconnected(dst))

    def deliver(self, src: int, dst: int) -> None:
        """The oldest message on a connection arrives."""
        conn = self.conns[src, dst]
        message, seen = conn.queue.popleft()
        conn.heard_at = self.now
        host = self.hosts[dst]
        node = self.node(dst)
        if isinstance(message, Push):
            if host.ends.get(src) is not conn:
                self._break(conn)
                return
            conn.open.append(message.batch.last)
            self.say(f"n{src}'s push {describe_batch(message.batch)} reaches n{dst}")
        else:
            old = host.ends.get(src)
            if old is not conn:
                host.ends[src] = conn
                if old is not None:
                    self._break(old)
            if not isinstance(message, Heartbeat):
                self.say(f"n{src}'s {message} reaches n{dst}")
            message = PeerMessage(src, message)  # type: ignore[arg-type]
        before = node.last_heard_leader
        node.last_heard_leader = None
        self._feed(host, message)
        answers = isinstance(message, PeerMessage) and isinstance(message.message, Lead) and node.leader_epoch == message.message.epoch
        if node.last_heard_leader is not None or answers:
            host.heard = seen
            node.last_heard_leader = node.last_heard_leader or before
            self._note_heard(host)
        else:
            node.last_heard_leader = before
        if isinstance(message, Push):
            conn.pushed.append(message)
            if self.repeating and self.repeating.random() < 0.1 and not conn.broken:
                again = self.repeating.choice(conn.pushed)
                self.say(f"n{src}'s push {describe_batch(again.batch)} reaches n{dst} once more")
                conn.open.append(again.batch.last)
                self._feed(host, again)

    def _heard_now(self, node: Node) -> Heard:
        return Heard(len(self.confirmed), frozenset(epoch for epoch, _ in node.log.state().epochs)) if node.leading else Heard()

    def _note_heard(self, host: Host) -> None:
        if not any(isinstance(record, Fence) for record in host.pending):
            host.heard_durably = host.heard

    def deliver_ack(self, src: int, dst: int) -> None:
        """The newest ack on a connection reaches the node that pushed."""
        conn = self.conns[src, dst]
        upto = conn.acks.pop()
        conn.acks.clear()
        subscription = self.hosts[src].subscriptions.get(dst)
        if subscription is not None and upto <= subscription.sent:
            subscription.settle(upto)
            self.say(f"ack {upto} of n{dst} reaches n{src}")
            self._feed(self.hosts[src], PeerAcked(dst, upto))
            self._pump(self.hosts[src], dst)

    def _pump(self, host: Host, peer: int) -> None:
        subscription = host.subscriptions.get(peer)
        conn = self.conns.get((host.id, peer))
        node = host.node
        if subscription is None or node is None:
            return
        while subscription.sent < len(host.entries) and subscription.has_room():
            index = host.memory.starting_at(subscription.sent + 1)
            if index is not None:
                batch = host.memory[index]
            else:
                left = (b for b in host.batches if b.header.first == subscription.sent + 1 >= host.head)
                found = next(left, None)
                if found is None:
                    self.unsent.append((host.id, peer))  # its driver finds out a little later
                    del host.subscriptions[peer]
                    return
                batch = found
            subscription.send(batch)
            if conn is not None and not conn.broken:
                h = batch.header
                header = BatchHeader(h.epoch, h.first, h.last, h.previous_epoch, node.leading, h.sets, h.renewal, h.record)
                before = batch.body.before if h.begins_renewal else None  # type: ignore[attr-defined]
                conn.queue.append((Push(host.id, header, node.safe, batch.body, before), self._heard_now(node)))

    # ---- effects -----------------------------------------------------------------------------------------------------

    def _feed(self, host: Host, event: Event) -> None:
        if host.node is None or host.ended:
            return
        for effect in host.node.handle(event, self.clock(host)):
            self._EFFECTS[type(effect)](self, host, host.node, effect)  # type: ignore[operator]
        if len(host.entries) != host.node.log.end:
            raise Violation(f"n{host.id} has {len(host.entries)} entries and says {host.node.log.end}")

    def _write_batch(self, host: Host, node: Node, effect: WriteBatch) -> None:
        header = effect.batch
        if effect.kind is not EntryKind.ENTRIES:
            self.say(f"n{host.id} writes {effect.kind.value} {sorted(header.sets[0][1])} at {header.first}, epoch {epoch_name(header.epoch)}")
        batch = StoredBatch(header, effect.body if isinstance(effect.body, bytes) else self._encode(host, effect))
        if header.first == node.log.base:
            host.entries, host.applied, host.head = list(batch.body.prefix), header.first - 1, header.first  # type: ignore[attr-defined]
        self._check_history(batch)
        if effect.kind is EntryKind.MEMBERS:
            self._check_members(header)
            if self.strict:
                self.needed |= header.sets[0][1]
        host.pending.append(batch)
        self._take(host, batch, cut=False)
        if is_checkpoint(batch):
            host.checkpoints.noted(node.log.start_point(header))
        if effect.kind is EntryKind.MARKER:
            self._check_take(host, node)
        if node.leading:
            for peer in list(host.subscriptions):
                self._pump(host, peer)

    def _encode(self, host: Host, effect: WriteBatch) -> Body:
        """Every fifth message stands for a CHECKPOINT: one that is alone in its batch."""
        messages: list[int] = effect.body if effect.kind is EntryKind.ENTRIES else [0]  # type: ignore[assignment]
        checkpoint = (len(messages) == 1 and messages[0] % 5 == 0 and not effect.batch.sets) or effect.batch.begins_renewal
        made = body(b" ".join(b"%d" % m for m in messages), effect.batch.epoch, messages, checkpoint=checkpoint)
        if effect.batch.begins_renewal:
            made.prefix = list(host.entries)
            first = effect.batch.first
            log = self.node(host.id).log.state()
            made.before = LogState(
                epochs=tuple(e for e in log.epochs if e[1] < first),
                sets=tuple(s for s in log.sets if s[0] < first),
                renewals=tuple(r for r in log.renewals if r[0] < first),
                record=log.record,
            )
        return made

    def _write_fence(self, host: Host, node: Node, effect: WriteFence) -> None:
        host.pending.append(Fence(effect.epoch, effect.out_end))

    def _send(self, host: Host, node: Node, effect: Send) -> None:
        conn = self.conns.get((host.id, effect.peer))
        if conn is not None and not conn.broken:
            conn.queue.append((effect.message, self._heard_now(node)))

    def _subscribe(self, host: Host, node: Node, effect: Subscribe) -> None:
        host.subscriptions[effect.peer] = ReplicatingSubscription(effect.guard, in_flight_bytes_max=self.in_flight_bytes_max)
        self._pump(host, effect.peer)

    def _unsubscribe(self, host: Host, node: Node, effect: Unsubscribe) -> None:
        host.subscriptions.pop(effect.peer, None)

    def _disconnect(self, host: Host, node: Node, effect: Disconnect) -> None:
        host.subscriptions.pop(effect.peer, None)
        if (host.id, effect.peer) in self.conns:
            self._break(self.conns[host.id, effect.peer])

    def _ack(self, host: Host, node: Node, effect: Ack) -> None:
        conn = host.ends.get(effect.peer)
        if conn is not None:
            last = 0
            while conn.open and conn.open[0] <= effect.upto:
                last = max(last, conn.open.popleft())  # of two that are the same, one may be older
            if last and not conn.broken and self.hosts[conn.src].up:
                conn.acks.append(last)

    def _refuse_push(self, host: Host, node: Node, effect: RefusePush) -> None:
        conn = host.ends.get(effect.peer)
        self.say(f"n{host.id} refuses a push of n{effect.peer}: {effect.reason}")
        if conn is not None:
            # What was written before the connection is closed still arrives: nothing here depends on it, so it is lost.
            self._break(conn)

    def _safe(self, host: Host, node: Node, effect: SafeAdvanced) -> None:
        self.say(f"n{host.id}: safe {effect.safe}")
        self._check_safe(host, node, effect.safe)
        if node.role is Role.ACTIVE:
            self._confirm_clients(host, node)

    def _cut_tail(self, host: Host, node: Node, effect: CutTail) -> None:
        self.say(f"n{host.id} cuts from {effect.first}")
        if effect.first <= host.applied:
            raise Violation(f"n{host.id} cuts its log at {effect.first}, its queues were applied up to {host.applied}")
        self._check_cut(host, effect.first)
        self._cut(host, effect.first)

    def _role_changed(self, host: Host, node: Node, effect: RoleChanged) -> None:
        self.say(f"n{host.id}: {effect.role.value}: {effect.reason}")
        if effect.role is Role.ACTIVE:
            self._check_backups(host, node)
            self._confirm_clients(host, node)

    def _open_door(self, host: Host, node: Node, effect: OpenDoor) -> None:
        self.say(f"n{host.id} opens its door, epoch {epoch_name(effect.epoch)}")
        host.opened_at = self.clock(host)
        self._check_open(host, node)

    def _recover(self, host: Host, node: Node, effect: Recover) -> None:
        host.recovering = effect.epoch

    def _restart(self, host: Host, node: Node, effect: Restart) -> None:
        self.say(f"n{host.id} must restart: {effect.reason}")
        host.ended, host.defers_to = effect.reason, effect.defers_to

    def _answer(self, host: Host, node: Node, effect: Answer) -> None:
        self.say(f"n{host.id} answers {'yes' if effect.ok else 'no'}: {effect.text}")
        host.answer = effect
        host.operator = False

    _EFFECTS = {
        WriteBatch: _write_batch,
        WriteFence: _write_fence,
        Send: _send,
        Subscribe: _subscribe,
        Unsubscribe: _unsubscribe,
        Disconnect: _disconnect,
        Ack: _ack,
        RefusePush: _refuse_push,
        SafeAdvanced: _safe,
        CutTail: _cut_tail,
        RoleChanged: _role_changed,
        Recover: _recover,
        OpenDoor: _open_door,
        Restart: _restart,
        Answer: _answer,
    }

    def cannot_send(self) -> None:
        """Drivers tell their nodes whom they cannot send what they need."""
        unsent, self.unsent = self.unsent, []
        for i, peer in unsent:
            self.say(f"n{i}'s log no longer has what n{peer} needs")
            self._feed(self.hosts[i], CannotSend(peer))

    # ---- promises ----------------------------------------------------------------------------------------------------

    def _check_history(self, batch: StoredBatch) -> None:
        """Log matching: an (epoch, sequence) is the same entry after the same entry, wherever it is written."""
        before = batch.header.previous_epoch
        for sequence, entry in enumerate(entries_of(batch), batch.header.first):
            known = self.history.setdefault((entry.epoch, sequence), (before, entry.message))
            if known != (before, entry.message):
                raise Violation(f"entry {epoch_name(entry.epoch)}.{sequence} is {entry.message} after {before}, and was {known}")
            before = entry.epoch

    def _lacks(self, entries: list[Entry]) -> set[int]:
        """What was confirmed and no operator was told to be in danger, and is not in this log."""
        held = len(entries)
        return {m for m, (seq, entry) in self.confirmed.items() if (seq > held or entries[seq - 1] != entry) and m not in self.lost}

    def _check_members(self, header: BatchHeader) -> None:
        """R17: who has joined in part is not in the set. (A peer's memory is never behind what it has acknowledged.)"""
        before = self.hosts[owner_of(header.leader)].node
        known = before.log.sets[-2][1] if before and before.leading == header.leader else header.sets[0][1]
        for i in header.sets[0][1] - known:
            if has_joined_in_part(self.hosts[i]):
                raise Violation(f"n{i} is taken into the set and has joined only in part")

    def _check_open(self, host: Host, node: Node) -> None:
        if has_joined_in_part(host) and not self.blind:
            raise Violation(f"n{host.id} opens its door and has joined only in part, and no operator was told")
        missing = self._lacks(host.entries)
        newer = any(h.node and h.node.serving and h.node.leading > node.leading for h in self.hosts.values())
        if missing and not newer:
            raise Violation(f"G1: {sorted(missing)} were confirmed and are not in the log of the open primary n{host.id}, and no operator was told")

    def _check_backups(self, host: Host, node: Node) -> None:
        """A primary confirms when so many others have everything that is safe, or it has waited for them. (What hosts have lost is lost.)"""
        lost = any(h.lost_host for h in self.hosts.values()) or self.given_up
        if lost or self.clock(host) - host.opened_at >= EXPECTED_BACKUPS_TIMEOUT_S:
            return
        safe = host.entries[: node.safe]
        there = [h.id for h in self.hosts.values() if h is not host and read_stream(h.stream)[0][: node.safe] == safe]
        if len(there) < self.expected_backups:
            raise Violation(f"n{host.id} confirms, and only {there} have what is safe, of {self.expected_backups} expected backups")

    def _confirm_clients(self, host: Host, node: Node) -> None:
        """The door confirms what is safe."""
        fresh: list[tuple[int, Entry]] = []
        for sequence in range(node.safe, 0, -1):
            entry = host.entries[sequence - 1]
            if entry.message in self.confirmed or (entry.message == 0 and entry.epoch < node.leading):
                break
            if entry.message:
                fresh.append((sequence, entry))
        for sequence, entry in reversed(fresh):
            for other in self.running():
                o = other.node
                if o and o.serving and o.leading > node.leading and other.entries[sequence - 1 : sequence] != [entry]:
                    raise Violation(f"G5: n{host.id} confirms m{entry.message} while n{other.id} (epoch {epoch_name(o.leading)}) is open without it")
            self.confirmed[entry.message] = (sequence, entry)
            self.confirmed_by.append(node.leading)
            self.lost.discard(entry.message)

    def _check_safe(self, host: Host, node: Node, safe: int) -> None:
        if safe > node.durable:
            raise Violation(f"n{host.id} calls {safe} safe, its stream confirmed {node.durable}")
        self._check_guards(node, safe)
        for sequence in range(safe, 0, -1):
            key = (sequence, host.entries[sequence - 1])
            if key in self.safe_at_leader:
                break
            if not node.leading:
                raise Violation(f"n{host.id} takes {key} for safe, no leader ever did")
            if without := [i for i in self.needed if key not in self.had[i]]:
                raise Violation(f"strict: n{host.id} calls {key} safe, and n{without[0]}, which nobody has removed, never had it")
            self.safe_at_leader.add(key)

    def _check_guards(self, node: Node, safe: int) -> None:
        """A leader completes what no member's guard delays; the guards are those of the members, and of one newcomer at most."""
        if not node.leading:
            return
        for number, peer in node.peers.items():
            if number in node.log.members and peer.guard.state(safe) is not State.SAFE:
                raise Violation(f"n{node.me} calls {safe} safe, which is {peer.guard.state(safe).value} at n{number}")
        guarded = {number for number, peer in node.peers.items() if peer.guard.first_guarded is not None}
        members = node.log.members & node.peers.keys()
        if not members <= guarded or len(guarded - members) > 1:
            raise Violation(f"n{node.me} guards {sorted(guarded)}, its set has {sorted(members)}")

    def _check_take(self, host: Host, node: Node) -> None:
        """What an epoch's new owner lacks must have been said, truly and without need."""
        missing = self._lacks(host.entries)
        if not host.operator:
            return
        self.blind |= host.lost_host or (host.forced and has_joined_in_part(host))
        if not missing:
            return
        if self.strict and not self.removed_by_hand:
            raise Violation(f"strict: n{host.id} is promoted without {sorted(missing)}, which were confirmed")
        self.check_word(host)
        if not host.forced:
            self._check_need(host, node, missing)
        self.lost |= missing

    def _check_need(self, host: Host, node: Node, missing: set[int]) -> None:
        """Nobody who has promised and had a longer log has what the new owner lacks.

        Not where that one is diverged. Where its log is shorter, and it would refuse to drop it, it is another history: the operator has chosen.
        """
        rank = _rank(host.entries[:-1])
        promised = [h for h in self.running() if h.node and h.node.log.top == node.leading and h.node.role is not Role.DIVERGED]
        for other in promised:
            if (held := missing - self._lacks(other.entries)) and _rank(other.entries) > rank:
                raise Violation(f"n{host.id} is promoted without force, and lacks {sorted(held)}, which n{other.id} has, who promised")

    def check_word(self, host: Host) -> None:
        """A node that would say, started from what is on its stream now, that it was in sync when it last heard its primary, lacks nothing
        that was confirmed before that."""
        index = read_index(host.id, host.stream)
        if not index.in_set or host.lost_host:
            return
        log, _ = read_stream(host.stream)
        count, line = host.heard_durably
        heard = [m for m, by in list(zip(self.confirmed.items(), self.confirmed_by))[:count] if by in line]
        missing = [m for m, (sequence, entry) in heard if m not in self.lost and log[sequence - 1 : sequence] != [entry]]
        if missing:
            raise Violation(f"untrue: n{host.id} would say that it was in sync when it last heard its primary, but lacks {missing}")

    def _check_cut(self, host: Host, first: int) -> None:
        gone = set(enumerate(host.entries[first - 1 :], first)) & self.safe_at_leader - self.given_up
        if not gone or self.blind:
            return
        elsewhere = [read_stream([*h.stream, *h.pending])[0] for h in self.hosts.values() if h is not host]
        for sequence, entry in gone:
            if not any(log[sequence - 1 : sequence] == [entry] for log in elsewhere):
                raise Violation(f"silent loss: n{host.id} cuts off entry {sequence} (m{entry.message}), the last copy of what was safe")

    def check_memory(self, host: Host) -> None:
        """A node's memory is what its stream will say."""
        node = host.node
        if node is None:
            return
        log, top = read_stream([*host.stream, *host.pending])
        if log != host.entries or len(log) != node.log.end or top != node.log.top:
            raise Violation(
                f"A: the memory of n{host.id} is not what its stream will say: log to {node.log.end}, top {epoch_name(node.log.top)}; "
                f"stream to {len(log)}, top {epoch_name(top)}"
            )
        index = read_index(host.id, [*host.stream, *host.pending])
        if with_old_sets_merged(index.state(), node.safe) != with_old_sets_merged(node.log.state(), node.safe):
            raise Violation(f"A: n{host.id} would rebuild {index.state()}, and has {node.log.state()}")
        self._check_restart(host, node)

    def _check_restart(self, host: Host, node: Node) -> None:
        """R7: reading from the last CHECKPOINT that is applied gives what reading the whole stream gives."""
        point = host.checkpoints.start(host.applied)
        if point is None:
            return
        whole = node.log.state()
        epochs = tuple((epoch, first) for epoch, first in whole.epochs if first < point.sequence)
        sets = tuple((sequence, members) for sequence, members in whole.sets if sequence < point.sequence)
        index = LogIndex(host.id)
        renewals = tuple((sequence, renewal) for sequence, renewal in whole.renewals if sequence < point.sequence)
        index.restore(LogState(point.leader, point.sequence - 1, epochs, sets, point.in_set, renewals=renewals), point.out_since, point.base)
        for record in [*host.stream, *host.pending][point.offset :]:
            if isinstance(record, Fence):
                index.fence(record.epoch, record.out_end)
            else:
                index.accept(record.header)
        same = with_old_sets_merged(index.state(), node.safe) == with_old_sets_merged(whole, node.safe)
        if not same or index.out_since != node.log.out_since:
            raise Violation(f"A: n{host.id} would restart at entry {point.sequence} with {index.state()}, and has {whole}")

    # ---- convenience -------------------------------------------------------------------------------------------------

    def settle(self, seconds: float = 0.0, *, only: Iterable[int] | None = None) -> None:
        """Everything that is under way arrives, in a fixed order, and `seconds` pass with their ticks. Only among the nodes given."""
        nodes = set(self.hosts) if only is None else set(only)
        end = self.now + seconds
        while True:
            for _ in range(10_000):
                if not self._one_step(nodes):
                    break
            else:
                raise Violation("no rest: messages beget messages without end")
            if self.now >= end:
                return
            self.now += 0.05
            for host in self.running():
                if host.id in nodes:
                    self.tick(host.id)

    def _one_step(self, nodes: set[int]) -> bool:
        for i in sorted(nodes):
            host = self.hosts[i]
            if host.node is None:
                continue
            if host.ended:
                self.end_incarnation(i, len(host.pending))
                return True
            if host.pending:
                self.confirm(i, len(host.pending))
                return True
            if host.recovering:
                self.recovered(i)
                if not host.recovering:
                    return True
        for src in sorted(nodes):
            for dst in sorted(nodes - {src}):
                conn = self.conns.get((src, dst))
                if conn is None:
                    if self.can_connect(src, dst):
                        self.connect(src, dst)
                        return True
                elif conn.broken:
                    self.notice(src, dst)
                    return True
                elif not conn.stalled and conn.queue and self.hosts[dst].up:
                    self.deliver(src, dst)
                    return True
                elif not conn.stalled and conn.acks:
                    self.deliver_ack(src, dst)
                    return True
        return False

    def primary(self) -> Host | None:
        """The open primary of the highest epoch."""
        open_ones = [h for h in self.running() if h.node and h.node.serving and not h.ended]
        return max(open_ones, key=lambda h: h.node.leading if h.node else 0, default=None)


def describe(record: Record) -> str:
    if isinstance(record, Fence):
        return f"FENCE({epoch_name(record.epoch)}{f', out at {record.out_end}' if record.out_end else ''})"
    return describe_batch(record.header)


def describe_batch(batch: BatchHeader) -> str:
    sets = "".join(f" set {sorted(members)}" for _, members in batch.sets)
    return f"{epoch_name(batch.epoch)} [{batch.first}..{batch.last}]{sets} by {epoch_name(batch.leader)}"


__all__ = ["Cluster", "Conn", "Effect", "Entry", "Fence", "Host", "Message", "Violation", "owner_of", "read_stream"]
