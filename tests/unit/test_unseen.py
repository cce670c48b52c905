"""What a queue may hold unseen, as its declaration says."""

from __future__ import annotations

import math

import pytest

from broker_plugin.amqp.declarations import LATE_S, held_back_s, keeps_dead_letters


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        ({}, 0.0),
        ({"x-delayed-retry-min": 5_000}, 0.0),
        ({"x-delayed-retry-type": "disabled", "x-delayed-retry-min": 5_000}, 0.0),
        ({"x-delayed-retry-type": "all", "x-delayed-retry-min": 5_000}, 5.0 + LATE_S),
        ({"x-delayed-retry-type": "failed", "x-delayed-retry-min": 5_000, "x-delayed-retry-max": 60_000}, 60.0 + LATE_S),
        ({"x-delayed-retry-type": "returned", "x-delayed-retry-max": 60_000}, 60.0 + LATE_S),
        ({"x-delayed-retry-type": "all"}, math.inf),
    ],
)
def test_how_long_a_queue_holds_back(arguments: dict[str, object], seconds: float) -> None:
    assert held_back_s(arguments) == seconds


def test_which_queues_keep_dead_letters() -> None:
    assert keeps_dead_letters({"x-dead-letter-strategy": "at-least-once"})
    assert not keeps_dead_letters({"x-dead-letter-strategy": "at-most-once"})
    assert not keeps_dead_letters({})
