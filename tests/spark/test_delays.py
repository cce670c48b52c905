"""The demo's report, from the queue over the pipeline's tables to the picture, on data small enough to add up by hand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from receive_queues import ReceiveQueue, transaction

from lrq_ha.demo.tables import pipeline_config
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.spark.pipeline.config import read_config
from lrq_ha.spark.pipeline.run import Job
from lrq_ha.spark.session import cause

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


def test_the_report(
    spark: SparkSession, nodes: str, receive_queue: Callable[..., ReceiveQueue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    queue.write(*batches, *batches[3:])  # a repeat must not bring the old delay of flight 0 back
    config = tmp_path / "pipeline.toml"
    config.write_text(pipeline_config(queue.name, tmp_path / "tables"))
    monkeypatch.setenv("LRQ_NODES", nodes)
    Job(spark, read_config(config), print).run(interval_s=None)
    done = subprocess.run(
        [sys.executable, "-m", "lrq_ha.demo.delays", tmp_path / "tables", "--out", tmp_path / "out"], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert report == {
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


def test_what_is_wrong_is_said_in_one_line(spark: SparkSession, nodes: str) -> None:
    with pytest.raises(PySparkException) as caught:
        spark.read.format("lrq").options(nodes=nodes, subscribe="LRQ_Recv_none_east").load().count()
    said = cause(str(caught.value))
    assert said.startswith("lrq_ha.streams.errors.MissingQueue: Queue LRQ_Recv_none_east does not exist in vhost lrq")
    assert "\n" not in said
    assert cause("something else\nin two lines") == "something else\nin two lines"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("matplotlib", "The report needs matplotlib: .* pip install 'CHECKOUT\\[demo\\]'"),
        ("java", "Spark needs Java 17, which is not on this machine"),
        ("folder", "results.json/out'"),
    ],
)
def test_what_the_machine_lacks_is_said_in_one_line(missing: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").touch()
    out = tmp_path / ("results.json/out" if missing == "folder" else "out")
    without = "import sys; sys.modules['matplotlib'] = None; " if missing == "matplotlib" else ""
    program = f"{without}from lrq_ha.demo.delays import main; raise SystemExit(main())"
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {"PATH": str(tmp_path)} if missing == "java" else None
    arguments = (str(tmp_path / "tables"), "--out", str(out))
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 1
    assert re.search(said, done.stderr)
    assert done.stderr.count("\n") == 1
