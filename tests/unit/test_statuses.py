"""What the status entries of a log come to."""

from __future__ import annotations

import pytest

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher.messages import client_status, full_sync_status
from lrq_ha.replication.errors import MalformedInput
from lrq_ha.routing import statuses as module
from lrq_ha.routing.statuses import Statuses

REQUESTED, COMPLETED, CANCELLED = pb.FullSyncRequest.REQUESTED, pb.FullSyncRequest.COMPLETED, pb.FullSyncRequest.CANCELLED


def full_sync(request_id: str, state: pb.FullSyncRequest.State, destination: str = "west") -> pb.Status:
    return pb.Status.FromString(full_sync_status("orders", destination, request_id, "test", state))


def noted(*statuses: pb.Status) -> Statuses:
    found = Statuses()
    for sequence, status in enumerate(statuses, 1):
        found.noted(sequence, status)
    return found


def test_the_last_value_counts_once_it_is_safe() -> None:
    statuses = noted(full_sync("r1", REQUESTED), full_sync("r1", COMPLETED), full_sync("r2", REQUESTED))
    statuses.safe(2)
    assert [(told.sequence, told.status.full_sync.state) for told in statuses.since(0)] == [(2, COMPLETED)]
    statuses.safe(3)
    assert [told.sequence for told in statuses.since(0)] == [told.sequence for told in statuses.rows()] == [3]


def test_the_newest_value_is_known_before_it_is_safe() -> None:
    statuses = noted(full_sync("r1", REQUESTED), full_sync("r2", REQUESTED))
    key = full_sync("r1", REQUESTED).key
    for upto in (0, 1, 2):
        statuses.safe(upto)
        newest = statuses.last(key)
        assert newest is not None
        assert newest.full_sync.request_id == "r2"
    assert statuses.last("another") is None


def test_an_end_that_crossed_a_newer_request_does_not_hide_it() -> None:
    """In one step, in two, after a checkpoint: whoever is told hears of the request that is open."""
    for end in (COMPLETED, CANCELLED):
        crossed = (full_sync("r1", REQUESTED), full_sync("r2", REQUESTED), full_sync("r1", end))
        at_once, in_steps = noted(*crossed), noted(*crossed)
        assert [told.sequence for told in at_once.rows()] == [2], "nothing is safe yet"
        at_once.safe(3)
        in_steps.safe(2)
        in_steps.safe(3)
        restarted = Statuses()
        restarted.load(at_once.rows())
        for statuses in (at_once, in_steps, restarted):
            assert [(told.sequence, told.status.full_sync.request_id) for told in statuses.since(0)] == [(2, "r2")]
        restarted.noted(4, full_sync("r2", COMPLETED))
        restarted.safe(4)
        assert [told.sequence for told in restarted.since(0)] == [4], "its own end ends it"


def test_other_keys_are_not_concerned() -> None:
    statuses = noted(
        full_sync("r2", REQUESTED),
        full_sync("r1", COMPLETED, "south"),
        pb.Status.FromString(client_status("orders", True)),
        pb.Status.FromString(client_status("orders", False)),
    )
    statuses.safe(4)
    assert [told.sequence for told in statuses.since(0)] == [1, 2, 4]


def test_what_fell_out_of_the_log_says_nothing() -> None:
    statuses = noted(full_sync("r1", REQUESTED), full_sync("r2", REQUESTED), full_sync("r1", COMPLETED))
    statuses.cut(2)
    statuses.noted(2, full_sync("r1", COMPLETED))
    statuses.safe(2)
    assert [(told.sequence, told.status.full_sync.state) for told in statuses.since(0)] == [(2, COMPLETED)]


def test_full_syncs_push_no_client_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEYS_MAX", 3)
    client = pb.Status.FromString(client_status("orders", True))
    statuses = noted(client, *(full_sync(f"r{number}", REQUESTED, f"site{number}") for number in range(10)))
    statuses.safe(11)
    assert statuses.last(client.key) == client
    assert [told.sequence for told in statuses.since(0)] == [1, 9, 10, 11], "those told longest ago go first"
    assert [told.sequence for told in statuses.since(9)] == [10, 11]


@pytest.mark.parametrize(
    "status",
    [
        pb.Status(key="client/orders"),
        pb.Status(key="client/bills", client=pb.ClientStatus(client_name="orders")),
        pb.Status(client=pb.ClientStatus(client_name="orders")),
        pb.Status(key="client/a/b", client=pb.ClientStatus(client_name="a/b")),
        pb.Status(key="client/orders", full_sync=pb.FullSyncRequest(client_name="orders", destination="west")),
        pb.Status(key="fullsync/orders/", full_sync=pb.FullSyncRequest(client_name="orders")),
    ],
)
def test_a_status_that_is_not_its_keys_is_refused(status: pb.Status) -> None:
    with pytest.raises(MalformedInput):
        module.check(status)


def test_sound_statuses_pass() -> None:
    module.check(pb.Status.FromString(client_status("orders", True)))
    module.check(full_sync("r1", COMPLETED))
