"""Format lrq over Spark Connect: the server finds it by itself, in batch reads, SQL and streams, and errors reach the client."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from receive_queues import ReceiveQueue, transaction
from standalone import start_connect_server

pytest.importorskip("grpc_status", reason="pyspark[connect] is not installed")

pytestmark = [pytest.mark.broker, pytest.mark.full, pytest.mark.timeout(900)]

#: Arguments: address of the server, options of the source as JSON. Prints what it found, as JSON.
CLIENT = """
import json, sys
from pyspark.sql import SparkSession

remote, options = sys.argv[1], json.loads(sys.argv[2])
spark = SparkSession.builder.remote(remote).getOrCreate()
found = {"module": type(spark).__module__}
read = lambda **more: spark.read.format("lrq").options(**{**options, **more}).load()
found["read"] = [row.sequence for row in read().orderBy("sequence").collect()]
pairs = ", ".join(f"{name} '{value}'" for name, value in options.items())
spark.sql(f"CREATE TEMPORARY VIEW entries USING lrq OPTIONS ({pairs})")
found["sql"] = spark.sql("SELECT count(*) AS n, max(sequence) AS last FROM entries").first().asDict()
query = spark.readStream.format("lrq").options(**options).load().writeStream.format("memory").queryName("seen").trigger(availableNow=True).start()
query.awaitTermination()
found["stream"] = [row.sequence for row in spark.sql("SELECT sequence FROM seen ORDER BY sequence").collect()]
try:
    read(subscribe="LRQ_Recv_none_east").count()
except Exception as error:
    found["missing"] = str(error)
try:
    read(maxOffsetsPerTrigger="3").schema
except Exception as error:
    found["unknown"] = str(error)
from lrq_ha.spark import check, register
found["check"] = check(spark, options["nodes"])
register(spark)
found["registered"] = read().count()
print(json.dumps(found))
"""


def test_a_client_of_a_connect_server(nodes: str, receive_queue: Callable[..., ReceiveQueue], tmp_path: Path) -> None:
    queue = receive_queue()
    queue.write_burst(queue.batch(transaction(n)) for n in range(1, 101))
    server, address = start_connect_server(tmp_path)
    try:
        command = [sys.executable, "-c", CLIENT, address, json.dumps({"nodes": nodes, "subscribe": queue.name})]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    finally:
        server.kill()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["module"].startswith("pyspark.sql.connect")
    assert found["read"] == found["stream"] == list(range(1, 101))
    assert found["sql"] == {"n": 100, "last": 100}
    assert "Queue LRQ_Recv_none_east does not exist in vhost lrq" in found["missing"]
    assert "The option for it is maxEntriesPerTrigger" in found["unknown"]
    assert found["registered"] == 100
    assert [line.endswith(" takes readers") for line in found["check"]] == [True, True]
