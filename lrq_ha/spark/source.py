"""Spark's data source `lrq`: options -> ranges (on the driver) -> Arrow record batches (in the workers). `sink` is the way back.

Rules: a partition is one immutable Range; rows come in the order of the source, with exactly the announced schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, DataSourceStreamWriter, DataSourceWriter, InputPartition
from pyspark.sql.types import StructType

from lrq_ha.spark.columns import spark_schema
from lrq_ha.spark.errors import OptionError
from lrq_ha.spark.options import ReadOptions, parse_options
from lrq_ha.spark.planning import plan
from lrq_ha.spark.reading import read_batches
from lrq_ha.spark.sink import LrqStreamWriter, LrqWriter
from lrq_ha.spark.sink_options import parse_write_options
from lrq_ha.spark.stream_reader import LrqStreamReader


def register(spark: SparkSession) -> None:
    """Makes format `lrq` known to `spark`."""
    spark.dataSource.register(LrqDataSource)


class LrqDataSource(DataSource):
    """Receive queues as a table of entries, a row per payload. See docs/spark/options.md and docs/spark/reading.md."""

    @classmethod
    def name(cls) -> str:
        return "lrq"

    def schema(self) -> StructType:
        """The columns; raises OptionError for bad options."""
        return spark_schema(parse_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch reader. Raises OptionError for bad options or another schema than the source's own."""
        options = parse_options(self.options)
        if refused := _check_schema(options, schema):
            raise refused
        return LrqReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A reader for Structured Streaming; it refuses another schema than the source's own when the query starts."""
        options = parse_options(self.options)
        return LrqStreamReader(options, _check_schema(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch writer. Raises OptionError for bad options or columns, and for another mode than append."""
        options = parse_write_options(self.options, schema, streaming=False)
        if overwrite:
            raise OptionError("Format lrq has nothing to overwrite", todo='Use .mode("append")')
        return LrqWriter(options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """A writer for Structured Streaming. Raises OptionError as `writer` does."""
        options = parse_write_options(self.options, schema, streaming=True)
        if overwrite:
            raise OptionError("Format lrq has nothing to overwrite", todo='Use .outputMode("append")')
        return LrqStreamWriter(options)


def _check_schema(options: ReadOptions, schema: StructType) -> OptionError | None:
    if schema == spark_schema(options):
        return None
    return OptionError("Format lrq has a schema of its own", todo="Leave out .schema(…)")


class LrqReader(DataSourceReader):
    """Plans ranges once, on the driver, and reads one range in each partition."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """One InputPartition per Range; none if there is nothing to read (Spark then makes one with value None).

        Raises:
            NoNode, MissingQueue, DataLoss, OptionError: The range asked for cannot be read.
        """
        return [InputPartition(part) for part in plan(self._options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one range.

        Raises:
            DataLoss: A part of it is gone from the queue and `failOnDataLoss` is true.
            NoNode, StreamSilent: It could not be read to its end.
        """
        if partition.value is not None:
            yield from read_batches(partition.value, self._options)
