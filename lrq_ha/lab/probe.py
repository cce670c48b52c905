"""Queries brokers and sidecars. Rule: readiness is always queried, never slept for; every query has a time limit."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from broker_plugin.amqp.proxy_header import proxy_header
from lrq_ha.direct_http import http_open

_ASK_TIMEOUT_S = 2.0
#: A promotion waits for other nodes.
_PROMOTE_TIMEOUT_S = 60.0
_SEARCHED_LINES_MAX = 100


def listens(port: int) -> bool:
    """Whether something accepts connections on 127.0.0.1:`port`."""
    try:
        socket.create_connection(("127.0.0.1", port), _ASK_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def speaks_amqp(port: int, proxied: bool = False) -> bool:
    """Whether the peer on 127.0.0.1:`port` answers the AMQP 0-9-1 header with connection.start. `proxied`: it expects the PROXY protocol."""
    try:
        with socket.create_connection(("127.0.0.1", port), _ASK_TIMEOUT_S) as connection:
            connection.sendall((proxy_header(connection.getsockname(), connection.getpeername()) if proxied else b"") + b"AMQP\x00\x00\x09\x01")
            # A method frame (1) on channel 0; class and method 10.10 come after the length.
            start = connection.makefile("rb").read(11)
    except OSError:
        return False
    return start[:3] == b"\x01\x00\x00" and start[7:] == b"\x00\x0a\x00\x0a"


def get_json(url: str) -> dict[str, Any] | None:
    """Body of an HTTP GET; None without a whole answer."""
    try:
        with http_open(url, timeout=_ASK_TIMEOUT_S) as answer:
            body: dict[str, Any] = json.load(answer)
            return body
    except (OSError, ValueError, http.client.HTTPException):
        return None


def post_json(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and body of an HTTP POST; an error status is an answer like any other.

    Raises:
        OSError: No server answers there.
    """
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with http_open(request, timeout=_PROMOTE_TIMEOUT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refusal:
        with refusal:
            text = refusal.read().decode(errors="replace")
        try:
            return refusal.code, json.loads(text)
        except ValueError:
            return refusal.code, {"ok": False, "text": text}


def excerpt(log: Path, lines_max: int = 15) -> str:
    """The part of a log about a failure, indented: from its first error on if its last lines name one, as a broker's do, else its end."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-_SEARCHED_LINES_MAX:]
    except OSError:
        return "    (no log was written)"
    # A broker's first error has the reason; after it comes the state of each process that went down with it.
    first = next((index for index, line in enumerate(lines) if "[error]" in line), max(0, len(lines) - lines_max))
    return "\n".join(f"    {line}" for line in lines[first:first + lines_max]) or "    (the log is empty)"
