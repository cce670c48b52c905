"""A client of a backup's door that is relayed to the primary's door: its two sockets, and how it ends.

The client has answered a connection.start of this door (`client_login`). The relay connects to the primary's door, passes on the answer with the
client's address and a proof (`amqp.sasl`), and from then on every byte, in both directions. The primary's door does everything else: login, limits,
confirms. Heartbeats pass through.

Rules:
- The client gets whole frames only. So it stands at the boundary of a frame at any time, and a connection.close with the reason can end it.
- A relay belongs to one primary, and ends when this node follows another one, leads itself, or has not heard its primary for UNHEARD_S.
- A side that does not read stops the reading from the other. Bytes that wait on either side count among those of clients that do not keep up.
- When the client is gone, its bytes still go to the primary, within `door.drain_timeout_s`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, cast

from lrq_ha.errors import LrqError

from ..amqp import encode
from ..amqp.address import Address
from ..amqp.connect import connect
from ..amqp.frame_runs import FrameRuns
from ..amqp.frames import CONNECTION_CLOSE, CONNECTION_CLOSE_OK, CONNECTION_OPEN_OK, CONNECTION_START, METHOD, PROTOCOL_HEADER
from ..amqp.reply_codes import CONNECTION_FORCED
from ..session.settings import DoorLimits
from . import closing_handshake
from .endpoint import Endpoint

log = logging.getLogger("lrq_ha.door")

UNHEARD_S = 5.0
QUIET_S = 0.5  # before a stop: the client has its confirms when the primary has been silent for so long
CONNECT_SHARE = 1 / 3  # of door.handshake_timeout_s: the client can still be told why it is not relayed


@dataclass(frozen=True)
class Primary:
    """A primary.

    Attributes:
        node: Its id.
        name: Its name.
        door: Its door, with the credentials of its sidecar; None: this node itself leads.
    """

    node: int
    name: str
    door: Address | None


class RelayedClient(Protocol):
    """The client's socket (`client_login`)."""

    transport: asyncio.Transport | None

    def relayed(self) -> None:
        """The primary's door has got the client's answer."""

    def not_relayed(self, reason: str) -> None:
        """The primary's door does not begin a login."""

    def relay_logged_in(self) -> str:
        """The login is finished. Returns why the client is not kept; empty if it is."""


class RelayDoor(Protocol):
    """The interface of a door for a relay (`gate`)."""

    @property
    def config(self) -> DoorLimits: ...
    def weigh_relay(self, relay: Relay, waiting_bytes: int) -> None: ...
    def relay_closed(self, relay: Relay) -> None: ...


class _Stage(Enum):
    CONNECTING = "the primary's door has not begun the login"
    LOGIN = "the login is not finished"
    OPEN = "bytes pass"
    CLOSING = "the primary or the client has begun the handshake that closes the connection"
    ENDED = "this door has ended the connection"


class Relay(Endpoint, asyncio.Protocol):
    """One relayed connection: the client's endpoint, and the protocol of the socket to the primary's door.

    Args:
        door: The door.
        client: The client's socket.
        primary: The primary, with its door.
        start_ok: The payload of the client's answer.
        user: The user that logs in.

    Attributes:
        transport: To the primary's door; None if there is none.
        on_lost: Called when that has closed.
    """

    def __init__(self, door: RelayDoor, client: RelayedClient, primary: Primary, start_ok: bytes, user: str) -> None:
        self.primary, self.user = primary, user
        self.transport: asyncio.Transport | None = None
        self.on_lost: Callable[[], None] | None = None
        self._door, self._client = door, client
        self._start_ok = start_ok
        self._begun = asyncio.Event()
        self._stage = _Stage.CONNECTING
        self._frames = FrameRuns()
        self._runs = 0  # runs of frames that the client got
        self._full = {"client": False, "primary": False}
        self._stopping: asyncio.Task[None] | None = None

    # ---- the primary's side ------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connects to the primary's door and begins the login there, or tells the client's side why it cannot."""
        assert self.primary.door is not None
        try:
            async with asyncio.timeout(self._door.config.handshake_timeout_s * CONNECT_SHARE):
                await connect(self.primary.door, self)
                await self._begun.wait()
        except (OSError, TimeoutError) as error:
            log.warning("no client is relayed: the door of %s does not answer: %s", self.primary.name, str(error) or "not in time")
        if self._stage is _Stage.CONNECTING:
            self._stage = _Stage.ENDED
            self._leave_primary()
            self._client.not_relayed(f"the door of {self.primary.name} does not answer")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._stage is _Stage.ENDED:
            self.transport.abort()
            return
        self.transport.set_write_buffer_limits(self._door.config.connection_buffer_bytes_max)
        self.transport.write(PROTOCOL_HEADER)

    def data_received(self, data: bytes) -> None:
        client = self._client.transport
        if self._stage is _Stage.ENDED or client is None:
            return
        try:
            whole = self._frames.take(data)
        except LrqError as error:
            log.error("%s sends something else than AMQP frames: %s", self.primary.name, error)
            if self._stage is _Stage.CONNECTING:
                self._begun.set()
                return
            self.end(f"the door of {self.primary.name} is not understood; the log of this sidecar says why")
            return
        if self._stage is _Stage.CONNECTING:
            if whole:
                self._begin()
            return
        if whole:
            client.write(whole)
            self._runs += 1
        if self._frames.methods:
            self._note(self._frames.methods)

    def _begin(self) -> None:
        """The primary's door has begun the login: answers as the client has answered."""
        if self._frames.methods == [CONNECTION_START] and self.transport is not None:
            self.transport.write(encode.frame(METHOD, 0, self._start_ok))
            self._start_ok = b""
            self._stage = _Stage.LOGIN
            self._client.relayed()
        self._begun.set()

    def _note(self, methods: list[int]) -> None:
        """The client has got these methods of channel 0."""
        if self._stage is _Stage.LOGIN and CONNECTION_OPEN_OK in methods:
            self._stage = _Stage.OPEN
            if refusal := self._client.relay_logged_in():
                self.end(refusal)
        elif CONNECTION_CLOSE in methods or CONNECTION_CLOSE_OK in methods:
            self._stage = _Stage.CLOSING

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._begun.set()
        if self.on_lost is not None:
            self.on_lost()
        if self._stage is not _Stage.CONNECTING:
            self.end(f"the connection to {self.primary.name} is lost: it has stopped, or is out of reach; connect again")

    def pause_writing(self) -> None:
        self._pause("primary", self._client.transport)

    def resume_writing(self) -> None:
        self._resume("primary", self._client.transport if self._stopping is None else None)

    # ---- the client's side -------------------------------------------------------------------------------------------

    def client_data(self, data: bytes) -> None:
        """Passes bytes of the client on."""
        if self.transport is not None:
            self.transport.write(data)

    def client_full(self, full: bool) -> None:
        """The client reads more slowly than the primary sends, or has caught up."""
        if full:
            self._pause("client", self.transport)
        else:
            self._resume("client", self.transport)

    def _pause(self, side: str, other: asyncio.Transport | None) -> None:
        self._full[side] = True
        if other is not None and not other.is_closing():
            other.pause_reading()
        self._weigh()

    def _resume(self, side: str, other: asyncio.Transport | None) -> None:
        self._full[side] = False
        if other is not None and not other.is_closing():
            other.resume_reading()
        self._weigh()

    def _weigh(self) -> None:
        sides = {"client": self._client.transport, "primary": self.transport}
        full = [transport for side, transport in sides.items() if transport is not None and self._full[side]]
        self._door.weigh_relay(self, sum(transport.get_write_buffer_size() for transport in full))

    def client_lost(self) -> None:
        """The client is gone. Its bytes go to the primary before that side is closed."""
        ordered = self._stage in (_Stage.OPEN, _Stage.CLOSING)
        self._stage = _Stage.ENDED
        self._door.relay_closed(self)
        if self._stopping is not None:
            self._stopping.cancel()
        if self.transport is not None and ordered:
            self.transport.close()
            asyncio.get_running_loop().call_later(self._door.config.drain_timeout_s, self.transport.abort)
        else:
            self._leave_primary()

    # ---- ends --------------------------------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """Ends the connection with this reason, unless it is being closed already."""
        was, client = self._stage, self._client.transport
        if was is _Stage.ENDED:
            return
        self._stage = _Stage.ENDED
        self._leave_primary()
        if client is None:
            return
        if was is _Stage.CLOSING:
            closing_handshake.end(client)
        else:
            closing_handshake.say(client, CONNECTION_FORCED, reason)

    def stop(self, reason: str, timeout_s: float) -> None:
        """Ends the connection when the client has its confirms, as far as that can be told: when the primary sends nothing for a while.

        Args:
            reason: The client's text.
            timeout_s: Seconds that it may take at most.
        """
        if self._stopping is None and self._stage is not _Stage.ENDED:
            self._stopping = asyncio.create_task(self._stop(reason, timeout_s))

    async def _stop(self, reason: str, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if self._client.transport is not None and not self._client.transport.is_closing():
            self._client.transport.pause_reading()
        seen = -1
        while loop.time() < deadline and (seen != self._runs or (self.transport is not None and self.transport.get_write_buffer_size())):
            seen = self._runs
            await asyncio.sleep(QUIET_S)
        self.end(reason)

    def cut_off(self) -> None:
        """Ends both sides at once."""
        self._stage = _Stage.ENDED
        for transport in (self._client.transport, self.transport):
            if transport is not None:
                transport.abort()

    def _leave_primary(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            closing_handshake.end(self.transport)
