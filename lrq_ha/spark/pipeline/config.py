"""The configuration of a pipeline: a TOML file, validated as a whole before Spark starts.

Rules: an unknown key is an error; an error names the key and the allowed values, and never a value of [source], which holds passwords.
`sample` has every key.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lrq_ha.errors import LrqError
from lrq_ha.spark.options import ALLOWED, ReadOptions, parse_options
from lrq_ha.spark.pipeline.spec import Format, NewColumn

BUCKETS_MAX = 10_000
#: Options of format lrq that the pipeline sets itself.
OWN_OPTIONS = (
    *("startingOffsets", "endingOffsets", "includeChain", "columns"),
    *("startingTimestamp", "startingOffsetsByTimestampStrategy", "endingTimestamp"),
)
SOURCE_OPTIONS = {name: meaning for name, meaning in ALLOWED.items() if name not in OWN_OPTIONS}
SOURCE_DEFAULTS = {"maxEntriesPerTrigger": "500000"}
_SECONDS = {"s": 1, "m": 60, "h": 3600}


class ConfigError(LrqError):
    """A configuration file that cannot be used."""


def parse_interval(text: str) -> int:
    """Seconds of "30s", "5m" or "1h". Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,6})([smh])", text)
    if match is None:
        raise ValueError('must be a whole number with s, m or h, for example "30s"')
    return int(match[1]) * _SECONDS[match[2]]


def _interval(text: str) -> str:
    parse_interval(text)
    return text


def _table_name(name: str) -> str:
    if not name or name.startswith(("_", ".")) or "/" in name:
        raise ValueError("the name of a table must not be empty, hold a /, or begin with _ or .")
    return name


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DecodeSection(Section):
    """[decode]"""

    format: Literal["lrq-json", "debezium-json", "avro", "protobuf"] = Field(
        "lrq-json", description='form of the payloads: "lrq-json", "debezium-json", "avro" (needs lrq-ha[avro]) or "protobuf"'
    )
    record: Literal["lrq", "debezium", "row"] = Field(
        "lrq", description='fields of an Avro or Protobuf record: as in "lrq"-json or "debezium"-json, or those of a "row" that is put'
    )
    table: str = Field("", description='table of all records that are a "row"')
    avro_schema: str = Field("", description="path of the schema of all Avro records, or the schema itself in JSON")
    avro_schemas: str = Field("", description="folder with schemas as ID.avsc, for Avro records with Confluent's header; in place of avro_schema")
    protobuf_descriptors: str = Field("", description="path of the file that protoc --include_imports --descriptor_set_out writes")
    protobuf_message: str = Field("", description="full name of the Protobuf message, with its package")
    unknown_table: Literal["bad", "ignore"] = Field("bad", description='payloads for tables that are not defined: "bad" (a bad record) or "ignore"')


    @model_validator(mode="after")
    def _complete(self) -> DecodeSection:
        if self.format == "avro" and bool(self.avro_schema) == bool(self.avro_schemas):
            raise ValueError('format = "avro" needs one of avro_schema and avro_schemas')
        if self.format == "protobuf" and not (self.protobuf_descriptors and self.protobuf_message):
            raise ValueError('format = "protobuf" needs protobuf_descriptors and protobuf_message')
        if self.format in ("avro", "protobuf") and (self.record == "row") != bool(self.table):
            raise ValueError('record = "row" needs table, and no other record has one')
        return self


class TableSection(Section):
    """[tables.NAME]"""

    columns: str = Field(alias="schema", description="columns and types, as in CREATE TABLE; not queue, and no name that begins with _")
    key: list[str] = Field(min_length=1, description="columns that name a row within a queue")
    buckets: int = Field(8, ge=1, le=BUCKETS_MAX, description="files that a queue's rows are spread over; a change rewrites those that it touches")
    on_new_column: NewColumn = Field("ignore", description='fields that are no columns: "ignore", "add" (a column) or "fail" (a bad record)')


class SinkSection(Section):
    """[sink]"""

    path: str = Field(min_length=1, description="folder of the tables, on a file system that all of Spark's machines share; made if it is not there")
    format: Format = Field("parquet", description='"parquet", or "delta": each table is a Delta table, too (needs lrq-ha[delta])')
    keep_versions: int = Field(10, ge=1, description="versions that are kept; older ones are removed when they are an hour old")


class RunSection(Section):
    """[run]"""

    interval: Annotated[str, AfterValidator(_interval)] = Field("30s", description='time between two batches, if not --once: "30s", "5m", "1h"')
    on_bad_record: Literal["fail", "quarantine"] = Field("fail", description='"fail" ends the job; "quarantine" keeps bad records in _quarantine')
    need_snapshot: bool = Field(True, description="whether a queue's tables begin with its first full snapshot; false: for senders without any")


class Config(Section):
    """A pipeline's configuration."""

    source: Mapping[str, str | int | bool]
    decode: DecodeSection = DecodeSection()
    tables: dict[Annotated[str, AfterValidator(_table_name)], TableSection] = Field(min_length=1)
    sink: SinkSection
    run: RunSection = RunSection()
    spark: Mapping[str, str] = {}

    @field_validator("source")
    @classmethod
    def _source(cls, given: Mapping[str, str | int | bool]) -> Mapping[str, str | int | bool]:
        for name in OWN_OPTIONS:
            if name.lower() in {key.lower() for key in given}:
                raise ValueError(f"the pipeline sets {name} itself; leave it out")
        try:
            parse_options(source_options(given))
        except LrqError as error:
            raise ValueError(str(error)) from None
        return given

    @model_validator(mode="after")
    def _folders(self) -> Config:
        folded = [name.lower() for name in self.tables]
        if len(set(folded)) < len(folded):
            raise ValueError(f"tables: names must differ in more than case; there are {', '.join(self.tables)}")
        return self

    @property
    def options(self) -> dict[str, str]:
        """Options of format lrq, without those that the pipeline sets."""
        return source_options(self.source)

    @property
    def read_options(self) -> ReadOptions:
        """`options`, checked."""
        return parse_options(self.options)


def source_options(given: Mapping[str, str | int | bool]) -> dict[str, str]:
    """[source] as options of format lrq; `nodes` may be in the environment as LRQ_NODES."""
    found = {**SOURCE_DEFAULTS, **{name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}}
    if "nodes" not in found and os.environ.get("LRQ_NODES"):
        found["nodes"] = os.environ["LRQ_NODES"]
    return found


def read_config(path: Path) -> Config:
    """Reads and checks a configuration file.

    Raises:
        ConfigError: It cannot be read, is no TOML, or has unknown, missing or wrong keys (all of them are named).
    """
    try:
        return Config.model_validate(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", todo="Name a pipeline's configuration; --sample prints one") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(map(_explain, error.errors())), todo="--sample prints every key") from error


def _explain(problem: Mapping[str, object]) -> str:
    location = problem["loc"]
    assert isinstance(location, tuple)
    key = ".".join(str(part) for part in location if part != "[key]") or "the file as a whole"
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown key; allowed here: {', '.join(_keys(location))}"
    if problem["type"] == "missing":
        return f"{key}: missing"
    may_show = key.partition(".")[0] not in ("source", "spark") and isinstance(problem["input"], str | int)
    shown = f" (value {problem['input']!r})" if may_show else ""
    return f"{key}: {str(problem['msg']).removeprefix('Value error, ')}{shown}"


_SECTIONS: tuple[tuple[str, type[Section]], ...] = (
    ("decode", DecodeSection),
    ("tables.flights", TableSection),
    ("sink", SinkSection),
    ("run", RunSection),
)
_SAMPLES = {
    "nodes": '"amqp://reader:SECRET@192.0.2.1:5673,amqp://reader:SECRET@192.0.2.2:5673"',
    "subscribe": '"LRQ_Recv_flights_east"',
    "maxEntriesPerTrigger": SOURCE_DEFAULTS["maxEntriesPerTrigger"],
    "user": '"reader"',
    "password": '"SECRET"',
    "passwordFile": '"/etc/orders/reader.password"',
    "tlsCa": '"/etc/orders/ca.pem"',
    "tlsCert": '"/etc/orders/reader.pem"',
    "tlsKey": '"/etc/orders/reader.key"',
    "subscribePattern": '"LRQ_Recv_flights_.*"',
    "http": '"http://192.0.2.1:8080"',
    "minPartitions": "2",
    "maxEntriesPerPartition": "1000000",
    "queueDiscoveryInterval": "30",
    "failOnDataLoss": "true",
    "tables.flights.schema": '"id BIGINT, carrier STRING, dep_delay BIGINT"',
    "tables.flights.key": '["id"]',
    "sink.path": '"/srv/tables"',
}
_SAMPLE_SOURCE = ("nodes", "subscribe", "maxEntriesPerTrigger")


def _keys(location: tuple[object, ...]) -> list[str]:
    section = {name.partition(".")[0]: model for name, model in _SECTIONS}.get(str(location[0]))
    if len(location) < 2 or section is None:
        return sorted(Config.model_fields)
    return sorted(info.alias or name for name, info in section.model_fields.items())


def sample() -> str:
    """A TOML sample with every key, its meaning and its default."""
    lines = ["[source]", "# Options of format lrq (docs/spark/options.md). Those with a # are left out unless requested."]
    for name, meaning in SOURCE_OPTIONS.items():
        off = "" if name in _SAMPLE_SOURCE else "# "
        lines += [f"# {meaning}", f"{off}{name} = {_SAMPLES[name]}"]
    for heading, model in _SECTIONS:
        lines += ["", f"[{heading}]"]
        for field, info in model.model_fields.items():
            name = info.alias or field
            lines += [f"# {info.description}", f"{name} = {_SAMPLES.get(f'{heading}.{name}') or _toml(info.default)}"]
    lines += ["", "[spark]", "# Spark's own settings. Without spark.master, and without spark-submit, the job runs in its own process."]
    lines += ['# "spark.driver.memory" = "4g"']
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, int) else f'"{value}"'


