"""Cases of `test_queue_kinds`: exchanges whose kind or arguments matter after a failover."""

from __future__ import annotations

from load import eventually
from queue_stage import Kind, Site, Stage, kind


@kind
class AlternateExchange(Kind):
    """What an exchange cannot route goes where it went before."""

    def prepare(self, at: Stage) -> None:
        self.exchange = at.door.named("alternate-of")
        self.name = at.door.declare("alternate", exchange="alternate")
        self.bound = at.door.declare("not-alternate")
        channel = at.door.channel()
        channel.exchange_declare(self.exchange, "direct", durable=True, arguments={"alternate-exchange": at.door.named("alternate")})
        channel.queue_bind(self.bound, self.exchange, "known")
        channel.connection.close()
        at.door.publish("unknown", range(5), self.exchange)
        at.door.publish("known", range(5, 10), self.exchange)

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == at.backup.depth(self.bound) == 5

    def check(self, door: Site) -> None:
        door.publish("unknown", range(10, 12), self.exchange)
        door.publish("known", range(12, 14), self.exchange)
        assert door.content(self.name) == [0, 1, 2, 3, 4, 10, 11]
        assert door.content(self.bound) == [5, 6, 7, 8, 9, 12, 13]


@kind
class ExchangeDeletedByAnOperatorAndDeclaredOtherwise(Kind):
    """Of another type, and bound by a key: the backup kept the first one, which brings everything."""

    def prepare(self, at: Stage) -> None:
        self.exchange = at.door.named("otherwise-exchange")
        self.name = at.door.declare("of-otherwise", exchange="otherwise-exchange")
        at.broker.channel().exchange_delete(self.exchange)
        channel = at.door.channel()
        channel.exchange_declare(self.exchange, "direct", durable=True)
        channel.queue_bind(self.name, self.exchange, "known")
        channel.connection.close()
        at.door.publish("unknown", range(5), self.exchange)
        at.door.publish("known", range(5, 10), self.exchange)

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 5

    def check(self, door: Site) -> None:
        door.publish("unknown", range(10, 12), self.exchange)
        door.publish("known", range(12, 14), self.exchange)
        assert door.content(self.name) == [5, 6, 7, 8, 9, 12, 13]


@kind
class AutoDeleteExchange(Kind):
    """It is there after the failover, and goes with its last binding then."""

    def prepare(self, at: Stage) -> None:
        self.exchange = at.door.named("auto-delete")
        self.name = at.door.declare("of-auto-delete")
        channel = at.door.channel()
        channel.exchange_declare(self.exchange, "topic", durable=True, auto_delete=True)
        channel.queue_bind(self.name, self.exchange, "a.*")
        channel.connection.close()
        at.door.publish("a.b", range(5), self.exchange)

    def before(self, at: Stage) -> bool:
        return at.backup.depth(self.name) == 5

    def check(self, door: Site) -> None:
        door.publish("a.c", range(5, 8), self.exchange)
        assert door.content(self.name) == list(range(8))
        door.channel().queue_unbind(self.name, self.exchange, "a.*")
        eventually("it to go", lambda: not door.has_exchange(self.exchange))
