"""P6: what ten million outstanding messages cost the pure core: its memory, and the time of an ack of a thousand of them. Without a broker.

Rules: each shape has a fresh process, whose resident memory is read before and after, as bitmaps are not Python's own memory. Acks are timed one
by one, in order, once all is outstanding; their median counts. `python -m bench.outstanding SHAPE [MESSAGES]` prints one shape's figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.replication.applied import Generations
from lrq_ha.replication.delivery_filter import DeliveryFilter
from lrq_ha.replication.guard import QueueGuard
from lrq_ha.replication.log import BatchHeader
from lrq_ha.replication.queue_filter import Kind
from lrq_ha.replication.subscription import ReplicatingSubscription, StoredBatch

from .measure import Figure, Row, memory_bytes, note

GOAL_MB, GOAL_US = 50, 10
MESSAGES = 10_000_000
SHORT_MESSAGES = 200_000
ACK_MESSAGES = 1_000
ACKS = 2_000
QUEUE = ("/", "orders")

Ack = Callable[[int, int], object]
"""Takes the first and the last message of an ack."""


def p6(messages: int) -> Row:
    """Every shape; the most memory and the slowest ack count."""
    cells = []
    for shape in SHAPES:
        command = [sys.executable, "-m", "bench.outstanding", shape, str(messages)]
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
        if done.returncode:
            raise LrqError(f"The shape {shape!r} failed", todo=done.stderr.strip().rpartition("\n")[2])
        cells.append(json.loads(done.stdout))
        note("P6 {shape}: {mb:.1f} MB, {ack_us:.2f} µs per ack".format(**cells[-1]))
    return summary(cells)


def summary(cells: list[dict[str, Any]]) -> Row:
    """The row of these shapes."""
    figures = [Figure("memory_mb", cell["mb"], GOAL_MB, variant=cell["shape"], digits=1) for cell in cells]
    figures += [Figure("ack_us", cell["ack_us"], GOAL_US, variant=cell["shape"]) for cell in cells]
    details = "; ".join("{shape} {mb:.1f} MB, {ack_us:.2f} µs (99th percentile {ack_p99_us:.2f})".format(**cell) for cell in cells)
    return Row("P6", figures, details, cells=cells)


def _guard(messages: int) -> Ack:
    """All are guarded and sent, none is acknowledged: completion of each waits for this guard."""
    guard = QueueGuard()
    guard.place(1)
    for first in range(1, messages + 1, ACK_MESSAGES):
        guard.deliver(first, first + ACK_MESSAGES - 1)
    return lambda _, last: guard.acknowledge(last)


def _subscription(messages: int) -> Ack:
    """A receiver that has been sent all, in batches, and has acknowledged none."""
    guard = QueueGuard()
    guard.place(1)
    subscription = ReplicatingSubscription(guard)
    for first in range(1, messages + 1, ACK_MESSAGES):
        subscription.send(StoredBatch(BatchHeader(257, first, first + ACK_MESSAGES - 1, 257, 257), b"x" * 100))

    def ack(_: int, last: int) -> None:
        guard.acknowledge(last)
        subscription.settle(last)

    return ack


def _filter(messages: int) -> Ack:
    """What a node knows of a queue of which consumers have acked every second message: the others are outstanding."""
    operations = DeliveryFilter(Generations())
    sequence = messages
    for first in range(1, messages + 1, ACK_MESSAGES):
        sequence += 1
        singles = [number for second in range(first + 1, first + ACK_MESSAGES, 2) for number in (second, second)]
        operations.note(sequence, Kind.DEQUEUE, QUEUE, singles, 0, "", sweep=True)
        operations.safe(sequence)

    def ack(first: int, last: int) -> None:
        nonlocal sequence
        sequence += 1
        operations.note(sequence, Kind.DEQUEUE, QUEUE, (first, last), 0, "", sweep=True)
        operations.safe(sequence)

    return ack


SHAPES: dict[str, Callable[[int], Ack]] = {
    "guard": _guard, "subscription": _subscription, "consumers' acks, every second one": _filter,
}  # fmt: skip


def measure(shape: str, messages: int) -> dict[str, Any]:
    """Figures of a shape; only in a fresh process."""
    before = memory_bytes(os.getpid())
    ack = SHAPES[shape](messages)
    grown = memory_bytes(os.getpid()) - before
    took = []
    for number in range(min(ACKS, messages // ACK_MESSAGES)):
        first = number * ACK_MESSAGES + 1
        began = time.perf_counter()
        ack(first, first + ACK_MESSAGES - 1)
        took.append(1e6 * (time.perf_counter() - began))
    took.sort()
    return {"shape": shape, "messages": messages, "mb": grown / 1e6, "ack_us": median(took), "ack_p99_us": took[int(0.99 * len(took))]}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else MESSAGES)))
