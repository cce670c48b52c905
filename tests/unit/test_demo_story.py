"""The demo sees what it says that it sees, outlasts a slow machine, and leaves nothing behind; nor do the generators of the benchmarks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lrq_ha.demo import data, story
from lrq_ha.demo.apps import ConsumerApp
from lrq_ha.demo.story import Demo
from lrq_ha.lab import LabError

ROOT = Path(__file__).parents[2]
GONE_WITHIN_S = 60.0


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    """One that has started nothing."""
    made = Demo.__new__(Demo)
    made.folder, made.apps = tmp_path, {}
    return made


def test_a_message_that_comes_twice_between_two_acks_is_told(tmp_path: Path) -> None:
    app = ConsumerApp([], "flights", 2, tmp_path / "consumer.json")
    channel = SimpleNamespace(basic_ack=lambda tag, multiple: None)
    app._ack(channel, 3, [(1, 0), (2, 0), (1, 1)], 10.0)
    app._ack(channel, 4, [(2, 1)], 11.0)
    assert app.twice == [(1, 10.0, True), (2, 10.0, True)]
    assert app.seen == {1: 10.0, 2: 10.0}


def test_a_connection_that_was_lost_before_the_kill_is_no_failover(demo: Demo) -> None:
    assert demo._confirms_after_loss(30.0) == []
    failovers = [{"lost_at": lost_at, "confirmed_at": lost_at + 1} for lost_at in (10.0, 31.0, 40.0)]
    (demo.folder / "publisher.json").write_text(json.dumps({"failovers": failovers}))
    assert demo._confirms_after_loss(30.0) == [32.0, 41.0]


def test_what_is_not_answered_in_time_is_asked_again(demo: Demo) -> None:
    answers: list[Any] = [LabError("e2 does not answer", retriable=True), ConnectionRefusedError(), False, True]

    def ask() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return bool(answer)

    demo._wait("an answer", ask)
    assert answers == []
    answers.append(LabError("the lab has no node e3"))
    with pytest.raises(LabError, match="no node e3"):
        demo._wait("an answer", ask)


def test_a_promotion_that_comes_too_early_is_asked_for_again(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [LabError("e1 is said to be down, but it answers"), LabError("The sidecar of e2 does not answer", retriable=True)]
    primary: list[str] = []

    def promote(name: str, down: list[str]) -> str:
        if refusals:
            raise refusals.pop(0)
        primary.append(name)
        return "e2 is primary"

    demo.lab = SimpleNamespace(promote=promote, primary=lambda group: primary[0] if primary else None)  # type: ignore[assignment]
    demo._promote()
    assert primary == ["e2"]
    primary.clear()
    monkeypatch.setattr(story, "PROMOTION_TIMEOUT_S", 0.0)
    refusals += [LabError("e2 is not in sync")]
    with pytest.raises(LabError, match="not in sync"):
        demo._promote()


def test_a_kill_takes_the_children_along() -> None:
    """A query's JVM is a child of its process."""
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert runs(child)
    story._kill(process)
    deadline = time.monotonic() + GONE_WITHIN_S
    while runs(child):
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.05)


APPLICATION = """
import sys, time
from pathlib import Path
from lrq_ha.demo.story import Demo
demo = Demo.__new__(Demo)
demo.folder, demo.apps = Path(sys.argv[1]), {}
demo._spawn("consumer", {"nodes": ["amqp://app:secret@127.0.0.1:1"], "queue": "flights"})
print(demo.apps["consumer"].pid, flush=True)
time.sleep(600)
"""
GENERATOR = """
import time
from bench.measure import start
process = start("failover", urls=["amqp://app:secret@127.0.0.1:1"], queue="q", producer="p", size_bytes=10, window=100)
process.stdout.readline()  # it tells once that it has no connection, and tries again and again
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("program", [APPLICATION, GENERATOR], ids=["demo", "bench"])
def test_nothing_outlives_its_parent(program: str, tmp_path: Path) -> None:
    """However that ends. Nor does a process show passwords to whoever lists processes."""
    data.save_flights(tmp_path / "flights", [{"id": 0}])
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert runs(child)
            shown = Path(f"/proc/{child}/cmdline").read_bytes()
            parent.kill()
            deadline = time.monotonic() + GONE_WITHIN_S
            while runs(child):
                assert time.monotonic() < deadline, "it goes on"
                time.sleep(0.05)
        finally:
            parent.kill()
            if runs(child):
                os.kill(child, signal.SIGKILL)
    assert b"secret" not in shown


def runs(pid: int) -> bool:
    """Whether a process is there, and not just nobody's to bury."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
