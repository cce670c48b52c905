"""PySpark over receive queues: the data source `lrq`, and tables from snapshot + deltas.

Usage::

    from lrq_ha.spark import register
    register(spark)
    entries = spark.read.format("lrq").option("nodes", "amqp://…,amqp://…").option("subscribe", "LRQ_Recv_flights_east").load()

A stream is read with `spark.readStream` instead.

Rules: `options`, `offsets` and `ranges` are pure; `planning`, `reading` and `stream_reader` talk to nodes; `source` is Spark's interface;
`tables` uses Spark operations only.
"""

from lrq_ha.spark.source import LrqDataSource, register

__all__ = ["LrqDataSource", "register"]
