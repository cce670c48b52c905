"""How far a backup's queues may be behind the log."""

from __future__ import annotations

import math

import pytest

from lrq_ha.sidecar.peers.pace import ENTRIES_MIN, GAP_S, LEARNS_FOR_S, MEMORY_S, SHARE, Pace

TICK_S = 1 / 64  # exact, as a sum of them is
HOLDS_FOR_S = 1.0


class Queues:
    """A backup that is brought `arrives_per_s` entries, unless it holds them back, and writes `per_s`."""

    def __init__(self, lag_s: float, per_s: float) -> None:
        self.pace = Pace(lag_s, HOLDS_FOR_S)
        self.per_s = per_s
        self.now = 1_000.0
        self.log = self.reached = 0.0
        self.held_s = self.longest_s = self.waited_s = 0.0
        self.taken_at = self.now
        self.most = 0

    @property
    def overdue(self) -> int:
        return int(self.log - self.reached)

    def go_on(self, seconds: float, arrives_per_s: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.reached = min(self.log, self.reached + self.per_s * TICK_S)
            if self.pace.look(self.now, int(self.reached), int(self.log), self.overdue, self.waited_s):
                self.held_s += TICK_S
                self.longest_s = max(self.longest_s, self.now - self.taken_at)
            else:
                self.taken_at = self.now
                self.log += arrives_per_s * TICK_S
            self.most = max(self.most, self.overdue)


@pytest.mark.parametrize("per_s", [4_000, 10_000, 40_000])
@pytest.mark.parametrize("lag_s", [0.25, 1.0])
def test_what_is_behind_is_written_in_time(per_s: int, lag_s: float) -> None:
    queues = Queues(lag_s, per_s)
    queues.go_on(LEARNS_FOR_S + 5, 3 * per_s)
    queues.most = 0
    queues.go_on(30, 3 * per_s)
    assert queues.most / per_s <= lag_s + 6 * TICK_S
    assert queues.overdue >= 0.5 * per_s * lag_s, "and no less than may be: its broker is never idle"
    assert queues.reached >= 30 * per_s


def test_one_that_is_far_behind_catches_up_and_publishers_go_on() -> None:
    """One that has just come into the set may have the log, and minutes of work: publishers were read twice a second until that was done."""
    queues = Queues(0.25, 10_000)
    queues.log = 300_000
    queues.go_on(10, 20_000)
    assert queues.log - 300_000 == pytest.approx(10 * SHARE * 10_000, rel=0.15)
    queues.go_on(120, 20_000)
    assert queues.overdue <= 1.2 * 2_500


def test_what_arrives_more_slowly_than_it_is_written_says_nothing_of_the_pace() -> None:
    queues = Queues(0.25, 40_000)
    queues.go_on(30, 300)
    assert queues.pace.limit == 0
    queues.go_on(LEARNS_FOR_S + 5, 80_000)
    limit = queues.pace.limit
    assert limit == pytest.approx(10_000, rel=0.2)
    queues.go_on(30, 300)
    assert queues.pace.limit == pytest.approx(limit, rel=0.2)
    assert queues.held_s < 4


def test_a_broker_that_is_slower_than_before_is_noticed() -> None:
    queues = Queues(0.25, 40_000)
    queues.go_on(10, 80_000)
    queues.per_s = 4_000
    queues.go_on(5 * MEMORY_S + 15, 80_000)
    assert queues.pace.limit == pytest.approx(1_000, rel=0.2)
    assert queues.overdue <= 2 * 1_000


def test_the_first_entries_are_never_too_many() -> None:
    queues = Queues(0.25, 10.0)
    queues.go_on(60, 400)
    assert queues.pace.limit == ENTRIES_MIN
    assert queues.held_s == 0.0, "nor as many each second"


def test_a_broker_that_stands_still_slows_publishers_and_does_not_stop_them() -> None:
    """Its primary would take it for one that makes no progress, and out of the set. (A push may be so large that it is held for that alone.)"""
    for arrives_per_s in (10_000, 1_000_000):
        queues = Queues(0.25, 0.0)
        queues.go_on(10, arrives_per_s)
        for _ in range(8):
            before = queues.log
            queues.go_on(2 * HOLDS_FOR_S, arrives_per_s)
            assert before < queues.log <= before + arrives_per_s * 2 * HOLDS_FOR_S / 9


def test_a_log_that_was_cut_teaches_nothing() -> None:
    pace = Pace(0.25, HOLDS_FOR_S)
    pace.look(1.0, 1_000, 2_000, 600)
    pace.look(2.0, 100, 2_000, 600)
    assert pace.limit == 0
    pace.look(2.0, 100, 2_000, 600)
    assert pace.limit == 0
    pace.look(3.0, 8_100, 9_000, 600)
    assert pace.limit == 2_000
    assert math.isclose(pace.limit, 8_000 * 0.25)


def test_nor_does_a_time_in_which_nobody_looked() -> None:
    """There was nothing to write: the limit fell to its least with every pause of the publishers."""
    pace = Pace(0.25, HOLDS_FOR_S)
    pace.look(1.0, 0, 10_000, 600)
    pace.look(2.0, 8_000, 10_000, 600)
    pace.look(2.0 + GAP_S + 60, 10_000, 20_000, 600)
    assert pace.limit == 2_000


@pytest.mark.parametrize("holds_for_s", [0.25, 1.0, 10.0])
def test_nothing_is_held_for_longer_than_its_primary_waits(holds_for_s: float) -> None:
    """A backup was taken out of the set, came back as nobody held it there, was held, and was taken out again."""
    queues = Queues(0.25, 1_000)
    queues.pace = Pace(0.25, holds_for_s)
    queues.go_on(60, 1_000_000)
    assert holds_for_s - TICK_S <= queues.longest_s <= holds_for_s + 2 * TICK_S


def test_what_the_applier_waits_for_is_not_its_brokers_pace() -> None:
    """A hundred declarations, each of which waits for a sweeper for a moment: publishers were held to a few hundred a second for a while after."""
    queues = Queues(0.25, 8_000)
    queues.go_on(LEARNS_FOR_S + 5, 16_000)
    limit = queues.pace.limit
    for _ in range(100):
        queues.per_s = 0
        for _ in range(8):
            queues.waited_s += TICK_S
            queues.go_on(TICK_S, 8_000)
        queues.per_s = 8_000
        queues.go_on(TICK_S, 8_000)
    assert queues.pace.limit == pytest.approx(limit, rel=0.2)
