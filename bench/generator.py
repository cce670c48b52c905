"""The load generator, a process of its own: `python -m bench.generator KIND`, settings as JSON on stdin, JSON lines on stdout.

Rules: a window of unconfirmed publishes, never a pause that decides a result; instants are CLOCK_MONOTONIC seconds, which all processes of a
machine share. The kinds of `crowd` and `pace` say when they are ready, wait for a line, and keep their connections until stdin ends. `failover`,
`witness` and `steady` follow the primary and print lines while they run. Those of SITES transmit to a site, or receive there.
"""

from __future__ import annotations

import json
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from pamqp import commands

from broker_plugin.amqp import encode, frames
from lrq_ha.replication.positions import RangeSet

from . import crowd, entries, pace, snapshot, steady, wire
from .witness import PREFETCH, Witness

BATCH_MESSAGES = 50
RETRY_S = 0.005
IDLE_S = 0.3
ACK_EVERY = 200
STEPS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "publish": crowd.publish, "consume": crowd.consume, "through": crowd.through, "idle": crowd.idle, "pace": pace.pace}

SITES: dict[str, Callable[..., dict[str, Any]]] = {"entries": entries.transmit, "provide": snapshot.provide, "receive": snapshot.receive}


def flood(url: str, queue: str, messages: int, size_bytes: int, window: int, warm_up: int) -> dict[str, Any]:
    """Publishes `warm_up` and then `messages` equal messages; the clock runs from the last confirm of the former to the last of the latter."""
    connection = wire.Raw(url, confirms=True)
    connection.socket.setblocking(False)
    chunk = memoryview(wire.message(queue, b"x" * size_bytes) * BATCH_MESSAGES)
    confirms = wire.Confirms()
    total, sent, pending = warm_up + messages, 0, chunk[:0]
    began, first = time.monotonic(), 0
    poll = select.poll()
    while confirms.upto < total:
        wants = bool(pending) or (sent < total and sent - confirms.upto <= window - BATCH_MESSAGES)
        poll.register(connection.socket, select.POLLIN | (select.POLLOUT if wants else 0))
        event = poll.poll()[0][1]
        if event & ~select.POLLOUT:
            warm = confirms.upto >= warm_up
            confirms.take(*connection.read())
            if not warm and confirms.upto >= warm_up:
                began, first = time.monotonic(), confirms.upto
        if wants and event & select.POLLOUT:
            if not pending:
                pending = chunk
                sent += BATCH_MESSAGES
            pending = pending[connection.socket.send(pending) :]
    seconds = time.monotonic() - began
    connection.close()
    if confirms.refused:
        raise wire.Refused(f"{confirms.refused} publishes were refused")
    return {"messages": total - first, "seconds": seconds, "rate": (total - first) / seconds}


class Failover:
    """Publishes numbered messages with replication IDs to whichever node takes them, and sends again what was unconfirmed.

    It ends on a line on stdin, when everything is confirmed. Prints a line when it flows and whenever confirms go on after a loss.
    """

    def __init__(self, urls: list[str], queue: str, producer: str, size_bytes: int, window: int) -> None:
        self._urls, self._queue, self._producer = urls, queue, producer
        self._size_bytes, self._window = size_bytes, window
        self._next = 1
        self._open: deque[int] = deque()  # numbers on this connection in the order of their tags
        self._again: deque[int] = deque()
        self._confirmed = 0
        self._resent = 0
        self._stopping = False
        self._refused = 0

    def run(self) -> dict[str, Any]:
        """Runs until told to stop."""
        turn, lost_at = 0, 0.0
        while not self._done():
            try:
                connection = wire.Raw(self._urls[turn % len(self._urls)], producer=self._producer, confirms=True)
                self._publish(connection, lost_at)
            except OSError as error:
                if self._open or not lost_at:
                    lost_at = time.monotonic()
                    print(json.dumps({"lost_at": lost_at, "why": str(error)}), flush=True)
                self._again = deque((*self._open, *self._again))
                self._resent += len(self._open)
                self._open.clear()
                turn += 1
                time.sleep(RETRY_S)
        return {"published": self._next - 1, "resent": self._resent, "refused": self._refused}

    def _done(self) -> bool:
        return self._stopping and not self._open and not self._again

    def _publish(self, connection: wire.Raw, lost_at: float) -> None:
        connection.socket.setblocking(False)
        confirms, pending, taken, flowing = wire.Confirms(), memoryview(b""), 0, False
        poll = select.poll()
        poll.register(sys.stdin, select.POLLIN)
        try:
            while not self._done():
                more = bool(self._again) or not self._stopping
                wants = bool(pending) or (more and len(self._open) <= self._window - BATCH_MESSAGES)
                poll.register(connection.socket, select.POLLIN | (select.POLLOUT if wants else 0))
                for descriptor, event in poll.poll():
                    if descriptor == sys.stdin.fileno():
                        self._stopping = True
                        poll.unregister(sys.stdin)
                        continue
                    if event & ~select.POLLOUT:
                        confirms.take(*connection.read())
                        while taken < confirms.upto:
                            self._open.popleft()
                            taken += 1
                        if taken and not flowing:
                            flowing = True
                            print(json.dumps({"confirmed_at": time.monotonic(), "after": lost_at}), flush=True)
                    if wants and event & select.POLLOUT:
                        pending = pending or memoryview(self._batch())
                        pending = pending[connection.socket.send(pending) :]
        finally:
            self._refused += confirms.refused
            connection.close()

    def _batch(self) -> bytes:
        parts = []
        for _ in range(BATCH_MESSAGES):
            if self._again:
                number = self._again.popleft()
            elif not self._stopping:
                number = self._next
                self._next += 1
            else:
                break
            self._open.append(number)
            parts.append(wire.message(self._queue, struct.pack(">Q", number).ljust(self._size_bytes, b"x"), f"{self._producer}/{number}"))
        return b"".join(parts)


class Drain:
    """Consumes and acks until the queue is empty, and counts what came."""

    def __init__(self, url: str, queue: str) -> None:
        self._url, self._queue = url, queue
        self._seen: set[int] = set()
        self._came = self._breaks = self._last = 0

    def run(self) -> dict[str, Any]:
        """Runs until the queue has neither messages nor a consumer: so nothing is on its way any more."""
        asker = wire.Raw(self._url)
        while True:
            state = asker.call(commands.Queue.Declare(queue=self._queue, passive=True))
            if isinstance(state, commands.Queue.DeclareOk) and not state.consumer_count:
                if not state.message_count:
                    break
                self._consume()
        asker.close()
        return {"came": self._came, "seen": RangeSet.of(sorted(self._seen)).flat(), "order_breaks": self._breaks}

    def _consume(self) -> None:
        """Until nothing comes for a moment."""
        connection = wire.Raw(self._url)
        connection.call(commands.Basic.Qos(prefetch_count=PREFETCH))
        connection.send(wire.CHANNEL, commands.Basic.Consume(queue=self._queue))  # deliveries come right behind its answer
        poll = select.poll()
        poll.register(connection.socket, select.POLLIN)
        tag = unacked = 0
        while poll.poll(1000 * IDLE_S):
            data, items = connection.read()
            for item in items:
                if item[0] == frames.BASIC_DELIVER:
                    tag = self._take(data, item)
                    unacked += 1
            if unacked >= ACK_EVERY:
                connection.socket.sendall(encode.ack(wire.CHANNEL, tag, True))
                unacked = 0
        if unacked:
            connection.socket.sendall(encode.ack(wire.CHANNEL, tag, True))
        connection.leave()

    def _take(self, data: bytes, item: frames.Item) -> int:
        _, tag, origin = frames.deliver_arguments(bytes(data[item[2] : item[3]]))
        number = struct.unpack(">Q", frames.body_of(data, item[5], item[6])[:8])[0]
        self._came += 1
        self._breaks += number < self._last and not origin.redelivered
        self._last = number
        self._seen.add(number)
        return tag


def main() -> None:
    """Runs what the first argument names."""
    settings = json.loads(sys.stdin.readline())
    kind = sys.argv[1]
    if kind == "flood":
        result = flood(**settings)
    elif kind in STEPS:
        for result in STEPS[kind](**settings):
            print(json.dumps(result), flush=True)
            sys.stdin.readline()
        return
    elif kind == "failover":
        result = Failover(**settings).run()
    elif kind == "witness":
        result = Witness(**settings).run()
    elif kind in SITES:
        result = SITES[kind](**settings)
    elif kind == "steady":
        result = steady.Steady(**settings).run()
    else:
        result = Drain(**settings).run()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
