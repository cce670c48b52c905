"""Random lives of groups that etcd coordinates, without an operator. (test_rules.py runs one without each rule of coordination.)

LRQ_SEEDS=N runs more lives; a failure names its seed.
"""

from __future__ import annotations

import os

import pytest
import registered

pytestmark = pytest.mark.proves("G1", "G5", "coordination")

SEEDS = int(os.environ.get("LRQ_SEEDS", "1000")) // 20
SEEDS_PER_TEST = 10


@pytest.mark.full(only=r"[1-9]0\]")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
def test_life_without_an_operator(first: int) -> None:
    for seed in range(first, min(first + SEEDS_PER_TEST, SEEDS)):
        registered.run(seed)
