"""Of which declarations the broker is asked whether what they name is still there."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest
from pamqp import commands
from test_publishing import FIRST, Connection

from broker_plugin.amqp import encode
from broker_plugin.amqp.frames import EXCHANGE_DECLARE, EXCHANGE_DELETE, QUEUE_DECLARE
from broker_plugin.door.broker_reader import BrokerReader
from broker_plugin.methods import declare as methods_declare
from broker_plugin.methods import declare_rules
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.applied import AppliedTracker

ENTRIES = {
    "queue": encode.encode_method(commands.Queue.Declare(queue="queue", durable=True)),
    "none": encode.encode_method(commands.Queue.Declare(queue="none", durable=True, arguments={"x-lrq-replicate": "none"})),
    "exchange": encode.encode_method(commands.Exchange.Declare(exchange="exchange", durable=True)),
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
        return await methods_declare._went(connection.relay, kind, name, declare_rules.Replicate(entry=entry, may_have_gone=may_have_gone))

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
        logged = encode.encode_method(method)
        binding = encode.encode_method(commands.Exchange.Bind(source="amq.topic", destination="exchange"))
        for sequence, entry in enumerate((logged, binding), 1):
            declared.noted(sequence, pb.Topology(vhost="/", method=entry))
        if not auto_delete:
            method.durable = True
        payload = encode.encode_method(method)
        action = declare_rules.classify(relay, relay.channel(1), EXCHANGE_DECLARE, payload, method)
        assert isinstance(action, declare_rules.Replicate)
        assert action.may_have_gone == auto_delete
        relay.door.exchange_changed = lambda *_: None
        methods_declare._log_deletion(relay, EXCHANGE_DELETE, "exchange", action)

    asyncio.run(declare())
    [record] = [record for record in caplog.records if "exchange" in record.getMessage()]
    assert record.levelno == (logging.INFO if auto_delete else logging.WARNING)
    assert ("declared otherwise" in record.getMessage()) is not auto_delete


CANCEL = encode.method_frame(1, commands.Basic.Cancel("c", nowait=True))
DELETE = {
    False: encode.method_frame(1, commands.Queue.Delete(queue="orders")),
    True: encode.method_frame(1, commands.Queue.Delete(queue="orders", nowait=True)),
}
DELETE_OK = encode.method_frame(1, commands.Queue.DeleteOk(3))
CLOSE = encode.method_frame(1, commands.Channel.Close(404, "gone", 0, 0))


@pytest.mark.parametrize("behind", [CANCEL, CLOSE])
@pytest.mark.parametrize("nowait", [False, True])
@pytest.mark.parametrize("in_one", [False, True])
def test_nothing_overtakes_the_answer_to_a_declaration_on_its_channel(behind: bytes, nowait: bool, in_one: bool) -> None:
    """A client that closes its channel when its consumer is cancelled saw its own queue.delete fail: the answer waits until its entry is safe."""

    async def delete() -> None:
        connection = Connection()
        relay, replica, client, broker = connection.relay, connection.replica, connection.client, connection.broker
        replica.progress.tracker = AppliedTracker(FIRST - 1)
        door: Any = relay.door
        door.alarmed, door.forget_decisions = lambda: False, lambda: None
        relay.client_data(encode.method_frame(2, commands.Channel.Open()) + DELETE[nowait])
        while DELETE[False] not in broker.data:
            await asyncio.sleep(0)
        connection.log_is_safe = False
        client.data = b""
        for data in (DELETE_OK + behind,) if in_one else (DELETE_OK, behind):
            relay.broker_data(data)
        relay.broker_data(encode.method_frame(2, commands.Channel.OpenOk()))
        for _ in range(20):
            await asyncio.sleep(0)
            replica.flush()
        assert client.data == encode.method_frame(2, commands.Channel.OpenOk())
        replica.progress.safe_advanced(replica.end)
        async with asyncio.timeout(5):
            while relay.from_client.stalled:
                await asyncio.sleep(0)
        assert client.data.removeprefix(encode.method_frame(2, commands.Channel.OpenOk())) == (b"" if nowait else DELETE_OK) + behind
        assert not relay.from_broker.withheld
        assert cast(BrokerReader, relay.from_broker)._withheld_bytes == 0

    asyncio.run(delete())
