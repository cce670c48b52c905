"""Open files: each socket of the door has an end that closes it, counts in `door.connections_max`, and leaves some files for HTTP and other nodes."""

from __future__ import annotations

import asyncio
import resource
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_publishing import Socket

from broker_plugin.amqp.frames import PROTOCOL_HEADER
from broker_plugin.door import broker_login
from broker_plugin.door.admission import AdmissionControl
from broker_plugin.door.client_login import ClientLogin
from broker_plugin.door.server import Door
from lrq_ha.sidecar import open_files
from lrq_ha.sidecar.tables import DoorTable


class Transport(Socket):
    """A client's, or a broker's."""

    def set_write_buffer_limits(self, high: int) -> None: ...


class Login:
    """A client that has greeted."""

    def __init__(self) -> None:
        self.admissions = AdmissionControl(10, 0)
        door: Any = SimpleNamespace(
            config=DoorTable(listen="h:1"), admissions=self.admissions, counters={"connections": 0}, broker=None, user_of=lambda _: "", tls=None,
            relay_target=lambda: None,
        )  # fmt: skip
        arrival = self.admissions.come("h", lambda: None)
        assert arrival is not None
        self.client = ClientLogin(cast(Door, door), arrival)
        self.client.connection_made(cast(Any, Transport()))
        self.client.data_received(PROTOCOL_HEADER)


def test_a_connect_to_the_broker_ends_with_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a broker stood still, clients that came and gave up left one each, for as long as the kernel tries; the sidecar ran out of files."""
    ended: list[bool] = []

    async def hangs(*_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    monkeypatch.setattr(broker_login, "connect", hangs)

    async def run() -> None:
        login = Login()
        await asyncio.sleep(0)
        login.client.connection_lost(None)
        await asyncio.sleep(0.01)
        assert ended == [True]
        assert login.admissions.open == 0

    asyncio.run(run())


def test_a_connection_counts_until_its_broker_side_has_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connects(_: object, protocol: asyncio.Protocol, _ends: object) -> None:
        protocol.connection_made(cast(Any, Transport()))

    monkeypatch.setattr(broker_login, "connect", connects)

    async def run() -> None:
        login = Login()
        await asyncio.sleep(0.01)
        broker = login.client.broker
        assert broker is not None
        login.client.connection_lost(None)
        assert login.admissions.open == 1
        broker.connection_lost(None)
        assert login.admissions.open == 0

    asyncio.run(run())


@pytest.mark.parametrize(("allowed", "connections"), [(100_000, 1_000), (2_256, 1_000), (1_100, 422), (200, 75), (1, 1)])
def test_with_few_files_the_door_takes_fewer_connections(
    allowed: int, connections: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Out of files, HTTP answered nobody, and other nodes could not connect."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (allowed, allowed))
    assert open_files.allow_files(1_000) == connections
    assert ("LimitNOFILE" in caplog.text) is (connections < 1_000)
