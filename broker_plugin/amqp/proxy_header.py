"""The header of the PROXY protocol, version 2, for a connection to the broker on behalf of a client. Pure.

Source: the PROXY protocol specification of HAProxy, section 2.2.

Rules:
- Both addresses have one family; an IPv4 address written as IPv6 is sent as IPv4.
- The command is always PROXY, also for the sidecar's own connections (RabbitMQ 3.10 fails on LOCAL).
"""

from __future__ import annotations

import ipaddress
import struct

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
_PROXY = 0x21
_TCP4, _TCP6 = 0x11, 0x21


def proxy_header(source: tuple[str, int], destination: tuple[str, int]) -> bytes:
    """The header for a client at `source` that has connected to `destination`: each (IP address, port)."""
    addresses = [ipaddress.ip_address(host.partition("%")[0]) for host, _ in (source, destination)]
    plain = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
    ports = struct.pack(">HH", source[1], destination[1])
    if all(address.version == 4 for address in plain):
        body, family = b"".join(address.packed for address in plain) + ports, _TCP4
    else:
        as_v6 = [a if a.version == 6 else ipaddress.ip_address(f"::ffff:{a}") for a in plain]
        body, family = b"".join(address.packed for address in as_v6) + ports, _TCP6
    return SIGNATURE + struct.pack(">BBH", _PROXY, family, len(body)) + body
