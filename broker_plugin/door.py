"""The sidecar's AMQP port: listens, lets the broker check the login, then hands the connection to a Relay or a PeerEnd.

Rules:
- Login is the broker's: frames pass to it and back until the client opens a vhost. Only then does the door decide. It goes by the one user name
  that the broker has accepted: a client that goes on before the broker asked it to, or names a user twice, is closed.
- The broker takes every client for a local one, so the door itself turns away from outside those who may only log in locally.
- Another node of the group (client property `lrq_node`) and another site (`lrq_site`) must log in as the user of this sidecar itself.
- A node that is not primary refuses clients with CONNECTION_FORCED and names the primary.
- A producer that connects anew ends its older connection: nothing of that can be appended any more.
- A login that is not finished in time is closed; so is one that does not speak AMQP 0-9-1, with AMQP's own answer.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import Counter
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from pamqp import commands, decode

from lrq_ha.replication.errors import LrqError
from lrq_ha.sidecar.config import Config

from . import frames
from .endpoints import Peer, is_routing
from .frames import CONNECTION_CLOSE, CONNECTION_OPEN, CONNECTION_OPEN_OK, PROTOCOL_HEADER, scan
from .peers import PeerEnd
from .relay import Relay
from .replica import Replica

log = logging.getLogger("lrq_ha.door")

CLIENT_HIGH_WATER_BYTES = 1 << 20
CONNECTION_FORCED, ACCESS_REFUSED, NOT_ALLOWED = 320, 403, 530
LOGIN_BYTES_MAX = 1 << 20
ANSWERED_WITH = {
    frames.CONNECTION_START: frames.CONNECTION_START_OK,
    frames.CONNECTION_SECURE: frames.CONNECTION_SECURE_OK,
    frames.CONNECTION_TUNE: frames.CONNECTION_TUNE_OK,
}
LOOPBACK_USERS = frozenset({"guest"})  # RabbitMQ's default of loopback_users


class Host(Protocol):
    """What the door needs of the incarnation behind it."""

    replica: Replica

    def refusal(self) -> str:
        """Why clients are not served now; empty if they are."""

    def push(self, end: PeerEnd, header: bytes, body: bytes) -> None: ...

    def control(self, end: PeerEnd, body: bytes) -> None: ...

    def peer_gone(self, end: PeerEnd) -> None: ...


class End(Protocol):
    """One of the two things that a connection becomes."""

    def client_data(self, data: bytes) -> None: ...

    def broker_data(self, data: bytes) -> None: ...

    def client_lost(self) -> None: ...

    def broker_lost(self) -> None: ...

    def client_full(self, full: bool) -> None: ...

    def broker_full(self, full: bool) -> None: ...


class Door:
    """Listens for one sidecar; stays open from one incarnation to the next.

    Args:
        config: The node's configuration.
    """

    def __init__(self, config: Config) -> None:
        self.whole_config = config
        self.config = config.door
        self.group = config.node.group
        self.sites = frozenset(site.remote_id for site in config.sites)
        self.sidecar_user = unquote(urlsplit(config.broker.url).username or "")
        self.host: Host | None = None
        self.counters: Counter[str] = Counter()
        self.relays: set[Relay] = set()
        self.peer_ends: set[PeerEnd] = set()
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._now = time.monotonic()

    def now(self) -> float:
        """Monotonic seconds, as of the last tick of the door's clock (one second coarse, but free)."""
        return self._now

    async def start(self) -> None:
        """Listens. Raises LrqError if the address is in use."""
        host, _, port = self.config.listen.rpartition(":")
        try:
            self._server = await asyncio.get_running_loop().create_server(lambda: _Client(self), host, int(port), backlog=1024)
        except OSError as error:
            raise LrqError(f"the door cannot listen on {self.config.listen}: {error.strerror}", todo="change door.listen") from error
        self._ticker = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._now = time.monotonic()
            for relay in list(self.relays):
                relay.tick(self._now)
            for end in list(self.peer_ends):
                end.tick(self._now)

    def forget_decisions(self) -> None:
        """What is replicated has changed."""
        for relay in self.relays:
            relay.forget_decisions()

    def fence_producer(self, newer: Relay) -> None:
        """A producer has one connection per vhost: with two, each would take the other's numbers for repeats of its own."""
        for relay in list(self.relays):
            if newer.producer and (relay.producer_key, relay.vhost) == (newer.producer_key, newer.vhost):
                relay.close_client(CONNECTION_FORCED, f"producer '{newer.producer}' has connected anew")

    def close_clients(self, reason: str) -> None:
        """Ends every connection: this node serves nobody any more."""
        for relay in list(self.relays):
            relay.close_client(CONNECTION_FORCED, reason)
            relay.close()
        for end in list(self.peer_ends):
            end.close()

    def gone(self, end: Relay | PeerEnd) -> None:
        """A connection has ended."""
        if isinstance(end, Relay):
            self.relays.discard(end)
        else:
            self.peer_ends.discard(end)
            if self.host is not None:
                self.host.peer_gone(end)

    async def close(self) -> None:
        """Stops listening and ends everything."""
        if self._ticker:
            self._ticker.cancel()
        if self._server:
            self._server.close()
        self.close_clients("this sidecar stops")


class _Client(asyncio.Protocol):
    """The client's socket: the login, then the end that it leads to."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.transport: asyncio.Transport | None = None
        self.broker: _Broker | None = None
        self.end: End | None = None
        self.address = ""
        self._buffer = b""
        self._greeted = False
        self._asked = 0  # what the broker asked in the login and the client has not answered
        self._tuned = False
        self._opening = True  # it has not asked for a vhost yet
        self._user = ""
        self._properties: dict[str, Any] = {}
        self._vhost = ""
        self._tune = (0, frames.FRAME_MAX_BYTES, 0)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.set_write_buffer_limits(CLIENT_HIGH_WATER_BYTES)  # type: ignore[union-attr]
        peer = transport.get_extra_info("peername")
        self.address = f"{peer[0]}:{peer[1]}" if peer else "?"
        self.door.counters["connections"] += 1
        self._timer = asyncio.get_running_loop().call_later(self.door.config.handshake_timeout_s, self._too_slow)

    def _too_slow(self) -> None:
        log.info("%s did not finish its login within %g s", self.address, self.door.config.handshake_timeout_s)
        self.abort()

    def abort(self) -> None:
        if self._timer:
            self._timer.cancel()
        if self.transport:
            self.transport.close()
        if self.broker and self.broker.transport:
            self.broker.transport.close()

    def data_received(self, data: bytes) -> None:
        if self.end is not None:
            self.end.client_data(data)
            return
        self._buffer += data
        if len(self._buffer) > LOGIN_BYTES_MAX:
            log.info("%s sent %d bytes before its login was finished", self.address, len(self._buffer))
            self.abort()
            return
        if not self._greeted and not self._greet():
            return
        if self.broker is not None and self.broker.transport is not None:
            self._login()

    def _greet(self) -> bool:
        if len(self._buffer) < len(PROTOCOL_HEADER) and PROTOCOL_HEADER.startswith(self._buffer):
            return False
        if not self._buffer.startswith(PROTOCOL_HEADER):
            log.info("%s does not speak AMQP 0-9-1 (it began with %r)", self.address, self._buffer[:8])
            if self.transport:
                self.transport.write(PROTOCOL_HEADER)
            self.abort()
            return False
        self._greeted = True
        self._buffer = self._buffer[len(PROTOCOL_HEADER) :]
        self.broker = _Broker(self)
        asyncio.get_running_loop().create_task(self.broker.connect())
        return True

    def _login(self) -> None:
        if not self._opening:
            return  # everything else waits until the broker has answered
        try:
            items, used = scan(self._buffer)
            data, self._buffer = self._buffer, self._buffer[used:]
            for item in items:
                self._login_frame(item[0], data[item[2] : item[3]])
                if not self._opening:
                    self._buffer = data[item[3] + 1 : used] + self._buffer
                    return
        except Exception as error:  # nobody knows yet who sends this
            log.info("%s: %s", self.address, error)
            self.abort()

    def _login_frame(self, kind: int, payload: bytes) -> None:
        frame = frames.frame(frames.HEARTBEAT if kind == frames.HEARTBEAT else frames.METHOD, 0, payload)
        method: Any = frames.decode_method(payload) if kind in ANSWERED_WITH.values() or kind == CONNECTION_OPEN else None
        if ANSWERED_WITH.get(self._asked) == kind:
            self._asked = 0
        elif kind == CONNECTION_OPEN and self._tuned:
            self._opening = False
        elif kind not in (frames.HEARTBEAT, CONNECTION_CLOSE, frames.CONNECTION_CLOSE_OK):
            raise LrqError(f"method {kind:#x} has no place in a login")
        if kind == frames.CONNECTION_START_OK:
            self._start_ok(method)
        elif kind == frames.CONNECTION_TUNE_OK:
            self._tuned = True
            self._tune = (method.channel_max, method.frame_max or frames.FRAME_MAX_BYTES, method.heartbeat)
        elif kind == CONNECTION_OPEN:
            self._vhost = method.virtual_host
            self._open(frame)
            return
        if self.broker and self.broker.transport:
            self.broker.transport.write(frame)

    def _start_ok(self, method: Any) -> None:
        if method.mechanism not in ("PLAIN", "AMQPLAIN"):
            raise LrqError(f"the door cannot tell who logs in by {method.mechanism}")
        self._properties = {k: v for k, v in (method.client_properties or {}).items() if k.startswith("lrq_")}
        response = method.response if isinstance(method.response, bytes) else method.response.encode()
        if method.mechanism == "PLAIN":
            parts = response.split(b"\0")
            self._user = parts[1].decode("utf-8", "replace") if len(parts) == 3 else ""
        elif method.mechanism == "AMQPLAIN":
            login = decode.field_table(len(response).to_bytes(4, "big") + response)[1].get("LOGIN", "")
            self._user = str(login)

    def _open(self, frame: bytes) -> None:
        """The broker has accepted the login: it answers tune only then."""
        host = self.door.host
        if self._user in LOOPBACK_USERS and not _is_loopback(self.address):
            self._refuse(ACCESS_REFUSED, f"user '{self._user}' can only connect via localhost")
            return
        node, site = self._properties.get("lrq_node"), self._properties.get("lrq_site")
        if node is not None or site is not None:
            if self._user != self.door.sidecar_user or not is_routing(self._vhost):
                self._refuse(NOT_ALLOWED, "other nodes and sites log in as this sidecar's own user, to vhost lrq")
                return
            if node is not None and self._properties.get("lrq_group") != self.door.group:
                self._refuse(NOT_ALLOWED, f"this is group {self.door.group}, not {self._properties.get('lrq_group')}")
                return
        if host is None:
            self._refuse(CONNECTION_FORCED, "this sidecar is starting")
            return
        if node is not None:
            self._become_peer(host, int(node))
            return
        refusal = host.refusal()
        if refusal:
            self._refuse(CONNECTION_FORCED, refusal)
            return
        if self.broker and self.broker.transport:
            self.broker.transport.write(frame)

    def _refuse(self, code: int, text: str) -> None:
        self.door.counters["refused_connections"] += 1
        if self.transport:
            self.transport.write(frames.connection_close(code, text))
        if self._timer:
            self._timer.cancel()
        # The client answers close-ok and closes; if it does not, we do.
        asyncio.get_running_loop().call_later(1.0, self.abort)
        self.end = _Refused()

    def _become_peer(self, host: Host, node: int) -> None:
        if self._timer:
            self._timer.cancel()
        if self.broker and self.broker.transport:
            self.broker.client = None
            self.broker.transport.write(frames.connection_close(200, "checked a login"))
            self.broker.transport.close()
        if self.transport is None:
            return
        end = PeerEnd(self.door, host, self.transport, node, heartbeat_s=self._tune[2])
        self.door.peer_ends.add(end)
        self.end = end
        self.transport.write(frames.method_frame(0, commands.Connection.OpenOk()))
        if self._buffer:
            rest, self._buffer = self._buffer, b""
            end.client_data(rest)

    def broker_frames(self, data: bytes) -> None:
        """The broker's side of the login."""
        if self.transport is None:
            return
        items, _ = scan(data)
        for i, item in enumerate(items):
            if item[0] in ANSWERED_WITH:
                self._asked = item[0]
            self.transport.write(data[item[2] - 7 : item[3] + 1])
            if item[0] == CONNECTION_OPEN_OK:
                self._become_relay(data[items[i + 1][2] - 7 :] if i + 1 < len(items) else b"")
                return
            if item[0] == CONNECTION_CLOSE:
                self.abort()

    def _become_relay(self, rest: bytes) -> None:
        host = self.door.host
        if self._timer:
            self._timer.cancel()
        if self.transport is None or self.broker is None or self.broker.transport is None:
            return
        if host is None or host.refusal():
            self._refuse(CONNECTION_FORCED, host.refusal() if host else "this sidecar is starting")
            return
        site = self._properties.get("lrq_site")
        relay = Relay(
            self.door,
            host.replica,
            self.transport,
            self.broker.transport,
            user=self._user,
            vhost=self._vhost,
            producer=str(self._properties.get("lrq_producer", "")),
            peer=Peer(site=str(site)) if site is not None else None,
            frame_max_bytes=self._tune[1],
            heartbeat_s=self._tune[2],
        )
        self.door.fence_producer(relay)
        self.door.relays.add(relay)
        self.end = self.broker.end = relay
        if rest:
            relay.broker_data(rest)
        if self._buffer:
            data, self._buffer = self._buffer, b""
            relay.client_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._timer:
            self._timer.cancel()
        if self.end is not None:
            self.end.client_lost()
        elif self.broker and self.broker.transport:
            self.broker.transport.close()

    def pause_writing(self) -> None:
        if self.end is not None:
            self.end.client_full(True)

    def resume_writing(self) -> None:
        if self.end is not None:
            self.end.client_full(False)


def _is_loopback(address: str) -> bool:
    try:
        host = ipaddress.ip_address(address.rpartition(":")[0].partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(host, "ipv4_mapped", None)
    return (mapped or host).is_loopback


class _Refused:
    """What a refused client still sends is ignored."""

    def client_data(self, data: bytes) -> None: ...

    def broker_data(self, data: bytes) -> None: ...

    def client_lost(self) -> None: ...

    def broker_lost(self) -> None: ...

    def client_full(self, full: bool) -> None: ...

    def broker_full(self, full: bool) -> None: ...


class _Broker(asyncio.Protocol):
    """The broker's socket for one client."""

    def __init__(self, client: _Client) -> None:
        self.client: _Client | None = client
        self.door = client.door
        self.transport: asyncio.Transport | None = None
        self.end: End | None = None
        self._buffer = b""

    async def connect(self) -> None:
        url = urlsplit(self.door.whole_config.broker.url)
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, url.hostname or "", url.port or 0)
        except OSError as error:
            log.warning("the broker does not answer: %s", error)
            if self.client:
                self.client._refuse(CONNECTION_FORCED, "the broker beside this sidecar does not answer")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.set_write_buffer_limits(self.door.config.connection_buffer_bytes_max)  # type: ignore[union-attr]
        if self.client is None or self.client.transport is None:
            transport.close()
            return
        self.transport.write(PROTOCOL_HEADER)  # type: ignore[union-attr]

    def data_received(self, data: bytes) -> None:
        if self.end is not None:
            self.end.broker_data(data)
            return
        self._buffer += data
        items, used = scan(self._buffer)
        if items and self.client is not None:
            whole, self._buffer = self._buffer[:used], self._buffer[used:]
            left = self._buffer
            self.client.broker_frames(whole)
            if self.end is not None and left:
                self._buffer = b""
                self.end.broker_data(left)
            elif self.client is not None and self.client._buffer and self.client.end is None:
                self.client._login()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.end is not None:
            self.end.broker_lost()
        elif self.client is not None and self.client.end is None:
            self.client.abort()

    def pause_writing(self) -> None:
        if self.end is not None:
            self.end.broker_full(True)

    def resume_writing(self) -> None:
        if self.end is not None:
            self.end.broker_full(False)

