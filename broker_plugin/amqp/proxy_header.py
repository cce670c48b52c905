"""The header of the PROXY protocol: version 2 for a connection to the broker on behalf of a client, versions 1 and 2 of a load balancer. Pure.

Source: the PROXY protocol specification of HAProxy, sections 2.1 and 2.2.

Rules:
- In a header that is made, both addresses have one family; an IPv4 address written as IPv6 is sent as IPv4. The command is always PROXY, also for
  the sidecar's own connections (RabbitMQ 3.10 fails on LOCAL).
- A header that is read names a TCP connection, or none (LOCAL, UNKNOWN, no IP address): then the connection speaks for itself. Anything else is an
  error. Fields of version 2 behind the addresses are skipped.
- Only this machine's own clients have a loopback address (`believe`).
"""

from __future__ import annotations

import ipaddress
import struct
from typing import TypeAlias

from lrq_ha.errors import MalformedInput

from .sasl import is_loopback

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
V1_BEGINNING = b"PROXY "
V1_END = b"\r\n"
V1_BYTES_MAX = 107
V2_HEAD_BYTES = 16
V2_REST_BYTES_MAX = 4_096
_LOCAL, _PROXY = 0x20, 0x21
_TCP4, _TCP6 = 0x11, 0x21
_NOT_IP = frozenset({0x00, 0x31, 0x32})  # no family, and sockets of Unix
_IP_BYTES = {_TCP4: 4, _TCP6: 16}
_V1_FAMILIES = {b"TCP4": ipaddress.IPv4Address, b"TCP6": ipaddress.IPv6Address}

End: TypeAlias = tuple[str, int]
"""IP address and port."""


class ProxyHeaderError(MalformedInput):
    """Bytes that begin as a header of the PROXY protocol, and are none."""


def proxy_header(source: End, destination: End) -> bytes:
    """The header for a client at `source` that has connected to `destination`."""
    addresses = [ipaddress.ip_address(host.partition("%")[0]) for host, _ in (source, destination)]
    plain = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
    ports = struct.pack(">HH", source[1], destination[1])
    if all(address.version == 4 for address in plain):
        body, family = b"".join(address.packed for address in plain) + ports, _TCP4
    else:
        as_v6 = [a if a.version == 6 else ipaddress.ip_address(f"::ffff:{a}") for a in plain]
        body, family = b"".join(address.packed for address in as_v6) + ports, _TCP6
    return SIGNATURE + struct.pack(">BBH", _PROXY, family, len(body)) + body


def parse_v1(line: bytes) -> tuple[End, End] | None:
    """Source and destination that a header of version 1 names; None if it names none. Raises ProxyHeaderError.

    Args:
        line: The header, with its line end.
    """
    words = line.removesuffix(V1_END).split(b" ")
    if words[1:2] == [b"UNKNOWN"]:
        return None
    family = _V1_FAMILIES.get(words[1]) if len(words) == 6 else None
    if family is None:
        raise ProxyHeaderError("a header of version 1 of the PROXY protocol has another form")
    try:
        hosts = [str(family(word.decode("ascii"))) for word in words[2:4]]
    except ValueError:
        raise ProxyHeaderError("a header of version 1 of the PROXY protocol names no IP address") from None
    return (hosts[0], _port(words[4])), (hosts[1], _port(words[5]))


def _port(word: bytes) -> int:
    if not word.isdigit() or len(word) > 5 or int(word) > 0xFFFF or (word[:1] == b"0" and word != b"0"):
        raise ProxyHeaderError("a header of version 1 of the PROXY protocol names no port")
    return int(word)


def rest_of_v2(head: bytes) -> int:
    """Number of bytes behind the first 16 of a header of version 2. Raises ProxyHeaderError."""
    rest = int.from_bytes(head[14:16], "big")
    if not head.startswith(SIGNATURE) or head[12] not in (_LOCAL, _PROXY) or rest > V2_REST_BYTES_MAX:
        raise ProxyHeaderError("a header of version 2 of the PROXY protocol has another form")
    return rest


def parse_v2(head: bytes, rest: bytes) -> tuple[End, End] | None:
    """Source and destination that a header of version 2 names; None if it names none. Raises ProxyHeaderError.

    Args:
        head: Its first 16 bytes, which `rest_of_v2` has accepted.
        rest: The bytes behind.
    """
    family = head[13]
    if head[12] == _LOCAL or family in _NOT_IP:
        return None
    size = _IP_BYTES.get(family, 0)
    if not size or len(rest) < 2 * size + 4:
        raise ProxyHeaderError("a header of version 2 of the PROXY protocol names no TCP connection")
    hosts = [str(ipaddress.ip_address(rest[at : at + size])) for at in (0, size)]
    ports = struct.unpack_from(">HH", rest, 2 * size)
    return (hosts[0], ports[0]), (hosts[1], ports[1])


def believe(claimed: End, by: End) -> End:
    """The address of a client: the one that another machine claims for it. That machine's own address, if it claims a loopback address."""
    return by if is_loopback(claimed[0]) and not is_loopback(by[0]) else claimed
