"""An operator's requests to a node: promote, remove, switch over, pause. The answer is the result, or the reason for a refusal and the remedy.

Rules:

- A request is refused if, as far as this node can tell, it would lose a confirmed entry; `force` overrides that. A request that contradicts this
  node's view is always refused. A node that was in sync when it last heard its primary cannot tell whether the primary went on alone, and says so.
- A dry run changes nothing, and says what is at stake.
"""

from __future__ import annotations

from collections.abc import Iterator

from .base import NodeBase
from .candidate import Candidate
from .events import Answer, Hello, PauseRequest, PromoteRequest, RemoveRequest, SwitchoverRequest
from .leader import Leader
from .positions import epoch_name, owner_of
from .register import went_back
from .registrar import Registrar
from .roles import Role


class Requests:
    """Answers the requests of an operator."""

    def __init__(self, node: NodeBase, leader: Leader, candidate: Candidate, registrar: Registrar) -> None:
        self._node = node
        self._leader = leader
        self._candidate = candidate
        self._registrar = registrar

    def _answer(self, ok: bool, text: str, node: int = 0) -> None:
        self._node.emit(Answer(ok, text, node))

    def _ask(self) -> str:
        """The node to ask for an action of a primary."""
        primary = self._node.primary()
        return f"{self._node.name(self._node.me)} is not primary: ask {self._node.name(primary) if primary else 'the primary'}"

    # ---- promote -----------------------------------------------------------------------------------------------------

    def promote(self, event: PromoteRequest, now: float) -> None:
        if contradicted := self._contradicted(event, now):
            self._answer(False, contradicted)
            return
        found = (self._longer_log(event), self._register_lacks(event), self._own_log_lacks(event), self._own_broker_lacks())
        losses = [text for text in found if text]
        if losses and not event.force:
            self._answer(False, losses[0])
        elif event.dry_run:
            although = f", although: {'; '.join(losses)}" if losses else ""
            self._answer(True, f"would promote {self._node.name(self._node.me)}{although}; {self._stakes(event, now)}")
        else:
            stakes, without = self._stakes(event, now), event.without_register
            self._candidate.start(event.down, operator=True, force=event.force, now=now, at_stake=stakes, without_register=without)

    def _contradicted(self, event: PromoteRequest, now: float) -> str:
        """The state of this node and of the nodes that it hears, if the operator's word contradicts it, also with `force`; else empty."""
        node, me = self._node, self._node.name(self._node.me)
        if node.leading and node.role in (Role.ACTIVE, Role.RECOVERING):
            return f"{me} is primary already (epoch {epoch_name(node.leading)})"
        if self._candidate.epoch:
            return f"{me} is taking epoch {epoch_name(self._candidate.epoch)} already"
        if text := self._register_forbids(event):
            return text
        for down in event.down:
            if down == node.me:
                return f"{me} is said to be down, but it is to be promoted: name only others with --down"
            if down not in node.peers:
                return f"there is no node {down} in this group"
            if node.peers[down].answers:
                return f"{node.name(down)} is said to be down, but it answers: stop it first, or use switchover"
            if half := self._half_answers(down, now):
                return half
            # A request for promises would end the epoch, though the nodes that hear its leader would not let this node lead.
            heard = {number: peer for number, peer in node.peers.items() if peer.answers or node.hears(number, now)}
            if hear_it := [number for number, peer in heard.items() if owner_of(peer.epoch) == down]:
                return f"{node.name(down)} is said to be down, but it answers {self._node.names(hear_it)}: stop it first, or use switchover"
        silent = [number for number, peer in node.peers.items() if number not in event.down and not peer.answers]
        if silent:
            if half := next(filter(None, (self._half_answers(number, now) for number in silent)), ""):
                return half
            names = self._node.names(sorted(event.down.union(silent)))  # with the nodes given, so that the proposal can be pasted
            return f"{self._node.names(silent)} does not answer: if it is down, say so with --down {names}"
        for number, hello in self._hellos():
            if hello.leading or node.primary() == number:
                return f"{node.name(number)} is primary and answers: use switchover"
        return ""

    def _register_forbids(self, event: PromoteRequest) -> str:
        """Text: why etcd takes no record of an epoch now; empty if it does, or static coordination needs none."""
        node, view = self._node, self._node.register
        if not node.settings.registered:
            return ""
        if view is None or node.register_away:
            without = f"or, if no other node can lead, repeat with --without-etcd --down {node.names(sorted(event.down)) or 'OTHER'}"
            away = f"etcd does not answer {node.name(node.me)}, so no epoch can be taken: mend etcd, {without}"
            return "" if event.without_register else away
        if event.without_register:
            return f"etcd answers {node.name(node.me)}: repeat without --without-etcd"
        if view.foreign:
            return went_back(view, node.log, node.record_known)
        foreign = view.record is not None and node.knows_nothing_of(view.record)  # then the lease may be that of another group's node of this id
        if view.holder and (foreign or view.holder != node.me):
            leader = node.name(view.holder)
            return f"{leader} has the lease in etcd, and leads: use switchover, or repeat {node.settings.lease_ttl_s:g} s after it has gone down"
        return ""

    def _register_lacks(self, event: PromoteRequest) -> str:
        """Text: why this node may lack confirmed entries by what etcd says; empty if it says nothing of the kind, or all nodes answer."""
        node, me, view = self._node, self._node.name(self._node.me), self._node.register
        if view is None or not event.down:
            return ""
        if text := went_back(view, node.log, node.record_known):
            return f"{text} Or repeat with --force: what was confirmed without {me} is lost then"
        if view.record and node.me not in view.record.members:
            return f"{me} is not in the set in etcd: what was confirmed without it would be lost. Bring the others back, or repeat with --force"
        return ""

    def _half_answers(self, number: int, now: float) -> str:
        """Text: a node that does not answer is up, as one of the two connections stands. Empty if neither does."""
        node, me, name, reached = self._node, self._node.name(self._node.me), self._node.name(number), self._node.peers[number].connected
        if not (reached or node.hears(number, now)):
            return ""
        what = "reaches it, though it hears nothing of it" if reached else "hears it, though it cannot send to it"
        return f"{name} does not answer {me}, but is not down: {me} {what}. Mend that (lrq-ha list says what it is), or stop {name} first"

    def _hellos(self) -> Iterator[tuple[int, Hello]]:
        """The Hello of each node that answers."""
        return ((number, peer.hello) for number, peer in self._node.peers.items() if peer.connected and peer.hello)

    def _longer_log(self, event: PromoteRequest) -> str:
        """Text: the node to promote instead; empty if there is none."""
        for number, hello in self._hellos():
            if hello.role is not Role.DIVERGED and self._candidate.gives_way_to(hello.log, event.down):
                return f"{self._node.name(number)} answers and has a longer log: promote {self._node.name(number)} instead"
        return ""

    def _own_log_lacks(self, event: PromoteRequest) -> str:
        """Text: confirmed entries that this node's log may lack; empty if there are none."""
        node, me, down = self._node, self._node.name(self._node.me), self._node.names(sorted(event.down))
        if node.log.joining:
            return f"{me} has joined only in part: what it lacks would be lost. Wait until it has joined, or repeat with --force"
        if not event.down:
            return ""  # no node can have gone on without it: all others answer, and none has more
        if not node.log.end:
            return f"the log of {me} is empty: what {down} holds would be lost. Bring {down} back, or repeat with --force"
        if not node.log.in_set:
            return (
                f"{me} was not in sync: what was confirmed without it would be lost (its log ends at {node.log.end}, epoch "
                f"{epoch_name(node.log.last_epoch)}). Bring {down} back, or repeat with --force"
            )
        if node.lost_host:
            return f"the broker of {me} went down and it has not caught up since: what it lost is unknown. Repeat with --force to accept that"
        if not node.settings.strict and node.last_heard_leader is None and not node.led_last:
            return (
                f"{me} has heard no primary since it started: if {down} went on without it, what was confirmed since would be lost (its log "
                f"ends at {node.log.end}, epoch {epoch_name(node.log.last_epoch)}). Bring {down} back, or repeat with --force"
            )
        return ""

    def _own_broker_lacks(self) -> str:
        """Text: features of the log that this node's broker lacks; empty if none."""
        node, me = self._node, self._node.name(self._node.me)
        return f"the queues of {me} are not whole: {node.lacks}. Mend that first, or repeat with --force" if node.lacks else ""

    def _stakes(self, event: PromoteRequest, now: float) -> str:
        """Text: the risk as far as this node knows it, and the operator's part: whether a node that is down went on without this one before."""
        node, last = self._node, self._node.last_heard_leader
        if last is None:
            heard = "has heard no primary since it started"
            in_set = "was in sync as far as its own log knows" if node.log.in_set else "was NOT in sync"
        else:
            heard = f"heard its primary {now - last:.1f} s ago"
            in_set = "was in sync then" if node.log.in_set else "was NOT in sync then"
        if node.lost_host:
            in_set += "; its broker went down since, and it has not caught up"
        said = f"it {heard} and {in_set}; its log ends at {node.log.end}"
        if event.without_register:
            said += "; etcd was not asked: if it answers another node, that one may lead, too, and what it confirms without this node is lost"
        if event.down and not node.settings.strict:
            down = self._node.names(sorted(event.down))
            said += f"; if {down} went on without it since, what was confirmed then is lost: compare with when {down} went down"
        for number in sorted(event.down):
            if lacked := node.peers[number].lacked:
                said += f"; {node.name(number)} said last: {lacked}"
        if node.settings.local_completion:
            said += "; publishes with local completion that it lacks are lost, though they were confirmed"
        return said

    # ---- remove, switch over, pause ----------------------------------------------------------------------------------

    def remove(self, event: RemoveRequest, now: float) -> None:
        node = self._node
        if not node.leading:
            self._answer(False, self._ask())
        elif event.node == node.me:
            self._answer(False, f"{node.name(node.me)} is primary: only a backup can be removed")
        elif event.node not in node.log.members:
            self._answer(False, f"{node.name(event.node)} is not in the set")
        elif self._leader.set.keeps_up(event.node, now):
            self._answer(False, f"{node.name(event.node)} answers and keeps up, so it would be back in the set at once: stop it first")
        elif event.dry_run:
            out = f"would take {node.name(event.node)} out of the set; nothing is lost or redelivered"
            self._answer(True, f"{out}; it must not be promoted before it has rejoined")
        else:
            self._leader.set.remove(event.node, "the operator removed it")
            self._leader.advance_safe(now)
            first = ", as soon as etcd has a record without it" if event.node in self._leader.set.leaving else ""
            self._answer(True, f"{node.name(event.node)} is removed from the set{first}; do not promote it before it has rejoined")

    def switchover(self, event: SwitchoverRequest, now: float) -> None:
        node = self._node
        backups, lacking = node.in_sync & {number for number, peer in node.peers.items() if peer.subscribed}, node.lacking()
        to = event.node or min(backups, key=lambda number: (number in lacking, number), default=0)
        refusal = self._switchover_refusal(to)
        although = f", although on {node.name(node.me)} {node.lacks}" if node.lacks else ""
        self._answer(not refusal, refusal or f"would hand over to {node.name(to)}{although}", to)

    def _switchover_refusal(self, to: int) -> str:
        node, me = self._node, self._node.name(self._node.me)
        if not self._leader.serving:
            return self._ask()
        if to == node.me:
            return f"{me} is primary already"
        if not to:
            return f"{me} has no in-sync backup to hand over to"
        if to not in node.peers:
            return f"there is no node {to} in this group"
        if to not in node.in_sync or not node.peers[to].subscribed:
            return f"{node.name(to)} is not an in-sync backup: wait until it has caught up"
        if lacks := node.lacking().get(to):
            return f"the queues of {node.name(to)} are not whole: {lacks}"
        if node.group_paused:
            return f"the group is paused, and {node.name(to)} would take no epoch: run lrq-ha resume first"
        if node.settings.registered and (node.register is None or node.register_away):
            return f"etcd does not answer {me}, and {node.name(to)} could take no epoch: mend etcd first"
        if node.settings.registered and not (node.own_record and to in node.own_record.members):
            return f"{node.name(to)} is not in the set in etcd yet: try again in a moment"
        silent = [number for number, peer in node.peers.items() if not peer.answers]
        if silent and not node.settings.registered:
            out = f"out of the {'set with lrq-ha remove, then of the ' if node.log.members.intersection(silent) else ''}configuration"
            return f"{self._node.names(silent)} does not answer, and {node.name(to)} cannot take an epoch without: bring it back, or take it {out}"
        return node.nothing_is_safe()

    def pause(self, event: PauseRequest, now: float) -> None:
        node = self._node
        node.paused = event.paused
        node.send_all(node.hello(wants_answer=False))
        said = "no node takes an epoch by itself until lrq-ha resume" if event.paused else "epochs are taken by themselves again"
        text = f"{node.name(node.me)}: {said}"
        record = node.register.record if node.register else None
        if not node.settings.registered:
            self._answer(True, text)
        elif record is None or node.register_away:
            stays = bool(record and record.paused) and not event.paused
            lost = "so the group stays paused: try again" if stays else "so this is forgotten when its sidecar is started again"
            self._answer(not stays, f"{text}; etcd does not answer, {lost}")
        elif record.paused == event.paused:
            self._answer(True, text)
        elif not self._registrar.pause(event.paused, lambda done, now: self._paused(event.paused, text)):
            self._answer(False, f"{text}; etcd is asked for something else at the moment, so that is not in its record: try again")

    def _paused(self, paused: bool, text: str) -> None:
        """etcd has answered."""
        record = self._node.register.record if self._node.register else None
        if record and record.paused == paused:
            self._answer(True, text)
        else:
            self._answer(False, f"{text}; etcd's record has changed meanwhile, so that is not in it: try again")
