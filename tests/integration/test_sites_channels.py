"""More sessions with other sites than a connection to a broker has channels for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from load import told
from patience import PATIENT_DOOR
from test_sites import Source, arrived, follows, fresh

from broker_plugin.amqp.connection import Channel, Connection
from lrq_ha.lab import Lab

pytestmark = pytest.mark.broker

CHANNEL_MAX = 8
CLIENTS = 6  # each reads one view for a site, and two in a full sync


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    sites = {"east": ["west", "north"], "west": [], "north": []}
    folder = tmp_path_factory.mktemp("channels") / "lab"
    with Lab({"east": 1, "west": 1, "north": 1}, folder, sites=sites, door=PATIENT_DOOR, settings={"channel_max": str(CHANNEL_MAX)}) as found:
        yield found


def test_sessions_share_the_readers_of_a_view(lab: Lab) -> None:
    """Each had a channel of its own for each view. One site is away meanwhile, and needs readers that begin elsewhere."""
    epoch = told(lab, "e1")["epoch"]
    sources = [Source(lab, fresh(f"crowd{number}")) for number in range(CLIENTS)]
    for source in sources:
        follows(lab, source.client_name, "west", "north")
    lab.kill("n1.sidecar")
    for source in sources:
        source.send(3, "west", "north")
    lab.start("n1.sidecar")
    for source in sources:
        source.send(3, "west", "north")
        source.finish()
        for node in ("w1", "n1"):
            arrived(lab, node, source)
    assert told(lab, "e1")["epoch"] == epoch
    problems = [client["problem"] for site in lab.status("e1")["sessions"].values() for client in site["clients"].values()]
    assert set(problems) == {""}


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
