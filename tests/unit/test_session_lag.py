"""What a session tells of its lag and of its full syncs."""

from __future__ import annotations

from test_routing_session import CANCELLED, END, LOG, ROWS, SNAP, Bench, at, in_log_sync, in_snapshot, transaction

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.routing import messages as m
from lrq_ha.routing.chain import START
from lrq_ha.routing.tables import Reason, State


def elsewhere() -> pb.Transaction:
    return transaction(entries=[pb.RoutingTableEntryMsg(destinations=["north"], payload=0)])


def test_nothing_is_known_before_the_sink_has_spoken() -> None:
    bench = Bench()
    assert bench.session.reached == START
    bench.tell(m.Connected())
    assert bench.session.reached == START
    bench.report(10, "r", True)
    assert bench.session.reached == at(10)


def test_what_is_in_flight_counts_when_it_is_acked() -> None:
    bench = in_log_sync()
    bench.read(LOG, (11, transaction()), (13, transaction()))
    assert bench.session.reached == at(10)
    bench.tell(m.Acked(at(11)))
    assert bench.session.reached == at(11)
    bench.tell(m.Acked(at(13)))
    assert bench.session.reached == at(13)


def test_entries_for_other_sites_are_passed() -> None:
    bench = in_log_sync()
    bench.read(LOG, (11, transaction()), (12, elsewhere()))
    bench.tell(m.Acked(at(11)))
    assert bench.session.reached == at(12)
    bench.end(LOG, 500)
    assert bench.session.reached == at(500)


def test_a_request_that_is_not_sent_yet_is_not_passed() -> None:
    bench = in_log_sync(in_flight_bytes_max=1)
    bench.read(LOG, (11, transaction()), (12, transaction()))
    bench.request(20, "r")
    bench.end(LOG, 30)
    assert bench.session.reached == at(10)
    bench.tell(m.Acked(at(11)))
    bench.tell(m.Acked(at(12)))
    assert bench.session.reached == at(12), "the start marker is on its way"
    bench.tell(m.Acked(at(20)))
    assert bench.session.reached == at(20), "rows may come from there on"
    bench.end(SNAP, 25)
    assert bench.session.reached == at(25)


def test_a_site_that_is_away_keeps_what_it_has() -> None:
    bench = in_log_sync()
    bench.end(LOG, 20)
    bench.tell(m.Disconnected())
    assert bench.session.reached == at(20)
    bench.tell(m.Connected())
    bench.tell(m.Disconnected())
    assert bench.session.reached == at(20)
    bench.meet(10, "r", True)
    assert bench.session.reached == at(20)
    bench.read(LOG, (21, transaction()))
    bench.tell(m.Disconnected())
    assert bench.session.reached == at(10), "it may not have got the last batch"


def test_a_site_that_is_away_in_a_snapshot_keeps_what_it_has() -> None:
    bench = in_snapshot()
    bench.tell(m.Acked(at(5)))
    bench.end(LOG, 9)
    bench.end(SNAP, 8)
    bench.tell(m.Disconnected())
    assert bench.session.reached == at(8)


def test_a_site_that_has_lost_its_data_has_nothing() -> None:
    bench = in_log_sync()
    bench.end(LOG, 20)
    bench.tell(m.Disconnected())
    bench.meet()
    assert bench.session.reached == START
    bench.tell(m.Disconnected())
    assert bench.session.reached == START


def test_a_chain_that_is_to_restart_needs_no_view() -> None:
    bench = in_log_sync()
    assert bench.session.views == [LOG]
    bench.trim(LOG, 50)
    assert bench.session.reason is Reason.TRIMMED
    assert (bench.session.reached, bench.session.views) == (at(10), [])
    bench.request(60, bench.appended[0][0])
    assert bench.session.views == [LOG, SNAP]


def test_a_full_sync_tells_how_far_it_is() -> None:
    bench = Bench()
    bench.tick(7)
    bench.meet()
    ((request, _),) = bench.appended
    asked = bench.session.snapshot
    assert (asked.request, asked.since, asked.attempts, asked.rows) == (request, 7.0, 1, 0)
    bench.tick(3)
    bench.request(7, request)
    bench.read(SNAP, (8, transaction(ROWS, request, payloads=[b"a"])), (9, transaction(ROWS, "another")))
    bench.end(LOG, 9)
    found = bench.session.snapshot
    assert (found.request, found.since, found.rows) == (request, 7.0, 1)
    assert 0 < found.sent_bytes < 100
    bench.read(SNAP, (10, transaction(END, request)))
    bench.end(LOG, 10)
    assert bench.session.state is State.WAIT_SNAPSHOT_APPLY
    assert bench.session.snapshot.rows == 2, "the end marker has a row, too"
    bench.tell(m.Acked(at(10)))
    assert bench.session.snapshot.request == ""


def test_attempts_are_counted() -> None:
    bench = Bench().meet()
    for attempt, sequence in ((1, 5), (2, 10), (3, 15)):
        ((request, _),) = bench.appended
        assert (bench.session.snapshot.request, bench.session.snapshot.attempts) == (request, attempt)
        bench.request(sequence, request)
        bench.end(LOG, sequence)
        bench.tell(m.Acked(at(sequence)))
        bench.request(sequence + 1, request, CANCELLED)
        bench.end(LOG, sequence + 1)
        bench.end(SNAP, sequence + 1)
        assert bench.session.reason is Reason.SNAPSHOT_CANCELLED
        assert bench.session.snapshot.request == request, "until another is asked for"
        bench.tick(1000)


def test_a_full_sync_that_goes_on_is_told_from_here_on() -> None:
    bench = Bench()
    bench.request(5, "r")
    bench.tick(4)
    bench.meet(8, "r")
    found = bench.session.snapshot
    assert (found.request, found.since, found.attempts, found.rows) == ("r", 4.0, 1, 0)
    bench.tell(m.Disconnected())
    assert bench.session.snapshot.request == ""


def test_a_demand_does_not_hide_the_full_sync_under_way() -> None:
    bench = in_snapshot()
    bench.end(LOG, 9)
    bench.end(SNAP, 9)
    bench.tell(m.Demand(Reason.OPERATOR_DEMANDS))
    ((request, _),) = bench.appended
    assert bench.session.snapshot.request == "r"
    bench.request(12, request)
    bench.end(LOG, 12)
    bench.end(SNAP, 12)
    assert bench.session.snapshot.request == request
