"""Free loopback ports.

Rule: ports are drawn at random from below the range that the kernel gives to outgoing connections, so that two labs started at the same
moment, or a connection that happens to be open, seldom meet; each is tried before it is handed out, and again before a process is started.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

from lrq_ha.lab.errors import LabError

_FIRST, _LAST = 20_000, 32_000
_TRIES_MAX = 1_000


def is_free(port: int) -> bool:
    """Whether a process could listen on 127.0.0.1:`port` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_ports() -> Iterator[int]:
    """Yields different free ports, one after the other.

    Raises:
        LabError: None was found in a thousand tries.
    """
    given: set[int] = set()
    for _ in range(_TRIES_MAX):
        port = random.randint(_FIRST, _LAST)
        if port not in given and is_free(port):
            given.add(port)
            yield port
    raise LabError("No free port was found on 127.0.0.1", todo="End some of the programs that listen there", retriable=True)
