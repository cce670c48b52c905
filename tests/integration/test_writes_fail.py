"""A broker whose disk is full before RabbitMQ has noticed: its writes fail.

Rules: each node's data is on a small file system of its own, whose size follows what is in it; `disk_free_limit` is so low that no alarm comes first.
It needs the right to mount (root), else it is skipped and says so. Each test leaves the pair whole.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from load import command, eventually, in_sync, primary_of, promote, set_up, switch_over, told
from test_full_disk import DISK_BYTES, Source, disk, disks, everything_is_there, row

from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.proves("G1")]

LEFT_BYTES = 4 << 20
BEFORE, COUNT = 50, 250
#: What a broker does then is not always the same: it stops to answer, ends connections, refuses logins, or ends itself.
TOLD = "its broker has confirmed nothing of the log for|It had been let in before|The broker failed: see its log|cannot be reached"

LOST = "and does not have it in use"
LOST_S = 15.0


@pytest.fixture(scope="module")
def lab(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab({"east": 2}, tmp_path_factory.mktemp("writes-fail") / "lab", broker_version, settings={"disk_free_limit.absolute": "0"})
    set_up(lab, "backup_timeout_s = 1.0")
    with disks(lab), lab:
        yield lab


@contextmanager
def no_room(lab: Lab, name: str) -> Iterator[None]:
    """A node's disk has room for LEFT_BYTES only, meanwhile."""
    def resize(size_bytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size_bytes}", str(disk(lab, name))], check=True)

    resize(shutil.disk_usage(disk(lab, name)).used + LEFT_BYTES)
    try:
        yield
    finally:
        resize(DISK_BYTES)


def start_again(lab: Lab, full: str, other: str) -> None:
    """As an operator does, once there is room. RabbitMQ 3.10 may have spoilt its streams for good: then that node begins with nothing."""
    if lab.nodes[full].broker_pid is not None:
        lab.kill(f"{full}.broker")
    lab.start(full)
    lost_since = time.monotonic()

    def known() -> bool:
        nonlocal lost_since
        if LOST not in lab.status(full)["reason"]:
            lost_since = time.monotonic()
        return lab.status(full)["role"] in ("active", "ready") or time.monotonic() > lost_since + LOST_S

    eventually("it to be back, or to be lost", known)
    if LOST in told(lab, full)["reason"]:
        lab.kill(full)
        if told(lab, other)["role"] != "active":
            promote(lab, other, full)
        for entry in disk(lab, full).iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        lab.start(full)


def rebuild(lab: Lab, full: str, other: str) -> None:
    """As docs/operations/alarms.md says: the broker may have lost messages that it had confirmed to its sidecar when its writes failed (4.3)."""
    if in_sync(lab)[0] == full:
        switch_over(lab, other)
        in_sync(lab)
    code, said = command("reinit", full, "--discard", lab=lab)
    assert code == 0, said


@pytest.mark.parametrize("where", ["backup", "primary, started again", "primary, promoted over"])
def test_writes_that_fail(lab: Lab, where: str) -> None:
    """The operator is told where and why. All that was confirmed is there: on the other node, and on this one once it is started and rebuilt."""
    primary, backup = in_sync(lab, applied=True)
    full = backup if where == "backup" else primary
    source = Source(lab, where.replace(", ", "-").replace(" ", "-"))
    for confirm in source.send(BEFORE):
        confirm.result(60)
    with no_room(lab, full):
        sent = source.send(COUNT)
        eventually("an operator to be told", lambda: bool(re.search(TOLD, row(lab, full))))
        if where == "backup":
            eventually("the primary to go on without it", lambda: all(confirm.done for confirm in sent))
            assert f"{backup} was taken out of the set" in row(lab, primary)
        if where == "primary, promoted over":
            lab.kill(full)
            promote(lab, backup, full)
            eventually("the other to go on", lambda: all(confirm.done for confirm in sent))
    other = primary if full == backup else backup
    start_again(lab, full, other)
    source.close()
    rebuild(lab, full, other)
    everything_is_there(lab, source)
    assert primary_of(lab) == other
