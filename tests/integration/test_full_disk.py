"""A broker whose disk fills up: each node's data is on a small file system of its own.

Rule: it needs the right to mount (root), else it is skipped and says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
from load import command, consume, declare, depth, eventually, in_sync, same_logs, set_up, told

from lrq_ha.lab import Lab
from lrq_ha.publisher import Confirm, Publisher

pytestmark = pytest.mark.broker

DISK_BYTES = 192 << 20
LOG_BYTES_MAX = 16 << 20
SETTINGS = f"log_bytes_max = {LOG_BYTES_MAX}\nbackup_timeout_s = 1.0\n"
SIZE = 20_000
"""Bytes of a message."""


def mount(directory: Path) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system of its own can be mounted here: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if os.geteuid():
        pytest.skip("only root may mount a file system")
    lab = Lab({"east": 2}, tmp_path_factory.mktemp("full-disk") / "lab", broker_version)
    set_up(lab, SETTINGS)
    disks: list[Path] = []
    try:
        for name in lab.nodes:
            mount(disk(lab, name))
            disks.append(disk(lab, name))
        with lab:
            yield lab
    finally:
        for each in disks:
            subprocess.run(["umount", "--lazy", str(each)], check=True)


def disk(lab: Lab, name: str) -> Path:
    return lab.directory / name / "data"


def free(lab: Lab, name: str) -> int:
    return shutil.disk_usage(disk(lab, name)).free


def fill(lab: Lab, name: str, left: int) -> Path:
    """Fills a node's disk up to `left` bytes; returns the file."""
    file = disk(lab, name) / "filler"
    with file.open("ab") as opened:
        while (room := free(lab, name) - left) > 0:
            opened.write(b"\0" * min(room, 1 << 20))
            opened.flush()
    return file


class Source:
    """A publisher of numbered messages to a queue of its own."""

    def __init__(self, lab: Lab, queue: str) -> None:
        self.queue = f"{queue}-{time.time_ns()}"
        declare(lab.nodes[str(lab.primary("east"))].door, self.queue)
        self.confirms: list[Confirm] = []
        self._publisher = Publisher([node.door for node in lab.nodes.values()], self.queue, confirm_timeout_s=200)

    def send(self, count: int) -> list[Confirm]:
        """`count` more messages."""
        first = len(self.confirms)
        for number in range(first, first + count):
            self.confirms.append(self._publisher.publish("", self.queue, b"%d" % number + b" " * SIZE, pika.BasicProperties(delivery_mode=2)))
        return self.confirms[first:]

    def close(self) -> None:
        """All of it is confirmed."""
        for confirm in self.confirms:
            confirm.result(200)
        self._publisher.close()


def everything_is_there(lab: Lab, source: Source) -> None:
    """Both nodes are in sync and hold each message, once and in order."""
    primary, _ = in_sync(lab, applied=True)
    count = len(source.confirms)
    for node in lab.nodes.values():
        eventually(f"all at {node.name}", lambda url=node.broker: depth(url, source.queue) == count)
    assert consume(lab.nodes[primary].door, source.queue, count) == list(range(count))
    same_logs(lab)


def row(lab: Lab, name: str) -> str:
    """What `lrq-ha list` says of a node."""
    said = command("list", lab=lab)[1]
    return next(line for line in said.splitlines() if line.startswith(f"{name} "))


@pytest.mark.parametrize("where", ["backup", "primary"])
def test_an_alarm_before_the_disk_is_full(lab: Lab, where: str) -> None:
    """Publishers wait (for the primary's disk) or go on without the backup; `list` says what it is; nothing is lost, and nothing trimmed for it."""
    primary, backup = in_sync(lab, applied=True)
    full = {"primary": primary, "backup": backup}[where]
    source = Source(lab, f"alarm-{where}")
    for confirm in source.send(50):
        confirm.result(60)
    head = told(lab, primary)["head"]
    filler = fill(lab, full, 20 << 20)
    lab.ctl(full, "set_disk_free_limit", "30MB")  # it looks now
    waiting = source.send(50)
    eventually("the alarm to be told", lambda: "its broker takes nothing more for the log" in lab.status(full)["reason"])
    assert "its broker takes nothing more for the log" in row(lab, full)
    if where == "backup":
        eventually("the primary to go on", lambda: all(confirm.done for confirm in waiting))
        assert re.search(rf"{backup} was taken out of the set, as it made no progress", row(lab, primary))
        assert told(lab, primary)["peers"][backup]["log_bytes_left"] > 0
    else:
        assert not waiting[-1].done
    assert told(lab, primary)["head"] == head
    filler.unlink()
    lab.ctl(full, "set_disk_free_limit", "10MB")
    source.close()
    assert "its broker takes nothing" not in row(lab, full)
    everything_is_there(lab, source)
    assert lab.primary("east") == primary
