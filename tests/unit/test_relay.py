"""A connection whose client has vanished, or hears nothing of its broker for a while."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from pamqp import commands
from test_publishing import Connection, message

from broker_plugin import building, frames
from broker_plugin.flow import Flow
from broker_plugin.from_broker import FromBroker
from broker_plugin.relay import LEAVE_POLL_S, Relay
from lrq_ha.replication.errors import LrqError, NotPrimary


def publish(channel: int, queue: str, body: bytes) -> bytes:
    return building.rechannel(message(queue, b"", True, body)[0], channel)


def test_a_client_that_has_vanished_is_looked_after_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the log gets safe further meanwhile: each time began one more series of looks, which went on to the end."""
    looks: list[Any] = []

    async def vanish() -> None:
        def call_later(after_s: float, look: Any) -> None:
            if after_s == LEAVE_POLL_S:
                looks.append(look)

        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
        relay = Relay.__new__(Relay)
        state = {"client": MagicMock(), "outbox": MagicMock(), "flow": MagicMock(), "from_client": MagicMock(), "replica": MagicMock(), "watch": None}
        door = SimpleNamespace(config=SimpleNamespace(drain_timeout_s=60))
        for name, value in {**state, "door": door, "closed": False, "channels": {}, "timer": None}.items():
            setattr(relay, name, value)
        relay.outbox.__bool__.return_value = True  # type: ignore[attr-defined]
        relay.client_lost()
        for _ in range(10):
            relay.broker_full(False)
        assert len(looks) == 1
        looks.pop()()
        assert len(looks) == 1

    asyncio.run(vanish())


def test_a_client_hears_heartbeats_while_nothing_is_read_from_its_broker() -> None:
    """As more is withheld than may be: the broker's own heartbeats are not read, and the client would take the connection for dead."""
    told: list[bytes] = []
    config = SimpleNamespace(connection_buffer_bytes_max=10, message_bytes_max=100)
    relay = SimpleNamespace(closed=False, client=MagicMock(), broker=MagicMock(), to_client=told.append, outbox=SimpleNamespace(sent_at=0.0))
    relay.frame_max_bytes = frames.FRAME_MAX_BYTES
    relay.broker.is_closing.return_value = False
    relay.door = SimpleNamespace(now=lambda: 0.0, config=config)
    relay.flow = Flow(cast(Relay, relay), heartbeat_s=10)
    relay.from_broker = FromBroker(cast(Relay, relay))
    relay.from_broker.withheld[1] = []
    relay.from_broker._withhold(1, b"x")
    relay.flow.tick(1.0)
    assert told == []
    relay.from_broker._withhold(1, b"x" * 10)
    relay.broker.pause_reading.assert_called_once()
    relay.flow.tick(2.0)
    assert told == [frames.HEARTBEAT_FRAME]


CONSUME = building.method_frame(1, commands.Basic.Consume(queue="q", consumer_tag="c", nowait=True))
WAITS = {  # what the client sends before it reads no more, and then; and the broker's answer, before which nothing more is taken from it
    "a commit": (
        building.method_frame(2, commands.Tx.Select()),
        publish(2, "orders", b"x") + building.method_frame(2, commands.Tx.Commit()),
        building.method_frame(2, commands.Tx.RollbackOk()),
    ),
    "a late tx.select": (publish(2, "orders", b"x"), building.method_frame(2, commands.Tx.Select()), building.ack(2, 1)),
    "a consumer's end": (
        CONSUME + building.method_frame(1, commands.Basic.Cancel(consumer_tag="c")),
        CONSUME,
        building.method_frame(1, commands.Basic.CancelOk(consumer_tag="c")),
    ),
}


@pytest.mark.parametrize("what", WAITS)
def test_while_an_answer_is_waited_for_the_broker_is_read_from_though_the_client_reads_nothing(what: str) -> None:
    """The answer may stand behind deliveries that this client does not read, as it is not taken from before: nobody would ever go on."""
    before, asks, answer = WAITS[what]

    async def scenario() -> None:
        connection = Connection()
        relay = connection.relay
        relay.client_data(building.method_frame(2, commands.Channel.Open()) + before)
        relay.client_full(True)
        assert not connection.broker.reads
        relay.client_data(asks)
        await asyncio.sleep(0.02)
        assert relay.from_client.stalled
        assert connection.broker.reads
        relay.broker_data(answer)
        await asyncio.sleep(0.02)
        assert not relay.from_client.stalled
        assert not connection.broker.reads

    asyncio.run(scenario())


def test_a_commit_that_waits_for_a_declaration_does_not_have_the_broker_read() -> None:
    """Its broker has answered: no need to give the client more than it reads."""
    before, asks, answer = WAITS["a commit"]

    async def scenario() -> None:
        connection = Connection()
        relay, barrier = connection.relay, connection.replica.barrier
        relay.client_data(building.method_frame(2, commands.Channel.Open()) + before)
        relay.client_full(True)
        relay.client_data(asks)
        await asyncio.sleep(0)
        barrier._free.clear()
        relay.broker_data(answer)
        await asyncio.sleep(0.02)
        assert relay.from_client.stalled
        assert not connection.broker.reads
        barrier._free.set()
        await asyncio.sleep(0.02)
        assert not relay.from_client.stalled

    asyncio.run(scenario())


@pytest.mark.parametrize(("error", "code"), [(ValueError("hunter2"), 541), (NotPrimary("it is not"), 320), (LrqError("no"), 541)])
def test_what_fails_in_the_background_ends_the_connection(error: Exception, code: int, caplog: pytest.LogCaptureFixture) -> None:
    """Its client would wait forever; and nobody would hear why."""

    async def fail() -> None:
        raise error

    async def scenario() -> None:
        connection = Connection()
        relay: Any = connection.relay
        relay.close_client = MagicMock()
        relay.spawn(fail())
        for _ in range(3):
            await asyncio.sleep(0)
        assert relay.close_client.call_args.args[0] == code

    asyncio.run(scenario())
    assert ("could not be handled: ValueError at" in caplog.text) is isinstance(error, ValueError)
    assert "hunter2" not in caplog.text
