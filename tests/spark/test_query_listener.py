"""How far a query is behind its queues: in the program, in a file, and for Prometheus."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from receive_queues import ReceiveQueue
from test_stream import fill

from lrq_ha.spark import LrqListener
from lrq_ha.spark.query_listener import QueueLag

pytestmark = pytest.mark.broker

TIMEOUT_S = 240.0


@pytest.fixture
def listener(spark: SparkSession, tmp_path: Path) -> Iterator[LrqListener]:
    made = LrqListener(tmp_path / "lag.jsonl", metrics_port=0)
    spark.streams.addListener(made)
    yield made
    spark.streams.removeListener(made)
    made.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.quick
def test_a_lag_is_told_until_it_is_gone(
    spark: SparkSession, nodes: str, receive_queue: Callable[..., ReceiveQueue], listener: LrqListener, tmp_path: Path
) -> None:
    """Another query, which reads no receive queue, is left out."""
    queue = receive_queue()
    fill(queue, 1, 25)
    entries = spark.readStream.format("lrq").options(nodes=nodes, subscribe=queue.name, maxEntriesPerTrigger=10).load()
    other = spark.readStream.format("rate").load().writeStream.format("noop").option("checkpointLocation", str(tmp_path / "other")).start()
    query = entries.writeStream.queryName("stock").format("noop").option("checkpointLocation", str(tmp_path / "query")).start()
    try:
        query.processAllAvailable()
        until(lambda: listener.lags.get(str(query.id)) == {queue.name: QueueLag("257.25", 0)})
        until(lambda: other.lastProgress is not None)
        assert set(listener.lags) == {str(query.id)}
        address = f"http://127.0.0.1:{listener.port}/metrics"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=TIMEOUT_S) as answer:
            metrics = answer.read().decode()
        assert f'lrq_query_behind_entries{{query="stock",queue="{queue.name}"}} 0.0' in metrics
        assert 'lrq_query_rows_total{query="stock"} 25.0' in metrics
    finally:
        query.stop()
        other.stop()
    until(lambda: not listener.lags)
    lines = [json.loads(line) for line in (tmp_path / "lag.jsonl").read_text().splitlines()]
    assert {line["query"] for line in lines} == {"stock"}
    told = [(line["rows"], line["queues"][queue.name]["entries_behind"]) for line in lines]
    assert [each for each in told if each[0]] == [(10, 15), (10, 5), (5, 0)]
