"""Reads the PROXY protocol's header off a socket that has just been accepted, and nothing behind it: TLS or AMQP begins there."""

from __future__ import annotations

import asyncio
import socket

from ..amqp.proxy_header import (
    SIGNATURE,
    V1_BEGINNING,
    V1_BYTES_MAX,
    V1_END,
    V2_HEAD_BYTES,
    End,
    ProxyHeaderError,
    parse_v1,
    parse_v2,
    rest_of_v2,
)


async def read_proxy_header(accepted: socket.socket) -> tuple[End, End] | None:
    """Returns the ends that the header names; None if there is no header, or it names none.

    Args:
        accepted: Not blocking. A header begins like nothing else that a door takes.

    Raises:
        ProxyHeaderError: The bytes begin as a header and are none, or end within it.
        OSError: The connection is lost.
    """
    first = await _peek(accepted)
    if first == SIGNATURE[:1]:
        head = await _read(accepted, V2_HEAD_BYTES)
        return parse_v2(head, await _read(accepted, rest_of_v2(head)))
    if first != V1_BEGINNING[:1]:
        return None
    line = b""
    while not line.endswith(V1_END):
        line += await _read(accepted, 1)
        if len(line) > V1_BYTES_MAX or not V1_BEGINNING.startswith(line[: len(V1_BEGINNING)]):
            raise ProxyHeaderError("neither AMQP nor a header of the PROXY protocol")
    return parse_v1(line)


async def _read(accepted: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await asyncio.get_running_loop().sock_recv(accepted, size - len(data))
        if not more:
            raise ProxyHeaderError("the connection ended within a header of the PROXY protocol")
        data += more
    return data


async def _peek(accepted: socket.socket) -> bytes:
    """The next byte, which stays; nothing at the end of the connection."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return accepted.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            readable = asyncio.Event()
            loop.add_reader(accepted.fileno(), readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(accepted.fileno())
