"""Random lives of a group under faults. LRQ_SEEDS=N runs more of them; a failure names its seed and how to replay it."""

from __future__ import annotations

import os

import pytest
from chaos import run
from cluster import Violation
from rules_off import rule_off

SEEDS = int(os.environ.get("LRQ_SEEDS", "200"))
SEEDS_PER_TEST = 20


@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
def test_life(first: int) -> None:
    for seed in range(first, min(first + SEEDS_PER_TEST, SEEDS)):
        run(seed)


def lives_without(rule: str, seeds: int) -> None:
    with rule_off(rule) as options:
        for seed in range(seeds):
            run(seed, **options)


# The other rules need rarer chains of events: tests/scenarios/test_m1_traces.py has them.
@pytest.mark.parametrize(
    "rule",
    [
        "push acknowledged at accept",
        "promise raises top only when FENCE is confirmed",
        "older exchange not deleted at a start",
        "leader restarts alone",
        "leader restarts when its own set answers",
        "restarts by itself although a second history answers",
        "tail always cut",
        "FENCE does not tell a node that it is out",
    ],
)
def test_life_without_a_rule(rule: str) -> None:
    with pytest.raises(Violation):
        lives_without(rule, 200)


def test_seed_replays_exactly() -> None:
    def violation() -> str:
        with pytest.raises(Violation) as caught:
            lives_without("leader restarts when its own set answers", 50)
        return str(caught.value)

    assert violation() == violation()
