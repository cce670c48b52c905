"""A publisher and a consumer of one queue at a steady rate, for what a client sees of something else that goes on: the longest pause of each.

Rules: a few messages every few milliseconds, so that the time between two confirms, or two deliveries, is a pause as soon as it is longer than that.
Nothing is made up for after a pause: what was due meanwhile is not published, so a pause is not followed by a flood. Both follow the primary.
A line on stdin asks for the figures since the last one; the end of stdin ends it.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections import deque
from typing import Any

from pamqp import commands

from broker_plugin.amqp import encode, frames

from . import wire

TICK_S = 0.005
RETRY_S = 0.005
PREFETCH = 1_000


class Pauses:
    """The longest time between two instants, until it is asked for."""

    def __init__(self) -> None:
        self._last = 0.0
        self._longest_s = 0.0
        self.count = 0

    def seen(self, now: float, count: int) -> None:
        """So many things came now."""
        self._longest_s = max(self._longest_s, now - self._last if self._last else 0.0)
        self._last = now
        self.count += count

    def longest_ms(self, now: float) -> float:
        """The longest pause, the one under way included, which then counts for the next time as well."""
        longest_s = max(self._longest_s, now - self._last if self._last else 0.0)
        self._longest_s, self.count = 0.0, 0
        return 1000 * longest_s


class Steady:
    """Prints a line when both flow and one for every line on stdin.

    Args:
        urls: Of the doors, tried in turn.
        queue: Where all goes, and comes from.
        size_bytes: Of a body.
        rate: Messages/s.
    """

    def __init__(self, urls: list[str], queue: str, size_bytes: int, rate: float) -> None:
        self._urls, self._queue = urls, queue
        per_tick = max(1, round(rate * TICK_S))
        self._tick_s = per_tick / rate
        self._per_tick = per_tick
        self._chunk = memoryview(wire.message(queue, b"x" * size_bytes) * per_tick)
        self._confirms, self._deliveries = Pauses(), Pauses()
        self._longest_confirm_s = 0.0
        self._losses = 0
        self._flowing = self._ending = False

    def run(self) -> dict[str, Any]:
        """Runs until stdin ends."""
        turn = 0
        while not self._ending:
            try:
                self._connected(self._urls[turn % len(self._urls)])
            except OSError:
                turn += 1
                self._asked(RETRY_S)
        return {"losses": self._losses}

    def _connected(self, url: str) -> None:
        publisher, consumer = wire.Raw(url, confirms=True), None
        try:
            consumer = wire.Raw(url)
            consumer.call(commands.Basic.Qos(prefetch_count=PREFETCH))
            consumer.send(wire.CHANNEL, commands.Basic.Consume(queue=self._queue))
            self._serve(publisher, consumer)
        except OSError:
            self._losses += bool(consumer)
            raise
        finally:
            publisher.close()
            if consumer is not None:
                consumer.close()

    def _serve(self, publisher: wire.Raw, consumer: wire.Raw) -> None:
        publisher.socket.setblocking(False)
        confirms, pending = wire.Confirms(), self._chunk[:0]
        due: deque[tuple[int, float]] = deque()  # last tag of each tick that is unconfirmed, and when it was sent
        next_at, sent = time.monotonic(), 0
        while not self._ending:
            now = time.monotonic()
            if not pending and now >= next_at:
                pending, sent = self._chunk, sent + self._per_tick
                due.append((sent, now))
                next_at = max(next_at + self._tick_s, now)
            if pending:
                try:
                    pending = pending[publisher.socket.send(pending) :]
                except BlockingIOError:
                    pass
            pause_s = max(0.0, next_at - time.monotonic())
            sockets = [publisher.socket, consumer.socket, sys.stdin]
            readable, _, _ = select.select(sockets, [publisher.socket] if pending else [], [], TICK_S if pending else pause_s)
            if publisher.socket in readable:
                before = confirms.upto
                confirms.take(*publisher.read())
                self._confirmed(due, confirms.upto - before, confirms.upto)
            if consumer.socket in readable:
                self._delivered(consumer)
            if sys.stdin in readable:
                self._asked(0.0)

    def _confirmed(self, due: deque[tuple[int, float]], count: int, upto: int) -> None:
        now = time.monotonic()
        if count:
            self._confirms.seen(now, count)
        while due and due[0][0] <= upto:
            self._longest_confirm_s = max(self._longest_confirm_s, now - due.popleft()[1])

    def _delivered(self, consumer: wire.Raw) -> None:
        data, items = consumer.read()
        tags = [frames.deliver_arguments(bytes(data[item[2] : item[3]]))[1] for item in items if item[0] == frames.BASIC_DELIVER]
        if not tags:
            return
        consumer.socket.sendall(encode.ack(wire.CHANNEL, tags[-1], True))
        self._deliveries.seen(time.monotonic(), len(tags))
        if not self._flowing:
            self._flowing = True
            print(json.dumps({"ready": True}), flush=True)

    def _asked(self, wait_s: float) -> None:
        """Answers a line on stdin, if one comes."""
        if not select.select([sys.stdin], [], [], wait_s)[0]:
            return
        if not sys.stdin.readline():
            self._ending = True
            return
        now = time.monotonic()
        figures = {"confirms": self._confirms.count, "deliveries": self._deliveries.count, "longest_confirm_ms": 1000 * self._longest_confirm_s}
        self._longest_confirm_s = 0.0
        figures |= {"confirm_pause_ms": self._confirms.longest_ms(now), "delivery_pause_ms": self._deliveries.longest_ms(now), "losses": self._losses}
        print(json.dumps(figures), flush=True)
