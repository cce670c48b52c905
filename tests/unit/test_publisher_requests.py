"""Which full syncs are begun and cancelled, from what stands in LRQ_Status."""

from __future__ import annotations

from lrq_ha.proto import lrq_pb2 as pb
from lrq_ha.publisher.fullsync import KNOWN_MAX, Begin, Cancel, Effect, FullSyncRequest, RequestBook
from lrq_ha.publisher.messages import client_status, full_sync_status

REQUESTED, COMPLETED, CANCELLED = pb.FullSyncRequest.REQUESTED, pb.FullSyncRequest.COMPLETED, pb.FullSyncRequest.CANCELLED


def feed(book: RequestBook, destination: str, request_id: str, state: pb.FullSyncRequest.State, client: str = "orders") -> list[str]:
    return names(book.status(pb.Status.FromString(full_sync_status(client, destination, request_id, "why", state))))


def announce(book: RequestBook, client: str = "orders", provider: bool = True) -> list[str]:
    return names(book.status(pb.Status.FromString(client_status(client, provider))))


def names(effects: list[Effect]) -> list[str]:
    return [("begin " if isinstance(effect, Begin) else "cancel ") + effect.request.request_id for effect in effects]


def live() -> RequestBook:
    book = RequestBook("orders")
    book.replay()
    assert book.caught_up() == []
    return book


def test_nothing_begins_before_the_stream_is_read() -> None:
    book = RequestBook("orders")
    book.replay()
    assert feed(book, "west", "r1", REQUESTED) == []
    assert feed(book, "west", "r1", COMPLETED) == []
    assert feed(book, "west", "r2", REQUESTED) == []
    assert feed(book, "south", "r3", REQUESTED) == []
    assert feed(book, "north", "r4", REQUESTED) == []
    assert feed(book, "north", "r4", CANCELLED) == []
    assert names(book.caught_up()) == ["begin r2", "begin r3"]


def test_requests_of_several_destinations_all_run() -> None:
    book = live()
    assert [feed(book, to, f"r-{to}", REQUESTED) for to in ("a", "b", "c")] == [["begin r-a"], ["begin r-b"], ["begin r-c"]]
    assert [feed(book, to, f"s-{to}", REQUESTED) for to in ("a", "b", "c")] == [[f"cancel r-{to}", f"begin s-{to}"] for to in ("a", "b", "c")]


def test_a_newer_request_cancels_the_one_that_runs() -> None:
    book = live()
    feed(book, "west", "r1", REQUESTED)
    effects = book.status(pb.Status.FromString(full_sync_status("orders", "west", "r2", "why", REQUESTED)))
    assert names(effects) == ["cancel r1", "begin r2"]
    assert isinstance(effects[0], Cancel)
    assert "r2" in effects[0].why


def test_an_end_of_an_older_request_that_comes_late_ends_nothing() -> None:
    book = live()
    feed(book, "west", "r1", REQUESTED)
    feed(book, "west", "r2", REQUESTED)
    assert feed(book, "west", "r1", CANCELLED) == []
    assert feed(book, "west", "r3", REQUESTED) == ["cancel r2", "begin r3"]
    again = RequestBook("orders")  # a restart reads the same
    again.replay()
    for request_id, state in (("r1", REQUESTED), ("r2", REQUESTED), ("r1", CANCELLED)):
        feed(again, "west", request_id, state)
    assert names(again.caught_up()) == ["begin r2"]


def test_the_server_ends_a_request() -> None:
    book = live()
    feed(book, "west", "r1", REQUESTED)
    assert feed(book, "west", "r1", CANCELLED) == ["cancel r1"]
    assert feed(book, "west", "r1", CANCELLED) == []
    assert feed(book, "west", "r1", REQUESTED) == [], "a repeat of what has ended"
    assert feed(book, "west", "r2", REQUESTED) == ["begin r2"]


def test_the_own_end_comes_back_and_does_nothing() -> None:
    book = live()
    feed(book, "west", "r1", REQUESTED)
    request = FullSyncRequest("orders", "west", "r1", "why")
    book.finished(request)
    book.finished(request)
    assert feed(book, "west", "r1", COMPLETED) == []
    assert feed(book, "west", "r2", REQUESTED) == ["begin r2"]


def test_reading_again_after_a_failover_disturbs_nothing() -> None:
    book = live()
    feed(book, "west", "r1", REQUESTED)
    feed(book, "west", "r2", REQUESTED)
    book.replay()
    assert feed(book, "west", "r1", REQUESTED) == []
    assert feed(book, "west", "r2", REQUESTED) == []
    assert book.caught_up() == []
    book.replay()
    feed(book, "west", "r2", REQUESTED)
    feed(book, "west", "r3", REQUESTED)
    assert names(book.caught_up()) == ["cancel r2", "begin r3"]


def test_a_reader_that_seems_to_have_caught_up_too_early_begins_nothing_again() -> None:
    """After a failover the new primary falters in the middle of the stream. An older request was begun instead of the one that ran, and then that
    one a second time: its rows stood in the snapshot twice."""
    book = live()
    feed(book, "west", "r3", REQUESTED)
    book.finished(FullSyncRequest("orders", "west", "r3", "why"))
    feed(book, "west", "r3", COMPLETED)
    assert feed(book, "west", "r5", REQUESTED) == ["begin r5"]
    for faltering in range(2):
        book.replay()
        assert feed(book, "west", "r3", REQUESTED) == []
        assert book.caught_up() == []
        assert feed(book, "west", "r3", COMPLETED) == []
        assert feed(book, "west", "r5", REQUESTED) == []
        if faltering:
            assert book.caught_up() == []
    assert feed(book, "west", "r6", REQUESTED) == ["cancel r5", "begin r6"], "it was served all the time"


def test_an_older_request_that_is_repeated_at_the_end_of_the_stream_begins_nothing() -> None:
    """A stream repeats its last messages after a restart of its node."""
    book = live()
    feed(book, "west", "r1", REQUESTED)
    feed(book, "west", "r2", REQUESTED)
    assert feed(book, "west", "r1", REQUESTED) == []
    assert feed(book, "west", "r2", REQUESTED) == []


def test_a_request_that_the_stream_has_lost_meanwhile_holds_no_newer_one_up() -> None:
    book = live()
    feed(book, "west", "r1", REQUESTED)
    book.replay()
    feed(book, "west", "r2", REQUESTED)
    assert names(book.caught_up()) == ["cancel r1", "begin r2"]


def test_so_many_requests_are_known_again_and_no_more() -> None:
    book = live()
    for number in range(KNOWN_MAX + 10):
        feed(book, "west", f"r{number}", REQUESTED)
    assert len(book._known) == KNOWN_MAX
    assert feed(book, "west", "r10", REQUESTED) == []


def test_what_ended_while_the_connection_was_down_is_cancelled() -> None:
    book = live()
    feed(book, "west", "r1", REQUESTED)
    book.replay()
    feed(book, "west", "r1", REQUESTED)
    feed(book, "west", "r1", CANCELLED)
    assert names(book.caught_up()) == ["cancel r1"]


def test_what_concerns_others_is_ignored() -> None:
    book = live()
    assert feed(book, "west", "r1", REQUESTED, client="billing") == []
    assert feed(book, "", "r1", REQUESTED) == []
    feed(book, "west", "r2", REQUESTED)
    assert announce(book, client="billing") == []
    assert announce(book, provider=False) == []


def test_what_was_asked_for_before_the_announcement_is_not_begun() -> None:
    """A former process may have sent rows for it, and nobody who has not heard of both could tell those from this one's."""
    book = RequestBook("orders")
    book.replay()
    feed(book, "west", "r1", REQUESTED)
    feed(book, "south", "r2", REQUESTED)
    announce(book)
    feed(book, "south", "r3", REQUESTED)
    assert names(book.caught_up()) == ["begin r3"]
    assert feed(book, "west", "r4", REQUESTED) == ["begin r4"]


def test_an_announcement_that_comes_late_ends_what_was_begun() -> None:
    book = live()
    feed(book, "west", "r1", REQUESTED)
    feed(book, "south", "r2", REQUESTED)
    feed(book, "south", "r2", COMPLETED)
    assert announce(book) == ["cancel r1"]
    assert announce(book) == []
    assert feed(book, "west", "r3", REQUESTED) == ["begin r3"]


def test_an_announcement_that_is_read_again_ends_nothing_that_came_after_it() -> None:
    """A stream repeats its last messages after a restart of its node, and a reader begins again after each loss of its node."""
    book = live()
    announce(book)
    feed(book, "west", "r1", REQUESTED)
    book.replay()
    for _ in range(2):
        announce(book)
        feed(book, "west", "r1", REQUESTED)
    assert book.caught_up() == []
    fresh = RequestBook("orders")
    fresh.replay()
    for _ in range(2):
        announce(fresh)
        feed(fresh, "west", "r1", REQUESTED)
    assert names(fresh.caught_up()) == ["begin r1"]
