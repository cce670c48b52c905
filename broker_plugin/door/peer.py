"""The receiving end of another node's connection: control messages and pushes end here, and never reach the broker.

Rules:
- Channel 1 carries control messages, without confirms; channel 2 carries pushes, in order.
- A push is acked when the own stream has it and all before it; acks are cumulative.
- A peer that sends any other frame is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from secrets import token_hex
from typing import Protocol

from pamqp import commands

from lrq_ha.errors import LrqError, place

from ..amqp import content_assembly, encode, frames
from ..amqp.connect import hung_up
from ..amqp.frames import (
    BASIC_PUBLISH,
    BODY,
    CHANNEL_CLOSE,
    CHANNEL_CLOSE_OK,
    CHANNEL_OPEN,
    CONFIRM_SELECT,
    CONNECTION_CLOSE,
    CONNECTION_CLOSE_OK,
    HEADER,
    HEARTBEAT,
    HEARTBEAT_FRAME,
    scan,
)
from ..log.replica import Replica
from . import closing_handshake
from .endpoint import Endpoint
from .relay import Primary

log = logging.getLogger("lrq_ha.door")

CONTROL_CHANNEL, PUSH_CHANNEL = 1, 2
PROCESS = token_hex(8)  # the ID that this process presents at other nodes' doors: a connection here with that ID is this node's own


class Host(Protocol):
    """The interface of the incarnation behind the door."""

    replica: Replica

    def refusal(self) -> str:
        """Why clients are not served now; empty if they are."""

    def primary(self) -> Primary | None:
        """The primary, as far as this node knows; None if it knows none."""

    def push(self, end: PeerConnection, header: bytes, body: bytes) -> None: ...

    def control(self, end: PeerConnection, body: bytes) -> None: ...

    def peer_gone(self, end: PeerConnection) -> None: ...


class PeerDoor(Protocol):
    """The interface of a door for another node's connection (`gate`)."""

    def now(self) -> float: ...

    def peer_closed(self, end: PeerConnection) -> None: ...


class PeerConnection(Endpoint):
    """Another node's connection. `node`: ID of that node."""

    def __init__(self, door: PeerDoor, host: Host, transport: asyncio.Transport, node: int, *, heartbeat_s: int) -> None:
        self.door, self.host, self.node = door, host, node
        self.transport: asyncio.Transport | None = transport
        self._heartbeat_s = heartbeat_s
        self._buffer = b""
        self._parts = content_assembly.Assembly(content_assembly.BODY_BYTES_ANY_MAX)  # a batch with the largest message, and more
        self._tag = 0
        self._open: deque[tuple[int, int]] = deque()  # (last sequence, publish tag) of pushes that are not acked
        self._heard_at = door.now()
        self._paused = False

    def client_data(self, data: bytes) -> None:
        self._heard_at = self.door.now()
        data = self._buffer + data if self._buffer else data
        try:
            items, used = scan(data)
            self._buffer = data[used:]
            for item in items:
                if self.transport is None:
                    return
                self._take(data, item)
        except LrqError as error:
            log.warning("node %d: %s", self.node, error)
            self.close()
        except Exception as error:
            log.error("node %d: what it sent could not be handled: %s", self.node, place(error))
            self.close()

    def _take(self, data: bytes, item: frames.Item) -> None:
        kind, number, start, end, header, header_end, stop = item
        if stop:
            self._message(number, data[header:header_end], frames.body_of(data, header_end, stop))
        elif kind in (BASIC_PUBLISH, HEADER, BODY):
            content = self._parts.take(kind, number, data[start:end])
            if content is not None:
                self._message(number, content.header, content.body)
        elif kind == CHANNEL_OPEN:
            self._reply(number, commands.Channel.OpenOk())
        elif kind == CONFIRM_SELECT:
            self._reply(number, commands.Confirm.SelectOk())
        elif kind == CHANNEL_CLOSE:
            self._reply(number, commands.Channel.CloseOk())
        elif kind == CONNECTION_CLOSE:
            self._reply(0, commands.Connection.CloseOk())
            self.close()
        elif kind not in (HEARTBEAT, CONNECTION_CLOSE_OK, CHANNEL_CLOSE_OK):
            raise LrqError(f"method {kind:#x} has no place between nodes")

    def _reply(self, channel: int, method: commands.base.Frame) -> None:  # type: ignore[name-defined]
        if self.transport:
            self.transport.write(encode.method_frame(channel, method))

    def _message(self, channel: int, header: bytes, body: bytes) -> None:
        if channel == CONTROL_CHANNEL:
            self.host.control(self, body)
        else:
            self._tag += 1
            self.host.push(self, header, body)

    def expect_ack(self, last: int) -> None:
        """Notes that the current push ends with entry `last`."""
        self._open.append((last, self._tag))

    def acknowledge(self, upto: int) -> None:
        """Acks pushes: the own stream has everything up to `upto`."""
        tag = 0
        while self._open and self._open[0][0] <= upto:
            tag = self._open.popleft()[1]
        if tag and self.transport:
            self.transport.write(encode.ack(PUSH_CHANNEL, tag, True))

    @property
    def arriving_bytes(self) -> int:
        """Bytes that have come of an incomplete push."""
        return self._parts.arrived_bytes(PUSH_CHANNEL) + len(self._buffer)

    def tick(self, now: float) -> None:
        """Once a second: heartbeats both ways."""
        if self.transport is None or not self._heartbeat_s:
            return
        if now - self._heard_at > 2 * self._heartbeat_s + 1 and not self._paused:
            log.warning("node %d is silent for %d s", self.node, 2 * self._heartbeat_s)
            self.transport.abort()
        else:
            self.transport.write(HEARTBEAT_FRAME)

    def pause(self, paused: bool) -> None:
        """Back-pressure: stops reading pushes that this node cannot apply in time. A peer that is not read is not silent.

        The connection of a peer that is gone is read to its end, or the end would go unnoticed: no node is promoted over a peer that it hears.
        """
        if self.transport is None:
            return
        paused = paused and not hung_up(self.transport)
        if paused is self._paused:
            return
        self._paused = paused
        if paused:
            self.transport.pause_reading()
        else:
            self._heard_at = self.door.now()
            self.transport.resume_reading()

    def close(self) -> None:
        if self.transport is not None:
            closing_handshake.end(self.transport)
            self.client_lost()

    def client_lost(self) -> None:
        if self.transport is not None:
            self.transport = None
            self.door.peer_closed(self)
