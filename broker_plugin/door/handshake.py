"""The negotiation in the login of one connection: checks every method of the client and of the broker, and returns the other side's version.

Rules:
- The broker decides on the login; the door relies on the one user name that the broker has accepted. A client that goes on before the broker asked,
  or names a user twice, is closed.
- The broker takes every client for a local one. So the door itself refuses remote clients whose user may only log in locally, at that moment
  and with that text of the broker.
- Another node of the group (client property `lrq_node`) and another site (`lrq_site`) present the credentials of this sidecar itself: user and
  password, since not every broker takes the name that a client gives as its user.
- A client that another node's door relays has the address that this node claims for it (client property `lrq_relayed`), with a proof. It is not
  relayed a second time.
- No sockets here: those are in `client_login`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lrq_ha.errors import LrqError
from lrq_ha.routing import names
from lrq_ha.routing.names import is_routing

from ..amqp import encode, frames, sasl
from ..amqp.frames import (
    CONNECTION_CLOSE,
    CONNECTION_CLOSE_OK,
    CONNECTION_OPEN,
    CONNECTION_START,
    CONNECTION_START_OK,
    CONNECTION_TUNE,
    CONNECTION_TUNE_OK,
    HEARTBEAT,
)
from ..amqp.proxy_header import End, believe
from ..amqp.reply_codes import ACCESS_REFUSED, CONNECTION_FORCED, NOT_ALLOWED
from ..amqp.sasl import Credentials
from .gate import Gate
from .peer import PROCESS

log = logging.getLogger("lrq_ha.door")

ENDS_HERE = frozenset({"lrq_node", "lrq_site", "lrq_relayed"})  # a login with one of these properties is not relayed
ANSWERED_WITH = {CONNECTION_START: CONNECTION_START_OK, CONNECTION_TUNE: CONNECTION_TUNE_OK}


class Refusal(LrqError):
    """A login that the door refuses.

    Args:
        code: AMQP reply code; 0 to close without a connection.close.
        text: The client's text.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Handshake:
    """The negotiation of one login. `vhost` and the attributes behind it are known when the client has asked for a vhost.

    Args:
        door: The door.
        host, port: The client's address.
        external: The user that the door maps the client's certificate to; empty if it maps it to none.

    Attributes:
        user: The user that logs in.
        vhost: The vhost to open.
        hears_blocked: Whether the client understands connection.blocked.
        frame_max: Agreed bytes: with the client, with the broker.
        heartbeat_s: Seconds; 0 for none.
        channels_max: Agreed channels, 0 for no limit: with the client, with the broker.
    """

    def __init__(self, door: Gate, host: str, port: int, external: str) -> None:
        self.address = _address(host, port)
        self.user = ""
        self.vhost = ""
        self.hears_blocked = False
        self.frame_max = (frames.FRAME_MAX_BYTES, frames.FRAME_MAX_BYTES)
        self.heartbeat_s = 0
        self.channels_max = (0, 0)
        self._door = door
        self._host, self._port = host, port
        self._external = external
        self._asked = 0  # the broker's method that the client has not answered
        self._tuned = False
        self._who: Credentials | None = None
        self._mechanism = ""
        self._told = False  # whether the client understands connection.close as the answer to a login
        self._properties: Mapping[str, Any] = {}
        self._offered_bytes = 0  # frame_max, to the client
        self._broker_channels = 0  # channel_max, of the broker

    @property
    def node(self) -> int | None:
        """Number of the node of this group that connects; None for any other client."""
        return self._properties.get("lrq_node")

    @property
    def site(self) -> str | None:
        """The site whose sidecar connects; None for any other client."""
        site = self._properties.get("lrq_site")
        return None if site is None else str(site)

    @property
    def producer(self) -> str:
        """The producer that the client announces; empty if none."""
        return str(self._properties.get("lrq_producer", ""))

    @property
    def ascending(self) -> bool:
        """Whether the client announces that its producer skips numbers in ascending order."""
        return self._properties.get("lrq_ids") == names.ASCENDING

    @property
    def instance(self) -> str:
        """An ID common to the connections of one publisher; empty if the client announces none."""
        return str(self._properties.get("lrq_instance", ""))

    def forget(self) -> None:
        """The login is over: the password is needed no more."""
        self._who = None

    def relayed_start_ok(self, payload: bytes, other: Credentials) -> bytes | None:
        """The payload of the connection.start-ok for another node's door; None if this login is not to be relayed. Raises LrqError.

        Args:
            payload: The client's.
            other: The other node's own credentials.
        """
        answer = sasl.parse_start_ok(payload)
        who = self._door.mapped(self._external) if answer.mechanism == sasl.EXTERNAL else sasl.credentials(answer)
        if who is None or ENDS_HERE & sasl.own_properties(answer.properties).keys():
            return None
        self.user = who.name
        return payload[:4] + sasl.relay(answer, who, self.address, other)

    def learn_origin(self, payload: bytes) -> End | None:
        """Takes the address that another node claims for a client. Returns the address, if it is another than the one known; raises LrqError.

        Args:
            payload: The connection.start-ok.
        """
        try:
            claimed = sasl.claimed_address(sasl.parse_start_ok(payload), self._door.own)
        except frames.FrameError as error:
            log.info("%s: %s", self.address, error)
            raise Refusal(NOT_ALLOWED, f"NOT_ALLOWED - {error}") from error
        if claimed is None:
            return None
        host, _, port = claimed.rpartition(":")
        before = self._host, self._port
        self._host, self._port = believe((host.strip("[]"), int(port)), before)
        self.address = _address(self._host, self._port)
        return None if before == (self._host, self._port) else (self._host, self._port)

    # ---- methods of the client ---------------------------------------------------------------------------------------

    def from_client(self, kind: int, payload: bytes) -> bytes:
        """Returns the broker's version of a frame of the client.

        Raises:
            Refusal: The login is refused; the client gets the reason.
            LrqError: The client violates the protocol.
        """
        if ANSWERED_WITH.get(self._asked) == kind:
            self._asked = 0
        elif not (kind == CONNECTION_OPEN and self._tuned) and kind not in (HEARTBEAT, CONNECTION_CLOSE, CONNECTION_CLOSE_OK):
            raise LrqError(f"method {kind:#x} has no place in a login")
        if kind == CONNECTION_START_OK:
            return payload[:4] + self._start_ok(payload)
        if kind == CONNECTION_TUNE_OK:
            return self._tune_ok(frames.decode_method(payload))
        if kind == CONNECTION_OPEN:
            method: Any = frames.decode_method(payload)
            self.vhost = method.virtual_host
            self._may_open()
        return payload

    def _start_ok(self, payload: bytes) -> bytes:
        """The broker's version of the client's start-ok."""
        answer = sasl.parse_start_ok(payload)
        self._told = sasl.capability(answer.properties, b"authentication_failure_close")
        self.hears_blocked = sasl.capability(answer.properties, sasl.HEARS_BLOCKED)
        self._properties = sasl.own_properties(answer.properties)
        self._mechanism = answer.mechanism
        if answer.mechanism == sasl.EXTERNAL:
            who = self._door.mapped(self._external)
            if who is None:
                log.info("%s: EXTERNAL, but its certificate is none of door.tls.users", self.address)
                raise Refusal(ACCESS_REFUSED, "ACCESS_REFUSED - the door takes EXTERNAL only from certificates that its configuration maps to users")
        elif answer.mechanism in sasl.UNDERSTOOD:
            who = sasl.credentials(answer)
            if who is None:
                raise self._login_refused("its response has not the mechanism's form")
        else:
            raise Refusal(ACCESS_REFUSED, f"ACCESS_REFUSED - the door cannot tell who logs in otherwise than by {' or '.join(sasl.UNDERSTOOD)}")
        self._who, self.user = who, who.name
        address = "" if self._door.broker.proxied else self.address
        return sasl.encode_start_ok(answer, who, sasl.with_address(sasl.told_of_alarms(answer.properties), address))

    def _tune_ok(self, method: Any) -> bytes:
        """The broker's version of the client's tune-ok. Requests beyond the broker's limits are for the broker to refuse."""
        asked, most = method.frame_max, self._door.config.frame_max_bytes
        if self._offered_bytes and not 0 < asked <= max(most, self._offered_bytes):
            raise Refusal(NOT_ALLOWED, f"NOT_ALLOWED - negotiated frame_max = {asked} is higher than the maximum allowed value ({most})")
        channels, most = method.channel_max, self._door.config.channels_max
        if most < self._broker_channels and not 0 < channels <= most:
            raise Refusal(NOT_ALLOWED, f"NOT_ALLOWED - negotiated channel_max = {channels} is higher than the maximum allowed value ({most})")
        if asked and asked <= self._offered_bytes:
            method.frame_max += frames.HEADROOM_BYTES
        self._tuned = True
        self.frame_max = (asked or frames.FRAME_MAX_ANY_BYTES, method.frame_max or frames.FRAME_MAX_ANY_BYTES)
        if 0 < channels < self._broker_channels:
            method.channel_max += 1  # the door's own (see `permissions`)
        self.heartbeat_s, self.channels_max = method.heartbeat, (channels, method.channel_max)
        return encode.encode_method(method)

    def _login_refused(self, why: str) -> Refusal:
        """A refusal with the broker's text: only the log has the reason."""
        log.info("%s: user '%s': %s", self.address, self.user, why)
        text = f"ACCESS_REFUSED - Login was refused using authentication mechanism {self._mechanism}. For details see the broker logfile."
        return Refusal(ACCESS_REFUSED if self._told else 0, text)

    def _may_open(self) -> None:
        """Checks the client's properties once the broker has accepted the login (it sends tune only then). Raises Refusal."""
        node, site = self._properties.get("lrq_node"), self._properties.get("lrq_site")
        producer = self._properties.get("lrq_producer")
        if node is not None or site is not None:
            if self._who is None or not self._who.same(self._door.own) or not is_routing(self.vhost):
                raise Refusal(NOT_ALLOWED, "other nodes and sites log in as this sidecar's own user, to vhost lrq")
            if node is not None and self._properties.get("lrq_group") != self._door.group:
                raise Refusal(NOT_ALLOWED, f"this is group {self._door.group}, not {self._properties.get('lrq_group')}")
            if self._properties.get("lrq_process") == PROCESS:
                raise Refusal(NOT_ALLOWED, f"this door is node {node}'s own: correct the address in its [[peers]]")
        if producer is not None and not (isinstance(producer, str) and names.is_producer(producer)):
            raise Refusal(NOT_ALLOWED, "NOT_ALLOWED - client property lrq_producer is no producer name: 1 to 128 of letters, digits and ._:@-")
        if self._properties.get("lrq_ids", names.ASCENDING) != names.ASCENDING:
            text = f"NOT_ALLOWED - client property lrq_ids is not '{names.ASCENDING}', the only value: leave it out for consecutive numbers"
            raise Refusal(NOT_ALLOWED, text)
        if node is not None and not (isinstance(node, int) and 0 < node < 256):
            raise Refusal(NOT_ALLOWED, f"client property lrq_node is {str(node)[:20]!r}, not the number of a node")

    # ---- methods of the broker ---------------------------------------------------------------------------------------

    def from_broker(self, kind: int, payload: bytes) -> bytes:
        """Returns the client's version of a frame of the broker. Raises as `from_client` does."""
        if kind in ANSWERED_WITH:
            self._asked = kind
        if kind == CONNECTION_START:
            payload, mechanisms = sasl.offer(payload, bool(self._external))
            if not mechanisms:
                log.error("the broker offers none of %s, and the door understands no other", ", ".join(sasl.UNDERSTOOD))
                raise Refusal(CONNECTION_FORCED, "the broker offers no way to log in that the door understands")
        elif kind == CONNECTION_TUNE:
            if self.user in self._door.config.loopback_users and not sasl.is_loopback(self._host):
                raise self._login_refused("it can only connect via localhost")
            payload = self._limit(payload)
        elif kind != HEARTBEAT:
            raise LrqError(f"method {kind:#x} of the broker has no place in a login")
        return payload

    def _limit(self, payload: bytes) -> bytes:
        """The broker's tune, with the door's own limits, room for positions in the header frames of publishes, and one channel less."""
        tune: Any = frames.decode_method(payload)
        most = tune.frame_max or frames.FRAME_MAX_ANY_BYTES
        if most >= frames.FRAME_MIN_BYTES + frames.HEADROOM_BYTES:
            most -= frames.HEADROOM_BYTES
        tune.frame_max = self._offered_bytes = min(most, self._door.config.frame_max_bytes)
        self._broker_channels = tune.channel_max or frames.CHANNELS_MAX
        tune.channel_max = min(max(self._broker_channels - 1, 1), self._door.config.channels_max)
        return encode.encode_method(tune)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
