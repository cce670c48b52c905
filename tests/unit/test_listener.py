"""What the door's listener sees to, whoever connects."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any, cast

from broker_plugin.door.admission import Admission, AdmissionControl
from broker_plugin.door.listener import Listener


def test_who_asks_for_no_heartbeats_is_noticed_when_his_host_vanishes() -> None:
    """What such a client held was held for ever."""
    made: list[Any] = []

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            made.append(transport)

    async def run() -> None:
        admitted = cast(Admission, SimpleNamespace(host="127.0.0.1"))
        listener = Listener(lambda *_: admitted, AdmissionControl(1, 0), lambda *_: Protocol(), tls=None, handshake_timeout_s=1.0)
        await listener.listen("127.0.0.1", 0)
        with socket.create_connection(listener._sockets[0].getsockname()):
            while not made:
                await asyncio.sleep(0.01)
            accepted = made[0].get_extra_info("socket")
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
            idle, every, times = (accepted.getsockopt(socket.IPPROTO_TCP, option) for option in options)
            assert idle + every * times <= 120
            made[0].abort()
        listener.close()

    asyncio.run(run())
