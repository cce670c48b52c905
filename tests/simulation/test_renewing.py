"""A renewal with clients going on (R17), from seeds; and what goes wrong without each part of its rules. LRQ_SEEDS=N runs more of them."""

from __future__ import annotations

import os

import pytest
import renewing

pytestmark = pytest.mark.proves("renewal")

SEEDS = int(os.environ.get("LRQ_SEEDS", "1000"))
FAIL_WITHIN = 600

OFF = (
    "publishes do not wait",
    "consumers go on",
    "what is held is not awaited",
    "a later mark",
    "only what is old is moved",
    "one look is enough",
    "a queue that is half done is open",
)


@pytest.mark.timeout(0)
def test_lives() -> None:
    lives = renewing.run_all(range(SEEDS))
    assert sum(life.crashes for life in lives) > SEEDS // 20, "some of them are killed"
    assert sum(life.promotions for life in lives) > SEEDS // 60, "some of those are not the ones that go on"


@pytest.mark.parametrize("off", OFF)
def test_each_part_is_needed(off: str) -> None:
    with pytest.raises(renewing.Wrong):
        renewing.run_all(range(FAIL_WITHIN), off)
