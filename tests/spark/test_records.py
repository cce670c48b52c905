"""Avro and Protocol Buffers: random records come back as they were written by the formats' own libraries, and no bytes end a job."""

from __future__ import annotations

import datetime
import decimal
import io
import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("fastavro", reason="fastavro is not installed")

import fastavro
from google.protobuf import json_format
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from lrq_ha.errors import LrqError
from lrq_ha.spark import records
from lrq_ha.spark.pipeline.config import Config, ConfigError
from lrq_ha.spark.pipeline.run import open_decoder

ROW = {
    "type": "record",
    "name": "Row",
    "fields": [
        {"name": "k", "type": "long"},
        {"name": "text", "type": ["null", "string"]},
        {"name": "raw", "type": "bytes"},
        {"name": "share", "type": "double"},
        {"name": "is_new", "type": "boolean"},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}},
        {"name": "many", "type": {"type": "array", "items": {"type": "map", "values": "int"}}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
    ],
}
COLUMNS = (
    "k BIGINT, text STRING, raw BINARY, share DOUBLE, is_new BOOLEAN, day DATE, at TIMESTAMP, price DECIMAL(12,2), "
    "many ARRAY<MAP<STRING,INT>>, kind STRING"
)
PROTO = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
enum Kind { A = 0; B = 1; }
message Part { int32 n = 1; }
message Row {
  int64 k = 1; optional string text = 2; bytes raw = 3; double share = 4; bool is_new = 5; google.protobuf.Timestamp at = 6;
  repeated Part parts = 7; map<string, uint64> sizes = 8; Kind kind = 9; google.protobuf.Int64Value big = 10;
}
message Change { string table = 1; Op op = 2; repeated Row rows = 3; }
enum Op { PUT = 0; DELETE = 1; }
"""
UTC = datetime.UTC


def avro(schema: dict[str, Any], value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def random_row(random: Random) -> dict[str, Any]:
    return {
        "k": random.randint(-(2**63), 2**63 - 1),
        "text": random.choice((None, "", "ä \"quoted\" \\ \n", "x" * 300)),
        "raw": random.randbytes(random.randint(0, 9)),
        "share": random.choice((0.0, random.uniform(-1e300, 1e300), 1e-320)),
        "is_new": random.random() < 0.5,
        "day": datetime.date(1990, 1, 1) + datetime.timedelta(random.randint(0, 20000)),
        "at": datetime.datetime(1990, 1, 1, tzinfo=UTC) + datetime.timedelta(microseconds=random.randint(0, 10**15)),
        "price": decimal.Decimal(random.randint(-(10**12) + 1, 10**12 - 1)).scaleb(-2),
        "many": [{random.choice("abc"): random.randint(-9, 9)} for _ in range(random.randint(0, 3))],
        "kind": random.choice("AB"),
    }


def parsed(spark: SparkSession, payloads: list[bytes], decoder: Any, columns: str) -> list[Any]:
    """(table, op, rows with the types of a table, error) for each payload."""
    frame = spark.createDataFrame(list(enumerate(payloads)), "number INT, payload BINARY")
    content = frame.select("number", decoder(F.col("payload")).alias("c")).select(
        "number", "c.table", "c.op", "c.error", F.transform("c.rows", lambda row: F.from_json(row, columns, {"mode": "FAILFAST"})).alias("rows")
    )
    return [(one.table, one.op, one.rows, one.error) for one in sorted(content.collect())]


def values(row: Any) -> dict[str, Any]:
    found: dict[str, Any] = row.asDict(recursive=True)
    found["raw"] = bytes(found["raw"])
    return found


@pytest.mark.quick
def test_avro_rows_are_those_that_were_written(spark: SparkSession) -> None:
    """Every prefix of a record, and a record with a byte more, is an error of its payload."""
    random = Random(1)
    rows = [random_row(random) for _ in range(100)]
    whole = avro(ROW, rows[0])
    cut = [whole[:length] for length in range(len(whole))] + [whole + b"\0"]
    decoder = records.avro_decoder(json.dumps(ROW), records.layout_of("row", "t"))
    found = parsed(spark, [avro(ROW, row) for row in rows] + cut, decoder, COLUMNS)
    local = [row | {"at": row["at"].astimezone().replace(tzinfo=None)} for row in rows]
    assert [values(row) for _, _, (row,), _ in found[:100]] == local
    assert {one[:2] for one in found} == {("t", "put")}
    assert all(error is None for *_, error in found[:100])
    assert len(found[100:]) == len(cut)
    assert all(one[2] is None and one[3].startswith("it is no record of Avro: ") for one in found[100:])
    assert found[-1][3].endswith("1 bytes are left after the record")


@pytest.mark.full
def test_records_of_debezium_and_of_registries(spark: SparkSession, tmp_path: Path) -> None:
    def envelope(row: dict[str, Any]) -> dict[str, Any]:
        source = {"type": "record", "name": "Source", "fields": [{"name": "table", "type": "string"}]}
        change = [
            {"name": "before", "type": ["null", row]},
            {"name": "after", "type": ["null", row["name"]]},
            {"name": "op", "type": "string"},
            {"name": "source", "type": source},
        ]
        return {"type": "record", "name": "Envelope", "fields": change}

    old = {"type": "record", "name": "Row", "fields": [{"name": "k", "type": "int"}]}
    new = {"type": "record", "name": "Row", "fields": [{"name": "k", "type": "int"}, {"name": "v", "type": "int"}]}
    for number, schema in ((1, old), (7, new)):
        (tmp_path / f"{number}.avsc").write_text(json.dumps(envelope(schema)))
    (tmp_path / "notes.txt").write_text("x")
    decode = {"format": "avro", "record": "debezium", "avro_schemas": str(tmp_path)}
    source = {"table": "t"}
    put = {"before": None, "after": {"k": 1}, "op": "c", "source": source}
    delete = {"before": {"k": 2, "v": 3}, "after": None, "op": "d", "source": source}
    header = [b"\0" + number.to_bytes(4, "big") for number in (1, 7, 8)]
    payloads = [header[0] + avro(envelope(old), put), header[1] + avro(envelope(new), delete), header[2] + b"x", b"\1\0\0\0\1x", b"\0\0"]
    found = parsed(spark, payloads, open_decoder(section(decode)), "k INT, v INT")
    assert [(table, op, rows and [row.asDict() for row in rows]) for table, op, rows, _ in found[:2]] == [
        ("t", "put", [{"k": 1, "v": None}]),
        ("t", "delete", [{"k": 2, "v": 3}]),
    ]
    assert "schema 8 is not in the folder of schemas: put it there as 8.avsc" in found[2][3]
    assert all("does not begin with Confluent's header" in error for *_, error in found[3:])


def section(decode: dict[str, str]) -> Any:
    table = {"t": {"schema": "k INT", "key": ["k"]}}
    source = {"nodes": "amqp://u:p@h:1", "subscribe": "LRQ_Recv_c_east"}
    return Config.model_validate({"source": source, "decode": decode, "tables": table, "sink": {"path": "/x"}}).decode


@pytest.fixture(scope="module")
def descriptors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    folder = tmp_path_factory.mktemp("proto")
    (folder / "shop.proto").write_text(PROTO)
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(folder), "--include_imports", f"--descriptor_set_out={folder / 'shop.set'}"]
    subprocess.run([*command, str(folder / "shop.proto")], check=True, cwd=folder)
    return folder / "shop.set"


@pytest.mark.full
def test_protobuf_rows_are_those_that_were_written(spark: SparkSession, descriptors: Path) -> None:
    """The second implementation is protobuf's own: each message is made from JSON by it. A cut message is an error, or a shorter message."""
    random, change = Random(2), records._message_class(descriptors.read_bytes(), "shop.Change")
    written = []
    for _ in range(100):
        row = random_row(random)
        made = {
            **{name: row[name] for name in ("k", "share", "is_new", "kind")},
            "raw": records.plain_value(row["raw"]),
            "at": row["at"].isoformat().replace("+00:00", "Z"),
            "parts": [{"n": random.randint(-9, 9)} for _ in range(2)],
            "sizes": {"a": 2**63},
            "big": random.choice((None, 2**60)),
            "text": row["text"],
        }
        written.append(made)
    messages: list[Any] = [json_format.ParseDict({"table": "t", "op": random.choice(("PUT", "DELETE")), "rows": [row]}, change()) for row in written]
    payloads = [message.SerializeToString() for message in messages]
    decode = {"format": "protobuf", "protobuf_descriptors": str(descriptors), "protobuf_message": "shop.Change"}
    columns = (
        "k BIGINT, text STRING, raw STRING, share DOUBLE, is_new BOOLEAN, at STRING, parts ARRAY<STRUCT<n:INT>>, sizes MAP<STRING,DECIMAL(20,0)>, "
        "kind STRING, big BIGINT"
    )
    cut = [payloads[0][:length] for length in range(len(payloads[0]))]
    found = parsed(spark, payloads + cut, open_decoder(section(decode)), columns)
    for (table, op, (row,), error), message, made in zip(found, messages, written, strict=False):
        assert (table, op, error) == ("t", "put" if message.op == 0 else "delete", None)
        times = {"at": json_format.MessageToDict(message.rows[0])["at"], "sizes": {"a": decimal.Decimal(2**63)}}
        assert row.asDict(recursive=True) == made | times
    assert all(error or rows == [] for _, _, rows, error in found[100:])
    assert sum(error is None for *_, error in found[100:]) >= 2  # nothing at all, and a table without rows


def test_what_a_decoder_cannot_be_made_of(tmp_path: Path) -> None:
    layout = records.layout_of("lrq", "")
    with pytest.raises(LrqError, match="The Avro schema cannot be used"):
        records.avro_decoder('{"type": "recor"}', layout)
    with pytest.raises(LrqError, match="The Avro schema 7 cannot be used"):
        records.avro_decoder({7: "{"}, layout)
    with pytest.raises(LrqError, match="The descriptor set has no usable message"):
        records.protobuf_decoder(b"\xff", "shop.Row", layout)
    with pytest.raises(ConfigError, match="holds no schema"):
        open_decoder(section({"format": "avro", "avro_schemas": str(tmp_path)}))
    for decode, said in (
        ({"format": "avro"}, "needs one of avro_schema and avro_schemas"),
        ({"format": "protobuf", "protobuf_message": "x"}, "needs protobuf_descriptors and protobuf_message"),
        ({"format": "avro", "avro_schema": "x", "record": "row"}, "needs table, and no other record has one"),
    ):
        with pytest.raises(ValueError, match=said):
            section(decode)
