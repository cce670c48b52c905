"""The stamp of a message: the position in the log that its header carries, and replication IDs. No I/O."""

from __future__ import annotations

from broker_plugin.amqp.frames import HEADER_FIXED_BYTES
from lrq_ha.errors import LrqError
from lrq_ha.replication.applied import STAMP_MAX_BYTES, parse_stamp

from ..amqp import content_header
from ..amqp.content_header import BODY_SIZE_END, HEADERS_FLAG, ID_KEY, POSITION_KEY

STAMPS_MAX = 64  # of one connection
STAMPS_BYTES_MAX = 512  # larger headers are rarely equal
ALIKE_BYTES_MAX = 512  # larger headers are rarely equal


def replication_id(payload: bytes) -> bytes | None:
    """The value of `x-lrq-id` in a content header's payload, None without one."""
    return content_header.string_value(payload, ID_KEY)


def position(payload: bytes) -> bytes | None:
    """The value of `x-lrq-pos` in a content header's payload, None without one."""
    return content_header.string_value(payload, POSITION_KEY)


def find_stamp(payload: bytes) -> tuple[int, int] | None:
    """(sequence, generation) of the stamp in a content header's payload; None if there is none that a door wrote."""
    value = position(payload)
    try:
        return None if value is None else parse_stamp(value)[1:]
    except LrqError:
        return None


def position_field(value: bytes) -> bytes:
    """The header `x-lrq-pos` with this value."""
    return b"\x09x-lrq-posS" + content_header.pack_u32(len(value)) + value


def stamp(payload: bytes, new_field: bytes) -> bytes:
    """A content header's payload with `new_field` (see `field`) as the last header, and no other of that name.

    Raises:
        FrameError: The payload's table is malformed (found only where the table has to be walked; see
            `check_header`).
    """
    key = new_field[: 1 + new_field[0]]
    if payload.find(key, HEADER_FIXED_BYTES) >= 0:
        payload = content_header.without_field(payload, key)
    at, end = content_header.table(payload)
    if end < 0:
        return b"%b%c%c%b%b%b%b" % (
            payload[:12],
            payload[12] | HEADERS_FLAG,
            payload[13],
            payload[14:at],
            content_header.pack_u32(len(new_field)),
            new_field,
            payload[at:],
        )
    return b"".join((payload[: at - 4], content_header.pack_u32(end - at + len(new_field)), payload[at:end], new_field, payload[end:]))


class HeaderCache:
    """Caches the last stamped content header: consecutive ones mostly differ only in body size and sequence.

    The sequence of a similar header is found by comparing bytes.

    Attributes:
        generation: In the stamps of headers that are like the learnt one.
    """

    __slots__ = ("_head", "_tail", "generation")

    def __init__(self) -> None:
        self._head = self._tail = b""
        self.generation = 0

    def sequence(self, payload: bytes) -> int:
        """The sequence in the stamp of a content header that is like the learnt one; 0 if the header is not."""
        head, tail = self._head, self._tail
        if head and payload.startswith(head, BODY_SIZE_END) and payload.endswith(tail):
            digits = payload[BODY_SIZE_END + len(head) : len(payload) - len(tail)]
            if digits.isdigit():  # the number of digits is fixed, as the head holds the stamp's length
                return int(digits)
        return 0

    def learn(self, payload: bytes, generation: int) -> None:
        """Learns a content header with a whole stamp of this generation, for comparison with the next ones."""
        if len(payload) > ALIKE_BYTES_MAX:
            return
        at = content_header.find_field(payload, POSITION_KEY) + 5
        dot = payload.index(b".", at)
        self._head, self._tail = payload[BODY_SIZE_END : dot + 1], payload[payload.index(b"/", dot) :]
        self.generation = generation


class StampCache:
    """Stamped content headers by their properties: properties that a publisher repeats are neither checked nor
    parsed again.

    Everything behind the body's size in a content header (flags, properties, headers) mostly repeats from message to
    message. Then the stamped header is put together from the bytes before and after the sequence.

    Attributes:
        turn: The sequence from which on the cache is invalid: it has one digit more, so lengths differ.
    """

    __slots__ = ("_affixes", "_known", "turn")

    def __init__(self) -> None:
        self._affixes = (b"", b"")
        self._known: dict[bytes, tuple[bytes, bytes, int]] = {}
        self.turn = 0

    def renew(self, affixes: tuple[bytes, bytes], sequence: int) -> None:
        """Forgets everything unless the cache is valid for a position that begins and ends with `affixes` and has this sequence."""
        if affixes != self._affixes or not self.turn // 10 <= sequence < self.turn:
            self._affixes = affixes
            self._known.clear()
            self.turn = 10 ** len(str(sequence))

    def get(self, properties: bytes) -> tuple[bytes, bytes, int] | None:
        """The bytes before and after the sequence, from the flags on, and how much longer the header gets; None if
        unknown.

        Args:
            properties: A content header's payload from its property flags on.
        """
        return self._known.get(properties)

    def learn(self, payload: bytes, stamped: bytes, sequence: int) -> None:
        """Learns how a content header's payload, checked and without a header of the log's, was stamped with this sequence."""
        if len(payload) > STAMPS_BYTES_MAX or b"x-lrq-" in payload:
            return
        if len(self._known) >= STAMPS_MAX:
            self._known.clear()
        at = content_header.table(stamped)[1] - len(self._affixes[1])  # behind the sequence: the position is the last header
        self._known[payload[BODY_SIZE_END:]] = (stamped[BODY_SIZE_END : at - len(str(sequence))], stamped[at:], len(stamped) - len(payload))


POSITION_BYTES_MAX = 4 + len(position_field(b"")) + STAMP_MAX_BYTES  # the most that a stamp adds to a content header
