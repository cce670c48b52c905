"""Making a connection: what a name server that does not answer may not do; and who has left it. All else: tests/integration/test_client.py."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest

from broker_plugin.amqp.address import Address
from broker_plugin.amqp.connect import connect, hung_up


def address(host: str, port: int) -> Address:
    return Address.parse(f"amqp://user:password@{host}:{port}/vhost")


def test_a_name_that_is_not_answered_holds_one_thread() -> None:
    """Whoever gives up and tries again waits for the lookup that is under way; other names are looked up meanwhile."""
    asked: list[str] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        answer = asyncio.Event()

        async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
            asked.append(host)
            if host == "silent":
                await answer.wait()
            if host == "nowhere":
                raise socket.gaierror("no such name")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (refuses, port)) for refuses in ("127.0.0.9", "127.0.0.1")]

        loop.getaddrinfo = getaddrinfo  # type: ignore[method-assign, assignment]
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await connect(address("silent", port), asyncio.Protocol())
        await connect(address("other", port), asyncio.Protocol())
        for _ in range(2):
            with pytest.raises(socket.gaierror, match="no such name"):
                await connect(address("nowhere", port), asyncio.Protocol())
        answer.set()
        await connect(address("silent", port), asyncio.Protocol())
        server.close()

    asyncio.run(run())
    assert [host for host in asked if not host[0].isdigit()] == ["silent", "other", "nowhere", "nowhere"]


@pytest.mark.parametrize("how", ["closed", "reset", "half"])
def test_who_has_hung_up_is_noticed_though_nothing_is_read(how: str) -> None:
    """Also behind what it has sent before, of which the first part only was read."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = socket.create_server(("127.0.0.1", 0))
        transport, _ = await loop.create_connection(asyncio.Protocol, *server.getsockname())
        other, _ = server.accept()
        transport.pause_reading()
        other.sendall(b"x" * 100_000)
        await asyncio.sleep(0.05)
        assert not hung_up(transport)
        if how == "half":
            other.shutdown(socket.SHUT_WR)
        else:
            if how == "reset":
                other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            other.close()
        await asyncio.sleep(0.05)
        assert hung_up(transport)
        transport.abort()
        await asyncio.sleep(0.05)
        assert not hung_up(transport), "nor is one that is closed here"
        server.close()
        other.close()

    asyncio.run(run())
