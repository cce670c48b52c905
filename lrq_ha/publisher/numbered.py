"""A producer whose numbers the caller keeps, durably and before it transmits: a transaction that is transmitted again is in the log once.

Source: the publishing IDs of RabbitMQ's stream protocol, which an application may take from its own storage.

Rules:

 - A number belongs to one transaction, permanently. The caller gives the transactions in the order of their numbers.
 - A transaction that is still on its way is not sent a second time: the caller gets its Confirm.
"""

from __future__ import annotations

from collections.abc import Callable

from lrq_ha.errors import LrqError
from lrq_ha.publisher.confirm import Confirm
from lrq_ha.publisher.core import Lane
from lrq_ha.publisher.errors import InvalidArgument
from lrq_ha.publisher.messages import LogEntries
from lrq_ha.publisher.window import NumberedWindow
from lrq_ha.publisher.wire import Outgoing


class NumberedProducer:
    """Transmits transactions under numbers of the caller. `Publisher.open_producer` makes it; one thread at a time may use it."""

    def __init__(
        self,
        lane: Lane[Confirm],
        window: NumberedWindow[Outgoing[Confirm]],
        put: Callable[[Lane[Confirm], int, LogEntries], Confirm],
        closed: Callable[[], LrqError | None],
    ) -> None:
        self.lane = lane
        self.window = window
        self._put = put
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
            number: Of the transaction, from 1; a gap costs the nodes memory permanently.
            entries: What the transaction holds.

        Returns:
            The confirm. It succeeds for a transaction that the log has already. A refused transaction keeps its number.

        Raises:
            InvalidArgument: The number is below 1.
            FencedError: The log knows higher numbers of this producer than any process has sent.
            MessageTooLarge, WindowFull, NoPrimary, PublisherClosed: As from `Publisher.transmit_log_entry_message`.
        """
        if number < 1:
            raise InvalidArgument(f"number is {number}", todo="Numbers begin with 1")
        while self._on_their_way and next(iter(self._on_their_way.values())).done:
            del self._on_their_way[next(iter(self._on_their_way))]
        confirm = self._on_their_way.get(number)
        if confirm is None or confirm.done:
            self._on_their_way.pop(number, None)
            confirm = self._on_their_way[number] = self._put(self.lane, number, entries)
        return confirm
