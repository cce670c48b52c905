"""Makes format `lrq` known to each Spark session of an environment where lrq-ha is installed, Spark Connect servers among them.

PySpark imports modules whose names begin with `pyspark_` from the folders of `sys.path`, and registers their `DefaultSource`.
"""

from lrq_ha.spark.source import LrqDataSource as DefaultSource

__all__ = ["DefaultSource"]
