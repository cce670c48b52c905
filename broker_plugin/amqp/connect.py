"""Connects to a broker or door: TCP, then the PROXY protocol's header, then TLS. Also tells whether the other side
has hung up.

Rules:
- The protocol gets `connection_made` once, with the final transport, and none of the earlier events.
- A name is looked up once at a time. A lookup cannot be cancelled, and holds one of the loop's few threads while a
  name server does not answer. A caller that gives up and tries again would soon hold all threads, and no other name
  could be looked up.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from .address import Address
from .proxy_header import End, proxy_header

T = TypeVar("T")
_Lookup = asyncio.Task[list[str]]

_lookups: dict[End, _Lookup] = {}


async def connect(address: Address, protocol: asyncio.Protocol, ends: tuple[End, End] | None = None) -> None:
    """Connects `protocol` to `address`.

    Args:
        address: Where, whether with TLS, and whether the PROXY protocol's header comes first.
        protocol: Gets the transport.
        ends: For that header: the client's end, and the end that it has connected to; None: the connection's own.

    Raises:
        OSError: The address cannot be reached, or the TLS handshake failed.
    """
    loop = asyncio.get_running_loop()
    context = address.tls.context if address.tls is not None else None
    name = (address.server_name or address.host) if context is not None else None
    where = await _look_up(address.host, address.port)
    if not address.proxied:
        await _first(where, lambda host: loop.create_connection(lambda: protocol, host, address.port, ssl=context, server_hostname=name))
        return
    transport, _ = await _first(where, lambda host: loop.create_connection(asyncio.Protocol, host, address.port))
    source, destination = ends or (transport.get_extra_info("sockname")[:2], transport.get_extra_info("peername")[:2])
    transport.write(proxy_header(source, destination))
    if context is None:
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        return
    try:
        secured = await loop.start_tls(transport, protocol, context, server_hostname=name)
    except BaseException:
        transport.abort()
        raise
    if secured is None:
        raise ConnectionResetError(f"{address.host}:{address.port} hung up in the TLS handshake")
    protocol.connection_made(secured)


def hung_up(transport: asyncio.Transport) -> bool:
    """Whether the other side has closed its end, also behind unread bytes: a loop that does not read does not notice."""
    connected = transport.get_extra_info("socket")
    if connected is None or connected.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(connected.fileno(), select.POLLRDHUP)  # an error, or the end of both directions, is reported in any case
    return bool(poll.poll(0))


async def _look_up(host: str, port: int) -> list[str]:
    """Addresses of a host. Raises OSError if it has none."""
    lookup = _lookups.get((host, port))
    if lookup is None:
        lookup = _lookups[host, port] = asyncio.get_running_loop().create_task(_ask(host, port))
        lookup.add_done_callback(partial(_answered, (host, port)))
    return await asyncio.shield(lookup)


async def _ask(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _answered(end: End, lookup: _Lookup) -> None:
    del _lookups[end]
    if not lookup.cancelled():
        lookup.exception()  # the future may have no waiter any more


async def _first(hosts: list[str], connect_to: Callable[[str], Awaitable[T]]) -> T:
    """The first connection that one of the addresses takes. Raises OSError: none does."""
    for host in hosts[:-1]:
        try:
            return await connect_to(host)
        except OSError:
            continue
    return await connect_to(hosts[-1])
