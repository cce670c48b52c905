"""Closes a client's connection: sends connection.close, waits for the client's close-ok, then closes; within ANSWER_S.

Rules:
- Until the close-ok comes, the client's data is read and dropped. (A close with unread bytes would make TCP reset the connection, and the client
  might never see the reason.)
- A client that does not answer, or does not even read, is cut off in time.
"""

from __future__ import annotations

import asyncio

from ..amqp import encode, frames
from ..amqp.frames import CONNECTION_CLOSE, CONNECTION_CLOSE_OK, FrameError, scan

ANSWER_S = 2.0
_CLOSE_OK_FRAME = encode.raw_method_frame(0, CONNECTION_CLOSE_OK)


def say(transport: asyncio.Transport, code: int, text: str, pending: bytes = b"", cause: int = 0) -> None:
    """Ends the connection with connection.close.

    Args:
        transport: The client's. Its protocol is told only of its end.
        code, text: The reason.
        pending: The beginning of a frame that has come already.
        cause: ID of the method that is wrong; 0 for none.
    """
    if transport.is_closing():
        return
    transport.write(encode.connection_close(code, text, cause))
    hand_over(transport, pending)


def hand_over(transport: asyncio.Transport, pending: bytes = b"") -> None:
    """The client has got its connection.close; only its answer is waited for."""
    goodbye = _Farewell(transport, pending)
    transport.set_protocol(goodbye)
    transport.resume_reading()


def end(transport: asyncio.Transport) -> None:
    """Closes a transport when its pending bytes are written, within ANSWER_S seconds."""
    transport.close()
    asyncio.get_running_loop().call_later(ANSWER_S, transport.abort)


class _Farewell(asyncio.Protocol):
    def __init__(self, transport: asyncio.Transport, pending: bytes) -> None:
        self._transport = transport
        self._before = transport.get_protocol()
        self._left = pending
        self._timer = asyncio.get_running_loop().call_later(ANSWER_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        try:
            data = self._left + data
            if data.endswith(_CLOSE_OK_FRAME):  # also where `pending` was not known: nothing comes behind it
                self._transport.close()
                return
            items, used = scan(data, 0, frames.FRAME_MAX_BYTES, 0)
        except FrameError:
            self._left = b""  # later bytes cannot be parsed: only the time limit is left
            return
        self._left = data[used:]
        if any(item[0] in (CONNECTION_CLOSE, CONNECTION_CLOSE_OK) for item in items):
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._before.connection_lost(exc)
