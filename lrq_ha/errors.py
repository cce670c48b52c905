"""The one root of all errors. Rule: an error says what happened, where, whether trying again can help, and what to do."""

from __future__ import annotations

import traceback
from pathlib import Path

#: The remedy if a sidecar cannot be rebuilt from its broker's streams; `lrq-ha reinit` needs a running sidecar.
SET_UP_ANEW = (
    "This node cannot come back by itself: stop its sidecar, see that another node is primary, delete all that the broker holds, set the broker up "
    "again and start the sidecar, which gets everything from the others (docs/operations/members.md, 'A node that cannot be rebuilt')"
)


class LrqError(Exception):
    """Root of every error that lrq-ha raises.

    Args:
        what: What happened and where (queue, epoch, sequence), one sentence.
        todo: What the reader can do about it; empty if nothing.
        retriable: Whether the call may succeed later without any change.
    """

    def __init__(self, what: str, *, todo: str = "", retriable: bool = False) -> None:
        super().__init__(f"{what.removesuffix('.')}. {todo}" if todo else what)
        self.what = what
        self.todo = todo
        self.retriable = retriable


class IllegalEvent(LrqError):
    """An event that is not legal in the present state: a bug in a driver. Nothing was changed."""


class MalformedInput(LrqError):
    """Bytes or values from outside that do not have the form they must have."""


class NotPrimary(LrqError):
    """Only a primary appends entries of clients."""


def place(error: BaseException) -> str:
    """Kind and place of an unexpected error, without its text, which may hold input from outside."""
    where = [f"{Path(step.filename).name}:{step.lineno}" for step in traceback.extract_tb(error.__traceback__)[-6:]]
    return f"{type(error).__name__} at {' > '.join(where)}"
