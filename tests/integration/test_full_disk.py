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
from contextlib import contextmanager
from pathlib import Path

import pika
import pytest
from history import exactly
from load import command, consume, declare, depth, eventually, in_sync, line_of, primary_of, same_logs, set_up, told
from test_coordination import TTL_S, history, in_record, record

from lrq_ha.lab import Lab, etcd
from lrq_ha.lab.tools import find_tool
from lrq_ha.publisher import Confirm, Publisher
from lrq_ha.publisher.errors import NackedError

pytestmark = pytest.mark.broker

DISK_BYTES = 192 << 20
LOG_BYTES_MAX = 16 << 20
SETTINGS = f"log_bytes_max = {LOG_BYTES_MAX}\nbackup_timeout_s = 1.0\n"
SIZE = 20_000
"""Bytes of a message."""
CONFIRMED_S = 2.0  # longer than a confirm takes


def mount(directory: Path) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system of its own can be mounted here: {done.stderr.strip()}")


@contextmanager
def disks(lab: Lab) -> Iterator[None]:
    """Each node's data is on a disk of its own meanwhile."""
    if os.geteuid():
        pytest.skip("only root may mount a file system")
    mounted: list[Path] = []
    try:
        for name in lab.nodes:
            mount(disk(lab, name))
            mounted.append(disk(lab, name))
        yield
    finally:
        for each in mounted:
            subprocess.run(["umount", "--lazy", str(each)], check=True)


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab({"east": 2}, tmp_path_factory.mktemp("full-disk") / "lab", broker_version)
    set_up(lab, SETTINGS)
    with disks(lab), lab:
        yield lab


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


@contextmanager
def alarm(lab: Lab, name: str) -> Iterator[None]:
    """Meanwhile a node's broker has a disk alarm."""
    filler = fill(lab, name, 20 << 20)
    try:
        lab.ctl(name, "set_disk_free_limit", "30MB")  # it looks now
        yield
    finally:
        filler.unlink()
        lab.ctl(name, "set_disk_free_limit", "10MB")


class Source:
    """A publisher of numbered messages to a queue of its own."""

    def __init__(self, lab: Lab, queue: str) -> None:
        self.queue = f"{queue}-{time.time_ns()}"
        declare(lab.nodes[primary_of(lab)].door, self.queue)
        self.confirms: list[Confirm] = []
        self.refused: list[int] = []
        self._publisher = Publisher([node.door for node in lab.nodes.values()], self.queue, confirm_timeout_s=200)

    def send(self, count: int) -> list[Confirm]:
        """`count` more messages."""
        first = len(self.confirms)
        for number in range(first, first + count):
            self.confirms.append(self._publisher.publish("", self.queue, b"%d" % number + b" " * SIZE, pika.BasicProperties(delivery_mode=2)))
        return self.confirms[first:]

    def close(self) -> None:
        """All of it is answered: confirmed, or refused by a broker that could not write."""
        self.refused = [number for number, confirm in enumerate(self.confirms) if not _confirmed(confirm)]
        self._publisher.close()


def _confirmed(confirm: Confirm) -> bool:
    try:
        confirm.result(200)
    except NackedError:
        return False
    return True


def everything_is_there(lab: Lab, source: Source) -> None:
    """Both nodes are in sync and hold each message that was confirmed, once and in order; one that was refused perhaps.

    What the primary holds its door tells: a broker that was started again may hold copies beside, which no client gets, and nobody sweeps there.
    """
    primary, backup = in_sync(lab, applied=True)
    every = len(source.confirms)

    def held() -> int:
        return depth(lab.nodes[backup].broker, source.queue)

    def holds(least: int, most: int) -> None:
        eventually(f"{most} at {backup}", lambda: least <= held() <= most, seen=lambda: (held(), row(lab, backup)))

    holds(every - len(source.refused), every)
    there = consume(lab.nodes[primary].door, source.queue, held())
    exactly(there, sorted(set(there)))
    exactly(sorted(set(range(every)) - set(there) - set(source.refused)), [])
    holds(0, 0)
    same_logs(lab)


def row(lab: Lab, name: str) -> str:
    """What `lrq-ha list` says of a node."""
    return line_of(name, command("list", lab=lab)[1])


@pytest.fixture(scope="module")
def coordinated(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if find_tool(etcd.KEY) is None:
        pytest.skip("etcd is not on this machine: scripts/tool etcd")
    lab = Lab({"east": 2}, tmp_path_factory.mktemp("full-disk-etcd") / "lab", broker_version, coordination={"lease_ttl_s": TTL_S})
    set_up(lab, SETTINGS)
    with disks(lab), lab:
        yield lab


@pytest.mark.parametrize("where", ["backup", "primary"])
def test_no_node_takes_over_for_an_alarm(coordinated: Lab, where: str) -> None:
    """An alarm is no loss of the broker: the lease stays with the primary, whosever disk is full, and everything goes on when there is room (E4)."""
    lab = coordinated
    primary, backup = in_record(lab)
    takeovers = len(history(lab))
    full = {"primary": primary, "backup": backup}[where]
    source = Source(lab, f"kept-{where}")
    for confirm in source.send(50):
        confirm.result(60)
    with alarm(lab, full):
        source.send(50)
        eventually("the alarm to be told", lambda: "its broker takes nothing more for the log" in lab.status(full)["reason"])
        time.sleep(2 * TTL_S)
        assert (primary_of(lab), lab.status(primary)["coordination"]["leader"]) == (primary, primary)
        if where == "backup":
            eventually("the backup to be out of the set", lambda: record(lab)["set"] == [int(primary[1:])])
    source.close()
    everything_is_there(lab, source)
    assert in_record(lab) == (primary, backup)
    assert len(history(lab)) == takeovers


@pytest.mark.quick(only="backup")
@pytest.mark.parametrize("where", ["backup", "primary"])
def test_an_alarm_before_the_disk_is_full(lab: Lab, where: str) -> None:
    """Publishers wait (for the primary's disk) or go on without the backup; `list` says what it is; nothing is lost, and nothing trimmed for it."""
    primary, backup = in_sync(lab, applied=True)
    full = {"primary": primary, "backup": backup}[where]
    source = Source(lab, f"alarm-{where}")
    for confirm in source.send(50):
        confirm.result(60)
    head = told(lab, primary)["head"]
    with alarm(lab, full):
        source.send(50)
        eventually("the alarm to be told", lambda: "its broker takes nothing more for the log" in lab.status(full)["reason"])
        assert "its broker takes nothing more for the log" in row(lab, full)
        waiting = source.send(50)  # the alarm comes a little later: the first ones may have been in time
        if where == "backup":
            eventually("the primary to go on", lambda: all(confirm.done for confirm in waiting))
            assert re.search(rf"{backup} was taken out of the set, as it made no progress", row(lab, primary))
            assert told(lab, primary)["peers"][backup]["log_bytes_left"] > 0
        else:
            time.sleep(CONFIRMED_S)
            assert not waiting[-1].done
        assert told(lab, primary)["head"] == head
    source.close()
    assert "its broker takes nothing" not in row(lab, full)
    everything_is_there(lab, source)
    assert primary_of(lab) == primary
