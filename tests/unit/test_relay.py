"""A connection whose client has vanished, or hears nothing of its broker for a while."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from test_publishing import Connection

from broker_plugin import frames
from broker_plugin.flow import Flow
from broker_plugin.from_broker import FromBroker
from broker_plugin.relay import LEAVE_POLL_S, Relay
from lrq_ha.replication.errors import LrqError, NotPrimary


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
