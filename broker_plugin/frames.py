"""AMQP 0-9-1 bytes: finding frames and whole contents in a buffer, reading methods, building frames. Pure.

This is the hottest code of the project (every message passes here several times), so it works on offsets into the buffer that
came from the socket and copies nothing that the caller does not ask for. Rules:

- `scan` takes the regular case in one tight loop (a method, its header and its bodies, one after the other, on one channel) and
  leaves everything else to `_one_frame`, which alone knows why bytes are wrong. Malformed bytes raise FrameError, nothing else.
- Rare methods are decoded and encoded with pamqp; here stands only what has to be quick or exact to the byte.
- Content headers are looked into by `headers`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from pamqp import base, commands, encode, exceptions

from lrq_ha.replication.errors import MalformedInput

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
FRAME_END = 0xCE
PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
HEARTBEAT_FRAME = b"\x08\x00\x00\x00\x00\x00\x00\xce"

FRAME_OVERHEAD_BYTES = 8
FRAME_MAX_BYTES = 131_072  # what RabbitMQ offers by default; counts the overhead
FRAME_MAX_ANY_BYTES = 1 << 31  # whatever was agreed on
CHANNELS_MAX = 65_535  # there are no more numbers
HEADROOM_BYTES = 512  # clients are offered so much less than the broker takes: room for a position in a content's header frame
FRAME_MIN_BYTES = 4_096  # the least frame_max the protocol allows
HOLD_BYTES_MAX = 262_144  # an unfinished content is waited for as a whole up to here, then given out frame by frame
HOLD_FRAMES_MAX = 64  # likewise
BODY_BYTES_MAX = 134_217_728  # RabbitMQ's own default limit before 4.0
BODY_BYTES_ANY_MAX = 536_870_912  # no RabbitMQ can be told to take more: a larger one ends its connection
ROUTES_MAX = 4_096  # how many parsed methods are remembered

# (class << 16 | method), the first four octets of a method frame's payload
CONNECTION_START, CONNECTION_START_OK = 0x000A000A, 0x000A000B
CONNECTION_SECURE, CONNECTION_SECURE_OK = 0x000A0014, 0x000A0015
CONNECTION_TUNE, CONNECTION_TUNE_OK = 0x000A001E, 0x000A001F
CONNECTION_OPEN, CONNECTION_OPEN_OK = 0x000A0028, 0x000A0029
CONNECTION_CLOSE, CONNECTION_CLOSE_OK = 0x000A0032, 0x000A0033
CONNECTION_BLOCKED, CONNECTION_UNBLOCKED = 0x000A003C, 0x000A003D
CONNECTION_UPDATE_SECRET, CONNECTION_UPDATE_SECRET_OK = 0x000A0046, 0x000A0047
CHANNEL_OPEN, CHANNEL_OPEN_OK = 0x0014000A, 0x0014000B
CHANNEL_FLOW, CHANNEL_FLOW_OK = 0x00140014, 0x00140015
CHANNEL_CLOSE, CHANNEL_CLOSE_OK = 0x00140028, 0x00140029
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

METHOD_MIN = 1 << 16  # there is no class 0: its methods' ids would be taken for the kinds of frames
BASIC_CLASS = 60 << 16  # class and weight of a content header
HEADER_FIXED_BYTES = 14  # class, weight, body size, property flags

_method_head = struct.Struct(">BHII").unpack_from  # type, channel, size, method
_header_head = struct.Struct(">BBHIIQ").unpack_from  # end of the frame before, type, channel, size, class and weight, body size
_body_head = struct.Struct(">BBHI").unpack_from  # end of the frame before, type, channel, size
_frame_head = struct.Struct(">BHI").unpack_from
_u32 = struct.Struct(">I").unpack_from
_u64 = struct.Struct(">Q").unpack_from
_pack_u32 = struct.Struct(">I").pack
_pack_head = struct.Struct(">BHI").pack
_pack_ack = struct.Struct(">BHIIQBB").pack

Buffer: TypeAlias = bytes | bytearray
Item: TypeAlias = tuple[int, int, int, int, int, int, int]
"""What `scan` finds: (kind, channel, start, end, header, header_end, stop), all offsets into the buffer.

A method frame: kind is the method's id, start .. end its payload (id included), the rest 0. A whole content: the same, and
header .. header_end is the payload of its header frame, stop is where the next frame begins. A header, body or heartbeat frame
by itself (a content that came in pieces): kind is HEADER, BODY or HEARTBEAT, start .. end its payload, the rest 0.
"""


class FrameError(MalformedInput):
    """Bytes that are not AMQP 0-9-1, or that exceed a limit. The connection they came from cannot be used any more.

    Attributes:
        code, cause: What connection.close says: reply code, id of the method.
    """

    code, cause = 501, 0


class UnexpectedFrame(FrameError):
    """A frame that has no place where it stands, as when two threads publish on one channel; in RabbitMQ's words.

    Args:
        expected: What should have come, and what did.
        cause: Id of the method whose content it interrupts; 0 for none.
    """

    code = 505

    def __init__(self, expected: str, cause: int = BASIC_PUBLISH) -> None:
        super().__init__(f"UNEXPECTED_FRAME - expected {expected} instead")
        self.cause = cause


class BodyTooLong(FrameError):
    """A body of more bytes than any broker takes, or than its header has told; in RabbitMQ's words."""

    cause = BASIC_PUBLISH

    def __init__(self, text: str) -> None:
        super().__init__(f"FRAME_ERROR - {text}")


# --- finding frames ---------------------------------------------------------------------------------------------------------


def scan(
    buffer: Buffer, start: int = 0, frame_max_bytes: int = FRAME_MAX_BYTES, hold_bytes_max: int = HOLD_BYTES_MAX
) -> tuple[list[Item], int]:
    """Finds all complete frames and contents from `start` on.

    Args:
        buffer: What came from the socket, after what an earlier call left over.
        start: Offset of a frame's first octet.
        frame_max_bytes: The negotiated frame_max, which counts the 8 octets around a payload.
        hold_bytes_max: A content whose end has not arrived is left over as a whole while it has fewer bytes than this.

    Returns:
        The items in order, and the offset of the first octet that was not used; keep the rest for the next call.

    Raises:
        FrameError: On a bad end octet, a frame over the limit, an unknown frame type; what stands before it is not handed out.
    """
    payload_max = frame_max_bytes - FRAME_OVERHEAD_BYTES
    items: list[Item] = []
    append = items.append
    at, length = start, len(buffer)
    alike: Buffer = b""  # what two publishes in a row had in common: all but their bodies' octets; they are looked for by that alone
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
        item = _one_frame(buffer, at, payload_max)
        if item is None or (ran_out and item[0] in CONTENT_METHODS and length - at < hold_bytes_max and _few_frames(buffer, at)):
            break
        append(item)
        at = item[3] + 1
    return items, at


def _few_frames(buffer: Buffer, at: int) -> bool:
    """Whether what is left over is cheap to look through again each time that more comes: a body in thousands of tiny frames is not."""
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


class Content(NamedTuple):
    """A content that came in pieces: the payloads of its method and header frames, and its body."""

    method: bytes
    header: bytes
    body: bytes


class BodyTooLarge(MalformedInput):
    """A content whose body is over the limit has come to its end; nothing of it was kept. The connection goes on.

    Args:
        size, limit: Bytes.
    """

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a body of {size} bytes exceeds the limit of {limit}")
        self.size, self.limit = size, limit


class Budget:
    """Bytes that may be held by all who share it.

    Args:
        limit: How many.
        name: The limit's, for the error.
    """

    __slots__ = ("_limit", "_name", "bytes")

    def __init__(self, limit: int, name: str) -> None:
        self.bytes = 0
        self._limit, self._name = limit, name

    def take(self, size: int) -> None:
        """Raises FrameError if there is no room."""
        if self.bytes + size > self._limit:
            raise FrameError(f"frames and messages of which a part has arrived hold {self.bytes} bytes already; the limit is {self._name}")
        self.bytes += size

    def give(self, size: int) -> None:
        """So many bytes are held no more."""
        self.bytes -= size


class Assembly:
    """Puts contents together whose frames `scan` gave out one by one, per channel.

    Holds at most `body_bytes_max` bytes of body per open channel, and of all that share it, methods and headers included, what is left of `budget`.
    A larger body is read to its end, as a broker does, but not kept.
    """

    __slots__ = ("_body_bytes_max", "_budget", "_open")

    def __init__(self, body_bytes_max: int = BODY_BYTES_MAX, budget: Budget | None = None) -> None:
        self._body_bytes_max = body_bytes_max
        self._budget = budget
        self._open: dict[int, tuple[bytes, bytes, int, bytearray]] = {}  # method, header (b"" before it came), missing, body so far

    def take(self, kind: int, channel: int, payload: bytes) -> Content | None:
        """Adds one frame: a content method (its id as kind), HEADER or BODY. Returns the content when it is complete.

        Raises:
            FrameError: A frame that does not belong there (UnexpectedFrame, BodyTooLong), or a body that is too large for any broker.
            BodyTooLarge: With the last frame of a body that is over the limit.
        """
        method, header, missing, body = self._open.get(channel, (b"", b"", 0, bytearray()))
        if kind == HEADER and method and not header:
            if len(payload) < HEADER_FIXED_BYTES or _u32(payload)[0] & 0xFFFF:
                raise FrameError(f"a malformed content header on channel {channel}")
            if _u32(payload)[0] != BASIC_CLASS:
                raise UnexpectedFrame(f"content header for class 60, got one for class {_u32(payload)[0] >> 16}")
            header, missing = payload, _u64(payload, 4)[0]
            if missing > BODY_BYTES_ANY_MAX:
                raise BodyTooLong(f"content body size {missing} exceeds maximum allowed size {BODY_BYTES_ANY_MAX}")
            self._hold(payload)
        elif kind == BODY and header:
            if len(payload) > missing:
                raise BodyTooLong("content body frame exceeds remaining content size")
            if _u64(header, 4)[0] <= self._body_bytes_max:
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
            size = _u64(header, 4)[0]
            if size > self._body_bytes_max:
                raise BodyTooLarge(size, self._body_bytes_max)
            return Content(method, header, bytes(body))
        self._open[channel] = (method, header, missing, body)
        return None

    def unexpected(self, channel: int) -> UnexpectedFrame:
        """What a frame is that has no place on this channel now."""
        method, header, _, _ = self._open.get(channel, (b"", b"", 0, b""))
        if not method:
            return UnexpectedFrame("method frame, got non method frame", 0)
        expected = "content body, got non content body frame" if header else "content header for class 60, got non content header frame"
        return UnexpectedFrame(expected)

    def is_open(self, channel: int) -> bool:
        """Whether a content on this channel is unfinished."""
        return channel in self._open

    def drop(self, channel: int) -> None:
        """Forgets the unfinished content of a channel that closed."""
        method, header, _, body = self._open.pop(channel, (b"", b"", 0, bytearray()))
        self._release(method, header, body)

    def clear(self) -> None:
        """Forgets everything: the connection is gone."""
        for channel in list(self._open):
            self.drop(channel)

    def _hold(self, payload: bytes) -> None:
        if self._budget is not None:
            self._budget.take(len(payload))

    def _release(self, *held: Buffer) -> None:
        if self._budget is not None:
            self._budget.give(sum(map(len, held)))


# --- reading methods --------------------------------------------------------------------------------------------------------


def method_id(payload: bytes) -> int:
    """Which method a method frame's payload is: class and method, as in the constants above. 0: it is empty."""
    return int.from_bytes(payload[:4], "big")


def decode_method(payload: bytes) -> base.Frame:
    """A method frame's payload as pamqp's object, for the rare methods.

    Raises:
        FrameError: An unknown method or malformed arguments.
    """
    try:
        method: base.Frame = commands.INDEX_MAPPING[_u32(payload)[0]]()
        method.unmarshal(payload[4:])
    except (struct.error, ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as error:
        raise FrameError(_undecodable(payload, error)) from None  # the error's text may hold what the method held
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
    """What a basic.deliver, get-ok or return says beside its tags."""

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
    """The arguments of a basic.publish from its frame's payload; remembered, as publishers repeat themselves."""
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


# --- building ---------------------------------------------------------------------------------------------------------------


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    """One frame around a payload."""
    return b"%b%b\xce" % (_pack_head(kind, channel, len(payload)), payload)


def raw_method_frame(channel: int, method: int, *arguments: bytes) -> bytes:
    """The frame of a method whose arguments are encoded already."""
    return frame(METHOD, channel, b"".join((_pack_u32(method), *arguments)))


def encode_method(method: base.Frame) -> bytes:
    """A method as the payload of its frame. Raises MalformedInput, as `method_frame`."""
    return method_frame(0, method)[7:-1]


def method_frame(channel: int, method: base.Frame) -> bytes:
    """The frame of a pamqp method. (Not by pamqp itself, which refuses names that RabbitMQ allows, such as `é`.)

    Raises:
        MalformedInput: An argument that cannot be encoded.
    """
    arguments, bits, count = [], 0, 0
    try:
        for name in method.__slots__:
            kind, value = method.amqp_type(name), getattr(method, name)
            if kind == "bit":
                bits |= bool(value) << count
                count += 1
                continue
            if count:
                arguments.append(bytes((bits,)))
                bits = count = 0
            arguments.append(short_string(value) if kind == "shortstr" else encode.by_type(value, kind))
    except (TypeError, ValueError, struct.error) as error:
        raise MalformedInput(f"{method.name} cannot be encoded: {error}") from error
    if count:
        arguments.append(bytes((bits,)))
    return raw_method_frame(channel, method.index, *arguments)


def header_head(channel: int, size: int) -> bytes:
    """What stands before a content header's payload of `size` bytes in its frame."""
    return _pack_head(HEADER, channel, size)


def ack(channel: int, tag: int, multiple: bool = False) -> bytes:
    return _pack_ack(METHOD, channel, 13, BASIC_ACK, tag, multiple, FRAME_END)


def is_ack(blob: bytes) -> bool:
    """Whether a run of frames begins with a basic.ack."""
    return len(blob) > 11 and blob[0] == METHOD and _u32(blob, 7)[0] == BASIC_ACK


def nack(channel: int, tag: int, multiple: bool = False, requeue: bool = False) -> bytes:
    return _pack_ack(METHOD, channel, 13, BASIC_NACK, tag, multiple | requeue << 1, FRAME_END)


def reject(channel: int, tag: int, requeue: bool = False) -> bytes:
    return _pack_ack(METHOD, channel, 13, BASIC_REJECT, tag, requeue, FRAME_END)


def short_string(text: str) -> bytes:
    """A name or routing key as it stands on the wire, after its length octet.

    Raises:
        MalformedInput: It has more than 255 bytes.
    """
    raw = text.encode("utf-8", "surrogateescape")
    if len(raw) > 255:
        raise MalformedInput(f"{text[:40]!r}… has {len(raw)} bytes, a name or routing key at most 255", todo="Shorten it")
    return bytes((len(raw),)) + raw


def _close(channel: int, method: int, code: int, text: str, cause: int) -> bytes:
    raw = text.encode("utf-8", "replace")[:255].decode("utf-8", "ignore")  # cut to length without splitting a character; names need not be UTF-8
    return raw_method_frame(channel, method, struct.pack(">H", code), short_string(raw), _pack_u32(cause))


def connection_close(code: int, text: str, cause: int = 0) -> bytes:
    """A connection.close with reply code, text (cut to 255 bytes) and the id of the method that caused it."""
    return _close(0, CONNECTION_CLOSE, code, text, cause)


def channel_close(channel: int, code: int, text: str, cause: int = 0) -> bytes:
    """A channel.close with reply code, text (cut to 255 bytes) and the id of the method that caused it."""
    return _close(channel, CHANNEL_CLOSE, code, text, cause)


@lru_cache(ROUTES_MAX)
def publish_method(channel: int, exchange: str, routing_key: str, mandatory: bool = False) -> bytes:
    """The method frame of a basic.publish; remembered, as publishers repeat themselves."""
    return raw_method_frame(channel, BASIC_PUBLISH, b"\0\0", short_string(exchange), short_string(routing_key), bytes((mandatory,)))


def content(channel: int, header: bytes, body: bytes, frame_max_bytes: int = FRAME_MAX_BYTES) -> list[bytes]:
    """The header and body frames of a content in pieces to be joined or written; a body over frame_max is split.

    Args:
        channel: The channel number.
        header: The header frame's payload; its body size must be len(body).
        body: The body, of any length.
        frame_max_bytes: The negotiated frame_max.
    """
    pieces = [_pack_head(HEADER, channel, len(header)), header]
    size, most = len(body), frame_max_bytes - FRAME_OVERHEAD_BYTES
    if 0 < size <= most:
        pieces += (b"\xce" + _pack_head(BODY, channel, size), body)
    else:
        view: Any = memoryview(body)  # pieces are joined or written, which a part of one can be as well
        for at in range(0, size, most):
            part = view[at : at + most]
            pieces += (b"\xce" + _pack_head(BODY, channel, len(part)), part)
    pieces.append(b"\xce")
    return pieces


def whole(channel: int, parts: Content, frame_max_bytes: int) -> tuple[bytes, list[Item]]:
    """A content that was put together, as if it had come whole: its frames, and the one item that `scan` finds in them."""
    blob = b"".join((frame(METHOD, channel, parts.method), *content(channel, parts.header, parts.body, frame_max_bytes)))
    return blob, scan(blob, 0, frame_max_bytes, 1 << 62)[0]


def rechannel(frames: Iterable[bytes] | bytes, channel: int) -> bytes:
    """A run of whole frames with every channel number replaced by `channel`."""
    changed = bytearray(frames if isinstance(frames, bytes) else b"".join(frames))
    number = struct.pack(">H", channel)
    at, end = 0, len(changed)
    while at < end:
        changed[at + 1 : at + 3] = number
        at += _u32(changed, at + 3)[0] + FRAME_OVERHEAD_BYTES
    if at != end:
        raise FrameError("a run of frames does not end where its last frame ends")
    return bytes(changed)
