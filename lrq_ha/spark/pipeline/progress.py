"""How a batch moves one queue on: which snapshot counts, which deltas apply, what waits. Pure.

The rules are those of lrq_ha/spark/tables.py, with the difference that the past is a `QueueState` and not the entries themselves:

    1. The newest completed snapshot replaces all tables of its queue; then come the deltas after its beginning.
    2. A snapshot that ended after a newer one had begun does not count.
    3. From a restart of the chain on, deltas wait for the end of a snapshot that began there or later.
    4. A snapshot without its beginning does not count.

The result does not depend on how entries are cut into batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from lrq_ha.replication.positions import Position
from lrq_ha.routing.chain import START
from lrq_ha.spark.pipeline.manifest import DataFile, OpenSnapshot, Place, QueueState

REQUESTS_MAX = 100


@dataclass(frozen=True)
class Run:
    """A batch's rows of one full sync.

    Attributes:
        request: ID of the full sync.
        begin: Position of the first row.
        restart: Whether the chain starts over with the first row.
        marker: Position of the start marker; None if it is not in the batch.
        end: Position of the first end marker; None if it is not in the batch.
    """

    request: str
    begin: Position
    restart: bool = False
    marker: Position | None = None
    end: Position | None = None


@dataclass(frozen=True)
class Truncation:
    """All rows of a table before `place` are removed. `request`: the full sync that it is part of; empty for a delta."""

    request: str
    table: str
    place: Place


@dataclass(frozen=True)
class Summary:
    """What a batch holds of one queue: its last position, its parts of full syncs, the truncations."""

    last: Position
    runs: tuple[Run, ...] = ()
    truncations: tuple[Truncation, ...] = ()


@dataclass(frozen=True)
class Swap:
    """A snapshot that ended in the batch and replaces the queue's tables.

    Attributes:
        request: ID of its full sync.
        end: Position of its end marker; later rows of it are left out.
        staged: Files of its rows, and of the deltas after its beginning, from batches before.
    """

    request: str
    end: Position
    staged: tuple[DataFile, ...]


@dataclass(frozen=True)
class Step:
    """What a batch does to a queue.

    Attributes:
        state: The state after it; its `open` snapshot lacks the files of this batch.
        applies: Whether deltas of the batch change the tables.
        after: These deltas come after this position,
        before: and before this one; None: up to the last.
        swap: The snapshot that replaces the queue's tables, if one does.
        cuts: Table -> place of the last truncation among what is applied.
    """

    state: QueueState
    applies: bool
    after: Position
    before: Position | None
    swap: Swap | None
    cuts: Mapping[str, Place] = field(default_factory=dict)


def advance_queue(state: QueueState | None, batch: Summary, *, need_snapshot: bool) -> Step:
    """Moves one queue on by a batch that holds only what comes after `state.position`.

    Args:
        state: The queue's state; None: nothing of it was applied.
        batch: The summary of the batch.
        need_snapshot: Whether deltas are left out until the first snapshot has ended.
    """
    state = state or QueueState(START)
    syncs = _syncs(state, batch.runs)
    counting = [sync for sync, follower in pairwise([*syncs, None]) if sync and sync.counts(follower)]
    newest = counting[-1] if counting else None
    last = syncs[-1] if syncs else None
    holes = [hole for hole in (state.hole, *(sync.snapshot.begin for sync in syncs if sync.restart)) if hole is not None]
    hole = min((hole for hole in holes if newest is None or hole > newest.snapshot.begin), default=None)
    base = newest.snapshot.begin if newest else state.base
    after = newest.snapshot.begin if newest else state.position
    known = {*state.requests}
    requests = (*state.requests, *(sync.snapshot.request for sync in syncs if sync.snapshot.request not in known))
    still_open = last.snapshot if last and last.end is None else None
    if still_open:
        still_open = replace(still_open, cuts=_cuts(still_open, None, batch, None))
    return Step(
        state=QueueState(batch.last, base, hole, still_open, requests[-REQUESTS_MAX:]),
        applies=base is not None or not need_snapshot,
        after=after,
        before=hole,
        swap=Swap(newest.snapshot.request, newest.end, newest.snapshot.files) if newest and newest.end else None,
        cuts=_cuts(newest.snapshot, newest.end, batch, hole) if newest else _delta_cuts({}, batch, after, hole),
    )


def repeat_snapshot(state: QueueState, held: Summary) -> Step | None:
    """What gives a queue's tables once more as they are at its position: its newest completed snapshot, and the deltas after that.

    Args:
        state: The queue's state, with a completed snapshot. The step does not change it.
        held: The summary of all from the beginning of that snapshot up to the position.

    Returns:
        None if the snapshot is not held as a whole.
    """
    run = next((run for run in held.runs if run.begin == state.base), None)
    if run is None or run.end is None or state.base is None:
        return None
    snapshot = _known(OpenSnapshot(run.request, run.begin, run.restart), run)
    if not snapshot.whole:
        return None
    return Step(
        state=state,
        applies=True,
        after=state.base,
        before=state.hole,
        swap=Swap(run.request, run.end, ()),
        cuts=_cuts(snapshot, run.end, held, state.hole),
    )


@dataclass(frozen=True)
class _Sync:
    """A full sync: what was known of it, and what the batch adds."""

    snapshot: OpenSnapshot
    restart: bool
    end: Position | None

    def counts(self, follower: _Sync | None) -> bool:
        return self.snapshot.whole and self.end is not None and (follower is None or self.end < follower.snapshot.begin)


def _syncs(state: QueueState, runs: Iterable[Run]) -> list[_Sync]:
    """The open full sync, if any, and those that begin in the batch, in order."""
    by_request = {run.request: run for run in runs}
    found = []
    if state.open:
        run = by_request.get(state.open.request)
        found.append(_Sync(_known(state.open, run), False, run.end if run else None))
    new = (run for run in by_request.values() if run.request not in state.requests)
    for run in sorted(new, key=lambda run: run.begin):
        found.append(_Sync(_known(OpenSnapshot(run.request, run.begin, run.restart), run), run.restart, run.end))
    return found


def _known(snapshot: OpenSnapshot, run: Run | None) -> OpenSnapshot:
    marked = run is not None and run.marker is not None and (run.end is None or run.marker <= run.end)
    return replace(snapshot, whole=snapshot.whole or marked)


def _cuts(snapshot: OpenSnapshot, end: Position | None, batch: Summary, hole: Position | None) -> dict[str, Place]:
    """The last truncations among a snapshot's rows and the deltas after its beginning; its own ones stand before all deltas."""
    found = dict(snapshot.cuts)
    for one in batch.truncations:
        if one.request == snapshot.request and (end is None or _at(one) <= end):
            found[one.table] = max(found.get(one.table, one.place), one.place)
    return _delta_cuts(found, batch, snapshot.begin, hole)


def _delta_cuts(found: dict[str, Place], batch: Summary, after: Position, hole: Position | None) -> dict[str, Place]:
    for one in batch.truncations:
        if not one.request and _at(one) > after and (hole is None or _at(one) < hole):
            found[one.table] = max(found.get(one.table, one.place), one.place)
    return found


def _at(truncation: Truncation) -> Position:
    return Position(truncation.place.epoch, truncation.place.sequence)
