"""A Spark of the program's own, on this machine alone, and what to tell people of an error out of Spark."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from lrq_ha.errors import LrqError
from lrq_ha.spark.source import register

LOG_SETTINGS = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
"""


def session(cores: int = 2, memory: str = "1g", settings: Mapping[str, str] = {}) -> SparkSession:
    """A quiet Spark on this machine alone, reachable from nowhere else; `settings` go before its own. Raises LrqError if there is no Java."""
    if not (os.environ.get("JAVA_HOME") or shutil.which("java")):
        raise LrqError("Spark needs Java 17, which is not on this machine", todo="Install it, or say with JAVA_HOME where it is")
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    log_settings = Path(tempfile.mkdtemp(prefix="lrq-spark-")) / "log4j2.properties"
    log_settings.write_text(LOG_SETTINGS)
    atexit.register(shutil.rmtree, log_settings.parent, ignore_errors=True)
    builder = SparkSession.builder.master(f"local[{cores}]").appName("lrq-ha")
    own = {
        "spark.driver.memory": memory,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{log_settings}",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(2 * cores),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    for name, value in {**own, **settings}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def cause(trace: str) -> str:
    """The informative line of an error out of Spark: the last one of a Python trace that names an error of ours."""
    ours = [line.strip() for line in trace.splitlines() if line.strip().startswith("lrq_ha.")]
    return ours[-1] if ours else trace
