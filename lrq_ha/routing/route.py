"""A session's constants: its source, client and destination, and its limits."""

from __future__ import annotations

from dataclasses import dataclass

from lrq_ha.routing import names


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources of a session, and its times (seconds)."""

    batch_bytes_max: int = 1 << 20
    in_flight_bytes_max: int = 8 << 20
    read_ahead_bytes_max: int = 4 << 20
    marks_max: int = 256
    answer_timeout_s: float = 10.0  # for the sink's report; then the session asks again
    ack_timeout_s: float = 60.0  # for the next ack; then the session asks the sink for its state
    snapshot_timeout_s: float = 60.0  # for the next snapshot data, or the client's first status
    backoff_first_s: float = 1.0  # before another full sync request; doubles each time
    backoff_max_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Route:
    """The source, client and destination of a session.

    Args:
        source: remote_id of the own group.
        client_name: The client whose entries are sent.
        destination: remote_id of the group that receives them.
        log_id: The identity of the source's log.
    """

    source: str
    client_name: str
    destination: str
    log_id: bytes = b""

    @property
    def queue(self) -> str:
        """The receive queue at the destination."""
        return names.recv_queue(self.client_name, self.source)
