"""The pipeline's job on real queues: what a run applies, what it says, and what is there after it was killed at any instant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pipeline_model import encode
from pyspark.sql import SparkSession
from receive_queues import ReceiveQueue, transaction

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.spark import tables_at
from lrq_ha.spark.pipeline import history, store
from lrq_ha.spark.pipeline.config import Config
from lrq_ha.spark.pipeline.errors import BadRecord, NoVersion, SchemaChanged, SnapshotGone
from lrq_ha.spark.pipeline.run import Job, main

pytestmark = [pytest.mark.broker]

Make = Callable[..., ReceiveQueue]


def settings(nodes: str, queue: ReceiveQueue, path: Path, **run: Any) -> dict[str, Any]:
    table = {"schema": "k STRING, v INT", "key": ["k"], "buckets": 2}
    return {
        "source": {"nodes": nodes, "subscribe": queue.name, "maxEntriesPerTrigger": 100},
        "tables": {"t": table, "u": table},
        "sink": {"path": str(path)},
        "run": run,
    }


def begin(queue: ReceiveQueue, **rows: int) -> None:
    """A whole snapshot: transactions 1 to 3."""
    queue.write(
        queue.batch(transaction(1, [], kind=pb.SNAPSHOT_SYNC, request="r")),
        queue.batch(transaction(2, [encode("t", "put", list(rows.items()))], kind=pb.SNAPSHOT_SYNC, request="r")),
        queue.batch(transaction(3, [], kind=pb.LAST_FULL_SYNC_ENTRY, request="r")),
    )


def pairs(queue: ReceiveQueue, numbers: Iterable[int]) -> None:
    """Transactions that put one row into t and an equal one into u."""
    queue.write_burst(
        queue.batch(transaction(n, [encode(table, "put", [(f"k{n % 50}", n)]) for table in "tu"])) for n in numbers
    )


def run_once(spark: SparkSession, given: dict[str, Any], *, dry_run: bool = False) -> list[str]:
    lines: list[str] = []
    Job(spark, Config.model_validate(given), lines.append).run(interval_s=None, dry_run=dry_run)
    return lines


def table(spark: SparkSession, path: Path, name: str = "t") -> dict[str, int]:
    return {row.k: row.v for row in tables_at(spark, path)[name].collect()}


def test_runs_that_follow_each_other(spark: SparkSession, nodes: str, receive_queue: Make, tmp_path: Path) -> None:
    queue, path = receive_queue(), tmp_path / "tables"
    begin(queue, a=1, b=2)
    queue.write(queue.batch(transaction(4, [encode("t", "put", [("a", 4)]), encode("t", "delete", [("b", 0)])])))
    given = settings(nodes, queue, path)
    (line,) = run_once(spark, given)
    assert line.startswith("version 1: 3 put, 1 deleted; t in ")
    queue.write(queue.batch(transaction(9, [encode("t", "put", [("c", 9)]), encode("u", "put", [("c", 9)])])))
    (line,) = run_once(spark, given)
    assert line.startswith("version 2: 2 put, 0 deleted; t, u in ")
    assert (table(spark, path), table(spark, path, "u")) == ({"a": 4, "c": 9}, {"c": 9})
    status = json.loads((path / "status.json").read_text())
    assert status["rows"] == {"t": 2, "u": 1}
    assert status["queues"][queue.name] == {"epoch": 257, "sequence": 9, "has_snapshot": True, "open_snapshot": None, "deltas_wait": False}
    assert [(one.version, one.put, one.rows["t"]) for one in history.read_history(path)[0]] == [(1, 3, 1), (2, 2, 2)]
    files = spark.read.parquet(f"{path}/current/t/*.parquet")
    assert sorted((row.queue, row.k, row.v) for row in files.collect()) == [(queue.name, "a", 4), (queue.name, "c", 9)]


@pytest.mark.full
def test_a_dry_run_writes_nothing(spark: SparkSession, nodes: str, receive_queue: Make, tmp_path: Path) -> None:
    queue, path = receive_queue(), tmp_path / "tables"
    begin(queue, a=1, b=2)
    given = settings(nodes, queue, path)
    assert run_once(spark, given, dry_run=True) == [f"would apply 2 rows (t of {queue.name}: 2 put, 0 deleted)"]
    assert not path.exists()
    assert len(run_once(spark, given)) == 1
    assert run_once(spark, given) == run_once(spark, given, dry_run=True) == []


@pytest.mark.full
def test_what_is_gone_from_a_queue_is_an_error(spark: SparkSession, nodes: str, receive_queue: Make, tmp_path: Path) -> None:
    queue, path = receive_queue(), tmp_path / "tables"
    begin(queue, a=1)
    given = settings(nodes, queue, path)
    run_once(spark, given)
    queue.delete()
    queue.declare()
    queue.write(queue.batch(transaction(9, [encode("t", "put", [("a", 9)])]), previous=pb.Position(epoch=257, sequence=8)))
    with pytest.raises(Exception, match=r"does not hold what follows 257\.3"):
        run_once(spark, given)
    assert table(spark, path) == {"a": 1}
    given["source"]["failOnDataLoss"] = False
    run_once(spark, given)
    assert table(spark, path) == {"a": 9}


@pytest.mark.full
def test_a_bad_record_is_said_in_one_error(spark: SparkSession, nodes: str, receive_queue: Make, tmp_path: Path) -> None:
    queue = receive_queue()
    begin(queue, a=1)
    queue.write(queue.batch(transaction(4, [b"{"])))
    with pytest.raises(BadRecord, match=rf"queue {queue.name}, epoch 257, sequence 4, index 0"):
        run_once(spark, settings(nodes, queue, tmp_path))
    lines = run_once(spark, settings(nodes, queue, tmp_path, on_bad_record="quarantine"))
    assert "1 put, 0 deleted, 1 bad; t in " in lines[0]
    assert table(spark, tmp_path) == {"a": 1}


@pytest.mark.full
def test_a_run_up_to_a_position(spark: SparkSession, nodes: str, receive_queue: Make, tmp_path: Path) -> None:
    """Limits of a batch or of a message are no bounds: the next run applies the rest."""
    queue, path = receive_queue(), tmp_path / "tables"
    begin(queue, a=1)
    queue.write(queue.batch(*(transaction(n, [encode("t", "put", [("a", n), (f"k{n}", n)])]) for n in range(4, 9))))
    given = settings(nodes, queue, path)
    until = {queue.name: Position(257, 6)}
    for _ in range(2):
        Job(spark, Config.model_validate(given), lambda _: None).run(interval_s=None, until=until)
        assert table(spark, path) == {"a": 6, "k4": 4, "k5": 5, "k6": 6}
        assert store.read_version(path).version == 1
    run_once(spark, given)
    assert table(spark, path) == {"a": 8} | {f"k{n}": n for n in range(4, 9)}


@pytest.mark.full
def test_a_rebuilt_table(spark: SparkSession, nodes: str, receive_queue: Make, tmp_path: Path) -> None:
    """A column that was added has the values that came before it."""
    queue, path = receive_queue(), tmp_path / "tables"
    begin(queue, a=1, b=2)
    queue.write(queue.batch(transaction(4, [encode("t", "put", [("a", 4)]), encode("t", "delete", [("b", 0)])])))
    given = settings(nodes, queue, path)
    given["tables"] = {name: {"schema": "k STRING", "key": ["k"]} for name in "tu"}
    run_once(spark, given)
    queue.write(queue.batch(transaction(5, [encode("t", "put", [("c", 5)])])))
    given["tables"]["t"]["schema"] = "k STRING, v INT"
    lines: list[str] = []
    for dry_run in (True, False):
        Job(spark, Config.model_validate(given), lines.append).rebuild("t", dry_run=dry_run)
    assert lines[0] == "would rebuild t with 3 put, 1 deleted since its full snapshot began"
    assert lines[1].startswith("version 2: 3 put, 1 deleted; t in ")
    assert table(spark, path) == {"a": 4}, "what comes after the position is not applied"
    run_once(spark, given)
    assert table(spark, path) == {"a": 4, "c": 5}
    with pytest.raises(SchemaChanged, match=r"no table w to rebuild\. Name one of those that are there: t, u"):
        Job(spark, Config.model_validate(given), lines.append).rebuild("w")
    queue.delete()
    queue.declare()
    queue.write(queue.batch(transaction(9, [encode("t", "put", [("a", 9)])]), previous=pb.Position(epoch=257, sequence=8)))
    with pytest.raises(SnapshotGone, match=rf"Queue {queue.name} no longer holds .*`lrq-ha resync \w+ --group GROUP --from east"):
        Job(spark, Config.model_validate(given), lines.append).rebuild("t")


@pytest.mark.parametrize("options", [["--once"], ["--interval", "1s"], ["--until", '{"q": {"epoch": 1, "sequence": 1}}']])
def test_a_rebuild_applies_nothing_new(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["x.toml", "--rebuild", "t", *options])
    assert "--rebuild goes with no other option than --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["[]", "{", '{"q": 5}', '{"q": {"epoch": 1}}'])
def test_positions_that_are_none(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["x.toml", "--until", given])
    assert "--until must be JSON of the form" in capsys.readouterr().err


KILLS = 5


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_job_that_is_killed_at_any_instant(spark: SparkSession, nodes: str, receive_queue: Make, tmp_path: Path) -> None:
    """A reader looks all the time: it sees each transaction in both tables or in none."""
    queue, path, random = receive_queue(), tmp_path / "tables", Random(5)
    config = write_config(tmp_path, nodes, queue)
    begin(queue)
    stopped, failed, looks, sequence = threading.Event(), [], [0], 3

    def read() -> None:
        while not stopped.is_set():
            try:
                found = table(spark, path), table(spark, path, "u")
                version = store.read_version(path).version
                both = tables_at(spark, path, version)
                rows = [{row.k: row.v for row in both[name].collect()} for name in "tu"]
                assert rows[0] == rows[1]
                assert all(max(one.values(), default=0) <= max(rows[0].values(), default=0) for one in found)
                looks[0] += bool(rows[0])
                time.sleep(1)
            except NoVersion:
                time.sleep(0.2)
            except BaseException as error:
                failed.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(KILLS):
            pairs(queue, range(sequence + 1, sequence + 401))
            sequence += 400
            before = max(store.list_versions(path), default=0)
            job = start_job(config, "--interval", "0s")
            try:
                wait_for_version(job, path, before + random.randint(1, 3))
                time.sleep(random.uniform(0, 1.5))
            finally:
                job.kill()
                job.communicate()
        job = start_job(config, "--once")
        said = job.communicate(timeout=900)[1]
        assert job.returncode == 0, said
    finally:
        stopped.set()
        reader.join()
    assert not failed
    assert looks[0] > 1
    expected = {f"k{n % 50}": n for n in range(4, sequence + 1)}
    assert (table(spark, path), table(spark, path, "u")) == (expected, expected)
    versions = [store.read_version(path, number) for number in store.list_versions(path)]
    assert [one.version for one in versions] == list(range(1, len(versions) + 1))
    positions = [one.queues[queue.name].position for one in versions]
    assert positions == sorted(set(positions))


def start_job(config: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lrq_ha.spark.pipeline", str(config), *arguments]
    environment = os.environ | {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}  # a short life needs no better code
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_version(job: subprocess.Popen[str], path: Path, version: int) -> None:
    deadline = time.monotonic() + 900
    while max(store.list_versions(path), default=0) < version:
        assert job.poll() is None, job.stderr and job.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_job_that_is_stopped_and_one_of_spark_submit(spark: SparkSession, nodes: str, receive_queue: Make, tmp_path: Path) -> None:
    queue, path = receive_queue(), tmp_path / "tables"
    begin(queue, a=1)
    config = write_config(tmp_path, nodes, queue)
    job = start_job(config, "--interval", "0s")
    try:
        wait_for_version(job, path, 1)
        job.terminate()
        said = job.communicate(timeout=300)[1]
    finally:
        job.kill()
    assert job.returncode == 0, said
    assert "Traceback" not in said
    queue.write(queue.batch(transaction(4, [encode("t", "put", [("b", 4)])])))
    program = Path(sys.modules[Job.__module__].__file__ or "").with_name("__main__.py")
    submit = [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[1]", str(program), str(config), "--once"]
    environment = os.environ | {"PYTHONPATH": str(program.parents[3]), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(submit, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    assert "version 2: 1 put, 0 deleted; t in " in done.stdout + done.stderr  # spark-submit puts both into its own output
    assert table(spark, path) == {"a": 1, "b": 4}


def write_config(folder: Path, nodes: str, queue: ReceiveQueue) -> Path:
    config = folder / "pipeline.toml"
    config.write_text(
        f'[source]\nnodes = "{nodes}"\nsubscribe = "{queue.name}"\nmaxEntriesPerTrigger = 60\n'
        + "".join(f'[tables.{name}]\nschema = "k STRING, v INT"\nkey = ["k"]\nbuckets = 2\n' for name in "tu")
        + f'[sink]\npath = "{folder / "tables"}"\n'
    )
    return config


@pytest.mark.full
def test_queues_that_match_a_pattern(
    spark: SparkSession, nodes: str, receive_queue: Make, listing: tuple[str, list[Any]], tmp_path: Path
) -> None:
    """Each queue has its own rows; one that appears between two runs is read from its beginning."""
    http, answers = listing
    first, second = receive_queue("east"), receive_queue("west")
    begin(first, a=1)
    begin(second, a=2)
    given = settings(nodes, first, tmp_path)
    given["source"] |= {"subscribePattern": "LRQ_Recv_.*", "http": http}
    del given["source"]["subscribe"]
    answers.append([first.name])
    run_once(spark, given)
    first.write(first.batch(transaction(4, [encode("t", "put", [("b", 4)])])))
    answers[0] = [first.name, second.name]
    run_once(spark, given)
    assert {(row.queue, row.k, row.v) for row in tables_at(spark, tmp_path)["t"].collect()} == {
        (first.name, "a", 1),
        (first.name, "b", 4),
        (second.name, "a", 2),
    }
