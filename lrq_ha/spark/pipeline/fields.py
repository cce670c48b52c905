"""The types of fields that become columns (on_new_column = add). One small Spark job, when a batch has such fields."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

#: Types of a JSON value, as Spark's variants name them, and the type of the column; all others become JSON in text.
COLUMN_TYPES = {"BIGINT": "bigint", "DOUBLE": "double", "BOOLEAN": "boolean"}


def added_columns(changes: DataFrame, table: str, fields: Iterable[str]) -> dict[str, str]:
    """Field -> type, for fields of a table's rows that are no columns.

    Whole numbers become bigint, other numbers double, true and false boolean. All else, and a field with values of several types, becomes
    a string with the JSON.

    Args:
        changes: As `decode_changes` returns them.
        table: The table.
        fields: Names of the fields.
    """
    names = sorted(fields)
    row = F.parse_json("row")
    values = (F.try_variant_get(row, f"$[{_quoted(name)}]", "variant") for name in names)
    types = [F.schema_of_variant_agg(value).alias(str(number)) for number, value in enumerate(values)]
    found = changes.where((F.col("table") == table) & F.col("row").isNotNull()).agg(*types).collect()[0]
    return {name: _column_type(found[number]) for number, name in enumerate(names)}


def _column_type(kind: str) -> str:
    if kind.startswith("DECIMAL"):
        return "double"
    return COLUMN_TYPES.get(kind, "string")


def _quoted(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
