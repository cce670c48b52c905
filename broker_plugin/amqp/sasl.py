"""The contents of login frames: mechanisms, credentials, client properties. Pure.

Rules:
- The broker gets the parsed values, encoded again: two readings of one byte string (a key that stands twice in a
  table) could make a client one user for the door and another for the broker.
- Only mechanisms that name the user to the door are offered: PLAIN and AMQPLAIN, and EXTERNAL where the door itself
  maps certificates to users.
- Client properties pass unchanged but for three: `lrq_client_address`, which only the door may write, a
  `connection_name` where the client gives none, and the capability `connection.blocked`, which the door always has.
- A backup's door that relays a client claims the client's address in `lrq_relayed`, and proves with
  `lrq_relay_proof` that it knows the password of the sidecar that it relays to. The broker sees neither. The proof
  holds for one address and one login only.
"""

from __future__ import annotations

import hmac
import ipaddress
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import content_header
from .encode import short_string
from .frames import FrameError

PLAIN, AMQPLAIN, EXTERNAL = "PLAIN", "AMQPLAIN", "EXTERNAL"
UNDERSTOOD = (PLAIN, AMQPLAIN)
CLIENT_ADDRESS, CONNECTION_NAME = b"lrq_client_address", b"connection_name"
OWN_PREFIX = b"lrq_"
RELAYED, RELAY_PROOF = b"lrq_relayed", b"lrq_relay_proof"
CAPABILITIES, HEARS_BLOCKED = b"capabilities", b"connection.blocked"

_u32 = struct.Struct(">I").unpack_from
_pack_u32 = struct.Struct(">I").pack
_SIGNED, _UNSIGNED = frozenset(b"bsIl"), frozenset(b"tBuiL")
_METHOD_BYTES = 4
_VERSION_BYTES = 2


@dataclass(frozen=True)
class Credentials:
    """A user name and a password as on the wire; printed without either's value."""

    user: bytes
    password: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """The user's name as text; one that is not UTF-8 survives as surrogate escapes."""
        return self.user.decode("utf-8", "surrogateescape")

    def same(self, other: Credentials) -> bool:
        """Whether both are equal, in constant time."""
        return hmac.compare_digest(self.user, other.user) & hmac.compare_digest(self.password, other.password)


@dataclass(frozen=True)
class StartOk:
    """A client's answer to connection.start. `properties` are the fields of its table, `response` is the mechanism's."""

    properties: bytes = field(repr=False)
    mechanism: str
    response: bytes = field(repr=False)
    locale: bytes


def _long(payload: bytes, at: int) -> tuple[bytes, int]:
    try:
        end = at + 4 + _u32(payload, at)[0]
    except struct.error as error:
        raise FrameError("a frame of the login ends too early") from error
    if end > len(payload):
        raise FrameError("a string of the login runs past the end of its frame")
    return payload[at + 4 : end], end


def _short(payload: bytes, at: int) -> tuple[bytes, int]:
    if at >= len(payload) or at + 1 + payload[at] > len(payload):
        raise FrameError("a string of the login runs past the end of its frame")
    end = at + 1 + payload[at]
    return payload[at + 1 : end], end


def offer(start: bytes, external: bool) -> tuple[bytes, list[str]]:
    """The payload of connection.start for the client, and the mechanisms that are left.

    Args:
        start: The broker's.
        external: Whether the door maps this client's certificate to a user.
    """
    _, at = _long(start, _METHOD_BYTES + _VERSION_BYTES)
    offered, end = _long(start, at)
    kept = [name for name in UNDERSTOOD if name.encode() in offered.split()]
    if external and PLAIN in kept:
        kept.insert(0, EXTERNAL)
    mechanisms = " ".join(kept).encode()
    return b"".join((start[:at], _pack_u32(len(mechanisms)), mechanisms, start[end:])), kept


def parse_start_ok(payload: bytes) -> StartOk:
    """Reads a connection.start-ok from its frame's payload. Raises FrameError."""
    properties, at = _long(payload, _METHOD_BYTES)
    mechanism, at = _short(payload, at)
    response, at = _long(payload, at)
    locale, at = _short(payload, at)
    if at != len(payload):
        raise FrameError("a connection.start-ok is longer than its arguments")
    content_header.fields(properties, 0, len(properties))
    return StartOk(properties, mechanism.decode("ascii", "replace"), response, locale)


def credentials(answer: StartOk) -> Credentials | None:
    """The user and password; None if the response has not the mechanism's form."""
    response = answer.response
    if answer.mechanism == PLAIN:
        parts = response.split(b"\0")
        return Credentials(parts[1], parts[2]) if len(parts) == 3 and not parts[0] else None
    if answer.mechanism == AMQPLAIN:
        found: dict[bytes, bytes] = {}
        for start, value, end in content_header.fields(response, 0, len(response)):
            if response[value] == ord("S"):
                found.setdefault(response[start + 1 : value], response[value + 5 : end])
        if b"LOGIN" in found and b"PASSWORD" in found:
            return Credentials(found[b"LOGIN"], found[b"PASSWORD"])
    return None


def encode_start_ok(answer: StartOk, who: Credentials, properties: bytes) -> bytes:
    """The arguments of the connection.start-ok for the broker. EXTERNAL becomes PLAIN: the broker knows nothing of
    the certificate.

    Args:
        answer: The client's.
        who: The user to log in.
        properties: Fields of the client properties.
    """
    if answer.mechanism == AMQPLAIN:
        mechanism, response = AMQPLAIN, content_header.field(b"LOGIN", who.user) + content_header.field(b"PASSWORD", who.password)
    else:
        mechanism, response = PLAIN, b"\0%b\0%b" % (who.user, who.password)
    return b"".join(
        (
            _pack_u32(len(properties)),
            properties,
            short_string(mechanism),
            _pack_u32(len(response)),
            response,
            bytes((len(answer.locale),)),
            answer.locale,
        )
    )


def own_properties(properties: bytes) -> Mapping[str, Any]:
    """The client properties that begin with `lrq_`, where they are strings or whole numbers; of a key that stands twice, the first."""
    found: dict[str, Any] = {}
    for start, value, end in content_header.fields(properties, 0, len(properties)):
        if not properties.startswith(OWN_PREFIX, start + 1):
            continue
        kind, raw = properties[value], properties[value + 1 : end]
        key = properties[start + 1 : value].decode("utf-8", "replace")
        if kind == ord("S"):
            found.setdefault(key, raw[4:].decode("utf-8", "replace"))
        elif kind in _SIGNED or kind in _UNSIGNED:
            found.setdefault(key, int.from_bytes(raw, "big", signed=kind in _SIGNED))
    return found


def capability(properties: bytes, name: bytes) -> bool:
    """Whether the client announces a capability."""
    for start, value, end in content_header.fields(properties, 0, len(properties)):
        if properties[start + 1 : value] == CAPABILITIES and properties[value] == ord("F"):
            for inner, inner_value, _ in content_header.fields(properties, value + 5, end):
                if properties[inner + 1 : inner_value] == name and properties[inner_value] == ord("t"):
                    return properties[inner_value + 1] != 0
    return False


def told_of_alarms(properties: bytes) -> bytes:
    """Client properties with which the broker tells its alarms, whether or not the client understands these (`alarms`)."""
    kept, known = [], b""
    for start, value, end in content_header.fields(properties, 0, len(properties)):
        if properties[start + 1 : value] != CAPABILITIES:
            kept.append(properties[start:end])
        elif properties[value] == ord("F") and not known:
            known = b"".join(
                properties[inner:inner_end]
                for inner, inner_value, inner_end in content_header.fields(properties, value + 5, end)
                if properties[inner + 1 : inner_value] != HEARS_BLOCKED
            )
    table = b"%c%bt\1%b" % (len(HEARS_BLOCKED), HEARS_BLOCKED, known)
    return b"%b%c%bF%b%b" % (b"".join(kept), len(CAPABILITIES), CAPABILITIES, _pack_u32(len(table)), table)


def with_address(properties: bytes, address: str) -> bytes:
    """Client properties that tell the broker the client's address: in `lrq_client_address`, and in the
    connection's name if it has none.

    Args:
        properties: The client's; a `lrq_client_address` among them is cut.
        address: host:port of the client; empty if the broker learns it in another way.
    """
    fields = [(properties[start + 1 : value], properties[start:end]) for start, value, end in content_header.fields(properties, 0, len(properties))]
    kept = [field for key, field in fields if key not in (CLIENT_ADDRESS, RELAYED, RELAY_PROOF)]
    if address:
        raw = address.encode()
        if all(key != CONNECTION_NAME for key, _ in fields):
            kept.append(content_header.field(CONNECTION_NAME, raw))
        kept.append(content_header.field(CLIENT_ADDRESS, raw))
    return b"".join(kept)


def relay(answer: StartOk, who: Credentials, address: str, other: Credentials) -> bytes:
    """The arguments of the connection.start-ok for another node's door, which claim the client's address.

    Args:
        answer: The client's. Its login must be served here: `lrq_relayed` is not in it.
        who: The user to log in.
        address: host:port of the client.
        other: The other node's own credentials.
    """
    sent = parse_start_ok(bytes(_METHOD_BYTES) + encode_start_ok(answer, who, answer.properties))
    claim = content_header.field(RELAYED, address.encode()) + content_header.field(RELAY_PROOF, _proof(sent, address, other))
    return encode_start_ok(answer, who, answer.properties + claim)


def claimed_address(answer: StartOk, own: Credentials) -> str | None:
    """The client's address, host:port, that another node of the group claims; None if none does.

    Args:
        answer: The connection.start-ok.
        own: This node's own credentials.

    Raises:
        FrameError: The claim has no proof, or a wrong one.
    """
    found = own_properties(answer.properties)
    address = found.get(RELAYED.decode())
    if address is None:
        return None
    proof = str(found.get(RELAY_PROOF.decode())).encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(proof, _proof(answer, str(address), own)):
        raise FrameError("client property lrq_relayed is for the nodes of this group")
    return str(address)


def _proof(answer: StartOk, address: str, node: Credentials) -> bytes:
    parts = (b"relay", node.user, address.encode("utf-8", "surrogateescape"), answer.mechanism.encode(), answer.response)
    return hmac.new(node.password, b"".join(_pack_u32(len(part)) + part for part in parts), "sha256").hexdigest().encode()


def is_loopback(host: str) -> bool:
    """Whether an IP address is this machine's own; also an IPv4 address written as IPv6."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def common_name(certificate: Mapping[str, Any] | None) -> str:
    """The common name in the subject of a verified certificate (as `ssl` gives it); empty unless there is exactly one."""
    names = [value for part in (certificate or {}).get("subject", ()) for key, value in part if key == "commonName"]
    return str(names[0]) if len(names) == 1 else ""
