"""The sink on real groups: rows to sites and to queues, each once, whatever is repeated or killed; and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pika
import pytest
from patience import PATIENT_DOOR
from pyspark.sql import DataFrame, SparkSession

from lrq_ha.lab import Lab
from lrq_ha.spark.options import parse_options
from lrq_ha.spark.planning import plan
from lrq_ha.spark.reading import read_batches
from lrq_ha.streams.errors import MissingQueue

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3"), pytest.mark.proves("G2")]

FILES, ROWS = 8, 300
#: The program of the driver: arguments are nodes, folder, checkpoint, client name. In each batch, the first try of each task fails when half of its
#: rows are published, and the second one is killed.
DRIVER = """
import os, signal, sys
from pyspark import TaskContext
from lrq_ha.spark.session import session
from lrq_ha.spark.sink import LrqStreamWriter
from lrq_ha.spark.source import LrqDataSource
nodes, folder, checkpoint, client = sys.argv[1:]

class Failing(LrqStreamWriter):
    def write(self, iterator):
        def half():
            for at, batch in enumerate(iterator):
                if at == 3 and TaskContext.get().attemptNumber() == 0:
                    raise RuntimeError("half of the rows are published")
                if at == 4 and TaskContext.get().attemptNumber() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield batch
        return super().write(half())

class Source(LrqDataSource):
    @classmethod
    def name(cls):
        return "failing"
    def streamWriter(self, schema, overwrite):
        return Failing(super().streamWriter(schema, overwrite)._options)

spark = session(settings={"spark.master": "local[2,4]", "spark.sql.execution.arrow.maxRecordsPerBatch": "50"})
spark.dataSource.register(Source)
rows = spark.readStream.schema("payload string").option("maxFilesPerTrigger", 2).json(folder)
to = dict(nodes=nodes, producer="job", clientName=client, destinations="west", rowsPerTransaction=20, order="none", checkpointLocation=checkpoint)
rows.writeStream.format("failing").options(**to).trigger(availableNow=True).start().awaitTermination()
"""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory, broker_version: str) -> Iterator[Lab]:
    directory = tmp_path_factory.mktemp("sink") / "lab"
    with Lab({"east": 2, "west": 1}, directory, broker_version, door=PATIENT_DOOR, sites={"east": ["west"], "west": []}) as lab:
        yield lab


def doors(lab: Lab) -> str:
    return ",".join(node.door for name, node in lab.nodes.items() if name.startswith("e"))


def received(lab: Lab, client: str) -> list[str]:
    """The payloads that have come to site west, in their order."""
    options = parse_options({"nodes": lab.nodes["w1"].door, "subscribe": f"LRQ_Recv_{client}_east", "columns": "type,payload"})
    found: list[str] = []
    with suppress(MissingQueue):
        for part in plan(options):
            for batch in read_batches(part, options):
                rows = zip(batch["type"].to_pylist(), batch["payload"].to_pylist())
                found += [payload.decode() for kind, payload in rows if kind == "LOG_ENTRY_SYNC"]
    return found


def eventually_received(lab: Lab, client: str, count: int) -> list[str]:
    deadline = time.monotonic() + 120
    while len(found := received(lab, client)) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} rows"
        time.sleep(0.5)
    return found


def stood_in(lab: Lab, queue: str) -> list[tuple[bytes, dict[str, str]]]:
    """The messages of a queue, which are removed."""
    found: list[tuple[bytes, dict[str, str]]] = []
    with pika.BlockingConnection(pika.URLParameters(lab.nodes[lab.primary("east") or ""].door)) as connection:
        channel = connection.channel()
        while True:
            method, properties, body = channel.basic_get(queue, auto_ack=True)
            if method is None:
                return found
            found.append((body, {k: v for k, v in (properties.headers or {}).items() if not k.startswith("x-lrq")}))


def numbers(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(0, count, 1, partitions).selectExpr("concat('row-', lpad(id, 6, '0')) AS payload")


def refused(write: Callable[[], object], said: str) -> None:
    with pytest.raises(Exception, match=said):
        write()


@pytest.mark.quick
def test_a_batch_write_is_written_once(spark: SparkSession, sites: Lab) -> None:
    """Also if it is written again, with its rows in another order; a later version is new data, a lower one an error."""
    rows = numbers(spark, 2_500)
    to = {"nodes": doors(sites), "producer": "once", "clientName": "once", "destinations": "west", "rowsPerTransaction": "300"}
    turned = rows.sortWithinPartitions("payload", ascending=False)
    for version, given in ((7, rows), (7, turned), (8, rows.limit(10).coalesce(1))):
        given.write.format("lrq").mode("append").options(**to, version=version).save()
    lower = "LowerVersion: Version 6 of producer 'once.[01]' is lower than [78], which the log has"
    refused(lambda: rows.write.format("lrq").mode("append").options(**to, version=6).save(), lower)
    found = Counter(eventually_received(sites, "once", 2_510))
    assert found == Counter(f"row-{n:06}" for n in (*range(2_500), *range(10)))


@pytest.mark.full
def test_rows_to_queues(spark: SparkSession, sites: Lab) -> None:
    names = [f"sink-{n}" for n in range(2)]
    with pika.BlockingConnection(pika.URLParameters(sites.nodes[sites.primary("east") or ""].door)) as connection:
        for name in names:
            connection.channel().queue_declare(name, durable=True)
    rows = numbers(spark, 600).selectExpr("payload", "concat('sink-', pmod(hash(payload), 2)) AS routingKey", "map('k', payload) AS headers")
    for _ in range(2):
        rows.write.format("lrq").mode("append").options(nodes=doors(sites), producer="queues", version=3).save()
    found = [stood_in(sites, name) for name in names]
    assert all(found)
    assert sorted(row for rows in found for row in rows) == [(f"row-{n:06}".encode(), {"k": f"row-{n:06}"}) for n in range(600)]

    nowhere = rows.selectExpr("payload", "'nowhere' AS routingKey")
    to = {"nodes": doors(sites), "producer": "nowhere", "version": "1"}
    refused(lambda: nowhere.write.format("lrq").mode("append").options(**to).save(), "312 NO_ROUTE.*bind it")
    rows.selectExpr("payload", "'sink-0' AS routingKey").write.format("lrq").mode("append").options(**to).save()
    assert len(stood_in(sites, "sink-0")) == 600, "what was refused is taken when it is repeated"


@pytest.mark.full
def test_refusals(spark: SparkSession, sites: Lab) -> None:
    rows = numbers(spark, 10, 1)
    to = {"nodes": doors(sites), "producer": "refused", "clientName": "refused", "destinations": "west"}

    def write(given: DataFrame, said: str, mode: str = "append", **options: str) -> None:
        refused(lambda: given.write.format("lrq").mode(mode).options(**(to | options)).save(), said)

    write(rows, "destination 'mars' is not known to group 'east'; known: west", destinations="west,mars")
    write(rows.selectExpr("payload", "1L AS other"), r"Column other \(bigint\) is not taken by a write to sites")
    write(rows, "Unknown option 'destination'", destination="west")
    write(rows, "nothing to overwrite", mode="overwrite")
    write(rows.selectExpr("CAST(null AS STRING) AS payload"), "A row has null in column payload")
    large = rows.limit(1).selectExpr("repeat('x', 17 * 1024 * 1024) AS payload")
    write(large, "A row has 17825792 bytes in column payload, of 16711680 at most")
    to = {"nodes": doors(sites), "producer": "refused", "exchange": "missing", "routingKey": "k"}
    write(rows, "404")
    assert received(sites, "refused") == []


def log_of(checkpoint: Path) -> Path:
    return checkpoint.with_suffix(".log")


Start = Callable[[Lab, Path, Path, str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(lab, folder, checkpoint, client name) starts a driver, which does not outlive the test."""
    drivers: list[subprocess.Popen[bytes]] = []

    def begin(lab: Lab, folder: Path, checkpoint: Path, client: str) -> subprocess.Popen[bytes]:
        arguments = [sys.executable, "-c", DRIVER, doors(lab), str(folder), str(checkpoint), client]
        with log_of(checkpoint).open("ab") as log:  # a pipe would fill, and hold Spark up
            drivers.append(subprocess.Popen(arguments, start_new_session=True, stderr=log))
        return drivers[-1]

    yield begin
    for driver in drivers:
        if driver.poll() is None:
            kill(driver)


def kill(driver: subprocess.Popen[bytes]) -> None:
    """With the JVM and its Python workers."""
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()


def committed(checkpoint: Path) -> int:
    return len([path for path in (checkpoint / "commits").glob("*") if path.name.isdigit()])


def lose_the_last_commit(checkpoint: Path) -> None:
    """With the plans of later batches."""
    last = max(int(path.name) for path in (checkpoint / "commits").glob("*") if path.name.isdigit())
    for folder, first in (("commits", last), ("offsets", last + 1)):
        for path in [path for path in (checkpoint / folder).glob("*") if path.name.isdigit() and int(path.name) >= first]:
            path.unlink()
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)


def until_committed(driver: subprocess.Popen[bytes], checkpoint: Path, batches: int) -> None:
    deadline = time.monotonic() + 300
    while committed(checkpoint) < batches:
        assert driver.poll() is None, log_of(checkpoint).read_text()[-3000:]
        assert time.monotonic() < deadline, f"{committed(checkpoint)} batches"
        time.sleep(0.1)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_each_row_once_through_failed_tasks_killed_drivers_a_failover_and_a_lost_commit(sites: Lab, start: Start, tmp_path: Path) -> None:
    """Three drivers start in turn, and each batch takes a new Python process or two: eight minutes at a load of 15."""
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    folder.mkdir()
    expected = [f"{file:02}-{row:04}" for file in range(FILES) for row in range(ROWS)]
    for file in range(FILES):
        lines = "".join(json.dumps({"payload": each}) + "\n" for each in expected[file * ROWS : (file + 1) * ROWS])
        (folder / f"{file:02}.json").write_text(lines)
        os.utime(folder / f"{file:02}.json", (1_700_000_000 + file,) * 2)
    first = start(sites, folder, checkpoint, "storm")
    until_committed(first, checkpoint, 1)
    time.sleep(0.7)
    kill(first)
    second = start(sites, folder, checkpoint, "storm")
    until_committed(second, checkpoint, 2)
    dead = sites.primary("east") or ""
    other = "e2" if dead == "e1" else "e1"
    sites.wait_role(other, "ready")
    sites.kill(dead)
    sites.promote(other, down=[dead])
    until_committed(second, checkpoint, 3)
    kill(second)
    lose_the_last_commit(checkpoint)
    third = start(sites, folder, checkpoint, "storm")
    assert third.wait(400) == 0, log_of(checkpoint).read_text()[-3000:]
    found = eventually_received(sites, "storm", len(expected))
    assert Counter(found) == Counter(expected)
    for file in range(FILES):
        mine = [each for each in found if each.startswith(f"{file:02}-")]
        assert mine == sorted(mine), "the order within a partition"
    sites.start(dead)
    sites.wait_role(dead, "ready")
