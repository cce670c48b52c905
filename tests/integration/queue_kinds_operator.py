"""Cases of `test_queue_kinds`: what an operator does to the broker, and queues that are declared anew."""

from __future__ import annotations

import time

from load import eventually
from queue_stage import Kind, Site, Stage, kind


@kind
class PurgedByAnOperator(Kind):
    type = "classic"

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare(f"purged-{self.type}", self.type)
        at.door.publish(self.name, range(20))
        eventually("the backup to have them", lambda: at.backup.depth(self.name) == 20)
        at.broker.channel().queue_purge(self.name)
        at.door.publish(self.name, range(20, 23))

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 3

    def check(self, door: Site) -> None:
        assert door.content(self.name) == [20, 21, 22]


@kind
class PurgedByAnOperatorQuorum(PurgedByAnOperator):
    type = "quorum"


@kind
class PurgedWhileAConsumerHolds(Kind):
    """What a consumer holds is not purged."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("purged-held")
        at.door.publish(self.name, range(20))
        self.channel = at.door.channel()
        self.channel.basic_qos(prefetch_count=4)
        self.channel.basic_consume(self.name, lambda *_: None)
        eventually("the consumer to hold messages", lambda: at.broker.depth(self.name) == 16)
        eventually("the backup to have them", lambda: at.backup.depth(self.name) == 20)
        at.broker.channel().queue_purge(self.name)

    def before(self, at: Stage) -> bool:
        self.channel.connection.process_data_events(0)
        return at.backup.depth(self.name) == 4

    def check(self, door: Site) -> None:
        assert door.content(self.name) == [0, 1, 2, 3]


@kind
class DeadLettersPurgedByAnOperator(Kind):
    def prepare(self, at: Stage) -> None:
        self.dead = at.door.declare("dead-purged")
        self.name = at.door.declare("dead-purged-source", dead_letter_exchange="", dead_letter_routing_key=self.dead, message_ttl=500)
        at.door.publish(self.name, range(10))
        eventually("dead letters on both", lambda: at.broker.depth(self.dead) == at.backup.depth(self.dead) == 10)
        at.broker.channel().queue_purge(self.dead)

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.dead) == 0

    def check(self, door: Site) -> None:
        assert door.content(self.dead) == []
        assert door.content(self.name) == []


@kind
class DeletedByAnOperator(Kind):
    type = "classic"

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare(f"deleted-{self.type}", self.type)
        at.door.publish(self.name, range(10))
        eventually("the backup to have them", lambda: at.backup.depth(self.name) == 10)
        at.broker.channel().queue_delete(self.name)

    def before(self, at: Stage) -> bool:
        return not at.backup.has(self.name)

    def check(self, door: Site) -> None:
        assert door.depth(self.name) == -1
        door.declare(self.name.removesuffix(f"-{door.run}"), "quorum")
        door.publish(self.name, range(1))
        assert door.content(self.name) == [0]


@kind
class DeletedByAnOperatorQuorum(DeletedByAnOperator):
    type = "quorum"


@kind
class DeletedByAnOperatorAndDeclaredAnew(Kind):
    """By a client, in the very words of the first time, before anybody could notice."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("renewed")
        at.door.publish(self.name, range(10))
        eventually("the backup to have them", lambda: at.backup.depth(self.name) == 10)
        at.broker.channel().queue_delete(self.name)
        assert at.door.declare("renewed") == self.name
        at.door.publish(self.name, range(10, 13))

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 3

    def check(self, door: Site) -> None:
        assert door.content(self.name) == [10, 11, 12]


@kind
class DeletedByAnOperatorAndDeclaredOtherwise(Kind):
    """Of another type, before anybody could notice: the backup kept the first one, with its binding."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("otherwise", exchange="otherwise")
        at.door.publish("", range(10), exchange=at.door.named("otherwise"))
        eventually("the backup to have them", lambda: at.backup.depth(self.name) == 10)
        at.broker.channel().queue_delete(self.name)
        assert at.door.declare("otherwise", "quorum") == self.name
        at.door.publish(self.name, range(10, 13))

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 3

    def check(self, door: Site) -> None:
        assert door.declare("otherwise", "quorum") == self.name
        door.publish("", range(13, 14), exchange=door.named("otherwise"))
        assert door.content(self.name) == [10, 11, 12]


@kind
class DeletedByAnOperatorAndBoundAnew(Kind):
    """When the deletion is known, a client declares it again, with its binding."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("bound", exchange="bound")
        at.door.publish("", range(10), exchange=at.door.named("bound"))
        eventually("the backup to have them", lambda: at.backup.depth(self.name) == 10)
        at.broker.channel().queue_delete(self.name)
        eventually("the backup to delete it", lambda: not at.backup.has(self.name))
        at.door.declare("bound", exchange="bound")
        at.door.publish("", range(10, 13), exchange=at.door.named("bound"))

    def check(self, door: Site) -> None:
        door.publish("", range(13, 14), exchange=door.named("bound"))
        assert door.content(self.name) == [10, 11, 12, 13]


@kind
class PurgedBehindAnExchange(Kind):
    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("purged-bound", exchange="purged-bound")
        at.door.publish("", range(10), exchange=at.door.named("purged-bound"))
        eventually("the backup to have them", lambda: at.backup.depth(self.name) == 10)
        at.broker.channel().queue_purge(self.name)

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 0

    def check(self, door: Site) -> None:
        assert door.content(self.name) == []


@kind
class UnboundByAnOperator(Kind):
    """Bindings that are changed around the door are not replicated: the backup has more then, but not less."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("unbound", exchange="unbound")
        at.door.publish("", range(5), exchange=at.door.named("unbound"))
        at.broker.channel().queue_unbind(self.name, at.door.named("unbound"))
        at.door.publish("", range(5, 10), exchange=at.door.named("unbound"))
        assert at.broker.depth(self.name) == 5

    def check(self, door: Site) -> None:
        assert door.content(self.name) == list(range(10))



@kind
class DeletedAndDeclaredAnewByClients(Kind):
    """After the failover too: of another type, with another limit."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("anew")
        at.door.publish(self.name, range(5))
        channel = at.door.channel()
        channel.queue_delete(self.name)
        channel.connection.close()
        at.door.declare("anew", "quorum")
        at.door.publish(self.name, range(5, 8))

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 3

    def check(self, door: Site) -> None:
        assert door.content(self.name) == [5, 6, 7]
        channel = door.channel()
        channel.queue_delete(self.name)
        channel.connection.close()
        door.declare("anew", max_length=2)
        door.publish(self.name, range(3))
        assert door.content(self.name) == [1, 2]


@kind
class DoesNotAnswerForAWhile(Kind):
    """RabbitMQ says of such a queue that it is empty. It is not."""

    def prepare(self, at: Stage) -> None:
        self.name = at.door.declare("silent", "quorum")
        at.door.publish(self.name, range(10))
        eventually("the backup to have them", lambda: at.backup.depth(self.name) == 10)
        at.ctl("eval", f"sys:suspend('%2F_{self.name}').")
        try:
            assert at.broker.depth(self.name) == 0, "what this is about"
            time.sleep(8)
        finally:
            at.ctl("eval", f"sys:resume('%2F_{self.name}').")
        eventually("it to answer again", lambda: at.broker.depth(self.name) == 10)

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 10

    def check(self, door: Site) -> None:
        assert door.content(self.name) == list(range(10))
