"""The HTTP side of a sidecar: its status, for people, tools and load balancers, and the operator's commands.

    GET  /status   everything about this node, JSON
    GET  /primary  200 if this node serves clients, else 503: for a load balancer that must find the primary
    GET  /ready    200 if this node serves clients or is an in-sync backup that hears its primary, else 503
    GET  /queues   names of the receive queues here, a JSON list; 503 where it may lack some: on a node that is not primary and no in-sync backup that
                   hears it
    GET  /definitions       the vhosts and users of this node's broker: {"node", "vhosts", "users": {name: tags}}; 503 without its management API
    GET  /definitions/diff  what this broker's users, policies and so on differ in from the log's: {"object", "how"}, a JSON list
    GET  /levels   the queues that the log knows, each with its level: {"vhost", "queue", "level"}, a JSON list; 503 before the log is read
    POST /promote  {"down": ["e1"], "force": false, "dry_run": false}, every key optional
    POST /remove   {"node": "e2", "dry_run": false}; a node of the set that is not configured any more: "node 3", by its id
    POST /switchover  {"node": "e2", "timeout_s": 30, "force": false, "dry_run": false}; without a node: to any in-sync backup
    POST /demote   {"timeout_s": 30, "force": false, "dry_run": false}; only this node is paused then: tell the others with /pause
    POST /renew    {"timeout_s": 30, "force": false, "dead_letters_arrived": false, "dry_run": false}: everything live is published again, so that a
                   node may join
    POST /resync   {"client": "orders", "sites": ["west"], "to_all": false, "source": null, "reason": "", "dry_run": false}: a full sync of a client,
                   for sites or for all (at the source), or from a source (at the sink)
    POST /definitions/take  {"dry_run": false}: a backup's broker gets the primary's definitions, and loses those that the primary's lacks
    POST /pause    {"paused": true}: no node takes an epoch by itself; false: nodes do again
    GET  /tail     the entries that a diverged node refuses to drop, as JSON lines
    POST /reinit   {"force": false, "dry_run": false}: deletes the node's data; the node follows with an empty log

Rules:

- Every answer is JSON. A command is answered {"ok", "text"}: 200 done, 409 refused, 400 a body that cannot be used; an unusable body changes nothing.
  An unexpected error is a 500, and stands in the log.
- The last line of a tail says that the tail is whole ("kind": "end"), or names the error ("error").
- No web page can send a command: a command needs the content type application/json, which a page of another origin cannot send unasked, and no header
  Origin, which a page of this origin has (its name may have been made to lead here). A request with that header is answered 403.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from lrq_ha.errors import LrqError
from lrq_ha.replication.roles import Role
from lrq_ha.routing.names import REASON_CHARS_MAX

log = logging.getLogger("lrq_ha.http")

BODY_BYTES_MAX = 64 << 10
#: The last line of a tail: without it, entries are missing.
END_OF_TAIL = b'{"kind": "end"}\n'
#: How long `close` waits for requests under way.
CLOSE_TIMEOUT_S = 2.0


class Source(Protocol):
    """The provider of the answers. A refused command returns (False, why); an LrqError also means a refusal."""

    def status(self) -> dict[str, Any]: ...

    def refusal(self) -> str: ...

    def queues(self) -> list[str]: ...

    def levels(self) -> list[dict[str, str]]: ...

    async def definitions(self) -> dict[str, Any]: ...

    async def compare_definitions(self) -> list[dict[str, str]]: ...

    async def take_definitions(self, dry_run: bool) -> tuple[bool, str]: ...

    async def promote(self, down: list[str], force: bool, dry_run: bool) -> tuple[bool, str]: ...

    async def remove(self, node: str, dry_run: bool) -> tuple[bool, str]: ...

    async def switchover(self, node: str | None, timeout_s: float, force: bool, dry_run: bool) -> tuple[bool, str]: ...

    async def demote(self, timeout_s: float, force: bool, dry_run: bool) -> tuple[bool, str]: ...

    async def renew(self, timeout_s: float, force: bool, dead_letters_arrived: bool, dry_run: bool) -> tuple[bool, str]: ...

    async def resync(
        self, client: str, sites: list[str], to_all: bool, source: str | None, reason: str, dry_run: bool
    ) -> tuple[bool, str]: ...

    async def pause(self, paused: bool) -> tuple[bool, str]: ...

    async def reinit(self, force: bool, dry_run: bool) -> tuple[bool, str]: ...

    def tail(self) -> AsyncIterator[dict[str, Any]]: ...


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
_PROMOTE = {"down": _Key("a list of node names", _is_names, []), "force": _FORCE, "dry_run": _DRY_RUN}
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
_TAKE = {"dry_run": _DRY_RUN}
_REINIT = {"force": _FORCE, "dry_run": _DRY_RUN}


class HttpServer:
    """Serves `source` on one address.

    Args:
        listen: "HOST:PORT"; an IPv6 host stands in brackets.
        source: Asked for every request.
    """

    def __init__(self, listen: str, source: Source) -> None:
        self._listen = listen
        self._source = source
        app = web.Application(middlewares=[_errors_as_json], client_max_size=BODY_BYTES_MAX)
        app.router.add_get("/status", self._status)
        app.router.add_get("/primary", self._primary)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/queues", self._queues)
        app.router.add_get("/levels", self._levels)
        app.router.add_get("/definitions", self._definitions)
        app.router.add_get("/definitions/diff", self._compare_definitions)
        app.router.add_post("/definitions/take", self._take_definitions)
        app.router.add_post("/promote", self._promote)
        app.router.add_post("/remove", self._remove)
        app.router.add_post("/switchover", self._switchover)
        app.router.add_post("/demote", self._demote)
        app.router.add_post("/renew", self._renew)
        app.router.add_post("/resync", self._resync)
        app.router.add_post("/pause", self._pause)
        app.router.add_get("/tail", self._tail)
        app.router.add_post("/reinit", self._reinit)
        self._runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=CLOSE_TIMEOUT_S)

    async def start(self) -> None:
        """Listens.

        Raises:
            LrqError: The address is in use or cannot be listened on.
        """
        host, _, port = self._listen.rpartition(":")
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host.strip("[]"), int(port)).start()
        except OSError as error:
            await self._runner.cleanup()
            if error.errno == errno.EADDRINUSE:
                raise LrqError(
                    f"address {self._listen} is in use",
                    todo="Stop the process that listens there (is this sidecar running already?) or change http.listen",
                    retriable=True,
                ) from error
            raise LrqError(f"cannot listen on {self._listen}: {error.strerror or error}", todo="Change http.listen") from error

    async def close(self) -> None:
        """Stops listening; requests under way have CLOSE_TIMEOUT_S to end. Harmless if never started."""
        await self._runner.cleanup()

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(self._source.status())

    async def _primary(self, _: web.Request) -> web.Response:
        return self._if_serving(or_ready=False)

    async def _ready(self, _: web.Request) -> web.Response:
        return self._if_serving(or_ready=True)

    def _if_serving(self, *, or_ready: bool) -> web.Response:
        status = self._source.status()
        # A backup that has lost its primary may have been taken out of the set since, and still stays ready to be promoted.
        ready = or_ready and status.get("role") == Role.READY.value and status.get("primary") is not None
        fits = ready or not self._source.refusal()
        return web.json_response({"node": status.get("node"), "role": status.get("role")}, status=200 if fits else 503)

    async def _queues(self, _: web.Request) -> web.Response:
        return web.json_response(self._source.queues())

    async def _levels(self, _: web.Request) -> web.Response:
        return web.json_response(self._source.levels())

    async def _definitions(self, _: web.Request) -> web.Response:
        return web.json_response(await self._source.definitions())

    async def _compare_definitions(self, _: web.Request) -> web.Response:
        return web.json_response(await self._source.compare_definitions())

    async def _take_definitions(self, request: web.Request) -> web.Response:
        return await _command(self._source.take_definitions(**await _body(request, _TAKE)))

    async def _promote(self, request: web.Request) -> web.Response:
        body = await _body(request, _PROMOTE)
        return await _command(self._source.promote(body["down"], body["force"], body["dry_run"]))

    async def _remove(self, request: web.Request) -> web.Response:
        body = await _body(request, _REMOVE)
        return await _command(self._source.remove(body["node"], body["dry_run"]))

    async def _switchover(self, request: web.Request) -> web.Response:
        return await _command(self._source.switchover(**await _body(request, _SWITCHOVER)))

    async def _demote(self, request: web.Request) -> web.Response:
        return await _command(self._source.demote(**await _body(request, _DEMOTE)))

    async def _renew(self, request: web.Request) -> web.Response:
        return await _command(self._source.renew(**await _body(request, _RENEW)))

    async def _resync(self, request: web.Request) -> web.Response:
        return await _command(self._source.resync(**await _body(request, _RESYNC)))

    async def _pause(self, request: web.Request) -> web.Response:
        return await _command(self._source.pause((await _body(request, _PAUSE))["paused"]))

    async def _reinit(self, request: web.Request) -> web.Response:
        return await _command(self._source.reinit(**await _body(request, _REINIT)))

    async def _tail(self, request: web.Request) -> web.StreamResponse:
        entries = self._source.tail()
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        async for line in _lines(entries):
            await response.write(line)
        await response.write_eof()
        return response


async def _lines(entries: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Entries as JSON lines, and the last one. An error is a line too, as the answer has begun and its status is sent."""
    try:
        async for entry in entries:
            yield json.dumps(entry).encode() + b"\n"
    except Exception as error:
        log.error("the tail cannot be given: %s", error, exc_info=None if isinstance(error, LrqError) else error)
        text = str(error) if isinstance(error, LrqError) else _unexpected(error)
        yield json.dumps({"kind": "error", "text": text}).encode() + b"\n"
    else:
        yield END_OF_TAIL


class _BadBody(LrqError):
    """The body of a command cannot be used."""


async def _command(outcome: Awaitable[tuple[bool, str]]) -> web.Response:
    try:
        ok, text = await outcome
    except LrqError as error:
        ok, text = False, str(error)
    return _answer(200 if ok else 409, text)


def _unexpected(error: Exception) -> str:
    return f"an internal error, see the log: {error!r}"


def _answer(status: int, text: str) -> web.Response:
    return web.json_response({"ok": status == 200, "text": text}, status=status)


async def _body(request: web.Request, keys: dict[str, _Key]) -> dict[str, Any]:
    """The checked body with every key of `keys`; raises _BadBody naming the key, the value and what is allowed."""
    if request.content_type != "application/json":
        raise _BadBody(f"content type {request.content_type} is not allowed: send application/json")
    raw = await request.read()
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:
        raise _BadBody(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _BadBody(f"the body must be a JSON object with the keys {', '.join(keys)}")
    for name, value in body.items():
        if name not in keys:
            raise _BadBody(f"{name}: unknown key; allowed: {', '.join(keys)}")
        if not keys[name].fits(value):
            raise _BadBody(f"{name}: must be {keys[name].allowed} (value {json.dumps(value)})")
    for name, key in keys.items():
        if key.required and name not in body:
            raise _BadBody(f"{name}: missing; must be {key.allowed}")
    return {name: body.get(name, key.default) for name, key in keys.items()}


@web.middleware
async def _errors_as_json(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    if request.method == "POST" and "Origin" in request.headers:
        return _answer(403, "commands are not taken from web pages")
    try:
        return await handler(request)
    except _BadBody as error:
        return _answer(400, str(error))
    except LrqError as error:
        return _answer(503, str(error))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return web.json_response({"ok": False, "text": f"{request.path} takes {allowed}"}, status=405, headers={"Allow": allowed})
    except web.HTTPNotFound:
        known = ", ".join(resource.canonical for resource in request.app.router.resources())
        return _answer(404, f"there is no {request.path}; there are {known}")
    except web.HTTPRequestEntityTooLarge:
        return _answer(413, f"the body is larger than {BODY_BYTES_MAX} bytes")
    except web.HTTPException as error:
        return _answer(error.status, error.reason)
    except ConnectionError:
        raise  # the client has gone
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return _answer(500, _unexpected(error))
