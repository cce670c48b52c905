"""The audit trail: who published what and where, and who took it. One JSON object per line, appended to a file.

Rules:

- No body, header or property is written.
- A publish gets one line, when its outcome is known; a delivered message gets one when the client has settled it.
- The file is opened again on SIGHUP, so logrotate can rename it. A failed write is an error of the interceptor, counted and logged.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from io import TextIOWrapper

from .events import Accept, Client, Delivery, Interceptor, Message, Reject, Release, Routed

MODE = 0o640


class Audit(Interceptor):
    """Writes the audit trail.

    Args:
        path: The file; it is made if it is not there (mode 0640), appended to if it is.
    """

    def __init__(self, *, path: str) -> None:
        if not isinstance(path, str) or not os.path.isabs(path):
            raise ValueError("path must be the absolute path of a file")
        self._path = path
        self._file: TextIOWrapper | None = None

    def start(self) -> None:
        """Opens the file. Raises OSError."""
        self._file = self._open()

    def _open(self) -> TextIOWrapper:
        return open(self._path, "a", encoding="ascii", opener=lambda path, flags: os.open(path, flags, MODE))

    def routed(self, event: Routed) -> None:
        """A publish, and its outcome."""
        client, message = event.client, event.message
        queues = [event.queue] if event.queue else []
        reason = {"reason": event.reason} if event.reason else {}
        self._write(event.time, "publish", event.outcome.name.lower(), client, event.channel, message, {"queues": queues, **reason})

    def accept(self, event: Accept) -> None:
        """A message that a client took."""
        self._taken(event.time, "auto-accept" if event.automatic else "accept", event.delivery)

    def reject(self, event: Reject) -> None:
        """A message that a client rejected for good."""
        self._taken(event.time, "reject", event.delivery)

    def release(self, event: Release) -> None:
        """A message that a client was given and did not take."""
        self._taken(event.time, f"release-{event.cause.name.lower()}", event.delivery)

    def _taken(self, when: float, outcome: str, delivery: Delivery) -> None:
        more = {"queues": [delivery.queue], "redelivered": delivery.redelivered}
        self._write(when, "take", outcome, delivery.client, delivery.channel, delivery.message, more)

    def _write(self, when: float, what: str, outcome: str, client: Client, channel: int, message: Message, more: dict[str, object]) -> None:
        line = {
            "time": datetime.fromtimestamp(when, UTC).isoformat(timespec="microseconds"),
            "what": what,
            "outcome": outcome,
            "user": client.user,
            "vhost": client.vhost,
            "address": client.address,
            "channel": channel,
            "exchange": message.exchange,
            "routing_key": message.routing_key,
            "id": message.replication_id or None,
            "position": str(message.position) if message.position is not None else None,
            "bytes": message.size_bytes,
            **more,
        }
        if self._file is None:
            self._file = self._open()
        self._file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        """Hands the lines to the operating system."""
        if self._file is not None:
            self._file.flush()

    def reload(self) -> None:
        """Opens the file again: the old one may have been renamed."""
        before, self._file = self._file, None
        if before is not None:
            before.close()
        self._file = self._open()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
