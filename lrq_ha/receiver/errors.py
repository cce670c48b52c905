"""Errors of the receiver."""

from __future__ import annotations

from lrq_ha.errors import LrqError
from lrq_ha.replication.positions import Position


class ReceiverError(LrqError):
    """An error that a listener is told of, or that ends a receiver."""


class Redelivery(ReceiverError):
    """The listener did not take a list: the list is given again.

    Attributes:
        position: The last position of the list: `Receiver.skip` takes it.
        attempt: How many times the list was given.
    """

    def __init__(self, queue: str, position: Position, attempt: int, cause: BaseException | None) -> None:
        said = f"{type(cause).__name__}: {cause}" if cause is not None else "the listener returned False"
        super().__init__(f"The updates of {queue} up to {position} were not taken, attempt {attempt}: {said}", retriable=True)
        self.position, self.attempt = position, attempt


class Trimmed(ReceiverError):
    """The queue no longer holds what comes next: the receiver goes on with a whole snapshot.

    Attributes:
        after: The last position that was given.
        before: The queue goes on behind this position.
    """

    def __init__(self, queue: str, after: Position, before: Position) -> None:
        super().__init__(
            f"{queue} lacks what comes after {after}, up to {before}: the broker has dropped it",
            todo="The receiver goes on with the next whole snapshot; raise receive.bytes_max at the sink, or let the receiver run",
        )
        self.after, self.before = after, before


class OtherLog(ReceiverError):
    """The queue has another log than the one of the committed position: its source was set up again, or is another group of that name.

    Attributes:
        known: Identity of the log of the committed position, in hexadecimal digits.
        came: Identity of the log that the queue has now.
    """

    def __init__(self, queue: str, known: str, came: str) -> None:
        super().__init__(
            f"The committed position in {queue} is of the log {known}, and the queue has the log {came}: another group of that name, or one that was "
            "set up again",
            todo="If that is meant, stop the receiver and call its method forget: it then begins with a whole snapshot",
        )
        self.known, self.came = known, came


class Fenced(ReceiverError):
    """Another process keeps the position of this receiver's name: this process must end."""

    def __init__(self, name: str, queue: str) -> None:
        super().__init__(
            f"Another process has taken over receiver {name!r} of {queue}",
            todo="Run one process for each name; a second application takes another name",
        )


class Stop(Exception):
    """A listener raises it to end the receiver: the list that the listener has is given again at the next start."""
