"""The replication IDs in the log (R6: an ID in the log is not appended again).

An ID is `<producer>/<sequence>`, given to a message before it is enqueued. Per producer, memory holds the numbers (`Numbers`), and runs of IDs
whose entries are not completed yet; never an object per message. Both follow the log, its unsafe end included: `add` and `forget` are called
in log order when the entry is appended, `cut` undoes them for entries that were cut off.

Rules:

- Numbers are never dropped. Consecutive numbers cost nothing, dense ones a bit each, widely scattered ones much more; so the caller asks
  before an append whether one more gap is allowed (`may_add`, `may_leave`).
- An ascending producer never uses the numbers that it skips: the entry behind them says how many it skipped, and they count as known. An entry
  says so itself, so that all nodes know one set of numbers. A number that was refused is not skipped: its repeat is taken.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

from pyroaring import BitMap64

from lrq_ha.errors import IllegalEvent, MalformedInput
from lrq_ha.replication.positions import RangeSet

PRODUCER_MAX_BYTES = 128
"""A longer name could make the header frame of a publish too large once the door has added its own header."""
SEQUENCE_MAX = 2**63 - 1
SHARE = 4
"""The part of all producers' limit that the numbers of one producer may take."""
FEW_BYTES = 256
"""The part that one producer may take even if all is used up."""
FREE_BYTES = 64
"""The most that consecutive numbers take: it does not count."""
GAP_BYTES = 32
"""The most that a gap may take: each gap counts as this much until it is measured."""
GUESSED_PART = 16
"""No producer is refused if more than this part of its limit is guessed, not measured."""

FEW_RUNS = 32
"""Up to this many runs are looked up one by one; beyond it, all runs of a producer are scanned."""

CHUNK_BITS = 16  # as in a container of the bitmap
CHUNK_MASK = (1 << CHUNK_BITS) - 1

_ID = re.compile(rb"([^/\x00-\x20\x7f]{1,%d})/([1-9][0-9]{0,18})" % PRODUCER_MAX_BYTES)
_PRODUCER = re.compile(rb"[^/\x00-\x20\x7f]{1,%d}" % PRODUCER_MAX_BYTES)

Snapshot = tuple[tuple[str, tuple[int, ...], bytes], ...]
"""(producer, (first, last, first, last, …), roaring bitmap of all others) for each producer: the form in a CHECKPOINT."""


class ReplicationId(NamedTuple):
    """`<producer>/<sequence>`; sequence >= 1."""

    producer: str
    sequence: int

    def __str__(self) -> str:
        return f"{self.producer}/{self.sequence}"

    def encode(self) -> bytes:
        """The value of the header `x-lrq-id`."""
        return str(self).encode()

    @classmethod
    def parse(cls, value: bytes) -> ReplicationId:
        """Reads the value of a header `x-lrq-id`.

        Raises:
            MalformedInput: Not exactly `<producer>/<sequence>` with a name and a number within their limits.
        """
        match = _ID.fullmatch(value)
        if match is None:
            raise _malformed(value)
        return cls(producer_name(match[1]), _sequence(match[2], value))


def producer_name(value: bytes) -> str:
    """Checks a producer's name: 1 to 128 bytes of UTF-8 without slash, blank or control characters.

    Raises:
        MalformedInput: The value is no such name.
    """
    if _PRODUCER.fullmatch(value) is None:
        raise MalformedInput(f"a producer name of {len(value)} bytes is none", todo=f"use 1 to {PRODUCER_MAX_BYTES} bytes without slash or blank")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise MalformedInput(f"a producer name of {len(value)} bytes is not UTF-8") from None


def _sequence(digits: bytes, value: bytes) -> int:
    sequence = int(digits)
    if sequence > SEQUENCE_MAX:
        raise _malformed(value)
    return sequence


def _malformed(value: bytes) -> MalformedInput:
    return MalformedInput(
        f"a header x-lrq-id of {len(value)} bytes is not a replication ID of this producer",
        todo="it must be <producer>/<sequence>, the sequence a decimal number from 1",
    )


class _Run:
    """IDs first .. first + count - 1 of a producer, which are the entries position .. position + count - 1. `count >= 1`."""

    __slots__ = ("count", "first", "position", "producer")

    def __init__(self, producer: str, first: int, position: int, count: int) -> None:
        self.producer = producer
        self.first = first
        self.position = position
        self.count = count


def _by_first(run: _Run) -> int:
    return run.first


def _by_position(run: _Run) -> int:
    return run.position


class _Forgotten(NamedTuple):
    """A `forget` that may still be cut off: the state to restore then."""

    at: int
    id: ReplicationId
    position: int | None


class _Skipped(NamedTuple):
    """Numbers first .. last, which the entry `at` made known although it has none of them."""

    at: int
    producer: str
    first: int
    last: int


class Numbers:
    """A set of numbers that only grows: ranges of whole chunks (every number is in the set), and a bitmap of the numbers in other chunks.

    Attributes:
        top: No number above it is in the set.
        bytes: Size in a CHECKPOINT, without FREE_BYTES; at least that, except for numbers that came since it was measured and adjoin.
    """

    __slots__ = ("_others", "_whole", "bytes", "top")

    def __init__(self) -> None:
        self.top = 0
        self.bytes = 0
        self._whole = RangeSet()  # of chunks: number >> CHUNK_BITS
        self._others = BitMap64()

    def __contains__(self, number: int) -> bool:
        return number <= self.top and (number in self._others or number >> CHUNK_BITS in self._whole)

    def __bool__(self) -> bool:
        return bool(self._others) or bool(self._whole)

    @property
    def last(self) -> int:
        """The greatest number; 0 if there is none."""
        if self.top not in self:
            others = self._others.max() if self._others else 0
            self.top = max(others, (self._whole.last + 1 << CHUNK_BITS) - 1 if self._whole else 0)
        return self.top

    def touches(self, first: int, last: int) -> bool:
        """Whether first .. last leave no new gap: `first`, the number before it or the one after `last` is in the set."""
        return first - 1 in self or last + 1 in self or first in self

    def add(self, first: int, last: int) -> None:
        """Adds first .. last."""
        grows = first > self.top
        if last > self.top:
            self.top = last
        low, high = first >> CHUNK_BITS, last >> CHUNK_BITS
        if high - low > 1:
            self._whole.add(low + 1, high - 1)
            self._others.remove_range(low + 1 << CHUNK_BITS, high << CHUNK_BITS)
            self._others.add_range(first, low + 1 << CHUNK_BITS)
            self._others.add_range(high << CHUNK_BITS, last + 1)
        else:
            self._others.add_range(first, last + 1)
        if not grows or high != low or not last + 1 & CHUNK_MASK:  # else no chunk can have become whole
            self._settle(low)
            if high != low:
                self._settle(high)

    def _settle(self, chunk: int) -> None:
        first, end = chunk << CHUNK_BITS, chunk + 1 << CHUNK_BITS
        if chunk not in self._whole:
            if self._others.range_cardinality(first, end) <= CHUNK_MASK:
                return
            self._whole.add(chunk)
        self._others.remove_range(first, end)

    def remove(self, first: int, last: int) -> None:
        """Removes first .. last."""
        low, high = first >> CHUNK_BITS, last >> CHUNK_BITS
        for chunk in {low, high}:
            if chunk in self._whole:
                self._others.add_range(chunk << CHUNK_BITS, chunk + 1 << CHUNK_BITS)
        self._whole.remove(low, high)
        self._others.remove_range(first, last + 1)

    def measure(self) -> tuple[tuple[int, ...], bytes]:
        """The form in a CHECKPOINT: flattened ranges, a bitmap of the others. Sets `bytes`."""
        self._others.run_optimize()
        ranges = tuple(n for low, high in self._whole for n in (low << CHUNK_BITS, (high + 1 << CHUNK_BITS) - 1))
        others = self._others.serialize() if self._others else b""
        self.bytes = max(0, 9 * len(ranges) + len(others) - FREE_BYTES)
        return ranges, others

    @classmethod
    def restored(cls, ranges: Iterable[int], others: bytes) -> Numbers:
        """From the form in a CHECKPOINT."""
        new = cls()
        if others:
            new._others = BitMap64.deserialize(others)
            new.top = new._others.max()
        it = iter(ranges)
        for first, last in zip(it, it):
            new.add(first, last)
        new.measure()
        return new


class Dedup:
    """The replication IDs in the log, and the entries of those that are not completed.

    Producers are keys chosen by the caller (vhost, user and announced name). Log positions are sequences of the group's log.
    """

    def __init__(self) -> None:
        self._ids: dict[str, Numbers] = {}
        self._bytes = 0  # of all producers
        self._guessed: set[str] = set()  # producers with gaps that are not measured
        self._guesses = 0  # number of these gaps
        # Entries that are not completed, by position. An entry that can be cut off is unsafe, so not completed, so among them.
        self._open: list[_Run] = []
        self._open_of: dict[str, list[_Run]] = {}  # these runs by producer
        self._completed = 0
        self._safe = 0
        self._forgotten: deque[_Forgotten] = deque()  # in log order, above _safe
        self._skipped: deque[_Skipped] = deque()  # in log order, above _safe

    def seen(self, producer: str, seq: int) -> bool:
        """Whether this ID is in the log: a duplicate, not to be appended again."""
        ids = self._ids.get(producer)
        return ids is not None and seq <= ids.top and seq in ids

    def last(self, producer: str) -> int:
        """The greatest sequence of a producer in the log; 0 if there is none."""
        ids = self._ids.get(producer)
        return ids.last if ids is not None else 0

    def producers(self) -> Collection[str]:
        """All producers that have or had an ID in the log, in the order of their first one: always one collection object, which only grows."""
        return self._ids

    def has_room(self, producer: str, limit: int) -> bool:
        """Whether this producer may log in: it is known, or there are fewer than `limit`. A log that is read is never refused."""
        return producer in self._ids or len(self._ids) < limit

    def may_add(self, producer: str, seq: int, limit: int) -> bool:
        """Whether this ID, which is not in the log, may be appended: it leaves no gap, or there is room for one (`may_leave`).

        Publishes that the broker refuses leave gaps, too, without a check. A quarter more room is there for these gaps; a producer that has used
        it may only close some.
        """
        if self._bytes < limit // SHARE:  # enough for any producer: the usual case ends here
            return True
        if self.may_leave(producer, 1, limit):
            return True
        return self.adjoins(producer, seq) and (seq <= self._ids[producer].top or self.may_leave(producer, 0, limit + limit // 4))

    def may_leave(self, producer: str, gaps: int, limit: int) -> bool:
        """Whether this producer may leave this many more gaps between its IDs.

        All producers together may take `limit` bytes, one of them a part of that. A producer with consecutive numbers is never refused.
        """
        if self._guesses * GAP_BYTES * GUESSED_PART * SHARE >= limit and not self._has_left(producer, gaps, limit):
            for each in self._guessed:
                self._measure(self._ids[each])
            self._measured()
        return self._has_left(producer, gaps, limit)

    def _has_left(self, producer: str, gaps: int, limit: int) -> bool:
        ids = self._ids.get(producer)
        allowed = limit // SHARE if self._bytes < limit else min(limit // SHARE, FEW_BYTES)
        return (ids.bytes if ids is not None else 0) + gaps * GAP_BYTES <= allowed

    def adjoins(self, producer: str, seq: int) -> bool:
        """Whether this ID leaves no new gap: the ID, its predecessor or its successor is in the log, or the producer has none."""
        ids = self._ids.get(producer)
        return not ids or ids.touches(seq, seq)

    def skips(self, producer: str, seq: int) -> int:
        """Number of numbers before `seq` that an ascending producer skips by using `seq` next. None of them was ever in the log of this node, or
        `last` has been asked for since."""
        ids = self._ids.get(producer)
        return max(0, seq - 1 - (ids.top if ids is not None else 0))

    def add(self, producer: str, first: int, count: int, position_seq: int, skipped: int = 0) -> None:
        """IDs first .. first + count - 1 were appended as the entries position_seq .. position_seq + count - 1.

        An entry has one ID at most. Adding an ID that is there already (a log read over a CHECKPOINT) changes only the open positions.
        `skipped`: so many numbers before `first` are known from now on, too.
        """
        ids = self._ids.get(producer)
        if ids is None:
            ids = self._ids[producer] = Numbers()
        self._put(producer, ids, first - skipped, first + count - 1)
        if skipped and position_seq > self._safe:
            self._skipped.append(_Skipped(position_seq, producer, first - skipped, first - 1))
        done = self._completed + 1 - position_seq
        if done > 0:  # read again below the point up to which all is completed
            first, position_seq, count = first + done, position_seq + done, count - done
            if count <= 0:
                return
        tail = self._open[-1] if self._open else None
        if tail is not None and tail.producer == producer and tail.position + tail.count == position_seq and tail.first + tail.count == first:
            tail.count += count
        else:
            self._insert(_Run(producer, first, position_seq, count))

    def forget(self, producer: str, seq: int, at_seq: int) -> None:
        """The broker refused the entry with this ID; entry `at_seq` is the REFUSED entry for it. The ID may be used again."""
        ids = self._ids.get(producer)
        if ids is None or seq not in ids:
            return
        ids.remove(seq, seq)
        self._guess(producer, ids)
        run = self._run_of(producer, seq)
        position = None
        if run is not None:
            position = run.position + seq - run.first
            self._take_out(bisect_left(self._open, run.position, key=_by_position), seq - run.first, 1)
        if at_seq > self._safe:
            self._forgotten.append(_Forgotten(at_seq, ReplicationId(producer, seq), position))

    def position_of(self, producer: str, seq: int) -> int | None:
        """The entry of this ID; None if it is completed or not in the log.

        Ask the `AppliedTracker`, too: it may know more of an ID that was forgotten and is back since the log was cut.
        """
        run = self._run_of(producer, seq)
        return None if run is None else run.position + seq - run.first

    def ids_of(self, first: int, last: int) -> list[tuple[str, int, int]]:
        """(producer, first ID, last ID) of the open entries of first .. last that have IDs: a REFUSED must name them."""
        found = []
        begin, end = bisect_left(self._open, first, key=_by_position), bisect_right(self._open, last, key=_by_position)
        for run in self._open[max(0, begin - 1) : end]:
            low, high = max(first, run.position), min(last, run.position + run.count - 1)
            if low <= high:
                found.append((run.producer, run.first + low - run.position, run.first + high - run.position))
        return found

    def completed(self, upto: int) -> None:
        """All entries up to `upto` are completed: duplicates of their IDs are confirmed at once."""
        if upto > self._completed:
            self._completed = upto
            self._close(0, upto)

    def completed_apart(self, first: int, last: int) -> None:
        """Entries first .. last, which are safe, are completed, though not all before them."""
        self._close(first, last)

    def safe(self, upto_seq: int) -> None:
        """No entry up to `upto_seq` can be cut off any more."""
        if upto_seq <= self._safe:
            return
        self._safe = upto_seq
        for passed in (self._forgotten, self._skipped):
            while passed and passed[0].at <= upto_seq:
                passed.popleft()

    def cut(self, from_seq: int) -> None:
        """The entries from `from_seq` on were cut off the log: their IDs are free, and IDs that they made us forget are back.

        Raises:
            IllegalEvent: An entry that was safe or completed would be cut off. Nothing was changed.
        """
        floor = max(self._safe, self._completed)
        if from_seq <= floor:
            raise IllegalEvent(f"the log is cut from {from_seq} on, but all up to {floor} is safe or completed")
        while self._skipped and self._skipped[-1].at >= from_seq:
            _, producer, first, last = self._skipped.pop()
            self._ids[producer].remove(first, last)
        while True:  # the newest first, because an ID may be added, forgotten and added again
            run_end = self._open[-1].position + self._open[-1].count - 1 if self._open else 0
            forgot_at = self._forgotten[-1].at if self._forgotten else 0
            if max(run_end, forgot_at) < from_seq:
                return
            if forgot_at > run_end:
                _, (producer, seq), position = self._forgotten.pop()
                self._put(producer, self._ids[producer], seq, seq)
                if position is not None and position > self._completed:
                    self._insert(_Run(producer, seq, position, 1))
                continue
            run = self._open[-1]
            gone = run_end - max(from_seq, run.position) + 1
            self._ids[run.producer].remove(run.first + run.count - gone, run.first + run.count - 1)
            self._take_out(len(self._open) - 1, run.count - gone, gone)

    def snapshot(self) -> Snapshot:
        """The IDs in the log, for a CHECKPOINT."""
        found = [(producer, *self._measure(ids)) for producer, ids in self._ids.items()]  # of producers without IDs, too: their size was guessed
        self._measured()
        return tuple(form for form in found if any(form[1:]))

    @classmethod
    def restored(cls, snapshot: Iterable[tuple[str, Iterable[int], bytes]]) -> Dedup:
        """From the form in a CHECKPOINT. No run is open: read the log from R on to restore the runs."""
        new = cls()
        for producer, ranges, others in snapshot:
            new._ids[producer] = ids = Numbers.restored(ranges, others)
            new._bytes += ids.bytes
        return new

    def _put(self, producer: str, ids: Numbers, first: int, last: int) -> None:
        if first != ids.top + 1 and ids and not ids.touches(first, last):
            self._guess(producer, ids)
        ids.add(first, last)

    def _guess(self, producer: str, ids: Numbers) -> None:
        """One more gap may be left: the total size is measured only now and then."""
        ids.bytes += GAP_BYTES
        self._bytes += GAP_BYTES
        self._guesses += 1
        self._guessed.add(producer)

    def _measure(self, ids: Numbers) -> tuple[tuple[int, ...], bytes]:
        before = ids.bytes
        form = ids.measure()
        self._bytes += ids.bytes - before
        return form

    def _measured(self) -> None:
        self._guessed.clear()
        self._guesses = 0

    def _run_of(self, producer: str, seq: int) -> _Run | None:
        runs = self._open_of.get(producer)
        if runs is None:
            return None
        i = bisect_right(runs, seq, key=_by_first) - 1
        return runs[i] if i >= 0 and seq < runs[i].first + runs[i].count else None

    def _insert(self, run: _Run) -> None:
        self._open.insert(bisect_right(self._open, run.position, key=_by_position), run)
        runs = self._open_of.setdefault(run.producer, [])
        runs.insert(bisect_left(runs, run.first, key=_by_first), run)

    def _unlink(self, run: _Run) -> None:
        """Takes a run out of the index by ID; the caller takes it out of `_open`."""
        runs = self._open_of[run.producer]
        del runs[bisect_left(runs, run.first, key=_by_first)]
        if not runs:
            del self._open_of[run.producer]

    def _close(self, first: int, last: int) -> None:
        """Removes the runs of the entries first .. last."""
        begin, end = bisect_left(self._open, first, key=_by_position), bisect_right(self._open, last, key=_by_position)
        if begin:
            run = self._open[begin - 1]
            beyond = run.position + run.count - first
            if beyond > 0:
                self._take_out(begin - 1, run.count - beyond, min(beyond, last + 1 - first))
        if begin < end:
            run = self._open[end - 1]
            if run.position + run.count > last + 1:
                self._take_out(end - 1, 0, last + 1 - run.position)
                end -= 1
            self._drop(begin, end)

    def _take_out(self, at: int, skip: int, count: int) -> None:
        """Removes `count` IDs of `_open[at]`, behind the first `skip`."""
        run = self._open[at]
        rest = run.count - skip - count
        if skip:
            run.count = skip
            if rest:
                self._insert(_Run(run.producer, run.first + skip + count, run.position + skip + count, rest))
        elif rest:
            run.first, run.position, run.count = run.first + count, run.position + count, rest
        else:
            self._drop(at, at + 1)

    def _drop(self, begin: int, end: int) -> None:
        """Removes the runs `_open[begin:end]`."""
        gone = self._open[begin:end]
        del self._open[begin:end]
        if len(gone) <= FEW_RUNS:
            for run in gone:
                self._unlink(run)
            return
        for run in gone:
            run.count = 0
        for producer in {run.producer for run in gone}:
            left = [run for run in self._open_of.pop(producer) if run.count]
            if left:
                self._open_of[producer] = left
