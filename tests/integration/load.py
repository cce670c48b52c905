"""What tests of labs share: waits, commands; and load for fault tests: a publisher with replication IDs and a consumer that acks, over the doors of
a pair, and the total-queue check.

Rules: every message carries its number; the check counts what was confirmed, lost, delivered twice and out of order. What is known of the end comes
from the brokers themselves.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pika
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError

from lrq_ha.demo import check as checks
from lrq_ha.lab import Lab
from lrq_ha.lab.files import python_environment
from lrq_ha.publisher import Publisher
from lrq_ha.replication.errors import LrqError

LAG_MAX_S = 5.0


def eventually(what: str, done: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Polls until `done()`. `timeout_s`: only where it is what was promised; else the machine may be as busy as it likes."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if done():
                return
        except (LrqError, OSError, KeyError, AMQPError):
            pass
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.05)


def in_sync(lab: Lab, *, applied: bool = False) -> tuple[str, str]:
    """Waits until both nodes of group east are in the set, and one is ready to take over. Returns primary and backup.

    Args:
        applied: Wait also until what is in the log then is safe and applied on both. The primary goes on adding entries of its own.
    """
    found: list[tuple[str, str]] = []
    upto: dict[str, int] = {}  # by primary

    def holds() -> bool:
        primary = lab.primary("east")
        if primary is None:
            return False
        backup = "e2" if primary == "e1" else "e1"
        states = lab.status(primary), lab.status(backup)
        found[:] = [(primary, backup)]
        if set(states[0]["members"]) != {"e1", "e2"} or states[1]["role"] != "ready":
            return False
        return not applied or min(state[key] for state in states for key in ("safe", "applied")) >= upto.setdefault(primary, states[0]["end"])

    eventually(f"both nodes in the set{', everything applied' if applied else ''}", holds)
    return found[0]


def same_logs(lab: Lab) -> None:
    """Waits until the log of every node of group east is the same, batch by batch. A primary adds entries of its own at any time."""
    def same() -> bool:
        nodes = [node for node in lab.nodes.values() if node.group == "east"]
        digests = [checks.log_digest(node.admin, "east", number) for number, node in enumerate(nodes, 1)]
        return all(digest == digests[0] for digest in digests)

    eventually("the same logs", same)


def command(*arguments: str, lab: Lab | None = None) -> tuple[int, str]:
    """Exit code of an `lrq-ha` command, run as an operator runs it, and all that it printed. `lab`: whose nodes it is told of."""
    where = ["--dir", str(lab.directory)] if lab is not None else []
    done = subprocess.run(
        [sys.executable, "-m", "lrq_ha.cli.main", *arguments, *where],
        capture_output=True, text=True, env=python_environment(), timeout=200,
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    return done.returncode, said.strip()


def declare(url: str, queue: str, **arguments: object) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    connection.channel().queue_declare(queue, durable=True, arguments={f"x-{k.replace('_', '-')}": v for k, v in arguments.items()})
    connection.close()


def write_down(lab: Lab, *names: str) -> None:
    """RabbitMQ 3.10 writes declarations down 2 s later, on a busy machine later still: a kill before that would lose the queue itself."""
    for name in names:
        lab.ctl(name, "eval", "mnesia:sync_log().")


def depth(url: str, queue: str) -> int:
    """Messages ready in a queue of a broker."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        return int(connection.channel().queue_declare(queue, passive=True).method.message_count)
    finally:
        connection.close()


@dataclass
class Seen:
    """What the consumer saw. `twice`: (number, when it was acked before)."""

    acked_at: dict[int, float] = field(default_factory=dict)
    twice: list[tuple[int, float]] = field(default_factory=list)
    order_breaks: int = 0


class Load:
    """One publisher and one consumer of a queue, running until `stop`."""

    def __init__(self, nodes: list[str], queue: str, producer: str, *, rate_per_s: float = 4000.0) -> None:
        self.nodes, self.queue = nodes, queue
        self.seen = Seen()
        self.confirmed = 0
        self.published = 0
        self._rate = rate_per_s
        self._publisher = Publisher(nodes, producer=producer, client_name="test", confirm_timeout_s=60)
        self._stop_publishing = threading.Event()
        self._stop_consuming = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(f,), daemon=True) for f in (self._publish, self._consume)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            self._errors.append(error)

    def _publish(self) -> None:
        began = time.monotonic()
        while not self._stop_publishing.is_set():
            if self.published > (time.monotonic() - began) * self._rate:
                time.sleep(0.002)
                continue
            confirm = self._publisher.publish("", self.queue, b"%d" % self.published)
            confirm.add_done_callback(self._confirmed)
            self.published += 1
        self._publisher.flush(90)

    def _confirmed(self, confirm: object) -> None:
        self.confirmed += 1

    def _consume(self) -> None:
        turn = 0
        while not self._stop_consuming.is_set():
            try:
                parameters = pika.URLParameters(self.nodes[turn % len(self.nodes)])
                parameters.socket_timeout = parameters.stack_timeout = 3
                parameters.heartbeat = 4
                connection = pika.BlockingConnection(parameters)
                channel = connection.channel()
                channel.basic_qos(prefetch_count=100)
                last = -1
                for method, _properties, body in channel.consume(self.queue, inactivity_timeout=0.1):
                    if self._stop_consuming.is_set():
                        connection.close()
                        return
                    if method is None:
                        continue
                    number = int(body)
                    if not method.redelivered:
                        self.seen.order_breaks += number < last
                        last = number
                    channel.basic_ack(method.delivery_tag)
                    now = time.time()
                    before = self.seen.acked_at.setdefault(number, now)
                    if before != now:
                        self.seen.twice.append((number, before))
            except (AMQPError, AMQPConnectorException, OSError):
                turn += 1
                time.sleep(0.02)

    def finish(self, timeout_s: float = 120.0) -> None:
        """Stops publishing, waits until everything published was confirmed and consumed, then ends."""
        self._stop_publishing.set()
        self._threads[0].join(timeout_s)
        if self._errors:
            raise self._errors[0]
        assert not self._threads[0].is_alive(), f"only {self.confirmed} of {self.published} were confirmed"
        eventually(f"consuming all {self.published}", lambda: len(self.seen.acked_at) >= self.published)
        time.sleep(0.5)
        self._stop_consuming.set()
        self._threads[1].join(10)
        self._publisher.close()

    def stop(self) -> None:
        """Ends at once, whatever is open."""
        self._stop_publishing.set()
        self._stop_consuming.set()

    def check(self, faults_at: list[float]) -> None:
        """0 lost, 0 delivered twice but for acks younger than the lag at a fault, order kept."""
        lost = set(range(self.published)) - set(self.seen.acked_at)
        assert not lost, f"lost {len(lost)} of {self.published}: {sorted(lost)[:10]}"
        for number, before in self.seen.twice:
            assert any(-0.5 <= fault - before <= LAG_MAX_S for fault in faults_at), f"message {number} came again, though acked long before any fault"
        assert self.seen.order_breaks == 0
