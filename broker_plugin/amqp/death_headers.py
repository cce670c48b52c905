"""`x-death` and related headers from a client: escaped in the log and at the broker, and restored for the
consumer. Pure.

RabbitMQ counts a message's deaths in these headers, and the log tells its copies apart by these counts (R10). A
client that publishes a dead letter again brings counts of another message.

Rules:
- Such headers get PREFIX before their names. So on a copy, the headers under the plain names are counted by the
  broker beside this sidecar.
- A consumer gets what RabbitMQ would have given it. 3.x continues the client's counts, and keeps its first death. 4.x
  (which names the last death too) restarts the counts, and its first own death replaces all that the client brought.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from pamqp import decode

from .content_header import elements, fields, table, with_table
from .frames import FrameError

PREFIX = b"x-lrq-was-"
HINT = b"-death"
_DEATHS = b"x-death"
_FIRST = tuple(b"x-first-death-" + each for each in (b"queue", b"exchange", b"reason"))
_LAST = tuple(b"x-last-death-" + each for each in (b"queue", b"exchange", b"reason"))
_NAMES = (_DEATHS, *_FIRST, *_LAST)
_ASIDE = {PREFIX + name: name for name in _NAMES}


def _split(payload: bytes) -> list[tuple[bytes, bytes]]:
    """(name, value with its kind) of each header."""
    start, end = table(payload)
    return [(payload[at + 1 : value], payload[value:after]) for at, value, after in fields(payload, start, end)] if end >= 0 else []


def _joined(payload: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    return with_table(payload, _fields(headers))


def _fields(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"%c%b%b" % (len(name), name, value) for name, value in headers)


def escape(payload: bytes) -> bytes:
    """The payload of a client's content header, as it goes into the log.

    Raises:
        FrameError: Its table is malformed.
    """
    if HINT not in payload:
        return payload
    headers = _split(payload)
    found = {name for name, _ in headers}.intersection(_NAMES)
    if not found:
        return payload
    return _joined(payload, [(PREFIX + name if name in found else name, value) for name, value in headers if _ASIDE.get(name) not in found])


def restore(payload: bytes) -> bytes:
    """The payload of a content header from the broker, as a consumer gets it.

    Raises:
        FrameError: Its table is malformed.
    """
    if PREFIX not in payload:
        return payload
    headers = _split(payload)
    own, brought = {}, {}
    for name, value in headers:
        if name in _ASIDE:
            brought[_ASIDE[name]] = value
        elif name in _NAMES:
            own[name] = value
    if not brought:
        return payload
    if not own:
        shown = brought
    elif own.keys() & set(_LAST):
        shown = own
    else:
        shown = {**own, **brought}
        if _DEATHS in own and _DEATHS in brought:
            shown[_DEATHS] = _counted_on(own[_DEATHS], brought[_DEATHS])
    others = [(name, value) for name, value in headers if name not in _NAMES and name not in _ASIDE]
    return _joined(payload, others + list(shown.items()))


def _counted_on(own: bytes, brought: bytes) -> bytes:
    """`x-death` as 3.x would have it: the last death comes first, with the sum of both counts and all else as the
    client brought it, to the octet.
    """
    try:
        before = {_key(death): death for death in _deaths(brought)}
        deaths = [_with_more(before.pop(_key(death), None), death) for death in _deaths(own)]
        value = b"".join((*deaths, *before.values()))
        return b"A%b%b" % (len(value).to_bytes(4, "big"), value)
    except (FrameError, IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error):
        return own  # the client's header is no list of deaths


def _deaths(value: bytes) -> list[bytes]:
    """The entries of an `x-death`, each with its kind."""
    if value[:1] != b"A":
        raise FrameError("x-death is no array")
    return [value[start:end] for start, end in elements(value, 5, len(value))]


def _of(death: bytes) -> dict[bytes, bytes]:
    """The fields of a death, each value with its kind."""
    if death[:1] != b"F":
        raise FrameError("a death is no table")
    return {death[at + 1 : value]: death[value:after] for at, value, after in fields(death, 5, len(death))}


def _plain(value: bytes) -> Any:
    return decode.embedded_value(value)[1]


def _key(death: bytes) -> tuple[Any, Any]:
    table = _of(death)
    return _plain(table[b"queue"]), _plain(table[b"reason"])


def _with_more(before: bytes | None, now: bytes) -> bytes:
    """The client's death, if any, plus the count of another. RabbitMQ counts in longs, and orders the fields by name."""
    table = _of(now if before is None else before)
    if before is not None:
        table[b"count"] = b"l" + struct.pack(">q", int(_plain(table[b"count"])) + int(_plain(_of(now)[b"count"])))
    joined = _fields(sorted(table.items()))
    return b"F%b%b" % (len(joined).to_bytes(4, "big"), joined)
