"""More sessions with other sites than a connection to a broker has channels for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from load import eventually, told
from patience import PATIENT_DOOR
from test_sites import Source, arrived, follows, fresh

from broker_plugin.amqp.connection import Channel, Connection
from lrq_ha.lab import Lab
from lrq_ha.publisher import FullSyncContext, FullSyncRequest

pytestmark = pytest.mark.broker

CHANNEL_MAX = 8
CLIENTS = 6  # each reads one view for a site, and two in a full sync


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    sites = {"east": ["west", "north"], "west": [], "north": []}
    folder = tmp_path_factory.mktemp("channels") / "lab"
    with Lab({"east": 1, "west": 1, "north": 1}, folder, sites=sites, door=PATIENT_DOOR, settings={"channel_max": str(CHANNEL_MAX)}) as found:
        yield found


class Held(Source):
    """A source whose full syncs wait for `go`."""

    def __init__(self, lab: Lab, client_name: str, go: threading.Event) -> None:
        self._go = go
        super().__init__(lab, client_name)

    def _provide(self, request: FullSyncRequest, context: FullSyncContext) -> None:
        self._go.wait(600)
        super()._provide(request, context)


@pytest.mark.quick
def test_each_session_gets_its_turn(lab: Lab) -> None:
    """Their primary crashed, and again at each promotion."""
    go = threading.Event()
    epoch = told(lab, "e1")["epoch"]
    try:
        sources = [Held(lab, fresh(f"crowd{number}"), go) for number in range(CLIENTS)]

        def problems(site: str) -> list[str]:
            return [client["problem"] for client in lab.status("e1")["sessions"][site]["clients"].values() if client["problem"]]

        def lacks_channels(site: str) -> bool:
            return any("all 8 of the connection are in use" in problem for problem in problems(site))

        for site in ("west", "north"):
            eventually(f"a session with {site} to say what it lacks", partial(lacks_channels, site))
    finally:
        go.set()
    for source in sources:
        follows(lab, source.client_name, "west", "north")
        source.send(3, "west", "north")
    for source in sources:
        source.finish()
        for node in ("w1", "n1"):
            arrived(lab, node, source)
    assert told(lab, "e1")["epoch"] == epoch
    assert problems("west") == problems("north") == []


def test_a_channel_whose_opening_was_given_up(lab: Lab) -> None:
    """It was in use for good."""

    async def go() -> Channel:
        connection = await Connection.open(lab.nodes["e1"].admin)
        try:
            for _ in range(CHANNEL_MAX):
                opening = asyncio.create_task(connection.channel())
                await asyncio.sleep(0)
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
            channel = await connection.channel()
        finally:
            await connection.close()
        return channel

    assert asyncio.run(go()).number == 1
