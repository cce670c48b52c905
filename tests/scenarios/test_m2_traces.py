"""The traces that the design models found, replayed on the real classes: with every rule on, no violation; without the rule, the violation.

The traces are the models' own output. A generation n there is n + 1 here (the first OPEN is number 1). With the rules on, some
steps cannot happen (a copy that a trace delivers is acked away): they are passed over. In one trace the sweep comes before the
door opens, not after (a primary has no sweeper).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
from m2_sim import NotNow, OneNode, OneNodeWithWindows, Pair, Violation

from lrq_ha.replication.queue_filter import Verdict

pytestmark = pytest.mark.proves("G3", "queue: dead letters")

# ---- one node, killed (m2_filter.txt) ------------------------------------------------------------------------------


class AsAllowed(OneNode):
    """Every rule on, and pending operations forgotten as early as R9 allows."""

    FORGETS = True


class NoGenerations(OneNode):
    """Every copy counts; what keeps a second copy away is the pending DEQUEUE only."""

    COUNTS = False
    FORGETS = True


class NoGenerationsNeverForgets(OneNode):
    COUNTS = False


class WindowsForgottenAtOpen(OneNodeWithWindows):
    FORGET_AT_OPEN = True


class WindowsOfOwnStartOnly(OneNodeWithWindows):
    REBUILD = False


class GenerationsOfOwnStartOnly(AsAllowed):
    RECORD_HAS_GENERATIONS = False


class NumberedFromLateRecord(AsAllowed):
    NUMBERED_BY_OPENS = False


class RecordWithoutOperations(OneNode):
    RECORD_HAS_OPERATIONS = False


SECOND_COPY = """
    m0 in the log (safe), forwarded
    sidecar killed
    late copy of 0 (generation 0) lands
    restart, generation 1: R=0, publishes again [0]
    copy of 0 (generation 1) lands, confirmed
    {forgotten}
    copy of 0 (generation 0) delivered
    consumer acks 0: DEQUEUE safe, broker ack sent
    broker takes the ack of 0, a later reply shows it
    copy of 0 (generation 1) delivered
"""
ONE_NODE: list[tuple[str, type[OneNode], str, str]] = [
    ("pend only", NoGenerations, "G3", SECOND_COPY.format(forgotten="")),
    ("windows, forgotten when the door opens", WindowsForgottenAtOpen, "G3", SECOND_COPY.format(forgotten="")),
    (
        "windows, forgotten at an empty queue",
        OneNodeWithWindows,
        "G3",
        """
    m0 in the log (safe), forwarded
    sidecar killed
    restart, generation 1: R=0, publishes again [0]
    copy of 0 (generation 1) lands, confirmed
    copy of 0 (generation 1) delivered
    consumer acks 0: DEQUEUE safe, broker ack sent
    broker takes the ack of 0, a later reply shows it
    queue seen empty: windows forgotten
    late copy of 0 (generation 0) lands
    copy of 0 (generation 0) delivered
""",
    ),
    (
        "windows, forgotten when old connections are gone",
        OneNodeWithWindows,
        "G3",
        SECOND_COPY.format(forgotten="older connections gone: windows forgotten"),
    ),
    (
        "windows, a restart knows only its own",
        WindowsOfOwnStartOnly,
        "G3",
        """
    m0 in the log (safe), forwarded
    sidecar killed
    late copy of 0 (generation 0) lands
    restart, generation 1: R=0, publishes again [0]
    copy of 0 (generation 1) lands, confirmed
    records R=1 pend=[]
    sidecar killed
    restart, generation 2: R=1, publishes again []
    copy of 0 (generation 0) delivered
    consumer acks 0: DEQUEUE safe, broker ack sent
    broker takes the ack of 0, a later reply shows it
    copy of 0 (generation 1) delivered
""",
    ),
    (
        "generations, a restart knows only its own",
        GenerationsOfOwnStartOnly,
        "lost",
        """
    sidecar killed
    restart, generation 1: R=0, publishes again []
    m0 in the log (safe), forwarded
    copy of 0 (generation 1) lands, confirmed
    records R=1 pend=[]
    sidecar killed
    restart, generation 2: R=1, publishes again []
""",
    ),
    (
        "generations numbered from a record that is written late",
        NumberedFromLateRecord,
        "G3",
        """
    sidecar killed
    restart, generation 1: R=0, publishes again []
    m0 in the log (safe), forwarded
    sidecar killed
    late copy of 0 (generation 1) lands
    restart, generation 1: R=0, publishes again [0]
    copy of 0 (generation 1) lands, confirmed
    copy of 0 (generation 1) delivered
    consumer acks 0: DEQUEUE safe, broker ack sent
    broker takes the ack of 0, a later reply shows it
    copy of 0 (generation 1) delivered
""",
    ),
    (
        "generations, record without pend, R passes at the ack",
        RecordWithoutOperations,
        "G3",
        """
    m0 in the log (safe), forwarded
    copy of 0 (generation 0) lands, confirmed
    copy of 0 (generation 0) delivered
    consumer acks 0: DEQUEUE safe, broker ack sent
    records R=2
    sidecar killed
    restart, generation 1: R=2, publishes again []
    copy of 0 (generation 0) delivered
""",
    ),
    (
        "without generations two copies are out, whatever is remembered of dequeues",
        NoGenerationsNeverForgets,
        "G2",
        """
    m0 in the log (safe), forwarded
    sidecar killed
    late copy of 0 (generation 0) lands
    restart, generation 1: R=0, publishes again [0]
    copy of 0 (generation 1) lands, confirmed
    copy of 0 (generation 0) delivered
    copy of 0 (generation 1) delivered
""",
    ),
]


def acks(node: OneNode, number: int) -> None:
    for copy in node.queue:
        if copy.out and copy.number == number:
            node.consumer_acks(copy)
            return
    raise NotNow


def deliver(node: OneNode, number: int, generation: int) -> None:
    if node.deliver(node.find(number, generation + 1)) is not Verdict.GIVE:
        raise NotNow


def restart(node: OneNode, applied: int, again: str) -> None:
    published = node.restart()
    assert node.record.applied == applied
    assert str(published) == again


ONE_NODE_STEPS: list[tuple[str, Callable[..., None]]] = [
    (r"m\d+ in the log \(safe\), forwarded", lambda node: node.publish()),
    (r"sidecar killed", lambda node: node.kill()),
    (r"late copy of \d+ \(generation \d+\) lands", lambda node: node.late_lands()),
    (r"restart, generation \d+: R=(\d+), publishes again (.*)", lambda node, r, again: restart(node, int(r), again)),
    (r"copy of \d+ \(generation \d+\) lands, confirmed", lambda node: node.land()),
    (r"copy of (\d+) \(generation (\d+)\) delivered", lambda node, n, g: deliver(node, int(n), int(g))),
    (r"consumer acks (\d+): DEQUEUE safe, broker ack sent", lambda node, n: acks(node, int(n))),
    (r"broker takes the ack of \d+, a later reply shows it", lambda node: node.take_ack()),
    (r"records R=\d+.*", lambda node: node.write_record()),
    (r".*windows forgotten", lambda node: node.forget_windows() if isinstance(node, OneNodeWithWindows) else None),
]

# ---- primary and backup (m2_moves.txt) -----------------------------------------------------------------------------


class MovedNotLogged(Pair):
    MOVED_IS_LOGGED = False


class DoorAcksRejected(Pair):
    REJECTS_AT_THE_DOOR = False


class PathVoidsNothing(Pair):
    PATH_VOIDS = False


class ForgetsAfterAPass(Pair):
    KEEPS_AFTER_A_PASS = False


class SkipsAnyRoute(Pair):
    SKIPS_ONE_ROUTE_ONLY = False


class PairRecordWithoutOperations(Pair):
    RECORD_HAS_OPERATIONS = False


class CyclesByExpiryDie(Pair):
    CYCLES_BY_EXPIRY_LIVE = False


PAIR: list[tuple[str, type[Pair], str, str, str]] = [
    (
        "MOVED is not logged",
        MovedNotLogged,
        "q",
        "G3",
        """
    A: expires in q
    B applies the entry to q
    A: consumer acks at d, visit 0: [('D', 'd', 0)]
    A is lost, B takes over
    B notes ('D', 'd', 0)
    B opens its door
    B delivers the copy in q, visit 0
""",
    ),
    (
        "the filter acks away a copy with a pending REJECT",
        DoorAcksRejected,
        "q",
        "lost",
        """
    A: consumer rejects at q, visit 0: [('R', 'q', 0)]
    A is lost, B takes over
    B applies the entry to q
    B notes ('R', 'q', 0)
    B opens its door
    B door: copy in q, visit 0, generation 0, acked away
""",
    ),
    (
        "x-death does not void descendants",
        PathVoidsNothing,
        "q",
        "G3",
        """
    B applies the entry to q
    A: consumer acks at q, visit 0: [('D', 'q', 0)]
    A is lost, B takes over
    B notes ('D', 'q', 0)
    B opens its door
    B: expires in q, visit 0
    B delivers the copy in d, visit 0
""",
    ),
    (
        "a pending operation is forgotten after a full pass",
        ForgetsAfterAPass,
        "q",
        "G3",
        """
    B applies the entry to q
    A: consumer acks at q, visit 0: [('D', 'q', 0)]
    A is lost, B takes over
    B notes ('D', 'q', 0)
    B: expires in q, visit 0
    B forgets ('D', 'q', 0), not found
    B opens its door
    B delivers the copy in d, visit 0
""",
    ),
    (
        "skipped although routed to two queues",
        SkipsAnyRoute,
        "qr",
        "lost",
        """
    A: consumer acks at q, visit 0: [('D', 'q', 0)]
    A is lost, B takes over
    B skips the entry: dequeued meanwhile
    B notes ('D', 'q', 0)
    B opens its door
""",
    ),
    (
        "record without pend",
        PairRecordWithoutOperations,
        "q",
        "G3",
        """
    B applies the entry to q
    A: consumer acks at q, visit 0: [('D', 'q', 0)]
    A is lost, B takes over
    B notes ('D', 'q', 0)
    B records R=2
    sidecar B restarts
    B opens its door
    B delivers the copy in q, visit 0
""",
    ),
]

BROKER_DROPS = """
    A: consumer rejects at q, visit 0: [('R', 'q', 0)]
    A is lost, B takes over
    B applies the entry to q
    B notes ('R', 'q', 0)
    B opens its door
    B: expires in q, visit 0
    B: expires in d, visit 0
"""


def at(copies: list, queue: str):  # type: ignore[no-untyped-def, type-arg]
    for copy in copies:
        if copy.queue == queue:
            return copy
    raise NotNow


def handed_out(pair: Pair, queue: str, expected: Verdict) -> None:
    if pair.b_sees(at(pair.b, queue)) is not expected:
        raise NotNow


PAIR_STEPS: list[tuple[str, Callable[..., object]]] = [
    (r"A: expires in (.)", lambda pair, queue: pair.a_expires(at(pair.a, queue))),
    (r"A: consumer acks at (.), visit .*", lambda pair, queue: pair.a_acks(at(pair.a, queue))),
    (r"A: consumer rejects at (.), visit .*", lambda pair, queue: pair.a_rejects(at(pair.a, queue))),
    (r"A is lost, B takes over", lambda pair: pair.a_is_lost()),
    (r"B (?:applies|skips) the entry.*", lambda pair: pair.b_applies()),
    (r"B notes .*", lambda pair: pair.b_applies()),
    (r"B: expires in (.), visit \d", lambda pair, queue: pair.b_expires(at(pair.b, queue))),
    (r"B forgets \('.', '(.)', .*", lambda pair, queue: pair.b_sweeps(queue)),
    (r"B records .*", lambda pair: pair.b_records()),
    (r"sidecar B restarts", lambda pair: pair.restart()),
    (r"B opens its door", lambda pair: pair.b_opens()),
    (r"B door: copy in (.), .*, acked away", lambda pair, queue: handed_out(pair, queue, Verdict.ACK)),
    (r"B delivers the copy in (.), visit \d", lambda pair, queue: handed_out(pair, queue, Verdict.GIVE)),
]

# ---- both ----------------------------------------------------------------------------------------------------------


def replay(world: OneNode | Pair, steps: Sequence[tuple[str, Callable[..., object]]], trace: str, *, strict: bool) -> None:
    """Does what the lines of a trace say. `strict`: every line must be possible."""
    for line in filter(None, map(str.strip, trace.splitlines())):
        act, match = next((act, match) for pattern, act in steps if (match := re.fullmatch(pattern, line)))
        try:
            act(world, *match.groups())
        except NotNow:
            assert not strict, f"not possible: {line}"
        world.check()


def finish(pair: Pair) -> None:
    """B applies the rest, opens its door and hands out every copy until nothing moves."""
    if not pair.promoted:
        pair.a_is_lost()
    while pair.tracker.applied < len(pair.log):
        pair.b_applies()
    if not pair.door_open:
        pair.b_opens()
    for _ in range(10):
        for copy in list(pair.b):
            pair.b_sees(copy)
            pair.check()


@pytest.mark.parametrize(("name", "off", "violation", "trace"), ONE_NODE, ids=[case[0] for case in ONE_NODE])
class TestOneNode:
    def test_rule_on(self, name: str, off: type[OneNode], violation: str, trace: str) -> None:
        for rules in (OneNode, AsAllowed):
            replay(rules(), ONE_NODE_STEPS, trace, strict=False)

    def test_rule_off(self, name: str, off: type[OneNode], violation: str, trace: str) -> None:
        with pytest.raises(Violation, match=violation):
            replay(off(), ONE_NODE_STEPS, trace, strict=True)


@pytest.mark.parametrize(("name", "off", "route", "violation", "trace"), PAIR, ids=[case[0] for case in PAIR])
class TestPair:
    def test_rule_on(self, name: str, off: type[Pair], route: str, violation: str, trace: str) -> None:
        pair = Pair(route)
        replay(pair, PAIR_STEPS, trace, strict=False)
        finish(pair)

    def test_rule_off(self, name: str, off: type[Pair], route: str, violation: str, trace: str) -> None:
        with pytest.raises(Violation, match=violation):
            replay(off(route), PAIR_STEPS, trace, strict=True)


@pytest.mark.proves("limit: cycle by expiry")
def test_a_cycle_by_expiry_alone_that_the_broker_drops_is_lost() -> None:
    """No rule of ours helps where RabbitMQ itself drops a message that expiry alone brings round: the operator is warned of such a topology."""
    pair = Pair()
    replay(pair, PAIR_STEPS, BROKER_DROPS, strict=True)
    finish(pair)
    with pytest.raises(Violation, match="lost"):
        replay(CyclesByExpiryDie(), PAIR_STEPS, BROKER_DROPS, strict=True)


def test_dead_letters_of_two_queues_that_meet_in_one_are_two_messages() -> None:
    """q and r both dead-letter into d: acknowledging one copy there must not take the other. (Not in the design models.)"""
    pair = Pair("qr")
    pair.b_applies()
    for queue in "qr":
        pair.a_rejects(at(pair.a, queue))
    first, second = pair.a
    assert first.queue == second.queue == "d"
    pair.a_acks(first)
    finish(pair)
    assert [(copy.queue, copy.line) for copy in pair.b] == [("d", second.line)]
