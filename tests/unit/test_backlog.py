"""How much of a receive queue a receiver lacks, and the queue that waits for it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_completion import Alone

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing.backlog import MARKS, Backlog
from lrq_ha.routing.chain import START
from lrq_ha.routing.receive_state import ReceiveState
from lrq_ha.sidecar.sites.snapshot_keeper import SnapshotKeeper

KEPT = 100 * MARKS
QUEUE = "LRQ_Recv_orders_east"


@given(st.lists(st.integers(1, 350), min_size=1, max_size=120), st.data())
def test_it_is_told_too_large_by_one_mark_and_a_batch_at_most(batches: list[int], data: st.DataObject) -> None:
    backlog, sizes, state = Backlog(KEPT), [0], ReceiveState()
    for number, size in enumerate(batches, 1):
        state = state._replace(last=Position(1, number), size=state.size + size)
        sizes.append(state.size)
        backlog.note(state)
    at = data.draw(st.integers(0, len(batches)))
    true, told = state.size - sizes[at], backlog.bytes_behind(Position(1, at) if at else START, state)
    assert true <= told <= state.size
    if state.size <= MARKS * KEPT // MARKS and at:
        assert told - true < KEPT // MARKS + max(batches)


def test_of_an_older_queue_the_beginnings_of_snapshots_are_known() -> None:
    state = ReceiveState(last=Position(1, 90), size=900, whole=Position(1, 30), whole_size=300, begun=Position(1, 60), begun_size=600)
    backlog = Backlog(KEPT)
    backlog.note(state)
    found = {sequence: backlog.bytes_behind(Position(1, sequence), state) for sequence in (29, 30, 59, 60, 89, 90)}
    assert found == {29: 900, 30: 600, 59: 600, 60: 300, 89: 300, 90: 0}


class Watched:
    """A keeper of one queue, with one receiver or more."""

    def __init__(self, *, hold: bool) -> None:
        self.replica = Alone().replica
        streams = SimpleNamespace(receive_bytes_max=lambda _: 1 << 20)
        self.keeper = SnapshotKeeper(self.replica, streams, keep_snapshot=False, hold=hold)  # type: ignore[arg-type]
        self.kept = self.keeper._kept(QUEUE)
        self.commits: dict[str, pb.Commit] = {}
        self.replica.index.commits.of_queue = lambda _: list(self.commits.values())  # type: ignore[method-assign, assignment]
        self.state = ReceiveState()
        self.replica.index.sink.newest = lambda _: self.state  # type: ignore[method-assign, assignment]

    @property
    def held(self) -> str:
        """What the door is told before a batch."""
        return self.replica.holds(QUEUE)

    def come(self, size: int) -> None:
        """A batch of `size` bytes has come."""
        self.state = self.state._replace(last=Position(1, self.state.last.sequence + 1), size=self.state.size + size)
        self.keeper._consider_receivers(QUEUE, self.state)

    def commit(self, receiver: str) -> None:
        """A receiver has everything."""
        position = pb.Position(epoch=1, sequence=self.state.last.sequence)
        self.commits[receiver] = pb.Commit(receiver=receiver, queue=QUEUE, position=position)
        self.keeper._consider_receivers(QUEUE, self.state)


@pytest.mark.parametrize("hold", [True, False])
def test_a_receiver_in_danger(hold: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lrq_ha.sites")
    watched = Watched(hold=hold)
    watched.come(1)
    watched.commit("app")
    watched.come(watched.kept // 2)
    assert (watched.keeper.trouble(), watched.held, caplog.messages) == ("", "", [])
    watched.come(watched.kept // 100)
    text = watched.keeper.trouble()
    assert text.startswith(f"receiver 'app' lacks {watched.kept // 2 + watched.kept // 100} bytes of {QUEUE}, which surely keeps {watched.kept}:")
    assert caplog.messages == [text]
    assert watched.held == (f"it takes nothing more: {text}" if hold else "")
    told = watched.keeper._tell_queue(QUEUE, watched.state)
    assert told["receivers"]["app"]["problem"] == text
    assert told["held"] == (watched.held or None)
    watched.commit("app")
    assert (watched.keeper.trouble(), watched.held) == ("", "")
    assert len(caplog.messages) == 1


def test_a_held_queue_waits_until_no_receiver_lacks_more_than_a_quarter() -> None:
    watched = Watched(hold=True)
    watched.come(1)
    watched.commit("fast")
    watched.commit("slow")
    for _ in range(60):
        watched.come(watched.kept // 100)
    assert watched.held
    assert "(and 1 more receivers)" in watched.keeper.trouble()
    assert "(and 1 more receivers)" in watched.held
    watched.commit("fast")
    assert watched.held
    assert "more receivers" not in watched.keeper.trouble()
    slow = watched.commits["slow"].position
    slow.sequence += 20  # it lacks 40 of 100
    watched.keeper._consider_receivers(QUEUE, watched.state)
    assert watched.held
    slow.sequence += 20
    watched.keeper._consider_receivers(QUEUE, watched.state)
    assert watched.held == ""
    watched.come(watched.kept // 5)
    assert watched.held == "", "it lacks 40 of 100, and half is allowed"


def test_a_queue_without_receivers_is_never_held() -> None:
    watched = Watched(hold=True)
    for _ in range(20):
        watched.come(watched.kept)
        assert (watched.keeper.trouble(), watched.held) == ("", "")


def test_each_batch_is_looked_at() -> None:
    """A backlog that comes at once is stopped before the queue drops what its receiver needs."""
    watched, came = Watched(hold=True), 0
    watched.come(1)
    watched.commit("app")
    while not watched.held:
        size = watched.kept // 10
        watched.state = watched.state._replace(last=Position(1, watched.state.last.sequence + 1), size=watched.state.size + size)
        came += size
    assert watched.kept // 2 < came < watched.kept


def test_a_receiver_that_waits_for_a_snapshot_holds_nothing() -> None:
    """The queue no longer has what it needs: the snapshot that heals it has to come in."""
    watched = Watched(hold=True)
    watched.come(1)
    watched.commit("app")
    watched.come(watched.kept)
    assert watched.held
    watched.come(watched.kept // 100)
    assert (watched.held, watched.keeper._tell_queue(QUEUE, watched.state)["held"]) == ("", None)
    assert "receiver 'app' lacks" in watched.keeper.trouble()
