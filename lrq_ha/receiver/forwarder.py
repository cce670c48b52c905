"""Sends deltas of a receiver on to other sites, each transaction once, however often the receiver is given it.

Rules:

- A transaction goes on under a number: its sequence in the source's log. The log here takes a number once, so a list that comes again, as the
  process was killed or the listener has failed behind `forward`, puts nothing into it a second time.
- The numbers belong to one log of a source: each has a producer of its own, named by the publisher and the identity of that log.
- A transaction does not go back to a group that it has passed. With no other destination left, it goes nowhere.
- Nothing passes a transaction that was refused: the producer ends, and the list that comes again begins with that transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

from lrq_ha.errors import LrqError
from lrq_ha.publisher import InvalidArgument, Publisher
from lrq_ha.publisher.messages import LogEntries

from .updates import Update, UpdateType

SENT_MAX: Final = (1 << 63) - 1  # any number may have been sent: the receiver keeps a position, and not how far `forward` has come beyond it
LOG_DIGITS: Final = 16

Destinations = Sequence[str] | Callable[[Update], Sequence[str]]
"""The remote ids of the sites that get an update, or a function that returns them."""


class Forwarder:
    """Sends on what a listener gets. One receiver uses it: the publisher's name stands for that receiver.

    Args:
        publisher: To the group at this site, with the client's name. Its producer name is 47 characters long at most.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def forward(self, updates: Sequence[Update], destinations: Destinations, timeout_s: float | None = 60.0) -> None:
        """Sends the transactions of a list on, and waits until they are safe. Apply the list first, where the full sync provider reads.

        Args:
            updates: A list of deltas as the listener got it. Updates may be left out, or have other payloads (`dataclasses.replace`). A list goes
                through one call: a second call for its transactions sends nothing.
            destinations: The sites.
            timeout_s: Seconds to wait for the confirms; None: as long as it takes.

        Raises:
            InvalidArgument: The updates are rows of a snapshot, which the provider here supplies to its sites, or the producer name is too long.
            NackedError: The door refused a transaction, for a site that the group does not know, for example. None behind it was sent.
            LrqError: As from `Publisher.transmit_log_entry_messages` and `Confirm.result`. Return False, or let the error pass: the list comes again.
        """
        if any(update.type is not UpdateType.LOG_ENTRY_SYNC for update in updates):
            raise InvalidArgument(
                "Rows of a snapshot are not forwarded",
                todo="Apply them, and let the full sync provider of this site supply the tables; forward deltas only",
            )
        where = destinations if callable(destinations) else lambda _: destinations
        confirms = [
            self._publisher.open_producer(self._name_producer(log), SENT_MAX, ascending=True).transmit(position.sequence, entries)
            for (log, position, path), transaction in groupby(updates, attrgetter("log", "position", "path"))
            if (entries := _address(transaction, where, path)) is not None
        ]
        failure: LrqError | None = None
        for confirm in confirms:  # each is asked: `Publisher.flush` reports failures that no caller has asked for
            try:
                confirm.result(timeout_s if failure is None else 0)
            except LrqError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _name_producer(self, log: str) -> str:
        return f"{self._publisher.producer}.{log[:LOG_DIGITS] or 'unknown'}"


def _address(transaction: Iterable[Update], where: Callable[[Update], Sequence[str]], path: tuple[str, ...]) -> LogEntries | None:
    """The transaction to send; None if no destination is left."""
    left = [(update.opaque_payload, [name for name in where(update) if name not in path]) for update in transaction]
    addressed = [(payload, names) for payload, names in left if names]
    return LogEntries.checked(addressed, path) if addressed else None
