"""PySpark over receive queues: the data source `lrq`, and tables from snapshot + deltas.

Usage::

    from lrq_ha.spark import register
    register(spark)
    entries = spark.read.format("lrq").option("nodes", "amqp://…,amqp://…").option("subscribe", "LRQ_Recv_flights_east").load()

A stream is read with `spark.readStream` instead.

Rules: `options`, `offsets` and `ranges` are pure; `planning`, `reading` and `stream_reader` talk to nodes; `source` is Spark's interface;
`tables` uses Spark operations only; `pipeline` keeps tables on disk.
"""

from typing import TYPE_CHECKING, Any

from lrq_ha.spark.source import LrqDataSource, register

if TYPE_CHECKING:
    from lrq_ha.spark.pipeline.readers import tables_at

__all__ = ["LrqDataSource", "register", "tables_at"]


def __getattr__(name: str) -> Any:
    """`tables_at` is loaded when it is asked for: Spark's workers, which import this package, do not need the pipeline."""
    if name != "tables_at":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lrq_ha.spark.pipeline.readers import tables_at

    return tables_at
