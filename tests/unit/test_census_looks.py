"""What is said of a queue that is not there: not what a client has done while the broker was asked."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pamqp import commands
from test_publishing import Connection

from broker_plugin.amqp import encode
from broker_plugin.amqp.connection import Address
from broker_plugin.amqp.errors import ChannelClosed
from broker_plugin.amqp.requeue import RequeueDepths
from broker_plugin.apply import partial_queues
from broker_plugin.apply.partial_queues import PartialQueues
from broker_plugin.log.replica import Replica
from broker_plugin.reconcile.reconciler import LengthReconciler, _Clients
from broker_plugin.sweep.keepalive import QueueKeepAlive
from lrq_ha.proto import lrq_pb2 as pb

KEY = ("/", "orders")
BROKER = Address.parse("amqp://a:b@127.0.0.1:1")
DECLARE = encode.encode_method(commands.Queue.Declare(queue="orders", durable=True))
DELETE = encode.encode_method(commands.Queue.Delete(queue="orders"))
NO_QUEUE = ChannelClosed(404, "NOT_FOUND - no queue 'orders' in vhost '/'")
STOPPED = ChannelClosed(404, "NOT_FOUND - queue 'orders' in vhost '/' process is stopped by supervisor")


class Broker:
    """Says that a queue is not there; `deleted`: a client has it deleted meanwhile."""

    def __init__(self, replica: Replica, error: ChannelClosed, deleted: bool) -> None:
        self.replica, self.error, self.deleted = replica, error, deleted
        replica.declared.noted(1, pb.Topology(vhost="/", method=DECLARE))

    async def queue_declare(self, *_: object, **__: object) -> tuple[str, int, int]:
        if self.deleted:
            self.replica.declared.noted(2, pb.Topology(vhost="/", method=DELETE))
        raise self.error


@pytest.mark.parametrize("error", [NO_QUEUE, STOPPED], ids=["no queue", "stopped"])
@pytest.mark.parametrize("deleted", [False, True])
def test_the_census_says_nothing_of_a_queue_that_a_client_has_deleted(error: ChannelClosed, deleted: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of short-lived queues it said that they were not on this broker when it became primary."""

    async def looks() -> None:
        connection = Connection()
        census = LengthReconciler(connection.replica, connection.relay.door, BROKER)
        broker: Any = Broker(connection.replica, error, deleted)

        async def channel(_vhost: str) -> Any:
            return broker

        cast(Any, census)._channel = channel
        for _ in range(3):
            try:
                await census._look(KEY, _Clients())
            except ChannelClosed as failed:
                census._cannot_look(KEY, failed)
        assert not census._gone

    asyncio.run(looks())
    said = "was not on this broker" if error is NO_QUEUE else "cannot be seen now"
    assert [said in record.getMessage() for record in caplog.records] == ([] if deleted else [True])


@pytest.mark.parametrize("deleted", [False, True])
def test_nobody_is_told_to_reinit_a_node_over_a_queue_that_a_client_has_deleted(deleted: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def misses() -> None:
        replica = Connection().replica
        replica.node = cast(Any, SimpleNamespace(log=SimpleNamespace(end=replica.progress.tracker.applied), me=2, name=lambda _: "e2"))
        broker = Broker(replica, NO_QUEUE, deleted)
        with pytest.raises(ChannelClosed):
            await broker.queue_declare()
        QueueKeepAlive(replica, BROKER, RequeueDepths())._missing(KEY, NO_QUEUE)

    asyncio.run(misses())
    assert ("lrq-ha reinit e2" in caplog.text) is not deleted


def test_a_queue_that_is_deleted_before_it_is_emptied_is_not_called_wrong(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.DEBUG)

    class Emptied:
        async def queue_declare(self, *_: object, **__: object) -> tuple[str, int, int]:
            return "orders", 3, 0

        async def queue_purge(self, _queue: str) -> None:
            raise NO_QUEUE

    async def empties() -> None:
        one = PartialQueues(Connection().replica, BROKER)

        async def channel(_vhost: str) -> Any:
            return Emptied()

        monkeypatch.setattr(one, "_channel", channel)
        await one._empty(KEY)

    asyncio.run(empties())
    assert not [record for record in caplog.records if record.name == partial_queues.log.name]
