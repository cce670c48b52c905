"""PySpark over receive queues: the data source `lrq`, and tables from snapshot + deltas.

Usage::

    from lrq_ha.spark import register
    register(spark)
    entries = spark.read.format("lrq").option("nodes", "amqp://…,amqp://…").option("subscribe", "LRQ_Recv_flights_east").load()

Rules: `options` and `ranges` are pure; `amqp` alone talks to nodes; `source` is Spark's interface; `tables` uses Spark operations only.
"""

from lrq_ha.spark.pipeline.readers import tables_at
from lrq_ha.spark.source import LrqDataSource, register

__all__ = ["LrqDataSource", "register", "tables_at"]
