"""The positions of receivers in a sink group's log."""

from __future__ import annotations

import pytest

from broker_plugin.methods.routing_queues import REQUEST_ID_BYTES_MAX
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.receiver import Phase, Progress
from lrq_ha.replication.positions import Position
from lrq_ha.routing import commits as module
from lrq_ha.routing.chain import START
from lrq_ha.routing.commits import Commits
from lrq_ha.routing.names import NAME_CHARS_MAX, PRODUCER_CHARS_MAX, recv_queue

QUEUE = "LRQ_Recv_orders_east"
RECEIVED = Position(257, 100)


def commit(sequence: int, token: str, expected: str, *, receiver: str = "db", queue: str = QUEUE, user: str = "app") -> pb.Commit:
    at = pb.Position(epoch=257 if sequence else 0, sequence=sequence)
    return pb.Commit(receiver=receiver, queue=queue, value=str(sequence), position=at, token=token, expected=expected, user=user)


def known(*found: pb.Commit) -> Commits:
    commits = Commits()
    for entry, each in enumerate(found, 1):
        commits.noted(entry, each)
    return commits


def test_a_process_that_was_replaced_is_refused() -> None:
    commits = known(commit(0, "old", ""), commit(5, "old", "old"))
    assert commits.refusal(commit(9, "old", "old"), RECEIVED) == ""
    commits.noted(3, commit(5, "new", "old"))
    assert "another process has taken over receiver 'db'" in commits.refusal(commit(9, "old", "old"), RECEIVED)
    assert commits.refusal(commit(9, "new", "new"), RECEIVED) == ""
    assert "another process" in commits.refusal(commit(0, "third", ""), RECEIVED), "it has not read who has the queue"


def test_a_position_beyond_the_queues_is_refused() -> None:
    commits = known(commit(0, "t", ""))
    assert commits.refusal(commit(100, "t", "t"), RECEIVED) == ""
    assert "has come to 257.100" in commits.refusal(commit(101, "t", "t"), RECEIVED)


def test_a_name_belongs_to_its_first_user() -> None:
    commits = known(commit(0, "t", ""))
    for queue in (QUEUE, "LRQ_Recv_orders_west"):
        assert "belongs to another user" in commits.refusal(commit(0, "t", "t" if queue == QUEUE else "", queue=queue, user="other"), RECEIVED)
    assert commits.refusal(commit(0, "t", "", queue="LRQ_Recv_orders_west"), RECEIVED) == ""
    assert commits.refusal(commit(0, "t", "", receiver="other", user="other"), RECEIVED) == ""


@pytest.mark.parametrize(("limit", "text"), [("COMMITS_MAX", "2 positions"), ("RECEIVERS_MAX", "2 names")])
def test_receivers_are_limited(limit: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, limit, 2)
    commits = known(commit(0, "t", "", receiver="a"), commit(0, "t", "", receiver="b"))
    assert f"there are {text} of receivers already" in commits.refusal(commit(0, "t", "", receiver="c"), RECEIVED)
    assert commits.refusal(commit(3, "t", "t", receiver="b"), RECEIVED) == ""


def test_a_queue_of_which_nothing_has_come_has_no_positions() -> None:
    """Any name took one of the ten thousand places, also at the position (0, 0)."""
    said = "no batch has come for 'LRQ_Recv_orders_east'"
    assert said in Commits().refusal(commit(0, "t", ""), START)
    assert Commits().refusal(commit(0, "t", ""), RECEIVED) == ""
    assert said in known(commit(0, "t", "")).refusal(commit(0, "u", "t"), START), "a row of an older version"


def test_a_position_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMITS_MAX", 1)
    commits = known(commit(0, "t", ""), commit(5, "t", "t"))
    commits.safe(2)
    free = pb.Commit(receiver="db", queue=QUEUE, expected="t", user="app")
    assert "1 positions" in commits.refusal(commit(0, "u", "", receiver="other"), RECEIVED)
    assert "belongs to another user" in commits.refusal(pb.Commit(receiver="db", queue=QUEUE, expected="t", user="other"), RECEIVED)
    assert commits.refusal(free, START) == "", "also where the queue is not known any more"
    commits.noted(3, free)
    assert (commits.rows(), commits.of("db", QUEUE).value) == ([], "5"), "not safe yet"
    assert "another process" in commits.refusal(commit(6, "t", "t"), RECEIVED), "the process that had it is told"
    commits.cut(3)
    assert [each.value for each in commits.rows()] == ["5"]
    commits.noted(3, free)
    commits.safe(3)
    assert (commits.of("db", QUEUE), commits.of_queue(QUEUE)) == (pb.Commit(), [])
    assert commits.refusal(commit(0, "u", "", receiver="other", user="other"), RECEIVED) == ""
    assert commits.refusal(commit(0, "u", "", user="other"), RECEIVED) == "", "the name is free, too"
    wrong = pb.Commit(receiver="db", queue=QUEUE, value="6", user="app")
    for each in (wrong, pb.Commit(receiver="db", queue=QUEUE, user="app")):
        assert "without a token frees a position" in commits.refusal(each, RECEIVED)


def test_the_values_of_receivers_fit() -> None:
    worst = Position((1 << 64) - 1, (1 << 64) - 1)
    value = Progress(Phase.LOCAL_REPLAY, worst, "\x01" * REQUEST_ID_BYTES_MAX, worst, worst, missed=False, log="f" * 32).to_text()
    made = pb.Commit(receiver="r" * PRODUCER_CHARS_MAX, queue=recv_queue("c" * NAME_CHARS_MAX, "s" * NAME_CHARS_MAX), value=value, token="t" * 32)
    made.MergeFrom(pb.Commit(expected="t" * 32, phase="local-replay", position=pb.Position(epoch=worst.epoch, sequence=worst.sequence)))
    assert made.ByteSize() <= module.COMMIT_BYTES_MAX


def test_a_commit_counts_when_it_is_safe_and_not_if_it_is_cut_off() -> None:
    commits = known(commit(1, "t", ""), commit(2, "t", "t"), commit(3, "u", "t"))
    assert commits.of("db", QUEUE) == pb.Commit()
    commits.safe(2)
    assert (commits.of("db", QUEUE).value, [each.value for each in commits.of_queue(QUEUE)], commits.of_queue("other")) == ("2", ["2"], [])
    assert [each.token for each in commits.rows()] == ["u"]
    commits.cut(3)
    assert commits.refusal(commit(3, "t", "t"), RECEIVED) == "", "the process that took over has not, after all"
    commits.noted(3, commit(4, "t", "t"))
    other = Commits()
    other.load(commits.rows())
    assert other.of("db", QUEUE).value == "4"
    assert other.rows() == commits.rows()
