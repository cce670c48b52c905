"""What the status entries of a log come to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from test_completion import Alone

from broker_plugin.log.replica import CHECKPOINT_BYTES_MAX
from broker_plugin.methods.routing_queues import REQUEST_ID_BYTES_MAX
from lrq_ha.errors import MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher.messages import client_status, full_sync_status
from lrq_ha.routing import statuses as module
from lrq_ha.routing.statuses import Statuses, Told

REQUESTED, COMPLETED, CANCELLED = pb.FullSyncRequest.REQUESTED, pb.FullSyncRequest.COMPLETED, pb.FullSyncRequest.CANCELLED


def full_sync(request_id: str, state: pb.FullSyncRequest.State, destination: str = "west") -> pb.Status:
    return pb.Status.FromString(full_sync_status("orders", destination, request_id, "test", state))


def noted(*statuses: pb.Status) -> Statuses:
    found = Statuses()
    for sequence, status in enumerate(statuses, 1):
        found.noted(sequence, status)
    return found


def says(found: list[Told]) -> list[tuple[int, str, pb.FullSyncRequest.State]]:
    return [(told.sequence, told.status.full_sync.request_id, told.status.full_sync.state) for told in found]


def in_every_way(*statuses: pb.Status) -> list[Statuses]:
    """Safe at once, step by step, from a checkpoint that was written before anything was safe, and from one of that."""
    at_once, in_steps, restarted, again = noted(*statuses), noted(*statuses), Statuses(), Statuses()
    restarted.load(at_once.rows())
    again.load(restarted.rows())
    at_once.safe(len(statuses))
    for upto in range(len(statuses) + 1):
        in_steps.safe(upto)
    return [at_once, in_steps, restarted, again]


def test_a_value_counts_once_it_is_safe() -> None:
    statuses = noted(full_sync("r1", REQUESTED), full_sync("r1", COMPLETED), full_sync("r2", REQUESTED))
    statuses.safe(1)
    assert says(statuses.since(0)) == [(1, "r1", REQUESTED)]
    statuses.safe(2)
    assert says(statuses.since(1)) == [(2, "r1", COMPLETED)]
    statuses.safe(3)
    assert says(statuses.since(0)) == says(statuses.rows()) == says(statuses.of("orders", "west")) == [(3, "r2", REQUESTED)]


@pytest.mark.parametrize("end", [COMPLETED, CANCELLED])
def test_a_request_is_known_with_its_end(end: pb.FullSyncRequest.State) -> None:
    """What came with it is not at every destination yet."""
    for statuses in in_every_way(full_sync("r1", REQUESTED), full_sync("r1", COMPLETED), full_sync("r2", REQUESTED), full_sync("r2", end)):
        assert says(statuses.since(0)) == [(3, "r2", REQUESTED), (4, "r2", end)]


def test_what_comes_too_late_is_known_before_anything_is_safe() -> None:
    statuses = noted(full_sync("r1", REQUESTED), full_sync("r2", REQUESTED), full_sync("r1", REQUESTED, "south"))
    for upto in range(4):
        statuses.safe(upto)
        for end in (COMPLETED, CANCELLED):
            assert statuses.overtaken(full_sync("r1", end)) == 2
            assert statuses.overtaken(full_sync("r2", end)) == statuses.overtaken(full_sync("r1", end, "south")) == 0
            assert statuses.overtaken(full_sync("r1", end, "north")) == 0, "nothing is known of it"
        assert statuses.overtaken(full_sync("r3", REQUESTED)) == 0
        assert statuses.overtaken(pb.Status.FromString(client_status("orders", True))) == 0


@pytest.mark.parametrize("end", [COMPLETED, CANCELLED])
def test_an_end_that_crossed_a_newer_request_does_not_hide_it(end: pb.FullSyncRequest.State) -> None:
    crossed = (full_sync("r1", REQUESTED), full_sync("r2", REQUESTED), full_sync("r1", end))
    for statuses in in_every_way(*crossed):
        assert says(statuses.since(0)) == [(2, "r2", REQUESTED)]
        statuses.noted(4, full_sync("r2", COMPLETED))
        statuses.safe(4)
        assert says(statuses.since(2)) == [(4, "r2", COMPLETED)], "its own end ends it"
        assert statuses.overtaken(full_sync("r1", end)) == 4


def test_an_end_that_crossed_a_cancellation_does_not_hide_it() -> None:
    """A new primary took a snapshot without its rows in between for a whole one."""
    for statuses in in_every_way(full_sync("r1", REQUESTED), full_sync("r1", CANCELLED), full_sync("r1", COMPLETED)):
        assert says(statuses.since(0)) == [(1, "r1", REQUESTED), (2, "r1", CANCELLED)]
        assert statuses.overtaken(full_sync("r1", COMPLETED)) == 2
    for statuses in in_every_way(full_sync("r1", REQUESTED), full_sync("r1", COMPLETED), full_sync("r1", CANCELLED)):
        assert says(statuses.since(0)) == [(1, "r1", REQUESTED), (3, "r1", CANCELLED)], "a completed one may be cancelled: its rows are gone, say"


def test_an_announcement_cancels_what_is_open_where_it_stands() -> None:
    """Of the client's; the process that it was asked of is gone, or will be. Whatever that one, or a later announcement, says behind it."""
    announcement = pb.Status.FromString(client_status("orders", True))
    before = (full_sync("r1", REQUESTED), full_sync("r2", REQUESTED, "south"), full_sync("r2", COMPLETED, "south"))
    other = pb.Status.FromString(full_sync_status("orders-2", "west", "r3", "test", REQUESTED))
    without = pb.Status.FromString(client_status("orders", False))
    for statuses in in_every_way(*before, other, without, announcement, full_sync("r1", COMPLETED), announcement):
        assert says(statuses.of("orders", "west")) == [(1, "r1", REQUESTED), (6, "r1", CANCELLED), (8, "", REQUESTED)]
        assert says(statuses.of("orders", "south"))[:2] == [(2, "r2", REQUESTED), (3, "r2", COMPLETED)]
        assert says(statuses.of("orders-2", "west")) == [(4, "r3", REQUESTED)]
        assert statuses.overtaken(full_sync("r1", COMPLETED)) == 6
    for statuses in in_every_way(full_sync("r1", REQUESTED), full_sync("r1", COMPLETED), announcement, full_sync("r1", COMPLETED)):
        assert says(statuses.of("orders", "west")) == [(1, "r1", REQUESTED), (3, "", REQUESTED), (4, "r1", COMPLETED)], "that had ended"
    statuses = noted(*before, announcement)
    assert statuses.overtaken(full_sync("r1", COMPLETED)) == 4
    statuses.safe(4)
    assert [told.status.HasField("client") for told in statuses.since(3)] == [False, True], "first that it is cancelled"


def test_other_keys_are_not_concerned() -> None:
    statuses = noted(
        full_sync("r2", REQUESTED),
        full_sync("r1", COMPLETED, "south"),
        pb.Status.FromString(client_status("bills", True)),
        pb.Status.FromString(client_status("bills", False)),
    )
    statuses.safe(4)
    assert [told.sequence for told in statuses.since(0)] == [1, 2, 4]


def test_what_names_no_request_says_nothing() -> None:
    """A log that was written before the door refused it may hold it, and its checkpoints."""
    nothing = (full_sync("", CANCELLED), full_sync("", REQUESTED), full_sync("r1", 7))  # type: ignore[arg-type]
    for statuses in in_every_way(full_sync("r1", REQUESTED), *nothing):
        assert says(statuses.since(0)) == says(statuses.rows()) == [(1, "r1", REQUESTED)]
    statuses = Statuses()
    statuses.load([Told(3, each) for each in nothing])
    assert statuses.rows() == []


def test_what_fell_out_of_the_log_says_nothing() -> None:
    statuses = noted(full_sync("r1", REQUESTED), full_sync("r2", REQUESTED), full_sync("r1", COMPLETED))
    statuses.cut(2)
    statuses.noted(2, full_sync("r1", COMPLETED))
    statuses.safe(2)
    assert says(statuses.since(0)) == [(1, "r1", REQUESTED), (2, "r1", COMPLETED)]


def test_another_client_has_room_only_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLIENTS_MAX", 3)
    named = [pb.Status.FromString(client_status(name, True)) for name in ("a", "b", "b", "c", "d")]
    for statuses in in_every_way(*named[:3]):
        assert statuses.has_room("a")
        assert statuses.has_room("c")
    for statuses in in_every_way(*named[:4]):
        assert [statuses.has_room(name) for name in "abcd"] == [True, True, True, False], "who is known goes on"
    for statuses in in_every_way(*named):  # the log of an older version
        statuses.safe(9)
        assert [told.status.client.client_name for told in statuses.since(0)] == ["b", "c", "d"]
        assert [statuses.has_room(name) for name in "abcd"] == [False, True, True, True]
    statuses = noted(*named[:4])
    statuses.cut(4)
    assert statuses.has_room("d")
    assert statuses.clients == 0
    statuses.safe(3)
    assert statuses.clients == 2


def test_full_syncs_push_no_client_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FULL_SYNCS_MAX", 3)
    client = pb.Status.FromString(client_status("orders", True))
    statuses = noted(client, *(full_sync(f"r{number}", REQUESTED, f"site{number}") for number in range(10)))
    statuses.safe(11)
    assert statuses.of("orders", "nowhere") == [(1, client)]
    assert [told.sequence for told in statuses.since(0)] == [1, 9, 10, 11], "those told longest ago go first"
    assert [told.sequence for told in statuses.since(9)] == [10, 11]


def steps(of: Callable[[], object]) -> int:
    """How many a call takes in the module, which does not depend on the machine."""
    found = 0

    def trace(frame: Any, event: str, _what: object) -> Any:
        nonlocal found
        frame.f_trace_opcodes = frame.f_code.co_filename == module.__file__
        found += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        of()
    finally:
        sys.settrace(before)
    return found


@pytest.mark.parametrize("upto", [0, 1 << 40], ids=["not safe", "safe"])
def test_a_status_costs_the_same_however_many_are_known(upto: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some thousand at once stopped the node: each went through all that were not safe yet, and nothing became safe meanwhile."""
    monkeypatch.setattr(module, "CLIENTS_MAX", 2)
    announcements = [pb.Status.FromString(client_status(name, True)) for name in ("orders", "bills")]

    def of_one_more(known: int) -> dict[str, int]:
        statuses = noted(*announcements, *(full_sync("r1", REQUESTED, f"site{number}") for number in range(known)))
        statuses.safe(upto)
        following = iter(range(known + 3, 1 << 40))
        found = {
            "a request": steps(lambda: statuses.overtaken(full_sync("r2", REQUESTED))),
            "its end": steps(lambda: statuses.overtaken(full_sync("r1", COMPLETED, "site0"))),
            "room": steps(lambda: (statuses.has_room("bills"), statuses.has_room("mails"))),
            "noted": steps(lambda: statuses.noted(next(following), full_sync("r2", REQUESTED))),
            "announced": steps(lambda: statuses.noted(next(following), announcements[1])),
        }
        statuses.safe(upto)
        statuses.noted(next(following), announcements[0])  # what is open of this one ends here
        statuses.safe(upto)
        return found | {"announced again": steps(lambda: statuses.noted(next(following), announcements[0]))}

    few, many = of_one_more(10), of_one_more(200)
    assert {what: count for what, count in many.items() if count > few[what] + 100} == {}
    safe = noted(*announcements, *(full_sync("r1", COMPLETED, f"site{number}") for number in range(200)), announcements[1])
    safe.safe(202)
    assert steps(lambda: safe.safe(203)) < 500, "so does one that becomes safe"


def test_what_a_checkpoint_holds_of_statuses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason, or what no version knows, of 64 KiB: a thousand were more than a checkpoint takes, and no further one was written."""
    kept, limit = 400, module.FULL_SYNCS_MAX
    monkeypatch.setattr(module, "FULL_SYNCS_MAX", kept)
    fill = module.STATUS_BYTES_MAX - 1_000
    unknown = b"\xfa\x07" + bytes([fill & 0x7F | 0x80, fill >> 7 & 0x7F | 0x80, fill >> 14]) + b"x" * fill  # field 127
    assert pb.Status.FromString(unknown).SerializeToString() == unknown, "the library keeps it"
    client, request_id = "c" * 64, "r" * REQUEST_ID_BYTES_MAX
    alone, restarted = Alone(), Alone()
    index = alone.replica.index
    for number in range(2 * kept):
        for entry, said in enumerate(((REQUESTED, "x" * fill, b""), (COMPLETED, "", unknown)), 2 * number + 1):
            body = full_sync_status(client, f"{number:064}", request_id, said[1], said[0]) + said[2]
            index.note(pb.Run(status=pb.StatusEntry(body=body)), entry, sweep=False)
    for each in (index, restarted.replica.index):
        checkpoint = each.checkpoint(alone.node.log.state(), renewal=False)
        assert len(checkpoint.statuses) == 2 * kept
        assert checkpoint.ByteSize() * limit // kept < CHECKPOINT_BYTES_MAX // 4, "there is room for everything else"
        for row in checkpoint.statuses:  # as of a version that kept all
            row.body += unknown
        restarted.replica.index.restore(1, checkpoint)
    last = f"{2 * kept - 1:064}"
    index.safe(1 << 40)
    assert says(index.statuses.of(client, last)) == [(4 * kept - 1, request_id, REQUESTED), (4 * kept, request_id, COMPLETED)]


@pytest.mark.parametrize(
    "status",
    [
        pb.Status(key="client/orders"),
        pb.Status(key="client/bills", client=pb.ClientStatus(client_name="orders")),
        pb.Status(client=pb.ClientStatus(client_name="orders")),
        pb.Status(key="client/a/b", client=pb.ClientStatus(client_name="a/b")),
        pb.Status(key="client/orders", full_sync=pb.FullSyncRequest(client_name="orders", destination="west")),
        pb.Status(key="fullsync/orders/", full_sync=pb.FullSyncRequest(client_name="orders")),
        full_sync("", REQUESTED),
        full_sync("", CANCELLED),
        full_sync("r1", 7),  # type: ignore[arg-type]
    ],
)
def test_a_status_that_is_not_its_keys_is_refused(status: pb.Status) -> None:
    with pytest.raises(MalformedInput):
        module.check(status)


def test_sound_statuses_pass() -> None:
    module.check(pb.Status.FromString(client_status("orders", True)))
    module.check(full_sync("r1", COMPLETED))
