"""Finds AMQP 0-9-1 frames and whole contents in a buffer, and reads methods. Pure.

This is the project's hottest code (every message passes here several times): it works on offsets into the buffer of
the socket and copies only what the caller asks for.

Rules:
- `scan` takes the regular case in one tight loop (a method, its header and its bodies, one after the other, on one
  channel) and leaves everything else to `_one_frame`, which alone knows why bytes are wrong. Malformed bytes raise
  FrameError, nothing else.
- Rare methods are decoded with pamqp; only methods that have to be quick or exact to the byte are read here.
- `content_assembly` joins contents that come in pieces, `content_header` reads their headers, `encode` makes all
  frames that are sent.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from pamqp import base, commands, exceptions

from lrq_ha.errors import MalformedInput

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
FRAME_END = 0xCE
PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
HEARTBEAT_FRAME = b"\x08\x00\x00\x00\x00\x00\x00\xce"

FRAME_OVERHEAD_BYTES = 8
FRAME_MAX_BYTES = 131_072  # RabbitMQ's default offer; counts the overhead
FRAME_MAX_ANY_BYTES = 1 << 31  # any negotiated value
CHANNELS_MAX = 65_535  # there are no more numbers
HEADROOM_BYTES = 512  # clients are offered so much less than the broker takes: room for a position in a content's header frame
FRAME_MIN_BYTES = 4_096  # the least frame_max the protocol allows
HOLD_BYTES_MAX = 262_144  # an unfinished content is waited for as a whole up to here, then given out frame by frame
HOLD_FRAMES_MAX = 64  # as HOLD_BYTES_MAX, in frames
ROUTES_MAX = 4_096  # how many parsed methods are remembered

# (class << 16 | method), the first four octets of a method frame's payload
CONNECTION_START, CONNECTION_START_OK = 0x000A000A, 0x000A000B
CONNECTION_SECURE, CONNECTION_SECURE_OK = 0x000A0014, 0x000A0015
CONNECTION_TUNE, CONNECTION_TUNE_OK = 0x000A001E, 0x000A001F
CONNECTION_OPEN, CONNECTION_OPEN_OK = 0x000A0028, 0x000A0029
CONNECTION_CLOSE, CONNECTION_CLOSE_OK = 0x000A0032, 0x000A0033
CONNECTION_CLASS = 10  # the upper half of those ids: the methods of channel 0
CONNECTION_BLOCKED, CONNECTION_UNBLOCKED = 0x000A003C, 0x000A003D
CONNECTION_UPDATE_SECRET, CONNECTION_UPDATE_SECRET_OK = 0x000A0046, 0x000A0047
CHANNEL_OPEN, CHANNEL_OPEN_OK = 0x0014000A, 0x0014000B
CHANNEL_FLOW, CHANNEL_FLOW_OK = 0x00140014, 0x00140015
CHANNEL_CLOSE, CHANNEL_CLOSE_OK = 0x00140028, 0x00140029
ACCESS_REQUEST, ACCESS_REQUEST_OK = 0x001E000A, 0x001E000B
EXCHANGE_DECLARE, EXCHANGE_DECLARE_OK = 0x0028000A, 0x0028000B
EXCHANGE_DELETE, EXCHANGE_DELETE_OK = 0x00280014, 0x00280015
EXCHANGE_BIND, EXCHANGE_BIND_OK = 0x0028001E, 0x0028001F
EXCHANGE_UNBIND, EXCHANGE_UNBIND_OK = 0x00280028, 0x00280033
QUEUE_DECLARE, QUEUE_DECLARE_OK = 0x0032000A, 0x0032000B
QUEUE_BIND, QUEUE_BIND_OK = 0x00320014, 0x00320015
QUEUE_PURGE, QUEUE_PURGE_OK = 0x0032001E, 0x0032001F
QUEUE_DELETE, QUEUE_DELETE_OK = 0x00320028, 0x00320029
QUEUE_UNBIND, QUEUE_UNBIND_OK = 0x00320032, 0x00320033
BASIC_QOS, BASIC_QOS_OK = 0x003C000A, 0x003C000B
BASIC_CONSUME, BASIC_CONSUME_OK = 0x003C0014, 0x003C0015
BASIC_CANCEL, BASIC_CANCEL_OK = 0x003C001E, 0x003C001F
BASIC_PUBLISH, BASIC_RETURN, BASIC_DELIVER = 0x003C0028, 0x003C0032, 0x003C003C
BASIC_GET, BASIC_GET_OK, BASIC_GET_EMPTY = 0x003C0046, 0x003C0047, 0x003C0048
BASIC_ACK, BASIC_REJECT, BASIC_NACK = 0x003C0050, 0x003C005A, 0x003C0078
BASIC_RECOVER_ASYNC, BASIC_RECOVER, BASIC_RECOVER_OK = 0x003C0064, 0x003C006E, 0x003C006F
CONFIRM_SELECT, CONFIRM_SELECT_OK = 0x0055000A, 0x0055000B
TX_SELECT, TX_SELECT_OK = 0x005A000A, 0x005A000B
TX_COMMIT, TX_COMMIT_OK = 0x005A0014, 0x005A0015
TX_ROLLBACK, TX_ROLLBACK_OK = 0x005A001E, 0x005A001F

CONTENT_METHODS = frozenset({BASIC_PUBLISH, BASIC_RETURN, BASIC_DELIVER, BASIC_GET_OK})

METHOD_MIN = 1 << 16  # there is no class 0: ids of its methods would collide with the kinds of frames
ACK_BYTES = 13  # of the payload of a basic.ack: method, delivery tag, bits
BASIC_CLASS = 60 << 16  # class and weight of a content header
HEADER_FIXED_BYTES = 14  # class, weight, body size, property flags

_method_head = struct.Struct(">BHII").unpack_from  # type, channel, size, method
_header_head = struct.Struct(">BBHIIQ").unpack_from  # end of the frame before, type, channel, size, class and weight, body size
_body_head = struct.Struct(">BBHI").unpack_from  # end of the frame before, type, channel, size
_frame_head = struct.Struct(">BHI").unpack_from
_u32 = struct.Struct(">I").unpack_from
_u64 = struct.Struct(">Q").unpack_from

Buffer: TypeAlias = bytes | bytearray
Item: TypeAlias = tuple[int, int, int, int, int, int, int]
"""What `scan` finds: (kind, channel, start, end, header, header_end, stop), all offsets into the buffer.

A method frame: kind is the method's id, start .. end its payload (id included), the rest 0. A whole content: the same, and
header .. header_end is the payload of its header frame, stop is where the next frame begins. A header, body or heartbeat frame
by itself (a content that came in pieces): kind is HEADER, BODY or HEARTBEAT, start .. end its payload, the rest 0.
"""


class FrameError(MalformedInput):
    """Bytes that are not AMQP 0-9-1, or that exceed a limit. Their connection cannot be used any more.

    Attributes:
        code, cause: For connection.close: reply code, id of the method.
        before: The items that `scan` found before those bytes, and their offset.
    """

    code, cause = 501, 0
    before: tuple[list[Item], int] = ([], 0)


# --- finding frames ---------------------------------------------------------------------------------------------------------


def scan(
    buffer: Buffer, start: int = 0, frame_max_bytes: int = FRAME_MAX_BYTES, hold_bytes_max: int = HOLD_BYTES_MAX
) -> tuple[list[Item], int]:
    """Finds all complete frames and contents from `start` on.

    Args:
        buffer: The rest of an earlier call, and then the bytes from the socket.
        start: Offset of a frame's first octet.
        frame_max_bytes: The negotiated frame_max, which counts the 8 octets around a payload.
        hold_bytes_max: A content whose end has not arrived is left over as a whole while it has fewer bytes than
            this.

    Returns:
        The items in order, and the offset of the first octet that was not used; keep the rest for the next call.

    Raises:
        FrameError: On a bad end octet, a frame over the limit, an unknown frame type. Its `before` has the earlier
            items.
    """
    payload_max = frame_max_bytes - FRAME_OVERHEAD_BYTES
    items: list[Item] = []
    append = items.append
    at, length = start, len(buffer)
    alike: Buffer = b""  # the bytes that two publishes in a row had in common, all but their bodies' octets: a match alone identifies the next one
    method = channel = before = to_end = to_header = step = 0
    while at < length:
        ran_out = False
        try:
            while at < length:
                if alike:
                    if buffer[at : at + before] == alike and buffer[at + step - 1] == FRAME_END:
                        append((method, channel, at + 7, at + to_end, at + to_header, at + before - 8, at + step))
                        at += step
                        continue
                    alike = b""
                kind, channel, size, method = _method_head(buffer, at)
                if kind != METHOD or size > payload_max or size < 4:
                    break
                end = at + 7 + size
                if method not in CONTENT_METHODS:
                    if buffer[end] != FRAME_END or method < METHOD_MIN:
                        break
                    append((method, channel, at + 7, end, 0, 0, 0))
                    at = end + 1
                    continue
                octet, kind, same, size, weight, body = _header_head(buffer, end)
                if (
                    octet != FRAME_END
                    or kind != HEADER
                    or same != channel
                    or weight != BASIC_CLASS
                    or not HEADER_FIXED_BYTES <= size <= payload_max
                ):
                    break
                header = end + 8
                stop = header_end = header + size
                while body:
                    octet, kind, same, size = _body_head(buffer, stop)
                    if octet != FRAME_END or kind != BODY or same != channel or not 0 < size <= body or size > payload_max:
                        break
                    body -= size
                    stop += size + 8
                if body or buffer[stop] != FRAME_END:
                    break
                stop += 1
                append((method, channel, at + 7, end, header, header_end, stop))
                if step == stop - at and method == BASIC_PUBLISH and stop == header_end + 9 + size:
                    alike, before, to_end, to_header = buffer[at : header_end + 8], header_end + 8 - at, end - at, header - at
                step = stop - at
                at = stop
        except (struct.error, IndexError):
            ran_out = True
        try:
            item = _one_frame(buffer, at, payload_max)
        except FrameError as error:
            error.before = items, at
            raise
        if item is None or (ran_out and item[0] in CONTENT_METHODS and length - at < hold_bytes_max and _few_frames(buffer, at)):
            break
        append(item)
        at = item[3] + 1
    return items, at


def _few_frames(buffer: Buffer, at: int) -> bool:
    """Whether the rest is cheap to scan again each time that more bytes come: a body in thousands of tiny frames is not."""
    length = len(buffer)
    for _ in range(HOLD_FRAMES_MAX):
        if at + 7 > length:
            return True
        at += int(_u32(buffer, at + 3)[0]) + FRAME_OVERHEAD_BYTES
    return False


def _one_frame(buffer: Buffer, at: int, payload_max: int) -> Item | None:
    """The frame at `at` taken by itself; None if it is not complete yet."""
    available = len(buffer) - at
    if available < 1:
        return None
    kind = buffer[at]
    if kind not in (METHOD, HEADER, BODY, HEARTBEAT):
        raise FrameError(f"octet {kind} at {at} is not a frame type", todo="Check that the other side speaks AMQP 0-9-1")
    if available < 7:
        return None
    kind, channel, size = _frame_head(buffer, at)
    if size > payload_max:
        raise FrameError(
            f"a frame of {size + FRAME_OVERHEAD_BYTES} bytes on channel {channel} exceeds "
            f"the negotiated frame_max of {payload_max + FRAME_OVERHEAD_BYTES}"
        )
    if available < size + FRAME_OVERHEAD_BYTES:
        return None
    end = at + 7 + size
    if buffer[end] != FRAME_END:
        raise FrameError(f"a frame of type {kind} on channel {channel} ends with octet {buffer[end]}, not {FRAME_END}")
    if kind == METHOD:
        if size < 4:
            raise FrameError(f"a method frame of {size} bytes on channel {channel} holds no method")
        kind = _u32(buffer, at + 7)[0]
        if kind < METHOD_MIN:
            raise FrameError(f"there is no method {kind:#010x}, as a frame on channel {channel} has it")
    return kind, channel, at + 7, end, 0, 0, 0


def end_of(item: Item) -> int:
    """The offset of the first octet behind an item."""
    return item[6] or item[3] + 1


def body_of(buffer: Buffer, header_end: int, stop: int) -> bytes:
    """The body of a whole content that `scan` found, copied out of its body frames."""
    at = header_end + 1
    if at == stop:
        return b""
    size = _u32(buffer, at + 3)[0]
    if at + size + 8 == stop:
        return bytes(buffer[at + 7 : stop - 1])
    parts = []
    while at < stop:
        size = _u32(buffer, at + 3)[0]
        parts.append(buffer[at + 7 : at + 7 + size])
        at += size + 8
    return b"".join(parts)


def body_size(buffer: Buffer, header: int = 0) -> int:
    """The body size of a content, from the payload of its header frame, which begins at `header`."""
    return int(_u64(buffer, header + 4)[0])


# --- reading methods --------------------------------------------------------------------------------------------------------


def method_id(payload: bytes) -> int:
    """The method of a method frame's payload: class and method, as in the constants above. 0: the payload is empty."""
    return int.from_bytes(payload[:4], "big")


def behind_names(payload: bytes, names: int) -> int:
    """The offset of the flags in a method's payload: behind a short and `names` names. Raises IndexError if the
    payload ends before.
    """
    at = 6
    for _ in range(names):
        at += 1 + payload[at]
    return at


def decode_method(payload: bytes) -> base.Frame:
    """A method frame's payload as pamqp's object, for the rare methods.

    Raises:
        FrameError: An unknown method or malformed arguments.
    """
    try:
        method: base.Frame = commands.INDEX_MAPPING[_u32(payload)[0]]()
        method.unmarshal(payload[4:])
    except (struct.error, ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as error:
        raise FrameError(_undecodable(payload, error)) from None  # the error's text may hold arguments of the method
    except exceptions.PAMQPException as error:
        raise FrameError(_undecodable(payload, error)) from None
    return method


def _undecodable(payload: bytes, error: Exception) -> str:
    return f"a method of {len(payload)} bytes, {payload[:4].hex()}, cannot be decoded ({type(error).__name__})"


class Route(NamedTuple):
    """Where a publish goes. Names that are not UTF-8 survive as surrogate escapes."""

    exchange: str
    routing_key: str
    mandatory: bool
    immediate: bool


class Origin(NamedTuple):
    """The routing of a basic.deliver, get-ok or return: all but its tags."""

    redelivered: bool
    exchange: str
    routing_key: str


def _short(payload: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + payload[at]
    if end > len(payload):
        raise FrameError(f"a short string at {at} runs past the end of its frame")
    return payload[at + 1 : end].decode("utf-8", "surrogateescape"), end


@lru_cache(ROUTES_MAX)
def publish_route(payload: bytes) -> Route:
    """The arguments of a basic.publish from its frame's payload; cached, as publishers repeat themselves."""
    try:
        exchange, at = _short(payload, 6)
        routing_key, at = _short(payload, at)
        bits = payload[at]
    except IndexError as error:
        raise FrameError("a basic.publish ends too early") from error
    if at + 1 != len(payload):
        raise FrameError("a basic.publish is longer than its arguments")
    return Route(exchange, routing_key, bool(bits & 1), bool(bits & 2))


@lru_cache(ROUTES_MAX)
def _origin(arguments: bytes) -> Origin:
    exchange, at = _short(arguments, 1)
    routing_key, at = _short(arguments, at)
    return Origin(bool(arguments[0] & 1), exchange, routing_key)


def deliver_arguments(payload: bytes) -> tuple[bytes, int, Origin]:
    """(consumer tag, delivery tag, origin) of a basic.deliver from its frame's payload."""
    try:
        at = 5 + payload[4]
        return payload[5:at], _u64(payload, at)[0], _origin(payload[at + 8 :])
    except (IndexError, struct.error) as error:
        raise FrameError("a basic.deliver ends too early") from error


def get_ok_arguments(payload: bytes) -> tuple[int, Origin]:
    """(delivery tag, origin) of a basic.get-ok from its frame's payload; the message count is left out."""
    try:
        return _u64(payload, 4)[0], _origin(payload[12:-4])
    except (IndexError, struct.error) as error:
        raise FrameError("a basic.get-ok ends too early") from error


def return_arguments(payload: bytes) -> tuple[int, str, str, str]:
    """(reply code, reply text, exchange, routing key) of a basic.return from its frame's payload; a key need not be UTF-8."""
    try:
        text, at = _short(payload, 6)
        exchange, at = _short(payload, at)
        return int.from_bytes(payload[4:6], "big"), text, exchange, _short(payload, at)[0]
    except IndexError as error:
        raise FrameError("a basic.return ends too early") from error


def close_arguments(payload: bytes) -> tuple[int, str]:
    """(reply code, reply text) of a channel.close or connection.close from its frame's payload. The text may be
    cut, or not be UTF-8.
    """
    try:
        return int.from_bytes(payload[4:6], "big"), payload[7 : 7 + payload[6]].decode("utf-8", "replace")
    except IndexError as error:
        raise FrameError("a close ends too early") from error


def delivery_tag(content: bytes) -> int:
    """The delivery tag of a basic.deliver or basic.get-ok, given as frames."""
    payload = content[7 : 7 + _u32(content, 3)[0]]
    return deliver_arguments(payload)[1] if _u32(payload)[0] == BASIC_DELIVER else get_ok_arguments(payload)[0]


def tag_and_bits(payload: Buffer, at: int = 0) -> tuple[int, int]:
    """(delivery tag, bits) of a basic.ack, nack or reject whose payload begins at `at`."""
    try:
        return _u64(payload, at + 4)[0], payload[at + 12]
    except (IndexError, struct.error) as error:
        raise FrameError("an acknowledgement ends too early") from error


def settles(blob: bytes) -> bool:
    """Whether a run of frames begins with a client's basic.ack, nack or reject."""
    return len(blob) > 11 and blob[0] == METHOD and _u32(blob, 7)[0] in (BASIC_ACK, BASIC_NACK, BASIC_REJECT)
