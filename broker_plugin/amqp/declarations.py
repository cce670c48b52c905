"""Reads declarations, bindings and deletions: their names, flags and queue arguments. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from lrq_ha.replication import levels
from lrq_ha.replication.levels import Level

from . import encode, frames
from .content_header import field
from .frames import (
    EXCHANGE_BIND,
    EXCHANGE_DECLARE,
    EXCHANGE_DELETE,
    EXCHANGE_UNBIND,
    QUEUE_BIND,
    QUEUE_DECLARE,
    QUEUE_DELETE,
    QUEUE_PURGE,
    QUEUE_UNBIND,
)

DELETES = frozenset({EXCHANGE_DELETE, EXCHANGE_UNBIND, QUEUE_DELETE, QUEUE_UNBIND})
CLASSIC = b"classic"
AUTO_DELETE = "x-lrq-auto-delete"  # of a replicated queue that goes with its last consumer
AUTO_DELETE_FIELD = field(AUTO_DELETE.encode(), b"true")
AUTO_DELETE_FLAG = 8
DECLARED = 0b1110  # neither passive nor no-wait
LAYOUT = {  # names at the beginning; of the flags behind them, no-wait, and those kept in the log
    EXCHANGE_BIND: (3, 1, 0),
    EXCHANGE_DECLARE: (2, 16, DECLARED),
    EXCHANGE_DELETE: (1, 2, 0),
    EXCHANGE_UNBIND: (3, 1, 0),
    QUEUE_BIND: (3, 1, 0),
    QUEUE_DECLARE: (1, 16, DECLARED),
    QUEUE_DELETE: (1, 4, 0),
    QUEUE_PURGE: (1, 1, 0),
    QUEUE_UNBIND: (3, 0, 0),
}
NAMED = {  # names of queues and exchanges at the beginning
    EXCHANGE_BIND: 2,
    EXCHANGE_DECLARE: 1,
    EXCHANGE_DELETE: 1,
    EXCHANGE_UNBIND: 2,
    QUEUE_BIND: 2,
    QUEUE_DECLARE: 1,
    QUEUE_DELETE: 1,
    QUEUE_PURGE: 0,
    QUEUE_UNBIND: 2,
}
_SHORTENED = frozenset({QUEUE_BIND, QUEUE_DELETE, QUEUE_UNBIND})  # an empty name does not stand for the last declared queue
REJECT_PUBLISH_DLX = "reject-publish-dlx"
LATE_S = 1.0  # a broker's timers


def held_back_s(arguments: Mapping[str, Any]) -> float:
    """The longest time that a queue with these arguments delays requeued messages; 0: no delay; infinite: unknown."""
    if arguments.get("x-delayed-retry-type", "disabled") == "disabled":
        return 0.0
    longest = arguments.get("x-delayed-retry-max", arguments.get("x-delayed-retry-min"))
    return longest / 1_000 + LATE_S if isinstance(longest, int) else math.inf


def keeps_dead_letters(arguments: Mapping[str, Any]) -> bool:
    """Whether dead letters may wait in a queue with these arguments."""
    return arguments.get("x-dead-letter-strategy") == "at-least-once"


def is_durable(method: bytes) -> bool:
    """Whether a declaration makes a durable queue or exchange."""
    return bool(_flags(method) & 2)


def is_auto_delete(method: bytes) -> bool:
    """Whether a declaration makes an auto-delete exchange."""
    return bool(_flags(method) & 4)


def _flags(method: bytes) -> int:
    at = 7 + method[6]
    if frames.method_id(method) == frames.EXCHANGE_DECLARE:
        at += 1 + method[at]  # its type
    return method[at]


def check_depth(arguments: Any, depth_max: int) -> None:
    """Limits the depth, as each node must be able to decode the arguments: the possible depth depends on the stack
    of the caller.

    Raises:
        FrameError: The arguments of a declaration are nested deeper than `depth_max`.
    """
    layer = [arguments]
    for _ in range(depth_max + 1):
        inner = (value for outer in layer if outer for value in (outer.values() if isinstance(outer, dict) else outer))
        layer = [value for value in inner if isinstance(value, dict | list)]
        if not layer:
            return
    raise frames.FrameError(f"arguments nested deeper than {depth_max}: door.header_depth_max")


def exchange_of(payload: bytes) -> tuple[str, bool]:
    """Name and auto-delete of an exchange.declare; of an exchange.delete only the name counts."""
    end = 7 + payload[6]
    name = payload[7:end].decode("utf-8", "surrogateescape")
    flags = payload[end + 1 + payload[end]] if payload[:4] == EXCHANGE_DECLARE.to_bytes(4, "big") else 0
    return name, bool(flags & 4)


def answered(payload: bytes) -> bytes:
    """A queue.declare without no-wait."""
    at = 7 + payload[6]
    return b"%b%c%b" % (payload[:at], payload[at] & 0b1111, payload[at + 1 :])


def first_name(payload: bytes) -> str:
    """The queue or exchange that a declaration, deletion or binding names first."""
    return payload[7 : 7 + payload[6]].decode("utf-8", "surrogateescape")


def as_named(kind: int, payload: bytes) -> bytes:
    """A declaration, deletion or binding as RabbitMQ reads it: without CR and LF in queue and exchange names
    (measured, 3.10 and 4.3).

    RabbitMQ keeps these characters in basic.publish, basic.consume, basic.get and queue.purge. A queue name of only
    such characters does not mean the last declared queue; but a queue declared with it gets a name from the broker.
    """
    if b"\n" not in payload and b"\r" not in payload:
        return payload
    at, names = 6, []
    for _ in range(NAMED[kind]):
        end = at + 1 + int.from_bytes(payload[at : at + 1])
        if end > len(payload):
            return payload  # malformed: its decoder reports that
        name = payload[at + 1 : end]
        kept = name.translate(None, b"\r\n")
        if not kept and kind in _SHORTENED:
            kept = name
        names.append(b"%c%b" % (len(kept), kept))
        at = end
    return b"%b%b%b" % (payload[:6], b"".join(names), payload[at:])


def deletion(kind: int, name: str) -> bytes:
    """The queue.delete or exchange.delete of this name, without conditions."""
    return b"%b\0\0%b\0" % (kind.to_bytes(4, "big"), encode.short_string(name))


def source_of(payload: bytes) -> str:
    """The exchange that a binding comes from."""
    at = 7 + payload[6]
    return payload[at + 1 : at + 1 + payload[at]].decode("utf-8", "surrogateescape")


@lru_cache(1 << 14)
def queue_arguments(payload: bytes) -> Mapping[str, Any]:
    """The arguments of a queue.declare; none of an empty payload."""
    method: Any = frames.decode_method(payload) if payload else None
    return MappingProxyType(method.arguments if method is not None and method.arguments else {})


def has_argument(payload: bytes, argument: str) -> bool:
    """Whether a queue.declare has the argument. Of a hundred thousand queues, those that cannot have it are not decoded."""
    return argument.encode() in payload and argument in queue_arguments(payload)


def level_of(payload: bytes) -> Level:
    """The level of a queue, by a queue.declare of the log."""
    return levels.parse(queue_arguments(payload)[levels.ARGUMENT]) if has_argument(payload, levels.ARGUMENT) else Level.ALL


def goes_unused(payload: bytes) -> bool:
    """Whether a queue goes with its last consumer, and the length reconciler deletes it. False if unknown (empty)."""
    return has_argument(payload, AUTO_DELETE)


def is_stream(payload: bytes) -> bool:
    """Whether the declared queue is a stream. False if unknown (empty)."""
    return has_argument(payload, "x-queue-type") and queue_arguments(payload)["x-queue-type"] == "stream"


def may_dead_letter(payload: bytes) -> bool:
    """Whether the declared queue may dead-letter, by its arguments (a policy is not seen). True if unknown (empty)."""
    return not payload or has_argument(payload, "x-dead-letter-exchange")


def may_vanish(payload: bytes) -> bool:
    """Whether the declared queue may vanish without a command: by expiry, or with its broker. False if unknown (empty)."""
    return bool(payload) and (has_argument(payload, "x-expires") or not is_durable(payload))
