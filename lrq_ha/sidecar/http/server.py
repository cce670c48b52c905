"""The HTTP side of a sidecar: its status, for people, tools and load balancers, and the operator's commands.

    GET  /status   everything about this node, JSON; /patroni has it, too
    GET  /cluster  all nodes of the group, as `overview.group.group_values` says: this node asks the others
    GET  /history  the leaders of a group that etcd coordinates: {"leaders", "table"}; 503 without etcd
    GET  /version  {"node", "software", "protocol", "python"}
    GET  /ui       a page that shows /cluster and /history: see `pages`
    GET  /queues   names of the receive queues here, a JSON list; 503 where it may lack some: on a node that is not primary and no in-sync backup that
                   hears it
    GET  /levels   the queues that the log knows, each with its level: {"vhost", "queue", "level"}, a JSON list; 503 before the log is read
    GET  /definitions       the vhosts, users and plugins of this node's broker: {"node", "vhosts", "users": {name: tags}, "plugins"}; 503 without
                            its management API
    GET  /definitions/diff  what this broker's users, policies and so on differ in from the log's: {"object", "how"}, a JSON list
    GET  /tail     the entries that a diverged node refuses to drop, as JSON lines
    GET  /metrics  for Prometheus, as text or OpenMetrics by the header Accept: see `metrics`
    GET  /primary, /ready and others: see `probes`; HEAD and OPTIONS are answered with these codes, too
    POST           see `commands`

Rules:

- Every answer but /metrics and the page is JSON. An unexpected error is a 500, and stands in the log.
- The last line of a tail says that the tail is whole ("kind": "end"), or names the error ("error").
- No web page can send a command: a command needs the content type application/json, which a page of another origin cannot send unasked, and no header
  Origin, which a page of this origin has (its name may have been made to lead here). A request with that header is answered 403.
- Where there is a token, commands and PROTECTED need it: 401. The second address has the probes and /metrics only, and needs none.
"""

from __future__ import annotations

import asyncio
import json
import logging
import platform
import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import hdrs, web

from broker_plugin.amqp.tls import TlsError, TlsFiles
from broker_plugin.log.codec import PROTOCOL
from lrq_ha import __version__
from lrq_ha.errors import LrqError, MalformedInput
from lrq_ha.overview.group import group_values, table_values
from lrq_ha.overview.history import history_table

from . import probes
from .commands import BODY_BYTES_MAX, COMMANDS, BadBody, answer, handle_command
from .listener import Handler, HttpListener
from .metrics import Metrics
from .pages import page_handlers
from .source import Source
from .tokens import TokenFile

log = logging.getLogger("lrq_ha.http")

#: The last line of a tail: without it, entries are missing.
END_OF_TAIL = b'{"kind": "end"}\n'
#: Paths that need the token, as messages and names of users do; beside commands.
PROTECTED = ("/tail", "/definitions", "/definitions/diff")
WATCH_INTERVAL_S = 1.0
NEEDS_TOKEN = (
    "this needs the node's token, as `Authorization: Bearer TOKEN`; lrq-ha takes it from the file in --token-file, or in http.token_file of --config"
)


class HttpServer:
    """Serves `source`.

    Args:
        listen: "HOST:PORT"; an IPv6 host stands in brackets.
        source: Asked for every request.
        metrics: The content of /metrics; None: it is not served.
        probes_listen: As `listen`, for the probes only; empty: none.
        tokens: What commands and PROTECTED need; None: nothing.
        tls: For `listen`; None: without TLS.
    """

    def __init__(
        self,
        listen: str,
        source: Source,
        *,
        metrics: Metrics | None = None,
        probes_listen: str = "",
        tokens: TokenFile | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self._source = source
        self._metrics = metrics
        self._tokens = tokens
        self._tls = tls
        self._listener = HttpListener(listen, "http.listen", self._everything())
        self._probes = HttpListener(probes_listen, "http.probes", self._probes_only()) if probes_listen else None
        self._watching: asyncio.Task[None] | None = None
        self._reload = False

    async def start(self) -> None:
        """Listens.

        Raises:
            LrqError: An address is in use or cannot be listened on.
        """
        await self._listener.start(self._tls.context if self._tls else None)
        if self._probes:
            await self._probes.start()
        if self._tls:
            self._watching = asyncio.create_task(self._watch_certificates(self._tls))

    async def close(self) -> None:
        """Stops listening; requests under way have a moment to end. Harmless if never started."""
        if self._watching:
            self._watching.cancel()
        for listener in filter(None, (self._listener, self._probes)):
            await listener.close()

    def reload(self) -> None:
        """Has the certificates read again, changed or not."""
        self._reload = True

    async def _watch_certificates(self, tls: TlsFiles) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            force, self._reload = self._reload, False
            try:
                if tls.refresh(force):
                    await self._listener.serve(tls.context)
                    log.info("TLS: the certificates of http.listen were read again")
            except (TlsError, OSError) as error:
                log.error("TLS: the certificates of http.listen stay as they were: %s", error)

    # ---- what is served ----------------------------------------------------------------------------------------------

    def _everything(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_json, self._require_token], client_max_size=BODY_BYTES_MAX)
        for path in ("/status", "/patroni"):
            app.router.add_get(path, self._status)
        self._add_probes(app)
        app.router.add_get("/cluster", self._cluster)
        app.router.add_get("/history", self._history)
        app.router.add_get("/version", self._version)
        for path, handler in page_handlers().items():
            app.router.add_get(path, handler)
        app.router.add_get("/queues", self._queues)
        app.router.add_get("/levels", self._levels)
        app.router.add_get("/definitions", self._definitions)
        app.router.add_get("/definitions/diff", self._compare_definitions)
        app.router.add_get("/tail", self._tail)
        for name in COMMANDS:
            app.router.add_post(f"/{name}", handle_command(self._source, name))
        return app

    def _probes_only(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_json], client_max_size=BODY_BYTES_MAX)
        self._add_probes(app)
        return app

    @web.middleware
    async def _require_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        protected = request.method == hdrs.METH_POST or request.path in PROTECTED
        if protected and self._tokens and not self._tokens.accepts(request.headers.get(hdrs.AUTHORIZATION, "")):
            return answer(401, NEEDS_TOKEN, **{hdrs.WWW_AUTHENTICATE: "Bearer"})
        return await handler(request)

    def _add_probes(self, app: web.Application) -> None:
        for probe in probes.PROBES:
            handler = self._probe(probe)
            for path in probe.paths:
                app.router.add_get(path, handler)
                app.router.add_route(hdrs.METH_OPTIONS, path, handler)
        if self._metrics:
            app.router.add_get("/metrics", self._scraped(self._metrics))

    def _probe(self, probe: probes.Probe) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            code, body = probes.answer(probe, self._source.status(), self._source.refusal(), request.query.get("lag"))
            return web.json_response(body, status=code, headers={"Allow": "GET, HEAD, OPTIONS"})

        return handle

    def _scraped(self, metrics: Metrics) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            body, content_type = metrics.render(request.headers.get(hdrs.ACCEPT, ""))
            return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

        return handle

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(self._source.status())

    async def _cluster(self, _: web.Request) -> web.Response:
        reports = await self._source.look_at_group()
        own = reports[0]
        return web.json_response({"node": own.target.name, "time": time.time()} | group_values(own.target.group, reports))

    async def _history(self, _: web.Request) -> web.Response:
        leaders = await self._source.history()
        return web.json_response({"leaders": leaders, "table": table_values(history_table(leaders))})

    async def _version(self, _: web.Request) -> web.Response:
        node = self._source.status()["node"]
        return web.json_response({"node": node, "software": __version__, "protocol": PROTOCOL, "python": platform.python_version()})

    async def _queues(self, _: web.Request) -> web.Response:
        return web.json_response(self._source.queues())

    async def _levels(self, _: web.Request) -> web.Response:
        return web.json_response(self._source.levels())

    async def _definitions(self, _: web.Request) -> web.Response:
        return web.json_response(await self._source.definitions())

    async def _compare_definitions(self, _: web.Request) -> web.Response:
        return web.json_response(await self._source.compare_definitions())

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
