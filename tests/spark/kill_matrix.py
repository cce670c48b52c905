"""The pipeline on a cluster, with one victim that is killed before random steps of micro-batches. Its tests are in two files, for two shards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pipeline_model import encode
from pyspark.sql import SparkSession
from standalone import Cluster, pipeline_config
from stepped_pipeline import STEPS
from test_pipeline_job import table

from lrq_ha.lab import Lab, LabError
from lrq_ha.lab.files import python_environment
from lrq_ha.lab.keeper import end_with_parent
from lrq_ha.publisher import Publisher
from lrq_ha.spark.pipeline import store
from lrq_ha.spark.pipeline.errors import NoVersion

KILLS = 5
STEP_TIMEOUT_S = 300.0
KEYS = 50
PAUSE_S = 0.1  # between two transactions: a batch on the cluster takes seconds, and has to keep up


@pytest.fixture(scope="module")
def sites(broker_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("matrix") / "lab"
    with Lab({"east": 2, "west": 2}, directory=folder, broker=broker_version, sites={"east": ["west"], "west": []}) as lab:
        yield lab


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "cluster")
    yield made
    made.end()


class Source:
    """An application at east: after a full snapshot, transactions that put one row into t and an equal one into u; a seventh deletes both."""

    def __init__(self, lab: Lab, client_name: str) -> None:
        self.rows: dict[str, int] = {}
        self._stop = threading.Event()
        doors = [node.door for node in lab.nodes.values() if node.group == "east"]
        self._publisher = Publisher(doors, producer=f"{client_name}-app", client_name=client_name, confirm_timeout_s=120)
        self._publisher.on_full_sync(self._provide)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _provide(self, request: Any, context: Any) -> None:
        with self._lock:
            rows = list(self.rows.items())
        for name in "tu":
            context.transmit(encode(name, "put", rows))
        context.complete()

    def _run(self) -> None:
        with self._publisher as publisher:
            number = 0
            while not self._stop.wait(PAUSE_S):
                number += 1
                key, op = f"k{number % KEYS}", "put" if number % 7 else "delete"
                with self._lock:  # before it is sent: a snapshot that begins behind it has it
                    self.rows.pop(key, None)
                    if op == "put":
                        self.rows[key] = number
                for name in "tu":
                    publisher.transmit_log_entry_message(encode(name, op, [(key, number)]), ["west"])

    def end(self) -> dict[str, int]:
        """The rows that the tables must have in the end."""
        self._stop.set()
        self._thread.join()
        return self.rows


class Steps:
    """Takes the names of steps from the stepped pipeline, and answers."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.told: list[str] = []
        self._lock = threading.Lock()
        self._wanted: str | None = None
        self._reached, self._go_on = threading.Event(), threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    @contextmanager
    def before(self, step: str) -> Iterator[None]:
        """Waits until a process is about to take `step`; it goes on at the end of the block."""
        self._reached.clear()
        self._go_on.clear()
        with self._lock:
            self._wanted = step
        try:
            assert self._reached.wait(STEP_TIMEOUT_S), f"no {step}; the last were {self.told[-10:]}"
            yield
        finally:
            self._go_on.set()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._take, args=(connection,), daemon=True).start()

    def _take(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # whoever takes the step may be dead
            step = connection.recv(100).decode()
            with self._lock:
                self.told.append(step)
                wanted = self._wanted == step
                if wanted:
                    self._wanted = None
            if wanted:
                self._reached.set()
                self._go_on.wait(STEP_TIMEOUT_S)
            connection.sendall(b"!")

    def close(self) -> None:
        self._go_on.set()
        self._listener.close()


class Driver:
    """The process of the pipeline, which may be killed and started again."""

    def __init__(self, config: Path, port: int, folder: Path) -> None:
        self._config, self._port, self._log = config, port, folder / "driver.log"
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("stepped_pipeline.py")), str(self._config), str(self._port)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=python_environment(), start_new_session=True, preexec_fn=end_with_parent
            )

    def kill(self) -> None:
        """With its JVM."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def check(self) -> None:
        assert self.process.poll() is None, self._log.read_text()[-3000:]


class Primary:
    """The primary of a group, which may be killed; its backup then takes its place, and it comes back."""

    def __init__(self, lab: Lab, group: str) -> None:
        self._lab, self._group = lab, group
        self._dead = ""

    def kill(self) -> None:
        self._dead = str(self._lab.primary(self._group))
        self._lab.kill(self._dead)

    def mend(self) -> None:
        other = next(name for name, node in self._lab.nodes.items() if node.group == self._group and name != self._dead)
        until(f"{other} is not promoted", lambda: self._lab.primary(self._group) == other or not self._lab.promote(other, down=[self._dead]))
        self._lab.start(self._dead)


def in_sync(lab: Lab, group: str) -> bool:
    primary = lab.primary(group)
    return primary is not None and len(lab.status(primary)["members"]) == 2


def kill_before_any_step(spark: SparkSession, sites: Lab, cluster: Cluster, tmp_path: Path, victim: str) -> None:
    """Kills the driver, an executor, the source's primary or the sink's. In the end, the tables equal the source."""
    random, path, steps = Random(f"{victim} 1"), tmp_path / "tables", Steps()
    client = f"{victim}{time.time_ns()}"  # of its own, so that no job has to read what was before
    source, queue = Source(sites, client), f"LRQ_Recv_{client}_east"
    doors = ",".join(node.door for node in sites.nodes.values() if node.group == "west")
    config = tmp_path / "pipeline.toml"
    config.write_text(pipeline_config(cluster, doors, queue, path, entries=300, partitions=2, buckets=1))
    until("no receive queue", lambda: queue in sites.ctl(str(sites.primary("west")), "list_queues", "-p", "lrq", "name"))
    driver = Driver(config, steps.port, tmp_path)
    primary, sink = Primary(sites, "east"), Primary(sites, "west")
    victims: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "driver": (driver.kill, driver.start),
        "executor": (cluster.kill_executor, lambda: None),
        "primary": (primary.kill, primary.mend),
        "sink": (sink.kill, sink.mend),
    }
    kill, mend = victims[victim]
    try:
        until("no first version", lambda: bool(store.list_versions(path)), driver)
        for step in random.sample(STEPS, KILLS):
            until("the nodes are not in sync", lambda: in_sync(sites, "east") and in_sync(sites, "west"), driver)
            with steps.before(step):
                kill()
            mend()
            versions = len(store.list_versions(path))
            until(f"no version after a kill before {step}", lambda: len(store.list_versions(path)) > versions, driver)  # noqa: B023
        rows = source.end()
        assert len(rows) > KEYS // 2
        until("the tables do not equal the source", lambda: found(spark, path) == (rows, rows), driver, lambda: len(store.list_versions(path)))
    finally:
        source.end()
        driver.kill()
        steps.close()


def found(spark: SparkSession, path: Path) -> tuple[dict[str, int], dict[str, int]]:
    return table(spark, path), table(spark, path, "u")


def until(what: str, holds: Callable[[], bool], driver: Driver | None = None, progress: Callable[[], int] = lambda: 0) -> None:
    """Waits for `holds`, as long as `progress` goes on: a job that was killed five times has much to read."""
    deadline, seen = time.monotonic() + STEP_TIMEOUT_S, progress()
    while not _holds(holds):
        if driver is not None:
            driver.check()
        if (now := progress()) != seen:
            deadline, seen = time.monotonic() + STEP_TIMEOUT_S, now
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def _holds(holds: Callable[[], bool]) -> bool:
    try:
        return holds()
    except (NoVersion, LabError):
        return False
