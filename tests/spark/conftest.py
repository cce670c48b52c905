"""One private broker and one Spark session for all tests here; each test writes receive queues of its own, as a sidecar would."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pika
import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed")

from pyspark.sql import SparkSession
from receive_queues import ReceiveQueue

from lrq_ha.lab import Lab
from lrq_ha.spark.session import session

HERE = Path(__file__).parent
_NUMBERS = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    if shutil.which("java") is None:
        pytest.skip("Java is not installed")
    running = session()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab({"west": 1}, directory=tmp_path_factory.mktemp("lab") / "lab", brokers_only=True) as running:
        yield running


@pytest.fixture(scope="session")
def nodes(lab: Lab) -> str:
    return lab.nodes["w1"].broker


@pytest.fixture
def writer(lab: Lab) -> Iterator[pika.BlockingConnection]:
    """The sidecar's part: readers have no right to write."""
    parameters = pika.URLParameters(lab.nodes["w1"].admin)
    parameters.virtual_host = "lrq"
    parameters.heartbeat = 0  # a test is silent for as long as Spark takes
    connection = pika.BlockingConnection(parameters)
    yield connection
    if connection.is_open:
        connection.close()


@pytest.fixture
def receive_queue(writer: pika.BlockingConnection) -> Iterator[Callable[..., ReceiveQueue]]:
    """Makes a receive queue: receive_queue(source="east", **arguments of the stream)."""
    made: list[ReceiveQueue] = []

    def make(source: str = "east", **arguments: object) -> ReceiveQueue:
        made.append(ReceiveQueue(writer, source, f"t{next(_NUMBERS)}", arguments))
        return made[-1]

    yield make
    for queue in made:
        queue.delete()


@pytest.fixture
def listing() -> Iterator[tuple[str, list[Any]]]:
    """Something that answers GET /queues with the first of a list; None: once, as a sidecar that starts does."""
    answers: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            starts = answers[0] is None and answers.pop(0) is None
            body = json.dumps(answers[0]).encode() if self.path == "/queues" and not starts else b""
            self.send_response(200 if body else 503)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", answers
        server.shutdown()
