"""Of which declarations the broker is asked whether what they name is still there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pamqp import commands
from test_publishing import Connection

from broker_plugin import building, declaring, topology
from broker_plugin.frames import EXCHANGE_DECLARE, QUEUE_DECLARE
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
