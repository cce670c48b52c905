"""Contents from the broker that come in pieces: what becomes of one is decided by its method and header; its body follows as it comes.

Rules:
- Nothing of a body is kept: it is passed on or dropped, frame by frame. However many clients are sent something large at once, it costs memory only
  where they do not read, which `flow_control` bounds.
- Until a content that is passed on has ended, nothing else goes to the client on its channel: what the door has to say there comes right behind it.
- Frames that are larger than the client agreed to are cut anew. A header frame cannot be; see `deliver.refit`.
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

PIECES = frozenset((*CONTENT_METHODS, HEADER, BODY))  # what a content that does not come whole consists of

Decide = Callable[[int, bytes, Item], bytes | None]


class ContentRelay:
    """See above. Channels are meant by their numbers at the broker, but where it is said.

    Args:
        frame_max_bytes: What the client agreed to.
        decide: Told of a content's (client's channel, method and header frames, the item that these are): what the client gets instead; None if it
            is them, b"" if nothing of the content.
        is_withheld: Whether what follows on a channel is withheld, as `decide` may have ordered.

    Attributes:
        behind_bytes: What waits for the end of contents that are passed on.
    """

    __slots__ = ("_begun", "_behind", "_decide", "_frame_max_bytes", "_is_withheld", "_rest", "behind_bytes")

    def __init__(self, frame_max_bytes: int, decide: Decide, is_withheld: Callable[[int], bool]) -> None:
        self._frame_max_bytes = frame_max_bytes
        self._decide, self._is_withheld = decide, is_withheld
        self._begun: dict[int, bytes] = {}  # methods whose headers have not come
        self._rest: dict[int, tuple[int, int]] = {}  # octets of body that have not come, and the client's channel; 0 for a body that is dropped
        self._behind: dict[int, list[bytes]] = {}  # by the client's channel, while a content is passed on there
        self.behind_bytes = 0

    def take(self, kind: int, number: int, data: bytes, item: Item, client: int = 0) -> bytes | None:
        """One frame: a method with a content (its id as kind), HEADER or BODY. Returns what the client gets instead; None if it is that frame.

        Args:
            kind, number, data, item: As `scan` gave it out.
            client: The channel's number at the client, if that is another.

        Raises:
            FrameError: It has no place where it stands, or is malformed.
        """
        if kind == BODY:
            return self._body(number, data, item)
        if kind == HEADER:
            return self._header(number, client or number, data[item[2] : item[3]])
        if number in self._begun or number in self._rest:
            raise UnexpectedFrame("content header or body, got a method frame")
        self._begun[number] = data[item[2] : item[3]]
        return b""

    def _header(self, number: int, client: int, payload: bytes) -> bytes:
        method = self._begun.pop(number, b"")
        if not method or len(payload) < HEADER_FIXED_BYTES or int.from_bytes(payload[:4], "big") != BASIC_CLASS:
            raise UnexpectedFrame("method frame, got a content header, or a malformed one")
        first = encode.frame(METHOD, client, method)
        blob = first + encode.frame(HEADER, client, payload)
        item = method_id(method), client, 7, len(first) - 1, len(first) + 7, len(blob) - 1, len(blob)
        replaced = self._decide(client, blob, item)
        given = blob if replaced is None else replaced
        size = body_size(payload)
        if size and not self._is_withheld(number):
            passes = given[7:11] == method[:4]  # else something has come in the content's place
            self._rest[number] = size, client * passes
            if passes:
                self._behind.setdefault(client, [])
        return given

    def _body(self, number: int, data: bytes, item: Item) -> bytes | None:
        missing, client = self._rest.get(number, (0, 0))
        size = item[3] - item[2]
        if size > missing:
            raise FrameError(f"a body of {size - missing} bytes more than its header has told, on channel {number}")
        self._rest[number] = missing - size, client
        fits = client == number and size + FRAME_OVERHEAD_BYTES <= self._frame_max_bytes
        if size < missing:
            return None if fits else self._cut(client, data, item)
        del self._rest[number]
        behind = self._ended(client)
        return None if fits and not behind else self._cut(client, data, item) + behind

    def _cut(self, client: int, data: bytes, item: Item) -> bytes:
        if not client:
            return b""
        return b"".join(encode.body_frames(client, data[item[2] : item[3]], self._frame_max_bytes))

    def _ended(self, client: int) -> bytes:
        behind = b"".join(self._behind.pop(client, ()))
        self.behind_bytes -= len(behind)
        return behind

    @property
    def under_way(self) -> bool:
        """Whether the client has the beginning of a content, and not its end."""
        return bool(self._behind)

    def is_open(self, number: int) -> bool:
        """Whether more is to come of a body."""
        return number in self._rest

    def waits(self, data: bytes) -> bool:
        """Whether these frames for the client, of one channel, come behind a content that is being passed on there."""
        behind = self._behind.get(int.from_bytes(data[1:3], "big")) if self._behind else None
        if behind is None:
            return False
        behind.append(data)
        self.behind_bytes += len(data)
        return True

    def drop(self, number: int) -> bytes:
        """A channel has ended at the broker, which has nothing more to say there. Returns what waited."""
        self._begun.pop(number, None)
        return self._ended(self._rest.pop(number, (0, 0))[1])
