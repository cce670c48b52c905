"""How queues move on, against the model that applies transactions one by one. Without Spark: only what Spark does is done in Python here."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest
from pipeline_model import DELTA, END, PART, Model, Rows, Transaction, cut, random_history

from lrq_ha.replication.positions import Position
from lrq_ha.spark.pipeline.errors import NoVersion, QueueBehind, SnapshotGone
from lrq_ha.spark.pipeline.manifest import DataFile, Manifest, Place, QueueState
from lrq_ha.spark.pipeline.progress import Run, Step, Summary, Swap, Truncation, advance_queue, repeat_snapshot
from lrq_ha.spark.pipeline.rebuild import rebuild_steps

pytestmark = pytest.mark.quick

Write = tuple[Place, int, str, str, str, int]
"""Place, number, table, op, key, value."""


def summary(batch: list[Transaction]) -> Summary:
    parts: dict[str, list[Transaction]] = defaultdict(list)
    for one in batch:
        if one.type != DELTA:
            parts[one.request or ""].append(one)
    runs = []
    for request, found in parts.items():
        markers = [one.position for one in found if one.type == PART and not one.payloads]
        ends = [one.position for one in found if one.type == END]
        marker, end = (Position(*min(places)) if places else None for places in (markers, ends))
        runs.append(Run(request, Position(*found[0].position), found[0].restart, marker, end))
    truncations = [
        Truncation(one.request or "", table, place(one, index))
        for one in batch
        for index, (table, op, _) in enumerate(one.payloads)
        if op == "truncate"
    ]
    return Summary(Position(*batch[-1].position), tuple(runs), tuple(truncations))


def place(one: Transaction, index: int) -> Place:
    return Place(int(one.type == DELTA), one.epoch, one.sequence, index)


class Applied:
    """What apply.py does, on lists."""

    def __init__(self, need_snapshot: bool) -> None:
        self.need_snapshot = need_snapshot
        self.state: QueueState | None = None
        self.tables: Rows = {}
        self._staged: list[Transaction] = []

    def apply(self, batch: list[Transaction]) -> None:
        fresh = [one for one in batch if self.state is None or one.position > self.state.position]
        if not fresh:
            return
        before = self.state
        step = advance_queue(before, summary(fresh), need_snapshot=self.need_snapshot)
        taken = [one for one in fresh if self._is_taken(step, one)]
        if step.swap:
            self.tables = {}
            if step.swap.staged:
                taken += self._staged
        for table in step.cuts:
            self.tables.pop(table, None)
        self._write(step, taken)
        self._stage(before, step, fresh)
        self.state = step.state

    def repeat(self, held: list[Transaction]) -> Rows | None:
        """The tables once more, from all that the queue holds; None if it lacks their snapshot."""
        assert self.state is not None
        assert self.state.base is not None
        since = [one for one in held if self.state.base <= one.position <= self.state.position]
        step = since and repeat_snapshot(self.state, summary(since))
        if not step:
            return None
        again = Applied(self.need_snapshot)
        again._write(step, [one for one in since if self._is_taken(step, one)])
        assert step.state == self.state
        return again.tables

    def _is_taken(self, step: Step, one: Transaction) -> bool:
        if one.type != DELTA:
            return step.swap is not None and one.request == step.swap.request and one.position <= step.swap.end
        return step.applies and one.position > step.after and (step.before is None or one.position < step.before)

    def _write(self, step: Step, taken: list[Transaction]) -> None:
        writes: list[Write] = [
            (place(one, index), number, table, op, key, value)
            for one in taken
            for index, (table, op, rows) in enumerate(one.payloads)
            for number, (key, value) in enumerate(rows)
        ]
        for where, _, table, op, key, value in sorted(writes):
            if table in step.cuts and where <= step.cuts[table]:
                continue
            if op == "put":
                self.tables.setdefault(table, {})[key] = value
            else:
                self.tables.get(table, {}).pop(key, None)
        self.tables = {table: rows for table, rows in self.tables.items() if rows}

    def _stage(self, before: QueueState | None, step: Step, fresh: list[Transaction]) -> None:
        still = step.state.open
        if still is None:
            self._staged = []
            return
        if not (before and before.open and before.open.request == still.request):
            assert not still.files
            self._staged = []
        self._staged += [one for one in fresh if one.request == still.request or (one.type == DELTA and one.position > still.begin)]
        file = DataFile("staged", "q", 0, len(self._staged), 0)
        object.__setattr__(still, "files", (file,) if self._staged else ())


@pytest.mark.parametrize("need_snapshot", [True, False])
def test_batches_cut_anywhere_give_what_single_transactions_give(need_snapshot: bool) -> None:
    swaps = 0
    for seed in range(1500):
        random = Random(seed)
        history = random_history(random, 30)
        model, applied = Model(need_snapshot=need_snapshot), Applied(need_snapshot)
        for batch in cut(random, history, random.randint(1, 12)):
            applied.apply(batch)
            for one in batch:
                if one.position > model.position:
                    model.apply(one)
            assert applied.tables == model.tables, f"seed {seed}"
        swaps += applied.state is not None and applied.state.base is not None
    assert swaps > 500


def test_tables_are_had_once_more_from_their_snapshot() -> None:
    """Whatever came behind it: newer snapshots that have not ended, holes, late rows of older ones."""
    repeats = holes = 0
    for seed in range(1500):
        random = Random(seed)
        history, applied = random_history(random, 30), Applied(True)
        for batch in cut(random, history, random.randint(1, 12)):
            applied.apply(batch)
            if applied.state is None or (base := applied.state.base) is None:
                continue
            assert applied.repeat(history) == applied.tables, f"seed {seed}"
            holes += applied.state.hole is not None
            assert applied.repeat([one for one in history if one.position > base]) is None, "it lacks the beginning"
            repeats += 1
    assert repeats > 2000
    assert holes > 200


def test_what_a_table_cannot_be_rebuilt_from() -> None:
    queue = "LRQ_Recv_orders_east"
    at = [Position(257, number) for number in range(10)]
    whole = Summary(at[5], (Run("r", at[1], False, at[1], at[3]),))
    states = {queue: QueueState(at[5], at[1])}

    def steps(held: Summary | None = None, *, need_snapshot: bool = True) -> dict[str, Step]:
        return rebuild_steps("t", Manifest(1, "p", need_snapshot, states), {queue: held} if held else {})

    assert steps(whole)[queue].swap == Swap("r", at[3], ())
    resync = "lrq-ha resync orders --group GROUP --from east"
    for run in (Run("r", at[2], False, at[2], at[3]), Run("r", at[1], False, None, at[3]), Run("r", at[1], False, at[1])):
        with pytest.raises(SnapshotGone, match=rf"no longer holds the whole full snapshot of 257\.1, from which table t .*{resync}"):
            steps(Summary(at[5], (run,)))
    with pytest.raises(SnapshotGone, match=resync):
        steps()
    with pytest.raises(QueueBehind, match=r"ends at 257\.4 for now, and the tables are at 257\.5"):
        steps(Summary(at[4], whole.runs))
    states["LRQ_Recv_orders_west"] = QueueState(at[2])
    assert list(steps(whole)) == [queue], "a queue that waits for its first snapshot has no rows in the table"
    with pytest.raises(SnapshotGone, match="Queue LRQ_Recv_orders_west has had no full snapshot"):
        steps(whole, need_snapshot=False)
    del states[queue]
    with pytest.raises(NoVersion, match="nothing to be rebuilt from"):
        steps()


def test_late_requests_are_known_for_a_while() -> None:
    state = None
    for number in range(1, 300):
        state = advance_queue(state, Summary(Position(1, number), (Run(f"r{number}", Position(1, number)),)), need_snapshot=True).state
    assert state is not None
    assert len(state.requests) == 100
    assert state.open is not None
    assert state.open.request == state.requests[-1] == "r299"
