"""The AMQP client against a real broker: refusals, streams, rates, a stalled broker, splitting, alarms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvloop
from pamqp import commands, decode

from broker_plugin.amqp import connection as amqp_connection
from broker_plugin.amqp import content_header, encode
from broker_plugin.amqp.connection import (
    AccessRefused,
    Address,
    AuthenticationFailed,
    Channel,
    ChannelClosed,
    Connection,
    ConnectionClosed,
    ConnectionRefused,
    VhostNotFound,
)
from broker_plugin.amqp.errors import AmqpError, ConnectionLimit
from broker_plugin.log import stamps
from lrq_ha.errors import MalformedInput
from lrq_ha.lab import Lab

pytestmark = [pytest.mark.broker, pytest.mark.quick]

STREAM = {"x-queue-type": "stream"}
PATIENCE_S = 120.0  # for what must come, and is not about time: a machine may stand still for half a minute
BEAT_S = 8  # twice that a machine may stand still
Use = Callable[[Connection], Awaitable[None]]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(groups={"client": 1}, brokers_only=True, vhosts=["closed", "deserted", "full", "not found"]) as lab:
        for vhost in ("closed", "not found"):
            lab.ctl("c1", "clear_permissions", "-p", vhost, "app")
        lab.ctl("c1", "set_vhost_limits", "-p", "full", '{"max-connections": 0}')
        yield lab


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An orderly close is answered, however long the broker takes."""
    monkeypatch.setattr(amqp_connection, "CLOSE_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def url(lab: Lab) -> str:
    return lab.nodes["c1"].broker


@pytest.fixture(params=["asyncio", "uvloop"])
def loops(request: pytest.FixtureRequest) -> Any:
    """Runs a coroutine under either event loop."""
    return asyncio.run if request.param == "asyncio" else uvloop.run


async def opened(url: str | Address, **options: Any) -> Connection:
    return await Connection.open(url, **{"connect_timeout_s": PATIENCE_S, **options})


async def with_connection(url: str | Address, use: Use, **options: Any) -> None:
    connection = await opened(url, **options)
    try:
        async with asyncio.timeout(3 * PATIENCE_S):
            await use(connection)
    finally:
        await connection.close()


async def until(holds: Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
    """Waits for something that callbacks bring about."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.005)


def changed(url: str, **parts: str) -> Address:
    made = Address.parse(url)
    return Address(**{"host": made.host, "port": made.port, "user": made.user, "password": made.password, **parts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "error", "todo"),
    [
        ({"password": "wrong"}, AuthenticationFailed, "rabbitmqctl authenticate_user app "),
        ({"user": "nobody"}, AuthenticationFailed, "rabbitmqctl authenticate_user nobody "),
        ({"vhost": "nowhere"}, VhostNotFound, "rabbitmqctl add_vhost nowhere && rabbitmqctl set_permissions -p nowhere app '.*' '.*' '.*'"),
        ({"vhost": "closed"}, AccessRefused, "rabbitmqctl set_permissions -p closed app '.*' '.*' '.*'"),
        ({"vhost": "not found"}, AccessRefused, "rabbitmqctl set_permissions -p 'not found' app '.*' '.*' '.*'"),
        ({"vhost": "full"}, ConnectionLimit, "rabbitmqctl list_vhost_limits --vhost full"),
    ],
)
def test_a_refused_login_says_what_to_do(url: str, parts: dict[str, str], error: type[AmqpError], todo: str, loops: Any) -> None:
    with pytest.raises(error) as caught:
        loops(opened(changed(url, **parts)))
    assert type(caught.value) is error
    assert todo in caught.value.todo
    assert "wrong" not in str(caught.value)
    assert caught.value.retriable == (error is ConnectionLimit)


def test_nobody_listens_or_nobody_speaks_amqp(loops: Any) -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionRefused, match="did not answer within"):
            await Connection.open(f"amqp://127.0.0.1:{port}", connect_timeout_s=0.2)
        server.close()
        with pytest.raises(ConnectionRefused, match="cannot be reached") as caught:
            await opened(f"amqp://127.0.0.1:{port}")
        assert caught.value.retriable

        def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail.example ESMTP\r\n")

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        with pytest.raises((ConnectionRefused, ConnectionClosed)):
            await Connection.open(f"amqp://127.0.0.1:{server.sockets[0].getsockname()[1]}", connect_timeout_s=5)
        server.close()

    loops(main())


def test_addresses() -> None:
    assert Address.parse("amqp://a%40b:p%2Fw@h:1/%2Fv") == Address("h", 1, "a@b", "p/w", "/v")
    assert Address.parse("amqp://h", vhost="lrq") == Address("h", vhost="lrq")
    assert "secret" not in repr(Address.parse("amqp://u:secret@h")) + str(Address.parse("amqp://u:secret@h"))
    for bad in ("http://h", "amqp://", "amqp://h:port", "nonsense", "amqp://u@h", "amqp://u:p@h?heartbeat=5"):
        with pytest.raises(MalformedInput):
            Address.parse(bad)


def test_a_missing_queue_closes_its_channel_only(url: str, loops: Any) -> None:
    async def main(connection: Connection) -> None:
        ends: list[Any] = []
        channel = await connection.channel(on_close=ends.append)
        other = await connection.channel()
        calls = await asyncio.gather(
            channel.queue_declare("is-not-there", passive=True), channel.flow(), return_exceptions=True
        )
        assert all(isinstance(error, ChannelClosed) and error.code == 404 and "is-not-there" in error.text for error in calls)
        assert ends == [channel.error]
        assert channel.error is not None
        assert channel.error.todo
        with pytest.raises(ChannelClosed):
            channel.publish("", "q", b"")
        with pytest.raises(ChannelClosed):
            await channel.flow()
        await other.flow()
        again = await connection.channel()
        assert again.number == channel.number
        await again.flow()
        await again.close()
        assert ends == [channel.error]

    loops(with_connection(url, main))


def test_closing_a_channel_fails_its_calls_and_frees_its_number(url: str, loops: Any) -> None:
    async def main(connection: Connection) -> None:
        ends: list[Any] = []
        channel = await connection.channel(on_close=ends.append)
        call = asyncio.ensure_future(channel.flow())
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(channel.close())
        await asyncio.sleep(0)
        with pytest.raises(ChannelClosed):
            channel.publish("", "q", b"")
        channel.ack(1)  # nothing to acknowledge any more: must reach neither this channel nor the next of its number
        await closing
        with pytest.raises(ChannelClosed, match="closed by this side"):
            await call
        channel.ack(1)
        assert ends == [None]
        again = await connection.channel()
        assert again.number == channel.number
        assert (await again.queue_declare("", exclusive=True))[0]

    loops(with_connection(url, main))


def test_a_channel_whose_closing_was_given_up_frees_its_number(url: str, loops: Any) -> None:
    """It was in use for good, one more each time."""

    async def use(connection: Connection) -> None:
        told: list[Exception | None] = []
        channel = await connection.channel(on_close=told.append)
        closing = asyncio.create_task(channel.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert closing.cancelled()
        is_open = channel.error is None  # its close-ok may be here already
        again = await connection.channel()
        assert again.number != channel.number or not is_open, "what the former one still gets is not for another"
        await until(lambda: channel.error)
        assert connection._channels == {again.number: again}
        assert told == [None]

    loops(with_connection(url, use))


def test_both_sides_close_a_channel_at_once(url: str, loops: Any) -> None:
    async def main(connection: Connection) -> None:
        for _ in range(20):
            channel = await connection.channel()
            failing = asyncio.ensure_future(channel.queue_declare("is-not-there", passive=True))
            await asyncio.sleep(0)
            await channel.close()
            with pytest.raises(ChannelClosed):
                await failing
            again = await connection.channel()
            assert (await again.queue_declare("", exclusive=True))[0].startswith("amq.gen-")
            await again.close()

    loops(with_connection(url, main))


def test_topology_calls(url: str, loops: Any) -> None:
    async def main(connection: Connection) -> None:
        queue = f"größe-{time.time_ns()}"
        there = f"hin-{time.time_ns()}"
        back = f"her-{time.time_ns()}"
        channel = await connection.channel()
        name, ready, consumers = await channel.queue_declare("", exclusive=True)
        assert name.startswith("amq.gen-")
        assert (ready, consumers) == (0, 0)
        await channel.queue_declare(queue, arguments={"x-max-length": 100, "x-overflow": "reject-publish"})
        await channel.exchange_declare(there, "topic", arguments={"x-note": "é"})
        await channel.exchange_declare(back, "fanout", durable=False, auto_delete=True)
        await channel.exchange_declare(there, passive=True)
        await channel.queue_bind(queue, there, "a.#")
        await channel.exchange_bind(back, there, "b.#")
        await channel.confirm_select()
        channel.publish(there, "a.b", b"1", {"n": 1, "s": "x"})
        channel.publish(there, "a.b", b"2", persistent=False)
        await channel.confirmed()
        assert (await channel.queue_declare(queue, passive=True))[1] == 2
        assert await channel.queue_purge(queue) == 2
        await channel.queue_unbind(queue, there, "a.#")
        await channel.exchange_delete(there)
        assert await channel.queue_delete(queue) == 0

    loops(with_connection(url, main))


def test_deliveries_and_giving_back(url: str, loops: Any) -> None:
    async def main(connection: Connection) -> None:
        queue = f"give-{time.time_ns()}"
        channel = await connection.channel()
        await channel.queue_declare(queue)
        await channel.confirm_select()
        for number in range(4):
            channel.publish("", queue, b"%d" % number, {"x-lrq-id": f"p/{number}", "note": b"\xff"})
        await channel.confirmed()
        got: list[tuple[int, bool, str, str, bytes, bytes]] = []
        await channel.qos(2)
        tag = await channel.consume(queue, lambda *delivery: got.append(delivery))
        await until(lambda: len(got) == 2)
        assert [d[5] for d in got] == [b"0", b"1"]
        assert got[0][1:4] == (False, "", queue)
        assert stamps.replication_id(got[1][4]) == b"p/1"
        channel.ack(got[0][0])
        channel.nack(got[1][0], requeue=True)
        await until(lambda: len(got) >= 4)
        channel.reject(got[2][0])
        await channel.cancel(tag)
        await channel.recover()
        await channel.flow()
        await channel.close()
        channel = await connection.channel()
        assert (await channel.queue_declare(queue, passive=True))[1] == 2
        await channel.queue_delete(queue)

    loops(with_connection(url, main))


def test_a_consumer_is_told_that_its_queue_is_gone(url: str) -> None:
    async def main(connection: Connection) -> None:
        channel = await connection.channel()
        await channel.queue_declare("soon-gone")
        cancelled: list[str] = []
        tag = await channel.consume("soon-gone", lambda *_: None, on_cancel=cancelled.append)
        await channel.queue_delete("soon-gone")
        await until(lambda: cancelled)
        assert cancelled == [tag]

    asyncio.run(with_connection(url, main))


def test_a_return_comes_before_its_ack(url: str) -> None:
    async def main(connection: Connection) -> None:
        events: list[Any] = []
        channel = await connection.channel(
            on_confirm=lambda *confirm: events.append(confirm), on_return=lambda *returned: events.append(returned)
        )
        await channel.confirm_select()
        for number, key in enumerate(("is-not-there", "no UTF-8: \udcff\udcfe"), 1):
            channel.publish("", key, b"back", mandatory=True)
            await channel.confirmed()
            assert events[0][:4] == (312, "NO_ROUTE", "", key)
            assert events[0][5] == b"back"
            assert events[1] == (number, False, True)
            events.clear()

    asyncio.run(with_connection(url, main))


@pytest.mark.parametrize("name", ["no UTF-8: \udcff\udcfe", "é" * 127])
def test_the_brokers_words_may_name_what_is_not_utf8_or_be_cut(url: str, name: str) -> None:
    async def main(connection: Connection) -> None:
        channel = await connection.channel()
        channel.publish(name, "k", b"x")
        with pytest.raises(ChannelClosed) as caught:
            await channel.flow()
        assert (caught.value.code, caught.value.text[:22]) == (404, "NOT_FOUND - no exchang")
        channel = await connection.channel()
        await channel.queue_declare("still here", exclusive=True)

    asyncio.run(with_connection(url, main))


def test_refused_publishes_are_counted(url: str) -> None:
    async def main(connection: Connection) -> None:
        queue = f"full-{time.time_ns()}"
        channel = await connection.channel()
        await channel.queue_declare(queue, arguments={"x-max-length": 3, "x-overflow": "reject-publish"})
        await channel.confirm_select()
        for _ in range(10):
            channel.publish("", queue, b"x")
            await channel.confirmed()
        assert (channel.answered_to, channel.refused) == (10, 7)
        await channel.queue_delete(queue)

    asyncio.run(with_connection(url, main))


@pytest.mark.parametrize("size", [0, 1, 4_087, 4_088, 4_089, 100_000, 2_000_000])
def test_bodies_are_split_and_put_together(url: str, size: int, loops: Any) -> None:
    body = bytes(i * 7 % 251 for i in range(min(size, 5_000)))
    body = (body * (size // max(len(body), 1) + 1))[:size]

    async def main(connection: Connection) -> None:
        assert connection.frame_max_bytes == 4_096
        channel = await connection.channel()
        queue, _, _ = await channel.queue_declare("", exclusive=True)
        got: list[bytes] = []
        await channel.consume(queue, lambda *delivery: got.append(delivery[5]), no_ack=True)
        for _ in range(3):
            channel.publish("", queue, body)
        await until(lambda: len(got) == 3)
        assert got == [body] * 3

    loops(with_connection(url, main, frame_max_bytes=4_096))


def test_headers_larger_than_its_own_frames(url: str) -> None:
    """A header frame comes as large as somebody with larger frames has published it."""

    async def main(connection: Connection) -> None:
        channel = await connection.channel()
        await channel.queue_declare("large headers", exclusive=True)

        async def publish(other: Connection) -> None:
            writer = await other.channel()
            await writer.confirm_select()
            for size in (1, 300_000):
                writer.publish("", "large headers", b"x" * size, {"h": "v" * 20_000})
            await writer.confirmed()

        await with_connection(url, publish)
        got: list[tuple[int, int]] = []
        await channel.consume("large headers", lambda *rest: got.append((len(rest[-2]), len(rest[-1]))))
        await until(lambda: len(got) == 2 or connection.error)
        assert connection.error is None
        assert [size for _, size in got] == [1, 300_000]
        assert min(header for header, _ in got) > 20_000

    asyncio.run(with_connection(url, main, frame_max_bytes=8_192))


def test_a_stream_is_written_and_read(lab: Lab, loops: Any) -> None:
    async def main(connection: Connection) -> None:
        stream = f"LRQ_client_test-{time.time_ns()}"
        channel = await connection.channel()
        await channel.queue_declare(stream, arguments=STREAM)
        await channel.confirm_select()
        for number in range(1_000):
            channel.publish("", stream, b"%d" % number, {"x-lrq-first": str(number)})
        await channel.confirmed()
        got: list[tuple[int, bytes]] = []

        def take(tag: int, redelivered: bool, exchange: str, routing_key: str, header: bytes, body: bytes) -> None:
            value = content_header.header_value(header, b"x-lrq-first")
            assert value == body
            table = decode.field_table(header[14:])[1]
            offset = table["x-stream-offset"]
            assert isinstance(offset, int)
            got.append((offset, body))
            channel.ack(tag)

        await channel.qos(100)
        await channel.consume(stream, take, arguments={"x-stream-offset": "first"})
        await until(lambda: len(got) == 1_000)
        assert got == [(n, b"%d" % n) for n in range(1_000)]
        await channel.queue_delete(stream)

    loops(with_connection(Address.parse(lab.nodes["c1"].admin, "lrq"), main))


def test_a_callback_that_fails_ends_the_connection(url: str) -> None:
    async def main() -> None:
        ends: list[Any] = []
        connection = await opened(url, on_close=ends.append)
        channel = await connection.channel(on_confirm=lambda *_: 1 // 0)  # type: ignore[arg-type]
        await channel.confirm_select()
        channel.publish("", "is-not-there", b"")
        await until(lambda: ends)
        assert isinstance(ends[0].__cause__, ZeroDivisionError)
        with pytest.raises(ConnectionClosed):
            await channel.confirmed()
        await connection.close()
        assert len(ends) == 1

    asyncio.run(main())


def test_closing_while_publishing_loses_nothing_that_was_sent(url: str, loops: Any) -> None:
    async def main() -> None:
        queue = f"closing-{time.time_ns()}"
        ends: list[Any] = []
        connection = await opened(url, on_close=ends.append)
        channel = await connection.channel()
        await channel.queue_declare(queue)
        for _ in range(20_000):
            channel.publish("", queue, b"x" * 200)
        await connection.close()
        assert ends == [None]
        with pytest.raises(ConnectionClosed):
            channel.publish("", queue, b"")
        with pytest.raises(ConnectionClosed):
            await connection.channel()
        connection = await opened(url)
        channel = await connection.channel()
        assert await channel.queue_delete(queue) == 20_000
        await connection.close()
        await connection.close()

    loops(main())


def test_an_abort_reaches_everyone_who_waits(url: str, loops: Any) -> None:
    async def main() -> None:
        ends: list[Any] = []
        connection = await opened(url, on_close=ends.append)
        channel = await connection.channel()
        await channel.queue_declare("abort", exclusive=True)
        await channel.confirm_select()
        channel.publish("", "abort", b"")
        waiting = [asyncio.ensure_future(channel.confirmed()), asyncio.ensure_future(channel.flow())]
        await asyncio.sleep(0)
        connection.abort()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, ConnectionClosed) for result in results)
        assert len(ends) == 1

    loops(main())


def test_the_broker_ends_the_connection(lab: Lab, url: str) -> None:
    async def main() -> None:
        ends: list[ConnectionClosed] = []
        connection = await opened(url, on_close=ends.append)
        await asyncio.to_thread(lab.ctl, "c1", "close_all_connections", "enough")
        await until(lambda: ends)
        assert ends == [connection.error]
        assert (ends[0].code, ends[0].retriable) == (320, True)
        assert "enough" in ends[0].text

    asyncio.run(main())


@pytest.mark.full
def test_a_stalled_broker_is_noticed(lab: Lab, url: str, loops: Any) -> None:
    async def main() -> None:
        ends: list[Any] = []
        connection = await opened(url, heartbeat_s=BEAT_S, on_close=ends.append)
        await asyncio.sleep(2.5 * BEAT_S)
        assert connection.error is None  # heartbeats alone keep it
        lab.stop("c1.broker")
        try:
            began = time.monotonic()
            channel = connection.channel()
            with pytest.raises(ConnectionClosed, match="two heartbeats"):
                await channel
            assert time.monotonic() - began > 0.9 * BEAT_S, "not at the first heartbeat that is late"
            assert ends == [connection.error]
        finally:
            lab.cont("c1.broker")

    loops(main())


def test_writing_to_a_stalled_broker_pauses(lab: Lab, url: str, loops: Any) -> None:
    async def main(connection: Connection) -> None:
        channel = await connection.channel()
        await channel.queue_declare("pause", exclusive=True)
        await channel.confirm_select()
        lab.stop("c1.broker")
        try:
            for _ in range(2_000):
                if connection.paused:
                    break
                channel.publish("", "pause", b"x" * 65_536)
                await asyncio.sleep(0)
            assert connection.paused
            waiting = asyncio.ensure_future(connection.drained())
            await asyncio.sleep(0.05)
            assert not waiting.done()
        finally:
            lab.cont("c1.broker")
        await waiting
        await channel.confirmed()
        assert not connection.paused

    loops(with_connection(url, main))


def test_an_alarm_is_told(lab: Lab, url: str) -> None:
    async def main(connection: Connection) -> None:
        channel = await connection.channel()
        await channel.queue_declare("alarm", exclusive=True)
        await channel.confirm_select()
        await asyncio.to_thread(lab.ctl, "c1", "set_vm_memory_high_watermark", "0")
        try:
            channel.publish("", "alarm", b"x")
            await until(lambda: told)
            assert told[0] == connection.blocked == "low on memory"
        finally:
            await asyncio.to_thread(lab.ctl, "c1", "set_vm_memory_high_watermark", "0.6")
        await until(lambda: len(told) == 2)
        assert told[1] is None
        assert connection.blocked is None
        await channel.confirmed()

    told: list[str | None] = []
    asyncio.run(with_connection(url, main, on_blocked=told.append))


@pytest.mark.parametrize(("size", "count", "window"), [(1_024, 20_000, 5_000), (65_536, 3_000, 400)])
def test_many_publishes_with_a_window_and_reading_them_again(url: str, size: int, count: int, window: int) -> None:
    """Back-pressure both ways: what the socket does not take yet, and what is not confirmed. All are in the stream, in order."""

    async def main(connection: Connection) -> None:
        queue = f"window-{size}"
        channel: Channel = await connection.channel()
        await channel.queue_declare(queue, arguments=STREAM)
        await channel.confirm_select()
        header = content_header.header_payload(size, content_header.properties(content_header.field(b"x-lrq-id", b"rate/1234567")))
        for number in range(1, count + 1):
            channel.publish_content("", queue, header, b"%08d" % number + b"x" * (size - 8))
            if number % 200 == 0:
                if connection.paused:
                    await connection.drained()
                await channel.confirmed(number - window)
        await channel.confirmed()
        assert channel.refused == 0
        seen: list[int] = []

        def take(tag: int, *rest: Any) -> None:
            seen.append(int(rest[-1][:8]))
            if tag % 100 == 0:
                channel.ack(tag, multiple=True)

        await channel.qos(500)
        await channel.consume(queue, take, arguments={"x-stream-offset": "first"})
        await until(lambda: len(seen) >= count)
        assert seen == list(range(1, count + 1))
        await channel.queue_delete(queue)

    uvloop.run(with_connection(url, main))


def test_a_door_that_speaks_nonsense_after_the_login_is_given_up() -> None:
    """No broker can be made to send malformed frames, so a few bytes stand in for one here."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        writer.write(encode.method_frame(0, commands.Connection.Start(server_properties={"product": "test"})))
        await reader.readuntil(b"en_US\xce")
        writer.write(encode.method_frame(0, commands.Connection.Tune(0, 0, 0)))
        await asyncio.sleep(0.05)
        writer.write(encode.method_frame(0, commands.Connection.OpenOk()))
        await asyncio.sleep(0.05)
        writer.write(b"\x07nonsense")
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        ends: list[Any] = []
        connection = await opened(f"amqp://127.0.0.1:{server.sockets[0].getsockname()[1]}", on_close=ends.append)
        await until(lambda: connection.error)
        assert connection.error is not None
        assert connection.error.code == 501
        server.close()

    asyncio.run(main())
