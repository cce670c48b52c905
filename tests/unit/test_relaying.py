"""A relay between real sockets, with a primary's door that the test plays: how it ends, in the middle of whatever, and what it holds meanwhile."""

from __future__ import annotations

import asyncio
import struct
import tomllib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop
from node_config import MINIMAL
from pamqp import commands

from broker_plugin.amqp import encode, frames, sasl
from broker_plugin.amqp.address import Address
from broker_plugin.door import relay
from broker_plugin.door.peer import Host
from broker_plugin.door.relay import Primary
from broker_plugin.door.server import Door
from lrq_ha.lab.ports import free_ports
from lrq_ha.sidecar.config import Config

START = encode.method_frame(0, commands.Connection.Start(0, 9, {"product": "RabbitMQ"}, "PLAIN AMQPLAIN", "en_US"))
START_OK = encode.method_frame(0, commands.Connection.StartOk({}, "PLAIN", "\0app\0secret", "en_US"))
TUNE = encode.method_frame(0, commands.Connection.Tune(10, 8192, 0))
OPEN_OK = encode.method_frame(0, commands.Connection.OpenOk())
CLOSE_OK = encode.method_frame(0, commands.Connection.CloseOk())
BODY = encode.frame(frames.BODY, 1, b"x" * 1000)
TIMEOUT_S = 30.0


class Wire:
    """One side of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def expect(self, data: bytes) -> None:
        got = await self.reader.readexactly(len(data))
        assert got == data, got

    async def frame(self) -> bytes:
        head = await self.reader.readexactly(7)
        return head + await self.reader.readexactly(struct.unpack_from(">I", head, 3)[0] + 1)

    async def closes(self) -> str:
        """The reason in the connection.close that comes next; it is answered, and nothing comes behind it."""
        method: Any = frames.decode_method((await self.frame())[7:-1])
        assert method.reply_code == 320
        self.writer.write(CLOSE_OK)
        assert await self.reader.read() == b""
        return str(method.reply_text)


class Relayed:
    """A door of a backup, a primary's door that the test plays, and one client between them, logged in."""

    def __init__(self) -> None:
        self.primary, self.client = cast(Wire, None), cast(Wire, None)
        self.leads: Primary | None = None
        self.door = cast(Door, None)
        self.accepted: asyncio.Queue[Wire] = asyncio.Queue()

    async def run(self, body: Callable[[Relayed], Awaitable[None]], **limits: Any) -> None:
        accepted = self.accepted
        server = await asyncio.start_server(lambda r, w: accepted.put_nowait(Wire(r, w)), "127.0.0.1", 0)
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1], "lrq", "between")
        self.leads = Primary(2, "e2", address)
        port = next(free_ports())
        config = Config.model_validate(tomllib.loads(MINIMAL.replace("5672", str(next(free_ports())))))  # no broker is there
        table = config.door.model_copy(update={"when_backup": "forward", "listen": f"127.0.0.1:{port}", **limits})
        self.door = door = Door(replace(config.door_settings, limits=table))
        door.broker_start = START[7:-1]
        door.host = cast(Host, SimpleNamespace(primary=lambda: self.leads, refusal=lambda: "not primary", peer_gone=lambda _: None))
        await door.start()
        try:
            self.client = Wire(*await asyncio.open_connection("127.0.0.1", port))
            self.client.writer.write(frames.PROTOCOL_HEADER)
            await self.client.expect(START)
            self.client.writer.write(START_OK)
            self.primary = await accepted.get()
            await self.primary.expect(frames.PROTOCOL_HEADER)
            self.primary.writer.write(START)
            answer = sasl.parse_start_ok((await self.primary.frame())[7:-1])
            host, own_port = self.client.writer.get_extra_info("sockname")
            assert sasl.claimed_address(answer, sasl.Credentials(b"lrq", b"between")) == f"{host}:{own_port}"
            self.primary.writer.write(TUNE + OPEN_OK)
            await self.client.expect(TUNE + OPEN_OK)
            await body(self)
        finally:
            await door.close()
            for wire in (self.client, self.primary):
                if wire is not None:
                    wire.writer.transport.abort()
            server.close()


def relayed(body: Callable[[Relayed], Awaitable[None]], **limits: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await Relayed().run(body, **limits)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


def test_bytes_pass_both_ways_and_a_clients_end_passes_after_its_bytes() -> None:
    async def body(it: Relayed) -> None:
        assert len(it.door.relays) == 1
        it.primary.writer.write(BODY)
        await it.client.expect(BODY)
        it.primary.writer.transport.pause_reading()  # type: ignore[attr-defined]
        it.client.writer.write(BODY * 20_000)
        it.client.writer.close()
        while it.door.relays:
            await asyncio.sleep(0.01)
        it.primary.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await it.primary.expect(BODY * 20_000)
        assert await it.primary.reader.read() == b""

    relayed(body, connection_buffer_bytes_max=64 << 20)


def test_the_reason_stands_behind_a_whole_frame_when_the_primary_is_lost() -> None:
    async def body(it: Relayed) -> None:
        it.primary.writer.write(BODY + BODY[:500])
        await it.client.expect(BODY)
        it.client.writer.write(BODY[:300])  # whatever it is in the middle of
        it.primary.writer.transport.abort()
        assert "the connection to e2 is lost" in await it.client.closes()

    relayed(body)


def test_another_primary_ends_it() -> None:
    async def body(it: Relayed) -> None:
        it.door.check_relays()
        it.leads = Primary(1, "e1", None)
        it.door.check_relays()
        assert await it.client.closes() == "e2 is no longer primary, e1 is: connect again"
        assert await it.primary.reader.read() == b""

    relayed(body)


def test_a_primary_that_is_not_heard_ends_it_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(it: Relayed) -> None:
        leads, it.leads = it.leads, None
        it.door.check_relays()
        it.leads = leads
        it.door.check_relays()
        await asyncio.sleep(0.1)
        it.leads = None
        it.door.check_relays()
        assert it.door.relays, "its time begins when it is not heard"
        await asyncio.sleep(0.1)
        host, it.door.host = it.door.host, None
        it.door.check_relays()
        assert it.door.relays, "without an incarnation this node knows nothing"
        it.door.host = host
        it.door.check_relays()
        await asyncio.sleep(0.1)
        it.door.check_relays()
        assert "has not heard its primary e2" in await it.client.closes()

    monkeypatch.setattr(relay, "UNHEARD_S", 0.05)
    monkeypatch.setattr("broker_plugin.door.gate.UNHEARD_S", 0.05)
    relayed(body)


def test_the_primarys_own_close_is_the_only_one() -> None:
    async def body(it: Relayed) -> None:
        it.primary.writer.write(encode.connection_close(320, "e2 hands over to e1"))
        assert b"hands over" in await it.client.frame()
        it.client.writer.write(CLOSE_OK)
        await it.primary.expect(CLOSE_OK)
        it.primary.writer.close()
        assert await it.client.reader.read() == b""

    relayed(body)


def test_bytes_that_are_no_frames_do_not_reach_the_client() -> None:
    async def body(it: Relayed) -> None:
        it.primary.writer.write(BODY + BODY[:-1] + b"?")
        assert "not understood" in await it.client.closes()

    relayed(body)


@pytest.mark.parametrize("side", ["client", "primary"])
def test_a_side_that_does_not_read_holds_up_the_other(side: str) -> None:
    async def body(it: Relayed) -> None:
        wires = {"client": it.client, "primary": it.primary}
        deaf, other = wires.pop(side), wires.popitem()[1]
        deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
        other.writer.transport.set_write_buffer_limits(0)
        chunk, sent = BODY * 1000, 0
        while True:
            other.writer.write(chunk)
            sent += 1
            try:
                async with asyncio.timeout(0.5):
                    await other.writer.drain()
            except TimeoutError:
                break
            assert sent < 100, "nothing holds it up"
        assert 0 < it.door.waiting_bytes < 4 << 20
        deaf.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await deaf.expect(chunk * sent)
        assert it.door.waiting_bytes == 0

    relayed(body, client_buffer_bytes_max=1 << 16, connection_buffer_bytes_max=1 << 16)


def test_of_all_that_do_not_read_the_one_that_is_behind_longest_is_closed() -> None:
    async def body(it: Relayed) -> None:
        it.client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        other = cast(Any, type("Other", (), {"user": "other"})())
        for _ in range(20):
            it.primary.writer.write(BODY * 1000)
        while not it.door.waiting_bytes:
            await asyncio.sleep(0.01)
        it.door.client_full(other, 1 << 20)
        assert it.door.counters["closed_slow"] == 1
        it.client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        with suppress(ConnectionError):
            await it.client.reader.read(-1)
        while it.door.connections:
            await asyncio.sleep(0.01)

    relayed(body, client_buffer_bytes_max=1 << 16, client_buffers_bytes_max=1 << 20)


def test_a_stop_waits_for_what_the_primary_still_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "QUIET_S", 0.2)

    async def body(it: Relayed) -> None:
        stopping = asyncio.create_task(it.door.stop())
        for _ in range(4):
            await asyncio.sleep(0.05)
            it.primary.writer.write(BODY)
        await it.client.expect(BODY * 4)
        assert await it.client.closes() == "this sidecar stops"
        await stopping
        assert not it.door.relays

    relayed(body)


def test_a_login_that_the_primary_does_not_finish_ends_with_the_reason() -> None:
    async def body(it: Relayed) -> None:
        client = Wire(*await asyncio.open_connection(*it.client.writer.get_extra_info("peername")))
        client.writer.write(frames.PROTOCOL_HEADER)
        await client.expect(START)
        client.writer.write(START_OK)
        primary = await it.accepted.get()
        primary.writer.write(START)
        assert "e2 has not finished the login" in await client.closes()
        assert it.door.admissions.open == 1

    relayed(body, handshake_timeout_s=0.8)


def test_a_client_that_gives_up_leaves_nothing() -> None:
    """At whatever step of its login, and at once."""

    async def body(it: Relayed) -> None:
        for step in range(3):
            client = Wire(*await asyncio.open_connection(*it.client.writer.get_extra_info("peername")))
            client.writer.write(frames.PROTOCOL_HEADER)
            await client.expect(START)
            client.writer.write(START_OK)
            primary = await it.accepted.get()
            if step:
                primary.writer.write(START)
                await primary.expect(frames.PROTOCOL_HEADER)
                await primary.frame()
            if step == 2:
                primary.writer.write(TUNE)
                await client.expect(TUNE)
            client.writer.transport.abort()
            while it.door.connections > 1:
                await asyncio.sleep(0.01)
            primary.writer.transport.abort()
        assert len(it.door.relays) == 1

    relayed(body)


@pytest.mark.parametrize("properties", [{"lrq_node": 3}, {"lrq_site": "west"}, {"lrq_relayed": "192.0.2.1:5"}])
def test_a_node_a_site_and_a_client_that_was_relayed_already_are_not_relayed(properties: dict[str, Any]) -> None:
    async def body(it: Relayed) -> None:
        client = Wire(*await asyncio.open_connection(*it.client.writer.get_extra_info("peername")))
        client.writer.write(frames.PROTOCOL_HEADER)
        await client.expect(START)
        client.writer.write(encode.method_frame(0, commands.Connection.StartOk(properties, "PLAIN", "\0app\0secret", "en_US")))
        assert await client.closes() == "the broker beside this sidecar does not answer"
        assert it.accepted.empty()

    relayed(body)


def test_a_client_is_refused_by_a_login_here_where_the_primary_does_not_answer() -> None:
    async def body(it: Relayed) -> None:
        client = Wire(*await asyncio.open_connection(*it.client.writer.get_extra_info("peername")))
        client.writer.write(frames.PROTOCOL_HEADER)
        await client.expect(START)
        client.writer.write(START_OK)
        primary = await it.accepted.get()
        primary.writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        assert await client.closes() == "the broker beside this sidecar does not answer"

    relayed(body)
