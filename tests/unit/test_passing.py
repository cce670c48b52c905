"""Contents from the broker that come in pieces, by the frames that a client gets instead."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from pamqp import commands
from test_publishing import ID, Connection, message

from broker_plugin.amqp import content_header, encode, frames
from broker_plugin.amqp.content_assembly import UnexpectedFrame
from broker_plugin.amqp.content_relay import PIECES, ContentRelay
from broker_plugin.amqp.frames import FrameError, Item
from broker_plugin.session.flow_control import DEAF_SHARE

FRAME_MAX = 4_096
CONFIRM = encode.ack(1, 7)
OTHERS = encode.ack(2, 7)


def delivered(channel: int, size: int, frame_max: int = FRAME_MAX + 16) -> bytes:
    body = random.Random(size).randbytes(size)
    method = encode.method_frame(channel, commands.Basic.Deliver("c", 1, False, "", "q"))
    return method + b"".join(encode.content(channel, content_header.header_payload(size, content_header.properties(b"")), body, frame_max))


class Client:
    """What it gets, if frames come one by one from the broker.

    Attributes:
        answer: What is decided of the next content.
        withheld: Channels.
    """

    def __init__(self) -> None:
        self.got = b""
        self.answer: bytes | None = None
        self.withheld: set[int] = set()
        self.passing = ContentRelay(FRAME_MAX, self._decide, self.withheld.__contains__)
        self.decided: list[tuple[int, bytes]] = []

    def _decide(self, number: int, blob: bytes, item: Item) -> bytes | None:
        self.decided.append((number, blob[item[4] : item[5]]))
        assert blob[item[2] - 7 : item[6]] == blob
        return self.answer

    def hears(self, data: bytes) -> list[bytes | None]:
        """Returns what was given instead of each frame."""
        instead = []
        for frame in pieces(data):
            [item], _ = frames.scan(frame, 0, frames.FRAME_MAX_ANY_BYTES, 0)
            assert item[0] in PIECES
            given = self.passing.take(item[0], item[1], frame, item)
            self.got += frame if given is None else given
            instead.append(given)
        return instead

    def says(self, data: bytes) -> None:
        """The door itself."""
        if not self.passing.waits(data):
            self.got += data


def pieces(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        end = at + 8 + int.from_bytes(data[at + 3 : at + 7], "big")
        found.append(data[at:end])
        at = end
    return found


def bodies(data: bytes) -> bytes:
    return b"".join(frame[7:-1] for frame in pieces(data) if frame[0] == frames.BODY)


@pytest.mark.parametrize("size", [0, 1, FRAME_MAX - 8, FRAME_MAX - 7, FRAME_MAX + 8, 5 * FRAME_MAX, 100_000])
def test_it_is_passed_on_as_it_comes(size: int) -> None:
    client = Client()
    whole = delivered(1, size)
    for frame in pieces(whole):
        client.hears(frame)
    assert max(map(len, pieces(client.got))) <= FRAME_MAX
    assert bodies(client.got) == bodies(whole)
    assert [number for number, _ in client.decided] == [1]
    if size <= FRAME_MAX - 8:
        assert client.got == whole


def test_a_frame_that_needs_nothing_is_passed_on_in_the_slice_it_came_in() -> None:
    instead = Client().hears(delivered(1, 100_000, FRAME_MAX))
    assert len(instead) > 20
    assert set(instead[2:]) == {None}


def test_what_the_door_says_on_its_channel_comes_behind_it() -> None:
    """A client that expects a body takes any other frame on that channel for an error."""
    client = Client()
    first, *rest = pieces(delivered(1, 20_000))
    client.hears(first)
    client.says(CONFIRM)
    assert client.got == CONFIRM, "nothing of it has gone to the client yet"
    client.hears(rest[0])
    for frame in rest[1:]:
        client.says(CONFIRM)
        client.says(OTHERS)
        client.says(frames.HEARTBEAT_FRAME)
        client.hears(frame)
    mine = [frame for frame in pieces(client.got) if frame[1:3] == b"\0\1"]
    assert [frame[0] for frame in mine[:3]] == [frames.METHOD, frames.METHOD, frames.HEADER]
    assert {frame[0] for frame in mine[3 : -len(rest[1:])]} == {frames.BODY}
    assert mine[-len(rest[1:]) :] == [CONFIRM] * len(rest[1:])
    assert client.passing.behind_bytes == 0
    client.says(CONFIRM)
    assert client.got.endswith(CONFIRM * 2)


@pytest.mark.parametrize("answer", [b"", encode.method_frame(1, commands.Basic.GetEmpty())])
def test_a_body_is_dropped_with_its_head(answer: bytes) -> None:
    client = Client()
    client.answer = answer
    client.hears(delivered(1, 20_000))
    client.says(CONFIRM)
    client.answer = None
    client.hears(delivered(1, 10))
    assert client.got == answer + CONFIRM + delivered(1, 10)


def test_what_has_to_be_withheld_is_not_dropped() -> None:
    """From then on everything on that channel is withheld; it comes again, from its first frame."""
    client, whole = Client(), delivered(1, 20_000)
    first, header, *rest = pieces(whole)
    client.answer = b""
    client.hears(first)
    client.withheld.add(1)
    client.hears(header)
    client.withheld.clear()
    client.answer = None
    client.hears(first + header + b"".join(rest))
    assert bodies(client.got) == bodies(whole)


def test_contents_on_two_channels() -> None:
    client = Client()
    one, two = delivered(1, 20_000), delivered(2, 30_000)
    for left, right in zip(pieces(one) + [b""] * 3, pieces(two), strict=False):
        client.hears(left + right)
    assert bodies(b"".join(f for f in pieces(client.got) if f[1:3] == b"\0\1")) == bodies(one)
    assert bodies(b"".join(f for f in pieces(client.got) if f[1:3] == b"\0\2")) == bodies(b"".join(pieces(two)[: len(pieces(one)) + 3]))


def test_a_channel_that_ends_in_the_middle() -> None:
    client = Client()
    for frame in pieces(delivered(1, 20_000))[:3]:
        client.hears(frame)
    client.says(CONFIRM)
    assert client.passing.drop(1) == CONFIRM
    assert client.passing.drop(1) == b""
    client.says(CONFIRM)
    assert client.got.endswith(CONFIRM)


def _malformed() -> dict[str, Any]:
    method, header, body, *_ = pieces(delivered(1, 20_000))
    longer = pieces(delivered(1, 100))
    return {
        "a body without a method": body,
        "a header without a method": header,
        "a method twice": method + method,
        "a method within a body": method + header + method,
        "a header twice": method + header + header,
        "another class's header": method + header[:7] + b"\0\x0a" + header[9:],
        "a header that is too short": method + encode.frame(frames.HEADER, 1, b"\0\x3c\0\0"),
        "a body that is too long": b"".join(longer[:2]) + encode.frame(frames.BODY, 1, b"x" * 101),
    }


@pytest.mark.parametrize("data", _malformed().values(), ids=_malformed())
def test_a_broker_that_says_something_else(data: bytes) -> None:
    with pytest.raises((FrameError, UnexpectedFrame)):
        Client().hears(data)


def test_an_answer_that_the_brokers_own_ack_sets_free_does_not_come_before_the_last_frame() -> None:
    """They were read at once: the end of a large message, and the ack on which a repeat's confirm waits, which the door itself gives."""

    async def scenario() -> None:
        connection = Connection("p")
        relay = connection.relay
        relay.broker_data(encode.method_frame(1, commands.Confirm.SelectOk()))
        raw, _ = message("orders", content_header.field(ID, b"p/1"), True, b"abc")
        relay.client_data(raw)
        connection.replica.flush()
        relay.client_data(raw)
        assert relay.repeats.waiting
        connection.client.data = b""
        first, header, *rest = pieces(delivered(1, 400_000, frames.FRAME_MAX_BYTES))
        relay.broker_data(first + header + b"".join(rest[:-1]))
        relay.broker_data(rest[-1] + encode.ack(1, 1))
        confirms = [encode.ack(1, 1), encode.ack(1, 2)]
        got = pieces(connection.client.data)
        assert got[: 2 + len(rest)] == [first, header, *rest]
        assert sorted(got[2 + len(rest) :]) == confirms

    asyncio.run(scenario())


def test_a_client_is_not_read_while_too_much_waits_behind_a_content() -> None:
    """It reads all that it is given; but its broker does not go on with a large message, and what the door answers must wait for that."""

    async def scenario() -> None:
        connection = Connection("p")
        relay = connection.relay
        relay.door.end_unread = lambda *_: None  # type: ignore[method-assign]
        passing, limit = relay.from_broker.passing, relay.door.config.client_buffer_bytes_max
        method, header, *rest = pieces(delivered(1, 400_000, frames.FRAME_MAX_BYTES))
        relay.broker_data(method + header + b"".join(rest[:-1]))
        question = encode.method_frame(1, commands.Queue.Declare(queue="LRQ_Producer_p", passive=True))
        relay.client_data(question * 100)
        assert connection.client.reads
        for _ in range(DEAF_SHARE * limit // (100 * len(question)) + 1):
            relay.client_data(question * 100)
        assert passing.behind_bytes > DEAF_SHARE * limit
        assert not connection.client.reads
        relay.broker_data(rest[-1])
        assert not passing.behind_bytes
        assert connection.client.reads

    asyncio.run(scenario())


def test_what_waits_behind_a_content_of_a_channel_that_ends_has_the_client_read_again() -> None:
    async def scenario() -> None:
        connection = Connection("p")
        relay = connection.relay
        relay.broker_data(b"".join(pieces(delivered(1, 400_000, frames.FRAME_MAX_BYTES))[:-1]))
        relay.to_client(encode.ack(1, 1) * relay.door.config.client_buffer_bytes_max)
        relay.flow.consider_pausing()
        assert not connection.client.reads
        relay.broker_data(encode.channel_close(1, 404, "NOT_FOUND", 0))
        assert connection.client.reads

    asyncio.run(scenario())
