"""Builds AMQP 0-9-1 frames of methods and contents. Pure.

Rules:
- Methods sent for every message are packed here, and cached where their senders repeat them. Rare methods are encoded
  from pamqp's objects, argument by argument.
- A value that cannot be encoded raises MalformedInput, nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from pamqp import base, encode

from lrq_ha.errors import MalformedInput

from .frames import (
    BASIC_ACK,
    BASIC_NACK,
    BASIC_PUBLISH,
    BASIC_REJECT,
    BODY,
    CHANNEL_CLOSE,
    CONNECTION_CLOSE,
    FRAME_END,
    FRAME_MAX_BYTES,
    FRAME_OVERHEAD_BYTES,
    HEADER,
    METHOD,
    ROUTES_MAX,
    FrameError,
)

_u32 = struct.Struct(">I").unpack_from
_pack_u32 = struct.Struct(">I").pack
_pack_head = struct.Struct(">BHI").pack  # type, channel, size
_pack_ack = struct.Struct(">BHIIQBB").pack  # type, channel, size, method, delivery tag, bits, end of the frame


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
    """The frame of a pamqp method. (Not by pamqp itself, which refuses names that RabbitMQ allows, such as `é`.) A
    table may be given as octets.

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
            if kind == "shortstr":
                arguments.append(short_string(value))
            else:
                arguments.append(value if isinstance(value, bytes) else encode.by_type(value, kind))
    except (TypeError, ValueError, struct.error) as error:
        raise MalformedInput(f"{method.name} cannot be encoded: {error}") from error
    if count:
        arguments.append(bytes((bits,)))
    return raw_method_frame(channel, method.index, *arguments)


def header_head(channel: int, size: int) -> bytes:
    """The bytes before a content header's payload of `size` bytes in its frame."""
    return _pack_head(HEADER, channel, size)


def ack(channel: int, tag: int, multiple: bool = False) -> bytes:
    return _pack_ack(METHOD, channel, 13, BASIC_ACK, tag, multiple, FRAME_END)


def nack(channel: int, tag: int, multiple: bool = False, requeue: bool = False) -> bytes:
    return _pack_ack(METHOD, channel, 13, BASIC_NACK, tag, multiple | requeue << 1, FRAME_END)


def reject(channel: int, tag: int, requeue: bool = False) -> bytes:
    return _pack_ack(METHOD, channel, 13, BASIC_REJECT, tag, requeue, FRAME_END)


def short_string(text: str) -> bytes:
    """A name or routing key on the wire, after its length octet.

    Raises:
        MalformedInput: The text has more than 255 bytes.
    """
    raw = text.encode("utf-8", "surrogateescape")
    if len(raw) > 255:
        raise MalformedInput(f"{text[:40]!r}… has {len(raw)} bytes, a name or routing key at most 255", todo="Shorten it")
    return bytes((len(raw),)) + raw


def _close(channel: int, method: int, code: int, text: str, cause: int) -> bytes:
    raw = text.encode("utf-8", "replace")[:255].decode("utf-8", "ignore")  # cut without splitting a character; names need not be UTF-8
    return raw_method_frame(channel, method, struct.pack(">H", code), short_string(raw), _pack_u32(cause))


def connection_close(code: int, text: str, cause: int = 0) -> bytes:
    """A connection.close with reply code, text (cut to 255 bytes) and the id of the method that caused it."""
    return _close(0, CONNECTION_CLOSE, code, text, cause)


def channel_close(channel: int, code: int, text: str, cause: int = 0) -> bytes:
    """A channel.close with reply code, text (cut to 255 bytes) and the id of the method that caused it."""
    return _close(channel, CHANNEL_CLOSE, code, text, cause)


@lru_cache(ROUTES_MAX)
def publish_method(channel: int, exchange: str, routing_key: str, mandatory: bool = False) -> bytes:
    """The method frame of a basic.publish; cached, as publishers repeat themselves."""
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
        for part in _cut(body, most):
            pieces += (b"\xce" + _pack_head(BODY, channel, len(part)), part)
    pieces.append(b"\xce")
    return pieces


def body_frames(channel: int, body: bytes, frame_max_bytes: int) -> list[bytes]:
    """The body frames of a content, or of a part of one, in pieces to be joined or written."""
    return [piece for part in _cut(body, frame_max_bytes - FRAME_OVERHEAD_BYTES) for piece in (_pack_head(BODY, channel, len(part)), part, b"\xce")]


def _cut(body: bytes, most: int) -> Iterator[bytes]:
    view: Any = memoryview(body)  # pieces are joined or written, which works for a memoryview too
    for at in range(0, len(body), most):
        yield view[at : at + most]


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
