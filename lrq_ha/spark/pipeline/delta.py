"""Delta tables: the data files of a table under a Delta log, which follows the versions. Only the driver writes it, with delta-rs.

    data/TABLE/_delta_log/…    one commit for each version that changes the table's files
    _versions/N.delta.json     table -> version of its Delta table, as it belongs to version N

The version is made first, and says what is true. Then each log gets a commit that removes and adds what its files differ in from the version's; no
file is written twice. The commit holds txn(appId = ID of the pipeline, version = N), so it is made once. A job that starts, after a kill at
whatever instant, completes the newest version. Between the first table's commit and the last one's, readers of Delta see two versions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql.types import StructType

from lrq_ha.spark.pipeline import store
from lrq_ha.spark.pipeline.errors import DeltaFailed, SchemaChanged
from lrq_ha.spark.pipeline.manifest import DataFile, Manifest, TableState
from lrq_ha.spark.pipeline.spec import QUEUE, Table, schema_of

#: Characters that a column of a Delta table may not have.
REFUSED = frozenset(" ,;{}()\n\t=")
ATTEMPTS = 3


def check_tables(path: Path, tables: Iterable[Table]) -> None:
    """Whether Delta tables can have these definitions.

    Raises:
        SchemaChanged: One has a name or a type that Delta does not have, or a type that became wider.
    """
    for table in tables:
        check_columns(table)
        wanted = _fields(_schema(table.stored))
        place = str(store.table_folder(path, table.name))
        if "%" in place:
            todo = "Rename the table or the path: delta-rs reads no paths with %, which stands for all but letters, digits and _.-~"
            raise SchemaChanged(f"Table {table.name} has the folder {place}", todo=todo)
        had = _fields(DeltaTable(place).schema()) if DeltaTable.is_deltatable(place) else {}
        for name, kind in had.items():
            if wanted.get(name, kind) != kind:
                raise SchemaChanged(
                    f"Table {table.name} has the column {name} of type {kind} in Delta, and of type {wanted[name]} in its definition",
                    todo="Change it back, or write to another path: types of Delta tables do not become wider",
                )


def check_columns(table: Table) -> None:
    """Whether Delta has the names and types of a table's columns. Raises SchemaChanged."""
    refused = [name for name in table.columns if REFUSED & set(name)]
    if refused:
        todo = "Rename it: column names of Delta have no spaces, and none of ,;{}()="
        raise SchemaChanged(f"Table {table.name} has the column {refused[0]!r}", todo=todo)
    try:
        if any("interval" in kind for kind in table.columns.values()):  # which delta-rs takes, and no reader knows
            raise ValueError("interval")
        _schema(table.stored)
    except (DeltaError, ValueError) as error:
        raise SchemaChanged(f"Table {table.name} has a type that Delta does not have: {error}", todo='Use another, or format = "parquet"') from error


def publish_version(path: Path, manifest: Manifest) -> None:
    """Makes the Delta tables those of a version; does nothing for those that are.

    Args:
        path: Of the tables.
        manifest: The newest version.

    Raises:
        DeltaFailed: A log cannot be written or read.
    """
    found = {}
    for name, table in manifest.tables.items():
        folder = store.table_folder(path, name)
        try:
            found[name] = publish_table(folder, path, table, manifest)
        except (DeltaError, OSError) as error:
            why = " ".join(str(error).split())
            raise DeltaFailed(f"The Delta log of {folder} cannot follow version {manifest.version}: {why}") from error
    versions = {name: version for name, version in found.items() if version is not None}
    if versions.keys() == manifest.tables.keys():
        store.write_delta_versions(path, manifest.version, versions)


def publish_table(folder: Path, path: Path, table: TableState, manifest: Manifest) -> int | None:
    """Commits a table's files of a version to its log, if it has others.

    Returns:
        The version of the Delta table; None if another job has committed a newer version than this one.
    """
    wanted = {str((path / file.path).relative_to(folder)): file for file in table.files}
    schema = _schema({QUEUE: "string", **table.columns})
    for attempt in range(ATTEMPTS):
        log = DeltaTable.create(folder, schema, mode="ignore")
        add_columns(log, schema)
        applied = log.transaction_version(manifest.pipeline)
        had = dict(zip(*(log.get_add_actions(flatten=True)[name].to_pylist() for name in ("path", "size_bytes")), strict=True))
        if applied is not None and applied > manifest.version:
            return None
        if had.keys() == wanted.keys():
            return log.version()
        now = int(time.time() * 1000)
        removed = [RemoveAction(name, True, now, size=size) for name, size in had.items() if name not in wanted]
        added = [_add(name, file, now) for name, file in wanted.items() if name not in had]
        once = CommitProperties(app_transactions=[Transaction(manifest.pipeline, manifest.version)])
        try:
            log.create_write_transaction([*removed, *added], "append", schema, commit_properties=once)
            log.update_incremental()
            return log.version()
        except CommitFailedError:  # another process committed to this log meanwhile
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def add_columns(log: DeltaTable, schema: Schema) -> None:
    """Adds the columns that a Delta table lacks, in a commit of their own: older versions have them as null."""
    had = _fields(log.schema())
    new = [field for field in schema.fields if field.name not in had]
    if new:
        log.alter.add_columns(new)


def _add(name: str, file: DataFile, now: int) -> AddAction:
    return AddAction(name, file.bytes, {}, now, True, f'{{"numRecords":{file.rows}}}')


def _schema(columns: Mapping[str, str]) -> Schema:
    return Schema.from_json(StructType.fromDDL(schema_of(columns)).json())


def _fields(schema: Schema) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema.fields}
