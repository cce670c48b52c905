"""Relays contents from the broker that come in pieces: method and header decide what happens to a content, and its
body follows as it comes.

Rules:
- No part of a body is kept: each frame is passed on or dropped. However many clients are sent something large at
  once, memory is used only where they do not read, which `flow_control` bounds.
- Until a relayed content has ended, no other frame goes to the client on its channel: the door's own frames come
  right behind it.
- Frames that are larger than the client's frame_max are split again. A header frame cannot be split; see
  `deliver.refit`.
"""

from __future__ import annotations

from collections.abc import Callable

from . import encode
from .content_assembly import UnexpectedFrame
from .frames import (
    BASIC_CLASS,
    BODY,
    CONTENT_METHODS,
    FRAME_OVERHEAD_BYTES,
    HEADER,
    HEADER_FIXED_BYTES,
    METHOD,
    FrameError,
    Item,
    body_size,
    method_id,
)

PIECES = frozenset((*CONTENT_METHODS, HEADER, BODY))  # the parts of a content that does not come whole

Decide = Callable[[int, bytes, Item], bytes | None]


class ContentRelay:
    """Relays contents of one client connection.

    Args:
        frame_max_bytes: The client's frame_max.
        decide: Called with a content's (channel, method and header frames, their item). Returns the frames
            for the client instead; None for the frames themselves, b"" to drop the content.
        is_withheld: Whether later frames on a channel are withheld, as `decide` may have ordered.

    Attributes:
        behind_bytes: Bytes that wait for the end of relayed contents.
    """

    __slots__ = ("_begun", "_behind", "_decide", "_frame_max_bytes", "_is_withheld", "_rest", "behind_bytes")

    def __init__(self, frame_max_bytes: int, decide: Decide, is_withheld: Callable[[int], bool]) -> None:
        self._frame_max_bytes = frame_max_bytes
        self._decide, self._is_withheld = decide, is_withheld
        self._begun: dict[int, bytes] = {}  # methods whose headers have not come
        self._rest: dict[int, tuple[int, bool]] = {}  # missing octets of body, and whether the client gets them
        self._behind: dict[int, list[bytes]] = {}  # by channel, while a content is relayed there
        self.behind_bytes = 0

    def take(self, kind: int, number: int, data: bytes, item: Item) -> bytes | None:
        """Takes one frame: a method with a content (its id as kind), HEADER or BODY. Returns the frames for the
        client instead; None for that frame itself.

        Args:
            kind, number, data, item: As `scan` gave it out.

        Raises:
            FrameError: The frame has no place where it stands, or is malformed.
        """
        if kind == BODY:
            return self._body(number, data, item)
        if kind == HEADER:
            return self._header(number, data[item[2] : item[3]])
        if number in self._begun or number in self._rest:
            raise UnexpectedFrame("content header or body, got a method frame")
        self._begun[number] = data[item[2] : item[3]]
        return b""

    def _header(self, number: int, payload: bytes) -> bytes:
        method = self._begun.pop(number, b"")
        if not method or len(payload) < HEADER_FIXED_BYTES or int.from_bytes(payload[:4], "big") != BASIC_CLASS:
            raise UnexpectedFrame("method frame, got a content header, or a malformed one")
        first = encode.frame(METHOD, number, method)
        blob = first + encode.frame(HEADER, number, payload)
        item = method_id(method), number, 7, len(first) - 1, len(first) + 7, len(blob) - 1, len(blob)
        replaced = self._decide(number, blob, item)
        given = blob if replaced is None else replaced
        size = body_size(payload)
        if size and not self._is_withheld(number):
            passes = given[7:11] == method[:4]  # else another content took its place
            self._rest[number] = size, passes
            if passes:
                self._behind.setdefault(number, [])
        return given

    def _body(self, number: int, data: bytes, item: Item) -> bytes | None:
        missing, passes = self._rest.get(number, (0, False))
        size = item[3] - item[2]
        if size > missing:
            raise FrameError(f"a body of {size - missing} bytes more than its header has told, on channel {number}")
        self._rest[number] = missing - size, passes
        fits = passes and size + FRAME_OVERHEAD_BYTES <= self._frame_max_bytes
        if size < missing:
            return None if fits else self._cut(number, data, item, passes=passes)
        del self._rest[number]
        behind = self._ended(number)
        return None if fits and not behind else self._cut(number, data, item, passes=passes) + behind

    def _cut(self, number: int, data: bytes, item: Item, *, passes: bool) -> bytes:
        if not passes:
            return b""
        return b"".join(encode.body_frames(number, data[item[2] : item[3]], self._frame_max_bytes))

    def _ended(self, number: int) -> bytes:
        behind = b"".join(self._behind.pop(number, ()))
        self.behind_bytes -= len(behind)
        return behind

    @property
    def under_way(self) -> bool:
        """Whether the client has the beginning of a content, and not its end."""
        return bool(self._behind)

    def is_open(self, number: int) -> bool:
        """Whether more of a body is to come."""
        return number in self._rest

    def waits(self, data: bytes) -> bool:
        """Puts frames for the client, of one channel, behind a content that is being relayed there. False: there is none."""
        behind = self._behind.get(int.from_bytes(data[1:3], "big")) if self._behind else None
        if behind is None:
            return False
        behind.append(data)
        self.behind_bytes += len(data)
        return True

    def drop(self, number: int) -> bytes:
        """Ends a channel on which the broker sends no more. Returns the frames that waited."""
        self._begun.pop(number, None)
        self._rest.pop(number, None)
        return self._ended(number)
