"""A consumer that follows the primary: it tries a group's addresses in turn and tells when the first delivery comes after each connection.

Rules: it begins at a line on stdin and ends, in order, at the next one; what it holds unacked then goes back. Messages are those of `Failover`:
each begins with its number. It either acks whatever it gets or nothing at all.
"""

from __future__ import annotations

import json
import select
import struct
import sys
import time
from typing import Any

from pamqp import commands

from broker_plugin.amqp import encode, frames
from lrq_ha.replication.positions import RangeSet

from . import wire

RETRY_S = 0.005
PREFETCH = 1_000


class Witness:
    """Prints a line when it is ready to begin, one with `delivered_at` at the first delivery of each connection, and its figures.

    Args:
        urls: Of the doors.
        queue: Consumed from.
        acks: Whether it acks.
    """

    def __init__(self, urls: list[str], queue: str, acks: bool) -> None:
        self._urls, self._queue, self._acks = urls, queue, acks
        self._acked = RangeSet()
        self._sent: list[tuple[float, int, int]] = []  # when acks were sent, for which messages
        self._again: list[float] = []  # of what came once more: when its ack had been sent
        self._ending = False

    def run(self) -> dict[str, Any]:
        """Runs until told to end."""
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
        turn = 0
        while not self._ending:
            try:
                self._consume(wire.Raw(self._urls[turn % len(self._urls)]))
            except OSError:
                turn += 1
                self._ending = bool(select.select([sys.stdin], [], [], RETRY_S)[0])
        return {"acks": self._sent, "again": self._again}

    def _consume(self, connection: wire.Raw) -> None:
        told = False
        try:
            connection.call(commands.Basic.Qos(prefetch_count=PREFETCH))
            connection.send(wire.CHANNEL, commands.Basic.Consume(queue=self._queue))  # deliveries come right behind its answer
            while not self._ending:
                readable, _, _ = select.select([connection.socket, sys.stdin], [], [])
                self._ending = sys.stdin in readable
                if connection.socket in readable:
                    told = self._take(connection, told) or told
            connection.leave()
        finally:
            connection.close()

    def _take(self, connection: wire.Raw, told: bool) -> bool:
        data, items = connection.read()
        numbers, tag = [], 0
        for item in items:
            if item[0] == frames.BASIC_DELIVER:
                if not told:
                    told = True
                    print(json.dumps({"delivered_at": time.monotonic()}), flush=True)
                tag = frames.deliver_arguments(bytes(data[item[2] : item[3]]))[1]
                numbers.append(struct.unpack(">Q", frames.body_of(data, item[5], item[6])[:8])[0])
        if numbers and self._acks:
            connection.socket.sendall(encode.ack(wire.CHANNEL, tag, True))
            now = time.monotonic()
            for number in numbers:
                if number in self._acked:
                    self._again.append(next(at for at, first, last in reversed(self._sent) if first <= number <= last))
                if self._sent and self._sent[-1][0] == now and self._sent[-1][2] == number - 1:
                    self._sent[-1] = (now, self._sent[-1][1], number)
                else:
                    self._sent.append((now, number, number))
                self._acked.add(number)
        return told
