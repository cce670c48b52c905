"""The streaming source against a real broker: each transaction once, over batches, restarts and lost nodes."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from receive_queues import ReceiveQueue, transaction

from lrq_ha.lab import Lab
from lrq_ha.spark import reading
from lrq_ha.spark.errors import DataLoss, OptionError
from lrq_ha.spark.options import parse_options
from lrq_ha.spark.stream_reader import LrqStreamReader
from lrq_ha.streams.errors import MissingQueue
from lrq_ha.streams.node_connection import NodeConnection, address_of

pytestmark = [pytest.mark.broker, pytest.mark.proves("G6")]

HERE = Path(__file__).parent
Make = Callable[..., ReceiveQueue]
Offset = dict[str, dict[str, int]]

ROWS = 6_000
KILLS = 5
#: The program of the driver: arguments are nodes, queue, checkpoint, database.
DRIVER = """
import sqlite3, sys
from lrq_ha.spark.session import session
nodes, queue, checkpoint, database = sys.argv[1:]
spark = session()
entries = spark.readStream.format("lrq").options(nodes=nodes, subscribe=queue, maxEntriesPerTrigger=300, minPartitions=2).load()

def take(batch, number):
    rows = [tuple(row) for row in batch.select("epoch", "sequence", "index").collect()]
    with sqlite3.connect(database) as tables:
        if not tables.execute("SELECT 1 FROM batches WHERE number = ?", (number,)).fetchall():
            tables.execute("INSERT INTO batches VALUES (?)", (number,))
            tables.executemany("INSERT INTO rows VALUES (?, ?, ?)", rows)

entries.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint).start().awaitTermination()
"""


def fill(queue: ReceiveQueue, first: int, last: int, payloads: int = 1) -> None:
    queue.write_burst(queue.batch(transaction(n, [b"x"] * payloads)) for n in range(first, last + 1))


class Steps:
    """A query's calls, without Spark: batches from an offset on, read as they are planned."""

    def __init__(self, nodes: str, **options: str) -> None:
        self.reader = LrqStreamReader(parse_options({"nodes": nodes, **options}))
        self.offset: Offset = self.reader.initialOffset()

    def take_batch(self, limit: Any = None) -> list[tuple[str, int]]:
        """The queue and sequence of each row of the next batch."""
        end = self.reader.latestOffset(self.offset, limit or self.reader.getDefaultReadLimit())
        given = self.read(self.reader.partitions(self.offset, end))
        assert given == self.read(self.reader.partitions(self.offset, end)), "a batch that is repeated has the rows that it had"
        self.offset = end
        return given

    def read(self, partitions: Any) -> list[tuple[str, int]]:
        return [
            (row["queue"], row["sequence"]) for partition in partitions for batch in self.reader.read(partition) for row in batch.to_pylist()
        ]


@pytest.fixture
def steps(nodes: str) -> Iterator[Callable[..., Steps]]:
    made: list[Steps] = []

    def begin(**options: str) -> Steps:
        made.append(Steps(nodes, **options))
        return made[-1]

    yield begin
    for one in made:
        one.reader.stop()


@pytest.mark.quick
def test_a_query_and_its_restart(spark: SparkSession, nodes: str, receive_queue: Make, tmp_path: Path) -> None:
    queue = receive_queue()
    fill(queue, 1, 25)
    batches: list[list[int]] = []

    def run(**options: Any) -> None:
        frame = spark.readStream.format("lrq").options(nodes=nodes, subscribe=queue.name, maxEntriesPerTrigger=10, **options).load()

        def take(batch: DataFrame, _number: int) -> None:
            batches.append([row.sequence for row in batch.select("sequence").collect()])

        query = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
        query.awaitTermination()

    run()
    assert [batch for batch in batches if batch] == [list(range(1, 11)), list(range(11, 21)), list(range(21, 26))]
    fill(queue, 26, 30)
    run()
    assert batches[-1] == [26, 27, 28, 29, 30]
    run()
    assert [n for batch in batches for n in batch] == list(range(1, 31))


@pytest.mark.quick
def test_a_limit_is_exact_and_no_queue_starves(receive_queue: Make, steps: Callable[..., Steps]) -> None:
    long, short, wide = receive_queue("east"), receive_queue("north"), receive_queue("west")
    fill(long, 1, 40)
    fill(short, 1, 3)
    fill(wide, 1, 2, payloads=9)
    query = steps(subscribe=",".join((long.name, short.name, wide.name)), maxEntriesPerTrigger="12")
    assert query.take_batch() == [], "batch 0 fixes the positions at which queues begin"
    taken: list[tuple[str, int]] = []
    while batch := query.take_batch():
        assert len(batch) <= 12
        taken += batch
        if len(taken) == len(batch):
            assert (short.name, 3) in batch
    expected = [(long.name, n) for n in range(1, 41)] + [(short.name, n) for n in range(1, 4)] + [(wide.name, n) for n in (1, 2) for _ in range(9)]
    assert sorted(taken) == sorted(expected)


def test_a_message_larger_than_the_limit_goes_alone(receive_queue: Make, steps: Callable[..., Steps]) -> None:
    queue = receive_queue()
    fill(queue, 1, 2, payloads=5)
    query = steps(subscribe=queue.name, maxEntriesPerTrigger="3")
    assert [query.take_batch() for _ in range(3)] == [[], [(queue.name, 1)] * 5, [(queue.name, 2)] * 5]
    assert query.take_batch() == []


def test_an_empty_queue_costs_no_wait(receive_queue: Make, steps: Callable[..., Steps]) -> None:
    queue = receive_queue()
    query = steps(subscribe=queue.name, startingOffsets="latest")
    begun = time.monotonic()
    assert [query.take_batch() for _ in range(3)] == [[], [], []]
    assert time.monotonic() - begun < 8, "the wait of a batch read for a first message is 10 s"
    fill(queue, 1, 2)
    assert query.take_batch() == [(queue.name, 1), (queue.name, 2)], "what came after the query began is read, though it began with latest"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("starting", "given"), [("latest", [4]), ("earliest", [1, 2, 3, 4]), (2, [2, 3, 4]), ({"epoch": 257, "sequence": 2}, [3, 4]), (-1, [4])]
)
def test_where_a_query_begins(receive_queue: Make, steps: Callable[..., Steps], starting: Any, given: list[int]) -> None:
    queue = receive_queue()
    fill(queue, 1, 3)
    text = starting if isinstance(starting, str) else json.dumps({queue.name: starting})
    query = steps(subscribe=queue.name, startingOffsets=text)
    assert query.take_batch() == []
    fill(queue, 4, 4)
    assert query.take_batch() == [(queue.name, n) for n in given]


def test_a_query_that_begins_at_a_time(receive_queue: Make, steps: Callable[..., Steps]) -> None:
    queue = receive_queue()
    queue.write_burst(queue.batch(transaction(n, timestamp_us=n * 1_000)) for n in range(1, 10))
    query = steps(subscribe=queue.name, startingTimestamp="8")
    assert query.take_batch() == []
    queue.write(queue.batch(transaction(10, timestamp_us=0)))
    assert query.take_batch() == [(queue.name, n) for n in (8, 9, 10)]


def test_available_now_has_an_end(receive_queue: Make, steps: Callable[..., Steps]) -> None:
    queue = receive_queue()
    fill(queue, 1, 30)
    query = steps(subscribe=queue.name)
    query.reader.prepareForTriggerAvailableNow()
    assert query.take_batch(ReadMaxRows(10)) == []
    assert len(query.take_batch(ReadMaxRows(10))) == 10
    fill(queue, 31, 40)
    assert [n for _, n in query.take_batch(ReadAllAvailable())] == list(range(11, 31))
    assert query.take_batch(ReadAllAvailable()) == []


@pytest.mark.quick
def test_what_is_refused_before_anything_is_read(steps: Callable[..., Steps]) -> None:
    with pytest.raises(MissingQueue, match="LRQ_Recv_a_nowhere does not exist"):
        steps(subscribe="LRQ_Recv_a_nowhere").take_batch()
    with pytest.raises(OptionError, match="endingOffsets is for batch reads"):
        steps(subscribe="LRQ_Recv_a_nowhere", endingOffsets='{"LRQ_Recv_a_nowhere": 3}')
    with pytest.raises(OptionError, match="endingTimestamp is for batch reads"):
        steps(subscribe="LRQ_Recv_a_nowhere", endingTimestamp="3")


def test_a_query_that_is_refused_says_why(spark: SparkSession, nodes: str, receive_queue: Make, tmp_path: Path) -> None:
    queue = receive_queue()
    frame = spark.readStream.format("lrq").options(nodes=nodes, subscribe=queue.name, endingOffsets=json.dumps({queue.name: 3})).load()
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(PySparkException, match="endingOffsets is for batch reads"):
        query.awaitTermination()


def test_what_was_trimmed_between_two_batches(nodes: str, receive_queue: Make, steps: Callable[..., Steps]) -> None:
    queue = receive_queue(**{"x-max-length-bytes": 200_000, "x-stream-max-segment-size-bytes": 50_000})
    fill(queue, 1, 10)
    query, lenient = (steps(subscribe=queue.name, failOnDataLoss=lossless) for lossless in ("true", "false"))
    for one in (query, lenient):
        one.take_batch()
        assert len(one.take_batch()) == 10
    queue.write_burst(queue.batch(transaction(n, [b"x" * 5_000])) for n in range(11, 1_000))
    deadline = time.monotonic() + 60
    with NodeConnection.open([address_of(nodes)], "test") as node:
        while (head := node.first(queue.name)) is None or head.offset <= 11:
            assert time.monotonic() < deadline, "nothing was trimmed"
            time.sleep(0.5)
    with pytest.raises(DataLoss, match=r"does not hold what follows 257\.10.*failOnDataLoss = false"):
        query.take_batch()
    given = [n for _, n in lenient.take_batch()]
    assert given[0] > 11
    assert given == list(range(given[0], 1_000))


def test_a_queue_that_was_deleted(receive_queue: Make, steps: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "RECONNECT_TIMEOUT_S", 1.5)
    queue = receive_queue()
    fill(queue, 1, 3)
    query = steps(subscribe=queue.name)
    query.take_batch()
    queue.delete()
    with pytest.raises(MissingQueue):
        query.take_batch()


def test_a_queue_that_is_made_while_the_query_runs(
    nodes: str, receive_queue: Make, listing: tuple[str, list[Any]], steps: Callable[..., Steps]
) -> None:
    """It is read from its beginning, though the query began with latest; and the query goes on where no sidecar lists queues."""
    address, answers = listing
    old = receive_queue("south")
    fill(old, 1, 3)
    answers.append([old.name])
    query = steps(subscribePattern="LRQ_Recv_.*_south", http=address, startingOffsets="latest", queueDiscoveryInterval="1")
    assert query.take_batch() == []
    new = receive_queue("south")
    fill(new, 1, 2)
    fill(old, 4, 4)
    answers[:] = [[old.name, new.name]]
    taken: list[tuple[str, int]] = []
    deadline = time.monotonic() + 30
    while len(taken) < 3 and time.monotonic() < deadline:
        taken += query.take_batch()
        time.sleep(0.2)
    assert sorted(taken) == sorted([(new.name, 1), (new.name, 2), (old.name, 4)])
    answers.clear()
    time.sleep(1.1)
    fill(new, 3, 3)
    assert query.take_batch() == [(new.name, 3)]


def test_connections_lost_between_and_within_batches(lab: Lab, receive_queue: Make, steps: Callable[..., Steps]) -> None:
    queue = receive_queue()
    fill(queue, 1, 2_000)
    query = steps(subscribe=queue.name, maxEntriesPerTrigger="300", minPartitions="3")
    stop = threading.Event()

    def cut() -> None:
        while not stop.wait(0.7):
            lab.ctl("w1", "close_all_user_connections", "app", "a test")

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        taken = query.take_batch()
        while len(taken) < 2_000:
            taken += query.take_batch()
    finally:
        stop.set()
        cutting.join()
    assert [n for _, n in taken] == list(range(1, 2_001))


def test_nothing_to_plan_between_equal_offsets(steps: Callable[..., Steps]) -> None:
    """Spark plans such a range after a restart, perhaps of queues that are gone."""
    query = steps(subscribe="LRQ_Recv_a_nowhere")
    offset = {"LRQ_Recv_a_nowhere": {"epoch": 257, "sequence": 3}}
    assert query.reader.partitions(offset, offset) == []
    assert query.reader.partitions({}, offset) == []
    assert list(query.reader.read(InputPartition(None))) == []


def test_a_session_finds_the_format_by_itself(nodes: str, receive_queue: Make) -> None:
    """Where the package is on the path of Python, as any installation puts it."""
    queue = receive_queue()
    fill(queue, 1, 3)
    program = (
        "import sys; from pyspark.sql import SparkSession; nodes, queue = sys.argv[1:]\n"
        "spark = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "print(spark.read.format('lrq').options(nodes=nodes, subscribe=queue, columns='sequence').load().count())\n"
        "spark.sql(f\"CREATE TEMPORARY VIEW e USING lrq OPTIONS (nodes '{nodes}', subscribe '{queue}', columns 'payload,sequence')\")\n"
        "print([(bytes(row.payload), row.sequence) for row in spark.sql('SELECT * FROM e').collect()])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run([sys.executable, "-c", program, nodes, queue.name], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["3", "[(b'x', 1), (b'x', 2), (b'x', 3)]"], done.stderr[-2_000:]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    tables = sqlite3.connect(tmp_path / "sink.sqlite", isolation_level=None)
    tables.execute("CREATE TABLE batches (number INTEGER PRIMARY KEY)")
    tables.execute("CREATE TABLE rows (epoch INTEGER, sequence INTEGER, number INTEGER)")
    yield tables
    tables.close()


def test_kills_of_the_driver(nodes: str, receive_queue: Callable[..., ReceiveQueue], tmp_path: Path, database: sqlite3.Connection) -> None:
    """Takes more than 60 s: Spark starts six times."""
    rng = random.Random(7)
    queue = receive_queue()
    queue.write_burst(queue.batch(transaction(n)) for n in range(1, ROWS // 2 + 1))
    command = [sys.executable, "-c", DRIVER, nodes, queue.name, str(tmp_path / "checkpoint"), str(tmp_path / "sink.sqlite")]
    written = ROWS // 2

    def count() -> int:
        return int(database.execute("SELECT count(*) FROM rows").fetchone()[0])

    for number in range(KILLS + 1):
        driver = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        try:
            begun, deadline = count(), time.monotonic() + 180
            goal = ROWS if number == KILLS else min(begun + 1, ROWS)
            while count() < goal:
                assert driver.poll() is None, "the driver has ended"
                assert time.monotonic() < deadline, f"{count()} rows of {ROWS}"
                time.sleep(0.05)
            if number < KILLS:
                time.sleep(rng.uniform(0.0, 1.5))
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
        if written < ROWS:
            more = min(written + ROWS // 8, ROWS)
            queue.write_burst(queue.batch(transaction(n)) for n in range(written + 1, more + 1))
            written = more
    assert database.execute("SELECT sequence FROM rows ORDER BY rowid").fetchall() == [(n,) for n in range(1, ROWS + 1)]
