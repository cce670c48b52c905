"""Takes an epoch, and promises epochs to other nodes (R1, R12–R14).

Theory of operation:

- A node that takes an epoch promises it first (FENCE), as does every node that answers. When the own stream and all nodes that are not
  declared down have the promise, the node compares its log with theirs, and leads.
- A node takes an epoch by itself only when every other configured node answers, none leads, and none has a better right to the epoch.
  (With `restart_alone` a restarted leader does not wait for answers, unless its host went down.)
  Without the answers of all other nodes it needs the operator's word that the silent ones are down.
- Where etcd coordinates, its record seals each epoch: an epoch that all nodes have promised, and one that a lease gives (lease_candidate.py).
- A leader that hands over names its successor, which has the first right to the next epoch for a while.

Invariants: at most one campaign at a time; none while this node leads or follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .base import NodeBase
from .events import Answer, Handover, Hello, Prepare, Promise, Superseded
from .follower import Follower
from .leader import Leader
from .log import LogState, Members, refuses_cut
from .positions import epoch_name, epoch_number, owner_of, term_of
from .register import Why
from .registrar import Registrar
from .roles import Role

# Epochs that a node which lost its log, or the log's end, may have promised or led before. Its next epoch must not be one of them: two
# histories with equal epoch numbers would be taken for one.
FORGOTTEN_TERMS_MAX = 1 << 16


@dataclass
class Campaign:
    """An epoch that is being taken.

    `holds`: nodes that have not promised it yet; `logs`: logs of the nodes that have; `fenced`: the own stream has the promise;
    `at_stake`: text for the operator; `members`: the first set of the epoch, if etcd has a record of it already; `without_register`: it is taken
    though etcd does not answer.
    """

    epoch: int
    down: frozenset[int]
    waiting: set[int]
    deadline: float
    operator: bool
    force: bool
    at_stake: str
    tail: str  # of a node that is diverged: the tail that it keeps
    members: Members = frozenset()
    without_register: bool = False
    fenced: bool = False
    logs: dict[int, LogState] = field(default_factory=dict)


class Candidate:
    """Takes epochs for this node, and answers other candidates. Args: `defers_to`: as of Node."""

    def __init__(self, node: NodeBase, leader: Leader, follower: Follower, registrar: Registrar, defers_to: int) -> None:
        self.handed: Handover | None = None
        """The handover message of the primary that this node follows."""
        self._node = node
        self._leader = leader
        self._follower = follower
        self._registrar = registrar
        self._defers_to = defers_to
        self._defers_until = 0.0
        self._campaign: Campaign | None = None

    @property
    def epoch(self) -> int:
        """The epoch that is being taken; 0: none."""
        return self._campaign.epoch if self._campaign else 0

    # ---- the right to an epoch ---------------------------------------------------------------------------------------

    def opened(self, now: float) -> None:
        """The node has started."""
        self._defers_until = now + self._node.settings.handover_timeout_s

    def consider(self, now: float) -> None:
        """R12 step 1 without an operator: every other configured node answers, none leads, and none has a longer log."""
        node = self._node
        if node.leading or self._campaign or node.leader_epoch or node.role not in (Role.CATCH_UP, Role.READY):
            return
        if self.defers(now):
            return
        silent = frozenset(number for number, peer in node.peers.items() if not peer.answers)
        if silent and not self._goes_on_without(silent):
            return
        hellos = {number: peer.hello for number, peer in node.peers.items() if peer.hello}
        if any(hello.leading for hello in hellos.values()):
            return
        obstacle = self._obstacle(hellos)
        if obstacle is None:
            self.start(silent, operator=False, force=False, now=now)
        elif obstacle:
            node.set_role(node.role, obstacle)

    def defers(self, now: float) -> bool:
        """Whether another node has the first right to the next epoch."""
        return bool(self._defers_to) and now < self._defers_until

    def _goes_on_without(self, silent: frozenset[int]) -> bool:
        """Whether a restarted leader may go on alone. Not if its host went down (R16): a silent node may have its lost entries, and drop them."""
        node = self._node
        if not (node.settings.restart_alone and node.led_last):
            return False
        if node.lost_host:
            me, names = node.name(node.me), [node.name(number) for number in sorted(silent)]
            node.set_role(
                node.role,
                f"the broker of {me} went down and may have lost what was confirmed, so it does not go on alone: "
                f"bring {', '.join(names)} back, or accept that with lrq-ha promote {me} --down {' '.join(names)} --force",
            )
        return not node.lost_host

    def _obstacle(self, hellos: dict[int, Hello]) -> str | None:
        """Why this node does not take the epoch: what an operator has to do, or "" if another node takes it; None if nothing is in the way."""
        node, mine = self._node, self._node.state()
        if node.lacks and owner_of(node.log.last_epoch) != node.me:
            return f"{node.name(node.me)} takes no epoch by itself: {node.lacks}"
        if node.group_paused:
            return "paused: no node takes an epoch by itself until lrq-ha resume, or lrq-ha promote NODE"
        last_leader = owner_of(node.log.last_epoch)
        handover = self._handover()
        handed = handover is not None and handover.epoch == node.log.last_epoch
        order = (mine.rank, handed or last_leader == node.me, handed, -node.me)
        for number, hello in hellos.items():
            led_last = owner_of(hello.log.rank[0]) == number
            takes_none = bool(hello.lacks) and not led_last
            outranked = hello.log.rank > mine.rank if takes_none else (hello.log.rank, last_leader == number, False, -number) > order
            if outranked and hello.log.joining:
                return f"{node.name(number)} has joined only in part, and has a longer log: an operator must choose"
            # The node with the longer log takes the epoch, and the other drops the entries that this log lacks.
            tail, owner, leader, taker = (mine, node.me, hello.log, number) if outranked else (hello.log, number, mine, node.me)
            if refuses_cut(tail, leader, taker):
                return f"{node.name(owner)} would refuse to drop its tail: an operator must choose"
            if outranked:
                return f"{node.name(number)} has a longer log and takes no epoch by itself: {hello.lacks}" if takes_none else ""
        return None

    def handed_over(self, peer: int, message: Handover, now: float) -> None:
        """The primary that this node follows hands over to it."""
        if message.to not in (0, self._node.me):
            self._defers_to, self._defers_until = message.to, now + self._node.settings.handover_timeout_s
        elif self._follower.follows(peer, message.epoch) and message.end == self._node.log.end:
            self.handed = message

    def _handover(self) -> Handover | None:
        """The handover to this node, if its log still ends there."""
        return self.handed if self.handed and self.handed.end == self._node.log.end else None

    # ---- promising ---------------------------------------------------------------------------------------------------

    def promise(self, peer: int, message: Prepare, now: float) -> None:
        """`peer` asks for a promise: the answer goes out when the own stream has it."""
        node, epoch = self._node, message.epoch
        if epoch <= node.log.top:
            node.send(peer, Superseded(node.log.top))
            return
        if node.leading:
            # A leader promises nothing before it has ended this incarnation; the candidate asks again.
            self._leader.superseded_by(epoch, peer)
            return
        self._abort(f"{node.name(peer)} takes epoch {epoch_name(epoch)}")
        self._follower.stop()
        if node.role is not Role.DIVERGED:
            node.wait(f"promised epoch {epoch_name(epoch)} to {node.name(peer)}")
        node.write_fence(epoch, 0, lambda _now: node.send(peer, Promise(epoch, node.state())))

    def give_way(self, peer: int, epoch: int) -> None:
        """`peer` leads: this node takes no epoch, and forgets an earlier handover."""
        self._abort(f"{self._node.name(peer)} leads epoch {epoch_name(epoch)}")
        self._defers_to = 0
        self.handed = None

    def gives_way_to(self, log: LogState, down: frozenset[int]) -> bool:
        """Whether a node that answers is to be promoted instead of this one, as its log is longer.

        Not if that node would be refused, too, because others are down and it was not in sync, while this node was. Then the entries that this
        node lacks were never safe if this node, or the leader of its history, is in every set over them (R14).
        """
        node, mine = self._node, self._node.state()
        if log.rank <= mine.rank:
            return False
        vouches = bool(down) and mine.in_set and not mine.lost_host and not log.in_set
        return not vouches or refuses_cut(log, mine, node.me)

    # ---- taking ------------------------------------------------------------------------------------------------------

    def start(
        self, down: frozenset[int], *, operator: bool, force: bool, now: float, at_stake: str = "", without_register: bool = False
    ) -> None:
        """Asks for promises.

        Args:
            down: Nodes that are down, or silent.
            operator: An operator asks for it, and waits for the Answer; the operator decides on a tail that is refused to be cut.
            force: Take the epoch even if other nodes have a longer log.
            now: Monotonic time in seconds.
            at_stake: Text for the operator: what this node may lack.
            without_register: E10: no record seals the epoch before it begins.
        """
        node = self._node
        epoch = self.next_epoch(FORGOTTEN_TERMS_MAX if down and (node.lost_host or not node.log.end) else 0)
        reachable = {number for number, peer in node.peers.items() if peer.answers and number not in down}
        tail = node.reason if node.role is Role.DIVERGED else ""
        deadline = now + node.settings.campaign_timeout_s
        members: Members = frozenset()
        self._campaign = campaign = Campaign(epoch, down, reachable, deadline, operator, force, at_stake, tail, members, without_register)
        self._follower.stop()
        node.set_role(Role.RECOVERING, f"taking epoch {epoch_name(epoch)}")
        node.write_fence(epoch, 0, lambda now: self._fenced(campaign, now))
        for number in sorted(reachable):
            node.send(number, Prepare(epoch))

    def next_epoch(self, forgotten: int = 0) -> int:
        """An epoch of this node that is higher than all that it knows of. `forgotten`: number of epochs between that it may not know of."""
        node, record = self._node, self._node.register and self._node.register.record
        seen = [node.log.top, record.epoch if record else 0, *(peer.hello.log.top for peer in node.peers.values() if peer.hello)]
        return epoch_number(term_of(max(seen)) + 1 + forgotten, node.me)

    def given(self, epoch: int, members: Members, now: float) -> None:
        """E1: etcd has a record of this node's epoch, which needs no promises. FENCE comes after it: a try that fails has promised nothing."""
        node = self._node
        if node.leading or self._campaign or epoch <= node.log.top:
            return  # too late: this node has promised a later epoch meanwhile
        deadline = now + node.settings.campaign_timeout_s
        self._campaign = campaign = Campaign(epoch, frozenset(), set(), deadline, False, False, "", "", members)
        self._follower.stop()
        node.set_role(Role.RECOVERING, f"taking epoch {epoch_name(epoch)}")
        node.write_fence(epoch, 0, lambda now: self._fenced(campaign, now))

    def _fenced(self, campaign: Campaign, now: float) -> None:
        campaign.fenced = True
        self._conclude(campaign, now)

    def promised(self, peer: int, message: Promise, now: float) -> None:
        """`peer` has promised."""
        self._node.peers[peer].learn_log(message.log)
        campaign = self._campaign
        if campaign and campaign.epoch == message.epoch and peer in campaign.waiting:
            campaign.waiting.discard(peer)
            campaign.logs[peer] = message.log
            self._conclude(campaign, now)

    def _conclude(self, campaign: Campaign, now: float) -> None:
        """Leads, if all have promised and no other log prevents it."""
        if campaign is not self._campaign or campaign.waiting or not campaign.fenced:
            return
        node, mine = self._node, self._node.state()
        for peer, log in campaign.logs.items():
            if not campaign.operator and refuses_cut(log, mine, node.me):
                self._abort(f"{node.name(peer)} would refuse to drop its tail: an operator must choose")
                return
            chosen = campaign.force or (campaign.operator and node.peers[peer].diverged)
            if not chosen and self.gives_way_to(log, campaign.down):
                self._abort(f"{node.name(peer)} answered and has a longer log: promote {node.name(peer)} instead")
                return
        kept = node.log.members - campaign.down
        if node.settings.strict:  # a new group begins with all its nodes
            kept = node.log.members or frozenset(node.settings.names)
        members = kept | {node.me}
        why = Why.OPERATOR if campaign.operator else Why.SWITCHOVER if self.handed else Why.ALL
        if campaign.members or campaign.without_register or not node.settings.registered:
            self._lead(campaign, campaign.members or members, now)
        elif not self._registrar.change(campaign.epoch, members, lambda done, now: self._sealed(campaign, members, done, now), take=True, why=why):
            self._abort("etcd is asked for something else at the moment")

    def _sealed(self, campaign: Campaign, members: Members, done: bool, now: float) -> None:
        """etcd has answered for an epoch that all nodes, or an operator, have given."""
        if campaign is self._campaign and done:
            self._lead(campaign, members, now)
        elif campaign is self._campaign:
            self._abort("etcd's record has changed meanwhile")

    def _lead(self, campaign: Campaign, members: Members, now: float) -> None:
        node, handover = self._node, self._handover()
        self._campaign = self.handed = None
        node.lost_host = False
        self._leader.begin(campaign.epoch, members, handover.given if handover is not None else None)
        if campaign.operator:
            node.end_pause()
            node.emit(Answer(True, f"{node.name(node.me)} has taken epoch {epoch_name(campaign.epoch)}", at_stake=campaign.at_stake))
        self._leader.call_all(now)

    # ---- giving up ---------------------------------------------------------------------------------------------------

    def superseded(self, peer: int, top: int) -> None:
        """`peer` has promised `top` to another."""
        if self._campaign and top > self._campaign.epoch:
            self._abort(f"{self._node.name(peer)} has promised epoch {epoch_name(top)}")

    def disconnected(self, peer: int) -> None:
        """The connection to `peer` is lost."""
        if self._campaign and peer in self._campaign.waiting:
            self._abort(f"{self._node.name(peer)} stopped answering")

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._campaign and now >= self._campaign.deadline:
            names = self._node.names(sorted(self._campaign.waiting)) or "the own stream"
            self._abort(f"no promise from {names} within {self._node.settings.campaign_timeout_s:g} s")

    def _abort(self, reason: str) -> None:
        """Ends the campaign, if there is one. A node that was diverged before it still is."""
        campaign, self._campaign = self._campaign, None
        if campaign:
            if campaign.tail:
                self._node.set_role(Role.DIVERGED, campaign.tail)
            else:
                self._node.wait(reason)
            if campaign.operator:
                self._node.emit(Answer(False, reason))
