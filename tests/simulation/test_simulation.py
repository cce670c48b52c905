"""Random lives under faults: of the log alone, and of the whole. LRQ_SEEDS=N runs more of them; a failure names its seed and how to replay it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import chaos
import life
import pytest
from cluster import Violation
from rules_off import rule_off

pytestmark = pytest.mark.proves(
    "G1", "G2", "G3", "G4", "G5", "strict", "promotion", "expected-backups", "local-completion", "in-doubt", "queue: rejected before a failover",
)

SEEDS = int(os.environ.get("LRQ_SEEDS", "1000"))
LOG_SHARE = 10  # one life of the log for so many of the whole
SEEDS_PER_TEST = 50


@pytest.mark.full(only=r"(50|[1345789]00)\]")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
def test_life(first: int) -> None:
    for seed in range(first, min(first + SEEDS_PER_TEST, SEEDS)):
        life.run(seed)


@pytest.mark.full(only=r"50\]")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(0, SEEDS // LOG_SHARE, SEEDS_PER_TEST))
def test_life_of_the_log(first: int) -> None:
    for seed in range(first, min(first + SEEDS_PER_TEST, SEEDS // LOG_SHARE)):
        chaos.run(seed)


@pytest.mark.parametrize(("run", "part", "seed"), [(chaos.run, "a push is acknowledged when it is accepted", 1), (life.run, "every copy counts", 3)])
def test_seed_replays_exactly(run: Callable[..., object], part: str, seed: int) -> None:
    def violation() -> str:
        with rule_off(part) as options, pytest.raises(Violation) as caught:
            run(seed, **options)
        return str(caught.value)

    assert violation() == violation()


@pytest.mark.parametrize("seed", [653, 687])
def test_seed_replays_in_another_process(seed: int) -> None:
    def told(hash_seed: str) -> str:
        command = [sys.executable, life.__file__, str(seed)]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    first = told("0")
    assert first.count("\n") > 100
    assert without_sets(first) == without_sets(told("1"))


def without_sets(text: str) -> str:
    """Sets are printed in the order of their hashes."""
    return re.sub(r"frozenset\(\{[^}]*\}\)", "", text)
