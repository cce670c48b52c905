"""Cases of `test_queue_kinds`: limits on length and on deliveries."""

from __future__ import annotations

import time

import pika
import pytest
from load import QUIET_S, eventually
from pika.exceptions import ChannelClosedByBroker
from queue_stage import Kind, Site, Stage, kind


@kind
class DropHead(Kind):
    type = "classic"

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare(f"drop-head-{self.type}", self.type, max_length=10)
        at.door.publish(self.name, range(25))

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 10

    def check(self, door: Site) -> None:
        assert door.content(self.name) == list(range(15, 25))


@kind
class DropHeadQuorum(DropHead):
    type = "quorum"


@kind
class DropHeadByBytes(Kind):
    """200 octets of bodies; in quorum queues of 4.3, of bodies and headers, with the door's positions in these."""

    type = "classic"

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare(f"drop-bytes-{self.type}", self.type, max_length_bytes=200)
        at.door.publish(self.name, range(100, 200))
        self.left = at.broker.depth(self.name)

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == self.left

    def check(self, door: Site) -> None:
        assert self.left == 66 or (self.type == "quorum" and 0 < self.left < 10)
        assert door.content(self.name) == list(range(200 - self.left, 200))


@kind
class DropHeadByBytesQuorum(DropHeadByBytes):
    type = "quorum"


@kind
class RejectPublishByBytes(Kind):
    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("reject-bytes", max_length_bytes=20, overflow="reject-publish")
        self.refused = at.door.publish(self.name, range(10, 35))
        assert self.refused

    def check(self, door: Site) -> None:
        assert door.content(self.name) == [number for number in range(10, 35) if number not in self.refused]


@kind
class AtLeastOnceDeadLetters(Kind):
    """Those that RabbitMQ itself sees to their target: rejected and over the length limit, they are in the same place on the new primary."""

    def prepare(self, at: Stage) -> None:
        self.dead = at.door.declare("at-least-dead", "quorum")
        dead_letters = {"dead_letter_strategy": "at-least-once", "dead_letter_exchange": "", "dead_letter_routing_key": self.dead}
        self.name = at.door.declare("at-least", "quorum", overflow="reject-publish", **dead_letters)
        at.door.publish(self.name, range(10))
        channel = at.door.channel()
        channel.basic_qos(prefetch_count=4)
        for _ in range(4):
            channel.basic_reject(channel.basic_get(self.name)[0].delivery_tag, requeue=False)
        eventually("dead letters", lambda: at.broker.depth(self.dead) == 4)
        channel.connection.close()

    def before(self, at: Stage) -> bool:
        return (at.backup.depth(self.name), at.backup.depth(self.dead)) == (6, 4)

    def check(self, door: Site) -> None:
        assert sorted(door.content(self.dead)) == [0, 1, 2, 3]
        assert door.content(self.name) == list(range(4, 10))


@kind
class DropHeadOfAPriorityQueue(Kind):
    """Which ones go is RabbitMQ's to say: a twin that is not replicated tells."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("priority-ring", max_priority=3, max_length=5)
        channel = at.broker.channel()
        twin = at.door.named("twin")
        channel.queue_declare(twin, exclusive=True, arguments={"x-max-priority": 3, "x-max-length": 5})
        for number in range(12):
            at.door.publish(self.name, range(number, number + 1), priority=number % 4)
            channel.basic_publish("", twin, b"%d" % number, pika.BasicProperties(priority=number % 4))
        self.expected = [int(channel.basic_get(twin, auto_ack=True)[2]) for _ in range(5)]
        channel.connection.close()

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 5

    def check(self, door: Site) -> None:
        assert door.content(self.name) == self.expected


@kind
class DropHeadWhileConsumersAck(Kind):
    """What is consumed at once is never written on a backup, so its queue is never full: what the primary's head dropped must go all the same."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("drop-head-acked", max_length=10)
        at.door.publish(self.name, range(10))
        at.door.publish(self.name, range(10, 13))  # 0, 1, 2 go
        assert at.door.get(self.name, 6) == list(range(3, 9))
        at.door.publish(self.name, range(13, 16))

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 7

    def check(self, door: Site) -> None:
        assert door.content(self.name) == list(range(9, 16))


@kind
class DropHeadToDeadLetters(Kind):
    def prepare(self, at: Stage) -> None:
        self.dead = at.door.declare("dropped")
        self.name = at.door.declare("drop-head-dlx", max_length=5, dead_letter_exchange="", dead_letter_routing_key=self.dead)
        at.door.publish(self.name, range(12))
        assert at.door.take(self.dead, 3) == [0, 1, 2]

    def before(self, at: Stage) -> bool:
        return (at.backup.depth(self.name), at.backup.depth(self.dead)) == (5, 4)

    def check(self, door: Site) -> None:
        assert door.content(self.name) == list(range(7, 12))
        assert door.content(self.dead) == list(range(3, 7))


@kind
class RejectPublish(Kind):
    type = "classic"

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare(f"reject-publish-{self.type}", self.type, max_length=5, overflow="reject-publish")
        self.refused = at.door.publish(self.name, range(12))
        assert self.refused

    def check(self, door: Site) -> None:
        assert door.content(self.name) == [number for number in range(12) if number not in self.refused]


@kind
class RejectPublishQuorum(RejectPublish):
    type = "quorum"


@kind
class RejectPublishDlx(Kind):
    """Its dead letters are of publishes that were refused, and what was refused is in no node's log: the door says so, rather than lose them."""

    def prepare(self, at: Stage) -> None:
        with pytest.raises(ChannelClosedByBroker, match="cannot be replicated"):
            at.door.declare("reject-publish-dlx", max_length=5, overflow="reject-publish-dlx")


@kind
class DeliveryLimit(Kind):
    """Backups sweep the queue several times meanwhile: that is no delivery."""

    def prepare(self, at: Stage) -> None:
        self.dead = at.door.declare("over-limit")
        self.name = at.door.declare("delivery-limit", "quorum", delivery_limit=2, dead_letter_exchange="", dead_letter_routing_key=self.dead)
        at.door.publish(self.name, range(10))
        for _ in range(4):  # message 0 is given back until it is over the limit
            channel = at.door.channel()
            method, _, body = channel.basic_get(self.name)
            if method is not None and body == b"0":
                channel.basic_reject(method.delivery_tag, requeue=True)
            elif method is not None:
                channel.basic_nack(method.delivery_tag, requeue=True)
            channel.connection.close()
            eventually("it to be back", lambda: at.broker.depth(self.name) + at.broker.depth(self.dead) == 10)
        assert at.door.content(self.dead) == [0]
        for number in range(1, 6):
            assert at.door.take(self.name, 1) == [number]
            time.sleep(1.2)

    def check(self, door: Site) -> None:
        assert door.content(self.name) == list(range(6, 10))
        assert door.content(self.dead) == []


@kind
class LostByADeliveryLimit(Kind):
    """Without dead letters, what was given back too often goes without a trace; its neighbours stay."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("limit-lost", "quorum", delivery_limit=1)
        at.door.publish(self.name, range(6))
        channel = at.door.channel()
        channel.basic_qos(prefetch_count=10)
        seen: list[int] = []
        for method, _, body in channel.consume(self.name, inactivity_timeout=QUIET_S):
            assert method is not None, seen
            seen.append(int(body))
            if body == b"0":
                channel.basic_reject(method.delivery_tag, requeue=True)
            if sorted(seen) == [0, *range(6)]:
                break
        time.sleep(0.2)
        channel.connection.close()
        eventually("the others to be back", lambda: at.broker.depth(self.name) == 5)

    def check(self, door: Site) -> None:
        found = door.content(self.name)
        assert [number for number in found if number] == list(range(1, 6))
