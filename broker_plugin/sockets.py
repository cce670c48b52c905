"""Making a connection to a broker or door: TCP, then what must come before everything else, then TLS.

Rule: the protocol gets `connection_made` once, with the transport that it is to use, and nothing that came before.
"""

from __future__ import annotations

import asyncio

from .client_errors import Address
from .proxy_header import proxy_header

End = tuple[str, int]


async def connect(address: Address, protocol: asyncio.Protocol, ends: tuple[End, End] | None = None) -> None:
    """Connects `protocol` to `address`.

    Args:
        address: Where, whether with TLS, and whether the PROXY protocol's header comes first.
        protocol: What gets the transport.
        ends: For that header: where the client is that the connection is for, and what it has connected to; None: the connection's own.

    Raises:
        OSError: It cannot be reached, or the TLS handshake failed.
    """
    loop = asyncio.get_running_loop()
    context = address.tls.context if address.tls is not None else None
    name = (address.server_name or address.host) if context is not None else None
    if not address.proxied:
        await loop.create_connection(lambda: protocol, address.host, address.port, ssl=context, server_hostname=name)
        return
    transport, _ = await loop.create_connection(asyncio.Protocol, address.host, address.port)
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
