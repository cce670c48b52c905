"""What the broker is asked before a publish enters the log: when, what, how often; and that nothing overtakes a question.

A connection of the door runs between two sockets that keep what they are given; the test answers as the broker.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest.mock import MagicMock

import pytest
from pamqp import commands
from test_publishing import Connection

from broker_plugin.amqp import content_header, encode, frames
from broker_plugin.session import rights
from broker_plugin.session.channel import ChannelState
from broker_plugin.session.rights import Right

pytestmark = pytest.mark.proves("permissions")

TOPIC = encode.method_frame(1, commands.Exchange.Declare(exchange="topics", exchange_type="topic"))[7:-1]
DIRECT = encode.method_frame(1, commands.Exchange.Declare(exchange="plain", exchange_type="direct"))[7:-1]
REFUSAL = encode.channel_close(frames.CHANNELS_MAX, 403, "ACCESS_REFUSED - no", frames.BASIC_PUBLISH)


C = TypeVar("C")


class Asked(Connection):
    """Beside a broker that answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.relay.rights.clear()
        for sequence, method in enumerate((TOPIC, DIRECT)):
            self.replica.declared.definitions.noted(sequence, "/", method)

    def publish(self, exchange: str, key: str, body: bytes = b"x", *, channel: int = 1, properties: bytes | None = None) -> None:
        self.relay.client_data(publish(exchange, key, body, channel=channel, properties=properties))

    def closing(self) -> ChannelState:
        """Of channel 1."""
        return self.relay.channels[1].state

    def to_broker(self) -> list[tuple[int, int, bytes]]:
        """(kind, channel, payload) of the frames that the broker has got since the last time."""
        data, self.broker.data = self.broker.data, b""
        items, used = frames.scan(data, 0, frames.FRAME_MAX_BYTES, 0)
        assert used == len(data)
        found = []
        for kind, channel, start, end, header, header_end, _ in items:
            found.append((kind, channel, data[start:end]))
            if header:
                found.append((frames.HEADER, channel, data[header:header_end]))
        return found

    def questions(self) -> list[tuple[str, str, bytes]]:
        """(exchange, routing key, properties) of what is asked now."""
        apart = [(kind, payload) for kind, channel, payload in self.to_broker() if channel == frames.CHANNELS_MAX]
        asked = apart[apart[:1] == [(frames.CHANNEL_CLOSE_OK, frames.CHANNEL_CLOSE_OK.to_bytes(4, "big"))] :]  # to a refusal before
        if not asked:
            return []
        kinds = [kind for kind, _ in asked]
        between = kinds[2:-1]
        assert kinds[:2] == [frames.CHANNEL_OPEN, frames.TX_SELECT]
        assert kinds[-1] == frames.CHANNEL_CLOSE
        assert between == [frames.BASIC_PUBLISH, frames.HEADER, frames.TX_ROLLBACK] * (len(between) // 3)
        routes = [frames.publish_route(payload) for kind, payload in asked if kind == frames.BASIC_PUBLISH]
        judged = [payload for kind, payload in asked if kind == frames.HEADER]
        assert all(frames.body_size(payload) == 0 for payload in judged)
        return [(route.exchange, route.routing_key, payload[12:]) for route, payload in zip(routes, judged)]

    async def answer(self, allowed: int, *, refuse: bool | bytes = False) -> None:
        """The broker allows so many of them, then all or none of the rest. `refuse`: in these words, or those of a 403."""
        number = frames.CHANNELS_MAX
        said = encode.raw_method_frame(number, frames.CHANNEL_OPEN_OK, b"\0\0\0\0") + encode.raw_method_frame(number, frames.TX_SELECT_OK)
        said += encode.raw_method_frame(number, frames.TX_ROLLBACK_OK) * allowed
        refusal = REFUSAL if refuse is True else refuse or b""
        self.relay.broker_data(said + refusal + encode.raw_method_frame(number, frames.CHANNEL_CLOSE_OK))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    @property
    def logged(self) -> list[bytes]:
        """The bodies in the log."""
        self.replica.flush()
        found = []
        for run in self.runs:
            data = run.enqueues.frames
            found += [frames.body_of(data, item[5], item[6]) for item in frames.scan(data, 0, frames.FRAME_MAX_BYTES, 0)[0]]
        return found


def publish(exchange: str, key: str, body: bytes, *, channel: int = 1, properties: bytes | None = None) -> bytes:
    header = content_header.header_payload(len(body), content_header.properties() if properties is None else properties)
    return encode.publish_method(channel, exchange, key) + b"".join(encode.content(channel, header, body, 4_096))


def on_its_own(made: Callable[[], C]) -> Callable[[Callable[[C], Coroutine[Any, Any, None]]], Callable[[], None]]:
    """Makes a scenario a test, on a connection of its own."""

    def decorate(scenario: Callable[[C], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        def test() -> None:
            async def run() -> None:
                await scenario(made())

            asyncio.run(run())

        test.__doc__ = scenario.__doc__
        return test

    return decorate


on_a_connection = on_its_own(Asked)


@on_a_connection
async def test_an_exchange_is_asked_about_once_and_what_follows_waits_in_order(c: Asked) -> None:
    c.publish("plain", "a", b"1")
    assert c.questions() == [("plain", "a", b"\0\0")]
    c.publish("plain", "b", b"2")
    c.relay.client_data(encode.method_frame(1, commands.Basic.Qos()))
    assert (c.logged, c.to_broker()) == ([], [])
    await c.answer(1)
    assert c.logged == [b"1", b"2"]
    kinds = [kind for kind, _, _ in c.to_broker()]
    assert kinds[-1] == frames.BASIC_QOS
    c.publish("plain", "c", b"3")
    assert c.logged == [b"1", b"2", b"3"]
    assert c.questions() == []
    c.publish("", "queue", b"4")
    assert c.questions() == [("", "queue", b"\0\0")]


@on_a_connection
async def test_where_an_exchange_judges_keys_each_key_is_asked_about_many_at_once(c: Asked) -> None:
    c.relay.client_data(b"".join(publish("topics", key, key.encode()) for key in ("a", "b", "a", "c")))
    assert [key for _, key, _ in c.questions()] == ["a", "b", "c"]
    await c.answer(3)
    assert c.logged == [b"a", b"b", b"a", b"c"]
    c.publish("topics", "b", b"again")
    c.publish("unknown", "b", b"may judge keys, too")
    assert c.logged[4:] == [b"again"]
    assert c.questions() == [("unknown", "b", b"\0\0")]


@on_a_connection
async def test_a_refusal_in_the_middle_ends_the_channel_when_its_turn_comes(c: Asked) -> None:
    c.relay.client_data(b"".join(publish("topics", key, key.encode()) for key in "abc"))
    assert len(c.questions()) == 3
    await c.answer(1, refuse=True)
    assert c.logged == [b"a"]
    assert [key for _, key, _ in c.questions()] == ["b", "c"]
    assert c.closing() is ChannelState.NO
    await c.answer(0, refuse=True)
    assert c.logged == [b"a"]
    assert c.closing() is ChannelState.DOOR
    assert c.relay.channels[1].refusal == encode.rechannel(REFUSAL, 1)


@on_a_connection
async def test_only_what_the_broker_judges_is_shown_to_it(c: Asked) -> None:
    c.relay.rights.add(Right("", "", False))
    table = content_header.field(b"secret", b"s") + b"\x02CCA\0\0\0\0"
    for properties in (content_header.properties(table, expiration=b"60000"), content_header.properties(expiration=b"0")):
        c.publish("", "q", properties=properties)
    assert len(c.logged) == 2
    assert c.questions() == []
    wrong = b"\x03BCCS\0\0\0\1k"
    cases = {
        content_header.properties(table, content_type="t", correlation_id="c", user_id=b"bob"): content_header.properties(b"", False, user_id=b"bob"),
        content_header.properties(expiration=b"1.5"): content_header.properties(b"", False, expiration=b"1.5"),
        content_header.properties(expiration=b"4294967296"): content_header.properties(b"", False, expiration=b"4294967296"),
        content_header.properties(content_header.field(b"a", b"b") + wrong): content_header.properties(wrong, False),
    }
    for number, (properties, shown) in enumerate(cases.items(), 2):
        c.publish("", "q", properties=properties)
        assert c.questions() == [("", "q", shown)]
        assert len(c.logged) == number
        await c.answer(1)
        c.publish("", "q", b"y", properties=properties)
        assert len(c.logged) == number + 2
        c.runs.pop()


@on_a_connection
async def test_further_keys_are_asked_about_where_the_exchange_judges_them(c: Asked) -> None:
    c.relay.rights.add(Right("topics", "k", False))
    copies = [b"\x02CCA\0\0\0\x06S\0\0\0\1%c" % key for key in b"ab"]
    for number, each in enumerate(copies):
        c.publish("topics", "k", properties=content_header.properties(each))
        assert c.questions() == [("topics", "k", content_header.properties(each, False))]
        await c.answer(1)
        c.publish("topics", "k", properties=content_header.properties(each))
        assert len(c.logged) == 2 * number + 2
    c.publish("topics", "other", properties=content_header.properties(copies[0]))
    assert [key for _, key, _ in c.questions()] == ["other"]


def forget_403(c: Asked) -> None:
    c.relay.client_data(encode.method_frame(2, commands.Channel.Open()))
    c.relay.broker_data(encode.channel_close(2, 403, "ACCESS_REFUSED - withdrawn"))


def forget_secret(c: Asked) -> None:
    c.relay.client_data(encode.method_frame(0, commands.Connection.UpdateSecret("new", "why")))
    c.relay.broker_data(encode.method_frame(0, commands.Connection.UpdateSecretOk()))


def forget_exchange(c: Asked) -> None:
    c.relay.exchange_changed("/", "plain")


def remember_404(c: Asked) -> None:
    c.relay.client_data(encode.method_frame(2, commands.Channel.Open()))
    c.relay.broker_data(encode.channel_close(2, 404, "NOT_FOUND"))


def remember_others(c: Asked) -> None:
    c.relay.exchange_changed("other", "plain")
    c.relay.exchange_changed("/", "other")


@pytest.mark.parametrize("event", [forget_403, forget_secret, forget_exchange, remember_404, remember_others])
def test_what_is_forgotten(event: Callable[[Asked], None]) -> None:
    async def run() -> None:
        c = Asked()
        bob = content_header.properties(user_id=b"bob")
        c.publish("plain", "a", properties=bob)
        assert len(c.questions()) == 1
        await c.answer(1)
        c.publish("plain", "a", b"2", properties=bob)
        event(c)
        await asyncio.sleep(0)
        c.to_broker()
        c.publish("plain", "a", b"3", properties=bob)
        assert (len(c.logged), len(c.questions())) == ((3, 0) if event in (remember_404, remember_others) else (2, 1))

    asyncio.run(run())


@pytest.mark.parametrize(("code", "forgotten"), [(403, True), (404, False)])
def test_a_refusal_of_what_was_asked_ends_what_was_believed(code: int, forgotten: bool) -> None:
    async def run() -> None:
        c = Asked()
        c.publish("plain", "a")
        await c.answer(1)
        c.to_broker()
        c.relay.client_data(encode.method_frame(2, commands.Channel.Open()))
        c.publish("topics", "a", channel=2)
        await c.answer(0, refuse=encode.channel_close(frames.CHANNELS_MAX, code, "no", frames.BASIC_PUBLISH))
        c.to_broker()
        c.publish("plain", "b", b"again")
        assert (c.logged, bool(c.questions())) == (([b"x"], True) if forgotten else ([b"x", b"again"], False))

    asyncio.run(run())


@on_a_connection
async def test_what_is_remembered_of_an_exchange_outlives_no_change_of_it(c: Asked) -> None:
    """Though the right itself is forgotten: of too many, or as a transaction has needed none."""
    c.publish("plain", "a")
    await c.answer(1)
    c.to_broker()
    for number in range(rights.RIGHTS_MAX):
        c.relay.rights.add(Right("topics", str(number), False))
    c.relay.exchange_changed("/", "plain")
    c.publish("plain", "a")
    assert len(c.questions()) == 1


@on_a_connection
async def test_nothing_is_asked_while_the_secret_is_renewed(c: Asked) -> None:
    c.relay.client_data(encode.method_frame(0, commands.Connection.UpdateSecret("new", "why")))
    c.publish("plain", "a")
    assert [kind for kind, _, _ in c.to_broker()] == [frames.CONNECTION_UPDATE_SECRET]
    c.relay.broker_data(encode.method_frame(0, commands.Connection.UpdateSecretOk()))
    await asyncio.sleep(0)
    assert len(c.questions()) == 1


@on_a_connection
async def test_what_is_remembered_is_bounded(c: Asked) -> None:
    for number in range(3 * rights.RIGHTS_MAX):
        c.relay.rights.add(Right("topics", str(number), False))
        assert Right("topics", str(number), False) in c.relay.rights
    assert Right("topics", "0", False) not in c.relay.rights
    properties = [b"\x20\0" + bytes(100_000) + b"%d" % number for number in range(200)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for each in properties:
        c.relay.rights.add(Right("topics", "k", False, bytes(bytearray(each))))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert all(Right("topics", "k", False, each) in c.relay.rights for each in properties)
    assert grown < 1 << 20


class Unread(Asked):
    """Whose client has not taken `unread` bytes, and more than that may be on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.unread, self.aborted, self.told = 0.0, 1, False, 0
        door: Any = self.relay.door
        door.now, door.client_full = lambda: self.now, self._tell
        client: Any = self.client
        client.get_write_buffer_size, client.abort = lambda: self.unread, self._abort
        self.limit, self.patience_s = 16 * door.config.client_buffer_bytes_max, door.config.hold_up_timeout_s
        self.relay.client_full(True)
        assert not self.broker.reads
        self.publish("plain", "a")
        assert self.broker.reads

    def _tell(self, _relay: object, waiting_bytes: int) -> None:
        self.told = waiting_bytes

    def _abort(self) -> None:
        self.aborted = True

    def comes(self, unread: int) -> bool:
        """Something comes from the broker, after which this is unread. Returns whether the broker is read from."""
        self.unread = unread
        self.relay.broker_data(frames.HEARTBEAT_FRAME)
        return self.broker.reads

    def passes(self, seconds: float, unread: int = 0) -> bool:
        """Time, after which this is unread (0: as before). Returns whether the broker is read from."""
        self.now, self.unread = self.now + seconds, unread or self.unread
        self.relay.flow.tick(self.now)
        return self.broker.reads


with_an_unread_client = on_its_own(Unread)


@with_an_unread_client
async def test_a_client_that_does_not_read_is_asked_for_all_the_same(c: Unread) -> None:
    """It may be writing, and read when that is done."""
    assert c.comes(c.limit)
    await c.answer(1)
    assert not c.broker.reads
    assert not c.passes(10 * c.patience_s)
    assert not c.aborted


@with_an_unread_client
async def test_what_stands_before_an_answer_that_nobody_reads_is_bounded(c: Unread) -> None:
    """And its client, when it has read nothing for too long. The door knows meanwhile how much it is."""
    assert not c.comes(c.limit + 1)
    assert c.told == c.limit + 1
    assert not c.passes(c.patience_s - 1)
    assert not c.aborted
    c.passes(1)
    assert c.aborted


@with_an_unread_client
async def test_who_buries_the_answer_to_its_declaration_is_given_up_at_once(c: Unread) -> None:
    """Nothing is taken from anybody before it is read."""
    c.relay.replies[1] = asyncio.get_running_loop().create_future()
    assert c.comes(c.limit)
    c.passes(1)
    assert not c.aborted
    assert not c.comes(c.limit + 1)
    c.passes(1)
    assert c.aborted


@with_an_unread_client
async def test_who_reads_on_slowly_is_not_given_up_for_what_stands_before_an_answer(c: Unread) -> None:
    assert not c.comes(100 * c.limit)
    for taken in range(1, 10):
        assert not c.passes(c.patience_s - 1, 100 * c.limit - taken)
    assert c.passes(1, c.limit)
    assert not c.aborted


@with_an_unread_client
async def test_when_reading_stops_counts_from_the_question_on(c: Unread) -> None:
    """Before, nothing was wanted of it."""
    await c.answer(1)
    c.passes(10 * c.patience_s)
    c.publish("topics", "a")
    assert not c.comes(c.limit + 1)
    c.passes(c.patience_s - 1)
    assert not c.aborted


@on_a_connection
async def test_an_answer_to_a_direct_request_is_shown_to_nobody(c: Asked) -> None:
    """RabbitMQ 3 would deliver it. It is in the log for the sake of what it names besides."""
    copies = content_header.properties(content_header.field(b"CC", b"q"))
    c.relay.rights.add(Right("", "", False))
    c.publish("", "amq.rabbitmq.reply-to.token", properties=copies)
    assert [key for _, key, _ in c.questions()] == ["amq.rabbitmq.reply-to.gone"]
    await c.answer(1)
    assert c.logged == [b"x"]
    assert [frames.publish_route(payload).routing_key for kind, _, payload in c.to_broker() if kind == frames.BASIC_PUBLISH] == [
        "amq.rabbitmq.reply-to.token"
    ]


@pytest.mark.parametrize("size", [100, 2 * frames.HOLD_BYTES_MAX], ids=["whole", "in pieces"])
def test_a_message_that_waits_for_an_answer_counts_as_held(size: int) -> None:
    """Up to the largest message for each connection: nothing bounded them together."""

    async def scenario() -> None:
        asked = Asked()
        relay = asked.relay
        share, behind = relay.from_client.share, publish("", "orders", b"y")
        asked.publish("plain", "key", b"x" * size)
        assert relay.from_client.stalled
        assert share.bytes > size
        relay.client_data(behind)
        await asked.answer(1)
        asked.replica.flush()
        assert asked.logged == [b"x" * size]
        assert relay.from_client.stalled
        assert 0 < share.bytes < 100
        await asked.answer(1)
        asked.replica.flush()
        assert asked.logged == [b"x" * size, b"y"]
        assert share.bytes == 0

    asyncio.run(scenario())


def test_a_message_for_which_there_is_no_room_while_it_waits_ends_its_connection() -> None:
    async def scenario() -> None:
        asked = Asked()
        relay: Any = asked.relay
        relay.close_client = close = MagicMock()
        relay.door.unfinished.limit = 3 * frames.HOLD_BYTES_MAX + 50  # as it came, it is a little more: with the frames around it
        other = relay.door.unfinished.share("other", lambda _: None)
        other.take(frames.HOLD_BYTES_MAX)
        asked.publish("plain", "key", b"x" * 2 * frames.HOLD_BYTES_MAX)
        assert "the limit is unfinished" in close.call_args.args[1]
        assert other.bytes == frames.HOLD_BYTES_MAX
        assert asked.logged == []

    asyncio.run(scenario())
