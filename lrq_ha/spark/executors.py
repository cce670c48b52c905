"""What the executors of a session have: Python, packages, a way to the nodes, and their clocks.

How it works: Spark runs as many tasks at once as it has cores, so each executor gets one. A first run of tasks looks at packages and nodes. A second
one, in Python workers that have started, looks at the clocks.

Invariants:

- `look` is sent to the executors by value, and imports what it looks for itself. So an executor that lacks lrq-ha is told of, and does not fail.
- No line has a user or a password.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from lrq_ha import urls
from lrq_ha.routing.names import ROUTING_VHOST
from lrq_ha.spark.access import ALLOWED, parse_access
from lrq_ha.spark.options import known_options

PACKAGES = ("lrq-ha", "pyspark", "pyarrow", "ptars", "pika", "protobuf", "pydantic", "pyroaring")
CONNECTION_NAME = "lrq-ha spark check"
TIMEOUT_S = 5.0
HOLD_S = 1.0  # so that no executor is done before another one has its task
REGISTER_PAUSE_S = 1.0
REGISTER_LOOKS_MAX = 10


Place = tuple[str, int, str]
"""Host, port and address of a node."""
Executor = tuple[str, int]
"""Host, and the process that starts its Python workers."""


@dataclass(frozen=True)
class Look:
    """What a process has.

    Attributes:
        host: Its machine.
        process: The process that starts its Python workers; of the looking process itself: 0.
        python: Version of Python.
        packages: Package -> version; None: it is missing.
        nodes: HOST:PORT of a node -> its answer.
        began: The clock when the look began, in seconds since 1970.
        ended: The clock when it ended.
    """

    host: str
    process: int
    python: str
    packages: Mapping[str, str | None]
    nodes: Mapping[str, str]
    began: float
    ended: float


def check(spark: SparkSession, nodes: str, *, tasks: int | None = None, **access: str) -> list[str]:
    """Looks at this process and at every executor: Python and packages, whether each node takes readers, and how far the clock is off.

    An executor that is busy with other tasks meanwhile may be missing, as is one that Spark has not started.

    Args:
        spark: The session; also of Spark Connect.
        nodes: As option `nodes` of format lrq: AMQP addresses, comma separated.
        tasks: How many tasks look, at once; None: one for each core.
        access: Options of format lrq for the way to the nodes: `user`, `passwordFile`, `tlsCa` and so on.

    Returns:
        One line for this process, and one for each executor.

    Raises:
        OptionError: An option is unknown, or an address is malformed.
    """
    options = known_options({"nodes": nodes, **access}, ALLOWED, {})
    places = [(*urls.endpoint(url), url) for url in parse_access(options, ROUTING_VHOST).nodes]
    here = Look(**look(places, options, 0, 0))
    with _by_value():
        count = tasks or _count_cores(spark)
        found, _, _ = _run(spark, count, places, options)
        clocks, submitted, returned = _run(spark, count, [], {})
    differences = {place: (one.ended - returned, one.began - submitted) for place, one in clocks.items()}
    return format_lines(here, found, differences)


def look(places: Sequence[Place], access: Mapping[str, str], hold_s: float, process: int) -> dict[str, Any]:
    """What this process has, as the arguments of Look; takes `hold_s` seconds at least."""
    began = time.time()
    packages = {name: installed(name) for name in PACKAGES}
    nodes = {f"{host}:{port}": ask_node(host, port, {**access, "nodes": url}) for host, port, url in places}
    time.sleep(max(0.0, began + hold_s - time.time()))
    python = platform.python_version()
    return {
        "host": socket.gethostname(), "process": process, "python": python, "packages": packages, "nodes": nodes, "began": began, "ended": time.time()
    }  # fmt: skip


def installed(package: str) -> str | None:
    """The version of a package; None if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        pass
    if package != "lrq-ha":
        return None
    try:  # of --py-files, or on PYTHONPATH
        return str(importlib.import_module("lrq_ha").__version__)
    except ImportError:
        return None


def ask_node(host: str, port: int, access: Mapping[str, str]) -> str:
    """Whether a node takes readers from this process, in a few words; without the packages for that, whether its port answers."""
    try:
        from lrq_ha.errors import LrqError
        from lrq_ha.spark.access import parse_access
        from lrq_ha.streams.errors import NoNode
        from lrq_ha.streams.node_connection import NodeConnection
    except ImportError:
        try:
            socket.create_connection((host, port), TIMEOUT_S).close()
        except OSError as error:
            return str(error)
        return "its port answers"
    try:
        NodeConnection.open(parse_access(access, ROUTING_VHOST).reader_parameters(), CONNECTION_NAME, 0).close()
    except NoNode as error:
        return " ".join("; ".join(error.answers.values()).split())
    except LrqError as error:
        return str(error)
    return "takes readers"


@contextmanager
def _by_value() -> Iterator[None]:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]


def _count_cores(spark: SparkSession) -> int:
    """Cores of all executors, when those that start have registered: two counts agree."""
    found = 0
    for _ in range(REGISTER_LOOKS_MAX):
        before, found = found, spark.range(1_000_000).select(F.spark_partition_id().alias("part")).distinct().count()
        if found == before:
            break
        time.sleep(REGISTER_PAUSE_S)
    return found


def _run(spark: SparkSession, tasks: int, places: Sequence[Place], access: Mapping[str, str]) -> tuple[dict[Executor, Look], float, float]:
    """A look in each executor, the clock here before it, and the clock here after it."""

    def task(_: int) -> str:
        return json.dumps(look(places, access, HOLD_S, os.getppid()))

    probe = F.udf(task, "string", useArrow=False).asNondeterministic()
    submitted = time.time()
    rows = spark.range(0, tasks, 1, tasks).select(probe("id").alias("look")).collect()
    returned = time.time()
    found = [Look(**json.loads(row.look)) for row in rows]
    return {(one.host, one.process): one for one in found}, submitted, returned


def format_lines(here: Look, found: Mapping[Executor, Look], differences: Mapping[Executor, tuple[float, float]]) -> list[str]:
    """The lines of a report.

    Args:
        here: This process.
        found: The executors.
        differences: Executor -> the least and the largest difference of its clock from the one here, in seconds.
    """
    packages = ", ".join(f"{name} {number}" if number else f"{name} is missing" for name, number in here.packages.items())
    lines = [_line(f"this process on {here.host}: Python {here.python}; {packages}", here)]
    for place, one in sorted(found.items()):
        parts = [f"executor {place[0]}/{place[1]}: Python {one.python}{_other(one.python, here.python)}", _packages(one, here)]
        if place in differences:
            least, largest = differences[place]
            parts.append(f"clock {(least + largest) / 2:+.1f} s (± {(largest - least) / 2:.1f} s)")
        lines.append(_line("; ".join(parts), one))
    return lines


def _line(text: str, one: Look) -> str:
    return "; ".join([text, *(f"{node} {answer}" if answer == "takes readers" else f"{node}: {answer}" for node, answer in one.nodes.items())])


def _packages(one: Look, here: Look) -> str:
    others = [
        f"{name} {number}{_other(number, here.packages.get(name))}" if number else f"{name} is missing"
        for name, number in one.packages.items()
        if number != here.packages.get(name)
    ]
    return ", ".join(others) or "packages as here"


def _other(number: str, wanted: str | None) -> str:
    return "" if number == wanted else f" (here: {wanted or 'missing'})"
