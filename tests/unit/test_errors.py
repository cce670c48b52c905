"""What an error tells, and what it must not."""

from __future__ import annotations

from lrq_ha.errors import LrqError, place


def test_what_and_todo() -> None:
    error = LrqError("the log is full", todo="make room", retriable=True)
    assert (str(error), error.what, error.todo, error.retriable) == ("the log is full. make room", "the log is full", "make room", True)
    assert str(LrqError("the log is full")) == "the log is full"
    assert str(LrqError("the broker refused: 403 see its log.", todo="Look")) == "the broker refused: 403 see its log. Look"


def test_the_place_of_an_error_holds_no_text_of_it() -> None:
    try:
        raise ValueError("secret")
    except ValueError as error:
        told = place(error)
    assert told.startswith("ValueError at test_errors.py:")
    assert "secret" not in told
