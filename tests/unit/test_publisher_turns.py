"""Threads at a blocking publisher: who waits for room stands in line, and what is announced last counts."""

from __future__ import annotations

import threading
from typing import Any

import pika
import pytest
from unconnected import FOR_EVER_S, PATIENCE_S, full, unconnected, until

from lrq_ha.publisher import InvalidArgument, NoPrimary, PublisherClosed
from lrq_ha.publisher.messages import client_status

LARGE = b"large".ljust(700)


def test_a_large_message_goes_before_small_ones_that_came_later() -> None:
    """They would have fitted beside what is in the window: as long as some did, the large one waited."""
    with full() as publisher:
        threads = [publisher.publish_in_thread(body) for body in (LARGE, b"small", b"also small")]
        assert publisher.bodies(publisher._own) == [b"first"]
        publisher.confirmed()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert publisher.bodies(publisher._own) == [b"large", b"small", b"also small"]


def test_who_waits_no_longer_leaves_the_line() -> None:
    with full(publish_timeout_s=0.5) as publisher:
        threads = [publisher.publish_in_thread(LARGE)]
        publisher._publish_timeout_s = FOR_EVER_S
        threads.append(publisher.publish_in_thread(b"small"))
        for thread in threads:
            thread.join(PATIENCE_S)
        assert [type(each) for each in publisher.refused] == [NoPrimary]
        assert publisher.bodies(publisher._own) == [b"first", b"small"]


def test_who_stands_in_line_hears_at_once_that_it_is_closed() -> None:
    """The I/O thread may take seconds to end: who waited no longer meanwhile was told that the window is full."""
    with full() as publisher:
        waiting, goes_on = publisher.publish_in_thread(LARGE), threading.Event()
        publisher._loop.add_callback_threadsafe(lambda: goes_on.wait(PATIENCE_S))
        closing = threading.Thread(target=publisher._shut_down, args=(PublisherClosed("It is closed"),))
        closing.start()
        waiting.join(PATIENCE_S)
        assert [type(each) for each in publisher.refused] == [PublisherClosed]
        assert closing.is_alive()
        goes_on.set()
        closing.join(PATIENCE_S)


def test_what_cannot_be_sent_holds_up_nobody() -> None:
    with full() as publisher:
        wrong = pika.BasicProperties(expiration=60000)
        threads = [publisher.publish_in_thread(LARGE, wrong), publisher.publish_in_thread(LARGE)]
        publisher.confirmed()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert [type(each) for each in publisher.refused] == [InvalidArgument]
        assert publisher.bodies(publisher._own) == [b"large"]


def test_a_callback_goes_past_the_line() -> None:
    """It is on the I/O thread, which would wait for itself."""
    with full() as publisher:
        thread = publisher.publish_in_thread(LARGE)
        came: list[str] = []

        def callback() -> None:
            publisher.publish("", "q", b"small")
            with pytest.raises(NoPrimary):
                publisher.publish("", "q", LARGE)
            came.append("through")

        publisher._loop.add_callback_threadsafe(callback)
        until(lambda: came or not publisher._thread.is_alive())
        assert publisher.bodies(publisher._own) == [b"first", b"small"]
        publisher.confirmed()
        thread.join(PATIENCE_S)
        assert publisher.bodies(publisher._own) == [b"large"]


def test_statuses_pass_a_full_window() -> None:
    with unconnected(window=1, publish_timeout_s=0) as publisher:
        with pytest.raises(NoPrimary):
            publisher.transmit_log_entry_message(b"row", ["west"])
        publisher._send_status(b"status")
        assert publisher.bodies(publisher._log) == [client_status("orders", False), b"status"]


def test_all_in_line_are_told_that_the_publisher_is_closed() -> None:
    with full() as publisher:
        threads = [publisher.publish_in_thread(LARGE) for _ in range(10)]
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [type(each) for each in publisher.refused] == [PublisherClosed] * 10


class Pausing:
    """A lock. Who is not the thread that made it pauses behind each release, until `go`."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._maker = threading.current_thread()
        self.paused, self.go = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._lock.__exit__(*raised)
        if threading.current_thread() is not self._maker:
            self.paused.set()
            self.go.wait(PATIENCE_S)


def test_a_provider_that_comes_beside_the_first_transmit_is_announced_last() -> None:
    """The server goes by the last announcement: else it asks for no full sync, for ever."""
    with unconnected() as publisher:
        lock = publisher._lock
        pausing = Pausing(lock)
        publisher._lock = pausing  # type: ignore[assignment]
        thread = threading.Thread(target=lambda: publisher.transmit_log_entry_message(b"row", ["west"]), daemon=True)
        thread.start()
        assert pausing.paused.wait(PATIENCE_S)
        publisher.on_full_sync(lambda request, context: None)
        pausing.go.set()
        thread.join(PATIENCE_S)
        publisher._lock = lock
        announced = [client_status("orders", provides) for provides in (False, True)]
        assert [body for body in publisher.bodies(publisher._log) if body in announced] == announced
