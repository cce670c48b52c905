"""The application of a middle site, as a process: it has no tables, and forwards deltas. It refuses each third list behind the forwarding."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from lrq_ha.publisher import Publisher
from lrq_ha.receiver import Forwarder, Listener, Receiver, Update


class SendsOn(Listener):
    """Forwards deltas to sites."""

    def __init__(self, publisher: Publisher, *to: str) -> None:
        self._forwarder = Forwarder(publisher)
        self._to = to
        self._lists = 0

    def process_updates_in_snapshot_sync(self, updates: list[Update]) -> bool:
        return True

    def process_updates_in_log_entry_sync(self, updates: list[Update]) -> bool:
        self._forwarder.forward(updates, self._to)
        self._lists += 1
        return self._lists % 3 != 1


def start_application(door: str, client_name: str, *to: str) -> subprocess.Popen[Any]:
    """The process of a receiver 'middle'. Kill it."""
    return subprocess.Popen([sys.executable, __file__, door, client_name, *to])


def main(door: str, client_name: str, *to: str) -> None:
    with Publisher([door], f"{client_name}-middle", client_name, confirm_timeout_s=120) as publisher:
        Receiver([door], client_name, "middle", SendsOn(publisher, *to)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
