"""The generators of the benchmarks do what their figures say, through a door: as many messages as they count, no more and no less."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pika
import pytest
from load import declare, eventually, in_sync

from lrq_ha.lab import Lab

pytestmark = pytest.mark.broker

ROOT = Path(__file__).parents[2]
MESSAGES, WARM_UP = 300, 40


@pytest.fixture
def url(pair: Lab) -> str:
    return pair.nodes[in_sync(pair)[0]].door


@pytest.fixture(params=["classic", "quorum"])
def queue(url: str, request: pytest.FixtureRequest) -> str:
    name = f"bench-{time.time_ns()}"
    declare(url, name, queue_type=request.param)
    return name


def generate(kind: str, **settings: Any) -> dict[str, Any]:
    """A generator's figures, once it has ended."""
    command = [sys.executable, "-m", "bench.generator", kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(settings) + "\n\n")
        process.stdin.flush()
        _, told = process.stdout.readline(), process.stdout.readline()
        assert told, "the generator failed"
        process.stdin.close()
    assert process.returncode == 0
    figures: dict[str, Any] = json.loads(told)
    return figures


def ready_messages(url: str, queue: str) -> int:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        return int(connection.channel().queue_declare(queue, passive=True).method.message_count)


def publish(url: str, queue: str, connections: int, channels: int, window: int, warm_up: int = WARM_UP, size_bytes: int = 100) -> dict[str, Any]:
    return generate("publish", url=url, queue=queue, messages=MESSAGES, size_bytes=size_bytes, connections=connections, channels=channels,
                    window=window, batch=7, warm_up=warm_up)


def test_publishes_with_and_without_confirms(url: str, queue: str) -> None:
    """Without confirms, each connection adds one message behind the warm-up and one, which is counted, behind the rest."""
    expected = 0
    for connections, channels, window, more in ((3, 1, 14, 0), (1, 3, 14, 0), (3, 1, 0, 3)):
        assert publish(url, queue, connections, channels, window)["messages"] == MESSAGES + more
        expected += MESSAGES + WARM_UP + 2 * more
        assert ready_messages(url, queue) == expected


def test_consumes_and_leaves_what_shows_that_it_is_done(url: str, queue: str) -> None:
    """The last ack has been taken when the figures come: what is left is exactly what was not acked, once it is given back."""
    publish(url, queue, 1, 1, 100, warm_up=0, size_bytes=65_536)
    taken = MESSAGES - 2 * 50
    generate("consume", url=url, queue=queue, messages=taken, connections=2, prefetch=50)
    eventually("what was not acked to be given back", lambda: ready_messages(url, queue) == 2 * 50)


def test_keeps_a_schedule(url: str, queue: str) -> None:
    figures = generate("pace", url=url, queue=queue, size_bytes=100, rate=1500.0, warm_up_s=0.1, seconds=0.2)
    assert figures["messages"] == 300
    assert 0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]
    assert ready_messages(url, queue) == 450
