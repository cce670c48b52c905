"""What the kills of `make bench` are judged by."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

KILLED, DELIVERED = 100.0, 103.0


@pytest.fixture
def failover(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return importlib.import_module("bench.failover")


def judged(failover: Any, acks: list[list[float]], again: list[float], left: list[int], came: int) -> tuple[dict[str, Any], bool]:
    """What became of ten messages, and whether the row is ok."""
    found = failover.accounts(10, {"acks": acks, "again": again}, {"seen": left, "came": came, "order_breaks": 0}, KILLED, DELIVERED)
    run = found | {"broker": "4.3", "backlog": 0, "promote_ms": 1.0, "delivery_ms": 1.0, "kill_ms": 1.0}
    return found, failover.summary("P5", [run]).ok


@pytest.mark.parametrize(
    ("acks", "again", "left", "came", "expected", "ok"),
    [
        ([[50.0, 1, 6]], [], [7, 10], 4, {}, True),
        ([[50.0, 1, 6]], [], [8, 10], 3, {"lost": 1, "missing": [7]}, False),
        ([[50.0, 1, 6]], [], [7, 10], 5, {"duplicated": 1}, False),
        # In flight at the kill: 5 and 6 come to the consumer once more, which acks them again; 4 waits for the drain.
        ([[50.0, 1, 3], [99.5, 4, 6], [103.5, 5, 6]], [99.5, 99.5], [4, 4, 7, 10], 5, {"acks_in_flight": 3}, True),
        # Long before the kill: to the consumer, and to the drain.
        ([[50.0, 1, 6], [103.5, 6, 6]], [50.0], [7, 10], 4, {"acks_lost": 1}, False),
        ([[50.0, 1, 6]], [], [5, 10], 6, {"acks_lost": 2}, False),
        # After the failover, whatever was in flight before.
        ([[50.0, 1, 5], [99.5, 6, 6], [103.5, 6, 6]], [99.5], [6, 10], 5, {"acks_lost": 1, "acks_in_flight": 1}, False),
    ],
)
def test_acks_are_judged_by_their_age(
    failover: Any, acks: list[list[float]], again: list[float], left: list[int], came: int, expected: dict[str, Any], ok: bool
) -> None:
    nothing = {"lost": 0, "missing": [], "duplicated": 0, "acks_lost": 0, "acks_in_flight": 0, "order_breaks": 0}
    assert judged(failover, acks, again, left, came) == (nothing | expected, ok)
