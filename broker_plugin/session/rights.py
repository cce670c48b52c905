"""The rights of a client's user, as far as its broker has confirmed them. No I/O."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

RIGHTS_MAX = 4_096  # rights that are remembered of one connection
PLAIN = b"\0\0"  # no properties


class Right(NamedTuple):
    """The right to make one kind of publish.

    Args:
        exchange: Its name.
        key: The routing key, where the exchange checks it; else empty.
        immediate: The publish's flag, which no RabbitMQ accepts.
        properties: The properties that the broker checks, as in a content header, from the flags on.
    """

    exchange: str
    key: str
    immediate: bool
    properties: bytes = PLAIN


class Rights:
    """The rights that the broker has confirmed for one connection. Properties may be large, so only their digest is kept."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: set[Right] = set()

    def __contains__(self, right: Right) -> bool:
        return _digested(right) in self._known

    def add(self, right: Right) -> None:
        """The broker allows this publish, and therefore also one without these properties."""
        if len(self._known) >= RIGHTS_MAX:
            self._known.clear()
        self._known |= {_digested(right), right._replace(properties=PLAIN)}

    def names(self, exchange: str) -> bool:
        """Whether anything is known of an exchange."""
        return any(right.exchange == exchange for right in self._known)

    def clear(self) -> None:
        self._known.clear()


def _digested(right: Right) -> Right:
    return right if right.properties == PLAIN else right._replace(properties=sha256(right.properties).digest())
