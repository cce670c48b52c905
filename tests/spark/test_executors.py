"""What is told of executors: their Python, their packages, their way to the nodes, and their clocks."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from lrq_ha.spark import check
from lrq_ha.spark.errors import OptionError
from lrq_ha.spark.executors import PACKAGES, Look, _by_value, format_lines, look

HERE = Look("h0", 0, "3.11.2", dict.fromkeys(PACKAGES, "1.0"), {"10.0.0.1:5672": "takes readers"}, 0, 0)
EXECUTOR = replace(HERE, host="h1", process=7)


@pytest.fixture
def port() -> Iterator[int]:
    """Of something that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def lines(one: Look, difference: tuple[float, float] | None = None) -> list[str]:
    place = ("h1", 7)
    return format_lines(HERE, {place: one}, {place: difference} if difference else {})


@pytest.mark.quick
def test_an_executor_like_this_process() -> None:
    assert lines(EXECUTOR, (-0.125, 0.375)) == [
        f"this process on h0: Python 3.11.2; {', '.join(f'{name} 1.0' for name in PACKAGES)}; 10.0.0.1:5672 takes readers",
        "executor h1/7: Python 3.11.2; packages as here; clock +0.1 s (± 0.2 s); 10.0.0.1:5672 takes readers",
    ]


@pytest.mark.quick
def test_an_executor_with_faults() -> None:
    packages = {**HERE.packages, "pika": None, "pyarrow": "2.0"}
    found = replace(EXECUTOR, python="3.11.9", packages=packages, nodes={"10.0.0.1:5672": "[Errno 111] Connection refused"})
    said = "Python 3.11.9 (here: 3.11.2); pyarrow 2.0 (here: 1.0), pika is missing; clock +61.0 s (± 1.0 s); "
    assert lines(found, (60, 62))[1] == f"executor h1/7: {said}10.0.0.1:5672: [Errno 111] Connection refused"
    assert "clock" not in lines(found)[1], "it had no second task"


PROGRAM = """
import pickle, sys
for name in ("lrq_ha", "pyarrow"):
    sys.modules[name] = None
found = pickle.loads(sys.stdin.buffer.read())()
print(found["packages"]["lrq-ha"], *found["nodes"].items())
"""


@pytest.mark.quick
def test_an_executor_without_the_package_tells_so(port: int) -> None:
    """Sent by reference, `look` would need it."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    with _by_value():
        places = [("127.0.0.1", number, "amqp://u:p@h") for number in (port, free)]
        program = cloudpickle.dumps(lambda: look(places, {}, 0, 0))  # type: ignore[no-untyped-call]
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=program, capture_output=True, timeout=60)
    said = done.stdout.decode()
    assert f"('127.0.0.1:{port}', 'its port answers')" in said, done.stderr
    assert f"('127.0.0.1:{free}', '[Errno 111] Connection refused')" in said


@pytest.mark.quick
def test_addresses_that_are_none() -> None:
    with pytest.raises(OptionError, match="Address 1 of option nodes is malformed"):
        check(cast("SparkSession", None), "http://10.0.0.1")


def test_a_session_on_this_machine(spark: SparkSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = f"127.0.0.1:{server.getsockname()[1]}"
    found = check(spark, f"amqp://reader:SECRET@{node}", tasks=2)
    assert len(found) == 2
    assert re.match(r"executor \S+/\d+: Python \S+; packages as here; clock [+-]\d\.\d s \(± \d\.\d s\); ", found[1])
    assert all("Connection refused" in line and f"{node}: " in line for line in found)
    assert "SECRET" not in "".join(found)


@pytest.mark.broker
def test_a_node_that_takes_readers(spark: SparkSession, nodes: str) -> None:
    assert all(line.endswith(" takes readers") for line in check(spark, nodes))
