"""What the cases of `test_queue_kinds` are made of: a broker or a door as a client sees it, and a kind of queue with what is done to it.

Rules: each kind is three functions: `prepare` (as a client, through the primary's door), `before` (polled: what the backup's broker must hold
before the primary is killed), `check` (as a client, through the new primary's door). What an operator does to a broker from the management page or
with rabbitmqctl is done on the broker's own port, around the door: it is in no client's traffic.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, NackError

from lrq_ha.lab import Lab


@dataclass
class Site:
    """A broker or a door, as a client sees it. `run`: ends every name of this try."""

    url: str
    run: str

    def named(self, name: str) -> str:
        return f"{name}-{self.run}"

    def channel(self, *, confirms: bool = True) -> BlockingChannel:
        parameters = pika.URLParameters(self.url)
        parameters.heartbeat = 0  # some stand idle for long
        channel = pika.BlockingConnection(parameters).channel()
        if confirms:
            channel.confirm_delivery()
        return channel

    def declare(self, queue: str, kind: str = "classic", *, exchange: str = "", **arguments: Any) -> str:
        """Declares `queue` of this run and binds it to a fanout `exchange` of this run, if any. Returns its whole name."""
        name = self.named(queue)
        channel = self.channel()
        table = {"x-queue-type": kind, **{f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}}
        channel.queue_declare(name, durable=True, arguments=table)
        if exchange:
            channel.exchange_declare(self.named(exchange), "fanout", durable=True)
            channel.queue_bind(name, self.named(exchange))
        channel.connection.close()
        return name

    def publish(self, queue: str, numbers: range, exchange: str = "", **properties: Any) -> list[int]:
        """Publishes the numbers, each confirmed; returns those that were refused."""
        channel = self.channel()
        refused = []
        for number in numbers:
            try:
                channel.basic_publish(exchange, queue, b"%d" % number, pika.BasicProperties(**{"delivery_mode": 2, **properties}))
            except NackError:
                refused.append(number)
        channel.connection.close()
        return refused

    def take(self, queue: str, count: int) -> list[int]:
        """Consumes and acks `count` messages, fewer if no more come for a long while."""
        channel = self.channel()
        channel.basic_qos(prefetch_count=1)
        found: list[int] = []
        for method, _, body in channel.consume(queue, inactivity_timeout=60) if count else ():
            if method is None:
                break
            found.append(int(body))
            channel.basic_ack(method.delivery_tag)
            if len(found) == count:
                break
        channel.connection.close()
        return found

    def get(self, queue: str, count: int) -> list[int]:
        """Gets and acks the first `count` messages, and touches no other."""
        channel = self.channel()
        found = []
        for _ in range(count):
            method, _, body = channel.basic_get(queue)
            found.append(int(body))
            channel.basic_ack(method.delivery_tag)
        channel.connection.close()
        return found

    def content(self, queue: str) -> list[int]:
        """Everything in a queue, taken out and acked."""
        channel = self.channel()
        found: list[int] = []
        empty = 0
        while empty < 3:
            method, _, body = channel.basic_get(queue)
            if method is None:
                empty += 1  # a message on its way from one queue to the next
                time.sleep(0.05)
                continue
            empty = 0
            found.append(int(body))
            channel.basic_ack(method.delivery_tag)
        channel.connection.close()
        return found

    def depth(self, queue: str) -> int:
        """Messages ready; -1: there is no such queue."""
        return self._state(queue)[0]

    def _state(self, queue: str) -> tuple[int, int]:
        channel = self.channel()
        try:
            found = channel.queue_declare(queue, passive=True).method
            return int(found.message_count), int(found.consumer_count)
        except ChannelClosedByBroker as error:
            if error.reply_code != 404:
                raise
            return -1, 0
        finally:
            channel.connection.close()

    def has(self, queue: str) -> bool:
        """Whether a queue exists; asked in a way that is no use of it."""

        def ask(channel: BlockingChannel) -> None:
            channel.queue_bind(queue, "amq.direct", "probe")
            channel.queue_unbind(queue, "amq.direct", "probe")

        return self._finds(ask)

    def has_exchange(self, exchange: str) -> bool:
        return self._finds(lambda channel: channel.exchange_declare(exchange, passive=True))

    def _finds(self, ask: Callable[[BlockingChannel], object]) -> bool:
        """Whether what is asked for is there."""
        channel = self.channel()
        try:
            ask(channel)
            return True
        except ChannelClosedByBroker as error:
            if error.reply_code != 404:
                raise
            return False
        finally:
            channel.connection.close()


class Backup(Site):
    """The broker of a backup: while its sidecar looks into a queue, it holds what is in it."""

    def depth(self, queue: str) -> int:
        """As of any site; -2 while nobody can tell."""
        messages, consumers = self._state(queue)
        return -2 if consumers else messages


@dataclass
class Stage:
    """Before the failover: the primary's door and broker, the backup's broker. `ctl`: rabbitmqctl at the primary's broker."""

    door: Site
    broker: Site
    backup: Backup
    ctl: Callable[..., str]

    @classmethod
    def of(cls, lab: Lab, primary: str, backup: str) -> Self:
        run, nodes = f"{time.time_ns()}", lab.nodes
        broker, other = Site(nodes[primary].broker, run), Backup(nodes[backup].broker, run)
        return cls(Site(nodes[primary].door, run), broker, other, partial(lab.ctl, primary))


class Kind:
    """Base of all kinds. `name`: of its main queue, set by `prepare`."""

    name = ""

    def prepare(self, at: Stage) -> None: ...

    def before(self, at: Stage) -> bool:
        """Whether the backup's broker is as it should be."""
        return True

    def first(self, door: Site) -> None:
        """Right after the failover."""

    def check(self, door: Site) -> None: ...


KINDS: dict[str, type[Kind]] = {}


def kind(cls: type[Kind]) -> type[Kind]:
    KINDS["".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__).strip("_")] = cls
    return cls
