"""Sends deltas of a receiver on to other sites, in whole transactions and in order.

Rules:

- A list that comes again is sent on again, behind all before: sites that have applied it apply it once more. That also mends a full sync that was
  read from tables which the list has set back. So nothing here remembers a list.
- A transaction does not go back to a group that it has passed. With no other destination left, it goes nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter

from lrq_ha.errors import LrqError
from lrq_ha.publisher import Confirm, InvalidArgument, Publisher

from .updates import Update, UpdateType

Destinations = Sequence[str] | Callable[[Update], Sequence[str]]
"""The remote ids of the sites that get an update, or a function that returns them."""


class Forwarder:
    """Sends on what a listener gets.

    Args:
        publisher: To the group at this site, with the client's name.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def forward(self, updates: Sequence[Update], destinations: Destinations, timeout_s: float | None = 60.0) -> None:
        """Sends the transactions of a list on, and waits until they are safe. Apply the list first, where the full sync provider reads.

        Args:
            updates: A list of deltas as the listener got it. Updates may be left out, or have other payloads (`dataclasses.replace`).
            destinations: The sites.
            timeout_s: Seconds to wait for the confirms; None: as long as it takes.

        Raises:
            InvalidArgument: The updates are rows of a snapshot, which the provider here supplies to its sites. Nothing was sent.
            NackedError: The door refused a transaction, for a site that the group does not know, for example.
            LrqError: As from `Publisher.transmit_log_entry_messages` and `Confirm.result`. Return False, or let the error pass: the list comes again.
        """
        if any(update.type is not UpdateType.LOG_ENTRY_SYNC for update in updates):
            raise InvalidArgument(
                "Rows of a snapshot are not forwarded",
                todo="Apply them, and let the full sync provider of this site supply the tables; forward deltas only",
            )
        where = destinations if callable(destinations) else lambda _: destinations
        confirms: list[Confirm] = []
        failure: LrqError | None = None
        try:
            for (_, path), transaction in groupby(updates, attrgetter("position", "path")):
                entries = _address(transaction, where, path)
                if entries:
                    confirms.append(self._publisher.transmit_log_entry_messages(entries, path))
        except LrqError as error:
            failure = error
        for confirm in confirms:  # each is asked: `Publisher.flush` reports failures that no caller has asked for
            try:
                confirm.result(timeout_s if failure is None else 0)
            except LrqError as error:
                failure = failure or error
        if failure is not None:
            raise failure


def _address(transaction: Iterable[Update], where: Callable[[Update], Sequence[str]], path: tuple[str, ...]) -> list[tuple[bytes, list[str]]]:
    """The entries to send: payloads with the destinations that are left."""
    left = ((update.opaque_payload, [name for name in where(update) if name not in path]) for update in transaction)
    return [(payload, names) for payload, names in left if names]
