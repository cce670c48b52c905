"""The HTTP side of a sidecar: its status, for people, tools and load balancers, and the operator's commands.

    GET  /status   everything about this node, JSON; /patroni has it, too
    GET  /queues   names of the receive queues here, a JSON list; 503 where it may lack some: on a node that is not primary and no in-sync backup that
                   hears it
    GET  /levels   the queues that the log knows, each with its level: {"vhost", "queue", "level"}, a JSON list; 503 before the log is read
    GET  /tail     the entries that a diverged node refuses to drop, as JSON lines
    GET  /primary, /ready and others: see `probes`; HEAD and OPTIONS are answered with these codes, too
    POST           see `commands`

Rules:

- Every answer is JSON. An unexpected error is a 500, and stands in the log.
- The last line of a tail says that the tail is whole ("kind": "end"), or names the error ("error").
- No web page can send a command: a command needs the content type application/json, which a page of another origin cannot send unasked, and no header
  Origin, which a page of this origin has (its name may have been made to lead here). A request with that header is answered 403.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import hdrs, web

from lrq_ha.errors import LrqError, MalformedInput

from . import probes
from .commands import BODY_BYTES_MAX, COMMANDS, BadBody, answer, handle_command
from .listener import Handler, HttpListener
from .source import Source

log = logging.getLogger("lrq_ha.http")

#: The last line of a tail: without it, entries are missing.
END_OF_TAIL = b'{"kind": "end"}\n'


class HttpServer:
    """Serves `source`.

    Args:
        listen: "HOST:PORT"; an IPv6 host stands in brackets.
        source: Asked for every request.
    """

    def __init__(self, listen: str, source: Source) -> None:
        self._source = source
        self._listener = HttpListener(listen, "http.listen", self._everything())

    async def start(self) -> None:
        """Listens.

        Raises:
            LrqError: The address is in use or cannot be listened on.
        """
        await self._listener.start()

    async def close(self) -> None:
        """Stops listening; requests under way have a moment to end. Harmless if never started."""
        await self._listener.close()

    # ---- what is served ----------------------------------------------------------------------------------------------

    def _everything(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_json], client_max_size=BODY_BYTES_MAX)
        for path in ("/status", "/patroni"):
            app.router.add_get(path, self._status)
        self._add_probes(app)
        app.router.add_get("/queues", self._queues)
        app.router.add_get("/levels", self._levels)
        app.router.add_get("/tail", self._tail)
        for name in COMMANDS:
            app.router.add_post(f"/{name}", handle_command(self._source, name))
        return app

    def _add_probes(self, app: web.Application) -> None:
        for probe in probes.PROBES:
            handler = self._probe(probe)
            for path in probe.paths:
                app.router.add_get(path, handler)
                app.router.add_route(hdrs.METH_OPTIONS, path, handler)

    def _probe(self, probe: probes.Probe) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            code, body = probes.answer(probe, self._source.status(), self._source.refusal(), request.query.get("lag"))
            return web.json_response(body, status=code, headers={"Allow": "GET, HEAD, OPTIONS"})

        return handle

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(self._source.status())

    async def _queues(self, _: web.Request) -> web.Response:
        return web.json_response(self._source.queues())

    async def _levels(self, _: web.Request) -> web.Response:
        return web.json_response(self._source.levels())

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


def _unexpected(error: Exception) -> str:
    return f"an internal error, see the log: {error!r}"


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.method == "POST" and "Origin" in request.headers:
        return answer(403, "commands are not taken from web pages")
    try:
        return await handler(request)
    except (BadBody, MalformedInput) as error:
        return answer(400, str(error))
    except LrqError as error:
        return answer(503, str(error))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return answer(405, f"{request.path} takes {allowed}", Allow=allowed)
    except web.HTTPNotFound:
        known = ", ".join(resource.canonical for resource in request.app.router.resources())
        return answer(404, f"there is no {request.path}; there are {known}")
    except web.HTTPRequestEntityTooLarge:
        return answer(413, f"the body is larger than {BODY_BYTES_MAX} bytes")
    except web.HTTPException as error:
        return answer(error.status, error.reason)
    except ConnectionError:
        raise  # the client has gone
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return answer(500, _unexpected(error))
