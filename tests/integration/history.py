"""What happened to every message of a run, written down as it happens, and the total-queue check: lost, twice, from nowhere, out of order.

Rules: a message is its body, which no other has: "producer connection number", where `connection` counts the connections of a producer without
replication IDs. What is asserted holds for every message; a settlement (ack, or reject for good) may be undone only if it is in doubt: it was
made younger than the lag before a fault of the primary, or to one that was over; or on a connection that was lost, and nothing that came on it
later shows that it was heard. A broker that is killed may lose the dead letters that it has just made, and the rejected messages with them: that
is RabbitMQ's own (docs/limitations.md). The file has one JSON line for each event; nobody waits for the disk that it is written to.
"""

from __future__ import annotations

import json
import queue as queues
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: An ack that is older than this at a fault was on the backup, however busy the machine.
LAG_MAX_S = 5.0
_SHOWN_MAX = 10

#: When what consumers told a primary may have been for nothing: from, to.
Doubt = tuple[float, float]


class Broken(AssertionError):
    """What was promised of messages was not kept. (A test that finds this is not tried again: the machine may not show it twice.)"""


def exactly(found: Iterable[Any], wanted: Iterable[Any]) -> None:
    """Raises Broken unless a door has given out just these messages, in this order. Sort both where the order is not promised."""
    found, wanted = list(found), list(wanted)
    if found == wanted:
        return
    there, due = Counter(found), Counter(wanted)
    lost, more = sorted((due - there).elements()), sorted((there - due).elements())
    order = "" if lost or more else f", out of order: {next(pair for pair in zip(found, wanted, strict=True) if pair[0] != pair[1])}"
    raise Broken(f"{len(found)} messages of {len(wanted)}; lost: {lost[:_SHOWN_MAX]}, twice or from nowhere: {more[:_SHOWN_MAX]}{order}")


class History:
    """See above. Methods may be called from any thread.

    Attributes:
        sent: Queue that each message was published to.
        confirmed: Those that were confirmed.
        settled: (queue, message) -> when it was acked or rejected for good, and whether it was rejected.
        unheard: Of these, (queue, message, when), those that may not have been heard, as their connections were lost.
        brokers_killed: Spans in which a broker was killed.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.sent: dict[str, str] = {}
        self.confirmed: set[str] = set()
        self.settled: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
        self.unheard: set[tuple[str, str, float]] = set()
        self.brokers_killed: list[Doubt] = []
        self._last: dict[tuple[object, ...], int] = {}
        self._problems: list[str] = []
        self._lock = threading.Lock()
        self._lines: queues.SimpleQueue[str] = queues.SimpleQueue()
        self._writer = threading.Thread(target=self._write, args=(path,), daemon=True) if path else None
        if self._writer is not None:
            self._writer.start()

    def note(self, event: str, **more: Any) -> None:
        """Writes down anything; its place in the file is its place in time."""
        if self._writer is not None:
            with self._lock:
                self._lines.put(json.dumps({"at": round(time.time(), 4), "event": event, **more}) + "\n")

    def _write(self, path: Path) -> None:
        """A slow disk must not keep clients from their heartbeats, nor let them answer what a connection gave them long ago."""
        with path.open("w") as file:
            while line := self._lines.get():
                file.write(line)

    def send(self, message: str, queue: str) -> None:
        self.sent[message] = queue
        self.note("send", message=message, queue=queue)

    def confirm(self, message: str) -> None:
        self.confirmed.add(message)
        self.note("confirm", message=message)

    def deliver(self, consumer: object, queue: str, message: str, redelivered: bool, *, alone: bool = False) -> None:
        """`consumer`: a consumer's connection, the same for all that it is given. `alone`: nobody else has consumed from the queue, and nothing was
        given back there, but for lost connections: what comes again comes in order, too, as after a failover everything does.
        """
        self.note("deliver", message=message, queue=queue, redelivered=redelivered)
        sent_to = self.sent.get(message)
        was_rejected = any(rejected for _, rejected in self.settled.get((sent_to or "", message), ()))
        if queue != sent_to and not (was_rejected and queue == dead(sent_to or "")):
            self._problems.append(f"{message!r} came from {queue}, was sent to {sent_to} and {'' if was_rejected else 'not '}rejected there")
        producer, connection, number = message.split()
        if (alone or not redelivered) and queue == sent_to:
            last = self._last.get(key := (consumer, queue, producer, connection), -1)
            if int(number) <= last:
                self._problems.append(f"{message!r} came from {queue} after {last}")
            self._last[key] = int(number)

    def settle(self, queue: str, message: str, *, rejected: bool = False) -> tuple[str, str, float]:
        """A consumer is about to ack or to reject it for good. Returns what `lost` is told of that."""
        at = time.time()
        self.settled[queue, message].append((at, rejected))
        self.note("reject" if rejected else "ack", message=message, queue=queue)
        return queue, message, at

    def lost(self, consumer: object, said: Iterable[tuple[str, str, float]]) -> None:
        """A consumer's connection is lost; `said`: what it said there that may not have been heard."""
        found = list(said)
        self.unheard.update(found)
        self.note("consumer lost", consumer=consumer, unheard=[[queue, message] for queue, message, _ in found])

    def is_over(self, message: str) -> bool:
        """Whether it has been acked, in its queue or, if it was rejected there, among the dead letters; or a broker has lost those.

        Who spoke last need not be the one who counts: beside a primary that was promoted, one that is over and does not know it goes on giving
        out what it has, and takes a rejection for which nothing will ever be dead-lettered, as the message was acked elsewhere before.
        """
        queue = self.sent[message]
        settled = self.settled.get((queue, message), ())
        if (dead(queue), message) in self.settled:
            return bool(settled)
        return any(not rejected or any(begin <= at <= end for begin, end in self.brokers_killed) for at, rejected in settled)

    def open(self) -> list[str]:
        """Those that were confirmed and are not over."""
        return [message for message in list(self.confirmed) if not self.is_over(message)]

    def check(self, doubts: Iterable[Doubt]) -> None:
        """Raises Broken, with all that is wrong. `doubts`: spans in which a settlement may have been for nothing."""
        spans = list(doubts)
        problems = [f"{message!r} was confirmed and lost" for message in sorted(self.open())]
        problems += self._problems
        for (queue, message), settled in self.settled.items():
            problems += [f"{message!r} came again from {queue}, though settled at {at:.3f}, long before any fault"
                         for at, _ in settled[:-1]
                         if (queue, message, at) not in self.unheard and not any(begin <= at <= end for begin, end in spans)]
        self.note("checked", problems=problems, doubts=spans)
        if problems:
            raise Broken(f"{len(problems)} of {len(self.sent)} messages: {problems[:_SHOWN_MAX]}")

    def close(self) -> None:
        if self._writer is not None:
            with self._lock:
                self._lines.put("")
            self._writer.join()
            self._writer = None


def dead(queue: str) -> str:
    """Where the dead letters of a queue go."""
    return f"{queue}.dead"


def span(began: float, ended: float) -> Doubt:
    """The doubt of a fault that a primary took a while to notice: what it was told meanwhile it did not take."""
    return began - LAG_MAX_S, ended + 0.5
