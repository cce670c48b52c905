"""What clients of the primary do while the backup is away: when it is back, its broker holds the same.

Rules: one absence for all cases, which are prepared together; the backup's sidecar is killed, so its queues stand still; each case has
functions for before (polled until it is true), meanwhile (the backup is out of the set), and after (it is in the set again).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pika
import pytest
from load import eventually, in_sync, same_logs
from pika.adapters.blocking_connection import BlockingChannel
from queue_stage import Stage

from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.own_pair("kills")]

COMMITTERS = 20
TURNS = 25


class Case:
    def prepare(self, at: Stage) -> None: ...

    def before(self, at: Stage) -> bool:
        return True

    def meanwhile(self, at: Stage) -> None: ...

    def after(self, at: Stage) -> None: ...


CASES: dict[str, type[Case]] = {}


def case(cls: type[Case]) -> type[Case]:
    CASES["".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__).strip("_")] = cls
    return cls


def holds(at: Stage, queue: str, count: int) -> None:
    """Waits until primary and backup hold so many (-1: no such queue)."""
    for where in (at.broker, at.backup):
        eventually(f"{count} in {queue}", lambda where=where: where.depth(queue) == count)


@case
class Consumed(Case):
    """Half of it before the backup went."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("away-consumed", "quorum")
        at.door.publish(self.name, range(20))

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 20

    def meanwhile(self, at: Stage) -> None:
        at.door.publish(self.name, range(20, 40))
        assert at.door.take(self.name, 37) == list(range(37))

    def after(self, at: Stage) -> None:
        holds(at, self.name, 3)
        assert sorted(at.door.content(self.name)) == [37, 38, 39]  # RabbitMQ 3.10 puts behind the others what pika gives back at its end


@case
class Purged(Case):
    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("away-purged")
        at.door.publish(self.name, range(20))

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 20

    def meanwhile(self, at: Stage) -> None:
        at.door.channel().queue_purge(self.name)
        at.door.publish(self.name, range(20, 25))

    def after(self, at: Stage) -> None:
        holds(at, self.name, 5)


@case
class Deleted(Case):
    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("away-deleted")
        at.door.publish(self.name, range(20))

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 20

    def meanwhile(self, at: Stage) -> None:
        at.door.channel().queue_delete(self.name)

    def after(self, at: Stage) -> None:
        holds(at, self.name, -1)


@case
class DeletedAndDeclaredAnew(Case):
    """As another type, with other messages."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("away-anew")
        at.door.publish(self.name, range(20))

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 20

    def meanwhile(self, at: Stage) -> None:
        at.door.channel().queue_delete(self.name)
        assert at.door.declare("away-anew", "quorum") == self.name
        at.door.publish(self.name, range(3))

    def after(self, at: Stage) -> None:
        holds(at, self.name, 3)
        assert at.backup.declare("away-anew", "quorum") == self.name, "it is of another type"


@case
class Expired(Case):
    """Some came to the backup before it went, some never did; it has dead letters of its own making of the former."""

    def prepare(self, at: Stage) -> None:
        self.dead = at.door.declare("away-dead")
        self.name = at.door.declare("away-expired", message_ttl=3_000, dead_letter_exchange="", dead_letter_routing_key=self.dead)
        at.door.publish(self.name, range(10))

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) + at.backup.depth(self.dead) == 10

    def meanwhile(self, at: Stage) -> None:
        at.door.publish(self.name, range(10, 20))
        eventually("all to expire", lambda: at.broker.depth(self.dead) == 20)

    def after(self, at: Stage) -> None:
        holds(at, self.name, 0)
        holds(at, self.dead, 20)
        assert at.door.content(self.dead) == list(range(20))


@case
class Rebound(Case):
    """Each publish goes by the bindings of its moment."""

    def prepare(self, at: Stage) -> None:
        self.first, self.second = (at.door.declare(f"away-bound-{number}") for number in (1, 2))
        self.exchange = at.door.named("away")
        channel = at.door.channel()
        channel.exchange_declare(self.exchange, "topic", durable=True)
        channel.queue_bind(self.first, self.exchange, "#")
        at.door.publish("key", range(10), self.exchange)

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.first) == 10

    def meanwhile(self, at: Stage) -> None:
        channel = at.door.channel()
        channel.queue_bind(self.second, self.exchange, "key")
        at.door.publish("key", range(10, 13), self.exchange)
        channel.queue_unbind(self.first, self.exchange, "#")
        at.door.publish("key", range(13, 17), self.exchange)

    def after(self, at: Stage) -> None:
        holds(at, self.first, 13)
        holds(at, self.second, 7)


@case
class DeclaredAndDeletedInTurn(Case):
    """By two clients, the same name, before, while and after the backup is away."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.named("away-turn")
        self.turn(at)

    def turn(self, at: Stage) -> None:
        def client() -> None:
            channel = at.door.channel()
            for _ in range(TURNS):
                channel.queue_declare(self.name, durable=True)
                channel.queue_delete(self.name)
            channel.connection.close()

        clients = [threading.Thread(target=client) for _ in range(2)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()

    meanwhile = turn

    def after(self, at: Stage) -> None:
        self.turn(at)
        holds(at, self.name, -1)
        at.door.channel().queue_declare(self.name, durable=True)
        holds(at, self.name, 0)


@case
class TransactionsThatAreOpen(Case):
    """One begun before the backup went and committed without it; one begun without it and committed when it is back."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("away-tx")
        self.channels = [at.door.channel(confirms=False) for _ in range(2)]
        for channel in self.channels:
            channel.tx_select()
        self.some(self.channels[0], 3)

    def some(self, channel: BlockingChannel, count: int) -> None:
        for number in range(count):
            channel.basic_publish("", self.name, b"%d" % number, pika.BasicProperties(delivery_mode=2))

    def meanwhile(self, at: Stage) -> None:
        first, second = self.channels
        self.some(first, 2)
        first.tx_commit()
        self.some(second, 4)
        assert at.broker.depth(self.name) == 5

    def after(self, at: Stage) -> None:
        self.some(self.channels[1], 3)
        self.channels[1].tx_commit()
        holds(at, self.name, 12)


@case
class ManyTransactionsAtOnce(Case):
    """Without a pause from before the backup goes until it is back."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("away-many")
        self.over = threading.Event()
        pool = ThreadPoolExecutor(COMMITTERS)
        self.committed: list[Future[int]] = [pool.submit(self.commit, at) for _ in range(COMMITTERS)]

    def commit(self, at: Stage) -> int:
        """Transactions of three publishes each, for two minutes at most; returns how many."""
        until = time.monotonic() + 120
        channel = at.door.channel(confirms=False)
        channel.tx_select()
        done = 0
        while not self.over.is_set() and time.monotonic() < until:
            for number in range(3):
                channel.basic_publish("", self.name, b"%d" % number, pika.BasicProperties(delivery_mode=2))
            channel.tx_commit()
            done += 1
            time.sleep(0.1)
        channel.connection.close()
        return done

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) > 3 * COMMITTERS

    def after(self, at: Stage) -> None:
        self.over.set()
        done = [future.result() for future in self.committed]
        assert min(done) > 2
        holds(at, self.name, 3 * sum(done))


class Absence:
    """All cases, up to the moment when the backup is back. `failed`: what went wrong, by case."""

    def __init__(self, pair: Lab) -> None:
        primary, backup = in_sync(pair)
        self.stage = Stage.of(pair, primary, backup)
        self.cases = {name: cls() for name, cls in CASES.items()}
        self.failed: dict[str, BaseException] = {}
        self._each(lambda one: one.prepare(self.stage))
        self._each(lambda one: eventually("the backup to be as the primary", lambda: one.before(self.stage)))
        pair.kill(f"{backup}.sidecar")
        eventually("it to be out of the set", lambda: pair.status(primary)["members"] == [primary])
        self._each(lambda one: one.meanwhile(self.stage))
        pair.start(f"{backup}.sidecar")
        assert in_sync(pair) == (primary, backup)

    def _each(self, step: Callable[[Case], None]) -> None:
        def one(name: str) -> None:
            try:
                step(self.cases[name])
            except Exception as error:
                self.failed[name] = error

        with ThreadPoolExecutor(len(self.cases)) as pool:
            list(pool.map(one, [name for name in self.cases if name not in self.failed]))


@pytest.fixture(scope="module")
def absence(pair: Lab) -> Iterator[Absence]:
    yield Absence(pair)
    same_logs(pair)


@pytest.mark.parametrize("name", CASES)
def test_while_the_backup_is_away(absence: Absence, name: str) -> None:
    if name in absence.failed:
        raise absence.failed[name]
    absence.cases[name].after(absence.stage)
