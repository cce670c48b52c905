"""What the door's tests share: a pair seen through its primary's door, and a check after each test that nothing was left open."""

from __future__ import annotations

import faulthandler
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pika
import pytest
from history import exactly
from load import QUIET_S, all_applied, eventually, in_sync, primary_of
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import AMQPError, ChannelClosedByBroker

from lrq_ha.lab import Lab

FINISH_S = 300.0  # longer than all that it waits for


class Rig:
    """A pair. `primary` and `backup` are node names; connections end with the test."""

    def __init__(self, lab: Lab) -> None:
        primary = primary_of(lab)
        self.lab, self.primary = lab, primary
        self.backup = "e2" if primary == "e1" else "e1"
        self._connections: list[BlockingConnection] = []
        self._named: list[str] = []
        self._pids = self.pids()

    def pids(self) -> dict[str, int | None]:
        return {name: node.sidecar_pid for name, node in self.lab.nodes.items()}

    @property
    def url(self) -> str:
        """The door of the primary."""
        return self.lab.nodes[self.primary].door

    def broker_url(self, name: str) -> str:
        return self.lab.nodes[name].broker

    def name(self, what: str = "q") -> str:
        """A name that nobody else uses; a queue of that name goes with the test."""
        self._named.append(f"door-{what}-{uuid.uuid4().hex[:10]}")
        return self._named[-1]

    def connect(self, url: str = "", vhost: str = "/", **options: Any) -> BlockingConnection:
        parameters = pika.URLParameters(url or self.url)
        parameters.virtual_host = vhost
        for key, value in options.items():
            setattr(parameters, key, value)
        connection = pika.BlockingConnection(parameters)
        self._connections.append(connection)
        return connection

    def channel(self, *, confirms: bool = False, **options: Any) -> BlockingChannel:
        """A channel through the door, on a connection of its own."""
        channel = self.connect(**options).channel()
        if confirms:
            channel.confirm_delivery()
        return channel

    @contextmanager
    def at(self, name: str) -> Iterator[BlockingChannel]:
        """A channel straight to a node's broker."""
        connection = pika.BlockingConnection(pika.URLParameters(self.broker_url(name)))
        try:
            yield connection.channel()
        finally:
            connection.close()

    def declare(self, channel: BlockingChannel, *, kind: str = "classic", **arguments: Any) -> str:
        queue = self.name()
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": kind, **{f"x-{k.replace('_', '-')}": v for k, v in arguments.items()}})
        return queue

    def exists(self, name: str, queue: str) -> bool:
        """Whether a node's broker has the queue."""
        return self._finds(name, lambda channel: channel.queue_declare(queue, passive=True))

    def has_exchange(self, name: str, exchange: str) -> bool:
        """Whether a node's broker has the exchange."""
        return self._finds(name, lambda channel: channel.exchange_declare(exchange, passive=True))

    def _finds(self, name: str, ask: Callable[[BlockingChannel], object]) -> bool:
        with self.at(name) as channel:
            try:
                ask(channel)
            except ChannelClosedByBroker as error:
                if error.reply_code != 404:
                    raise
                return False
            return True

    def depth(self, name: str, queue: str) -> int:
        """Messages ready in a queue of a node's broker."""
        with self.at(name) as channel:
            return int(channel.queue_declare(queue, passive=True).method.message_count)

    def bodies(self, name: str, queue: str) -> list[bytes]:
        """What is ready in a queue of a node's broker; it stays there."""
        found: list[bytes] = []
        with self.at(name) as channel:
            count = channel.queue_declare(queue, passive=True).method.message_count
            channel.basic_qos(prefetch_count=10_000)  # no test has more in a queue
            if count:
                for method, _, body in channel.consume(queue, inactivity_timeout=QUIET_S):
                    if method is None:
                        break
                    found.append(body)
                    if len(found) == count:
                        break
        return found

    def both_hold(self, queue: str, bodies: list[bytes], *, ordered: bool = True) -> None:
        """Waits until both brokers' queues hold exactly these, in this order."""
        for name in (self.primary, self.backup):
            held: list[bytes] = []

            def same(name: str = name, held: list[bytes] = held) -> bool:
                if self.depth(name, queue) != len(bodies):
                    return False
                held[:] = self.bodies(name, queue)
                return held == bodies or (not ordered and sorted(held) == sorted(bodies))

            try:
                eventually(f"{len(bodies)} messages in {queue} at {name}", same)
            except AssertionError:
                there = self.bodies(name, queue) if self.exists(name, queue) else []
                exactly(*([b[:30] for b in (each if ordered else sorted(each))] for each in (there, bodies)))
                raise

    def unacked(self, name: str, queue: str) -> int:
        for row in self.lab.ctl(name, "-q", "list_queues", "name", "messages_unacknowledged").splitlines():
            if row.split("\t")[0] == queue:
                return int(row.split("\t")[1])
        raise KeyError(queue)

    def converge(self) -> None:
        """Waits until what is in the log now is safe and applied, on both."""
        try:
            in_sync(self.lab)
            all_applied(self.lab, self.primary, self.backup)
        except AssertionError:
            keys = ("role", "end", "safe", "applied", "reason")
            pytest.fail(f"the logs do not converge: {[{k: self.lab.status(n).get(k) for k in keys} for n in (self.primary, self.backup)]}")

    def finish(self) -> None:
        """Ends the process after FINISH_S, with what its threads do: a close that the door does not answer would last."""
        faulthandler.dump_traceback_later(FINISH_S, exit=True)
        try:
            for connection in self._connections:
                if connection.is_open:
                    connection.close()
            assert self.pids() == self._pids, "a sidecar was restarted"
            self.converge()
            self._delete_queues()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _delete_queues(self) -> None:
        """Each queue that is left costs the pair a look in turn, as long as it lives."""
        with suppress(AMQPError), pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
            channel = connection.channel()
            for name in self._named:
                channel.queue_delete(name)
