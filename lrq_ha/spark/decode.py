"""Decoders of payloads for the pipeline: each turns a payload into changes of one table. Spark operations only.

A decoder is a function from the payload column (binary) to a column

    struct<table: string, op: string, rows: array<string>, error: string>

`op` is put, delete or truncate. A row is a JSON object in text: whole for put, with at least the key for delete. `error` says what is wrong with
the payload; it is null if nothing is. A decoder never raises an error of its own, whatever the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F

PUT = "put"
DELETE = "delete"
TRUNCATE = "truncate"

CORRUPT = "_corrupt"
PERMISSIVE = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}

Decoder = Callable[[Column], Column]


def decode_lrq_json(payload: Column) -> Column:
    """{"table": "flights", "op": "put", "rows": [{…}, …]}; `op` may be left out or empty, and in capitals, "truncate" needs no rows."""
    found = F.from_json(payload.cast("string"), f"table STRING, op STRING, rows ARRAY<STRING>, {CORRUPT} STRING", PERMISSIVE)
    op = F.coalesce(F.nullif(F.lower(found["op"]), F.lit("")), F.lit(PUT))
    error = (
        F.when(found.isNull() | found[CORRUPT].isNotNull(), "it is not JSON of the form {table, op, rows}")
        .when(found["table"].isNull(), "it names no table")
        .when(~op.isin(PUT, DELETE, TRUNCATE), F.concat(F.lit("its op is "), op, F.lit(f", and not {PUT}, {DELETE} or {TRUNCATE}")))
        .when((op != TRUNCATE) & found["rows"].isNull(), "it has no rows")
    )
    rows = F.when(op != TRUNCATE, found["rows"])
    return content_of(found["table"], op, rows, error)


_DEBEZIUM = "before STRING, after STRING, op STRING, source STRUCT<schema STRING, table STRING>"
_DEBEZIUM_OPS = {"c": PUT, "u": PUT, "r": PUT, "d": DELETE, "t": TRUNCATE}


def decode_debezium_json(payload: Column) -> Column:
    """A change event of Debezium in JSON, with or without its `schema`; the table is `source.table`.

    `op` c, u and r put `after`, d deletes `before`, t truncates.
    """
    text = f"{_DEBEZIUM}, payload STRUCT<{_DEBEZIUM}>, {CORRUPT} STRING"
    found = F.from_json(payload.cast("string"), text, PERMISSIVE)
    event = F.coalesce(found["payload"], F.struct(found["before"], found["after"], found["op"], found["source"]))
    named = F.create_map(*(F.lit(word) for pair in _DEBEZIUM_OPS.items() for word in pair))
    op = F.try_element_at(named, event["op"])
    row = F.when(op == PUT, event["after"]).when(op == DELETE, event["before"])
    error = (
        F.when(found.isNull() | found[CORRUPT].isNotNull(), "it is no JSON of Debezium")
        .when(event["source"]["table"].isNull(), "it names no source.table")
        .when(op.isNull(), F.concat(F.lit("its op is "), F.coalesce(event["op"], F.lit("missing")), F.lit(", and not c, u, r, d or t")))
        .when((op != TRUNCATE) & row.isNull(), F.when(op == PUT, "it has no after").otherwise("it has no before (in PostgreSQL: replica identity)"))
    )
    return content_of(event["source"]["table"], op, F.when(row.isNotNull(), F.array(row)), error)


DECODERS: Mapping[str, Decoder] = {"lrq-json": decode_lrq_json, "debezium-json": decode_debezium_json}


def content_of(table: Column, op: Column, rows: Column, error: Column) -> Column:
    """What a decoder returns."""
    return F.struct(table.alias("table"), op.alias("op"), rows.alias("rows"), error.cast("string").alias("error"))
