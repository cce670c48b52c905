"""A receive queue that was fed three times its size: tables that begin with it have all that the source has."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from lrq_ha.lab import Lab
from lrq_ha.publisher import FullSyncContext, FullSyncRequest, Publisher
from lrq_ha.receiver import Receiver, Table, TableListener
from lrq_ha.spark import tables_at
from lrq_ha.spark.pipeline.config import read_config
from lrq_ha.spark.pipeline.run import Job

pytestmark = pytest.mark.broker

SIZE, QUEUE = 4 << 20, "LRQ_Recv_stock_east"


def payload(row: dict[str, int]) -> bytes:
    return json.dumps({"table": "stock", "rows": [row]}).encode()


def eventually(what: str, done: Callable[[], bool]) -> None:
    """Polls until `done()`: a key that it looks up may not be there yet."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with suppress(KeyError):
            if done():
                return
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within 120 s")


class Stock:
    """A source's application whose counts change; a full sync has them all."""

    def __init__(self, door: str) -> None:
        self._pad = b" " * 100_000
        self._lock = threading.Lock()
        self.counts = dict.fromkeys(range(9), 0)
        self.publisher = Publisher([door], "stock-app", "stock", confirm_timeout_s=60)
        self.publisher.on_full_sync(self._provide)

    def _provide(self, _: FullSyncRequest, context: FullSyncContext) -> None:
        for item in self.counts:
            with self._lock:
                context.transmit(payload({"item": item, "count": self.counts[item]}))
        context.complete()

    def change(self, item: int, count: int) -> None:
        with self._lock:
            self.counts[item] = count
            self.publisher.transmit_log_entry_message(payload({"item": item, "count": count}) + self._pad, ["west"])


@pytest.mark.full
def test_a_new_receiver_and_the_pipeline_have_all(spark: SparkSession, broker_version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first snapshot is gone. A minute or more: two groups of the test's own, and a Spark."""
    lab = Lab({"east": 1, "west": 1}, tmp_path / "lab", sites={"east": ["west"], "west": []}, broker=broker_version)
    lab.prepare()
    for node in lab.nodes.values():
        node.config.write_text(f"{node.config.read_text().rstrip()}\n\n[receive]\nbytes_max = {SIZE}\n")
    with lab:
        source = Stock(lab.nodes["e1"].door)

        def receiving() -> dict[str, Any]:
            return dict(lab.status("w1")["receiving"][QUEUE])

        def is_in_step() -> bool:
            session = lab.status("e1")["sessions"]["west"]["clients"]["stock"]
            settled = session["state"] == "in_log_entry_sync" and session["in_flight_bytes"] == 0 and session["lag_entries"] == 0
            return settled and receiving()["snapshot"]["complete"] and receiving()["demand"] is None

        wholes = set()
        for number in range(3 * SIZE // 100_000):
            source.change(number % 9, number)
            if number % 10 == 9:
                source.publisher.flush(60)
                time.sleep(0.3)  # the sink looks a few times a second
                eventually("the sink to lack nothing", is_in_step)
                wholes.add(receiving()["snapshot"]["whole"])
        source.publisher.flush(60)
        eventually("the sink to lack nothing", is_in_step)
        assert len(wholes) >= 3, "the sink demands full syncs by itself"

        config = tmp_path / "pipeline.toml"
        config.write_text(
            f'[source]\nsubscribe = "{QUEUE}"\n[tables.stock]\nschema = "item INT, count INT"\nkey = ["item"]\nbuckets = 1\n'
            f'[sink]\npath = "{tmp_path / "tables"}"\n'
        )
        monkeypatch.setenv("LRQ_NODES", lab.nodes["w1"].door)
        Job(spark, read_config(config), print).run(interval_s=None)
        rows = tables_at(spark, tmp_path / "tables")["stock"].collect()
        assert {row["item"]: row["count"] for row in rows} == source.counts

        with closing(sqlite3.connect(tmp_path / "stock.db")) as connection:
            connection.execute("CREATE TABLE stock (source TEXT, item INTEGER, count INTEGER, PRIMARY KEY (source, item))")
        listener = TableListener(lambda: sqlite3.connect(tmp_path / "stock.db", timeout=30), [Table("stock", ("item", "count"), ("item",))])
        with Receiver([lab.nodes["w1"].door], "stock", "late", listener) as receiver:
            receiver.start()
            eventually("the receiver in step", lambda: receiver.status()["east"].consistent)
        with closing(sqlite3.connect(tmp_path / "stock.db")) as connection:
            assert dict(connection.execute("SELECT item, count FROM stock")) == source.counts
        source.publisher.close(60)
