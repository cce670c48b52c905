"""Errors of the publisher. Rule: the Confirm of a publish that fails raises one of these; no publish ends silently."""

from __future__ import annotations

from collections.abc import Mapping

from lrq_ha.errors import LrqError


def anew(error: LrqError) -> LrqError:
    """A copy of an error that was raised before, to be raised again without the earlier frames (and their objects), which would accumulate."""
    return error.with_traceback(None)


class InvalidArgument(LrqError, ValueError):
    """An argument that can never work (a bad name, no destination, a payload that is not bytes). Nothing was sent."""


class MessageTooLarge(LrqError, ValueError):
    """A message above the size limit. Nothing was sent."""


class PublisherClosed(LrqError):
    """The publisher is closed."""


def forked(what: str) -> PublisherClosed:
    """The error for use of an object after a fork."""
    return PublisherClosed(
        f"{what} belongs to the process that it was made in", todo="Make a publisher after the fork, with a producer name of its own"
    )


class Unconfirmed(LrqError):
    """The publisher was closed before the message was confirmed: whether it was enqueued is not known."""

    def __init__(self, replication_id: str) -> None:
        super().__init__(
            f"Message {replication_id} was not confirmed before the publisher was closed: it may or may not have been enqueued",
            todo="Call flush() before close(), or give close() more time",
        )
        self.replication_id = replication_id


class NackedError(LrqError):
    """The broker refused a message: it nacked it, returned it as unroutable, or closed the channel because of it.

    Attributes:
        replication_id: The message's replication ID. A later message may have it, too.
        code: AMQP reply code (312 no route, 404 no such exchange, …); 0 for a plain nack, which brings none.
        text: The broker's text.
    """

    def __init__(self, replication_id: str, code: int, text: str) -> None:
        todo = {
            0: "A nack comes from a queue at its length limit (x-overflow = reject-publish) or from a queue that is not available",
            312: "No queue is bound for this exchange and routing key: declare and bind it, then publish again" if text == "NO_ROUTE" else "",
            404: "Declare the exchange, then publish again",
        }.get(code, "")
        said = f"{code} {text}" if code else "nack"
        super().__init__(f"Message {replication_id} was refused by the broker: {said}", todo=todo)
        self.replication_id = replication_id
        self.code = code
        self.text = text


class FencedError(LrqError):
    """Another process publishes under this producer name: IDs of the two would be taken for duplicates of each other.

    Attributes:
        known: The highest sequence that the server knows.
    """

    def __init__(self, producer: str, known: int, sent: int) -> None:
        super().__init__(
            f"Producer {producer!r} is in use elsewhere: the server knows sequence {known}, this process has sent none above {sent}",
            todo="Give every process its own producer name, and start this one again",
        )
        self.known = known


class WaitTimeout(LrqError, TimeoutError):
    """A timeout. Nothing is given up: published messages stay in the window and are still being sent."""

    def __init__(self, what: str, *, todo: str = "") -> None:
        super().__init__(what, todo=todo, retriable=True)


class ConfirmTimeout(WaitTimeout):
    """No confirm yet."""


class WindowFull(WaitTimeout):
    """The window stayed full. The message was not taken."""


class NoPrimary(WaitTimeout):
    """No node of the list takes publishes.

    Attributes:
        answers: Address (host:port) -> its last answer.
    """

    def __init__(self, vhost: str, answers: Mapping[str, str]) -> None:
        listed = "; ".join(f"{address}: {answer}" for address, answer in answers.items())
        super().__init__(f"No node takes publishes for vhost {vhost!r} ({listed})", todo="See which node is primary: lrq-ha list")
        self.answers = dict(answers)


class FullSyncCancelled(LrqError):
    """The full sync of this context was cancelled (a newer request, the server, cancel(), or close())."""
