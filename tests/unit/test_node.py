"""One node's core, event by event: who leads, promises, following, the set, refusals. Its whole life under faults: tests/simulation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from lrq_ha.errors import IllegalEvent
from lrq_ha.replication.candidate import FORGOTTEN_TERMS_MAX
from lrq_ha.replication.events import (
    Ack,
    Answer,
    Append,
    BrokerLacks,
    CutTail,
    Disconnect,
    Effect,
    EntryKind,
    Event,
    Following,
    HeadMoved,
    Heartbeat,
    Hello,
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
    Prepare,
    Promise,
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
    Subscribe,
    Superseded,
    SwitchoverRequest,
    Tick,
    Unsubscribe,
    WriteBatch,
    WriteFence,
)
from lrq_ha.replication.log import BatchHeader, LogState
from lrq_ha.replication.node import Node
from lrq_ha.replication.positions import epoch_number
from lrq_ha.replication.roles import Role
from lrq_ha.replication.settings import NodeSettings

E1_1, E2_1, E2_2, E3_1, E3_2 = (epoch_number(t, o) for t, o in ((1, 1), (2, 1), (2, 2), (3, 1), (3, 2)))
BOTH, ONE, TWO = frozenset({1, 2}), frozenset({1}), frozenset({2})
# The log that most tests begin with: MARKER of node 1 with both nodes in the set, and four entries.
LOG = (BatchHeader(E1_1, 1, 1, 0, E1_1, ((1, BOTH),)), BatchHeader(E1_1, 2, 5, E1_1, E1_1))
KIB = 1 << 10


class Driver:
    """Feeds a node and keeps count of what its stream has not confirmed."""

    def __init__(self, me: int, *, size: int = 2, log: tuple[BatchHeader, ...] = LOG, applied: int = 0, lost_host: bool = False, **settings: Any):
        self.now = 100.0
        self.open = 0
        self.effects: list[Effect] = []
        self.node = Node(NodeSettings(me, {i: f"e{i}" for i in range(1, size + 1)}, **settings))
        for batch in log:
            self.node.read_batch(batch)
        self.feed(Opened(applied, lost_host))

    def feed(self, event: Event, *, after: float = 0.0) -> list[Effect]:
        self.now += after
        if isinstance(event, OwnConfirmed):
            self.open -= event.count
        if isinstance(event, PeerAcked):  # its driver has sent what the log has
            guard = self.node.peers[event.peer].guard
            guard.deliver(guard.sent + 1, max(guard.sent, self.node.log.end))
        self.effects = self.node.handle(event, self.now)
        self.open += sum(isinstance(e, (WriteBatch, WriteFence)) for e in self.effects)
        return self.effects

    def live(self, seconds: float) -> list[Effect]:
        """Time passes as it does for a node that runs: with ticks."""
        interval = self.node.settings.heartbeat_s / 2
        return [effect for _ in range(round(seconds / interval)) for effect in self.feed(Tick(), after=interval)]

    def confirm(self) -> list[Effect]:
        """The stream confirms all that is open, and what is written meanwhile."""
        effects = []
        while self.open:
            effects += self.feed(OwnConfirmed(self.open))
        return effects

    def hear(self, peer: int, message: Any) -> list[Effect]:
        return self.feed(PeerMessage(peer, message))

    def meet(self, peer: int, log: LogState | None = None, **hello: Any) -> list[Effect]:
        """A connection both ways."""
        effects = self.feed(PeerConnected(peer))
        role, leading = hello.pop("role", Role.CATCH_UP), hello.pop("leading", 0)
        return effects + self.hear(peer, Hello(role, log or self.node.state(), leading, **hello))

    def lose(self, peer: int, *, after: float = 0.0) -> None:
        """Both connections with a node, the own one and its."""
        self.feed(PeerDisconnected(peer), after=after)
        self.feed(PeerGone(peer))

    def role(self) -> Role:
        """What it is now: of an attribute, type checkers keep what an assertion before has said of it."""
        return self.node.role

    def answer(self) -> Answer:
        found: Answer = only(self.effects, Answer)
        return found

    def ask(self, *down: int, **flags: bool) -> Answer | None:
        self.feed(PromoteRequest(frozenset(down), **flags))
        return next((e for e in self.effects if isinstance(e, Answer)), None)


def only(effects: list[Effect], kind: type[Any]) -> Any:
    found = [e for e in effects if isinstance(e, kind)]
    assert len(found) == 1, effects
    return found[0]


def kinds(effects: list[Effect]) -> list[type[Effect]]:
    return [type(e) for e in effects]


def sent(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def state(log: tuple[BatchHeader, ...] = LOG, *, top: int = 0, lost_host: bool = False) -> LogState:
    node = Node(NodeSettings(2, {1: "e1", 2: "e2"}))
    for batch in log:
        node.read_batch(batch)
    if top:
        node.read_fence(top, 0)
    return node.log.state(lost_host=lost_host)


def follower(**options: Any) -> Driver:
    """Node 2, in sync with primary 1 (epoch 2.1), whose MARKER is entry 6."""
    d = Driver(2, **options)
    d.meet(1)
    d.hear(1, Lead(E2_1, True, leaders_log()))
    d.confirm()
    d.feed(Push(1, MARKER, 5, b"marker"))
    d.confirm()
    assert d.node.role is Role.READY
    return d


MARKER = BatchHeader(E2_1, 6, 6, E1_1, E2_1, ((6, BOTH),))


def leaders_log() -> LogState:
    return state((*LOG, MARKER))


def candidate(size: int = 2, **options: Any) -> Driver:
    """Node 1, asking all others for their promise of epoch 2.1."""
    d = Driver(1, size=size, **options)
    for peer in range(2, size + 1):
        d.meet(peer, state())
    assert d.node.role is Role.RECOVERING
    return d


def leader(size: int = 2, *, active: bool = True, **options: Any) -> Driver:
    """Node 1, primary of epoch 2.1; all follow and have everything."""
    d = candidate(size, **options)
    for peer in range(2, size + 1):
        d.hear(peer, Promise(E2_1, state(top=E2_1)))
    d.confirm()
    for peer in range(2, size + 1):
        d.hear(peer, Following(E2_1, 5, False, state(top=E2_1)))
    if active:
        for peer in range(2, size + 1):
            d.feed(PeerAcked(peer, 6))
        d.feed(Recovered(E2_1))
        assert d.node.role is Role.ACTIVE
    return d


def alone(**options: Any) -> Driver:
    """Node 1, primary by the operator's word that node 2 is down; its set is {1}."""
    d = Driver(1, **options)
    assert d.ask(2) is None
    d.confirm()
    d.feed(Recovered(d.node.leading))
    assert d.node.role is Role.ACTIVE
    return d


def diverged() -> Driver:
    """Node 2 holds an entry that it may have confirmed alone."""
    d = Driver(2, log=(*LOG, BatchHeader(E1_1, 6, 6, E1_1, E1_1, ((6, TWO),)), BatchHeader(E1_1, 7, 7, E1_1, E1_1)))
    d.meet(1, state(top=E2_1), leading=E2_1)
    d.hear(1, Lead(E2_1, False, leaders_log()))
    d.confirm()
    assert d.node.role is Role.DIVERGED
    return d


# ---- the driver's duties ---------------------------------------------------------------------------------------------


def test_nothing_before_opened_and_opened_once() -> None:
    node = Node(NodeSettings(1, {1: "e1"}))
    with pytest.raises(IllegalEvent, match="Tick before Opened"):
        node.handle(Tick(), 0.0)
    node.handle(Opened(0, False), 0.0)
    with pytest.raises(IllegalEvent, match="Opened twice"):
        node.handle(Opened(0, False), 0.0)


def test_more_confirms_than_writes() -> None:
    with pytest.raises(IllegalEvent, match="3 writes confirmed, 0 are open"):
        Driver(2).feed(OwnConfirmed(3))


def test_entries_only_while_active() -> None:
    with pytest.raises(IllegalEvent, match="an entry for the log while catch-up"):
        Driver(2).feed(Append(1))


def test_own_log_must_take_what_it_writes() -> None:
    d = leader()
    d.node.log.fence(E3_2)
    with pytest.raises(IllegalEvent, match=r"the own log refuses entry 7 of epoch 2\.1"):
        d.feed(Append(1))


def test_ack_beyond_the_log() -> None:
    with pytest.raises(IllegalEvent, match="entry 99 is acknowledged, entry 6 was the last that was sent"):
        leader().feed(PeerAcked(2, 99))


STATES: dict[str, Any] = {
    "expecting": lambda: expecting(),
    "catch-up": lambda: Driver(2),
    "ready": follower,
    "candidate": candidate,
    "recovering": lambda: leader(active=False),
    "active": leader,
    "diverged": diverged,
}
NEW = state(top=E3_2)
EVENTS: list[Event] = [
    Tick(),
    OwnConfirmed(0),
    Recovered(E2_1),
    Recovered(E3_1),
    RemoveRequest(1),
    RemoveRequest(2),
    RemoveRequest(2, dry_run=True),
    PromoteRequest(),
    PromoteRequest(dry_run=True),
]


def peer_events(peer: int) -> list[Event]:
    epoch = epoch_number(3, peer)
    messages: list[Message] = [
        Hello(Role.CATCH_UP, state(), 0, 0, True),
        Hello(Role.ACTIVE, NEW, epoch),
        Hello(Role.DIVERGED, state(), 0, E2_1),
        Prepare(E1_1),
        Prepare(epoch),
        Promise(E2_1, state(top=E2_1)),
        Promise(epoch, NEW),
        Lead(E1_1, True, state()),
        Lead(epoch, True, NEW),
        Lead(epoch, False, NEW),
        Following(E2_1, 5, False, state(top=E2_1)),
        Following(E2_1, 5, True, state(top=E2_1)),
        Following(E1_1, 5, False, NEW),
        Following(0, 9, False, state()),
        Following(0, 9, True, state()),
        Heartbeat(E2_1, 6, 6, 0),
        Heartbeat(epoch, 6, 6, 0),
        Superseded(E1_1),
        Superseded(epoch),
    ]
    pushes = [Push(peer, BatchHeader(e, 7, 7, E2_1, e), 6, b"") for e in (E1_1, E2_1, epoch)]
    return [PeerConnected(peer), PeerDisconnected(peer), PeerGone(peer), PeerAcked(peer, 6), *pushes, *(PeerMessage(peer, m) for m in messages)]


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("number", range(len(EVENTS) + len(peer_events(1))))
def test_every_event_in_every_role(name: str, number: int) -> None:
    """No message of another node and no request breaks a node, and what a node must not do in a role it does not do."""
    d = STATES[name]()
    event = [*EVENTS, *peer_events(3 - d.node.me)][number]
    role, top, end, safe, leading = d.node.role, d.node.log.top, d.node.log.end, d.node.safe, d.node.leading
    effects = d.feed(event)
    assert d.node.log.top >= top
    assert d.node.safe >= safe
    assert d.node.log.end >= end or CutTail in kinds(effects)
    if leading:
        assert d.node.leading == leading, "an epoch ends with its incarnation"
        assert d.node.role in ({Role.ACTIVE} if role is Role.ACTIVE else {Role.ACTIVE, Role.RECOVERING})
    if isinstance(event, PeerMessage) and isinstance(event.message, (Hello, Heartbeat, Prepare, Lead, Superseded)):
        seen = getattr(event.message, "epoch", 0) or getattr(event.message, "top", 0) or getattr(getattr(event.message, "log", None), "top", 0)
        assert (Restart in kinds(effects)) == bool(leading and seen > leading)
    if Restart not in kinds(effects):
        d.feed(Tick(), after=0.05)
        d.confirm()


# ---- starting, and taking an epoch without an operator ---------------------------------------------------------------


def test_a_group_of_one_opens_by_itself() -> None:
    d = Driver(1, size=1, log=(BatchHeader(E1_1, 1, 1, 0, E1_1, ((1, ONE),)), LOG[1]))
    assert d.role() is Role.RECOVERING
    effects = d.confirm()
    assert only(effects, WriteBatch).batch == BatchHeader(E2_1, 6, 6, E1_1, E2_1, ((6, ONE),))
    assert only(effects, WriteBatch).kind is EntryKind.MARKER
    assert only(effects, SafeAdvanced).safe == 6
    assert only(effects, Recover).epoch == E2_1
    assert kinds(d.feed(Recovered(E2_1))) == [OpenDoor, RoleChanged]
    assert d.role() is Role.ACTIVE
    d.feed(Append(3, "runs"))
    assert only(d.effects, WriteBatch) == WriteBatch(BatchHeader(E2_1, 7, 9, E2_1, E2_1), EntryKind.ENTRIES, "runs")
    assert d.feed(OwnConfirmed(1)) == [SafeAdvanced(9)]
    assert d.node.durable == 9
    assert not d.node.set_may_change


def test_a_record_beyond_the_log_is_not_believed() -> None:
    """The host lost the end of the log, not the record: what is appended there is not safe yet."""
    d = Driver(1, size=1, applied=50, lost_host=True)
    assert (d.node.applied, d.node.safe) == (5, 5)


def test_nothing_happens_while_another_node_is_silent() -> None:
    d = Driver(1, size=3)
    d.meet(2, state())
    d.feed(Tick())
    assert d.node.role is Role.CATCH_UP
    assert d.node.primary() == 0


def test_all_promise_before_the_marker() -> None:
    d = candidate(3)
    assert d.node.log.top == E2_1
    assert not sent(d.confirm(), Lead)
    d.hear(2, Promise(E2_1, state(top=E2_1)))
    d.hear(2, Promise(E2_1, state(top=E2_1)))
    assert not d.node.leading
    effects = d.hear(3, Promise(E2_1, state(top=E2_1)))
    assert only(effects, WriteBatch).batch.sets == ((6, BOTH),)
    assert [lead.in_set for lead in sent(effects, Lead)] == [True, False]
    assert d.node.primary() == 1
    assert d.node.set_may_change


def test_own_fence_comes_last() -> None:
    d = candidate()
    d.hear(2, Promise(E2_1, state(top=E2_1)))
    assert not d.node.leading
    d.confirm()
    assert d.node.leading == E2_1


@pytest.mark.parametrize(
    ("mine", "theirs", "takes"),
    [
        (LOG, LOG, True),  # equal: whoever owned the last epoch
        (LOG[:1], LOG, False),
        (LOG, LOG[:1], True),
        ((), (), True),  # nothing anywhere: the lowest id
    ],
)
def test_the_longest_log_takes_it(mine: tuple[BatchHeader, ...], theirs: tuple[BatchHeader, ...], takes: bool) -> None:
    d = Driver(1, log=mine)
    d.meet(2, state(theirs))
    assert (d.node.role is Role.RECOVERING) is takes
    other = Driver(2, log=theirs)
    other.meet(1, state(mine))
    assert (other.node.role is Role.RECOVERING) is not takes


def test_not_while_another_leads() -> None:
    d = Driver(1)
    d.meet(2, state(), leading=E2_2)
    assert d.node.role is Role.CATCH_UP


def test_not_where_another_would_refuse_to_be_cut() -> None:
    """R14: no node takes an epoch by itself, and nobody tries again and again."""
    d = Driver(1, log=(*LOG, BatchHeader(E2_1, 6, 6, E1_1, E2_1, ((6, ONE),))))
    d.meet(2, state((*LOG, BatchHeader(E1_1, 6, 6, E1_1, E1_1, ((6, TWO),)))))
    assert (d.node.role, d.node.reason) == (Role.CATCH_UP, "e2 would refuse to drop its tail: an operator must choose")
    assert WriteFence not in kinds(d.feed(Tick()))


def test_both_say_who_would_refuse() -> None:
    mine = (*LOG, BatchHeader(E1_1, 6, 6, E1_1, E1_1, ((6, ONE),)))
    theirs = (*LOG, BatchHeader(E2_2, 6, 6, E1_1, E2_2, ((6, TWO),)))
    for me, log, other in ((1, mine, state(theirs)), (2, theirs, state(mine))):
        d = Driver(me, log=log)
        d.meet(3 - me, other)
        assert (d.node.role, d.node.reason) == (Role.CATCH_UP, "e1 would refuse to drop its tail: an operator must choose")


def test_a_newcomer_does_not_ask_for_an_operator() -> None:
    """It takes no epoch, so nobody has to drop anything for it: who has the longer log goes on."""
    d = Driver(2, log=())
    d.meet(1, state((BatchHeader(E1_1, 1, 1, 0, E1_1, ((1, ONE),)),)))
    assert (d.node.role, d.node.reason) == (Role.CATCH_UP, "waiting for the other nodes of the group")


def test_a_promise_shows_that_it_would_refuse() -> None:
    d = candidate()
    d.confirm()
    d.hear(2, Promise(E2_1, state((*LOG, BatchHeader(E1_1, 6, 6, E1_1, E1_1, ((6, TWO),))), top=E2_1)))
    assert (d.node.role, d.node.reason) == (Role.CATCH_UP, "e2 would refuse to drop its tail: an operator must choose")
    assert WriteFence not in kinds(d.feed(Tick()))


def test_a_promise_shows_a_longer_log() -> None:
    d = candidate()
    d.confirm()
    d.hear(2, Promise(E2_1, state((*LOG, BatchHeader(E1_1, 6, 6, E1_1, E1_1)), top=E2_1)))
    assert (d.node.role, d.node.reason) == (Role.CATCH_UP, "e2 answered and has a longer log: promote e2 instead")
    assert WriteFence not in kinds(d.feed(Tick())), "it has learnt that, and waits for e2"


def test_no_promise_in_time() -> None:
    d = candidate(3)
    d.hear(3, Promise(E2_1, state(top=E2_1)))
    d.feed(Tick(), after=5.0)
    assert "no promise from e2 within 5 s" in [e.reason for e in d.effects if isinstance(e, RoleChanged)]


def test_own_stream_is_too_slow() -> None:
    d = candidate()
    d.hear(2, Promise(E2_1, state(top=E2_1)))
    d.feed(Tick(), after=5.0)
    assert "no promise from the own stream within 5 s" in [e.reason for e in d.effects if isinstance(e, RoleChanged)]
    old = d.open
    d.feed(OwnConfirmed(old))
    assert d.node.leading == 0, "the FENCE of a campaign that is over concludes nothing"


def test_a_node_that_stops_answering_ends_the_campaign() -> None:
    d = candidate(3)
    d.feed(PeerDisconnected(2))
    assert (d.node.role, d.node.reason) == (Role.CATCH_UP, "e2 stopped answering")


def test_one_that_has_promised_may_go() -> None:
    d = candidate(3)
    d.hear(2, Promise(E2_1, state(top=E2_1)))
    d.feed(PeerDisconnected(2))
    assert d.node.role is Role.RECOVERING


def test_a_higher_promise_ends_the_campaign_and_is_learnt() -> None:
    d = candidate()
    d.hear(2, Superseded(epoch_number(7, 2)))
    assert d.node.reason == "e2 has promised epoch 7.2"
    assert sent(d.feed(Tick()), Prepare) == [Prepare(epoch_number(8, 1))]


def test_superseded_by_what_is_known_changes_nothing() -> None:
    d = candidate()
    assert d.hear(2, Superseded(E1_1)) == []
    fresh = Driver(1)
    assert fresh.hear(2, Superseded(E2_2)) == []


def test_another_candidate_wins() -> None:
    d = candidate()
    effects = d.hear(2, Prepare(E3_2))
    assert d.node.reason == "promised epoch 3.2 to e2"
    assert only(effects, WriteFence).epoch == E3_2
    assert sent(d.confirm(), Promise)[-1].epoch == E3_2


def test_a_lower_candidate_is_told() -> None:
    d = candidate()
    assert sent(d.hear(2, Prepare(E2_1)), Superseded) == [Superseded(E2_1)]


def test_another_leads_already() -> None:
    d = candidate()
    d.hear(2, Lead(E3_2, True, NEW))
    assert (d.node.role, d.node.reason) == (Role.CATCH_UP, "following e2, epoch 3.2")


def test_restart_alone() -> None:
    d = Driver(1, restart_alone=True)
    assert d.node.role is Role.RECOVERING
    d.confirm()
    assert d.node.log.members == {1}
    other = Driver(2, restart_alone=True)
    assert other.node.role is Role.CATCH_UP, "only whoever owned the last epoch"


def test_a_lost_host_does_not_restart_alone() -> None:
    d = Driver(1, restart_alone=True, lost_host=True)
    assert d.role() is Role.CATCH_UP
    assert d.node.reason == (
        "the broker of e1 went down and may have lost what was confirmed, so it does not go on alone: "
        "bring e2 back, or accept that with lrq-ha promote e1 --down e2 --force"
    )
    d.meet(2)
    assert d.role() is Role.RECOVERING, "nobody has more"


# ---- leading ---------------------------------------------------------------------------------------------------------


def test_the_door_opens_when_the_marker_is_safe() -> None:
    d = leader(active=False)
    assert d.node.safe == 0
    effects = d.feed(PeerAcked(2, 6))
    assert (only(effects, SafeAdvanced).safe, only(effects, Recover).epoch) == (6, E2_1)
    assert Recover not in kinds(d.feed(Tick()))
    d.feed(Recovered(E1_1))
    assert d.role() is Role.RECOVERING
    d.feed(Recovered(E2_1))
    assert d.role() is Role.ACTIVE
    assert d.feed(Recovered(E2_1)) == []


def expecting(**options: Any) -> Driver:
    """Node 1, promoted while node 2 is down, which it waits for: its door is open."""
    d = Driver(1, expected_backups=1, expected_backups_timeout_s=3.0, **options)
    assert d.ask(2) is None
    d.confirm()
    d.feed(Recovered(d.node.leading))
    return d


def test_the_door_opens_before_the_expected_backups_are_there() -> None:
    d = expecting()
    assert kinds(d.effects) == [OpenDoor, RoleChanged]
    waits = "primary, epoch 2.1; its door is open, confirms wait: 0 of 1 expected backups are in sync (for 3 s at most)"
    assert (d.node.role, d.node.reason, d.node.serving) == (Role.RECOVERING, waits, True)
    d.feed(Append(1, "runs"))
    assert d.confirm() == [SafeAdvanced(7)], "what it takes goes its way"
    assert d.ask() == Answer(False, "e1 is primary already (epoch 2.1)")
    d.feed(SwitchoverRequest())
    assert d.answer().text == "e1 has no in-sync backup to hand over to"
    assert d.feed(Recovered(E2_1)) == [], "it has opened once"


def test_confirms_begin_when_the_expected_backups_are_in_sync() -> None:
    d = expecting()
    d.meet(2, state())
    d.confirm()
    d.hear(2, Following(E2_1, 5, False, state(top=E2_1)))
    assert d.role() is Role.RECOVERING
    effects = d.feed(PeerAcked(2, 6))
    assert only(effects, WriteBatch).batch.sets == ((7, BOTH),)
    assert only(effects, RoleChanged) == RoleChanged(Role.ACTIVE, "primary, epoch 2.1")
    d.feed(PeerDisconnected(2))
    d.live(6.0)
    assert d.node.log.members == ONE
    assert d.role() is Role.ACTIVE, "it has waited once"


def test_confirms_begin_without_them_after_their_time() -> None:
    d = expecting()
    d.live(2.9)
    assert d.node.role is Role.RECOVERING
    d.live(0.5)
    assert (d.node.role, d.node.reason) == (Role.ACTIVE, "primary, epoch 2.1; after 3 s it went on with 0 of 1 expected backups")


def test_who_stayed_in_the_set_was_there_all_the_time() -> None:
    d = leader(3, expected_backups=1)
    assert (d.node.role, d.node.reason) == (Role.ACTIVE, "primary, epoch 2.1")


def test_a_door_that_may_not_open_yet_stays_closed() -> None:
    d = leader(active=False)
    d.feed(Recovered(E2_1))
    assert (d.node.role, d.node.serving) == (Role.RECOVERING, False), "its MARKER is not safe"


def test_safe_needs_the_own_stream_and_every_member() -> None:
    d = leader()
    d.feed(Append(2))
    assert SafeAdvanced not in kinds(d.feed(PeerAcked(2, 8)))
    assert d.feed(OwnConfirmed(1)) == [SafeAdvanced(8)]
    d.feed(Append(1))
    assert d.feed(OwnConfirmed(1)) == []
    assert d.feed(PeerAcked(2, 8)) == []


def test_acks_without_a_subscription_count_for_nothing() -> None:
    d = leader()
    d.feed(Append(1))
    d.feed(OwnConfirmed(1))
    d.feed(PeerDisconnected(2))
    assert d.feed(PeerAcked(2, 7)) == []
    assert Driver(2).feed(PeerAcked(1, 7)) == []


@pytest.mark.parametrize(
    "message",
    [
        Hello(Role.CATCH_UP, NEW, 0),
        Prepare(E3_2),
        Lead(E3_2, True, NEW),
        Superseded(E3_2),
        Following(E2_1, 5, False, NEW),
        Heartbeat(E3_2, 6, 6, 0),
    ],
)
def test_a_newer_epoch_ends_the_incarnation(message: Any) -> None:
    d = leader()
    assert "has seen epoch 3.2; mine, 2.1, is over" in only(d.hear(2, message), Restart).reason


def test_a_node_is_called_once_until_it_answers() -> None:
    d = leader()
    hello = Hello(Role.CATCH_UP, state(top=E2_1), 0)
    assert len(sent(d.hear(2, hello), Lead)) == 1
    assert not sent(d.hear(2, hello), Lead)
    d.hear(2, Following(E2_1, 6, False, state(top=E2_1)))
    assert (only(d.effects, Subscribe).peer, only(d.effects, Subscribe).guard.sent) == (2, 6)
    assert not sent(d.hear(2, Hello(Role.CATCH_UP, state(top=E2_1), 0, E2_1)), Lead), "it follows"
    assert sent(d.hear(2, hello), Lead), "it does not"


def test_who_is_called_is_sent_nothing_until_it_answers() -> None:
    """It refused what came before, and ended the connection: it had to be called once more."""
    d = leader()
    assert only(d.hear(2, Hello(Role.CATCH_UP, state(top=E2_1), 0)), Unsubscribe) == Unsubscribe(2)
    assert Unsubscribe not in kinds(d.hear(2, Hello(Role.CATCH_UP, state(top=E2_1), 0, 0, True))), "nothing is sent to it"
    d.hear(2, Following(E2_1, 6, False, state(top=E2_1)))
    lost = d.hear(2, Hello(Role.CATCH_UP, state(top=E2_1, lost_host=True), 0))
    assert kinds(lost) == [Unsubscribe, WriteBatch, Send]


def test_a_new_connection_is_called_again() -> None:
    """Its answer to the first Lead was lost with its old connection."""
    d = leader()
    d.hear(2, Hello(Role.CATCH_UP, state(top=E2_1), 0))
    assert sent(d.hear(2, Hello(Role.CATCH_UP, state(top=E2_1), 0, 0, True)), Lead)


def test_an_answer_that_outlives_the_connection_does_not_count() -> None:
    d = leader()
    d.feed(PeerDisconnected(2))
    assert d.hear(2, Following(E2_1, 6, False, state(top=E2_1))) == []
    d.feed(PeerConnected(2))
    assert sent(d.hear(2, Hello(Role.READY, state(top=E2_1), 0, E2_1)), Lead)


def test_a_node_that_cannot_be_reached_is_not_called() -> None:
    d = leader()
    d.feed(PeerDisconnected(2))
    assert d.hear(2, Hello(Role.CATCH_UP, state(top=E2_1), 0, 0, True)) == []


def test_an_answer_for_another_epoch() -> None:
    assert leader().hear(2, Following(E1_1, 5, False, state())) == []


@pytest.mark.parametrize("diverged", [False, True])
def test_an_answer_to_who_leads_nothing(diverged: bool) -> None:
    """No node sends it. It made safe what only this node has, made it send its log, or ended its incarnation."""
    d = follower()
    d.feed(Push(1, BatchHeader(E2_1, 7, 7, E2_1, E2_1), 6, b""))
    d.confirm()
    assert (d.node.log.end, d.node.safe) == (7, 6)
    assert d.hear(1, Following(0, 7, diverged, state())) == []
    assert (d.node.safe, d.node.peers[1].subscribed) == (6, False)


def test_a_leader_says_where_its_log_begins_now() -> None:
    """An operator may ask a backup how it would join if it had nothing any more."""
    d = leader()
    d.feed(HeadMoved(4))
    assert [hello.log.head for hello in sent(d.effects, Hello)] == [4]
    assert d.feed(HeadMoved(4)) == d.feed(HeadMoved(3)) == []
    backup = follower()
    assert backup.feed(HeadMoved(4)) == []
    backup.hear(1, d.node.hello(wants_answer=False))
    assert (backup.node.peers[1].hello, backup.node.role) == (d.node.hello(wants_answer=False), Role.READY)


def test_heartbeats() -> None:
    d = leader()
    d.feed(Tick(), after=1.0)
    assert sent(d.effects, Heartbeat) == [Heartbeat(E2_1, 6, 6, 0)]
    assert d.feed(Tick()) == []
    d.hear(2, Heartbeat(E2_1, 6, 6, 4))
    assert d.node.peers[2].applied == 4
    backup = follower()
    backup.feed(Tick(900), after=1.0)
    assert [heartbeat.arriving for heartbeat in sent(backup.effects, Heartbeat)] == [900]


# ---- the set ---------------------------------------------------------------------------------------------------------


def test_a_silent_member_is_dropped_and_told() -> None:
    d = leader()
    d.feed(Append(1))
    d.confirm()
    d.feed(PeerDisconnected(2))
    assert WriteBatch not in kinds(d.live(4.0))
    effects = d.live(2.0)
    assert only(effects, WriteBatch).batch == BatchHeader(E2_1, 8, 8, E2_1, E2_1, ((8, ONE),))
    assert only(effects, Disconnect) == Disconnect(2)
    assert d.node.peers[2].left == "it made no progress for 5 s"
    assert SafeAdvanced not in kinds(effects), "a removal counts when it is on the new set"
    assert only(d.confirm(), SafeAdvanced).safe == 8
    d.feed(PeerConnected(2))
    assert [m.in_set for m in sent(d.hear(2, Hello(Role.CATCH_UP, state(top=E2_1), 0)), Lead)] == [False]


def test_a_member_that_has_everything_is_not_dropped_while_it_is_heard() -> None:
    d = leader()
    for _ in range(10):
        d.hear(2, Heartbeat(E2_1, 6, 6, 6))
        d.live(2.0)
    assert d.node.log.members == BOTH


def link_comes_and_goes(d: Driver, has: int, *, away_s: float = 1.0) -> None:
    """Node 2 is lost, and calls again; it has everything up to `has`."""
    d.live(1.0)
    d.feed(PeerDisconnected(2))
    d.live(away_s)
    d.meet(2, state(top=E2_1))
    d.hear(2, Following(E2_1, has, False, state(top=E2_1)))


@pytest.mark.parametrize("active", [True, False])
def test_a_member_whose_link_comes_and_goes_is_not_waited_for_for_ever(active: bool) -> None:
    """It was never away for long, and nothing was confirmed: each time it was given all of its time again."""
    d = leader(active=active)
    if active:
        d.feed(Append(1))
        d.confirm()
    had = d.node.peers[2].acknowledged
    for _ in range(2):
        link_comes_and_goes(d, had)
        assert d.node.log.members == BOTH
    link_comes_and_goes(d, had)
    assert d.node.log.members == ONE
    assert d.node.peers[2].left == "it made no progress for 5 s"
    assert kinds(d.confirm()).count(SafeAdvanced if active else Recover) == 1


@pytest.mark.parametrize("lacks", [True, False], ids=["it makes progress", "it lacks nothing"])
def test_a_member_whose_link_comes_and_goes_is_out_until_it_has_stayed(lacks: bool) -> None:
    """All confirms waited for it each time that it was away."""
    d = leader()
    if lacks:
        d.feed(Append(9))
        d.confirm()
    for has in range(3):
        link_comes_and_goes(d, 6 + has if lacks else 6)
        assert d.node.log.members == BOTH
    link_comes_and_goes(d, 9 if lacks else 6)
    assert d.node.log.members == ONE
    assert d.node.peers[2].left == "it was lost 4 times in 30 s, and has to stay for as long"
    d.feed(PeerAcked(2, d.node.log.end))
    d.confirm()
    d.live(27.0)
    d.feed(PeerAcked(2, d.node.log.end))
    assert d.node.log.members == ONE
    d.live(3.0)
    d.feed(PeerAcked(2, d.node.log.end))
    assert d.node.log.members == BOTH
    link_comes_and_goes(d, d.node.log.end)
    assert d.node.log.members == BOTH, "it is counted anew"


def test_a_member_that_is_lost_now_and_then_stays() -> None:
    d = leader()
    for _ in range(12):
        for _ in range(4):
            d.live(2.0)
            d.hear(2, Heartbeat(E2_1, 6, 6, 6))
        link_comes_and_goes(d, 6, away_s=2.5)
        assert d.node.log.members == BOTH


def test_in_mode_strict_a_member_whose_link_comes_and_goes_stays() -> None:
    d = leader(strict=True)
    for _ in range(8):
        link_comes_and_goes(d, 6)
    assert d.node.log.members == BOTH


def arrives(d: Driver, sizes: Iterable[int], *, epoch: int = E2_1, end: int = 6) -> None:
    """One second each: node 2, whose log ends at `end`, has so many bytes of what comes next."""
    d.feed(Append(1))
    d.confirm()
    for size in sizes:
        d.live(1.0)
        d.hear(2, Heartbeat(epoch, 6, end, 0, size))


def test_a_member_that_a_large_batch_takes_long_to_reach_stays() -> None:
    d = leader()
    arrives(d, range(100 * KIB, 2_000 * KIB, 100 * KIB))
    assert d.node.log.members == BOTH
    d.feed(PeerAcked(2, 7))
    arrives(d, range(70 * KIB, 1_400 * KIB, 70 * KIB), end=7)
    assert d.node.log.members == BOTH, "the next batch is counted anew"


@pytest.mark.parametrize(
    ("sizes", "epoch", "end"),
    [
        ([100 * KIB] * 8, E2_1, 6),
        ([100 * KIB, 200 * KIB, 0, 100 * KIB, 200 * KIB, 0, 100 * KIB, 200 * KIB], E2_1, 6),
        (range(10 * KIB, 90 * KIB, 10 * KIB), E2_1, 6),
        (range(100 * KIB, 900 * KIB, 100 * KIB), E1_1, 6),
        (range(100 * KIB, 900 * KIB, 100 * KIB), E2_1, 7),
    ],
    ids=["nothing more comes", "it begins anew", "it trickles", "of another epoch", "its stream does not have what came before"],
)
def test_bytes_that_are_no_progress(sizes: Iterable[int], epoch: int, end: int) -> None:
    d = leader()
    arrives(d, sizes, epoch=epoch, end=end)
    assert d.node.log.members == ONE
    assert d.node.peers[2].left == "it made no progress for 5 s"


def test_a_member_over_a_slow_link_may_be_removed() -> None:
    """It would not be back at once: all confirms wait for what is on its way to it."""
    d = leader()
    arrives(d, range(100 * KIB, 900 * KIB, 100 * KIB))
    assert only(d.feed(RemoveRequest(2)), Answer).ok
    assert d.node.log.members == ONE


def test_who_comes_into_the_set_has_all_of_its_time() -> None:
    """However long ago it said first that it has all there is."""
    d = leader()
    d.feed(PeerDisconnected(2))
    d.live(6.0)
    d.confirm()
    assert d.node.log.members == ONE
    d.node.peers[2].admit_after = d.now + 30.0
    link_comes_and_goes(d, 7)
    assert d.node.log.members == ONE
    link_comes_and_goes(d, 7, away_s=60.0)
    assert d.node.log.members == BOTH
    d.confirm()
    d.live(4.0)
    assert d.node.log.members == BOTH
    d.live(2.0)
    assert d.node.log.members == ONE


def own_stream_is_slow() -> Driver:
    """It has the promise, and not the MARKER."""
    d = candidate(strict=True)
    d.hear(2, Promise(E2_1, state(top=E2_1)))
    d.feed(OwnConfirmed(1))
    return d


def lacks_node_7() -> Driver:
    """Which is not configured any more."""
    d = Driver(1, size=1, log=(BatchHeader(E1_1, 1, 1, 0, E1_1, ((1, frozenset({1, 7})),)), LOG[1]), strict=True)
    d.confirm()
    return d


@pytest.mark.parametrize(
    ("make", "names"),
    [(lambda: leader(active=False, strict=True), "e2"), (own_stream_is_slow, "the own stream, e2"), (lacks_node_7, "node 7")],
)
def test_it_is_said_whom_a_marker_waits_for(make: Any, names: str) -> None:
    d = make()
    assert RoleChanged not in kinds(d.live(4.0))
    waits = RoleChanged(Role.RECOVERING, f"taking epoch 2.1; for more than 5 s its MARKER has waited for {names}")
    assert only(d.live(60.0), RoleChanged) == waits, "once"


def test_a_marker_that_was_waited_for_is_safe() -> None:
    d = leader(active=False, strict=True)
    d.live(6.0)
    effects = d.feed(PeerAcked(2, 6))
    assert only(effects, RoleChanged) == RoleChanged(Role.RECOVERING, "taking epoch 2.1")
    assert only(effects, Recover)
    assert RoleChanged not in kinds(d.live(60.0))


def test_time_in_which_the_leader_itself_stood_still_is_no_silence_of_others() -> None:
    """It may be promoted over meanwhile: with the others out of the set it would confirm alone, before it reads what they have said."""
    d = leader()
    d.feed(Append(1))
    d.confirm()
    d.live(1.0)
    assert WriteBatch not in kinds(d.feed(Tick(), after=60.0))
    d.feed(PeerDisconnected(2))
    assert WriteBatch not in kinds(d.feed(Tick(), after=60.0)), "whichever it sees first"
    assert WriteBatch not in kinds(d.live(4.0))
    d.feed(PeerConnected(2))
    effects = d.hear(2, Hello(Role.ACTIVE, state(top=E3_2), E3_2))
    assert only(effects, Restart)
    assert (d.node.log.members, d.node.safe) == (BOTH, 6)


def test_a_silent_member_is_dropped_by_a_leader_that_stands_still_now_and_then() -> None:
    d = leader()
    d.feed(Append(1))
    d.confirm()
    for _ in range(20):
        d.feed(Tick(), after=1.0)
    assert d.node.log.members == BOTH, "a quarter of a second each was its own"
    d.feed(Tick(), after=1.0)
    assert d.node.log.members == ONE


def test_strict_waits_for_a_silent_member() -> None:
    d = leader(strict=True)
    d.feed(PeerDisconnected(2))
    d.feed(Append(1))
    d.confirm()
    d.live(60.0)
    assert (d.node.log.members, d.node.safe) == (BOTH, 6)
    d.feed(RemoveRequest(2))
    assert d.answer() == Answer(True, "e2 is removed from the set; do not promote it before it has rejoined")
    assert only(d.confirm(), SafeAdvanced).safe == 8


def test_strict_keeps_who_is_down_and_lets_it_be_removed_while_recovering() -> None:
    d = Driver(1, strict=True)
    d.ask(2)
    d.confirm()
    assert (d.node.role, d.node.log.members, d.node.safe) == (Role.RECOVERING, BOTH, 0)
    d.feed(RemoveRequest(2))
    assert d.answer().ok
    assert only(d.confirm(), Recover)


def test_a_node_that_is_no_longer_configured() -> None:
    three = (BatchHeader(E1_1, 1, 1, 0, E1_1, ((1, frozenset({1, 7})),)),)
    d = Driver(1, size=1, log=three)
    d.confirm()
    assert d.node.role is Role.RECOVERING
    d.feed(Tick())
    assert d.node.log.members == {1}
    assert only(d.confirm(), Recover)
    strict = Driver(1, size=1, log=three, strict=True)
    strict.confirm()
    strict.feed(RemoveRequest(7))
    assert strict.answer().text == "node 7 is removed from the set; do not promote it before it has rejoined"


KEEPS_UP = "e2 answers and keeps up, so it would be back in the set at once: stop it first"


def behind(seconds: float) -> Driver:
    """Node 1, primary of mode strict; node 2 answers, and for so long has not had what the log ends with."""
    d = leader(strict=True)
    d.feed(Append(1))
    d.confirm()
    d.live(seconds)
    d.hear(2, Heartbeat(E2_1, 6, 6, 0))
    return d


def test_a_live_node_that_makes_no_progress_can_be_removed() -> None:
    """In mode strict nothing else ends the waiting for a node whose broker stands still."""
    d = behind(6.0)
    d.feed(RemoveRequest(2))
    assert d.answer().ok
    assert d.node.log.members == ONE


def test_a_node_that_is_silent_can_be_removed_before_its_connection_is_lost() -> None:
    d = leader(strict=True)
    d.live(6.0)
    d.feed(RemoveRequest(2))
    assert d.answer().ok


@pytest.mark.parametrize(
    ("make", "node", "text"),
    [
        (leader, 1, "e1 is primary: only a backup can be removed"),
        (leader, 9, "node 9 is not in the set"),
        (follower, 1, "e2 is not primary: ask e1"),
        (lambda: Driver(2), 1, "e2 is not primary: ask the primary"),
        (leader, 2, KEEPS_UP),
        (lambda: leader(strict=True), 2, KEEPS_UP),
        (lambda: behind(0.0), 2, KEEPS_UP),
    ],
)
def test_remove_is_refused(make: Any, node: int, text: str) -> None:
    d = make()
    for dry_run in (False, True):
        d.feed(RemoveRequest(node, dry_run))
        assert d.answer() == Answer(False, text), f"dry_run {dry_run}"


def test_a_dry_run_of_remove_changes_nothing() -> None:
    d = leader()
    d.feed(PeerDisconnected(2))
    d.feed(RemoveRequest(2, dry_run=True))
    assert d.answer() == Answer(True, "would take e2 out of the set; nothing is lost or redelivered; it must not be promoted before it has rejoined")
    assert d.node.log.members == BOTH


def rejoining(**options: Any) -> Driver:
    """Node 1 leads alone; node 2 has subscribed from entry 5 and is not in the set."""
    d = alone(**options)
    d.meet(2, state())
    assert not sent(d.effects, Lead)[0].in_set
    return d


def test_a_newcomer_is_admitted_when_it_has_all_that_is_safe() -> None:
    d = rejoining()
    d.hear(2, Following(E2_1, 5, False, state(top=E2_1)))
    assert d.node.log.members == ONE, "it lacks entry 6, which is safe"
    effects = d.feed(PeerAcked(2, 6))
    assert only(effects, WriteBatch).batch.sets == ((7, BOTH),)
    assert not d.node.peers[2].left
    assert WriteBatch not in kinds(d.feed(PeerAcked(2, 6)))
    assert d.feed(OwnConfirmed(1)) == [], "an addition counts from its append"
    assert d.feed(PeerAcked(2, 7)) == [SafeAdvanced(7)]


def test_admission_under_load_holds_safe_for_a_moment() -> None:
    d = rejoining()
    d.feed(Append(5))
    d.confirm()
    assert d.node.safe == 11
    d.hear(2, Following(E2_1, 5, False, state(top=E2_1)))
    d.feed(Append(5))
    d.confirm()
    assert d.node.safe == 11, "held: entries 12 to 16 are on the only member's stream"
    assert WriteBatch not in kinds(d.feed(PeerAcked(2, 10)))
    effects = d.feed(PeerAcked(2, 11))
    assert only(effects, WriteBatch).batch.sets == ((17, BOTH),)
    d.confirm()
    assert d.node.safe == 11
    d.feed(PeerAcked(2, 17))
    assert d.node.safe == 17


def test_admission_gives_up_and_does_not_stall_the_rest() -> None:
    d = rejoining()
    d.feed(Append(5))
    d.confirm()
    d.hear(2, Following(E2_1, 5, False, state(top=E2_1)))
    d.feed(Append(5))
    d.confirm()
    assert only(d.feed(Tick(), after=0.6), SafeAdvanced).safe == 16
    d.feed(Append(1))
    assert SafeAdvanced(17) in d.confirm(), "not held again at once"
    d.feed(Tick(), after=6.0)
    d.feed(Append(1))
    assert SafeAdvanced not in kinds(d.confirm()), "tried again"
    d.feed(PeerDisconnected(2))
    assert SafeAdvanced(18) in d.feed(Tick())


def test_a_newcomer_that_lacks_too_much_is_not_waited_for() -> None:
    d = rejoining(admit_lag_entries_max=3)
    d.feed(Append(9))
    d.confirm()
    d.hear(2, Following(E2_1, 5, False, state(top=E2_1)))
    d.feed(Append(1))
    assert SafeAdvanced(16) in d.confirm()


def test_one_change_at_a_time() -> None:
    d = leader(3)
    assert d.node.log.members == BOTH | {3}, d.node.log.members
    d.feed(PeerDisconnected(2))
    d.feed(RemoveRequest(2))
    d.feed(PeerConnected(2))
    d.hear(2, Hello(Role.CATCH_UP, state(top=E2_1), 0))
    d.hear(2, Following(E2_1, 7, False, state(top=E2_1)))
    d.feed(PeerAcked(2, 8))
    assert 2 not in d.node.log.members, "its removal is not safe yet"


def test_a_lost_host_leaves_the_set_before_it_follows() -> None:
    """R16."""
    d = leader()
    d.feed(PeerDisconnected(2))
    effects = d.meet(2, state(top=E2_1, lost_host=True))
    assert only(effects, WriteBatch).batch.sets == ((7, ONE),)
    assert not sent(effects, Lead)[0].in_set
    assert d.node.peers[2].left == "its broker went down"


def strict_with_a_loss(log: LogState) -> Driver:
    """Node 1, primary of mode strict; node 2 has had entry 6, was away during entries 7 and 8, and is back with `log`."""
    d = leader(strict=True)
    d.lose(2)
    d.feed(Append(2))
    d.confirm()
    assert d.node.safe == 6
    d.meet(2, log)
    return d


LOST = pytest.mark.parametrize(
    ("log", "reason"),
    [
        pytest.param(state(top=E2_1, lost_host=True), "its broker went down", id="lost host"),
        pytest.param(LogState(top=E2_1), "it was rebuilt", id="made anew"),
        pytest.param(replace(state(top=E2_1), in_set=False), "it had not caught up", id="told before"),
    ],
)


@pytest.mark.proves("strict")
@LOST
def test_strict_waits_for_who_has_lost_what_it_had(log: LogState, reason: str) -> None:
    """It left the set, and all that had waited for it was confirmed with the primary alone, and what came then, until it had caught up."""
    d = strict_with_a_loss(log)
    assert (WriteBatch not in kinds(d.effects), sent(d.effects, Lead)[0].in_set, d.node.peers[2].left) == (True, False, reason)
    d.feed(Append(1))
    d.confirm()
    d.live(60.0)
    assert (d.node.log.members, d.node.in_sync, d.node.safe) == (BOTH, ONE, 6)
    d.hear(2, Following(E2_1, log.end, False, log))
    d.live(1.0)
    assert (d.node.log.end, d.node.set_may_change) == (9, True), "it lacks entry 6, which is safe"
    d.feed(SwitchoverRequest(2))
    assert d.answer() == Answer(False, "e2 is not an in-sync backup: wait until it has caught up", 2)
    effects = d.feed(PeerAcked(2, 6))
    assert only(effects, WriteBatch).batch.sets == ((10, BOTH),), "by that it knows that it is not out any more"
    assert (d.node.in_sync, d.node.peers[2].left) == (BOTH, "")
    d.confirm()
    assert d.node.safe == 6
    d.feed(PeerAcked(2, 8))
    assert (d.node.safe, d.node.log.end) == (8, 10)


@LOST
def test_nobody_is_turned_away_for_a_switchover_that_waits_for_who_is_out(log: LogState, reason: str) -> None:
    """All clients were, and then it failed, as nothing became safe."""
    d = leader(3, strict=True)
    d.lose(2)
    d.feed(Append(2))
    d.confirm()
    d.feed(PeerAcked(3, d.node.log.end))
    d.meet(2, log)
    d.feed(SwitchoverRequest(3))
    waits = "e2 has not caught up, and nothing is safe without it: wait until it has, or take it out of the set with lrq-ha remove"
    assert d.answer() == Answer(False, waits, 3)
    d.feed(RemoveRequest(2))
    d.feed(SwitchoverRequest(3))
    assert d.answer() == Answer(True, "would hand over to e3", 3)


@LOST
def test_strict_waits_for_it_whoever_leads_then(log: LogState, reason: str) -> None:
    d = candidate(strict=True)
    d.hear(2, Promise(E2_1, log))
    d.confirm()
    assert (d.node.log.members, d.node.peers[2].left, sent(d.feed(Tick()), Lead)) == (BOTH, reason, [])
    d.hear(2, Following(E2_1, log.end, False, log))
    d.live(60.0)
    assert d.node.role is Role.RECOVERING
    assert only(d.feed(PeerAcked(2, 6)), SafeAdvanced).safe == 6


@LOST
def test_what_it_acknowledged_before_it_lost_it_counts_no_more(log: LogState, reason: str) -> None:
    d = leader(strict=True)
    d.feed(Append(1))
    d.feed(PeerAcked(2, 7))
    d.lose(2)
    d.meet(2, log)
    d.confirm()
    assert d.node.safe == 6


@LOST
def test_strict_goes_on_when_the_operator_removes_it(log: LogState, reason: str) -> None:
    """Also while it catches up, which may take long."""
    d = strict_with_a_loss(log)
    d.hear(2, Following(E2_1, log.end, False, log))
    d.feed(RemoveRequest(2))
    assert d.answer().ok
    assert d.node.log.members == ONE
    assert only(d.confirm(), SafeAdvanced).safe == 9


def test_a_new_group_in_mode_strict_begins_with_all_its_nodes() -> None:
    """It began with one of them, which confirmed alone until the others had followed."""
    d = Driver(1, size=3, log=(), strict=True)
    for peer in (2, 3):
        d.meet(peer, LogState())
    for peer in (2, 3):
        d.hear(peer, Promise(E1_1, LogState(top=E1_1)))
    d.confirm()
    assert (d.node.role, d.node.log.members, d.node.safe) == (Role.RECOVERING, BOTH | {3}, 0)
    for peer in (2, 3):
        d.hear(peer, Following(E1_1, 0, False, LogState(top=E1_1)))
        d.feed(PeerAcked(peer, 1))
    assert d.node.safe == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_diverged_member_leaves_the_set(strict: bool) -> None:
    d = leader(strict=strict)
    d.hear(2, Following(E2_1, 5, True, state(top=E2_1)))
    assert d.node.log.members == (BOTH if strict else ONE)
    assert d.node.peers[2].diverged
    assert d.node.peers[2].left == ("" if strict else "it has diverged")
    assert WriteBatch not in kinds(d.hear(2, Following(E2_1, 5, True, state(top=E2_1)))) or strict


# ---- promoting -------------------------------------------------------------------------------------------------------


OUT = BatchHeader(E1_1, 6, 6, E1_1, E1_1, ((6, ONE),))
LONGER = (*LOG, BatchHeader(E1_1, 6, 9, E1_1, E1_1))


def met(d: Driver, log: LogState | None = None, **hello: Any) -> Driver:
    d.meet(1, log, **hello)
    return d


def between() -> Driver:
    """Node 2 of three: node 1 has a longer log, node 3 leads."""
    d = met(Driver(2, size=3), state(LONGER))
    d.meet(3, leading=E3_1)
    return d


def cut_off(epoch: int) -> Driver:
    """Node 2 of three, which hears node 3, and not the primary 1. `epoch`: which one node 3 says that it follows."""
    d = follower(size=3)
    d.meet(3)
    d.lose(1)
    d.hear(3, Heartbeat(epoch, 0, 0, 0))
    return d


def test_who_no_longer_follows_does_not_keep_others_from_an_epoch() -> None:
    for d in (cut_off(0), cut_off(E2_1)):
        d.lose(3)
        d.meet(3)
        assert d.ask(1) is None, "it asks for promises"


@pytest.mark.parametrize(
    ("make", "down", "text", "overridden"),
    [
        (leader, [], "e1 is primary already (epoch 2.1)", False),
        (lambda: leader(active=False), [], "e1 is primary already (epoch 2.1)", False),
        (candidate, [], "e1 is taking epoch 2.1 already", False),
        (lambda: Driver(2), [9], "there is no node 9 in this group", False),
        (lambda: met(Driver(2)), [2], "e2 is said to be down, but it is to be promoted: name only others with --down", False),
        (lambda: met(Driver(2)), [1], "e1 is said to be down, but it answers: stop it first, or use switchover", False),
        (lambda: cut_off(E2_1), [1], "e1 is said to be down, but it answers e3: stop it first, or use switchover", False),
        (lambda: Driver(2), [], "e1 does not answer: if it is down, say so with --down e1", False),
        (lambda: Driver(2, size=3), [], "e1, e3 does not answer: if it is down, say so with --down e1, e3", False),
        (lambda: Driver(2, size=3), [3], "e1 does not answer: if it is down, say so with --down e1, e3", False),
        (lambda: met(Driver(2), leading=E2_1), [], "e1 is primary and answers: use switchover", False),
        (follower, [], "e1 is primary and answers: use switchover", False),
        (lambda: met(Driver(2), state(LONGER)), [], "e1 answers and has a longer log: promote e1 instead", True),
        (between, [], "e3 is primary and answers: use switchover", False),
        (
            lambda: Driver(2, log=(*LOG, OUT)),
            [1],
            "e2 was not in sync: what was confirmed without it would be lost (its log ends at 6, epoch 1.1). Bring e1 back, or repeat with --force",
            True,
        ),
        (lambda: Driver(2, log=()), [1], "the log of e2 is empty: what e1 holds would be lost. Bring e1 back, or repeat with --force", True),
        (
            lambda: Driver(2, lost_host=True),
            [1],
            "the broker of e2 went down and it has not caught up since: what it lost is unknown. Repeat with --force to accept that",
            True,
        ),
        (
            lambda: Driver(2),
            [1],
            "e2 has heard no primary since it started: if e1 went on without it, what was confirmed since would be lost "
            "(its log ends at 5, epoch 1.1). Bring e1 back, or repeat with --force",
            True,
        ),
    ],
)
def test_promotion_is_refused(make: Any, down: list[int], text: str, overridden: bool) -> None:
    d = make()
    assert d.ask(*down) == Answer(False, text)
    assert d.ask(*down, dry_run=True) == Answer(False, text)
    forced = d.ask(*down, force=True)
    assert (forced is None) is overridden
    assert forced in (None, Answer(False, text))


def deaf() -> Driver:
    """Node 2, restarted: its own link to node 1 stands, and no word of that one arrives."""
    d = Driver(2)
    d.feed(PeerConnected(1))
    return d


def mute(*messages: Any) -> Driver:
    """Node 2, in sync when its own link to the primary 1 was lost for good; node 1 has connected again since, and says this."""
    d = follower()
    d.feed(PeerDisconnected(1))
    d.feed(Push(1, BatchHeader(E2_1, 7, 7, E2_1, E2_1), 6, b""))
    assert only(d.effects, RefusePush).reason == "this node does not follow you"
    for message in messages:
        d.hear(1, message)
    return d


HEARD = "e1 does not answer e2, but is not down: e2 hears it, though it cannot send to it. Mend that (lrq-ha list says what it is), or stop e1 first"
REACHED = HEARD.replace("hears it, though it cannot send to it", "reaches it, though it hears nothing of it")


@pytest.mark.parametrize("down", [[1], []])
@pytest.mark.parametrize("flags", [{}, {"force": True}, {"dry_run": True}])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: mute(Hello(Role.ACTIVE, leaders_log(), E2_1, 0, True), Heartbeat(E2_1, 6, 7, 6)), HEARD),
        (lambda: mute(Heartbeat(E2_1, 6, 7, 6)), HEARD),
        (deaf, REACHED),
    ],
    ids=["heard", "heard after a moment", "reached"],
)
def test_nobody_is_promoted_over_a_node_that_one_connection_shows_to_be_there(make: Any, text: str, flags: dict[str, bool], down: list[int]) -> None:
    """It was the primary, and went on confirming: two did."""
    d = make()
    assert d.ask(*down, **flags) == Answer(False, text)
    assert d.open == 0


def test_who_is_heard_no_more_is_down_when_an_operator_says_so() -> None:
    """Its connection is lost; or that stands, as a host that is gone does not end it, and nothing has come for a while."""
    for gone, after in ((True, 0.0), (False, 2.5)):
        d = mute(Heartbeat(E2_1, 6, 7, 6))
        if gone:
            d.feed(PeerGone(1))
        d.live(after)
        assert d.ask(1) is None


def test_a_primary_that_only_another_node_hears_is_not_promoted_over() -> None:
    """Not even if that one cannot answer it, and so follows nobody."""
    third = Driver(3, size=3)
    third.hear(1, Heartbeat(E2_1, 6, 6, 6))
    third.feed(Tick())
    third.feed(PeerConnected(2))
    third.feed(Tick(), after=1.0)
    [heartbeat] = sent(third.effects, Heartbeat)
    assert heartbeat.epoch == E2_1
    d = cut_off(heartbeat.epoch)
    assert d.ask(1, force=True) == Answer(False, "e1 is said to be down, but it answers e3: stop it first, or use switchover")
    third.live(3.0)
    assert {message.epoch for message in sent(third.live(0.5), Heartbeat)} == {0}, "it has not been heard for a while"


@pytest.mark.parametrize(("members", "first"), [(BOTH, ""), (frozenset({1, 2, 3}), "set with lrq-ha remove, then of the ")])
def test_a_silent_node_is_first_removed_from_the_set(members: frozenset[int], first: str) -> None:
    """Out of the configuration, and in the set, it would be waited for in mode strict, under no name."""
    log = (BatchHeader(E1_1, 1, 1, 0, E1_1, ((1, members),)), LOG[1])
    d = Driver(1, size=3, log=log, strict=True)
    for peer in (2, 3):
        d.meet(peer, state(log))
    for peer in (2, 3):
        d.hear(peer, Promise(E2_1, state(log, top=E2_1)))
    d.confirm()
    for peer in sorted(members - ONE):
        d.hear(peer, Following(E2_1, 5, False, state(log, top=E2_1)))
        d.feed(PeerAcked(peer, 6))
    d.feed(Recovered(E2_1))
    d.lose(3)
    d.feed(SwitchoverRequest(2))
    silent = "e3 does not answer, and e2 cannot take an epoch without: bring it back, or take it out of the"
    assert d.answer() == Answer(False, f"{silent} {first}configuration", 2)


def test_a_diverged_node_does_not_stand_in_the_way() -> None:
    d = met(Driver(2), state(LONGER), role=Role.DIVERGED)
    assert d.ask(dry_run=True) == Answer(
        True, "would promote e2; it has heard no primary since it started and was in sync as far as its own log knows; its log ends at 5"
    )


IN_SYNC_THEN = (
    " and was in sync then; its log ends at 6; if e1 went on without it since, what was confirmed then is lost: compare with when e1 went down"
)


def test_a_promotion_says_since_when_the_other_may_have_gone_on_alone() -> None:
    """The primary was cut off and confirmed alone for an hour before it went down, and the operator was told nothing but the new epoch."""
    d = follower()
    d.feed(PeerDisconnected(1))
    d.live(3_600)
    assert d.node.role is Role.READY
    assert d.ask(1) is None
    assert only(d.confirm(), Answer) == Answer(True, "e2 has taken epoch 3.2", at_stake=f"it heard its primary 3600.0 s ago{IN_SYNC_THEN}")


def test_in_mode_strict_nobody_goes_on_without_a_member() -> None:
    d = follower(strict=True)
    d.lose(1)
    assert d.ask(1) is None
    assert only(d.confirm(), Answer).at_stake == "it heard its primary 0.0 s ago and was in sync then; its log ends at 6"


def test_dry_run_tells_the_stakes() -> None:
    d = follower()
    d.lose(1, after=2.0)
    assert d.node.role is Role.READY, "in sync when it last heard: may be promoted"
    assert d.ask(1, dry_run=True) == Answer(True, f"would promote e2; it heard its primary 2.0 s ago{IN_SYNC_THEN}")
    assert d.open == 0
    d.node.lost_host = True
    d.node.log.fence(E2_1, 6)
    d.ask(1, dry_run=True, force=True)
    assert "was NOT in sync then; its broker went down since, and it has not caught up" in d.answer().text


def test_dry_run_tells_what_force_overrides() -> None:
    """All of it: it was said that it would be done, and not in spite of what."""
    d = Driver(2, log=(*LOG, OUT), size=3)
    d.meet(1, state(LONGER))
    text = d.ask(3, dry_run=True, force=True)
    assert text == Answer(
        True,
        "would promote e2, although: e1 answers and has a longer log: promote e1 instead; e2 was not in sync: what was confirmed without it would be "
        "lost (its log ends at 6, epoch 1.1). Bring e3 back, or repeat with --force; it has heard no primary since it started and was NOT in sync; "
        "its log ends at 6; if e3 went on without it since, what was confirmed then is lost: compare with when e3 went down",
    )
    assert d.open == 0


def test_dry_run_tells_what_local_completion_puts_at_stake() -> None:
    d = follower(local_completion=True)
    d.lose(1)
    d.ask(1, dry_run=True)
    assert d.answer().text.endswith("; publishes with local completion that it lacks are lost, though they were confirmed")


def test_promotion_with_the_operators_word() -> None:
    d = Driver(2)
    assert d.ask(1, force=True) is None
    effects = d.confirm()
    assert (only(effects, Answer).ok, only(effects, Answer).text) == (True, "e2 has taken epoch 2.2")
    assert d.node.log.members == TWO
    assert d.node.leading == E2_2


def test_promotion_with_answers() -> None:
    d = Driver(2, size=3)
    d.meet(3)
    d.ask(1, force=True)
    d.confirm()
    assert d.node.leading == 0
    d.hear(3, Promise(E2_2, state(top=E2_2)))
    assert d.answer().ok


def test_promotion_fails_later() -> None:
    d = Driver(2, size=3)
    d.meet(3)
    d.ask(1, force=True)
    d.feed(PeerDisconnected(3))
    assert d.answer() == Answer(False, "e3 stopped answering")


@pytest.mark.parametrize("force", [False, True])
def test_promotion_finds_a_longer_log_late(force: bool) -> None:
    d = Driver(2, size=3)
    d.meet(3)
    d.node.last_heard_leader = 0.0
    d.ask(1, force=force)
    d.confirm()
    d.hear(3, Promise(E2_2, state(LONGER, top=E2_2)))
    assert d.answer().ok is force


def beside(*tail: BatchHeader, in_set: bool = False, **options: Any) -> Driver:
    """Node 2 of three, in sync with primary 1 until that went down. Node 3, which was not, has had more of it: `tail`."""
    d = follower(size=3, **options)
    d.meet(3, replace(state((*LOG, MARKER, *tail)), in_set=in_set))
    d.lose(1, after=2.0)
    return d


MORE = BatchHeader(E2_1, 7, 9, E2_1, E2_1)


def test_a_longer_log_of_a_node_that_was_not_in_sync_does_not_stand_in_the_way() -> None:
    """Each was to be promoted instead of the other, though nothing was safe that the one in sync lacks."""
    d = beside(MORE)
    assert d.ask(1) is None
    d.confirm()
    d.hear(3, Promise(E3_2, replace(state((*LOG, MARKER, MORE, BatchHeader(E2_1, 10, 10, E2_1, E2_1)), top=E3_2), in_set=False)))
    assert (d.answer().ok, d.answer().text) == (True, "e2 has taken epoch 3.2")


def forgetful() -> Driver:
    """Its broker went down since."""
    d = beside(MORE)
    d.node.lost_host = True
    return d


def told_that_it_is_out() -> Driver:
    d = beside(MORE)
    d.node.log.fence(E2_1, 6)
    return d


@pytest.mark.parametrize(
    "make",
    [
        forgetful,
        told_that_it_is_out,
        lambda: beside(MORE, in_set=True),
        lambda: beside(BatchHeader(E2_1, 7, 9, E2_1, E2_1, ((8, ONE),))),  # the primary went on without node 2
    ],
)
def test_a_longer_log_that_may_hold_what_was_confirmed_is_promoted_first(make: Any) -> None:
    d = make()
    assert d.ask(1) == Answer(False, "e3 answers and has a longer log: promote e3 instead")
    assert d.ask(1, force=True) is None


REST = BatchHeader(E2_1, 7, 900, E2_1, E2_1, ((8, frozenset({1, 3})),))  # the primary went on without node 2


@pytest.mark.parametrize("force", [False, True])
def test_a_longer_log_of_which_the_promise_tells_is_promoted_first(force: bool) -> None:
    """It had grown since its Hello. Its node would refuse to drop it: only with force is that in order."""
    d = beside()
    assert d.ask(1, force=force) is None
    d.confirm()
    d.hear(3, Promise(E3_2, replace(state((*LOG, MARKER, REST), top=E3_2), in_set=True)))
    told = "e2 has taken epoch 3.2" if force else "e3 answered and has a longer log: promote e3 instead"
    assert (d.answer().ok, d.answer().text) == (force, told)


def test_the_promise_counts_also_where_all_answer() -> None:
    """All others answer, one of them empty: what was confirmed may be with the third alone, and this node was not in sync."""
    d = Driver(2, size=3)
    d.node.log.fence(E1_1, 5)
    d.meet(3, state(), paused=True)
    d.meet(1, state(()))
    assert d.ask() is None
    d.confirm()
    log = state((*LOG, BatchHeader(E1_1, 6, 6, E1_1, E1_1, ((6, frozenset({1, 3})),)), BatchHeader(E1_1, 7, 900, E1_1, E1_1)), top=E2_2)
    d.hear(1, Promise(E2_2, state((), top=E2_2)))
    d.hear(3, Promise(E2_2, replace(log, in_set=True)))
    assert (d.answer().ok, d.answer().text) == (False, "e3 answered and has a longer log: promote e3 instead")


@pytest.mark.parametrize("refuses", [False, True])
def test_the_operator_may_promote_over_a_node_that_is_diverged(refuses: bool) -> None:
    """He has chosen by not promoting that one, and the promise tells nothing new."""
    tail = REST if refuses else MORE
    d = follower(size=3)
    d.meet(3, replace(state((*LOG, MARKER, tail)), in_set=True), role=Role.DIVERGED)
    d.lose(1, after=2.0)
    assert d.ask(1) is None
    d.confirm()
    d.hear(3, Promise(E3_2, replace(state((*LOG, MARKER, tail), top=E3_2), in_set=True)))
    assert d.answer().ok


def test_who_loses_its_primary_tells_the_others_what_log_it_has() -> None:
    d = follower(size=3)
    d.meet(3)
    d.feed(Push(1, MORE, 6, b"more"))
    effects = d.feed(PeerDisconnected(1))
    assert [(e.peer, e.message) for e in effects if isinstance(e, Send)] == [(3, Hello(Role.READY, d.node.state(), 0))]
    assert d.node.state().end == MORE.last
    assert sent(d.feed(PeerDisconnected(3)), Hello) == []


def test_the_longest_log_is_promoted_where_all_answer() -> None:
    """Also if it was not in sync: nobody refuses it then."""
    d = beside(MORE)
    d.meet(1, leaders_log())
    assert d.ask() == Answer(False, "e3 answers and has a longer log: promote e3 instead")


@pytest.mark.parametrize("make", [lambda: Driver(2, strict=True), lambda: Driver(1), follower])
def test_a_restarted_node_that_can_vouch_for_itself(make: Any) -> None:
    """Strict: it stays in the set until it is removed. The last leader: nobody led after it. The others: they heard their primary."""
    d = make()
    other = 2 if d.node.me == 1 else 1
    d.lose(other)
    assert d.ask(other) is None


def test_the_operator_may_choose_between_two_histories() -> None:
    d = met(Driver(2), state((*LOG, OUT)))
    assert d.ask(force=True) is None
    d.confirm()
    d.hear(1, Promise(E2_2, state((*LOG, OUT), top=E2_2)))
    assert d.answer().ok


@pytest.mark.parametrize(("options", "forgotten"), [({}, 0), ({"lost_host": True}, FORGOTTEN_TERMS_MAX), ({"log": ()}, FORGOTTEN_TERMS_MAX)])
def test_who_may_have_forgotten_epochs_skips_them(options: dict[str, Any], forgotten: int) -> None:
    """Nobody that answers knows which epochs the node led before: the same number must not name two histories."""
    d = Driver(2, **options)
    d.ask(1, force=True)
    assert only(d.effects, WriteFence).epoch == epoch_number((d.node.log.last_epoch >> 8) + 1 + forgotten, 2)


# ---- following -------------------------------------------------------------------------------------------------------


def test_following() -> None:
    d = Driver(2)
    effects = d.meet(1, state(top=E2_1), leading=E2_1)
    assert [h.wants_answer for h in sent(effects, Hello)] == [True]
    effects = d.hear(1, Lead(E2_1, True, leaders_log()))
    assert only(effects, WriteFence) == WriteFence(E2_1, 0)
    assert d.node.primary() == 1
    effects = d.confirm()
    assert sent(effects, Following) == [Following(E2_1, 5, False, d.node.state())]
    assert Ack not in kinds(effects), "it has said what it has"
    assert d.node.role is Role.READY
    assert d.feed(Push(1, MARKER, 5, b"body")) == [WriteBatch(MARKER, EntryKind.ENTRIES, b"body"), SafeAdvanced(5)]
    assert d.feed(OwnConfirmed(1)) == [Ack(1, 6)]
    assert d.hear(1, Heartbeat(E2_1, 6, 6, 6)) == [SafeAdvanced(6)]
    assert d.hear(1, Heartbeat(E1_1, 9, 9, 9)) == []
    hello = sent(d.hear(1, Hello(Role.ACTIVE, leaders_log(), E2_1, 0, False)), Hello)
    assert hello == []


def test_hello_is_answered() -> None:
    d = Driver(2)
    assert d.hear(1, Hello(Role.ACTIVE, leaders_log(), E2_1, 0, True)) == [], "it cannot be reached yet"
    d.feed(PeerConnected(1))
    assert [h.wants_answer for h in sent(d.hear(1, Hello(Role.ACTIVE, leaders_log(), E2_1, 0, True)), Hello)] == [False]


def test_pushes_that_are_not_taken() -> None:
    d = follower()
    stale = d.feed(Push(1, BatchHeader(E1_1, 7, 7, E2_1, E1_1), 0))
    assert stale == [Send(1, Superseded(E2_1)), RefusePush(1, "epoch 1.1 is over")]
    assert d.feed(Push(1, BatchHeader(E3_1, 7, 7, E2_1, E3_1), 0)) == [RefusePush(1, "this node does not follow you")]
    assert d.feed(Push(1, BatchHeader(E2_1, 9, 9, E2_1, E2_1), 0)) == [RefusePush(1, "entry 9 does not continue a log that ends at 6")]
    assert d.feed(Push(1, BatchHeader(E2_1, 7, 7, E2_1, E2_1), 0)) == [RefusePush(1, "this node does not follow you")]
    assert kinds(d.feed(Push(2, BatchHeader(E2_1, 7, 7, E2_1, E2_1), 0))) == [RefusePush]


def test_a_push_that_is_repeated_is_acked_again() -> None:
    """The first ack was for a subscription that had ended."""
    d = follower()
    push = Push(1, BatchHeader(E2_1, 7, 7, E2_1, E2_1), 6)
    d.feed(push)
    assert d.feed(push) == [], "its own stream has not confirmed it"
    assert d.confirm() == [Ack(1, 7)]
    assert d.feed(push) == [Ack(1, 7)]


def test_a_longer_tail_is_neither_acked_nor_safe() -> None:
    """Entries 6 to 9 are an old tail; the leader has others there."""
    d = Driver(2, log=LONGER)
    d.meet(1, state(top=E2_1), leading=E2_1)
    d.hear(1, Lead(E2_1, True, leaders_log()))
    effects = d.confirm()
    assert sent(effects, Following)[0].start == 5
    assert Ack not in kinds(effects)
    assert d.hear(1, Heartbeat(E2_1, 6, 6, 6)) == [SafeAdvanced(5)]
    effects = d.feed(Push(1, MARKER, 6, b""))
    assert effects[0] == CutTail(6)
    assert d.feed(OwnConfirmed(1)) == [Ack(1, 6), SafeAdvanced(6)]


def test_nothing_safe_is_cut() -> None:
    d = follower()
    d.node.safe = 6
    with pytest.raises(IllegalEvent, match="entry 6 is safe and would be cut"):
        d.feed(Push(1, BatchHeader(E1_1, 6, 6, E1_1, E2_1), 0))


def test_a_lower_leader_and_a_false_one() -> None:
    d = follower()
    assert d.hear(1, Lead(E1_1, True, state())) == [Send(1, Superseded(E2_1))]
    assert d.hear(1, Lead(E3_2, True, state())) == [Send(1, Superseded(E2_1))]

    assert d.hear(1, Lead(E1_1, True, state())) == [Send(1, Superseded(E2_1))]
    assert d.hear(1, Lead(E3_2, True, state())) == [Send(1, Superseded(E2_1))]


def test_a_call_that_is_read_after_the_primary_is_gone_is_not_taken() -> None:
    """It may wait in a buffer. Who took it would name that primary for ever, and nobody could be promoted over it."""
    d = Driver(3, size=3)
    d.meet(1)
    d.meet(2)
    d.lose(1)
    assert not d.hear(1, Lead(E2_1, True, leaders_log()))
    assert d.node.primary() == 0
    d.meet(1, state(top=E2_1), leading=E2_1)
    d.hear(1, Lead(E2_1, True, leaders_log()))
    d.confirm()
    assert d.node.following, "it calls again"


def test_the_connection_to_the_primary() -> None:
    d = follower()
    d.lose(1)
    assert (d.node.role, d.node.reason, d.node.primary()) == (Role.READY, "the connection to the primary e1 is lost", 0)
    assert kinds(d.feed(Push(1, BatchHeader(E2_1, 7, 7, E2_1, E2_1), 0))) == [RefusePush]
    three = Driver(2, size=3)
    three.meet(3)
    assert three.feed(PeerDisconnected(3)) == []


def test_the_primarys_new_connection_carries_a_new_lead() -> None:
    """What it sends before that is no sign that this node is still in its set."""
    d = follower()
    d.hear(1, Hello(Role.ACTIVE, leaders_log(), E2_1, 0, True))
    heard = d.node.last_heard_leader
    d.now += 1.0
    assert d.hear(1, Heartbeat(E2_1, 6, 6, 6)) == []
    assert d.node.last_heard_leader == heard
    assert d.feed(Tick()) != []
    assert d.node.role is Role.READY


def test_a_fence_that_comes_too_late_answers_nobody() -> None:
    d = Driver(2)
    d.meet(1, state(top=E2_1), leading=E2_1)
    d.hear(1, Lead(E2_1, True, leaders_log()))
    d.hear(1, Lead(E3_1, True, leaders_log()))
    assert [m.epoch for m in sent(d.confirm(), Following)] == [E3_1]


def test_told_to_be_out_until_a_set_says_otherwise() -> None:
    d = follower()
    d.hear(1, Lead(E2_1, False, state((*LOG, MARKER, BatchHeader(E2_1, 7, 7, E2_1, E2_1, ((7, ONE),))))))
    assert only(d.effects, WriteFence) == WriteFence(E2_1, 7)
    d.confirm()
    assert d.role() is Role.CATCH_UP
    d.feed(Push(1, BatchHeader(E2_1, 7, 7, E2_1, E2_1, ((7, ONE),)), 6))
    d.confirm()
    d.feed(Push(1, BatchHeader(E2_1, 8, 8, E2_1, E2_1, ((8, BOTH),)), 6))
    d.confirm()
    assert d.role() is Role.READY


def test_taken_out_by_an_entry() -> None:
    d = follower()
    d.feed(Push(1, BatchHeader(E2_1, 7, 7, E2_1, E2_1, ((7, ONE),)), 6))
    d.confirm()
    assert (d.node.role, d.node.reason) == (Role.CATCH_UP, "taken out of the set")


def test_an_empty_leader_still_records_out() -> None:
    d = Driver(2, log=())
    d.meet(1, LogState(top=E1_1), leading=E1_1)
    d.hear(1, Lead(E1_1, False, LogState(top=E1_1)))
    assert only(d.effects, WriteFence).out_end == 1


def test_a_lost_host_has_caught_up_when_it_is_in_the_set() -> None:
    d = Driver(2, lost_host=True)
    d.meet(1, state(top=E2_1), leading=E2_1)
    d.hear(1, Lead(E2_1, False, leaders_log()))
    d.confirm()
    assert d.node.state().lost_host
    d.feed(Push(1, MARKER, 5))
    d.confirm()
    assert d.node.state().lost_host, "that set is from before it was told that it is out"
    d.feed(Push(1, BatchHeader(E2_1, 7, 7, E2_1, E2_1, ((7, BOTH),)), 6))
    d.confirm()
    assert not d.node.state().lost_host


# ---- promising and diverging -----------------------------------------------------------------------------------------


def test_a_promise_deposes_the_primary() -> None:
    d = follower(size=3)
    d.feed(PeerConnected(3))
    epoch = epoch_number(3, 3)
    d.hear(3, Prepare(epoch))
    assert d.node.role is Role.CATCH_UP
    assert d.node.primary() == 0
    assert sent(d.feed(Push(1, BatchHeader(E2_1, 7, 7, E2_1, E2_1), 0)), Superseded) == [Superseded(epoch)], "before its FENCE is confirmed"
    assert sent(d.confirm(), Promise) == [Promise(epoch, d.node.state())]


def test_diverged() -> None:
    d = diverged()
    assert d.node.reason == "entries 6 to 7 may have been confirmed by this node alone; e1 lacks them"
    assert d.node.tail_from == 6
    assert d.feed(Tick())
    d.hear(1, Lead(E2_1, False, leaders_log()))
    assert sent(d.confirm(), Following)[-1].diverged
    d.hear(1, Prepare(E3_1))
    assert d.node.role is Role.DIVERGED
    d.confirm()
    d.lose(1)
    assert d.node.role is Role.DIVERGED


@pytest.mark.parametrize("ends", ["nobody promises", "another takes an epoch"])
def test_diverged_still_when_a_promotion_of_it_came_to_nothing(ends: str) -> None:
    """It said that it had no entries of its own, and could have taken an epoch by itself."""
    d = diverged()
    before = d.node.reason
    d.lose(1)
    assert d.ask(1, force=True) is None
    assert d.node.role is Role.RECOVERING
    if ends == "nobody promises":
        d.live(6.0)
    else:
        d.hear(1, Prepare(epoch_number(5, 1)))
    assert (d.node.role, d.node.reason, d.node.tail_from) == (Role.DIVERGED, before, 6)
    d.confirm()
    d.meet(1)
    d.live(1.0)
    assert (d.node.role, d.open) == (Role.DIVERGED, 0), "an operator must choose"


def test_diverged_no_more() -> None:
    """Another leader has what the first one lacked."""
    d = diverged()
    log = (*LOG, BatchHeader(E1_1, 6, 6, E1_1, E1_1, ((6, TWO),)), BatchHeader(E1_1, 7, 7, E1_1, E1_1), BatchHeader(E3_1, 8, 8, E1_1, E3_1))
    d.hear(1, Lead(E3_1, True, state(log)))
    d.confirm()
    assert sent(d.effects, Following) or d.node.role is Role.CATCH_UP
    assert d.node.role is Role.CATCH_UP


def test_what_was_applied_is_not_cut() -> None:
    """By the sets alone it might be: node 1 is in all of them."""
    d = Driver(2, log=LONGER, applied=6)
    d.meet(1, state(top=E2_1), leading=E2_1)
    d.hear(1, Lead(E2_1, True, leaders_log()))
    d.confirm()
    assert d.node.role is Role.DIVERGED


def test_the_sets_of_a_backup_that_comes_and_goes_do_not_pile_up() -> None:
    d = leader(sets_kept=3)
    for _ in range(20):
        d.lose(2)
        d.live(12.0)
        d.confirm()
        d.feed(PeerConnected(2))
        d.hear(2, Hello(Role.CATCH_UP, state(top=E2_1), 0, 0, True))
        d.hear(2, Following(E2_1, 5, False, state(top=E2_1)))
        d.feed(PeerAcked(2, d.node.log.end))
        d.confirm()
        d.feed(PeerAcked(2, d.node.log.end))
        assert d.node.log.members == BOTH
    assert [members for _, members in d.node.log.sets] == [ONE, BOTH, ONE, BOTH]


def test_names() -> None:
    node = Driver(1, size=3).node
    assert (node.name(3), node.name(9)) == ("e3", "node 9")


# ---- what a broker lacks, and versions -------------------------------------------------------------------------------

LACKS = "its broker has no vhost 'shop': rabbitmqctl add_vhost shop"


def test_a_node_whose_broker_lacks_something_tells_the_others() -> None:
    d = follower()
    assert [hello.lacks for hello in sent(d.feed(BrokerLacks(LACKS)), Hello)] == [LACKS]
    assert d.feed(BrokerLacks(LACKS)) == []
    assert [hello.lacks for hello in sent(d.feed(BrokerLacks("")), Hello)] == [""]


def test_a_node_whose_broker_lacks_something_is_promoted_with_force_only() -> None:
    d = follower()
    d.lose(1)
    d.feed(BrokerLacks(LACKS))
    refused = only(d.feed(PromoteRequest(frozenset({1}))), Answer)
    assert (refused.ok, LACKS in refused.text, "--force" in refused.text) == (False, True, True)
    assert "although" in only(d.feed(PromoteRequest(frozenset({1}), force=True, dry_run=True)), Answer).text
    d.feed(BrokerLacks(""))
    d.feed(PromoteRequest(frozenset({1})))
    assert d.node._candidate.epoch


@pytest.mark.parametrize("me", [1, 2], ids=["it led last", "it did not"])
def test_a_node_whose_broker_lacks_something_takes_no_epoch_by_itself(me: int) -> None:
    """But for the one that led last: its clients were served all the same."""
    d = Driver(me)
    d.feed(BrokerLacks(LACKS))
    d.meet(3 - me, state(LOG[:-1]))
    assert bool(d.node._candidate.epoch) is (me == 1)
    if me == 2:
        assert LACKS in d.node.reason
        d.feed(BrokerLacks(""))
        d.feed(Tick())
        assert d.node._candidate.epoch


def test_a_leader_hands_over_to_a_node_whose_broker_has_all() -> None:
    d = leader(size=3)
    for number in (2, 3):
        d.hear(number, Hello(Role.READY, state(top=E2_1), 0, E2_1, lacks=LACKS if number == 2 else ""))
    refused = only(d.feed(SwitchoverRequest(2)), Answer)
    assert (refused.ok, LACKS in refused.text) == (False, True)
    assert only(d.feed(SwitchoverRequest()), Answer).node == 3


def test_when_a_primary_was_last_heard_outlives_an_incarnation() -> None:
    """A backup whose incarnation had just ended was promoted with --force only, though nothing was missing."""
    batches = (*LOG, MARKER)

    def again(heard_before: tuple[int, float] | None) -> Answer:
        node = Node(NodeSettings(2, {1: "e1", 2: "e2"}), heard_before=heard_before)
        for batch in batches:
            node.read_batch(batch)
        node.handle(Opened(0, False), 100.0)
        answer: Answer = only(node.handle(PromoteRequest(frozenset({1}), dry_run=True), 100.0), Answer)
        return answer

    assert again((E2_1, 98.0)).ok
    assert "heard its primary 2.0 s ago" in again((E2_1, 98.0)).text
    assert not again(None).ok
    assert not again((E1_1, 98.0)).ok, "somebody has led since"


def test_when_a_primary_was_last_heard_outlives_an_incarnation_that_does_not_come_to_its_log() -> None:
    """It was forgotten where the broker let nobody in for a moment."""
    settings = NodeSettings(2, {1: "e1", 2: "e2"})
    assert Node(settings).heard is None
    node = Node(settings, heard_before=(E1_1, 98.0))
    assert node.heard == (E1_1, 98.0)
    for batch in (*LOG, MARKER):
        node.read_batch(batch)
    node.handle(Opened(0, False), 100.0)
    assert node.heard is None, "somebody has led since"
    d = follower()
    d.feed(PeerMessage(1, Heartbeat(d.node.leader_epoch, 5, 5, 0)))
    assert d.node.heard == (d.node.leader_epoch, d.now)


def test_a_promotion_says_what_the_broker_of_a_node_that_is_down_lacked() -> None:
    d = follower()
    d.hear(1, Hello(Role.ACTIVE, leaders_log(), d.node.leader_epoch, lacks=LACKS))
    d.lose(1)
    assert f"e1 said last: {LACKS}" in only(d.feed(PromoteRequest(frozenset({1}), dry_run=True)), Answer).text


def test_nodes_tell_each_other_their_version_and_the_keys_that_must_be_equal() -> None:
    node = Node(NodeSettings(2, {1: "e1", 2: "e2"}, software="0.2", shared=(("mode", '"strict"'),)))
    told = node.hello(wants_answer=False)
    assert (told.software, told.shared) == ("0.2", (("mode", '"strict"'),))


def test_what_a_lead_says_counts_when_it_is_on_record() -> None:
    """Until then a restart forgets that this node is out of the set."""
    d = Driver(2)
    d.meet(1)
    d.hear(1, Lead(E2_1, False, leaders_log()))
    assert d.node.last_heard_leader is None
    d.confirm()
    assert d.node.last_heard_leader is not None


def test_a_member_that_comes_and_goes_is_not_taken_out_before_it_is_heard_again() -> None:
    """It may have been promoted meanwhile, and what waits for it would be confirmed by a leader whose epoch is over."""
    d = leader()
    for _ in range(3):
        link_comes_and_goes(d, 6)
    d.feed(Append(1))
    d.confirm()
    d.live(1.0)
    d.feed(PeerDisconnected(2))
    assert d.node.log.members == BOTH
    assert Restart in kinds(d.meet(2, state(top=E3_2)))
    assert d.node.log.members == BOTH


def test_of_equal_logs_a_node_whose_broker_lacks_something_does_not_go_first() -> None:
    """Both had waited for it, as it has the lower id."""
    d = Driver(3, size=3, log=(BatchHeader(E1_1, 1, 1, 0, E1_1, ((1, frozenset({2, 3})),)),))
    mine = d.node.state()
    d.meet(1, LogState())
    d.meet(2, mine, lacks=LACKS)
    assert d.node._candidate.epoch
