"""An entry of a routing queue as lines of text, or as one line of JSON. Pure.

Rules:

- An entry is one line; names that clients gave cannot begin another one. A payload is a line of its own, and shown only if asked for.
- A payload that does not have the form asked for is shown in hexadecimal digits, and said to be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

from lrq_ha.overview.text import one_line
from lrq_ha.replication.positions import Position, epoch_name
from lrq_ha.routing.chain import TIMESTAMP_US_MAX

from .queue_entry import Entry, Payload

_1970 = datetime(1970, 1, 1, tzinfo=UTC)
_SEQUENCE_CHARS = 8
_GAP = "  "


class Form(Enum):
    """The form of payloads."""

    NONE = "none"
    HEX = "hex"
    UTF8 = "utf8"
    JSON = "json"


def as_text(entry: Entry, form: Form) -> Iterator[str]:
    """The lines of an entry."""
    at = entry.position
    place = (str(at.sequence), f"epoch {epoch_name(at.epoch)}") if at else ("-", f"offset {entry.offset}")
    parts = [place[0].rjust(_SEQUENCE_CHARS), place[1], entry.kind.value, *_words(entry)]
    yield one_line(_GAP.join(filter(None, parts)))
    if form is Form.NONE:
        return
    for number, payload in enumerate(entry.payloads, 1):
        name, content = read_payload(payload.body, form)
        shown = content if name != Form.JSON.value else json.dumps(content, ensure_ascii=False)
        said = f"payload {number}, {_bytes(len(payload.body))}{_to(payload.destinations)}"
        said += f", which is not {form.value}" if name != form.value and payload.body else ""
        yield one_line(f"{' ' * _SEQUENCE_CHARS}{_GAP}{said}: {shown}")


def _words(entry: Entry) -> Iterator[str]:
    yield entry.replication_id
    yield f"client {entry.client_name}" if entry.client_name else ""
    yield f"request {entry.request_id}" if entry.request_id else ""
    yield _to(entry.destinations).lstrip(", ")
    if entry.payloads:
        count = len(entry.payloads)
        yield f"{count} payload{'s' if count > 1 else ''}, {_bytes(sum(len(payload.body) for payload in entry.payloads))}"
    yield _time(entry.timestamp_us)
    yield entry.text
    yield "REPEAT" if entry.repeat else ""
    yield "RESTART: nothing before this leads to it" if entry.restarts else ""
    yield f"HOLE: it follows {_name(entry.hole_after)}, and what is between is not here" if entry.hole_after else ""


def as_json(entry: Entry, form: Form) -> str:
    """An entry as one line."""
    at = entry.position
    found: dict[str, Any] = {
        "offset": entry.offset,
        "epoch": at.epoch if at else None,
        "epoch_name": epoch_name(at.epoch) if at else None,
        "sequence": at.sequence if at else None,
        "type": entry.kind.value,
        "repeat": entry.repeat,
        "restart": entry.restarts,
        "hole_after": {"epoch": entry.hole_after.epoch, "sequence": entry.hole_after.sequence} if entry.hole_after else None,
        "client_name": entry.client_name or None,
        "request_id": entry.request_id or None,
        "replication_id": entry.replication_id or None,
        "timestamp_us": entry.timestamp_us or None,
        "destinations": list(entry.destinations),
        "bytes": sum(len(payload.body) for payload in entry.payloads),
        "payloads": [_payload_row(payload, form) for payload in entry.payloads],
        "text": entry.text or None,
    }
    return json.dumps(found)


def _payload_row(payload: Payload, form: Form) -> dict[str, Any]:
    row: dict[str, Any] = {"bytes": len(payload.body), "destinations": list(payload.destinations)}
    if form is not Form.NONE:
        name, content = read_payload(payload.body, form)
        row[name] = content
    return row


def read_payload(body: bytes, form: Form) -> tuple[str, Any]:
    """The name of the form in which a payload can be shown, and its content in it."""
    try:
        if form is Form.UTF8:
            return form.value, body.decode()
        if form is Form.JSON:
            return form.value, json.loads(body.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        pass
    return Form.HEX.value, body.hex()


def _refuse_constant(text: str) -> None:
    """NaN and the infinities are no JSON."""
    raise ValueError(text)


def _to(destinations: tuple[str, ...]) -> str:
    return f", to {', '.join(destinations)}" if destinations else ""


def _bytes(count: int) -> str:
    return f"{count} byte{'' if count == 1 else 's'}"


def _name(position: Position) -> str:
    return f"{position.sequence} of epoch {epoch_name(position.epoch)}"


def _time(timestamp_us: int) -> str:
    if not 0 < timestamp_us <= TIMESTAMP_US_MAX:
        return f"time {timestamp_us} us" if timestamp_us else ""
    return (_1970 + timedelta(microseconds=timestamp_us)).isoformat(" ", "milliseconds").replace("+00:00", "Z")
