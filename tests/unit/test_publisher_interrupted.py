"""Ctrl-C while a publisher is made, waits for room, or is closed."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator

import pytest
from unconnected import PATIENCE_S, full, unconnected, until

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher import FullSyncContext, FullSyncRequest, Publisher
from lrq_ha.publisher.messages import full_sync_status


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Also where whoever began this ignores it, as a shell does for what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_main() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_a_publisher_that_is_interrupted_while_it_connects_is_closed() -> None:
    """Nobody has it to close it: it went on, and fought for the producer's name with the next one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def interrupt() -> None:
            for _ in range(2):  # at the second one it certainly waits
                taken.append(server.accept()[0])
            interrupt_main()

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            Publisher([f"amqp://app:app@127.0.0.1:{server.getsockname()[1]}"], "interrupted-1", connect_timeout_s=300, login_timeout_s=0.5)
        thread.join(60)
        assert not [each.name for each in threading.enumerate() if "interrupted-1" in each.name]
        for each in taken:
            each.close()


def test_who_is_interrupted_leaves_the_line() -> None:
    """What came behind it would have waited for nobody."""
    with full() as publisher:
        behind: list[threading.Thread] = []

        def interrupt() -> None:
            until(lambda: publisher.in_line)
            behind.append(publisher.publish_in_thread(b"behind it"))
            interrupt_main()

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            publisher.publish("", "q", b"large".ljust(700))
        thread.join(PATIENCE_S)
        behind[0].join(PATIENCE_S)
        assert publisher.bodies(publisher._own) == [b"first", b"behind it"]


def test_a_publisher_that_is_interrupted_while_it_waits_for_a_provider_is_closed() -> None:
    """Its thread went on, and took what was published."""
    begun, go = threading.Event(), threading.Event()

    def provider(request: FullSyncRequest, context: FullSyncContext) -> None:
        begun.set()
        until(lambda: context.cancelled)
        interrupt_main()
        go.wait(PATIENCE_S)

    with unconnected() as publisher:
        publisher.on_full_sync(provider)
        syncs = publisher._full_syncs
        assert syncs is not None
        syncs._book.caught_up()
        syncs.status(full_sync_status("orders", "west", "r", "", pb.FullSyncRequest.REQUESTED))
        assert begun.wait(PATIENCE_S)
        try:
            with pytest.raises(KeyboardInterrupt):
                publisher.close()
            assert not publisher._thread.is_alive()
        finally:
            go.set()
