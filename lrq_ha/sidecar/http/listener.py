"""One address that the sidecar's HTTP listens on.

Rules:

- A connection sends the whole head of its first request within HEAD_TIMEOUT_S, and of each further one; else it is closed. There are CONNECTIONS_MAX
  at most; more are closed at once, so that no one takes the files that the door needs.
- REQUESTS_MAX requests are served at once; a further one is answered 503.
- Certificates that have changed count from the next connection on: the socket stays, its server is replaced.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import web

from lrq_ha.errors import LrqError

from .commands import answer

REQUESTS_MAX = 64
CONNECTIONS_MAX = 128
HEAD_TIMEOUT_S = 5.0
#: How long `close` waits for requests under way.
CLOSE_TIMEOUT_S = 2.0
BACKLOG = 128

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Arrival(asyncio.Protocol):
    """A connection until it is known whether there is room for it.

    Args:
        server: Counts those that are let in.
        no_request_yet: Gets a timer that ends the connection, until its first request has come.
    """

    def __init__(self, server: web.Server, no_request_yet: dict[asyncio.BaseTransport, asyncio.TimerHandle]) -> None:
        self._server = server
        self._no_request_yet = no_request_yet

    def connection_made(self, connection: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, connection)
        if len(self._server.connections) >= CONNECTIONS_MAX:
            transport.abort()
            return

        def end() -> None:
            self._no_request_yet.pop(transport, None)
            transport.abort()

        self._no_request_yet[transport] = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, end)
        handler = self._server()
        transport.set_protocol(handler)
        handler.connection_made(transport)


class HttpListener:
    """Serves an application on one address.

    Args:
        listen: "HOST:PORT"; an IPv6 host stands in brackets.
        key: The key of the configuration that has the address, for errors.
        app: What is served; gets the limit on requests.
    """

    def __init__(self, listen: str, key: str, app: web.Application) -> None:
        self._listen = listen
        self._key = key
        self._open = 0
        self._no_request_yet: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        app.middlewares.insert(0, self._limit_requests)
        self._runner = web.AppRunner(
            app, handle_signals=False, access_log=None, shutdown_timeout=CLOSE_TIMEOUT_S, keepalive_timeout=HEAD_TIMEOUT_S
        )
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []

    async def start(self, context: ssl.SSLContext | None = None) -> None:
        """Listens; with `context`: with TLS.

        Raises:
            LrqError: The address is in use or cannot be listened on.
        """
        host, _, port = self._listen.rpartition(":")
        await self._runner.setup()
        try:
            self._sockets = await _bind(host.strip("[]"), int(port))
            await self.serve(context)
        except OSError as error:
            await self.close()
            if error.errno == errno.EADDRINUSE:
                raise LrqError(
                    f"address {self._listen} is in use",
                    todo=f"Stop the process that listens there (is this sidecar running already?) or change {self._key}",
                    retriable=True,
                ) from error
            raise LrqError(f"cannot listen on {self._listen}: {error.strerror or error}", todo=f"Change {self._key}") from error

    async def serve(self, context: ssl.SSLContext | None) -> None:
        """Serves connections from now on with this context. Connections that stand go on."""
        counting = self._runner.server
        if counting is None:
            return
        former, self._servers = self._servers, []
        for each in self._sockets:
            server = await asyncio.get_running_loop().create_server(
                lambda: _Arrival(counting, self._no_request_yet),
                sock=each.dup(),
                ssl=context,
                backlog=BACKLOG,
                ssl_handshake_timeout=HEAD_TIMEOUT_S if context else None,
            )
            self._servers.append(server)
        for server in former:
            server.close()

    async def close(self) -> None:
        """Stops listening; requests under way have CLOSE_TIMEOUT_S to end. Harmless if never started."""
        for server in self._servers:
            server.close()
        for each in self._sockets:
            each.close()
        self._servers, self._sockets = [], []
        await self._runner.cleanup()

    @web.middleware
    async def _limit_requests(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.transport and (timer := self._no_request_yet.pop(request.transport, None)):
            timer.cancel()
        if self._open >= REQUESTS_MAX:
            return answer(503, f"{REQUESTS_MAX} requests are being served: try again", **{"Retry-After": "1"})
        self._open += 1
        try:
            return await handler(request)
        finally:
            self._open -= 1


async def _bind(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of a host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                each = socket.socket(family, kind, protocol)
            except OSError:
                if len(found) == 1:
                    raise
                continue  # a host has an address of a family that this machine lacks
            sockets.append(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            each.setblocking(False)
            each.bind(address)
            each.listen(BACKLOG)
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets
