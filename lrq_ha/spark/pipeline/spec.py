"""The definition of a table, and how it goes with the table that is on disk. Pure.

A definition may grow: columns may be added, and their types may become wider. All else would need the rows again that are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from lrq_ha.spark.pipeline.errors import SchemaChanged
from lrq_ha.spark.pipeline.manifest import TableState

QUEUE = "queue"
#: Types of key columns: those whose equal values have equal texts.
KEY_TYPES = ("string", "tinyint", "smallint", "int", "bigint", "boolean", "date", "timestamp", "timestamp_ntz")
#: Type -> the types that it may become; Spark reads older Parquet files with these.
WIDER = {
    "tinyint": ("smallint", "int", "bigint"),
    "smallint": ("int", "bigint"),
    "int": ("bigint",),
    "float": ("double",),
}

NewColumn = Literal["ignore", "add", "fail"]
Format = Literal["parquet", "delta"]
ANOTHER_PATH = "Change it back, or write to another path"


@dataclass(frozen=True)
class Table:
    """A table that payloads name.

    Attributes:
        name: As payloads call it.
        columns: Name -> type in DDL, without the column `queue`.
        key: Columns that name a row within a queue; none of them may be null.
        buckets: Number of files that the rows of a queue are spread over, by a hash of the key.
        on_new_column: What a field of a row does that is no column.
    """

    name: str
    columns: Mapping[str, str]
    key: tuple[str, ...]
    buckets: int = 8
    on_new_column: NewColumn = "ignore"

    def __post_init__(self) -> None:
        """Raises SchemaChanged if the definition contradicts itself."""
        lacking = [name for name in self.key if name not in self.columns]
        if lacking or not self.key:
            raise SchemaChanged(f"Table {self.name} has no column for its key {', '.join(lacking)}", todo="Name columns of its schema as its key")
        for name in self.key:
            if self.columns[name] not in KEY_TYPES:
                found = f"Table {self.name} has the key column {name} of type {self.columns[name]}"
                raise SchemaChanged(found, todo=f"Use one of {', '.join(KEY_TYPES)}")
        reserved = [name for name in self.columns if name.lower() == QUEUE or name.startswith("_")]
        if reserved:
            raise SchemaChanged(f"Table {self.name} has the column {reserved[0]}", todo=f"Rename it: {QUEUE} and names that begin with _ are taken")

    @property
    def schema(self) -> str:
        """The columns as DDL."""
        return schema_of(self.columns)

    @property
    def key_schema(self) -> str:
        """The key's columns as DDL."""
        return schema_of({name: self.columns[name] for name in self.key})

    @property
    def stored(self) -> Mapping[str, str]:
        """The columns of its data files."""
        return {QUEUE: "string", **self.columns}

    def with_columns(self, new: Mapping[str, str]) -> Table:
        """The table with more columns."""
        return replace(self, columns={**self.columns, **new})


def schema_of(columns: Mapping[str, str]) -> str:
    """DDL of columns."""
    return ", ".join(f"{quote_name(name)} {kind}" for name, kind in columns.items())


def quote_name(name: str) -> str:
    """A column's name as SQL has it, whatever characters it has."""
    return "`" + name.replace("`", "``") + "`"


def reconcile_table(table: Table, found: TableState | None) -> Table:
    """The definition of a table together with what is on disk: columns that were added from rows stay.

    Raises:
        SchemaChanged: The definition is another one, and no wider one.
    """
    if found is None:
        return table
    where = f"Table {table.name}"
    if table.key != found.key:
        raise SchemaChanged(f"{where} has the key {', '.join(found.key)} on disk, and {', '.join(table.key)} in its definition", todo=ANOTHER_PATH)
    if table.buckets != found.buckets:
        raise SchemaChanged(f"{where} has {found.buckets} buckets on disk, and {table.buckets} in its definition", todo=ANOTHER_PATH)
    for name, kind in found.columns.items():
        wanted = table.columns.get(name)
        if wanted is None and table.on_new_column != "add":
            raise SchemaChanged(f"{where} has a column {name} on disk, and none in its definition", todo="Add it to the definition again")
        if wanted not in (None, kind, *WIDER.get(kind, ())):
            raise SchemaChanged(f"{where} has the column {name} of type {kind} on disk, and of type {wanted} in its definition", todo=ANOTHER_PATH)
    return table.with_columns({name: kind for name, kind in found.columns.items() if name not in table.columns})


