"""Free loopback ports.

Rules:

- Ports are drawn at random from below the range that the kernel gives to outgoing connections, so that an open connection is seldom
  met; each is tried before it is handed out, and again before a process is started.
- No two labs of a machine draw one port, not even while a node of one of them is down: a port is held by a Unix socket of its name, which ends
  with the process at the latest.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Generator
from contextlib import ExitStack

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


def free_ports() -> Generator[int]:
    """Yields different free ports, one after the other; no other lab draws them before the generator is closed.

    Raises:
        LabError: None was found in a thousand tries.
    """
    with ExitStack() as held:
        for _ in range(_TRIES_MAX):
            port = random.randint(_FIRST, _LAST)
            hold = held.enter_context(socket.socket(socket.AF_UNIX))
            try:
                hold.bind(f"\0lrq-ha-port-{port}")  # an abstract name: no file that could stay behind
            except OSError:
                continue
            if is_free(port):
                yield port
        raise LabError("No free port was found on 127.0.0.1", todo="End some of the programs that listen there", retriable=True)
