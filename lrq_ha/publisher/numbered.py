"""A producer whose numbers the caller keeps, durably and before it sends: a transaction or message that is sent again is in the log once.

Source: the publishing IDs of RabbitMQ's stream protocol, which an application may take from its own storage.

Rules:

 - A number belongs to one transaction or message, permanently. The caller gives them in the order of their numbers.
 - What is still on its way is not sent a second time: the caller gets its Confirm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pika

from lrq_ha.errors import LrqError
from lrq_ha.publisher.confirm import Confirm
from lrq_ha.publisher.core import Lane
from lrq_ha.publisher.errors import InvalidArgument
from lrq_ha.publisher.messages import LogEntries
from lrq_ha.publisher.window import NumberedWindow
from lrq_ha.publisher.wire import Outgoing


@dataclass(frozen=True, slots=True)
class Message:
    """The arguments of `Publisher.publish`, of a message that needs a route."""

    exchange: str
    routing_key: str
    body: bytes
    properties: pika.BasicProperties | None = None


class NumberedProducer:
    """Sends transactions or messages under numbers of the caller. `Publisher.open_producer` makes it; one thread at a time may use it."""

    def __init__(
        self,
        lane: Lane[Confirm],
        window: NumberedWindow[Outgoing[Confirm]],
        put_entries: Callable[[Lane[Confirm], int, LogEntries], Confirm],
        put_message: Callable[[Lane[Confirm], int, Message], Confirm],
        closed: Callable[[], LrqError | None],
    ) -> None:
        self.lane = lane
        self.window = window
        self._put_entries = put_entries
        self._put_message = put_message
        self._closed = closed
        self._on_their_way: dict[int, Confirm] = {}

    @property
    def fenced(self) -> bool:
        """Whether the log knows higher numbers than any process has sent."""
        return self.lane.failure is not None

    @property
    def failure(self) -> LrqError | None:
        """Why this producer transmits no more."""
        return self.lane.failure or self._closed()

    @property
    def checked(self) -> bool:
        """Whether a node has told the producer's last number. Before that, the caller must not raise what it keeps as sent."""
        return self.window.learned or self.lane.ready

    def no_primary(self) -> LrqError | None:
        """Why no node takes transactions now; None if one does."""
        return self.lane.no_primary()

    def transmit(self, number: int, entries: LogEntries) -> Confirm:
        """Sends a transaction of log entries.

        Args:
            number: Of the transaction, from 1; a gap costs the nodes memory permanently, unless the producer is ascending.
            entries: What the transaction holds.

        Returns:
            The confirm. It succeeds for a transaction that the log has already. A refused transaction keeps its number.

        Raises:
            InvalidArgument: The number is below 1.
            FencedError: The log knows higher numbers of this producer than any process has sent.
            NackedError: The producer is ascending, and an earlier transaction was refused.
            MessageTooLarge, WindowFull, NoPrimary, PublisherClosed: As from `Publisher.transmit_log_entry_message`.
        """
        return self._send(number, lambda: self._put_entries(self.lane, number, entries))

    def publish(self, number: int, message: Message) -> Confirm:
        """Publishes a message; arguments, result and errors as those of `transmit`."""
        return self._send(number, lambda: self._put_message(self.lane, number, message))

    def _send(self, number: int, put: Callable[[], Confirm]) -> Confirm:
        if number < 1:
            raise InvalidArgument(f"number is {number}", todo="Numbers begin with 1")
        while self._on_their_way and next(iter(self._on_their_way.values())).done:
            del self._on_their_way[next(iter(self._on_their_way))]
        confirm = self._on_their_way.get(number)
        if confirm is None or confirm.done:
            self._on_their_way.pop(number, None)
            confirm = self._on_their_way[number] = put()
        return confirm
