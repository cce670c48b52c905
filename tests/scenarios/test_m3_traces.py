"""Traces of the whole that random lives meet too rarely, step by step, with the real core, `Replica` and `recovery` around a simulated broker."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from clients import Client
from cluster import Violation
from rules_off import rule_off
from sidecar import Site
from world import World

pytestmark = pytest.mark.proves("rules")


def pump(world: World, i: int, *, seconds: float = 0.2) -> None:
    """Everything that is under way at one node arrives, and its record is written."""
    site = world.sites[i]
    world.settle(seconds, only={i})
    for _ in range(100):
        site.replica.turn()
        world.settle(only={i})
        if site.barrier is not None:
            site.barrier.relay.pass_barrier()
        site.applier.take()
        for pipe in list(site.broker.pipes):
            while pipe.inbox:
                site.broker.step(pipe)
        for relay in list(site.relays):
            relay.reply()
        site.applier.reply()
        site.write_record()


def alone(client: Client, *declaration: object) -> Site:
    """Node 1 of two leads, the other one is down, and the client has declared its queue there."""
    world = client.world
    for i in world.hosts:
        world.start(i)
    world.settle(0.5)
    site = world.sites[1]
    world.crash(2)
    world.notice(1, 2)
    client.connect(site)
    assert client.relay is not None
    client.relay.topology(("declare", *declaration), lambda: None)
    pump(world, 1, seconds=2.0)
    return site


def lose_end(world: World, *, records: int) -> None:
    """The host of node 1 goes down and loses so many records of the log; the node is promoted again."""
    world.crash(1, lost_records=records, broker=True)
    world.sites[1].broker.crash(random.Random(1))
    world.start(1)
    answer = world.promote(1, {2}, force=True)
    assert answer is None or answer.ok
    pump(world, 1, seconds=2.0)


def record_of_lost_entries(**options: object) -> None:
    """A host loses the end of its log, and keeps the record that says that those entries are applied; others take their sequences."""
    world = World(2, **options)
    client = Client(world, "o", targets=(("", "a"),))
    site = alone(client, "a")
    for _ in range(4):
        client.publish(random.Random(1))
        pump(world, 1)
    assert [copy.number for copy in site.broker.queues["a"].ready] == [1, 2, 3, 4]
    world.takes_publishes = False  # what the lost host confirmed alone is not sent again
    lose_end(world, records=3)
    world.takes_publishes = True
    other = Client(world, "other", targets=(("", "a"),))
    other.connect(site)
    other.publish(random.Random(1))
    pump(world, 1)
    world.check_queues(site)
    assert [copy.number for copy in site.broker.queues["a"].ready][-1] == 5


def refusal_that_is_lost(*, checkpoint: bool = False, **options: object) -> None:
    """A host loses the entry that says that a publish was refused, and keeps the record that knows of it; its publisher sends it again.

    Args:
        checkpoint: One stands between the publish and the refusal, so that the publish is not read again.
    """
    world = World(2, **options)
    client = Client(world, "p", targets=(("", "l"),), numbered=True)
    site = alone(client, "l", 0, "", 1, True)
    for _ in range(2):
        client.publish(random.Random(1))
        if checkpoint and len(site.broker.queues["l"].ready):
            site.replica.checkpoint()
        pump(world, 1)
    assert [copy.number for copy in site.broker.queues["l"].ready] == [1]
    lose_end(world, records=1)
    client.connect(site)
    site.broker.execute(("purge", "l"))  # by an operator: there is room
    for _ in range(3):
        client.publish(random.Random(1))
        site.applier.retry()
        pump(world, 1)
        world.takes_publishes = False
    assert client.idle
    world.check_queues(site)
    assert [copy.number for copy in site.broker.queues["l"].ready] == [2]


def refusal_before_the_checkpoint(**options: object) -> None:
    """The same, where the record says that the log is read from behind the publish on."""
    refusal_that_is_lost(checkpoint=True, **options)


def followed_by_others(**options: object) -> None:
    """A message comes to one queue two ways. What a client does with the dead letter holds up the other, and that what follows it."""
    world = World(2, **options)
    publisher = Client(world, "o", targets=(("ways", ""),))
    site = alone(publisher, "d")
    assert publisher.relay is not None
    for declaration in (("declare", "e", 0, "d", 1), ("exchange", "ways"), ("bind", "ways", "e"), ("bind", "ways", "d")):
        publisher.relay.topology(declaration, lambda: None)
        pump(world, 1)
    first, second = (Client(world, name, queue="d", prefetch=3) for name in ("c1", "c2"))
    for consumer in (first, second):
        consumer.connect(site)
    for _ in range(2):
        publisher.publish(random.Random(1))
        pump(world, 1)
    for consumer, (number, deaths) in zip((first, second, first), ((1, ()), (1, (("e", 1),)), (2, ()))):
        assert consumer.relay is not None
        copy = site.broker.queues["d"].ready[0]
        assert (copy.number, copy.deaths) == (number, deaths)
        site.broker.deliver(consumer.relay.pipe, "d")
    assert first.relay is not None
    assert second.relay is not None
    second.relay.reply()
    second.relay.settle(second.held, "ack")
    first.relay.reply()
    assert not first.held
    first.relay.reply()
    pump(world, 1)
    assert len(first.held) == 2


TRACES: list[tuple[Callable[..., None], str, str]] = [
    (record_of_lost_entries, "entries that only a lost host's record knows count as applied", "lost: m5"),
    (refusal_that_is_lost, "entries that only a lost host's record knows as refused count as refused", "lost: m2"),
    (refusal_before_the_checkpoint, "these refusals count if they are before the last CHECKPOINT", "lost: m2"),
    (followed_by_others, "a withheld message is overtaken by later ones", "G4: n1 delivers"),
]


@pytest.mark.parametrize("trace", [t for t, _, _ in TRACES], ids=lambda t: t.__name__)
def test_rules_on(trace: Callable[..., None]) -> None:
    trace()


@pytest.mark.parametrize(("trace", "part", "violation"), TRACES, ids=[t.__name__ for t, _, _ in TRACES])
def test_rule_off(trace: Callable[..., None], part: str, violation: str) -> None:
    with rule_off(part) as options, pytest.raises(Violation, match=violation):
        trace(**options)
