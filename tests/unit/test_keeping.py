"""How much the Keeper takes of a quorum queue, by what its broker answers. What becomes of order then: tests/integration/test_applier.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker_plugin.amqp import requeue
from broker_plugin.amqp.connection import Address
from broker_plugin.amqp.requeue import WIDE_WINDOW_MESSAGES, RequeueDepths
from broker_plugin.log.replica import Replica
from broker_plugin.sweep.keepalive import QueueKeepAlive

KEY = ("/", "q")
ARGUMENTS = {"x-queue-type": "quorum", "x-expires": 1_000}


class Broker:
    """A queue of so many messages; `answers`: lengths that the broker tells first. `silent`: it goes on saying 0.

    Attributes:
        windows: Of its consumers.
        counted: Of how many messages it has counted a delivery.
    """

    def __init__(self, messages: int, *answers: int, version: str = "4.3.0", silent: bool = False) -> None:
        self.messages, self.answers, self.silent = messages, list(answers), silent
        self.windows: list[int] = []
        self.counted = 0
        self.server_properties = {"version": version}
        self.error = None
        self.held = 0

    async def connection(self, _vhost: str) -> Any:
        return self

    async def channel(self) -> Any:
        return self

    async def queue_declare(self, _queue: str, passive: bool) -> tuple[str, int, int]:
        assert passive
        if self.answers or self.silent:
            return "q", self.answers.pop(0) if self.answers else 0, 0
        return "q", self.messages - self.held, 1

    async def qos(self, window: int) -> None:
        self.windows.append(window)

    async def consume(self, _queue: str, take: Callable[..., object], *, idle: bool = False) -> str:
        self.held = 0 if idle else min(self.windows[-1], self.messages)
        for tag in range(1, self.held + 1):
            take(tag, False)
        return "c"

    async def cancel(self, _tag: str) -> None: ...

    def nack(self, *_: object, **__: object) -> None:
        self.held = 0

    async def flow(self) -> None: ...

    async def close(self) -> None:
        self.counted += self.held
        self.held = 0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requeue, "QUIET_S", 0.0)


def used(broker: Broker, given_back: RequeueDepths, times: int = 3, **more: object) -> list[int]:
    """The windows of so many uses. `more`: arguments of the queue."""

    async def go() -> None:
        keeper = QueueKeepAlive(cast(Replica, SimpleNamespace()), Address.parse("amqp://a:b@127.0.0.1:1"), given_back)
        cast(Any, keeper)._vhosts = broker
        for _ in range(times):
            await keeper._use(KEY, ARGUMENTS | more)

    asyncio.run(go())
    return broker.windows


def test_what_was_given_back_before_it_began_is_not_known() -> None:
    assert used(Broker(5_000), RequeueDepths()) == [WIDE_WINDOW_MESSAGES] * 3
    assert used(Broker(300), RequeueDepths()) == [300] * 3


def test_of_what_was_never_given_back_it_takes_one() -> None:
    given_back = RequeueDepths()
    given_back.note(KEY, 0)
    assert used(Broker(5_000), given_back) == [1] * 3


def test_a_queue_that_does_not_answer_looks_like_an_empty_one() -> None:
    """Nothing less is taken for that, nor the next time: the head of the queue went behind the rest, and its next sweep made it worse."""
    given_back = RequeueDepths()
    given_back.note(KEY, 1_200)
    assert used(Broker(5_000, 0), given_back) == [1_200] * 3

    given_back.note(KEY, 1_200)
    silent = Broker(0, *[0] * 20)
    used(silent, given_back)
    assert used(Broker(5_000), given_back) == [1_200] * 3, "while it does not answer, nothing is known of it"


@pytest.mark.parametrize("messages", [(5_000, 0), (5_000,), (0,)], ids=["silent", "full", "empty"])
def test_where_giving_back_uses_up_a_limit_it_takes_nothing(messages: tuple[int, ...]) -> None:
    """A queue that does not answer looks like an empty one, and how much it had been given back was not known: so much was taken."""
    broker = Broker(*messages, version="3.10.8")
    assert len(used(broker, RequeueDepths(), **{"x-delivery-limit": 3})) == 3, "it came each time"
    assert broker.counted == 0
