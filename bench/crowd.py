"""Generators that have many connections, or many channels on one: publish, consume, stand idle; and one that publishes what it then consumes.

Rules: one epoll loop for all sockets, which are asked for room to write only after a write has fallen short; frames are made beforehand;
what is to be published is shared by all channels, so that none runs out while others have much to do. Each generator yields once when it is
connected and warm and once with its figures; its connections stay until it is asked to go on.
"""

from __future__ import annotations

import resource
import select
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from pamqp import commands

from broker_plugin.amqp import encode, frames

from . import wire

SILENCE_S = 100.0  # nothing comes for so long: something is broken
UNBOUNDED = 1 << 62
_ROOM = select.EPOLLOUT
_HEAD = struct.Struct(">BHII")  # type, channel, size, method
_ENDS = (frames.CONNECTION_CLOSE, frames.CHANNEL_CLOSE, frames.BASIC_CANCEL)


class Lane:
    """A channel of a publisher: what it sends in one go, and how much of it is unconfirmed."""

    __slots__ = ("chunk", "confirms", "sent", "single", "waits")

    def __init__(self, queue: str, body: bytes, channel: int, batch: int) -> None:
        self.single = wire.message(queue, body, channel=channel)
        self.chunk = self.single * batch
        self.confirms = wire.Confirms()
        self.sent = 0
        self.waits = False  # its window is full


class Share:
    """What all publishers together have yet to send, and how many of it are unconfirmed."""

    def __init__(self) -> None:
        self.left = self.open = 0


class Publisher:
    """A connection that publishes on its channels in turn.

    Args:
        url: Of a broker or a door.
        queue: Where all goes.
        body: Of every message.
        share: What is to be sent.
        channels: How many.
        window: Unconfirmed messages per channel; unbounded, and without confirms, if it is 0.
        batch: Messages sent in one go.
    """

    def __init__(self, url: str, queue: str, body: bytes, share: Share, channels: int, window: int, batch: int) -> None:
        self._raw = wire.Raw(url, confirms=bool(window), channels=channels)
        self.socket = self._raw.socket
        self._share, self._window, self._batch = share, window or UNBOUNDED, batch
        self._lanes = {number: Lane(queue, body, number, batch) for number in range(wire.CHANNEL, wire.CHANNEL + channels)}
        self._ready = deque(self._lanes.values())
        self._pending = memoryview(b"")
        self._single_lane = self._lanes[wire.CHANNEL] if channels == 1 else None

    def push(self) -> bool:
        """Sends what windows allow; whether the socket has had enough."""
        share = self._share
        while True:
            if not self._pending:
                if not self._ready or not share.left:
                    return False
                lane = self._ready.popleft()
                count = min(self._batch, share.left)
                self._pending = memoryview(lane.chunk)[: count * len(lane.single)]
                share.left -= count
                share.open += count
                lane.sent += count
                lane.waits = lane.sent - lane.confirms.upto > self._window - self._batch
                if not lane.waits:
                    self._ready.append(lane)
            try:
                self._pending = self._pending[self.socket.send(self._pending) :]
            except BlockingIOError:
                return True

    def take(self) -> None:
        """Takes confirms."""
        data, items = self._raw.read()
        if self._single_lane is not None:
            self._confirm(self._single_lane, data, items)
            return
        by_channel: dict[int, list[frames.Item]] = {}
        for item in items:
            by_channel.setdefault(item[1], []).append(item)
        for channel, some in by_channel.items():
            if channel in self._lanes:
                self._confirm(self._lanes[channel], data, some)

    def _confirm(self, lane: Lane, data: bytes, items: list[frames.Item]) -> None:
        confirms = lane.confirms
        before = confirms.upto
        confirms.take(data, items)
        if confirms.refused:
            raise wire.Refused("a publish was refused")
        self._share.open -= confirms.upto - before
        if lane.waits and lane.sent - confirms.upto <= self._window - self._batch:
            lane.waits = False
            self._ready.append(lane)

    def last(self) -> None:
        """Begins to find out when all that was sent without confirms is in the queue: one more message, with a confirm, behind it."""
        self._raw.send(wire.CHANNEL, commands.Confirm.Select())
        self.socket.sendall(self._lanes[wire.CHANNEL].single)

    def arrived(self) -> None:
        """Waits until it is there, and begins with a new channel."""
        confirms = wire.Confirms()
        while not confirms.upto:
            confirms.take(*self._raw.read())
        if confirms.refused:
            raise wire.Refused("a publish was refused")
        self._raw.call(commands.Channel.Close(200, "", 0, 0))
        self._raw.call(commands.Channel.Open())
        self._share.open = 0


def publish(url: str, queue: str, messages: int, size_bytes: int, connections: int, channels: int, window: int, batch: int,
            warm_up: int) -> Iterator[dict[str, Any]]:
    """Publishes `warm_up` and then `messages` equal messages; the clock runs until the last of the latter is confirmed, and in the queue.

    Args:
        url: Of a broker or a door.
        queue: Where all goes.
        messages, warm_up: How many.
        size_bytes: Of a body.
        connections, channels: How many, and how many on each.
        window: Unconfirmed messages per channel; 0 is without confirms, and then with one channel.
        batch: Messages sent in one go.
    """
    _allow_files()
    share = Share()
    body = b"x" * size_bytes
    crowd = [Publisher(url, queue, body, share, channels, window, batch) for _ in range(connections)]
    _run(crowd, share, warm_up, bool(window))
    yield {"ready": True}
    yield _timed(messages + (0 if window else connections), lambda: _run(crowd, share, messages, bool(window)))


def _run(crowd: list[Publisher], share: Share, messages: int, confirms: bool) -> None:
    share.left = messages
    epoll = select.epoll()
    by_file = {publisher.socket.fileno(): publisher for publisher in crowd}
    full: dict[int, bool] = {}
    for number, publisher in by_file.items():
        publisher.socket.setblocking(False)
        full[number] = publisher.push()
        epoll.register(number, select.EPOLLIN | (_ROOM if full[number] else 0))
    while share.left or (share.open if confirms else any(full.values())):
        events = epoll.poll(SILENCE_S)
        if not events:
            raise TimeoutError("nothing comes any more")
        for number, event in events:
            publisher = by_file[number]
            if event & ~_ROOM:
                publisher.take()
            blocked = publisher.push()
            if blocked != full[number]:
                full[number] = blocked
                epoll.modify(number, select.EPOLLIN | (_ROOM if blocked else 0))
    epoll.close()
    if confirms:
        return
    for publisher in crowd:
        publisher.socket.settimeout(SILENCE_S)
        publisher.last()
    for publisher in crowd:
        publisher.arrived()


class Deliveries:
    """A consumer's connection: its deliveries are counted and not looked at.

    Args:
        url: Of a broker or a door.
        prefetch: How many may be unacked.
    """

    _buffer = bytearray(wire.READ_BYTES)  # of all of them: each keeps only the beginning of a frame

    def __init__(self, url: str, prefetch: int) -> None:
        self._raw = wire.Raw(url)
        self.socket = self._raw.socket
        self.socket.settimeout(SILENCE_S)
        self._raw.call(commands.Basic.Qos(prefetch_count=prefetch))
        self._rest = b""
        self._skip = 0  # bytes of the frame under way that are still to come
        self._acked = 0

    def begin(self, queue: str) -> None:
        """Starts to consume."""
        self._raw.send(wire.CHANNEL, commands.Basic.Consume(queue=queue))

    def take(self) -> int:
        """How many deliveries have begun to come."""
        buffer, end = self._buffer, len(self._rest)
        buffer[:end] = self._rest
        got = self.socket.recv_into(memoryview(buffer)[end:])
        if not got:
            raise wire.Refused("the connection is closed")
        end += got
        at, came = self._skip, 0
        while at + _HEAD.size <= end:
            kind, _, size, method = _HEAD.unpack_from(buffer, at)
            if kind == frames.METHOD:
                if method == frames.BASIC_DELIVER:
                    came += 1
                elif method in _ENDS:
                    raise wire.Refused(frames.decode_method(bytes(buffer[at + 7 : at + 7 + size])).name)
            at += size + frames.FRAME_OVERHEAD_BYTES
        self._rest = bytes(buffer[at:end])
        self._skip = max(0, at - end)
        return came

    def ack(self, count: int) -> None:
        """Acks the next deliveries, one by one. With one consumer on a channel their tags are 1, 2, 3…"""
        first, self._acked = self._acked + 1, self._acked + count
        # The broker reads acks whatever it has to write, and there are never more than `prefetch` on their way: this does not block.
        self.socket.sendall(b"".join([encode.ack(wire.CHANNEL, tag) for tag in range(first, self._acked + 1)]))


def consume(url: str, queue: str, messages: int, connections: int, prefetch: int) -> Iterator[dict[str, Any]]:
    """Consumes and acks `messages`, each by itself. The clock runs until the broker has taken the last ack.

    The queue has `connections` × `prefetch` messages more, which are not acked: all of them can only come once every ack has made room. (A
    connection's end would not tell, as a quorum queue gives back what its client has acked last.)
    """
    _allow_files()
    crowd = [Deliveries(url, prefetch) for _ in range(connections)]
    yield {"ready": True}
    yield _timed(messages, lambda: _consume(crowd, queue, messages, connections * prefetch))


def _consume(crowd: list[Deliveries], queue: str, messages: int, more: int) -> None:
    epoll = select.epoll()
    by_file = {consumer.socket.fileno(): consumer for consumer in crowd}
    for number, consumer in by_file.items():
        epoll.register(number, select.EPOLLIN)
        consumer.begin(queue)
    to_ack, left = messages, messages + more
    while left > 0:
        events = epoll.poll(SILENCE_S)
        if not events:
            raise TimeoutError("nothing comes any more")
        for number, _ in events:
            came = by_file[number].take()
            left -= came
            if acks := min(came, to_ack):
                by_file[number].ack(acks)
                to_ack -= acks
    epoll.close()
    if left < 0:
        raise wire.Refused("more deliveries than messages")


def through(url: str, queue: str, messages: int, size_bytes: int, window: int, batch: int, prefetch: int, warm_up: int) -> Iterator[dict[str, Any]]:
    """Publishes with confirms on one connection and consumes on another, acking each by itself: `warm_up` and then `messages`.

    At most `window` are on their way at any time, so that the consumer keeps up whatever the speed. The clock runs until all have come and are
    confirmed.
    """
    share = Share()
    publisher, consumer = Publisher(url, queue, b"x" * size_bytes, share, 1, window, batch), Deliveries(url, prefetch)
    consumer.begin(queue)
    publisher.socket.setblocking(False)
    _through(publisher, consumer, share, warm_up, window)
    yield {"ready": True}
    yield _timed(messages, lambda: _through(publisher, consumer, share, messages, window))


def _through(publisher: Publisher, consumer: Deliveries, share: Share, messages: int, window: int) -> None:
    share.left = min(window, messages)
    to_allow, to_come = messages - share.left, messages
    epoll = select.epoll()
    epoll.register(consumer.socket.fileno(), select.EPOLLIN)
    full = publisher.push()
    epoll.register(publisher.socket.fileno(), select.EPOLLIN | (_ROOM if full else 0))
    while to_come or share.open:
        events = epoll.poll(SILENCE_S)
        if not events:
            raise TimeoutError("nothing comes any more")
        for number, event in events:
            if number == consumer.socket.fileno():
                came = consumer.take()
                consumer.ack(came)
                to_come -= came
                share.left += min(came, to_allow)
                to_allow -= min(came, to_allow)
            elif event & ~_ROOM:
                publisher.take()
        blocked = publisher.push()
        if blocked != full:
            full = blocked
            epoll.modify(publisher.socket.fileno(), select.EPOLLIN | (_ROOM if full else 0))
    epoll.close()


def idle(url: str, connections: int) -> Iterator[dict[str, Any]]:
    """Logs in so many times, with a channel each, and does nothing."""
    _allow_files()
    yield {"ready": True}
    crowd = [wire.Raw(url) for _ in range(connections)]
    yield {"connections": len(crowd)}


def _timed(messages: int, work: Callable[[], None]) -> dict[str, Any]:
    began, used = time.monotonic(), time.process_time()
    work()
    ended = time.monotonic()
    seconds = ended - began
    return {"messages": messages, "seconds": seconds, "rate": messages / seconds, "began_at": began, "ended_at": ended,
            "generator_us": 1e6 * (time.process_time() - used) / messages}


def _allow_files() -> None:
    """A socket for each connection, beyond what a shell's limit often allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
