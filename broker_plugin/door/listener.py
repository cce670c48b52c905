"""Accepts connections: counts them, secures them with TLS, then hands each to its protocol.

Rules:
- A connection counts from its accept on, so an endless TLS handshake counts, too. Its time is limited, and `admission` may end it for another.
- The TLS context is the newest at the moment of the accept.
- An accept that fails for want of descriptors is tried again a moment later: established connections are not touched.
- TCP keepalive checks connections without heartbeats: a host that vanishes sends no reset, and its deliveries would be held without end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial

from ..amqp.tls import TlsFiles
from .admission import Admission

log = logging.getLogger("lrq_ha.door")

BACKLOG = 1024
PAUSE_S = 0.1
KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 4}  # gone after two minutes of silence


def _shut(accepted: socket.socket) -> None:
    """Shuts a socket down, so that its present or future reader and writer find it at its end."""
    with suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)


class Listener:
    """Listens for one door.

    Args:
        admit: Called with the peer's address and a function that ends the connection; returns None if no more are taken.
        released: Called when an admitted connection could not be used.
        protocol: Makes the protocol of a connection, which has to call `released` once it has had `connection_made`.
        tls: None for plain connections.
        handshake_timeout_s: Limit on the TLS handshake, in seconds.
    """

    def __init__(
        self,
        admit: Callable[[str, Callable[[], None]], Admission | None],
        released: Callable[[Admission], None],
        protocol: Callable[[Admission], asyncio.Protocol],
        *,
        tls: TlsFiles | None,
        handshake_timeout_s: float,
    ) -> None:
        self._admit, self._released, self._protocol = admit, released, protocol
        self._tls = tls
        self._timeout_s = handshake_timeout_s
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> None:
        """Listens on all addresses of `host`. Raises OSError."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, *_, address in dict.fromkeys(found):
                self._sockets.append(listening := socket.socket(family, socket.SOCK_STREAM))
                listening.setblocking(False)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind(address)
                listening.listen(BACKLOG)
        except OSError:
            self.close()
            raise
        for one in self._sockets:
            self._spawn(self._accept(one))

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                log.error("no connection can be accepted for now: %s", error.strerror)
                await asyncio.sleep(PAUSE_S)
                continue
            name = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
            arrival = self._admit(name, partial(_shut, accepted))
            if arrival is not None:
                self._spawn(self._begin(accepted, name, arrival))
            else:
                accepted.close()

    async def _begin(self, accepted: socket.socket, name: str, arrival: Admission) -> None:
        context = self._tls.context if self._tls is not None else None
        timeout_s = self._timeout_s if context is not None else None
        loop = asyncio.get_running_loop()
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                accepted.setsockopt(socket.IPPROTO_TCP, option, value)
            await loop.connect_accepted_socket(partial(self._protocol, arrival), accepted, ssl=context, ssl_handshake_timeout=timeout_s)
        except (OSError, asyncio.CancelledError) as error:
            accepted.close()
            self._released(arrival)
            if isinstance(error, OSError):
                log.info("%s: no TLS: %s", name, getattr(error, "reason", None) or error)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stops accepting; established connections are not touched."""
        for task in self._tasks:
            task.cancel()
        for one in self._sockets:
            one.close()
        self._sockets.clear()
