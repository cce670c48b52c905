"""Spark's own servers from pip's pyspark, each a process on loopback: a standalone cluster, and a Spark Connect server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pyspark

from lrq_ha.lab.files import python_environment
from lrq_ha.lab.keeper import end_with_parent

START_TIMEOUT_S = 180.0
HOST = "127.0.0.1"
_BIN = Path(pyspark.__file__).parent / "bin"
_SHORT_LIFE = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class SparkServer:
    """One process of Spark.

    Args:
        command: Program of pyspark's `bin`, and its arguments.
        log: File for its output.
        ready: What its log says when it is ready.
        settings: More of the environment.
    """

    def __init__(self, command: list[str], log: Path, ready: str, settings: Mapping[str, str] = {}) -> None:
        self.log = log
        environment = python_environment() | {"SPARK_LOCAL_IP": HOST, "PYSPARK_PYTHON": sys.executable, "SPARK_NO_DAEMONIZE": "1"}
        environment |= {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": _SHORT_LIFE, "SPARK_LOCAL_DIRS": str(log.parent), **settings}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [str(_BIN / command[0]), *command[1:]], stdout=output, stderr=output, env=environment, cwd=log.parent, preexec_fn=end_with_parent
            )
        self.said = self._wait(ready)

    def _wait(self, ready: str) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            text = self.log.read_text(errors="replace")
            if found := re.search(ready, text):
                return found[1]
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"{self.process.args!r} is not ready: {text[-3000:]}")
            time.sleep(0.1)

    def children(self) -> list[int]:
        """The processes that it has started."""
        return [int(pid) for task in Path(f"/proc/{self.process.pid}/task").glob("*/children") for pid in task.read_text().split()]

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Cluster:
    """A master and two workers of one core each. What is killed can be started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        master = ["spark-class", "org.apache.spark.deploy.master.Master", "--host", HOST, "--port", "0", "--webui-port", "0"]
        self._master = SparkServer(master, folder / "master.log", r"Starting Spark master at (spark://\S+)")
        self.url = self._master.said
        self.workers: list[SparkServer] = []
        try:
            for _ in range(2):
                self.add_worker()
        except BaseException:
            self.end()
            raise

    @property
    def settings(self) -> dict[str, str]:
        """Spark's settings for a driver."""
        return {
            "spark.master": self.url,
            "spark.driver.host": HOST,
            "spark.driver.bindAddress": HOST,
            "spark.ui.enabled": "false",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": _SHORT_LIFE,
            "spark.sql.shuffle.partitions": "4",
        }

    def add_worker(self) -> None:
        name = f"worker{len(self.workers) + 1}"
        arguments = ["--host", HOST, "--port", "0", "--webui-port", "0", "--cores", "1", "--memory", "1g", "--work-dir", str(self._folder / name)]
        command = ["spark-class", "org.apache.spark.deploy.worker.Worker", *arguments, self.url]
        self.workers.append(SparkServer(command, self._folder / f"{name}.log", "(Successfully registered) with master"))

    def executors(self) -> list[int]:
        """Processes of all executors."""
        return [pid for worker in self.workers for pid in worker.children() if _is_executor(pid)]

    def kill_executor(self) -> None:
        """Kills the youngest executor."""
        with suppress(ProcessLookupError):
            os.kill(max(self.executors()), signal.SIGKILL)

    def kill_worker(self) -> None:
        """Kills the youngest worker; its executor ends with it."""
        self.workers[-1].kill()

    def end(self) -> None:
        """Ends all of it."""
        for pid in self.executors():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for server in (*self.workers, self._master):
            server.kill()


def _is_executor(pid: int) -> bool:
    try:
        return b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def start_connect_server(folder: Path) -> tuple[SparkServer, str]:
    """A Spark Connect server in local mode, and its address."""
    settings = {"spark.connect.grpc.binding.address": HOST, "spark.connect.grpc.binding.port": "0", "spark.ui.enabled": "false"}
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    command = ["spark-submit", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "--master", "local[2]", *options]
    memory = {"SPARK_DAEMON_MEMORY": "1g"}  # it is a driver, too
    server = SparkServer(command, folder / "connect.log", r"Spark Connect server started at: \S*?:(\d+)", memory)
    return server, f"sc://{HOST}:{server.said}"


def pipeline_config(cluster: Cluster, nodes: str, queue: str, path: Path, *, entries: int, partitions: int, buckets: int) -> str:
    """The configuration of a pipeline on a cluster, with tables t and u. `entries`: of a micro-batch, at most."""
    return (
        f'[source]\nnodes = "{nodes}"\nsubscribe = "{queue}"\nmaxEntriesPerTrigger = {entries}\nminPartitions = {partitions}\n'
        + "".join(f'[tables.{name}]\nschema = "k STRING, v INT"\nkey = ["k"]\nbuckets = {buckets}\n' for name in "tu")
        + f'[sink]\npath = "{path}"\n[spark]\n'
        + "".join(f'"{name}" = "{value}"\n' for name, value in cluster.settings.items())
    )
