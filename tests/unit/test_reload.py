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


def test_limits_of_the_door_count_at_once(tmp_path: Path) -> None:
    """A limit goes both ways, what has to wait is told beside it, and an error in the file changes neither."""

    async def go() -> None:
        file = tmp_path / "e1.toml"

        def write(door: str, more: str = "") -> None:
            file.write_text(MINIMAL.replace("[http]", f"{door}\n[http]") + more)

        write("")
        process = Process(load(file), file)
        usual = process.config.door
        limits = "questions_max = 200\nhandshake_timeout_s = 3.0\nunfinished_bytes_max = 2000000\nconnections_max = 7"
        write(limits, '[replication]\nmode = "strict"\n')
        can_be_used, text = await process.reload()
        assert can_be_used
        now = "door.unfinished_bytes_max, door.questions_max, door.handshake_timeout_s count from now on"
        assert f"{now}; a restart changes door.connections_max, replication.mode" in text
        door = process.door.config
        assert (door.questions_max, door.handshake_timeout_s, door.connections_max) == (200, 3.0, usual.connections_max)
        assert (process.door.unfinished.limit, process.config.door) == (2_000_000, door)
        assert process.status()["pending_restart"] == ["door.connections_max", "replication.mode"]
        write("questions_max = 0")
        assert not (await process.reload())[0]
        assert process.door.config.questions_max == 200
        write("questions_max = 10000")
        assert (await process.reload())[0]
        assert process.config.door == usual
        assert process.status()["pending_restart"] == []

    asyncio.run(go())


def test_a_limit_that_needs_a_larger_log_waits_for_it(tmp_path: Path) -> None:
    file = tmp_path / "e1.toml"
    file.write_text(MINIMAL + "[replication]\nlog_bytes_max = 1100000000\n")
    found = ConfigFile(file, load(file))
    file.write_text(MINIMAL.replace("[http]", "message_bytes_max = 200000000\n[http]") + "[replication]\nlog_bytes_max = 2200000000\n")
    before = found.config
    can_be_used, text = found.look()
    assert (can_be_used, found.pending) == (True, ["door.message_bytes_max", "replication.log_bytes_max"])
    assert "not all can be changed without a restart" in text
    assert found.config is before


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
