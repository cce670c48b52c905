"""A publisher and a consumer, as people write them, that go on over changes of primary."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pika
from load import LOST, eventually

JOIN_S = 120.0


class Clients:
    """A publisher without replication IDs that sends again what was not confirmed, and a consumer that acks: both as people write them."""

    def __init__(self, doors: list[str], queue: str) -> None:
        self.doors, self.queue = doors, queue
        self.published = 0
        self.consumed: list[int] = []
        self.redelivered = 0
        self.closes: list[tuple[int, str]] = []  # which of the two, and what it was told
        self._publishing, self._consuming = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=self._forever, args=a, daemon=True) for a in ((self._publish, 0), (self._consume, 1))]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        self._publishing.set()
        self._threads[0].join(JOIN_S)
        eventually("everything to be consumed", lambda: len(set(self.consumed)) == self.published)
        self.stop()

    def stop(self) -> None:
        """Ends at once, whatever is open."""
        self._publishing.set()
        self._consuming.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _forever(self, body: Callable[[pika.BlockingConnection], None], at: int) -> None:
        over = self._consuming if at else self._publishing
        while not over.is_set():
            for door in self.doors:
                try:
                    connection = pika.BlockingConnection(pika.URLParameters(door))
                except LOST:
                    time.sleep(0.1)
                    continue
                try:
                    body(connection)
                except LOST as error:
                    self.closes.append((at, repr(error)))
                if over.is_set():
                    return

    def _publish(self, connection: pika.BlockingConnection) -> None:
        channel = connection.channel()
        channel.confirm_delivery()
        while not self._publishing.is_set():
            channel.basic_publish("", self.queue, b"%d" % self.published, pika.BasicProperties(delivery_mode=2))
            self.published += 1
        connection.close()

    def _consume(self, connection: pika.BlockingConnection) -> None:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=20)
        for method, _, body in channel.consume(self.queue, inactivity_timeout=0.2):
            if self._consuming.is_set():
                connection.close()
                return
            if method is not None:
                self.consumed.append(int(body))
                self.redelivered += method.redelivered
                time.sleep(0.001)
                channel.basic_ack(method.delivery_tag)
