"""A raw AMQP connection for load generators: ready-made frames out, acks and deliveries in, no client library in the way.

Rules: calls block while a connection is set up, afterwards the socket is the caller's to poll; whatever goes wrong is an OSError.
"""

from __future__ import annotations

import socket
import struct
from urllib.parse import unquote, urlsplit

from pamqp import base, commands

from broker_plugin.amqp import encode, frames

CONNECT_TIMEOUT_S = 2.0
READ_BYTES = 1 << 18
CHANNEL = 1
DURABLE = 2  # delivery mode of a persistent message
_CAPABILITIES = {"publisher_confirms": True, "basic.nack": True, "consumer_cancel_notify": True, "authentication_failure_close": True}


class Refused(OSError):
    """The other side closed the connection or the channel, and said why."""


class Raw:
    """A connection with channels numbered from 1.

    Args:
        url: amqp://USER:PASSWORD@HOST:PORT of a broker or a door; the vhost is `/`.
        producer: Name of the producer to announce, if any.
        confirms: Ask for publisher confirms, on every channel.
        channels: How many.
    """

    def __init__(self, url: str, *, producer: str = "", confirms: bool = False, channels: int = 1) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 5672), CONNECT_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self._arrived: list[tuple[int, bytes]] = []
        try:
            self._login(unquote(parts.username or ""), unquote(parts.password or ""), producer)
            for channel in range(CHANNEL, CHANNEL + channels):
                self.call(commands.Channel.Open(), channel)
                if confirms:
                    self.call(commands.Confirm.Select(), channel)
        except BaseException:
            self.socket.close()
            raise

    def _login(self, user: str, password: str, producer: str) -> None:
        self.socket.sendall(frames.PROTOCOL_HEADER)
        self._reply()
        properties: dict[str, object] = {"product": "lrq-ha bench", "capabilities": _CAPABILITIES}
        if producer:
            properties["lrq_producer"] = producer
        self.send(0, commands.Connection.StartOk(properties, "PLAIN", f"\0{user}\0{password}", "en_US"))  # type: ignore[arg-type]
        tune = self._reply()
        if not isinstance(tune, commands.Connection.Tune):
            raise Refused(f"{tune.name} instead of connection.tune")
        self.send(0, commands.Connection.TuneOk(tune.channel_max, tune.frame_max, 0))
        self.send(0, commands.Connection.Open("/"))
        self._reply()

    def send(self, channel: int, method: base.Frame) -> None:
        """Sends a method; its answer, if any, comes by `read`."""
        self.socket.sendall(encode.method_frame(channel, method))

    def call(self, method: base.Frame, channel: int = CHANNEL) -> base.Frame:
        """Sends a method on a channel and returns its answer; only while nothing else is to come on the connection."""
        self.send(channel, method)
        return self._reply()

    def _reply(self) -> base.Frame:
        while not self._arrived:
            self._arrived += [(kind, bytes(data[start:end])) for kind, data, start, end in self._methods()]
        return frames.decode_method(self._arrived.pop(0)[1])

    def _methods(self) -> list[tuple[int, bytes, int, int]]:
        data, items = self.read()
        return [(item[0], data, item[2], item[3]) for item in items if item[0] != frames.HEARTBEAT]

    def read(self) -> tuple[bytes, list[frames.Item]]:
        """What has come from the socket, and the frames found in it.

        Raises:
            Refused: The other side closed the connection or the channel.
            OSError: The connection is lost.
        """
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise Refused("the connection is closed")
        data = self._rest + data
        items, used = frames.scan(data)
        self._rest = data[used:]
        for item in items:
            if item[0] in (frames.CONNECTION_CLOSE, frames.CHANNEL_CLOSE):
                raise Refused(str(vars_of(frames.decode_method(bytes(data[item[2] : item[3]])))))
        return data, items

    def leave(self) -> None:
        """Closes the connection in order: what was sent before has been taken when this returns. What still comes is dropped."""
        self.send(0, commands.Connection.Close(200, "", 0, 0))
        while not any(item[0] == frames.CONNECTION_CLOSE_OK for item in self.read()[1]):
            pass
        self.close()

    def close(self) -> None:
        """Ends the connection without a farewell."""
        self.socket.close()


def vars_of(method: base.Frame) -> dict[str, object]:
    """A method's arguments by name."""
    return {name: getattr(method, name) for name in method.__slots__}


def message(queue: str, body: bytes, replication_id: str = "", channel: int = CHANNEL) -> bytes:
    """The frames of a persistent publish to the default exchange; with a replication ID if one is given."""
    table = b""
    flags = 0x1000  # delivery mode
    if replication_id:
        raw = replication_id.encode()
        field = b"\x08x-lrq-idS" + struct.pack(">I", len(raw)) + raw
        table, flags = struct.pack(">I", len(field)) + field, 0x3000  # headers and delivery mode
    header = struct.pack(">HHQH", 60, 0, len(body), flags) + table + bytes((DURABLE,))
    return encode.publish_method(channel, "", queue) + b"".join(encode.content(channel, header, body))


class Confirms:
    """What has been confirmed on a connection."""

    def __init__(self) -> None:
        self.upto = 0  # every tag up to here is confirmed
        self.refused = 0
        self._early: set[int] = set()

    def take(self, data: bytes, items: list[frames.Item]) -> None:
        """Takes note of the acks and nacks among `items`."""
        early = self._early
        for kind, _, start, _, _, _, _ in items:
            if kind == frames.BASIC_NACK:
                self.refused += 1
            elif kind != frames.BASIC_ACK:
                continue
            tag, multiple = frames.tag_and_bits(data, start)
            if multiple & 1:
                self.upto = max(self.upto, tag)
            elif tag == self.upto + 1:
                self.upto = tag
            else:
                early.add(tag)
            while early and self.upto + 1 in early:
                early.remove(self.upto + 1)
                self.upto += 1
