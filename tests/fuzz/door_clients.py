"""Who sends what door_inputs makes, many at once in one event loop; and the canary, who uses the same door as any good client does.

Rules: nobody waits for time to pass. Behind an input that leaves the connection usable comes a question, whose answer says that the door has
taken it; an input that ends within a frame is filled up to a frame that is none, which must end the connection. How long is waited at most is
only for what would otherwise hang.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

from door_inputs import Attack, Stage
from pamqp import commands

from broker_plugin.amqp import content_header, encode, frames

READ_BYTES = 1 << 16
PATIENCE_S = 120.0  # for an answer that must come
EARLY_S = 1.0  # for one that a broker may keep to itself: to a wrong password
FILL_BYTES = 16  # behind a frame's end: the end of a content's header is looked at when the next frame has begun
ASK_CHANNEL = 2_047
ASK = encode.method_frame(ASK_CHANNEL, commands.Basic.Qos(0, 0, False))
TUNE_OK = commands.Connection.TuneOk(2_047, frames.FRAME_MAX_BYTES - frames.HEADROOM_BYTES, 0)
FRAME_MAX_BYTES = TUNE_OK.frame_max
CANARY_MESSAGES = 10  # on their way at once
CANARY_QUIET_S = 1.0  # it does not wait for longer to be asked, as those who ask may hang
CANARY_BODY_BYTES_MAX = 5_000
PIECES_MAX = 60  # writes of a few octets; the rest comes as one


class Ended(Exception):
    """The other side has closed the connection, or says that it does."""

    def __init__(self, code: int = 0, text: str = "") -> None:
        super().__init__(text)
        self.code, self.text = code, text


class Line:
    """A connection; frames of it one by one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._buffer = b""
        self._found: deque[tuple[int, int, bytes]] = deque()

    @classmethod
    async def open(cls, url: str) -> Line:
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port))

    async def frame(self) -> tuple[int, int, bytes]:
        """The next one: kind, channel, payload. Raises Ended."""
        while not self._found:
            try:
                data = await self._reader.read(READ_BYTES)
            except OSError:
                data = b""
            if not data:
                raise Ended
            buffer = self._buffer + data
            items, used = ([], len(buffer)) if buffer.startswith(b"AMQP") else frames.scan(buffer, 0, 1 << 31, 0)
            for kind, channel, start, end, header, header_end, stop in items:
                self._found.append((kind, channel, buffer[start:end]))
                if stop:  # a content that came whole
                    self._found.append((frames.HEADER, channel, buffer[header:header_end]))
                    self._found.append((frames.BODY, channel, frames.body_of(buffer, header_end, stop)))
            self._buffer = buffer[used:]
        return self._found.popleft()

    async def expect(self, kind: int) -> bytes:
        """The payload of the next frame of this kind. Raises Ended."""
        while True:
            found, _, payload = await self.frame()
            if found == kind:
                return payload
            if found in (frames.CONNECTION_CLOSE, frames.CHANNEL_CLOSE):
                raise Ended(*reason(payload))

    async def end(self) -> None:
        """Reads until it is over. Raises Ended."""
        while True:
            kind, _, payload = await self.frame()
            if kind == frames.CONNECTION_CLOSE:
                raise Ended(*reason(payload))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def send_in_pieces(self, data: bytes, size: int) -> None:
        """Writes of `size` octets, but for what would make too many."""
        upto = min(len(data), PIECES_MAX * size)
        for at in range(0, upto, size):
            self._writer.write(data[at : min(at + size, upto)])
            await asyncio.sleep(0)
        self._writer.write(data[upto:])

    async def drain(self) -> None:
        try:
            await self._writer.drain()
        except OSError:
            raise Ended from None

    def close(self, *, reset: bool = False) -> None:
        if self._writer.is_closing():
            return
        if reset:
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        else:
            self._writer.close()

    async def by_the_book(self, url: str, vhost: str, properties: dict[str, Any], stage: Stage) -> None:
        """Goes as far as that. Raises Ended."""
        if stage is Stage.CONNECTED:
            return
        self.send(frames.PROTOCOL_HEADER)
        await self.expect(frames.CONNECTION_START)
        if stage is Stage.GREETED:
            return
        self.send(_start_ok(url, str(properties.get("lrq_producer", ""))))
        await self.expect(frames.CONNECTION_TUNE)
        if stage is Stage.TUNING:
            return
        opened = (encode.method_frame(0, TUNE_OK), encode.method_frame(0, commands.Connection.Open(vhost)))
        self.send(b"".join((*opened, encode.method_frame(ASK_CHANNEL, commands.Channel.Open()))))
        await self.expect(frames.CONNECTION_OPEN_OK)


@lru_cache(1_000)
def _start_ok(url: str, producer: str) -> bytes:
    parts = urlsplit(url)
    table: dict[str, Any] = {"capabilities": {"authentication_failure_close": True, "basic.nack": True, "consumer_cancel_notify": True}}
    if producer:
        table["lrq_producer"] = producer
    response = f"\0{unquote(parts.username or '')}\0{unquote(parts.password or '')}"
    return encode.method_frame(0, commands.Connection.StartOk(table, "PLAIN", response, "en_US"))


def reason(payload: bytes) -> tuple[int, str]:
    """Code and text of a close."""
    return int.from_bytes(payload[4:6], "big"), payload[7 : 7 + payload[6]].decode("utf-8", "replace")


def missing(data: bytes, frame_max_bytes: int) -> int:
    """How many octets of 0 make what is left at the end a frame that is none; 0: nothing is left, -1: it is wrong already."""
    try:
        _, used = frames.scan(data, 0, frame_max_bytes, 0)
    except frames.FrameError:
        return -1
    left = data[used:]
    if not left:
        return 0
    head = left[:7].ljust(7, b"\0")
    return 8 + int.from_bytes(head[3:7], "big") - len(left) + FILL_BYTES


# ---- the hostile ones ------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of an attack.

    Attributes:
        taken: Inputs of which the door has said that it took them, or that it ended the connection for.
        left: Inputs after which the client was gone.
        ended: How it ended: a reply code, 0 for a connection that was cut, -1 if it stood.
        text: What connection.close said.
        hung: Nothing came to an input where something must.
    """

    number: int
    taken: int = 0
    left: int = 0
    ended: int = -1
    text: str = ""
    hung: bool = False


async def run(url: str, attack: Attack) -> Outcome:
    """One attack from its beginning to its end."""
    outcome = Outcome(attack.number)
    try:
        line = await Line.open(url)
    except OSError:
        return outcome
    try:
        async with asyncio.timeout(PATIENCE_S):
            await line.by_the_book(url, attack.vhost, attack.properties, attack.stage)
        for i in range(attack.count):
            data = attack.input(i)
            outcome.left += 1
            await line.send_in_pieces(data, attack.write_bytes)
            await line.drain()
            if attack.leaves and i + 1 == attack.count:
                break
            async with asyncio.timeout(PATIENCE_S):
                await (_ask if attack.stage is Stage.OPEN else _ask_early)(line, attack, data)
            outcome.left -= 1
            outcome.taken += 1
    except Ended as end:
        outcome.taken += outcome.left
        outcome.left = 0
        outcome.ended, outcome.text = end.code, end.text
    except TimeoutError:
        outcome.hung = True
    finally:
        line.close(reset=attack.resets)
    return outcome


async def _ask(line: Line, attack: Attack, data: bytes) -> None:
    """Returns when the door has taken an input. Raises Ended."""
    line.send(ASK + b"\0" * max(missing(data + ASK, FRAME_MAX_BYTES), 0))
    while True:
        kind, channel, payload = await line.frame()
        if kind == frames.BASIC_QOS_OK and channel == ASK_CHANNEL:
            return
        if kind == frames.CONNECTION_CLOSE:
            if attack.answers:
                line.send(encode.method_frame(0, commands.Connection.CloseOk()))
            raise Ended(*reason(payload))
        if kind == frames.CONNECTION_CLOSE_OK:
            raise Ended(200)
        if kind == frames.CHANNEL_CLOSE and attack.answers:
            line.send(encode.method_frame(channel, commands.Channel.CloseOk()))
        if channel == ASK_CHANNEL and kind in (frames.CHANNEL_CLOSE, frames.CHANNEL_CLOSE_OK):
            raise Ended


async def _ask_early(line: Line, attack: Attack, data: bytes) -> None:
    """Likewise of one before the connection is open. The door looks at nothing before what is no frame: that comes last. Raises Ended."""
    if attack.stage is Stage.CONNECTED:
        if frames.PROTOCOL_HEADER.startswith(data):
            return
        if not data.startswith(frames.PROTOCOL_HEADER):
            await line.end()
        data = data[len(frames.PROTOCOL_HEADER) :]
        await line.expect(frames.CONNECTION_START)
    fill = missing(data, frames.FRAME_MAX_BYTES)
    if fill >= 0:
        try:
            async with asyncio.timeout(EARLY_S):
                kind, _, payload = await line.frame()
        except TimeoutError:
            kind = 0
        if kind == frames.CONNECTION_CLOSE:
            raise Ended(*reason(payload))
        line.send(b"\0" * (fill or 8))
    await line.end()


# ---- the canary ------------------------------------------------------------------------------------------------------------


class Canary:
    """Publishes with confirms on one connection and consumes on another, all through the door; everything must come once, whole and in order.

    Attributes:
        rounds: Of CANARY_MESSAGES messages each, confirmed, delivered and acked.
        longest_s: The longest of them.
    """

    def __init__(self, url: str, queue: str) -> None:
        self._url, self._queue = url, queue
        self.rounds = 0
        self.longest_s = 0.0

    async def sing(self, due: asyncio.Event, until: asyncio.Event) -> None:
        """A round whenever one is due, and one more when `until` is set. Raises AssertionError: something is lost, or the door has ended it."""
        try:
            publisher, consumer = [await Line.open(self._url) for _ in range(2)]
            for line in (publisher, consumer):
                await line.by_the_book(self._url, "/", {}, Stage.OPEN)
                line.send(encode.method_frame(1, commands.Channel.Open()))
            publisher.send(encode.method_frame(1, commands.Confirm.Select()))
            consumer.send(encode.method_frame(1, commands.Basic.Consume(queue=self._queue)))
            await publisher.expect(frames.CONFIRM_SELECT_OK)
            await consumer.expect(frames.BASIC_CONSUME_OK)
            over = False
            while not over:
                over = until.is_set()
                began = time.monotonic()
                async with asyncio.timeout(PATIENCE_S):
                    await self._round(publisher, consumer)
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self.rounds += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(due.wait(), 0 if until.is_set() else CANARY_QUIET_S)
                due.clear()
            for line in (publisher, consumer):  # in order: the broker has taken the last ack then
                line.send(encode.method_frame(0, commands.Connection.Close(200, "", 0, 0)))
                await line.expect(frames.CONNECTION_CLOSE_OK)
                line.close()
        except Ended as end:
            raise AssertionError(f"the door has ended a good client's connection after {self.rounds} rounds: {end.code} {end.text}") from end
        except TimeoutError as error:
            raise AssertionError(f"a good client has waited {PATIENCE_S:g} s for round {self.rounds + 1}") from error

    async def _round(self, publisher: Line, consumer: Line) -> None:
        first = self.rounds * CANARY_MESSAGES
        bodies = [(b"%d " % n).ljust(n * 37 % CANARY_BODY_BYTES_MAX, b"c") for n in range(first, first + CANARY_MESSAGES)]
        for body in bodies:
            publisher.send(encode.publish_method(1, "", self._queue) + b"".join(encode.content(1, content_header.header_payload(len(body)), body)))
        open_tags = set(range(first + 1, first + CANARY_MESSAGES + 1))
        while open_tags:
            kind, _, payload = await publisher.frame()
            assert kind == frames.BASIC_ACK, hex(kind)
            tag, multiple = frames.tag_and_bits(payload)
            done = {t for t in open_tags if t <= tag} if multiple else {tag}
            assert done <= open_tags, "confirmed twice"
            open_tags -= done
        for body in bodies:
            _, tag, _ = frames.deliver_arguments(await consumer.expect(frames.BASIC_DELIVER))
            size = int.from_bytes((await consumer.expect(frames.HEADER))[4:12], "big")
            got = b""
            while len(got) < size:
                got += await consumer.expect(frames.BODY)
            assert got == body, f"{got[:20]!r} came, not {body[:20]!r}"
            consumer.send(encode.ack(1, tag))
