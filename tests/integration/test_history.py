"""The total-queue check finds what it is there for. No broker: what a checker does not find, no run of it shows."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from history import Broken, History, dead, span

pytestmark = [pytest.mark.quick, pytest.mark.proves("fault-checker")]

NOW = time.time()


@pytest.fixture
def history() -> History:
    """Three messages of one publisher in queue q, confirmed."""
    found = History()
    for number in range(3):
        found.send(f"p 0 {number}", "q")
        found.confirm(f"p 0 {number}")
    return found


def take(history: History, number: int, *, queue: str = "q", consumer: int = 0, redelivered: bool = False, rejected: bool = False) -> None:
    history.deliver(consumer, queue, f"p 0 {number}", redelivered)
    history.settle(queue, f"p 0 {number}", rejected=rejected)


def test_all_is_well(history: History) -> None:
    take(history, 0)
    take(history, 2, consumer=1)
    take(history, 1, rejected=True)
    assert history.open() == ["p 0 1"]
    take(history, 1, queue=dead("q"))
    assert not history.open()
    history.check([])


def test_lost(history: History) -> None:
    take(history, 0)
    take(history, 1, rejected=True)
    with pytest.raises(AssertionError, match=r"'p 0 1' was confirmed and lost.*'p 0 2' was confirmed and lost"):
        history.check([])


def test_a_killed_broker_may_lose_the_dead_letters_that_it_has_just_made(history: History) -> None:
    take(history, 0)
    take(history, 1, rejected=True)
    take(history, 2)
    history.brokers_killed.append(span(NOW - 60.0, NOW - 60.0))
    with pytest.raises(AssertionError, match=r"'p 0 1' was confirmed and lost"):
        history.check([])
    history.brokers_killed.append(span(NOW, time.time()))
    history.check([])


def test_what_was_never_confirmed_may_be_missing(history: History) -> None:
    history.send("p 0 3", "q")
    for number in range(3):
        take(history, number)
    history.check([])


@pytest.mark.parametrize("rejected", [False, True])
def test_twice(history: History, rejected: bool) -> None:
    for number in range(3):
        take(history, number)
    history.settled["q", "p 0 1"][0] = (NOW, rejected)
    take(history, 1, redelivered=True)
    with pytest.raises(AssertionError, match="'p 0 1' came again from q"):
        history.check([span(NOW - 1.0, NOW - 1.0), span(NOW + 6.0, NOW + 6.0)])
    history.check([span(NOW + 4.0, NOW + 4.0)])
    history.check([span(NOW - 10.0, NOW + 10.0)])


def test_who_speaks_last_need_not_count(history: History) -> None:
    """Acked at a primary that was promoted, then rejected at one that was over: nothing is dead-lettered, and nothing is missing."""
    for number in range(3):
        take(history, number)
    take(history, 1, consumer=1, redelivered=True, rejected=True)
    assert not history.open()
    now = time.time()
    history.check([span(now - 10.0, now + 10.0)])


def test_twice_as_its_ack_was_on_a_connection_that_was_lost(history: History) -> None:
    take(history, 0)
    take(history, 2)
    history.deliver(1, "q", "p 0 1", False)
    said = history.settle("q", "p 0 1")
    time.sleep(0.001)
    take(history, 1, redelivered=True)
    with pytest.raises(AssertionError, match="'p 0 1' came again from q"):
        history.check([])
    history.lost(1, [said])
    history.check([])
    time.sleep(0.001)
    take(history, 1, redelivered=True)
    with pytest.raises(AssertionError, match="'p 0 1' came again from q"):
        history.check([])


def test_twice_among_the_dead_letters(history: History) -> None:
    take(history, 0)
    take(history, 2)
    take(history, 1, rejected=True)
    take(history, 1, queue=dead("q"))
    take(history, 1, queue=dead("q"))
    with pytest.raises(AssertionError, match=r"'p 0 1' came again from q\.dead"):
        history.check([])


@pytest.mark.parametrize(("queue", "message"), [("q", "x 0 1"), ("other", "p 0 1"), (dead("q"), "p 0 1")])
def test_from_nowhere(history: History, queue: str, message: str) -> None:
    for number in range(3):
        take(history, number)
    history.deliver(0, queue, message, True)
    with pytest.raises(AssertionError, match=f"'{message}' came from {queue}, was sent to"):
        history.check([])


def test_out_of_order(history: History) -> None:
    take(history, 1)
    take(history, 0, redelivered=True)
    take(history, 2)
    history.check([])
    history.send("p 0 3", "q")
    history.send("p 1 2", "q")
    take(history, 3, consumer=1)
    history.deliver(1, "q", "p 1 2", False)  # of another connection of that publisher
    history.check([])
    history.deliver(1, "q", "p 0 2", False)
    with pytest.raises(AssertionError, match="'p 0 2' came from q after 3"):
        history.check([])


def test_out_of_order_after_a_failover(history: History) -> None:
    """All of it comes again then, as far as its consumer can tell."""
    for number in (0, 2, 1):
        take(history, number, redelivered=True)
    history.check([])
    for number in (0, 2):
        history.deliver(1, "q", f"p 0 {number}", True, alone=True)
    history.check([])
    history.deliver(1, "q", "p 0 1", True, alone=True)
    with pytest.raises(Broken, match="'p 0 1' came from q after 2"):
        history.check([])


def test_the_file_has_every_event(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    history.note("fault", name="cut off")
    history.send("p 0 0", "q")
    history.confirm("p 0 0")
    take(history, 0)
    history.check([])
    history.close()
    events = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["fault", "send", "confirm", "deliver", "ack", "checked"]
    assert events == sorted(events, key=lambda event: event["at"])
