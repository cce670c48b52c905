"""What a purge or a deletion by a client takes, and what not: RabbitMQ leaves what consumers hold, and what was rejected before is a dead letter.

Rules: the pair is shared; each test mends it. What the backup's queue holds is polled: while its sweeper has some of it, that is not ready.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

import pika
import pytest
from history import exactly
from load import all_applied, consume, depth, eventually, in_sync, replace_primary
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.own_pair("kills"), pytest.mark.proves("queue: purged by a client", "queue: rejected before a purge")]

KINDS = pytest.mark.parametrize("kind", ["classic", "quorum"])
REJECTED = 1_500  # too many for a sweeper to reject in the moment before


class Pair:
    """The shared pair, its primary and its backup as they are now."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.primary, self.backup = in_sync(lab)
        self._connections: list[pika.BlockingConnection] = []

    def channel(self) -> BlockingChannel:
        """Through the primary's door, on a connection of its own."""
        self._connections.append(pika.BlockingConnection(pika.URLParameters(self.lab.nodes[self.primary].door)))
        channel = self._connections[-1].channel()
        channel.confirm_delivery()
        return channel

    def declare(self, kind: str, **arguments: object) -> str:
        queue = f"purges-{time.time_ns()}"
        table = {"x-queue-type": kind, **{f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}}
        self.channel().queue_declare(queue, durable=True, arguments=table)
        return queue

    def publish(self, queue: str, numbers: range) -> None:
        channel = self.channel()
        for number in numbers:
            channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2))

    def has(self, node: str, queue: str, count: int) -> None:
        def there() -> int:
            return depth(self.lab.nodes[node].broker, queue)

        def states() -> str:
            """All queues of that node that tests of this module use, as RabbitMQ counts them."""
            return self.lab.ctl(node, "-q", "list_queues", "name", "messages_ready", "messages_unacknowledged", "consumers")

        eventually(f"{count} messages in '{queue}' of {node}", lambda: there() == count, seen=states)

    def end(self) -> None:
        for connection in self._connections:
            with suppress(AMQPError):  # to a primary that was killed
                connection.close()
        for name in ("e1", "e2"):
            if self.lab.nodes[name].sidecar_pid is None or self.lab.nodes[name].broker_pid is None:
                self.lab.start(name)


@pytest.fixture
def group(pair: Lab) -> Iterator[Pair]:
    group = Pair(pair)
    yield group
    group.end()


def get(channel: BlockingChannel, queue: str) -> tuple[int, int]:
    """(delivery tag, number) of the next message."""
    found: list[tuple[int, int]] = []

    def there() -> bool:
        method, _, body = channel.basic_get(queue)
        if method is not None:
            found.append((method.delivery_tag, int(body)))
        return method is not None

    eventually(f"a message in '{queue}'", there)
    return found[0]


@pytest.mark.quick
@KINDS
def test_a_purge_spares_what_clients_hold(group: Pair, kind: str) -> None:
    """Given back, given up by a client that dies, or held while the primary is killed: it is there. What was ready is gone, on both."""
    queue = group.declare(kind)
    group.publish(queue, range(10))
    holder, other, dies = group.channel(), group.channel(), group.channel()
    (tag, number), (_, second), (_, third) = get(holder, queue), get(dies, queue), get(holder, queue)
    assert (number, second, third) == (0, 1, 2)
    group.has(group.backup, queue, 10)
    assert other.queue_purge(queue).method.message_count == 7
    group.publish(queue, range(10, 12))
    group.has(group.backup, queue, 5)
    holder.basic_nack(tag)
    group.has(group.primary, queue, 3)
    found = {number: tag for tag, number in (get(other, queue) for _ in range(3))}
    exactly(sorted(found), [0, 10, 11])
    other.basic_ack(found[0])
    other.basic_nack(found[10])
    other.basic_nack(found[11])
    dies.connection.close()
    group.has(group.primary, queue, 3)
    group.has(group.backup, queue, 4)
    all_applied(group.lab, group.primary, group.backup)
    replace_primary(group.lab, group.primary, group.backup)
    door = group.lab.nodes[group.backup].door
    exactly(sorted(consume(door, queue, 4)), [1, 2, 10, 11])
    assert depth(door, queue) == 0


@KINDS
def test_what_is_purged_later_is_gone(group: Pair, kind: str) -> None:
    """What one purge spares goes with the next, on both nodes."""
    queue = group.declare(kind)
    group.publish(queue, range(6))
    holder, other = group.channel(), group.channel()
    tag, _ = get(holder, queue)
    group.has(group.backup, queue, 6)
    assert other.queue_purge(queue).method.message_count == 5
    group.has(group.backup, queue, 1)
    holder.basic_nack(tag)
    group.has(group.primary, queue, 1)
    assert other.queue_purge(queue).method.message_count == 1
    group.publish(queue, range(6, 7))
    all_applied(group.lab, group.primary, group.backup)
    group.has(group.backup, queue, 1)
    exactly(consume(group.lab.nodes[group.primary].door, queue, 1), [6])


@KINDS
@pytest.mark.parametrize("what", ["purged", "deleted", "deleted, and the backup starts again"])
def test_what_was_rejected_before_is_a_dead_letter_on_both(group: Pair, kind: str, what: str, broker_version: str) -> None:
    if broker_version.startswith("3") and kind == "quorum":
        pytest.skip("RabbitMQ 3 may forget what a busy quorum queue has not taken from a channel that is closed (docs/limitations.md)")
    dead = group.declare(kind)
    queue = group.declare(kind, dead_letter_exchange="", dead_letter_routing_key=dead)
    group.publish(queue, range(REJECTED))
    channel = group.channel()
    group.has(group.backup, queue, REJECTED)
    tags = [method.delivery_tag for method, _, _ in islice(channel.consume(queue), REJECTED)]
    channel.basic_nack(tags[-1], multiple=True, requeue=False)
    if what == "purged":
        channel.queue_purge(queue)
    else:
        channel.queue_delete(queue)
    if what not in ("purged", "deleted"):
        group.lab.kill(f"{group.backup}.sidecar")
        group.lab.start(f"{group.backup}.sidecar")
        in_sync(group.lab)
    group.has(group.primary, dead, REJECTED)
    all_applied(group.lab, group.primary, group.backup)
    group.has(group.backup, dead, REJECTED)


@pytest.mark.proves("queue: rejected before a failover")
@KINDS
@pytest.mark.parametrize("what", ["purged", "deleted", "left alone"])
def test_what_was_rejected_before_a_failover_is_a_dead_letter(group: Pair, kind: str, what: str, broker_version: str) -> None:
    """Whatever becomes of its queue on the new primary, where nobody consumes from it: the sweeper had no time for it while it was a backup."""
    if broker_version.startswith("3") and kind == "quorum":
        pytest.skip("RabbitMQ 3 may forget what a busy quorum queue has not taken from a channel that is closed (docs/limitations.md)")
    dead = group.declare(kind)
    queue = group.declare(kind, dead_letter_exchange="", dead_letter_routing_key=dead)
    group.publish(queue, range(REJECTED))
    channel = group.channel()
    group.has(group.backup, queue, REJECTED)
    tags = [method.delivery_tag for method, _, _ in islice(channel.consume(queue), REJECTED)]
    channel.basic_nack(tags[-1], multiple=True, requeue=False)
    # Its broker hears of it when it is safe. (That the log has grown says nothing: a primary adds entries of its own.)
    eventually("the rejection to be safe", lambda: depth(group.lab.nodes[group.primary].broker, dead) > 0)
    replace_primary(group.lab, group.primary, group.backup)
    group.primary = group.backup
    if what == "purged":
        group.channel().queue_purge(queue)
    elif what == "deleted":
        group.channel().queue_delete(queue)
    group.has(group.primary, dead, REJECTED)
    exactly(sorted(consume(group.lab.nodes[group.primary].door, dead, REJECTED)), range(REJECTED))


@KINDS
def test_what_was_rejected_before_a_purge_and_after_it(group: Pair, kind: str) -> None:
    """The later ones, which the backup comes to after the purge, do not keep back the earlier ones, which it is not to take."""
    dead = group.declare(kind)
    queue = group.declare(kind, dead_letter_exchange="", dead_letter_routing_key=dead)
    channel = group.channel()
    for numbers in (range(50), range(50, 100)):
        group.publish(queue, numbers)
        if not numbers.start:
            group.has(group.backup, queue, 50)
        for number in numbers:
            tag, found = get(channel, queue)
            assert found == number
            channel.basic_reject(tag, requeue=False)
        if not numbers.start:
            channel.queue_purge(queue)
    group.has(group.primary, dead, 100)
    all_applied(group.lab, group.primary, group.backup)
    group.has(group.backup, dead, 100)


@KINDS
@pytest.mark.parametrize("what", ["unbound", "its exchange deleted", "purged"])
def test_what_was_rejected_before_dead_letters_go_elsewhere(group: Pair, kind: str, what: str) -> None:
    """It goes where it went on the primary: before the dead-letter queue is unbound, its exchange deleted, or what came there purged."""
    dead = group.declare(kind)
    queue, count = group.declare(kind, dead_letter_exchange=f"{dead}-x", dead_letter_routing_key="k"), 50
    channel = group.channel()
    channel.exchange_declare(f"{dead}-x", "direct", durable=True)
    channel.queue_bind(dead, f"{dead}-x", "k")
    group.publish(queue, range(count))
    group.has(group.backup, queue, count)
    tags = [method.delivery_tag for method, _, _ in islice(channel.consume(queue), count)]
    channel.basic_nack(tags[-1], multiple=True, requeue=False)
    group.has(group.primary, dead, count)
    if what == "unbound":
        channel.queue_unbind(dead, f"{dead}-x", "k")
    elif what == "purged":
        channel.queue_purge(dead)
    else:
        channel.exchange_delete(f"{dead}-x")
    all_applied(group.lab, group.primary, group.backup)
    left = 0 if what == "purged" else count
    group.has(group.primary, dead, left)
    group.has(group.backup, queue, 0)
    group.has(group.backup, dead, left)


@KINDS
@pytest.mark.parametrize("what", ["declared", "purged"])
def test_what_is_rejected_goes_where_dead_letters_went_then(group: Pair, kind: str, what: str) -> None:
    """A backup that moved it at once, and declared or purged where it went a little later, as it does everything, had it nowhere."""
    letters = [f"letters-{time.time_ns()}-{i}" for i in range(5)]
    queues = [group.declare(kind, dead_letter_exchange="", dead_letter_routing_key=each) for each in letters]
    channel = group.channel()
    for queue, dead in zip(queues, letters):
        if what == "purged":
            channel.queue_declare(dead, durable=True, arguments={"x-queue-type": kind})
            group.publish(dead, range(3))
        group.publish(queue, range(10))
    for node in (group.primary, group.backup):
        for queue in queues:
            group.has(node, queue, 10)
    for queue, dead in zip(queues, letters):
        if what == "purged":
            channel.queue_purge(dead)
        else:
            channel.queue_declare(dead, durable=True, arguments={"x-queue-type": kind})
        for _ in range(10):
            channel.basic_reject(get(channel, queue)[0], requeue=False)
        time.sleep(0.3)
    all_applied(group.lab, group.primary, group.backup)
    for node in (group.primary, group.backup):
        for queue, dead in zip(queues, letters):
            group.has(node, queue, 0)
            group.has(node, dead, 10)
