"""What a relay transmits next: pure.

Rules:

- A batch holds whole transactions, in the order of their numbers.
- A destination that no confirm has proven may be refused, and what is sent behind a refused transaction would come before it. So a transaction
  with such a destination is sent alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Final

from lrq_ha.publisher.messages import LogEntries

BATCH_TRANSACTIONS_MAX: Final = 1000
BATCH_BYTES_MAX: Final = 8 << 20  # of payloads; one larger transaction goes alone


@dataclass(frozen=True, slots=True)
class Stored:
    """A transaction in the outbox.

    Attributes:
        number: >= 1.
        entries: In their order.
    """

    number: int
    entries: LogEntries

    @property
    def destinations(self) -> frozenset[str]:
        """All sites that the transaction goes to."""
        return frozenset(each for _, destinations in self.entries.entries for each in destinations)


def find_end(sizes: Iterable[tuple[int, int]]) -> int:
    """The last number of the next batch; 0: there is nothing to transmit.

    Args:
        sizes: (number, bytes of its payloads) of the transactions that follow, ascending.
    """
    end = total = count = 0
    for number, size_bytes in sizes:
        if count == BATCH_TRANSACTIONS_MAX or (count and total + size_bytes > BATCH_BYTES_MAX):
            break
        end, total, count = number, total + size_bytes, count + 1
    return end


def group_entries(rows: Iterable[tuple[int, bytes, Sequence[str]]]) -> list[Stored]:
    """The transactions of rows (number, payload, destinations), which are in order."""
    found: dict[int, list[tuple[bytes, tuple[str, ...]]]] = {}
    for number, payload, destinations in rows:
        found.setdefault(number, []).append((payload, tuple(destinations)))
    return [Stored(number, LogEntries(tuple(entries))) for number, entries in found.items()]


def split_batch(batch: Sequence[Stored], proven: Set[str]) -> Iterator[list[Stored]]:
    """The runs of a batch: what is sent before the next confirm is waited for.

    Args:
        batch: Transactions.
        proven: Destinations that may be sent to. The caller adds those of each run, once it is confirmed, before it asks for the next run.
    """
    run: list[Stored] = []
    for each in batch:
        if each.destinations <= proven:
            run.append(each)
            continue
        if run:
            yield run
            run = []
        yield [each]
    if run:
        yield run
