"""A configuration that has changed while its sidecar runs: an operator is told what counts after a restart. A SIGHUP passed without a line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from node_config import MINIMAL

from lrq_ha.sidecar.config import load
from lrq_ha.sidecar.process import Process
from lrq_ha.sidecar.reload import ConfigFile

PEER = '[[peers]]\nname = "{0}"\nid = {1}\ndoor = "amqp://lrq:hunter2@h{1}:5673"\nhttp = "http://h{1}:8080"\n'


@pytest.mark.parametrize(
    ("after", "pending"),
    [
        (MINIMAL + PEER.format("e2", 2), []),
        (MINIMAL + PEER.format("e2", 2) + '[replication]\nmode = "strict"\nheartbeat_s = 0.5\n', ["replication.mode", "replication.heartbeat_s"]),
        (MINIMAL + PEER.format("e3", 3), ["peers (e2 goes)", "peers (e3 comes)"]),
        (MINIMAL + PEER.format("e2", 2).replace("hunter2", "hunter3"), ["peers.door (e2)"]),
        (MINIMAL.replace("5673", "5674") + PEER.format("e2", 2), ["door.listen"]),
    ],
)
def test_keys_that_wait_for_a_restart(tmp_path: Path, after: str, pending: list[str]) -> None:
    file = tmp_path / "e1.toml"
    file.write_text(MINIMAL + PEER.format("e2", 2))
    found = ConfigFile(file, load(file))
    file.write_text(after)
    can_be_used, text = found.look()
    assert (can_be_used, found.pending) == (True, pending)
    assert all(key in text for key in pending)
    assert "hunter" not in text


def test_a_file_that_would_not_start_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The sidecar says so on SIGHUP and over HTTP, and goes on."""

    async def go() -> None:
        file = tmp_path / "e1.toml"
        file.write_text(MINIMAL)
        process = Process(load(file), file)
        file.write_text(MINIMAL + "[replication]\nmode = 3\n")
        can_be_used, text = await process.reload()
        assert (can_be_used, "would not start again" in text, "replication.mode" in text) == (False, True, True)
        process._reload()
        assert [record.levelname for record in caplog.records if "would not start again" in record.getMessage()] == ["ERROR"]
        file.write_text(MINIMAL + '[replication]\nmode = "strict"\n')
        assert (await process.reload())[0]
        assert process.status()["pending_restart"] == ["replication.mode"]
        file.write_text(MINIMAL)
        assert (await process.reload())[0]
        assert process.status()["pending_restart"] == []

    asyncio.run(go())
