"""Batch reads, streaming queries and the pipeline on a standalone cluster, whose executors and workers are killed while they read."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from receive_queues import ReceiveQueue, transaction
from standalone import Cluster, pipeline_config
from test_pipeline_job import begin, pairs, start_job, table, wait_for_version

from lrq_ha.spark.pipeline import store

pytestmark = [pytest.mark.broker, pytest.mark.full, pytest.mark.timeout(1800), pytest.mark.proves("G6")]

Make = Callable[..., ReceiveQueue]

ROWS = 4_000
#: Arguments: settings of Spark and options of the source as JSON, a folder. Each partition says in the folder that it has begun.
BATCH = """
import json, sys, time, uuid
from pathlib import Path
from lrq_ha.spark.session import session

settings, options, folder = json.loads(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])

def take(batches):
    for batch in batches:
        (folder / f"begun-{uuid.uuid4()}").touch()
        time.sleep(1.0)
        yield batch

with session(settings=settings) as spark:
    entries = spark.read.format("lrq").options(**options).load().select("sequence").mapInArrow(take, "sequence BIGINT")
    print(json.dumps(sorted(row.sequence for row in entries.collect())))
"""
#: The rows of each batch go into a file with the batch's number.
STREAM = """
import json, sys
from pathlib import Path
from lrq_ha.spark.session import session

settings, options, folder = json.loads(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])

def take(batch, number):
    rows = [row.sequence for row in batch.select("sequence").collect()]
    (folder / f"batch-{number}").write_text(json.dumps(rows))

with session(settings=settings) as spark:
    entries = spark.readStream.format("lrq").options(**options).load()
    query = entries.writeStream.foreachBatch(take).option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()
    query.awaitTermination()
"""
#: Prints the lines about executors, as JSON.
CHECK = """
import json, sys
from lrq_ha.spark import check
from lrq_ha.spark.session import session

with session(settings=json.loads(sys.argv[1])) as spark:
    print(json.dumps(check(spark, json.loads(sys.argv[2])["nodes"])))
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "cluster")
    yield made
    made.end()


def start(program: str, cluster: Cluster, options: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, json.dumps(cluster.settings), json.dumps(options), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(folder: Path, pattern: str, count: int, job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while len(list(folder.glob(pattern))) < count:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end(job: subprocess.Popen[str]) -> str:
    try:
        said, errors = job.communicate(timeout=900)
    finally:
        job.kill()
    assert job.returncode == 0, errors
    return said


def test_each_executor_is_looked_at(nodes: str, cluster: Cluster, tmp_path: Path) -> None:
    lines: list[str] = json.loads(end(start(CHECK, cluster, {"nodes": nodes}, tmp_path)))
    assert [line.partition(" ")[0] for line in lines] == ["this", "executor", "executor"]
    assert len({line.partition(":")[0] for line in lines}) == 3
    assert all("; packages as here; clock " in line for line in lines[1:])
    assert all(line.endswith(" takes readers") for line in lines)


def test_a_batch_read(nodes: str, receive_queue: Make, cluster: Cluster, tmp_path: Path) -> None:
    """An executor is killed in the middle of a partition, and then a worker. Takes about a minute: Spark runs on five JVMs."""
    queue = receive_queue()
    queue.write_burst(queue.batch(*(transaction(n) for n in range(first, first + 20))) for first in range(1, ROWS, 20))
    job = start(BATCH, cluster, {"nodes": nodes, "subscribe": queue.name, "minPartitions": "8"}, tmp_path)
    wait_for(tmp_path, "begun-*", 1, job)
    cluster.kill_executor()
    wait_for(tmp_path, "begun-*", 4, job)
    cluster.kill_worker()
    assert json.loads(end(job)) == list(range(1, ROWS + 1))


def test_a_streaming_query(nodes: str, receive_queue: Make, cluster: Cluster, tmp_path: Path) -> None:
    """An executor is killed while batches are read, and then a worker. Takes about a minute: Spark runs on five JVMs."""
    queue = receive_queue()
    queue.write_burst(queue.batch(*(transaction(n) for n in range(first, first + 20))) for first in range(1, ROWS, 20))
    job = start(STREAM, cluster, {"nodes": nodes, "subscribe": queue.name, "minPartitions": "4", "maxEntriesPerTrigger": "200"}, tmp_path)
    wait_for(tmp_path, "batch-*", 3, job)
    cluster.kill_executor()
    wait_for(tmp_path, "batch-*", 8, job)
    cluster.kill_worker()
    end(job)
    batches = sorted(tmp_path.glob("batch-*"), key=lambda path: int(path.name.removeprefix("batch-")))
    assert [n for path in batches for n in json.loads(path.read_text())] == list(range(1, ROWS + 1))


def test_the_pipeline(spark: SparkSession, nodes: str, receive_queue: Make, cluster: Cluster, tmp_path: Path) -> None:
    """An executor is killed after some versions, and then a worker. Takes about a minute: Spark runs on five JVMs."""
    queue, path = receive_queue(), tmp_path / "tables"
    begin(queue)
    pairs(queue, range(4, 804))
    config = tmp_path / "pipeline.toml"
    config.write_text(pipeline_config(cluster, nodes, queue.name, path, entries=200, partitions=4, buckets=2))
    job = start_job(config, "--once")
    faults = [(2, cluster.kill_executor), (4, cluster.kill_worker)]
    for version, fault in faults:
        wait_for_version(job, path, version)
        fault()
    said = job.communicate(timeout=900)[1]
    assert job.returncode == 0, said
    expected = {f"k{n % 50}": n for n in range(4, 804)}
    assert (table(spark, path), table(spark, path, "u")) == (expected, expected)
    assert store.list_versions(path) == list(range(1, len(store.list_versions(path)) + 1))
