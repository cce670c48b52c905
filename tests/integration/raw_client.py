"""An AMQP client that sends exactly the bytes it is told to, well-formed or not; blocking, for tests."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from pamqp import commands

from broker_plugin.amqp import content_header, encode, frames

TIMEOUT_S = 60.0  # for what must come: a machine may stand still for half a minute
DOOR_FRAME_MAX_BYTES = frames.FRAME_MAX_BYTES - frames.HEADROOM_BYTES  # what a door offers


def publish(channel: int, key: str, body: bytes, *, exchange: str = "", fields: bytes = b"", mandatory: bool = False) -> bytes:
    """The frames of one publish; `fields` are headers (headers.field)."""
    header = content_header.header_payload(len(body), content_header.properties(fields))
    return encode.publish_method(channel, exchange, key, mandatory) + b"".join(encode.content(channel, header, body, DOOR_FRAME_MAX_BYTES))


class RawClient:
    """A socket to a door or broker; logged in unless `client_login` is false, with the offered frame_max. Use it as a context manager.

    Attributes:
        got: Every frame read so far, as (kind, channel, payload); kind is the method's id or frames.HEADER, BODY, HEARTBEAT.
    """

    def __init__(
        self,
        url: str,
        vhost: str = "/",
        *,
        heartbeat_s: int = 0,
        frame_max: int = 0,
        properties: dict[str, Any] | None = None,
        login: bool = True,
        context: ssl.SSLContext | None = None,
        source: str = "",
        first: bytes = b"",
        channel_max: int = 2_047,
    ) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname or "", parts.port or 0), TIMEOUT_S, (source, 0) if source else None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(first)  # before TLS
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_hostname=parts.hostname)
        self.got: list[tuple[int, int, bytes]] = []
        self._buffer = b""
        self.frame_max, self.channel_max = frame_max, channel_max
        self.user, self.password = unquote(parts.username or ""), unquote(parts.password or "")
        if login:
            self.login(vhost, heartbeat_s, frame_max, properties or {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()

    def start_ok(self, properties: dict[str, Any] | None = None) -> bytes:
        """The frame that logs in."""
        capabilities = {"authentication_failure_close": True, "publisher_confirms": True, "consumer_cancel_notify": True, "basic.nack": True}
        capabilities["connection.blocked"] = True
        table = {"capabilities": capabilities, **(properties or {})}
        return encode.method_frame(0, commands.Connection.StartOk(table, "PLAIN", f"\0{self.user}\0{self.password}", "en_US"))

    def login(self, vhost: str, heartbeat_s: int, frame_max: int, properties: dict[str, Any]) -> None:
        self.send(frames.PROTOCOL_HEADER)
        self.expect(frames.CONNECTION_START)
        self.send(self.start_ok(properties))
        tune: Any = frames.decode_method(self.expect(frames.CONNECTION_TUNE))
        self.frame_max = frame_max = frame_max or tune.frame_max
        self.send(encode.method_frame(0, commands.Connection.TuneOk(min(self.channel_max, tune.channel_max or 65_535), frame_max, heartbeat_s)))
        self.send(encode.method_frame(0, commands.Connection.Open(vhost)))
        self.expect(frames.CONNECTION_OPEN_OK)

    def open_channel(self, number: int = 1, *, confirms: bool = False) -> None:
        self.call(number, commands.Channel.Open(), frames.CHANNEL_OPEN_OK)
        if confirms:
            self.call(number, commands.Confirm.Select(), frames.CONFIRM_SELECT_OK)

    def send(self, data: bytes) -> None:
        self.socket.settimeout(TIMEOUT_S)  # the last read may have left it a moment only
        self.socket.sendall(data)

    def call(self, channel: int, method: Any, answer: int) -> bytes:
        """Sends a method and waits for its answer; returns that one's payload."""
        self.send(encode.method_frame(channel, method))
        return self.expect(answer)

    def read(self, timeout_s: float = TIMEOUT_S) -> tuple[int, int, bytes] | None:
        """The next frame; None when the other side closed. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while True:
            items, _ = frames.scan(self._buffer, 0, 1 << 27, 0)
            if items:
                kind, channel, start, end, *_ = items[0]
                found = (kind, channel, self._buffer[start:end])
                # a whole content is given out frame by frame
                self._buffer = self._buffer[end + 1 :]
                self.got.append(found)
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"nothing within {timeout_s:g} s")
            self.socket.settimeout(left)
            try:
                data = self.socket.recv(1 << 20)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._buffer += data

    def expect(self, *kinds: int, timeout_s: float = TIMEOUT_S) -> bytes:
        """Reads until a frame of one of these kinds came; returns its payload."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.read(max(deadline - time.monotonic(), 0.001))
            assert found is not None, f"closed while waiting for {[hex(kind) for kind in kinds]}; got {[hex(g[0]) for g in self.got[-5:]]}"
            if found[0] in kinds:
                return found[2]
            assert found[0] not in (frames.CONNECTION_CLOSE, frames.CHANNEL_CLOSE), found[2]

    def confirmed(self, count: int, timeout_s: float = 60.0) -> set[int]:
        """Reads until publishes 1 .. count of a channel are acked; returns the nacked ones."""
        open_tags, nacked = set(range(1, count + 1)), set()
        deadline = time.monotonic() + timeout_s
        while open_tags:
            found = self.read(max(deadline - time.monotonic(), 0.001))
            assert found is not None, f"closed with {len(open_tags)} open"
            kind, _, payload = found
            assert kind not in (frames.CONNECTION_CLOSE, frames.CHANNEL_CLOSE), payload
            if kind in (frames.BASIC_ACK, frames.BASIC_NACK):
                tag, bits = frames.tag_and_bits(payload)
                done = {t for t in open_tags if t <= tag} if bits & 1 else {tag}
                assert done <= open_tags, f"{done - open_tags} answered twice"
                open_tags -= done
                if kind == frames.BASIC_NACK:
                    nacked |= done
        return nacked

    def closed(self, timeout_s: float = TIMEOUT_S) -> bool:
        """Reads until the other side has closed."""
        deadline = time.monotonic() + timeout_s
        try:
            while self.read(max(deadline - time.monotonic(), 0.001)) is not None:
                pass
        except TimeoutError:
            return False
        return True


@contextmanager
def beating(client: RawClient) -> Iterator[None]:
    """Meanwhile the client sends heartbeats, and does so in time however long the test is busy with something else."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.5):
            try:
                client.send(frames.HEARTBEAT_FRAME)
            except OSError:
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
