"""A publisher whose making is interrupted, as by Ctrl-C."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from lrq_ha.publisher import Publisher


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Also where whoever began this ignores it, as a shell does for what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_publisher_that_is_interrupted_while_it_connects_is_closed() -> None:
    """Nobody has it to close it: it went on, and fought for the producer's name with the next one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def interrupt() -> None:
            for _ in range(2):  # at the second one it certainly waits
                taken.append(server.accept()[0])
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            Publisher([f"amqp://app:app@127.0.0.1:{server.getsockname()[1]}"], "interrupted-1", connect_timeout_s=300, login_timeout_s=0.5)
        thread.join(60)
        assert not [each.name for each in threading.enumerate() if "interrupted-1" in each.name]
        for each in taken:
            each.close()
