"""Of which declarations the broker is asked whether what they name is still there."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from pamqp import commands
from test_publishing import Connection

from broker_plugin import building, declaring, topology
from broker_plugin.frames import EXCHANGE_DECLARE, EXCHANGE_DELETE, QUEUE_DECLARE
from lrq_ha.proto import lrq_pb2 as pb

ENTRIES = {
    "queue": building.encode_method(commands.Queue.Declare(queue="queue", durable=True)),
    "none": building.encode_method(commands.Queue.Declare(queue="none", durable=True, arguments={"x-lrq-replicate": "none"})),
    "exchange": building.encode_method(commands.Exchange.Declare(exchange="exchange", durable=True)),
}


class Asked(Exception):
    pass


@pytest.mark.parametrize(
    ("kind", "name", "entry", "may_have_gone", "asks"),
    [
        (QUEUE_DECLARE, "queue", ENTRIES["queue"], False, False),
        (QUEUE_DECLARE, "queue", b"otherwise", False, True),
        (QUEUE_DECLARE, "unknown", b"otherwise", False, False),
        (QUEUE_DECLARE, "none", b"otherwise", False, False),
        (EXCHANGE_DECLARE, "exchange", ENTRIES["exchange"], False, False),
        (EXCHANGE_DECLARE, "exchange", ENTRIES["exchange"], True, True),
        (EXCHANGE_DECLARE, "exchange", b"otherwise", False, True),
    ],
)
def test_only_of_what_the_log_has_in_other_words_and_all_nodes_have(kind: int, name: str, entry: bytes, may_have_gone: bool, asks: bool) -> None:
    """One with the level `none` may be another node's alone, with what is in it."""

    async def went() -> bool:
        connection = Connection()
        door: Any = connection.relay.door

        async def connect(*_: object, **__: object) -> None:
            raise Asked

        door.vhosts = type("Vhosts", (), {"connection": staticmethod(connect)})
        for sequence, method in enumerate(ENTRIES.values(), 1):
            connection.replica.declared.noted(sequence, pb.Topology(vhost="/", method=method))
        return await declaring._went(connection.relay, kind, name, topology.Replicate(entry=entry, may_have_gone=may_have_gone))

    if asks:
        with pytest.raises(Asked):
            asyncio.run(went())
    else:
        assert asyncio.run(went()) is False


@pytest.mark.parametrize("auto_delete", [True, False])
def test_what_is_said_of_an_exchange_that_has_gone(auto_delete: bool, caplog: pytest.LogCaptureFixture) -> None:
    """One that is declared in the very same words was said to be declared otherwise; an operator could only wonder what had deleted it."""
    caplog.set_level(logging.INFO)

    async def declare() -> None:
        connection = Connection()
        relay: Any = connection.relay
        declared = connection.replica.declared
        method = commands.Exchange.Declare(exchange="exchange", auto_delete=auto_delete)
        logged = building.encode_method(method)
        binding = building.encode_method(commands.Exchange.Bind(source="amq.topic", destination="exchange"))
        for sequence, entry in enumerate((logged, binding), 1):
            declared.noted(sequence, pb.Topology(vhost="/", method=entry))
        if not auto_delete:
            method.durable = True
        payload = building.encode_method(method)
        action = topology.classify(relay, relay.channel(1), EXCHANGE_DECLARE, payload, method)
        assert isinstance(action, topology.Replicate)
        assert action.may_have_gone == auto_delete
        relay.door.exchange_changed = lambda *_: None
        declaring._log_deletion(relay, EXCHANGE_DELETE, "exchange", action)

    asyncio.run(declare())
    [record] = [record for record in caplog.records if "exchange" in record.getMessage()]
    assert record.levelno == (logging.INFO if auto_delete else logging.WARNING)
    assert ("declared otherwise" in record.getMessage()) is not auto_delete
