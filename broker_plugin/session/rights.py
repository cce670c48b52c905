"""What a client's user may do, as far as its broker has said. No I/O."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

RIGHTS_MAX = 4_096  # that are remembered, of one connection
PLAIN = b"\0\0"  # no properties


class Right(NamedTuple):
    """To make such publishes.

    Args:
        exchange: Its name.
        key: The routing key, where the exchange judges it; else empty.
        immediate: The publish's flag; no RabbitMQ takes it.
        properties: Those that the broker judges, as in a content header, from the flags on.
    """

    exchange: str
    key: str
    immediate: bool
    properties: bytes = PLAIN


class Rights:
    """What the broker has allowed one connection. Of properties, which may be large, a digest is kept."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: set[Right] = set()

    def __contains__(self, right: Right) -> bool:
        return _digested(right) in self._known

    def add(self, right: Right) -> None:
        """The broker allows this, and so the same without these properties."""
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
