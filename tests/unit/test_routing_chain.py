"""A destination's share of a transaction; merging two views of one log; what full sync requests mean where they stand."""

from __future__ import annotations

import pytest

from lrq_ha.errors import MalformedInput
from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.replication.positions import Position
from lrq_ha.routing import chain
from lrq_ha.routing.merge import Item, Merge
from lrq_ha.routing.messages import Stream
from lrq_ha.routing.requests import CANCELLED, COMPLETED, REQUESTED, Mark, Requests
from lrq_ha.routing.route import Route
from lrq_ha.routing.shares import Packing, Share, ViewEntry

LOG, SNAP = Stream.LOG_ENTRIES, Stream.SNAP_SYNC


def at(sequence: int) -> Position:
    return Position(257, sequence)


def transaction(**more: object) -> pb.Transaction:
    entries = [
        pb.RoutingTableEntryMsg(destinations=["west"], payload=1),
        pb.RoutingTableEntryMsg(destinations=["south"], payload=0),
        pb.RoutingTableEntryMsg(destinations=["south", "west"], payload=0),
    ]
    values: dict[str, object] = {"client_name": "orders", "type": pb.LOG_ENTRY_SYNC, "payloads": [b"a", b"b"], "entries": entries}
    return pb.Transaction(**(values | more))  # type: ignore[arg-type]


def received(of: pb.Transaction, position: Position, destination: str) -> pb.ReceivedTransaction | None:
    share = ViewEntry(position, of, of.ByteSize()).share(destination)
    return None if share is None else pb.ReceivedBatch.FromString(share.body).transactions[0]


def share(of: pb.Transaction, destination: str) -> list[bytes]:
    got = received(of, at(9), destination)
    return [] if got is None else list(got.payloads)


def test_a_destination_gets_its_payloads_in_the_order_of_the_entries() -> None:
    assert share(transaction(), "west") == [b"b", b"a"]
    assert share(transaction(), "south") == [b"a", b"a"]
    assert share(transaction(), "north") == []


def test_received_keeps_what_identifies_a_transaction() -> None:
    got = received(transaction(replication_id="p/1", timestamp_us=5, path=["first", "second"]), at(9), "west")
    assert got is not None
    assert (chain.position_of(got.position), got.replication_id, got.timestamp_us, list(got.payloads)) == (at(9), "p/1", 5, [b"b", b"a"])
    assert list(got.path) == ["first", "second"]
    assert received(transaction(), at(9), "north") is None


def test_destinations_that_are_left_out_change_nothing_for_the_others() -> None:
    for left_out in ("south", "west", "north"):
        found = transaction()
        chain.leave_out(found, [left_out])
        for other in {"south", "west"} - {left_out}:
            assert share(found, other) == share(transaction(), other)
        assert (share(found, left_out), set(chain.check(found))) == ([], {"south", "west"} - {left_out})
    found = transaction(payloads=[b"a", b"b", b"nobody's"])
    chain.leave_out(found, ["west"])
    assert list(found.payloads) == [b"a", b"", b""], "the log does not take what goes nowhere"


def test_an_end_marker_goes_to_whoever_asked_even_without_payloads() -> None:
    end = received(transaction(type=pb.LAST_FULL_SYNC_ENTRY, request_id="r", entries=[]), at(9), "north")
    assert end is not None
    assert chain.may_restart(end)


@pytest.mark.parametrize(
    "more",
    [
        {"payloads": [b"a"]},
        {"type": pb.NONE},
        {"request_id": "r"},
        {"type": pb.SNAPSHOT_SYNC},
        {"type": 77},
        {"type": 77, "request_id": "r"},
        {"timestamp_us": 253_402_300_800_000_000},
        {"timestamp_us": 2**64 - 1},
        {"client_name": "a_b"},
        {"entries": [pb.RoutingTableEntryMsg(destinations=["a_b"])]},
        {"path": ["a_b"]},
        {"path": [f"group-{number}" for number in range(chain.PATH_MAX + 1)]},
    ],
)
def test_a_transaction_that_cannot_be_sent_on_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(MalformedInput):
        chain.check(transaction(**more))


def named(times: int, size: int, *destinations: str) -> pb.Transaction:
    """A transaction whose one payload so many entries name."""
    entries = [pb.RoutingTableEntryMsg(destinations=destinations)] * times
    return pb.Transaction(client_name="orders", type=pb.LOG_ENTRY_SYNC, payloads=[bytes(size)], entries=entries)


def test_a_payload_counts_for_a_destination_as_often_as_entries_name_it() -> None:
    """It stands in the transaction once, so that this is small; what the sink would get was more than its broker takes."""
    chain.check(named(15, 1 << 20, "west", "south"))
    large = named(16, 1 << 20, "west")
    assert large.ByteSize() < 2 << 20
    with pytest.raises(MalformedInput, match="whose share for one destination has 16777312 bytes"):
        chain.check(large)


def test_what_passes_is_taken_by_a_sink_and_its_broker_in_one_message() -> None:
    """However it is made up, and however long the names are."""
    for size in (0, 1, 130, 70_000, chain.TRANSMISSION_BYTES_MAX - chain.PAYLOAD_FRAMING_BYTES):
        times = min(chain.TRANSMISSION_BYTES_MAX // (size + chain.PAYLOAD_FRAMING_BYTES), chain.ADDRESSEES_MAX)
        name = "n" * 64
        large = named(times, size, name)
        large.client_name, large.replication_id, large.timestamp_us = name, "p" * 128 + f"/{2**64 - 1}", chain.TIMESTAMP_US_MAX
        large.type, large.request_id = pb.SNAPSHOT_SYNC, "r" * 128
        chain.check(large)
        share = received(large, Position(2**64 - 1, 2**64 - 1), name)
        previous = pb.Position(epoch=2**64 - 1, sequence=2**64 - 1)
        batch = pb.ReceivedBatch(source=name, client_name=name, previous=previous, transactions=[share] if share else [])
        assert size * times < batch.ByteSize() <= chain.BATCH_BYTES_MAX


@pytest.mark.parametrize(
    "many",
    [
        named(chain.ADDRESSEES_MAX + 1, 0),
        named(chain.ADDRESSEES_MAX // 2 + 1, 0, "west", "south"),
        named(1, 0, *["west"] * (chain.ADDRESSEES_MAX + 1)),
        pb.Transaction(
            client_name="orders",
            type=pb.LOG_ENTRY_SYNC,
            payloads=[b""] * chain.ADDRESSEES_MAX,
            entries=[pb.RoutingTableEntryMsg(payload=0, more=chain.ADDRESSEES_MAX - 1)] * chain.ADDRESSEES_MAX,
        ),
        pb.Transaction(client_name="orders", type=pb.LOG_ENTRY_SYNC, payloads=[b""] * (chain.ADDRESSEES_MAX + 1)),
    ],
)
def test_a_transaction_has_no_more_addressees_than_are_soon_gone_through(many: pb.Transaction) -> None:
    with pytest.raises(MalformedInput, match="of 20000 at most"):
        chain.check(many)


def test_sound_transactions_pass() -> None:
    assert set(chain.check(transaction())) == {"west", "south"}
    chain.check(named(chain.ADDRESSEES_MAX // 2, 0, "west", "south"))
    chain.check(transaction(timestamp_us=253_402_300_799_999_999))
    chain.check(transaction(type=pb.LAST_FULL_SYNC_ENTRY, request_id="r", entries=[]))


def test_destinations_with_equal_payloads_have_one_share() -> None:
    entries = [pb.RoutingTableEntryMsg(destinations=["west", "south", "west"], payload=0), pb.RoutingTableEntryMsg(destinations=["north"], payload=0)]
    entry = ViewEntry(at(9), transaction(entries=entries), 1)
    west, south = entry.share("west"), entry.share("south")
    assert west is not None
    assert west is south is entry.share("north")
    assert (west.rows, entry.share("east")) == (1, None)


def runs() -> pb.Transaction:
    entries = [
        pb.RoutingTableEntryMsg(destinations=["west", "south"], payload=0, more=2),
        pb.RoutingTableEntryMsg(destinations=["south"], payload=2, more=1),
    ]
    return transaction(payloads=[b"a", b"b", b"c", b"d"], entries=entries)


def test_an_entry_may_stand_for_several_payloads() -> None:
    found = runs()
    assert set(chain.check(found)) == {"west", "south"}
    assert (share(found, "west"), share(found, "south")) == ([b"a", b"b", b"c"], [b"a", b"b", b"c", b"c", b"d"])
    chain.leave_out(found, ["south"])
    assert (share(found, "west"), share(found, "south"), found.payloads[3]) == ([b"a", b"b", b"c"], [], b"")
    for more in (3, 2**32 - 1):
        beyond = runs()
        beyond.entries[1].more = more
        with pytest.raises(MalformedInput, match="refers to payload"):
            chain.check(beyond)


def test_the_size_of_an_entry_counts_its_shares() -> None:
    """A payload that a thousand entries name was kept once in the view and a thousand times in memory."""
    for destinations, names in ((["west"], 1_000), (["west", "south"], 1_000), (["west"], 1)):
        many = transaction(payloads=[b"x" * 100], entries=[pb.RoutingTableEntryMsg(destinations=destinations, payload=0)] * names)
        entry = ViewEntry(at(9), many, many.ByteSize())
        shares = {id(share): len(share.body) for name in destinations if (share := entry.share(name))}
        taken = many.ByteSize() + sum(shares.values())
        assert len(shares) == 1
        assert taken * 0.9 < entry.size < taken * 1.1


def test_sessions_that_send_equal_batches_send_one() -> None:
    packing, west, south = Packing(), Route("east", "orders", "west", b"log"), Route("east", "orders", "south", b"log")
    shares = [share for sequence in (5, 6) if (share := ViewEntry(at(sequence), transaction(), 1).share("west"))]
    body = packing.pack(west, at(4), shares)
    assert packing.pack(south, at(4), list(shares)) is body
    batch = pb.ReceivedBatch.FromString(body)
    assert [(each.position.sequence, list(each.payloads)) for each in batch.transactions] == [(5, [b"b", b"a"]), (6, [b"b", b"a"])]
    assert (batch.source, batch.client_name, batch.previous.sequence, batch.log_id) == ("east", "orders", 4, b"log")
    for other in (packing.pack(west, at(3), shares), packing.pack(Route("east", "bills", "west", b"log"), at(4), shares)):
        assert other != body
    assert pb.ReceivedBatch.FromString(packing.pack(west, at(4), shares[:1])).transactions[:] == batch.transactions[:1]


def item(stream: Stream, sequence: int, size: int = 10) -> Item:
    return Item(at(sequence), stream, Share(at(sequence), pb.LOG_ENTRY_SYNC, "", 1, b"x" * size))


def test_a_merge_waits_until_nothing_earlier_can_come() -> None:
    merge = Merge()
    merge.open(LOG, at(0))
    merge.open(SNAP, at(0))
    merge.add(LOG, [item(LOG, 3)], at(3))
    assert not merge.ready(at(3))
    merge.add(SNAP, [item(SNAP, 2), item(SNAP, 5)], at(5))
    assert merge.head() == item(SNAP, 2)
    assert merge.ready(at(2))
    assert [merge.pop().position.sequence for _ in range(2)] == [2, 3]
    assert not merge.ready(at(5))
    merge.add(LOG, [], at(7))
    assert merge.ready(at(5))
    assert merge.waiting_bytes(SNAP) == 10
    merge.close(SNAP)
    merge.close(SNAP)
    assert merge.head() is None
    with pytest.raises(IndexError):
        merge.pop()


def test_a_merge_skips_what_it_was_given() -> None:
    merge = Merge()
    merge.open(LOG, at(4))
    merge.add(LOG, [item(LOG, 4), item(LOG, 5)], at(5))
    merge.add(LOG, [item(LOG, 5)], at(3))
    assert merge.pop() == item(LOG, 5)
    assert merge.head() is None
    assert merge.through(LOG) == at(5)


def test_requests_count_where_they_stand() -> None:
    requests = Requests(4)
    assert requests.add(Mark(at(5), "a", REQUESTED))
    assert not requests.add(Mark(at(5), "a", REQUESTED))
    assert requests.next_after(at(4)) == Mark(at(5), "a", REQUESTED)
    assert requests.is_ahead(at(4))
    assert not requests.is_ahead(at(5))
    assert requests.usable(at(4), 6, True) == Mark(at(5), "a", REQUESTED)
    assert requests.usable(at(4), 7, True) is None  # deltas behind it are gone
    assert requests.usable(at(5), 0, True) is None  # the sink is further
    assert requests.usable(at(4), 0, False) is None  # nobody would answer
    requests.add(Mark(at(6), "a", COMPLETED))
    assert requests.usable(at(4), 0, False) == Mark(at(5), "a", REQUESTED)
    assert requests.next_after(at(5)) is None
    requests.add(Mark(at(8), "a", CANCELLED))
    assert requests.usable(at(4), 0, True) is None
    assert not requests.is_ahead(at(4))
    assert [requests.goes_on("a", at(sequence)) for sequence in (4, 5, 7, 8)] == [False, True, True, False]
    assert not requests.goes_on("b", at(8)), "nothing is known of it"
    assert Requests(4).usable(at(0), 0, True) is None


def test_only_the_newest_marks_are_kept() -> None:
    requests = Requests(2)
    for sequence in range(1, 5):
        requests.add(Mark(at(sequence), str(sequence), REQUESTED))
    assert requests.next_after(at(0)) == Mark(at(3), "3", REQUESTED)
