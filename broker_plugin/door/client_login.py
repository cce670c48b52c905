"""The login of one connection: its two sockets, from the first byte until the kind of the connection is known.

Rules:
- Frames pass between client and broker, as `handshake` returns them, until the client opens a vhost. Only then does the door decide.
- A producer (client property `lrq_producer`) in vhost lrq has its publishes handled by the door. The broker is first asked with a test message, which
  goes nowhere, whether the producer may publish there at all.
- Where clients are relayed to the primary (`gate`), the door itself begins the login, with the broker's own connection.start. The client's answer
  shows whether it is a node, a site or relayed already: then the login goes on with the broker as any other. All others are relayed; one that
  cannot be is refused by the ordinary login, with the reason.
- A login that is not finished in time, TLS included, is closed. A login that does not use AMQP 0-9-1 is closed, too, with AMQP's own answer.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import cast

from pamqp import commands

from lrq_ha.errors import LrqError
from lrq_ha.routing.names import is_routing

from ..amqp import encode, frames, reply_codes, sasl
from ..amqp.content_header import header_payload
from ..amqp.frames import (
    CHANNEL_CLOSE,
    CHANNEL_CLOSE_OK,
    CONNECTION_CLOSE,
    CONNECTION_OPEN,
    CONNECTION_OPEN_OK,
    CONNECTION_START,
    CONNECTION_START_OK,
    HEARTBEAT,
    PROTOCOL_HEADER,
    scan,
)
from ..amqp.proxy_header import End
from ..amqp.reply_codes import CONNECTION_FORCED
from ..amqp.sasl import Credentials
from ..log import producers
from ..session.decisions import Peer
from ..session.session import Agreed
from . import closing_handshake
from .admission import Admission, Kind
from .broker_login import BrokerLogin
from .client_connection import ClientConnection
from .endpoint import Endpoint, Refused
from .gate import Gate
from .handshake import Handshake, Refusal
from .peer import PeerConnection
from .relay import Relay

log = logging.getLogger("lrq_ha.door")

SILENT_CLOSE_S = 1.0  # before a client without authentication_failure_close is cut off
OTHER_PROTOCOLS = {  # by their first bytes
    b"AMQP\x00": "AMQP 1.0 or an old AMQP",
    b"AMQP\x02": "AMQP 1.0 with TLS",
    b"AMQP\x03": "AMQP 1.0 with SASL",
    b"AMQP": "an old AMQP",
    b"\x16\x03": "TLS, and this door has none",
    b"\x10": "MQTT",
    b"CONNECT": "STOMP",
    b"STOMP": "STOMP",
    b"GET ": "HTTP",
    b"POST ": "HTTP",
    b"PROXY ": "the PROXY protocol, and its address is not in door.proxy_protocol",
    b"\r\n\r\n\x00\r\n": "the PROXY protocol, and its address is not in door.proxy_protocol",
    b"\x00\x00": "perhaps RabbitMQ's stream protocol",
}
PROBE_CHANNEL = 1


class ClientLogin(asyncio.Protocol):
    """The client's socket: the login, then the endpoint that it leads to."""

    def __init__(self, door: Gate, arrival: Admission, ends: tuple[End, End] | None = None) -> None:
        self.door = door
        self._arrival = arrival
        self._ends = ends  # as a load balancer names them
        self.transport: asyncio.Transport | None = None
        self.broker: BrokerLogin | None = None
        self.relay: Relay | None = None
        self.end: Endpoint | None = None
        self.peer: tuple[str, int] = ("", 0)
        self.here: tuple[str, int] = ("", 0)
        self._handshake: Handshake  # from connection_made on
        self._buffer = b""
        self._greeted = False
        self._started = False  # the client has got its connection.start
        self._not_relayed = ""  # why the client is refused, which should have been relayed
        self._opening = True  # the client has not asked for a vhost yet
        self._probing: list[bytes] = []  # the open-ok that waits until it is known whether the user may publish
        self._may_write = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None  # connects to the broker

    # ---- the socket --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        client = self.transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from asyncio's
        client.set_write_buffer_limits(self.door.config.client_buffer_bytes_max)
        own = (tuple((client.get_extra_info(name) or ("", 0))[:2]) for name in ("peername", "sockname"))
        self.peer, self.here = self._ends or own
        self._handshake = Handshake(self.door, *self.peer, self.door.user_of(sasl.common_name(client.get_extra_info("peercert"))))
        self._timer = asyncio.get_running_loop().call_later(self.door.config.handshake_timeout_s, self._too_slow)
        self.door.counters["connections"] += 1
        self._arrival.end = self.abort

    def _too_slow(self) -> None:
        if self.relay is not None:
            self.relay.end(f"{self.relay.primary.name} has not finished the login within {self.door.config.handshake_timeout_s:g} s")
            return
        if self.broker is not None and self._probing:
            log.warning("%s: the broker does not say whether %s may publish: has it an alarm?", self._handshake.address, self._handshake.user)
        else:
            log.info("%s did not finish its login within %g s", self._handshake.address, self.door.config.handshake_timeout_s)
        self.abort()

    def abort(self) -> None:
        """Ends both sides at once."""
        self._stop_waiting()
        if self._task is not None:
            self._task.cancel()
        if self.transport is not None:
            self.transport.abort()
        if self.broker is not None:
            self.broker.leave()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._stop_waiting()
        if self._task is not None:
            self._task.cancel()  # a pending connect to the broker
        other = self.relay or self.broker
        if other is not None and other.transport is not None:
            other.on_lost = partial(self.door.admissions.gone, self._arrival)
        else:
            self.door.admissions.gone(self._arrival)
        end = self.end or self.relay
        if end is not None:
            end.client_lost()
        elif self.broker is not None:
            self.broker.leave()

    def pause_writing(self) -> None:
        if self.end is not None:
            self.end.client_full(True)

    def resume_writing(self) -> None:
        if self.end is not None:
            self.end.client_full(False)

    # ---- frames of the client ----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.end is not None:
            self.end.client_data(data)
            return
        self._buffer += data
        if not self._greeted and not self._greet():
            return
        if self.broker is not None:
            if self.broker.transport is not None:
                self.go_on()
        elif self.relay is None:
            self._relay_or_log_in()
        if self.end is None and self.transport is not None and len(self._buffer) > self.door.config.login_bytes_max:
            self._too_much(self.transport)

    def _too_much(self, client: asyncio.Transport) -> None:
        if not self._opening:  # bytes behind connection.open do not belong to the login
            client.pause_reading()
            return
        log.info("%s sent %d bytes before its login was finished: door.login_bytes_max", self._handshake.address, len(self._buffer))
        self._buffer = b""
        self.abort()

    def _greet(self) -> bool:
        if len(self._buffer) < len(PROTOCOL_HEADER) and PROTOCOL_HEADER.startswith(self._buffer):
            return False
        if not self._buffer.startswith(PROTOCOL_HEADER):
            name = next((name for start, name in OTHER_PROTOCOLS.items() if self._buffer.startswith(start)), "something else")
            log.info("%s speaks %s; only AMQP 0-9-1 goes through the door", self._handshake.address, name)
            self._stop_waiting()
            if self.transport is not None:
                self.transport.write(PROTOCOL_HEADER)
                closing_handshake.end(self.transport)
            return False
        self._greeted = True
        self._buffer = self._buffer[len(PROTOCOL_HEADER) :]
        if self.door.relay_target() is None:
            self._log_in()
        else:
            self._start(self.door.broker_start)
        return True

    def _log_in(self) -> None:
        """Begins the login at the broker."""
        self.broker = BrokerLogin(self)
        self._task = asyncio.get_running_loop().create_task(self.broker.connect())

    def _start(self, payload: bytes) -> None:
        """Gives the client its connection.start, once. `payload`: the broker's."""
        payload = self._handshake.from_broker(CONNECTION_START, payload)
        if not self._started and self.transport is not None:
            self._started = True
            self.transport.write(encode.frame(frames.METHOD, 0, payload))

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the client that wait for the broker's part of the login."""
        return len(self._buffer)

    def go_on(self) -> None:
        """Takes the client's frames up to connection.open: everything behind it waits for the broker's answer."""
        if not self._opening:
            return
        try:
            items, used = scan(self._buffer)
            data, self._buffer = self._buffer, self._buffer[used:]
            for item in items:
                if item[0] == CONNECTION_START_OK and self._moved(data[item[2] : item[3]]):
                    self._buffer = data[item[2] - 7 : used] + self._buffer
                    return
                self._take(item[0], data[item[2] : item[3]])
                if self.end is not None:
                    return
                if not self._opening:
                    self._buffer = data[item[3] + 1 : used] + self._buffer
                    return
        except Refusal as refusal:
            self.refuse(refusal.code, str(refusal))
        except LrqError as error:
            log.info("%s: %s", self._handshake.address, error)
            self.abort()

    def _take(self, kind: int, payload: bytes) -> None:
        payload = self._handshake.from_client(kind, payload)
        if kind == CONNECTION_OPEN:
            self._opening = False
            if self._handshake.node is not None and self.door.host is not None:
                self._become_peer(self._handshake.node)
                return
            self._refuse_if_no_room()
        self._to_broker(encode.frame(HEARTBEAT if kind == HEARTBEAT else frames.METHOD, 0, payload))

    def _refuse_if_no_room(self) -> None:
        """Raises Refusal if there is no room for a client, or if clients are not served now."""
        reason = self.door.closed_because()
        if reason and self._not_relayed:
            reason += f"; {self._not_relayed}"
        if not reason and self._handshake.site is None and not self.door.admissions.has_room_for_client:
            self.door.rejected(self._handshake.address)
            reason = "there is no room for more clients: door.connections_max"
        if reason:
            raise Refusal(CONNECTION_FORCED, reason)

    def refuse(self, code: int, text: str) -> None:
        """Ends the login with an error of the door's own."""
        self.door.counters["refused_connections"] += 1
        self._stop_waiting()
        self.end = Refused()
        if self.broker is not None:
            self.broker.leave()
        if self.transport is None:
            return
        if code:
            closing_handshake.say(self.transport, code, text)
        else:
            asyncio.get_running_loop().call_later(SILENT_CLOSE_S, self.transport.abort)

    # ---- relaying ----------------------------------------------------------------------------------------------------

    def _relay_or_log_in(self) -> None:
        """The client has answered the door's own connection.start: relays it, or goes on with the broker."""
        primary, client = self.door.relay_target(), self.transport
        try:
            items, _ = scan(self._buffer)
            if not items or client is None:
                return
            start_ok = None
            if items[0][0] == CONNECTION_START_OK and primary is not None and primary.door is not None:
                other = Credentials(primary.door.user.encode(), primary.door.password.encode())
                start_ok = self._handshake.relayed_start_ok(self._buffer[items[0][2] : items[0][3]], other)
        except LrqError as error:
            log.info("%s: %s", self._handshake.address, error)
            self.abort()
            return
        if start_ok is None or primary is None:
            self._log_in()
            return
        self.relay = Relay(self.door, self, primary, start_ok, self._handshake.user)
        self._task = asyncio.get_running_loop().create_task(self.relay.connect())

    def relayed(self) -> None:
        """The primary's door has got the client's answer."""
        items, _ = scan(self._buffer)
        left, self._buffer = self._buffer[items[0][3] + 1 :], b""
        if self.relay is not None:
            self.end = self.relay
            self.door.relays.add(self.relay)
            self.relay.client_data(left)

    def not_relayed(self, reason: str) -> None:
        """The primary's door does not begin a login: refuses the client by a login here, at which any client library hears the reason."""
        self.relay, self._not_relayed = None, reason
        self._log_in()

    def relay_logged_in(self) -> str:
        """The login at the primary's door is finished. Returns why the client is not kept; empty if it is."""
        self._stop_waiting()
        if not self.door.admissions.has_room_for_client:
            self.door.rejected(self._handshake.address)
            return "there is no room for more clients: door.connections_max"
        self.door.admissions.logged_in(self._arrival, Kind.CLIENT)
        self._handshake.forget()
        return ""

    def _moved(self, payload: bytes) -> bool:
        """Learns the address that another node claims for the client. Returns whether the login begins again, as the broker is told at its start."""
        peer = self._handshake.learn_origin(payload)
        if peer is None or self.broker is None:
            return False
        self.peer = peer
        self.door.admissions.moved(self._arrival, peer[0])
        if self.door.broker.proxied:
            self.broker.leave("the client's address is known now")
            self._log_in()
        return self.door.broker.proxied

    # ---- frames of the broker ----------------------------------------------------------------------------------------

    def broker_frames(self, data: bytes) -> None:
        """Takes whole frames of the broker."""
        items, _ = scan(data)
        try:
            for i, item in enumerate(items):
                if self.transport is None:
                    return
                kind, payload = item[0], data[item[2] : item[3]]
                if kind == CONNECTION_OPEN_OK and self._needs_probe():
                    self._probe(data[item[2] - 7 : item[3] + 1])
                elif kind == CHANNEL_CLOSE and self._probing:
                    self._may_write = False
                    self._to_broker(encode.method_frame(PROBE_CHANNEL, commands.Channel.CloseOk()))
                elif kind == CONNECTION_OPEN_OK or (kind == CHANNEL_CLOSE_OK and self._probing):
                    if not self._probing:
                        self._probing = [data[item[2] - 7 : item[3] + 1]]
                    self._become_session(data[items[i + 1][2] - 7 :] if i + 1 < len(items) else b"")
                    return
                elif not self._probing or kind in (HEARTBEAT, CONNECTION_CLOSE):
                    self._from_broker(kind, payload)
        except Refusal as refusal:
            self.refuse(refusal.code, str(refusal))
        except LrqError as error:
            log.warning("what the broker says in a login is not understood: %s", error)
            self.refuse(CONNECTION_FORCED, "the broker's login is not understood; the sidecar's log says why")

    def _from_broker(self, kind: int, payload: bytes) -> None:
        if self.transport is None:
            return
        if kind == CONNECTION_CLOSE:
            self._stop_waiting()
            self.end = Refused()
            self.transport.write(encode.frame(frames.METHOD, 0, payload))
            closing_handshake.hand_over(self.transport)
            if self.broker is not None:
                self.broker.leave()
            return
        if kind == CONNECTION_START:
            self.door.broker_start = payload
            self._start(payload)
            return
        payload = self._handshake.from_broker(kind, payload)
        self.transport.write(encode.frame(HEARTBEAT if kind == HEARTBEAT else frames.METHOD, 0, payload))

    def _needs_probe(self) -> bool:
        return is_routing(self._handshake.vhost) and bool(self._handshake.producer) and not self._probing

    def _probe(self, open_ok: bytes) -> None:
        """Asks the broker whether the user may publish to queues by their names: with a message that goes nowhere. A refusal closes the channel;
        the broker answers the door's own close in any case.
        """
        self._probing, self._may_write = [open_ok], True
        header = header_payload(0)
        pieces = [encode.method_frame(PROBE_CHANNEL, commands.Channel.Open()), encode.publish_method(PROBE_CHANNEL, "", "")]
        pieces += encode.content(PROBE_CHANNEL, header, b"")
        pieces.append(encode.method_frame(PROBE_CHANNEL, commands.Channel.Close(200, "", 0, 0)))
        self._to_broker(b"".join(pieces))

    def _to_broker(self, data: bytes) -> None:
        if self.broker is not None and self.broker.transport is not None:
            self.broker.transport.write(data)

    # ---- outcomes ----------------------------------------------------------------------------------------------------

    def _become_peer(self, node: int) -> None:
        self._stop_waiting()
        if self.broker is not None:
            self.broker.leave("checked a login")
        if self.transport is None or self.door.host is None:
            return
        self.door.admissions.logged_in(self._arrival, Kind.OTHER)
        end = PeerConnection(self.door, self.door.host, self.transport, node, heartbeat_s=self._handshake.heartbeat_s)
        self.door.peer_ends.add(end)
        self.end = end
        self.transport.write(encode.method_frame(0, commands.Connection.OpenOk()))
        self._hand_buffer_over(end)

    def _become_session(self, rest: bytes) -> None:
        """The broker has opened the vhost. `rest`: its bytes behind open-ok."""
        self._stop_waiting()
        host = self.door.host
        if self.transport is None or self.broker is None or self.broker.transport is None:
            return
        self._refuse_if_no_room()
        assert host is not None
        agreed = self._handshake
        limit = self.door.config.producers_max
        if agreed.producer and not host.replica.index.dedup.has_room(producers.producer_key(agreed.vhost, agreed.user, agreed.producer), limit):
            text = f"NOT_ALLOWED - the log remembers {limit} producers (door.producers_max), and '{agreed.producer}' is none of them"
            raise Refusal(reply_codes.NOT_ALLOWED, text)
        terms = Agreed(
            user=agreed.user,
            vhost=agreed.vhost,
            producer=agreed.producer,
            ascending=agreed.ascending,
            instance=agreed.instance,
            peer=Peer(site=agreed.site) if agreed.site is not None else None,
            may_write=self._may_write,
            told_blocked=agreed.hears_blocked,
            frame_max_bytes=agreed.frame_max[0],
            broker_frame_max_bytes=agreed.frame_max[1],
            heartbeat_s=agreed.heartbeat_s,
            channels_max=agreed.channels_max[0],
            broker_channels_max=agreed.channels_max[1],
        )
        session = ClientConnection(self.door, host.replica, self.transport, self.broker.transport, terms)
        self.door.admissions.logged_in(self._arrival, Kind.CLIENT if agreed.site is None else Kind.OTHER)
        self.transport.write(self._probing.pop())
        self.door.session_opened(session)
        self.end = self.broker.end = session
        agreed.forget()
        if rest:
            session.broker_data(rest)
        self._hand_buffer_over(session)

    def _hand_buffer_over(self, end: Endpoint) -> None:
        self._task = None
        if self.transport is not None:
            self.transport.resume_reading()
        if self._buffer:
            data, self._buffer = self._buffer, b""
            end.client_data(data)
