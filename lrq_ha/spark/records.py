"""Decoders of binary records: Avro and Protocol Buffers become the JSON that a decoder of decode.py takes.

A record is decoded in a Python worker, as Arrow arrays; all else stays in Spark. What JSON has no value for becomes the text that Spark's columns
are read from: bytes in base64, times in ISO 8601, decimals in digits. A record that cannot be decoded, or that has bytes after its end, is an
error of its payload, and never one of the job.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import uuid
from collections.abc import Callable, Mapping
from functools import cache
from io import BytesIO
from typing import Any

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import Message
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import ArrowUDFType, arrow_udf

from lrq_ha.errors import LrqError
from lrq_ha.spark.decode import PUT, Decoder, content_of, decode_debezium_json, decode_lrq_json

CONFLUENT_HEADER = 5  # a zero, and the ID of the schema as four bytes
RECORD_TEXT = "text STRING, error STRING"

Read = Callable[[bytes], Any]
"""A payload -> a value of which JSON can be made. Raises whatever its library raises."""


def layout_of(record: str, table: str) -> Decoder:
    """How the fields of a record say what changes.

    Args:
        record: lrq (fields table, op, rows), debezium (before, after, op, source), or row: a record is a row that is put.
        table: The table of all rows, if record is row.
    """
    if record == "row":
        return lambda text: content_of(F.lit(table), F.lit(PUT), F.when(text.isNotNull(), F.array(text.cast("string"))), F.lit(None))
    return {"lrq": decode_lrq_json, "debezium": decode_debezium_json}[record]


def avro_decoder(schemas: Mapping[int, str] | str, layout: Decoder) -> Decoder:
    """The decoder of Avro records.

    Args:
        schemas: The schema of all records in JSON; or those by their ID, for records with Confluent's header of five bytes.
        layout: As `layout_of` returns it.

    Raises:
        LrqError: fastavro is missing, or a schema is wrong.
    """
    try:
        import fastavro
    except ModuleNotFoundError as error:
        raise LrqError("Avro needs the package fastavro, which is not installed", todo="pip install 'lrq-ha[avro]'") from error
    for name, text in {"": schemas}.items() if isinstance(schemas, str) else schemas.items():
        try:
            fastavro.parse_schema(json.loads(text))
        except Exception as error:  # fastavro has no class of errors for all of these
            raise LrqError(f"The Avro schema {name} cannot be used: {error}".replace("  ", " "), todo="Correct it") from error
    return _decoder("Avro", schemas, _read_avro, layout)


def protobuf_decoder(descriptors: bytes, message: str, layout: Decoder) -> Decoder:
    """The decoder of messages of Protocol Buffers.

    Args:
        descriptors: What `protoc --include_imports --descriptor_set_out` writes.
        message: Full name of the messages' type.
        layout: As `layout_of` returns it.

    Raises:
        LrqError: The set cannot be read, or has no such message.
    """
    try:
        _message_class(descriptors, message)
    except Exception as error:  # protobuf's errors depend on its implementation
        todo = "Write it with protoc --include_imports --descriptor_set_out, and name the message with its package"
        raise LrqError(f"The descriptor set has no usable message {message}: {error}", todo=todo) from error
    return _decoder("Protocol Buffers", (descriptors, message), _read_protobuf, layout)


def _decoder(form: str, about: Any, reader: Callable[[Any], Read], layout: Decoder) -> Decoder:
    def to_text(payloads: pa.Array) -> pa.Array:
        read = reader(about)
        found = [_text(payload, read) for payload in payloads.to_pylist()]
        return pa.StructArray.from_arrays([pa.array([one[part] for one in found], pa.string()) for part in (0, 1)], ["text", "error"])

    convert = arrow_udf(to_text, RECORD_TEXT, ArrowUDFType.SCALAR)

    def decode(payload: Column) -> Column:
        record = convert(payload)
        found = layout(record["text"].cast("binary"))
        error = F.when(record["error"].isNotNull(), F.concat(F.lit(f"it is no record of {form}: "), record["error"]))
        return content_of(found["table"], found["op"], found["rows"], F.coalesce(error, found["error"]))

    return decode


def _text(payload: bytes | None, read: Read) -> tuple[str | None, str | None]:
    """(JSON, error): one of them, or none if there is no payload."""
    if payload is None:
        return None, None
    try:
        return json.dumps(read(payload), default=plain_value, ensure_ascii=False), None
    except Exception as error:  # whatever a library raises about bytes that it cannot read
        return None, f"{type(error).__name__}: {error}"


def plain_value(value: Any) -> str:
    """What JSON has no value for, as text that Spark reads a column of its type from."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if isinstance(value, uuid.UUID):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__} is not supported")


def _read_avro(schemas: Mapping[int, str] | str) -> Read:
    from fastavro import schemaless_reader

    def read(payload: bytes) -> Any:
        data = BytesIO(payload)
        if isinstance(schemas, str):
            schema = _avro_schema(schemas)
        else:
            header = data.read(CONFLUENT_HEADER)
            if len(header) < CONFLUENT_HEADER or header[0] != 0:
                raise ValueError("it does not begin with Confluent's header")
            number = int.from_bytes(header[1:], "big")
            if number not in schemas:
                raise ValueError(f"schema {number} is not in the folder of schemas: put it there as {number}.avsc, and start the job again")
            schema = _avro_schema(schemas[number])
        record = schemaless_reader(data, schema, None)
        if left := len(payload) - data.tell():
            raise ValueError(f"{left} bytes are left after the record")
        return record

    return read


@cache
def _avro_schema(text: str) -> Any:
    from fastavro import parse_schema

    return parse_schema(json.loads(text))


def _read_protobuf(about: tuple[bytes, str]) -> Read:
    message = _message_class(*about)
    return lambda payload: message_values(message.FromString(payload))


@cache
def _message_class(descriptors: bytes, name: str) -> type[Message]:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def message_values(message: Message) -> Any:
    """A message as values of JSON, numbers of 64 bits included.

    Fields that are not set are left out if their presence is known, else they have their default. An enum is its name.
    """
    if message.DESCRIPTOR.full_name.startswith("google.protobuf."):  # times, durations, wrappers, structures
        value = getattr(message, "value", None)
        return value if isinstance(value, int | bytes) else json_format.MessageToDict(message)
    found = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if not field.is_repeated:
            found[field.name] = _field_value(field, value)
        elif field.message_type and field.message_type.GetOptions().map_entry:
            of_values = field.message_type.fields_by_name["value"]
            found[field.name] = {_key(key): _field_value(of_values, value[key]) for key in value}
        else:
            found[field.name] = [_field_value(field, one) for one in value]
    return found


def _key(key: Any) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def _field_value(field: Any, value: Any) -> Any:
    if field.message_type:
        return message_values(value)
    if field.enum_type:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    return value
