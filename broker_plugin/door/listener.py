"""Accepts connections: counts them, secures them with TLS, then hands each to its protocol.

Rules:
- Of a load balancer (`door.proxy_protocol`) the PROXY protocol's header is read first, if it sends one, within the time of a TLS handshake. Of any
  other address nothing is read here, so a header of it is no AMQP.
- A connection counts from its accept on, so an endless TLS handshake counts, too. Its time is limited, and `admission` may end it for another.
- The TLS context is the newest at the moment of the accept.
- An accept that fails for want of descriptors is tried again a moment later: established connections are not touched.
- TCP keepalive checks connections without heartbeats: a host that vanishes sends no reset, and its deliveries would be held without end.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial

from lrq_ha.errors import LrqError

from ..amqp.proxy_header import End, believe
from ..amqp.tls import TlsFiles
from .admission import Admission, AdmissionControl
from .proxied import read_proxy_header

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
        admissions: Told of an admitted connection that could not be used, and of the address that a load balancer names for one.
        protocol: Makes the protocol of a connection, of its admission and the ends that a load balancer names, the client's and its own; None: the
            socket's. It has to tell `admissions` that the connection is gone, once it has had `connection_made`.
        tls: None for plain connections.
        handshake_timeout_s: Limit on the TLS handshake, and on the PROXY protocol's header, in seconds.
        proxies: Addresses and networks of load balancers.
    """

    def __init__(
        self,
        admit: Callable[[str, Callable[[], None]], Admission | None],
        admissions: AdmissionControl,
        protocol: Callable[[Admission, tuple[End, End] | None], asyncio.Protocol],
        *,
        tls: TlsFiles | None,
        handshake_timeout_s: float,
        proxies: Sequence[str] = (),
    ) -> None:
        self._admit, self._admissions, self._protocol = admit, admissions, protocol
        self._tls = tls
        self.limit(handshake_timeout_s, proxies)
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def limit(self, handshake_timeout_s: float, proxies: Sequence[str]) -> None:
        """Sets the limit and the load balancers, for connections that come afterwards."""
        self._timeout_s = handshake_timeout_s
        self._proxies = [ipaddress.ip_network(proxy) for proxy in proxies]

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
            ends = await self._ends(accepted, arrival)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                accepted.setsockopt(socket.IPPROTO_TCP, option, value)
            await loop.connect_accepted_socket(partial(self._protocol, arrival, ends), accepted, ssl=context, ssl_handshake_timeout=timeout_s)
        except (OSError, LrqError, asyncio.CancelledError) as error:
            accepted.close()
            self._admissions.gone(arrival)
            if isinstance(error, LrqError):
                log.info("%s: %s", name, error)
            elif isinstance(error, OSError):
                log.info("%s: no TLS: %s", name, getattr(error, "reason", None) or error)

    async def _ends(self, accepted: socket.socket, arrival: Admission) -> tuple[End, End] | None:
        """The client's end, and the one it has connected to, if a load balancer names them. Raises LrqError, OSError."""
        address = ipaddress.ip_address(arrival.host.strip("[]").partition("%")[0])
        if not any(address in proxy for proxy in self._proxies):
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                ends = await read_proxy_header(accepted)
        except TimeoutError:
            raise LrqError(f"no whole PROXY protocol header, nor anything else, within {self._timeout_s:g} s") from None
        if ends is None:
            return None
        source = believe(ends[0], accepted.getpeername()[:2])
        self._admissions.moved(arrival, source[0])
        return source, ends[1]

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
