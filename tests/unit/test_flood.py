"""How much of its warnings a sidecar's log gets."""

from __future__ import annotations

import io
import logging

import pytest

from lrq_ha.cli.flood import PERIOD_S, WARNINGS_MAX, LimitedHandler


class Log:
    """A log whose time stands still but for `renewal_progress`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._file = io.StringIO()
        self._handler = LimitedHandler(self._file, lambda: self.now)
        self._handler.setFormatter(logging.Formatter("%(name)s %(message)s"))

    def says(self, text: str, *values: object, level: int = logging.WARNING, name: str = "door") -> None:
        self._handler.handle(logging.LogRecord(name, level, "", 0, text, values, None))

    def written(self) -> list[str]:
        """The lines since the last call."""
        found = self._file.getvalue().splitlines()
        self._file.seek(0)
        self._file.truncate()
        return found


def test_of_a_flood_of_warnings_the_first_are_written_and_then_how_many_more_there_were() -> None:
    """A client that tries again and again while the broker is down, or publishes to an exchange that is not there, filled the disk."""
    log = Log()
    for number in range(1_000):
        log.says("there is no exchange '%s'", number)
    assert log.written() == [f"door there is no exchange '{number}'" for number in range(WARNINGS_MAX)]
    log.now += PERIOD_S
    log.says("something else")
    assert log.written() == [
        f"door {1_000 - WARNINGS_MAX} more warnings of this kind were left out; the last: there is no exchange '999'",
        "door something else",
    ]
    log.says("there is no exchange '%s'", "again")
    assert log.written() == ["door there is no exchange 'again'"]


def test_kinds_are_counted_apart() -> None:
    log = Log()
    for _ in range(WARNINGS_MAX):
        log.says("one %s", 1)
    for text, values in (("two", ()), ("%s", ("three",)), ("%s", ("four",))):
        log.says(text, *values)
    log.says("one %s", 1, name="other")
    log.says("one %s", 1)
    assert log.written()[WARNINGS_MAX:] == ["door two", "door three", "door four", "other one 1"]


@pytest.mark.parametrize("level", [logging.ERROR, logging.INFO])
def test_errors_and_information_are_written_as_they_come(level: int) -> None:
    log = Log()
    for _ in range(100):
        log.says("it failed", level=level)
    assert len(log.written()) == 100


def test_what_is_left_out_of_a_quiet_log_is_nothing() -> None:
    log = Log()
    for _ in range(3):
        log.says("100% of it")
        log.now += PERIOD_S
    assert log.written() == ["door 100% of it"] * 3
    assert len(log._handler._periods) == 1
