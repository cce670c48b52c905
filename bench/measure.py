"""What all rows share: figures with their goals, rows and their lines, the generator's processes, the machine's state."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pamqp import commands

from lrq_ha.errors import LrqError
from lrq_ha.lab import Lab
from lrq_ha.lab.files import python_environment
from lrq_ha.lab.keeper import end_with_parent

from . import wire

RESULTS = Path(__file__).parent / "results"
WAIT_S = 120.0
POLL_S = 0.01


@dataclass(frozen=True)
class Figure:
    """A figure of a row's variant, and its goal.

    Attributes:
        name: With its unit last, as "sidecar_us".
        value: What was measured.
        goal: What it is to be at most; None if it has no goal.
        least: The goal is what it is to be at least.
        variant: As "4.3 quorum".
        digits: Decimals that the line shows.
    """

    name: str
    value: float
    goal: float | None = None
    least: bool = False
    variant: str = ""
    digits: int = 2

    @property
    def ok(self) -> bool:
        """Whether the goal is met."""
        return self.goal is None or (self.value >= self.goal if self.least else self.value <= self.goal)

    @property
    def excess(self) -> float:
        """Grows with the distance from the goal: the largest of a name is its worst variant."""
        if not self.goal:
            return -self.value if self.least else self.value
        if self.least:
            return self.goal / self.value if self.value else math.inf
        return self.value / self.goal


@dataclass
class Row:
    """The result of a row.

    Attributes:
        name: As "P1".
        figures: Those of all variants. The line has the worst one of each name.
        details: The rest of the line.
        runs: Every run's raw figures.
        cells: One entry per variant of a row that has many.
    """

    name: str
    figures: list[Figure]
    details: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    cells: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every variant meets every goal."""
        return all(figure.ok for figure in self.figures)

    def worst(self) -> list[Figure]:
        """Of each name the figure that is farthest from its goal."""
        found: dict[str, Figure] = {}
        for figure in self.figures:
            if figure.name not in found or figure.excess > found[figure.name].excess:
                found[figure.name] = figure
        return list(found.values())

    def line(self) -> str:
        """The line that is printed."""
        worst = self.worst()
        shown = " ".join(f"{figure.name}={figure.value:.{figure.digits}f}" for figure in worst)
        goals = "/".join(f"{figure.goal:g}" for figure in worst if figure.goal is not None) or "none"
        return f"{self.name} {shown} goal={goals} {'ok' if self.ok else 'short'} {self.details}"

    def save(self) -> None:
        """Writes results/NAME.json."""
        RESULTS.mkdir(exist_ok=True)
        figures = [asdict(figure) | {"ok": figure.ok} for figure in self.figures]
        text = json.dumps({"line": self.line(), "figures": figures, "machine": machine(), "cells": self.cells, "runs": self.runs}, indent=1)
        (RESULTS / f"{self.name}.json").write_text(text + "\n")


def machine() -> dict[str, Any]:
    """What of the machine matters to a figure, and the day."""
    return {
        "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "load": os.getloadavg(), "python": platform.python_version(),
        "kernel": platform.release(),
    }  # fmt: skip


def note(text: str) -> None:
    """Progress, on stderr: stdout has the rows' lines only."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def start(kind: str, **settings: Any) -> subprocess.Popen[str]:
    """Starts a generator, which ends with the calling thread. Its settings go by stdin, as they hold passwords."""
    process = subprocess.Popen([sys.executable, "-m", "bench.generator", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               cwd=Path(__file__).parents[1], preexec_fn=end_with_parent)
    if process.stdin is not None:
        process.stdin.write(json.dumps(settings) + "\n")
        process.stdin.flush()
    return process


def finish(process: subprocess.Popen[str], timeout_s: float = WAIT_S) -> dict[str, Any]:
    """The last line of a generator that ends by itself.

    Raises:
        LrqError: It failed; it has said why on stderr.
    """
    output, _ = process.communicate(timeout=timeout_s)
    if process.returncode:
        raise LrqError("The load generator failed", todo="See its error above")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


@contextmanager
def ready(kind: str, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A generator that has connected and waits for `go`. It ends with this context, and closes its connections no earlier.

    Raises:
        LrqError: It failed; it has said why on stderr.
    """
    with started(kind, **settings) as process:
        read(process)
        yield process
        if process.stdin is not None:
            process.stdin.close()
        if process.wait(WAIT_S):
            raise LrqError("The load generator failed", todo="See its error above")


@contextmanager
def started(kind: str, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A generator, which ends with this context at the latest."""
    process = start(kind, **settings)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def go(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Lets a generator that is `ready` do its work; returns its figures. Its connections stay."""
    tell(process)
    return read(process)


def tell(process: subprocess.Popen[str]) -> None:
    """The line that a generator waits for."""
    if process.stdin is not None:
        process.stdin.write("\n")
        process.stdin.flush()


def read(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of a generator."""
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        raise LrqError("The load generator failed", todo="See its error above")
    told: dict[str, Any] = json.loads(line)
    return told


def percentile(ordered: list[float], share: float) -> float:
    """The value of an ascending list below which so large a share of it is; 0 if it is empty."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def run_command(lab: Lab, *arguments: str, timeout_s: float = WAIT_S) -> str:
    """Runs `lrq-ha` beside a lab; returns its output. Raises LrqError if it fails."""
    command = [sys.executable, "-m", "lrq_ha.cli.main", *arguments, "--dir", str(lab.directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=python_environment(), timeout=timeout_s)
    if done.returncode:
        raise LrqError(f"lrq-ha {arguments[0]} failed: {(done.stderr + done.stdout).strip()}")
    return done.stdout.strip()


@contextmanager
def repeated(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Calls `look` in a thread, again and again, while the context is open."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(every_s):
            look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def memory_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def declare(url: str, queue: str, kind: str) -> None:
    """Declares a durable queue."""
    connection = wire.Raw(url)
    connection.socket.settimeout(WAIT_S)
    connection.call(commands.Queue.Declare(queue=queue, durable=True, arguments={"x-queue-type": kind}))
    connection.close()


def delete(url: str, queue: str) -> None:
    """Deletes a queue and returns when it is gone."""
    connection = wire.Raw(url)
    connection.socket.settimeout(WAIT_S)
    connection.call(commands.Queue.Delete(queue=queue))
    connection.close()


@contextmanager
def asking(url: str, queue: str) -> Iterator[Callable[[], int]]:
    """A function that tells how many messages of a queue no consumer holds. One connection: logging in costs the broker more than asking."""
    connection = wire.Raw(url)
    connection.socket.settimeout(WAIT_S)

    def ask() -> int:
        state = connection.call(commands.Queue.Declare(queue=queue, passive=True))
        return int(state.message_count or 0) if isinstance(state, commands.Queue.DeclareOk) else 0

    try:
        yield ask
    finally:
        connection.close()


def until(what: str, done: Callable[[], bool], timeout_s: float = WAIT_S) -> float:
    """Polls until `done()`; returns the seconds it took.

    Raises:
        LrqError: It has not come true in time.
    """
    began = time.monotonic()
    while True:
        try:
            if done():
                return time.monotonic() - began
        except (LrqError, OSError):
            pass
        if time.monotonic() - began > timeout_s:
            raise LrqError(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)


def applied(lab: Lab, timeout_s: float = WAIT_S) -> float:
    """Waits until every node has applied all of the log; returns the seconds."""
    end = max(lab.status(name)["end"] for name in lab.nodes)
    return until("applied everywhere", lambda: all(lab.status(name)["applied"] >= end for name in lab.nodes), timeout_s)
