"""Cases of `test_queue_kinds`: kinds of queues, expiry, dead letters, queues that expire."""

from __future__ import annotations

import time
from typing import Any

from load import QUIET_S, eventually
from queue_stage import Kind, Site, Stage, kind


class _Plain(Kind):
    type = "classic"
    arguments: dict[str, Any] = {}
    properties: dict[str, Any] = {}

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare(type(self).__name__.lower(), self.type, **self.arguments)
        at.door.publish(self.name, range(20), **self.properties)
        assert at.door.take(self.name, 5) == list(range(5))

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 15

    def check(self, door: Site) -> None:
        assert door.content(self.name) == list(range(5, 20))


@kind
class Classic(_Plain):
    pass


@kind
class ClassicTransientMessages(_Plain):
    properties = {"delivery_mode": 1}


@kind
class Lazy(_Plain):
    arguments = {"queue_mode": "lazy"}


@kind
class Quorum(_Plain):
    type = "quorum"


@kind
class Priority(Kind):
    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("priority", max_priority=5)
        for number in range(30):
            at.door.publish(self.name, range(number, number + 1), priority=number % 3)
        assert at.door.take(self.name, 4) == [2, 5, 8, 11]

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 26

    def check(self, door: Site) -> None:
        assert door.content(self.name) == [*range(14, 30, 3), *range(1, 30, 3), *range(0, 30, 3)]


@kind
class PriorityQuorum(Kind):
    """RabbitMQ 3 heeds no priority there. What is acked lies behind others, which a backup's sweep has to hold and give back."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("priority-quorum", "quorum")
        for number in range(30):
            at.door.publish(self.name, range(number, number + 1), priority=(0, 5, 9)[number % 3])
        eventually("the backup to have all of them", lambda: at.backup.depth(self.name) == 30)
        self.left = []
        channel = at.door.channel()
        channel.basic_qos(prefetch_count=30)
        for count, (method, _, body) in enumerate(channel.consume(self.name), 1):
            if int(body) in (1, 11, 15, 27):
                channel.basic_ack(method.delivery_tag)
            else:
                self.left.append(int(body))
            if count == 30:
                break
        channel.connection.close()

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 26

    def check(self, door: Site) -> None:
        assert door.content(self.name) == self.left


@kind
class Stream(Kind):
    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("stream", "stream")
        time.sleep(1.5)  # a stream that is younger is gone with its broker (RabbitMQ's own)
        at.door.publish(self.name, range(50))

    def check(self, door: Site) -> None:
        channel = door.channel()
        channel.basic_qos(prefetch_count=10)
        found = []
        for method, properties, body in channel.consume(self.name, arguments={"x-stream-offset": "first"}, inactivity_timeout=QUIET_S):
            if method is None:
                break
            found.append((int(body), properties.headers["x-stream-offset"]))
            channel.basic_ack(method.delivery_tag)
            if len(found) == 50:
                break
        channel.connection.close()
        assert found == [(number, number) for number in range(50)]


@kind
class SingleActiveConsumer(Kind):
    type = "quorum"

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare(f"sac-{self.type}", self.type, single_active_consumer=True)
        at.door.publish(self.name, range(10))
        self.channel = at.door.channel()  # stays, and holds what it got, until the primary dies
        self.channel.basic_qos(prefetch_count=3)
        self.channel.basic_consume(self.name, lambda *_: None)
        eventually("the consumer to hold messages", lambda: at.broker.depth(self.name) == 7)

    def check(self, door: Site) -> None:
        first, second = door.channel(), door.channel()
        got: dict[int, list[int]] = {0: [], 1: []}
        try:
            for at, channel in enumerate((first, second)):
                channel.basic_qos(prefetch_count=2)

                def take(ch: Any, method: Any, _p: Any, body: bytes, at: int = at) -> None:
                    got[at].append(int(body))

                channel.basic_consume(self.name, take)

            def arrived(at: int) -> bool:
                for channel in (first, second):
                    if channel.is_open:
                        channel.connection.process_data_events(0.2)
                return len(got[at]) == 2

            eventually("the first consumer to get its two", lambda: arrived(0), seen=lambda: got)
            second.connection.process_data_events(0.5)
            assert got == {0: [0, 1], 1: []}, f"the first alone is active: {got}"
            first.connection.close()
            eventually("the second to take over", lambda: arrived(1), seen=lambda: got)
        finally:  # a second try of this test finds the queue as the first did
            for channel in (first, second):
                if channel.connection.is_open:
                    channel.connection.close()


@kind
class SingleActiveConsumerClassic(SingleActiveConsumer):
    type = "classic"


@kind
class Exclusive(Kind):
    """This connection's own: gone with it, and may be declared anew."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.named("exclusive")
        self.channel = at.door.channel()
        self.channel.queue_declare(self.name, exclusive=True)
        at.door.publish(self.name, range(1))

    def before(self, at: Stage) -> bool:
        return not at.backup.has(self.name)

    def check(self, door: Site) -> None:
        channel = door.channel()
        assert channel.queue_declare(self.name, exclusive=True).method.message_count == 0
        channel.connection.close()


@kind
class AutoDelete(Kind):
    def prepare(self, at: Stage) -> None:
        self.name = at.door.named("auto")
        self.channel = at.door.channel()
        self.channel.queue_declare(self.name, auto_delete=True)
        self.channel.basic_consume(self.name, lambda *_: None)
        at.door.publish(self.name, range(1))

    def before(self, at: Stage) -> bool:
        return not at.backup.has(self.name)

    def check(self, door: Site) -> None:
        channel = door.channel()
        assert channel.queue_declare(self.name, auto_delete=True).method.message_count == 0
        channel.queue_delete(self.name)
        channel.connection.close()


@kind
class QueueTtl(Kind):
    type = "classic"

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare(f"queue-ttl-{self.type}", self.type, message_ttl=1_000)
        at.door.publish(self.name, range(10))

    def before(self, at: Stage) -> bool:
        return at.broker.depth(self.name) == at.backup.depth(self.name) == 0

    def check(self, door: Site) -> None:
        assert door.content(self.name) == []


@kind
class QueueTtlQuorum(QueueTtl):
    type = "quorum"


@kind
class MessageTtl(Kind):
    type = "classic"

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare(f"message-ttl-{self.type}", self.type)
        at.door.publish(self.name, range(10), expiration="1000")
        at.door.publish(self.name, range(10, 15))

    def before(self, at: Stage) -> bool:
        return at.broker.depth(self.name) == at.backup.depth(self.name) == 5

    def check(self, door: Site) -> None:
        assert door.content(self.name) == list(range(10, 15))


@kind
class MessageTtlQuorum(MessageTtl):
    type = "quorum"


@kind
class TtlThatEndsLaterOnTheBackup(Kind):
    """On the broker of a backup that was away when they were published, their time began later. Here it is the primary's that ends early: as expiry
    would, somebody around the door takes them from the head without a word to anybody."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("late-ttl")
        at.door.publish(self.name, range(10), expiration="300000")
        at.door.publish(self.name, range(10, 20))
        eventually("the backup to have them", lambda: at.backup.depth(self.name) == 20)
        channel = at.broker.channel()
        for _ in range(10):
            method, _, _ = channel.basic_get(self.name)
            channel.basic_reject(method.delivery_tag, requeue=False)
        channel.connection.close()

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 10

    def check(self, door: Site) -> None:
        assert door.content(self.name) == list(range(10, 20))


@kind
class DeadLettersInAChain(Kind):
    """first --ttl--> second --ttl--> third; some are consumed in the second, some in the third."""

    def prepare(self, at: Stage) -> None:
        self.third = at.door.declare("chain-3")
        self.second = at.door.declare("chain-2", dead_letter_exchange="", dead_letter_routing_key=self.third, message_ttl=30_000)
        self.name = at.door.declare("chain-1", dead_letter_exchange="", dead_letter_routing_key=self.second, message_ttl=500)
        at.door.publish(self.name, range(12))
        assert at.door.take(self.second, 3) == [0, 1, 2]
        assert at.door.take(self.third, 4) == [3, 4, 5, 6]

    def before(self, at: Stage) -> bool:
        return (at.backup.depth(self.name), at.backup.depth(self.second), at.backup.depth(self.third)) == (0, 0, 5)

    def check(self, door: Site) -> None:
        assert door.content(self.name) == []
        assert door.content(self.second) == []
        assert sorted(door.content(self.third)) == list(range(7, 12))


@kind
class RetryLoop(Kind):
    """Rejected to a waiting queue, and back when its time there is over, as applications retry. (Where a copy of the backup is on this way when the
    primary dies, it goes the rest of the way on the new primary.)"""

    def prepare(self, at: Stage) -> None:
        waiting = at.door.named("retry-wait")
        self.name = at.door.declare("retry", "quorum", dead_letter_exchange="", dead_letter_routing_key=waiting)
        self.waiting = at.door.declare("retry-wait", dead_letter_exchange="", dead_letter_routing_key=self.name, message_ttl=500)
        at.door.publish(self.name, range(6))
        channel = at.door.channel()
        for method, properties, body in channel.consume(self.name, inactivity_timeout=QUIET_S):
            assert method is not None
            tries = next((d["count"] for d in (properties.headers.get("x-death") or ()) if d["queue"] == self.name), 0)
            if int(body) < 2 and tries >= 2:
                channel.basic_ack(method.delivery_tag)
                if int(body) == 1:
                    break
            elif tries < 2:
                channel.basic_reject(method.delivery_tag, requeue=False)
        channel.connection.close()
        eventually("the loop to rest", lambda: at.broker.depth(self.name) == 4)

    def before(self, at: Stage) -> bool:
        return (at.broker.depth(self.name), at.broker.depth(self.waiting)) == (4, 0)

    def check(self, door: Site) -> None:
        assert sorted(door.take(self.name, 4)) == [2, 3, 4, 5]
        assert door.content(self.waiting) == door.content(self.name) == []


@kind
class ExpiresUsed(Kind):
    """The primary's clients use it all the time: the backup's, which nobody uses, must not expire."""

    type = "classic"

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare(f"expires-used-{self.type}", self.type, expires=10_000)
        self.channel = at.door.channel()
        self.channel.basic_qos(prefetch_count=1)
        self.channel.basic_consume(self.name, lambda *_: None)
        at.door.publish(self.name, range(5))
        self.until = time.monotonic() + 20

    def before(self, at: Stage) -> bool:
        self.channel.connection.process_data_events(0)
        return time.monotonic() > self.until

    def first(self, door: Site) -> None:
        self.found = door.content(self.name)

    def check(self, door: Site) -> None:
        assert self.found == list(range(5))


@kind
class ExpiresUsedQuorum(ExpiresUsed):
    type = "quorum"


@kind
class ExpiresUnused(Kind):
    type = "classic"

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare(f"expires-unused-{self.type}", self.type, expires=2_000)
        at.door.publish(self.name, range(5))

    def before(self, at: Stage) -> bool:
        return not at.broker.has(self.name) and not at.backup.has(self.name)

    def check(self, door: Site) -> None:
        assert door.depth(self.name) == -1


@kind
class ExpiresUnusedQuorum(ExpiresUnused):
    type = "quorum"
