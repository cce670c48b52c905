"""A publish as AMQP frames: pure.

The frames are made once, when the message enters the window, with the codec of pika, for both publishers; a resend writes these bytes again.
"""

from __future__ import annotations

import copy
import functools
import reprlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import pika
import pika.frame
import pika.spec

from lrq_ha.publisher.errors import InvalidArgument
from lrq_ha.publisher.messages import ID_HEADER, ID_SEPARATOR, SHORT_STRING_BYTES_MAX, SHORT_STRING_RULE

C = TypeVar("C")

PUBLISH_CHANNEL: Final = 1  # fixed: it is written in the frames that wait in the window
QUERY_CHANNEL: Final = 2
CONSUME_CHANNEL: Final = 3

WRITE_BYTES_MAX: Final = 256 * 1024  # per write: the libraries copy the rest of a partial send
PERSISTENT: Final = 2
FRAME_OVERHEAD_BYTES: Final = 8
FRAME_MAX_BYTES: Final = 128 * 1024  # for a broker without a limit; pika offers it
FRAME_END: Final = b"\xce"
CONNECTION_FORCED: Final = 320  # the node stops, or is a backup: no fault of our messages
NOT_FOUND: Final = 404

HELD_S: Final = 5.0  # a login that lasted this long was a good one, even if nothing was sent
CONSUME_RETRY_S: Final = 2.0
CONSUME_PREFETCH: Final = 256

_RULES: Final = {
    "headers": "It must be a dict",
    "delivery_mode": "It must be 1 (transient) or 2 (persistent)",
    "priority": "It must be an int from 0 to 255",
    "timestamp": "It must be an int, seconds since 1970",
}
"""The required types of properties that are no short strings."""

_HEADER_RULE: Final = (
    f"Names of headers have at most {SHORT_STRING_BYTES_MAX} bytes in UTF-8; values are str, bytes, bool, int (64 bits), Decimal (32 bits), datetime,"
    " None, or lists and dicts of these (a float goes as a str)"
)


@dataclass(frozen=True, slots=True)
class Outgoing(Generic[C]):
    """A message in the window: its method and header frames for PUBLISH_CHANNEL, its body, and its Confirm."""

    frames: bytes
    body: bytes
    confirm: C

    @property
    def size_bytes(self) -> int:
        return len(self.frames) + len(self.body)


@functools.lru_cache(maxsize=1024)
def _publish_frame(exchange: str, routing_key: str, mandatory: bool) -> bytes:
    method = pika.spec.Basic.Publish(exchange=exchange, routing_key=routing_key, mandatory=mandatory)
    frame: bytes = pika.frame.Method(PUBLISH_CHANNEL, method).marshal()
    return frame


def message_frames(
    exchange: str, routing_key: str, body_bytes: int, properties: pika.BasicProperties | None, replication_id: str, *, mandatory: bool
) -> bytes:
    """The method and header frames of a publish that carries the ID. Raises InvalidArgument for properties that AMQP has no form for."""
    try:
        header = _header_frame(body_bytes, _with_id(properties, replication_id))
    except MemoryError:
        raise
    except Exception as error:  # pika has a dozen kinds, failed asserts among them, and does not name the property
        raise _unfit(properties, error) from error
    return _publish_frame(exchange, routing_key, mandatory) + header


def _header_frame(body_bytes: int, properties: pika.BasicProperties) -> bytes:
    frame: bytes = pika.frame.Header(PUBLISH_CHANNEL, body_bytes, properties).marshal()
    return frame


def _unfit(properties: object, error: Exception) -> InvalidArgument:
    """The error with the culprit: the first property, or header, that cannot be sent alone either."""
    if not isinstance(properties, pika.BasicProperties):
        return InvalidArgument(f"properties is a {type(properties).__name__}", todo="It must be pika.BasicProperties")
    for said, name, value, rule in _each_alone(properties):
        alone = pika.BasicProperties()
        setattr(alone, name, value)
        try:
            _header_frame(0, alone)
        except Exception:
            return InvalidArgument(said, todo=rule)
    return InvalidArgument(f"properties cannot be sent: {reprlib.repr(error)}")


def _each_alone(properties: pika.BasicProperties) -> Iterator[tuple[str, str, object, str]]:
    """In words, each property as name and value, and its required type."""
    for name, value in vars(properties).items():
        if name == "headers" and isinstance(value, Mapping):
            for key, header in value.items():
                yield f"header {reprlib.repr(key)} is {reprlib.repr(header)}", name, {key: header}, _HEADER_RULE
        else:
            yield f"{name} is {reprlib.repr(value)}", name, value, _RULES.get(name, SHORT_STRING_RULE)


def _with_id(properties: pika.BasicProperties | None, replication_id: str) -> pika.BasicProperties:
    """A copy that carries the ID, persistent unless the properties say otherwise."""
    if properties is None:
        return pika.BasicProperties(delivery_mode=PERSISTENT, headers={ID_HEADER: replication_id})
    found = copy.copy(properties)
    found.headers = {**(properties.headers or {}), ID_HEADER: replication_id}
    if found.delivery_mode is None:
        found.delivery_mode = PERSISTENT
    return found


def sequence_of(headers: dict[str, Any] | None) -> int:
    """The sequence in a message's ID, from its headers; 0 if there is none."""
    _, _, sequence = str((headers or {}).get(ID_HEADER, "")).rpartition(ID_SEPARATOR)
    return int(sequence) if sequence.isdecimal() else 0


def writes(messages: Iterable[Outgoing[C]], frame_max: int) -> Iterator[bytes]:
    """The frames of some messages, in pieces of about WRITE_BYTES_MAX. A body is cut into frames of at most `frame_max` bytes."""
    body_max = frame_max - FRAME_OVERHEAD_BYTES
    parts: list[bytes] = []
    size = 0
    for message in messages:
        parts.append(message.frames)
        size += len(message.frames)
        body = message.body
        for start in range(0, len(body), body_max):
            piece = body[start : start + body_max]  # the body itself, not a copy, if it is shorter
            parts += (struct.pack(">BHI", pika.spec.FRAME_BODY, PUBLISH_CHANNEL, len(piece)), piece, FRAME_END)
            size += len(piece)
            if size >= WRITE_BYTES_MAX:
                yield b"".join(parts)
                parts, size = [], 0
    if parts:
        yield b"".join(parts)
