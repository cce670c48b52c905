"""What a session is given once: from whom to whom it sends, and what it may use."""

from __future__ import annotations

from dataclasses import dataclass

from lrq_ha.routing import names


@dataclass(frozen=True, slots=True)
class Limits:
    """What a session may use, and how long it waits (seconds)."""

    batch_bytes_max: int = 1 << 20
    in_flight_bytes_max: int = 8 << 20
    read_ahead_bytes_max: int = 4 << 20
    marks_max: int = 256
    answer_timeout_s: float = 10.0  # for the sink's report; then it is asked again
    ack_timeout_s: float = 60.0  # for the next ack; then the sink is asked where it stands
    snapshot_timeout_s: float = 60.0  # for the next snapshot data, or the client's first word
    backoff_first_s: float = 1.0  # before a full sync is asked for again; doubles each time
    backoff_max_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Route:
    """From whom to whom.

    Args:
        source: remote_id of the own group.
        client_name: Whose entries.
        destination: remote_id of the group that is to have them.
    """

    source: str
    client_name: str
    destination: str

    @property
    def queue(self) -> str:
        """The receive queue at the destination."""
        return names.recv_queue(self.client_name, self.source)
