"""Deliveries and confirmed runs, as the log records them. No I/O."""

from __future__ import annotations

from typing import NamedTuple

from lrq_ha.replication.queues import QueueKey


class Settled(NamedTuple):
    """`publishes` consecutive publishes of one run that the broker has answered.

    Args:
        client_tag: The client's number of the first; 0 if the client asked for no confirms.
        publishes: How many.
        sequence: Log sequence of the first; 0 if they are not in the log.
        producer: Dedup key; empty if they bring no replication IDs.
        number: Sequence number in the first's replication ID.
    """

    client_tag: int
    publishes: int
    sequence: int
    producer: str
    number: int


class Delivery(NamedTuple):
    """A message of the log that a client holds."""

    queue: QueueKey
    sequence: int
    deaths: tuple[tuple[str, int], ...]

    @property
    def visit(self) -> int:
        """How often the message has left this queue by dead-lettering (R10)."""
        return dict(self.deaths).get(self.queue[1], 0) if self.deaths else 0
