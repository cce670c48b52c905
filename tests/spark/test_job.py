"""The pipeline job from the queue to the picture, on data small enough to add up by hand."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from receive_queues import ReceiveQueue, transaction

from lrq_ha.lab import Lab
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import FullSyncContext, FullSyncRequest, Publisher
from lrq_ha.receiver import Receiver, Table, TableListener
from lrq_ha.spark.job import cause, main, read_entries

pytestmark = pytest.mark.broker

AIRLINES = [{"carrier": "AA", "name": "American"}, {"carrier": "UA", "name": "United"}]
AIRPORTS = [
    {"faa": "JFK", "name": "Kennedy", "lat": 40.6, "lon": -73.8, "alt": 13, "tz": -5, "dst": "A", "tzone": "America/New_York"}
]
PLANES = [{"tailnum": "N1", "year": None, "seats": 2}]


def payload(table: str, *rows: Mapping[str, object]) -> bytes:
    return json.dumps({"table": table, "rows": rows}).encode()


def flight(number: int, carrier: str, month: int, delay: int | None) -> dict[str, object]:
    return {"id": number, "carrier": carrier, "month": month, "dep_delay": delay, "time_hour": "2013-01-01T10:00:00Z"}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lrq_ha.spark.job", *map(str, arguments)], capture_output=True, text=True, timeout=500
    )


def test_the_job(nodes: str, receive_queue: Callable[..., ReceiveQueue], tmp_path: Path) -> None:
    queue = receive_queue()
    tables = [payload("airlines", *AIRLINES), payload("airports", *AIRPORTS), payload("planes", *PLANES)]
    batches = [
        queue.batch(transaction(1, [], kind=pb.SNAPSHOT_SYNC, request="r")),
        queue.batch(transaction(2, tables, kind=pb.SNAPSHOT_SYNC, request="r")),
        queue.batch(transaction(3, [], kind=pb.LAST_FULL_SYNC_ENTRY, request="r")),
        queue.batch(transaction(4, [payload("flights", flight(0, "AA", 1, 1), flight(1, "AA", 1, 1), flight(2, "UA", 2, -3))])),
        queue.batch(
            transaction(5, [payload("flights", flight(3, "AA", 2, 2), flight(4, "UA", 2, None), flight(5, "XX", 3, None))])
        ),
        queue.batch(transaction(6, [payload("flights", flight(0, "AA", 1, 3))])),
    ]
    queue.write(*batches, *batches[3:5])  # a repeat must not bring the old delay of flight 0 back
    command = [sys.executable, "-m", "lrq_ha.spark.job", "--nodes", nodes, "--queue", queue.name, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert report == {
        "queues": [queue.name],
        "rows": {"flights": 6, "airlines": 2, "airports": 1, "planes": 1},
        "by_carrier": [
            {"carrier": "AA", "name": "American", "sum": 6, "count": 3, "mean": 2.0},
            {"carrier": "UA", "name": "United", "sum": -3, "count": 1, "mean": -3.0},
            {"carrier": "XX", "name": None, "sum": 0, "count": 0, "mean": None},
        ],
        "by_month": [
            {"month": 1, "sum": 4, "count": 2, "mean": 2.0},
            {"month": 2, "sum": -1, "count": 2, "mean": -0.5},
            {"month": 3, "sum": 0, "count": 0, "mean": None},
        ],
    }
    assert (tmp_path / "out" / "delays.png").read_bytes().startswith(b"\x89PNG")
    assert "American" in done.stdout
    assert nodes.split(":")[2].split("@")[0] not in done.stdout + done.stderr, "a password is shown"


def test_what_is_wrong_is_said_in_one_line(spark: SparkSession, nodes: str) -> None:
    with pytest.raises(PySparkException) as caught:
        read_entries(spark, nodes, ["LRQ_Recv_none_east"], 1).count()
    said = cause(str(caught.value))
    assert said.startswith("lrq_ha.streams.errors.MissingQueue: Queue LRQ_Recv_none_east does not exist in vhost lrq")
    assert "\n" not in said
    assert cause("something else\nin two lines") == "something else\nin two lines"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("matplotlib", "The job draws with matplotlib: .* pip install 'CHECKOUT\\[demo\\]'"),
        ("java", "Spark needs Java 17, which is not on this machine"),
        ("folder", "results.json/out'"),
    ],
)
def test_what_the_machine_lacks_is_said_in_one_line(missing: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").touch()
    out = tmp_path / ("results.json/out" if missing == "folder" else "out")
    without = "import sys; sys.modules['matplotlib'] = None; " if missing == "matplotlib" else ""
    program = f"{without}from lrq_ha.spark.job import main; raise SystemExit(main())"
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {"PATH": str(tmp_path)} if missing == "java" else None
    arguments = ("--nodes", "amqp://127.0.0.1:1", "--queue", "LRQ_Recv_a_east", "--out", str(out))
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 1
    assert re.search(said, done.stderr)
    assert done.stderr.count("\n") == 1


@pytest.mark.quick
def test_without_nodes_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("LRQ_NODES", raising=False)
    with pytest.raises(SystemExit):
        main(["--queue", "LRQ_Recv_a_east", "--out", str(tmp_path)])
    assert "--nodes is missing" in capsys.readouterr().err


def eventually(what: str, done: Callable[[], bool]) -> None:
    """Polls until `done()`: a key that it looks up may not be there yet."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with suppress(KeyError):
            if done():
                return
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within 120 s")


class Flights:
    """A source's application whose flights change; a full sync has them all."""

    def __init__(self, door: str) -> None:
        self._pad = b" " * 100_000
        self._lock = threading.Lock()
        self.delays = dict.fromkeys(range(9), 0)
        self.publisher = Publisher([door], "flights-app", "flights", confirm_timeout_s=60)
        self.publisher.on_full_sync(self._provide)

    def _provide(self, _: FullSyncRequest, context: FullSyncContext) -> None:
        context.transmit(payload("airlines", *AIRLINES))
        for number in self.delays:
            with self._lock:
                context.transmit(payload("flights", flight(number, "AA", 1, self.delays[number])))
        context.complete()

    def change(self, number: int, delay: int) -> None:
        with self._lock:
            self.delays[number] = delay
            self.publisher.transmit_log_entry_message(payload("flights", flight(number, "AA", 1, delay)) + self._pad, ["west"])


@pytest.mark.full
def test_the_job_makes_tables_of_a_queue_that_was_fed_three_times_its_size(tmp_path: Path) -> None:
    """The first snapshot is gone. A minute or more: two groups and a Spark of the test's own."""
    size, queue = 4 << 20, "LRQ_Recv_flights_east"
    lab = Lab({"east": 1, "west": 1}, tmp_path / "lab", sites={"east": ["west"], "west": []})
    lab.prepare()
    for node in lab.nodes.values():
        node.config.write_text(f"{node.config.read_text().rstrip()}\n\n[receive]\nbytes_max = {size}\n")
    with lab:
        source = Flights(lab.nodes["e1"].door)

        def receiving() -> dict[str, Any]:
            return dict(lab.status("w1")["receiving"][queue])

        def is_in_step() -> bool:
            session = lab.status("e1")["sessions"]["west"]["clients"]["flights"]
            settled = session["state"] == "in_log_entry_sync" and session["in_flight_bytes"] == 0 and session["lag_entries"] == 0
            return settled and receiving()["snapshot"]["complete"] and receiving()["demand"] is None

        wholes = set()
        for number in range(3 * size // 100_000):
            source.change(number % 9, number)
            if number % 10 == 9:
                source.publisher.flush(60)
                time.sleep(0.3)  # the sink looks a few times a second
                eventually("the sink to lack nothing", is_in_step)
                wholes.add(receiving()["snapshot"]["whole"])
        source.publisher.flush(60)
        eventually("the sink to lack nothing", is_in_step)
        assert len(wholes) >= 3, "the sink demands full syncs by itself"
        done = run("--nodes", lab.nodes["w1"].broker, "--queue", queue, "--out", tmp_path / "out")
        assert done.returncode == 0, done.stderr
        report = json.loads((tmp_path / "out" / "results.json").read_text())
        assert (report["rows"]["flights"], report["by_carrier"][0]["sum"]) == (9, sum(source.delays.values()))
        with closing(sqlite3.connect(tmp_path / "flights.db")) as connection:
            connection.execute("CREATE TABLE flights (source TEXT, id INTEGER, dep_delay INTEGER, PRIMARY KEY (source, id))")
            connection.execute("CREATE TABLE airlines (source TEXT, carrier TEXT, PRIMARY KEY (source, carrier))")
        listed = [Table("flights", ("id", "dep_delay"), ("id",)), Table("airlines", ("carrier",), ("carrier",))]
        tables = TableListener(lambda: sqlite3.connect(tmp_path / "flights.db", timeout=30), listed)
        with Receiver([lab.nodes["w1"].door], "flights", "late", tables) as receiver:
            receiver.start()
            eventually("the receiver in step", lambda: receiver.status()["east"].consistent)
        with closing(sqlite3.connect(tmp_path / "flights.db")) as connection:
            assert dict(connection.execute("SELECT id, dep_delay FROM flights")) == source.delays
        source.publisher.close(60)
