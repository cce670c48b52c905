"""How publishes and declarations look in the log of the simulation: entries are real, what their frames would say is a line of text."""

from __future__ import annotations

import json
from typing import Any

from broker_plugin.amqp import encode, frames
from broker_plugin.amqp.content_header import field

VHOST = "/"
METHODS = {
    "declare": frames.QUEUE_DECLARE,
    "delete": frames.QUEUE_DELETE,
    "exchange": frames.EXCHANGE_DECLARE,
    "drop": frames.EXCHANGE_DELETE,
    "bind": frames.QUEUE_BIND,
    "unbind": frames.QUEUE_UNBIND,
}


def encode_topology(what: tuple[Any, ...]) -> bytes:
    """The payload of a declaration as it stands in the log: its method's beginning, then what the simulated broker makes of it.

    That of a queue is whole, as the arguments say how it is replicated.
    """
    head = METHODS[what[0]].to_bytes(4, "big") + b"\0\0" + encode.short_string(what[1])
    means = json.dumps(what).encode()
    if METHODS[what[0]] != frames.QUEUE_DECLARE:
        return head + b"\0\0" + means
    table = field(b"x-dead-letter-exchange", b"") if what[3:4] not in ((), ("",)) else b""
    table += field(b"means", means)
    return head + b"\0" + len(table).to_bytes(4, "big") + table


def decode_topology(payload: bytes) -> tuple[Any, ...]:
    return tuple(json.loads(payload[payload.index(b'["') :]))


def encode_publish(exchange: str, key: str, number: int) -> bytes:
    return f"{exchange} {key} {number}".encode()


def decode_publish(blob: bytes) -> tuple[str, str, int]:
    exchange, key, number = blob.decode().split(" ")
    return exchange, key, int(number)
