"""A blocking publisher that no node takes: what is published stays in its windows until a test settles it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pika

from lrq_ha.errors import LrqError
from lrq_ha.publisher import Publisher
from lrq_ha.publisher.confirm import Confirm
from lrq_ha.publisher.core import Lane
from lrq_ha.publisher.errors import PublisherClosed
from lrq_ha.publisher.window import Settled
from lrq_ha.publisher.wire import Outgoing

PATIENCE_S = 60.0
FOR_EVER_S = 10 * PATIENCE_S


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.001)


class Unconnected(Publisher):
    """Its constructor waits for no node. `refused` is what threads of `publish_in_thread` were told."""

    def __init__(self, **options: float) -> None:
        self.refused: list[LrqError] = []
        super().__init__(["amqp://127.0.0.1:1"], "unconnected", "orders", **options)  # type: ignore[arg-type]

    def _connect(self) -> None:
        pass

    def bodies(self, lane: Lane[Confirm]) -> list[bytes]:
        """What waits in a window, in its order, without the blanks behind it."""
        with self._lock:
            return [entry.item.body.rstrip() for entry in lane.window._waiting]

    @property
    def in_line(self) -> int:
        """How many wait for room in the window of `publish`."""
        return len(self._turns[self._own])

    def publish_in_thread(self, body: bytes, properties: pika.BasicProperties | None = None) -> threading.Thread:
        """It stands in line when this returns, or needs not."""

        def publish() -> None:
            try:
                self.publish("", "q", body, properties)
            except LrqError as error:
                self.refused.append(error)

        before = self.in_line
        thread = threading.Thread(target=publish, daemon=True)
        thread.start()
        until(lambda: self.in_line > before or not thread.is_alive())
        return thread

    def confirmed(self) -> None:
        """As if a node had confirmed all that was published."""

        def acked() -> list[Settled[Outgoing[Confirm]]]:
            last = len(self._own.window.take(1 << 30))
            return self._own.window.acked(last, True)

        self._settle(acked)


@contextmanager
def unconnected(**options: float) -> Iterator[Unconnected]:
    publisher = Unconnected(**options)
    try:
        yield publisher
    finally:
        publisher._shut_down(PublisherClosed("The test is over"))


@contextmanager
def full(publish_timeout_s: float = FOR_EVER_S) -> Iterator[Unconnected]:
    """Its window has room for 1,000 bytes and the frames around them, of which 600 are taken."""
    with unconnected(window_bytes=1200, publish_timeout_s=publish_timeout_s) as publisher:
        publisher.publish("", "q", b"first".ljust(600))
        yield publisher
