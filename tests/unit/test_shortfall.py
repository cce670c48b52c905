"""What a broker lacks: holds and gaps, and how they are told."""

from __future__ import annotations

from broker_plugin.log.shortfall import KEPT_MAX, Shortfall


def test_a_hold_stops_the_writing_and_a_gap_does_not() -> None:
    shortfall = Shortfall()
    assert shortfall.note_gap("queue", "queue 'orders' is not here")
    assert not shortfall.holds
    assert shortfall.hold("vhost", "it has no vhost 'shop'")
    assert shortfall.holds
    assert shortfall.tell() == "it has no vhost 'shop'; queue 'orders' is not here"
    assert shortfall.hold("vhost", "")
    assert not shortfall.holds
    assert shortfall.note_gap("queue", "")
    assert shortfall.tell() == ""


def test_what_is_told_again_is_not_new() -> None:
    shortfall = Shortfall()
    assert shortfall.hold("vhost", "since 10:00")
    assert not shortfall.hold("vhost", "since 10:00")
    assert not shortfall.hold("other", "")


def test_thousands_are_told_in_a_line() -> None:
    shortfall = Shortfall()
    for number in range(2 * KEPT_MAX):
        shortfall.note_gap(number, f"queue {number}")
    assert shortfall.tell() == f"queue 0; queue 1; queue 2; and {KEPT_MAX - 3} more"


def test_the_next_incarnation_lacks_what_is_missing_and_not_what_held_this_one() -> None:
    shortfall = Shortfall()
    shortfall.hold("vhost", "it has no vhost 'shop'")
    shortfall.note_gap("queue", "queue 'orders' is not here")
    shortfall.note_stray("other", "queue 'made by hand' is here only")
    assert Shortfall(shortfall).tell() == "queue 'orders' is not here"
