"""The entries applied on this node: R, the generation table (R7, R8), the stamp of a copy, and the record of them.

R is the sequence up to which every entry is applied here and confirmed, or certainly not needed.

Rules:

- A copy **counts** only if its stamp has the newest generation whose R lies *before* the copy's sequence. The generation opened at R published
  everything behind R (again), so entry R + 1 is its first; entry R was applied by an older generation and is not published again.
  (model2/m2_filter.py counts from 0: "R <= p" there is "R < sequence" here.)
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from lrq_ha.errors import SET_UP_ANEW, IllegalEvent, MalformedInput
from lrq_ha.replication.checkpoints import StartPoint
from lrq_ha.replication.positions import RangeSet

STAMP_MAX_BYTES = 19 + 1 + 19 + 1 + 10
GENERATIONS_MAX = 100_000
"""Entries of the table, one per start or lost connection at which R had moved. At the limit the node must join again."""

_STAMP = re.compile(rb"([0-9]{1,19})\.([0-9]{1,19})/([0-9]{1,10})")


def format_stamp(epoch: int, sequence: int, generation: int) -> bytes:
    """The value of the header `x-lrq-pos`: `<epoch>.<sequence>/<generation>`."""
    return b"%d.%d/%d" % (epoch, sequence, generation)


def parse_stamp(value: bytes) -> tuple[int, int, int]:
    """(epoch, sequence, generation) of a header `x-lrq-pos`.

    Raises:
        MalformedInput: The value has another form.
    """
    match = _STAMP.fullmatch(value)
    if match is None:
        raise MalformedInput(f"{value[:STAMP_MAX_BYTES]!r} is not a position stamp <epoch>.<sequence>/<generation>")
    epoch, sequence, generation = match.groups()
    return int(epoch), int(sequence), int(generation)


class Generations:
    """The table of (R, generation) of this node (R8).

    The Rs and the generations both grow. A generation is the number of an OPEN in the node's own stream, so none is used twice, not even
    by a sidecar that was killed before it wrote its record.
    """

    __slots__ = ("_applied", "_generation", "_newest", "_newest_applied")

    def __init__(self, table: Iterable[tuple[int, int]] = ()) -> None:
        self._applied: list[int] = []
        self._generation: list[int] = []
        self._newest = 0
        self._newest_applied = -1
        for applied, generation in table:
            self.opened(applied, generation)

    def opened(self, applied: int, generation: int) -> None:
        """A generation begins; everything behind R = `applied` is published (again) by it.

        The record with the new table must be written, and confirmed, before the first of these publishes.

        Raises:
            IllegalEvent: R or the generation goes back, or the table is full. Nothing was changed.
        """
        if generation <= self._newest:
            raise IllegalEvent(f"generation {generation} is opened after generation {self._newest}")
        if applied < self._newest_applied:
            raise IllegalEvent(f"generation {generation} begins at R={applied}, an earlier one at R={self._newest_applied}")
        if applied == self._newest_applied:  # the older generation no longer decides anything
            self._generation[-1] = generation
        elif len(self._applied) >= GENERATIONS_MAX:
            raise IllegalEvent(f"the generation table holds {GENERATIONS_MAX} entries", todo=SET_UP_ANEW)
        else:
            self._applied.append(applied)
            self._generation.append(generation)
        self._newest, self._newest_applied = generation, applied

    @property
    def newest(self) -> int:
        """The generation that publishes now; 0 before the first."""
        return self._newest

    @property
    def table(self) -> tuple[tuple[int, int], ...]:
        """(R, generation), oldest first."""
        return tuple(zip(self._applied, self._generation))

    def of(self, seq: int) -> int:
        """The generation whose copy of entry `seq` counts; -1 if no copy can be left."""
        if seq > self._newest_applied:
            return self._newest
        i = bisect_left(self._applied, seq)
        return self._generation[i - 1] if i else -1

    def counts(self, seq: int, generation: int) -> bool:
        """Whether a copy of entry `seq` with this stamp is the one that counts; every other copy is acked away."""
        if seq > self._newest_applied:
            return generation == self._newest
        return generation == self.of(seq)

    def cut(self, end: int) -> None:
        """The log ends at `end`: a host that went down lost the entries after it (R16). Generations opened behind `end` begin there.

        Other entries will take these sequences, and this node publishes them with its newest generation.
        """
        kept = bisect_right(self._applied, end)
        if kept == len(self._applied):
            return
        newest = self._newest
        del self._applied[kept:], self._generation[kept:]
        self._newest, self._newest_applied = (self._generation[-1], self._applied[-1]) if kept else (0, -1)
        self.opened(end, newest)


class AppliedTracker:
    """Which entries are applied here: all up to R (`applied`), and some above it, out of order."""

    __slots__ = ("_above", "applied")

    def __init__(self, applied: int = 0) -> None:
        self.applied = applied  # every entry <= applied is applied; applied + 1 is not
        self._above = RangeSet()

    def mark(self, first: int, last: int) -> bool:
        """Entries first .. last are applied and confirmed, or certainly not needed. Returns whether R moved."""
        if first > self.applied + 1:
            self._above.add(first, last)
            return False
        if last <= self.applied:
            return False
        self.applied = last
        if self._above:
            self.applied = self._above.contiguous_from(last + 1)
            self._above.remove(0, self.applied)
        return True

    def is_applied(self, seq: int) -> bool:
        """Whether entry `seq` is applied."""
        return seq <= self.applied or seq in self._above

    def upto(self, others: RangeSet, known: int = 0) -> int:
        """The greatest n up to which every entry is applied or in `others`. `known`: a lower bound of n."""
        upto = max(known, self.applied)
        while (after := others.contiguous_from(self._above.contiguous_from(upto + 1) + 1)) > upto:
            upto = after
        return upto

    def needs(self, first: int, last: int) -> RangeSet:
        """The entries of first .. last that are not applied: they are published again after a lost connection to the broker."""
        return self._above.missing(max(first, self.applied + 1), last)


@dataclass(frozen=True, slots=True)
class VisitRecord:
    """Operations on dead-lettered copies at one queue: see `dead_letters.Visits`. `positions` is a serialized bitmap of sequences."""

    origin: str
    visit: int
    dequeued: bool
    positions: bytes


@dataclass(frozen=True, slots=True)
class QueueRecord:
    """The filter's knowledge of one queue, as serialized bitmaps of sequences.

    `purged`: every sequence below it is purged, except `spared` (empty: none is purged). `departed`: see `delivery_filter.DEPARTED_MAX`;
    0: the queue has not departed.
    """

    vhost: str
    queue: str
    done: bytes
    moved: bytes
    due: bytes
    purged: int
    visits: tuple[VisitRecord, ...]
    departed: int = 0
    spared: bytes = b""


@dataclass(frozen=True, slots=True)
class AppliedRecord:
    """The applied record of a node (R7). The driver writes it to LRQ_APPLIED_<group>, where the last record counts.

    `applied`: R, a sequence. `start`: the CHECKPOINT at or before R from which a restart reads the own log; None: from its first record.
    `base`: the CHECKPOINT at which the own log began (R17); 0: at entry 1.
    `generations`: (R, generation), oldest first. `queues`, `refused`: from `DeliveryFilter.export`, taken no earlier than R.
    `known`: the last entry whose operations `queues` and `refused` include.
    """

    applied: int
    start: StartPoint | None
    generations: tuple[tuple[int, int], ...]
    queues: tuple[QueueRecord, ...]
    refused: bytes
    base: int = 0
    known: int = 0
