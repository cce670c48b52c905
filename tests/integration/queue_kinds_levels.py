"""Cases of `test_queue_kinds`: levels of replication, and auto-delete queues that are to be replicated."""

from __future__ import annotations

import time

import pika
from load import QUIET_S, eventually
from queue_stage import Kind, Site, Stage, kind


@kind
class Configuration(Kind):
    """It is there, with its bindings and without its messages; the other queue of its exchange has all of its own."""

    type = "classic"

    def prepare(self, at: Stage) -> None:
        what = f"configuration-{self.type}"
        self.exchange = at.door.named(what)
        self.other = at.door.declare(f"beside-{what}", exchange=what)
        self.name = at.door.declare(what, self.type, exchange=what, lrq_replicate="configuration", max_length=1_000)
        if self.type == "stream":
            time.sleep(1.5)  # one that is younger is gone with its broker (RabbitMQ's own)
        at.door.publish(self.name, range(5))
        at.door.publish("", range(5, 10), self.exchange)
        eventually("the primary to have them", lambda: at.broker.depth(self.name) == 10)

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 0 and at.backup.depth(self.other) == 5

    def first(self, door: Site) -> None:
        assert door.depth(self.name) == 0

    def check(self, door: Site) -> None:
        door.publish("", range(10, 12), self.exchange)
        door.publish(self.name, range(12, 14))
        assert door.content(self.name) == [10, 11, 12, 13]
        assert door.content(self.other) == list(range(5, 12))


@kind
class ConfigurationQuorum(Configuration):
    type = "quorum"


@kind
class ConfigurationStream(Configuration):
    type = "stream"

    def prepare(self, at: Stage) -> None:
        self.exchange = at.door.named("configuration-stream")
        self.other = at.door.declare("beside-configuration-stream", exchange="configuration-stream")
        self.name = at.door.declare("configuration-stream", "stream", exchange="configuration-stream", lrq_replicate="configuration")
        time.sleep(1.5)  # one that is younger is gone with its broker (RabbitMQ's own)
        at.door.publish(self.name, range(5))
        at.door.publish("", range(5, 10), self.exchange)

    def check(self, door: Site) -> None:
        door.publish("", range(10, 12), self.exchange)
        channel = door.channel()
        channel.basic_qos(prefetch_count=10)
        found = []
        for method, _, body in channel.consume(self.name, arguments={"x-stream-offset": "first"}, inactivity_timeout=QUIET_S):
            if method is None:
                break
            found.append(int(body))
            channel.basic_ack(method.delivery_tag)
            if len(found) == 2:
                break
        channel.connection.close()
        assert found == [10, 11]


@kind
class ConfigurationOfDeadLetters(Kind):
    """What a backup itself moves there when it follows its primary's consumers is not left there."""

    def prepare(self, at: Stage) -> None:
        self.dead = at.door.declare("dead-configuration", lrq_replicate="configuration")
        self.name = at.door.declare("dies-into-configuration", dead_letter_exchange="", dead_letter_routing_key=self.dead)
        at.door.publish(self.name, range(20))
        eventually("the backup to have them", lambda: at.backup.depth(self.name) == 20)
        channel = at.door.channel()
        for _ in range(8):
            method, _, _ = channel.basic_get(self.name)
            channel.basic_reject(method.delivery_tag, requeue=False)
        channel.connection.close()
        eventually("the primary to have moved them", lambda: at.broker.depth(self.dead) == 8)

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 12 and at.backup.depth(self.dead) == 0

    def check(self, door: Site) -> None:
        assert door.content(self.dead) == []
        assert door.content(self.name) == list(range(8, 20))


@kind
class ConfigurationBehindAnAutoDeleteExchange(Kind):
    """The exchange would go with its last binding; on a backup there is none."""

    def prepare(self, at: Stage) -> None:
        self.exchange = at.door.named("auto-delete-configuration")
        self.name = at.door.declare("behind-auto-delete", lrq_replicate="configuration")
        channel = at.door.channel()
        channel.exchange_declare(self.exchange, "fanout", durable=True, auto_delete=True)
        channel.queue_bind(self.name, self.exchange)
        channel.connection.close()
        at.door.publish("", range(5), self.exchange)

    def check(self, door: Site) -> None:
        door.publish("", range(5, 8), self.exchange)
        assert door.content(self.name) == [5, 6, 7]


@kind
class LevelNone(Kind):
    """Nothing of it is on the backup. Its level is: declared anew, it is as it was."""

    def prepare(self, at: Stage) -> None:
        self.exchange = at.door.named("level-none")
        self.other = at.door.declare("beside-level-none", exchange="level-none")
        self.name = at.door.declare("level-none", exchange="level-none", lrq_replicate="none")
        at.door.publish(self.name, range(5))
        at.door.publish("", range(5, 10), self.exchange)
        assert at.door.get(self.name, 3) == [0, 1, 2]

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == -1 and at.backup.depth(self.other) == 5

    def check(self, door: Site) -> None:
        assert door.depth(self.name) == -1
        channel = door.channel()
        channel.queue_declare(self.name, durable=True)  # it does not say so again, but the log does
        channel.connection.close()
        door.publish(self.name, range(20, 23))
        assert door.content(self.name) == [20, 21, 22]
        assert door.content(self.other) == list(range(5, 10))


@kind
class AutoDeleteAsked(Kind):
    """It is there with its messages, and goes with its last consumer on the new primary."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.named("auto-delete-asked")
        self.declare(at.door)
        at.door.publish(self.name, range(20))
        assert at.door.get(self.name, 5) == list(range(5))

    def declare(self, door: Site) -> None:
        channel = door.channel()
        channel.queue_declare(self.name, durable=True, auto_delete=True, arguments={"x-lrq-replicate": "all"})
        channel.connection.close()

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 15

    def check(self, door: Site) -> None:
        self.declare(door)
        assert door.take(self.name, 15) == list(range(5, 20))
        eventually("it to go with its consumer", lambda: door.depth(self.name) == -1)


@kind
class AutoDeleteAskedAndLeft(Kind):
    """It went with its last consumer before the failover, and stays gone."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.named("auto-delete-left")
        channel = at.door.channel()
        channel.queue_declare(self.name, auto_delete=True, arguments={"x-lrq-replicate": "all"})
        for number in range(3):
            channel.basic_publish("", self.name, b"%d" % number, pika.BasicProperties(delivery_mode=2))
        eventually("the backup to have it", lambda: at.backup.depth(self.name) == 3)
        channel.basic_consume(self.name, lambda *_: None)
        channel.connection.close()
        eventually("the primary to delete it", lambda: not at.broker.has(self.name))

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == -1

    def check(self, door: Site) -> None:
        assert door.depth(self.name) == -1
