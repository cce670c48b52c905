"""Counts of a process, for /metrics: they pass from one incarnation to the next, so that none ever goes back.

Rule: what is counted is counted once for a batch of the log, or more rarely; nothing is counted for a single message.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

from broker_plugin.log import codec
from lrq_ha.proto import lrq_pb2 as pb

#: Upper bounds of histograms, in seconds.
CONFIRM_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PROMOTION_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
PROMOTION_STEPS = ("epoch", "queues", "sweeper", "configuration")
#: Batches whose times are kept until they are confirmed, or safe; of more, the oldest are not measured.
MEASURED_MAX = 10_000
ENQUEUES = "enqueues"


class Histogram:
    """Durations by upper bounds.

    Attributes:
        bounds: Ascending, in seconds; above the last one, a duration counts in a bucket of its own.
        buckets: Durations in each.
        sum_s: Seconds of all.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Counts a duration."""
        self.buckets[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds


class Counts:
    """The counts of one process.

    Attributes:
        started_at: Unix time of its start.
        incarnations: How many have ended: "ended", "refused" (it could not start) or "failed" (an internal error).
        promotions: Epochs that this node has taken, up to the open door.
        promotion_steps: Time of each step of these.
        removals: Nodes that this primary took out of the in-sync set, by name.
        batches, bytes: Written to the own log.
        entries: Written to the own log, by kind: a field of `pb.Run`.
        messages: Of entries: messages that were published, and that clients have acknowledged or rejected.
        own_confirm: From the write of a batch of this leader to the broker's confirm.
        safe: From then to the moment when each in-sync node has it.
    """

    def __init__(self) -> None:
        self.started_at = time.time()
        self.incarnations: Counter[str] = Counter()
        self.promotions = 0
        self.promotion_steps = {step: Histogram(PROMOTION_BOUNDS_S) for step in PROMOTION_STEPS}
        self.removals: Counter[str] = Counter()
        self.batches = self.bytes = 0
        self.entries: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self.own_confirm = Histogram(CONFIRM_BOUNDS_S)
        self.safe = Histogram(CONFIRM_BOUNDS_S)

    def batch_written(self, count: int, size: int, runs: Iterable[pb.Run | codec.Publishes]) -> None:
        """A batch of `count` entries and `size` bytes, own or pushed, is in the own log."""
        self.batches += 1
        self.bytes += size
        published = count
        for run in runs:
            if isinstance(run, codec.Publishes):
                continue
            kind = run.WhichOneof("kind") or "unknown"
            if kind == ENQUEUES:
                continue
            published -= 1  # an entry of any other kind is a run of its own
            self.entries[kind] += 1
            if kind == "dequeue":
                self.messages["acknowledged"] += _length(run.dequeue.sequences)
            elif kind == "reject":
                self.messages["rejected"] += _length(run.reject.sequences)
        if published:
            self.entries[ENQUEUES] += published
            self.messages["published"] += published

    def promoted(self, marks: Sequence[float]) -> None:
        """This node has taken an epoch. `marks`: the beginning, and the end of each of PROMOTION_STEPS."""
        for step, (begin, end) in zip(PROMOTION_STEPS, pairwise(marks)):
            self.promotion_steps[step].observe(end - begin)


class BatchTimes:
    """The time that the batches of a leader wait for their confirm, and until they are safe.

    Args:
        counts: Get the durations.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._unconfirmed: deque[float | None] = deque()  # one for each write to the stream
        self._unsafe: deque[tuple[int, float]] = deque(maxlen=MEASURED_MAX)

    def written(self, last: int = 0) -> None:
        """A record was written; `last`: the last entry of a batch of this leader, 0: another record."""
        now = time.monotonic() if last else None
        self._unconfirmed.append(now)
        if now is not None:
            self._unsafe.append((last, now))

    def confirmed(self, count: int) -> None:
        """The broker has confirmed the `count` oldest records."""
        now = time.monotonic()
        for _ in range(min(count, len(self._unconfirmed))):
            if (at := self._unconfirmed.popleft()) is not None:
                self._counts.own_confirm.observe(now - at)

    def safe_advanced(self, safe: int) -> None:
        """Everything up to `safe` is on each in-sync node."""
        now = time.monotonic()
        while self._unsafe and self._unsafe[0][0] <= safe:
            self._counts.safe.observe(now - self._unsafe.popleft()[1])

    def cut(self, first: int) -> None:
        """Entries from `first` on have fallen out of the log."""
        while self._unsafe and self._unsafe[-1][0] >= first:
            self._unsafe.pop()


def _length(ranges: Sequence[int]) -> int:
    """Number of sequences in flattened inclusive ranges."""
    return sum(ranges[1::2]) - sum(ranges[::2]) + len(ranges) // 2
