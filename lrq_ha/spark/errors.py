"""Errors of the Spark source. Rule: nothing is skipped, cut short or read in part without one of these (or `failOnDataLoss` = false)."""

from __future__ import annotations

from lrq_ha.errors import LrqError


class OptionError(LrqError, ValueError):
    """An option is unknown, missing, or has a value that is not allowed. Nothing was read."""


class NoNode(LrqError):
    """None of the addresses takes readers."""

    def __init__(self, answers: dict[str, str], *, retriable: bool) -> None:
        listed = "; ".join(f"{address}: {answer}" for address, answer in answers.items())
        super().__init__(
            f"No node lets us read ({listed})",
            todo="Check option `list_nodes`; see which node is primary: lrq-ha list",
            retriable=retriable,
        )


class MissingQueue(LrqError):
    """A queue that is to be read does not exist."""

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"Queue {queue} does not exist in vhost lrq",
            todo="A receive queue LRQ_Recv_<client_name>_<remote_id> appears with the first batch from that site: check the name, or wait for it",
        )


class QueueRefused(LrqError):
    """A node takes us, but does not let us read the queue: it is no stream, or the user lacks the permission."""

    def __init__(self, queue: str, address: str, said: str) -> None:
        super().__init__(
            f"Queue {queue} cannot be read at {address}: {said}",
            todo="Receive queues are streams, made by the sidecar; a reader needs the right to read them in vhost lrq",
        )


class DataLoss(LrqError):
    """Transactions that belong to the range are no longer in the queue."""

    def __init__(self, what: str) -> None:
        super().__init__(
            what,
            todo='Raise the retention of the queue, or read with startingOffsets = "earliest" what is left, '
            "or set failOnDataLoss = false to go on with a hole",
        )


class StreamSilent(LrqError):
    """A stream gave no message for too long, though one must be there."""

    def __init__(self, queue: str, idle_s: float, wanted: str) -> None:
        super().__init__(
            f"Queue {queue} gave nothing for {idle_s:.0f} s, before {wanted}", todo="Check the broker's log", retriable=True
        )
