"""Errors of reading a stream."""

from __future__ import annotations

from lrq_ha.errors import LrqError


class NoNode(LrqError):
    """None of the addresses takes readers.

    Attributes:
        answers: What each one said.
    """

    def __init__(self, answers: dict[str, str], *, retriable: bool) -> None:
        listed = "; ".join(f"{address}: {answer}" for address, answer in answers.items())
        super().__init__(
            f"No node lets us read ({listed})",
            todo="Check the addresses of the nodes; see which node is primary: lrq-ha list",
            retriable=retriable,
        )
        self.answers = answers


class MissingQueue(LrqError):
    """A queue that is to be read does not exist."""

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"Queue {queue} does not exist in vhost lrq",
            todo="A receive queue LRQ_Recv_<client_name>_<remote_id> appears with the first batch from that site: check the name, or wait for it",
        )


class QueueRefused(LrqError):
    """A node takes us, but does not let us read the queue: it is no stream, or the user lacks the permission.

    Attributes:
        said: The node's answer.
    """

    def __init__(self, queue: str, address: str, said: str) -> None:
        super().__init__(
            f"Queue {queue} cannot be read at {address}: {said}",
            todo="Receive queues are streams, made by the sidecar; a reader needs the right to read them in vhost lrq",
        )
        self.said = said


class MessageRefused(LrqError):
    """A node takes us, but not the message.

    Attributes:
        said: The node's answer.
    """

    def __init__(self, queue: str, address: str, said: str) -> None:
        super().__init__(f"{queue} takes no such message at {address}: {said}", todo="Publishing there needs the right to write to amq.default")
        self.said = said


class StreamSilent(LrqError):
    """A stream gave no message for too long, though one must be there."""

    def __init__(self, queue: str, idle_s: float, wanted: str) -> None:
        super().__init__(
            f"Queue {queue} gave nothing for {idle_s:.0f} s, before {wanted}", todo="Check the broker's log", retriable=True
        )


class ConnectionLost(LrqError):
    """The node went away, or does not take readers any more: another node, or this one, may do later."""

    def __init__(self, address: str, said: str) -> None:
        super().__init__(f"Connection to {address} lost: {said}", retriable=True)
