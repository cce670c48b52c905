"""Which queues the sweeper looks at, and when. What it does there: tests/integration/test_applier.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pamqp import commands
from test_keeping import KEY, Broker

from broker_plugin import building
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


@pytest.mark.parametrize(
    ("messages", "silent", "version", "expected"),
    [
        ((50,), True, "3.10.8", None),
        ((50, 0), False, "3.10.8", None),
        ((0,), False, "3.10.8", True),
        ((2,), False, "3.10.8", True),
        ((3,), False, "3.10.8", False),
        ((50,), True, "4.3.0", True),
    ],
    ids=["silent", "silent once", "empty", "all of it is due", "not all", "gives back for nothing"],
)
def test_where_giving_back_uses_up_a_limit(messages: tuple[int, ...], silent: bool, version: str, expected: bool | None) -> None:
    """A queue is gone through only if nothing in it would have to go back. One that does not answer looks like an empty one."""

    broker = Broker(*messages, silent=silent, version=version)

    async def go() -> bool | None:
        declares = building.encode_method(commands.Queue.Declare(queue="q", arguments={"x-queue-type": "quorum", "x-delivery-limit": 3}))
        replica = SimpleNamespace(declared=SimpleNamespace(declarations={KEY: declares}))
        sweeper = Sweeper(cast(Replica, replica), Address.parse("amqp://a:b@127.0.0.1:1"))
        cast(Any, sweeper)._vhosts = broker
        target = SimpleNamespace(key=KEY, due=lambda _upto: 2)
        return await sweeper._is_worth_it(cast(Any, target), 9, False, None)

    assert asyncio.run(go()) is expected
    assert broker.counted == 0


@pytest.mark.parametrize(("messages", "silent", "given_up"), [((50,), True, False), ((50, 0), False, False), ((3,), False, True)])
def test_a_queue_that_does_not_answer_now_is_not_given_up(messages: tuple[int, ...], silent: bool, given_up: bool) -> None:
    """A declaration waits for what was rejected from it, and a promotion, too."""
    declares = building.encode_method(commands.Queue.Declare(queue="q", arguments={"x-queue-type": "quorum", "x-delivery-limit": 3}))
    done: list[Any] = []
    tallies = SimpleNamespace(pending=lambda *_: "tally", done=lambda *tally: done.append(tally))
    replica = SimpleNamespace(
        declared=SimpleNamespace(declarations={KEY: declares}),
        progress=SimpleNamespace(parked=(), tracker=SimpleNamespace(applied=9)),
        index=SimpleNamespace(tallies=tallies),
    )

    async def go() -> Sweeper:
        sweeper = Sweeper(cast(Replica, replica), Address.parse("amqp://a:b@127.0.0.1:1"))
        cast(Any, sweeper)._vhosts = Broker(*messages, silent=silent, version="3.10.8")
        await sweeper._consider(cast(Any, SimpleNamespace(key=KEY, due=lambda _upto: 2)), True)
        return sweeper

    sweeper = asyncio.run(go())
    assert (sweeper.given_up_at(KEY) > 0) is given_up
    assert (KEY in sweeper._back_off) is not given_up
    assert bool(done) is given_up
