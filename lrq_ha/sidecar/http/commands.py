"""The operators' commands: POST with a JSON body.

    POST /promote  {"down": ["e1"], "force": false, "without_etcd": false, "dry_run": false}, every key optional
    POST /remove   {"node": "e2", "dry_run": false}; a node of the set that is not configured any more: "node 3", by its id
    POST /switchover  {"node": "e2", "timeout_s": 30, "force": false, "dry_run": false}; without a node: to any in-sync backup
    POST /demote   {"timeout_s": 30, "force": false, "dry_run": false}; only this node is paused then: tell the others with /pause
    POST /renew    {"timeout_s": 30, "force": false, "dead_letters_arrived": false, "dry_run": false}: everything live is published again, so that a
                   node may join
    POST /resync   {"client": "orders", "sites": ["west"], "to_all": false, "source": null, "reason": "", "dry_run": false}: a full sync of a client,
                   for sites or for all (at the source), or from a source (at the sink)
    POST /definitions/take  {"dry_run": false}: a backup's broker gets the primary's definitions, and loses those that the primary's lacks
    POST /reload   {}: certificates and configuration are read again; the answer names the keys that count now, and those that wait for a restart
    POST /pause    {"paused": true}: no node takes an epoch by itself; false: nodes do again
    POST /reinit   {"force": false, "dry_run": false}: deletes the node's data; the node follows with an empty log

Rules:

- A command is answered {"ok", "text"}: 200 done, 409 refused, 400 a body that cannot be used; an unusable body changes nothing.
- A body's keys are checked by the command's table. COMMANDS has the tables; each command is the method of Source that has its name, or that METHODS
  names.
- A body has BODY_TIMEOUT_S to arrive, and BODY_BYTES_MAX bytes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from lrq_ha.errors import LrqError
from lrq_ha.routing.names import REASON_CHARS_MAX

from .source import Source

BODY_BYTES_MAX = 64 << 10
BODY_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class _Key:
    """One key of a command's body."""

    allowed: str
    fits: Callable[[object], bool]
    default: object = None
    required: bool = False


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_name, value))


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 3600


_DRY_RUN = _FORCE = _Key("true or false", _is_bool, False)
_PROMOTE = {
    "down": _Key("a list of node names", _is_names, []),
    "force": _FORCE,
    "without_etcd": _Key("true or false", _is_bool, False),
    "dry_run": _DRY_RUN,
}
_REMOVE = {"node": _Key("the name of a node", _is_name, required=True), "dry_run": _DRY_RUN}
_DEMOTE = {
    "timeout_s": _Key("a number of seconds from 0 to 3600", _is_seconds, 30.0),
    "force": _FORCE,
    "dry_run": _DRY_RUN,
}
_SWITCHOVER = {"node": _Key("the name of a node, or null", lambda value: value is None or _is_name(value)), **_DEMOTE}
_RENEW = {"dead_letters_arrived": _Key("true or false", _is_bool, False), **_DEMOTE}
_RESYNC = {
    "client": _Key("the name of a client", _is_name, required=True),
    "sites": _Key("a list of names of sites", _is_names, []),
    "to_all": _Key("true or false", _is_bool, False),
    "source": _Key("the name of a source, or null", lambda value: value is None or _is_name(value)),
    "reason": _Key(f"a text of at most {REASON_CHARS_MAX} characters", lambda value: isinstance(value, str) and len(value) <= REASON_CHARS_MAX, ""),
    "dry_run": _DRY_RUN,
}
_PAUSE = {"paused": _Key("true or false", _is_bool, required=True)}
_REINIT = {"force": _FORCE, "dry_run": _DRY_RUN}
COMMANDS: Mapping[str, dict[str, _Key]] = {
    "promote": _PROMOTE, "remove": _REMOVE, "switchover": _SWITCHOVER, "demote": _DEMOTE, "renew": _RENEW, "resync": _RESYNC, "pause": _PAUSE,
    "reload": {},
    "reinit": _REINIT, "definitions/take": {"dry_run": _DRY_RUN},
}  # fmt: skip
METHODS = {"definitions/take": "take_definitions"}


class BadBody(LrqError):
    """The body of a command cannot be used."""


def handle_command(source: Source, name: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """The handler of one of COMMANDS."""

    async def handle(request: web.Request) -> web.Response:
        body = await _read_body(request, COMMANDS[name])
        try:
            ok, text = await getattr(source, METHODS.get(name, name))(**body)
        except LrqError as error:
            ok, text = False, str(error)
        return answer(200 if ok else 409, text)

    return handle


def answer(status: int, text: str, **headers: str) -> web.Response:
    """The answer to a command, or of an error."""
    return web.json_response({"ok": status == 200, "text": text}, status=status, headers=headers)


async def _read_body(request: web.Request, keys: dict[str, _Key]) -> dict[str, Any]:
    """The checked body with every key of `keys`; raises BadBody naming the key, the value and what is allowed."""
    if request.content_type != "application/json":
        raise BadBody(f"content type {request.content_type} is not allowed: send application/json")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            raw = await request.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(reason=f"the body has not come within {BODY_TIMEOUT_S:g} s") from error
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadBody(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadBody(f"the body must be a JSON object with the keys {', '.join(keys)}")
    for name, value in body.items():
        if name not in keys:
            raise BadBody(f"{name}: unknown key; allowed: {', '.join(keys)}")
        if not keys[name].fits(value):
            raise BadBody(f"{name}: must be {keys[name].allowed} (value {json.dumps(value)})")
    for name, key in keys.items():
        if key.required and name not in body:
            raise BadBody(f"{name}: missing; must be {key.allowed}")
    return {name: body.get(name, key.default) for name, key in keys.items()}
