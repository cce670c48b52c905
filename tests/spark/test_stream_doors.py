"""The streaming source through the doors of a sink: switchovers, kills and restarts of its nodes are no errors, and each row comes once."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lrq_ha.lab import Lab
from lrq_ha.publisher import Publisher
from lrq_ha.spark.options import parse_options
from lrq_ha.spark.stream_reader import LrqStreamReader

pytestmark = [pytest.mark.broker, pytest.mark.proves("G6")]

QUEUE = "LRQ_Recv_app_east"


@pytest.fixture
def sites(broker_version: str, tmp_path: Path) -> Iterator[Lab]:
    with Lab({"east": 1, "west": 2}, directory=tmp_path / "lab", broker=broker_version, sites={"east": ["west"], "west": []}) as lab:
        yield lab


@pytest.fixture
def sole_sink(broker_version: str, tmp_path: Path) -> Iterator[Lab]:
    with Lab({"east": 1, "west": 1}, directory=tmp_path / "lab", broker=broker_version, sites={"east": ["west"], "west": []}) as lab:
        yield lab


def doors(lab: Lab) -> str:
    return ",".join(node.door for name, node in lab.nodes.items() if name.startswith("w"))


class Feed:
    """Entries that are transmitted while a query runs."""

    def __init__(self, lab: Lab) -> None:
        self.sent: list[str] = []
        self._stop = threading.Event()
        self._publisher = Publisher([lab.nodes["e1"].door], producer="app", client_name="app", confirm_timeout_s=120)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._publisher as publisher:
            while not self._stop.wait(0.005):
                self.sent.append(publisher.transmit_log_entry_message(b"x" * 100, ["west"]).replication_id)

    def end(self) -> list[str]:
        self._stop.set()
        self._thread.join()
        return self.sent


def until(what: str, found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not found():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def follow(lab: Lab, faults: list[Callable[[], object]]) -> None:
    """Reads batches while entries are sent and the faults happen, one after the other; then compares."""
    feed = Feed(lab)
    until("nothing was sent", lambda: len(feed.sent) > 20)
    until("no receive queue", lambda: QUEUE in lab.ctl("w1", "list_queues", "-p", "lrq", "name"))
    reader = LrqStreamReader(parse_options({"nodes": doors(lab), "subscribe": QUEUE, "maxEntriesPerTrigger": "200"}))
    given: list[str] = []
    offset: dict[str, dict[str, int]] = reader.initialOffset()
    left = list(faults)
    at = time.monotonic() + 1.0
    thread: threading.Thread | None = None
    deadline = time.monotonic() + 240
    sent: list[str] | None = None
    while sent is None or len(given) < len(sent):
        assert time.monotonic() < deadline, f"{len(given)} of {len(feed.sent)} rows"
        if (thread is None or not thread.is_alive()) and time.monotonic() >= at:
            if left:
                thread = threading.Thread(target=left.pop(0))
                thread.start()
                at = time.monotonic() + 3.0
            elif sent is None:
                sent = feed.end()
        end = reader.latestOffset(offset, reader.getDefaultReadLimit())
        for partition in reader.partitions(offset, end):
            for batch in reader.read(partition):
                given += [one for one, kind in zip(batch["transaction"].to_pylist(), batch["type"].to_pylist()) if kind == "LOG_ENTRY_SYNC"]
        offset = end
    reader.stop()
    assert given == sent


def switch_over(lab: Lab) -> None:
    subprocess.run(
        [sys.executable, "-m", "lrq_ha.cli.main", "switchover", "--group", "west", "--dir", str(lab.directory)],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip


def restart(lab: Lab, target: str) -> None:
    lab.kill(target)
    time.sleep(random.Random(target).uniform(0.0, 0.5))
    lab.start(target)


def test_switchovers_while_a_query_runs(sites: Lab) -> None:
    follow(sites, [lambda: switch_over(sites)] * 2)


def test_kills_while_a_query_runs(sites: Lab) -> None:
    """Each node in turn is killed, and the other one promoted over it."""

    def fail_over() -> None:
        dead = sites.primary("west")
        assert dead is not None
        other = "w2" if dead == "w1" else "w1"
        sites.wait_role(other, "ready")
        sites.kill(dead)
        sites.promote(other, down=[dead])
        sites.start(dead)

    follow(sites, [fail_over, fail_over])


def test_restarts_of_a_sink_of_one_node(sole_sink: Lab) -> None:
    """While it starts, its door refuses clients with 320, and its broker may not know its streams yet."""
    follow(sole_sink, [lambda: restart(sole_sink, "w1"), lambda: restart(sole_sink, "w1.broker"), lambda: restart(sole_sink, "w1.sidecar")])
