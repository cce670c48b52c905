"""The decoders: what each makes of good payloads, and what it says of bad ones."""

from __future__ import annotations

import json
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from lrq_ha.spark.decode import DECODERS

SOURCE = {"db": "shop", "schema": "public", "table": "t", "lsn": 24023128}
PG_CHANGE = {"before": None, "after": {"id": 1, "note": "a \"b\""}, "source": SOURCE, "op": "c", "ts_ms": 1559033904863}

CASES: dict[str, list[tuple[Any, tuple[str | None, str | None, list[Any] | None, str | None]]]] = {
    "lrq-json": [
        ({"table": "t", "rows": [{"k": 1}, {"k": "x", "d": {"a": [1, 2.50]}}]}, ("t", "put", [{"k": 1}, {"k": "x", "d": {"a": [1, 2.5]}}], None)),
        ({"table": "t", "op": "delete", "rows": []}, ("t", "delete", [], None)),
        ({"table": "t", "op": "truncate"}, ("t", "truncate", None, None)),
        ({"table": "t", "op": "upsert", "rows": []}, ("t", "upsert", [], "its op is upsert, and not put, delete or truncate")),
        ({"table": "t"}, ("t", "put", None, "it has no rows")),
        ({"rows": []}, (None, "put", [], "it names no table")),
        (b"\xffno json", (None, "put", None, "it is not JSON of the form {table, op, rows}")),
        (b"[]", (None, "put", None, "it is not JSON of the form {table, op, rows}")),
        (b"", (None, "put", None, "it is not JSON of the form {table, op, rows}")),
    ],
    "debezium-json": [
        (PG_CHANGE, ("t", "put", [PG_CHANGE["after"]], None)),
        ({"schema": {"type": "struct"}, "payload": PG_CHANGE}, ("t", "put", [PG_CHANGE["after"]], None)),
        ({**PG_CHANGE, "op": "u"}, ("t", "put", [PG_CHANGE["after"]], None)),
        ({**PG_CHANGE, "op": "r"}, ("t", "put", [PG_CHANGE["after"]], None)),
        ({**PG_CHANGE, "op": "d", "before": {"id": 1}, "after": None}, ("t", "delete", [{"id": 1}], None)),
        ({"schema": None, "payload": {"op": "t", "source": SOURCE}}, ("t", "truncate", None, None)),
        ({**PG_CHANGE, "op": "d"}, ("t", "delete", None, "it has no before (in PostgreSQL: replica identity)")),
        ({**PG_CHANGE, "after": None}, ("t", "put", None, "it has no after")),
        ({**PG_CHANGE, "op": "m"}, ("t", None, None, "its op is m, and not c, u, r, d or t")),
        ({"status": "BEGIN"}, (None, None, None, "it names no source.table")),
        (b"{", (None, None, None, "it is no JSON of Debezium")),
    ],
}  # fmt: skip


def test_decoders(spark: SparkSession) -> None:
    for name, cases in CASES.items():
        payloads = [(number, given if isinstance(given, bytes) else json.dumps(given).encode()) for number, (given, _) in enumerate(cases)]
        frame = spark.createDataFrame(payloads, "number INT, payload BINARY").select("number", DECODERS[name](F.col("payload")).alias("found"))
        for number, found in frame.collect():
            given = None if found.rows is None else [json.loads(row) for row in found.rows]
            assert (found.table, found.op, given, found.error) == cases[number][1], cases[number][0]
