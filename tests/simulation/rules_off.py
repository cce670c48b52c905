"""Each part of each rule switched off alone, to show that the checks would notice: options for the simulation, and what to patch meanwhile.

Rules are those of docs/architecture.md. `LOG` parts are looked for in lives of the log (chaos.py), `ETCD` parts in lives of a group that etcd
coordinates (registered.py), the others in lives of the whole (life.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import applying
import sidecar
import world
from applying import Applier, Sweeper
from broker import Copy
from door import Relay
from pyroaring import BitMap64
from registered import RegisteredCluster
from sidecar import Site, Streams

from broker_plugin.log import replica as replica_module
from broker_plugin.log.codec import checkpoint_of, parse_batch
from broker_plugin.log.delivery_history import DeliveryHistory
from broker_plugin.log.messages import Settled
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication import candidate as candidate_module
from lrq_ha.replication import follower as follower_module
from lrq_ha.replication import leader as leader_module
from lrq_ha.replication import lease_candidate as lease_candidate_module
from lrq_ha.replication import queue_filter as queue_filter_module
from lrq_ha.replication.applied import Generations
from lrq_ha.replication.base import NodeBase, Written
from lrq_ha.replication.candidate import Candidate
from lrq_ha.replication.checkpoints import Checkpoints, StartPoint
from lrq_ha.replication.dead_letters import Deaths
from lrq_ha.replication.deduplication import Dedup
from lrq_ha.replication.delivery_filter import DeliveryFilter
from lrq_ha.replication.events import Ack, Effect, Event, Heartbeat, Lead, Opened, PromoteRequest, Push, Recover, WriteBatch, WriteFence
from lrq_ha.replication.follower import Follower
from lrq_ha.replication.in_sync import InSyncSet
from lrq_ha.replication.leader import Leader
from lrq_ha.replication.lease_candidate import LeaseCandidate
from lrq_ha.replication.log import Acceptance, BatchHeader, LogIndex, LogState, Members, common_end, safe_position
from lrq_ha.replication.node import Node
from lrq_ha.replication.operator_requests import Requests
from lrq_ha.replication.positions import owner_of
from lrq_ha.replication.queue_filter import QueueFilter, Verdict
from lrq_ha.replication.register import Record, RegisterView
from lrq_ha.replication.register_keeper import RegisterKeeper
from lrq_ha.sidecar.node import recovery as rebuild_module

Options = dict[str, object]


class RefusalsFromTheCheckpoint(rebuild_module._Refusals):
    """What stands before the last CHECKPOINT is not looked at (R16)."""

    def take(self, headers: Mapping[str, Any], body: bytes) -> None:
        super().take(headers, body)
        if checkpoint_of(pb.Batch.FromString(body).runs) is not None:
            self.first = parse_batch(dict(headers))[0].first


class AcksAtAccept(Node):
    """A push is acknowledged when it is accepted, not when the own stream has it (R4)."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        if isinstance(event, Push) and any(isinstance(e, WriteBatch) for e in effects):
            effects.append(Ack(event.peer, event.batch.last))
        return effects


class PromisesLate(Node):
    """A promise raises `top` only when its FENCE is confirmed (R2)."""

    def write_fence(self, epoch: int, out_end: int, then: Callable[[float], None]) -> None:
        def confirmed(now: float) -> None:
            self.log.fence(epoch, out_end)
            then(now)

        self._pending.append(Written(0, confirmed))
        self.emit(WriteFence(epoch, out_end))


def confirm_at_once(self: Leader, now: float) -> None:
    """A primary confirms from the moment its door opens."""
    with patch.object(self._node, "settings", replace(self._node.settings, expected_backups=0)):
        _consider_confirming(self, now)


_consider_confirming = Leader._consider_confirming


def consider_with_its_set(self: Candidate, now: float) -> None:
    """A restarted leader takes an epoch when the nodes of its own set answer, not all that are configured."""
    node = self._node
    outside = [n for n, p in node.peers.items() if n not in node.log.members and p.hello is None]
    known = {n: p for n, p in node.peers.items() if n not in outside}
    with patch.object(node, "peers", known if node.led_last and outside else node.peers):
        _consider(self, now)


_consider = Candidate.consider


def half_answers_if_heard(self: Requests, number: int, now: float) -> str:
    """A node that is reached, and has said nothing, may be said to be down."""
    peer = self._node.peers[number]
    with patch.object(peer, "connected", False):
        return _half_answers(self, number, now)


_half_answers = Requests._half_answers


Sets = Sequence[tuple[int, Members]]


def removal_at_append(sets: Sets, marker: int, leader: int, durable: int, acknowledged: dict[int, int]) -> int:
    held = min([durable, *(acknowledged.get(n, 0) for n in sets[-1][1] if n != leader)])
    return held if held >= marker else 0


def addition_when_safe(sets: Sets, marker: int, leader: int, durable: int, acknowledged: dict[int, int]) -> int:
    in_force: Members = frozenset()
    for sequence, members in reversed(sets):
        if sequence < marker:
            break
        in_force = members if in_force - members else in_force | members
        held = min([durable, *(acknowledged.get(n, 0) for n in in_force if n != leader)])
        if held >= sequence:
            return held
    return 0


def safe_without_marker(sets: Sets, marker: int, leader: int, durable: int, acknowledged: dict[int, int]) -> int:
    """The new set counts although no node has its MARKER yet."""
    return min([durable, *(acknowledged.get(n, 0) for n in sets[-1][1] if n != leader)])


def refuses_by_sets_inside(tail: LogState, leader: LogState, leader_node: int) -> bool:
    common = common_end(tail, leader)
    return any(leader_node not in members for sequence, members in tail.sets if sequence > common)


def refuses_by_next_entry(tail: LogState, leader: LogState, leader_node: int) -> bool:
    common = common_end(tail, leader)
    writers = [owner_of(epoch) for epoch, first in leader.epochs if first <= common + 1]
    taker = writers[-1] if common < leader.end else leader_node
    sets = [m for s, m in tail.sets if s <= common][-1:] + [m for s, m in tail.sets if s > common]
    return tail.end > common and any(taker not in members for members in sets)


def fence_without_out(self: LogIndex, epoch: int, out_end: int = 0) -> None:
    self.top = max(self.top, epoch)


def fence_without_end(self: LogIndex, epoch: int, out_end: int = 0) -> None:
    self.top = max(self.top, epoch)
    self.in_set = self.in_set and not out_end


def renewed_when_begun(self: LogIndex, head: int, safe: int) -> int:
    return max((renewal for sequence, renewal in self._renewals if sequence <= safe and renewal >= head), default=0)


def _patched(owner: object, name: str, value: object) -> Callable[[], Iterator[Options]]:
    def use() -> Iterator[Options]:
        with patch.object(owner, name, value):
            yield {}

    return use


def _options(**options: object) -> Callable[[], Iterator[Options]]:
    def use() -> Iterator[Options]:
        yield options

    return use


class Part(NamedTuple):
    """A part of a rule, and how it is switched off."""

    rule: str
    use: Callable[[], Iterator[Options]]


# ---- the log ---------------------------------------------------------------------------------------------------------


def judge_any_leader(self: LogIndex, batch: BatchHeader) -> Acceptance:
    top, self.top = self.top, 0
    try:
        return _judge(self, batch)
    finally:
        self.top = top


def judge_by_sequence(self: LogIndex, batch: BatchHeader) -> Acceptance:
    if batch.leader < self.top:
        return Acceptance.STALE
    if batch.first - 1 > self.end:
        return Acceptance.GAP
    return Acceptance.REPEAT if batch.last <= self.end and self.epoch_at(batch.last) == batch.epoch else Acceptance.APPEND


def judge_repeats_as_new(self: LogIndex, batch: BatchHeader) -> Acceptance:
    verdict = _judge(self, batch)
    return Acceptance.APPEND if verdict is Acceptance.REPEAT else verdict


_judge = LogIndex.judge


def safe_when_own(sets: Sets, marker: int, leader: int, durable: int, acknowledged: dict[int, int]) -> int:
    return safe_position(sets, marker, leader, durable, dict.fromkeys(acknowledged, durable))


def safe_without_own(sets: Sets, marker: int, leader: int, durable: int, acknowledged: dict[int, int]) -> int:
    others = [acknowledged.get(n, 0) for n in sets[-1][1] if n != leader]
    return safe_position(sets, marker, leader, max([durable, *others]), acknowledged)


def admit_at_once(self: InSyncSet, newcomer: int, deadline: float, now: float) -> None:
    self._admitting = None
    self._change(self._node.log.members | {newcomer})


def strict_goes_on_without(self: InSyncSet, member: int, reason: str) -> None:
    if reason == "its broker went down":
        self.leaves(member, reason)
    else:
        _lost(self, member, reason)


_lost = InSyncSet.lost


def goes_on_with_a_lost_host(self: Candidate, silent: frozenset[int]) -> bool:
    return self._node.settings.restart_alone and self._node.led_last


def heartbeat_without_its_epoch(self: Node, node: int, message: Heartbeat, now: float) -> None:
    with patch.object(Leader, "superseded_by", lambda *_: False):
        _on_heartbeat(self, node, message, now)


_on_heartbeat = Node._on_heartbeat


class ForgetsLostHost(Node):
    """A node whose broker or host went down says nothing of it (R16)."""

    def _opened(self, event: Opened, now: float) -> None:
        super()._opened(replace(event, lost_host=False), now)


def cut_what_is_applied(self: Follower, peer: int, lead: Lead, now: float) -> None:
    """A tail is judged by the sets alone, whatever has been applied."""
    node = self._node
    safe, node.safe = node.safe, 0
    _fenced(self, peer, lead, now)
    node.safe = min(safe, common_end(node.state(), lead.log)) if node.following else safe


_fenced = Follower._fenced


# ---- the queues ------------------------------------------------------------------------------------------------------


def send_and_count(self: Applier, message: applying.Message) -> None:
    _send(self, message)
    self._replica.progress.applied(message.sequence, message.sequence)


_send = Applier._send


def confirm_when_safe(self: Relay, exchange: str, key: str, number: int, id: int) -> None:
    _publish(self, exchange, key, number, id)
    run = self.channel.confirms.abandon()[-1:]
    for one in run:
        self._answer(one.client_tag, True)


_publish = Relay.publish


def refused_is_skipped(self: Applier, message: applying.Message) -> None:
    self._replica.progress.applied(message.sequence, message.sequence)


def start_anywhere(self: Checkpoints, applied: int) -> StartPoint | None:
    return _start(self, 1 << 62)


_start = Checkpoints.start


def record_without_generations(replica: Any, checkpoints: Checkpoints) -> pb.Applied:
    record = _applied_record(replica, checkpoints)
    del record.generations[:]
    return record


def record_of_everything(replica: Any, checkpoints: Checkpoints) -> pb.Applied:
    record = _applied_record(replica, checkpoints)
    record.applied = replica.progress.safe
    return record


_applied_record = rebuild_module.applied_record


def number_from_record(self: Streams, site: Site) -> None:
    self._site = site
    known = pb.Applied.FromString(site.records[-1]).generations if site.records else []
    self.generation = max((g.generation for g in known), default=0) + 1
    self.write_applied = lambda body: _nothing()  # type: ignore[method-assign]


async def _nothing() -> None: ...


def counts_from_applied(self: Generations, seq: int, generation: int) -> bool:
    return generation == self.of(seq + 1)


def verdict_without(*off: Verdict, instead: Verdict = Verdict.GIVE) -> Callable[..., Verdict]:
    def verdict(self: QueueFilter, seq: int, generation: int, deaths: Deaths = ()) -> Verdict:
        found = _verdict(self, seq, generation, deaths)
        return instead if found in off and self._generations.counts(seq, generation) else found

    return verdict


_verdict = QueueFilter.verdict


def send_out_of_order(self: Applier, message: Any) -> None:
    _send(self, message)
    inbox, waiting = self._pipe.inbox, self.open
    if message.sequence % 5 == 0 and len(inbox) > 1 and inbox[-1][0] == inbox[-2][0] == "publish":
        inbox[-1], inbox[-2] = inbox[-2], inbox[-1]
        waiting[-1], waiting[-2] = waiting[-2], waiting[-1]


_send = Applier._send


def commit_in_pieces(self: Relay, *what: Any) -> None:
    append = replica_module.Replica.append

    def alone(replica: replica_module.Replica, *entry: Any, **more: Any) -> int:
        last = append(replica, *entry, **more)
        replica.flush()
        return last

    with patch.object(replica_module.Replica, "append", alone):
        _commit(self, *what)


_commit = Relay.commit


def confirm_in_any_case(self: Relay, tell: Callable[[Any], None], ok: bool = True) -> None:
    if self.client is not None:
        tell(self.client)


def confirm_before_the_own_stream(self: Relay) -> None:
    self._until_durable = deque((tag, 0) for tag, _ in self._until_durable)
    _durable_advanced(self)


_durable_advanced = Relay.durable_advanced


def give_what_was_refused(self: QueueFilter, seq: int, generation: int, deaths: Deaths = ()) -> Verdict:
    verdict = _verdict(self, seq, generation, deaths)
    return Verdict.GIVE if verdict is Verdict.ACK and seq in self._filter.refused._done and seq not in self._done else verdict


def give_what_was_purged(self: QueueFilter, seq: int, generation: int, deaths: Deaths = ()) -> Verdict:
    verdict = _verdict(self, seq, generation, deaths)
    alone = seq not in self._done and seq not in self._filter.refused._done
    return Verdict.GIVE if verdict is Verdict.ACK and not deaths and self._is_purged(seq) and alone else verdict


def reject_what_is_live(self: Sweeper, target: QueueFilter, copy: Copy) -> Verdict:
    verdict = _judged_by_the_sweeper(self, target, copy)
    return Verdict.REJECT if verdict is Verdict.GIVE else verdict


_judged_by_the_sweeper = Sweeper.judge


def reject_at_the_door(self: Relay, queue: tuple[str, str], copy: Copy) -> Verdict:
    verdict = _verdict_at_the_door(self, queue, copy)
    return Verdict.REJECT if verdict is Verdict.GIVE and copy.sequence % 3 == 0 else verdict


_verdict_at_the_door = Relay.verdict


def skip_any_route(self: DeliveryFilter, queues: Sequence[tuple[str, str]], seq: int) -> bool:
    return any(target.is_done(seq) for target in self.queues())


def recovery_without_redelivered(self: world.World, host: Any, node: Node, effect: Any) -> None:
    _begin_recovery(self, host, node, effect)
    host.replica.given_out.redelivered_upto = 0


_begin_recovery = world.World._begin_recovery


def reply_out_of_order(self: Relay) -> bool:
    replies = self.pipe.outbox
    if len(replies) > 1 and replies[0][0] == replies[1][0] == "deliver":
        replies[0], replies[1] = replies[1], replies[0]
    return _reply(self)


_reply = Relay.reply


def refuse_in_doubt(self: Relay, settled: Settled, first: int, run: pb.Run) -> None:
    self.replica.refuse([settled], unless_seen=True)


# ---- coordination by etcd --------------------------------------------------------------------------------------------


class WithoutCompare(RegisteredCluster):
    """A change of the register does not compare it with what was seen (E1)."""

    compares = False


class RenewsWithoutProgress(RegisteredCluster):
    """A driver renews the lease although its broker confirms nothing (E4)."""

    proves = False


def cut_off_when_the_lease_is_over(self: RegisterKeeper, now: float) -> None:
    """A primary turns its clients away when etcd does not answer, whoever is heard."""
    self._node.cut_off = "the lease is over" if now > self._lease_until else ""


def believe_any_record(view: RegisterView, log: LogIndex, version: int) -> str:
    return "the record of another group" if view.foreign else ""


def leave_the_record_alone(self: RegisterKeeper, view: RegisterView, written: Record, now: float) -> None:
    """A primary does not write a record again that went back."""
    if view.record == written:
        _keep(self, view, written, now)


def forbid_nothing_without_etcd(self: Requests, event: PromoteRequest) -> str:
    return "" if event.without_register else _register_forbids(self, event)


_register_forbids = Requests._register_forbids


def take_without_promises(self: LeaseCandidate, now: float) -> None:
    """A node takes the first epoch of a group that etcd has no record of as it takes a later one."""
    node, view = self._node, self._node.register
    free = view is not None and view.record is None and not (node.register_away or node.leading or self._candidate.epoch or self._registrar.busy)
    if view is None or not free or self._obstacle(view, now) is not None:
        _consider_the_lease(self, now)
        return
    epoch, members = self._candidate.next_epoch(), frozenset(node.settings.names if node.settings.strict else {node.me})
    self._registrar.change(epoch, members, lambda done, now: self._candidate.given(epoch, members, now) if done else None, take=True)


_consider_the_lease = LeaseCandidate.consider


def take_without_membership(self: LeaseCandidate, record: Record) -> str | None:
    found = _own_obstacle(self, record)
    return None if found and "not in the set in etcd" in found and self._node.log.in_set else found


_own_obstacle = LeaseCandidate._own_obstacle


def remove_before_etcd(self: InSyncSet, member: int, reason: str) -> None:
    _leaves(self, member, reason)
    self.gone(member)


_leaves = InSyncSet.leaves


def add_in_etcd_first(self: RegisterKeeper, view: RegisterView, written: Record, now: float) -> None:
    coming = {number for number, peer in self._node.peers.items() if peer.subscribed} - written.members - self._leader.set.leaving
    if coming and view.record == written and view.holder == self._node.me:
        self._change(written.members | coming)
    else:
        _keep(self, view, written, now)


_keep = RegisterKeeper._keep


def look_at_the_record_alone(self: LeaseCandidate, record: Record) -> str | None:
    """A candidate that is out of the set does not look at its own log, which would keep it from the epoch, too."""
    return _own_obstacle(self, record) if self._node.log.in_set else None


def _all(*uses: Callable[[], Iterator[Options]]) -> Callable[[], Iterator[Options]]:
    def use() -> Iterator[Options]:
        with contextmanager(uses[0])() as options:
            if len(uses) == 1:
                yield options
            else:
                for more in _all(*uses[1:])():
                    yield {**options, **more}

    return use


def _judged_by(refuses: Callable[..., bool]) -> Callable[[], Iterator[Options]]:
    """R14 by another rule, for who follows and for who takes an epoch."""
    return _all(_patched(follower_module, "refuses_cut", refuses), _patched(candidate_module, "refuses_cut", refuses))


LOG: dict[str, Part] = {
    "an epoch number does not contain its owner": Part("R1", _patched(candidate_module, "epoch_number", lambda term, owner: term << 8 | 1)),
    "a lower leader is not ignored": Part("R2", _patched(LogIndex, "judge", judge_any_leader)),
    "the predecessor's epoch is not compared": Part("R2", _patched(LogIndex, "judge", judge_by_sequence)),
    "a repeat is appended again": Part("R2", _patched(LogIndex, "judge", judge_repeats_as_new)),
    "a promise raises top only when FENCE is confirmed": Part("R2", _options(node_class=PromisesLate)),
    "older exchanges are not deleted at a start": Part("R3", _options(late_writes=True)),
    "entries are safe without the members of the set": Part("R4", _patched(leader_module, "safe_position", safe_when_own)),
    "entries are safe without the leader's own stream": Part("R4", _patched(leader_module, "safe_position", safe_without_own)),
    "a push is acknowledged when it is accepted": Part("R4", _options(node_class=AcksAtAccept)),
    "entries are safe before the MARKER is safe": Part("R4", _patched(leader_module, "safe_position", safe_without_marker)),
    "a leader restarts alone": Part("R12", _options(restart_alone=True)),
    "a leader restarts when its own set answers": Part("R12", _patched(Candidate, "consider", consider_with_its_set)),
    "a leader restarts although a second history answers": Part("R12", _patched(candidate_module, "refuses_cut", lambda *_: False)),
    "expected backups are not waited for": Part("R12", _patched(Leader, "_consider_confirming", confirm_at_once)),
    "a node is promoted over one that is heard": Part("R12", _patched(NodeBase, "hears", lambda *_: False)),
    "a node is promoted over one that is reached": Part("R12", _patched(Requests, "_half_answers", half_answers_if_heard)),
    "a shorter log is promoted": Part("R12", _patched(LogState, "rank", property(lambda _self: (0, 0)))),
    "an operator needs no force to promote over a longer log": Part("R12", _patched(Candidate, "gives_way_to", lambda *_: False)),
    "a leader continues after it has seen a newer epoch": Part("R13", _patched(Leader, "superseded_by", lambda *_: False)),
    "a leader does not learn of a newer epoch from a heartbeat": Part("R13", _patched(Node, "_on_heartbeat", heartbeat_without_its_epoch)),
    "FENCE does not tell a node that it is out": Part("R13", _patched(LogIndex, "fence", fence_without_out)),
    "an older set entry undoes out": Part("R13", _patched(LogIndex, "fence", fence_without_end)),
    "a tail is always cut": Part("R14", _judged_by(lambda *_: False)),
    "a tail is judged by the sets inside it": Part("R14", _judged_by(refuses_by_sets_inside)),
    "a tail is judged by the writer of the next entry": Part("R14", _judged_by(refuses_by_next_entry)),
    "applied entries are cut": Part("R14", _patched(Follower, "_fenced", cut_what_is_applied)),
    "a removal counts at its append": Part("R15", _patched(leader_module, "safe_position", removal_at_append)),
    "an addition counts when it is safe under the old set": Part("R15", _patched(leader_module, "safe_position", addition_when_safe)),
    "a newcomer is admitted before it has all safe entries": Part("R15", _patched(InSyncSet, "_admit", admit_at_once)),
    "a lost host restarts alone": Part("R16", _patched(Candidate, "_goes_on_without", goes_on_with_a_lost_host)),
    "mode strict continues without a lost host": Part("R16", _patched(InSyncSet, "lost", strict_goes_on_without)),
    "a lost host is not told": Part("R16", _options(node_class=ForgetsLostHost)),
    "a log begins at a renewal that has not ended": Part("R17", _patched(LogIndex, "renewed", renewed_when_begun)),
}
QUEUES: dict[str, Part] = {
    "a transaction is split into batches": Part("R4", _patched(Relay, "commit", commit_in_pieces)),
    "publishes are confirmed before the expected backups are in the set": Part("R12", _patched(Relay, "_confirm", confirm_in_any_case)),
    "a backup applies unsafe entries": Part("R5", _patched(Applier, "may_apply", lambda self, entry: True)),
    "the door passes on unsafe entries": Part("R5", _patched(Relay, "may_leave", lambda self, sequence: True)),
    "a publish is confirmed before its queues have it": Part("R5", _patched(Relay, "publish", confirm_when_safe)),
    "R passes entries that the broker has not confirmed": Part("R5", _patched(Applier, "_send", send_and_count)),
    "a backup's publishes change places": Part("R5", _patched(Applier, "_send", send_out_of_order)),
    "local completion does not wait for the own stream": Part("R5", _patched(Relay, "durable_advanced", confirm_before_the_own_stream)),
    "publishes in doubt after local completion are refused": Part("R5", _patched(Relay, "log_again", refuse_in_doubt)),
    "an ID is not looked up": Part("R6", _patched(Dedup, "seen", lambda self, producer, seq: False)),
    "a repeat is confirmed at once": Part("R6", _patched(Relay, "repeat_is_done", lambda self, sequence: True)),
    "the record has no operations": Part("R7", _patched(DeliveryFilter, "export", lambda self: ((), BitMap64().serialize()))),
    "the record has no generations": Part("R7", _patched(sidecar, "applied_record", record_without_generations)),
    "the record's R is the safe position": Part("R7", _patched(sidecar, "applied_record", record_of_everything)),
    "a restart reads from the last CHECKPOINT, applied or not": Part("R7", _patched(Checkpoints, "start", start_anywhere)),
    "every copy counts": Part("R8", _patched(Generations, "counts", lambda self, seq, generation: True)),
    "a generation counts from its R, not behind it": Part("R8", _patched(Generations, "counts", counts_from_applied)),
    "generations are numbered from the record": Part("R8", _patched(Streams, "__init__", number_from_record)),
    "a dequeued copy is delivered": Part("R9", _patched(QueueFilter, "verdict", verdict_without(Verdict.ACK))),
    "a copy with an operation that is not safe is not held": Part("R9", _patched(QueueFilter, "verdict", verdict_without(Verdict.HOLD))),
    "a rejected copy is delivered": Part("R9", _patched(QueueFilter, "verdict", verdict_without(Verdict.REJECT))),
    "a rejected copy is acked away": Part("R9", _patched(QueueFilter, "verdict", verdict_without(Verdict.REJECT, instead=Verdict.ACK))),
    "a refused message is delivered": Part("R9", _patched(QueueFilter, "verdict", give_what_was_refused)),
    "a purged message is delivered": Part("R9", _patched(QueueFilter, "verdict", give_what_was_purged)),
    "the sweeper rejects live messages": Part("R9", _patched(Sweeper, "judge", reject_what_is_live)),
    "the door rejects live messages": Part("R9", _patched(Relay, "verdict", reject_at_the_door)),
    "a withheld message is overtaken by later ones": Part("R9", _patched(Relay, "keeps_back", lambda self: False)),
    "deliveries change places": Part("R9", _patched(Relay, "reply", reply_out_of_order)),
    "a path through a dequeued copy voids nothing": Part("R9", _patched(QueueFilter, "_dequeued_upto", lambda *_: False)),
    "a purge takes messages that clients hold": Part("R9", _patched(Relay, "purge_spares", lambda self, held: [])),
    "knowledge of a deleted queue with dead letters is forgotten": Part(
        "R9", _patched(DeliveryFilter, "_depart", lambda self, target, at_seq: self._forget(target, at_seq))
    ),
    "visits are not told apart": Part(
        "R10", _all(_patched(queue_filter_module, "visit_of", lambda *_: 0), _patched(replica_module, "visit_of", lambda *_: 0))
    ),
    "origins are not told apart": Part(
        "R10",
        _all(_patched(queue_filter_module, "origin_of", lambda deaths: "o" if deaths else ""), _patched(replica_module, "origin_of", lambda *_: "o")),
    ),
    "MOVED is not logged": Part("R10", _patched(QueueFilter, "implied_moves", lambda *_: [])),
    "messages are skipped whatever their route": Part("R11", _patched(DeliveryFilter, "may_skip", skip_any_route)),
    "backups do not sweep": Part("R11", _all(_patched(Sweeper, "step", lambda *_: False), _patched(Sweeper, "has_work", lambda _self: False))),
    "messages that a full queue refuses are skipped": Part("R11", _patched(Applier, "refused", refused_is_skipped)),
    "the door opens before the entries behind R are published": Part("R12", _patched(world.World, "is_drained", lambda *_: True)),
    "the door opens before rejected messages have left their queues": Part("R12", _patched(world.World, "has_moved", lambda *_: True)),
    "the door does not say redelivered": Part(
        "R12", _patched(world.World, "_EFFECTS", {**world.World._EFFECTS, Recover: recovery_without_redelivered})
    ),
    "a handover does not name the messages that clients returned": Part("R12", _patched(DeliveryHistory, "given", lambda self: ())),
    "entries that only a lost host's record knows count as applied": Part(
        "R16", _all(_patched(Generations, "cut", lambda *_: None), _patched(DeliveryFilter, "lose", lambda *_: None))
    ),
    "entries that only a lost host's record knows as refused count as refused": Part("R16", _patched(DeliveryFilter, "lose_refusals", lambda *_: 0)),
    "these refusals count if they are before the last CHECKPOINT": Part("R16", _patched(rebuild_module, "_Refusals", RefusalsFromTheCheckpoint)),
}
ETCD: dict[str, Part] = {
    "a change of the register does not compare it": Part("E1", _options(cluster_class=WithoutCompare)),
    "a node outside the record's set takes an epoch": Part("E1", _patched(LeaseCandidate, "_own_obstacle", take_without_membership)),
    "a member leaves before it is out of the record": Part("E2", _patched(InSyncSet, "leaves", remove_before_etcd)),
    "a newcomer is in the record before it is in the set": Part(
        "E3", _all(_patched(RegisterKeeper, "_keep", add_in_etcd_first), _patched(LeaseCandidate, "_own_obstacle", look_at_the_record_alone))
    ),
    "the lease is renewed although the broker confirms nothing": Part("E4", _options(cluster_class=RenewsWithoutProgress)),
    "a leader whose broker confirms nothing says that it makes progress": Part(
        "E4", _patched(RegisterKeeper, "makes_progress", lambda self, now: bool(self._node.leading))
    ),
    "a primary whose lease is over serves clients": Part("E5", _patched(RegisterKeeper, "_consider_serving", lambda *_: None)),
    "a primary that all members follow serves no clients": Part("E6", _patched(RegisterKeeper, "_consider_serving", cut_off_when_the_lease_is_over)),
    "a leader that is heard is replaced": Part("E6", _patched(LeaseCandidate, "_hears_leader", lambda *_: False)),
    "all candidates try at once": Part("E7", _patched(lease_candidate_module, "rank", lambda *_: 0)),
    "a record that went back gives a right": Part("E8", _patched(lease_candidate_module, "went_back", believe_any_record)),
    "a primary does not write a record again that went back": Part("E8", _patched(RegisterKeeper, "_keep", leave_the_record_alone)),
    "the first record needs no promises": Part("E9", _patched(LeaseCandidate, "consider", take_without_promises)),
    "an operator promotes without etcd, which answers": Part("E10", _patched(Requests, "_register_forbids", forbid_nothing_without_etcd)),
}
PARTS: dict[str, Part] = {**LOG, **QUEUES, **ETCD}


def names() -> list[str]:
    return list(PARTS)


@contextmanager
def rule_off(name: str) -> Iterator[Options]:
    """Switches one part of a rule off; gives the options that the simulation needs for it."""
    yield from PARTS[name].use()


__all__ = ["ETCD", "LOG", "PARTS", "QUEUES", "names", "rule_off"]
