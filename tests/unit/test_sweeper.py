"""Which queues the sweeper looks at, and when. What it does there: tests/integration/test_applier.py."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from broker_plugin.client import Address
from broker_plugin.replica import Replica
from broker_plugin.sweeper import Sweeper

DUE, IDLE, SUSPECT, NAMED = [("/", name) for name in ("due", "idle", "suspect", "named")]


class Filter:
    """What is due in two queues; counts who goes through all of them."""

    def __init__(self) -> None:
        self.times = 0

    def queues(self) -> Iterator[Any]:
        self.times += 1
        return iter(SimpleNamespace(key=key, due=lambda _upto, due=due: due, has_due=bool(due)) for key, due in ((DUE, 1), (IDLE, 0)))


def test_that_some_queue_is_full_may_be_said_of_each_message() -> None:
    """As the broker refuses each of those that are on their way through an exchange."""
    known = Filter()
    index = SimpleNamespace(filter=known, tallies=SimpleNamespace(keys=list))
    sweeper = Sweeper(cast(Replica, SimpleNamespace(index=index)), Address.parse("amqp://a:b@127.0.0.1:1"))
    sweeper.suspect([SUSPECT], 1)
    for _ in range(4_000):
        sweeper.kick(None)
    sweeper.kick(NAMED)
    found = sweeper._round()
    assert {next(found) for _ in range(3)} == {(DUE, True), (SUSPECT, True), (NAMED, True)}
    assert list(found) == [(SUSPECT, False)]
    assert known.times <= 3, "4,000 times through all queues"
