"""The filter under random histories of the two design models: kills, late bytes, lost acks; and a backup that applies late.

`OneNodeMachine` checks: no delivery after a safe DEQUEUE, no two copies out, each live message has a copy that counts.
`PairMachine` checks: no delivery on a finished line, no live line without a copy, on three routes whose dead letters meet.
The worlds are those of tests/scenarios/m2_sim.py, which raise `Violation`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))

from m2_sim import Copy, Dying, NotNow, OneNode, Pair

from lrq_ha.replication.delivery_filter import DeliveryFilter

pytestmark = pytest.mark.proves("G2", "G3", "queue: dead letters")

MESSAGES_MAX = 3
VISITS_MAX = 3


def records_are_current(known: DeliveryFilter) -> None:
    for target in known.queues():
        assert target.export() == target._as_record()


class OneNodeMachine(RuleBasedStateMachine):
    @initialize(forgets=st.booleans())
    def start(self, forgets: bool) -> None:
        self.node = OneNode()
        self.node.FORGETS = forgets  # as early as R9 allows, or never: both must hold

    def pick(self, data: st.DataObject, copies: list[Copy]) -> Copy:
        return data.draw(st.sampled_from(copies))

    @precondition(lambda self: self.node.up and len(self.node.log) < 2 * MESSAGES_MAX)
    @rule()
    def publish(self) -> None:
        if sum(kind == "E" for kind, _ in self.node.log) < MESSAGES_MAX:
            self.node.publish()

    @precondition(lambda self: self.node.up and self.node.sock)
    @rule()
    def land(self) -> None:
        self.node.land()

    @precondition(lambda self: self.node.up)
    @rule(acks_land=st.booleans())
    def kill(self, acks_land: bool) -> None:
        self.node.kill(acks_land)

    @precondition(lambda self: not self.node.up)
    @rule()
    def restart(self) -> None:
        self.node.restart()

    @precondition(lambda self: self.node.late)
    @rule(data=st.data())
    def late_lands(self, data: st.DataObject) -> None:
        self.node.late_lands(data.draw(st.integers(0, len(self.node.late) - 1)))

    @precondition(lambda self: self.node.late)
    @rule(data=st.data())
    def close_old(self, data: st.DataObject) -> None:
        self.node.close_old(data.draw(st.integers(0, len(self.node.late) - 1)))

    @precondition(lambda self: self.node.up)
    @rule()
    def write_record(self) -> None:
        self.node.write_record()

    @precondition(lambda self: self.node.up and any(not copy.out for copy in self.node.queue))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self.node.deliver(self.pick(data, [copy for copy in self.node.queue if not copy.out]))

    @precondition(lambda self: self.node.up and any(copy.out for copy in self.node.queue))
    @rule(data=st.data())
    def consumer_acks(self, data: st.DataObject) -> None:
        try:
            self.node.consumer_acks(self.pick(data, [copy for copy in self.node.queue if copy.out]))
        except NotNow:
            pass  # acked before; the broker has not taken it yet

    @precondition(lambda self: self.node.up and self.node.acks)
    @rule()
    def take_ack(self) -> None:
        self.node.take_ack()

    @invariant()
    def each_live_message_has_a_copy_that_counts(self) -> None:
        self.node.check()

    @invariant()
    def what_is_kept_for_the_record_is_so(self) -> None:
        if self.node.up:
            records_are_current(self.node.filter)

    @invariant()
    def r_is_behind_what_is_under_way(self) -> None:
        if self.node.up and self.node.sock:
            assert self.node.tracker.applied < min(map(self.node.seq, self.node.sock))


class PairMachine(RuleBasedStateMachine):
    @initialize(route=st.sampled_from(["q", "qr", "r", "d"]))
    def start(self, route: str) -> None:
        self.pair = Pair(route)

    def pick(self, data: st.DataObject, copies: list[Dying]) -> Dying:
        return data.draw(st.sampled_from(copies))

    @precondition(lambda self: not self.pair.promoted and self.pair.a)
    @rule(data=st.data(), what=st.sampled_from(["expires", "expires", "rejects", "acks"]))
    def primary(self, data: st.DataObject, what: str) -> None:
        copy = self.pick(data, self.pair.a)
        if what == "acks":
            self.pair.a_acks(copy)
        elif copy.visit < VISITS_MAX:
            (self.pair.a_expires if what == "expires" else self.pair.a_rejects)(copy)

    @precondition(lambda self: not self.pair.promoted)
    @rule()
    def primary_is_lost(self) -> None:
        self.pair.a_is_lost()

    @precondition(lambda self: self.pair.tracker.applied < len(self.pair.log))
    @rule()
    def backup_applies(self) -> None:
        self.pair.b_applies()

    @precondition(lambda self: self.pair.b)
    @rule(data=st.data())
    def backup_expires(self, data: st.DataObject) -> None:
        copy = self.pick(data, self.pair.b)
        if copy.visit < VISITS_MAX + 1:
            self.pair.b_expires(copy)

    @rule(data=st.data())
    def backup_is_handed_one(self, data: st.DataObject) -> None:
        if self.pair.b:
            self.pair.b_sees(self.pick(data, self.pair.b))

    @precondition(lambda self: not self.pair.door_open)
    @rule(queue=st.sampled_from("qdr"))
    def backup_sweeps(self, queue: str) -> None:
        self.pair.b_sweeps(queue)

    @precondition(lambda self: not self.pair.door_open)
    @rule()
    def backup_records(self) -> None:
        self.pair.b_records()

    @precondition(lambda self: not self.pair.door_open)
    @rule()
    def backup_restarts(self) -> None:
        self.pair.restart()

    @precondition(lambda self: self.pair.promoted and not self.pair.door_open and self.pair.tracker.applied == len(self.pair.log))
    @rule()
    def backup_opens_its_door(self) -> None:
        self.pair.b_opens()

    @invariant()
    def what_is_kept_for_the_record_is_so(self) -> None:
        records_are_current(self.pair.filter)

    @invariant()
    def no_live_line_without_a_copy(self) -> None:
        self.pair.check()


_SETTINGS = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)

TestOneNodeMachine = OneNodeMachine.TestCase
TestOneNodeMachine.settings = _SETTINGS
TestPairMachine = PairMachine.TestCase
TestPairMachine.settings = _SETTINGS
