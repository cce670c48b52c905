"""The payload of an AMQP content header (properties and the headers table): finding, stamping, cutting, checking,
building. Pure.

With `frames`, the project's hottest code. "Payload" is the payload of a header frame: class, weight, body size,
property flags, properties.

Rules:
- Only the requested parts are decoded.
- A header key counts only as a real top-level key of the table, never where a value merely contains its bytes.
- Untouched parts stay as they were to the octet.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from math import isfinite

from pamqp import decode

from broker_plugin.amqp.encode import short_string
from broker_plugin.amqp.frames import BASIC_CLASS, HEADER_FIXED_BYTES, FrameError

TABLE_DEPTH_MAX = 64
BODY_SIZE_END = 12  # class, weight, body size
COUNTS = (b"x-delivery-count", b"x-acquired-count")  # of one copy in a quorum queue; RabbitMQ writes them into its deliveries

ID_KEY, POSITION_KEY, _DEATH_KEY = b"\x08x-lrq-id", b"\x09x-lrq-pos", b"\x07x-death"
_CONTENT_TYPE, _CONTENT_ENCODING, HEADERS_FLAG, _PERSISTENT, _CORRELATION = 0x80, 0x40, 0x20, 0x10, 0x04  # first octet of the flags
_EXPIRATION, _USER_ID = 0x01, 0x10  # in the first octet of the flags, and in the second
_DELIVERY_AND_PRIORITY, _REPLY_TO = 0x18, 0x02
_ASKS_HERE, _TO_NOBODY = b"\x15amq.rabbitmq.reply-to", b"\x1aamq.rabbitmq.reply-to.gone"
_UP_TO_USER_ID = (  # the properties that may follow the headers table: flag, octets (0: a short string)
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
pack_u32 = struct.Struct(">I").pack
_pack_i64 = struct.Struct(">q").pack
_pack_header = struct.Struct(">IQ").pack
# The kinds that RabbitMQ 3.10 and 4.3 read (measured): the kind `U` of AMQP's own list ends the connection, as does a
# float that is not finite.
_FIXED_BYTES = {ord(k): n for k, n in zip("tbBsuIifdlLTDV", (1, 1, 1, 2, 2, 4, 4, 4, 8, 8, 8, 8, 5, 0))}
_LONG_KINDS, _NESTING_KINDS, _STRING_KINDS = frozenset(b"SxFA"), frozenset(b"FA"), frozenset(b"Sx")
_FLOATS = {ord("f"): struct.Struct(">f").unpack_from, ord("d"): struct.Struct(">d").unpack_from}
_CHECKED_KINDS = _NESTING_KINDS | _FLOATS.keys()


def table(payload: bytes) -> tuple[int, int]:
    """(start, end) of the headers table's fields; without a table, where its length would be, and -1. Raises FrameError."""
    try:
        flags, at = payload[12], HEADER_FIXED_BYTES
        if payload[13] & 1:
            raise FrameError("a content header with more than one word of property flags is not supported")
        if flags & _CONTENT_TYPE:
            at += 1 + payload[at]
        if flags & _CONTENT_ENCODING:
            at += 1 + payload[at]
        if not flags & HEADERS_FLAG:
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
    """The offset after the value whose kind octet is at `at`."""
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


def find_field(payload: bytes, key: bytes) -> int:
    """The offset of the kind octet of the first top-level header `key` (with its length octet); -1 if there is none."""
    hit = payload.find(key, HEADER_FIXED_BYTES)
    if hit < 0:
        return -1
    if hit == 18 and payload[12] & 0xE0 == HEADERS_FLAG and payload[14:18] != b"\0\0\0\0":
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


def string_value(payload: bytes, key: bytes) -> bytes | None:
    at = find_field(payload, key)
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
    """The string value of the first top-level header named `key`; None if there is none or it is no string."""
    return string_value(payload, bytes((len(key),)) + key)


def field(key: bytes, value: bytes) -> bytes:
    """A header of a table: name and string value."""
    return b"%c%bS%b%b" % (len(key), key, pack_u32(len(value)), value)


@lru_cache(256)
def _number_name(key: str) -> bytes:
    raw = key.encode()
    return b"%c%bl" % (len(raw), raw)


def number_field(key: str, value: int) -> bytes:
    """A header of a table: name and a signed 64-bit value."""
    return _number_name(key) + _pack_i64(value)


def cut(payload: bytes, key: bytes) -> bytes:
    """A content header's payload without any top-level header named `key`."""
    key = bytes((len(key),)) + key
    return payload if payload.find(key, HEADER_FIXED_BYTES) < 0 else without_field(payload, key)


def keeps_its_ways(queue: str, key: str, payload: bytes) -> bool:
    """Whether a message keeps its routing keys when it is published again by its queue's name: dead letters may go by them."""
    return key == queue and cut(payload, b"CC") == payload


def without_field(payload: bytes, key: bytes) -> bytes:
    at, end = table(payload)
    if end < 0:
        return payload
    return with_table(payload, b"".join(payload[start:after] for start, _, after in fields(payload, at, end) if not payload.startswith(key, start)))


def with_table(payload: bytes, headers: bytes) -> bytes:
    """The payload of a content header that has a table, with that table's fields replaced."""
    at, end = table(payload)
    return b"".join((payload[: at - 4], pack_u32(len(headers)), headers, payload[end:]))


@lru_cache(1 << 14)  # of 2^16 flags that a client may send
def _shape(flags: int) -> tuple[int, int, int, int]:
    """The properties after the headers table, by the flags: fixed octets, short strings, fixed octets, short strings."""
    if flags & 2:
        raise FrameError("a content header with an unknown property flag")
    delivery_and_priority = (flags & 0x1800).bit_count()
    correlation_to_message_id = (flags & 0x0780).bit_count()
    timestamp = 8 if flags & 0x0040 else 0
    type_to_cluster_id = (flags & 0x003C).bit_count()
    return delivery_and_priority, correlation_to_message_id, timestamp, type_to_cluster_id


def check_header(payload: bytes, depth_max: int = TABLE_DEPTH_MAX) -> None:
    """Checks a content header's payload to the last octet, as the broker will when it is published.

    A broker closes the connection over a malformed header, so every header is checked before it goes into the log.

    Raises:
        FrameError: The header is malformed, holds a number that no broker reads, or is nested deeper than `depth_max`.
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
    """Checks a value of a kind that its length alone does not check."""
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
    """Whether a content header may name more routing keys than its publish does (CC, BCC). Errs towards true."""
    return b"\x02CC" in payload or b"\x03BCC" in payload


def further_keys(payload: bytes) -> list[str]:
    """The routing keys that CC and BCC name, of a content header that `check_header` has passed. A broker takes arrays of strings only."""
    found = []
    for key in (b"\x02CC", b"\x03BCC"):
        at = find_field(payload, key)
        if at >= 0 and payload[at] == ord("A"):
            values = elements(payload, at + 5, _value_end(payload, at))
            found += [payload[value + 5 : end] for value, end in values if payload[value] in _STRING_KINDS]
    return [each.decode("utf-8", "surrogateescape") for each in found]


def is_judged(payload: bytes) -> bool:
    """Whether a content header may hold values that a broker judges: expiration, user-id, CC, BCC. Errs towards true."""
    return bool(payload[12] & _EXPIRATION or payload[13] & _USER_ID) or routes_on(payload)


def judged(payload: bytes) -> tuple[list[bytes], bytes | None, bytes | None]:
    """The fields CC and BCC, the expiration and the user-id of a content header that `check_header` has passed;
    None for a missing one.
    """
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
    """Replaces a direct reply-to in a checked content header's payload by one whose client has gone; without one,
    returns it as it is.

    A broker takes `amq.rabbitmq.reply-to` only from the channel that waits for the answer, and makes an address of
    that channel out of it. The broker drops answers to the address that replaces it.
    """
    if not payload[12] & _REPLY_TO or payload.find(_ASKS_HERE, HEADER_FIXED_BYTES) < 0:
        return payload
    start, end = table(payload)
    at = (end if end >= 0 else start) + (payload[12] & _DELIVERY_AND_PRIORITY).bit_count()
    if payload[12] & _CORRELATION:
        at += 1 + payload[at]
    if not payload.startswith(_ASKS_HERE, at):  # the bytes stand in another property
        return payload
    return payload[:at] + _TO_NOBODY + payload[at + len(_ASKS_HERE) :]


def is_array(field: bytes) -> bool:
    """Whether the value of a field of the table is an array."""
    return field[1 + field[0]] == ord("A")


VISITS_MAX = (1 << 31) - 1  # the most that the log can hold


def deaths(payload: bytes) -> tuple[tuple[str, int], ...]:
    """(queue, visits) for each queue that `x-death` names; visits is the sum of the counts of its entries (R10).

    The queue of the first death comes first. Any client may publish such a header: values that no broker writes are
    ignored.
    """
    at = find_field(payload, _DEATH_KEY)
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
        flags |= HEADERS_FLAG
        parts += [pack_u32(len(headers)), headers]
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
