"""The counter of an outbox: which number a write gets, and how much a transaction of the log may hold. Pure.

A transaction of the log is sent as one message. So the counter adds up the entries of the writes that share a number.

Invariants:

- Numbers are given in the order of commits, without gaps: the row of the counter stays locked until its writer commits or rolls back.
- Writes of one database transaction share a number, if the database can name its transactions (PostgreSQL). Otherwise each write has its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lrq_ha.publisher.errors import MessageTooLarge
from lrq_ha.publisher.messages import LogEntries
from lrq_ha.routing.chain import ADDRESSEES_MAX, TRANSMISSION_BYTES_MAX

ENTRY_BYTES: Final = 32  # at most, of an entry with its payload, beside the payload and the destinations
DESTINATION_BYTES: Final = 8  # at most, of a destination, beside its name
TRANSACTION_BYTES_MAX: Final = TRANSMISSION_BYTES_MAX - 4096  # 4 KiB for the names and the ID of a transaction


@dataclass(frozen=True, slots=True)
class Counter:
    """The row of the counter.

    Attributes:
        number: Of the last transaction; 0: there was none.
        transaction_id: The database transaction that has this number; None if the database cannot name it.
        entries: Of this number, so far.
        addressees: Entries times destinations of this number, <= ADDRESSEES_MAX.
        size_bytes: Of this number's message, at most, <= TRANSACTION_BYTES_MAX.
    """

    number: int
    transaction_id: str | None = None
    entries: int = 0
    addressees: int = 0
    size_bytes: int = 0

    def add(self, transaction_id: str | None, entries: LogEntries) -> Counter:
        """The counter after a write.

        Args:
            transaction_id: The database transaction of the write; None if the database cannot name it.
            entries: What is written.

        Raises:
            MessageTooLarge: The transaction is above a limit.
        """
        joins = transaction_id is not None and transaction_id == self.transaction_id
        base = self if joins else Counter(self.number + 1, transaction_id)
        found = Counter(
            base.number,
            transaction_id,
            base.entries + len(entries.entries),
            base.addressees + sum(len(destinations) for _, destinations in entries.entries),
            base.size_bytes + measure_entries(entries),
        )
        if found.size_bytes > TRANSACTION_BYTES_MAX or found.addressees > ADDRESSEES_MAX:
            raise MessageTooLarge(
                f"The entries of one transaction have {found.size_bytes} bytes (at most {TRANSACTION_BYTES_MAX}) and {found.addressees} addressees"
                f" (entries times destinations, at most {ADDRESSEES_MAX})",
                todo="Write fewer or smaller entries in a transaction",
            )
        return found


def measure_entries(entries: LogEntries) -> int:
    """An upper limit of the bytes that entries take in the message, and in the share of each destination."""
    return sum(
        len(payload) + ENTRY_BYTES + sum(len(each) + DESTINATION_BYTES for each in destinations) for payload, destinations in entries.entries
    )
