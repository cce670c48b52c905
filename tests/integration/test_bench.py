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
from lrq_ha.replication.positions import RangeSet

pytestmark = [pytest.mark.broker, pytest.mark.one_version("4.3")]

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


@pytest.mark.quick
def test_publishes_with_and_without_confirms(url: str, queue: str) -> None:
    """Without confirms, each connection adds one message behind the warm-up and one, which is counted, behind the rest."""
    expected = 0
    for connections, channels, window, more in ((3, 1, 14, 0), (1, 3, 14, 0), (3, 1, 0, 3)):
        assert publish(url, queue, connections, channels, window)["messages"] == MESSAGES + more
        expected += MESSAGES + WARM_UP + 2 * more
        assert ready_messages(url, queue) == expected


@pytest.mark.quick
def test_a_flood_that_is_refused_has_no_rate(url: str) -> None:
    queue = f"bench-{time.time_ns()}"
    declare(url, queue, max_length=10, overflow="reject-publish")
    settings = {"url": url, "queue": queue, "messages": MESSAGES, "size_bytes": 100, "window": 100, "warm_up": 50}
    command = [sys.executable, "-m", "bench.generator", "flood"]
    done = subprocess.run(command, input=json.dumps(settings) + "\n", capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0
    assert "publishes were refused" in done.stderr


def test_consumes_and_leaves_what_shows_that_it_is_done(url: str, queue: str) -> None:
    """The last ack has been taken when the figures come: what is left is exactly what was not acked, once it is given back."""
    publish(url, queue, 1, 1, 100, warm_up=0, size_bytes=65_536)
    taken = MESSAGES - 2 * 50
    generate("consume", url=url, queue=queue, messages=taken, connections=2, prefetch=50)
    eventually("what was not acked to be given back", lambda: ready_messages(url, queue) == 2 * 50)


def test_consumes_what_it_publishes(url: str, queue: str) -> None:
    settings = {"messages": MESSAGES, "size_bytes": 100, "window": 20, "batch": 7, "prefetch": 10, "warm_up": WARM_UP}
    assert generate("through", url=url, queue=queue, **settings)["messages"] == MESSAGES
    assert ready_messages(url, queue) == 0


@pytest.mark.quick
def test_keeps_a_schedule(url: str, queue: str) -> None:
    figures = generate("pace", url=url, queue=queue, size_bytes=100, rate=1500.0, warm_up_s=0.1, seconds=0.2)
    assert figures["messages"] == 300
    assert 0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]
    assert ready_messages(url, queue) == 450


@pytest.mark.parametrize("kind", ["none", "audit"])
def test_the_cost_of_points_for_any_number_of_messages(kind: str) -> None:
    """It checks by itself that all of them have gone through."""
    done = subprocess.run([sys.executable, "-m", "bench.points", kind, "150"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{kind}: ")


@pytest.mark.quick
def test_where_the_time_goes_adds_up() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.points", "profile", "20000"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole, *rows = done.stdout.splitlines()
    shares = {name: float(us) for us, _, name in (row.strip().partition(" ") for row in rows)}
    assert "publish.take" in shares
    assert sum(shares.values()) == pytest.approx(float(whole.split()[0]), abs=0.01 * len(rows))


class Following:
    """A generator that runs until it is told to end."""

    def __init__(self, kind: str, **settings: Any) -> None:
        command = [sys.executable, "-m", "bench.generator", kind]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.tell(json.dumps(settings))

    def tell(self, line: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the generator failed"
        told: dict[str, Any] = json.loads(line)
        return told

    def end(self) -> dict[str, Any]:
        """The last line, once its input has ended."""
        output, _ = self._process.communicate()
        assert self._process.returncode == 0
        told: dict[str, Any] = json.loads(output.splitlines()[-1])
        return told


@pytest.mark.parametrize("acks", [True, False])
def test_a_witness_accounts_for_what_it_acked(url: str, queue: str, acks: bool) -> None:
    """What it acked and what is left for the drain are all that was published, each once."""
    gone = "amqp://app:app@127.0.0.1:1"  # it tries the next address
    publisher = Following("failover", urls=[gone, url], queue=queue, producer=f"bench-{time.time_ns()}", size_bytes=100, window=100)
    publisher.read()
    witness = Following("witness", urls=[gone, url], queue=queue, acks=acks)
    assert witness.read() == {"ready": True}
    witness.tell()
    while "delivered_at" not in witness.read():
        pass
    witness.tell()
    acked = witness.end()
    published = publisher.end()["published"]
    drained = Following("drain", url=url, queue=queue).end()
    taken, left = RangeSet((first, last) for _, first, last in acked["acks"]), RangeSet.from_flat(drained["seen"])
    assert bool(taken) == acks
    assert acked["again"] == []
    assert drained["came"] == len(left)
    assert list(RangeSet([*taken, *left])) == [(1, published)]
    assert len(taken) + len(left) == published


def test_a_steady_load_tells_its_pauses(url: str, queue: str) -> None:
    load = Following("steady", urls=[url], queue=queue, size_bytes=100, rate=200.0)
    assert load.read() == {"ready": True}
    told = {"confirms": 0, "deliveries": 0}
    while not (told["confirms"] and told["deliveries"]):
        load.tell()
        told = load.read()
    assert told["losses"] == 0
    assert told["confirm_pause_ms"] > 0
    assert told["delivery_pause_ms"] > 0
    assert load.end() == {"losses": 0}


def test_outstanding_messages_are_measured() -> None:
    """Every shape of the row that needs no broker takes its acks."""
    program = "from bench.outstanding import SHAPES, measure; import json; print(json.dumps([measure(shape, 3000) for shape in SHAPES]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)
    assert len(cells) == 3
    assert all(cell["ack_us"] > 0 for cell in cells)
