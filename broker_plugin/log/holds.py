"""Holds: the part of the clients' traffic that waits while a queue is moved, or while no publish may pass. No I/O."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import ClassVar

from lrq_ha.replication.queues import QueueKey

from ..amqp.content_header import routes_on
from ..amqp.frames import publish_route
from . import bindings
from .definitions import Definitions


@dataclass(eq=False)
class QueueHold:
    """A queue that is being moved, until `over` is set. Deletions wait; `consumes`: consumers wait too;
    `publishes`: all traffic waits.
    """

    key: QueueKey
    consumes: bool = True
    publishes: bool = True
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def reached_by(self, vhost: str, definitions: Definitions, method: bytes, header: bytes) -> bool:
        """Whether a publish may reach the queue."""
        if not self.publishes or vhost != self.key[0]:
            return False
        route = publish_route(method)
        more = routes_on(header)
        if not route.exchange:
            return more or route.routing_key == self.key[1]
        ways = bindings.binding_table(definitions, self.key[0])
        return self.key[1] in ways.queues(route.exchange, None if more else route.routing_key)


class PublishHold(QueueHold):
    """A hold of all queues: every publish waits, and nothing else."""

    KEY: ClassVar[QueueKey] = ("", "")  # no queue has this key

    def __init__(self) -> None:
        super().__init__(self.KEY, consumes=False)

    def reached_by(self, vhost: str, definitions: Definitions, method: bytes, header: bytes) -> bool:
        return True
