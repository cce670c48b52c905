"""Which queues the sweeper looks at, and when. What it does there: tests/integration/test_applier.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pamqp import commands
from test_keeping import KEY, Broker

from broker_plugin.amqp import content_header, encode
from broker_plugin.amqp.connection import Address
from broker_plugin.log import stamps
from broker_plugin.log.replica import Entry, Replica
from broker_plugin.log.tally import Tally
from broker_plugin.sweep.sweep_pass import End, SweepPass
from broker_plugin.sweep.sweeper import Sweeper
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import Generations
from lrq_ha.replication.delivery_filter import DeliveryFilter
from lrq_ha.replication.due_copies import DueCopies
from lrq_ha.replication.levels import Levels
from lrq_ha.replication.node import Node
from lrq_ha.replication.positions import RangeSet
from lrq_ha.replication.queue_filter import Kind
from lrq_ha.replication.settings import NodeSettings

pytestmark = pytest.mark.proves("limit: delivery limit on 3.x")

DUE, IDLE, SUSPECT, NAMED = [("/", name) for name in ("due", "idle", "suspect", "named")]


def due_copies(count: int) -> DueCopies:
    """The due copies of a queue: the entries from 1 on."""
    made = DueCopies(DeliveryFilter(Generations()))
    made.sequences.add_range(1, count + 1)
    return made


class Filter:
    """What is due in two queues; counts who goes through all of them."""

    def __init__(self) -> None:
        self.times = 0

    def queues(self) -> Iterator[Any]:
        self.times += 1
        return iter(SimpleNamespace(key=key, due=due_copies(due)) for key, due in ((DUE, 1), (IDLE, 0)))


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


def test_one_queue_that_is_kicked_all_the_time_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full one is, at each of the lane's tries, and a pass may take longer: nothing that was consumed from another was removed any more."""
    now = [0.0]
    monkeypatch.setattr("broker_plugin.sweep.sweeper.time.monotonic", lambda: now[0])
    due: set[tuple[str, str]] = set()

    def queues() -> Iterator[Any]:
        return iter(SimpleNamespace(key=key, due=due_copies(key in due)) for key in (DUE, IDLE))

    index = SimpleNamespace(filter=SimpleNamespace(queues=queues), tallies=SimpleNamespace(keys=list))
    sweeper = Sweeper(cast(Replica, SimpleNamespace(index=index)), Address.parse("amqp://a:b@127.0.0.1:1"), interval_s=1.0)
    looked = []
    sweeper.kick(NAMED)
    for key, _ in sweeper._round():
        looked.append(key)
        due.discard(key)
        if len(looked) == 3:
            due.add(DUE)
        if len(looked) == 20:
            break
        now[0] += 0.3
        sweeper.kick(NAMED)
    assert set(looked) == {NAMED, DUE}
    assert looked.index(DUE) <= 3 + 4 + 1, "within the interval"


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
        declares = encode.encode_method(commands.Queue.Declare(queue="q", arguments={"x-queue-type": "quorum", "x-delivery-limit": 3}))
        replica = SimpleNamespace(declared=SimpleNamespace(declarations={KEY: declares}), progress=SimpleNamespace(parked=()))
        sweeper = Sweeper(cast(Replica, replica), Address.parse("amqp://a:b@127.0.0.1:1"))
        cast(Any, sweeper)._vhosts = broker
        target = SimpleNamespace(key=KEY, due=due_copies(2))
        return await sweeper._is_worth_it(cast(Any, target), 9, False, None)

    assert asyncio.run(go()) is expected
    assert broker.counted == 0


@pytest.mark.parametrize(("messages", "silent", "given_up"), [((50,), True, False), ((50, 0), False, False), ((3,), False, True)])
def test_a_queue_that_does_not_answer_now_is_not_given_up(messages: tuple[int, ...], silent: bool, given_up: bool) -> None:
    """A declaration waits for what was rejected from it, and a promotion, too."""
    declares = encode.encode_method(commands.Queue.Declare(queue="q", arguments={"x-queue-type": "quorum", "x-delivery-limit": 3}))
    done: list[Any] = []
    tallies = SimpleNamespace(pending=lambda *_: "tally", done=lambda *tally: done.append(tally))
    replica = SimpleNamespace(
        declared=SimpleNamespace(declarations={KEY: declares}),
        progress=SimpleNamespace(parked=(), tracker=SimpleNamespace(applied=9), written=9),
        index=SimpleNamespace(tallies=tallies),
        reached=lambda: 9,
    )

    async def go() -> Sweeper:
        sweeper = Sweeper(cast(Replica, replica), Address.parse("amqp://a:b@127.0.0.1:1"))
        cast(Any, sweeper)._vhosts = Broker(*messages, silent=silent, version="3.10.8")
        await sweeper._consider(cast(Any, SimpleNamespace(key=KEY, due=due_copies(2))), True)
        return sweeper

    sweeper = asyncio.run(go())
    assert (sweeper.given_up_at(KEY) > 0) is given_up
    assert (KEY in sweeper._back_off) is not given_up
    assert bool(done) is given_up


@pytest.mark.parametrize(
    ("reached", "answers", "swept"),
    [(9, (2, 2), False), (210, (2, 2), False), (212, (2, 2), True), (212, (2, 3), False)],
    ids=["not written", "may be parked for it", "written", "more has come meanwhile"],
)
def test_of_a_queue_with_a_limit_what_is_not_in_it_does_not_count_as_due(
    reached: int, answers: tuple[int, ...], swept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On RabbitMQ 3, while some queue was full: what was live in it was given back each second, until its limit took it."""
    broker: Any = Broker(2, *answers, version="3.10.8")
    passes: list[object] = []

    async def connection(_vhost: str) -> Any:
        return broker

    async def go() -> None:
        replica = Replica(Node(NodeSettings(2, {1: "e1", 2: "e2"})), Levels({"^.*$": "all"}), lambda _first, _count, _runs: None)
        declares = encode.encode_method(commands.Queue.Declare(queue="q", arguments={"x-queue-type": "quorum", "x-delivery-limit": 3}))
        replica.declared.noted(1, pb.Topology(vhost="/", method=declares))
        replica.index.filter.note(300, Kind.DEQUEUE, KEY, (10, 212), 0, "", sweep=True)
        replica.index.filter.safe(300)
        replica.progress.tracker.mark(1, 2)
        replica.progress.parked.add(3, 210)
        replica.to_apply.append(Entry(reached + 1, 300, pb.Run(), 100, 0.0))
        sweeper: Any = Sweeper(replica, Address.parse("amqp://a:b@127.0.0.1:1"))
        broker.connection = broker
        sweeper._vhosts = SimpleNamespace(connection=connection)

        async def run(*arguments: object) -> End:
            passes.append(arguments)
            return End.SEEN

        monkeypatch.setattr(SweepPass, "run", run)
        await sweeper._consider(replica.index.filter.queue(KEY), False)

    asyncio.run(go())
    assert bool(passes) is swept


def test_a_second_copy_does_not_make_others_too_many() -> None:
    """Of a message that was tried again through its exchange, or with `CC`: something live was rejected for each of them."""
    rejected: list[int] = []

    async def flow() -> None: ...

    async def go() -> None:
        replica = Replica(Node(NodeSettings(2, {1: "e1", 2: "e2"})), Levels({"^.*$": "all"}), lambda _first, _count, _runs: None)
        replica.index.generations.opened(0, 1)
        tally = Tally(99, KEY, 90, 4, RangeSet(), RangeSet())
        channel = cast(Any, SimpleNamespace(reject=rejected.append, flow=flow))
        sweep = SweepPass(replica.index.filter.queue(KEY), channel, replica, asyncio.Event(), lambda: False, tally, [])
        for tag, sequence in enumerate([1, 2, 3, 4, 5, 5, 5], 1):
            header = content_header.header_payload(1, content_header.properties(stamps.position_field(b"258.%d/1" % sequence)))
            sweep.take(tag, False, "", KEY[1], header, b"")
        await sweep.reject_excess()

    asyncio.run(go())
    assert rejected == [1]
