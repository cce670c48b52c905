"""The payload of an AMQP content header (properties and the headers table): finding, stamping, cutting, checking, building. Pure.

Beside `frames`, the other half of the project's hottest code. Rules: nothing is decoded that is not asked for; a header key counts
only as a real top-level key of the table, never where a value merely contains its bytes; what is not touched stays as it was to
the octet. "Payload" is what stands in a header frame: class, weight, body size, property flags, properties.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from math import isfinite

from pamqp import decode

from broker_plugin.building import short_string
from broker_plugin.frames import BASIC_CLASS, HEADER_FIXED_BYTES, FrameError

TABLE_DEPTH_MAX = 64
BODY_SIZE_END = 12  # class, weight, body size
COUNTS = (b"x-delivery-count", b"x-acquired-count")  # of one copy in a quorum queue; RabbitMQ writes them into what it delivers
STAMPS_MAX = 64  # of one connection
STAMPS_BYTES_MAX = 512  # larger headers are rarely equal
ALIKE_BYTES_MAX = 512  # likewise

_ID_KEY, _POSITION_KEY, _DEATH_KEY = b"\x08x-lrq-id", b"\x09x-lrq-pos", b"\x07x-death"
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS, _PERSISTENT, _CORRELATION = 0x80, 0x40, 0x20, 0x10, 0x04  # first octet of the flags
_EXPIRATION, _USER_ID = 0x01, 0x10  # in the first octet of the flags, and in the second
_DELIVERY_AND_PRIORITY, _REPLY_TO = 0x18, 0x02
_ASKS_HERE, _TO_NOBODY = b"\x15amq.rabbitmq.reply-to", b"\x1aamq.rabbitmq.reply-to.gone"
_UP_TO_USER_ID = (  # what may follow the headers table: flag, octets (0: a short string)
    (0x1000, 1),  # delivery-mode
    (0x0800, 1),  # priority
    (0x0400, 0),  # correlation-id
    (0x0200, 0),  # reply-to
    (_EXPIRATION << 8, 0),
    (0x0080, 0),  # message-id
    (0x0040, 8),  # timestamp
    (0x0020, 0),  # type
    (_USER_ID, 0),
)
_u32 = struct.Struct(">I").unpack_from
_pack_u32 = struct.Struct(">I").pack
_pack_i64 = struct.Struct(">q").pack
_pack_header = struct.Struct(">IQ").pack
#: What RabbitMQ reads, 3.10 as 4.3 (measured): the kind `U` of AMQP's own list ends the connection, and so does a float that is not finite.
_FIXED_BYTES = {ord(k): n for k, n in zip("tbBsuIifdlLTDV", (1, 1, 1, 2, 2, 4, 4, 4, 8, 8, 8, 8, 5, 0))}
_LONG_KINDS, _NESTING_KINDS, _STRING_KINDS = frozenset(b"SxFA"), frozenset(b"FA"), frozenset(b"Sx")
_FLOATS = {ord("f"): struct.Struct(">f").unpack_from, ord("d"): struct.Struct(">d").unpack_from}
_CHECKED_KINDS = _NESTING_KINDS | _FLOATS.keys()


def table(payload: bytes) -> tuple[int, int]:
    """(start, end) of the headers table's fields; without a table, where its length would stand, and -1. Raises FrameError."""
    try:
        flags, at = payload[12], HEADER_FIXED_BYTES
        if payload[13] & 1:
            raise FrameError("a content header with more than one word of property flags is not supported")
        if flags & _CONTENT_TYPE:
            at += 1 + payload[at]
        if flags & _CONTENT_ENCODING:
            at += 1 + payload[at]
        if not flags & _HEADERS:
            if at > len(payload):
                raise FrameError("a content header ends too early")
            return at, -1
        end = at + 4 + _u32(payload, at)[0]
    except (IndexError, struct.error) as error:
        raise FrameError("a content header ends too early") from error
    if end > len(payload):
        raise FrameError("the headers table runs past the end of its frame")
    return at + 4, end


def _value_end(payload: bytes, at: int) -> int:
    """The offset after the value whose kind octet stands at `at`."""
    kind = payload[at]
    size = _FIXED_BYTES.get(kind)
    if size is not None:
        return at + 1 + size
    if kind not in _LONG_KINDS:
        raise FrameError(f"a header of the unknown kind {kind}")
    return at + 5 + int(_u32(payload, at + 1)[0])


def fields(payload: bytes, at: int, end: int) -> list[tuple[int, int, int]]:
    """(start, value, end) of each field of the table between two offsets; value is the offset of its kind octet."""
    found = []
    try:
        while at < end:
            value = at + 1 + payload[at]
            after = _value_end(payload, value)
            found.append((at, value, after))
            at = after
    except (IndexError, struct.error) as error:
        raise FrameError("a headers table ends too early") from error
    if at != end:
        raise FrameError("the last header runs past the end of its table")
    return found


def elements(payload: bytes, at: int, end: int) -> list[tuple[int, int]]:
    """(start, end) of each value of the array between two offsets; start is the offset of its kind octet."""
    found = []
    try:
        while at < end:
            after = _value_end(payload, at)
            found.append((at, after))
            at = after
    except (IndexError, struct.error) as error:
        raise FrameError("an array among the headers ends too early") from error
    if at != end:
        raise FrameError("an array's last value runs past its end")
    return found


def _find(payload: bytes, key: bytes) -> int:
    """The offset of the kind octet of the first top-level header `key` (with its length octet); -1 if there is none."""
    hit = payload.find(key, HEADER_FIXED_BYTES)
    if hit < 0:
        return -1
    if hit == 18 and payload[12] & 0xE0 == _HEADERS and payload[14:18] != b"\0\0\0\0":
        return 18 + len(key)  # the first header of a message without content type and encoding: the quickest case
    at, end = table(payload)
    if end < 0:  # the key's bytes stand in another property
        return -1
    if hit == at < end:  # the first header of the table: no walk is needed
        return at + len(key)
    for start, value, _ in fields(payload, at, end):
        if payload.startswith(key, start):
            return value
    return -1


def _long_string(payload: bytes, key: bytes) -> bytes | None:
    at = _find(payload, key)
    try:
        if at < 0 or payload[at] not in _STRING_KINDS:
            return None
        end = at + 5 + _u32(payload, at + 1)[0]
    except (IndexError, struct.error) as error:
        raise FrameError("a headers table ends too early") from error
    if end > len(payload):
        raise FrameError("a header runs past the end of its frame")
    return payload[at + 5 : end]


def header_value(payload: bytes, key: bytes) -> bytes | None:
    """The string value of the first top-level header named `key`; None where there is none or it is no string."""
    return _long_string(payload, bytes((len(key),)) + key)


def replication_id(payload: bytes) -> bytes | None:
    """The value of `x-lrq-id` in a content header's payload, None without one."""
    return _long_string(payload, _ID_KEY)


def position(payload: bytes) -> bytes | None:
    """The value of `x-lrq-pos` in a content header's payload, None without one."""
    return _long_string(payload, _POSITION_KEY)


def field(key: bytes, value: bytes) -> bytes:
    """A header of a table: name and string value."""
    return b"%c%bS%b%b" % (len(key), key, _pack_u32(len(value)), value)


@lru_cache(256)
def _number_name(key: str) -> bytes:
    raw = key.encode()
    return b"%c%bl" % (len(raw), raw)


def number_field(key: str, value: int) -> bytes:
    """A header of a table: name and a signed 64-bit value."""
    return _number_name(key) + _pack_i64(value)


def position_field(value: bytes) -> bytes:
    """The header `x-lrq-pos` with this value."""
    return b"\x09x-lrq-posS" + _pack_u32(len(value)) + value


def stamp(payload: bytes, new_field: bytes) -> bytes:
    """A content header's payload with `new_field` (see `field`) as the last header, and no other of the same name.

    Raises:
        FrameError: The payload's table is malformed (found only where the table has to be walked; see `check_header`).
    """
    key = new_field[: 1 + new_field[0]]
    if payload.find(key, HEADER_FIXED_BYTES) >= 0:
        payload = _cut(payload, key)
    at, end = table(payload)
    if end < 0:
        return b"%b%c%c%b%b%b%b" % (
            payload[:12],
            payload[12] | _HEADERS,
            payload[13],
            payload[14:at],
            _pack_u32(len(new_field)),
            new_field,
            payload[at:],
        )
    return b"".join((payload[: at - 4], _pack_u32(end - at + len(new_field)), payload[at:end], new_field, payload[end:]))


class Alike:
    """Content headers with a position that are, from one to the next, the same but for the body's size and the sequence.

    So are nearly all that one consumer gets, and then the sequence is found by comparing bytes.

    Attributes:
        generation: Of the stamps of those that are like the one that was learnt.
    """

    __slots__ = ("_head", "_tail", "generation")

    def __init__(self) -> None:
        self._head = self._tail = b""
        self.generation = 0

    def sequence(self, payload: bytes) -> int:
        """The sequence in the stamp of a content header that is like the one that was learnt; 0 if it is not."""
        head, tail = self._head, self._tail
        if head and payload.startswith(head, BODY_SIZE_END) and payload.endswith(tail):
            digits = payload[BODY_SIZE_END + len(head) : len(payload) - len(tail)]
            if digits.isdigit():  # one has as many as the other, for the head tells the stamp's length
                return int(digits)
        return 0

    def learn(self, payload: bytes, generation: int) -> None:
        """This is what the next ones are compared with: a content header with a whole stamp, of this generation."""
        if len(payload) > ALIKE_BYTES_MAX:
            return
        at = _find(payload, _POSITION_KEY) + 5
        dot = payload.index(b".", at)
        self._head, self._tail = payload[BODY_SIZE_END : dot + 1], payload[payload.index(b"/", dot) :]
        self.generation = generation


class Stamps:
    """Stamped content headers by their properties: what a publisher has sent once is neither checked nor taken apart again.

    All that follows the body's size in a content header (flags, properties, headers) is mostly the same from message to message. Then the stamped
    header is put together from what stands before and after the sequence in it.

    Attributes:
        turn: The sequence from which on this holds nothing: it has a digit more, so lengths differ.
    """

    __slots__ = ("_affixes", "_known", "turn")

    def __init__(self) -> None:
        self._affixes = (b"", b"")
        self._known: dict[bytes, tuple[bytes, bytes, int]] = {}
        self.turn = 0

    def renew(self, affixes: tuple[bytes, bytes], sequence: int) -> None:
        """Forgets everything unless it holds for a position that begins and ends with `affixes` and has this sequence."""
        if affixes != self._affixes or not self.turn // 10 <= sequence < self.turn:
            self._affixes = affixes
            self._known.clear()
            self.turn = 10 ** len(str(sequence))

    def get(self, properties: bytes) -> tuple[bytes, bytes, int] | None:
        """What stands before and after the sequence, from the flags on, and how much longer the header gets; None for what is not known.

        Args:
            properties: A content header's payload from its property flags on.
        """
        return self._known.get(properties)

    def learn(self, payload: bytes, stamped: bytes, sequence: int) -> None:
        """Takes note of how a content header's payload that was checked, and has no header of the log's, was stamped with this sequence."""
        if len(payload) > STAMPS_BYTES_MAX or b"x-lrq-" in payload:
            return
        if len(self._known) >= STAMPS_MAX:
            self._known.clear()
        at = table(stamped)[1] - len(self._affixes[1])  # behind the sequence: the position is the last header
        self._known[payload[BODY_SIZE_END:]] = (stamped[BODY_SIZE_END : at - len(str(sequence))], stamped[at:], len(stamped) - len(payload))


def cut(payload: bytes, key: bytes) -> bytes:
    """A content header's payload without any top-level header named `key`."""
    key = bytes((len(key),)) + key
    return payload if payload.find(key, HEADER_FIXED_BYTES) < 0 else _cut(payload, key)


def keeps_its_ways(queue: str, key: str, payload: bytes) -> bool:
    """Whether a message that is published to its queue again, by the name of that, has the routing keys it came with: dead letters may go by them."""
    return key == queue and cut(payload, b"CC") == payload


def _cut(payload: bytes, key: bytes) -> bytes:
    at, end = table(payload)
    if end < 0:
        return payload
    return with_table(payload, b"".join(payload[start:after] for start, _, after in fields(payload, at, end) if not payload.startswith(key, start)))


def with_table(payload: bytes, headers: bytes) -> bytes:
    """The payload of a content header that has a table, with these fields in it instead."""
    at, end = table(payload)
    return b"".join((payload[: at - 4], _pack_u32(len(headers)), headers, payload[end:]))


@lru_cache(1 << 14)  # of 2^16 flags that a client may send
def _shape(flags: int) -> tuple[int, int, int, int]:
    """What the flags say follows the headers table: fixed octets, short strings, fixed octets, short strings."""
    if flags & 2:
        raise FrameError("a content header with an unknown property flag")
    delivery_and_priority = (flags & 0x1800).bit_count()
    correlation_to_message_id = (flags & 0x0780).bit_count()
    timestamp = 8 if flags & 0x0040 else 0
    type_to_cluster_id = (flags & 0x003C).bit_count()
    return delivery_and_priority, correlation_to_message_id, timestamp, type_to_cluster_id


def check_header(payload: bytes, depth_max: int = TABLE_DEPTH_MAX) -> None:
    """Checks a content header's payload to the last octet, as the broker will when it is published.

    A broker closes the connection over a malformed header; what goes into the log must therefore be checked before.

    Raises:
        FrameError: It is malformed, holds a number that no broker reads, or is nested deeper than `depth_max`.
    """
    at, end = table(payload)
    fixed, short, more_fixed, more_short = _shape(payload[12] << 8 | payload[13])
    try:
        if end >= 0:
            for _, value, after in fields(payload, at, end):
                if payload[value] in _CHECKED_KINDS:
                    _check_value(payload, value, after, 1, depth_max)
            at = end
        at += fixed
        for _ in range(short):
            at += 1 + payload[at]
        at += more_fixed
        for _ in range(more_short):
            at += 1 + payload[at]
    except IndexError as error:
        raise FrameError("a content header ends too early") from error
    if at != len(payload):
        raise FrameError("the properties of a content header do not end where it ends")


def _check_value(payload: bytes, value: int, end: int, depth: int, depth_max: int) -> None:
    """Of a kind that its length alone does not tell all of."""
    as_number = _FLOATS.get(payload[value])
    if as_number is not None:
        if not isfinite(as_number(payload, value + 1)[0]):
            raise FrameError("a header's number is not finite")
        return
    if depth > depth_max:
        raise FrameError(f"headers nested deeper than {depth_max}: door.header_depth_max")
    at = value + 5
    if payload[value] == ord("F"):
        values = [(inner, after) for _, inner, after in fields(payload, at, end)]
    else:
        values = elements(payload, at, end)
    for inner, after in values:
        if payload[inner] in _CHECKED_KINDS:
            _check_value(payload, inner, after, depth + 1, depth_max)


def routes_on(payload: bytes) -> bool:
    """Whether a content header may name more routing keys than its publish does (CC, BCC). Rather too often than too rarely."""
    return b"\x02CC" in payload or b"\x03BCC" in payload


def further_keys(payload: bytes) -> list[str]:
    """The routing keys that CC and BCC name, of a content header that `check_header` has passed. A broker takes arrays of strings only."""
    found = []
    for key in (b"\x02CC", b"\x03BCC"):
        at = _find(payload, key)
        if at >= 0 and payload[at] == ord("A"):
            values = elements(payload, at + 5, _value_end(payload, at))
            found += [payload[value + 5 : end] for value, end in values if payload[value] in _STRING_KINDS]
    return [each.decode("utf-8", "surrogateescape") for each in found]


def is_judged(payload: bytes) -> bool:
    """Whether a content header may hold what a broker judges beside its form: expiration, user-id, CC, BCC. Rather too often than too rarely."""
    return bool(payload[12] & _EXPIRATION or payload[13] & _USER_ID) or routes_on(payload)


def judged(payload: bytes) -> tuple[list[bytes], bytes | None, bytes | None]:
    """The fields CC and BCC, the expiration and the user-id of a content header that `check_header` has passed; None where there is none."""
    start, end = table(payload)
    copies = []
    for key in (b"\x02CC", b"\x03BCC"):
        if end >= 0 and (found := next((f for f in fields(payload, start, end) if payload.startswith(key, f[0])), None)) is not None:
            copies.append(payload[found[0] : found[2]])
    values: list[bytes | None] = []
    at, flags = end if end >= 0 else start, payload[12] << 8 | payload[13]
    for flag, size in _UP_TO_USER_ID:
        value = None
        if flags & flag:
            after = at + (size or 1 + payload[at])
            value, at = payload[at + 1 : after], after
        if flag in (_EXPIRATION << 8, _USER_ID):
            values.append(value)
    expiration, user_id = values
    return copies, expiration, user_id


def asked_by_nobody(payload: bytes) -> bytes:
    """The payload of a content header that `check_header` has passed, with a direct reply-to whose client has gone; without one, as it is.

    A broker takes `amq.rabbitmq.reply-to` only from the channel that waits for the answer, and makes an address of that one out of it. Answers to
    the address that stands there instead now, it drops.
    """
    if not payload[12] & _REPLY_TO or payload.find(_ASKS_HERE, HEADER_FIXED_BYTES) < 0:
        return payload
    start, end = table(payload)
    at = (end if end >= 0 else start) + (payload[12] & _DELIVERY_AND_PRIORITY).bit_count()
    if payload[12] & _CORRELATION:
        at += 1 + payload[at]
    if not payload.startswith(_ASKS_HERE, at):  # they stand in another property
        return payload
    return payload[:at] + _TO_NOBODY + payload[at + len(_ASKS_HERE) :]


def is_array(field: bytes) -> bool:
    """Whether the value of a field of the table is an array."""
    return field[1 + field[0]] == ord("A")


VISITS_MAX = (1 << 31) - 1  # what the log can name


def deaths(payload: bytes) -> tuple[tuple[str, int], ...]:
    """(queue, visits) for each queue that `x-death` names, visits being the sum of the counts of its entries (R10).

    The queue of the first death comes first. Anybody may publish a message with such a header: what no broker writes there counts for nothing.
    """
    at = _find(payload, _DEATH_KEY)
    if at < 0 or payload[at] != ord("A"):
        return ()
    try:
        end = _value_end(payload, at)
        _check_value(payload, at, end, 1, TABLE_DEPTH_MAX)
        entries = decode.field_array(payload[at + 1 : end])[1]
    except (FrameError, IndexError, struct.error, ValueError, OverflowError):
        return ()
    visits: dict[str, int] = {}
    for entry in entries:
        if isinstance(entry, dict):
            queue, count = entry.get("queue"), entry.get("count")
            if isinstance(queue, str) and isinstance(count, int) and not isinstance(count, bool) and count > 0:
                visits[queue] = min(visits.get(queue, 0) + count, VISITS_MAX)
    first = header_value(payload, b"x-first-death-queue")
    origin = first.decode("utf-8", "surrogateescape") if first is not None else ""
    if origin in visits:
        return ((origin, visits.pop(origin)), *visits.items())
    return tuple(visits.items())


def header_payload(body_bytes: int, properties: bytes = b"\0\0") -> bytes:
    """A content header's payload. `properties` are the property flags and what follows them."""
    return _pack_header(BASIC_CLASS, body_bytes) + properties


def properties(
    headers: bytes = b"",
    persistent: bool = True,
    content_type: str | None = None,
    correlation_id: str | None = None,
    expiration: bytes | None = None,
    user_id: bytes | None = None,
) -> bytes:
    """Property flags and values. `headers` are fields (see `field`) one after the other; empty means no table."""
    flags, more, parts = 0, 0, []
    if content_type is not None:
        flags |= _CONTENT_TYPE
        parts.append(short_string(content_type))
    if headers:
        flags |= _HEADERS
        parts += [_pack_u32(len(headers)), headers]
    if persistent:
        flags |= _PERSISTENT
        parts.append(b"\x02")
    if correlation_id is not None:
        flags |= _CORRELATION
        parts.append(short_string(correlation_id))
    if expiration is not None:
        flags |= _EXPIRATION
        parts.append(b"%c%b" % (len(expiration), expiration))
    if user_id is not None:
        more |= _USER_ID
        parts.append(b"%c%b" % (len(user_id), user_id))
    return b"%c%c%b" % (flags, more, b"".join(parts))
