"""The broker's socket for one client: connected after the client's protocol header, closed when the login leads to no session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, cast

from lrq_ha.errors import LrqError

from ..amqp import encode
from ..amqp.connect import connect
from ..amqp.frames import PROTOCOL_HEADER, scan
from ..amqp.reply_codes import CONNECTION_FORCED
from . import closing_handshake
from .endpoint import Endpoint
from .gate import Gate

log = logging.getLogger("lrq_ha.door")


class ClientSide(Protocol):
    """The client's socket in a login (`client_login`)."""

    door: Gate
    peer: tuple[str, int]
    here: tuple[str, int]
    end: Endpoint | None

    @property
    def waiting_bytes(self) -> int: ...
    def refuse(self, code: int, text: str) -> None: ...
    def broker_frames(self, data: bytes) -> None: ...
    def go_on(self) -> None: ...
    def abort(self) -> None: ...


class BrokerLogin(asyncio.Protocol):
    """The broker's side of a login. `on_lost`: called when its socket has closed."""

    def __init__(self, client: ClientSide) -> None:
        self.client: ClientSide | None = client
        self.door = client.door
        self.transport: asyncio.Transport | None = None
        self.end: Endpoint | None = None
        self.on_lost: Callable[[], None] | None = None
        self._left = False
        self._buffer = b""

    async def connect(self) -> None:
        """Connects to the broker."""
        client = self.client
        if client is None:
            return
        try:
            await connect(self.door.broker, self, (client.peer, client.here))
        except OSError as error:
            log.warning("the broker does not answer: %s", error)
            client.refuse(CONNECTION_FORCED, "the broker beside this sidecar does not answer")

    def leave(self, reason: str = "the client is gone") -> None:
        """The login ended without a session: closes the broker's side."""
        self._left = True
        self.client = None
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(encode.connection_close(200, reason))
            closing_handshake.end(self.transport)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        broker = cast(asyncio.Transport, transport)
        if self._left:
            broker.abort()
            return
        self.transport = broker
        broker.set_write_buffer_limits(self.door.config.connection_buffer_bytes_max)
        broker.write(PROTOCOL_HEADER)

    def data_received(self, data: bytes) -> None:
        if self.end is not None:
            self.end.broker_data(data)
            return
        client = self.client
        if client is None:
            return
        self._buffer += data
        try:
            items, used = scan(self._buffer)
        except LrqError as error:
            log.warning("what the broker says in a login is not AMQP: %s", error)
            client.refuse(CONNECTION_FORCED, "the broker beside this sidecar does not speak AMQP 0-9-1")
            return
        if not items:
            return
        whole, self._buffer = self._buffer[:used], self._buffer[used:]
        client.broker_frames(whole)
        if self.end is not None:
            if self._buffer:
                left, self._buffer = self._buffer, b""
                self.end.broker_data(left)
        elif client.waiting_bytes and client.end is None:
            client.go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.on_lost is not None:
            self.on_lost()
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
