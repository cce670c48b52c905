"""The same conversation with a broker twice, directly and through a door, written down in a form in which the two can be compared.

What differs from run to run is evened out: names that the server or the test makes up, how confirms are grouped, how contents are cut into
frames. What the door adds to a message, the header `x-lrq-pos`, is left out. Everything else counts, word for word.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any, cast

from pamqp import commands, header
from pamqp.common import FieldTable
from raw_client import TIMEOUT_S, RawClient

from broker_plugin.amqp import content_header, encode, frames
from broker_plugin.door.method_table import name_of

_MADE_UP = re.compile(r"(amq\.gen-|amq\.ctag-|amq\.rabbitmq\.reply-to\.)[\w=+/.:-]+")
CONFIRMS = (frames.BASIC_ACK, frames.BASIC_NACK)
CLOSES = (frames.CHANNEL_CLOSE, frames.CONNECTION_CLOSE)
QUIET_S = 0.25  # in which what must not come would come


class Talk(RawClient):
    """One client of a scenario.

    Args:
        url: A door or a broker.
        mark: Part of every name of this run; does not occur in what is compared.
        kind: Queue type of the queues it declares.

    Attributes:
        heard: What was heard, by channel.
        queues: Names of queues that it declared.
    """

    def __init__(self, url: str, mark: str, kind: str, **options: Any) -> None:
        self.url, self.mark, self.kind = url, mark, kind
        self.heard: dict[int, list[Any]] = {}
        self.queues: list[str] = []
        self.others: list[Talk] = []
        self._published: dict[int, int] = {}
        self._confirmed: dict[int, set[int]] = {}
        self._delivered: dict[int, list[Any]] = {}
        self._unfinished: dict[int, tuple[Any, int, bytes]] = {}  # (event, body size, body so far) of a content that is coming
        super().__init__(url, **options)
        self.got.clear()

    def another(self, **options: Any) -> Talk:
        """Another connection of the same scenario."""
        self.others.append(Talk(self.url, self.mark, self.kind, **options))
        return self.others[-1]

    def __exit__(self, *error: object) -> None:
        for other in self.others:
            other.__exit__(*error)
        super().__exit__(*error)

    def name(self, what: str = "q") -> str:
        """A name of this run."""
        return f"talk-{what}-{self.mark}"

    def transcript(self) -> list[dict[int, list[Any]]]:
        """What all connections heard, evened out."""
        return [self.heard, *(heard for other in self.others for heard in other.transcript())]

    # -- saying

    def say(self, method: Any, channel: int = 1) -> None:
        self.send(encode.method_frame(channel, method))

    def do(self, method: Any, channel: int = 1) -> Any:
        """Says a method and hears until it is answered, or the channel or connection closed. Returns the answer; None where it closed."""
        wanted = {getattr(commands, r.split(".")[0]).__dict__[r.split(".")[1]].index for r in method.valid_responses}
        self.say(method, channel)
        return self.hear(*wanted, channel=channel)

    def open(self, channel: int = 1, *, confirms: bool = False) -> None:
        self.do(commands.Channel.Open(), channel)
        if confirms:
            self.do(commands.Confirm.Select(), channel)

    def select(self, channel: int = 1) -> None:
        """Begins a transaction."""
        self.do(commands.Tx.Select(), channel)

    def queue(self, what: str = "q", channel: int = 1, **arguments: Any) -> str:
        """Declares a durable queue."""
        name = self.name(what)
        table = {"x-queue-type": self.kind, **{f"x-{k.replace('_', '-')}": v for k, v in arguments.items()}}
        self.do(commands.Queue.Declare(queue=name, durable=True, arguments=table), channel)
        self.queues.append(name)
        return name

    def publish(
        self, key: str, body: bytes = b"x", channel: int = 1, *, exchange: str = "", mandatory: bool = False, raw: bytes = b"", **properties: Any
    ) -> None:
        """Publishes; `raw` are properties as bytes instead."""
        if not raw:
            wanted = header.ContentHeader(0, len(body), commands.Basic.Properties(delivery_mode=2, **properties)).marshal()
            raw = wanted[12:]
        parts = encode.content(channel, content_header.header_payload(len(body), raw), body, self.frame_max)
        self.send(encode.publish_method(channel, exchange, key, mandatory) + b"".join(parts))
        self._published[channel] = self._published.get(channel, 0) + 1

    def send_large(self, key: str, size: int, channel: int = 1) -> None:
        """Publishes a body of `size` zeros, which is never in one piece here."""
        self.send(encode.publish_method(channel, "", key) + encode.frame(frames.HEADER, channel, content_header.header_payload(size)))
        chunk = encode.frame(frames.BODY, channel, bytes(self.frame_max - frames.FRAME_OVERHEAD_BYTES))
        whole, rest = divmod(size, self.frame_max - frames.FRAME_OVERHEAD_BYTES)
        for _ in range(whole):
            self.send(chunk)
        self.send(encode.frame(frames.BODY, channel, bytes(rest)))

    def fill(self, queue: str, count: int, channel: int = 1) -> None:
        """Publishes 0, 1, 2 … on a channel of its own, and waits for the confirms."""
        filler = self.another()
        filler.open(confirms=True)
        for i in range(count):
            filler.publish(queue, b"%d" % i)
        filler.confirms()
        filler.do(commands.Connection.Close(200, "", 0, 0), 0)

    # -- hearing

    def hear(self, *kinds: int, channel: int = 1, timeout_s: float = TIMEOUT_S) -> Any:
        """Hears until a method of one of these ids came on this channel, with its content. None: the channel or connection closed instead."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.next(deadline)
            if found is None:
                return None
            kind, number, method = found
            if number == channel and kind in kinds:
                return method
            if kind == frames.CONNECTION_CLOSE or (kind == frames.CHANNEL_CLOSE and number == channel):
                return None

    def next(self, deadline: float) -> tuple[int, int, Any] | None:
        """The next whole method; None when the other side closed."""
        while True:
            found = self.read(max(deadline - time.monotonic(), 0.001))
            if found is None:
                self._note(0, "closed")
                return None
            kind, number, payload = found
            if kind == frames.HEARTBEAT:
                continue
            if kind in (frames.HEADER, frames.BODY):
                method = self._content(kind, number, payload)
                if method is not None:
                    return method.index, number, method
                continue
            method = frames.decode_method(payload)
            if kind in frames.CONTENT_METHODS:
                self._unfinished[number] = (method, -1, b"")
                continue
            self._method(kind, number, method)
            return kind, number, method

    def _content(self, kind: int, number: int, payload: bytes) -> Any:
        method, size, body = self._unfinished[number]
        if kind == frames.HEADER:
            size = int.from_bytes(payload[4:12], "big")
            parsed = header.ContentHeader()
            parsed.unmarshal(content_header.cut(payload, b"x-lrq-pos"))
            method.properties = parsed.properties
            table = parsed.properties.headers
            if table is not None:
                for death in cast("Iterable[FieldTable]", table.get("x-death", ())):
                    death.pop("time", None)
        else:
            body += payload
        self._unfinished[number] = (method, size, body)
        if len(body) < size:
            return None
        del self._unfinished[number]
        method.body = body
        if method.index == frames.BASIC_DELIVER:
            self._delivered.setdefault(number, []).append(method)
        values = {name: value for name, value in method.properties if value not in (None, {}, "")}
        self._note(number, name_of(method.index), dict(method), values, body if size < 100 else (size, hash(body)))
        return method

    def _method(self, kind: int, number: int, method: Any) -> None:
        if kind in CONFIRMS:
            done = self._confirmed.setdefault(number, set())
            first = 1 if method.multiple else method.delivery_tag
            tags = sorted(set(range(first, method.delivery_tag + 1)) - done)
            assert tags, f"publish {method.delivery_tag} is answered twice"
            done |= set(tags)
            last = self.heard.setdefault(number, [])[-1:]
            said = name_of(kind)
            if last and last[0][0] == said:
                last[0][1].extend(tags)
                last[0][1].sort()
            else:
                self._note(number, said, tags)
            return
        self._note(number, name_of(kind), dict(method))
        if kind in (frames.CHANNEL_CLOSE, frames.CHANNEL_CLOSE_OK):
            for known in (self._published, self._confirmed, self._delivered):
                known.pop(number, None)
        if kind == frames.CHANNEL_CLOSE:
            self.say(commands.Channel.CloseOk(), number)
        elif kind == frames.CONNECTION_CLOSE:
            self.say(commands.Connection.CloseOk(), 0)

    def _note(self, number: int, *event: Any) -> None:
        self.heard.setdefault(number, []).append(_even(event, self.mark))

    def confirms(self, channel: int = 1) -> None:
        """Hears until every publish of this channel is answered, or the channel closed."""
        while len(self._confirmed.get(channel, ())) < self._published.get(channel, 0):
            if self.hear(*CONFIRMS, channel=channel) is None:
                return

    def deliveries(self, count: int, channel: int = 1) -> list[Any]:
        """The next `count` deliveries on this channel, heard already or not yet."""
        found = self._delivered.setdefault(channel, [])
        while len(found) < count:
            assert self.hear(frames.BASIC_DELIVER, channel=channel) is not None, "closed"
        taken, found[:] = found[:count], found[count:]
        return taken

    def quiet(self) -> None:
        """Hears whatever comes until nothing has come for a while."""
        try:
            while self.next(time.monotonic() + QUIET_S) is not None:
                pass
        except TimeoutError:
            pass

    def in_any_order(self, channel: int = 1) -> None:
        """What was heard on this channel so far counts in any order: deliveries and answers may overtake each other."""
        self.heard[channel].sort(key=repr)

    def close(self) -> None:
        """Closes the connection in order."""
        self.do(commands.Connection.Close(200, "", 0, 0), 0)


def _even(value: Any, mark: str) -> Any:
    if isinstance(value, str):
        return _MADE_UP.sub(r"\1*", value.replace(mark, "*"))
    if isinstance(value, dict):
        return {k: _even(v, mark) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_even(v, mark) for v in value]
    return value
