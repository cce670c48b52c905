"""PySpark over receive queues: the data source `lrq`, and tables from snapshot + deltas.

Usage::

    from lrq_ha.spark import register
    register(spark)
    entries = spark.read.format("lrq").option("nodes", "amqp://…,amqp://…").option("subscribe", "LRQ_Recv_flights_east").load()

A stream is read with `spark.readStream` instead.

Rules: `options`, `offsets` and `ranges` are pure; `planning`, `reading` and `stream_reader` talk to nodes; `source` is Spark's interface;
`tables` uses Spark operations only; `executors` looks at a session's machines; `pipeline` keeps tables on disk.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lrq_ha.spark.source import LrqDataSource, register

if TYPE_CHECKING:
    from lrq_ha.spark.executors import check
    from lrq_ha.spark.pipeline.readers import tables_at
    from lrq_ha.spark.query_listener import LrqListener

__all__ = ["LrqDataSource", "LrqListener", "check", "register", "tables_at"]

#: Loaded when they are asked for: Spark's workers, which import this package, do not need them.
_ON_DEMAND = {
    "tables_at": "lrq_ha.spark.pipeline.readers",
    "LrqListener": "lrq_ha.spark.query_listener",
    "check": "lrq_ha.spark.executors",
}


def __getattr__(name: str) -> Any:
    """Loads a name of `_ON_DEMAND`."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_DEMAND[name]), name)
