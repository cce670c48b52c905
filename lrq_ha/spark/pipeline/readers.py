"""Tables for readers: a frame for each table of one version, which stays as it is while the pipeline goes on."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from lrq_ha.spark.pipeline import store
from lrq_ha.spark.pipeline.apply import QUARANTINE, QUARANTINED, read_files
from lrq_ha.spark.pipeline.spec import QUEUE


def tables_at(spark: SparkSession, path: str | Path, version: int | None = None) -> dict[str, DataFrame]:
    """Table name -> its rows in one version: column `queue`, then the columns of its schema.

    All tables show whole transactions of each queue up to one position. The frames stay valid for an hour after keep_versions newer versions.

    Args:
        spark: The session.
        path: Of the tables.
        version: Number of the version; None: the newest.

    Returns:
        All tables, and `_quarantine` if there are bad records: queue, epoch, sequence, index, number, error, payload.

    Raises:
        NoVersion: The version is not there, or there is none yet.
        BadVersion: It cannot be read.
    """
    folder = Path(path).absolute()
    manifest = store.read_version(folder, version)
    found = {
        name: read_files(spark, folder, table.files, {QUEUE: "string", **table.columns}) for name, table in manifest.tables.items()
    }
    if manifest.quarantine:
        found[QUARANTINE] = read_files(spark, folder, manifest.quarantine, QUARANTINED)
    return found
