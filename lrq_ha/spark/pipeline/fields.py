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
    a string with the JSON. A field that is null in all rows has no type yet, and is left out.

    Args:
        changes: As `decode_changes` returns them.
        table: The table.
        fields: Names of the fields.
    """
    names = sorted(fields)
    values = F.try_parse_json("row").cast("map<string, variant>")
    types = [F.schema_of_variant_agg(F.try_element_at(values, F.lit(name))).alias(str(number)) for number, name in enumerate(names)]
    found = changes.where((F.col("table") == table) & F.col("row").isNotNull()).agg(*types).collect()[0]
    return {name: _column_type(found[number]) for number, name in enumerate(names) if found[number] != "VOID"}


def _column_type(kind: str) -> str:
    return "double" if kind.startswith("DECIMAL") else COLUMN_TYPES.get(kind, "string")
