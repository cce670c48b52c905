"""Joins the frames of contents that come in pieces, within limits. Pure.

Rules:
- An unexpected frame, and a body that no broker takes, end the connection, in RabbitMQ's words (UnexpectedFrame,
  BodyTooLong).
- A body over the limit is read to its end, but not kept. Then BodyTooLarge is raised, and the connection goes on.
- Bytes of unfinished contents are taken from a Budget that connections share.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from lrq_ha.errors import MalformedInput

from . import encode
from .frames import (
    BASIC_CLASS,
    BASIC_PUBLISH,
    BODY,
    FRAME_MAX_ANY_BYTES,
    HEADER,
    HEADER_FIXED_BYTES,
    HEARTBEAT,
    METHOD,
    Buffer,
    FrameError,
    Item,
    body_size,
    scan,
)

BODY_BYTES_MAX = 134_217_728  # RabbitMQ's own default limit before 4.0
BODY_BYTES_ANY_MAX = 536_870_912  # no RabbitMQ can be configured to take more: a larger body ends its connection

_u32 = struct.Struct(">I").unpack_from


class UnexpectedFrame(FrameError):
    """A frame that has no place where it stands, as when two threads publish on one channel; in RabbitMQ's words.

    Args:
        expected: The expected frame, and the one that came.
        cause: Id of the method whose content it interrupts; 0 for none.
    """

    code = 505

    def __init__(self, expected: str, cause: int = BASIC_PUBLISH) -> None:
        super().__init__(f"UNEXPECTED_FRAME - expected {expected} instead")
        self.cause = cause


class BodyTooLong(FrameError):
    """A body of more bytes than any broker takes, or than its header says; in RabbitMQ's words."""

    cause = BASIC_PUBLISH

    def __init__(self, text: str) -> None:
        super().__init__(f"FRAME_ERROR - {text}")


class Content(NamedTuple):
    """A content that came in pieces: the payloads of its method and header frames, and its body."""

    method: bytes
    header: bytes
    body: bytes


class BodyTooLarge(MalformedInput):
    """A content whose body is over the limit has ended; nothing of it was kept. The connection goes on.

    Args:
        size, limit: Bytes.
    """

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a body of {size} bytes exceeds the limit of {limit}")
        self.size, self.limit = size, limit


class Budget:
    """Bytes that all its sharers together may hold.

    Room is made by closing the largest connection of the user whose connections hold most. So no user can take the
    memory that all others need, with one connection or many.

    Args:
        limit: Bytes. A smaller one closes no connection before more bytes come.
        name: The limit's, for the error.
    """

    __slots__ = ("_name", "_shares", "bytes", "limit")

    def __init__(self, limit: int, name: str) -> None:
        self.bytes = 0
        self.limit, self._name = limit, name
        self._shares: set[Share] = set()

    def share(self, user: str, end: Callable[[FrameError], None]) -> Share:
        """Adds a connection of this user; `end` closes it, so that it holds nothing."""
        share = Share(self, user, end)
        self._shares.add(share)
        return share

    def has_room(self, size: int) -> bool:
        """Whether `size` more bytes may be held."""
        return self.bytes + size <= self.limit

    def make_room(self, asker: Share, size: int) -> None:
        """Makes room by closing connections. Raises FrameError if the asker itself is to be closed."""
        while not self.has_room(size):
            held = Counter({asker.user: size})
            for share in self._shares:
                held[share.user] += share.bytes
            user = held.most_common(1)[0][0]
            largest = max((share for share in self._shares if share.user == user), key=lambda share: share.bytes + size * (share is asker))
            error = FrameError(f"what is not complete, and open transactions, hold {self.bytes} bytes already; the limit is {self._name}")
            if largest is asker:
                raise error
            largest.end(error)
            largest.leave()

    def left(self, share: Share) -> None:
        """Removes a connection."""
        self._shares.discard(share)


class Share:
    """The bytes of a Budget that one connection holds."""

    __slots__ = ("_budget", "bytes", "end", "user")

    def __init__(self, budget: Budget, user: str, end: Callable[[FrameError], None]) -> None:
        self.bytes = 0
        self.user, self.end = user, end
        self._budget = budget

    def take(self, size: int) -> None:
        """Holds `size` more bytes. Raises FrameError if the connection is to be closed over that."""
        if not self._budget.has_room(size):
            self._budget.make_room(self, size)
        self.bytes += size
        self._budget.bytes += size

    def give(self, size: int) -> None:
        """Frees `size` bytes; after `leave`, does nothing."""
        size = min(size, self.bytes)
        self.bytes -= size
        self._budget.bytes -= size

    def leave(self) -> None:
        """The connection has ended."""
        self.give(self.bytes)
        self._budget.left(self)


class Assembly:
    """Joins contents whose frames `scan` gave out one by one, per channel.

    Holds at most `body_bytes_max` bytes of body per open channel; bodies, methods and headers together are bounded by
    `share`. A larger body is read to its end, as a broker does, but not kept.
    """

    __slots__ = ("_body_bytes_max", "_open", "_share")

    def __init__(self, body_bytes_max: int = BODY_BYTES_MAX, share: Share | None = None) -> None:
        self._body_bytes_max = body_bytes_max
        self._share = share
        self._open: dict[int, tuple[bytes, bytes, int, bytearray]] = {}  # method, header (b"" before it came), missing, body so far

    def take(self, kind: int, channel: int, payload: bytes) -> Content | None:
        """Adds one frame: a content method (its id as kind), HEADER or BODY. Returns the content when it is
        complete.

        Raises:
            FrameError: An unexpected frame (UnexpectedFrame, BodyTooLong), or a body that is too large for any
                broker.
            BodyTooLarge: With the last frame of a body that is over the limit.
        """
        method, header, missing, body = self._open.get(channel, (b"", b"", 0, bytearray()))
        if kind == HEADER and method and not header:
            if len(payload) < HEADER_FIXED_BYTES or _u32(payload)[0] & 0xFFFF:
                raise FrameError(f"a malformed content header on channel {channel}")
            if _u32(payload)[0] != BASIC_CLASS:
                raise UnexpectedFrame(f"content header for class 60, got one for class {_u32(payload)[0] >> 16}")
            header, missing = payload, body_size(payload)
            if missing > BODY_BYTES_ANY_MAX:
                raise BodyTooLong(f"content body size {missing} exceeds maximum allowed size {BODY_BYTES_ANY_MAX}")
            self._hold(payload)
        elif kind == BODY and header:
            if len(payload) > missing:
                raise BodyTooLong("content body frame exceeds remaining content size")
            if body_size(header) <= self._body_bytes_max:
                self._hold(payload)
                body += payload
            missing -= len(payload)
        elif kind not in (HEADER, BODY, HEARTBEAT) and not method:
            self._hold(payload)
            method = payload
        else:
            raise self.unexpected(channel)
        if header and not missing:
            self._open.pop(channel, None)
            self._release(method, header, body)
            size = body_size(header)
            if size > self._body_bytes_max:
                raise BodyTooLarge(size, self._body_bytes_max)
            return Content(method, header, bytes(body))
        self._open[channel] = (method, header, missing, body)
        return None

    def unexpected(self, channel: int) -> UnexpectedFrame:
        """The error for a frame that has no place on this channel now."""
        method, header, _, _ = self._open.get(channel, (b"", b"", 0, b""))
        if not method:
            return UnexpectedFrame("method frame, got non method frame", 0)
        expected = "content body, got non content body frame" if header else "content header for class 60, got non content header frame"
        return UnexpectedFrame(expected)

    def is_open(self, channel: int) -> bool:
        """Whether a content on this channel is unfinished."""
        return channel in self._open

    def arrived_bytes(self, channel: int) -> int:
        """How many body bytes of this channel's unfinished content have come."""
        return len(self._open[channel][3]) if channel in self._open else 0

    def drop(self, channel: int) -> None:
        """Forgets the unfinished content of a channel that closed."""
        method, header, _, body = self._open.pop(channel, (b"", b"", 0, bytearray()))
        self._release(method, header, body)

    def clear(self) -> None:
        """Forgets everything: the connection is gone."""
        for channel in list(self._open):
            self.drop(channel)

    def _hold(self, payload: bytes) -> None:
        if self._share is not None:
            self._share.take(len(payload))

    def _release(self, *held: Buffer) -> None:
        if self._share is not None:
            self._share.give(sum(map(len, held)))


def whole(channel: int, parts: Content, frame_max_bytes: int) -> tuple[bytes, list[Item]]:
    """A joined content as if it had come whole: its frames, and the one item that `scan` finds in them.

    Its body is split again; a header frame cannot be split, and may be larger.
    """
    method = encode.frame(METHOD, channel, parts.method)
    blob = b"".join((method, *encode.content(channel, parts.header, parts.body, frame_max_bytes)))
    return blob, scan(blob, 0, FRAME_MAX_ANY_BYTES, 1 << 62)[0]
